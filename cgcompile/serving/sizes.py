"""Which batch sizes are captured, and what a batch is padded to: pure functions.

A *ladder* is a tuple of sizes, ascending, without duplicates. A batch of n rows runs at the
smallest size that is at least n; above the largest size it runs without a graph. Sizes are rows of
the padded batch, in tokens; only ``decode_sizes`` counts requests too. The one rule a caller keeps:
decode batches and mixed batches have ladders of their own, because a ladder that is rounded to the
query length covers less of mixed batches.

:func:`fit_sizes` fits a ladder to the batches that an engine really ran. The cost of a ladder is a
sum over neighbours: (steps between a and b) times cost(b). Beginning with all candidates, the size
whose removal adds the least cost is removed until the ladder is within its budget
(:func:`removals`); then sizes are moved between their neighbours, and added, as long as that saves
cost. The tests compare with the exact optimum: 0.04 % above it in the mean.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from numbers import Real
from typing import Any, NamedTuple

from cgcompile.errors import SizesError
from cgcompile.modes import CUDAGraphMode
from cgcompile.settings import (
    LARGEST_TABLE,
    checked_last,
    enum_parser,
    parsed,
    require,
    require_whole,
    whole,
)

# Small batches are the frequent ones, and there a row more is a large share of the step.
_FIRST = (1, 2, 4)
_BY_8 = range(8, 256, 8)
_COARSE_FROM, _COARSE_STEP = 256, 16


def mode_named(mode: CUDAGraphMode | str, where: str) -> CUDAGraphMode:
    """A mode by its name, as the configuration takes it."""
    member: CUDAGraphMode = parsed("mode", where, mode, enum_parser(CUDAGraphMode))
    return member


def checked_number(name: str, value: Any, least: int = 1) -> int:
    """The whole number ``value``."""
    number = whole(value)
    if number is None or number < least:
        raise SizesError.number(name=name, found=value, least=least)
    return number


@checked_last
def checked_sizes(sizes: Iterable[int], maximum: int | None = None) -> tuple[int, ...]:
    """A ladder from a list of the user's: sorted, each size once.

    Nothing is dropped in silence, since a graph that is missing shows only as a slow step.

    Args:
        sizes: rows, at most 2**20; in any order.
        maximum: rows of the largest batch; None if there is no limit.

    Raises:
        SizesError: there are none; one is no whole number of at least 1; or above the maximum.
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
def capture_sizes(
    maximum: int, *, dense: int = 0, multiple_of: int | Iterable[int] = 1
) -> tuple[int, ...]:
    """The usual ladder: 1, 2, 4, from 8 in steps of 8, from 256 in steps of 16, and the maximum.

    The maximum is in it wherever it lies, because a scheduler under load runs at its limit.

    Args:
        maximum: rows of the largest batch, at most 2**20.
        dense: every size up to this one as well, for engines in which small batches matter most.
        multiple_of: as in :func:`round_sizes`. The last size is then the largest multiple within
            the maximum, and a batch between the two has no graph: no size could serve it. Take a
            maximum that is a multiple.

    Raises:
        SizesError: a number is out of range, or no multiple is within the maximum.
    """
    maximum = checked_number("maximum", maximum)
    require_whole("maximum", "capture_sizes", maximum, 1, LARGEST_TABLE)
    dense = checked_number("dense", dense, least=0)
    small = range(1, min(dense, maximum) + 1)
    steps = (*_FIRST, *_BY_8, *range(_COARSE_FROM, maximum, _COARSE_STEP), *small)
    return round_sizes((*(size for size in steps if size < maximum), maximum), multiple_of, maximum)


