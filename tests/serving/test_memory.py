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
from cgcompile.graphs.pool import GraphMemory
from cgcompile.serving import CudaGraphManager, InputBuffer, Metadata
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.memory_plan import MemoryPlan
from cgcompile.testing import host

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


def check_total(planned: MemoryPlan, memory: GraphMemory, graph_manager: CudaGraphManager) -> None:
    """A driver of CUDA may take a few steps less or more, and its allocator a segment."""
    device = graph_manager.pool.device
    slack = 3 * device.graph_step if device.tensor_type == "cuda" else 0
    assert abs(planned.total - memory.total) <= slack, planned.against(memory)


def check(graph_manager: CudaGraphManager) -> GraphMemory:
    """Plan and capture; what was measured."""
    planned = graph_manager.plan()
    graph_manager.capture()
    memory = graph_manager.memory()
    check_total(planned, memory, graph_manager)
    assert planned.fixed + sum(nbytes for _, _, nbytes in planned.graphs) == planned.total
    assert memory.total > 0
    assert not planned.missing
    return memory


@pytest.mark.slow
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
    memory = check(MODELS[name](mode, kind, device))
    assert (memory.outputs > 0) is (mode != "PIECEWISE")


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
@pytest.mark.alone
def test_planning_leaves_nothing_behind(device, monkeypatch, kind) -> None:
    driver = FakeDriver(monkeypatch, 1024)
    graph_manager = MODELS["decoder"]("FULL_AND_PIECEWISE", kind, device)
    refused = graph_manager.dispatcher.plan()[0]
    graph_manager.dispatcher.refused(*refused, "by hand")
    level = driver.level
    graph_manager.plan()
    assert driver.level == level
    assert not driver.graphs
    assert graph_manager.memory().pools == graph_manager.memory().outputs == 0
    assert not graph_manager.bulk
    assert not any(
        graph_manager.dispatcher.is_captured(*planned)
        for planned in graph_manager.dispatcher.plan()
    )
    batch = requests(3, 2, device=device)
    assert "by hand" not in str(graph_manager.dispatched(batch).why)
    assert graph_manager.dispatched(requests(56, device=device)).why.detail.endswith("by hand")
    graph_manager.capture()
    torch.testing.assert_close(graph_manager.run(batch), support.eager(graph_manager.model, batch))
    graph_manager.release()
    again = graph_manager.plan()
    graph_manager.capture()
    check_total(again, graph_manager.memory(), graph_manager)


def test_planning_refuses_where_graphs_are(device) -> None:
    graph_manager = MODELS["decoder"]("PIECEWISE", "plain", device)
    graph_manager.capture()
    with pytest.raises(ManagerError, match="captured already"):
        graph_manager.plan()


def test_a_step_that_raises_leaves_nothing_behind(device) -> None:
    fails = [True]

    def prepare(descriptor: BatchDescriptor, phase: str) -> Any:
        if fails[0] and phase == "warmup" and descriptor.num_tokens == 1:
            raise RuntimeError("no such batch")
        return graph_manager.dummy_batch(descriptor, phase)

    graph_manager = manager(
        "PIECEWISE", device=device, dispatch=dispatcher("PIECEWISE"), prepare=prepare
    )
    with pytest.raises(RuntimeError, match="no such batch"):
        graph_manager.plan()
    assert graph_manager.memory().total == 0
    fails[0] = False
    graph_manager.capture()


@pytest.mark.alone
def test_where_captures_fail_all_are_tried(device) -> None:
    model = Perceptron()  # whose config asks for attention that it does not have
    graph_manager = manager(
        "PIECEWISE",
        "plain",
        device,
        model=model,
        dispatch=dispatcher("PIECEWISE", (1, 2, 4, 8, 16)),
        inputs=(InputBuffer("x", ("tokens", 16), torch.float32, 0),),
        metadata=None,
    )
    planned = graph_manager.plan()
    assert len(planned.missing) == 5
    assert "not captured: CaptureError" in str(planned)
    graph_manager.capture()
    check_total(planned, graph_manager.memory(), graph_manager)


def test_without_graphs_there_is_nothing_to_plan() -> None:
    graph_manager = manager("NONE")
    assert graph_manager.plan().total == 0
    assert graph_manager.memory() == GraphMemory()


# a budget


