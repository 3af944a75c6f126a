"""Under every allocation, the logits are those of a dense forward under the recorded trace."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import NEVER, SparseBudgetCache
from sparse_cache.allocators.adaptive import AdaptiveAllocator
from sparse_cache.allocators.pyramid import PyramidAllocator
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
from tests.cache.oracle import dense_logits

TOLERANCE = 1e-4
ALLOCATIONS = ["pyramid", "adaptive"]


@dataclass(frozen=True)
class Both(PyramidAllocator, AdaptiveAllocator):
    """Layers differ, and so do the heads of each."""


def check_against_oracle(
    model: torch.nn.Module,
    cache: SparseBudgetCache,
    ids: torch.Tensor,
    real: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    trace = cache.trace()
    for death, layer in zip(trace.deaths, cache.layers, strict=True):
        alive = (death == NEVER) & real.bool()[:, None]
        by_head = getattr(layer, "lengths_by_head", None)
        expected = [[length] * alive.shape[1] for length in layer.lengths]
        assert alive.sum(-1).tolist() == (by_head or expected)
    truth = dense_logits(model, ids, real, trace.deaths)
    columns = real.bool()
    scale = max(1.0, truth[columns].abs().max().item())
    assert (logits.double() - truth)[columns].abs().max().item() < TOLERANCE * scale


@pytest.mark.parametrize(
    ("policy", "attention"),
    [*((policy, "sdpa") for policy in POLICIES), ("rkv", "eager"), ("h2o", "eager")],
)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_generate(allocation: str, policy: str, attention: str) -> None:
    model = small_llama(layers=3, attention=attention)
    ids, real = left_padded([40, 23, 9])
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True, allocation=allocation)
    output = decode(model, cache, ids, attention_mask=real, new_tokens=35)
    logits = torch.stack(output.logits, dim=1)
    real = torch.cat([real, torch.ones(3, 34, dtype=torch.long)], dim=1)
    truth = dense_logits(model, output.sequences[:, :-1], real, cache.trace().deaths)[:, 39:]
    assert (logits.double() - truth).abs().max().item() < TOLERANCE * truth.abs().max().item()
    assert cache.stats().evictions >= 3 * 3 * 4


@pytest.mark.parametrize("policy", ["rkv", "h2o", "keydiff"])
@pytest.mark.parametrize("chunk", [1, 7, 25])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_prefill_in_chunks(allocation: str, chunk: int, policy: str) -> None:
    model = small_llama(layers=3, kv_heads=3)
    ids, real = left_padded([60, 31])
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True, allocation=allocation)
    chunks = [chunk] * (60 // chunk) + ([60 % chunk] if 60 % chunk else [])
    check_against_oracle(model, cache, ids, real, drive(model, cache, ids, real, chunks))


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_layers_and_heads_at_once(policy: str) -> None:
    model = small_llama(layers=3, kv_heads=3)
    ids, real = left_padded([60, 31])
    allocation = Both(beta=4, floor=0.3)
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True, allocation=allocation)
    logits = drive(model, cache, ids, real, [40, 5, *[1] * 15])
    check_against_oracle(model, cache, ids, real, logits)
    assert [layer.settings.budget for layer in cache.layers] == [31, 20, 9]
    assert len({length for layer in cache.layers for length in layer.lengths_by_head[0]}) > 3


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_turns_with_generate(allocation: str) -> None:
    model = small_llama(layers=3)
    cache = SparseBudgetCache(**SMALL, record=True, allocation=allocation)
    ids = tokens(2, 30)
    logits = []
    for turn in range(3):
        output = decode(model, cache, ids, new_tokens=12)
        ids = torch.cat([output.sequences, tokens(2, 9, seed=turn + 1)], dim=1)
        logits.append((ids.shape[1] - 9 - 12 - 1, torch.stack(output.logits, dim=1)))
    seen = cache.get_seq_length()
    ones = torch.ones(2, seen, dtype=torch.long)
    truth = dense_logits(model, ids[:, :seen], ones, cache.trace().deaths)
    for start, turn_logits in logits:
        expected = truth[:, start : start + 12]
        assert (turn_logits.double() - expected).abs().max().item() < 1e-3
    assert cache.stats().evictions > 2 * 3 * 3


@pytest.mark.parametrize("budget", [0.05, 0.3, 0.48])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_share_of_the_tokens_seen(allocation: str, budget: float) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([50, 20])
    cache = SparseBudgetCache(
        budget, interval=5, window=4, sinks=2, record=True, allocation=allocation
    )
    logits = drive(model, cache, ids, real, [30, 8, *[1] * 12])
    check_against_oracle(model, cache, ids, real, logits)


class BeamWatcher(SparseBudgetCache):
    """Notes the trace before rows move."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.before = self.trace().deaths
        super().reorder_cache(beam_idx)