@checked_last
def round_sizes(
    sizes: Iterable[int], multiple: int | Iterable[int], maximum: int
) -> tuple[int, ...]:
    """The ladder in multiples, for query lengths or for rows that are spread over ranks.

    Each size becomes the next multiple; where that is above the maximum, the largest multiple
    within it. So there are never more sizes than before, and every batch that had a graph keeps
    one, up to that largest multiple, which is in the ladder if the maximum was. It is not added to
    a ladder that ends earlier: a huge last graph would take every batch above the one before it.

    Args:
        sizes: rows; above the maximum they count as the maximum.
        multiple: what divides every size; several hold jointly, by their least common multiple.
        maximum: rows of the largest batch.

    Raises:
        SizesError: a number is out of range, or no multiple is within the maximum.
    """
    several = multiple if isinstance(multiple, Iterable) else (multiple,)
    step = math.lcm(*(checked_number("multiple", factor) for factor in several))
    maximum = checked_number("maximum", maximum)
    last = maximum - maximum % step
    if not last:
        raise SizesError.no_multiple(multiple=step, maximum=maximum)
    return tuple(sorted({min(size + -size % step, last) for size in checked_sizes(sizes)}))


@checked_last
def decode_sizes(
    requests: Iterable[int],
    query_len: int,
    max_num_reqs: int,
    max_num_tokens: int,
    *,
    multiple_of: int | Iterable[int] = 1,
) -> tuple[int, ...]:
    """The ladder of uniform decode: numbers of requests times their query length.

    A ladder over tokens would need every multiple up to the widest decode; one over requests has
    as many sizes as without speculation. Several query lengths have a ladder each.

    Args:
        requests: numbers of requests, such as ``capture_sizes(max_num_reqs)``; larger ones count
            as the most requests that fit.
        query_len: tokens of each request: 1, and the draft tokens.
        max_num_reqs: requests in the largest batch.
        max_num_tokens: tokens in the largest batch; it is not raised for long queries.
        multiple_of: what divides every size beside the query length; see :func:`round_sizes`.

    Returns:
        Sizes in tokens, multiples of ``query_len``.

    Raises:
        SizesError: a number is out of range, or not one request fits.
    """
    query_len = checked_number("query_len", query_len)
    most = checked_number("max_num_reqs", max_num_reqs) * query_len
    limit = min(most, checked_number("max_num_tokens", max_num_tokens))
    others = multiple_of if isinstance(multiple_of, Iterable) else (multiple_of,)
    return round_sizes(
        (count * query_len for count in checked_sizes(requests)), (query_len, *others), limit
    )


def padded_size(ladder: Sequence[int], rows: int) -> int | None:
    """The smallest size of at least ``rows`` (1 or more); None above the largest. O(log sizes)."""
    index = bisect_left(ladder, rows)
    return ladder[index] if index < len(ladder) else None


def padding_table(ladder: Sequence[int]) -> dict[int, int]:
    """Rows -> :func:`padded_size`, for every number of rows from 1 to the largest size."""
    table: dict[int, int] = {}
    for size in ladder:
        table.update(dict.fromkeys(range(len(table) + 1, size + 1), size))
    return table


def checked_histogram(histogram: Mapping[int, int]) -> dict[int, int]:
    """Batch size -> number of steps, in order; sizes without a step are left out."""
    expected = "a mapping from batch sizes to numbers of steps"
    require(isinstance(histogram, Mapping), "histogram", "sizes", histogram, expected)
    steps: dict[int, int] = {}
    for batch, times in histogram.items():
        rows, number = whole(batch), whole(times)
        if rows is None or rows < 1 or number is None or number < 0:
            raise SizesError.bad_entry(batch=batch, steps=times)
        if number:
            steps[rows] = number
    return dict(sorted(steps.items()))


@checked_last
def padding_share(ladder: Sequence[int], histogram: Mapping[int, int]) -> float:
    """How much of what runs is padding: padded rows by all rows, from 0 to 1.

    Batches above the largest size run without a graph, and without padding.

    Args:
        ladder: sizes in order; may be empty.
        histogram: batch size -> number of steps.

    Raises:
        SizesError: the histogram is none.
    """
    real = run = 0
    for rows, times in checked_histogram(histogram).items():
        real += rows * times
        run += (padded_size(ladder, rows) or rows) * times
    return (run - real) / run if run else 0.0


