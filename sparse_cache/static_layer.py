"""A budgeted layer of fixed shape, whose decoding steps can be compiled into one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from . import attention
from .attention_arguments import sinks_of, softcap_of
from .attention_mass import attention_mass
from .columns import Columns
from .errors import UnsupportedModelError
from .held import HeldTokens
from .layer import BudgetLayer
from .layer_kinds import LayerKinds
from .masking import MaskRequest
from .settings import BudgetSettings
from .steps import RowEnds, UnseenSteps, tracing


class StaticBudgetLayer(BudgetLayer):
    """Hands out all its `budget + interval` slots in every decoding step, whatever is in them.

    Prompts are taken in as by `BudgetLayer`. A decoding step then writes its token at the end of
    each row and attends under a mask over the slots; all that changes are tensors at fixed
    addresses, so the step can be traced once and replayed. Python learns of the steps when it looks
    (`catch_up`), which `generate` does before each of them; that is also when full rows evict,
    outside of the graph.
    """

    is_compileable = True

    def __init__(
        self,
        settings: BudgetSettings,
        layer_idx: int,
        columns: Columns,
        kinds: LayerKinds,
        steps: UnseenSteps,
    ) -> None:
        self.steps = steps
        self._spare: HeldTokens | None = None
        self._stepping = False
        self._ends: RowEnds | None = None
        super().__init__(settings, layer_idx, columns, kinds)

    # ------------------------------------------------------------------ what is on the device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self._spare is not None and self._spare.fits(key_states, value_states):
            self._held.take_over(self._spare)
        self._spare = None
        self._held.fixed = True
        self._ends = self.steps.join(self, key_states.shape[0], key_states.device)

    @property
    def ends(self) -> RowEnds:
        """Where rows take their next token."""
        assert self._ends is not None
        return self._ends

    def _publish(self) -> None:
        """Tell the device how many tokens each row stores, if that is not what steps made it."""
        # Layers come to the same counts one after the other; what holds is what the last one has.
        if self.is_initialized and self.ends.last is self:
            self.ends.tell(self._held.rows.stored, self.seen)

    def _pin(self) -> None:
        """Promise compiled graphs that tensors stay where they are."""
        window = self._held.queries.data
        for tensor in (*self._held.storage.tensors(), *([] if window is None else [window])):
            torch._dynamo.mark_static_address(tensor)

    def took_steps(self, steps: int) -> None:
        """The device took `steps` tokens in."""
        self._held.add(steps)
        if self.ends.last is self:
            self.ends.stepped(self._held.rows.stored, self.seen)
        if self._held.rows.room <= 0:
            self._eviction_due = True

    def settle(self) -> None:
        self.catch_up()
        super().settle()
        self._publish()

    def evicted_with_others(self) -> None:
        super().evicted_with_others()
        self._publish()

    def catch_up(self) -> None:
        """Count the steps that no Python code has seen, in all layers."""
        if self._handed_out is not None or not self.seen:
            return
        if steps := self.steps.take():
            self.columns.seen += steps
            self.columns.announced = None
            for layer in self.steps.layers:
                layer.took_steps(steps)

    # ------------------------------------------------------------------ what transformers reads

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]
        """Columns seen; in a graph a 0-dim int64 tensor, so that positions can be made from it."""
        if torch.compiler.is_dynamo_compiling():
            # A copy: the number must not change under its reader when this step is counted.
            return self.ends.seen.clone()
        return self.seen

    @property
    def waits_for_attention(self) -> bool:
        return self._stepping or super().waits_for_attention

    def takes_step(self, length: int) -> bool:
        """Whether a chunk of `length` columns is a decoding step of fixed shape."""
        return length == 1 and self.seen > 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """In a decoding step all slots, in use or not."""
        if torch.compiler.is_dynamo_compiling():
            tracing.masking = self
            return self._capacity, 0
        if not self.takes_step(query_length):
            return super().get_mask_sizes(query_length)
        self.settle()
        return self._capacity, 0

    @property
    def _capacity(self) -> int:
        return self._held.storage.capacity

    def mask_request(
        self,
        query_length: int,
        hide_seen: Callable[[torch.Tensor], None],
        learn: Callable[[PreTrainedConfig], None],
    ) -> MaskRequest:
        request = super().mask_request(query_length, hide_seen, learn)
        if not self.takes_step(query_length):
            return request

        def slot_mask(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
            request.slot_mask(attention_mask)
            chunk = self.columns.announced
            if chunk is not None and chunk.mask is not None:
                raise UnsupportedModelError(
                    "attention_mask declares the one new token of a row to be padding, which a "
                    "compiled step cannot leave out; use static=False."
                )
            return self.step_mask()

        last = self._capacity - 1
        return MaskRequest((1, self._capacity), slot_mask, last, learn)

    def step_mask(self) -> torch.Tensor:
        """`[B, slots]` boolean: the slots in use, and the one that the step's token will take."""
        slots = self.ends.slots
        return torch.arange(self._capacity, device=slots.device) <= slots.unsqueeze(1)

    # ------------------------------------------------------------------ steps

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in a chunk, or a step's token `[B, H, 1, D]`, and hand out what attention may see.

        Raises:
            UnsupportedModelError: a compiled call that is no decoding step after a prompt.
        """
        compiling = torch.compiler.is_dynamo_compiling()
        if torch.is_grad_enabled() and key_states.requires_grad and self.seen:
            raise UnsupportedModelError(
                "static=True writes over tokens that autograd would need; generate under "
                "torch.no_grad() or use static=False."
            )
        if not compiling:
            if self._stepping:
                raise RuntimeError(
                    "an earlier call of the model did not finish: attention never read the keys "
                    f"that layer {self.layer_idx} handed out; call cache.reset() and start again."
                )
            self.settle()
            if not self.takes_step(key_states.shape[2]):
                return super().update(key_states, value_states, *args, **kwargs)
            self._check_step(key_states)
        elif key_states.shape[2] != 1:
            raise UnsupportedModelError(
                "SparseBudgetCache(static=True) compiles decoding steps of one token; call the "
                "model itself, not its compiled form, with the prompt, as generate does."
            )
        held = self._held
        held.write("keys", key_states.detach(), self.ends.slots)
        held.write("values", value_states.detach(), self.ends.slots)
        keys, values = self._readable(self._capacity, 1)
        if compiling:
            tracing.attending = self
        else:
            self.steps.begin(self)
            self._stepping = True
            keys, values = keys.view_as(keys), values.view_as(values)
            attention.hand_out(self, keys, first=False)
        return keys, values

    def _check_step(self, key_states: torch.Tensor) -> None:
        if key_states.shape[0] != self._held.rows.batch:
            raise ValueError(
                f"the cache holds a batch of {self._held.rows.batch} but got {key_states.shape[0]} "
                "rows; call cache.reset() or make a new cache for another batch."
            )
        self._check_same_kind(key_states)
        self._held.storage.make_writable()

    def before_attention(self, module: torch.nn.Module, key: torch.Tensor, mask: Any) -> None:
        if not self._stepping:
            super().before_attention(module, key, mask)
        elif isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[-1] != key.shape[2]:
            raise UnsupportedModelError(
                f"attention_mask is a 4D mask for {mask.shape[-1]} tokens, but the cache has "
                f"{key.shape[2]} slots; pass the 2D mask of the whole text."
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
        if self._stepping or torch.compiler.is_dynamo_compiling():
            # A mask over all slots is there in every step, so the kernel is what attends on a GPU.
            if self._uses_kernels and self._kernel.is_preferred(self._held, masked=True):
                lengths = (self.ends.slots + 1).int()
                return self._kernel.attend(self._held, query, lengths, arguments)
            if mask is None:
                mask = self.step_mask()[:, None, None]
        return super().attend(attention, query, key, value, mask, *rest, **arguments)

    def after_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> None:
        if not (self._stepping or torch.compiler.is_dynamo_compiling()):
            super().after_attention(query, key, value, mask, arguments)
            return
        policy, held = self.settings.policy, self._held
        with torch.no_grad():
            if policy.needs_queries:
                held.queries.append(query, None)
            if policy.needs_attention_mass and not self._kernel.mass_is_counted:
                visible = self.step_mask()[:, None, None]
                mass = attention_mass(
                    query.detach(),
                    key.detach(),
                    visible if mask is None else mask,
                    scaling=held.scaling,
                    softcap=softcap_of(arguments),
                    sinks=sinks_of(arguments),
                )
                held.storage["mass"].add_(mass)
            self._kernel.mass_is_counted = False
            if self.ends.last is self:
                self.ends.step()
            self.steps.step(self)
        if torch.compiler.is_dynamo_compiling():
            tracing.attending = None
        else:
            self._stepping = False
            self.steps.finish(self)
            attention.withdraw(self)

    def _finish(self, keys: torch.Tensor, values: torch.Tensor, mass: torch.Tensor | None) -> None:
        super()._finish(keys, values, mass)
        if self._held.heads_together:
            raise UnsupportedModelError(
                "this model rearranges its keys or values before attention, biases each head, or "
                "attends out of transformers' sight, which static=True does not serve; use "
                "static=False."
            )
        self._pin()
        self._publish()

    # ------------------------------------------------------------------ verbs

    def reset(self) -> None:
        """Forget all tokens; the memory stays, so that compiled graphs stay valid."""
        held = self._held if self._held.storage else self._spare
        self.steps.take()
        super().reset()
        self._spare, self._stepping = held, False

    def activate_past_recording(self) -> None:
        """
        Raises:
            UnsupportedModelError: always; steps of fixed shape cannot be taken back.
        """
        raise UnsupportedModelError(
            "assisted decoding takes tokens back, which static=True does not serve; use "
            "static=False."
        )

    def select_rows(self, rows: torch.Tensor) -> None:
        super().select_rows(rows)
        if self.is_initialized:
            self._ends = self.steps.join(self, self._held.rows.batch, self.ends.slots.device)
            self._pin()
            self._publish()
