"""Models that would be silently wrong after an eviction, and why they are refused."""

from __future__ import annotations

from transformers import PreTrainedConfig

from .errors import UnsupportedModelError

_BIAS_BY_SLOT = "its attention bias counts stored tokens instead of positions"
_TWO_LEVELS = "its byte and patch levels read the cache at different lengths"
_REFUSED = {
    "bloom": _BIAS_BY_SLOT,
    "mpt": _BIAS_BY_SLOT,
    "inkling_text": _BIAS_BY_SLOT,
    "inkling2_text": _BIAS_BY_SLOT,
    "inkling2_loop_text": _BIAS_BY_SLOT,
    "blt_global_transformer": _TWO_LEVELS,
    "blt_local_decoder": _TWO_LEVELS,
    "blt_local_encoder": _TWO_LEVELS,
    "t5": _BIAS_BY_SLOT,
    "dory": "its loops read stored keys past the cache's own hand-out",
    "gpt_neo": "its local attention layers count stored tokens instead of positions",
    "hy_v4": "its layers share the choice of an indexer by stored slot",
    "qwen4_exp": "its indexer keeps positions of its own beside the cache",
    "qwen4_exp_text": "its indexer keeps positions of its own beside the cache",
}


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise if no eviction can be exact for the model of `config`.

    Raises:
        UnsupportedModelError: the model is known to tie something to stored slots.
    """
    reason = _REFUSED.get(config.model_type)
    if reason is None and getattr(config, "alibi", False):
        reason = _BIAS_BY_SLOT
    if reason is not None:
        raise UnsupportedModelError(
            f"{config.model_type} cannot run under a budget: {reason}, so its answers would be "
            "silently wrong once tokens are evicted; use DynamicCache."
        )
