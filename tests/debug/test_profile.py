"""Where the time of a replayed step goes, and that measuring changes no step."""

import asyncio
import contextvars
import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from lib.breakable import PIECEWISE, Asked, eager_break_during_capture, in_thread, rand, soft, step
from lib.entry import HOOKED, Hooked, assert_same, batch, compiled_model, marked
from lib.manager import eager, manager, requests
from torch import nn

from cgcompile import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper, CompilationConfig
from cgcompile.debug import profile
from cgcompile.debug.profile import Profile
from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs.sequence import OBSERVERS, observing

pytestmark = pytest.mark.usefixtures("without_gradients")

CONFIG = CompilationConfig(capture_device="host")
KINDS = ("graph", "eager", "graph")
cut = eager_break_during_capture(soft)


def cut_once(x: torch.Tensor) -> torch.Tensor:
    return cut(x.sin()) + 1


def ready(device: str = "cpu") -> tuple[Any, Any, Any, torch.Tensor]:
    """(model, compiled, backend, inputs) that a next call replays."""
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    x = marked(batch(device))
    for _ in range(2):
        compiled(x)
    assert backend.counters.captures == 1
    return model, compiled, backend, x


def test_text_and_data() -> None:
    _, compiled, backend, x = ready()
    # Begin and end of graph, break and graph.
    times = iter([0, 1000, 1000, 4000, 4000, 5000] * 2)
    measured = Profile(backend, clock=lambda: next(times))
    assert_expected_inline(
        str(measured),
        """no step was replayed in this thread; a first call warms up, a second captures""",
    )
    with observing(measured.around):
        compiled(x)
        compiled(x)
    assert_expected_inline(
        str(measured),
        """\
steps 2, 5.0 us of the host each, 60.0% of it in eager breaks
count  host us  share  device us  segment
2      1.0      20.0%  -          cgcompile/piece_0 [num_tokens=6]
2      3.0      60.0%  -          cgcompile/break_1 cgentry::hooked [num_tokens=6]
2      1.0      20.0%  -          cgcompile/piece_2 [num_tokens=6]""",
    )
    data = measured.to_dict()
    assert json.loads(measured.to_json()) == data
    assert (data["steps"], data["step_us"], data["break_share"]) == (2, 5.0, pytest.approx(0.6))
    assert data["segments"][1] == {
        "name": "cgcompile/break_1 cgentry::hooked",
        "kind": "eager",
        "batch": "num_tokens=6",
        "sequence": 0,
        "count": 2,
        "host_us": 3.0,
        "share": 0.6,
        "device_us": None,
    }


def test_every_batch_and_every_step_is_counted(device: str) -> None:
    model, compiled, backend, x = ready(device)
    y = marked(batch(device, 3))
    for _ in range(2):
        compiled(y)
    before = backend.counters.replays
    with profile(compiled) as measured:
        for inputs in (x, y, x, x):
            assert_same(compiled(inputs), model(inputs))
    assert backend.counters.replays == before + 4
    assert measured.steps == 4
    rows = [(row.sequence, row.batch, row.kind, row.count) for row in measured.segments]
    expected = [(0, "num_tokens=6", kind, 3) for kind in KINDS]
    assert rows == [*expected, *((1, "num_tokens=3", kind, 1) for kind in KINDS)]
    assert all(row.host_us > 0 and row.device_us is None for row in measured.segments)
    assert sum(row.share for row in measured.segments) == pytest.approx(1)
    assert 0 < measured.break_share < 1


def test_a_slow_break_shows(hook: Callable[[Any], None]) -> None:
    _, compiled, _, x = ready()
    now = [0]

    def slow(x: torch.Tensor) -> torch.Tensor:
        now[0] += 3000
        return torch.softmax(x, -1)

    def clock() -> int:
        now[0] += 1000
        return now[0]

    hook(slow)
    measured = Profile(compiled, clock=clock)
    with observing(measured.around):
        compiled(x)
    first, middle, last = measured.segments
    assert middle.share == measured.break_share == 4 / 6
    assert first.share == last.share == 1 / 6


def test_replays_outside_of_the_context_are_not_touched() -> None:
    model, compiled, backend, x = ready()
    (recording,) = backend.graphs[-1].recordings
    steps = recording.sequence.steps
    with profile(backend) as measured:
        compiled(x)
        assert recording.sequence.steps is steps
    assert OBSERVERS.get() == ()
    y = batch("cpu")
    assert_same(compiled(y), model(y))
    assert measured.steps == 1
    with profile(backend) as second:
        compiled(x)
    assert (measured.steps, second.steps) == (1, 1)


def test_graphs_that_are_recorded_inside_count_from_their_first_replay() -> None:
    model, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    x = batch("cpu")
    with profile(backend) as measured:
        for _ in range(4):
            assert_same(compiled(x), model(x))
    assert (backend.counters.captures, backend.counters.replays, measured.steps) == (1, 2, 2)


