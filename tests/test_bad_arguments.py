"""Arguments of the wrong kind are refused where they are given, in words, and change nothing."""

import functools

import pytest
import torch
from lib.encoders import patches
from torch import nn

import cgcompile
from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CudaGraphManager,
    CUDAGraphMode,
    CUDAGraphWrapper,
    SplittingOp,
    capture_all,
    eager_break_during_capture,
)
from cgcompile.boundaries import Boundaries
from cgcompile.encoder import EncoderCudaGraphManager
from cgcompile.errors import (
    BatchError,
    BoundaryError,
    CGCompileError,
    ConfigError,
    ManagerError,
    SizesError,
)
from cgcompile.ladders import checked_sizes, padding_share
from cgcompile.passes import FunctionPass
from cgcompile.serving import (
    Agreement,
    Axis,
    Batch,
    CudagraphDispatcher,
    GraphHooks,
    HostStaging,
    InputBuffer,
    LoraCases,
    StaticInputs,
    get_cudagraph_sizes,
)
from cgcompile.serving.errors import AgreementError, InputBufferError

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
CONFIG = CompilationConfig(capture_device="host", compiler="eager", cache_dir="off")
ROWS = InputBuffer("x", ("tokens", 4), torch.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


MODEL = Model()


def wrapper(**more):
    return CUDAGraphWrapper(**{"runnable": MODEL, "config": CONFIG, **more})


def dispatcher(**more):
    known = {"mode": FULL, "sizes": (2, 4), "max_num_reqs": 4, **more}
    return CudagraphDispatcher(**{"support": cgcompile.AttentionCGSupport.ALWAYS, **known})


def manager(**more):
    known = {"model": MODEL, "dispatcher": dispatcher(), "inputs": [ROWS], "device": "cpu"}
    return CudaGraphManager(**{"config": CONFIG, **known, **more})


def encoder(**more):
    known = {"device": "cpu", "dtype": torch.float32, "token_budgets": [16], "config": CONFIG}
    return EncoderCudaGraphManager(patches(), **{**known, **more})


def buffer(**more):
    return InputBuffer(**{"name": "x", "shape": ("tokens",), "dtype": torch.int32, **more})


def bulk(**more):
    known = {"step": len, "batches": [1, 2], "target": cgcompile.Backend(CONFIG)}
    return capture_all(**{**known, **more})


BAD = [
    (wrapper, {"runnable": 3}, ConfigError, "CUDAGraphWrapper: runnable = 3; expected something"),
    (wrapper, {"config": 3}, ConfigError, "config = 3; expected CompilationConfig or None"),
    (wrapper, {"cudagraph_options": 3}, ConfigError, "expected CUDAGraphOptions or None"),
    (wrapper, {"pool": 3}, ConfigError, "expected GraphPool or None"),
    (bulk, {"target": nn.Linear(3, 3)}, ConfigError, "capture_all: target = Linear"),
    (bulk, {"step": 3}, ConfigError, "step = 3"),
    (bulk, {"batches": 3}, ConfigError, "batches = 3; expected an iterable"),
    (bulk, {"batches": [(1, 2), (3, 4)]}, ConfigError, "give size= for batches"),
    (bulk, {"size": 3}, ConfigError, "size = 3"),
    (bulk, {"size": str}, ConfigError, "size = '1'; expected a number"),
    (dispatcher, {"mode": "FUL"}, ConfigError, "mode = 'FUL'; expected one of NONE, "),
    (dispatcher, {"mode": None}, ConfigError, "mode = None"),
    (dispatcher, {"sizes": 8}, ConfigError, "sizes = 8; expected a sequence of items"),
    (dispatcher, {"sizes": "8"}, ConfigError, "sizes = '8'"),
    (dispatcher, {"query_lens": 3}, ConfigError, "query_lens = 3"),
    (dispatcher, {"query_lens": {1: 3}}, ConfigError, "query_lens = 3"),
    (dispatcher, {"varlen_decode_sizes": [1]}, ConfigError, "varlen_decode_sizes = "),
    (dispatcher, {"axes": 3}, ConfigError, "axes = 3"),
    (dispatcher, {"axes": ["x"]}, ConfigError, "expected a sequence of Axis objects"),
    (dispatcher, {"support": "ALWAYS"}, ConfigError, "expected AttentionCGSupport"),
    (dispatcher, {"piecewise": "no"}, ConfigError, "piecewise = 'no'"),
    (manager, {"model": 3}, ConfigError, "CudaGraphManager: model = 3"),
    (manager, {"dispatcher": 3}, ConfigError, "expected CudagraphDispatcher"),
    (manager, {"inputs": ROWS}, ConfigError, "expected a sequence"),
    (manager, {"inputs": ["x"]}, ConfigError, "expected a sequence of InputBuffer objects"),
    (manager, {"device": "foo"}, ConfigError, "device = 'foo'; expected a torch.device"),
    (manager, {"device": None}, ConfigError, "device = None"),
    (manager, {"prepare": 3}, ConfigError, "prepare = 3"),
    (manager, {"metadata": 3}, ConfigError, "metadata = 3"),
    (manager, {"outputs": 3}, ConfigError, "outputs = 3"),
    (manager, {"outputs": "rows"}, ManagerError, "rows"),
    (manager, {"config": "cgcompile"}, ConfigError, "CudaGraphManager: config = .* or None"),
    (manager, {"hooks": [3]}, ConfigError, "expected a sequence of GraphHooks objects"),
    (manager, {"hooks": GraphHooks()}, ConfigError, "hooks = "),
    (manager, {"dispatcher": 3}, ConfigError, "dispatcher = 3; expected CudagraphDispatcher"),
    (encoder, {"dtype": "float32"}, ConfigError, "EncoderCudaGraphManager: dtype = 'float32'"),
    (encoder, {"device": "foo"}, ConfigError, "device = 'foo'"),
    (encoder, {"pool": 3}, ConfigError, "pool = 3"),
    (encoder, {"costs": 3}, ConfigError, "costs = 3"),
    (encoder, {"sharder": 3}, ConfigError, "sharder = 3"),
    (buffer, {"name": 3}, ConfigError, "InputBuffer: name = 3"),
    (buffer, {"dtype": "int32"}, ConfigError, "dtype = 'int32'; expected a torch.dtype"),
    (buffer, {"host_slots": 0}, ConfigError, "host_slots = 0"),
    (buffer, {"shape": 3}, InputBufferError, "shape=3"),
    (buffer, {"shape": ("tokens", -3)}, InputBufferError, "-3"),
    (buffer, {"shape": ("tokens", True)}, InputBufferError, "True"),
]


@pytest.mark.parametrize(
    ("make", "wrong", "kind", "told"),
    BAD,
    ids=[
        f"{make.__name__}-{name}={value!r:.20}" for make, x, *_ in BAD for name, value in x.items()
    ],
)
def test_constructors_refuse(make, wrong, kind, told) -> None:
    with pytest.raises(kind, match=told):
        make(**wrong)


CALLS = {
    "decorator": (lambda: eager_break_during_capture(3), ConfigError),
    "breakable wrapper of nothing": (lambda: BreakableCUDAGraphWrapper(None), ConfigError),
    "breakable wrapper, config": (lambda: BreakableCUDAGraphWrapper(MODEL, 3), ConfigError),
    "raw capture, pool": (lambda: BreakableCUDAGraphCapture(3), ConfigError),
    "raw capture, device": (lambda: BreakableCUDAGraphCapture(device="foo"), ConfigError),
    "raw capture, boundaries": (
        lambda: BreakableCUDAGraphCapture(device="cpu", boundaries=["aten::mm"]),
        ConfigError,
    ),
    "pass": (lambda: FunctionPass(3, len), ConfigError),
    "pass, function": (lambda: FunctionPass("mine", 4), ConfigError),
    "pass, version": (lambda: FunctionPass("mine", len, version=2), ConfigError),
    "settings, ops": (lambda: cgcompile.Backend(splitting_ops=(3,)), ConfigError),
    "settings, pass name": (
        lambda: CompilationConfig(passes=(functools.partial(len),)),
        ConfigError,
    ),
    "op, name": (lambda: SplittingOp("aten::mm", name=3), ConfigError),
    "op, compiled": (lambda: SplittingOp("aten::mm", compiled="no"), ConfigError),
    "op, empty": (lambda: SplittingOp(""), BoundaryError),
    "ops": (lambda: Boundaries(3), BoundaryError),
    "axis, name": (lambda: Axis(3, [1]), ConfigError),
    "axis, full_only": (lambda: Axis("x", [1], full_only="no"), ConfigError),
    "lora": (lambda: LoraCases(3), ConfigError),
    "lora, without": (lambda: LoraCases((1,), without="no"), ConfigError),
    "staging, layout": (lambda: HostStaging(torch.zeros(3).to_sparse()), ConfigError),
    "staging, slots": (lambda: HostStaging(torch.zeros(3), num_slots=True), ConfigError),
    "inputs": (lambda: StaticInputs([ROWS], 4, 4, "foo"), ConfigError),
    "sizes": (lambda: checked_sizes(8), SizesError),
    "sizes, mode": (lambda: get_cudagraph_sizes([1], 8, 8, "FUL"), ConfigError),
    "sizes, number": (lambda: get_cudagraph_sizes(8, 8, 8, FULL), SizesError),
    "histogram": (lambda: padding_share([1, 2], [3]), ConfigError),
    "agreement": (lambda: Agreement(3), ConfigError),
    "agreement, group": (lambda: Agreement(dispatcher(), 3), ConfigError),
    "agreement without ranks": (lambda: Agreement(dispatcher()), AgreementError),
    "ranges": (lambda: cgcompile.debug.tracing_ranges("x").__enter__(), ConfigError),
    "a captured graph": (lambda: dispatcher().captured(FULL, [1]), BatchError),
}


@pytest.mark.parametrize(("call", "kind"), CALLS.values(), ids=CALLS.keys())
def test_calls_refuse(call, kind) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, CGCompileError)
    assert "expected" in str(caught.value) or caught.type in (BatchError, AgreementError)