@pytest.mark.parametrize("policy", ["rkv", "h2o"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_beam_search(allocation: str, policy: str) -> None:
    """Every beam's score is that of a dense forward under the trace of the row it came from."""
    model = small_llama(layers=3)
    ids = tokens(1, 33)
    cache = BeamWatcher(**SMALL, policy=policy, record=True, allocation=allocation)
    output = decode(
        model, cache, ids, new_tokens=20, num_beams=4, num_return_sequences=4, output_scores=True
    )
    ones = torch.ones(1, 52, dtype=torch.long)
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        misfits = []
        for row in range(4):
            deaths = [death[row : row + 1] for death in cache.before]
            logits = dense_logits(model, sequence[None, :-1], ones, deaths)[0, 32:]
            own = logits.log_softmax(-1).gather(-1, sequence[33:, None]).sum() / 20
            misfits.append(abs(own.item() - score.item()))
        assert min(misfits) < TOLERANCE


@pytest.mark.parametrize("policy", ["rkv", "h2o"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_with_gradients_on(allocation: str, policy: str) -> None:
    """Then tokens are not written where autograd may still look."""
    model = small_llama(layers=3)
    ids = tokens(2, 40)
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True, allocation=allocation)
    logits = []
    for start, stop in [(0, 33), *((i, i + 1) for i in range(33, 40))]:
        output = model(ids[:, start:stop], past_key_values=cache, use_cache=True).logits
        output.sum().backward()
        logits.append(output.detach())
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    model.zero_grad()
    ones = torch.ones(2, 40, dtype=torch.long)
    check_against_oracle(model, cache, ids, ones, torch.cat(logits, dim=1))


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[list[int], torch.Tensor]:
    """Chunks, and which columns are real: padding on the left and in the middle."""
    sizes = st.one_of(st.just(1), st.just(1), st.integers(2, 24))
    chunks = draw(st.lists(sizes, min_size=3, max_size=18))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row, lead = [], draw(st.integers(0, 12))
        for length in chunks:
            here = min(lead, length)
            lead -= here
            columns = [0] * here + [1] * (length - here)
            if here == 0 and length > 3 and draw(st.integers(0, 5)) == 0:
                start = draw(st.integers(0, length - 2))
                stop = draw(st.integers(start, length - 1))
                columns[start:stop] = [0] * (stop - start)
            row += columns
        row[-1] = 1
        rows.append(row)
    return chunks, torch.tensor(rows)


@given(
    case=chunkings(),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    head_size=st.sampled_from([2, 6, 8]),
    layers=st.integers(1, 4),
    attention=st.sampled_from(["sdpa", "eager"]),
    policy=st.sampled_from(POLICIES),
    allocation=st.one_of(
        st.floats(1, 30).map(lambda beta: PyramidAllocator(beta=beta)),
        st.floats(0, 1).map(lambda floor: AdaptiveAllocator(floor=floor)),
        st.just(Both()),
    ),
    spare=st.integers(0, 20),
    interval=st.integers(1, 12),
    window=st.integers(1, 5),
    sinks=st.integers(0, 3),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=25)
def test_whatever_the_sizes(
    case: tuple[list[int], torch.Tensor],
    kv_heads: int,
    group: int,
    head_size: int,
    layers: int,
    attention: str,
    policy: str,
    allocation: AdaptiveAllocator | PyramidAllocator,
    spare: int,
    interval: int,
    window: int,
    sinks: int,
    seed: int,
) -> None:
    chunks, real = case
    model = small_llama(
        layers=layers, kv_heads=kv_heads, group=group, head_size=head_size, attention=attention
    )
    cache = SparseBudgetCache(
        window + sinks + spare,
        policy=policy,
        allocation=allocation,
        interval=interval,
        window=window,
        sinks=sinks,
        record=True,
    )
    ids = tokens(*real.shape, seed=seed)
    logits = drive(model, cache, ids, real, chunks)
    check_against_oracle(model, cache, ids, real, logits)
    total = sum(sum(layer.lengths) for layer in cache.layers)
    uniform = SparseBudgetCache(
        window + sinks + spare, policy="streaming", interval=interval, window=window, sinks=sinks
    )
    drive(model, uniform, ids, real, chunks)
    if not allocation.varies_by_layer and policy != "window":
        # The window policy keeps no sinks, but its rows are as long.
        assert total == sum(sum(layer.lengths) for layer in uniform.layers)
        assert cache.stats().bytes_held == uniform.stats().bytes_held


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_lossless_when_nothing_is_evicted(allocation: str, policy: str) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([40, 11])
    cache = SparseBudgetCache(**LARGE, policy=policy, allocation=allocation)
    logits = drive(model, cache, ids, real, [30, 4, *[1] * 6])
    never = [torch.full((2, 2, 40), NEVER)] * 3
    truth = dense_logits(model, ids, real, never)
    assert (logits - truth)[real.bool()].abs().max().item() < TOLERANCE * 10
    assert cache.stats().evictions == 0
