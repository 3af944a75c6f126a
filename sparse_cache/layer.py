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
from .query_window import QueryWindow
from .reuse import weights_version
from .rows import RowCounts
from .scoring import Candidates, choose_kept
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
    row_ends: torch.Tensor | None = None
    """`[B]` int64: where each row took its token, if not at a common slot."""
    indexer: torch.Tensor | None = None


class BudgetLayer(CacheLayerMixin):
    """A full-attention layer that keeps a budget of tokens per row and KV head.

    Rows hold their tokens left-aligned in storage, each row as many as it has: padding is dropped
    when it comes and every row evicts on its own schedule, so a row in a batch goes through the
    states that it goes through alone. Between evictions only integers change besides the one new
    token that is written.
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
        self.keeps_marks = False
        """Whether the keys that attention sees are the very tensors handed out."""
        self.keys_are_shared = False
        """Whether other layers read this layer's keys after its own attention."""
        self.heads_together = False
        """Whether all heads keep the same tokens."""
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self.seen = 0
        self.rows = RowCounts(self.settings, 0)
        self.deaths: DeathRecord | None = None
        self._tokens = TokenStorage()
        self._queries = QueryWindow(self.settings.window + self._rejectable)
        self._handed_out: _HandedOut | None = None
        self._eviction_due = False
        self._unconfirmed = 0
        self._placed: list[int] = []
        self._row_ends: torch.Tensor | None = None
        self._least_slots = 0
        self._weights_version = (0, 0)
        self._scaling = 1.0
        self._attended: tuple[torch.Tensor, torch.Tensor] | None = None

    # ------------------------------------------------------------------ what transformers reads

    @property
    def keys(self) -> torch.Tensor | None:
        """`[B, H, slots, D]`: the stored keys; slots past a row's length hold stale tokens."""
        return self._used("keys")

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        _refuse_assignment(value)

    @property
    def values(self) -> torch.Tensor | None:
        """`[B, H, slots, Dv]`: the stored values; slots past a row's length hold stale tokens."""
        return self._used("values")

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        _refuse_assignment(value)

    def _used(self, name: str) -> torch.Tensor | None:
        self.settle()
        return self._tokens[name][:, :, : self.slots] if name in self._tokens else None

    @property
    def lengths(self) -> list[int]:
        """Tokens stored now, per row (the same for every KV head)."""
        return self.rows.stored

    @property
    def evictions(self) -> int:
        """Evictions so far, each of one row."""
        return self.rows.evictions

    @property
    def slots(self) -> int:
        """Slots in use: the length of the longest row."""
        return max(self.rows.longest, self._least_slots)

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first chunk."""
        return self.rows.batch or -1

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back exactly."""
        return self.record_past

    @property
    def waits_for_attention(self) -> bool:
        """Whether keys have been handed out and attention has not reported yet."""
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

    # ------------------------------------------------------------------ the mask

    def mask_request(
        self,
        query_length: int,
        hide_seen: Callable[[torch.Tensor], None],
        learn: Callable[[PreTrainedConfig], None],
    ) -> MaskRequest:
        """What the next mask of this layer has to be made from.

        Args:
            query_length: columns of the chunk to come.
            hide_seen: called with the `[B, seen]` mask if it hides tokens that were real before.
            learn: called with the config of the model.
        """
        self.settle()

        def slot_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
            chunk = Chunk.from_attention_mask(
                attention_mask, self.seen, query_length, self.rows.real_seen
            )
            self.columns.announced = chunk
            if chunk.seen_mask is not None:
                hide_seen(chunk.seen_mask)
            return self._slot_mask(chunk, attention_mask)

        sizes = (query_length, self.slots + query_length)
        return MaskRequest(sizes, slot_mask, self.slots, learn)

    def _slot_mask(self, chunk: Chunk, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """`[B, slots + T]`, True for real tokens; None if all are."""
        if self.seen == 0:
            return chunk.mask
        if chunk.mask is None and self.rows.uniform and self.slots == self.rows.longest:
            return None
        device = self.device if attention_mask is None else attention_mask.device
        stored = torch.tensor(self.rows.stored, device=device).unsqueeze(1)
        slot = torch.arange(self.slots + chunk.length, device=device)
        if self._takes_token_in_rows(chunk):
            return slot <= stored
        mask = slot < stored
        mask[:, self.slots :] = True if chunk.mask is None else chunk.mask.to(device)
        return mask

    def _takes_token_in_rows(self, chunk: Chunk) -> bool:
        """Whether each row takes its one new token at its own end, not at a common slot."""
        return (
            chunk.length == 1
            and chunk.mask is None
            and not self.rows.uniform
            and self.slots == self.rows.longest
        )

    # ------------------------------------------------------------------ taking tokens in

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch size, dtype and device from the first chunk."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = RowCounts(self.settings, key_states.shape[0])
        self._placed = self.rows.stored
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in a chunk and hand out all that attention may see.

        Args:
            key_states: `[B, H, T, D]`.
            value_states: `[B, H, T, Dv]`.

        Returns:
            Keys and values `[B, H, slots + T, ...]`, to be read before the layer's next call only.

        Raises:
            ValueError: another batch size than before.
        """
        self.settle()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.rows.batch:
            raise ValueError(
                f"the cache holds a batch of {self.rows.batch} but got {key_states.shape[0]} "
                "rows; call cache.reset() or make a new cache for another batch."
            )
        chunk = self.columns.take(self.seen, key_states.shape[2], self.layer_idx)
        if self.seen == 0:
            # Nothing is stored yet, so attention reads the model's own tensors and only what
            # survives is ever copied.
            keys, values = key_states.view_as(key_states), value_states.view_as(value_states)
            self._handed_out = _HandedOut(keys, values, chunk, in_storage=False, slots=0)
        else:
            self._handed_out = self._append(key_states, value_states, chunk)
        attention.hand_out(self, self._handed_out.keys, first=self.seen == 0)
        return self._handed_out.keys, self._handed_out.values

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, chunk: Chunk
    ) -> _HandedOut:
        self._tokens.move(self.device)
        self._tokens.make_writable()
        if torch.is_grad_enabled() and key_states.requires_grad:
            warn_once(
                "gradients do not flow through tokens stored in SparseBudgetCache: they are "
                "constants for every later step; use torch.no_grad() if none are wanted."
            )
        slots, limit = self.slots, self.rows.limit + self._rejectable
        in_rows = self._takes_token_in_rows(chunk)
        at_end = self.rows.uniform and chunk.mask is None and slots == self.rows.longest
        if not (in_rows or (at_end and slots + chunk.length <= limit)):
            return _HandedOut(
                torch.cat([self._tokens["keys"][:, :, :slots], key_states], dim=2),
                torch.cat([self._tokens["values"][:, :, :slots], value_states], dim=2),
                chunk,
                in_storage=False,
                slots=slots,
            )
        end = slots + chunk.length
        self._tokens.reserve_same(end, limit)
        row_ends = self._free_slots() if in_rows else None
        where = slots if row_ends is None else row_ends
        self._tokens.write("keys", key_states.detach(), where)
        self._tokens.write("values", value_states.detach(), where)
        keys, values = self._tokens["keys"][:, :, :end], self._tokens["values"][:, :, :end]
        return _HandedOut(keys, values, chunk, in_storage=True, slots=slots, row_ends=row_ends)

    def _free_slots(self) -> torch.Tensor:
        """`[B]` int64: the first free slot of each row; its distance to the longest row is fixed
        between evictions, so the device copy is made once."""
        if self._row_ends is None:
            stored = torch.tensor(self.rows.stored, device=self.device)
            self._row_ends = stored - self.rows.longest
        return self._row_ends + self.rows.longest

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Take in the keys of a sparse-attention indexer (DeepSeek V3.2), evicted with the others.

        Args:
            indexer_key_states: `[B, T, Di]`, after `update` for the same chunk.

        Returns:
            `[B, slots + T, Di]`.

        Raises:
            UnsupportedModelError: the indexer comes before the attention keys.
        """
        handed = self._handed_out
        if handed is None:
            raise UnsupportedModelError(
                "this model's indexer updates the cache before its attention keys do; "
                "SparseBudgetCache cannot keep the two in step, use DynamicCache."
            )
        # The indexer has one key for all heads, so heads have to keep the same tokens.
        self.heads_together = True
        tokens = indexer_key_states.unsqueeze(1)
        if handed.in_storage:
            where = handed.slots if handed.row_ends is None else handed.row_ends
            self._tokens.write("indexer", tokens.detach(), where)
            return self._tokens["indexer"][:, 0, : handed.slots + handed.chunk.length]
        if handed.slots:
            tokens = torch.cat([self._tokens["indexer"][:, :, : handed.slots], tokens], dim=2)
        handed.indexer = tokens
        return tokens.squeeze(1)

    def give_up(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the first chunk's keys and values, which a layer of another kind is to take."""
        handed, self._handed_out = self._handed_out, None
        attention.withdraw(self)
        return None if handed is None else (handed.keys, handed.values)

    # ------------------------------------------------------------------ attention

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
        """Look at the attention module that is about to read this layer's keys.

        Raises:
            ValueError: it belongs to another model than the given config.
            RuntimeError: its weights changed since the cache's tokens were computed.
        """
        assert self._handed_out is not None
        config = getattr(module, "config", None)
        if self.seen == 0 and isinstance(config, PreTrainedConfig):
            self.kinds.learn(config)
        # Looking at all weights at every step would take longer than the step's eviction work.
        if self._handed_out.chunk.length > 1 or self.columns.leader == self.layer_idx:
            parameters, version = weights_version(module)
            known, earlier = self._weights_version
            if self.seen and parameters == known and version != earlier:
                raise RuntimeError(
                    "the model's weights changed since the cache was filled; call cache.reset() "
                    "after an update of the weights."
                )
            self._weights_version = parameters, version

    def after_attention(
        self,
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
        if self.seen == 0 and self.is_of_another_kind():
            return  # the cache hands the chunk over to transformers' layer
        if key is not handed.keys or value is not handed.values:
            # What attention pairs with a stored key is not the stored value of the same head.
            self.heads_together = True
        is_4d = isinstance(mask, torch.Tensor) and mask.dim() == 4
        if is_4d and mask.shape[1] > 1:
            # A bias of its own for each head is made slot by slot, whatever the head keeps there.
            self.heads_together = True
        policy, chunk = self.settings.policy, handed.chunk
        query, key, value = query.detach(), key.detach(), value.detach()
        scaling = arguments.get("scaling")
        self._scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        with torch.no_grad():
            if policy.needs_queries and self._queries_matter(chunk):
                self._queries.append(_reorder(query, chunk.padding_first), chunk.real)
            mass = None
            if policy.needs_attention_mass:
                mass = attention_mass(
                    query,
                    key,
                    mask[..., : key.shape[2]] if is_4d else None,
                    scaling=self._scaling,
                    softcap=arguments.get("softcap"),
                    sinks=arguments.get("s_aux"),
                    real_queries=None if chunk.mask is None else chunk.mask.to(query.device),
                )
            self._finish(key, value, mass)

    def is_of_another_kind(self) -> bool:
        """Whether transformers would not use plain full attention here (sliding window, ...)."""
        return self.kinds.stock_layer(self.layer_idx) is not None

    def _queries_matter(self, chunk: Chunk) -> bool:
        """Only the last `window` queries before an eviction are ever read."""
        return (
            chunk.length > 1
            or chunk.mask is not None
            or self.record_past
            or self.rows.room <= self.settings.window
        )

    def settle(self) -> None:
        """Finish what was left open: a chunk whose attention was not reported, an eviction that
        had to wait for other readers of the keys.

        Raises:
            UnsupportedModelError: the policy needs queries that nobody reported.
        """
        if self._handed_out is not None:
            policy = self.settings.policy
            if self._handed_out.chunk is not self.columns.announced:
                raise UnsupportedModelError(
                    "this model builds its attention masks and its attention itself, out of "
                    "transformers' sight, so the cache cannot tell it which tokens are left; use "
                    "DynamicCache."
                )
            if policy.needs_queries or policy.needs_attention_mass:
                raise UnsupportedModelError(
                    f"policy={policy.name!r} scores by the attention queries, but this model's "
                    "attention does not go through transformers' AttentionInterface, so they "
                    "cannot be seen; use a policy that scores by keys alone, such as 'keydiff', "
                    "'knorm', 'lagkv' or 'streaming'."
                )
            self.heads_together = True
            with torch.no_grad():
                self._finish(self._handed_out.keys.detach(), self._handed_out.values.detach(), None)
        if self._eviction_due:
            with torch.no_grad():
                self._evict(self._tokens["keys"], self._tokens["values"])

    def settle_if_done(self) -> None:
        """Settle, unless attention may still be about to report: anybody may look at any time."""
        policy = self.settings.policy
        reports = self.keeps_marks or policy.needs_queries or policy.needs_attention_mass
        if not (self.waits_for_attention and reports):
            self.settle()

    def _finish(self, keys: torch.Tensor, values: torch.Tensor, mass: torch.Tensor | None) -> None:
        """Put the chunk away; `keys` and `values` are what attention saw, for scoring."""
        handed = self._handed_out
        assert handed is not None
        self._handed_out = None
        self._least_slots = 0
        attention.withdraw(self)
        if mass is not None and mass.shape[1] != handed.keys.shape[1]:
            mass = mass.mean(dim=1, keepdim=True).expand(-1, handed.keys.shape[1], -1)
        if self.record_past:
            self._unconfirmed += handed.chunk.length
            self._attended = (keys, values) if self.heads_together else None
        if not handed.in_storage:
            self._store(handed, keys, values, mass)
            return
        self.seen += handed.chunk.length
        self.rows.add(handed.chunk.length)
        if mass is not None:
            self._tokens["mass"][:, :, : mass.shape[2]] += mass
        if self.rows.room <= 0 and not self.record_past:
            self._eviction_due = True
            if not self.keys_are_shared:
                self._evict(keys, values)

    # ------------------------------------------------------------------ eviction

    def _place_tokens(self) -> None:
        """Give the tokens that came since the last call their positions: consecutive ones."""
        stored = self.rows.stored
        if self._placed != stored:
            positions = self._tokens["positions"]
            count, seen, placed = (
                torch.tensor(each, device=positions.device, dtype=positions.dtype).view(-1, 1, 1)
                for each in (stored, self.rows.real_seen, self._placed)
            )
            slot = torch.arange(positions.shape[2], device=positions.device, dtype=positions.dtype)
            positions.copy_(torch.where(slot >= placed, seen - count + slot, positions))
            self._placed = stored

    def _rows_changed(self) -> None:
        """Forget what was derived from the rows' lengths; zero the mass of free slots."""
        self._placed = self.rows.stored
        self._row_ends = None
        if "mass" in self._tokens:
            mass = self._tokens["mass"]
            stored = torch.tensor(self._placed, device=mass.device).view(-1, 1, 1)
            mass.masked_fill_(torch.arange(mass.shape[2], device=mass.device) >= stored, 0.0)

    def _index(self, rows: list[int]) -> torch.Tensor | None:
        """`[b]` int64; None for all rows, which needs no copies."""
        if len(rows) == self.rows.batch:
            return None
        return torch.tensor(rows, device=self.device)

    def _choose(self, rows: list[int], tokens: dict[str, torch.Tensor], keep: int) -> torch.Tensor:
        """Slots `[b, H, keep]` of `tokens` that stay in `rows`, which are noted in the trace."""
        queries = self._queries.data
        if queries is not None:
            queries = _pick(queries, rows)[:, :, -self.settings.window :]
        seen = self.rows.real_seen
        candidates = Candidates(
            keys=tokens["keys"],
            values=tokens["values"],
            positions=tokens["positions"],
            mass=tokens.get("mass"),
            queries=queries if self.settings.policy.needs_queries else None,
            seen=[seen[row] for row in rows],
            scaling=self._scaling,
            layer_idx=self.layer_idx,
        )
        kept = choose_kept(candidates, keep, self.settings, heads_together=self.heads_together)
        if self.deaths is not None:
            self.deaths.evict(self._index(rows), candidates.positions, kept, at=self.seen)
        return kept

    def _evict(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Evict in place in every row that is full.

        Args:
            keys: `[B, Hk, slots, D]` as attention saw them.
            values: `[B, Hk, slots, Dv]`.
        """
        self._eviction_due = False
        self._place_tokens()
        groups: dict[tuple[int, int], list[int]] = {}
        for row, stored in enumerate(self.rows.stored):
            if self.rows.is_full(row):
                groups.setdefault((stored, self.rows.kept(row)), []).append(row)
        for (stored, keep), rows in groups.items():
            sources = {"keys": keys, "values": values, "positions": self._tokens["positions"]}
            if "mass" in self._tokens:
                sources["mass"] = self._tokens["mass"]
            tokens = {name: _pick(source, rows)[:, :, :stored] for name, source in sources.items()}
            kept = self._choose(rows, tokens, keep)
            self._tokens.compact(self._index(rows), kept)
            self.rows.evicted(rows, keep)
        self._rows_changed()

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
        chunk, slots, order = handed.chunk, handed.slots, handed.chunk.padding_first
        real = chunk.real or [chunk.length] * self.rows.batch
        if slots:
            self._place_tokens()
        before = self.rows.stored
        sources = {"keys": handed.keys.detach(), "values": handed.values.detach()}
        if handed.indexer is not None:
            sources["indexer"] = handed.indexer.detach()
        if mass is not None:
            sources["mass"] = mass.clone()
            if slots:
                sources["mass"][:, :, :slots] += self._tokens["mass"][:, :, :slots]
        sources = {name: _reorder(source, order) for name, source in sources.items()}
        sources["positions"] = self._joined_positions(chunk, slots, real, handed.keys.shape[1])
        keys, values = _reorder(keys, order), _reorder(values, order)

        if self.settings.record and self.deaths is None:
            self.deaths = DeathRecord(self.rows.batch, handed.keys.shape[1], self.device)
        self.seen = chunk.start + chunk.length
        self.rows.add_real(real)
        after = self.rows.stored
        if not self.record_past:
            after = [self.rows.kept(row) for row in range(self.rows.batch)]
        self._tokens.reserve(max(after), self.rows.limit + self._rejectable, sources)
        groups: dict[tuple[int, int, int], list[int]] = {}
        for row, sizes in enumerate(zip(before, real, after, strict=True)):
            groups.setdefault(sizes, []).append(row)
        for (stored, new, keep), rows in groups.items():
            tokens = {
                name: _real_tokens(_pick(source, rows), slots, stored, new)
                for name, source in sources.items()
            }
            if keep < stored + new:
                as_seen = {
                    "keys": _real_tokens(_pick(keys, rows), slots, stored, new),
                    "values": _real_tokens(_pick(values, rows), slots, stored, new),
                }
                kept = self._choose(rows, tokens | as_seen, keep)
                tokens = {name: gather_tokens(each, kept) for name, each in tokens.items()}
                self.rows.evicted(rows, keep)
            self._tokens.replace(self._index(rows), tokens)
        self._rows_changed()

    def _joined_positions(
        self, chunk: Chunk, slots: int, real: list[int], heads: int
    ) -> torch.Tensor:
        """Positions `[B, H, slots + T]` int32 of the stored slots and the chunk, padding first."""
        first = torch.tensor(
            [
                seen - (chunk.length - new)
                for seen, new in zip(self.rows.real_seen, real, strict=True)
            ],
            dtype=torch.int32,
            device=self.device,
        )
        column = torch.arange(chunk.length, dtype=torch.int32, device=self.device)
        positions = (first[:, None] + column).unsqueeze(1).expand(-1, heads, -1)
        if not slots:
            return positions
        return torch.cat([self._tokens["positions"][:, :, :slots], positions], dim=2)

    def hide(self, hidden: torch.Tensor, position: torch.Tensor) -> None:
        """Forget stored tokens that a later mask declares to be padding.

        Args:
            hidden: `[B, R]` boolean by position: the tokens to forget.
            position: `[B, R]`: the position of every other token from now on.
        """
        self.settle()
        if not self._tokens:
            return
        self._place_tokens()
        width, before = self.slots, self.rows.stored
        old = self._tokens["positions"][:, :, :width].long()
        slot = torch.arange(width, device=old.device)
        alive = slot < torch.tensor(before, device=old.device).view(-1, 1, 1)
        old = old.where(alive, 0)
        by_head = (-1, old.shape[1], -1)
        alive = alive & ~hidden.to(old.device).unsqueeze(1).expand(by_head).gather(2, old)
        new = position.to(old.device).unsqueeze(1).expand(by_head).gather(2, old)
        self._tokens["positions"][:, :, :width] = new.int()
        counts = alive.sum(-1)
        left = counts.amin(1)
        if bool((counts > left[:, None]).any()):
            warn_once(
                "some heads had evicted real tokens to make room for tokens that are now masked "
                "as padding; the other heads drop their oldest tokens to stay in step."
            )
        # Where a head has more tokens left than another, its oldest behind the sinks go.
        rank = slot + width * (new < self.settings.sinks)
        rank = rank.where(alive, -1)
        order = rank.sort(dim=-1, descending=True).indices[..., : int(left.max())]
        chosen = torch.arange(order.shape[-1], device=order.device) < left.view(-1, 1, 1)
        order = order.where(chosen, width).sort(dim=-1).values.clamp(max=width - 1)
        self._tokens.compact(None, order)
        gone = [stored - kept for stored, kept in zip(before, left.tolist(), strict=True)]
        self.rows.remove(gone, seen_too=hidden.sum(-1).tolist())
        self._rows_changed()
        # transformers has been told the old width for the mask under way.
        self._least_slots = width

    # ------------------------------------------------------------------ the verbs of a cache

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; all that the layer owns moves together.

        Args:
            rows: `[B']` int64, the old row of each new one.
        """
        self.settle()
        if not self._tokens:
            return
        self._place_tokens()
        self._tokens.select_rows(rows)
        self._queries.select_rows(rows)
        if self.deaths is not None:
            self.deaths.select_rows(rows)
        self.rows.select(rows)
        self._placed = self.rows.stored
        self._row_ends = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Move rows along with their beams; `beam_idx` `[B]`."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        self.select_rows(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` `[B']`, or those where a boolean `[B]` is True."""
        self.select_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def reset(self) -> None:
        """Forget all tokens; the memory is given back."""
        attention.withdraw(self)
        self.record_past = False
        self._clear()

    def offload(self) -> None:
        """Move the stored tokens to the CPU; the next update brings them back."""
        self.settle()
        self._tokens.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring offloaded tokens back to the layer's device."""
        if self._tokens:
            self._tokens.move(self.device)

    @property
    def _rejectable(self) -> int:
        return REJECTABLE_TOKENS if self.record_past else 0

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
        self._queries.resize(self.settings.window + self._rejectable)

    def stop_past_recording(self) -> None:
        """Evict as usual again; tokens not taken back by now are there to stay."""
        if self.record_past:
            self.crop(0)
            self.record_past = False
            self._queries.resize(self.settings.window)
            self._tokens.shrink(self.rows.limit)

    def check_crop(self, tokens: int) -> None:
        """Raise if the last `tokens` cannot be taken back exactly.

        Raises:
            ValueError: more tokens than were seen.
            UnsupportedModelError: tokens were evicted or scored since they came.
        """
        self.settle()
        if tokens > self.seen:
            raise ValueError(f"crop({-tokens}) removes more tokens than the {self.seen} seen.")
        if not tokens:
            return
        if self.record_past:
            possible = tokens <= self._unconfirmed
        else:
            policy = self.settings.policy
            needs = policy.needs_queries or policy.needs_attention_mass
            unscored = not needs or self.rows.room > self.settings.window
            possible = not self.rows.evictions and unscored and not self.columns.padded(tokens)
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
            self._place_tokens()
            self.seen -= tokens
            each = [tokens] * self.rows.batch
            self.rows.remove(each, seen_too=each)
            self._queries.drop_last(tokens)
            self._rows_changed()
        self._unconfirmed = 0
        if self.rows.room <= 0:
            keys, values = self._attended or (self._tokens["keys"], self._tokens["values"])
            with torch.no_grad():
                self._evict(keys, values)
            self._tokens.shrink(self.rows.limit + self._rejectable)
        self._attended = None

    # ------------------------------------------------------------------ accounting

    def stored_bytes(self) -> int:
        """Bytes of the keys and values allocated, used or not."""
        return sum(self._tokens[n].nbytes for n in ("keys", "values") if n in self._tokens)

    def bookkeeping_bytes(self) -> int:
        """Bytes of everything else the layer holds: positions, queries, masses, deaths."""
        others = [self._tokens[n] for n in self._tokens if n not in ("keys", "values")]
        others += [t for t in (self._queries.data, self._row_ends) if t is not None]
        if self.deaths is not None:
            others.append(self.deaths.data)
        return sum(tensor.nbytes for tensor in others)

    def dense_bytes(self) -> int:
        """Bytes that a dense cache would hold for the same columns."""
        if not self._tokens:
            return 0
        tensors = (self._tokens["keys"], self._tokens["values"])
        return self.seen * sum(tensor.nbytes // tensor.shape[2] for tensor in tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen}, stored={self.lengths})"


def _refuse_assignment(value: torch.Tensor | None) -> None:
    # CacheLayerMixin sets both to None at construction.
    if value is not None:
        raise AttributeError("a budgeted layer's keys and values are written by update() only.")


def _pick(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tensor[rows]`, without a copy where that is everything."""
    return tensor if len(rows) == tensor.shape[0] else tensor[rows]


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
