"""Steps without a forward context: warming, capture and replay of whatever is given."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.asserts import build
from lib.cases import CASES, D, DecoderLayer
from lib.entry import (
    EAGER_ATTEND,
    HOOKED,
    WARMING,
    Hook,
    Hooked,
    Times,
    WithCache,
    assert_counts,
    assert_same,
    assert_steps,
    backend_for,
    batch,
    compiled_case,
    compiled_model,
    made,
    marked,
)
from lib.patience import PATIENCE
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, CUDAGraphMode, SplittingOp
from cgcompile.context import current_forward_context
from cgcompile.errors import CaptureError, DispatchError
from cgcompile.graphs.steps import allow_capture
from cgcompile.reasons import Reason

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


pytestmark = pytest.mark.usefixtures("without_gradients")


def start(compiled: Any, model: Any, device: str, size: int = 6) -> None:
    """The first call, with a dynamic batch dimension."""
    x = marked(batch(device, size))
    assert_same(compiled(x), model(x))


def modes(backend: cgcompile.Backend) -> list[CUDAGraphMode]:
    return [each.batch.mode for graph in backend.graphs for each in graph.recordings]


# ------------------------------------------------------------------ warming, capture, replay


@pytest.mark.parametrize("name", ["sdpa", "op_packet", "no_boundary", "eager_region"])
def test_each_size_is_warmed_captured_and_replayed_in_turn(device: str, name: str) -> None:
    model, compiled, backend = compiled_case(name, device)
    start(compiled, model, device)
    assert_counts(backend, 0, 0, {WARMING: 1})
    assert_steps(compiled, model, device, steps=1)
    assert_counts(backend, 1, 0, {WARMING: 1})
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 1, 2, {WARMING: 1})
    assert_steps(compiled, model, device, size=3, steps=4)
    assert_counts(backend, 2, 4, {WARMING: 2})
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 2, 6, {WARMING: 2})
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("name", ["sdpa", "op_packet"])
def test_inputs_and_results_are_the_callers(device: str, name: str) -> None:
    model, compiled, backend = compiled_case(name, device)
    inputs = [marked(batch(device))] + [batch(device) for _ in range(4)]
    kept = [x.clone() for x in inputs]
    results = [compiled(x) for x in inputs]
    assert_same(inputs, kept)
    assert_steps(compiled, model, device, size=3)
    backend.graphs[0].release()
    assert_same(results, [model(x) for x in inputs])
    assert len({result.data_ptr() for result in results}) == len(results)
    assert_counts(backend, 2, 4, {WARMING: 2})


@pytest.mark.parametrize("warmups", [0, 2])
def test_number_of_warming_calls(device: str, warmups: int) -> None:
    model, compiled, backend = compiled_case("sdpa", device, num_warmups=warmups)
    start(compiled, model, device)
    assert_steps(compiled, model, device, steps=warmups + 2)
    assert_counts(backend, 1, 2, {WARMING: warmups} if warmups else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "other"),
    [
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), None),
        (lambda x: x[:, :1].expand(-1, 4, -1), None),
        (lambda x: x[:, :, :1].expand(-1, -1, D), None),
        (lambda x: torch.cat([x, x], 1)[:, ::2], None),
        (lambda x: torch.cat([x, x], 2)[..., 3 : 3 + D], None),
        (lambda x: x, lambda x: torch.cat([x[:1], x])[1:]),
    ],
    ids=["transposed", "expanded", "expanded_last", "strided", "offset", "moved"],
)
@pytest.mark.parametrize("name", ["sdpa", "op_packet"])
def test_inputs_of_any_layout(device: str, name: str, layout: Any, other: Any) -> None:
    model, compiled, backend = compiled_case(name, device)
    for step in range(5):
        x = batch(device)
        x = layout(x) if step % 2 == 0 or other is None else other(x)
        x = marked(x) if step == 0 else x
        kept = x.clone()
        assert_same(compiled(x), model(x))
        assert_same(x, kept)
    assert_counts(backend, 1, 3, {WARMING: 1})


@pytest.mark.slow
def test_inputs_whose_strides_vary(device: str) -> None:
    model, backend = build(CASES["sdpa"], device), backend_for()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for width in (6, 6, 6, 7, 7, 7, 6, 7):
        x = torch.randn(6, width, D, device=device)[:, :5]
        assert_same(compiled(x), model(x))
    counters = backend.counters
    assert counters.captures >= 2
    assert counters.replays >= 2
    assert set(counters.plain) == {WARMING}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "op_packet"])
def test_an_empty_batch_and_a_batch_of_one(device: str, name: str) -> None:
    model, compiled, backend = compiled_case(name, device)
    start(compiled, model, device)
    for size in (6, 1, 0):
        assert_steps(compiled, model, device, size=size)
    counters = backend.counters
    assert (counters.captures, counters.replays) == (3, 4), counters
    assert counters.plain == {WARMING: 3}


# ------------------------------------------------------------------ what is not captured


@pytest.mark.slow
def test_no_more_shapes_than_allowed_are_captured(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device, max_captured_shapes=2)
    start(compiled, model, device)
    assert_steps(compiled, model, device, size=6, steps=2)
    for size in (5, 4, 3):
        assert_steps(compiled, model, device, size=size)
    assert_steps(compiled, model, device, size=5)
    assert_counts(backend, 2, 5, {WARMING: 2, Reason.TOO_MANY_SHAPES: 6})
    assert "max_captured_shapes" in backend.counters.details[Reason.TOO_MANY_SHAPES]


def test_unlisted_sizes_run_plain(device: str) -> None:
    model, compiled, backend = compiled_case("op_packet", device, cudagraph_capture_sizes=(6, 3))
    start(compiled, model, device)
    assert_steps(compiled, model, device, size=6)
    assert_steps(compiled, model, device, size=4)
    assert_steps(compiled, model, device, size=3)
    assert_counts(backend, 2, 3, {WARMING: 2, Reason.UNLISTED_SIZE: 3})


def test_where_capture_is_forbidden_only_known_shapes_replay(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    start(compiled, model, device)
    with allow_capture(False):
        assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 0, 0, {WARMING: 1, Reason.CAPTURE_FORBIDDEN: 2})
    assert_steps(compiled, model, device, steps=1)
    with allow_capture(False):
        assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 1, 2, {WARMING: 1, Reason.CAPTURE_FORBIDDEN: 2})


def test_strict_raises_where_capture_is_forbidden(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device, on_fallback="raise")
    start(compiled, model, device)
    with allow_capture(False), pytest.raises(DispatchError, match="capture_forbidden"):
        compiled(batch(device))
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 1, 1, {WARMING: 1}, failures=1)


def test_closed_capture_replays_what_is_known(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    start(compiled, model, device)
    assert_steps(compiled, model, device, steps=2)
    backend.graphs[0].close_capture()
    assert_steps(compiled, model, device, steps=2)
    assert_steps(compiled, model, device, size=3)
    assert_counts(backend, 1, 3, {WARMING: 1, Reason.CAPTURE_FORBIDDEN: 3})


@pytest.mark.slow
def test_a_closed_backend_captures_no_later_graph_until_released(device: str) -> None:
    backend = backend_for()
    backend.close_capture()
    model = build(CASES["sdpa"], device)
    compiled = torch.compile(model, backend=backend)
    start(compiled, model, device)
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 0, 0, {Reason.CAPTURE_FORBIDDEN: 3})
    backend.release()
    assert_steps(compiled, model, device)
    assert_counts(backend, 1, 1, {Reason.CAPTURE_FORBIDDEN: 3, WARMING: 1})


def test_released_graphs_are_warmed_captured_and_replayed_again(device: str) -> None:
    model, compiled, backend = compiled_case("op_packet", device)
    start(compiled, model, device)
    assert_steps(compiled, model, device)
    backend.graphs[0].release()
    assert backend.graphs[0].recordings == ()
    assert_steps(compiled, model, device, steps=4)
    assert_counts(backend, 2, 4, {WARMING: 2})


@pytest.mark.parametrize(
    ("name", "setting", "mode"),
    [
        ("sdpa", "FULL_AND_PIECEWISE", FULL),  # one graph where attention allows it
        ("op_packet", "FULL_AND_PIECEWISE", PIECEWISE),
        ("sdpa", "FULL", FULL),
        ("sdpa", "PIECEWISE", PIECEWISE),
        ("op_packet", "PIECEWISE", PIECEWISE),
    ],
)
def test_modes_of_graphs(device: str, name: str, setting: str, mode: Any) -> None:
    model, compiled, backend = compiled_case(name, device, cudagraph_mode=setting)
    start(compiled, model, device)
    assert_steps(compiled, model, device)
    assert modes(backend) == [mode]
    assert_counts(backend, 1, 2, {WARMING: 1})


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        ("sdpa", "NONE", Reason.MODE_NONE),
        ("op_packet", "NONE", Reason.MODE_NONE),
        ("op_packet", "FULL", Reason.ATTENTION_SUPPORT),
    ],
)
def test_settings_that_leave_no_graph(device: str, name: str, setting: str, reason: Any) -> None:
    model, compiled, backend = compiled_case(name, device, cudagraph_mode=setting)
    start(compiled, model, device)
    assert_steps(compiled, model, device)
    assert_counts(backend, 0, 0, {reason: 4})


def test_strict_raises_where_no_graph_is_possible(device: str) -> None:
    _, compiled, backend = compiled_case(
        "op_packet", device, cudagraph_mode="FULL", on_fallback="raise"
    )
    with pytest.raises(DispatchError, match="attention_support"):
        compiled(marked(batch(device)))
    assert_counts(backend, 0, 0, {}, failures=1)


@pytest.mark.slow
def test_tensors_of_the_cpu_are_not_captured_unasked() -> None:
    model, compiled, backend = compiled_case("sdpa", "cpu", capture_device="auto")
    start(compiled, model, "cpu")
    assert_steps(compiled, model, "cpu")
    assert_counts(backend, 0, 0, {Reason.NO_DEVICE: 4})
    assert "CGCOMPILE_CAPTURE_DEVICE" in backend.counters.details[Reason.NO_DEVICE]
    assert backend.graphs[0].recordings == ()


def test_the_environment_asks_for_the_host_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    model, backend = build(CASES["sdpa"]), cgcompile.Backend(compiler="eager")
    compiled = torch.compile(model, backend=backend)
    start(compiled, model, "cpu")
    assert_steps(compiled, model, "cpu")
    assert_counts(backend, 1, 2, {WARMING: 1})


class Grows(nn.Module):
    def forward(self, x, cache):
        cache = torch.cat([cache, x], 1)
        return F.scaled_dot_product_attention(x, cache, cache), cache


def test_a_cache_that_grows_is_not_captured_and_said(device: str) -> None:
    model, compiled, backend = compiled_model(Grows, device)
    cache = torch.randn(2, 3, D, device=device)
    torch._dynamo.mark_dynamic(cache, 1)
    for _ in range(6):
        x = torch.randn(2, 1, D, device=device)
        expected = model(x, cache)
        result = compiled(x, cache)
        assert_same(result, expected)
        cache = result[1]
    assert_counts(backend, 0, 0, {WARMING: 1, Reason.GROWING_STATE: 5})
    assert "StaticCache" in backend.counters.details[Reason.GROWING_STATE]


# ------------------------------------------------------------------ what is returned


class ReturnsViews(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x) * 2, x[:, 1:], x, x.view(torch.int32)[1:]


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_a_returned_view_of_an_input_is_of_the_input_of_this_call(
    device: str, setting: str
) -> None:
    model, compiled, backend = compiled_model(ReturnsViews, device, cudagraph_mode=setting)
    for step in range(5):
        whole = batch(device, 8)
        x = whole[step % 3 : step % 3 + 5]
        x = marked(x) if step == 0 else x
        result = compiled(x)
        assert_same(result, model(x))
        assert result[1].data_ptr() == x[:, 1:].data_ptr()
        assert result[2].data_ptr() == x.data_ptr()
        assert result[3].data_ptr() == x[1:].data_ptr()
        result[1].zero_()
        assert x[:, 1:].abs().sum() == 0
    assert_counts(backend, 1, 3, {WARMING: 1})


class ReturnsShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        h = self.linear(F.scaled_dot_product_attention(x, x, x))
        return h, h.transpose(1, 2), h[:, 1:, 2:], h, x * 2


def test_results_that_share_memory_still_share_it(device: str) -> None:
    model, compiled, backend = compiled_model(ReturnsShared, device)
    for step in range(4):
        x = batch(device)
        result = compiled(marked(x) if step == 0 else x)
        assert_same(result, model(x))
        assert [each.data_ptr() for each in result[:2]] == [result[0].data_ptr()] * 2
        assert result[3].data_ptr() == result[0].data_ptr()
        result[0].fill_(7)
        assert bool((result[1] == 7).all() and (result[2] == 7).all() and (result[3] == 7).all())
        assert not bool((result[4] == 7).any())
    assert_counts(backend, 1, 2, {WARMING: 1})


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        y = F.scaled_dot_product_attention(x @ self.weight, x, x)
        return y + 1, self.weight, self.weight.t()[1:]


def test_a_returned_parameter_is_the_parameter(device: str) -> None:
    model, compiled, backend = compiled_model(ReturnsParameter, device)
    start(compiled, model, device)
    for _ in range(4):
        x = batch(device)
        result = compiled(x)
        assert_same(result, model(x))
        assert result[1] is model.weight
        assert result[2].data_ptr() == model.weight.t()[1:].data_ptr()
        model.weight.mul_(0.9)
    assert_counts(backend, 1, 3, {WARMING: 1})


class ViewsEagerly(nn.Module):
    """An eager boundary hands on memory of an input, to the caller and to a captured piece."""

    def forward(self, x, y):
        h = F.softmax(y, -1) * 2
        with cgcompile.eager_region():
            turned = x.transpose(1, 2)
        return turned, h + turned.transpose(1, 2).sin()


def test_a_view_that_an_eager_region_makes_is_of_the_input_of_this_call(device: str) -> None:
    model, compiled, backend = compiled_model(ViewsEagerly, device)
    for step in range(5):
        x, y = batch(device), batch(device)
        result = compiled(marked(x) if step == 0 else x, marked(y) if step == 0 else y)
        assert_same(result, model(x, y))
        assert result[0].data_ptr() == x.data_ptr()
    assert_counts(backend, 1, 3, {WARMING: 1})


# ------------------------------------------------------------------ what is written


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_a_written_argument_advances_once_a_call(device: str, setting: str) -> None:
    model, compiled, backend = compiled_model(WithCache, device, cudagraph_mode=setting)
    cache = torch.zeros(4, D, device=device)
    expected_cache = cache.clone()
    for step in range(5):
        x = batch(device)
        x = marked(x) if step == 0 else x
        expected = model(x, expected_cache)
        assert_same(compiled(x, cache), expected)
        assert_same(cache, expected_cache)
    assert_counts(backend, 1, 3, {WARMING: 1})


def test_a_written_argument_elsewhere_is_another_binding(device: str) -> None:
    model, compiled, backend = compiled_model(WithCache, device, max_weight_sets=2)
    caches = [torch.full((4, D), float(k), device=device) for k in range(3)]
    expected_caches = [each.clone() for each in caches]

    def step(which: int, x: torch.Tensor) -> None:
        expected = model(x, expected_caches[which])
        assert_same(compiled(x, caches[which]), expected)
        assert_same(caches, expected_caches)

    step(0, marked(batch(device)))
    for which in (0, 0, 1, 1, 1):
        step(which, batch(device))
    assert_counts(backend, 2, 2, {WARMING: 2})
    for which in (2, 2, 2, 0, 1, 2, 0):
        step(which, batch(device))
    assert_counts(backend, 2, 5, {WARMING: 2, Reason.TOO_MANY_WEIGHT_SETS: 4})
    assert len(backend.graphs) == 1


class SharedMemory:
    """A written row in the midst of memory whose first rows may be the other argument."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.found, self.expected = (torch.randn(7, 4, D, device=device) for _ in range(2))

    def step(self, compiled: Any, model: Any, shared: bool, first: bool = False) -> None:
        self.found.normal_()
        self.expected.copy_(self.found)
        x = other = batch(self.device)
        if shared:
            x, other = self.found[:6], self.expected[:6]
        expected = model(other, self.expected[5])
        assert_same(compiled(marked(x) if first else x, self.found[5]), expected)
        assert_same(self.found, self.expected)


