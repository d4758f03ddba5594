"""When what was captured, how long it took and how much memory: :class:`Timeline`.

Every compiled graph and every wrapper keeps one. Captures and refusals go into torch's structured
trace as well, where one is written: ``TORCH_TRACE=folder``, to be read with tlparse.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from cgcompile import torch_compat as compat
from cgcompile.config import CUDAGraphMode
from cgcompile.context import BatchDescriptor, callers_context
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.reasons import Fallback, Reason

_MOST = 4096  # captures that are remembered, the last ones


@dataclass(frozen=True)
class CaptureRecord:
    """One capture. The capturing call is one execution of the step as well.

    Attributes:
        name: of what was captured: ``step`` of a compiled graph, or the name of a wrapper.
        mode: PIECEWISE or FULL.
        batch: the descriptor, as text.
        start: when it began, in seconds since the epoch.
        seconds: of host time that it took, the execution of the step included.
        nbytes: by which pool and buffers grew; on CUDA by which torch's allocator grew on the
            device, through any code; the driver's own memory for graphs is not in it.
        segments: what was recorded, in order, as lines of text; none where it was refused.
        why: why nothing is kept of it, or None.
    """

    name: str
    mode: CUDAGraphMode
    batch: str
    start: float
    seconds: float
    nbytes: int
    segments: tuple[str, ...]
    why: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; the mode by name."""
        return {**asdict(self), "mode": self.mode.name, "segments": list(self.segments)}


@dataclass
class CaptureOutcome:
    """How a capture ends: the caller of :meth:`Timeline.capture` sets one of the two."""

    sequence: GraphSequence | None = None
    why: str = "nothing was recorded"


class Timeline:
    """The captures of one owner, in order; the last few thousand."""

    def __init__(self) -> None:
        self._records: deque[CaptureRecord] = deque(maxlen=_MOST)
        self._by_sequence: WeakKeyDictionary[GraphSequence, CaptureRecord] = WeakKeyDictionary()
        self._refused: dict[Reason, str] = {}
        self._compile_id = compat.current_compile_id()

    @property
    def records(self) -> tuple[CaptureRecord, ...]:
        """The captures so far, those that were refused too."""
        return tuple(self._records)

    def record_of(self, sequence: GraphSequence) -> CaptureRecord | None:
        """Return the capture that made a sequence; None for a sequence of another owner."""
        return self._by_sequence.get(sequence)

    @contextmanager
    def capture(
        self,
        pool: GraphPool,
        name: str,
        mode: CUDAGraphMode,
        batch: BatchDescriptor,
        before: int | None = None,
    ) -> Iterator[CaptureOutcome]:
        """Record the capture inside; ``before``: ``pool.reserved`` ahead of it, if not as now."""
        outcome = CaptureOutcome()
        before = pool.reserved if before is None else before
        start, begun = time.time(), time.perf_counter()
        try:
            yield outcome
        except BaseException as error:
            outcome.sequence, outcome.why = None, f"{type(error).__name__}: {error}"
            raise
        finally:
            seconds = time.perf_counter() - begun
            sequence = outcome.sequence
            text = "" if sequence is None else sequence.text()
            grown, why = pool.reserved - before, outcome.why if sequence is None else None
            lines = tuple(text.splitlines())
            record = CaptureRecord(name, mode, str(batch), start, seconds, grown, lines, why)
            self._records.append(record)
            compat.trace_artifact("cgcompile_capture", record.to_dict, self._compile_id)
            if sequence is not None:
                self._by_sequence[sequence] = record
                compat.trace_artifact("cgcompile_sequence", lambda: text, self._compile_id)

    def plain(self, why: Fallback) -> None:
        """Note a step without a graph; its forward context, if a caller has set one, gets why."""
        context = callers_context()
        if context is not None:
            context.ran_plain = why
        self.refused(why)

    def refused(self, why: Fallback) -> None:
        """Trace why a step has no graph, or a lesser one; once for each detail."""
        if self._refused.get(why.reason) == why.detail:
            return
        self._refused[why.reason] = why.detail
        compat.trace_artifact(
            "cgcompile_refusal",
            lambda: {"reason": why.reason.value, "detail": why.detail},
            self._compile_id,
        )
