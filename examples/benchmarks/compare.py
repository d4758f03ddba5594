"""cgcompile beside everything else that there is to run a decode step, in one command.

Run it on a machine with a CUDA device; it takes less than five minutes there::

    pip install -e '.[bench]'
    python examples/benchmarks/compare.py --out results

One Llama-like decoder of 32 layers, and a narrow one of 64, run eager, compiled by
``torch.compile`` in its modes, as graphs by hand over that, through
``torch.cuda.make_graphed_callables``, through Meta's ``piecewise-cuda-graphs`` and in the ways of
cgcompile. All are compared with eager on fresh random tokens, and have to show that they did
replay. Parts (``--parts``):

* ``time``: microseconds of a step. ``host_noop``: of the host until the call returns, with an
  attention op that does nothing; ``host``: in full; ``gpu``: of the GPU, the whole step enqueued
  behind a sleep kernel; ``wall``: until the GPU is idle. Medians; the rows of one batch take turns
  in one process, and beside each runs its *floor*: the bare loop over the very same graphs and op,
  with the same kind of call. A probe graph measures at which pace the GPU replays.
* ``memory``: seconds and bytes of capturing 20 sizes.
* ``compile``: seconds of the first call, with empty caches (but bytecode of torch, as pip leaves
  it) and with all that it left, in processes of their own: those that a goal compares one by one
  before anything else, the rest a few at a time, while the others compile.

Results are ``compare.json``, ``compare.txt`` and, with matplotlib, ``compare.png`` in ``--out``,
and the files of each part are written as soon as there is something, so that little is lost when
``--seconds`` are over. ``figures_table.py`` writes the tables of
``docs/measurements.md`` from the JSON.

Without a GPU it takes models of nearly nothing but attention that does nothing, and measures what
cgcompile's dispatch costs over replays by the host recorder; the rest is left out, with a line that
names it.

Exits with 1 where a way of cgcompile is wrong, was not replayed, or was not measured.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from capture_time import SIZES

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for llm_engine

from rivals.bytecode import bytecode_in
from rivals.decoder import Dims
from rivals.plot import can_plot, plot
from rivals.report import whole_text
from rivals.starts import COMPARED, WAYS, starts
from rivals.variant import Setup
from rivals.worker import Worker, work

SCHEMA = 1
PARTS = ("compile", "memory", "time")
MODELS = {
    "main": Dims(32, 2048, 16, 8, 5632, 32000),
    "deep": Dims(64, 512, 8, 4, 1408, 32000),
}
THIN = Dims(8, 16, 2, 1, 24, 64, 4, thin=True)
ON_CPU = {"main": THIN, "deep": dataclasses.replace(THIN, layers=16)}
PACKAGES = ("torch", "triton", "piecewise-cuda-graphs", "cgcompile")
LAST_SECONDS = 12.0  # for the report, and for a process to end


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="cgcompile beside what else there is.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--compiler", help="of pieces; default: inductor, on a CPU eager")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all, on a CPU time")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", type=int, help="in place of 32 and 64, or on a CPU 8 and 16")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 8 1 64 256; deep: 8 64")
    # Not "--only": Inductor writes what follows it in sys.argv into its code, without quoting it.
    parser.add_argument("--variants", nargs="+", default=[], help="names, beside eager")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5, help="samples in a round")
    parser.add_argument("--at-once", type=int, default=3, help="processes of the part compile")
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--out", type=Path, default=Path("compare_results"))
    parser.add_argument("--worker", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.compiler = args.compiler or ("eager" if on_cpu else "inductor")
    args.parts = args.parts or (["time"] if on_cpu else list(PARTS))
    return args


def dims_of(args: argparse.Namespace, model: str) -> Dims:
    dims = (ON_CPU if args.device == "cpu" else MODELS)[model]
    return dataclasses.replace(dims, layers=args.layers) if args.layers else dims


def make_setup(args: argparse.Namespace, model: str) -> Setup:
    on_cpu = args.device == "cpu"
    batches = tuple(
        args.batches or ([8] if on_cpu else [8, 64] if model == "deep" else [8, 1, 64, 256])
    )
    sizes = batches if on_cpu or model == "deep" else (*SIZES, *batches)
    return Setup(
        dims_of(args, model),
        args.device,
        torch.float32 if on_cpu else torch.bfloat16,
        args.compiler,
        tuple(sorted(set(sizes))),
        batches,
    )


def run_worker(args: argparse.Namespace) -> int:
    """The process of one model: prints that it is ready, and goes on when a line comes in."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed from now on must not be taken for an answer

    def wait_for_turn() -> None:
        print("ready", file=answers, flush=True)
        sys.stdin.readline()

    if args.device == "cpu":
        torch.set_num_threads(1)
    worker = Worker(
        make_setup(args, args.worker),
        args.out / f"{args.worker}.json",
        few=args.worker == "deep",
        only=tuple(args.variants),
        deadline=args.deadline,
    )
    rounds = args.rounds if "time" in args.parts else 0
    return work(worker, wait_for_turn, rounds=rounds, repeats=args.repeats)