def test_names_of_modes_do_where_the_configuration_takes_them() -> None:
    for mode in (FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE):
        by_name = get_cudagraph_sizes([1, 4], 8, 8, mode.name, 1, True)
        assert by_name == get_cudagraph_sizes([1, 4], 8, 8, mode, 1, True)
    assert dispatcher(mode="full").plan() == dispatcher(mode=FULL).plan()
    assert len(dispatcher(mode="FULL").plan()) == 2


def test_ops_that_nothing_has_registered_yet_stay_for_later() -> None:
    backend = cgcompile.Backend(splitting_ops=("not::there",), compiler="eager")
    assert backend.config.splitting_ops == ("not::there",)
    assert Boundaries("aten::mm, aten::bmm").declared == ("aten::mm", "aten::bmm")
    assert Boundaries(SplittingOp("aten::mm")).declared == ("aten::mm",)


def test_a_pass_of_a_partial_has_a_uuid() -> None:
    def add(gm, number):
        return gm

    bound = FunctionPass("mine", functools.partial(add, number=3))
    assert bound.uuid() == FunctionPass("mine", add).uuid()
    assert bound.uuid() != FunctionPass("mine", functools.partial(add), version="2").uuid()


def test_a_manager_that_was_refused_leaves_its_dispatcher_as_it_was() -> None:
    mine = dispatcher()
    for wrong in ({"device": "foo"}, {"hooks": [3]}, {"outputs": 3}, {"prepare": 3}):
        with pytest.raises(ConfigError):
            manager(dispatcher=mine, **wrong)
        assert mine.only_captured is False
    good = manager(dispatcher=mine)
    good.capture()
    assert mine.only_captured is True
    x = torch.randn(3, 4)
    torch.testing.assert_close(good.run(Batch(3, 3, {"x": x})), MODEL(x).detach())
    assert mine.dispatch(3, 3).mode is FULL


