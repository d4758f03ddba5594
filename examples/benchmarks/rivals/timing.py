"""Clocks and floors of the benchmarks: host time, GPU time, memory, and the bare loop.

*Bare loop*: the very graphs of a recorded step replayed one by one, and the op called in between,
with the same arguments, without any bookkeeping. What a step costs on top is what a library costs.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cgcompile.graphs.sequence import EagerSegment, GraphSequence

Call = Callable[[], Any]
_CYCLES = 2.0e6  # of a sleep kernel in a millisecond, or more; GPUs run at less than 2 GHz


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device: str) -> tuple[int, int]:
    """Bytes that torch's allocator holds, and bytes of the device that are in use.

    cuBLAS's scratch of the current stream is always part of it. torch's own CUDA graphs throw it
    away, and the next product would be charged for it.
    """
    gc.collect()
    if device != "cuda":
        return 0, 0
    torch.cuda.current_blas_handle()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved(), total - free


# ---------------------------------------------------------------- floors


def public_replay(graph: Any) -> Call:
    """``torch.cuda.CUDAGraph.replay``, as anybody would call it."""
    replay: Call = getattr(graph, "_graph", graph).replay
    return replay


def bare_loop(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Call:
    """A loop over functions and their arguments."""

    def run() -> None:
        for call, args in calls:
            call(*args)

    return run


def floor_of(
    sequence: GraphSequence,
    op: Callable[..., Any],
    op_args: Iterable[tuple[Any, ...]] | None = None,
) -> Call:
    """The bare loop of a recorded step.

    Args:
        sequence: the step: the very same graphs are replayed.
        op: what runs between them.
        op_args: its arguments, in order; left out: those that are bound in the sequence.
    """
    bound = (each.args for each in sequence.segments if isinstance(each, EagerSegment))
    arguments = iter(bound if op_args is None else op_args)
    return bare_loop(
        [
            (op, next(arguments))
            if isinstance(segment, EagerSegment)
            else (public_replay(segment.graph), ())
            for segment in sequence.segments
        ]
    )


# ---------------------------------------------------------------- clocks


def burst_seconds(call: Call, device: str, burst: int) -> float:
    """Host seconds of one call, of a burst that does not wait for the device, idle before."""
    wait(device)
    start = time.perf_counter()
    for _ in range(burst):
        call()
    return (time.perf_counter() - start) / burst


def timed(rows: Mapping[str, Call], device: str, bursts: int, burst: int) -> dict[str, float]:
    """Median host seconds of one call of each row, bursts interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(bursts):
        for name, call in rows.items():
            samples[name].append(burst_seconds(call, device, burst))
    return {name: statistics.median(times) for name, times in samples.items()}


def wall_seconds(call: Call, device: str) -> float:
    """Seconds of one call until the device is idle again."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def hold(host_seconds: float) -> None:
    """Enqueue a kernel that sleeps for about twice as long, so that what follows is queued."""
    torch.cuda._sleep(int(_CYCLES * (1e3 * host_seconds * 2 + 0.2)))


def gpu_seconds(call: Call, host_seconds: float) -> float | None:
    """Seconds of the GPU for one call that was enqueued wholly before any of it ran.

    A sleep kernel holds the GPU meanwhile.

    Args:
        call: what is timed.
        host_seconds: about how long it takes to enqueue.

    Returns:
        None where the GPU did not wait long enough, as with more kernels than it can queue.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    hold(host_seconds)
    begin.record()
    call()
    held = not begin.query()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 if held else None


@dataclass
class Probe:
    """A small graph of known length, to tell in which pace the GPU replays graphs.

    One and the same graph replays at two speeds on some GPUs, a few tenths of a microsecond per
    node apart, and which of them may change. Replayed beside a measurement it labels it.

    Attributes:
        replay: of the graph.
        first: its seconds just after capture, in a fresh process.
    """

    replay: Call
    first: float = 0.0

    @classmethod
    def make(cls, nodes: int = 240) -> "Probe":
        """Capture on a stream of its own, without a warm-up on it."""
        x = torch.zeros(4096, device="cuda").add_(1.0)  # the kernel is loaded now
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                x.add_(1.0)
        probe = cls(graph.replay)
        probe.first = probe.seconds()
        return probe

    def seconds(self) -> float:
        samples = [gpu_seconds(self.replay, 1e-4) for _ in range(7)]
        return statistics.median([each for each in samples if each is not None])

    def pace(self) -> float:
        """The time of the probe now, relative to its first."""
        return self.seconds() / self.first
