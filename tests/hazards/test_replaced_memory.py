"""A step that replaces the memory of a weight is not captured, and the weight is what eager gives."""

from collections.abc import Callable

import pytest
import torch
from lib.breakable import FULL, PIECEWISE, step
from lib.front_ends import COMPILED, ROWS, WIDTH, WRAPPERS, front_end, settings
from torch import nn

import cgcompile
from cgcompile.errors import CaptureError
from cgcompile.reasons import Reason


class Net(nn.Module):
    """Replaces the memory of one of its weights at each step."""

    def __init__(self, replace: Callable[["Net"], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("table", torch.rand(WIDTH, WIDTH))
        self.replace = replace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replace(self)
        return (x + self.weight) @ self.table


def parameter_data(net: Net) -> None:
    net.weight.data = net.weight.data * 2


def buffer_data(net: Net) -> None:
    net.table.data = net.table * 2


HOWS = {
    "weight": parameter_data,
    "table": buffer_data,
    "weight, by set_": lambda net: net.weight.set_(net.weight * 2),
    "table, transposed": lambda net: net.table.t_(),
}


@pytest.mark.parametrize("how", ["weight", "table", "weight, by set_"])
@pytest.mark.parametrize("guards", ["keep", "shape"])
def test_a_compiled_step_that_replaces_memory_is_right_and_counted(
    how: str, guards: str, device: str
) -> None:
    """Each step starts from what the last one left; it is not captured again and again."""
    torch.manual_seed(0)
    model, plain = Net(HOWS[how]).to(device), Net(HOWS[how]).to(device)
    plain.load_state_dict(model.state_dict())
    name = "torch.compile" if guards == "keep" else "cgcompile.compile"
    if (name, how) == ("cgcompile.compile", "weight, by set_"):
        pytest.skip(
            "Dynamo breaks the graph at set_ of a parameter, which this entry point refuses"
        )
    served = front_end(name, model, device)
    for _ in range(12):
        x = torch.randn(ROWS, WIDTH, device=device)
        with torch.no_grad():
            torch.testing.assert_close(served.step(x), plain(x))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())
    counters = served.counters()
    assert counters.captures <= 2
    assert counters.plain[Reason.TOO_MANY_BINDINGS] + counters.plain[Reason.CAPTURE_FAILED] >= 5
    assert how.split(",")[0] in str(counters)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_refuses_and_restores_the_weight(name: str, how: str, device: str) -> None:
    torch.manual_seed(0)
    model = Net(HOWS[how]).to(device)
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    starts = [model.weight.data_ptr(), model.table.data_ptr()]
    served = front_end(name, model, device)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"replaces the memory"):
                served.step(torch.randn(ROWS, WIDTH, device=device))
            torch.testing.assert_close(dict(model.state_dict()), kept, rtol=0, atol=0)
            assert [model.weight.data_ptr(), model.table.data_ptr()] == starts
        model.replace = lambda net: None  # the next good call works
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), model(x))
    assert served.counters().replays == 2


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["CudaGraphManager", "EncoderCudaGraphManager"])
def test_a_manager_runs_such_a_step_plain(name: str, how: str, device: str) -> None:
    torch.manual_seed(0)
    model = Net(HOWS[how]).to(device)
    served = front_end(name, model, device)
    with torch.inference_mode():
        served.step(torch.randn(ROWS, WIDTH, device=device))  # the first one captures
        plain = Net(HOWS[how]).to(device)
        plain.load_state_dict(model.state_dict())
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), plain(x))
            torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert served.counters().replays == 0


@pytest.mark.parametrize("name", COMPILED)
def test_weights_that_move_between_steps_are_captured_once_they_stay(
    name: str, device: str
) -> None:
    torch.manual_seed(0)
    model = Net(lambda net: None).to(device)
    served = front_end(name, model, device)
    with torch.no_grad():
        for call in range(16):
            if call < 8:
                model.weight.data = torch.rand(WIDTH, device=device)
            x = torch.randn(ROWS, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), model(x))
    counters = served.counters()
    assert counters.captures == 1
    assert counters.replays >= 5
    assert "weight' has other memory at every call" in str(counters)


def test_an_argument_of_a_wrapper_is_restored_too(device: str) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        x.data = x.data * 2
        return x + 1

    wrapper = cgcompile.CUDAGraphWrapper(doubled, settings(device))
    x = torch.rand(ROWS, WIDTH, device=device)
    kept, start = x.clone(), x.data_ptr()
    with (
        torch.no_grad(),
        step(ROWS, FULL),
        pytest.raises(CaptureError, match="replaces the memory"),
    ):
        wrapper(x)
    assert torch.equal(x, kept)
    assert x.data_ptr() == start


def test_a_break_may_replace_memory_that_no_segment_reads(device: str) -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            swap(self)
            return x @ self.table

    swap = cgcompile.eager_break_during_capture(parameter_data)
    model = Broken(parameter_data).to(device)
    wrapper = cgcompile.BreakableCUDAGraphWrapper(model, settings(device))
    x = torch.rand(ROWS, WIDTH, device=device)
    before = model.weight.clone()
    with torch.no_grad(), step(ROWS, PIECEWISE):
        torch.testing.assert_close(wrapper(x), (x + 1) @ model.table)
    torch.testing.assert_close(model.weight, before * 2)
    assert wrapper.counters.captures == 1
