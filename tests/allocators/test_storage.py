"""What layers under an allocation hold, row by row and byte by byte, and what they refuse."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.allocators.adaptive import AdaptiveAllocator
from sparse_cache.kernels.availability import missing_for_triton
from sparse_cache.layer_mask import slot_mask
from tests.architectures.build import build_tiny
from tests.cache.driving import (
    LARGE,
    POLICIES,
    SMALL,
    decode,
    drive,
    largest_difference,
    left_padded,
    small_llama,
    tokens,
)

TOLERANCE = 1e-4
ALLOCATIONS = ["pyramid", "adaptive"]


def held_alike(mine: SparseBudgetCache, row: int, theirs: SparseBudgetCache, other: int) -> bool:
    """Whether two rows hold the same tokens, head by head."""
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        if a.lengths[row] != b.lengths[other]:
            return False
        if hasattr(a, "lengths_by_head"):
            lengths = a.lengths_by_head[row]
            if lengths != b.lengths_by_head[other]:
                return False
        else:
            lengths = [a.lengths[row]] * a.keys.shape[1]
        for name in ("keys", "values"):
            for head, length in enumerate(lengths):
                first = getattr(a, name)[row, head, :length]
                second = getattr(b, name)[other, head, :length]
                if (first - second).abs().max() > 1e-4:
                    return False
    return True


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_a_row_in_a_padded_batch_and_alone(allocation: str, policy: str) -> None:
    """Prompts longer than budget + interval, between the two, and shorter than window + sinks."""
    model = small_llama(layers=3)
    lengths = [50, 25, 21, 12, 3]
    ids, real = left_padded(lengths)
    settings = {**SMALL, "policy": policy, "allocation": allocation}
    together = SparseBudgetCache(**settings)
    batched = decode(model, together, ids, attention_mask=real, new_tokens=25)
    for row, length in enumerate(lengths):
        cache = SparseBudgetCache(**settings)
        alone = decode(model, cache, ids[row : row + 1, 50 - length :], new_tokens=25)
        assert torch.equal(alone.sequences[0, length:], batched.sequences[row, 50:])
        for a, b in zip(alone.logits, batched.logits, strict=True):
            assert (a[0] - b[row]).abs().max().item() < TOLERANCE * 10
        assert held_alike(cache, 0, together, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [20, 57])
def test_adaptive_allocates_the_bytes_of_uniform(budget: int, dtype: torch.dtype) -> None:
    """At every step, and no more than the tensors that are really alive."""
    model = small_llama(layers=2, kv_heads=4, dtype=dtype)
    ids = tokens(2, 130)
    caches = {
        name: SparseBudgetCache(budget, interval=7, window=4, sinks=2, allocation=name)
        for name in ("uniform", "adaptive")
    }
    heads = set()
    for start, stop in [(0, 90), *((i, i + 1) for i in range(90, 130))]:
        for cache in caches.values():
            drive(model, cache, ids[:, :stop], chunks=[stop - start], start=start)
        uniform, adaptive = (cache.stats() for cache in caches.values())
        assert adaptive == uniform or adaptive.bytes_bookkeeping > uniform.bytes_bookkeeping
        assert adaptive.bytes_held == uniform.bytes_held
        assert adaptive.bytes_dense == uniform.bytes_dense
        assert adaptive.tokens_kept == uniform.tokens_kept <= budget + 7
        for layer in caches["adaptive"].layers:
            heads.update(length - layer.lengths[0] for length in layer.lengths_by_head[0])
            for row, own in zip(layer.lengths, layer.lengths_by_head, strict=True):
                assert sum(own) == 4 * row
                assert min(own) >= min(6, row)
    assert max(heads) > 3  # heads do differ, or nothing is shown
    capacity = 2 * 4 * (budget + 7) * 8 * dtype.itemsize
    layer = caches["adaptive"].layers[0]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (layer.held.storage[name] for name in ("keys", "values"))
    }
    assert list(storages.values()) == [capacity] * 2


def test_decoding_hands_out_no_memory() -> None:
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, allocation="adaptive")
    drive(model, cache, tokens(1, 40))
    states = torch.randn(1, 2, 1, 8)
    with torch.no_grad():
        keys, values = cache.update(states, states, 0)
    assert keys.shape == values.shape == (1, 2, 21, 8)
    assert keys.untyped_storage().nbytes() == values.untyped_storage().nbytes() == 4
    assert keys.isnan().all()


def test_pyramid_holds_the_bytes_of_uniform_in_the_whole() -> None:
    model = small_llama(layers=5)
    held = {}
    for name in ("uniform", "pyramid"):
        cache = SparseBudgetCache(20, interval=5, window=4, sinks=2, allocation=name)
        drive(model, cache, tokens(2, 90), chunks=[60, *[1] * 30])
        held[name] = cache.stats().bytes_held
        budgets = [layer.settings.budget for layer in cache.layers]
        for layer, budget in zip(cache.layers, budgets, strict=True):
            assert layer.held.storage.capacity == budget + 5
            assert budget <= max(layer.lengths) < budget + 5
    assert held["pyramid"] == held["uniform"]
    assert budgets == [33, 27, 20, 13, 7]
    assert cache.stats().tokens_kept == max(max(layer.lengths) for layer in cache.layers)


def test_uniform_is_what_it_was_without_allocation() -> None:
    model = small_llama()
    ids, real = left_padded([50, 17])
    first, second = SparseBudgetCache(**SMALL), SparseBudgetCache(**SMALL, allocation="uniform")
    chunks = [30, 5, *[1] * 15]
    assert torch.equal(
        drive(model, first, ids, real, chunks), drive(model, second, ids, real, chunks)
    )
    assert type(first.layers[0]) is type(second.layers[0])
    assert first.stats() == second.stats()


def test_floor_of_1_is_uniform() -> None:
    """Every head by itself keeps its best, which is what uniform heads do."""
    model = small_llama(kv_heads=3)
    ids, real = left_padded([50, 17])
    chunks = [30, 5, *[1] * 15]
    for policy in ("h2o", "snapkv", "knorm", "rkv"):
        one = SparseBudgetCache(**SMALL, policy=policy, record=True)
        two = SparseBudgetCache(
            **SMALL, policy=policy, record=True, allocation=AdaptiveAllocator(floor=1)
        )
        a, b = drive(model, one, ids, real, chunks), drive(model, two, ids, real, chunks)
        assert (a - b)[real.bool()].abs().max() < TOLERANCE * 10
        for mine, theirs in zip(one.trace().deaths, two.trace().deaths, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("policy", ["rkv", "h2o", "random"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_same_inputs_same_bits(allocation: str, policy: str) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([50, 17])
    runs = []
    for _ in range(2):
        cache = SparseBudgetCache(**SMALL, policy=policy, record=True, allocation=allocation)
        logits = drive(model, cache, ids, real, [30, 5, *[1] * 15])
        runs.append((logits, cache.trace().deaths))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("policy", ["rkv", "h2o"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_copies_go_on_by_themselves(allocation: str, policy: str) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([50, 17])
    settings = {**SMALL, "policy": policy, "allocation": allocation}
    cache = SparseBudgetCache(**settings)
    drive(model, cache, ids, real, [40])
    twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    expected = drive(model, cache, ids, real, [1] * 10, start=40)
    for twin in twins:
        assert torch.equal(drive(model, twin, ids, real, [1] * 10, start=40), expected)


@pytest.mark.parametrize("policy", ["rkv", "h2o"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_rows_move_with_all_they_own(allocation: str, policy: str) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([50, 17, 31])
    settings = {**SMALL, "policy": policy, "allocation": allocation}
    cache = SparseBudgetCache(**settings)
    drive(model, cache, ids, real, [40])
    whole = copy.deepcopy(cache)
    expected = drive(model, whole, ids, real, [3, *[1] * 7], start=40)
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    moved = drive(model, cache, ids[rows], real[rows], [3, *[1] * 7], start=40)
    assert (moved - expected[rows]).abs().max() < TOLERANCE * 10
    for row, old in enumerate(rows.tolist()):
        assert held_alike(cache, row, whole, old)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_repeat_select_offload_and_reset(allocation: str) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([50, 17])
    cache = SparseBudgetCache(**SMALL, allocation=allocation)
    drive(model, cache, ids, real, [40])
    expected = drive(model, copy.deepcopy(cache), ids, real, [1] * 10, start=40)
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].batch_size == 4
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    for index in range(3):
        cache.offload(index)
        cache.prefetch(index)
    assert torch.equal(drive(model, cache, ids, real, [1] * 10, start=40), expected)
    cache.reset()
    assert cache.stats().bytes_held == 0
    fresh = SparseBudgetCache(**SMALL, allocation=allocation)
    ids, real = left_padded([33, 30, 8], seed=4)
    assert torch.equal(drive(model, cache, ids, real), drive(model, fresh, ids, real))
    assert cache.stats() == fresh.stats()


@pytest.mark.skipif(
    missing_for_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is not None,
    reason="Triton cannot run here",
)
@pytest.mark.parametrize(
    ("allocation", "policy"),
    [("pyramid", "rkv"), ("pyramid", "keydiff"), ("adaptive", "h2o")],
)
def test_kernels_and_torch_hold_the_same(allocation: str, policy: str) -> None:
    model = small_llama(layers=2)
    ids, real = left_padded([40, 17])
    caches, logits = [], []
    for backend in ("torch", "triton"):
        settings = {**SMALL, "policy": policy, "allocation": allocation, "backend": backend}
        caches.append(SparseBudgetCache(**settings, record=True))
        logits.append(drive(model, caches[-1], ids, real, [30, 2, *[1] * 8]))
    assert (logits[0] - logits[1])[real.bool()].abs().max() < TOLERANCE * 10
    for first, second in zip(*(cache.trace().deaths for cache in caches), strict=True):
        assert torch.equal(first, second)


def test_crop_before_the_first_eviction() -> None:
    model = small_llama()
    ids = tokens(1, 40)
    for allocation in ALLOCATIONS:
        cache = SparseBudgetCache(**LARGE, policy="keydiff", allocation=allocation)
        drive(model, cache, ids, chunks=[30, *[1] * 10])
        cache.crop(-7)
        again = drive(model, cache, ids, chunks=[2, *[1] * 5], start=33)
        dense = drive(model, DynamicCache(), ids)
        assert (again - dense[:, 33:]).abs().max() < TOLERANCE * 10


def test_other_layers_keep_what_they_are() -> None:
    """Only the full-attention layers count, for pyramids too."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 3,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Gemma3ForCausalLM(config).eval()
    prompt = tokens(2, 60)
    for allocation in ALLOCATIONS:
        cache = SparseBudgetCache(**SMALL, allocation=allocation)
        decode(model, cache, prompt)
        lengths = [max(layer.lengths) for layer in cache.layers if hasattr(layer, "lengths")]
        assert len(lengths) == 3
        if allocation == "pyramid":
            budgets = [cache.layers[i].settings.budget for i in (1, 3, 5)]
            assert budgets == [33, 20, 7]
        roomy = decode(model, SparseBudgetCache(5000, allocation=allocation), prompt)
        dense = decode(model, DynamicCache(config=config), prompt)
        assert largest_difference(roomy, dense) < 1e-3


