"""Layers split over two ranks with gloo: every mode gives the tokens of one rank alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
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

from cgcompile.reasons import Reason
from cgcompile.serving.ranks import Agreement

pytestmark = pytest.mark.slow


def plain(rank: int, ranks: int) -> Any:
    return every_mode(Shard(rank, ranks), None, "cpu")


def plain_own_op(rank: int, ranks: int) -> Any:
    return every_mode(Shard(rank, ranks, own_op=True), None, "cpu")


def compiled(rank: int, ranks: int) -> Any:
    return every_mode(Shard(rank, ranks), "eager", "cpu")


def compiled_own_op(rank: int, ranks: int) -> Any:
    return every_mode(Shard(rank, ranks, own_op=True), "eager", "cpu")


@pytest.mark.parametrize("work", [plain, plain_own_op, compiled, compiled_own_op])
def test_every_mode_gives_the_tokens_of_one_rank(work: Any, tmp_path: Path) -> None:
    check_every_mode(*run_ranks(work, 2, tmp_path))


def inside(rank: int, ranks: int) -> Any:
    manager = manager_of("FULL", *model_of(Shard(rank, ranks), "cpu"), "cpu")
    graphs, results = other_inputs(manager, rank, "cpu")
    entries = manager.wrappers[0].concrete_cudagraph_entries.values()
    ops = [[op for s in e.sequence.segments for op in s.graph.ops] for e in entries]
    split = manager_of("PIECEWISE", *model_of(Shard(rank, ranks), "cpu", "eager"), "cpu")
    split.run(batches(0, "cpu")[-1])
    assert split.backend is not None
    why = [w.reason for p in split.backend.graphs[0].split.pieces for w in p.why]
    return graphs, results, {each.count("c10d.allreduce_.default") for each in ops}, why


def test_a_full_graph_holds_the_collectives(tmp_path: Path) -> None:
    for graphs, results, reductions, why in run_ranks(inside, 2, tmp_path):
        assert (graphs, reductions) == (1, {4})
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[1], results[2])
        assert why.count(Reason.COLLECTIVE) > 0  # gloo is work of the host


def other_size(rank: int, ranks: int) -> str:
    return forced(Shard(rank, ranks), "cpu", Agreement(dispatcher("FULL"), check=True))


def test_a_rank_forced_to_another_size_is_named(tmp_path: Path) -> None:
    assert run_ranks(other_size, 2, tmp_path) == [FORCED] * 2
