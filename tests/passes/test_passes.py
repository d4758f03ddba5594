"""A user's passes: where they run, what they may do, and what happens when they do it wrong."""

import dataclasses
import logging
import operator
import os

import pytest
import torch
from expecttest import TestCase
from lib.asserts import build
from lib.cases import CASES, D, Decoder
from torch import fx, nn

import cgcompile
from cgcompile.errors import ConfigError, PassError
from cgcompile.passes import OPTIONAL, PIPELINE, FunctionPass, GraphPass, PassManager
from cgcompile.passes.split import Piece


def run(model: nn.Module, x: torch.Tensor, **settings) -> tuple[torch.Tensor, cgcompile.Backend]:
    backend = cgcompile.Backend(compiler="eager", **settings)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        result = torch.compile(model, backend=backend)(x)
    return result, backend


def replace_sin_by_cos(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_method", target="sin"):
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(torch.cos, node.args)  # no fake value: filled in
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)


class SinAttention(nn.Module):
    def forward(self, x):
        y = nn.functional.scaled_dot_product_attention(x.sin(), x, x)
        return y.sin()


def test_pass_over_the_whole_graph_runs_before_the_split() -> None:
    seen = []

    def look(gm: fx.GraphModule) -> None:
        seen.append([str(node.target) for node in gm.graph.nodes])
        replace_sin_by_cos(gm)

    x = torch.randn(6, 4, D)
    result, backend = run(SinAttention(), x, passes=(FunctionPass("look", look),))
    expected = nn.functional.scaled_dot_product_attention(x.cos(), x, x).cos()
    torch.testing.assert_close(result, expected)
    assert len(seen) == 1
    assert any("scaled_dot_product_attention" in target for target in seen[0])
    assert [piece.capture for piece in backend.graphs[0].split.pieces] == [True, False, True]


@pytest.mark.slow
def test_pass_over_pieces_runs_once_per_distinct_captured_piece() -> None:
    seen = []

    def look(gm: fx.GraphModule) -> None:
        seen.append(gm)

    _, backend = run(
        Decoder(5).eval(),
        torch.randint(0, 32, (6, 4)),
        passes=("split", FunctionPass("look", look)),
    )
    assert len(seen) == 3
    assert {id(gm) for gm in seen} == {
        id(piece.module) for piece in backend.graphs[0].split.pieces if piece.capture
    }


def test_a_piece_pass_changes_what_is_compiled_everywhere() -> None:
    x = torch.randn(6, 4, D)
    result, _ = run(SinAttention(), x, passes=("split", FunctionPass("cos", replace_sin_by_cos)))
    torch.testing.assert_close(
        result, nn.functional.scaled_dot_product_attention(x.cos(), x, x).cos()
    )


