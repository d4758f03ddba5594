"""Time of Qwen2.5-VL's vision tower: eager, compiled, and on graphs of fixed budgets.

Run it on a machine with a CUDA device::

    python examples/benchmarks/encode_time.py
    python examples/benchmarks/encode_time.py --compile --seconds 60

The tower has the dimensions of the 7B model, in bfloat16, and random weights. ``eager`` is
``transformers``' own forward and SDPA attention, which runs window by window; ``varlen`` the same
forward with offsets on the device. ``graphs`` is the manager's ``execute`` with all that it does:
packing, copies in, replay, one copy out; ``derived`` the same without a protocol, by
``from_model``; ``aligned`` the graphs of a tower whose products have fast shapes (``align`` of
``towers/aligned.py``). With ``--compile`` there are ``torch.compile`` of the
tower as it is, ``reduce-overhead``, and graphs of blocks that Inductor has compiled, of the tower
as it is and aligned. ``--profile`` shows the kernels of the last batch, for the last of these ways.

Then requests of 1 to 8 images, or of a video, are sent one after the other, eager and on graphs.

Exits with 1 where graphs take more than ``--limit`` of eager for a batch, less than 90 % of its
images are hits, or a result is not that of eager.
"""

import argparse
import gc
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from towers.aligned import align
from towers.qwen2_5_vl import Qwen25VLTower
from towers.varlen_attention import ATTENTION
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

import cgcompile
from cgcompile.encoder import EncoderCudaGraphManager

REAL: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SMALL: dict[str, Any] = {
    **REAL,
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 60,
    "num_heads": 4,
}
SMALL |= {"out_hidden_size": 32, "fullatt_block_indexes": [1]}

# Output tokens of the graphs, each at most a third above the one before, from 1024 on an eighth
BUDGETS: tuple[int, ...] = (64, 96, 128, 144, 192, 256, 320, 384, 448, 512, 576, 640, 704, 832)
BUDGETS += (1024, 1152, 1280, 1408, 1536, 1664, 1856, 2048, 2304, 2560, 2816, 3072, 3456, 3840)
BUDGETS += (4224, 4608)
SIDES = (224, 280, 336, 392, 448, 560, 672, 784, 896)
FRAMES = 64  # in one replay, of all its images and videos
LEAST_HITS = 0.9

Grid = tuple[int, int, int]
Call = dict[str, torch.Tensor]
Run = Callable[[Call], Any]


