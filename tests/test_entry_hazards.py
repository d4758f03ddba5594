"""What once gave wrong results, errors or leaks: shared memory, views, fresh state."""

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lib.cases import D, DecoderLayer
from lib.entry import (
    HOOKED,
    WARMING,
    Hook,
    Hooked,
    WithCache,
    assert_counts,
    assert_same,
    assert_steps,
    backend_for,
    batch,
    by_context,
    compiled_case,
    compiled_model,
    made,
    marked,
    operators,
)
from torch import nn

import cgcompile
from cgcompile import (
    AttentionCGSupport,
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    SplittingOp,
    set_forward_context,
)
from cgcompile.errors import DispatchError
from cgcompile.graphs.device import any_capture
from cgcompile.reasons import Reason

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


pytestmark = pytest.mark.usefixtures("without_gradients")


def context(mode: CUDAGraphMode | None, size: int = 6) -> Any:
    """A forward context of one batch; none at all if there is no mode."""
    if mode is None:
        return nullcontext()
    descriptor = BatchDescriptor(size)
    return set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor)


def check_buffer(
    compiled: Any, model: Any, x: torch.Tensor, mode: CUDAGraphMode | None, steps: int
) -> None:
    """Steps on new data in one buffer, compared with eager; with a context if there is a mode."""
    for _ in range(steps):
        x.copy_(torch.randn_like(x))
        with context(mode):
            assert_same(compiled(x), model(x))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.second(self.first(x).sin())


# ------------------------------------------------------------------ results that share memory


class ChunksEagerly(nn.Module):
    """A captured piece writes one half of what an eager region made; another region reads all."""

    def forward(self, x):
        x = x.sin()
        with cgcompile.eager_region():
            a = torch.zeros(2, 8, device=x.device) + 0
            lo, hi = a.chunk(2, -1)
        lo.add_(x)
        with cgcompile.eager_region():
            b = a * 1
        return b.cos(), hi + x


class ReadsAView(nn.Module):
    """A captured piece reads a view, after it wrote the memory by its other name."""

    def forward(self, x):
        x = x.sin()
        with cgcompile.eager_region():
            a = torch.zeros(2, 4, device=x.device) + 0
            v = a.view(-1)
        a.add_(x)
        return v * 2


class WritesAView(nn.Module):
    """The other way round, in two captured pieces with an eager one between."""

    def forward(self, x):
        x = x.sin()
        with cgcompile.eager_region():
            a = torch.zeros(2, 4, device=x.device) + 0
            v = a.view(-1)
        v.add_(x.view(-1))
        with cgcompile.eager_region():
            y = x.cos()
        return a * y


@pytest.mark.parametrize("mode", [None, PIECEWISE], ids=["auto", "piecewise"])
@pytest.mark.parametrize("kind", [ChunksEagerly, ReadsAView, WritesAView])
def test_results_of_an_eager_region_that_share_memory(device: str, kind: Any, mode: Any) -> None:
    model, compiled, backend = compiled_model(kind, device, cudagraph_mode="PIECEWISE")
    check_buffer(compiled, model, torch.randn(2, 4, device=device), mode, steps=5)
    assert_counts(backend, 1, 3, {WARMING: 1})


class ReturnsAViewMadeLater(nn.Module):
    """The caller gets what the region made, and a view of it that another piece makes."""

    def forward(self, x):
        x = x.sin()
        with cgcompile.eager_region():
            w = x * 2
        y = w + 1
        return w, w[1:], y


def test_a_result_of_a_region_and_a_later_view_of_it_share_memory(device: str) -> None:
    model, compiled, backend = compiled_model(
        ReturnsAViewMadeLater, device, cudagraph_mode="PIECEWISE"
    )
    for _ in range(5):
        x = torch.randn(3, 4, device=device)
        w, view, y = compiled(x)
        assert_same((w, view, y), model(x))
        w.add_(1)
        assert_same(view, w[1:])
    assert_counts(backend, 1, 3, {WARMING: 1})


# ------------------------------------------------------------------ conjugate and negative views


class ReturnsConjugate(nn.Module):
    def forward(self, x):
        y = x * 2
        return y, y.conj()


class ConjugatesInput(nn.Module):
    def forward(self, x):
        return x.conj(), x * 2


class ReturnsNegative(nn.Module):
    def forward(self, x):
        y = x * 2
        return y.real, y.conj().imag


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("kind", [ReturnsConjugate, ConjugatesInput, ReturnsNegative])
def test_returned_conjugate_and_negative_views(device: str, kind: Any, setting: str) -> None:
    model, compiled, backend = compiled_model(kind, device, cudagraph_mode=setting)
    for _ in range(5):
        x = torch.randn(3, 4, dtype=torch.complex64, device=device)
        result, expected = compiled(x), model(x)
        assert_same(result, expected)
        for one, other in zip(result, expected, strict=True):
            assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
            assert_same(one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())
    assert_counts(backend, 1, 3, {WARMING: 1})


