"""Calls that were once served by a trace of something else."""

from typing import Any

import pytest
import torch
from lib.entry import GUARDS, compiled
from torch import nn

import cgcompile

SLOW = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_strides_that_follow_from_sizes() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + x.stride(1)

    one = compiled(step, guards="none", dynamic_dims={"x": 0})
    for x in (
        torch.arange(9.0).view(3, 3).t(),
        torch.arange(15.0).view(3, 5).t(),
        torch.arange(24.0).view(3, 8)[:, :5].t(),
    ):
        assert torch.equal(one(x), step(x))
    assert len(one.traces) == 2


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    return torch.randn(400).as_strided(shape, strides, offset)


LAYOUTS = {  # of a tensor [3, 4], and the traces that they need
    "a stride follows from another": ([(8, 1), (8, 2), (8, 2), (10, 2), (12, 3)], 3),
    "strides are equal": ([(7, 7), (7, 7), (9, 9), (9, 2), (7, 5)], 2),
}


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("guards", GUARDS)
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=SLOW)])
@pytest.mark.parametrize(("layouts", "traces"), LAYOUTS.values(), ids=LAYOUTS)
def test_strides_that_depend_on_each_other(
    layouts: Any, traces: int, compiler: str, guards: str, read: bool
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return y * (2 if x.stride(0) > 8 else 3) + x.stride(1) if read else y

    weight = torch.randn(4, 4)
    settings = {"compiler": compiler, "dynamic_dims": {"x": 0}, "capture_device": "host"}
    one = compiled(step, guards=guards, **settings)
    for strides in layouts:
        for _ in range(4):
            x = strided((3, 4), strides)
            torch.testing.assert_close(one(x), step(x))
    x = strided((5, 4), layouts[-1])
    torch.testing.assert_close(one(x), step(x))
    assert one.backend.counters.replays > 4
    assert read or len(one.traces) == traces


@pytest.mark.parametrize("guards", GUARDS)
def test_strides_of_two_arguments(guards: str) -> None:
    """Two strides that were equal when traced have one symbol."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y

    one = compiled(step, guards=guards, dynamic_dims={"x": 0, "y": 0})
    for strides in ((8, 8), (9, 9), (9, 7), (7, 9), (6, 6)):
        for rows in (3, 3, 5):
            pair = [strided((rows, 4), (stride, 1)) for stride in strides]
            torch.testing.assert_close(one(*pair), step(*pair))


@pytest.mark.parametrize("guards", GUARDS)
def test_an_offset_that_was_the_number_of_rows(guards: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * x.storage_offset()

    one = compiled(step, guards=guards, dynamic_dims={"x": 0})
    for rows, offset in ((3, 3), (3, 5), (5, 5), (4, 9)):
        x = strided((rows, 4), (8, 1), offset)
        torch.testing.assert_close(one(x), step(x))


class Decaying(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(4, 4)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.weight.data *= 0.5
        else:
            self.weight.data = self.weight.data * 0.5
        return x @ self.weight


@pytest.mark.parametrize("compiler", ["eager", "aot", pytest.param("inductor", marks=SLOW)])
@pytest.mark.parametrize("how", ["in place", "anew"])
def test_no_write_of_data_is_lost(how: str, compiler: str) -> None:
    one = compiled(Decaying(how).eval(), guards="none", compiler=compiler, capture_device="host")
    eager, x = Decaying(how).eval(), torch.randn(1, 4)
    for _ in range(4):
        torch.testing.assert_close(one(x), eager(x))
        torch.testing.assert_close(one.weight, eager.weight)
    assert one.backend.counters.plain.total() == 4  # no graph can hold such a step


@pytest.mark.parametrize("guards", GUARDS)
def test_globals_with_two_underscores_are_the_users(guards: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * __weight  # noqa: F821

    names = step.__globals__
    names["__weight"] = torch.full((3,), 2.0)
    one, x = compiled(step, guards=guards), torch.randn(3)
    assert torch.equal(one(x), step(x))
    names["__weight"] = torch.full((3,), 5.0)
    if guards == "none":
        one.invalidate("the weight is another one")
    assert torch.equal(one(x), step(x))
    del names["__weight"]


def test_a_first_call_that_fails_proves_nothing() -> None:
    """Whether a model replaces its tensors is seen after a call that ends well."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + x
            return self.count * 1

    failing = [True]

    def picky(gm: Any, fake_inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            if failing.pop() if failing else False:
                raise ValueError("not now")
            return gm.forward(*inputs)

        return run

    one = cgcompile.compile(Counting(), compiler=picky, guards="none")
    x = torch.ones(3)
    with pytest.raises(ValueError, match="not now"):
        one(x)
    for total in (1.0, 2.0, 3.0):
        assert torch.equal(one(x), torch.full((3,), total))


def test_replaced_weights_are_old_ones_and_never_something_else() -> None:
    model = nn.Linear(4, 4)
    one, x = compiled(model, guards="none"), torch.randn(2, 4)
    before = one(x)
    weight = model.weight
    weight.data = torch.zeros(4, 4, dtype=torch.float64)
    assert torch.equal(one(x), before)
    weight.data = torch.zeros(4, 4)
    one.backend.invalidate("weights moved")
    assert torch.equal(one(x), model(x))


def test_a_compiler_that_asks_for_another_trace_gets_it() -> None:
    numpy = pytest.importorskip("numpy")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = numpy.float64(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(self.scale)

    one, x = compiled(Scaled(), guards="none"), torch.randn(3)
    assert torch.equal(one(x), x * 3.0)


def by_size(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + 1 if y.shape[0] > 4 else x - 1


def number_by_size(x: torch.Tensor) -> int:
    return 1 if x.shape[0] > 4 else 2


def by_layout(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.is_contiguous() else x - 1


def in_turns(called: Any, first: Any, second: Any, **more: Any) -> None:
    """Two calls that differ, in turns: each has a trace of its own."""
    one = compiled(called, guards="none", **more)
    for args in (first, second, first, second):
        result, expected = one(*args), called(*args)
        assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))
    assert len(one.traces) == 2


def test_sizes_and_layouts_that_no_kernel_uses() -> None:
    x = torch.ones(3)
    in_turns(by_size, (x, torch.ones(8)), (x, torch.ones(3)), dynamic_dims={"y": 0})
    in_turns(number_by_size, (torch.ones(8),), (torch.ones(3),), dynamic_dims={"x": 0})
    in_turns(by_layout, (torch.ones(3, 5).t(),), (torch.ones(5, 3),), dynamic_dims={"x": 0})
