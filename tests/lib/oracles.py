"""Slow and plain versions of dispatch, capture sizes and packing, to compare with."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode
from cgcompile.encoder import Capacity, Costs, Group, Need, smallest_budget
from cgcompile.errors import SizesError
from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched
from cgcompile.serving.plan import LoraCases
from cgcompile.serving.sizes import START, Budget, Choice, Problem

Mode = CUDAGraphMode
ALWAYS = AttentionCGSupport.ALWAYS
SIZES = (1, 2, 4, 8, 16)

EVERY_MODE = tuple(Mode)


@dataclass(frozen=True)
class Batch:
    """What a caller says of a batch, as ``dispatch`` takes it."""

    num_tokens: int
    num_reqs: int | None = None
    max_query_len: int | None = None
    uniform_decode: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    def through(self, dispatcher: CudagraphDispatcher, **more: Any) -> Dispatched:
        return dispatcher.dispatch(**vars(self), **more)


def decode(num_reqs: int, query_len: int = 1, **more: Any) -> Batch:
    return Batch(num_reqs * query_len, num_reqs, query_len, True, **more)


def dispatcher(mode: Mode = Mode.FULL_AND_PIECEWISE, sizes=SIZES, **more: Any):
    settings = {"max_num_reqs": 8, "support": ALWAYS, **more}
    return CudagraphDispatcher(mode, sizes, **settings)


def short(found: Dispatched) -> str:
    """``FULL(8t,8r,u1)``: 8 tokens, 8 requests, uniform of length 1."""
    key = found.descriptor
    words = [f"{key.num_tokens}t"]
    words += [f"{key.num_reqs}r"] if key.num_reqs is not None else []
    words += [f"u{key.query_len}"] if key.uniform else []
    words += [f"<={key.max_query_len}"] if key.max_query_len is not None else []
    words += [f"L{key.num_active_loras}"] if key.has_lora else []
    words += [str(key.extra)] if key.extra else []
    name = "PW" if found.mode is Mode.PIECEWISE else found.mode.name
    return f"{name}({','.join(words)})" + (f" {found.why.reason.value}" if found.why else "")


def lora_count(lora: LoraCases, batch: Batch) -> int | None:
    """The smallest captured number of adapters that is enough; 0 is 'without LoRA'."""
    if not batch.has_lora:
        return 0 if lora.without else min(lora.counts)
    wanted = batch.num_active_loras or max(lora.counts, default=0)
    return min((count for count in lora.counts if count >= wanted), default=None)


def serves(mode: Mode, key: BatchDescriptor, batch: Batch, count: int | None) -> bool:
    if (key.num_active_loras, key.has_lora) != (count, bool(count)):
        return False
    if key.num_tokens < batch.num_tokens:
        return False
    if mode is Mode.PIECEWISE:
        return True
    reqs, longest = batch.num_reqs, batch.max_query_len
    if batch.uniform_decode and longest is None:
        longest = batch.num_tokens // reqs
    if key.uniform:
        return batch.uniform_decode and key.query_len == longest and key.num_reqs >= reqs
    if reqs is not None and key.num_reqs < reqs:
        return False
    return key.max_query_len is None or (longest is not None and longest <= key.max_query_len)


def reference(dispatcher: CudagraphDispatcher, lora: LoraCases, batch: Batch, ready, allowed):
    """Mode and descriptor by search: the smallest ready one that serves, FULL before PIECEWISE."""
    count = lora_count(lora, batch)
    for mode in (Mode.FULL, Mode.PIECEWISE):
        found = [
            key
            for planned, key in dispatcher.plan()
            if planned is mode and batch.num_tokens and serves(mode, key, batch, count)
        ]
        found.sort(key=lambda key: (key.num_tokens, not key.uniform, key.max_query_len or 0))
        usable = [key for key in found if ready(mode, key)]
        if usable and mode in allowed:
            return mode, usable[0]
    return Mode.NONE, BatchDescriptor(batch.num_tokens)


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


Groups = list[list[int]]
DOUBLING = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CLOSER = (64, 96, 144, 216, 324, 486, 729, 1094, 1640, 2460, 3690, 5536, 8192)


def tokens_of(items: Iterable[int], needs: Sequence[Need], path: int) -> int:
    return sum(needs[item].tokens[path] for item in items)


def within_limits(items: Sequence[int], needs: Sequence[Need], capacity: Capacity) -> bool:
    frames = capacity.max_items if capacity.max_frames == 0 else capacity.max_frames
    return (
        len(items) <= capacity.max_items
        and (frames is None or sum(needs[item].frames for item in items) <= frames)
        and all(
            not ladder or tokens_of(items, needs, path) <= ladder[-1]
            for path, ladder in enumerate(capacity.budgets)
        )
    )


def cost_of_group(
    items: Sequence[int], needs: Sequence[Need], capacity: Capacity, costs: Costs
) -> float:
    """The cheaper of graph and eager on each path; infinite for several items above a limit."""
    if len(items) > 1 and not within_limits(items, needs, capacity):
        return math.inf
    # one item with too many frames
    no_graph = not within_limits(items, needs, capacity._replace(budgets=()))
    cost = 0.0
    for path, ladder in enumerate(capacity.budgets):
        tokens = tokens_of(items, needs, path)
        if tokens:
            budget = None if no_graph else smallest_budget(ladder, tokens)
            eager = costs.eager(path, tokens)
            cost += eager if budget is None else min(eager, costs.replay(path, budget))
    return cost


def cost_of(
    groups: Iterable[Sequence[int]], needs: Sequence[Need], capacity: Capacity, costs: Costs
) -> float:
    return sum(cost_of_group(group, needs, capacity, costs) for group in groups)


def cost_by_budgets(groups: Sequence[Group], needs: Sequence[Need], costs: Costs) -> float:
    """What the groups cost as they say they run."""
    cost = 0.0
    for items, budgets in groups:
        for path, budget in enumerate(budgets):
            if budget is None:
                cost += costs.eager(path, tokens_of(items, needs, path))
            elif budget:
                cost += costs.replay(path, budget)
    return cost


def least_cost(needs: Sequence[Need], capacity: Capacity, costs: Costs) -> float:
    """Over all groupings: some group holds the first item, and the rest is grouped at best."""
    whole = (1 << len(needs)) - 1
    sets = ([item for item in range(len(needs)) if m >> item & 1] for m in range(whole + 1))
    group_cost = [cost_of_group(items, needs, capacity, costs) for items in sets]
    best = [0.0] * (whole + 1)
    for mask in range(1, whole + 1):
        first = mask & -mask
        others = rest = mask ^ first
        best[mask] = group_cost[first] + best[rest]
        while rest:
            best[mask] = min(best[mask], group_cost[first | rest] + best[others ^ rest])
            rest = (rest - 1) & others
    return best[whole]


def ascending(needs: Sequence[Need]) -> list[int]:
    return sorted(range(len(needs)), key=lambda i: (sum(needs[i].tokens), *needs[i]))


def first_fit(order: Iterable[int], needs: Sequence[Need], capacity: Capacity) -> Groups:
    groups: Groups = []
    for item in order:
        for group in groups:
            if within_limits([*group, item], needs, capacity):
                group.append(item)
                break
        else:
            groups.append([item])
    return groups


def next_fit(needs: Sequence[Need], capacity: Capacity, *, defer: bool = False) -> Groups:
    """One open group over ascending items: vLLM 0.23's rule; with ``defer`` that of 0.33."""
    groups: Groups = []
    for item in ascending(needs):
        joins = groups and within_limits([*groups[-1], item], needs, capacity)
        if joins and not (defer and _defers(groups[-1], item, needs, capacity)):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _defers(group: list[int], item: int, needs: Sequence[Need], capacity: Capacity) -> bool:
    """Whether two replays are less padded than one, and the item's own is no smaller."""
    for path, ladder in enumerate(capacity.budgets):
        now, one = (tokens_of(each, needs, path) for each in (group, [item]))
        before, own, both = (smallest_budget(ladder, n) or 0 for n in (now, one, now + one))
        if before + own < both and own >= before:
            return True
    return False


