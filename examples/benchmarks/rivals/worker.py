"""One process of ``compare.py``: compiles all variants of a decoder, captures, checks, measures.

What it has found is written after each stage, so that a process that is ended loses little. When
everything is compiled it waits for its turn, so that the machine is quiet when it measures.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rivals.measure import Broken, check, error_limit, measure
from rivals.ours import all_ours
from rivals.timing import Probe, memory
from rivals.torchs import GraphedCallables, HandGraph, MetaPieces, Plain, ReduceOverhead
from rivals.variant import LeftOut, Setup, Variant

CAPTURE_SECONDS = 15.0  # after which a variant of others captures no further sizes


def all_variants(setup: Setup, few: bool) -> list[Variant]:
    """Everything that is compared, in the order of the table."""
    eager = Plain(setup, "eager")
    dynamic = Plain(setup, "torch.compile dynamic", {"dynamic": True})
    hand = HandGraph(setup, "graph by hand", dynamic)
    ours = all_ours(setup, eager, dynamic, few)
    if few:
        return [eager, dynamic, hand, MetaPieces(setup, "piecewise-cuda-graphs", eager), *ours]
    static = Plain(setup, "torch.compile static", {"dynamic": False}, only=setup.batches[0])
    return [
        eager,
        static,
        dynamic,
        ReduceOverhead(setup, "reduce-overhead", hand),
        hand,
        HandGraph(setup, "graph by hand, static", static),
        GraphedCallables(setup, "make_graphed_callables", dynamic, hand),
        MetaPieces(setup, "piecewise-cuda-graphs", eager),
        MetaPieces(setup, "piecewise-cuda-graphs over torch.compile", dynamic),
        *ours,
    ]


class Worker:
    """The stages of one process.

    Args:
        setup: model and sizes.
        file: what was found goes there, as JSON.
        few: leave out variants that are measured on another model.
        only: names of variants; empty for all.
        deadline: a time of ``time.monotonic`` at which it should be done.
    """

    def __init__(
        self, setup: Setup, file: Path, *, few: bool, only: tuple[str, ...], deadline: float
    ) -> None:
        self.setup, self.file, self.deadline = setup, file, deadline
        self.variants = all_variants(setup, few)
        if only:
            self.variants = [each for each in self.variants if each.is_eager or each.name in only]
        self.probe = Probe.make() if setup.device == "cuda" else None
        self.found: dict[str, Any] = {
            "dims": asdict(setup.dims),
            "dtype": str(setup.dtype).removeprefix("torch."),
            "device": setup.device,
            "compiler": setup.compiler,
            "sizes": list(setup.sizes),
            "error_limit": error_limit(setup),
            "pieces": setup.dims.layers + 1,
            "variants": {each.name: {"floor_name": each.floor_name} for each in self.variants},
            "batches": {},
        }

    def save(self) -> None:
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(self.found, indent=1))
        whole.replace(self.file)

    def say(self, text: str) -> None:
        print(f"[{self.file.stem}] {text}", file=sys.stderr, flush=True)

    def tried(self, variant: Variant, stage: str, run: Callable[[], Any]) -> bool:
        """Whether a stage of a variant went well; else why not is noted, and the others go on."""
        about = self.found["variants"][variant.name]
        start = time.monotonic()
        bad = ""
        try:
            run()
        except LeftOut as error:
            bad = about["left_out"] = str(error)
        except Exception as error:
            (first, *_) = [*str(error).splitlines(), ""]
            kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
            bad = f"{stage}: {kind}{first[:300]}"
            about.setdefault("failures", []).append(bad)
            self.say(traceback.format_exc())
        about.setdefault("seconds", {})[stage] = time.monotonic() - start
        if bad:
            self.say(f"{variant.name}: {bad}")
        return not bad

    def prepare(self) -> None:
        """Compile everything; what can wait only in the first half of the time."""
        self.setup.steps.draw(0)
        half = (time.monotonic() + self.deadline) / 2

        def run(variant: Variant) -> None:
            if variant.can_wait and time.monotonic() > half:
                raise LeftOut("no time left to compile it")
            variant.prepare()

        for candidate in sorted(self.variants, key=lambda each: each.can_wait):
            if not self.tried(candidate, "prepare", partial(run, candidate)):
                self.variants.remove(candidate)
            self.save()
        self.say(f"compiled; {self.deadline - time.monotonic():.0f} s left")

    def capture(self) -> None:
        """Capture all sizes of each variant, with what that takes of memory."""
        kept = []
        for variant in self.variants:
            if self.tried(variant, "capture", lambda each=variant: self._capture(each)):  # type: ignore[misc]
                kept.append(variant)
        self.variants = kept
        self.save()
        self.say(f"captured; {self.deadline - time.monotonic():.0f} s left")

    def _capture(self, variant: Variant) -> None:
        before = memory(self.setup.device)
        capture = variant.capture(CAPTURE_SECONDS)
        if capture is None:
            return
        pool, device = (
            now - was for now, was in zip(memory(self.setup.device), before, strict=True)
        )
        self.found["variants"][variant.name]["capture"] = {
            **asdict(capture),
            "pool_bytes": pool,
            "device_bytes": device,
        }

    def time_all(self, rounds: int, repeats: int) -> None:
        """Check and measure each batch; the time that is left is shared among them."""
        batches = self.setup.batches
        gc.collect()
        gc.disable()
        for index, batch in enumerate(batches):
            now = time.monotonic()
            if now > self.deadline:
                self.found["batches"][str(batch)] = {"error": "no time left"}
                continue
            right = [each for each in self.variants if each.runs(batch) and self.check(each, batch)]
            until = now + (self.deadline - now) / (len(batches) - index)
            self.found["batches"][str(batch)] = measure(
                self.setup,
                right,
                batch,
                rounds=rounds,
                repeats=repeats,
                until=until,
                probe=self.probe,
            )
            self.save()
            self.say(f"batch {batch}; {self.deadline - time.monotonic():.0f} s left")
        gc.enable()

    def check(self, variant: Variant, batch: int) -> bool:
        about = self.found["variants"][variant.name]

        def run() -> None:
            about.setdefault("errors", {})[str(batch)] = check(self.setup, variant, batch)

        return self.tried(variant, f"check of batch {batch}", run)


def work(worker: Worker, wait_for_turn: Callable[[], object], *, rounds: int, repeats: int) -> int:
    """All stages; ``wait_for_turn`` is called in between, when all is compiled.

    Returns:
        1 if a variant of cgcompile failed.
    """
    with torch.inference_mode():
        worker.prepare()
        wait_for_turn()
        worker.capture()
        worker.time_all(rounds, repeats)
    worker.found["complete"] = True
    worker.save()
    failed = [
        name
        for name, about in worker.found["variants"].items()
        if name.startswith("cgcompile") and about.get("failures")
    ]
    return 1 if failed else 0
