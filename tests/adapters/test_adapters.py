"""Adapters compose: subclasses, numbers and padded lengths around one compiled graph."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazards.test_subclasses import Int8
from lib.front_ends import COMPILED, WIDTH, settings
from torch import nn

import cgcompile
from cgcompile.adapters.adapter import AdaptedGraph, Adapter, Prepared
from cgcompile.reasons import Fallback, Reason, RunPlain

LENGTHS = (8, 16)


class Encoder(nn.Module):
    """Attention under a mask, over an int8 weight, times a Python float; returns floats as well."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH, device=device)
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.requires_grad_(False)
        weight = Int8.of(self.linear.weight.detach())
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, scale: float) -> Any:
        x = self.linear(self.embedding(ids)) * scale
        mask = attention_mask[:, None, :].bool()
        return scale * 2, F.scaled_dot_product_attention(x, x, x, mask), scale + 1


def batch(length: int, device: str) -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(50, (2, length)), torch.ones(2, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"ids": ids.to(device), "attention_mask": mask.to(device)}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_subclasses_numbers_and_padding(name: str, device: str) -> None:
    """Results equal eager, and all lengths and floats share the graphs of two lengths."""
    model = Encoder(device)
    backend = cgcompile.Backend(settings(device, pad_lengths=LENGTHS))
    if name == "torch.compile":
        step: Any = torch.compile(model, backend=backend, dynamic=True)
    else:
        dims = {"ids": {1: "length"}, "attention_mask": {1: "length"}}
        step = cgcompile.compile(model, backend, dynamic_dims=dims)
    with torch.inference_mode():
        for number in range(20):
            inputs, scale = batch(5 + 5 * (number % 3) + number // 10, device), 0.5 + number / 32
            doubled, hidden, more = step(**inputs, scale=scale)
            expected = model(**inputs, scale=scale)
            assert (doubled, more) == (expected[0], expected[2]), number
            assert isinstance(doubled, float)
            torch.testing.assert_close(hidden, expected[1])
            if number == 9:
                compiled, traces = backend.counters, backend.num_compilations
    counters = backend.counters
    assert not counters.degraded, counters
    assert set(counters.plain) == {Reason.WARMING}, counters
    assert counters.captures == compiled.captures >= len(LENGTHS)
    assert counters.replays == compiled.replays + 10
    assert backend.num_compilations == traces


def test_the_order_of_adapters(device: str) -> None:
    """Inputs pass from the first adapter to the last, results from the last to the first."""

    def adapter(name: str, refuses: bool = False) -> Adapter:
        def prepare(inputs: tuple[Any, ...]) -> Prepared:
            if refuses:
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, name))
            return Prepared((*inputs, name), lambda result: f"{name}({result})")

        return Adapter(prepare, lambda *inputs: f"original of {name}: {inputs}")

    plain: list[Fallback] = []

    def run_plain(name: str, fallback: Fallback, function: Any) -> Any:
        plain.append(fallback)
        return function()

    def called(*adapters: Adapter) -> Any:
        graph: Any = lambda *inputs: f"graph: {inputs}"  # noqa: E731
        return AdaptedGraph(graph, adapters, run_plain)("x")

    assert called(adapter("a"), adapter("b")) == "a(b(graph: ('x', 'a', 'b')))"
    assert not plain
    refusing = adapter("a"), adapter("b", refuses=True), adapter("c")
    assert called(*refusing) == "a(original of b: ('x', 'a'))"
    assert [fallback.detail for fallback in plain] == ["b"]


def test_an_error_of_a_plain_run_is_raised_outside_of_the_refusal() -> None:
    def refuse(inputs: tuple[Any, ...]) -> Prepared:
        raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, "other parts"))

    def original(*inputs: Any) -> Any:
        raise ValueError(f"no result for {inputs}")

    graph: Any = None
    adapted = AdaptedGraph(
        graph, [Adapter(refuse, original)], lambda name, why, function: function()
    )
    with pytest.raises(ValueError, match=r"no result for \('x',\)") as caught:
        adapted("x")
    assert caught.value.__context__ is None
