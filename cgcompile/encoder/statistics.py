"""Count what the graphs of an encoder did: hits, padding, and why items ran without a graph.

Items are counted once each, whatever the number of paths: a *hit* had a graph on every path on
which it has tokens, a *miss* ran eager on one of them at least, and an item without tokens is
neither.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cgcompile.locks import new_lock
from cgcompile.reasons import Reason
from cgcompile.serving.statistics import Lost, count_by_reason, text_table


class Ran(NamedTuple):
    """How a group of items ran on one path."""

    path: str  # the set of graphs
    budget: int | None  # of the graph; None without one
    tokens: Sequence[int]  # real output tokens of each item
    reason: Reason | None = None  # why there was no graph


@dataclass
class _Graph:
    """One budget of one path."""

    replays: int = 0
    items: int = 0
    tokens: int = 0


class EncoderStatistics:
    """Counts items, replays and eager runs of a manager. Methods are safe in any thread.

    Attributes:
        hits: items that replayed on every path that they have tokens on.
        misses: items that ran eager on one path at least.
        idle: items without tokens.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._costs: dict[tuple[str, int], float] = {}
        self.clear()

    def clear(self) -> None:
        """Reset all counts; measured costs stay."""
        with self._lock:
            self.hits = self.misses = self.idle = 0
            self._graphs: dict[tuple[str, int], _Graph] = {}
            self._eager: dict[tuple[str, Reason], Lost] = {}

    def measured(self, costs: dict[tuple[str, int], float]) -> None:
        """Set the milliseconds of a replay of each (path, budget), for the table."""
        self._costs = dict(costs)

    def record(self, ran: Sequence[Ran], items: int) -> None:
        """Count one group of so many items."""
        served: list[bool | None] = [None] * items
        for on_path in ran:
            for item, tokens in enumerate(on_path.tokens):
                if tokens:
                    served[item] = served[item] is not False and on_path.budget is not None
        with self._lock:
            self.hits += served.count(True)
            self.misses += served.count(False)
            self.idle += served.count(None)
            for path, budget, counts, reason in ran:
                items, tokens = sum(map(bool, counts)), sum(counts)
                if budget is not None:
                    graph = self._graphs.setdefault((path, budget), _Graph())
                    graph.replays += 1
                    graph.items += items
                    graph.tokens += tokens
                elif reason is not None:
                    self._eager.setdefault((path, reason), Lost(tokens)).add(tokens, items)

    @property
    def hit_rate(self) -> float:
        """Share of hits among hits and misses, 0.0 to 1.0; 0.0 before the first item."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    @property
    def replays(self) -> int:
        """Number of replays of all graphs."""
        with self._lock:
            return sum(graph.replays for graph in self._graphs.values())

    def waste(self, path: str | None = None) -> float:
        """Return the share of padding in replayed output tokens, of one path or of all."""
        real, padded = self.tokens(path)
        return 1 - real / padded if padded else 0.0

    def tokens(self, path: str | None = None) -> tuple[int, int]:
        """Return (real, padded) output tokens of replays, on one path or on all."""
        with self._lock:
            graphs = [(k, g) for k, g in self._graphs.items() if path in (None, k[0])]
        real = sum(graph.tokens for _, graph in graphs)
        return real, sum(graph.replays * key[1] for key, graph in graphs)

    def reasons(self) -> dict[Reason, int]:
        """Return the items that ran without a graph by reason, once for each path."""
        with self._lock:
            return count_by_reason(self._eager)

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as plain data, for JSON."""
        with self._lock:
            return {
                "hits": self.hits,
                "misses": self.misses,
                "idle": self.idle,
                "hit_rate": self.hit_rate,
                "graphs": [
                    {
                        "path": path,
                        "budget": budget,
                        "replays": graph.replays,
                        "items": graph.items,
                        "tokens": graph.tokens,
                        "padded_tokens": graph.replays * budget,
                        "replay_ms": self._costs.get((path, budget)),
                    }
                    for (path, budget), graph in sorted(self._graphs.items())
                ],
                "eager": [
                    {
                        "path": path,
                        "reason": reason.value,
                        "items": lost.count,
                        "tokens": lost.real,
                        **lost.as_dict(),
                    }
                    for (path, reason), lost in self._eager.items()
                ],
            }

    def coverage(self, planned: Sequence[tuple[str, int]], captured: Iterable[Any] = ()) -> str:
        """Return a table: path, budget, replays, items, padding, time; then eager runs by reason.

        Args:
            planned: (path, budget) of all rows, in order.
            captured: those of them that have a graph.
        """
        captured = set(captured)
        rows = [("path", "budget", "graph", "replays", "items", "padding", "replay ms")]
        with self._lock:
            for key in planned:
                graph = self._graphs.get(key, _Graph())
                ran = graph.replays * key[1]
                waste = f"{1 - graph.tokens / ran:.1%}" if ran else "-"
                cost = f"{self._costs[key]:.3f}" if key in self._costs else "-"
                there = "yes" if key in captured else "no"
                counts = (str(graph.replays), str(graph.items))
                rows.append((key[0], str(key[1]), there, *counts, waste, cost))
            lines = text_table(rows)
            for (path, reason), lost in self._eager.items():
                span = f"{lost.least}..{lost.most} tokens"
                lines.append(f"eager on {path}: {reason.value}: {lost.count} items, {span}")
            lines.append(f"{self.hits} hits, {self.misses} misses, {self.idle} without tokens")
        return "\n".join(lines)
