"""The generated step: its text, and that it drops unused values."""

import gc
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from lib.asserts import compiled_graph
from lib.cases import D, Decoder
from torch import nn

import cgcompile
from cgcompile.pieces.stitch import Step


class Sources(TestCase):
    def test_pieces_values_and_sizes(self) -> None:
        self.assertExpectedInline(
            compiled_graph("op_packet").source,
            """\
def step(qkv_weight, qkv_bias, s0, x, out_weight, out_bias):
    (q, k, v, out) = piece_0(s0, x, qkv_weight, qkv_bias)
    piece_1(s0, q, k, v, out)
    del (q, k, v)
    (add,) = piece_2(s0, out, out_weight, out_bias, x)
    del (out,)
    return (add,)
""",
        )

    def test_returned_sizes(self) -> None:
        self.assertExpectedInline(
            compiled_graph("size_returned").source,
            """\
def step(qkv_weight, qkv_bias, s0, x, out_weight, out_bias):
    (q, k, v) = piece_0(s0, x, qkv_weight, qkv_bias)
    (scaled_dot_product_attention,) = piece_1(s0, q, k, v)
    del (q, k, v)
    (y,) = piece_2(s0, scaled_dot_product_attention, out_weight, out_bias, x)
    del (scaled_dot_product_attention,)
    (mul,) = returned_sizes(s0)
    return (y, mul, s0)
""",
        )

    def test_long_lines_are_wrapped(self) -> None:
        longest = max(map(len, compiled_graph("decoder").source.splitlines()))
        assert 60 < longest <= 100


@pytest.mark.parametrize("length", [*range(1, 12), 30, 90, 120])
def test_lines_break_where_python_allows_it(length: int) -> None:
    """Names of every length, so that each bracket falls on each side of the line's end once."""

    class Long(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(9):
                self.register_buffer(f"b{number}" + "x" * length, torch.ones(D))

        def forward(self, x):
            first, second = x.sin(), x.cos()
            for buffer in self.buffers():
                x = x + buffer
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            return y + first, second * y

    backend, x = cgcompile.Backend(compiler="eager"), torch.randn(2, 4, D)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(Long(), backend=backend)(x), Long()(x))


@pytest.mark.slow
def test_names_of_the_user_hide_nothing() -> None:
    def f(step, piece_0, piece_1, returned_sizes, s0, len, class_):
        piece_2 = step.sin() + piece_0 + piece_1 + returned_sizes + s0 + len + class_
        y = torch.nn.functional.scaled_dot_product_attention(piece_2, piece_2, piece_2)
        return y * y.shape[0], y.shape[0] * 3

    inputs = [torch.randn(5, 4, D) for _ in range(7)]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        result = torch.compile(f, backend=cgcompile.Backend(compiler="eager"))(*inputs)
        torch.testing.assert_close(result, f(*inputs))


@pytest.mark.slow
def test_equal_graphs_have_equal_source() -> None:
    first = compiled_graph("decoder").source
    torch._dynamo.reset()
    assert compiled_graph("decoder").source == first


@pytest.mark.slow
def test_intermediates_are_dropped_after_their_last_use() -> None:
    graph = compiled_graph("decoder")
    split, alive = graph.split, []
    lives: list[weakref.ref] = []

    def watching(piece):
        def run(*inputs):
            del_count = sum(ref() is not None for ref in lives)
            outputs = piece.module.forward(*inputs)
            lives.extend(weakref.ref(each) for each in outputs)
            alive.append(del_count)
            return outputs

        return run

    step = Step(split).bind([watching(piece) for piece in split.pieces])
    parameters = dict(Decoder(2).named_parameters())
    del parameters
    model = graph.keep_alive
    inputs = _captured_inputs(model, torch.randint(0, 32, (6, 4)))
    gc.disable()
    try:
        with torch.no_grad():
            step(*inputs)
    finally:
        gc.enable()
    # Before piece_2: x, attended. Before piece_4: x_2, attended_1. Never q, k, v of a past layer.
    assert alive == [0, 4, 2, 4, 2]


def _captured_inputs(model, ids):
    seen = []

    def keep(gm, inputs):
        def run(*args):
            seen.append(args)
            return gm.forward(*args)

        return run

    torch._dynamo.mark_dynamic(ids, 0)
    with torch.no_grad():
        torch.compile(model._orig_mod, backend=keep)(ids)
    return seen[0]


@pytest.mark.slow
def test_no_module_call_in_the_path() -> None:
    """Neither pieces nor the step go through ``nn.Module.__call__``."""
    graph = compiled_graph("decoder")
    calls = []
    hooks = [
        piece.module.register_forward_hook(lambda *_: calls.append(1))
        for piece in graph.split.distinct
    ]
    inputs = _captured_inputs(graph.keep_alive, torch.randint(0, 32, (6, 4)))
    with torch.no_grad():
        (result,) = graph(*inputs)
    for hook in hooks:
        hook.remove()
    assert result.shape == (6, 4, 32)
    assert not calls


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of Python 3.11")
@pytest.mark.parametrize("width", [1, 40])
def test_an_error_names_the_piece(width: int) -> None:
    """Compiled code raises a bare error; a call of many values is on several lines."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(8, 4) for _ in range(width))

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            x = F.scaled_dot_product_attention(x.sin(), x, x)
            for table in self.tables:
                x = x + table(i)
            return x

    model = cgcompile.compile(Looks())
    x, ids = torch.randn(1, 3, 4), torch.zeros(1, 3, dtype=torch.long)
    with torch.inference_mode():
        model(x, ids)
        with pytest.raises((IndexError, RuntimeError)) as caught:
            model(x, ids + 8)
    line = Looks.forward.__code__.co_firstlineno + 3
    (note,) = caught.value.__notes__
    start = f"in piece_2 of the compiled model, which begins at test_stitch.py:{line} in forward: "
    assert note == start + "x = x + table(i)"
