"""Memory of graphs: planned against measured, and graphs chosen within a budget."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib import manager as support
from lib.manager import FULL, PIECEWISE, manager, requests
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs import host
from cgcompile.graphs.memory import GraphMemory
from cgcompile.serving import CudaGraphManager, InputBuffer, Metadata
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.memory_plan import MemoryPlan

MODES = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56)


class Perceptron(nn.Module):
    """Large activations between narrow ends."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 1024), nn.Linear(1024, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def perceptron(mode: str, kind: str, device: str) -> CudaGraphManager:
    torch.manual_seed(1)
    called: Any = Perceptron().to(device).eval()
    config = cgcompile.CompilationConfig(
        capture_device="host" if device == "cpu" else "auto", compiler="eager"
    )
    if kind == "compiled":
        called = torch.compile(called, backend=cgcompile.Backend(config), dynamic=True)
    rows = InputBuffer("x", ("tokens", 16), torch.float32, 0)
    return CudaGraphManager(
        called,
        dispatcher(mode),
        (rows,),
        device=device,
        metadata=lambda batch, descriptor, buffers: Metadata(0),
        config=config,
    )


def dispatcher(mode: str, sizes: tuple[int, ...] = SIZES) -> CudagraphDispatcher:
    return CudagraphDispatcher(
        support.CUDAGraphMode[mode],
        sizes,
        max_num_reqs=8,
        max_num_tokens=64,
        support=support.AttentionCGSupport.ALWAYS,
    )


def decoder(aux: bool) -> Callable[[str, str, str], CudaGraphManager]:
    def made(mode: str, kind: str, device: str) -> CudaGraphManager:
        model = support.Decoder(aux)
        return manager(mode, kind, device, model=model, dispatch=dispatcher(mode))

    return made


MODELS = {"decoder": decoder(False), "with aux outputs": decoder(True), "perceptron": perceptron}


