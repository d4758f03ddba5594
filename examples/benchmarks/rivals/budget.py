"""What cgcompile must reach, as ratios within one run: :func:`budget` of what was found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PIECES, DIRECT, FULL = (
    "cgcompile piecewise",
    "cgcompile piecewise, op's function",
    "cgcompile FULL",
)
MB = 1e6


class Missing(Exception):
    """A figure was not measured; the message names it."""


@dataclass(frozen=True)
class Goal:
    """One row of the budget.

    Attributes:
        name: what is limited.
        value: what was measured; None where it was not.
        limit: the most that it may be.
        unit: of both; ``x`` for ratios.
        about: the figures behind it, or why there is no value.
    """

    name: str
    value: float | None
    limit: float
    unit: str
    about: str

    @property
    def reached(self) -> bool | None:
        return None if self.value is None else self.value <= self.limit

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.value <= self.limit:
            return "reached"
        return f"missed by {100 * (self.value / self.limit - 1):.1f} %"


class Figures:
    """Look-ups in what one worker found, that say what is missing."""

    def __init__(self, result: dict[str, Any], model: str) -> None:
        self._found = result.get("models", {}).get(model, {})
        self._starts = result.get("starts", {})
        self._model = model

    @property
    def sites(self) -> int:
        return int(self._found["pieces"]) - 1

    def time(self, variant: str, metric: str, batch: int, floor: bool = False) -> float:
        """Microseconds.

        Raises:
            Missing: it was not measured.
        """
        row = self._found.get("batches", {}).get(str(batch), {}).get("rows", {}).get(variant, {})
        row = row.get("floor", {}) if floor else row
        if metric not in row:
            of = " floor of" if floor else ""
            raise Missing(f"no {metric} time of{of} {variant}, {self._model}, batch {batch}")
        return float(row[metric])

    def captured(self, variant: str, what: str) -> float:
        """As :meth:`time`, of the capture of all sizes."""
        capture = self._found.get("variants", {}).get(variant, {}).get("capture", {})
        if what not in capture:
            raise Missing(f"no {what} of {variant}, {self._model}")
        if capture["sizes"] != 20:
            raise Missing(f"{variant} captured {capture['sizes']} sizes, not 20")
        return float(capture[what])

    def start(self, way: str) -> float:
        """Seconds of a cold start."""
        if "cold" not in self._starts.get(way, {}):
            raise Missing(f"no cold start of {way}")
        return float(self._starts[way]["cold"])


def _over_floor(
    name: str, figures: Figures, variant: str, metric: str, batch: int, limit: float
) -> Callable[[], Goal]:
    def goal() -> Goal:
        own = figures.time(variant, metric, batch)
        floor = figures.time(variant, metric, batch, floor=True)
        return Goal(name, own / floor, limit, "x", f"{own:.1f} us, floor {floor:.1f} us")

    return goal


def _between(
    name: str, figures: Figures, metric: str, batch: int, pair: tuple[str, str], limit: float
) -> Callable[[], Goal]:
    def goal() -> Goal:
        own, other = (figures.time(each, metric, batch) for each in pair)
        return Goal(name, own / other, limit, "x", f"{own:.1f} us, {pair[1]} {other:.1f} us")

    return goal


def _site(figures: Figures, batch: int) -> Goal:
    pair = ("cgcompile lean piecewise", "cgcompile lean FULL")
    pieces, full = (figures.time(each, "gpu", batch) for each in pair)
    about = f"{pieces:.1f} us in pieces, {full:.1f} us FULL, {figures.sites} sites"
    return Goal(_SITE, (pieces - full) / figures.sites, 6.0, "us", about)


def _cold(figures: Figures) -> Goal:
    own, dynamo = figures.start("cgcompile guards none"), figures.start("Dynamo alone")
    return Goal(_COLD, own - dynamo, 4.0, "s", f"{own:.2f} s, Dynamo alone {dynamo:.2f} s")


def _captured(
    name: str, figures: Figures, variant: str, what: str, limit: float, unit: str, per: float
) -> Callable[[], Goal]:
    def goal() -> Goal:
        value = figures.captured(variant, what) / per
        return Goal(name, value, limit, unit, f"{value:.3f} {unit}")

    return goal


_SITE = "GPU time of a boundary, cache written in pieces"
_COLD = "cold compile beyond Dynamo alone"


def budget(result: dict[str, Any], batch: int = 8) -> list[Goal]:
    """All rows for one result of ``compare.py``, at one batch of the 32-layer decoder.

    Args:
        result: the JSON.
        batch: of the rows that have one.
    """
    main, deep = Figures(result, "main"), Figures(result, "deep")
    rows: list[tuple[str, float, str, Callable[[], Goal]]] = []

    def add(name: str, limit: float, unit: str, goal: Callable[[], Goal]) -> None:
        rows.append((name, limit, unit, goal))

    for label, figures in (("33 pieces", main), ("65 pieces", deep)):
        for variant, kind in ((PIECES, "dispatcher"), (DIRECT, "op's function")):
            name = f"host, piecewise step over its bare loop, {label}, {kind}"
            add(name, 1.15, "x", _over_floor(name, figures, variant, "host_noop", batch, 1.15))
    name = "host, FULL step over its replay"
    add(name, 2.0, "x", _over_floor(name, main, FULL, "host_noop", batch, 2.0))
    name = "GPU, FULL step over a static graph by hand"
    pair = (FULL, "graph by hand, static")
    add(name, 0.97, "x", _between(name, main, "gpu", batch, pair, 0.97))
    name = "GPU, piecewise step over its bare loop"
    add(name, 1.02, "x", _over_floor(name, main, PIECES, "gpu", batch, 1.02))
    add(_SITE, 6.0, "us", lambda: _site(main, batch))
    name = "host, step without graphs over torch.compile"
    pair = ("cgcompile without graphs", "torch.compile dynamic")
    add(name, 1.10, "x", _between(name, main, "host", batch, pair, 1.10))
    add(_COLD, 4.0, "s", lambda: _cold(main))
    captures = (
        ("capture of 20 sizes, piecewise", PIECES, "seconds", 0.30, "s", 1.0),
        ("capture of 20 sizes, FULL", FULL, "seconds", 0.13, "s", 1.0),
        ("device memory of 20 sizes, piecewise", PIECES, "device_bytes", 148.0, "MB", MB),
        ("device memory of 20 sizes, FULL", FULL, "device_bytes", 52.0, "MB", MB),
    )
    for name, variant, what, limit, unit, per in captures:
        add(name, limit, unit, _captured(name, main, variant, what, limit, unit, per))
    return [_tried(*row) for row in rows]


def _tried(name: str, limit: float, unit: str, goal: Callable[[], Goal]) -> Goal:
    try:
        return goal()
    except Missing as error:
        return Goal(name, None, limit, unit, str(error))
