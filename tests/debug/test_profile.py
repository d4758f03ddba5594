"""Where the time of a replayed step goes, and that measuring changes no step."""

import asyncio
import contextvars
import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import TestCase
from lib.breakable import (
    PIECEWISE,
    Asked,
    eager_break_during_capture,
    in_thread,
    rand,
    soft,
    step,
)
from lib.entry import HOOKED, Hooked, assert_same, batch, compiled_model, marked
from lib.manager import eager, manager, requests
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper, CompilationConfig
from cgcompile.debug.profile import Profile
from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs.profiling import OBSERVERS, observing

pytestmark = pytest.mark.usefixtures("without_gradients")

CONFIG = CompilationConfig(capture_device="host")
cut = eager_break_during_capture(soft)


def cut_once(x: torch.Tensor) -> torch.Tensor:
    return cut(x.sin()) + 1


def ready(device: str, size: int = 6) -> tuple[Any, Any, Any, torch.Tensor]:
    """(model, compiled, backend, inputs) that a next call replays."""
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    x = marked(batch(device, size))
    for _ in range(2):
        compiled(x)
    assert backend.counters.captures == 1
    return model, compiled, backend, x


class Texts(TestCase):
    def test_text(self) -> None:
        _, compiled, backend, x = ready("cpu")
        # Reads: step, graph, graph, break, break, graph, graph, step.
        times = iter([0, 0, 1000, 1000, 4000, 4000, 5000, 5000] * 2)
        found = Profile(backend, clock=lambda: next(times))
        with observing(found.around):
            compiled(x)
            compiled(x)
        self.assertExpectedInline(
            str(found),
            """\
steps 2, 5.0 us of the host each, 60.0 % of it in eager breaks
  count    host us    share  device us  segment
      2        1.0   20.0 %          -  cgcompile/piece_0 [num_tokens=6]
      2        3.0   60.0 %          -  cgcompile/break_1 cgentry::hooked [num_tokens=6]
      2        1.0   20.0 %          -  cgcompile/piece_2 [num_tokens=6]""",
        )
        assert (found.steps, found.step_us) == (2, 5.0)
        assert found.break_share == pytest.approx(0.6)
        assert [each.count for each in found.segments] == [2, 2, 2]
        assert json.loads(found.to_json()) == found.to_dict()
        assert found.to_dict()["segments"][1] == {
            "name": "cgcompile/break_1 cgentry::hooked",
            "kind": "eager",
            "batch": "num_tokens=6",
            "sequence": 0,
            "count": 2,
            "host_us": 3.0,
            "share": 0.6,
            "device_us": None,
        }

    def test_nothing_was_replayed(self) -> None:
        self.assertExpectedInline(
            str(Profile()),
            """no step was replayed in this thread; a first call warms up, a second captures""",
        )


def test_every_batch_and_every_step_is_counted(device: str) -> None:
    model, compiled, backend, x = ready(device)
    y = marked(batch(device, 3))
    for _ in range(2):
        compiled(y)
    before = backend.counters.replays
    with cgcompile.debug.profile(compiled) as found:
        for each in (x, y, x, x):
            assert_same(compiled(each), model(each))
    assert backend.counters.replays == before + 4
    assert found.steps == 4
    rows = [(row.sequence, row.batch, row.kind, row.count) for row in found.segments]
    kinds = ("graph", "eager", "graph")
    assert rows == [(0, "num_tokens=6", k, 3) for k in kinds] + [
        (1, "num_tokens=3", k, 1) for k in kinds
    ]
    assert all(row.host_us > 0 and row.device_us is None for row in found.segments)
    assert 0.5 < sum(row.share for row in found.segments) <= 1.0
    assert 0 < found.break_share < 1


def test_a_slow_break_shows(hook: Callable[[Any], None]) -> None:
    _, compiled, _, x = ready("cpu")

    def slow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = torch.softmax(x, -1)
        return x

    hook(slow)
    with cgcompile.debug.profile(compiled) as found:
        compiled(x)
    first, middle, last = found.segments
    assert middle.share == found.break_share > first.share + last.share


def test_replays_outside_of_the_context_are_not_touched() -> None:
    model, compiled, backend, x = ready("cpu")
    (recording,) = backend.graphs[-1].recordings
    steps = recording.sequence.steps
    with cgcompile.debug.profile(backend) as found:
        compiled(x)
        assert recording.sequence.steps is steps
    assert OBSERVERS.get() == ()
    new = batch("cpu")
    assert_same(compiled(new), model(new))
    assert found.steps == 1
    with cgcompile.debug.profile(backend) as again:
        compiled(x)
    assert (found.steps, again.steps) == (1, 1)


def test_graphs_that_are_recorded_inside_count_from_their_first_replay() -> None:
    model, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    x = batch("cpu")
    with cgcompile.debug.profile(backend) as found:
        for _ in range(4):
            assert_same(compiled(x), model(x))
    assert (backend.counters.captures, backend.counters.replays, found.steps) == (1, 2, 2)


def test_only_the_target_counts() -> None:
    _, compiled, backend, x = ready("cpu")
    _, other, other_backend, y = ready("cpu")
    with (
        cgcompile.debug.profile(compiled) as one,
        cgcompile.debug.profile(other_backend) as two,
        cgcompile.debug.profile() as all_of_them,
    ):
        compiled(x), other(y), other(y)
    assert (one.steps, two.steps, all_of_them.steps) == (1, 2, 3)
    with cgcompile.debug.profile(backend.graphs[-1]) as graph:
        in_thread(lambda: compiled(x))
        assert graph.steps == 0, "another thread is not seen"
        compiled(x), other(y)
    assert graph.steps == 1


