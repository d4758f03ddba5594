"""What the tests of graphs share: each runs on the host recorder and on CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cgcompile import BreakableCUDAGraphWrapper, CompilationConfig, CUDAGraphMode
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper


@pytest.fixture
def new_pool(device: str) -> Callable[[], GraphPool]:
    def make() -> GraphPool:
        capturer = capture_device(torch.device(device), "host")
        assert capturer is not None
        return GraphPool(capturer)

    return make


@pytest.fixture
def pool(new_pool: Callable[[], GraphPool]) -> GraphPool:
    return new_pool()


@pytest.fixture
def wrap() -> Callable[..., CUDAGraphWrapper]:
    """Creates a wrapper that captures on either device."""
    return _wrapping(CUDAGraphWrapper)


@pytest.fixture(params=[CUDAGraphWrapper, BreakableCUDAGraphWrapper], ids=["plain", "breakable"])
def wrap_either(request: pytest.FixtureRequest) -> Callable[..., CUDAGraphWrapper]:
    """Creates a wrapper of either class."""
    return _wrapping(request.param)


def _wrapping(kind: type[CUDAGraphWrapper]) -> Callable[..., CUDAGraphWrapper]:
    def make(
        runnable: Callable[..., Any],
        mode: CUDAGraphMode = CUDAGraphMode.FULL,
        options: Any = None,
        *,
        on_fallback: str = "warn",
        **more: Any,
    ) -> CUDAGraphWrapper:
        config = CompilationConfig(capture_device="host", on_fallback=on_fallback)
        return kind(runnable, config, mode, options, **more)

    return make
