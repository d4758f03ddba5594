"""0-dim CPU tensors on a GPU: a kernel gets the value as a launch argument, which a graph bakes in.

On the CPU such a tensor is an ordinary one. There the split is tested on ``meta`` tensors, and the
replay with a backend that copies 0-dim tensors as if the graph were on another device.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from lib.front_ends import (
    COMPILED,
    ROWS,
    WIDTH,
    compiled,
    context,
    front_end,
    settings,
)
from torch import nn

import cgcompile
from cgcompile import (
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphWrapper,
    eager_break_during_capture,
)
from cgcompile.debug.locate import PieceMode, run_step
from cgcompile.errors import HostValueChangedError
from cgcompile.graphs.pool import GraphPool
from cgcompile.passes.split import SplitGraph
from cgcompile.pieces.cache import PieceCache
from cgcompile.pieces.compilers import compile_pieces
from cgcompile.pieces.stitch import split_by_config
from cgcompile.reasons import Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.testing.host import HostDevice


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """Two operators that need a 0-dim tensor on the CPU, by their fakes."""

    def by_host(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        assert s.device.type == "cpu"
        return torch.empty_like(x)

    lib = torch.library.Library("cgscalar", "FRAGMENT")
    lib.define("by_host(Tensor x, Tensor s) -> Tensor")
    lib.define("count_(Tensor x, Tensor(a!) s) -> ()")
    torch.library.register_fake("cgscalar::by_host", by_host, lib=lib)
    torch.library.register_fake("cgscalar::count_", lambda x, s: None, lib=lib)
    yield
    lib._destroy()


# ---------------------------------------------------------------- the split


def split_of(function: Any, *inputs: torch.Tensor) -> SplitGraph:
    """Return the split of a function of ``meta`` tensors, which is traced and never run."""
    backend = cgcompile.Backend(compiler="eager")
    splits = []

    def stop(gm: Any, example_inputs: Any) -> Any:
        splits.append(backend(gm, example_inputs).split)
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=stop, fullgraph=True)(*inputs)
    return splits[0]


def device_row() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device="meta")


def test_a_captured_piece_takes_a_cpu_scalar_as_a_tensor_of_its_device() -> None:
    split = split_of(lambda x, s: x.sin() * s + (s + 1), device_row(), torch.tensor(2.0))
    assert sum(piece.capture for piece in split.pieces) == 2
    assert len(split.cpu_scalars) == 2
    for name in split.cpu_scalars:
        assert split.values[name].meta.device.type == "cpu"  # as it crosses
    for piece in split.pieces:
        inputs = piece.module.graph.find_nodes(op="placeholder")
        devices = {node.meta["example_value"].device.type for node in inputs}
        assert not piece.capture or devices == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_dtypes_promote_as_with_the_cpu_scalar(dtype: torch.dtype) -> None:
    split = split_of(lambda x, s: x * s, device_row(), torch.ones((), dtype=dtype))
    (piece,) = split.pieces
    assert piece.capture
    expected = torch.result_type(torch.randn(2), torch.ones((), dtype=dtype))
    assert split.values[piece.outputs[0]].meta.dtype is expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: torch.ops.cgscalar.by_host(x, s) + 1,
        lambda x, s: (x.add_(1), torch.ops.cgscalar.count_(x, s), x * 2)[-1],
    ],
    ids=["needs the CPU", "writes it"],
)
def test_an_op_that_needs_the_scalar_on_the_cpu_runs_eager(function: Any) -> None:
    split = split_of(function, device_row(), torch.tensor(2.0))
    (why,) = [why for piece in split.pieces if not piece.capture for why in piece.why]
    assert why.reason is Reason.CPU_TENSOR
    assert "takes a 0-dim tensor on the CPU only" in why.detail
    assert any(piece.capture for piece in split.pieces)


def test_ops_among_cpu_scalars_stay_on_the_cpu() -> None:
    split = split_of(lambda x, s: (x * s, s * 2), device_row(), torch.tensor(2.0))
    (piece,) = [piece for piece in split.pieces if not piece.capture]
    assert split.values[piece.outputs[0]].meta.device.type == "cpu"


# ---------------------------------------------------------------- the replay, as on another device


class CopiesScalars(cgcompile.Backend):
    """A backend that copies all 0-dim tensors of captured pieces at each replay."""

    def compile_graph(self, gm: Any, example_inputs: Any, *, frozen: int = 0, **_: Any) -> Any:
        split, boundaries = split_by_config(gm, self.config)
        names = {name for piece in split.pieces if piece.capture for name in piece.inputs}
        scalars = [
            name
            for name in names
            if isinstance(meta := split.values[name].meta, torch.Tensor) and meta.dim() == 0
        ]
        assert scalars
        split = replace(split, cpu_scalars=frozenset(scalars))
        runnables, compilation = compile_pieces(split, self.config, PieceCache(self.config))
        graph = CompiledGraph(split, runnables, boundaries, self.config, compilation, frozen=frozen)
        self.compiled_graphs = [*getattr(self, "compiled_graphs", ()), graph]
        return graph


class Scaled(nn.Module):
    """A parameter and a buffer of no dimension, and a value that an eager piece makes of one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.scale = nn.Parameter(torch.tensor(1.5))  # on the CPU, always
        self.register_buffer("shift", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + s
        with cgcompile.eager_region():
            t = s + self.shift
        return torch.tanh(y + t) * self.scale + self.shift


class Unsplit(Scaled):
    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * self.scale + s) + self.shift