def test_wrappers_and_raw_captures(device: str) -> None:
    x = rand(device=device)
    wrapper = BreakableCUDAGraphWrapper(cut_once, CONFIG)
    with step(4, PIECEWISE):
        wrapper(x)
        with cgcompile.debug.profile(wrapper) as found:
            torch.testing.assert_close(wrapper(x), cut_once(x))
    assert [each.kind for each in found.segments] == ["graph", "eager", "graph"]
    assert found.segments[0].batch == "num_tokens=4"
    capture = BreakableCUDAGraphCapture(device=device)
    with capture:
        result = cut_once(x)
    with cgcompile.debug.profile(capture) as found:
        capture.replay()
    torch.testing.assert_close(result, cut_once(x))
    assert [each.name for each in found.segments] == [
        "cgcompile/piece_0",
        "cgcompile/break_1 soft",
        "cgcompile/piece_2",
    ]


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_managers(kind: str) -> None:
    made = manager("FULL", kind)
    made.capture()
    given = requests(3, 2)
    with cgcompile.debug.profile(made) as found:
        result = made.run(given)
    model = made.model
    torch.testing.assert_close(result, eager(getattr(model, "_orig_mod", model), given))
    assert (found.steps, found.break_share) == (1, 0.0)
    assert [each.batch for each in found.segments] == ["num_tokens=8, num_reqs=8"]


def test_a_step_that_raises_is_not_counted(hook: Callable[[Any], None]) -> None:
    model, compiled, backend, x = ready("cpu")

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise Asked("break")

    with cgcompile.debug.profile(backend) as found:
        hook(refuse)
        with pytest.raises(Asked):
            compiled(x)
        assert (found.steps, [each.count for each in found.segments]) == (0, [1, 0, 0])
        hook(torch.cos)
        assert_same(compiled(x), model(x))
    assert (found.steps, [each.count for each in found.segments]) == (1, [2, 1, 1])


def test_a_profile_keeps_no_graph_alive() -> None:
    _, compiled, backend, x = ready("cpu")
    with cgcompile.debug.profile(backend) as found:
        compiled(x)
    life = weakref.ref(backend.graphs[-1].recordings[0].sequence)
    backend.release()
    gc.collect()
    assert life() is None
    assert found.steps == 1
    assert len(found.segments) == 3


def test_bad_targets_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        cgcompile.debug.profile(nn.Linear(2, 2))
    if not torch.cuda.is_available():
        with pytest.raises(CaptureError, match="no graphs here"):
            cgcompile.debug.profile(device_times=True)
    assert OBSERVERS.get() == ()


def test_the_profile_of_the_readme_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (code,) = re.findall(
        r"```python\n(with torch\.inference_mode\(\), cgcompile\.debug\.profile.*?)```", text, re.S
    )
    _, compiled, _ = compiled_model(Hooked, "cpu", **HOOKED)
    with torch.inference_mode():
        batches = [batch("cpu") for _ in range(4)]
        exec(code, {"cgcompile": cgcompile, "torch": torch, "model": compiled, "batches": batches})
    said = capsys.readouterr().out
    assert "steps 2, " in said
    assert "cgcompile/break_1 cgentry::hooked [num_tokens=6]" in said
    assert re.search(r"^num_tokens=6 PIECEWISE 0\.\d+ \d+ None$", said, re.M)


@pytest.mark.gpu
def test_times_of_the_device() -> None:
    model, compiled, backend, x = ready("cuda")
    with cgcompile.debug.profile(backend, device_times=True) as found:
        for _ in range(3):
            assert_same(compiled(x), model(x))
    assert found.steps == 3
    assert all(each.device_us is not None and each.device_us > 0 for each in found.segments)


def test_a_task_that_goes_on_after_the_profile_is_not_measured_any_more() -> None:
    _, compiled, backend, x = ready("cpu")

    async def measured() -> tuple[int, int]:
        left = asyncio.Event()

        async def served() -> None:
            compiled(x)
            await left.wait()
            compiled(x)

        with cgcompile.debug.profile(backend) as found:
            task = asyncio.create_task(served())
            await asyncio.sleep(0)
        inside = found.steps
        left.set()
        await task
        return inside, found.steps

    before = backend.counters.replays
    assert asyncio.run(measured()) == (1, 1)
    assert backend.counters.replays - before == 2


def test_a_thread_in_a_copy_of_the_context_is_not_measured() -> None:
    _, compiled, backend, x = ready("cpu")
    before = backend.counters.replays
    with cgcompile.debug.profile(backend) as found:
        context = contextvars.copy_context()
        in_thread(lambda: context.run(torch.no_grad()(compiled), x))
        compiled(x)
    assert backend.counters.replays - before == 2
    assert found.steps == 1


def test_a_profile_that_is_kept_keeps_no_model() -> None:
    model, compiled, backend, x = ready("cpu")
    with cgcompile.debug.profile(compiled) as found:
        compiled(x)
    alive = weakref.ref(backend)
    del model, compiled, backend
    torch.compiler.reset()
    gc.collect()
    assert alive() is None
    assert found.steps == 1
