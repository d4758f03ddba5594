"""Group the items of an encoder call and choose a graph for each group: :func:`pack`.

Each group takes one replay per path, at the smallest budget that holds it. The cost of a grouping
is estimated before anything runs; :func:`pack` takes the cheaper of two: the shortest path over
runs of the items in order of size, and best fit over the items in descending order. On mixes of
images and videos that costs 0.4 % more than the best grouping; first fit costs a third more.

The rule for callers: keep one :class:`Capacity` and one :class:`Costs` for all calls, because costs
of groups are remembered for them.
"""

import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from cgcompile.encoder.errors import EncoderError
from cgcompile.settings import require_arguments, require_fields, require_kind

# Cost of a group besides its replays: of equal groupings, the one with fewer groups wins. Far below
# one token, and a power of two, so that sums of whole costs stay exact.
_GROUP = 2.0**-20


class Need(NamedTuple):
    """What one item needs.

    Attributes:
        tokens: output tokens, one number per path; 0 for a path that the item does not take.
        frames: sequences of attention: the frames of a video, 1 for an image.

    Example:
        >>> cgcompile.encoder.Need(tokens=(16,), frames=2)
        Need(tokens=(16,), frames=2)
    """

    tokens: tuple[int, ...]
    frames: int = 1


class Capacity(NamedTuple):
    """What the captured graphs hold.

    Attributes:
        budgets: output tokens of the captured graphs of each path, ascending; ``()`` for a path
            without graphs.
        max_items: items in one group.
        max_frames: frames in one group; None for no limit; 0 (no videos) for one per item.

    Example:
        >>> capacity = cgcompile.encoder.Capacity(budgets=((16, 64),), max_items=4)
        >>> capacity.max_frames is None
        True
    """

    budgets: tuple[tuple[int, ...], ...]
    max_items: int
    max_frames: int | None = None


@dataclass(frozen=True, eq=False)
class Costs:
    """What running a group costs. All costs have one unit.

    The unit of the defaults is the cost of one token more in a graph; ``costs="measured"`` of a
    manager measures milliseconds. A replay that was not measured costs
    ``fixed + per_token * budget``, an eager run ``eager_fixed + eager_per_token * tokens``.
    Instances compare by identity.

    Attributes:
        fixed: of each replay.
        eager_fixed: of each eager run.
        eager_per_token: of a token that runs eager.
        replays: (path, budget) -> measured cost, in place of the formula.
        eagers: path -> measured (fixed, per token), in place of the formula.
        per_token: of a token more in a graph.

    Raises:
        EncoderError: a cost is negative, infinite or not a number.

    Example:
        >>> costs = cgcompile.encoder.Costs(fixed=100.0, replays={(0, 64): 150.0})
        >>> costs.fixed
        100.0
    """

    fixed: float = 300.0
    eager_fixed: float = 900.0
    eager_per_token: float = 1.0
    replays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    eagers: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    per_token: float = 1.0

    def __post_init__(self) -> None:
        for name in ("replays", "eagers"):
            require_kind(name, "Costs", getattr(self, name), Mapping)
            object.__setattr__(self, name, dict(getattr(self, name)))
        names = ("fixed", "per_token", "eager_fixed", "eager_per_token")
        costs = {name: getattr(self, name) for name in names}
        costs.update({f"replays[{key!r}]": cost for key, cost in self.replays.items()})
        for path, pair in self.eagers.items():
            several = pair if isinstance(pair, tuple) else (pair,)
            costs.update({f"eagers[{path!r}][{k}]": cost for k, cost in enumerate(several)})
        for name, cost in costs.items():
            if not (isinstance(cost, (int, float)) and 0 <= cost < inf):
                expected = "a finite number of at least 0; all costs have one unit, such as ms"
                raise EncoderError.bad_value(
                    where="Costs", name=name, value=cost, expected=expected
                )
        require_fields(self)

    def replay(self, path: int, budget: int) -> float:
        """Return the cost of one replay of the graph of ``path`` with ``budget`` output tokens."""
        measured = self.replays.get((path, budget))
        return self.fixed + self.per_token * budget if measured is None else measured

    def eager(self, path: int, tokens: int) -> float:
        """Return the cost of running ``tokens`` output tokens of ``path`` without a graph."""
        fixed, per_token = self.eagers.get(path, (self.eager_fixed, self.eager_per_token))
        return fixed + per_token * tokens


