"""A number that is another one at each call is counted by name, and refused by strict."""

import pytest
import torch
from hazard_support import ROWS, WIDTH, compiled, settings
from torch import nn

from cgcompile.errors import DispatchError
from cgcompile.reasons import Reason

NAMES = ("torch.compile",)  # a trace of cgcompile.compile has a number as a constant


class Shifts(nn.Linear):
    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return super().forward(x) + step


def model(device: str) -> nn.Module:
    return Shifts(WIDTH, WIDTH).to(device).requires_grad_(False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmups", [1, 2])
def test_the_number_is_named(name: str, warmups: int, device: str) -> None:
    module = model(device)
    served = compiled(name, module, settings(device, num_warmups=warmups), dynamic=True)
    with torch.inference_mode():
        for step in range(2, 22):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x, step), module(x, step))
        counters = served.counters()
        assert counters.plain == {Reason.WARMING: 8, Reason.VARYING_NUMBER: 12}
        detail = counters.details[Reason.VARYING_NUMBER]
        assert "'step' is another one at each call (now 8, 9, 10)" in detail
        for _ in range(warmups + 3):  # one that repeats is captured
            for step in (30, 31):
                x = torch.randn(ROWS, WIDTH, device=device)
                torch.testing.assert_close(served.step(x, step), module(x, step))
    counters = served.counters()
    assert (counters.captures, counters.replays) == (2, 4)


@pytest.mark.parametrize("name", NAMES)
def test_strict_refuses_it(name: str, device: str) -> None:
    served = compiled(name, model(device), settings(device, strict=True), dynamic=True)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for step in range(2, 10):
            served.step(x, step)
        with pytest.raises(DispatchError, match=r"varying_number.*'step'"):
            served.step(x, 10)


@pytest.mark.parametrize("name", NAMES)
def test_new_sizes_are_no_varying_number(name: str, device: str) -> None:
    module = nn.Linear(WIDTH, WIDTH).to(device).requires_grad_(False)
    served = compiled(name, module, settings(device, strict=True), dynamic=True)
    with torch.inference_mode():
        for rows in (*range(2, 16), *range(2, 16)):
            x = torch.randn(rows, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), module(x))
    assert served.counters().captures == 14


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_repeat_now_and_then(name: str, device: str) -> None:
    module = model(device)
    served = compiled(name, module, settings(device, strict=True), dynamic=True)
    with torch.inference_mode():
        for step in range(2, 60):  # every fourth call is a replay of the same number
            x = torch.randn(ROWS, WIDTH, device=device)
            number = 100 if step % 4 == 0 else step
            torch.testing.assert_close(served.step(x, number), module(x, number))
    assert served.counters().replays >= 10
