"""Work on other streams: forked and joined it is a note, else it is named before or at a capture."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.debug import examine, kinds, only_finding, step
from torch import nn

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.debug.findings import Way
from cgcompile.debug.op_observer import Notes, Streams, Watch
from cgcompile.debug.restore import Snapshot
from cgcompile.errors import CaptureError
from cgcompile.graphs.device import named_failures

MAIN, SIDE, OTHER = 0, 8, 9
JOINED = "it runs on a side stream that forks and joins"
UNJOINED = "it runs on a side stream that is not joined"
LOOSE = "it runs on a stream that does not wait for that of the call"
UNSEEN = "it runs on another stream than the call; whether that is joined was not seen"
BREAKABLE = CompilationConfig(splitting="breakable")


class Board:
    """Numbered streams; waits go through the functions of torch."""

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


def unseen(board: Board, x: torch.Tensor) -> None:
    board.on(SIDE, x)
    with suppress(RuntimeError, NotImplementedError):
        torch.Event("cpu").record()  # written in C, and so are the waits of such events


def raises(board: Board, x: torch.Tensor) -> None:
    board.wait(SIDE, MAIN)
    board.on(SIDE, x)
    raise KeyError


def scenario(*steps: Any) -> Callable[[Board, torch.Tensor], None]:
    """Pairs wait for one another, (waiting, waited); a number works on that stream."""

    def run(board: Board, x: torch.Tensor) -> None:
        for part in steps:
            if isinstance(part, tuple):
                board.wait(*part)
            else:
                board.on(part, x)

    return run


FORK, JOIN = (SIDE, MAIN), (MAIN, SIDE)
JOINED_STEPS = scenario(FORK, SIDE, JOIN)


def watched(model: Callable[[Board, torch.Tensor], None], way: Way) -> cgcompile.debug.Diagnosis:
    notes, board, x = Notes(way, watched.__code__), Board(), torch.ones(2)
    boundaries, device = cgcompile.boundaries.Boundaries(), torch.device("cuda")
    watch = Watch(notes, boundaries, device, Snapshot([x]), lambda: board.now)
    with suppress(KeyError), watch.observing():
        model(board, x)
    return cgcompile.debug.Diagnosis.of("model", "cuda", notes)


@pytest.mark.parametrize(
    ("model", "severity", "text"),
    [
        (JOINED_STEPS, "note", JOINED),
        (scenario(FORK, SIDE, (OTHER, SIDE), (MAIN, OTHER)), "note", JOINED),  # through another
        (scenario(FORK, SIDE), "error", UNJOINED),
        (scenario(FORK, JOIN, SIDE), "error", UNJOINED),  # too early
        (scenario(FORK, (OTHER, MAIN), SIDE, (MAIN, OTHER)), "error", UNJOINED),  # another one
        (scenario(FORK, SIDE, JOIN, SIDE), "error", UNJOINED),  # once of twice
        (scenario(SIDE, JOIN), "error", LOOSE),
        (unseen, "note", UNSEEN),
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


def test_beside_another_profiler() -> None:
    sys.setprofile(lambda *_: None)
    try:
        (seen,) = watched(JOINED_STEPS, Way.UNTRACED).of_kind("side_stream")
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


UNJOINED_ERROR = """CUDA error: capturing stream has unjoined work
Search for `cudaErrorStreamCaptureUnjoined' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below
might be incorrect."""


@pytest.mark.parametrize("message", [UNJOINED_ERROR, "HIP error: hipErrorStreamCaptureUnjoined"])
def test_a_capture_that_ends_unjoined(message: str) -> None:
    with pytest.raises(CaptureError, match="ended with unjoined work") as caught, named_failures():
        raise RuntimeError(message)  # <end>
    assert str(caught.value.__cause__) == message
    assert kinds(cgcompile.debug.Diagnosis.of_error(caught.value)) == {"end": "side_stream error"}


def test_other_errors_at_the_end_of_a_capture_are_as_they_were() -> None:
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError) as caught, named_failures():
        raise error
    assert caught.value is error


class Forks(nn.Module):
    def __init__(self, forks: bool = True, joins: bool = True) -> None:
        super().__init__()
        self.side = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.forks, self.joins = forks, joins

    def forward(self, x):
        if x.is_cuda and self.forks:
            self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # <stream>
            y = x + 1  # <work>
        if x.is_cuda and self.joins:
            torch.cuda.current_stream().wait_stream(self.side)
        return y * 2


def test_a_side_stream_on_the_cpu() -> None:
    assert kinds(examine(Forks(), torch.ones(2))) == {"stream": "side_stream note"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("forks", "joins", "severity", "text"),
    [
        (True, True, "note", JOINED),
        (True, False, "error", UNJOINED),
        (False, True, "error", LOOSE),
    ],
)
def test_streams_of_cuda(forks: bool, joins: bool, severity: str, text: str) -> None:
    x, model = torch.ones(2, device="cuda"), Forks(forks, joins)
    diagnosis = examine(model, x, config=BREAKABLE)
    assert kinds(diagnosis) == {"work": f"side_stream {severity}"}
    assert only_finding(diagnosis).message.startswith(text)
    wrapper = cgcompile.CUDAGraphWrapper(model, CompilationConfig())
    if forks:
        with torch.inference_mode(), step():
            if joins:
                for _ in range(2):
                    assert torch.equal(wrapper(x), (x + 1) * 2)
                assert wrapper.counters.replays == 1
            else:
                with pytest.raises(CaptureError, match="unjoined work") as caught:
                    wrapper(x)
                assert only_finding(caught.value).kind == "side_stream"
