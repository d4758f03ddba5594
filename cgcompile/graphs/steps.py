"""The step table: the one state machine of a call.

A front end makes a :class:`Call` of each of its calls, and :meth:`StepTable.run` replays it,
captures it, or runs it plain:

1. Preconditions: ``cgcompile.eager_region()``, the forward context and its mode, another capture.
2. Under the lock, find the steps captured for the key of the call. The first one whose contract
   holds is replayed; a call with other inputs follows ``on_input_change``.
3. Without one, conditions of a capture: refused before, closed, warming, another thread's capture,
   limits, threads. The call is captured, or runs plain with a reason.
4. Count. A plain run that a user can avoid is an error where ``strict`` is set.

The rule: what a step is, how it is compared and what it runs are of the front end; the order of
decisions, ``strict``, counts, failures, stale results and the thread of views are here alone. The
lock is never held while a call waits for the capture of another thread.
"""

from collections.abc import Collection, Hashable
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar

import torch

from cgcompile.config import CompilationConfig
from cgcompile.context import ForwardContext, entered
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import DispatchError, GuardError
from cgcompile.graphs.capture import ends_of_captures, prepares_graphs
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.eligibility import IN_REGION, why_never_captured, why_not_captured_yet
from cgcompile.graphs.threads import StepThread
from cgcompile.graphs.timeline import Timeline
from cgcompile.locks import new_lock
from cgcompile.reasons import EXPECTED, Fallback, Reason

K_ = TypeVar("K_", bound=Hashable)  # a key
S_ = TypeVar("S_")  # what was captured of a step: an entry of a wrapper

_MAX_REFUSALS = 2  # captures of a key; the first may meet what the first step creates


def refuse_strict(
    strict: bool,
    what: str,
    why: Fallback,
    expected: Collection[Reason] = EXPECTED,
    cause: BaseException | None = None,
) -> None:
    """Raise where ``strict`` forbids a step without a graph, or in a lesser mode.

    Raises:
        DispatchError: ``strict``, and the reason is not ``expected``.
    """
    if strict and why.reason not in expected:
        raise DispatchError.strict(what=what, why=why) from cause


class RunPlain(Exception):
    """A call has to run without a graph.

    Attributes:
        why: the reason, which is counted.
        ran: the result, of a step that ran while it was captured; else empty.
    """

    def __init__(self, why: Fallback, *ran: Any) -> None:
        self.why, self.ran = why, ran


class Call(Protocol[S_]):
    """One call of a front end: what is compared and what runs.

    Each method may raise :class:`RunPlain`. All but ``enter`` and ``plain`` run under the lock.
    """

    key: Any  # of the steps that may serve it; set by ``enter``
    descriptor: BatchDescriptor

    def enter(self, context: ForwardContext | None) -> None:
        """Check that a graph may run in a forward context; set the key and the descriptor."""

    def compare(self, step: S_) -> None:
        """Raise GuardError where the call differs from the captured one."""

    def replay(self, step: S_) -> Any:
        """Replay a step that was compared, and return the result."""

    def check_fit(self) -> None:
        """Check that this call can be captured."""

    def record(self) -> tuple[S_, Any]:
        """Capture the step and execute it once; return what later calls replay, and the result."""

    def plain(self) -> Any:
        """Run the step without a graph."""

    def expire(self) -> None:
        """Make results raise that the step is about to overwrite; where ``debug`` is set."""


