"""What is optimised, as pure functions on tensors.

Notation of the docstrings: `N` rollouts, `R` columns of the (right-padded) completions. Per token,
with everything in nats and float32: `s` the sampler's policy (under the budget), `d` the dense
policy at the same weights, `p` the learner's policy, `xi = d / s`.
"""

from .advantages import group_advantages
from .aggregation import AGGREGATIONS, token_coefficients
from .correction import Correction, correct
from .divergence import FullKL, k1, k3
from .preference import preference_loss, preference_pairs
from .surrogate import clipped_surrogate

__all__ = [
    "AGGREGATIONS",
    "Correction",
    "FullKL",
    "clipped_surrogate",
    "correct",
    "group_advantages",
    "k1",
    "k3",
    "preference_loss",
    "preference_pairs",
    "token_coefficients",
]