class Group(NamedTuple):
    """Items that run together.

    Attributes:
        items: indices in the call.
        budgets: the graph that serves the group on each path; 0 if it has no tokens there, None
            if it runs eager.

    Example:
        >>> from cgcompile.encoder.packing import Capacity, Costs, Need, pack
        >>> groups = pack([Need((10,)), Need((5,))], Capacity(((16, 64),), max_items=4), Costs())
        >>> groups
        [Group(items=(1, 0), budgets=(16,))]
    """

    items: tuple[int, ...]
    budgets: tuple[int | None, ...]


def pack(needs: Sequence[Need], capacity: Capacity, costs: Costs) -> list[Group]:
    """Group the items of one call for least estimated cost; each item is in one group.

    A group of several items is within every limit, also where it runs eager: tokens of the largest
    budget on each path that has graphs, items and frames. An item above a limit is alone; it runs
    eager on the paths where its tokens exceed all budgets, and on every path if it has too many
    frames. A path also runs eager where that is cheaper than the padding of its graph. Ties prefer
    a replay, and fewer groups. The cost does not depend on the order of the items, and is never
    above that of next fit over items in ascending order.

    Time: O(n * (max_items + groups)).

    Args:
        needs: of each item.
        capacity: limits; equal for all calls.
        costs: estimates; the same object for all calls.

    Raises:
        EncoderError: an item has tokens or frames that are not whole numbers of at least 0, or
            another number of paths than ``capacity``; or ``capacity`` is not valid.

    Example:
        >>> from cgcompile.encoder.packing import Capacity, Costs, Need
        >>> needs = [Need((10,)), Need((50,)), Need((5,))]
        >>> capacity = Capacity(budgets=((16, 64),), max_items=4)
        >>> cgcompile.encoder.pack(needs, capacity, Costs())
        [Group(items=(1,), budgets=(64,)), Group(items=(2, 0), budgets=(16,))]
    """
    try:
        limits = _limits(capacity, costs)
        _check_needs(needs, len(capacity.budgets))
        _ = needs[:1]  # a mapping has none
    except EncoderError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        values = {"needs": needs, "capacity": capacity, "costs": costs}
        hints = {"needs": Sequence[Need], "capacity": Capacity, "costs": Costs}
        require_arguments("pack", values, hints)
        raise
    ordinary: Sequence[int] = range(len(needs))
    grouped: list[tuple[int, ...]] = []
    if not limits.hold(needs):
        grouped = [(index,) for index in ordinary if not limits.holds(needs[index])]
        ordinary = [index for index in ordinary if limits.holds(needs[index])]
    if len(ordinary) == 1:
        grouped.append((ordinary[0],))
    elif ordinary:
        grouped += _grouped(ordinary, needs, limits)
    return [limits.group(items, needs) for items in grouped]


def _check_needs(needs: Sequence[Need], paths: int) -> None:
    for index, (tokens, frames) in enumerate(needs):
        if len(tokens) != paths:
            raise EncoderError.item_paths(item=index, found=len(tokens), paths=paths)
        try:
            valid = frames >= 0 and min(tokens) >= 0 and operator.index(sum(tokens, frames)) >= 0
        except TypeError:  # the sum has a part that is not a whole number
            valid = False
        if not valid:
            raise EncoderError.item_need(item=index, tokens=tokens, frames=frames)


class _Limits:
    """The checked limits of one capacity, and the cost of a group within them."""

    def __init__(self, capacity: Capacity, costs: Costs) -> None:
        self.budgets, self.items, frames = capacity
        rising = all(a < b for ladder in self.budgets for a, b in pairwise((0, *ladder)))
        if not (self.budgets and rising and self.items >= 1 and (frames is None or frames >= 0)):
            raise EncoderError.capacity(capacity=capacity)
        self.replay, self.eager = costs.replay, costs.eager
        self.frames = inf if frames is None else frames or self.items
        self.tops = tuple(ladder[-1] if ladder else inf for ladder in self.budgets)
        self.by_tokens: _GroupCosts | None = None  # only for one path without a frame limit
        if len(self.budgets) == 1 and self.budgets[0]:
            self.by_tokens = _GroupCosts(self, [self.budgets[0][-1]])

    def hold(self, needs: Sequence[Need]) -> bool:
        """Return whether all items are within every limit."""
        if len(self.tops) > 1 or self.frames < inf:
            return all(map(self.holds, needs))
        top = self.tops[0]
        return all([tokens[0] <= top for tokens, _ in needs])

    def holds(self, need: Need) -> bool:
        """Return whether an item is within every limit."""
        return need.frames <= self.frames and all(map(operator.le, need.tokens, self.tops))

    def choose(self, path: int, tokens: int) -> tuple[int | None, float]:
        """Return (budget, cost) for a number of tokens on a path; see :class:`Group`."""
        if not tokens:
            return 0, 0.0
        ladder, eager = self.budgets[path], self.eager(path, tokens)
        position = bisect_left(ladder, tokens)
        if position < len(ladder):
            replay = self.replay(path, ladder[position])
            if replay <= eager:
                return ladder[position], replay
        return None, eager

    def group(self, items: tuple[int, ...], needs: Sequence[Need]) -> Group:
        """Return these items as a group, with the cheaper of graph and eager on each path."""
        if len(items) == 1 and needs[items[0]].frames > self.frames:
            return Group(items, tuple(None if tokens else 0 for tokens in needs[items[0]].tokens))
        budgets = []
        for path in range(len(self.tops)):
            tokens = sum([needs[index].tokens[path] for index in items])
            budgets.append(self.choose(path, tokens)[0])
        return Group(items, tuple(budgets))


