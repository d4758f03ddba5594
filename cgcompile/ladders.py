"""Ladders of sizes that are captured, rounded and fitted to what ran: pure functions.

A *ladder* is a tuple of ascending sizes without duplicates. A batch of n rows runs at the smallest
size that is at least n; above the largest size it runs without a graph. Sizes are rows of the
padded batch, in tokens or items.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from numbers import Real
from typing import Any, TypeVar

from cgcompile.errors import SizesError, shown
from cgcompile.settings import (
    LARGEST_TABLE,
    checked_last,
    require,
    require_whole,
    whole,
)

K_ = TypeVar("K_")


def checked_number(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` as an int; raise unless it is a whole number of at least ``least``."""
    number = whole(value)
    if number is None or number < least:
        expected = f"a whole number of at least {least}"
        raise SizesError.bad_value(where="", name=name, value=value, expected=expected)
    return number


@checked_last
def checked_sizes(sizes: Iterable[int], maximum: int | None = None) -> tuple[int, ...]:
    """Return a ladder from a list of sizes: sorted, each size once.

    No size is dropped in silence: a missing graph shows only as a slow step.

    Args:
        sizes: rows, at most 2**20; in any order.
        maximum: rows of the largest batch; None if there is no limit.

    Raises:
        SizesError: there are no sizes; a size is not a whole number of at least 1, or is above the
            maximum.

    Example:
        >>> cgcompile.serving.checked_sizes([8, 1, 8, 4], maximum=8)
        (1, 4, 8)
    """
    if not isinstance(sizes, Iterable):
        raise SizesError.not_a_size(found=sizes)
    numbers = set()
    for size in sizes:
        number = whole(size)
        if number is None or number < 1:
            raise SizesError.not_a_size(found=size)
        require_whole("sizes", "checked_sizes", number, 1, LARGEST_TABLE)
        numbers.add(number)
    if not numbers:
        raise SizesError.empty()
    ladder = tuple(sorted(numbers))
    if maximum is not None:
        limit = checked_number("maximum", maximum)
        if ladder[-1] > limit:
            raise SizesError.above(sizes=[size for size in ladder if size > limit], maximum=limit)
    return ladder


@checked_last
def round_sizes(
    sizes: Iterable[int], multiple: int | Iterable[int], maximum: int
) -> tuple[int, ...]:
    """Round a ladder to multiples, for query lengths or for rows that are spread over ranks.

    Each size becomes the next multiple; where that is above the maximum, the largest multiple
    within it. So the ladder never grows, and every batch that had a graph keeps one, up to that
    largest multiple, which is included if the maximum was. It is not added to a ladder that ends
    earlier: a huge last graph would take every batch above the one before it.

    Args:
        sizes: rows; those above the maximum count as the maximum.
        multiple: what divides every size; several are joined by their least common multiple.
        maximum: rows of the largest batch.

    Raises:
        SizesError: a number is out of range, or no multiple is within the maximum.

    Example:
        >>> cgcompile.serving.round_sizes([1, 2, 4, 8, 13], multiple=4, maximum=16)
        (4, 8, 16)
    """
    factors = multiple if isinstance(multiple, Iterable) else (multiple,)
    step = math.lcm(*(checked_number("multiple", factor) for factor in factors))
    maximum = checked_number("maximum", maximum)
    last = maximum - maximum % step
    if not last:
        raise SizesError.no_multiple(multiple=step, maximum=maximum)
    return tuple(sorted({min(size + -size % step, last) for size in checked_sizes(sizes)}))


def padded_size(ladder: Sequence[int], rows: int) -> int | None:
    """Return the smallest size of at least ``rows`` (1 or more); None above the largest."""
    index = bisect_left(ladder, rows)
    return ladder[index] if index < len(ladder) else None


def padding_table(ladder: Sequence[int]) -> dict[int, int]:
    """Map every number of rows from 1 to the largest size to its :func:`padded_size`."""
    table: dict[int, int] = {}
    for size in ladder:
        table.update(dict.fromkeys(range(len(table) + 1, size + 1), size))
    return table


