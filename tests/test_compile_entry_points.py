"""FULL graphs of whole models, and what ``torch.compile`` makes of breaks, layers and recompiles."""

from typing import Any

import pytest
import torch
from lib.asserts import build
from lib.cases import CASES, D
from lib.entry import (
    WARMING,
    assert_counts,
    assert_same,
    assert_steps,
    backend_for,
    batch,
    check,
    compiled,
    rows,
)
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.errors import CaptureError, RecompileError, TraceError
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")

HOST = {"capture_device": "host"}
WHOLE = {"cudagraph_mode": "FULL", **HOST}


def step(model: Any, x: torch.Tensor) -> Any:
    x.copy_(torch.randn_like(x))
    mode, descriptor = CUDAGraphMode.FULL, BatchDescriptor(x.shape[0])
    with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
        return model(x)


def check_steps(one: Any, model: Any, counted: Any, warm: int, exact: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-4, "atol": 2e-5}
    inputs, previous = (
        {size: batch("cpu", size) for size in (6, 3)},
        None,
    )  # torch 2.15 tells 1 apart
    for _ in range(warm + 3):
        for x in inputs.values():
            result = step(one, x)
            torch.testing.assert_close(result, model(x), **tolerance)
            assert previous is None or not torch.equal(result[:1], previous)
            previous = result[:1].clone()
    assert_counts(counted(), 2, 4, {WARMING: 2} if warm else {})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE"])
def test_a_full_graph_of_a_whole_model(mode: str) -> None:
    model = build(CASES["sdpa"])
    dims = {} if mode == "NONE" else {"dynamic_dims": {"x": 0}}
    one = cgcompile.compile(model, mode=mode, **WHOLE, **dims)
    if mode == "NONE":  # a wrapper: it captures the first call
        check_steps(one, model, lambda: one.wrapper, warm=0, exact=True)
        assert len(one.wrapper.concrete_cudagraph_entries) == 2
        one.invalidate("test")
        assert len(one.wrapper.concrete_cudagraph_entries) == 0
    else:
        check_steps(one, model, lambda: one.backend, warm=1, exact=False)
        assert len(one.traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "STOCK_TORCH_COMPILE"])
def test_a_full_graph_through_torch_compile(mode: str) -> None:
    model = build(CASES["sdpa"])
    backend = cgcompile.Backend(mode=mode, **WHOLE)
    one = torch.compile(model, backend=backend, dynamic=False)
    x = batch("cpu", 6)
    for _ in range(4):
        torch.testing.assert_close(step(one, x), model(x), rtol=2e-4, atol=2e-5)
    assert_counts(backend, 1, 2, {WARMING: 1})


@pytest.mark.slow
@pytest.mark.parametrize("entry_point", ["compile", "torch.compile"])
@pytest.mark.parametrize("mode", ["NONE", "STOCK_TORCH_COMPILE"])
def test_a_boundary_that_no_full_graph_may_hold(mode: str, entry_point: str) -> None:
    model = build(CASES["tagged_op"])
    backend = cgcompile.Backend(mode=mode, **WHOLE)
    if entry_point == "compile":
        one = cgcompile.compile(model, mode=mode, **WHOLE)
        backend = one.backend
    else:
        one = torch.compile(model, backend=backend)
    x = batch("cpu", 6)
    if (mode, entry_point) == ("NONE", "compile"):  # nothing is known before it runs
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"cgtest::unsafe.*NEVER.*inside of a FULL"):
                step(one, x)
        check(one, model, x)
        return
    for _ in range(3):
        torch.testing.assert_close(step(one, x), model(x), rtol=2e-4, atol=2e-5)
    assert_counts(backend, 0, 0, {Reason.ATTENTION_SUPPORT: 3})


# ------------------------------------------------------------------ torch.compile


