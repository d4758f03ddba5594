"""Models that are made, called and dropped leave nothing behind, on every front end."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from lib.front_ends import COMPILED, FRONT_ENDS, ROWS, WIDTH, front_end
from torch import nn

import cgcompile

TYPES = {
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
    "HostGraph",
    "HostPool",
    "CudaGraph",
    "CudaPool",
    "CUDAGraph",
    "Recording",
    "CUDAGraphWrapper",
    "BreakableCUDAGraphWrapper",
    "CudaGraphManager",
    "EncoderCudaGraphManager",
}


def alive() -> Counter[str]:
    for _ in range(3):  # what C++ holds goes after what holds it
        gc.collect()
    cgcompile.Backend().release()  # destroys graphs of models that are gone, as the next capture does
    names = Counter(type(item).__name__ for item in gc.get_objects())
    return Counter({name: names[name] for name in TYPES & names.keys()})


def serve(name: str, device: str, **settings: Any) -> None:
    """Make a model, capture it, replay it with other sizes and inputs, and drop it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device).requires_grad_(False)
    served = front_end(name, model, device, **settings)
    with torch.inference_mode():
        for rows in (ROWS, 3) * 5:
            x = torch.randn(rows, WIDTH, device=device)
            torch.testing.assert_close(served.step(x), model(x))
    assert served.counters().replays >= 2


def forget(name: str) -> None:
    if name == "torch.compile":  # Dynamo's caches of the code hold the model
        torch._dynamo.reset()


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_dropped_models_leave_no_object(name: str, device: str) -> None:
    for _ in range(2):  # what is made once for a process
        serve(name, device)
        forget(name)
    before = alive()
    for _ in range(5):
        serve(name, device)
        forget(name)
    assert alive() - before == Counter()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + 1


@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_invalidated_traces_leave_no_object(guards: str, device: str) -> None:
    capture_device = "host" if device == "cpu" else "auto"
    model = cgcompile.compile(
        scaled,
        dynamic_dims={"x": 0},
        guards=guards,
        compiler="eager",
        cache_dir="off",
        capture_device=capture_device,
    )

    def trace() -> None:
        with torch.inference_mode():
            for rows in (4, 5, 4, 5):
                x = torch.randn(rows, 16, device=device)
                torch.testing.assert_close(model(x), scaled(x))
        assert model.traces
        model.invalidate("again")

    trace()
    before, names = alive(), set(globals())
    for _ in range(8):
        trace()
    assert alive() - before == Counter()
    assert not {name for name in set(globals()) - names if name.startswith("__compiled_fn")}


@pytest.mark.parametrize("name", COMPILED)
def test_explanations_leave_no_object(name: str, device: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device)
    x = torch.randn(ROWS, WIDTH, device=device)
    cgcompile.explain(model, x)
    before = alive()
    for _ in range(5):
        assert cgcompile.explain(model, x).pieces
    assert alive() - before == Counter()