def checked_histogram(
    histogram: Mapping[int, int], name: str = "histogram", unit: str = "size", times: str = "steps"
) -> dict[int, int]:
    """Return batch size -> number of steps, in order, without sizes that have no step."""
    expected = "a mapping from batch sizes to numbers of steps"
    require(isinstance(histogram, Mapping), "histogram", "sizes", histogram, expected)
    steps: dict[int, int] = {}
    for batch, count in histogram.items():
        rows, number = whole(batch), whole(count)
        if rows is None or rows < 1 or number is None or number < 0:
            raise SizesError.bad_entry(name=name, batch=batch, steps=count, unit=unit, times=times)
        if number:
            steps[rows] = number
    return dict(sorted(steps.items()))


@checked_last
def padding_share(ladder: Sequence[int], histogram: Mapping[int, int]) -> float:
    """Return the share of padded rows in all rows that run, from 0 to 1.

    Batches above the largest size run without a graph, and without padding.

    Args:
        ladder: ascending sizes; may be empty.
        histogram: batch size -> number of steps.

    Raises:
        SizesError: the histogram has an invalid entry.

    Example:
        >>> cgcompile.serving.padding_share([4, 8], {3: 1, 8: 1})
        0.08333333333333333
    """
    real = run = 0
    for rows, times in checked_histogram(histogram).items():
        real += rows * times
        run += (padded_size(ladder, rows) or rows) * times
    return (run - real) / run if run else 0.0


# ---------------------------------------------------------------- fitting


_Measure = Callable[[int], float]
_START = -1  # the index before the first size


@dataclass(frozen=True)
class FittedSizes:
    """What :func:`fit_sizes` chose, and what it costs over the histogram.

    Attributes:
        sizes: the ladder; empty if no graph pays.
        cost: of all steps within the largest size that ``fit_sizes`` may choose, and with
            ``cost_without_graph`` of the others too.
        padding: padded rows by all rows that run, from 0 to 1.
        padded_rows: of all steps together.
        steps_without_graph: steps with a batch above the largest size.
        nbytes: what the graphs take by ``bytes_of``; None without it.

    Example:
        >>> found = cgcompile.serving.fit_sizes({3: 100, 7: 50, 8: 10}, count=2)
        >>> found.sizes, found.padded_rows
        ((3, 8), 50)
    """

    sizes: tuple[int, ...]
    cost: float
    padding: float
    padded_rows: int
    steps_without_graph: int
    nbytes: int | None


@dataclass(frozen=True)
class _Problem:
    """The cost of every ladder, a list of indices into ``sizes``."""

    # It is a sum over neighbours in the ladder: (steps between a and b) times cost(b).

    sizes: Sequence[int]
    costs: Sequence[float]
    nbytes: Sequence[int]
    steps: Sequence[int]  # of batches up to each size; 0 at _START
    above: Sequence[float]  # cost of larger batches; infinite if the size may not be the last

    def between(self, below: int, index: int) -> float:
        """Return the cost of the batches above ``below`` that run at ``index``, or plain."""
        if index == len(self.sizes):
            return self.above[below]
        return (self.steps[index] - self.steps[below]) * self.costs[index]

    def around(self, below: int, index: int, above: int) -> float:
        """Return the cost of the steps from ``below`` to ``above`` with ``index`` between them."""
        return self.between(below, index) + self.between(index, above)

    def gaps(self, ladder: list[int]) -> list[tuple[int, int]]:
        """Return the pairs of neighbours in a ladder, its two ends included."""
        return list(zip((_START, *ladder), (*ladder, len(self.sizes)), strict=True))

    def bytes_of(self, ladder: Iterable[int]) -> int:
        return sum(self.nbytes[index] for index in ladder)


def _problem(
    steps: Mapping[int, int],
    sizes: tuple[int, ...],
    bytes_of: Callable[[int], int] | None = None,
    cost_of: _Measure | None = None,
    cost_without_graph: _Measure | None = None,
) -> _Problem:
    batches = tuple(steps)
    served = [bisect_right(batches, size) for size in sizes] + [0]  # batches up to each size
    counted = [0]
    for batch in batches:
        counted.append(counted[-1] + steps[batch])
    above: list[float] = [math.inf] * (len(sizes) - 1) + [0, math.inf]
    if cost_without_graph is not None:
        plain: list[float] = [0]
        for batch in reversed(batches):
            cost = _measured("cost_without_graph", cost_without_graph, batch)
            plain.append(plain[-1] + cost * steps[batch])
        above = [plain[len(batches) - number] for number in served]
    return _Problem(
        sizes,
        [_measured("cost_of", cost_of, size) if cost_of else size for size in sizes],
        [int(_measured("bytes_of", bytes_of, size)) if bytes_of else 0 for size in sizes],
        [counted[number] for number in served],
        above,
    )


