"""Attention of few query rows becomes one op: in models of transformers, and where that is right.

The tests set ``kernels="decode_attention"``: on the CPU the op then runs torch's ops.
"""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lib.programs import run_code
from lib.snapshots import assert_snapshot
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cgcompile
from cgcompile.errors import ConfigError
from cgcompile.passes import OPTIONAL

B, H, SHARED, L, D = 2, 4, 2, 24, 8
OP = "cgcompile.decode_attention"


def inputs(rows: int = 1, shared: int = SHARED, dtype: torch.dtype = torch.float32):
    """Return random q, K, V and a boolean mask in which each row keeps a key."""
    mask = torch.rand(B, 1, rows, L) < 0.5
    mask[..., 0] = True
    shapes = (B, H, rows, D), (B, shared, L, D), (B, shared, L, D)
    return (*(torch.randn(shape, dtype=dtype) for shape in shapes), mask)


def run(function, make=inputs, *, dynamic=None, calls: int = 4, **settings) -> cgcompile.Backend:
    """Compare a compiled function with eager, on random inputs at each call; return the backend."""
    torch._dynamo.reset()
    default = {"compiler": "eager", "kernels": "decode_attention", "capture_device": "host"}
    backend = cgcompile.Backend(**{**default, **settings})
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    torch.manual_seed(0)
    before = None
    with torch.inference_mode():
        for _ in range(calls):
            arguments = make()
            copies = [argument.clone() for argument in arguments]
            expected, result = function(*copies), compiled(*arguments)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close([*arguments], copies, rtol=1e-5, atol=1e-6)
            assert before is None or not torch.equal(before, result)
            before = result.clone()
    assert backend.counters.captures > 0
    assert backend.counters.replays > 0
    return backend


def fusions(backend: cgcompile.Backend) -> str:
    return str(backend.graphs[-1].split.fusions)


def ops_of(backend: cgcompile.Backend) -> str:
    """Return the graphs of all pieces as text."""
    return "\n".join(str(piece.module.graph) for piece in backend.graphs[-1].split.pieces)


def repeated(x: torch.Tensor, group: int) -> torch.Tensor:
    """Repeat heads as transformers does."""
    batch, heads, length, size = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, group, length, size)
    return x.reshape(batch, heads * group, length, size)


def attend(q, k, v, mask, **more):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)


# ---------------------------------------------------------------- what is replaced


def _by_expand(q, k, v, mask):
    return attend(q, repeated(k, 2), repeated(v, 2), mask, scale=0.3, is_causal=False)


def _by_unsqueeze(q, k, v, mask):
    k, v = (x.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(B, H, L, D) for x in (k, v))
    return attend(q, k, v, mask)


def _by_flatten(q, k, v, mask):
    k, v = (x.unsqueeze(-3).broadcast_to(B, SHARED, 2, L, D).flatten(1, 2) for x in (k, v))
    return attend(q, k.contiguous(), v, mask)


def _by_interleave(q, k, v, mask):
    return attend(q, torch.repeat_interleave(k, 2, dim=1), v.repeat_interleave(2, 1), mask)


def _enable_gqa(q, k, v, mask):
    return attend(q, k, v, mask, enable_gqa=True)


def _one_head_is_broadcast(q, k, v, mask):
    return attend(q, k[:, :1], v[:, :1], mask)


def _as_many_heads(q, k, v, mask):
    return attend(q, torch.cat((k, k), 1), torch.cat((v, v), 1), mask)


def _a_mask_of_scores(q, k, v, mask):
    bias = torch.where(mask, q.sum(-1, keepdim=True), -math.inf)
    return attend(q, repeated(k, 2), repeated(v, 2), bias)


def _an_expanded_mask(q, k, v, mask):
    return attend(q, repeated(k, 2), repeated(v, 2), mask[:1].expand(B, -1, -1, -1))


def _no_mask(q, k, v, mask):
    return attend(q, repeated(k, 2), repeated(v, 2), None)


