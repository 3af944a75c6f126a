"""Which layers of a model get a budget: the full-attention ones, as transformers types them."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

_IDENTITY = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads")


class LayerKinds:
    """What `DynamicCache(config=...)` would use for each layer of a model.

    The config is given by the user or learnt from the first attention module that reports.
    """

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        self.given = config is not None
        self._identity: dict[str, Any] | None = None
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
        text = config.get_text_config(decoder=True)
        identity = {name: getattr(text, name, None) for name in _IDENTITY}
        if self._identity is None:
            self._identity = identity
            self._stock = DynamicCache(config=config).layers
        elif self.given and identity != self._identity:
            raise ValueError(
                f"config is of another model: it says {self._identity}, the model that runs has "
                f"{identity}; pass config=model.config of the model that you generate with."
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
