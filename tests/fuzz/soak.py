"""``python -m fuzz.soak``, from the folder ``tests``: long use leaves nothing behind.

Replays, releases, invalidations, and models made and dropped. Memory, tensors, objects, threads and
descriptors are read after a warm-up round and at the end; exit 1 if one of them has grown.
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


def reading(device: str) -> dict[str, int]:
    for _ in range(3):
        gc.collect()
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


def soak(device: str, scale: float) -> list[str]:
    """Run all; return what has grown beyond its bound."""
    counts = {name: max(3, int(count * scale)) for name, count in COUNTS.items()}
    subject = Soak(device)
    subject.run(200, 3, 3, 3)
    start = reading(device)
    subject.run(**counts)
    end = reading(device)
    print(f"{counts}\nstart {start}\nend   {end}")
    # Dynamo's guards leave about 230 objects a trace in finalizers of what was guarded.
    traces = counts["invalidations"] + counts["models"]
    bounds = BOUNDS | {"objects": BOUNDS["objects"] + 300 * traces}
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
