"""What is on in torch: settings that choose a kernel or that traced code reads, traces, profilers.

A graph repeats the kernels of its capture, whatever the settings are at a replay. Dynamo's guards
compare those of :func:`trace_settings`; they do not compare those of :func:`kernel_settings`. Each
is a tuple, read before every replay, so nothing here may allocate more or take longer than it must:
together they take 1.5 microseconds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._guards import CompileContext
from torch._logging import _internal
from torch.autograd import profiler
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cgcompile.torch_compat.torch_ops import autocast_state, without_modes


def _cudnn(name: str) -> Callable[[], bool]:
    """Return a function that reads a setting of cuDNN; the one of C behind it, if there is one."""
    setting = vars(type(torch.backends.cudnn)).get(name)
    return getattr(setting, "getter", partial(getattr, torch.backends.cudnn, name))


_cudnn_is_on, _benchmark = _cudnn("enabled"), _cudnn("benchmark")
_cudnn_deterministic = _cudnn("deterministic")
# Functions of C: their public wrappers take twice the time, those of cuDNN 1 to 4 us each.
_flash = torch._C._get_flash_sdp_enabled
_memory_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn_attention = torch._C._get_cudnn_sdp_enabled
_priority = torch._C._get_sdp_priority_order
_precision = torch._C._get_fp32_precision_getter  # the older getters may raise
_fp16_sums = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_bf16_sums = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
_fp16_accumulation = torch._C._get_cublas_allow_fp16_accumulation
_is_deterministic = torch.are_deterministic_algorithms_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_default_dtype = torch.get_default_dtype
_count_function_modes = torch._C._len_torch_function_stack
_count_dispatch_modes = torch._C._len_torch_dispatch_stack

_KERNEL_SETTINGS = (
    "flash attention (sdpa_kernel)",
    "memory-efficient attention (sdpa_kernel)",
    "math attention (sdpa_kernel)",
    "cuDNN attention (sdpa_kernel)",
    "the priority of attention kernels (sdpa_kernel)",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "TF32 of convolutions (torch.backends.cudnn.conv.fp32_precision)",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
)
_TRACE_SETTINGS = (
    "autocast",
    "torch.use_deterministic_algorithms",
    "the default dtype",
    "TF32 of products (torch.backends.cuda.matmul.fp32_precision)",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch function modes, which include the default device,",
    "torch dispatch modes",
)


@cache
def settle_attention_kernels(device: torch.device) -> None:
    """Let torch choose the priority of attention kernels, which it does at the first attention."""
    # torch 2.11 to 2.14 put cuDNN first on compute capability 9.0 and 10.0; a graph that was
    # captured before would see another setting after.
    with without_modes():  # a fake tensor lets torch choose nothing
        query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
        torch._fused_sdp_choice(query, query, query)


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings that choose kernels and that no guard of Dynamo compares."""
    return (
        _flash(),
        _memory_efficient(),
        _math(),
        _cudnn_attention(),
        tuple(_priority()),
        _cudnn_is_on(),
        _benchmark(),
        _cudnn_deterministic(),
        _precision("cuda", "conv") == "tf32",  # "none" and "ieee" are equal
        _fp16_accumulation(),
    )


def allows_all_attention() -> bool:
    """Return whether ``scaled_dot_product_attention`` may take all kernels except cuDNN's."""
    return _flash() and _memory_efficient() and _math()  # many switch cuDNN's off for its bugs


def trace_settings() -> tuple[Any, ...]:
    """Return the settings that a trace bakes in, and that Dynamo's guards compare."""
    return (
        autocast_state() if _any_autocast() else {},
        _is_deterministic(),
        _default_dtype(),
        _precision("cuda", "matmul") == "tf32",
        _fp16_sums(),
        _bf16_sums(),
        _function_modes() if _count_function_modes() else (),
        _dispatch_modes() if _count_dispatch_modes() else (),
    )


def changed_setting(before: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[str, Any, Any]:
    """Return (name, before, now) of a setting that differs between results of one function."""
    names = _KERNEL_SETTINGS if len(before) == len(_KERNEL_SETTINGS) else _TRACE_SETTINGS
    rows = zip(names, before, now, strict=True)
    return next((name, old, new) for name, old, new in rows if old != new)


def function_mode_stack() -> list[Any]:
    """Return the torch function modes that are on, which may be a default device."""
    return [torch._C._get_function_stack_at(at) for at in range(_count_function_modes())]


@contextmanager
def traced_function_modes(modes: list[Any]) -> Iterator[None]:
    """Let Dynamo trace the ``modes`` that are on, instead of running them; restore them after."""
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

    try:
        with torch_function_mode_stack_state_mgr:
            yield
    finally:
        if _count_function_modes() < len(modes):  # torch 2.11 loses the modes of a nested use
            for mode in modes[_count_function_modes() :]:
                TorchFunctionMode.__enter__(mode)


def has_traced_function_modes() -> bool:
    """Return whether the graph that a backend compiles now has the effects of function modes."""
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

    return bool(torch_function_mode_stack_state_mgr.stack)


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Switch torch function modes off in this thread."""
    modes = function_mode_stack()
    # By the base class: what an own method does beside stays done, as for a default device.
    for mode in reversed(modes):
        TorchFunctionMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchFunctionMode.__enter__(mode)


def without_function_modes_in(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs without torch function modes: its graph has their effects."""

    def without(*inputs: Any) -> Any:
        with without_function_modes():
            return run(*inputs)

    return without


def _function_modes() -> tuple[Any, ...]:
    """Return the torch function modes that are on; a default device is equal to another object."""
    stack = map(torch._C._get_function_stack_at, range(_count_function_modes()))
    return tuple([mode.device if type(mode) is DeviceContext else mode for mode in stack])


# ---------------------------------------------------------------- trace and profiler


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


# Returns whether a profiler of torch, or ``emit_nvtx``, runs in any thread of the process; in C.
is_profiling: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")
# The same for generated code: the module, and the expression over its name.
PROFILING = ("profiler._is_profiler_enabled", profiler)


def _dispatch_modes() -> tuple[Any, ...]:
    """Return the torch dispatch modes that are on, but those of cgcompile, such as the recorder."""
    modes = _get_current_dispatch_mode_stack()
    return tuple([mode for mode in modes if not type(mode).__module__.startswith("cgcompile.")])
