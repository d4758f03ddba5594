"""Small models, one for each way in which a boundary appears or a split can go wrong.

A :class:`Case` is a model, its inputs at a batch size, and the settings it needs; the split
snapshots, the comparisons with eager and the GPU suite all run over the same list.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cgcompile

D = 16  # hidden size of every case


@cache
def library() -> torch.library.Library:
    """The operators that the cases use as boundaries; defined once, on first use."""
    lib = torch.library.Library("cgtest", "FRAGMENT")
    lib.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    lib.define("attend.scaled(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float s) -> ()")
    lib.define("scale_(Tensor(a!) x, float s) -> ()")
    unsafe = torch.Tag.cudagraph_unsafe
    lib.define("unsafe(Tensor x) -> Tensor", tags=[unsafe])

    def attend(q, k, v, out, s=1.0):
        out.copy_(torch.softmax(s * q @ k.transpose(-1, -2), -1) @ v)

    def scale_(x, s):
        x.mul_(s)

    for backend in ("CPU", "CUDA"):
        lib.impl("attend", attend, backend)
        lib.impl("attend.scaled", attend, backend)
        lib.impl("scale_", scale_, backend)
        lib.impl("unsafe", lambda x: x.sin() * 2, backend)
    torch.library.register_fake("cgtest::attend", lambda q, k, v, out: None, lib=lib)
    torch.library.register_fake("cgtest::attend.scaled", lambda q, k, v, out, s: None, lib=lib)
    torch.library.register_fake("cgtest::scale_", lambda x, s: None, lib=lib)
    torch.library.register_fake("cgtest::unsafe", torch.empty_like, lib=lib)
    return lib


@torch.library.custom_op("cgtest::soft", mutates_args=())
def soft(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


soft.register_fake(torch.empty_like)


@dataclass(frozen=True)
class Case:
    """One model with what it needs.

    Attributes:
        build: makes the module.
        inputs: makes the inputs for a batch size, on the current default device.
        settings: of ``cgcompile.Backend``.
        dynamo: settings of ``torch._dynamo.config`` while it compiles.
        sizes: batch sizes, the first traced with its first dimension dynamic.
        inductor: settings Inductor needs to give eager's numbers.
        prepare: called on the inputs of the first batch instead of marking them dynamic.
        dynamic: of ``torch.compile``; if it is set, nothing is marked.
        graphs: how many graphs Dynamo makes for the first batch.
        same_kernels: whether uncompiled pieces run exactly the kernels of the eager model.
        tolerance: relative and absolute, where kernels differ.
        writes_inputs: whether the model writes its arguments, so that they must not move.
        replays: the least number of replays, where it is not that of every size and graph.
        has_captured_pieces: whether any piece is captured, so that PIECEWISE graphs exist.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]] = lambda n: (torch.randn(n, 4, D),)
    settings: dict[str, Any] = field(default_factory=dict)
    dynamo: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (6, 3, 1)
    inductor: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[tuple[torch.Tensor, ...]], None] | None = None
    dynamic: bool | None = None
    graphs: int = 1
    same_kernels: bool = True
    # Float32 kernels of a compiler may sum in another order; anything above this is a bug.
    tolerance: tuple[float, float] = (2e-4, 2e-5)
    writes_inputs: bool = False
    replays: int | None = None
    has_captured_pieces: bool = True


CASES: dict[str, Case] = {}


def case(name: str, **settings: Any) -> Callable[[Any], Any]:
    """Register a module class, or a function as the ``forward`` of one."""

    def register(module: Any) -> Any:
        kind = module if isinstance(module, type) else type(name, (nn.Module,), {"forward": module})
        CASES[name] = Case(kind, **settings)
        return module

    return register