class FakeDriver:
    """Memory of the driver on the host: so much for each op of a graph, in steps."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int, of_op: int = 100) -> None:
        self.graphs: weakref.WeakSet[host.HostGraph] = weakref.WeakSet()
        self.step, self.of_op = step, of_op
        end = host.HostGraph.end

        def ended(graph: host.HostGraph) -> None:
            end(graph)
            self.graphs.add(graph)

        patch.setattr(host.HostGraph, "end", ended)
        patch.setattr(host.HostDevice, "graph_step", step)
        patch.setattr(host.HostDevice, "graph_bytes", lambda _: self.level)

    @property
    def level(self) -> int:
        taken = sum(500 + self.of_op * len(graph.ops) for graph in self.graphs)
        return 10**6 + math.ceil((taken + 777) / self.step) * self.step


def check_total(planned: MemoryPlan, found: GraphMemory, made: CudaGraphManager) -> None:
    """A driver of CUDA may take a few steps less or more, and its allocator a segment."""
    device = made.pool.device
    slack = 3 * device.graph_step if device.tensor_type == "cuda" else 0
    assert abs(planned.total - found.total) <= slack, planned.against(found)


def check(made: CudaGraphManager) -> GraphMemory:
    """Plan and capture; what was measured."""
    planned = made.plan()
    made.capture()
    found = made.memory()
    check_total(planned, found, made)
    assert planned.fixed + sum(nbytes for _, _, nbytes in planned.graphs) == planned.total
    assert found.total > 0
    assert not planned.missing
    return found


@pytest.mark.parametrize(
    ("name", "mode", "kind"),  # each model, mode and kind with each of the others
    [
        *(("decoder", mode, "compiled") for mode in MODES),
        ("decoder", "FULL_AND_PIECEWISE", "plain"),
        ("with aux outputs", "PIECEWISE", "plain"),
        ("with aux outputs", "FULL", "plain"),
        ("with aux outputs", "FULL_AND_PIECEWISE", "compiled"),
        ("perceptron", "PIECEWISE", "compiled"),
        ("perceptron", "FULL", "plain"),
        ("perceptron", "FULL_AND_PIECEWISE", "compiled"),
    ],
)
@pytest.mark.alone
def test_the_plan_is_what_is_measured(device, name, mode, kind) -> None:
    found = check(MODELS[name](mode, kind, device))
    assert (found.outputs > 0) is (mode != "PIECEWISE")


@pytest.mark.parametrize(
    ("name", "mode", "step"),
    [
        *(("decoder", mode, 8192) for mode in MODES),
        ("decoder", "FULL_AND_PIECEWISE", 1),
        *(("perceptron", "FULL_AND_PIECEWISE", step) for step in (1, 1024, 8192)),
    ],
)
def test_memory_of_the_driver_is_in_it(monkeypatch, name, mode, step) -> None:
    FakeDriver(monkeypatch, step)
    assert check(MODELS[name](mode, "plain", "cpu")).executables > 0


@pytest.mark.parametrize("kind", ["plain", "compiled"])
@pytest.mark.alone
def test_planning_leaves_nothing_behind(device, monkeypatch, kind) -> None:
    driver = FakeDriver(monkeypatch, 1024)
    made = MODELS["decoder"]("FULL_AND_PIECEWISE", kind, device)
    refused = made.dispatcher.plan()[0]
    made.dispatcher.refused(*refused, "by hand")
    level = driver.level
    made.plan()
    assert driver.level == level
    assert not driver.graphs
    assert made.memory().pools == made.memory().outputs == 0
    assert not made.bulk
    assert not any(made.dispatcher.is_captured(*each) for each in made.dispatcher.plan())
    batch = requests(3, 2, device=device)
    assert "by hand" not in str(made.dispatched(batch).why)
    assert made.dispatched(requests(56, device=device)).why.detail.endswith("by hand")
    made.capture()
    torch.testing.assert_close(made.run(batch), support.eager(made.model, batch))
    made.release()
    again = made.plan()
    made.capture()
    check_total(again, made.memory(), made)


def test_planning_refuses_where_graphs_are(device) -> None:
    made = MODELS["decoder"]("PIECEWISE", "plain", device)
    made.capture()
    with pytest.raises(ManagerError, match="captured already"):
        made.plan()


def test_a_step_that_raises_leaves_nothing_behind(device) -> None:
    fails = [True]

    def prepare(descriptor: BatchDescriptor, phase: str) -> Any:
        if fails[0] and phase == "warmup" and descriptor.num_tokens == 1:
            raise RuntimeError("no such batch")
        return made.dummy_batch(descriptor, phase)

    made = manager("PIECEWISE", device=device, dispatch=dispatcher("PIECEWISE"), prepare=prepare)
    with pytest.raises(RuntimeError, match="no such batch"):
        made.plan()
    assert made.memory().total == 0
    fails[0] = False
    made.capture()


@pytest.mark.alone
def test_where_captures_fail_all_are_tried(device) -> None:
    model = Perceptron()  # whose config asks for attention that it does not have
    made = manager(
        "PIECEWISE",
        "plain",
        device,
        model=model,
        dispatch=dispatcher("PIECEWISE", (1, 2, 4, 8, 16)),
        inputs=(InputBuffer("x", ("tokens", 16), torch.float32, 0),),
        metadata=None,
    )
    planned = made.plan()
    assert len(planned.missing) == 5
    assert "not captured: CaptureError" in str(planned)
    made.capture()
    check_total(planned, made.memory(), made)


def test_without_graphs_there_is_nothing_to_plan() -> None:
    made = manager("NONE")
    assert made.plan().total == 0
    assert made.memory() == GraphMemory()


# a budget


def bytes_of(made: CudaGraphManager, some: Any) -> int:
    """The least budget that has room for some graphs."""
    for mode, key in made.dispatcher.plan():
        if (mode, key) in some:
            made.capture_graph(mode, key)
    found = made.memory().total
    made.release()
    return found + margin(made)


def margin(made: CudaGraphManager) -> int:
    """What a budget keeps free: steps of the driver, if it has any."""
    step = made.pool.device.graph_step
    return 2 * step if step > 1 else 0


def captured(made: CudaGraphManager) -> list[tuple[str, int]]:
    plan = made.dispatcher.plan()
    return [(m.name, d.num_tokens) for m, d in plan if made.dispatcher.is_captured(m, d)]


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        ("PIECEWISE", 0.5),
        ("FULL", 0.2),
        *(("FULL_AND_PIECEWISE", share) for share in (0.0, 0.5, 0.9, 1.0)),
    ],
)
def test_a_budget_is_kept(monkeypatch, mode, share) -> None:
    FakeDriver(monkeypatch, 512, of_op=1000)
    made = MODELS["decoder"](mode, "plain", "cpu")
    planned = made.plan()
    kinds = {(m, d.uniform): (m, d) for m, d, _ in reversed(planned.graphs)}
    least, most = bytes_of(made, kinds.values()), planned.total + margin(made)
    budget = int(least + share * (most - least))
    made.capture(max_graph_bytes=budget)
    assert made.memory().total <= budget
    found = captured(made)
    assert {(m.name, d.num_tokens) for m, d in kinds.values()} <= set(found)
    assert (len(found) == len(planned.graphs)) is (share == 1.0)
    if share == 0.5:
        assert len(kinds) < len(found)
    for tokens in (1, 3, 9, 33):
        batch = requests(tokens, device="cpu")
        assert made.dispatched(batch).mode is not support.NONE
        torch.testing.assert_close(made.run(batch), support.eager(made.model, batch))
    made.release()
    made.capture()
    assert len(captured(made)) == len(planned.graphs)


def test_what_has_no_room_says_so(monkeypatch) -> None:
    FakeDriver(monkeypatch, 512, of_op=1000)
    made = MODELS["decoder"]("FULL_AND_PIECEWISE", "plain", "cpu")
    planned = made.plan()
    firsts = [next((m, d) for m, d, _ in planned.graphs if m is mode) for mode in (PIECEWISE, FULL)]
    least = bytes_of(made, firsts)
    with pytest.raises(ManagerError, match=f"may take {least} bytes"):
        made.capture(max_graph_bytes=least - 1)
    assert not captured(made)
    made.capture(max_graph_bytes=least)
    assert captured(made) == [("PIECEWISE", 56), ("FULL", 8)]
    answer = made.dispatched(requests(1, 1, device="cpu", decode=True))
    assert answer[:2] == (FULL, BatchDescriptor(8, 8, True))
    made.dispatcher.refused(FULL, answer.descriptor, "gone")
    answer = made.dispatched(requests(1, 1, device="cpu", decode=True))
    assert f"max_graph_bytes={least} has no room" in str(answer.why)


def test_frequent_sizes_come_first(monkeypatch) -> None:
    FakeDriver(monkeypatch, 1, of_op=1000)
    made = MODELS["decoder"]("PIECEWISE", "plain", "cpu")
    planned = made.plan()
    graphs = [(m, d) for m, d, _ in planned.graphs]
    budget = bytes_of(made, graphs[:3])
    made.capture(max_graph_bytes=budget, histogram={3: 100, 12: 50, 40: 1})
    assert captured(made) == [("PIECEWISE", 56), ("PIECEWISE", 12), ("PIECEWISE", 4)]


def test_text_and_numbers_of_a_plan(device) -> None:
    planned = MODELS["decoder"]("PIECEWISE", "plain", device).plan()
    found = planned.as_dict()
    assert found["total"] == planned.total > 0
    assert [each["bytes"] for each in found["graphs"]] == [each[2] for each in planned.graphs]
    lines = str(planned).splitlines()
    assert len(lines) == len(planned.graphs) + 1
    assert lines[-1] == f"total {planned.total / 2**20:.2f} MiB"
    assert "measured 0.00 MiB" in planned.against(GraphMemory())