def test_config_given_and_learnt_give_the_same_budgets() -> None:
    model = small_llama(layers=4)
    given = SparseBudgetCache(**SMALL, allocation="pyramid", config=model.config)
    learnt = SparseBudgetCache(**SMALL, allocation="pyramid")
    assert not learnt.layers
    drive(model, learnt, tokens(1, 30))
    budgets = [[layer.settings.budget for layer in cache.layers] for cache in (given, learnt)]
    assert budgets[0] == budgets[1] == [33, 24, 16, 7]
    learnt.reset()
    drive(small_llama(layers=2), learnt, tokens(1, 30))
    assert [layer.settings.budget for layer in learnt.layers] == [33, 7]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_a_later_mask_may_not_hide_tokens(allocation: str) -> None:
    model = small_llama()
    ids, real = left_padded([40, 30])
    cache = SparseBudgetCache(**SMALL, allocation=allocation)
    drive(model, cache, ids, real, [35])
    real[0, 30:35] = 0
    with pytest.raises(UnsupportedModelError, match="hides tokens .* not '" + allocation):
        drive(model, cache, ids, real, [5], start=35)


def test_an_assistant_is_refused() -> None:
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, allocation="adaptive", policy="keydiff")
    with pytest.raises(UnsupportedModelError, match="without an assistant"):
        decode(model, cache, tokens(1, 40), assistant_model=small_llama(seed=1))


