"""Count the kernels of a replay, and of the same pieces with Inductor's own settings."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import cgcompile

pytestmark = pytest.mark.gpu

LAYERS, D = 4, 64
HEADS = [4, 2, 2]  # of queries, keys and values: kernels of equal size are one anyway
SIZE = 16  # of a head


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv = nn.Linear(D, sum(HEADS) * SIZE, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.one(x)).unflatten(-1, (-1, SIZE)).transpose(0, 1)
        q, k, v = heads.split(HEADS)
        q, k = q * angle.cos(), k * angle.sin()
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0]
        x = x + self.out(out.transpose(0, 1).flatten(1))
        return x + self.down(F.silu(self.up(self.two(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, angle)
        return x


def kernels_of_a_replay(**options: Any) -> int:
    """Compile, capture, compare with eager, and count what one replay launches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    backend = cgcompile.Backend(cudagraph_mode="PIECEWISE", inductor_options=options)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    angle = torch.randn(SIZE, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        x = torch.randn(24, D, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, angle), model(x, angle), rtol=3e-2, atol=3e-2)
    assert (backend.counters.captures, backend.counters.replays) == (1, 2)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        compiled(x, angle)
        torch.cuda.synchronize()
    assert backend.counters.replays == 3
    return sum(event.device_type.name == "CUDA" for event in seen.events())


def unchanged(graph: torch.fx.Graph) -> None:
    """Change nothing; a plain function is not combined with the passes of cgcompile."""


def test_residual_additions_are_no_copies() -> None:
    inductors = kernels_of_a_replay(combo_kernels=False, post_grad_custom_post_pass=unchanged)
    apart = kernels_of_a_replay(combo_kernels=False)
    both = kernels_of_a_replay()
    assert inductors - apart >= 2 * (LAYERS - 1)  # two in each piece from attention to attention
    assert apart - both >= LAYERS  # queries and keys are rotated in one kernel
