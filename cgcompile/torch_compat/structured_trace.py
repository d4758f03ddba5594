"""torch's structured trace (``TORCH_TRACE``), profiler and allocator; breaks of other packages."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._guards import CompileContext
from torch._logging import _internal
from torch.autograd import profiler


def is_tracing() -> bool:
    """Return whether torch writes a structured trace (``TORCH_TRACE=folder``)."""
    # Without a folder torch's handler exists as well, until the first write.
    return any(
        getattr(handler, "root_dir", "") is not None or handler.stream is not None
        for handler in _internal.trace_log.handlers
    )


def trace_artifact(name: str, payload: Callable[[], Any], compile_id: Any = None) -> None:
    """Write an artifact for tlparse, text or data for JSON; no effect without a trace."""
    # ``compile_id`` is used where no compilation runs, see :func:`current_compile_id`.
    if not is_tracing():
        return
    data = payload()
    encoding = "string" if isinstance(data, str) else "json"
    _internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: data,
        expect_trace_id=False,
        compile_id=compile_id,
    )


def current_compile_id() -> Any:
    """Return the id of Dynamo's compilation that runs in this thread, or None."""
    return CompileContext.current_compile_id()


def current_frame() -> int | None:
    """Return the number of the function that Dynamo compiles in this thread, or None."""
    frame: int | None = getattr(current_compile_id(), "frame_id", None)
    return frame


def is_profiling() -> bool:
    """Return whether a profiler of torch, or ``emit_nvtx``, runs in any thread of the process."""
    return profiler._is_profiler_enabled


# The same for generated code: the module, and the expression over its name.
PROFILING = ("profiler._is_profiler_enabled", profiler)


def reserved_bytes(device: torch.device, ever: bool = False) -> int:
    """Return the bytes that torch's allocator holds, or with ``ever`` has ever reserved."""
    return _bytes("reserved_bytes", device).get("allocated" if ever else "current", 0)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of torch's allocator that are in use."""
    return _bytes("allocated_bytes", device).get("current", 0)


def _bytes(kind: str, device: torch.device) -> Mapping[str, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    counts: Mapping[str, int] = stats.get(kind, {}).get("all", {})
    return counts


_PACKAGE, _VARIABLE = "piecewise_cuda_graphs", "_current_piecewise_graph_ctx"


@contextmanager
def listen_to_no_graph(listener: Any) -> Iterator[None]:
    """Let ``no_graph`` of Meta's ``piecewise-cuda-graphs`` call ``listener`` at its breaks."""
    # The listener has ``_end_segment()``, ``_insert_eager(fn, args, kwargs)`` and
    # ``_begin_segment()``. No effect if that package is not imported. Tried on its version 0.1.0.
    variable = getattr(sys.modules.get(_PACKAGE), _VARIABLE, None)
    if not isinstance(variable, ContextVar):
        yield
        return
    token = variable.set(listener)
    try:
        yield
    finally:
        variable.reset(token)