# ---------------------------------------------------------------- all processes


class Process:
    """A worker from outside."""

    def __init__(self, args: argparse.Namespace, options: Sequence[str], model: str, end: float):
        self.model, self.end = model, end
        self.file: Path = args.out / f"{model}.json"
        self.file.unlink(missing_ok=True)
        command = [sys.executable, __file__, *options, "--worker", model, "--deadline", str(end)]
        # Few threads: they compile while the starts of others are timed.
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def is_ready(self) -> bool:
        """Wait until it has compiled everything; False if it ended, or had no time left."""
        assert self._process.stdout is not None
        left = max(0.0, self.end - time.monotonic())
        readable, _, _ = select.select([self._process.stdout], [], [], left)
        return bool(readable) and self._process.stdout.readline().strip() == "ready"

    def go_on(self) -> None:
        """Let it measure, and wait until it is done or its time is over."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        try:
            self._process.wait(max(1.0, self.end + LAST_SECONDS / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    @property
    def code(self) -> int | None:
        return self._process.returncode


def header(args: argparse.Namespace) -> dict[str, Any]:
    """Machine, versions and date."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = "no GPU"
    if args.device == "cuda":
        device = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda)
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            numbers = re.findall(r"\b\d+\.\d+\.\d+\b", driver.read_text())
            versions["driver"] = numbers[0] if numbers else "unknown"
    cpus = Path("/proc/cpuinfo")
    names = [row for row in cpus.read_text().splitlines() if row.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "machine": {"device": device, "cpu": cpu, "cores": os.cpu_count()},
        "versions": versions,
        "parts": args.parts,
        "models": {},
        "starts": {},
        "notes": [],
    }


class Result:
    """All that is known so far, on disk at every change."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file: Path = args.out / "compare.json"
        self.found = header(args)

    def save(self) -> None:
        self.file.write_text(json.dumps(self.found, indent=1) + "\n")

    def add_starts(self, rows: dict[str, Any]) -> None:
        self.found["starts"] = {name: rows[name] for name in WAYS if name in rows}
        self.save()

    def add_model(self, process: Process) -> None:
        if process.file.exists():
            self.found["models"][process.model] = json.loads(process.file.read_text())
        if process.code != 0:
            self.found["notes"].append(f"the process of {process.model} ended with {process.code}")
        self.save()


def given_to_starts(args: argparse.Namespace) -> list[str]:
    dims = dims_of(args, "main")
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    options = {
        "device": args.device,
        "dtype": dtype,
        "layers": dims.layers,
        "hidden": dims.hidden,
        "heads": dims.heads,
        "kv-heads": dims.kv_heads,
        "intermediate": dims.intermediate,
        "vocabulary": dims.vocabulary,
        "context": dims.context,
    }
    return [each for name, value in options.items() for each in (f"--{name}", str(value))]


def run_all(args: argparse.Namespace, options: Sequence[str]) -> Result:
    """All parts: the workers compile while cold starts are timed, then measure one by one."""
    end = time.monotonic() + args.seconds - LAST_SECONDS
    result = Result(args)
    begins: dict[str, Any] = {}
    until = end - 0.4 * args.seconds * bool({"time", "memory"} & set(args.parts))
    if "compile" in args.parts:  # those that a goal compares have the machine for themselves
        begins |= starts(given_to_starts(args), COMPARED, 1, until, result.add_starts)
    processes = []
    if {"time", "memory"} & set(args.parts):
        for index, model in enumerate(args.models):
            # Each model gets a share at the end; the first, which is the larger, most of it.
            later = 0.12 * args.seconds * (len(args.models) - 1 - index)
            processes.append(Process(args, options, model, end - later))
    try:
        if "compile" in args.parts:
            others = [name for name in WAYS if name not in COMPARED]
            add = lambda more: result.add_starts({**begins, **more})  # noqa: E731
            add(starts(given_to_starts(args), others, args.at_once, until, add))
        for process in [each for each in processes if each.is_ready()]:
            process.go_on()
    finally:
        for process in processes:
            process.stop()
            result.add_model(process)
    return result


@contextmanager
def caches_in(folder: str, parts: Sequence[str]) -> Iterator[None]:
    """Processes that start within it find nothing that was compiled before, but for bytecode."""
    wanted = {
        "CGCOMPILE_CACHE_DIR": f"{folder}/cgcompile",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }
    if "compile" in parts:
        wanted |= bytecode_in(f"{folder}/bytecode")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main(argv: Sequence[str] | None = None) -> int:
    options = list(sys.argv[1:] if argv is None else argv)
    args = arguments(options)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        return run_worker(args)
    with tempfile.TemporaryDirectory() as caches, caches_in(caches, args.parts):
        result = run_all(args, options)
    text = whole_text(result.found)
    print(text)
    (args.out / "compare.txt").write_text(text + "\n")
    if not can_plot():
        print("no picture: matplotlib is not installed")
    elif result.found["models"]:
        plot(result.found, args.out / "compare.png")
    return 1 if result.found["notes"] else 0


if __name__ == "__main__":
    sys.exit(main())
