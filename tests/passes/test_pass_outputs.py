"""A pass that changes what an output is, is named; one that spells the same otherwise is not."""

import operator

import pytest
import torch
from lib.cases import D
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cgcompile
from cgcompile.errors import PassError
from cgcompile.passes import FunctionPass, PassManager

attend = nn.functional.scaled_dot_product_attention
WHERE = ["graph", "pieces"]


class Attention(nn.Module):
    def forward(self, x):
        return attend(x.sin(), x, x).cos()


def compiled(model, pass_, where: str, *inputs, dynamic: bool = True, **settings):
    mine = FunctionPass("mine", pass_)
    passes = (mine,) if where == "graph" else ("split", mine)
    backend = cgcompile.Backend(compiler="eager", passes=passes, **settings)
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    with torch.no_grad():
        return torch.compile(model, backend=backend)(*inputs)


def refused(*args, **kwargs) -> str:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(*args, **kwargs)
    error = caught.value.inner_exception
    assert isinstance(error, PassError)
    return str(error)


def on_output(*calls, index: int = 0):
    """A pass that puts calls around one output."""

    def change(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        results = list(output.args[0])
        with gm.graph.inserting_before(output):
            for function, *rest in calls:
                results[index] = gm.graph.call_function(function, (results[index], *rest))
        output.args = (tuple(results),)

    return change


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("calls", "changed"),
    [
        ([(torch.sum,)], "f32[]"),
        ([(torch.Tensor.double,)], "f64[{n}, 4, 16]"),
        ([(torch.Tensor.to, "meta")], "f32[{n}, 4, 16] on meta"),
        ([(torch.narrow, 0, 0, 2)], "f32[2, 4, 16]"),
        ([(torch.flatten, 1)], "f32[{n}, 64]"),
    ],
)
def test_another_output_names_the_pass(where: str, dynamic: bool, calls, changed: str) -> None:
    text = refused(Attention(), on_output(*calls), where, torch.randn(6, 4, D), dynamic=dynamic)
    size = "s0" if dynamic else "6"
    assert "pass 'mine' changed output 0 of " + ("graph" if where[0] == "g" else "piece_") in text
    assert changed.format(n=size) in text
    assert f"expected f32[{size}, 4, 16]" in text


