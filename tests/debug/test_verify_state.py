"""Looking at a model leaves what it writes as it was, wherever the model keeps it."""

from functools import partial
from typing import Any

import pytest
import torch
from lib.cases import D
from lib.debug import FULL, step
from lib.faulty_models import LAYOUT, attention, built, config, rows
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CUDAGraphWrapper
from cgcompile.debug.restore import Snapshot, WriteObserver


class Pages:
    """Has no ``__dict__``."""

    __slots__ = ("__own", "table")

    def __init__(self) -> None:
        self.table, self.__own = torch.zeros(D), torch.zeros(D)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.table, self.__own]


class Counts(nn.Module):
    """Writes a frozen parameter, attributes, a list and slots; the result tells how often."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.weight = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.cache, self.more = torch.zeros(D), [torch.zeros(LAYOUT)]
        self.pages = Pages()

    def forward(self, x):
        self.cache.add_(1)
        self.weight.add_(self.cache)
        self.more[0].sub_(1)
        for table in self.pages.tensors:
            table.add_(2)
            x = x + table
        return attention(self.first(x)) + self.weight + self.more[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.cache, *self.more, *self.pages.tensors]


def state(model: Counts) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.tensors]


@pytest.mark.parametrize("look", [cgcompile.verify, partial(cgcompile.verify, bisect=True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_model_writes_of_its_own(look: Any, compiled: bool) -> None:
    model, x = built(Counts, "cpu"), rows("cpu")
    before = state(model)
    if compiled:
        verdict = look(cgcompile.compile(model, config()), x)
    else:
        verdict = look(model, x, config=config())
    assert verdict.ok, verdict
    assert verdict.replays >= 3
    assert all(map(torch.equal, state(model), before))
    with torch.no_grad():
        model(x)
    assert not any(map(torch.equal, state(model), before))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
@pytest.mark.parametrize("look", [cgcompile.verify, partial(cgcompile.verify, bisect=True)])
def test_verifying_a_wrapper_is_no_step(look: Any, kind: Any, compiled: bool) -> None:
    model, x = built(Counts, "cpu"), rows("cpu")
    run = torch.compile(model, backend="eager") if compiled else model
    wrapper, factor = kind(run, config(checks="-state"), FULL), [2.0]
    before = state(model)
    model.register_forward_hook(lambda _, args, result: result * factor[0])
    with torch.inference_mode(), step():
        verdict = look(wrapper, x)
        assert verdict.ok, verdict
        assert all(map(torch.equal, state(model), before))
        factor[0] = 3.0
        assert not look(wrapper, x).ok
    assert all(map(torch.equal, state(model), before))


def test_only_what_is_asked_for_is_copied() -> None:
    mine, others = torch.zeros(4), torch.zeros(4)
    memory = Snapshot([mine], alone=True)
    with WriteObserver(memory):
        mine.add_(1)
        others.add_(1)
    assert memory.was_written(mine)
    assert not memory.was_written(others)
    memory.restore()
    assert (mine.sum(), others.sum()) == (0, 4)