_limits = lru_cache(maxsize=32)(_Limits)


class _GroupCosts(dict[int, float]):
    """The cost of a group by the sum of its items' keys; infinite above a limit."""

    # A key has the tokens of each path and the frames in as many bits as their sums need.

    def __init__(self, limits: _Limits, totals: Sequence[int]) -> None:
        super().__init__()
        self.limits = limits
        self.shifts = [0, *accumulate(total.bit_length() for total in totals)]

    def key(self, need: Need) -> int:
        """Return the key of one item."""
        numbers = (*need.tokens, need.frames)
        return sum([number << shift for number, shift in zip(numbers, self.shifts, strict=True)])

    def __missing__(self, key: int) -> float:
        limits, cost = self.limits, _GROUP
        for path, (shift, end) in enumerate(pairwise(self.shifts)):
            tokens = (key >> shift) & ((1 << end - shift) - 1)
            cost += limits.choose(path, tokens)[1] if tokens <= limits.tops[path] else inf
        if key >> self.shifts[-1] > limits.frames:
            cost = inf
        self[key] = cost
        return cost


def _grouped(
    ordinary: Sequence[int], needs: Sequence[Need], limits: _Limits
) -> list[tuple[int, ...]]:
    """Group the items of these indices, which are all within the limits."""
    frames = [needs[index].frames for index in ordinary]
    free = sum(frames) <= limits.frames or max(frames) * limits.items <= limits.frames
    costs, top = limits.by_tokens, limits.tops[0]
    if free and costs is not None:
        order = sorted(ordinary, key=lambda index: needs[index].tokens[0])
        keys = [needs[index].tokens[0] for index in order]
    else:
        columns = zip(*[needs[index].tokens for index in ordinary], strict=True)
        costs, top = _GroupCosts(limits, [sum(column) for column in columns]), inf
        order = sorted(ordinary, key=lambda index: (sum(needs[index].tokens), *needs[index]))
        keys = [costs.key(needs[index]) for index in order]
    least, groups = _runs(keys, costs, top, limits.items)
    if keys[0] != keys[-1]:  # equal items need no order
        other, fitted = _best_fit(keys, costs, top, limits.items)
        groups = fitted if other < least else groups
    return [tuple([order[at] for at in group]) for group in groups]


def _runs(
    keys: Sequence[int], costs: _GroupCosts, top: float, most: int
) -> tuple[float, list[Sequence[int]]]:
    """Return cost and groups of the best cut into runs of neighbours, a shortest path."""
    before = [0, *accumulate(keys)]
    best, cuts = [0.0], [0]
    for end in range(1, len(before)):
        upto, least, cut = before[end], inf, end - 1
        for start in range(end - 1, max(end - most, 0) - 1, -1):
            key = upto - before[start]
            if key > top:
                break
            cost = best[start] + costs[key]
            if cost < least:
                least, cut = cost, start
        best.append(least)
        cuts.append(cut)
    groups: list[Sequence[int]] = []
    end = len(keys)
    while end:
        groups.append(range(cuts[end], end))
        end = cuts[end]
    return best[-1], groups


def _best_fit(
    keys: Sequence[int], costs: _GroupCosts, top: float, most: int
) -> tuple[float, list[Sequence[int]]]:
    """Return cost and groups where each item, the largest first, adds the least cost."""
    groups: list[list[int]] = []
    sums: list[int] = []
    for position in range(len(keys) - 1, -1, -1):
        key = keys[position]
        least, best = costs[key], -1
        for number, total in enumerate(sums):
            if total + key <= top and len(groups[number]) < most:
                more = costs[total + key] - costs[total]
                if more <= least:
                    least, best = more, number
        if best < 0:
            groups.append([position])
            sums.append(key)
        else:
            groups[best].append(position)
            sums[best] += key
    return sum([costs[key] for key in sums]), list(groups)
