"""What graphs take of the device: planned from a few of them, and measured: :func:`plan_memory`.

An engine sizes its caches before it captures, so it has to know what graphs will take. Captured
once to see, they would take it; guessed from two of them, they took three times as much. Here some
sizes are captured and dropped again, and the rest is bounded; ``estimate.py`` has the arithmetic.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cgcompile.backend import Backend
from cgcompile.config import CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.entry import CompiledGraph
from cgcompile.graphs.bulk import BulkCapture, warm_all
from cgcompile.graphs.capture import releasing
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.usage import MIB, PoolBytes
from cgcompile.serving.capturing import sets_of
from cgcompile.serving.estimate import Estimate, Group, Interval, Sample, spread
from cgcompile.serving.outputs import OutputBuffers

log = logging.getLogger(__name__)

Planned = tuple[CUDAGraphMode, BatchDescriptor]


@dataclass(frozen=True)
class GraphMemory:
    """Memory of the device that graphs take, in bytes.

    Attributes:
        pools: what torch's allocator holds for graphs, in use or not.
        staging: buffers of inputs and of bridges.
        outputs: buffers of what FULL graphs return.
        driver: the graphs themselves, as the driver keeps them. It may hold on to some when they
            are dropped.
    """

    pools: int = 0
    staging: int = 0
    outputs: int = 0
    driver: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.pools + self.staging + self.outputs + self.driver

    def __str__(self) -> str:
        parts = [f"{name} {value / MIB:.2f}" for name, value in vars(self).items() if value]
        return f"{self.total / MIB:.2f} MiB" + (f" ({', '.join(parts)})" if parts else "")


class _Reading(NamedTuple):
    """One look at what graphs take; ``driver`` is the level of the device."""

    pools: PoolBytes
    staging: int
    outputs: int
    driver: int

    @property
    def held(self) -> int:
        return self.pools.held + self.staging + self.outputs


class MemoryMeter:
    """Measures what the graphs of one manager take.

    The driver tells no graph's share, only what is left of the device: so the level before the
    first capture is remembered, and what other programs take meanwhile is taken for ours.

    Args:
        pool: of the manager; None on a device without graphs.
        backend: of a compiled model, whose graphs have pools of their own.
        outputs: the manager's.
    """

    def __init__(
        self, pool: GraphPool | None, backend: Backend | None, outputs: OutputBuffers
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._outputs = outputs
        self._before: int | None = None  # level of the driver
        self._driver = 0

    @property
    def graphs(self) -> tuple[CompiledGraph, ...]:
        """Of the compiled model, so far."""
        return () if self._backend is None else self._backend.graphs

    @property
    def pools(self) -> list[GraphPool]:
        """All there are so far."""
        found = [self._pool, *(graph.pool for graph in self.graphs)]
        return [pool for pool in found if pool is not None]

    def begin(self) -> int:
        """Remember the level of the driver, unless that was done: captures follow.

        Returns:
            What is taken by now: buffers, and what the driver holds of graphs that were dropped.
        """
        now = self.read()
        if self._before is None:
            self._before = now.driver
        return now.held + max(0, now.driver - self._before)

    def before_capture(self, _: BatchDescriptor) -> None:
        """The same, if it was not done: cheap at each further graph."""
        if self._before is None:
            self.begin()

    def end(self) -> None:
        """Measure the driver's share: captures have ended. Synchronises."""
        if self._pool is not None and self._before is not None:
            self._pool.device.synchronize()
            self._driver = max(0, self._pool.device.graph_bytes() - self._before)

    def read(self) -> _Reading:
        """A look in between; asks the allocator and the driver, and synchronises nothing."""
        pools = self.pools
        level = self._pool.device.graph_bytes() if self._pool is not None else 0
        held = sum((pool.held for pool in pools), PoolBytes())
        staging = sum(pool.arena.nbytes for pool in pools)
        return _Reading(held, staging, self._outputs.nbytes, level)

    def memory(self) -> GraphMemory:
        """What graphs take now; the driver's share as of the end of the last captures."""
        now = self.read()
        return GraphMemory(now.pools.held, now.staging, now.outputs, self._driver)


