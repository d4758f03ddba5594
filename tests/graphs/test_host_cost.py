"""What a replay executes on the host beside its graph, in opcodes: they are equal on each run."""

import pathlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from lib.encoders import images, manager
from lib.front_ends import context
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, set_forward_context
from cgcompile.serving import Batch, CudagraphDispatcher, InputBuffer, Metadata

ROWS, WIDTH = 4, 8
CONFIG = cgcompile.CompilationConfig(capture_device="host")
PACKAGE = str(pathlib.Path(cgcompile.__file__).parent)
# Builds of torch for CUDA compare addresses in C++, others by a loop in Python: of one input.
LOOP = 0 if torch.backends.cuda.is_built() else 21

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="opcodes differ between versions of Python"
)


def opcodes_of(step: Callable[[], Any]) -> int:
    """Return how many opcodes of cgcompile a step executes, without those of the CPU recorder."""
    for _ in range(3):
        step()
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if event == "call":
            if not file.startswith((PACKAGE, "<cgcompile")) or file.endswith("testing/host.py"):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.table = {"width": WIDTH}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input = layer(input)
        return input if self.table["width"] == WIDTH else -input


def wrapped(count: int) -> tuple[cgcompile.CUDAGraphWrapper, Callable[[], Any]]:
    wrapper = cgcompile.CUDAGraphWrapper(Layers(count), CONFIG)
    x = torch.randn(ROWS, WIDTH)

    def step() -> Any:
        with set_forward_context(
            cudagraph_runtime_mode="FULL", batch_descriptor=BatchDescriptor(ROWS)
        ):
            return wrapper(x)

    with torch.inference_mode():
        step()
        torch.testing.assert_close(step(), wrapper.runnable(x))
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 1)
    return wrapper, step


def test_opcodes_of_a_wrapper() -> None:
    wrapper, _ = wrapped(1)
    x = torch.randn(ROWS, WIDTH)
    context = set_forward_context(
        cudagraph_runtime_mode="FULL", batch_descriptor=BatchDescriptor(ROWS)
    )
    wrapper.clear_graphs()
    with torch.inference_mode(), context:
        wrapper(x)
        assert opcodes_of(lambda: wrapper(x)) <= 860 + LOOP
    assert wrapper.counters.replays >= 5


def test_the_state_of_many_layers_takes_no_more_opcodes() -> None:
    counts, of_weights = [], []
    for layers in (1, 60):
        wrapper, _ = wrapped(layers)
        (entry,) = wrapper.entries
        assert wrapper._state is not None
        last = wrapper._state._last  # without weights
        counts.append(opcodes_of(lambda state=last: state.check("step", "batch")))
        of_weights.append(opcodes_of(lambda state=entry.state: state.check("step", "batch")))
    assert counts[0] == counts[1] <= 40
    if not LOOP:
        assert of_weights[0] == of_weights[1] <= 60


def test_an_equal_object_in_place_of_another_takes_as_many_opcodes_in_large_models() -> None:
    counts = []
    for layers in (1, 60):
        wrapper, step = wrapped(layers)
        model: Any = wrapper.runnable

        def replaced(model: Any = model, step: Callable[[], Any] = step) -> Any:
            model.table = {"width": WIDTH}
            return step()

        with torch.inference_mode():
            counts.append(opcodes_of(replaced) - opcodes_of(step))
        assert (wrapper.counters.captures, wrapper.counters.plain.total()) == (1, 0)
    if not LOOP:
        assert 0 < counts[0] <= counts[1] <= counts[0] + 60 < 5_000


@pytest.mark.parametrize(("mode", "most"), [("FULL", 1_775), ("PIECEWISE", 2_540)])
def test_opcodes_of_a_manager(mode: str, most: int) -> None:
    support = cgcompile.AttentionCGSupport.ALWAYS
    manager = cgcompile.CudaGraphManager(
        Layers(1),
        CudagraphDispatcher(mode, [ROWS, 8], max_num_reqs=8, support=support),
        [InputBuffer("input", ("tokens", WIDTH), torch.float32)],
        device="cpu",
        metadata=lambda *_: Metadata(0),
        config=CONFIG,
    )
    manager.capture()
    x = torch.randn(3, WIDTH)
    with torch.inference_mode():
        torch.testing.assert_close(manager.run(Batch(3, 1, {"input": x})), manager.model(x))
        batch = Batch(3, 1, {"input": x})
        assert opcodes_of(lambda: manager.run(batch)) <= most + LOOP
    assert manager.counters.replays >= 5


@pytest.mark.slow
def test_opcodes_of_a_compiled_step() -> None:
    """Four graphs, three eager pieces whose results are copied, six weights."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unsqueeze(0).chunk(3, -1)
            attended = nn.functional.scaled_dot_product_attention(q, k, v)
            return x + self.out(attended.squeeze(0))

    backend = cgcompile.Backend(replace(CONFIG, compiler="eager"))
    layers = nn.Sequential(Attends(), Attends(), Attends()).requires_grad_(False)
    model, x = torch.compile(layers, backend=backend), torch.randn(ROWS, WIDTH)
    with torch.inference_mode(), context(ROWS, cgcompile.CUDAGraphMode.PIECEWISE, {}):
        for _ in range(2):
            model(x)
        torch.testing.assert_close(model(x), layers(x))
        assert opcodes_of(lambda: model(x)) <= 1_280 + 8 * LOOP
    assert (backend.counters.captures, backend.counters.plain.total()) == (1, 1)


def test_opcodes_of_an_encoder() -> None:
    encoder, call = manager(token_budgets=(8,), config=CONFIG), images((4, 4), (4, 4))
    assert opcodes_of(lambda: encoder.execute(call)) <= 8_900 + 6 * LOOP
    assert (encoder.statistics.hits, encoder.statistics.misses) == (8, 0)


def test_opcodes_of_a_round_of_a_loop() -> None:
    """Each further replay of a round costs a copy of what the step returned, and the launch."""

    def step(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return state["x"].add_(1)

    counts = []
    for steps in (8, 16):
        loop, state = cgcompile.loop(step, steps, config=CONFIG), {"x": torch.zeros(ROWS, WIDTH)}
        with torch.inference_mode():
            counts.append(opcodes_of(partial(loop, state)))
        assert state["x"].eq(4 * steps).all()
        assert loop.counters.replays == 4 * steps - 2
    assert counts[0] <= 3_060 + 8 * LOOP
    assert (counts[1] - counts[0]) / 8 <= 155
