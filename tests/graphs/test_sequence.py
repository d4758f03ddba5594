"""Segments in order: what a replay runs, and what it keeps."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import TestCase
from lib.breakable import Asked, Stack, counted, rand, same, soft, step
from lib.cases import library
from lib.entry import HOOKED, Hooked, assert_same, batch, compiled_model, marked
from torch import nn

from cgcompile import BatchDescriptor, BreakableCUDAGraphWrapper, CompilationConfig
from cgcompile.graphs import GraphSequence
from cgcompile.graphs.sequence import EagerSegment, GraphSegment, Slot

# ---------------------------------------------------------------- sequences made by hand


def graph(name: str, log: list[Any], run: Any = None) -> GraphSegment:
    def replay() -> None:
        log.append(name)
        if run is not None:
            run()

    return GraphSegment(name, SimpleNamespace(replay=replay))


class Value:
    """Something that can be watched dying."""


class Texts(TestCase):
    def test_text(self) -> None:
        log: list[Any] = []
        segments = (
            graph("piece 0", log),
            EagerSegment("attend (model.py:3)", log.append, (1,)),
            graph("piece 2", log),
        )
        sequence = GraphSequence(segments)
        self.assertExpectedInline(
            sequence.text(),
            """\
graph piece 0
eager attend (model.py:3)
graph piece 2""",
        )
        assert GraphSequence(()).text() == ""
        assert (sequence.num_graphs, sequence.num_eager_breaks) == (2, 1)
        assert (GraphSequence(()).num_graphs, GraphSequence(()).num_eager_breaks) == (0, 0)
        assert sequence.segments == segments
        assert len(sequence.steps) == 3


def test_segments_run_in_order_with_what_is_bound() -> None:
    log: list[Any] = []

    def eager(*args: Any, **kwargs: Any) -> None:
        log.append((args, kwargs))

    sequence = GraphSequence(
        [graph("a", log), EagerSegment("b", eager, (1, "x"), {"k": 2}), graph("c", log)]
    )
    for _ in range(2):
        assert sequence.replay() == []
        assert log == ["a", ((1, "x"), {"k": 2}), "c"]
        log.clear()


def test_slots_carry_values_from_inputs_and_between_segments() -> None:
    seen: list[Any] = []
    x, y, total = Slot(0), Slot(1), Slot(2)
    sequence = GraphSequence(
        [
            EagerSegment("add", lambda a, n, b: (a + n + b,), (x, 10, y), stores=((0, total),)),
            EagerSegment("look", lambda a, k: seen.append((a, k)), (total,), {"k": "bound"}),
        ],
        inputs=[(y, 0), (x, 2)],
        slots=3,
        kept=[total],
    )
    for a, b in ((1, 2), (3, 4)):
        slots = sequence.replay([b, "nobody reads this", a])
        assert seen.pop() == (a + 10 + b, "bound")
        assert slots[2] == a + 10 + b
        sequence.clear()
        assert sequence.slots == [None] * 3


def test_a_slot_is_emptied_by_the_last_segment_that_uses_it() -> None:
    lives: list[Any] = []
    alive: list[list[bool]] = []

    def make() -> tuple[Value]:
        value = Value()
        lives.append(weakref.ref(value))
        return (value,)

    def look(*_: Any) -> tuple[()]:
        alive.append([life() is not None for life in lives])
        return ()

    never, once, twice, kept = (Slot(k) for k in range(4))
    sequence = GraphSequence(
        [
            *[EagerSegment("make", make, stores=((0, each),)) for each in (never, once)],
            *[EagerSegment("make", make, originals=((0, each),)) for each in (twice, kept)],
            graph("a", [], look),
            EagerSegment("b", look, (once, twice)),
            graph("c", [], look),
            EagerSegment("d", look, (twice,)),
            graph("e", [], look),
        ],
        slots=4,
        kept=[kept],
    )
    for _ in range(2):
        slots = sequence.replay()
        gone = [False]
        assert alive == [
            [*gone, True, True, True],
            [*gone, True, True, True],
            [*gone, False, True, True],
            [*gone, False, True, True],
            [*gone, False, False, True],
        ]
        assert slots[3] is lives[3]()
        sequence.clear()
        look()
        assert alive.pop() == [False] * 4
        lives.clear(), alive.clear()


def test_inputs_are_kept_for_one_step_and_no_longer() -> None:
    sequence = GraphSequence(
        [EagerSegment("a", lambda x: None, (Slot(0),)), graph("b", [])], [(Slot(0), 0)], 1
    )
    value = Value()
    life = weakref.ref(value)
    assert sequence.replay([value])[0] is value
    sequence.clear()
    del value
    assert life() is None


@pytest.mark.parametrize("kind", [Asked, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_slots_are_empty_after_an_exception(failing, kind) -> None:
    def eager(number: int, value: Any) -> tuple[Any]:
        if number == failing:
            raise kind
        return (value,)

    slots = [Slot(k) for k in range(4)]
    sequence = GraphSequence(
        [EagerSegment(f"{k}", eager, (k, slots[k]), stores=((0, slots[k + 1]),)) for k in range(3)],
        [(slots[0], 0)],
        4,
        [slots[3]],
    )
    held = sequence.slots
    value = Value()
    life = weakref.ref(value)
    try:
        sequence.replay([value])
    except kind:
        pass
    else:
        raise AssertionError("nothing was raised")
    assert sequence.slots is held
    assert sequence.slots == [None] * 4
    del value
    gc.collect()
    assert life() is None
    failing = 3
    assert sequence.replay(["again"])[3] == "again"


def test_originals_are_taken_before_and_stores_after_the_crossings() -> None:
    before, after = Slot(0), Slot(1)
    originals: list[Any] = []

    def cross(values: list[Any]) -> None:
        originals.append(values[1])
        values[1] = "bridge"

    sequence = GraphSequence(
        [
            EagerSegment(
                "make",
                lambda: {"a": 1, "b": "fresh"},
                leaves=lambda made: list(made.values()),
                originals=((1, before),),
                crossings=(cross,),
                stores=((1, after),),
            )
        ],
        slots=2,
        kept=[before, after],
    )
    assert sequence.replay() == ["fresh", "bridge"]
    assert originals == ["fresh"]


@pytest.mark.parametrize("real", [None, 0, 2, 4])
def test_rows_that_are_not_real_are_zeroed_before_graphs_read_them(real) -> None:
    tails, seen = [torch.zeros(4, 2), torch.zeros(4)], []
    sequence = GraphSequence(
        [
            EagerSegment("fill", lambda: [t.fill_(7) for t in tails], tails=tuple(tails)),
            graph("read", [], lambda: seen.extend(t.clone() for t in tails)),
        ],
        rows=4,
    )
    for _ in range(2):
        sequence.replay((), real)
        rows = 4 if real is None else real
        expected = [7.0] * rows + [0.0] * (4 - rows)
        assert [each.reshape(4, -1)[:, 0].tolist() for each in seen] == [expected] * 2
        seen.clear()


def test_the_number_of_real_rows_is_that_of_each_replay() -> None:
    tail = torch.zeros(4)
    sequence = GraphSequence([EagerSegment("fill", lambda: [tail.fill_(1)], tails=(tail,))], rows=4)
    for real in (3, None, 1, 4, None, 0):
        sequence.replay((), real)
        assert tail.sum() == (4 if real is None else real)


@pytest.mark.parametrize("real", [None, 1])
def test_an_observer_sees_each_segment_and_runs_the_same(real) -> None:
    tail, seen, log = torch.zeros(2), [], []
    sequence = GraphSequence(
        [
            graph("a", log),
            EagerSegment(
                "b", lambda x: [x, tail.fill_(x)], (Slot(0),), stores=((0, Slot(1)),), tails=(tail,)
            ),
            graph("c", log),
        ],
        [(Slot(0), 0)],
        2,
        [Slot(1)],
        rows=2,
    )

    def run(index: int, step: Callable[[], None]) -> None:
        step()
        seen.append((index, tail.tolist()))

    slots = sequence.replay([5.0], real, run)
    assert log == ["a", "c"]
    assert slots == [5.0, 5.0]
    filled = [5.0, 5.0 if real is None else 0.0]
    assert seen == [(0, [0.0, 0.0]), (1, filled), (2, filled)]


# ---------------------------------------------------------------- sequences that were recorded


class Masked(nn.Module):
    """Two hooked operators; one reads an input that no graph reads."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = Hooked()

    def forward(self, x, table):
        return self.hooked(x) + torch.ops.cgentry.hooked(table)


