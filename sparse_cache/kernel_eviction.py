"""Evictions of all layers at once, by the kernels: a few launches instead of hundreds.

While decoding, layers fill in step, so their evictions wait for the end of the step and are done
together. Policies that score all layers at once leave the survivors where they are, save for those
that must move into a freed slot (hole filling); `order` then says where the i-th oldest token lies.
For other policies the survivors close ranks, so that each layer can be scored as it lies.
"""

from __future__ import annotations

import functools
import math

import torch

from .held import HeldTokens
from .kernels.availability import choose_implementation, missing_for_triton
from .kernels.eviction import compact, fill_holes, plan_compaction, plan_hole_filling
from .kernels.positions import append_positions
from .policies import LayersView


def uses_kernels(backend: str, device: torch.device) -> bool:
    """Whether `backend` means the kernels for tensors on `device`.

    Raises:
        RuntimeError: `backend="triton"`, which cannot run there.
    """
    if backend == "torch":
        return False
    missing = missing_for_triton(device)
    if backend == "triton" and missing is not None:
        raise RuntimeError(f"backend='triton' cannot run: {missing}; or use backend='auto'.")
    return choose_implementation(backend, device) == "triton"


def evict_together(held: list[HeldTokens]) -> None:
    """Evict in the full rows of all these layers.

    Raises:
        ValueError: keys that hold NaN.
    """
    groups: dict[tuple[object, ...], list[HeldTokens]] = {}
    for each in held:
        keys, values = each.storage["keys"], each.storage["values"]
        # Scores of a layer do not fit one with fewer slots, as layers of a pyramid have.
        kind = (keys.device, keys.dtype, each.dtype, keys.shape, values.shape[3])
        groups.setdefault((*kind, each.scaling), []).append(each)
    for group in groups.values():
        _Eviction(group).run()


class _Eviction:
    """One eviction of layers whose tensors are alike."""

    def __init__(self, layers: list[HeldTokens]) -> None:
        self.layers = layers
        self.first = layers[0]
        self.settings = self.first.settings
        self.sinks = self.settings.sinks if self.settings.policy.keeps_sinks else 0
        keys = self.first.storage["keys"]
        self.heads, self.device = keys.shape[1], keys.device
        self.stored = [each.rows.stored for each in layers]
        # A full row evicts even where its share of the tokens seen has grown to all it stores.
        self.full = [
            [row for row in range(each.rows.batch) if each.rows.is_full(row)] for each in layers
        ]
        self.keep = [[each.rows.kept(row) for row in range(each.rows.batch)] for each in layers]
        self.most_stored = max(map(max, self.stored))

    def _per_head(self, counts: list[list[int]]) -> torch.Tensor:
        """`[L, B, H]` int32."""
        on_device = _upload(tuple(map(tuple, counts)), self.device)
        return on_device.unsqueeze(-1).expand(-1, -1, self.heads)

    def _tensors(self, name: str) -> list[torch.Tensor]:
        return [each.storage[name] for each in self.layers]

    def _order(self) -> list[torch.Tensor] | None:
        """The order of every layer; None if all layers are in the order of the sequence."""
        order = [each.storage.order for each in self.layers if each.storage.order is not None]
        if len(order) == len(self.layers):
            return order
        for each in self.layers:
            each.restore_order()
        return None

    def run(self) -> None:
        """Place the new tokens, score, choose, move, and count."""
        lengths, keep = self._per_head(self.stored), self._per_head(self.keep)
        order = self._order()
        append_positions(
            self._tensors("positions"),
            order,
            lengths,
            self._per_head([each.placed for each in self.layers]),
            self._per_head([each.rows.real_seen for each in self.layers]),
            implementation="triton",
        )
        for each in self.layers:
            each.mark_placed()
        scores = self.settings.policy.score_layers(self._view(lengths, order))
        if scores is None:
            self._close_ranks(lengths, keep)
        else:
            self._fill_holes(self._checked(scores), lengths, keep)
        for each, full, kept in zip(self.layers, self.full, self.keep, strict=True):
            for row in full:
                each.rows.evicted([row], kept[row])
            each.forget_beyond()

    def _view(self, lengths: torch.Tensor, order: list[torch.Tensor] | None) -> LayersView:
        policy = self.settings.policy
        return LayersView(
            keys=self._tensors("keys"),
            key_scales=self._tensors("key_scales") if "key_scales" in self.first.storage else None,
            order=order,
            positions=self._tensors("positions"),
            lengths=lengths,
            stored=self.most_stored,
            seen=self._per_head([each.rows.real_seen for each in self.layers]),
            queries=[each.last_queries() for each in self.layers] if policy.needs_queries else None,
            attention_mass=self._tensors("mass") if policy.needs_attention_mass else None,
            scaling=self.first.scaling,
            window=self.settings.window,
            sinks=self.settings.sinks,
            implementation="triton",
        )

    def _checked(self, scores: torch.Tensor) -> torch.Tensor:
        # NaN in a key makes the scores of its whole head NaN, which the maximum passes on.
        if math.isnan(float(scores.amax())):
            for each in self.layers:
                each.check_keys()
        return scores

    def _fill_holes(self, scores: torch.Tensor, lengths: torch.Tensor, keep: torch.Tensor) -> None:
        for each in self.layers:
            each.ensure_order()
        record = self.settings.record
        before = [each.clone() for each in self._tensors("positions")] if record else []
        plan = plan_hole_filling(
            scores,
            self._tensors("positions"),
            [order for each in self.layers if (order := each.storage.order) is not None],
            lengths,
            keep,
            window=self.settings.window,
            sinks=self.sinks,
            most_evicted=self._most_evicted(),
            most_kept=max(map(max, self.keep)),
            record=record,
            implementation="triton",
        )
        for name in self.first.storage:
            if name != "positions":
                fill_holes(self._tensors(name), plan, implementation="triton")
        if plan.kept is not None:
            self._record(before, plan.kept)

    def _close_ranks(self, lengths: torch.Tensor, keep: torch.Tensor) -> None:
        for each in self.layers:
            each.restore_order()
        scores = torch.zeros(*lengths.shape, self.most_stored, device=self.device)
        for layer, each in enumerate(self.layers):
            each.score_full_rows(scores[layer])
        record = self.settings.record
        before = [each.clone() for each in self._tensors("positions")] if record else []
        kept = plan_compaction(
            scores,
            self._tensors("positions"),
            lengths,
            keep,
            window=self.settings.window,
            sinks=self.sinks,
            most_kept=max(map(max, self.keep)),
            implementation="triton",
        )
        for name in self.first.storage:
            compact(self._tensors(name), kept, keep, implementation="triton")
        if record:
            self._record(before, kept)

    def _most_evicted(self) -> int:
        return max(
            stored - left
            for counts, kept in zip(self.stored, self.keep, strict=True)
            for stored, left in zip(counts, kept, strict=True)
        )

    def _record(self, positions: list[torch.Tensor], kept: torch.Tensor) -> None:
        """Note the deaths; `positions` are those before the eviction, by sequence index."""
        for layer, each in enumerate(self.layers):
            groups: dict[tuple[int, int], list[int]] = {}
            for row, sizes in enumerate(zip(self.stored[layer], self.keep[layer], strict=True)):
                if sizes[1] < sizes[0]:
                    groups.setdefault(sizes, []).append(row)
            for (stored, left), rows in groups.items():
                each.record_deaths(
                    rows, positions[layer][rows, :, :stored], kept[layer][rows, :, :left].long()
                )


@functools.lru_cache(maxsize=64)
def _upload(counts: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=device)
