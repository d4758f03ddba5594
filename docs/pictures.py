"""The drawings of the documentation: concepts, measured figures, and a model that runs.

Those of :data:`MEASURED` are drawn by ``cgcompile.debug.drawing``, as the pages of results are.
The rule: a drawing of a concept is a list of shapes, in the colors of the page around it.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from cgcompile.debug import drawing
from cgcompile.debug.output import duration

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "examples" / "benchmarks" / "results" / "h200.json"


INK = "currentColor"  # as the page around it, light or dark
KINDS = {"captured": "#3b82f6", "eager": "#d97706", "memory": "#10b981", "none": "#8b949e"}


def text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle") -> str:
    """Lines of text, centered vertically around ``y``."""
    lines = words.split("\n")
    top = y + size * 0.35 - (len(lines) - 1) * size * 0.62
    return "".join(
        f'<text x="{x:g}" y="{top + row * size * 1.24:g}" font-size="{size}" '
        f'text-anchor="{anchor}" fill="{INK}">{escape(line)}</text>'
        for row, line in enumerate(lines)
    )


def box(x: float, y: float, width: float, height: float, words: str, kind: str = "none") -> str:
    """A box with text in it, in the color of its kind."""
    color = KINDS[kind]
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{color}" fill-opacity="0.18" stroke="{color}"/>'
        + text(x + width / 2, y + height / 2, words)
    )


def arrow(x1: float, y1: float, x2: float, y2: float, words: str = "") -> str:
    """An arrow, with text beside its middle."""
    across = abs(x2 - x1) > abs(y2 - y1)
    middle = (x1 + x2) / 2, (y1 + y2) / 2
    place = (middle[0], middle[1] - 9) if across else (middle[0] + 8, middle[1])
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    beside = text(*place, words, size=12, anchor="middle" if across else "start")
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"/>'
    tip = (
        f'<path d="M0 0 -8 4 -8 -4z" fill="{INK}" '
        f'transform="translate({x2:g} {y2:g}) rotate({angle:.1f})"/>'
    )
    return line + tip + (beside if words else "")


# ---------------------------------------------------------------- concepts


class Drawing(NamedTuple):
    """A picture: what it shows, in words, its size and its shapes."""

    title: str
    width: int
    height: int
    shapes: tuple[str, ...]

    def svg(self) -> str:
        """Return the drawing as SVG."""
        body = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(self.title)}" font-family="system-ui, sans-serif" '
            f'style="max-width: {self.width}px; width: 100%">\n{body}\n</svg>\n'
        )


def sequence(y: float) -> tuple[str, ...]:
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
    ("debug, cli, integrations", "none"),
    ("serving, encoder", "memory"),
    ("compile, backend, registry", "eager"),
    ("runtime, tracing", "captured"),
    ("pieces, testing", "captured"),
    ("graphs, passes", "captured"),
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
        arrow(600, 20, 600, 350, "imports"),
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


# ---------------------------------------------------------------- a model that runs

SERVED = ROOT / "docs" / "howto" / "batching.md"
_MEASURE = """
again = [Request(list(request.prompt), request.num_new) for request in requests]
with cgcompile.debug.profile(manager) as measured:
    serve(again)
found = cgcompile.debug.report(manager, profile=measured)
open("report.json", "w").write(found.to_json())
"""


def blocks(page: Path) -> list[str]:
    """Return the Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@functools.cache
def served() -> dict[str, Any]:
    """Serve the requests of a page in a new interpreter, and return the report of its manager."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": path, "CGCOMPILE_COMPILER": "eager", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batching.py"  # torch reads the source of what it traces
        code = [block for block in blocks(SERVED) if "generate(" not in block]
        file.write_text("\n\n".join([*code, _MEASURE]))
        command, environment = [sys.executable, str(file)], {**os.environ, **settings}
        ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(ran.stderr)
        found: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return found


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


def before_after() -> str:
    """Draw the host and the device in an eager step and in one of a FULL graph."""
    rows, what = _decode_steps()
    lanes = {}
    for words, name in (("eager", "eager"), ("one replay", "cgcompile FULL")):
        whole = rows[name]["wall"]
        for where, metric, kind in (("host", "host", "on soft"), ("device", "gpu", "on")):
            busy = rows[name][metric]
            text = f"{words}, {where}: busy {_time(busy)} of {_time(whole)}"
            lanes[text] = [
                drawing.Span(busy, text, kind),
                drawing.Span(whole - busy, f"{where} idle: {_time(whole - busy)}", "off"),
            ]
    return drawing.lanes_svg(lanes, f"{what}: eager and replayed")


def backends() -> str:
    """Draw the time of a step by each backend."""
    rows, what = _decode_steps()
    lanes = {}
    for name in SHOWN:
        wall, host = rows[name]["wall"], rows[name]["host"]
        text = f"{name}: {_time(wall)}"
        kind = "on" if name.startswith("cgcompile") else "on soft"
        lanes[text] = [drawing.Span(wall, f"{text}, host part {_time(host)}", kind)]
    return drawing.lanes_svg(lanes, f"{what}, by backend")


def _decode_steps() -> tuple[dict[str, Any], str]:
    """Return the measured rows of batch 8, and what they are of."""
    found = json.loads(RESULTS.read_text())
    machine = f"{found['machine']['device']}, torch {found['versions']['torch']}"
    rows: dict[str, Any] = found["models"]["main"]["batches"]["8"]["rows"]
    return rows, f"One decode step, batch 8, {machine}"


def _time(microseconds: float) -> str:
    return duration(microseconds / 1e6)


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


# ---------------------------------------------------------------- all

MEASURED: dict[str, Callable[[], str]] = {
    "split": lambda: drawing.split_svg(served()["graphs"][0]["pieces"], "The pieces of a decoder"),
    "steps": lambda: drawing.steps_svg(served()["segments"], "Segments of replayed steps in order"),
    "sizes": lambda: drawing.sizes_svg(served()["steps"], "Memory of recorded steps by size"),
    "traffic": lambda: drawing.histogram_svg(
        served()["coverage"]["rows"], "steps", "Batches over the graphs that served them"
    ),
    "before_after": before_after,
    "backends": backends,
}


def inline(name: str) -> str:
    """Return a drawing for a page: of a concept in its text color, else of :data:`MEASURED`."""
    return DRAWINGS[name].svg() if name in DRAWINGS else MEASURED[name]()


def head() -> str:
    """Return the style and the pattern of :data:`MEASURED`, once for a page."""
    style = drawing.style().replace(
        "@media (prefers-color-scheme: dark)", 'html[data-theme="dark"]'
    )
    style = style.replace("  color-scheme: light dark;\n", "").replace(":root", ".picture")
    return f"<style>{style}\n.picture {{ margin: 1rem 0 1.5rem; }}</style>{drawing.HATCH}"
