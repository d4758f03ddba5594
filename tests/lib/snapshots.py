"""Text snapshots in ``tests/data``; ``EXPECTTEST_ACCEPT=1`` rewrites those that differ."""

import os
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"


def assert_snapshot(name: str, text: str) -> None:
    """Compare a text with the file ``tests/data/<name>.txt``.

    Raises:
        AssertionError: they differ, or the file is missing.
    """
    path = DATA / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n")
    assert path.exists(), f"no snapshot {path}; EXPECTTEST_ACCEPT=1 writes it"
    assert text.rstrip("\n") == path.read_text().rstrip("\n"), f"snapshot {path} differs"
