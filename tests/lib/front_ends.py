"""One step behind every front end, so that a hazard is one row tested over all of them.

``front_end(name, model, device, **settings)`` returns a ``FrontEnd``, whose ``step(x)`` runs the
model once on ``x``, f32[rows, WIDTH], and returns what that front end returns. The model takes
``x`` and returns f32[rows, WIDTH].
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import cgcompile
from cgcompile import (
    AttentionCGSupport,
    BatchDescriptor,
    CompilationConfig,
    CUDAGraphMode,
    set_forward_context,
)
from cgcompile.encoder import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from cgcompile.reasons import Counters
from cgcompile.serving import Batch, CudagraphDispatcher, CudaGraphManager, InputBuffer, Metadata

WIDTH, ROWS = 8, 4
COMPILED = ("torch.compile", "cgcompile.compile")
WRAPPERS = ("CUDAGraphWrapper", "BreakableCUDAGraphWrapper")
MANAGERS = ("CudaGraphManager", "EncoderCudaGraphManager")
FRONT_ENDS = COMPILED + WRAPPERS + MANAGERS

# The columns of the table of hazards: each way to put a model behind CUDA graphs. Of the compiled
# ones, each without and with a forward context; "keep", "shape" and "none" are the guards of
# cgcompile.compile, and "breakable" is its splitting.
TRACED = ("torch.compile", "keep", "shape", "none")
WITHOUT_CONTEXT = (*TRACED, "breakable")
WITH_CONTEXT = tuple(f"{name}, context" for name in WITHOUT_CONTEXT)
LOOP = "cgcompile.loop"
COLUMNS = WITHOUT_CONTEXT + WITH_CONTEXT + WRAPPERS + MANAGERS + (LOOP,)


@dataclass
class FrontEnd:
    """A model behind one front end; ``target`` is the backend, wrapper or manager."""

    name: str
    step: Callable[..., Any]
    target: Any

    def counters(self) -> Counters:
        """Return the counters of all graphs of this front end."""
        return self.target.counters


def settings(device: str, **more: Any) -> CompilationConfig:
    capture_device = "host" if device == "cpu" else "auto"
    return CompilationConfig(**{"capture_device": capture_device, "compiler": "eager", **more})


def context(
    rows: int = ROWS, mode: CUDAGraphMode = CUDAGraphMode.FULL, metadata: Any = None
) -> Any:
    """Set the forward context of a batch of ``rows`` tokens."""
    descriptor = BatchDescriptor(rows)
    return set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=descriptor)


def layers(device: str, seed: int = 0) -> nn.Module:
    """Make a small model of frozen weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device).requires_grad_(False)


def check(
    step: Callable[..., Any],
    eager: Callable[..., Any],
    device: str,
    steps: int = 1,
    rows: int = ROWS,
    grad: Callable[[], AbstractContextManager[Any]] = torch.inference_mode,
) -> None:
    """Compare steps on new inputs, f32[rows, WIDTH], with eager."""
    with grad():
        for _ in range(steps):
            x = torch.randn(rows, WIDTH, device=device)
            torch.testing.assert_close(step(x), eager(x))


def assert_steps_equal_eager(
    program: FrontEnd,
    eager: Callable[..., Any],
    device: str = "cpu",
    schedule: Sequence[int] = (ROWS,),
    *,
    replays: int,
    grad: Callable[[], AbstractContextManager[Any]] = torch.inference_mode,
) -> None:
    """Run steps of these numbers of rows, on new inputs; ``replays`` or more of them are replays.

    Each must equal eager.
    """
    before = program.counters().replays
    for rows in schedule:
        check(program.step, eager, device, 1, rows, grad)
    assert program.counters().replays >= before + replays, program.counters()


def front_end(name: str, model: nn.Module, device: str, **more: Any) -> FrontEnd:
    """Put ``model`` behind the front end ``name``; ``more`` are fields of CompilationConfig."""
    config = settings(device, **more)
    if name in COMPILED:
        return compiled(name, model, config)
    if name in WRAPPERS:
        return wrapped(name, model, config)
    if name == "CudaGraphManager":
        return managed(model, device, config)
    return encoder(model, device, config)


def compiled(name: str, model: Any, config: Any, dynamic: bool | None = None) -> FrontEnd:
    """Compile by one of ``COMPILED`` or ``TRACED``; ``config`` may be a Backend."""
    backend = config if isinstance(config, cgcompile.Backend) else cgcompile.Backend(config)
    if name == "torch.compile":
        step = torch.compile(model, backend=backend, dynamic=dynamic)
    else:
        step = cgcompile.compile(model, backend, guards=name if name in TRACED else "keep")
    return FrontEnd(name, step, backend)


