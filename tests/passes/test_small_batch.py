"""Linear layers of few rows become one op: in models of transformers, and only where that is right.

The pass runs here on CPU graphs, as if their device had the kernel; the op then runs torch's ops.
"""

import re

import pytest
import torch
from lib.snapshots import assert_snapshot
from torch import nn
from torch.nn import functional as F

import cgcompile
from cgcompile.kernels.small_linear import op
from cgcompile.passes.small_batch import Fusions, fuse_small_linears
from cgcompile.pieces import compilers

D = 32


def fused(model, *inputs, dynamic=None, **kwargs) -> tuple[Fusions, torch.Tensor, torch.Tensor]:
    """Return what was fused, and the results of the fused graph and of eager."""
    fusions = []

    def backend(gm, example_inputs):
        fusions.append(fuse_small_linears(gm, lambda device: None))
        return gm.forward

    with torch.no_grad():
        expected = model(*inputs, **kwargs)
        result = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs, **kwargs)
    return fusions[0], result, expected


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


@pytest.mark.slow
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


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x, y):
        return self.block(x), y * 2


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


def _transposed_residual(x, w, v):
    return x.t().contiguous().t() + F.linear(x, w)


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


def _normalized(y):
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def _cast_is_written(x, w, v):
    y = x.float()
    y.add_(3)
    return F.linear(v[0] * _normalized(y).to(x.dtype), w)


def _norm_is_masked(x, w, v):
    y = F.rms_norm(x, (D,), v[0], 1e-6)
    y[:, : D // 2] = 0
    return F.linear(y, w)


def _scale_is_written(x, w, v):
    scale = v[0].float()
    scale.mul_(3)
    return F.linear((_normalized(x.float()) * (1.0 + scale)).type_as(x), w)


def _mean_is_clamped(x, w, v):
    y = x.float()
    mean = y.pow(2).mean(-1, keepdim=True)
    mean.clamp_(min=9)
    return F.linear(v[0] * (y * torch.rsqrt(mean + 1e-6)).to(x.dtype), w)


def _eps_times_alpha(x, w, v):
    y = x.float()
    root = torch.rsqrt(torch.add(y.pow(2).mean(-1, keepdim=True), 1.0, alpha=5))
    return F.linear(v[0] * (y * root).to(x.dtype), w)


def _root_into_out(x, w, v):
    y = x.float()
    root = y.new_empty((len(x), 1))
    torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6, out=root)
    return F.linear(v[0] * (y * root).to(x.dtype), w) + root.to(x.dtype)


def _mean_over_rows(x, w, v):
    n = len(x)
    y = x[:, :n].float()
    root = torch.rsqrt(y.pow(2).mean(-1) + 1e-6)  # of row i, times column i
    return F.linear(v[0, :n] * (y * root).to(x.dtype), w[:, :n].contiguous())


def _norm_in_the_dtype_of_x(x, w, v):
    return F.linear(v[0] * _normalized(x), w)


def _norm_weight_in_float32(x, w, v):
    return F.linear((_normalized(x.float()) * torch.full((D,), 3.0)).type_as(x), w)


def _gate_is_broadcast(x, w, v):
    return F.silu(F.linear(x, w[:1])) * F.linear(x, v)


def _activation_is_added(x, w, v):
    return F.silu(F.linear(x, w)) + F.linear(x, v)


def _halves_of_rows(x, w, v):
    gate, up = F.linear(torch.cat([x, x]), w).chunk(2, 0)
    return F.silu(gate) * up


def _odd_halves(x, w, v):
    gate, up = F.linear(x, w[:3]).chunk(2, -1)
    return F.silu(gate) * up


def _up_comes_first(x, w, v):
    up, gate = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def _transposed_weight(x, w, v):
    return F.linear(x, w.t())


def _bias_is_broadcast(x, w, v):
    return F.linear(x, w, v[0, :1])


def _weight_from_a_layer(x, w, v):
    return F.linear(x, F.linear(x, w))


def _scaled_by_its_size(x, w, v):
    return F.linear(x * (x.shape[0] * 2), w)


CASES = [value for name, value in list(globals().items()) if name[0] == "_" and callable(value)]
CASES.remove(_normalized)


