"""What an eviction policy sees, what it answers, and how it is found by name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..registry import Registry


@dataclass(frozen=True)
class PolicyView:
    """The stored tokens of one layer, for a group of rows that evict at the same moment.

    Every stored token in a view is a real one: padding never reaches a policy, and all rows of a
    view hold the same number of tokens, so no policy needs a validity mask. A row is scored with
    the same numbers whether it is generated alone or in a padded batch.

    `B` rows, `H` KV heads, `S` stored tokens, `D` head size. Tokens lie in the order of the
    sequence along `S`.
    """

    keys: torch.Tensor
    """`[B, H, S, D]`, the cache's dtype, as attention saw them (rotary embedding applied)."""
    values: torch.Tensor
    """`[B, H, S, Dv]`, the cache's dtype."""
    positions: torch.Tensor
    """`[B, H, S]` int64: index of each token among the real tokens of its row, ascending."""
    seen: torch.Tensor
    """`[B]` int64: real tokens that each row has seen so far, stored or evicted."""
    queries: torch.Tensor | None
    """`[B, Hq, W, D]`, the last `window` queries, oldest first, the newest stored token's query
    last; query head `h` belongs to KV head `h // (Hq // H)`. None unless `needs_queries`."""
    attention_mass: torch.Tensor | None
    """`[B, H, S]` float32: attention probability that each stored token has received from all
    queries since it was stored, summed over queries, averaged over the query heads of its group.
    None unless `needs_attention_mass`."""
    scaling: float
    """What attention multiplies its logits with (usually `D ** -0.5`)."""
    window: int
    """The most recent tokens, which are kept whatever their score."""
    sinks: int
    """The first tokens of the sequence, which are kept whatever their score."""
    budget: int
    """Tokens that will be kept."""
    layer_idx: int
    """Index of the layer in the model."""


@dataclass(frozen=True)
class LayersView:
    """The stored tokens of several layers, as they lie in storage, for policies that score all of
    them with a few launches on a GPU.

    `L` layers, `B` rows, `H` KV heads. Rows may store different numbers of tokens. Tensors of
    tokens are by slot; `order` says which slot the i-th oldest token of a head has. What the
    operations of `sparse_cache.kernels` take and return has the same form.
    """

    keys: list[torch.Tensor]
    """One `[B, H, C, D]` a layer, by slot; layers may differ in `C`."""
    key_scales: list[torch.Tensor] | None
    """One `[B, H, C]` float32 a layer, by slot, with which int8 keys are multiplied."""
    order: list[torch.Tensor] | None
    """One `[B, H, C]` int32 a layer: slot of the i-th oldest token; None: slot i."""
    positions: list[torch.Tensor]
    """One `[B, H, C]` int32 a layer: position of the i-th oldest token."""
    lengths: torch.Tensor
    """`[L, B, H]` int32: tokens stored."""
    stored: int
    """`S`: the most tokens stored in any row."""
    seen: torch.Tensor
    """`[L, B, H]` int32: real tokens seen."""
    queries: list[torch.Tensor] | None
    """One `[B, Hq, W, D]` a layer, as in [`PolicyView`]. None unless `needs_queries`."""
    attention_mass: list[torch.Tensor] | None
    """One `[B, H, C]` float32 a layer, by slot. None unless `needs_attention_mass`."""
    scaling: float
    """What attention multiplies its logits with."""
    window: int
    """The most recent tokens, which are kept whatever their score."""
    sinks: int
    """The first tokens of the sequence, which are kept whatever their score."""
    implementation: str
    """To be passed on to operations of `sparse_cache.kernels`."""

    def by_sequence(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Stack per-token tensors `[B, H, C]` that lie by slot into `[L, B, H, S]` by age."""
        stacked = torch.stack([each[:, :, : self.stored] for each in tensors])
        if self.order is None:
            return stacked
        order = torch.stack([each[:, :, : self.stored] for each in self.order])
        # Beyond a row's length the order holds whatever was there; nobody looks at the result.
        return stacked.gather(3, order.long().clamp_(0, self.stored - 1))

    def stacked_positions(self) -> torch.Tensor:
        """Positions `[L, B, H, S]` int32 by age; beyond a row's length they mean nothing."""
        return torch.stack([each[:, :, : self.stored] for each in self.positions])


@dataclass(frozen=True)
class EvictionPolicy(ABC):
    """Scores stored tokens; the cache keeps the highest and evicts the rest.

    A subclass is a frozen dataclass: its fields are its options, and they travel with published
    checkpoints. It holds no state between calls. The most recent `window` tokens and (unless
    `keeps_sinks` is False) the first `sinks` tokens are kept whatever their score; ties are broken
    in favour of the more recent token; a NaN score counts as the lowest.
    """

    name: ClassVar[str] = ""
    """Set by [`register_policy`]."""
    keeps_sinks: ClassVar[bool] = True
    """Whether the first `sinks` tokens are kept whatever their score."""
    needs_queries: ClassVar[bool] = False
    """Whether [`score`][EvictionPolicy.score] reads `view.queries`."""
    needs_attention_mass: ClassVar[bool] = False
    """Whether [`score`][EvictionPolicy.score] reads `view.attention_mass`."""
    paper: ClassVar[str] = ""
    """Where the method is described, as a URL."""

    @abstractmethod
    def score(self, view: PolicyView) -> torch.Tensor:
        """Return float32 scores `[B, H, S]`, higher is kept, computed in float32."""

    def score_layers(self, view: LayersView) -> torch.Tensor | None:
        """Score all layers at once, or return None to have [`score`][EvictionPolicy.score] called.

        An optional fast path for GPUs. It must rank the tokens as `score` does.

        Returns:
            float32 `[L, B, H, S]` by age, the i-th oldest token of a head at i; entries beyond a
            row's length may hold anything but NaN.
        """
        return None

    def options(self) -> dict[str, Any]:
        """The policy's options by name, as given at construction."""
        return dataclasses.asdict(self)


_REGISTRY: Registry[EvictionPolicy] = Registry(
    "policy", "policies", EvictionPolicy, "register_policy"
)


def register_policy(name: str) -> Callable[[type[EvictionPolicy]], type[EvictionPolicy]]:
    """Class decorator: make a policy known as `name`, for `SparseBudgetCache(policy=name)`.

    Raises:
        ValueError: another class is registered under `name`.
        TypeError: `name` is not a non-empty string, or the class is not an [`EvictionPolicy`].
    """
    return _REGISTRY.register(name)


def policy_names() -> list[str]:
    """Names of all registered policies, sorted."""
    return _REGISTRY.names()


def policy_class(name: str) -> type[EvictionPolicy]:
    """The class registered under `name`.

    Raises:
        ValueError: the name is unknown (the message lists the known ones).
    """
    return _REGISTRY.get(name)


def resolve_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """Turn a name or a policy into a policy.

    Raises:
        ValueError: the name is unknown (the message lists the known ones).
        TypeError: `policy` is neither a name nor an [`EvictionPolicy`].
    """
    return _REGISTRY.resolve(policy)
