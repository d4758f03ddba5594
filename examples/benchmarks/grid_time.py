"""Whether the kernels of cgcompile make a decode step slower, over a grid of rows and caches.

Run it on a machine with a CUDA device::

    python examples/benchmarks/grid_time.py --json grid.json

Layers of the decoders of ``generate_time.py``, unmodified, with random weights in bfloat16 and a
static cache: the GPU's time of one step with the kernels, as by default, over that without any
(``kernels=False``). Both take turns in one process, burst by
burst, as replayed graphs. Exits with 1 if a ratio is above ``--limit``, a step was no replay, or
results with the kernels are farther from float32 than 1.5 times those without.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from generate_time import MODELS, Cell, Step, Turn, configuration, made_on, relative_error
from rivals.report import Table, text_table
from rivals.timing import Call, burst_seconds, gpu_seconds

import cgcompile

WAYS = ("with", "without")
LAST = 24  # positions of the cache that a full one has free: for the steps of a burst
Row = dict[str, Any]


class Hidden(Step):
    """A step of layers without the head."""

    def __call__(self, forward: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(
            input_ids=self.ids, past_key_values=self.cache
        ).last_hidden_state
        return hidden


def backend_of(args: argparse.Namespace, way: str) -> cgcompile.Backend:
    settings: dict[str, Any] = {"compiler": args.compiler}
    if way == "without":
        settings["kernels"] = False
    device = "auto" if args.device == "cuda" else "host"
    return cgcompile.Backend(capture_device=device, **settings)


def burst_of(args: argparse.Namespace, step: Step, call: Call, host: float) -> float:
    """Return seconds of a step in a burst of ``args.burst``."""

    def run() -> None:
        for _ in range(args.burst):
            call()

    step.rewind()
    if args.device != "cuda":
        return burst_seconds(call, args.device, args.burst)
    seconds = gpu_seconds(run, host * args.burst)
    return float("nan") if seconds is None else seconds / args.burst


def rows_here(args: argparse.Namespace) -> list[Row]:
    """Compile the cells of one process, then measure them while no other process compiles."""
    began = time.monotonic()
    torch._dynamo.config.recompile_limit = 64  # of one code object: each cell is a compilation
    turn = Turn(args.turn)
    config = configuration(args, args.models[0])
    config.num_hidden_layers = args.layers
    turn.compiling()
    model = made_on(args.device, config).model
    ready = []
    with torch.inference_mode():
        for rows in args.rows:
            for cache in args.cache:
                step = Hidden(model, Cell(rows, cache, cache // 4), args.device)
                calls: dict[str, tuple[Call, cgcompile.Backend]] = {}
                errors: dict[str, float] = {}
                with turn.alone("memory"):
                    exact = step.in_float32(model)
                    if args.device == "cuda":
                        torch.cuda.empty_cache()
                for way in WAYS:
                    backend = backend_of(args, way)
                    forward = torch.compile(model.forward, backend=backend, dynamic=False)
                    call = partial(step, forward)
                    for _ in range(4):
                        step.rewind()
                        result = call()
                    errors[way] = relative_error(result, exact)
                    calls[way] = call, backend
                ready.append(partial(measured, args, rows, cache, step, calls, errors))
        with turn.measuring(began + 0.6 * args.seconds) as quiet:
            return [row | {"quiet": quiet} for measure in ready for row in measure()]


def measured(
    args: argparse.Namespace,
    rows: int,
    cache: int,
    step: Step,
    calls: dict[str, tuple[Call, cgcompile.Backend]],
    errors: dict[str, float],
) -> list[Row]:
    """Return a row for each share of the cache that is in use."""
    table = []
    for percent in args.percent:
        step.used = max(1, min(cache * percent // 100, cache - LAST))
        before = {way: backend.counters for way, (_, backend) in calls.items()}
        step.rewind()
        host = max(burst_seconds(call, args.device, 3) for call, _ in calls.values())
        samples: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(args.rounds):
            for way, (call, _) in calls.items():
                samples[way].append(burst_of(args, step, call, host))
        row: Row = {"model": args.models[0], "rows": rows, "cache": cache, "percent": percent}
        for way, (_, backend) in calls.items():
            row[way] = 1e6 * statistics.median(samples[way])
            now, start = backend.counters, before[way]
            row[f"replayed {way}"] = (now.replays - start.replays) / (now.calls - start.calls)
        row["ratio"] = row["with"] / row["without"]
        row["error"] = errors["with"] / errors["without"] if errors["without"] else 1.0
        table.append(row)
    return table


# ---------------------------------------------------------------- processes


def all_rows(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Run a process for each model and number of rows; they compile side by side.

    Yields:
        The rows of a process when it has ended, or one with a ``failure``.
    """
    until = time.monotonic() + args.seconds

    def run(folder: str, model: str, rows: int) -> list[Row]:
        caches = Path(folder) / f"{model} {rows}"
        caches.mkdir(mode=0o700)
        environment = {
            **os.environ,
            "CGCOMPILE_CACHE_DIR": str(caches),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [sys.executable, __file__, "--turn", folder, "--models", model]
        command += ["--rows", str(rows), "--device", args.device, "--compiler", args.compiler]
        for name in ("layers", "rounds", "burst"):
            command += [f"--{name}", str(getattr(args, name))]
        for name in ("cache", "percent"):
            command += [f"--{name}", *map(str, getattr(args, name))]
        command += ["--tiny"] if args.tiny else []
        left = max(until - time.monotonic(), 0.0)
        command += ["--seconds", str(left)]
        start = partial(subprocess.run, command, env=environment, capture_output=True, text=True)
        try:
            done = start(check=False, timeout=None if left == math.inf else left)
        except subprocess.TimeoutExpired:
            return [{"failure": f"{model}, {rows} rows: the time is over"}]
        if done.returncode:
            return [{"failure": f"{model}, {rows} rows: {done.stderr[-1500:]}"}]
        table: list[Row] = json.loads(done.stdout.splitlines()[-1])
        return table

    jobs = [(model, rows) for model in args.models for rows in args.rows]
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(args.at_once) as pool:
        for done in as_completed([pool.submit(run, top, *job) for job in jobs]):
            yield done.result()


def trouble(args: argparse.Namespace, row: Row) -> str:
    """Return what is wrong with a row; empty if it is right."""
    if "failure" in row:
        return str(row["failure"])
    if any(row[f"replayed {way}"] < 1 for way in WAYS):
        return "a step was no replay"
    if not row["error"] <= 1.5:
        return f"its error is {row['error']:.2f} times that without kernels"
    return "" if row["ratio"] <= args.limit else f"{row['ratio']:.3f} times as slow"


def line_of(row: Row) -> str:
    """Return one row of figures, or its failure."""
    if "failure" in row:
        return str(row["failure"])
    cell = "{model}, {rows} rows, {percent} % of {cache}".format_map(row)
    times = f"{row['with']:,.1f} us with, {row['without']:,.1f} without, ratio {row['ratio']:.3f}"
    beside = "" if row["quiet"] else ", beside processes that compile"
    return f"{cell}: {times}, error {row['error']:.2f}{beside}"


def table_of(args: argparse.Namespace, rows: list[Row]) -> Table:
    """Return the ratio of each cell, and microseconds without kernels."""
    cells = [(cache, percent) for cache in args.cache for percent in args.percent]
    table: Table = [["model", "rows", *(f"{percent} % of {cache}" for cache, percent in cells)]]
    known = {(row["model"], row["rows"], row["cache"], row["percent"]): row for row in rows}
    for model in args.models:
        for count in args.rows:
            values = [known.get((model, count, *cell)) for cell in cells]
            texts = [f"{v['ratio']:.3f} of {v['without']:,.0f}" if v else "-" for v in values]
            table.append([model, str(count), *texts])
    return table


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="inductor", help="of cgcompile")
    parser.add_argument("--models", nargs="+", default=["llama-1b", "llama-8b"], choices=MODELS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 17, 32, 64, 256])
    parser.add_argument("--cache", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--percent", type=int, nargs="+", default=[1, 25, 100], help="in use")
    parser.add_argument("--rounds", type=int, default=9, help="bursts of each way")
    parser.add_argument("--burst", type=int, default=8, help=f"steps, at most {LAST}")
    parser.add_argument("--limit", type=float, default=1.02, help="of the ratio")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the program")
    parser.add_argument("--turn", help=argparse.SUPPRESS)  # a folder: this is one job's process
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.turn:
        print(json.dumps(rows_here(args)))
        return 0
    rows: list[Row] = []
    for more in all_rows(args):
        rows += more
        for row in more:
            print(line_of(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows))
    measured_rows = [row for row in rows if "failure" not in row]
    print(text_table(table_of(args, measured_rows)))
    bad = [(row, why) for row in rows if (why := trouble(args, row))]
    for row, why in bad:
        names = ("model", "rows", "cache", "percent")
        print("BROKEN:", *(f"{name} {row[name]}" for name in names if name in row), why)
    ratios = [row["ratio"] for row in measured_rows]
    if ratios:
        print(f"largest ratio {max(ratios):.3f}, median {statistics.median(ratios):.3f}")
    print(f"never slower than {args.limit}: {'no' if bad else 'yes'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
