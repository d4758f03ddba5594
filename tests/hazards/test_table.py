"""The table of hazards on every front end and device: see ``table.py`` and ``lib/hazards.py``."""

from collections.abc import Iterator

import pytest
from hazards.table import TABLE, library
from lib.front_ends import COLUMNS, TRACED
from lib.hazards import ABSENT, DOCUMENTED, STALE, Row, observe


@pytest.fixture(autouse=True, scope="module")
def ops() -> None:
    library()


def cells() -> Iterator[object]:
    for device in ("cpu", "cuda"):
        for row in TABLE:
            for name in COLUMNS:
                if row.outcome(name, device) is ABSENT or device not in row.devices:
                    continue
                marks = [pytest.mark.gpu] if device == "cuda" else []
                # Of the traced ones, "keep, context" runs always.
                if name.removesuffix(", context") in TRACED and name != "keep, context":
                    marks.append(pytest.mark.slow)
                yield pytest.param(row, name, device, id=f"{row.name}-{name}-{device}", marks=marks)


@pytest.mark.parametrize(("row", "name", "device"), list(cells()))
def test_hazard(row: Row, name: str, device: str) -> None:
    """Each call equals eager, or raises, or has a reason, as the row expects of the front end."""
    expected = row.outcome(name, device)
    assert observe(row, name, device) == (STALE if expected is DOCUMENTED else expected)
