"""Repeated layers are traced once: the same graph and guards as without, or the plain trace."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.fast_paths import FULL, context
from torch import nn

import cgcompile
from cgcompile import torch_compat as compat
from cgcompile.passes.inline import inline_regions
from cgcompile.tracing.repeated_layers import repeated_layers

pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.skipif(not compat.repeats_regions(), reason="needs torch 2.15"),
]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), torch.tanh
        self.drop, self.config, self.names = nn.Dropout(0.5), {"factor": 1.0}, ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.act(self.linear(x)))
        return x * self.config["factor"] * len(self.names)


class Doubled(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Layer(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.more, self.calls = Norm(), Inner(), None, 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        result = x + self.inner(self.norm(x)) * scale * self.factor
        return result if self.more is None else result + self.more


class Counting(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, scale) * self.calls


class Buffered(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.seen.add_(1)
        return super().forward(x, scale) * self.seen


class InPlace(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x.mul_(2), scale)


class Returning(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        result = super().forward(x, scale)
        return result, x, result.view(-1)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer, call: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.call = call or (lambda layer, number, x: layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.call(layer, number, x)
        return x


def scaled(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    return layer(x, scale=1.0 + number)


def strided(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    return layer(x.t().contiguous().t()) if number == 3 else layer(x)


def with_gradients(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(number == 3):
        return layer(x)


def in_bfloat16(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=number == 3):
        return layer(x)


def summed(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    result, before, flat = layer(x)
    return result + before + flat.view_as(result)


def viewed(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    return layer(x[:, :])


class WithOther(Layer):
    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return super().forward(x) + other.sum(0) + other.mean()


class Stateful(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, 2.0 if torch.is_autocast_enabled("cpu") else 1.0)


class Shared:
    number, table = 0, {"number": 0}


SHARED = Shared()


class ReadsShared(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, 1.0 + SHARED.number + SHARED.table["number"])


def closing_over(tensor: torch.Tensor) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda self, x: Layer.forward(self, x) * tensor


class Closing(Layer):
    forward = closing_over(torch.full((8,), 2.0))


class Stack(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, weight = x, self.layers[0].inner.linear.weight
        for number, layer in enumerate(self.layers):
            x = self.call(layer, number, x, first, weight)
        return x


def with_first(layer: nn.Module, number: int, x: Any, first: Any, weight: Any) -> torch.Tensor:
    return layer(x, first)  # for layer 0 one tensor


def with_weight(layer: nn.Module, number: int, x: Any, first: Any, weight: Any) -> torch.Tensor:
    return layer(x, weight)


def that_are_set(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    layer.factor = 1.0 + number
    return layer(x)


def after_an_attribute(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    SHARED.number = number
    return layer(x)


def after_an_item(layer: nn.Module, number: int, x: torch.Tensor) -> torch.Tensor:
    SHARED.table["number"] = number
    return layer(x)


def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


# Changes of one layer of six: what the trace of another layer does not show must be seen.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda layer: setattr(layer.norm, "eps", 0.5),
    "a hook inside": lambda layer: layer.inner.register_forward_hook(hook),
    "a hook before": lambda layer: layer.inner.register_forward_pre_hook(
        lambda module, args: (args[0] * 2,)
    ),
    "a hook": lambda layer: layer.register_forward_hook(hook),
    "another class inside": lambda layer: setattr(layer, "inner", Doubled().eval()),
    "another function": lambda layer: setattr(layer.inner, "act", torch.relu),
    "an item": lambda layer: layer.inner.config.update(factor=2.0),
    "another item": lambda layer: layer.inner.config.update(other=2.0),
    "a longer list": lambda layer: layer.inner.names.append("b"),
    "training": lambda layer: (setattr(layer.inner.drop, "p", 0.0), layer.train()),
    "no bias": lambda layer: setattr(layer.inner.linear, "bias", None),
    "a forward of its own": lambda layer: setattr(layer.norm, "forward", lambda x: x * 5),
    "None no more": lambda layer: setattr(layer, "more", 2.0),
    "a tensor": lambda layer: setattr(layer, "more", torch.ones(8)),
    "another shape": lambda layer: setattr(layer.norm, "weight", nn.Parameter(torch.rand(1))),
    "another stride": lambda layer: setattr(
        layer.inner.linear, "weight", nn.Parameter(torch.rand(8, 8).t())
    ),
    "an attribute of the class": lambda layer: setattr(layer, "factor", 1.5),
    "a shared weight": lambda layer: setattr(layer.inner.linear, "bias", layer.norm.weight),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal layers": Model,
    "a counter": lambda: Model(Counting),
    "a buffer": lambda: Model(Buffered),
    "in place": lambda: Model(InPlace),
    "in place, of a view": lambda: Model(InPlace, viewed),
    "several results": lambda: Model(Returning, summed),
    "other numbers": lambda: Model(call=scaled),
    "other strides": lambda: Model(call=strided),
    "gradients": lambda: Model(call=with_gradients),
    "autocast": lambda: Model(call=in_bfloat16),
    "autocast that is read": lambda: Model(Stateful, in_bfloat16),
    "one tensor as two arguments": lambda: Stack(WithOther, with_first),
    "a weight as an argument": lambda: Stack(WithOther, with_weight),
    "attributes that are set": lambda: Model(call=that_are_set),
    "an attribute of another object": lambda: Model(ReadsShared, after_an_attribute),
    "an item of another object": lambda: Model(ReadsShared, after_an_item),
    "a tensor in a closure": lambda: Model(Closing),
}


def compiled(model: nn.Module, **settings: Any) -> Any:
    settings = {"compiler": "eager", "cudagraph_mode": "NONE"} | settings
    return cgcompile.compile(model, dynamic_dims={"x": 0}, trace_layers_once=True, **settings)


def check(served: Any, eager: nn.Module) -> None:
    for rows in (5, 5, 3, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(served(x.clone()), eager(x.clone()))


@pytest.mark.parametrize("guards", ["none", "keep"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs(change: str, guards: str) -> None:
    model = Model().eval()
    CHANGES[change](model.layers[3])
    check(compiled(model, guards=guards), copy.deepcopy(model))


def test_a_layer_that_changes_later() -> None:
    """Guards on later layers are those of the plain trace: each change is seen."""
    model = Model().eval()
    served = compiled(model)
    x = torch.randn(5, 8)
    served(x)
    for change in CHANGES.values():
        change(model.layers[4])
        torch.testing.assert_close(served(x), model(x))
    assert len(served.traces) > len(CHANGES) - 3  # two change nothing that is read


@pytest.mark.parametrize("guards", ["none", "keep"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, guards: str) -> None:
    if (name, guards) == ("a counter", "none"):
        pytest.skip("without guards an attribute keeps the number of the trace")
    model = MODELS[name]().eval()
    check(compiled(model, guards=guards), copy.deepcopy(model))


def test_layers_are_traced_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is refused is traced plainly, and says why."""
    caplog.set_level(logging.INFO, "cgcompile")
    compiled(Model().eval())(torch.randn(5, 8))
    assert "each layer is traced on its own" not in caplog.text
    compiled(Model(call=scaled).eval())(torch.randn(5, 8))
    assert "Model.forward: each layer is traced on its own: " in caplog.text


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(Model):
    @decorated
    @decorated
    def forward(self, x: torch.Tensor, state: Any = None) -> Any:
        return super().forward(x), state  # code around the graph reads the default of a closure


