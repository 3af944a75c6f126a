"""The public function: what it accepts, and its registration for compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..availability import choose_implementation
from . import reference
from .validation import check, check_lengths


class DecodeAttention(NamedTuple):
    """What `decode_attention` returns."""

    output: torch.Tensor
    """`[B, Hq, 1, Dv]` in the dtype of the query; zeros where a head holds nothing."""
    log_sum_exp: torch.Tensor
    """`[B, Hq]` float32, natural logarithm; with the sink, so that `exp(logit - log_sum_exp)` is
    the probability of a key. -inf where a head holds nothing and there is no sink."""


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    implementation: str = "auto",
) -> DecodeAttention:
    """Attention of one query token over the stored tokens of one layer.

    Every stored token is visible; the order of the slots does not matter. Nothing beyond a length
    is read. Nothing is read back from the device with Triton, so the call can be captured in a
    CUDA graph and lengths may change between replays; the reference reads lengths and offsets.
    There is no gradient.

    Error bounds against exact arithmetic on the same inputs (`eps` of the query's dtype, `x` the
    largest `scaling * sum_d |q_d k_d|`; all tested):
    `log_sum_exp`: `e = 2^-22 (16 + x + softcap)`. Output: `(2 e + 1.5 eps) max |value|`, as weights
    and the output are rounded to the query's dtype. What `mass` gains: `2 e` of itself, and the
    rounding of the sum.

    Flash-decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html.

    Args:
        query: `[B, Hq, 1, D]` float16, bfloat16 or float32, `D` from 1 to 256. Query head `h` reads
            KV head `h // (Hq // H)`.
        keys: `[B, H, C, D]` by slot, in the dtype of the query, or int8 with `key_scales`.
        values: `[B, H, C, Dv]` by slot, `Dv` from 1 to 256, of the dtype of `keys`.
        lengths: `[B]` or `[B, H]` int32: slots `0 .. length - 1` hold tokens.
        scaling: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: `[Hq]` extra logits in the denominator (gpt-oss), of any floating dtype.
        key_scales: `[B, H, C]` float32: int8 key times scale is the key.
        value_scales: `[B, H, C]` float32, the same for values.
        offsets: `[B, H]` int64. Storage is then one pool for all heads of a row: keys
            `[B, 1, P, D]`, values `[B, 1, P, Dv]`, scales and mass `[B, 1, P]`, lengths `[B, H]`,
            and head `h` of row `b` owns slots `offsets[b, h] .. offsets[b, h] + lengths[b, h] - 1`.
        mass: `[B, H, C]` float32, changed in place: each key's attention probability, averaged over
            the query heads of its group, is added.
        implementation: `"auto"`, `"reference"` or `"triton"`; see `choose_implementation`.

    Returns:
        `(output [B, Hq, 1, Dv], log_sum_exp [B, Hq] float32)`.

    Raises:
        TypeError: a tensor has a dtype that is not named above.
        ValueError: a tensor has the wrong shape, device or stride, or head counts do not divide; on
            the CPU also if a length or offset is out of range, elsewhere lengths are cut.
        RuntimeError: `implementation="triton"` cannot run here.
    """
    check(
        query,
        keys,
        values,
        lengths,
        sinks,
        key_scales,
        value_scales,
        offsets,
        mass,
        scaling=scaling,
        softcap=softcap,
    )
    if lengths.dim() == 1:
        lengths = lengths[:, None].expand(-1, keys.shape[1])
    output, log_sum_exp = _decode_attention(
        query,
        keys,
        values,
        lengths,
        float(scaling),
        None if softcap is None else float(softcap),
        sinks,
        key_scales,
        value_scales,
        offsets,
        mass,
        choose_implementation(implementation, query.device),
    )
    return DecodeAttention(output, log_sum_exp)


@torch.library.custom_op("sparse_budget_cache::decode_attention", mutates_args=("mass",))
def _decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    mass: torch.Tensor | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]] = reference.decode_attention
    check_lengths(lengths, offsets, keys.shape[2])
    if implementation == "triton":
        from .triton import decode_attention as run
    return run(
        query,
        keys,
        values,
        lengths,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        key_scales=key_scales,
        value_scales=value_scales,
        offsets=offsets,
        mass=mass,
    )


@_decode_attention.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    mass: torch.Tensor | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, query_heads = query.shape[:2]
    return (
        query.new_empty(batch, query_heads, 1, values.shape[-1]),
        query.new_empty(batch, query_heads, dtype=torch.float32),
    )
