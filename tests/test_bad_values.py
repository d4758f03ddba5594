"""Every public callable, with each of its arguments replaced by each of many bad values.

A call may succeed. If it fails, the error is of cgcompile, or a TypeError or ValueError that
cgcompile itself raised; it fails soon, whatever the size of a number. ``CALLS`` has one valid call
of each public callable: a new public name must be added there.
"""

import dataclasses
import enum
import functools
import gc
import inspect
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.encoders import patches
from lib.patience import PATIENCE
from torch import fx, nn

import cgcompile
from cgcompile import CompilationConfig, CUDAGraphMode, encoder, passes, serving, settings
from cgcompile.debug.bisect import Bisection
from cgcompile.debug.compare import Difference
from cgcompile.debug.findings import Finding
from cgcompile.debug.profile import Profile
from cgcompile.debug.verify import Verification
from cgcompile.errors import ArgumentsError, CGCompileError, ConfigError, TraceError

ROOT = Path(cgcompile.__file__).resolve().parents[1]
OURS = (str(ROOT / "cgcompile"), str(ROOT / "passes"))

FULL = CUDAGraphMode.FULL
CONFIG = CompilationConfig(capture_device="host", compiler="eager", cache_dir="off")
MODEL = nn.Linear(4, 4).eval()
X = torch.zeros(2, 4)
DESCRIPTOR = cgcompile.BatchDescriptor(2, num_reqs=2)

BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**62": lambda: 2**62,
    "2**70": lambda: 2**70,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1.5": lambda: 1.5,
    "True": lambda: True,
    "empty text": str,
    "text": lambda: "no",
    "null byte": lambda: "\0",
    "bytes": lambda: b"x",
    "empty list": list,
    "empty mapping": dict,
    "list of None": lambda: [None],
    "list of huge": lambda: [2**62],
    "nested list": lambda: [[1], [2, "x"]],
    "mapping of text": lambda: {"no": "no"},
    "mapping of huge": lambda: {2**62: 1},
    "object": object,
    "class": lambda: int,
    "function": lambda: lambda: None,
    "empty tensor": lambda: torch.empty(0),
    "tensor of 3": lambda: torch.zeros(3),
    "tensor of integers": lambda: torch.tensor([[1, 2]]),
    "number as tensor": lambda: torch.tensor(1),
    "module": lambda: nn.Linear(2, 2),
}


def words(text: str) -> set[str]:
    return set(text.split())


# Called by cgcompile alone, or for each node and op of a model: neither a step nor a trace must pay
# for checking their arguments, and Python's own error is right.
WRAPPERS = {"drop", "entries_of", "entry_of", "keep", "record", "replay_entry"}
INTERNAL = {
    "Backend": words("""
        adopt attach compile_graph nothing_compiled recompile_limit_reached remember run_plain
    """),
    "Boundaries": {"match", "match_call"},
    "BreakableCUDAGraphWrapper": WRAPPERS,
    "CUDAGraphEntry": {"check", "result"},
    "CUDAGraphWrapper": WRAPPERS,
    "CudaGraphManager": {"capture_graph", "record", "run_dummy"},
    "ForwardContext": {"synthetic"},
    "GraphPool": words("""
        add_keeper add_owner add_user captured_since captures_into holds aliases_results owns poison retire
    """),
    "GraphSequence": {"fill", "replay", "watch"},
    "MemoryPlan": {"against"},
    "Profile": {"around"},
    "Axis": {"value_for"},
    "Costs": {"eager", "replay"},
    "PassRecord": {"text"},
    "PatchEncoder": words("""
        encoder_cudagraph_forward encoder_eager_forward
        get_encoder_cudagraph_budget_range get_encoder_cudagraph_item_specs
        postprocess_encoder_output prepare_encoder_cudagraph_capture_inputs
        prepare_encoder_cudagraph_replay_buffers select_encoder_cudagraph_items
    """),
    "SplitGraph": {"passes_text", "text"},
    "SplittingOp": {"impl_for"},
    "Agreement": {"across", "dispatch", "check_alone", "check_lost", "largest", "without"},
    "Counters": {"why_plain"},
    "DispatchStatistics": {"record"},
    "EncoderStatistics": {"coverage", "measured", "record"},
    "GraphHooks": {"before_capture"},
    "StaticInputs": {"check", "check_sizes", "check_uniform", "stage", "views"},
    "CudagraphDispatcher": {"is_ready"},
    "Sharder": {"agree", "assign", "check", "gather"},
}
# A value for one of these is run, as a model or on one: an error of torch is that of the model. A
# number names a CUDA device, which may not exist.
RUN = {"device", "model", "inputs", "*", "step", "push", "pop", "wrapper", "tower", "output"}
# Valid arguments, without what they need: captured graphs, or ranks.
REFUSED = {"Agreement", "Sharder"}
# Made by cgcompile alone.
RESULTS = {"CompiledModel", "CUDAGraphEntry", "EagerSegment", "GraphSegment", "GraphSequence"}
RESULTS |= {"Profile", "MemoryPlan", "SplitGraph"}


