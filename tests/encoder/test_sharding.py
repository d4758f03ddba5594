"""Items shared out among ranks: three processes with gloo, on the CPU or on one GPU, or NCCL."""

from pathlib import Path
from typing import Any
from unittest import mock

import lib.ranks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.encoders import DualPath, H, Merges, close, dual, images, manager, one_by_one, patches

from cgcompile.encoder.errors import EncoderShardError
from cgcompile.encoder.sharding import Sharder, shares_by_load

RANKS = 3

CALLS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4, 4),),  # two ranks without items, in the very first call
    ((4, 4), (8, 8), (2, 2), (6, 6), (3, 5)),
    ((2, 2), (20, 20)),  # one is larger than every budget
    ((1, 1), (2, 2), (4, 2)),  # one without tokens
    ((1, 1),),
    ((2, 4),) * 12,
)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_shares_are_whole_and_even(sizes: list[int], ranks: int) -> None:
    shares = shares_by_load(sizes, ranks)
    assert sorted(item for items in shares for item in items) == list(range(len(sizes)))
    assert all(items == sorted(items) for items in shares)
    assert shares == shares_by_load(list(sizes), ranks)
    loads = [sum(sizes[item] for item in items) for items in shares]
    least = max([*sizes, sum(sizes) / ranks], default=0)
    assert max(loads) <= least * (2 - 1 / ranks) + 1e-9


def test_the_largest_goes_to_the_least_load() -> None:
    assert shares_by_load([5, 9, 5, 4, 5], 2) == [[1, 4], [0, 2, 3]]
    assert shares_by_load([3], 3) == [[0], [], []]
    assert shares_by_load([], 2) == [[], []]


def run(device: str) -> dict[str, Any]:
    sharder = Sharder()
    said: dict[str, Any] = {"rank": (sharder.rank, sharder.size)}
    for deep in (False, True):
        model = patches(device, deep=deep)
        encoder = manager(model, device, sharder=Sharder())
        torch.manual_seed(7)  # the same calls on all ranks
        for number, sizes in enumerate(CALLS):
            call = images(*sizes, device=device)
            results = encoder.execute(call)
            close(results, one_by_one(model, call))
            said[f"{deep} {number}"] = [
                len(result["deep"][0]) if deep else len(result) for result in results
            ]
        said[f"{deep} ran"] = (
            encoder.statistics.hits + encoder.statistics.misses + encoder.statistics.idle
        )
        assert encoder.execute(images(device=device)) == []
    for model in (
        DualPath(device),
        Merges(device),
    ):  # rows that all know, and rows that one must tell
        encoder = manager(model, device, token_budgets=None, sharder=Sharder())
        torch.manual_seed(8)
        for counts in ((1,), (0, 2, 9, 1, 0, 3)):
            call = dual(*counts, device=device)
            results = encoder.execute(call)
            alone = manager(model, device, token_budgets=None).execute(call)
            close(results, alone)
            said[f"{type(model).__name__} {counts}"] = [len(each) for each in results]
    try:
        used = Sharder()
        like = torch.zeros(0, H, device=device)
        shares = [[rank] for rank in range(sharder.size)]
        used.gather([torch.ones(1, H, device=device)], shares, like)
        with pytest.raises(EncoderShardError):  # a wider one would not fit into the others' rows
            used.check([torch.ones(1, H + 1, device=device)])
        used.check([{"x": torch.ones(1, H, device=device)}])
    except EncoderShardError as error:
        said["error"] = str(error).splitlines()[0]
    if sharder.size > 1:
        said["first"] = first_call(sharder.rank, shares, like)
        said["failed"] = one_fails(device, sharder.rank)
    return said


def first_call(rank: int, shares: list[list[int]], like: torch.Tensor) -> str:
    """The last rank has results of another kind, in the very first call."""
    own: Any = torch.ones(1, H, device=like.device)
    if rank == len(shares) - 1:
        own = {"x": own}
    with pytest.raises(EncoderShardError) as caught:
        Sharder().gather([own], shares, like)
    return str(caught.value).splitlines()[0]


def one_fails(device: str, rank: int) -> list[str]:
    """The model of rank 1 raises in one call; then all go on."""
    model = patches(device)
    encoder = manager(model, device, sharder=Sharder())
    prepare, failing = model.prepare_encoder_cudagraph_replay_buffers, [rank == 1]

    def prepare_or_raise(*args: Any, **kwargs: Any) -> Any:
        if failing and failing.pop():
            raise ArithmeticError("no luck")
        return prepare(*args, **kwargs)

    said = []
    torch.manual_seed(9)
    for _ in range(2):
        call = images((4, 4), (8, 8), (2, 2), device=device)
        try:
            with mock.patch.object(
                model, "prepare_encoder_cudagraph_replay_buffers", prepare_or_raise
            ):
                results = encoder.execute(call)
            close(results, one_by_one(model, call))
            said.append("right")
        except (EncoderShardError, ArithmeticError) as error:
            said += str(error).splitlines()[:2]
    return said


def on_host(rank: int, ranks: int) -> dict[str, Any]:
    return run("cpu")


def on_devices(rank: int, ranks: int) -> dict[str, Any]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return run(f"cuda:{torch.cuda.current_device()}")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def said(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank saw: three, or as many as there are GPUs, if several."""
    gpus = torch.cuda.device_count() if request.param == "cuda" else 0
    work = on_host if request.param == "cpu" else on_devices
    folder: Path = tmp_path_factory.mktemp("ranks")
    return lib.ranks.run_ranks(work, gpus if gpus > 1 else RANKS, folder, nccl=gpus > 1)


def test_every_rank_has_all_results(said: list[dict[str, Any]]) -> None:
    assert [results["rank"] for results in said] == [(rank, len(said)) for rank in range(len(said))]
    for results in said:
        for deep in (False, True):
            for number, sizes in enumerate(CALLS):
                assert results[f"{deep} {number}"] == [(h // 2) * (w // 2) for h, w in sizes]
        assert results["DualPath (1,)"] == [7]
        assert results["DualPath (0, 2, 9, 1, 0, 3)"] == [4, 10, 31, 7, 4, 13]
        assert results["Merges (0, 2, 9, 1, 0, 3)"] == [5, 11, 32, 8, 5, 14]


def test_each_item_is_encoded_once(said: list[dict[str, Any]]) -> None:
    total = sum(map(len, CALLS))
    for deep in (False, True):
        ran = [results[f"{deep} ran"] for results in said]
        assert sum(ran) == total
        assert min(ran) >= total // len(said) - 2


def test_another_structure_is_named(said: list[dict[str, Any]]) -> None:
    """In a later call on its rank, in the very first call on all ranks."""
    text = "results have another structure than those of the first call."
    assert [results["error"] for results in said] == [f"rank {r}: {text}" for r in range(len(said))]
    assert {results["first"] for results in said} == {f"rank {len(said) - 1}: {text}"}


def test_all_ranks_raise_if_one_does(said: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(said):
        first = ["no luck"]
        if rank != 1:
            first = [f"rank {rank}: the share of another rank failed."]
            first.append("  rank 1: ArithmeticError: no luck")
        assert results["failed"] == [*first, "right"]
