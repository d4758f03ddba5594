"""``python -m fuzz.soak``, from the folder ``tests``: long use leaves nothing behind.

The phases: replays; releases, each with a new capture; traces of plain torch, which bound those of
``torch._dynamo.reset()``; invalidations, each with a new trace; resets, likewise; models
made and dropped. The figures of each are printed as it ends. Exit 1 if something has grown.

Device memory, tensors, threads and descriptors must be at most what they were at the start. Host
memory and objects are compared with the end of the phase before. Host memory is what is resident
after a garbage collection and ``malloc_trim``, with one arena of glibc, so that neither a peak nor
free memory of an arena counts; the peak is printed beside it. A phase may add 16 MiB. Dynamo itself
leaks: of each trace it keeps the guards, in finalizers of the objects that they compare, and the
generated source. So traces of ``torch.compile(backend="eager")`` with ``torch._dynamo.reset()`` are
measured as well, and the same reset of graphs of this backend may add as much a trace beside the 16
MiB. Traces of ``cgcompile.compile`` have no such finalizers: they may add a few objects each.
"""

import argparse
import ctypes
import gc
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from lib.front_ends import settings
from torch import nn

import cgcompile
from cgcompile.compile import CompiledModel

WIDTH = 64
COUNTS = {
    "replays": 100_000,
    "releases": 1_000,
    "plain": 1_000,
    "invalidations": 1_000,
    "resets": 200,
    "models": 200,
}
# MiB of one workspace of cuBLAS on Hopper. A capture frees what torch caches of them, and a plain
# product takes one again, so a phase may end with one where the start had none.
WORKSPACE = 32
# What may be more than at the start; memory in MiB.
BOUNDS = {
    "device": 8 + WORKSPACE,
    "reserved": 8 + WORKSPACE,
    "tensors": 0,
    "threads": 0,
    "descriptors": 0,
}
HOST = 16  # MiB that each phase may add
OBJECTS = 500  # that each phase may add, beside those of each turn
OF_A_TURN = {"replays": 0.0, "releases": 1.0, "invalidations": 8.0, "models": 8.0}
WARM_UP = 70  # turns of a phase before it is measured: torch caches 64 metrics and 128 sources
DYNAMO = 1.15  # times the objects of plain torch.compile: a trace here has one guard more

Reading = dict[str, float]


def one_arena() -> None:
    """Let glibc allocate from one arena; free memory of others would stay resident."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-8, 1)  # M_ARENA_MAX


def resident() -> float:
    """Return the resident memory in MiB, after free memory was given back."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def reading(device: str) -> Reading:
    """Read the figures that are compared."""
    for _ in range(3):
        gc.collect()
    cgcompile.Backend(cache_dir="off").release()  # destroys graphs of models that are gone
    objects = gc.get_objects()
    count, tensors = len(objects), sum(issubclass(type(item), torch.Tensor) for item in objects)
    del objects
    now: Reading = {
        "host": round(resident(), 1),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "objects": count,
        "tensors": tensors,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        now |= {"device": (total - free) >> 20, "reserved": torch.cuda.memory_reserved() >> 20}
    return now


class Soak:
    """The phases: each method is called with a number of turns."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = cgcompile.compile(self.layers(), self.backend())  # of the first phases
        self.backends = self.backend()
        self.compiled = torch.compile(self.layers(), backend=self.backends)
        self.eager = torch.compile(self.layers(), backend="eager")

    def layers(self) -> nn.Module:
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(self.device)
        return layers.requires_grad_(False)

    def backend(self) -> cgcompile.Backend:
        return cgcompile.Backend(settings(self.device, cache_dir="off"))

    def run(self, model: Callable[..., Any], plain: nn.Module, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(4, WIDTH, device=self.device)
            result = model(x)
            if step % 100 == 0:
                torch.testing.assert_close(result, plain(x))

    def serve(self, model: CompiledModel, steps: int) -> None:
        """Warm up, capture, and replay in all other steps."""
        before = model.backend.counters
        self.run(model, model.unwrap(), steps)
        after = model.backend.counters
        assert after.replays - before.replays == steps - 2 * (after.captures - before.captures)

    def replays(self, turns: int) -> None:
        self.serve(self.model, turns)

    def releases(self, turns: int) -> None:
        for _ in range(turns):
            self.model.backend.release()
            self.serve(self.model, 3)

    def plain(self, turns: int) -> None:
        for _ in range(turns):
            torch._dynamo.reset()
            self.run(self.eager, self.eager._orig_mod, 3)

    def invalidations(self, turns: int) -> None:
        for _ in range(turns):
            before = self.model.backend.counters.replays
            self.model.invalidate("soak")
            self.run(self.model, self.model.unwrap(), 3)
            assert self.model.backend.counters.replays - before == 1

    def resets(self, turns: int) -> None:
        for _ in range(turns):
            before = self.backends.counters.replays
            torch._dynamo.reset()
            self.run(self.compiled, self.compiled._orig_mod, 3)
            assert self.backends.counters.replays - before == 1

    def models(self, turns: int) -> None:
        for _ in range(turns):
            model = cgcompile.compile(self.layers(), self.backend())
            self.serve(model, 4)


def soak(device: str, scale: float, warm_up: int = WARM_UP) -> list[str]:
    """Run all phases; return what has grown beyond its bound."""
    subject = Soak(device)
    grown: list[str] = []
    with torch.inference_mode():
        for name in COUNTS:
            getattr(subject, name)(warm_up)
        start = before = reading(device)
        print(f"start {start}", flush=True)
        of_plain: Reading = {}
        for name, full in COUNTS.items():
            turns, begun = max(3, int(full * scale)), time.perf_counter()
            getattr(subject, name)(turns)
            seconds = time.perf_counter() - begun
            after = reading(device)
            added = {key: after[key] - before[key] for key in ("host", "objects")}
            text = f"{added['host']:+.1f} MiB, {added['objects'] / turns:+.2f} objects a turn"
            print(f"{name} {turns} in {seconds:.0f} s: {text}: {after}", flush=True)
            if name == "plain":
                of_plain = {key: max(0.0, value) / turns for key, value in added.items()}
            else:
                over = exceeded(name, turns, added, of_plain)
                over += [
                    key for key in BOUNDS.keys() & after if after[key] - start[key] > BOUNDS[key]
                ]
                grown += [f"{key} in {name}" for key in over]
            before = after
    return grown


def exceeded(name: str, turns: int, added: Reading, of_plain: Reading) -> list[str]:
    """Return which of host memory and objects a phase has added too much of."""
    host = HOST + (of_plain["host"] * turns if name == "resets" else 0)
    of_a_turn = OF_A_TURN[name] if name in OF_A_TURN else DYNAMO * of_plain["objects"]
    bounds = {"host": host, "objects": OBJECTS + of_a_turn * turns}
    return [key for key, bound in bounds.items() if added[key] > bound]


def main() -> int:
    parser = argparse.ArgumentParser("python -m fuzz.soak", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="0.01 for a hundredth of it all")
    arguments = parser.parse_args()
    one_arena()
    grown = soak(arguments.device, arguments.scale)
    print(f"grown: {', '.join(grown)}" if grown else "nothing has grown")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
