"""A descriptor whose rows no input has: coverage and padding would be counted in wrong rows."""

import logging

import pytest
import torch
from lib.front_ends import COMPILED, WIDTH, front_end
from torch import nn

from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.errors import DispatchError


def step(served, x: torch.Tensor, descriptor: BatchDescriptor) -> torch.Tensor:
    mode = CUDAGraphMode.PIECEWISE
    with (
        torch.no_grad(),
        set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor),
    ):
        return served.step(x)


@pytest.mark.parametrize("entry", COMPILED)
def test_rows_that_no_input_has_are_a_warning_once(
    entry: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(WIDTH, WIDTH, device=device)
    served = front_end(entry, model, device)
    x = torch.empty(6, WIDTH, device=device)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        for _ in range(4):
            x.normal_()
            made = step(served, x, BatchDescriptor(16))
            torch.testing.assert_close(made, model(x).detach())
    told = [each for each in caplog.messages if "no input has 16 rows" in each]
    assert len(told) == 1
    assert "[6, 8]" in told[0]
    assert served.counters().replays >= 2


@pytest.mark.parametrize("entry", COMPILED)
def test_rows_that_no_input_has_are_an_error_if_strict(entry: str, device: str) -> None:
    served = front_end(entry, nn.Linear(WIDTH, WIDTH, device=device), device, strict=True)
    x = torch.randn(6, WIDTH, device=device)
    step(served, x, BatchDescriptor(16))  # warms up
    with pytest.raises(DispatchError, match="no input has 16 rows"):
        step(served, x, BatchDescriptor(16))
    assert served.counters().captures == 0


@pytest.mark.parametrize(
    ("shape", "descriptor"),
    [
        ((6, WIDTH), BatchDescriptor(6)),
        ((2, 6, WIDTH), BatchDescriptor(12)),
        ((1, 6, WIDTH), BatchDescriptor(6)),
        ((3, WIDTH), BatchDescriptor(12, 3)),
    ],
    ids=["rows", "product", "second dimension", "requests"],
)
def test_rows_that_an_input_has_are_right(
    shape: tuple[int, ...],
    descriptor: BatchDescriptor,
    device: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(WIDTH, WIDTH, device=device)
    served = front_end("torch.compile", model, device, strict=True)
    x = torch.empty(shape, device=device)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        for _ in range(4):
            x.normal_()
            torch.testing.assert_close(step(served, x, descriptor), model(x).detach())
    assert not [each for each in caplog.messages if "no input has" in each]
    assert served.counters().replays >= 2
