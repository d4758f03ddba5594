"""Regions and pieces that run without graphs: results are eager's, and the reason is counted."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lib.front_ends import (
    COMPILED,
    FRONT_ENDS,
    MANAGERS,
    ROWS,
    WIDTH,
    WRAPPERS,
    assert_steps_equal_eager,
    check,
    compiled,
    context,
    front_end,
    layers,
    settings,
    wrapped,
)

import cgcompile
from cgcompile.errors import CaptureError, DispatchError
from cgcompile.reasons import Counters, Reason

# ---------------------------------------------------------------- graphs of eager pieces alone


def in_region(x: torch.Tensor) -> torch.Tensor:
    with cgcompile.eager_region():
        return x * 2 + 1


# What must run eager; what was declared to, and is legal under strict.
UNWANTED: dict[str, tuple[Callable[..., Any], Reason]] = {
    "nonzero": (lambda x: x.nonzero() + 1, Reason.HOST_SYNC),
    "unique": (lambda x: x.unique(), Reason.HOST_SYNC),
}
DECLARED: dict[str, tuple[Callable[..., Any], Reason]] = {
    "region": (in_region, Reason.EAGER_REGION),
    "op": (lambda x: torch.sigmoid(x), Reason.SPLITTING_OP),
    "views": (lambda x: x.view(-1)[1:], Reason.NO_KERNEL),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", [*UNWANTED, *DECLARED])
def test_a_graph_of_eager_pieces_alone(kind: str, name: str, device: str) -> None:
    step, reason = {**UNWANTED, **DECLARED}[kind]

    def run(strict: bool) -> Counters:
        config = settings(
            device, splitting_ops=("aten::sigmoid",), on_fallback="raise" if strict else "warn"
        )
        served = compiled(name, step, config)
        patch = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
        with torch._dynamo.config.patch(patch):
            check(served.step, step, device, steps=3)
        return served.counters()

    counters = run(strict=kind in DECLARED)
    assert dict(counters.plain) == {reason: 3}
    if kind in UNWANTED:
        assert counters.details[reason].startswith("every piece runs eager; piece_0: ")
        with pytest.raises(DispatchError, match=reason.value):
            run(strict=True)


# ---------------------------------------------------------------- calls inside of a region


@pytest.mark.parametrize("name", FRONT_ENDS)
@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_front_end_called_in_a_region(name: str, first: str, device: str) -> None:
    model = layers(device)
    served = front_end(name, model, device, on_fallback="warn" if name in MANAGERS else "raise")
    if name in MANAGERS:
        check(served.step, model, device)  # the first step captures
    if first == "outside":
        check(served.step, model, device, steps=4)
    before = served.counters()
    with cgcompile.eager_region():
        check(served.step, model, device, steps=3)
    inside = served.counters()
    assert (inside.captures, inside.replays) == (before.captures, before.replays)
    if name not in MANAGERS:
        assert inside.plain[Reason.EAGER_REGION] == before.plain[Reason.EAGER_REGION] + 3
    check(served.step, model, device, steps=4)
    assert served.counters().replays >= before.replays + 2


def callee(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def region_around_a_break(x: torch.Tensor) -> torch.Tensor:
    x = x - 1
    with cgcompile.eager_region():
        x = callee(x)
        x = x + 5
    return x


def test_a_callee_with_a_graph_break(device: str) -> None:
    served = compiled("torch.compile", region_around_a_break, settings(device, on_fallback="raise"))
    check(served.step, region_around_a_break, device, steps=5)
    counters = served.counters()
    assert counters.captures == counters.replays == 0
    assert counters.plain[Reason.EAGER_REGION] == counters.calls == 10


@pytest.mark.slow
def test_a_callee_that_is_also_called_elsewhere(device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return callee(x) + region_around_a_break(x)

    served = compiled("torch.compile", step, settings(device))
    check(served.step, step, device, steps=6)
    assert served.counters().plain[Reason.EAGER_REGION] == 12
    assert served.counters().replays >= 8


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_flow_through_a_region(name: str, device: str) -> None:
    model = layers(device).requires_grad_(True)
    served = front_end(name, model, device)
    x = torch.randn(4, WIDTH, device=device)
    with cgcompile.eager_region():
        served.step(x).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("name", COMPILED)
def test_an_op_in_a_region_reads_the_context_of_the_step(name: str, device: str) -> None:
    seen = []

    @torch.library.custom_op(f"cghazard::read_{COMPILED.index(name)}", mutates_args=())
    def read(x: torch.Tensor) -> torch.Tensor:
        seen.append(cgcompile.get_forward_context().attn_metadata)
        return x * 2

    read.register_fake(torch.empty_like)
    served = compiled(name, lambda x: read(x) + 1, settings(device))
    for number in range(3):
        metadata = {"step": number}
        with cgcompile.set_forward_context(metadata), cgcompile.eager_region():
            check(served.step, lambda x: x * 2 + 1, device)
        assert seen[-1] is metadata
    assert served.counters().plain[Reason.EAGER_REGION] == 3


def test_a_region_ends_and_nests_and_is_of_its_thread(device: str) -> None:
    model = layers(device)
    served = front_end("torch.compile", model, device)
    region = cgcompile.eager_region()
    check(served.step, model, device, steps=3)
    with region, cgcompile.eager_region():
        pass
    with pytest.raises(ZeroDivisionError), cgcompile.eager_region():
        raise ZeroDivisionError
    check(served.step, model, device)
    replays = served.counters().replays
    with cgcompile.eager_region(), ThreadPoolExecutor(1) as pool:
        pool.submit(check, served.step, model, device).result()
    assert served.counters().replays == replays + 1
    assert Reason.EAGER_REGION not in served.counters().plain


# ---------------------------------------------------------------- regions inside of a model


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_region_inside_of_a_capture_is_an_error(name: str, device: str) -> None:
    served = wrapped(name, in_region, settings(device))
    with pytest.raises(CaptureError, match="eager_break_during_capture"):
        check(served.step, in_region, device)
    assert served.counters().captures == 0


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("compiler", ["eager", "aot"])
def test_a_region_that_only_makes_a_view_of_written_memory(
    name: str, compiler: str, device: str
) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        with cgcompile.eager_region():
            view = y[:, 2:6]  # is computed in the next piece; this piece is left empty
        y.mul_(0.5)
        return torch.cat((view, y[:, :4]), 1), view + y.mean()

    served = compiled(name, step, settings(device, compiler=compiler))
    assert_steps_equal_eager(served, step, device, [ROWS] * 4, replays=2)


def view_beside_captured_memory(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return memory of an input that no captured piece reads."""
    doubled = state * 2
    with cgcompile.eager_region():
        same = x[:]
    state.copy_(doubled + 1)
    return same


def view_of_captured_memory(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return memory of an input that a captured piece reads by another name."""
    with cgcompile.eager_region():
        same = x[:]
    state.copy_(same + 1)
    return same


@pytest.mark.parametrize("in_context", [True, False], ids=["context", "no_context"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("step", [view_beside_captured_memory, view_of_captured_memory])
def test_a_view_of_an_input_that_a_region_returns_stays_the_input(
    step: Callable[..., torch.Tensor], name: str, in_context: bool, device: str
) -> None:
    served = compiled(name, step, settings(device, cudagraph_mode="PIECEWISE"))
    x, state = (torch.zeros(4, WIDTH, device=device) for _ in range(2))
    for _ in range(6):
        x.normal_()
        state.normal_()
        expected_state = state.clone()
        step(x, expected_state)
        piecewise = context(mode=cgcompile.CUDAGraphMode.PIECEWISE) if in_context else nullcontext()
        with torch.no_grad(), piecewise:
            same = served.step(x, state)
        assert same.data_ptr() == x.data_ptr()
        torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    assert served.counters().replays >= 4
