"""Eviction in place, for all layers at once: plan what stays, then move as few rows as can be.

Two ways to bring the survivors of a head into its first `keep` slots:

* **Hole filling.** Survivors beyond `keep` move into the slots of evicted tokens below it. The two
  sets of slots are disjoint and have the same size, so rows move in any order and in parallel, and
  only the rows that must move do. Slots are then no longer in the order of the sequence; `order`
  tells where the i-th oldest token lies.
* **Compaction.** The survivors close ranks and stay in the order of the sequence.

Which tokens stay is `sparse_cache.selection.select_kept`, exactly: the last `window` stored tokens
and those at positions below `sinks`, then by score. Equal scores keep the more recent token, a NaN
counts as the lowest finite float, and infinities as the largest and lowest finite floats.

All sizes come from the host (`S`, `most_evicted`, `most_kept`), so nothing waits for the device.
"""

from __future__ import annotations

import torch

from ..availability import choose_implementation
from . import reference
from .types import HoleFilling, slot_dtype
from .validation import (
    check_counts,
    check_per_head,
    check_plan_fits,
    check_plan_inputs,
    check_plan_values,
    check_rows,
)

LARGEST_PLAN = 16384
"""Tokens of one head that the Triton plan takes: it holds their scores in registers."""

_LIBRARY = "sparse_budget_cache"


def plan_hole_filling(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_evicted: int,
    most_kept: int | None = None,
    record: bool = False,
    implementation: str = "auto",
) -> HoleFilling:
    """Choose the tokens that stay and the moves that bring them below `keep`, in one launch.

    `positions` and `order` are updated in place: afterwards their first `keep` entries are those of
    the survivors, `order` with the slots that they have once `fill_holes` ran. Entries beyond
    `keep` are unspecified. A head whose `keep` is at least its length is left as it is.

    The i-th oldest survivor that must move takes the slot of the i-th oldest evicted token that
    leaves one below `keep`: the same plan on every device.

    Args:
        scores: `[L, B, H, S]` float32 by index in the stored sequence, higher stays; contiguous in
            S. Entries at and beyond a head's length are ignored.
        positions: one tensor `[B, H, C]` int32 a layer, C at least S: positions of the stored
            tokens by index in the sequence, ascending.
        order: one tensor `[B, H, C]` int32 a layer: slot of each stored token by index in the
            sequence, a permutation of `0 .. length - 1`.
        lengths: `[L, B, H]` int32, possibly expanded: tokens stored, at most S.
        keep: `[L, B, H]` int32, possibly expanded: tokens that stay, at least `window` + `sinks`
            where any is evicted.
        window: most recent tokens that always stay.
        sinks: tokens at positions below this always stay.
        most_evicted: at least the largest `length - keep` of a head; M of the result is the
            smaller of this and S.
        most_kept: at least the largest number that stays in a head, needed with `record`; K of
            the result is the smaller of this and S.
        record: whether to return the indices of the survivors too.
        implementation: `"auto"`, `"reference"` or `"triton"`. "auto" also takes the reference for
            S above 16384.

    Returns:
        `HoleFilling` with `sources` and `targets` `[L, B, H, M]` int16 (int32 for S above 32768),
        `moves` `[L, B, H]` and `kept` `[L, B, H, K]` (None without `record`), both int32.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a tensor has the wrong shape, device or strides, a count is negative, or S is
            above 16384 with `"triton"`. On the CPU also if a count or `keep` is too small or a
            length too large; elsewhere that would have to wait for the device, and a count that is
            too small drops moves.
        RuntimeError: `"triton"` cannot run here.
    """
    check_counts(window=window, sinks=sinks, most_evicted=most_evicted, most_kept=most_kept or 0)
    if record and most_kept is None:
        raise ValueError("most_kept must be given with record=True: kept needs a size.")
    check_plan_inputs(scores, {"positions": positions, "order": order}, lengths, keep)
    stored = scores.shape[3]
    sources, targets, moves, kept = _plan_hole_filling(
        scores,
        positions,
        order,
        lengths,
        keep,
        window,
        sinks,
        min(most_evicted, stored),
        min(most_kept or 0, stored) if record else 0,
        record,
        implementation,
    )
    return HoleFilling(sources, targets, moves, kept if record else None)


