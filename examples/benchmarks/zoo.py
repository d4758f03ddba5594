"""A zoo of architectures: which are right, wrong or refused, and how much is replayed.

Small models with random weights, of transformers and timm, are called with batch sizes that change
and inputs that are new each time, and every call is compared with eager::

    python examples/benchmarks/zoo.py                        # on a GPU
    python examples/benchmarks/zoo.py --device cpu --compiler eager --models llama vit
    python examples/benchmarks/zoo.py --readme               # the committed rows into the README

Three ways: ``compile`` is ``torch.compile(model, backend="cgcompile")``; ``traced`` is
``cgcompile.compile(model, guards="none")``, which traces once, or, where that is refused, captures
without a trace (``breakable``: cut at attention; ``full``: as one graph); ``decode`` steps through
``torch.compile`` with a static cache. Outcomes: see ``model_zoo.measure.Row``.

Exits with 1 if a row is wrong, an error, a crash or a time-out.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from model_zoo import catalogue, table
from model_zoo.measure import WAYS, Settings, measure
from model_zoo.pool import Task, measured, serve

RESULTS = Path(__file__).with_name("results") / "zoo.json"
README = Path(__file__).resolve().parents[2] / "README.md"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="", help="inductor on a GPU, else eager")
    parser.add_argument("--models", nargs="+", choices=list(catalogue.CATALOGUE), metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 3, 5, 8])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    parser.add_argument("--readme", action="store_true", help="write the table and measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def settings_of(args: argparse.Namespace) -> Settings:
    """How to measure."""
    return Settings(
        device=args.device,
        compiler=args.compiler or ("eager" if args.device == "cpu" else "inductor"),
        sizes=tuple(args.sizes),
        rounds=args.rounds,
        warm=args.rounds - 2,
        seed=args.seed,
    )


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """All rows; those that took longest last time come first."""
    found = [
        (entry.name, way)
        for entry in catalogue.ENTRIES
        for way in args.ways
        if (not args.models or entry.name in args.models) and (way != "decode" or entry.decodes)
    ]
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    seconds = {(row["name"], row["way"]): row["seconds"] for row in known}
    return sorted(found, key=lambda task: -seconds.get(task, 1e9))


def work(args: argparse.Namespace) -> None:
    """What a worker process does."""
    warnings.simplefilter("ignore")
    for name in ("torch._dynamo", "torch._inductor", "transformers", "timm"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = settings_of(args)

    def row(task: Task) -> dict[str, Any]:
        return measure(catalogue.CATALOGUE[task[0]], task[1], settings).to_json()

    serve(row)


def run(args: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """Measure in workers, print rows as they come."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    begun, tasks = time.perf_counter(), tasks_of(args)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", *given]
    rows = []
    for number, row in enumerate(measured(tasks, args.workers, command, args.limit), 1):
        rows.append(row)
        print(f"{number}/{len(tasks)}  {table.line(row)}", flush=True)
    order = {entry.name: place for place, entry in enumerate(catalogue.ENTRIES)}
    rows.sort(key=lambda row: (order[row["name"]], WAYS.index(row["way"])))
    return {
        "machine": machine(args, time.perf_counter() - begun),
        "entries": [
            {"name": e.name, "kind": e.kind, "structure": e.structure, "library": e.library}
            for e in catalogue.ENTRIES
            if any(row["name"] == e.name for row in rows)
        ],
        "rows": rows,
    }


def machine(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Where it was measured, and how."""
    import timm
    import transformers

    settings = settings_of(args)
    on_gpu = settings.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu, host recorder",
        "compiler": settings.compiler,
        "sizes": list(settings.sizes),
        "rounds": settings.rounds,
        "tolerance": settings.tolerance,
        "workers": args.workers,
        "seconds": round(seconds),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "timm": timm.__version__,
    }


def main(given: list[str] | None = None) -> int:
    """Returns the exit status."""
    given = sys.argv[1:] if given is None else given
    args = arguments(given)
    if args.worker:
        work(args)
        return 0
    if args.readme:
        README.write_text(table.into(README.read_text(), json.loads(RESULTS.read_text())))
        return 0
    found = run(args, given)
    print(table.text(found))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(table.dumped(found))
    bad = [row for row in found["rows"] if row["outcome"] not in ("right", "refused")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
