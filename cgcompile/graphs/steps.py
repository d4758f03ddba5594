"""Whether a step may have a graph, and the step table: the one state machine of a call.

A front end makes a :class:`Call` of each of its calls, and :meth:`StepTable.run` replays it,
captures it, or runs it plain:

1. Preconditions: ``cgcompile.eager_region()``, the forward context and its mode, another capture.
2. Under the lock, find the steps captured for the key of the call. The first one whose contract
   holds is replayed; a call with other inputs follows ``on_input_change``.
3. Without one, conditions of a capture: refused before, closed, warming, another thread's capture,
   limits, threads. The call is captured, or runs plain with a reason.
4. Count. A plain run that a user can avoid is an error where ``strict`` is set.

The rule: a front end defines the key of a step, the comparison and what runs. The order of
decisions, ``strict``, counts, failures, stale results and the thread of views are in this file. The
lock is never held while a call waits for the capture of another thread.

The checks that make a call run without a graph are here for all front ends: functions
``check_...`` raise :class:`~cgcompile.reasons.RunPlain`, with the texts for users.
:class:`allow_capture` closes capture for a block of code; :func:`eager_region` is code that runs
outside of graphs.
"""

from collections.abc import Collection, Hashable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from itertools import chain
from threading import get_ident
from typing import Any, Generic, TypeVar

from torch.compiler import is_dynamo_compiling

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import (
    REGION_MARK,
    EagerRegion,
    ForwardContext,
    eager_region_is_open,
    entered,
)
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import CaptureError, DispatchError, GuardError
from cgcompile.graphs.capture import (
    capture_postponed,
    captured_elsewhere,
    ends_of_captures,
    holder_here,
    inside_capture,
    prepares_graphs,
)
from cgcompile.graphs.device import any_capture, wait_for_inputs
from cgcompile.graphs.pool import GraphPool, StepThread
from cgcompile.graphs.timeline import Timeline
from cgcompile.locks import new_lock
from cgcompile.reasons import EXPECTED, Fallback, Reason, RunPlain
from cgcompile.settings import require_kind
from cgcompile.torch_compat import torch_ops

# ---------------------------------------------------------------- may a step have a graph


_allowed: ContextVar[bool] = ContextVar("cgcompile_capture_allowed", default=True)


class allow_capture:
    """Context manager: whether unknown shapes may be captured in this thread or task; re-entrant.

    A server that has captured what it wants closes capture: ``with allow_capture(False):`` around
    its loop. Other shapes then run without a graph, counted, or raise with ``on_fallback="raise"``.

    Args:
        allowed: whether captures may begin.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode(), cgcompile.graphs.allow_capture(False):
        ...     y = model(x), model(x)
        >>> model.backend.counters.captures
        0
    """

    __slots__ = ("_allowed", "_tokens")

    def __init__(self, allowed: bool) -> None:
        require_kind("allowed", "allow_capture", allowed, bool)
        self._allowed = allowed
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_allowed.set(self._allowed))

    def __exit__(self, *error: object) -> None:
        _allowed.reset(self._tokens.pop())


def capture_allowed() -> bool:
    """Return whether a capture may begin here."""
    return _allowed.get()


IN_REGION = Fallback(Reason.EAGER_REGION, "called inside of cgcompile.eager_region()")
INSIDE_CAPTURE = Fallback(Reason.INSIDE_CAPTURE, "called inside of a capture")
GRADIENTS = Fallback(
    Reason.GRADIENTS, "an input, a weight or a result requires grad, or has a tangent"
)


def check_here(gradients: bool = False) -> None:
    """Raise RunPlain where no graph may run at this point of the program, whatever its context."""
    if eager_region_is_open():
        raise RunPlain(IN_REGION)
    if gradients:
        raise RunPlain(GRADIENTS)
    if inside_capture():
        raise RunPlain(INSIDE_CAPTURE)


def check_context(
    context: ForwardContext | None, modes: Collection[CUDAGraphMode], what: str
) -> None:
    """Raise RunPlain where no graph of ``modes`` may run in a caller's forward context."""
    if context is None:
        no_context = Fallback(Reason.NO_CONTEXT, "no forward context")
        raise RunPlain(IN_REGION if eager_region_is_open() else no_context)
    mode = context.cudagraph_runtime_mode
    if mode is CUDAGraphMode.NONE:
        lacks = "a batch_descriptor, and no cudagraph_runtime_mode"
        detail = lacks if context.lacks_mode else "runtime mode NONE"
        raise RunPlain(Fallback(Reason.MODE_NONE, f"the forward context has {detail}"))
    if mode not in modes:
        names = " and ".join(sorted({served.name for served in modes} - {"NONE"}))
        detail = f"the forward context has mode {mode.name}; graphs are for {names}"
        raise RunPlain(Fallback(Reason.OTHER_MODE, detail))
    if inside_capture():
        raise RunPlain(INSIDE_CAPTURE)
    if context.batch_descriptor is None:
        raise DispatchError.no_descriptor(what=what, mode=mode.name)


