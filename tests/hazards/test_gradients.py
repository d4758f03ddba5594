"""Tensors that require grad, wherever a step reads them: in grad mode results are differentiable.

Ops of a breakable capture skip autograd, and a replay runs none: a result would be detached.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.breakable import FULL, PIECEWISE, step
from lib.front_ends import ROWS, WIDTH, WRAPPERS, settings
from torch import nn

import cgcompile
from cgcompile.reasons import Reason

Step = Callable[..., torch.Tensor]


class Scale(nn.Module):
    """Multiplies by a tensor that is no parameter; so does its method ``run``."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return x * self.weight

    run = forward


class Linear(nn.Module):
    """Multiplies by a parameter or a buffer."""

    def __init__(self, weight: torch.Tensor, buffer: bool = False) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def default(weight: torch.Tensor, by_keyword: bool = False) -> Step:
    def positional(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
        return x * weight

    def keyword(x: torch.Tensor, *, weight: torch.Tensor = weight) -> torch.Tensor:
        return x * weight

    return keyword if by_keyword else positional


def closure(held: Any, read: Callable[[Any], Any] = lambda held: held) -> Step:
    return lambda x: x * read(held)


# From a weight that requires grad: the step, and what it takes beside x.
HOLDERS: dict[str, Callable[[torch.Tensor], tuple[Step, tuple[Any, ...]]]] = {
    "closure": lambda w: (closure(w), ()),
    "list in a closure": lambda w: (closure([w], lambda held: held[0]), ()),
    "object in a closure": lambda w: (closure(SimpleNamespace(w=w), lambda held: held.w), ()),
    "function in a closure": lambda w: ((lambda f: lambda x: f(x))(closure(w)), ()),
    "module in an object": lambda w: (
        closure(SimpleNamespace(inner=Linear(w)), lambda held: held.inner.weight),
        (),
    ),
    "default": lambda w: (default(w), ()),
    "default of a keyword": lambda w: (default(w, by_keyword=True), ()),
    "partial": lambda w: (partial(torch.mul, w), ()),
    "method": lambda w: (Scale(w).run, ()),
    "attribute of a module": lambda w: (Scale(w), ()),
    "parameter": lambda w: (Linear(w), ()),
    "buffer": lambda w: (Linear(w, buffer=True), ()),
    "object that is passed": lambda w: (lambda x, held: x * held.w, (SimpleNamespace(w=w),)),
}


@pytest.mark.parametrize("captured", [False, True], ids=["first in grad mode", "captured before"])
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_step_that_reads_a_tensor_that_requires_grad(
    name: str, holder: str, mode: Any, captured: bool, device: str
) -> None:
    function, more = HOLDERS[holder](torch.rand(WIDTH, device=device, requires_grad=True))
    wrapper = getattr(cgcompile, name)(function, settings(device), mode)
    x = torch.empty(ROWS, WIDTH, device=device)
    for _ in range(3 * captured):
        with torch.no_grad(), step(ROWS, mode):
            torch.testing.assert_close(wrapper(x.uniform_(), *more), function(x, *more))
    for _ in range(2):
        with step(ROWS, mode):
            result = wrapper(x.uniform_(), *more)
        expected = function(x, *more)
        assert result.requires_grad
        torch.testing.assert_close(result, expected)
    counters = wrapper.counters
    assert (counters.captures, counters.replays) == (1 * captured, 2 * captured)
    assert counters.plain == {Reason.GRADIENTS: 2}
    with torch.no_grad(), step(ROWS, mode):  # its graphs stay
        assert not wrapper(x, *more).requires_grad
    assert wrapper.counters.captures == 1


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_step_in_grad_mode_whose_tensors_require_none(name: str, device: str) -> None:
    """An argument that required grad at the capture is another one at a replay."""
    weight = torch.rand(WIDTH, device=device)
    wrapper = getattr(cgcompile, name)(closure(weight), settings(device), FULL)
    x = torch.rand(ROWS, WIDTH, device=device, requires_grad=True)
    with torch.no_grad(), step(ROWS, FULL):
        wrapper(x)
    for _ in range(2):
        with step(ROWS, FULL):
            torch.testing.assert_close(wrapper(x.detach().uniform_()), x.detach() * weight)
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 2)