def test_an_assistant_of_a_pyramid() -> None:
    """Tokens are taken back layer by layer, so budgets of their own are no matter."""
    model = small_llama(layers=3)
    prompt = tokens(1, 40)
    settings = {**SMALL, "policy": "keydiff", "allocation": "pyramid", "record": True}
    plain = decode(model, SparseBudgetCache(**settings), prompt)
    assisted = decode(
        model, SparseBudgetCache(**settings), prompt, assistant_model=small_llama(layers=3)
    )
    assert assisted.sequences.shape == plain.sequences.shape
    assert torch.isfinite(torch.stack(assisted.logits)).all()


def test_attention_weights_are_refused() -> None:
    model = small_llama(attention="eager")
    cache = SparseBudgetCache(**SMALL, allocation="adaptive")
    with pytest.raises(UnsupportedModelError, match="no attention weights to give"):
        decode(model, cache, tokens(1, 40), output_attentions=True)
    cache.reset()
    model = copy.deepcopy(model)
    model.config.output_attentions = True
    with pytest.raises(UnsupportedModelError, match="no attention weights to give"):
        drive(model, cache, tokens(1, 40))


def test_dropout_is_refused() -> None:
    model = copy.deepcopy(small_llama()).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    cache = SparseBudgetCache(**SMALL, allocation="adaptive")
    with pytest.raises(UnsupportedModelError, match=r"dropout=0\.1"):
        model(tokens(1, 30), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("model_type", "allocation", "message"),
    [
        ("deepseek_v3", "adaptive", "changes keys or values"),
        ("diffllama", "adaptive", "changes keys or values"),
        ("deepseek_v32", "adaptive", "indexer"),
        ("doge", "adaptive", "not plain softmax attention"),
        ("falcon", "adaptive", "AttentionInterface"),
        ("deepseek_v32", "pyramid", "indexer"),
        ("doge", "pyramid", "differ between attention heads"),
        ("falcon", "pyramid", "AttentionInterface"),
        ("falcon_h1", "adaptive", "both attention and a linear state"),
        ("gemma3n_text", "adaptive", "other layers of this model read the keys"),
        ("gemma3n_text", "pyramid", "other layers of this model read the keys"),
    ],
)
def test_models_that_cannot_be_served(model_type: str, allocation: str, message: str) -> None:
    model = build_tiny(model_type)[0]
    config = model.config if model_type == "falcon_h1" else None
    settings = {**SMALL, "allocation": allocation, "policy": "keydiff", "config": config}
    with pytest.raises(UnsupportedModelError, match=message):
        cache = SparseBudgetCache(**settings)
        decode(model, cache, tokens(1, 40), new_tokens=4)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_attention_of_an_unknown_kind_is_refused(allocation: str) -> None:
    """As that of flash and flex, whose masks are no tensors with a number for each key."""
    AttentionInterface.register("of_ones_own", sdpa_attention_forward)
    AttentionMaskInterface.register("of_ones_own", sdpa_mask)
    model = small_llama(attention="of_ones_own")
    decode(model, SparseBudgetCache(**SMALL), tokens(1, 40), new_tokens=4)
    cache = SparseBudgetCache(**SMALL, allocation=allocation)
    with pytest.raises(UnsupportedModelError, match="not 'of_ones_own'"):
        decode(model, cache, tokens(1, 40), new_tokens=4)


