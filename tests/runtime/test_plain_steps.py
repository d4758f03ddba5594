"""Steps without graphs run the compiled pieces, under any grad mode and size."""

import torch
import torch.nn.functional as F
from torch import nn

import cgcompile


class Steps(nn.Module):
    """Three pieces around two splitting ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.scaled_dot_product_attention(layer(x), x, x)
        return x


def test_each_range_of_sizes_runs_its_own_artifact() -> None:
    backend = cgcompile.Backend(compiler="inductor", compile_sizes=[2, 3])
    model = Steps().eval()
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for size in (4, 2, 3, 2, 3, 4):
            x = torch.randn(size, 4, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
    (graph,) = backend.graphs
    assert sum(piece.compiled for piece in graph.split.pieces) == 3


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
