"""The vision tower of ``encode_time.py`` on several GPUs, each with all of it, against one.

Run it on a machine with two CUDA devices or more::

    python examples/benchmarks/encode_ranks.py
    python examples/benchmarks/encode_ranks.py --backend gloo  # several ranks on one GPU, or none

Every rank makes the same calls. A ``Sharder`` gives each its share of the images, which it encodes
on its own graphs, and gathers the results on all. ``one`` is the same manager without it.

Exits with 1 where the ranks' results are not those of one.
"""

import argparse
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from encode_time import (
    BUDGETS,
    Call,
    Run,
    difference,
    make_call,
    make_tower,
    milliseconds,
    mixed,
)
from towers.qwen2_5_vl import Qwen25VLTower

import cgcompile
from cgcompile.encoder import EncoderCudaGraphManager, Sharder

COUNTS = (2, 4, 8, 16, 32)


def make_manager(args: argparse.Namespace, model: Any, sharder: Sharder | None) -> Any:
    manager = EncoderCudaGraphManager(
        model,
        device=args.device,
        dtype=args.dtype,
        token_budgets=args.budgets,
        max_batch_size=16,
        sharder=sharder,
        config=cgcompile.CompilationConfig(
            capture_device="host" if args.device == "cpu" else "auto"
        ),
    )
    manager.capture()
    return manager


def execute(manager: EncoderCudaGraphManager) -> Run:
    return lambda call: torch.cat(manager.execute(dict(call)))


def measure(rank: int, args: argparse.Namespace) -> None:
    """One rank: all calls on one, which only the first times, and on all."""
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        args.device = f"cuda:{torch.cuda.current_device()}"
    dist.init_process_group(args.backend, rank=rank, world_size=args.ranks)
    source = random.Random(args.seed)
    with torch.inference_mode():
        model = Qwen25VLTower(make_tower(args))
        one = execute(make_manager(args, model, None))
        every = execute(make_manager(args, model, Sharder()))
        for count in args.counts:
            torch.manual_seed(count)  # the same pixels on all ranks
            call: Call = make_call(mixed(source, count), args)
            error = difference(every(call), one(call))
            dist.barrier()
            alone = milliseconds(one, call, args.repeats, seconds=1e9)
            dist.barrier()
            together = milliseconds(every, call, args.repeats, seconds=1e9)
            if rank == 0:
                print(
                    f"{count:3} images: one {alone:8.2f} ms  {args.ranks} ranks {together:8.2f} ms"
                    f"  ratio {together / alone:5.2f}  error {error:.1e}",
                    flush=True,
                )
            if not error < 5e-2:
                raise SystemExit(f"rank {rank}, {count} images: results differ by {error:.1e}")
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A vision tower on several GPUs.")
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="nccl" if cuda else "gloo")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--small", action="store_true", help="a tower of two small blocks")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="of images")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.dtype = getattr(torch, args.dtype)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    mp.spawn(measure, (args,), nprocs=args.ranks)
    print("the same results: yes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
