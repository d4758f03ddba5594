"""When what was captured, how long it took and how much memory: :class:`Timeline`.

Every compiled graph and every wrapper keeps one. What it learns goes into torch's structured trace
as well, where one is written: ``TORCH_TRACE=folder``, to be read with tlparse.
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
            device, whoever asked; the driver's own memory for graphs is not in it.
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


class Outcome:
    """What a capture that runs comes to; whoever captures fills it.

    Attributes:
        sequence: what was recorded.
        why: why nothing was.
    """

    def __init__(self) -> None:
        self.sequence: GraphSequence | None = None
        self.why: str | None = "nothing was recorded"

    def done(self, sequence: GraphSequence) -> None:
        """It is recorded."""
        self.sequence, self.why = sequence, None


class Timeline:
    """The captures of one owner, in order; the last few thousand."""

    def __init__(self) -> None:
        self._records: deque[CaptureRecord] = deque(maxlen=_MOST)
        self._of: WeakKeyDictionary[GraphSequence, CaptureRecord] = WeakKeyDictionary()
        self._refused: dict[Reason, str] = {}
        self._compile_id = compat.current_compile_id()

    @property
    def records(self) -> tuple[CaptureRecord, ...]:
        """What was captured, or refused, so far."""
        return tuple(self._records)

    def record_of(self, sequence: GraphSequence) -> CaptureRecord | None:
        """The capture that made a recorded step; None if it was none of these."""
        return self._of.get(sequence)

    @contextmanager
    def capture(
        self,
        pool: GraphPool,
        name: str,
        mode: CUDAGraphMode,
        batch: BatchDescriptor,
        before: int | None = None,
    ) -> Iterator[Outcome]:
        """Around one capture and the execution that it is; what is raised inside is noted.

        Args:
            pool: where memory comes from.
            name: of what is captured.
            mode: PIECEWISE or FULL.
            batch: what it is captured for.
            before: ``pool.reserved`` before anything was made for it; now, if left out.
        """
        outcome = Outcome()
        before = pool.reserved if before is None else before
        start, begun = time.time(), time.perf_counter()
        try:
            yield outcome
        except BaseException as error:
            outcome.sequence, outcome.why = None, f"{type(error).__name__}: {error}"
            raise
        finally:
            seconds = time.perf_counter() - begun
            text = "" if outcome.sequence is None else outcome.sequence.text()
            grown = pool.reserved - before
            found = (name, mode, str(batch), start, seconds, grown)
            record = CaptureRecord(*found, tuple(text.splitlines()), outcome.why)
            self._records.append(record)
            if outcome.sequence is not None:
                self._of[outcome.sequence] = record
            compat.trace_artifact("cgcompile_capture", record.to_dict, self._compile_id)
            if text:
                compat.trace_artifact("cgcompile_sequence", lambda: text, self._compile_id)

    def plain(self, why: Fallback) -> None:
        """A step ran without a graph; its forward context, if a caller has set one, learns why."""
        context = callers_context()
        if context is not None:
            context.ran_plain = why
        self.refused(why)

    def refused(self, why: Fallback) -> None:
        """A step runs without a graph, or with a lesser one; told once for each detail."""
        if self._refused.get(why.reason) == why.detail:
            return
        self._refused[why.reason] = why.detail
        compat.trace_artifact(
            "cgcompile_refusal",
            lambda: {"reason": why.reason.value, "detail": why.detail},
            self._compile_id,
        )
