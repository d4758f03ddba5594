"""Bounds from samples, against a driver and pools that are simulated."""

import math
from itertools import pairwise

from hypothesis import event, given
from hypothesis import strategies as st

from cgcompile.serving.estimate import Estimate, Group, Sample, rate, spread

SIZES = st.sets(st.integers(1, 512), min_size=1, max_size=40)


@given(SIZES, st.integers(0, 6))
def test_samples_are_the_ends_and_more_at_each_turn(sizes, turn) -> None:
    rows = tuple(sorted(sizes, reverse=True))
    group = Group(tuple(range(10, 10 + len(rows))), rows)
    found, more = spread(group, turn), spread(group, turn + 1)
    assert found == sorted(set(found))
    assert found[0] == group.places[0]
    assert found[-1] == group.places[-1]
    assert set(found) <= set(more)
    assert len(more) > len(found) or len(found) == len(rows)
    if not turn:
        for above, below in pairwise(found):
            ends = rows[above - 10], rows[below - 10]
            assert ends[0] <= 4 * ends[1] or below == above + 1


@given(st.integers(0, 50), st.integers(2, 64), st.integers(0, 63), st.integers(1, 20))
def test_a_rate_holds_what_each_graph_takes(each, step, before, count) -> None:
    levels = [math.ceil((before + n * each) / step) * step for n in range(count + 1)]
    low, high = rate([[b - a for a, b in pairwise(levels)]], step)
    assert low <= each <= high
    assert high - low <= 2 * step / count + 1e-9 or each > step


@given(
    st.lists(SIZES, min_size=1, max_size=3),
    st.lists(st.integers(0, 3000), min_size=3, max_size=3),
    st.integers(1, 2048),
    st.integers(0, 2047),
    st.integers(0, 4),
)
def test_the_driver_is_bounded(ladders, costs, step, before, turn) -> None:
    """Groups of equal graphs, each of its own cost; a turn after the other."""
    places = iter(range(200))
    groups = [
        Group(tuple(next(places) for _ in each), tuple(sorted(each)[::-1])) for each in ladders
    ]
    cost = {place: costs[i] for i, group in enumerate(groups) for place in group.places}
    taken, samples, seen = before, [], set()
    level = math.ceil(taken / step) * step
    start = level
    for now in range(turn + 1):
        for place in sorted({p for g in groups for p in spread(g, now)} - seen):
            taken += cost[place]
            grown = math.ceil(taken / step) * step
            samples.append(Sample(place, now, 64, 0, grown - level))
            level = grown
            seen.add(place)
    estimate = Estimate(groups, samples, step, lambda nbytes: nbytes)
    measured = math.ceil((before + sum(cost.values())) / step) * step - start
    assert estimate.driver.holds(measured)
    spare = step > 1  # the least segment is a byte here
    assert estimate.held == (64 * len(samples) - spare, 64 * len(samples))
    firsts = {group.places[0] for group in groups}
    assert estimate.most_of(cost) >= estimate.held.most + measured
    some = firsts | set(list(cost)[::2])
    most = math.ceil((before + sum(cost[place] for place in some)) / step) * step - start
    assert estimate.most_of(some) >= estimate.held.most + most
    event(f"all sampled: {len(seen) == len(cost)}")


def test_what_graphs_keep_is_counted_for_those_between() -> None:
    group = Group((0, 1, 2, 3, 4), (16, 12, 8, 4, 2))
    samples = [Sample(0, 0, 1600, 160, 0), Sample(2, 0, 80, 80, 0), Sample(4, 0, 20, 20, 0)]
    found = Estimate([group], samples, 1, lambda nbytes: nbytes)
    assert found.held.least == 1700
    assert found.held.most >= 1700 + 120 + 40
    assert found.graph(3).most >= 40


def test_tensors_that_are_small_in_between_are_counted() -> None:
    group = Group((0, 1, 2), (16, 8, 4))
    samples = [Sample(0, 0, 1000, 0, 0), Sample(2, 0, 10, 0, 0)]
    mixed = Estimate([group], samples, 1, lambda nbytes: nbytes, 300, mixed=True)
    assert mixed.held == (1010, 1310)
    alike = Estimate([group], samples, 1, lambda nbytes: nbytes, 300)
    assert alike.held == (1010, 1010)
