"""Drawings as SVG text: the pieces of a split, and the batches over the graphs that served them.

They are drawn from plain data, as ``to_dict()`` returns it, and styled by ``drawing.css``, which
:func:`alone` adds for a file. The rule: each shape has a title with what it stands for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from cgcompile.debug.output import human

_WIDTH, _ROW, _GAP, _LINE = 480, 46, 26, 24
_MOST = 24  # rows of a split: more are left out in the middle
_COLUMNS, _HIGH = 14, 130  # labels of a histogram, and the height of its highest column
_TEXT = 62  # characters that fit into a row


def alone(drawing: str) -> str:
    """Return a drawing as the text of an SVG file, in light and dark."""
    style = (files("cgcompile.debug") / "templates" / "drawing.css").read_text(encoding="utf-8")
    start = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}"'
    styled = drawing.replace("</title>", f"</title><style>{style}</style>", 1)
    return styled.replace("<svg", start, 1)


def split_svg(pieces: Sequence[Mapping[str, Any]], label: str) -> str:
    """Return the pieces of a split from top to bottom, with the bytes that each one hands on.

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
            shapes.append(_text(row, top))
            top += _LINE
            above = None if row is left_out else above  # its last piece is not drawn
            continue
        if above is not None:
            shapes.append(_edge(above, top))
            top += _GAP
        shapes.append(_piece(row, top))
        top, above = top + _ROW, row
    box = f'viewBox="0 0 {_WIDTH} {top + 2}" class="split"'
    name = escape(label)
    return f'<svg role="img" aria-label="{name}" {box}><title>{name}</title>{"".join(shapes)}</svg>'


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
        f"<g><title>{escape(piece['name'])} hands on {escape(text)}</title>"
        f'<path class="edge" d="M24 {top} V{top + _GAP - 2} m-4 -6 l4 6 l4 -6"/>'
        f'<text x="36" y="{top + 17}">{_clipped(text)}</text></g>'
    )


def _text(text: str, top: int) -> str:
    return f'<g><title>{text}</title><text x="12" y="{top + 16}">{text}</text></g>'


def _clipped(text: str) -> str:
    return escape(text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}...")


def histogram_svg(rows: Sequence[Mapping[str, Any]], unit: str, label: str) -> str:
    """Return a column for each row of a coverage: how many steps, and the share of padding.

    Args:
        rows: as of ``Coverage.to_dict()["rows"]``.
        unit: what is counted, as of the coverage.
        label: what the drawing shows, for those who do not see it.
    """
    width, most = 100 / max(len(rows), 8), max([row["hits"] for row in rows], default=0) or 1
    each = -(-len(rows) // _COLUMNS)
    columns = []
    for number, row in enumerate(rows):
        high = _HIGH * row["hits"] / most
        padded = high * (row["padding"] or 0.0) if row["graph"] else high
        what = row["graph"] or row["reason"] or "no graph"
        share = "" if row["padding"] is None else f", {row['padding']:.1%} padding"
        title = f"{row['part']} {row['mode']} {what}: {row['hits']} {unit}{share}".strip()
        size = re.search(r"(?:\d+\.\.)?(\d+)", row["batches"])
        below = size[1] if size is not None and row["graph"] else "none"
        texts = [(_HIGH + 14 - high, str(row["hits"]) if row["hits"] else "")]
        texts.append((_HIGH + 34, below))
        shown = "".join(
            f'<text x="50%" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
            for y, text in (texts if number % each == 0 else texts[:0])
            if text
        )
        columns.append(
            f'<svg x="{width * number:.3f}%" width="{width:.3f}%" height="{_HIGH + 40}">'
            f"<title>{escape(title)}</title>"
            f'<rect class="off" x="12%" width="76%" y="{_HIGH + 20 - high:.1f}" '
            f'height="{padded:.1f}"/>'
            f'<rect class="on{" soft" if row["mode"] == "PIECEWISE" else ""}" x="12%" width="76%" '
            f'y="{_HIGH + 20 - high + padded:.1f}" height="{high - padded:.1f}"/>{shown}</svg>'
        )
    name, floor = escape(label), _HIGH + 20
    base = f'<line class="edge" x1="0" x2="100%" y1="{floor}" y2="{floor}"/>'
    start = f'<svg role="img" aria-label="{name}" height="{_HIGH + 40}"><title>{name}</title>'
    return f"{start}{base}{''.join(columns)}</svg>"