def recordings(backend: Any) -> list[Any]:
    return [each for graph in backend.graphs for each in graph.recordings]


@pytest.mark.usefixtures("without_gradients")
def test_text_of_a_compiled_step(device: str) -> None:
    _model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    for k in range(2):
        compiled(marked(batch(device)) if k == 0 else batch(device))
    (recording,) = recordings(backend)
    names = [piece.name for piece in backend.graphs[0].split.pieces]
    assert len(names) == 3
    kinds = ("graph", "eager", "graph")
    expected = [f"{kind} {name}" for kind, name in zip(kinds, names, strict=True)]
    assert recording.sequence.text().splitlines() == expected
    assert (recording.sequence.num_graphs, recording.sequence.num_eager_breaks) == (2, 1)


def test_text_of_a_wrapped_step(device: str) -> None:
    library()
    config = CompilationConfig(capture_device="host", splitting_ops=("cgtest::attend",))
    wrapper = BreakableCUDAGraphWrapper(Stack(2, 8).to(device), config, name="block")
    with step(4):
        wrapper(rand(device=device))
    sequence = wrapper.concrete_cudagraph_entries[BatchDescriptor(4)].sequence
    first, *rest = sequence.text().splitlines()
    assert first.startswith("graph block")
    assert [each.split()[0] for each in rest] == ["eager", "graph", "eager", "graph"]
    assert all("cgtest::attend" in each for each in (rest[0], rest[2]))
    assert (sequence.num_graphs, sequence.num_eager_breaks) == (3, 2)


