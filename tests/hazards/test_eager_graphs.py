"""A graph of eager pieces alone counts why they are eager, and ``strict`` refuses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, WIDTH, compiled, settings

import cgcompile
from cgcompile.errors import DispatchError
from cgcompile.reasons import Reason


def in_region(x: torch.Tensor) -> torch.Tensor:
    with cgcompile.eager_region():
        return x * 2 + 1


EAGER: dict[str, tuple[Callable[..., Any], Reason]] = {
    "nonzero": (lambda x: x.nonzero() + 1, Reason.HOST_SYNC),
    "unique": (lambda x: x.unique(), Reason.HOST_SYNC),
}
ASKED_FOR: dict[str, tuple[Callable[..., Any], Reason]] = {
    "region": (in_region, Reason.EAGER_REGION),
    "op": (lambda x: torch.sigmoid(x), Reason.SPLITTING_OP),
    "views": (lambda x: x.view(-1)[1:], Reason.NO_KERNEL),
}


def run(name: str, step: Callable[..., Any], device: str, **more: Any) -> Any:
    config = settings(device, splitting_ops=("aten::sigmoid",), **more)
    served = compiled(name, step, config)
    patch = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(patch), torch.inference_mode():
        for _ in range(3):
            x = torch.randn(3, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), step(x))
    return served.counters()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", EAGER)
def test_eager_pieces_alone(kind: str, name: str, device: str) -> None:
    step, reason = EAGER[kind]
    counters = run(name, step, device)
    assert dict(counters.plain) == {reason: 3}
    assert counters.details[reason].startswith("every piece runs eager; piece_0: ")
    with pytest.raises(DispatchError, match=reason.value):
        run(name, step, device, strict=True)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", ASKED_FOR)
def test_eager_pieces_that_were_asked_for(kind: str, name: str, device: str) -> None:
    step, reason = ASKED_FOR[kind]
    assert dict(run(name, step, device, strict=True).plain) == {reason: 3}