def _rows_without_keys(q, k, v, mask):
    return attend(q, repeated(k, 2), repeated(v, 2), mask & (mask.sum(-1, keepdim=True) > L // 2))


def _repeats_have_other_users(q, k, v, mask):
    keys = repeated(k, 2)
    return attend(q, keys, repeated(v, 2), mask) + keys.sum()


def _capped(q, k, v, mask, cap=5.0):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3)) * 0.3
    scores = torch.tanh(scores / cap) * cap
    scores = scores + torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, repeated(v, 2)).transpose(1, 2).contiguous()


def _capped_without_keys(q, k, v, mask):
    """A row of least numbers weighs all keys alike."""
    return _capped(q, k, v, mask & (torch.arange(B) > 0)[:, None, None, None])


def with_sinks(q, k, v, mask, zero):
    sinks = q[0, :, 0, 0]
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3)) * 0.3
    scores = scores + torch.where(mask, zero, torch.finfo(q.dtype).min)
    logits = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, q.shape[-2], -1)], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, p=0.0, training=False).to(v.dtype), repeated(v, 2))


def _sinks(q, k, v, mask):
    return with_sinks(q, k, v, mask, torch.zeros(()))


def _sinks_without_keys(q, k, v, mask):
    return _sinks(q, k, v, mask & (torch.arange(B) > 0)[:, None, None, None])


def _sinks_and_another_zero(q, k, v, mask):
    return with_sinks(q, k, v, mask, torch.zeros(()).add_(1))


REPLACED = [
    _by_expand, _by_unsqueeze, _by_flatten, _by_interleave, _enable_gqa, _one_head_is_broadcast,
    _as_many_heads, _a_mask_of_scores, _an_expanded_mask, _no_mask, _rows_without_keys,
    _repeats_have_other_users, _capped, _capped_without_keys, _sinks, _sinks_without_keys,
    _sinks_and_another_zero,
]  # fmt: skip


def named(function) -> str:
    return function.__name__.strip("_")


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", REPLACED, ids=named)
def test_replaced_attention_equals_eager(case, rows) -> None:
    backend = run(case, lambda: inputs(rows))
    assert OP in ops_of(backend)
    assert "scaled_dot" not in ops_of(backend)
    assert "softmax" not in ops_of(backend)
    assert all(piece.capture for piece in backend.graphs[-1].split.pieces)
    if rows == 1:
        kept = "expand" in ops_of(backend)
        assert kept == (case is _repeats_have_other_users)
        assert_snapshot(f"decode_attention/{named(case)}", fusions(backend))


# ---------------------------------------------------------------- what stays


def _causal(q, k, v, mask):
    return attend(q, repeated(k, 2), repeated(v, 2), None, is_causal=True)


def _in_an_eager_region(q, k, v, mask):
    q = q.sin()
    with cgcompile.eager_region():
        return attend(q, repeated(k, 2), repeated(v, 2), mask)


def _a_chosen_kernel(q, k, v, mask):
    with sdpa_kernel(SDPBackend.MATH):
        result = attend(q.sin(), repeated(k, 2), repeated(v, 2), mask)
    return result.cos()


