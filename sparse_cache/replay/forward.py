"""One forward under a trace: what each attention call of it does."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..attention_arguments import scaling_of, sinks_of, softcap_of, unknown_arguments
from ..errors import UnsupportedModelError
from ..kernels.replay_attention import replay_attention
from ..replaying import replaying
from .causality import hides_more
from .dense import mask_under
from .flex import block_mask, flex_replay
from .sites import Site

WAYS = ("auto", "dense", "flex", "gather")


@dataclass
class ReplayedLayer:
    """A budgeted layer in one forward."""

    site: Site
    deaths: torch.Tensor
    """`[B, H, T]` int32 by column; 0 for padding. `H` is 1 where all heads evict alike."""
    way: str
    """One of `WAYS`."""

    def attend(
        self,
        attention: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        rest: tuple[Any, ...],
        arguments: dict[str, Any],
        *,
        causal: bool,
    ) -> Any:
        """What the model's `attention` gives when evicted tokens are gone.

        Args:
            attention: the model's attention function.
            module: its module.
            query: `[B, Hq, T, D]`.
            key: `[B, Hk, T, D]`.
            value: `[B, Hk, T, Dv]`.
            mask: the mask that transformers made.
            rest, arguments: attention's other arguments.
            causal: whether `mask` is known to be causal; else it is looked at.
        """
        self._check(query, key)
        deaths = self.deaths.to(query.device)
        others = unknown_arguments(rest, arguments)
        gathers = self.way != "dense" and self.site.plain and not others
        if not causal and hides_more(mask, deaths, matters=gathers):
            others.add("a mask that hides more")
        way = self._choose(others)
        if way == "dense":
            mask = mask_under(mask, deaths, query.shape[1], query.dtype)
            return attention(module, query, key, value, mask, *rest, **arguments)
        query, key, value = _as_autocast(query, key, value)
        asked: dict[str, Any] = {
            "scaling": scaling_of(query, arguments),
            "softcap": softcap_of(arguments),
            "sinks": sinks_of(arguments),
        }
        if way == "flex":
            blocks = block_mask(deaths, query.shape[1])
            output = flex_replay(query, key, value, blocks, **asked)
        else:
            output = replay_attention(query, key, value, deaths, **asked)
        return output.transpose(1, 2).contiguous(), None

    def _choose(self, others: set[str]) -> str:
        """How to attend; `others` are arguments that ask for more than causal attention."""
        if self.way == "dense":
            return "dense"
        if self.site.plain and not others:
            return "gather" if self.way == "auto" else self.way
        if self.way == "auto":
            return "dense"
        what = f"it is given {', '.join(sorted(others))}" if others else "it adds something to that"
        raise UnsupportedModelError(
            f"way={self.way!r} computes causal softmax attention, but the attention of layer "
            f"{self.site.layer} is another one ({what}); use way='dense' or 'auto'."
        )

    def _check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        batch, heads, length = self.deaths.shape
        found = (query.shape[0], query.shape[2], key.shape[2])
        if found != (batch, length, length):
            raise ValueError(
                f"layer {self.site.layer} attends with {found[0]} rows, {found[1]} queries and "
                f"{found[2]} keys, but the trace is replayed for {batch} rows of {length} tokens; "
                "give the model whole sequences, without a cache or virtual tokens."
            )
        if heads not in (1, key.shape[1]):
            raise ValueError(
                f"the trace has {heads} KV heads in layer {self.site.layer}, but the model has "
                f"{key.shape[1]}; use the trace of this model's own rollout."
            )


@dataclass
class ReplayedForward:
    """The attention calls of one forward, by module, in their order."""

    layers: dict[torch.nn.Module, list[ReplayedLayer]]
    ignores_masks: bool
    """Whether no layer needs the causal mask that transformers makes: the deaths say it all."""
    configs: list[PreTrainedConfig]
    """Of the models that the forward is of; another model may run inside of it."""
    causal_masks: list[Any] = field(default_factory=list)
    """Masks that were made of the causal mask function and padding alone."""
    attended: list[torch.nn.Module] = field(default_factory=list)
    """Modules that were called, in order."""

    def attending(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        """`attention` under the trace, for the modules that the trace is about."""
        return functools.partial(_attend, self, attention)

    def needs_no_mask(self, config: PreTrainedConfig | None) -> bool:
        """Whether the model with this config can do without the causal mask that it asks for."""
        return self.ignores_masks and any(config is own for own in self.configs)

    def next_layer(self, module: torch.nn.Module) -> ReplayedLayer | None:
        """The layer that `module` is about to attend in; None: not one with a budget."""
        layers = self.layers.get(module)
        if layers is None:
            return None
        if torch.compiler.is_dynamo_compiling():
            if len(layers) > 1:
                raise UnsupportedModelError(_SHARED + "; do not compile the model.")
            return layers[0]
        if not replaying.recomputable and _in_checkpoint():
            raise UnsupportedModelError(
                "the model is checkpointed in a way that replay does not know of, so its backward "
                "would forget the trace; use model.gradient_checkpointing_enable() or torch's "
                "apply_activation_checkpointing, before the replay begins."
            )
        # A module may attend twice in one layer (DiffLlama).
        distinct = any(layer.site != layers[0].site for layer in layers)
        if distinct and replaying.recomputable:
            raise UnsupportedModelError(_SHARED + "; switch gradient checkpointing off.")
        call = self.attended.count(module)
        self.attended.append(module)
        return layers[min(call, len(layers) - 1)]


def _as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`tensors` in the dtype that SDPA would take under autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


_SHARED = (
    "an attention module of this model serves several layers, which replay tells apart by the "
    "order of the calls alone"
)


_CHECKPOINT_FILES = (
    str(Path("torch", "utils", "checkpoint.py")),
    str(Path("activation_checkpointing", "checkpointing.py")),  # DeepSpeed's
)


def _in_checkpoint() -> bool:
    """Whether a function that will be called again in the backward is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT_FILES):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _attend(
    forward: ReplayedForward,
    attention: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    layer = forward.next_layer(module)
    if layer is None:
        return attention(module, query, key, value, *args, **kwargs)
    mask, rest = (args[0], args[1:]) if args else (kwargs.pop("attention_mask", None), ())
    # Models hand the mask to attention as they got it; if one does not, it is looked at.
    causal = any(mask is known for known in forward.causal_masks)
    return layer.attend(attention, module, query, key, value, mask, rest, kwargs, causal=causal)
