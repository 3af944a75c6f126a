"""Bad input is refused in one sentence that names the tensor, before any kernel is launched."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from sparse_cache.kernels.eviction import compact, fill_holes, plan_compaction, plan_hole_filling
from sparse_cache.kernels.launch import counted_launches
from tests.kernels.eviction.inputs import DEVICE, IMPLEMENTATIONS, make_layers, per_head

SHAPE = (2, 1, 2)


def arguments(**changed: Any) -> dict[str, Any]:
    """Those of a plan that would work, with some of them changed."""
    layers = make_layers(torch.full(SHAPE, 12), 12)
    return {
        "scores": layers.scores,
        "positions": layers.positions,
        "order": layers.order,
        "lengths": layers.lengths,
        "keep": per_head(7, SHAPE),
        "window": 2,
        "sinks": 1,
        "most_evicted": 5,
    } | changed


def zeros(*shape: int, dtype: torch.dtype = torch.int32, device: str = DEVICE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


PLAN = [
    (
        {"scores": zeros(2, 1, 2, 12, dtype=torch.float16)},
        TypeError,
        "scores must be torch.float32",
    ),
    ({"scores": [1.0]}, TypeError, "scores must be a tensor"),
    ({"scores": zeros(1, 2, 12, dtype=torch.float32)}, ValueError, "scores must have shape"),
    (
        {"scores": zeros(2, 1, 2, 24, dtype=torch.float32)[..., ::2]},
        ValueError,
        "scores must be contiguous along its last dimension, got stride 2",
    ),
    ({"positions": [zeros(1, 2, 12)]}, ValueError, "positions must hold one tensor for each"),
    ({"positions": [zeros(1, 2, 12)] * 3}, ValueError, "positions must hold one tensor for each"),
    (
        {"positions": [zeros(1, 2, 12), zeros(1, 2, 12, dtype=torch.int64)]},
        TypeError,
        r"positions\[1\] must be torch.int32, got torch.int64",
    ),
    ({"order": [zeros(1, 2, 12), zeros(1, 2, 11)]}, ValueError, r"order\[1\] must have shape"),
    ({"order": [zeros(1, 2, 12), zeros(2, 2, 12)]}, ValueError, r"order\[1\] must have shape"),
    (
        {"order": [zeros(1, 2, 12), zeros(1, 12, 2).mT]},
        ValueError,
        r"order\[1\] must be contiguous along its last dimension",
    ),
    (
        {"order": [zeros(1, 2, 12), zeros(1, 2, 12, device="meta")]},
        ValueError,
        r"order\[1\] must be on .* got meta",
    ),
    ({"lengths": zeros(2, 1, 2, dtype=torch.int64)}, TypeError, "lengths must be torch.int32"),
    ({"lengths": zeros(2, 1, 1)}, ValueError, r"lengths must have shape \[2, 1, 2\]"),
    ({"keep": zeros(2, 2)}, ValueError, "keep must have shape"),
    ({"window": -1}, ValueError, "window must not be negative"),
    ({"sinks": -1}, ValueError, "sinks must not be negative"),
    ({"most_evicted": -1}, ValueError, "most_evicted must not be negative"),
    ({"record": True}, ValueError, "most_kept must be given with record=True"),
    ({"implementation": "cuda"}, ValueError, "implementation='cuda' is unknown"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("changed", "error", "message"), PLAN)
def test_plans(
    changed: dict[str, Any], error: type[Exception], message: str, implementation: str
) -> None:
    given = arguments(**{"implementation": implementation} | changed)
    with counted_launches() as names, pytest.raises(error, match=message):
        plan_hole_filling(**given)
    if not {"order", "most_evicted", "record"} & changed.keys():
        given.pop("order")
        given.pop("most_evicted")
        with counted_launches() as names, pytest.raises(error, match=message):
            plan_compaction(**given, most_kept=7)
    assert names == []


@pytest.mark.skipif(DEVICE != "cpu", reason="reading the numbers would wait for the device")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": per_head(13, SHAPE)}, r"lengths must lie in 0 .. 12"),
        ({"lengths": per_head(-1, SHAPE)}, r"lengths must lie in 0 .. 12"),
        ({"keep": per_head(2, SHAPE)}, r"keep must be at least window \+ sinks = 3"),
        ({"most_evicted": 4}, "most_evicted=4 is too small: a head evicts 5 tokens"),
        ({"record": True, "most_kept": 6}, "most_kept=6 is too small: a head keeps 7 tokens"),
    ],
)
def test_numbers_that_cannot_be(changed: dict[str, Any], message: str, implementation: str) -> None:
    with counted_launches() as names, pytest.raises(ValueError, match=message):
        plan_hole_filling(**arguments(implementation=implementation, **changed))
    assert names == []


def test_more_tokens_than_a_program_holds() -> None:
    given = arguments(
        scores=zeros(1, 1, 1, 16385, dtype=torch.float32),
        positions=[torch.arange(16385, dtype=torch.int32, device=DEVICE).view(1, 1, -1)],
        order=[torch.arange(16385, dtype=torch.int32, device=DEVICE).view(1, 1, -1)],
        lengths=per_head(16385, (1, 1, 1)),
        keep=per_head(16384, (1, 1, 1)),
    )
    with pytest.raises(ValueError, match="scores must hold at most 16384 tokens a head"):
        plan_hole_filling(**given, implementation="triton")
    # What may choose takes the reference.
    assert int(plan_hole_filling(**given, implementation="auto").moves) == 1


ROWS = [
    ([zeros(1, 2, 12, 4)], "tensors must hold one tensor for each of the plan's 2 layers"),
    ([zeros(1, 2, 12, 4), zeros(1, 3, 12, 4)], r"tensors\[1\] must have shape \[1, 2, C, D\]"),
    ([zeros(1, 2, 12, 4), zeros(1, 2)], r"tensors\[1\] must have shape \[1, 2, C, D\]"),
    ([zeros(1, 2, 12, 4), zeros(1, 2, 12, 5)], r"tensors\[1\] must have rows of shape \[4\]"),
    ([zeros(1, 2, 12, 4), zeros(1, 2, 12)], r"tensors\[1\] must have rows of shape \[4\]"),
    (
        [zeros(1, 2, 12, 4), zeros(1, 2, 12, 4, dtype=torch.int8)],
        r"tensors\[1\] must be torch.int32 on .* got torch.int8",
    ),
    (
        [zeros(1, 2, 12, 4), zeros(1, 2, 4, 12).mT],
        r"tensors\[1\] must be contiguous along its last dimension",
    ),
    (
        [zeros(1, 2, 12, 4), zeros(1, 1, 12, 4).expand(1, 2, 12, 4)],
        r"tensors\[1\] must not be expanded",
    ),
    ([zeros(1, 2, 12, 4, device="meta")] * 2, "must be on meta like the rest"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("tensors", "message"), ROWS)
def test_rows(tensors: list[torch.Tensor], message: str, implementation: str) -> None:
    plan = plan_hole_filling(**arguments(), most_kept=7, record=True)
    assert plan.kept is not None
    with counted_launches() as names:
        with pytest.raises(ValueError, match=message):
            fill_holes(tensors, plan, implementation=implementation)
        with pytest.raises(ValueError, match=message):
            compact(tensors, plan.kept, per_head(7, SHAPE), implementation=implementation)
    assert names == []


def test_plans_that_are_none() -> None:
    plan = plan_hole_filling(**arguments(), most_kept=7, record=True)
    tensors = [zeros(1, 2, 12, 4)] * 2
    assert plan.kept is not None
    with pytest.raises(TypeError, match=r"targets must be torch.int16 or torch.int32, got"):
        fill_holes(tensors, plan._replace(targets=plan.targets.long()))
    with pytest.raises(ValueError, match=r"moves must have shape \[2, 1, 2\]"):
        fill_holes(tensors, plan._replace(moves=plan.moves[:1]))
    with pytest.raises(TypeError, match="kept must be a tensor"):
        compact(tensors, None, per_head(7, SHAPE))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kept must be torch.int32"):
        compact(tensors, plan.kept.long(), per_head(7, SHAPE))


def test_importing_needs_no_triton() -> None:
    """The public face works, and says what is missing, where Triton cannot be imported."""
    program = """
import importlib.util, sys
sys.modules["triton"] = None
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
from sparse_cache.kernels.eviction import plan_compaction
given = dict(
    scores=torch.zeros(1, 1, 1, 5),
    positions=[torch.arange(5, dtype=torch.int32).view(1, 1, 5)],
    lengths=torch.full((1, 1, 1), 5, dtype=torch.int32),
    keep=torch.full((1, 1, 1), 3, dtype=torch.int32),
    window=1, sinks=1, most_kept=3,
)
assert plan_compaction(**given).tolist() == [[[[0, 3, 4]]]]
try:
    plan_compaction(**given, implementation="triton")
except RuntimeError as error:
    assert "the package triton is not installed" in str(error)
else:
    sys.exit("not refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
