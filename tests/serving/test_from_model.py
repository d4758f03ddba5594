"""``CudaGraphManager.from_model``: one set of settings for model, dispatcher and manager."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from lib.manager import INPUTS, SIZES, Decoder, eager, inner, library, metadata, requests
from torch import distributed as dist
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, CudaGraphManager, CUDAGraphMode, SplittingOp
from cgcompile.errors import (
    AddressChangedError,
    BatchError,
    CaptureError,
    ConfigError,
    ManagerError,
)
from cgcompile.reasons import Reason
from cgcompile.serving import Agreement, Batch, GraphHooks, InputBuffer, capture_sizes
from cgcompile.serving.errors import InputBufferError

ALWAYS, UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
LIMITS = {"max_num_tokens": 64, "max_num_reqs": 8}


def settings(
    device: str, support: AttentionCGSupport = ALWAYS, **more: Any
) -> cgcompile.CompilationConfig:
    if more.get("mode") != "NONE":
        more = {"splitting_ops": (SplittingOp("cgserve::attend", support=support),), **more}
        more.setdefault("compiler", "eager")
    host = {"capture_device": "host"} if device == "cpu" else {}
    return cgcompile.CompilationConfig(**host, **more)


def built(device: str, config: Any = None, **more: Any) -> CudaGraphManager:
    library()
    model = Decoder().to(device).eval()
    arguments = {"inputs": INPUTS, "metadata": metadata, **LIMITS, **more}
    return CudaGraphManager.from_model(model, config=config, **arguments)


def check_steps(manager: CudaGraphManager, device: str) -> None:
    """Steps of random inputs equal eager, and are replays."""
    manager.capture()
    before = manager.counters.replays
    for lengths in ((1, 1, 1), (1,) * 8, (2, 1), (1, 1, 1)):
        batch = requests(*lengths, device=device, decode=max(lengths) == 1)
        result = manager.run(batch)
        torch.testing.assert_close(result, eager(inner(manager), batch), rtol=1e-5, atol=1e-5)
    assert manager.counters.replays - before == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"splitting": "breakable"},
        {"cudagraph_mode": "FULL"},
        {"cudagraph_mode": "PIECEWISE"},
        pytest.param({"compiler": "inductor"}, marks=pytest.mark.slow),
        {"cudagraph_capture_sizes": SIZES},
    ],
    ids=str,
)
def test_each_way_to_capture_replays(more: dict[str, Any], device: str) -> None:
    manager = built(device, settings(device, **more))
    assert (manager.backend is None) is ("splitting" in more)
    assert manager.dispatcher.mode.name == more.get("cudagraph_mode", "FULL_AND_PIECEWISE")
    check_steps(manager, device)


@pytest.mark.parametrize("more", [{}, {"splitting": "breakable"}], ids=str)
def test_a_buffer_that_is_no_parameter(more: dict[str, Any], device: str) -> None:
    unknown = InputBuffer("y", ("tokens",), torch.int64)
    with pytest.raises(InputBufferError, match=r"'y': Decoder\.forward has no parameter") as error:
        built(device, settings(device, **more), inputs=[*INPUTS, unknown])
    text = str(error.value)
    assert "self" not in text
    assert all(spec.name in text for spec in INPUTS if spec.argument)
    assert "argument=False" in text
    inputs = [*INPUTS, replace(unknown, argument=False)]
    assert built(device, settings(device, **more), inputs=inputs).inputs.specs


@pytest.mark.parametrize("returned", [None, {"a": 1}])
def test_metadata_of_another_type(returned: object, device: str) -> None:
    manager = built(device, settings(device), metadata=lambda *_: returned)
    kind = "a dict" if returned else "a NoneType"
    with pytest.raises(ManagerError, match=rf"metadata\(\) returned {kind}; expected .*Metadata"):
        manager.capture()
    with pytest.raises(ManagerError, match=rf"metadata\(\) returned {kind}; expected .*Metadata"):
        manager.run(requests(1, 1, device=device, decode=True))


def test_without_a_trace_only_full_graphs_exist(device: str) -> None:
    manager = built(device, settings(device, mode="NONE", cudagraph_mode="FULL"))
    assert manager.backend is None
    assert {mode for mode, _ in manager.dispatcher.plan()} == {CUDAGraphMode.FULL}


@pytest.mark.slow
def test_a_compiled_model_keeps_its_settings(device: str) -> None:
    library()
    config = settings(device, cudagraph_mode="PIECEWISE")
    dims = {"input_ids": 0, "positions": 0}
    model = cgcompile.compile(Decoder().to(device).eval(), config, dynamic_dims=dims)
    manager = CudaGraphManager.from_model(model, INPUTS, metadata=metadata, **LIMITS)
    assert manager.model is model
    assert manager.dispatcher.mode is CUDAGraphMode.PIECEWISE
    check_steps(manager, device)
    with pytest.raises(ConfigError, match="the model was compiled with settings of its own"):
        CudaGraphManager.from_model(model, INPUTS, config=config, **LIMITS)


def test_support_is_that_of_the_least_capable_boundary() -> None:
    manager = built("cpu", settings("cpu", UNIFORM))
    modes = {(mode.name, key.uniform) for mode, key in manager.dispatcher.plan()}
    assert modes == {("PIECEWISE", False), ("FULL", True)}
    never = built("cpu", settings("cpu", splitting_ops=("cgserve::attend",)))
    assert never.dispatcher.mode is CUDAGraphMode.PIECEWISE


@pytest.mark.slow
def test_steps_capture_where_that_is_chosen(device: str) -> None:
    manager = built(device, settings(device), only_captured=False)
    replays = []
    for _ in range(4):
        check_equal(manager, requests(1, 2, device=device))
        replays.append(manager.counters.replays)
    assert replays[-1] > replays[1]
    assert manager.dispatcher.only_captured is False
    assert built(device, settings(device)).dispatcher.only_captured


@pytest.mark.slow
def test_declarations_may_come_from_an_iterator() -> None:
    manager = built("cpu", settings("cpu"), inputs=iter(INPUTS))
    assert manager.inputs.specs == INPUTS
    check_steps(manager, "cpu")


def planned_sizes(manager: CudaGraphManager) -> tuple[int, ...]:
    return tuple(sorted({key.num_tokens for _, key in manager.dispatcher.plan()}))


def test_sizes_come_from_the_settings_the_arguments_or_the_limit() -> None:
    listed = settings("cpu", cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=SIZES)
    assert planned_sizes(built("cpu", listed)) == SIZES
    assert planned_sizes(built("cpu", listed, sizes=(2, 4))) == (2, 4)
    config = settings("cpu", cudagraph_mode="PIECEWISE")
    assert planned_sizes(built("cpu", config)) == capture_sizes(64)
    manager = built("cpu", config, max_num_tokens=4096)
    assert planned_sizes(manager) == capture_sizes(512)
    assert manager.dispatcher.limits.max_num_tokens == 4096


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quey_lens": (1,)}, "no setting 'quey_lens'. Did you mean 'query_lens'"),
        ({"backend": None}, "no setting 'backend'"),
        ({"max_num_tokens": 0}, "max_num_tokens = 0; expected a whole number from 1"),
        ({"inputs": [nn.Linear(1, 1)]}, "expected a sequence of InputBuffer objects"),
        ({"model": 3}, "model = 3"),
        ({"model": lambda input_ids: input_ids}, "device = None; expected a device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_named(more: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"model": Decoder(), "inputs": INPUTS, **LIMITS, **more}
    with pytest.raises(ConfigError) as caught:
        CudaGraphManager.from_model(**arguments)
    assert message in str(caught.value)


def test_a_function_with_a_device(device: str) -> None:
    weight = torch.randn(4, 4, device=device)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    config = settings(device, splitting_ops=())
    rows = [InputBuffer("x", ("tokens", 4), torch.float32)]
    manager = CudaGraphManager.from_model(double, rows, config=config, device=device, **LIMITS)
    assert not any(bulk.missing for bulk in manager.capture().values())
    x = torch.randn(3, 4, device=device)
    result = manager.run(cgcompile.serving.Batch(3, 3, {"x": x}))
    torch.testing.assert_close(result, x @ weight)
    assert manager.counters.replays == 1


@pytest.mark.slow
def test_ranks_that_agree() -> None:
    """An agreement needs the dispatcher, which is constructed inside: pass what constructs it."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        manager = built("cpu", settings("cpu"), agreement=Agreement)
        assert manager.agreement is not None
        assert manager.agreement.dispatcher is manager.dispatcher
        check_steps(manager, "cpu")
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- graphs that are dropped