def under_context(
    call: Callable[..., Any],
    metadata: Callable[[], Any] = lambda: None,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
) -> Callable[[torch.Tensor], Any]:
    """Return a step that copies its input into a buffer and calls under a forward context.

    More arguments of the step are passed as they are.
    """
    inputs: dict[int, torch.Tensor] = {}

    def step(x: torch.Tensor, *more: Any) -> Any:
        with context(len(x), mode, metadata()):
            if len(x) not in inputs:
                with torch.inference_mode(False):  # calls may be in any mode
                    inputs[len(x)] = torch.empty_like(x)
            return call(inputs[len(x)].copy_(x), *more)

    return step


def wrapped(
    name: str,
    model: Any,
    config: CompilationConfig,
    metadata: Callable[[], Any] = lambda: None,
) -> FrontEnd:
    wrapper = getattr(cgcompile, name)(model, config, CUDAGraphMode.FULL)
    return FrontEnd(name, under_context(wrapper, metadata), wrapper)


def looped(model: Any, config: CompilationConfig, metadata: Callable[[], Any]) -> FrontEnd:
    """Make a loop whose rounds have one step; its state is the arguments of the model."""
    loop = cgcompile.loop(lambda state: model(state["x"], *state["more"]), 1, config=config)

    def step(x: torch.Tensor, *more: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda y: y[0], loop({"x": x, "more": more}))

    return FrontEnd(LOOP, under_context(step, metadata), loop)


def column(
    name: str,
    model: Any,
    device: str,
    metadata: Callable[[], Any] = dict,
    **more: Any,
) -> FrontEnd:
    """Put ``model`` behind a column of the table; ``metadata`` makes that of a forward context."""
    config = settings(device, **more)
    if name in WRAPPERS:
        return wrapped(name, model, config, metadata)
    if name == LOOP:
        return looped(model, config, metadata)
    if name == "CudaGraphManager":
        return managed(model, device, config, lambda *_: Metadata(metadata()))
    if name == "EncoderCudaGraphManager":
        return encoder(model, device, config)
    kind = name.removesuffix(", context")
    if kind == "breakable":
        config = settings(device, splitting="breakable", **more)
    backend = cgcompile.Backend(config)
    if kind == "torch.compile":
        call = torch.compile(model, backend=backend)
    else:
        traced = {"guards": kind, "dynamic_dims": {"x": 0}} if kind in TRACED else {}
        call = cgcompile.compile(model, backend, **traced)
    step = under_context(call, metadata) if name in WITH_CONTEXT else call
    return FrontEnd(name, step, backend)


def capture_first(manager: Any, run: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Return a step that captures all graphs before its first run."""
    captured = []

    def step(x: torch.Tensor) -> Any:
        if not captured:
            captured.append(manager.capture())
        return run(x)

    return step


class Named(nn.Module):
    """Takes the input as the argument ``x``, which is how a manager passes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


def managed(
    model: Any,
    device: str,
    config: CompilationConfig,
    metadata: Callable[..., Any] = lambda *_: Metadata({}),
) -> FrontEnd:
    dispatcher = CudagraphDispatcher(
        CUDAGraphMode.FULL, [ROWS], max_num_reqs=ROWS, support=AttentionCGSupport.ALWAYS
    )
    manager = CudaGraphManager(
        Named(model),
        dispatcher,
        [InputBuffer("x", ("tokens", WIDTH), torch.float32)],
        device=device,
        config=config,
        metadata=metadata,
    )
    step = capture_first(manager, lambda x: manager.run(Batch(len(x), len(x), {"x": x})))
    return FrontEnd("CudaGraphManager", step, manager)


class EncoderModel:
    """The encoder protocol around ``model``: one item of n rows gives n output tokens."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(["image"], ["x"], WIDTH)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(len(mm_kwargs["x"]), len(mm_kwargs["x"]))]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        return mm_kwargs if indices else {"x": mm_kwargs["x"][:0]}

    def prepare_encoder_cudagraph_capture_inputs(
        self, budget: int, items: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> EncoderCudaGraphCaptureInputs:
        x = torch.randn(budget, WIDTH, device=device, dtype=dtype)
        return EncoderCudaGraphCaptureInputs({"x": x})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"x": mm_kwargs["x"]})

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(inputs["x"])

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        return self.model(mm_kwargs["x"])


def encoder(model: nn.Module, device: str, config: CompilationConfig) -> FrontEnd:
    manager = EncoderCudaGraphManager(
        EncoderModel(model),
        device=device,
        dtype=torch.float32,
        token_budgets=[ROWS],
        max_batch_size=1,
        config=config,
    )
    step = capture_first(manager, lambda x: manager.execute({"x": x})[0])
    return FrontEnd("EncoderCudaGraphManager", step, manager)
