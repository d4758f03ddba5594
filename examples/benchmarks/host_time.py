"""Host time of a replayed step, as a ratio to the bare loop over the same graphs.

Run it on a machine with a CUDA device::

    python examples/benchmarks/host_time.py
    python examples/benchmarks/host_time.py --layers 8 --hidden 256 --burst 1

A decoder is split at an attention op that does nothing, so that what is left is the host's work.
The floor calls ``graph.replay()`` of the very same graphs, and the op through the dispatcher, in a
loop without any bookkeeping. Each row is interleaved with it, in bursts of steps that do not wait
for the device, which is idle before each burst; medians of the time of a step are compared. Rows:

* ``compiled graph``: what ``torch.compile`` calls, in a forward context that is made once for the
  batch and entered for each step; Dynamo's guards not included;
* ``with a new context``: the same, the forward context made for each step;
* ``compiled model``: the whole call, with guards and parameter look-up of Dynamo.

Exits with 1 where a ratio of a compiled graph is above ``--limit``.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.entry import CompiledGraph

LIBRARY = torch.library.Library("cgbench", "FRAGMENT")


def define_attention() -> None:
    """An attention op that does nothing, so that only its call costs."""
    LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    LIBRARY.impl("attend", lambda q, k, v, out: None, "CUDA")
    LIBRARY.impl("attend", lambda q, k, v, out: None, "CPU")
    torch.library.register_fake("cgbench::attend", lambda q, k, v, out: None, lib=LIBRARY)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        attended = torch.zeros_like(q)
        torch.ops.cgbench.attend(q, k, v, attended)
        x = x + self.out(attended)
        h: torch.Tensor = x + self.down(nn.functional.silu(self.up(self.norm2(x))))
        return h


class Decoder(nn.Module):
    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        normed: torch.Tensor = self.norm(x)
        return normed


class Spy:
    """A backend that keeps the last inputs that each compiled graph was called with."""

    def __init__(self, backend: cgcompile.Backend) -> None:
        self.backend = backend
        self.inputs: tuple[Any, ...] = ()

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]:
        graph = self.backend(gm, example_inputs)

        def run(*inputs: Any) -> Any:
            self.inputs = inputs
            return graph(*inputs)

        return run


def attention(full: bool) -> cgcompile.SplittingOp:
    support = cgcompile.AttentionCGSupport.ALWAYS if full else cgcompile.AttentionCGSupport.NEVER
    return cgcompile.SplittingOp("cgbench::attend", support=support)


def public_replay(graph: Any) -> Callable[[], None]:
    """``torch.cuda.CUDAGraph.replay``, as anybody would call it."""
    replay: Callable[[], None] = getattr(graph, "_graph", graph).replay
    return replay


def floor_of(graph: CompiledGraph, descriptor: BatchDescriptor, mode: CUDAGraphMode) -> Any:
    """The bare loop: the same graphs, and the op called through the dispatcher."""
    (binding,) = graph.bindings
    if mode is CUDAGraphMode.FULL:
        return public_replay(binding.full.concrete_cudagraph_entries[descriptor].graph)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    values: dict[str, Any] = {}
    for piece in graph.split.pieces:
        if piece.capture:
            entry = binding.wrappers[piece.index].concrete_cudagraph_entries[descriptor]
            values.update(zip(piece.outputs, entry.output, strict=True))
            calls.append((public_replay(entry.graph), ()))
        else:
            given = tuple(values[name] for name in piece.inputs if name in values)
            calls.append((torch.ops.cgbench.attend.default, given))

    def run() -> None:
        for call, given in calls:
            call(*given)

    return run


def timed(rows: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of one call of each row, bursts interleaved."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(args.bursts):
        for name, call in rows.items():
            if args.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(args.burst):
                call()
            found[name].append((time.perf_counter() - start) / args.burst)
    return {name: statistics.median(times) for name, times in found.items()}


def measure(args: argparse.Namespace, mode: CUDAGraphMode) -> dict[str, float]:
    """Print the rows of one mode; the ratio to the bare loop of each."""
    torch._dynamo.reset()
    backend = cgcompile.Backend(
        splitting_ops=(attention(mode is CUDAGraphMode.FULL),),
        compiler=args.compiler,
        capture_device="host" if args.device == "cpu" else "auto",
    )
    spy = Spy(backend)
    torch.manual_seed(0)
    model = Decoder(args.layers, args.hidden).to(args.device).eval()
    compiled = torch.compile(model, backend=spy)
    x = torch.randn(args.batch, args.hidden, device=args.device)
    descriptor = BatchDescriptor(args.batch)
    with torch.inference_mode():
        for _ in range(3):
            with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
                compiled(x)
        (graph,) = backend.graphs
        inputs = spy.inputs

        context = set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)

        def step() -> None:
            with context:
                graph(*inputs)

        def anew() -> None:
            with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
                graph(*inputs)

        def whole() -> None:
            with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
                compiled(x)

        captured = sum(piece.capture for piece in graph.split.pieces)
        print(f"{mode.name}: {captured} captured pieces, {len(inputs)} inputs")
        ratios = {}
        calls = {"compiled graph": step, "with a new context": anew, "compiled model": whole}
        for name, call in calls.items():
            rows = {"bare loop": floor_of(graph, descriptor, mode), name: call}
            timed(rows, args)
            before = graph.counters.replays
            found = timed(rows, args)
            assert graph.counters.replays - before == args.bursts * args.burst, graph.counters
            ratios[name] = found[name] / found["bare loop"]
            for row, seconds in found.items():
                print(f"  {row:18} {seconds * 1e6:8.1f} us", end="")
            print(f"  ratio {ratios[name]:5.2f}")
    return ratios


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Host time of a replayed step.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bursts", type=int, default=100)
    parser.add_argument("--burst", type=int, default=10, help="steps of a burst; 1: each alone")
    parser.add_argument("--limit", type=float, nargs=2, default=(2.0, 3.0), metavar=("PW", "FULL"))
    args = parser.parse_args(argv)
    define_attention()
    failed = False
    modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    for mode, limit in zip(modes, args.limit, strict=True):
        failed |= measure(args, mode)["compiled graph"] > limit
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
