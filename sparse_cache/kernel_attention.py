"""A decoding step's attention by our own kernel, in place of the model's attention function.

It reads the stored tokens of each row and head and nothing else, without a mask and without
repeating KV heads, and adds each key's attention probability to the policy's score on the way.
"""

from __future__ import annotations

from typing import Any

import torch

from .attention_arguments import scaling_of, sinks_of, softcap_of, unknown_arguments
from .held import HeldTokens
from .kernels.decode_attention import decode_attention
from .ragged_attention import is_plain
from .settings import BudgetSettings

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of keys that the kernels read."""
LARGEST_HEAD = 256
"""Head size up to which the kernel is compiled."""


class KernelAttention:
    """Whether and how the kernel attends in the decoding steps of one layer.

    Args:
        settings: those of the layer.
    """

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings
        self._equals_model = False
        self.mass_is_counted = False
        """Whether the kernel has added the attention mass of the step under way."""

    def learn(
        self,
        output: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        real: torch.Tensor | None,
        rest: tuple[Any, ...],
        arguments: dict[str, Any],
    ) -> None:
        """See, once, whether the kernel computes what the model's attention function computes.

        Args:
            output: what that function returned for the first chunk.
            query: `[B, Hq, T, D]`.
            key: `[B, H, T, D]`.
            value: `[B, H, T, Dv]`.
            mask: the mask it was given.
            real: `[B, T]` boolean, False for padding; None: there is none.
            rest, arguments: its other arguments.
        """
        self._equals_model = (
            key.dtype in DTYPES
            and query.dtype == key.dtype == value.dtype
            and max(key.shape[3], value.shape[3]) <= LARGEST_HEAD
            and not unknown_arguments(rest, arguments)
            and is_plain(
                output,
                query,
                key,
                value,
                mask,
                None if real is None else real[:, -1].to(query.device),
                scaling=scaling_of(query, arguments),
                softcap=softcap_of(arguments),
                sinks=sinks_of(arguments),
            )
        )

    def is_preferred(self, held: HeldTokens, *, masked: bool) -> bool:
        """Whether the kernel attends in a step, rather than the model's function.

        By itself it does so where that would repeat KV heads under a mask, read keys that first
        have to be put back into more bits, or leave the attention mass to be computed once more.
        """
        if not self._equals_model or torch.is_grad_enabled() or held.heads_together:
            return False
        settings = self._settings
        forced = settings.backend == "triton" or settings.quantization is not None
        return forced or masked or settings.policy.needs_attention_mass

    def attend(
        self,
        held: HeldTokens,
        query: torch.Tensor,
        lengths: torch.Tensor,
        arguments: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """Attention of one token of every row, as transformers' attention functions return it.

        Args:
            held: what is stored; the attention mass is added to it in place, if it has one.
            query: `[B, Hq, 1, D]`.
            lengths: `[B]` int32: slots in use, that of the query's own token included.
            arguments: the keyword arguments of attention.

        Returns:
            `[B, 1, Hq, Dv]`, and None for the attention weights.
        """
        storage = held.storage
        mass = storage["mass"] if self._settings.policy.needs_attention_mass else None
        self.mass_is_counted = mass is not None
        output, _ = decode_attention(
            query,
            storage["keys"],
            storage["values"],
            lengths,
            scaling=held.scaling,
            softcap=softcap_of(arguments),
            sinks=sinks_of(arguments),
            key_scales=storage.get("key_scales"),
            value_scales=storage.get("value_scales"),
            mass=mass,
            implementation="triton",
        )
        return output.transpose(1, 2).contiguous(), None
