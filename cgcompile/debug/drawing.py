"""Drawings as SVG text, for pages of results and for the documentation: the one code that draws.

They are drawn from plain data, as ``to_dict()`` returns it, and styled by ``drawing.css``, which
:func:`alone` adds for a file. The rule: each shape has a title with what it stands for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from cgcompile.debug.output import duration, human

_WIDTH, _ROW, _GAP, _LINE = 480, 46, 26, 24
_MOST = 24  # rows of a split: more are left out in the middle
_HIGH = 130  # of the highest column
_COUNTS, _SIZES = 14, 7  # labels below columns that fit: of numbers, and of bytes
_BAR, _NAME = 24, 20  # heights of a lane, and of the text above it
_LANES = 8  # steps of a profile: more are left out
_TEXT = 62  # characters that fit into a row

HATCH = (
    '<svg width="0" height="0" style="position: absolute" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line class="hatching" x1="0" y1="0" x2="0" y2="5"/></pattern>'
    "</defs></svg>"
)
"""The pattern of what no graph serves: once on each page with drawings."""


def style() -> str:
    """Return the style sheet of all drawings."""
    return (files("cgcompile.debug") / "templates" / "drawing.css").read_text(encoding="utf-8")


def alone(drawing: str) -> str:
    """Return a drawing as the text of an SVG file, in light and dark."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}"'
    styled = drawing.replace("</title>", f"</title><style>{style()}</style>", 1)
    return styled.replace("<svg", start, 1)


def _drawing(label: str, attributes: str, shapes: Sequence[str]) -> str:
    """Return an SVG with a name for those who do not see it."""
    name = escape(label)
    start = f'<svg role="img" aria-label="{name}" {attributes}>'
    return f"{start}<title>{name}</title>{''.join(shapes)}</svg>"


# ---------------------------------------------------------------- the pieces of a split


