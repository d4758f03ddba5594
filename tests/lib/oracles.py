"""Slow and plain versions of dispatch, capture sizes and packing, to compare with."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode
from cgcompile.encoder.budgets import smallest_budget
from cgcompile.encoder.packing import Capacity, Costs, Group, Need
from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched
from cgcompile.serving.plan import LoraCases

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


def short(dispatched: Dispatched) -> str:
    """``FULL(8t,8r,u1)``: 8 tokens, 8 requests, uniform of length 1."""
    key = dispatched.descriptor
    words = [f"{key.num_tokens}t"]
    words += [f"{key.num_reqs}r"] if key.num_reqs is not None else []
    words += [f"u{key.query_len}"] if key.uniform else []
    words += [f"<={key.max_query_len}"] if key.max_query_len is not None else []
    words += [f"L{key.num_active_loras}"] if key.has_lora else []
    words += [str(key.extra)] if key.extra else []
    name = "PW" if dispatched.mode is Mode.PIECEWISE else dispatched.mode.name
    return f"{name}({','.join(words)})" + (
        f" {dispatched.why.reason.value}" if dispatched.why else ""
    )


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
        serving = [
            key
            for planned, key in dispatcher.plan()
            if planned is mode and batch.num_tokens and serves(mode, key, batch, count)
        ]
        serving.sort(key=lambda key: (key.num_tokens, not key.uniform, key.max_query_len or 0))
        usable = [key for key in serving if ready(mode, key)]
        if usable and mode in allowed:
            return mode, usable[0]
    return Mode.NONE, BatchDescriptor(batch.num_tokens)


def least_ladder_cost(
    histogram: Mapping[int, int],
    candidates: Iterable[int],
    cost_of: Callable[[int], float] = float,
    *,
    count: int | None = None,
    nbytes: int | None = None,
    bytes_of: Callable[[int], int] = lambda _: 0,
    plain: Callable[[int], float] | None = None,
) -> float:
    """The least cost of a ladder within the budgets; infinite if no ladder is.

    Dynamic programming over the last size, the number of sizes and their bytes; a budget that is
    None is not counted.
    """
    sizes = sorted(candidates)
    taken = [0 if nbytes is None else bytes_of(size) for size in sizes]
    one = 0 if count is None else 1
    shape = (one * min(count or 0, len(sizes)) + 1, min(nbytes or 0, sum(taken)) + 1)
    nothing = np.full(shape, math.inf)
    nothing[0, 0] = 0
    best, cost = [(0, nothing)], math.inf
    for size, more in zip(sizes, taken, strict=True):
        least = np.full(shape, math.inf)
        steps = sum(times for rows, times in histogram.items() if rows <= size)
        graphs, room = shape[0] - one, shape[1] - more
        if graphs > 0 and room > 0:
            for before, costs in best:
                here = costs[:graphs, :room] + (steps - before) * cost_of(size)
                least[one:, more:] = np.minimum(least[one:, more:], here)
        best.append((steps, least))
    for size, (_, costs) in zip((0, *sizes), best, strict=True):
        if plain is not None:
            above = sum(plain(rows) * times for rows, times in histogram.items() if rows > size)
            cost = min(cost, costs.min() + above)
        elif size == sizes[-1]:
            cost = costs.min()
    return float(cost)


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
