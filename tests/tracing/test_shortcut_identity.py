"""Which tensor an argument is, where the model tells them apart: what is returned is as in eager."""

from typing import Any

import pytest
import torch
from entry_support import assert_same
from shortcut_support import Linear, compiled, context
from torch import nn

import cgcompile


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def served(model: nn.Module, calls: list[tuple[Any, ...]], **settings: Any) -> Any:
    """Each call gives what eager gives; returns the compiled model."""
    runs = compiled(model, dynamic_dims=None, **settings)
    for given in calls:
        with context():
            assert_same([runs(*given)], [model(*given)])
    return runs


class Product(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w * 2


class LinearProduct(Linear):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ w


def parameter() -> torch.Tensor:
    return nn.Parameter(torch.randn(4, 4), requires_grad=False)


def static() -> torch.Tensor:
    made = torch.randn(4, 4)
    torch._dynamo.mark_static_address(made, guard=False)
    return made


@pytest.mark.parametrize("model", [Product, LinearProduct])
@pytest.mark.parametrize("make", [parameter, static])
def test_parameters_that_are_arguments(model: Any, make: Any) -> None:
    """They are told apart by what they are, whatever else is frozen."""
    x, one, other = torch.randn(3, 4), make(), make()
    runs = served(model(), [(x, w) for w in [one] * 4 + [other] * 3 + [one]])
    (graph,) = runs.backend.graphs
    assert graph.counters.captures == 2
    assert graph.counters.replays == 4
    one.data = torch.randn(4, 4)
    for _ in range(3):
        with context():
            assert_same([runs(x, one)], [runs.runnable(x, one)])
    assert graph.counters.replays == 5


class Unread(Linear):
    """What an argument is decides, and no graph reads it."""

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        made = self.inner(x)
        return made * 3 if self.kept is x or self.kept is y else made


@pytest.mark.parametrize("first", ["another", "a view of it", "not read"])
def test_a_tensor_of_the_model_that_is_compared_alone(first: str) -> None:
    model = Unread()
    x, kept = torch.randn(3, 4), model.kept
    calls: list[tuple[Any, ...]] = {
        "another": [(x,)] * 5 + [(kept,)] * 2 + [(x,)],
        "a view of it": [(kept[:],)] + [(kept,)] * 2,
        "not read": [(x, torch.randn(3, 4))] * 5 + [(x, kept)] * 2,
    }[first]
    runs = served(model, calls)
    assert len(runs.traces) == 2


class Two(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = self.inner(x) + self.kept + y
        return made * 2 if y is self.kept else made * 5 if x is y else made


def test_a_frozen_tensor_as_several_arguments() -> None:
    model = Two()
    k, d, x = model.kept, model.kept.detach(), torch.randn(3, 4)
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
    for given in [x] * 4 + [bits(x)] * 4 + [x]:
        with context():
            assert_same([runs(given)], [model(given)])
    assert runs.backend.counters.replays >= 3
