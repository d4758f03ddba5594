"""Results that share memory share it in every replay, however many weight sets there are."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from lib.front_ends import settings
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y[:, 2:4]


def test_results_of_several_weight_sets_share_memory(device: str) -> None:
    torch._dynamo.reset()
    backend = cgcompile.Backend(settings(device))
    models = [Halves().to(device).requires_grad_(False) for _ in range(2)]
    compiled = [torch.compile(model, backend=backend) for model in models]
    x = torch.zeros(4, 8, device=device)
    context = {"cudagraph_runtime_mode": CUDAGraphMode.FULL, "batch_descriptor": BatchDescriptor(4)}
    for _ in range(5):
        x.copy_(torch.randn(4, 8))
        for step, model in zip(compiled, models, strict=True):
            with torch.no_grad(), set_forward_context(**context):
                y, part = step(x)
            expected, view = model(x)
            part.zero_()
            view.zero_()
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert backend.counters.replays >= 4


def alias_beside(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return memory of an input that no captured piece reads."""
    doubled = state * 2
    with cgcompile.eager_region():
        same = x[:]
    state.copy_(doubled + 1)
    return same


def alias_read(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return memory of an input that a captured piece reads by another name."""
    with cgcompile.eager_region():
        same = x[:]
    state.copy_(same + 1)
    return same


@pytest.mark.parametrize("context", [True, False], ids=["context", "no_context"])
@pytest.mark.parametrize("entry_point", ["torch.compile", "cgcompile.compile"])
@pytest.mark.parametrize("step", [alias_beside, alias_read])
def test_a_result_of_an_eager_region_stays_the_input(
    step: Callable[..., torch.Tensor], entry_point: str, context: bool, device: str
) -> None:
    torch._dynamo.reset()
    backend = cgcompile.Backend(settings(device, cudagraph_mode="PIECEWISE"))
    if entry_point == "torch.compile":
        compiled = torch.compile(step, backend=backend)
    else:
        compiled = cgcompile.compile(step, backend)
    x, state = torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)
    forward = set_forward_context(
        cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=BatchDescriptor(4)
    )
    for _ in range(6):
        x.copy_(torch.randn(4, 8))
        state.copy_(torch.randn(4, 8))
        expected_state = state.clone()
        step(x, expected_state)
        with torch.no_grad(), forward if context else nullcontext():
            same = compiled(x, state)
        assert same.data_ptr() == x.data_ptr()
        torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert backend.counters.replays >= 4