# ------------------------------------------------------------------ whose replays count


def test_only_the_target_counts() -> None:
    _, compiled, backend, x = ready()
    _, other, other_backend, y = ready()
    with profile(compiled) as one, profile(other_backend) as two, profile() as both:
        compiled(x), other(y), other(y)
    assert (one.steps, two.steps, both.steps) == (1, 2, 3)
    with profile(backend.graphs[-1]) as graph:
        compiled(x), other(y)
    assert graph.steps == 1


def test_wrappers_and_raw_captures(device: str) -> None:
    x = rand(device=device)
    wrapper = BreakableCUDAGraphWrapper(cut_once, CONFIG)
    with step(4, PIECEWISE):
        wrapper(x)
        with profile(wrapper) as measured:
            torch.testing.assert_close(wrapper(x), cut_once(x))
    assert tuple(row.kind for row in measured.segments) == KINDS
    assert measured.segments[0].batch == "num_tokens=4"
    capture = BreakableCUDAGraphCapture(device=device)
    with capture:
        result = cut_once(x)
    with profile(capture) as measured:
        capture.replay()
    torch.testing.assert_close(result, cut_once(x))
    names = [row.name for row in measured.segments]
    assert names == ["cgcompile/piece_0", "cgcompile/break_1 soft", "cgcompile/piece_2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_managers(kind: str) -> None:
    graph_manager = manager("FULL", kind)
    graph_manager.capture()
    inputs = requests(3, 2)
    with profile(graph_manager) as measured:
        result = graph_manager.run(inputs)
    model = graph_manager.model
    torch.testing.assert_close(result, eager(getattr(model, "_orig_mod", model), inputs))
    assert (measured.steps, measured.break_share) == (1, 0.0)
    assert [row.batch for row in measured.segments] == ["num_tokens=8, num_reqs=8"]


@pytest.mark.parametrize("copied", [False, True])
def test_another_thread_is_not_measured(copied: bool) -> None:
    """Not even in a copy of the context."""
    _, compiled, backend, x = ready()
    before = backend.counters.replays
    with profile(backend) as measured:
        run = contextvars.copy_context().run if copied else lambda function, x: function(x)
        in_thread(lambda: run(torch.no_grad()(compiled), x))
        assert measured.steps == 0
        compiled(x)
    assert backend.counters.replays - before == 2
    assert measured.steps == 1


def test_a_task_that_goes_on_after_the_profile_is_not_measured_any_more() -> None:
    _, compiled, backend, x = ready()

    async def measure() -> tuple[int, int]:
        left = asyncio.Event()

        async def serve() -> None:
            compiled(x)
            await left.wait()
            compiled(x)

        with profile(backend) as measured:
            task = asyncio.create_task(serve())
            await asyncio.sleep(0)
        inside = measured.steps
        left.set()
        await task
        return inside, measured.steps

    before = backend.counters.replays
    assert asyncio.run(measure()) == (1, 1)
    assert backend.counters.replays - before == 2


def test_bad_targets_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        profile(nn.Linear(2, 2))
    if not torch.cuda.is_available():
        with pytest.raises(CaptureError, match="no graphs here"):
            profile(device_times=True)
    assert OBSERVERS.get() == ()


# ------------------------------------------------------------------ errors, lifetimes, devices


def test_a_step_that_raises_is_not_counted(hook: Callable[[Any], None]) -> None:
    model, compiled, backend, x = ready()

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise Asked("break")

    with profile(backend) as measured:
        hook(refuse)
        with pytest.raises(Asked):
            compiled(x)
        assert (measured.steps, [row.count for row in measured.segments]) == (0, [1, 0, 0])
        hook(torch.cos)
        assert_same(compiled(x), model(x))
    assert (measured.steps, [row.count for row in measured.segments]) == (1, [2, 1, 1])


def test_a_profile_keeps_no_graph_and_no_model_alive() -> None:
    model, compiled, backend, x = ready()
    with profile(compiled) as measured:
        compiled(x)
    sequence = weakref.ref(backend.graphs[-1].recordings[0].sequence)
    backend.release()
    gc.collect()
    assert sequence() is None
    owner = weakref.ref(backend)
    del model, compiled, backend
    torch.compiler.reset()
    gc.collect()
    assert owner() is None
    assert (measured.steps, len(measured.segments)) == (1, 3)


@pytest.mark.gpu
def test_times_of_the_device() -> None:
    model, compiled, backend, x = ready("cuda")
    with profile(backend, device_times=True) as measured:
        for _ in range(3):
            assert_same(compiled(x), model(x))
    assert measured.steps == 3
    assert all(row.device_us is not None and row.device_us > 0 for row in measured.segments)
