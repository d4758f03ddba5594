"""Cold and warm starts: each in a process of its own, by ``compile_time.py``."""

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import compile_time

# name in tables: name of the way there
WAYS = {
    "Dynamo alone": "dynamo",
    "cgcompile guards none": "cgcompile none inductor",
    "cgcompile named entry point": "named entry point",
    "torch.compile dynamic": "torch.compile",
    "torch.compile static": "torch.compile static",
    "reduce-overhead": "reduce-overhead",
}
COMPARED = ("Dynamo alone", "cgcompile guards none")  # by a goal


def cold_and_warm(options: Sequence[str], way: str, until: float) -> dict[str, Any]:
    """Seconds of the first call with empty caches, and again with all that it has left."""
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {}
        for warm in (False, True):
            kind = "warm" if warm else "cold"
            if time.monotonic() > until:
                return {**figures, f"{kind}_error": "no time left"}
            try:
                row = compile_time.run(options, way, Path(folder), warm, keep_all=True)
            except RuntimeError as error:
                return {**figures, f"{kind}_error": str(error)[-600:]}
            figures[kind] = row["total"]
            figures[f"{kind}_compilations"] = row["compiled"]
            figures.setdefault("difference", row["difference"])
            if way == "dynamo":
                break
        return figures


def starts(
    options: Sequence[str],
    ways: Sequence[str],
    at_once: int,
    until: float,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All ways, some at once; ``save`` gets what is known after each.

    Args:
        options: arguments of ``compile_time.py``: device and model.
        ways: keys of WAYS.
        at_once: how many processes run at the same time.
        until: a time of ``time.monotonic`` after which no process is started.
        save: called with all that was found so far.
    """
    rows: dict[str, Any] = {}
    with ThreadPoolExecutor(at_once) as threads:
        jobs = {threads.submit(cold_and_warm, options, WAYS[name], until): name for name in ways}
        for job in as_completed(jobs):
            rows[jobs[job]] = job.result()
            save(rows)
    return rows
