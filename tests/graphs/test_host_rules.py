"""What captures refuse and allow, on the host recorder and on CUDA alike: a table of rules."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lib.breakable import FULL, step
from lib.capture_rules import RULES
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphCapture
from cgcompile.config import CompilationConfig
from cgcompile.errors import CaptureError
from cgcompile.graphs.pool import GraphPool
from cgcompile.testing.host import HostGraph, HostPool


def run(model: Callable, x: torch.Tensor) -> torch.Tensor:
    wrapper = cgcompile.CUDAGraphWrapper(model, CompilationConfig(capture_device="host"))
    with torch.inference_mode(), step(1, FULL):
        result = wrapper(x)
    assert wrapper.counters.captures == 1
    return result


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


# ------------------------------------------------------------------ equal on the host and on CUDA


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_host_and_cuda_have_one_rule(
    name: str, inference: bool, device: str, pool: GraphPool
) -> None:
    rule = RULES[name]
    torch.manual_seed(0)
    x = torch.rand(8, device=device)
    before, capture, after = (BreakableCUDAGraphCapture(pool) for _ in range(3))
    with torch.inference_mode(inference), torch.no_grad():
        rule.step(x)
        torch.manual_seed(0)
        with before:
            sine = x.sin()
        if rule.refused:
            text = "captur" if device == "cpu" else None
            with pytest.raises(RuntimeError, match=text) as caught, capture:
                rule.step(x)
            if device == "cpu":
                assert isinstance(caught.value, CaptureError)
                assert "not permitted when stream is capturing" in str(caught.value)
            assert not pool.device.is_capturing()
        else:
            with capture:
                result = rule.step(x)
        with after:
            cosine = x.cos()
    for _ in range(3):
        x.uniform_()
        for recorded in (before, after) if rule.refused else (before, capture, after):
            recorded.replay()
        assert torch.equal(sine, x.sin())
        assert torch.equal(cosine, x.cos())
        assert rule.refused or torch.equal(result, rule.step(x))


def test_one_hot_of_known_width_reads_nothing(device: str, pool: GraphPool) -> None:
    """Outside of inference mode the host recorder sees checks that its CPU kernel makes alone."""
    ids = torch.tensor([0, 2, 1], device=device)
    capture = BreakableCUDAGraphCapture(pool)
    with torch.inference_mode():
        with capture:
            result = nn.functional.one_hot(ids, 3) + 1
        for _ in range(2):
            ids.random_(3)
            capture.replay()
            assert torch.equal(result, nn.functional.one_hot(ids, 3) + 1)
        other = BreakableCUDAGraphCapture(pool)
        with pytest.raises(RuntimeError), other:
            nn.functional.one_hot(ids)


def test_an_input_without_rows_may_be_freed(device: str) -> None:
    x = torch.rand(8, device=device)
    capture = BreakableCUDAGraphCapture(device=device)
    empty = torch.rand(8, device=device)[:0]
    with capture:
        result = torch.cat([x, empty * 2])
    del empty
    for _ in range(2):
        x.uniform_()
        capture.replay()
        assert torch.equal(result, x)


def test_a_graph_reads_memory_of_another_live_pool(device: str) -> None:
    """The tensor dies, the memory stays as long as the pool has graphs."""
    x = torch.rand(8, device=device)
    first = BreakableCUDAGraphCapture(device=device)
    second = BreakableCUDAGraphCapture(device=device)
    with first:
        between = x + 1
    with second:
        result = between * 2
    del between
    for _ in range(3):
        x.uniform_()
        first.replay()
        second.replay()
        assert torch.equal(result, (x + 1) * 2)


def test_the_host_recorder_notices_that_another_pool_is_gone() -> None:
    x = torch.rand(8)
    first, second = (BreakableCUDAGraphCapture(device="cpu") for _ in range(2))
    with first:
        between = x + 1
    with second:
        between * 2
    del between, first
    gc.collect()
    with pytest.raises(CaptureError, match="freed after the capture"):
        second.replay()


def test_the_same_seed_again_is_allowed_and_changes_nothing(device: str) -> None:
    x = torch.rand(8, device=device)
    torch.manual_seed(7)
    capture = BreakableCUDAGraphCapture(device=device)
    with capture:
        torch.manual_seed(7)
        result = torch.rand_like(x)
    capture.replay()
    first = result.clone()
    capture.replay()
    assert not torch.equal(first, result)


class Backward(torch.autograd.Function):
    """Its backward pass breaks."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        cgcompile.eager_break_during_capture(torch.Tensor.neg_)(grad)
        return grad


def test_a_break_in_a_backward_pass_is_refused(device: str) -> None:
    """On CUDA the backward pass has a thread of its own, and no capture can end there."""
    weight = torch.ones(8, device=device, requires_grad=True)
    weight.grad = torch.zeros(8, device=device)
    capture = BreakableCUDAGraphCapture(device=device)
    with pytest.raises(CaptureError, match=r"backward pass|another thread"), capture:
        Backward.apply(weight * 2).sum().backward()
    again = BreakableCUDAGraphCapture(device=device)
    with torch.no_grad(), again:
        result = weight * 3
    again.replay()
    assert torch.equal(result, weight * 3)


class Ends(torch.autograd.Function):
    """Its backward pass ends a recording."""

    graph: HostGraph

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        Ends.graph.end()
        return grad


def test_an_ended_recording_takes_no_more_ops() -> None:
    """The autograd engine restores the dispatch modes that were on when it started."""

    def run() -> list[float]:
        Ends.graph, weight = HostGraph(), torch.ones(8, requires_grad=True)
        Ends.graph.begin(HostPool())
        with pytest.raises(CaptureError, match="segment that has ended"):
            Ends.apply(weight * 2).sum().backward()
        return (weight + 1).tolist()  # outside of the backward pass nothing is refused

    with ThreadPoolExecutor(1) as thread:  # torch keeps the mode on, in the thread
        assert thread.submit(run).result() == [2.0] * 8
