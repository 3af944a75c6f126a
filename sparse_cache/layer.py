"""One budgeted layer: stores, hands out, and evicts when its attention is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from . import attention
from .attention_mass import attention_mass
from .chunk import Chunk
from .columns import Columns
from .errors import UnsupportedModelError, warn_once
from .layer_kinds import LayerKinds
from .masking import MaskRequest
from .policies import PolicyView
from .query_window import QueryWindow
from .selection import select_kept
from .settings import BudgetSettings
from .storage import TokenStorage, gather_tokens
from .trace import DeathRecord

REJECTABLE_TOKENS = 128
"""Room for tokens that assisted decoding may take back."""


@dataclass
class _HandedOut:
    """What `update` gave to attention, until attention is done with it."""

    keys: torch.Tensor
    values: torch.Tensor
    chunk: Chunk
    in_storage: bool
    """Whether the chunk already lies in the layer's storage; if not, `keys` and `values` are
    `[stored slots | chunk]` in tensors of their own."""
    slots: int
    """Slots in front of the chunk."""
    indexer: torch.Tensor | None = None


class BudgetLayer(CacheLayerMixin):
    """A full-attention layer that keeps a budget of tokens per row and KV head.

    Rows hold their tokens left-aligned in storage, each row as many as it has: padding is dropped
    when it comes and every row evicts on its own schedule, so a row in a batch goes through the
    states that it goes through alone. Between evictions only Python integers change besides the
    one new token that is written.
    """

    is_sliding = False
    is_compileable = False

    def __init__(
        self, settings: BudgetSettings, layer_idx: int, columns: Columns, kinds: LayerKinds
    ) -> None:
        CacheLayerMixin.__init__(self)
        self.settings = settings
        self.layer_idx = layer_idx
        self.columns = columns
        self.kinds = kinds
        self.record_past = False
        self.keys_are_shared = False
        self.evict_heads_together = False
        self._clear()

    def _clear(self) -> None:
        self._tokens: dict[str, TokenStorage] = {}
        self._queries = QueryWindow(self.settings.window)
        self._handed_out: _HandedOut | None = None
        self._eviction_due = False
        self._unconfirmed = 0
        self.is_initialized = False
        self.seen = 0
        self.evictions = 0
        self.tokens_evicted = 0
        # Counts per row as of the last chunk or eviction; `_steps` single tokens came since.
        self._stored: list[int] = []
        self._real_seen: list[int] = []
        self._evict_at: list[int] = []
        self._placed: list[int] = []
        self._steps = 0
        self._slack = 0
        self._uniform = True
        self._slot_index: torch.Tensor | None = None
        self._least_slots = 0
        self._weights_version = 0
        self._scaling = 1.0
        self._attended: tuple[torch.Tensor, torch.Tensor] | None = None
        self.deaths: DeathRecord | None = None

    # ------------------------------------------------------------------ what transformers reads

    @property
    def keys(self) -> torch.Tensor | None:
        """`[B, H, slots, D]`: the stored keys; slots past a row's length hold stale tokens."""
        return self._stored_tokens("keys")

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._ignore_assignment(value)

    @property
    def values(self) -> torch.Tensor | None:
        """`[B, H, slots, Dv]`: the stored values; slots past a row's length hold stale tokens."""
        return self._stored_tokens("values")

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._ignore_assignment(value)

    @staticmethod
    def _ignore_assignment(value: torch.Tensor | None) -> None:
        if value is not None:
            raise AttributeError("a budgeted layer's keys and values are written by update() only.")

    def _stored_tokens(self, name: str) -> torch.Tensor | None:
        self.settle()
        if name not in self._tokens:
            return None
        return self._tokens[name].data[:, :, : self.slots]

    @property
    def lengths(self) -> list[int]:
        """Tokens stored now, per row (the same for every KV head)."""
        return [stored + self._steps for stored in self._stored]

    @property
    def real_seen(self) -> list[int]:
        """Real tokens seen so far, per row."""
        return [seen + self._steps for seen in self._real_seen]

    @property
    def slots(self) -> int:
        """Slots in use: the length of the longest row."""
        return max(max(self._stored, default=0) + self._steps, self._least_slots)

    @property
    def batch_size(self) -> int:
        return len(self._stored) if self._stored else -1

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back exactly."""
        return self.record_past

    @property
    def waits_for_attention(self) -> bool:
        return self._handed_out is not None

    def get_seq_length(self) -> int:
        """Columns seen, evicted or not: the position of the next token."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: any number of tokens may be seen."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots that attention will see, and the offset that aligns them with the newest column."""
        self.settle()
        return self.slots + query_length, self.seen - self.slots

    def mask_request(
        self, query_length: int, hide_seen: Callable[[torch.Tensor], None]
    ) -> MaskRequest:
        """What the next mask of this layer has to be made from.

        Args:
            query_length: columns of the chunk to come.
            hide_seen: called with the `[B, seen]` mask if it hides tokens that were real before.
        """
        self.settle()

        def slot_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
            chunk = Chunk.from_attention_mask(
                attention_mask, self.seen, query_length, self.real_seen
            )
            self.columns.announced = chunk
            if chunk.seen_mask is not None:
                hide_seen(chunk.seen_mask)
            return self._slot_mask(chunk, attention_mask)

        return MaskRequest((query_length, self.slots + query_length), slot_mask, self.slots)

    def _slot_mask(self, chunk: Chunk, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        if self._uniform and chunk.mask is None:
            return None
        if self.seen == 0:
            return chunk.mask
        assert attention_mask is not None or chunk.mask is None
        device = (
            self._tokens["keys"].data.device if attention_mask is None else attention_mask.device
        )
        lengths = torch.tensor(self.lengths, device=device).unsqueeze(1)
        slot = torch.arange(self.slots + chunk.length, device=device)
        if self._appends_in_rows(chunk):
            return slot <= lengths
        mask = slot < lengths
        mask[:, self.slots :] = True if chunk.mask is None else chunk.mask.to(device)
        return mask

    def _appends_in_rows(self, chunk: Chunk) -> bool:
        """Whether each row takes its new token at its own end, rather than at a common slot."""
        return not self._uniform and chunk.length == 1 and chunk.mask is None

    # ------------------------------------------------------------------ taking tokens in

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stored = [0] * batch
        self._real_seen = [0] * batch
        self._placed = [0] * batch
        self._evict_at = [self.settings.eviction_length(0)] * batch
        self._slack = min(self._evict_at)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in a chunk and hand out all that attention may see.

        Args:
            key_states: `[B, H, T, D]`.
            value_states: `[B, H, T, Dv]`; `H` and the widths may differ from the keys'.

        Returns:
            Keys and values `[B, H, slots + T, ...]`, to be read before the layer's next call only.

        Raises:
            ValueError: another batch size than before.
        """
        self.settle()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self._stored):
            raise ValueError(
                f"the cache holds a batch of {len(self._stored)} but got {key_states.shape[0]} "
                "rows; call cache.reset() or make a new cache for another batch."
            )
        chunk = self.columns.take(self.seen, key_states.shape[2])
        first = self.seen == 0
        if first:
            # Nothing is stored yet, so attention reads the model's own tensors and only what
            # survives is ever copied.
            keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
            self._handed_out = _HandedOut(keys, values, chunk, in_storage=False, slots=0)
        else:
            self._handed_out = self._append(key_states, value_states, chunk)
        handed = self._handed_out
        attention.hand_out(self, handed.keys, first=first)
        return handed.keys, handed.values

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, chunk: Chunk
    ) -> _HandedOut:
        self._make_writable()
        slots, length = self.slots, chunk.length
        keys, values = self._tokens["keys"], self._tokens["values"]
        limit = max(self._evict_at) + self._rejectable
        fits = slots + length <= limit and slots == max(self.lengths)
        in_rows = self._appends_in_rows(chunk)
        if fits and (in_rows or (self._uniform and chunk.mask is None)):
            for name in self._tokens:
                self._tokens[name].reserve(slots + length, limit=limit)
            if in_rows:
                index = self._row_ends(key_states.device)
                keys.write_ragged(key_states.detach(), index)
                values.write_ragged(value_states.detach(), index)
            else:
                keys.write(key_states.detach(), slots)
                values.write(value_states.detach(), slots)
            end = slots + length
            return _HandedOut(keys.data[:, :, :end], values.data[:, :, :end], chunk, True, slots)
        return _HandedOut(
            torch.cat([keys.data[:, :, :slots], key_states], dim=2),
            torch.cat([values.data[:, :, :slots], value_states], dim=2),
            chunk,
            in_storage=False,
            slots=slots,
        )

    def _make_writable(self) -> None:
        self.prefetch()
        if not torch.is_inference_mode_enabled():
            for storage in self._tokens.values():
                # Tensors made under inference_mode cannot be written outside of it.
                if storage.data.is_inference():
                    storage.data = storage.data.clone()

    def _row_ends(self, device: torch.device) -> torch.Tensor:
        """`[B]` int64: the first free slot of each row."""
        if self._slot_index is None:
            self._slot_index = torch.tensor(self._stored, device=device)
        return self._slot_index + self._steps

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Take in the keys of a sparse-attention indexer (DeepSeek V3.2), evicted with the others.

        Args:
            indexer_key_states: `[B, T, Di]`, after `update` for the same chunk.

        Returns:
            `[B, slots + T, Di]`.
        """
        handed = self._handed_out
        if handed is None:
            raise UnsupportedModelError(
                "this model's indexer updates the cache before its attention keys do; "
                "SparseBudgetCache cannot keep the two in step, use DynamicCache."
            )
        # The indexer has one key for all heads, so heads have to evict the same tokens.
        self.evict_heads_together = True
        tokens = indexer_key_states.unsqueeze(1)
        if not handed.in_storage:
            stored = self._tokens.get("indexer")
            parts = [tokens] if stored is None else [stored.data[:, :, : handed.slots], tokens]
            handed.indexer = torch.cat(parts, dim=2)
            return handed.indexer.squeeze(1)
        storage = self._tokens["indexer"]
        if self._appends_in_rows(handed.chunk):
            storage.write_ragged(tokens, self._row_ends(tokens.device))
        else:
            storage.write(tokens, handed.slots)
        return storage.data[:, 0, : handed.slots + handed.chunk.length]

    # ------------------------------------------------------------------ after attention

    def fits(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether an attention call without our mark on its keys can be this layer's."""
        handed = self._handed_out
        return (
            handed is not None
            and key.dim() == 4
            and query.dim() == 4
            and key.shape[0] == handed.keys.shape[0]
            and key.shape[2] == handed.keys.shape[2]
            and query.shape[2] == handed.chunk.length
        )

    def before_attention(self, module: torch.nn.Module) -> None:
        """Learn from the attention module that is about to read this layer's keys.

        Raises:
            ValueError: it belongs to another model than the given config.
            RuntimeError: its weights changed since the cache's tokens were computed.
        """
        config = getattr(module, "config", None)
        if self.seen == 0 and isinstance(config, PreTrainedConfig):
            self.kinds.learn(config)
        version = _weights_version(module)
        if self.seen and version != self._weights_version:
            raise RuntimeError(
                "the model's weights changed since the cache was filled; call cache.reset() after "
                "an update of the weights."
            )
        self._weights_version = version

    def after_attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> None:
        """Attention is done: note what the policy needs, then evict where a row is full.

        Args:
            query: `[B, Hq, T, D]`.
            key: `[B, Hk, slots + T, D]`, as attention saw it.
            value: `[B, Hk, slots + T, Dv]`, as attention saw it.
            mask: whatever mask attention was given.
            arguments: attention's keyword arguments.
        """
        handed = self._handed_out
        assert handed is not None
        if (
            self.seen == 0
            and self.kinds.stock_layer(self.layer_idx) is not None
            and type(self) is BudgetLayer
        ):
            return  # not a full-attention layer: the cache hands it over to transformers
        if key is not handed.keys or value is not handed.values:
            # What attention pairs with a stored key is not the stored value of the same head.
            self.evict_heads_together = True
        with torch.no_grad():
            policy = self.settings.policy
            scaling = arguments.get("scaling")
            if scaling is None:
                scaling = query.shape[-1] ** -0.5
            if policy.needs_queries and self._queries_matter(handed.chunk):
                order = handed.chunk.padding_first
                self._queries.append(_reorder(query, order), handed.chunk.real)
            mass = None
            if policy.needs_attention_mass:
                mass = attention_mass(
                    query.detach(),
                    key.detach(),
                    mask[..., : key.shape[2]] if _is_4d(mask) else None,
                    scaling=scaling,
                    softcap=arguments.get("softcap"),
                    sinks=arguments.get("s_aux"),
                    real_queries=handed.chunk.mask,
                )
            self._finish(key.detach(), value.detach(), scaling, mass)

    def _queries_matter(self, chunk: Chunk) -> bool:
        """Only the last `window` queries before an eviction are ever read."""
        return (
            chunk.length > 1
            or chunk.real is not None
            or self.record_past
            or self._slack - 1 < self.settings.window
        )

    def give_up(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the first chunk's keys and values, which another layer is to take."""
        handed, self._handed_out = self._handed_out, None
        attention.withdraw(self)
        return None if handed is None else (handed.keys, handed.values)

    def settle(self) -> None:
        """Finish what was left open: a chunk whose attention was not reported, an eviction that
        had to wait for other readers of the keys."""
        if self._handed_out is not None:
            if self.settings.policy.needs_queries or self.settings.policy.needs_attention_mass:
                raise UnsupportedModelError(
                    f"policy={self.settings.policy.name!r} scores by the attention queries, but "
                    "this model's attention does not go through transformers' AttentionInterface, "
                    "so they cannot be seen; use a policy that scores by keys alone, such as "
                    "'keydiff', 'knorm', 'lagkv' or 'streaming'."
                )
            self.evict_heads_together = True
            with torch.no_grad():
                handed = self._handed_out
                self._finish(
                    handed.keys.detach(),
                    handed.values.detach(),
                    handed.keys.shape[-1] ** -0.5,
                    None,
                )
        if self._eviction_due:
            with torch.no_grad():
                self._evict_stored()

    def _finish(
        self, keys: torch.Tensor, values: torch.Tensor, scaling: float, mass: torch.Tensor | None
    ) -> None:
        handed = self._handed_out
        assert handed is not None
        self._handed_out = None
        self._least_slots = 0
        attention.withdraw(self)
        self._scaling = scaling
        if self.record_past:
            self._unconfirmed += handed.chunk.length
            self._attended = (keys, values) if self.evict_heads_together else None
        if mass is not None and mass.shape[1] != handed.keys.shape[1]:
            mass = mass.mean(dim=1, keepdim=True).expand(-1, handed.keys.shape[1], -1)
        if handed.in_storage:
            self._advance(handed.chunk.length)
            if mass is not None:
                self._tokens["mass"].data[:, :, : mass.shape[2]] += mass
            if self._slack <= 0 and not self.record_past:
                self._eviction_due = True
                if not self.keys_are_shared:
                    self._evict_stored(keys, values)
        else:
            self._store(handed, keys, values, mass)

    def _advance(self, length: int) -> None:
        self.seen += length
        self._steps += length
        self._slack -= length

    def _fold_steps(self) -> None:
        """Bring the per-row counts up to date and give the tokens that came since a position."""
        if self._steps:
            self._stored, self._real_seen = self.lengths, self.real_seen
            self._steps = 0
        if self._placed != self._stored:
            data = self._tokens["positions"].data
            stored, seen, placed = (
                torch.tensor(count, device=data.device, dtype=data.dtype).view(-1, 1, 1)
                for count in (self._stored, self._real_seen, self._placed)
            )
            slot = torch.arange(data.shape[2], device=data.device, dtype=data.dtype)
            data.copy_(torch.where(slot >= placed, seen - stored + slot, data))
            self._placed = list(self._stored)

    # ------------------------------------------------------------------ eviction

    def _evict_stored(
        self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None
    ) -> None:
        """Evict in place in every row that is full.

        Args:
            keys: `[B, Hk, slots, D]` as attention saw them; None: the stored ones.
            values: the same for values.
        """
        self._eviction_due = False
        self._fold_steps()
        keys = self._tokens["keys"].data if keys is None else keys
        values = self._tokens["values"].data if values is None else values
        for rows, (length, keep) in self._groups(self._full_rows()):
            view = {"keys": keys, "values": values}
            view |= {n: self._tokens[n].data for n in ("positions", "mass") if n in self._tokens}
            view = {name: _pick(tensor, rows)[:, :, :length] for name, tensor in view.items()}
            kept = self._choose(rows, view, keep, self._real_seen)
            index = self._row_tensor(rows)
            self._record(index, view["positions"], kept)
            for name, storage in self._tokens.items():
                storage.compact(index, kept[:, :1] if name == "indexer" else kept)
            for row in rows:
                self._evicted(row, length, keep)
        self._placed = list(self._stored)
        self._refresh()

    def _full_rows(self) -> list[int]:
        return [
            row
            for row, (stored, full) in enumerate(zip(self._stored, self._evict_at, strict=True))
            if stored >= full
        ]

    def _keep(self, row: int, length: int, real_seen: int) -> int:
        return min(self.settings.kept_after_eviction(real_seen), length)

    def _groups(self, rows: list[int]) -> list[tuple[list[int], tuple[int, int]]]:
        """Rows that evict from the same length to the same length are scored together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            length = self._stored[row]
            keep = self._keep(row, length, self._real_seen[row])
            groups.setdefault((length, keep), []).append(row)
        return [(members, sizes) for sizes, members in groups.items()]

    def _row_tensor(self, rows: list[int]) -> torch.Tensor | None:
        """None for all rows, which needs no copies."""
        if len(rows) == len(self._stored):
            return None
        return torch.tensor(rows, device=self._tokens["keys"].data.device)

    def _choose(
        self, rows: list[int], view: dict[str, torch.Tensor], keep: int, real_seen: list[int]
    ) -> torch.Tensor:
        """Score the tokens of `rows` and return the slots that stay, `[b, H, keep]` ascending."""
        settings, policy = self.settings, self.settings.policy
        keys, positions, mass = view["keys"], view["positions"], view.get("mass")
        kv_heads, seen_heads = positions.shape[1], keys.shape[1]
        _check_finite(keys, self.layer_idx)
        queries = None
        if policy.needs_queries:
            assert self._queries.data is not None
            queries = _pick(self._queries.data, rows)[:, :, -settings.window :]
        scores = policy.score(
            PolicyView(
                keys=keys,
                values=view["values"],
                positions=_with_heads(positions, seen_heads).long(),
                seen=torch.tensor([real_seen[row] for row in rows], device=keys.device),
                queries=queries,
                attention_mass=None if mass is None else _with_heads(mass, seen_heads),
                scaling=self._scaling,
                window=settings.window,
                sinks=settings.sinks,
                budget=keep,
                layer_idx=self.layer_idx,
            )
        )
        expected = (len(rows), seen_heads, keys.shape[2])
        if tuple(scores.shape) != expected:
            raise ValueError(
                f"policy {policy.name or type(policy).__name__!r} returned scores of shape "
                f"{tuple(scores.shape)}; expected {expected} (rows, KV heads, tokens)."
            )
        if self.evict_heads_together:
            scores = scores.float().mean(dim=1, keepdim=True).expand(-1, kv_heads, -1)
        return select_kept(
            scores,
            keep=keep,
            window=settings.window,
            sinks=settings.sinks if policy.keeps_sinks else 0,
            positions=positions,
        )

    def _record(
        self, rows: torch.Tensor | None, positions: torch.Tensor, kept: torch.Tensor
    ) -> None:
        if self.deaths is not None:
            self.deaths.evict(rows, positions, kept, at=self.seen)

    def _evicted(self, row: int, length: int, keep: int) -> None:
        self.evictions += 1
        self.tokens_evicted += length - keep
        self._stored[row] = keep
        self._evict_at[row] = self.settings.eviction_length(self._real_seen[row])

    def _refresh(self) -> None:
        """Derive what decoding reads at every step from the per-row counts."""
        self._slack = min(
            full - stored for full, stored in zip(self._evict_at, self._stored, strict=True)
        )
        self._uniform = len(set(self._stored)) <= 1
        self._slot_index = None
        if "mass" in self._tokens:
            data = self._tokens["mass"].data
            stored = torch.tensor(self._stored, device=data.device).view(-1, 1, 1)
            data.masked_fill_(torch.arange(data.shape[2], device=data.device) >= stored, 0.0)

    def _store(
        self,
        handed: _HandedOut,
        keys: torch.Tensor,
        values: torch.Tensor,
        mass: torch.Tensor | None,
    ) -> None:
        """Move what survives of `[stored slots | chunk]` into storage, row group by row group.

        Args:
            handed: the tensors handed out, which are what is stored.
            keys: `[B, Hk, slots + T, D]` as attention saw them, which are what is scored.
            values: the same for values.
            mass: `[B, H, slots + T]` given by this chunk's queries, if accumulated.
        """
        chunk, batch, slots = handed.chunk, len(self._stored), handed.slots
        heads, order = handed.keys.shape[1], handed.chunk.padding_first
        keys, values = _reorder(keys, order), _reorder(values, order)
        self._fold_steps()
        self.seen = chunk.start + chunk.length
        if self.settings.record and self.deaths is None:
            self.deaths = DeathRecord(batch, heads, keys.device)
        real = chunk.real or [chunk.length] * batch
        before, seen_before = self._stored, self._real_seen
        seen = [count + new for count, new in zip(seen_before, real, strict=True)]
        sources = {
            "keys": _reorder(handed.keys.detach(), order),
            "values": _reorder(handed.values.detach(), order),
        }
        sources["positions"] = self._joined_positions(chunk, slots, real, heads)
        if mass is not None:
            sources["mass"] = _reorder(mass, order).clone()
            if slots:
                sources["mass"][:, :, :slots] += self._tokens["mass"].data[:, :, :slots]
        if handed.indexer is not None:
            sources["indexer"] = _reorder(handed.indexer.detach(), order)

        lengths = [count + new for count, new in zip(before, real, strict=True)]
        after = [
            self._keep(row, length, seen[row])
            if length >= self._evict_at[row] and not self.record_past
            else length
            for row, length in enumerate(lengths)
        ]
        self._real_seen = seen
        limit = max([*self._evict_at, *after]) + self._rejectable
        for name, source in sources.items():
            if name in self._tokens:
                self._tokens[name].reserve(max(after), limit=limit)
            else:
                self._tokens[name] = TokenStorage(source, limit=limit, needed=max(after))
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row in range(batch):
            groups.setdefault((before[row], real[row], after[row]), []).append(row)
        self._stored = lengths
        for (stored, new, keep), rows in groups.items():
            index = self._row_tensor(rows)
            tokens = {
                name: _real_tokens(_pick(source, rows), slots, stored, new)
                for name, source in sources.items()
            }
            if keep < stored + new:
                view = dict(tokens)
                view["keys"] = _real_tokens(_pick(keys, rows), slots, stored, new)
                view["values"] = _real_tokens(_pick(values, rows), slots, stored, new)
                kept = self._choose(rows, view, keep, seen)
                self._record(index, view["positions"], kept)
                for name in tokens:
                    chosen = kept[:, :1] if name == "indexer" else kept
                    tokens[name] = gather_tokens(tokens[name], chosen)
                for row in rows:
                    self._evicted(row, stored + new, keep)
            for name, kept_tokens in tokens.items():
                self._tokens[name].replace(index, kept_tokens)
        self._placed = list(self._stored)
        self._refresh()

    def _joined_positions(
        self, chunk: Chunk, slots: int, real: list[int], heads: int
    ) -> torch.Tensor:
        """Positions `[B, H, slots + T]` int32 of the stored slots and the chunk."""
        first = torch.tensor(
            [seen - (chunk.length - new) for seen, new in zip(self._real_seen, real, strict=True)],
            dtype=torch.int32,
            device=self.device,
        )
        column = torch.arange(chunk.length, dtype=torch.int32, device=self.device)
        positions = (first[:, None] + column).unsqueeze(1).expand(-1, heads, -1)
        if not slots:
            return positions
        return torch.cat([self._tokens["positions"].data[:, :, :slots], positions], dim=2)

    # ------------------------------------------------------------------ the verbs of a cache

    def hide(self, hidden: torch.Tensor, position: torch.Tensor) -> None:
        """Forget stored tokens that a later mask declares to be padding.

        Args:
            hidden: `[B, R]` boolean by position: the tokens to forget.
            position: `[B, R]`: the position of every other token from now on.
        """
        self.settle()
        if not self._tokens:
            return
        self._fold_steps()
        width = self.slots
        positions = self._tokens["positions"].data[:, :, :width].long()
        heads = positions.shape[1]
        slot = torch.arange(width, device=positions.device)
        stored = torch.tensor(self._stored, device=positions.device).view(-1, 1, 1)
        positions = torch.where(slot < stored, positions, 0)
        by_head = hidden.to(positions.device).unsqueeze(1).expand(-1, heads, -1)
        alive = ~by_head.gather(2, positions) & (slot < stored)
        moved = position.to(positions.device).unsqueeze(1).expand(-1, heads, -1)
        positions = moved.gather(2, positions)
        self._tokens["positions"].data[:, :, :width] = positions.int()
        counts = alive.sum(-1).amin(1)
        if bool((alive.sum(-1) > counts[:, None]).any()):
            warn_once(
                "some heads had evicted real tokens to make room for tokens that are now masked "
                "as padding; the other heads drop their oldest tokens to stay in step."
            )
        # Oldest beyond the sinks go first where a head has more tokens left than another.
        protected = positions < self.settings.sinks
        rank = torch.where(alive, slot + width * (1 + protected.long()), slot)
        order = rank.sort(dim=-1, descending=True).indices[..., : int(counts.max())]
        live = torch.arange(order.shape[-1], device=order.device) < counts.view(-1, 1, 1)
        order = torch.where(live, order, width).sort(dim=-1).values.clamp(max=width - 1)
        for name, storage in self._tokens.items():
            storage.compact(None, order[:, :1] if name == "indexer" else order)
        lost = hidden.sum(-1).tolist()
        self._stored = counts.tolist()
        self._placed = list(self._stored)
        self._real_seen = [seen - gone for seen, gone in zip(self._real_seen, lost, strict=True)]
        self._refresh()
        self._least_slots = width

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; all that the layer owns moves together.

        Args:
            rows: `[B']` int64, the old row of each new one.
        """
        self.settle()
        if not self._tokens:
            return
        for storage in self._tokens.values():
            storage.data = storage.data.index_select(0, rows.to(storage.data.device))
        if self._queries.data is not None:
            self._queries.data = self._queries.data.index_select(
                0, rows.to(self._queries.data.device)
            )
        if self.deaths is not None:
            self.deaths.data = self.deaths.data.index_select(0, rows.to(self.deaths.data.device))
        counts = ("_stored", "_real_seen", "_evict_at", "_placed")
        if all(len(set(getattr(self, name))) == 1 for name in counts):
            # Equal rows need no copy of the indices to the host, which would wait for the GPU.
            for name in counts:
                setattr(self, name, getattr(self, name)[:1] * rows.shape[0])
        else:
            order = rows.tolist()
            for name in counts:
                setattr(self, name, [getattr(self, name)[row] for row in order])
        self._slot_index = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Move rows along with their beams; `beam_idx` `[B]`."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        rows = torch.arange(len(self._stored), device=self.device if self._stored else None)
        self.select_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` `[B']`, or those where a boolean `[B]` is True."""
        self.select_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def reset(self) -> None:
        """Forget all tokens; the memory is given back."""
        attention.withdraw(self)
        self._clear()

    def offload(self) -> None:
        """Move the stored tokens to the CPU; the next update brings them back."""
        self.settle()
        for storage in self._tokens.values():
            storage.data = storage.data.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Bring offloaded tokens back to the layer's device."""
        for storage in self._tokens.values():
            if storage.data.device != self.device:
                storage.data = storage.data.to(self.device, non_blocking=True)

    def activate_past_recording(self) -> None:
        """Let evictions wait for `crop`, which says which of the newest tokens are there to stay.

        Raises:
            UnsupportedModelError: the policy accumulates attention, which cannot be taken back.
        """
        if self.settings.policy.needs_attention_mass:
            raise UnsupportedModelError(
                f"policy={self.settings.policy.name!r} accumulates attention from tokens that "
                "assisted decoding may take back; use another policy or no assistant."
            )
        self.settle()
        self.record_past = True
        self._queries.resize(self.settings.window + REJECTABLE_TOKENS)

    def stop_past_recording(self) -> None:
        """Evict as usual again; tokens not taken back by now are there to stay."""
        if self.record_past:
            self.crop(0)
            self.record_past = False
            self._queries.resize(self.settings.window)
            for storage in self._tokens.values():
                storage.shrink(max(self._evict_at))

    @property
    def _rejectable(self) -> int:
        return REJECTABLE_TOKENS if self.record_past else 0

    def check_crop(self, tokens: int) -> None:
        """Raise if the last `tokens` cannot be taken back exactly."""
        self.settle()
        if tokens > self.seen:
            raise ValueError(f"crop({-tokens}) removes more tokens than the {self.seen} seen.")
        if not tokens:
            return
        if self.record_past:
            possible = tokens <= self._unconfirmed
        else:
            needs = self.settings.policy.needs_queries or self.settings.policy.needs_attention_mass
            possible = not self.evictions and (not needs or self._slack > self.settings.window)
        if not possible:
            raise UnsupportedModelError(
                f"crop({-tokens}) cannot be exact: tokens were evicted or scored since; call "
                "cache.activate_past_recording() before the tokens come that may be taken back, "
                "or cache.reset() and start again."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, then evict what was waiting for that.

        Raises:
            UnsupportedModelError: it cannot be done exactly.
        """
        tokens = abs(tokens_to_remove)
        self.check_crop(tokens)
        if not self._tokens:
            return
        if tokens:
            self._fold_steps()
            self.seen -= tokens
            self._stored = [stored - tokens for stored in self._stored]
            self._real_seen = [seen - tokens for seen in self._real_seen]
            self._placed = list(self._stored)
            self._queries.drop_last(tokens)
            self._refresh()
        self._unconfirmed = 0
        if self._slack <= 0:
            with torch.no_grad():
                attended = self._attended or (None, None)
                self._evict_stored(*attended)
        self._attended = None

    # ------------------------------------------------------------------ accounting

    def stored_bytes(self) -> int:
        """Bytes of the keys and values allocated, used or not."""
        return sum(self._tokens[n].data.nbytes for n in ("keys", "values") if n in self._tokens)

    def bookkeeping_bytes(self) -> int:
        """Bytes of everything else the layer holds: positions, queries, masses, deaths."""
        others = [s.data for n, s in self._tokens.items() if n not in ("keys", "values")]
        others += [t for t in (self._queries.data, self._slot_index) if t is not None]
        if self.deaths is not None:
            others.append(self.deaths.data)
        return sum(tensor.nbytes for tensor in others)

    def dense_bytes(self) -> int:
        """Bytes that a dense cache would hold for the same columns."""
        per_token = sum(
            tensor.shape[0] * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
            for tensor in (self._tokens[n].data for n in ("keys", "values") if n in self._tokens)
        )
        return per_token * self.seen

    def __repr__(self) -> str:
        if not self._stored:
            return "BudgetLayer(empty)"
        return f"BudgetLayer(seen={self.seen}, stored={self.lengths})"


def _pick(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tensor[rows]`, without a copy where that is everything."""
    return tensor if len(rows) == tensor.shape[0] else tensor[rows]


def _with_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, H, S]` with `heads` heads; where that changes the number, all heads hold the same."""
    return tensor if tensor.shape[1] == heads else tensor[:, :1].expand(-1, heads, -1)


def _reorder(tokens: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Put the last `T` tokens of `[B, H, slots + T, ...]` in the order `[B, T]` (None: as is)."""
    if order is None:
        return tokens
    slots = tokens.shape[2] - order.shape[1]
    stored = torch.arange(slots, device=tokens.device).expand(order.shape[0], -1)
    index = torch.cat([stored, order.to(tokens.device) + slots], dim=1)
    return gather_tokens(tokens, index.unsqueeze(1).expand(-1, tokens.shape[1], -1))


def _real_tokens(source: torch.Tensor, slots: int, stored: int, new: int) -> torch.Tensor:
    """The `stored` first and `new` last tokens of `[B, H, slots + T, ...]`."""
    if stored == slots and slots + new == source.shape[2]:
        return source
    end = source[:, :, source.shape[2] - new :]
    return torch.cat([source[:, :, :stored], end], dim=2) if stored else end


def _weights_version(module: torch.nn.Module) -> int:
    """Changes whenever a parameter of `module` is written in place."""
    return sum(p._version for p in module.parameters() if not p.is_inference())


def _is_4d(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 4


def _check_finite(keys: torch.Tensor, layer_idx: int) -> None:
    if bool(torch.isnan(keys).any()):
        raise ValueError(
            f"the keys of layer {layer_idx} hold NaN ({keys.dtype}), so the model's output is "
            "already lost; run the model in bfloat16 or float32."
        )
