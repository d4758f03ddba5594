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
from typing import Any

import torch

from cgcompile.errors import CaptureError
from cgcompile.settings import checked
from cgcompile.torch_compat import torch_settings

Observer = Callable[[Any, int | None], AbstractContextManager[Any]]
"""Called with a sequence that is replayed and the index of a segment, or None for all of it.

Returns a context around that. A sequence has a ``label``, and ``labels``, one for each segment.
"""


@dataclass
class _Observing:
    """A block of :func:`observing`. A task that began inside keeps it after it has ended."""

    observer: Observer
    thread: int
    ended: bool = False


# Those of this thread, and of tasks that began inside of them.
OBSERVERS: ContextVar[tuple[_Observing, ...]] = ContextVar("cgcompile_observers", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see the replays of this thread or task, beside those around it."""
    block = _Observing(observer, get_ident())
    token = OBSERVERS.set((*OBSERVERS.get(), block))
    try:
        yield
    finally:
        block.ended = True
        OBSERVERS.reset(token)


def run_observed(sequence: Any, steps: Sequence[Callable[[], Any]]) -> None:
    """Run the steps of a sequence inside of the contexts of its observers."""
    thread, blocks = get_ident(), OBSERVERS.get()
    observers = [b.observer for b in blocks if b.thread == thread and not b.ended]
    if torch_settings.is_profiling():
        observers.insert(0, _named_ranges(torch.profiler.record_function))

    def observed(index: int | None) -> ExitStack:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer(sequence, index))
            return stack.pop_all()

    with observed(None):
        for index, step in enumerate(steps):
            with observed(index):
                step()


def _named_ranges(named: Callable[[str], AbstractContextManager[Any]]) -> Observer:
    """Return an observer with a range around each segment, and around all if there are several."""

    def around(sequence: Any, index: int | None) -> AbstractContextManager[Any]:
        if index is not None:
            return named(sequence.labels[index])
        # the range of a single segment has the same name
        return named(sequence.label) if len(sequence.labels) > 1 else nullcontext()

    return around


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

    Example:
        >>> names = []
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode():
        ...     y = model(x), model(x)
        ...     with cgcompile.debug.tracing_ranges(names.append, lambda: None):
        ...         y = model(x)
        >>> len(names)
        2
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

    with observing(_named_ranges(pushed)):
        yield