def check_equal(manager: CudaGraphManager, batch: Batch) -> None:
    result = manager.run(batch)
    torch.testing.assert_close(result, eager(inner(manager), batch), rtol=1e-5, atol=1e-5)


def replace_weights(manager: CudaGraphManager, device: str) -> None:
    inner(manager).load_state_dict(Decoder().to(device).state_dict(), assign=True)


@pytest.mark.slow
def test_what_the_handle_drops_is_dispatched_no_more(device: str) -> None:
    """FULL graphs too; nothing is captured while serving, and all of it is still counted."""
    manager = built(device, settings(device))
    manager.capture()
    decode, mixed = requests(1, 1, device=device, decode=True), requests(2, 1, device=device)
    for drop in (lambda: manager.backend.invalidate("test"), manager.backend.release):
        for batch in (decode, mixed):
            check_equal(manager, batch)
        before, steps = manager.counters, manager.statistics.steps
        drop()
        assert manager.counters.captures == before.captures
        assert manager.counters.replays == before.replays
        assert manager.statistics.steps == steps
        for batch in (decode, mixed):
            mode, _, why = manager.dispatched(batch)
            assert (mode, why.reason) == (CUDAGraphMode.NONE, Reason.NOT_CAPTURED)
            check_equal(manager, batch)
        assert manager.counters.captures == before.captures
        manager.capture()
        assert manager.dispatched(decode).mode is CUDAGraphMode.FULL
        assert manager.dispatched(mixed).mode is CUDAGraphMode.PIECEWISE


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_graphs_are_not_dropped_inside_of_a_step(mode: str, device: str) -> None:
    """Its result would be a view of memory that is free."""
    drops: list[tuple[str, Callable[[], None]]] = []

    def drop(here: str) -> None:
        if drops and drops[0][0] == here:
            drops.pop()[1]()

    class Hooks(GraphHooks):
        def before_replay(self) -> None:
            drop("before")

        def after_replay(self) -> None:
            drop("after")

    def build(*args: Any) -> Any:
        drop("metadata")
        return metadata(*args)

    manager = built(device, settings(device, cudagraph_mode=mode), hooks=[Hooks()], metadata=build)
    manager.capture()
    mixed = requests(2, 1, device=device)
    check_equal(manager, mixed)
    backend = manager.backend
    ways = manager.release, backend.release, lambda: backend.invalidate("test")
    for where, way in product(("before", "metadata", "after"), ways):
        drops.append((where, way))
        with pytest.raises(CaptureError, match="released inside of a step"):
            manager.run(mixed)
        assert not drops
        before = manager.counters.replays
        check_equal(manager, mixed)
        assert manager.counters.replays == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("first", ["plan", "run", "capture_graph", "model"])
