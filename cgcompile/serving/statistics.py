"""Count what the dispatcher chose: hits per graph, padding, and reasons of fallbacks.

Plain Python, bounded in memory, and cheap enough to record every step: it shows whether batches
miss their graphs, or are mostly padding.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from cgcompile.counts import Count, Counts, padding_of, text_table
from cgcompile.descriptor import BatchDescriptor
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
    graph: BatchDescriptor | None  # the key; None for steps with a reason
    hits: int  # steps
    real: int  # their real rows
    ran: int  # their rows, with padding
    reason: Reason | None = None  # why the mode is less than the requested one; None for a graph
    detail: str = ""  # the last one of that reason


_Key = tuple[CUDAGraphMode, BatchDescriptor | None]
_ORDER = (FULL, PIECEWISE, NONE)
_WITHOUT: _Key = (NONE, None)  # the key of steps without a graph


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
        self._plan, self._exists, self._warns = tuple(plan), exists, warn_fallbacks
        self._counts: Counts[_Key] = Counts(max_sizes)
        self._lock, self._add = self._counts.lock, self._counts.add
        self.clear()

    def clear(self) -> None:
        """Forget all that was counted; the plan stays."""
        with self._lock:
            self._counts.clear()
            for entry in self._plan:
                self._counts.row(entry)

    def record(self, num_tokens: int, dispatched: Dispatched) -> None:
        """Count one step.

        Args:
            num_tokens: real tokens of the batch.
            dispatched: what ``dispatch`` returned for it.
        """
        mode, descriptor, why = dispatched
        key = _WITHOUT if mode is NONE else (mode, descriptor)
        with self._lock:
            self._add(key, num_tokens, descriptor.num_tokens)
            if why is not None:
                self._count_fallback(mode, num_tokens, why)

    def _count_fallback(self, mode: CUDAGraphMode, tokens: int, why: Fallback) -> None:
        is_new = self._counts.fall_back(mode.name, why, tokens)
        if not is_new or why.reason in EXPECTED:
            return
        if mode is NONE and self._warns:
            warn_of(f"a step of {tokens} tokens", why)
        else:
            text = "a step of %d tokens runs in mode %s: %s: %s"
            log.info(text, tokens, mode.name, why.reason.value, why.detail)

    def _graphs(self) -> list[tuple[_Key, Count]]:
        """Return the rows by key: FULL, PIECEWISE, then all steps without a graph."""
        rows: dict[_Key, Count] = {_WITHOUT: Count(), **self._counts.rows}
        return sorted(rows.items(), key=lambda row: _ORDER.index(row[0][0]))

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return self._counts.total().hits

    @property
    def padding_share(self) -> float:
        """The share of all rows that ran and were padding: 0.0 to 1.0."""
        total = self._counts.total()
        return padding_of(total.real, total.ran)

    def __repr__(self) -> str:
        with self._lock:
            steps, on_graphs = self.steps, self._counts.total(lambda key: key != _WITHOUT).hits
            return f"<DispatchStatistics: {_span(steps, steps, 'step')}, {on_graphs} on graphs>"

    def __str__(self) -> str:
        return self.coverage()

    def reasons(self) -> dict[Reason, int]:
        """Return how many steps had each reason, in whatever mode they ran."""
        return self._counts.reasons()

    def cells(self) -> list[Cell]:
        """Return steps by (unpadded tokens, padded tokens, mode), ascending."""
        hits: dict[tuple[int | None, int | None, str], int] = {}
        with self._lock:
            for (mode, descriptor), steps in self._graphs():
                for tokens, count in steps.sizes.items():
                    real = None if tokens is None else int(tokens)  # JSON has no NumPy numbers
                    # A step without a graph runs as many rows as are real.
                    padded = descriptor.num_tokens if descriptor else real
                    key = real, padded, mode.name
                    hits[key] = hits.get(key, 0) + count
        cells = [Cell(*key, count) for key, count in hits.items()]
        return sorted(cells, key=lambda cell: [-1 if n is None else n for n in cell[:2]])

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, for JSON."""
        with self._lock:
            total, reasons, modes = self._counts.total(), [], dict.fromkeys(_ORDER, 0)
            for (name, reason), steps in self._counts.fallbacks.items():
                counted = {"mode": name, "reason": reason.value, "hits": steps.hits}
                reasons.append({**counted, **steps.span, "detail": steps.detail})
            for (mode, _), steps in self._graphs():
                modes[mode] += steps.hits
            return {
                "steps": self.steps,
                "real_tokens": int(total.real),
                "padded_tokens": int(total.ran),
                "padding_share": self.padding_share,
                "modes": {mode.name: hits for mode, hits in modes.items()},
                "cells": [cell._asdict() for cell in self.cells()],
                "reasons": reasons,
            }

    def rows(self) -> list[StatisticsRow]:
        """Return a row for each graph, with hits or not; then one for each mode and reason.

        Steps without a graph (mode NONE) are in one row each. Those with a graph are in its row,
        and, if another mode was requested, in one with that reason as well. A graph that does not
        exist serves no batches, ``""``, unless it has hits.
        """
        with self._lock:
            graphs = [(mode, key, steps) for (mode, key), steps in self._graphs() if key]
            ready = [self._exists is None or self._exists(*graph[:2]) for graph in graphs]
            batches = _served([key for _, key, _ in graphs], ready)
            rows = []
            pairs = zip(graphs, batches, ready, strict=True)
            for graph, served, exists in sorted(pairs, key=lambda pair: _order(*pair[0][:2])):
                mode, key, steps = graph
                served = served if exists or steps.hits else ""
                counts = steps.hits, int(steps.real), int(steps.ran)
                rows.append(StatisticsRow(served, mode.name, key, *counts))
            for (name, reason), steps in self._counts.fallbacks.items():
                served, real = _span(steps.least, steps.most, "token"), int(steps.real)
                why = reason, steps.detail
                rows.append(StatisticsRow(served, name, None, steps.hits, real, real, *why))
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
                    padding = f"{padding_of(row.real, row.ran):.1%}" if row.hits else "-"
                graph = "-" if row.graph is None else str(row.graph)
                table.append((row.batches, row.mode, graph, padding, str(row.hits), reason))
            total, share = self.steps, self.padding_share
        steps = _span(total, total, "step")
        lines = [*text_table(table), f"{steps}, {share:.1%} of their rows padding"]
        absent = absent_text((row.mode, str(row.graph)) for row in rows if not row.batches)
        return "\n".join([*lines, absent] if absent else lines)


def _order(mode: CUDAGraphMode, key: BatchDescriptor) -> tuple[Any, ...]:
    """FULL first, as in dispatch; kinds together, smallest first."""
    kind = (key.query_len or 0, key.max_query_len or 0)
    variant = (key.has_lora, key.num_active_loras, str(key.extra))
    return (mode is PIECEWISE, variant, kind, key.num_tokens)


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
