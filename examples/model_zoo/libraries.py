"""Libraries beside transformers and timm in the zoo: adapters, quantized weights, diffusion.

A row whose library is not installed is ``not there``: no extra of cgcompile installs them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from model_zoo.entries import (
    VOCABULARY,
    Entry,
    Inputs,
    NotThere,
    both,
    from_config,
    normal,
    text,
    tokens,
)

Make = Callable[[], nn.Module]
Finish = Callable[[nn.Module], nn.Module]

LLAMA = from_config(
    "LlamaForCausalLM", "llama", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def case(name: str, library: str, structure: str, make: Make, inputs: Inputs, **more: Any) -> Entry:
    """A row; ``not there`` without its library."""

    def make_model() -> nn.Module:
        model: nn.Module = _present(make)
        return model.eval()

    finish = more.pop("finish", None)
    if finish is not None:
        more["finish"] = lambda model: _present(lambda: finish(model))
    return Entry(
        name, library, structure, library, make_model, inputs, more.pop("settings", {}), **more
    )


def _present(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ImportError as error:
        raise NotThere(str(error)) from error


# ---------------------------------------------------------------- adapters


def adapted(method: str, **values: Any) -> Make:
    """A decoder with the adapters ``default`` and ``other`` of one method of PEFT."""

    def make() -> nn.Module:
        import peft

        config = getattr(peft, method)(**values)
        model: Any = peft.get_peft_model(LLAMA(), config)
        model.add_adapter("other", config)
        model.set_adapter("default")
        decoder: nn.Module = model
        return decoder

    return make


LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}


@contextmanager
def switched(model: Any, call: int) -> Iterator[None]:
    """Activate the adapters in turn."""
    model.set_adapter(["default", "other"][call % 2])
    yield


@contextmanager
def disabled(model: Any, call: int) -> Iterator[None]:
    """Leave adapters out of every other call."""
    if call % 2:
        yield
    else:
        with model.disable_adapter():
            yield


@contextmanager
def rescaled(model: Any, call: int) -> Iterator[None]:
    """Change the scale of the adapter at each call."""
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 1.0 + 0.25 * call)
    yield


def merged(model: Any) -> nn.Module:
    """The decoder with the adapter added to its weights."""
    plain: nn.Module = model.merge_and_unload()
    return plain


ADAPTERS = (
    case("lora", "peft", "LoRA", adapted("LoraConfig", **LORA), text),
    case("lora_switched", "peft", "LoRA, adapters in turn", adapted("LoraConfig", **LORA), text,
         around=switched),
    case("lora_disabled", "peft", "LoRA, left out of every other call",
         adapted("LoraConfig", **LORA), text, around=disabled),
    case("lora_rescaled", "peft", "LoRA, another scale at each call",
         adapted("LoraConfig", **LORA), text, around=rescaled),
    case("lora_merged", "peft", "LoRA, merged into the weights", adapted("LoraConfig", **LORA),
         text, finish=merged),
    case("dora", "peft", "DoRA", adapted("LoraConfig", use_dora=True, **LORA), text),
    case("ia3", "peft", "IA3", adapted("IA3Config", **IA3), text),
)  # fmt: skip


# ---------------------------------------------------------------- quantized weights


def long_text(size: int) -> dict[str, torch.Tensor]:
    """Tokens, (size, 24): products of int8 need more than 16 rows on CUDA."""
    return {"input_ids": tokens(size, 24)}


def quantized(config: str, **values: Any) -> Finish:
    """Quantize the linear layers of a model by a configuration of torchao."""

    def finish(model: nn.Module) -> nn.Module:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, config)(**values))
        return model

    return finish


QUANTIZED = (
    case("int8_weights", "torchao", "int8 weights", LLAMA, text,
         finish=quantized("Int8WeightOnlyConfig")),
    case("int8_dynamic", "torchao", "int8 weights and activations", LLAMA, long_text,
         finish=quantized("Int8DynamicActivationInt8WeightConfig"), tolerance=0.1),
)  # fmt: skip


# ---------------------------------------------------------------- diffusion


def of_diffusers(name: str, **values: Any) -> Make:
    """A class of diffusers on these settings."""

    def make() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**values)
        return model

    return make


class Decoding(nn.Module):
    """The decoder of an autoencoder."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        images: tuple[torch.Tensor] = self.model.decode(latents, return_dict=False)
        return images[0]


def decoding(make: Make) -> Make:
    return lambda: Decoding(make())


def steps(size: int) -> dict[str, torch.Tensor]:
    """A timestep for each row."""
    return {"timestep": torch.randint(0, 1000, (size,))}


BLOCKS: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 16,
    "attention_head_dim": 8, "norm_num_groups": 8,
}  # fmt: skip
UNET = of_diffusers(
    "UNet2DConditionModel", up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **BLOCKS
)
NOISE = both(normal("sample", 4, 8, 8), steps, normal("encoder_hidden_states", 4, 16))
TUPLE = {"return_dict": False}


def patches(size: int) -> dict[str, torch.Tensor]:
    """Latents of 4 x 4 patches with their positions, and a prompt; positions have no batch."""
    return {
        "hidden_states": torch.randn(size, 16, 4),
        "encoder_hidden_states": torch.randn(size, 6, 16),
        "pooled_projections": torch.randn(size, 16),
        "timestep": torch.rand(size),
        "img_ids": torch.rand(16, 3),
        "txt_ids": torch.rand(6, 3),
    }


DIFFUSION = (
    case("unet", "diffusers", "UNet with cross attention", UNET, NOISE, settings=TUPLE),
    case("controlnet", "diffusers", "ControlNet: many results",
         of_diffusers("ControlNetModel", conditioning_embedding_out_channels=(8, 16),
                      **{k: v for k, v in BLOCKS.items() if k != "sample_size"}),
         both(NOISE, normal("controlnet_cond", 3, 16, 16)), settings=TUPLE),
    case("flux", "diffusers", "Flux: streams of image and text, rotary positions",
         of_diffusers("FluxTransformer2DModel", patch_size=1, in_channels=4, num_layers=1,
                      num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
                      joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)),
         patches, settings=TUPLE),
    case("sd3", "diffusers", "Stable Diffusion 3: joint attention",
         of_diffusers("SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=4,
                      num_layers=2, attention_head_dim=8, num_attention_heads=4,
                      joint_attention_dim=16, caption_projection_dim=32,
                      pooled_projection_dim=16, out_channels=4),
         both(normal("hidden_states", 4, 8, 8), steps, normal("encoder_hidden_states", 6, 16),
              normal("pooled_projections", 16)), settings=TUPLE),
    case("dit", "diffusers", "DiT: modulation by step and class",
         of_diffusers("DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8,
                      in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2,
                      num_embeds_ada_norm=10),
         both(normal("hidden_states", 4, 8, 8), steps,
              lambda size: {"class_labels": torch.randint(0, 10, (size,))}), settings=TUPLE),
    case("vae_decoder", "diffusers", "decoder of an autoencoder",
         decoding(of_diffusers("AutoencoderKL", block_out_channels=(16, 32), norm_num_groups=8,
                               latent_channels=4, sample_size=16,
                               down_block_types=("DownEncoderBlock2D",) * 2,
                               up_block_types=("UpDecoderBlock2D",) * 2)),
         normal("latents", 4, 8, 8)),
    case("tiny_decoder", "diffusers", "decoder without attention",
         decoding(of_diffusers("AutoencoderTiny")), normal("latents", 4, 8, 8)),
)  # fmt: skip

OTHERS = (*ADAPTERS, *QUANTIZED, *DIFFUSION)