def check_scalars(run: Any, model: Scaled, device: str, steps: int = 6) -> None:
    """Compare steps on random inputs and scalars with eager; what changes, changes in place."""
    before = None
    for step in range(steps):
        x, s = torch.randn(ROWS, WIDTH, device=device), torch.rand(()) * 3
        with torch.no_grad():
            model.scale.fill_(step + 0.5)
            model.shift.fill_(0.1 * step)
            result = run(x, s)
            torch.testing.assert_close(result, model(x, s))
        assert before is None or not torch.equal(before, result)
        before = result.clone()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    ("mode", "in_context"),
    [
        ("PIECEWISE", None),
        ("FULL_AND_PIECEWISE", None),
        ("FULL_AND_PIECEWISE", CUDAGraphMode.FULL),
        ("FULL_AND_PIECEWISE", CUDAGraphMode.PIECEWISE),
    ],
)
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("kind", [Scaled, Unsplit])
def test_scalars_are_copied_at_each_replay(
    name: str, mode: str, in_context: CUDAGraphMode | None, poison: bool, kind: type[Scaled]
) -> None:
    config = settings("cpu", cudagraph_mode=mode, debug="poison" if poison else False)
    model, static = kind("cpu"), torch.empty(ROWS, WIDTH)
    served = compiled(name, model, CopiesScalars(config))

    def run(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if in_context is None:
            return served.step(x, s)
        with context(mode=in_context):
            return served.step(static.copy_(x), s)

    check_scalars(run, model, "cpu")
    (graph,) = served.target.compiled_graphs
    assert graph.counters.captures == 1
    assert graph.counters.replays >= 4


@pytest.mark.slow
def test_pieces_that_run_plain_fill_the_copies_of_later_ones() -> None:
    model = Scaled("cpu")
    served = compiled("torch.compile", model, CopiesScalars(settings("cpu")))
    check_scalars(served.step, model, "cpu", steps=3)
    (graph,) = served.target.compiled_graphs
    calls: list[Any] = []

    def observe(program: Any, recording: Any, inputs: Any, real: int | None) -> Any:
        replayed = {piece.index: PieceMode.REPLAYED for piece in program.split.pieces}
        calls.append(inputs)
        return run_step(program, recording, inputs, real, {**replayed, 0: PieceMode.COMPILED})

    graph.override_replay(observe)
    check_scalars(served.step, model, "cpu", steps=3)
    assert len(calls) == 3


@pytest.mark.slow
def test_a_scalar_that_a_piece_writes_is_copied_again() -> None:
    def function(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = x * s
        with cgcompile.eager_region():
            s.add_(1)
        return torch.tanh(y) * s

    served = compiled("torch.compile", function, CopiesScalars(settings("cpu")))
    s, expected_s = torch.tensor(1.0), torch.tensor(1.0)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(served.step(x, s), function(x, expected_s))
            assert s == expected_s
    (graph,) = served.target.compiled_graphs
    assert graph.counters.replays >= 3


# ---------------------------------------------------------------- wrappers, as on another device


class Weighted(nn.Module):
    """A model of one argument with a 0-dim CPU parameter."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class AsOnGpu(HostDevice):
    """A host recorder that takes CPU tensors for those of another device."""

    tensor_type = "cuda"


def as_on_gpu(kind: type[CUDAGraphWrapper], function: Any) -> tuple[CUDAGraphWrapper, Any]:
    """Return a wrapper, and a step that runs it under a context."""
    pool = GraphPool(AsOnGpu())
    wrapper = kind(function, settings("cpu"), CUDAGraphMode.PIECEWISE, pool=pool)

    def step(x: torch.Tensor) -> torch.Tensor:
        with context(mode=CUDAGraphMode.PIECEWISE):
            return wrapper(x)

    return wrapper, step


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_wrapper_refuses_a_scalar_weight_of_another_value(
    kind: type[CUDAGraphWrapper],
) -> None:
    model = Weighted("cpu").requires_grad_(False)
    wrapper, step = as_on_gpu(kind, model)
    x = torch.randn(ROWS, WIDTH)
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(step(x), model(x))
    model.linear.weight.mul_(2)  # is read where it is
    torch.testing.assert_close(step(x), model(x))
    model.scale.fill_(4.0)
    with pytest.raises(HostValueChangedError, match=r"tensor 'scale' is 4\.0, was 1\.5"):
        step(x)
    model.scale.fill_(1.5)
    torch.testing.assert_close(step(x), model(x))
    assert wrapper.counters.replays == 4


def test_a_break_may_not_change_a_cpu_tensor_that_captured_code_reads() -> None:
    source = torch.tensor(2.0)

    @eager_break_during_capture
    def factor() -> torch.Tensor:
        return source.clone()

    _, step = as_on_gpu(BreakableCUDAGraphWrapper, lambda x: x * factor())
    x = torch.randn(ROWS, WIDTH)
    for _ in range(3):
        x.normal_()
        torch.testing.assert_close(step(x), x * 2)
    source.fill_(3.0)
    with pytest.raises(HostValueChangedError, match=r"result 0 .* is 3\.0, was 2\.0"):
        step(x)


def test_a_break_may_change_a_cpu_tensor_that_another_break_reads() -> None:
    source = torch.tensor(2.0)

    @eager_break_during_capture
    def factor() -> torch.Tensor:
        return source.clone()

    @eager_break_during_capture
    def scale_(x: torch.Tensor, s: torch.Tensor) -> None:
        x.mul_(s.item())

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        scale_(y, factor().view(()))
        return y * 2

    wrapper, step = as_on_gpu(BreakableCUDAGraphWrapper, function)
    x = torch.randn(ROWS, WIDTH)
    for value in (2.0, 3.0, 4.0):
        source.fill_(value)
        x.normal_()
        torch.testing.assert_close(step(x), (x + 1) * value * 2)
    assert wrapper.counters.replays == 2


# ---------------------------------------------------------------- on a GPU, through front ends


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_sees_new_values(name: str, mode: str, compiler: str, device: str) -> None:
    if device == "cpu" and compiler == "inductor":
        pytest.skip("the rule does not depend on the compiler; C++ takes long")
    model = Scaled(device)
    served = front_end(name, model, device, cudagraph_mode=mode, compiler=compiler)
    check_scalars(served.step, model, device)
    assert served.counters().captures == 1
    assert served.counters().replays >= 4
