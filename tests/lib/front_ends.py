"""One step behind every front end, so that a hazard is one row tested over all of them.

``front_end(name, model, device, **settings)`` returns a ``FrontEnd``, whose ``step(x)`` runs the
model once on ``x``, f32[rows, WIDTH], and returns what that front end returns. The model takes
``x`` and returns f32[rows, WIDTH].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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


@dataclass
class FrontEnd:
    """A model behind one front end.

    Attributes:
        name: one of ``FRONT_ENDS``.
        step: runs the model once on x, f32[rows, WIDTH].
        counters: returns the counters of all its graphs.
        target: the backend handle, compiled model, wrapper or manager.
    """

    name: str
    step: Callable[[torch.Tensor], Any]
    counters: Callable[[], Counters]
    target: Any


def settings(device: str, **more: Any) -> CompilationConfig:
    capture_device = "host" if device == "cpu" else "auto"
    return CompilationConfig(**{"capture_device": capture_device, "compiler": "eager", **more})


def front_end(name: str, model: nn.Module, device: str, **more: Any) -> FrontEnd:
    """Put ``model`` behind the front end ``name``; ``more`` are fields of CompilationConfig."""
    config = settings(device, **more)
    if name in COMPILED:
        return compiled(name, model, config)
    if name in WRAPPERS:
        return wrapped(name, model, config)
    return (
        managed(model, device, config)
        if name == "CudaGraphManager"
        else encoder(model, device, config)
    )


def compiled(
    name: str, model: nn.Module, config: CompilationConfig, dynamic: bool | None = None
) -> FrontEnd:
    backend = cgcompile.Backend(config)
    if name == "torch.compile":
        step = torch.compile(model, backend=backend, dynamic=dynamic)
    else:
        step = cgcompile.compile(model, backend)
    return FrontEnd(name, step, lambda: backend.counters, backend)


def wrapped(name: str, model: nn.Module, config: CompilationConfig) -> FrontEnd:
    wrapper = getattr(cgcompile, name)(model, config, CUDAGraphMode.FULL)

    def step(x: torch.Tensor) -> Any:
        descriptor = BatchDescriptor(len(x))
        with set_forward_context(
            cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=descriptor
        ):
            static = inputs.setdefault(len(x), torch.empty_like(x))
            return wrapper(static.copy_(x))

    inputs: dict[int, torch.Tensor] = {}
    return FrontEnd(name, step, lambda: wrapper.counters, wrapper)


class Named(nn.Module):
    """Takes the input as the argument ``x``, which is how a manager passes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


def managed(model: nn.Module, device: str, config: CompilationConfig) -> FrontEnd:
    dispatcher = CudagraphDispatcher(
        CUDAGraphMode.FULL, [ROWS], max_num_reqs=ROWS, support=AttentionCGSupport.ALWAYS
    )
    manager = CudaGraphManager(
        Named(model),
        dispatcher,
        [InputBuffer("x", ("tokens", WIDTH), torch.float32)],
        device=device,
        config=config,
        metadata=lambda *_: Metadata({}),
    )

    captured = []

    def step(x: torch.Tensor) -> Any:
        if not captured:
            captured.append(manager.capture())
        return manager.run(Batch(len(x), len(x), {"x": x}))

    return FrontEnd("CudaGraphManager", step, lambda: manager.counters, manager)


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

    captured = []

    def step(x: torch.Tensor) -> Any:
        if not captured:
            captured.append(manager.capture())
        return manager.execute({"x": x})[0]

    return FrontEnd("EncoderCudaGraphManager", step, lambda: manager.counters, manager)
