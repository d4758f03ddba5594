"""Features of torch itself in the zoo: small modules, each with one that graphs may get wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from model_zoo.entries import Entry, Inputs, both, images, normal, tokens

WIDTH = 32
ROWS = normal("x", WIDTH)
SEQUENCES = normal("x", 12, WIDTH)
PICTURES = images(16, "x")
Make = Callable[[], nn.Module]


class Called(nn.Module):
    """A module, and how it is called."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, **inputs: Any) -> Any:
        return self.call(self.layer, **inputs)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def apply(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x)


def case(
    name: str,
    structure: str,
    make: Make = linear,
    call: Callable[..., Any] = apply,
    inputs: Inputs = ROWS,
    **more: Any,
) -> Entry:
    """A row: ``call(layer, **inputs)`` of the layer that ``make`` makes."""
    return Entry(
        name, "torch", structure, "torch", lambda: Called(make(), call).eval(), inputs, {}, **more
    )


# ---------------------------------------------------------------- layers


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)


def padded(layer: nn.Module, x: torch.Tensor) -> Any:
    hidden = torch.arange(12, device=x.device) >= 9
    return layer(x, src_key_padding_mask=hidden.expand(len(x), 12))[:, :9]


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 4, batch_first=True)


def pictures(*layers: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(*(make() for make in layers))


LAYERS = (
    case("lstm", "`nn.LSTM`: states as results",
         lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), inputs=SEQUENCES),
    case("gru", "`nn.GRU` of two layers",
         lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True), inputs=SEQUENCES),
    case("rnn", "`nn.RNN` in both directions",
         lambda: nn.RNN(WIDTH, WIDTH, batch_first=True, bidirectional=True), inputs=SEQUENCES),
    case("lstm_cell", "a cell with its state as inputs", lambda: nn.LSTMCell(WIDTH, WIDTH),
         lambda m, x, h, c: m(x, (h, c)), both(ROWS, normal("h", WIDTH), normal("c", WIDTH))),
    case("attention_weights", "`nn.MultiheadAttention` that returns weights", attention,
         lambda m, x: m(x, x, x), SEQUENCES),
    case("attention", "`nn.MultiheadAttention` without them", attention,
         lambda m, x: m(x, x, x, need_weights=False)[0], SEQUENCES),
    case("transformer_encoder", "`nn.TransformerEncoder`, which has a fast path",
         lambda: nn.TransformerEncoder(encoder_layer(), 2), inputs=SEQUENCES),
    case("transformer_encoder_mask", "the same with a padding mask",
         lambda: nn.TransformerEncoder(encoder_layer(), 2), padded, SEQUENCES),
    case("transformer", "`nn.Transformer`",
         lambda: nn.Transformer(WIDTH, 4, 1, 1, 64, batch_first=True),
         lambda m, x: m(x, x), SEQUENCES),
    case("batch_norm", "`nn.BatchNorm2d` with running statistics",
         pictures(lambda: nn.Conv2d(3, 8, 3), lambda: nn.BatchNorm2d(8)), inputs=PICTURES),
    case("instance_norm", "statistics of each call",
         pictures(lambda: nn.Conv2d(3, 8, 3), lambda: nn.InstanceNorm2d(8)), inputs=PICTURES),
    case("group_norm", "`nn.GroupNorm`",
         pictures(lambda: nn.Conv2d(3, 8, 3), lambda: nn.GroupNorm(2, 8)), inputs=PICTURES),
    case("conv_transposed", "`nn.ConvTranspose2d`", lambda: nn.ConvTranspose2d(3, 8, 4, 2),
         inputs=PICTURES),
    case("conv1d", "`nn.Conv1d` over a sequence", lambda: nn.Conv1d(12, 8, 3, padding="same"),
         inputs=SEQUENCES),
    case("conv3d", "`nn.Conv3d`", lambda: nn.Conv3d(1, 4, 3),
         inputs=normal("x", 1, 6, 8, 8)),
    case("adaptive_pool", "`nn.AdaptiveAvgPool2d` and `Flatten`",
         pictures(lambda: nn.Conv2d(3, 8, 3), lambda: nn.AdaptiveAvgPool2d(4), nn.Flatten),
         inputs=PICTURES),
    case("max_pool", "`max_pool2d` with indices, and back",
         lambda: nn.Conv2d(3, 8, 3, padding=1), inputs=PICTURES,
         call=lambda m, x: F.max_unpool2d(*F.max_pool2d(m(x), 2, return_indices=True), (2, 2))),
    case("pixel_shuffle", "`nn.PixelShuffle`",
         pictures(lambda: nn.Conv2d(3, 12, 3), lambda: nn.PixelShuffle(2)), inputs=PICTURES),
    case("embedding_bag", "`nn.EmbeddingBag`", lambda: nn.EmbeddingBag(96, WIDTH),
         lambda m, ids: m(ids), lambda size: {"ids": tokens(size)}),
    case("bilinear", "`nn.Bilinear`", lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
         lambda m, x: m(x, x)),
    case("prelu_celu", "activations with parameters",
         lambda: nn.Sequential(linear(), nn.PReLU(), nn.CELU(0.7), nn.Hardswish())),
    case("softmax_families", "`nn.LogSoftmax`, `nn.Softmin`",
         lambda: nn.Sequential(linear(), nn.LogSoftmax(-1), nn.Softmin(-1))),
)  # fmt: skip