class Attention(nn.Module):
    """Projections around an attention that subclasses supply."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(self.attend(q, k, v))


def attention(name: str, **settings: Any) -> Callable[[Any], Any]:
    """Register an :class:`Attention` whose ``attend`` is the function."""
    return lambda attend: case(name, **settings)(type(name, (Attention,), {"attend": attend}))


@case("sdpa")
class Sdpa(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@attention("sdpa_aten")
def sdpa_aten(self, q, k, v):
    return torch.ops.aten.scaled_dot_product_attention(q, k, v)


@case("multihead_attention", same_kernels=False)  # eager takes a fused path of its own
class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2)
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        x = self.norm(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


@attention("flex_attention", inputs=lambda n: (torch.randn(n, 16, D),))
def flex(self, q, k, v):
    q, k, v = q[:, None], k[:, None], v[:, None]
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2)[:, 0]


@attention("flex_attention_mask_inside", inputs=lambda n: (torch.randn(n, 16, D),))
def flex_mask(self, q, k, v):
    q, k, v = q[:, None], k[:, None], v[:, None]
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=q.device.type
    )
    return flex_attention(q, k, v, block_mask=mask)[:, 0]


@attention("op_packet", settings={"splitting_ops": ("cgtest::attend",)})
def op_packet(self, q, k, v):
    out = torch.empty_like(q)
    torch.ops.cgtest.attend(q, k, v, out)
    return out


@attention("op_overload", settings={"splitting_ops": ("cgtest.attend.scaled",)})
def op_overload(self, q, k, v):
    out, first = torch.empty_like(q), torch.empty_like(q)
    torch.ops.cgtest.attend.default(q, k, v, first)  # not a boundary: another overload
    torch.ops.cgtest.attend.scaled(q, k, v, out, 0.5)
    return out + first


@attention("custom_op_function", settings={"splitting_ops": (soft,)})
def custom_op_function(self, q, k, v):
    return soft(q @ k.transpose(-1, -2)) @ v


@attention("tagged_op")
def tagged_op(self, q, k, v):
    return torch.ops.cgtest.unsafe(q) + k * v


def _is_softmax(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "softmax"


@attention(
    "predicate",
    settings={"splitting_ops": (cgcompile.SplittingOp(predicate=_is_softmax, name="softmax"),)},
)
def predicate(self, q, k, v):
    return F.softmax(q @ k.transpose(-1, -2), dim=-1) @ v


@attention("eager_region")
def region(self, q, k, v):
    with cgcompile.eager_region():
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        mixed = scores @ v
    return mixed


@attention("vmap_sdpa")
def vmap_sdpa(self, q, k, v):
    return torch.vmap(F.scaled_dot_product_attention)(q, k, v)


@attention("vmap_without_boundary")
def vmap_plain(self, q, k, v):
    q = torch.vmap(lambda one, scale: one * scale.sum())(q, k)
    return F.scaled_dot_product_attention(q, k, v)


@attention("size_crosses")
def size_crosses(self, q, k, v):
    size = q.size()
    n, t = size[0], q.shape[1]
    q, k, v = (e.reshape(n * t, 1, D) for e in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return out.view(size) * (n // 2 + 1)


@case("size_returned")
class SizeReturned(Attention):
    def forward(self, x):
        y = super().forward(x)
        return y, y.shape[0] * 2, x.shape[0]

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@case("items_cross")
def items_cross(self, x):
    a, b = x.sin().chunk(2, -1)
    c, d, e = x.cos().split((4, 4, 8), -1)
    top = x.abs().topk(2, -1)
    y = F.scaled_dot_product_attention(x, x, x)
    return y.sum(-1) + a.sum(-1) * b.sum(-1) + c.sum(-1) + d.sum(-1) * e.sum(-1) + top[0][..., 0]


@case("view_mutated_in_another_piece")
def view_mutated(self, x):
    h = x * 2
    v = h.view(h.shape[0], -1)
    y = F.scaled_dot_product_attention(x, x, x)
    v.add_(1)
    return h + y, v * 2


@case("base_mutated_view_read")
def base_mutated(self, x):
    h = x * 2
    v = h[:, 1:]
    y = F.scaled_dot_product_attention(x, x, x)
    h.mul_(3)
    return v + y[:, 1:], h


@case("base_mutated_by_boundary", settings={"splitting_ops": ("cgtest::scale_",)})
def base_mutated_by_boundary(self, x):
    h = x + 1
    v = h.transpose(1, 2)
    torch.ops.cgtest.scale_(h, 3.0)
    return v * 2 + 1, h.sin()


class InputMutated(nn.Module):
    def forward(self, x, cache):
        cache[:, 0].add_(x[:, 0])
        y = F.scaled_dot_product_attention(x, x, x)
        cache.mul_(y.mean())
        return cache + y


CASES["input_mutated_in_pieces"] = Case(
    InputMutated,
    inputs=lambda n: (torch.randn(n, 4, D), torch.randn(n, 4, D)),
    writes_inputs=True,
)


@case("constants")
class Constants(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, D))

    def attend(self, q, k, v):
        weights = torch.arange(D, device=q.device) / D
        return F.scaled_dot_product_attention(q + weights, k, v) + self.shift


@case("autocast", tolerance=(2e-2, 2e-2))  # bfloat16 has eight bits of mantissa
class Autocast(Attention):
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return super().forward(x).float()

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@attention("grad_mode")
def grad_mode(self, q, k, v):
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v) * 2
    return out + 1


@attention("enable_grad_region")
def enable_grad(self, q, k, v):
    with torch.enable_grad():
        q = q * 2 + 1
    return F.scaled_dot_product_attention(q, k, v)


@attention("cond")
def cond(self, q, k, v):
    return torch.cond(q.sum() > 0, lambda a, b: a + b, lambda a, b: a - b, (q.sin(), v.cos()))


@attention("random", inductor={"fallback_random": True})
def random(self, q, k, v):
    q = F.dropout(q, 0.5, training=True)
    return F.scaled_dot_product_attention(q, k, v) + torch.rand_like(v)


@case("nonzero", dynamo={"capture_dynamic_output_shape_ops": True})
class Nonzero(Attention):
    def attend(self, q, k, v):
        rows = (k > 0).flatten().nonzero()[:, 0]
        picked = v.flatten()[rows].sin()
        return q.cos() + picked.sum()


CASES["nonzero_graph_break"] = Case(
    Nonzero,
    dynamo={"capture_dynamic_output_shape_ops": False},
    prepare=lambda inputs: None,  # a marked size cannot pass a graph break
    graphs=2,
    replays=12,
)


@attention("item", dynamo={"capture_scalar_outputs": True})
def item(self, q, k, v):
    return q.sin() * k.mean().item() + v


@attention("masked_assignment")
def masked_assignment(self, q, k, v):
    q = q.clone()
    q[k > 0] = 0.5  # fills one number: captured
    return q + v


@attention("mask_assigns_values", dynamo={"capture_dynamic_output_shape_ops": True})
def mask_assigns_values(self, q, k, v):
    q = q * 2
    mask = k > 0
    q[mask] = v[mask]
    return q.sin()


@attention("graph_break", graphs=2, prepare=lambda inputs: None, replays=12)
def graph_break(self, q, k, v):
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(q, k, v)


@case("no_boundary")
class NoBoundary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@case("only_views", replays=0)
def only_views(self, x):
    return x.transpose(1, 2).unsqueeze(0)


@case("neighbours")
def neighbours(self, x):
    h = x.sin()
    a = F.scaled_dot_product_attention(h, h, h)
    b = F.scaled_dot_product_attention(a.transpose(1, 2), h.transpose(1, 2), h.transpose(1, 2))
    return b.cos()


@case("boundary_first_and_last")
def first_and_last(self, x):
    h = F.scaled_dot_product_attention(x, x, x).sin() * 2
    return F.scaled_dot_product_attention(h, h, h)


@case("allocation_between", settings={"splitting_ops": ("cgtest::attend",)})
def allocation_between(self, x):
    h = x.sin()
    first = torch.empty_like(h)
    torch.ops.cgtest.attend(h, h, h, first)
    second = torch.empty_like(h)
    torch.ops.cgtest.attend(h, first, h, second)
    return second.cos()


@case("two_symbols", inputs=lambda n: (torch.randn(n, n + 2, D),))
class TwoSymbols(Attention):
    def attend(self, q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        return out.reshape(-1, D).view(q.shape) * q.shape[1]


def _mark_both(inputs: tuple[torch.Tensor, ...]) -> None:
    torch._dynamo.mark_dynamic(inputs[0], 0)
    torch._dynamo.mark_dynamic(inputs[0], 1)


CASES["two_symbols"] = Case(
    TwoSymbols, inputs=lambda n: (torch.randn(n, n + 2, D),), prepare=_mark_both
)


@case("guard", sizes=(8, 4, 12))
def guard(self, x):
    h = F.scaled_dot_product_attention(x, x, x)
    return h.sin() if h.shape[0] % 4 == 0 else h.cos()


def _mark_unbacked(inputs: tuple[torch.Tensor, ...]) -> None:
    torch._dynamo.decorators.mark_unbacked(inputs[0], 0)


CASES["unbacked_input"] = Case(Sdpa, prepare=_mark_unbacked)


@case("tied_weights")
class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.head = nn.Linear(D, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(F.scaled_dot_product_attention(x, x, x))


CASES["tied_weights"] = Case(TiedWeights, inputs=lambda n: (torch.randint(0, 32, (n, 4)),))


@case("inplace_by_position")
class InplaceByPosition(nn.Module):
    """``nn`` modules give ``inplace`` by position; taken for a view, the write would move."""

    def __init__(self) -> None:
        super().__init__()
        self.leaky, self.elu = nn.LeakyReLU(0.1, inplace=True), nn.ELU(inplace=True)

    def forward(self, x):
        h = x * 2
        flat = h.view(h.shape[0], -1)
        r = self.leaky(h)
        y = F.scaled_dot_product_attention(x, x, x)
        h.add_(1)
        z = self.elu(h)
        return r * y + z, flat.sum(-1), F.hardswish(y, True) + y


@case("numbers_of_python", dynamic=True)
class NumbersOfPython(nn.Module):
    """With dynamic=True Dynamo reads Python floats off tensors; here they are constants again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(D), 0.5

    def forward(self, x):
        x = self.norm(x) * self.scale
        return self.norm(F.scaled_dot_product_attention(x, x, x, scale=self.scale)) * self.scale


