"""Settings of torch that a graph bakes in; ``table.py`` has them for all front ends."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.front_ends import ROWS, WIDTH, front_end, settings
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cgcompile
from cgcompile.errors import HostValueChangedError, TraceError
from cgcompile.reasons import Reason
from cgcompile.torch_compat import torch_settings


class Net(nn.Module):
    """Reads the default dtype, and calls ops that have several kernels."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.to(device).eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])[0, 0]
        # In eager 0.1 has the precision of the default dtype.
        return y + torch.full((), 0.1, device=x.device).to(x.dtype) * (
            torch.finfo(torch.get_default_dtype()).bits / 32
        )


class Doubling(TorchFunctionMode):
    """Doubles what linear layers return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


@contextmanager
def changed(get: Callable[[], Any], change: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


def set_on(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return changed(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


doubling = Doubling()
_PRIORITY = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
# (a context manager, a part of its name in messages); the first ones are no guards of Dynamo.
SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), "attention"),
    "priority": (
        lambda: sdpa_kernel([*_PRIORITY, SDPBackend.CUDNN_ATTENTION], set_priority=True),
        "priority",
    ),
    "cudnn.enabled": (lambda: torch.backends.cudnn.flags(enabled=False), "cudnn"),
    "cudnn.benchmark": (lambda: set_on(torch.backends.cudnn, "benchmark", True), "benchmark"),
    "cudnn.deterministic": (
        lambda: set_on(torch.backends.cudnn, "deterministic", True),
        "cudnn.deterministic",
    ),
    "convolutions": (
        lambda: set_on(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        "convolutions",
    ),
    "deterministic": (
        lambda: changed(
            torch.are_deterministic_algorithms_enabled,
            lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
            True,
        ),
        "use_deterministic_algorithms",
    ),
    "products": (
        lambda: changed(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
        ),
        "products",
    ),
    "default dtype": (
        lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "default dtype",
    ),
    "default device": (lambda: torch.device("cpu"), "default device"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "function mode": (lambda: doubling, "function modes"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_error_names_the_setting(setting: str, device: str) -> None:
    change, named = SETTINGS[setting]
    served = front_end("CUDAGraphWrapper", Net(device), device)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for _ in range(3):
            served.step(x)
        with change(), pytest.raises(HostValueChangedError, match=named):
            served.step(x)
        served.step(x)
    assert served.counters().replays == 3


@pytest.mark.parametrize("setting", ["sdpa_kernel", "products"])
@pytest.mark.parametrize("under_context", [False, True], ids=["no context", "context"])
def test_fast_paths_compare_settings(under_context: bool, setting: str, device: str) -> None:
    model, (change, _) = Net(device), SETTINGS[setting]
    step = cgcompile.compile(model, settings(device, debug=False), guards="none")
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode="FULL", batch_descriptor=cgcompile.BatchDescriptor(ROWS)
    )
    static = torch.randn(ROWS, WIDTH, device=device)

    def run() -> None:
        static.normal_()
        with torch.inference_mode():
            expected = model(static)
            if under_context:
                with context:
                    result = step(static)
            else:
                result = step(static)
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)

    for _ in range(5):
        run()
    counters = step.backend.counters
    captures, replays = counters.captures, counters.replays
    assert captures == 1
    assert replays >= 3
    with change():
        for _ in range(5):
            run()
    assert step.backend.counters.captures == 2
    replays = step.backend.counters.replays
    for _ in range(3):
        run()
    assert step.backend.counters.captures == 2
    assert (step.backend.graphs[0].fast_paths.replays > 0) is under_context
    assert step.backend.counters.replays == replays + 3


def test_a_closed_capture_names_the_setting_under_which_there_is_a_graph(device: str) -> None:
    model = Net(device)
    step = cgcompile.compile(model, settings(device))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for _ in range(3):
            step(x)
        step.backend.close_capture()
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(step(x), model(x))
    why = step.backend.counters.details[Reason.CAPTURE_FORBIDDEN]
    assert "it has one where flash attention (sdpa_kernel) is True, now False" in why


def test_recapture_keeps_a_graph_for_each_setting(device: str) -> None:
    model = Net(device)
    served = front_end("CUDAGraphWrapper", model, device, on_input_change="recapture")
    for call in range(6):
        x = torch.randn(ROWS, WIDTH, device=device)
        kernels = SDPBackend.MATH if call % 2 else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
        with torch.inference_mode(), sdpa_kernel(kernels):
            torch.testing.assert_close(served.step(x).clone(), model(x), rtol=1e-3, atol=1e-3)
    assert (served.counters().captures, served.counters().replays) == (2, 4)


class Logging(TorchFunctionMode):
    """Does what Dynamo cannot trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with open(os.devnull, "a", encoding="utf-8") as file:
            file.write(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("guards", ["keep", "shape", "none", ""])
def test_function_modes_have_their_effect_once(guards: str, compiler: str, device: str) -> None:
    """A graph has the effects of the modes that were on when it was traced; pieces run without."""
    model, config = Net(device), settings(device, compiler=compiler)
    backend = cgcompile.Backend(config)
    if guards:
        step = cgcompile.compile(model, backend, guards=guards)
    else:
        step = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for modes in ([doubling], [doubling, torch.device(device)], [], [Doubling(), Doubling()]):
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                replays = backend.counters.replays
                for _ in range(4):
                    x = torch.randn(ROWS, WIDTH, device=device)
                    torch.testing.assert_close(step(x), model(x), rtol=1e-3, atol=1e-3)
                assert backend.counters.replays >= replays + 2
                assert torch._C._len_torch_function_stack() == len(modes)


@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_a_function_mode_that_cannot_be_traced_is_refused(guards: str) -> None:
    step, x = (
        cgcompile.compile(Net("cpu"), settings("cpu"), guards=guards),
        torch.randn(ROWS, WIDTH),
    )
    with torch.inference_mode():
        with Logging(), pytest.raises(TraceError, match="does not become one graph"):
            step(x)
        torch.testing.assert_close(step(x), Net("cpu")(x))


def test_the_priority_of_kernels_is_settled_outside_of_modes() -> None:
    """A fake tensor lets torch choose nothing, and the choice is made once in a process."""
    ops: list[Any] = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ops.append(op)
            return op(*args, **(kwargs or {}))

    settle = torch_settings.settle_attention_kernels.__wrapped__
    activities = [torch.profiler.ProfilerActivity.CPU]
    with FakeTensorMode(), Notes(), torch.profiler.profile(activities=activities) as profile:
        settle(torch.device("cpu"))
    assert ops == []
    assert [event.name for event in profile.events()].count("aten::_fused_sdp_choice") == 1
