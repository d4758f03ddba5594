"""Arithmetic on a number that the host reads may cancel it; the result is eager's."""

from collections.abc import Callable

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, compiled, settings

STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constant size": lambda x: (x * 2)[:, : int(x[0, 0].item()) * 0 + 4],
    "size of an input": lambda x: (x * 2)[: int(x[0, 0].item()) * 0 + x.shape[0]],
    "difference": lambda x: (lambda n: (x * 2)[:, : n - n + 2])(int(x[0, 0].item())),
    "maximum": lambda x: (x * 2)[:, : max(int(x[0, 0].item()) * 0, 1)],
    "factor": lambda x: (x * 2) + int(x[0, 0].item()) * 0,
    "branch": lambda x: x * 2 if int(x[0, 0].item()) * 0 == 0 else x,
    "what stays": lambda x: (x * 2) + int(x[0, 0].item()),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", STEPS)
def test_arithmetic_on_a_number_that_the_host_reads(kind: str, name: str, device: str) -> None:
    step = STEPS[kind]
    served = compiled(name, step, settings(device))
    with torch.no_grad():
        for number in range(5):
            x = torch.randn(ROWS, WIDTH, device=device) + 10 * number
            torch.testing.assert_close(served.step(x), step(x))
    # torch.compile ends the graph at the read, and the number is a key of the next graph.
    assert served.counters().replays >= (2 if name == "cgcompile.compile" else 0)
    assert served.counters().calls >= 5
