"""What calls did, and what was captured, when, and with how much memory: :class:`Timeline`.

Every compiled graph and every wrapper keeps one. Captures and refusals go into torch's structured
trace as well, where one is written: ``TORCH_TRACE=folder``, to be read with tlparse.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from cgcompile.config import CUDAGraphMode
from cgcompile.context import BatchDescriptor, callers_context
from cgcompile.graphs.capture import bulk_descriptors, measured
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.locks import new_lock
from cgcompile.reasons import EXPECTED, LAST_CALL, Counters, Fallback, Reason, RunPlain, warn_of
from cgcompile.torch_compat import torch_settings

log = logging.getLogger(__name__)

_LONGEST = 1000  # most characters of the text of an error
_MOST = 4096  # most captures that are kept, the last ones


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

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     for _ in range(2):
        ...         y = model(torch.randn(4, 8))
        >>> (record,) = cgcompile.debug.timeline(model)
        >>> record.mode.name, record.why
        ('FULL', None)
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


_Call = BatchDescriptor | Mapping[str, Sequence[int]] | str
"""What tells a call from others: its descriptor, the shapes of its inputs, or a name."""


def _call_text(call: _Call) -> str:
    if isinstance(call, Mapping):
        return ", ".join(f"{name} {list(shape)}" for name, shape in call.items())
    return str(call)


def _error_text(error: BaseException) -> str:
    """Return the type and the message of an error in one line of bounded length."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # of the user's class
        message = ""
    return f"{type(error).__name__}: {message}".removesuffix(": ")[:_LONGEST]


class Timeline:
    """Counts what the calls of one owner did, and keeps its last captures, in order."""

    def __init__(self, warns: bool = True) -> None:
        # Reasons that were warned of; a handle shares them among its graphs. None: no warnings.
        self.warned: set[Reason] | None = set() if warns else None
        self.expected: Collection[Reason] = EXPECTED  # no warning of these; an owner may set it
        self.live = Counters()  # grows with each call that does not replay
        self.replays = 0  # counted under the lock of the owner's steps, like ``fast_replays``
        self.fast_replays = 0
        self.last_failure = ""  # the type and the message of the error
        self._lock = new_lock()
        self._last: dict[Reason, tuple[str, _Call]] = {}  # the detail and the call of each reason
        self._records: deque[CaptureRecord] = deque(maxlen=_MOST)
        self._by_sequence: WeakKeyDictionary[GraphSequence, CaptureRecord] = WeakKeyDictionary()
        self._compile_id = torch_settings.current_compile_id()

    # -------------------------------------------------------------- calls

    @property
    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._lock:
            replays = self.replays + self.fast_replays
            return self.live + Counters(calls=replays, replays=replays)

    def captured(self) -> None:
        """Count a call that captured."""
        with self._lock:
            self.live.calls += 1
            self.live.captures += 1

    def failed(self, error: BaseException) -> None:
        """Count a call that raised, and keep the text of the error."""
        text = _error_text(error)  # not the error, which keeps tensors of its frames alive
        with self._lock:
            self.live.calls += 1
            self.live.failures += 1
            self.last_failure = text

    def plain(self, why: Fallback, call: _Call = "") -> None:
        """Count a call without a graph, and store the fallback in the caller's forward context.

        ``call`` is its name, or shapes by name; left out: the descriptor of the forward context.
        """
        context = callers_context()
        if context is not None:
            context.ran_plain = why
            call = call or context.batch_descriptor or ""
        if self._count(self.live.plain, why, 1, call):
            log.info("a step runs without graphs: %s", why)
            lacks_mode = context is not None and context.lacks_mode
            if why.reason not in self.expected or (why.reason is Reason.MODE_NONE and lacks_mode):
                self._warn(why, call)

    def degraded(self, why: Fallback) -> None:
        """Count a call that takes a lesser mode than was requested."""
        if self._count(self.live.degraded, why, 0) and why.reason not in self.expected:
            self._warn(why, how="in a lesser mode than was requested")

    def not_zeroed(self, rows: int) -> None:
        """Count a padded step in whose results the dimension of ``rows`` is not known."""
        detail = f"which dimension has the {rows} rows of the batch is not known"
        why = Fallback(Reason.PADDING_ROWS, f"{detail}, so padding rows stay")
        if self._count(self.live.degraded, why, 0):
            self._warn(why, how="with padding rows as eager pieces leave them")

    def _count(self, counts: Counter[Reason], why: Fallback, calls: int, call: _Call = "") -> bool:
        """Count a fallback; trace it, and return True, where its detail is new."""
        with self._lock:
            self.live.calls += calls
            counts[why.reason] += 1
            detail, before = self._last.get(why.reason, ("", ""))
            new = detail != why.detail or why.reason not in self._last
            if new or before != call:
                text = _call_text(call)
                known = "" if text in why.detail else f"{LAST_CALL}{text}"
                self.live.details[why.reason] = f"{why.detail}{known}"
                self._last[why.reason] = why.detail, call
        if new:
            payload = {"reason": why.reason.value, "detail": why.detail}
            torch_settings.trace_artifact("cgcompile_refusal", lambda: payload, self._compile_id)
        return new

    def _warn(self, why: Fallback, call: _Call = "", how: str = "without a CUDA graph") -> None:
        """Warn of the first fallback of a reason that a user can avoid."""
        warned = self.warned
        if warned is None or why.reason in warned:
            return
        warned.add(why.reason)
        warn_of(f"a step ({_call_text(call)})" if call else "a step", why, how)

    # -------------------------------------------------------------- captures

    @property
    def records(self) -> tuple[CaptureRecord, ...]:
        """The captures so far, refused ones included."""
        return tuple(self._records)

    def record_of(self, sequence: GraphSequence) -> CaptureRecord | None:
        """Return the capture that made a sequence; None for a sequence of another owner."""
        return self._by_sequence.get(sequence)

    @contextmanager
    def record_capture(
        self,
        pool: GraphPool,
        name: str,
        mode: CUDAGraphMode,
        batch: BatchDescriptor,
        before: int | None = None,  # ``pool.reserved`` before the capture; left out: as it is now
    ) -> Iterator[Callable[[GraphSequence | str], None]]:
        """Record the capture inside; call the value with its sequence, or with why it has none."""
        outcomes: list[GraphSequence | str] = ["nothing was recorded"]
        before = pool.reserved if before is None else before
        start, begun = time.time(), time.perf_counter()
        try:
            with measured(pool):
                yield outcomes.append
        except RunPlain as refusal:
            outcomes.append(str(refusal.why))
            raise
        except BaseException as error:
            outcomes.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            seconds, outcome = time.perf_counter() - begun, outcomes[-1]
            why = outcome if isinstance(outcome, str) else None
            text = "" if isinstance(outcome, str) else outcome.text()
            grown, lines = pool.reserved - before, tuple(text.splitlines())
            record = CaptureRecord(name, mode, str(batch), start, seconds, grown, lines, why)
            self._records.append(record)
            torch_settings.trace_artifact("cgcompile_capture", record.to_dict, self._compile_id)
            if not isinstance(outcome, str):
                self._by_sequence[outcome] = record
                if callers_context() is not None:
                    bulk_descriptors().append(batch)
                torch_settings.trace_artifact("cgcompile_sequence", lambda: text, self._compile_id)
