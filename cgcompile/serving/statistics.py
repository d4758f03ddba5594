"""Count what the dispatcher chose: hits per graph, padding, and reasons of fallbacks.

Plain Python, bounded in memory, and cheap enough to record every step: it shows whether batches
miss their graphs, or are mostly padding.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cgcompile.descriptor import BatchDescriptor
from cgcompile.locks import new_lock
from cgcompile.modes import CUDAGraphMode
from cgcompile.reasons import EXPECTED, Fallback, Reason, warn_of
from cgcompile.serving.dispatcher import Dispatched
from cgcompile.serving.plan import FULL, NONE, PIECEWISE, Planned, kind_of
from cgcompile.settings import checked

log = logging.getLogger(__name__)


class Cell(NamedTuple):
    """How often batches of one size ran in one way; all plain numbers and names."""

    unpadded: int | None  # real tokens; None for sizes that found no room in the table
    padded: int | None  # tokens that ran
    mode: str
    hits: int  # steps


class StatisticsRow(NamedTuple):
    """Steps of one kind: those of a graph, or those with one reason."""

    batches: str  # which batches, in words: "5..8 tokens"
    mode: str
    graph: BatchDescriptor | None  # the key; None of steps with a reason
    hits: int  # steps
    real: int  # their real rows
    ran: int  # their rows, with padding
    reason: Reason | None = None  # of a lesser mode than the requested one; None of a graph
    detail: str = ""  # the last one of that reason


@dataclass(slots=True)
class _Graph:
    """The steps of one graph, or all steps without one."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    hits: int = 0
    real: int = 0
    ran: int = 0
    sizes: dict[int | None, int] = field(default_factory=dict)  # steps by real tokens


@dataclass(slots=True)
class FallbackCount:
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


def count_by_reason(counted: Mapping[tuple[str, Reason], FallbackCount]) -> dict[Reason, int]:
    """Return how many steps or items had each reason, in whatever mode or path they ran."""
    counts: dict[Reason, int] = {}
    for (_, reason), entry in counted.items():
        counts[reason] = counts.get(reason, 0) + entry.count
    return counts


