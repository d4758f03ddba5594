"""Looking at a model leaves what it writes as it was, wherever the model keeps it."""

from typing import Any

import pytest
import torch
from cases import D
from torch import nn
from verify_support import LAYOUT, attention, built, config, rows

import cgcompile
from cgcompile.observe.memory import Keeping, Memory


class Counts(nn.Module):
    """Writes a frozen parameter, an attribute and a list of its own; the result tells how often."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.weight = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.cache, self.more = torch.zeros(D), [torch.zeros(LAYOUT)]

    def forward(self, x):
        self.cache.add_(1)
        self.weight.add_(self.cache)
        self.more[0].sub_(1)
        return attention(self.first(x)) + self.weight + self.more[0]


def state(model: Counts) -> list[torch.Tensor]:
    return [each.detach().clone() for each in (model.weight, model.cache, *model.more)]


@pytest.mark.parametrize("look", [cgcompile.verify, cgcompile.bisect])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_model_writes_of_its_own(look: Any, compiled: bool) -> None:
    model, x = built(Counts, "cpu"), rows("cpu")
    before = state(model)
    if compiled:
        found = look(cgcompile.compile(model, config()), x)
    else:
        found = look(model, x, config=config())
    assert found.ok, found
    assert found.replays >= 3
    assert all(map(torch.equal, state(model), before))
    with torch.no_grad():
        model(x)
    assert not any(map(torch.equal, state(model), before))


def test_only_what_is_asked_for_is_copied() -> None:
    mine, others = torch.zeros(4), torch.zeros(4)
    memory = Memory([mine], alone=True)
    with Keeping(memory):
        mine.add_(1)
        others.add_(1)
    assert memory.was_written(mine)
    assert not memory.was_written(others)
    memory.put_back()
    assert (mine.sum(), others.sum()) == (0, 4)
