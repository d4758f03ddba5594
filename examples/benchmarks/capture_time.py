"""Time to capture many batch sizes, and the memory that their graphs take.

Run it on a machine with a CUDA device::

    python examples/benchmarks/capture_time.py

The decoder of ``host_time.py`` is captured in 20 sizes, the largest first, in one pool: FX pieces
and FULL graphs of the compiled model, and breakable capture of the model as it is. ``warm`` is the
time of the plain passes before (compilation included), ``capture`` that of the captures, each of
which is one execution as well. ``pool`` is memory of torch's allocator, ``device`` all memory that
the device lost, the graphs' own included; both are differences over the captures.

Exits with 1 where a size has no graph, or a size replayed after is not equal to the plain step.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from host_time import Decoder, attention, define_attention
from rivals.timing import memory

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.graphs import BulkCapture

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 128, 160, 192, 224, 256)


def report(name: str, capture: BulkCapture, before: tuple[int, int], device: str) -> None:
    after = memory(device)
    pool, lost = ((now - was) / 2**20 for now, was in zip(after, before, strict=True))
    print(
        f"{name:10} {len(capture.captured):3} sizes  warm {capture.warm_seconds:7.2f} s  "
        f"capture {capture.capture_seconds:6.3f} s  pool {pool:7.1f} MiB  device {lost:7.1f} MiB"
    )


def measure(args: argparse.Namespace, name: str) -> bool:
    """Capture and replay all sizes in one way; whether all was as it should be."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    host = "host" if args.device == "cpu" else "auto"
    dtype = getattr(torch, args.dtype)
    model = Decoder(args.layers, args.hidden).to(args.device, dtype).eval()
    full = name == "FULL"
    mode = CUDAGraphMode.FULL if full else CUDAGraphMode.PIECEWISE
    rows = torch.randn(max(args.sizes), args.hidden, device=args.device, dtype=dtype)
    call: Any
    target: Any
    if name == "breakable":
        config = cgcompile.CompilationConfig(
            splitting_ops=(attention(False, False),), capture_device=host
        )
        call = target = cgcompile.BreakableCUDAGraphWrapper(model, config)
        bulk: Callable[..., BulkCapture] = lambda step: cgcompile.capture_all(  # noqa: E731
            step, args.sizes, target
        )
    else:
        target = cgcompile.Backend(
            splitting_ops=(attention(full, False),), compiler=args.compiler, capture_device=host
        )
        call = torch.compile(model, backend=target, dynamic=True)
        bulk = lambda step: target.capture(step, args.sizes)  # noqa: E731

    def step(size: int) -> Any:
        batch = BatchDescriptor(size)
        with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch):
            return call(rows[:size])

    with torch.inference_mode():
        for size in args.sizes:  # kernels are compiled before memory is looked at
            with set_forward_context():
                call(rows[:size])
        before = memory(args.device)
        capture = bulk(step)
        report(name, capture, before, args.device)
        good = not capture.missing
        for size in args.sizes:
            rows.copy_(torch.randn_like(rows))
            with set_forward_context():
                expected = call(rows[:size])
            good &= torch.allclose(step(size), expected, rtol=2e-2, atol=2e-2)
    return good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time and memory of capturing many sizes.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    args = parser.parse_args(argv)
    define_attention()
    good = [measure(args, name) for name in ("PIECEWISE", "FULL", "breakable")]
    print(f"captured and right: {'yes' if all(good) else 'no'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
