"""A step without graphs, and one that is recorded, call Inductor's functions alone."""

import torch
import torch.nn.functional as F
from support import calls_of
from torch import nn

import cgcompile
from cgcompile.compat import Direct


class Steps(nn.Module):
    """Three pieces around two splitting ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.scaled_dot_product_attention(layer(x), x, x)
        return x


def test_a_plain_step_calls_inductors_functions_alone() -> None:
    backend, model = cgcompile.Backend(compiler="inductor"), Steps().eval()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 4, 8)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
        (graph,) = backend.graphs
        assert sum(piece.compiled for piece in graph.split.pieces) == 3
        calls = calls_of(lambda: compiled(x))
    places = [k for k, name in enumerate(calls) if name == "call"]  # Inductor's functions
    starts = [
        k for k, name in enumerate(calls) if name == "__call__" and calls[k + 1] == "is_profiling"
    ]
    assert len(places) == len(starts) == 3
    assert all(place - start < 6 for start, place in zip(starts, places, strict=True))


def test_a_captured_step_replays_inductors_functions() -> None:
    backend = cgcompile.Backend(
        compiler="inductor", cudagraph_mode="PIECEWISE", capture_device="host"
    )
    model = Steps().eval()
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(2, 4, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert backend.counters.captures == 1
    assert backend.counters.replays == 2
    runs = backend.graphs[0]._program.runnables
    assert [run.alone is not None for run in runs if isinstance(run, Direct)] == [True] * 3


def test_each_artifact_of_a_piece_finds_out_for_itself() -> None:
    backend = cgcompile.Backend(compiler="inductor", compile_sizes=[2, 3])
    model = Steps().eval()
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for size in (4, 2, 3, 2, 3, 4):
            x = torch.randn(size, 4, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
        for size in (2, 3, 4):
            calls = calls_of(lambda n=size: compiled(torch.randn(n, 4, 8)))
            assert calls.count("is_profiling") == calls.count("call") == 3
            assert "runtime_wrapper" not in calls


def test_a_step_that_switches_grad_mode_between_its_pieces() -> None:
    class Switching(Steps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(True)
            x = F.scaled_dot_product_attention(self.layers[0](x), x, x)
            torch.set_grad_enabled(False)
            x = F.scaled_dot_product_attention(self.layers[1](x), x, x)
            torch.set_grad_enabled(before)
            return self.layers[2](x)

    model = Switching().eval().requires_grad_(False)
    compiled = torch.compile(model, backend=cgcompile.Backend(compiler="inductor"))
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                x = torch.randn(2, 4, 8)
                torch.testing.assert_close(compiled(x), model(x))
                assert torch.is_grad_enabled() == grad
