"""The result of ``generate_time.py`` as tables: for a terminal, for the docs and for the README."""

import math
from typing import Any, NamedTuple

from rivals.report import Table, markdown_table

Row = dict[str, Any]
SAME = ("card", "torch", "transformers", "cgcompile")  # of results that can be joined
COMMAND = "python examples/benchmarks/generate_time.py"


class Cell(NamedTuple):
    """Rows, positions of the cache, and positions in use."""

    rows: int
    cache: int
    used: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.used} of {self.cache}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def label(row: Row) -> str:
    return f"{row['model']}, {Cell(*row['cell'])}"


def joined(before: Row, result: Row) -> Row:
    """Return a result with the rows of an earlier one that it has not measured again.

    Raises:
        ValueError: they are of different machines or versions.
    """
    if not before:
        return result
    if differing := [name for name in SAME if before[name] != result[name]]:
        raise ValueError(f"the file has figures of another {', '.join(differing)}: name another")

    def key(row: Row) -> tuple[Any, ...]:
        names = ("part", "model", "way", "start")
        return (tuple(row["cell"]), *(row.get(name) for name in names))

    again = {key(row) for row in result["rows"]}
    rows = [row for row in before["rows"] if key(row) not in again]
    named = {
        name: list(dict.fromkeys((*before[name], *result[name]))) for name in ("models", "ways")
    }
    return {**result, **named, "rows": rows + result["rows"]}


def in_order(result: Row, part: str) -> list[Row]:
    """Return the rows of a part that did not fail, by model, cell and way as they were named."""
    models, ways = result["models"], result["ways"]
    rows = [row for row in result["rows"] if row["part"] == part and "failure" not in row]
    return sorted(
        rows,
        key=lambda row: (
            *(models.index(row["model"]), *row["cell"]),
            *(ways.index(row["way"]), row.get("start", "")),
        ),
    )


def step_table(result: Row) -> Table:
    """Return milliseconds of the GPU by way, beside the floor of each model and cell."""
    columns = ("GPU ms", "x floor", "products", "attention", "rest", "kernels", "error / eager's")
    rows: Table = [["a step: rows x used of cache", "way", *columns, "probe, us"]]
    before = ""
    for row in in_order(result, "step"):
        floor = row["floor_ms"]
        if label(row) != before:
            before = label(row)
            rows.append([before, "floor", number(floor), *[""] * 7])
        gpu, kinds = row.get("gpu_ms"), row.get("kinds", {})
        cells = [number(gpu), number(None if gpu is None else gpu / floor, 2)]
        cells += [number(kinds.get(kind)) for kind in ("products", "attention", "rest")]
        cells += [number(row.get("kernels"), 0), number(row["error"] / row["eager_error"], 2)]
        way = row["way"] if row.get("quiet", True) else f"{row['way']} (beside others)"
        rows.append(["", way, *cells, number(row.get("probe_us"), 0)])
    return rows


def text_table_of(result: Row, part: str, heading: str, figure: str, digits: int) -> Table:
    """Return one row for each model and cell, one column for each way (and start)."""
    rows = in_order(result, part)
    columns = [f"{row['way']} {row.get('start', '')}".strip() for row in rows]
    columns = list(dict.fromkeys(columns))
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        column = f"{row['way']} {row.get('start', '')}".strip()
        table.setdefault(label(row), {})[column] = number(row[figure], digits)
    body: Table = [
        [name, *(cells.get(column, "-") for column in columns)] for name, cells in table.items()
    ]
    return [[heading, *columns], *body]


def tables(result: Row) -> list[Table]:
    """Return the tables of the parts that were measured."""
    every = [
        step_table(result),
        text_table_of(result, "generate", "ms a token: rows x used of cache", "token_ms", 2),
        text_table_of(result, "first", "first text, s: rows x used of cache", "first_s", 1),
    ]
    return [table for table in every if len(table) > 1]


def about_text(result: Row) -> str:
    return (
        f"{result['card']}, torch {result['torch']}, transformers {result['transformers']}, "
        f"cgcompile {result['cgcompile']}, {result['bandwidth'] / 1e12:.2f} TB/s, bfloat16, "
        f"{result['date']}"
    )


def section(result: Row) -> str:
    """Return the Markdown of ``docs/performance.md``."""
    parts = [f"{about_text(result)}; `{COMMAND}`.", *map(markdown_table, tables(result))]
    return "\n\n".join(parts) + "\n"


def short_section(result: Row, cache: int = 1024, used: int = 200) -> str:
    """Return the Markdown of the README: each model, the numbers of rows beside each other.

    A column without a figure is left out.
    """
    columns = {  # heading: (part, way, figure, digits)
        "floor of a step": ("step", "cgcompile", "floor_ms", 2),
        "GPU, `reduce-overhead`": ("step", "reduce-overhead", "gpu_ms", 2),
        "GPU, cgcompile": ("step", "cgcompile", "gpu_ms", 2),
        "a token, `reduce-overhead`": ("generate", "reduce-overhead", "token_ms", 2),
        "a token, cgcompile": ("generate", "cgcompile", "token_ms", 2),
        "a token, `custom_generate`": ("generate", "custom_generate", "token_ms", 2),
    }
    rows = [
        row
        for row in result["rows"]
        if tuple(row["cell"][1:]) == (cache, used) and "failure" not in row
    ]
    counts = sorted({row["cell"][0] for row in rows})
    figures = {
        (row["part"], row["model"], row["way"], row["cell"][0]): row
        for row in rows
        if row["part"] != "first"
    }
    measured = {(part, way, name) for (part, _, way, _), row in figures.items() for name in row}
    columns = {text: what for text, what in columns.items() if what[:3] in measured}
    numbers = " / ".join(map(str, counts))
    table: Table = [[f"decoder, ms at {numbers} rows", *columns]]
    for model in result["models"]:
        cells = [
            " / ".join(
                number(figures.get((part, model, way, count), {}).get(figure), digits)
                for count in counts
            )
            for part, way, figure, digits in columns.values()
        ]
        table.append([f"{model}-like", *cells])
    return markdown_table(table) + "\n"
