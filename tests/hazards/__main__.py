"""Print the table of hazards as it is: ``python -m tests.hazards [--device cuda] [ROW ...]``."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from hazards.table import TABLE, library
from lib.dynamo import guards_of_later_torch
from lib.front_ends import COLUMNS
from lib.hazards import ABSENT, Row, cell, observe


def observed(row: Row, name: str, device: str) -> str:
    """Return the outcome of a cell as text, and what is expected where it differs."""
    expected = row.outcome(name, device)
    if expected is ABSENT or device not in row.devices:
        return ABSENT
    torch._dynamo.reset()
    try:
        text = cell(observe(row, name, device))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return text if cell(expected).startswith(text) else f"{text} (expected {cell(expected)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("rows", nargs="*", help="parts of the names of rows")
    options = parser.parse_args()
    guards_of_later_torch()
    library()
    torch.set_num_threads(1)
    for row in TABLE:
        if options.rows and not any(part in row.name for part in options.rows):
            continue
        print(f"{row.name}:", flush=True)
        columns: dict[str, list[str]] = {}
        for name in COLUMNS:
            columns.setdefault(observed(row, name, options.device), []).append(name)
        for text, names in sorted(columns.items()):
            print(f"  {text:34} {'; '.join(names)}", flush=True)


if __name__ == "__main__":
    main()