def test_what_cannot_be_called_does_not_break_a_capture() -> None:
    x = torch.ones(4)
    capture = BreakableCUDAGraphCapture(device="cpu")
    with torch.inference_mode(), capture:
        y = x * 2
        with pytest.raises(ConfigError, match=r"add_eager\(\): function = 3"):
            capture.add_eager(3)
        z = y + 1
    capture.replay()
    assert z.tolist() == [3.0] * 4
    assert (capture.num_graphs, capture.num_eager_breaks) == (1, 0)


def test_a_wrapper_works_after_others_were_refused() -> None:
    wrapped = wrapper(runtime_mode=FULL)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        context = cgcompile.set_forward_context(
            None, cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(2)
        )
        with context:
            wrapped(x)
            x.copy_(torch.randn(2, 4))
            torch.testing.assert_close(wrapped(x), MODEL(x))
    assert (wrapped.counters.captures, wrapped.counters.replays) == (1, 1)


def test_backends_that_are_none() -> None:
    """What people write in place of a Backend object or of options by name."""
    gm = torch.fx.symbolic_trace(MODEL)
    for call in (  # as torch.compile(backend=cgcompile.Backend) calls it
        lambda: cgcompile.Backend(gm, [torch.ones(4)]),
        lambda: cgcompile.Backend(gm),
    ):
        with pytest.raises(ConfigError, match=r"backend=cgcompile\.Backend is a class; expected"):
            call()
    with pytest.raises(ConfigError, match=r"options is a CompilationConfig; expected a mapping"):
        CompilationConfig.resolve(options=CONFIG)


