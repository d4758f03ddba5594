"""Time of networks of other libraries: cgcompile beside the modes of ``torch.compile``.

Run it on a machine with a CUDA device::

    pip install transformers torchao diffusers accelerate
    python examples/benchmarks/library_time.py

A *decode* case is one token of a Llama for 8 sequences with a static cache, its weights in
bfloat16, int8 or float8 (torchao). A *loop* case is a denoising loop of 20 steps of diffusers, with
the scheduler, of a UNet like that of SDXL and of a transformer like that of Flux.

All networks have random weights. Milliseconds per call of the network, medians, the ways in turn:
``gpu`` is the time between two events around a call enqueued before any of it ran, ``host`` the
time until a call returns, ``wall`` that of a whole loop until the device is idle, per call.
``replayed`` is the share of the calls of cgcompile after its warm-up.

Each case runs in a process of its own; they compile side by side, and are measured one by one after
all have compiled. Exits with 1 where the result of a first step differs from eager: the loop of a
network with random weights multiplies what rounding changes. A case whose library is missing is
left out.
"""

import argparse
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rivals.timing import burst_seconds, gpu_seconds, wall_seconds

import cgcompile

CASES = ("llama", "llama int8", "llama float8", "unet loop", "flux loop")
STEPS = 20  # of a loop, or tokens
Loop = Callable[..., torch.Tensor]  # of a network, and of steps, by default all