def bytes_of(graph_manager: CudaGraphManager, some: Any) -> int:
    """The least budget that has room for some graphs."""
    for mode, key in graph_manager.dispatcher.plan():
        if (mode, key) in some:
            graph_manager.capture_graph(mode, key)
    total = graph_manager.memory().total
    graph_manager.release()
    return total + margin(graph_manager)


def margin(graph_manager: CudaGraphManager) -> int:
    """What a budget keeps free: steps of the driver, if it has any."""
    step = graph_manager.pool.device.graph_step
    return 2 * step if step > 1 else 0


def captured(graph_manager: CudaGraphManager) -> list[tuple[str, int]]:
    plan = graph_manager.dispatcher.plan()
    return [(m.name, d.num_tokens) for m, d in plan if graph_manager.dispatcher.is_captured(m, d)]


@pytest.mark.slow
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
    graph_manager = MODELS["decoder"](mode, "plain", "cpu")
    planned = graph_manager.plan()
    kinds = {(m, d.uniform): (m, d) for m, d, _ in reversed(planned.graphs)}
    least, most = bytes_of(graph_manager, kinds.values()), planned.total + margin(graph_manager)
    budget = int(least + share * (most - least))
    graph_manager.capture(max_graph_bytes=budget)
    assert graph_manager.memory().total <= budget
    sizes = captured(graph_manager)
    assert {(m.name, d.num_tokens) for m, d in kinds.values()} <= set(sizes)
    assert (len(sizes) == len(planned.graphs)) is (share == 1.0)
    if share == 0.5:
        assert len(kinds) < len(sizes)
    for tokens in (1, 3, 9, 33):
        batch = requests(tokens, device="cpu")
        assert graph_manager.dispatched(batch).mode is not support.NONE
        torch.testing.assert_close(
            graph_manager.run(batch), support.eager(graph_manager.model, batch)
        )
    if share == 0.5:  # the limit is of one capture
        graph_manager.release()
        graph_manager.capture()
        assert len(captured(graph_manager)) == len(planned.graphs)


@pytest.mark.slow
def test_what_has_no_room_says_so(monkeypatch) -> None:
    FakeDriver(monkeypatch, 512, of_op=1000)
    graph_manager = MODELS["decoder"]("FULL_AND_PIECEWISE", "plain", "cpu")
    planned = graph_manager.plan()
    firsts = [next((m, d) for m, d, _ in planned.graphs if m is mode) for mode in (PIECEWISE, FULL)]
    least = bytes_of(graph_manager, firsts)
    with pytest.raises(ManagerError, match=f"may take {least} bytes"):
        graph_manager.capture(max_graph_bytes=least - 1)
    assert not captured(graph_manager)
    graph_manager.capture(max_graph_bytes=least)
    assert captured(graph_manager) == [("PIECEWISE", 56), ("FULL", 8)]
    answer = graph_manager.dispatched(requests(1, 1, device="cpu", decode=True))
    assert answer[:2] == (FULL, BatchDescriptor(8, 8, True))
    graph_manager.dispatcher.refused(FULL, answer.descriptor, "gone")
    answer = graph_manager.dispatched(requests(1, 1, device="cpu", decode=True))
    assert f"max_graph_bytes={least} has no room" in str(answer.why)


@pytest.mark.slow
def test_frequent_sizes_come_first(monkeypatch) -> None:
    FakeDriver(monkeypatch, 1, of_op=1000)
    graph_manager = MODELS["decoder"]("PIECEWISE", "plain", "cpu")
    planned = graph_manager.plan()
    graphs = [(m, d) for m, d, _ in planned.graphs]
    budget = bytes_of(graph_manager, graphs[:3])
    graph_manager.capture(max_graph_bytes=budget, histogram={3: 100, 12: 50, 40: 1})
    assert captured(graph_manager) == [("PIECEWISE", 56), ("PIECEWISE", 12), ("PIECEWISE", 4)]


@pytest.mark.slow
def test_text_and_numbers_of_a_plan(device) -> None:
    planned = MODELS["decoder"]("PIECEWISE", "plain", device).plan()
    data = planned.as_dict()
    assert data["total"] == planned.total > 0
    assert [each["bytes"] for each in data["graphs"]] == [each[2] for each in planned.graphs]
    lines = str(planned).splitlines()
    assert len(lines) == len(planned.graphs) + 1
    assert lines[-1] == f"total {planned.total / 2**20:.2f} MiB"
    assert "measured 0.00 MiB" in planned.against(GraphMemory())