def test_a_decorated_model(caplog: pytest.LogCaptureFixture) -> None:
    """Python around the graph may read the closure of a function that is no mark."""
    caplog.set_level(logging.INFO, "cgcompile")
    model = Decorated().eval()
    check(compiled(model), copy.deepcopy(model))
    assert "each layer is traced on its own" not in caplog.text


@pytest.mark.parametrize("call", [None, scaled])
def test_marks_are_removed(call: Any) -> None:
    before, attributes = Layer.forward, dict(vars(Layer.forward))
    compiled(Model(call=call).eval())(torch.randn(5, 8))
    assert Layer.forward is before
    assert vars(Layer.forward) == attributes


def test_replays_take_the_fast_path() -> None:
    model = Model().eval()
    served = compiled(model, guards="none", cudagraph_mode="FULL", capture_device="host")
    x = torch.randn(3, 8)
    for _ in range(6):
        x.copy_(torch.randn(3, 8))
        with context(FULL):
            torch.testing.assert_close(served(x), model(x))
    assert served.backend.counters.replays >= 3
    assert served.backend.graphs[0].fast_paths.call is not None
    with torch.no_grad():
        model.layers[4].norm.weight.mul_(2)
        with context(FULL):
            torch.testing.assert_close(served(x), model(x))


def test_a_weight_that_the_caller_passes_too() -> None:
    """Guards tell whether an argument is a weight of a repeated layer."""
    model = Model(call=lambda layer, number, x: layer(x)).eval()
    settings = {"compiler": "eager", "cudagraph_mode": "NONE", "trace_layers_once": True}
    served = cgcompile.compile(model, guards="none", **settings)
    square = torch.rand(8, 8)
    for x in (square, model.layers[4].inner.linear.weight, square):
        torch.testing.assert_close(served(x), model(x))


