"""From a few captured sizes to all of them: plain arithmetic, for ``memory.py``, which measures.

Graphs share their memory, so what they take does not add up: the largest of a kind takes nearly
all, a smaller one only what it keeps and what the driver needs for it. Each is bounded on its own.
A bound is derived from what was measured and from the steps in which memory is handed out; where
they leave too wide an interval, more sizes are sampled. The rule: never a blind percentage.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

_UNSTEADY = 2  # steps of the driver: twice what was seen


class Interval(NamedTuple):
    """Bytes, both ends included."""

    least: int
    most: int

    @property
    def width(self) -> int:
        return self.most - self.least

    def holds(self, nbytes: int) -> bool:
        """Whether a number of bytes lies in it."""
        return self.least <= nbytes <= self.most


class Sample(NamedTuple):
    """What one captured graph added to those that were captured before it, in bytes.

    Attributes:
        place: of the graph, among all that are planned.
        turn: of the round of sampling; the graphs of one turn were captured in the plan's order.
        held: memory of pools, of staging and of output buffers.
        kept: of that, what stays in use and no other graph may use.
        driver: memory of the driver, in its steps.
    """

    place: int
    turn: int
    held: int
    kept: int
    driver: int


class Group(NamedTuple):
    """Graphs that differ in nothing but size: a smaller one fits into the memory of a larger one.

    Attributes:
        places: among all that are planned, the largest first.
        rows: of each.
    """

    places: tuple[int, ...]
    rows: tuple[int, ...]


def spread(group: Group, turn: int) -> list[int]:
    """The places of a group to sample in a turn, those of earlier turns among them.

    In turn 0 the largest, the smallest, and between them at most a factor of 4 from one to the
    next; in each further turn the middle of every gap as well.
    """
    chosen = [0]
    for index in range(len(group.rows)):
        next_rows = group.rows[index + 1] if index + 1 < len(group.rows) else 0
        if index and (not next_rows or next_rows * 4 < group.rows[chosen[-1]]):
            chosen.append(index)
    for _ in range(turn):
        between = [(a + b) // 2 for a, b in pairwise(chosen) if b - a > 1]
        chosen = sorted({*chosen, *between})
    return [group.places[index] for index in chosen]


def rate(runs: Sequence[Sequence[int]], step: int) -> tuple[float, float]:
    """The least and the most that a graph takes of memory that is handed out in steps.

    Of any graphs in a row that together took some bytes, each took that share, up to a step more or
    less; all such rows together leave an interval. The step is at least ``step``; where graphs took
    unequal numbers, the difference between them.

    Args:
        runs: for each row of graphs what each of them took.
        step: bytes.
    """
    taken = [each for run in runs for each in run]
    if not taken:
        return 0.0, 0.0
    if step > 1:
        step = max(step, max(taken) - min(taken))
    slack = step if step > 1 else 0
    low, high = 0.0, float("inf")
    for run in runs:
        sums = [sum(run[:end]) for end in range(len(run) + 1)]
        for first, last in combinations(range(len(sums)), 2):
            found, count = sums[last] - sums[first], last - first
            low = max(low, (found - slack) / count)
            high = min(high, (found + slack) / count)
    return (low, high) if low <= high else (max(0.0, high), low)


class Estimate:
    """What all planned graphs take, from the samples of some.

    Args:
        groups: of all planned graphs.
        samples: in the order of their capture; the largest and the smallest of each group are
            among them.
        step: in which the driver takes memory; 1 if it takes none.
        segment: bytes that find no room -> bytes that a pool takes for them.
        small: bytes of segments for small blocks, after all samples.
        mixed: whether pools hold large blocks as well.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        samples: Iterable[Sample],
        step: int,
        segment: Callable[[int], int],
        small: int = 0,
        mixed: bool = False,
    ) -> None:
        self._groups = groups
        self._step = step
        self._segment = segment
        self.samples = {sample.place: sample for sample in samples}
        self._firsts = {group.places[0] for group in groups}
        self._rates = [rate(self._runs(group), step) for group in groups]
        self._small = small if mixed else 0
        self.held = self._held()
        self.driver = self._driver()

    @property
    def total(self) -> Interval:
        """Of all planned graphs."""
        return Interval(self.held.least + self.driver.least, self.held.most + self.driver.most)

    def graph(self, place: int) -> Interval:
        """What one graph adds to the larger ones of the plan.

        Intervals of several do not add up to that of all, which is narrower.
        """
        group = next(i for i, group in enumerate(self._groups) if place in group.places)
        low, high = self._rates[group]
        sample = self.samples.get(place)
        if sample is None:
            kept = self._kept(self._groups[group], place)
            return Interval(int(low), self._segment(kept) + int(high + 1) if high else kept)
        if self._step == 1:
            return Interval(sample.held + sample.driver, sample.held + sample.driver)
        if place in self._firsts:
            return Interval(sample.held + sample.driver, sample.held + sample.driver + self._step)
        return Interval(sample.held + int(low), sample.held + int(high + 1))

    def most_of(self, chosen: Iterable[int]) -> int:
        """The most bytes that some of the graphs take, the largest of each group counted always."""
        count = [0] * len(self._groups)
        for place in chosen:
            for index, group in enumerate(self._groups):
                count[index] += place in group.places[1:]
        firsts = sum(self.samples[place].driver for place in self._firsts)
        more = sum(n * high for n, (_, high) in zip(count, self._rates, strict=True))
        return self.held.most + min(self.driver.most, firsts + self._up(more) + self._tolerance)

    # -------------------------------------------------------------- memory of pools

    def _held(self) -> Interval:
        """Of pools and buffers: what samples took, and what those between them may keep.

        The first captures may take one segment that later ones do without. Seen on an H200 with
        torch 2.11: a decoder of 8 layers took 2 MiB less when it was captured again, whatever the
        mode; one of 2 small layers did not.
        """
        taken = sum(sample.held for sample in self.samples.values())
        spare = self._segment(1) if self._step > 1 else 0
        least = max(0, taken - spare)
        kept = sum(
            self._kept(g, p) for g in self._groups for p in g.places if p not in self.samples
        )
        more = self._segment(kept) if kept else 0
        return Interval(least, taken + more + self._turned_small())

    def _kept(self, group: Group, place: int) -> int:
        """What a graph that was not sampled keeps at most: what its neighbours do."""
        index = group.places.index(place)
        found = [self.samples[p] for p in group.places if p in self.samples]
        below = next((s for s in found if group.places.index(s.place) > index), found[-1])
        above = next(s for s in reversed(found) if group.places.index(s.place) < index)
        sides = [below] if above.place in self._firsts else [below, above]
        scaled = [
            s.kept * group.rows[index] / group.rows[group.places.index(s.place)] for s in sides
        ]
        return int(max(*scaled, *(s.kept for s in sides)))

    def _turned_small(self) -> int:
        """What tensors take that are small blocks in a size between two samples.

        An allocator keeps small blocks apart from large ones. In a size between two samples a
        tensor may be small that is large in the one above, and larger than in the one below. All
        that is small in a size is small in the sample below as well, and there smaller by the ratio
        of their rows.
        """
        worst = 1.0
        for group in self._groups:
            rows = dict(zip(group.places, group.rows, strict=True))
            sampled = [place for place in group.places if place in self.samples]
            for above, below in pairwise(sampled):
                next_place = group.places[group.places.index(above) + 1]
                if next_place != below:
                    worst = max(worst, rows[next_place] / rows[below])
        return self._segment(int(self._small * (worst - 1)))

    # -------------------------------------------------------------- memory of the driver

    def _runs(self, group: Group) -> list[list[int]]:
        """What the graphs of a group took of the driver, turn by turn, but for the first of all.

        That one may have been the first graph of the process, for which the driver sets up more.
        """
        inside = [s for s in self.samples.values() if s.place in group.places[1:]]
        turns = sorted({sample.turn for sample in inside})
        runs = [[s.driver for s in inside if s.turn == turn] for turn in turns]
        return [run for run in runs if run]

    @property
    def _tolerance(self) -> int:
        """A driver keeps some memory of destroyed graphs, and hands it out again in other parts.

        Seen on an H200 with driver 580: a plan's graphs captured again took a step less or more
        than what its samples had taken.
        """
        return _UNSTEADY * self._step if self._step > 1 else 0

    def _driver(self) -> Interval:
        level = sum(sample.driver for sample in self.samples.values())
        low = high = 0.0
        for group, (least, most) in zip(self._groups, self._rates, strict=True):
            rest = sum(place not in self.samples for place in group.places)
            low, high = low + rest * least, high + rest * most
        more = max(0, int((low - self._tolerance) // self._step) * self._step)
        least = max(0, level + more - self._tolerance)
        return Interval(least, level + self._up(high) + self._tolerance)

    def _up(self, nbytes: float) -> int:
        return int(-(-nbytes // self._step)) * self._step
