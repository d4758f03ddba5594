"""Code that branches on small sizes takes the branch of eager, whatever size was traced first."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from lib.front_ends import WIDTH, settings

import cgcompile
from cgcompile.errors import TraceError

CONDITIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "n > 0": lambda x: x.shape[0] > 0,
    "n == 0": lambda x: x.shape[0] == 0,
    "n != 0": lambda x: x.shape[0] != 0,
    "not n": lambda x: not x.shape[0],
    "bool(n)": lambda x: bool(x.shape[0]),
    "n >= 1": lambda x: x.shape[0] >= 1,
    "n < 1": lambda x: x.shape[0] < 1,
    "n <= 1": lambda x: x.shape[0] <= 1,
    "n == 1": lambda x: x.shape[0] == 1,
    "n > 1": lambda x: x.shape[0] > 1,
    "n - 1 >= 0": lambda x: x.shape[0] - 1 >= 0,
    "2 * n > 0": lambda x: 2 * x.shape[0] > 0,
    "n // 2 > 0": lambda x: x.shape[0] // 2 > 0,
    "n % 2 == 0": lambda x: x.shape[0] % 2 == 0,
    "max(n, 1) == 1": lambda x: max(x.shape[0], 1) == 1,
    "min(n, 1) == 0": lambda x: min(x.shape[0], 1) == 0,
    "numel() == 0": lambda x: x.numel() == 0,
    "len(x) > 0": lambda x: len(x) > 0,
    "any size is 0": lambda x: any(size == 0 for size in x.shape),
    "n * width != 0": lambda x: x.shape[0] * x.shape[1] != 0,
    "empty view": lambda x: x.view(-1, WIDTH).shape[0] > 0,
    "empty reshape": lambda x: x.t().reshape(-1).numel() > 0,
    "empty cat": lambda x: torch.cat([x, x]).shape[0] == 0,
    "first row": lambda x: x[:1].shape[0] == 1,
    "other rows": lambda x: x[1:].shape[0] > 0,
    "squeeze(0)": lambda x: x.squeeze(0).dim() == 1,
    "squeeze(dim=0)": lambda x: torch.squeeze(x, dim=0).dim() == 1,
    "squeeze((0, 1))": lambda x: x.squeeze((0, 1)).dim() == 1,
    "squeeze()": lambda x: x[None].squeeze().dim() == 1,
    "squeeze_()": lambda x: (x * 1).squeeze_().dim() == 1,
    "transpose is contiguous": lambda x: x.t().is_contiguous(),
}
ORDERS = ((0, 1, 2, 3), (3, 0, 1, 2), (1, 0, 3, 2))
SHAPES = ("backed", "backed_size_oblivious", "unbacked")


def branch(condition: Callable[[torch.Tensor], bool]) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y + 1 if condition(x) else y - 1

    return step


def check_sizes(compiled: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor]) -> None:
    for order in ORDERS:
        for size in order:
            x, y = torch.randn(size, WIDTH), torch.randn(3)
            torch.testing.assert_close(
                compiled(x, y), eager(x, y), msg=lambda m, n=size: f"{n}: {m}"
            )


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_a_branch_on_a_small_size_through_compile(guards: str, shapes: str) -> None:
    refused = set()
    for name, condition in CONDITIONS.items():
        step = branch(condition)
        compiled = cgcompile.compile(
            step, settings("cpu"), dynamic_dims={"x": 0}, guards=guards, dynamic_shapes=shapes
        )
        try:
            with torch.no_grad():
                check_sizes(compiled, step)
        except TraceError:
            refused.add(name)
    if shapes != "unbacked":
        assert refused == set()
    else:  # what branches on an unbacked size does not trace
        assert not refused & {"squeeze(0)", "squeeze(dim=0)", "squeeze((0, 1))", "squeeze()"}


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_branch_on_a_small_size_through_torch_compile(dynamic: bool | None) -> None:
    for condition in CONDITIONS.values():
        step = branch(condition)
        compiled = torch.compile(step, backend=cgcompile.Backend(settings("cpu")), dynamic=dynamic)
        with torch.no_grad():
            check_sizes(compiled, step)
        torch._dynamo.reset()


@pytest.mark.parametrize("first", list(permutations((1, 2, 5))))
def test_one_trace_serves_all_sizes_that_are_not_0(first: tuple[int, ...], device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum(-1, keepdim=True).squeeze(-1) if len(x) else x.sum(-1) - 1

    compiled = cgcompile.compile(step, settings(device), dynamic_dims={"x": 0})
    with torch.no_grad():
        for size in (*first, 0) * 4:
            x = torch.randn(size, WIDTH, device=device)
            torch.testing.assert_close(compiled(x), step(x))
    assert len(compiled.traces) == 2
    assert compiled.backend.counters.replays >= 6
