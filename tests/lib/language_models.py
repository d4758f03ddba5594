"""Small language models of transformers with random weights, and greedy generation with them."""

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 96
NEW_TOKENS = 16


DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def mixtral() -> MixtralForCausalLM:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**DECODER, **experts))


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        pad_token_id=0,
        initializer_factor=3.0,
    )
    return T5ForConditionalGeneration(config)


def bart() -> BartForConditionalGeneration:
    config = BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        forced_eos_token_id=None,
        decoder_start_token_id=2,
        init_std=0.5,
    )
    return BartForConditionalGeneration(config)


MODELS = {"llama": llama, "t5": t5, "bart": bart}


def build(name: str, device: str) -> Any:
    """Build a model that never stops early, so that all rows give all tokens."""
    torch.manual_seed(0)
    model = {**MODELS, "mixtral": mixtral}[name]().eval().to(device)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


def prompt(device: str, padded: int = 0) -> dict[str, torch.Tensor]:
    """Return two rows of tokens, the first one left-padded."""
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[0, :padded] = 0
    mask[0, :padded] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def generate(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """Return greedy tokens, repetitions unlikely: (rows, prompt + NEW_TOKENS)."""
    settings = {"do_sample": False, "repetition_penalty": 2.0, **settings}
    tokens: torch.Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **settings)
    return tokens


def compile_config(**settings: Any) -> CompileConfig:
    """Return a configuration that compiles on every device; transformers skips the CPU by default."""
    config = CompileConfig(backend="cgcompile", **settings)
    config._compile_all_devices = True
    return config
