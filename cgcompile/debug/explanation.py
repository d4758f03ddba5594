"""The parts of an :class:`~cgcompile.debug.explanation.Explanation`: plain frozen values.

The rule for all of them: fields are text, numbers, and tuples of such, so that :func:`plain` of one
is nothing but its fields by name. Whoever changes a field raises ``VERSION`` of what holds it.

How explanations and tables of coverage print: at most 100 columns of ASCII.

Where things lie in the drawings of a page: plain numbers from plain data.

Positions across are percentages, so that a drawing fills whatever width there is and its text keeps
its size; positions down are pixels.

One HTML page from plain data, with nothing around it: no network, no scripts, no other files.

``templates/`` has the pages and ``style.css``. The rule: a template gets what ``to_dict()`` of a
value gave, escapes all of it, and writes each number as ``<data value="...">`` with the exact one.

What :func:`cgcompile.explain` returns: :class:`Explanation`. A frozen value that prints.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict

from cgcompile.config import CompilationConfig
from cgcompile.passes.printer import count
from cgcompile.passes.split import SplitGraph
from cgcompile.settings import checked, require, require_whole


class SourceLine(NamedTuple):
    """A line of the user's.

    Attributes:
        where: ``model.py:41 in forward``.
        code: the line itself; empty where the file is not there.
    """

    where: str
    code: str

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


class Cause(NamedTuple):
    """Why something is as it is.

    Attributes:
        reason: the name of a :class:`cgcompile.Reason`, such as ``splitting_op``.
        detail: what it is about, in words.
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Bytes:
    """A number of bytes.

    Attributes:
        expression: in the symbols ``s0``, ``s1``, ..., such as ``256*s0``.
        traced: with the sizes of the call that was looked at; None where only data tells.
        at: (size, bytes) for each asked size of the batch dimension; bytes are None where the
            model's guards exclude the size.
    """

    expression: str
    traced: int | None
    at: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class ValueReport:
    """Something that goes into a piece or comes out of it.

    Attributes:
        name: unique in the explanation; the same name is the same value.
        shape: sizes, as expressions of the symbols; None if it is no tensor.
        dtype: such as ``bf16`` or ``f32``; None if it is no tensor.
        device: where it is; None if it is no tensor.
        bytes: of its elements; None if it is no tensor.
        storage: of the memory that a view of it keeps alive; None if it is no tensor.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: at a fixed address: a parameter, a buffer or an attribute of a module.
        written: some piece may write its memory.
    """

    name: str
    shape: tuple[str, ...] | None
    dtype: str | None
    device: str | None
    bytes: Bytes | None
    storage: Bytes | None
    source: str | None
    static: bool
    written: bool


@dataclass(frozen=True)
class PieceReport:
    """One piece, in the order of execution.

    Attributes:
        index: its position.
        name: ``piece_3``, as in logs and messages.
        captured: whether CUDA graphs may hold it; else it runs eager.
        why: why it runs eager; empty if it is captured.
        support: name of the :class:`cgcompile.AttentionCGSupport`: how far it goes into a FULL
            graph.
        num_ops: nodes that compute.
        source: the user's lines: of the boundary, or of the first node.
        inputs: what it takes.
        outputs: what it returns.
        bytes_in: of the memory behind its inputs that are not static.
        bytes_out: of the memory behind its outputs.
        same_as: index of the first piece of equal structure; its own if it is the first.
        compiled: whether the compiler of pieces gets it.
        uncompiled: why a captured piece is not compiled; None if it is.
    """

    index: int
    name: str
    captured: bool
    why: tuple[Cause, ...]
    support: str
    num_ops: int
    source: tuple[SourceLine, ...]
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    bytes_in: Bytes
    bytes_out: Bytes
    same_as: int
    compiled: bool
    uncompiled: str | None


