"""Count what the dispatcher chose: hits per graph, padding, and reasons of fallbacks.

Plain Python, bounded in memory, and cheap enough to record every step. Without this file an engine
that runs slow does not show that its batches miss their graphs, or are mostly padding.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cgcompile.descriptor import BatchDescriptor
from cgcompile.locks import new_lock
from cgcompile.modes import CUDAGraphMode
from cgcompile.reasons import EXPECTED, Reason
from cgcompile.serving.dispatcher import Dispatched
from cgcompile.serving.plan import FULL, NONE, PIECEWISE, Planned, kind_of
from cgcompile.settings import checked

log = logging.getLogger(__name__)


class Cell(NamedTuple):
    """How often batches of one size ran in one way; all plain numbers and names.

    Attributes:
        unpadded: real tokens; None where the table was full, so that sizes are summed up.
        padded: tokens that ran.
        mode: name of the runtime mode.
        hits: steps.
    """

    unpadded: int | None
    padded: int | None
    mode: str
    hits: int


class Row(NamedTuple):
    """Steps of one kind: those of a graph, or those with one reason.

    Attributes:
        batches: which ones, in words: ``5..8 tokens``.
        mode: name of the runtime mode.
        graph: the key; None of steps with a reason.
        hits: steps.
        real: their real rows.
        ran: their rows, with padding.
        reason: why they have a lesser mode than was asked for; None of a graph.
        detail: the last one of that reason, in words.
    """

    batches: str
    mode: str
    graph: BatchDescriptor | None
    hits: int
    real: int
    ran: int
    reason: Reason | None = None
    detail: str = ""


class _Graph:
    """What one graph did, or all steps without one."""

    __slots__ = ("descriptor", "hits", "mode", "overflow", "ran", "real", "sizes")

    def __init__(self, mode: CUDAGraphMode, descriptor: BatchDescriptor | None) -> None:
        self.mode = mode
        self.descriptor = descriptor
        self.hits = self.real = self.ran = 0
        self.sizes: dict[int, int] = {}  # steps by real tokens
        self.overflow = 0  # steps of sizes that found no room there


@dataclass(slots=True)
class Lost:
    """Steps or items with one reason: how many, their tokens, and the last detail."""

    least: int  # tokens of the smallest step
    most: int = 0
    count: int = 0
    real: int = 0
    detail: str = ""

    def add(self, tokens: int, count: int = 1, detail: str = "") -> None:
        """Count one step of ``tokens``, or one group of ``count`` items."""
        self.count += count
        self.real += tokens
        self.detail = detail
        self.least = min(self.least, tokens)
        self.most = max(self.most, tokens)

    def as_dict(self) -> dict[str, int]:
        """Return the range of tokens as plain data."""
        return {"least_tokens": int(self.least), "most_tokens": int(self.most)}


def count_by_reason(lost: Mapping[tuple[str, Reason], Lost]) -> dict[Reason, int]:
    """Return how many steps or items had each reason, in whatever mode or path they ran."""
    counts: dict[Reason, int] = {}
    for (_, reason), entry in lost.items():
        counts[reason] = counts.get(reason, 0) + entry.count
    return counts


def text_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns of rows of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class DispatchStatistics:
    """Counts what :meth:`CudagraphDispatcher.dispatch` answered.

    Every method may be called in any thread: a lock makes each record whole, and each report is
    of one moment. Memory is bounded by the number of graphs plus ``max_sizes``.

    Args:
        plan: the graphs that exist, from :meth:`CudagraphDispatcher.plan`; so that the coverage
            shows those without hits too. Other graphs are added when they are first met.
        max_sizes: how many pairs of batch size and graph are counted on their own; what comes after
            them is counted per graph alone. Totals, hits, padding and reasons stay exact.
    """

    @checked
    def __init__(self, plan: Iterable[Planned] = (), *, max_sizes: int = 10_000) -> None:
        self._plan = tuple(plan)
        self._room = self._max_sizes = max_sizes
        self._lock = new_lock()
        # Per mode, so that no enumeration is hashed at each step: its hash is slow.
        self._full: dict[BatchDescriptor, _Graph] = {}
        self._piecewise: dict[BatchDescriptor, _Graph] = {}
        self._none = _Graph(NONE, None)
        self._losses: dict[tuple[str, Reason], Lost] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all that was counted; the plan stays."""
        with self._lock:
            self._room = self._max_sizes
            self._full, self._piecewise, self._losses = {}, {}, {}
            self._none = _Graph(NONE, None)
            for mode, descriptor in self._plan:
                self._graph(mode, descriptor)

    def _graph(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> _Graph:
        if mode is NONE:
            return self._none
        graphs = self._full if mode is FULL else self._piecewise
        graph = graphs.get(descriptor)
        if graph is None:
            graph = graphs[descriptor] = _Graph(mode, descriptor)
        return graph

    def record(self, num_tokens: int, dispatched: Dispatched) -> None:
        """Count one step.

        Args:
            num_tokens: real tokens of the batch.
            dispatched: what ``dispatch`` answered for it.
        """
        mode, descriptor, why = dispatched
        with self._lock:
            graph = self._graph(mode, descriptor)
            graph.hits += 1
            graph.real += num_tokens
            graph.ran += descriptor.num_tokens
            sizes = graph.sizes
            if num_tokens in sizes:
                sizes[num_tokens] += 1
            elif self._room:
                self._room -= 1
                sizes[num_tokens] = 1
            else:
                graph.overflow += 1
            if why is not None:
                self._lose(mode, num_tokens, why.reason, why.detail)

    def _lose(self, mode: CUDAGraphMode, tokens: int, reason: Reason, detail: str) -> None:
        key = mode.name, reason
        lost = self._losses.get(key)
        if lost is None:
            lost = self._losses[key] = Lost(tokens, tokens)
            if reason not in EXPECTED:
                text = "a step of %d tokens runs in mode %s: %s: %s"
                log.info(text, tokens, mode.name, reason.value, detail)
        lost.add(tokens, detail=detail)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        with self._lock:
            return sum(graph.hits for graph in self._graphs())

    @property
    def padding_share(self) -> float:
        """The share of all rows that ran and were padding: 0.0 to 1.0."""
        with self._lock:
            ran = sum(graph.ran for graph in self._graphs())
            return 1 - sum(graph.real for graph in self._graphs()) / ran if ran else 0.0

    def _graphs(self) -> list[_Graph]:
        return [*self._full.values(), *self._piecewise.values(), self._none]

    def reasons(self) -> dict[Reason, int]:
        """How many steps had each reason, in whatever mode they ran."""
        with self._lock:
            return count_by_reason(self._losses)

    def cells(self) -> list[Cell]:
        """Steps by (unpadded tokens, padded tokens, mode), ascending."""
        hits: dict[tuple[int | None, int | None, str], int] = {}
        with self._lock:
            for graph in self._graphs():
                # A step without a graph runs as many rows as are real.
                padded = graph.descriptor.num_tokens if graph.descriptor else None
                rest = [(None, graph.overflow)] if graph.overflow else []
                for tokens, count in [*graph.sizes.items(), *rest]:
                    real = None if tokens is None else int(tokens)  # JSON knows no NumPy
                    key = (real, real if padded is None else padded, graph.mode.name)
                    hits[key] = hits.get(key, 0) + count
        cells = [Cell(*key, count) for key, count in hits.items()]
        return sorted(cells, key=lambda cell: [-1 if n is None else n for n in cell[:2]])

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        with self._lock:
            graphs = self._graphs()
            return {
                "steps": sum(graph.hits for graph in graphs),
                "real_tokens": int(sum(graph.real for graph in graphs)),
                "padded_tokens": int(sum(graph.ran for graph in graphs)),
                "padding_share": self.padding_share,
                "modes": {
                    mode.name: sum(graph.hits for graph in graphs if graph.mode is mode)
                    for mode in (FULL, PIECEWISE, NONE)
                },
                "cells": [cell._asdict() for cell in self.cells()],
                "reasons": [
                    {
                        "mode": mode,
                        "reason": reason.value,
                        "hits": lost.count,
                        **lost.as_dict(),
                        "detail": lost.detail,
                    }
                    for (mode, reason), lost in self._losses.items()
                ],
            }

    def rows(self) -> list[Row]:
        """A row for each graph, those without hits too; then one for each mode and reason.

        Steps without a graph (mode NONE) are in one row each. Those with a graph are in its row,
        and, if they were to have had another mode, in one with that reason as well.
        """
        with self._lock:
            graphs = [*self._full.values(), *self._piecewise.values()]
            ranges = _served([*self._full, *self._piecewise])
            pairs = sorted(zip(graphs, ranges, strict=True), key=lambda pair: _order(pair[0]))
            rows = [
                Row(served, of.mode.name, of.descriptor, of.hits, int(of.real), int(of.ran))
                for of, served in pairs
            ]
            for (mode, reason), lost in self._losses.items():
                served, real = _span(lost.least, lost.most, "token"), int(lost.real)
                rows.append(Row(served, mode, None, lost.count, real, real, reason, lost.detail))
        return rows

    def coverage(self) -> str:
        """A table: batches, mode, graph, padding, hits; then the reasons of lesser modes.

        A graph's row stands also where it has no hits: it costs memory and start-up time. *padding*
        is the share of rows that were padding in the steps that took the graph.
        """
        table = [("batches", "mode", "graph", "padding", "hits", "reason")]
        with self._lock:
            for row in self.rows():
                hits = str(row.hits)
                if row.reason is None:
                    waste = f"{1 - row.real / row.ran:.1%}" if row.hits else "-"
                    table.append((row.batches, row.mode, str(row.graph), waste, hits, ""))
                else:
                    why = f"{row.reason.value}: {row.detail}"
                    table.append((row.batches, row.mode, "-", "", hits, why))
            total, share = self.steps, self.padding_share
        lines = [*text_table(table), f"{total} steps, {share:.1%} of their rows padding"]
        return "\n".join(lines)


def _order(graph: _Graph) -> tuple[Any, ...]:
    """FULL first as the dispatcher looks; kinds together, smallest first."""
    key = graph.descriptor
    assert key is not None
    kind = (key.query_len or 0, key.max_query_len or 0)
    variant = (key.has_lora, key.num_active_loras, str(key.extra))
    return (graph.mode is PIECEWISE, variant, kind, key.num_tokens)


def _served(keys: Sequence[BatchDescriptor]) -> list[str]:
    """For each graph the batches it is meant for: above the next smaller one of its kind."""
    kinds: dict[Any, list[int]] = {}
    for key in keys:
        kinds.setdefault(kind_of(key), []).append(key.num_tokens)
    served = []
    for key in keys:
        smaller = max((n for n in kinds[kind_of(key)] if n < key.num_tokens), default=0)
        if key.query_len:
            reqs = _span(smaller // key.query_len + 1, key.num_reqs or 0, "request")
            served.append(f"decode, {reqs} x {key.query_len}")
        else:
            bound = f" in queries <= {key.max_query_len}" if key.max_query_len else ""
            served.append(_span(smaller + 1, key.num_tokens, "token") + bound)
    return served


def _span(least: int, most: int, what: str) -> str:
    plural = "" if least == most == 1 else "s"
    return f"{least} {what}{plural}" if least == most else f"{least}..{most} {what}s"
