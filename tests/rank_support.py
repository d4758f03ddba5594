"""Processes of one group over gloo: each runs a function, and says what it found."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[int, int], Any]


def _entered(rank: int, work: Work, ranks: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    torch.save(work(rank, ranks), os.path.join(folder, f"said.{rank}"))
    # A rank whose group broke has nobody to wait for, and torch would.
    os._exit(0)


def said(work: Work, ranks: int, folder: Path, seconds: float = 30) -> list[Any]:
    """What ``work(rank, ranks)`` returned in each process; None of one that ended before.

    Args:
        work: a function of a module, which the processes import.
        ranks: how many.
        folder: empty.
        seconds: the timeout of the group.
    """
    # A server that has imported torch, and nothing else, forks them: a second instead of ten.
    mp.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "manager_support"])
    given = (work, ranks, str(folder), seconds)
    mp.start_processes(_entered, given, nprocs=ranks, start_method="forkserver")
    found = [folder / f"said.{rank}" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]
