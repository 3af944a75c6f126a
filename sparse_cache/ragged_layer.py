"""A budgeted layer whose KV heads share its budget, and which attends to them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attention_arguments import scaling_of, sinks_of, softcap_of
from .attention_mass import attention_mass
from .chunk import Chunk
from .errors import UnsupportedModelError
from .held import reorder_chunk
from .layer import _HandedOut
from .layer_mask import slot_mask
from .ragged import RaggedTokens
from .ragged_attention import checked_arguments, is_plain, mask_of_queries, padded_attention
from .reported_layer import ReportedLayer

_IMPLEMENTATION = {"auto": "auto", "torch": "reference", "triton": "triton"}
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD_SIZE = 256


class RaggedLayer(ReportedLayer):
    """Keeps `H * budget` tokens a row, of which each KV head has as many as the allocator gives it.

    No rectangular tensor holds such tokens, so attention gets placeholders full of NaN, which take
    no memory, and when it is called the layer computes it from what is stored: a decoding step by
    `sparse_cache.kernels.decode_attention`, which reads exactly the stored tokens, and a chunk by
    way of a padded copy. The first chunk is attended to by the model's own function; there the
    layer also makes sure that it would have computed the same.
    """

    def _clear(self) -> None:
        super()._clear()
        self._held: RaggedTokens = RaggedTokens(
            self.settings, self.layer_idx, 0, 1, torch.device("cpu")
        )
        self._chunk: tuple[torch.Tensor, torch.Tensor] | None = None
        # What a chunk attended to: keys, values, mask and the slots they were copied from.
        self._padded: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def lengths_by_head(self) -> list[list[int]]:
        """Tokens stored now, by row and KV head; their mean over heads is `lengths`."""
        return self._held.lengths_by_head

    @property
    def held(self) -> RaggedTokens:
        """What the layer holds."""
        return self._held

    @property
    def evicts_with_others(self) -> bool:
        """False: a pool is laid out anew by the layer itself."""
        return False

    def _used(self, name: str) -> torch.Tensor | None:
        """A copy `[B, H, longest head, ...]`, zeros behind each head's tokens."""
        self.settle()
        if name not in self._held.storage:
            return None
        slots, valid = self._held.slots_by_head()
        return self._held.by_head(name, slots).masked_fill(~valid.unsqueeze(-1), 0.0)

    # ------------------------------------------------------------------ taking tokens in

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take batch size, heads, dtype and device from the first chunk."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._held = RaggedTokens(
            self.settings,
            self.layer_idx,
            key_states.shape[0],
            key_states.shape[1],
            key_states.device,
        )
        self.is_initialized = True

    @property
    def _heads(self) -> int:
        return self._held.heads

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, chunk: Chunk
    ) -> _HandedOut:
        held = self._held
        self._open_storage(key_states)
        slots, limit, length = held.slots, held.rows.limit, chunk.length
        in_pool = (
            length == 1
            and chunk.mask is None
            and held.rows.longest < limit
            and not torch.is_grad_enabled()
        )
        if in_pool:
            held.reserve_same(held.rows.longest + 1, limit)
            held.write_step(key_states, value_states)
        else:
            self._chunk = key_states, value_states
        keys, values = (
            states.new_full((1, 1, 1, 1), torch.nan).expand(
                *states.shape[:2], slots + length, states.shape[3]
            )
            for states in (key_states, value_states)
        )
        return _HandedOut(keys, values, chunk, in_storage=in_pool, slots=slots)

    # ------------------------------------------------------------------ attention

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
        """Attend to what is stored; see `BudgetLayer.attend`.

        Returns:
            `(output [B, T, Hq, Dv], None)`; the first chunk: what the model's function returns.

        Raises:
            UnsupportedModelError: the model's attention is not plain softmax attention over the
                keys and values that it took from the cache.
        """
        handed = self._handed_out
        assert handed is not None
        first = self.seen == 0
        if first and self.is_of_another_kind():
            return attention(query, key, value, mask, *rest, **arguments)
        if key is not handed.keys or value is not handed.values:
            raise UnsupportedModelError(
                "this model changes keys or values between the cache and attention, which "
                f"{self._allocation} cannot serve; use allocation='uniform'."
            )
        if arguments.get("output_attentions"):
            self._refuse_weights()
        asked = checked_arguments(self._allocation, rest, arguments)
        self._held.scaling = scaling_of(query, arguments)
        asked["scaling"] = self._held.scaling
        if first:
            output = attention(query, key, value, mask, *rest, **arguments)
            self._check_plain(output, query, key, value, mask, asked)
            return output
        if handed.in_storage and self._kernel_serves(query):
            output = self._decode(query, asked)
        else:
            output = self._attend_padded(query, mask, asked)
        return output.transpose(1, 2).contiguous(), None

    def before_attention(self, module: torch.nn.Module, key: torch.Tensor, mask: Any) -> None:
        """See `ReportedLayer.before_attention`.

        Raises:
            UnsupportedModelError: the model's config asks for attention weights.
        """
        super().before_attention(module, key, mask)
        if getattr(getattr(module, "config", None), "output_attentions", False):
            self._refuse_weights()

    def _refuse_weights(self) -> None:
        raise UnsupportedModelError(
            f"{self._allocation} has no attention weights to give; call the model without "
            "output_attentions or use allocation='uniform'."
        )

    def _kernel_serves(self, query: torch.Tensor) -> bool:
        largest = max(query.shape[3], self._held.storage["values"].shape[3])
        return query.dtype in _KERNEL_DTYPES and largest <= _LARGEST_HEAD_SIZE

    def _decode(self, query: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
        """One new token, already in the pool: `[B, Hq, 1, Dv]`."""
        from .kernels.decode_attention import decode_attention

        held = self._held
        mass = held.storage["mass"] if self.settings.policy.needs_attention_mass else None
        return decode_attention(
            query.contiguous(),
            held.storage["keys"],
            held.storage["values"],
            held.lengths() + 1,
            offsets=held.offsets,
            mass=mass,
            implementation=_IMPLEMENTATION[self.settings.backend],
            **asked,
        ).output

    def _attend_padded(self, query: torch.Tensor, mask: Any, asked: dict[str, Any]) -> torch.Tensor:
        """`[B, Hq, T, Dv]` by a copy in which all heads are as long as the longest."""
        handed, held = self._handed_out, self._held
        assert handed is not None
        length = handed.chunk.length
        slots, valid = held.slots_by_head(new=int(handed.in_storage))
        keys, values = held.by_head("keys", slots), held.by_head("values", slots)
        visible = valid.unsqueeze(2)
        if not handed.in_storage:
            assert self._chunk is not None
            keys = torch.cat([keys, self._chunk[0]], dim=2)
            values = torch.cat([values, self._chunk[1]], dim=2)
            # transformers' mask says what the queries see of the chunk.
            own = slot_mask(
                mask,
                self._slot_mask(handed.chunk, None),
                slots=handed.slots,
                length=length,
                batch=query.shape[0],
                dtype=query.dtype,
                device=query.device,
            )
            if own is None:
                own = torch.ones(query.shape[0], 1, 1, 1, dtype=torch.bool, device=query.device)
            own = own[..., own.shape[-1] - length :].expand(-1, held.heads, length, -1)
            stored = visible.expand(-1, -1, length, -1)
            if own.dtype != torch.bool:
                hidden = torch.zeros(stored.shape, dtype=own.dtype, device=own.device)
                stored = hidden.masked_fill_(~stored, torch.finfo(own.dtype).min)
            visible = torch.cat([stored, own], dim=-1)
        self._padded = keys, values, visible, slots
        return padded_attention(query, keys, values, visible, **asked)

    def _check_plain(
        self,
        output: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        asked: dict[str, Any],
    ) -> None:
        """Compare the model's attention of the newest token with what this layer would compute.

        Raises:
            UnsupportedModelError: they differ, so later steps would be silently wrong.
        """
        chunk = self._handed_out.chunk  # type: ignore[union-attr]
        real = None if chunk.mask is None else chunk.mask[:, -1].to(query.device)
        if not is_plain(output, query, key, value, mask, real, **asked):
            raise UnsupportedModelError(
                f"this model's attention is not plain softmax attention under one mask, which "
                f"{self._allocation} would have to compute itself; use allocation='uniform'."
            )

    def after_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> None:
        """See `BudgetLayer.after_attention`; `key` and `value` may be placeholders."""
        handed, held, policy = self._handed_out, self._held, self.settings.policy
        assert handed is not None
        if self.seen == 0:
            super().after_attention(query, key, value, mask, arguments)
            return
        padded, self._padded = self._padded, None
        chunk = handed.chunk
        with torch.no_grad():
            if policy.needs_queries and self._queries_matter(chunk):
                held.queries.append(reorder_chunk(query.detach(), chunk.padding_first), chunk.real)
            mass = None
            if policy.needs_attention_mass and padded is not None:
                group = query.shape[1] // held.heads
                mass = attention_mass(
                    query.detach(),
                    padded[0].detach(),
                    mask_of_queries(padded[2], group),
                    scaling=held.scaling,
                    softcap=softcap_of(arguments),
                    sinks=sinks_of(arguments),
                    real_queries=None if chunk.mask is None else chunk.mask.to(query.device),
                )
            if padded is None or handed.in_storage:
                if mass is not None and padded is not None:
                    held.add_mass(padded[3], mass.masked_fill(~padded[2][:, :, 0], 0.0))
                self._finish(key, value, None)
            else:
                self._finish(padded[0].detach(), padded[1].detach(), mass)

    def _finish(self, keys: torch.Tensor, values: torch.Tensor, mass: torch.Tensor | None) -> None:
        """Put the chunk away: `[stored | chunk]` by head, unless it lies in the pool already."""
        from . import attention

        handed, held = self._handed_out, self._held
        assert handed is not None
        self._handed_out = self._chunk = None
        attention.withdraw(self)
        if not handed.in_storage:
            held.take_in(handed.chunk, keys, values, mass)
            return
        held.add(1)
        if held.rows.room <= 0:
            self._evict(held.storage["keys"], held.storage["values"])

    # ------------------------------------------------------------------ the verbs of a cache

    def activate_past_recording(self) -> None:
        """Not served.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"{self._allocation} cannot take tokens back, which assisted decoding asks for; "
            "generate without an assistant or use allocation='uniform'."
        )
