"""One HTML page about a model that runs: :func:`report`. Read-only.

Pieces come from the split of each compiled graph, recorded steps and their times from what captured
them, batches from the statistics of managers, settings from the configuration, versions from the
process. The rule: all that is on the page is in :class:`Overview`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, NamedTuple

from cgcompile.backend import handle_of
from cgcompile.config import CompilationConfig
from cgcompile.debug.coverage import Coverage, coverage
from cgcompile.debug.environment import versions
from cgcompile.debug.explain import (
    PieceReport,
    Reporter,
    SettingReport,
    SymbolReport,
    Totals,
    settings_of,
)
from cgcompile.debug.output import Page
from cgcompile.debug.profile import timeline
from cgcompile.debug.subject import counters_of, recorders_of
from cgcompile.graphs.host import HostGraph
from cgcompile.graphs.sequence import GraphSegment, GraphSequence
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Counters, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving import CudaGraphManager
from cgcompile.settings import checked, sizes_given

VERSION = 1  # of the schema of Overview.to_dict()
_NOTHING = "Nothing was compiled yet: call the model, then ask again."


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph: what it was split into, and how its pieces were compiled.

    Attributes:
        index: in the order in which Dynamo made them.
        device: where its tensors are.
        pieces: in order of execution.
        symbols: the sizes that vary.
        totals: sums over all pieces.
        compiled: of the distinct pieces that the compiler got, those it compiled.
        loaded: those loaded from disk.
        shared: those that an equal piece of the backend had already.
        failed: those whose compiler raised, which run uncompiled.
        compile_seconds: all of it took.
    """

    index: int
    device: str
    pieces: tuple[PieceReport, ...]
    symbols: tuple[SymbolReport, ...]
    totals: Totals
    compiled: int
    loaded: int
    shared: int
    failed: int
    compile_seconds: float


@dataclass(frozen=True)
class StepReport:
    """One recorded step that can be replayed.

    Attributes:
        owner: what recorded it: ``graph 0`` of the split, or the name of a wrapper.
        batch: the descriptor, as text.
        mode: PIECEWISE or FULL; empty if it is no longer known.
        graphs: recordings in it.
        breaks: functions that run between them.
        nodes: of all its recordings; None where the device does not tell.
        seconds: the capture took, its execution included; None if it is no longer known.
        nbytes: by which memory grew; None likewise.
        replays: how often it was replayed.
    """

    owner: str
    batch: str
    mode: str
    graphs: int
    breaks: int
    nodes: int | None
    seconds: float | None
    nbytes: int | None
    replays: int


class Count(NamedTuple):
    """A reason, and how often it was one.

    Attributes:
        reason: the name of a :class:`cgcompile.Reason`.
        calls: how many.
        detail: the last thing known about it.
    """

    reason: str
    calls: int
    detail: str


@dataclass(frozen=True)
class CountersReport:
    """What all calls did: as :class:`cgcompile.debug.Counters`, as plain values."""

    calls: int
    captures: int
    replays: int
    failures: int
    plain: tuple[Count, ...]
    degraded: tuple[Count, ...]


class Fact(NamedTuple):
    """Something about this process: ``torch``, ``2.13.0``."""

    name: str
    value: str


