"""Rotary embeddings and the writes to a static cache become one op, only where that is right.

The pass runs here on CPU graphs, as if their device had the kernel; the op then runs torch's ops.
"""

import pytest
import torch
from lib.snapshots import assert_snapshot
from torch import nn

import cgcompile
from cgcompile.passes.base import Fusions
from cgcompile.passes.rotary import fuse_rotary
from cgcompile.pieces import compilers

D = 32


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    most = float(expected.float().abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=0, atol=2e-2 * most)


def language_model(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = getattr(transformers, f"{family}Config")(**sizes, head_dim=D, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # they are all ones, or zeros
            parameter.data.normal_(1, 0.3)
    return model


def decoded(model: nn.Module, backend, batch: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """Return the logits of three steps after a prompt of five tokens, and the cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=16)
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(0, 100, (batch, n), generator=generator)  # noqa: E731
    with torch.inference_mode():
        model(draw(5), past_key_values=cache)
        call = torch.compile(model.forward, backend=backend, dynamic=False) if backend else model
        logits = [call(draw(tokens), past_key_values=cache).logits for _ in range(3)]
    layers = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return torch.stack(logits), *layers, *(layer.cumulative_length for layer in cache.layers)


FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Granite", "Phi3"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_models_of_transformers_are_fused(family) -> None:
    """Phi 3 is not fused: it may embed a part of a head."""
    model = language_model(family)
    texts = []

    def backend(gm, example_inputs):
        fusions = fuse_rotary(gm, lambda device: None)
        targets = [str(node.target) for node in gm.graph.nodes]
        counts = {name: sum(name in target for target in targets) for name in COUNTED}
        texts.append(f"{fusions}\n{counts}")
        return gm.forward

    for batch, tokens in ((1, 1), (2, 2)):
        torch._dynamo.reset()
        results, expected = (decoded(model, way, batch, tokens) for way in (backend, None))
        for result, right in zip(results, expected, strict=True):
            close(result, right)
    assert len(set(texts)) == 1
    assert_snapshot(f"rotary/{family.lower()}", texts[0])


COUNTED = ("rotate_and_cache", "index_copy_", "cat", "add_", "arange")


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def _step(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    count.add_(1)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q, keys.sum(2)


def _reversed_sums(q, k, v, cos, sin, keys, values, count):
    half = D // 2
    q = sin * torch.cat((-q[..., half:], q[..., :half]), -1) + cos * q
    k = sin * torch.cat((-k[..., half:], k[..., :half]), -1) + cos * k
    positions = count + torch.arange(1)
    keys.index_copy_(-2, positions, k)
    values.index_copy_(2, positions, v)
    count.add_(1)
    return q


def _keys_are_used_elsewhere(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q, k


def _a_part_is_used_elsewhere(q, k, v, cos, sin, keys, values, count):
    turned = torch.cat((-q[..., D // 2 :], q[..., : D // 2]), -1)
    q, k = q * cos + turned * sin, rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q, turned


def _cache_is_read_between(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    read = keys + 1
    values.index_copy_(2, positions, v)
    return q, read


def _cache_is_written_between(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    keys.mul_(2)
    values.index_copy_(2, positions, v)
    return q


def _one_cache_for_both(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    keys.index_copy_(2, positions, v)
    return q


def _queries_are_used_before(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    scores = q @ keys.transpose(-1, -2).repeat_interleave(2, 1)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return scores


def _queries_come_later(q, k, v, cos, sin, keys, values, count):
    k = rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return rotated(q + 1, cos, sin)


def _table_is_written(q, k, v, cos, sin, keys, values, count):
    k = rotated(k, cos, sin)
    cos.mul_(2)
    q = rotated(q, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _embedding_is_written(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    k.mul_(2)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _other_positions_of_values(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    keys.index_copy_(2, torch.arange(1) + count, k)
    values.index_copy_(2, torch.arange(1) + count + 1, v)
    return q


def _values_are_embedded_too(q, k, v, cos, sin, keys, values, count):
    q, k, v = rotated(q, cos, sin), rotated(k, cos, sin), rotated(v, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _other_table_of_keys(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, sin, cos)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _turned_the_other_way(q, k, v, cos, sin, keys, values, count):
    half = D // 2
    q = q * cos + torch.cat((q[..., half:], -q[..., :half]), -1) * sin
    k = k * cos + torch.cat((k[..., half:], -k[..., :half]), -1) * sin
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _unequal_halves(q, k, v, cos, sin, keys, values, count):
    q = q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin
    k = k * cos + torch.cat((-k[..., 8:], k[..., :8]), -1) * sin
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _scaled_sum(q, k, v, cos, sin, keys, values, count):
    half = D // 2
    q = torch.add(q * cos, torch.cat((-q[..., half:], q[..., :half]), -1) * sin, alpha=2)
    k = torch.add(k * cos, torch.cat((-k[..., half:], k[..., :half]), -1) * sin, alpha=2)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _written_along_heads(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(2)
    keys[:, :, :1].index_copy_(1, positions, k)
    values[:, :, :1].index_copy_(1, positions, v)
    return q


def _tables_of_heads(q, k, v, cos, sin, keys, values, count):
    cos = cos.expand(-1, 2, -1, -1)
    q = rotated(q[:, :2], cos, sin)
    k = rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _under_autocast(q, k, v, cos, sin, keys, values, count):
    with torch.autocast("cpu", torch.bfloat16):
        return _step(q, k, v, cos, sin, keys, values, count)


def _views_of_one_cache(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    one, two = keys[:1], keys[1:]
    one.index_copy_(2, positions, k[:1])
    two.index_copy_(2, positions, v[1:])
    return q


def _counter_is_read_after(q, k, v, cos, sin, keys, values, count):
    return _step(q, k, v, cos, sin, keys, values, count)[0], count + 5


def _counter_is_read_between(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    count.add_(1)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v + count)
    return q


def _counter_is_written_before(q, k, v, cos, sin, keys, values, count):
    count.add_(1)
    return _step(q, k, v, cos, sin, keys, values, count)


def _counter_is_returned(q, k, v, cos, sin, keys, values, count):
    return _step(q, k, v, cos, sin, keys, values, count)[0], count


def _counter_is_written_after(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    count.add_(1)
    return q, count + 5


def _counter_stays(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q, count + 5


def _counter_is_scaled(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(1) + count
    count.add_(1, alpha=2)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


def _positions_do_not_count(q, k, v, cos, sin, keys, values, count):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    positions = torch.arange(3, 4) + count
    count.add_(1)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return q


CASES = [value for name, value in list(globals().items()) if name[0] == "_" and callable(value)]


def drawn(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = [(rows, 1, 4, D), (rows, 1, 2, D), (rows, 1, 2, D)]
    q, k, v = (torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes)
    tables = [torch.randn(1, 1, 1, D).to(dtype) for _ in range(2)]
    caches = [torch.randn(rows, 2, 9, D).to(dtype) for _ in range(2)]
    return [q, k, v, *tables, *caches, torch.tensor(3)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
@pytest.mark.parametrize("rows", [2, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_looks_alike_keeps_its_result(case, rows, dtype) -> None:
    torch.manual_seed(0)
    fusions: list[Fusions] = []
    graphs = []

    def backend(gm, example_inputs):
        fusions.append(fuse_rotary(gm, lambda device: None))
        graphs.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward

    first = drawn(rows, dtype)
    others = [tensor.clone() for tensor in first]
    compiled = torch.compile(case, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            result, expected = compiled(*others), case(*first)
            pairs = (
                zip(result, expected, strict=True)
                if type(result) is tuple
                else [(result, expected)]
            )
            for one, other in [*pairs, *zip(others, first, strict=True)]:
                close(one, other)
                assert one.stride() == other.stride()
    if rows > 16 or dtype is torch.float32:
        assert not any(fusion.fused for fusion in fusions)
    else:
        (targets,) = graphs
        counts = {name: sum(name in target for target in targets) for name in COUNTED}
        assert_snapshot(f"rotary/{case.__name__[1:]}", f"{fusions[0]}\n{counts}")


class Attention(nn.Module):
    """One layer of a decode step: projections, norms of heads, embedding, cache, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n * D, bias=False) for n in (4, 2, 2))
        self.norm = nn.RMSNorm(D, eps=1e-6)
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x, cos, sin, keys, values, count):
        rows = x.shape[0]
        q, k, v = (layer(x).view(rows, 1, -1, D) for layer in (self.q, self.k, self.v))
        q, k, v = self.norm(q).transpose(1, 2), self.norm(k).transpose(1, 2), v.transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mask = torch.arange(keys.shape[2], device=x.device)[None, None, None] <= count
        positions = torch.arange(1, device=x.device) + count
        count.add_(1)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        return nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL with decode_attention"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replays_write_the_cache_as_eager_does(device, mode, monkeypatch, caplog) -> None:
    """With the host recorder, where the op runs torch's ops, and on CUDA, where it is a kernel."""
    caplog.set_level("INFO")
    if device == "cpu":
        monkeypatch.setattr(compilers, "why_unsupported", lambda device: None)
    elif compilers.why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    model = Attention().to(device)
    recorder = {"capture_device": "host"} if device == "cpu" else {}
    if "decode_attention" in mode:
        recorder["kernels"] = "auto,decode_attention"
    backend = cgcompile.Backend(cudagraph_mode=mode.split()[0], **recorder)
    call = torch.compile(model, backend=backend, dynamic=False)
    for rows in (3, 16, 17):
        caches = [torch.randn(rows, 2, 9, D).bfloat16().to(device) for _ in range(2)]
        state = [*caches, torch.tensor(2, device=device)]
        own = [tensor.clone() for tensor in state]
        results = []
        with torch.inference_mode():
            for _ in range(5):
                shapes = [(rows, 1, 64), (1, 1, 1, D), (1, 1, 1, D)]
                inputs = [torch.randn(shape).bfloat16().to(device) for shape in shapes]
                results.append(call(*inputs, *state).clone())
                close(results[-1], model(*inputs, *own))
                for tensor, right in zip(state, own, strict=True):
                    close(tensor, right)
        assert not torch.equal(results[-1], results[-2])
        assert int(state[-1]) == 7
    assert backend.counters.replays >= 9
    fused = "fused norm, q_2 + k_2, index_copy_ + index_copy__1"
    texts = [text for text in caplog.messages if text.startswith("piece") and "index_copy_" in text]
    assert [fused in text for text in texts] == [True, True, False]


def test_a_number_of_tokens_without_bound_is_not_fused() -> None:
    fusions: list[Fusions] = []

    def backend(gm, example_inputs):
        fusions.append(fuse_rotary(gm, lambda device: None))
        return gm.forward

    first = drawn(3, torch.bfloat16)
    others = [tensor.clone() for tensor in first]
    for tensor in (*others[:3], *others[5:7]):
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        result = torch.compile(_step, backend=backend)(*others)
        close(result[0], _step(*first)[0])
    assert [str(fusion) for fusion in fusions] == ["index_copy_: it may get more than 16 tokens"]
