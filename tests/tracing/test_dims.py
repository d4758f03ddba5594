"""Dimensions that vary: given by name or by annotation, sizes 0 and 1, equal names."""

from typing import Annotated, Any, Optional

import pytest
import torch
from lib.entry import GUARDS, SHAPES, check, compiled, rows
from torch import nn

import cgcompile
from cgcompile import DynamicDim
from cgcompile.errors import ConfigError, TraceError

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("guards", GUARDS)
@pytest.mark.parametrize("sizes", [(1, 2, 5, 33, 0), (0, 5, 1, 33, 2), (5, 33, 1, 0, 2)])
def test_one_trace_whatever_size_comes_first(sizes: Any, guards: str, shapes: str) -> None:
    model = nn.Linear(4, 4)
    one = compiled(model, guards=guards, dynamic_shapes=shapes, dynamic_dims={"input": 0})
    for size in (*sizes, *sizes):
        check(one, model, rows(size))
    # backed: sizes 0 and 1 are other traces, as in torch; backed_size_oblivious: size 0 is.
    assert len(one.traces) == {"backed": 3, "backed_size_oblivious": 2, "unbacked": 1}[shapes]


@pytest.mark.parametrize("guards", GUARDS)
@pytest.mark.parametrize(
    ("branch", "sizes", "traces"),
    [
        (lambda n: n > 4, (3, 7, 1, 0, 33, 4, 5), 3),  # size 0 is one as well
        (lambda n: n == 1, (1, 3, 0, 5, 1), 3),
        (lambda n: n == 1, (3, 1, 5, 1), 2),
    ],
)
def test_a_branch_on_the_size_is_a_trace_of_its_own(
    branch: Any, sizes: Any, traces: int, guards: str
) -> None:
    def f(x):
        return x * 2 if branch(x.shape[0]) else x * 3

    one = compiled(f, guards=guards, dynamic_dims={"x": 0})
    for size in sizes:
        check(one, f, rows(size))
    assert len(one.traces) == traces


def test_code_that_branches_on_an_unbacked_size_is_refused() -> None:
    def f(x):
        return x * 2 if x.shape[0] > 4 else x * 3

    one = compiled(f, dynamic_dims={"x": 0}, dynamic_shapes="unbacked")
    with pytest.raises(TraceError, match=r"(?s)does not become one graph.*test_dims\.py"):
        one(rows(3))
    assert one.traces == ()


def test_a_size_within_an_op_that_only_data_tells_is_a_trace_error() -> None:
    def ragged(x, counts):
        lengths = torch.repeat_interleave(counts, counts)
        return [each.sin() for each in x.split(lengths.tolist())]

    compiled = cgcompile.compile(ragged, compiler="eager", dynamic_dims={"x": 0})
    with pytest.raises(TraceError, match=r"(?s)does not become one graph.*test_dims\.py"):
        compiled(torch.randn(8, 2), torch.tensor([2, 2]))


@pytest.mark.parametrize("guards", GUARDS)
def test_sizes_that_the_model_relates(guards: str) -> None:
    def f(x, y):
        return x + y.repeat(2, 1)

    one = compiled(f, guards=guards, dynamic_dims={"x": 0, "y": 0})
    for size in (3, 2, 7, 1):
        check(one, f, rows(2 * size), rows(size))
    assert len(one.traces) == 1
    with pytest.raises(TraceError, match="must match"):
        one(rows(5), rows(2))
    check(one, f, rows(8), rows(4))
    assert len(one.traces) == 1


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("guards", GUARDS)
def test_dimensions_of_one_name(guards: str, shapes: str) -> None:
    def f(x, y):
        return x + y

    dims = {"x": {0: "tokens"}, "y": {0: "tokens"}}
    one = compiled(f, guards=guards, dynamic_shapes=shapes, dynamic_dims=dims)
    for size in (3, 5, 33):
        check(one, f, rows(size), rows(size))
    with pytest.raises(TraceError, match=r"'tokens', but x.shape\[0\] is 3 and y.shape\[0\] is 1"):
        one(rows(3), rows(1))
    assert len(one.traces) == 1


@pytest.mark.parametrize("dims", [-1, (-1,), [1], {1: "n"}, {-1: None}, DynamicDim(-1)])
def test_ways_to_say_the_last_dimension(dims: Any) -> None:
    one = compiled(torch.nn.ReLU(), guards="none", dynamic_dims={"input": dims})
    for size in (3, 1, 8):
        check(one, torch.relu, rows(2, size))
    assert len(one.traces) == 1
    check(one, torch.relu, rows(3, 8))  # the first dimension is fixed
    assert len(one.traces) == 2


def in_containers(batch):
    return batch["pair"][0] + batch["pair"][1].sum() + batch["all"][0]["x"].mean()


def collects(x, *rest, flag=False, **named):
    return x + sum(each.sum() for each in (*rest, *named.values()))


