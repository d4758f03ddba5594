"""Which calls one trace serves: every way in which arguments can differ."""

import enum
import gc
from typing import Any, NamedTuple

import pytest
import torch
from lib.entry import GUARDS, check, compiled, rows

pytestmark = pytest.mark.usefixtures("without_gradients")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 2


class Pair(NamedTuple):
    a: Any
    b: Any


class Thing:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("guards", ["keep", "none"])
@pytest.mark.parametrize(
    "values",
    [
        (1, 2, True, 1.0, 0, False, None),
        (0.0, -0.0, float("nan"), float("inf"), 1),
        ("sum", "mean", b"sum"),
        (Color.RED, Color.BLUE, 1),
        (Level.LOW, 2),
        ((1, 2), [1, 2], (1, 2, 3), (1, (2, 3)), (1, [2, 3]), torch.Size([1, 2])),
        ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {}),
        ({0: 1}, {1: 1}),
        (slice(0, 1), slice(0, 2), slice(None), range(2), range(3)),
        (torch.float32, torch.float64, torch.device("cpu"), torch.device("meta")),
        (Pair(1, 2), Pair(2, 2), (1, 2)),
        (1 + 2j, 1 - 2j),
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_values_are_compared_with_their_types(values: Any, guards: str) -> None:
    """What a model sees of a value is in its result here, as a number that no two share."""
    known = {(type(value), repr(value)): float(number) for number, value in enumerate(values)}

    def f(x, value):
        return x + 1, value

    one = compiled(f, guards=guards)
    for _ in range(2):
        for value in values:
            x = rows(2)
            result, seen = one(x, value)
            assert torch.equal(result, x + 1)
            assert (type(seen), repr(seen)) in known
            assert (type(seen), repr(seen)) == (type(value), repr(value))
    assert len(one.traces) == len(known)


@pytest.mark.parametrize("guards", GUARDS)
def test_an_equal_value_made_anew_is_no_new_trace(guards: str) -> None:
    thing = Thing()

    def f(x, pair, size, part, table, act):
        return act(x.reshape(size)[part]) * pair.a + pair.b + table[0]["k"]

    one = compiled(f, guards=guards)
    for _ in range(4):
        x, a, k = rows(6, 1), rows(1, 1), rows(1, 1)
        arguments = Pair(a, 2.0), torch.Size([2, 3]), slice(0, 1), {0: {"k": k}}, thing.times
        assert torch.equal(one(x, *arguments), f(x, *arguments))
    assert len(one.traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("guards", GUARDS)
def test_ways_to_pass_an_argument(guards: str) -> None:
    def f(x, /, y=2, *rest, scale=3.0, **more):
        return x * y * scale + sum(rest) + sum(more.values())

    one = compiled(f, guards=guards)
    for _ in range(2):
        for args, kwargs in (
            ((), {}),
            ((5,), {}),
            ((), {"y": 5}),
            ((5, rows(2)), {}),
            ((5, rows(2), rows(2)), {"scale": 0.5}),
            ((), {"scale": 0.5, "z": rows(2)}),
            ((), {"z": rows(2), "x": rows(2)}),
        ):
            check(one, f, rows(2), *args, **kwargs)
    assert len(one.traces) == 7


@pytest.mark.parametrize("guards", GUARDS)
def test_the_order_of_keys_and_keywords(guards: str) -> None:
    def of_dict(d):
        return torch.cat(list(d.values()))

    def of_keywords(**d):
        return torch.cat(list(d.values()))

    a, b = rows(2), rows(2)
    one, other = compiled(of_dict, guards=guards), compiled(of_keywords, guards=guards)
    for _ in range(2):
        for d in ({"a": a, "b": b}, {"b": b, "a": a}):
            check(one, of_dict, d)
            check(other, of_keywords, **d)
    assert (len(one.traces), len(other.traces)) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("guards", GUARDS)
def test_tensors_that_differ(guards: str) -> None:
    def f(x):
        grad = 3 if x.requires_grad else 1
        return x.float() * x.dim() * grad * (2 if x.is_contiguous() else 5) * x.stride(-1)

    one = compiled(f, guards=guards)
    kinds = [
        lambda: rows(3, 4),
        lambda: rows(4, 3),
        lambda: rows(3, 4).double(),
        lambda: rows(3, 4).half(),
        lambda: rows(3, 4, 1),
        lambda: torch.nn.Parameter(rows(3, 4)),
        lambda: rows(3, 4).requires_grad_(),
        lambda: rows(4, 3).t(),
        lambda: rows(3, 8)[:, ::2],
        lambda: rows(3, 12)[:, ::3],
    ]
    for _ in range(2):
        for kind in kinds:
            check(one, f, kind())
    assert len(one.traces) == len(kinds)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("order", [(True, False), (False, True)])
@pytest.mark.parametrize("guards", GUARDS)
def test_one_tensor_twice_or_two(guards: str, order: Any, written: bool) -> None:
    def f(x, pair):
        if written:
            x.add_(1)
        return x * 2 + pair[0] * 3 + pair[1]

    one = compiled(f, guards=guards, dynamic_dims={"x": 0, "pair": 0})
    for same in (*order, *order):
        for size in (3, 1, 5):
            x, y, z = rows(size), rows(size), rows(size)
            pair = [x, z] if same else [y, z]
            copy = x.clone()
            expected = f(copy, [copy, z] if same else [y, z])
            assert torch.equal(one(x, pair), expected)
            assert torch.equal(x, copy)
    assert len(one.traces) == 2


@pytest.mark.parametrize("guards", GUARDS)
def test_an_object_that_died_is_not_none(guards: str) -> None:
    def f(x, thing):
        return x * 2 if thing is None else x * 3

    one = compiled(f, guards=guards)
    thing = Thing()
    check(one, f, rows(2), thing)
    del thing
    gc.collect()
    check(one, f, rows(2), None)
    check(one, f, rows(2), Thing())
    check(one, f, rows(2), None)


@pytest.mark.parametrize("guards", GUARDS)
def test_none_and_a_tensor(guards: str) -> None:
    def f(x, mask=None):
        return x * 2 if mask is None else x * mask

    one = compiled(f, guards=guards, dynamic_dims={"x": 0, "mask": 0})
    for size in (2, 3):
        check(one, f, rows(size), None)
        check(one, f, rows(size), rows(size))
        check(one, f, rows(size), mask=rows(size))
        check(one, f, rows(size))
    assert len(one.traces) == 4


@pytest.mark.parametrize("bad", [(), (1, 2, 3)])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_call_that_python_refuses(bad: Any, frozen: bool) -> None:
    def f(x, y=1):
        return x * y

    one = compiled(f)
    check(one, f, rows(2))
    if frozen:
        one.freeze()
    with pytest.raises(TypeError, match="argument"):
        one(*bad)
    with pytest.raises(TypeError, match="argument"):
        one(rows(2), z=1)
    check(one, f, rows(2))
    assert len(one.traces) == 1


def test_results_are_what_the_function_builds() -> None:
    def f(x, n):
        return {"pair": Pair(x * 2, n), "same": x, "list": [x.shape[0], None, "text"]}

    one = compiled(f, guards="none", dynamic_dims={"x": 0})
    for size in (1, 3, 5):
        x = rows(size)
        result = one(x, 7)
        assert torch.equal(result["pair"].a, x * 2)
        assert type(result["pair"]) is Pair
        assert result["same"] is x
        assert result["list"] == [size, None, "text"]
        assert result["pair"].b == 7
    assert len(one.traces) == 1


def test_a_call_that_computes_nothing() -> None:
    one = compiled(lambda x, n: (x, n + 1), guards="none")
    x = rows(2)
    assert one(x, 1) == (x, 2)
    assert one(x, 2) == (x, 3)
    assert len(one.traces) == 2
    # Up to torch 2.13 the sum of numbers is a graph, of which nothing is compiled or captured.
    assert [graph.split.pieces for graph in one.backend.graphs] in ([], [()])
