"""`quantization="int8"`: every token is rounded once, within the stated bound, and only stored."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import DynamicCache

from sparse_cache import SparseBudgetCache
from sparse_cache.quantization import dequantize, quantize
from tests.architectures.build import build_tiny

from .driving import POLICIES, SMALL, decode, drive, largest_difference, left_padded, small_llama
from .driving import tokens as random_tokens
from .test_static import compiled, same

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {"budget": 10, "interval": 6, "window": 3, "sinks": 2}
PARTS = (("keys", "key_scales"), ("values", "value_scales"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int8(**more: Any) -> SparseBudgetCache:
    return SparseBudgetCache(**{**SMALL, "quantization": "int8", **more})


# ---------------------------------------------------------------------- the rounding


def bound(given_tokens: torch.Tensor) -> torch.Tensor:
    """The stated greatest error of each coordinate, in float64."""
    exact = given_tokens.double()
    largest = exact.abs().amax(-1, keepdim=True)
    rounding = torch.finfo(given_tokens.dtype).eps / 2
    smallest = torch.finfo(given_tokens.dtype).smallest_normal * torch.finfo(given_tokens.dtype).eps
    return largest / 254 + 2e-7 * largest + 1e-43 + rounding * largest + smallest / 2


def error(given_tokens: torch.Tensor) -> torch.Tensor:
    back = dequantize(*quantize(given_tokens), given_tokens.dtype)
    assert back.dtype == given_tokens.dtype
    return (back.double() - given_tokens.double()).abs()


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    exponent=st.integers(-45, 38),
    size=st.integers(1, 257),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    spread=st.booleans(),
)
def test_the_error_bound(
    exponent: int, size: int, seed: int, dtype: torch.dtype, spread: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(2, 3, 5, size, generator=generator, dtype=torch.float64)
    if spread:  # one coordinate is far greater than the others, as in real keys
        exact[..., 0] *= 300
    limit = torch.finfo(dtype).max * 0.99
    some = (exact * 10.0**exponent).clamp(-limit, limit).to(dtype)
    levels, scales = quantize(some)
    assert levels.dtype == torch.int8 and scales.dtype == torch.float32
    assert levels.shape == some.shape and scales.shape == some.shape[:-1]
    assert int(levels.min()) >= -127
    assert bool((error(some) <= bound(some)).all())


def test_the_error_bound_is_tight() -> None:
    """Half a level is reached, so a bound that is any smaller would be wrong."""
    some = torch.tensor([127.0, 0.5, 1.5, -2.5, 3.49999])
    assert error(some).max().item() == pytest.approx(127 / 254, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_largest_numbers(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 3, dtype=dtype)
    levels, scales = quantize(zeros)
    assert not levels.any() and not scales.any()
    assert torch.equal(dequantize(levels, scales, dtype), zeros)
    largest = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64) * torch.finfo(dtype).max * 0.999
    assert bool((error(largest.to(dtype)) <= bound(largest.to(dtype))).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_not_lost(bad: float) -> None:
    some = torch.ones(3, 4)
    some[1, 2] = bad
    levels, scales = quantize(some)
    back = dequantize(levels, scales, torch.float32)
    assert not scales[1].isfinite()
    assert back[1].isnan().all()
    assert torch.equal(back[[0, 2]], some[[0, 2]])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(exponent=st.integers(-30, 30), seed=st.integers(0, 1000), size=st.integers(1, 80))
def test_rounding_again_changes_no_level(exponent: int, seed: int, size: int) -> None:
    some = torch.randn(7, size, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    levels, scales = quantize(some)
    again, scales_again = quantize(dequantize(levels, scales, torch.float32))
    assert torch.equal(levels, again)
    assert torch.allclose(scales, scales_again, rtol=3e-7, atol=0)


# ---------------------------------------------------------------------- what is stored


Token = tuple[torch.Tensor, float, torch.Tensor, float]


def stored_tokens(cache: SparseBudgetCache) -> dict[tuple[int, int, int, int], Token]:
    """What each token's numbers are, by layer, row, KV head and position."""
    cache.evict()
    found = {}
    for layer in cache.layers:
        held = layer.held
        held.restore_order()
        held.place()
        (keys, key_scales), (values, value_scales) = (
            (held.storage[name].cpu(), held.storage[scales].cpu()) for name, scales in PARTS
        )
        assert keys.dtype == values.dtype == torch.int8
        assert key_scales.dtype == value_scales.dtype == torch.float32
        positions = held.storage["positions"].tolist()
        for row, stored in enumerate(held.rows.stored):
            for head in range(keys.shape[1]):
                for slot in range(stored):
                    at = row, head, slot
                    found[(layer.layer_idx, row, head, positions[row][head][slot])] = (
                        keys[at].clone(),
                        key_scales[at].item(),
                        values[at].clone(),
                        value_scales[at].item(),
                    )
    return found