def _measured(name: str, measure: _Measure, size: int) -> float:
    """Call a measure of the user: a finite number; of ``bytes_of`` a whole one."""
    value: Any = measure(size)
    number: float | None = whole(value)  # as int, so that sums of rows are exact
    expected = "bytes, a whole number of at least 0"
    if name != "bytes_of":
        expected = "a finite number of at least 0"
        if number is None and type(value) is not bool and isinstance(value, Real):
            number = float(value)
    if number is None or not 0 <= number < math.inf:
        call = f"{name}({size})"
        raise SizesError.returned(call=call, found=shown(value), expected=expected)
    return number


def _removals(problem: _Problem) -> Iterator[tuple[float, int]]:
    """Yield (added cost, index) in the order of a greedy removal, without sizes that must stay."""
    end = len(problem.sizes)
    below, above = list(range(_START, end - 1)), list(range(1, end + 1))
    current: dict[int, float] = {}

    def ranked(index: int) -> tuple[float, int]:
        without = problem.between(below[index], above[index])
        current[index] = without - problem.around(below[index], index, above[index])
        return current[index], index

    heap = [ranked(index) for index in range(end)]
    heapify(heap)
    while heap:
        loss, index = heappop(heap)
        if current.get(index) != loss:
            continue  # the index was removed, or ranked again since
        if loss == math.inf:
            return
        del current[index]
        yield loss, index
        lower, upper = below[index], above[index]
        if lower != _START:
            above[lower] = upper
            heappush(heap, ranked(lower))
        if upper != end:
            below[upper] = lower
            heappush(heap, ranked(upper))


def rank_sizes(
    ladders: Mapping[K_, Collection[int]], histogram: Mapping[int, int] | None = None
) -> list[tuple[K_, int]]:
    """Rank all (kind, size): the largest of each kind, then by the padded rows that each saves."""
    # Of each kind, every prefix of the result is a ladder as the greedy removal leaves it.
    rest: list[tuple[float, K_, int]] = []
    for kind, sizes in ladders.items():
        largest = max(sizes)
        steps = {rows: times for rows, times in (histogram or {}).items() if rows <= largest}
        if not any(steps.values()):
            steps = dict.fromkeys(range(1, largest + 1), 1)
        all_rows, saved = sum(steps.values()) * largest, 0.0
        order: list[tuple[float, K_, int]] = []
        ladder = tuple(sorted(sizes))
        for loss, index in _removals(_problem(checked_histogram(steps), ladder)):
            saved = max(saved, loss / all_rows)
            order.append((saved, kind, ladder[index]))
        rest += reversed(order)
    rest.sort(key=lambda entry: -entry[0])
    firsts = [(kind, max(sizes)) for kind, sizes in ladders.items()]
    return [*firsts, *((kind, size) for _, kind, size in rest)]


def _solve(problem: _Problem, count: int | None, nbytes: int | None) -> list[int]:
    """Return a ladder of little cost within the budget."""
    # Sizes are removed greedily until it fits, then moved and added as long as that saves cost.
    left = dict.fromkeys(range(len(problem.sizes)))
    total = problem.bytes_of(left)
    for loss, index in _removals(problem):
        fits = (count is None or len(left) <= count) and (nbytes is None or total <= nbytes)
        if fits and loss >= 0:
            break
        del left[index]
        total -= problem.nbytes[index]
    if nbytes is not None and total > nbytes:
        raise SizesError.too_few_bytes(nbytes=nbytes, size=problem.sizes[-1], needed=total)
    ladder, limit = list(left), math.inf if nbytes is None else nbytes
    most = math.inf if count is None else count
    while _move(problem, ladder, limit) or (len(ladder) < most and _add(problem, ladder, limit)):
        pass
    return ladder


