"""Inputs that graphs cannot hold run eager, and the reason names them, not their values."""

from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, ROWS, WIDTH, compiled, settings
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor
from cgcompile.errors import BatchError
from cgcompile.reasons import Reason


def doubled(m: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return m * 2, x * 3 + 1


def like_meta(m: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Meta tensors made in the step, and tensors of the device made after them."""
    scratch = torch.empty_like(m).t()
    ones = torch.ones_like(scratch, device=x.device)
    return torch.zeros(3, device="meta"), torch.tanh(x) + ones.sum() + m.shape[0]


def written(m: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m.add_(1)
    return m, torch.tanh(x.sin() + x.cos())


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("step", [doubled, like_meta, written])
def test_a_meta_tensor_beside_others(name: str, step: Any, device: str) -> None:
    """It has no memory: it runs eager between captured pieces, and its layout is guarded."""
    served = compiled(name, step, settings(device))
    with torch.inference_mode():
        for count in (4, 4, 4, 4, 6, 6, 6):
            x = torch.randn(ROWS, WIDTH, device=device)
            m = torch.empty(count, 2, device="meta")
            (meta, result), (expected, right) = served.step(m, x), step(m, x)
            assert meta.device.type == "meta"
            assert (meta is m) is (expected is m)
            assert (meta.shape, meta.stride()) == (expected.shape, expected.stride())
            torch.testing.assert_close(result, right)
    counters = served.counters()
    assert counters.captures >= 1
    assert counters.replays >= 2
    assert set(counters.plain) == {Reason.WARMING}


@pytest.mark.parametrize("name", COMPILED)
def test_a_step_of_meta_tensors_alone(name: str, device: str) -> None:
    served = compiled(name, lambda m: m * 2 + 1, settings(device))
    with torch.inference_mode():
        for _ in range(3):
            assert served.step(torch.empty(4, device="meta")).shape == (4,)
    assert served.counters().plain == {Reason.NO_DEVICE: 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_the_list_of_compiled_autograd(compiler: str, device: str) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    backend = cgcompile.Backend(settings(device, compiler=compiler))
    with torch._dynamo.config.patch(compiled_autograd=True):
        backward = torch.compile(lambda loss: loss.backward(), backend=backend)
        for rows in (4, 4, 6, 7, 7):  # the second size makes it an input beside the list
            x, model.weight.grad = torch.randn(rows, WIDTH, device=device), None
            backward(model(x).sum())
            torch.testing.assert_close(model.weight.grad, x.sum(0).expand(WIDTH, WIDTH))
    assert backend.counters.plain[Reason.UNSUPPORTED_INPUT] == 5
    assert "inputs is a list" in backend.counters.details[Reason.UNSUPPORTED_INPUT]


def test_an_error_shows_no_values_of_tensors() -> None:
    with pytest.raises(BatchError) as caught:
        BatchDescriptor(4, extra=("auto", ([torch.tensor(17.25)], torch.tensor(18.25))))
    assert "list" in str(caught.value)
    assert "17.25" not in str(caught.value)
    assert "18.25" not in str(caught.value)
