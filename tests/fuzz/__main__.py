"""``python -m fuzz``, from the folder ``tests``: many programs, in several processes."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from fuzz.number_programs import fuzz as fuzz_numbers
from fuzz.programs import FEATURES
from fuzz.running import Options, fuzz, outcome
from fuzz.states import fuzz_metadata, fuzz_state
from fuzz.subclass_programs import fuzz as fuzz_subclasses


class Kind(NamedTuple):
    """A kind of random programs, and what a run of many must reach."""

    fuzz: Callable[[int, Options], Counter[str]]
    steps: int  # of a program, by default
    replayed: float  # the least part of the steps of programs that may have graphs
    refused: float = 0.05  # the largest part of the programs: torch alone differs from eager too


KINDS = {
    "modules": Kind(fuzz, 300, 0.4),  # refused: torch fixes a size that is to vary
    "numbers": Kind(fuzz_numbers, 20, 0.15, refused=0.2),
    "subclasses": Kind(fuzz_subclasses, 20, 0.3, refused=0.2),
    "state": Kind(fuzz_state, 20, 0.4),
    "metadata": Kind(fuzz_metadata, 20, 0.4),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m fuzz", description=__doc__)
    parser.add_argument("--kind", choices=tuple(KINDS), default="modules", help="of programs")
    parser.add_argument("--programs", type=int, help="how many, in place of --steps")
    parser.add_argument("--steps", type=int, default=10_000, help="in all")
    parser.add_argument("--each", type=int, help="steps of a program")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiler", choices=("eager", "aot", "inductor"), default="eager")
    parser.add_argument("--features", nargs="+", choices=tuple(FEATURES), default=tuple(FEATURES))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--reproduce", type=int, help="run the program of this seed alone")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    kind = KINDS[args.kind]
    steps = args.each or kind.steps
    options = Options(args.device, args.compiler, tuple(args.features), steps)
    seeds = range(args.seed, args.seed + (args.programs or -(-args.steps // steps)))
    if args.reproduce is not None:
        seeds = range(args.reproduce, args.reproduce + 1)
    start, totals, failed = time.monotonic(), Counter[str](), 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.workers, maxtasksperchild=50) as pool:
        pending = [pool.apply_async(outcome, (seed, options, kind.fuzz)) for seed in seeds]
        for waited in pending:
            left = args.seconds - (time.monotonic() - start)
            if left <= 0:
                break
            try:
                _, counts, text = waited.get(None if left == float("inf") else left)
            except multiprocessing.TimeoutError:
                break
            totals += counts
            if text:
                failed += 1
                print(text, "\n", flush=True)
        pool.terminate()
    share = totals["replays"] / max(1, totals["graph_steps"])
    print(
        f"{dict(totals)}, {failed} failed, {share:.0%} replayed, {time.monotonic() - start:.0f} s"
    )
    refused = totals["refused"] > max(1, kind.refused * totals["programs"])
    idle = totals["graph_steps"] == 0 and not totals["refused"]
    low = totals["graph_steps"] > 0 and share < kind.replayed
    return int(failed > 0 or refused or idle or low)


if __name__ == "__main__":
    sys.exit(main())