def equal(first: Token, second: Token) -> bool:
    return (
        torch.equal(first[0], second[0])
        and torch.equal(first[2], second[2])
        and first[1::2] == second[1::2]
    )


class Watch:
    """Every token as it was when it was first seen in storage."""

    def __init__(self) -> None:
        self.first: dict[tuple[int, int, int, int], Token] = {}
        self.met_again = 0

    def look(self, cache: SparseBudgetCache) -> None:
        now = stored_tokens(cache)
        for token, numbers in now.items():
            if token in self.first:
                self.met_again += 1
                assert equal(self.first[token], numbers), token
        self.first |= now


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_layer_holds_the_unquantized_tokens_within_the_bound(
    policy: str, dtype: torch.dtype
) -> None:
    """Its inputs do not depend on what is stored. Where both keep a token it must be the same one,
    and policies that look at nothing but positions must keep the same ones."""
    model = small_llama(dtype=dtype)
    ids, real = left_padded([37, 22])
    ids = torch.cat([ids, random_tokens(2, 21, seed=3)], dim=1)
    real = torch.cat([real, torch.ones(2, 21, dtype=torch.long)], dim=1)
    plain, rounded = SparseBudgetCache(**SMALL, policy=policy), int8(policy=policy)
    for cache in (plain, rounded):
        drive(model, cache, ids, real, [37, 3, *[1] * 18])
    (first, second) = (cache.layers[0].held for cache in (plain, rounded))
    first.place()
    second.place()
    stored = first.rows.stored
    assert stored == second.rows.stored and min(stored) >= 20
    both = 0
    for row in range(2):
        for head in range(2):
            kept = [
                held.storage["positions"][row, head, : stored[row]].tolist()
                for held in (first, second)
            ]
            if policy in ("window", "streaming", "random"):
                assert kept[0] == kept[1]
            for slot, position in enumerate(kept[0]):
                if position not in kept[1]:
                    continue
                both += 1
                other = kept[1].index(position)
                for name, _ in PARTS:
                    exact = first.storage[name][row, head, slot]
                    back = second.decoded(name)[row, head, other]
                    assert back.dtype == dtype
                    difference = (back.double() - exact.double()).abs()
                    assert bool((difference <= bound(exact)).all())
    assert both > 0.8 * 2 * sum(stored)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    policy=st.sampled_from(POLICIES),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 9), min_size=3, max_size=14),
    budget=st.integers(6, 20),
    interval=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
)
def test_a_token_is_rounded_once(
    policy: str,
    lengths: list[int],
    chunks: list[int],
    budget: int,
    interval: int,
    dtype: torch.dtype,
) -> None:
    model = small_llama(dtype=dtype)
    ids, real = left_padded(lengths)
    width, batch = ids.shape[1], len(lengths)
    ids = torch.cat([ids, random_tokens(batch, sum(chunks), seed=1)], dim=1)
    real = torch.cat([real, torch.ones(batch, sum(chunks), dtype=torch.long)], dim=1)
    cache = int8(budget=budget, interval=interval, policy=policy)
    watch, start = Watch(), 0
    for length in [width, *chunks]:
        stop = start + length
        drive(model, cache, ids[:, :stop], real[:, :stop], [length], start=start)
        watch.look(cache)
        start = stop
    assert watch.met_again > 0


