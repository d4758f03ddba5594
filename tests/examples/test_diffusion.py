"""The denoising loops of diffusers are right and replayed, and the example names what is broken."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.examples import call, load

import cgcompile

STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("index", range(4))
def test_a_loop_is_right_and_replayed(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    example = load("diffusion.py")
    assert len(example.LOOPS) == 4
    assert example.compare(example.LOOPS[index], "cpu", "eager", STEPS)
    assert "largest difference 0.0e+00" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_loop_that_differs_or_is_not_replayed_is_named(
    error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers")
    example = load("diffusion.py")
    monkeypatch.setattr(example, "LOOPS", example.LOOPS[-1:])
    monkeypatch.setattr(example, "SIZES", example.SIZES[:1])
    monkeypatch.setattr(cgcompile, "Backend", lambda **_: _Plain(error))
    done = call(example, "--device", "cpu", "--steps", "2")
    assert done.returncode == 1
    first, last = done.stdout.splitlines()
    if error:
        assert "largest difference 0.0e+00" not in first
        assert "100% replayed" in first
    else:
        assert "largest difference 0.0e+00, 0% replayed" in first
    assert last == "promises kept: no"


class _Plain:
    """A backend that captures nothing; with an error in its results it counts replays."""

    def __init__(self, error: float) -> None:
        self.error = error
        replays = {"calls": 1, "replays": 1} if error else {}
        self.counters = SimpleNamespace(**{"calls": 0, "replays": 0, "degraded": (), **replays})

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *args: tuple(
            x + self.error * torch.randn_like(x) if x.is_floating_point() and x.dim() else x
            for x in gm(*args)
        )


def test_the_example_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    done = call(load("diffusion.py"), "--device", "cpu")
    assert done.returncode == 2
    assert "pip install diffusers" in done.stderr
