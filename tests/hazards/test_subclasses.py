"""Tensor subclasses as weights, inputs and results are captured as the plain tensors inside."""

import gc
import weakref
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.breakable import FULL, step
from lib.front_ends import COMPILED, ROWS, TRACED, WIDTH, FrontEnd, compiled, settings
from lib.ranks import run_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import cgcompile
from cgcompile.reasons import Reason


class Wrapping(torch.Tensor):
    """Wraps the tensors ``names``; ops run on what ``plain`` returns."""

    names: tuple[str, ...]
    context: Any = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def wrap(cls, like: torch.Tensor, *inner: torch.Tensor, context: Any = None) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=inner[-1].dtype, device=like.device
        )
        for name, tensor in zip(cls.names, inner, strict=True):
            setattr(self, name, tensor)
        self.context = context
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.names], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        tensors = [inner[name] for name in cls.names]
        return cls.wrap(tensors[0], *tensors, context=context)

    def plain(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (outer,) = args
            inner = [getattr(outer, name).detach() for name in cls.names]
            return cls.wrap(inner[0], *inner, context=outer.context)
        args, kwargs = pytree.tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class Int8(Wrapping):
    """An int8 weight with a scale for each row."""

    names = ("data8", "scale")

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls.wrap(weight, (weight / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        return self.data8.to(self.scale.dtype) * self.scale


class Pair(Wrapping):
    """Two tensors; each op runs on both, and ``context`` scales what ``plain`` returns."""

    names = ("first", "second")

    @classmethod
    def of(cls, first: torch.Tensor, second: torch.Tensor, context: Any = None) -> Any:
        return cls.wrap(first, first, second, context=context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        context = next(a.context for a in args if isinstance(a, cls))
        runs = []
        for name in cls.names:
            inner = pytree.tree_map_only(cls, attrgetter(name), args)
            runs.append(func(*inner, **(kwargs or {})))
        if func._schema.name.endswith("_"):
            return args[0]
        result = pytree.tree_map(partial(cls.of, context=context), *runs)
        # A context changes results, so that one which is baked in would show.
        if context and func is torch.ops.aten.sin.default:
            result = cls.of(result.first * context, result.second, context)
        return result


class Replacing(Int8):
    """An in-place op replaces what is inside."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul_.Tensor:
            args[0].scale = args[0].scale * args[1]
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def quantized(device: str, grad: bool = False) -> nn.Sequential:
    """Two layers: one of an int8 weight, and a plain one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
    net.requires_grad_(grad)
    weight = Int8.of(net[0].weight.detach())
    net[0].weight = nn.Parameter(weight, requires_grad=False)
    return net.eval()


def check(served: Any, eager: Any, device: str, steps: int = 4, rows: int = ROWS) -> None:
    """Compare steps on new inputs with eager, bitwise: both run the same ops."""
    before = None
    with torch.no_grad():
        for _ in range(steps):
            x = torch.randn(rows, WIDTH, device=device)
            got, expected = served.step(x), eager(x)
            assert torch.equal(got, expected)
            assert before is None or not torch.equal(got, before)
            before = got.clone()


def replayed(served: Any, replays: int, reasons: Iterable[Reason] = (Reason.WARMING,)) -> None:
    counters = served.counters()
    assert counters.replays >= replays, counters
    assert set(counters.plain) <= set(reasons), counters


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_weights(name: str, compiler: str, device: str) -> None:
    net = quantized(device)
    served = compiled(name, net, settings(device, compiler=compiler))
    with torch.inference_mode():
        for _ in range(5):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), net(x))
    replayed(served, 3)
    (graph,) = served.target.graphs
    static = [value.source for value in graph.split.inputs if value.static]
    assert sum(str(source).endswith(("weight.data8", "weight.scale")) for source in static) == 2


@pytest.mark.parametrize("name", COMPILED)
def test_updates_of_weights(name: str, device: str) -> None:
    """Written in place: seen by replays. Replaced: another weight set, with graphs of its own."""
    net = quantized(device)
    served = compiled(name, net, settings(device))
    check(served, net, device)
    replays = served.counters().replays
    net[0].weight.data8.neg_()
    net[0].weight.scale.mul_(2)
    check(served, net, device, steps=1)
    assert served.counters().replays == replays + 1
    net[0].weight.scale = net[0].weight.scale * 3
    check(served, net, device)
    net[0].weight.data8.data = net[0].weight.data8.neg()
    check(served, net, device)
    net[0].weight = nn.Parameter(Int8.of(torch.randn(WIDTH, WIDTH, device=device)), False)
    check(served, net, device)
    state = {key: value.clone() for key, value in net[2].state_dict().items()}
    net[2].load_state_dict({key: value * 2 for key, value in state.items()})
    replays = served.counters().replays
    check(served, net, device, steps=2)
    assert served.counters().replays == replays + 2
    replayed(served, 10)


@pytest.mark.parametrize("name", COMPILED)
def test_an_inner_tensor_of_another_type(name: str, device: str) -> None:
    """Dynamo's guards notice it."""
    net = quantized(device)
    served = compiled(name, net, settings(device))
    check(served, net, device)
    net[0].weight.data8 = net[0].weight.data8.to(torch.int16) * 300
    check(served, net, device)
    replayed(served, 4)
    assert len(served.target.graphs) == 2


def test_without_guards(device: str) -> None:
    """Weights are bound, what is inside is not; of another type the step runs eager."""
    net = quantized(device)
    model = cgcompile.compile(net, settings(device), guards="none")
    served = FrontEnd("cgcompile.compile", model, model.backend)
    check(served, net, device)
    net[0].weight.scale.mul_(2)
    check(served, net, device, steps=1)
    replayed(served, 3)
    net[0].weight.scale = net[0].weight.scale * 3
    check(served, net, device)
    net[0].weight.data8 = net[0].weight.data8.to(torch.int16) * 300
    check(served, net, device)
    assert served.counters().plain[Reason.UNSUPPORTED_INPUT] == 4
    net[0].weight.data8 = net[0].weight.data8.div(300).to(torch.int8)
    check(served, net, device)
    assert served.counters().plain[Reason.UNSUPPORTED_INPUT] == 4
    assert len(served.target.graphs) == 1


def test_gradients_without_guards(device: str) -> None:
    """No guard looks at grad mode: they flow through the original graph."""
    net = quantized(device)
    net[0].weight.requires_grad_()
    model = cgcompile.compile(net, settings(device), guards="none")
    served = FrontEnd("cgcompile.compile", model, model.backend)
    check(served, net, device)
    replayed(served, 2)
    x = torch.randn(ROWS, WIDTH, device=device)
    (got,) = torch.autograd.grad(served.step(x).sum(), net[0].weight)
    (expected,) = torch.autograd.grad(net(x).sum(), net[0].weight)
    assert torch.equal(got, expected)
    assert served.counters().plain[Reason.GRADIENTS] == 1


@pytest.mark.parametrize("name", COMPILED)
def test_boundaries_are_found(name: str, device: str) -> None:
    net = quantized(device)

    def attend(x: torch.Tensor) -> torch.Tensor:
        q = net(x).view(1, 1, -1, WIDTH)
        return net(F.scaled_dot_product_attention(q, q, q).view(-1, WIDTH))

    served = compiled(name, attend, settings(device, cudagraph_mode="PIECEWISE"))
    check(served, attend, device)
    replayed(served, 2)
    assert [piece.capture for piece in served.target.graphs[0].split.pieces] == [True, False, True]


def views(weight: Any, x: torch.Tensor) -> torch.Tensor:
    """Views of a result are written, and of the weight taken."""
    y = x @ weight.t()
    y[:, 0] += 1
    y.view(-1).mul_(2)
    return y.relu_() + (weight * 2)[: x.shape[0]].sum()


def chunks(weight: Any, x: torch.Tensor) -> torch.Tensor:
    one, two = weight.chunk(2)
    return F.linear(x, one).sum(1, keepdim=True) + F.linear(x, two)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("step", [views, chunks])
@pytest.mark.parametrize("kind", [Int8, Pair])
def test_views(name: str, step: Any, kind: Any, device: str) -> None:
    weight = torch.randn(WIDTH, WIDTH, device=device)
    outer = Int8.of(weight) if kind is Int8 else None
    if outer is None:
        outer = Pair.of(weight, weight + 1)

    def first(x: torch.Tensor) -> torch.Tensor:
        result = step(outer, x)
        return result.first + result.second if kind is Pair else result

    served = compiled(name, first, settings(device), dynamic=True)
    for rows in (ROWS, ROWS + 2):
        check(served, first, device, rows=rows)
    replayed(served, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_inputs_and_results(name: str, device: str) -> None:
    """A subclass of the caller is copied as its plain tensors, and results are built from such."""
    other = Pair.of(*torch.randn(2, ROWS, WIDTH, device=device).unbind())

    def step(x: Any) -> Any:
        return x.sin() * 2, other, x, x.t().cos()

    served = compiled(name, step, settings(device))
    with torch.no_grad():
        for context in (None, 2, 3, None, 2, 3, None, 2, 3, None, 2, 3):
            x = Pair.of(*torch.randn(2, ROWS, WIDTH, device=device).unbind(), context)
            got, expected = served.step(x), step(x)
            assert (got[1] is other, got[2] is x) == (True, True)
            for one, two in zip(got, expected, strict=True):
                assert type(one) is Pair
                assert one.context == two.context
                assert one.shape == two.shape
                assert torch.equal(one.first, two.first)
                assert torch.equal(one.second, two.second)
    replayed(served, 6)


@pytest.mark.parametrize("rows", [(4, 6, 9)])
def test_results_of_varying_size(rows: tuple[int, ...], device: str) -> None:
    other = Pair.of(*torch.randn(2, 1, WIDTH, device=device).unbind())

    def step(x: torch.Tensor) -> Any:
        return other * x

    served = compiled("torch.compile", step, settings(device), dynamic=True)
    with torch.no_grad():
        for count in (*rows, *rows, *rows):
            x = torch.randn(count, WIDTH, device=device)
            got, expected = served.step(x), step(x)
            assert (type(got), got.shape) == (Pair, (count, WIDTH))
            assert torch.equal(got.first, expected.first)
            assert torch.equal(got.second, expected.second)
    replayed(served, 3)


def equal(results: Any, expected: Any) -> bool:
    """Return whether results are equal, what is inside of subclasses included."""
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True)
    return all(
        type(one) is type(other)
        and (
            all(equal(getattr(one, name), getattr(other, name)) for name in one.names)
            if isinstance(one, Wrapping)
            else torch.equal(one, other)
        )
        for one, other in pairs
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_tensors_inside_of_arguments_are_told_apart(name: str, device: str) -> None:
    def function(pair: Any, x: torch.Tensor) -> Any:
        return pair.sin() + 1, x * 2, pair.second + x

    served = compiled(name, function, settings(device))
    with torch.no_grad():
        for _ in range(4):
            one, other, last = torch.randn(3, ROWS, WIDTH, device=device).unbind()
            calls = [
                (Pair.of(one, one), other),
                (Pair.of(one, other), last),
                (Pair.of(one, other), one),
                (Pair.of(one, other), other),
                (Pair.of(Pair.of(one, other), Pair.of(last, one)), last),
                (Pair.of(Pair.of(one, one), Pair.of(last, one)), last),
            ]
            for pair, x in calls:
                assert equal(served.step(pair, x), function(pair, x))
    assert served.counters().replays >= 4


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("first", ["x", "pair"])
def test_a_tensor_inside_is_another_argument_at_times(first: str, name: str, device: str) -> None:
    """A trace for which they are one object does not run where they are two, in either order."""

    def function(one: Any, other: Any) -> Any:
        x, pair = (one, other) if first == "x" else (other, one)
        return x * 2, pair.first + 1, pair.second.sin()

    served = compiled(name, function, settings(device))
    static = torch.randn(3, ROWS, WIDTH, device=device).unbind()
    with torch.no_grad():
        for same in (True, True, True, False, False, True, False):
            for tensor in static:
                tensor.normal_()
            x, other, more = static
            pair = Pair.of(x, other) if same else Pair.of(other, more)
            call = (x, pair) if first == "x" else (pair, x)
            assert equal(served.step(*call), function(*call))
    assert served.counters().replays >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_attributes_of_arguments_that_python_reads(name: str, device: str) -> None:
    def function(pair: Any, x: torch.Tensor) -> Any:
        y = x * pair.factor if pair.context > 1 else x
        return pair.first + y + x.shift, x * pair.options["scale"]

    served = compiled(name, function, settings(device))
    with torch.no_grad():
        for factor, shift in ((1, 5), (2, 5), (2, 6), (1.0, 6), (0.0, 6), (-0.0, 6)) * 4:
            one, other, x = torch.randn(3, ROWS, WIDTH, device=device).unbind()
            pair = Pair.of(one, other, 2.0)
            pair.factor, pair.options, x.shift = factor, {"scale": factor}, shift
            assert equal(served.step(pair, x), function(pair, x))
    assert served.counters().replays >= 6


class Unflatten(nn.Module):
    """A parametrization that makes a weight from plain ones, as torchao and AOTInductor do."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        return TwoTensor(first, second)

    def right_inverse(self, weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.a.detach().clone(), weight.b.detach().clone()


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = TwoTensor(torch.randn(WIDTH), torch.randn(WIDTH))
        self.weight = nn.Parameter(weight, requires_grad=False)
        nn.utils.parametrize.register_parametrization(self, "weight", Unflatten(), unsafe=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return (weight * x).sin().a + (weight + x).b


@pytest.mark.parametrize("name", TRACED)
def test_a_subclass_that_the_model_makes(name: str, device: str) -> None:
    """No argument and no weight is a subclass."""
    model = Parametrized().to(device)
    served = compiled(name, model, settings(device))
    check(served, model, device)
    replayed(served, 2)


@pytest.mark.parametrize("name", TRACED)
def test_a_subclass_that_is_made_and_returned(name: str, device: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return TwoTensor(x, x * 2) + 1

    served = compiled(name, function, settings(device))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(ROWS, WIDTH, device=device)
            result, expected = served.step(x), function(x)
            assert result.a.equal(expected.a)
            assert result.b.equal(expected.b)
    replayed(served, 3)


class Counting(nn.Module):
    """Updates a state that is a subclass."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.add_(1)
        return x * 2 + (self.state * 1).first


@pytest.mark.parametrize("name", COMPILED)
def test_a_state_that_is_updated(name: str, device: str) -> None:
    net = Counting(Pair.of(*(torch.zeros(1, WIDTH, device=device) for _ in range(2))))
    served = compiled(name, net, settings(device))
    with torch.no_grad():
        for count in range(1, 6):
            x = torch.randn(ROWS, WIDTH, device=device)
            assert torch.equal(served.step(x), x * 2 + count)
            assert net.state.second.eq(count).all()
    replayed(served, 3)


@pytest.mark.parametrize("name", COMPILED)
def test_wrapped_twice(name: str, device: str) -> None:
    pair = Pair.of(
        *(Int8.of(torch.randn(WIDTH, WIDTH, device=device)) for _ in range(2)), context=None
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        result = F.linear(x, pair)
        return result.first - result.second

    served = compiled(name, step, settings(device))
    check(served, step, device)
    replays = served.counters().replays
    pair.first.scale.mul_(3)
    check(served, step, device, steps=1)
    assert served.counters().replays == replays + 1


# ---------------------------------------------------------------- what stays as it was


class Replaces(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(2)
        return F.linear(x, self.weight)


@pytest.mark.parametrize("name", COMPILED)
def test_an_op_that_replaces_what_is_inside(name: str, device: str) -> None:
    weight = torch.randn(WIDTH, WIDTH, device=device)
    nets = [Replaces(Replacing.wrap(weight, *_inner(weight))) for _ in range(2)]
    served = compiled(name, nets[0], settings(device))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, device=device)
            assert torch.equal(served.step(x), nets[1](x))
    assert served.counters().plain == {Reason.UNSUPPORTED_INPUT: 4}


@pytest.mark.parametrize("name", COMPILED)
def test_inner_tensors_that_share_memory_and_are_written(name: str, device: str) -> None:
    """No guard covers it: such a graph is not taken apart, nor is one for others used."""

    def step(x: Any) -> Any:
        x.first.add_(1)
        return (x * 2).first + (x + 1).second

    served = compiled(name, step, settings(device))
    with torch.no_grad():
        for shares in (True, True, True, False, False, False, True, True, False):
            one, two = torch.randn(2, ROWS, WIDTH, device=device).unbind()
            pairs = [
                Pair.of(first, first if shares else two.clone())
                for first in (one.clone(), one.clone())
            ]
            assert torch.equal(served.step(pairs[0]), step(pairs[1]))
            assert torch.equal(pairs[0].first, pairs[1].first)


def test_a_freed_model_is_not_held(device: str) -> None:
    net = quantized(device)
    served = compiled("torch.compile", net, settings(device))
    check(served, net, device)
    replayed(served, 2)
    inside = weakref.ref(net[0].weight.data8)
    del net, served.step
    gc.collect()
    assert inside() is None


def _inner(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized = Int8.of(weight)
    return quantized.data8, quantized.scale


@pytest.mark.parametrize("name", COMPILED)
def test_gradients(name: str, device: str) -> None:
    """They flow through a graph that was compiled for them."""
    net = quantized(device, grad=True)
    served = compiled(name, net, settings(device))
    check(served, net, device)
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    (got,) = torch.autograd.grad(served.step(x).sum(), x)
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    assert torch.equal(got, expected)
    assert served.counters().plain[Reason.GRADIENTS] == 1


@pytest.mark.parametrize("name", COMPILED)
def test_autocast(name: str, device: str) -> None:
    """Autocast would cast the inner ops as well: subclasses stay whole."""
    net = quantized(device)
    served = compiled(name, net, settings(device))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, device=device)
            assert torch.equal(served.step(x), net(x))
    assert served.counters().plain == {Reason.UNSUPPORTED_INPUT: 4}


def split_layers(ranks: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """Layers of DTensor weights, split over the ranks, and the whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    mesh = init_device_mesh("cpu", (ranks,))
    split = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    parallelize_module(net, mesh, split)
    return net, weights


def whole(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return F.linear(F.linear(x, *weights[:2]).relu(), *weights[2:])


def parallel(rank: int, ranks: int) -> Any:
    net, weights = split_layers(ranks)
    served = compiled("torch.compile", net, settings("cpu"))
    results = []
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(4, 8)
            dist.broadcast(x, 0)
            results.append((served.step(x), whole(x, weights)))
    pieces = [piece.capture for piece in served.target.graphs[-1].split.pieces]
    return results, dict(served.counters().plain), served.counters().replays, pieces


@pytest.mark.slow
def test_dtensor_weights(tmp_path: Path) -> None:
    for results, plain, replays, pieces in run_ranks(parallel, 2, tmp_path):
        for got, expected in results:
            torch.testing.assert_close(got, expected)
        assert set(plain) == {Reason.WARMING}
        assert replays == 3
        assert pieces[0] is True
        assert False in pieces  # gloo is work of the host


def uncompiled(rank: int, ranks: int) -> Any:
    net, weights = split_layers(ranks)
    wrapper = cgcompile.BreakableCUDAGraphWrapper(lambda x: x + net(x), settings("cpu"))
    x = torch.empty(4, 8)
    results = []
    with torch.inference_mode():
        net(torch.zeros(2, 8)) + 0  # connects the ranks; of another size: no shapes are known
        for _ in range(4):
            dist.broadcast(x.normal_(), 0)
            with step(4, FULL):
                results.append((wrapper(x).clone(), x + whole(x, weights)))
    return results, wrapper.counters.captures, wrapper.counters.replays


@pytest.mark.slow
def test_dtensor_weights_of_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    """What is recorded are the ops on plain tensors, without those that compute shapes."""
    for results, captures, replays in run_ranks(uncompiled, 2, tmp_path):
        for got, expected in results:
            torch.testing.assert_close(got, expected)
        assert not torch.equal(results[-1][0], results[-2][0])
        assert (captures, replays) == (1, 3)
