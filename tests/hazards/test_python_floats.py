"""With ``dynamic=True`` Python floats are symbolic; they become guarded constants of one trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cgcompile

D = 8
CAPTURES = {"cpu": "host", "cuda": "auto"}


class Floats(nn.Module):
    """Floats of a module: one that is passed on, one that is calculated with, one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)  # its norm_type is 2.0
        self.scale, self.shift = 0.3, 7.0

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.scale > 0.4:
            x = x.sin()
        y = F.scaled_dot_product_attention(x, x, x, scale=self.scale * 3 + 1)
        return y * self.scale**2 + self.shift / 7


class Sized(Floats):
    """A size that follows from a float."""

    def forward(self, tokens):
        return super().forward(tokens)[:, : int(self.shift / 2)]


def counting(backend: Any) -> tuple[Callable[..., Any], list[fx.GraphModule]]:
    """A backend, and the list of the graphs that it was called with, once for each trace."""
    traced: list[fx.GraphModule] = []

    def compiles(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        traced.append(gm)
        return backend(gm, inputs)

    return compiles, traced


def check(model: nn.Module, compiled: Any, device: str) -> None:
    """Compare calls of three sizes with eager, each warmed up, captured and replayed."""
    before = None
    for rows in (4, 6, 9):
        for _ in range(3):
            tokens = torch.randint(32, (2, rows), device=device)
            expected = model(tokens)
            torch.testing.assert_close(compiled(tokens), expected)
            assert before is None or before.shape != expected.shape or not before.equal(expected)
            before = expected


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_floats_take_one_trace(device: str, compiler: str) -> None:
    model = Floats().to(device).eval()
    backend = cgcompile.Backend(compiler=compiler, capture_device=CAPTURES[device])
    compiles, traced = counting(backend)
    compiled = torch.compile(model, backend=compiles, dynamic=True)
    with torch.inference_mode():
        check(model, compiled, device)
        assert len(traced) == 1
        assert not any(node.target == "item" for node in traced[0].graph.nodes)
        values = [value.meta for value in backend.graphs[0].split.inputs]
        assert all(value.dtype != torch.float64 for value in values if torch.is_tensor(value))
        assert (backend.counters.captures, backend.counters.replays) == (3, 3)


@pytest.mark.slow
def test_a_model_after_another_takes_one_trace(device: str) -> None:
    """Dynamo has made the first of its floats a constant already, for the model before."""

    def one(x: torch.Tensor, number: float) -> torch.Tensor:
        return x * (number * 3)

    def two(x: torch.Tensor, number: float, other: float) -> torch.Tensor:
        return x * (number * 3) + (other + number)

    torch._dynamo.reset()
    x = torch.randn(4, D, device=device)
    with torch.inference_mode():
        for function, numbers in ((one, (0.5,)), (two, (0.3, 0.7))):
            compiles, traced = counting(cgcompile.Backend(compiler="eager"))
            compiled = torch.compile(function, backend=compiles, dynamic=True)
            for more in (0.0, 1.0):
                changed = [number + more for number in numbers]
                torch.testing.assert_close(compiled(x, *changed), function(x, *changed))
            assert len(traced) == 2


def test_a_float_that_is_returned(device: str) -> None:
    def function(x: torch.Tensor, number: float) -> Any:
        return x * number, number * 3, [number]

    compiles, traced = counting(cgcompile.Backend(compiler="eager"))
    compiled = torch.compile(function, backend=compiles, dynamic=True)
    with torch.inference_mode():
        for number in (0.5, 0.25):
            for rows in (4, 6):
                x = torch.randn(rows, D, device=device)
                result = compiled(x, number)
                torch.testing.assert_close(result[0], x * number)
                assert result[1:] == (number * 3, [number])
                assert [type(result[1]), type(result[2][0])] == [float, float]
    assert len(traced) == 2


@pytest.mark.slow
def test_another_float_is_another_trace(device: str) -> None:
    model = Floats().to(device).eval()
    compiles, traced = counting(cgcompile.Backend(compiler="eager"))
    compiled = torch.compile(model, backend=compiles, dynamic=True)
    with torch.inference_mode():
        for scale, traces in ((0.3, 1), (0.5, 2), (0.3, 2), (0.05, 3)):
            model.scale = scale
            check(model, compiled, device)
            assert len(traced) == traces


@pytest.mark.slow
def test_a_size_that_follows_from_a_float(device: str) -> None:
    """The trace is restarted, with the floats as constants."""
    model = Sized().to(device).eval()
    compiles, traced = counting(cgcompile.Backend(compiler="eager"))
    compiled = torch.compile(model, backend=compiles, dynamic=True)
    with torch.inference_mode():
        for shift in (7.0, 9.0):
            model.shift = shift
            check(model, compiled, device)
    assert 2 <= len(traced) <= 4


@pytest.mark.slow
def test_a_copy_of_the_graph_is_traced_again(device: str) -> None:
    """Dynamo calls the copy with the inputs of its own graph, so none may be dropped."""
    model = Floats().to(device).eval()
    backend = cgcompile.Backend(compiler="eager")
    traces: list[int] = []

    def compiles(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        traces.append(len(inputs))
        copy = fx.GraphModule(gm, fx.Graph())
        copies: dict[fx.Node, fx.Node] = {}
        copy.graph.output(copy.graph.graph_copy(gm.graph, copies))
        return backend(copy, inputs)

    compiled = torch.compile(model, backend=compiles, dynamic=True)
    with torch.inference_mode():
        check(model, compiled, device)
    assert len(traces) == 2
    assert traces[1] < traces[0]


def test_a_method_of_a_negative_constant_applies_to_its_sign(device: str) -> None:
    """torch 2.11 calls a method for ``abs``; the code of a graph prints ``-3.5.__abs__()``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    number = graph.call_method("__abs__", (-3.5,))
    graph.output((graph.call_function(torch.mul, (x, number)),))
    gm = fx.GraphModule({}, graph)
    example = torch.rand(2, D, device=device) + 1
    with FakeTensorMode() as mode:
        x.meta["example_value"] = mode.from_tensor(example)
    backend = cgcompile.Backend(compiler="eager", capture_device=CAPTURES[device])
    compiled = backend.compile_graph(gm, [example])
    with torch.inference_mode():
        for _ in range(3):
            fresh = torch.rand_like(example) + 1
            torch.testing.assert_close(compiled(fresh)[0], fresh * 3.5)
    assert backend.counters.replays


def test_the_absolute_value_of_a_float(device: str) -> None:
    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * abs(scale)

    backend = cgcompile.Backend(compiler="eager", capture_device=CAPTURES[device])
    compiled = torch.compile(function, backend=backend, dynamic=True)
    with torch.inference_mode():
        for scale in (-3.5, -3.5, 2.25, -3.5):
            x = torch.rand(2, D, device=device) + 1
            torch.testing.assert_close(compiled(x, scale), function(x, scale))
    assert backend.counters.replays
