"""The processes that compile kernels are started while a model is still to be traced."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from lib.patience import PATIENCE
from torch import nn
from torch._subclasses import FakeTensorMode

import cgcompile
from cgcompile.torch_compat import inductor


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    starts: list[bool] = []
    monkeypatch.setattr(inductor, "start_compile_workers", lambda: starts.append(True))
    return starts


class Model(nn.Module):
    """With a weight on a device that may lack here."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        with FakeTensorMode():
            self.weight = nn.Parameter(torch.empty(2, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("model", "settings", "expected"),
    [
        (Model(), {}, 1),
        (Model().forward, {}, 1),
        (Model(), {"mode": "STOCK_TORCH_COMPILE", "cudagraph_mode": "NONE"}, 1),
        (Model("cpu"), {}, 0),
        (double, {}, 0),
        (Model(), {"compiler": "aot"}, 0),
        (Model(), {"mode": "NONE"}, 0),
        (Model(), {"splitting": "breakable"}, 0),
    ],
)
def test_where_they_are_started(
    model: Any, settings: dict[str, Any], expected: int, started: list[bool]
) -> None:
    cgcompile.compile(model, **{"compiler": "inductor", **settings})
    assert len(started) == expected


def test_a_machine_that_starts_no_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start() -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(inductor, "start_compile_workers", start)
    with caplog.at_level("INFO", "cgcompile"):
        cgcompile.Backend(compiler="inductor").anticipate(Model())
    assert "no compile workers yet: no more processes" in caplog.text


PROGRAM = """
import os
from cgcompile.torch_compat import inductor
from torch._inductor.async_compile import AsyncCompile

def pools():
    return AsyncCompile.process_pool.cache_info().currsize

os.environ["TORCH_WARM_POOL"] = "0"
inductor.start_compile_workers()
refused = pools()
os.environ["TORCH_WARM_POOL"] = "1"
inductor.start_compile_workers()
first = AsyncCompile.process_pool()
inductor.start_compile_workers()
print(refused, pools(), AsyncCompile.process_pool() is first)
"""


@pytest.mark.slow
def test_torchs_own_pool_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == ["0", "1", "True"]
