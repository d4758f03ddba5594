"""Steps under a forward context: exactly its mode and batch, on the caller's own buffers."""

import random
from typing import Any

import pytest
import torch
from lib.asserts import build
from lib.cases import CASES, D
from lib.entry import (
    HOOKED,
    WARMING,
    ByContext,
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
)

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.errors import AddressChangedError, DispatchError, HostValueChangedError
from cgcompile.graphs.steps import allow_capture
from cgcompile.reasons import Reason

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


pytestmark = pytest.mark.usefixtures("without_gradients")


class Buffers:
    """What a caller keeps: one buffer, of which a step uses a prefix."""

    def __init__(self, device: str, size: int = 6) -> None:
        self.x = batch(device, size)
        self.seen = False

    def fill(self, size: int | None = None) -> torch.Tensor:
        """New data in the first ``size`` rows; dynamic the first time."""
        x = self.x[:size]
        x.copy_(torch.randn_like(x))
        if not self.seen:
            marked(x)
        self.seen = True
        return x


def context(mode: CUDAGraphMode, size: int = 6, metadata: Any = None, **more: Any) -> Any:
    descriptor = BatchDescriptor(size, **more)
    return set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=descriptor)


def check_steps(
    compiled: Any, model: Any, buffers: Buffers, mode: CUDAGraphMode, steps: int, size: int = 6
) -> torch.Tensor:
    """Steps in one context, compared with eager; returns the last result."""
    for _ in range(steps):
        x = buffers.fill(size)
        with context(mode, size):
            result = compiled(x)
            assert_same(result, model(x))
    return result


def recorded(backend: Any) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
    recordings = [each for graph in backend.graphs for each in graph.recordings]
    return [(each.batch.mode, each.batch.descriptor) for each in recordings]


# ------------------------------------------------------------------ warming, capture, replay


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"), [("sdpa", FULL), ("sdpa", PIECEWISE), ("op_packet", PIECEWISE)]
)
def test_warmed_captured_and_replayed_in_place(device: str, name: str, mode: Any) -> None:
    model, compiled, backend = compiled_case(name, device)
    buffers = Buffers(device)
    check_steps(compiled, model, buffers, mode, steps=1)
    assert_counts(backend, 0, 0, {WARMING: 1})
    check_steps(compiled, model, buffers, mode, steps=1)
    assert_counts(backend, 1, 0, {WARMING: 1})
    first = check_steps(compiled, model, buffers, mode, steps=1)
    assert_counts(backend, 1, 1, {WARMING: 1})
    second = check_steps(compiled, model, buffers, mode, steps=3)
    assert second.data_ptr() == first.data_ptr()
    assert_counts(backend, 1, 4, {WARMING: 1})
    assert recorded(backend) == [(mode, BatchDescriptor(6))]


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_graphs_read_and_write_the_buffers_of_the_caller(device: str, mode: Any) -> None:
    model, compiled, backend = compiled_model(WithCache, device)
    buffers, cache = Buffers(device), torch.zeros(4, D, device=device)
    expected_cache = cache.clone()
    for _ in range(5):
        x = buffers.fill()
        expected = model(x, expected_cache)
        with context(mode):
            assert_same(compiled(x, cache), expected)
        assert_same(cache, expected_cache)
    with context(mode), pytest.raises(AddressChangedError, match="'cache'"):
        compiled(buffers.x, cache.clone())
    assert_same(cache, expected_cache)
    assert_counts(backend, 1, 3, {WARMING: 1}, failures=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("sdpa", FULL), ("op_packet", PIECEWISE)])
def test_prefixes_of_one_buffer_in_any_order(device: str, name: str, mode: Any) -> None:
    model, compiled, backend = compiled_case(name, device)
    buffers, sizes = Buffers(device, 8), (8, 5, 3, 2)
    for size in sizes:
        check_steps(compiled, model, buffers, mode, steps=2, size=size)
    check_steps(compiled, model, buffers, mode, steps=1, size=8)
    order = random.Random(0)
    for _ in range(20):
        check_steps(compiled, model, buffers, mode, steps=1, size=order.choice(sizes))
    assert_counts(backend, 4, 21, {WARMING: 4})
    assert recorded(backend) == [(mode, BatchDescriptor(size)) for size in sizes]


