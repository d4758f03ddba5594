"""The findings of one run, as they come in: :class:`Notes`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType

from cgcompile.observe.advice import Way, finding
from cgcompile.observe.findings import Finding
from cgcompile.passes.lines import Line, running_line

_GUARDED = "the function asks whether it is traced or captured, and may leave it out then"


class Notes:
    """Collects findings; the same one from the same line is counted, not repeated.

    Args:
        way: how the model is captured.
        until: the code that calls the model: lines above it are not the model's.

    Attributes:
        way: as given.
        closed: collect nothing any more; may be set.
        guarded: (file, function) of code that asks whether it is traced or captured.
    """

    def __init__(self, way: Way, until: CodeType) -> None:
        self.way = way
        self.closed = False
        self.guarded: set[tuple[str, str]] = set()
        self._until = until
        self._quiet = 0
        self._found: dict[tuple[object, ...], Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        yield from self._found.values()

    @property
    def listens(self) -> bool:
        """Whether what runs now would be captured, and findings are collected."""
        return not self._quiet and not self.closed

    def hush(self, by: int) -> None:
        """Enter (1) or leave (-1) something that runs eager, or that is reported already."""
        self._quiet += by

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Around what runs eager, or is reported already."""
        self.hush(1)
        try:
            yield
        finally:
            self.hush(-1)

    def line(self) -> Line | None:
        """The user's line that runs now."""
        return running_line(sys._getframe(1), self._until)

    def here(self, kind: str, op: str, message: str, *, severity: str | None = None) -> None:
        """A finding about what runs now."""
        if self.listens:
            self.about(self.line(), kind, op, message, severity=severity)

    def about(
        self, line: Line | None, kind: str, op: str, message: str, *, severity: str | None = None
    ) -> None:
        """A finding about what has run in a line.

        Only a note, where the code asks whether it is traced or captured: it may not do so then.
        """
        if line is not None and (line.file, line.function) in self.guarded:
            message, severity = f"{message}; {_GUARDED}", "note"
        self.add(kind, op, message, line, severity=severity)

    def add(
        self,
        kind: str,
        op: str,
        message: str,
        source: Line | None = None,
        *,
        severity: str | None = None,
    ) -> None:
        """A finding about a line, or about none."""
        key = (kind, source[:2] if source is not None else op)
        if key in self._found:
            self._found[key] = replace(self._found[key], count=self._found[key].count + 1)
        else:
            self._found[key] = finding(kind, self.way, op, message, source, severity=severity)