def plan_compaction(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_kept: int,
    implementation: str = "auto",
) -> torch.Tensor:
    """Choose the tokens that stay, for storage in the order of the sequence, in one launch.

    Nothing is changed; pass the result to `compact` for every tensor by slot, positions included.

    Args:
        scores, positions, lengths, keep, window, sinks, implementation: as in `plan_hole_filling`.
        most_kept: at least the largest number that stays in a head; K of the result is the smaller
            of this and S.

    Returns:
        `[L, B, H, K]` int32: slots of the survivors, ascending. The first `min(keep, length)` are
        valid; the rest hold their own index.

    Raises:
        TypeError, ValueError, RuntimeError: as in `plan_hole_filling`.
    """
    check_counts(window=window, sinks=sinks, most_kept=most_kept)
    check_plan_inputs(scores, {"positions": positions}, lengths, keep)
    return _plan_compaction(
        scores,
        positions,
        lengths,
        keep,
        window,
        sinks,
        min(most_kept, scores.shape[3]),
        implementation,
    )


def fill_holes(
    tensors: list[torch.Tensor], plan: HoleFilling, *, implementation: str = "auto"
) -> None:
    """Move the rows of a plan in place, in one launch for all layers.

    Args:
        tensors: one `[B, H, C, D]` or `[B, H, C]` a layer, by slot, of one dtype (any) and row
            size; rows contiguous. C may differ between layers.
        plan: from `plan_hole_filling`, on the same device.
        implementation: `"auto"`, `"reference"` or `"triton"`.

    Raises:
        TypeError: a part of the plan has the wrong dtype.
        ValueError: a tensor has the wrong shape, dtype, device or strides.
        RuntimeError: `"triton"` cannot run here.
    """
    sources, targets, moves, _ = plan
    shape = _plan_shape("sources", sources)
    check_rows(tensors, shape)
    device = tensors[0].device if tensors else sources.device
    for name, each in (("sources", sources), ("targets", targets)):
        check_per_head(name, each, (*shape, sources.shape[3]), device, (torch.int16, torch.int32))
    check_per_head("moves", moves, shape, device)
    _fill_holes(tensors, sources, targets, moves, implementation)


def compact(
    tensors: list[torch.Tensor],
    kept: torch.Tensor,
    keep: torch.Tensor,
    *,
    implementation: str = "auto",
) -> None:
    """Move the token at slot `kept[j]` to slot `j` for all `j < keep`, in place, in one launch.

    Args:
        tensors: as in `fill_holes`.
        kept: `[L, B, H, K]` int32 from `plan_compaction`: `kept[j] >= j`, ascending.
        keep: `[L, B, H]` int32, possibly expanded, as given to `plan_compaction`.
        implementation: `"auto"`, `"reference"` or `"triton"`.

    Raises:
        TypeError: `kept` or `keep` has the wrong dtype.
        ValueError: a tensor has the wrong shape, dtype, device or strides.
        RuntimeError: `"triton"` cannot run here.
    """
    shape = _plan_shape("kept", kept)
    check_rows(tensors, shape)
    device = tensors[0].device if tensors else kept.device
    check_per_head("kept", kept, (*shape, kept.shape[3]), device)
    check_per_head("keep", keep, shape, device)
    _compact(tensors, kept, keep, implementation)


def _plan_shape(name: str, plan: torch.Tensor) -> tuple[int, int, int]:
    if not isinstance(plan, torch.Tensor):
        raise TypeError(f"{name} must be a tensor [L, B, H, N], got {type(plan).__name__}.")
    if plan.dim() != 4:
        raise ValueError(f"{name} must have shape [L, B, H, N], got {list(plan.shape)}.")
    layers, rows, heads, _ = plan.shape
    return layers, rows, heads


def _plan_with(implementation: str, scores: torch.Tensor) -> str:
    chosen = choose_implementation(implementation, scores.device)
    if chosen == "triton" and scores.shape[3] > LARGEST_PLAN:
        if implementation == "auto":
            return "reference"
        raise ValueError(
            f"scores must hold at most {LARGEST_PLAN} tokens a head for implementation='triton', "
            f"got {scores.shape[3]}; implementation='reference' takes any number."
        )
    return chosen


