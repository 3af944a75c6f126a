"""What a step computes: the same however it is cut up, and by each method where they must agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sparse_cache.recipe.learner import micro_batches
from sparse_cache.recipe.options import METHODS, Options
from sparse_cache.recipe.train import Run
from sparse_cache.recipe.update import Batch, micro_loss, mini_batches, prepare_batch
from tests.recipe.tiny_run import save_tiny_model, small_options, small_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _batch(run: Run, rewards_seed: int = 0) -> Batch:
    """Real rollouts with random rewards, as a random model never earns one."""
    run.model.eval()
    torch.manual_seed(1)
    rollouts = run._sample(run.prompts.of_step(0))
    generator = torch.Generator().manual_seed(rewards_seed)
    rewards = torch.randint(0, 2, (len(rollouts),), generator=generator).float()
    rewards[0], rewards[1] = 0.0, 1.0
    dense = run.learner.logprobs(run.model, rollouts, replayed=False)
    return prepare_batch(
        run.options, rollouts, rewards, dense, run._of_reference(rollouts), run._total
    )


def _gradients(run: Run, batch: Batch, micro_batch: int) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of one optimizer step's rows."""
    run.model.zero_grad()
    options: Options = run.options
    (mini,) = mini_batches(options, batch, torch.Generator(), run._total)
    loss = 0.0
    pairs = options.estimator == "online_dpo"
    for cut in micro_batches(torch.arange(len(mini.rows)), micro_batch):
        rows = mini.rows[cut]
        coefficients = mini.coefficients[cut[::2] // 2 if pairs else cut]
        learned = run.learner.read(run.model, batch.rollouts.select(rows))
        found = micro_loss(options, batch, rows, coefficients, learned)
        found.loss.backward()
        loss += float(found.loss)
    return loss, torch.cat([weight.grad.flatten() for weight in run.model.parameters()])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("method", METHODS)
def test_before_the_first_update_the_ratio_is_one(
    model: Path, tmp_path: Path, method: str, temperature: float
) -> None:
    run = small_run(small_options(model, tmp_path, method=method, temperature=temperature))
    batch = _batch(run)
    with torch.no_grad():
        learned = run.learner.read(run.model, batch.rollouts)
    gap = (learned.logprobs - batch.old)[batch.rollouts.mask].abs().max()
    assert float(gap) < (1e-4 if method == "smd" else 1e-3)
    # And under a budget the sampler really is another policy than the dense one.
    mismatch = (batch.dense - batch.rollouts.sampled)[batch.rollouts.mask].abs().max()
    assert (float(mismatch) < 1e-4) == (method == "dense")


def test_without_evictions_all_methods_agree(model: Path, tmp_path: Path) -> None:
    found = {}
    for method in METHODS:
        run = small_run(small_options(model, tmp_path / method, method=method, budget=500))
        found[method] = _gradients(run, _batch(run), micro_batch=8)
    loss, gradient = found["dense"]
    assert gradient.abs().max() > 1e-4
    for method, (other_loss, other) in found.items():
        assert other_loss == pytest.approx(loss, abs=1e-5), method
        torch.testing.assert_close(other, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("method", ["naive", "sparse_rl", "smd"])
def test_micro_batches_do_not_change_the_gradient(
    model: Path, tmp_path: Path, method: str, aggregation: str
) -> None:
    options = small_options(
        model, tmp_path, method=method, aggregation=aggregation, task="recall-mixed"
    )
    run = small_run(options)
    batch = _batch(run)
    if method == "sparse_rl":
        # Half of the rollouts are rejected.
        gaps = (batch.dense - batch.rollouts.sampled).masked_fill(~batch.rollouts.mask, 0.0)
        options.reject_below = float(gaps.amin(1).median().exp()) * 1.0001
        batch = _batch(run)
    batch = _unequal(batch)
    if method == "sparse_rl":
        assert 0 < int(batch.correction.rejected.sum()) < len(batch.rewards)
    whole = _gradients(run, batch, micro_batch=8)
    for size in (1, 3):
        loss, gradient = _gradients(run, batch, micro_batch=size)
        assert loss == pytest.approx(whole[0], abs=1e-6)
        torch.testing.assert_close(gradient, whole[1], atol=2e-6, rtol=1e-4)


def _unequal(batch: Batch) -> Batch:
    """The same batch with its completions cut to different lengths."""
    width = batch.rollouts.mask.shape[1]
    lengths = torch.arange(len(batch.rewards)) * 2 % width + 3
    keep = torch.arange(width) < lengths[:, None]
    mask = batch.rollouts.mask & keep
    attention = batch.rollouts.attention_mask.clone()
    attention[:, batch.rollouts.start :] *= keep.long()
    rollouts = dataclasses.replace(batch.rollouts, mask=mask, attention_mask=attention)
    return dataclasses.replace(batch, rollouts=rollouts, counted=batch.counted & keep)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "online_dpo"])
@pytest.mark.parametrize("method", ["sparse_rl", "smd"])
def test_each_estimator_trains(model: Path, tmp_path: Path, method: str, estimator: str) -> None:
    options = small_options(
        model, tmp_path, method=method, estimator=estimator, reference_kl=0.01, truncated="keep"
    )
    run = small_run(options)
    batch = _batch(run)
    loss, gradient = _gradients(run, batch, micro_batch=2)
    assert torch.isfinite(gradient).all()
    assert float(gradient.norm()) > 1e-3
    other_loss, other = _gradients(run, batch, micro_batch=4)
    assert other_loss == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(other, gradient, atol=2e-6, rtol=1e-4)


def test_a_batch_that_is_rejected_as_a_whole_leaves_the_weights_alone(
    model: Path, tmp_path: Path
) -> None:
    options = small_options(model, tmp_path, method="sparse_rl", reject_below=1e9)
    run = small_run(options)
    batch = _batch(run)
    assert bool(batch.correction.rejected.all())
    loss, gradient = _gradients(run, batch, micro_batch=4)
    assert loss == 0.0
    assert float(gradient.abs().max()) == 0.0


@pytest.mark.parametrize("wrong", ["head", "layer", "union", "late", "none"])
def test_any_other_trace_misses_the_sampler(model: Path, tmp_path: Path, wrong: str) -> None:
    run = small_run(small_options(model, tmp_path, method="smd"))
    rollouts = _batch(run).rollouts
    trace = rollouts.trace
    assert trace is not None
    deaths = trace.deaths
    if wrong == "head":
        deaths = [death.flip(1) for death in deaths]
    elif wrong == "layer":
        deaths = [*deaths[1:], deaths[0]]
    elif wrong == "union":
        deaths = [death.amax(1, keepdim=True).expand_as(death).contiguous() for death in deaths]
    elif wrong == "late":
        alive = 2**31 - 1
        deaths = [
            torch.where((death > 0) & (death < alive), death + 1, death).int() for death in deaths
        ]
        deaths = [torch.where(death > trace.tokens_seen, alive, death).int() for death in deaths]
    changed = dataclasses.replace(trace, deaths=deaths)
    other = dataclasses.replace(rollouts, trace=changed)
    found = run.learner.logprobs(run.model, other, replayed=wrong != "none")
    gap = (found - rollouts.sampled)[rollouts.mask].abs().max()
    assert float(gap) > 1e-2
