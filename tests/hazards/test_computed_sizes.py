"""Sizes that float and integer arithmetic gives, and that a model reads off the result."""

import math
from collections.abc import Callable

import pytest
import torch
from lib.front_ends import COMPILED, settings
from torch import Tensor, nn
from torch.nn import functional as F

import cgcompile

SIZES: dict[str, Callable[[int], int]] = {
    "floor division": lambda n: n // 3 + 1,
    "ceiling division": lambda n: -(-n // 3),
    "true division": lambda n: int(n / 2),
    "float division": lambda n: int(n * 1.5 / 0.7),
    "int": lambda n: int(n * 1.5),
    "round": lambda n: round(n * 1.5),
    "round to digits": lambda n: int(round(n / 7, 2) * 10) + 1,
    "ceil": lambda n: math.ceil(n * 0.3),
    "floor": lambda n: math.floor(n * 1.3),
    "power": lambda n: 2 ** (n % 4 + 1),
    "float power": lambda n: int((n * 1.5) ** 0.5) + 1,
    "square": lambda n: n**2 % 7 + 1,
    "square root": lambda n: int(math.sqrt(n)) + 1,
    "modulo": lambda n: n % 5 + 1,
    "modulo of a negative": lambda n: (3 - n) % 5 + 1,
    "max": lambda n: torch.sym_max(n, 9),
    "min": lambda n: torch.sym_min(n, 9),
    "max of floats": lambda n: int(torch.sym_max(n * 1.5, 15.0)),
    "either": lambda n: torch.sym_ite(n > 9, n + 1, n * 2),
    "bits": lambda n: (n & 5) + (n | 2) + (n ^ 3),
    "shifts": lambda n: (n << 1) + (n >> 1),
    "absolute": lambda n: abs(n - 40) + 1,
}


class Reads(nn.Module):
    """Read a size that is a multiple of another, which no other node of the graph computes."""

    def __init__(self, size: Callable[[int], int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        row = torch.full((2, self.size(x.shape[0])), 2.0, device=x.device)
        h = F.scaled_dot_product_attention(x[None], x[None], x[None])
        rows = torch.cat([row, row, row], 1)
        return h.sum() + rows * rows.shape[1] + torch.arange(rows.shape[-1], device=x.device)


class Pyramid(nn.Module):
    """A feature pyramid that scales by floats, and reads the sizes of its levels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        levels = [self.conv(F.interpolate(x, scale_factor=scale)) for scale in (1.5, 0.75, 0.3)]
        above = levels[-1]
        merged = []
        for level in reversed(levels):
            above = level + F.interpolate(above, size=level.shape[-2:])
            ramp = torch.arange(level.shape[-1], device=x.device) / level.shape[-2]
            merged.append(above * ramp + above.shape[2] * level.shape[3])
        tokens = merged[0].flatten(2).transpose(1, 2)
        merged.append(F.scaled_dot_product_attention(tokens, tokens, tokens))
        steps = torch.arange(0.0, x.shape[-1] * 0.5, 0.3, device=x.device)
        return [*merged, steps.sum() * steps.shape[0]]


def compiled(name: str, model: nn.Module, dims: tuple[int, ...], device: str, compiler: str):
    backend = cgcompile.Backend(settings(device, compiler=compiler))
    if name == "torch.compile":
        return torch.compile(model, backend=backend, dynamic=True), backend
    return cgcompile.compile(model, backend, dynamic_dims={"x": dims}), backend


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("name", COMPILED)
def test_a_computed_size_is_right_at_each_replay(name: str, kind: str, device: str) -> None:
    torch._dynamo.reset()
    model = Reads(SIZES[kind])
    step, backend = compiled(name, model, (0,), device, "eager")
    with torch.inference_mode():
        for rows in (8, 8, 8, 11, 11, 11, 14, 14, 14, 8, 11):
            x = torch.randn(rows, 4, device=device)
            torch.testing.assert_close(step(x), model(x))
    counters = backend.counters
    assert counters.captures == 3, counters
    assert counters.replays == 5, counters


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", COMPILED)
def test_a_pyramid_that_reads_the_sizes_of_its_levels(
    name: str, compiler: str, device: str
) -> None:
    torch._dynamo.reset()
    model = Pyramid().to(device).requires_grad_(False)
    step, backend = compiled(name, model, (2, 3), device, compiler)
    # Inductor's kernels on CUDA sum in another order.
    other_kernels = compiler == "inductor" and device == "cuda"
    tolerance = {"rtol": 1e-5, "atol": 1e-3} if other_kernels else {}
    shapes = [(20, 28), (20, 28), (20, 28), (23, 31), (23, 31), (23, 31), (20, 28), (23, 31)]
    with torch.inference_mode():
        for shape in shapes:
            x = torch.randn(2, 3, *shape, device=device)
            torch.testing.assert_close(step(x), model(x), **tolerance)
    counters = backend.counters
    assert counters.captures == 2, counters
    assert counters.replays == 4, counters
    assert len(backend.graphs) == 1


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if math.floor(rows * 0.3) > 3:
            x = x * 2
        return x - 1 if math.sqrt(rows) < 3.2 else x + round(rows / 4)


@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_a_branch_on_a_computed_size_is_guarded(guards: str, device: str) -> None:
    model, config = Branches(), settings(device)
    step = cgcompile.compile(model, config, guards=guards, dynamic_dims={"x": 0})
    with torch.inference_mode():
        for rows in (8, 20, 8, 20, 9, 8, 21, 14, 13, 11, 13):
            x = torch.randn(rows, 4, device=device)
            torch.testing.assert_close(step(x), model(x))