@pytest.mark.slow
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
    for one, other in [*pairs, *zip(inputs, (x, w, v), strict=True)]:
        close(one, other)
        assert one.stride() == other.stride()
    if rows > 16 or dtype is torch.float32:
        assert not any(found.fused for found in fusions)
    elif dtype is torch.bfloat16:
        assert_snapshot(f"small_batch/{case.__name__[1:]}", "\n".join(map(str, fusions)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        heads = (layer(y).view(-1, 1, 2, D // 2) for layer in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).reshape(x.shape))


class Layers(nn.Module):
    """Three layers: four pieces between their boundaries, of which the middle ones are alike."""

    def __init__(self, change=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.change = change
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x, weight=None):
        for layer in self.layers:
            x = layer(x)
        if self.change is not None:
            self.change(self.layers)
        return x if weight is None else F.linear(x, weight)


CHANGES = {
    "nothing": (None, [True, True, True, True, True, True]),
    "a weight": (lambda layers: layers[0].q.weight.mul_(2), [False, True, True, True, True, True]),
    "a norm": (lambda layers: layers[0].norm.weight.add_(1), [False, True, True, True, True, True]),
    "a part": (lambda layers: layers[0].q.weight[1].zero_(), [False, True, True, True, True, True]),
    "one of two alike": (
        lambda layers: layers[1].out.weight.neg_(),
        [True, False, True, False, True, True],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "constant"), CHANGES.values(), ids=CHANGES)
def test_weights_are_constant_where_no_piece_writes_them(change, constant, monkeypatch) -> None:
    model, x = Layers(change), torch.randn(4, D).bfloat16()
    assert constant_of(model, x, monkeypatch=monkeypatch) == constant


def test_an_argument_is_no_constant_weight(monkeypatch) -> None:
    x, weight = torch.randn(4, D).bfloat16(), torch.randn(D, D).bfloat16()
    assert constant_of(Layers(), x, weight, monkeypatch=monkeypatch) == [True] * 6 + [False]


def test_a_result_is_no_constant_weight(monkeypatch) -> None:
    class Sum(Layers):
        def forward(self, x):
            weight = self.layers[0].q.weight + self.layers[1].q.weight
            return F.linear(super().forward(x), weight)

    x = torch.randn(4, D).bfloat16()
    assert constant_of(Sum(), x, monkeypatch=monkeypatch) == [True] * 6 + [False]


def constant_of(model, *inputs, monkeypatch) -> list[bool]:
    """Return which calls of the op have constant weights, in the order of the pieces."""
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    config = cgcompile.CompilationConfig()
    split = cgcompile.explain(model, *inputs, config=config).split
    variants = compilers.Variants(split, config)
    modules = {piece.index: variants.of(piece)[0].module for piece in split.distinct}
    nodes = [node for piece in split.pieces for node in modules[piece.same_as].graph.nodes]
    return [node.kwargs.get("constant", False) for node in nodes if node.target is op()]


def test_a_size_without_bound_is_not_fused() -> None:
    x = torch.randn(4, D).bfloat16()
    fusions, result, expected = fused(Block(), x, dynamic=True)
    close(result, expected)
    assert fusions.fused == []
    assert {text.partition(": ")[2] for text in fusions.unfused} == {"it may get more than 16 rows"}


@pytest.mark.slow
def test_explain_shows_what_is_fused_for_which_sizes(monkeypatch) -> None:
    x = torch.randn(4, D).bfloat16()
    settings = {"config": cgcompile.CompilationConfig(), "dynamic_dims": {"x": {0: "n"}}}
    here = cgcompile.explain(Block(), x, **settings)
    assert not any("NVIDIA" in note or note.startswith("piece_") for note in here.notes)
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    result = cgcompile.explain(Block(), x, **settings)
    notes = [note for note in result.notes if note.startswith("piece_")]
    assert_snapshot("small_batch/explain", "\n".join(notes))


@pytest.mark.slow
def test_two_dynamic_dims_need_the_name_of_the_batch(monkeypatch) -> None:
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    model, x = Two(), torch.randn(4, D).bfloat16()
    dims = {"x": {0: "n"}, "y": {0: "m"}}
    for capture_dim in (None, "x.size()[0]"):
        config = cgcompile.CompilationConfig(kernels="small_batch", capture_dim=capture_dim)
        notes = cgcompile.explain(model, x, x.clone(), config=config, dynamic_dims=dims).notes
        named = any("capture_dim names that of the batch" in note for note in notes)
        assert named == (capture_dim is None)
        assert any("fused norm" in note for note in notes) == (capture_dim is not None)


@pytest.mark.slow
def test_a_piece_in_which_nothing_is_fused_is_compiled_once(monkeypatch) -> None:
    sizes = []
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    config = cgcompile.CompilationConfig()
    x = torch.randn(4, D)  # float32 is not fused
    split = cgcompile.explain(Block().float(), x, config=config, dynamic_dims={"x": {0: "n"}}).split
    for piece in split.distinct:
        sizes += [variant.sizes for variant in compilers.Variants(split, config).of(piece)]
    assert sizes == [None]


WHY = r"kernels = \('small_batch',\) is impossible: cpu is no NVIDIA GPU"


@pytest.mark.parametrize("mode", ["PIECEWISE", "STOCK_TORCH_COMPILE"])
def test_true_is_refused_where_no_device_can_run_the_kernels(mode) -> None:
    model, x = Block(), torch.randn(4, D).bfloat16()
    settings = {"mode": mode, "cudagraph_mode": "FULL", "kernels": "small_batch"}
    call = torch.compile(model, backend=cgcompile.Backend(**settings))
    with torch.inference_mode(), pytest.raises(Exception, match=WHY) as caught:
        call(x)
    assert isinstance(caught.value.inner_exception, cgcompile.errors.ConfigError)
    config = cgcompile.CompilationConfig(kernels="small_batch")
    assert any(re.search(WHY, note) for note in cgcompile.explain(model, x, config=config).notes)


@pytest.mark.slow
def test_true_is_right_for_a_graph_without_linear_layers() -> None:
    """Such as one on the CPU beside those of the model."""
    backend = cgcompile.Backend(kernels="small_batch", capture_device="host")
    call = torch.compile(torch.sin, backend=backend)
    x = torch.randn(4)
    with torch.inference_mode():
        torch.testing.assert_close(call(x), torch.sin(x))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kernels": "-small_batch"}, {"compiler": "eager"}])
@pytest.mark.parametrize("variable", ["", "CGCOMPILE_KERNELS"])
def test_a_step_on_a_cpu_is_not_changed(settings, variable, monkeypatch) -> None:
    """By default, with the kernels off, and with a variable that is for all models."""
    if variable:
        monkeypatch.setenv(variable, "1")
    model, x = Block().requires_grad_(False), torch.randn(4, D).bfloat16()
    backend = cgcompile.Backend(capture_device="host", **settings)
    call = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for _ in range(3):
            close(call(x), model(x))
    graph = backend.graphs[0].split
    targets = [node.target for piece in graph.pieces for node in piece.module.graph.nodes]
    assert not any("small_linear" in str(target) for target in targets)
    assert backend.counters.replays == 1


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_verify_counts_what_kernels_compute(mode, dynamic, monkeypatch) -> None:
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    backend = cgcompile.Backend(capture_device="host", cudagraph_mode=mode)
    call = torch.compile(Between(), backend=backend, dynamic=dynamic)
    with torch.inference_mode():
        result = cgcompile.verify(call, torch.randn(4, D).bfloat16(), atol=0.1)
    assert result.ok, result
    note = "kernels of cgcompile compute 2 parts of graph 0; cgcompile.explain names them"
    assert result.checks[0].notes == (note,)
    assert f"note: {note}" in str(result)


class Between(nn.Module):
    """Two pieces that differ, with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.RMSNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.one(self.norm(x))[None]
        return x + self.two(F.scaled_dot_product_attention(q, q, q)[0])


@pytest.mark.slow
def test_all_fused_pieces_are_kept_for_other_processes(monkeypatch, tmp_path) -> None:
    """The first one that Inductor compiles gives the op a lowering, which calls the op."""
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    model, origins = Between(), []
    for _ in range(2):
        torch._dynamo.reset()
        settings = {"cache_dir": str(tmp_path), "capture_device": "host"}
        backend = cgcompile.Backend(kernels="-decode_attention", **settings)
        call = torch.compile(model, backend=backend, dynamic=False)
        with torch.inference_mode():
            x = torch.randn(4, D).bfloat16()
            close(call(x), model(x))
        compilation = backend.graphs[0].compilation
        assert compilation.uncached == {}
        origins.append((compilation.compiled, compilation.loaded))
    assert origins == [(2, 0), (0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "ranges"), [((32, 64), 0), ((8, 64), 2)])
def test_few_rows_that_are_padded_to_more_are_not_compiled_apart(
    sizes, ranges, monkeypatch
) -> None:
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    config = cgcompile.CompilationConfig(cudagraph_capture_sizes=sizes)
    x, dims = torch.randn(4, D).bfloat16(), {"x": {0: "n"}}
    split = cgcompile.explain(Block(), x, config=config, dynamic_dims=dims).split
    variants = [
        variant.sizes
        for piece in split.distinct
        for variant in compilers.Variants(split, config).of(piece)
    ]
    assert len([span for span in variants if span is not None]) == ranges


@pytest.mark.parametrize("settings", [{}, {"cudagraph_mode": "FULL"}])
def test_explain_names_a_compiler_that_fuses_nothing(settings, monkeypatch) -> None:
    x = torch.randn(4, D).bfloat16()
    config = cgcompile.CompilationConfig(compiler="eager", **settings)
    notes = cgcompile.explain(Block(), x, config=config).notes
    assert not any(note.startswith("small_batch:") for note in notes)  # the CPU has no kernels
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    notes = cgcompile.explain(Block(), x, config=config).notes
    assert "small_batch: compiler 'eager' is not Inductor" in notes


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("entry_point", ["named", "typed"])
def test_replays_of_all_sizes_equal_eager(entry_point, mode, monkeypatch) -> None:
    """Weights change in place between replays; inputs are random each time."""
    monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    torch.manual_seed(0)
    model = Block().requires_grad_(False)
    settings = {"cudagraph_mode": mode, "capture_device": "host"}
    backend = cgcompile.Backend(**settings)
    if entry_point == "named":
        call = torch.compile(model, backend=backend, dynamic=True)
    else:
        call = cgcompile.compile(model, backend, dynamic_dims={"x": {0: "n"}})
    with torch.inference_mode():
        for size in (5, 16, 17, 5):
            for _ in range(3):
                x = torch.randn(size, D).bfloat16()
                close(call(x), model(x))
                model.gate_up.weight.mul_(1.05)
                model.norm.weight.add_(0.1)
    assert backend.counters.captures == 3
    assert backend.counters.replays == 6
    artifacts = backend.graphs[-1].artifacts
    assert "to 16" in artifacts
    assert "sizes 17 and more" in artifacts
