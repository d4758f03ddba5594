"""Seconds until the first result, cold and warm, and what a compiled model costs per call.

Run it on a machine with a CUDA device::

    python examples/benchmarks/compile_time.py
    python examples/benchmarks/compile_time.py --layers 2 --hidden 64 --device cpu --calls 100

A decoder with an attention op that writes into a cache and a given output is compiled in several
ways. Each way runs in processes of its own. *Cold*: all caches are empty. *Warm*: the same again,
with what the first process has left in the caches that belong to it: for cgcompile its own folder
alone, Inductor's and Triton's are emptied; for torch.compile those of Inductor and Triton.
``total`` is the first call in seconds, without capture of graphs. The row ``dynamo`` is
torch.compile with a backend that does nothing.

The table below is the cost of a call beside the compiled graph, in microseconds: guards, binding
of arguments, look-up of parameters, results. The graph is replaced by a constant there.

Exits with 1 where results differ from the plain model, or a warm start compiles anything.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rivals.decoder import OP, Decoder, Dims, Steps, make_decoder
from torch import nn

import cgcompile
from cgcompile.compile import CompiledModel
from cgcompile.tracing.trace_cache import Rules, Traces

WAYS = (
    "dynamo",
    "cgcompile none eager",
    "cgcompile none inductor",
    "cgcompile keep inductor",
    "torch.compile",
    "reduce-overhead",
)


OPTIONS: dict[str, Any] = {
    "splitting_ops": OP,
    "cudagraph_mode": "NONE",  # what is measured is compilation
}


def build(args: argparse.Namespace) -> tuple[Decoder, tuple[torch.Tensor, torch.Tensor]]:
    dims = Dims(
        args.layers,
        args.hidden,
        args.heads,
        args.kv_heads,
        args.intermediate,
        args.vocabulary,
        args.context,
    )
    model = make_decoder(dims, args.tokens, args.device, getattr(torch, args.dtype))
    steps = Steps(dims, args.tokens, args.device)
    steps.draw(0)
    return model, steps.views(args.tokens)


def compiled_in(way: str, model: nn.Module) -> Callable[..., Any]:
    """The model, to be compiled at its first call."""
    if way == "dynamo":
        return torch.compile(model, backend=lambda graph, inputs: graph.forward, dynamic=True)
    if way == "torch.compile static":
        return torch.compile(model)
    if way == "torch.compile":
        return torch.compile(model, dynamic=True)
    if way == "named entry point":
        return torch.compile(model, backend="cgcompile", dynamic=True, options=OPTIONS)
    if way == "reduce-overhead":
        return torch.compile(model, mode="reduce-overhead", dynamic=True)
    _, guards, compiler = way.split()
    compiled: Callable[..., Any] = cgcompile.compile(
        model,
        compiler=compiler,
        guards=guards,
        **OPTIONS,
        dynamic_dims={"tokens": {0: "tokens"}, "positions": {0: "tokens"}},
    )
    return compiled


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One way in this process."""
    model, inputs = build(args)
    with torch.inference_mode():
        expected = model(*inputs)
        if args.device == "cuda":
            torch.cuda.synchronize()
        call = compiled_in(args.way, model)
        start = time.perf_counter()
        result = call(*inputs)
        if args.device == "cuda":
            torch.cuda.synchronize()
        total = time.perf_counter() - start
        largest = float((result - expected).abs().max() / expected.abs().max())
    counted = torch._dynamo.utils.counters
    compiled = counted["inductor"]["fxgraph_cache_miss"]
    compiled += counted["aot_autograd"]["autograd_cache_miss"]
    row: dict[str, Any] = {"total": total, "difference": largest, "compiled": compiled}
    if isinstance(call, CompiledModel):
        row["about"] = str(call.traces[0].start)
    return row


def entry_costs(args: argparse.Namespace) -> None:
    """Microseconds of a call beside the graph, for each way to treat guards."""
    model, inputs = build(args)
    dims = {"tokens": {0: "tokens"}, "positions": {0: "tokens"}}
    with torch.inference_mode():
        expected = model(*inputs)
        constant = lambda *_: (expected,)  # noqa: E731
        backend = lambda graph, _: constant  # noqa: E731
        calls: dict[str, Callable[..., Any]] = {
            guards: Traces(model, lambda graph, _, frozen: constant, dims, Rules(guards))
            for guards in ("keep", "shape", "none")
        }
        calls["torch.compile"] = torch.compile(model, backend=backend, dynamic=True)
        calls["the graph alone"] = constant
        for name, call in calls.items():
            call(*inputs)
            times = []
            for _ in range(20):
                start = time.perf_counter()
                for _ in range(args.calls):
                    call(*inputs)
                times.append((time.perf_counter() - start) / args.calls)
            print(f"  {name:20} {min(times) * 1e6:8.2f} us")


def run(
    options: Sequence[str], way: str, caches: Path, warm: bool, *, keep_all: bool = False
) -> dict[str, Any]:
    """One way in a process of its own; see the header for what is left in its caches.

    Args:
        options: arguments of this script.
        way: one of WAYS.
        caches: a folder.
        warm: whether ``caches`` holds what a cold run has left.
        keep_all: keep the caches of Inductor and Triton for a warm start of cgcompile as well.

    Raises:
        RuntimeError: the process failed.
    """
    ours = way.startswith("cgcompile")
    torchs = caches / ("torch_warm" if ours and warm and not keep_all else "torch")
    environment = {
        **os.environ,
        "CGCOMPILE_CACHE_DIR": str(caches / "cgcompile"),
        "TORCHINDUCTOR_CACHE_DIR": str(torchs / "inductor"),
        "TRITON_CACHE_DIR": str(torchs / "triton"),
    }
    command = [sys.executable, __file__, *options, "--way", way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cold and warm start, and the cost of a call.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--way", help="measure this one in this process")
    args = parser.parse_args(argv)
    options = list(sys.argv[1:] if argv is None else argv)
    if args.way:
        print(json.dumps(measure(args)))
        return 0
    good = True
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            for warm in (False, True):
                row = run(options, way, Path(folder), warm)
                good &= row["difference"] < (3e-2 if args.dtype == "bfloat16" else 1e-4)
                good &= not (warm and way.startswith("cgcompile") and row["compiled"])
                print(
                    f"{way:26} {'warm' if warm else 'cold'}  total {row['total']:7.2f} s  "
                    f"compilations {row['compiled']}  {row.get('about', '')}",
                    flush=True,
                )
    print("cost of a call:")
    entry_costs(args)
    print(f"right, and warm starts compile nothing: {'yes' if good else 'no'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
