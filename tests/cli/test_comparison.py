"""The figures that compare two answers, against plain readings of what they mean."""

from __future__ import annotations

import pytest
import torch

from sparse_cache import SparseBudgetCache
from sparse_cache.cli.comparison import replayed_divergence, share_of_equal_tokens
from tests.tiny_model import tiny_llama


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [1, 9, 3, 9], 0.5),
        ([1, 2, 3, 4], [1, 2], 0.5),
        ([1, 2], [1, 2, 3, 4], 0.5),
        ([], [], 1.0),
        ([], [1], 0.0),
    ],
)
def test_share_of_equal_tokens(first: list[int], second: list[int], expected: float) -> None:
    assert share_of_equal_tokens(torch.tensor(first), torch.tensor(second)) == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_divergence_is_that_of_the_distributions_generation_samples_from(chunk: int) -> None:
    model = tiny_llama()
    prompt = torch.arange(1, 13).unsqueeze(0)

    def cache() -> SparseBudgetCache:
        return SparseBudgetCache(budget=16, interval=4, window=4, sinks=2)

    # The sparse answer replayed: its distributions are the scores that generation itself reports.
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache(),
        max_new_tokens=40,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    answer = generated.sequences[0, 12:]
    sparse = torch.cat(generated.logits).log_softmax(-1)
    with torch.no_grad():
        whole = model(generated.sequences).logits[0, 11:-1].log_softmax(-1)
    kl = torch.nn.functional.kl_div(sparse, whole, log_target=True, reduction="batchmean")

    result = replayed_divergence(model, prompt, answer, cache(), chunk=chunk)
    assert kl > 1e-4
    assert result.mean_kl == pytest.approx(kl.item(), rel=1e-3, abs=1e-6)
    agree = (sparse.argmax(-1) == whole.argmax(-1)).double().mean().item()
    assert result.same_top_token == pytest.approx(agree)


def test_one_token_is_compared_too() -> None:
    prompt = torch.arange(1, 13).unsqueeze(0)
    result = replayed_divergence(
        tiny_llama(), prompt, torch.tensor([5]), SparseBudgetCache(budget=16)
    )
    assert result.mean_kl == pytest.approx(0.0, abs=1e-9)
    assert result.same_top_token == 1.0
