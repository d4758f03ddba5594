"""What an eager break leaves in padding rows, on the front ends that break.

In a trace the dimension of the batch is known, so steps of a compiled model zero its padding
rows behind each break. Breakable capture knows sizes alone, and as many heads as tokens would look
the same: there the rows stay as in eager code, and the break itself zeroes them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.front_ends import ROWS, WIDTH, settings
from torch import Tensor, nn

import cgcompile
from cgcompile import BatchDescriptor, set_forward_context
from cgcompile.reasons import Reason

FX, BREAKABLE, WRAPPER = "fx", "breakable", "BreakableCUDAGraphWrapper"


def real_rows() -> int:
    real = cgcompile.get_forward_context().num_unpadded_tokens
    return ROWS if real is None else real


@torch.library.custom_op("padrows::garbage", mutates_args=())
def garbage(x: Tensor) -> Tensor:
    """Return real rows, and NaN behind them."""
    result = x * 2
    result[real_rows() :] = torch.nan
    return result


@torch.library.custom_op("padrows::garbage_into", mutates_args={"out"})
def garbage_into(x: Tensor, out: Tensor) -> None:
    out.copy_(garbage(x))


@torch.library.custom_op("padrows::cleared", mutates_args=())
def cleared(x: Tensor) -> Tensor:
    """Return real rows, and zeros behind them."""
    result = x * 2
    result[real_rows() :] = 0
    return result


@torch.library.custom_op("padrows::heads", mutates_args=())
def heads(x: Tensor) -> Tensor:
    """Return f32[ROWS heads, n tokens, WIDTH]."""
    return x * torch.arange(1.0, ROWS + 1, device=x.device)[:, None, None]


@torch.library.custom_op("padrows::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


garbage.register_fake(torch.empty_like)
doubled.register_fake(torch.empty_like)
garbage_into.register_fake(lambda x, out: None)
cleared.register_fake(torch.empty_like)
heads.register_fake(lambda x: x.new_empty(ROWS, *x.shape))
OPS = tuple(
    f"padrows::{name}" for name in ("garbage", "garbage_into", "cleared", "doubled", "heads")
)


class Total(nn.Module):
    """A segment that mixes rows behind the break."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x + 1).flatten(0, -2).sum(0)


