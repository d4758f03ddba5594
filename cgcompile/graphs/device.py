"""Capture devices: the protocols of a device whose work can be captured and replayed.

Two devices exist: ``cuda`` (torch's CUDA graphs) and ``testing.host`` (a recorder on the CPU that
keeps the rules of CUDA). All else in ``graphs`` is written against the protocols here, and one
suite of tests runs on both. The rule for a new device: what a capture records happens at replay and
only there.
"""

import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from cgcompile.config import CompilationConfig
from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs.cuda import CudaDevice
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import raw_memory


class DevicePool(Protocol):
    """Memory for graphs that never run at the same time; it lives while it is referenced."""

    @property
    def reserved(self) -> int:
        """Bytes taken from the device, in use or not; takes milliseconds, does not synchronise."""

    @property
    def workspaces(self) -> int:
        """Bytes of the workspaces of libraries that captures allocated in it; 0 if unknown."""

    def holds(self, address: int) -> bool:
        """Whether an address is in this memory."""

    def poison(self) -> None:
        """Overwrite all memory, on the current stream, with what shows as wrong."""

    def poison_free(self, kept: list[tuple[int, int]]) -> None:
        """Overwrite what no tensor holds, without the (address, bytes) of ``kept``."""


class DeviceGraph(Protocol):
    """One recording."""

    @property
    def replay(self) -> Callable[[], None]:
        """Runs the recording on the current stream, without synchronising."""

    def begin(self, pool: Any) -> None:
        """Start to record what this thread does; memory it allocates comes from ``pool``."""

    def end(self) -> None:
        """Stop recording."""

    def abandon(self) -> None:
        """Stop recording after a failure; never raises. The graph is of no further use."""

    def reset(self) -> None:
        """Drop the recording and what it holds."""


@runtime_checkable
class CaptureDevice(Protocol):
    """A device with graphs.

    Attributes:
        device: where it captures.
        tensor_type: the ``torch.device`` type of the tensors that it captures.
        notices_freed: whether a replay refuses memory that was freed since the capture, even where
            it is in use again.
        graph_step: the bytes by which the driver's own memory for graphs grows; 1 if there is none.
        executables: how that memory is measured, for users.
    """

    device: torch.device
    tensor_type: str
    notices_freed: bool
    graph_step: int
    executables: str

    def new_pool(self, stream: Any, lasting: Callable[[int], bool] = ...) -> DevicePool:
        """Return memory for graphs of a stream; other memory at ``lasting`` addresses stays."""

    def new_graph(self) -> DeviceGraph:
        """Return a graph without a recording."""

    def capture_stream(self) -> Any:
        """Return the stream to capture on, one for all pools: use it under the capture lock."""

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current inside."""

    @property
    def is_capturing(self) -> Callable[[], bool]:
        """Returns whether the current stream of this thread is being captured, by any code."""

    @property
    def stream_key(self) -> Callable[[], int]:
        """Returns a number, equal for equal current streams."""

    def current_stream(self) -> Any:
        """Return the current stream, to wait for later."""

    def wait_for(self, stream: Any) -> None:
        """Let later work of the current stream wait for the work so far of ``stream``."""

    def synchronize(self) -> None:
        """Wait on the host until the device is idle."""

    def recover(self, stream: Any) -> None:
        """Reset what a failed capture left; never raises."""

    def around(self, function: Any = None) -> AbstractContextManager[Any]:
        """Return a context for code of users that is captured, of a function if it is given."""

    def reserved(self) -> int:
        """Return the bytes that the allocator holds for all pools; 0 if there is none. Fast."""

    def graph_bytes(self) -> int:
        """Return the memory, of all processes, that no allocator of this one holds."""

    def give_back(self) -> None:
        """Return unused memory to the device. Synchronises."""


recording = threading.local()  # .graph: the one that records in this thread; CUDA keeps the same


def is_recording() -> bool:
    """Return whether the CPU recorder records in this thread."""
    return getattr(recording, "graph", None) is not None


def any_capture() -> bool:
    """Return whether this thread's work is being captured, on any device, by any code."""
    return is_recording() or raw_memory.cuda_is_capturing()


def device_named(device: torch.device | str, where: str) -> torch.device:
    """Return a device by its name; ``where`` names what takes it, for messages."""
    try:
        return torch.device(device)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        expected = "a torch.device, or the name of one such as 'cuda:0'"
        raise ConfigError.bad_value(
            name="device", where=where, value=device, expected=expected
        ) from None


def capture_device(device: torch.device, setting: str) -> CaptureDevice | None:
    """Return the capture device for tensors on ``device``, or None; ``setting``: see the config."""
    if device.type == "cuda" and torch.cuda.is_available():
        return CudaDevice(device)
    if device.type == "cpu" and setting == "host":
        recorder: CaptureDevice = importlib.import_module("cgcompile.testing.host").HostDevice()
        return recorder
    return None


def no_device(device: torch.device | str) -> Fallback:
    """Return the fallback of tensors on a device without graphs."""
    detail = (
        f"tensors are on {str(device)!r}; graphs need a CUDA device, or "
        "capture_device='host' (CGCOMPILE_CAPTURE_DEVICE=host) for a recorder on the CPU"
    )
    return Fallback(Reason.NO_DEVICE, detail)


def chosen_device(device: CaptureDevice | torch.device | str | None, where: str) -> CaptureDevice:
    """Return the capture device that a user of ``where`` names; see :class:`GraphPool`."""
    if isinstance(device, CaptureDevice):
        return device
    if device is None:
        device = "cuda"
        if not torch.cuda.is_available() and CompilationConfig().capture_device == "host":
            device = "cpu"
    chosen = capture_device(device_named(device, where), "host")
    if chosen is None:
        raise CaptureError.no_device(found=str(device))
    return chosen