def dispatcher(**more: Any) -> serving.CudagraphDispatcher:
    known = {"mode": FULL, "sizes": (2, 4), "max_num_reqs": 4, "max_num_tokens": 8, **more}
    support = cgcompile.AttentionCGSupport.ALWAYS
    return serving.CudagraphDispatcher(**{"support": support, **known})


ROWS = serving.InputBuffer("input", ("tokens", 4), torch.float32)


def new_manager() -> serving.CudaGraphManager:
    return serving.CudaGraphManager(MODEL, dispatcher(), [ROWS], device="cpu", config=CONFIG)


@functools.cache
def manager() -> serving.CudaGraphManager:
    ready = new_manager()
    ready.capture()
    return ready


@functools.cache
def encoders() -> encoder.EncoderCudaGraphManager:
    ready = encoder.EncoderCudaGraphManager(patches(), **ENCODER)
    ready.capture()
    return ready


@functools.cache
def backend() -> cgcompile.Backend:
    return cgcompile.Backend(CONFIG)


@functools.cache
def explanation() -> Any:
    return cgcompile.explain(MODEL, X, config=CONFIG)


@functools.cache
def overview() -> Any:
    return cgcompile.debug.report(manager())


@functools.cache
def folder() -> str:
    return tempfile.mkdtemp()


def graph() -> fx.GraphModule:
    kept: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        kept.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x * 2 + 1, backend=keep)(X)
    return kept[0]


def wrapper(**more: Any) -> Any:
    return cgcompile.CUDAGraphWrapper(MODEL, CONFIG, **more)


def entered(block: Callable[..., Any]) -> Callable[..., Any]:
    """A context manager, as a call."""

    @functools.wraps(block)
    def call(*args: Any, **kwargs: Any) -> None:
        with block(*args, **kwargs):
            pass

    return call


def grid_rows(grids: Any) -> torch.Tensor:
    return torch.zeros(len(grids), 2)