def in_place(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.padrows.garbage_into(x, out)
    return out


def built(front_end: str, model: nn.Module, device: str) -> Any:
    if front_end == WRAPPER:
        return cgcompile.BreakableCUDAGraphWrapper(model, settings(device, splitting_ops=OPS))
    config = settings(device, splitting_ops=OPS, splitting=front_end)
    dims = {"x": 0} if front_end == FX else None
    return cgcompile.compile(model, config, dynamic_dims=dims)


def totals(front_end: str, op: Any, device: str, steps: tuple[int | None, ...]) -> list[Tensor]:
    """Return what each step gives; a compiled model first has a step that warms up."""
    run, x = built(front_end, Total(op), device), torch.ones(ROWS, WIDTH, device=device)
    results = []
    with torch.inference_mode():
        for real in (None, *steps) if front_end == FX else steps:
            with set_forward_context(
                cudagraph_runtime_mode="PIECEWISE",
                batch_descriptor=BatchDescriptor(ROWS),
                num_tokens=ROWS,
                num_unpadded_tokens=real,
            ):
                results.append(run(x).clone())
    counters = run.backend.counters if front_end == FX else getattr(run, "wrapper", run).counters
    assert (counters.captures, counters.replays) == (1, len(steps) - 1)
    return results[-len(steps) :]


def assert_same(result: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


STEPS = 2, 2, 4, 1, None  # the first one captures


def rows_only(device: str) -> list[Tensor]:
    """Return the sums of the real rows."""
    return [torch.full((WIDTH,), 4.0 * (real or ROWS), device=device) for real in STEPS]


@pytest.mark.parametrize("front_end", [FX, BREAKABLE, WRAPPER])
def test_a_break_that_zeroes_padding_rows(front_end: str, device: str) -> None:
    assert_same(totals(front_end, torch.ops.padrows.cleared, device, STEPS), rows_only(device))


@pytest.mark.parametrize("op", [torch.ops.padrows.garbage, in_place], ids=["new", "in place"])
@pytest.mark.parametrize("front_end", [FX, BREAKABLE, WRAPPER])
def test_a_break_that_leaves_garbage_there(front_end: str, op: Any, device: str) -> None:
    expected = rows_only(device)
    if front_end != FX:  # as in eager code
        expected = [
            total if real in (None, ROWS) else torch.full_like(total, torch.nan)
            for total, real in zip(expected, STEPS, strict=True)
        ]
    assert_same(totals(front_end, op, device, STEPS), expected)


@pytest.mark.parametrize("front_end", [FX, BREAKABLE, WRAPPER])
def test_another_dimension_as_long_as_the_batch_is_left_alone(front_end: str, device: str) -> None:
    total = Total(torch.ops.padrows.heads)(torch.ones(ROWS, WIDTH, device=device))
    result = totals(front_end, torch.ops.padrows.heads, device, STEPS)
    assert_same(result, [total] * len(STEPS))


# ---------------------------------------------------------------- where the trace has which rows


class Widened(nn.Module):
    """A boundary that leaves garbage in padding rows, and a piece that mixes rows."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.linear = op, nn.Linear(10, 10)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mixed = self.op(self.linear(x) if y is None else x + y[:1, : x.shape[1]])
        return mixed + mixed.sum(0)


def allocated(x: Tensor) -> Tensor:
    out = torch.empty(*x.shape, device=x.device)
    torch.ops.padrows.garbage_into(x, out)
    return out


def padded(rows: int, real: int, mode: str = "PIECEWISE") -> Any:
    return set_forward_context(
        cudagraph_runtime_mode=mode,
        batch_descriptor=BatchDescriptor(rows) if mode != "NONE" else None,
        num_tokens=rows,
        num_unpadded_tokens=real,
    )


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
@pytest.mark.parametrize("op", [torch.ops.padrows.garbage, in_place, allocated])
@pytest.mark.parametrize("trace", ["static", "one size", "two sizes", "named"])
def test_all_steps_zero_padding_rows(trace: str, op: Any, mode: str, device: str) -> None:
    torch.manual_seed(0)
    model, rows = Widened(op).to(device).eval(), ROWS + 2
    more = {"capture_dim": "x.size()[0]"} if trace == "named" else {}
    backend = cgcompile.Backend(settings(device, splitting_ops=OPS, **more))
    step = torch.compile(model, backend=backend)
    x, arguments = torch.empty(rows, 10, device=device), []
    if trace != "static":
        torch._dynamo.mark_dynamic(x, 0)
    if trace == "two sizes":  # one of them is no leading dimension
        arguments = [torch.zeros(1, 12, device=device)]
        torch._dynamo.mark_dynamic(arguments[0], 1)
    if trace == "named":  # two leading ones of one size
        arguments = [torch.zeros(rows, 10, device=device)]
        torch._dynamo.mark_dynamic(arguments[0], 0)
    with torch.inference_mode():
        for call in range(6):
            real = 1 + call % 3
            x.normal_()
            with set_forward_context(num_tokens=real):
                expected = model(x[:real], *arguments)
            with padded(rows, real, mode):
                result = step(x, *arguments)
            torch.testing.assert_close(result[:real], expected)
    counters = backend.counters
    assert (counters.replays, counters.plain.total()) == ((4, 1) if mode == "PIECEWISE" else (0, 6))
    assert not counters.degraded


class Heads(nn.Module):
    """Leaves a value f32[heads, WIDTH] that was summed over rows."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.ops.padrows.cleared(x).sum(0).repeat(self.heads)
        left = torch.ops.padrows.doubled(pooled.view(self.heads, -1))
        return x + left.sum(0)


def test_a_static_value_that_is_as_long_by_chance_is_left_alone(device: str) -> None:
    """Nothing between the rows and the value has rows as its leading dimension."""
    model, rows, real = Heads(ROWS + 2), ROWS + 2, 2
    backend = cgcompile.Backend(settings(device, splitting_ops=OPS))
    step = torch.compile(model, backend=backend)
    x = torch.empty(rows, WIDTH, device=device)
    for _ in range(4):
        x.normal_()
        with torch.inference_mode(), padded(rows, real):
            torch.testing.assert_close(step(x), model(x))
    assert backend.counters.replays == 2


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
def test_unknown_rows_are_counted_and_logged_once(mode: str, device: str, caplog: Any) -> None:
    """As many rows as columns: a transposed value would have the same size."""
    model = Widened(torch.ops.padrows.garbage).to(device).eval()
    backend = cgcompile.Backend(settings(device, splitting_ops=OPS))
    step = torch.compile(model, backend=backend)
    x = torch.zeros(10, 10, device=device)
    with torch.inference_mode():
        for _ in range(4):
            with padded(10, 3, mode):
                assert step(x).isnan().any()
            with padded(10, 10, mode):
                assert not step(x).isnan().any()
    assert backend.counters.degraded == {Reason.PADDING_ROWS: 4}
    assert "10 rows" in backend.counters.details[Reason.PADDING_ROWS]
    assert sum("padding_rows" in record.message for record in caplog.records) == 1


# ---------------------------------------------------------------- rows that share memory

PADDED, REAL = 6, 4

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda q: q * 2,
    "expanded rows": lambda q: q[:1].clone().expand(q.shape[0], WIDTH),
    "expanded columns": lambda q: q[:, :1].clone().expand(q.shape[0], WIDTH),
    "unfolded": lambda q: q[0].repeat(q.shape[0])[: q.shape[0] + WIDTH - 1].unfold(0, WIDTH, 1),
    "transposed": lambda q: q.t().contiguous().t(),
}
SHARED = ("expanded rows", "unfolded")  # rows that share memory


@torch.library.custom_op("rows::laid_out", mutates_args=())
def laid_out(q: Tensor, kind: str) -> Tensor:
    return LAYOUTS[kind](q)


laid_out.register_fake(lambda q, kind: LAYOUTS[kind](q))


class Mixing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.ops.rows.laid_out(self.first(x), self.kind)
        return self.second(mixed), mixed.abs()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_real_rows_are_those_of_eager(kind: str, device: str) -> None:
    model = Mixing(kind).to(device).requires_grad_(False)
    config = settings(device, splitting_ops=("rows::laid_out",))
    compiled = cgcompile.compile(model, config, dynamic_dims={"x": 0})
    x = torch.zeros(PADDED, WIDTH, device=device)
    padded = {"batch_descriptor": cgcompile.BatchDescriptor(PADDED), "num_unpadded_tokens": REAL}
    with torch.inference_mode():
        for _ in range(4):
            x.normal_()
            with cgcompile.set_forward_context(cudagraph_runtime_mode="PIECEWISE", **padded):
                result = compiled(x)
            for one, other in zip(result, model(x), strict=True):
                torch.testing.assert_close(one[:REAL], other[:REAL])
    assert (result[1][REAL:].count_nonzero() == 0).item() is (kind not in SHARED)
    assert compiled.backend.counters.replays == 2
