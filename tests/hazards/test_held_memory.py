"""Tensors that captured ops touch and that are neither arguments nor weights: held by the graph.

A program that replaces one after the capture gets an error, and no replay reads freed memory.
"""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.front_ends import (
    COMPILED,
    MANAGERS,
    ROWS,
    WIDTH,
    WRAPPERS,
    assert_steps_equal_eager,
    check,
    context,
    front_end,
    settings,
)
from torch import nn

import cgcompile
from cgcompile import CUDAGraphMode
from cgcompile.errors import AddressChangedError
from cgcompile.graphs.breaks import BreakMode
from cgcompile.graphs.capture import TouchedMemory
from cgcompile.torch_compat import inductor, raw_memory

FULL = CUDAGraphMode.FULL
REPLACED = (
    r"a tensor \(8,\) .* of torch.float32, .* was replaced, resized or dropped after the capture"
)
GLOBAL: torch.Tensor = torch.empty(0)
REGISTRY: dict[str, torch.Tensor] = {}


@torch.library.custom_op("held_memory::add_table", mutates_args=())
def add_table(x: torch.Tensor) -> torch.Tensor:
    return x + REGISTRY["table"]


add_table.register_fake(torch.empty_like)


@torch.library.custom_op("held_memory::returned_table", mutates_args=())
def returned_table(x: torch.Tensor) -> torch.Tensor:
    return REGISTRY["table"]


@returned_table.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1])


class Adds(nn.Module):
    """Add a table, which a function reads from where it is held."""

    def __init__(self, read: Callable[[Any], torch.Tensor], **fields: Any) -> None:
        super().__init__()
        vars(self).update(fields)
        self._read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._read(self)


Replace = Callable[[torch.Tensor], None]