# ------------------------------------------------------------------ grad mode


class HookedWithoutGradients(Hooked):
    def forward(self, x):
        x = self.before(x).sin()
        with torch.no_grad():
            x = torch.ops.cgentry.hooked(x.cos()).sin()
        return self.after(x)


def raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("the batch is bad")


@pytest.mark.parametrize("calls", [1, 3], ids=["capture", "replay"])
def test_an_op_that_raises_without_gradients_leaves_grad_mode_on(
    device: str, hook: Any, calls: int
) -> None:
    settings = {**HOOKED, "cudagraph_mode": "PIECEWISE"}
    model, compiled, backend = compiled_model(HookedWithoutGradients, device, **settings)
    model.requires_grad_(False)
    usual = Hook.function
    with torch.enable_grad():
        assert_steps(compiled, model, device, steps=calls)
        hook(raises)
        with pytest.raises(ValueError, match="the batch is bad"):
            compiled(batch(device))
        assert torch.is_grad_enabled()
        hook(usual)
        assert_steps(compiled, model, device, steps=3)
        assert torch.is_grad_enabled()
    assert_counts(backend, 1, calls + 1, {WARMING: 1}, failures=1)


# ------------------------------------------------------------------ many layers, much state


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_each_of_twelve_equal_layers_is_captured(device: str, in_place: bool) -> None:
    backend = backend_for()
    layers = [made(DecoderLayer, device) for _ in range(12)]
    eager = copy.deepcopy(layers)
    for layer in layers if in_place else []:
        layer.compile(backend=backend)
    compiled = layers if in_place else [torch.compile(each, backend=backend) for each in layers]
    for _ in range(4):
        x = result = batch(device)
        for layer, one in zip(eager, compiled, strict=True):
            x, result = layer(x), one(result)
        assert_same(result, x)
    assert_counts(backend, 12, 12 * 2, {WARMING: 12})


@pytest.mark.slow
def test_each_request_has_a_fresh_cache_and_none_is_kept(device: str) -> None:
    model, compiled, backend = compiled_model(WithCache, device)
    dead = []
    for _ in range(20):
        cache, expected_cache = (torch.zeros(4, D, device=device) for _ in range(2))
        dead.append(weakref.ref(cache))
        for _ in range(4):
            x = batch(device)
            expected = model(x, expected_cache)
            assert_same(compiled(x, cache), expected)
            assert_same(cache, expected_cache)
        del cache
    gc.collect()
    assert [each() for each in dead] == [None] * 20
    assert backend.counters.replays >= 20 * 2, backend.counters
    assert set(backend.counters.plain) == {WARMING}


def test_dead_models_are_not_kept(device: str) -> None:
    backend, dead = backend_for(), []
    for _ in range(5):
        model = made(TwoLayers, device)
        compiled = torch.compile(model, backend=backend)
        assert_steps(compiled, model, device, steps=4)
        assert backend.counters.replays >= 2
        dead += [weakref.ref(model), *map(weakref.ref, model.parameters())]
        del model, compiled
    gc.collect()
    assert [each() for each in dead] == [None] * len(dead)


