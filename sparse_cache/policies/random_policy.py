"""Random eviction, repeatable: the control that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import EvictionPolicy, PolicyView, register_policy

# The increment and the two multipliers of SplitMix64 (https://doi.org/10.1145/2660193.2660195),
# as signed numbers, because torch has no unsigned 64-bit multiplication.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_MULTIPLIER = 0x94D049BB133111EB - 2**64


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    # `>>` copies the sign bit into the bits that it frees.
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 numbers to int64 numbers, the same on every device."""
    x = x + _INCREMENT
    x = (x ^ _logical_shift(x, 30)) * _FIRST_MULTIPLIER
    x = (x ^ _logical_shift(x, 27)) * _SECOND_MULTIPLIER
    return x ^ _logical_shift(x, 31)


@register_policy("random")
@dataclass(frozen=True)
class RandomPolicy(EvictionPolicy):
    """Keep tokens by lot.

    The lot of a token is a hash of the seed, the layer, the KV head and the position: it stays the
    same for the token's life, for a row alone or in a batch, and on every device. No generator is
    read or advanced.

    Raises:
        ValueError: `seed` is not an integer in `[0, 2**63)`.
    """

    seed: int = 0
    """Another seed draws other lots."""

    def __post_init__(self) -> None:
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**63
        ):
            raise ValueError(f"seed must be an integer in [0, 2**63), got {self.seed!r}.")

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return a number in `[0, 1)` for each token, float32 `[B, H, S]`."""
        heads = torch.arange(view.keys.shape[1], device=view.keys.device)[:, None]
        lots = _mix(torch.full_like(heads, self.seed))
        for part in (view.layer_idx, heads, view.positions):
            lots = _mix(lots ^ part)
        # The top 24 bits are as many as float32 holds exactly.
        return _logical_shift(lots, 40).float() / 2**24
