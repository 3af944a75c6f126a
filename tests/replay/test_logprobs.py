"""Log-probabilities read in chunks are those of the logits in one piece, with their gradients."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from sparse_cache import UnsupportedModelError
from sparse_cache.replay import replay, rollout_logprobs
from sparse_cache.replay.token_head import read_logits
from tests.architectures.build import build_tiny
from tests.cache.driving import VOCABULARY, small_llama

from .rollouts import Rollout, gap, gradients, relative, replayed, rollout

CHUNK = 4 * VOCABULARY * 7
"""Seven tokens at a time."""


def whole(logits: torch.Tensor, run: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of columns 1 to T - 1, from logits of all columns."""
    logs = (logits[:, :-1].float() / temperature).log_softmax(-1)
    logs = logs.gather(-1, run.sequences[:, 1:, None])[..., 0]
    return logs * run.mask[:, 1:] * run.mask[:, :-1]


def test_dense_and_shadow() -> None:
    model = small_llama()
    run = rollout(model)
    given = {"attention_mask": run.mask, "chunk_bytes": CHUNK}
    dense = rollout_logprobs(model, run.sequences, **given)
    expected = whole(model(run.sequences, attention_mask=run.mask).logits, run)
    assert dense.entropy is None and dense.logprobs.dtype == torch.float32
    assert (dense.logprobs - expected).abs().max() < 1e-4
    shadow = rollout_logprobs(model, run.sequences, run.trace, **given).logprobs
    assert (shadow - whole(replayed(model, run), run)).abs().max() < 1e-5
    assert (shadow - dense.logprobs).abs().max() > 0.1
    start = run.prompt_length
    sampled = run.logits.log_softmax(-1).gather(-1, run.sequences[:, start:, None])[..., 0]
    assert (shadow[:, start - 1 :] - sampled).abs().max() < 1e-4
    assert gap(replayed(model, run), run) < 1e-4


@pytest.mark.parametrize("start", [1, 40, 69])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_completions_temperature_and_entropy(start: int, temperature: float) -> None:
    model = small_llama()
    run = rollout(model)
    found = rollout_logprobs(
        model,
        run.sequences,
        run.trace,
        attention_mask=run.mask,
        start=start,
        temperature=temperature,
        entropy=True,
        chunk_bytes=CHUNK,
    )
    logits = replayed(model, run)
    assert found.entropy is not None
    assert found.logprobs.shape == found.entropy.shape == (3, 70 - start)
    expected = whole(logits, run, temperature)[:, start - 1 :]
    assert (found.logprobs - expected).abs().max() < 1e-5
    entropy = torch.distributions.Categorical(logits=logits[:, :-1] / temperature).entropy()
    entropy = (entropy * run.mask[:, 1:] * run.mask[:, :-1])[:, start - 1 :]
    assert (found.entropy - entropy).abs().max() < 1e-5


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients(checkpointed: bool) -> None:
    model = copy.deepcopy(small_llama(layers=3))
    run = rollout(model)
    model.train()
    expected = gradients(model, lambda: whole(replayed(model, run), run).square().sum())
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss() -> torch.Tensor:
        given = {"attention_mask": run.mask, "chunk_bytes": CHUNK}
        return rollout_logprobs(model, run.sequences, run.trace, **given).logprobs.square().sum()

    assert relative(gradients(model, loss), expected) < 1e-4


