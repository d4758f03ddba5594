"""Which graphs are worth their memory: :func:`choose_graphs`, under a budget of bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cgcompile.config import CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.serving.fit import fit_sizes
from cgcompile.serving.memory import MemoryPlan, Planned, kind_of


def choose_graphs(
    plan: MemoryPlan, max_graph_bytes: int, histogram: Mapping[int, int] | None = None
) -> tuple[Planned, ...]:
    """The graphs whose bytes, at the most, stay within a budget, and that save the most padding.

    The largest graph of each kind (mode, query length, LoRA, axes) is always among them, so that
    every batch that the plan serves keeps a graph; the others are chosen by padded rows that they
    save per byte. For each kind and number of graphs the sizes are the best ones
    (:func:`~cgcompile.serving.fit.fit_sizes`); what one graph more saves falls with their number,
    so that taking the best next one wherever it is, is best for all. FULL graphs come first where
    two save the same: they take fewer bytes, and save the most time. All are chosen if all fit.

    Args:
        plan: of the graphs.
        max_graph_bytes: what they may take on the device, in bytes, as ``plan`` counts.
        histogram: batch size in tokens -> number of steps, for every kind alike; left out, all
            sizes of batches are equally frequent.

    Returns:
        In the order of the plan.

    Raises:
        ManagerError: the largest graphs alone may take more.
        SizesError: the histogram is none.
    """
    planned = [(mode, key) for mode, key, _ in plan.graphs]
    if plan.most_of(planned) <= max_graph_bytes:
        return tuple(planned)
    kinds: dict[object, list[Planned]] = {}
    for each in planned:
        kinds.setdefault(kind_of(*each), []).append(each)
    ladders = [_Ladder(each, histogram) for each in kinds.values()]
    ladders.sort(key=lambda ladder: ladder.mode is not CUDAGraphMode.FULL)
    chosen = [ladder.best(1) for ladder in ladders]
    needed = plan.most_of(_flat(chosen))
    if needed > max_graph_bytes:
        raise ManagerError.too_few_bytes(budget=max_graph_bytes, needed=needed)
    while (found := _next(plan, ladders, chosen, max_graph_bytes)) is not None:
        chosen[found.ladder] = found.graphs
    kept = set(_flat(chosen))
    return tuple(each for each in planned if each in kept)


class _Ladder:
    """The planned graphs of one kind, the largest first."""

    def __init__(self, graphs: Sequence[Planned], histogram: Mapping[int, int] | None) -> None:
        self.mode = graphs[0][0]
        self._of = {key.num_tokens: (mode, key) for mode, key in graphs}
        self._largest = largest = max(self._of)
        step = _query_len(graphs[0][1])
        every = dict.fromkeys(range(step, largest + 1, step), 1)
        here = {size: steps for size, steps in (histogram or {}).items() if size <= largest}
        self._steps = here if any(here.values()) else every
        self._found: dict[int, tuple[float, list[Planned]]] = {}

    def _fit(self, count: int) -> tuple[float, list[Planned]]:
        if count not in self._found:
            sizes = self._of
            fitted = fit_sizes(self._steps, count, maximum=self._largest, candidates=sizes)
            self._found[count] = (fitted.cost, [sizes[size] for size in fitted.sizes])
        return self._found[count]

    def best(self, count: int) -> list[Planned]:
        """The best graphs, so many at most."""
        return self._fit(count)[1]

    def saves(self, count: int) -> float:
        """Rows that one graph more saves, as a share of all; 0 if there are no more."""
        if count >= len(self._of):
            return 0.0
        everything = sum(self._steps.values()) * self._largest
        return (self._fit(count)[0] - self._fit(count + 1)[0]) / everything


class _Step(NamedTuple):
    worth: float
    ladder: int
    graphs: list[Planned]


def _next(
    plan: MemoryPlan, ladders: Sequence[_Ladder], chosen: Sequence[list[Planned]], budget: int
) -> _Step | None:
    """The graph that saves the most per byte and still fits; None if there is none."""
    best: _Step | None = None
    now = plan.most_of(_flat(chosen))
    for place, ladder in enumerate(ladders):
        count = len(chosen[place])
        saved = ladder.saves(count)
        if saved <= 0:
            continue
        more = ladder.best(count + 1)
        takes = plan.most_of(_flat([*chosen[:place], more, *chosen[place + 1 :]]))
        if takes <= budget and len(more) > count:
            worth = saved / max(1, takes - now)
            if best is None or worth > best.worth:
                best = _Step(worth, place, more)
    return best


def _flat(chosen: Sequence[Sequence[Planned]]) -> list[Planned]:
    return [each for graphs in chosen for each in graphs]


def _query_len(key: BatchDescriptor) -> int:
    return (key.query_len or 1) if key.uniform else 1
