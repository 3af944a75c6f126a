"""Contexts that overlap: in one another, in several threads, in forwards that call forwards."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.replay import replay, rollout_logprobs
from sparse_cache.replaying import replaying
from tests.architectures.build import build_tiny
from tests.cache.driving import SMALL, decode, left_padded, small_llama

from .rollouts import Rollout, gap, gradients, relative, replayed, rollout, score


def fresh(seed: int = 0) -> Any:
    """A model that no other test has."""
    return copy.deepcopy(small_llama(seed=seed))


def in_threads(*calls: Callable[[], Any]) -> list[BaseException]:
    """Run them at a time; what they raised."""
    raised: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def patched(model: torch.nn.Module) -> list[str]:
    """Modules whose forward is not their class's."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@torch.no_grad()
def test_one_model_is_replayed_once_at_a_time() -> None:
    model = fresh()
    run = rollout(model)
    call = functools.partial(model, run.sequences, attention_mask=run.mask)
    within = functools.partial(rollout_logprobs, model, run.sequences, attention_mask=run.mask)
    with replay(model, run.trace):
        with (
            pytest.raises(RuntimeError, match="under replay already"),
            replay(model, run.trace.extend(0)),
        ):
            pass
        for trace in (None, run.trace):
            with pytest.raises(RuntimeError, match="under replay already"):
                within(trace=trace)
        assert gap(call().logits, run) < 1e-4
    assert within(trace=run.trace).logprobs.isfinite().all()


@torch.no_grad()
def test_a_replayed_forward_inside_of_another() -> None:
    outer, inner = fresh(2), fresh(3)
    run, other = rollout(outer), rollout(inner)
    replayed(outer, run)
    gaps = []

    def call(*_: Any) -> None:
        gaps.append(gap(inner(other.sequences, attention_mask=other.mask).logits, other))

    outer.model.layers[1].register_forward_pre_hook(call)
    with replay(outer, run.trace), replay(inner, other.trace):
        gaps.append(gap(outer(run.sequences, attention_mask=run.mask).logits, run))
    assert len(gaps) == 2 and max(gaps) < 1e-4


@torch.no_grad()
def test_another_model_inside_has_its_own_masks() -> None:
    outer, inner = fresh(2), fresh(3)
    run = rollout(outer)
    inputs = {"input_ids": run.sequences, "attention_mask": run.mask}
    expected, found = inner(**inputs).logits, []
    outer.model.layers[1].register_forward_pre_hook(lambda *_: found.append(inner(**inputs).logits))
    replayed(outer, run)
    # The first is that of the search for layers.
    assert torch.equal(found[-1][run.mask.bool()], expected[run.mask.bool()])


@torch.no_grad()
def test_a_forward_that_loses_its_trace_is_noticed() -> None:
    model = fresh()
    run = rollout(model)

    def lose(*_: Any) -> None:
        replaying.forward = None

    model.model.layers[1].register_forward_pre_hook(lose)
    with pytest.raises(RuntimeError, match="did not run under the trace"):
        replayed(model, run)


def test_a_cache_inside_of_a_replayed_forward() -> None:
    model, other = fresh(), fresh(1)
    run = rollout(model)
    ids, real = left_padded([9])

    def generate(*_: Any) -> None:
        decode(other, SparseBudgetCache(**SMALL), ids, attention_mask=real, new_tokens=2)

    model.model.layers[0].register_forward_pre_hook(generate)
    with pytest.raises(UnsupportedModelError, match="inside of a replayed forward"):
        replayed(model, run)


@torch.no_grad()
def test_an_interrupt_leaves_nothing_behind() -> None:
    model, other = fresh(), fresh(1)
    run = rollout(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with replay(model, run.trace):
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(run.sequences, attention_mask=run.mask)
        assert replaying.forward is None
        hook.remove()
        assert gap(model(run.sequences, attention_mask=run.mask).logits, run) < 1e-4
        assert gap(replayed(other, rollout(other)), rollout(other)) < 1e-4


@torch.no_grad()
def test_a_copy_made_inside_is_free() -> None:
    model = fresh()
    model.gradient_checkpointing_enable()
    run = rollout(model)
    expected = model(run.sequences[:, :9]).logits
    with replay(model, run.trace):
        model(run.sequences, attention_mask=run.mask)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(run.sequences[:, :9]).logits, expected)
    assert torch.equal(twin(run.sequences[:, :9]).logits, expected)
    twin.lm_head.weight.zero_()
    assert not twin(run.sequences[:, :9]).logits.any()
    checkpoint = model.model.layers[0]._gradient_checkpointing_func
    assert type(twin.model.layers[0]._gradient_checkpointing_func) is type(checkpoint)


@torch.no_grad()
def test_a_forward_that_the_user_replaces_inside_stays() -> None:
    model = fresh()
    run = rollout(model)
    with replay(model, run.trace):
        model(run.sequences, attention_mask=run.mask)
        inside = model.forward
        model.forward = theirs = lambda *args, **kwargs: inside(*args, **kwargs)
    assert vars(model)["forward"] is theirs
    assert gap(model(run.sequences, attention_mask=run.mask).logits, run) > 1e-2


