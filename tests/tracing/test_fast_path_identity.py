"""Arguments that are, or share memory with, each other or tensors of the model: as in eager."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lib.entry import assert_same
from lib.fast_paths import FULL, PIECEWISE, Linear, compiled, context
from torch import nn

import cgcompile
from cgcompile.errors import AddressChangedError


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def served(model: nn.Module, calls: list[tuple[Any, ...]], **settings: Any) -> Any:
    """Each call gives what eager gives; returns the compiled model."""
    where = "host" if calls[0][0].device.type == "cpu" else "auto"
    runs = compiled(model, dynamic_dims=None, capture_device=where, **settings)
    for call in calls:
        with context():
            assert_same([runs(*call)], [model(*call)])
    return runs


class Product(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w * 2


class LinearProduct(Linear):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ w


def parameter(device: str) -> torch.Tensor:
    return nn.Parameter(torch.randn(4, 4, device=device), requires_grad=False)


def static(device: str) -> torch.Tensor:
    tensor = torch.randn(4, 4, device=device)
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


@pytest.mark.parametrize("model", [Product, LinearProduct])
@pytest.mark.parametrize("make", [parameter, static])
def test_parameters_that_are_arguments(model: Any, make: Any, device: str) -> None:
    """They are told apart by what they are, whatever else is frozen."""
    x, one, other = torch.randn(3, 4, device=device), make(device), make(device)
    runs = served(model().to(device), [(x, w) for w in [one] * 4 + [other] * 3 + [one]])
    (graph,) = runs.backend.graphs
    assert graph.counters.captures == 2
    assert graph.counters.replays == 4
    one.data = torch.randn(4, 4, device=device)
    for _ in range(3):
        with context():
            assert_same([runs(x, one)], [runs.runnable(x, one)])
    assert graph.counters.replays == 5


class Unread(Linear):
    """What an argument is decides, and no graph reads it."""

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        hidden = self.inner(x)
        return hidden * 3 if self.kept is x or self.kept is y else hidden


@pytest.mark.parametrize("guards", ["none", "shape"])
@pytest.mark.parametrize("first", ["another", "a view of it", "not read"])
def test_a_tensor_of_the_model_that_is_compared_alone(first: str, guards: str, device: str) -> None:
    model = Unread().to(device)
    x, kept = torch.randn(3, 4, device=device), model.kept
    calls: list[tuple[Any, ...]] = {
        "another": [(x,)] * 5 + [(kept,)] * 2 + [(x,)],
        "a view of it": [(kept[:],)] + [(kept,)] * 2,
        "not read": [(x, torch.randn_like(x))] * 5 + [(x, kept)] * 2,
    }[first]
    runs = served(model, calls, guards=guards)
    assert len(runs.traces) == 2
    forgotten = weakref.ref(kept)
    calls.clear()
    del kept, model.kept
    assert forgotten() is None, "it is not held"


class Two(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x) + self.kept + y
        return hidden * 2 if y is self.kept else hidden * 5 if x is y else hidden


def test_a_frozen_tensor_as_several_arguments(device: str) -> None:
    model = Two().to(device)
    k, d, x = model.kept, model.kept.detach(), torch.randn(3, 4, device=device)
    served(model, [(k, k)] * 4 + [(k, d)] * 2 + [(d, k), (k, k), (x, k), (x, d), (x, x), (d, d)])


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("guards", ["none", "shape", "keep"])
@pytest.mark.parametrize("bits", [torch.conj, torch._neg_view])
def test_conjugate_and_negative_bits(guards: str, bits: Any) -> None:
    model = Double()
    runs = cgcompile.compile(model, compiler="eager", capture_device="host", guards=guards)
    x = torch.randn(3, 4, dtype=torch.complex64 if bits is torch.conj else torch.float32)
    for value in [x] * 4 + [bits(x)] * 4 + [x]:
        with context():
            assert_same([runs(value)], [model(value)])
    assert runs.backend.counters.replays >= 3


# ---------------------------------------------------------------- any of them, in any order


class Tells(Linear):
    """The result shows which of its arguments are each other, or tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.empty(0, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x) + y.sum() * 2 + self.kept.sum()
        pairs = [(x, y), (x, z), (y, z)]
        own = (self.kept, self.empty, self.inner.weight)
        pairs += [(given, each) for given in (x, y, z) for each in own]
        for factor, (one, other) in enumerate(pairs, start=2):
            if one is other:
                hidden = hidden * factor + factor
        return hidden


def lying_alike(model: Tells) -> list[torch.Tensor]:
    """Tensors that are, or share memory and layout with, each other and those of the model."""
    kept, weight, device = model.kept, model.inner.weight, model.kept.device
    x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
    tensors = [x, x[:], x[:2], x[1:], y, torch.empty(0, 4, device=device), model.empty]
    tensors += [kept, kept[:], kept.detach(), weight, weight[:3], weight.t()[:3]]
    tensors.append(nn.Parameter(x, requires_grad=False))
    return [*tensors, torch.randn(3, 8, device=device)[:, ::2]]


places = st.integers(0, 14)
calls_of_three = st.lists(st.tuples(places, places, places), min_size=1, max_size=5)


@pytest.mark.slow
@pytest.mark.parametrize(("guards", "mode"), [("none", FULL), ("none", PIECEWISE), ("shape", FULL)])
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(several=calls_of_three, mixed=st.lists(st.integers(0, 4), max_size=12))
@example(several=[(0, 4, 5), (0, 4, 6), (0, 4, 10)], mixed=[0, 1, 0, 2, 0])
@example(several=[(8, 8, 9), (7, 9, 8), (7, 7, 9), (8, 9, 9)], mixed=[0, 1, 2, 3, 0, 1, 2, 3])
def test_whatever_is_passed_in_whatever_order(
    guards: str, mode: Any, device: str, several: list[tuple[int, int, int]], mixed: list[int]
) -> None:
    model = Tells().to(device)
    where = "host" if device == "cpu" else "auto"
    runs = compiled(model, dynamic_dims=None, guards=guards, capture_device=where)
    tensors = lying_alike(model)
    for which in [0] * 4 + [each % len(several) for each in mixed]:
        call = [tensors[place] for place in several[which]]
        tensors[0].copy_(torch.randn(3, 4))
        try:
            with context(mode, max(len(call[0]), 1)):
                result = runs(*call)
        except AddressChangedError:
            continue  # another one of that size, elsewhere
        assert_same([result], [model(*call)])
    assert runs.backend.counters.replays >= 2
