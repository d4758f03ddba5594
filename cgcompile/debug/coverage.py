"""``cgcompile.coverage(model)``: which graph served which batches, how well, and what had none.

One kind of value for compiled models, managers and encoder managers. The rule: it counts what ran,
not what was planned, and the rows add up to all steps (or items).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cgcompile.config import CUDAGraphMode
from cgcompile.counts import count, padding_of, text_table
from cgcompile.debug.output import WIDTH, Result, table_lines, wrapped
from cgcompile.debug.subject import counters_of, not_compiled, recorders_of
from cgcompile.encoder.manager import EncoderCudaGraphManager
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Counters, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.statistics import absent_text

VERSION = 3  # of the schema of Coverage.to_dict()


@dataclass(frozen=True)
class CoverageRow:
    """Steps of one kind: those on one graph, or those without a graph for one reason."""

    computed: ClassVar[tuple[str, ...]] = ("padding",)

    batches: str  # such as "5..8 tokens"; "" where unknown, and of a graph that does not exist
    mode: str  # FULL, PIECEWISE or NONE
    hits: int = 0  # steps, the capturing one included; or items of an encoder
    graph: str | None = None  # the key of the graph; None without one
    captured: bool | None = None  # whether the graph still exists; None without one
    real: int | None = None  # rows without padding, where known
    ran: int = 0  # rows with padding; 0 without a graph
    part: str = ""  # a path of an encoder, or a compiled graph or wrapper of a model
    reason: str | None = None  # why there was no graph
    detail: str = ""  # the last one of the reason; or which of several captures of one key it is

    @property
    def padding(self) -> float | None:
        """The share of rows that was padding, 0.0 to 1.0; None where it is unknown."""
        return _padding([self])


@dataclass(frozen=True, repr=False)
class Coverage(Result):
    """Which graphs served which batches. ``print`` it.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        kind: ``model``, ``manager`` or ``encoder``.
        unit: what is counted: ``steps``, or ``items``, of an encoder once for each path.
        rows: graphs first, those without hits too. Each step or item is in one of them.
        lesser: of a model and a manager, steps that took a graph of a lesser mode than requested,
            by reason; they are in ``rows`` as well.
        graphs: of a model, how many graphs of Dynamo were compiled for it and exist; 0 otherwise.
        breaks: where Dynamo ended one of them early, each with its line. A model with breaks has
            more graphs than one, and so has one that Dynamo compiled again.
        given_up: the functions of which Dynamo compiled nothing, each with the reason, as one text.
            Their calls bypass the backend, uncounted.
        counters: of the calls of the model.
        total: the sum of all hits.
        on_graphs: of these, on graphs.
        padding: the share of rows that was padding on graphs; None where it is unknown.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     for _ in range(4):
        ...         y = model(torch.randn(4, 8))
        >>> found = cgcompile.coverage(model)
        >>> sorted(found.to_dict())[:3]
        ['breaks', 'counters', 'given_up']
    """

    computed: ClassVar[tuple[str, ...]] = ("total", "on_graphs", "padding")

    version: int
    kind: str
    unit: str
    rows: tuple[CoverageRow, ...]
    lesser: tuple[CoverageRow, ...]
    graphs: int
    breaks: tuple[str, ...]
    given_up: tuple[str, ...]
    counters: Counters

    @property
    def total(self) -> int:
        """The sum of all hits."""
        return sum(row.hits for row in self.rows)

    @property
    def on_graphs(self) -> int:
        """The sum of the hits on graphs."""
        return sum(row.hits for row in self.rows if row.mode != "NONE")

    @property
    def padding(self) -> float | None:
        """The share of rows that was padding on graphs; None where it is unknown."""
        return _padding(self.rows)

    def __repr__(self) -> str:
        return f"<Coverage {self._sum()}>"

    def _sum(self) -> str:
        share = "" if self.padding is None else f", {self.padding:.1%} of their rows padding"
        return f"{self.on_graphs} of {count(self.total, self.unit[:-1])} on graphs{share}"

    def __str__(self) -> str:
        # Planned graphs that never ran and serve no batches are one line.
        absent = [
            row for row in self.rows if row.captured is False and not (row.hits or row.batches)
        ]
        lines = [*_lines([row for row in self.rows if row not in absent]), self._sum()]
        if absent:
            text = absent_text((row.mode, str(row.graph)) for row in absent)
            lines += [line.strip() for line in wrapped("", text, 0)]
        if self.lesser:
            lines += ["of these, in a lesser mode than requested:", *_lines(self.lesser)]
        if self.breaks:
            breaks = count(len(self.breaks), "graph break")
            lines.append(f"{count(self.graphs, 'compiled graph')}, {breaks} of Dynamo")
            lines += [line for text in self.breaks for line in wrapped("", text, 10)]
        if self.given_up:
            lines += [line for text in self.given_up for line in wrapped("", text, 10)]
        return "\n".join(lines)


def coverage(model: Any) -> Coverage:
    """Return which graphs served which batches, and what ran without one.

    Args:
        model: what ``torch.compile`` or :func:`cgcompile.compile` returned, its handle
            (:func:`cgcompile.runtime`), a wrapper, a
            :class:`~cgcompile.serving.manager.CudaGraphManager`, or an
            :class:`~cgcompile.encoder.EncoderCudaGraphManager`.

    Returns:
        The numbers of this moment. Nothing synchronises.

    Raises:
        ConfigError: ``model`` is not one of these.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     for _ in range(4):
        ...         y = model(torch.randn(4, 8))
        >>> found = cgcompile.coverage(model)
        >>> found.total, found.on_graphs
        (4, 3)
    """
    kind, unit = "model", "steps"
    recorders: Sequence[CompiledGraph | CUDAGraphWrapper] = ()
    lesser: list[CoverageRow] = []
    graphs: list[CompiledGraph] = []
    given_up = ""
    if isinstance(model, CudaGraphManager):
        kind, counters = "manager", model.counters
        every = [*_of_manager(model)]
        rows = [row for row in every if row.reason is None or row.mode == "NONE"]
        lesser = [row for row in every if row not in rows]
    elif isinstance(model, EncoderCudaGraphManager):
        kind, unit, counters = "encoder", "items", model.counters
        rows = [*_of_encoder(model)]
    else:
        recorders = recorders_of(model, "coverage")
        graphs = [recorder for recorder in recorders if isinstance(recorder, CompiledGraph)]
        counters = counters_of(model, "coverage")
        rows = _of_recorders(recorders, counters)
        rows += _reasons("NONE", counters.plain, counters)
        given_up = not_compiled(counters, bool(recorders))
        modes = counters.degraded.copy()
        del modes[Reason.NOT_COMPILED]
        lesser += _reasons("-", modes, counters)
    breaks = [graph.graph_break for graph in graphs if graph.graph_break]
    return Coverage(
        version=VERSION,
        kind=kind,
        unit=unit,
        rows=tuple(rows),
        lesser=tuple(lesser),
        graphs=len(graphs),
        breaks=tuple(dict.fromkeys(breaks)),
        given_up=(given_up,) if given_up else (),
        counters=counters,
    )


# ---------------------------------------------------------------- models


def _of_recorders(
    recorders: Sequence[CompiledGraph | CUDAGraphWrapper], counters: Counters
) -> list[CoverageRow]:
    """Return a row for each recorded step, and one for those that exist no longer."""
    graphs = [recorder for recorder in recorders if isinstance(recorder, CompiledGraph)]
    rows: list[CoverageRow] = []
    for number, graph in enumerate(graphs):
        rows += _of_graph(graph, f"graph {number}" if len(graphs) > 1 else "")
    for recorder in recorders:
        rows += _of_wrapper(recorder) if isinstance(recorder, CUDAGraphWrapper) else ()
    keys = [(row.part, row.mode, row.graph) for row in rows]
    for index, key in enumerate(keys):
        if keys.count(key) > 1:
            which = f"capture {keys[: index + 1].count(key)} of {keys.count(key)}"
            rows[index] = replace(rows[index], detail=f"{which}: of inputs or weights of its own")
    missing = counters.captures + counters.replays - sum(row.hits for row in rows)
    if missing:
        detail = "graphs that were dropped, or wait for their inputs to come back"
        rows.append(CoverageRow("", "-", missing, "-", captured=False, detail=detail))
    return rows


def _of_graph(graph: CompiledGraph, part: str) -> Iterator[CoverageRow]:
    for recording in graph.recordings:
        batch, sequence = recording.batch, recording.sequence
        descriptor, hits = batch.descriptor, sequence.replays + 1
        ran = hits * descriptor.num_tokens
        real = None if batch.own_context else ran - sequence.padding
        if batch.own_context:  # without what this library added to the key
            descriptor = descriptor._replace(extra=())
        key = str(descriptor)
        batches, mode = _tokens(descriptor.num_tokens), batch.mode.name
        yield CoverageRow(batches, mode, hits, key, not recording.void, real, ran, part)


def _of_wrapper(wrapper: CUDAGraphWrapper) -> Iterator[CoverageRow]:
    for (mode, descriptor, *_), entries in [*wrapper.captured_steps.captured.items()]:
        for entry in entries:
            size, hits = descriptor.num_tokens, entry.sequence.replays + 1
            batches, key, ran = _tokens(size), str(descriptor), hits * size
            yield CoverageRow(
                batches, mode.name, hits, key, captured=True, ran=ran, part=wrapper.name
            )


def _reasons(mode: str, counts: Counter[Reason], counters: Counters) -> list[CoverageRow]:
    return [
        CoverageRow("", mode, hits, reason=reason.value, detail=counters.details.get(reason, ""))
        for reason, hits in counts.items()
    ]


# ---------------------------------------------------------------- managers


def _of_manager(manager: CudaGraphManager) -> Iterator[CoverageRow]:
    for row in manager.statistics.rows():
        if row.graph is None:
            reason = None if row.reason is None else row.reason.value
            yield CoverageRow(row.batches, row.mode, row.hits, reason=reason, detail=row.detail)
        else:
            captured = manager.dispatcher.is_captured(CUDAGraphMode[row.mode], row.graph)
            rest = str(row.graph), captured, row.real, row.ran
            yield CoverageRow(row.batches, row.mode, row.hits, *rest)


def _of_encoder(manager: EncoderCudaGraphManager) -> Iterator[CoverageRow]:
    statistics = manager.statistics.as_dict()
    counts = {(graph["path"], graph["budget"]): graph for graph in statistics["graphs"]}
    captured = {(key.path, key.budget) for key in manager.budget_graphs}
    budgets = manager.token_budgets
    for path, sizes in (budgets if isinstance(budgets, dict) else {"default": budgets}).items():
        for least, budget in zip([0, *sizes], sizes, strict=False):
            graph = counts.get((path, budget), {"items": 0, "tokens": 0, "padded_tokens": 0})
            batches, key = f"{least + 1}..{budget} tokens", f"budget {budget}"
            rows = graph["tokens"], graph["padded_tokens"]
            exists = (path, budget) in captured
            yield CoverageRow(batches, "FULL", graph["items"], key, exists, *rows, path)
    for eager in statistics["eager"]:
        batches = _tokens(eager["least_tokens"], eager["most_tokens"])
        about = {name: eager[name] for name in ("reason", "detail")}
        yield CoverageRow(batches, "NONE", eager["items"], part=eager["path"], **about)


# ---------------------------------------------------------------- all


def _padding(rows: Sequence[CoverageRow]) -> float | None:
    known = [(row.real, row.ran) for row in rows if row.real is not None]
    ran = sum(count for _, count in known)
    return padding_of(sum(count for count, _ in known), ran) if ran else None


def _tokens(least: int, limit: int | None = None) -> str:
    if limit not in (None, least):
        return f"{least}..{limit} tokens"
    return "1 token" if least == 1 else f"{least} tokens"


def _lines(rows: Sequence[CoverageRow]) -> list[str]:
    """Return a table without empty columns, each reason below its row."""
    if not rows:
        return []
    cells = _cells(rows, WIDTH)
    excess = max(map(len, text_table(cells))) - WIDTH
    if excess > 0:  # of all columns a key can be cut best
        cells = _cells(rows, max(len(row[3]) for row in cells) - excess)
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    whys = [": ".join(filter(None, (row.reason, row.detail))) for row in rows]
    return table_lines(list(zip(*columns, strict=True)), [[why] if why else [] for why in whys])


def _cells(rows: Sequence[CoverageRow], width: int) -> list[tuple[str, ...]]:
    """Return the text of each column; keys of graphs have at most ``width``."""
    cells: list[tuple[str, ...]] = [("part", "batches", "mode", "graph", "padding", "hits")]
    for row in rows:
        share = "-" if row.padding is None else f"{row.padding:.1%}"
        mark = " (not captured)" if row.captured is False else ""
        key, limit = row.graph or "-", max(width - len(mark), 12)
        key = (key if len(key) <= limit else f"{key[: limit - 3]}...") + mark
        cells.append((row.part, row.batches, row.mode, key, share, str(row.hits)))
    return cells
