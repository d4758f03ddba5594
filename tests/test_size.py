"""The number of concepts in each room may fall; it rises with a reason that stands in the table.

``tests/data/size.txt`` has two parts. The table has the numbers of each room. A number that falls
is lowered there; ``EXPECTTEST_ACCEPT=1`` does so. No number of the table is ever raised: what
rises has a line below it, ``room, column, +1: why``, which is added to the table.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lib.snapshots import DATA

from cgcompile.torch_compat.presence import PRIVATE_ATTRIBUTES, PRIVATE_NAMES

ROOT = Path(__file__).resolve().parents[1]
FILE = DATA / "size.txt"
ROOMS = (
    "cgcompile",  # the modules of the package itself
    "torch_compat",
    "passes",
    "graphs",
    "pieces",
    "kernels",
    "adapters",
    "runtime",
    "tracing",
    "serving",
    "encoder",
    "debug",
    "integrations",
    "testing",
)
COLUMNS = ("classes", "public", "private", "fallbacks", "loaded")
LOADING = """
import sys
import cgcompile.graphs.wrapper
print(*(name for name in sys.modules if name.split(".")[0] == "cgcompile"))
"""

Table = dict[tuple[str, str], int]


def trees(room: str) -> Iterator[tuple[Path, ast.Module]]:
    folder = ROOT / "cgcompile" / ("" if room == "cgcompile" else room)
    for path in sorted(folder.glob("*.py" if room == "cgcompile" else "**/*.py")):
        yield path, ast.parse(path.read_text())


def exported(tree: ast.Module) -> list[str] | None:
    """The names in ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that the top level of a module defines, without those that it imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def returns_a_fallback(node: ast.AST) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    returned = node.returns if isinstance(node, functions) else None
    return returned is not None and "Fallback" in re.findall(r"\w+", ast.unparse(returned))


def counted(room: str) -> dict[str, int]:
    """Classes, public names, and functions that return a fallback instead of a result.

    Public are the names in ``__all__`` of a room that has it. In the other rooms they are all that
    a module defines without an underscore.
    """
    numbers, listed = dict.fromkeys(COLUMNS[:4], 0), None
    for path, tree in trees(room):
        nodes = list(ast.walk(tree))
        numbers["classes"] += sum(isinstance(node, ast.ClassDef) for node in nodes)
        numbers["fallbacks"] += sum(map(returns_a_fallback, nodes))
        numbers["public"] += sum(not name.startswith("_") for name in defined(tree))
        if path.name == "__init__.py":
            listed = exported(tree)
    if listed is not None:
        numbers["public"] = len(listed)
    return numbers


def private_names(tables: tuple[Mapping[str, str], ...]) -> int:
    """The private names of torch, all of which are in the tables of ``torch_compat``."""
    return sum(len(names.split()) for table in tables for names in table.values())


def loaded() -> dict[str, int]:
    """By room, the modules that are loaded for a wrapper."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOADING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    numbers = dict.fromkeys(ROOMS, 0)
    for name in done.stdout.split():
        _, *inner = name.split(".")
        numbers[inner[0] if inner and inner[0] in ROOMS else "cgcompile"] += 1
    return numbers


def read(text: str) -> tuple[Table, list[tuple[str, str, int]]]:
    """The table, and the rises below it."""
    head, *rows = text.split("\n\n")[0].splitlines()
    columns = head.split()[1:]
    table = {}
    for row in rows:
        room, *numbers = row.split()
        table |= {(room, column): int(n) for column, n in zip(columns, numbers, strict=True)}
    lines = [line for part in text.split("\n\n")[1:] for line in part.splitlines()]
    rises = []
    for line in lines:
        match = re.fullmatch(r"(\w+), (\w+), \+(\d+): .{20,}", line)
        assert match, f"{FILE}: {line!r} is not 'room, column, +1: why', with a reason"
        rises.append((match[1], match[2], int(match[3])))
    return table, rises


def written(table: Table) -> str:
    """The text of a table."""
    rows = [("room", *COLUMNS)]
    rows += [(room, *(str(table[room, column]) for column in COLUMNS)) for room in ROOMS]
    return "\n".join(row[0].ljust(14) + "".join(cell.rjust(11) for cell in row[1:]) for row in rows)


def compare(numbers: Table) -> None:
    """Compare numbers of some columns with the file."""
    text = FILE.read_text()
    table, rises = read(text)
    allowed = dict(table)
    for room, column, by in rises:
        allowed[room, column] += by
    fallen = {key: n - allowed[key] for key, n in numbers.items() if n < allowed[key]}
    if fallen and os.environ.get("EXPECTTEST_ACCEPT"):
        lower = {key: n + fallen.get(key, 0) for key, n in table.items()}
        FILE.write_text(text.replace(text.split("\n\n")[0].rstrip("\n"), written(lower)))
        fallen = {}
    risen = {key: n - allowed[key] for key, n in numbers.items() if n > allowed[key]}
    changes = [
        f"{room}, {column}, {by:+}: "
        + (f"explain it by such a line in {FILE.name}" if by > 0 else "lower the number, too")
        for (room, column), by in sorted({**fallen, **risen}.items())
    ]
    assert not changes, "\n".join([*changes, "EXPECTTEST_ACCEPT=1 lowers what has fallen"])


def test_concepts_become_fewer_or_have_a_reason() -> None:
    numbers = {(room, column): n for room in ROOMS for column, n in counted(room).items()}
    tables = (PRIVATE_NAMES, PRIVATE_ATTRIBUTES)
    numbers["torch_compat", "private"] = private_names(tables)
    compare(numbers)


@pytest.mark.slow
def test_a_wrapper_loads_no_more_modules_or_has_a_reason() -> None:
    compare({(room, "loaded"): n for room, n in loaded().items()})


def test_the_rooms_are_those_of_the_tree() -> None:
    folders = {path.parent.name for path in ROOT.glob("cgcompile/*/__init__.py")}
    assert folders == {*ROOMS} - {"cgcompile"}
