"""The kernels of a step: names, times, kinds, and the gaps between them, by ``torch.profiler``."""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from rivals.report import Table
from rivals.timing import Call, hold

# The first kind whose expression is in the name of a kernel, by ``re.search``; else "rest".
# Inductor names a fused kernel by its ops, sorted: one that repeats heads has a clone of an expand.
KINDS = {
    "attention": r"(?i)attention|attend|fmha|flash|sdpa|softmax|fused.*_clone.*_expand",
    "products": r"(?i)gemm|gemv|nvjet|cutlass|cublas|splitk|(^|_)(add|b)?mm(_|$)|^project(_row)?$",
}
_HELD = "spin_kernel"  # of ``torch.cuda._sleep``


class Kernel(NamedTuple):
    """One kernel, copy or fill; microseconds."""

    name: str
    start: float
    us: float

    @property
    def kind(self) -> str:
        return next((kind for kind, rule in KINDS.items() if re.search(rule, self.name)), "rest")


def rules() -> str:
    """Return how a kernel gets its kind, as text."""
    lines = [f"  {kind}: {rule}" for kind, rule in KINDS.items()]
    return "\n".join(["kind of a kernel: the first expression in its name, else rest", *lines])


def profiled(call: Call, host_seconds: float) -> list[Kernel]:
    """Return all kernels of a call that was enqueued wholly before any of it ran, in order.

    Args:
        call: what is profiled; it has run before.
        host_seconds: about how long it takes to enqueue.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.synchronize()
        hold(host_seconds)
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [
        Kernel(event["name"], event["ts"], event["dur"])
        for event in events
        if event.get("cat") in kinds and _HELD not in event["name"]
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def gaps(kernels: Sequence[Kernel]) -> list[float]:
    """Return the microseconds before each kernel in which no other ran; negative: it overlaps."""
    idle, busy_until = [], None
    for kernel in kernels:
        idle.append(0.0 if busy_until is None else kernel.start - busy_until)
        busy_until = max(busy_until or 0.0, kernel.start + kernel.us)
    return idle


def by_kind(kernels: Sequence[Kernel], steps: int) -> dict[str, float]:
    """Return milliseconds a step by kind.

    A kernel that starts before an earlier one has ended, as with programmatic dependent launch, is
    counted from that end, so that the kinds together are the time in which the device was busy.
    """
    times = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for kernel, gap in zip(kernels, gaps(kernels), strict=True):
        times[kernel.kind] += max(kernel.us + min(gap, 0.0), 0.0) / 1e3 / steps
    return times


def timeline_table(kernels: Sequence[Kernel], steps: int) -> Table:
    """Return one row for each name, in the order of their first kernels."""
    rows: Table = [["kernel", "kind", "a step", "us each", "us a step", "gap before, us"]]
    times: dict[str, list[tuple[float, float]]] = {}
    for kernel, gap in zip(kernels, gaps(kernels), strict=True):
        times.setdefault(kernel.name, []).append((kernel.us, gap))
    for name, pairs in times.items():
        us = sum(each for each, _ in pairs)
        gap = sum(each for _, each in pairs) / len(pairs)
        kind = Kernel(name, 0.0, 0.0).kind
        count = f"{len(pairs) / steps:g}"
        cells = [f"{us / len(pairs):.2f}", f"{us / steps:.1f}", f"{gap:.2f}"]
        rows.append(
            [name if len(name) < 90 else f"{name[:60]}...{name[-26:]}", kind, count, *cells]
        )
    idle = sum(max(gap, 0.0) for gap in gaps(kernels)) / steps
    busy = sum(kernel.us for kernel in kernels) / steps
    rows.append(["all", "", f"{len(kernels) / steps:g}", "", f"{busy:.1f}", f"{idle:.1f} in all"])
    return rows