def assert_nothing_is_kept(backend: Any) -> None:
    for recording in recordings(backend):
        assert set(recording.sequence.slots) <= {None}


@pytest.mark.usefixtures("without_gradients")
def test_a_live_input_dies_after_its_step(device: str) -> None:
    model, compiled, backend = compiled_model(Masked, device, **HOOKED)
    for k in range(5):
        x, table = batch(device), batch(device)
        if k == 0:
            marked(x), marked(table)
        lives = [weakref.ref(x), weakref.ref(table)]
        assert_same(compiled(x, table), model(x, table))
        assert_nothing_is_kept(backend)
        del x, table
        if k:  # compiling may keep examples
            assert [life() for life in lives] == [None, None]
    assert (backend.counters.captures, backend.counters.replays) == (1, 3)


@pytest.mark.usefixtures("without_gradients")
def test_a_live_input_dies_after_a_step_that_raised(device: str, hook) -> None:
    model, compiled, backend = compiled_model(Masked, device, **HOOKED)

    def fails(x):
        raise Asked

    for k in range(3):
        x, table = batch(device), batch(device)
        compiled(marked(x) if k == 0 else x, marked(table) if k == 0 else table)
    for _ in range(2):
        x, table = batch(device), batch(device)
        lives = [weakref.ref(x), weakref.ref(table)]
        hook(fails)
        try:
            compiled(x, table)
        except Asked:
            pass
        else:
            raise AssertionError("nothing was raised")
        hook(soft)
        assert_nothing_is_kept(backend)
        del x, table
        gc.collect()
        assert [life() for life in lives] == [None, None]
        x, table = batch(device), batch(device)
        assert_same(compiled(x, table), model(x, table))
    assert backend.counters.failures == 2


@pytest.mark.usefixtures("without_gradients")
def test_what_an_eager_segment_makes_dies_with_its_step(device: str, hook) -> None:
    lives = []

    def makes(x):
        shares = torch.softmax(x, -1)
        lives.append(weakref.ref(shares))
        return shares

    hook(makes)
    model, compiled, backend = compiled_model(Masked, device, **HOOKED)
    for k in range(5):
        x, table = batch(device), batch(device)
        result = compiled(marked(x) if k == 0 else x, marked(table) if k == 0 else table)
        if k:
            assert [life() for life in lives] == [None] * 2
        lives.clear()
        assert_same(result, model(x, table))
        lives.clear()
    assert (backend.counters.captures, backend.counters.replays) == (1, 3)


def test_what_a_break_of_a_wrapper_makes_dies_with_its_step(device: str) -> None:
    lives = []

    def makes(x):
        shares = torch.softmax(x, -1)
        lives.append(weakref.ref(shares))
        return shares

    cut, _ = counted(makes)
    wrapper = BreakableCUDAGraphWrapper(
        lambda x: cut(x + 1) * 2 + cut(x), CompilationConfig(capture_device="host")
    )
    x = rand(device=device)
    for _ in range(4):
        x.uniform_()
        with step(4):
            result = wrapper(x)
        assert [life() for life in lives] == [None] * 2
        assert same(result, soft(x + 1) * 2 + soft(x))
        lives.clear()
