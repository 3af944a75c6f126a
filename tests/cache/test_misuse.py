"""Calls that went wrong, or that could: they end right, or with a sentence, never silently."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from sparse_cache import (
    EvictionPolicy,
    PolicyView,
    SparseBudgetCache,
    UnsupportedModelError,
)
from sparse_cache.policies.rkv import RKVPolicy
from tests.cache.driving import (
    LARGE,
    POLICIES,
    SMALL,
    decode,
    drive,
    left_padded,
    small_llama,
    tokens,
)


def second_turn(policy: str, *, poison: bool) -> tuple[torch.Tensor, SparseBudgetCache]:
    """Row 0 ended early: the second turn's mask hides filler that had made real tokens go."""
    model, filler = small_llama(), 11
    ids, real = left_padded([30, 12], seed=1)
    cache = SparseBudgetCache(**SMALL, policy=policy)
    first = decode(model, cache, ids, filler + 3, attention_mask=real).sequences
    turn = torch.cat([first, tokens(2, 8, seed=3)], dim=1)
    mask = torch.ones_like(turn)
    mask[:, :30] = real
    mask[0, -8 - filler : -8] = 0
    seen = cache.get_seq_length()
    steps = [turn.shape[1] - 7 - seen] + [1] * 7
    logits = []
    for step in steps:
        if poison:
            for layer in cache.layers:
                for row, length in enumerate(layer.lengths):
                    layer.held.storage["values"][row, :, length:] = 1000.0
        logits.append(drive(model, cache, turn[:, : seen + step], mask, [step], start=seen))
        seen += step
    return torch.cat(logits, dim=1), cache


@pytest.mark.filterwarnings("ignore:some heads had evicted")
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_stay_in_step_when_filler_is_hidden_after_evictions(policy: str) -> None:
    clean, cache = second_turn(policy, poison=False)
    assert all(layer.lengths == cache.layers[0].lengths for layer in cache.layers)
    poisoned, _ = second_turn(policy, poison=True)
    # What lies beyond a row's tokens is never read.
    assert torch.equal(clean[:, -8:], poisoned[:, -8:])


class Interrupted(Exception):
    pass


def broken_call(cache: SparseBudgetCache, where: str, ids: torch.Tensor) -> Any:
    model = small_llama.__wrapped__()

    def fail(*_: Any) -> None:
        raise Interrupted

    module = model.model.layers[0].self_attn
    hook = (
        module.o_proj if where == "after attention" else model.model.layers[1]
    ).register_forward_pre_hook(fail)
    with pytest.raises(Interrupted):
        drive(model, cache, ids)
    hook.remove()
    return model


@pytest.mark.parametrize("policy", ["rkv", "keydiff"])
@pytest.mark.parametrize("where", ["after attention", "between layers"])
@pytest.mark.parametrize("used", [False, True])
def test_a_call_that_broke_off_is_not_taken_up_again(policy: str, where: str, used: bool) -> None:
    cache = SparseBudgetCache(**SMALL, policy=policy)
    model = broken_call(SparseBudgetCache(**SMALL, policy=policy), where, tokens(1, 9))
    if used:
        drive(model, cache, tokens(1, 32))
        model.model.layers[1].register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(Interrupted())
        )
        with pytest.raises(Interrupted):
            drive(model, cache, tokens(1, 1))
        model.model.layers[1]._forward_pre_hooks.clear()
    else:
        model = broken_call(cache, where, tokens(1, 32))
    with pytest.raises(RuntimeError, match="did not finish"):
        drive(model, cache, tokens(1, 1))
    cache.reset()
    fresh = drive(model, SparseBudgetCache(**SMALL, policy=policy), tokens(1, 32))
    assert torch.equal(drive(model, cache, tokens(1, 32)), fresh)


def test_another_model_of_the_same_shape_is_refused() -> None:
    cache = SparseBudgetCache(**SMALL)
    drive(small_llama(seed=0), cache, tokens(1, 30))
    with pytest.raises(ValueError, match="tokens of another model"):
        drive(small_llama(seed=1), cache, tokens(1, 1))


@pytest.mark.parametrize("write", ["add", "data", "assign"])
def test_changed_weights_are_refused(write: str) -> None:
    model = small_llama.__wrapped__()
    cache = SparseBudgetCache(**SMALL)
    drive(model, cache, tokens(1, 30))
    projection = model.model.layers[0].self_attn.k_proj
    with torch.no_grad():
        if write == "add":
            projection.weight.add_(0.1)
        elif write == "data":
            projection.weight.data += 0.1
        else:
            state = {name: value + 0.1 for name, value in projection.state_dict().items()}
            projection.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"weights changed since .* cache.reset\(\)"):
        drive(model, cache, tokens(1, 5))


