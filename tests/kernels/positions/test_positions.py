"""`append_positions` writes new entries and touches no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.kernels.positions import append_positions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_new_entries_only(implementation: str, data: st.DataObject) -> None:
    layers, rows, heads = (data.draw(st.integers(1, 3)) for _ in range(3))
    shape = (layers, rows, heads)
    capacities = [data.draw(st.integers(1, 700)) for _ in range(layers)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    most = torch.tensor(capacities).view(-1, 1, 1).expand(shape)
    lengths = (torch.rand(shape, generator=generator) * (most + 1)).int()
    placed = (torch.rand(shape, generator=generator) * (lengths + 1)).int()
    seen = lengths + torch.randint(0, 10**6, shape, generator=generator).int()
    with_order = data.draw(st.booleans())
    tensors = [
        [torch.full((rows, heads, c), -7, dtype=torch.int32) for c in capacities] for _ in range(2)
    ]
    given_tensors = [[each.to(DEVICE) for each in kind] for kind in tensors]
    append_positions(
        given_tensors[0],
        given_tensors[1] if with_order else None,
        *(each.to(DEVICE) for each in (lengths, placed, seen)),
        implementation=implementation,
    )
    for layer, row, head in torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, 3):
        length, old, count = (int(t[layer, row, head]) for t in (lengths, placed, seen))
        for index in range(capacities[layer]):
            new = old <= index < length
            position = int(given_tensors[0][layer][row, head, index])
            slot = int(given_tensors[1][layer][row, head, index])
            assert position == (count - length + index if new else -7)
            assert slot == (index if new and with_order else -7)


def test_bad_input() -> None:
    positions = [torch.zeros(2, 3, 8, dtype=torch.int32)]
    counts = [torch.zeros(1, 2, 3, dtype=torch.int32)] * 3
    with pytest.raises(TypeError, match=r"positions\[0\]"):
        append_positions([positions[0].long()], None, *counts)
    with pytest.raises(ValueError, match="lengths"):
        append_positions(positions, None, counts[0][:, :1], *counts[1:])
    with pytest.raises(ValueError, match=r"positions\[0\] must be contiguous"):
        append_positions([positions[0].transpose(1, 2)], None, *counts)
