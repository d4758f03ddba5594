"""``cgcompile.coverage(model)``: which graph served which batches, how well, and what had none.

One kind of value for compiled models, managers and encoder managers. What is counted is what ran,
not what was planned: the rows add up to all steps (or items) there were.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cgcompile.config import CUDAGraphMode
from cgcompile.debug.output import Result, clipped, table, wrapped
from cgcompile.debug.subject import counters_of, recorders_of
from cgcompile.encoder.manager import EncoderCudaGraphManager
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Counters, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.statistics import Row

VERSION = 1  # of the schema of Coverage.to_dict()
FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


@dataclass(frozen=True)
class CoverageRow:
    """Steps of one kind: those on one graph, or those without a graph for one reason.

    Attributes:
        part: of what: a path of an encoder, a compiled graph or a wrapper of a model; "" of a
            manager.
        batches: which ones, in words: ``5..8 tokens``; "" where only their number is known.
        mode: ``FULL``, ``PIECEWISE`` or ``NONE``.
        graph: the key of the graph; None without one.
        captured: whether the graph is there now; None without one.
        hits: steps that ran so, or items of an encoder; the capturing step included.
        padding: the share of their rows that was padding, 0.0 to 1.0; None where none ran, or
            where the number of real rows is unknown.
        reason: the name of a :class:`cgcompile.Reason`: why there was no graph; None on a graph.
        detail: the last of that reason, in words; of a graph, which of several it is that were
            captured for one key, each for inputs or weights that lie elsewhere.
    """

    part: str
    batches: str
    mode: str
    graph: str | None
    captured: bool | None
    hits: int
    padding: float | None
    reason: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class CounterReport:
    """What the models' own counters say; warm-ups and captures are in them.

    Attributes:
        calls: ``captures + replays + failures`` and all that ran plain.
        captures: calls that recorded graphs.
        replays: calls that replayed graphs.
        failures: calls that raised.
        plain: (reason, calls) of those that ran without graphs.
    """

    calls: int
    captures: int
    replays: int
    failures: int
    plain: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, result: Counters) -> "CounterReport":
        plain = sorted((reason.value, count) for reason, count in result.plain.items())
        numbers = result.calls, result.captures, result.replays, result.failures
        return cls(*numbers, tuple(plain))


@dataclass(frozen=True)
class Coverage(Result):
    """What graphs were worth. ``print`` it.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        kind: ``model``, ``manager`` or ``encoder``.
        unit: what is counted: ``steps``, or ``items``, of an encoder once for each path.
        rows: graphs first, those without hits too. Each step or item is in one of them.
        lesser: of a model and a manager, steps that took a graph of a lesser mode than was to be,
            by reason; they stand in ``rows`` as well.
        total: the sum of all hits.
        on_graphs: of these, on graphs.
        padding: the share of rows that was padding on graphs; None where it is unknown.
        counters: of the calls of the model.
    """

    version: int
    kind: str
    unit: str
    rows: tuple[CoverageRow, ...]
    lesser: tuple[CoverageRow, ...]
    total: int
    on_graphs: int
    padding: float | None
    counters: CounterReport

    def __str__(self) -> str:
        share = "" if self.padding is None else f", {self.padding:.1%} of their rows padding"
        last = f"{self.on_graphs} of {self.total} {self.unit} on graphs{share}"
        rows = [*_lines(self.rows), last]
        if self.lesser:
            rows += ["in a lesser mode than was to be:", *_lines(self.lesser)]
        return "\n".join(rows)


def coverage(model: Any) -> Coverage:
    """Say which graphs served which batches, and what ran without one.

    Args:
        model: what ``torch.compile`` or :func:`cgcompile.compile` returned, its handle
            (:func:`cgcompile.runtime`), a wrapper, a
            :class:`~cgcompile.serving.manager.CudaGraphManager`, or an
            :class:`~cgcompile.encoder.EncoderCudaGraphManager`.

    Returns:
        The numbers of this moment. Nothing synchronises.

    Raises:
        ConfigError: ``model`` is not one of these.
    """
    if isinstance(model, CudaGraphManager):
        return _of_manager(model)
    if isinstance(model, EncoderCudaGraphManager):
        return _of_encoder(model)
    recorders = recorders_of(model, "coverage")
    graphs = [each for each in recorders if isinstance(each, CompiledGraph)]
    many = len(graphs) > 1
    rows = [
        row
        for number, graph in enumerate(graphs)
        for row in _compiled(graph, f"graph {number}" if many else "")
    ]
    wrappers = [each for each in recorders if isinstance(each, CUDAGraphWrapper)]
    rows += [row for wrapper in wrappers for row in _wrapper(wrapper)]
    return _of_parts(rows, counters_of(model, "coverage"))


# ---------------------------------------------------------------- models

# A row, its real rows and all its rows; real rows are None where they are unknown.
_Counted = tuple[CoverageRow, int | None, int]


def _compiled(graph: CompiledGraph, part: str) -> Iterator[_Counted]:
    for recording in graph.recordings:
        batch, stats = recording.batch, recording.sequence.stats
        hits = stats.replays + 1
        descriptor, size = batch.descriptor, batch.descriptor.num_tokens
        ran = hits * size  # a capture is of the padded size
        real = None if batch.own_context else ran - stats.padding
        if batch.own_context:  # without what this library put into the key
            descriptor = descriptor._replace(extra=())
        key, captured = str(descriptor), not recording.void
        tokens, share = _tokens(size), _share(real, ran)
        yield CoverageRow(part, tokens, batch.mode.name, key, captured, hits, share), real, ran


def _wrapper(wrapper: CUDAGraphWrapper) -> Iterator[_Counted]:
    for descriptor in wrapper.concrete_cudagraph_entries:
        for mode in (FULL, PIECEWISE):
            for entry in wrapper.entries_of(mode, descriptor):
                hits, size = entry.sequence.stats.replays + 1, descriptor.num_tokens
                name, key = wrapper.name, str(descriptor)
                row = CoverageRow(name, _tokens(size), mode.name, key, True, hits, None)
                yield row, None, hits * size


def _numbered(rows: list[CoverageRow]) -> list[CoverageRow]:
    """Tell graphs of one key apart."""
    total = Counter((row.part, row.mode, row.graph) for row in rows)
    seen: Counter[tuple[str, str, str | None]] = Counter()
    numbered = []
    for row in rows:
        key = (row.part, row.mode, row.graph)
        seen[key] += 1
        which = f"capture {seen[key]} of {total[key]}: of inputs or weights of its own"
        numbered.append(row if total[key] == 1 else replace(row, detail=which))
    return numbered


def _of_parts(counted: list[_Counted], counters: Counters) -> Coverage:
    rows = _numbered([row for row, _, _ in counted])
    gone = counters.captures + counters.replays - sum(row.hits for row in rows)
    if gone:
        detail = "graphs that were dropped, or wait for their inputs to come back"
        rows.append(CoverageRow("", "", "-", "-", False, gone, None, None, detail))
    rows += _reasons("NONE", counters.plain, counters)
    lesser = _reasons("-", counters.degraded, counters)
    known = [(real, ran) for _, real, ran in counted if real is not None]
    share = _share(sum(real for real, _ in known), sum(ran for _, ran in known))
    return _coverage("model", "steps", rows, lesser, share, counters)


def _reasons(mode: str, counts: Counter[Reason], counters: Counters) -> list[CoverageRow]:
    return [
        CoverageRow(
            "", "", mode, None, None, n, None, reason.value, counters.details.get(reason, "")
        )
        for reason, n in counts.items()
    ]


# ---------------------------------------------------------------- managers


def _of_manager(manager: CudaGraphManager) -> Coverage:
    rows: list[CoverageRow] = []
    lesser: list[CoverageRow] = []
    counted = manager.statistics.rows()
    for row in counted:
        same = row.reason is None or row.mode == "NONE"
        (rows if same else lesser).append(_dispatched(manager, row))
    on_graphs = [row for row in counted if row.graph is not None]
    share = _share(sum(row.real for row in on_graphs), sum(row.ran for row in on_graphs))
    return _coverage("manager", "steps", rows, lesser, share, manager.counters)


def _dispatched(manager: CudaGraphManager, row: Row) -> CoverageRow:
    key, captured = row.graph, None
    if key is not None:
        captured = manager.dispatcher.is_captured(CUDAGraphMode[row.mode], key)
    return CoverageRow(
        part="",
        batches=row.batches,
        mode=row.mode,
        graph=None if key is None else str(key),
        captured=captured,
        hits=row.hits,
        padding=None if key is None else _share(row.real, row.ran),
        reason=None if row.reason is None else row.reason.value,
        detail=row.detail,
    )


def _of_encoder(manager: EncoderCudaGraphManager) -> Coverage:
    statistics = manager.statistics.as_dict()
    ran = {(graph["path"], graph["budget"]): graph for graph in statistics["graphs"]}
    captured = {(key.path, key.budget) for key in manager.budget_graphs}
    budgets = manager.token_budgets
    paths = budgets if isinstance(budgets, dict) else {"default": budgets}
    rows = []
    for path, sizes in paths.items():
        for least, budget in zip([0, *sizes], sizes, strict=False):
            graph = ran.get((path, budget), {"items": 0, "tokens": 0, "padded_tokens": 0})
            share = _share(graph["tokens"], graph["padded_tokens"])
            span, key = f"{least + 1}..{budget} tokens", f"budget {budget}"
            there, items = (path, budget) in captured, graph["items"]
            rows.append(CoverageRow(path, span, "FULL", key, there, items, share))
    for eager in statistics["eager"]:
        span = _tokens(eager["least_tokens"], eager["most_tokens"])
        path, items, reason = eager["path"], eager["items"], eager["reason"]
        rows.append(CoverageRow(path, span, "NONE", None, None, items, None, reason))
    real, padded = manager.statistics.tokens()
    return _coverage("encoder", "items", rows, [], _share(real, padded), manager.counters)


# ---------------------------------------------------------------- all


def _coverage(
    kind: str,
    unit: str,
    rows: list[CoverageRow],
    lesser: list[CoverageRow],
    padding: float | None,
    counters: Counters,
) -> Coverage:
    return Coverage(
        version=VERSION,
        kind=kind,
        unit=unit,
        rows=tuple(rows),
        lesser=tuple(lesser),
        total=sum(row.hits for row in rows),
        on_graphs=sum(row.hits for row in rows if row.mode != "NONE"),
        padding=padding,
        counters=CounterReport.of(counters),
    )


def _share(real: int | None, ran: int) -> float | None:
    return 1 - real / ran if real is not None and ran else None


def _tokens(least: int, limit: int | None = None) -> str:
    if limit not in (None, least):
        return f"{least}..{limit} tokens"
    return "1 token" if least == 1 else f"{least} tokens"


def _lines(rows: Sequence[CoverageRow]) -> list[str]:
    cells = [("part", "batches", "mode", "graph", "padding", "hits")]
    for row in rows:
        share = "-" if row.padding is None else f"{row.padding:.1%}"
        graph = row.graph if row.captured is not False else f"{row.graph} (not there)"
        cells.append((row.part, row.batches, row.mode, graph or "-", share, str(row.hits)))
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    lines = table(list(zip(*columns, strict=True)))
    text = [clipped(lines[0])] if lines else []
    for row, line in zip(rows, lines[1:], strict=True):
        text.append(clipped(line))
        if row.reason is not None or row.detail:
            text += wrapped("", ": ".join(filter(None, (row.reason, row.detail))), 10)
    return text
