"""Products of int8 and float8 weights are found, whichever way a model writes them; others are not.

The pass runs here on CPU graphs, as if their device had the kernel; the op then runs torch's ops.
"""

import pytest
import torch
from lib.quantized import Quantized, quantize, quantized
from lib.snapshots import assert_snapshot
from torch import nn
from torch.nn import functional as F

import cgcompile
from cgcompile.passes.small_batch import Fusions, fuse_small_linears
from cgcompile.pieces import compilers

N = K = 32  # square: a scale for each column has the shape of one for each row
DATA = (torch.int8, torch.float8_e4m3fn)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    most = float(expected.float().abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=2e-2 * most)


# ---------------------------------------------------------------- ways to write a product


def factor_after(x, q, s, b):
    return F.linear(x, q.to(x.dtype)) * s.to(x.dtype)


def factor_and_bias_after(x, q, s, b):
    return b + s.to(x.dtype) * F.linear(x, weight=q.to(x.dtype))


def factor_in_float32(x, q, s, b):
    return (F.linear(x, q.to(x.dtype)) * s).to(x.dtype)


def dequantized_before(x, q, s, b):
    return F.linear(x, q.type_as(x) * s.to(x.dtype).unsqueeze(1), b)


def dequantized_in_float32(x, q, s, b):
    return F.linear(x, (s[:, None] * q.float()).to(x.dtype), bias=b)


def transposed_data(x, q, s, b):
    return torch.matmul(x, q.t().to(x.dtype)) * s.to(x.dtype)


def transposed_twice(x, q, s, b):
    weight = q.transpose(0, 1).to(x.dtype) * s.to(x.dtype)
    return F.linear(x, weight.t().contiguous())


def transposed_product(x, q, s, b):
    return x @ (q.to(x.dtype) * s.to(x.dtype)[:, None]).permute(1, 0)


def of_flat_rows(x, q, s, b):
    y = torch.mm(x.reshape(-1, K), q.t().to(x.dtype)) * s.to(x.dtype).flatten()
    return y.view(*x.shape[:-1], N) + b


