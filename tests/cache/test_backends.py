"""The kernels through `generate`: the same kept tokens and outputs as the torch path.

Without a GPU the kernels run in Triton's interpreter, which is slow: small models, short texts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from sparse_cache import SparseBudgetCache
from sparse_cache.kernels.launch import counted_launches

from .driving import decode, drive, largest_difference, left_padded, small_llama, tokens
from .test_static import compiled, same

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {"budget": 10, "interval": 4, "window": 3, "sinks": 2}


def both(settings: dict[str, Any], lengths: list[int], new: int = 10, **more: Any) -> None:
    """Generate by torch and by the kernels and compare."""
    model = small_llama().to(DEVICE)
    ids, real = (tensor.to(DEVICE) for tensor in left_padded(lengths))
    static = settings.pop("static", False)
    caches = [
        SparseBudgetCache(**TINY, **settings, record=True, backend="torch"),
        SparseBudgetCache(**TINY, **settings, record=True, backend="triton", static=static),
    ]
    expected = decode(model, caches[0], ids, new, attention_mask=real)
    with counted_launches() as launches:
        answer = decode(model, caches[1], ids, new, attention_mask=real, **more)
    assert torch.equal(expected.sequences, answer.sequences)
    assert largest_difference(expected, answer) < 1e-4
    assert caches[0].stats().evictions >= 6
    assert same(*caches)
    assert "attend_split" in launches
    assert any("kernel" in name and "plan" in name for name in launches)


@pytest.mark.parametrize("policy", ["rkv", "snapkv", "tova", "h2o", "streaming", "keydiff"])
def test_policies(policy: str) -> None:
    both({"policy": policy}, [16, 5])


def test_a_share_of_the_tokens_as_budget() -> None:
    """An eviction that keeps all, since the share has grown to that, is an eviction too."""
    model = small_llama(layers=1).to(DEVICE)
    ids = tokens(1, 40, seed=2).to(DEVICE)
    settings = TINY | {"budget": 0.6, "interval": 2, "policy": "streaming", "record": True}
    caches = [SparseBudgetCache(**settings, backend=backend) for backend in ("torch", "triton")]
    first, second = (drive(model, cache, ids, None, [12, *[1] * 28]) for cache in caches)
    assert (first - second).abs().max().item() < 1e-4
    assert same(*caches)


def test_int8() -> None:
    both({"policy": "h2o", "quantization": "int8"}, [16, 5])


def test_compiled() -> None:
    torch.compiler.reset()
    more = {} if DEVICE.type == "cuda" else {"compile_config": compiled()}
    with torch._dynamo.config.patch(error_on_recompile=True):
        both({"policy": "rkv", "static": True}, [12, 5], 12, **more)


def test_verbs_between_evictions() -> None:
    """Beams, chunks and crops after hole filling, which leaves slots out of order."""
    model = small_llama(layers=1).to(DEVICE)
    answers = []
    for backend in ("torch", "triton"):
        cache = SparseBudgetCache(**TINY, policy="h2o", record=True, backend=backend)
        prompt = tokens(2, 12).to(DEVICE)
        first = decode(model, cache, prompt, 8).sequences
        cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        more = torch.cat([first, tokens(2, 5, seed=3).to(DEVICE)], dim=1)
        answers.append((first, decode(model, cache, more, 8).sequences, cache.trace().deaths))
    by_torch, by_kernels = answers
    assert torch.equal(by_torch[0], by_kernels[0])
    assert torch.equal(by_torch[1], by_kernels[1])
    assert all(torch.equal(a, b) for a, b in zip(by_torch[2], by_kernels[2], strict=True))


# Operators of torch that allocate or look and start no work on a device.
_LOOKS = """alias as_strided detach empty empty_like empty_strided expand flatten lift_fresh
new_empty permute reshape resize_ select slice squeeze t transpose unflatten unsqueeze view detach_
_reshape_alias _unsafe_view is_nonzero item resolve_conj resolve_neg _local_scalar_dense to"""
_FREE = {f"aten::{name}" for name in _LOOKS.split()}


def _inside(event: Any, kernels: list[str]) -> bool:
    """Whether an event is part of a kernel or of another operator of torch."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in kernels or parent.name.startswith("aten::"):
            return True
        parent = parent.cpu_parent
    return False


def test_launches_of_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 12 for 32 layers, everything counted, whatever the number of layers."""
    # Counts are looked at on the CPU only, where that waits for nobody.
    for check in ("check_plan_values", "check_plan_fits"):
        monkeypatch.setattr(f"sparse_cache.kernels.eviction.api.{check}", lambda *a, **k: None)
    counts = {}
    for layers in (2, 32):
        model = small_llama(layers=layers, kv_heads=1, group=1).to(DEVICE)
        cache = SparseBudgetCache(**TINY, policy="rkv", backend="triton")
        ids = tokens(1, 18).to(DEVICE)
        # The second eviction is like all later ones.
        for start, chunks in ((0, [9, 1, 1, 1, 1, 1]), (14, [1, 1, 1, 1])):
            drive(model, cache, ids, None, chunks, start=start)
            assert any(layer.is_due_with_others for layer in cache.layers)
            with (
                profile(activities=[ProfilerActivity.CPU]) as profiled,
                counted_launches() as launches,
            ):
                cache.evict()
        operators = [event for event in profiled.events() if event.name.startswith("aten::")]
        work = [event.name for event in operators if not _inside(event, launches)]
        work = [name for name in work if name not in _FREE]
        counts[layers] = (len(launches), work)
    assert counts[2][0] == counts[32][0]
    assert len(counts[2][1]) == len(counts[32][1]), counts
    assert counts[32][0] + len(counts[32][1]) <= 12, counts


def test_keys_that_hold_nan() -> None:
    model = small_llama(layers=1).to(DEVICE)
    cache = SparseBudgetCache(**TINY, policy="rkv", backend="triton")
    decode(model, cache, tokens(1, 9).to(DEVICE), 3)
    cache.layers[0].held.storage["keys"][0, 0, 5, 2] = torch.nan
    with pytest.raises(ValueError, match="keys of layer 0 hold NaN"):
        decode(model, cache, torch.cat([tokens(1, 9), tokens(1, 8)], dim=1).to(DEVICE), 8)


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        SparseBudgetCache(backend="cuda")
    if DEVICE.type == "cuda":
        return
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"backend='triton' cannot run: tensors on 'cpu'"):
        SparseBudgetCache(backend="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        SparseBudgetCache(backend="triton")
    # "auto" goes on without.
    cache = SparseBudgetCache(**TINY)
    decode(small_llama(), cache, tokens(1, 20), 8)
    assert cache.stats().evictions > 0
