"""Results that share memory share it in every replay, however many weight sets there are."""

import torch
from hazard_support import settings
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        return y, y[:, 2:4]


def test_results_of_several_weight_sets_share_memory(device: str) -> None:
    torch._dynamo.reset()
    backend = cgcompile.Backend(settings(device))
    models = [Halves().to(device).requires_grad_(False) for _ in range(2)]
    compiled = [torch.compile(model, backend=backend) for model in models]
    x = torch.zeros(4, 8, device=device)
    context = {"cudagraph_runtime_mode": CUDAGraphMode.FULL, "batch_descriptor": BatchDescriptor(4)}
    for _ in range(5):
        x.copy_(torch.randn(4, 8))
        for step, model in zip(compiled, models, strict=True):
            with torch.no_grad(), set_forward_context(**context):
                y, part = step(x)
            expected, view = model(x)
            part.zero_()
            view.zero_()
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert backend.counters.replays >= 4
