"""Log-probabilities and entropies per token, a chunk of logits at a time."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparse_cache.errors import UnsupportedModelError
from sparse_cache.replay import token_head
from sparse_cache.replay.logprobs import rollout_logprobs
from tests.architectures.build import build_tiny
from tests.cache.driving import small_llama

from .rollouts import gradients, relative, rollout

ROOT = Path(__file__).parents[2]
WEIGHTS = torch.linspace(0.5, 2.0, 8)


def tokens(vocabulary: int, rows: int = 2, length: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (rows, length), generator=generator)


def naive(model: Any, ids: torch.Tensor, temperature: float = 1.0, **call: Any) -> torch.Tensor:
    """`[B, T - 1, 2]` from all the logits at once."""
    logits = model(input_ids=ids, use_cache=False, **call).logits[:, :-1].float()
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.stack((logprobs.gather(-1, ids[:, 1:, None])[..., 0], entropy), -1)


def chunked(model: Any, ids: torch.Tensor, temperature: float = 1.0, **call: Any) -> torch.Tensor:
    """The same by chunks of a few tokens."""
    call = {"entropy": True, "chunk_bytes": 4 * 120 * 5} | call
    return torch.stack(rollout_logprobs(model, ids, temperature=temperature, **call), -1)


def same_gradients(model: Any, ids: torch.Tensor, inner: Any = None) -> None:
    inner = model if inner is None else inner
    mine = gradients(inner, lambda: (chunked(model, ids)[..., 0] * WEIGHTS).sum())
    true = gradients(inner, lambda: (naive(model, ids)[..., 0] * WEIGHTS).sum())
    assert relative(mine, true) < 1e-5


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "cohere", "opt", "gpt2"])
def test_equals_log_softmax_of_all_logits(model_type: str) -> None:
    model, vocabulary, _ = build_tiny(model_type)
    ids = tokens(vocabulary)
    torch.testing.assert_close(
        chunked(model, ids, 1.3), naive(model, ids, 1.3), atol=1e-5, rtol=1e-5
    )
    assert token_head._rules[model] is not None
    assert "forward" not in vars(model) and "forward" not in vars(model.get_output_embeddings())
    same_gradients(model, ids)


def test_rule_that_the_configuration_does_not_tell_is_fitted_from_the_model() -> None:
    model, vocabulary, _ = build_tiny("granite")
    ids = tokens(vocabulary)
    token_head._rules[model] = token_head.AfterHead()
    model.config.logits_scaling = 3.0
    torch.testing.assert_close(chunked(model, ids), naive(model, ids), atol=1e-5, rtol=1e-5)
    assert token_head._rules[model].factor == pytest.approx(1 / 3)


class Reversed(type(small_llama())):  # type: ignore[misc]
    """Turns its vocabulary around: no scale and no softcap explains that."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.flip(-1)
        return output


def test_unexplained_logits_are_taken_whole() -> None:
    token_head.warn_once.cache_clear()
    model = Reversed(small_llama().config)
    ids = tokens(model.config.vocab_size)
    with pytest.warns(UserWarning, match="full logits are held"):
        mine = chunked(model, ids)
    torch.testing.assert_close(mine, naive(model, ids), atol=1e-5, rtol=1e-5)
    same_gradients(model, ids)


def test_no_tensor_holds_the_logits_of_all_tokens() -> None:
    """Neither forward nor backward makes a tensor larger than one chunk."""
    model = small_llama()
    ids = tokens(model.config.vocab_size, 2, 65)
    rows = 8
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, torch.Tensor) and value.shape[-1:] == (vocabulary,):
                    largest = max(largest, value.numel())
            return result

    vocabulary = model.config.vocab_size
    with Largest():
        chunked(model, ids, chunk_bytes=4 * vocabulary * rows)[..., 0].sum().backward()
    assert 0 < largest <= vocabulary * max(rows, model.config.hidden_size)
    assert largest < vocabulary * 2 * 64


def test_only_the_columns_asked_for_go_through_the_head() -> None:
    model = small_llama()
    ids = tokens(model.config.vocab_size)
    seen: list[int] = []
    original = model.lm_head.forward
    model.lm_head.forward = lambda hidden: seen.append(hidden.shape[-2]) or original(hidden)
    kept = model.lm_head.forward
    with torch.no_grad():
        mine = chunked(model, ids, completion_start=6)
        assert model.lm_head.forward is kept
        assert sum(seen) == 2 * 3 + token_head.PROBES
        torch.testing.assert_close(mine, naive(model, ids)[:, 5:], atol=1e-5, rtol=1e-5)


