"""Random programs: a list of steps over a growing list of values, all drawn from one seed.

A feature is a group of operations. ``TRACED`` names those that only a traced program supports: the
others run Python once, at capture.
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

FEATURES: dict[str, tuple[str, ...]] = {
    "pure": ("linear", "norm", "add", "gelu", "where", "reduce"),
    "views": (
        "alias",
        "columns",
        "turned",
        "chunked",
        "stacked",
        "strided",
        "reshaped",
        "overlapping",
    ),
    "numbers": ("python_scalar", "scalar_tensor", "sized", "half", "to_int"),
    "writes": ("write", "write_half", "write_row", "write_buffer", "write_cache", "out_argument"),
    "boundaries": ("attend", "scale_in_place", "attend_twice"),
    "breaks": ("break_pair", "break_alias"),
    "aliases": ("contiguous", "same_dtype", "dropout", "expanded"),
    "regions": ("region", "region_pair", "region_overlapping"),
    "alias_boundaries": (
        "region_view",
        "region_reshape",
        "region_contiguous",
        "region_write",
        "region_alias",
    ),
    "rebinds": ("rebind",),
}
TRACED = ("regions", "alias_boundaries", "rebinds")
RETURNS = ("one", "several", "mapping", "inputs", "views", "buffers")


@cgcompile.eager_break_during_capture
def sum_and_view(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = a.sin() + b
    return total, total[:]


@cgcompile.eager_break_during_capture
def same_memory(a: torch.Tensor) -> torch.Tensor:
    return a[:]


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
            values += getattr(self, op)(a, b, cache)
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

    # -------------------------------------------------------------- pure

    def linear(self, a, b, cache):
        return [self.second(self.first(a)) + b * 0.25]

    def norm(self, a, b, cache):
        return [self.scaling(a)]

    def add(self, a, b, cache):
        return [a * 0.5 + b * 0.25]

    def gelu(self, a, b, cache):
        return [F.gelu(a), torch.sigmoid(b)]

    def where(self, a, b, cache):
        return [torch.where(a > b, a, b * 0.5)]

    def reduce(self, a, b, cache):
        return [a - a.mean(-1, keepdim=True) + b.amax(-1, keepdim=True)]

    # -------------------------------------------------------------- views

    def alias(self, a, b, cache):
        return [a[:]]

    def columns(self, a, b, cache):
        return [torch.cat((a[:, 4:], b[:, :4]), 1)]

    def turned(self, a, b, cache):
        return [a.t().contiguous().t()]

    def chunked(self, a, b, cache):
        left, right = a.chunk(2, 1)
        return [torch.cat((right, left), 1)]

    def stacked(self, a, b, cache):
        return list(torch.stack((a, b)).unbind(0))

    def strided(self, a, b, cache):
        return [a.unflatten(1, (4, 2)).transpose(1, 2).flatten(1)]

    def reshaped(self, a, b, cache):
        return [a.reshape(-1).view(b.shape)]

    def overlapping(self, a, b, cache):
        wide = torch.cat((a, b), 1)
        return [wide[:, :WIDTH], wide[:, WIDTH // 2 : -WIDTH // 2], wide[:, WIDTH:]]

    # -------------------------------------------------------------- numbers

    def python_scalar(self, a, b, cache):
        return [a * 0.5 + 3]

    def scalar_tensor(self, a, b, cache):
        return [a * self.factor + b.mean() * 0.125]

    def sized(self, a, b, cache):
        return [a / (a.shape[0] + 1)]

    def half(self, a, b, cache):
        return [(a.double() * 0.5).float()]

    def to_int(self, a, b, cache):
        return [(a.clamp(-50, 50) * 4).to(torch.int32).float() * 0.25]

    # -------------------------------------------------------------- writes

    def write(self, a, b, cache):
        a.mul_(0.5)
        return []

    def write_half(self, a, b, cache):
        a[:, 2:6].add_(0.25)
        return []

    def write_row(self, a, b, cache):
        a.unbind(1)[3].mul_(0.5)
        return []

    def write_buffer(self, a, b, cache):
        self.state.mul_(0.5).add_(0.25)
        return [a * self.state]

    def write_cache(self, a, b, cache):
        cache.copy_(a * 0.5)
        return []

    def out_argument(self, a, b, cache):
        made = torch.empty_like(a)
        torch.add(a, b, alpha=0.25, out=made)
        return [made]

    def rebind(self, a, b, cache):
        self.state = self.state * 0.5
        return [a + self.state]

    # -------------------------------------------------------------- may return their input

    def contiguous(self, a, b, cache):
        return [a.contiguous()]

    def same_dtype(self, a, b, cache):
        return [a.to(a.dtype), b.float()]

    def dropout(self, a, b, cache):
        return [F.dropout(a, training=False)]

    def expanded(self, a, b, cache):
        return [a.expand_as(b)]

    # -------------------------------------------------------------- boundaries

    def attend(self, a, b, cache):
        q, k = a.view(1, 1, -1, WIDTH), b.view(1, 1, -1, WIDTH)
        return [F.scaled_dot_product_attention(q, k, q).view(-1, WIDTH)]

    def attend_twice(self, a, b, cache):
        return self.attend(*self.attend(a, b, cache), b, cache)

    def scale_in_place(self, a, b, cache):
        torch.ops.cgtest.scale_(a, 0.5)
        return []

    def break_pair(self, a, b, cache):
        return list(sum_and_view(a, b))

    def break_alias(self, a, b, cache):
        return [same_memory(a)]

    def region(self, a, b, cache):
        with cgcompile.eager_region():
            made = a.sin() + b
        return [made]

    def region_pair(self, a, b, cache):
        with cgcompile.eager_region():
            made = a.sin() + b
            turned = made.unflatten(1, (4, 2)).transpose(1, 2)
        return [made, turned.flatten(1)]

    def region_overlapping(self, a, b, cache):
        with cgcompile.eager_region():
            made = self.overlapping(a, b, cache)
        return made

    def region_alias(self, a, b, cache):
        with cgcompile.eager_region():
            made = a[:]
        return [made]

    def region_view(self, a, b, cache):
        with cgcompile.eager_region():
            made = a[:, 1:5]
        return [torch.cat((made, b[:, :4]), 1), F.pad(made, (0, 4))]

    def region_reshape(self, a, b, cache):
        with cgcompile.eager_region():
            made = a.reshape(-1).view(b.shape)
        return [made, made * 0.5]

    def region_contiguous(self, a, b, cache):
        with cgcompile.eager_region():
            made = a.contiguous()
        return [made, made + b]

    def region_write(self, a, b, cache):
        with cgcompile.eager_region():
            made = a[:, 2:6]
            made.mul_(0.5)
        return [torch.cat((made, b[:, :4]), 1)]


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
