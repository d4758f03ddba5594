"""``debug="poison"`` shows a read of memory that the step has not written, on every front end."""

import pytest
import torch
from lib.front_ends import FRONT_ENDS, ROWS, WIDTH, WRAPPERS, context, front_end, settings
from torch import nn

import cgcompile
from cgcompile import CUDAGraphMode
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool

pytestmark = pytest.mark.usefixtures("without_gradients")


@torch.library.custom_op("hazards::unwritten", mutates_args=())
def unwritten(x: torch.Tensor) -> torch.Tensor:
    """Return memory of which the first row alone is written."""
    result = torch.empty_like(x)
    result[:1] = x[:1]
    return result


unwritten.register_fake(torch.empty_like)


class Right(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) + 1
        return (y * 2).sum(1, keepdim=True) + y


class Stale(Right):
    """Reads memory that later ops of the step before have filled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stale = unwritten(x) * 1
        return super().forward(x) + stale


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_stale_read_shows(name: str, device: str) -> None:
    """On the host the recorder runs the body of a Python kernel op by op."""
    right = front_end(name, Right().to(device), device, debug="poison")
    stale = front_end(name, Stale().to(device), device, debug="poison")
    with torch.inference_mode():
        for call in range(5):
            x = torch.rand(ROWS, WIDTH, device=device)
            torch.testing.assert_close(right.step(x), Right()(x))
            result = stale.step(x)
            torch.testing.assert_close(result[:1], Right()(x)[:1] + x[:1])
            if call > 2:
                assert result[1:].isnan().all()
    assert right.counters().replays >= 2
    assert stale.counters().replays >= 2


@pytest.mark.parametrize("name", WRAPPERS)
def test_two_wrappers_of_one_pool_in_one_step(name: str, device: str) -> None:
    """The second one reads the result of the first one, and so does the caller after it."""
    config = settings(device, debug="poison")  # with "stale" ``kept`` expires
    pool = GraphPool(capture_device(torch.device(device), "host"))
    kind = getattr(cgcompile, name)
    first = kind(Right(), config, CUDAGraphMode.FULL, pool=pool)
    stale = kind(Stale(), config, CUDAGraphMode.FULL, pool=pool)
    x, y = (torch.empty(ROWS, WIDTH, device=device) for _ in range(2))
    for call in range(4):
        x.uniform_()
        with context():
            kept = first(x)
            last = stale(y.copy_(kept))
        torch.testing.assert_close(kept, Right()(x))
        torch.testing.assert_close(last[:1], Right()(y)[:1] + y[:1])
        if call:
            assert last[1:].isnan().all()
    assert first.counters.replays == stale.counters.replays == 3
