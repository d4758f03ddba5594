"""Forward contexts that are missing, that move, or whose descriptor does not fit the inputs."""

import gc
import logging
import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lib.front_ends import (
    COMPILED,
    ROWS,
    WIDTH,
    WRAPPERS,
    FrontEnd,
    compiled,
    front_end,
    settings,
)
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.context import ForwardContext, override_forward_context
from cgcompile.errors import (
    AddressChangedError,
    DispatchError,
    ForwardContextError,
    HostValueChangedError,
)
from cgcompile.reasons import Reason
from cgcompile.serving import Batch, InputBuffer, Metadata


@pytest.mark.parametrize("name", COMPILED)
def test_an_op_that_reads_a_missing_context_raises_as_in_eager(name: str, device: str) -> None:
    available = []

    @torch.library.custom_op(f"cghazard::slots_{COMPILED.index(name)}", mutates_args=())
    def attend(x: torch.Tensor) -> torch.Tensor:
        available.append(cgcompile.context.is_forward_context_available())
        return x * cgcompile.get_forward_context().attn_metadata["factor"]

    attend.register_fake(torch.empty_like)

    def step(x: torch.Tensor) -> torch.Tensor:
        return attend(x + 1) + 1

    op = cgcompile.SplittingOp(f"cghazard::slots_{COMPILED.index(name)}")
    served = compiled(name, step, settings(device, splitting_ops=(op,)))
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        for function in (step, served.step, served.step):
            with pytest.raises(ForwardContextError, match="no forward context is set"):
                function(x)
        with set_forward_context({"factor": 3.0}):
            torch.testing.assert_close(served.step(x), (x + 1) * 3 + 1)
    assert available == [False, False, False, True]


@torch.library.custom_op("cghazard::scaled_by_context", mutates_args=())
def scaled_by_context(x: torch.Tensor) -> torch.Tensor:
    return x * cgcompile.get_forward_context().attn_metadata["factor"]


scaled_by_context.register_fake(torch.empty_like)


def step_of_the_op(x: torch.Tensor) -> torch.Tensor:
    return scaled_by_context(x + 1).sin()


def context_of(factor: object, mode: CUDAGraphMode) -> set_forward_context:
    descriptor = BatchDescriptor(ROWS, num_reqs=ROWS, uniform=True)
    return set_forward_context(
        {"factor": factor}, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
    )


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_an_undeclared_op_that_reads_the_context_is_not_captured(
    name: str, strict: bool, mode: CUDAGraphMode, device: str
) -> None:
    served = compiled(
        name, step_of_the_op, settings(device, on_fallback="raise" if strict else "warn")
    )
    x = torch.empty(ROWS, WIDTH, device=device)
    for factor in (1.0, 2.0, 3.0, 4.0):
        with torch.inference_mode(), context_of(factor, mode):
            if strict and factor == 2.0:  # the first call warms up
                with pytest.raises(DispatchError, match="a captured piece"):
                    served.step(x.normal_())
                return
            torch.testing.assert_close(served.step(x.normal_()), step_of_the_op(x))
    assert served.counters().replays == 0
    assert served.counters().plain == {Reason.WARMING: 1, Reason.CAPTURE_FAILED: 3}


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
@pytest.mark.parametrize("name", COMPILED)
def test_a_declared_op_reads_the_context_of_each_step(
    name: str, mode: CUDAGraphMode, device: str
) -> None:
    """In mode FULL the declaration promises that it reads tensors at fixed addresses alone."""
    support = cgcompile.AttentionCGSupport.ALWAYS
    op = cgcompile.SplittingOp("cghazard::scaled_by_context", support=support)
    served = compiled(name, step_of_the_op, settings(device, splitting_ops=(op,)))
    x, factor = torch.empty(ROWS, WIDTH, device=device), torch.empty((), device=device)
    for number in (1.0, 2.0, 3.0, 4.0):
        factor.fill_(number)
        with torch.inference_mode(), context_of(factor, mode):
            torch.testing.assert_close(served.step(x.normal_()), step_of_the_op(x))
    assert served.counters().replays == 2


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_manager_does_not_capture_an_undeclared_op_that_reads_the_context(
    mode: str, device: str
) -> None:
    def metadata(batch: Batch, descriptor: object, buffers: object) -> Metadata:
        return Metadata({"factor": 1.0 if batch.state is None else batch.state})

    manager = cgcompile.CudaGraphManager.from_model(
        step_of_the_op,
        [InputBuffer("x", ("tokens", WIDTH), torch.float32)],
        max_num_tokens=ROWS,
        max_num_reqs=ROWS,
        config=settings(device, cudagraph_mode=mode),
        device=device,
        metadata=metadata,
    )
    bulk = manager.capture()
    assert not any(capture.captured for capture in bulk.values())
    for capture in bulk.values():
        for _, why in capture.missing:
            assert "a captured piece" in why
    for factor in (2.0, 3.0):
        x = torch.randn(ROWS, WIDTH, device=device)
        batch = Batch(ROWS, ROWS, {"x": x}, 1, uniform_decode=True, state=factor)
        torch.testing.assert_close(manager.run(batch), ((x + 1) * factor).sin())
    assert manager.counters.replays == 0


