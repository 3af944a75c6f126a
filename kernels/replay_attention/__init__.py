"""Causal attention of a whole sequence in which tokens stop being visible at given columns."""

from .api import replay_attention
from .periods import gathered_pairs, visible_pairs

__all__ = ["gathered_pairs", "replay_attention", "visible_pairs"]
