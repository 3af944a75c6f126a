"""A layer that needs to be asked each time its tokens are attended to."""

from __future__ import annotations

from typing import Any

import torch

from .errors import UnsupportedModelError
from .layer import BudgetLayer

_IMPLEMENTATIONS = ("sdpa", "eager")


class ReportedLayer(BudgetLayer):
    """Refuses models that read keys in ways that the layer is not told of.

    An ordinary layer can serve those: what it stores looks the same to everybody. A layer under an
    allocation has a mask of its own, or keys that only it can read.
    """

    @property
    def _allocation(self) -> str:
        allocation = self.settings.allocation
        return f"allocation={allocation.name or type(allocation).__name__!r}"

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BudgetLayer.update`.

        Raises:
            UnsupportedModelError: other layers of the model read this layer's keys.
        """
        if self.keys_are_shared:
            raise UnsupportedModelError(
                f"other layers of this model read the keys of layer {self.layer_idx}, which "
                f"{self._allocation} cannot serve; use allocation='uniform'."
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Not served.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "this model chooses tokens by an indexer for all layers and heads at once, which "
            f"{self._allocation} cannot serve; use allocation='uniform'."
        )

    def before_attention(self, module: torch.nn.Module, key: torch.Tensor, mask: Any) -> None:
        """See `BudgetLayer.before_attention`.

        Raises:
            UnsupportedModelError: an attention implementation whose masks are of another kind.
        """
        super().before_attention(module, key, mask)
        if self.is_of_another_kind():
            return
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is not None and implementation not in _IMPLEMENTATIONS:
            raise UnsupportedModelError(
                f"{self._allocation} serves the attention implementations "
                f"{' and '.join(_IMPLEMENTATIONS)}, not {implementation!r}; load the model with "
                f"attn_implementation={_IMPLEMENTATIONS[0]!r} or use allocation='uniform'."
            )

    def settle(self) -> None:
        """See `BudgetLayer.settle`.

        Raises:
            UnsupportedModelError: nobody reported the attention to what was handed out.
        """
        if self._handed_out is not None and not self.keeps_marks:
            raise UnsupportedModelError(
                "this model's attention does not go through transformers' AttentionInterface, "
                f"which {self._allocation} needs; use allocation='uniform'."
            )
        super().settle()

    def settle_if_done(self) -> None:
        """Settle, unless attention may still be about to report."""
        if not self.waits_for_attention:
            self.settle()
