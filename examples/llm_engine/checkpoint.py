"""Load a Llama from a folder as Hugging Face saves it: ``config.json`` and ``*.safetensors``.

What this engine has no code for is refused by name: a model that loads and is a little wrong would
be the worst outcome.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llm_engine.model import Llama, LlamaConfig, RopeScaling

INDEX = "model.safetensors.index.json"
# Beside the layers: name in a checkpoint -> name here.
TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
# Of a layer: name in a checkpoint -> name here, and which part of it where several are fused.
LAYER = {
    "input_layernorm": ("attention_norm", 0),
    "post_attention_layernorm": ("mlp_norm", 0),
    "self_attn.q_proj": ("attention.qkv", 0),
    "self_attn.k_proj": ("attention.qkv", 1),
    "self_attn.v_proj": ("attention.qkv", 2),
    "self_attn.o_proj": ("attention.out", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
}
# What must have one value if it is there at all.
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "quantization_config": None,
}


class CheckpointError(Exception):
    """A folder that holds no model this engine can run."""


def read_config(folder: Path) -> LlamaConfig:
    """The sizes in ``config.json``.

    Raises:
        CheckpointError: no such file, another kind of model, or a setting that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"no config.json in {folder}")
    config = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" not in config:
        raise CheckpointError(f"{path} names no model_type; supported: 'llama'")
    for name, only in FIXED.items():
        if config.get(name, only) != only:
            raise CheckpointError(f"{path}: {name} is {config[name]!r}; supported: {only!r}")
    theta, scaling = _rope(config, path)
    heads = config["num_attention_heads"]
    stops = config.get("eos_token_id")
    return LlamaConfig(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        stop_tokens=frozenset(
            stops if isinstance(stops, list) else [] if stops is None else [stops]
        ),
    )


def _rope(config: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: in one place since transformers 5, in two before."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind, rope["factor"])
    if kind == "llama3":
        span = (rope["low_freq_factor"], rope["high_freq_factor"])
        length = rope["original_max_position_embeddings"]
        return theta, RopeScaling(kind, rope["factor"], *span, length)
    supported = "'default', 'linear', 'llama3'"
    raise CheckpointError(f"{path}: the rope type is {kind!r}; supported: {supported}")


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, one at a time, on the CPU.

    Raises:
        CheckpointError: no weights, or a shard that the index names is missing.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}")
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{INDEX} names {path.name}, which is not in {folder}")
        with safe_open(str(path), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                yield name, opened.get_tensor(name)


def load_llama(folder: str | Path) -> Llama:
    """The model of a folder, on the CPU, in the types of its tensors.

    Raises:
        CheckpointError: see :func:`read_config`; tensors that are unknown, missing, there twice, or
            of another shape.
    """
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in Llama(config).state_dict().items()}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in read_tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):  # old checkpoints save it; it follows from theta
            continue
        target, part = _place(name, config)
        if part in parts.setdefault(target, {}):
            raise CheckpointError(f"tensor {name} is there twice")
        parts[target][part] = tensor
    if config.tied:  # one weight under two names; saved under either or both
        parts["head.weight"] = parts["embed.weight"] = parts.get(
            "embed.weight", parts.get("head.weight", {})
        )
    weights = {name: _fused(name, parts.get(name, {}), shapes[name]) for name in shapes}
    model = Llama(config)
    model.load_state_dict(weights, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight
    return model


def _place(name: str, config: LlamaConfig) -> tuple[str, int]:
    """Where a tensor of a checkpoint belongs: (name here, part of it)."""
    if name in TOP:
        return TOP[name], 0
    start, _, rest = name.removeprefix("model.layers.").partition(".")
    known = name.startswith("model.layers.") and start.isdigit() and int(start) < config.layers
    module = rest.removesuffix(".weight")
    if not known or module == rest or module not in LAYER:
        raise CheckpointError(f"tensor {name} has no place in a Llama of {config.layers} layers")
    inner, part = LAYER[module]
    return f"layers.{start}.{inner}.weight", part


def _fused(name: str, parts: dict[int, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The parts one below the other, of the shape that the model has."""
    wanted = sorted(part for inner, part in LAYER.values() if name.endswith(f".{inner}.weight"))
    missing = [part for part in wanted or [0] if part not in parts]
    if missing:
        inner = [k for k, (own, part) in LAYER.items() if f".{own}." in name and part in missing]
        raise CheckpointError(
            f"no tensor for {name} ({', '.join(inner) or 'the whole'} is missing)"
        )
    weight = torch.cat([parts[part] for part in sorted(parts)]) if len(parts) > 1 else parts[0]
    if weight.shape != shape:
        raise CheckpointError(f"{name} is {list(weight.shape)}; config.json has {list(shape)}")
    return weight