# ---------------------------------------------------------------- metadata that moves

ALWAYS = cgcompile.SplittingOp(
    "cghazard::scaled_by_context", support=cgcompile.AttentionCGSupport.ALWAYS
)
FULL, MOVES = CUDAGraphMode.FULL, "metadata attn_metadata"


@dataclass
class Scales:
    factor: torch.Tensor
    unused: object = None


class Layered(NamedTuple):
    layers: dict[str, Scales]


def nested(factor: torch.Tensor) -> dict[str, Any]:
    """Put metadata below a few objects, where layers share one."""
    scales = Scales(factor)
    layers = {"a b": scales, "1": scales, "own": Scales(factor)}
    return {"factor": factor, "layered": Layered(layers), "host": [3, None, "text"]}


def reading(name: str, device: str, **more: Any) -> Any:
    """Return a front end of the op in mode FULL, and the step of one context and one buffer."""
    config = settings(device, splitting_ops=(ALWAYS,), **more)
    buffer = torch.empty(ROWS, WIDTH, device=device)
    if name in COMPILED:
        served = compiled(name, step_of_the_op, config)
        run = served.step
    else:
        run = getattr(cgcompile, name)(step_of_the_op, config, FULL)
        served = FrontEnd(name, run, run)

    def step(metadata: object) -> None:
        buffer.normal_()
        context = set_forward_context(
            metadata,
            cudagraph_runtime_mode=FULL,
            batch_descriptor=BatchDescriptor(ROWS, num_reqs=ROWS, uniform=True),
        )
        with torch.inference_mode(), context:
            torch.testing.assert_close(run(buffer), step_of_the_op(buffer))

    return served, step


def new_factor(device: str) -> torch.Tensor:
    return torch.randn((), device=device)


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_moved_metadata_of_a_full_graph_is_an_error(name: str, device: str) -> None:
    """A graph would read the tensors of its capture."""
    served, step = reading(name, device)
    factor = new_factor(device)
    for _ in range(5):
        factor.normal_()
        step(nested(factor))  # new objects around the same tensor
    assert served.counters().replays >= 3
    for metadata, path in (
        (nested(new_factor(device)), r"\['factor'\] is at"),
        (
            nested(factor) | {"layered": Layered({})},
            r"\['layered'\].*\.factor is .*checks='-metadata'",
        ),
        ({"factor": factor}, r"\['layered'\].*\.factor is "),
    ):
        with pytest.raises(AddressChangedError, match="(?s)" + MOVES + path):
            step(metadata)
    own = nested(factor)
    own["layered"].layers["1"] = Scales(factor)  # shared no more, and at the same addresses
    replays = served.counters().replays
    step(own)
    step(nested(factor))
    assert served.counters().replays == replays + 2


