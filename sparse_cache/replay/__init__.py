"""A full-sequence forward under the evictions that a rollout really had."""

from .context import replay
from .logprobs import RolloutLogprobs, rollout_logprobs

__all__ = ["RolloutLogprobs", "replay", "rollout_logprobs"]
