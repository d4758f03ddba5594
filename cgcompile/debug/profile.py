"""Where the time of replayed steps and of captures goes: :func:`profile`, :func:`timeline`.

Replays know nothing of it: :mod:`cgcompile.graphs.profiling` lets it look while the context is
entered, and outside of it a replay runs the loop that it always runs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cgcompile.debug.output import Result, plain
from cgcompile.debug.subject import recorders_of, sequences_of
from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs.profiling import observing
from cgcompile.graphs.sequence import EagerSegment, GraphSequence
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.settings import checked


@dataclass(frozen=True)
class SegmentTime:
    """The time of one segment of one recorded step.

    Attributes:
        name: as profilers show it, the same in all processes.
        kind: ``graph`` or ``eager``.
        batch: what the step was recorded for, as text.
        sequence: which recorded step of the profile, counted from 0; several may have one batch.
        count: how often it ran.
        host_us: of the host, in microseconds, on average.
        share: of the host time of all steps of the profile, between 0 and 1.
        device_us: between the ends of the segment before and of this one on the stream, in
            microseconds, on average; None if it was not measured.
    """

    name: str
    kind: str
    batch: str
    sequence: int
    count: int
    host_us: float
    share: float
    device_us: float | None


class _Times:
    """What was measured of one recorded step. Holds nothing of it."""

    def __init__(self, sequence: GraphSequence) -> None:
        kinds = [isinstance(each, EagerSegment) for each in sequence.segments]
        self.kinds = ["eager" if eager else "graph" for eager in kinds]
        self.labels, self.batch = sequence.labels, sequence.batch
        self.counts, self.host = [0] * len(kinds), [0] * len(kinds)  # nanoseconds
        self.steps, self.step = 0, 0
        self.device: list[list[float]] = [[] for _ in kinds]  # milliseconds
        self.marks: list[list[torch.cuda.Event]] = []  # of each step: its begin, ends of segments


class Profile(Result):
    """What :func:`profile` measures; ``print`` it."""

    def __init__(
        self,
        target: Any = None,
        device_times: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._target, self._clock, self._events = target, clock, device_times
        self._times: list[_Times] = []
        self._known: WeakKeyDictionary[GraphSequence, _Times] = WeakKeyDictionary()
        if target is not None:
            list(sequences_of(target, "debug.profile"))  # refuses other targets

    # -------------------------------------------------------------- measuring

    @contextmanager
    def around(self, sequence: Any, index: int | None) -> Iterator[None]:
        """See :data:`cgcompile.graphs.profiling.Observer`."""
        assert isinstance(sequence, GraphSequence)
        times = self._known.get(sequence) or self._begun(sequence)
        if times is None:
            yield
            return
        if self._events and index is None:
            times.marks.append([_mark()])
        start = self._clock()
        yield  # what raises is not counted
        taken = self._clock() - start
        if index is None:
            times.steps += 1
            times.step += taken
            return
        times.counts[index] += 1
        times.host[index] += taken
        if self._events:
            times.marks[-1].append(_mark())

    def _begun(self, sequence: GraphSequence) -> _Times | None:
        if self._target is not None and sequence not in sequences_of(self._target, "debug.profile"):
            return None
        self._known[sequence] = result = _Times(sequence)
        self._times.append(result)
        return result

    def finish(self) -> None:
        """Read the events; synchronises if there are any. What is kept of a profile is numbers."""
        self._target = None
        for times in self._times:
            for marks in times.marks:
                marks[-1].synchronize()
                for index, (begin, end) in enumerate(pairwise(marks)):
                    times.device[index].append(begin.elapsed_time(end))
            times.marks.clear()

    # -------------------------------------------------------------- what was measured

    @property
    def steps(self) -> int:
        """How many steps were replayed."""
        return sum(times.steps for times in self._times)

    @property
    def step_us(self) -> float:
        """Host time of a step's segments, in microseconds, on average; 0 if none was replayed."""
        return self._nanoseconds / max(self.steps, 1) / 1e3

    @property
    def break_share(self) -> float:
        """The share of host time in eager breaks, between 0 and 1."""
        return sum(each.share for each in self.segments if each.kind == "eager")

    @property
    def segments(self) -> tuple[SegmentTime, ...]:
        """A row for each segment of each recorded step, in order."""
        return tuple(
            SegmentTime(
                name=times.labels[index],
                kind=times.kinds[index],
                batch=times.batch,
                sequence=number,
                count=times.counts[index],
                host_us=times.host[index] / max(times.counts[index], 1) / 1e3,
                share=times.host[index] / max(self._nanoseconds, 1),
                device_us=1e3 * sum(spans) / len(spans) if spans else None,
            )
            for number, times in enumerate(self._times)
            for index, spans in enumerate(times.device)
        )

    @property
    def _nanoseconds(self) -> int:
        return sum(times.step for times in self._times)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``steps``, ``step_us``, ``break_share``, ``segments``."""
        names = ("steps", "step_us", "break_share", "segments")
        return {name: plain(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        if not self.steps:
            return "no step was replayed in this thread; a first call warms up, a second captures"
        rows = [
            f"steps {self.steps}, {self.step_us:.1f} us of the host each, "
            f"{100 * self.break_share:.1f} % of it in eager breaks",
            f"{'count':>7}  {'host us':>9}  {'share':>7}  {'device us':>9}  segment",
        ]
        for segment in self.segments:
            device = "-" if segment.device_us is None else f"{segment.device_us:.1f}"
            named = segment.name if segment.kind == "graph" else f"{segment.name} [{segment.batch}]"
            share = f"{100 * segment.share:.1f} %"
            rows.append(
                f"{segment.count:>7}  {segment.host_us:>9.1f}  {share:>7}  {device:>9}  {named}"
            )
        return "\n".join(rows)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_ANYONE = object()  # None may be a model that somebody forgot to make


@checked
def profile(
    target: Any = _ANYONE, *, device_times: bool = False
) -> AbstractContextManager[Profile]:
    """Measure the segments of replayed steps, in this thread or task, while the context is entered.

    Tasks that begin inside of it count as well, until it is left.

    ::

        with cgcompile.debug.profile(model) as found:
            for batch in batches:
                model(batch)
        print(found)

    Each segment gets a pair of clock readings, which costs a few microseconds; replays outside of
    the context cost nothing more. Capturing calls, and what is around the segments of a step
    (guards, copies of inputs), are not measured.

    Args:
        target: whose replays count: a compiled model, a :class:`cgcompile.Backend`, one of its
            graphs, a wrapper, a raw capture, or a manager; left out: those of anyone.
        device_times: measure the device as well, by CUDA events that are kept until the end, which
            synchronises: for a few hundred steps.

    Returns:
        A context manager that gives a :class:`Profile`, to be read at any time.

    Raises:
        ConfigError: the target replays nothing.
        CaptureError: ``device_times``, and there is no CUDA device.
    """
    if device_times and not torch.cuda.is_available():
        raise CaptureError.no_device(found="cpu")
    if target is None:
        raise ConfigError.captures_nothing(function="debug.profile", found="NoneType")
    return _measured(Profile(None if target is _ANYONE else target, device_times))


@contextmanager
def _measured(result: Profile) -> Iterator[Profile]:
    try:
        with observing(result.around):
            yield result
    finally:
        result.finish()


def timeline(target: Any) -> tuple[CaptureRecord, ...]:
    """Return what was captured, or refused, when, how long it took and how many bytes.

    Args:
        target: a compiled model, a :class:`cgcompile.Backend`, one of its graphs, a wrapper, a
            ``CudaGraphManager`` or an ``EncoderCudaGraphManager``.

    Returns:
        A record for each capture, in the order they began; of what lives, and of each the last
        few thousand. Releasing graphs removes none. ``[each.to_dict() for each in found]`` is JSON.

    Raises:
        ConfigError: the target captures nothing.
    """
    result = [
        record
        for each in recorders_of(target, "debug.timeline")
        for record in each.timeline.records
    ]
    return tuple(sorted(result, key=lambda record: record.start))