LAYOUTS = {
    "columns in use": lambda table: table[:, :5],
    "rows": lambda table: table[:1, :2],
    "strides": lambda table: table.as_strided((2, 2), (2, 1)),
    "dtype": lambda table: table[:, :2].view(torch.int32),
    "dimensions": lambda table: table[:, :2][None],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_metadata_of_another_layout_is_an_error(name: str, layout: str, device: str) -> None:
    """A graph repeats the shape, the strides and the dtype, such as the columns of a block table."""
    served, step = reading(name, device)
    factor, table = new_factor(device), torch.zeros(2, 8, dtype=torch.float32, device=device)
    for _ in range(5):
        step({"factor": factor.normal_(), "table": table[:, :2]})  # new views of one buffer
    assert served.counters().replays >= 3
    other = LAYOUTS[layout](table)
    assert other.data_ptr() == table.data_ptr()
    with pytest.raises(HostValueChangedError, match=r"(?s)metadata .*\['table'\] is a tensor \("):
        step({"factor": factor, "table": other})
    step({"factor": factor.normal_(), "table": table[:, :2]})


def test_bits_of_metadata_are_compared(device: str) -> None:
    served, step = reading("CUDAGraphWrapper", device)
    factor, phases = new_factor(device), torch.ones(2, dtype=torch.complex64, device=device)
    for _ in range(3):
        step({"factor": factor.normal_(), "phases": phases})
    assert served.counters().replays == 2
    with pytest.raises(HostValueChangedError, match="is a conjugate tensor"):
        step({"factor": factor, "phases": phases.conj()})


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_nested_tensors_of_metadata(layout: torch.layout, device: str) -> None:
    """One that is not jagged has an address, and neither a shape nor strides."""
    served, step = reading("CUDAGraphWrapper", device)
    factor = new_factor(device)
    items = [torch.randn(rows, device=device) for rows in (2, 3)]
    lengths = torch.nested.nested_tensor(items, layout=layout)
    for _ in range(3):
        step({"factor": factor.normal_(), "lengths": lengths})
    assert served.counters().replays == 2
    if layout is torch.strided:
        with pytest.raises(AddressChangedError, match=MOVES + r"\['lengths'\] is at"):
            step({"factor": factor, "lengths": lengths.clone()})


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_moved_metadata_follows_on_input_change(name: str, device: str) -> None:
    served, step = reading(name, device, on_input_change="eager")
    for factor in [new_factor(device) for _ in range(5)]:
        step({"factor": factor})
    assert served.counters().replays == 0
    assert served.counters().plain[Reason.INPUT_CHANGED] >= 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_recapture_moved_metadata(name: str, device: str) -> None:
    served, step = reading(name, device, on_input_change="recapture")
    factors = [new_factor(device) for _ in range(2)]
    for factor in factors * 3:
        step({"factor": factor.normal_()})
    assert (served.counters().captures, served.counters().replays) == (2, 4)


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_metadata_that_no_captured_op_reads_may_move(name: str, device: str) -> None:
    """Eager breaks and steps that read no context take any metadata."""
    net = nn.Linear(WIDTH, WIDTH, device=device)
    served = front_end(name, net, device)
    step, x = (
        served.target if name in WRAPPERS else served.step,
        torch.empty(ROWS, WIDTH, device=device),
    )
    for factor in [new_factor(device) for _ in range(5)]:
        with torch.inference_mode(), context_of(factor, FULL):
            torch.testing.assert_close(step(x.normal_()), net(x))
    assert served.counters().replays >= 3


@pytest.mark.parametrize("held", [deque, list, lambda items: {"x": {Key(): None, "y": items[0]}}])
def test_kinds_of_containers_are_opened(held: Any, device: str) -> None:
    served, step = reading("CUDAGraphWrapper", device)
    factor = new_factor(device)
    metadata = {"factor": factor, "module": math, "held": held([factor])}
    for _ in range(3):
        step(metadata | {"held": held([factor])})
    for moved in (torch.ones((), device=device), torch.ones(1, 1, device=device).to_sparse()):
        with pytest.raises(AddressChangedError, match=MOVES + r"\['held'\].* is "):
            step(metadata | {"held": held([moved])})
    assert served.counters().replays == 2


class Key:
    """A key of metadata, such as a request."""


def test_keys_of_metadata_die(device: str) -> None:
    _, step = reading("CUDAGraphWrapper", device)
    key = Key()
    step({"factor": new_factor(device), key: 3})
    died = weakref.ref(key)
    del key
    gc.collect()
    assert died() is None


def test_threads_that_share_a_context(device: str) -> None:
    """Another capture under the same object does not hide what an op has read."""
    shared = ForwardContext(
        {"factor": new_factor(device)},
        cudagraph_runtime_mode=FULL,
        batch_descriptor=BatchDescriptor(ROWS),
    )
    x = torch.ones(ROWS, WIDTH, device=device)

    def meanwhile(y: torch.Tensor) -> torch.Tensor:
        result = scaled_by_context(y)
        shared.was_read = False  # as the beginning of a capture in another thread would
        return result

    wrapper = cgcompile.CUDAGraphWrapper(meanwhile, settings(device), FULL)
    with torch.inference_mode(), override_forward_context(shared):
        for _ in range(2):
            wrapper(x)
    (entry,) = wrapper.entries
    assert entry.context is not None
    shared.attn_metadata = {"factor": new_factor(device)}
    moved = pytest.raises(AddressChangedError, match=MOVES)
    with torch.inference_mode(), override_forward_context(shared), moved:
        wrapper(x)


def test_breaks_read_the_metadata_of_each_step(device: str) -> None:
    scaled = cgcompile.eager_break_during_capture(
        lambda x: x * cgcompile.get_forward_context().attn_metadata["factor"]
    )
    wrapper = cgcompile.BreakableCUDAGraphWrapper(
        lambda x: scaled(x + 1).sin(), settings(device), CUDAGraphMode.PIECEWISE
    )
    x = torch.empty(ROWS, WIDTH, device=device)
    for factor in [new_factor(device) for _ in range(4)]:
        with torch.inference_mode(), context_of(factor, CUDAGraphMode.PIECEWISE):
            torch.testing.assert_close(wrapper(x.normal_()), ((x + 1) * factor).sin())
    assert wrapper.counters.replays == 3


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_metadata_is_not_compared_on_request(name: str, device: str) -> None:
    served, step = reading(name, device, checks="-metadata")
    factor = new_factor(device)
    for number in range(5):
        step({"factor": factor.normal_(), "unread": torch.ones(number + 1, device=device)})
    assert served.counters().replays >= 3


# ---------------------------------------------------------------- rows of a descriptor


def steps(served: FrontEnd, model: nn.Module, shape: tuple[int, ...], descriptor: BatchDescriptor):
    """Compare four steps on one buffer with eager."""
    x = torch.empty(shape, device=model.weight.device)
    for _ in range(4):
        x.normal_()
        with (
            torch.no_grad(),
            set_forward_context(
                cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=descriptor
            ),
        ):
            torch.testing.assert_close(served.step(x), model(x))


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("rows", [16, WIDTH])  # those of no input; the last dimension of one
def test_rows_that_no_input_has_are_a_warning_once(
    name: str, rows: int, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Coverage and padding would be counted in wrong rows."""
    model = nn.Linear(WIDTH, WIDTH, device=device)
    served = front_end(name, model, device)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        steps(served, model, (6, WIDTH), BatchDescriptor(rows))
    (text,) = [text for text in caplog.messages if f"no input has {rows} rows" in text]
    assert "[6, 8]" in text
    assert served.counters().replays >= 2


@pytest.mark.parametrize("name", COMPILED)
def test_rows_that_no_input_has_are_an_error_if_strict(name: str, device: str) -> None:
    model = nn.Linear(WIDTH, WIDTH, device=device)
    served = front_end(name, model, device, on_fallback="raise")
    with pytest.raises(DispatchError, match="no input has 16 rows"):
        steps(served, model, (6, WIDTH), BatchDescriptor(16))
    assert served.counters().plain.total() == 1  # the first call warms up
    assert served.counters().captures == 0


@pytest.mark.parametrize(
    ("shape", "descriptor"),
    [
        ((6, WIDTH), BatchDescriptor(6)),
        ((2, 6, WIDTH), BatchDescriptor(12)),
        ((1, 6, WIDTH), BatchDescriptor(6)),
        ((3, WIDTH), BatchDescriptor(12, 3)),
    ],
    ids=["rows", "product", "second dimension", "requests"],
)
def test_rows_that_an_input_has_are_right(
    shape: tuple[int, ...],
    descriptor: BatchDescriptor,
    device: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(WIDTH, WIDTH, device=device)
    served = front_end("torch.compile", model, device, on_fallback="raise")
    with caplog.at_level(logging.WARNING, "cgcompile"):
        steps(served, model, shape, descriptor)
    assert not [text for text in caplog.messages if "no input has" in text]
    assert served.counters().replays >= 2
