"""The rows of the zoo as text, as JSON, and as the table of ``docs/measurements.md``."""

import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

OPENS, CLOSES = "<!-- zoo -->\n", "<!-- end of zoo -->"
NOTHING = "No rows are kept yet: `python examples/benchmarks/zoo.py` measures them.\n"
OUTCOMES = ("right", "wrong", "refused", "error", "crash", "time-out")
TITLES = {"compile": "`torch.compile`", "traced": "traced once", "decode": "static cache"}
Row = dict[str, Any]


def line(row: Row) -> str:
    """One row as it comes."""
    splitting = "" if row["splitting"] == "fx" else f" ({row['splitting']})"
    breaks = f", {row['breaks']} breaks" if row["breaks"] else ""
    error = row.get("error", 0.0)
    error = f", error {error:.3f} x {row['eager_error']:.1e}" if error else ""
    summary = (
        f"{row['way']:8} {row['name']:32} {row['outcome']:8} {row['replayed']:4.0%}"
        f" of {row['calls']}, {row['graphs']} graphs, {row['captures']} captures{breaks}"
        f", off {row['difference']:.1e}{error}, {row['seconds']:.1f} s{splitting}"
    )
    return f"{summary}  {row['detail']}" if row["detail"] else summary


def text(result: dict[str, Any]) -> str:
    """All rows and the sums of their outcomes."""
    rows = [line(row) for row in result["rows"]]
    rows += [f"{way:8} {name:32} not run" for name, way in result["not_run"]]
    for way, outcomes in sums(result["rows"]).items():
        rows.append(f"{way}: {counts(outcomes)}; {share(result['rows'], way)} of calls replayed")
    rows.append(f"{len(result['entries'])} architectures in {result['machine']['seconds']} s")
    return "\n".join(rows)


def sums(rows: list[Row]) -> dict[str, Counter[str]]:
    """How many rows of each way have which outcome; what is not there does not count."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for row in there(rows):
        outcomes[row["way"]][row["outcome"]] += 1
    return dict(outcomes)


def there(rows: Iterable[Row]) -> list[Row]:
    """Rows of architectures that the installed libraries have."""
    return [row for row in rows if row["outcome"] != "not there"]


def counts(outcomes: Counter[str]) -> str:
    """Such as ``3 right, 1 refused``."""
    return ", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name])


def share(rows: list[Row], way: str) -> str:
    """Replayed calls among those after the warm rounds, of right rows."""
    right = [row for row in rows if row["way"] == way and row["outcome"] == "right"]
    calls = sum(row["calls"] for row in right)
    return f"{sum(row['replayed'] * row['calls'] for row in right) / max(calls, 1):.0%}"


def dumped(result: dict[str, Any]) -> str:
    """As JSON, a line for each row, so that differences can be read."""
    parts = [f'"machine": {json.dumps(result["machine"])}']
    for name in ("entries", "rows", "not_run"):
        lines = "".join(f"\n{json.dumps(row)}," for row in result[name]).removesuffix(",")
        parts.append(f'"{name}": [{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---------------------------------------------------------------- docs


def markdown(result: dict[str, Any] | None) -> str:
    """Return the text between the marks of the page; ``result`` is None if nothing was measured."""
    if result is None:
        return NOTHING
    rows = there(result["rows"])
    ways = [way for way in TITLES if any(row["way"] == way for row in rows)]
    lines = [*_totals(result, rows, ways), *_table(result["entries"], rows, ways)]
    bad = [row for row in rows if row["outcome"] != "right"]
    return "\n".join([*lines, "", *_reasons(bad)]).rstrip("\n") + "\n"


def into(page: str, result: dict[str, Any] | None) -> str:
    """Return the page with this between its marks."""
    before, rest = page.split(OPENS)
    _, after = rest.split(CLOSES)
    return before + OPENS + markdown(result) + CLOSES + after


def _totals(result: dict[str, Any], rows: list[Row], ways: list[str]) -> list[str]:
    machine, by_way = result["machine"], sums(rows)
    names = {row["name"] for row in rows}
    missing = len(result["not_run"])
    return [
        f"{len(names)} architectures in {len(rows)} rows: {counts(sum(by_way.values(), Counter()))}"
        + (f"; {missing} not run." if missing else "."),
        "",
        *(
            f"* {TITLES[way]}: {counts(by_way[way])}; {share(rows, way)} of calls of right rows "
            "replayed"
            for way in ways
        ),
        "",
        f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"timm {machine['timm']}, pieces by {machine['compiler']}; {machine['seconds']} s with "
        f"{machine['workers']} workers.",
        "",
    ]


def _table(entries: list[Row], rows: list[Row], ways: list[str]) -> list[str]:
    """Architectures of one kind share a row where all their cells are equal."""
    by_task = {(row["name"], row["way"]): row for row in rows}
    same: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for entry in entries:
        cells = [_cell(by_task.get((entry["name"], way))) for way in ways]
        if any(cells):
            same[(entry["kind"], *cells)].append(entry["name"])
    body = [[kind, ", ".join(names), *cells] for (kind, *cells), names in same.items()]
    head = ["kind", "architectures", *(TITLES[way] for way in ways)]
    return [_cells(head), "|" + "---|" * len(head), *map(_cells, body)]


def _reasons(rows: list[Row]) -> list[str]:
    """Why rows are not right; a reason that differs in numbers alone is named once."""
    same: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        same[row["outcome"], re.sub(r"\d+", "0", _why(row))].append(row)
    lines = []
    for (outcome, _), some in same.items():
        names: dict[str, list[str]] = defaultdict(list)
        for row in some:
            names[TITLES[row["way"]]].append(row["name"])
        whom = "; ".join(f"{', '.join(each)} ({title})" for title, each in names.items())
        lines.append(f"* {outcome}: {whom}: {_why(some[0])}")
    return lines


def _why(row: Row) -> str:
    """In a few words; of several refusals that of the breakable capture: it names op and line."""
    parts = row["detail"].split("; ")
    captures = [part for part in parts if part.startswith("breakable: ")]
    return textwrap.shorten((captures or parts)[0].removeprefix("breakable: "), 140)


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["outcome"] != "right":
        return str(row["outcome"])
    words = [f"right {row['replayed']:.0%}"]
    if row["splitting"] != "fx":
        words.append(f"({row['splitting']})")
    if row["replayed"] < 1:
        words.append(", ".join(f"`{name}`" for name in row["reasons"] if name != "captured"))
    return " ".join(words).strip()
