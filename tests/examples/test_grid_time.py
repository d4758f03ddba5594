"""The grid of rows and caches: both ways are compared, and what is slower is named."""

import contextlib
import io
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lib.examples import call, load

pytest.importorskip("transformers")
SMALL = ["--tiny", "--device", "cpu", "--compiler", "eager", "--at-once", "1"]
SMALL += ["--models", "llama-1b", "--cache", "64", "--percent", "1", "100"]
SMALL += ["--rounds", "1", "--burst", "2"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program; its processes run in this one, which has imported torch."""
    module = load("benchmarks/grid_time.py")

    def run_here(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        out = io.StringIO()
        torch._dynamo.reset()
        with contextlib.redirect_stdout(out):
            code = module.main(command[2:])
        return subprocess.CompletedProcess(command, code, out.getvalue(), "")

    monkeypatch.setattr(module.subprocess, "run", run_here)
    return module


@pytest.mark.slow
def test_both_ways_of_each_cell_are_replayed(benchmark: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = call(benchmark, *SMALL, "--rows", "1", "2", "--limit", "1e9", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    cells = [(row["rows"], row["cache"], row["percent"]) for row in rows]
    assert cells == [(1, 64, 1), (1, 64, 100), (2, 64, 1), (2, 64, 100)]
    for row in rows:
        assert row["replayed with"] == row["replayed without"] == 1.0
        assert row["ratio"] == pytest.approx(row["with"] / row["without"])
        assert row["error"] == 1.0  # of one kind on a CPU
    printed = done.stdout.splitlines()
    assert printed[-1] == "never slower than 1000000000.0: yes"
    assert any(line.split()[:2] == ["llama-1b", "2"] for line in printed)


@pytest.mark.slow
def test_a_cell_that_is_slower_is_named(benchmark: ModuleType) -> None:
    done = call(benchmark, *SMALL, "--rows", "2", "--limit", "0")
    assert done.returncode == 1
    assert "BROKEN: model llama-1b rows 2 cache 64 percent 100 " in done.stdout
    assert "times as slow" in done.stdout


def test_a_process_that_fails_is_named(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no memory")
    monkeypatch.setattr(benchmark.subprocess, "run", lambda *_, **__: failed)
    done = call(benchmark, *SMALL, "--rows", "2")
    assert done.returncode == 1
    assert "BROKEN: llama-1b, 2 rows: no memory" in done.stdout
