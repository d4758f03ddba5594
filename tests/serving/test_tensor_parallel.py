"""Layers split over two ranks with gloo: every mode gives the tokens of one rank alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_support import (
    MODES,
    Shard,
    batches,
    check_mode,
    dispatcher,
    expected_modes,
    parallel_manager,
    unsharded,
)
from rank_support import said

from cgcompile.errors import AgreementError
from cgcompile.reasons import Reason
from cgcompile.serving.agreement import Agreement


def every_mode(rank: int, ranks: int) -> Any:
    found = {}
    alone = unsharded("cpu")
    cases = [(False, compiler, mode) for compiler in (None, "eager") for mode in MODES]
    cases += [(True, compiler, "FULL_AND_PIECEWISE") for compiler in (None, "eager")]
    for own_op, compiler, mode in cases:
        torch._dynamo.reset()
        made = parallel_manager(mode, Shard(rank, ranks, own_op), "cpu", compiler)
        found[own_op, compiler, mode] = check_mode(made, alone, "cpu")
        made.release()
    return found


def test_every_mode_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    first, second = said(every_mode, 2, tmp_path, seconds=60)
    assert first == second
    _, _, _, tokens = next(iter(first.values()))
    assert len(set(tokens)) > 10
    for (_, _, mode), (captures, replays, modes, same) in first.items():
        assert modes == expected_modes(mode)
        assert (captures > 0) is (mode != "NONE")
        assert replays == sum(each != "NONE" for each in modes)
        assert same == tokens


def inside(rank: int, ranks: int) -> Any:
    """What a FULL graph holds, and that it meets the other rank at each replay."""
    made = parallel_manager("FULL", Shard(rank, ranks), "cpu")
    made.capture()
    (entry,) = [
        entry
        for key, entry in made._full.concrete_cudagraph_entries.items()
        if key.num_tokens == 16
    ]
    ops = [op for segment in entry.sequence.segments for op in segment.graph.ops]
    batch = batches(0, "cpu")[-1]
    made.run(batch)
    results = []
    for of_rank_1 in (3, 3, 4):
        if rank == 1:
            made.inputs.buffers["input_ids"].fill_(of_rank_1)
        results.append(made.run_fullgraph(16).clone())
    split = parallel_manager("PIECEWISE", Shard(rank, ranks, own_op=False), "cpu", "eager")
    split.run(batch)
    assert split._backend is not None
    why = [w.reason for p in split._backend.graphs[0].split.pieces for w in p.why]
    return entry.sequence.num_graphs, ops.count("c10d.allreduce_.default"), results, why


def test_a_full_graph_holds_the_collectives(tmp_path: Path) -> None:
    for graphs, reductions, results, why in said(inside, 2, tmp_path):
        assert (graphs, reductions) == (1, 4)
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[1], results[2])
        assert why.count(Reason.COLLECTIVE) > 0  # gloo is the host's work


def forced(rank: int, ranks: int) -> Any:
    """A rank replays another size: a name instead of mixed data or a hang."""
    dispatch = dispatcher("FULL")
    agreement = Agreement(dispatch, check=True)
    made = parallel_manager(
        "FULL", Shard(rank, ranks), "cpu", dispatch=dispatch, agreement=agreement
    )
    made.capture()
    with pytest.raises(AgreementError) as caught:
        made.run_fullgraph((8, 4)[rank])
    alone = unsharded("cpu")
    for batch in batches(0, "cpu"):  # nothing of it is left behind
        torch.testing.assert_close(made.run(batch), alone(batch), rtol=1e-4, atol=1e-4)
    return str(caught.value).splitlines()[0]


def test_a_rank_forced_to_another_size_is_named(tmp_path: Path) -> None:
    text = "rank 1 is about to run FULL, 4 tokens; rank 0 FULL, 8 tokens."
    assert said(forced, 2, tmp_path) == [text] * 2