def split_svg(pieces: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return the pieces of a split from top to bottom, with the bytes that each one passes on.

    Args:
        pieces: as of ``Explanation.to_dict()["pieces"]``. Repeated ones are drawn once.
        label: what the drawing shows, for those who do not see it.
    """
    rows, shapes, top, left_out = list(_rows(pieces)), [], 0, ""
    if len(rows) > _MOST:
        left_out = f"{len(rows) - _MOST + 1} more rows"
        rows = [*rows[: _MOST - 6], left_out, *rows[-5:]]
    above: Mapping[str, Any] | None = None  # the piece whose results go on to the next one
    for row in rows:
        if isinstance(row, str):
            line = f'<text x="12" y="{top + 16}">{row}</text>'
            shapes.append(f"<g><title>{row}</title>{line}</g>")
            top += _LINE
            above = None if row is left_out else above  # its last piece is not drawn
            continue
        if above is not None:
            shapes.append(_edge(above, top))
            top += _GAP
        shapes.append(_piece(row, top))
        top, above = top + _ROW, row
    return _drawing(label, f'viewBox="0 0 {_WIDTH} {top + 2}" class="drawing split"', shapes)


def _rows(pieces: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any] | str]:
    """Yield pieces, and text in place of runs of pieces that are equal to those before them."""
    kinds, index = [(piece["same_as"], piece["captured"]) for piece in pieces], 0
    while index < len(pieces):
        period, times = 1, 1
        for length in range(1, (len(pieces) - index) // 2 + 1):
            run, count = kinds[index : index + length], 1
            while kinds[index + count * length : index + (count + 1) * length] == run:
                count += 1
            if length * (count - 1) > period * (times - 1):
                period, times = length, count
        yield from pieces[index : index + period]
        if times > 1:
            what = "this piece" if period == 1 else f"these {period} pieces"
            yield f"{what}, {times - 1} {'time' if times == 2 else 'times'} more"
        index += period * times


def _piece(piece: Mapping[str, Any], top: int) -> str:
    kind = "captured" if piece["captured"] else "eager"
    ops = f"{piece['num_ops']} op{'s' if piece['num_ops'] != 1 else ''}"
    whys = [f"{why['reason']}: {why['detail']}" for why in piece["why"]]
    where = [line["where"] for line in piece["source"][:1]]
    title = "; ".join([f"{piece['name']}, {kind}, {ops}", *whys, *where])
    head = ", ".join([piece["name"], kind, ops])
    return (
        f"<g><title>{escape(title)}</title>"
        f'<rect class="piece {kind}" x="1" y="{top + 1}" width="{_WIDTH - 2}" height="{_ROW - 2}" '
        f'rx="6"/><text class="label" x="12" y="{top + 19}">{_clipped(head)}</text>'
        f'<text x="12" y="{top + 36}">{_clipped("; ".join([*whys[:1], *where]))}</text></g>'
    )


def _edge(piece: Mapping[str, Any], top: int) -> str:
    size = piece["bytes_out"]
    text = f"{size['expression']} B" if size["traced"] is None else human(size["traced"])
    return (
        f"<g><title>{escape(piece['name'])} passes on {escape(text)}</title>"
        f'<path class="edge" d="M24 {top} V{top + _GAP - 2} m-4 -6 l4 6 l4 -6"/>'
        f'<text x="36" y="{top + 17}">{_clipped(text)}</text></g>'
    )


def _clipped(text: str) -> str:
    return escape(text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}...")


# ---------------------------------------------------------------- columns: one for each size


class Column(NamedTuple):
    """One column; its height is a share of the highest."""

    height: float
    above: str  # text
    below: str
    title: str
    kind: str = "on"  # or "on soft", as in ``drawing.css``
    hatched: float = 0.0  # the upper share of it


def columns_svg(columns: Sequence[Column], label: str, labels: int) -> str:
    """Return columns over one line; a bounded number of them has text."""
    width, interval = 100 / max(len(columns), 8), -(-len(columns) // labels)
    floor = _HIGH + 20
    shapes = [f'<line class="edge" x1="0" x2="100%" y1="{floor}" y2="{floor}"/>']
    for number, column in enumerate(columns):
        high = _HIGH * column.height
        hatched = high * column.hatched
        texts = [(_HIGH + 14 - high, column.above), (_HIGH + 34, column.below)]
        shown = "".join(
            f'<text x="50%" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
            for y, text in (texts if number % interval == 0 else texts[:0])
            if text
        )
        shapes.append(
            f'<svg x="{width * number:.3f}%" width="{width:.3f}%" height="{_HIGH + 40}">'
            f"<title>{escape(column.title)}</title>"
            f'<rect class="off" x="12%" width="76%" y="{floor - high:.1f}" '
            f'height="{hatched:.1f}"/>'
            f'<rect class="{column.kind}" x="12%" width="76%" '
            f'y="{floor - high + hatched:.1f}" height="{high - hatched:.1f}"/>{shown}</svg>'
        )
    return _drawing(label, f'class="drawing" height="{_HIGH + 40}"', shapes)


def histogram_svg(rows: Sequence[Mapping[str, Any]], unit: str, label: str) -> str:
    """Return a column for each row of a coverage: how many steps, and the share of padding.

    Args:
        rows: as of ``Coverage.to_dict()["rows"]``.
        unit: what is counted, as of the coverage.
        label: what the drawing shows, for those who do not see it.
    """
    highest, columns = max([row["hits"] for row in rows], default=0) or 1, []
    for row in rows:
        what = row["graph"] or row["reason"] or "no graph"
        share = "" if row["padding"] is None else f", {row['padding']:.1%} padding"
        title = f"{row['part']} {row['mode']} {what}: {row['hits']} {unit}{share}".strip()
        size = re.search(r"(?:\d+\.\.)?(\d+)", row["batches"])
        below = size[1] if size is not None and row["graph"] else "none"
        kind = "on soft" if row["mode"] == "PIECEWISE" else "on"
        hatched = (row["padding"] or 0.0) if row["graph"] else 1.0
        above = str(row["hits"]) if row["hits"] else ""
        columns.append(Column(row["hits"] / highest, above, below, title, kind, hatched))
    return columns_svg(columns, label, _COUNTS)


def sizes_svg(steps: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return a column for each size: the bytes by which memory grew for its recorded steps.

    Args:
        steps: as of ``Overview.to_dict()["steps"]``.
        label: what the drawing shows, for those who do not see it.
    """
    by_rows: dict[int, list[int]] = {}
    for step in steps:
        if (size := re.search(r"\d+", step["batch"])) is not None:
            by_rows.setdefault(int(size[0]), []).append(step["nbytes"])
    highest, columns = max([sum(grown) for grown in by_rows.values()], default=0) or 1, []
    for rows, grown in sorted(by_rows.items()):
        nbytes, recorded = sum(grown), "step" if len(grown) == 1 else "steps"
        title = f"size {rows}: {human(nbytes)} in {len(grown)} recorded {recorded}"
        above = human(nbytes) if nbytes else ""
        columns.append(Column(max(nbytes, 0) / highest, above, str(rows), title))
    return columns_svg(columns, label, _SIZES)


# ---------------------------------------------------------------- lanes: times and bytes in order


class Span(NamedTuple):
    """A part of a lane."""

    length: float  # on the scale of all lanes
    title: str
    kind: str = "on"  # "on soft", "off" or "failed", as in ``drawing.css``
    opacity: float = 1.0


def lanes_svg(lanes: Mapping[str, Sequence[Span]], label: str) -> str:
    """Return lanes below each other on one scale, each below its name, with spans in a row."""
    whole = max([sum(span.length for span in spans) for spans in lanes.values()], default=0) or 1
    shapes, top = [], 0
    for name, spans in lanes.items():
        if name:
            shapes.append(f'<text x="0" y="{top + 14}">{escape(name)}</text>')
            top += _NAME
        start = 0.0
        for span in spans:
            at, wide = 100 * start / whole, 100 * span.length / whole
            opacity = "" if span.opacity == 1 else f' fill-opacity="{span.opacity:g}"'
            shapes.append(
                f'<rect class="{span.kind}"{opacity} x="{at:.3f}%" width="{wide:.3f}%" '
                f'y="{top}" height="{_BAR}"><title>{escape(span.title)}</title></rect>'
            )
            if start:
                line = f'x1="{at:.3f}%" x2="{at:.3f}%" y1="{top}" y2="{top + _BAR}"'
                shapes.append(f'<line class="gap" {line}/>')
            start += span.length
        top += _BAR + 6
    return _drawing(label, f'class="drawing" height="{top}"', shapes)


def kinds_svg(memory: Mapping[str, int], label: str) -> str:
    """Return the bytes of each kind of memory, in one lane."""
    kinds = [(kind, nbytes) for kind, nbytes in memory.items() if nbytes]
    spans = [
        Span(nbytes, f"{kind}: {human(nbytes)}", "on", max(1 - 0.25 * index, 0.2))
        for index, (kind, nbytes) in enumerate(kinds)
    ]
    return lanes_svg({"": spans}, label)


def captures_svg(records: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return captures in the order of time, in one lane.

    Args:
        records: as of ``Captures.to_dict()``.
        label: what the drawing shows, for those who do not see it.
    """
    spans = []
    for record in records:
        cost = f"{duration(record['seconds'])}, {human(record['nbytes'])}"
        refusal = "" if record["why"] is None else f"; refused: {record['why']}"
        title = f"{record['name']}, {record['mode']}, {record['batch']}: {cost}{refusal}"
        spans.append(Span(record["seconds"], title, "on soft" if not refusal else "failed"))
    return lanes_svg({"": spans}, label)


def steps_svg(segments: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return the segments of each measured step in order, as long as they take.

    Args:
        segments: as of ``Profile.to_dict()["segments"]``.
        label: what the drawing shows, for those who do not see it.
    """
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for segment in segments:
        steps.setdefault(segment["sequence"], []).append(segment)
    often = sorted(steps, key=lambda step: -steps[step][0]["count"])[:_LANES]
    lanes: dict[str, list[Span]] = {}
    for step in sorted(often):
        for where, key in (("host", "host_us"), ("device", "device_us")):
            timed = [segment for segment in steps[step] if segment[key] is not None]
            if timed:
                whole = duration(sum(segment[key] for segment in timed) / 1e6)
                name = f"step {step}, {timed[0]['batch']}: {whole} of the {where}"
                lanes[name] = [_segment(segment, segment[key]) for segment in timed]
    return lanes_svg(lanes, label)


def _segment(segment: Mapping[str, Any], microseconds: float) -> Span:
    title = f"{segment['name']}, {segment['kind']}: {duration(microseconds / 1e6)}"
    return Span(microseconds, title, "on" if segment["kind"] == "graph" else "off")
