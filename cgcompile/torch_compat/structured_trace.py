"""What torch writes into its structured trace (``TORCH_TRACE``), and whether it profiles."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import CompileContext
from torch._logging import _internal
from torch.autograd import profiler


def is_tracing() -> bool:
    """Whether torch writes a structured trace, which ``TORCH_TRACE=folder`` asks for.

    torch's handler is there in any case until something is written; without a folder it goes then.
    """
    return any(map(_writes, _internal.trace_log.handlers))


def _writes(handler: logging.Handler) -> bool:
    return getattr(handler, "root_dir", "") is not None or handler.stream is not None


def trace_artifact(name: str, payload: Callable[[], Any], compile_id: Any = None) -> None:
    """Write an artifact that tlparse shows; nothing is computed where no trace is written."""
    if not is_tracing():
        return
    found = payload()
    encoding = "string" if isinstance(found, str) else "json"
    _internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: found,
        expect_trace_id=False,
        compile_id=compile_id,
    )


def current_compile_id() -> Any:
    """The compilation of Dynamo that runs in this thread, or None."""
    return CompileContext.current_compile_id()


def is_profiling() -> bool:
    """Whether a profiler of torch runs, ``torch.autograd.profiler.emit_nvtx`` among them.

    In whatever thread: a flag of the process, which costs less to read than that of a thread.
    """
    return profiler._is_profiler_enabled


# The same for generated code: the module, and the expression over its name.
PROFILING = ("profiler._is_profiler_enabled", profiler)


def reserved_bytes(device: torch.device, ever: bool = False) -> int:
    """What torch's allocator holds of a CUDA device, all pools together; microseconds."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    what = "allocated" if ever else "current"
    found: int = stats.get("reserved_bytes", {}).get("all", {}).get(what, 0)
    return found
