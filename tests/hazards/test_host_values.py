"""Code that branches on sizes, or computes with numbers read on the host, does what eager does."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, check, compiled, settings

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


def branch(condition: Callable[[torch.Tensor], bool]) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y + 1 if condition(x) else y - 1

    return step


def check_sizes(compiled: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor]) -> None:
    """Compare small sizes in several orders."""
    with torch.no_grad():
        for size in (0, 1, 2, 3, 3, 0, 1, 2, 1, 0, 3, 2):
            x, y = torch.randn(size, WIDTH), torch.randn(3)
            torch.testing.assert_close(
                compiled(x, y), eager(x, y), msg=lambda text, size=size: f"{size}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["backed", "backed_size_oblivious", "unbacked"])
@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_a_branch_on_a_small_size_through_compile(guards: str, shapes: str) -> None:
    refused = set()
    for name, condition in CONDITIONS.items():
        step = branch(condition)
        compiled = cgcompile.compile(
            step, settings("cpu"), dynamic_dims={"x": 0}, guards=guards, dynamic_shapes=shapes
        )
        try:
            check_sizes(compiled, step)
        except TraceError:
            refused.add(name)
    if shapes != "unbacked":
        assert refused == set()
    else:  # what branches on an unbacked size does not trace
        assert not refused & {"squeeze(0)", "squeeze(dim=0)", "squeeze((0, 1))", "squeeze()"}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_branch_on_a_small_size_through_torch_compile(dynamic: bool | None) -> None:
    for condition in CONDITIONS.values():
        step = branch(condition)
        check_sizes(compiled("torch.compile", step, settings("cpu"), dynamic).step, step)
        torch._dynamo.reset()


@pytest.mark.parametrize("first", list(permutations((1, 2, 5))))
def test_one_trace_serves_all_sizes_that_are_not_0(first: tuple[int, ...], device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum(-1, keepdim=True).squeeze(-1) if len(x) else x.sum(-1) - 1

    compiled = cgcompile.compile(step, settings(device), dynamic_dims={"x": 0})
    for size in (*first, 0) * 4:
        check(compiled, step, device, rows=size, grad=torch.no_grad)
    assert len(compiled.traces) == 2
    assert compiled.backend.counters.replays >= 6


def item(x: torch.Tensor) -> int:
    return int(x[0, 0].item())


ITEMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constant size": lambda x: (x * 2)[:, : item(x) * 0 + 4],
    "size of an input": lambda x: (x * 2)[: item(x) * 0 + x.shape[0]],
    "difference": lambda x: (lambda n: (x * 2)[:, : n - n + 2])(item(x)),
    "maximum": lambda x: (x * 2)[:, : max(item(x) * 0, 1)],
    "factor": lambda x: (x * 2) + item(x) * 0,
    "branch": lambda x: x * 2 if item(x) * 0 == 0 else x,
    "does not cancel": lambda x: (x * 2) + item(x),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", ITEMS)
def test_arithmetic_on_a_number_that_the_host_reads(kind: str, name: str, device: str) -> None:
    step = ITEMS[kind]
    served = compiled(name, step, settings(device))
    with torch.no_grad():
        for number in range(5):
            x = torch.randn(ROWS, WIDTH, device=device) + 10 * number
            torch.testing.assert_close(served.step(x), step(x))
    # torch.compile ends the graph at the read, and the number is a key of the next graph.
    assert served.counters().replays >= (2 if name == "cgcompile.compile" else 0)
    assert served.counters().calls >= 5