def test_another_dtype_is_refused() -> None:
    model = copy.deepcopy(small_llama())
    cache = SparseBudgetCache(**SMALL)
    drive(model, cache, tokens(1, 30))
    with pytest.raises((ValueError, RuntimeError), match=r"call cache\.reset"):
        drive(model.double(), cache, tokens(1, 1))


def test_a_mask_with_as_many_tokens_elsewhere_is_no_continuation() -> None:
    model, cache = small_llama(), SparseBudgetCache(**LARGE)
    ids, real = left_padded([16, 10])
    drive(model, cache, ids, real)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 8:14] = 0  # six columns are padding, as before, but others
    text = torch.cat([ids, tokens(2, 4, seed=3)], dim=1)
    with pytest.raises(UnsupportedModelError, match="shows tokens that were padding"):
        drive(model, cache, text, mask, [4], start=16)


def test_a_4d_mask_for_other_tokens_than_stored_is_refused() -> None:
    model, cache = small_llama(), SparseBudgetCache(**SMALL)
    drive(model, cache, tokens(1, 40))
    mask = torch.zeros(1, 1, 1, 41)
    with pytest.raises(UnsupportedModelError, match="4D mask for 41 tokens, but 21 are stored"):
        model(tokens(1, 1), past_key_values=cache, attention_mask=mask)


@dataclasses.dataclass(frozen=True)
class Misbehaving(EvictionPolicy):
    how: str = ""

    def score(self, view: PolicyView) -> Any:
        if self.how == "writes":
            return view.keys.mul_(0).float().sum(-1)
        if self.how == "none":
            return None
        if self.how == "complex":
            return view.keys[..., 0].float() + 1j
        if self.how == "shape":
            return view.keys.float()
        return view.keys[..., 0].mul(100).int()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("writes", ValueError, "wrote into the view"),
        ("none", TypeError, "returned NoneType; expected a float32 tensor"),
        ("complex", TypeError, "returned torch.complex64"),
        ("shape", ValueError, "returned scores of shape"),
    ],
)
def test_policies_that_misbehave(how: str, error: type[Exception], message: str) -> None:
    cache = SparseBudgetCache(**SMALL, policy=Misbehaving(how))
    with pytest.raises(error, match=message):
        drive(small_llama(), cache, tokens(1, 40))


def test_whole_numbers_are_scores_too() -> None:
    cache = SparseBudgetCache(**SMALL, policy=Misbehaving("integers"))
    drive(small_llama(), cache, tokens(1, 40))
    assert cache.layers[0].lengths == [20]


def test_a_class_is_no_policy() -> None:
    with pytest.raises(TypeError, match=r"pass RKVPolicy\(\)"):
        SparseBudgetCache(policy=RKVPolicy)  # type: ignore[arg-type]


def test_an_empty_cache_answers_every_question() -> None:
    cache = SparseBudgetCache()
    for _ in range(2):
        cache.offload(0)
        cache.prefetch(0)
        assert cache.get_max_length() == -1
        assert cache.get_seq_length() == 0
        assert cache.stats().bytes_held == 0
        assert "seen=0" in repr(cache)
        cache.reset()


def test_gradients_reach_the_newest_chunk_and_stop_at_what_is_stored() -> None:
    model = small_llama.__wrapped__()
    cache = SparseBudgetCache(**SMALL, policy="streaming")
    text = tokens(1, 30)
    outputs = [model(text[:, :16], past_key_values=cache).logits]
    outputs += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(16, 30)]
    torch.cat(outputs, dim=1).sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    expected = drive(
        model, SparseBudgetCache(**SMALL, policy="streaming"), text, None, [16] + [1] * 14
    )
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-5)


def test_a_layers_attention_cannot_be_taken_for_another_models() -> None:
    """After a model without reported attention, a dense model of the same shape runs untouched."""
    from transformers import DynamicCache, FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_kv_heads=2, new_decoder_architecture=True, alibi=False,
    )  # fmt: skip
    falcon = FalconForCausalLM(config).eval()
    cache = SparseBudgetCache(**SMALL, policy="keydiff")
    with torch.no_grad():
        falcon(tokens(1, 30), past_key_values=cache)
        llama = small_llama()
        expected = llama(tokens(1, 30, seed=4), past_key_values=DynamicCache()).logits
        falcon(tokens(1, 1), past_key_values=cache)
        again = llama(tokens(1, 30, seed=4), past_key_values=DynamicCache()).logits
    assert torch.equal(expected, again)
    assert cache.get_seq_length() == 31
