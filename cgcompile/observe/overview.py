"""What :func:`cgcompile.report` tells of a running model: :class:`Overview`, a frozen value.

``gather.py`` makes it, ``page.py`` shows it. The rule: whatever stands on the page is in here.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.observe.coverage import Coverage
from cgcompile.observe.page import Shown
from cgcompile.observe.parts import (
    PieceReport,
    SettingReport,
    SymbolReport,
    Totals,
    plain,
)

VERSION = 1  # of the schema of Overview.to_dict()


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph: what it was split into, and how its pieces were compiled.

    Attributes:
        index: in the order in which Dynamo made them.
        device: where its tensors are.
        pieces: in order of execution.
        symbols: the sizes that vary.
        totals: sums over all pieces.
        compiled: of the distinct pieces that the compiler got, those it compiled.
        loaded: those loaded from disk.
        shared: those that an equal piece of the backend had already.
        failed: those whose compiler raised, which run uncompiled.
        compile_seconds: all of it took.
    """

    index: int
    device: str
    pieces: tuple[PieceReport, ...]
    symbols: tuple[SymbolReport, ...]
    totals: Totals
    compiled: int
    loaded: int
    shared: int
    failed: int
    compile_seconds: float


@dataclass(frozen=True)
class StepReport:
    """One recorded step that can be replayed.

    Attributes:
        owner: what recorded it: ``graph 0`` of the split, or the name of a wrapper.
        batch: the descriptor, as text.
        mode: PIECEWISE or FULL; empty if nobody knows any more.
        graphs: recordings in it.
        breaks: functions that run between them.
        nodes: of all its recordings; None where the device does not tell.
        seconds: the capture took, its execution included; None if nobody knows any more.
        nbytes: by which memory grew; None likewise.
        replays: how often it was replayed.
    """

    owner: str
    batch: str
    mode: str
    graphs: int
    breaks: int
    nodes: int | None
    seconds: float | None
    nbytes: int | None
    replays: int


class Count(NamedTuple):
    """A reason, and how often it was one.

    Attributes:
        reason: the name of a :class:`cgcompile.Reason`.
        calls: how many.
        detail: the last thing known about it.
    """

    reason: str
    calls: int
    detail: str


@dataclass(frozen=True)
class CountersReport:
    """What all calls did: as :class:`cgcompile.Counters`, as plain values."""

    calls: int
    captures: int
    replays: int
    failures: int
    plain: tuple[Count, ...]
    degraded: tuple[Count, ...]


class Fact(NamedTuple):
    """Something about this process: ``torch``, ``2.13.0``."""

    name: str
    value: str


class Memory(NamedTuple):
    """Bytes that graphs take, and what for."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Overview(Shown):
    """What a compiled model, a wrapper or a manager did so far; a value of one moment.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        title: of the page.
        kind: the type of what was looked at.
        graphs: what was compiled and still lives.
        steps: what is recorded and can be replayed.
        timeline: the captures in the order of time, those that failed as well.
        coverage: which batches ran how, as of :func:`cgcompile.coverage`.
        counters: what all calls did.
        memory: bytes that the graphs take, by what they are for.
        settings: all of them, with where each comes from.
        environment: versions and the machine.
        notes: what else a reader should know.
    """

    template: ClassVar[str] = "overview"

    version: int
    title: str
    kind: str
    graphs: tuple[GraphReport, ...]
    steps: tuple[StepReport, ...]
    timeline: tuple[CaptureRecord, ...]
    coverage: Coverage
    counters: CountersReport
    memory: tuple[Memory, ...]
    settings: tuple[SettingReport, ...]
    environment: tuple[Fact, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: dicts by field name, lists, text, numbers, bools and None."""
        found = {each.name: plain(getattr(self, each.name)) for each in fields(self)}
        return {**found, "timeline": [record.to_dict() for record in self.timeline]}