def text_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns of rows of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class DispatchStatistics:
    """Counts what :meth:`CudagraphDispatcher.dispatch` returned.

    Every method may be called in any thread: a lock makes each record atomic, and each report is
    of one moment. Memory is bounded by the number of graphs plus ``max_sizes``.

    Args:
        plan: the graphs that exist, from :meth:`CudagraphDispatcher.plan`; so that the coverage
            shows those without hits too. Other graphs are added at their first step.
        max_sizes: how many pairs of batch size and graph are counted separately; further ones are
            counted per graph alone. Totals, hits, padding and reasons stay exact.
        warn_fallbacks: log a warning of the first step that runs without a graph for a reason.
        exists: whether a graph is dispatched, such as :meth:`CudagraphDispatcher.is_ready`; the
            batches of one that is not are listed with the next larger one. Left out: all are.

    Example:
        >>> dispatcher = cgcompile.serving.CudagraphDispatcher("PIECEWISE", [4, 8], max_num_reqs=8)
        >>> statistics = cgcompile.serving.DispatchStatistics(dispatcher.plan())
        >>> for tokens in (3, 4, 30):
        ...     statistics.record(tokens, dispatcher.dispatch(tokens, num_reqs=1))
        >>> statistics.steps, sum(statistics.reasons().values())
        (3, 1)
    """

    @checked
    def __init__(
        self,
        plan: Iterable[Planned] = (),
        *,
        max_sizes: int = 10_000,
        warn_fallbacks: bool = False,
        exists: Callable[[CUDAGraphMode, BatchDescriptor], bool] | None = None,
    ) -> None:
        self._plan, self._exists = tuple(plan), exists
        self._max_sizes, self._warns = max_sizes, warn_fallbacks
        self._lock = new_lock()
        self.clear()

    def clear(self) -> None:
        """Forget all that was counted; the plan stays."""
        with self._lock:
            self._room = self._max_sizes
            # Per mode, so that no enumeration is hashed at each step: its hash is slow.
            self._full: dict[BatchDescriptor, _Graph] = {}
            self._piecewise: dict[BatchDescriptor, _Graph] = {}
            self._none = _Graph(NONE, None)
            self._fallbacks: dict[tuple[str, Reason], FallbackCount] = {}
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
            dispatched: what ``dispatch`` returned for it.
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
                sizes[None] = sizes.get(None, 0) + 1
            if why is not None:
                self._count_fallback(mode, num_tokens, why.reason, why.detail)

    def _count_fallback(
        self, mode: CUDAGraphMode, tokens: int, reason: Reason, detail: str
    ) -> None:
        key = mode.name, reason
        fallback = self._fallbacks.get(key)
        if fallback is None:
            fallback = self._fallbacks[key] = FallbackCount(tokens, tokens)
            if reason not in EXPECTED and mode is NONE and self._warns:
                warn_of(f"a step of {tokens} tokens", Fallback(reason, detail))
            elif reason not in EXPECTED:
                text = "a step of %d tokens runs in mode %s: %s: %s"
                log.info(text, tokens, mode.name, reason.value, detail)
        fallback.add(tokens, detail=detail)

    def _graphs(self) -> list[_Graph]:
        return [*self._full.values(), *self._piecewise.values(), self._none]

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

    def __repr__(self) -> str:
        with self._lock:
            steps, on_graphs = self.steps, self.steps - self._none.hits
            return f"<DispatchStatistics: {_span(steps, steps, 'step')}, {on_graphs} on graphs>"

    def __str__(self) -> str:
        return self.coverage()

    def reasons(self) -> dict[Reason, int]:
        """Return how many steps had each reason, in whatever mode they ran."""
        with self._lock:
            return count_by_reason(self._fallbacks)

    def cells(self) -> list[Cell]:
        """Return steps by (unpadded tokens, padded tokens, mode), ascending."""
        hits: dict[tuple[int | None, int | None, str], int] = {}
        with self._lock:
            for graph in self._graphs():
                for tokens, count in graph.sizes.items():
                    real = None if tokens is None else int(tokens)  # JSON has no NumPy numbers
                    # A step without a graph runs as many rows as are real.
                    padded = graph.descriptor.num_tokens if graph.descriptor else real
                    key = real, padded, graph.mode.name
                    hits[key] = hits.get(key, 0) + count
        cells = [Cell(*key, count) for key, count in hits.items()]
        return sorted(cells, key=lambda cell: [-1 if n is None else n for n in cell[:2]])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, for JSON."""
        with self._lock:
            graphs = self._graphs()
            reasons = []
            for (mode, reason), fallback in self._fallbacks.items():
                counted = {"mode": mode, "reason": reason.value, "hits": fallback.count}
                reasons.append({**counted, **fallback.as_dict(), "detail": fallback.detail})
            return {
                "steps": self.steps,
                "real_tokens": int(sum(graph.real for graph in graphs)),
                "padded_tokens": int(sum(graph.ran for graph in graphs)),
                "padding_share": self.padding_share,
                "modes": {
                    mode.name: sum(graph.hits for graph in graphs if graph.mode is mode)
                    for mode in (FULL, PIECEWISE, NONE)
                },
                "cells": [cell._asdict() for cell in self.cells()],
                "reasons": reasons,
            }

    def _is_ready(self, graph: _Graph) -> bool:
        if self._exists is None or graph.descriptor is None:
            return True
        return self._exists(graph.mode, graph.descriptor)

    def rows(self) -> list[StatisticsRow]:
        """Return a row for each graph, with hits or not; then one for each mode and reason.

        Steps without a graph (mode NONE) are in one row each. Those with a graph are in its row,
        and, if another mode was requested, in one with that reason as well. A graph that does not
        exist serves no batches, ``""``, unless it has hits.
        """
        with self._lock:
            graphs = self._graphs()[:-1]
            ready = [self._is_ready(graph) for graph in graphs]
            batches = _served([graph.descriptor for graph in graphs if graph.descriptor], ready)
            rows = []
            pairs = zip(graphs, batches, ready, strict=True)
            for graph, served, exists in sorted(pairs, key=lambda pair: _order(pair[0])):
                served = served if exists or graph.hits else ""
                counts = graph.hits, int(graph.real), int(graph.ran)
                rows.append(StatisticsRow(served, graph.mode.name, graph.descriptor, *counts))
            for (mode, reason), fallback in self._fallbacks.items():
                served, real = _span(fallback.least, fallback.most, "token"), int(fallback.real)
                rows.append(
                    StatisticsRow(
                        served, mode, None, fallback.count, real, real, reason, fallback.detail
                    )
                )
        return rows

    def coverage(self) -> str:
        """Return a table: batches, mode, graph, padding, hits; then the reasons of lesser modes.

        A graph without hits has a row too: it costs memory and start-up time. *padding* is the
        share of padding rows in the steps that took the graph. Steps with a graph and a reason are
        in the row of the graph as well.
        """
        table = [("batches", "mode", "graph", "padding", "hits", "reason")]
        with self._lock:
            rows = self.rows()
            for row in rows:
                if not row.batches:
                    continue
                padding, reason = "", ""
                if row.reason is not None:
                    reason = f"{row.reason.value}: {row.detail}"
                else:
                    padding = f"{1 - row.real / row.ran:.1%}" if row.hits else "-"
                graph = "-" if row.graph is None else str(row.graph)
                table.append((row.batches, row.mode, graph, padding, str(row.hits), reason))
            total, share = self.steps, self.padding_share
        steps = _span(total, total, "step")
        lines = [*text_table(table), f"{steps}, {share:.1%} of their rows padding"]
        absent = absent_text((row.mode, str(row.graph)) for row in rows if not row.batches)
        return "\n".join([*lines, absent] if absent else lines)


def _order(graph: _Graph) -> tuple[Any, ...]:
    """FULL first, as in dispatch; kinds together, smallest first."""
    key = graph.descriptor
    assert key is not None
    kind = (key.query_len or 0, key.max_query_len or 0)
    variant = (key.has_lora, key.num_active_loras, str(key.extra))
    return (graph.mode is PIECEWISE, variant, kind, key.num_tokens)


def absent_text(graphs: Iterable[tuple[str, str]]) -> str:
    """Return a line that lists planned graphs, (mode, key), which do not exist; "" without any."""
    sizes: dict[str, list[str]] = {}
    for mode, key in graphs:
        sizes.setdefault(mode, []).append(key.removeprefix("num_tokens=").partition(",")[0])
    parts = [f"{mode} {', '.join(dict.fromkeys(each))}" for mode, each in sizes.items()]
    return f"planned, without a graph (tokens): {'; '.join(parts)}" if parts else ""


def _served(keys: Sequence[BatchDescriptor], ready: Sequence[bool]) -> list[str]:
    """Return for each graph the batches above the next smaller ready graph of its kind."""
    kinds: dict[Any, list[int]] = {}
    for key, exists in zip(keys, ready, strict=True):
        if exists:
            kinds.setdefault(kind_of(key), []).append(key.num_tokens)
    served = []
    for key in keys:
        smaller = max((n for n in kinds.get(kind_of(key), ()) if n < key.num_tokens), default=0)
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