ITEM = {"input_size": 4, "output_tokens": 1}
BATCH = {"num_tokens": 2, "num_reqs": 2}
BUFFER = {"name": "x", "shape": ("tokens",), "dtype": torch.int32}
COSTS = encoder.Costs()
NEEDS = [encoder.packing.Need((4,)), encoder.packing.Need((8,))]
CAPACITY = encoder.packing.Capacity(((8, 16),), 4)
PATCHES = {"merge_size": 2, "in_features": 4, "out_hidden_size": 4}
ENCODER = {"device": "cpu", "dtype": torch.float32, "token_budgets": [16], "config": CONFIG}
IMAGES = {"pixel_values": torch.zeros(4, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}

# The objects whose methods are called.
OBJECTS: dict[str, Callable[[], Any]] = {
    "Backend": backend,
    "Boundaries": lambda: cgcompile.boundaries.Boundaries(),
    "CompiledModel": lambda: cgcompile.compile(MODEL, CONFIG),
    "Profile": lambda: Profile(),
    "Coverage": lambda: cgcompile.coverage(manager()),
    "CudaGraphManager": manager,
    "CudagraphDispatcher": dispatcher,
    "Diagnosis": lambda: cgcompile.debug.Diagnosis("m", "cpu"),
    "Bisection": lambda: Bisection("m", "", (), "", None, (), 0),
    "Difference": lambda: Difference(),
    "Finding": lambda: Finding("k", "note", "m", "f", "-"),
    "LoraCases": lambda: serving.LoraCases((1, 2)),
    "EncoderCudaGraphManager": encoders,
    "EncoderItemSpec": lambda: encoder.EncoderItemSpec(**ITEM),
    "Explanation": explanation,
    "HostStaging": lambda: cgcompile.serving.HostStaging(torch.zeros(4)),
    "Overview": overview,
    "SplittingOp": lambda: cgcompile.SplittingOp("aten::mm"),
    "Verification": lambda: Verification("m", ()),
    "InputBuffer": lambda: serving.InputBuffer(**BUFFER),
    "EncoderStatistics": lambda: encoder.EncoderStatistics(),
    "PatchEncoder": patches,
}
# Calls of something else than the public name itself.
SPECIAL: dict[str, Callable[[], Callable[..., Any]]] = {
    "BreakableCUDAGraphCapture.add_eager": lambda: added,
    "CudaGraphManager.capture": lambda: new_manager().capture,
    "CudaGraphManager.plan": lambda: new_manager().plan,
    "CudaGraphManager.run, inputs": lambda: (
        lambda inputs: manager().run(serving.Batch(2, 2, inputs))
    ),
}
ENTERED = {"allow_capture", "override_forward_context", "profile", "set_forward_context"}
ENTERED |= {"tracing_ranges"}
PLACES: tuple[Any, ...] = (cgcompile.ladders, encoder.budgets, encoder.packing, encoder.sharding)
PLACES += (
    cgcompile.graphs.pool,
    cgcompile,
    serving,
    encoder,
    passes,
    cgcompile.debug,
    cgcompile.graphs,
)
PLACES += (cgcompile.boundaries, cgcompile.context)
WITHOUT_ARGUMENTS = words("""
    CUDAGraphOptions CompilationConfig CompilationConfig.resolve Counters Bisection.to_json
    Difference.to_json Finding.to_json Profile.to_json Coverage.to_json CudaGraphManager.capture
    CudaGraphManager.plan Diagnosis.to_json EncoderCudaGraphManager.capture
    EncoderCudaGraphPathConfig EncoderItemSpec.tokens Explanation.to_json ForwardContext
    Overview.to_json Verification.to_json set_forward_context DispatchStatistics Costs
    EncoderStatistics.tokens EncoderStatistics.waste EliminateClones EliminateNoOps
""")
# The arguments of a valid call of each, by name; ``*`` stands for one of *args.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(sorted(WITHOUT_ARGUMENTS), dict),
    "Backend": lambda: {"config": CONFIG},
    "Backend.anticipate": lambda: {"model": MODEL},
    "Backend.capture": lambda: {"step": lambda batch: None, "batches": []},
    "Backend.invalidate": lambda: {"reason": "other weights"},
    "BatchDescriptor": lambda: {"num_tokens": 2},
    "Boundaries": lambda: {"entries": ("aten::mm",)},
    "BreakableCUDAGraphCapture": lambda: {"device": "cpu"},
    "BreakableCUDAGraphCapture.add_eager": lambda: {"function": lambda: None},
    "BreakableCUDAGraphWrapper": lambda: {"runnable": MODEL, "config": CONFIG},
    "CUDAGraphWrapper": lambda: {"runnable": MODEL, "config": CONFIG, "runtime_mode": FULL},
    "load": lambda: {"path": saved_model(), "model": model_to_save},
    "CompiledModel.invalidate": lambda: {"reason": "other weights"},
    "CudaGraphManager": lambda: {
        "model": MODEL,
        "dispatcher": dispatcher(),
        "inputs": [ROWS],
        "device": "cpu",
        "config": CONFIG,
    },
    "CudaGraphManager.dispatched": lambda: {"batch": serving.Batch(2, 2, {"input": X})},
    "CudaGraphManager.dummy_batch": lambda: {"descriptor": DESCRIPTOR, "phase": "capture"},
    "CudaGraphManager.from_model": lambda: {
        "model": MODEL,
        "inputs": [ROWS],
        "max_num_tokens": 8,
        "max_num_reqs": 4,
        "config": CONFIG,
        "device": "cpu",
    },
    "CudaGraphManager.get_cudagraph_runtime_mode": lambda: {
        "num_reqs": 2,
        "num_tokens": 2,
        "max_query_len": 1,
    },
    "CudaGraphManager.get_cudagraph_size": lambda: {"num_tokens": 2},
    "CudaGraphManager.run": lambda: {"batch": serving.Batch(2, 2, {"input": X})},
    "CudaGraphManager.run, inputs": lambda: {"inputs": {"input": X}},
    "CudaGraphManager.run_fullgraph": lambda: {"num_tokens": 2},
    "EncoderStatistics": lambda: {"warn_fallbacks": True},
    "CudagraphDispatcher": lambda: {
        "mode": FULL,
        "sizes": (2, 4),
        "max_num_reqs": 4,
        "max_num_tokens": 8,
    },
    "CudagraphDispatcher.captured": lambda: {"mode": FULL, "descriptor": DESCRIPTOR},
    "CudagraphDispatcher.dispatch": lambda: BATCH,
    "CudagraphDispatcher.is_captured": lambda: {"mode": FULL, "descriptor": DESCRIPTOR},
    "CudagraphDispatcher.planned_size": lambda: {"num_tokens": 2},
    "CudagraphDispatcher.refused": lambda: {
        "mode": FULL,
        "descriptor": DESCRIPTOR,
        "why": "no memory",
    },
    "Diagnosis.of": lambda: {"model": "m", "device": "cpu", "findings": []},
    "Diagnosis.of_error": lambda: {"error": ValueError("x")},
    "Diagnosis.of_kind": lambda: {"kind": "sync"},
    "Diagnosis.to_html": lambda: {"path": f"{folder()}/page.html"},
    "DynamicDim": lambda: {"dim": 0, "name": "tokens"},
    "EncoderCudaGraphConfig": lambda: {
        "modalities": ("image",),
        "buffer_keys": ("x",),
        "out_hidden_size": 4,
    },
    "EncoderCudaGraphManager": lambda: {"model": patches(), **ENCODER},
    "EncoderCudaGraphManager.execute": lambda: {"mm_kwargs": IMAGES},
    "EncoderCudaGraphManager.from_model": lambda: {
        "tower": nn.Sequential(nn.Linear(4, 4)).eval(),
        "example_items": [{"input": X}],
        "device": "cpu",
        "dtype": torch.float32,
        "config": CONFIG,
    },
    "EncoderCudaGraphManager.plan": lambda: {"mm_kwargs": IMAGES},
    "EncoderCudaGraphManager.graph_inputs": lambda: {"key": encoder.GraphKey("default", 16)},
    "EncoderCudaGraphManager.supports_modality": lambda: {"modality": "image"},
    "EncoderBuffer": lambda: {"rows": "patches", "rows_per_token": 4},
    "EncoderItemSpec": lambda: ITEM,
    "Explanation.to_html": lambda: {"path": f"{folder()}/page.html"},
    "HostStaging": lambda: {"buffer": torch.zeros(4)},
    "HostStaging.fill": lambda: {"rows": torch.ones(2)},
    "Overview.to_html": lambda: {"path": f"{folder()}/page.html"},
    "SplittingOp": lambda: {"target": "aten::mm"},
    "Verification.to_html": lambda: {"path": f"{folder()}/page.html"},
    "allow_capture": lambda: {"allowed": True},
    "bisect": lambda: {"model": MODEL, "*": X, "config": CONFIG, "sets": 1},
    "capture_all": lambda: {"step": lambda batch: None, "batches": [], "target": backend()},
    "compile": lambda: {"model": MODEL, "config": CONFIG},
    "coverage": lambda: {"model": manager()},
    "doctor": lambda: {"model": MODEL, "*": X, "config": CONFIG},
    "loop": lambda: {"step": lambda state: None},
    "eager_break_during_capture": lambda: {"function": lambda: None},
    "explain": lambda: {"model": MODEL, "*": X, "config": CONFIG},
    "get_cudagraph_sizes": lambda: {
        "capture_sizes": (2, 4),
        "max_num_reqs": 4,
        "max_num_tokens": 8,
        "cudagraph_mode": FULL,
    },
    "GraphMemory": lambda: {"pools": 4},
    "GraphPool": lambda: {"device": "cpu"},
    "override_forward_context": lambda: {"context": cgcompile.ForwardContext()},
    "profile": lambda: {"target": manager()},
    "report": lambda: {"target": manager(), "path": f"{folder()}/page.html"},
    "runtime": lambda: {"compiled": torch.compile(MODEL, backend=backend())},
    "timeline": lambda: {"target": manager()},
    "tracing_ranges": lambda: {"push": len, "pop": lambda: None},
    "update_weights": lambda: {"module": MODEL, "state": MODEL.state_dict()},
    "verify": lambda: {"model": MODEL, "*": X, "config": CONFIG, "sets": 1},
    "Agreement": lambda: {"dispatcher": dispatcher()},
    "Axis": lambda: {"name": "x", "values": (1, 2)},
    "Batch": lambda: {**BATCH, "inputs": {"input": X}},
    "InputBuffer": lambda: BUFFER,
    "InputBuffer.dummy": lambda: BATCH,
    "InputBuffer.rows": lambda: BATCH,
    "LoraCases": lambda: {"counts": (1, 2)},
    "LoraCases.count_for": lambda: {"has_lora": True, "active": 1},
    "StaticInputs": lambda: {
        "specs": [ROWS],
        "max_num_tokens": 4,
        "max_num_reqs": 4,
        "device": "cpu",
    },
    "capture_sizes": lambda: {"maximum": 16},
    "checked_sizes": lambda: {"sizes": (1, 2)},
    "decode_sizes": lambda: {
        "requests": (1, 2),
        "query_len": 1,
        "max_num_reqs": 2,
        "max_num_tokens": 4,
    },
    "fit_sizes": lambda: {"histogram": {1: 3, 4: 2}, "count": 2},
    "is_uniform_decode": lambda: {"query_lens": [1, 1], "is_prefilling": [False, False]},
    "padding_share": lambda: {"ladder": (2, 4), "histogram": {1: 3}},
    "round_sizes": lambda: {"sizes": (2, 4), "multiple": 2, "maximum": 8},
    "PatchEncoder": lambda: {"forward": len, **PATCHES},
    "PatchEncoder.get_input_modality": lambda: {"mm_kwargs": IMAGES},
    "PatchEncoder.grids": lambda: {"mm_kwargs": IMAGES},
    "PatchOffsets": lambda: {"make": grid_rows},
    "PatchTable": lambda: {"make": grid_rows},
    "Sharder": lambda: {"group": None},
    "fitted_budgets": lambda: {"observed": {4: 2, 9: 1}, "count": 2},
    "generated_budgets": lambda: {"least": 4, "most": 64},
    "pack": lambda: {"needs": NEEDS, "capacity": CAPACITY, "costs": COSTS},
    "resolve_budgets": lambda: {"budget_range": (4, 64)},
    "resolve_frames": lambda: {"max_items": 2, "max_frames_per_video": 2},
    "shares_by_load": lambda: {"sizes": (3, 4), "ranks": 2},
    "smallest_budget": lambda: {"budgets": (4, 8), "tokens": 5},
    "supports_encoder_cudagraph": lambda: {"model": patches()},
    "FunctionPass": lambda: {"name": "mine", "function": lambda gm: gm},
    "PassManager": lambda: {"passes": ()},
    "check_disabled": lambda: {"disabled": (), "theirs": ()},
    "split_graph": lambda: {"gm": graph(), "boundaries": cgcompile.boundaries.Boundaries()},
}


