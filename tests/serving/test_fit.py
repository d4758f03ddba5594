"""Fitted ladders: within the budgets, and close to the exact optimum."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.oracles import least_ladder_cost

from cgcompile.errors import SizesError
from cgcompile.serving.sizes import (
    FittedSizes,
    capture_sizes,
    fit_sizes,
    padded_size,
    padding_share,
    round_sizes,
)

Histogram = dict[int, int]
HISTOGRAM = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=7)
COUNT = st.integers(1, 8)


def cost_of_ladder(
    ladder: tuple[int, ...],
    histogram: Histogram,
    cost: Callable[[int], float],
    plain: Callable[[int], float] | None = None,
) -> float:
    """By the definition: each batch at the smallest size that is large enough."""
    total = 0.0
    for rows, times in histogram.items():
        size = padded_size(ladder, rows)
        if size is not None:
            total += times * cost(size)
        elif plain is not None:
            total += times * plain(rows)
    return total


def ladders(candidates: Any, least: int = 1) -> Iterator[tuple[int, ...]]:
    for count in range(least, len(candidates) + 1):
        yield from combinations(sorted(candidates), count)


def numbers(seed: int, high: int, *, fractions: bool = False) -> Callable[[int], Any]:
    """A function of the size without any order in it."""

    def number(size: int) -> Any:
        drawn = random.Random(seed * 1000 + size)
        return drawn.random() * high if fractions else drawn.randrange(high)

    return number


def test_a_ladder_that_one_can_check_by_hand() -> None:
    fitted = fit_sizes({1: 100, 2: 10, 7: 1, 8: 50}, count=2)
    assert fitted == FittedSizes(
        sizes=(1, 8),  # (2, 8) would pad 100 rows and 1, this one 60 and 1
        cost=1 * 100 + 8 * 61,
        padding=61 / 588,
        padded_rows=61,
        steps_without_graph=0,
        nbytes=None,
    )


def test_enough_sizes_leave_no_padding() -> None:
    fitted = fit_sizes({5: 2, 3: 1, 9: 4, 12: 0}, count=100)
    assert fitted.sizes == (3, 5, 9)
    assert fitted.padded_rows == fitted.padding == 0


def test_one_size_is_the_largest() -> None:
    assert fit_sizes({5: 2, 3: 1000, 9: 4}, count=1).sizes == (9,)
    assert fit_sizes({1: 1}, count=1).sizes == (1,)


@settings(deadline=None)
@given(HISTOGRAM, COUNT)
def test_padding_by_count(histogram: Histogram, count: int) -> None:
    fitted = fit_sizes(histogram, count)
    possible = [
        ladder
        for ladder in ladders(histogram)
        if len(ladder) <= count and ladder[-1] == max(histogram)
    ]
    least = min(cost_of_ladder(ladder, histogram, lambda size: size) for ladder in possible)
    real = sum(rows * times for rows, times in histogram.items())
    assert fitted.sizes in possible
    assert least_ladder_cost(histogram, histogram, count=count) == least
    if count == 1 or count >= len(histogram):  # there is no choice
        assert fitted.cost == least
    assert least <= fitted.cost == cost_of_ladder(fitted.sizes, histogram, lambda size: size)
    assert fitted.padded_rows == fitted.cost - real
    assert fitted.padding == padding_share(fitted.sizes, histogram)


@settings(deadline=None)
@given(HISTOGRAM, st.integers(1, 45), COUNT)
def test_a_maximum_is_covered_and_ends_the_ladder(
    histogram: Histogram, maximum: int, count: int
) -> None:
    fitted = fit_sizes(histogram, count, maximum=maximum)
    assert fitted.sizes[-1] == maximum
    within = {rows: times for rows, times in histogram.items() if rows <= maximum}
    assert len(fitted.sizes) <= count
    assert fitted.cost == cost_of_ladder(fitted.sizes, within, lambda size: size)
    best = min(
        cost_of_ladder((*below, maximum), within, lambda size: size)
        for fewer in range(min(count, 3))
        for below in combinations(sorted(within.keys() - {maximum}), fewer)
    )
    if count <= 3:
        assert fitted.cost >= best
    if count == 1 or count > len(within.keys() - {maximum}):  # there is no choice
        assert fitted.cost <= best
    assert fitted.steps_without_graph == sum(histogram.values()) - sum(within.values())


@settings(max_examples=200, deadline=None)
@given(
    HISTOGRAM,
    st.sets(st.integers(1, 40), min_size=1, max_size=7),
    st.none() | COUNT,
    st.none() | st.integers(0, 60),
    st.integers(0, 99),
    st.booleans(),
    st.booleans(),
)
def test_within_the_budgets_of_any_costs(
    histogram: Histogram,
    sizes: set[int],
    count: int | None,
    nbytes: int | None,
    seed: int,
    with_plain: bool,
    fractions: bool,
) -> None:
    """Any costs and bytes, those that fall with the size too, under one budget or both.

    The exact optimum, which other tests compare with, is checked against all ladders.
    """
    if count is None and nbytes is None:
        count = 2
    cost, bytes_of = numbers(seed, 30, fractions=fractions), numbers(seed + 100, 30)
    plain = numbers(seed + 200, 60, fractions=fractions) if with_plain else None
    must = max(histogram)
    candidates = sorted(sizes | ({must} if not with_plain else set()))
    if not with_plain:
        candidates = [size for size in candidates if size <= must]
    maximum = max(candidates) if with_plain else None
    possible = [
        ladder
        for ladder in ladders(candidates, 0 if with_plain else 1)
        if (count is None or len(ladder) <= count)
        and (nbytes is None or sum(map(bytes_of, ladder)) <= nbytes)
        and (with_plain or ladder[-1] == must)
    ]
    arguments: dict[str, Any] = {
        "count": count,
        "nbytes": nbytes,
        "bytes_of": bytes_of,
        "cost_of": cost,
        "maximum": maximum,
        "candidates": candidates,
        "cost_without_graph": plain,
    }
    if not possible:
        with pytest.raises(SizesError, match=r"takes \d+ bytes"):
            fit_sizes(histogram, **arguments)
        return
    fitted = fit_sizes(histogram, **arguments)
    least = min(cost_of_ladder(ladder, histogram, cost, plain) for ladder in possible)
    again = cost_of_ladder(fitted.sizes, histogram, cost, plain)
    budgets = {"count": count, "nbytes": nbytes, "bytes_of": bytes_of}
    exact = least_ladder_cost(histogram, candidates, cost, plain=plain, **budgets)
    assert exact == pytest.approx(least)
    if not fractions:
        assert exact == least
        assert fitted.cost == again
    assert fitted.sizes in possible
    assert fitted.cost == pytest.approx(again)
    assert again >= least or again == pytest.approx(least)
    assert fitted.nbytes == sum(map(bytes_of, fitted.sizes))


def batches(kind: str, draw: random.Random) -> Histogram:
    """Batch sizes as an engine may see them."""
    largest = draw.choice([64, 128, 256, 512])
    if kind == "random":
        return {draw.randint(1, largest): draw.randint(1, 999) for _ in range(draw.randint(5, 80))}
    if kind == "small":  # most batches are
        power = draw.uniform(0.5, 1.5)
        return {n: int(1e5 * draw.random() / n**power) + 1 for n in range(1, largest + 1)}
    found: Histogram = {}
    for _ in range(draw.randint(1, 4)):  # a load each
        middle, width = draw.uniform(1, largest), draw.uniform(0.5, 3) * largest**0.5
        for _ in range(1000):
            rows = min(max(1, round(draw.gauss(middle, width))), largest)
            found[rows] = found.get(rows, 0) + 1
    return found


@pytest.mark.parametrize("kind", ["random", "small", "loads"])
@pytest.mark.parametrize("budget", ["graphs", "bytes"])
def test_close_to_the_exact_optimum(kind: str, budget: str) -> None:
    draw = random.Random(f"{kind} {budget}")
    ratios = []
    for _ in range(20):
        histogram = batches(kind, draw)
        top = max(histogram) + -max(histogram) % 8
        candidates = round_sizes(histogram, 8, top) if len(histogram) > 80 else tuple(histogram)
        fixed, each = draw.uniform(0, 300), draw.randrange(300)

        def cost(size: int, fixed: float = fixed) -> float:
            return fixed + size

        def nbytes(size: int, each: int = each) -> int:
            return 100 + each * size // 1000

        total = sum(map(nbytes, candidates))
        limit = max(nbytes(max(candidates)), int(total * draw.uniform(0.05, 0.6)))
        limits = (draw.randint(2, 30), None) if budget == "graphs" else (None, limit)
        fitted = fit_sizes(histogram, *limits, nbytes, cost, candidates=candidates)
        budgets = {"count": limits[0], "nbytes": limits[1], "bytes_of": nbytes}
        exact = least_ladder_cost(histogram, candidates, cost, **budgets)
        assert limits[0] is None or len(fitted.sizes) <= limits[0]
        assert limits[1] is None or (fitted.nbytes or 0) <= limits[1]
        ratios.append(fitted.cost / exact)
        assert ratios[-1] >= 1 - 1e-9
    most, mean = (1.10, 1.005) if (kind, budget) == ("small", "bytes") else (1.02, 1.001)
    assert max(ratios) <= most
    assert sum(ratios) / len(ratios) <= mean


def test_better_than_the_usual_ladder_with_as_many_graphs() -> None:
    drawn = random.Random(0)
    histogram = {rows: int(1e5 * drawn.random() / rows) + 1 for rows in range(1, 513)}
    usual = capture_sizes(512)
    fitted = fit_sizes(histogram, count=len(usual))
    assert len(fitted.sizes) == len(usual)
    assert fitted.padding < 0.75 * padding_share(usual, histogram)


def test_multiples_by_candidates() -> None:
    histogram = {rows: 600 - rows for rows in range(1, 513)}
    candidates = round_sizes(histogram, 8, 512)
    fitted = fit_sizes(histogram, 10, 2_500_000, lambda size: 180_000 + size, candidates=candidates)
    assert len(fitted.sizes) == 10
    assert all(size % 8 == 0 for size in fitted.sizes)
    assert fitted.sizes[-1] == 512


def test_candidates_beyond_the_largest_batch_are_not_needed() -> None:
    assert fit_sizes({3: 1, 5: 1}, 9, candidates=[4, 8, 16]).sizes == (4, 8)
    assert fit_sizes({3: 1, 5: 1}, 9, maximum=16, candidates=[4, 8, 16]).sizes == (4, 8, 16)


def test_the_ladder_ends_where_graphs_stop_to_pay() -> None:
    # a graph saves 10 of a step; a third one, for the one step of 100 rows, is not to be had
    histogram = {1: 50, 64: 50, 65: 40, 100: 1}

    def plain(rows: int) -> int:
        return rows + 10

    fitted = fit_sizes(histogram, 2, cost_without_graph=plain)
    assert fitted.sizes == (1, 65)
    assert fitted.steps_without_graph == 1
    assert fitted.cost == 1 * 50 + 65 * 90 + plain(100)
    # a candidate for the largest batch is then not needed
    assert fit_sizes(histogram, 2, candidates=[1, 65], cost_without_graph=plain) == fitted


def test_no_graph_at_all_may_be_best() -> None:
    fitted = fit_sizes({4: 3}, 5, cost_of=lambda _: 9, cost_without_graph=lambda _: 2)
    assert fitted == FittedSizes((), 6, 0.0, 0, 3, None)
    assert fit_sizes({4: 3}, 0, cost_without_graph=lambda _: 99).sizes == ()


def test_bytes_are_told_without_a_budget_of_them() -> None:
    assert fit_sizes({4: 3, 2: 1}, 2, bytes_of=lambda size: 10 * size).nbytes == 60


BAD: list[tuple[str, Histogram, dict[str, Any]]] = [
    ("no budget was given", {1: 1}, {}),
    ("holds no steps", {}, {"count": 1}),
    ("holds no steps", {4: 0}, {"count": 1}),
    ("histogram: {0: 1}", {0: 1}, {"count": 1}),
    ("count = 0", {1: 1}, {"count": 0}),
    ("count = True", {1: 1}, {"count": True}),
    ("maximum = 0", {1: 1}, {"count": 1, "maximum": 0}),
    ("nbytes = -1", {1: 1}, {"nbytes": -1, "bytes_of": lambda _: 0}),
    ("nothing says what a graph takes", {1: 1}, {"nbytes": 5}),
    (r"bytes_of\(1\) returned 0.5", {1: 1}, {"nbytes": 5, "bytes_of": lambda _: 0.5}),
    (r"cost_of\(1\) returned -1", {1: 1}, {"count": 5, "cost_of": lambda _: -1}),
    (r"cost_of\(1\) returned nan", {1: 1}, {"count": 5, "cost_of": lambda _: math.nan}),
    (r"cost_of\(1\) returned inf", {1: 1}, {"count": 5, "cost_of": lambda _: math.inf}),
    (r"cost_of\(1\) returned None", {1: 1}, {"count": 5, "cost_of": lambda _: None}),
    (
        r"without_graph\(1\) returned True",
        {1: 1},
        {"count": 5, "cost_without_graph": lambda _: True},
    ),
    ("size 9, .* takes 6 bytes", {1: 1, 9: 1}, {"nbytes": 5, "bytes_of": lambda _: 6}),
    ("largest candidate is 8, and batches of 9", {9: 1}, {"count": 5, "candidates": [8]}),
    ("8: above the maximum of 4", {1: 1}, {"count": 5, "candidates": [8], "maximum": 4}),
    ("no capture sizes were given", {1: 1}, {"count": 5, "candidates": []}),
]


@pytest.mark.parametrize(("message", "histogram", "arguments"), BAD)
def test_what_cannot_be_fitted(message: str, histogram: Histogram, arguments: Any) -> None:
    with pytest.raises(SizesError, match=message):
        fit_sizes(histogram, **arguments)
