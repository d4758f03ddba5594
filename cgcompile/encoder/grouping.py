"""The cheapest grouping of items within limits: :func:`solve`. For ``packing.py``, which asks.

Up to 8 items it is the best of all groupings: f(S) is the least, over groups G that hold the last
item of S, of cost(G) + f(S - G). That is dynamic programming over subsets. Above, it is the best of
four: a shortest path over runs of the items in order of size, first fit in both directions, and the
largest budgets filled up first. That one is mended by moving and swapping items between two groups
as long as it pays. On 9 and 10 items the result is within 1.5 % of the best in the mean.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

_EXACT = 8  # items; one more takes three times as long


class Lookup(Protocol):
    """The cost of a group, by the sum of its items' keys; infinite where a limit is broken."""

    def __getitem__(self, key: int, /) -> float: ...


class Problem(NamedTuple):
    """Items, each within the limits by itself.

    Attributes:
        keys: what each item needs, ascending in size; the sum of keys stands for a group.
        cost: of a group.
        top: no group has a larger key, and ``cost`` is not asked above it.
        most: items in a group.
        tries: how many exchanges are looked at.
        budgets: ascending, where a key is a number of tokens; else empty.
    """

    keys: list[int]
    cost: Lookup
    top: float
    most: int
    tries: int
    budgets: tuple[int, ...] = ()

    def total(self, groups: Iterable[Sequence[int]]) -> float:
        """What the groups cost together."""
        return sum([self.cost[sum([self.keys[at] for at in group])] for group in groups])


def solve(problem: Problem) -> Iterable[Sequence[int]]:
    """Groups of places in ``problem.keys``."""
    keys = problem.keys
    if keys[0] == keys[-1]:
        return _contiguous(problem)  # of equal items the order restricts nothing
    if len(keys) <= _EXACT:
        return _best_of_all(problem)
    order = range(len(keys))
    ways: list[Sequence[Sequence[int]]] = [_contiguous(problem)]
    ways += [_first_fit(problem, order), _first_fit(problem, order[::-1])]
    if problem.budgets:
        ways.append(_filled(problem))
    return _exchanged(problem, min(ways, key=problem.total))


@lru_cache(maxsize=1)
def _splits() -> list[tuple[tuple[int, int], ...]]:
    """Each set of items, a mask of bits, in two: what holds its highest item, and the rest."""
    found: list[tuple[tuple[int, int], ...]] = [()]
    for mask in range(1, 1 << _EXACT):
        last = 1 << mask.bit_length() - 1
        rest = left = mask ^ last
        pairs = [(mask, 0)]
        while left:
            left = (left - 1) & rest
            pairs.append((left | last, rest ^ left))
        found.append(tuple(pairs))
    return found


def _best_of_all(problem: Problem) -> list[list[int]]:
    """The best of all groupings, for few items."""
    keys, cost, top, most, *_ = problem
    sums = [0]
    for key in keys:
        sums += [key + other for other in sums]
    costs = [cost[key] if key <= top else math.inf for key in sums]
    if most < len(keys):
        costs = [c if m.bit_count() <= most else math.inf for m, c in enumerate(costs)]
    splits, half, whole = _splits(), len(sums) // 2, len(sums) - 1
    best, chosen = [0.0] * len(sums), [0] * len(sums)
    # Of the sets with the last item only the whole one is asked for: half of the work.
    for mask in (*range(1, half), whole):
        least, group = math.inf, 0
        for part, rest in splits[mask]:
            value = costs[part] + best[rest]
            if value < least:
                least, group = value, part
        best[mask], chosen[mask] = least, group
    groups, mask = [], whole
    while mask:
        groups.append([at for at in range(len(keys)) if chosen[mask] >> at & 1])
        mask ^= chosen[mask]
    return groups


def _contiguous(problem: Problem) -> list[Sequence[int]]:
    """The best grouping into runs of neighbours: a shortest path from cut to cut."""
    keys, cost, top, most, *_ = problem
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
    return groups


def _first_fit(problem: Problem, order: Iterable[int]) -> list[list[int]]:
    """Each item into the first group that can hold it, or else into a new one."""
    keys, cost, top, most, *_ = problem
    groups: list[list[int]] = []
    sums: list[int] = []
    for at in order:
        key = keys[at]
        for number, total in enumerate(sums):
            more = total + key
            if more <= top and len(groups[number]) < most and cost[more] < math.inf:
                sums[number] = more
                groups[number].append(at)
                break
        else:
            sums.append(key)
            groups.append([at])
    return groups