# ---------------------------------------------------------------- sizes, indices, control flow


def upsampled(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = F.interpolate(m(x), scale_factor=1.5)
    return x + torch.arange(x.shape[-1], device=x.device)


def pyramid(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    half = F.avg_pool2d(m(x), 2)
    up = F.interpolate(half, size=x.shape[-2:], mode="bilinear")
    return x + up.mean(1, keepdim=True)


def sampled(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    theta = torch.eye(2, 3, device=x.device).expand(len(x), 2, 3) * 0.9
    return F.grid_sample(m(x), F.affine_grid(theta, [len(x), 8, 8, 8], False))


def chosen(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    values, places = m(x).topk(4, -1)
    return torch.zeros_like(x).scatter_add(-1, places, values)


def experts(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m(x)
    best = y.argmax(-1)
    return torch.zeros(WIDTH, WIDTH, device=x.device).index_add(0, best, y)[best]


def only_positive(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m(x)
    return y[y > 0].mean() + y


def read(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m(x)
    return y * 2 if y.mean().item() > 0 else y - 1


def branched(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda y: m(y), lambda y: m(-y), (x,))
    return result


SIZES = (
    case("interpolate_factor", "`F.interpolate(scale_factor=1.5)`, whose size is read",
         lambda: nn.Conv2d(3, 4, 1), upsampled, PICTURES),
    case("interpolate_size", "`F.interpolate(size=...)` of a feature pyramid",
         lambda: nn.Conv2d(3, 4, 1), pyramid, PICTURES),
    case("grid_sample", "`affine_grid` and `grid_sample`", lambda: nn.Conv2d(3, 8, 1), sampled,
         PICTURES),
    case("unfold", "`F.unfold` and `F.fold`", lambda: nn.Conv2d(3, 4, 1),
         lambda m, x: F.fold(F.unfold(m(x), 4, stride=4), (16, 16), 4, stride=4), PICTURES),
    case("topk_scatter", "`topk`, `scatter_add`", call=chosen),
    case("index_add", "`argmax`, `index_add`, indexing", call=experts),
    case("sort_cumsum", "`sort`, `cumsum`, `searchsorted`",
         call=lambda m, x: torch.searchsorted(m(x).sort(-1)[0], x.cumsum(-1)) + m(x)),
    case("boolean_mask", "a mask as index: sizes that depend on data", call=only_positive),
    case("item", "`.item()`, and a branch on it", call=read),
    case("cond", "`torch.cond`", call=branched),
    case("einsum", "`einsum`, `baddbmm`",
         call=lambda m, x: torch.einsum("bi,bj->bij", m(x), x).softmax(-1) @ x[..., None]),
    case("unbind_stack", "`unbind`, `stack`, `split`, `cat`", inputs=SEQUENCES,
         call=lambda m, x: torch.cat([torch.stack(m(x).unbind(1)[::2], 1), *x.split(5, 1)], 1)),
    case("repeat_interleave", "`repeat_interleave` by a number",
         call=lambda m, x: m(x).repeat_interleave(3, 0)),
    case("arange_meshgrid", "tensors made from sizes", inputs=SEQUENCES,
         call=lambda m, x: m(x) + torch.stack(torch.meshgrid(
             torch.arange(x.shape[1], device=x.device), torch.arange(WIDTH, device=x.device),
             indexing="ij")).sum(0)),
    case("triu_mask", "`triu` and `masked_fill`", inputs=SEQUENCES,
         call=lambda m, x: (m(x) @ x.mT).masked_fill(
             torch.ones(12, 12, device=x.device).triu(1).bool(), -1e4).softmax(-1) @ x),
    case("fft", "`rfft` and `irfft`: complex numbers inside",
         call=lambda m, x: torch.fft.irfft(torch.fft.rfft(m(x)) * 0.5, n=WIDTH)),
    case("rotary_complex", "`view_as_complex`, `polar`",
         call=lambda m, x: torch.view_as_real(
             torch.view_as_complex(m(x).unflatten(-1, (-1, 2)))
             * torch.polar(torch.ones(16, device=x.device), torch.arange(16.0, device=x.device))
         ).flatten(1)),
    case("linear_algebra", "`linalg.norm`, `matrix_exp`", inputs=normal("x", 4, 4),
         make=lambda: nn.Linear(4, 4),
         call=lambda m, x: torch.matrix_exp(m(x) * 0.1) / torch.linalg.norm(x, dim=(-2, -1),
                                                                            keepdim=True)),
)  # fmt: skip


# ---------------------------------------------------------------- attention


def heads(m: nn.Module, x: torch.Tensor, **more: Any) -> torch.Tensor:
    q = m(x).unflatten(-1, (4, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **more).transpose(1, 2).flatten(2)


def biased(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    bias = -(torch.arange(12, device=x.device)[:, None] - torch.arange(12, device=x.device)).abs()
    return heads(m, x, attn_mask=bias.to(x.dtype))


def grouped(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = m(x).unflatten(-1, (4, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], enable_gqa=True)


ATTENTION = (
    case("sdpa", "attention of torch", call=heads, inputs=SEQUENCES),
    case("sdpa_causal", "causal", call=lambda m, x: heads(m, x, is_causal=True),
         inputs=SEQUENCES),
    case("sdpa_bias", "with a bias made in the call", call=biased, inputs=SEQUENCES),
    case("sdpa_grouped", "`enable_gqa`", call=grouped, inputs=SEQUENCES),
)  # fmt: skip


# ---------------------------------------------------------------- numbers, results, state


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, Any]


def varying(name: str, draw: Callable[[], Any]) -> Inputs:
    """Rows, and a Python number that is another one at each call."""
    return lambda size: {**ROWS(size), name: draw()}


def a_float() -> float:
    return float(torch.rand(())) + 0.5


def an_int() -> int:
    return int(torch.randint(2, 1000, ()))


def written(m: nn.Module, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[:, 1:3] = m(x)[:, None]
    return cache.sum(1)


def nested(m: nn.Module, x: torch.Tensor) -> Pair:
    y = m(x)
    return Pair(y, {"view": y[:, :4], "none": None, "list": [y + 1, 3, "text"], "same": y})


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def own_function(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    double: Any = Doubled.apply
    result: torch.Tensor = double(m(x))
    return result


VALUES = (
    case("float_argument", "a Python float that varies: a guidance scale",
         call=lambda m, x, s: m(x) * s, inputs=varying("s", a_float)),
    case("int_argument", "a Python int that varies: a step number", inputs=varying("n", an_int),
         call=lambda m, x, n: m(x) + 0.01 * n),
    case("two_floats", "two of them, one of a small set",
         inputs=lambda size: {**ROWS(size), "s": a_float(), "t": float(size % 2)},
         call=lambda m, x, s, t: m(x * s) + t),
    case("cpu_scalar", "a 0-dim tensor on the host",
         inputs=ROWS, call=lambda m, x: m(x) * torch.tensor(0.5)),
    case("tensor_scalar", "a number in a 0-dim tensor on the device",
         inputs=lambda size: {**ROWS(size), "s": torch.rand(())}, call=lambda m, x, s: m(x) * s),
    case("nested_results", "a named tuple of dictionaries, views, numbers", call=nested),
    case("input_as_result", "an input, and a view of it, as results",
         call=lambda m, x: (x, x[:, 1:], m(x))),
    case("input_written", "an input that is written in place", call=written,
         inputs=both(ROWS, normal("cache", 4, WIDTH))),
    case("same_result_twice", "two results that are one tensor",
         call=lambda m, x: (lambda y: (y, y, y.T))(m(x))),
    case("double", "float64 inside", call=lambda m, x: (m(x).double() * 1.25).sin().to(x.dtype)),
    case("integers", "integer arithmetic, shifts, modulo",
         call=lambda m, x: ((m(x) * 100).int() % 7 << 2) // 3),
    case("bfloat16", "a model in bfloat16", call=lambda m, x: m(x.bfloat16()),
         finish=lambda model: model.bfloat16()),
    case("vmap", "`torch.vmap`", call=lambda m, x: torch.vmap(lambda row: m(row).softmax(-1))(x)),
    case("checkpoint", "activation checkpointing at inference",
         call=lambda m, x: checkpoint(m, x, use_reentrant=False)),
    case("own_function", "an own `autograd.Function`", call=own_function),
    case("functional_call", "`torch.func.functional_call` with other weights",
         call=lambda m, x: torch.func.functional_call(
             m, {"weight": m.weight * 0.5, "bias": m.bias}, (x,))),
)  # fmt: skip


# ---------------------------------------------------------------- changed modules and calls


@contextmanager
def autocast(model: nn.Module, call: int) -> Iterator[None]:
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16):
        yield


@contextmanager
def every_other_autocast(model: nn.Module, call: int) -> Iterator[None]:
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=bool(call % 2)):
        yield


@contextmanager
def without_gradients(model: nn.Module, call: int) -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def hooked(model: nn.Module) -> nn.Module:
    layer: Any = model.layer
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    layer.register_forward_hook(lambda module, args, result: result + 1)
    return model


def with_weight_norm(model: nn.Module) -> nn.Module:
    parametrizations.weight_norm(model.layer)  # type: ignore[arg-type]
    return model


def orthogonal(model: nn.Module) -> nn.Module:
    parametrizations.orthogonal(model.layer, orthogonal_map="cayley")  # type: ignore[arg-type]
    return model


def spectral(model: nn.Module) -> nn.Module:
    parametrizations.spectral_norm(model.layer)  # type: ignore[arg-type]
    return model.eval()


def pruned(model: nn.Module) -> nn.Module:
    prune.l1_unstructured(model.layer, "weight", 0.5)  # type: ignore[no-untyped-call]
    return model


def wrapped_by_torch(finish: Callable[[nn.Module], Any]) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        model.layer = finish(model.layer)  # type: ignore[arg-type]
        return model

    return change


def data_parallel(layer: Any) -> Any:
    return nn.DataParallel(layer) if torch.cuda.is_available() else layer


STATES = (
    case("autocast", "`torch.autocast` around calls", around=autocast),
    case("autocast_layers", "the same over convolutions and attention", around=autocast,
         make=lambda: nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False),
         inputs=SEQUENCES),
    case("autocast_at_times", "around every other call", around=every_other_autocast),
    case("autocast_inside", "`torch.autocast` inside of the forward", call=lambda m, x: cast(m, x)),
    case("no_grad", "`no_grad` in place of inference mode", around=without_gradients),
    case("hooks", "forward hooks", finish=hooked),
    case("weight_norm", "`parametrizations.weight_norm`", finish=with_weight_norm),
    case("orthogonal", "`parametrizations.orthogonal`", finish=orthogonal),
    case("spectral_norm", "`parametrizations.spectral_norm`", finish=spectral),
    case("pruned", "a pruned weight, made in a hook", finish=pruned),
    case("data_parallel", "`nn.DataParallel` of one device",
         finish=wrapped_by_torch(data_parallel)),
    case("script", "a scripted part", finish=wrapped_by_torch(torch.jit.script)),
    case("tied", "one weight in two layers",
         make=lambda: tied(), call=lambda m, ids: m[1](m[0](ids)),
         inputs=lambda size: {"ids": tokens(size)}),
    case("dropout", "dropout in evaluation mode",
         make=lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.AlphaDropout(0.5))),
)  # fmt: skip


def cast(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y: torch.Tensor = m(x)
    result: torch.Tensor = y.float() + m(x)
    return result


def tied() -> nn.Module:
    embed, head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96, bias=False)
    head.weight = embed.weight
    return nn.ModuleList([embed, head])


FEATURES = (*LAYERS, *SIZES, *ATTENTION, *VALUES, *STATES)
