"""``serve_ray.py``: two Ray actors give the tokens of one process."""

import pytest
from lib.examples import run

ray = pytest.importorskip("ray")
SMALL = ["--layers", "1", "--sizes", "8", "32"]


def test_two_actors_give_the_tokens_of_one_process() -> None:
    alone = run("serve_llm.py", *SMALL, "--device", "cpu", "--modes", "NONE", "--draft", "none")
    try:
        rows = run("serve_ray.py", *SMALL, "--modes", "FULL_AND_PIECEWISE")
    finally:
        ray.shutdown()
    assert "promises kept: yes" in rows
    assert [row for row in rows if row.startswith("tokens: ")] == [
        row for row in alone if row.startswith("tokens: ")
    ]
    (steps,) = (row for row in rows if row.startswith("  target: "))
    assert "NONE 0%" in steps
    assert "FULL 0%" not in steps
