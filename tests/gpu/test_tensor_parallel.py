"""Layers split over two GPUs with NCCL: all-reduces inside pieces and inside of FULL graphs."""

import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lib.patience import PATIENCE
from lib.ranks import (
    FORCED,
    Shard,
    batches,
    check_every_mode,
    dispatcher,
    every_mode,
    forced,
    manager_of,
    model_of,
    other_inputs,
    run_ranks,
)

from cgcompile.serving.ranks import Agreement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_two(work: Any, folder: Path) -> list[Any]:
    return run_ranks(work, 2, folder, nccl=True)


def modes(rank: int, ranks: int, compiler: str | None, own_op: bool) -> Any:
    return every_mode(Shard(rank, ranks, own_op=own_op), compiler, "cuda")


@pytest.mark.parametrize(
    ("compiler", "own_op"),
    [(None, False), (None, True), ("eager", False), ("inductor", False), ("inductor", True)],
)
def test_every_mode_gives_the_tokens_of_one_gpu(
    compiler: str | None, own_op: bool, tmp_path: Path
) -> None:
    check_every_mode(*on_two(partial(modes, compiler=compiler, own_op=own_op), tmp_path))


def inside(rank: int, ranks: int) -> Any:
    full = manager_of("FULL", *model_of(Shard(rank, ranks), "cuda"), "cuda")
    counted = other_inputs(full, rank, "cuda")
    full.release()
    split = manager_of("PIECEWISE", *model_of(Shard(rank, ranks), "cuda", "eager"), "cuda")
    split.run(batches(0, "cuda")[-1])
    assert split.backend is not None
    pieces = split.backend.graphs[0].split.pieces
    split.release()
    return *counted, [(piece.capture, [w.reason.value for w in piece.why]) for piece in pieces]


def test_collectives_are_inside_of_graphs(tmp_path: Path) -> None:
    for graphs, results, pieces in on_two(inside, tmp_path):
        assert graphs == 1
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[1], results[2])
        outside = [why for capture, why in pieces if not capture]
        assert outside == [["splitting_op"]] * 2  # attention of each layer, nothing else


def other_size(rank: int, ranks: int) -> Any:
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2 * PATIENCE))
    return forced(Shard(rank, ranks), "cuda", Agreement(dispatcher("FULL"), group, check=True))


def test_a_rank_forced_to_another_size_is_named(tmp_path: Path) -> None:
    assert on_two(other_size, tmp_path) == [FORCED] * 2
