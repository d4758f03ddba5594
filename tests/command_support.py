"""What commands of the command line look at, in tests."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.cli import main

HERE = Path(__file__)


def runner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """(status, what was printed, what was said of errors) of a command on a function here."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(command: str, function: str, *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([command, f"{HERE}:{function}", *words])
        printed = capsys.readouterr()
        return status, printed.out.rstrip("\n"), printed.err.replace(str(HERE), "FILE").rstrip("\n")

    return run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v)) * scale


class Reads(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()


def pair() -> Any:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 4, 8)


def triple() -> Any:
    model, x = pair()
    return model, (x,), {"scale": 2.0}


def named() -> Any:
    model, x = pair()
    return {"model": model, "args": (x,), "kwargs": {"scale": 3.0}}


def reads() -> Any:
    return Reads().eval(), (torch.randn(2, 4, 8),)


def ran() -> Any:
    """A compiled model that has run, alone."""
    model, x = pair()
    compiled = cgcompile.compile(model, compiler="eager", capture_device="host")
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
    return compiled


def wrong() -> Any:
    """What is compiled is not what is called: graphs hold another model."""
    model, x = pair()

    def miscompile(gm: Any, inputs: Any) -> Any:
        return lambda *given: tuple(each * 2 for each in gm(*given))

    return cgcompile.compile(model, compiler=miscompile, capture_device="host"), (x,)


def sized(size: int, *, deep: bool = False) -> Any:
    return Net(), torch.randn(2, size, 8)


def given(function: Any) -> Any:
    @functools.wraps(function)
    def inner() -> Any:
        return function(2)

    return inner


@given
def decorated(size: int) -> Any:
    return sized(size)


net = Net()


def confuses() -> Any:
    return sized()  # type: ignore[call-arg]


def number() -> Any:
    return 3


def four() -> Any:
    return 1, 2, 3, 4


def raises() -> Any:
    raise RuntimeError("boo")


def leaves() -> Any:
    sys.exit(5)


def misses() -> Any:
    model, _ = pair()
    return model, ()


def alone() -> Any:
    return Net()
