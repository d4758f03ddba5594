"""Names for what a replay runs, so that profilers show pieces and breaks.

A replay checks once a step for observers: torch's profiler, :func:`tracing_ranges`, or others in
:data:`OBSERVERS`. Only then it takes :func:`run_observed`, the slow form of its loop. Names are
equal in all processes and runs of a model: ``cgcompile/piece_0 [num_tokens=64]``,
``cgcompile/break_1 ns::attention``, and around them ``cgcompile/step [num_tokens=64]``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import CaptureError
from cgcompile.settings import checked


class Observed(Protocol):
    """A sequence that is replayed."""

    @property
    def label(self) -> str:
        """Of all of it."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Of each segment."""


class Observer(Protocol):
    """What observes replays."""

    def around(self, sequence: Observed, place: int | None) -> AbstractContextManager[Any]:
        """Return the context of one segment of a replay; of all where ``place`` is None."""


@dataclass
class _Observing:
    """A context of an observer. A task that began inside keeps it after it has ended."""

    observer: Observer
    thread: int
    ended: bool = False


# Those of this thread, and of tasks that began inside of them.
OBSERVERS: ContextVar[tuple[_Observing, ...]] = ContextVar("cgcompile_observers", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see the replays of this thread or task, beside those around it."""
    context = _Observing(observer, get_ident())
    token = OBSERVERS.set((*OBSERVERS.get(), context))
    try:
        yield
    finally:
        context.ended = True
        OBSERVERS.reset(token)


def run_observed(sequence: Observed, steps: Sequence[Callable[[], Any]]) -> None:
    """Run the steps of a sequence inside of the contexts of its observers."""
    thread = get_ident()
    observers: list[Observer] = [
        context.observer
        for context in OBSERVERS.get()
        if context.thread == thread and not context.ended
    ]
    if compat.is_profiling():
        observers.insert(0, _Ranges(torch.profiler.record_function))
    with _entered(observers, sequence, None):
        for place, step in enumerate(steps):
            with _entered(observers, sequence, place):
                step()


def _entered(observers: Sequence[Observer], sequence: Observed, place: int | None) -> ExitStack:
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.around(sequence, place))
        return stack.pop_all()


class _Ranges:
    """Ranges of a profiler, around each segment and around all of them if there are several."""

    def __init__(self, around_named: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._around_named = around_named

    def around(self, sequence: Observed, place: int | None) -> AbstractContextManager[Any]:
        if place is None and len(sequence.labels) == 1:  # that of the segment has the same name
            return nullcontext()
        return self._around_named(sequence.label if place is None else sequence.labels[place])


@contextmanager
@checked
def tracing_ranges(
    push: Callable[[str], Any] = torch.cuda.nvtx.range_push,
    pop: Callable[[], Any] = torch.cuda.nvtx.range_pop,
) -> Iterator[None]:
    """Inside, replays push a range around each piece and each break; NVTX, for Nsight Systems.

    Torch's own profiler shows the ranges without it. Whether Nsight records cannot be queried,
    hence the context. It holds in this thread or task, and in tasks that begin inside of it, until
    it is left; replays outside of it cost nothing more. Nothing synchronises.

    Args:
        push: opens a range of a name; for other profilers, such as
            ``torch.profiler.itt.range_push``.
        pop: closes the last one.

    Raises:
        CaptureError: this torch was built without NVTX.
        ConfigError: something that cannot be called.
    """
    try:
        push("cgcompile/ranges")
        pop()
    except RuntimeError as error:
        raise CaptureError.no_ranges(found=str(error).strip().splitlines()[0]) from error

    @contextmanager
    def pushed(name: str) -> Iterator[None]:
        push(name)
        try:
            yield
        finally:
            pop()

    with observing(_Ranges(pushed)):
        yield
