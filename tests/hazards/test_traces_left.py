"""What stays in the process of a trace that is gone."""

import gc
import linecache
from typing import Any

import pytest
import torch
from fuzz.soak import OF_A_TURN, WARM_UP, Soak, reading
from torch import nn

import cgcompile


@pytest.fixture(autouse=True)
def without_gradients(frozen: None) -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def frozen() -> Any:
    """Keep what is there out of the garbage collection of each capture."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def installed() -> set[str]:
    """The globals of the traced function, and the sources that Python can show."""
    return set(vars(nn.modules.container)) | set(linecache.cache)


@pytest.mark.parametrize("phase", ["invalidations", "models"])
def test_a_trace_leaves_a_few_objects(phase: str, device: str) -> None:
    soak = Soak(device)
    turn = getattr(soak, phase)
    turn(WARM_UP)
    before, names = reading(device)["objects"], installed()
    turn(20)
    assert reading(device)["objects"] - before <= 20 * OF_A_TURN[phase]
    assert len(installed()) <= len(names) + 1  # torch reads sources of its own now and then


def test_reset_graphs_leave_no_source(device: str) -> None:
    soak = Soak(device)
    soak.resets(3)
    before = {name for name in linecache.cache if name.startswith("<eval_with_key>")}
    soak.resets(10)
    left = {name for name in linecache.cache if name.startswith("<eval_with_key>")}
    assert len(left - before) <= 10 + 3  # Dynamo keeps that of its own graph


def scale_by(factor: int) -> Any:
    """Make an instance of a class of its own."""
    return type("Scale", (), {"factor": factor, "__call__": lambda self, x: x * self.factor})()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = scale_by(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scale(x))


def test_traces_that_compare_a_freed_class_are_dropped(device: str) -> None:
    model = Scaled()
    capture_device = "host" if device == "cpu" else "auto"
    compiled = cgcompile.compile(
        model, compiler="eager", cache_dir="off", capture_device=capture_device
    )
    for factor in range(2, 8):
        for _ in range(4):
            x = torch.randn(4, 8, device=device)
            torch.testing.assert_close(compiled(x), torch.tanh(x * (factor - 1)))
        assert compiled.backend.counters.replays > 0
        del model.scale
        gc.unfreeze()
        gc.collect()
        model.scale = scale_by(factor)  # its class may be where the last one was
    assert len(compiled.traces) <= 2
