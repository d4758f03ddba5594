"""When what was captured, and what it took."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.breakable import FULL, PIECEWISE, Asked, rand, step
from lib.encoders import manager as encoder_manager
from lib.entry import HOOKED, Hook, Hooked, assert_same, batch, compiled_model, marked
from lib.manager import manager
from torch import nn

from cgcompile import CompilationConfig, CUDAGraphWrapper
from cgcompile.debug import timeline
from cgcompile.errors import ConfigError
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")

CONFIG = CompilationConfig(capture_device="host")


class Clock:
    """A clock whose readings are a second apart."""

    now = 0.0

    def time(self) -> float:
        self.now += 1.0
        return self.now

    perf_counter = time


def test_each_capture_of_a_compiled_model(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    monkeypatch.setattr("cgcompile.graphs.timeline.time", Clock())
    sizes = [marked(batch(device, size)) for size in (6, 3)]
    for x in sizes:
        for _ in range(3):
            assert_same(compiled(x), model(x))
    first, second = timeline(compiled)
    assert (first.name, first.mode, first.why) == ("step", PIECEWISE, None)
    assert first.batch.startswith("num_tokens=6")
    assert second.batch.startswith("num_tokens=3")
    assert first.segments == second.segments == ("graph piece_0", "eager piece_1", "graph piece_2")
    assert [(capture.start, capture.seconds) for capture in (first, second)] == [(1, 1), (4, 1)]
    if device == "cpu":
        (graph,) = backend.graphs
        assert first.nbytes > second.nbytes >= 0
        assert first.nbytes + second.nbytes == graph.pool.nbytes
    else:
        assert first.nbytes > 0
    for target in (backend, backend.graphs[0]):
        assert timeline(target) == (first, second)
    backend.release()
    assert timeline(backend) == (first, second)


def test_a_trace_for_perfetto(tmp_path: Path) -> None:
    """Each capture is a slice, from the first one on; wrappers have tracks of their own."""
    model, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    for size in (6, 3):
        for _ in range(2):
            compiled(marked(batch("cpu", size)))
    captures = timeline(compiled)
    path = captures.to_trace(tmp_path / "deep" / "trace.json")
    track, *slices = json.loads(path.read_text())["traceEvents"]
    assert (track["ph"], track["name"], track["args"]) == ("M", "thread_name", {"name": "step"})
    assert [(each["ph"], each["tid"], each["cat"]) for each in slices] == [("X", 0, "capture")] * 2
    assert [each["args"] for each in slices] == captures.to_dict() == json.loads(captures.to_json())
    assert slices[0]["ts"] == 0
    for event, record in zip(slices, captures, strict=True):
        assert event["dur"] == record.seconds * 1e6
        assert event["ts"] == (record.start - captures[0].start) * 1e6
        assert event["name"].startswith(f"PIECEWISE {record.batch}")
    assert path.name in [each.name for each in path.parent.iterdir()]
    backend.release()
    wrapper = CUDAGraphWrapper(model, CONFIG)
    assert str(timeline(wrapper)) == "nothing was captured"


def test_a_refused_capture_says_why() -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if refusing:
            raise Asked("not while capturing")
        return x.sin()

    wrapper = CUDAGraphWrapper(refuse, CONFIG)
    x, refusing = rand(device="cpu"), True
    with step(4, FULL):
        with pytest.raises(Asked):
            wrapper(x)
        refusing = False
        assert torch.equal(wrapper(x), x.sin())
    refused, done = timeline(wrapper)
    assert (refused.why, refused.segments) == ("Asked: not while capturing", ())
    text = str(timeline(wrapper)).splitlines()
    assert text[2].strip() == "refused: Asked: not while capturing"
    assert [row.split()[-3:] for row in (text[1], text[3])] == [
        ["FULL", "num_tokens=4", "refuse"]
    ] * 2
    assert (done.why, done.segments) == (None, ("graph refuse",))
    assert (done.name, done.mode, done.batch) == ("refuse", FULL, "num_tokens=4")


class Piece(nn.Module):
    def forward(self, x):
        return torch.ops.cgentry.hooked(x.sin()) + 1


def test_a_piece_that_cannot_be_captured_is_named() -> None:
    model, compiled, backend = compiled_model(Piece, "cpu")

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum() > 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hook, "function", staticmethod(reads))
        for _ in range(3):
            x = batch("cpu")
            assert_same(compiled(x), model(x))
    whole, pieces = timeline(backend)  # after the one it was tried as the other
    assert (whole.mode, pieces.mode) == (FULL, PIECEWISE)
    assert whole.segments == pieces.segments == ()
    detail = backend.counters.details[Reason.CAPTURE_FAILED]
    assert detail.endswith("; last call: x [6, 4, 16]")
    assert pieces.why == f"capture_failed: {detail.partition('; last call: ')[0]}"
    assert "the step" in whole.why
    assert "piece_0" in pieces.why


def test_a_refused_capture_names_the_descriptor_of_a_forward_context() -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum() > 0)

    _, compiled, backend = compiled_model(Piece, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hook, "function", staticmethod(reads))
        with step(6, PIECEWISE):
            for _ in range(2):  # a warming call, and the capture
                compiled(batch("cpu"))
        detail = backend.counters.details[Reason.CAPTURE_FAILED]
        assert detail.endswith("; last call: num_tokens=6")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_managers(kind: str) -> None:
    graph_manager = manager("FULL", kind)
    graph_manager.capture()
    captures = timeline(graph_manager)
    assert [each.batch for each in captures if each.why is None] == [
        f"num_tokens={n}, num_reqs={min(n, 8)}" for n in (16, 8, 4, 2, 1)
    ]
    assert {each.mode for each in captures} == {FULL}
    starts = [each.start for each in captures]
    assert starts == sorted(starts)


def test_an_encoder_manager() -> None:
    encoder = encoder_manager()
    captures = timeline(encoder)
    assert len(captures) == len(encoder.budget_graphs) > 0
    assert {each.name for each in captures} == {"encoder"}
    assert sum(each.nbytes for each in captures) > 0


def test_records_are_plain_data() -> None:
    wrapper = CUDAGraphWrapper(torch.sin, CONFIG)
    with step(4, FULL):
        wrapper(rand(device="cpu"))
    (record,) = timeline(wrapper)
    data: dict[str, Any] = json.loads(json.dumps(record.to_dict()))
    assert data == {
        "name": "sin",
        "mode": "FULL",
        "batch": "num_tokens=4",
        "start": record.start,
        "seconds": record.seconds,
        "nbytes": 128,
        "segments": ["graph sin"],
        "why": None,
    }


def test_what_captures_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear"):
        timeline(nn.Linear(2, 2))