def valid_call(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A public callable and the arguments of a valid call of it."""
    owner, _, method = name.partition(".")
    if name in SPECIAL:
        return SPECIAL[name](), CALLS[name]()
    if method and owner in OBJECTS:
        return getattr(OBJECTS[owner](), method), CALLS[name]()
    value = next(getattr(place, owner) for place in PLACES if hasattr(place, owner))
    value = getattr(value, method) if method else value
    return entered(value) if name in ENTERED else value, CALLS[name]()


def model_to_save(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@functools.cache
def saved_model() -> str:
    folder = tempfile.mkdtemp()
    compiled = cgcompile.compile(model_to_save, CONFIG, guards="none")
    compiled.save(f"{folder}/model", X)
    return f"{folder}/model"


def added(function: Any) -> None:
    capture = cgcompile.BreakableCUDAGraphCapture(device="cpu")
    with torch.inference_mode(), capture:
        torch.zeros(2).add(1)
        capture.add_eager(function)


# ---------------------------------------------------------------- which calls there must be


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls") and parameter.kind is not parameter.VAR_KEYWORD
    ]


def methods(kind: type) -> Iterator[str]:
    for name in dir(kind):
        function = getattr(kind, name, None)
        ours = str(getattr(function, "__module__", "")).startswith("cgcompile")
        if name.startswith("_") or not ours or not callable(function):
            continue
        if name not in INTERNAL.get(kind.__name__, ()) and parameters(function):
            yield name


def is_checked(kind: type) -> bool:
    """Whether making an object of a class can fail: a plain record takes what it is given."""
    if kind.__name__ in RESULTS or issubclass(kind, (enum.Enum, BaseException)):
        return False
    if dataclasses.is_dataclass(kind):
        return hasattr(kind, "__post_init__")
    return not hasattr(kind, "_fields") and bool(parameters(kind))


def public_callables() -> set[str]:
    names: set[str] = set()
    for module in (cgcompile, serving, encoder, passes):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isclass(value):
                plain = inspect.isfunction(value) and parameters(value)
                names |= {name} if plain else set()
                continue
            if getattr(value, "_is_protocol", False) or issubclass(value, enum.Enum):
                continue
            names |= {name} if is_checked(value) else set()
            names |= {f"{name}.{method}" for method in methods(value)}
    return names


def test_the_table_has_every_public_callable() -> None:
    wanted = public_callables()
    assert wanted - CALLS.keys() == set(), "add a valid call of each to CALLS"


@pytest.mark.parametrize("name", CALLS)
def test_valid_calls_succeed(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(CGCompileError):
            called(*valid_call(name))
        return
    function, arguments = valid_call(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called(function, arguments)


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    several = (arguments["*"],) if "*" in arguments else ()
    named = {name: value for name, value in arguments.items() if name != "*"}
    first = [each for each in parameters(function) if each.kind is not each.KEYWORD_ONLY]
    if not several:
        return function(**named)
    before = [named.pop(each.name) for each in first if each.name in named]
    return function(*before, *several, **named)


# ---------------------------------------------------------------- bad values


class HangsError(BaseException):
    """Not an Exception, so that what is tested cannot take it for a failure of its own."""


def stop(*_: Any) -> None:
    raise HangsError


def modes() -> tuple[Any, ...]:
    """The state of this thread that a refused call must leave as it was."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        gc.isenabled(),
        cgcompile.context.is_forward_context_available(),
        MODEL(X).requires_grad,
    )


