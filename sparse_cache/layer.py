"""One budgeted layer: stores, hands out, and evicts when its attention is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from . import attention
from .attention_arguments import scaling_of, sinks_of, softcap_of, unknown_arguments
from .attention_mass import attention_mass
from .chunk import Chunk
from .columns import Columns
from .errors import UnsupportedModelError, warn_once
from .held import HeldTokens, reorder_chunk
from .kernel_attention import DTYPES, KernelAttention
from .kernel_eviction import evict_together, uses_kernels
from .layer_kinds import LayerKinds
from .masking import MaskRequest
from .reuse import Weights, check_weights
from .settings import BudgetSettings
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
    encoded: dict[str, torch.Tensor] | None = None
    """What is to be stored of `keys` and `values`, if that is not what they hold."""


class BudgetLayer(CacheLayerMixin):
    """A full-attention layer that keeps a budget of tokens per row and KV head.

    This is the side that transformers talks to: chunks come in, views of what is stored go out to
    attention, and when attention is done, full rows evict. What is stored is `HeldTokens`. Between
    evictions only integers change besides the one new token that is written.
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
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self._held = HeldTokens(self.settings, self.layer_idx, 0, torch.device("cpu"))
        self._handed_out: _HandedOut | None = None
        self._eviction_due = False
        self._uses_kernels = False
        self._kernel = KernelAttention(self.settings)
        self._unconfirmed = 0
        self._weights: Weights | None = None
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
        held = self._held
        return held.decoded(name, held.slots) if name in held.storage else None

    @property
    def seen(self) -> int:
        """Columns seen: steps along the batch's token axis, padding included."""
        return self._held.seen

    @property
    def lengths(self) -> list[int]:
        """Tokens stored now, per row (the same for every KV head)."""
        return self._held.rows.stored

    @property
    def evictions(self) -> int:
        """Evictions so far, each of one row."""
        return self._held.rows.evictions

    @property
    def tokens_evicted(self) -> int:
        """Tokens evicted so far, summed over rows (every KV head loses as many)."""
        return self._held.rows.tokens_evicted

    @property
    def deaths(self) -> DeathRecord | None:
        """When each token was evicted, if that is recorded."""
        return self._held.deaths

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first chunk."""
        return self._held.rows.batch or -1

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
        slots = self._held.slots
        return slots + query_length, self.seen - slots

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
                attention_mask,
                self.seen,
                query_length,
                self._held.rows.real_seen,
                self.columns.real() if self.seen else None,
            )
            self.columns.announced = chunk
            if chunk.seen_mask is not None:
                hide_seen(chunk.seen_mask)
            return self._slot_mask(chunk, attention_mask)

        slots = self._held.slots
        return MaskRequest((query_length, slots + query_length), slot_mask, slots, learn)

    def _slot_mask(self, chunk: Chunk, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """`[B, slots + T]`, True for real tokens; None if all are."""
        if self.seen == 0:
            return chunk.mask
        rows, slots = self._held.rows, self._held.slots
        if chunk.mask is None and rows.uniform and slots == rows.longest:
            return None
        device = self.device if attention_mask is None else attention_mask.device
        stored = torch.tensor(rows.stored, device=device).unsqueeze(1)
        slot = torch.arange(slots + chunk.length, device=device)
        if self._takes_token_in_rows(chunk):
            return slot <= stored
        mask = slot < stored
        mask[:, slots:] = True if chunk.mask is None else chunk.mask.to(device)
        return mask

    def _takes_token_in_rows(self, chunk: Chunk) -> bool:
        """Whether each row takes its one new token at its own end, not at a common slot."""
        rows = self._held.rows
        return (
            chunk.length == 1
            and chunk.mask is None
            and not rows.uniform
            and self._held.slots == rows.longest
            and not torch.is_grad_enabled()
        )

    # ------------------------------------------------------------------ taking tokens in

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch size, dtype and device from the first chunk."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._held = HeldTokens(
            self.settings, self.layer_idx, key_states.shape[0], key_states.device
        )
        self._held.dtype = key_states.dtype
        self._held.queries.resize(self.settings.window + self._rejectable)
        self._uses_kernels = uses_kernels(self.settings.backend, key_states.device)
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
        if key_states.shape[0] != self._held.rows.batch:
            raise ValueError(
                f"the cache holds a batch of {self._held.rows.batch} but got {key_states.shape[0]} "
                "rows; call cache.reset() or make a new cache for another batch."
            )
        if self._held.storage:
            self._check_same_kind(key_states)
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

    @property
    def _heads(self) -> int:
        """KV heads stored."""
        return self._held.storage["keys"].shape[1]

    def _check_same_kind(self, key_states: torch.Tensor) -> None:
        size = self._held.storage["keys"].shape[3]
        if (self._heads, size, self.dtype) != (
            key_states.shape[1],
            key_states.shape[3],
            key_states.dtype,
        ):
            raise ValueError(
                f"the cache holds keys of {self._heads} heads x {size} "
                f"({self.dtype}) but got {key_states.shape[1]} x {key_states.shape[3]} "
                f"({key_states.dtype}); call cache.reset() after a change of the model or its "
                "dtype."
            )

    def _open_storage(self, key_states: torch.Tensor) -> None:
        """Have storage where tokens can be written to it."""
        self._held.storage.move(self.device)
        self._held.storage.make_writable()
        if torch.is_grad_enabled() and key_states.requires_grad:
            warn_once(
                "gradients do not flow through tokens stored in SparseBudgetCache: they are "
                "constants for every later step; use torch.no_grad() if none are wanted."
            )

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, chunk: Chunk
    ) -> _HandedOut:
        held = self._held
        self._open_storage(key_states)
        slots, limit = held.slots, held.rows.limit + self._rejectable
        in_rows = self._takes_token_in_rows(chunk)
        at_end = held.rows.uniform and chunk.mask is None and slots == held.rows.longest
        if torch.is_grad_enabled() and key_states.requires_grad:
            # Autograd keeps what attention read, so that must not be written again.
            at_end = False
        if not (in_rows or (at_end and slots + chunk.length <= limit)):
            held.restore_order()
            return self._joined(key_states, value_states, chunk)
        end = slots + chunk.length
        held.storage.reserve_same(end, limit)
        row_ends = held.free_slots() if in_rows else None
        where = slots if row_ends is None else row_ends
        held.write("keys", key_states.detach(), where)
        held.write("values", value_states.detach(), where)
        keys, values = self._readable(end, chunk.length)
        return _HandedOut(keys, values, chunk, in_storage=True, slots=slots, row_ends=row_ends)

    def _readable(self, slots: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values for attention of the last `length` tokens to read; of quantized ones that
        only our kernel is to read, in a step of one token, just the shape, full of NaN lest anybody
        takes them for keys."""
        held = self._held
        only_kernel = length == 1 and not self.keys_are_shared
        if (
            self.settings.quantization
            and only_kernel
            and self._kernel.is_preferred(held, masked=False)
        ):
            return held.placeholder("keys", slots), held.placeholder("values", slots)
        return held.decoded("keys", slots), held.decoded("values", slots)

    def _joined(
        self, key_states: torch.Tensor, value_states: torch.Tensor, chunk: Chunk
    ) -> _HandedOut:
        """`[stored slots | chunk]` in tensors of their own."""
        held, slots = self._held, self._held.slots
        parts = {"keys": key_states, "values": value_states}
        encoded = None
        if self.settings.quantization is not None:
            # Stored tokens are not rounded once more, and new ones are read as they are stored.
            new = held.encoded({name: part.detach() for name, part in parts.items()})
            encoded = {
                name: torch.cat([held.storage[name][:, :, :slots], part], dim=2)
                for name, part in new.items()
            }
            parts = {name: held.rounded(name, part, new) for name, part in parts.items()}
        joined = {
            name: torch.cat([held.decoded(name, slots), part], dim=2)
            for name, part in parts.items()
        }
        return _HandedOut(
            joined["keys"],
            joined["values"],
            chunk,
            in_storage=False,
            slots=slots,
            encoded=encoded,
        )

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
        self._held.heads_together = True
        storage = self._held.storage
        tokens = indexer_key_states.unsqueeze(1)
        if handed.in_storage:
            where = handed.slots if handed.row_ends is None else handed.row_ends
            storage.write("indexer", tokens.detach(), where)
            return storage["indexer"][:, 0, : handed.slots + handed.chunk.length]
        if handed.slots:
            tokens = torch.cat([storage["indexer"][:, :, : handed.slots], tokens], dim=2)
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

    def before_attention(self, module: torch.nn.Module, key: torch.Tensor, mask: Any) -> None:
        """Look at the attention module that is about to read this layer's keys.

        Args:
            module: the attention module.
            key: `[B, Hk, slots + T, D]`, as attention sees it.
            mask: whatever mask attention is given.

        Raises:
            UnsupportedModelError: a mask that was not made for the cache's slots.
            ValueError: it belongs to another model than the given config.
            RuntimeError: its weights changed since the cache's tokens were computed.
        """
        assert self._handed_out is not None
        config = getattr(module, "config", None)
        if self.seen == 0 and isinstance(config, PreTrainedConfig):
            self.kinds.learn(config)
        announced = self._handed_out.chunk is self.columns.announced
        is_4d = isinstance(mask, torch.Tensor) and mask.dim() == 4
        if is_4d and not announced and mask.shape[-1] != key.shape[2]:
            raise UnsupportedModelError(
                f"attention_mask is a 4D mask for {mask.shape[-1]} tokens, but {key.shape[2]} are "
                "stored; pass the 2D mask of the whole text, from which the cache makes its own."
            )
        if self.columns.leader == self.layer_idx:
            self._weights = check_weights(
                self._weights if self.seen else None,
                module,
                thoroughly=self._handed_out.chunk.length > 1,
            )

    def attend(
        self,
        attention: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *rest: Any,
        **arguments: Any,
    ) -> Any:
        """Attend to what was handed out.

        Args:
            attention: the model's attention function, its module already given.
            query: `[B, Hq, T, D]`.
            key: `[B, Hk, slots + T, D]`, as attention is to see it.
            value: `[B, Hk, slots + T, Dv]`, likewise.
            mask: the mask that transformers made.
            rest, arguments: attention's other arguments.

        Returns:
            What the attention function returns.
        """
        handed = self._handed_out
        if self._uses_kernels and handed is not None and key is handed.keys:
            if self.seen == 0:
                output = attention(query, key, value, mask, *rest, **arguments)
                real = handed.chunk.mask
                self._kernel.learn(output, query, key, value, mask, real, rest, arguments)
                return output
            mine = handed.in_storage and value is handed.values and handed.chunk.length == 1
            if mine and self._kernel.is_preferred(self._held, masked=mask is not None):
                if others := unknown_arguments(rest, arguments):
                    raise UnsupportedModelError(
                        f"attention is asked for {', '.join(sorted(others))} in a decoding step "
                        "but was not with the prompt, which the kernels cannot serve; use "
                        "backend='torch'."
                    )
                return self._kernel.attend(self._held, query, self._lengths_in_step(), arguments)
        return attention(query, key, value, mask, *rest, **arguments)

    def _lengths_in_step(self) -> torch.Tensor:
        """`[B]` int32: tokens that each row stores, the one under way included."""
        handed, rows = self._handed_out, self._held.rows
        assert handed is not None
        if handed.row_ends is not None:
            return (handed.row_ends + 1).int()
        return self.columns.filled(rows.batch, handed.slots + 1, self.device)

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
            self._held.heads_together = True
        is_4d = isinstance(mask, torch.Tensor) and mask.dim() == 4
        if is_4d and mask.shape[1] > 1:
            # A bias of its own for each head is made slot by slot, whatever the head keeps there.
            self._held.heads_together = True
        policy, chunk = self.settings.policy, handed.chunk
        query, key, value = query.detach(), key.detach(), value.detach()
        self._held.scaling = scaling_of(query, arguments)
        with torch.no_grad():
            if policy.needs_queries and self._queries_matter(chunk):
                self._held.queries.append(reorder_chunk(query, chunk.padding_first), chunk.real)
            mass = None
            if policy.needs_attention_mass and not self._kernel.mass_is_counted:
                mass = attention_mass(
                    query,
                    key,
                    mask[..., : key.shape[2]] if is_4d else None,
                    scaling=self._held.scaling,
                    softcap=softcap_of(arguments),
                    sinks=sinks_of(arguments),
                    real_queries=None if chunk.mask is None else chunk.mask.to(query.device),
                )
            self._kernel.mass_is_counted = False
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
            or self._held.rows.room <= self.settings.window
        )

    def settle(self) -> None:
        """Finish what was left open: a chunk whose attention was not reported, an eviction that
        had to wait for other readers of the keys.

        Raises:
            UnsupportedModelError: the policy needs queries that nobody reported.
            RuntimeError: a call of the model was broken off.
        """
        if self._handed_out is not None:
            policy = self.settings.policy
            if self.keeps_marks:
                raise RuntimeError(
                    "an earlier call of the model did not finish: attention never read the keys "
                    f"that layer {self.layer_idx} handed out; call cache.reset() and start again."
                )
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
            self._held.heads_together = True
            with torch.no_grad():
                self._finish(self._handed_out.keys.detach(), self._handed_out.values.detach(), None)
        if self.is_due_with_others:
            evict_together([self._held])
            self.evicted_with_others()
        elif self._eviction_due:
            self._evict(self._held.decoded("keys"), self._held.decoded("values"))

    @property
    def evicts_with_others(self) -> bool:
        """Whether evictions wait for the end of a step, to be done for all layers by kernels."""
        held = self._held
        return (
            self._uses_kernels
            and not (held.heads_together or "indexer" in held.storage)
            and self.dtype in DTYPES
        )

    @property
    def is_due_with_others(self) -> bool:
        """Whether an eviction waits that is to be done together with that of other layers."""
        return self._eviction_due and self.evicts_with_others

    def evicted_with_others(self) -> None:
        """The eviction that waited is done."""
        self._eviction_due = False

    def settle_if_done(self) -> None:
        """Settle, unless attention may still be about to report: anybody may look at any time."""
        policy = self.settings.policy
        reports = self.keeps_marks or policy.needs_queries or policy.needs_attention_mass
        if not (self.waits_for_attention and reports):
            self.settle()

    def _finish(self, keys: torch.Tensor, values: torch.Tensor, mass: torch.Tensor | None) -> None:
        """Put the chunk away; `keys` and `values` are what attention saw, for scoring."""
        handed, held = self._handed_out, self._held
        assert handed is not None
        self._handed_out = None
        held.least_slots = 0
        attention.withdraw(self)
        if mass is not None and mass.shape[1] != handed.keys.shape[1]:
            mass = mass.mean(dim=1, keepdim=True).expand(-1, handed.keys.shape[1], -1)
        if self.record_past:
            self._unconfirmed += handed.chunk.length
            self._attended = (keys, values) if held.heads_together else None
        if handed.in_storage:
            held.add(handed.chunk.length)
            if mass is not None:
                held.storage["mass"][:, :, : mass.shape[2]] += mass
            if held.rows.room <= 0 and not self.record_past:
                self._eviction_due = True
                if not (self.keys_are_shared or self.evicts_with_others):
                    self._evict(keys, values)
            return
        sources = {
            "keys": handed.keys.detach(),
            "values": handed.values.detach(),
            "mass": mass,
            "indexer": None if handed.indexer is None else handed.indexer.detach(),
        } | (handed.encoded or {})
        held.take(
            handed.chunk,
            {name: source for name, source in sources.items() if source is not None},
            keys,
            values,
            may_evict=not self.record_past,
            spare=self._rejectable,
        )

    def _evict(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Evict in the rows that are full; `keys` and `values` are what attention saw."""
        self._eviction_due = False
        with torch.no_grad():
            self._held.evict(keys, values)

    # ------------------------------------------------------------------ the verbs of a cache

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; all that the layer owns moves together.

        Args:
            rows: `[B']` int64, the old row of each new one.
        """
        self.settle()
        self._held.select_rows(rows)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Move rows along with their beams; `beam_idx` `[B]`."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        self.select_rows(torch.arange(self._held.rows.batch).repeat_interleave(repeats))

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
        self._held.storage.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Bring offloaded tokens back to the layer's device."""
        if self._held.storage:
            self._held.storage.move(self.device)

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
        self._held.queries.resize(self.settings.window + self._rejectable)

    def stop_past_recording(self) -> None:
        """Evict as usual again; tokens not taken back by now are there to stay."""
        if self.record_past:
            self.crop(0)
            self.record_past = False
            self._held.queries.resize(self.settings.window)
            self._held.storage.shrink(self._held.rows.limit)

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
            unscored = not needs or self._held.rows.room > self.settings.window
            possible = not self.evictions and unscored and not self.columns.padded(tokens)
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
        tokens, held = abs(int(tokens_to_remove)), self._held
        self.check_crop(tokens)
        if not held.storage:
            return
        if tokens:
            held.remove_last(tokens)
        self._unconfirmed = 0
        if held.rows.room <= 0:
            self._evict(*(self._attended or (held.decoded("keys"), held.decoded("values"))))
            held.storage.shrink(held.rows.limit + self._rejectable)
        self._attended = None

    @property
    def held(self) -> HeldTokens:
        """What the layer holds."""
        return self._held

    def __getstate__(self) -> dict[str, Any]:
        # A copy may go on in another process, where the same model is another object.
        return self.__dict__ | {"_weights": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen={self.seen}, stored={self.lengths})"


def _refuse_assignment(value: torch.Tensor | None) -> None:
    # CacheLayerMixin sets both to None at construction.
    if value is not None:
        raise AttributeError("a budgeted layer's keys and values are written by update() only.")
