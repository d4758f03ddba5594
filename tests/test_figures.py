"""The figures of ``tests/figures.py`` may fall, never rise.

``tests/data/figures.txt`` has the upper bounds; ``EXPECTTEST_ACCEPT=1`` lowers them.
"""

import os
import re
from collections.abc import Mapping

import figures
import pytest
import torch
from lib.programs import run_code
from lib.snapshots import DATA

FILE = DATA / "figures.txt"


def bounds() -> dict[str, list[int]]:
    rows = (line.rsplit(": ", 1) for line in FILE.read_text().splitlines())
    return {name: list(map(int, numbers.split(", "))) for name, numbers in rows}


def compare(measured: Mapping[str, list[int]]) -> None:
    """Compare figures with their bounds."""
    allowed = bounds()
    rows = [
        f"{name}: {number}, which was at most {bound}"
        for name, numbers in measured.items()
        for number, bound in zip(numbers, allowed[name], strict=True)
        if number > bound
    ]
    assert not rows, "\n".join(rows)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        lines = (
            f"{name}: {', '.join(map(str, now))}" for name, now in (allowed | measured).items()
        )
        FILE.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_no_figure_rises() -> None:
    compare({name: measure() for name, (measure, _) in figures.CHEAP.items()})


def test_the_names_that_are_counted_exist() -> None:
    assert not figures.gone(), (
        "delete them from the tables of tests/figures.py, or rename them there"
    )


def test_each_figure_has_a_bound() -> None:
    assert list(bounds()) == [*figures.CHEAP, *figures.COSTLY]


PROGRAM = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(torch.__version__ < "2.14", reason="cgcompile runs more for older versions")
@pytest.mark.slow
def test_no_figure_of_calls_rises() -> None:
    printed = run_code(PROGRAM, figures.__file__, "files called", "modules loaded")
    rows = [re.split(r" {2,}", line) for line in printed.splitlines()[1:]]
    measured = {name: list(map(int, now.split(", "))) for name, now, _ in rows}
    assert list(measured) == list(figures.COSTLY)
    compare(measured)
