"""Models spread over devices; on a machine with one device, what can be checked of it."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import cpu_offload, dispatch_model

from sparse_cache import SparseBudgetCache

from .driving import SMALL, drive, small_llama, tokens


@pytest.mark.parametrize("spread", ["hooks", "offload"])
def test_models_under_hooks_that_move_tensors(spread: str) -> None:
    """Hooks send every input to a module's device, which may make new tensor objects."""
    model, ids = small_llama(), tokens(1, 60)
    expected = drive(model, SparseBudgetCache(**SMALL), ids, None, [40, *[1] * 20])
    moved = copy.deepcopy(model)
    if spread == "hooks":
        moved = dispatch_model(moved, {"": "cpu"}, force_hooks=True)
    else:
        moved = cpu_offload(moved, execution_device=torch.device("cpu"))
    cache = SparseBudgetCache(**SMALL)
    assert torch.equal(drive(moved, cache, ids, None, [40, *[1] * 20]), expected)
    assert cache.stats().evictions == 2 * 5
