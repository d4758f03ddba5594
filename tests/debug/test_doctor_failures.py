"""After a capture that failed: the op, the line and the fix, from the error or from the counters."""

from collections.abc import Iterator

import pytest
import torch
from lib.debug import found, marked_line
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode
from cgcompile.config import CompilationConfig
from cgcompile.debug import Diagnosis
from cgcompile.errors import AddressChangedError, CaptureError, DispatchError


class Masks(nn.Module):
    def forward(self, x):
        y = x.relu()
        if y.shape[0] > 4:
            return y * y.sum().item()  # <item>
        return y[y > 0]  # <mask>


def capture(model: cgcompile.CUDAGraphWrapper, x: torch.Tensor, size: int = 1) -> torch.Tensor:
    mode = model.runtime_mode
    with (
        torch.inference_mode(),
        cgcompile.set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(size)
        ),
    ):
        return model(x)


@pytest.mark.parametrize("kind", [cgcompile.CUDAGraphWrapper, cgcompile.BreakableCUDAGraphWrapper])
@pytest.mark.parametrize(
    ("rows", "name", "op", "marker"),
    [
        (2, "data_dependent_shape", "aten.index.Tensor with a mask", "mask"),
        (5, "host_sync", "aten.item.default", "item"),
    ],
)
def test_a_capture_that_is_refused(device, kind, rows, name, op, marker) -> None:
    model = kind(Masks(), CompilationConfig(capture_device="host"))
    with pytest.raises(RuntimeError, match="captur") as caught:
        capture(model, torch.ones(rows, 2, device=device))
    diagnosis = Diagnosis.of_error(caught.value)
    assert not diagnosis.ok
    if device == "cpu":
        assert isinstance(caught.value, CaptureError)
        assert caught.value.op == op
        seen = found(diagnosis, name, Masks.forward, marker)
        assert (seen.op, seen.severity) == (op, "error")
        assert "splitting op or cgcompile.eager_region()" in seen.fix
    else:
        seen = found(diagnosis, "host_sync", Masks.forward, marker)


def test_what_the_guards_refuse(device: str) -> None:
    model = cgcompile.CUDAGraphWrapper(nn.ReLU(), CompilationConfig(capture_device="host"))
    x = torch.ones(2, device=device)
    capture(model, x)
    with pytest.raises(AddressChangedError) as caught:
        capture(model, x.clone())
    (seen,) = Diagnosis.of_error(caught.value).findings
    assert (seen.kind, seen.source.code) == ("moving_input", "return model(x)")
    assert seen.fix.startswith(
        "A CUDA graph reads the address it saw at capture, and a wrapper copies"
    )
    assert "input 0" in seen.message


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


class Calls(nn.Module):
    def forward(self, x):
        return torch.ops.hidden.longest(x.relu())


def compiled(**settings) -> tuple:
    backend = cgcompile.Backend(compiler="eager", capture_device="host", **settings)
    return backend, torch.compile(Calls(), backend=backend)


def test_a_capture_that_fell_back(hidden: None) -> None:
    backend, model = compiled()
    x = torch.ones(3)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), torch.full((3,), 3.0))
    assert backend.counters.replays == 0
    for asked in (backend, model):
        diagnosis = cgcompile.debug.doctor(asked)
        (seen,) = diagnosis.findings
        assert (seen.kind, seen.op) == ("host_sync", "aten.item.default")
        assert seen.source.line == marked_line(longest, "inside")
        assert seen.source.code == "return x * x.sum().item()  # <inside>"
        assert not diagnosis.ok
        assert "eager_region" in seen.fix


def test_the_cause_of_a_strict_error(hidden: None) -> None:
    _, model = compiled(strict=True)
    with torch.inference_mode():
        model(torch.ones(3))  # warms up
        with pytest.raises(DispatchError) as caught:
            model(torch.ones(3))
    seen = found(Diagnosis.of_error(caught.value), "host_sync", longest, "inside")
    assert seen.op == "aten.item.default"


def test_other_reasons_of_a_handle() -> None:
    backend = cgcompile.Backend(compiler="eager", capture_device="host", max_captured_shapes=1)
    model = torch.compile(nn.ReLU(), backend=backend, dynamic=True)
    with torch.inference_mode():
        for size in (2, 3, 4):
            for _ in range(3):
                model(torch.ones(size))
    (seen,) = cgcompile.debug.doctor(backend).findings
    assert (seen.kind, seen.severity, seen.count) == ("too_many_shapes", "break", 6)
    assert "max_captured_shapes" in seen.fix


def test_a_wrapper_that_did_well_has_nothing_to_say() -> None:
    model = cgcompile.CUDAGraphWrapper(
        nn.ReLU(), CompilationConfig(capture_device="host"), CUDAGraphMode.FULL, name="relu"
    )
    capture(model, torch.ones(2))
    assert str(cgcompile.debug.doctor(model)) == "relu: nothing found"


def test_errors_that_are_not_ours() -> None:
    def fails():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with pytest.raises(RuntimeError) as caught:
        fails()
    (seen,) = Diagnosis.of_error(caught.value).findings
    assert (seen.kind, seen.op) == ("host_sync", "-")
    assert seen.source.code.startswith("raise RuntimeError(")
    (seen,) = Diagnosis.of_error(ValueError()).findings
    assert (seen.kind, seen.message, seen.source) == ("forward_raised", "ValueError", None)
