"""The text of a graph: equal for the same computation, different for everything that matters."""

import enum
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from cgcompile.passes.split import GraphText, Unnameable


class Number(enum.IntEnum):
    ONE = 1


class Other(enum.IntEnum):
    ONE = 1


Pair = namedtuple("Pair", ["first", "second"])


def mine(x: Any, *_: Any) -> Any:
    return x


def graph_of(*arguments: Any, target: Any = torch.add, inputs: int = 1, **named: Any) -> fx.Graph:
    """A graph of one call; each input is a tensor of its own memory."""
    graph = fx.Graph()
    for number in range(inputs):
        graph.placeholder(f"x{number}").meta["example_value"] = torch.ones(2)
    first = next(iter(graph.nodes))
    result = graph.call_function(target, (first, *arguments), named)
    result.meta["example_value"] = torch.ones(2)
    graph.output((result,))
    return graph


def text_of(graph: fx.Graph, *, lasting: bool = False, **attributes: Any) -> str:
    module = torch.nn.Module()
    for name, held in attributes.items():
        setattr(module, name, held)
    return GraphText(lasting=lasting).of(module, graph)


ARGUMENTS = [
    1,
    1.0,
    True,
    0.0,
    -0.0,
    float("nan"),
    "1",
    None,
    Number.ONE,
    Other.ONE,
    (1, 2),
    [1, 2],
    Pair(1, 2),
    {"a": 1},
    {"a": "1"},
    slice(1, 2),
    slice(1, 2, 1),
    ...,
    "Ellipsis",
    torch.float32,
    "torch.float32",
    torch.device("cpu"),
    torch.strided,
    torch.channels_last,
    torch.sin,
]


@pytest.mark.parametrize("lasting", [False, True])
def test_arguments_are_told_apart(lasting: bool) -> None:
    texts = [text_of(graph_of(argument), lasting=lasting) for argument in ARGUMENTS]
    assert len(set(texts)) == len(ARGUMENTS)
    assert texts == [text_of(graph_of(argument), lasting=lasting) for argument in ARGUMENTS]
    assert text_of(graph_of(alpha=1), lasting=lasting) not in texts


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: 1j, "a complex is among its arguments"),
        (lambda: torch.ones(2), "a Tensor is among its arguments"),
        (lambda: torch.Generator(), "a Generator is among its arguments"),
        (lambda: lambda x: x, "a function is among its arguments"),
    ],
)
def test_objects_without_a_name_are_told_apart_in_one_process(
    make: Callable[[], Any], why: str
) -> None:
    one, other = make(), make()
    if one is not other:
        assert text_of(graph_of((one,))) != text_of(graph_of((other,)))
    assert text_of(graph_of((one,))) == text_of(graph_of((one,)))
    with pytest.raises(Unnameable, match=why):
        text_of(graph_of((one,)), lasting=True)


def test_functions_without_a_name() -> None:
    def another(x: Any) -> Any:
        return x

    graphs = [graph_of(target=target) for target in (mine, another, torch.add, torch.mul)]
    assert len({text_of(graph) for graph in graphs}) == 4
    assert text_of(graphs[0]) == text_of(graph_of(target=mine))
    with pytest.raises(Unnameable, match="it calls mine, whose code is not torch's"):
        text_of(graphs[0], lasting=True)


def placed(*values: Any) -> str:
    graph = fx.Graph()
    for number, value in enumerate(values):
        graph.placeholder(f"x{number}").meta["example_value"] = value
    graph.output(())
    return text_of(graph)


def test_inputs_are_told_apart() -> None:
    base, nested = torch.ones(4), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    groups = [
        (torch.ones(4), torch.ones(4)),
        (base, base[:4]),
        (base[:2], base[2:]),
        (torch.ones(2), torch.ones(2)),
        (torch.ones(4), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4), torch.ones(8)[::2]),
        (torch.ones(4), torch.nn.Parameter(torch.ones(4), requires_grad=False)),
        (torch.ones(4), torch.ones(4, requires_grad=True)),
        (torch.ones(4), torch.ones(4).to_sparse()),
        (torch.ones(4), torch.ones(4, dtype=torch.complex64)),
        (torch.ones(4), torch.ones(4, dtype=torch.complex64).conj()),
        (torch.ones(4), nested),
        (torch.ones(4), 4),
        (torch.ones(4), 4.0),
    ]
    texts = [placed(*group) for group in groups]
    assert len(set(texts)) == len(groups)
    assert placed(torch.ones(4), torch.ones(4)) == texts[0]


def with_body(body: fx.GraphModule) -> str:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    branch = graph.get_attr("body")
    graph.output((graph.call_function(mine, (branch, x)),))
    return text_of(graph, body=body)


def test_bodies_and_constants() -> None:
    bodies = [
        fx.GraphModule({}, graph_of(argument, target=target))
        for argument, target in ((1, torch.add), (2, torch.add), (1, torch.mul))
    ]
    assert len({with_body(body) for body in bodies}) == 3
    assert with_body(bodies[0]) == with_body(fx.GraphModule({}, graph_of(1)))

    graph = fx.Graph()
    graph.output((graph.get_attr("constant"),))
    one, other = torch.zeros(2), torch.zeros(2)
    assert text_of(graph, constant=one) == text_of(graph, constant=one)
    assert text_of(graph, constant=one) != text_of(graph, constant=other)  # one may be written
    texts = {text_of(graph, constant=value, lasting=True) for value in (one, other, one + 1)}
    assert len(texts) == 2
