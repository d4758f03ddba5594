"""Strides of inputs that are copied are those of the copies, and no reason for another graph."""

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, set_forward_context
from cgcompile.errors import HostValueChangedError
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")

CALLS = 12


def compiled(model: nn.Module, guards: str, **settings: Any) -> tuple[Any, cgcompile.Backend]:
    backend = cgcompile.Backend(**{"compiler": "eager", "capture_device": "host", **settings})
    if guards:
        name = next(iter(inspect.signature(model.forward).parameters))
        return cgcompile.compile(model, backend, guards=guards, dynamic_dims={name: 0}), backend
    return torch.compile(model, backend=backend), backend


def in_context(under_context: bool) -> Any:
    if not under_context:
        return nullcontext()
    return set_forward_context(cudagraph_runtime_mode="FULL", batch_descriptor=BatchDescriptor(2))


class Last(nn.Module):
    """Takes a column of a tensor that grows, such as the ids of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids).sum(1)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("under_context", [False, True], ids=["no context", "context"])
@pytest.mark.parametrize("guards", ["", "keep", "shape", "none"])
def test_a_column_of_what_grows_is_replayed(
    guards: str, under_context: bool, compiler: str
) -> None:
    model = Last().eval()
    step, backend = compiled(model, guards, compiler=compiler, on_input_change="copy")
    ids = torch.randint(0, 50, (2, 5))
    for _ in range(CALLS):
        ids = torch.cat((ids, torch.randint(0, 50, (2, 1))), 1)
        with in_context(under_context):
            torch.testing.assert_close(step(ids[:, -1:]), model(ids[:, -1:]))
    assert backend.counters.replays >= CALLS - 5


class Reads(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        if self.what == "a number":
            return x * x.stride(0)
        if self.what == "a size":
            return torch.ones(x.stride(0)) + x.sum()
        return x * 2, x.t()


@pytest.mark.parametrize("guards", ["", "keep", "shape", "none"])
@pytest.mark.parametrize("what", ["a number", "a size", "a result"])
def test_a_stride_that_the_step_uses_has_its_own_graph(what: str, guards: str) -> None:
    model = Reads(what).eval()
    step, backend = compiled(model, guards)
    for columns in (5, 6, 7, 7, 7, 8, 8, 8, 7):
        x = torch.randn(2, columns)[:, :3]
        result, expected = step(x), model(x)
        torch.testing.assert_close(result, expected, check_stride=True)
    assert backend.counters.replays >= 2


def test_under_a_context_a_stride_that_the_step_uses_is_compared() -> None:
    step, backend = compiled(Reads("a number").eval(), "", on_input_change="copy")
    for columns in (5, 6, 6, 6):
        with in_context(True):
            x = torch.randn(2, columns)[:, :3]
            torch.testing.assert_close(step(x), x * columns)
    assert backend.counters.replays == 1
    with (
        in_context(True),
        pytest.raises(HostValueChangedError, match=r"stride\(\)\[0\]' is 7, was 6"),
    ):
        step(torch.randn(2, 7)[:, :3])


@pytest.mark.parametrize("guards", ["", "none"])
def test_rows_that_overlap(guards: str) -> None:
    """A buffer in which elements overlap holds no other layout: its strides are part of the key."""
    model = nn.Linear(4, 4).eval()
    step, backend = compiled(model, guards)
    memory = torch.randn(200)
    for stride in (9, 8, 7, 6, 2, 2, 2, 3, 5, 2):  # 2 and 3 overlap
        x = memory.normal_().as_strided((3, 4), (stride, 1))
        torch.testing.assert_close(step(x), model(x))
    counters = backend.counters
    assert not counters.plain[Reason.UNSUPPORTED_INPUT]
    assert counters.captures == 2  # of any stride without overlap, and of stride 2
    assert counters.replays == (5 if guards else 4)  # torch.compile has a static trace first


def test_which_of_two_inputs_overlaps_is_part_of_the_key() -> None:
    step, backend = compiled(Subtracts().eval(), "")
    memory = torch.randn(200)
    pairs = [(9, 8), (8, 7), *[(2, 9)] * 4, *[(9, 2)] * 4]  # 2 overlaps
    for strides in pairs:
        memory.normal_()
        starts = zip((0, 100), strides, strict=True)
        x, y = (memory[start:].as_strided((3, 4), (stride, 1)) for start, stride in starts)
        torch.testing.assert_close(step(x, y), x - 2 * y)
    assert backend.counters.replays >= 2


class Subtracts(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - 2 * y


def test_warming_names_what_differs() -> None:
    step, backend = compiled(Reads("a number").eval(), "keep")
    for columns in (5, 6, 7):
        step(torch.randn(2, columns)[:, :3])
    assert "x.stride()[0] is 7, was 6" in backend.counters.details[Reason.WARMING]
    step, backend = compiled(nn.Linear(4, 4).eval(), "keep")
    for rows in (3, 5):
        step(torch.randn(rows, 4))
    assert "input.size()[0] is 5, was 3" in backend.counters.details[Reason.WARMING]
