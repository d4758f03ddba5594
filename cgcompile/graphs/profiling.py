"""Names for what a replay runs, so that profilers show pieces and breaks.

A replay asks once a step whether somebody looks: torch's profiler, :func:`tracing_ranges`, or
whoever is in :data:`OBSERVERS`. Only then it takes :func:`run_observed`, the slow twin of its loop.
Names are equal in all processes and runs of a model: ``cgcompile/piece_0 [num_tokens=64]``,
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
    """Looks at replays."""

    def around(self, sequence: Observed, place: int | None) -> AbstractContextManager[Any]:
        """What is around one segment of a replay, or around all of them where ``place`` is None."""


@dataclass
class _Look:
    """One context of an observer. A task that begins inside of it keeps this when it has ended."""

    observer: Observer
    thread: int
    ended: bool = False


# Those of this thread, and of tasks that began inside of them.
OBSERVERS: ContextVar[tuple[_Look, ...]] = ContextVar("cgcompile_observers", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Inside, an observer sees the replays of this thread or task; others around it do too."""
    look = _Look(observer, get_ident())
    token = OBSERVERS.set((*OBSERVERS.get(), look))
    try:
        yield
    finally:
        look.ended = True
        OBSERVERS.reset(token)


def run_observed(sequence: Observed, steps: Sequence[Callable[[], Any]]) -> None:
    """Run the steps of a sequence while somebody looks."""
    looks, thread = OBSERVERS.get(), get_ident()
    observers = tuple([each.observer for each in looks if each.thread == thread and not each.ended])
    if compat.is_profiling():
        observers = (_RecordedFunctions(), *observers)
    with _entered(observers, sequence, None):
        for place, step in enumerate(steps):
            with _entered(observers, sequence, place):
                step()


def _entered(observers: Sequence[Observer], sequence: Observed, place: int | None) -> ExitStack:
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.around(sequence, place))
        return stack.pop_all()


def _name(sequence: Observed, place: int | None) -> str | None:
    """What a range is called; None where it would be around a single one of the same name."""
    if place is not None:
        return sequence.labels[place]
    return sequence.label if len(sequence.labels) > 1 else None


class _RecordedFunctions:
    """Ranges for torch's profiler."""

    def around(self, sequence: Observed, place: int | None) -> AbstractContextManager[Any]:
        name = _name(sequence, place)
        return nullcontext() if name is None else torch.profiler.record_function(name)


class _Ranges:
    """Ranges for another profiler."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop

    @contextmanager
    def around(self, sequence: Observed, place: int | None) -> Iterator[None]:
        name = _name(sequence, place)
        if name is None:
            yield
            return
        self._push(name)
        try:
            yield
        finally:
            self._pop()


@contextmanager
@checked
def tracing_ranges(
    push: Callable[[str], Any] = torch.cuda.nvtx.range_push,
    pop: Callable[[], Any] = torch.cuda.nvtx.range_pop,
) -> Iterator[None]:
    """Inside, replays push a range around each piece and each break; NVTX, for Nsight Systems.

    Torch's own profiler needs none of this: while it runs, the ranges are there. No library can
    ask whether Nsight listens, hence the context. It holds in this thread or task, and in tasks
    that begin inside of it, until it is left; replays outside of it cost what they always do.
    Nothing synchronises.

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
    with observing(_Ranges(push, pop)):
        yield
