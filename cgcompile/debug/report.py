"""One HTML page about a model that runs: :func:`report`. Read-only.

The rule: everything on the page is in :class:`Overview`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

from cgcompile.backend import handle_of
from cgcompile.config import CompilationConfig
from cgcompile.debug.coverage import Coverage, coverage
from cgcompile.debug.environment import versions
from cgcompile.debug.explain import (
    PieceReport,
    SettingReport,
    SplitReporter,
    SymbolReport,
    Totals,
    settings_of,
)
from cgcompile.debug.output import Page
from cgcompile.debug.profile import timeline
from cgcompile.debug.subject import name_of, original_of, recorders_of
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import Compilation
from cgcompile.reasons import Counters
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.settings import checked, sizes_given

VERSION = 2  # of the schema of Overview.to_dict()
_NOTHING = "Nothing was compiled yet: call the model, then ask again."


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


@dataclass(frozen=True)
class Overview(Page):
    """What a compiled model, a wrapper or a manager did so far; a value of one moment.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        title: of the page.
        kind: the type of the target.
        graphs: the compiled graphs that exist.
        steps: the recorded steps that can be replayed.
        timeline: the captures in the order of time, those that failed as well.
        coverage: which batches ran how, as of :func:`cgcompile.coverage`.
        counters: the counters of all calls, as in ``coverage``.
        memory: bytes that the graphs take, by purpose.
        settings: all of them, with the origin of each.
        environment: versions and the machine, by name.
        notes: further remarks, in sentences.
    """

    template: ClassVar[str] = "overview"

    version: int
    title: str
    kind: str
    graphs: tuple[GraphReport, ...]
    steps: tuple[StepReport, ...]
    timeline: tuple[CaptureRecord, ...]
    coverage: Coverage
    counters: Counters
    memory: Mapping[str, int]
    settings: tuple[SettingReport, ...]
    environment: Mapping[str, str]
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
    """Return what a compiled model or a manager did so far, and write it as one HTML page.

    The page needs no network and no scripts. Nothing is run or captured; on CUDA the bytes of pools
    come from torch's allocator. Nothing synchronises.

    Args:
        target: what ``torch.compile`` or :func:`cgcompile.compile` returned; a
            :class:`cgcompile.Backend`; a wrapper; a ``CudaGraphManager`` or an
            ``EncoderCudaGraphManager``.
        path: of the page; None writes none.
        title: of the page; None: the name of the model.
        sizes: sizes of the batch dimension at which bytes are evaluated, as numbers or as text;
            empty: ``cudagraph_capture_sizes``.
        capture_dim: the dimension that they are sizes of, such as ``"x.size()[0]"``, where several
            vary; None: the setting of that name.

    Returns:
        The content of the page.

    Raises:
        ConfigError: the target captures nothing, or ``sizes`` are invalid.
        OSError: the page cannot be written there.
    """
    recorders = recorders_of(target, "debug.report")
    chosen = sizes_given("sizes", "report", sizes)
    config = _config_of(target, recorders)
    graphs: list[GraphReport] = []
    for graph in [recorder for recorder in recorders if isinstance(recorder, CompiledGraph)]:
        parts = SplitReporter(graph.split, config, chosen, capture_dim).parts()
        device, compilation = str(graph.split.device), graph.compilation
        graphs.append(GraphReport(len(graphs), device, compilation=compilation, **parts))
    served = coverage(target)
    model = target.model if isinstance(target, CudaGraphManager) else target
    result = Overview(
        version=VERSION,
        title=title or name_of(original_of(model)),
        kind=type(target).__name__,
        graphs=tuple(graphs),
        steps=tuple(_steps(recorders)),
        timeline=timeline(target),
        coverage=served,
        counters=served.counters,
        memory=_memory(target, recorders),
        settings=settings_of(config),
        environment=versions(),
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
                    replays=sequence.stats.replays,
                )


def _memory(target: Any, recorders: Sequence[Any]) -> dict[str, int]:
    """Return bytes by purpose, each pool once."""
    if isinstance(target, CudaGraphManager):
        return dict(vars(target.graph_memory()))
    pools = {id(each.pool): each.pool for each in recorders if each.pool is not None}.values()
    held = sum(pool.held.held for pool in pools)
    staging = sum(pool.arena.nbytes for pool in pools)
    buffers = sum(pool.nbytes for pool in pools) - held - staging
    return {"pools": held, "staging": staging, "buffers": buffers}
