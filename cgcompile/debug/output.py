"""How results become text, JSON and HTML: one way for each.

A result is a frozen dataclass of text, numbers and tuples of such: :meth:`Result.to_dict` is its
fields by name, JSON is that dict, and a page is a template filled with it. A value that keeps
another kind of object breaks all three. Text is at most 100 columns of ASCII. A page needs no
network, no scripts and no other file; templates escape all of it and write each number as
``<data value="...">`` with the exact one.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from cgcompile.settings import checked, require, require_whole


class Result:
    """A dataclass that prints, and that is JSON.

    Attributes:
        computed: names of properties that are part of the data beside the fields.
    """

    computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: dicts by field name, lists, text, numbers, bools and None."""
        data: dict[str, Any] = plain(self)
        return data

    @checked
    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        if indent is not None:
            require_whole("indent", "to_json", indent, 0, 64)
        return json.dumps(self.to_dict(), indent=indent)


class Page(Result):
    """A result with an HTML page.

    Attributes:
        template: of its page: ``overview``, ``explanation``, ...
    """

    template: ClassVar[str]

    @checked
    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write it as one page that needs nothing else; the folders above it are made.

        Returns:
            Where it is.

        Raises:
            OSError: it cannot be written there.
        """
        require("\0" not in str(path), "path", "to_html", path, "a path without null bytes")
        target, text = Path(path), render(self.template, self.to_dict())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target


def plain(value: Any) -> Any:
    """Return dataclasses and tuples as dicts and lists; fields that equality ignores are left out.

    Enum members become their names, and numbers that JSON does not have None.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [*getattr(value, "computed", ()), *(f.name for f in fields(value) if f.compare)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.name if isinstance(value, Enum) else value


# ---------------------------------------------------------------- text

WIDTH = 100


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def clipped(text: str, width: int = WIDTH) -> str:
    """Return at most ``width`` characters of ASCII."""
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= width else text[: width - 3] + "..."


def wrapped(label: str, text: str, columns: int = 6) -> list[str]:
    """Return a label and text, over as many lines as it needs."""
    inner = text.encode("ascii", "backslashreplace").decode()
    lines = textwrap.wrap(inner, WIDTH - columns) or [""]
    rows = [f"{label:<{columns}}{lines[0]}"]
    return [*rows, *(" " * columns + line for line in lines[1:])]


def human(number: int) -> str:
    """Return ``1.5 GiB``: a number of bytes for people."""
    result, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if result < 1024 or unit == "TiB":
            break
        result /= 1024
    return f"{number} B" if unit == "B" else f"{result:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return ``1.2 ms``: a time for people, three digits or fewer before the unit."""
    if not seconds:
        return "0 s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size or unit == "us":
            result = seconds / size
            digits = 0 if abs(result) >= 100 else 1 if abs(result) >= 10 else 2
            return f"{result:.{digits}f} {unit}"
    raise AssertionError("the last unit takes all")


# ---------------------------------------------------------------- pages


def render(template: str, result: dict[str, Any]) -> str:
    """Return the page of one kind of value."""
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
    return environment.get_template(f"{template}.html").render(found=result)


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
        {"x": width * (index % count), "width": width, "row": index // count, "of": piece}
        for index, piece in enumerate(pieces)
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
    limit = _GAP * total
    places: list[tuple[float, float]] = []  # (begin, end), in seconds that are drawn
    cuts: list[tuple[float, float]] = []
    drawn = 0.0
    for index, record in enumerate(records):
        before = records[index - 1] if index else record
        gap = record["start"] - before["start"] - before["seconds"] if index else 0.0
        if gap > limit:
            cuts.append((drawn + limit / 2, gap))
        drawn += min(max(gap, 0.0), limit)
        places.append((drawn, drawn + record["seconds"]))
        drawn += record["seconds"]
    scale = 100 / (drawn or 1.0)
    lanes: dict[str, Lane] = {}
    for (begin, end), record in zip(places, records, strict=True):
        name = f"{record['name']}, {record['mode']}"
        lane = lanes.setdefault(name, {"name": name, "boxes": []})
        box: Box = {"x": begin * scale, "width": (end - begin) * scale, "row": 0, "of": record}
        lane["boxes"].append(box)
    whole = records[-1]["start"] + records[-1]["seconds"] - records[0]["start"] if records else 0.0
    gaps: list[Gap] = [{"x": at * scale, "seconds": seconds} for at, seconds in cuts]
    return {"lanes": list(lanes.values()), "gaps": gaps, "seconds": whole}


def distinct(pieces: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Return each piece that is the first of its structure, and how many have it."""
    counts: dict[int, int] = {}
    for piece in pieces:
        counts[piece["same_as"]] = counts.get(piece["same_as"], 0) + 1
    return [(pieces[index], count) for index, count in counts.items()]
