"""A custom op whose fake implementation returns another shape or dtype raises at its first run."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, check, compiled, context, settings

from cgcompile import AttentionCGSupport, CUDAGraphMode, SplittingOp
from cgcompile.errors import PieceCompileError

# name -> what the fake implementation returns for x, f32[rows, WIDTH]
FAKES: dict[str, Any] = {
    "right": lambda x: torch.empty_like(x),
    "wider": lambda x: x.new_empty(x.shape[0], 2 * x.shape[1]),
    "flat": lambda x: x.new_empty(x.shape[0] * x.shape[1]),
    "half": lambda x: x.new_empty(x.shape, dtype=torch.float16),
}
TEXTS = {"wider": "f32[4, 16]", "flat": "f32[32]", "half": "f16[4, 8]"}


@pytest.fixture(scope="module")
def ops() -> Iterator[dict[str, Any]]:
    with torch.library._scoped_library("hazard_fakes", "DEF") as library:
        for name, fake in FAKES.items():
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
            torch.library.register_fake(f"hazard_fakes::{name}", fake, lib=library)
        yield {name: getattr(torch.ops.hazard_fakes, name) for name in FAKES}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("fake", list(TEXTS))
def test_another_shape_or_dtype(
    name: str, splits: bool, mode: str, warmups: int, fake: str, ops: Any, device: str
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return ops[fake](x + 1) * 3

    split = SplittingOp(f"hazard_fakes::{fake}", support=AttentionCGSupport.ALWAYS)
    more: dict[str, Any] = {"splitting_ops": (split,)} if splits else {}
    config = settings(device, cudagraph_mode=mode, num_warmups=warmups, **more)
    served = compiled(name, step, config, dynamic=False if name == "torch.compile" else None)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode(), pytest.raises(PieceCompileError) as caught:
        served.step(x)
    text = str(caught.value)
    assert f"hazard_fakes::{fake}" in text
    assert f"returned f32[4, 8]; traced was {TEXTS[fake]}" in text
    assert "register_fake" in text
    counters = served.counters()
    assert (counters.calls, counters.failures, counters.captures) == (1, 1, 0)


@pytest.mark.parametrize("name", COMPILED)
def test_each_batch_size_is_compared(name: str, ops: Any, device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return ops["right"](x + 1) * 3

    config = settings(device, splitting_ops=("hazard_fakes::right",), cudagraph_mode="PIECEWISE")
    served = compiled(name, step, config, dynamic=True if name == "torch.compile" else None)
    for rows in (ROWS, 6, 9) * 4:
        check(served.step, step, device, rows=rows)
    counters = served.counters()
    assert (counters.captures, counters.replays) == (3, 6)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_under_a_forward_context(mode: str, ops: Any, device: str) -> None:
    config = settings(device, splitting_ops=("hazard_fakes::wider",), num_warmups=0)
    served = compiled("torch.compile", lambda x: ops["wider"](x + 1) * 3, config)
    x = torch.randn(ROWS, WIDTH, device=device)
    with (
        torch.inference_mode(),
        context(mode=CUDAGraphMode[mode]),
        pytest.raises(PieceCompileError, match="register_fake"),
    ):
        served.step(x)
