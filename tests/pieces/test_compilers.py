"""Compilers of pieces: how often they run, what they may not do, and what their errors say."""

import pytest
import torch
import torch.nn.functional as F
from lib.asserts import build
from lib.cases import CASES, D, Decoder
from torch import nn

import cgcompile
from cgcompile.errors import ConfigError, PieceCompileError, SymbolError


class Recorder:
    """A user's compiler: runs the piece as it is, and remembers what it was given."""

    def __init__(self) -> None:
        self.pieces: list[torch.fx.GraphModule] = []
        self.inputs: list[list] = []
        self.grad_modes: list[bool] = []

    def __call__(self, gm, fake_inputs):
        self.pieces.append(gm)
        self.inputs.append(list(fake_inputs))
        self.grad_modes.append(torch.is_grad_enabled())
        return gm.forward


def run(model, *inputs: torch.Tensor, **settings) -> cgcompile.Backend:
    backend = cgcompile.Backend(**settings)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        torch.compile(model, backend=backend)(*inputs)
    backend.keep_alive = model
    return backend


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 6])
def test_equal_layers_are_compiled_once(layers: int) -> None:
    recorder = Recorder()
    backend = run(Decoder(layers).eval(), torch.randint(0, 32, (6, 4)), compiler=recorder)
    split = backend.graphs[0].split
    captured = [piece for piece in split.pieces if piece.capture]
    assert len(captured) == layers + 1
    assert len(split.pieces) - len(captured) == layers
    assert len(recorder.pieces) == 3  # the first, the middle ones, the last


@pytest.mark.slow
def test_layers_that_differ_in_a_constant_are_not_shared() -> None:
    def scaled(x):
        for scale in (1.0, 2.0, 2.0, -0.0, 0.0):
            x = F.scaled_dot_product_attention(x, x, x).sin() * scale + 1
        return x

    recorder = Recorder()
    run(scaled, torch.randn(6, 4, D), compiler=recorder)
    assert len(recorder.pieces) == 4  # 1.0, 2.0 (once), -0.0, 0.0


def test_weights_of_another_tensor_class_are_not_shared() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def step(x, w, u):
        h = F.scaled_dot_product_attention(x, x, x)
        a = (h @ w).sum()
        h = F.scaled_dot_product_attention(h, h, h)
        return a, (h @ u).sum()

    x, w, u = torch.randn(6, 4, D), torch.randn(D, D), torch.randn(D, D)
    recorder = Recorder()
    with torch.no_grad():
        compiled = torch.compile(step, backend=cgcompile.Backend(compiler=recorder))
        result = compiled(x, w, TwoTensor(u, u.clone()))
        expected = step(x, w, TwoTensor(u, u.clone()))
    assert type(result[0]) is torch.Tensor
    assert type(result[1]) is TwoTensor
    torch.testing.assert_close(result[1].a, expected[1].a)
    targets = [{str(node.target) for node in gm.graph.nodes} for gm in recorder.pieces]
    assert len(targets) == 2
    assert "aten.mm.default" in targets[1] - targets[0]  # that of the parts of ``u``


def test_pieces_whose_inputs_alias_differently_are_not_shared() -> None:
    class Aliasing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(D))
            self.b = nn.Parameter(torch.randn(D))

        def forward(self, x):
            for one, other in ((self.a, self.b), (self.a, self.a)):
                x = F.scaled_dot_product_attention(x, x, x)
                x = x * one + other
            return x

    recorder = Recorder()
    run(Aliasing(), torch.randn(6, 4, D), compiler=recorder)
    assert len(recorder.pieces) == 2


@pytest.mark.slow
def test_compiles_inside_the_backend_call_without_gradients() -> None:
    recorder = Recorder()
    model = build(CASES["sdpa"])
    backend = cgcompile.Backend(compiler=recorder)
    x = torch.randn(6, 4, D)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(model, backend=backend)(x)  # grad mode is on
    assert recorder.grad_modes == [False, False]
    assert all(
        isinstance(value, (torch.Tensor, torch.SymInt)) for row in recorder.inputs for value in row
    )
    assert any(isinstance(each, torch.SymInt) for each in recorder.inputs[0])


def test_compiled_pieces_are_what_runs() -> None:
    def doubling(gm, fake_inputs):
        return lambda *inputs: [each * 2 for each in gm.forward(*inputs)]

    model = build(CASES["no_boundary"])
    x = torch.randn(6, 4, D)
    with torch.no_grad():
        result = torch.compile(model, backend=cgcompile.Backend(compiler=doubling))(x)
        torch.testing.assert_close(result, 2 * model(x))


def raised(model, *inputs: torch.Tensor, **settings) -> Exception:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        run(model, *inputs, **settings)
    return caught.value.inner_exception


