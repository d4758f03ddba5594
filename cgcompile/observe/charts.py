"""Where things lie in the drawings of a page: plain numbers from plain data.

Positions across are percentages, so that a drawing fills whatever width there is and its text keeps
its size; positions down are pixels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

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