@case("derived_sizes", dynamic=True)
def derived_sizes(self, x):
    h = torch.cat([x, x], 1)
    y = F.scaled_dot_product_attention(h, h, h)
    return y[:, : h.shape[1] - 1] * (x.numel() // 2), y.flatten()[: x.numel() // 4].sin()


@case("derived_strides")
def derived_strides(self, x):
    """Windows that overlap, with strides that depend on the size: those of Longformer."""
    y = F.scaled_dot_product_attention(x, x, x).transpose(0, 1).contiguous().transpose(0, 1)
    strides = list(y.stride())
    strides[1] = strides[1] * 2
    return y.as_strided((y.shape[0], y.shape[1] // 2, y.shape[2]), strides).sin()


@attention("sdpa_kernel")
def in_math_kernel(self, q, k, v):
    """The switch is host code around the attention; it must run at every step."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


@case("inference_mode")
class InferenceMode(Attention):
    @torch.inference_mode()
    def forward(self, x):
        return super().forward(x)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@case("gradient_inside")
def gradient_inside(self, x):
    g = torch.func.grad(lambda t: (t.sin() ** 2).sum())(x)
    y = F.scaled_dot_product_attention(g, g, g)
    (w,) = torch.func.vjp(lambda t: t.sin() * t, y)[1](x.cos())
    return w * 2 + 1


@case("layout_changed_in_place")
def layout_changed(self, x):
    h = x * 2
    first = h[0]
    y = F.scaled_dot_product_attention(x, x, x)
    h.transpose_(1, 2)
    first.add_(1)
    return h * 1, first * 2, y


@case("size_returned_around_no_grad", has_captured_pieces=False)
def size_returned_around_no_grad(self, x):
    with torch.no_grad():
        y = F.scaled_dot_product_attention(x, x, x)
    return y, x.shape[0] * 2


class NumberFromTensor(nn.Module):
    def forward(self, x, rows):
        h = x[:, : rows.item()]
        return F.scaled_dot_product_attention(h, h, h) * 2


CASES["number_from_tensor"] = Case(
    NumberFromTensor,
    replays=0,
    inputs=lambda n: (torch.randn(n, 4, D), torch.tensor(3, device="cpu")),
    dynamo={"capture_scalar_outputs": True},
    prepare=lambda inputs: torch._dynamo.mark_dynamic(inputs[0], 0),
)


@case("unbound_piece_written", prepare=lambda inputs: None)  # torch fixes the size: no marks
def unbound_piece_written(self, x):
    rows = (x * 2).unbind(1)
    y = F.scaled_dot_product_attention(x, x, x)
    rows[0].add_(1)
    return torch.stack(rows, 1) + y, rows[1]


class Decoder(nn.Module):
    """Equal layers of attention and a gated feed-forward part, with an embedding and a head."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


CASES["decoder"] = Case(lambda: Decoder(2), inputs=lambda n: (torch.randint(0, 32, (n, 4)),))