@pytest.mark.slow
def test_one_descriptor_in_both_modes(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    buffers = Buffers(device)
    for mode in (FULL, PIECEWISE):
        check_steps(compiled, model, buffers, mode, steps=2)
    for mode in (FULL, PIECEWISE, PIECEWISE, FULL):
        check_steps(compiled, model, buffers, mode, steps=1)
    assert_counts(backend, 2, 4, {WARMING: 2})
    assert recorded(backend) == [(FULL, BatchDescriptor(6)), (PIECEWISE, BatchDescriptor(6))]


@pytest.mark.slow
def test_extra_axes_are_other_graphs(device: str) -> None:
    settings = by_context_settings(device, AttentionCGSupport.ALWAYS)
    model, compiled, backend = compiled_model(ByContext, device, **settings)
    buffers = Buffers(device)
    for scale in (0.25, 4.0) * 4:  # recorded in the graph: whoever needs two makes it an axis
        x = buffers.fill()
        with context(FULL, metadata=scale, extra=("scale", scale)):
            assert_same(compiled(x), model(x))
    assert_counts(backend, 2, 4, {WARMING: 2})
    extras = [descriptor.extra for _, descriptor in recorded(backend)]
    assert extras == [("scale", 0.25), ("scale", 4.0)]


@pytest.mark.slow
def test_steps_with_and_without_a_context_share_a_model(device: str) -> None:
    model, compiled, backend = compiled_case("op_packet", device)
    buffers = Buffers(device)
    for _ in range(4):
        check_steps(compiled, model, buffers, PIECEWISE, steps=1)
        assert_steps(compiled, model, device, steps=1)
    assert_counts(backend, 2, 4, {WARMING: 2})
    assert len(recorded(backend)) == 2


def test_two_models_of_one_class_under_one_descriptor(device: str) -> None:
    backend = backend_for(**CASES["op_packet"].settings)
    models = [build(CASES["op_packet"], device) for _ in range(2)]
    for parameter in models[1].parameters():
        parameter.copy_(torch.randn_like(parameter))
    compiled = [torch.compile(model, backend=backend) for model in models]
    buffers = Buffers(device)
    for _ in range(4):
        for one, model in zip(compiled, models, strict=True):
            check_steps(one, model, buffers, PIECEWISE, steps=1)
    assert_counts(backend, 2, 4, {WARMING: 2})
    assert len(backend.graphs) == 1


# ------------------------------------------------------------------ refused steps


@pytest.mark.slow
def test_another_size_under_one_descriptor_is_an_error(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    buffers = Buffers(device)
    check_steps(compiled, model, buffers, FULL, steps=3)
    with context(FULL), pytest.raises(HostValueChangedError, match="is 3, was 6"):
        compiled(buffers.fill(3))
    check_steps(compiled, model, buffers, FULL, steps=1)
    assert_counts(backend, 1, 2, {WARMING: 1}, failures=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_a_context_without_a_descriptor_is_an_error(device: str, mode: Any) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    buffers = Buffers(device)
    x = buffers.fill()
    with (
        set_forward_context(cudagraph_runtime_mode=mode),
        pytest.raises(DispatchError, match="no batch descriptor"),
    ):
        compiled(x)
    check_steps(compiled, model, buffers, mode, steps=3)
    assert_counts(backend, 1, 1, {WARMING: 1}, failures=1)


def test_mode_none_runs_plain(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device, on_fallback="raise")
    buffers = Buffers(device)
    check_steps(compiled, model, buffers, NONE, steps=2)
    check_steps(compiled, model, buffers, FULL, steps=3)
    with set_forward_context():
        x = buffers.fill()
        assert_same(compiled(x), model(x))
    assert_counts(backend, 1, 1, {WARMING: 1, Reason.MODE_NONE: 3})


def test_a_mode_that_the_settings_leave_out_runs_plain(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device, cudagraph_mode="PIECEWISE")
    buffers = Buffers(device)
    check_steps(compiled, model, buffers, FULL, steps=3)
    check_steps(compiled, model, buffers, PIECEWISE, steps=3)
    assert_counts(backend, 1, 1, {WARMING: 1, Reason.OTHER_MODE: 3})


def test_capture_forbidden_under_a_context(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device)
    buffers = Buffers(device)
    check_steps(compiled, model, buffers, FULL, steps=2)
    with allow_capture(False):
        check_steps(compiled, model, buffers, FULL, steps=2)
        check_steps(compiled, model, buffers, FULL, steps=2, size=3)
    assert_counts(backend, 1, 2, {WARMING: 1, Reason.CAPTURE_FORBIDDEN: 2})


# ------------------------------------------------------------------ what attention supports


def by_context_settings(device: str, support: AttentionCGSupport) -> dict[str, Any]:
    made(ByContext, device)  # defines the operators
    return by_context(support)


def test_full_with_a_boundary_that_forbids_it_runs_in_pieces(device: str) -> None:
    model, compiled, backend = compiled_case("op_packet", device)
    buffers = Buffers(device)
    check_steps(compiled, model, buffers, FULL, steps=4)
    assert_counts(backend, 1, 2, {WARMING: 1}, degraded={Reason.ATTENTION_SUPPORT: 4})
    check_steps(compiled, model, buffers, PIECEWISE, steps=2)  # the same graphs
    assert_counts(backend, 1, 4, {WARMING: 1}, degraded={Reason.ATTENTION_SUPPORT: 4})
    assert recorded(backend) == [(PIECEWISE, BatchDescriptor(6))]


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=lambda mode: mode.name)
def test_a_bulk_capture_lists_what_has_a_lesser_mode_than_requested(
    device: str, mode: CUDAGraphMode
) -> None:
    _model, compiled, backend = compiled_case("op_packet", device)
    buffers = Buffers(device)

    def step(size: int) -> None:
        with context(mode, size):
            compiled(buffers.fill(size))

    bulk = backend.capture(step, (4, 6))
    assert (bulk.captured, bulk.missing) == ((6, 4), ())
    assert [size for size, _ in bulk.degraded] == ([6, 4] if mode is FULL else [])
    for size, why in bulk.degraded:
        assert why.startswith("attention_support: a boundary supports NEVER only")
        assert f"num_tokens={size}" in why
        assert f"  {size}: captured in a lesser mode: {why}" in str(bulk).splitlines()
    assert {mode for mode, _ in recorded(backend)} == {PIECEWISE}


def test_strict_refuses_full_with_a_boundary_that_forbids_it(device: str) -> None:
    model, compiled, backend = compiled_case("op_packet", device, on_fallback="raise")
    buffers = Buffers(device)
    x = buffers.fill()
    with context(FULL), pytest.raises(DispatchError, match="attention_support"):
        compiled(x)
    check_steps(compiled, model, buffers, PIECEWISE, steps=3)
    assert_counts(backend, 1, 1, {WARMING: 1}, failures=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("support", "decode", "uniform", "mixed"),
    [
        (AttentionCGSupport.ALWAYS, FULL, FULL, FULL),
        (AttentionCGSupport.UNIFORM_BATCH, FULL, FULL, PIECEWISE),
        (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, FULL, PIECEWISE, PIECEWISE),
        (AttentionCGSupport.NEVER, PIECEWISE, PIECEWISE, PIECEWISE),
    ],
)
def test_support_of_attention_decides_by_the_batch(
    device: str, support: AttentionCGSupport, decode: Any, uniform: Any, mixed: Any
) -> None:
    settings = by_context_settings(device, support)
    model, compiled, backend = compiled_model(ByContext, device, **settings)
    buffers = Buffers(device)
    batches = (
        (decode, {"num_reqs": 6, "uniform": True}),
        (uniform, {"num_reqs": 3, "uniform": True}),
        (mixed, {"num_reqs": 3}),
    )
    for _, fields in batches * 4:
        x = buffers.fill()
        with context(FULL, **fields):
            assert_same(compiled(x), model(x))
    expected = [(mode, BatchDescriptor(6, **fields)) for mode, fields in batches]
    assert recorded(backend) == expected
    lesser = 4 * [decode, uniform, mixed].count(PIECEWISE)
    degraded = {Reason.ATTENTION_SUPPORT: lesser} if lesser else {}
    assert_counts(backend, 3, 6, {WARMING: 3}, degraded=degraded)


# ------------------------------------------------------------------ eager boundaries


def test_eager_attention_reads_the_context_of_each_step(device: str) -> None:
    settings = by_context_settings(device, AttentionCGSupport.NEVER)
    model, compiled, backend = compiled_model(ByContext, device, **settings)
    buffers, results = Buffers(device), []
    x = buffers.fill()
    for step in range(6):
        x = buffers.fill() if step < 4 else x  # at last the metadata alone changes
        with context(PIECEWISE, metadata=2.0**step):
            result = compiled(x)
            assert_same(result, model(x))
        results.append(result.clone())
    assert bool((results[-1] != results[-2]).any())
    assert_counts(backend, 1, 4, {WARMING: 1})


def test_a_fresh_result_of_eager_attention_is_carried_over(device: str, hook: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    buffers, held = Buffers(device), []

    def somewhere_else(x):
        held.append(torch.cos(x))  # held, so that each result lies elsewhere
        return held[-1]

    hook(somewhere_else)
    check_steps(compiled, model, buffers, PIECEWISE, steps=6)
    assert len({each.data_ptr() for each in held}) == len(held)
    assert_counts(backend, 1, 4, {WARMING: 1})


@pytest.mark.parametrize(
    "other",
    [lambda x: x.cos()[:3], lambda x: x.cos().double()],
    ids=["shape", "dtype"],
)
def test_a_result_of_another_shape_or_dtype_is_an_error(device: str, hook: Any, other: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    buffers, usual = Buffers(device), Hook.function
    check_steps(compiled, model, buffers, PIECEWISE, steps=3)
    hook(other)
    with context(PIECEWISE), pytest.raises(HostValueChangedError, match="hooked"):
        compiled(buffers.fill())
    hook(usual)
    check_steps(compiled, model, buffers, PIECEWISE, steps=2)
    assert_counts(backend, 1, 3, {WARMING: 1}, failures=1)


def test_a_result_in_another_layout_is_copied_into_the_captured_one(device: str, hook: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    buffers, usual = Buffers(device), Hook.function
    for function in (usual, lambda x: usual(x.mT.contiguous().mT), usual):
        hook(function)
        check_steps(compiled, model, buffers, PIECEWISE, steps=3)
    assert_counts(backend, 1, 7, {WARMING: 1})


def test_what_an_eager_op_raises_reaches_the_caller(device: str, hook: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    buffers, usual = Buffers(device), Hook.function

    def raises(x):
        raise ValueError("the batch is bad")

    for steps in (1, 2):  # at what would be the capture, then at a replay
        check_steps(compiled, model, buffers, PIECEWISE, steps=steps)
        hook(raises)
        with context(PIECEWISE), pytest.raises(ValueError, match="the batch is bad"):
            compiled(buffers.fill())
        hook(usual)
    check_steps(compiled, model, buffers, PIECEWISE, steps=2)
    assert_counts(backend, 1, 3, {WARMING: 1}, failures=2)


@pytest.mark.parametrize("entry", ["torch", "cgcompile"])
def test_inputs_are_numbered_as_the_caller_passes_them(device: str, entry: str) -> None:
    """Weights are inputs of the graph too, and come first."""
    model, backend = torch.nn.Linear(D, D, device=device), backend_for()
    compiled = (
        torch.compile(model, backend=backend)
        if entry == "torch"
        else cgcompile.compile(model, backend)
    )
    x = torch.randn(6, D, device=device)
    for _ in range(3):
        with context(FULL):
            compiled(x)
    assert backend.counters.replays
    with context(FULL), pytest.raises(AddressChangedError, match=r"input 0 [\"']"):
        compiled(x.clone())


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_a_handle_yields_the_wrappers_of_pieces(device: str, mode: Any) -> None:
    kind = Hooked if mode is PIECEWISE else lambda: torch.nn.Linear(D, D)
    _, compiled, backend = compiled_model(kind, device, **(HOOKED if mode is PIECEWISE else {}))
    assert backend.wrappers == ()
    x = marked(batch(device, 6))
    for _ in range(3):
        with context(mode):
            compiled(x.normal_())
    (graph,) = backend.graphs
    pieces = [piece.name for piece in graph.split.pieces if piece.capture]
    names = [wrapper.name for wrapper in backend.wrappers]
    assert names == (["step"] if mode is FULL else pieces)
    for wrapper in backend.wrappers:
        assert [*wrapper.concrete_cudagraph_entries] == [BatchDescriptor(6)]
    counters = backend.counters
    assert (counters.calls, counters.replays) == (3, 1)  # once each, as before
    backend.release()
    assert backend.wrappers == ()