# ---------------------------------------------------------------- marked by the user


def split_of(model: nn.Module, x: torch.Tensor) -> tuple[Any, str]:
    served = torch.compile(model, backend=cgcompile.Backend(compiler="eager"), fullgraph=True)
    torch.testing.assert_close(served(x), model(x))
    return served, str(cgcompile.runtime(served).graphs[-1].split)


def test_layers_that_the_user_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is that without marks, and guards see changes of later layers."""
    model, x = Model().eval(), torch.randn(5, 8)
    _, expected = split_of(model, x)
    torch._dynamo.reset()
    marked = torch.compiler.nested_compile_region(Layer.forward)
    monkeypatch.setattr(Layer, "forward", marked)
    served, split = split_of(model, x)
    assert split.splitlines()[:2] == expected.splitlines()[:2]
    model.layers[4].norm.eps = 0.3
    torch.testing.assert_close(served(x), model(x))
    assert len(cgcompile.runtime(served).graphs) == 2


class WithSize(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) + (x > 0).nonzero().numel()


def test_a_region_that_is_not_inlined_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that depends on data has one symbol in the region, and needs one for each call."""
    marked = torch.compiler.nested_compile_region(WithSize.forward)
    monkeypatch.setattr(WithSize, "forward", marked)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        split_of(Model(WithSize).eval(), torch.randn(5, 8))


# ---------------------------------------------------------------- beside the plain trace


def traced(model: nn.Module, batch: dict[str, Any], more: dict[str, Any], regions: Any) -> Any:
    """Guards, inputs and pieces of a trace."""
    tensors = [(x, 0, None) for x in batch.values() if isinstance(x, torch.Tensor)]
    with compat.marked(tensors, False), compat.size_oblivious(True):
        trace = compat.trace_call(
            model, (), batch | more, freeze=False, regions=regions, inline=inline_regions
        )
    guards = set()
    for guard in trace._graph_output.guards:
        if "type(" in guard.name or guard.name.startswith(("G['_", "L['func']")):
            continue
        # The class of a later layer is compared as a class, or as that of the first layer.
        path, of_class, _ = str(guard.name).partition(".__class__")
        guards.add((path, of_class or guard.create_fn_name()))
    with trace.compiling():
        split = cgcompile.passes.split_graph(trace.graph, cgcompile.boundaries.Boundaries())
    pieces = [(piece.capture, piece.same_as, piece.support) for piece in split.pieces]
    trace.close()
    return guards, sorted(value.source or "" for value in split.inputs), pieces


def test_graph_and_guards_are_those_of_the_plain_trace() -> None:
    model, batch = Model().eval(), {"x": torch.randn(5, 8)}
    regions = repeated_layers(model)
    assert regions == {Layer: 2}
    assert traced(model, batch, {}, regions) == traced(model, batch, {}, {})


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "whisper", "vit"])
def test_models_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from model_zoo.catalogue import CATALOGUE

    monkeypatch.setattr("cgcompile.tracing.repeated_layers._FEWEST", 2)
    entry = CATALOGUE[name]
    model, batch = entry.make(), entry.inputs(3)
    regions = repeated_layers(model)
    assert regions
    result = traced(model, batch, entry.settings, regions)
    assert result == traced(model, batch, entry.settings, {})