def _move(problem: _Problem, ladder: list[int], nbytes: float) -> bool:
    """Move each size to the best index between its neighbours; return whether that saved cost."""
    room, moved = nbytes - problem.bytes_of(ladder), False
    for position, index in enumerate(ladder):
        below = ladder[position - 1] if position else _START
        above = ladder[position + 1] if position + 1 < len(ladder) else len(problem.sizes)
        most = room + problem.nbytes[index]
        costs = {
            other: problem.around(below, other, above)
            for other in range(below + 1, above)
            if problem.nbytes[other] <= most
        }
        best = min(costs, key=costs.__getitem__)
        if _is_less(costs[best], costs[index]):
            ladder[position], room, moved = best, most - problem.nbytes[best], True
    return moved


def _add(problem: _Problem, ladder: list[int], nbytes: float) -> bool:
    """Add the size that saves the most cost; return whether one was added."""
    room = nbytes - problem.bytes_of(ladder)
    best, best_at = 0.0, None
    for position, (below, above) in enumerate(problem.gaps(ladder)):
        without = problem.between(below, above)
        for index in range(below + 1, above):
            cost = problem.around(below, index, above)
            if without - cost > best and problem.nbytes[index] <= room and _is_less(cost, without):
                best, best_at = without - cost, (position, index)
    if best_at is None:
        return False
    ladder.insert(*best_at)
    return True


def _is_less(cost: float, than: float) -> bool:
    """Return whether a cost is less by more than the rounding errors of sums."""
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
    ``maximum``. Costs are numbers of one unit, such as rows or microseconds of a step. In the mean
    the result costs less than 0.1 % more than the best ladder of the same candidates.

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
        cost_without_graph: rows -> cost of a step without a graph. If given, all batches above the
            largest size may run so, and the ladder ends where that pays.

    Raises:
        SizesError: there is no budget, nothing to fit, or a budget in which nothing fits; a number,
            candidate or entry is out of range; a function returned an invalid cost.

    Example:
        >>> cgcompile.serving.fit_sizes({3: 100, 7: 50, 8: 10}, count=2).sizes
        (3, 8)
    """
    steps = checked_histogram(histogram)
    if not steps:
        raise SizesError.no_steps()
    must_cover = cost_without_graph is None
    sizes = _candidates(steps, candidates, maximum, must_cover)
    require_limit("fit_sizes", count, nbytes, bytes_of)
    if count is not None:
        count = checked_number("count", count, least=1 if must_cover else 0)
    if nbytes is not None:
        nbytes = checked_number("nbytes", nbytes, least=0)
    problem = _problem(steps, sizes, bytes_of, cost_of, cost_without_graph)
    ladder = _solve(problem, count, nbytes)
    return _fitted(steps, problem, ladder, must_cover, bytes_of is not None)


def require_limit(
    where: str, count: int | None, nbytes: int | None, bytes_of: Callable[[int], int] | None
) -> None:
    """Raise unless there is a limit of graphs or, with the bytes of each, of bytes."""
    if count is None and nbytes is None:
        raise SizesError.no_budget(where=where)
    if nbytes is not None and bytes_of is None:
        raise SizesError.bytes_unknown(where=where, nbytes=nbytes)


def _fitted(
    steps: Mapping[int, int],
    problem: _Problem,
    ladder: list[int],
    must_cover: bool,
    with_bytes: bool,
) -> FittedSizes:
    # A size that no observed batch takes only costs a graph; the largest one covers.
    used = [
        index
        for below, index in problem.gaps(ladder)[:-1]
        if problem.steps[index] > problem.steps[below] or (must_cover and index == ladder[-1])
    ]
    sizes = tuple(problem.sizes[index] for index in used)
    padded = {rows: padded_size(sizes, rows) for rows in steps}
    return FittedSizes(
        sizes,
        sum(problem.between(*gap) for gap in problem.gaps(ladder)),
        padding_share(sizes, steps),
        sum((size - rows) * steps[rows] for rows, size in padded.items() if size is not None),
        sum(steps[rows] for rows, size in padded.items() if size is None),
        problem.bytes_of(used) if with_bytes else None,
    )


def _candidates(
    steps: Mapping[int, int], candidates: Iterable[int] | None, maximum: int | None, must: bool
) -> tuple[int, ...]:
    """Return the sizes to choose from; the last covers what ``must`` be covered."""
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
