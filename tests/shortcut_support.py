"""Small models whose calls are remembered whole."""

from typing import Any

import torch
from again_support import FULL
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor


def context(mode: Any = FULL, rows: int = 3) -> Any:
    return cgcompile.set_forward_context(
        cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(rows)
    )


def compiled(model: nn.Module, **settings: Any) -> Any:
    given = {"dynamic_dims": {"x": 0}, "guards": "none", "capture_device": "host", **settings}
    return cgcompile.compile(model.requires_grad_(False), compiler="eager", **given)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("kept", torch.randn(3, 4))
