"""The op ``decode_attention``: its definition by torch, its shapes, gradients, and refused inputs."""

import math

import pytest
import torch
from torch.nn import functional as F

from cgcompile.kernels.decode_attention import op, takes, why_unsupported

INF, LEAST = math.inf, torch.finfo(torch.float32).min
SHAPES = {  # B, H, Hkv, T, L, D, Dv
    "one row": (2, 4, 2, 1, 9, 8, 8),
    "three rows": (3, 4, 4, 3, 7, 8, 6),
    "one head of the cache": (2, 6, 1, 2, 5, 8, 8),
}


def drawn(shape: tuple[int, ...]) -> list[torch.Tensor]:
    batch, heads, shared, tokens, length, size, size_v = shape
    q = torch.randn(batch, tokens, heads, size).transpose(1, 2)
    return [q, torch.randn(batch, shared, length, size), torch.randn(batch, shared, length, size_v)]


def masks_of(shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    batch, heads, _, tokens, length, *_ = shape
    return [
        None,
        (torch.rand(1, 1, 1, length) > 0.5).expand(batch, 1, 1, length),
        torch.rand(batch, 1, tokens, length) > 0.3,
        torch.rand(tokens, length) > 0.3,
        torch.randn(1, heads, 1, length),
    ]


def defined(q, k, v, mask, sinks, scale, soft_cap):
    """The definition, one row at a time, in float64."""
    batch, heads, tokens, _ = q.shape
    length, group = k.shape[2], q.shape[1] // k.shape[1]
    result = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    whole = None if mask is None else mask.expand(batch, heads, tokens, length)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group].double(), v[b, h // group].double()
            for t in range(tokens):
                scores = keys @ q[b, h, t].double() * scale
                if soft_cap:
                    scores = torch.tanh(scores / soft_cap) * soft_cap
                if whole is not None and whole.dtype is torch.bool:
                    scores[~whole[b, h, t]] = -INF
                elif whole is not None:
                    scores += whole[b, h, t].double()
                most = scores.max()
                if most == -INF:
                    continue
                weights = (scores - most).exp()
                total = weights.sum()
                if sinks is not None:
                    total += (sinks[h].double() - most).exp()
                result[b, h, t] = weights @ values / total
    return result


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_computes_the_definition(shape) -> None:
    torch.manual_seed(0)
    q, k, v = drawn(shape)
    for mask in masks_of(shape):
        for sinks in (None, torch.randn(q.shape[1])):
            for soft_cap in (0.0, 2.0):
                rest = (mask, sinks, 0.3, soft_cap)
                result = op()(q, k, v, *rest)
                torch.testing.assert_close(result, defined(q, k, v, *rest).float())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_soft_cap_and_sinks_it_is_sdpa(shape) -> None:
    torch.manual_seed(0)
    q, k, v = drawn(shape)
    for mask in masks_of(shape):
        expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(op()(q, k, v, mask, None, 0.3, 0.0), expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_shapes_and_strides_without_running_are_those_of_running(shape, soft_cap) -> None:
    q, k, v = drawn(shape)
    result = op()(q, k, v, None, None, 0.3, soft_cap)
    traced = op()(q.to("meta"), k.to("meta"), v.to("meta"), None, None, 0.3, soft_cap)
    assert (result.shape, result.dtype) == (traced.shape, traced.dtype)
    assert result.stride() == traced.stride()
    batch, heads, tokens, last = result.shape
    rows = result.transpose(1, 2)
    assert rows.is_contiguous()
    assert rows.reshape(batch, tokens, heads * last).data_ptr() == result.data_ptr()


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize(
    ("mask", "mean"),
    [
        (torch.zeros(1, 1, 1, 5, dtype=torch.bool), 0.0),
        (torch.full((1, 1, 1, 5), -INF), 0.0),
        (torch.full((1, 1, 1, 5), LEAST), 1.0),  # all scores are equal after rounding
    ],
    ids=["False", "-inf", "finfo.min"],
)
def test_a_row_without_keys(mask, mean, soft_cap) -> None:
    """Zero, or the mean of the values, as ``scaled_dot_product_attention`` returns."""
    torch.manual_seed(0)
    q, k, v = (x.detach().requires_grad_() for x in drawn((2, 4, 2, 1, 5, 8, 8)))
    result = op()(q, k, v, mask, None, 0.3, soft_cap)
    expected = v.mean(2, keepdim=True).repeat_interleave(2, 1) * mean
    torch.testing.assert_close(result, expected)
    gradients = torch.autograd.grad(result.square().sum(), (q, k, v))
    if mean:
        assert all(gradient.isfinite().all() for gradient in gradients)
    else:
        torch.testing.assert_close(gradients, tuple(torch.zeros_like(x) for x in (q, k, v)))


def test_all_weight_of_a_row_without_keys_is_that_of_its_sink() -> None:
    torch.manual_seed(0)
    q, k, v = drawn((2, 4, 2, 1, 5, 8, 8))
    for mask in (torch.zeros(5, dtype=torch.bool), torch.full((5,), -INF), torch.full((5,), LEAST)):
        result = op()(q, k, v, mask, torch.randn(4), 0.3, 0.0)
        torch.testing.assert_close(result, torch.zeros_like(result))


def test_gradients_of_all_inputs_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in drawn((2, 4, 2, 3, 5, 4, 3))]
    bias, sinks = torch.randn(1, 4, 1, 5).double(), torch.randn(4).double()
    inputs += [bias.requires_grad_(), sinks.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: op()(*x, 0.3, 2.0), inputs)
    kept = torch.rand(2, 1, 3, 5) > 0.3
    assert torch.autograd.gradcheck(lambda *x: op()(*x, kept, None, 0.3, 0.0), inputs[:3])
    assert torch.autograd.gradgradcheck(lambda *x: op()(*x, kept, None, 0.3, 0.0), inputs[:3])


def test_a_training_step_equals_one_with_sdpa() -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach().requires_grad_() for x in drawn((2, 4, 2, 1, 9, 8, 8)))
    kept = (torch.arange(9) < 6)[None]
    step = torch.compile(lambda *x: op()(*x, kept, None, 0.3, 0.0).square().sum(), backend="eager")
    step(q, k, v).backward()
    expected = F.scaled_dot_product_attention(q, k, v, kept, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close((q.grad, k.grad, v.grad), gradients)
    assert float(q.grad.abs().max()) > 0


Q = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16)
K = torch.zeros(2, 4, 16, 64, dtype=torch.bfloat16)
REFUSED = {
    "17 rows": {"q": Q.expand(2, 8, 17, 64)},
    "no rows": {"q": Q[:, :, :0]},
    "float32": {"q": Q.float(), "k": K.float(), "v": K.float()},
    "keys in another dtype": {"k": K.half()},
    "values in another dtype": {"v": K.half()},
    "heads that are no multiple": {"q": Q[:, :6]},
    "more than 256 values": {"v": K.repeat(1, 1, 1, 5)},
    "keys of another size": {"k": K[..., :32]},
    "another batch": {"k": K[:1], "v": K[:1]},
    "fewer values than keys": {"v": K[:, :, :8]},
    "no keys": {"k": K[:, :, :0], "v": K[:, :, :0]},
    "strided keys": {"k": K.repeat(1, 1, 1, 2)[..., ::2]},
    "strided values": {"v": K.repeat(1, 1, 1, 2)[..., ::2]},
    "three dimensions": {"q": Q[0], "k": K[0], "v": K[0]},
    "sinks of another size": {"sinks": torch.zeros(4)},
    "mask of another length": {"mask": torch.ones(15, dtype=torch.bool)},
    "mask of five dimensions": {"mask": torch.ones(1, 1, 1, 1, 16, dtype=torch.bool)},
    "mask of integers": {"mask": torch.ones(16, dtype=torch.int32)},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_inputs_that_the_kernels_do_not_take(changes) -> None:
    """Each of them would be read as something else, or beyond its end."""
    plain = {"q": Q, "k": K, "v": K, "mask": None, "sinks": None}
    assert takes(**plain)
    assert takes(**plain | {"mask": torch.zeros(2, 1, 1, 16).bfloat16(), "sinks": torch.zeros(8)})
    assert takes(**plain | {"mask": torch.ones(16, dtype=torch.bool), "v": K[..., :16]})
    assert takes(**plain | {"k": K.transpose(1, 2).contiguous().transpose(1, 2)})
    assert not takes(**plain | changes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_are_named(device) -> None:
    assert why_unsupported(torch.device(device)) == f"{device} is no NVIDIA GPU"
