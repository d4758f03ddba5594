"""Steps without graphs run the compiled pieces, under any grad mode and size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.asserts import backend_for, build, mark
from lib.cases import CASES
from torch import nn

import cgcompile
from cgcompile.runtime.program import mutated_inputs


class Steps(nn.Module):
    """Three pieces around two splitting ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.scaled_dot_product_attention(layer(x), x, x)
        return x


@pytest.mark.slow
def test_each_range_of_sizes_runs_its_own_artifact() -> None:
    backend = cgcompile.Backend(compiler="inductor", compile_sizes=[2, 3])
    model = Steps().eval()
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for size in (4, 2, 3, 2, 3, 4):
            x = torch.randn(size, 4, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
    (graph,) = backend.graphs
    assert sum(piece.compiled for piece in graph.split.pieces) == 3


@pytest.mark.slow
def test_a_step_that_switches_grad_mode_between_its_pieces() -> None:
    class Switching(Steps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            x = F.scaled_dot_product_attention(self.layers[0](x), x, x)
            torch.set_grad_enabled(False)
            x = F.scaled_dot_product_attention(self.layers[1](x), x, x)
            torch.set_grad_enabled(before)
            return self.layers[2](x)

    model = Switching().eval().requires_grad_(False)
    compiled = torch.compile(model, backend=cgcompile.Backend(compiler="inductor"))
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                x = torch.randn(2, 4, 8)
                torch.testing.assert_close(compiled(x), model(x))
                assert torch.is_grad_enabled() == grad


# ---------------------------------------------------------------- what a piece returns and writes


def product(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (a @ b,)


def two_views(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (a @ b).chunk(2, -1)


def nested(a: torch.Tensor, b: torch.Tensor) -> Any:
    with torch.no_grad():
        c = a @ b
    return c @ b, a @ c


def writes(a: torch.Tensor, b: torch.Tensor) -> Any:
    a.copy_(b)
    return (a @ b,)


def writes_by_an_op(a: torch.Tensor, b: torch.Tensor) -> Any:
    torch.ops.cgplain.fill(a)
    return (a @ b,)


def writes_only(a: torch.Tensor, b: torch.Tensor) -> Any:
    a.copy_(b)
    return ()


def an_input_and_a_view_of_it(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a @ b, a.t(), b


def fill(a: torch.Tensor) -> None:
    a.fill_(2.0)


@pytest.fixture
def op() -> Any:
    with torch.library._scoped_library("cgplain", "FRAGMENT") as library:
        library.define("fill(Tensor(a!) a) -> ()")
        library.impl("fill", fill, "CPU")
        torch.library.register_fake("cgplain::fill", lambda a: None, lib=library)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize(
    "function",
    [
        product,
        two_views,
        nested,
        writes,
        writes_by_an_op,
        writes_only,
        an_input_and_a_view_of_it,
    ],
)
def test_results_writes_and_aliases_are_those_of_eager(
    function: Callable[..., Any], inference: bool, op: None
) -> None:
    torch._dynamo.reset()
    backend = cgcompile.Backend(compiler="inductor")
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for size in (4, 4, 6):
        with torch.inference_mode() if inference else torch.no_grad():
            arguments = [torch.randn(size, size) for _ in range(2)]
            seen, wanted = ([each.clone() for each in arguments] for _ in range(2))
            results, expected = compiled(*seen), function(*wanted)
        assert len(results) == len(expected)
        for result, one in zip(results, expected, strict=True):
            torch.testing.assert_close(result, one)
            assert result.stride() == one.stride()
        assert all(map(torch.equal, seen, wanted))
        memory = [
            [
                [one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()]
                for one in (*values, *inputs)
                for other in inputs
            ]
            for values, inputs in ((results, seen), (expected, wanted))
        ]
        assert memory[0] == memory[1]
    assert backend.counters.calls == (3 if backend.graphs else 0)


def test_inputs_that_a_piece_writes() -> None:
    case = CASES["input_mutated_in_pieces"]
    backend = backend_for(case, "eager")
    inputs = case.inputs(6)
    mark(case, inputs)
    with torch.no_grad():
        torch.compile(build(case), backend=backend)(*inputs)
    (graph,) = backend.graphs
    written = [mutated_inputs(piece) for piece in graph.split.pieces]  # through views as well
    (cache,) = (each.name for each in graph.split.inputs if each.mutated)
    assert "cache" in cache
    assert written == [[cache], [], [cache]]