@torch.library.custom_op(
    f"{_LIBRARY}::plan_hole_filling",
    mutates_args=("positions", "order"),
    schema="(Tensor scores, Tensor(a!)[] positions, Tensor(b!)[] order, Tensor lengths, "
    "Tensor keep, int window, int sinks, int most_evicted, int most_kept, bool record, "
    "str implementation) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _plan_hole_filling(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    window: int,
    sinks: int,
    most_evicted: int,
    most_kept: int,
    record: bool,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = _plan_with(implementation, scores)
    check_plan_values(
        scores.shape[3],
        lengths,
        keep,
        window=window,
        sinks=sinks,
        most_evicted=most_evicted,
        most_kept=most_kept if record else None,
    )
    if chosen == "reference":
        plan = reference.plan_hole_filling
    else:
        from . import triton

        plan = triton.plan_hole_filling
    return plan(
        scores,
        positions,
        order,
        lengths,
        keep,
        window=window,
        sinks=sinks,
        most_evicted=most_evicted,
        most_kept=most_kept,
    )


@_plan_hole_filling.register_fake
def _(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    window: int,
    sinks: int,
    most_evicted: int,
    most_kept: int,
    record: bool,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = scores.shape[:3]
    return (
        scores.new_empty((*heads, most_evicted), dtype=slot_dtype(scores.shape[3])),
        scores.new_empty((*heads, most_evicted), dtype=slot_dtype(scores.shape[3])),
        scores.new_empty(heads, dtype=torch.int32),
        scores.new_empty((*heads, most_kept), dtype=torch.int32),
    )


@torch.library.custom_op(
    f"{_LIBRARY}::plan_compaction",
    mutates_args=(),
    schema="(Tensor scores, Tensor[] positions, Tensor lengths, Tensor keep, int window, "
    "int sinks, int most_kept, str implementation) -> Tensor",
)
def _plan_compaction(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    window: int,
    sinks: int,
    most_kept: int,
    implementation: str,
) -> torch.Tensor:
    chosen = _plan_with(implementation, scores)
    check_plan_values(
        scores.shape[3],
        lengths,
        keep,
        window=window,
        sinks=sinks,
        most_evicted=None,
        most_kept=most_kept,
    )
    if chosen == "reference":
        plan = reference.plan_compaction
    else:
        from . import triton

        plan = triton.plan_compaction
    return plan(scores, positions, lengths, keep, window=window, sinks=sinks, most_kept=most_kept)


@_plan_compaction.register_fake
def _(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    window: int,
    sinks: int,
    most_kept: int,
    implementation: str,
) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:3], most_kept), dtype=torch.int32)


@torch.library.custom_op(
    f"{_LIBRARY}::fill_holes",
    mutates_args=("tensors",),
    schema="(Tensor(a!)[] tensors, Tensor sources, Tensor targets, Tensor moves, "
    "str implementation) -> ()",
)
def _fill_holes(
    tensors: list[torch.Tensor],
    sources: torch.Tensor,
    targets: torch.Tensor,
    moves: torch.Tensor,
    implementation: str,
) -> None:
    check_plan_fits(tensors, sources=sources, targets=targets)
    if choose_implementation(implementation, sources.device) == "reference":
        reference.fill_holes(tensors, sources, targets, moves)
    else:
        from . import triton

        triton.fill_holes(tensors, sources, targets, moves)


@_fill_holes.register_fake
def _(
    tensors: list[torch.Tensor],
    sources: torch.Tensor,
    targets: torch.Tensor,
    moves: torch.Tensor,
    implementation: str,
) -> None:
    return None


@torch.library.custom_op(
    f"{_LIBRARY}::compact",
    mutates_args=("tensors",),
    schema="(Tensor(a!)[] tensors, Tensor kept, Tensor keep, str implementation) -> ()",
)
def _compact(
    tensors: list[torch.Tensor], kept: torch.Tensor, keep: torch.Tensor, implementation: str
) -> None:
    check_plan_fits(tensors, kept=kept)
    if choose_implementation(implementation, kept.device) == "reference":
        reference.compact(tensors, kept, keep)
    else:
        from . import triton

        triton.compact(tensors, kept, keep)


@_compact.register_fake
def _(
    tensors: list[torch.Tensor], kept: torch.Tensor, keep: torch.Tensor, implementation: str
) -> None:
    return None
