"""Masks of a layer's own, where layers store different numbers of tokens.

transformers makes one mask a forward, sized for the first full-attention layer. Of that mask a
layer with another budget can use the last columns only, which say what the chunk's queries see of
the chunk. What they see of the stored tokens is the layer's own affair: all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import UnsupportedModelError
from .hybrid import BudgetHybridLayer
from .reported_layer import ReportedLayer


class OwnMaskLayer(ReportedLayer):
    """Attends under its own mask, whatever the other layers store."""

    _mask: torch.Tensor | None = None

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
        """See `BudgetLayer.attend`.

        Raises:
            UnsupportedModelError: a mask that cannot be adapted to the layer.
        """
        self._mask = self._own_mask(query, mask)
        return super().attend(attention, query, key, value, self._mask, *rest, **arguments)

    def after_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> None:
        """See `BudgetLayer.after_attention`; `mask` is transformers'."""
        own, self._mask = self._mask, None
        super().after_attention(query, key, value, own, arguments)

    def _own_mask(self, query: torch.Tensor, mask: Any) -> Any:
        handed = self._handed_out
        assert handed is not None
        if self.seen == 0:
            return mask  # nothing is stored in any layer yet
        chunk = handed.chunk
        return slot_mask(
            mask,
            self._slot_mask(chunk, None),
            slots=handed.slots,
            length=chunk.length,
            batch=query.shape[0],
            dtype=query.dtype,
            device=query.device,
        )


class OwnMaskHybridLayer(OwnMaskLayer, BudgetHybridLayer):
    """The same for layers that hold a linear-attention state too."""


def slot_mask(
    mask: Any,
    visible: torch.Tensor | None,
    *,
    slots: int,
    length: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """The attention mask `[B, 1, T, slots + T]` for `slots` stored ones and a chunk of `T`.

    Args:
        mask: what transformers made for other sizes: None where nothing is hidden, or
            `[B or 1, 1, T, ...]`, boolean (True: visible) or additive, its last `T` columns the
            chunk's.
        visible: `[B, slots + T]` boolean, the slots that hold tokens; None: all. With `T` of 1 the
            new token may lie among the stored ones.
        slots: stored slots.
        length: `T`.
        batch: `B`.
        dtype: of the queries.
        device: of the queries.

    Returns:
        A mask of the kind that was given (additive for None, which both SDPA and eager attention
        understand), or None where nothing is hidden.

    Raises:
        UnsupportedModelError: a mask of another kind, or one that differs between heads.
    """
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
        raise UnsupportedModelError(
            "this attention implementation's masks are not made of numbers for each query and "
            "key, so they cannot be adapted to layers with different budgets; use "
            "attn_implementation='sdpa' or allocation='uniform'."
        )
    if mask is not None and mask.shape[1] > 1:
        raise UnsupportedModelError(
            "this model's masks differ between attention heads, which an allocation of budgets "
            "cannot serve; use allocation='uniform'."
        )
    if visible is not None:
        visible = visible.to(device)
    if length == 1:
        if visible is None:
            if mask is None:
                return None
            visible = torch.ones(batch, slots + 1, dtype=torch.bool, device=device)
        seen = visible[:, None, None, :]
        return seen if mask is not None and mask.dtype == torch.bool else _additive(seen, dtype)
    if visible is None:
        visible = torch.ones(batch, slots + length, dtype=torch.bool, device=device)
    stored = visible[:, None, None, :slots].expand(-1, -1, length, -1)
    if mask is None:
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        own = causal & visible[:, None, None, slots:]
        return _additive(torch.cat([stored, own], dim=-1), dtype)
    own = mask[..., mask.shape[-1] - length :].expand(batch, -1, -1, -1)
    if mask.dtype != torch.bool:
        return torch.cat([_additive(stored, mask.dtype), own], dim=-1)
    return torch.cat([stored, own], dim=-1)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 for what is `visible`, the lowest number of `dtype` for the rest."""
    hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return hidden.masked_fill_(~visible, torch.finfo(dtype).min)
