"""Breaks that were written for another package: :func:`foreign_breaks`.

Functions under ``no_graph`` of Meta's ``piecewise-cuda-graphs`` ask a context variable of that
package whether somebody captures, and tell what it holds of the beginning and end of each break.
During a breakable capture here it holds a :class:`_Listener`. Without it they would run inside of a
graph segment, and never again. Nothing is imported, and nothing of that package is changed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from cgcompile import compat


class Recorder(Protocol):
    """What is told of such breaks."""

    @property
    def is_recording(self) -> bool:
        """Whether it is outside of any break."""

    def pause(self, name: str) -> AbstractContextManager[None]:
        """What runs inside is in no segment; on an exception the recording is lost."""

    def add_eager(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """While it is paused: run the function here at each replay."""


@contextmanager
def foreign_breaks(recorder: Recorder) -> Iterator[None]:
    """Within it, in this thread, functions under ``no_graph`` break what a recorder records.

    They return no CUDA tensors; their own package refuses that.
    """
    listener = _Listener(recorder)
    with ExitStack() as stack:
        stack.push(listener.leave)  # the last: what it restores was there before
        stack.enter_context(compat.listen_to_no_graph(listener))
        yield


class _Listener:
    """Has the methods that ``no_graph`` calls, by the names that it calls them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pause: ExitStack | None = None
        self._inside = 0  # breaks within a break, which are none

    def _end_segment(self) -> None:
        if self._pause is not None or not self._recorder.is_recording:
            self._inside += 1
            return
        with ExitStack() as stack:
            stack.enter_context(self._recorder.pause("a function under no_graph"))
            self._pause = stack.pop_all()

    def _insert_eager(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._inside:
            self._recorder.add_eager(fn, args, kwargs)

    def _begin_segment(self) -> None:
        if self._inside:
            self._inside -= 1
            return
        pause, self._pause = self._pause, None
        assert pause is not None
        pause.close()

    def leave(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End a break whose function raised: nobody tells of that."""
        pause, self._pause = self._pause, None
        if pause is not None:
            lost = error or RuntimeError("a function under no_graph raised")
            pause.__exit__(type(lost), lost, trace)
