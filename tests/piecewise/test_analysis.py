"""What the ATen graph of a piece tells: writes, operators that cannot be captured, peak memory."""

import torch
from cases import CASES, D
from support import backend_for, build, mark
from torch import nn

import cgcompile
from cgcompile.piecewise.analysis import analyse


def graph_of(model: nn.Module, *inputs: torch.Tensor, **settings) -> cgcompile.entry.CompiledGraph:
    backend = cgcompile.Backend(compiler="eager", **settings)
    for each in inputs:
        torch._dynamo.mark_dynamic(each, 0)
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        compiled(*inputs)
    (graph,) = backend.graphs
    graph.keep_alive = compiled
    return graph


def test_inputs_that_a_piece_writes() -> None:
    case = CASES["input_mutated_in_pieces"]
    backend = backend_for(case, "eager")
    inputs = case.inputs(6)
    mark(case, inputs)
    with torch.no_grad():
        compiled = torch.compile(build(case), backend=backend)
        compiled(*inputs)
    split = backend.graphs[0].split
    first, attention, last = (analyse(piece, split.symbols) for piece in split.pieces)
    assert first.mutated == ("cache",)
    assert attention.mutated == ()
    assert last.mutated == ("cache",)


def test_ops_are_those_of_aten() -> None:
    graph = graph_of(build(CASES["no_boundary"]), torch.randn(6, 4, D))
    facts = analyse(graph.split.pieces[0], graph.split.symbols)
    assert facts.ops.count("aten.addmm.default") == 2
    assert facts.uncapturable is None


def test_an_op_that_only_its_lowering_shows_to_be_uncapturable() -> None:
    class Hidden(nn.Module):
        def forward(self, x):
            return torch.ops.cgtest.unsafe(x.sin()).cos()

    graph = graph_of(Hidden(), torch.randn(6, D))
    facts = [analyse(piece, graph.split.symbols) for piece in graph.split.pieces]
    assert [fact.uncapturable for fact in facts] == [None, "cgtest.unsafe.default", None]


def test_peak_bytes() -> None:
    class Chain(nn.Module):
        def forward(self, x):
            wide = torch.cat([x.sin(), x.cos()], -1)  # at once: x's sine, its cosine, both joined
            return wide.sum(-1) * 2

    graph = graph_of(Chain(), torch.randn(6, D))
    split = graph.split
    facts = analyse(split.pieces[0], split.symbols)
    assert split.symbols.tabulate(facts.peak_bytes, (1, 6, 100)) == {
        n: (D + D + 2 * D) * 4 * n for n in (1, 6, 100)
    }
