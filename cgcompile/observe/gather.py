"""``cgcompile.report(model, path)``: one page about a model that runs. It looks, changes nothing.

What of the page comes from where: pieces from the split of each compiled graph, recorded steps and
their times from whoever captured, batches from the statistics of managers, settings from the
configuration, versions from the process.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from cgcompile.backend import handle_of
from cgcompile.config import CompilationConfig
from cgcompile.entry import CompiledGraph
from cgcompile.graphs.host import HostGraph
from cgcompile.graphs.sequence import GraphSegment, GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.observe.coverage import coverage
from cgcompile.observe.environment import versions
from cgcompile.observe.overview import (
    VERSION,
    Count,
    CountersReport,
    Fact,
    GraphReport,
    Memory,
    Overview,
    StepReport,
)
from cgcompile.observe.parts import settings_of
from cgcompile.observe.profile import timeline
from cgcompile.observe.report import Reporter
from cgcompile.observe.targets import counters_of, recorders_of
from cgcompile.reasons import Counters, Reason
from cgcompile.serving import CudaGraphManager
from cgcompile.settings import checked, sizes_given


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
    are asked of torch's allocator. Nothing synchronises.

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
    recorders = recorders_of(target, "report")
    wanted = sizes_given("sizes", "report", sizes)
    config = _config_of(target, recorders)
    compiled = [each for each in recorders if isinstance(each, CompiledGraph)]
    found = Overview(
        version=VERSION,
        title=title or _name_of(target),
        kind=type(target).__name__,
        graphs=tuple(
            _graph(index, each, Reporter.asked(each.split, config, wanted, capture_dim))
            for index, each in enumerate(compiled)
        ),
        steps=tuple(_steps(recorders)),
        timeline=timeline(target),
        coverage=coverage(target),
        counters=_counters(target),
        memory=_memory(target, recorders),
        settings=settings_of(config),
        environment=tuple(Fact(*each) for each in versions().items()),
        notes=tuple(_notes(target, recorders)),
    )
    if path is not None:
        found.to_html(path)
    return found


def _config_of(target: Any, recorders: Sequence[Any]) -> CompilationConfig:
    for each in (target, getattr(target, "backend", None), handle_of(target), *recorders):
        config = getattr(each, "config", None)
        if isinstance(config, CompilationConfig):
            return config
    return CompilationConfig()


def _name_of(target: Any) -> str:
    for each in (target, getattr(target, "model", None)):
        for attribute in ("_orig_mod", "runnable"):
            inner = getattr(each, attribute, None)
            if inner is not None:
                return str(getattr(inner, "__qualname__", type(inner).__name__))
    model = getattr(target, "model", target)
    return str(getattr(model, "__qualname__", type(model).__name__))


# ---------------------------------------------------------------- its parts


def _graph(index: int, graph: CompiledGraph, reporter: Reporter) -> GraphReport:
    made = graph.compilation
    return GraphReport(
        index=index,
        device=str(graph.split.device),
        pieces=reporter.pieces(),
        symbols=reporter.symbols(),
        totals=reporter.totals(),
        compiled=made.compiled,
        loaded=made.loaded,
        shared=made.shared,
        failed=made.failed,
        compile_seconds=made.seconds,
    )


def _steps(recorders: Iterable[CompiledGraph | CUDAGraphWrapper]) -> Iterable[StepReport]:
    number = 0
    for recorder in recorders:
        if isinstance(recorder, CompiledGraph):
            owner, number = f"graph {number}", number + 1
            for each in recorder.recordings:
                yield _step(owner, recorder, each.sequence, each.replays)
        else:
            for entry in recorder.entries:
                yield _step(recorder.name, recorder, entry.sequence, entry.tally.replays)


def _step(
    owner: str,
    recorder: CompiledGraph | CUDAGraphWrapper,
    sequence: GraphSequence,
    replays: int,
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
        replays=replays,
    )


def _nodes(sequence: GraphSequence) -> int | None:
    """How many operations are recorded; the driver of CUDA does not tell."""
    graphs = [each.graph for each in sequence.segments if isinstance(each, GraphSegment)]
    counts = [len(graph.ops) for graph in graphs if isinstance(graph, HostGraph)]
    return sum(counts) if len(counts) == len(graphs) else None


def _counters(target: Any) -> CountersReport:
    own = getattr(target, "counters", None)
    found = own if isinstance(own, Counters) else counters_of(target, "report")

    def counts(those: Counter[Reason]) -> tuple[Count, ...]:
        named = [(each.value, n, found.details.get(each, "")) for each, n in those.items()]
        return tuple(Count(*each) for each in sorted(named))

    return CountersReport(
        calls=found.calls,
        captures=found.captures,
        replays=found.replays,
        failures=found.failures,
        plain=counts(found.plain),
        degraded=counts(found.degraded),
    )


def _memory(target: Any, recorders: Sequence[Any]) -> tuple[Memory, ...]:
    """Bytes by what they are for; each pool once."""
    if isinstance(target, CudaGraphManager):
        return tuple(Memory(*each) for each in vars(target.graph_memory()).items())
    pools = {id(each.pool): each.pool for each in recorders if each.pool is not None}
    held = sum(pool.held.held for pool in pools.values())
    staging = sum(pool.arena.nbytes for pool in pools.values())
    buffers = sum(pool.nbytes for pool in pools.values()) - held - staging
    found = {"pools": held, "staging": staging, "buffers": buffers}
    return tuple(Memory(*each) for each in found.items())


def _notes(target: Any, recorders: Sequence[Any]) -> Iterable[str]:
    if not recorders:
        yield "Nothing was compiled yet: call the model, then ask again."
