"""The result of ``compare.py`` as text: tables for a terminal, Markdown for the docs."""

from collections.abc import Iterator, Sequence
from typing import Any

from rivals.budget import budget

COLUMNS = {  # heading: (metric, whether of the floor)
    "host, no attention": ("host_noop", False),
    "its floor": ("host_noop", True),
    "host": ("host", False),
    "floor": ("host", True),
    "GPU": ("gpu", False),
    "floor ": ("gpu", True),
    "wall": ("wall", False),
}
Table = list[Sequence[str]]


def text_table(rows: Table) -> str:
    """Columns as wide as they need; the first on the left, the others on the right."""
    widths = [max(len(each) for each in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [each.rjust(width) for each, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Table) -> str:
    head, *body = rows
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _microseconds(value: float | None) -> str:
    return _cell(value, 0 if value is None or value >= 100 else 1)


def _scaled(row: dict[str, Any], key: str, per: float, digits: int) -> str:
    return _cell(row[key] / per if key in row else None, digits)


def step_table(model: dict[str, Any], batch: str) -> Table:
    """Microseconds of a step by variant."""
    rows: Table = [["us of a step", *COLUMNS, "a piece over its floor"]]
    measured = model["batches"][batch].get("rows", {})
    for name in model["variants"]:
        row = measured.get(name)
        if row is None:
            continue
        cells = [
            (row.get("floor", {}) if floor else row).get(metric)
            for metric, floor in COLUMNS.values()
        ]
        above = _above_floor(row, model["variants"][name].get("capture", {}).get("graphs", 1))
        rows.append([name, *map(_microseconds, cells), _cell(above, 2)])
    return rows


def _above_floor(row: dict[str, Any], graphs: int) -> float | None:
    """Microseconds of the host for each graph, beyond the bare loop."""
    own, floor = (each.get("host_noop") for each in (row, row.get("floor", {})))
    return None if own is None or floor is None else (own - floor) / graphs


def capture_table(model: dict[str, Any]) -> Table:
    rows: Table = [["capture", "sizes", "graphs of a size", "s", "pool MB", "device MB"]]
    for name, about in model["variants"].items():
        capture = about.get("capture")
        if capture:
            rows.append(
                [
                    name,
                    f"{capture['sizes']} of {len(model['sizes'])}",
                    str(capture["graphs"]),
                    f"{capture['seconds']:.3f}",
                    f"{capture['pool_bytes'] / 1e6:.0f}",
                    f"{capture['device_bytes'] / 1e6:.0f}",
                ]
            )
    return rows


def start_table(starts: dict[str, Any]) -> Table:
    rows: Table = [["first call", "cold s", "warm s"]]
    for name, start in starts.items():
        rows.append([name, _scaled(start, "cold", 1, 2), _scaled(start, "warm", 1, 2)])
    return rows


def budget_table(result: dict[str, Any]) -> Table:
    rows: Table = [["budget, batch 8", "is", "at most", "", "figures"]]
    for goal in budget(result):
        limit = f"{goal.limit:g} {goal.unit}"
        rows.append([goal.name, _cell(goal.value, 3), limit, goal.verdict, goal.about])
    return rows


def troubles(result: dict[str, Any]) -> Iterator[str]:
    """What was left out, or failed, and why."""
    for title, model in result.get("models", {}).items():
        for trouble in (*_of_variants(model), *_of_batches(model)):
            yield f"{title}: {trouble}"
        if not model.get("complete"):
            yield f"{title}: ended before it was done"
    for name, about in result.get("starts", {}).items():
        for key in ("cold_error", "warm_error"):
            if key in about:
                yield f"start of {name}: {about[key].strip().splitlines()[-1]}"
    yield from result.get("notes", ())


def _of_variants(model: dict[str, Any]) -> Iterator[str]:
    for name, about in model.get("variants", {}).items():
        if "left_out" in about:
            yield f"{name} was left out: {about['left_out']}"
        for failure in about.get("failures", ()):
            yield f"{name} FAILED: {failure}"
        for missing in about.get("capture", {}).get("missing", ()):
            yield f"{name} has no graph of {missing}"


def _of_batches(model: dict[str, Any]) -> Iterator[str]:
    for batch, measured in model.get("batches", {}).items():
        if "error" in measured:
            yield f"batch {batch}: {measured['error']}"
        for name, row in measured.get("rows", {}).items():
            for what, about in ((name, row), (f"floor of {name}", row.get("floor", {}))):
                if "error" in about:
                    yield f"{what}, batch {batch}, FAILED: {about['error']}"


def machine_line(result: dict[str, Any]) -> str:
    about = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"{about['device']}, {about['cpu']}, {about['cores']} cores; {versions}; {result['date']}"
    )


def model_line(model: dict[str, Any]) -> str:
    dims = model["dims"]
    return (
        f"{dims['layers']} layers ({model['pieces']} pieces), hidden {dims['hidden']}, "
        f"{dims['heads']}/{dims['kv_heads']} heads, context {dims['context']}, {model['dtype']}"
    )


def pace_text(measured: dict[str, Any]) -> str:
    paces = measured.get("pace") or []
    if not paces:
        return ""
    return f", pace {min(paces):.3f} to {max(paces):.3f} of the probe's first"


def whole_text(result: dict[str, Any]) -> str:
    """Everything, for a terminal."""
    parts = [machine_line(result)]
    for title, model in result.get("models", {}).items():
        parts.append(f"{title}: {model_line(model)}")
        for batch, measured in model.get("batches", {}).items():
            steps = measured.get("steps", 0)
            parts.append(f"{title}, batch {batch}, {steps} samples{pace_text(measured)}")
            parts.append(text_table(step_table(model, batch)))
        if any("capture" in about for about in model.get("variants", {}).values()):
            parts.append(text_table(capture_table(model)))
    if result.get("starts"):
        parts.append(text_table(start_table(result["starts"])))
    if any(model["device"] == "cuda" for model in result.get("models", {}).values()):
        parts.append(text_table(budget_table(result)))
    parts.append("\n".join(troubles(result)))
    return "\n\n".join(parts).rstrip()
