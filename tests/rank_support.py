"""Processes of one group, over gloo or NCCL: each runs a function, and says what it found."""

import datetime
import faulthandler
import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cgcompile.graphs.cuda import bury_graphs

Work = Callable[[int, int], Any]


def _entered(
    rank: int, work: Work, ranks: int, folder: str, seconds: float, deadline: float, nccl: bool
) -> None:
    # Collectives in a graph have no timeout: whatever hangs ends here, with a traceback.
    faulthandler.dump_traceback_later(deadline, exit=True)
    torch.set_num_threads(1)
    gc.freeze()
    try:
        found = _found(rank, work, ranks, folder, seconds, nccl)
        torch.save(found, os.path.join(folder, f"said.{rank}"))
        if nccl:  # graphs are gone by now: they must not outlive the communicator
            torch.cuda.synchronize()
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # a rank whose group broke has nobody to wait for, and torch would


def _found(rank: int, work: Work, ranks: int, folder: str, seconds: float, nccl: bool) -> Any:
    given: dict[str, Any] = {
        "backend": "nccl" if nccl else "gloo",
        "store": dist.FileStore(os.path.join(folder, "store"), ranks),
        "rank": rank,
        "world_size": ranks,
        "timeout": datetime.timedelta(seconds=seconds),
    }
    if nccl:
        torch.cuda.set_device(rank)
        given["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(**given)
    if nccl:  # connections are made by the first collective, which must not be a captured one
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
    found = work(rank, ranks)
    gc.collect()
    bury_graphs()
    return found


def said(
    work: Work,
    ranks: int,
    folder: Path,
    seconds: float = 30,
    *,
    deadline: float = 120,
    nccl: bool = False,
) -> list[Any]:
    """What ``work(rank, ranks)`` returned in each process; None of one that ended before.

    Args:
        work: a function of a module, which the processes import.
        ranks: how many.
        folder: empty.
        seconds: the timeout of the group.
        deadline: seconds after which a process ends, whatever it does.
        nccl: one CUDA device for each rank; else gloo.

    Raises:
        AssertionError: what a process raised.
    """
    method = "spawn"
    if not nccl:
        # A server that has imported torch, and nothing else, forks them: a second instead of ten.
        method = "forkserver"
        mp.get_context(method).set_forkserver_preload(["torch._dynamo", "manager_support"])
    given = (work, ranks, str(folder), seconds, deadline, nccl)
    try:
        mp.start_processes(_entered, given, nprocs=ranks, start_method=method)
    except mp.ProcessExitedException as error:
        texts = [f"{path.name}: {path.read_text()}" for path in sorted(folder.glob("error.*"))]
        raise AssertionError("\n".join(texts) or str(error)) from error
    found = [folder / f"said.{rank}" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in found]
