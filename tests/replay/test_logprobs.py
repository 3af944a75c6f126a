"""Log-probabilities read in chunks are those of the logits in one piece, with their gradients."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.replay import replay, rollout_logprobs
from sparse_cache.replay.token_head import read_logits, read_states
from tests.architectures.build import build_tiny
from tests.cache.driving import SMALL, VOCABULARY, drive, small_llama, tokens

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


def test_logits_of_two_forwards_beside_one_another() -> None:
    """As many tokens as chunks do not divide; gradients reach both forwards."""
    model = copy.deepcopy(small_llama())
    run = rollout(model)
    columns = slice(11, -1)
    given = {"input_ids": run.sequences, "attention_mask": run.mask, "use_cache": False}
    given["position_ids"] = (run.mask.cumsum(-1) - 1).clamp(min=0)
    real = run.mask[:, columns, None]
    seen = []

    def divergence(dense: torch.Tensor, shadow: torch.Tensor, where: slice) -> torch.Tensor:
        seen.append((where, dense.detach(), shadow.detach()))
        logs, others = dense.log_softmax(-1), shadow.log_softmax(-1)
        return (logs.exp() * (logs - others)).sum(-1, keepdim=True)

    def in_chunks() -> torch.Tensor:
        with replay(model, run.trace):
            states = read_states(model, columns, **given)
        assert states.shape == (3, 58, model.config.hidden_size)
        return real * read_logits(
            model, divergence, columns, chunk_bytes=CHUNK, beside=states, **given
        )

    def in_one_piece() -> torch.Tensor:
        with replay(model, run.trace):
            shadow = model(**given).logits[:, columns].flatten(0, 1)
        dense = model(**given).logits[:, columns].flatten(0, 1)
        return real * divergence(dense, shadow, slice(None)).unflatten(0, (3, 58))

    with torch.no_grad():
        found = in_chunks()
        expected = in_one_piece()
    assert (found - expected).abs().max() < 1e-4 < expected.max()
    *chunks, (_, dense, shadow) = seen
    assert [where.start for where, _, _ in chunks] == list(range(0, 174, 7))
    assert (torch.cat([chunk for _, chunk, _ in chunks]) - dense).abs().max() < 1e-4
    assert (torch.cat([chunk for _, _, chunk in chunks]) - shadow).abs().max() < 1e-4
    gradient = gradients(model, lambda: in_one_piece().sum())
    assert relative(gradients(model, lambda: in_chunks().sum()), gradient) < 1e-4


@torch.no_grad()
def test_padding_inside_of_a_row() -> None:
    """A second turn padded on the left: the token behind the hole follows the one before it."""
    model = small_llama()
    first = rollout(model, lengths=(40, 23), new_tokens=10)
    turn = tokens(2, 13, seed=5)
    ids = torch.cat([first.sequences, turn], dim=1)
    real = torch.cat([first.mask, torch.ones_like(turn)], dim=1)
    real[1, 50:56] = 0
    cache = SparseBudgetCache(**SMALL, record=True)
    drive(model, cache, ids, real, [40, *[1] * 10, 13])
    found = rollout_logprobs(
        model, ids, cache.trace(), attention_mask=real, entropy=True, chunk_bytes=CHUNK
    )
    with replay(model, cache.trace()):
        logits = model(ids, attention_mask=real).logits.log_softmax(-1)
    for row in range(2):
        columns = real[row].nonzero()[:, 0]
        expected = logits[row, columns[:-1]].gather(-1, ids[row, columns[1:], None])[:, 0]
        assert (found.logprobs[row, columns[1:] - 1] - expected).abs().max() < 1e-4
    assert found.logprobs[1, 55] < 0 and not found.logprobs[1, 49:55].any()
    assert found.entropy is not None and found.entropy[1, 55] > 0
    later = rollout_logprobs(
        model, ids, cache.trace(), attention_mask=real, start=56, chunk_bytes=CHUNK
    )
    assert (later.logprobs - found.logprobs[:, 55:]).abs().max() < 1e-5


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
        ({"temperature": 1e-38}, ValueError, "temperature=1e-38 is below 1e-06"),
        ({"temperature": "1"}, TypeError, "temperature must be a float, got '1'"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes=0"),
        ({"chunk_bytes": 1e9}, TypeError, "chunk_bytes must be an int"),
        ({"start": 1.0}, TypeError, r"start must be an int, got 1\.0"),
        ({"attention_mask": [[1] * 5] * 2}, TypeError, "attention_mask must be a tensor, got list"),
        ({"way": "sparse"}, ValueError, "way='sparse' is unknown"),
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


def test_a_model_that_returns_tuples() -> None:
    model = copy.deepcopy(small_llama())
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict=False makes the model return tuples"):
        rollout_logprobs(model, torch.ones(1, 5, dtype=torch.long))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens(kind: str) -> None:
    import peft

    model = copy.deepcopy(small_llama())
    run = rollout(model)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(model, config)
    with pytest.raises(UnsupportedModelError, match=f"{kind}, whose virtual tokens"):
        rollout_logprobs(model, run.sequences, run.trace, attention_mask=run.mask)
    if kind == "PromptTuningConfig":
        with pytest.raises(UnsupportedModelError, match="layers saw 73; prompt tuning"):
            rollout_logprobs(model, run.sequences, attention_mask=run.mask)
