"""Write the figures of pages from a result of ``compare.py`` or of ``generate_time.py``.

::

    python examples/benchmarks/figures_table.py results.json  # docs/measurements.md
    python examples/benchmarks/figures_table.py               # the same, from results/h200.json
    python examples/benchmarks/figures_table.py generate.json # docs/performance.md and README.md

A section is between two comments and is made of the JSON alone. That of ``compare.py``: machine,
versions, date, the times of a step of 32 layers at batch 8, what capturing costs, and each row of
the budget. A result of ``generate_time.py`` is kept as ``results/generate.json``, without the
kernels of its steps and without what failed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rivals import decoders
from rivals.budget import budget
from rivals.report import (
    Table,
    capture_table,
    machine_line,
    markdown_table,
    model_line,
    pace_text,
    start_table,
    step_table,
    troubles,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measurements.md"
RESULTS = Path(__file__).resolve().parent / "results" / "h200.json"
GENERATE = RESULTS.with_name("generate.json")
DECODERS: dict[Path, Callable[[dict[str, Any]], str]] = {  # sections of GENERATE
    ROOT / "docs" / "performance.md": decoders.section,
    ROOT / "README.md": decoders.short_section,
}
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NOTHING = "No figures are kept yet: `python examples/benchmarks/compare.py` measures them.\n"
MODEL, BATCH = "main", "8"


def goal_table(result: dict[str, Any]) -> Table:
    """The budget, without the figures behind it."""
    rows: Table = [["goal", "is", "at most", "verdict"]]
    for goal in budget(result):
        value = "-" if goal.value is None else f"{goal.value:.2f} {goal.unit}"
        rows.append([goal.name, value, f"{goal.limit:g} {goal.unit}", goal.verdict])
    return rows


def section(result: dict[str, Any]) -> str:
    """The Markdown for one result."""
    model = result["models"][MODEL]
    measured = model["batches"][BATCH]
    parts = [
        f"{machine_line(result)}. One decode step, batch {BATCH}, {model_line(model)}; "
        f"medians of {measured['steps']} samples{pace_text(measured)}. *Floor*: a bare loop over "
        "the very same graphs and op, with the same kind of call.",
        markdown_table(step_table(model, BATCH)),
        markdown_table(capture_table(model)),
    ]
    if result["starts"]:
        parts.append(markdown_table(start_table(result["starts"])))
    parts.append(markdown_table(goal_table(result)))
    bad = list(troubles(result))
    if bad:
        parts.append("\n".join(f"* {each}" for each in bad))
    return "\n\n".join(parts) + "\n"


def section_of(file: Path) -> str:
    """Return the Markdown of a file of results; :data:`NOTHING` without the file."""
    return section(json.loads(file.read_text())) if file.exists() else NOTHING


def between(page: str) -> str:
    """Return the text between the two comments.

    Raises:
        ValueError: the comments are not there, once and in order.
    """
    before, opened, rest = page.partition(f"{BEGIN}\n")
    inner, closed, after = rest.partition(END)
    if not (opened and closed) or BEGIN in rest or END in before + after:
        raise ValueError(f"expected one {BEGIN} and one {END} after it, each on a line")
    return inner


def with_section(page: str, text: str) -> str:
    """Return the page with another text between the two comments."""
    return page.replace(f"{BEGIN}\n{between(page)}{END}", f"{BEGIN}\n{text}{END}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The figures of a page.")
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE, help="of a result of compare.py")
    args = parser.parse_args(argv)
    result = json.loads(args.file.read_text()) if args.file.exists() else {}
    if "rows" not in result:
        args.page.write_text(with_section(args.page.read_text(), section_of(args.file)))
        return 0
    result["rows"] = [row for row in result["rows"] if "failure" not in row]
    for row in result["rows"]:
        row.pop("timeline", None)
    GENERATE.write_text(json.dumps(result, indent=1) + "\n")
    for page, text_of in DECODERS.items():
        page.write_text(with_section(page.read_text(), text_of(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