def check_open(closed: bool, descriptor: BatchDescriptor) -> None:
    """Raise RunPlain where captures have ended, or are not allowed here."""
    if closed or not capture_allowed():
        detail = f"no graph for {descriptor}, and capture is closed"
        raise RunPlain(Fallback(Reason.CAPTURE_FORBIDDEN, detail))


def check_not_busy() -> None:
    """Raise RunPlain where a capture has to wait: for a bulk capture, or for another thread."""
    if capture_postponed():
        raise RunPlain(Fallback(Reason.WARMING, "a bulk capture runs all batches plain first"))
    if captured_elsewhere():
        raise RunPlain(Fallback(Reason.CAPTURE_BUSY, "another thread is capturing"))


def eager_region() -> AbstractContextManager[Any]:
    """Context manager for model code: run what is inside eager, as one boundary.

    In traced code it marks the nodes of the graph. Elsewhere compiled models, wrappers and managers
    that are called inside run without graphs, uncompiled where they can, in this thread or task.

    Where Dynamo breaks the graph inside, it gives up the frame and the region is entered in Python.

    Raises:
        CaptureError: cgcompile captures this code itself, not a trace of it.

    Example:
        >>> def model(x):
        ...     x = x + 1
        ...     with cgcompile.eager_region():
        ...         x = x.sin()
        ...     return x * 2
        >>> split = cgcompile.explain(model, torch.randn(4))
        >>> [piece.captured for piece in split.pieces]
        [True, False, True]
    """
    if is_dynamo_compiling():
        return torch_ops.annotate(REGION_MARK)
    if holder_here() is not None and any_capture():
        raise CaptureError.region_inside()
    return EagerRegion()


# ---------------------------------------------------------------- the step table

K_ = TypeVar("K_", bound=Hashable)  # a key
S_ = TypeVar("S_")  # a captured step: an entry of a wrapper, a recording of a compiled graph

OTHER_THREAD = Fallback(
    Reason.OTHER_THREAD, "results of steps under a forward context in another thread may be in use"
)


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


class Steps(Generic[K_, S_]):
    """The captured steps of one set of weights by key, and why captures failed."""

    __slots__ = ("_attempts", "captured", "refused")

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts  # captures of a key that may fail
        # One step of a key, or with on_input_change="recapture" several, the one used last first.
        self.captured: dict[K_, list[S_]] = {}
        self.refused: dict[K_, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self.captured or self.refused)

    def __iter__(self) -> Iterator[S_]:
        # Another thread may capture meanwhile.
        return chain.from_iterable([*self.captured.values()])

    def keep(self, key: K_, step: S_) -> None:
        """Let later calls of a key replay a step."""
        self.captured.setdefault(key, []).insert(0, step)

    def drop(self, key: K_, step: S_) -> None:
        """Drop one step, if it is there."""
        kept = self.captured.get(key, [])
        if step in kept:
            kept.remove(step)

    def refuse(self, key: K_, detail: str) -> None:
        """Note why a capture failed."""
        self.refused.setdefault(key, []).append(detail)

    def check_not_refused(self, key: K_) -> None:
        """Raise RunPlain where captures of a key have failed too often."""
        refusals = self.refused.get(key, [])
        if len(refusals) >= self._attempts:
            raise RunPlain(Fallback(Reason.CAPTURE_FAILED, refusals[-1]))

    def release(self) -> None:
        """Drop all steps, and why others could not be captured."""
        self.captured.clear()
        self.refused.clear()


class Call(Generic[S_]):
    """One call of a front end: what is compared and what runs.

    Each method may raise :class:`~cgcompile.reasons.RunPlain`. Those from ``find`` to ``record``
    run under the lock.
    """

    __slots__ = ("context", "descriptor", "key", "steps")

    owns_result = False  # whether results are copies, which no later step overwrites
    of_a_loop = False  # two threads may run rounds over the same state
    context: ForwardContext | None  # of the caller; set before all methods
    key: Any  # of the steps that may serve the call; set by ``enter`` or ``find``
    descriptor: BatchDescriptor  # read where no step serves the call
    steps: Steps[Any, S_]  # for the weights of the call; set by ``enter`` or ``find``

    def enter(self) -> None:
        """Check that a graph may run in the forward context of the call."""

    def find(self) -> list[S_] | None:
        """Return the steps captured for the key of the call, the one used last first."""
        return self.steps.captured.get(self.key)

    def compare(self, step: S_) -> None:
        """Raise GuardError where the call differs from the captured one."""

    def replay(self, step: S_) -> Any:
        """Replay a step that was compared, and return the result."""

    def check_due(self) -> None:
        """Check the limits of captures, and count the warm-up of the step."""

    def check_fit(self) -> None:
        """Check that this call can be captured."""

    def expire(self) -> None:
        """Make results raise that the step is about to overwrite; where ``debug`` is set."""

    def record(self) -> tuple[S_, Any]:
        """Capture the step and execute it once; return what later calls replay, and the result."""
        raise NotImplementedError

    def explain(self, why: Fallback) -> Fallback:
        """Return the reason to count for a plain run, which may be more exact."""
        return why

    def plain(self, why: Fallback) -> Any:
        """Run the step without a graph."""

    def count(self, timeline: Timeline, why: Fallback) -> None:
        """Count a plain run."""
        timeline.plain(why)


