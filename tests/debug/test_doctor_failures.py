"""After a capture that failed: the op, the line and the fix, from the error or from the counters."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lib.debug import by_line, kinds, only_finding
from torch import nn

import cgcompile
from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphMode,
    CUDAGraphWrapper,
)
from cgcompile.debug import Diagnosis
from cgcompile.errors import AddressChangedError, CaptureError, DispatchError, GuardError


def masks(x):
    y = x.relu()
    if y.shape[0] > 4:
        return y * y.sum().item()  # <item>
    return y[y > 0]  # <mask>


HOST = CompilationConfig(capture_device="host")


def capture(model: cgcompile.CUDAGraphWrapper, x: torch.Tensor) -> torch.Tensor:
    mode, batch = model.runtime_mode, BatchDescriptor(1)
    with (
        torch.inference_mode(),
        cgcompile.set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch),
    ):
        return model(x)


@pytest.mark.parametrize("wrapper", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
@pytest.mark.parametrize(
    ("rows", "kind", "op", "mark"),
    [
        (2, "data_dependent_shape", "aten.index.Tensor with a mask", "mask"),
        (5, "host_sync", "aten.item.default", "item"),
    ],
)
def test_a_capture_that_is_refused(device, wrapper, rows, kind, op, mark) -> None:
    with pytest.raises(RuntimeError, match="captur") as caught:
        capture(wrapper(masks, HOST), torch.ones(rows, 2, device=device))
    finding = by_line(Diagnosis.of_error(caught.value))[mark]
    assert finding.severity == "error"
    if device == "cpu":
        assert isinstance(caught.value, CaptureError)
        assert (caught.value.op, finding.op, finding.kind) == (op, op, kind)
        assert "splitting op or cgcompile.eager_region()" in finding.fix
    else:
        assert finding.kind == "host_sync"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = torch.ones(2)

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [(torch.ones(2), torch.zeros(2), "replaced_attribute"), (1.0, 2.0, "changing_attribute")],
)
def test_an_error_of_the_state_of_a_model(before: Any, after: Any, kind: str) -> None:
    module, x = Scaled(), torch.ones(2)
    module.scale = before
    model = CUDAGraphWrapper(module, HOST)
    assert torch.equal(capture(model, x), x)
    module.scale = after
    with pytest.raises(GuardError) as caught:
        capture(model, x)
    assert only_finding(caught.value).kind == kind


def test_a_capture_that_copies_python_data() -> None:
    def makes(x):
        return x + torch.tensor([1.0, 2.0])  # <makes>

    with pytest.raises(CaptureError, match="pageable host memory") as caught:
        capture(CUDAGraphWrapper(makes, HOST), torch.ones(2))
    assert kinds(Diagnosis.of_error(caught.value)) == {"makes": "device_copy error"}


def test_an_error_of_a_guard(device: str) -> None:
    model = CUDAGraphWrapper(nn.ReLU(), HOST)
    x = torch.ones(2, device=device)
    capture(model, x)
    with pytest.raises(AddressChangedError) as caught:
        capture(model, x.clone())
    finding = only_finding(caught.value)
    assert (finding.kind, finding.source.code) == ("moving_input", "return model(x)")
    assert finding.fix.startswith("A CUDA graph reads the address it saw at capture, and a wrapper")
    assert "input 0" in finding.message


@pytest.fixture
def hidden() -> Iterator[None]:
    """An op that reads on the host, which no trace sees."""
    with torch.library._scoped_library("hidden", "DEF") as library:
        library.define("longest(Tensor x) -> Tensor")
        library.impl("longest", longest, "CompositeExplicitAutograd")
        library.impl("longest", torch.empty_like, "Meta")
        yield


def longest(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # <inside>


def compiled(model: Any, **settings: Any) -> tuple[cgcompile.Backend, Any]:
    backend = cgcompile.Backend(compiler="eager", capture_device="host", **settings)
    return backend, torch.compile(model, backend=backend, dynamic=True)


class Calls(nn.Module):
    def forward(self, x):
        return torch.ops.hidden.longest(x.relu())


def test_a_capture_that_fell_back(hidden: None) -> None:
    backend, model = compiled(Calls())
    x = torch.ones(3)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), torch.full((3,), 3.0))
    assert backend.counters.replays == 0
    for target in (backend, model):
        diagnosis = cgcompile.debug.doctor(target)
        finding = by_line(diagnosis)["inside"]
        assert (finding.kind, finding.op) == ("host_sync", "aten.item.default")
        assert (len(diagnosis.findings), diagnosis.ok) == (1, False)
        assert "eager_region" in finding.fix


def test_the_cause_of_a_strict_error(hidden: None) -> None:
    _, model = compiled(Calls(), on_fallback="raise")
    with torch.inference_mode():
        model(torch.ones(3))  # warms up
        with pytest.raises(DispatchError) as caught:
            model(torch.ones(3))
    assert kinds(Diagnosis.of_error(caught.value)) == {"inside": "host_sync error"}


def test_other_reasons_of_a_handle() -> None:
    backend, model = compiled(nn.ReLU(), max_captured_shapes=1)
    with torch.inference_mode():
        for size in (2, 3, 4):
            for _ in range(3):
                model(torch.ones(size))
    finding = only_finding(cgcompile.debug.doctor(backend))
    assert (finding.kind, finding.severity, finding.count) == ("too_many_shapes", "break", 6)
    assert "max_captured_shapes" in finding.fix


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("fast", [False, True])
def test_failures_of_a_handle(fast: bool) -> None:
    backend, model = compiled(nn.ReLU())
    x, other = torch.ones(4), torch.ones(4)
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=cgcompile.BatchDescriptor(4)
    )
    with torch.inference_mode(), context:
        for _ in range(4 if fast else 2):
            model(x)
        assert cgcompile.debug.doctor(backend).ok
        for _ in range(2):
            with pytest.raises(AddressChangedError) as caught:
                model(other)
    finding = only_finding(cgcompile.debug.doctor(backend))
    assert (finding.kind, finding.severity, finding.count) == ("call_failed", "error", 2)
    message = " ".join(str(caught.value).split())
    assert finding.message == f"the last: AddressChangedError: {message}"


def test_failures_of_a_wrapper() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        raise error

    model = CUDAGraphWrapper(step, HOST, CUDAGraphMode.FULL, name="step")
    for error, text in (
        (KeyError("x"), "KeyError: 'x'"),
        (Unprintable(), "Unprintable"),
        (ValueError("y" * 5000), f"ValueError: {'y' * 988}"),
    ):
        with pytest.raises(type(error)):
            model(torch.ones(2))
        finding = only_finding(cgcompile.debug.doctor(model))
        assert (finding.kind, finding.message) == ("call_failed", f"the last: {text}")
    assert finding.count == model.counters.failures == 3


def test_a_wrapper_without_fallbacks() -> None:
    model = CUDAGraphWrapper(nn.ReLU(), HOST, CUDAGraphMode.FULL, name="relu")
    capture(model, torch.ones(2))
    assert str(cgcompile.debug.doctor(model)) == "relu: nothing found"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore"),
            "host_sync",
            "CUDA error",
        ),
        (ValueError("unrelated"), "forward_raised", "ValueError: unrelated"),
        (ValueError(), "forward_raised", "ValueError"),
    ],
)
def test_errors_of_other_code(error: Exception, kind: str, message: str) -> None:
    with pytest.raises(type(error)) as caught:
        raise error  # <raise>
    finding = by_line(Diagnosis.of_error(caught.value))["raise"]
    assert (finding.kind, finding.op) == (kind, "-")
    assert finding.message.startswith(message)
    if kind == "forward_raised":
        assert finding.fix.startswith("The error was raised outside of cgcompile")
    assert only_finding(ValueError()).source is None


def test_an_error_inside_a_capture() -> None:
    assert only_finding(CaptureError.no_breaks(what="step", names="a::b")).kind == "capture_failed"

    def fails(x):
        raise RuntimeError("in a capture")

    with pytest.raises(RuntimeError, match="in a capture") as caught:
        capture(CUDAGraphWrapper(fails, HOST, CUDAGraphMode.FULL), torch.ones(2))
    assert only_finding(caught.value).kind == "capture_failed"
