"""Which items run together, and at which budgets: :func:`pack`, a pure function.

A call of an encoder brings items of many sizes, and a graph has one. Items are grouped so that
each group takes one replay per path, at the smallest budget that holds it. What a grouping costs
is known before anything runs, so that the cheapest is a question of arithmetic. First fit costs a
third more on common mixes.

The grouping is the cheaper of two: the shortest path over runs of the items in order of size, and
best fit over the items in descending order. On mixes of images and videos that costs 0.4 % more
than a search for the best grouping.

The one rule a caller keeps: ``Capacity`` and ``Costs`` are made once and kept, since their tables
are. ``pack((), capacity, costs)`` makes the tables ahead of the first request.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import index as index_of
from typing import NamedTuple, Protocol

from cgcompile.errors import EncoderError
from cgcompile.settings import require_arguments, require_fields, require_kind

# A group more costs this, far below one token, so that of equals the one of fewer groups is taken.
# A power of two: sums of whole costs stay exact.
_GROUP = 2.0**-20


class Need(NamedTuple):
    """What one item needs.

    Attributes:
        tokens: output tokens, one number per path; 0 if the item has no part in that path.
        frames: sequences that attention sees: the frames of a video, 1 for an image.
    """

    tokens: tuple[int, ...]
    frames: int = 1


class Capacity(NamedTuple):
    """What the captured graphs hold.

    Attributes:
        budgets: output tokens of the captured graphs of each path, ascending; a path without
            graphs has ``()``.
        max_items: items in one group.
        max_frames: frames in one group; None if they are not counted. 0, of a model that takes no
            videos, means one for each item.
    """

    budgets: tuple[tuple[int, ...], ...]
    max_items: int
    max_frames: int | None = None


@dataclass(frozen=True, eq=False)
class Costs:
    """What running a group costs, in tokens: the unit is the cost of one token more in a graph.

    Without measurements, a replay costs ``fixed + budget`` and an eager run
    ``eager_fixed + eager_per_token * tokens``. Two instances are never equal: tables are kept for
    each.

    Attributes:
        fixed: of each replay.
        eager_fixed: of each eager run.
        eager_per_token: of a token that runs eager.
        replays: (path, budget) -> cost that was measured; the formula holds for the others.
        eagers: path -> (fixed, per token) that was measured; the formula holds for the others.

    Raises:
        EncoderError: a cost is negative, infinite or no number.
    """

    fixed: float = 300.0
    eager_fixed: float = 900.0
    eager_per_token: float = 1.0
    replays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    eagers: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_kind("replays", "Costs", self.replays, Mapping)
        require_kind("eagers", "Costs", self.eagers, Mapping)
        # copies: the tables made from them are kept
        object.__setattr__(self, "replays", dict(self.replays))
        object.__setattr__(self, "eagers", dict(self.eagers))
        _check_cost("fixed", self.fixed)
        _check_cost("eager_fixed", self.eager_fixed)
        _check_cost("eager_per_token", self.eager_per_token)
        for key, cost in self.replays.items():
            _check_cost(f"replays[{key!r}]", cost)
        for path, pair in self.eagers.items():
            for cost in pair if isinstance(pair, tuple) else (pair,):
                _check_cost(f"eagers[{path!r}]", cost)
        require_fields(self)

    def replay(self, path: int, budget: int) -> float:
        """The cost of one replay of the graph of ``path`` with ``budget`` output tokens."""
        measured = self.replays.get((path, budget))
        return self.fixed + budget if measured is None else measured

    def eager(self, path: int, tokens: int) -> float:
        """The cost of running a group with ``tokens`` output tokens on ``path`` eager."""
        fixed, per_token = self.eagers.get(path, (self.eager_fixed, self.eager_per_token))
        return fixed + per_token * tokens


class Group(NamedTuple):
    """Items that run together.

    Attributes:
        items: indices of the call.
        budgets: per path, the graph that serves the group; 0: no tokens, so that nothing runs;
            None: it runs eager.
    """

    items: tuple[int, ...]
    budgets: tuple[int | None, ...]


def pack(needs: Sequence[Need], capacity: Capacity, costs: Costs) -> list[Group]:
    """Group the items of one call for least estimated cost. Each item is in one group.

    A group of several items is within every limit: tokens of the largest budget on each path that
    has graphs, items, frames. That holds where it runs eager, too: nothing larger was ever run
    when memory was measured. An item above a limit is alone. On a path where its tokens are above
    all budgets it runs eager; with too many frames, on every path.

    A path runs eager where that is estimated to be cheaper than the padding of its graph. Ties
    prefer a replay, and fewer groups. The cost does not depend on the order of the items, and it is
    never above that of next fit over items in ascending order.

    Time: O(n * max_items) for runs, O(n * groups) for best fit.

    Args:
        needs: of each item.
        capacity: limits; the same object, or an equal one, for every call.
        costs: estimates; the same object for every call.

    Raises:
        EncoderError: an item has tokens or frames that are no whole numbers of at least 0, or
            another number of paths than ``capacity``; or ``capacity`` cannot be.
    """
    try:
        table = _table(capacity, costs)
        _check_needs(needs, len(capacity.budgets))
    except EncoderError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        values = {"needs": needs, "capacity": capacity, "costs": costs}
        hints = {"needs": Sequence[Need], "capacity": Capacity, "costs": Costs}
        require_arguments("pack", values, hints)
        raise
    ordinary: Sequence[int] = range(len(needs))
    groups: list[Group] = []
    if not table.holds_all(needs):
        alone = [index for index in ordinary if not table.holds(needs[index])]
        ordinary = [index for index in ordinary if table.holds(needs[index])]
        groups = [table.group((index,), needs) for index in alone]
    if len(ordinary) == 1:
        return [*groups, table.group(tuple(ordinary), needs)]
    if ordinary:
        groups += [table.group(items, needs) for items in _grouped(ordinary, needs, table)]
    return groups


def _check_cost(name: str, cost: float) -> None:
    if not (isinstance(cost, (int, float)) and 0 <= cost < math.inf):
        raise EncoderError.cost(name=name, found=cost)


def _check_needs(needs: Sequence[Need], paths: int) -> None:
    for index, (tokens, frames) in enumerate(needs):
        if len(tokens) != paths:
            raise EncoderError.item_paths(item=index, found=len(tokens), paths=paths)
        try:
            fine = frames >= 0 and min(tokens) >= 0 and index_of(sum(tokens, frames)) >= 0
        except TypeError:  # of the sum: no whole number is in it
            fine = False
        if not fine:
            raise EncoderError.item_need(item=index, tokens=tokens, frames=frames)


class _Table:
    """The limits and costs of one capacity, ready to be looked up."""

    def __init__(self, capacity: Capacity, costs: Costs) -> None:
        self.budgets, self.items, frames = capacity
        if not self.budgets or self.items < 1 or (frames is not None and frames < 0):
            raise EncoderError.capacity(capacity=capacity)
        for ladder in self.budgets:
            if any(b <= a for a, b in zip((0, *ladder), ladder, strict=False)):
                raise EncoderError.capacity(capacity=capacity)
        self.costs = costs
        self.frames = math.inf if frames is None else frames or self.items
        self.tops = tuple(ladder[-1] if ladder else math.inf for ladder in self.budgets)
        self.lookups: list[list[float] | _Eager] = [
            _costs_by_tokens(path, ladder, costs) if ladder else _Eager(path, costs)
            for path, ladder in enumerate(self.budgets)
        ]
        first = self.lookups[0]  # what one path without a limit of frames needs
        self.by_tokens = [cost + _GROUP for cost in first] if isinstance(first, list) else []

    def holds(self, need: Need) -> bool:
        """Whether the item is within every limit."""
        tops = zip(need.tokens, self.tops, strict=True)
        return need.frames <= self.frames and all(tokens <= top for tokens, top in tops)

    def holds_all(self, needs: Sequence[Need]) -> bool:
        if len(self.tops) > 1 or self.frames < math.inf:
            return all(map(self.holds, needs))
        top = self.tops[0]
        return all(tokens[0] <= top for tokens, _ in needs)

    def group(self, items: tuple[int, ...], needs: Sequence[Need]) -> Group:
        """The group, with the cheaper of graph and eager on each path."""
        if len(items) == 1 and needs[items[0]].frames > self.frames:
            return Group(items, tuple(None if tokens else 0 for tokens in needs[items[0]].tokens))
        budgets: list[int | None] = []
        for path, ladder in enumerate(self.budgets):
            tokens = sum([needs[index].tokens[path] for index in items])
            at = bisect_left(ladder, tokens)
            budget = ladder[at] if at < len(ladder) else None
            if budget is not None and self.costs.replay(path, budget) > self.costs.eager(
                path, tokens
            ):
                budget = None
            budgets.append(budget if tokens else 0)
        return Group(items, tuple(budgets))


@lru_cache(maxsize=32)
def _table(capacity: Capacity, costs: Costs) -> _Table:
    return _Table(capacity, costs)


def _costs_by_tokens(path: int, ladder: tuple[int, ...], costs: Costs) -> list[float]:
    """Tokens -> cost of a group on that path, up to the largest budget."""
    by_tokens, below = [0.0], 0
    for budget in ladder:
        replay = costs.replay(path, budget)
        for tokens in range(below + 1, budget + 1):
            by_tokens.append(min(replay, costs.eager(path, tokens)))
        below = budget
    return by_tokens


class _Eager:
    """Tokens -> cost of a group on a path without graphs."""

    def __init__(self, path: int, costs: Costs) -> None:
        self.path, self.costs = path, costs

    def __getitem__(self, tokens: int) -> float:
        return self.costs.eager(self.path, tokens) if tokens else 0.0


class _Several(dict[int, float]):
    """The cost of a group by paths and frames, infinite above a limit.

    A key holds all numbers of an item, each in bits that the sum over all items cannot leave, so
    that one addition adds them all. The dictionary keeps what was asked before.
    """

    def __init__(self, table: _Table, totals: Sequence[int]) -> None:
        super().__init__()
        self.parts, shift = [], 0
        for total, top, lookup in zip(totals, table.tops, table.lookups, strict=True):
            bits = total.bit_length()
            self.parts.append((shift, (1 << bits) - 1, top, lookup))
            shift += bits
        self.shift, self.frames = shift, table.frames

    def key(self, need: Need) -> int:
        key = need.frames << self.shift
        for tokens, (shift, *_) in zip(need.tokens, self.parts, strict=True):
            key += tokens << shift
        return key

    def __missing__(self, key: int) -> float:
        cost = math.inf if key >> self.shift > self.frames else _GROUP
        for shift, mask, top, lookup in self.parts:
            tokens = key >> shift & mask
            cost += lookup[tokens] if tokens <= top else math.inf
        self[key] = cost
        return cost


def _grouped(
    ordinary: Sequence[int], needs: Sequence[Need], table: _Table
) -> list[tuple[int, ...]]:
    """Groups of items that are all within the limits."""
    frames = [needs[index].frames for index in ordinary]
    free = sum(frames) <= table.frames or max(frames) * table.items <= table.frames
    cost: _Lookup
    if free and len(table.budgets) == 1 and table.budgets[0]:
        tokens = [needs[index].tokens[0] for index in ordinary]
        places = sorted(range(len(tokens)), key=tokens.__getitem__)
        keys = [tokens[place] for place in places]
        cost, top = table.by_tokens, table.tops[0]
    else:
        columns = zip(*(needs[index].tokens for index in ordinary), strict=True)
        cost, top = _Several(table, [sum(column) for column in columns]), math.inf
        places = sorted(
            range(len(ordinary)),
            key=lambda at: (sum(needs[ordinary[at]].tokens), *needs[ordinary[at]]),
        )
        keys = [cost.key(needs[ordinary[at]]) for at in places]
    least, groups = _runs(keys, cost, top, table.items)
    if keys[0] != keys[-1]:  # of equal items the order restricts nothing
        other, fitted = _best_fit(keys, cost, top, table.items)
        groups = fitted if other < least else groups
    return [tuple([ordinary[places[at]] for at in group]) for group in groups]


class _Lookup(Protocol):
    """The cost of a group, by the sum of its items' keys; infinite where a limit is broken."""

    def __getitem__(self, key: int, /) -> float: ...