def test_weights_replaced_before_the_capture(first: str, device: str) -> None:
    """A trace may be older than the weights: a capture compares what it has bound."""
    manager = built(device, settings(device))
    decode, mixed = requests(1, 1, device=device, decode=True), requests(2, 1, device=device)
    if first == "plan":
        manager.plan()
    elif first == "run":
        manager.run(mixed)
    elif first == "capture_graph":
        manager.capture_graph(*manager.dispatcher.plan()[0])
    else:
        with torch.inference_mode(), cgcompile.set_forward_context(mixed.inputs["query_start_loc"]):
            manager.model(*[mixed.inputs[name] for name in ("input_ids", "positions")])
    replace_weights(manager, device)
    if first == "capture_graph":
        with pytest.raises(AddressChangedError, match=r"release\(\), capture\(\)"):
            manager.capture_graph(*manager.dispatcher.plan()[1])
        manager.release()
    manager.capture()
    for batch in (decode, mixed):
        check_equal(manager, batch)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["run", "run, lazily", "capture_graph"])
def test_weights_replaced_before_the_manager(first: str, device: str) -> None:
    """A trace that served calls is older than the weights: the first step compares them."""
    library()
    dims = {"input_ids": 0, "positions": 0}
    plain = Decoder().to(device).eval().requires_grad_(False)
    model = cgcompile.compile(plain, settings(device), dynamic_dims=dims, guards="none")
    decode, mixed = requests(1, 1, device=device, decode=True), requests(2, 1, device=device)
    for _ in range(5):
        eager(model, mixed)
    more = {"metadata": metadata, "lazily": first == "run, lazily", **LIMITS}
    manager = CudaGraphManager.from_model(model, INPUTS, **more)
    replace_weights(manager, device)
    if first == "capture_graph":
        for planned in manager.dispatcher.plan():
            manager.capture_graph(*planned)
    for _ in range(3):
        check_equal(manager, decode)
        check_equal(manager, mixed)
    assert (manager.counters.replays > 0) is (first != "run")


