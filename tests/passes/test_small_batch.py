"""Linear layers of few rows become one op: in models of transformers, and only where that is right.

The pass runs here on CPU graphs, as if their device had the kernel; the op then runs torch's ops.
"""

from functools import partial

import pytest
import torch
from lib.snapshots import assert_snapshot
from torch import nn
from torch.nn import functional as F

import cgcompile
from cgcompile.passes.small_batch import Fusions, fuse_small_linears
from cgcompile.pieces import size_ranges

D = 32


def fused(model, *inputs, dynamic=None, **kwargs) -> tuple[Fusions, torch.Tensor, torch.Tensor]:
    """Return what was fused, and the results of the fused graph and of eager."""
    found = []

    def backend(gm, example_inputs):
        found.append(fuse_small_linears(gm, lambda device: None))
        return gm.forward

    with torch.no_grad():
        expected = model(*inputs, **kwargs)
        result = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs, **kwargs)
    return found[0], result, expected


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    most = float(expected.float().abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=2e-2 * most)


def language_model(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = getattr(transformers, f"{family}Config")(**sizes, head_dim=16)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # they are all ones, or zeros
            parameter.data.normal_(1, 0.3)
    return model


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_all_layers_of_models_of_transformers_are_fused(family) -> None:
    model = language_model(family)
    tokens = torch.randint(0, 100, (3, 1))
    fusions, result, expected = fused(model, tokens, use_cache=False)
    close(result.logits, expected.logits)
    assert_snapshot(f"small_batch/{family.lower()}", str(fusions))


class Block(nn.Module):
    """The spelling of torch: ``nn.RMSNorm``, one weight of gate and up, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate_up, self.down = nn.Linear(D, 2 * D), nn.Linear(D, D, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def test_torch_s_own_spelling_is_fused() -> None:
    fusions, result, expected = fused(Block(), torch.randn(16, D).bfloat16())
    close(result, expected)
    assert fusions.fused == ["norm, linear, silu * up", "linear_1, residual"]


def test_a_replaced_parameter_value_is_read() -> None:
    model = Block()
    x = torch.randn(4, D).bfloat16()
    backend = lambda gm, _: fuse_small_linears(gm, lambda device: None) and gm.forward  # noqa: E731
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(x)
        model.gate_up.weight.mul_(2)
        model.norm.weight.add_(1)
        close(compiled(x), model(x))


def _two(x, w, v):
    return F.linear(x, w), F.linear(x, v)


def _written_weight(x, w, v):
    y = F.linear(x, w)
    v.add_(1)
    return y + F.linear(x, v)


def _written_input(x, w, v):
    x.mul_(2)
    return F.linear(x, w)


def _norm_is_used_elsewhere(x, w, v):
    y = F.rms_norm(x, (D,), v[0])
    return F.linear(y, w) + y


def _gate_is_used_elsewhere(x, w, v):
    gate = F.linear(x, w)
    return F.silu(gate) * F.linear(x, v) + gate


def _activation_in_place(x, w, v):
    return F.silu(F.linear(x, w), inplace=True) * F.linear(x, v)


def _exact_gelu(x, w, v):
    return F.gelu(F.linear(x, w)) * F.linear(x, v)


def _both_halves_are_one(x, w, v):
    gate = F.linear(x, w).chunk(2, -1)[0]
    return F.silu(gate) * gate


def _residual_of_another_shape(x, w, v):
    return F.linear(x, w) + v[0]


def _twice_the_layer(x, w, v):
    y = F.linear(x, w)
    return y + y


def _scaled_residual(x, w, v):
    return torch.add(x, F.linear(x, w), alpha=2)


def _late_weight(x, w, v):
    return F.linear(x, w), F.linear(x, v * 2)


def _norm_over_two_dims(x, w, v):
    return F.linear(F.rms_norm(x, x.shape, None), w)


def _mean_without_keepdim(x, w, v):
    y = x.float()
    root = torch.rsqrt(y.pow(2).mean(-1) + 1e-6)
    return F.linear(v[0] * (y * root[:, None]).to(x.dtype), w)


def _under_autocast(x, w, v):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, w)


CASES = [value for name, value in list(globals().items()) if name[0] == "_" and callable(value)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_looks_alike_keeps_its_result(case, rows, dtype) -> None:
    torch.manual_seed(0)
    x, w, v = (torch.randn(n, D).to(dtype) for n in (rows, D, D))
    inputs = [x.clone(), w.clone(), v.clone()]
    fusions = []

    def backend(gm, example_inputs):
        fusions.append(fuse_small_linears(gm, lambda device: None))
        return gm.forward

    with torch.no_grad():
        expected = case(x, w, v)
        result = torch.compile(case, backend=backend)(*inputs)
    pairs = zip(result, expected, strict=True) if type(result) is tuple else [(result, expected)]
    for one, other in pairs:
        close(one, other)
    if rows > 16 or dtype is torch.float32:
        assert not any(found.fused for found in fusions)
    elif dtype is torch.bfloat16:
        assert_snapshot(f"small_batch/{case.__name__[1:]}", "\n".join(map(str, fusions)))


def test_a_size_without_bound_is_not_fused() -> None:
    x = torch.randn(4, D).bfloat16()
    fusions, result, expected = fused(Block(), x, dynamic=True)
    close(result, expected)
    assert fusions.fused == []
    assert {text.partition(": ")[2] for text in fusions.left} == {"it may get more than 16 rows"}


def test_explain_shows_what_is_fused_for_which_sizes(monkeypatch) -> None:
    x = torch.randn(4, D).bfloat16()
    config = cgcompile.CompilationConfig(small_batch_kernels=True)
    settings = {"config": config, "dynamic_dims": {"x": {0: "n"}}}
    here = cgcompile.explain(Block(), x, **settings)
    assert all("cpu is no NVIDIA GPU" in note for note in here.notes if "linear" in note)
    on_gpu = partial(fuse_small_linears, unsupported=lambda device: None)
    monkeypatch.setattr(size_ranges, "fuse_small_linears", on_gpu)
    result = cgcompile.explain(Block(), x, **settings)
    notes = [note for note in result.notes if note.startswith("piece_")]
    assert_snapshot("small_batch/explain", "\n".join(notes))
