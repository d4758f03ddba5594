"""What graphs take of the device: :func:`plan_memory`, and which fit: :func:`choose_graphs`.

An engine sizes its caches before it captures, so it needs the memory of graphs first; they are
captured for trial (:func:`cgcompile.graphs.pool.measure_captures`). The rule: a chosen set of
graphs has been measured within the budget.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from cgcompile.backend import Backend
from cgcompile.config import CUDAGraphMode
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.arena import MIB
from cgcompile.graphs.capture import releasing
from cgcompile.graphs.capture_all import BulkCapture, by_reason, warm_all
from cgcompile.graphs.device import no_device
from cgcompile.graphs.pool import GraphMemory, GraphPool, measure_captures, memory_of, most_that_fit
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.ladders import rank_sizes
from cgcompile.registry import growth_of
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving.buffers import Outputs
from cgcompile.serving.plan import Planned, kind_of, sets_of

log = logging.getLogger(__name__)

_AT_ONCE = 8  # graphs captured between two comparisons with the budget

# Steps of the driver. Seen on an H200 with driver 580: graphs captured again took a step less or
# more, since a driver keeps some memory of destroyed graphs and hands it out in other parts.
_UNSTEADY = 2


class MemoryMeter:
    """Measures what the graphs of one manager take: existing ones, and planned ones for trial."""

    # The driver reports what is left of the device alone, so that before the first capture is kept.

    def __init__(
        self,
        pool: GraphPool | None,
        backend: Backend | None,
        outputs: Outputs,
        wrappers: Sequence[CUDAGraphWrapper],
    ) -> None:
        self.outputs, self.wrappers = outputs, wrappers  # of the manager itself
        self._pool = pool
        self._backend = backend
        self._before: int | None = None  # level of the driver before the first capture
        self._driver = 0
        self.fixed = 0  # bytes before any graph
        self.added: dict[Planned, int] = {}  # bytes of each graph that was captured for trial
        self.missing: list[tuple[Planned, str]] = []  # what could not be, with the reason
        self._recorded: dict[int, WeakSet[Any]] = {}  # what to keep, by compiled graph

    @property
    def graphs(self) -> tuple[CompiledGraph, ...]:
        """The graphs of the compiled model so far."""
        return () if self._backend is None else self._backend.graphs

    def _level(self) -> int:
        return self._pool.device.graph_bytes() if self._pool is not None else 0

    def _rise(self) -> int:
        return 0 if self._before is None else max(0, self._level() - self._before)

    def begin(self) -> None:
        """Remember the level of the driver, before the first capture."""
        if self._before is None:
            self._before = self._level()

    def end(self) -> None:
        """Measure the driver's share after captures. Synchronises."""
        if self._pool is not None and self._before is not None:
            self._pool.device.synchronize()
            self._driver = self._rise()

    def taken(self) -> int:
        """Return the bytes taken now: buffers, graphs, what the driver keeps of dropped graphs."""
        return self._read(self._rise(), ()).total

    def memory(self) -> GraphMemory:
        """Return what graphs take now; the driver's share is that of the last captures."""
        return self._read(self._driver or None, growth_of(self.graphs, self.wrappers))

    def _read(self, executables: int | None, captures: Iterable[tuple[str, int]]) -> GraphMemory:
        pools = (self._pool, *(graph.pool for graph in self.graphs))
        return memory_of(pools, self.outputs.nbytes, captures, executables)

    # -------------------------------------------------------------- graphs captured for trial

    def prepare(self, manager: Any) -> None:
        """Warm up all planned graphs, and measure what exists before any: ``fixed``."""
        assert self._pool is not None
        self._recorded = {id(graph): WeakSet(graph.recordings) for graph in self.graphs}
        self.added.clear()
        with manager.capturing():  # so that nothing is compiled or loaded later
            warm_all(
                lambda entry: manager.run_dummy(*entry, "warmup"),
                list(manager.dispatcher.plan()),
                manager.num_compilations,
                1,
                "memory plan",
            )
        self._pool.device.give_back()
        self.begin()
        self.fixed = self.taken()

    @property
    def margin(self) -> int:
        """Bytes by which the same graphs may differ when they are captured again."""
        step = 1 if self._pool is None else self._pool.device.graph_step
        return _UNSTEADY * step if step > 1 else 0

    def fits(self, manager: Any, chosen: Collection[Planned], budget: int) -> bool:
        """Return whether graphs stay within a budget on all ranks."""
        return not _any(manager, self.trial(manager, chosen, budget) + self.margin > budget)

    def trial(self, manager: Any, chosen: Collection[Planned], budget: int | None = None) -> int:
        """Capture graphs, the largest first, and drop them; return the bytes that they took."""
        wanted = set(chosen)
        self.missing.clear()
        planned = [entry for entry in manager.dispatcher.plan() if entry in wanted]
        captures = [
            partial(self._try, manager, f"Planning: {title}", mode, keys[at : at + _AT_ONCE])
            for title, mode, keys in sets_of(planned)
            for at in range(0, len(keys), _AT_ONCE)
        ]

        def exceeds(nbytes: int) -> bool:
            return budget is not None and _any(manager, nbytes > budget)

        return measure_captures(captures, self.taken, exceeds, partial(self._drop, manager))

    def _try(
        self, manager: Any, title: str, mode: CUDAGraphMode, keys: list[BatchDescriptor]
    ) -> None:
        levels: list[tuple[BatchDescriptor, int]] = []
        result: BulkCapture = manager.record(
            title, mode, keys, lambda key: levels.append((key, self.taken()))
        )
        self.missing += [((mode, key), why) for key, why in result.missing]
        manager.pool.device.synchronize()
        after = [*(level for _, level in levels[1:]), self.taken()]
        for (key, before), now in zip(levels, after, strict=True):
            self.added[mode, key] = now - before

    def _drop(self, manager: Any) -> None:
        """Drop what was captured, and give its memory back."""
        for graph in self.graphs:
            if set(graph.recordings) != set(self._recorded.get(id(graph), ())):
                graph.release()
        manager.release_own()
        with releasing():
            pass
        manager.pool.device.give_back()


