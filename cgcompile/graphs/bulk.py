"""Capture many batches at once: :func:`capture_all`.

Each batch runs plain first, so that nothing compiles inside of a capture; then all are captured,
the largest first, so that the smaller ones fit into its memory; garbage is collected once.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cgcompile.errors import DispatchError
from cgcompile.graphs.capture import bulk_capture, postponed_capture
from cgcompile.reasons import EXPECTED, Counters
from cgcompile.settings import checked_but, is_finite, require, require_callable

log = logging.getLogger(__name__)

B_ = TypeVar("B_")

_PASSES = 8  # plain, before recompiling for ever is taken to be the model's way


class HasCounters(Protocol):
    """A backend, or a wrapper."""

    @property
    def counters(self) -> Counters: ...


@dataclass(frozen=True)
class BulkCapture:
    """How a bulk capture went.

    Attributes:
        captured: the batches all of whose steps have graphs now, in the order of capture.
        missing: those that have none, with the reason as text.
        passes: how often all batches ran plain before.
        warm_seconds: of host time for that, and for collecting garbage once.
        capture_seconds: of host time for the captures, each of which is one execution as well.
    """

    captured: tuple[Any, ...]
    missing: tuple[tuple[Any, str], ...]
    passes: int
    warm_seconds: float
    capture_seconds: float

    def __str__(self) -> str:
        count, seconds = len(self.captured), self.capture_seconds
        rows = [f"{count} batches captured in {seconds:.2f} s, after {self.warm_seconds:.2f} s"]
        return "\n".join(rows + [f"  {batch}: {why}" for batch, why in self.missing])


@checked_but("batches")
def capture_all(
    step: Callable[[B_], Any],
    batches: Iterable[B_],
    target: HasCounters,
    *,
    size: Callable[[B_], int] | None = None,
    settled: Callable[[], Any] = tuple,
    warmups: int = 1,
    strict: bool = False,
) -> BulkCapture:
    """Warm and capture all batches.

    Args:
        step: runs one step of a batch, on inputs prepared afresh, and calls the model once. It is
            called for each batch several times.
        batches: numbers of tokens, batch descriptors, or whatever ``step`` takes.
        target: what counts the captures.
        size: what is larger; left out: the number itself, or its ``num_tokens``.
        settled: something that stays equal once nothing compiles any more.
        warmups: how often each batch runs plain at least.
        strict: raise where a batch has no graph in the end.

    Raises:
        ConfigError: an argument is of another kind than above; nothing ran.
        DispatchError: ``strict``, and a batch has no graph.
        BaseException: what ``step`` raised.
    """
    start = time.perf_counter()
    _check(step, batches, target, size)
    ordered = sorted(batches, key=lambda batch: _size_of(batch, size), reverse=True)
    passes = warm_all(step, ordered, settled, warmups)
    captured: list[Any] = []
    missing: list[tuple[Any, str]] = []
    with bulk_capture():
        warm = time.perf_counter()
        for batch in ordered:
            before = target.counters + Counters()  # a wrapper goes on counting in its own
            step(batch)
            after = target.counters
            reasons = after.plain - before.plain
            done = after.captures + after.replays > before.captures + before.replays
            if done and EXPECTED.issuperset(reasons):
                captured.append(batch)
                continue
            why = "; ".join(after.why_plain(before))
            missing.append((batch, why or "the model was not called"))
            if strict:
                raise DispatchError.strict(
                    what=f"batch {batch}", reason="bulk capture", detail=missing[-1][1]
                )
    end = time.perf_counter()
    found = BulkCapture(tuple(captured), tuple(missing), passes, warm - start, end - warm)
    log.info("%s", found)
    return found


def warm_all(
    step: Callable[[B_], Any], batches: list[B_], settled: Callable[[], Any], warmups: int
) -> int:
    """Run all batches plain until a whole pass compiles nothing; how many passes that took.

    Raises:
        BaseException: what ``step`` raised.
    """
    with postponed_capture():
        for done in range(1, _PASSES + 1):
            before = settled()
            for batch in batches:
                step(batch)
            if done >= warmups and settled() == before:
                return done
    log.warning("after %d passes something still compiles", _PASSES)
    return _PASSES


def _check(step: Any, batches: Any, target: Any, size: Any) -> None:
    where = "capture_all"
    require_callable("step", where, step)
    several = isinstance(batches, Iterable) and not hasattr(batches, "data_ptr")
    require(several, "batches", where, batches, "an iterable of batches")
    counts = isinstance(getattr(target, "counters", None), Counters)
    expected = "a Backend, a compiled model or a wrapper, which counts what it captures"
    require(counts, "target", where, target, expected)
    if size is not None:
        require_callable("size", where, size)


def _size_of(batch: Any, size: Callable[[Any], int] | None) -> Any:
    found = getattr(batch, "num_tokens", batch) if size is None else size(batch)
    expected = "a number for each batch; give size= for batches that are none"
    require(is_finite(found), "size", "capture_all", found, expected)
    return found
