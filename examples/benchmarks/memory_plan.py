"""What graphs take of the device: planned before any capture, against measured after.

Run it on a machine with a CUDA device::

    python examples/benchmarks/memory_plan.py

Three models, each compiled in pieces, as FULL graphs and by breakable capture. ``planned`` is the
total of :meth:`CudaGraphManager.plan`, ``measured`` what all graphs took, ``plan`` the time of
planning; ``device`` is what the device lost by capturing, and ``after release`` what it did not get
back. ``--growth`` prints what each graph took, captured one after the other; ``--isolate`` gives
each row a process of its own.

Exits with 1 where a plan differs from what was measured by more than 10 % and 8 MiB.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from host_time import Decoder, attention, define_attention
from rivals.timing import memory
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode
from cgcompile.serving import (
    Batch,
    CudagraphDispatcher,
    CudaGraphManager,
    InputBuffer,
    Metadata,
    capture_sizes,
)

MIB = 2**20
WAYS = ("PIECEWISE", "FULL", "breakable")


class Encoder(nn.Module):
    """A perceptron with large activations between narrow ends, as in a vision tower."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        wide = 16 * hidden
        self.up = nn.ModuleList(nn.Linear(hidden, wide) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(wide, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(self.norm(x))))
        return x


# name: model, layers, hidden, the largest size
MODELS: dict[str, tuple[type[nn.Module], int, int, int]] = {
    "small decoder": (Decoder, 8, 512, 256),
    "large decoder": (Decoder, 8, 2048, 256),
    "encoder": (Encoder, 6, 1024, 512),
}


def metadata(batch: Batch, descriptor: BatchDescriptor, buffers: dict[str, Any]) -> Metadata:
    return Metadata(0)


def manager_of(args: argparse.Namespace, name: str, way: str) -> CudaGraphManager:
    """A manager of a fresh model; nothing is captured."""
    kind, layers, hidden, largest = MODELS[name]
    largest = min(largest, args.largest)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind(layers, hidden).to(args.device, torch.bfloat16).eval()
    mode = CUDAGraphMode.FULL if way == "FULL" else CUDAGraphMode.PIECEWISE
    config = cgcompile.CompilationConfig(
        splitting_ops=(attention(way == "FULL", False),) if kind is Decoder else (),
        capture_device="host" if args.device == "cpu" else "auto",
        compiler=args.compiler,
    )
    called: Any = model
    if way != "breakable":
        called = torch.compile(model, backend=cgcompile.Backend(config), dynamic=True)
    dispatcher = CudagraphDispatcher(
        mode,
        capture_sizes(largest),
        max_num_reqs=largest,
        support=AttentionCGSupport.ALWAYS,
    )
    rows = InputBuffer("x", ("tokens", hidden), torch.bfloat16, 0)
    return CudaGraphManager(
        called, dispatcher, (rows,), device=args.device, metadata=metadata, config=config
    )


def growth(manager: CudaGraphManager) -> None:
    """What each graph takes, one after the other."""
    before = manager.memory()
    for mode, key in manager.dispatcher.plan():
        manager.capture_graph(mode, key)
        now = manager.memory()
        parts = {k: v - before.parts[k] for k, v in now.parts.items() if v != before.parts[k]}
        text = ", ".join(f"{name} {nbytes / MIB:+.2f}" for name, nbytes in parts.items())
        print(f"    {mode.name} {key}: {text or '-'}")
        before = now


def measure(args: argparse.Namespace, name: str, way: str) -> bool:
    """Plan, capture and compare; whether the plan was right."""
    manager = manager_of(args, name, way)
    start = time.perf_counter()
    planned = manager.plan()
    seconds = time.perf_counter() - start
    before = memory(args.device)[1]
    manager.capture()
    measured = manager.memory()
    lost = memory(args.device)[1] - before
    good = abs(planned.total - measured.total) <= max(0.1 * measured.total, 8 * MIB)
    print(
        f"{name:14} {way:10} {planned.against(measured)}; plan {seconds:.1f} s; "
        f"device {lost / MIB:+.1f} MiB since"
    )
    if args.verbose or not good:
        print(planned)
    if args.growth:
        manager.release()
        growth(manager)
    manager.release()
    print(f"    after release {(memory(args.device)[1] - before) / MIB:+.1f} MiB")
    return good


def alone(argv: list[str]) -> bool:
    """Run this file in a process of its own; whether it exited with 0."""
    return subprocess.run([sys.executable, __file__, *argv], check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Memory of graphs, planned and measured.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--largest", type=int, default=512)
    parser.add_argument("--isolate", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(argv)
    define_attention()
    rows = [(name, way) for name in args.models for way in args.ways]
    if args.isolate and len(rows) > 1:
        options = [each for each in (argv or sys.argv[1:]) if each != "--isolate"]
        good = [alone([*options, "--models", name, "--ways", way]) for name, way in rows]
    else:
        good = [measure(args, name, way) for name, way in rows]
    print(f"planned right: {'yes' if all(good) else 'no'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
