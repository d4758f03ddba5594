"""Random programs of copies, no-ops, views and writes: with the eliminating passes and without.

What a copy protects is easily overlooked, so results, inputs and what shares memory are compared
bit by bit with eager. The programs must lose enough ops for that to mean something.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lib.cases import D
from lib.elimination import removed, run
from torch import nn

Step = tuple[str, int, int]


class Program(nn.Module):
    """Runs steps over a growing list of tensors; ``i`` and ``j`` pick from its end."""

    def __init__(self, steps: list[Step], results: list[int]) -> None:
        super().__init__()
        self.steps, self.results = steps, results

    def forward(self, x, y):
        values = [x, y, x * 2]
        for op, i, j in self.steps:
            result = OPS[op](values[-1 - i % len(values)], values[-1 - j % len(values)])
            values += [result] if isinstance(result, torch.Tensor) else result or []
        return tuple(values[-1 - i % len(values)] for i in self.results)


def scale(a, b):
    torch.ops.cgtest.scale_(a, 0.5)


def assign(a, b):
    a[:, 0] = b[:, 1]


def filled(a, b):
    target = torch.empty_like(a)
    target.copy_(a)
    return target


OPS = {
    "sin": lambda a, b: a.sin(),
    "sum": lambda a, b: a + b,
    "clone": lambda a, b: a.clone(),
    "clone_later": lambda a, b: [a.clone(), b.cos()],
    "filled": filled,
    "to_copy": lambda a, b: a.to(torch.float32, copy=True),
    "dropout": lambda a, b: F.dropout(a, 0.5, False),
    "dropout_in_place": lambda a, b: F.dropout(a, 0.0, True, True),
    "float": lambda a, b: a.float(),
    "contiguous": lambda a, b: a.contiguous(),
    "view": lambda a, b: a.view(a.shape),
    "all": lambda a, b: a[:],
    "turned": lambda a, b: a.transpose(1, 2).transpose(1, 2),
    "half": lambda a, b: torch.cat((a[:, :2], b.chunk(2, 1)[0]), 1),
    "flat": lambda a, b: a.view(-1).view(a.shape),
    "write": lambda a, b: (a.mul_(0.5), None)[1],
    "write_result": lambda a, b: a.add_(1),
    "write_part": lambda a, b: (a[:, 1:3].add_(b[:, :2] * 0.5), None)[1],
    "assign": assign,
    "boundary": scale,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a),
}
steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 3), st.integers(0, 5)),
    min_size=3,
    max_size=12,
)
TOTALS: Counter[str] = Counter()


# A view that a piece after a boundary uses and returns: one tensor there, as in eager.
@example(steps=[("all", 0, 0), ("boundary", 0, 0), ("contiguous", 0, 0)], results=[0, 1, 2])
@given(steps=steps, results=st.lists(st.integers(0, 4), min_size=1, max_size=3))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def random_programs(steps: list[Step], results: list[int]) -> None:
    program = Program(steps, results)
    inputs = (torch.randn(4, 4, D), torch.randn(4, 4, D))
    try:
        with torch.no_grad():
            run(program, inputs)
    except RuntimeError:  # some write what overlaps, and eager says so
        return
    with torch.no_grad():
        gone = removed(program, *inputs)
    TOTALS["programs"] += 1
    for name, difference in gone.items():
        TOTALS[name] -= sum(difference.values())


@pytest.mark.slow
def test_random_programs_are_the_same_without_what_went() -> None:
    random_programs()
    assert TOTALS["programs"] >= 20, TOTALS
    assert TOTALS["eliminate_noops"] >= 15, TOTALS
    assert TOTALS["eliminate_clones"] >= 5, TOTALS
