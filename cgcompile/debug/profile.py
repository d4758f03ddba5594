"""Measure where the time of replayed steps and of captures goes: :func:`profile`, :func:`timeline`.

A profile is an observer of :mod:`cgcompile.graphs.sequence`: outside of its context a replay runs
its usual loop.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from cgcompile.counts import text_table
from cgcompile.debug.output import Result, duration, human, plain, table_lines, written
from cgcompile.debug.subject import recorders_of, sequences_of
from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs.sequence import EagerSegment, GraphSequence, observing
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.settings import checked


@dataclass(frozen=True)
class SegmentTime:
    """The time of one segment of one recorded step."""

    name: str  # as profilers show it, the same in all processes
    kind: str  # ``graph`` or ``eager``
    batch: str
    sequence: int  # index of the recorded step in the profile; several may have one batch
    count: int
    host_us: float  # average
    share: float  # of the host time of all segments of the profile
    device_us: float | None  # average between events on the stream; None if not measured


class _Times:
    """The times of one recorded step. Holds no reference to the step."""

    def __init__(self, sequence: GraphSequence) -> None:
        self.batch, self.labels = sequence.batch, sequence.labels
        self.eager = [isinstance(segment, EagerSegment) for segment in sequence.segments]
        self.host: list[list[int]] = [[0, 0] for _ in self.eager]  # count, nanoseconds
        self.device: list[list[float]] = [[] for _ in self.eager]  # milliseconds
        self.marks: list[list[torch.cuda.Event]] = []  # of each step: its begin, ends of segments


class Profile(Result):
    """What :func:`profile` measures; ``print`` it, or read it at any time.

    Attributes:
        steps: the number of replayed steps.
        step_us: host time of a step's segments, in microseconds, on average; 0 without steps.
        break_share: the share of host time in eager breaks, between 0 and 1.
        segments: a row for each segment of each recorded step, in order.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode(), cgcompile.debug.profile(model) as found:
        ...     for _ in range(5):
        ...         y = model(x)
        >>> found.steps, found.break_share
        (3, 0)
    """

    def __init__(
        self,
        target: Any = None,
        device_times: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._target, self._clock, self._events = target, clock, device_times
        self._times: list[_Times] = []
        self._known: WeakKeyDictionary[GraphSequence, _Times] = WeakKeyDictionary()
        self.steps = 0
        if target is not None:
            list(sequences_of(target, "debug.profile"))  # refuses other targets

    @contextmanager
    def around(self, sequence: Any, index: int | None) -> Iterator[None]:
        """Measure one segment; see :data:`cgcompile.graphs.sequence.Observer`."""
        assert isinstance(sequence, GraphSequence)
        times = self._known.get(sequence) or self._times_of(sequence)
        if times is None:
            yield
        elif index is None:
            if self._events:
                times.marks.append([_mark()])
            yield  # what raises is not counted
            self.steps += 1
        else:
            start = self._clock()
            yield
            times.host[index][1] += self._clock() - start
            times.host[index][0] += 1
            if self._events:
                times.marks[-1].append(_mark())

    def _times_of(self, sequence: GraphSequence) -> _Times | None:
        if self._target is not None and sequence not in sequences_of(self._target, "debug.profile"):
            return None
        self._known[sequence] = result = _Times(sequence)
        self._times.append(result)
        return result

    def finish(self) -> None:
        """Replace events, if there are any, by their times; synchronises then."""
        self._target = None
        for times in self._times:
            for marks in times.marks:
                marks[-1].synchronize()
                for index, (begin, end) in enumerate(pairwise(marks)):
                    times.device[index].append(begin.elapsed_time(end))
            times.marks.clear()

    @property
    def step_us(self) -> float:
        """Average host time of a step's segments, in microseconds."""
        return self._nanoseconds / max(self.steps, 1) / 1e3

    @property
    def break_share(self) -> float:
        """The share of host time in eager breaks."""
        return sum(segment.share for segment in self.segments if segment.kind == "eager")

    @property
    def segments(self) -> tuple[SegmentTime, ...]:
        """A row for each segment of each recorded step, in order."""
        total = max(self._nanoseconds, 1)
        return tuple(
            SegmentTime(
                name=times.labels[index],
                kind="eager" if times.eager[index] else "graph",
                batch=times.batch,
                sequence=number,
                count=count,
                host_us=nanoseconds / max(count, 1) / 1e3,
                share=nanoseconds / total,
                device_us=1e3 * sum(device) / len(device) if device else None,
            )
            for number, times in enumerate(self._times)
            for index, ((count, nanoseconds), device) in enumerate(
                zip(times.host, times.device, strict=True)
            )
        )

    @property
    def _nanoseconds(self) -> int:
        return sum(nanoseconds for times in self._times for _, nanoseconds in times.host)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: ``steps``, ``step_us``, ``break_share``, ``segments``."""
        names = ("steps", "step_us", "break_share", "segments")
        return {name: plain(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        if not self.steps:
            return "no step was replayed in this thread; a first call warms up, a second captures"
        rows = [("count", "host us", "share", "device us", "segment")]
        for segment in self.segments:
            host, share = f"{segment.host_us:.1f}", f"{segment.share:.1%}"
            device = "-" if segment.device_us is None else f"{segment.device_us:.1f}"
            batch = "" if segment.kind == "graph" else f" [{segment.batch}]"
            rows.append((str(segment.count), host, share, device, segment.name + batch))
        total = f"steps {self.steps}, {self.step_us:.1f} us of the host each"
        breaks = f"{self.break_share:.1%} of it in eager breaks"
        return "\n".join([f"{total}, {breaks}", *text_table(rows)])


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


_ANY = object()  # None may be a model that the caller failed to create


@checked
def profile(target: Any = _ANY, *, device_times: bool = False) -> AbstractContextManager[Profile]:
    """Measure the segments of replayed steps, in this thread or task, while the context is entered.

    Tasks that begin inside of it count as well, until it is left.

    ::

        with cgcompile.debug.profile(model) as found:
            for batch in batches:
                model(batch)
        print(found)

    Each segment gets a pair of clock readings, which costs a few microseconds; replays outside of
    the context cost nothing more. Captures, and what surrounds the segments of a step (guards,
    copies of inputs), are not measured; a replay with which a capturing call ends is.

    Args:
        target: whose replays count: a compiled model, a :class:`cgcompile.Backend`, one of its
            graphs, a wrapper, a raw capture, or a manager; left out: all replays.
        device_times: measure the device as well, by CUDA events that are kept until the end, which
            synchronises: for a few hundred steps.

    Returns:
        A context manager that gives a :class:`Profile`, to be read at any time.

    Raises:
        ConfigError: the target replays nothing.
        CaptureError: ``device_times``, and there is no CUDA device.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode(), cgcompile.debug.profile(model) as found:
        ...     for _ in range(5):
        ...         y = model(x)
        >>> found.steps  # replays alone
        3
    """
    if device_times and not torch.cuda.is_available():
        raise CaptureError.no_device(found="cpu")
    if target is None:
        raise ConfigError.captures_nothing(function="debug.profile", found="NoneType")
    return _measured(Profile(None if target is _ANY else target, device_times))


@contextmanager
def _measured(result: Profile) -> Iterator[Profile]:
    try:
        with observing(result.around):
            yield result
    finally:
        result.finish()


class Captures(Result, tuple[CaptureRecord, ...]):
    """What :func:`timeline` returns: a tuple of records; ``print`` it.

    Example:
        >>> found = cgcompile.debug.timeline(cgcompile.compile(nn.Linear(8, 8)))
        >>> found.to_json()  # nothing is captured yet
        '[]'
    """

    @checked
    def to_trace(self, path: str | PathLike[str]) -> Path:
        """Write the captures as a trace in JSON, for Perfetto or ``chrome://tracing``.

        Each capture is a slice of the track of its owner, from the begin of the first one on.

        Returns:
            The path of the trace.

        Raises:
            OSError: the trace cannot be written there.
        """
        tracks = {name: number for number, name in enumerate(dict.fromkeys(r.name for r in self))}
        named = [
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
            for name, number in tracks.items()
        ]
        slices = [
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[record.name],
                "name": f"{record.mode.name} {record.batch}",
                "cat": "capture" if record.why is None else "refused",
                "ts": (record.start - self[0].start) * 1e6,
                "dur": record.seconds * 1e6,
                "args": record.to_dict(),
            }
            for record in self
        ]
        return written(path, "to_trace", lambda: json.dumps({"traceEvents": [*named, *slices]}))

    def __str__(self) -> str:
        if not self:
            return "nothing was captured"
        rows = [("after", "time", "memory", "mode", "batch", "what")]
        for record in self:
            after = duration(record.start - self[0].start)
            cost = duration(record.seconds), human(record.nbytes)
            rows.append((after, *cost, record.mode.name, record.batch, record.name))
        whys = [[] if record.why is None else [f"refused: {record.why}"] for record in self]
        return "\n".join(table_lines(rows, whys))

    def __repr__(self) -> str:
        return f"<Captures {len(self)}>"


def timeline(target: Any) -> Captures:
    """Return what was captured, or refused, when, how long it took and how many bytes.

    Args:
        target: a compiled model, a :class:`cgcompile.Backend`, one of its graphs, a wrapper, a
            ``CudaGraphManager`` or an ``EncoderCudaGraphManager``.

    Returns:
        A record for each of the last few thousand captures of each recorder that exists, in the
        order they began. Releasing graphs removes none. It prints as a table, is JSON, and
        ``to_trace`` writes it for Perfetto.

    Raises:
        ConfigError: the target captures nothing.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     for rows in (4, 4, 6, 6):
        ...         y = model(torch.randn(rows, 8))
        >>> len(cgcompile.debug.timeline(model))
        2
    """
    recorders = recorders_of(target, "debug.timeline")
    records = [record for recorder in recorders for record in recorder.timeline.records]
    return Captures(sorted(records, key=lambda record: record.start))
