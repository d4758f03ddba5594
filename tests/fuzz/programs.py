"""Random programs: a list of steps over a growing list of values, all drawn from one seed.

A feature is a group of operations; each takes the program, two values and the cache, and returns
new values. ``TRACED`` names the features that only a traced program supports.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cgcompile

WIDTH = 8
Step = tuple[str, int, int]


@cgcompile.eager_break_during_capture
def sum_and_view(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = a.sin() + b
    return total, total[:]


@cgcompile.eager_break_during_capture
def same_memory(a: torch.Tensor) -> torch.Tensor:
    return a[:]


def chunked(model, a, b, cache):
    left, right = a.chunk(2, 1)
    return [torch.cat((right, left), 1)]


def overlapping(model, a, b, cache):
    wide = torch.cat((a, b), 1)
    return [wide[:, :WIDTH], wide[:, WIDTH // 2 : -WIDTH // 2], wide[:, WIDTH:]]


def write(model, a, b, cache):
    a.mul_(0.5)
    return []


def write_half(model, a, b, cache):
    a[:, 2:6].add_(0.25)
    return []


def write_row(model, a, b, cache):
    a.unbind(1)[3].mul_(0.5)
    return []


def write_buffer(model, a, b, cache):
    model.state.mul_(0.5).add_(0.25)
    return [a * model.state]


def write_cache(model, a, b, cache):
    cache.copy_(a * 0.5)
    return []


def out_argument(model, a, b, cache):
    out = torch.empty_like(a)
    torch.add(a, b, alpha=0.25, out=out)
    return [out]


def attend(model, a, b, cache):
    q, k = a.view(1, 1, -1, WIDTH), b.view(1, 1, -1, WIDTH)
    return [F.scaled_dot_product_attention(q, k, q).view(-1, WIDTH)]


def scale_in_place(model, a, b, cache):
    torch.ops.cgtest.scale_(a, 0.5)
    return []


def region(model, a, b, cache):
    with cgcompile.eager_region():
        total = a.sin() + b
    return [total]


def region_pair(model, a, b, cache):
    with cgcompile.eager_region():
        total = a.sin() + b
        view = total.unflatten(1, (4, 2)).transpose(1, 2)
    return [total, view.flatten(1)]


def region_overlapping(model, a, b, cache):
    with cgcompile.eager_region():
        views = overlapping(model, a, b, cache)
    return views


def region_view(model, a, b, cache):
    with cgcompile.eager_region():
        view = a[:, 1:5]
    return [torch.cat((view, b[:, :4]), 1), F.pad(view, (0, 4))]


def region_reshape(model, a, b, cache):
    with cgcompile.eager_region():
        view = a.reshape(-1).view(b.shape)
    return [view, view * 0.5]


def region_contiguous(model, a, b, cache):
    with cgcompile.eager_region():
        same = a.contiguous()
    return [same, same + b]


def region_write(model, a, b, cache):
    with cgcompile.eager_region():
        view = a[:, 2:6]
        view.mul_(0.5)
    return [torch.cat((view, b[:, :4]), 1)]


def region_alias(model, a, b, cache):
    with cgcompile.eager_region():
        view = a[:]
    return [view]


def rebind(model, a, b, cache):
    model.state = model.state * 0.5
    return [a + model.state]


# Seeds depend on the order of features and operations.
FEATURES: dict[str, dict[str, Callable[..., list[torch.Tensor]]]] = {
    "pure": {
        "linear": lambda m, a, b, c: [m.second(m.first(a)) + b * 0.25],
        "norm": lambda m, a, b, c: [m.scaling(a)],
        "add": lambda m, a, b, c: [a * 0.5 + b * 0.25],
        "gelu": lambda m, a, b, c: [F.gelu(a), torch.sigmoid(b)],
        "where": lambda m, a, b, c: [torch.where(a > b, a, b * 0.5)],
        "reduce": lambda m, a, b, c: [a - a.mean(-1, keepdim=True) + b.amax(-1, keepdim=True)],
    },
    "views": {
        "alias": lambda m, a, b, c: [a[:]],
        "columns": lambda m, a, b, c: [torch.cat((a[:, 4:], b[:, :4]), 1)],
        "turned": lambda m, a, b, c: [a.t().contiguous().t()],
        "chunked": chunked,
        "stacked": lambda m, a, b, c: list(torch.stack((a, b)).unbind(0)),
        "strided": lambda m, a, b, c: [a.unflatten(1, (4, 2)).transpose(1, 2).flatten(1)],
        "reshaped": lambda m, a, b, c: [a.reshape(-1).view(b.shape)],
        "overlapping": overlapping,
    },
    "numbers": {
        "python_scalar": lambda m, a, b, c: [a * 0.5 + 3],
        "scalar_tensor": lambda m, a, b, c: [a * m.factor + b.mean() * 0.125],
        "sized": lambda m, a, b, c: [a / (a.shape[0] + 1)],
        "half": lambda m, a, b, c: [(a.double() * 0.5).float()],
        "to_int": lambda m, a, b, c: [(a.clamp(-50, 50) * 4).to(torch.int32).float() * 0.25],
    },
    "writes": {
        "write": write,
        "write_half": write_half,
        "write_row": write_row,
        "write_buffer": write_buffer,
        "write_cache": write_cache,
        "out_argument": out_argument,
    },
    "boundaries": {
        "attend": attend,
        "scale_in_place": scale_in_place,
        "attend_twice": lambda m, a, b, c: attend(m, *attend(m, a, b, c), b, c),
    },
    "breaks": {
        "break_pair": lambda m, a, b, c: list(sum_and_view(a, b)),
        "break_alias": lambda m, a, b, c: [same_memory(a)],
    },
    "aliases": {  # may return their input
        "contiguous": lambda m, a, b, c: [a.contiguous()],
        "same_dtype": lambda m, a, b, c: [a.to(a.dtype), b.float()],
        "dropout": lambda m, a, b, c: [F.dropout(a, training=False)],
        "expanded": lambda m, a, b, c: [a.expand_as(b)],
    },
    "regions": {
        "region": region,
        "region_pair": region_pair,
        "region_overlapping": region_overlapping,
    },
    "alias_boundaries": {
        "region_view": region_view,
        "region_reshape": region_reshape,
        "region_contiguous": region_contiguous,
        "region_write": region_write,
        "region_alias": region_alias,
    },
    "rebinds": {"rebind": rebind},
}
OPS = {name: op for ops in FEATURES.values() for name, op in ops.items()}
TRACED = ("regions", "alias_boundaries", "rebinds")
RETURNS = ("one", "several", "mapping", "inputs", "views", "buffers")


class Program(nn.Module):
    """Runs its steps on x, f32[rows, WIDTH], and a cache of as many rows that it may write."""

    def __init__(self, steps: list[Step], returns: str) -> None:
        super().__init__()
        self.steps = steps
        self.returns = returns
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.scaling = nn.LayerNorm(WIDTH)
        self.register_buffer("state", torch.ones(WIDTH))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> Any:
        values = [x, cache]
        for op, i, j in self.steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values += OPS[op](self, a, b, cache)
        return self.result(values)

    def result(self, values: list[torch.Tensor]) -> Any:
        if self.returns == "one":
            return values[-1]
        if self.returns == "mapping":
            return {"last": values[-1], "both": (values[-2], values[len(values) // 2])}
        if self.returns == "inputs":
            return values[-1], values[0], values[1], values[-1][:, :2]
        if self.returns == "views":
            return values[-1], values[0][:, 2:6], values[1].t(), values[len(values) // 2][1:]
        if self.returns == "buffers":
            return values[-1], self.state, self.state[2:6], [values[-2][:]]
        return tuple(values[-3:])


def draw(seed: int, features: tuple[str, ...], autocast: bool = False) -> Program:
    """Draw the first program of a seed that eager runs at every number of rows.

    It takes some of the features only, and so more operations of each. Most programs have weights.
    """
    chance = random.Random(seed)
    some = [name for name in features if chance.random() < 0.7] or features
    names = [op for feature in some for op in FEATURES[feature]]
    weights = [3 if op in FEATURES["boundaries"] else 1 for op in names]
    for _ in range(200):
        ops = chance.choices(names, weights, k=chance.randint(3, 14))
        if "pure" in features and chance.random() < 0.7:
            ops[chance.randrange(len(ops))] = "linear"
        steps = [(op, chance.randrange(12), chance.randrange(12)) for op in ops]
        returns = chance.choice(RETURNS)
        torch.manual_seed(seed)
        program = Program(steps, returns).requires_grad_(False)
        if all(runs(copy.deepcopy(program), rows, autocast) for rows in (0, 1, 3, 4)):
            return program
    raise AssertionError(f"no program of seed {seed} runs in eager")


def runs(program: Callable[..., Any], rows: int, autocast: bool) -> bool:
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            program(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))
    except RuntimeError:  # some view what cannot be viewed
        return False
    return True