def grid_of(height: int, width: int, frames: int = 1) -> Grid:
    """Of pixels, in patches; a frame is two pictures of a video."""
    return frames, 2 * (height // 28), 2 * (width // 28)


def mixed(source: random.Random, count: int) -> list[Grid]:
    return [grid_of(source.choice(SIDES), source.choice(SIDES)) for _ in range(count)]


def batches(seed: int) -> dict[str, list[Grid]]:
    source = random.Random(seed)
    return {
        "1 x 336": [grid_of(336, 336)],
        "1 x 672": [grid_of(672, 672)],
        "4 mixed": mixed(source, 4),
        "16 mixed": mixed(source, 16),
    }


def stream(seed: int, count: int) -> list[list[Grid]]:
    """Requests of 1 to 8 images; each fourth a video of 2 to 8 frames."""
    source = random.Random(seed)
    requests = []
    for number in range(count):
        if number % 4 == 3:
            side = source.choice(SIDES[:5])
            requests.append([grid_of(side, side, source.randint(2, 8))])
        else:
            requests.append(mixed(source, source.choice((1, 1, 1, 2, 3, 4, 6, 8))))
    return requests


def make_call(grids: Sequence[Grid], args: argparse.Namespace) -> Call:
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, 3 * 2 * 14 * 14, device=args.device).to(args.dtype)
    if any(t > 1 for t, _, _ in grids):
        return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def make_tower(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen2_5_VLConfig(vision_config=SMALL if args.small else REAL).vision_config
    with torch.device(args.device):  # where drawing so many weights takes no time
        tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    tower.set_attn_implementation("sdpa")
    return tower.eval().to(args.device, args.dtype)


def own_forward(forward: Callable[..., Any]) -> Run:
    """The tower as it is, grids on the device as ``transformers``' callers have them."""

    def run(call: Call) -> torch.Tensor:
        pixels, grids = call.values()
        features: torch.Tensor = forward(pixels, grid_thw=grids.to(pixels.device)).pooler_output
        return features

    return run


def milliseconds(run: Run, call: Call, repeats: int, seconds: float = 4.0) -> float:
    """Median over some repeats, or as many as fit into some seconds."""
    times: list[float] = []
    begin = time.perf_counter()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    while not times or (len(times) < repeats and time.perf_counter() - begin < seconds):
        wait()
        start = time.perf_counter()
        run(call)
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in what takes longer; a compilation has no end otherwise."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reason(error: BaseException) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:90]}"


def memory(args: argparse.Namespace) -> tuple[int, int]:
    """Bytes that torch's allocator holds, and bytes of the device that are in use."""
    gc.collect()
    if args.device != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved(), total - free


def derived(args: argparse.Namespace, tower: Any) -> Any:
    """The encoder that ``from_model`` derives from images of three sizes."""
    tower.config._attn_implementation = ATTENTION

    def forward(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> Any:
        return tower(pixel_values, grid_thw=image_grid_thw).pooler_output

    grids = [grid_of(224, 224), grid_of(56, 112), grid_of(448, 336)]
    items = [make_call([grid], args) for grid in grids]
    return EncoderCudaGraphManager.from_model(forward, items, token_budgets=[64]).model


def make_manager(args: argparse.Namespace, encoder: Any, name: str) -> EncoderCudaGraphManager:
    """All graphs captured, and what they took."""
    before = memory(args)
    start = time.perf_counter()
    manager = EncoderCudaGraphManager(
        encoder,
        device=args.device,
        dtype=args.dtype,
        token_budgets=args.budgets,
        max_batch_size=16,
        max_frames_per_batch=FRAMES,
        costs="measured" if args.calibrate else None,
        config=cgcompile.CompilationConfig(
            capture_device="host" if args.device == "cpu" else "auto"
        ),
    )
    capture = manager.capture()
    taken = time.perf_counter() - start
    pool, lost = ((now - was) / 2**20 for now, was in zip(memory(args), before, strict=True))
    print(
        f"{name}: {len(capture.captured)} of {len(args.budgets)} graphs, {taken:.2f} s "
        f"(warm {capture.warm_seconds:.2f}, capture {capture.capture_seconds:.2f}); "
        f"allocator {pool:.0f} MiB, device {lost:.0f} MiB",
        flush=True,
    )
    return manager


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all values together, relative."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


class Report:
    """A line for each way and batch, and what is not as promised."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.broken: list[str] = []
        self.eager: dict[str, float] = {}

    def line(self, batch: str, way: str, taken: float, more: str = "") -> None:
        self.eager.setdefault(batch, taken)
        ratio = taken / self.eager[batch]
        print(f"{batch:9} {way:16} {taken:8.2f} ms  ratio {ratio:5.2f}  {more}", flush=True)

    def plain(self, name: str, batch: str, call: Call, run: Run) -> torch.Tensor:
        result: torch.Tensor = run(call)
        self.line(batch, name, milliseconds(run, call, self.args.repeats))
        return result

    def graphs(
        self,
        name: str,
        batch: str,
        call: Call,
        manager: EncoderCudaGraphManager,
        expected: torch.Tensor,
    ) -> None:
        manager.statistics.clear()
        actual = torch.cat(manager.execute(dict(call)))
        seen = manager.statistics
        hits, waste, error = seen.hit_rate, seen.waste(), difference(actual, expected)
        taken = milliseconds(lambda call: manager.execute(dict(call)), call, self.args.repeats)
        more = f"waste {waste:5.1%}  hits {hits:4.0%}  replays {seen.replays}  error {error:.1e}"
        self.line(batch, name, taken, more)
        if taken > self.args.limit * self.eager[batch]:
            self.broken.append(f"{batch}, {name}: above {self.args.limit} of eager")
        if hits < LEAST_HITS:
            self.broken.append(f"{batch}, {name}: {hits:.0%} hits")
        if not error < (1e-4 if self.args.dtype == torch.float32 else 5e-2):
            self.broken.append(f"{batch}, {name}: results differ from eager by {error:.1e}")


def compiled_ways(tower: Any) -> dict[str, Run]:
    return {
        "compile": own_forward(torch.compile(deepcopy(tower))),
        "reduce-overhead": own_forward(torch.compile(deepcopy(tower), mode="reduce-overhead")),
    }


def compare(report: Report, args: argparse.Namespace, tower: Any) -> EncoderCudaGraphManager:
    """Each batch in each way; return the last manager."""
    chosen = batches(args.seed)
    calls = {name: make_call(chosen[name], args) for name in args.batches}
    expected = {
        name: report.plain("eager", name, call, own_forward(tower)) for name, call in calls.items()
    }
    inner = deepcopy(tower)
    managers = {
        "graphs": make_manager(args, Qwen25VLTower(inner), "graphs"),
        "derived": make_manager(args, derived(args, deepcopy(tower)), "derived"),
        "aligned": make_manager(args, Qwen25VLTower(aligned(tower)), "aligned"),
    }
    for name, call in calls.items():
        report.plain("varlen", name, call, own_forward(inner))
        for way, manager in managers.items():
            report.graphs(way, name, call, manager, expected[name])
    manager = managers["aligned"]
    if args.compile:
        manager = compare_compiled(report, args, tower, calls, expected) or manager
    if args.profile:
        profile(manager, calls[args.batches[-1]])
    return manager


def compare_compiled(
    report: Report,
    args: argparse.Namespace,
    tower: Any,
    calls: dict[str, Call],
    expected: dict[str, torch.Tensor],
) -> EncoderCudaGraphManager | None:
    """Return the last manager, if there is one."""
    for way, run in compiled_ways(tower).items():
        try:
            with limited(args.seconds):
                for name, call in calls.items():
                    report.plain(way, name, call, run)
        except Exception as error:
            print(f"{way}: {reason(error)}", flush=True)
        torch._dynamo.reset()
    manager = None
    for way, prepare in (("graphs, compiled", deepcopy), ("aligned, compiled", aligned)):
        inner = prepare(tower)
        try:
            with limited(args.seconds):
                for block in inner.blocks:
                    block.compile(dynamic=True)
                manager = make_manager(args, Qwen25VLTower(inner), way)
            for name, call in calls.items():
                report.graphs(way, name, call, manager, expected[name])
        except Exception as error:
            print(f"{way}: {reason(error)}", flush=True)
        torch._dynamo.reset()
    return manager


def aligned(tower: Any) -> Any:
    return align(deepcopy(tower))


def percentiles(times: Sequence[float]) -> str:
    ordered = sorted(times)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    return f"p50 {at[0]:7.2f} ms  p99 {at[1]:7.2f} ms"


def serve(manager: EncoderCudaGraphManager, args: argparse.Namespace, tower: Any) -> None:
    """A stream of requests, each of which is new."""
    ways: dict[str, Run] = {
        "eager": own_forward(tower),
        "graphs": lambda call: manager.execute(dict(call)),
    }
    calls = [make_call(grids, args) for grids in stream(args.seed, args.requests)]
    manager.statistics.clear()
    for name, run in ways.items():
        times = [milliseconds(run, call, 1) for call in calls]
        print(f"stream of {len(calls)}: {name:7} {percentiles(times)}", flush=True)
    seen = manager.statistics
    print(f"stream: waste {seen.waste():.1%}, hits {seen.hit_rate:.1%}")
    print(manager.coverage())


def profile(manager: EncoderCudaGraphManager, call: Call) -> None:
    """Where the time of a replay goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        manager.execute(dict(call))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    averages = trace.key_averages()
    print(averages.table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a vision tower.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a tower of two small blocks")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--calibrate", action="store_true", help="measure what eager costs, too")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--seconds", type=int, default=120, help="limit of each compiled way")
    parser.add_argument("--profile", action="store_true", help="kernels of the last batch and way")
    parser.add_argument("--batches", nargs="+", default=list(batches(0)), choices=list(batches(0)))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--requests", type=int, default=60, help="of the stream; 0: none")
    parser.add_argument("--limit", type=float, default=0.5, help="of eager")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.dtype = getattr(torch, args.dtype)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    report = Report(args)
    with torch.inference_mode():
        tower = make_tower(args)
        manager = compare(report, args, tower)
        if args.requests:
            serve(manager, args, tower)
    for problem in report.broken:
        print(f"BROKEN: {problem}")
    print(f"at most {args.limit} of eager, and right: {'no' if report.broken else 'yes'}")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