def complaint(
    function: Callable[..., Any], arguments: dict[str, Any], parameter: str
) -> str | None:
    """What is wrong with how a call fails; None if nothing."""
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        called(function, arguments)
    except HangsError:
        return "it hangs"
    except CGCompileError:
        return None
    except (TypeError, ValueError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        # Python itself names a missing or unexpected argument at the call.
        ours = frame.filename.startswith(OURS) or "argument" in str(error)
        told = frame.line is not None and "raise" in frame.line
        if ours and (told or "argument" in str(error)):
            return None
        return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if parameter in RUN and not frame.filename.startswith(OURS):
            return None
        return f"{type(error).__name__}: {str(error)[:200]} ({frame.filename}:{frame.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


LONG = ("capture_all", "explain", "report", "verify")  # these run or trace a model for each value


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CALLS]
)
def test_bad_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments = valid_call(name)
    names = [each.name for each in parameters(function) if each.kind is not each.VAR_POSITIONAL]
    complaints = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.chdir(tmp_path)  # "no" is the name of a folder as well
        for parameter in [*names, *(["*"] if "*" in arguments else [])]:
            for bad, make in BAD.items():
                if bad == "class" and parameter in RUN:
                    continue  # it can be called, and its own error has no frame of its own
                gc.collect(0)
                before = modes()
                told = complaint(function, {**arguments, parameter: make()}, parameter)
                if told is None and modes() != before:
                    told = f"it leaves {modes()}, was {before}"
                if told is not None:
                    complaints.append(f"{parameter}={bad}: {told}")
    assert not complaints, "\n".join(complaints)


