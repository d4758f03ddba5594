"""The decoder that all ways run: Llama-like, one decode step, attention over a static cache.

Attention is one op, ``cgrival::attend``, written in Python as engines do: it writes keys and values
to the cache, calls flash attention and copies the result to its output, five kernels in all. It can
be switched off: then it returns at once, and what is left of a step is the work of the host. A
*lean* decoder writes the cache in traced code and calls the one kernel of ``llm_engine`` instead.
"""

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

OP = "cgrival::attend"
Slots = tuple[torch.Tensor, torch.Tensor]  # rows and positions that traced code writes to


@dataclass(frozen=True)
class Dims:
    """The sizes of a decoder; ``context`` is the number of positions that each row attends to.

    ``thin`` leaves attention and an addition of each layer: what is left is dispatch.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int = 256
    thin: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass
class Switch:
    """What the op does when it is called.

    Attributes:
        on: whether attention is computed; else the op returns at once.
        through: what the dispatcher calls; a bench puts a function of its own here.
        seen: while switched off: gets the arguments of each call, if it is a list.
    """

    on: bool
    through: Callable[..., None]
    seen: list[tuple[torch.Tensor, ...]] | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Attention of one new token for each row, at the last position of the cache.

    Args:
        q: [N, heads, D].
        k: [N, kv_heads, D]; goes to the cache.
        v: as ``k``.
        out: [N, heads, D]; gets the result.
        k_cache: [rows, context, kv_heads, D]; the first N rows are used.
        v_cache: as ``k_cache``.
    """
    if not SWITCH.on:
        if SWITCH.seen is not None:
            SWITCH.seen.append((q, k, v, out, k_cache, v_cache))
        return
    keys, values = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    keys[:, -1].copy_(k)
    values[:, -1].copy_(v)
    shown = F.scaled_dot_product_attention(
        q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=True
    )
    out.copy_(shown[:, :, 0])


SWITCH = Switch(True, attend)  # of this process: a bench runs one way at a time


@cache
def library() -> torch.library.Library:
    """Defines the op, once a process."""
    lib = torch.library.Library("cgrival", "FRAGMENT")
    lib.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, "
        "Tensor(c!) v_cache) -> ()",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ("CPU", "CUDA"):
        lib.impl("attend", lambda *args: SWITCH.through(*args), key)
    torch.library.register_fake(OP, lambda *args: None, lib=lib)
    return lib


class Layer(nn.Module):
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, dims: Dims, rows: int) -> None:
        super().__init__()
        hidden, heads, kv_heads = dims.hidden, dims.heads, dims.kv_heads
        self.heads, self.kv_heads, self.size = heads, kv_heads, dims.head_dim
        self.thin = dims.thin
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * dims.intermediate, bias=False)
        self.down = nn.Linear(dims.intermediate, hidden, bias=False)
        for name in ("k_cache", "v_cache"):
            drawn = torch.randn(rows, dims.context, kv_heads, self.size)
            self.register_buffer(name, drawn, persistent=False)

    def rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def forward(
        self, x: torch.Tensor, slots: Slots | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        if self.thin:
            q = x.unflatten(-1, (-1, self.size))
            k, out = q[:, : self.kv_heads], torch.empty_like(q)
            torch.ops.cgrival.attend(q, k, k, out, self.k_cache, self.v_cache)
            return x + out.flatten(1)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if slots is not None:
            self.k_cache[slots] = k
            self.v_cache[slots] = v
            torch.ops.cgcompile_serve.paged_attention(q, self.k_cache, self.v_cache, out)
        else:
            torch.ops.cgrival.attend(q, k, v, out, self.k_cache, self.v_cache)
        x = x + self.out(out.flatten(1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        h: torch.Tensor = x + self.down(F.silu(gate) * up)
        return h


class Decoder(nn.Module):
    """From tokens [N] and positions [N] to logits [N, vocabulary]."""

    rates: torch.Tensor

    def __init__(self, dims: Dims, rows: int, lean: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(dims.vocabulary, dims.hidden)
        self.layers = nn.ModuleList(Layer(dims, rows) for _ in range(dims.layers))
        self.norm = nn.RMSNorm(dims.hidden)
        self.head = nn.Linear(dims.hidden, dims.vocabulary, bias=False)
        self.lean, size = lean, dims.head_dim
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, size, 2) / size))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angles = positions[:, None].to(torch.float32) * self.rates
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        slots = None
        if self.lean:
            slots = (torch.arange(tokens.shape[0], device=tokens.device), positions)
        for layer in self.layers:
            x = layer(x, slots, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_decoder(
    dims: Dims, rows: int, device: str, dtype: torch.dtype, lean: bool = False
) -> Decoder:
    """A decoder with random weights and a random past of ``rows`` sequences."""
    library()
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            return Decoder(dims, rows, lean).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


def own_copy(model: Decoder, name: str) -> Decoder:
    """The same weights and layers behind a ``forward`` of its own.

    Dynamo keeps what it compiled with the code object: a model that is compiled in ten ways would
    reach the limit of recompilations, and each call would look through the guards of the others.
    """
    code = Decoder.forward.__code__.replace(co_name=f"forward_{name}")
    forward = types.FunctionType(code, Decoder.forward.__globals__, code.co_name)
    own = copy.copy(model)
    own.__class__ = type("Decoder", (Decoder,), {"forward": forward})
    return own


class Steps:
    """Static inputs of all batches, as an engine has them: one buffer, views of its beginning."""

    def __init__(self, dims: Dims, rows: int, device: str) -> None:
        self.vocabulary = dims.vocabulary
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.full((rows,), dims.context - 1, dtype=torch.int64, device=device)

    def draw(self, seed: int) -> None:
        """Fresh random tokens, in place."""
        drawn = torch.randint(
            self.vocabulary, self.tokens.shape, generator=torch.Generator().manual_seed(seed)
        )
        self.tokens.copy_(drawn)

    def views(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[:batch], self.positions[:batch]


def counted(run: Callable[[], Any]) -> int:
    """How often the op's function is called through the dispatcher while ``run`` runs."""
    calls = 0
    inner = SWITCH.through

    def count(*args: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        inner(*args)

    SWITCH.through = count
    try:
        run()
    finally:
        SWITCH.through = inner
    return calls


def arguments_of(step: Callable[[], Any]) -> list[tuple[torch.Tensor, ...]]:
    """What a step calls the op's function with, in order, however it comes to be called."""
    arguments: list[tuple[torch.Tensor, ...]] = []
    SWITCH.on, SWITCH.seen = False, arguments
    try:
        step()
    finally:
        SWITCH.on, SWITCH.seen = True, None
    return arguments