def test_arguments_that_always_share_memory_are_bound_by_address(device: str) -> None:
    model, compiled, backend = compiled_model(WithCache, device)
    memory = SharedMemory(device)
    for step in range(5):
        memory.step(compiled, model, shared=True, first=step == 0)
    assert_counts(backend, 1, 3, {WARMING: 1})


def test_an_argument_that_later_shares_written_memory_runs_plain(device: str) -> None:
    model, compiled, backend = compiled_model(WithCache, device)
    memory = SharedMemory(device)
    for step, shared in enumerate((False, False, False, True, True, False)):
        memory.step(compiled, model, shared=shared, first=step == 0)
    assert_counts(backend, 1, 2, {WARMING: 1, Reason.UNSUPPORTED_INPUT: 2})
    detail = backend.counters.details[Reason.UNSUPPORTED_INPUT]
    assert "'x' is memory that the step writes" in detail


class Counting(nn.Module):
    """Two buffers that advance: a counter, and a cache that is written at the counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.register_buffer("cache", torch.zeros(8, D))

    def forward(self, x):
        self.cache.index_copy_(0, self.count, self.linear(x).mean((0, 1))[None])
        self.count.add_(1)
        return F.scaled_dot_product_attention(x, x, x) + self.cache.sum(0) + self.count


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_buffers_advance_once_a_call(device: str, setting: str) -> None:
    eager = made(Counting, device)
    model, compiled, backend = compiled_model(Counting, device, cudagraph_mode=setting)
    for step in range(5):
        x = batch(device)
        assert_same(compiled(marked(x) if step == 0 else x), eager(x))
        assert model.count.item() == step + 1
        assert_same(model.cache, eager.cache)
    assert_counts(backend, 1, 3, {WARMING: 1})


class Dropping(nn.Module):
    def forward(self, x):
        y = F.scaled_dot_product_attention(x, x, x)
        return F.dropout(y, 0.5, training=True) + torch.rand_like(x)


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_random_numbers_are_those_of_eager(device: str, setting: str) -> None:
    model, compiled, backend = compiled_model(Dropping, device, cudagraph_mode=setting)
    for step in range(5):
        x = batch(device)
        x = marked(x) if step == 0 else x
        torch.manual_seed(step)
        expected = [model(x), torch.rand(3, device=device)]
        torch.manual_seed(step)
        assert_same([compiled(x), torch.rand(3, device=device)], expected)
    assert_counts(backend, 1, 3, {WARMING: 1})


# ------------------------------------------------------------------ numbers


class Bends(nn.Module):
    def forward(self, x, n):
        return F.elu(F.scaled_dot_product_attention(x, x, x), n)  # elu takes no tensor for it


def test_a_number_that_pieces_read_is_part_of_the_shape(device: str) -> None:
    model, compiled, backend = compiled_model(Bends, device, dynamic=True)
    for n in (2, 3, 4, 5, 6):
        x = batch(device)
        assert_same(compiled(x, n), model(x, n))
    assert_counts(backend, 0, 0, {WARMING: 5})
    for n in (4, 4, 5, 4, 5, 5):
        x = batch(device)
        assert_same(compiled(x, n), model(x, n))
    assert_counts(backend, 2, 4, {WARMING: 5})
    assert len(backend.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("support", [AttentionCGSupport.NEVER, AttentionCGSupport.ALWAYS])
def test_a_number_that_a_boundary_alone_reads_may_change_at_every_step(
    device: str, support: AttentionCGSupport
) -> None:
    made(Times, device)  # defines the operators
    boundary = SplittingOp("cgentry::times", support=support)
    model, compiled, backend = compiled_model(
        Times, device, dynamic=True, splitting_ops=(boundary,)
    )
    for n in range(2, 8):
        x = batch(device)
        assert_same(compiled(x, n), model(x, n))
    assert_counts(backend, 1, 4, {WARMING: 1})
    assert modes(backend) == [PIECEWISE]


# ------------------------------------------------------------------ weights


def other_weights(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "op_packet"])
def test_two_models_of_one_class_keep_their_weights_apart(device: str, name: str) -> None:
    backend = backend_for(**CASES[name].settings)
    models = [other_weights(build(CASES[name], device)) for _ in range(2)]
    compiled = [torch.compile(model, backend=backend) for model in models]
    start(compiled[0], models[0], device)
    assert_steps(compiled[1], models[1], device, steps=1)
    for _ in range(3):
        for one, model in zip(compiled, models, strict=True):
            assert_steps(one, model, device, steps=1)
    assert_counts(backend, 2, 4, {WARMING: 2})
    (graph,) = backend.graphs
    assert len(graph.weight_sets) == 2


class ReturnsItsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return F.scaled_dot_product_attention(self.linear(x), x, x), self.linear.bias[2:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CASES["sdpa"].build, CASES["op_packet"].build, ReturnsItsBias])
def test_a_dead_model_takes_its_graphs_along(device: str, kind: Any) -> None:
    backend = backend_for(**EAGER_ATTEND)
    first, second = (other_weights(made(kind, device)) for _ in range(2))
    one, other = (torch.compile(model, backend=backend) for model in (first, second))
    start(one, first, device)
    assert_steps(other, second, device)
    assert_steps(one, first, device)
    (graph,) = backend.graphs
    assert len(graph.weight_sets) == 2
    del other, second
    gc.collect()
    assert len(graph.weight_sets) == 1
    third = other_weights(made(kind, device))
    assert_steps(torch.compile(third, backend=backend), third, device)
    assert_steps(one, first, device)
    assert len(graph.recordings) == 2
    assert_counts(backend, 3, 7, {WARMING: 3})


@pytest.mark.slow
def test_layers_compiled_one_by_one(device: str) -> None:
    backend = backend_for()
    layers = nn.ModuleList(other_weights(made(DecoderLayer, device)) for _ in range(3))
    compiled = [torch.compile(layer, backend=backend) for layer in layers]
    for step in range(5):
        x = result = batch(device)
        result = marked(x) if step == 0 else x
        for layer, one in zip(layers, compiled, strict=True):
            x, result = layer(x), one(result)
        assert_same(result, x)
    assert_counts(backend, 3, 9, {WARMING: 3})
    (graph,) = backend.graphs
    assert len(graph.weight_sets) == 3


@pytest.mark.slow
def test_a_static_and_then_a_dynamic_compilation(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    for size in (6, 6, 6, 3, 3, 3, 4, 4, 4, 6, 6, 6):
        assert_steps(compiled, model, device, size=size, steps=1)
    assert len(backend.graphs) == 2
    before = backend.counters
    assert_steps(compiled, model, device, size=6, steps=3)
    after = backend.counters
    assert after.replays == before.replays + 3
    assert after.captures == before.captures
    assert set(after.plain) == {WARMING}


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.slow
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("name", ["sdpa", "op_packet"])
def test_captured_in_one_grad_mode_and_called_in_the_others(
    device: str, name: str, first: Callable[[], Any]
) -> None:
    model, compiled, backend = compiled_case(name, device)
    model.requires_grad_(False)
    for mode in (first, *(each for each in MODES if each is not first), first):
        with mode():
            for step in range(4):
                x = marked(batch(device)) if step == 0 else batch(device)
                result = compiled(x)
                assert_same(result, model(x))
                result.add_(1)
    graphs = len(backend.graphs)  # Dynamo may trace once for each mode
    assert_counts(backend, graphs, 16 - 2 * graphs, {WARMING: graphs})


# ------------------------------------------------------------------ failures


def reads_on_the_host_if_large(x: torch.Tensor) -> torch.Tensor:
    return x * x.mean().item() if x.shape[0] > 4 else x * 2


class CountingHooked(Hooked):
    """Has advanced when the operator is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        y = F.scaled_dot_product_attention(x, x, x)
        return super().forward(y) + self.count