def _filled(problem: Problem) -> list[list[int]]:
    """Again and again the largest budget that the rest can fill, as full as it can be.

    That leaves the padding to one small group, which ends the chain where it costs least.
    """
    keys, cost, top, most, _, budgets = problem
    left, total, spent = list(range(len(keys)))[::-1], sum(keys), 0.0
    groups: list[list[int]] = []
    least, end, last = math.inf, 0, left
    rate = min([cost[budget] / budget for budget in budgets])  # no token is cheaper
    while left:
        if total <= top and len(left) <= most and spent + cost[total] < least:
            least, end, last = spent + cost[total], len(groups), left
        place = bisect_right(budgets, total)
        if not place or spent + rate * total >= least:
            break
        group = _fullest([keys[at] for at in left], budgets[place - 1])
        if not group or len(group) > most:
            break
        key = sum([keys[left[at]] for at in group])
        groups.append([left[at] for at in group])
        chosen = set(group)
        left = [item for at, item in enumerate(left) if at not in chosen]
        total -= key
        spent += cost[key]
    if not left and spent < least:
        return groups
    if least < math.inf:
        return [*groups[:end], last]
    rest = sorted(left)
    others = _contiguous(problem._replace(keys=[keys[at] for at in rest]))
    return groups + [[rest[at] for at in group] for group in others]


def _fullest(keys: list[int], budget: int) -> list[int]:
    """The places of those with the largest sum within a budget; the earlier ones of equals."""
    mask = (1 << budget + 1) - 1
    sums = [1]  # bit n of entry i: some of the first i have the sum n
    for key in keys:
        sums.append((sums[-1] | sums[-1] << key) & mask)
    total = sums[-1].bit_length() - 1
    found = []
    for place in range(len(keys) - 1, -1, -1):
        if not sums[place] >> total & 1:
            found.append(place)
            total -= keys[place]
    return found


class _Exchange(NamedTuple):
    """An item of one group against one of another, or against nothing."""

    gives: int
    gets: int | None
    key: int  # that the first group loses, below 0 if it gains


def _exchanged(problem: Problem, start: Iterable[Sequence[int]]) -> list[list[int]]:
    """The groups after every exchange that pays, the best one of each pair of groups at a time."""
    groups = [list(group) for group in start]
    sums = [sum([problem.keys[at] for at in group]) for group in groups]
    changed = [1] * len(groups)  # in which round; a pair is looked at again when one of it did
    tries, round_ = problem.tries, 1
    while round_ <= max(changed) + 1:
        for one, first in enumerate(groups):
            for two in range(one):
                if max(changed[one], changed[two]) < round_ - 1:
                    continue
                second = groups[two]
                tries -= (len(first) + 1) * (len(second) + 1)
                if tries < 0:
                    return [group for group in groups if group]
                found = _best_exchange(problem, first, second, sums[one], sums[two])
                if found is not None:
                    _swap(first, second, found)
                    sums[one] -= found.key
                    sums[two] += found.key
                    changed[one] = changed[two] = round_
        round_ += 1
    return [group for group in groups if group]


def _swap(first: list[int], second: list[int], found: _Exchange) -> None:
    giver, taker = (first, second) if found.gives in first else (second, first)
    giver.remove(found.gives)
    taker.append(found.gives)
    if found.gets is not None:
        taker.remove(found.gets)
        giver.append(found.gets)


def _best_exchange(
    problem: Problem, first: list[int], second: list[int], sum_one: int, sum_two: int
) -> _Exchange | None:
    """The exchange between two groups that saves most; None if none does."""
    keys, cost, top, most, *_ = problem
    both, found = sum_one + sum_two, None
    # sums of floats differ in their last digits, and must not send items round in a circle
    least = cost[sum_one] + cost[sum_two]
    least -= 1e-9 * least
    if len(second) < most:
        for at in first:
            key = sum_two + keys[at]
            if key <= top and (value := cost[key] + cost[both - key]) < least:
                least, found = value, _Exchange(at, None, keys[at])
    if len(first) < most:
        for at in second:
            key = sum_one + keys[at]
            if key <= top and (value := cost[key] + cost[both - key]) < least:
                least, found = value, _Exchange(at, None, -keys[at])
    for other in second:
        rest = sum_two - keys[other]
        for at in first:
            key = rest + keys[at]
            if key <= top and both - key <= top:
                value = cost[key] + cost[both - key]
                if value < least:
                    least, found = value, _Exchange(at, other, keys[at] - keys[other])
    return found
