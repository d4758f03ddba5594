"""A wrapper returns the arguments of each call, and the tensors of its module, as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphMode,
    CUDAGraphWrapper,
)

pytestmark = pytest.mark.usefixtures("without_gradients")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
N = 4


class Model(nn.Module):
    """Returns arguments and weights as they are, and views of them, around an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(N, N)
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.ones(N)  # no buffer
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, pair: Any, *, mask: torch.Tensor) -> dict[str, Any]:
        self.count += 1
        self.scale.mul_(0.5)
        hidden = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        pair[1].add_(self.inner(hidden))
        found = {"made": hidden * self.count * self.scale, "x": x, "pair": pair[1], "mask": mask}
        found |= {"count": self.count, "scale": self.scale, "weight": self.inner.weight}
        found |= {"x view": x.view(N, N), "slice": pair[1][:], "held": self.count.detach()}
        return found


def alone(x: torch.Tensor) -> torch.Tensor:
    """One tensor, which is its argument."""
    return x.mul_(2)


def objects(model: Model, call: tuple[Any, ...], result: dict[str, Any]) -> dict[str, str]:
    x, pair, mask = call
    known = {"x": x, "pair": pair[1], "mask": mask, "count": model.count, "scale": model.scale}
    known["weight"] = model.inner.weight
    return {
        key: next((name for name, each in known.items() if each is value), "another object")
        for key, value in result.items()
    }


def config(device: str) -> CompilationConfig:
    return CompilationConfig(capture_device="host" if device == "cpu" else "auto", strict=True)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)
@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_the_same_items_are_arguments_or_weights_as_in_eager(
    kind: Callable[..., Any], mode: CUDAGraphMode, device: str
) -> None:
    with torch.device(device):
        model, eager = Model(), Model()
        x, mask, pair = torch.empty(N, N), torch.ones(2), (torch.zeros(1), torch.randn(N, N))
    eager.load_state_dict(model.state_dict())
    runs = kind(model, config(device), mode)
    count, scale = model.count, model.scale
    for calls in range(5):
        x.copy_(torch.randn(N, N))
        # Other objects at the same addresses serve as well.
        call = (x[:], (pair[0], pair[1][:]), mask[:])
        other = (x.clone(), (pair[0], pair[1].clone()), mask)
        with cgcompile.set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(N)
        ):
            made = runs(*call[:2], mask=call[2])
        expected = eager(*other[:2], mask=other[2])
        assert objects(model, call, made) == objects(eager, other, expected), calls
        assert [*objects(model, call, made).values()].count("another object") == 4
        for name, value in made.items():
            assert torch.allclose(value, expected[name], atol=1e-5), (calls, name)
        for name in ("x view", "slice", "held"):
            made[name].unsqueeze_(0)  # the caller's own: nothing else has changed
    assert (runs.counters.captures, runs.counters.replays) == (1, 4), runs.counters
    assert model.count is count
    assert model.scale is scale


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_result_that_is_one_argument(kind: Callable[..., Any], device: str) -> None:
    runs, x = kind(alone, config(device), FULL), torch.ones(N, device=device)
    for calls in range(1, 5):
        same = x[:]
        with cgcompile.set_forward_context(
            cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(N)
        ):
            assert runs(same) is same
        assert x.tolist() == [2.0**calls] * N
    assert runs.counters.replays == 3
