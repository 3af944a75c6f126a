"""Window importance: what R-KV, SnapKV and TOVA ask of the last queries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..availability import choose_implementation
from ..stored_keys import (
    FLOATS,
    check_layers,
    check_rows_contiguous,
    check_stored_keys,
    check_tensor,
)

NORMALIZATIONS = ("older", "causal")
GROUP_REDUCTIONS = ("mean", "max")
# Query heads that share a key: with more, one query of each no longer fits a tile.
_LARGEST_GROUP = 128


def window_importance(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    *,
    window: int,
    scaling: float,
    normalization: str = "older",
    group_reduction: str = "mean",
    key_scales: Sequence[torch.Tensor] | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """How much the last queries attend to each stored key, for all layers; without pooling.

    `"older"` (R-KV, https://arxiv.org/abs/2505.24133): the logits of the queries against the keys
    older than the window, reduced over the query heads of a group, softmaxed over those keys,
    averaged over the queries. The last `window` keys get 0.

    `"causal"` (SnapKV, https://arxiv.org/abs/2404.14469; TOVA, https://arxiv.org/abs/2401.06104):
    the attention of each query head over all stored keys that are not younger than the query,
    averaged over the queries, then reduced over the group. A head that stores fewer tokens than
    there are queries averages over as many of the last queries.

    Args:
        queries: one `[B, Hq, W, D]` a layer, the newest stored token's query last; float32,
            float16 or bfloat16 as the keys, or any of them with int8 keys. `Hq = G * H`.
        keys: one `[B, H, C, D]` a layer, by slot; float32, float16, bfloat16 or int8. Layers
            may differ in `C` only. All have to be finite.
        order: one `[B, H, C]` int32 a layer, the slot of the i-th oldest token; None: slot i.
        lengths: `[L, B, H]` int32, tokens stored, at most `stored` and the layer's `C`; expanded
            tensors are fine. Nothing stored beyond is read.
        stored: `S`, the most tokens stored by any head.
        window: for `"older"`, how many of the newest keys are left out; at least `W`. `"causal"`
            needs none and ignores it.
        scaling: factor of the logits.
        normalization: `"older"` or `"causal"`.
        group_reduction: `"mean"` or `"max"` over the query heads of a group.
        key_scales: one `[B, H, C]` float32 a layer, by which int8 keys are multiplied.
        implementation: `"auto"`, `"reference"` or `"triton"`.

    Returns:
        `[L, B, H, S]` float32 by sequence index, 0 where nothing is stored.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, stride, device or option is wrong.
        RuntimeError: `implementation="triton"` cannot run here.
    """
    check_stored_keys(keys, order, lengths, stored, key_scales)
    _check_queries(queries, keys)
    _check_options(queries[0].shape[2], window, scaling, normalization, group_reduction)
    return _window_importance(
        list(queries),
        list(keys),
        list(order or ()),
        lengths,
        stored,
        window,
        float(scaling),
        normalization,
        group_reduction,
        list(key_scales or ()),
        implementation,
    )


def _check_queries(queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> None:
    check_layers("queries", queries, len(keys))
    rows, heads, _, size = keys[0].shape
    dtypes = FLOATS if keys[0].dtype == torch.int8 else (keys[0].dtype,)
    first = queries[0]
    for layer, each in enumerate(queries):
        name = f"queries[{layer}]"
        check_tensor(name, each, 4, dtypes, keys[0].device)
        if each.dtype != first.dtype:
            raise TypeError(
                f"{name} must be {first.dtype} like queries[0], and it is {each.dtype}."
            )
        if each.shape != first.shape:
            raise ValueError(
                f"{name} must have the shape of queries[0], {tuple(first.shape)}, "
                f"and it is {tuple(each.shape)}."
            )
        if each.shape[0] != rows or each.shape[3] != size:
            raise ValueError(
                f"{name} must have {rows} rows and head size {size} like the keys, "
                f"and its shape is {tuple(each.shape)}."
            )
        if heads and (each.shape[1] % heads or not 0 < each.shape[1] <= _LARGEST_GROUP * heads):
            raise ValueError(
                f"{name} must have 1 to {_LARGEST_GROUP} query heads for each of the {heads} heads "
                f"of the keys, and it has {each.shape[1]}."
            )
        if each.shape[2] == 0:
            raise ValueError(
                f"{name} must hold the query of at least one token, "
                f"and its shape is {tuple(each.shape)}."
            )
        check_rows_contiguous(name, each)


def _check_options(
    queries: int, window: int, scaling: float, normalization: str, group_reduction: str
) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be 'older' or 'causal', got {normalization!r}.")
    if group_reduction not in GROUP_REDUCTIONS:
        raise ValueError(f"group_reduction must be 'mean' or 'max', got {group_reduction!r}.")
    if isinstance(window, bool) or not isinstance(window, int | torch.SymInt):
        raise TypeError(f"window must be an int, got {window!r}.")
    if normalization == "older" and window < queries:
        raise ValueError(
            f"window must be at least {queries}, the queries of a head in queries[0], "
            f"for normalization='older', got {window}."
        )
    if not math.isfinite(scaling):
        raise ValueError(f"scaling must be a finite number, got {scaling!r}.")


# An operator takes no list that may be None: an empty one stands for it.
@torch.library.custom_op(
    "sparse_budget_cache::window_importance",
    mutates_args=(),
    schema=(
        "(Tensor[] queries, Tensor[] keys, Tensor[] order, Tensor lengths, SymInt stored, "
        "SymInt window, float scaling, str normalization, str group_reduction, "
        "Tensor[] key_scales, str implementation) -> Tensor"
    ),
)
def _window_importance(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    stored: int,
    window: int,
    scaling: float,
    normalization: str,
    group_reduction: str,
    key_scales: list[torch.Tensor],
    implementation: str,
) -> torch.Tensor:
    if choose_implementation(implementation, keys[0].device) == "triton":
        from . import triton as chosen
    else:
        from . import reference as chosen  # type: ignore[no-redef]
    return chosen.window_importance(
        queries,
        keys,
        order or None,
        lengths,
        stored,
        window,
        scaling,
        normalization,
        group_reduction,
        key_scales or None,
    )


@_window_importance.register_fake
def _(
    queries: list[torch.Tensor],
    keys: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    stored: int,
    window: int,
    scaling: float,
    normalization: str,
    group_reduction: str,
    key_scales: list[torch.Tensor],
    implementation: str,
) -> torch.Tensor:
    return lengths.new_empty((*lengths.shape, stored), dtype=torch.float32)