def _any(manager: Any, flag: bool) -> bool:
    """Return whether the flag is set on any rank: all ranks must capture the same sizes."""
    return flag if manager.agreement is None else bool(manager.agreement.largest(flag))


@dataclass(frozen=True)
class MemoryPlan:
    """What the planned graphs of a manager take, measured; ``print`` it.

    Attributes:
        graphs: in the order of their capture: mode, descriptor, and the bytes that it adds to those
            before it. The first of a kind allocates the memory that the others use too.
        missing: which planned ones could not be captured, with the reason: all of them, and none
            in ``graphs``, on a device without graphs.
        total: bytes of all graphs.
        fixed: of that, what exists before any graph: buffers.
        seconds: of host time that planning took, warming up included.

    Example:
        >>> from cgcompile.serving import CudagraphDispatcher, InputBuffer
        >>> support = cgcompile.AttentionCGSupport.ALWAYS
        >>> dispatcher = CudagraphDispatcher("FULL", [4, 8], max_num_reqs=8, support=support)
        >>> rows = InputBuffer("input", ("tokens", 8), torch.float32)
        >>> manager = cgcompile.CudaGraphManager(nn.Linear(8, 2), dispatcher, [rows], device="cpu")
        >>> plan = manager.plan()
        >>> len(plan.graphs), plan.missing
        (2, ())
    """

    graphs: tuple[tuple[CUDAGraphMode, BatchDescriptor, int], ...]
    missing: tuple[tuple[Planned, str], ...]
    total: int
    fixed: int
    seconds: float

    def against(self, measured: GraphMemory) -> str:
        """Return one line: planned and measured."""
        return f"planned {self.total / MIB:.2f} MiB, measured {measured.line()}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, for JSON."""
        return {
            "total": self.total,
            "fixed": self.fixed,
            "seconds": self.seconds,
            "graphs": [
                {"mode": mode.name, "descriptor": str(descriptor), "bytes": nbytes}
                for mode, descriptor, nbytes in self.graphs
            ],
            "missing": [[mode.name, str(key), why] for (mode, key), why in self.missing],
        }

    def __str__(self) -> str:
        rows = [
            f"{mode.name:10} {descriptor!s:40} {nbytes / MIB:8.2f} MiB"
            for mode, descriptor, nbytes in self.graphs
        ]
        for why, entries in by_reason(self.missing).items():
            rows += [f"{mode.name:10} {key!s:40} {'-':>8}" for mode, key in entries]
            rows.append(f"  not captured: {why}")
        return "\n".join([*rows, f"total {self.total / MIB:.2f} MiB"])


def plan_memory(manager: Any) -> MemoryPlan:
    """Measure what the planned graphs of a manager take; it is as before then. Synchronises."""
    start = time.perf_counter()
    planned = manager.dispatcher.plan()
    if not planned or manager.pool is None:
        device = next((each.device for each in manager.inputs.buffers.values()), "cpu")
        why = str(no_device(device))
        missing = tuple((entry, why) for entry in planned)
        return MemoryPlan((), missing, 0, 0, time.perf_counter() - start)
    meter: MemoryMeter = manager.meter
    meter.prepare(manager)
    total = meter.trial(manager, planned)
    graphs = tuple((*entry, meter.added.get(entry, 0)) for entry in planned)
    seconds = time.perf_counter() - start
    plan = MemoryPlan(graphs, tuple(meter.missing), total, meter.fixed, seconds)
    log.info("%s", plan)
    return plan


def choose_graphs(
    manager: Any, max_graph_bytes: int, histogram: Mapping[int, int] | None = None
) -> tuple[Planned, ...]:
    """Choose planned graphs that stay within a budget of bytes and save the most padding."""
    # The largest of each kind is always among them, so that every batch keeps a graph. Where two
    # save the same, FULL comes before PIECEWISE.
    planned: tuple[Planned, ...] = manager.dispatcher.plan()
    kinds: dict[Any, dict[int, Planned]] = {}
    for mode, key in sorted(planned, key=lambda entry: entry[0] is not CUDAGraphMode.FULL):
        kinds.setdefault((mode, kind_of(key)), {})[key.num_tokens] = (mode, key)
    order = [kinds[kind][size] for kind, size in rank_sizes(kinds, histogram)]
    meter: MemoryMeter = manager.meter
    meter.prepare(manager)
    fits = partial(meter.fits, manager, budget=max_graph_bytes)
    if fits(planned):
        return planned
    needed = meter.trial(manager, order[: len(kinds)]) + meter.margin
    if needed > max_graph_bytes:
        raise ManagerError.too_few_bytes(budget=max_graph_bytes, needed=needed)
    kept = set(most_that_fit(order, len(kinds), fits))
    return tuple(entry for entry in planned if entry in kept)
