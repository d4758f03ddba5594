"""torch's guard filters: what a call no longer notices, and what graphs check all the same."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import settings
from torch import nn

import cgcompile

D = 8


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)
        self.factor = 2

    def forward(self, x):
        x = self.before(x)
        return self.after(F.scaled_dot_product_attention(x, x, x) * self.factor)


def compiled(model: nn.Module, device: str, name: str | None, named: bool) -> Any:
    chosen = {} if name is None else {"guard_filter_fn": getattr(torch.compiler, name)}
    config = settings(device)
    if named:
        own = {"compiler": "eager", "capture_device": config.capture_device}
        return torch.compile(model, backend="cgcompile", dynamic=True, options={**own, **chosen})
    backend = cgcompile.Backend(config)
    return torch.compile(model, backend=backend, dynamic=True, options=chosen or None)


def steps(model: nn.Module, call: Any, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Compare warm-up, capture and replay with eager, for two sizes."""
    for rows in (4, 6):
        for _ in range(3):
            x = torch.randn(2, rows, D, device=device, dtype=dtype)
            torch.testing.assert_close(call(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", [None, "skip_guard_on_all_nn_modules_unsafe"])
def test_without_guards_on_modules(name: str | None, named: bool, device: str) -> None:
    model = Scaled().to(device).eval()
    call = compiled(model, device, name, named)
    other = Scaled().to(device)
    with torch.inference_mode():
        steps(model, call, device)
        model.before.weight.data = other.before.weight.data  # the same object, moved
        steps(model, call, device)
        model.after.weight = other.after.weight
        steps(model, call, device)
        backend = cgcompile.runtime(call)
        assert backend.counters.replays >= 3
        assert len(backend.graphs) == 1
        model.factor = 3
        x = torch.randn(2, 4, D, device=device)
        if name is None:
            torch.testing.assert_close(call(x), model(x))
            return
        result = call(x)
        model.factor = 2
        torch.testing.assert_close(result, model(x))  # the number of the trace
        assert len(backend.graphs) == 1


@pytest.mark.slow
def test_tensor_guards_alone_still_see_another_dtype(device: str) -> None:
    model = Scaled().to(device).eval()
    call = compiled(model, device, "keep_tensor_guards_unsafe", named=True)
    with torch.inference_mode():
        steps(model, call, device)
        model.double()
        steps(model, call, device, torch.float64)
