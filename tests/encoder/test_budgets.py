"""Budgets of encoder graphs: what is generated, given, refused and fitted."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgcompile.encoder import Costs
from cgcompile.encoder.budgets import (
    Budgets,
    fitted_budgets,
    generated_budgets,
    resolve_budgets,
    resolve_frames,
    smallest_budget,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.errors import SizesError

POSITIVE = st.integers(1, 5000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((64, 800), (64, 128, 256, 512, 800)),
        ((64, 64), (64,)),
        ((100, 800), (100, 200, 400, 800)),  # doublings of the least, not powers of two
        ((64, 500, 1.5), (64, 96, 144, 216, 324, 486, 500)),
        ((1, 5, 1.1), (1, 2, 3, 4, 5)),
    ],
)
def test_generated_budgets(arguments: Any, expected: tuple[int, ...]) -> None:
    assert generated_budgets(*arguments) == expected


@given(POSITIVE, POSITIVE, st.floats(1.01, 8))
def test_generated_budgets_rise_from_least_to_most(a: int, b: int, ratio: float) -> None:
    least, most = sorted((a, b))
    results = generated_budgets(least, most, ratio)
    assert (results[0], results[-1]) == (least, most)
    for below, above in pairwise(results):
        assert below < above <= max(below + 1, below * ratio)


@pytest.mark.parametrize("ratio", [1, 0.5, float("inf"), float("nan"), True, "2"])
def test_ratios_that_lead_nowhere(ratio: Any) -> None:
    with pytest.raises(EncoderError, match="ratio"):
        generated_budgets(1, 8, ratio)


@pytest.mark.parametrize(
    ("budgets", "tokens", "expected"),
    [
        ((64, 128, 256), 0, 64),
        ((64, 128, 256), 128, 128),
        ((64, 128, 256), 129, 256),
        ((64, 128, 256), 257, None),
        ((), 1, None),
    ],
)
def test_smallest_budget(budgets: tuple[int, ...], tokens: int, expected: int | None) -> None:
    assert smallest_budget(budgets, tokens) == expected


@pytest.mark.parametrize(
    ("budgets", "max_items", "span", "expected"),
    [
        ([256, 64, 128, 64], 8, (64, 16384), ((64, 128, 256), 8)),  # sorted, without duplicates
        ([64, 128], 64, (64, 16384), ((64, 128), 64)),
        ([8, 99999], 8, (64, 128), ((8, 99999), 8)),  # outside of the range: as given
        ([32, 64], None, (64, 16384), ((32, 64), 32)),
        ([512], None, (64, 128), ((512,), 2)),
        (None, 2, (4, 128), ((4, 8, 16, 32, 64, 128), 2)),
        (None, 128, (64, 1000), ((128, 256, 512, 1000), 128)),
        (None, 128, (4, 128), ((128,), 128)),
        (None, None, (64, 16384), (generated_budgets(64, 16384), 64)),
        (None, None, (4, 128), (generated_budgets(4, 128), 4)),
        (None, None, (64, 128), ((64, 128), 2)),  # two smallest budgets are the most tokens
    ],
)
def test_resolved_budgets(budgets: Any, max_items: Any, span: Any, expected: Any) -> None:
    assert resolve_budgets(budgets, max_items, budget_range=span) == Budgets(*expected)


def test_more_items_than_tokens() -> None:
    with pytest.raises(EncoderError, match=r"256; it must be <= the smallest .*, 64\.\n"):
        resolve_budgets([128, 64], 256, budget_range=(64, 16384))
    with pytest.raises(EncoderError, match="129 is above 128"):
        resolve_budgets(max_items=129, budget_range=(4, 128))


@pytest.mark.parametrize(
    "results", [(0, 64), (-1, 64), (64, 0), (64,), (1, 2, 3), None, 64, (True, 64), (1.0, 64)]
)
def test_ranges_that_are_none(results: Any) -> None:
    with pytest.raises(EncoderError, match="Both must be positive"):
        resolve_budgets(budget_range=results)
    with pytest.raises(EncoderError, match="Both must be positive"):
        resolve_budgets([64], 1, budget_range=results)


def test_a_range_that_falls() -> None:
    with pytest.raises(EncoderError, match=r"least, 200, is above the most, 100"):
        resolve_budgets(budget_range=(200, 100))
    with pytest.raises(EncoderError, match=r"\(200, 100\)"):
        generated_budgets(200, 100)


@pytest.mark.parametrize("budget", [0, -64, True, 64.0, "64", None])
@pytest.mark.parametrize("items", [None, 1])
def test_budgets_that_are_none(budget: Any, items: int | None) -> None:
    with pytest.raises(EncoderError, match=r"encoder budgets: .* is none"):
        resolve_budgets([64, budget], items, budget_range=(64, 128))


def test_no_budgets() -> None:
    with pytest.raises(EncoderError, match="the list is empty"):
        resolve_budgets([], 1, budget_range=(64, 128))


@pytest.mark.parametrize("items", [0, -1, True, 1.5, "2"])
@pytest.mark.parametrize("budgets", [None, [64]])
def test_items_that_are_no_number(items: Any, budgets: list[int] | None) -> None:
    with pytest.raises(EncoderError, match="max_items = "):
        resolve_budgets(budgets, items, budget_range=(64, 128))


@given(
    st.none() | st.lists(POSITIVE, min_size=1, max_size=5),
    st.none() | POSITIVE,
    st.tuples(POSITIVE, POSITIVE).map(sorted),
)
def test_each_item_has_a_token_of_every_budget(
    budgets: list[int] | None, items: int | None, span: list[int]
) -> None:
    try:
        results = resolve_budgets(budgets, items, budget_range=(span[0], span[1]))
    except EncoderError:
        assert items is not None
        assert items > (span[1] if budgets is None else min(budgets))
        return
    assert 1 <= results.max_items <= min(results.budgets)
    assert list(results.budgets) == sorted(set(results.budgets))
    assert items in (None, results.max_items)
    assert budgets is None or set(results.budgets) == set(budgets)


def test_frames() -> None:
    assert resolve_frames(8, 14) == 112
    assert resolve_frames(8, 1) == 8
    assert resolve_frames(8, 14, 20) == 20
    assert resolve_frames(8, 14, 0) == 0
    assert resolve_frames(8, 0) == 0
    assert resolve_frames(8, 0, 20) == 0  # no videos: a limit of the user's means nothing


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 14), "max_items"),
        ((8, -1), "max_frames_per_video"),
        ((8, 14, -1), "max_frames"),
        ((8, 14, True), "max_frames"),
        ((8, 14, 2.5), "max_frames"),
    ],
)
def test_frames_out_of_range(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(EncoderError, match=f"^{name} = "):
        resolve_frames(*arguments)


def test_fitted_budgets() -> None:
    seen = [100] * 50 + [110] + [1000] * 5 + [990, 0]
    assert fitted_budgets(seen, 2) == (110, 1000)
    assert fitted_budgets(seen, 3) == (100, 110, 1000)
    assert fitted_budgets({100: 50, 110: 1, 1000: 5, 990: 1, 0: 1}, 2) == (110, 1000)


def test_fitted_budgets_in_multiples() -> None:
    assert fitted_budgets([100] * 50 + [110, 1000], 2, multiple_of=64) == (128, 1024)


def test_fitted_budgets_leave_each_item_a_token() -> None:
    seen = [3] * 50 + [20, 40]
    assert fitted_budgets(seen, 2) == (3, 40)
    budgets = fitted_budgets(seen, 2, max_items=16)
    assert budgets == (16, 40)
    assert resolve_budgets(budgets, 16, budget_range=(1, 64)) == (budgets, 16)
    assert fitted_budgets([3, 5], 2, max_items=16) == (16,)


def test_fitted_budgets_by_bytes() -> None:
    seen = [100] * 50 + [500] * 20 + [1000]
    assert fitted_budgets(seen, nbytes=1100, bytes_of=lambda n: n) == (100, 1000)
    assert fitted_budgets(seen, nbytes=1600, bytes_of=lambda n: n) == (100, 500, 1000)


def test_fitted_budgets_leave_to_eager_what_is_cheaper_there() -> None:
    seen = [100] * 50 + [4000]
    costs = Costs(fixed=10, eager_fixed=200, eager_per_token=1)
    assert fitted_budgets(seen, 1, costs=costs) == (100,)
    assert fitted_budgets(seen, 1) == (4000,)
    none = Costs(fixed=900, eager_fixed=0)
    assert fitted_budgets(seen, 1, costs=none) == ()
    other_path = Costs(fixed=10, eager_fixed=200, eagers={1: (0, 0.5)})
    assert fitted_budgets(seen, 1, costs=other_path, path=1) == ()


def test_nothing_to_fit() -> None:
    for observed in ([], {}, [0, 0], {64: 0}):
        with pytest.raises(EncoderError, match="nothing was observed"):
            fitted_budgets(observed, 2)
    with pytest.raises(SizesError, match=r"fitted_budgets\(\): no budget was given"):
        fitted_budgets([64])
    with pytest.raises(SizesError, match=r"fitted_budgets\(nbytes=5\)"):
        fitted_budgets([64], nbytes=5)
    with pytest.raises(SizesError, match=r"observed: \{-1: 1\}; expected \{tokens: groups\}"):
        fitted_budgets([-1], 1)
    with pytest.raises(EncoderError, match="multiple_of"):
        fitted_budgets([64], 1, multiple_of=0)
