"""Encoder-decoder models take the cache inside an `EncoderDecoderCache`."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from sparse_cache import SparseBudgetCache, UnsupportedModelError

from .driving import LARGE, POLICIES, SMALL, VOCABULARY, tokens


def small_bart() -> PreTrainedModel:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
        init_std=0.3,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config).eval()


def small_t5() -> PreTrainedModel:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        initializer_factor=3.0,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,
    )
    return T5ForConditionalGeneration(config).eval()


def answer(model: PreTrainedModel, cache: SparseBudgetCache | DynamicCache, new: int = 50):
    return model.generate(
        tokens(1, 12),
        attention_mask=torch.ones(1, 12, dtype=torch.long),
        past_key_values=EncoderDecoderCache(cache, DynamicCache()),
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_bart(policy: str) -> None:
    model = small_bart()
    dense = answer(model, DynamicCache())
    large = answer(model, SparseBudgetCache(**LARGE, policy=policy))
    assert torch.equal(dense.sequences, large.sequences)
    cache = SparseBudgetCache(**SMALL, policy=policy)
    output = answer(model, cache)
    assert output.sequences.shape == dense.sequences.shape
    assert cache.stats().tokens_kept < 25
    assert cache.stats().evictions > 0
    # The first eviction comes after the 25th token; until then it is the dense model.
    for a, b in zip(dense.logits[:25], output.logits[:25], strict=True):
        assert (a - b).abs().max().item() < 1e-4
    assert (dense.logits[40] - output.logits[40]).abs().max().item() > 1e-3


def test_t5_biases_by_slot_and_is_right_or_refused() -> None:
    """With the policy that keeps the last tokens, a relative bias can be checked by a window.

    T5 biases by the distance in slots. Were the cache taken, the logits after an eviction would
    have to be those of a dense model that sees the same tokens at their true distance.
    """
    model = small_t5()
    with pytest.raises(UnsupportedModelError):
        answer(model, SparseBudgetCache(**SMALL))
