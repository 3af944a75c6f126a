"""`decode_attention` against float64, within the bounds that its docstring states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.attention_mass import attention_mass
from sparse_cache.kernels.decode_attention import decode_attention
from sparse_cache.kernels.decode_attention import triton as kernels
from sparse_cache.kernels.launch import counted_launches
from tests.kernels.decode_attention.inputs import DEVICE, DTYPES, Inputs, make, truth

# Rows that only pad a block divide by zero and the like in the interpreter; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def check(made: Inputs, implementation: str = "triton", splits: int | None = None) -> None:
    """Run and compare output, log-sum-exp and mass; nothing else of the mass may change."""
    arguments = made.arguments()
    if splits is None:
        output, log_sum_exp = decode_attention(**arguments, implementation=implementation)
    else:
        output, log_sum_exp = kernels.decode_attention(**arguments, splits=splits)
    expected = truth(made)
    # The bounds of kernels/decode_attention/api.py.
    step = torch.finfo(made.query.dtype).eps
    logit_error = 2**-22 * (16 + expected.largest_logit + (made.softcap or 0.0))
    output_bound = expected.largest_value * (2 * logit_error + 1.5 * step)
    assert output.dtype == made.query.dtype
    assert ((output.double().cpu() - expected.output).abs() <= output_bound).all()
    empty = expected.log_sum_exp == float("-inf")
    assert (log_sum_exp.cpu()[empty] == float("-inf")).all()
    found = log_sum_exp.double().cpu()[~empty]
    assert ((found - expected.log_sum_exp[~empty]).abs() <= logit_error).all()
    if made.mass is not None:
        before, after = made.mass.cpu(), arguments["mass"].cpu()
        held = ~before.isnan()
        assert after[~held].isnan().all()
        added = after.double()[held] - before.double()[held]
        bound = 2 * logit_error * expected.mass[held] + 2**-23 * after[held]
        assert ((added - expected.mass[held]).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_sizes_and_groups(dtype: torch.dtype, size: int, group: int) -> None:
    check(make(batch=1, dtype=dtype, size=size, group=group, capacity=130), splits=2)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_anything(implementation: str, data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 2))
    batch = data.draw(st.integers(1, 2))
    capacity = data.draw(st.integers(1, 140))
    lengths = st.integers(0, capacity)
    made = make(
        batch=batch,
        heads=heads,
        capacity=capacity,
        group=data.draw(st.integers(1, 5)),
        size=data.draw(st.integers(1, 70)),
        value_size=data.draw(st.integers(1, 70)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        lengths=[[data.draw(lengths) for _ in range(heads)] for _ in range(batch)],
        softcap=data.draw(st.sampled_from([None, 3.0, 50.0])),
        sinks=data.draw(st.booleans()),
        int8=data.draw(st.booleans()),
        pooled=data.draw(st.booleans()),
        mass=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    splits = data.draw(st.sampled_from([1, 2, 4])) if implementation == "triton" else None
    check(made, implementation, splits)


@pytest.mark.parametrize(
    ("splits", "features"),
    [
        (1, "sinks and softcap"),
        (1, "pooled int8"),
        (3, "sinks and softcap"),
        (3, "int8"),
        (3, "pooled"),
        (17, "pooled int8"),
    ],
)
def test_splits(splits: int, features: str) -> None:
    """With 17 splits most are empty; heads that hold nothing and a single token are among them."""
    made = make(
        batch=1,
        heads=4,
        group=2,
        capacity=200,
        lengths=[[200, 0, 1, 65]],
        size=32,
        value_size=48,
        dtype=torch.float16,
        softcap=4.0 if "softcap" in features else None,
        sinks="sinks" in features,
        int8="int8" in features,
        pooled="pooled" in features,
    )
    check(made, splits=splits)


def test_one_length_for_all_heads_of_a_row() -> None:
    made = make(lengths=[[50, 50], [130, 130]])
    for implementation in ("reference", "triton"):
        arguments = made.arguments() | {"lengths": made.lengths[:, 0]}
        short = decode_attention(**arguments, implementation=implementation)
        full_arguments = made.arguments()
        full = decode_attention(**full_arguments, implementation=implementation)
        assert torch.equal(short.output, full.output)
        assert torch.equal(short.log_sum_exp, full.log_sum_exp)
        assert arguments["mass"].nan_to_num(-1).equal(full_arguments["mass"].nan_to_num(-1))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(
    ("softcap", "sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)]
)
def test_mass_adds_up_over_calls(implementation: str, softcap: float | None, sinks: bool) -> None:
    """As `attention_mass`, which policies use without the kernel, sums it up."""
    made = make(lengths=[[70, 70], [70, 70]], capacity=70, softcap=softcap, sinks=sinks)
    mass = torch.zeros(2, 2, 70, device=DEVICE)
    expected = torch.zeros_like(mass)
    arguments = made.arguments() | {"mass": mass}
    for step in range(3):
        query = torch.randn(made.query.shape, generator=torch.Generator().manual_seed(step))
        arguments["query"] = query.to(DEVICE)
        decode_attention(**arguments, implementation=implementation)
        expected += attention_mass(
            arguments["query"],
            made.keys,
            None,
            scaling=made.scaling,
            softcap=softcap,
            sinks=made.sinks,
        )
    torch.testing.assert_close(mass, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_against_the_attention_of_torch(implementation: str) -> None:
    made = make(lengths=[[130, 130], [130, 130]], group=3)
    output, _ = decode_attention(**made.arguments(), implementation=implementation)
    expected = torch.nn.functional.scaled_dot_product_attention(
        made.query, made.keys, made.values, scale=made.scaling, enable_gqa=True
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_large_logits(dtype: torch.dtype, splits: int, softcap: float | None) -> None:
    """Logits of thousands, whose exponentials overflow."""
    made = make(batch=1, group=2, dtype=dtype, spread=100.0, softcap=softcap)
    assert truth(made).largest_logit > 10_000
    arguments = made.arguments()
    output, log_sum_exp = kernels.decode_attention(**arguments, splits=splits)
    assert output.isfinite().all()
    assert not arguments["mass"][~made.mass.isnan()].isnan().any()  # type: ignore[union-attr]
    assert (log_sum_exp > -1e6).all()
    check(made, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_offsets_beyond_32_bits(splits: int) -> None:
    """The second head lies 2^31 elements behind the first, in memory that is never touched."""
    made = make(batch=1, group=2, capacity=70, size=32, int8=True, lengths=[[70, 66]])
    arguments = made.arguments()
    distance = 2**31 + 64
    for name in ("keys", "values"):
        far = torch.empty(distance + 70 * 32, dtype=torch.int8, device=DEVICE)
        view = far.as_strided((1, 2, 70, 32), (2 * distance, distance, 32, 1))
        view.copy_(arguments[name])
        arguments[name] = view
    output, log_sum_exp = kernels.decode_attention(**arguments, splits=splits)
    near = made.arguments()
    expected, expected_log_sum_exp = kernels.decode_attention(**near, splits=splits)
    assert torch.equal(output, expected)
    assert torch.equal(log_sum_exp, expected_log_sum_exp)


def test_length_beyond_the_tensor_is_cut() -> None:
    """A wrong length must not become a read of foreign memory."""
    made = make(lengths=[[70, 70]], batch=1, capacity=70, size=16)
    right = kernels.decode_attention(**made.arguments(), splits=3)
    wrong = made.arguments() | {"lengths": made.lengths + 1000}
    for found, expected in zip(kernels.decode_attention(**wrong, splits=3), right, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("splits", "expected"), [(1, ["attend_split"]), (4, ["attend_split", "merge_splits"])]
)
def test_launches(splits: int, expected: list[str]) -> None:
    with counted_launches() as names:
        kernels.decode_attention(**make(size=16).arguments(), splits=splits)
    assert names == expected


def test_no_scratch_for_logits_without_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher allocates, in numbers."""
    allocated: list[int] = []
    real = torch.Tensor.new_empty

    def counting(self: torch.Tensor, *size: Any, **kw: Any) -> torch.Tensor:
        made = real(self, *size, **kw)
        allocated.append(made.numel())
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", counting)
    made = make(size=16)
    kernels.decode_attention(**made.arguments(), splits=1)
    with_mass = sum(allocated)
    allocated.clear()
    kernels.decode_attention(**(made.arguments() | {"mass": None}), splits=1)
    assert sum(allocated) == 2 * 8 * 16 + 2 * 8
    assert with_mass == sum(allocated) + 2 * 8 * 130


@pytest.mark.parametrize(
    ("pairs", "slots", "processors", "expected"),
    [
        (8, 640, 132, 10),  # no split without a tile of its own
        (8, 100_000, 132, 33),  # two programs for each processor
        (2, 1_000_000, 132, 64),  # the most
        (512, 640, 132, 1),
        (1, 1, 132, 1),
        (0, 0, 132, 1),
    ],
)
def test_number_of_splits(pairs: int, slots: int, processors: int, expected: int) -> None:
    assert kernels.number_of_splits(pairs, slots, 64, processors) == expected


def test_empty_batch() -> None:
    made = make(batch=2)
    arguments = {
        name: value[:0] if isinstance(value, torch.Tensor) else value
        for name, value in made.arguments().items()
    }
    for implementation in ("reference", "triton"):
        output, log_sum_exp = decode_attention(**arguments, implementation=implementation)
        assert output.shape == (0, 8, 1, 64)
        assert log_sum_exp.shape == (0, 8)
