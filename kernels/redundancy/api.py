"""Redundancy of the stored keys, as R-KV defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..availability import choose_implementation
from ..stored_keys import check_stored_keys


def redundancy(
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    *,
    similarity_threshold: float,
    key_scales: Sequence[torch.Tensor] | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """How much each stored key repeats the others of its head, for all layers.

    R-KV (https://arxiv.org/abs/2505.24133): the cosine similarities between all keys of a head,
    with the diagonal cleared and, in each row, the last key above `similarity_threshold` cleared
    as well; averaged over the rows, softmaxed over the keys.

    Args:
        keys: one `[B, H, C, D]` a layer, by slot; float32, float16, bfloat16 or int8. Layers
            may differ in `C` only. All have to be finite.
        order: one `[B, H, C]` int32 a layer, the slot of the i-th oldest token; None: slot i.
        lengths: `[L, B, H]` int32, tokens stored, at most `stored` and the layer's `C`; expanded
            tensors are fine. Nothing stored beyond is read.
        stored: `S`, the most tokens stored by any head.
        similarity_threshold: in [-1, 1].
        key_scales: one `[B, H, C]` float32 a layer, by which int8 keys are multiplied.
        implementation: `"auto"`, `"reference"` or `"triton"`.

    Returns:
        `[L, B, H, S]` float32 by sequence index, 0 where nothing is stored; each head sums to 1.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, stride, device or option is wrong.
        RuntimeError: `implementation="triton"` cannot run here.
    """
    check_stored_keys(keys, order, lengths, stored, key_scales)
    if not -1 <= similarity_threshold <= 1:
        raise ValueError(
            f"similarity_threshold must be a number in [-1, 1], got {similarity_threshold!r}."
        )
    return _redundancy(
        list(keys),
        list(order or ()),
        lengths,
        stored,
        float(similarity_threshold),
        list(key_scales or ()),
        implementation,
    )


# An operator takes no list that may be None: an empty one stands for it.
@torch.library.custom_op(
    "sparse_budget_cache::redundancy",
    mutates_args=(),
    schema=(
        "(Tensor[] keys, Tensor[] order, Tensor lengths, SymInt stored, "
        "float similarity_threshold, Tensor[] key_scales, str implementation) -> Tensor"
    ),
)
def _redundancy(
    keys: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    stored: int,
    similarity_threshold: float,
    key_scales: list[torch.Tensor],
    implementation: str,
) -> torch.Tensor:
    if choose_implementation(implementation, keys[0].device) == "triton":
        from . import triton as chosen
    else:
        from . import reference as chosen  # type: ignore[no-redef]
    return chosen.redundancy(
        keys, order or None, lengths, stored, similarity_threshold, key_scales or None
    )


@_redundancy.register_fake
def _(
    keys: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    stored: int,
    similarity_threshold: float,
    key_scales: list[torch.Tensor],
    implementation: str,
) -> torch.Tensor:
    return lengths.new_empty((*lengths.shape, stored), dtype=torch.float32)