def in_list(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    model = Adds(lambda model: model.tables[0], tables=[table])
    return model, lambda other: model.tables.__setitem__(0, other)


def in_dict(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    model = Adds(lambda model: model.tables["first"][0], tables={"first": (table,)})
    return model, lambda other: model.tables.update(first=(other,))


def in_object(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    model = Adds(lambda model: model.state.table, state=SimpleNamespace(table=table))
    return model, lambda other: setattr(model.state, "table", other)


def in_closure(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    def replace(other: torch.Tensor) -> None:
        nonlocal table
        table = other

    return Adds(lambda _: table), replace


def in_global(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    def replace(other: torch.Tensor) -> None:
        global GLOBAL
        GLOBAL = other

    replace(table)
    return Adds(lambda _: GLOBAL), replace


class Owner:
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def read(self, _: Any) -> torch.Tensor:
        return self.table


def in_owner_of_a_method(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    owner = Owner(table)
    return Adds(owner.read), lambda other: setattr(owner, "table", other)


class CallsOp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.held_memory.add_table(x)


def in_custom_op(table: torch.Tensor) -> tuple[nn.Module, Replace]:
    def replace(other: torch.Tensor) -> None:
        REGISTRY["table"] = other

    replace(table)
    return CallsOp(), replace


HOLDERS = (
    in_list,
    in_dict,
    in_object,
    in_closure,
    in_global,
    in_owner_of_a_method,
    in_custom_op,
)


@pytest.mark.parametrize("name", WRAPPERS + MANAGERS)
def test_a_tensor_that_the_body_of_an_op_read_is_held(name: str, device: str) -> None:
    """The next step is an error; tensors behind the model are rows of the table of hazards."""
    table = torch.randn(WIDTH, device=device)
    model, replace = in_custom_op(table)
    served = front_end(name, model, device)
    assert_steps_equal_eager(served, model, device, [ROWS] * 3, replays=2)
    life = raw_memory.StorageLife(table)
    del table
    replace(torch.randn(WIDTH, device=device))
    gc.collect()
    x = torch.randn(ROWS, WIDTH, device=device)
    for _ in range(2):
        with (
            torch.inference_mode(),
            pytest.raises(AddressChangedError, match=f"{REPLACED}|REGISTRY"),
        ):
            served.step(x)
    assert not life.ended


@pytest.mark.parametrize("name", COMPILED)
def test_a_tensor_that_a_boundary_returned_is_held(name: str, device: str) -> None:
    """No op of the boundary touches it: the captured piece that follows does."""

    class Scales(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1) * torch.ops.held_memory.returned_table(x)

    op = cgcompile.SplittingOp(
        "held_memory::returned_table", support=cgcompile.AttentionCGSupport.ALWAYS
    )
    REGISTRY["table"] = torch.randn(WIDTH, device=device)
    model = Scales()
    served = front_end(name, model, device, splitting_ops=(op,))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode(), context(ROWS, FULL, {}):
        for _ in range(3):
            x.copy_(torch.randn(ROWS, WIDTH))
            torch.testing.assert_close(served.step(x), model(x))
        assert served.counters().replays == 1
        REGISTRY["table"] = torch.randn(WIDTH, device=device)
        with pytest.raises(AddressChangedError, match=REPLACED):
            served.step(x)


def adding_compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiler of the user whose code reads a tensor that no graph shows."""
    return lambda *args: tuple(result + REGISTRY["table"] for result in gm(*args))


@pytest.mark.parametrize("compiler", [None, adding_compiler])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("name", COMPILED)
def test_what_code_of_the_user_in_a_piece_reads_is_held(
    name: str, mode: str, compiler: Any, device: str
) -> None:
    """Code of an op, or of a compiler."""

    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            return x if compiler else torch.ops.held_memory.add_table(x)

    more = {"compiler": compiler} if compiler else {}
    REGISTRY["table"] = torch.randn(WIDTH, device=device)
    served = front_end(name, Doubles(), device, cudagraph_mode=mode, **more)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode(), context(ROWS, CUDAGraphMode[mode], {}):
        for _ in range(3):
            x.copy_(torch.randn(ROWS, WIDTH))
            torch.testing.assert_close(served.step(x), x * 2 + REGISTRY["table"])
        assert served.counters().replays == 1
        REGISTRY["table"] = torch.randn(WIDTH, device=device)
        with pytest.raises(AddressChangedError, match=REPLACED):
            served.step(x)


@pytest.mark.parametrize("name", [*COMPILED, "CudaGraphManager"])
def test_ops_of_compiled_pieces_are_not_looked_at_one_by_one(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = x * 2
            return torch.ops.held_memory.add_table(x).exp()

    seen: list[Any] = []

    def counted(mode: Any, op: Any, args: Any, kwargs: Any) -> Any:
        seen.append(op)
        return on_call[type(mode)](mode, op, args, kwargs)

    on_call = {kind: kind.on_call for kind in (TouchedMemory, BreakMode)}
    for kind in on_call:
        monkeypatch.setattr(kind, "on_call", counted)
    REGISTRY["table"] = torch.randn(WIDTH, device=device)
    op = cgcompile.SplittingOp(
        "held_memory::add_table", support=cgcompile.AttentionCGSupport.ALWAYS
    )
    model: Any = Doubles()
    behind = model
    if name not in COMPILED:
        config = settings(device, splitting_ops=(op,))
        behind = cgcompile.compile(model, config, guards="none", dynamic_dims={"x": 0})
        more: dict[str, Any] = {}
        with torch.inference_mode():
            behind(torch.zeros(ROWS, WIDTH, device=device))
    else:
        more = {"splitting_ops": (op,)}
    served = front_end(name, behind, device, **more)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode(), context(ROWS, FULL, {}):
        for _ in range(3):
            x.copy_(torch.randn(ROWS, WIDTH))
            torch.testing.assert_close(served.step(x), model(x))
    assert served.counters().replays >= 1
    of_table = [torch.ops.held_memory.add_table.default, torch.ops.aten.add.Tensor]
    assert of_table[0] in seen
    assert torch.ops.aten.mul.Tensor not in seen
    assert torch.ops.aten.exp.default not in seen
    if name in COMPILED:
        assert seen == of_table
    REGISTRY["table"] = torch.randn(WIDTH, device=device)
    with torch.inference_mode(), context(ROWS, FULL, {}), pytest.raises(AddressChangedError):
        served.step(x)


def test_passes_of_the_user_in_inductor_are_found() -> None:
    """An op that such a pass adds is in no graph that is looked at, so all ops are noted."""
    from torch._inductor import config

    assert not inductor.has_users_passes({})
    assert inductor.has_users_passes({"joint_custom_pre_pass": print})
    with config.patch(post_grad_custom_post_pass=print):
        assert inductor.has_users_passes({})
        assert not inductor.has_users_passes({"post_grad_custom_post_pass": None})


@pytest.mark.parametrize("build", HOLDERS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_replay_reads_old_values_and_never_freed_memory(
    name: str, build: Any, device: str
) -> None:
    """Of a graph itself, beneath the check; new tensors would take memory that was freed."""
    values = torch.randn(WIDTH, device=device)
    model, replace = build(values.clone())
    wrapper = getattr(cgcompile, name)(model, settings(device), FULL)
    x = torch.empty(ROWS, WIDTH, device=device)
    with torch.inference_mode(), context():
        for _ in range(2):
            torch.testing.assert_close(wrapper(x.normal_()), x + values)
    replace(torch.randn(WIDTH, device=device))
    gc.collect()
    taken = [torch.full((WIDTH,), torch.nan, device=device) for _ in range(1000)]
    (entry,) = wrapper.entries
    x.normal_()
    entry.sequence.replay()
    torch.testing.assert_close(entry.output, x + values)
    del taken


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_replaced_tensor_follows_on_input_change(name: str, device: str) -> None:
    model, replace = in_list(torch.randn(WIDTH, device=device))
    served = front_end(name, model, device, on_input_change="recapture")
    for captures in (1, 2):
        check(served.step, model, device, steps=3)
        assert served.counters().captures == captures
        assert served.counters().replays == 2 * captures
        replace(torch.randn(WIDTH, device=device))
        gc.collect()


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_tensor_that_was_resized_is_refused(name: str, device: str) -> None:
    """Its storage is the same one, and has other memory."""
    model, _ = in_list(torch.randn(1, WIDTH, device=device))
    served = front_end(name, model, device)
    assert_steps_equal_eager(served, model, device, [ROWS] * 3, replays=2)
    (table,) = model.tables
    model.tables[0] = table.resize_(ROWS << 16, WIDTH)[:1]
    x = torch.randn(ROWS, WIDTH, device=device)
    with (
        torch.inference_mode(),
        pytest.raises(AddressChangedError, match=r"tensor self\.tables\[0\] is at"),
    ):
        served.step(x)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("reads", [False, True], ids=["beside", "context"])
def test_a_tensor_of_metadata_that_is_read_from_elsewhere(
    name: str, reads: bool, device: str
) -> None:
    """A context that the step does not read is not compared, so its tensors are watched."""
    model, replace = in_list(torch.randn(WIDTH, device=device))
    if reads:
        model._read = lambda _: cgcompile.get_forward_context().attn_metadata["table"]
    wrapper = getattr(cgcompile, name)(model, settings(device), FULL)
    x = torch.randn(ROWS, WIDTH, device=device)

    def step() -> None:
        batch = cgcompile.BatchDescriptor(ROWS)
        table = {"table": model.tables[0]}
        with cgcompile.set_forward_context(
            table, cudagraph_runtime_mode=FULL, batch_descriptor=batch
        ):
            torch.testing.assert_close(wrapper(x.normal_()), x + table["table"])

    with torch.inference_mode():
        for _ in range(3):
            step()
        assert wrapper.counters.replays == 2
        replace(torch.randn(WIDTH, device=device))
        with pytest.raises(
            AddressChangedError, match="metadata" if reads else r"self\.tables\[0\]"
        ):
            step()


@pytest.mark.parametrize("name", WRAPPERS)
def test_memory_is_held_as_long_as_the_graphs(name: str, device: str) -> None:
    """That of arguments is not: a replay compares their addresses with those of the call."""
    model, replace = in_list(torch.randn(WIDTH, device=device))
    wrapper = getattr(cgcompile, name)(model, settings(device), FULL)
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode(), context():
        for _ in range(2):
            torch.testing.assert_close(wrapper(x), model(x))
    assert wrapper.counters.replays == 1
    lives = raw_memory.StorageLife(x), raw_memory.StorageLife(model.tables[0])
    del x
    replace(torch.randn(WIDTH, device=device))
    gc.collect()
    assert [life.ended for life in lives] == [True, False]
    wrapper.clear_graphs()
    gc.collect()
    assert lives[1].ended


def test_a_raw_capture_holds_what_it_reads(device: str) -> None:
    pool = cgcompile.GraphPool(device)
    x, table = torch.randn(WIDTH, device=device), torch.randn(WIDTH, device=device)
    capture = cgcompile.BreakableCUDAGraphCapture(pool)
    with torch.no_grad(), capture:
        y = x + table
    for _ in range(2):
        x.normal_()
        capture.replay()
        torch.testing.assert_close(y, x + table)
    values = table.cpu()
    del table
    gc.collect()
    taken = [torch.full((WIDTH,), torch.nan, device=device) for _ in range(1000)]
    x.normal_()
    capture.replay()
    torch.testing.assert_close(y.cpu(), x.cpu() + values)
    del taken
