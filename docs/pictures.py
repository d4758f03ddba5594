"""The drawings of the documentation: boxes and arrows for concepts, bars for measured figures.

::

    python docs/pictures.py  # writes docs/pictures, from examples/benchmarks/results/h200.json

The rule: a drawing is a list of shapes; :func:`svg` makes text of it, the same at each run.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "benchmarks" / "results" / "h200.json"
FOLDER = ROOT / "docs" / "pictures"


class Palette(NamedTuple):
    """The colors of text and lines, and of each kind of box."""

    ink: str
    captured: str = "#3b82f6"
    eager: str = "#d97706"
    memory: str = "#10b981"
    none: str = "#8b949e"


INLINE = Palette("currentColor")  # as the page around it, light or dark
FILES = {"light": Palette("#1f2328"), "dark": Palette("#e6edf3")}

Shape = Callable[[Palette], str]


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle") -> Shape:
    """Lines of text, centered vertically around ``y``."""
    lines = words.split("\n")
    top = y + size * 0.35 - (len(lines) - 1) * size * 0.62

    def draw(palette: Palette) -> str:
        rows = [
            f'<text x="{x:g}" y="{top + row * size * 1.24:g}" font-size="{size}" '
            f'text-anchor="{anchor}" fill="{palette.ink}">{escape(line)}</text>'
            for row, line in enumerate(lines)
        ]
        return "".join(rows)

    return draw


def box(x: float, y: float, width: float, height: float, words: str, kind: str = "none") -> Shape:
    """A box with text in it, in the color of its kind."""
    words_in = text(x + width / 2, y + height / 2, words)

    def draw(palette: Palette) -> str:
        color = getattr(palette, kind)
        return (
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{color}" fill-opacity="0.18" stroke="{color}"/>{words_in(palette)}'
        )

    return draw


def arrow(x1: float, y1: float, x2: float, y2: float, words: str = "") -> Shape:
    """An arrow, with text beside its middle."""
    across = abs(x2 - x1) > abs(y2 - y1)
    middle = (x1 + x2) / 2, (y1 + y2) / 2
    place = (middle[0], middle[1] - 9) if across else (middle[0] + 8, middle[1])
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    beside = text(*place, words, size=12, anchor="middle" if across else "start")

    def draw(palette: Palette) -> str:
        line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{palette.ink}"/>'
        tip = (
            f'<path d="M0 0 -8 4 -8 -4z" fill="{palette.ink}" '
            f'transform="translate({x2:g} {y2:g}) rotate({angle:.1f})"/>'
        )
        return line + tip + (beside(palette) if words else "")

    return draw


def bar(x: float, y: float, width: float, height: float, kind: str) -> Shape:
    """A filled bar without text."""
    return lambda palette: (
        f'<rect x="{x:g}" y="{y:g}" width="{max(width, 1):.1f}" height="{height:g}" rx="2" '
        f'fill="{getattr(palette, kind)}"/>'
    )


def svg(title: str, width: int, height: int, shapes: Iterable[Shape], palette: Palette) -> str:
    """Return the drawing as SVG."""
    body = "\n".join(shape(palette) for shape in shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" '
        f'style="max-width: {width}px; width: 100%">\n{body}\n</svg>\n'
    )


# ---------------------------------------------------------------- concepts


class Drawing(NamedTuple):
    """A picture: what it shows, in words, its size and its shapes."""

    title: str
    width: int
    height: int
    shapes: tuple[Shape, ...]


def sequence(y: float) -> tuple[Shape, ...]:
    """The segments of a PIECEWISE step, in a row."""
    row = []
    for index, (words, kind) in enumerate(
        (
            ("graph\npiece_0", "captured"),
            ("attention\nruns eagerly", "eager"),
            ("graph\npiece_2", "captured"),
            ("attention\nruns eagerly", "eager"),
            ("graph\npiece_4", "captured"),
        )
    ):
        row.append(box(20 + index * 144, y, 116, 46, words, kind))
        if index < 4:
            row.append(arrow(138 + index * 144, y + 23, 162 + index * 144, y + 23))
    return tuple(row)


CAPTURE = Drawing(
    "One capture records the kernels of pieces; each replay launches them again",
    736,
    236,
    (
        box(20, 10, 692, 46, "forward of the model: Python code, hooks, allocations"),
        arrow(366, 58, 366, 92, "capture, once for each batch shape"),
        *sequence(96),
        text(366, 162, "each step: guards, then this row from left to right", size=12),
        box(20, 182, 692, 44, "FULL: the whole row is one graph, attention included", "captured"),
    ),
)
MEMORY = Drawing(
    "What graphs read and write: your tensors, the arena, the pool",
    736,
    216,
    (
        box(20, 20, 190, 56, "inputs\nyours, or copied", "memory"),
        box(20, 136, 190, 56, "weights\nbound by address", "memory"),
        arrow(212, 48, 268, 90),
        arrow(212, 164, 268, 122),
        box(272, 70, 200, 72, "graph\nintermediate tensors\nin the pool", "captured"),
        arrow(474, 90, 528, 48),
        arrow(474, 122, 528, 164),
        box(532, 20, 190, 56, "results\nfresh, or views", "memory"),
        box(532, 136, 190, 56, "arena: what crosses\nto the next segment", "memory"),
    ),
)
KEYS = Drawing(
    "A batch of 13 tokens is padded to the capture size 16",
    736,
    176,
    (
        *(box(20 + 30 * i, 20, 26, 34, "", "captured") for i in range(13)),
        *(box(20 + 30 * i, 20, 26, 34, "0", "none") for i in range(13, 16)),
        text(213, 70, "13 real rows", size=12),
        text(453, 70, "3 padding rows", size=12),
        arrow(252, 82, 252, 116, "the smallest capture size that holds 13"),
        *(
            box(20 + 88 * i, 120, 76, 40, str(size), "captured" if size == 16 else "none")
            for i, size in enumerate((1, 2, 4, 8, 16, 24))
        ),
        arrow(514, 37, 580, 37),
        box(584, 14, 134, 46, "13 rows\nof the result", "memory"),
    ),
)
GUARDS = Drawing(
    "Guards compare a call with the capture before its graphs are replayed",
    736,
    206,
    (
        box(20, 76, 120, 50, "call", "none"),
        arrow(142, 101, 196, 101),
        box(200, 66, 170, 70, "guards\ncompare with\nthe capture", "eager"),
        arrow(372, 80, 456, 38),
        arrow(372, 101, 456, 101),
        arrow(372, 122, 456, 164),
        box(460, 14, 256, 46, "equal: replay", "captured"),
        box(460, 78, 256, 46, "other shapes or weights:\ncapture graphs of their own", "memory"),
        box(460, 142, 256, 46, "other addresses or numbers:\nerror, copy, recapture or eager"),
    ),
)
DISPATCH = Drawing(
    "The dispatcher takes a FULL graph, else a PIECEWISE one, else none",
    736,
    190,
    (
        box(20, 20, 120, 50, "batch"),
        arrow(142, 45, 186, 45),
        box(190, 20, 150, 50, "a FULL graph\nserves it?", "eager"),
        arrow(342, 45, 416, 45, "no"),
        box(420, 20, 150, 50, "a PIECEWISE graph\nserves it?", "eager"),
        arrow(572, 45, 606, 45, "no"),
        arrow(265, 72, 265, 116, "yes"),
        arrow(495, 72, 495, 116, "yes"),
        box(190, 120, 150, 50, "FULL\npadded", "captured"),
        box(420, 120, 150, 50, "PIECEWISE\npadded", "captured"),
        box(610, 20, 112, 50, "no graph,\nunpadded", "none"),
        text(666, 90, "reason counted", size=12),
    ),
)
_FLOORS = (
    ("debug, cli", "none"),
    ("serving, encoder", "memory"),
    ("compile, backend, registry", "eager"),
    ("runtime, tracing", "captured"),
    ("pieces | graphs, passes", "captured"),
    ("boundaries, context", "none"),
    ("config, modes, reasons, errors", "none"),
    ("torch_compat", "none"),
)
FLOORS = Drawing(
    "The floors: a room imports those below it only",
    736,
    10 + 40 * len(_FLOORS),
    (
        *(box(140, 8 + 40 * i, 420, 34, words, kind) for i, (words, kind) in enumerate(_FLOORS)),
        arrow(600, 20, 600, 310, "imports"),
    ),
)
DRAWINGS = {
    "capture": CAPTURE,
    "memory": MEMORY,
    "keys": KEYS,
    "guards": GUARDS,
    "dispatch": DISPATCH,
    "floors": FLOORS,
}


def inline(name: str) -> str:
    """Return one of :data:`DRAWINGS` for a page, whose text color it takes."""
    return svg(*DRAWINGS[name], INLINE)


# ---------------------------------------------------------------- figures

SHOWN = (
    "eager",
    "torch.compile dynamic",
    "reduce-overhead",
    "piecewise-cuda-graphs over torch.compile",
    "cgcompile without graphs",
    "cgcompile piecewise",
    "cgcompile FULL",
)


def steps(found: dict[str, Any], title: str, model: str = "main", batch: str = "8") -> Drawing:
    """Bars of the wall time and of the host time of a step, in milliseconds."""
    rows = found["models"][model]["batches"][batch]["rows"]
    shapes: list[Shape] = []
    for column, (metric, label) in enumerate((("wall", "step, ms"), ("host", "host part, ms"))):
        left, width = 330 + column * 250, 160
        longest = max(rows[name][metric] for name in SHOWN)
        shapes.append(text(left, 14, label, anchor="start"))
        for row, name in enumerate(SHOWN):
            value, y = rows[name][metric], 32 + row * 28
            kind = "captured" if name.startswith("cgcompile") else "none"
            long = value / longest * width
            shapes.append(bar(left, y, long, 18, kind))
            shapes.append(
                text(left + max(long, 1) + 6, y + 9, f"{value / 1e3:.2f}", anchor="start")
            )
            if column == 0:
                shapes.append(text(320, y + 9, name, anchor="end"))
    return Drawing(title, 800, 40 + 28 * len(SHOWN), tuple(shapes))


def files() -> dict[str, str]:
    """Return the pictures of the figures by the name of their file."""
    found = json.loads(RESULTS.read_text())
    machine = f"{found['machine']['device']}, torch {found['versions']['torch']}"
    title = f"One decode step, batch 8, {machine}"
    drawing = steps(found, title)
    return {f"steps-{name}.svg": svg(*drawing, palette) for name, palette in FILES.items()}


def table() -> Iterator[str]:
    """The measured steps, in Markdown, of the results that are kept in the repository."""
    found = json.loads(RESULTS.read_text())
    model = found["models"]["main"]
    dims = model["dims"]
    machine, versions = found["machine"], found["versions"]
    yield (
        f"{machine['device']}, {machine['cores']} cores; torch {versions['torch']}, CUDA "
        f"{versions['cuda']}, driver {versions['driver']}, cgcompile {versions['cgcompile']}; "
        f"{found['date']}. A decoder of {dims['layers']} layers ({model['pieces']} pieces), hidden "
        f"size {dims['hidden']}, context {dims['context']}, {model['dtype']}. Medians, in "
        "microseconds.\n"
    )
    yield "| batch | variant | host | its floor | GPU | step |\n|---|---|---:|---:|---:|---:|"
    for batch, measured in sorted(model["batches"].items(), key=lambda item: int(item[0])):
        for name in SHOWN:
            if row := measured["rows"].get(name):
                floor = (row.get("floor") or {}).get("host")
                cells = [row.get("host"), floor, row.get("gpu"), row.get("wall")]
                shown = ("-" if cell is None else f"{cell:,.{cell < 100:d}f}" for cell in cells)
                yield f"| {batch} | {name} | {' | '.join(shown)} |"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, picture in files().items():
        (FOLDER / name).write_text(picture)


if __name__ == "__main__":
    main()
