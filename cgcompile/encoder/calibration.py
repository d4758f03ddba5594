"""What replays and eager runs cost on this machine: :class:`Calibration`.

Whether a graph pays depends on the model and the device, and packing by a rule of thumb may be
slower than no graphs at all. So each graph is timed once it is captured, and the forward that it
recorded is timed plain.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgcompile.encoder.keys import GraphKey
from cgcompile.encoder.packing import Costs

_RUNS = 2


class Calibration:
    """Times of graphs, in milliseconds.

    Args:
        device: where they run.

    Attributes:
        replays: (path, budget) -> one replay; the slowest of several axes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.replays: dict[tuple[str, int], float] = {}
        self._plain: dict[str, list[tuple[int, float]]] = {}

    def measure(self, key: GraphKey, replay: Callable[[], Any], plain: Callable[[], Any]) -> None:
        """Time one graph, and what it recorded without a graph. Synchronises."""
        where = (key.path, key.budget)
        cost = self._time(replay)
        self.replays[where] = max(cost, self.replays.get(where, 0.0))
        self._plain.setdefault(key.path, []).append((key.budget, self._time(plain)))

    def costs(self, paths: Sequence[str]) -> Costs:
        """What packing estimates with."""
        measured = [(place, self._plain.get(path)) for place, path in enumerate(paths)]
        eagers = {place: _line(points) for place, points in measured if points}
        replays = {
            (paths.index(path), budget): cost for (path, budget), cost in self.replays.items()
        }
        return Costs(replays=replays, eagers=eagers)

    def _time(self, run: Callable[[], Any]) -> float:
        """The shortest of a few runs, in milliseconds."""
        run()
        return min(self._once(run) for _ in range(_RUNS))

    def _once(self, run: Callable[[], Any]) -> float:
        if self._device.type != "cuda":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize(self._device)
        # The host's part of an eager run is waited for too, so the clock is the host's.
        start = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        return (time.perf_counter() - start) * 1e3


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(fixed, per token) of the straight line nearest to the points, neither below 0."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    fixed = mean_y - slope * mean_x
    if fixed < 0:  # through the origin then
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return fixed, slope