def _autocast(q, k, v, mask):
    q, k, v = (x.sin().bfloat16() for x in (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        result = attend(q, repeated(k, 2), repeated(v, 2), mask)
    return result.float().cos()


def _written_cache(q, k, v, mask):
    k = k.sin()
    keys = repeated(k, 2)
    k.mul_(2)
    return attend(q, keys, repeated(v, 2), mask)


def _written_repeat(q, k, v, mask):
    keys = repeated(k, 2)
    keys.mul_(2)
    return attend(q, keys, repeated(v, 2), mask)


def _written_by_another_view(q, k, v, mask):
    both = torch.stack((k, v))
    keys, values = repeated(both[0], 2), repeated(both[1], 2)
    both.view(2, -1)[0].mul_(2)
    return attend(q, keys, values, mask)


def _written_scores(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3))
    capped = torch.tanh(scores / 5.0) * 5.0
    capped.masked_fill_(~mask, -1e9)
    return torch.matmul(F.softmax(capped, -1), repeated(v, 2))


def _in_float64(q, k, v, mask):
    q, k, v = (x.double() for x in (q, k, v))
    return attend(q, repeated(k, 2), repeated(v, 2), mask).float()


def _many_rows(q, k, v, mask):
    return attend(q.expand(-1, -1, 17, -1), repeated(k, 2), repeated(v, 2), mask)


def _wide_heads(q, k, v, mask):
    q, k = (x.repeat(1, 1, 1, 33) for x in (q, k))
    return attend(q, repeated(k, 2), repeated(v, 2), mask)


def _batch_is_broadcast(q, k, v, mask):
    return attend(q, repeated(k[:1], 2), repeated(v[:1], 2), mask)


def _transposed_keys(q, k, v, mask):
    k = torch.zeros(B, SHARED, D, L).copy_(k.transpose(2, 3)).transpose(2, 3)
    return attend(q, repeated(k, 2), repeated(v, 2), mask)


def _written_out(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3)) * 0.3
    scores = scores + torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    return torch.matmul(F.softmax(scores, dim=-1), repeated(v, 2))


def _weights_are_used(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3))
    weights = F.softmax(torch.tanh(scores / 5.0) * 5.0, dim=-1)
    return torch.matmul(weights, repeated(v, 2)) + weights.amax()


def _softmax_over_rows(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3))
    return torch.matmul(F.softmax(torch.tanh(scores / 5.0) * 5.0, dim=1), repeated(v, 2))


def _another_cap(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3))
    return torch.matmul(F.softmax(torch.tanh(scores / 5.0) * 6.0, dim=-1), repeated(v, 2))


def _cap_after_the_mask(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3)) + mask
    return torch.matmul(F.softmax(torch.tanh(scores / 5.0) * 5.0, dim=-1), repeated(v, 2))


def _a_sum_with_booleans(q, k, v, mask):
    scores = torch.tanh(torch.matmul(q, repeated(k, 2).transpose(2, 3)) / 5.0) * 5.0
    return torch.matmul(F.softmax(scores + mask, dim=-1), repeated(v, 2))


def _sinks_for_all_rows(q, k, v, mask):
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3))
    sinks = q[0, 0, 0, :1].reshape(1, 1, 1, 1).expand(B, H, q.shape[2], -1)
    weights = F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights, repeated(v, 2))


STAYS = [
    _causal, _in_an_eager_region, _a_chosen_kernel, _autocast, _written_cache, _written_repeat,
    _written_by_another_view, _written_scores, _in_float64, _many_rows, _wide_heads,
    _batch_is_broadcast, _transposed_keys, _written_out, _weights_are_used, _softmax_over_rows,
    _another_cap, _cap_after_the_mask, _a_sum_with_booleans, _sinks_for_all_rows,
]  # fmt: skip


@pytest.mark.parametrize("case", STAYS, ids=named)
def test_other_attention_stays(case) -> None:
    backend = run(case)
    assert OP not in ops_of(backend)
    assert "fused" not in fusions(backend)
    assert_snapshot(f"decode_attention/{named(case)}", fusions(backend))


