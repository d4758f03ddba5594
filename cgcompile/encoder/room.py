"""Which encoder graphs fit into so many bytes: :func:`left_out`, and what measures them.

A pool gives nothing back for one graph, so a graph that took too much could not be undone. What
graphs take is therefore measured before, on memory that is dropped as a whole: :class:`Rehearsal`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.encoder.keys import GraphKey
from cgcompile.graphs.bulk import warm_all
from cgcompile.graphs.capture import bulk_capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Reason
from cgcompile.serving.memory import most_that_fit, ranked

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

    The largest budget of each path comes first; a path for which it has no room gets no graph.
    Then as many budgets as fit, those first that save the most padding if all numbers of tokens are
    equally frequent.

    Args:
        missing: what has no graph, the largest first.
        captured: what has one.
        most: bytes of all graphs and buffers of the pool.
        left: of these, what others do not have yet.
        rehearsal: a new one.
        measure: captures a graph on a rehearsal; returns the bytes that its buffers will add.
    """

    have = {key[:2] for key in captured}
    ladders: dict[str, set[int]] = {}
    for path, budget, _ in (*missing, *captured):
        ladders.setdefault(path, set()).add(budget)

    def fits(some: Sequence[Sizes]) -> bool:
        buffers, trial = 0, rehearsal()
        try:
            for key in missing:
                if key[:2] in some:
                    buffers += measure(key, trial)
                    if trial.nbytes + buffers > left:
                        return False
            return True
        finally:
            trial.drop()

    order = [sizes for sizes in ranked(ladders) if sizes not in have]
    kept: Sequence[Sizes] = order
    if not fits(order):
        tops = [sizes for sizes in order if sizes[1] == max(ladders[sizes[0]])]
        first: list[Sizes] = []
        for sizes in tops:
            if fits([*first, sizes]):
                first.append(sizes)
        refused = {path for path, _ in tops} - {path for path, _ in first}
        rest = [sizes for sizes in order if sizes not in tops and sizes[0] not in refused]
        kept = most_that_fit([*first, *rest], len(first), fits)
    why = (
        f"{Reason.NOT_CAPTURED.value}: no room in max_graph_bytes={most}, of which "
        f"{max(left, 0)} were left"
    )
    return {key: why for key in missing if key[:2] not in kept}