class Reassigned(nn.Module):
    """A state that is another tensor after each step."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("h", torch.zeros(6, 4, D))
        else:
            self.h = torch.zeros(6, 4, D)

    def forward(self, x):
        self.h = self.h * 0.9 + x
        return self.h.sin()


@pytest.mark.parametrize("keep", [True, False], ids=["old_kept", "old_dropped"])
@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "attribute"])
def test_a_state_reassigned_at_each_step_is_right_and_said(
    device: str, buffer: bool, keep: bool
) -> None:
    backend, kept = backend_for(max_weight_sets=8), []
    model, eager = Reassigned(buffer), Reassigned(buffer)
    for module in (model, eager):
        module.h = module.h.to(device)
    compiled = torch.compile(model, backend=backend)
    for _ in range(100):
        kept += [model.h] if keep else []
        x = batch(device)
        assert_same(compiled(x), eager(x))
        assert_same(model.h, eager.h)
        assert all(len(graph.weight_sets) <= 1100 for graph in backend.graphs)
    assert backend.counters.calls == 100
    assert backend.counters.plain[Reason.TOO_MANY_WEIGHT_SETS] > 0, backend.counters


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "attribute"])
def test_a_state_put_back_after_each_step_replays(device: str, buffer: bool) -> None:
    backend = backend_for()
    model, eager = Reassigned(buffer), Reassigned(buffer)
    for module in (model, eager):
        module.h = module.h.to(device)
    state, compiled = model.h, torch.compile(model, backend=backend)
    for _ in range(6):
        x = batch(device)
        assert_same(compiled(x), eager(x))
        assert_same(model.h, eager.h)
        state.copy_(model.h)
        model.h = state
    assert_counts(backend, 1, 4, {WARMING: 1})


class Bends(nn.Module):
    def forward(self, x, n):
        return nn.functional.elu(x.sin(), n)  # which takes no tensor for a number


def test_a_number_that_changes_at_every_call_is_right_and_said(device: str) -> None:
    model, compiled, backend = compiled_model(Bends, device, dynamic=True)
    for n in range(2, 202):
        x = batch(device)
        assert_same(compiled(x, n), model(x, n))
    counters = backend.counters
    assert counters.plain == {WARMING: 8, Reason.VARYING_NUMBER: 192}, counters
    assert "differs at each call" in counters.details[Reason.VARYING_NUMBER]
    for _ in range(4):  # one that comes again has a graph
        x = batch(device)
        assert_same(compiled(x, 7), model(x, 7))
    assert (backend.counters.captures, backend.counters.replays) == (1, 3), backend.counters


# ------------------------------------------------------------------ compiled in compiled


def test_an_eager_op_that_calls_another_compiled_function(device: str, hook: Any) -> None:
    def plain(x, y):
        return torch.softmax(x * y, -1) + y

    inner_backend = backend_for()
    inner = torch.compile(plain, backend=inner_backend)
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    for step in range(6):
        x = batch(device)
        factor = float(step)
        hook(lambda h, f=factor: plain(h.clone(), torch.full_like(h, f)))
        expected = model(x)
        hook(lambda h, f=factor: inner(h.clone(), torch.full_like(h, f)))
        assert_same(compiled(x), expected)
    assert_counts(backend, 1, 4, {WARMING: 1})
    assert_counts(inner_backend, 1, 4, {WARMING: 1})


# ------------------------------------------------------------------ wrappers


def test_cleared_graphs_of_a_piece_are_captured_again(device: str) -> None:
    model, compiled, backend = compiled_case("op_packet", device)
    assert_steps(compiled, model, device, steps=4)
    (binding,) = backend.graphs[0].weight_sets
    captures, replays = 1, 2
    for wrapper in list(binding.wrappers.values()):
        wrapper.clear_graphs()
        assert_steps(compiled, model, device, steps=1)
        captures += 1
        assert_counts(backend, captures, replays, {WARMING: 1})
        assert_steps(compiled, model, device, steps=2)
        replays += 2
    assert_counts(backend, captures, replays, {WARMING: 1})
    assert captures > 2


def wrapped(function: Any) -> CUDAGraphWrapper:
    return CUDAGraphWrapper(function, cgcompile.CompilationConfig(capture_device="host"))


def test_a_deep_copy_of_a_wrapped_graph_module_is_a_wrapper(device: str) -> None:
    model = made(TwoLayers, device)
    wrapper = wrapped(torch.fx.symbolic_trace(model))
    x = batch(device)
    check_buffer(wrapper, model, x, FULL, steps=3)
    other = copy.deepcopy(wrapper)
    assert type(other) is CUDAGraphWrapper
    assert other.runnable is not wrapper.runnable
    for one in (other, wrapper):
        check_buffer(one, model, x, FULL, steps=3)
    assert (other.counters.captures, other.counters.replays) == (1, 2)
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 5)


def test_a_generator_argument_is_refused_and_leaves_no_trace(device: str) -> None:
    generator = torch.Generator(device)

    def draws(x):
        return x + torch.rand(x.shape, device=x.device, generator=generator)

    x = batch(device)
    refused = wrapped(draws)
    with context(FULL), pytest.raises(RuntimeError):
        refused(x)
    assert torch.isfinite(torch.randn(3, device=device)).all()
    model = made(TwoLayers, device)
    good = wrapped(model)
    check_buffer(good, model, x, FULL, steps=4)
    assert (good.counters.captures, good.counters.replays) == (1, 3)
    assert torch.isfinite(torch.randn(3, device=device)).all()
    assert torch.isfinite(draws(x)).all()


# ------------------------------------------------------------------ strict


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_the_cause_of_a_strict_failure_is_the_original_exception(
    device: str, hook: Any, setting: str
) -> None:
    original, usual = ValueError("not while capturing"), Hook.function

    def refuses_capture(x):
        if any_capture():
            raise original
        return usual(x)

    model, compiled, backend = compiled_model(
        Hooked, device, on_fallback="raise", cudagraph_mode=setting
    )
    hook(refuses_capture)
    assert_steps(compiled, model, device, steps=1)
    with pytest.raises(DispatchError, match="capture_failed") as caught:
        compiled(batch(device))
    assert caught.value.__cause__ is original
    hook(usual)
    assert_steps(compiled, model, device, steps=3)
    assert_counts(backend, 1, 2, {WARMING: 1}, failures=1)


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_the_cause_of_a_strict_failure_is_what_the_device_said(
    device: str, hook: Any, setting: str
) -> None:
    model, compiled, backend = compiled_model(
        Hooked, device, on_fallback="raise", cudagraph_mode=setting
    )
    usual = Hook.function
    hook(lambda x: x * x.mean().item())
    assert_steps(compiled, model, device, steps=1)
    with pytest.raises(DispatchError, match="capture_failed") as caught:
        compiled(batch(device))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "not permitted when stream is capturing" in str(caught.value.__cause__)
    hook(usual)
    assert_steps(compiled, model, device, steps=3)
    assert_counts(backend, 1, 2, {WARMING: 1}, failures=1)


# ------------------------------------------------------------------ boundaries under a context


class BreaksAfterHooked(Hooked):
    def forward(self, x):
        y = torch.ops.cgentry.hooked(self.before(x).sin())
        torch._dynamo.graph_break()
        return self.after(y).cos()


def test_a_fresh_result_before_a_graph_break_lies_where_it_lay(device: str) -> None:
    model, compiled, backend = compiled_model(BreaksAfterHooked, device, **HOOKED)
    check_buffer(compiled, model, batch(device), PIECEWISE, steps=6)
    assert len(backend.graphs) == 2
    for graph in backend.graphs:
        assert_counts(graph, 1, 4, {WARMING: 1})


class CacheForAttention(nn.Module):
    """A cache that only eager attention writes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, cache):
        q, out = self.before(x).sin(), torch.empty_like(x)
        torch.ops.cgentry.attend(q, q, q, cache)
        torch.ops.cgentry.attend(q, cache, cache, out)
        return self.after(out).cos()