class Memory(NamedTuple):
    """Bytes that graphs take, and what for."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Overview(Page):
    """What a compiled model, a wrapper or a manager did so far; a value of one moment.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        title: of the page.
        kind: the type of what was looked at.
        graphs: what was compiled and still lives.
        steps: what is recorded and can be replayed.
        timeline: the captures in the order of time, those that failed as well.
        coverage: which batches ran how, as of :func:`cgcompile.coverage`.
        counters: what all calls did.
        memory: bytes that the graphs take, by what they are for.
        settings: all of them, with where each comes from.
        environment: versions and the machine.
        notes: what else a reader should know.
    """

    template: ClassVar[str] = "overview"

    version: int
    title: str
    kind: str
    graphs: tuple[GraphReport, ...]
    steps: tuple[StepReport, ...]
    timeline: tuple[CaptureRecord, ...]
    coverage: Coverage
    counters: CountersReport
    memory: tuple[Memory, ...]
    settings: tuple[SettingReport, ...]
    environment: tuple[Fact, ...]
    notes: tuple[str, ...]


@checked
def report(
    target: Any,
    path: str | PathLike[str] | None = None,
    *,
    title: str | None = None,
    sizes: Sequence[int] | str = (),
    capture_dim: str | None = None,
) -> Overview:
    """Tell what a compiled model or a manager did so far, and write it as one HTML page.

    The page needs no network and no scripts. Nothing is run or captured; on CUDA the bytes of pools
    come from torch's allocator. Nothing synchronises.

    Args:
        target: what ``torch.compile`` or :func:`cgcompile.compile` returned; a
            :class:`cgcompile.Backend`; a wrapper; a ``CudaGraphManager`` or an
            ``EncoderCudaGraphManager``.
        path: where the page is to be written; left out: nowhere.
        title: of the page; left out: the name of the model.
        sizes: sizes of the batch dimension for which bytes are wanted as numbers, as numbers or as
            text; left out: ``cudagraph_capture_sizes``.
        capture_dim: which dimension they are sizes of, such as ``"x.size()[0]"``, where several
            vary; left out: the setting of that name.

    Returns:
        All that is on the page, as a value.

    Raises:
        ConfigError: the target captures nothing, or sizes that cannot be.
        OSError: the page cannot be written there.
    """
    recorders = recorders_of(target, "debug.report")
    wanted = sizes_given("sizes", "report", sizes)
    config = _config_of(target, recorders)
    compiled = [each for each in recorders if isinstance(each, CompiledGraph)]
    result = Overview(
        version=VERSION,
        title=title or _name_of(target),
        kind=type(target).__name__,
        graphs=tuple(
            _graph(index, each, Reporter(each.split, config, wanted, capture_dim))
            for index, each in enumerate(compiled)
        ),
        steps=tuple(_steps(recorders)),
        timeline=timeline(target),
        coverage=coverage(target),
        counters=_counters(target),
        memory=_memory(target, recorders),
        settings=settings_of(config),
        environment=tuple(Fact(*each) for each in versions().items()),
        notes=() if recorders else (_NOTHING,),
    )
    if path is not None:
        result.to_html(path)
    return result


def _config_of(target: Any, recorders: Sequence[Any]) -> CompilationConfig:
    for owner in (target, getattr(target, "backend", None), handle_of(target), *recorders):
        config = getattr(owner, "config", None)
        if isinstance(config, CompilationConfig):
            return config
    return CompilationConfig()


def _name_of(target: Any) -> str:
    for owner in (target, getattr(target, "model", None)):
        for attribute in ("_orig_mod", "runnable"):
            inner = getattr(owner, attribute, None)
            if inner is not None:
                return str(getattr(inner, "__qualname__", type(inner).__name__))
    model = getattr(target, "model", target)
    return str(getattr(model, "__qualname__", type(model).__name__))


# ---------------------------------------------------------------- its parts


def _graph(index: int, graph: CompiledGraph, reporter: Reporter) -> GraphReport:
    compilation = graph.compilation
    return GraphReport(
        index=index,
        device=str(graph.split.device),
        pieces=reporter.pieces(),
        symbols=reporter.symbols(),
        totals=reporter.totals(),
        compiled=compilation.compiled,
        loaded=compilation.loaded,
        shared=compilation.shared,
        failed=compilation.failed,
        compile_seconds=compilation.seconds,
    )


def _steps(recorders: Iterable[CompiledGraph | CUDAGraphWrapper]) -> Iterable[StepReport]:
    number = 0
    for recorder in recorders:
        if isinstance(recorder, CompiledGraph):
            owner, number = f"graph {number}", number + 1
            for recording in recorder.recordings:
                yield _step(owner, recorder, recording.sequence)
        else:
            for entry in recorder.entries:
                yield _step(recorder.name, recorder, entry.sequence)


def _step(
    owner: str,
    recorder: CompiledGraph | CUDAGraphWrapper,
    sequence: GraphSequence,
) -> StepReport:
    record = recorder.timeline.record_of(sequence)
    return StepReport(
        owner=owner,
        batch=sequence.batch,
        mode="" if record is None else record.mode.name,
        graphs=sequence.num_graphs,
        breaks=sequence.num_eager_breaks,
        nodes=_nodes(sequence),
        seconds=None if record is None else record.seconds,
        nbytes=None if record is None else record.nbytes,
        replays=sequence.stats.replays,
    )


def _nodes(sequence: GraphSequence) -> int | None:
    """Return how many operations are recorded; the driver of CUDA does not tell."""
    graphs = [each.graph for each in sequence.segments if isinstance(each, GraphSegment)]
    counts = [len(graph.ops) for graph in graphs if isinstance(graph, HostGraph)]
    return sum(counts) if len(counts) == len(graphs) else None


def _counters(target: Any) -> CountersReport:
    own = getattr(target, "counters", None)
    result = own if isinstance(own, Counters) else counters_of(target, "debug.report")

    def counts(those: Counter[Reason]) -> tuple[Count, ...]:
        named = [(each.value, n, result.details.get(each, "")) for each, n in those.items()]
        return tuple(Count(*each) for each in sorted(named))

    return CountersReport(
        calls=result.calls,
        captures=result.captures,
        replays=result.replays,
        failures=result.failures,
        plain=counts(result.plain),
        degraded=counts(result.degraded),
    )


def _memory(target: Any, recorders: Sequence[Any]) -> tuple[Memory, ...]:
    """Bytes by what they are for; each pool once."""
    if isinstance(target, CudaGraphManager):
        return tuple(Memory(*each) for each in vars(target.graph_memory()).items())
    pools = {id(each.pool): each.pool for each in recorders if each.pool is not None}
    held = sum(pool.held.held for pool in pools.values())
    staging = sum(pool.arena.nbytes for pool in pools.values())
    buffers = sum(pool.nbytes for pool in pools.values()) - held - staging
    result = {"pools": held, "staging": staging, "buffers": buffers}
    return tuple(Memory(*each) for each in result.items())
