"""Sizes as expressions: bytes at each size, and the sizes that the model's own guards refuse."""

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.asserts import build, compiled_graph, mark
from lib.cases import CASES, D

import cgcompile
from cgcompile.errors import ConfigError, SymbolError


def refused(name: str, **more) -> Exception:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled_graph(name, **more)
    return caught.value.inner_exception


def tabulate(split: cgcompile.passes.SplitGraph, expression: sympy.Expr, sizes: tuple[int, ...]):
    """The value of an expression of the split's one symbol, if it has any, at each size."""
    return {n: int(expression.subs(dict.fromkeys(split.symbols, n))) for n in sizes}


def test_crossing_bytes_at_each_size() -> None:
    split = compiled_graph("sdpa").split
    # qkv once (its three views share it), the attention, the result: 3 + 1 + 1 rows of 64 floats.
    expected = {n: 5 * n * 4 * D * 4 for n in (1, 3, 64)}
    assert tabulate(split, split.crossing_bytes(), (1, 3, 64)) == expected


@pytest.fixture(scope="module")
def decoder() -> cgcompile.passes.SplitGraph:
    return compiled_graph("decoder").split


@given(n=st.integers(2, 4096))
@settings(max_examples=25, deadline=None)
def test_tabulated_bytes_are_those_of_real_tensors(decoder, n: int) -> None:
    for value in decoder.crossing():
        table = tabulate(decoder, decoder.symbols.nbytes(value.meta), (n,))
        shape = [n if isinstance(size, torch.SymInt) else size for size in value.meta.shape]
        real = torch.empty(shape, dtype=value.meta.dtype, device="meta")
        assert table == {n: real.numel() * real.element_size()}


def test_bytes_without_symbols() -> None:
    backend = cgcompile.Backend(compiler="eager")
    with torch.no_grad():
        torch.compile(build(CASES["sdpa"]), backend=backend, dynamic=False)(torch.randn(2, 4, D))
        split = backend.graphs[0].split
    total = tabulate(split, split.crossing_bytes(), (1, 8))
    assert total == {1: 5 * 2 * 4 * D * 4, 8: 5 * 2 * 4 * D * 4}
    assert isinstance(split.crossing_bytes(), sympy.Integer)


def test_a_guard_refuses_a_size() -> None:
    error = refused("guard", cudagraph_capture_sizes=(4, 6, 8))
    assert isinstance(error, SymbolError)
    message = str(error)
    assert "size 6 of s0 = x.size()[0] is refused" in message
    assert "Mod(s0, 4)" in message
    assert "cases.py" in message


def test_sizes_that_the_guard_allows() -> None:
    assert compiled_graph("guard", cudagraph_capture_sizes=(1, 4, 8, 64)).split.pieces


def test_a_range_refuses_a_size() -> None:
    backend = cgcompile.Backend(compiler="eager", cudagraph_capture_sizes=(4, 32))
    x = torch.randn(6, 4, D)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught, torch.no_grad():
        torch.compile(build(CASES["sdpa"]), backend=backend)(x)
    assert isinstance(caught.value.inner_exception, SymbolError)
    assert "size 32" in str(caught.value)
    assert "<= 16" in str(caught.value)


def test_a_guard_that_the_compiler_adds_is_seen_too() -> None:
    def even_only(gm, fake_inputs):
        for each in fake_inputs:
            if isinstance(each, torch.SymInt):
                assert each % 2 == 0
        return gm.forward

    case = CASES["sdpa"]
    x = case.inputs(6)
    mark(case, x)
    backend = cgcompile.Backend(compiler=even_only, cudagraph_capture_sizes=(4, 5))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught, torch.no_grad():
        torch.compile(build(case), backend=backend)(*x)
    assert "size 5" in str(caught.value)


def test_sizes_must_name_their_dimension_if_several_vary() -> None:
    error = refused("two_symbols", cudagraph_capture_sizes=(4,))
    assert isinstance(error, ConfigError)
    assert "the graph has 2 of them" in str(error)
    assert "x.size()[0], x.size()[1]" in str(error)
    named = compiled_graph("two_symbols", cudagraph_capture_sizes=(4,), capture_dim="x.size()[1]")
    assert named.split.symbols.dims == {"s0": "x.size()[0]", "s1": "x.size()[1]"}


def test_one_capture_dim_serves_all_graphs_of_a_model(caplog) -> None:
    def broken(x):
        h = x.sin()
        torch._dynamo.graph_break()
        return torch.nn.functional.scaled_dot_product_attention(h, h, h)

    backend = cgcompile.Backend(
        compiler="eager", cudagraph_capture_sizes=(2, 4), capture_dim="x.size()[0]"
    )
    with torch.no_grad(), caplog.at_level("WARNING", logger="cgcompile"):
        x = torch.randn(3, 4, D)
        torch.testing.assert_close(
            torch.compile(broken, backend=backend, dynamic=True)(x), broken(x)
        )
    assert len(backend.graphs) == 2
    assert "capture_dim x.size()[0] is not among" in caplog.text


def test_sizes_of_a_static_graph_are_no_error() -> None:
    backend = cgcompile.Backend(compiler="eager", cudagraph_capture_sizes=(4,))
    with torch.no_grad():
        torch.compile(build(CASES["sdpa"]), backend=backend, dynamic=False)(torch.randn(2, 4, D))
    assert len(backend.graphs) == 1


def test_pretty_names_follow_the_inputs_not_torch() -> None:
    text = compiled_graph("two_symbols").split.text()
    assert "f32[s0, s1, 16]" in text
    assert not [
        word
        for word in text.replace("[", " ").replace("*", " ").split()
        if word[:3] in ("s77", "s27")
    ]
