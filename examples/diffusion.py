"""Whole denoising loops of diffusers on CUDA graphs, compared with eager.

    pip install diffusers accelerate && python examples/diffusion.py

Four pipelines with small random weights: the UNet of SDXL, alone and with a ControlNet, and the
transformer of Flux, whole and block by block. Each call has another guidance scale, other prompts
and other noise, in two resolutions. The schedulers and the loops are those of diffusers.

Without a GPU the host recorder takes the place of CUDA graphs: same rules, no speed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cgcompile

SIZES = ((16, 16), (16, 32))  # of images, in pixels
GUIDANCE = (2.0, 5.0, 7.5)
TOLERANCE = 1e-3  # of pixels between 0 and 1, in float32 without TF32
LEAST_REPLAYED = 0.5  # of all calls: those that warm up and capture count as well
NO_TEXT = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
UNET: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2),
    "cross_attention_dim": 16, "attention_head_dim": 8, "norm_num_groups": 8,
    "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 6 * 8 + 16,
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {
    "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 16,
    "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True,
}  # fmt: skip
VAE: dict[str, Any] = {
    "block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4, "sample_size": 16,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "shift_factor": 0.0,
}  # fmt: skip


def sdxl(control: bool = False) -> Any:
    """A pipeline of SDXL without text encoders: prompts are given as embeddings."""
    import diffusers

    unet = diffusers.UNet2DConditionModel(**UNET)
    parts: dict[str, Any] = dict.fromkeys(NO_TEXT)
    parts |= {"unet": unet, "vae": diffusers.AutoencoderKL(**VAE)}
    parts |= {"scheduler": diffusers.EulerDiscreteScheduler(), "add_watermarker": False}
    if not control:
        return diffusers.StableDiffusionXLPipeline(**parts)
    net: Any = diffusers.ControlNetModel.from_unet(
        unet, conditioning_embedding_out_channels=(8, 16)
    )
    for weight in net.parameters():
        if not weight.any():  # a new ControlNet adds zeros
            torch.nn.init.normal_(weight, std=0.1)
    return diffusers.StableDiffusionXLControlNetPipeline(**parts, controlnet=net)


def flux() -> Any:
    """A pipeline of Flux without text encoders."""
    import diffusers

    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(**TRANSFORMER),
        vae=diffusers.AutoencoderKL(**VAE),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys(NO_TEXT),
    )


@dataclass
class Loop:
    """A pipeline, and what of it is compiled."""

    name: str
    make: Callable[[], Any]
    parts: Sequence[str]  # to compile; ``blocks`` are those of the transformer, one by one

    def pipeline(self, device: str, backend: cgcompile.Backend | None = None) -> Any:
        """Return the pipeline, its parts compiled if there is a backend."""
        torch.manual_seed(0)
        pipe = self.make().to(device)
        pipe.set_progress_bar_config(disable=True)
        if backend is None:
            return pipe
        for part in self.parts:
            if part == "blocks":
                pipe.transformer.compile_repeated_blocks(backend=backend, fullgraph=True)
            elif part == "decode":
                pipe.vae.decode = torch.compile(pipe.vae.decode, backend=backend)
            else:
                setattr(pipe, part, torch.compile(getattr(pipe, part), backend=backend))
        return pipe

    def run(self, pipe: Any, call: int, steps: int) -> torch.Tensor:
        """Return the image of one call."""
        height, width = SIZES[call % len(SIZES)]
        random = torch.Generator().manual_seed(call)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(pipe.vae.device)

        inputs: dict[str, Any] = {"height": height, "width": width, "generator": random}
        for kind in ("", "negative_") if hasattr(pipe, "unet") else ("",):
            inputs[f"{kind}prompt_embeds"] = draw(1, 5, 16)
            inputs[f"{kind}pooled_prompt_embeds"] = draw(1, 16)
        if "controlnet" in self.parts:
            inputs["image"] = draw(1, 3, height, width).sigmoid()
            inputs["controlnet_conditioning_scale"] = 0.5 + call / 10
        inputs |= {"num_inference_steps": steps, "guidance_scale": GUIDANCE[call // len(SIZES)]}
        image: torch.Tensor = pipe(**inputs, output_type="pt").images
        return image


LOOPS = (
    Loop("SDXL: UNet, VAE", sdxl, ("unet", "decode")),
    Loop("SDXL: UNet, ControlNet", lambda: sdxl(control=True), ("unet", "controlnet")),
    Loop("Flux: transformer, VAE", flux, ("transformer", "decode")),
    Loop("Flux: blocks", flux, ("blocks",)),
)


def compare(loop: Loop, device: str, compiler: str, steps: int) -> bool:
    """Return whether graphs draw the images of eager, and replay; print what they did."""
    recorder = "host" if device == "cpu" else "auto"
    backend = cgcompile.Backend(capture_device=recorder, compiler=compiler)
    eager, compiled = loop.pipeline(device), loop.pipeline(device, backend)
    calls = range(len(SIZES) * len(GUIDANCE))
    expected = [loop.run(eager, call, steps) for call in calls]
    images = [loop.run(compiled, call, steps) for call in calls]
    assert not torch.allclose(expected[0], expected[2], atol=0.1)  # so that stale results show
    worst = max(float((x - y).abs().max()) for x, y in zip(expected, images, strict=True))
    counters = backend.counters
    replayed = counters.replays / max(counters.calls, 1)
    print(f"{loop.name}: largest difference {worst:.1e}, {replayed:.0%} replayed; {counters}")
    return worst <= TOLERANCE and replayed >= LEAST_REPLAYED and not counters.degraded


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Denoising loops of diffusers on CUDA graphs.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiler", default="eager", help="or inductor, or aot")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(argv)
    try:
        import diffusers  # noqa: F401
    except ImportError:
        print("needs diffusers: pip install diffusers", file=sys.stderr)
        return 2
    torch.backends.cudnn.allow_tf32 = False
    right = [compare(loop, args.device, args.compiler, args.steps) for loop in LOOPS]
    print(f"promises kept: {'yes' if all(right) else 'no'}")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