@pytest.mark.slow
def test_a_step_without_a_graph_checks_bound_weights(device: str) -> None:
    manager = built(device, settings(device))
    mixed = requests(2, 1, device=device)
    check_equal(manager, mixed)  # in mode NONE
    replace_weights(manager, device)
    with pytest.raises(AddressChangedError, match="traced step"):
        manager.run(mixed)
    manager.release()
    check_equal(manager, mixed)


@pytest.mark.slow
def test_comparing_weights_may_be_left_out(device: str) -> None:
    manager = built(device, settings(device, checks="-weights"))
    manager.capture()
    replace_weights(manager, device)
    mixed = requests(2, 1, device=device)
    manager.run(mixed)
    manager.release()
    manager.capture()
    check_equal(manager, mixed)


# ---------------------------------------------------------------- what dispatched() refuses


@pytest.mark.slow
def test_dispatched_refuses_what_run_refuses(device: str) -> None:
    manager = built(device, settings(device))
    manager.capture()
    large, many = requests(65, device=device), requests(*[1] * 9, device=device, decode=True)
    for batch in (large, many):
        for call in (manager.dispatched, manager.run):
            with pytest.raises(InputBufferError, match="room for 64 and 8"):
                call(batch)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [None, 3])
def test_uneven_queries_are_no_uniform_decode(longest: int | None) -> None:
    manager = built("cpu", settings("cpu"), query_lens=[1, 2])
    manager.capture()
    batch = replace(requests(3, 1), max_query_len=longest, uniform_decode=True)
    for call in (manager.dispatched, manager.run):
        with pytest.raises(BatchError, match=r"queries have 3, 1 tokens|of one length"):
            call(batch)
    even = replace(requests(2, 2), max_query_len=None, uniform_decode=True)
    assert manager.dispatched(even).mode is CUDAGraphMode.FULL
    check_equal(manager, even)


@pytest.mark.slow
def test_verify_is_no_serving(device: str) -> None:
    manager = built(device, settings(device))
    manager.capture()
    decode = requests(1, 1, device=device, decode=True)
    manager.run(decode)
    before = manager.statistics.as_dict()
    assert cgcompile.verify(manager, decode, requests(2, 1, device=device)).ok
    assert manager.statistics.as_dict() == before
