"""Inductor compiles open slices of a dynamic dimension on every supported torch."""

from collections.abc import Callable

import pytest
import torch
from lib.front_ends import settings

import cgcompile


def read(x: torch.Tensor) -> torch.Tensor:
    return x[1:] * 2


def read_two(x: torch.Tensor) -> torch.Tensor:
    return x[1:, 2:].t() + x[:-1, :-2].t()


def write(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[1:] = x[:-1]
    return y


@pytest.mark.slow
@pytest.mark.parametrize("step", [read, read_two, write])
def test_open_slices(step: Callable[..., torch.Tensor], device: str) -> None:
    backend = cgcompile.Backend(settings(device, compiler="inductor", cache_dir="off"))
    compiled = cgcompile.compile(step, backend, dynamic_dims={"x": 0})
    for rows in (4, 1, 4, 1, 4, 1, 3):
        x = torch.randn(rows, 8, device=device)
        with torch.no_grad():
            result = compiled(x)
        torch.testing.assert_close(result, step(x), rtol=1e-6, atol=1e-6)
    assert backend.counters.replays >= 2