def test_a_checkpoint_function_that_is_set_inside_stays() -> None:
    model = fresh().train()
    run = rollout(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay(model, run.trace):
        model(run.sequences, attention_mask=run.mask)
        model.gradient_checkpointing_enable({"use_reentrant": True})
    function = model.model.layers[0]._gradient_checkpointing_func
    assert function.keywords == {"use_reentrant": True}


def test_threads_that_read_log_probabilities_of_one_model() -> None:
    """The second begins while the first runs, and ends after it."""
    model = fresh()
    ids = rollout(model).sequences
    expected = rollout_logprobs(model, ids).logprobs
    first_is_inside, second_is_inside = threading.Event(), threading.Event()
    first_is_over = threading.Event()
    found = {}

    def wait(*_: Any) -> None:
        if threading.current_thread().name == "first":
            first_is_inside.set()
            second_is_inside.wait(10)
        else:
            second_is_inside.set()
            first_is_over.wait(10)

    hook = model.model.layers[0].register_forward_pre_hook(wait)

    def first() -> None:
        threading.current_thread().name = "first"
        found["first"] = rollout_logprobs(model, ids).logprobs
        first_is_over.set()

    def second() -> None:
        first_is_inside.wait(10)
        found["second"] = rollout_logprobs(model, ids).logprobs

    assert not in_threads(first, second)
    hook.remove()
    assert not patched(model)
    for logprobs in found.values():
        assert torch.equal(logprobs, expected)
    shapes = []
    assert not in_threads(lambda: shapes.append(model(ids).logits.shape))
    assert shapes == [(*ids.shape, model.config.vocab_size)]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_threads_that_replay_one_model(checkpointed: bool) -> None:
    """The first to end leaves the other its checkpoints and its trace."""
    model = fresh().train()
    run = rollout(model)
    if checkpointed:
        model.gradient_checkpointing_enable()
    expected = gradients(model, lambda: score(replayed(model, run), run))
    before = vars(model.model.layers[0]).get("_gradient_checkpointing_func")
    first_is_inside, second_is_inside = threading.Event(), threading.Event()
    first_is_over = threading.Event()
    losses = []

    def first() -> None:
        with replay(model, run.trace):
            first_is_inside.set()
            second_is_inside.wait(10)
            losses.append(score(model(run.sequences, attention_mask=run.mask).logits, run))
        first_is_over.set()

    def second() -> None:
        first_is_inside.wait(10)
        with replay(model, run.trace):
            second_is_inside.set()
            first_is_over.wait(10)
            losses.append(score(model(run.sequences, attention_mask=run.mask).logits, run))

    assert not in_threads(first, second)
    assert vars(model.model.layers[0]).get("_gradient_checkpointing_func") is before
    assert not patched(model)
    for loss in losses:
        assert relative(gradients(model, lambda loss=loss: loss), expected) < 1e-5


@torch.no_grad()
def test_threads_come_and_go() -> None:
    model = fresh()
    runs: list[Rollout] = [rollout(model, seed=seed) for seed in range(2)]
    gaps: list[float] = []

    def work(run: Rollout) -> None:
        with torch.no_grad():
            gaps.extend(gap(replayed(model, run), run) for _ in range(20))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert not in_threads(*(functools.partial(work, run) for run in runs))
    finally:
        sys.setswitchinterval(interval)
    assert len(gaps) == 40 and max(gaps) < 1e-4 and not patched(model)


def test_the_first_replays_of_two_threads_leave_the_mode() -> None:
    """The second would begin to look for layers while the model is in eval mode, and end later."""
    model = fresh().train()
    run = rollout(small_llama())
    first_is_inside, second_is_inside = threading.Event(), threading.Event()
    first_is_over = threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread().name == "first":
            first_is_inside.set()
            second_is_inside.wait(0.2)
        else:
            second_is_inside.set()
            first_is_over.wait(10)

    hook = model.model.layers[0].register_forward_pre_hook(wait)

    def first() -> None:
        threading.current_thread().name = "first"
        replayed(model, run)
        first_is_over.set()

    def second() -> None:
        first_is_inside.wait(10)
        replayed(model, run)

    assert not in_threads(first, second)
    hook.remove()
    assert all(module.training for module in model.modules())


def test_checkpointed_attention_that_runs_twice_in_a_layer() -> None:
    model = build_tiny("diffllama")[0].train()
    ids = torch.randint(3, model.config.vocab_size, (2, 40))
    cache = SparseBudgetCache(**SMALL, policy="keydiff", record=True)
    model.eval()(ids, past_key_values=cache)
    trace = cache.trace()
    model.train()

    def loss() -> torch.Tensor:
        with replay(model, trace):
            return model(ids).logits.square().sum()

    expected = gradients(model, loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert relative(gradients(model, loss), expected) < 1e-5