class Breaking(nn.Module):
    """Two attentions, and something that Dynamo cannot trace in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CASES["sdpa"].build(), CASES["sdpa"].build()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_several_graphs_of_one_model(named: bool) -> None:
    model = Breaking().eval()
    settings = {"compiler": "eager", "capture_device": "host"}
    if named:
        one = torch.compile(model, backend="cgcompile", options=settings, dynamic=True)
    else:
        one = torch.compile(model, backend=cgcompile.Backend(**settings), dynamic=True)
    for size in (6, 3):
        assert_steps(one, model, "cpu", size=size, steps=4)
    backend = cgcompile.runtime(one)
    assert len(backend.graphs) == 2
    assert_counts(backend, 4, 8, {WARMING: 4})
    whole = compiled(model)
    with pytest.raises(TraceError, match=r"(?s)graph_break.*test_compile_entry_points\.py"):
        whole(batch("cpu"))


@pytest.mark.slow
def test_torch_compile_of_the_forward() -> None:
    model, backend = build(CASES["sdpa"]), backend_for()
    one = torch.compile(model.forward, backend=backend, dynamic=True)
    for size in (6, 3):
        assert_steps(one, model, "cpu", size=size, steps=4)
    assert_counts(backend, 2, 4, {WARMING: 2})
    assert len(backend.graphs) == 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CASES["sdpa"].build() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_regional_compilation_compiles_one_layer_once() -> None:
    torch.manual_seed(0)
    seen = []

    def compiler(gm: Any, inputs: Any) -> Any:
        seen.append(gm)
        return gm.forward

    model, eager = Layers().eval(), Layers().eval()
    eager.load_state_dict(model.state_dict())
    backend = backend_for(compiler=compiler)
    for layer in model.layers:
        layer.compile(backend=backend, dynamic=True)
    for size in (6, 3):
        assert_steps(model, eager, "cpu", size=size, steps=4)
    assert len(backend.graphs) == 1  # Dynamo traces the code of the class once
    pieces = len(seen)
    assert pieces == len([p for p in backend.graphs[0].split.pieces if p.capture])
    assert_counts(backend, 8, 16, {WARMING: 8})
    assert len(backend.graphs[0].weight_sets) == 4


def test_recompiles_of_torch_compile_are_counted_and_those_of_compile_refused() -> None:
    def f(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) * 2

    backend = backend_for()
    one = torch.compile(f, backend=backend, dynamic=False)
    for size in (6, 3, 6, 3):
        check(one, f, batch("cpu", size))
    assert len(backend.graphs) == 2
    other = compiled(f)
    check(other, f, batch("cpu", 6))
    other.freeze()
    with pytest.raises(RecompileError, match=rf"x: float32\[3, 4, {D}\] on cpu"):
        other(batch("cpu", 3))
    check(other, f, batch("cpu", 6))


def test_a_compiled_model_inside_of_torch_compile() -> None:
    inner = nn.Linear(4, 4)
    one = compiled(inner)

    def outer(x):
        return one(x) * 2

    whole = torch.compile(outer, backend="eager", fullgraph=True)
    for size in (2, 3):
        x = rows(size)
        assert_same(whole(x), inner(x) * 2)
    assert one.traces == ()


@pytest.mark.parametrize("kind", ["breakable", "whole"])
def test_the_handle_of_what_is_not_traced(kind: str) -> None:
    """One that captures with a wrapper is counted, captured, verified and released as any other."""
    case = CASES["op_packet"] if kind == "breakable" else CASES["sdpa"]
    own = {"splitting": "breakable", **case.settings} if kind == "breakable" else {"mode": "NONE"}
    mode = CUDAGraphMode.PIECEWISE if kind == "breakable" else CUDAGraphMode.FULL
    model = build(case)
    one = cgcompile.compile(model, **own, **(HOST if kind == "breakable" else WHOLE))
    backend = one.backend
    inputs = {size: batch("cpu", size) for size in (6, 3)}

    def run(size: int) -> Any:
        x = inputs[size]
        x.copy_(torch.randn_like(x))
        with set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(size)
        ):
            result = one(x)
        assert_same(result, model(x))
        return x

    assert backend.capture(run, (3, 6)).captured == (6, 3)
    run(3)
    assert_counts(backend, 2, 1, {WARMING: 2})
    with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(6)):
        verdict = cgcompile.verify(one, inputs[6], sets=1)
    assert (verdict.ok, verdict.replays) == (True, 1)
    assert backend.counters.replays == 1 + 2  # the first to see that it replays
    backend.close_capture()
    backend.invalidate("on purpose")
    run(6)
    assert backend.counters.plain[Reason.CAPTURE_FORBIDDEN] == 1
    backend.release()
    run(6), run(6)
    assert (backend.counters.captures, backend.counters.replays) == (3, 4)
