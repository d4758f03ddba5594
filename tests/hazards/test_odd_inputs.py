"""Inputs that graphs cannot hold run eager, and the reason names them, not their values."""

import pytest
import torch
from hazard_support import COMPILED, ROWS, WIDTH, compiled, settings
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor
from cgcompile.errors import BatchError
from cgcompile.reasons import Reason


@pytest.mark.parametrize("name", COMPILED)
def test_a_meta_tensor_beside_others(name: str, device: str) -> None:
    def step(m: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return m * 2, x * 3 + 1

    served = compiled(name, step, settings(device))
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, device=device)
            made, result = served.step(torch.empty(4, device="meta"), x)
            assert made.device.type == "meta"
            torch.testing.assert_close(result, x * 3 + 1)
    counters = served.counters()
    assert counters.plain == {Reason.UNSUPPORTED_INPUT: 4}
    assert "is on the meta device" in counters.details[Reason.UNSUPPORTED_INPUT]
    assert "m" in counters.details[Reason.UNSUPPORTED_INPUT].split(" is on ")[0]


def test_the_list_of_compiled_autograd(device: str) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    backend = cgcompile.Backend(settings(device))
    with torch._dynamo.config.patch(compiled_autograd=True):
        backward = torch.compile(lambda loss: loss.backward(), backend=backend)
        for _ in range(4):
            x, model.weight.grad = torch.randn(ROWS, WIDTH, device=device), None
            backward(model(x).sum())
            torch.testing.assert_close(model.weight.grad, x.sum(0).expand(WIDTH, WIDTH))
    assert backend.counters.plain[Reason.UNSUPPORTED_INPUT] >= 3
    assert backend.counters.details[Reason.UNSUPPORTED_INPUT].endswith("is a list")


def test_an_error_shows_no_values_of_tensors() -> None:
    with pytest.raises(BatchError) as caught:
        BatchDescriptor(4, extra=("auto", ([torch.tensor(17.25)], torch.tensor(18.25))))
    assert "list" in str(caught.value)
    assert "17.25" not in str(caught.value)
    assert "18.25" not in str(caught.value)
