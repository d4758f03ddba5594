"""Ranks agree: three processes with gloo, each step one small collective."""

from typing import Any

import pytest
from lib.ranks import caught, run_ranks

from cgcompile.config import CUDAGraphMode
from cgcompile.descriptor import BatchDescriptor
from cgcompile.modes import AttentionCGSupport
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.ranks import Agreement

pytestmark = pytest.mark.slow

RANKS = 3
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

DECODE, MIXED = True, False
# Of each rank (tokens, requests, uniform decode), then what all take: mode, padded tokens, uniform.
STEPS: tuple[tuple[Any, Any], ...] = (
    ([(1, 1, DECODE), (3, 3, DECODE), (2, 2, DECODE)], ("FULL", 4, True)),
    ([(1, 1, DECODE), (3, 1, MIXED), (2, 2, DECODE)], ("PIECEWISE", 4, False)),
    ([(7, 2, MIXED), (1, 1, MIXED), (8, 8, MIXED)], ("PIECEWISE", 8, False)),
    ([(40, 2, MIXED), (1, 1, DECODE), (8, 8, DECODE)], ("NONE", None, False)),
    ([(0, 0, MIXED), (3, 3, DECODE), (0, 0, MIXED)], ("FULL", 4, True)),
    ([(0, 0, MIXED), (0, 0, MIXED), (0, 0, MIXED)], ("NONE", None, False)),
    ([(4, 2, DECODE), (2, 1, DECODE), (6, 3, DECODE)], ("FULL", 8, True)),
    ([(4, 2, DECODE), (2, 2, DECODE), (1, 1, DECODE)], ("PIECEWISE", 4, False)),
)


def dispatcher(sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> CudagraphDispatcher:
    return CudagraphDispatcher(
        CUDAGraphMode.FULL_AND_PIECEWISE,
        sizes,
        max_num_reqs=8,
        max_num_tokens=64,
        query_lens=(1, 2),
        support=AttentionCGSupport.UNIFORM_BATCH,
    )


def work(rank: int, ranks: int) -> list[Any]:
    steps: list[Any] = []
    agreement = Agreement(dispatcher(), check=True)
    for batches, _ in STEPS:
        tokens, reqs, uniform = batches[rank]
        length = tokens // reqs if reqs else None
        agreed = agreement.dispatch(tokens, reqs, length, uniform)
        mode, descriptor, _ = agreed.dispatched
        across = agreed.num_tokens_across_dp.tolist()
        steps.append(
            (mode.name, descriptor.num_tokens, descriptor.uniform, across, agreed.has_work)
        )
    # One rank forbids FULL: none takes it.
    modes = (NONE, PIECEWISE) if rank == 1 else None
    steps.append(agreement.dispatch(2, 2, 1, True, valid_modes=modes).dispatched.mode.name)
    # Requests left out: the dispatcher finds them from the length of the queries.
    descriptor = agreement.dispatch(8, None, 2, True).dispatched.descriptor
    steps.append((descriptor.num_tokens, descriptor.num_reqs))
    # One rank goes its own way: all are told which, and nobody waits.
    if rank == 2:
        agreement.dispatcher.refused(FULL, BatchDescriptor(2, 2, True), "by this rank alone")
    numbers = (1, 1, 1, True) if rank == 2 else (2, 2, 1, True)
    steps.append(caught(lambda: agreement.dispatch(*numbers)))
    sizes = (1, 2, 4) if rank == 2 else (1, 2, 8)
    steps.append(caught(lambda: Agreement(dispatcher(sizes))))
    return steps


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return run_ranks(work, RANKS, tmp_path_factory.mktemp("ranks"))


def test_ranks_take_the_same_graph(answers: list[list[Any]]) -> None:
    for number, (batches, (mode, padded, uniform)) in enumerate(STEPS):
        for rank, (tokens, _, _) in enumerate(batches):
            across = [padded] * RANKS if padded else [each[0] for each in batches]
            work = any(each[0] for each in batches)
            expected = (mode, padded or tokens, uniform, across, work)
            assert answers[rank][number] == expected, (number, rank)


def test_what_one_rank_forbids(answers: list[list[Any]]) -> None:
    assert [each[len(STEPS)] for each in answers] == ["PIECEWISE"] * RANKS


def test_requests_that_are_left_out(answers: list[list[Any]]) -> None:
    assert [each[len(STEPS) + 1] for each in answers] == [(8, 4)] * RANKS


def test_the_rank_that_differs_is_named(answers: list[list[Any]]) -> None:
    text = "AgreementError: rank 2 is about to run FULL, 4 tokens, uniform; rank 0 FULL, 2 tokens, uniform."
    assert [each[len(STEPS) + 2] for each in answers] == [text] * RANKS


def test_other_tables_are_named(answers: list[list[Any]]) -> None:
    text = "AgreementError: the dispatchers of ranks 2 plan other graphs than that of rank 0."
    assert [each[len(STEPS) + 3] for each in answers] == [text] * RANKS
