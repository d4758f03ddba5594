"""How explanations and tables of coverage print: at most 100 columns of ASCII."""

import textwrap
from collections.abc import Iterator, Sequence

from cgcompile.observe.parts import (
    Bytes,
    GraphBreak,
    ModeReport,
    PieceReport,
    SettingReport,
    SymbolReport,
    Totals,
)
from cgcompile.passes.printer import count

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