def test_no_tensor_of_all_tokens_and_the_vocabulary() -> None:
    """Neither in the forward nor in the backward does anything as large as the logits exist."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    model = copy.deepcopy(small_llama(layers=1))
    run = rollout(model)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[-1] == VOCABULARY:
                    largest = max(largest, leaf.numel())
            return output

    with Watch():
        found = rollout_logprobs(model, run.sequences, attention_mask=run.mask, chunk_bytes=CHUNK)
        found.logprobs.sum().backward()
    assert VOCABULARY * 7 <= largest < VOCABULARY * 70


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", "cohere", "granite", "opt", "phi", "gemma3n_text", "llama4_text", "jamba"],
)
@torch.no_grad()
def test_what_models_do_to_logits(model_type: str) -> None:
    """Softcaps, scales, biases, and bodies under other names."""
    model, vocabulary, _ = build_tiny(model_type)
    ids = torch.randint(3, vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids, use_cache=False).logits
    expected = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    found = rollout_logprobs(model, ids, chunk_bytes=4 * vocabulary * 5).logprobs
    assert (found - expected).abs().max() < 1e-5


def test_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(small_llama())
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    wrapped = get_peft_model(model, config)
    run = rollout(wrapped.eval())
    expected = gradients(wrapped, lambda: whole(replayed(wrapped, run), run).sum())

    def loss() -> torch.Tensor:
        given = {"attention_mask": run.mask, "chunk_bytes": CHUNK}
        return rollout_logprobs(wrapped, run.sequences, run.trace, **given).logprobs.sum()

    assert relative(gradients(wrapped, loss), expected) < 1e-4
    with wrapped.disable_adapter(), torch.no_grad():
        base = rollout_logprobs(wrapped, run.sequences, attention_mask=run.mask).logprobs
        plain = whole(wrapped(run.sequences, attention_mask=run.mask).logits, run)
    assert (base - plain).abs().max() < 1e-4


@torch.no_grad()
def test_compiled() -> None:
    model = small_llama()
    run = rollout(model)
    compiled = torch.compile(model, backend="eager")
    found = rollout_logprobs(compiled, run.sequences, run.trace, attention_mask=run.mask)
    assert (found.logprobs - whole(replayed(model, run), run)).abs().max() < 1e-5


@torch.no_grad()
def test_any_function_of_the_logits() -> None:
    """The distance of two policies over the whole vocabulary, for example."""
    model = small_llama()
    run = rollout(model)
    given = {"input_ids": run.sequences, "attention_mask": run.mask}
    positions = (run.mask.cumsum(-1) - 1).clamp(min=0)
    dense = model(**given, position_ids=positions).logits.log_softmax(-1).flatten(0, 1)

    def divergence(logits: torch.Tensor, where: slice) -> torch.Tensor:
        other = logits.log_softmax(-1)
        return (dense[where].exp() * (dense[where] - other)).sum(-1, keepdim=True)

    with replay(model, run.trace):
        found = read_logits(model, divergence, slice(None), chunk_bytes=CHUNK, **given)
    shadow = replayed(model, run).log_softmax(-1)
    expected = (dense.view_as(shadow).exp() * (dense.view_as(shadow) - shadow)).sum(-1)
    assert found.shape == (3, 70, 1)
    assert (found[..., 0] - expected).abs().max() < 1e-4


@torch.no_grad()
def test_the_model_is_left_as_it_was() -> None:
    model = small_llama()
    run = rollout(model)
    before = model(run.sequences, attention_mask=run.mask).logits
    seen = []

    @torch.no_grad()
    def call() -> None:
        seen.append(model(run.sequences, attention_mask=run.mask).logits)

    def interrupted(logits: torch.Tensor, where: slice) -> torch.Tensor:
        # Another thread that uses the model meanwhile gets all of its logits.
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise KeyboardInterrupt

    given = {"input_ids": run.sequences, "attention_mask": run.mask}
    with pytest.raises(KeyboardInterrupt):
        read_logits(model, interrupted, slice(None), chunk_bytes=CHUNK, **given)
    assert torch.equal(seen[0], before)
    assert torch.equal(model(run.sequences, attention_mask=run.mask).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sequences": torch.zeros(2, 5)}, TypeError, "sequences must be an int64 tensor"),
        ({"sequences": [[1, 2]]}, TypeError, "got list"),
        ({"sequences": torch.zeros(5, dtype=torch.long)}, ValueError, r"must be \[B, T\]"),
        ({"sequences": torch.zeros(2, 1, dtype=torch.long)}, ValueError, "at least 2 tokens"),
        ({"attention_mask": torch.ones(2, 4)}, ValueError, r"shape of sequences, \[2, 5\]"),
        ({"start": 0}, ValueError, "start=0 must lie between 1 and 4"),
        ({"start": 5}, ValueError, "start=5"),
        ({"temperature": 0.0}, ValueError, r"temperature=0\.0 must be positive"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes=0"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"sequences": torch.zeros(2, 5, dtype=torch.long)}
    with pytest.raises(error, match=message):
        rollout_logprobs(small_llama(), **(good | change))


@pytest.mark.parametrize("model_type", ["prophetnet", "body"])
def test_models_that_are_refused(model_type: str) -> None:
    model = small_llama().model if model_type == "body" else build_tiny(model_type)[0]
    with pytest.raises(UnsupportedModelError, match="language head"):
        rollout_logprobs(model, torch.ones(1, 5, dtype=torch.long))
