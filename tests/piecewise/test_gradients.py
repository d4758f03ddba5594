"""A compiled model must never return detached results where eager returns differentiable ones."""

import pytest
import torch
from cases import CASES, D
from support import build

import cgcompile
from cgcompile.reasons import Reason


@pytest.mark.parametrize("compiler", ["eager", "aot", "inductor"])
def test_step_with_gradients_is_differentiable_and_counted(compiler: str) -> None:
    model, backend = build(CASES["sdpa"]), cgcompile.Backend(compiler=compiler)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(6, 4, D)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)
    (graph,) = backend.graphs
    assert graph.counters.calls == 1
    assert graph.counters.plain == {Reason.GRADIENTS: 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_without_gradients_runs_the_compiled_pieces(mode) -> None:
    model, backend = build(CASES["sdpa"]), cgcompile.Backend(compiler="aot")
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(6, 4, D)
    with mode():
        found = compiled(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, model(x).detach())
    assert backend.graphs[0].counters.plain == {}


def test_grad_mode_without_inputs_that_require_it() -> None:
    model, backend = build(CASES["sdpa"]).requires_grad_(False), cgcompile.Backend(compiler="aot")
    compiled, x = torch.compile(model, backend=backend), torch.randn(6, 4, D)
    assert not compiled(x).requires_grad
    assert backend.graphs[0].counters.plain == {}
    y = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(y).sum(), y)
    (expected,) = torch.autograd.grad(model(y).sum(), y)
    torch.testing.assert_close(gradient, expected)


def test_a_region_that_turns_gradients_on_stays_differentiable_inside() -> None:
    class Force(torch.nn.Module):
        def forward(self, x):
            h = x.sin() * 2
            with torch.enable_grad():
                y = (h * 3).cos()
            return y * 2

    backend = cgcompile.Backend(compiler="aot")
    x = torch.randn(6, D)
    with torch.no_grad():
        found = torch.compile(Force(), backend=backend)(x)
    torch.testing.assert_close(found, Force()(x))
    pieces = backend.graphs[0].split.pieces
    assert [piece.capture for piece in pieces] == [True, False, True]
    assert pieces[1].why[0].reason is Reason.GRADIENTS


def test_grad_mode_is_what_it_was_after_every_step() -> None:
    model, backend = (
        build(CASES["grad_mode"]).requires_grad_(False),
        cgcompile.Backend(compiler="aot"),
    )
    compiled, x = torch.compile(model, backend=backend), torch.randn(6, 4, D)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(compiled(x), model(x))
            assert torch.is_grad_enabled() is enabled
