"""`decode_attention` as an operation that torch knows: compiled graphs and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from sparse_cache.kernels.decode_attention import decode_attention
from tests.kernels.decode_attention.inputs import DEVICE, make


@pytest.mark.parametrize(
    ("features", "implementation"),
    [("plain", "triton"), ("mass", "reference"), ("everything", "triton")],
)
def test_operation_is_registered_right(features: str, implementation: str) -> None:
    everything = features == "everything"
    made = make(
        size=16,
        mass=features != "plain",
        softcap=3.0 if everything else None,
        sinks=everything,
        int8=everything,
        pooled=everything,
    )
    torch.library.opcheck(
        torch.ops.sparse_budget_cache.decode_attention.default,
        (*made.arguments().values(), implementation),
        # The slots that hold nothing are NaN, which is not equal to itself.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    if made.mass is not None:
        made.mass.nan_to_num_()
    torch.library.opcheck(
        torch.ops.sparse_budget_cache.decode_attention.default,
        (*made.arguments().values(), implementation),
    )


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_whole_graph(implementation: str) -> None:
    """The mass changes in place in the compiled graph too, and lengths do not recompile it."""
    made = make(size=16, sinks=True)
    arguments = made.arguments()
    mass = arguments.pop("mass")

    def step(lengths: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        called = arguments | {"lengths": lengths}
        output, log_sum_exp = decode_attention(**called, mass=mass, implementation=implementation)
        return output.mean(-1)[..., 0] + log_sum_exp

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for shorter in (0, 1):
        lengths = (made.lengths - shorter).clamp(min=0)
        eager_mass, compiled_mass = mass.clone(), mass.clone()
        expected = step(lengths, eager_mass)
        torch.testing.assert_close(compiled(lengths, compiled_mass), expected)
        torch.testing.assert_close(compiled_mass, eager_mass, equal_nan=True)
        assert not torch.equal(eager_mass.nan_to_num(), mass.nan_to_num())
    assert len(graphs) == 1


def test_no_gradient_is_refused_not_dropped() -> None:
    made = make(size=16, mass=False)
    arguments = made.arguments()
    arguments["query"] = arguments["query"].detach().requires_grad_()
    output, _ = decode_attention(**arguments, implementation="reference")
    with pytest.raises(RuntimeError, match="no autograd formula"):
        output.sum().backward()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_cuda_graph_follows_the_lengths() -> None:
    made = make()
    arguments = made.arguments() | {"mass": torch.zeros(2, 2, 130, device=DEVICE)}
    decode_attention(**arguments, implementation="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, log_sum_exp = decode_attention(**arguments, implementation="triton")
    for length in (130, 1, 0, 77):
        made.lengths.fill_(length)
        made.keys.nan_to_num_()
        made.values.nan_to_num_()
        graph.replay()
        expected = decode_attention(**(arguments | {"mass": None}), implementation="reference")
        torch.testing.assert_close(output, expected.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(log_sum_exp, expected.log_sum_exp, rtol=1e-5, atol=1e-5)
