"""Fitted ladders: within the budgets, and close to the exact optimum."""

import math
import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.oracles import least_ladder_cost

from cgcompile.errors import SizesError
from cgcompile.ladders import FittedSizes, fit_sizes, padded_size, padding_share, round_sizes
from cgcompile.serving.sizes import capture_sizes

Histogram = dict[int, int]
Measure = Callable[[int], float]
HISTOGRAM = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=7)
COUNT = st.integers(1, 8)


def cost_of_ladder(
    ladder: tuple[int, ...], histogram: Histogram, cost: Measure, plain: Measure | None = None
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


def numbers(seed: int, high: int, *, fractions: bool = False) -> Callable[[int], Any]:
    """A function of the size without any order in it."""

    def number(size: int) -> Any:
        drawn = random.Random(seed * 1000 + size)
        return drawn.random() * high if fractions else drawn.randrange(high)

    return number


def plus_10(rows: int) -> int:
    return rows + 10


# of which a third graph, for the one step of 100 rows, is not within the budget
ENDING = {1: 50, 64: 50, 65: 40, 100: 1}
HAND = FittedSizes(
    sizes=(1, 8),  # (2, 8) would pad 100 rows and 1, this one 60 and 1
    cost=1 * 100 + 8 * 61,
    padding=61 / 588,
    padded_rows=61,
    steps_without_graph=0,
    nbytes=None,
)
ENDS_AT_65 = FittedSizes((1, 65), 1 * 50 + 65 * 90 + 110, 50 / 6000, 50, 1, None)
NO_GRAPH = FittedSizes((), 6, 0.0, 0, 3, None)


@pytest.mark.parametrize(
    ("histogram", "arguments", "expected"),
    [
        ({1: 100, 2: 10, 7: 1, 8: 50}, {"count": 2}, HAND),
        ({5: 2, 3: 1, 9: 4, 12: 0}, {"count": 100}, (3, 5, 9)),  # enough sizes: no padding
        ({5: 2, 3: 1000, 9: 4}, {"count": 1}, (9,)),
        ({1: 1}, {"count": 1}, (1,)),
        # candidates beyond the largest batch are needed for a maximum alone
        ({3: 1, 5: 1}, {"count": 9, "candidates": [4, 8, 16]}, (4, 8)),
        ({3: 1, 5: 1}, {"count": 9, "candidates": [4, 8, 16], "maximum": 16}, (4, 8, 16)),
        # the ladder ends where graphs stop to pay; no candidate is needed for the largest batch
        (ENDING, {"count": 2, "cost_without_graph": plus_10}, ENDS_AT_65),
        (ENDING, {"count": 2, "cost_without_graph": plus_10, "candidates": [1, 65]}, ENDS_AT_65),
        ({4: 3}, {"count": 5, "cost_of": lambda _: 9, "cost_without_graph": lambda _: 2}, NO_GRAPH),
        ({4: 3}, {"count": 0, "cost_without_graph": lambda _: 99}, ()),
    ],
)
def test_ladders_that_one_can_check_by_hand(histogram, arguments, expected) -> None:
    fitted = fit_sizes(histogram, **arguments)
    assert expected in (fitted, fitted.sizes)


def test_bytes_are_in_the_result_without_a_budget_of_them() -> None:
    assert fit_sizes({4: 3, 2: 1}, 2, bytes_of=lambda size: 10 * size).nbytes == 60


@pytest.mark.slow
@settings(deadline=None)
@given(HISTOGRAM, st.integers(1, 45), COUNT)
def test_a_maximum_is_covered_and_ends_the_ladder(
    histogram: Histogram, maximum: int, count: int
) -> None:
    fitted = fit_sizes(histogram, count, maximum=maximum)
    within = {rows: times for rows, times in histogram.items() if rows <= maximum}
    below = within.keys() - {maximum}
    assert fitted.sizes[-1] == maximum
    assert len(fitted.sizes) <= count
    assert fitted.cost == cost_of_ladder(fitted.sizes, within, lambda size: size)
    assert fitted.padded_rows == fitted.cost - sum(rows * times for rows, times in within.items())
    assert fitted.padding == padding_share(fitted.sizes, histogram)
    assert fitted.steps_without_graph == sum(histogram.values()) - sum(within.values())
    best = least_ladder_cost(within, below | {maximum}, count=count)
    assert fitted.cost >= best
    if count == 1 or count > len(below):  # there is no choice
        assert fitted.cost == best


@pytest.mark.slow
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
    """Any costs and bytes, also those that fall with the size, under one budget or both.

    The exact optimum, which other tests compare with, is checked against all ladders.
    """
    if count is None and nbytes is None:
        count = 2
    cost, bytes_of = numbers(seed, 30, fractions=fractions), numbers(seed + 100, 30)
    plain = numbers(seed + 200, 60, fractions=fractions) if with_plain else None
    must = max(histogram)
    candidates = sorted(sizes if with_plain else {n for n in sizes if n < must} | {must})
    possible = [
        ladder
        for length in range(0 if with_plain else 1, len(candidates) + 1)
        for ladder in combinations(candidates, length)
        if (count is None or len(ladder) <= count)
        and (nbytes is None or sum(map(bytes_of, ladder)) <= nbytes)
        and (with_plain or ladder[-1] == must)
    ]
    budgets: dict[str, Any] = {"count": count, "nbytes": nbytes, "bytes_of": bytes_of}
    arguments = {
        **budgets,
        "cost_of": cost,
        "maximum": max(candidates) if with_plain else None,
        "candidates": candidates,
        "cost_without_graph": plain,
    }
    if not possible:
        with pytest.raises(SizesError, match=r"takes \d+ bytes"):
            fit_sizes(histogram, **arguments)
        return
    fitted = fit_sizes(histogram, **arguments)
    least = min(cost_of_ladder(ladder, histogram, cost, plain) for ladder in possible)
    own = cost_of_ladder(fitted.sizes, histogram, cost, plain)
    exact = least_ladder_cost(histogram, candidates, cost, plain=plain, **budgets)
    assert exact == (pytest.approx(least) if fractions else least)
    assert fitted.cost == (pytest.approx(own) if fractions else own)
    assert fitted.sizes in possible
    assert own >= least or own == pytest.approx(least)
    assert fitted.nbytes == sum(map(bytes_of, fitted.sizes))


def batches(kind: str, draw: random.Random) -> Histogram:
    """Batch sizes as an engine may see them."""
    largest = draw.choice([64, 128, 256, 512])
    if kind == "random":
        return {draw.randint(1, largest): draw.randint(1, 999) for _ in range(draw.randint(5, 80))}
    if kind == "small":  # most batches are
        power = draw.uniform(0.5, 1.5)
        return {n: int(1e5 * draw.random() / n**power) + 1 for n in range(1, largest + 1)}
    histogram: Histogram = {}
    for _ in range(draw.randint(1, 4)):  # a load each
        middle, width = draw.uniform(1, largest), draw.uniform(0.5, 3) * largest**0.5
        for _ in range(1000):
            rows = min(max(1, round(draw.gauss(middle, width))), largest)
            histogram[rows] = histogram.get(rows, 0) + 1
    return histogram


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "small", "loads"])
@pytest.mark.parametrize("budget", ["graphs", "bytes", "any bytes"])
def test_close_to_the_exact_optimum(kind: str, budget: str) -> None:
    draw = random.Random(f"{kind} {budget}")
    ratios = []
    for seed in range(20):
        histogram = batches(kind, draw)
        top = max(histogram) + -max(histogram) % 8
        candidates = round_sizes(histogram, 8, top) if len(histogram) > 80 else tuple(histogram)
        fixed, slope = draw.uniform(0, 300), draw.randrange(3000)
        bytes_of = numbers(seed, 40)
        if budget != "any bytes":
            bytes_of = lambda size, each=slope: 100 + each * size // 1000  # noqa: E731
        total = sum(map(bytes_of, candidates))
        limit = max(bytes_of(max(candidates)), int(total * draw.uniform(0.05, 0.6)))
        limits = (draw.randint(2, 30), None) if budget == "graphs" else (None, limit)
        budgets: Any = {"count": limits[0], "nbytes": limits[1], "bytes_of": bytes_of}
        cost = lambda size, fixed=fixed: fixed + size  # noqa: E731
        fitted = fit_sizes(histogram, cost_of=cost, candidates=candidates, **budgets)
        exact = least_ladder_cost(histogram, candidates, cost, **budgets)
        assert limits[0] is None or len(fitted.sizes) <= limits[0]
        assert limits[1] is None or (fitted.nbytes or 0) <= limits[1]
        ratios.append(fitted.cost / exact)
        assert ratios[-1] >= 1 - 1e-9
    most, mean = (1.02, 1.001) if budget != "any bytes" else (1.04, 1.005)
    if kind == "small" and budget != "graphs":
        most, mean = 1.10, 1.015 if budget == "any bytes" else 1.005
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