class StepLock:
    """The lock of buffers, weights and graphs, and the thread that runs a step under it."""

    __slots__ = ("lock", "owner")

    def __init__(self) -> None:
        self.lock, self.owner = new_lock(), 0


class StepTable:
    """The state machine of the calls of one front end."""

    def __init__(
        self, name: str, config: CompilationConfig, timeline: Timeline, pool: GraphPool | None
    ) -> None:
        self.name, self.timeline = name, timeline
        self.closed = False  # whether captures have ended
        self.running = StepLock()
        self.thread = StepThread() if pool is None else pool.thread  # gets results that are views
        self.returns_views = True
        self.device = None if pool is None else pool.where  # its stream waits for inputs
        self.debug = False  # whether results raise once they are stale
        self.on_change = config.on_input_change
        self._strict, self._most = config.strict, config.max_captured_shapes

    def run(self, call: Call[S_]) -> Any:
        """Replay a call, capture it, or run it plain; count it.

        Raises:
            DispatchError: ``strict``, and it would run plain; or another thread has run steps.
            GuardError: an input differs from that of the capture.
            BaseException: what the step raised, unchanged.
        """
        try:
            try:
                entry, context, in_region = entered(), None, False
                if entry is not None:
                    context = entry[1]  # the caller's
                    if context is None and entry[4]:
                        in_region, context = True, entry[0]
                call.context = context
                if context is not None and context.inputs_ready is not None:
                    wait_for_inputs(context.inputs_ready, self.device)
                if in_region:
                    raise RunPlain(IN_REGION)
                call.enter()
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
        why = call.explain(why)
        refuse_strict(self._strict, self.name, why, self.timeline.expected)
        result = ran[0] if ran else call.plain(why)
        call.count(self.timeline, why)
        return result

    def degrade(self, why: Fallback, what: str = "") -> None:
        """Count a lesser mode than was requested; with ``strict`` raise."""
        refuse_strict(self._strict, what or self.name, why)
        self.timeline.degraded(why)

    def _with_step(self, call: Call[S_]) -> Any:
        """Replay or capture a call."""
        running = self.running
        with running.lock:
            thread = running.owner = get_ident()
            try:
                captured = call.find()
                if not captured:
                    return self._capture(call)
                step = captured[0]
                try:
                    call.compare(step)
                except GuardError as error:
                    if self.on_change not in ("eager", "recapture"):
                        raise  # here: a frame with the error as an argument would be a cycle
                    other = self._other(call, captured, error)
                    if other is None:
                        return self._capture(call)
                    step = other
                if self.thread.ident != thread:
                    self._admit(call)
                if self.debug:
                    call.expire()
                result = call.replay(step)
                self.timeline.replays += 1
                return result
            finally:
                running.owner = 0

    def _admit(self, call: Call[S_]) -> None:
        """Refuse to overwrite results of another thread that may be in use."""
        if not call.owns_result:
            claim = self.returns_views and not prepares_graphs()
            self.thread.admit(self.name, claim, call.of_a_loop)
        elif self.thread.is_other():
            raise RunPlain(OTHER_THREAD)

    def _other(self, call: Call[S_], captured: list[S_], error: GuardError) -> S_ | None:
        """Follow ``on_input_change`` where a call differs from the step that was used last.

        Returns:
            Another step, whose contract holds; None: the call is to be captured.
        """
        if self.on_change == "eager":
            raise RunPlain(Fallback(Reason.INPUT_CHANGED, str(error).splitlines()[0]))
        for index, step in enumerate(captured):
            try:
                call.compare(step)
            except GuardError:
                continue
            captured.insert(0, captured.pop(index))
            return step
        if sum(1 for _ in call.steps) >= self._most:
            detail = f"{self._most} steps are captured (max_captured_shapes); on_input_change"
            raise RunPlain(Fallback(Reason.TOO_MANY_SHAPES, detail))
        return None

    def _capture(self, call: Call[S_]) -> Any:
        """Capture a step that has no graph, unless a reason forbids it."""
        call.steps.check_not_refused(call.key)
        check_open(self.closed, call.descriptor)
        call.check_due()
        check_not_busy()
        call.check_fit()
        self._admit(call)
        if self.debug:
            call.expire()
        try:
            step, result = call.record()
        except RunPlain as refusal:
            if refusal.why.reason is Reason.CAPTURE_FAILED:
                call.steps.refuse(call.key, refusal.why.detail)
            raise
        call.steps.keep(call.key, step)
        self.timeline.captured()
        return result