def endless(kind: type) -> Any:
    """Return a container that holds itself."""
    held: Any = kind()
    held.append(held) if kind is list else held.update(a=held)
    return held


def meta_grid() -> dict[str, torch.Tensor]:
    return {**IMAGES, "image_grid_thw": torch.tensor([[1, 2, 2]], device="meta")}


# Bad values of one argument: the call, the argument, and what makes the value.
ROWS_OF_ONE: list[tuple[str, str, Callable[[], Any]]] = [
    *(
        (name, "*", functools.partial(endless, kind))
        for name in ("bisect", "doctor", "explain", "verify")
        for kind in (list, dict)
    ),
    ("CudaGraphManager.from_model", "agreement", lambda: type),
    ("CudaGraphManager", "device", lambda: "cuda:99"),
    ("CudaGraphManager.run", "batch", lambda: serving.Batch(torch.empty(0), 2, {"input": X})),
    ("DispatchStatistics", "plan", lambda: torch.ops.aten.add),
    ("EncoderCudaGraphConfig", "modalities", lambda: torch.ops.aten.add),
    ("EncoderCudaGraphManager.execute", "mm_kwargs", meta_grid),
    ("EncoderCudaGraphManager.plan", "mm_kwargs", meta_grid),
    ("pack", "needs", lambda: {encoder.packing.Need((4,)): 1}),
    ("smallest_budget", "budgets", lambda: {4: 1}),
    ("report", "path", folder),
    ("report", "path", lambda: f"{folder()}/{'x' * 300}"),
]