def _patches(height: float, width: float) -> int:
    """Output tokens of an image in 28 x 28 patches."""
    return max(4, round(height / 28) * round(width / 28))


def chat(draw: random.Random) -> int:
    """Photos and screens."""
    sizes = [(480, 640), (720, 1280), (1080, 1920), (768, 1024), (1170, 540), (256, 256)]
    height, width = draw.choice(sizes)
    scale = draw.uniform(0.6, 1.1)
    return _patches(height * scale, width * scale)


def equal(draw: random.Random) -> int:
    """336 x 336 each."""
    return 144


def pages(draw: random.Random) -> int:
    """Pages of documents, at four resolutions."""
    scale = draw.choice((0.5, 0.66, 0.75, 1.0))
    return _patches(1684 * scale * draw.uniform(0.9, 1), 1190 * scale)


def log_uniform(draw: random.Random) -> int:
    return int(math.exp(draw.uniform(math.log(16), math.log(1280))))


MIXES: dict[str, Callable[[random.Random], int]] = {
    "chat": chat,
    "equal": equal,
    "pages": pages,
    "log_uniform": log_uniform,
}


def drawn(mix: str, count: int, seed: int) -> list[Need]:
    draw = random.Random(seed)
    return [Need((MIXES[mix](draw),)) for _ in range(count)]