def test_a_model_that_does_not_say_how_many_layers_it_has() -> None:
    cache = SparseBudgetCache(**SMALL, allocation="pyramid")
    states = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedModelError, match="how many layers"):
        cache.update(states, states, 0)


def test_masks_that_cannot_be_adapted() -> None:
    sizes = {"slots": 4, "length": 2, "batch": 1, "dtype": torch.float32}
    sizes["device"] = torch.device("cpu")
    with pytest.raises(UnsupportedModelError, match="not made of numbers"):
        slot_mask(torch.ones(1, 6), None, **sizes)
    with pytest.raises(UnsupportedModelError, match="differ between attention heads"):
        slot_mask(torch.ones(1, 3, 2, 9, dtype=torch.bool), None, **sizes)


@pytest.mark.parametrize("form", [torch.bool, torch.float32, None])
@pytest.mark.parametrize("length", [1, 3])
def test_a_mask_for_other_sizes_is_adapted(length: int, form: torch.dtype | None) -> None:
    """Stored slots by row, then what the given mask says of the chunk."""
    visible = torch.ones(2, 4 + length, dtype=torch.bool)
    visible[1, 2:4] = False
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    given = None
    if form is not None:
        given = torch.cat([torch.zeros(length, 9, dtype=torch.bool), causal], dim=1)
        given = given.expand(2, 1, -1, -1)
        if form != torch.bool:
            lowest = torch.finfo(form).min
            given = torch.zeros(given.shape, dtype=form).masked_fill(~given, lowest)
    mask = slot_mask(
        given,
        visible,
        slots=4,
        length=length,
        batch=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    expected = torch.cat([visible[:, None, None, :4].expand(-1, 1, length, -1)], dim=-1)
    expected = torch.cat([expected, causal.expand(2, 1, -1, -1)], dim=-1)
    if form == torch.bool:
        assert torch.equal(mask, expected)
    else:
        assert mask.dtype == torch.float32
        assert torch.equal(mask == 0, expected)


def test_nothing_is_left_behind() -> None:
    """The padded copies of a chunk are let go of when it is done."""
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, allocation="adaptive", policy="h2o")
    drive(model, cache, tokens(1, 60), chunks=[30, 25, 5])
    gc.collect()
    for layer in cache.layers:
        assert layer._padded is None
        assert layer._chunk is None
        assert layer._handed_out is None
