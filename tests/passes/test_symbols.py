"""Sizes as expressions: bytes at each size, and the sizes that the model's own guards refuse."""

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.asserts import build, compiled_graph, mark
from lib.cases import CASES, D
from torch import fx
from torch.utils._sympy import functions as of_sizes

import cgcompile
from cgcompile.errors import ConfigError, SymbolError
from cgcompile.passes.split import SplitGraph
from cgcompile.torch_compat import expressions


def refused(name: str, **more) -> Exception:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled_graph(name, **more)
    return caught.value.inner_exception


def tabulate(split: SplitGraph, expression: sympy.Expr, sizes: tuple[int, ...]):
    """The value of an expression of the split's one symbol, if it has any, at each size."""
    return {n: int(expression.subs(dict.fromkeys(split.symbols, n))) for n in sizes}


def test_crossing_bytes_at_each_size() -> None:
    split = compiled_graph("sdpa").split
    # qkv once (its three views share it), the attention, the result: 3 + 1 + 1 rows of 64 floats.
    expected = {n: 5 * n * 4 * D * 4 for n in (1, 3, 64)}
    assert tabulate(split, split.crossing_bytes(), (1, 3, 64)) == expected


@pytest.fixture(scope="module")
def decoder() -> SplitGraph:
    return compiled_graph("decoder").split


@pytest.mark.slow
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
        for value in fake_inputs:
            if isinstance(value, torch.SymInt):
                assert value % 2 == 0
        return gm.forward

    case = CASES["sdpa"]
    x = case.inputs(6)
    mark(case, x)
    backend = cgcompile.Backend(compiler=even_only, cudagraph_capture_sizes=(4, 5))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught, torch.no_grad():
        torch.compile(build(case), backend=backend)(*x)
    assert "size 5" in str(caught.value)


@pytest.mark.slow
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


S, T = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
FLOAT = of_sizes.ToFloat(S)
EXPRESSIONS = {
    "sum": S - T + 3,
    "product": 3 * S * T,
    "square": S**2,
    "root": S ** sympy.Rational(1, 2),
    "Abs": sympy.Abs(S - T),
    "floor": sympy.floor(of_sizes.IntTrueDiv(S * T, 7)),
    "ceiling": sympy.ceiling(of_sizes.IntTrueDiv(S * T, 7)),
    "FloorDiv": of_sizes.FloorDiv(S, 3),
    "CleanDiv": of_sizes.CleanDiv(4 * S, 2 * T),
    "CeilDiv": of_sizes.CeilDiv(S, T),
    "ModularIndexing": of_sizes.ModularIndexing(S, 3, 5),
    "TruncToInt": of_sizes.TruncToInt(-1.5 * FLOAT),
    "TruncToFloat": of_sizes.TruncToFloat(0.3 * FLOAT),
    "RoundToInt": of_sizes.RoundToInt(0.5 * FLOAT),
    "RoundDecimal": of_sizes.RoundDecimal(0.37 * FLOAT, 1),
    "CeilToInt": of_sizes.CeilToInt(0.3 * FLOAT),
    "FloorToInt": of_sizes.FloorToInt(-0.3 * FLOAT),
    "IntTrueDiv": of_sizes.IntTrueDiv(S, T),
    "FloatTrueDiv": of_sizes.FloatTrueDiv(FLOAT, of_sizes.ToFloat(T)),
    "FloatPow": of_sizes.FloatPow(FLOAT, 0.5),
    "PowByNatural": of_sizes.PowByNatural(S, T),
    "Mod": of_sizes.Mod(S, T),
    "PythonMod": of_sizes.PythonMod(3 - S, T),
    "Max": of_sizes.Max(S, T, 7),
    "Min": of_sizes.Min(S, T + 1, 7),
    "Where": of_sizes.Where(S > T, S, T),
    "Piecewise": sympy.Piecewise((S, S > 2 * T), (T, S + 1 > T), (3, True)),
    "Identity": of_sizes.Identity(S + T),
    "LShift": of_sizes.LShift(S, T),
    "RShift": of_sizes.RShift(S, T),
    "bitwise_and": of_sizes.BitwiseFn_bitwise_and(S, T),
    "bitwise_or": of_sizes.BitwiseFn_bitwise_or(S, T),
    "bitwise_xor": of_sizes.BitwiseFn_bitwise_xor(S, T),
    "log2": of_sizes.OpaqueUnaryFn_log2(FLOAT),
    "sqrt": of_sizes.OpaqueUnaryFn_sqrt(FLOAT),
    "sin": of_sizes.OpaqueUnaryFn_sin(FLOAT),
    "Eq": sympy.Eq(of_sizes.Mod(S, T), 0),
    "Not": sympy.Not(sympy.Eq(of_sizes.Mod(S, T), 0)),
    "And": sympy.And(S > T, S < 3 * T),
    "Or": sympy.Or(S >= T, sympy.Eq(S, 3)),
    "true": sympy.true,
    "infinity": sympy.oo,
}


def test_expressions_have_one_value_as_node_as_text_and_as_number() -> None:
    for name, expression in EXPRESSIONS.items():
        graph = fx.Graph()
        nodes = {S: graph.placeholder("s0"), T: graph.placeholder("s1")}
        graph.output(expressions.evaluated(expression, nodes))
        in_graph = fx.GraphModule({}, graph)
        text = f"lambda s0, s1: {expressions.text_of(expression)}"
        in_text = eval(text, {**expressions.NAMES_IN_TEXT})
        for s, t in ((2, 3), (5, 2), (6, 3), (12, 5), (31, 7)):
            number = expressions.evaluated(expression, {S: s, T: t})
            assert type(in_graph(s, t)) is type(in_text(s, t)) is type(number), name
            assert in_graph(s, t) == in_text(s, t) == number, name
            expected = expression.subs({S: s, T: t})
            if isinstance(number, bool):
                assert bool(expected) is number, name
            elif expression is not sympy.oo:
                assert float(expected) == pytest.approx(number, rel=1e-12), name
