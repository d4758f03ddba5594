"""Progress of long work: on a terminal and in a notebook, silent elsewhere."""

import io
import sys
import types

import pytest
import torch
from lib import encoders, manager
from torch import nn

import cgcompile
from cgcompile.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def compile_and_capture() -> None:
    torch._dynamo.reset()
    config = cgcompile.CompilationConfig(
        capture_device="host", compiler="eager", cudagraph_mode="PIECEWISE", cache_dir="off"
    )
    model = cgcompile.compile(nn.Linear(4, 4), config, dynamic_dims={"input": 0}, guards="none")

    def step(size: int) -> None:
        context = cgcompile.set_forward_context(
            cudagraph_runtime_mode=cgcompile.CUDAGraphMode.PIECEWISE,
            batch_descriptor=cgcompile.BatchDescriptor(size),
        )
        with torch.inference_mode(), context:
            model(rows[:size])

    rows = torch.randn(4, 4)
    assert not model.backend.capture(step, [1, 2, 4]).missing


def serve() -> None:
    assert manager.manager().capture()


def encode() -> None:
    assert encoders.manager(encoders.patches()).budget_graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "titles"),
    [
        (
            compile_and_capture,
            ("cgcompile: pieces", "CUDA graphs: warm-up", "CUDA graphs: capture"),
        ),
        (serve, ("(mixed, PIECEWISE): warm-up", "(decode, FULL): capture")),
        (encode, ("CUDA graphs: warm-up", "CUDA graphs: capture")),
    ],
)
def test_long_work_shows_progress_on_a_terminal_alone(
    work: types.FunctionType, titles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    work()
    for title in titles:
        assert title in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", file)
    work()
    for title in titles:
        assert title not in file.getvalue()


def test_a_torch_without_distributed_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([1, 2], "numbers")) == [1, 2]
    assert "numbers" in terminal.getvalue()


def test_a_notebook_is_no_terminal_and_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    compile_and_capture()
    assert "CUDA graphs: capture" in output.getvalue()