@pytest.mark.parametrize("mode", [None, PIECEWISE], ids=["auto", "piecewise"])
def test_a_cache_that_only_eager_attention_writes_may_move(device: str, mode: Any) -> None:
    operators()
    model, compiled, backend = compiled_model(CacheForAttention, device, **by_context())
    x, caches = batch(device), []
    for _ in range(6):
        x.copy_(torch.randn_like(x))
        cache, expected_cache = (torch.zeros(6, 4, D, device=device) for _ in range(2))
        caches.append(cache)  # so that each lies elsewhere
        with context(mode):
            expected = model(x, expected_cache)
            assert_same(compiled(x, cache), expected)
        assert_same(cache, expected_cache)
    assert len({each.data_ptr() for each in caches}) == 6
    assert_counts(backend, 1, 4, {WARMING: 1})


# ---------------------------------------------------------------- bridges that are written


class WritesAcross(nn.Module):
    """An eager region makes ``v``; a captured piece writes it, or its base; the caller gets it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        with cgcompile.eager_region():
            v = h * 2
            u = v[:2]
        if self.how == "itself":
            v.add_(1)
        else:
            u.add_(1)
        return v, (v @ v.transpose(-1, -2)).sin()


@pytest.mark.parametrize("how", ["itself", "its_view"])
def test_a_returned_result_that_a_later_piece_writes(how: str, device: str) -> None:
    model = made(lambda: WritesAcross(how), device)
    backend = backend_for()
    compiled = torch.compile(model, backend=backend)
    assert_steps(compiled, model, device, steps=5)
    assert backend.counters.replays >= 3, backend.counters


class WritesThroughAView(nn.Module):
    """The argument is read by the eager region alone; a captured piece writes the view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        with cgcompile.eager_region():
            u = state[:2]
        u.add_(h[:2])
        return h.sin()


@pytest.mark.parametrize("mode", [None, PIECEWISE], ids=["auto", "context"])
def test_a_view_of_an_argument_is_written(mode: CUDAGraphMode | None, device: str) -> None:
    model = made(WritesThroughAView, device)
    backend = backend_for()
    compiled = torch.compile(model, backend=backend)
    x, written = batch(device), batch(device)
    expected = written.clone()
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        before = written.clone()
        with context(mode):
            assert_same(compiled(x, written), model(x, expected))
        assert_same(written, expected)
        assert not torch.equal(written, before)
    assert backend.counters.replays >= 3, backend.counters


