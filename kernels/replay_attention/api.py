"""The public function: what it accepts, and its registration for autograd and compiled graphs."""

from __future__ import annotations

from typing import Any

import torch

from ..availability import missing_for_triton
from . import gather, reference
from .validation import check

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")
_LARGEST_HEAD = 256
"""Head size up to which the Triton kernels serve."""


def replay_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Causal softmax attention in which each key is visible for a while only.

    Query `i` sees key `j` of its KV head when `j <= i < deaths[j]`. A padding column (death 0)
    neither sees nor is seen: its output is zeros, and nothing of it reaches another one, not even a
    NaN.

    `"torch"` gathers, for each period between two evictions of a row, the keys that are alive: the
    work is `T * (budget + interval)` pairs instead of `T * T / 2`. `"triton"` reads them where they
    are. The sums are in float32 (float64 for float64); against exact arithmetic on the same inputs
    the output is off by at most `2^-20 (16 + x + softcap) max |value|` and a rounding to the
    output's dtype (with `"triton"` also of the weights), where `x` is the largest
    `scaling * sum_d |q_d k_d|`. Two runs give the same bits.

    Args:
        query: `[B, Hq, T, D]`, a floating dtype. Query head `h` reads KV head `h // (Hq // H)`.
        key: `[B, H, T, D]`, of the dtype of the query.
        value: `[B, H, T, Dv]`, likewise.
        deaths: `[B, H, T]` int32, or `[B, 1, T]` for all heads alike. Kept on the device, but read
            by the host.
        scaling: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: `[Hq]` extra logits in the denominator (gpt-oss).
        implementation: `"reference"` makes the `[T, T]` matrix, `"torch"` gathers, `"triton"` reads
            the living keys in place (float16, bfloat16 and float32, heads up to 256); `"auto"` is
            `"triton"` on a GPU where it is installed, else `"torch"`. A name is never replaced.

    Returns:
        `[B, Hq, T, Dv]` in the dtype of the query. Differentiable once, in query, key, value and
        sinks.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, head counts do not divide, or the
            implementation is unknown.
        RuntimeError: `implementation="triton"` cannot run here.
    """
    check(query, key, value, deaths, sinks, scaling=scaling, softcap=softcap)
    implementation = _choose(implementation, query, value)
    if implementation == "reference":
        with torch.autocast(query.device.type, enabled=False):
            return reference.replay_attention(
                query, key, value, deaths, scaling=scaling, softcap=softcap, sinks=sinks
            )
    output, _ = _replay_attention(
        query, key, value, deaths, scaling, softcap, sinks, implementation
    )
    return output


def _choose(implementation: str, query: torch.Tensor, value: torch.Tensor) -> str:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    if implementation in ("reference", "torch"):
        return implementation
    missing = missing_for_triton(query.device)
    if query.dtype == torch.float64 or max(query.shape[3], value.shape[3]) > _LARGEST_HEAD:
        missing = f"heads larger than {_LARGEST_HEAD} and float64 are not served"
    if implementation == "auto":
        return "triton" if missing is None and query.device.type == "cuda" else "torch"
    if missing is not None:
        raise RuntimeError(f"implementation='triton' cannot run: {missing}.")
    return "triton"


def _module(implementation: str) -> Any:
    if implementation == "torch":
        return gather
    from . import triton

    return triton


@torch.library.custom_op("sparse_budget_cache::replay_attention", mutates_args=())
def _replay_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Sums are in float32 whatever the caller has set.
    with torch.autocast(query.device.type, enabled=False):
        return _module(implementation).forward(
            query, key, value, deaths, scaling=scaling, softcap=softcap, sinks=sinks
        )


@_replay_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length = query.shape[:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(batch, heads, length, value.shape[3]),
        query.new_empty(batch, heads, length, dtype=wide),
    )


@torch.library.custom_op("sparse_budget_cache::replay_attention_backward", mutates_args=())
def _backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.autocast(query.device.type, enabled=False):
        *grads, grad_sinks = _module(implementation).backward(
            grad_output,
            query,
            key,
            value,
            deaths,
            output,
            log_sum_exp,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
    # An operator cannot return None.
    return grads[0], grads[1], grads[2], query.new_empty(0) if grad_sinks is None else grad_sinks


@_backward.register_fake
def _(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
    return (
        grads[0],
        grads[1],
        grads[2],
        query.new_empty(0) if sinks is None else torch.empty_like(sinks),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, deaths, ctx.scaling, ctx.softcap, sinks, ctx.implementation = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, deaths, *output, *(() if sinks is None else (sinks,)))


def _differentiate(ctx: Any, grad_output: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    # A checkpoint lets them be asked for once.
    saved = ctx.saved_tensors
    *tensors, log_sum_exp = saved[:6]
    sinks = saved[6] if len(saved) > 6 else None
    grads = _backward(
        grad_output, *tensors, log_sum_exp, ctx.scaling, ctx.softcap, sinks, ctx.implementation
    )
    return (*grads[:3], None, None, None, None if sinks is None else grads[3], None)


_replay_attention.register_autograd(_differentiate, setup_context=_remember)
