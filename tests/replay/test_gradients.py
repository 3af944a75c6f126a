"""Gradients under replay, by every way and with everything that training puts around a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.attention import flex_attention as flex_module

from sparse_cache import UnsupportedModelError
from sparse_cache.replay import replay
from tests.cache.driving import small_llama

from .rollouts import Rollout, gradients, relative, replayed, rollout, score

SAME = 1e-4


@pytest.fixture
def model() -> Any:
    """One of its own for each test, in training mode."""
    return copy.deepcopy(small_llama(layers=3)).train()


@pytest.fixture
def run(model: Any) -> Rollout:
    run = rollout(model.eval())
    model.train()
    return run


@pytest.fixture
def truth(model: Any, run: Rollout) -> torch.Tensor:
    return gradients(model, lambda: score(replayed(model, run, "dense"), run))


def dense_loss(model: Any, run: Rollout) -> torch.Tensor:
    return score(model(run.sequences, attention_mask=run.mask).logits, run)


def test_gather(model: Any, run: Rollout, truth: torch.Tensor) -> None:
    mine = gradients(model, lambda: score(replayed(model, run, "gather"), run))
    assert relative(mine, truth) < SAME
    assert relative(gradients(model, lambda: dense_loss(model, run)), truth) > 0.1


def test_flex(
    model: Any, run: Rollout, truth: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention refuses gradients on a CPU although its unfused form has them."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    mine = gradients(model, lambda: score(replayed(model, run, "flex"), run))
    assert relative(mine, truth) < SAME


@pytest.mark.parametrize("way", ["dense", "gather"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(
    model: Any, run: Rollout, truth: torch.Tensor, reentrant: bool, way: str
) -> None:
    """The backward may come after the context, beside a dense forward, in any order."""
    dense = gradients(model, lambda: dense_loss(model, run))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def shadow() -> torch.Tensor:
        return score(replayed(model, run, way), run)

    assert relative(gradients(model, shadow), truth) < SAME
    both = gradients(model, lambda: shadow() + 2 * dense_loss(model, run))
    assert relative(both, truth + 2 * dense) < SAME
    model.zero_grad()
    first = dense_loss(model, run)
    with replay(model, run.trace, way=way):
        logits = model(run.sequences, attention_mask=run.mask).logits
        (2 * first + score(logits, run)).backward()
    both = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(both, truth + 2 * dense) < SAME


def test_activation_checkpointing_of_torch(model: Any, run: Rollout, truth: torch.Tensor) -> None:
    apply_activation_checkpointing(
        model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer"
    )
    assert relative(gradients(model, lambda: score(replayed(model, run), run)), truth) < SAME


def test_other_checkpoints_are_refused(model: Any, run: Rollout) -> None:
    layer = model.model.layers[0]
    original = layer.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(original, *args, use_reentrant=False, **kwargs)

    layer.forward = checkpointed
    with pytest.raises(UnsupportedModelError, match="gradient_checkpointing_enable"):
        replayed(model, run)


def test_autocast(model: Any, run: Rollout, truth: torch.Tensor) -> None:
    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return score(replayed(model, run, way), run)

    way = "dense"
    expected = gradients(model, loss)
    way = "gather"
    found = gradients(model, loss)
    # Both are bf16's distance from the truth away, and no more from each other.
    assert relative(found, truth) < 1.5 * relative(expected, truth) + 1e-2


def test_adapters(model: Any, run: Rollout) -> None:
    """LoRA: the same gradients of the adapters, by way of the wrapped model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, config)
    run = rollout(wrapped.eval())
    wrapped.train()
    expected = gradients(wrapped, lambda: score(replayed(wrapped, run, "dense"), run))
    found = gradients(wrapped, lambda: score(replayed(wrapped, run, "gather"), run))
    assert found.numel() == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert relative(found, expected) < SAME
    wrapped.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(wrapped, lambda: score(replayed(wrapped, run, "gather"), run))
    assert relative(found, expected) < SAME


@pytest.mark.slow
def test_compiled() -> None:
    """One graph without breaks for all lengths, and another one for dense calls."""
    torch.compiler.reset()
    model = copy.deepcopy(small_llama(layers=1))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths, new_tokens in (((40, 23), 30), ((33, 12), 25)):
        run = rollout(model, lengths, new_tokens)
        with torch.compiler.set_stance("fail_on_recompile" if new_tokens == 25 else "default"):
            found = gradients(model, lambda: score(replayed(compiled, run), run))  # noqa: B023
        # A dense call with the very arguments that replay gives must not share its graph.
        given = {"use_cache": False, "position_ids": (run.mask.cumsum(-1) - 1).clamp(min=0)}
        dense = compiled(run.sequences, attention_mask=run.mask, **given).logits
        expected = gradients(model, lambda: score(replayed(model, run, "dense"), run))  # noqa: B023
        assert relative(found, expected) < SAME
        plain = model(run.sequences, attention_mask=run.mask, **given).logits
        assert torch.allclose(dense[run.mask.bool()], plain[run.mask.bool()], atol=1e-4)
