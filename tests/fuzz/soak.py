"""``python -m fuzz.soak``, from the folder ``tests``: long use leaves nothing behind.

Replays, releases, invalidations, and models made and dropped. Memory, tensors, objects, threads and
descriptors are read after a warm-up round and at the end; exit 1 if one of them has grown. Dynamo
keeps a few hundred objects of each trace, in finalizers of the objects that it guarded: what
``torch.compile(backend="eager")`` and ``torch._dynamo.reset()`` leave is measured, and allowed.
"""

import argparse
import gc
import os
import resource
import sys
import threading

import torch
from torch import nn

import cgcompile

WIDTH = 64
COUNTS = {"replays": 100_000, "releases": 1_000, "invalidations": 1_000, "models": 200}
# What may be more at the end; memory in MiB.
BOUNDS = {"host": 64, "device": 40, "reserved": 8, "tensors": 0, "objects": 2000, "threads": 0}
DYNAMO = 1.15  # times what plain torch.compile leaves: a trace here has one guard more


def reading(device: str) -> dict[str, int]:
    for _ in range(3):
        gc.collect()
    cgcompile.Backend(cache_dir="off").release()  # destroys graphs of models that are gone
    objects = gc.get_objects()
    now = {
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "tensors": sum(isinstance(each, torch.Tensor) for each in objects),
        "objects": len(objects),
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
    """One model that is replayed, released and invalidated, and many that are dropped."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = self.serving()

    def serving(self) -> cgcompile.CompiledModel:
        capture_device = "host" if self.device == "cpu" else "auto"
        backend = cgcompile.Backend(
            compiler="eager", cache_dir="off", capture_device=capture_device
        )
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(self.device)
        return cgcompile.compile(layers.requires_grad_(False), backend)

    def replay(self, model: cgcompile.CompiledModel, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(4, WIDTH, device=self.device)
            made = model(x)
            if step % 100 == 0:
                torch.testing.assert_close(made, model.unwrap()(x))

    def run(self, replays: int, releases: int, invalidations: int, models: int) -> None:
        with torch.inference_mode():
            self.replay(self.model, 4)  # warms up and captures
            before = self.model.backend.counters.replays
            self.replay(self.model, replays)
            assert self.model.backend.counters.replays - before == replays
            for _ in range(releases):
                self.model.backend.release()
                self.replay(self.model, 3)
            for _ in range(invalidations):
                self.model.invalidate("soak")
                self.replay(self.model, 3)
            for _ in range(models):
                self.replay(self.serving(), 4)


def left_by_dynamo(device: str, traces: int = 10) -> float:
    """How many objects torch itself leaves of each trace."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device).requires_grad_(False)
    compiled, x = torch.compile(layers, backend="eager"), torch.randn(4, WIDTH, device=device)
    counts = []
    with torch.inference_mode():
        for count in (3, traces):
            for _ in range(count):
                torch._dynamo.reset()
                compiled(x)
            counts.append(reading(device)["objects"])
    return (counts[1] - counts[0]) / traces


def soak(device: str, scale: float) -> list[str]:
    """Run all; return what has grown beyond its bound."""
    counts = {name: max(3, int(count * scale)) for name, count in COUNTS.items()}
    subject = Soak(device)
    subject.run(200, 3, 3, 3)
    start = reading(device)
    subject.run(**counts)
    end = reading(device)
    by_dynamo = left_by_dynamo(device)
    traces = counts["invalidations"] + counts["models"]
    print(f"{counts}\nstart {start}\nend   {end}")
    grown = (end["objects"] - start["objects"]) / traces
    print(f"objects of a trace that stay: {grown:.0f}; of plain torch.compile: {by_dynamo:.0f}")
    bounds = BOUNDS | {"objects": BOUNDS["objects"] + int(DYNAMO * by_dynamo * traces)}
    return [name for name in end if end[name] - start[name] > bounds.get(name, 0)]


def main() -> int:
    parser = argparse.ArgumentParser("python -m fuzz.soak", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="0.01 for a hundredth of it all")
    given = parser.parse_args()
    grown = soak(given.device, given.scale)
    print(f"grown: {', '.join(grown)}" if grown else "nothing has grown")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
