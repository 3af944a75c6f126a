"""Which budget and which kind of layer each budgeted layer of a model gets."""

from __future__ import annotations

import dataclasses
from typing import Any

from .allocators import checked_layer_budgets
from .columns import Columns
from .errors import UnsupportedModelError
from .hybrid import BudgetHybridLayer, is_hybrid
from .layer import BudgetLayer
from .layer_kinds import LayerKinds
from .layer_mask import OwnMaskHybridLayer, OwnMaskLayer
from .ragged_layer import RaggedLayer
from .settings import BudgetSettings


class LayerPlan:
    """Makes the budgeted layers of a cache, as its allocation wants them.

    Args:
        settings: those of the whole cache.

    Raises:
        ValueError: settings that the allocation can serve for no model.
    """

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings
        allocation = settings.allocation
        if settings.static and (allocation.varies_by_layer or allocation.shares_heads):
            raise ValueError(
                f"static=True needs layers of one shape, which allocation={allocation.name!r} does "
                "not give; use static=False or allocation='uniform'."
            )
        allocation.check_budget(settings.budget)

    def new_layer(
        self, layer_idx: int, columns: Columns, kinds: LayerKinds, stock: Any
    ) -> BudgetLayer:
        """A layer for place `layer_idx`.

        Args:
            layer_idx: its index in the model.
            columns: those of the cache.
            kinds: those of the cache.
            stock: what transformers would use: None for plain full attention, or a hybrid layer.

        Raises:
            UnsupportedModelError: the allocation cannot serve the model.
            ValueError: the allocation gives a layer fewer tokens than are always kept.
        """
        settings, hybrid = self._settings, is_hybrid(stock)
        allocation = settings.allocation
        if allocation.varies_by_layer:
            settings = self._settings_of(layer_idx, kinds)
        if allocation.shares_heads:
            if hybrid:
                raise UnsupportedModelError(
                    f"layer {layer_idx} of this model holds both attention and a linear state, "
                    f"which allocation={allocation.name!r} does not serve; use "
                    "allocation='uniform'."
                )
            return RaggedLayer(settings, layer_idx, columns, kinds)
        if hybrid:
            layer = OwnMaskHybridLayer if allocation.varies_by_layer else BudgetHybridLayer
            return layer(settings, layer_idx, columns, kinds, stock.number_of_states)
        plain = OwnMaskLayer if allocation.varies_by_layer else BudgetLayer
        return plain(settings, layer_idx, columns, kinds)

    def _settings_of(self, layer_idx: int, kinds: LayerKinds) -> BudgetSettings:
        allocation, settings = self._settings.allocation, self._settings
        if not kinds.known:
            raise UnsupportedModelError(
                f"allocation={allocation.name!r} has to know how many layers the model has, and "
                "this one did not say; pass config=model.config to SparseBudgetCache."
            )
        budgeted = [
            index
            for index in range(len(kinds))
            if kinds.stock_layer(index) is None or is_hybrid(kinds.stock_layer(index))
        ]
        if layer_idx not in budgeted:
            raise UnsupportedModelError(
                f"this model updates layer {layer_idx}, which is not among the {len(kinds)} "
                f"layers of its config, so allocation={allocation.name!r} has no budget for it; "
                "use allocation='uniform'."
            )
        budgets = checked_layer_budgets(
            allocation, settings.budget, len(budgeted), settings.protected
        )
        return dataclasses.replace(settings, budget=budgets[budgeted.index(layer_idx)])
