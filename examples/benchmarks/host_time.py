"""Host time of a replayed step, as a ratio to the bare loop over the same graphs.

Run it on a machine with a CUDA device::

    python examples/benchmarks/host_time.py
    python examples/benchmarks/host_time.py --layers 8 --hidden 256 --burst 1

A decoder is split at an attention op that does nothing, so that what is left is the host's work.
The floor calls ``graph.replay()`` of the very same graphs, and the op with the same arguments, in a
loop without any bookkeeping: through the dispatcher, or the op's Python function directly
(``impl``). Each row is interleaved with its floor, in bursts of steps that do not wait for the
device, which is idle before each burst; medians of the time of a step are compared. Rows:

* ``sequence``: what a replay runs, alone: :class:`cgcompile.graphs.GraphSequence`;
* ``compiled graph``: what ``torch.compile`` calls, with the forward context, the guards and a look
  at the address of every weight; the context is made once and entered for each step;
* ``with a new context``: the same, the forward context made for each step;
* ``compiled model``: the whole call, with guards and parameter look-up of Dynamo;
* ``without guards``: the whole call of ``cgcompile.compile(guards="none")``, with the context;
* ``wrapper``: a call of the breakable wrapper around the uncompiled model.

Exits with 1 where a sequence of pieces is above ``--limit`` times its floor.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from rivals.timing import floor_of, timed
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context

LIBRARY = torch.library.Library("cgbench", "FRAGMENT")


def nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """What the attention op does, so that only its call costs."""


@cache
def define_attention() -> None:
    LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    LIBRARY.impl("attend", nothing, "CUDA")
    LIBRARY.impl("attend", nothing, "CPU")
    torch.library.register_fake("cgbench::attend", nothing, lib=LIBRARY)


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


def attention(full: bool, direct: bool) -> cgcompile.SplittingOp:
    support = cgcompile.AttentionCGSupport.ALWAYS if full else cgcompile.AttentionCGSupport.NEVER
    impl = nothing if direct else None
    return cgcompile.SplittingOp("cgbench::attend", support=support, impl=impl)


def compare(
    args: argparse.Namespace,
    name: str,
    floor: Callable[[], Any],
    call: Callable[[], Any],
    replays: Callable[[], int] | None = None,
) -> float:
    """Print one row beside its floor; the ratio."""
    rows = {"bare loop": floor, name: call}
    timed(rows, args.device, args.bursts, args.burst)
    before = replays() if replays is not None else 0
    times = timed(rows, args.device, args.bursts, args.burst)
    if replays is not None:  # else it would not be replays that were measured
        assert replays() - before == args.bursts * args.burst, replays()
    ratio = times[name] / times["bare loop"]
    for row, seconds in times.items():
        print(f"  {row:18} {seconds * 1e6:8.1f} us", end="")
    print(f"  ratio {ratio:5.2f}")
    return ratio


def decoder(args: argparse.Namespace, layers: int) -> tuple[nn.Module, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder(layers, args.hidden).to(args.device).eval()
    return model, torch.randn(args.batch, args.hidden, device=args.device)


def measure_compiled(
    args: argparse.Namespace, layers: int, mode: CUDAGraphMode, direct: bool
) -> float:
    """Print the rows of a compiled model; the ratio of its sequence."""
    model, x = decoder(args, layers)
    splitting_op = attention(mode is CUDAGraphMode.FULL, direct)
    backend = cgcompile.Backend(
        splitting_ops=(splitting_op,),
        compiler=args.compiler,
        capture_device="host" if args.device == "cpu" else "auto",
    )
    spy = Spy(backend)
    compiled = torch.compile(model, backend=spy)
    descriptor = BatchDescriptor(args.batch)
    context = set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)
    with torch.inference_mode():
        for _ in range(3):
            with context:
                compiled(x)
        (graph,) = backend.graphs
        inputs = spy.inputs

        def step() -> None:
            with context:
                graph(*inputs)

        def anew() -> None:
            with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
                graph(*inputs)

        def whole() -> None:
            with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
                compiled(x)

        (recording,) = graph.recordings
        sequence = recording.sequence
        kind = "the op's function" if direct else "the op through the dispatcher"
        print(f"{mode.name}: {sequence.num_graphs} graphs, {len(inputs)} inputs, {kind}")
        floor = floor_of(sequence, nothing if direct else torch.ops.cgbench.attend.default)
        ratio = compare(args, "sequence", floor, sequence.replay)
        calls: dict[str, Callable[[], None]] = {"compiled graph": step}
        if not direct:  # what is around the compiled graph does not depend on the call of the op
            calls |= {"with a new context": anew, "compiled model": whole}
        for name, call in calls.items():
            compare(args, name, floor, call, lambda: graph.counters.replays)
    if not direct:
        measure_unguarded(args, model, x, splitting_op, mode)
    return ratio


def measure_unguarded(
    args: argparse.Namespace,
    model: nn.Module,
    x: torch.Tensor,
    splitting_op: cgcompile.SplittingOp,
    mode: CUDAGraphMode,
) -> None:
    """Print the row of a model whose weights are bound."""
    compiled = cgcompile.compile(
        model,
        guards="none",
        splitting_ops=(splitting_op,),
        compiler=args.compiler,
        capture_device="host" if args.device == "cpu" else "auto",
    )
    descriptor = BatchDescriptor(args.batch)
    context = set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)
    with torch.inference_mode():

        def step() -> None:
            with context:
                compiled(x)

        for _ in range(3):
            step()
        (graph,) = compiled.backend.graphs
        (recording,) = graph.recordings
        floor = floor_of(recording.sequence, torch.ops.cgbench.attend.default)
        compare(args, "without guards", floor, step, lambda: graph.counters.replays)


def measure_breakable(args: argparse.Namespace, layers: int, direct: bool) -> float:
    """Print the rows of a model that is not compiled; the ratio of its sequence."""
    model, x = decoder(args, layers)
    config = cgcompile.CompilationConfig(
        splitting_ops=(attention(False, direct),),
        capture_device="host" if args.device == "cpu" else "auto",
    )
    wrapper = cgcompile.BreakableCUDAGraphWrapper(model, config)
    descriptor = BatchDescriptor(args.batch)
    mode = CUDAGraphMode.PIECEWISE
    context = set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)
    with torch.inference_mode():
        model(x)

        def step() -> None:
            with context:
                wrapper(x)

        step()
        sequence = wrapper.concrete_cudagraph_entries[descriptor].sequence
        kind = "the op's function" if direct else "the op through the dispatcher"
        print(f"breakable: {sequence.num_graphs} graphs, {kind}")
        floor = floor_of(sequence, nothing if direct else torch.ops.cgbench.attend.default)
        ratio = compare(args, "sequence", floor, sequence.replay)
        compare(args, "wrapper", floor, step, lambda: wrapper.counters.replays)
    return ratio


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Host time of a replayed step.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--layers", type=int, nargs="+", default=(32, 64))
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bursts", type=int, default=60)
    parser.add_argument("--burst", type=int, default=10, help="steps of a burst; 1: each alone")
    parser.add_argument("--limit", type=float, default=1.15)
    args = parser.parse_args(argv)
    define_attention()
    ratios = []
    for layers in args.layers:
        for direct in (False, True):
            ratios.append(measure_compiled(args, layers, CUDAGraphMode.PIECEWISE, direct))
            ratios.append(measure_breakable(args, layers, direct))
    measure_compiled(args, args.layers[0], CUDAGraphMode.FULL, False)
    print(f"highest ratio of a sequence of pieces: {max(ratios):.3f}")
    return 1 if max(ratios) > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
