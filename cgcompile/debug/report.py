"""One HTML page about a model that runs: :func:`report`. Read-only.

The rule: everything on the page is in :class:`Overview`.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

from cgcompile.backend import handle_of
from cgcompile.config import CompilationConfig
from cgcompile.counts import count
from cgcompile.debug.coverage import Coverage, coverage
from cgcompile.debug.environment import versions
from cgcompile.debug.explain import (
    PieceReport,
    SettingReport,
    SymbolReport,
    Totals,
    settings_of,
    split_fields,
)
from cgcompile.debug.pages import Page
from cgcompile.debug.profile import Profile, SegmentTime, timeline
from cgcompile.debug.subject import name_of, original_of, recorders_of
from cgcompile.graphs.pool import memory_of
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import Compilation
from cgcompile.reasons import Counters, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.settings import checked, require, sizes_given

VERSION = 5  # of the schema of Overview.to_dict()
_NOTHING = "Nothing was compiled yet: call the model, then call report() again."


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph: its split, and how its distinct pieces were compiled or loaded."""

    index: int  # in the order of compilation
    device: str
    pieces: tuple[PieceReport, ...]
    symbols: tuple[SymbolReport, ...]
    totals: Totals
    compilation: Compilation


@dataclass(frozen=True)
class StepReport:
    """One recorded step that can be replayed."""

    owner: str  # ``graph 0``, or the name of a wrapper
    batch: str
    mode: str
    graphs: int
    breaks: int  # functions that run between the graphs
    seconds: float  # the capture took, its execution included
    nbytes: int  # by which memory grew
    replays: int


@dataclass(frozen=True, repr=False)
class Overview(Page):
    """What a compiled model, a wrapper or a manager did so far; a value of one moment.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        title: of the page.
        kind: the type of the target.
        graphs: the compiled graphs that exist.
        steps: the recorded steps that can be replayed.
        timeline: the captures in the order of time, those that failed as well.
        segments: of measured steps, as of :func:`cgcompile.debug.profile`; empty without a profile.
        coverage: which batches ran how, as of :func:`cgcompile.coverage`.
        counters: the counters of all calls, as in ``coverage``.
        remedies: what to do about each reason in ``coverage``, by its name.
        speed: seconds of an eager call and of a replayed one, where the caller has measured them.
        memory: bytes that the graphs take, by purpose: the parts of :meth:`Backend.memory`.
        settings: all of them, with the origin of each.
        environment: versions and the machine, by name.
        notes: further remarks, in sentences.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     for _ in range(3):
        ...         y = model(torch.randn(4, 8))
        >>> page = cgcompile.debug.report(model)
        >>> len(page.graphs), len(page.timeline)
        (1, 1)
    """

    template: ClassVar[str] = "overview"
    computed: ClassVar[tuple[str, ...]] = ("verdict", "speedup")

    version: int
    title: str
    kind: str
    graphs: tuple[GraphReport, ...]
    steps: tuple[StepReport, ...]
    timeline: tuple[CaptureRecord, ...]
    segments: tuple[SegmentTime, ...]
    coverage: Coverage
    counters: Counters
    remedies: Mapping[str, str]
    speed: tuple[float, float] | None
    memory: Mapping[str, int]
    settings: tuple[SettingReport, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.title}: {self.verdict}\n{self.coverage}"

    @property
    def speedup(self) -> float | None:
        """How many times as fast as an eager call a replayed one is; None if not measured."""
        return None if self.speed is None else self.speed[0] / self.speed[1]

    @property
    def verdict(self) -> str:
        """What the numbers mean, in words."""
        raised = self.counters.failures
        lesser = Counter[str]()
        for row in self.coverage.lesser:
            lesser[str(row.reason)] += row.hits
        sentences = [self._served()]
        if lesser:
            sentences.append(f"In a lesser mode than requested: {_tally(lesser)}.")
        if raised:
            sentences.append(f"{count(raised, 'call')} raised an error.")
        return " ".join(sentences)

    def _served(self) -> str:
        coverage = self.coverage
        if not coverage.total:
            return "No step was completed." if self.counters.failures else "Nothing has run yet."
        others = Counter[str]()
        for row in coverage.rows:
            others[str(row.reason)] += row.hits if row.mode == "NONE" else 0
        causes, total = _tally(others), count(coverage.total, coverage.unit[:-1])
        if not coverage.on_graphs:
            return f"No graph served any of {total}: {causes}."
        if others[Reason.WARMING.value] == coverage.total - coverage.on_graphs:
            warm = f" after {causes}" if causes else ""
            return f"Graphs served all {count(coverage.on_graphs, coverage.unit[:-1])}{warm}."
        return f"Graphs served {coverage.on_graphs} of {total}; without a graph: {causes}."


