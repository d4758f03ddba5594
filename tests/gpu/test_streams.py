"""What else a process does on the device: other streams, a first attention after a capture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lib.entry import EAGER_ATTEND, assert_same, batch, compiled_case

import cgcompile
from cgcompile import BatchDescriptor, BreakableCUDAGraphWrapper, CompilationConfig, CUDAGraphMode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("without_gradients")]
SLEEP = 50_000_000  # cycles: tens of milliseconds, far longer than a step


def written_elsewhere(buffer: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
    """Fill a buffer on another stream, late; return the values that it will hold."""
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
        with cgcompile.set_forward_context(
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=BatchDescriptor(len(x)),
            inputs_ready=ready,
        ):
            result = call(x).clone()
        assert_same(result, model(values))


def test_replays_on_changing_streams_keep_their_order() -> None:
    model, compiled, backend = compiled_case("op_packet", "cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    results, expected = [], []
    for step in range(12):
        x = batch("cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[step % 3]):
            if step % 3:
                torch.cuda._sleep(SLEEP // 10)
            results.append(compiled(x))
            expected.append(model(x))
    torch.cuda.synchronize()
    for result, want in zip(results, expected, strict=True):
        assert_same(result, want)
    assert backend.counters.replays == 10


@torch.library.custom_op("cgstreams::pause", mutates_args=())
def pause(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(SLEEP)
    return x.clone()


pause.register_fake(torch.empty_like)


def test_a_capture_waits_for_a_replay_on_another_stream() -> None:
    """Graphs of all sizes share input memory: a capturing call copies into it after the replay."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return pause(x) + x * 2

    backend = cgcompile.Backend(compiler="eager", splitting_ops=("cgstreams::pause",))
    compiled = cgcompile.compile(step, backend, dynamic_dims={"x": 0})
    large, small = torch.randn(8, 4, device="cuda"), torch.randn(6, 4, device="cuda")
    for x in (large, large, small):  # the next call with 6 rows is captured
        compiled(x)
    before = backend.counters
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        replayed = compiled(large)
    with torch.cuda.stream(torch.cuda.Stream()):
        captured = compiled(small)
    torch.cuda.synchronize()
    after = backend.counters
    assert (after.replays - before.replays, after.captures - before.captures) == (1, 1)
    assert_same(replayed, large * 3)
    assert_same(captured, small * 3)


FIRST = """
import torch
import cgcompile
from cgcompile import BatchDescriptor
linear = torch.nn.Linear(64, 64, device="cuda").requires_grad_(False)
x = torch.randn(4, 64, device="cuda")
wrapper = cgcompile.CUDAGraphWrapper(linear)
backend = cgcompile.Backend(compiler="eager")
compiled = torch.compile(linear, backend=backend)
def step(call):
    with cgcompile.set_forward_context(
        cudagraph_runtime_mode="FULL", batch_descriptor=BatchDescriptor(4)
    ):
        return call(x)
with torch.inference_mode():
    for call in (wrapper, compiled):
        for _ in range(3):
            step(call)
    q = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.float16)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    for call in (wrapper, compiled):
        x.normal_()
        torch.testing.assert_close(step(call), linear(x))
print(wrapper.counters.captures, backend.counters.captures)
"""


@pytest.mark.slow
def test_the_first_attention_of_a_process_leaves_graphs_as_they_are() -> None:
    """torch changes the priority of attention kernels at that call."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", FIRST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "1 1\n", done.stderr