ONE: Histogram = {1: 1}


@pytest.mark.parametrize(
    ("message", "histogram", "arguments"),
    [
        ("no budget was given", ONE, {}),
        ("holds no steps", {}, {"count": 1}),
        ("holds no steps", {4: 0}, {"count": 1}),
        ("histogram: {0: 1}", {0: 1}, {"count": 1}),
        ("count = 0", ONE, {"count": 0}),
        ("count = True", ONE, {"count": True}),
        ("maximum = 0", ONE, {"count": 1, "maximum": 0}),
        ("nbytes = -1", ONE, {"nbytes": -1, "bytes_of": lambda _: 0}),
        ("the bytes of a graph are unknown", ONE, {"nbytes": 5}),
        (r"bytes_of\(1\) returned 0.5", ONE, {"nbytes": 5, "bytes_of": lambda _: 0.5}),
        (r"cost_of\(1\) returned -1", ONE, {"count": 5, "cost_of": lambda _: -1}),
        (r"cost_of\(1\) returned nan", ONE, {"count": 5, "cost_of": lambda _: math.nan}),
        (r"cost_of\(1\) returned inf", ONE, {"count": 5, "cost_of": lambda _: math.inf}),
        (r"cost_of\(1\) returned None", ONE, {"count": 5, "cost_of": lambda _: None}),
        (r"graph\(1\) returned True", ONE, {"count": 5, "cost_without_graph": lambda _: True}),
        ("size 9, .* takes 6 bytes", {1: 1, 9: 1}, {"nbytes": 5, "bytes_of": lambda _: 6}),
        ("candidate is 8, and batches of 9", {9: 1}, {"count": 5, "candidates": [8]}),
        ("8: above the maximum of 4", ONE, {"count": 5, "candidates": [8], "maximum": 4}),
        ("no capture sizes were given", ONE, {"count": 5, "candidates": []}),
    ],
)
def test_what_cannot_be_fitted(message: str, histogram: Histogram, arguments: Any) -> None:
    with pytest.raises(SizesError, match=message):
        fit_sizes(histogram, **arguments)