@dataclass(frozen=True)
class SymbolReport:
    """A size that varies.

    Attributes:
        name: ``s0``.
        source: the dimension that it stands for, such as ``x.size()[0]``.
        traced: its number in the call that was looked at; None if nothing was assumed of it.
        least: the least number that it may stand for.
        most: the largest; None if there is no bound.
        guards: what the model's code assumed of it.
    """

    name: str
    source: str
    traced: int | None
    least: int
    most: int | None
    guards: tuple[str, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over all pieces.

    Attributes:
        pieces: how many there are.
        captured: of them.
        eager: of them.
        distinct: of different structure.
        compiled: distinct pieces that the compiler gets.
        ops: nodes that compute.
        crossing: bytes of the memory behind all that pieces hand on, each once.
        static: bytes of parameters, buffers and attributes that pieces read, each once.
    """

    pieces: int
    captured: int
    eager: int
    distinct: int
    compiled: int
    ops: int
    crossing: Bytes
    static: Bytes


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ends a graph.

    What comes behind the first break is not known: Dynamo goes on only after running what is
    before it.

    Attributes:
        door: ``"cgcompile.compile"``: the call does not become one graph at all;
            ``"torch.compile"``: it breaks there under torch's default settings alone.
        what: Dynamo's reason in one line.
        hints: what Dynamo says to it.
        source: the user's line; None if torch has none.
        fix: what to do.
    """

    door: str
    what: str
    hints: tuple[str, ...]
    source: SourceLine | None
    fix: str


@dataclass(frozen=True)
class ModeReport:
    """Which CUDA graphs would serve steps, as far as boundaries allow.

    Attributes:
        asked: the ``cudagraph_mode`` of the settings.
        result: what :class:`cgcompile.CudagraphDispatcher` makes of it for such boundaries.
        without_context: the runtime mode of a call that nobody set a forward context around.
        support: how far the least able boundary goes into a FULL graph; None if nothing was traced.
        lost: why ``result`` is less than was asked for; empty if it is not.
    """

    asked: str
    result: str
    without_context: str | None
    support: str | None
    lost: tuple[Cause, ...]


class SettingReport(NamedTuple):
    """One setting.

    Attributes:
        name: of it.
        value: what holds: text, a number, a bool, None or a list of such.
        origin: ``default``, ``environment``, ``options`` or ``mode`` of ``torch.compile``, or
            ``argument``.
    """

    name: str
    value: Any
    origin: str


def settings_of(config: CompilationConfig) -> tuple[SettingReport, ...]:
    """All settings as plain values, with where each comes from."""
    return tuple(
        SettingReport(name, _plain_setting(getattr(config, name)), origin)
        for name, origin in config.origins.items()
    )


def _plain_setting(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_setting, value))
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(getattr(value, "name", None) or getattr(value, "__qualname__", None) or value)


