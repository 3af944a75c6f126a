"""The eviction as operations that torch knows: registered right, and one graph when compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_cache.kernels.eviction import compact, fill_holes, plan_compaction, plan_hole_filling
from tests.kernels.eviction.checks import check_fill, same_bits
from tests.kernels.eviction.inputs import IMPLEMENTATIONS, Layers, make_layers, per_head

SHAPE = (2, 1, 1)
OPERATIONS = torch.ops.sparse_budget_cache


def make(shape: tuple[int, int, int] = SHAPE) -> Layers:
    """Layers without NaN, which is not equal to itself."""
    layers = make_layers(torch.full(shape, 9), 9)
    layers.keys = [each.nan_to_num() for each in layers.keys]
    return layers


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operations_are_registered_right(implementation: str) -> None:
    layers, keep = make((1, 1, 1)), per_head(5, (1, 1, 1))
    planned = (layers.scores, layers.positions, layers.order, layers.lengths, keep, 1, 0)
    torch.library.opcheck(
        OPERATIONS.plan_hole_filling.default, (*planned, 4, 5, True, implementation)
    )
    torch.library.opcheck(
        OPERATIONS.plan_compaction.default,
        (layers.scores, layers.positions, layers.lengths, keep, 1, 0, 5, implementation),
    )
    plan = OPERATIONS.plan_hole_filling(*planned, 4, 5, True, implementation)
    assert int(plan[2].sum()) > 0
    torch.library.opcheck(OPERATIONS.fill_holes.default, (layers.keys, *plan[:3], implementation))
    torch.library.opcheck(OPERATIONS.compact.default, (layers.keys, plan[3], keep, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_whole_graph(implementation: str) -> None:
    """Plans and moves compile into one graph, and change what they are given in place."""
    options: dict[str, Any] = {"window": 1, "sinks": 0, "most_kept": 5}
    options["implementation"] = implementation

    def evict(layers: list[torch.Tensor], keys: list[torch.Tensor], fill: bool) -> Any:
        scores, lengths, keep, *rest = layers
        positions, order = rest[:2], rest[2:]
        if fill:
            plan = plan_hole_filling(
                scores, positions, order, lengths, keep, most_evicted=4, record=True, **options
            )
            fill_holes(keys, plan, implementation=implementation)
            return plan
        kept = plan_compaction(scores, positions, lengths, keep, **options)
        compact(keys, kept, keep, implementation=implementation)
        return kept

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(evict, fullgraph=True, backend=backend)
    keep = per_head(5, SHAPE)
    before = make()
    filled, moved, moved_eagerly = before.clone(), before.clone(), before.clone()
    given = [filled.scores, filled.lengths, keep, *filled.positions, *filled.order]
    plan = compiled(given, filled.keys, True)
    check_fill(before, filled, plan, keep, window=1, sinks=0)
    for layers, function in ((moved, compiled), (moved_eagerly, evict)):
        given = [layers.scores, layers.lengths, keep, *layers.positions, *layers.order]
        function(given, layers.keys, False)
    assert all(map(same_bits, moved.keys, moved_eagerly.keys))
    assert not all(map(same_bits, moved.keys, before.keys))
    assert len(graphs) == 2