@pytest.mark.slow
def test_a_capture_that_fails_runs_plain_and_spares_other_shapes(device: str, hook: Any) -> None:
    hook(reads_on_the_host_if_large)
    eager = made(CountingHooked, device)
    model, compiled, backend = compiled_model(CountingHooked, device)
    for step, size in enumerate((6, 6, 6, 3, 3, 3, 6, 3)):
        x = batch(device, size)
        assert_same(compiled(marked(x) if step == 0 else x), eager(x))
        assert model.count.item() == step + 1
    assert_counts(
        backend,
        1,
        2,
        {WARMING: 2, Reason.CAPTURE_FAILED: 3},
        degraded={Reason.CAPTURE_FAILED: 1},
    )
    assert modes(backend) == [PIECEWISE]
    detail = backend.counters.details[Reason.CAPTURE_FAILED]
    assert "piece_2 (entry.py:" in detail
    assert "not permitted when stream is capturing" in detail


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_strict_raises_where_a_capture_fails(device: str, hook: Any, setting: str) -> None:
    hook(reads_on_the_host_if_large)
    model, compiled, backend = compiled_model(
        Hooked, device, on_fallback="raise", cudagraph_mode=setting
    )
    start(compiled, model, device)
    for _ in range(2):
        with pytest.raises(DispatchError, match="capture_failed"):
            compiled(batch(device))
    assert_steps(compiled, model, device, size=3)
    assert_counts(backend, 1, 1, {WARMING: 2}, failures=2)