_Groups = tuple[float, list[Sequence[int]]]
"""Cost, and the places of the items of each group."""


def _runs(keys: Sequence[int], cost: _Lookup, top: float, most: int) -> _Groups:
    """Return the best grouping into runs of neighbours: a shortest path from cut to cut."""
    before = [0, *accumulate(keys)]
    best, cuts = [0.0], [0]
    for end in range(1, len(before)):
        upto = before[end]
        least, cut = math.inf, end - 1
        for start in range(end - 1, max(end - most, 0) - 1, -1):
            key = upto - before[start]
            if key > top:
                break
            value = best[start] + cost[key]
            if value < least:
                least, cut = value, start
        best.append(least)
        cuts.append(cut)
    groups: list[Sequence[int]] = []
    end = len(keys)
    while end:
        groups.append(range(cuts[end], end))
        end = cuts[end]
    return best[-1], groups


def _best_fit(keys: Sequence[int], cost: _Lookup, top: float, most: int) -> _Groups:
    """Put each item, the largest first, where it adds the least cost: into a group or a new one."""
    groups: list[list[int]] = []
    sums: list[int] = []
    for at in range(len(keys) - 1, -1, -1):
        key = keys[at]
        least, best = cost[key], -1
        for number, total in enumerate(sums):
            if total + key <= top and len(groups[number]) < most:
                more = cost[total + key] - cost[total]
                if more <= least:
                    least, best = more, number
        if best < 0:
            groups.append([at])
            sums.append(key)
        else:
            groups[best].append(at)
            sums[best] += key
    return sum([cost[key] for key in sums]), list(groups)
