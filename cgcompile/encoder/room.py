"""Which encoder graphs fit into so many bytes: :func:`left_out`, and what measures them.

A pool gives nothing back for one graph, so a graph that took too much could not be undone. What
graphs take is therefore measured before, on memory that is dropped as a whole: :class:`Rehearsal`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.encoder.keys import GraphKey
from cgcompile.graphs.bulk import warm_all
from cgcompile.graphs.capture import bulk_capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Reason

Sizes = tuple[str, int]
"""Path and budget; the graphs of all values of capture axes go together."""


class Rehearsal:
    """Captures that nobody replays, on memory of their own.

    Args:
        pool: what the graphs are to be captured into; its device is used, not its memory.
        settings: of the graphs.
        recorded: what they record.

    Attributes:
        wrapper: what captures.
    """

    def __init__(
        self, pool: GraphPool, settings: CompilationConfig, recorded: Callable[..., Any]
    ) -> None:
        self._pool = GraphPool(pool.device)
        self._settings = settings
        self.wrapper = CUDAGraphWrapper(
            recorded, settings, CUDAGraphMode.FULL, pool=self._pool, name="encoder, measured"
        )

    @property
    def nbytes(self) -> int:
        """Memory of all that was captured so far, without buffers of inputs."""
        return self._pool.nbytes

    def run(self, descriptor: BatchDescriptor, step: Callable[[], Any]) -> None:
        """Warm up and capture.

        What the capture itself raises is for the capture that counts to report.

        Raises:
            BaseException: what the model raised in a warm-up.
        """
        warm_all(lambda _: step(), [descriptor], tuple, self._settings.num_warmups)
        with bulk_capture():
            try:
                step()
            except Exception:
                return

    def drop(self) -> None:
        """Give all of it back to the device."""
        self._pool.release()
        self._pool.device.give_back()


def left_out(
    missing: Sequence[GraphKey],
    captured: Sequence[GraphKey],
    most: int,
    left: int,
    rehearsal: Callable[[], Rehearsal],
    measure: Callable[[GraphKey, Rehearsal], int],
) -> dict[GraphKey, str]:
    """What has no room, and why.

    Args:
        missing: what has no graph, the largest first.
        captured: what has one.
        most: bytes of all graphs and buffers of the pool.
        left: of these, what others do not have yet.
        rehearsal: a new one.
        measure: captures a graph on a rehearsal; returns the bytes that its buffers will add.
    """

    def together(sizes: Sizes, made: Rehearsal) -> int:
        return sum(measure(key, made) for key in missing if key[:2] == sizes)

    order = list(dict.fromkeys(key[:2] for key in missing))
    kept = _fitting({key[:2] for key in captured}, order, left, rehearsal, together)
    why = (
        f"{Reason.NOT_CAPTURED.value}: no room in max_graph_bytes={most}, of which "
        f"{max(left, 0)} were left"
    )
    return {key: why for key in missing if key[:2] not in kept}


def _fitting(
    captured: Collection[Sizes],
    missing: list[Sizes],
    left: int,
    rehearsal: Callable[[], Rehearsal],
    measure: Callable[[Sizes, Rehearsal], int],
) -> set[Sizes]:
    """What of ``missing`` fits into ``left`` bytes.

    The largest budget of each path comes first; a path for which it has no room gets no graph.
    Then whichever saves the most padding, if all numbers of tokens are equally frequent, again and
    again. Graphs are taken to need what their buffers do, and what those up to the last of them
    took when they were rehearsed in order, those that are left out included: smaller graphs lie
    in the memory of larger ones, and without a larger one they need their own.

    Args:
        captured: what has graphs.
        missing: what has not, the largest first.
        left: bytes.
        rehearsal: a new one.
        measure: captures sizes on a rehearsal; returns the bytes that buffers will add.
    """
    tops = {path: max(b for p, b in [*captured, *missing] if p == path) for path, _ in missing}
    refused: set[str] = set()
    while True:
        here = [each for each in missing if each[0] not in refused]
        order = sorted(here, key=lambda each: each[1] != tops[each[0]])
        first = [each for each in order if each[1] == tops[each[0]]]
        took = _rehearsed(order, left, rehearsal, measure)
        for place, each in enumerate(first):
            if _bound(first[: place + 1], order, took) > left:
                refused.add(each[0])
                break
        else:
            return set(_chosen(first, order, took, left, captured))


Took = dict[Sizes, tuple[int, int]]
"""Bytes of buffers, and of the rehearsal's memory once it and all before it are captured."""


def _rehearsed(
    order: Sequence[Sizes],
    left: int,
    rehearsal: Callable[[], Rehearsal],
    measure: Callable[[Sizes, Rehearsal], int],
) -> Took:
    """What was measured, up to the first that is too much, so that little more than ``left`` is
    ever in use."""
    found: Took = {}
    if not order:
        return found
    made = rehearsal()
    try:
        for each in order:
            buffers = measure(each, made)
            found[each] = (buffers, made.nbytes)
            if made.nbytes > left:
                break
    finally:
        made.drop()
    return found


def _bound(sizes: Collection[Sizes], order: Sequence[Sizes], took: Took) -> float:
    """Bytes that graphs take at the most; infinite with one that was not measured."""
    if not all(each in took for each in sizes):
        return float("inf")
    last = max((order.index(each) for each in sizes), default=-1)
    return sum(took[each][0] for each in sizes) + (took[order[last]][1] if last >= 0 else 0)


def _chosen(
    first: Sequence[Sizes],
    order: Sequence[Sizes],
    took: Took,
    left: int,
    captured: Collection[Sizes],
) -> list[Sizes]:
    """The first ones, and then what saves most, as long as something fits."""
    found = list(first)
    while True:
        fits = [
            each
            for each in order
            if each not in found and _bound([*found, each], order, took) <= left
        ]
        if not fits:
            return found
        found.append(max(fits, key=lambda each: _saved(each, [*found, *captured])))


def _saved(sizes: Sizes, among: Collection[Sizes]) -> int:
    """Padding that a budget saves: of each number of tokens from the next lower one up to it."""
    path, budget = sizes
    others = [b for p, b in among if p == path and b != budget]
    lower = max((b for b in others if b < budget), default=0)
    upper = min((b for b in others if b > budget), default=budget)
    return (budget - lower) * (upper - budget)
