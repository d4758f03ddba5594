"""Regions that a user marks with ``nested_compile_region``: one op each, with guards of each call."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cgcompile
from cgcompile.errors import TraceError

pytestmark = pytest.mark.usefixtures("without_gradients")

FRONT_ENDS = ["torch.compile", "keep", "none"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.factor = nn.Linear(8, 8), torch.tanh, 1.0
        self.config = {"shift": 0.0}
        self.register_buffer("calls", torch.zeros(1))

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.factor + self.config["shift"]


class Attention(Layer):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)[None]
        return F.scaled_dot_product_attention(y, y, y)[0]


class Writing(Layer):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().compute(x.mul_(2)) * self.calls


class Model(nn.Module):
    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model: nn.Module, front_end: str, **settings: Any) -> Any:
    settings = {"compiler": "eager", "capture_device": "host"} | settings
    if front_end == "torch.compile":
        return torch.compile(model, backend=cgcompile.Backend(**settings))
    return cgcompile.compile(model, guards=front_end, **settings)


def handle_of(served: Any) -> Any:
    own = getattr(served, "backend", None)
    return cgcompile.runtime(served) if own is None else own


def check(served: Any, eager: nn.Module, calls: int = 4) -> None:
    for _ in range(calls):
        x = torch.randn(3, 8)
        torch.testing.assert_close(served(x.clone()), eager(x.clone()))


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("layer", [Layer, Attention, Writing])
def test_a_region_is_one_op(layer: type[Layer], front_end: str, compiler: str) -> None:
    model = Model(layer).eval()
    served = compiled(model, front_end, compiler=compiler)
    check(served, copy.deepcopy(model))
    handle = handle_of(served)
    assert handle.counters.replays >= 2
    pieces = handle.graphs[-1].split.pieces
    names = [str(node.target) for piece in pieces for node in piece.module.graph.nodes]
    assert names.count("invoke_subgraph") == 4
    assert all(piece.capture for piece in pieces) == (layer is not Attention)


# Changes of one layer of four, which the trace of another layer does not show.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda layer: setattr(layer, "factor", 0.5),
    "an item": lambda layer: layer.config.update(shift=2.0),
    "a function": lambda layer: setattr(layer, "act", torch.relu),
    "a weight": lambda layer: setattr(layer.linear, "weight", nn.Parameter(torch.rand(8, 8))),
    "a stride": lambda layer: setattr(layer.linear, "weight", nn.Parameter(torch.rand(8, 8).t())),
    "no bias": lambda layer: setattr(layer.linear, "bias", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs(change: str, front_end: str) -> None:
    model = Model().eval()
    CHANGES[change](model.layers[2])
    check(compiled(model, front_end), model)


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["torch.compile", "keep"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_later_layer_that_changes(change: str, front_end: str) -> None:
    model = Model().eval()
    served = compiled(model, front_end)
    check(served, model)
    assert handle_of(served).counters.replays >= 2
    CHANGES[change](model.layers[2])
    check(served, model, calls=2)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("change", ["hook", "forward"])
def test_other_code_in_a_later_layer_is_refused(change: str, front_end: str) -> None:
    """torch compares neither before it repeats a trace."""
    model = Model().eval()
    linear = model.layers[2].linear
    if change == "hook":
        linear.register_forward_hook(lambda module, args, output: output * 3)
    else:
        linear.forward = lambda x: x * 5
    if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        check(compiled(model, front_end), model)  # each call is traced there
        return
    with pytest.raises(Exception, match="another class, forward or hook") as raised:
        compiled(model, front_end)(torch.randn(3, 8))
    chain = [raised.value, raised.value.__cause__, getattr(raised.value, "inner_exception", None)]
    assert any(isinstance(error, TraceError) for error in chain)


def test_the_argument_that_traced_layers_once_warns() -> None:
    with pytest.warns(FutureWarning, match="nested_compile_region") as warned:
        model = cgcompile.compile(Model().eval(), trace_layers_once=True)
    assert warned[0].filename == __file__
    assert len(model.traces) == 0