def plain(value: Any) -> Any:
    """A value of frozen dataclasses and tuples as dicts and lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(each) for name, each in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return value


WIDTH = 100
_KIND = {True: "captured", False: "eager"}


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def clipped(text: str, width: int = WIDTH) -> str:
    """At most ``width`` characters of ASCII."""
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= width else text[: width - 3] + "..."


def wrapped(label: str, text: str, columns: int = 6) -> list[str]:
    """A label and text, over as many lines as it needs."""
    inner = text.encode("ascii", "backslashreplace").decode()
    lines = textwrap.wrap(inner, WIDTH - columns) or [""]
    rows = [f"{label:<{columns}}{lines[0]}"]
    return [*rows, *(" " * columns + line for line in lines[1:])]


def head(model: str, totals: Totals | None) -> str:
    """What there is, in three lines."""
    if totals is None:
        return f"{model}: no pieces"
    first = (
        f"{model}: {count(totals.pieces, 'piece')}: {totals.captured} captured, "
        f"{totals.eager} eager; {totals.distinct} distinct, {totals.compiled} to compile; "
        f"{count(totals.ops, 'op')}"
    )
    rows = wrapped("bytes", f"{_bytes(totals.crossing)} cross")
    return "\n".join([clipped(first), *rows, *wrapped("", f"{_bytes(totals.static)} static")])


def sizes(symbols: Sequence[SymbolReport]) -> Iterator[str]:
    """The sizes that vary."""
    for symbol in symbols:
        most = "" if symbol.most is None else f" <= {symbol.most}"
        traced = "" if symbol.traced is None else f", traced with {symbol.traced}"
        text = f"{symbol.least} <= {symbol.name}{most}, {symbol.name} = {symbol.source}{traced}"
        yield from wrapped("size", "; ".join([text, *symbol.guards]))


def mode(modes: ModeReport) -> Iterator[str]:
    """Which graphs would serve, and what was lost."""
    text = modes.result if modes.asked == modes.result else f"{modes.asked} -> {modes.result}"
    if modes.without_context is not None:
        text += f"; without a forward context {modes.without_context}"
    if modes.support is not None:
        text += f"; boundaries allow FULL graphs: {modes.support}"
    yield from wrapped("mode", text)
    for why in modes.lost:
        yield from wrapped("", str(why))


def _bytes(size: Bytes) -> str:
    """``256*s0 B; 2.0 KiB as traced, 16: 4.0 KiB``."""
    numbers = [] if size.traced is None else [f"{human(size.traced)} as traced"]
    numbers += [f"{n}: {'refused' if b is None else human(b)}" for n, b in size.at]
    if size.traced is not None and size.expression == str(size.traced):
        numbers = [human(size.traced)]
    return f"{size.expression} B" + (f" ({', '.join(numbers)})" if numbers else "")


def human(number: int) -> str:
    """``1.5 GiB``: a number of bytes for people."""
    found, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if found < 1024 or unit == "TiB":
            break
        found /= 1024
    return f"{number} B" if unit == "B" else f"{found:.1f} {unit}"


# ---------------------------------------------------------------- pieces


def table_of(pieces: Sequence[PieceReport]) -> Iterator[str]:
    """A row for each piece; runs of layers are printed once."""
    if not pieces:
        return
    rows = [("piece", "kind", "ops", "same as", "bytes out", "where, why"), *map(_row, pieces)]
    keys = [(piece.same_as, piece.captured) for piece in pieces]
    lines = table(rows)
    yield clipped(lines[0])
    place = 0
    while place < len(keys):
        period, times = _repeated(keys, place)
        for offset in range(period):
            yield from _piece_lines(pieces[place + offset], lines[place + offset + 1])
        if times > 1:
            first, last = place + period, place + period * times - 1
            span = f"piece_{first} .. piece_{last}"
            yield f"{span}  the same {count(period, 'piece')} {times - 1} times more"
        place += period * times


def _repeated(keys: Sequence[tuple[int, bool]], place: int) -> tuple[int, int]:
    """(period, times) of the repetition that begins there and saves the most rows."""
    best = (1, 1)
    for period in range(1, min(16, (len(keys) - place) // 2) + 1):
        times = 1
        while (
            keys[place + period * times : place + period * (times + 1)]
            == (keys[place : place + period])
        ):
            times += 1
        if times > 2 and period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best


def _row(piece: PieceReport) -> tuple[str, ...]:
    where = str(piece.source[0]) if piece.source else "-"
    same = "-" if piece.same_as == piece.index else f"piece_{piece.same_as}"
    size = piece.bytes_out.expression
    return piece.name, _KIND[piece.captured], str(piece.num_ops), same, size, where


def _piece_lines(piece: PieceReport, row: str) -> Iterator[str]:
    yield clipped(row)
    if piece.same_as != piece.index:
        return
    for why in piece.why:
        yield from wrapped("", str(why), 10)
    if piece.uncompiled is not None:
        yield from wrapped("", f"left uncompiled: {piece.uncompiled}", 10)
    if piece.compiled and not piece.captured:
        yield from wrapped("", "compiled on its own", 10)


# ---------------------------------------------------------------- the rest


def breaks(found: Sequence[GraphBreak]) -> Iterator[str]:
    """Where Dynamo ends a graph, and what to do."""
    for each in found:
        yield from wrapped("break", f"in {each.door}: {each.what}")
        if each.source is not None:
            yield from wrapped("", f"at {each.source}")
        for hint in each.hints:
            yield from wrapped("", hint)
        yield from wrapped("", f"Fix: {each.fix}")


def settings(found: Sequence[SettingReport]) -> Iterator[str]:
    """Those that are not the default."""
    for name, value, origin in found:
        if origin != "default":
            yield from wrapped("set", f"{name} = {value!r} ({origin})")


def notes(found: Sequence[str]) -> Iterator[str]:
    for each in found:
        yield from wrapped("note", each)


_PER_ROW = 48  # pieces
_GAP = 0.04  # of all captures, the widest gap that is drawn at length


class Box(TypedDict):
    """A part of a drawing: ``x`` and ``width`` in percent, and what it stands for."""

    x: float
    width: float
    row: int
    of: Mapping[str, Any]


def strip(pieces: Sequence[Mapping[str, Any]]) -> list[Box]:
    """Pieces in order, at most so many in a row, all of one width."""
    count = min(max(len(pieces), 12), _PER_ROW)  # few are not drawn as wide as the page
    width = 100 / count
    return [
        {"x": width * (place % count), "width": width, "row": place // count, "of": piece}
        for place, piece in enumerate(pieces)
    ]


class Lane(TypedDict):
    """The captures of one owner: its name, and its boxes."""

    name: str
    boxes: list[Box]


class Gap(TypedDict):
    """Time in which nothing was captured, drawn shorter than it was."""

    x: float
    seconds: float


class Times(TypedDict):
    """A drawing of captures: lanes, gaps that were cut, seconds from the first to the last."""

    lanes: list[Lane]
    gaps: list[Gap]
    seconds: float


def times(records: Sequence[Mapping[str, Any]]) -> Times:
    """Captures in the order of time; long times without any are cut."""
    total = sum(each["seconds"] for each in records) or 1.0
    most = _GAP * total
    places: list[tuple[float, float]] = []  # (begin, end), in seconds that are drawn
    cuts: list[tuple[float, float]] = []
    drawn = 0.0
    for place, each in enumerate(records):
        before = records[place - 1] if place else each
        gap = each["start"] - before["start"] - before["seconds"] if place else 0.0
        if gap > most:
            cuts.append((drawn + most / 2, gap))
        drawn += min(max(gap, 0.0), most)
        places.append((drawn, drawn + each["seconds"]))
        drawn += each["seconds"]
    scale = 100 / (drawn or 1.0)
    lanes: dict[str, Lane] = {}
    for (begin, end), each in zip(places, records, strict=True):
        name = f"{each['name']}, {each['mode']}"
        lane = lanes.setdefault(name, {"name": name, "boxes": []})
        box: Box = {"x": begin * scale, "width": (end - begin) * scale, "row": 0, "of": each}
        lane["boxes"].append(box)
    whole = records[-1]["start"] + records[-1]["seconds"] - records[0]["start"] if records else 0.0
    gaps: list[Gap] = [{"x": at * scale, "seconds": seconds} for at, seconds in cuts]
    return {"lanes": list(lanes.values()), "gaps": gaps, "seconds": whole}


def distinct(pieces: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Each piece that is the first of its structure, and how many have it."""
    counts: dict[int, int] = {}
    for piece in pieces:
        counts[piece["same_as"]] = counts.get(piece["same_as"], 0) + 1
    return [(pieces[index], count) for index, count in counts.items()]


