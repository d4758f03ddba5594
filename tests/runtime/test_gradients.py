"""A compiled model must never return detached results where eager returns differentiable ones."""

from contextlib import nullcontext

import pytest
import torch
from lib.asserts import build
from lib.cases import CASES, D
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cgcompile
from cgcompile.reasons import Reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_step_with_gradients_is_differentiable_and_counted(compiler: str) -> None:
    model, backend = build(CASES["sdpa"]), cgcompile.Backend(compiler=compiler)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(6, 4, D)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    grads = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    torch.testing.assert_close(grads, expected)
    (graph,) = backend.graphs
    assert graph.counters.calls == 1
    assert graph.counters.plain == {Reason.GRADIENTS: 1}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_without_gradients_runs_the_compiled_pieces(mode) -> None:
    model, backend = build(CASES["sdpa"]), cgcompile.Backend(compiler="aot")
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(6, 4, D)
    with mode():
        result = compiled(x)
    assert not result.requires_grad
    torch.testing.assert_close(result, model(x).detach())
    assert backend.graphs[0].counters.plain == {Reason.NO_DEVICE: 1}


@pytest.mark.slow
def test_grad_mode_without_inputs_that_require_it() -> None:
    model, backend = build(CASES["sdpa"]).requires_grad_(False), cgcompile.Backend(compiler="aot")
    compiled, x = torch.compile(model, backend=backend), torch.randn(6, 4, D)
    assert not compiled(x).requires_grad
    assert backend.graphs[0].counters.plain == {Reason.NO_DEVICE: 1}
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
        result = torch.compile(Force(), backend=backend)(x)
    torch.testing.assert_close(result, Force()(x))
    pieces = backend.graphs[0].split.pieces
    assert [piece.capture for piece in pieces] == [True, False, True]
    assert pieces[1].why[0].reason is Reason.GRADIENTS


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_forward_that_turns_gradients_off_runs_the_compiled_pieces() -> None:
    for decorate in (torch.no_grad, torch.inference_mode):

        class Decorated(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(D, D)

            @decorate()
            def forward(self, x):
                h = self.linear(x)
                return self.linear(torch.nn.functional.scaled_dot_product_attention(h, h, h))

        torch._dynamo.reset()
        model, backend = Decorated(), cgcompile.Backend(compiler="aot")
        x = torch.randn(6, 4, D)
        result = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(result, model(x))
        assert not result.requires_grad
        assert result.is_inference() is (decorate is torch.inference_mode)
        (graph,) = backend.graphs
        assert graph.counters.plain == {Reason.NO_DEVICE: 1}
        assert [piece.capture for piece in graph.split.pieces] == [True, False, True]


def test_grad_mode_is_restored_where_an_op_raises() -> None:
    lib = torch.library.Library("cggrad", "FRAGMENT")
    lib.define("boom(Tensor x, Tensor flag) -> Tensor")

    def boom(x, flag):
        if flag.item() > 0:
            raise RuntimeError("boom")
        return x.clone()

    lib.impl("boom", boom, "CPU")
    torch.library.register_fake("cggrad::boom", lambda x, flag: torch.empty_like(x), lib=lib)

    def step(x, flag):
        with torch.no_grad():
            x = torch.ops.cggrad.boom(x.sin(), flag)
        return x.cos()

    backend = cgcompile.Backend(compiler="aot", splitting_ops=("cggrad::boom",))
    compiled, x = torch.compile(step, backend=backend), torch.randn(4)
    compiled(x, torch.tensor(0))
    with pytest.raises(RuntimeError, match="boom"):
        compiled(x, torch.tensor(1))
    assert torch.is_grad_enabled()
    torch.testing.assert_close(compiled(x, torch.tensor(0)), x.sin().cos())  # the next call works


@pytest.mark.slow
def test_nested_gradients_with_grad_mode_on() -> None:
    def step(x):
        g = torch.func.grad(lambda t: (t.sin() ** 2).sum())(x)
        return torch.nn.functional.scaled_dot_product_attention(g, g, g)

    x = torch.randn(3, 4, D)
    for compiler in ("eager", "aot", "inductor"):
        torch._dynamo.reset()
        result = torch.compile(step, backend=cgcompile.Backend(compiler=compiler))(x)
        torch.testing.assert_close(result, step(x))


@pytest.mark.slow
def test_constants_of_the_graph_that_require_gradients() -> None:
    model, backend = build(CASES["sdpa"]), cgcompile.Backend(compiler="aot")
    x = torch.randn(6, 4, D)
    with torch._dynamo.config.patch(install_free_tensors=True):
        compiled = torch.compile(model, backend=backend)
        grads = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        torch.testing.assert_close(grads, expected)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    assert len(backend.graphs[0].split.constants) == 4
    assert backend.graphs[0].counters.plain == {Reason.GRADIENTS: 1}


class Checkpointed(torch.nn.Module):
    """Blocks with dropout, which a backward pass with other random numbers gets wrong."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(2))
        self.options = {"use_reentrant": False, **options}

    def block(self, linear, x):
        return torch.nn.functional.dropout(linear(x).sin(), 0.5) * 2

    def forward(self, x):
        for linear in self.linears:
            x = checkpoint(self.block, linear, x, **self.options) + 1
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class InEachOther(Checkpointed):
    def block(self, linear, x):
        inner = checkpoint(super().block, linear, x, use_reentrant=False)
        return torch.nn.functional.dropout(inner, 0.5)


class InARegion(Checkpointed):
    def forward(self, x):
        with torch.enable_grad():
            return super().forward(x)


def keep_products():
    def policy(context, op, *args, **kwargs):
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTED = {
    "plain": Checkpointed,
    "reentrant": lambda: Checkpointed(use_reentrant=True),
    "selective": lambda: Checkpointed(context_fn=keep_products),
    "nested": InEachOther,
    "region": InARegion,
}


def gradients(step, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    result = step(x)
    torch.manual_seed(8)  # other random numbers than those of the forward pass
    model.zero_grad()
    with torch.enable_grad():
        result.square().sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("entry", ["torch.compile", "cgcompile.compile", "uncompiled"])
def test_a_checkpointed_step_has_the_gradients_of_eager(name: str, entry: str) -> None:
    torch._dynamo.reset()
    model = CHECKPOINTED[name]()
    none = {"mode": "NONE", "cudagraph_mode": "NONE"}
    backend = cgcompile.Backend(**(none if entry == "uncompiled" else {"compiler": "aot"}))
    compiled = (
        cgcompile.compile(model, backend)
        if entry == "cgcompile.compile"
        else torch.compile(model, backend=backend)
    )
    for _ in range(3):
        x = torch.randn(3, 4, D, requires_grad=True)
        expected, grads = gradients(model, model, x), gradients(compiled, model, x)
        torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    assert backend.counters.plain == ({} if entry == "uncompiled" else {Reason.GRADIENTS: 3})
    with torch.no_grad():
        assert compiled(x).shape == x.shape


def test_a_checkpoint_where_a_model_turns_gradients_on() -> None:
    model, backend = InARegion(), cgcompile.Backend(compiler="aot")
    compiled, x = torch.compile(model, backend=backend), torch.randn(3, 4, D)
    with torch.no_grad():
        grads, expected = gradients(compiled, model, x), gradients(model, model, x)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def pushed_forward(function, x: torch.Tensor) -> torch.Tensor | None:
    """The forward gradient of a function at x, in a direction that x gives."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos()))).tangent


@pytest.mark.parametrize("context", [False, True], ids=["auto", "context"])
@pytest.mark.parametrize("guards", ["keep", "none"])
def test_forward_gradients_are_not_lost_in_a_replay(guards: str, context: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    compiled = cgcompile.compile(model, guards=guards, compiler="eager", capture_device="host")
    batch, mode = cgcompile.BatchDescriptor(6), cgcompile.CUDAGraphMode.FULL
    x = torch.zeros(6, D)
    for step in range(8):
        x.normal_()
        step_context = cgcompile.set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=batch
        )
        with torch.no_grad(), step_context if context else nullcontext():
            if step % 4 < 3:
                torch.testing.assert_close(compiled(x), model(x))
            else:
                tangents, expected = pushed_forward(compiled, x), pushed_forward(model, x)
                assert expected is not None
                torch.testing.assert_close(tangents, expected)
    counters = compiled.backend.counters
    assert counters.plain[Reason.GRADIENTS] == 2, counters
    assert counters.replays >= 4, counters


def test_forward_gradients_are_not_lost_in_a_wrapper() -> None:
    config = cgcompile.CompilationConfig(capture_device="host")
    wrapper, x = cgcompile.CUDAGraphWrapper(torch.sin, config), torch.zeros(3)
    mode, batch = cgcompile.CUDAGraphMode.FULL, cgcompile.BatchDescriptor(3)
    with torch.no_grad():
        for step in range(4):
            x.normal_()
            with cgcompile.set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch):
                torch.testing.assert_close(wrapper(x), x.sin())
                if step > 1:
                    torch.testing.assert_close(pushed_forward(wrapper, x), x.cos() * x.cos())
    assert wrapper.counters.plain == {Reason.GRADIENTS: 2}, wrapper.counters
