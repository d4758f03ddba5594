"""What models, traces and explanations leave in the process when they are dropped."""

import gc
import linecache
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fuzz.soak import OF_A_TURN, WARM_UP, Soak, reading
from lib.front_ends import FRONT_ENDS, ROWS, WIDTH, check, front_end, layers, settings
from torch import nn

import cgcompile

TYPES = set(
    [
        "FakeTensor",
        "FakeTensorMode",
        "ShapeEnv",
        "SymNode",
        "GraphModule",
        "Tensor",
        "Parameter",
        "Linear",
        "Backend",
        "Variant",
        "CompiledModel",
        "CompiledGraph",
        "GraphSequence",
        "GraphPool",
        "Recording",
        "HostGraph",
        "HostPool",
        "CudaGraph",
        "CudaPool",
        "CUDAGraph",
        "CUDAGraphWrapper",
        "BreakableCUDAGraphWrapper",
        "CudaGraphManager",
        "EncoderCudaGraphManager",
    ]
)


def alive() -> Counter[str]:
    for _ in range(3):  # what C++ holds goes after what holds it
        gc.collect()
    cgcompile.Backend().release()  # destroys graphs of models that are gone, as the next capture does
    names = Counter(type(item).__name__ for item in gc.get_objects())
    return Counter({name: names[name] for name in TYPES & names.keys()})


def serve(name: str, device: str) -> None:
    """Make a model, capture it, replay it with other sizes and inputs, and drop it."""
    model = layers(device)
    served = front_end(name, model, device)
    for rows in (ROWS, 3) * 5:
        check(served.step, model, device, rows=rows)
    counters = served.counters()
    assert counters.captures >= 1
    assert counters.replays >= 3
    if name == "torch.compile":  # Dynamo's caches of the code hold the model
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_dropped_models_leave_no_object(name: str, device: str) -> None:
    for _ in range(2):  # objects that a process makes once
        serve(name, device)
    before = alive()
    for _ in range(5):
        serve(name, device)
    assert alive() - before == Counter()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_invalidated_traces_leave_no_object(guards: str, device: str) -> None:
    model = cgcompile.compile(scaled, settings(device), dynamic_dims={"x": 0}, guards=guards)

    def trace() -> None:
        for rows in (4, 5, 4, 5):
            check(model, scaled, device, rows=rows)
        assert model.traces
        model.invalidate("test")

    trace()
    before, names = alive(), set(globals())
    for _ in range(8):
        trace()
    assert alive() - before == Counter()
    assert not {name for name in set(globals()) - names if name.startswith("__compiled_fn")}


def test_explanations_leave_no_object(device: str) -> None:
    model = layers(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    cgcompile.explain(model, x)
    before = alive()
    for _ in range(5):
        assert cgcompile.explain(model, x).pieces
    assert alive() - before == Counter()


# ---------------------------------------------------------------- what Dynamo keeps of a trace


@pytest.fixture
def frozen() -> Iterator[None]:
    """Leave older objects out of the garbage collection of each capture."""
    gc.collect()
    gc.freeze()
    with torch.inference_mode():
        yield


def names_left() -> set[str]:
    """Return the globals of the traced function, and the sources that Python can show."""
    return set(vars(nn.modules.container)) | set(linecache.cache)


def sources_left() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<eval_with_key>")}


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("phase", ["invalidations", "models"])
def test_a_trace_leaves_a_few_objects(phase: str, device: str) -> None:
    run = getattr(Soak(device), phase)
    run(WARM_UP)
    objects, names = reading(device)["objects"], names_left()
    run(20)
    assert reading(device)["objects"] - objects <= 20 * OF_A_TURN[phase]
    assert len(names_left()) <= len(names) + 1  # torch reads sources of its own now and then


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
def test_reset_graphs_leave_no_source(device: str) -> None:
    soak = Soak(device)
    soak.resets(3)
    before = sources_left()
    soak.resets(10)
    assert len(sources_left() - before) <= 10 + 3  # Dynamo keeps that of its own graph


def scale_by(factor: int) -> Any:
    """Make an instance of a class of its own."""
    return type("Scale", (), {"factor": factor, "__call__": lambda self, x: x * self.factor})()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = scale_by(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scale(x))


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
def test_traces_that_compare_a_freed_class_are_dropped(device: str) -> None:
    model = Scaled()
    compiled = cgcompile.compile(model, settings(device))
    for factor in range(2, 8):
        check(compiled, lambda x, factor=factor: torch.tanh(x * (factor - 1)), device, steps=4)
        assert compiled.backend.counters.replays > 0
        freed = weakref.ref(type(model.scale))
        del model.scale
        gc.collect()
        assert freed() is None
        model.scale = scale_by(factor)  # its class may have the address of the last one
    assert len(compiled.traces) <= 2