def _tally(hits: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in hits.most_common() if number)


@checked
def report(
    target: Any,
    path: str | PathLike[str] | None = None,
    *,
    title: str | None = None,
    sizes: Sequence[int] | str = (),
    capture_dim: str | None = None,
    speed: tuple[float, float] | None = None,
    profile: Profile | None = None,
) -> Overview:
    """Return what a compiled model or a manager did so far, and write it as one HTML page.

    The page needs no network and no scripts. Nothing is run or captured; on CUDA the bytes of pools
    come from torch's allocator. Nothing synchronises.

    Args:
        target: what ``torch.compile`` or :func:`cgcompile.compile` returned; a
            :class:`cgcompile.Backend`; a wrapper; a manager of either kind.
        path: of the page; None writes none.
        title: of the page; None: the name of the model.
        sizes: at which bytes are evaluated, as of :func:`cgcompile.explain`.
        capture_dim: the dimension of ``sizes``, as of :func:`cgcompile.explain`.
        speed: seconds of an eager call and of a replayed one, if you have measured them.
        profile: of :func:`cgcompile.debug.profile`, if you have one: the timeline of a step.

    Raises:
        ConfigError: the target captures nothing, or ``sizes`` are invalid.
        OSError: the page cannot be written there.

    >>> cgcompile.debug.report(cgcompile.compile(nn.Linear(8, 8)), title="a layer").title
    'a layer'
    """
    recorders = recorders_of(target, "debug.report")
    chosen = sizes_given("sizes", "report", sizes)
    positive = speed is None or (len(speed) == 2 and min(speed) > 0)
    require(positive, "speed", "report", speed, "two positive numbers of seconds, or None")
    config = _config_of(target, recorders)
    compiled = [recorder for recorder in recorders if isinstance(recorder, CompiledGraph)]
    splits = [split_fields(graph.split, config, chosen, capture_dim) for graph in compiled]
    served = coverage(target)
    model = target.model if isinstance(target, CudaGraphManager) else target
    result = Overview(
        version=VERSION,
        title=title or name_of(original_of(model)),
        kind=type(target).__name__,
        graphs=tuple(map(_graph, itertools.count(), compiled, splits)),
        steps=tuple(_steps(recorders)),
        timeline=timeline(target),
        segments=() if profile is None else profile.segments,
        coverage=served,
        counters=served.counters,
        remedies=_remedies(served),
        speed=speed,
        memory=_memory(target, recorders),
        settings=settings_of(config),
        environment=versions(),
        notes=() if recorders else (_NOTHING,),
    )
    if path is not None:
        result.to_html(path)
    return result


def _graph(index: int, graph: CompiledGraph, fields: dict[str, Any]) -> GraphReport:
    device = str(graph.split.device)
    return GraphReport(index, device, compilation=graph.compilation, **fields)


def _config_of(target: Any, recorders: Sequence[Any]) -> CompilationConfig:
    for owner in (target, getattr(target, "backend", None), handle_of(target), *recorders):
        config = getattr(owner, "config", None)
        if isinstance(config, CompilationConfig):
            return config
    return CompilationConfig()


def _steps(recorders: Sequence[CompiledGraph | CUDAGraphWrapper]) -> Iterator[StepReport]:
    number = 0
    for recorder in recorders:
        if isinstance(recorder, CompiledGraph):
            owner, number = f"graph {number}", number + 1
            sequences = [recording.sequence for recording in recorder.recordings]
        else:
            owner, sequences = recorder.name, [entry.sequence for entry in recorder.entries]
        for sequence in sequences:
            record = recorder.timeline.record_of(sequence)
            if record is not None:
                yield StepReport(
                    owner=owner,
                    batch=sequence.batch,
                    mode=record.mode.name,
                    graphs=sequence.num_graphs,
                    breaks=sequence.num_eager_breaks,
                    seconds=record.seconds,
                    nbytes=record.nbytes,
                    replays=sequence.replays,
                )


def _remedies(served: Coverage) -> dict[str, str]:
    """Return what to do about each reason of a coverage, with what happened most first."""
    rows = [row for row in (*served.rows, *served.lesser) if row.reason is not None]
    rows.sort(key=lambda row: -row.hits)
    known = {reason.value: reason.remedy for reason in Reason}
    return {str(row.reason): known[str(row.reason)] for row in rows}


def _memory(target: Any, recorders: Sequence[Any]) -> dict[str, int]:
    """Return bytes by purpose, each pool once."""
    if isinstance(target, CudaGraphManager):
        return target.memory().parts
    return memory_of([each.pool for each in recorders]).parts
