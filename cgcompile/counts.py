"""Counts of what ran: steps of each graph, and steps without one by reason (:class:`Counts`).

One table for batches of a manager, keyed (mode, descriptor), and for items of an encoder, keyed
(path, budget). Plain Python, bounded in memory, and cheap enough to record every step.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cgcompile.locks import new_lock
from cgcompile.reasons import Fallback, Reason

K_ = TypeVar("K_", bound=Hashable)


@dataclass(slots=True)
class Count:
    """Steps of one graph, of one reason, or all steps without a graph."""

    hits: int = 0  # steps, or replays
    items: int = 0  # of steps that run several
    real: int = 0  # rows without padding
    ran: int = 0  # rows with padding
    sizes: dict[int | None, int] = field(default_factory=dict)  # steps of a graph by real rows
    least: int = 0  # real rows of the smallest and of the largest step of a reason
    most: int = 0
    detail: str = ""  # the last one of a reason

    @property
    def span(self) -> dict[str, int]:
        """The least and the most rows of a step, as plain data."""
        return {"least_tokens": int(self.least), "most_tokens": int(self.most)}


def padding_of(real: int, ran: int) -> float:
    """Return the share of padding in rows that ran, 0.0 to 1.0; 0.0 of no rows."""
    return 1 - real / ran if ran else 0.0


class Counts(Generic[K_]):
    """A table of counts, for several threads.

    Args:
        max_sizes: how many pairs of size and graph are counted separately; None: sizes are not.

    Attributes:
        lock: held by the caller of :meth:`add` and :meth:`fall_back`, and by who reads rows.
        rows: the steps of each graph, by key.
        fallbacks: the steps without a graph, or in a lesser mode, by mode or path, and reason.
    """

    def __init__(self, max_sizes: int | None = None) -> None:
        self._max_sizes = max_sizes
        self.lock = new_lock()
        self.clear()

    def clear(self) -> None:
        """Reset all counts."""
        with self.lock:
            self._room = self._max_sizes or 0
            self.rows: dict[K_, Count] = {}
            self.fallbacks: dict[tuple[str, Reason], Count] = {}

    def row(self, key: K_) -> Count:
        """Return the row of a graph, which is made at first use."""
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = Count()
        return row

    def add(self, key: K_, real: int, ran: int) -> Count:
        """Count one step of a graph, under the lock; return its row."""
        row = self.rows.get(key)
        if row is None:
            row = self.row(key)
        row.hits += 1
        row.real += real
        row.ran += ran
        sizes = row.sizes
        if real in sizes:
            sizes[real] += 1
        elif self._room:
            self._room -= 1
            sizes[real] = 1
        elif self._max_sizes is not None:
            sizes[None] = sizes.get(None, 0) + 1
        return row

    def fall_back(self, where: str, why: Fallback, real: int, items: int = 1) -> bool:
        """Count one step with a reason, under the lock; return whether the reason is new."""
        row = self.fallbacks.get((where, why.reason))
        is_new = row is None
        if row is None:
            row = self.fallbacks[where, why.reason] = Count(least=real)
        row.hits += 1
        row.items += items
        row.real += real
        row.detail = why.detail
        if real < row.least:
            row.least = real
        if real > row.most:
            row.most = real
        return is_new

    def total(self, of: Callable[[K_], bool] | None = None) -> Count:
        """Return the sum of the rows whose keys ``of`` accepts, or of all; without sizes."""
        with self.lock:
            rows = [row for key, row in self.rows.items() if of is None or of(key)]
            return Count(*(sum(getattr(row, name) for row in rows) for name in _SUMMED))

    def reasons(self) -> dict[Reason, int]:
        """Return how many steps or items had each reason, in all modes or paths."""
        counts: dict[Reason, int] = {}
        with self.lock:
            for (_, reason), row in self.fallbacks.items():
                counts[reason] = counts.get(reason, 0) + row.items
        return counts


_SUMMED = ("hits", "items", "real", "ran")


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of rows of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def count(number: int, noun: str) -> str:
    """Return text such as ``1 piece`` or ``2 pieces``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