def test_padding_is_zero_and_changes_nothing() -> None:
    model = small_llama()
    ids = tokens(model.config.vocab_size)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mine = chunked(model, ids, attention_mask=mask)
    alone = chunked(model, ids[1:, 4:])
    assert (mine[1, :4] == 0).all()
    torch.testing.assert_close(mine[1:, 4:], alone, atol=1e-5, rtol=1e-5)
    nothing = chunked(
        model, ids, attention_mask=torch.zeros_like(mask).index_fill_(1, mask[0, :1], 1)
    )
    assert (nothing == 0).all() and nothing.requires_grad


def test_shadow_policy_is_what_the_rollout_was_sampled_from() -> None:
    model = small_llama()
    run = rollout(model)
    wanted = run.logits.log_softmax(-1)
    new = run.sequences[:, run.prompt_length :, None]
    call = {"attention_mask": run.mask, "completion_start": run.prompt_length}
    mine = rollout_logprobs(model, run.sequences, run.trace, chunk_bytes=4096, **call).logprobs
    dense = rollout_logprobs(model, run.sequences, **call).logprobs
    true = wanted.gather(-1, new)[..., 0]
    assert (mine - true).abs().max() < 1e-4
    assert (dense - true).abs().max() > 0.1
    mine.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_wrapped_and_checkpointed_models() -> None:
    model = small_llama()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same_gradients(Wrapper(model), tokens(model.config.vocab_size), model)


def test_lora_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(small_llama(), config)
    same_gradients(model, tokens(model.config.vocab_size))


def test_autocast() -> None:
    model = small_llama()
    ids = tokens(model.config.vocab_size)
    with torch.autocast("cpu", torch.bfloat16):
        mine, true = chunked(model, ids), naive(model, ids)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, true, atol=2e-2, rtol=2e-2)
    mine[..., 0].sum().backward()


def test_other_threads_see_the_model_as_it_is() -> None:
    model = small_llama()
    ids = tokens(model.config.vocab_size)
    shapes = []

    def elsewhere() -> None:
        shapes.append(model(ids).logits.shape)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=elsewhere)
        if threading.current_thread() is threading.main_thread():
            thread.start()
            thread.join()

    with model.model.register_forward_pre_hook(hook), torch.no_grad():
        chunked(model, ids)
    assert shapes == [(2, 9, model.config.vocab_size)]


def test_any_function_of_the_logits_of_two_policies() -> None:
    """A divergence over the whole vocabulary from other per-token columns."""
    model, other = small_llama(), copy.deepcopy(small_llama())
    ids = tokens(model.config.vocab_size)
    with torch.no_grad():
        hidden = other.model(ids)[0].flatten(0, 1) * 1.1

    def divergence(logits: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        mine, reference = logits.log_softmax(-1), other.lm_head(theirs).log_softmax(-1)
        return (mine.exp() * (mine - reference)).sum(-1, keepdim=True)

    keep = torch.arange(ids.numel())
    inputs = {"input_ids": ids, "use_cache": False}
    mine = token_head.per_token(model, inputs, keep, (hidden,), divergence, chunk_bytes=4096)
    true = divergence(model(ids).logits.flatten(0, 1), hidden)
    torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": torch.zeros(3, dtype=torch.int64)}, "sequences must be int64"),
        ({"sequences": torch.zeros(2, 9)}, "sequences must be int64"),
        ({"sequences": torch.zeros(2, 1, dtype=torch.int64)}, "at least 2 columns"),
        ({"attention_mask": torch.ones(2, 8)}, "attention_mask must have the shape"),
        ({"completion_start": 0}, "completion_start"),
        ({"completion_start": 9}, "completion_start"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    model = small_llama()
    with pytest.raises(ValueError, match=message):
        rollout_logprobs(model, **({"sequences": tokens(100)} | change))


def test_trace_of_other_rows_and_model_without_a_head() -> None:
    model = small_llama()
    run = rollout(model, (9, 8), 3)
    with pytest.raises(ValueError, match="trace has 2 rows and sequences 1"):
        rollout_logprobs(model, run.sequences[:1], run.trace)
    with pytest.raises(UnsupportedModelError, match="output embeddings"):
        rollout_logprobs(model.model, tokens(100))


@pytest.mark.slow
def test_compiled_model() -> None:
    model = small_llama()
    same_gradients(torch.compile(model, backend="aot_eager"), tokens(100), model)


@pytest.mark.slow
def test_two_processes_get_the_gradients_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.replay.logprobs_worker", str(tmp_path)]
    workers = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
