"""A Llama, small enough to read: grouped-query attention over a paged cache, SwiGLU, rotary.

``forward`` takes one row per token, whatever request it belongs to, and returns hidden states; the
logits of the few rows that are sampled are made outside, so that no graph computes the others.
Keys and values are written by plain torch inside of the captured pieces. Only the attention itself
is an op of its own, at which the graph is split.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from llm_engine.attention import library


@dataclass(frozen=True)
class RopeScaling:
    """How long contexts stretch the rotary frequencies; as Hugging Face names them.

    ``linear`` divides all by ``factor``; ``llama3`` divides the slow ones, keeps the fast ones, and
    goes from one to the other between the two factors.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    stop_tokens: frozenset[int] = frozenset()


def rotary_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Radians per position of each pair of dimensions: [D / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original_length * plain / (2 * math.pi)  # within the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return plain * (keep + (1 - keep) / scaling.factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of each head: x [T, H, D], cos and sin [T, 1, D / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size = config.heads * config.head_dim
        self.kv_size = config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden, self.q_size + 2 * self.kv_size, bias=False)
        self.out = nn.Linear(self.q_size, config.hidden, bias=False)

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        weight = self.qkv.weight
        shape = (num_blocks, block_size, self.kv_size // self.head_dim, self.head_dim)
        for name in ("k_cache", "v_cache"):
            cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self.register_buffer(name, cache, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor:
        parts = self.qkv(x).split((self.q_size, self.kv_size, self.kv_size), -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Straight into the buffer: through a view, Inductor would copy the whole cache.
        self.k_cache[blocks, offsets] = k
        self.v_cache[blocks, offsets] = v
        attended = torch.empty_like(q)
        torch.ops.cgcompile_serve.paged_attention(q, self.k_cache, self.v_cache, attended)
        result: torch.Tensor = self.out(attended.flatten(1))
        return result


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, *step: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *step)
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        result: torch.Tensor = self.down(F.silu(gate) * up)
        return result


class Llama(nn.Module):
    """The model. Call :meth:`make_caches` on its device before the first step."""

    inverse_frequencies: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        library()
        self.config = config
        self.block_size = 1
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("inverse_frequencies", rotary_frequencies(config), persistent=False)

    def place(self, device: torch.device | str, dtype: torch.dtype) -> "Llama":
        """Move all there, and the weights to the type: rotary frequencies stay float32."""
        self.to(device)
        for weight in self.parameters():
            weight.data = weight.data.to(dtype)
        return self.eval().requires_grad_(False)

    def make_caches(self, num_blocks: int, block_size: int) -> None:
        """Allocate the cache of each layer; block 0 is the null block."""
        self.block_size = block_size
        for module in self.modules():
            if isinstance(module, Attention):
                module.make_cache(num_blocks, block_size)

    def forget(self) -> None:
        """Fill the caches with NaN: a read of what this run has not written shows."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.k_cache.fill_(float("nan"))
                module.v_cache.fill_(float("nan"))

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of T tokens; their keys and values go to their slots.

        Args:
            input_ids: [T] int64.
            positions: [T] int64; of each token in its request.
            slot_mapping: [T] int64; block times block size plus the place in the block.
        """
        x = self.embed(input_ids)
        angles = positions[:, None].float() * self.inverse_frequencies
        cos, sin = (part.to(x.dtype)[:, None] for part in (angles.cos(), angles.sin()))
        blocks = torch.div(slot_mapping, self.block_size, rounding_mode="floor")
        offsets = slot_mapping - blocks * self.block_size
        for layer in self.layers:
            x = layer(x, cos, sin, blocks, offsets)
        result: torch.Tensor = self.norm(x)
        return result

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely token after each row: [T] int64."""
        return self.logits(hidden).argmax(-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the token after each row: [T, vocab]."""
        result: torch.Tensor = self.head(hidden)
        return result


def random_llama(config: LlamaConfig, seed: int) -> Llama:
    """Random weights, drawn on the CPU so that every device gets the same.

    Projections keep the size of normed rows, so that every layer has its say: with the usual small
    weights the tokens soon settle on one.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Llama(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = 1.0 if name.startswith("embed") else weight.shape[1] ** -0.5
                weight.normal_(0, scale, generator=generator)
    return model


def damp(model: Llama, layers: int, factor: float) -> None:
    """Scale what the layers behind the first ones add: the smaller, the better a shallow copy."""
    for layer in model.layers[layers:]:
        assert isinstance(layer, Layer)
        for weight in (layer.attention.out.weight, layer.down.weight):
            weight.data.mul_(factor)


def shallow_copy(model: Llama, layers: int) -> Llama:
    """The first layers of a model, with its embedding and head: a draft that agrees at times."""
    config = LlamaConfig(**{**vars(model.config), "layers": min(layers, model.config.layers)})
    weight = model.embed.weight
    draft = Llama(config).place(weight.device, weight.dtype)
    wanted = draft.state_dict()
    draft.load_state_dict({name: model.state_dict()[name] for name in wanted})
    return draft
