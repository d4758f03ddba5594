"""Whose weights are compared: the modules that something holds that is called."""

import functools
from collections import deque
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lib.asserts import calls_of
from torch import nn

from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphMode,
    CUDAGraphWrapper,
    set_forward_context,
)
from cgcompile.graphs.reads import modules_of
from cgcompile.reasons import Reason

FULL = CUDAGraphMode.FULL


class Called:
    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    def __call__(self, x: torch.Tensor) -> Any:
        return self._held(x)


class Engine:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.words = model, {"a": 1}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def closure(held: Any) -> Any:
    return lambda x: held(x)


HOLDERS = {
    "closure": closure,
    "default": lambda held: lambda x, model=held: model(x),
    "partial": lambda held: functools.partial(lambda held, x: held(x), held),
    "object": Called,
    "method of the module": lambda held: held.forward,
    "method of an object": lambda held: Engine(held).step,
    "list in a mapping": lambda held: Called(MappingProxyType({"it": [(held,)]})),
    "deque": lambda held: Called(deque([held])),
    "function in a function": lambda held: closure(Called(functools.partial(closure(held)))),
}
CALL_IT = ("closure", "default", "partial", "object", "method")  # the others are called by nobody


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_module_is_found(holder: str) -> None:
    module = nn.Linear(2, 2)
    assert modules_of(HOLDERS[holder](module)) == [module]


GLOBAL = nn.Linear(2, 2)
HELD = {"towers": [GLOBAL]}


def helper(x: torch.Tensor) -> Any:
    return GLOBAL(x)


def names_an_attribute(held: Any) -> Any:
    return held.GLOBAL


NAMES = {
    "module": lambda x: GLOBAL(x),
    "container": lambda x: HELD["towers"][0](x),
    "inner function": lambda xs: [(lambda x: GLOBAL(x))(x) for x in xs],
    "function of the file": lambda x: helper(x),
    "method": lambda x: GLOBAL.forward(x),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_a_global_that_the_code_names_is_found(names: Any) -> None:
    assert modules_of(names) == [GLOBAL]


def test_a_global_of_the_name_of_an_attribute_is_not_found() -> None:
    assert modules_of(names_an_attribute) == []


def test_what_holds_none() -> None:
    class Bare:
        __slots__ = ()

    assert modules_of(Bare()) == modules_of(len) == modules_of(closure(Called(None))) == []
    module = nn.Linear(2, 2)
    assert modules_of(module) == [module]
    assert modules_of(closure([module, module, Called(module)])) == [module]


@pytest.mark.parametrize("holder", [each for each in HOLDERS if each.startswith(CALL_IT)])
@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_gradients_reach_the_weights(kind: Any, holder: str) -> None:
    """A replay would return a result that has none, as if the weights were constants."""
    module, x = nn.Linear(2, 2), torch.empty(3, 2)
    runs = kind(HOLDERS[holder](module), CompilationConfig(capture_device="host"), FULL)
    for grad in (False, False, True, False, True):
        x.copy_(torch.randn(3, 2))
        context = set_forward_context(
            cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(3)
        )
        with torch.set_grad_enabled(grad), context:
            result = runs(x)
        assert torch.equal(result, module(x))
        assert result.requires_grad is grad
    assert (runs.counters.captures, runs.counters.replays) == (1, 2)
    assert runs.counters.plain == {Reason.GRADIENTS: 2}


def test_a_large_vocabulary_costs_nothing() -> None:
    """A tokenizer can be called too, and what it holds cannot hold a module."""
    words = {str(number): number for number in range(20_000)}
    engine, module = Called([words, [*words], set(words)]), nn.Linear(2, 2)
    engine = Called([engine, module])
    assert modules_of(engine) == [module]
    assert len(calls_of(lambda: modules_of(engine))) < 100
