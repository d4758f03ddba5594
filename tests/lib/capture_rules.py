"""What captures refuse and allow: steps of one input, for the recorder, for CUDA and for doctor."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """A step of x, f32[8], and whether a capture raises; else replays must equal eager calls."""

    step: Callable[[torch.Tensor], torch.Tensor]
    refused: bool


def list_to_device(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0] * 8, device=x.device)


def written_list(x: torch.Tensor) -> torch.Tensor:
    return x * 0 + torch.tensor([1.0] * 8, device=x.device).add_(x)


def written_number(x: torch.Tensor) -> torch.Tensor:
    """A 0-dim tensor on the CPU: a kernel takes it by value."""
    number = torch.tensor(1.0)
    number.add_(2.0)
    return x * number


def filled(x: torch.Tensor) -> torch.Tensor:
    return x + torch.full((8,), 2.0, device=x.device).add_(x)


def other_seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(torch.initial_seed() // 2 + 1)
    return x + torch.rand_like(x)


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x).long()


def no_rows(x: torch.Tensor) -> torch.Tensor:
    empty = torch.relu(x[:0]).add_(1)
    return torch.cat([x, empty, x.new_empty(0)]) + 1


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=x.device)


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Make a positive definite f32[4, 4] from x."""
    return x[:4].outer(x[:4]) + torch.eye(4, device=x.device)


def written_at(x: torch.Tensor, value: float | torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[x > 0.5] = value
    return y


RULES = {
    "a list, copied to the device": Rule(list_to_device, True),
    "a list as an index": Rule(lambda x: x[[1, 0]], True),
    "a list, written in place": Rule(written_list, True),
    "new_tensor": Rule(lambda x: x + x.new_tensor([1.0, 2.0]).sum(), True),
    "no items": Rule(lambda x: torch.cat([x, torch.tensor([], device=x.device)]), False),
    "a number on the CPU": Rule(written_number, False),
    "a fill on the device": Rule(filled, False),
    "item": Rule(lambda x: x * x.sum().item(), True),
    "bool": Rule(lambda x: x * bool(x.any()), True),
    "int": Rule(lambda x: x * int(x[0]), True),
    "tolist": Rule(lambda x: x * x.tolist()[0], True),
    "numpy": Rule(lambda x: x * float(x.cpu().numpy()[0]), True),
    "equal": Rule(lambda x: x * torch.equal(x, x + 1), True),
    "nonzero": Rule(lambda x: x.nonzero(), True),
    "unique": Rule(lambda x: x.unique(), True),
    "masked_select": Rule(lambda x: x.masked_select(x > 0.5), True),
    "condition": Rule(lambda x: x + 1 if x.sum() > 0 else x, True),
    "where": Rule(lambda x: torch.where(x > 0)[0], True),
    "where, of three": Rule(lambda x: torch.where(x > 0.5, x, -x) * 2, False),
    "argwhere": Rule(lambda x: torch.argwhere(x > 0), True),
    "repeats": Rule(lambda x: x.repeat_interleave(ones(x)), True),
    "repeats along": Rule(lambda x: x.repeat_interleave(repeats=ones(x), dim=0), True),
    "a number of repeats": Rule(lambda x: x.repeat_interleave(2), False),
    "repeats to a size": Rule(lambda x: x.repeat_interleave(ones(x), output_size=8) + 1, False),
    "mask": Rule(lambda x: x[x > 0], True),
    "a tensor, filled in by a mask": Rule(lambda x: x.masked_fill(x > 0.5, x.sum()), True),
    "a tensor, filled in at a mask": Rule(lambda x: (x + 1).masked_fill_(x > 0.5, x[0]), True),
    "a tensor, filled in by an index": Rule(lambda x: x.index_fill(0, zeros(x), x.sum()), True),
    "a number, filled in by a mask": Rule(lambda x: x.masked_fill(x > 0.5, 2.0), False),
    "a tensor, filled in": Rule(lambda x: torch.empty_like(x).fill_(x.sum()), False),
    "a tensor, written at a mask": Rule(lambda x: written_at(x, x[0]), True),
    "a sum, written at a mask": Rule(lambda x: written_at(x, x.sum()), True),
    "a number, written at a mask": Rule(lambda x: written_at(x, 2.0), False),
    "a CPU tensor, filled in by a mask": Rule(
        lambda x: x.masked_fill(x > 0.5, torch.tensor(2.0)), False
    ),
    "a CPU tensor, computed and filled in by a mask": Rule(
        lambda x: x.masked_fill(x > 0.5, torch.tensor(2.0).neg()), False
    ),
    "a CPU tensor, filled in": Rule(lambda x: (x + 1).fill_(torch.tensor(2.0)) + x, False),
    "a CPU tensor, copied": Rule(lambda x: (x + 1).copy_(torch.tensor(2.0)), True),
    "a CPU tensor, read": Rule(lambda x: x * (torch.tensor(2.0) + 1).item(), False),
    "a sum, copied to a CPU tensor and read": Rule(
        lambda x: x * torch.tensor(2.0).copy_(x.sum()).item(), True
    ),
    "linspace": Rule(lambda x: torch.linspace(x[0], x[1], 4, device=x.device), True),
    "linspace of numbers": Rule(lambda x: x[:4] + torch.linspace(0, 1, 4, device=x.device), False),
    "a deviation": Rule(lambda x: torch.normal(x, x + 1), True),
    "bins of data": Rule(lambda x: torch.histc(x, 4), True),
    "bins of numbers": Rule(lambda x: torch.histc(x, 4, 0, 1), False),
    "narrow": Rule(lambda x: x.narrow(0, zeros(x)[0], 2) + 1, True),
    "combinations": Rule(lambda x: torch.combinations(x), torch.__version__ < "2.14"),
    "covariance": Rule(lambda x: torch.cov(matrix(x)), True),
    "inverse": Rule(lambda x: matrix(x).inverse(), True),
    "inverse, unchecked": Rule(lambda x: torch.linalg.inv_ex(matrix(x))[0], False),
    "solve": Rule(lambda x: torch.linalg.solve(matrix(x), x[:4]), True),
    "cholesky": Rule(lambda x: torch.linalg.cholesky(matrix(x)), True),
    "cholesky, unchecked": Rule(lambda x: torch.linalg.cholesky_ex(matrix(x))[0], False),
    "singular values": Rule(lambda x: torch.linalg.svdvals(matrix(x)), True),
    "pseudoinverse": Rule(lambda x: torch.linalg.pinv(matrix(x)), True),
    "determinant": Rule(lambda x: torch.linalg.det(matrix(x)), False),
    "matrix_exp": Rule(lambda x: torch.linalg.matrix_exp(matrix(x)), True),
    "matrix_power": Rule(lambda x: torch.linalg.matrix_power(matrix(x), 3), False),
    "matrix_power, negative": Rule(lambda x: torch.linalg.matrix_power(matrix(x), -2), True),
    "norm of a matrix": Rule(lambda x: torch.linalg.norm(matrix(x), 2), True),
    "norm of a vector": Rule(lambda x: torch.linalg.norm(x, 2), False),
    "norm of rows": Rule(lambda x: torch.linalg.norm(matrix(x), 2, dim=1), False),
    "condition number": Rule(lambda x: torch.linalg.cond(matrix(x)), True),
    "a new seed": Rule(other_seed, True),
    "no rows": Rule(no_rows, False),
    "view": Rule(lambda x: x.view(2, 4).t() + 1, False),
}
