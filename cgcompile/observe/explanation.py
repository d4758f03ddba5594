"""What :func:`cgcompile.explain` returns: :class:`Explanation`. A frozen value that prints."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from cgcompile.observe.page import Shown
from cgcompile.observe.parts import (
    GraphBreak,
    ModeReport,
    PieceReport,
    SettingReport,
    SymbolReport,
    Totals,
    plain,
)
from cgcompile.observe.text import breaks, head, mode, notes, settings, sizes, table_of
from cgcompile.passes.split import SplitGraph

VERSION = 1  # of the schema of Explanation.to_dict()


@dataclass(frozen=True)
class Explanation(Shown):
    """What would be split where, and why. ``print`` it.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        model: the name of what was looked at.
        device: where its tensors are. ``meta`` stands for the device that captures.
        traced: whether one graph was made of the call. If not there are no pieces, and ``breaks``
            or ``notes`` say why.
        pieces: in order of execution.
        symbols: the sizes that vary.
        totals: sums; None if nothing was traced.
        breaks: where Dynamo would end a graph.
        modes: which CUDA graphs would serve.
        settings: all of them, with where each comes from.
        notes: what else a reader should know, in sentences.
        split: the split graph itself, with FX modules and fake values; None if nothing was traced.
            No part of equality, of :meth:`to_dict` or of JSON. ``print(explanation.split)`` shows
            all values that cross.
    """

    template: ClassVar[str] = "explanation"

    version: int
    model: str
    device: str | None
    traced: bool
    pieces: tuple[PieceReport, ...]
    symbols: tuple[SymbolReport, ...]
    totals: Totals | None
    breaks: tuple[GraphBreak, ...]
    modes: ModeReport
    settings: tuple[SettingReport, ...]
    notes: tuple[str, ...]
    split: SplitGraph | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: dicts by field name, lists, text, numbers, bools and None."""
        names = [each.name for each in fields(self) if each.name != "split"]
        return {name: plain(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        rows = [head(self.model, self.totals)]
        rows += [*sizes(self.symbols), *mode(self.modes), *table_of(self.pieces)]
        rows += [*breaks(self.breaks), *settings(self.settings), *notes(self.notes)]
        return "\n".join(rows)