def test_a_piece_whose_compiler_raises_may_run_uncompiled(caplog) -> None:
    model, x = build(CASES["sdpa"]), torch.randn(6, 4, D)

    def picky(gm, fake_inputs):
        if gm.graph.find_nodes(op="call_method", target="chunk"):  # only the first piece has one
            raise ValueError("no kernel for this")
        return gm.forward

    backend = cgcompile.Backend(compiler=(picky, "eager"))
    with torch.no_grad(), caplog.at_level("WARNING", logger="cgcompile"):
        assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    compilation = backend.graphs[0].compilation
    assert (compilation.compiled, compilation.failed) == (1, 1)
    assert [each.how for each in compilation.pieces] == ["failed", "compiled"]
    assert "no kernel for this" in compilation.uncached["piece_0"]
    assert "no kernel for this" in caplog.text
    assert "runs uncompiled" in caplog.text


def test_a_compiler_that_raises_names_the_piece_and_the_line() -> None:
    def broken(gm, fake_inputs):
        raise ValueError("no kernel for this")

    error = raised(build(CASES["sdpa"]), torch.randn(6, 4, D), compiler=broken)
    assert isinstance(error, PieceCompileError)
    assert isinstance(error.__cause__, ValueError)
    message = str(error)
    assert "piece_0: compiler 'broken' raised ValueError: no kernel for this" in message
    assert "cases.py:" in message
    assert "in forward" in message


def test_a_compiler_that_returns_no_callable() -> None:
    error = raised(build(CASES["sdpa"]), torch.randn(6, 4, D), compiler=lambda gm, inputs: None)
    assert isinstance(error, PieceCompileError)
    assert "returned None; expected a callable" in str(error)


def test_a_compiler_that_fixes_the_batch_size_is_refused() -> None:
    def narrow(gm, fake_inputs):
        size = next(each for each in fake_inputs if isinstance(each, torch.SymInt))
        assert size == 6
        return gm.forward

    error = raised(build(CASES["sdpa"]), torch.randn(6, 4, D), compiler=narrow)
    assert isinstance(error, SymbolError)
    assert "your compiler fixed the dynamic dimension x.size()[0] to 6" in str(error)
    assert "piece_0" in str(error)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda outputs: outputs[0], "no list"),
        (lambda outputs: [*outputs, *outputs], "of them"),
        (lambda outputs: 3, "no list"),
    ],
)
def test_results_of_a_users_compiler_are_counted(wrong, complaint: str) -> None:
    def compiler(gm, fake_inputs):
        return lambda *inputs: wrong(gm.forward(*inputs))

    with pytest.raises(
        PieceCompileError, match=f"tuple or list of .* outputs; found .*{complaint}"
    ):
        run(build(CASES["no_boundary"]), torch.randn(6, 4, D), compiler=compiler)


@pytest.mark.slow
def test_a_size_that_equals_one_of_another_input_reaches_inductor() -> None:
    """Its symbol stands for the other's by then, which the sizes of tensors are made of."""

    def model(x, y):
        torch._check(x.shape[0] == y.shape[0])
        q = torch.cat([y, y])[None, None]
        gate, up = F.scaled_dot_product_attention(q, q, q)[0, 0].chunk(2, -1)
        return (F.silu(gate) * up + x.shape[0]).sum()

    backend = cgcompile.Backend(compiler="inductor")
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        for rows in (3, 5):
            x, y = torch.randn(rows, 16), torch.randn(rows, 16)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch._dynamo.maybe_mark_dynamic(y, 0)
            torch.testing.assert_close(compiled(x, y), model(x, y))
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_a_graph_without_symbols_is_legal() -> None:
    model, x = build(CASES["sdpa"]), torch.randn(6, 4, D)
    backend = cgcompile.Backend(compiler="aot")
    with torch.no_grad():
        result = torch.compile(model, backend=backend, dynamic=False)(x)
        torch.testing.assert_close(result, model(x))
    assert backend.graphs[0].split.symbols.dims == {}


def test_unknown_inductor_option() -> None:
    error = raised(
        build(CASES["sdpa"]), torch.randn(6, 4, D), inductor_options={"max_autotun": True}
    )
    assert isinstance(error, ConfigError)
    assert "'max_autotune'" in str(error)


@pytest.mark.slow
def test_inductor_options_reach_inductor() -> None:
    """Only with this setting does Inductor draw the random numbers that eager draws."""
    model, x = build(CASES["random"]), torch.randn(6, 4, D)
    same = []
    for options in ({"fallback_random": True}, {"fallback_random": False}):
        torch._dynamo.reset()
        backend = cgcompile.Backend(inductor_options=options)
        with torch.no_grad():
            torch.manual_seed(1)
            expected = model(x)
            torch.manual_seed(1)
            result = torch.compile(model, backend=backend)(x)
        same.append(torch.allclose(result, expected, rtol=1e-4, atol=1e-5))
    assert same == [True, False]


@pytest.mark.slow
def test_eager_pieces_are_not_compiled_but_flex_attention_is() -> None:
    recorder = Recorder()
    run(build(CASES["flex_attention"]), torch.randn(6, 16, D), compiler=recorder)
    assert len(recorder.pieces) == 3
    recorder = Recorder()
    run(build(CASES["sdpa"]), torch.randn(6, 4, D), compiler=recorder)
    assert len(recorder.pieces) == 2