@pytest.mark.parametrize("where", WHERE)
def test_a_change_in_the_middle_is_followed_to_the_output(where: str) -> None:
    def widen(gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_method", target="exp"):
            with gm.graph.inserting_before(node):
                wide = gm.graph.call_method("double", (node.args[0],))
            node.args = (wide,)

    def model(x):
        return x.sin().exp().cos().add_(1)

    text = refused(model, widen, where, torch.randn(6, 4))
    assert "it is f64[s0, 4] on cpu; expected f32[s0, 4] on cpu" in text


@pytest.mark.parametrize("where", WHERE)
def test_another_function_and_a_wrong_value_of_the_pass(where: str) -> None:
    def other_target(gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.cumsum):
            node.target = torch.sum

    def lying(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        (result,) = output.args[0]
        with gm.graph.inserting_before(output):
            lie = gm.graph.call_function(torch.sum, (result, 0))
        lie.meta = result.meta.copy()
        output.args = ((lie,),)

    def model(x):
        return torch.cumsum(x, 0)

    for change in (other_target, lying):
        text = refused(model, change, where, torch.randn(6, 4))
        assert "it is f32[4] on cpu; expected f32[s0, 4]" in text


def test_arguments_that_a_node_cannot_take_name_the_pass() -> None:
    def narrow(gm: fx.GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_method", target="exp")
        node.target, node.args = "sum", (node.args[0], 0)

    def model(x, w):
        return x.exp() @ w

    text = refused(model, narrow, "graph", torch.randn(6, 4), torch.randn(3, 5, 4, 4)[0, 0])
    assert "changed output 0" in text

    def model3(x, w):
        return torch.mm(x.exp(), w)

    text = refused(model3, narrow, "graph", torch.randn(6, 4), torch.randn(4, 4))
    assert "pass 'mine' left an invalid graph: node 'mm' fails on its new arguments" in text


def test_the_output_that_changed_is_counted() -> None:
    def model(x):
        return x.sin(), x.cos()

    text = refused(model, on_output((torch.Tensor.half,), index=1), "graph", torch.randn(6, 4))
    assert "changed output 1 of graph: it is f16[s0, 4]" in text


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_the_same_size_in_other_words_is_the_same(where: str) -> None:
    """Rows go in and out of a flattened form, whose first size is an expression of its own."""

    def reshaped(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        (result,) = output.args[0]
        graph = gm.graph
        with graph.inserting_before(output):
            rows = graph.call_method("size", (result, 0))
            count = graph.call_function(operator.mul, (rows, 2))
            flat = graph.call_method("reshape", (result, count, -1))
            half = graph.call_function(operator.floordiv, (count, 2))
            split = graph.call_method("reshape", (flat, half, 4, D))
            more = graph.call_function(operator.add, (split, 1.0))
        output.args = ((more,),)

    x = torch.randn(6, 4, D)
    with torch.no_grad():
        actual = compiled(nn.Sequential(nn.Linear(D, D), nn.Sigmoid()), reshaped, where, x)
    assert actual.shape == x.shape
    model = nn.Linear(D, D)
    torch.testing.assert_close(compiled(model, reshaped, where, x), model(x) + 1)


@pytest.mark.slow
def test_a_size_that_a_guard_makes_equal_is_the_same() -> None:
    """2 * (n // 2) is n where n is even, which only a guard tells."""

    def model(x, y):
        torch._check(x.size(0) % 2 == 0)
        return (x.view(x.size(0) // 2, 2, -1) + 1).flatten(0, 1)

    def direct(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        x = next(n for n in gm.graph.find_nodes(op="placeholder") if "x" in n.name)
        with gm.graph.inserting_before(output):
            total = gm.graph.call_function(torch.add, (x, 1))
        output.args = ((total,),)

    x = torch.randn(6, 4)
    result = compiled(model, direct, "graph", x, torch.randn(6))
    torch.testing.assert_close(result, x + 1)


def test_unbacked_sizes_and_results_that_are_no_tensors() -> None:
    def model(x):
        kept = x[x > 0].exp()
        return kept, x.size(0), x.size(0) * 2, None, kept.cos()

    def again(gm: fx.GraphModule) -> None:
        """Another mask: the size of what follows gets a symbol of its own."""
        for node in list(gm.graph.nodes):
            if node.op == "call_method" and node.target == "exp":
                with gm.graph.inserting_before(node):
                    new = gm.graph.call_function(torch.add, (node.args[0], 1.0))
                node.args = (new,)

    x = torch.randn(8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = compiled(model, again, "graph", x)
        kept = (x[x > 0] + 1).exp()
        torch.testing.assert_close(result[0], kept)
        torch.testing.assert_close(result[4], kept.cos())
        assert result[1:4] == (8, 16, None)
        text = refused(model, on_output((torch.Tensor.double,)), "graph", torch.randn(8))
    assert "changed output 0 of graph: it is f64[" in text


def test_under_autocast_a_node_is_what_it_is_there() -> None:
    def relu_twice(gm: fx.GraphModule) -> None:
        (node,) = gm.graph.find_nodes(op="call_function", target=nn.functional.linear)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(nn.functional.linear, node.args, node.kwargs)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)

    layer = nn.Linear(D, D)

    def model(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    x = torch.randn(6, D)
    for where in WHERE:
        result = compiled(model, relu_twice, where, x)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, model(x))


@pytest.mark.slow
def test_strides_stay_where_another_piece_takes_the_output() -> None:
    def first_only(gm: fx.GraphModule) -> None:
        if gm.graph.find_nodes(op="call_method", target="sin"):
            turned(gm)

    def last_only(gm: fx.GraphModule) -> None:
        if gm.graph.find_nodes(op="call_method", target="cos"):
            turned(gm)

    turned = on_output((torch.transpose, 0, 1), (torch.Tensor.contiguous,), (torch.transpose, 0, 1))
    x = torch.randn(6, 4, D)
    text = refused(Attention(), first_only, "pieces", x)
    assert "pass 'mine' changed output 0 of piece_0: it is f32[s0, 4, 16] on cpu, strides" in text
    # Only the caller has this one.
    result = compiled(Attention(), last_only, "pieces", x)
    torch.testing.assert_close(result, Attention()(x))
    result = compiled(Attention(), turned, "graph", x)
    torch.testing.assert_close(result, Attention()(x))


def _identity(value: torch.Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = value
    graph.output((node,))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("rows", "new_rows", "strides", "same"),
    [
        (1, 1, (7, 1), True),
        (2, 2, (7, 1), False),
        (1, 0, (4, 1), True),
        (0, 1, (7, 1), True),
        (0, 1, (4, 2), False),
    ],
)
def test_the_stride_of_a_single_row_is_free(rows: int, new_rows: int, strides, same: bool) -> None:
    """Also beside a number of rows that depends on data (0 in the table)."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        unbacked = mode.shape_env.create_unbacked_symint()
        before = torch.empty(rows or unbacked, 4)
        after = torch.empty_strided((new_rows or unbacked, 4), strides)
    manager = PassManager([FunctionPass("mine", lambda gm: _identity(after))])
    if same:
        manager(_identity(before), strided={0})
        return
    with pytest.raises(PassError, match="pass 'mine' changed output 0 of graph: it is f32"):
        manager(_identity(before), strided={0})


def test_the_next_good_pass_works_after_a_refused_one() -> None:
    x = torch.randn(6, 4, D)
    refused(Attention(), on_output((torch.sum,)), "graph", x)
    torch._dynamo.reset()
    result = compiled(Attention(), on_output((torch.neg,)), "graph", x)
    torch.testing.assert_close(result, -Attention()(x))