@checked_last
def get_cudagraph_sizes(
    capture_sizes: Iterable[int] | None,
    max_num_reqs: int,
    max_num_tokens: int,
    cudagraph_mode: CUDAGraphMode | str,
    uniform_decode_query_len: int = 1,
    uniform_decode_cudagraph: bool = False,
) -> tuple[dict[int, int], dict[int, int]]:
    """Number of tokens -> captured size, for all batches and for uniform decode batches.

    Both maps come from the one list ``capture_sizes``, whose sizes need not be multiples of the
    query length: the last request of a padded decode batch may be short. Ladders of their own
    (:func:`decode_sizes`) serve decode better; this is the plain form that engines know.

    Args:
        capture_sizes: tokens; in any order.
        max_num_reqs: requests in the largest batch.
        max_num_tokens: tokens in the largest batch. No size is dropped for it: keep sizes within
            it by :func:`checked_sizes`.
        cudagraph_mode: which graphs serve a step, or its name; looked at for NONE alone.
        uniform_decode_query_len: tokens of each request of a uniform decode batch.
        uniform_decode_cudagraph: whether uniform decode batches have graphs of their own, whatever
            the mode: pass ``mode.decode_mode() is FULL and mode.separate_routine()``.

    Returns:
        Two maps. The first has every number from 1 to the largest size. The second has of those
        the ones with a size of at least one request and at most ``max_num_reqs`` requests, if
        ``uniform_decode_cudagraph``; else it is empty. Both are empty for mode NONE, and without
        sizes.

    Raises:
        SizesError: a number is out of range, or a size is none.
        ConfigError: there is no such mode.
    """
    mode = mode_named(cudagraph_mode, "get_cudagraph_sizes")
    most = checked_number("max_num_reqs", max_num_reqs, least=0)
    checked_number("max_num_tokens", max_num_tokens, least=0)
    query_len = checked_number("uniform_decode_query_len", uniform_decode_query_len)
    if mode is CUDAGraphMode.NONE or capture_sizes is None:
        return {}, {}
    sizes = tuple(capture_sizes) if isinstance(capture_sizes, Iterable) else capture_sizes
    if sizes == ():
        return {}, {}
    table = padding_table(checked_sizes(sizes))
    if not uniform_decode_cudagraph:
        return table, {}
    limit = most * query_len
    return table, {rows: size for rows, size in table.items() if query_len <= size <= limit}


START = -1  # the index before the first size: none chosen yet

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
    """A ladder, as indices, and what it costs."""

    cost: float
    nbytes: int
    ladder: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A ladder is a tuple of indices into ``sizes``, as is every tuple here."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    nbytes: tuple[int, ...]
    steps: tuple[int, ...]  # with a batch of at most that size; at START, the last index: none
    above: tuple[float, ...]  # cost of larger batches; infinite if the size may not be the last
    budget: Budget

    def between(self, below: int, index: int) -> float:
        """The cost of the steps above ``below`` that run at ``index``, the next larger size.

        The index after the last size stands for running without a graph.
        """
        if index == len(self.sizes):
            return self.above[below]
        return (self.steps[index] - self.steps[below]) * self.costs[index]

    def around(self, below: int, index: int, above: int) -> float:
        """The cost of the steps above ``below`` up to ``above``, with ``index`` between them."""
        return self.between(below, index) + self.between(index, above)

    def choice(self, ladder: tuple[int, ...]) -> Choice:
        """Return that ladder with its cost and bytes."""
        pairs = zip((START, *ladder), (*ladder, len(self.sizes)), strict=True)
        cost = sum(self.between(below, index) for below, index in pairs)
        return Choice(cost, sum(self.nbytes[index] for index in ladder), ladder)


