"""Masks that say something else than causality: honoured, or refused in one sentence."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.replay import replay
from sparse_cache.replay.causality import hides_more
from sparse_cache.trace import NEVER
from tests.cache.driving import LARGE, small_llama, tokens

IDS = tokens(1, 40)
MARKS = torch.zeros_like(IDS)
MARKS[:, 4:20] = 1


@functools.cache
def gemma() -> Any:
    """A model whose image tokens, by `token_type_ids`, see one another."""
    text = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=60)
    return Gemma3ForConditionalGeneration(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("way", ["auto", "gather", "dense"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_tokens_of_an_image(way: str, attention: str) -> None:
    model = gemma()
    model.set_attn_implementation(attention)
    cache = SparseBudgetCache(**LARGE, record=True)
    text = model(IDS, token_type_ids=0 * MARKS, past_key_values=cache).logits
    if way != "dense" or attention != "flex_attention":
        with replay(model, cache.trace(), way=way):
            found = model(IDS, token_type_ids=0 * MARKS).logits
        assert (found - text).abs().max() < 1e-4
    with (
        pytest.raises(UnsupportedModelError, match="lets tokens see later ones"),
        replay(model, cache.trace(), way=way),
    ):
        model(IDS, token_type_ids=MARKS)


@torch.no_grad()
def test_tokens_of_an_image_in_a_compiled_model() -> None:
    model = gemma()
    model.set_attn_implementation("sdpa")
    cache = SparseBudgetCache(**LARGE, record=True)
    model(IDS, past_key_values=cache)
    compiled = torch.compile(model, backend="eager")
    with (
        # The former is that of a graph.
        pytest.raises((RuntimeError, UnsupportedModelError), match="lets tokens see later ones"),
        replay(compiled, cache.trace()),
    ):
        compiled(input_ids=IDS, token_type_ids=MARKS)


def test_a_model_that_attends_in_both_directions() -> None:
    import copy

    model = copy.deepcopy(small_llama())
    cache = SparseBudgetCache(**LARGE, record=True)
    model(IDS, past_key_values=cache)
    model.config.is_causal = False
    with (
        pytest.raises(UnsupportedModelError, match="attends in both directions"),
        replay(model, cache.trace()),
    ):
        pass


@pytest.mark.parametrize("kind", ["boolean", "additive", "blocks"])
def test_what_a_mask_hides(kind: str) -> None:
    deaths = torch.full((2, 1, 9), NEVER, dtype=torch.int32)
    deaths[1, :, :3] = 0
    causal = torch.ones(9, 9, dtype=torch.bool).tril() & (deaths[:, :, None] != 0)

    def looked_at(visible: torch.Tensor) -> bool:
        mask: Any = visible
        if kind == "additive":
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min)
        if kind == "blocks":
            mask = create_block_mask(
                lambda b, h, q, k: visible[b, 0, q, k], 2, None, 9, 9, device="cpu"
            )
        return hides_more(mask, deaths, matters=True)

    assert not looked_at(causal)
    # Padding may see and be seen as it likes.
    anything = causal.clone()
    anything[1, :, :3], anything[1, :, :, :3] = True, True
    assert not looked_at(anything)
    fewer = causal.clone()
    fewer[1, 0, 8, 4] = False
    assert looked_at(fewer)
    later = causal.clone()
    later[1, 0, 4, 8] = True
    with pytest.raises(UnsupportedModelError, match="see later ones"):
        looked_at(later)


@torch.no_grad()
def test_a_mask_that_hides_more_is_honoured_by_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is too wide for the search for layers to notice."""
    from transformers.masking_utils import create_causal_mask
    from transformers.models.llama import modeling_llama

    def windowed(*args: Any, **kwargs: Any) -> Any:
        def near(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query - key < 10

        return create_causal_mask(*args, and_mask_function=near, **kwargs)

    model = small_llama()
    cache = SparseBudgetCache(**LARGE, record=True)
    model(IDS, past_key_values=cache)
    with replay(model, cache.trace()):
        full = model(IDS).logits
    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    expected = model(IDS).logits
    with replay(model, cache.trace()):
        found = model(IDS).logits
    assert (found - expected).abs().max() < 1e-4 < (full - expected).abs().max()
    with (
        pytest.raises(UnsupportedModelError, match="a mask that hides more"),
        replay(model, cache.trace(), way="gather"),
    ):
        model(IDS)
