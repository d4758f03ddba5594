"""The shortest way through a compiled step: what it asks each time, and how many calls it takes."""

import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.asserts import watched
from lib.entry import Hook
from lib.fast_paths import FULL, NONE, PIECEWISE, ROWS, Engine

import cgcompile
from cgcompile import BatchDescriptor
from cgcompile.errors import AddressChangedError, CaptureError, HostValueChangedError
from cgcompile.graphs.profiling import observing


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# ---------------------------------------------------------------- how many calls


def calls_of(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """How often each function of Python, and of C, was called; none of the recorder's own."""
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    depth = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth
        inside = depth > 0
        if event == "call" and (inside or frame.f_code.co_name in ("replay_steps", "attend")):
            depth += 1
        elif event == "return" and inside:
            depth -= 1
        if inside or depth > 1:
            return
        if event == "call":
            python[frame.f_code.co_name] += 1
        elif event == "c_call":
            native[argument.__name__] += 1

    watched(run, seen)
    del native["setprofile"]
    return python, native


def without_graphs(engine: Engine) -> None:
    """Let the graphs be functions of C that do nothing: what is left is our own."""
    (recording,) = engine.graph.recordings
    sequence, nothing = recording.sequence, {}.clear
    kinds = [type(each).__name__ for each in sequence.segments]
    sequence.steps = sequence._padded_steps = tuple(
        nothing if kind == "GraphSegment" else step
        for kind, step in zip(kinds, sequence.steps, strict=True)
    )
    engine.graph.turn.forget()  # what holds the graph's own replay
    for _ in range(2):
        engine.step()


@pytest.mark.parametrize("layers", [1, 6])
def test_a_full_step_takes_as_many_calls_as_there_are_questions(layers: int) -> None:
    engine = Engine(layers)
    without_graphs(engine)
    python, native = calls_of(engine.step)
    assert engine.graph.turn.replays >= 2
    assert python.total() <= 8, python  # of them one of this test, two of the host device
    assert native.total() <= 18, native
    assert python["replay"] == python["fits"] == python["forward"] == 0, python
    assert native["is_grad_enabled"] == native["check"] == 1, native


def test_another_step_takes_few_calls_more() -> None:
    engine = Engine(1)
    contexts = engine.context, engine.context_of(FULL, ROWS - 1)
    views = engine.x, engine.x[:-1]
    for _ in range(4):
        for x, context in zip(views, contexts, strict=True):
            engine.step(x, context)
    before = engine.graph.turn.replays
    same, _ = calls_of(lambda: engine.step(views[1], contexts[1]))
    python, _ = calls_of(lambda: engine.step(views[0], contexts[0]))
    assert engine.graph.turn.replays == before + 2
    assert python - same == {"step": 1, "switched": 1, "__hash__": 1}
    engine.step(views[1], contexts[1])
    again, _ = calls_of(lambda: engine.step(views[1], contexts[1]))
    assert again == same, "the step before is the one that is tried first"


def test_a_break_takes_the_calls_of_its_op() -> None:
    found = []
    for layers in (1, 6):
        engine = Engine(layers, PIECEWISE, hooked=False)
        without_graphs(engine)
        found.append(calls_of(engine.step))
    (few, few_native), (many, many_native) = found
    assert many - few == {"attend": 5}, "no function of ours for any of them"
    assert many_native - few_native == {"clear": 5}, "nothing but the graphs"


# ---------------------------------------------------------------- what is asked


def test_the_same_step_again() -> None:
    engine = Engine()
    assert engine.short(engine.step)
    assert engine.short(lambda: engine.step(context=engine.context_of(FULL)))  # an equal descriptor
    assert engine.short(lambda: engine.step(engine.x[:]))  # another object at the same place
    (recording,) = engine.graph.recordings
    replays = recording.sequence.stats.replays
    assert engine.short(engine.step)
    assert recording.sequence.stats.replays == replays + 1
    assert engine.backend.counters.calls == engine.backend.counters.replays + 2  # warming, capture


def test_another_mode_or_batch() -> None:
    engine = Engine()
    assert not engine.short(lambda: engine.step(context=engine.context_of(NONE)))
    assert engine.short(engine.step)
    assert not engine.short(lambda: engine.step(context=engine.context_of(PIECEWISE)))
    other = engine.context_of(FULL, ROWS - 1)
    assert not engine.short(lambda: engine.step(context=other))


def test_gradients_and_autocast() -> None:
    engine = Engine()
    with torch.enable_grad():
        assert not engine.short(engine.step)
        engine.x.requires_grad_()
        result = engine.step()
        assert result.requires_grad
        engine.x.requires_grad_(False)
    assert engine.short(engine.step)
    with torch.autocast("cpu", torch.bfloat16):
        before = engine.graph.turn.replays
        engine.compiled(engine.x)
        assert engine.graph.turn.replays == before


def test_inside_of_a_capture() -> None:
    engine = Engine()
    device = engine.graph.pool.device
    outer = device.new_graph()
    results: list[torch.Tensor] = []
    pool = device.new_pool(None)
    outer.begin(pool)
    try:
        before = engine.graph.turn.replays
        results.append(engine.step())
        assert engine.graph.turn.replays == before
    finally:
        outer.end()


def test_an_input_elsewhere_or_of_another_size() -> None:
    engine = Engine()
    with pytest.raises(AddressChangedError, match="'x'"):
        engine.step(engine.x.clone())
    with pytest.raises(HostValueChangedError):
        engine.step(engine.x[: ROWS - 1])
    assert engine.short(engine.step)


def test_released_graphs() -> None:
    engine = Engine()
    engine.backend.release()
    assert not engine.short(engine.step)


def test_graphs_that_somebody_else_dropped() -> None:
    engine = Engine()
    engine.graph.pool.release()
    assert not engine.short(engine.step)


def test_weights_that_died() -> None:
    engine = Engine()
    (binding,) = engine.graph.bindings
    binding.let_go()
    assert engine.graph.turn.again is None
    assert engine.graph.turn.short is None
    assert not engine.short(engine.step)


def test_somebody_who_observes() -> None:
    engine = Engine()
    seen: list[Any] = []

    def observer(program: Any, recording: Any, inputs: tuple[Any, ...], real: Any) -> Any:
        seen.append(len(inputs))
        return recording.replay(inputs, real)

    engine.graph.observe(observer)
    assert not engine.short(engine.step)
    assert seen == [len(engine.graph.split.inputs)]  # the frozen ones are among them


def test_ranges_are_seen() -> None:
    engine, seen = Engine(), []

    def around(sequence: Any, index: int | None) -> Any:
        seen.append(index)
        return torch.no_grad()

    with observing(around):
        assert engine.short(engine.step)
    assert seen == [None, 0]


def test_stale_memory_shows() -> None:
    engine = Engine(poison=True)
    result = engine.step()
    without_graphs(engine)
    assert not engine.step().isfinite().any()
    assert result.data_ptr() == engine.step().data_ptr()


def test_a_step_within_a_step() -> None:
    engine = Engine(mode=PIECEWISE)
    plain = Hook.function
    try:
        Hook.function = lambda x: engine.step()
        with pytest.raises(CaptureError, match="inside"):
            engine.step()
    finally:
        Hook.function = plain
    assert engine.graph.turn.owner == 0
    assert engine.short(engine.step)


def test_one_step_at_a_time() -> None:
    engine = Engine()
    done: list[torch.Tensor] = []

    def other() -> None:
        with torch.no_grad():
            done.append(engine.step())

    thread = threading.Thread(target=other)
    with engine.graph.turn.lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not done
    thread.join(10)
    assert len(done) == 1


def test_a_context_that_another_thread_copied() -> None:
    engine = Engine()
    before = engine.graph.turn.replays

    def other() -> None:
        with torch.no_grad():
            engine.compiled(engine.x)

    with engine.context:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(other,))
        thread.start()
        thread.join(10)
        assert engine.graph.turn.replays == before
        engine.compiled(engine.x)
    assert engine.graph.turn.replays == before + 1


def test_rows_that_are_padding() -> None:
    engine = Engine()
    real = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL,
        batch_descriptor=BatchDescriptor(ROWS),
        num_unpadded_tokens=ROWS - 5,
    )
    assert engine.short(lambda: engine.step(context=real))
    (recording,) = engine.graph.recordings
    assert recording.sequence.stats.padding == 5


def test_weights_changed_in_place() -> None:
    engine = Engine(2, PIECEWISE)
    assert engine.short(engine.step)
    engine.model.cache_0.mul_(2)
    engine.model.layers[1].after.weight.mul_(2)
    assert engine.short(engine.step)
    with torch.enable_grad():  # the parameters themselves, and the same numbers
        assert not engine.short(engine.step)