@dataclass(frozen=True)
class MemoryPlan:
    """What the planned graphs of a manager will take; ``print`` it.

    Attributes:
        graphs: in the order of their capture: mode, descriptor, and the bytes that it adds to those
            before it. The first of a kind holds the memory that the others use too, so the
            intervals do not add up to the total, which is narrower.
        sampled: which of them were captured to see.
        missing: which of those could not be captured, with the reason.
        total: bytes of all graphs.
        fixed: of that, what is the same for any choice of graphs: output buffers.
        seconds: of host time that planning took, warming up included.
    """

    graphs: tuple[tuple[CUDAGraphMode, BatchDescriptor, Interval], ...]
    sampled: tuple[Planned, ...]
    missing: tuple[tuple[Planned, str], ...]
    total: Interval
    fixed: int
    seconds: float
    estimate: Estimate | None = field(repr=False, default=None)

    @property
    def share(self) -> float:
        """How wide the interval of the total is, as a share of its lower end."""
        return self.total.width / self.total.least if self.total.least else float(self.total.width)

    def most_of(self, chosen: Iterable[Planned]) -> int:
        """The most bytes that some of the graphs take, with the largest of each kind among them."""
        if self.estimate is None:
            return self.fixed
        places = {(mode, key): place for place, (mode, key, _) in enumerate(self.graphs)}
        return self.fixed + self.estimate.most_of(places[each] for each in chosen)

    def against(self, measured: GraphMemory) -> str:
        """One line: planned, measured, and whether the plan was right."""
        inside = "inside" if self.total.holds(measured.total) else "OUTSIDE"
        width = self.total.width / max(1, measured.total)
        return f"planned {_text(self.total)}, measured {measured}: {inside}, width {width:.1%}"

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON. Bytes; intervals as [least, most]."""
        return {
            "total": list(self.total),
            "fixed": self.fixed,
            "seconds": self.seconds,
            "graphs": [
                {
                    "mode": mode.name,
                    "descriptor": str(descriptor),
                    "bytes": list(nbytes),
                    "sampled": (mode, descriptor) in self.sampled,
                }
                for mode, descriptor, nbytes in self.graphs
            ],
            "missing": [[mode.name, str(key), why] for (mode, key), why in self.missing],
        }

    def __str__(self) -> str:
        rows = [
            f"{mode.name:10} {descriptor!s:40} {_text(nbytes):>22}"
            f"{'  sampled' if (mode, descriptor) in self.sampled else ''}"
            for mode, descriptor, nbytes in self.graphs
        ]
        rows += [
            f"{mode.name:10} {key!s:40} not captured: {why}" for (mode, key), why in self.missing
        ]
        rows += [f"total {_text(self.total)}, {len(self.sampled)} of {len(self.graphs)} sampled"]
        return "\n".join(rows)


def _text(nbytes: Interval) -> str:
    return f"{nbytes.least / MIB:.2f} to {nbytes.most / MIB:.2f} MiB"


def plan_memory(manager: Any, within: float = 0.25) -> MemoryPlan:
    """What the planned graphs of a manager will take, from captures of some, which are dropped.

    All planned sizes run plain first. Then some are captured, the largest first: the largest and
    the smallest of each kind, and as many between them as it takes for an interval that is narrow
    enough; all of them if need be. The rest is bounded by what was measured. After it the manager
    is as before. Synchronises.

    Args:
        manager: a :class:`~cgcompile.serving.manager.CudaGraphManager` without graphs.
        within: the width of the interval, as a share of its lower end. Drivers take memory in steps
            (2 MiB on CUDA) and two of them more or less at times, so that the interval of graphs
            that take a few MiB stays wider.

    Raises:
        DispatchError: ``strict``, and a sampled graph could not be captured.
        BaseException: what the model, ``prepare`` or ``metadata`` raised.
    """
    start = time.perf_counter()
    sampling = _Sampling(manager)
    if not sampling.planned or manager.pool is None:
        return MemoryPlan((), (), (), Interval(0, 0), 0, time.perf_counter() - start)
    try:
        sampling.warm()
        estimate = sampling.sample(0)
        for turn in range(1, len(sampling.planned)):
            narrow = estimate.total.width <= within * estimate.total.least
            # What a failed capture takes is no measure for others.
            if sampling.agreed(sampling.complete or (narrow and not sampling.missing)):
                break
            estimate = sampling.sample(turn)
    finally:
        sampling.drop()
    fixed = sampling.fixed
    total = Interval(*(fixed + end for end in estimate.total))
    graphs = [(*each, estimate.graph(place)) for place, each in enumerate(sampling.planned)]
    sampled = [each for place, each in enumerate(sampling.planned) if place in estimate.samples]
    seconds = time.perf_counter() - start
    found = MemoryPlan(
        tuple(graphs), tuple(sampled), tuple(sampling.missing), total, fixed, seconds, estimate
    )
    log.info("%s", found)
    return found


class _Sampling:
    """Captures some graphs of a manager, looks what each took, and drops them.

    Attributes:
        planned: all graphs, in the order of capture.
        missing: those that could not be captured.
        fixed: bytes that there are before any graph.
    """

    def __init__(self, manager: Any) -> None:
        self.planned: tuple[Planned, ...] = manager.dispatcher.plan()
        self.missing: list[tuple[Planned, str]] = []
        self.fixed = 0
        self._manager = manager
        self._meter: MemoryMeter = manager.meter
        self._recorded = {id(graph): set(graph.recordings) for graph in self._meter.graphs}
        self._places = {each: place for place, each in enumerate(self.planned)}
        self._groups: list[Group] = []
        self._samples: list[Sample] = []
        self._sampled: set[int] = set()
        self._device = manager.pool and manager.pool.device

    @property
    def complete(self) -> bool:
        """Whether all were sampled."""
        return len(self._sampled) == len(self.planned)

    def agreed(self, enough: bool) -> bool:
        """Whether all ranks have enough: they capture the same sizes, or wait for each other."""
        agreement = self._manager.agreement
        return enough if agreement is None else not agreement.largest(not enough)

    def warm(self) -> None:
        """Run all sizes plain, so that nothing is compiled or loaded later, and see who serves."""
        manager = self._manager
        serving: dict[Planned, tuple[int, ...]] = {}

        def step(each: Planned) -> None:
            before = {id(graph): graph.counters.calls for graph in self._meter.graphs}
            manager.run_dummy(*each, "warmup")
            after = self._meter.graphs
            serving[each] = tuple(id(g) for g in after if g.counters.calls > before.get(id(g), 0))

        with manager.capturing():
            warm_all(step, list(self.planned), manager.num_compilations, 1)
        kinds: dict[Any, list[int]] = {}
        for place, (mode, key) in enumerate(self.planned):
            kind = (*kind_of(mode, key), serving[mode, key])
            kinds.setdefault(kind, []).append(place)
        rows = [key.num_tokens for _, key in self.planned]
        self._groups = [
            Group(tuple(places), tuple(rows[place] for place in places))
            for places in kinds.values()
        ]
        self._device.give_back()
        self.fixed = self._meter.begin()

    def sample(self, turn: int) -> Estimate:
        """Capture the sizes of one turn that earlier ones left out."""
        wanted = {place for group in self._groups for place in spread(group, turn)}
        todo = [self.planned[place] for place in sorted(wanted - self._sampled)]
        self._sampled |= wanted
        for title, mode, descriptors in sets_of(todo):
            self._sample_set(f"Planning: {title}", mode, descriptors, turn)
        last = self._meter.read()
        small = last.pools.small
        return Estimate(
            self._groups,
            self._samples,
            self._device.graph_step,
            self._device.segment,
            small,
            mixed=last.pools.held > small,
        )

    def _sample_set(
        self, title: str, mode: CUDAGraphMode, descriptors: Sequence[BatchDescriptor], turn: int
    ) -> None:
        readings: list[_Reading] = []
        order: list[BatchDescriptor] = []

        def before(descriptor: BatchDescriptor) -> None:
            readings.append(self._meter.read())
            order.append(descriptor)

        found: BulkCapture = self._manager.record(title, mode, list(descriptors), before)
        self.missing += [((mode, key), why) for key, why in found.missing]
        self._device.synchronize()
        readings.append(self._meter.read())
        for was, now, key in zip(readings, readings[1:], order, strict=False):
            self._samples.append(
                Sample(
                    self._places[mode, key],
                    turn,
                    now.held - was.held,
                    max(0, now.pools.live - was.pools.live),
                    max(0, now.driver - was.driver),
                )
            )

    def drop(self) -> None:
        """Forget what was captured, and give its memory back."""
        changed = [
            g for g in self._meter.graphs if set(g.recordings) != self._recorded.get(id(g), set())
        ]
        for graph in changed:
            graph.release()
        self._manager.drop_graphs()
        with releasing():
            pass
        if self._device is not None:
            self._device.give_back()


def kind_of(mode: CUDAGraphMode, key: BatchDescriptor) -> tuple[Any, ...]:
    """Equal for graphs that differ in nothing but size."""
    length = key.query_len if key.uniform else None
    return (mode, length, key.max_query_len, key.has_lora, key.num_active_loras, key.extra)
