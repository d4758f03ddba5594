"""Compiled models whose calls take a fast path."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, BatchDescriptor, CUDAGraphMode, SplittingOp
from lib.entry import D, Hooked, assert_same, operators

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
ROWS = 300  # Python does not keep numbers of this size: equal ones are other objects


def context(mode: CUDAGraphMode = FULL, rows: int = 3, **more: Any) -> Any:
    return cgcompile.set_forward_context(
        cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(rows), **more
    )


def compiled(model: nn.Module, **settings: Any) -> Any:
    settings = {"dynamic_dims": {"x": 0}, "guards": "none", "capture_device": "host", **settings}
    return cgcompile.compile(model.requires_grad_(False), compiler="eager", **settings)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("kept", torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Deep(nn.Module):
    """Layers, hooked or not, and buffers that no piece but an eager one reads."""

    def __init__(self, layers: int, hooked: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hooked() if hooked else nn.Linear(D, D) for _ in range(layers))
        for index in range(layers):
            self.register_buffer(f"cache_{index}", torch.randn(ROWS, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            out = torch.empty_like(x)
            cache = getattr(self, f"cache_{index}")
            torch.ops.cgentry.attend(x, cache, cache, out)
            x = layer(x) + out
        return x


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


class Engine:
    """A compiled model, its input, and the context of its steps; warmed, captured and replayed."""

    def __init__(
        self, layers: int = 1, mode: CUDAGraphMode = FULL, hooked: bool = True, **settings: Any
    ) -> None:
        operators()
        torch.manual_seed(0)
        self.model = Deep(layers, hooked).eval().requires_grad_(False)
        ops = [
            SplittingOp("cgentry::hooked", support=AttentionCGSupport.ALWAYS),
            SplittingOp("cgentry::attend", support=AttentionCGSupport.ALWAYS, impl=attend),
        ]
        self.backend = cgcompile.Backend(
            compiler="eager", capture_device="host", splitting_ops=ops, **settings
        )
        self.compiled = cgcompile.compile(
            self.model, self.backend, dynamic_dims={"x": 0}, guards="none"
        )
        self.x, self.context = torch.randn(ROWS, D), context(mode, ROWS)
        with torch.no_grad():
            for _ in range(4):
                self.step()
        self.graph = self.backend.graphs[-1]
        self.paths = self.graph.fast_paths
        assert self.paths.replays >= 1

    def step(self, x: torch.Tensor | None = None, context: Any = None) -> torch.Tensor:
        with context or self.context:
            return self.compiled(self.x if x is None else x)

    def is_fast(self, run: Callable[[], torch.Tensor] | None = None) -> bool:
        """Return whether a step takes a fast path; it returns what eager returns."""
        self.x.copy_(torch.randn_like(self.x))
        before = self.paths.replays
        assert_same([(run or self.step)()], [self.model(self.x)])
        return self.paths.replays > before