@pytest.mark.parametrize(("name", "parameter", "make"), ROWS_OF_ONE)
def test_bad_values_of_one_argument(name: str, parameter: str, make: Callable[[], Any]) -> None:
    """The error is cgcompile's, and no other error is right here."""
    function, arguments = valid_call(name)
    with pytest.raises(CGCompileError) as raised:
        called(function, {**arguments, parameter: make()})
    assert str(raised.value).isascii()


@pytest.mark.parametrize("name", ["CUDAGraphWrapper", "BreakableCUDAGraphWrapper", "compile"])
@pytest.mark.parametrize("kind", [list, dict])
def test_inputs_that_hold_themselves(name: str, kind: type) -> None:
    step = getattr(cgcompile, name)(lambda held: X * 2, CONFIG)
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL, batch_descriptor=DESCRIPTOR
    )
    with torch.inference_mode(), context, pytest.raises(ArgumentsError, match="holds itself"):
        step(endless(kind))


def test_options_beside_a_backend_are_not_read_as_a_bool() -> None:
    graph = fx.symbolic_trace(MODEL)
    with pytest.raises(ConfigError, match="settings of the object are fixed"):
        backend()(graph, [X], options=torch.empty(0))


def test_bytes_as_an_input_of_an_op() -> None:
    with pytest.raises(TraceError, match="bytes"):
        cgcompile.compile(MODEL, CONFIG)(b"x")


def test_steps_check_no_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs at each step compares types alone; see :func:`cgcompile.settings.checked`."""
    target, tower = manager(), encoders()
    batch = serving.Batch(2, 2, {"input": X})
    target.run(batch)
    tower.execute(IMAGES)
    called = []
    monkeypatch.setattr(settings, "require_arguments", lambda where, *_: called.append(where))
    before = target.counters.replays
    target.run(batch)
    target.run_fullgraph(2)
    assert target.counters.replays == before + 2
    tower.execute(IMAGES)
    assert target.dispatcher.is_captured(FULL, target.dispatched(batch).descriptor)
    assert called == []
    ROWS.dummy(2, 2)  # a checked method, so that this test can fail
    assert called[-1:] == ["InputBuffer.dummy"]
