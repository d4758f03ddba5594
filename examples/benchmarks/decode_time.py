"""Time of one decode step in every way there is to run it.

Run it on a machine with a CUDA device::

    python examples/benchmarks/decode_time.py

The Llama of ``serve_llm.py``, random weights, attention over a paged cache by a Triton kernel. A
step takes a new batch from the host: it is copied to static buffers, the same way everywhere, and
runs. Milliseconds of three kinds, medians, the ways taking turns within one process: ``step`` waits
for the result, as an engine does that must know a token before the next step; ``host`` is the part
of it until the call returns; ``queued`` issues all steps and waits once.

``NONE``, ``PIECEWISE``, ``FULL`` and ``breakable`` are modes of the manager; ``reduce-overhead`` is
torch.compile's mode of that name; ``hand graph`` is one ``torch.cuda.CUDAGraph`` for each batch
size around torch.compile's default, as one writes it by hand.

Exits with 1 if a way gives other hidden states than the plain step, or did not run as it should.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rivals.timing import wait

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.serving import Batch, CudagraphDispatcher, CudaGraphManager, StaticInputs

sys.path.append(str(Path(__file__).resolve().parents[1]))

from llm_engine.model import Llama, LlamaConfig, random_llama
from llm_engine.runner import Limits, configuration, decode_batch, input_buffers, paged_metadata

MANAGED = {"NONE": "NONE", "PIECEWISE": "PIECEWISE", "FULL": "FULL", "breakable": "PIECEWISE"}
TAKES = ("input_ids", "positions", "slot_mapping")
Step = Callable[[Batch], torch.Tensor]


def make_manager(
    args: argparse.Namespace, name: str, model: Any, config: cgcompile.CompilationConfig
) -> CudaGraphManager:
    """All batch sizes captured, in a mode of the manager."""
    limits = step_limits(args)
    manager = CudaGraphManager(
        model,
        CudagraphDispatcher(
            CUDAGraphMode[MANAGED[name]],
            args.batches,
            max_num_reqs=limits.num_reqs,
            max_num_tokens=limits.num_tokens,
            support=AttentionCGSupport.ALWAYS,
        ),
        input_buffers(limits),
        device=args.device,
        metadata=paged_metadata,
        config=config,
    )
    for size in args.batches:
        manager.run(manager.dummy_batch(BatchDescriptor(size), "warmup"), valid_modes=())
    for title, bulk in manager.capture().items():
        print(f"{name}: {title}: {bulk}", flush=True)
    return manager


def step_limits(args: argparse.Namespace) -> Limits:
    width = -(-args.length // args.block_size)
    return Limits(max(args.batches), max(args.batches), width, tuple(args.batches))


class Static:
    """What a program without a manager does: static buffers, and the forward context."""

    def __init__(self, args: argparse.Namespace) -> None:
        limits = step_limits(args)
        specs = input_buffers(limits)
        self.inputs = StaticInputs(specs, limits.num_tokens, limits.num_reqs, args.device)

    def stage(self, batch: Batch) -> dict[str, Any]:
        sizes = (batch.num_tokens, batch.num_reqs)
        return self.inputs.stage(batch.inputs, sizes, sizes)

    def call(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        buffers = self.stage(batch)
        metadata = paged_metadata(batch, BatchDescriptor(batch.num_tokens), buffers)
        with torch.inference_mode(), set_forward_context(metadata.attn_metadata):
            return model(**{name: buffers[name] for name in TAKES})


def reduce_overhead(args: argparse.Namespace, model: Any) -> Step:
    static = Static(args)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=True)

    def step(batch: Batch) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return static.call(compiled, batch)

    return step


def hand_graph(args: argparse.Namespace, model: Any) -> Step:
    static = Static(args)
    compiled = torch.compile(model, dynamic=True)
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def record(batch: Batch) -> None:
        static.call(compiled, batch)
        buffers = static.stage(batch)
        context = set_forward_context(paged_metadata(batch, None, buffers).attn_metadata)  # type: ignore[arg-type]
        inputs = {name: buffers[name] for name in TAKES}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), context, torch.cuda.graph(graph):
            out = compiled(**inputs)
        graphs[batch.num_tokens] = (graph, out)

    def step(batch: Batch) -> torch.Tensor:
        if batch.num_tokens not in graphs:
            record(batch)
        static.stage(batch)
        graph, out = graphs[batch.num_tokens]
        graph.replay()
        return out

    return step


def measured(args: argparse.Namespace, ways: dict[str, Step], batch: Batch) -> dict[str, Any]:
    """Milliseconds by way: (step, host, queued)."""
    waited: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[float]] = {name: [] for name in ways}
    queued: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, step in ways.items():
            step(batch)
            wait(args.device)
            for _ in range(args.steps):
                begin = time.perf_counter()
                step(batch)
                host[name].append(time.perf_counter() - begin)
                wait(args.device)
                waited[name].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            for _ in range(args.steps):
                step(batch)
            wait(args.device)
            queued[name].append((time.perf_counter() - begin) / args.steps)
    rows = (waited, host, queued)
    return {name: [1e3 * statistics.median(row[name]) for row in rows] for name in ways}


def is_right(args: argparse.Namespace, ways: dict[str, Step], batch: Batch) -> bool:
    """Whether all ways agree with the plain step."""
    expected = ways["NONE"](batch).clone()
    good = bool(expected.isfinite().all() and expected.abs().sum() > 0)
    for name, step in ways.items():
        for _ in range(2):  # the first may record
            result = step(batch)
        close = torch.allclose(result, expected, rtol=args.tolerance, atol=args.tolerance)
        if not close:
            far = (result.float() - expected.float()).abs().max().item()
            print(f"BROKEN: {name}, batch {batch.num_tokens}: differs by {far:.3g}")
        good &= close
    return good


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a decode step, way by way.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tolerance", type=float, default=0.1, help="of hidden states near 1")
    sizes = {
        "layers": 16,
        "hidden": 2048,
        "intermediate": 5632,
        "heads": 32,
        "kv-heads": 8,
        "vocab": 32000,
        "length": 512,
        "block-size": 16,
        "rounds": 5,
        "steps": 20,
    }
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace) -> Llama:
    config = LlamaConfig(
        vocab=args.vocab,
        hidden=args.hidden,
        intermediate=args.intermediate,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
    )
    model = random_llama(config, 0).place(args.device, getattr(torch, args.dtype))
    width = step_limits(args).blocks_per_req
    model.make_caches(1 + max(args.batches) * width, args.block_size)
    generator = torch.Generator(args.device).manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("_cache"):
            buffer.normal_(generator=generator)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    model = make_model(args)
    config = configuration(args.device, args.compiler)
    compiled = torch.compile(model, backend=cgcompile.Backend(config), dynamic=True)
    models = {name: model if name == "breakable" else compiled for name in MANAGED}
    managers = {name: make_manager(args, name, models[name], config) for name in MANAGED}
    ways: dict[str, Step] = {name: manager.run for name, manager in managers.items()}
    if args.device == "cuda":
        ways["reduce-overhead"] = reduce_overhead(args, model)
        ways["hand graph"] = hand_graph(args, model)
    width = step_limits(args).blocks_per_req
    good = True
    print(f"{'batch':>6} {'':8}" + "".join(f"{name:>17}" for name in ways))
    for size in args.batches:
        batch = decode_batch(size, args.length, args.block_size, width)
        good &= is_right(args, ways, batch)
        times = measured(args, ways, batch)
        for row, what in enumerate(("step", "host", "queued")):
            cells = "".join(f"{times[name][row]:17.3f}" for name in ways)
            print(f"{size:6} {what:8}{cells}", flush=True)
    for name, manager in managers.items():
        ran = {cell.mode for cell in manager.statistics.cells() if cell.hits}
        if MANAGED[name] not in ran or len(ran) > 2:  # the warm-up ran plain
            print(f"BROKEN: {name} ran as {', '.join(sorted(ran))}")
            good = False
    print(f"right, and run as it should: {'yes' if good else 'no'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
