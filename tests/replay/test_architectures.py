"""Replay of other kinds of attention than Llama's."""

from __future__ import annotations

import pytest
import torch

from sparse_cache import SparseBudgetCache
from sparse_cache.replay import replay
from sparse_cache.replay.sites import attention_sites
from tests.architectures.build import build_tiny
from tests.cache.driving import SMALL, decode, left_padded

from .rollouts import Rollout, gap, gradients, relative, score

TYPES = {
    "qwen3": "grouped queries",
    "deepseek_v3": "latent attention, experts",
    "gemma3_text": "sliding hybrid",
    "jamba": "linear hybrid, experts",
    "qwen3_moe": "experts",
    "opt": "learned positions",
    "gemma2": "softcap",
    "gpt_oss": "sinks, sliding hybrid, experts",
    "gemma3n_text": "layers that share keys",
    "diffllama": "differential attention",
    "hrm_text": "modules that serve several layers",
}


@pytest.mark.parametrize("model_type", TYPES)
def test_tiny_model(model_type: str) -> None:
    model, vocabulary, _ = build_tiny(model_type)
    ids, real = left_padded([34, 21])
    ids = (ids % (vocabulary - 3) + 3).masked_fill(real == 0, 0)
    cache = SparseBudgetCache(**SMALL, policy="keydiff", config=model.config, record=True)
    output = decode(model, cache, ids, attention_mask=real, new_tokens=16)
    run = Rollout(
        output.sequences,
        torch.cat([real, real.new_ones(2, output.sequences.shape[1] - 34)], dim=1),
        34,
        torch.stack(output.logits, dim=1).float(),
        cache.trace(),
    )
    assert cache.stats().evictions >= 4
    found = {}
    for way in ("dense", "gather"):
        with replay(model, run.trace, way=way):
            logits = model(input_ids=run.sequences, attention_mask=run.mask).logits
        assert gap(logits, run) < 1e-4
        found[way] = gradients(model, lambda logits=logits: score(logits, run))
    assert relative(found["gather"], found["dense"]) < 1e-4
    assert all(site.plain for site in attention_sites(model).calls)
    with torch.no_grad():
        dense = model(input_ids=run.sequences, attention_mask=run.mask, use_cache=False).logits
    assert gap(dense, run) > 1e-3
