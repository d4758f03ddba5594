"""A ladder fitted to the batches that an engine really ran: :func:`fit_sizes`.

The usual ladder spends most of its graphs on sizes that a given engine seldom sees. Here the sizes
are chosen for least padding, or least cost, under a budget of graphs or of bytes, and nothing
chosen from the same candidates costs less. The search itself is in
``optimum.py``; here are its questions and its answers.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from cgcompile.errors import SizesError
from cgcompile.serving.optimum import START, Budget, Choice, Problem, solve
from cgcompile.serving.sizes import (
    checked_histogram,
    checked_number,
    checked_sizes,
    padded_size,
    padding_share,
)
from cgcompile.settings import checked_last, whole

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
    """The ladder of least cost over observed batches, within a budget. Exact.

    Without ``cost_without_graph`` the ladder always covers the largest observed batch, or
    ``maximum``. Costs are numbers of one unit, such as rows or microseconds of a step.

    Time with m candidates: O(count * m * log m) for a budget of graphs, milliseconds. A budget of
    bytes takes some of those, and a search of at most m * (nbytes + 1) states (by count, if both
    are given) with O(m) steps each. A bound leaves few of them, but if each size takes other bytes,
    256 candidates can take seconds and 512 a minute: give fewer, such as multiples of 8.

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