def test_a_pass_may_return_another_graph() -> None:
    def rebuilt(gm: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        return fx.GraphModule(gm, graph)

    x = torch.randn(6, 4, D)
    result, _ = run(SinAttention(), x, passes=("split", FunctionPass("rebuilt", rebuilt)))
    torch.testing.assert_close(result, SinAttention()(x))


def test_new_nodes_get_fake_values_before_the_split() -> None:
    def add_row_count(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        (result,) = output.args[0]
        with gm.graph.inserting_before(output):
            rows = gm.graph.call_method("size", (result, 0))
            scaled = gm.graph.call_function(operator.mul, (result, rows))
        output.args = ((scaled,),)

    x = torch.randn(6, 4, D)
    actual, backend = run(SinAttention(), x, passes=(FunctionPass("rows", add_row_count),))
    torch.testing.assert_close(actual, SinAttention()(x) * 6)
    last = backend.graphs[0].split.pieces[-1]
    assert not [name for name in last.outputs if name == "size"]  # no size leaves a piece


def failing(**settings) -> Exception:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(SinAttention(), torch.randn(6, 4, D), **settings)
    return caught.value.inner_exception


def drop_output(gm: fx.GraphModule) -> None:
    gm.graph.output_node().args = ((),)


def add_input(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("extra")


def break_order(gm: fx.GraphModule) -> None:
    computing = [node for node in gm.graph.nodes if node.op == "call_method"]
    next(iter(gm.graph.nodes)).prepend(computing[-1])


def no_fake_value(gm: fx.GraphModule) -> None:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        bad = gm.graph.call_method("no_such_method", (output.args[0][0],))
    output.args = ((bad,),)


def raise_it(gm: fx.GraphModule) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (drop_output, "it has 0 outputs, expected 1"),
        (add_input, "its inputs are"),
        (break_order, "RuntimeError"),
        (no_fake_value, "has no fake value"),
        (raise_it, "raised KeyError: 'mine'"),
    ],
)
@pytest.mark.parametrize("where", ["graph", "pieces"])
def test_a_pass_that_goes_wrong_is_named(where: str, function, problem: str) -> None:
    error = failing(
        passes=(*(["split"] if where == "pieces" else []), FunctionPass("mine", function))
    )
    assert isinstance(error, PassError)
    assert "pass 'mine'" in str(error)
    assert problem in str(error)


def test_something_that_is_no_pass() -> None:
    with pytest.raises(ConfigError, match=r"FunctionPass\(name, function\)"):
        cgcompile.Backend(passes=(drop_output,))
    with pytest.raises(PassError, match="found 3"):
        PassManager([3])


def test_a_pass_may_inherit_the_interface() -> None:
    @dataclasses.dataclass
    class Named(GraphPass):
        name: str

        def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
            return gm

        def uuid(self) -> str:
            return self.name

    assert [one.name for one in PassManager([Named("mine")]).passes] == ["mine"]


def test_uuid_of_a_function_pass_depends_on_name_and_version() -> None:
    one, same = FunctionPass("one", drop_output), FunctionPass("one", drop_output)
    assert one.uuid() == same.uuid()
    assert one.uuid() != FunctionPass("other", drop_output).uuid()
    assert one.uuid() != FunctionPass("one", drop_output, version="2").uuid()


def test_dumps_before_and_after_each_pass(tmp_path) -> None:
    passes = (FunctionPass("cos", replace_sin_by_cos),)
    run(SinAttention(), torch.randn(6, 4, D), passes=passes, dump_passes=str(tmp_path))
    names = sorted(os.listdir(tmp_path))
    assert names == [
        "graph.00.before.txt",
        "graph.00.cos.txt",
        "graph.01.bind_symbols.txt",
        "graph.02.pull_items.txt",
        "graph.03.eliminate_noops.txt",
        "graph.04.eliminate_clones.txt",
        "graph.05.decode_attention.txt",
        "graph.06.assign_pieces.txt",
        "graph.07.resolve_aliases.txt",
    ]
    before = (tmp_path / "graph.00.before.txt").read_text()
    after = (tmp_path / "graph.00.cos.txt").read_text()
    assert "call_method sin(" in before
    assert "call_method sin(" not in after
    assert "cos(l_x_)  # (s" in after


def test_dumps_of_passes_that_run_only(tmp_path) -> None:
    run(
        SinAttention(),
        torch.randn(6, 4, D),
        passes=(
            FunctionPass("cos", replace_sin_by_cos),
            "split",
            FunctionPass("again", replace_sin_by_cos),
            "-cos",
            "-eliminate_clones",
        ),
        dump_passes=str(tmp_path),
    )
    assert sorted(os.listdir(tmp_path)) == [
        "graph.00.before.txt",
        "graph.00.bind_symbols.txt",
        "graph.01.pull_items.txt",
        "graph.02.eliminate_noops.txt",
        "graph.03.decode_attention.txt",
        "graph.04.assign_pieces.txt",
        "graph.05.resolve_aliases.txt",
        "piece_0.00.again.txt",
        "piece_0.00.before.txt",  # piece_2 is the same piece
    ]


# ---------------------------------------------------------------- records


class NoOps(nn.Module):
    def forward(self, x):
        x = nn.functional.dropout(x.sin().float(), 0.5, False)
        y = nn.functional.scaled_dot_product_attention(x, x, x).contiguous()
        return y.clone().sin()


class Records(TestCase):
    def check(self, expected: str, **settings) -> None:
        _, backend = run(NoOps(), torch.randn(6, 4, D), **settings)
        text = backend.graphs[0].split.passes_text(seconds=False)
        self.assertExpectedInline(text, expected, skip=1)

    def test_of_a_graph_and_its_pieces(self) -> None:
        cos = FunctionPass("cos", replace_sin_by_cos)
        self.check(
            """\
graph    bind_symbols      7 -> 7 ops  -
graph    pull_items        7 -> 7 ops  -
graph    eliminate_noops   7 -> 4 ops  contiguous -1, float -1, torch.nn.functional.dropout -1
graph    eliminate_clones  4 -> 3 ops  clone -1
graph    decode_attention  3 -> 3 ops  -
graph    assign_pieces     3 -> 3 ops  -
graph    resolve_aliases   3 -> 3 ops  -
piece_0  cos               1 -> 1 ops  sin -1, torch.cos +1""",
            passes=("split", cos),
        )

    def test_of_what_is_not_disabled(self) -> None:
        cos = FunctionPass("cos", replace_sin_by_cos)
        self.check(
            """\
graph  cos               7 -> 7 ops  sin -2, torch.cos +2
graph  bind_symbols      7 -> 7 ops  -
graph  pull_items        7 -> 7 ops  -
graph  decode_attention  7 -> 7 ops  -
graph  assign_pieces     7 -> 7 ops  -
graph  resolve_aliases   7 -> 7 ops  -""",
            passes=(cos, "-eliminate_noops", "-eliminate_clones"),
        )


def test_a_record_is_a_value() -> None:
    _, backend = run(NoOps(), torch.randn(6, 4, D))
    split = backend.graphs[0].split
    record = split.passes[2]
    assert (record.name, record.label) == ("eliminate_noops", "graph")
    assert (record.ops_before, record.ops_after) == (7, 4)
    gone = {"contiguous": -1, "float": -1, "torch.nn.functional.dropout": -1}
    assert record.difference == gone
    assert record.seconds > 0
    assert str(record) == record.text()
    assert f"{record.seconds * 1e3:.2f} ms" in split.passes_text()
    assert record == dataclasses.replace(record, seconds=1.0)
    assert {record: 1}[record] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.name = "other"
    assert record.name not in split.text()


def test_records_are_logged_at_debug_level(caplog) -> None:
    with caplog.at_level(logging.DEBUG, logger="cgcompile"):
        run(NoOps(), torch.randn(6, 4, D))
    rows = [r.getMessage() for r in caplog.records if r.name == "cgcompile.passes.base"]
    assert [row.split()[2] for row in rows] == list(PIPELINE)
    assert "contiguous -1, float -1, torch.nn.functional.dropout -1" in rows[2]


# ---------------------------------------------------------------- passes that are left out


def test_a_pass_can_be_left_out_by_name() -> None:
    x = torch.randn(6, 4, D)
    passes = (FunctionPass("cos", replace_sin_by_cos), FunctionPass("look", lambda gm: None))
    result, backend = run(SinAttention(), x, passes=(*passes, "-cos"))
    torch.testing.assert_close(result, SinAttention()(x))
    names = [record.name for record in backend.graphs[0].split.passes]
    assert names == ["look", *PIPELINE]
    result, _ = run(SinAttention(), x, passes=("split", *passes, "-cos", "-look"))
    torch.testing.assert_close(result, SinAttention()(x))


def test_a_manager_leaves_disabled_passes_out() -> None:
    one, other = FunctionPass("one", drop_output), FunctionPass("other", add_input)
    assert PassManager([one, other], disabled=("one",)).passes == (other,)
    assert PassManager([one, other], disabled=("mine",)).passes == (one, other)


def test_what_cannot_be_left_out_is_said_at_once() -> None:
    mine = FunctionPass("mine", drop_output)
    with pytest.raises(ConfigError, match="Did you mean 'eliminate_noops'"):
        cgcompile.Backend(passes="-eliminate_noop")
    with pytest.raises(ConfigError, match="Did you mean 'mine'"):
        cgcompile.Backend(passes=(mine, "-mime"))
    for name in set(PIPELINE) - set(OPTIONAL):
        with pytest.raises(ConfigError, match=f"{name!r} cannot be left out"):
            cgcompile.Backend(passes=f"-{name}")
    cgcompile.Backend(passes=("split", mine, "-mine", *(f"-{name}" for name in OPTIONAL)))


def test_the_pipeline_knows_its_names() -> None:
    boundaries = cgcompile.boundaries.Boundaries()
    assert [make(boundaries).name for make in PIPELINE.values()] == list(PIPELINE)
    assert set(OPTIONAL) < set(PIPELINE)
    uuids = {make(boundaries).uuid() for make in PIPELINE.values()}
    assert len(uuids) == len(PIPELINE)


# ---------------------------------------------------------------- the passes of our own


def pieces_of(name: str) -> tuple[Piece, ...]:
    case = CASES[name]
    inputs = case.inputs(case.sizes[0])
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    backend = cgcompile.Backend(compiler="eager", **case.settings)
    with torch.no_grad():
        torch.compile(build(case), backend=backend)(*inputs)
    return backend.graphs[0].split.pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "size_crosses", "size_returned", "decoder"])
