"""No graph reads a weight that autocast cast, and cached, outside of its capture, or leaves one."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from lib.front_ends import COMPILED, FRONT_ENDS, ROWS, WIDTH, front_end
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LOW = torch.bfloat16


class Net(nn.Module):
    """Casts each weight twice in a step, in a context of its own or in that of the caller."""

    def __init__(self, own: bool, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)  # requires grad: others are not cached
        self.own = own

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.own:
            return self.twice(x).float()
        with torch.autocast(x.device.type, LOW):
            return self.twice(x).float()


def junk(device: str) -> list[torch.Tensor]:
    """Take memory of the sizes of cast weights, so that freed ones are overwritten."""
    sizes = [WIDTH, WIDTH * WIDTH]
    return [torch.full((n,), float("nan"), device=device, dtype=LOW) for n in sizes * 64]


@pytest.mark.parametrize("name", FRONT_ENDS)
@pytest.mark.parametrize("own", [False, True])
def test_epochs_under_autocast_read_no_freed_cast(name: str, own: bool, device: str) -> None:
    model = Net(own, device)
    served, kept = front_end(name, model, device), []
    for epoch in range(3):
        kept.append(junk(device))
        with torch.no_grad(), torch.autocast(device, LOW):
            for _ in range(3):
                x = torch.randn(ROWS, WIDTH, device=device)
                model.twice(x)  # fills autocast's cache
                result = served.step(x).clone()
                with torch.autocast(device, LOW, cache_enabled=False):
                    expected = model(x)
                torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
                assert not torch.equal(result, model.linear(x).float())
            cached = model.twice(x)  # of what a capture cached, nothing may be left
        with torch.no_grad(), torch.autocast(device, LOW, cache_enabled=False):
            torch.testing.assert_close(cached, model.twice(x))
        assert torch.is_autocast_cache_enabled(), epoch
    counters = served.counters()
    assert counters.captures >= 1
    assert counters.replays >= 4


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_an_inner_context_sees_no_cast_of_the_outer_one(name: str, device: str) -> None:
    """The inner context restores the cache setting that was in force when it was created."""
    model = Net(True, device)
    served = front_end(name, model, device)
    with torch.no_grad(), torch.autocast(device, LOW):
        x = torch.randn(ROWS, WIDTH, device=device)
        for _ in range(2):
            model.twice(x)
            served.step(x)
    assert served.counters().captures >= 1
    kept = junk(device)
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH, device=device)
        with torch.no_grad(), torch.autocast(device, LOW):
            result = served.step(x).clone()
        with torch.no_grad():
            torch.testing.assert_close(result, model(x), rtol=0.05, atol=0.05)
    assert served.counters().replays >= 3
    assert all(tensor.isnan().all() for tensor in kept)


class Fused(nn.Module):
    """Calls ops whose kernels call others, which autocast casts."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        self.layer = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.to(device).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        y: torch.Tensor = self.layer(x[None])[0]  # one kernel
        product_of_x = product(x)
        assert product_of_x.dtype is LOW
        with sdpa_kernel(SDPBackend.MATH):
            z = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        # An op that autocast casts on a GPU, and on the CPU the product inside of it.
        w = torch.einsum("ij,kj->ik", x, self.linear.weight)
        assert w.dtype is LOW
        return y + product_of_x + z + torch.cdist(x, x).sum() + w


@torch.library.custom_op("cgcompile_tests::product", mutates_args=())
def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T) @ x


@product.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    low = torch.is_autocast_enabled(x.device.type)
    return torch.empty_like(x, dtype=torch.bfloat16 if low else x.dtype)


@pytest.mark.parametrize("grad_mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", [name for name in FRONT_ENDS if name not in COMPILED])
def test_kernels_that_call_other_ops_see_autocast(
    name: str, grad_mode: Callable[[], AbstractContextManager[None]], device: str
) -> None:
    """A dispatch mode runs ops with autocast off, unless it is switched on again.

    Ops inside an op that autocast casts, as inside attention, run with autocast off.
    """
    model = Fused(device)
    served = front_end(name, model, device)
    with grad_mode(), torch.autocast(device, LOW):
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH, device=device)
            result, expected = served.step(x), model(x)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert served.counters().replays >= 2
