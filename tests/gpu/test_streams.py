"""Inputs that another stream writes, and replays on changing streams."""

import pytest
import torch
from lib.entry import EAGER_ATTEND, assert_same, batch, compiled_case

from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphMode,
    set_forward_context,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_gradients")]
SLEEP = 50_000_000  # cycles: tens of milliseconds, far longer than a step


def written_elsewhere(buffer: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    """Fill a buffer on another stream, late; returns what it will hold."""
    values = torch.randn_like(buffer)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        buffer.copy_(values)
    return values


@pytest.mark.parametrize("kind", ["event", "stream"])
@pytest.mark.parametrize("front", ["compiled", "wrapper"])
def test_a_step_waits_for_inputs_of_another_stream(kind: str, front: str) -> None:
    model, compiled, _ = compiled_case("op_packet", "cuda")
    config = CompilationConfig(splitting_ops=EAGER_ATTEND["splitting_ops"])
    call = compiled if front == "compiled" else BreakableCUDAGraphWrapper(model, config)
    side, x = torch.cuda.Stream(), batch("cuda")
    for _ in range(5):  # warming, capture, replays
        values = written_elsewhere(x, side)
        ready = side.record_event() if kind == "event" else side
        with set_forward_context(
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=BatchDescriptor(len(x)),
            inputs_ready=ready,
        ):
            found = call(x).clone()
        assert_same(found, model(values))


def test_replays_on_changing_streams_come_in_order() -> None:
    model, compiled, backend = compiled_case("op_packet", "cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    found, expected = [], []
    for step in range(12):
        x = batch("cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[step % 3]):
            if step % 3:
                torch.cuda._sleep(SLEEP // 10)
            found.append(compiled(x))
            expected.append(model(x))
    torch.cuda.synchronize()
    for mine, its in zip(found, expected, strict=True):
        assert_same(mine, its)
    assert backend.counters.replays == 10
