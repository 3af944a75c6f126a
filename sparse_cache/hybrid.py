"""Layers that hold both a linear-attention state and full attention (Falcon-H1, Zamba2)."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from .columns import Columns
from .layer import BudgetLayer
from .layer_kinds import LayerKinds
from .settings import BudgetSettings


def is_hybrid(layer: Any) -> bool:
    """Whether `layer` is transformers' layer of both kinds, with full attention."""
    return type(layer) is LinearAttentionAndFullAttentionLayer


class BudgetHybridLayer(LinearAttentionLayer, BudgetLayer):
    """A budget for the attention part; the linear state is as transformers has it."""

    is_compileable = False

    def __init__(
        self,
        settings: BudgetSettings,
        layer_idx: int,
        columns: Columns,
        kinds: LayerKinds,
        number_of_states: int = 1,
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        BudgetLayer.__init__(self, settings, layer_idx, columns, kinds)

    def is_of_another_kind(self) -> bool:
        return False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Attention initialises with keys and values, the linear part with named states.
        if args:
            BudgetLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:
        recurrent = any(self.is_recurrent_states_initialized.values())
        return self.record_past and not recurrent and any(self.is_conv_states_initialized.values())

    def offload(self) -> None:
        BudgetLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        BudgetLayer.prefetch(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        BudgetLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        BudgetLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        BudgetLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        BudgetLayer.activate_past_recording(self)