class Shown:
    """A value that is plain data, and so JSON and a page.

    Attributes:
        template: of its page: ``overview``, ``explanation``, ...
    """

    template: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: dicts by field name, lists, text, numbers, bools and None."""
        raise NotImplementedError

    @checked
    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        if indent is not None:
            require_whole("indent", "to_json", indent, 0, 64)
        return json.dumps(self.to_dict(), indent=indent)

    @checked
    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write it as one page that needs nothing else.

        Returns:
            Where it is.

        Raises:
            OSError: it cannot be written there.
        """
        return write_page(self.template, self.to_dict(), path)


def render(template: str, found: dict[str, Any]) -> str:
    """The page of one kind of value.

    Args:
        template: its name without the ending: ``overview``, ``explanation``, ...
        found: plain data.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("cgcompile.debug") / "templates"
    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "human": human,
        "duration": duration,
        "count": "{:,}".format,
        "share": "{:.1%}".format,
        "strip": strip,
        "times": times,
        "distinct": distinct,
        "percent": "{:.3f}%".format,
    }
    return environment.get_template(f"{template}.html").render(found=found)


def duration(seconds: float) -> str:
    """``1.2 ms``: a time for people, three digits or fewer before the unit."""
    if not seconds:
        return "0 s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size or unit == "us":
            found = seconds / size
            digits = 0 if abs(found) >= 100 else 1 if abs(found) >= 10 else 2
            return f"{found:.{digits}f} {unit}"
    raise AssertionError("the last unit takes all")


def write_page(template: str, found: dict[str, Any], path: str | PathLike[str]) -> Path:
    """Render a page into a file; the folders above it are made.

    Raises:
        OSError: it cannot be written there.
    """
    require("\0" not in str(path), "path", "to_html", path, "a path without null bytes")
    target = Path(path)
    text = render(template, found)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


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
