"""The rows of the zoo as text, as JSON, and as the tables of the README."""

import json
from collections import Counter, defaultdict
from typing import Any

OPENS, CLOSES = "<!-- zoo -->\n", "<!-- end of zoo -->"
OUTCOMES = ("right", "wrong", "refused", "error", "crash", "time-out")
TITLES = {"compile": "`torch.compile`", "traced": "traced once", "decode": "static cache"}
Row = dict[str, Any]


def line(row: Row) -> str:
    """One row as it comes."""
    splitting = "" if row["splitting"] == "fx" else f" ({row['splitting']})"
    breaks = f", {row['breaks']} breaks" if row["breaks"] else ""
    found = (
        f"{row['way']:8} {row['name']:32} {row['outcome']:8} {row['replayed']:4.0%}"
        f" of {row['calls']}, {row['graphs']} graphs, {row['captures']} captures{breaks}"
        f", off {row['difference']:.1e}, {row['seconds']:.1f} s{splitting}"
    )
    return f"{found}  {row['detail']}" if row["detail"] else found


def text(found: dict[str, Any]) -> str:
    """All rows and the sums of their outcomes."""
    rows = [line(row) for row in found["rows"]]
    for way, outcomes in sums(found["rows"]).items():
        counts = ", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name])
        rows.append(f"{way}: {counts}; {share(found['rows'], way)} of calls replayed")
    rows.append(f"{len(found['entries'])} architectures in {found['machine']['seconds']} s")
    return "\n".join(rows)


def sums(rows: list[Row]) -> dict[str, Counter[str]]:
    """How many rows of each way have which outcome."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        found[row["way"]][row["outcome"]] += 1
    return dict(found)


def share(rows: list[Row], way: str) -> str:
    """Replayed calls among those after the warm rounds, of right rows."""
    right = [row for row in rows if row["way"] == way and row["outcome"] == "right"]
    calls = sum(row["calls"] for row in right)
    return f"{sum(row['replayed'] * row['calls'] for row in right) / max(calls, 1):.0%}"


def dumped(found: dict[str, Any]) -> str:
    """As JSON, a line for each row, so that differences can be read."""
    parts = [f'"machine": {json.dumps(found["machine"])}']
    for name in ("entries", "rows"):
        lines = ",\n".join(json.dumps(row) for row in found[name])
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---------------------------------------------------------------- README


def markdown(found: dict[str, Any]) -> str:
    """What stands between the marks of the README."""
    machine, rows, entries = found["machine"], found["rows"], found["entries"]
    ways = [way for way in TITLES if any(row["way"] == way for row in rows)]
    by_task = {(row["name"], row["way"]): row for row in rows}
    kinds = list(dict.fromkeys(entry["kind"] for entry in entries))
    head = ["kind", "architectures", *(TITLES[way] for way in ways)]
    made = [*_header(head)]
    for kind in kinds:
        names = {entry["name"] for entry in entries if entry["kind"] == kind}
        some = [row for row in rows if row["name"] in names]
        made.append(_cells([kind, len(names), *(_sum(some, way) for way in ways)]))
    made.append(_cells(["all", len(entries), *(_sum(rows, way) for way in ways)]))
    made += [
        "",
        f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"timm {machine['timm']}, pieces by {machine['compiler']}; {machine['seconds']} s with "
        f"{machine['workers']} workers.",
        "",
        "<details><summary>Each architecture</summary>",
        "",
        *_header(["architecture", "structure", *(TITLES[way] for way in ways)]),
    ]
    for entry in entries:
        cells = [_cell(by_task.get((entry["name"], way))) for way in ways]
        made.append(_cells([entry["name"], entry["structure"], *cells]))
    return "\n".join([*made, "", "</details>", ""])


def into(readme: str, found: dict[str, Any]) -> str:
    """The README with these tables between its marks."""
    before, rest = readme.split(OPENS)
    _, after = rest.split(CLOSES)
    return before + OPENS + markdown(found) + CLOSES + after


def _header(titles: list[str]) -> list[str]:
    return [_cells(titles), "|" + "---|" * len(titles)]


def _cells(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _sum(rows: list[Row], way: str) -> str:
    outcomes = sums(rows).get(way)
    if outcomes is None:
        return ""
    counts = ", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name])
    return f"{counts}; {share(rows, way)} replayed"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    words = [row["outcome"]]
    if row["outcome"] == "right":
        words.append(f"{row['replayed']:.0%}")
    if row["splitting"] != "fx":
        words.append(f"({row['splitting']})")
    if row["outcome"] != "right" or row["replayed"] < 1:
        reasons = [name for name in row["reasons"] if name != "captured"]
        words.append(", ".join(f"`{name}`" for name in reasons) or row["detail"].split(":")[0])
    return " ".join(words).strip()
