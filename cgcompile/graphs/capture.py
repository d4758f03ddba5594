"""The capture of one graph as a transaction: :func:`capture`, and the capture lock.

A capture leaves a finished graph, or nothing: after a failure the first exception is raised as it
is, stream and garbage collector are as they were, and the next capture works. On CUDA one capture a
process is safe, so :func:`capture_turn` is a lock of the process; a second thread waits for it, a
few seconds at most. :class:`SameStorages` refuses a capture that replaces the memory of a tensor it
did not create (``weight.data = ...``, ``weight.t_()``): a replay does not repeat that.
:func:`eager_region` is code that the user takes out of the graphs.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from cgcompile import torch_compat as compat
from cgcompile.boundaries import REGION_MARK
from cgcompile.context import EagerRegion
from cgcompile.errors import CaptureBusyError, CaptureError
from cgcompile.graphs.cuda import bury_graphs
from cgcompile.graphs.device import DeviceGraph, any_capture
from cgcompile.graphs.guards import modules_of
from cgcompile.graphs.pool import GraphPool
from cgcompile.locks import new_lock
from cgcompile.reasons import Fallback, Reason
from cgcompile.settings import require_kind


class SameStorages:
    """Compare memory and layout of tensors before and after a capture, and restore them.

    Tensor subclasses are not compared. About 0.5 us a tensor.

    Args:
        what: what is captured, for messages.
        tensors: those that exist before the capture and after the step.
        name_of: returns the name of one of them, for messages.
    """

    def __init__(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        self._what, self._name_of = what, name_of
        distinct = {id(tensor): tensor for tensor in tensors}.values()
        # torch cannot compare the memory of quantized and nested tensors (is_set_to)
        self._tensors = [
            tensor
            for tensor in distinct
            if compat.is_plain_tensor(tensor) and not (tensor.is_quantized or tensor.is_nested)
        ]
        self.accept()

    def accept(self) -> None:
        """Take the present memory as the one that tensors must have."""
        with compat.without_modes():
            self._before = [tensor.data for tensor in self._tensors]
        self._addresses = compat.Addresses(self._tensors, range(len(self._tensors)))

    @property
    def at_same_addresses(self) -> bool:
        """Whether all tensors are at the addresses where they were; layouts are not compared."""
        return self._addresses.hold(self._tensors)

    def check(self) -> None:
        """Restore the tensors that have other memory, or another layout, than before.

        Raises:
            CaptureError: there are some.
        """
        changed = self.restore()
        if changed:
            name = self._name_of(changed[0])
            if len(changed) > 1:
                name += f" (and {len(changed) - 1} more)"
            raise CaptureError.replaces_memory(what=self._what, name=name)

    def restore(self) -> list[torch.Tensor]:
        """Give each tensor the memory and layout that it had; return those that had others."""
        pairs = zip(self._tensors, self._before, strict=True)
        with compat.without_modes():
            changed = [(now, before) for now, before in pairs if not now.is_set_to(before)]
            for tensor, before in changed:
                tensor.data = before
        return [tensor for tensor, _ in changed]


def weights_of(runnable: object) -> list[torch.Tensor]:
    """The parameters and buffers of the modules that a runnable is or holds."""
    modules = [module for root in modules_of(runnable) for module in root.modules()]
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return [weight for table in tables for weight in table.values() if weight is not None]


def weight_name(runnable: object, weight: torch.Tensor) -> str:
    """The name of a parameter or buffer, or its type if it is an argument."""
    for root in modules_of(runnable):
        for named in (root.named_parameters(), root.named_buffers()):
            for name, tensor in named:
                if tensor is weight:
                    return repr(name)
    return f"a tensor {tuple(weight.shape)} {weight.dtype}"


_allowed: ContextVar[bool] = ContextVar("cgcompile_capture_allowed", default=True)
_postponed: ContextVar[bool] = ContextVar("cgcompile_capture_postponed", default=False)
_in_bulk: ContextVar[dict[Any, Any] | None] = ContextVar("cgcompile_capture_in_bulk", default=None)


class allow_capture:
    """Context manager: whether unknown shapes may be captured in this thread or task; re-entrant.

    A server that has captured what it wants closes capture: ``with allow_capture(False):`` around
    its loop. A shape without a graph then runs plain, counted; with ``strict=True`` it raises.

    Args:
        allowed: whether captures may begin.
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
    """Whether a capture may begin here."""
    return _allowed.get()