class ConjugatesAcross(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = x * (1 + 2j)
        with cgcompile.eager_region():
            z = y * 1j
            w = z.conj()
        return z + 1, w * 2


def test_conjugates_cross_a_bridge(device: str) -> None:
    model, backend = ConjugatesAcross(), backend_for(cudagraph_mode="PIECEWISE")
    compiled = torch.compile(model, backend=backend)
    for _ in range(5):
        x = batch(device)
        for one, other in zip(compiled(x), model(x), strict=True):
            torch.testing.assert_close(one.resolve_conj(), other.resolve_conj())
    assert backend.counters.replays == 3, backend.counters


@pytest.mark.slow
def test_seventy_layers_one_by_one_with_strict(device: str) -> None:
    backend = backend_for(on_fallback="raise")
    layers = [made(lambda: nn.Linear(D, D), device) for _ in range(70)]
    compiled = [torch.compile(layer, backend=backend) for layer in layers]
    for _ in range(4):
        x = expected = batch(device)
        for layer, other in zip(compiled, layers, strict=True):
            x, expected = layer(x).tanh(), other(expected).tanh()
        assert_same(x, expected)
    assert backend.counters.replays == 2 * len(layers), backend.counters


def test_release_takes_back_the_mode_of_the_beginning(device: str, hook: Any) -> None:
    """A FULL capture that was refused once must not decide for ever."""
    settings = {
        "splitting_ops": (SplittingOp("cgentry::hooked", support=AttentionCGSupport.ALWAYS),)
    }
    model, compiled, backend = compiled_model(Hooked, device, **settings)
    x = batch(device)
    compiled(marked(x))

    def refused(value):
        return value * value.sum().item()

    hook(refused)
    assert_same(compiled(x), model(x))
    (graph,) = backend.graphs
    assert graph.recordings[0].batch.mode is CUDAGraphMode.PIECEWISE
    hook(lambda value: torch.softmax(value, -1))
    backend.release()
    for _ in range(3):
        x = batch(device)
        assert_same(compiled(x), model(x))
    assert graph.recordings[0].batch.mode is CUDAGraphMode.FULL


class ReadsBeyond(nn.Module):
    """Windows over a part of a larger buffer that go on behind its end, or begin before it."""

    def __init__(self, *offset: int) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: torch.Tensor) -> Any:
        return x[1:].as_strided((2, 6), (1, 1), *self.offset) * 2


@pytest.mark.parametrize("offset", [(), (0,)], ids=["behind", "before"])
@pytest.mark.parametrize("mode", [None, PIECEWISE], ids=["auto", "context"])
def test_as_strided_reads_beyond_an_argument(
    mode: CUDAGraphMode | None, offset: tuple[int, ...], device: str
) -> None:
    model, backend = ReadsBeyond(*offset), backend_for()
    compiled, buffer = torch.compile(model, backend=backend), torch.zeros(16, device=device)
    for _ in range(5):
        buffer.normal_()
        with context(mode):
            assert_same(compiled(buffer[4:8]), model(buffer[4:8]))
    assert backend.counters.replays == 3, backend.counters
    if mode is None:
        for _ in range(5):
            other = torch.randn(16, device=device)
            assert_same(compiled(other[4:8]), model(other[4:8]))


def test_as_strided_within_an_argument_takes_a_copy(device: str) -> None:
    model, backend = nn.Module(), backend_for()
    model.forward = lambda x: x[1:].as_strided((3, 4), (2, 1)) * 2
    compiled = torch.compile(model, backend=backend)
    for _ in range(5):
        x = torch.randn(9, device=device)  # not a byte more
        assert_same(compiled(x), model(x))
    assert backend.counters.replays == 3, backend.counters


@pytest.mark.parametrize("entry", ["torch.compile", "cgcompile.compile"])
def test_hooks_that_come_and_go_are_noticed_where_torch_guards_them(
    entry: str, device: str
) -> None:
    """By default torch guards no hooks, with any backend."""
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU()).to(device).eval()
    backend = backend_for()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        if entry == "torch.compile":
            compiled: Any = torch.compile(model, backend=backend)
        else:
            compiled = cgcompile.compile(model, backend, guards="keep")
        for _ in range(4):
            handle = model[0].register_forward_hook(lambda module, args, result: result * 2)
            for _ in range(2):
                x = torch.randn(6, D, device=device)
                assert_same(compiled(x), model(x))
            handle.remove()
            for _ in range(2):
                x = torch.randn(6, D, device=device)
                assert_same(compiled(x), model(x))
    assert_counts(backend, 2, 12, {WARMING: 2})
