"""What the model zoo knows of one architecture: how to make it, and what to call it with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 96
TOKENS = 12  # of each row of text
Inputs = Callable[[int], dict[str, Any]]


def unchanged(model: torch.nn.Module) -> torch.nn.Module:
    """The model as it is."""
    return model


def nothing(model: torch.nn.Module, call: int) -> AbstractContextManager[Any]:
    """Leave each call as it is."""
    return nullcontext()


class NotThere(Exception):
    """The library that is installed, if any, does not have this architecture."""


@dataclass(frozen=True)
class Entry:
    """One architecture with random weights.

    Attributes:
        name: of the row.
        kind: the group of rows that it stands in.
        structure: what is special about it, in a few words.
        library: where it comes from, such as ``transformers`` or ``torch``.
        make: makes it, on the CPU, in evaluation mode; its weights are drawn by the caller.
        inputs: ``inputs(size)`` draws a batch on the CPU: tensors by name, batch dimension first,
            and numbers.
        settings: further arguments of each call, the same each time.
        finish: ``finish(model)`` changes the model on its device once its weights are drawn, such
            as into a quantized one.
        around: ``around(model, call)`` is entered around the eager and the compiled call of this
            number, such as autocast, or after a switch of adapters.
        decodes: it decodes with a static cache as well.
        slow: it takes minutes to compile, and is left out unless asked for.
        widens: ``make`` takes a factor of its sizes.
        tolerance: least tolerance of its results: int8 activations that lie between two steps are
            rounded one way by one kernel and the other way by another.
    """

    name: str
    kind: str
    structure: str
    library: str
    make: Callable[..., torch.nn.Module]
    inputs: Inputs
    settings: dict[str, Any]
    finish: Callable[[torch.nn.Module], torch.nn.Module] = unchanged
    around: Callable[[torch.nn.Module, int], AbstractContextManager[Any]] = nothing
    decodes: bool = False
    slow: bool = False
    widens: bool = False
    tolerance: float = 0.0


# Sizes that can be multiplied together.
WIDTHS = {"hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "rotary_dim"}
WIDTHS |= {"n_embd", "d_model", "d_kv", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"}
WIDTHS |= {"word_embed_proj_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim"}
WIDTHS |= {"qk_rope_head_dim", "qk_nope_head_dim", "shared_expert_intermediate_size"}


def from_config(model: str, config: str, **values: Any) -> Callable[..., torch.nn.Module]:
    """A class of transformers on a config of its own kind; nested configs may be given as dicts."""

    def make(wider: int = 1) -> torch.nn.Module:
        import transformers

        if not hasattr(transformers, model):
            raise NotThere(f"transformers {transformers.__version__} has no {model}")
        network: torch.nn.Module = getattr(transformers, model)(
            transformers.AutoConfig.for_model(
                config, **values | {name: wider * values[name] for name in WIDTHS & values.keys()}
            )
        )
        return network.eval()

    return make


def from_timm(model: str, **values: Any) -> Callable[[], torch.nn.Module]:
    """A model of timm by its name, without weights."""

    def make() -> torch.nn.Module:
        try:
            import timm
        except ImportError as error:
            raise NotThere(str(error)) from error
        if not timm.is_model(model):
            raise NotThere(f"timm {timm.__version__} has no {model}")
        network: torch.nn.Module = timm.create_model(model, pretrained=False, **values)
        return network.eval()

    return make


# ---------------------------------------------------------------- inputs


def text(size: int) -> dict[str, torch.Tensor]:
    """Tokens, (size, TOKENS)."""
    return {"input_ids": tokens(size)}


def masked_text(size: int) -> dict[str, torch.Tensor]:
    """Tokens whose rows end at a length of their own.

    Rows are longer than half: with a sliding window of half the tokens each query then has a key.
    What attention returns for a query without one depends on the kernel that torch chooses.
    """
    lengths = torch.randint(TOKENS // 2 + 1, TOKENS + 1, (size, 1))
    mask = (torch.arange(TOKENS) < lengths).long()
    return {"input_ids": tokens(size), "attention_mask": mask}


def translated(size: int) -> dict[str, torch.Tensor]:
    """Tokens of an encoder and of a decoder."""
    return masked_text(size) | {"decoder_input_ids": tokens(size, TOKENS // 2)}


def tokens(size: int, length: int = TOKENS) -> torch.Tensor:
    """Tokens that are no special ones, (size, length)."""
    return torch.randint(4, VOCABULARY, (size, length))


def images(side: int, name: str = "pixel_values") -> Inputs:
    """Colour images, (size, 3, side, side)."""
    return lambda size: {name: torch.randn(size, 3, side, side)}


def normal(name: str, *shape: int) -> Inputs:
    """One tensor of normal numbers, (size, *shape)."""
    return lambda size: {name: torch.randn(size, *shape)}


def both(*parts: Inputs) -> Inputs:
    """The tensors of several."""

    def draw(size: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for part in parts:
            tensors |= part(size)
        return tensors

    return draw