def test_no_size_leaves_a_captured_piece(name: str) -> None:
    for piece in pieces_of(name):
        if piece.capture:
            outputs = piece.module.graph.output_node().args[0]
            assert all(isinstance(o.meta["example_value"], torch.Tensor) for o in outputs)


@pytest.mark.slow
def test_pieces_return_tuples_also_of_one_or_none() -> None:
    for name in ("op_packet", "no_boundary"):
        for piece in pieces_of(name):
            outputs = piece.module.graph.output_node().args[0]
            assert isinstance(outputs, tuple)
            assert len(outputs) == len(piece.outputs)


def test_hazards_that_cannot_be_sunk_are_left_uncompiled() -> None:
    class TwoNames(nn.Module):
        """Two inputs of one memory: no view to make again, and a compiler would guess."""

        def forward(self, x, y):
            y.add_(1)
            h = nn.functional.scaled_dot_product_attention(x, x, x)
            return h + y.sum()

    compiled = []

    def compiler(gm, fake_inputs):
        compiled.append(gm)
        return gm.forward

    base = torch.randn(6, 4, D)
    backend = cgcompile.Backend(compiler=compiler)
    expected_base = base.clone()
    with torch.no_grad():
        expected = TwoNames()(expected_base, expected_base[1:])
        result = torch.compile(TwoNames(), backend=backend)(base, base[1:])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(base, expected_base)


def test_views_are_left_alone_where_nothing_is_written() -> None:
    """Sinking costs host time at every step, so only hazards get it."""
    first = pieces_of("sdpa")[0]
    assert first.outputs == ("q", "k", "v")