@pytest.mark.parametrize(
    "state",
    [
        lambda: sdpa_kernel([SDPBackend.MATH]),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["sdpa_kernel", "autocast"],
)
def test_attention_stays_in_a_state_that_the_caller_chose(state) -> None:
    settings = {"compiler": "eager", "kernels": "decode_attention", "capture_device": "host"}
    backend = cgcompile.Backend(**settings)
    compiled = torch.compile(_by_expand, backend=backend)
    with torch.inference_mode(), state():
        for _ in range(3):
            q, k, v, mask = inputs(dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(q, k, v, mask), _by_expand(q, k, v, mask))
    assert OP not in ops_of(backend)
    assert "fused" not in fusions(backend)


@pytest.mark.parametrize(
    "entry",
    [
        F.scaled_dot_product_attention,
        "aten::scaled_dot_product_attention",
        cgcompile.SplittingOp(predicate=lambda node: "scaled_dot" in str(node.target)),
    ],
    ids=["function", "name", "predicate"],
)
def test_attention_that_the_user_named_stays(entry) -> None:
    backend = run(_sandwich, splitting_ops=(entry,))
    assert OP not in ops_of(backend)
    assert "splitting_ops has" in fusions(backend)
    assert len(backend.graphs[-1].split.pieces) == 3


def _sandwich(q, k, v, mask):
    return _by_expand(q.sin(), k, v, mask).cos()


# ---------------------------------------------------------------- settings


def test_settings_leave_attention_as_it_is(monkeypatch) -> None:
    for settings in (
        {"kernels": "-decode_attention"},
        {"kernels": "auto"},  # no device of this graph has the kernel
        {"kernels": "auto", "cudagraph_mode": "PIECEWISE"},
        {"passes": [f"-{name}" for name in OPTIONAL]},
    ):
        backend = run(_sandwich, **settings)
        assert OP not in ops_of(backend)
        assert fusions(backend) == ""
    monkeypatch.setenv("CGCOMPILE_KERNELS", "1")  # for all models, so as "auto"
    config = cgcompile.CompilationConfig()
    assert (config.kernels, config.replaces_attention) == (True, "auto")
    config = cgcompile.CompilationConfig(kernels="decode_attention")
    assert config.replaces_attention is True
    monkeypatch.setenv("CGCOMPILE_KERNELS", "0")
    assert cgcompile.CompilationConfig().replaces_attention is False


def test_auto_replaces_attention_where_the_device_has_the_kernel(monkeypatch) -> None:
    from cgcompile.passes import decode_attention, pipeline

    for module in (decode_attention, pipeline):
        monkeypatch.setattr(module, "why_unsupported", lambda device: None)
    half = lambda: inputs(dtype=torch.bfloat16)  # noqa: E731
    q, k, v, mask = half()
    backend = cgcompile.Backend(compiler="eager")
    with torch.inference_mode():
        result = torch.compile(_sandwich, backend=backend)(q, k, v, mask)
        torch.testing.assert_close(result, _sandwich(q, k, v, mask), rtol=0, atol=2e-2)
    assert OP in ops_of(backend)
    # Kernels take half precision alone.
    backend = run(_sandwich, kernels="auto")
    assert fusions(backend) == "attn: its dtypes are torch.float32".replace("attn", _name(backend))


def test_auto_leaves_attention_that_torch_computes_as_fast(monkeypatch) -> None:
    from cgcompile.passes import decode_attention, pipeline

    for module in (decode_attention, pipeline):
        monkeypatch.setattr(module, "why_unsupported", lambda device: None)
    for rows, masked, shared, replaced in (
        (1, False, H, False), (1, True, H, True), (3, True, H, False), (3, True, SHARED, True),
        (1, False, SHARED, True),
    ):  # fmt: skip
        torch._dynamo.reset()
        q, k, v, mask = inputs(rows, shared, torch.bfloat16)
        arguments = q, k, v, mask if masked else None
        backend = cgcompile.Backend(compiler="eager")
        with torch.inference_mode():
            torch.compile(_enable_gqa, backend=backend)(*arguments)
        assert (OP in ops_of(backend)) == replaced


def _name(backend: cgcompile.Backend) -> str:
    return fusions(backend).partition(":")[0]


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_modes_with_attention_in_graphs_replace_it(mode) -> None:
    assert OP in ops_of(run(_sandwich, cudagraph_mode=mode))


@pytest.mark.slow
def test_a_graph_that_is_not_split_has_the_op() -> None:
    backend = run(_sandwich, mode="STOCK_TORCH_COMPILE", cudagraph_mode="FULL", compiler="inductor")
    assert OP in ops_of(backend)


@pytest.mark.parametrize(
    "settings",
    [
        {"cudagraph_mode": "PIECEWISE"},
        {"mode": "NONE", "cudagraph_mode": "FULL"},
        {"mode": "STOCK_TORCH_COMPILE"},
        {"splitting": "breakable"},
    ],
    ids=str,
)
def test_true_is_refused_where_it_has_no_effect(settings) -> None:
    with pytest.raises(ConfigError, match=r"kernels = \('decode_attention',\)"):
        cgcompile.CompilationConfig(kernels="decode_attention", **settings)
    assert cgcompile.CompilationConfig(**settings).kernels == "auto"


# ---------------------------------------------------------------- a decoder


class Layer(nn.Module):
    """A layer as transformers writes it, with a cache that it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H * D, (H + 2 * SHARED) * D, bias=False)
        self.out = nn.Linear(H * D, H * D, bias=False)

    def forward(self, x, keys, values, position, mask):
        heads = self.qkv(x).view(x.shape[0], x.shape[1], -1, D).transpose(1, 2)
        q, k, v = heads.split((H, SHARED, SHARED), dim=1)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        attended = attend(q, repeated(keys, 2), repeated(values, 2), mask, scale=D**-0.5)
        attended = attended.reshape(x.shape[0], -1, x.shape[1], D).transpose(1, 2).contiguous()
        return x + self.out(attended.reshape(*x.shape[:2], -1).contiguous())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, cache, position):
        mask = (torch.arange(cache.shape[-2]) <= position).expand(x.shape[0], 1, 1, -1)
        for index, layer in enumerate(self.layers):
            x = layer(x, cache[index, 0], cache[index, 1], position, mask)
        return x


def a_cache(batch: int = B, length: int = L) -> torch.Tensor:
    return torch.randn(2, 2, batch, SHARED, length, D)


def decode(model, compiled, cache, steps: int = 5, batch: int = B) -> None:
    """Compare some steps with eager, the cache included."""
    other = cache.clone()
    for step in range(steps):
        x, position = torch.randn(batch, 1, H * D), torch.tensor([3 + step])
        result, expected = compiled(x, cache, position), model(x, other, position)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(cache, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_decoder_has_no_eager_piece_and_equal_layers_stay_equal() -> None:
    torch.manual_seed(0)
    model = Decoder().requires_grad_(False)
    for on, pieces in ((False, 5), (True, 3)):
        torch._dynamo.reset()
        settings = {
            "kernels": on and "decode_attention",
            "compiler": "eager",
            "capture_device": "host",
        }
        backend = cgcompile.Backend(**settings)
        compiled = torch.compile(model, backend=backend)
        with torch.inference_mode():
            decode(model, compiled, a_cache())
        (graph,) = backend.graphs
        assert len(graph.split.pieces) == pieces
        assert (backend.counters.captures, backend.counters.replays) == (1, 3)
        assert_snapshot(f"decode_attention/decoder_{on}", graph.split.text(lines=False))


@pytest.mark.slow
def test_batch_and_length_may_vary_without_new_guards() -> None:
    torch.manual_seed(0)
    model = Decoder().requires_grad_(False)
    guards = []
    for on in (False, True):
        torch._dynamo.reset()
        settings = {
            "kernels": on and "decode_attention",
            "compiler": "eager",
            "capture_device": "host",
        }
        backend = cgcompile.Backend(**settings)
        compiled = torch.compile(model, backend=backend, dynamic=True)
        with torch.inference_mode():
            for batch, length in ((3, 24), (4, 32), (6, 17)):
                decode(model, compiled, a_cache(batch, length), 3, batch)
        (graph,) = backend.graphs
        assert ops_of(backend).count(OP) == (2 if on else 0)
        symbols = graph.split.symbols
        guards.append([symbols.guards_on(symbol) for symbol in symbols])
        assert backend.counters.captures == backend.counters.replays == 3
    assert guards[0] == guards[1]


def _marked(batch: int = B, length: int = L):
    """Return inputs of which each batch size and number of keys is a symbol of its own."""
    q, k, v = torch.randn(batch, H, 1, D), *torch.randn(2, batch, SHARED, length, D)
    mask = torch.rand(batch, 1, 1, length) < 0.5
    mask[..., 0] = True
    for tensor, dims in ((q, (0,)), (k, (0, 2)), (v, (0, 2)), (mask, (0, 3))):
        torch._dynamo.mark_dynamic(tensor, dims)
    return q, k, v, mask


def _projected(q, k, v, mask):
    """Project the result, whose layout differs from that of the op."""
    weight = q.new_ones(H * D, H * D).tril() / (H * D)
    result = attend(q, repeated(k, 2), repeated(v, 2), mask).transpose(1, 2)
    return F.linear(result.reshape(q.shape[0], 1, -1), weight) + mask.sum()


@pytest.mark.slow
def test_sizes_that_must_be_equal_may_be_different_symbols() -> None:
    sizes = itertools.cycle(((2, 17), (5, 24)))
    backend = run(_projected, lambda: _marked(*next(sizes)), calls=8)
    (graph,) = backend.graphs
    assert len([*graph.split.symbols]) > 2
    assert ops_of(backend).count(OP) == 1
    assert not graph.split.fusions.unfused


@pytest.mark.slow
def test_sizes_that_differ_are_an_error_as_in_eager() -> None:
    settings = {"kernels": "decode_attention", "compiler": "eager", "capture_device": "host"}
    backend = cgcompile.Backend(**settings)
    compiled = torch.compile(_projected, backend=backend, fullgraph=True)
    q, k, v, mask = _marked(batch=3)
    unequal = (q, k, v, mask[..., 1:]), (q, k[:, :, 1:], v[:, :, 1:], mask), (q[1:], k, v, mask)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(compiled(q, k, v, mask), _projected(q, k, v, mask))
        for arguments, function in itertools.product(unequal, (_projected, compiled)):
            with pytest.raises(RuntimeError, match="size"):
                function(*arguments)
        torch.testing.assert_close(compiled(q, k, v, mask), _projected(q, k, v, mask))
    assert len(backend.graphs) == 1
    assert OP in ops_of(backend)


class OverLengths(nn.Module):
    """Attention alone depends on the number of keys; with ``masks``, the mask is computed."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.q, self.masks = nn.Linear(H * D, H * D), masks

    def forward(self, x, cache):
        q = self.q(x).view(-1, 1, H, D).transpose(1, 2)
        mask = (torch.arange(cache.shape[2]) % 3 < 2)[None] if self.masks else None
        return attend(q, cache, cache, mask, enable_gqa=True).flatten(1).sin()


@pytest.mark.parametrize("masks", [False, True])
def test_piecewise_graphs_still_serve_all_numbers_of_keys(masks) -> None:
    torch.manual_seed(0)
    model = OverLengths(masks).requires_grad_(False)
    settings = {"kernels": "decode_attention", "compiler": "eager", "capture_device": "host"}
    backend = cgcompile.Backend(**settings)
    dims = {"x": {0: "n"}, "cache": {0: "n", 2: "length"}}
    compiled = cgcompile.compile(model, backend, dynamic_dims=dims)
    x, cache = torch.empty(B, H * D), torch.randn(B, SHARED, 64, D)
    descriptor = cgcompile.BatchDescriptor(B)
    mode = cgcompile.CUDAGraphMode.PIECEWISE
    with torch.inference_mode():
        for length in (16, 24, 24, 32) if not masks else (16, 16, 16):
            x.normal_()
            seen = cache[:, :, :length]
            context = {"cudagraph_runtime_mode": mode, "batch_descriptor": descriptor}
            with cgcompile.set_forward_context(None, **context):
                result = compiled(x, seen)
            torch.testing.assert_close(result, model(x, seen), rtol=1e-5, atol=1e-6)
    assert backend.counters.captures == 1
    assert backend.counters.replays == (1 if masks else 2)
    assert (OP in ops_of(backend)) == masks


class Trained(nn.Module):
    """Attention with parameters in all its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(H * D, H * D), nn.Linear(H * D, 2 * SHARED * D)
        self.bias, self.sinks = nn.Parameter(torch.randn(1, H, 1, L)), nn.Parameter(torch.randn(H))

    def forward(self, x, context, mask):
        q = self.q(x).view(B, 1, H, D).transpose(1, 2)
        k, v = self.kv(context).view(B, L, 2, SHARED, D).permute(2, 0, 3, 1, 4).unbind()
        one = attend(q, repeated(k, 2), repeated(v, 2), self.bias)
        scores = torch.matmul(q, repeated(k, 2).transpose(2, 3))
        scores = torch.tanh(scores / 5.0) * 5.0 + torch.where(mask, 0.0, -1e9)
        scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(B, -1, 1, -1)], -1)
        two = torch.matmul(F.softmax(scores, -1)[..., :-1], repeated(v, 2))
        return (one + two).sum(dim=(1, 2))


@pytest.mark.parametrize("splits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_training_step_has_the_gradients_of_eager(splits) -> None:
    torch.manual_seed(0)
    model = Trained()
    backend = cgcompile.Backend(kernels="decode_attention", compiler="eager", capture_device="host")
    if not splits:
        settings = {"mode": "DYNAMO_TRACE_ONCE", "cudagraph_mode": "FULL"}
        backend = cgcompile.Backend(kernels="decode_attention", capture_device="host", **settings)
    compiled = torch.compile(model, backend=backend) if splits else None
    if compiled is None:
        compiled = cgcompile.compile(model, backend)
    for _ in range(3):
        arguments = torch.randn(B, 1, H * D), torch.randn(B, L, H * D), torch.rand(B, 1, 1, L) < 0.5
        gradients = []
        for call in (model, compiled):
            model.zero_grad()
            call(*arguments).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0])
        assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    assert ops_of(backend).count(OP) == 2


def test_explain_names_what_is_replaced() -> None:
    def both(q, k, v, mask):
        return attend(q, repeated(k, 2), repeated(v, 2), mask) + attend(
            q, repeated(k, 2), repeated(v, 2), None, is_causal=True
        )

    result = cgcompile.explain(both, *inputs(), config={"kernels": "decode_attention"})
    notes = [note for note in result.notes if note.startswith("decode_attention")]
    assert_snapshot("decode_attention/explain", "\n".join(notes))
    assert (result.totals.captured, result.totals.eager) == (2, 1)
    assert "decode_attention: fused" in str(result)
    with torch.device("meta"):
        without_data = inputs()
    on_meta = cgcompile.explain(both, *without_data, config={"kernels": "decode_attention"})
    assert [note for note in on_meta.notes if note.startswith("decode_attention")] == notes
    assert "splitting_ops=" not in str(result)  # the op is no attention that has to be registered


def test_a_product_of_masks_writes_neither() -> None:
    """The mask of the caller is an input that is copied, so other tensors replay the same graph."""
    backend = run(
        lambda q, k, v, mask: attend(q, repeated(k, 2), repeated(v, 2), mask & (mask | mask))
    )
    values = backend.graphs[-1].split.inputs
    assert not any(value.mutated for value in values)


PROGRAM = """
import json, sys
import torch
import torch.nn.functional as F
import cgcompile

def step(q, k, v, mask):
    return F.scaled_dot_product_attention(q.sin(), k, v, mask, enable_gqa=True).cos()

backend = cgcompile.Backend(kernels="decode_attention", capture_device="host", cache_dir=sys.argv[1])
compiled = torch.compile(step, backend=backend)
worst = 0.0
with torch.inference_mode():
    for _ in range(4):
        q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 8)
        mask = torch.rand(2, 1, 1, 24) < 0.7
        difference = compiled(q, k, v, mask) - step(q, k, v, mask)
        worst = max(worst, float(difference.abs().max()))
(graph,) = backend.graphs
how = [each.how for each in graph.compilation.pieces]
print(json.dumps([how, worst, backend.counters.replays, len(graph.split.fusions.fused)]))
"""


@pytest.mark.slow
def test_a_piece_with_the_op_is_loaded_by_another_process(tmp_path: Path) -> None:
    for expected in ("compiled", "loaded"):
        printed = run_code(PROGRAM, str(tmp_path / "cache"))
        how, worst, replays, fused = json.loads(printed.splitlines()[-1])
        assert (how, replays, fused) == ([expected] * 2, 2, 1)  # a piece ends before the op
        assert worst < 1e-5