@pytest.mark.slow
def test_a_failed_capture_leaves_other_models_alone(device: str, hook: Any) -> None:
    backend = backend_for()
    hook(reads_on_the_host_if_large)
    failing, good = made(Hooked, device), build(CASES["sdpa"], device)
    one, other = (torch.compile(each, backend=backend) for each in (good, failing))
    start(one, good, device)
    assert_steps(one, good, device)
    start(other, failing, device)
    assert_steps(other, failing, device)
    assert_steps(one, good, device)
    graphs = backend.graphs
    assert_counts(graphs[0], 1, 5, {WARMING: 1})
    assert graphs[1].counters.plain == {WARMING: 1, Reason.CAPTURE_FAILED: 3}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_an_eager_op_raises_reaches_the_caller(device: str, hook: Any, kind: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    usual = Hook.function

    def raises(x):
        raise kind("the batch is bad")

    start(compiled, model, device)
    hook(raises)
    with pytest.raises(kind, match="the batch is bad"):
        compiled(batch(device))  # would capture
    hook(usual)
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 1, 1, {WARMING: 1}, failures=1)
    hook(raises)
    with pytest.raises(kind, match="the batch is bad"):
        compiled(batch(device))  # a replay
    hook(usual)
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 1, 3, {WARMING: 1}, failures=2)


