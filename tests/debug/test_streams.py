"""Work on other streams: forked and joined it is a note, else it is named before or at a capture."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.debug import examine, found, marked_line, only_finding
from torch import nn

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.debug.doctor import finding
from cgcompile.debug.op_observer import Notes, Streams, Watch, Way
from cgcompile.debug.restore import Snapshot
from cgcompile.errors import CaptureError
from cgcompile.graphs.cuda import named_failures

MAIN, SIDE, OTHER = 0, 8, 9
JOINED = "it runs on a side stream that forks from the one of the call and is joined again"
UNJOINED = "it runs on a side stream that is not joined"
LOOSE = "it runs on a stream that does not wait for the one of the call"
UNSEEN = "it runs on another stream than the call; whether that is joined was not seen"
BREAKABLE = CompilationConfig(splitting="breakable")


class Board:
    """Streams that are numbers, told of by the very functions of torch."""

    def __init__(self) -> None:
        self.now = MAIN

    def wait(self, waiting: int, waited: int) -> None:
        event = SimpleNamespace()
        with suppress(TypeError):  # no event of CUDA, as torch finds when it is called
            torch.cuda.Event.record(event, SimpleNamespace(cuda_stream=waited))
        with suppress(TypeError):
            torch.cuda.Event.wait(event, SimpleNamespace(cuda_stream=waiting))

    def on(self, stream: int, x: torch.Tensor) -> torch.Tensor:
        self.now = stream
        try:
            return x + 1
        finally:
            self.now = MAIN


def joined(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.on(SIDE, x)
    board.wait(MAIN, SIDE)


def through_another(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.on(SIDE, x)
    board.wait(OTHER, SIDE)
    board.wait(MAIN, OTHER)


def never_joined(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.on(SIDE, x)


def joined_too_early(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.wait(MAIN, SIDE)
    board.on(SIDE, x)


def joins_another(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.wait(OTHER, MAIN)
    board.on(SIDE, x)
    board.wait(MAIN, OTHER)


def never_forked(board: Board, x: torch.Tensor) -> None:
    board.on(SIDE, x)
    board.wait(MAIN, SIDE)


def joined_once_of_twice(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    for number in range(2):
        board.on(SIDE, x)
        if number == 0:
            board.wait(MAIN, SIDE)


def waits_unseen(board: Board, x: torch.Tensor) -> None:
    board.on(SIDE, x)
    with suppress(RuntimeError, NotImplementedError):
        torch.Event("cpu").record()  # written in C, and so are the waits of such events


def raises(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.on(SIDE, x)
    raise KeyError


def watched(model: Callable[[Board, torch.Tensor], None], way: Way) -> cgcompile.debug.Diagnosis:
    notes, board, x = Notes(way, watched.__code__), Board(), torch.ones(2)
    boundaries, device = cgcompile.boundaries.Boundaries(), torch.device("cuda")
    with suppress(KeyError), Watch(notes, boundaries, device, Snapshot([x]), lambda: board.now):
        model(board, x)
    findings = [finding(note, way) for note in notes]
    return cgcompile.debug.Diagnosis.of("model", "cuda", findings)


@pytest.mark.parametrize(
    ("model", "severity", "text"),
    [
        (joined, "note", JOINED),
        (through_another, "note", JOINED),
        (never_joined, "error", UNJOINED),
        (joined_too_early, "error", UNJOINED),
        (joins_another, "error", UNJOINED),
        (joined_once_of_twice, "error", UNJOINED),
        (never_forked, "error", LOOSE),
        (waits_unseen, "note", UNSEEN),
        (raises, "note", UNSEEN),
    ],
)
def test_how_work_on_another_stream_is_judged(model: Any, severity: str, text: str) -> None:
    (seen,) = watched(model, Way.UNTRACED).of_kind("side_stream")
    assert seen.source is not None
    assert seen.source.function == "on"
    assert (seen.severity, seen.op) == (severity, "aten.add.Tensor")
    assert seen.message.startswith(text)
    (traced,) = watched(model, Way.SPLIT).of_kind("side_stream")
    assert (traced.severity, traced.message) == ("break", seen.message)


def test_where_another_profiler_looks() -> None:
    sys.setprofile(lambda *_: None)
    try:
        (seen,) = watched(joined, Way.UNTRACED).of_kind("side_stream")
    finally:
        sys.setprofile(None)
    assert (seen.severity, seen.message) == ("note", UNSEEN)


def test_an_event_that_is_gone_is_not_taken_for_another() -> None:
    now = [MAIN]
    streams = Streams(lambda: now[0])
    side = SimpleNamespace(cuda_stream=SIDE)
    for _ in range(3):  # memory of a dead object is used again
        streams.record(SimpleNamespace())
        streams.wait(SimpleNamespace(), side)
    now[0] = SIDE
    streams.add_work("op", None)
    assert [text.startswith(LOOSE) for _, _, text, _ in streams.work()] == [True]


SAID = """CUDA error: capturing stream has unjoined work
Search for `cudaErrorStreamCaptureUnjoined' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below
might be incorrect."""


@pytest.mark.parametrize("said", [SAID, "HIP error: hipErrorStreamCaptureUnjoined"])
def test_a_capture_that_ends_unjoined(said: str) -> None:
    with pytest.raises(CaptureError, match="ended with unjoined work") as caught, named_failures():
        raise RuntimeError(said)  # <end>
    assert str(caught.value.__cause__) == said
    seen = only_finding(caught.value)
    assert (seen.kind, seen.severity) == ("side_stream", "error")
    assert seen.source is not None
    assert seen.source.line == marked_line(test_a_capture_that_ends_unjoined, "end")


def test_other_errors_at_the_end_of_a_capture_are_as_they_were() -> None:
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError) as caught, named_failures():
        raise error
    assert caught.value is error


@pytest.mark.gpu
def test_streams_of_cuda() -> None:
    class Forks(nn.Module):
        def __init__(self, forks: bool, joins: bool) -> None:
            super().__init__()
            self.forks, self.joins, self.side = forks, joins, torch.cuda.Stream()

        def forward(self, x):
            main = torch.cuda.current_stream()
            if self.forks:
                self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                y = x + 1  # <work>
                event = self.side.record_event()
            if self.joins:
                main.wait_event(event)
            return y * 2

    x = torch.ones(2, device="cuda")
    for given, severity, text in (
        ((True, True), "note", JOINED),
        ((True, False), "error", UNJOINED),
        ((False, True), "error", LOOSE),
    ):
        diagnosis = examine(Forks(*given), x, config=BREAKABLE)
        seen = found(diagnosis, "side_stream", Forks.forward, "work")
        assert (seen.severity, seen.message.startswith(text)) == (severity, True)
        assert len(diagnosis.findings) == 1