def of_halves_of_rows(x, q, s, b):
    rows = x.reshape(-1, K // 2).repeat(1, 2)
    return torch.mm(rows, q.t().to(x.dtype)) * s.to(x.dtype)


def bias_in_place(x, q, s, b):
    y = torch.mm(x.view(-1, K), q.t().to(x.dtype)) * s.to(x.dtype)
    y = y.reshape(*x.shape[:-1], N)
    y += b
    return y + x


def addmm_of_flat_rows(x, q, s, b):
    y = torch.addmm(b, x.flatten(0, -2), (q.to(x.dtype) * s.to(x.dtype)[:, None]).t())
    return y.view(x.shape)


def with_norm_gate_and_residual(x, q, s, b):
    y = F.rms_norm(x, (K,), b, 1e-6)
    gate, up = (F.linear(y, data.to(x.dtype)) * s.to(x.dtype) for data in (q, q.flip(0)))
    return x + F.linear(F.silu(gate) * up, q.to(x.dtype) * s.to(x.dtype)[:, None])


def plain_beside(x, q, s, b):
    y = F.rms_norm(x, (K,), b, 1e-6)
    return F.linear(y, q.to(x.dtype)) * s.to(x.dtype), F.linear(y, torch.stack([b] * N))


WAYS = [
    factor_after,
    factor_and_bias_after,
    factor_in_float32,
    dequantized_before,
    dequantized_in_float32,
    transposed_data,
    transposed_twice,
    transposed_product,
    of_flat_rows,
    of_halves_of_rows,
    bias_in_place,
    addmm_of_flat_rows,
    with_norm_gate_and_residual,
    plain_beside,
]

# ---------------------------------------------------------------- what looks like one


def scale_of_each_column(x, q, s, b):
    return F.linear(x, q.to(x.dtype) * s.to(x.dtype))


def scale_of_each_column_transposed(x, q, s, b):
    return x @ (q.t().to(x.dtype) * s.to(x.dtype)[:, None])


def scale_of_groups(x, q, s, b):
    scales = torch.stack([s, s * 2], 1).to(x.dtype)
    return F.linear(x, (q.to(x.dtype).view(N, 2, -1) * scales[:, :, None]).view(N, K))


def one_scale(x, q, s, b):
    return F.linear(x, q.to(x.dtype)) * s.to(x.dtype)[0]


def expanded_scale(x, q, s, b):
    return F.linear(x, q.to(x.dtype)) * s[:1].to(x.dtype).expand(N)


def expanded_scale_and_another(x, q, s, b):
    scale = s[:1].to(x.dtype).expand(N)
    return F.linear(x, q.to(x.dtype) * scale[:, None]) * s.to(x.dtype)


def scale_of_rows_of_x(x, q, s, b):
    y = F.linear(x, q.to(x.dtype))
    return y * s.to(x.dtype)[: y.shape[0]].view(-1, *[1] * (y.dim() - 1))


def with_zero_point(x, q, s, b):
    return F.linear(x, (q.to(x.dtype) - 3) * s.to(x.dtype)[:, None])


def bias_is_scaled(x, q, s, b):
    return F.linear(x, q.to(x.dtype), b) * s.to(x.dtype)


def scaled_twice(x, q, s, b):
    return F.linear(x, q.to(x.dtype) * s.to(x.dtype)[:, None]) * s.to(x.dtype)


def result_in_float32(x, q, s, b):
    return F.linear(x, q.to(x.dtype)) * s


def product_is_used_elsewhere(x, q, s, b):
    y = F.linear(x, q.to(x.dtype))
    return y * s.to(x.dtype) + y


def stored_transposed(x, q, s, b):
    return (x @ q.to(x.dtype)) * s.to(x.dtype)


def written_data(x, q, s, b):
    y = F.linear(x, q.to(x.dtype)) * s.to(x.dtype)
    q.copy_(q.flip(0))
    return y


def written_cast(x, q, s, b):
    weight = q.to(x.dtype)
    weight[: N // 2] = 1
    return F.linear(x, weight) * s.to(x.dtype)


def written_scale(x, q, s, b):
    scale = s.to(x.dtype)
    scale.mul_(3)
    return F.linear(x, q.to(x.dtype)) * scale


def written_rows(x, q, s, b):
    rows = x.reshape(-1, K).clone()
    rows[:, 0] = 0
    return (torch.mm(rows, q.t().to(x.dtype)) * s.to(x.dtype)).view(x.shape)


def view_before_the_sum(x, q, s, b):
    y = F.linear(x, q.to(x.dtype)) * s.to(x.dtype)
    flat = y.view(-1)
    y += b
    return flat, y * 2


def read_before_the_sum(x, q, s, b):
    y = F.linear(x, q.to(x.dtype)) * s.to(x.dtype)
    before = y * 2
    y += b
    return before, y


def sum_with_a_factor(x, q, s, b):
    return torch.add(F.linear(x, q.to(x.dtype)) * s.to(x.dtype), b, alpha=2)


def addmm_with_a_factor(x, q, s, b):
    weight = (q.to(x.dtype) * s.to(x.dtype)[:, None]).t()
    return torch.addmm(b, x.view(-1, K), weight, beta=2).view(x.shape)


def clamped_weight(x, q, s, b):
    return F.linear(x, q.to(x.dtype).clamp(min=0)) * s.to(x.dtype)


def factor_under_autocast(x, q, s, b):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, q.to(x.dtype)) * s


ALIKE = [
    scale_of_each_column,
    scale_of_each_column_transposed,
    scale_of_groups,
    one_scale,
    expanded_scale,
    expanded_scale_and_another,
    scale_of_rows_of_x,
    with_zero_point,
    bias_is_scaled,
    scaled_twice,
    result_in_float32,
    product_is_used_elsewhere,
    stored_transposed,
    written_data,
    written_cast,
    written_scale,
    written_rows,
    view_before_the_sum,
    read_before_the_sum,
    sum_with_a_factor,
    addmm_with_a_factor,
    clamped_weight,
    factor_under_autocast,
]


# Of these a part is one: what follows the scale stays.
PARTS = [scaled_twice, view_before_the_sum, read_before_the_sum, sum_with_a_factor]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA, ids=str)
@pytest.mark.parametrize("case", [*WAYS, *ALIKE], ids=lambda case: case.__name__)
@pytest.mark.parametrize("shape", [(4, K), (3, 2, K), (17, K)], ids=str)
def test_results_stay_those_of_eager(case, shape, data) -> None:
    torch.manual_seed(0)
    x, b = torch.randn(shape).bfloat16(), torch.rand(N).bfloat16() + 0.5
    q, s = quantized(torch.randn(N, K) * torch.logspace(-1, 1, N)[:, None], data)
    inputs = [x.clone(), q.clone(), s.clone(), b.clone()]
    fusions: list[Fusions] = []

    def backend(gm, example_inputs):
        fusions.append(fuse_small_linears(gm, lambda device: None))
        return gm.forward

    with torch.no_grad():
        expected = case(x, q, s, b)
        result = torch.compile(case, backend=backend, dynamic=False)(*inputs)
    pairs = zip(result, expected, strict=True) if type(result) is tuple else [(result, expected)]
    for one, other in [*pairs, *zip(inputs, (x, q, s, b), strict=True)]:
        close(one, other)
        assert one.stride() == other.stride()
    name = str(data).removeprefix("torch.")
    texts = "\n".join(map(str, fusions)).replace(f", {name}", ", DATA")
    if len(x.flatten(0, -2)) > 16:
        assert not any(found.fused for found in fusions)
    else:
        assert (", DATA" in texts) == (case in [*WAYS, *PARTS]), texts
        assert_snapshot(f"linears/{case.__name__}", texts)


# ---------------------------------------------------------------- weights that are subclasses


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.gate, self.up = (nn.Linear(64, 96, bias=False) for _ in range(2))
        self.down = nn.Linear(96, 64, bias=False)
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.q(y) * self.k(y).sum(-1, keepdim=True)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def check_replays(model: nn.Module, change, monkeypatch) -> str:
    """Compare replays with eager, weights changed in between; return what was fused."""
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    backend = cgcompile.Backend(kernels="small_batch", capture_device="host")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(3, 1, 64).bfloat16()
            close(compiled(x), model(x))
            for layer in model.children():
                change(layer.weight)
    assert backend.counters.replays >= 2
    x = torch.randn(3, 1, 64).bfloat16()
    notes = cgcompile.explain(model, x, config=backend.config).notes
    return "\n".join(note for note in notes if note.startswith("piece_"))


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA, ids=str)
def test_replays_of_subclasses_equal_eager(data, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Layer()
    quantize(model, data)

    def change(weight: torch.Tensor) -> None:
        if isinstance(weight, Quantized):
            weight.scale.mul_(1.1)
            weight.data8.copy_(weight.data8.roll(1, 0))

    texts = check_replays(model, change, monkeypatch)
    assert_snapshot("linears/subclasses", texts.replace(str(data).removeprefix("torch."), "DATA"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao_are_read_as_they_are(name, monkeypatch) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = Layer()
    quantization.quantize_(model, getattr(quantization, name)(set_inductor_config=False))
    texts = check_replays(model, lambda weight: None, monkeypatch)
    data = "int8" if "Int8" in name else "float8_e4m3fn"
    assert_snapshot("linears/subclasses", texts.replace(data, "DATA"))
