"""What graphs take of a device, as handles and managers report it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expecttest import TestCase
from lib.fast_paths import context
from lib.manager import manager
from torch import nn

import cgcompile
from cgcompile.graphs import device
from cgcompile.graphs.capture import bulk_capture
from cgcompile.graphs.pool import GraphMemory
from cgcompile.testing import host
from cgcompile.torch_compat.raw_memory import allocated_bytes

MIB = 2**20
SIZES = (16, 64, 256, 1024)


class Attends(nn.Module):
    """A captured piece, attention, and a captured piece that takes more than it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[None].chunk(3, -1)
        rows = nn.functional.scaled_dot_product_attention(q, k, v)[0]
        return x + self.down(self.up(rows).relu())


def compiled(mode: str) -> cgcompile.Backend:
    return cgcompile.compile(
        Attends(),
        dynamic_dims={"x": 0},
        cudagraph_mode=mode,
        compiler="eager",
        capture_device="host",
    )


class Driver:
    """Memory that is neither of torch's allocator nor of graphs that were dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of_a_graph: int = 100) -> None:
        self.taken, self.reads = 5000, 0
        end = host.HostGraph.end

        def counted(graph: Any) -> None:
            end(graph)
            self.taken += of_a_graph

        monkeypatch.setattr(host.HostGraph, "end", counted)
        monkeypatch.setattr(host.HostDevice, "graph_bytes", lambda _: self.read())

    def read(self) -> int:
        self.reads += 1
        return self.taken


def test_it_is_a_short_table() -> None:
    captures = (("PIECEWISE num_tokens=8", 57 * MIB), ("PIECEWISE num_tokens=4", 0))
    memory = GraphMemory(56 * MIB, MIB, MIB // 2, 87 * MIB, 32 * MIB, "measured: so", captures)
    test = TestCase()
    test.maxDiff = None
    test.assertExpectedInline(
        str(memory),
        """\
                    MiB
pools             56.00  torch's allocator for graphs: results, intermediates, workspaces
  workspaces      32.00  of these, workspaces of cuBLAS; one for all graphs of a pool
staging            1.00  copies of inputs, and of results of eager pieces that graphs read
outputs            0.50  buffers of what FULL graphs of a manager return
executables       87.00  what the driver allocates for the graphs themselves
                         measured: so
