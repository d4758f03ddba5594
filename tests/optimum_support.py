"""The oracle of ``fit_sizes``: the ladder of least cost within a budget, exactly: :func:`solve`.

The best ladder that ends at b is one that ends at some a < b and one term (steps between a and b)
times cost(b), which is a line in cost(b); the lower envelope of those lines finds it in
O(log sizes).

A budget of bytes makes a knapsack of it. A price per byte (a Lagrange multiplier) turns bytes into
cost, and so gives a bound from below. The search keeps Pareto fronts of bytes and cost, and drops
what by that bound cannot beat the best ladder known.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cgcompile.errors import SizesError
from cgcompile.serving.sizes import START, Budget, Choice, Problem

# States per place in a first search, not exact, whose ladder makes the exact one drop far more.
_KEPT = 8


class _Envelope:
    """The least of many lines, added by falling slope; asked anywhere in O(log lines)."""

    def __init__(self) -> None:
        self._lines: list[tuple[float, float, int]] = []  # slope, offset, tag

    def add(self, slope: float, offset: float, tag: int) -> None:
        lines = self._lines
        if lines and lines[-1][0] == slope:
            if lines[-1][1] <= offset:
                return
            lines.pop()
        while len(lines) > 1:
            (s0, o0, _), (s1, o1, _) = lines[-2:]
            # the middle line is nowhere the least if the outer two meet before it gets there
            if (offset - o0) * (s0 - s1) > (o1 - o0) * (s0 - slope):
                break
            lines.pop()
        lines.append((slope, offset, tag))

    def least(self, at: float) -> tuple[float, int]:
        """The least value there, and the tag of its line."""
        lines, low, high = self._lines, 0, len(self._lines) - 1
        while low < high:
            middle = (low + high) // 2
            slope, offset, _ = lines[middle]
            then, more, _ = lines[middle + 1]
            if slope * at + offset <= then * at + more:
                high = middle
            else:
                low = middle + 1
        slope, offset, tag = lines[low]
        return slope * at + offset, tag


class _Layer(NamedTuple):
    """Of the best ladder that ends at each place: its cost, and its place before that."""

    costs: list[float]
    below: list[int]


def _layer(problem: Problem, price: float, before: _Layer | None) -> _Layer:
    """Ladders one size longer than those of ``before``; of any length if it is None."""
    costs: list[float] = []
    below: list[int] = []
    envelope = _Envelope()
    envelope.add(0, 0, START)
    known = costs if before is None else before.costs
    for place, cost in enumerate(problem.costs):
        value, tag = envelope.least(cost)
        costs.append(value + problem.steps[place] * cost + price * problem.nbytes[place])
        below.append(tag)
        if place < len(known):
            envelope.add(-problem.steps[place], known[place], place)
    return _Layer(costs, below)


def _layers(problem: Problem, price: float) -> list[_Layer]:
    """Layer n: ladders of at most n + 1 sizes, bytes paid for at ``price``; the last: the most."""
    if problem.budget.graphs is None:
        return [_layer(problem, price, None)]
    layers = [_layer(problem, price, _Layer([], []))]
    while len(layers) < min(problem.budget.graphs, len(problem.sizes)):
        layers.append(_layer(problem, price, layers[-1]))
        if layers[-1].costs == layers[-2].costs:
            return layers[:-1]  # more sizes do not help
    return layers


def _best(problem: Problem, layers: list[_Layer]) -> Choice:
    """The best ladder by the prices that ``layers`` was made with."""
    ends = (*layers[-1].costs, 0.0)  # at START: no size at all
    place = min(range(len(ends)), key=lambda i: ends[i] + problem.above[i])
    ladder: list[int] = []
    place = START if place == len(ends) - 1 else place
    depth = len(layers) - 1
    while place != START:
        ladder.append(place)
        place = layers[depth].below[place]
        depth -= problem.budget.graphs is not None  # else there is one layer, of any length
    return problem.choice(tuple(reversed(ladder)))


def solve(problem: Problem) -> Choice:
    """The ladder of least cost within the budget; of several, not always the one of least bytes.

    Raises:
        SizesError: not even one size fits the budget of bytes, and one is needed.
    """
    graphs, nbytes = problem.budget
    if graphs == 0:
        return problem.choice(())
    best = _best(problem, _layers(problem, 0))
    if nbytes is None or best.nbytes <= nbytes:
        return best
    # By bytes nothing beats the last size alone, or no size where none is needed.
    fits = problem.choice(() if problem.above[START] < math.inf else (len(problem.sizes) - 1,))
    if fits.nbytes > nbytes:
        raise SizesError.too_few_bytes(nbytes=nbytes, size=problem.sizes[-1], needed=fits.nbytes)
    price, fits = _price(problem, best, fits, nbytes)
    search = _Search(problem, price, fits)
    search.best(keep=_KEPT)
    return search.best()


def _price(problem: Problem, over: Choice, fits: Choice, nbytes: int) -> tuple[float, Choice]:
    """The price of a byte that bounds the cost best, and the best ladder met that fits.

    ``over`` takes too many bytes and ``fits`` does not; at the price where both are worth the
    same, something better than both replaces one of them, or there is nothing better.
    """
    while True:
        price = (fits.cost - over.cost) / (over.nbytes - fits.nbytes)
        found = _best(problem, _layers(problem, price))
        worth = over.cost + price * over.nbytes
        if found.cost + price * found.nbytes >= worth - _slack(worth):
            return price, fits
        if found.nbytes > nbytes:
            over = found
        else:
            fits = found


def _slack(value: float) -> float:
    """More than sums of floats of that size can be wrong by."""
    return 1e-9 * abs(value)


class _State(NamedTuple):
    """The upper part of a ladder, from its lowest place so far to its last."""

    nbytes: int
    cost: float  # of the steps above those of the lowest place
    graphs: int
    ladder: tuple[int, Any] | None  # the lowest place, and the ladder above it


def _front(states: list[_State], counted: bool) -> Iterator[_State]:
    """Those that no other beats in bytes, cost and, where ``counted``, graphs at once."""
    best: dict[int, float] = {}  # graphs -> least cost so far
    for state in sorted(states, key=lambda each: each[:3]):
        graphs = state.graphs if counted else 0
        if all(cost > state.cost for other, cost in best.items() if other <= graphs):
            best[graphs] = state.cost
            yield state


class _Search:
    """Builds ladders from the last size down, as long as they may beat ``fits``, the best known.

    Args:
        problem: with a budget of bytes.
        price: of a byte; the bounds from below hold for any, and are close for that of ``_price``.
        fits: a ladder within the budget.
    """

    def __init__(self, problem: Problem, price: float, fits: Choice) -> None:
        assert problem.budget.nbytes is not None
        self.problem, self.price, self.fits = problem, price, fits
        self.nbytes = problem.budget.nbytes
        self.graphs = problem.budget.graphs or len(problem.sizes)
        self.layers = _layers(problem, price)

    def best(self, keep: int | None = None) -> Choice:
        """The best ladder; with ``keep``, of those met with that many states per place."""
        problem, counted = self.problem, self.problem.budget.graphs is not None
        self.waiting: list[list[_State]] = [[] for _ in problem.sizes]
        for place, cost in enumerate(problem.above[:START]):
            if cost < math.inf:
                self._consider(place, cost, _State(0, cost, 0, None))
        for place in reversed(range(len(problem.sizes))):
            states = list(_front(self.waiting[place], counted))
            self.waiting[place].clear()
            if keep is not None:
                states = sorted(states, key=lambda one: one.cost + self.price * one.nbytes)[:keep]
            self._extend(place, states)
        return self.fits

    def _allowed(self) -> float:
        """A bound above this one cannot be that of a better ladder."""
        return self.fits.cost + _slack(self.fits.cost + self.price * self.nbytes)

    def _consider(self, place: int, cost: float, above: _State) -> None:
        """Put ``place`` below ``above``, if that may become the best."""
        left = self.graphs - above.graphs
        total = above.nbytes + self.problem.nbytes[place]
        if left < 1 or total > self.nbytes:
            return
        rest = self.layers[min(left, len(self.layers)) - 1].costs[place]
        if cost + rest + self.price * (above.nbytes - self.nbytes) <= self._allowed():
            chain = (place, above.ladder)
            self.waiting[place].append(_State(total, cost, above.graphs + 1, chain))

    def _extend(self, place: int, states: list[_State]) -> None:
        """Every ladder part that begins at ``place``: as a whole ladder, and with a size below."""
        between, rest = self.problem.between, self.layers[-1].costs
        below = sorted((between(each, place) + rest[each], each) for each in range(place))
        for state in states:
            total = state.cost + between(START, place)
            if (total, state.nbytes) < (self.fits.cost, self.fits.nbytes):
                self.fits = self.problem.choice(tuple(_places(state.ladder)))
            room = self._allowed() - state.cost - self.price * (state.nbytes - self.nbytes)
            for least, each in below:
                if least > room:
                    break  # those after it cost more
                self._consider(each, state.cost + between(each, place), state)


def _places(chain: tuple[int, Any] | None) -> Iterator[int]:
    while chain is not None:
        place, chain = chain
        yield place


def best_ladder(
    histogram: Mapping[int, int],
    candidates: Iterable[int],
    budget: Budget,
    cost_of: Callable[[int], float] = float,
    bytes_of: Callable[[int], int] = lambda _: 0,
    plain: Callable[[int], float] | None = None,
) -> Choice:
    """The exact optimum of what ``fit_sizes`` approximates."""
    sizes = tuple(sorted(candidates))
    above = [math.inf] * (len(sizes) - 1) + [0.0, math.inf]
    if plain is not None:
        above = [
            sum(plain(n) * times for n, times in histogram.items() if n > size)
            for size in (*sizes, 0)
        ]
    steps = [sum(times for n, times in histogram.items() if n <= size) for size in (*sizes, 0)]
    costs, nbytes = tuple(map(cost_of, sizes)), tuple(map(bytes_of, sizes))
    return solve(Problem(sizes, costs, nbytes, tuple(steps), tuple(above), budget))