class StepTable(Generic[K_, S_]):
    """The steps that one front end captured, by key, and the state machine of its calls."""

    def __init__(
        self, name: str, config: CompilationConfig, timeline: Timeline, thread: StepThread
    ) -> None:
        self.name, self.timeline = name, timeline
        self.closed = False  # whether captures have ended
        # One step of a key, or with on_input_change="recapture" several, the one used last first.
        self.steps: dict[K_, list[S_]] = {}
        self.refused: dict[K_, list[str]] = {}  # why captures failed, by key
        self.lock = new_lock()
        self.thread = thread  # whose calls get results that are views
        self.returns_views = True
        self.device: torch.device | None = None  # whose stream waits for inputs; None: the current
        self.debug = False  # whether results raise once they are stale
        self._strict = config.strict
        self._on_change, self._most = config.on_input_change, config.max_captured_shapes

    # -------------------------------------------------------------- a call

    def run(self, call: Call[S_]) -> Any:
        """Replay a call, capture it, or run it plain; count it.

        Raises:
            DispatchError: ``strict``, and it would run plain; or another thread has run steps.
            GuardError: an input differs from that of the capture.
            BaseException: what the step raised, unchanged.
        """
        try:
            try:
                entry, context = entered(), None
                in_region = False
                if entry is not None:
                    context = entry[1]  # the caller's
                    if context is None and entry[4]:
                        in_region, context = True, entry[0]
                if context is not None and context.inputs_ready is not None:
                    wait_for_inputs(context.inputs_ready, self.device)
                if in_region:
                    raise RunPlain(IN_REGION)
                call.enter(context)
                return self._with_step(call)
            except RunPlain as refusal:
                why, ran = refusal.why, refusal.ran
            if why.reason is Reason.CAPTURE_BUSY:
                return self._after_captures(call, why)
            return self._plain(call, why, ran)
        except BaseException as error:
            self.timeline.failed(error)
            raise

    def _after_captures(self, call: Call[S_], why: Fallback) -> Any:
        """Try again after the captures of other threads, for some seconds; then run plain."""
        ran: tuple[Any, ...] = ()
        for _ in ends_of_captures():
            try:
                return self._with_step(call)
            except RunPlain as refusal:
                why, ran = refusal.why, refusal.ran
            if why.reason is not Reason.CAPTURE_BUSY:
                break
        return self._plain(call, why, ran)

    def _plain(self, call: Call[S_], why: Fallback, ran: tuple[Any, ...]) -> Any:
        """Run a call without a graph, unless it has run, and count that; with ``strict`` raise."""
        refuse_strict(self._strict, self.name, why, self.timeline.expected)
        result = ran[0] if ran else call.plain()
        self.timeline.plain(why)
        return result

    def _with_step(self, call: Call[S_]) -> Any:
        """Replay or capture a call."""
        with self.lock:
            steps = self.steps.get(call.key)
            if not steps:
                return self._capture(call)
            try:
                call.compare(steps[0])
            except GuardError as error:
                return self._changed(call, steps, error)
            return self._replay(call, steps[0])

    def _replay(self, call: Call[S_], step: S_) -> Any:
        if self.thread.ident != get_ident():
            self._admit()
        if self.debug:
            call.expire()
        result = call.replay(step)
        self.timeline.replayed()
        return result

    def _admit(self) -> None:
        """Raise where results of another thread would be overwritten."""
        self.thread.admit(self.name, claim=self.returns_views and not prepares_graphs())

    def _changed(self, call: Call[S_], steps: list[S_], error: GuardError) -> Any:
        """Follow ``on_input_change``: ``error`` refused the step that was used last."""
        if self._on_change == "eager":
            raise RunPlain(Fallback(Reason.INPUT_CHANGED, str(error).splitlines()[0]))
        if self._on_change != "recapture":
            raise error
        for index, step in enumerate(steps):
            try:
                call.compare(step)
            except GuardError:
                continue
            steps.insert(0, steps.pop(index))
            return self._replay(call, step)
        if sum(map(len, self.steps.values())) >= self._most:
            detail = f"{self._most} steps are captured (max_captured_shapes); on_input_change"
            raise RunPlain(Fallback(Reason.TOO_MANY_SHAPES, detail))
        return self._capture(call)

    def _capture(self, call: Call[S_]) -> Any:
        """Capture a step that has no graph, unless a reason forbids it."""
        why = why_never_captured(self.closed, call.descriptor) or why_not_captured_yet()
        refusals = self.refused.get(call.key, [])
        if why is None and len(refusals) >= _MAX_REFUSALS:
            why = Fallback(Reason.CAPTURE_FAILED, refusals[-1])
        if why is not None:
            raise RunPlain(why)
        call.check_fit()
        self._admit()
        if self.debug:
            call.expire()
        try:
            step, result = call.record()
        except RunPlain as refusal:
            if refusal.why.reason is Reason.CAPTURE_FAILED:
                self.refused.setdefault(call.key, []).append(refusal.why.detail)
            raise
        self.keep(call.key, step)
        self.timeline.captured()
        return result

    # -------------------------------------------------------------- what is captured

    def keep(self, key: K_, step: S_) -> None:
        """Let later calls of a key replay a step."""
        with self.lock:
            self.steps.setdefault(key, []).insert(0, step)

    def drop(self, key: K_, step: S_) -> None:
        """Drop one step, if it is there."""
        with self.lock:
            kept = self.steps.get(key, [])
            if step in kept:
                kept.remove(step)

    def clear(self) -> None:
        """Drop all steps, and why others could not be captured."""
        self.steps.clear()
        self.refused.clear()