def test_a_step_inside_of_its_own_replay_is_refused(device: str, hook: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    usual, x = Hook.function, batch(device)
    start(compiled, model, device)
    assert_steps(compiled, model, device, steps=2)
    hook(lambda h: compiled(x))
    with pytest.raises(CaptureError, match="from inside one of its own steps"):
        compiled(batch(device))
    hook(usual)
    assert_steps(compiled, model, device, steps=2)
    assert_counts(backend, 1, 3, {WARMING: 1}, failures=2)  # the inner call and the outer


INSIDE_ITS_OWN_CAPTURE = """
import sys, torch
from lib.entry import Hook, Hooked, batch, compiled_model, marked
from lib.patience import PATIENCE

torch.set_grad_enabled(False)
device, usual, calls = sys.argv[1], Hook.function, []
model, compiled, backend = compiled_model(Hooked, device)
compiled(marked(batch(device)))
(graph,), x = backend.graphs, batch(device)
sources = {"x": x, "x.size()[0]": 6, **dict(model.named_parameters())}

def once(h):
    if not calls:
        calls.append(h)
        graph(*(sources[each.source] for each in graph.split.inputs))
    return usual(h)

Hook.function = once
compiled(batch(device))
print(graph.counters)
"""


@pytest.mark.slow
def test_a_step_inside_of_its_own_capture_becomes_part_of_it(device: str) -> None:
    command = [sys.executable, "-c", INSIDE_ITS_OWN_CAPTURE, device]  # a lock may hang: apart
    tests = Path(__file__).parent
    paths = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    ran = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=PATIENCE)
    assert "calls 3: captures 1, replays 0, preparing 2, plain 0, failures 0" in ran.stdout, (
        ran.stderr[-2000:]
    )
    assert "preparing 1 inside_capture" in ran.stdout


def test_eager_ops_see_a_context_made_from_the_sizes(device: str, hook: Any) -> None:
    seen, usual = [], Hook.function

    def looks(x):
        context = current_forward_context()
        descriptor = None if context is None else context.batch_descriptor
        mode = None if context is None else context.cudagraph_runtime_mode
        seen.append((mode, None if descriptor is None else descriptor.num_tokens))
        return usual(x)

    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    start(compiled, model, device)
    hook(looks)
    for _ in range(3):
        compiled(batch(device))
    for _ in range(2):
        compiled(batch(device, 3))
    assert seen == [(PIECEWISE, 6)] * 3 + [(NONE, None), (PIECEWISE, 3)]
    assert_counts(backend, 2, 2, {WARMING: 2})
