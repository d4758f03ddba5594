"""Images of mixed sizes through transformers' Qwen2.5-VL vision tower: eager, compiled, on graphs.

Run it from anywhere; the weights are random, nothing is downloaded, and images are drawn unless
files are named::

    pip install -e ".[examples]"
    python examples/encode_images.py
    python examples/encode_images.py --device cuda --real
    python examples/encode_images.py photo.jpg page.png

Each request holds a few images. Eager and compiled run the tower as it is. For graphs it is wrapped
by ``towers.qwen2_5_vl`` and captured once for a few budgets of output tokens; the manager packs the
images of a request into them. Without a GPU graphs are replayed by cgcompile's host recorder, which
is slow and keeps the rules of CUDA graphs. The script exits with 1 if a promise is broken:

* each image gives what it gives in eager, to rounding;
* at least 90 % of the images go through graphs;
* no more than 35 % of the replayed tokens are padding.
"""

import argparse
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from PIL import Image
from towers.images import drawn_image, image_call
from towers.qwen2_5_vl import Qwen25VLTower
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

import cgcompile
from cgcompile.encoder import EncoderCudaGraphManager, fitted_budgets

LEAST_HITS, MOST_WASTE = 0.9, 0.35
SMALL: dict[str, Any] = {"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
SMALL |= {"out_hidden_size": 48, "fullatt_block_indexes": [3]}
REAL: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
}
REAL |= {"out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]}

Call = dict[str, torch.Tensor]
Way = Callable[[Call], list[torch.Tensor]]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Images through a vision tower on graphs.")
    cuda = torch.cuda.is_available()
    parser.add_argument("files", nargs="*", help="images; left out: drawn ones")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="default: %(default)s")
    parser.add_argument("--real", action="store_true", help="the 7B model's dimensions, bfloat16")
    parser.add_argument("--compiler", default="inductor" if cuda else "eager", help="of torch")
    sizes = {"requests": 6, "images": 3, "tokens": 48, "budgets": 3, "rounds": 1, "seed": 0}
    if cuda:
        sizes |= {"requests": 24, "images": 4, "tokens": 1024, "budgets": 8, "rounds": 5}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    return parser.parse_args(argv)


def make_tower(args: argparse.Namespace) -> Any:
    """The tower with random weights, and transformers' own attention."""
    torch.manual_seed(args.seed)
    config: Any = Qwen2_5_VLConfig(vision_config=REAL if args.real else SMALL).vision_config
    with torch.device(args.device):
        tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    for parameter in tower.parameters():
        if parameter.dim() > 1 and not args.real:  # of so few columns the sums are small otherwise
            parameter.data.mul_(2.0)
    tower.set_attn_implementation("sdpa")
    return tower.eval().to(args.device, torch.bfloat16 if args.real else torch.float32)


def make_requests(args: argparse.Namespace, tower: Any) -> list[Call]:
    """Calls of one to ``--images`` images; files are taken in turn."""
    source = random.Random(args.seed)
    files = [Image.open(name) for name in args.files]
    taken = 0

    def image() -> Image.Image:
        nonlocal taken
        taken += 1
        return files[(taken - 1) % len(files)] if files else drawn_image(source)

    shape = (tower.patch_size, tower.spatial_merge_size, args.tokens, args.device)
    return [
        image_call([image() for _ in range(source.randint(1, args.images))], *shape)
        for _ in range(args.requests)
    ]


def tokens_of(call: Call, tower: Any) -> list[int]:
    """Output tokens of each image."""
    merged = call["image_grid_thw"].prod(1) // tower.spatial_merge_size**2
    return [int(each) for each in merged]


def own_forward(forward: Callable[..., Any], tower: Any) -> Way:
    """The tower as it is; results by image."""

    def run(call: Call) -> list[torch.Tensor]:
        pixels, grids = call["pixel_values"], call["image_grid_thw"]
        features = forward(pixels, grid_thw=grids.to(pixels.device)).pooler_output
        return list(features.split(tokens_of(call, tower)))

    return run


def make_manager(
    args: argparse.Namespace, tower: Any, requests: Sequence[Call]
) -> EncoderCudaGraphManager:
    """Graphs for the budgets that serve such requests best."""
    observed = [sum(tokens_of(call, tower)) for call in requests]
    budgets = fitted_budgets(observed, args.budgets, max_items=args.images)
    settings = cgcompile.CompilationConfig(
        capture_device="host" if torch.device(args.device).type == "cpu" else "auto"
    )
    manager = EncoderCudaGraphManager(
        Qwen25VLTower(deepcopy(tower)),
        device=args.device,
        dtype=tower.dtype,
        token_budgets=budgets,
        max_batch_size=args.images,
        config=settings,
    )
    print(f"budgets: {', '.join(map(str, manager.token_budgets))}")
    print(manager.capture())
    return manager


def milliseconds(way: Way, requests: Sequence[Call], args: argparse.Namespace) -> list[float]:
    """Of each request, the median of some rounds after a first one."""
    wait = torch.cuda.synchronize if torch.device(args.device).type == "cuda" else lambda: None
    medians = []
    for call in requests:
        times = []
        for _ in range(args.rounds + 1):
            wait()
            start = time.perf_counter()
            way(call)
            wait()
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times[1:]))
    return medians


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative to the largest value of each image."""
    if [each.shape for each in actual] != [each.shape for each in expected]:
        return float("inf")
    pairs = zip(actual, expected, strict=True)
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)) for one, other in pairs
    )


def broken_promises(
    difference: float, allowed: float, manager: EncoderCudaGraphManager
) -> list[str]:
    """What went wrong, a sentence each; empty if all is well."""
    broken, stats = [], manager.statistics
    if not difference <= allowed:
        broken.append(f"results differ from eager by {difference:.1e}, allowed {allowed:.0e}")
    if stats.hit_rate < LEAST_HITS:
        broken.append(f"{stats.misses} of {stats.hits + stats.misses} images without a graph")
    if stats.waste() > MOST_WASTE:
        broken.append(f"{stats.waste():.0%} of the replayed tokens are padding")
    return broken


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    torch.set_float32_matmul_precision("highest")
    # It tells at length that it gives up compiling the loop over windows for each number of them.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    tower = make_tower(args)
    requests = make_requests(args, tower)
    eager = own_forward(tower, tower)
    with torch.inference_mode():
        manager = make_manager(args, tower, requests)
        pairs = [(manager.execute(dict(call)), eager(call)) for call in requests]
        difference = max(largest_difference(mine, plain) for mine, plain in pairs)
        ways: dict[str, Way] = {
            "eager": eager,
            "compiled": own_forward(torch.compile(tower, backend=args.compiler), tower),
            "graphs": lambda call: manager.execute(dict(call)),
        }
        images = sum(len(call["image_grid_thw"]) for call in requests)
        print(f"requests: {len(requests)}, images: {images}")
        for name, way in ways.items():
            times = milliseconds(way, requests, args)
            print(f"{name:9} ms a request: median {statistics.median(times):8.2f}", end="")
            print(f"  longest {max(times):8.2f}")
    print(manager.coverage())
    print(f"waste: {manager.statistics.waste():.1%}")
    print(f"hits: {manager.statistics.hit_rate:.1%}")
    print(f"replays: {manager.statistics.replays}")
    print(f"largest difference from eager: {difference:.1e}")
    broken = broken_promises(difference, 1e-1 if args.real else 1e-4, manager)
    for problem in broken:
        print(f"BROKEN: {problem}")
    print(f"promises kept: {'no' if broken else 'yes'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
