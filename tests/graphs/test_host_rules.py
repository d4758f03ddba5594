"""What the host recorder must know of composite ops, which inference mode shows whole."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode
from cgcompile.config import CompilationConfig
from cgcompile.errors import CaptureError


def run(model: Callable, x: torch.Tensor) -> torch.Tensor:
    wrapper = cgcompile.CUDAGraphWrapper(model, CompilationConfig(capture_device="host"))
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(1)
    )
    with torch.inference_mode(), context:
        result = wrapper(x)
    assert wrapper.counters.captures == 1
    return result


READS = {
    "condition": lambda x: x + 1 if x.sum() > 0 else x,
    "where": lambda x: torch.where(x > 0)[0],
    "argwhere": lambda x: torch.argwhere(x > 0),
    "repeats": lambda x: x.repeat_interleave(torch.ones_like(x).long()),
    "repeats along": lambda x: x.repeat_interleave(repeats=torch.ones_like(x).long(), dim=0),
}


@pytest.mark.parametrize("name", READS)
def test_reads_inside_of_composite_ops_are_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        run(READS[name], torch.ones(3))


SOUND = {
    "where": lambda x: torch.where(x > 0, x, -x) * 2,
    "a number of repeats": lambda x: x.repeat_interleave(2),
    "a known size": lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=3) + 1,
}


@pytest.mark.parametrize("name", SOUND)
def test_what_reads_nothing_is_captured(name: str) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(run(SOUND[name], x), SOUND[name](x))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_move_once(kind: type[nn.Module]) -> None:
    """A capturing call is one execution: the recording run itself must leave nothing behind."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    model = kind(3, track_running_stats=True)
    other = kind(3, track_running_stats=True)
    assert torch.equal(run(model, x), other(x))
    assert torch.equal(model.running_mean, other.running_mean)
    assert torch.equal(model.running_var, other.running_var)
    assert other.running_mean.abs().sum() > 0


def test_composite_ops_choose_the_same_kernels() -> None:
    """A product in a linear layer is folded into a matrix only if its weight requires gradients."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(64, 4, 8)

    def one_token(x: torch.Tensor) -> torch.Tensor:
        return layer(x[:, :1])

    with torch.inference_mode():
        assert torch.equal(run(one_token, x), one_token(x))