_RELEASE = "release"  # holds the capture lock for a moment, so captures wait for it
_PATIENCE = 5.0  # seconds; a capture takes less
_PATIENCE_OF_RELEASE = 60.0
# A program that freezes has thousands of objects; a collection of Python 3.12 leaves hundreds.
_FROZEN_BY_A_PROGRAM = 1000


class _LockHolder(NamedTuple):
    """Who holds the capture lock, and what is captured."""

    thread: int
    process: int
    what: str
    owner: object


class _CaptureLock:
    """The lock of captures: one a process. It is waited for some seconds, against deadlocks."""

    def __init__(self) -> None:
        self._lock = new_lock(watch=False)
        self._holder: _LockHolder | None = None

    def acquire(
        self, what: str, owner: object, wait: float, before: Callable[[], None] | None = None
    ) -> None:
        """Take the lock, then call ``before``; raise if it is not free in time."""
        here = self.here() is not None
        if here or not self._lock.acquire(timeout=wait):
            holder = self._holder
            running = "something" if holder is None else holder.what
            raise CaptureBusyError.busy(what=what, running=running, same_thread=here)
        try:
            if before is not None:
                before()
        except BaseException:
            self._lock.release()
            raise
        self._holder = _LockHolder(threading.get_ident(), os.getpid(), what, owner)

    def release(self) -> None:
        """Give the lock back."""
        self._holder = None
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait until no other thread captures; whether that is so now."""
        free = self._lock.acquire(timeout=seconds)
        if free:
            self._lock.release()
        return bool(free)

    def here(self) -> _LockHolder | None:
        """The holder, if it is this thread."""
        holder = self._holder
        return holder if holder is not None and holder.thread == threading.get_ident() else None

    def elsewhere(self) -> _LockHolder | None:
        """The holder, if it is another thread of this process: a fork copies the lock alone."""
        holder = self._holder
        if holder is None or holder.thread == threading.get_ident():
            return None
        return holder if holder.process == os.getpid() else None


class _Held:
    """Context manager that holds the capture lock; no generator, which a collection would end."""

    __slots__ = ("_request",)

    def __init__(
        self, what: str, owner: object, wait: float, before: Callable[[], None] | None = None
    ) -> None:
        self._request = what, owner, wait, before

    def __enter__(self) -> None:
        _lock.acquire(*self._request)

    def __exit__(self, *error: object) -> None:
        _lock.release()


_lock = _CaptureLock()


def captured_elsewhere() -> bool:
    """Whether another thread is capturing now."""
    return _lock.elsewhere() is not None


Attempt = tuple[Fallback | None, Any]  # (None, result) of a step that ran; else (reason, None)


def retry_while_busy(attempt: Callable[[], Attempt], result: Attempt) -> Attempt:
    """Repeat an attempt that came to ``result`` after other threads' captures, for some seconds.

    ``attempt`` may take locks, but must not wait for a capture inside of them: all other threads
    that need these locks would wait as long.
    """
    until = time.monotonic() + _PATIENCE
    while result[0] is not None and result[0].reason is Reason.CAPTURE_BUSY:
        left = until - time.monotonic()
        if left <= 0 or not _lock.wait(left):
            break
        result = attempt()
    return result


def inside_capture() -> bool:
    """Whether this thread captures, also between two segments, or its work is captured."""
    return _lock.here() is not None or any_capture()


def who_captures_here() -> object:
    """The owner of the capture of this thread; None if it captures nothing."""
    holder = _lock.here()
    return None if holder is None else holder.owner


def who_captures_elsewhere() -> object:
    """The owner of the capture of another thread; None if there is none."""
    holder = _lock.elsewhere()
    return None if holder is None else holder.owner


def capture_turn(
    what: str,
    holder: object,
    *,
    wait: bool = True,
    before: Callable[[], None] | None = None,
) -> AbstractContextManager[None]:
    """Hold the capture lock.

    Args:
        what: what is captured, for messages.
        holder: the owner that :func:`who_captures_here` returns meanwhile.
        wait: wait a few seconds for the capture of another thread.
        before: called on entering, when no other thread can capture any more.

    Raises:
        CaptureBusyError: on entering, a capture runs in this thread, or one in another thread does
            not end in time.
    """
    return _Held(what, holder, _PATIENCE if wait else 0, before)


class _NoCollection:
    """Turns automatic garbage collection off until the last block of any thread has ended."""

    def __init__(self) -> None:
        self._lock = new_lock(watch=False)
        self._depth = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._was_on = gc.isenabled()
                gc.disable()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._was_on:
                gc.enable()


_no_collection = _NoCollection()  # automatic collection is the process's


def without_garbage_collection() -> AbstractContextManager[None]:
    """No automatic collection in this process, until the last such block of any thread ends.

    A collection could free a graph or a module of kernels, which ends a running capture; and of the
    time of a trace, which makes millions of objects, it takes a good part.
    """
    return _no_collection


@contextmanager
def bulk_capture() -> Iterator[None]:
    """Around many captures: collect garbage once before, and not again until the end.

    Objects are frozen meanwhile, unless the program froze some itself. After it automatic
    collection is on or off as before.
    """
    gc.collect()
    freeze = gc.get_freeze_count() < _FROZEN_BY_A_PROGRAM
    if freeze:
        gc.freeze()
    token = _in_bulk.set({})
    try:
        with without_garbage_collection():
            yield
    finally:
        _in_bulk.reset(token)
        if freeze:
            gc.unfreeze()


def bulk_memory() -> dict[Any, Any]:
    """What captures of the bulk capture around the caller keep for the next ones; empty outside."""
    memory = _in_bulk.get()
    return {} if memory is None else memory


@contextmanager
def postponed_capture() -> Iterator[None]:
    """Inside, what would be captured runs plain, as a warming call."""
    token = _postponed.set(True)
    try:
        yield
    finally:
        _postponed.reset(token)


def capture_postponed() -> bool:
    """Whether a capture is due later."""
    return _postponed.get()


@contextmanager
def releasing() -> Iterator[None]:
    """Around what drops graphs: nothing is captured meanwhile, and their memory is released.

    Waits for a capture in another thread to end, so hold no lock that it may want.

    Raises:
        CaptureError: this thread is inside of a capture.
        CaptureBusyError: the capture of another thread does not end.
    """
    if inside_capture():
        raise CaptureError.release_inside()
    with _Held(_RELEASE, None, _PATIENCE_OF_RELEASE):
        try:
            yield
        finally:
            bury_graphs(give_back=True)


def capture(
    function: Callable[[], Any],
    pool: GraphPool,
    what: str,
    *,
    collect: bool = False,
    storages: SameStorages | None = None,
    compiled: bool = False,
    wait: bool = True,
) -> tuple[DeviceGraph, Any]:
    """Record what ``function`` does, without doing it; return the graph and its result.

    Args:
        function: what to record; its tensors come from the pool and hold nothing yet.
        pool: where the memory comes from.
        what: what is captured, for messages.
        collect: collect garbage first, so that dead tensors release their memory.
        storages: tensors whose memory ``function`` must not replace; restored if it does.
        compiled: whether ``function`` calls what ``torch.compile`` made.
        wait: wait a few seconds for the capture of another thread.

    Raises:
        CaptureBusyError: a capture runs in this thread, or one in another thread does not end.
        CaptureError: other code captures the current stream, or a storage was replaced.
        BaseException: what ``function`` raised, unchanged.
    """
    if pool.device.is_capturing():
        raise CaptureError.nested(what=f"capture of {what}")
    with capture_turn(what, None, wait=wait):
        if collect and _in_bulk.get() is None:
            gc.collect()
        bury_graphs()
        graph = pool.device.new_graph()
        with without_garbage_collection(), pool.device.on_stream(pool.stream):
            if pool.device.is_capturing():
                raise CaptureError.nested(what=f"capture of {what}")
            memory = pool.memory
            try:
                with compat.own_cached_casts(compiled):
                    graph.begin(memory)
                    result = function()
                    if storages is not None:
                        storages.check()
                    graph.end()
            except BaseException:
                graph.abandon()
                if storages is not None:
                    storages.restore()
                pool.retire(graph)
                raise
    return graph, result


IN_REGION = Fallback(Reason.EAGER_REGION, "called inside of cgcompile.eager_region()")


def eager_region() -> AbstractContextManager[Any]:
    """Context manager for model code: run what is inside eager, as one boundary.

    In traced code it marks the nodes of the graph. Elsewhere compiled models, wrappers and managers
    that are called inside run without graphs, uncompiled where they can, in this thread or task.

    Where Dynamo breaks the graph inside, it gives up the frame and the region is entered in Python.

    Raises:
        CaptureError: cgcompile captures this code itself, not a trace of it.
    """
    if is_dynamo_compiling():
        return compat.annotate(REGION_MARK)
    if _lock.here() is not None and any_capture():
        raise CaptureError.region_inside()
    return EagerRegion()
