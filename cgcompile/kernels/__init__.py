"""Kernels of our own, as ops of torch that a pass puts into pieces, and where they are used.

The rule: the module of an op ``cgcompile::name`` is ``kernels.name``, its function ``on_cuda`` is
the op on CUDA tensors, and starts Triton kernels by :func:`start` alone. Launching code reads
shapes, strides, dtypes and devices of tensors, and nothing else, so that :func:`compile_kernels`
can run it with fake tensors.
"""

# One rule for all settings of kernels. ``auto`` uses them where a device of the graph can run them.
# True from an argument or option is an error elsewhere; True from the environment, which is for all
# models, is the same as ``auto``.

import functools
import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from cgcompile.config import CompilationConfig, kernel_switch
from cgcompile.errors import ConfigError
from cgcompile.locks import new_lock
from cgcompile.torch_compat import expressions, raw_memory

ROWS = 16  # of a tile of the tensor cores
SHARED_MEMORY = 227 * 1024  # bytes for a thread block, which bound the tiles


@functools.cache
def why_unsupported(device: torch.device) -> str | None:
    """Return why the kernel does not run on a device, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device.type} is no NVIDIA GPU"
    if not torch.cuda.is_available():
        return "no GPU is present"
    properties: Any = torch.cuda.get_device_properties(device)
    if properties.major < 9:
        capability = f"{properties.major}.{properties.minor}"
        return f"the GPU has compute capability {capability}, not 9.0 or newer"
    if properties.shared_memory_per_block_optin < SHARED_MEMORY:
        return "the GPU has less than 227 KiB of shared memory for a block"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def load_triton() -> None:
    """Prepare Triton's compiler in a thread, where a GPU in use can run kernels; do not wait.

    Before the first kernel of a process Triton computes a hash of its own libraries, of 400 MB.
    That takes half a second, without Python's lock.
    """
    if torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        if why_unsupported(device) is None:
            _load_triton(device)


@functools.cache
def _load_triton(device: torch.device) -> None:
    def load() -> None:
        from cgcompile.kernels.small_linear_triton import nothing

        try:
            with torch.cuda.device(device):
                nothing.warmup(grid=(1,))
        except Exception:  # the first kernel of a graph raises it
            log = logging.getLogger(__name__)
            log.debug("Triton compiles no kernel for %s", device, exc_info=True)

    threading.Thread(target=load, name="cgcompile kernels").start()


def is_on(
    config: CompilationConfig,
    name: str,
    devices: Iterable[torch.device],
    why_unsupported: Callable[[torch.device], str | None],
) -> bool:
    """Return whether a graph uses a kernel of the setting ``kernels``.

    Args:
        config: the settings.
        name: of the kernel.
        devices: of the tensors of the graph.
        why_unsupported: returns why the kernels do not run on a device, or None.

    Raises:
        ConfigError: the setting names the kernel, and no device can run it.
    """
    switch = kernel_switch(config, name)
    if switch is False:
        return False
    reasons = list(map(why_unsupported, sorted(set(devices), key=str, reverse=True)))
    if None in reasons:
        return True
    if reasons and switch is True:  # the first is that of a GPU, if there is one
        raise ConfigError.impossible(
            what=f"kernels = {config.kernels!r}",
            because=reasons[0],
            instead=f"Leave {name} to 'auto', which uses it where a device can run it.",
        )
    return False


_REGISTERS = new_lock(watch=False)  # torch refuses to register an op twice


def registered(
    name: str,
    schema: str,
    by_torch: Callable[..., Any],
    on_cuda: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
) -> Any:
    """Return the op ``cgcompile::name``; the first call registers it.

    Args:
        name: of the op.
        schema: of the op, as text.
        by_torch: computes it on the CPU, by ops of torch.
        on_cuda: computes it on CUDA tensors.
        fake: computes shapes and strides of its result.
        autograd: what saves values for the backward pass, and what computes that.
    """
    with _REGISTERS:
        library = _library_of(name)
        if not hasattr(torch.ops.cgcompile, name):
            library.define(schema)
            library.impl(name, by_torch, "CPU")
            library.impl(name, on_cuda, "CUDA")
            torch.library.register_fake(f"cgcompile::{name}", fake, lib=library)
            if autograd is not None:
                setup, backward = autograd
                torch.library.register_autograd(
                    f"cgcompile::{name}", backward, setup_context=setup, lib=library
                )
    return getattr(torch.ops.cgcompile, name).default


@functools.cache
def _library_of(name: str) -> torch.library.Library:
    """Return the library of an op. torch unregisters the op when its library is deleted."""
    return torch.library.Library("cgcompile", "FRAGMENT")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(size: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least a size, and at least ``least``."""
    return max(least, 1 << (size - 1).bit_length())


_ONLY_COMPILES: ContextVar[bool] = ContextVar("only_compiles", default=False)


def stays_constant(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a kernel may read tensors before the kernels in front of it have ended.

    Args:
        tensors: that no node of the model's graph writes.
    """
    # A replay begins after all that was launched before it, such as a change of a weight. Outside
    # of a capture that change may be the kernel in front; so it may in a capture of other code.
    # Inductor copies a weight at an odd address into memory of the graph.
    holds = raw_memory.CAPTURED_MEMORY.get()
    return holds is not None and not any(holds(tensor.data_ptr()) for tensor in tensors)


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launch a Triton kernel; within :func:`compile_kernels`, compile it."""
    if _ONLY_COMPILES.get():
        dtypes = [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]
        kernel.warmup(*dtypes, grid=grid, **named)
    else:
        kernel[grid](*arguments, **named)


def compile_kernels(name: str, device: torch.device, arguments: Sequence[Any]) -> None:
    """Compile the Triton kernels that an op would launch.

    Args:
        name: of the op, without its namespace.
        device: of its tensors.
        arguments: of the op, with layouts in place of tensors.
    """
    module = importlib.import_module(f"cgcompile.kernels.{name}")
    before = _ONLY_COMPILES.set(True)
    try:
        with torch.cuda.device(device):
            expressions.call_with_fakes(module.on_cuda, arguments)
    finally:
        _ONLY_COMPILES.reset(before)