total            144.50
2 captures; pools and staging grew by
                  57.00  PIECEWISE num_tokens=8
                   0.00  the other 1""",
    )
    assert repr(memory) == (
        "<GraphMemory: 144.50 MiB (pools 56.00, staging 1.00, outputs 0.50, executables 87.00)>"
    )
    assert memory.total == sum(memory.parts.values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_handle_reports_pools_and_captures(mode: str) -> None:
    model, x = compiled(mode), torch.randn(max(SIZES), 8)
    assert model.backend.memory().total == 0
    with torch.inference_mode():
        model.backend.capture(lambda size: model(x[:size]), SIZES)
    memory = model.backend.memory()
    assert memory.pools + memory.staging == sum(each.pool.nbytes for each in model.backend.graphs)
    assert memory.pools > 0
    assert (memory.outputs, memory.executables, memory.workspaces) == (0, 0, 0)
    assert memory.measured == "not measured: the host recorder has no driver"
    names = [batch for batch, _ in memory.captures]
    assert names == [f"{mode} num_tokens={size}" for size in sorted(SIZES, reverse=True)]
    assert cgcompile.debug.report(model).memory == memory.parts
    model.backend.release()
    assert model.backend.memory().total == 0
    assert model.backend.memory().captures == ()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("in_context", [False, True])
def test_smaller_sizes_use_the_memory_of_the_largest(mode: str, in_context: bool) -> None:
    """The results too, though the caller holds what each capture returned."""
    model, x, held = compiled(mode), torch.randn(max(SIZES), 8), []

    def step(size: int) -> None:
        batch = cgcompile.BatchDescriptor(size)
        context = cgcompile.set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch)
        with context if in_context else nullcontext():
            held.append(model(x[:size]))

    with torch.inference_mode():
        model.backend.capture(step, [max(SIZES)])
        alone = model.backend.memory()
        model.backend.capture(step, reversed(SIZES[:-1]))
    memory = model.backend.memory()
    assert memory.parts == alone.parts
    assert [nbytes for _, nbytes in memory.captures] == [alone.total, 0, 0, 0]


@pytest.mark.slow
def test_parts_agree_with_the_pools_on_each_device(device) -> None:
    config = {"capture_device": "auto" if device == "cuda" else "host", "compiler": "eager"}
    model = cgcompile.compile(Attends().to(device), dynamic_dims={"x": 0}, **config)
    x = torch.randn(max(SIZES), 8, device=device)
    with torch.inference_mode():
        model.backend.capture(lambda size: model(x[:size]), SIZES)
    memory = model.backend.memory()
    assert memory.pools + memory.staging == sum(each.pool.nbytes for each in model.backend.graphs)
    assert 0 <= memory.workspaces <= memory.pools
    assert memory.executables >= 0
    assert memory.measured.startswith("measured" if device == "cuda" else "not measured")
    assert len(memory.captures) == len(SIZES)


def test_executables_are_read_once_for_a_bulk_and_around_each_other_capture(monkeypatch) -> None:
    driver = Driver(monkeypatch)
    model, x = compiled("PIECEWISE"), torch.randn(max(SIZES), 8)
    with torch.inference_mode():
        model.backend.capture(lambda size: model(x[:size]), SIZES)
        assert driver.reads == 2
        assert model.backend.memory().executables == 2 * len(SIZES) * 100
        for _ in range(2):  # warm up, capture
            model(x[:8])
        assert driver.reads == 4
    assert model.backend.memory().executables == (2 * len(SIZES) + 2) * 100
    model.backend.release()
    assert model.backend.memory().executables == 0


def test_a_device_that_cannot_be_read_hides_no_error(monkeypatch) -> None:
    def fails(_: Any) -> int:
        raise RuntimeError("the device is lost")

    model, x = compiled("FULL"), torch.randn(max(SIZES), 8)

    def step(size: int) -> Any:
        monkeypatch.setattr(host.HostDevice, "graph_bytes", fails if size == 16 else lambda _: 0)
        if size == 16:
            raise ValueError("of the step")
        return model(x[:size])

    def several() -> None:
        with bulk_capture():
            for size in (64, 64, 256, 256, 16):
                step(size)

    with torch.inference_mode(), pytest.raises(ValueError, match="of the step"):
        several()


@pytest.mark.slow
def test_a_handle_and_a_manager_report_the_same(monkeypatch) -> None:
    Driver(monkeypatch)
    served = manager(kind="compiled")
    served.capture()
    of_manager, of_handle = served.memory(), served.backend.memory()
    assert of_handle == of_manager
    assert of_manager.executables > 0
    assert of_manager.outputs > 0
    modes = {batch.split()[0] for batch, _ in of_manager.captures}
    assert modes == {"FULL", "PIECEWISE"}
    assert len(of_manager.captures) == len(served.dispatcher.plan())
    served.release()
    assert served.backend.memory().total == 0


def test_workspaces_are_measured_at_a_few_captures(monkeypatch) -> None:
    in_use, drops = [100], [0]

    def drop() -> None:
        drops[0] += 1
        in_use[0] = 100

    reads = []
    monkeypatch.setattr(device.raw_memory, "drop_blas_workspaces", drop)
    monkeypatch.setattr(
        device.raw_memory, "allocated_bytes", lambda _: reads.append(0) or in_use[0]
    )
    pool: Any = object.__new__(device.CudaPool)
    pool._device, pool.workspaces, pool._unmeasured = torch.device("cuda", 0), 0, 8
    for captured in (0, 0, 32, 32, 0):
        in_use[0] = 100 + captured
        pool.drop_workspaces()
    assert (pool.workspaces, drops[0], len(reads)) == (
        32,
        5,
        6,
    )  # none after the first that is used
    pool.workspaces, pool._unmeasured = 0, 2
    for _ in range(4):
        pool.drop_workspaces()
    assert (pool.workspaces, drops[0], len(reads)) == (0, 9, 10)


def test_bytes_in_use_are_read_from_the_allocator(monkeypatch) -> None:
    counts = {"allocated_bytes": {"all": {"current": 7}}, "reserved_bytes": {"all": {"current": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: counts)
    assert allocated_bytes(torch.device("cuda", 0)) == 7
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    assert allocated_bytes(torch.device("cuda", 0)) == 0


def test_a_capture_does_not_read_the_records_of_an_allocator_that_counts(monkeypatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(host.HostDevice, "reserved", lambda _: 5000)
    monkeypatch.setattr(host.HostPool, "reserved", property(read.append))
    model, x = compiled("FULL"), torch.randn(max(SIZES), 8)
    with torch.inference_mode():
        bulk = model.backend.capture(lambda size: model(x[:size]), SIZES)
    assert len(bulk.captured) == len(SIZES)
    assert not read  # all records: 0.4 ms in a small process


def captured(device: str) -> cgcompile.CUDAGraphWrapper:
    """A wrapper with one graph, in a pool of its own."""
    pool = cgcompile.GraphPool(device)
    wrapper = cgcompile.CUDAGraphWrapper(lambda x: x * 2, pool=pool)
    x = torch.ones(4, device=device)
    with context(rows=4), torch.no_grad():
        wrapper(x)
        assert wrapper(x).tolist() == [2] * 4
    assert wrapper.counters.captures == 1
    return wrapper


def test_unused_memory_is_returned_before_a_capture_on_a_full_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[int] = []
    monkeypatch.setattr(host.HostDevice, "give_back", lambda self: returned.append(1))
    captured("cpu")
    assert returned == []
    monkeypatch.setattr(host.HostDevice, "lacks_memory", lambda self: True)
    captured("cpu")
    assert returned == [1]


@pytest.mark.gpu
def test_dropped_pools_take_no_memory_of_a_full_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved() -> int:
        return torch.cuda.memory_reserved()

    captured("cuda")
    torch.cuda.empty_cache()
    few = reserved()
    for _ in range(8):
        captured("cuda")
    kept = reserved()
    assert kept > few  # torch keeps the memory of dropped pools while the device has other
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, total))
    for _ in range(8):
        captured("cuda")
    assert reserved() < kept
