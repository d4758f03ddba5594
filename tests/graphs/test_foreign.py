"""Functions under ``no_graph`` of Meta's package break captures here as they do there."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import piecewise_cuda_graphs as rival
import pytest
import torch
from lib.breakable import FULL, SIZE, Asked, rand, same, soft, step

import cgcompile
from cgcompile.errors import CaptureError
from cgcompile.graphs.sequence import EagerSegment, GraphSequence


class Doubled:
    """Doubles while the sum is small, which no graph can ask."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor, *, factor: float = 2.0) -> None:
        self.calls += 1
        if x.sum().item() < 20:
            x.mul_(factor)


@pytest.fixture
def doubled() -> Doubled:
    return Doubled()


def wrapper(runnable: Callable[..., Any], mode: Any = None) -> cgcompile.BreakableCUDAGraphWrapper:
    config = cgcompile.CompilationConfig(capture_device="host", num_warmups=0)
    return cgcompile.BreakableCUDAGraphWrapper(runnable, config, mode)


def recorded(wrapped: cgcompile.BreakableCUDAGraphWrapper) -> GraphSequence:
    (entry,) = wrapped.concrete_cudagraph_entries.values()
    assert entry.sequence is not None
    return entry.sequence


def test_it_runs_at_every_replay(device: str, doubled: Doubled) -> None:
    @rival.no_graph
    def run(*args: Any, **kwargs: Any) -> None:
        doubled(*args, **kwargs)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 0.1
        run(y, factor=3.0)
        z = y.cos() * x
        rival.force_no_graph()
        return z + y

    wrapped, x, results = wrapper(model), rand(device=device), []
    for number in range(4):
        x.copy_(rand(device=device) * (3 if number % 2 else 1))
        expected = model(x.clone())
        before = doubled.calls
        with torch.inference_mode(), step(SIZE[0]):
            results.append(wrapped(x).clone())
        assert doubled.calls == before + 1
        assert same(results[-1], expected)
    assert not same(results[0], results[1])
    breaks = [each.name for each in recorded(wrapped).segments if isinstance(each, EagerSegment)]
    assert [name.rpartition(".")[2] for name in breaks] == ["run", "force_no_graph"]
    assert wrapped.counters.captures == 1
    assert wrapped.counters.replays == 3


def test_a_break_within_a_break_is_none(device: str) -> None:
    inner = rival.no_graph(_double)
    outer = rival.no_graph(lambda y: inner(y))
    ours = cgcompile.eager_break_during_capture(lambda y: inner(y))

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        outer(y)
        y = y * 3
        ours(y)
        return y.sin()

    wrapped, x = wrapper(model), rand(device=device)
    for _ in range(3):
        x.copy_(rand(device=device))
        with torch.inference_mode(), step(SIZE[0]):
            result = wrapped(x)
        assert same(result, (x * 2 * 2 * 3 * 2).sin())
    assert recorded(wrapped).num_eager_breaks == 2


def test_a_full_graph_holds_it(device: str) -> None:
    cut = rival.no_graph(_double)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        cut(y)
        return soft(y)

    wrapped, x = wrapper(model, FULL), rand(device=device)
    for _ in range(3):
        x.copy_(rand(device=device))
        with torch.inference_mode(), step(SIZE[0], FULL):
            result = wrapped(x)
        assert same(result, soft((x + 1) * 2))
    assert recorded(wrapped).num_eager_breaks == 0
    assert wrapped.counters.replays == 2


def _double(y: torch.Tensor) -> None:
    y.mul_(2)


@pytest.mark.parametrize("swallows", [False, True])
def test_what_it_raises(device: str, swallows: bool) -> None:
    failing = [True]

    def fail(y: torch.Tensor) -> None:
        if failing[0]:
            raise Asked
        y.add_(1)

    cut = rival.no_graph(fail)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        try:
            cut(y)
        except Asked:
            if not swallows:
                raise
        return y.sin()

    wrapped, x = wrapper(model), rand(device=device)
    stream = torch.cuda.current_stream() if device == "cuda" else None
    with (
        torch.inference_mode(),
        step(SIZE[0]),
        pytest.raises(CaptureError if swallows else Asked) as caught,
    ):
        wrapped(x)
    if swallows:
        assert "a function under no_graph raised, and the program went on" in str(caught.value)
    assert not rival.is_in_piecewise_graph()
    assert stream is None or torch.cuda.current_stream() == stream
    failing[0] = False
    for _ in range(3):
        x.copy_(rand(device=device))
        with torch.inference_mode(), step(SIZE[0]):
            assert same(wrapped(x), (x * 2 + 1).sin())
    assert wrapped.counters.replays == 2


def test_the_raw_form_breaks_too(device: str) -> None:
    cut = rival.no_graph(_double)
    capture = cgcompile.BreakableCUDAGraphCapture(device=device)
    x = rand(device=device)
    with torch.no_grad(), capture:
        assert rival.is_in_piecewise_graph()
        y = x.sin()
        cut(y)
        out = y + 1
    assert not rival.is_in_piecewise_graph()
    assert capture.num_eager_breaks == 1
    for _ in range(2):
        x.copy_(rand(device=device))
        capture.replay()
        assert same(out, x.sin() * 2 + 1)


@pytest.mark.slow
def test_it_is_imported_by_nobody_here() -> None:
    code = "import sys, cgcompile; print('piecewise_cuda_graphs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
