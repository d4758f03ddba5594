"""A zoo of architectures: which are right, wrong or refused, and how much is replayed.

Small models with random weights, of transformers and timm, are called with batch sizes that change
and inputs that are new each time, and every call is compared with eager::

    python examples/benchmarks/zoo.py                        # on a GPU
    python examples/benchmarks/zoo.py --device cpu --compiler eager --models llama vit
    python examples/benchmarks/zoo.py --part libraries       # torch, PEFT, torchao, diffusers
    python examples/benchmarks/zoo.py --page                 # the committed rows into the docs

Three ways: ``compile`` is ``torch.compile(model, backend="cgcompile")``; ``traced`` is
``cgcompile.compile(model, guards="none")``, which traces once, or, where that is refused, captures
without a trace (``breakable``: cut at attention; ``full``: as one graph); ``decode`` steps through
``torch.compile`` with a static cache. Outcomes: see ``model_zoo.measure.Row``.

TF32 is off, for convolutions too, where torch has it on: it rounds to 10 bits, and which of several
algorithms a call takes would then show above the tolerance.

``--dtype bfloat16 --wider 8`` makes language models as wide as kernels for few rows and for
attention of one token take them, and prints the RMS error against float64 over that of eager; a row
with more than 1.05 is wrong. ``CGCOMPILE_KERNELS=0`` shows the same without these kernels.

``--output FILE`` is written anew with each row, and beside it the table, as ``.md``. After
``--seconds`` the run ends: rows that did not come are in ``not_run``, and not in the table.

Exits with 1 if a row is wrong, an error, a crash or a time-out; else with 3 if rows were not run.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from model_zoo import catalogue, table
from model_zoo.measure import WAYS, Settings, measure
from model_zoo.pool import Task, measured, serve

ROUNDING = 0.06  # largest difference of results in 16 bits, over the largest absolute value
RESULTS = Path(__file__).with_name("results") / "zoo.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="", help="inductor on a GPU, else eager")
    parser.add_argument("--part", choices=list(catalogue.PARTS), default="architectures")
    parser.add_argument("--models", nargs="+", choices=list(catalogue.CATALOGUE), metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 3, 5, 8])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for the whole run")
    parser.add_argument("--slow", action="store_true", help="those that take minutes to compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--wider", type=int, default=1, help="factor of the sizes of models")
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    parser.add_argument("--page", action="store_true", help="write the table and measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    """How to measure."""
    return Settings(
        device=args.device,
        compiler=args.compiler or ("eager" if args.device == "cpu" else "inductor"),
        sizes=tuple(args.sizes),
        rounds=args.rounds,
        warm=args.rounds - 2,
        seed=args.seed,
        dtype=args.dtype,
        wider=args.wider,
        tolerance=Settings.tolerance if args.dtype == "float32" else ROUNDING,
    )


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """All rows; those that took longest last time come first."""
    tasks = [
        (entry.name, way)
        for entry in (catalogue.CATALOGUE.values() if args.models else catalogue.PARTS[args.part])
        for way in args.ways
        if (entry.name in args.models if args.models else args.slow or not entry.slow)
        and (way != "decode" or entry.decodes)
    ]
    known = kept() or {"rows": []}
    seconds = {(row["name"], row["way"]): row["seconds"] for row in known["rows"]}
    return sorted(tasks, key=lambda task: -seconds.get(task, 1e9))


def work(args: argparse.Namespace) -> None:
    """What a worker process does."""
    warnings.simplefilter("ignore")
    for name in ("torch._dynamo", "torch._inductor", "transformers", "timm"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = settings_of(args)

    def row(task: Task) -> dict[str, Any]:
        return measure(catalogue.CATALOGUE[task[0]], task[1], settings).to_json()

    serve(row)


def run(args: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """Measure in workers that ``command`` starts; print and keep rows as they come."""
    begun, tasks, machine = time.perf_counter(), tasks_of(args), machine_of(args)
    rows: list[dict[str, Any]] = []
    result = report(tasks, rows, machine)
    for row in measured(tasks, args.workers, command, args.limit, args.seconds, places_of(args)):
        rows.append(row)
        print(f"{len(rows)}/{len(tasks)}  {table.line(row)}", flush=True)
        result = report(tasks, rows, machine | {"seconds": round(time.perf_counter() - begun)})
        if args.output is not None:
            save(args.output, result)
    return result


def places_of(args: argparse.Namespace) -> list[dict[str, str]]:
    """The environments of workers: one for each GPU of the machine."""
    if args.device != "cuda":
        return [{}]
    name = "CUDA_VISIBLE_DEVICES"
    said = os.environ.get(name)
    gpus = said.split(",") if said else [str(each) for each in range(torch.cuda.device_count())]
    return [{name: gpu} for gpu in gpus]


def report(
    tasks: list[Task], rows: list[dict[str, Any]], machine: dict[str, Any]
) -> dict[str, Any]:
    """What is known so far, in the order of the catalogue."""
    order = {name: position for position, name in enumerate(catalogue.CATALOGUE)}

    def position_of(task: Task) -> tuple[int, int]:
        return order[task[0]], WAYS.index(task[1])

    came = {(row["name"], row["way"]) for row in rows}
    return {
        "machine": machine,
        "entries": [
            {"name": e.name, "kind": e.kind, "structure": e.structure, "library": e.library}
            for e in catalogue.CATALOGUE.values()
            if any(name == e.name for name, _ in came)
        ],
        "rows": sorted(rows, key=lambda row: position_of((row["name"], row["way"]))),
        "not_run": [list(task) for task in sorted(tasks, key=position_of) if task not in came],
    }


def save(output: Path, result: dict[str, Any]) -> None:
    """The rows and, beside them, the table; each file is whole at any time."""
    output.parent.mkdir(parents=True, exist_ok=True)
    for file, text in (
        (output, table.dumped(result)),
        (output.with_suffix(".md"), table.markdown(result)),
    ):
        part = file.with_name(file.name + ".part")
        part.write_text(text)
        part.replace(file)


def kept() -> dict[str, Any] | None:
    """The committed rows; None if there are none yet."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else None


def version(package: str) -> str:
    """Of what is installed, without an import of it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def machine_of(args: argparse.Namespace) -> dict[str, Any]:
    """Where it is measured, and how."""
    settings = settings_of(args)
    on_gpu = settings.device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu, host recorder",
        "compiler": settings.compiler,
        "sizes": list(settings.sizes),
        "rounds": settings.rounds,
        "tolerance": settings.tolerance,
        "workers": args.workers,
        "gpus": len(places_of(args)) if on_gpu else 0,
        "seconds": 0,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "timm": version("timm"),
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    if args.worker:
        work(args)
        return 0
    if args.page:
        PAGE.write_text(table.into(PAGE.read_text(), kept()))
        return 0
    result = run(args, [sys.executable, str(Path(__file__).resolve()), "--worker", *argv])
    print(table.text(result))
    return status(result)


def status(result: dict[str, Any]) -> int:
    """Of the process."""
    bad = [row for row in table.there(result["rows"]) if row["outcome"] not in ("right", "refused")]
    if bad:
        return 1
    return 3 if result["not_run"] else 0


if __name__ == "__main__":
    sys.exit(main())