def removals(problem: Problem) -> Iterator[tuple[float, int]]:
    """Yield all indices in the order of a greedy removal, with the cost that each removal adds.

    A size that must stay is left out.
    """
    end = len(problem.sizes)
    below, above = list(range(START, end - 1)), list(range(1, end + 1))
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
            continue  # removed, or ranked again since
        if loss == math.inf:
            return
        del current[index]
        yield loss, index
        lower, upper = below[index], above[index]
        if lower != START:
            above[lower] = upper
            heappush(heap, ranked(lower))
        if upper != end:
            below[upper] = lower
            heappush(heap, ranked(upper))


def solve(problem: Problem) -> Choice:
    """Choose a ladder of little cost within the budget."""
    graphs, nbytes = problem.budget
    left = dict.fromkeys(range(len(problem.sizes)))
    total = sum(problem.nbytes)
    for loss, index in removals(problem):
        fits = (graphs is None or len(left) <= graphs) and (nbytes is None or total <= nbytes)
        if fits and loss >= 0:
            break
        del left[index]
        total -= problem.nbytes[index]
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
    """Move each size to the best index between its neighbours; return whether that saved cost."""
    room, moved = _room(problem, ladder), False
    for position, index in enumerate(ladder):
        below = ladder[position - 1] if position else START
        above = ladder[position + 1] if position + 1 < len(ladder) else len(problem.sizes)
        most = room + problem.nbytes[index]
        usable = [at for at in range(below + 1, above) if problem.nbytes[at] <= most]
        best = min(usable, key=lambda at: problem.around(below, at, above))
        now = problem.around(below, index, above)
        if _less(problem.around(below, best, above), now):
            ladder[position], room, moved = best, most - problem.nbytes[best], True
    return moved


def _added(problem: Problem, ladder: list[int]) -> bool:
    """Add the size that saves the most cost within the budget; return whether one was added."""
    graphs, room = problem.budget.graphs, _room(problem, ladder)
    if graphs is not None and len(ladder) >= graphs:
        return False
    best, best_at = 0.0, None
    for position, (below, above) in enumerate(
        zip((START, *ladder), (*ladder, len(problem.sizes)), strict=True)
    ):
        without = problem.between(below, above)
        for index in range(below + 1, above):
            gain = without - problem.around(below, index, above)
            if gain > best and problem.nbytes[index] <= room and _less(without - gain, without):
                best, best_at = gain, (position, index)
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
    """
    ladder = tuple(sorted(sizes))
    problem = _problem(checked_histogram(histogram), ladder, Budget(None, None), None, None, None)
    return [(loss, ladder[index]) for loss, index in removals(problem)]


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
    """Call a measure of the user's: a finite number; of ``bytes_of`` a whole one."""
    value: Any = measure(size)
    number: float | None = whole(value)  # as int, so that sums of rows are exact
    expected = "bytes, a whole number of at least 0"
    if name != "bytes_of":
        expected = "a finite number of at least 0"
        if number is None and type(value) is not bool and isinstance(value, Real):
            number = float(value)
    if number is None or not 0 <= number < math.inf:
        raise SizesError.bad_measure(name=name, size=size, found=value, expected=expected)
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
        tuple(int(_measured("bytes_of", bytes_of, size)) if bytes_of else 0 for size in sizes),
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
    # A size that no observed batch takes costs a graph and saves nothing; the last one covers.
    used = tuple(
        index
        for below, index in pairs
        if problem.steps[index] > problem.steps[below] or (must and problem.sizes[index] == last)
    )
    sizes = tuple(problem.sizes[index] for index in used)
    padded = ((padded_size(sizes, rows) or rows) - rows for rows in steps)
    return FittedSizes(
        sizes,
        chosen.cost,
        padding_share(sizes, steps),
        sum(more * times for more, times in zip(padded, steps.values(), strict=True)),
        sum(times for rows, times in steps.items() if not sizes or rows > sizes[-1]),
        sum(problem.nbytes[index] for index in used) if with_bytes else None,
    )
