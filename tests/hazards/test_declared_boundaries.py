"""A declared splitting op matches every spelling of it in the model, or a warning names it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import (
    COMPILED,
    ROWS,
    WIDTH,
    assert_steps_equal_eager,
    check,
    compiled,
    context,
    settings,
)

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
SEVERAL: tuple[tuple[Any, ...], ...] = (
    ("aten::sigmoid", torch.sigmoid),
    ("aten::sigmoid", "aten::sigmoid.default"),
    (torch.sigmoid, torch.Tensor.sigmoid, torch.ops.aten.sigmoid),
)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


def boundaries(name: str, step: Callable[..., Any], device: str, *ops: Any, **more: Any) -> int:
    """Run four steps with ``ops`` declared; return how many boundaries the last graph has."""
    torch._dynamo.reset()
    served = compiled(name, step, settings(device, splitting_ops=ops, **more))
    assert_steps_equal_eager(served, step, device, [ROWS] * 4, replays=2)
    pieces = served.target.graphs[-1].split.pieces
    return sum(why.reason is Reason.SPLITTING_OP for piece in pieces for why in piece.why)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("call", CALLS)
def test_every_spelling_of_an_op_is_the_op(
    name: str, call: str, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    for ops in (*((op,) for op in DECLARED), *SEVERAL):
        assert boundaries(name, CALLS[call], device, *ops, cudagraph_mode="PIECEWISE") == 1, ops
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    "step",
    [lambda x: F.relu(x + 1, True) * 2, lambda x: F.relu(x + 1, inplace=True) * 2],
    ids=["position", "keyword"],
)
def test_a_call_in_place_is_the_op_in_place(
    step: Any, name: str, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    assert boundaries(name, step, device, "aten::relu_", cudagraph_mode="PIECEWISE") == 1
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("op", "step"),
    [
        ("aten::sigmoid", lambda x: (x + 1).sigmoid_() * 2),
        ("aten::sigmoid_", lambda x: (x + 1).sigmoid() * 2),
        ("aten::relu", lambda x: F.relu(x + 1, inplace=True) * 2),
        ("aten::add", lambda x: x.view(x.shape[0] + 0, -1) * 2),
    ],
)
def test_other_ops_are_not_the_op(
    op: str, step: Any, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    assert boundaries("torch.compile", step, device, op) == 0
    (text,) = warnings_of(caplog)
    assert text.startswith(f"splitting op {op} is in no graph")


@pytest.mark.parametrize("name", COMPILED)
def test_an_op_that_is_in_no_graph_is_a_warning_once(
    name: str, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    assert boundaries(name, CALLS["torch"], device, "aten::log_sigmoid_forward", torch.cos) == 0
    texts = warnings_of(caplog)
    assert [text.split(" is in no graph")[0] for text in texts] == [
        "splitting op aten::log_sigmoid_forward",
        "splitting op torch.cos",
    ]
    assert "Similar in the graphs: aten::sigmoid" in texts[0]


def test_an_op_in_another_graph_of_the_model_is_no_warning(
    caplog: pytest.LogCaptureFixture, device: str
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return torch.sigmoid(y) * 2

    served = compiled("torch.compile", step, settings(device, splitting_ops=("aten::sigmoid",)))
    check(served.step, step, device, steps=4)
    assert len(served.target.graphs) == 2
    assert served.counters().replays >= 4
    assert warnings_of(caplog) == []


def test_a_function_is_found_in_a_breakable_capture(device: str) -> None:
    config = settings(device, splitting_ops=(torch.sigmoid,))
    mode = cgcompile.CUDAGraphMode.PIECEWISE
    wrapper = cgcompile.BreakableCUDAGraphWrapper(CALLS["method"], config, mode)
    static = torch.empty(ROWS, WIDTH, device=device)
    with context(mode=mode):
        check(lambda x: wrapper(static.copy_(x)), CALLS["method"], device, steps=3)
    (entry,) = wrapper.entries
    assert entry.sequence.num_eager_breaks == 1
    assert wrapper.counters.replays == 2
