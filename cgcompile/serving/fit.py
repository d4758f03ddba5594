"""A ladder fitted to the batches that an engine really ran: :func:`fit_sizes`.

The usual ladder spends most of its graphs on sizes that a given engine seldom sees. Here the sizes
are chosen for least padding, or least cost, under a budget of graphs or of bytes.

A batch runs at the smallest size that is large enough, so that the cost of a ladder is a sum over
neighbours: (steps between a and b) times cost(b). Beginning with all candidates, the size whose
removal adds the least cost is removed until the ladder is within its budget (:func:`removals`).
Then sizes are moved between their neighbours, and added, as long as that saves cost. The tests
compare the result with the exact optimum: 0.04 % above it in the mean.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from numbers import Real
from typing import Any, NamedTuple

from cgcompile.errors import SizesError
from cgcompile.serving.sizes import (
    checked_histogram,
    checked_number,
    checked_sizes,
    padded_size,
    padding_share,
)
from cgcompile.settings import checked_last, whole

START = -1  # the place before the first size: none chosen yet

_Measure = Callable[[int], float]


@dataclass(frozen=True)
class FittedSizes:
    """What :func:`fit_sizes` chose, and what it costs over the histogram.

    Attributes:
        sizes: the ladder; empty if no graph pays.
        cost: of all steps that count: those that ``sizes`` may serve, and with
            ``cost_without_graph`` the others too.
        padding: padded rows by all rows that run, from 0 to 1.
        padded_rows: of all steps together.
        steps_without_graph: steps with a batch above the largest size.
        nbytes: what the graphs take by ``bytes_of``; None without it.
    """

    sizes: tuple[int, ...]
    cost: float
    padding: float
    padded_rows: int
    steps_without_graph: int
    nbytes: int | None


class Budget(NamedTuple):
    """The most that a ladder may have; None: no limit."""

    graphs: int | None
    nbytes: int | None


class Choice(NamedTuple):
    """A ladder, as places, and what it costs."""

    cost: float
    nbytes: int
    ladder: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A ladder is a tuple of places in ``sizes``; every tuple here goes by those places."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    nbytes: tuple[int, ...]
    steps: tuple[int, ...]  # with a batch of at most that size; at START, the last place: none
    above: tuple[float, ...]  # cost of larger batches; infinite if the size may not be the last
    budget: Budget

    def between(self, below: int, place: int) -> float:
        """The cost of the steps above ``below`` that run at ``place``, the next larger size.

        The place after the last size stands for running without a graph.
        """
        if place == len(self.sizes):
            return self.above[below]
        return (self.steps[place] - self.steps[below]) * self.costs[place]

    def around(self, below: int, place: int, above: int) -> float:
        """The cost of the steps above ``below`` up to ``above``, with ``place`` between them."""
        return self.between(below, place) + self.between(place, above)

    def choice(self, ladder: tuple[int, ...]) -> Choice:
        """Return that ladder with its cost and bytes."""
        pairs = zip((START, *ladder), (*ladder, len(self.sizes)), strict=True)
        cost = sum(self.between(below, place) for below, place in pairs)
        return Choice(cost, sum(self.nbytes[place] for place in ladder), ladder)


def removals(problem: Problem) -> Iterator[tuple[float, int]]:
    """Yield all places in the order of a greedy removal, with the cost that each removal adds.

    A size that must stay is left out.
    """
    end = len(problem.sizes)
    below, above = list(range(START, end - 1)), list(range(1, end + 1))
    current: dict[int, float] = {}

    def ranked(place: int) -> tuple[float, int]:
        without = problem.between(below[place], above[place])
        current[place] = without - problem.around(below[place], place, above[place])
        return current[place], place

    heap = [ranked(place) for place in range(end)]
    heapify(heap)
    while heap:
        loss, place = heappop(heap)
        if current.get(place) != loss:
            continue  # removed, or ranked again since
        if loss == math.inf:
            return
        del current[place]
        yield loss, place
        lower, upper = below[place], above[place]
        if lower != START:
            above[lower] = upper
            heappush(heap, ranked(lower))
        if upper != end:
            below[upper] = lower
            heappush(heap, ranked(upper))


def solve(problem: Problem) -> Choice:
    """Choose a ladder of little cost within the budget.

    Raises:
        SizesError: not even one size fits the budget of bytes, and one is needed.
    """
    graphs, nbytes = problem.budget
    left = dict.fromkeys(range(len(problem.sizes)))
    total = sum(problem.nbytes)
    for loss, place in removals(problem):
        fits = (graphs is None or len(left) <= graphs) and (nbytes is None or total <= nbytes)
        if fits and loss >= 0:
            break
        del left[place]
        total -= problem.nbytes[place]
    if nbytes is not None and total > nbytes:
        raise SizesError.too_few_bytes(nbytes=nbytes, size=problem.sizes[-1], needed=total)
    ladder = list(left)
    while _moved(problem, ladder) or _added(problem, ladder):
        pass
    return problem.choice(tuple(ladder))


def _room(problem: Problem, ladder: list[int]) -> float:
    """Return the bytes that the budget leaves."""
    nbytes = problem.budget.nbytes
    return math.inf if nbytes is None else nbytes - sum(problem.nbytes[at] for at in ladder)


def _moved(problem: Problem, ladder: list[int]) -> bool:
    """Move each size to the best place between its neighbours; return whether that saved cost."""
    room, moved = _room(problem, ladder), False
    for index, place in enumerate(ladder):
        below = ladder[index - 1] if index else START
        above = ladder[index + 1] if index + 1 < len(ladder) else len(problem.sizes)
        most = room + problem.nbytes[place]
        usable = [at for at in range(below + 1, above) if problem.nbytes[at] <= most]
        best = min(usable, key=lambda at: problem.around(below, at, above))
        now = problem.around(below, place, above)
        if _less(problem.around(below, best, above), now):
            ladder[index], room, moved = best, most - problem.nbytes[best], True
    return moved


def _added(problem: Problem, ladder: list[int]) -> bool:
    """Add the size that saves the most cost within the budget; return whether one was added."""
    graphs, room = problem.budget.graphs, _room(problem, ladder)
    if graphs is not None and len(ladder) >= graphs:
        return False
    best, best_at = 0.0, None
    for index, (below, above) in enumerate(
        zip((START, *ladder), (*ladder, len(problem.sizes)), strict=True)
    ):
        without = problem.between(below, above)
        for place in range(below + 1, above):
            gain = without - problem.around(below, place, above)
            if gain > best and problem.nbytes[place] <= room and _less(without - gain, without):
                best, best_at = gain, (index, place)
    if best_at is None:
        return False
    ladder.insert(*best_at)
    return True


def _less(cost: float, than: float) -> bool:
    """Return whether a cost is less by more than sums of floats can be wrong by."""
    return cost < than - 1e-9 * abs(than)


@checked_last
def fit_sizes(
    histogram: Mapping[int, int],
    count: int | None = None,
    nbytes: int | None = None,
    bytes_of: Callable[[int], int] | None = None,
    cost_of: _Measure | None = None,
    maximum: int | None = None,
    *,
    candidates: Iterable[int] | None = None,
    cost_without_graph: _Measure | None = None,
) -> FittedSizes:
    """Fit a ladder of little cost to observed batches, within a budget.

    Without ``cost_without_graph`` the ladder always covers the largest observed batch, or
    ``maximum``. Costs are numbers of one unit, such as rows or microseconds of a step. The result
    is close to the best ladder of the same candidates: in the mean it costs less than 0.1 % more.

    Args:
        histogram: batch size in rows -> number of steps.
        count: how many sizes at most.
        nbytes: bytes of all graphs at most.
        bytes_of: size -> bytes of its graph. Bytes are added up: give what one more graph takes.
        cost_of: size -> cost of a step at that size; the rows if None, which minimises padding.
        maximum: the largest size, also where no such batch was observed; larger batches count as
            steps without a graph.
        candidates: sizes to choose from, within ``maximum``, of which the largest covers what must
            be covered; such as ``round_sizes(histogram, 8, maximum)``, or sizes that were measured.
            If None, the observed batch sizes and ``maximum``: no others can be better where larger
            sizes cost no less and take no fewer bytes.
        cost_without_graph: rows -> cost of a step without a graph. If given, large batches may
            run so, all those above the largest size, and the ladder ends where that pays.

    Raises:
        SizesError: there is no budget, nothing to fit, or a budget in which nothing fits; a number,
            candidate or entry is out of range; a function returned what is no cost.
    """
    steps = checked_histogram(histogram)
    if not steps:
        raise SizesError.no_steps()
    ladder = _candidates(steps, candidates, maximum, must=cost_without_graph is None)
    budget = _budget(count, nbytes, bytes_of, least=1 if cost_without_graph is None else 0)
    problem = _problem(steps, ladder, budget, bytes_of, cost_of, cost_without_graph)
    chosen = solve(problem)
    return _fitted(steps, problem, chosen, bytes_of is not None)


def removal_order(histogram: Mapping[int, int], sizes: Iterable[int]) -> list[tuple[float, int]]:
    """Order sizes as a greedy removal drops them, with the padded rows that each removal adds.

    The largest size stays, and is left out.

    Raises:
        SizesError: an entry of the histogram is out of range.
    """
    ladder = tuple(sorted(sizes))
    problem = _problem(checked_histogram(histogram), ladder, Budget(None, None), None, None, None)
    return [(loss, ladder[place]) for loss, place in removals(problem)]


def _candidates(
    steps: Mapping[int, int], candidates: Iterable[int] | None, maximum: int | None, must: bool
) -> tuple[int, ...]:
    """The sizes to choose from; the last covers what ``must`` be covered."""
    limit = None if maximum is None else checked_number("maximum", maximum)
    if candidates is None:
        return tuple(steps) if limit is None else (*(n for n in steps if n < limit), limit)
    ladder = checked_sizes(candidates, limit)
    if limit is not None:
        return ladder
    largest = max(steps)
    top = padded_size(ladder, largest)
    if top is not None:
        return ladder[: ladder.index(top) + 1]
    if must:
        raise SizesError.not_covered(batch=largest, largest=ladder[-1])
    return ladder


def _budget(
    count: int | None, nbytes: int | None, bytes_of: Callable[[int], int] | None, least: int
) -> Budget:
    if count is None and nbytes is None:
        raise SizesError.no_budget()
    if count is not None:
        count = checked_number("count", count, least)
    if nbytes is not None:
        nbytes = checked_number("nbytes", nbytes, least=0)
        if bytes_of is None:
            raise SizesError.bytes_unknown(nbytes=nbytes)
    return Budget(count, nbytes)


def _measured(name: str, measure: _Measure, size: int) -> float:
    found: Any = measure(size)
    number: float | None = whole(found)  # as int, so that sums of rows are exact
    if number is None and type(found) is not bool and isinstance(found, Real):
        number = float(found)
    if number is None or not 0 <= number < math.inf:
        raise SizesError.bad_measure(
            name=name, size=size, found=found, expected="a finite number of at least 0"
        )
    return number


def _measured_bytes(bytes_of: Callable[[int], int], size: int) -> int:
    found = bytes_of(size)
    number = whole(found)
    if number is None or number < 0:
        raise SizesError.bad_measure(
            name="bytes_of", size=size, found=found, expected="bytes, a whole number of at least 0"
        )
    return number


def _problem(
    steps: Mapping[int, int],
    sizes: tuple[int, ...],
    budget: Budget,
    bytes_of: Callable[[int], int] | None,
    cost_of: _Measure | None,
    cost_without_graph: _Measure | None,
) -> Problem:
    batches = tuple(steps)
    counted = [0]
    for batch in batches:
        counted.append(counted[-1] + steps[batch])
    # how many of the batches each size is large enough for
    served = [bisect_right(batches, size) for size in sizes] + [0]
    above: list[float] = [math.inf] * (len(sizes) - 1) + [0, math.inf]
    if cost_without_graph is not None:
        plain: list[float] = [0]
        for batch in reversed(batches):
            cost = _measured("cost_without_graph", cost_without_graph, batch)
            plain.append(plain[-1] + cost * steps[batch])
        above = [plain[len(batches) - number] for number in served]
    return Problem(
        sizes,
        tuple(_measured("cost_of", cost_of, size) if cost_of else size for size in sizes),
        tuple(_measured_bytes(bytes_of, size) if bytes_of else 0 for size in sizes),
        tuple(counted[number] for number in served),
        tuple(above),
        budget,
    )


def _fitted(
    steps: Mapping[int, int], problem: Problem, chosen: Choice, with_bytes: bool
) -> FittedSizes:
    pairs = zip((START, *chosen.ladder), chosen.ladder, strict=False)
    last = problem.sizes[chosen.ladder[-1]] if chosen.ladder else 0
    must = problem.above[START] == math.inf
    # A size that no observed batch takes costs a graph and serves nobody; the last one covers.
    used = tuple(
        place
        for below, place in pairs
        if problem.steps[place] > problem.steps[below] or (must and problem.sizes[place] == last)
    )
    sizes = tuple(problem.sizes[place] for place in used)
    padded = ((padded_size(sizes, rows) or rows) - rows for rows in steps)
    return FittedSizes(
        sizes,
        chosen.cost,
        padding_share(sizes, steps),
        sum(more * times for more, times in zip(padded, steps.values(), strict=True)),
        sum(times for rows, times in steps.items() if not sizes or rows > sizes[-1]),
        sum(problem.nbytes[place] for place in used) if with_bytes else None,
    )