# (function, dynamic dims, the arguments of a call by a size)
ONE_TRACE: dict[str, tuple[Any, Any, Any]] = {
    "equal by accident": (
        lambda x, y: x.sum() + y.sum(),
        {"x": 0, "y": 0},
        lambda n: ((rows(8 - n), rows(n)), {}),
    ),
    "unused": (lambda x, y: x * 2, {"x": 0, "y": 0}, lambda n: ((rows(n), rows(n + 1)), {})),
    "size alone": (
        lambda x, y: x * y.shape[0],
        {"x": 0, "y": 0},
        lambda n: ((rows(n), rows(n + 1)), {}),
    ),
    "containers": (
        in_containers,
        {"batch": 0},
        lambda n: (({"pair": (rows(n), rows(n + 2)), "all": [{"x": rows(n + 1)}]},), {}),
    ),
    "collected": (
        collects,
        {"rest": 0, "named": 0, "other": 1},
        lambda n: (
            (rows(2), rows(n), rows(n + 1)),
            {"first": rows(n), "other": rows(2, n)},
        ),
    ),
}


@pytest.mark.parametrize("guards", GUARDS)
@pytest.mark.parametrize("name", ONE_TRACE)
def test_one_trace_for_all_sizes(name: str, guards: str) -> None:
    f, dims, arguments = ONE_TRACE[name]
    for sizes in ((4, 3, 5, 7, 1), (1, 3, 5)):
        one = compiled(f, guards=guards, dynamic_dims=dims)
        for size in sizes:
            args, kwargs = arguments(size)
            check(one, f, *args, **kwargs)
        assert len(one.traces) == 1


@pytest.mark.parametrize("guards", GUARDS)
def test_a_dimension_that_the_model_fixes(guards: str) -> None:
    def computes(x, y):
        return x * 2 if x.shape[0] == 3 else x * 3

    def looks(x, y):
        return y * 2 if x.shape[0] == 3 else y * 3

    for f in (computes, looks):
        one = compiled(f, guards=guards, dynamic_dims={"x": 0})
        with pytest.raises(TraceError, match=r"x.shape\[0\] is 3, and the model fixes it"):
            one(rows(3), rows(2))
        check(one, f, rows(4), rows(2))


def test_size_one_where_another_argument_fixes_it() -> None:
    def broadcast(x, y):
        return x + y

    one = compiled(broadcast, dynamic_dims={"x": 0})
    check(one, broadcast, rows(1), rows(3))
    assert len(one.traces) == 1


# ------------------------------------------------------------------ annotations


def plainly(x: Annotated[torch.Tensor, DynamicDim(0)], y: int = 2):
    return x * y


def optional(x: Optional[Annotated[torch.Tensor, DynamicDim(0, "n")]] = None, y: int = 2):  # noqa: UP045
    return torch.ones(2) if x is None else x * y


def as_text(x: "Annotated[torch.Tensor, DynamicDim(0)]", y: "Unknown" = 2):  # noqa: F821
    return x * y


def collected(*x: Annotated[torch.Tensor, DynamicDim(0)]):
    return x[0] * 2


class Annotating(nn.Module):
    def forward(self, x: Annotated[torch.Tensor, DynamicDim(0)]):
        return x * 2


@pytest.mark.parametrize("function", [plainly, optional, as_text, collected, Annotating()])
def test_annotations(function: Any) -> None:
    one = compiled(function, guards="none")
    for size in (1, 3, 5):
        check(one, function, rows(size))
    assert len(one.traces) == 1


def test_none_first_where_a_tensor_is_optional() -> None:
    one = compiled(optional)
    check(one, optional, None)
    for size in (1, 3, 5):
        check(one, optional, rows(size))
    assert len(one.traces) == 2


def test_what_is_given_beats_the_annotation() -> None:
    one = compiled(plainly, dynamic_dims={"x": 1})
    for shape in ((2, 3), (2, 4), (3, 3)):
        check(one, plainly, rows(*shape))
    assert len(one.traces) == 2


# ------------------------------------------------------------------ errors, and no traces left


@pytest.mark.parametrize("dims", ["0", None, 0.5, True, {"n": 0}, {0: 1}, [[0]]])
def test_what_is_no_dimension(dims: Any) -> None:
    with pytest.raises(ConfigError, match=r"dynamic_dims\['input'\]"):
        cgcompile.compile(nn.Linear(4, 4), dynamic_dims={"input": dims})


def test_a_parameter_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="input"):
        cgcompile.compile(nn.Linear(4, 4), dynamic_dims={"inptu": 0})


def test_a_dimension_that_does_not_exist() -> None:
    one = compiled(nn.ReLU(), dynamic_dims={"input": 2})
    with pytest.raises(TraceError, match=r"input has no dimension 2; its shape is \[3, 4\]"):
        one(rows(3))
    check(one, torch.relu, rows(3, 4, 5))


@pytest.mark.parametrize("size", [1, 3])
def test_tensors_of_the_caller_are_as_before(size: int) -> None:
    one = compiled(nn.Linear(4, 4), dynamic_dims={"input": 0})
    x = rows(size)
    torch._dynamo.mark_static_address(x)
    x.mine = "mine"
    before = dict(x.__dict__)
    kept = x.clone()
    one(x)
    assert x.__dict__ == before
    assert torch.equal(x, kept)