@pytest.mark.parametrize("static", [False, True])
def test_a_token_is_rounded_once_in_a_conversation(static: bool) -> None:
    model = small_llama()
    cache, watch = int8(static=static), Watch()
    text = random_tokens(2, 23)
    for turn in range(4):
        text = decode(model, cache, text, 9).sequences
        watch.look(cache)
        text = torch.cat([text, random_tokens(2, 4 + turn, seed=turn)], dim=1)
    assert cache.stats().evictions > 4
    assert watch.met_again > 100


@pytest.mark.parametrize("policy", ["rkv", "h2o", "keydiff"])
def test_padding_between_turns(policy: str) -> None:
    """A chunk of which rows take in different shares; then tokens that a mask hides later."""
    model = small_llama()
    ids, real = random_tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    real[1, 24:29] = 0
    cache, watch, start = int8(policy=policy), Watch(), 0
    for length in (24, 9, *[1] * 9, 6):
        stop = start + length
        drive(model, cache, ids[:, :stop], real[:, :stop], [length], start=start)
        watch.look(cache)
        start = stop
    assert watch.met_again > 200
    before = stored_tokens(cache)
    real[0, 45] = 0
    drive(model, cache, ids[:, :49], real[:, :49], [1], start=48)
    after = stored_tokens(cache)
    # The hidden token is gone, and those behind it count one less.
    for (layer, row, head, position), numbers in after.items():
        old = position + (row == 0 and position >= 45)
        if (layer, row, head, old) in before:
            assert equal(before[layer, row, head, old], numbers)
    assert len(after) > 100


def test_a_pyramid_of_rounded_tokens() -> None:
    model = small_llama(layers=4)
    cache = int8(allocation="pyramid", config=model.config)
    drive(model, cache, random_tokens(2, 60), None, [45, *[1] * 15])
    held = [layer.held for layer in cache.layers]
    assert len({each.storage["keys"].shape[2] for each in held}) > 1
    assert cache.stats().bytes_held == 4 * 2 * 2 * 2 * 25 * (8 + 4)
    assert all(each.storage["keys"].dtype == torch.int8 for each in held)


def test_a_token_is_rounded_once_while_steps_are_taken_back() -> None:
    model, ids = small_llama(), random_tokens(1, 90)
    cache, watch = int8(), Watch()
    plain = int8()
    drive(model, cache, ids[:, :30])
    drive(model, plain, ids[:, :30])
    cache.activate_past_recording()
    for start in range(30, 80, 2):
        wrong = torch.cat([ids[:, : start + 2], random_tokens(1, 3, seed=start)], dim=1)
        drive(model, cache, wrong, None, [5], start=start)
        cache.crop(-3)
        drive(model, plain, ids[:, : start + 2], None, [2], start=start)
        watch.look(cache)
    assert cache.stats().evictions == plain.stats().evictions > 10
    first, second = stored_tokens(cache), stored_tokens(plain)
    assert first.keys() == second.keys()
    assert watch.met_again > 200


def test_assisted_decoding() -> None:
    model, assistant = small_llama(), small_llama(layers=1, seed=3)
    cache = int8()
    answer = model.generate(
        random_tokens(1, 30),
        past_key_values=cache,
        assistant_model=assistant,
        attention_mask=torch.ones(1, 30, dtype=torch.long),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
    )
    # A token that is verified in a chunk sees the others of its chunk unrounded.
    assert answer.shape == (1, 50)
    assert cache.stats().evictions > 0
    Watch().look(cache)


@pytest.mark.parametrize("static", [False, True])
def test_rows_take_their_numbers_and_scales_along(static: bool) -> None:
    model = small_llama()
    cache = int8(static=static)
    ids, real = left_padded([33, 9, 21])
    decode(model, cache, ids, 8, attention_mask=real)
    before = stored_tokens(cache)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    after = stored_tokens(cache)
    sources = [2, 2, 0]
    assert len(after) == sum(1 for row in sources for (_, old, _, _) in before if old == row)
    for (layer, row, head, position), numbers in after.items():
        assert equal(before[layer, sources[row], head, position], numbers)