def test_names_of_vllm_get_a_pointer() -> None:
    with pytest.raises(ConfigError, match="expected PIECEWISE, which is what vLLM calls"):
        CompilationConfig(mode="VLLM_COMPILE")
    with pytest.raises(ConfigError, match="level=3 is mode='PIECEWISE'"):
        cgcompile.Backend(level=3)


@pytest.mark.parametrize("number", [2**40, 2**70])
def test_tables_are_bounded(number: int) -> None:
    """A table with a row for each size would not end, or take all memory."""
    for call in (
        lambda: get_cudagraph_sizes([4, number], 4, 8, FULL),
        lambda: dispatcher(sizes=[number]),
        lambda: HostStaging(torch.zeros(3), num_slots=number),
        lambda: cgcompile.encoder.sharding.shares_by_load([1, 2], number),
        lambda: cgcompile.serving.capture_sizes(number),
    ):
        with pytest.raises(CGCompileError, match="expected"):
            call()


def test_flags_are_booleans() -> None:
    for call in (
        lambda: cgcompile.DynamicDim("x"),
        lambda: cgcompile.graphs.allow_capture("no"),
        lambda: cgcompile.CUDAGraphOptions(gc_disable="no"),
        lambda: dispatcher().dispatch(2, 2, uniform_decode=float("nan")),
        lambda: dispatcher().dispatch(2, float("nan")),
        lambda: buffer(optional="no"),
        lambda: BatchDescriptor(2, uniform=1, num_reqs=2),
    ):
        with pytest.raises(CGCompileError, match="expected"):
            call()


def test_errors_of_inherited_methods_name_the_class_of_the_object() -> None:
    with pytest.raises(ConfigError, match=r"Backend\.invalidate"):
        cgcompile.Backend().invalidate(3)  # type: ignore[arg-type]
