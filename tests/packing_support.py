"""What packing is measured against: the definition of cost, simple rules, all groupings, mixes."""

import math
import random
from collections.abc import Callable, Iterable, Sequence

from cgcompile.encoder import Capacity, Costs, Group, Need, smallest_budget

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
