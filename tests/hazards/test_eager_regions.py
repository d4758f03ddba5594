"""What is called in an eager region runs without graphs, on every front end, as eager does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, FRONT_ENDS, MANAGERS, ROWS, WIDTH, front_end, settings, wrapped
from torch import nn

import cgcompile
from cgcompile.errors import CaptureError
from cgcompile.reasons import Reason


def linear(device: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    return model.requires_grad_(False)


def check(step: Callable[..., Any], eager: Callable[..., Any], device: str) -> None:
    x = torch.randn(ROWS, WIDTH, device=device)
    torch.testing.assert_close(step(x), eager(x))


@pytest.mark.parametrize("name", FRONT_ENDS)
@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_front_end_called_in_a_region(name: str, first: str, device: str) -> None:
    model = linear(device)
    served = front_end(name, model, device, strict=name not in MANAGERS)
    with torch.inference_mode():
        if name in MANAGERS:
            check(served.step, model, device)  # the first step captures
        if first == "outside":
            for _ in range(4):
                check(served.step, model, device)
        before = served.counters()
        before = before + type(before)()  # a copy
        with cgcompile.eager_region():
            for _ in range(3):
                check(served.step, model, device)
        inside = served.counters()
        assert (inside.captures, inside.replays) == (before.captures, before.replays)
        if name not in MANAGERS:
            assert inside.plain[Reason.EAGER_REGION] == before.plain[Reason.EAGER_REGION] + 3
        for _ in range(4):
            check(served.step, model, device)
    assert served.counters().replays >= before.replays + 2


def callee(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def region_around_a_break(x: torch.Tensor) -> torch.Tensor:
    x = x - 1
    with cgcompile.eager_region():
        x = callee(x)
        x = x + 5
    return x


def test_a_callee_with_a_graph_break(device: str) -> None:
    backend = cgcompile.Backend(settings(device, strict=True))
    compiled = torch.compile(region_around_a_break, backend=backend)
    with torch.inference_mode():
        for _ in range(5):
            check(compiled, region_around_a_break, device)
    counters = backend.counters
    assert counters.captures == counters.replays == 0
    assert counters.plain[Reason.EAGER_REGION] == counters.calls == 10


def test_a_callee_that_is_also_called_elsewhere(device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return callee(x) + region_around_a_break(x)

    backend = cgcompile.Backend(settings(device))
    compiled = torch.compile(step, backend=backend)
    with torch.inference_mode():
        for _ in range(6):
            check(compiled, step, device)
    counters = backend.counters
    assert counters.plain[Reason.EAGER_REGION] == 12
    assert counters.replays >= 8


@pytest.mark.parametrize("name", COMPILED)
def test_gradients_flow_through_a_region(name: str, device: str) -> None:
    model = linear(device).requires_grad_(True)
    served = front_end(name, model, device)
    x = torch.randn(ROWS, WIDTH, device=device)
    with cgcompile.eager_region():
        served.step(x).sum().backward()
    got = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, [each.grad for each in model.parameters()])


@pytest.mark.parametrize("name", COMPILED)
def test_an_op_in_a_region_reads_the_context_of_the_step(name: str, device: str) -> None:
    seen = []

    @torch.library.custom_op(f"cghazard::read_{COMPILED.index(name)}", mutates_args=())
    def read(x: torch.Tensor) -> torch.Tensor:
        seen.append(cgcompile.get_forward_context().attn_metadata)
        return x * 2

    read.register_fake(torch.empty_like)
    model = nn.Module()
    model.forward = lambda x: read(x) + 1
    served = front_end(name, model, device)
    with torch.inference_mode():
        for number in range(3):
            metadata = {"step": number}
            with cgcompile.set_forward_context(metadata), cgcompile.eager_region():
                check(served.step, lambda x: x * 2 + 1, device)
            assert seen[-1] is metadata
    assert served.counters().plain[Reason.EAGER_REGION] == 3


def test_a_region_ends_and_nests_and_is_of_its_thread(device: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = linear(device)
    served = front_end("torch.compile", model, device)
    region = cgcompile.eager_region()
    with torch.inference_mode():
        for _ in range(3):
            check(served.step, model, device)
        with region, cgcompile.eager_region():
            pass
        with pytest.raises(ZeroDivisionError), cgcompile.eager_region():
            raise ZeroDivisionError
        check(served.step, model, device)
        replays = served.counters().replays

    def elsewhere() -> None:
        with torch.inference_mode():
            check(served.step, model, device)

    with cgcompile.eager_region(), ThreadPoolExecutor(1) as pool:
        pool.submit(elsewhere).result()
    assert served.counters().replays == replays + 1
    assert Reason.EAGER_REGION not in served.counters().plain


@pytest.mark.parametrize("name", ["CUDAGraphWrapper", "BreakableCUDAGraphWrapper"])
def test_a_region_inside_of_a_capture_is_an_error(name: str, device: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with cgcompile.eager_region():
                return x * 2

    served = wrapped(name, Model(), settings(device))
    with torch.inference_mode(), pytest.raises(CaptureError, match="eager_break_during_capture"):
        check(served.step, Model(), device)
    assert served.counters().captures == 0


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("compiler", ["eager", "aot"])
def test_a_region_that_only_makes_a_view_of_written_memory(
    name: str, compiler: str, device: str
) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.sin()
            with cgcompile.eager_region():
                view = y[:, 2:6]  # is made again in the next piece; nothing is left of this one
            y.mul_(0.5)
            return torch.cat((view, y[:, :4]), 1), view + y.mean()

    served = front_end(name, Model(), device, compiler=compiler)
    with torch.inference_mode():
        for _ in range(4):
            check(served.step, Model(), device)
    assert served.counters().replays >= 2
