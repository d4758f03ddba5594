"""Breaks inside of transforms of torch.func: refused by name, unless they only see plain tensors."""

from typing import Any

import pytest
import torch
from lib.breakable import rand, step

from cgcompile import BreakableCUDAGraphWrapper, CompilationConfig, eager_break_during_capture
from cgcompile.errors import CaptureError


@eager_break_during_capture
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def mapped(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: doubled(row.sin()) + 1)(x.cos())


def gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: doubled(y.sin()).sum())(x.cos())


def tangent(x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(lambda y: doubled(y.sin()), (x,), (x,))[1]


def closed_over(x: torch.Tensor) -> torch.Tensor:
    def row(y):
        return eager_break_during_capture(lambda: y * 2)()

    return torch.vmap(row)(x)


def swallowed(x: torch.Tensor) -> torch.Tensor:
    try:
        return mapped(x)
    except CaptureError:
        return x + 1


def wrapped(model: Any, **settings: Any) -> BreakableCUDAGraphWrapper:
    return BreakableCUDAGraphWrapper(model, CompilationConfig(capture_device="host", **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (mapped, r"eager break 'doubled' ran inside of torch.func \(Vmap\)"),
        (gradient, r"eager break 'doubled' ran inside of torch.func \(Grad\)"),
        (tangent, r"eager break 'doubled' ran inside of torch.func \(Jvp\)"),
        (closed_over, r"lambda>' ran inside of torch.func \(Vmap\)"),
        (swallowed, r"doubled raised CaptureError, and the program went on"),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_break_that_sees_tensors_of_a_transform(
    device: str, model: Any, said: str, mode: Any
) -> None:
    wrapper, x = wrapped(model), rand(device=device)
    with mode(), step(4):
        model(x)  # outside of a capture it may
        with pytest.raises(CaptureError, match=said):
            wrapper(x)
        assert wrapper.entries == ()
        good = wrapped(lambda x: doubled(x.cos()) + 1)
        for _ in range(3):
            x.normal_()
            assert torch.equal(good(x), x.cos() * 2 + 1)
    assert (good.counters.captures, good.counters.replays) == (1, 2)


def test_a_break_of_what_is_not_mapped(device: str) -> None:
    def model(x):
        return torch.vmap(lambda row: row + doubled(x))(x.cos())

    wrapper, x = wrapped(model), rand(device=device)
    with torch.inference_mode(), step(4):
        for _ in range(3):
            x.normal_()
            assert torch.equal(wrapper(x), model(x))
    assert wrapper.entries[0].sequence.num_eager_breaks == 1
    assert wrapper.counters.replays == 2


def test_a_splitting_op_that_is_mapped_breaks_for_each_row(device: str) -> None:
    """Torch calls an op without a rule for vmap once a row, with plain tensors."""
    with torch.library._scoped_library("cgmapped", "DEF") as library:
        library.define("attend(Tensor x) -> Tensor")
        library.impl("attend", lambda x: x.softmax(-1), "CompositeExplicitAutograd")

        def model(x):
            return torch.vmap(lambda row: torch.ops.cgmapped.attend(row.sin()) + 1)(x)

        wrapper, x = wrapped(model, splitting_ops=("cgmapped::attend",)), rand(device=device)
        with torch.inference_mode(), step(4):
            for _ in range(3):
                x.normal_()
                assert torch.equal(wrapper(x), model(x))
        assert wrapper.entries[0].sequence.num_eager_breaks == 4
        assert wrapper.counters.replays == 2
