"""Count what the graphs of an encoder did: hits, padding, and why items ran without a graph.

Items are counted once each, whatever the number of paths: a *hit* had a graph on every path on
which it has tokens, a *miss* ran eager on one of them at least, and an item without tokens is
neither.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cgcompile.counts import Count, Counts, count, padding_of, text_table
from cgcompile.encoder.protocol import DEFAULT
from cgcompile.reasons import EXPECTED, Fallback, Reason, warn_of
from cgcompile.settings import checked

# Where an encoder has another remedy than other models, whose graphs may be split.
_REMEDIES = {
    Reason.OVERSIZE: "add a token budget >= {needed}",
    Reason.CAPTURE_FAILED: "encoder graphs are not split: keep the value that the detail names on "
    "the device, or compute it in `tables=` or `offsets=`, which run before the forward",
}


def on_path(path: str) -> str:
    """Return words that name a path; none for the only one of most encoders."""
    return "" if path == DEFAULT else f" on path {path!r}"


class Ran(NamedTuple):
    """How a group of items ran on one path."""

    path: str  # the set of graphs
    budget: int | None  # of the graph; None without one
    tokens: Sequence[int]  # real output tokens of each item
    reason: Reason | None = None  # why there was no graph
    detail: str = ""  # of the reason
    needed: int = 0  # output tokens of a budget that holds the items


class EncoderStatistics:
    """Counts items, replays and eager runs of a manager. Methods are safe in any thread.

    Args:
        warn_fallbacks: log a warning of the first items that run without a graph for a reason.

    Attributes:
        hits: items that replayed on every path that they have tokens on.
        misses: items that ran eager on one path at least.
        idle: items without tokens.

    Example:
        >>> statistics = cgcompile.encoder.EncoderStatistics()
        >>> statistics.hits, statistics.misses
        (0, 0)
    """

    @checked
    def __init__(self, *, warn_fallbacks: bool = False) -> None:
        self._warns = warn_fallbacks
        self._counts: Counts[tuple[str, int]] = Counts()
        self._costs: dict[tuple[str, int], float] = {}
        self.clear()

    def __repr__(self) -> str:
        return f"<EncoderStatistics: {self._sum()}>"

    def _sum(self) -> str:
        misses = "1 miss" if self.misses == 1 else f"{self.misses} misses"
        return f"{count(self.hits, 'hit')}, {misses}, {self.idle} without tokens"

    def clear(self) -> None:
        """Reset all counts; measured costs stay."""
        with self._counts.lock:
            self.hits = self.misses = self.idle = 0
            self._counts.clear()

    def measured(self, costs: dict[tuple[str, int], float]) -> None:
        """Set the milliseconds of a replay of each (path, budget), for the table."""
        self._costs = dict(costs)

    def record(self, ran: Sequence[Ran], items: int) -> None:
        """Count one executed group."""
        served: list[bool | None] = [None] * items
        for on_path in ran:
            for item, tokens in enumerate(on_path.tokens):
                if tokens:
                    served[item] = served[item] is not False and on_path.budget is not None
        with self._counts.lock:
            self.hits += served.count(True)
            self.misses += served.count(False)
            self.idle += served.count(None)
            for path, budget, counts, reason, detail, needed in ran:
                items, tokens = sum(map(bool, counts)), sum(counts)
                if budget is not None:
                    self._counts.add((path, budget), tokens, budget).items += items
                elif reason is not None:
                    self._count_eager(path, Fallback(reason, detail), tokens, items, needed)

    def _count_eager(self, path: str, why: Fallback, tokens: int, items: int, needed: int) -> None:
        reason, detail = why.reason, why.detail
        is_new = self._counts.fall_back(path, why, tokens, items)
        if is_new and self._warns and reason not in EXPECTED:
            text = f"{tokens} tokens{on_path(path)}" + (f": {detail}" if detail else "")
            remedy = _REMEDIES.get(reason, "").format(needed=needed)
            warn_of("a group of items", Fallback(reason, text), remedy=remedy)

    @property
    def hit_rate(self) -> float:
        """Share of hits among hits and misses, 0.0 to 1.0; 0.0 before the first item."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0

    @property
    def replays(self) -> int:
        """Number of replays of all graphs."""
        return self._counts.total().hits

    def waste(self, path: str | None = None) -> float:
        """Return the share of padding in replayed output tokens, of one path or of all."""
        real, padded = self.tokens(path)
        return padding_of(real, padded)

    def tokens(self, path: str | None = None) -> tuple[int, int]:
        """Return (real, padded) output tokens of replays, on one path or on all."""
        total = self._counts.total(lambda key: path in (None, key[0]))
        return total.real, total.ran

    def reasons(self) -> dict[Reason, int]:
        """Return the items that ran without a graph by reason, once for each path."""
        return self._counts.reasons()

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as plain data, for JSON."""
        with self._counts.lock:
            return {
                "hits": self.hits,
                "misses": self.misses,
                "idle": self.idle,
                "hit_rate": self.hit_rate,
                "graphs": [
                    {
                        "path": path,
                        "budget": budget,
                        "replays": row.hits,
                        "items": row.items,
                        "tokens": row.real,
                        "padded_tokens": row.ran,
                        "replay_ms": self._costs.get((path, budget)),
                    }
                    for (path, budget), row in sorted(self._counts.rows.items())
                ],
                "eager": [
                    {
                        "path": path,
                        "reason": reason.value,
                        "items": fallback.items,
                        "tokens": fallback.real,
                        **fallback.span,
                        "detail": fallback.detail,
                    }
                    for (path, reason), fallback in self._counts.fallbacks.items()
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
        with self._counts.lock:
            for key in planned:
                row = self._counts.rows.get(key, Count())
                waste = f"{padding_of(row.real, row.ran):.1%}" if row.ran else "-"
                cost = f"{self._costs[key]:.3f}" if key in self._costs else "-"
                there = "yes" if key in captured else "no"
                counts = (str(row.hits), str(row.items))
                rows.append((key[0], str(key[1]), there, *counts, waste, cost))
            lines = text_table(rows)
            for (path, reason), fallback in self._counts.fallbacks.items():
                least, most = fallback.least, fallback.most
                span = str(most) if least == most else f"{least}..{most}"
                number = f"{count(fallback.items, 'item')}, {span} tokens a group"
                lines.append(f"eager{on_path(path)}: {reason.value}: {number}")
                lines += [f"  {fallback.detail}"] * bool(fallback.detail)
            lines.append(self._sum())
        return "\n".join(lines)
