"""Whether work on other streams forks from that of the call and is joined: :class:`Streams`.

A capture holds the work of a stream that waits for the capturing one, if that waits for it in the
end. Work on a stream that waits for nothing runs at once, in no graph.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cgcompile.passes.lines import Line

_JOINED = "a side stream that forks from the one of the call and is joined again: a graph holds "
_TEXTS = {  # (forked, joined)
    (True, True): f"{_JOINED}it, where no break comes in between",
    (True, False): "a side stream that is not joined: the stream of the call does not wait for "
    "this work, and a capture ends in an error",
    (False, True): "a stream that does not wait for the one of the call: it runs while a graph is "
    "recorded, and no replay runs it",
}
_TEXTS[False, False] = _TEXTS[False, True]


class Work(NamedTuple):
    """An op on another stream than that of the call.

    Attributes:
        op: its name.
        line: the user's line; None if there is none.
        text: where it runs.
        fine: whether a graph can hold it.
    """

    op: str
    line: Line | None
    text: str
    fine: bool


class Streams:
    """What the streams of one call do, and which waits for which.

    A stream that waits for an event knows of all that its stream had done, and knew of, when the
    event was recorded.

    Args:
        current: the key of the current stream, which is that of the call now; keys are those that
            ``torch.cuda.Stream.cuda_stream`` gives.

    Attributes:
        blind: whether waits may have been missed; may be set.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self._current = current
        self._first = current()
        self._knows: dict[int, dict[int, int]] = {self._first: {self._first: 0}}
        self._events: dict[int, tuple[Any, dict[int, int]]] = {}  # with the event, which lives so
        self._ops: list[tuple[int, int, str, Line | None, bool]] = []
        self.blind = False

    @property
    def aside(self) -> bool:
        """Whether the current stream is another one than that of the call."""
        return self._current() != self._first

    def works(self, op: str, line: Line | None) -> None:
        """An op runs on the current stream, which is another one."""
        stream = self._current()
        knows = self._knows.setdefault(stream, {})
        forked = self._first in knows
        knows[stream] = knows.get(stream, 0) + 1
        self._ops.append((stream, knows[stream], op, line, forked))

    def records(self, event: Any, stream: Any = None) -> None:
        """An event is recorded on a stream; the current one if left out."""
        self._events[id(event)] = event, dict(self._knows.get(self._key(stream), {}))

    def waits(self, event: Any, stream: Any = None) -> None:
        """A stream, the current one if left out, waits for an event."""
        _, told = self._events.get(id(event), (None, {}))
        knows = self._knows.setdefault(self._key(stream), {})
        knows |= {each: max(count, knows.get(each, 0)) for each, count in told.items()}

    def work(self) -> Iterator[Work]:
        """All ops on other streams; asked at the end of the call."""
        for stream, number, op, line, forked in self._ops:
            joined = self._knows[self._first].get(stream, 0) >= number
            text = _TEXTS[forked, joined]
            if self.blind and not (forked and joined):
                text = "another stream than the call; whether that is joined was not seen"
            yield Work(op, line, f"it runs on {text}", self.blind or (forked and joined))

    def _key(self, stream: Any) -> int:
        if stream is None:
            return self._current()
        key = getattr(stream, "cuda_stream", None)
        self.blind |= key is None
        return -1 if key is None else int(key)