def llama(kind: str, device: str) -> tuple[torch.nn.Module, Loop]:
    """Decode with a static cache, in bfloat16 or with quantized weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    sizes = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=4096,
    )
    network: Any = LlamaForCausalLM(sizes)
    network.to(device, torch.bfloat16)
    if kind:
        from torchao import quantization

        name = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}[kind]
        # Else torchao tunes the kernels of the whole process for minutes, whatever compiles it.
        config = getattr(quantization, name)(set_inductor_config=False)
        quantization.quantize_(network, config)
    text = torch.randint(4096, (STEPS, 8, 1), device=device)  # given: no near ties decide
    caches: dict[int, Any] = {}  # of each way: graphs read one cache

    def loop(call: Any, steps: int = STEPS) -> torch.Tensor:
        if id(call) not in caches:
            cache = StaticCache(config=sizes, max_cache_len=2 * STEPS)
            cache.early_initialization(8, 8, 128, torch.bfloat16, torch.device(device))
            caches[id(call)] = cache
        cache = caches[id(call)]
        cache.reset()
        for tokens in text[:steps]:
            logits: torch.Tensor = call(input_ids=tokens, past_key_values=cache).logits
        return logits.float()

    return network, loop


def denoising(
    network: torch.nn.Module, scheduler: Any, latents: torch.Tensor, arguments: dict[str, Any]
) -> tuple[torch.nn.Module, Loop]:
    """A loop of a scheduler over a network of diffusers."""

    def loop(call: Any, steps: int = STEPS) -> torch.Tensor:
        scheduler.set_timesteps(STEPS, device=latents.device)
        now = latents
        for timestep in scheduler.timesteps[:steps]:
            times = timestep.expand(len(now)).to(now.dtype)
            noise = call(now, timestep=times, return_dict=False, **arguments)[0]
            now = scheduler.step(noise, timestep, now, return_dict=False)[0]
        return now.float()

    return network, loop


def unet(device: str) -> tuple[torch.nn.Module, Loop]:
    """A UNet like that of SDXL, for a guided image of 512 x 512."""
    import diffusers

    network = diffusers.UNet2DConditionModel(
        sample_size=64,
        block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        cross_attention_dim=256,
        attention_head_dim=(1, 2, 4),
        use_linear_projection=True,
    ).to(device, torch.bfloat16)
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    prompts = {"encoder_hidden_states": torch.randn(2, 77, 256, **like)}
    scheduler = diffusers.DDIMScheduler()
    return denoising(network, scheduler, torch.randn(2, 4, 64, 64, **like), prompts)


def flux(device: str) -> tuple[torch.nn.Module, Loop]:
    """A transformer like that of Flux, for an image of 512 x 512."""
    import diffusers

    network = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=512,
        pooled_projection_dim=512,
        axes_dims_rope=(8, 28, 28),
        guidance_embeds=False,
    ).to(device, torch.bfloat16)
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    arguments = {
        "encoder_hidden_states": torch.randn(1, 77, 512, **like),
        "pooled_projections": torch.randn(1, 512, **like),
        "img_ids": torch.rand(1024, 3, **like),
        "txt_ids": torch.zeros(77, 3, **like),
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return denoising(network, scheduler, torch.randn(1, 1024, 64, **like), arguments)


def make_case(name: str, device: str) -> tuple[torch.nn.Module, Loop]:
    """Return a network and a loop of calls of it, or of what it was compiled to."""
    torch.manual_seed(0)
    first, _, rest = name.partition(" ")
    case = llama(rest, device) if first == "llama" else {"unet": unet, "flux": flux}[first](device)
    case[0].eval().requires_grad_(False)
    return case


def ways_of(network: torch.nn.Module, backend: cgcompile.Backend) -> dict[str, Any]:
    """Return the network compiled in each way."""
    forward = network.forward  # each way compiles the code of the model afresh
    return {
        "default": torch.compile(forward),
        "reduce-overhead": torch.compile(forward, mode="reduce-overhead"),
        "cgcompile": torch.compile(forward, backend=backend),
    }


def last_call(loop: Loop, call: Any) -> Callable[[], Any]:
    """Return the last call of a loop, to be repeated with the arguments that it had."""
    seen: list[Any] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen[:] = [partial(call, *args, **kwargs)]
        return call(*args, **kwargs)

    loop(noting)
    repeated: Callable[[], Any] = seen[0]
    return repeated


def measure(name: str, device: str, lock: str, rounds: int) -> bool:
    """Print the rows of one case; return whether all results are those of eager."""
    file = open(lock, "w")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_SH)  # until it has compiled: then exclusively
    network, loop = make_case(name, device)
    backend = cgcompile.Backend(capture_device="auto" if device == "cuda" else "host")
    torch._dynamo.config.recompile_limit = 64  # of one code object, which all ways share
    ways = {"eager": network.forward}
    right = True
    with torch.inference_mode():
        expected = loop(network.forward, 1)
        for way, call in ways_of(network, backend).items():
            for _ in range(3):
                loop(call)
            result = loop(call, 1)
            error = float((result - expected).abs().max() / expected.abs().max())
            right &= error < 0.1
            ways[way] = call
            print(f"{name:14} {way:16} largest error {error:.4f}")
        before = backend.counters
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = times_of(loop, ways, device, rounds)
        file.close()
    after = backend.counters
    share = (after.replays - before.replays) / max(after.calls - before.calls, 1)
    for way, (gpu, host, wall) in rows.items():
        more = f"  replayed {share:.0%}" if way == "cgcompile" else ""
        print(f"{name:14} {way:16} gpu {gpu:7.3f}  host {host:7.3f}  wall {wall:7.3f} ms{more}")
    return right


def times_of(
    loop: Loop, ways: dict[str, Any], device: str, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Return milliseconds of the GPU, of the host and of the loop, per call of each way."""
    samples: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            wall = wall_seconds(partial(loop, call), device) / STEPS
            once = last_call(loop, call)
            host = burst_seconds(once, device, 3)
            gpu = gpu_seconds(once, host) if device == "cuda" else None
            samples[way].append((gpu or float("nan"), host, wall))
    return {
        way: tuple(1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        for way, rows in samples.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Networks of other libraries in several ways.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--case", help="measure this one in this process")
    parser.add_argument("--lock", default=os.devnull, help="of several processes: a file")
    args = parser.parse_args(argv)
    if args.case:
        try:
            return 0 if measure(args.case, args.device, args.lock, args.rounds) else 1
        except ImportError as error:
            print(f"{args.case}: left out: {error}")
            return 0
    with tempfile.TemporaryDirectory() as folder:
        same = [sys.executable, __file__, "--device", args.device, "--rounds", str(args.rounds)]
        same += ["--lock", str(Path(folder) / "lock")]
        runs = [
            subprocess.Popen([*same, "--case", name], stdout=subprocess.PIPE, text=True)
            for name in args.cases
        ]
        outputs = [run.communicate()[0] for run in runs]
    print(*outputs, sep="", end="")
    return max(run.returncode for run in runs)


if __name__ == "__main__":
    sys.exit(main())
