"""A budget of bytes: it is kept, by one manager or by two that share a pool, and nothing fails."""

from typing import Any

import pytest
import torch
from lib.encoders import (
    BUDGETS,
    C,
    DualPath,
    H,
    Rows,
    check,
    dual,
    images,
    manager,
    patches,
    rows,
)

from cgcompile.encoder import EncoderCudaGraphManager
from cgcompile.errors import EncoderError
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.reasons import Reason


def new_pool(device: str = "cpu") -> GraphPool:
    found = capture_device(torch.device(device), "host")
    assert found is not None
    return GraphPool(found)


def taken(made: EncoderCudaGraphManager) -> int:
    assert made.pool is not None
    return made.pool.nbytes


def budgets(made: EncoderCudaGraphManager) -> list[int]:
    return [key.budget for key in made.budget_graphs]


def bytes_of(*sizes: int, model: Any = None) -> int:
    return taken(manager(model or patches(), token_budgets=sizes))


def test_all_are_captured_without_a_budget_of_bytes_or_with_a_large_one(device: str) -> None:
    made = manager(patches(device), device)
    roomy = manager(patches(device), device, captured=False)
    assert roomy.capture(max_graph_bytes=2 * taken(made) + 2**26).missing == ()
    assert budgets(roomy) == budgets(made) == sorted(BUDGETS, reverse=True)
    check(roomy, patches(device), images((4, 4), (8, 8), (2, 2), device=device))
    assert roomy.statistics.misses == 0


def test_what_it_counts() -> None:
    made = manager(Rows(), token_budgets=[64])
    assert made.pool is not None
    assert taken(made) == made.pool.held.held + made.pool.arena.nbytes + 64 * C * 4
    assert made.pool.held.held >= 64 * H * 4
    made.clear()
    assert taken(made) == 0


def test_the_whole_of_it_is_enough() -> None:
    whole = bytes_of(*BUDGETS)
    made = manager(captured=False)
    assert made.capture(max_graph_bytes=whole).missing == ()
    assert taken(made) == whole  # what was measured on other memory is gone


@pytest.mark.parametrize("make", [patches, Rows])
@pytest.mark.parametrize("share", [0.99, 0.95, 0.9, 0.86, 0.5])
def test_the_budget_is_kept(share: float, make: Any) -> None:
    limit = int(share * bytes_of(*BUDGETS, model=make()))
    model = make()
    made = manager(model, captured=False)
    found = made.capture(max_graph_bytes=limit)
    assert taken(made) <= limit
    assert found.missing
    for batch, why in found.missing:
        assert batch.num_tokens not in budgets(made)
        assert why.startswith(f"{Reason.NOT_CAPTURED.value}: no room in max_graph_bytes={limit}")
    assert f"max_graph_bytes={limit}" in made.coverage()
    if make is Rows:  # most of it is the largest graph's, then buffers of the others
        expected = {0.99: [64, 32, 16], 0.95: [64, 32], 0.9: [64], 0.86: [64], 0.5: []}
        assert budgets(made) == expected[share]
    call = rows(3, 40, 12, 6) if make is Rows else images((4, 4), (8, 8), (2, 2), (6, 10))
    check(made, model, call)
    reasons = set(made.statistics.reasons())
    assert reasons <= {Reason.NOT_CAPTURED}
    assert made.counters.captures == len(budgets(made))


def test_what_is_left_out_takes_the_next_larger_budget() -> None:
    model = Rows()
    made = manager(model, captured=False)
    made.capture(max_graph_bytes=bytes_of(32, 64, model=Rows()))
    assert budgets(made) == [64, 32]  # of those below 64, 32 saves the most padding
    check(made, model, rows(7))
    assert [each["budget"] for each in made.statistics.as_dict()["graphs"]] == [32]
    assert made.statistics.misses == 0


def test_with_no_room_for_the_largest_everything_runs_eager() -> None:
    model = patches()
    limit = bytes_of(64) - 1
    made = manager(model, captured=False)
    assert len(made.capture(max_graph_bytes=limit).missing) == len(BUDGETS)
    assert (budgets(made), taken(made)) == ([], 0)
    check(made, model, images((4, 4), (8, 8), (2, 2)))
    assert made.statistics.reasons() == {Reason.NOT_CAPTURED: 3}
    assert made.statistics.hits == 0
    assert len(made.capture(max_graph_bytes=0).missing) == len(BUDGETS)
    assert made.capture().missing == ()  # without a limit they are captured still
    check(made, model, images((4, 4)))
    assert made.statistics.hits == 1
    assert "max_graph_bytes" not in made.coverage()


def test_two_managers_one_pool_one_budget() -> None:
    alone, other = bytes_of(*BUDGETS), bytes_of(*BUDGETS, model=Rows())
    for limit in (alone + other, alone + bytes_of(64, model=Rows()), alone):
        pool, models = new_pool(), (patches(), Rows())
        first, second = (manager(each, pool=pool, captured=False) for each in models)
        assert first.capture(max_graph_bytes=limit).missing == ()
        before = taken(first)
        missing = second.capture(max_graph_bytes=limit).missing
        assert before <= taken(second) == taken(first) <= limit
        left = f"{limit - alone} were left"
        assert all(left in why for _, why in missing)
        expected = {alone + other: len(BUDGETS), alone: 0}.get(limit, 1)
        assert len(budgets(second)) == expected
        for _ in range(2):
            check(first, models[0], images((4, 4), (8, 8)))
            check(second, models[1], rows(5, 12, 60))
        assert first.statistics.misses == 0
        assert second.statistics.hits == (6 if expected else 0)


def test_a_path_for_which_the_largest_has_no_room_has_no_graphs() -> None:
    sizes = {"global": [4, 8], "local": [3, 64]}
    small = taken(manager(DualPath(), token_budgets={"global": [4, 8], "local": [3]}))
    model = DualPath()
    made = manager(model, token_budgets=sizes, captured=False)
    made.capture(max_graph_bytes=small)
    assert [(key.path, key.budget) for key in made.budget_graphs] == [("global", 8), ("global", 4)]
    assert taken(made) <= small
    made.execute(dual(1, 0))
    assert model.ran == [("eager", "local")]
    assert made.statistics.reasons() == {Reason.NOT_CAPTURED: 1}


def test_what_cannot_be_captured_is_said_by_the_capture_itself() -> None:
    class Refuses(Rows):
        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            if len(inputs["x"]) == 16:
                inputs["x"].sum().item()
            return super().encoder_cudagraph_forward(inputs)

    made = manager(Refuses(), captured=False)
    missing = made.capture(max_graph_bytes=2**20).missing
    assert [(batch.num_tokens, "item" in why) for batch, why in missing] == [(16, True)]


@pytest.mark.parametrize("found", [-1, True, 2.5, "1 GiB"])
def test_what_is_no_number_of_bytes(found: Any) -> None:
    with pytest.raises(EncoderError, match="max_graph_bytes"):
        manager(captured=False).capture(max_graph_bytes=found)


def test_without_a_capture_device() -> None:
    made = manager(config=None, captured=False)
    assert len(made.capture(max_graph_bytes=2**20).missing) == len(BUDGETS)
