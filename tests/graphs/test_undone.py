"""What a call changes is put back, wherever it is, and in the right order."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from cgcompile.debug.restore import Snapshot, State, restored_after


class Runs(nn.Module):
    """Holds what it is given, and runs a function on itself."""

    def __init__(self, run: Any, **held: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self) -> None:
        self.run(self)


def undone(model: Any) -> None:
    with restored_after(state=State(model, ((), {}))):
        model()


@pytest.mark.parametrize("second", [slice(2, None), slice(0, 2), slice(0, 8)])
@pytest.mark.parametrize("first", [slice(2, None), slice(0, 2), slice(0, 8)])
def test_storages_that_lie_over_one_another(first: slice, second: slice) -> None:
    """Numpy gives each view of an array a storage of its own."""
    memory = np.arange(8.0)
    before = memory.copy()

    def writes(held: Any) -> None:
        held.one.add_(1)
        held.two.add_(1)
        assert not (memory == before).all()

    undone(Runs(writes, one=torch.from_numpy(memory[first]), two=torch.from_numpy(memory[second])))
    assert (memory == before).all()


class Closed(list):  # type: ignore[type-arg]
    """Refuses what nobody but its owner may do."""

    def clear(self) -> None:
        raise AssertionError

    def extend(self, more: Any) -> None:
        raise AssertionError


class Lower(dict):  # type: ignore[type-arg]
    """Its keys are other ones than it holds."""

    def keys(self) -> Any:
        return [key.lower() for key, _ in super().items()]

    def __iter__(self) -> Any:
        return iter(self.keys())


def test_methods_of_subclasses_are_not_called() -> None:
    def writes(held: Any) -> None:
        held.log.append(2)
        dict.__setitem__(held.table, "A", 3)

    model = Runs(writes, log=Closed([1]), table=Lower({"A": 1}))
    undone(model)
    assert list(model.log) == [1]
    assert list(model.table.values()) == [1]


class Base:
    __slots__ = ("value",)


class Derived(Base):
    __slots__ = ("value",)


def test_a_slot_that_hides_another_one() -> None:
    held = Derived()
    held.value = 1
    Base.value.__set__(held, 2)

    def writes(held: Any) -> None:
        held.held.value = 3
        Base.value.__set__(held.held, 4)

    undone(Runs(writes, held=held))
    assert (held.value, Base.value.__get__(held)) == (1, 2)


def pair(value: float) -> TwoTensor:
    return TwoTensor(torch.full((4,), value), torch.full((4,), value))


@pytest.mark.parametrize("named", [False, True])
def test_tensors_inside_of_a_subclass(named: bool) -> None:
    """Written through the subclass, seen as an op or, where it is named, not."""
    model = Runs(lambda held: held.cache.add_(1), cache=pair(2.0))
    state = None if named else State(model, ((), {}))
    with restored_after([model.cache] if named else (), state=state):
        model()
        assert (model.cache.a == 3).all()
        assert (model.cache.b == 3).all()
    assert (model.cache.a == 2).all()
    assert (model.cache.b == 2).all()


@pytest.mark.parametrize("kind", [set, frozenset, tuple])
def test_tensors_inside_of_a_container(kind: Any) -> None:
    cache = torch.ones(2)
    undone(Runs(lambda held: [each.add_(1) for each in held.caches], caches=kind([cache])))
    assert cache.tolist() == [1, 1]


def test_random_numbers_come_again() -> None:
    with restored_after():
        drawn = random.random(), torch.rand(2)
    assert random.random() == drawn[0]
    assert torch.equal(torch.rand(2), drawn[1])


class Counting:
    calls = 0

    def around(self, function: Any) -> Any:
        def counted(module: Any) -> None:
            self.calls += 1
            function(module)

        return counted


def test_a_decorator_with_a_self_of_its_own() -> None:
    counting = Counting()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.cache = 0, torch.zeros(2)

        @counting.around
        def forward(self) -> None:
            self.steps += 1
            self.cache.add_(1)

    model = Model()
    undone(model.forward)
    assert (model.steps, model.cache.sum().item(), counting.calls) == (0, 0, 0)


def test_names_around_a_function_are_bound_as_before() -> None:
    steps, cache = 0, torch.zeros(2)
    held = cache

    def step() -> None:
        nonlocal steps, cache
        steps, cache = steps + 1, cache + 1

    undone(step)
    assert steps == 0
    assert cache is held


def test_generators_draw_again_what_they_drew() -> None:
    source = torch.Generator()
    model = Runs(lambda held: held.drawn.append(torch.rand(4, generator=source)), drawn=[])
    state = source.get_state()
    undone(model)
    assert torch.equal(source.get_state(), state)


def test_memory_is_put_back_whatever_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Runs(lambda held: held.cache.add_(1), cache=torch.zeros(2))

    def fails(self: Any) -> None:
        raise OSError("as asked")

    monkeypatch.setattr("cgcompile.debug.restore.State.restore", fails)
    with pytest.raises(OSError, match="as asked"):
        undone(model)
    assert not model.cache.any()


def test_what_was_written_is_known_until_then() -> None:
    known = torch.zeros(2)
    memory = Snapshot([known])
    memory.before_write([known])
    assert memory.was_written(known)
    memory.restore()
    assert not memory.was_written(known)
