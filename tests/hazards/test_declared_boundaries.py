"""A declared splitting op is found however the model spells it, or a warning names it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import COMPILED, ROWS, WIDTH, compiled, settings

import cgcompile
from cgcompile.reasons import Reason

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch": lambda x: torch.sigmoid(x + 1) * 2,
    "functional": lambda x: F.sigmoid(x + 1) * 2,
    "method": lambda x: (x + 1).sigmoid() * 2,
    "packet": lambda x: torch.ops.aten.sigmoid(x + 1) * 2,
    "overload": lambda x: torch.ops.aten.sigmoid.default(x + 1) * 2,
    "module": lambda x: torch.nn.Sigmoid()(x + 1) * 2,
}
DECLARED: tuple[Any, ...] = (
    "aten::sigmoid",
    "aten::sigmoid.default",
    "aten.sigmoid",
    "torch.sigmoid",
    "aten::sigm*d",
    torch.sigmoid,
    F.sigmoid,
    torch.Tensor.sigmoid,
    torch.ops.aten.sigmoid,
    torch.ops.aten.sigmoid.default,
)


def steps(name: str, step: Callable[..., Any], device: str, *ops: Any, **more: Any) -> Any:
    served = compiled(name, step, settings(device, splitting_ops=ops, **more))
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), step(x))
    return served.target


def boundaries(backend: Any) -> int:
    found = [why for piece in backend.graphs[-1].split.pieces for why in piece.why]
    return sum(why.reason is Reason.SPLITTING_OP for why in found)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("call", CALLS)
def test_every_spelling_of_an_op_is_the_op(name: str, call: str, caplog: Any, device: str) -> None:
    for op in DECLARED:
        torch._dynamo.reset()
        backend = steps(name, CALLS[call], device, op, cudagraph_mode="PIECEWISE")
        assert boundaries(backend) == 1, op
        assert backend.counters.replays >= 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("op", "step"),
    [
        ("aten::sigmoid", lambda x: (x + 1).sigmoid_() * 2),
        ("aten::sigmoid_", lambda x: (x + 1).sigmoid() * 2),
        ("aten::relu", lambda x: F.relu(x + 1, inplace=True) * 2),
        ("aten::add", lambda x: x.view(x.shape[0] + 0, -1) * 2),
    ],
)
def test_other_ops_are_not_the_op(op: str, step: Any, caplog: Any, device: str) -> None:
    backend = steps("torch.compile", step, device, op)
    assert boundaries(backend) == 0
    assert backend.counters.replays >= 2
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith(f"splitting op {op} is in no graph")


@pytest.mark.parametrize("name", COMPILED)
def test_an_op_that_is_in_no_graph_is_told_once(name: str, caplog: Any, device: str) -> None:
    backend = steps(name, CALLS["torch"], device, "aten::log_sigmoid_forward", torch.cos)
    assert boundaries(backend) == 0
    found = sorted(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert [text.split(" is in no graph")[0] for text in found] == [
        "splitting op aten::log_sigmoid_forward",
        "splitting op torch.cos",
    ]
    assert "Similar in the graphs: aten::sigmoid" in found[0]


def test_an_op_in_another_graph_of_the_model_is_not_told(caplog: Any, device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return torch.sigmoid(y) * 2

    backend = steps("torch.compile", step, device, "aten::sigmoid", num_warmups=1)
    assert len(backend.graphs) == 2
    assert backend.counters.replays >= 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_function_is_found_in_a_breakable_capture(device: str) -> None:
    model = torch.nn.Module()
    model.forward = CALLS["method"]
    config = settings(device, splitting_ops=(torch.sigmoid,))
    wrapper = cgcompile.BreakableCUDAGraphWrapper(model, config, cgcompile.CUDAGraphMode.PIECEWISE)
    static = torch.empty(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for _ in range(3):
            static.copy_(torch.randn_like(static))
            with cgcompile.set_forward_context(
                cudagraph_runtime_mode=cgcompile.CUDAGraphMode.PIECEWISE,
                batch_descriptor=cgcompile.BatchDescriptor(ROWS),
            ):
                torch.testing.assert_close(wrapper(static), CALLS["method"](static))
    (entry,) = wrapper.entries
    assert entry.sequence.num_eager_breaks == 1
    assert wrapper.counters.replays == 2


@pytest.mark.parametrize("name", COMPILED)
def test_entries_of_one_op_are_met_together(name: str, caplog: Any, device: str) -> None:
    for ops in (
        ("aten::sigmoid", torch.sigmoid),
        ("aten::sigmoid", "aten::sigmoid.default"),
        (torch.sigmoid, torch.Tensor.sigmoid, torch.ops.aten.sigmoid),
    ):
        for call in ("torch", "method", "overload"):
            torch._dynamo.reset()
            backend = steps(name, CALLS[call], device, *ops, cudagraph_mode="PIECEWISE")
            assert boundaries(backend) == 1, ops
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", COMPILED)
def test_a_call_in_place_by_position_is_the_op_in_place(
    name: str, caplog: Any, device: str
) -> None:
    for step in (lambda x: F.relu(x + 1, True) * 2, lambda x: F.relu(x + 1, inplace=True) * 2):
        torch._dynamo.reset()
        backend = steps(name, step, device, "aten::relu_", cudagraph_mode="PIECEWISE")
        assert boundaries(backend) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