def test_beams() -> None:
    answers = [
        small_llama().generate(
            random_tokens(2, 22),
            past_key_values=int8(static=static),
            attention_mask=torch.ones(2, 22, dtype=torch.long),
            num_beams=3,
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )
        for static in (False, True)
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_alone_equals_the_row_in_a_batch(policy: str) -> None:
    """Rounding turns a difference in the last bit of a key into one of a whole level, rarely; the
    first layer has no such differences, so there they must be equal to the bit."""
    model = small_llama(layers=1)
    lengths = [41, 8, 23]
    ids, real = left_padded(lengths)
    together = int8(policy=policy)
    answer = decode(model, together, ids, 20, attention_mask=real)
    numbers = stored_tokens(together)
    for row, length in enumerate(lengths):
        alone = int8(policy=policy)
        own = decode(model, alone, ids[row : row + 1, -length:], 20)
        assert torch.equal(own.sequences[0, length:], answer.sequences[row, ids.shape[1] :])
        differences = [
            (a[0] - b[row]).abs().max() for a, b in zip(own.logits, answer.logits, strict=True)
        ]
        assert max(differences) < 1e-4
        mine = stored_tokens(alone)
        for (layer, _, head, position), token in mine.items():
            other = numbers[layer, row, head, position]
            for levels in (0, 2):
                steps = token[levels].int() - other[levels].int()
                assert steps.abs().max() <= 1
            assert token[1::2] == pytest.approx(other[1::2], rel=1e-5)


class RoundedDense(DynamicCache):
    """Transformers' own cache, whose full-attention layers are given rounded tokens; the prompt,
    which comes first, sees itself as it is."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.get_seq_length(layer_idx) == 0
        exact = key_states, value_states
        rounded = [dequantize(*quantize(states), states.dtype) for states in exact]
        sliding = len(self.layers) > layer_idx and self.layers[layer_idx].is_sliding
        given = super().update(*(exact if sliding else rounded), layer_idx, *args, **kwargs)
        return exact if first and not sliding else given


def test_only_the_rounding_is_lost_below_the_budget() -> None:
    model, ids = small_llama(), random_tokens(2, 40)
    chunks = [30, *[1] * 10]
    got = drive(model, int8(budget=100, interval=10), ids, None, chunks)
    assert (got - drive(model, RoundedDense(), ids, None, chunks)).abs().max() < 1e-4
    exact = drive(model, DynamicCache(), ids, None, chunks)
    assert (got - exact)[:, :30].abs().max() < 1e-5
    assert (got - exact)[:, 30:].abs().max() > 1e-3


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [8, 16])
def test_bytes_are_those_of_numbers_and_scales(dtype: torch.dtype, head_size: int) -> None:
    model = small_llama(dtype=dtype, head_size=head_size)
    ids = random_tokens(3, 45)
    cache, dense = int8(policy="h2o"), DynamicCache()
    drive(model, cache, ids)
    drive(model, dense, ids)
    stats = cache.stats()
    # layers, keys and values, rows, heads, slots
    vectors = 2 * 2 * 3 * 2 * 25
    assert stats.bytes_held == vectors * (head_size * 1 + 4)
    assert stats.bytes_dense == sum(x.keys.nbytes + x.values.nbytes for x in dense.layers)
    allocated = [
        held.storage[name].nbytes
        for held in (layer.held for layer in cache.layers)
        for part in PARTS
        for name in part
    ]
    assert stats.bytes_held == sum(allocated)
    unquantized = SparseBudgetCache(**SMALL, policy="h2o")
    drive(model, unquantized, ids)
    assert stats.bytes_bookkeeping == unquantized.stats().bytes_bookkeeping


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("static", [False, True])
def test_memory_is_constant_while_decoding(policy: str, static: bool) -> None:
    model = small_llama()
    ids, real = left_padded([40, 11, 2])
    cache = int8(policy=policy, static=static)
    drive(model, cache, ids, real)

    def addresses() -> list[int]:
        tensors = [t for layer in cache.layers for t in layer.held.storage.tensors()]
        return [tensor.data_ptr() for tensor in tensors]

    where, held = addresses(), cache.stats().bytes_held
    ids = torch.cat([ids, random_tokens(3, 40, seed=1)], dim=1)
    real = torch.cat([real, torch.ones(3, 40, dtype=torch.long)], dim=1)
    for step in range(40, 80):
        drive(model, cache, ids[:, : step + 1], real[:, : step + 1], [1], start=step)
        assert addresses() == where
        assert cache.stats().bytes_held == held
        assert max(cache.layers[0].lengths) <= 25
    assert held == 2 * 2 * 3 * 2 * 25 * (8 + 4)


# ---------------------------------------------------------------------- other ways to run


@pytest.mark.parametrize("policy", ["rkv", "h2o", "keydiff"])
def test_compiled_steps_give_what_eager_steps_give(policy: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = small_llama()
    static = int8(policy=policy, record=True, static=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(([30, 11], [7, 40])):
            ids, real = left_padded(lengths, seed)
            usual = int8(policy=policy, record=True)
            expected = decode(model, usual, ids, 30, attention_mask=real)
            static.reset()
            answer = decode(model, static, ids, 30, attention_mask=real, compile_config=compiled())
            assert torch.equal(expected.sequences, answer.sequences)
            assert largest_difference(expected, answer) < 1e-3
            assert same(usual, static)
            assert usual.stats().bytes_held == static.stats().bytes_held
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("static", [False, True])
def test_reset_makes_it_new(static: bool) -> None:
    model = small_llama()
    cache = int8(record=True, static=static)
    first = decode(model, cache, random_tokens(2, 30), 20)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = decode(model, cache, random_tokens(2, 30), 20)
    assert largest_difference(first, again) == 0.0


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("static", [False, True])
def test_copies_are_equal_and_apart(
    clone: Callable[[SparseBudgetCache], SparseBudgetCache], static: bool
) -> None:
    model = small_llama()
    cache = int8(policy="h2o", static=static)
    ids, real = left_padded([33, 9])
    ids = torch.cat([ids, random_tokens(2, 20, seed=1)], dim=1)
    real = torch.cat([real, torch.ones(2, 20, dtype=torch.long)], dim=1)
    drive(model, cache, ids[:, :40], real[:, :40], [33, *[1] * 7])
    first, second = clone(cache), clone(cache)
    first.reorder_cache(torch.tensor([1, 0]))
    a, b = (drive(model, each, ids, real, [1] * 13, start=40) for each in (cache, second))
    assert torch.equal(a, b)
    one, two = stored_tokens(cache), stored_tokens(second)
    assert one.keys() == two.keys() and all(equal(one[token], two[token]) for token in one)


@pytest.mark.parametrize("verb", ["offload", "prefetch"])
def test_offloading_moves_the_scales_too(verb: str) -> None:
    model, ids = small_llama(), random_tokens(1, 44)
    usual, moved = int8(), int8()
    for cache in (usual, moved):
        drive(model, cache, ids[:, :30])
    for layer in moved.layers:
        layer.offload()
        if verb == "prefetch":
            layer.prefetch()
    a, b = (drive(model, cache, ids, None, [1] * 14, start=30) for cache in (usual, moved))
    assert torch.equal(a, b)


def test_the_trace_is_kept() -> None:
    """Streaming keeps by position alone, so rounding may not change when anything dies."""
    model, ids = small_llama(), random_tokens(2, 60)
    traces = []
    for quantization in (None, "int8"):
        cache = int8(policy="streaming", record=True, quantization=quantization)
        drive(model, cache, ids, None, [30, *[1] * 30])
        traces.append(cache.trace().deaths)
    assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True))
    cache = int8(record=True)
    drive(model, cache, ids, None, [30, *[1] * 30])
    alive = [(death > 60).sum(-1) for death in cache.trace().deaths]
    assert all(bool((count == 20).all()) for count in alive)


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",  # caches latents: values of another width, all heads evict together
        "deepseek_v32",  # and has an indexer, whose keys are not quantized
        "gpt_oss",  # sliding layers and attention sinks
        "gemma3n_text",  # layers that read the keys of others
        "diffllama",
        "qwen3_next",  # linear-attention layers
        "lfm2",
        "zamba2",
    ],
)
def test_other_architectures(model_type: str) -> None:
    model, vocabulary, _ = build_tiny(model_type)
    ids = torch.randint(3, vocabulary, (2, 44), generator=torch.Generator().manual_seed(0))
    config = model.config
    full = {"budget": 200, "interval": 10, "config": config}
    chunks = [30, *[1] * 14]
    got = drive(model, int8(**full), ids, None, chunks)
    truth = drive(model, RoundedDense(config=config), ids, None, chunks)
    assert (got - truth).abs().max().item() < 1e-3
    exact = drive(model, DynamicCache(config=config), ids, None, chunks)
    assert (got - exact)[:, 30:].abs().max().item() > 1e-3
    watch = Watch()
    cache = int8(config=config)
    drive(model, cache, ids[:, :30])
    budgeted = cache.stats().budgeted_layers
    assert budgeted
    layers = [layer for layer in cache.layers if hasattr(layer, "held")]
    for step in range(30, 44):
        output = drive(model, cache, ids[:, : step + 1], None, [1], start=step)
        assert output.isfinite().all()
        if len(layers) == len(cache.layers):
            watch.look(cache)
    assert cache.stats().evictions >= 2 * budgeted
    for layer in layers:
        for name, scales in PARTS:
            assert layer.held.storage[name].dtype == torch.int8
            assert layer.held.storage[scales].dtype == torch.float32


@pytest.mark.parametrize("chunks", [[9, 3, 1, 1, 2, 2], [17, 2, 1, 1]])
def test_the_kernel_reads_single_tokens_only(chunks: list[int]) -> None:
    """Chunks that fit into storage are attended to by the model, which needs real keys."""
    model = small_llama(layers=1).to(DEVICE)
    ids = random_tokens(1, sum(chunks)).to(DEVICE)
    answers = [
        drive(model, int8(**TINY, policy="streaming", backend=backend), ids, None, chunks)
        for backend in ("torch", "triton")
    ]
    assert (answers[0] - answers[1]).abs().max().item() < 1e-4


def test_layers_that_read_the_keys_of_others_beside_the_kernel() -> None:
    model, vocabulary, _ = build_tiny("gemma3n_text")
    model = model.to(DEVICE)
    ids = torch.randint(3, vocabulary, (1, 20), generator=torch.Generator().manual_seed(0))
    answers = [
        drive(
            model,
            int8(**TINY, policy="streaming", backend=backend),
            ids.to(DEVICE),
            None,
            [12, *[1] * 8],
        )
        for backend in ("torch", "triton")
    ]
    assert (answers[0] - answers[1]).abs().max().item() < 1e-4


# ---------------------------------------------------------------------- bad input


def test_keys_that_hold_nan() -> None:
    model, ids = small_llama(layers=1), random_tokens(1, 40)
    cache = int8()
    drive(model, cache, ids[:, :21])
    cache.layers[0].held.storage["key_scales"][0, 0, 5] = torch.nan
    with pytest.raises(ValueError, match="keys of layer 0 hold NaN"):
        drive(model, cache, ids, None, [1] * 19, start=21)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"quantization='int4' is unknown; .* None, 'int8'"):
        SparseBudgetCache(quantization="int4")
    with pytest.raises(ValueError, match=r"quantization='int8' does not go with .*'adaptive'"):
        SparseBudgetCache(quantization="int8", allocation="adaptive")
    SparseBudgetCache(quantization="int8", allocation="pyramid")
    with pytest.raises(ValueError, match="quantization=8 is unknown"):
        SparseBudgetCache(quantization=8)  # type: ignore[arg-type]


def test_another_dtype_is_refused() -> None:
    cache = int8()
    drive(small_llama(), cache, random_tokens(1, 30))
    with pytest.raises(ValueError, match="float32"):
        drive(small_llama(dtype=torch.bfloat16), cache, random_tokens(1, 31), None, [1], start=30)
