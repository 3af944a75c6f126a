"""Which layers of a model get a budget: the full-attention ones, as transformers types them."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from .unsupported import refuse_unsupported

_IDENTITY = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads")


class LayerKinds:
    """What `DynamicCache(config=...)` would use for each layer of a model.

    The config is given by the user or learnt from the first attention module that reports.
    """

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        self.given = config is not None
        self._identities: list[dict[str, Any]] = []
        self._stock: list[Any] | None = None
        if config is not None:
            self.learn(config)

    def learn(self, config: PreTrainedConfig) -> None:
        """Take the layers from `config`, or check that it is the one already known.

        Raises:
            TypeError: `config` is no transformers config.
            ValueError: the model that runs is not the one whose config was given.
        """
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(
                f"config must be a transformers config such as model.config, got "
                f"{type(config).__name__}."
            )
        refuse_unsupported(config)
        if self._stock is None:
            self._stock = DynamicCache(config=config).layers
            self._identities = [_identity(each) for each in _with_parts(config)]
        elif self.given and _identity(config) not in self._identities:
            raise ValueError(
                f"config is of another model: it says {self._identities[0]}, the model that runs "
                f"has {_identity(config)}; pass config=model.config of the model that you "
                "generate with."
            )

    @property
    def known(self) -> bool:
        return self._stock is not None

    def __len__(self) -> int:
        return len(self._stock or ())

    def stock_layer(self, layer_idx: int) -> Any:
        """The layer that transformers would use, or None for plain full attention."""
        if self._stock is None or layer_idx >= len(self._stock):
            return None
        layer = self._stock[layer_idx]
        return None if type(layer) in (DynamicLayer, DynamicIndexedLayer) else layer


def _identity(config: PreTrainedConfig) -> dict[str, Any]:
    """What tells one model from another; a field that differs by layer counts as absent."""
    text = config.get_text_config(decoder=True)
    identity = {}
    for name in _IDENTITY:
        try:
            identity[name] = getattr(text, name, None)
        except Exception:  # transformers raises an error of its own for fields that differ
            identity[name] = None
    return identity


def _with_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """`config` and all configs inside of it: modules carry that of their part."""
    parts = [config]
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            parts += _with_parts(value)
    return parts
