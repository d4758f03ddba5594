"""Capture devices: the protocols of a device whose work can be captured and replayed, and CUDA.

Two devices exist: :class:`CudaDevice` (torch's CUDA graphs, and ROCm's, which torch shows under the
same names) and ``testing.host`` (a recorder on the CPU that keeps the rules of CUDA). All else in
``graphs`` is written against the protocols here, and one suite of tests runs on both. The rule for
a new device: what a capture records happens at replay and only there.

CUDA's is written with ``capture_begin`` and ``capture_end`` rather than ``torch.cuda.graph``, which
synchronises and empties the allocator's cache at every entry, does not restore the stream after a
failure, and hides the first error behind the one of ``capture_end``.
"""

import contextlib
import functools
import importlib
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch

from cgcompile.config import CompilationConfig
from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs.arena import MIB
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import raw_memory, torch_settings


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
        """Overwrite all memory, on the current stream, with values that make results wrong."""

    def poison_free(self, kept: list[tuple[int, int]]) -> None:
        """Overwrite memory that no tensor holds, except the ranges ``kept``: (address, bytes)."""


class DeviceGraph(Protocol):
    """One recording."""

    @property
    def replay(self) -> Callable[[], None]:
        """Runs the recording on the current stream, without synchronising."""

    def begin(self, pool: Any, generators: Sequence[torch.Generator] = ()) -> None:
        """Start to record what this thread does; memory it allocates comes from ``pool``.

        Each replay draws anew from ``generators``, and from the default one.
        """

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
        """Return a pool for graphs of a stream; memory at ``lasting`` addresses lives as long."""

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

    def recover(self, stream: Any, generators: Sequence[torch.Generator] = ()) -> None:
        """Reset what a failed capture left, of ``generators`` too; never raises."""

    def around(self, function: Any = None) -> AbstractContextManager[Any]:
        """Return a context manager around code of users that is captured, or around a function."""

    def reserved(self) -> int:
        """Return the bytes that the allocator holds for all pools; 0 if there is none. Fast."""

    def graph_bytes(self) -> int:
        """Return the memory, of all processes, that no allocator of this one holds."""

    def lacks_memory(self) -> bool:
        """Return whether the device has less memory free than the allocator keeps unused."""

    def give_back(self) -> None:
        """Return unused memory to the device. Synchronises."""


recording = threading.local()  # .graph: the graph that this thread records
# Returns the graph that the CPU recorder records in this thread, or None; in C.
is_recording: Callable[[], Any] = functools.partial(getattr, recording, "graph", None)


def any_capture() -> bool:
    """Return whether this thread's work is being captured, on any device, by any code."""
    return is_recording() is not None or raw_memory.cuda_is_capturing()


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


# ---------------------------------------------------------------- CUDA

# Note [cuBLAS workspaces]
# torch (2.11 to 2.14) caches one workspace of cuBLAS per handle and stream, 32 MiB on Hopper, and a
# graph keeps the address that it was captured with. All products on the stream share it, and it
# outlives the graphs of its pool, or is freed under them: a graph that is destroyed drops the
# workspaces of its capture stream (2.12 to 2.14). So the cache is emptied before and after each
# capture, and what a capture needs comes from its own pool, like any intermediate. Graphs of two
# pools may then run at the same time. torch's own graph trees do the same; 2.15 allocates a
# workspace per call.


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all captures of a device use, one at a time."""
    # torch has 32 streams in all: pools with streams of their own would soon capture the work of
    # another thread.
    return torch.cuda.Stream(device)


def _nothing_recorded() -> None:
    raise CaptureError.empty()


def wait_for_inputs(
    ready: torch.cuda.Stream | torch.cuda.Event, device: torch.device | None
) -> None:
    """Let the current stream of a device, outside of captures, wait for a stream or an event."""
    if device is not None and device.type != "cuda":
        return
    with torch.cuda.device(device):
        if raw_memory.cuda_is_capturing():
            return
        current = torch.cuda.current_stream()
        if isinstance(ready, torch.cuda.Event):
            current.wait_event(ready)
        else:
            current.wait_stream(ready)


@contextlib.contextmanager
def named_failures() -> Iterator[None]:
    """Name the error of a stream that was not joined, around the end of a capture."""
    try:
        yield
    except RuntimeError as error:
        if is_unjoined(error):
            raise CaptureError.unjoined_stream() from error
        raise


def is_unjoined(error: BaseException) -> bool:
    """Return whether an error of CUDA or ROCm is about a stream that was not joined."""
    text = str(error).lower()
    return "unjoined work" in text or "captureunjoined" in text


# Graphs without users, until it is safe to destroy them. torch keeps all graphs in a set without a
# lock, and releases the GIL while it adds one at the begin of a capture: a graph that dies in
# another thread meanwhile would break the set. So they are destroyed under the capture lock.
_dead: deque[tuple[torch.device, torch.cuda.CUDAGraph]] = deque()

# Graphs whose capture broke. torch's allocator of pinned memory always keeps a pointer to them
# (2.11: only the end of a good capture takes it out), so they must never die.
_broken: list[torch.cuda.CUDAGraph] = []

# Devices of graphs that were destroyed, while torch keeps the memory of their pools.
_kept: set[torch.device] = set()


def destroy_unused_graphs(give_back: bool = False) -> None:
    """Destroy graphs without users, under the capture lock and outside of a capture."""
    # Without ``give_back`` torch keeps the memory of their pools until an allocation fails.
    dead = [_dead.popleft() for _ in range(len(_dead))]
    devices = {device for device, _ in dead}
    for device in devices:
        torch.cuda.synchronize(device)  # a replay may still run on any stream
    dead.clear()
    _kept.update(devices)
    if not give_back or not _kept:
        return
    for device in _kept:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    raw_memory.empty_host_cache()
    _kept.clear()


# Captures of a pool around whose end the allocator is read: 0.1 ms each.
_MEASURED = 8


class CudaPool:
    """A private pool of torch's caching allocator; a small graph keeps it open."""

    # torch refuses a capture into a pool that has no graph but tensors that live.

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self._device = device
        self._segments: list[tuple[int, int]] = []  # (address, bytes), in order
        self._starts: list[int] = []
        self._taken = 0  # by the allocator, in all, when its segments were last read
        self._up_to_date = False
        self.open_captures = 0  # they may add memory
        self.workspaces = 0  # bytes that a capture used for cuBLAS
        self._unmeasured = _MEASURED  # captures whose workspaces are still to be measured
        self._anchor = CudaGraph(device)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            torch.cuda.current_blas_handle()  # none can be made inside of a capture
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                self._anchor.begin(self, generators)
                self._held = torch.zeros(1, device=device)
                self._anchor.end()
                self._anchor.release_pool()
            except BaseException:
                self._anchor.abandon()
                raise

    def holds(self, address: int) -> bool:
        """Return whether an address is in memory of the pool; may read that of the allocator."""
        if self._in_known_segment(address):
            return True
        return not self._up_to_date and self._read_segments() and self._in_known_segment(address)

    @property
    def reserved(self) -> int:
        return sum(nbytes for _, nbytes in raw_memory.pool_segments(self.id))

    def begin_capture(self) -> None:
        """Note a capture, which may add memory."""
        self.open_captures += 1
        self._up_to_date = False

    def drop_workspaces(self) -> None:
        """Free the workspaces of the capture that has just ended; see Note [cuBLAS workspaces]."""
        if not self._unmeasured or self.workspaces:
            raw_memory.drop_blas_workspaces()
            return
        self._unmeasured -= 1
        before = raw_memory.allocated_bytes(self._device)
        raw_memory.drop_blas_workspaces()
        self.workspaces = max(0, before - raw_memory.allocated_bytes(self._device))

    def poison(self) -> None:
        """Set every byte to 0xFF: NaN for floating point, -1 for integers."""
        self._read_segments()
        for start, size in self._segments:
            raw_memory.memory_at(start, size, self._device).fill_(0xFF)

    def poison_free(self, kept: list[tuple[int, int]]) -> None:
        """Poison memory that no tensor holds, except the ranges ``kept``: (address, bytes)."""
        for start, size in raw_memory.free_blocks(self.id):
            end = start + size
            for first, nbytes in sorted(kept):
                if start < first < end:
                    raw_memory.memory_at(start, first - start, self._device).fill_(0xFF)
                if first < end and start < first + nbytes:
                    start = min(first + nbytes, end)
            if start < end:
                raw_memory.memory_at(start, end - start, self._device).fill_(0xFF)

    def _read_segments(self) -> bool:
        """Read the memory of the pool from the allocator; False if no pool has got any since."""
        taken = raw_memory.reserved_bytes(self._device, ever=True)
        self._up_to_date = self.open_captures == 0
        if taken and taken == self._taken:
            return False
        self._segments = sorted(raw_memory.pool_segments(self.id))
        self._starts = [start for start, _ in self._segments]
        self._taken = taken
        return True

    def _in_known_segment(self, address: int) -> bool:
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < sum(self._segments[index])


class CudaGraph:
    """One CUDA graph. See :class:`~cgcompile.graphs.device.DeviceGraph`."""

    def __init__(self, device: torch.device) -> None:
        self._pool: CudaPool | None = None
        self._used = self._begun = False
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self.replay: Callable[[], None] = _nothing_recorded

    def begin(self, pool: CudaPool, generators: Sequence[torch.Generator] = ()) -> None:
        if self._used:
            raise CaptureError.twice(what="CudaGraph", advice="Call reset() first.")
        self._pool, self._used = pool, True
        pool.begin_capture()
        self._stream = torch.cuda.current_stream(self._device.index)
        raw_memory.drop_blas_workspaces()  # see Note [cuBLAS workspaces]
        for generator in generators:
            self._graph.register_generator_state(generator)
        # "global" mode would let unsafe calls of other threads fail this capture.
        self._graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        self._begun = True
        raw_memory.CAPTURED_MEMORY.set(pool.holds)

    def end(self) -> None:
        assert self._pool is not None
        raw_memory.CAPTURED_MEMORY.set(None)
        with named_failures():
            self._graph.capture_end()
        self._pool.drop_workspaces()
        self.replay = raw_memory.replay_of(self._graph)
        self._pool.open_captures -= 1

    def release_pool(self) -> None:
        """Drop the reference to the pool: the pool holds this graph."""
        self._pool = None

    def abandon(self) -> None:
        if self._pool is None or self.replay is not _nothing_recorded:
            return  # no capture was begun, or it has ended without an error
        raw_memory.CAPTURED_MEMORY.set(None)
        self._pool.open_captures -= 1
        try:
            if not self._begun:  # ending it would end a capture of other code
                raise CaptureError.empty()
            with torch.cuda.stream(self._stream):  # another one may be current
                self._graph.capture_end()
        except RuntimeError:  # the capture had failed, which was raised before
            assert self._device.index is not None
            raw_memory.stop_allocating_to(self._device.index, self._pool.id)
            _broken.append(self._graph)
        raw_memory.drop_blas_workspaces()

    def reset(self) -> None:
        self.replay = _nothing_recorded
        _dead.append((self._device, self._graph))
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._used, self._begun = None, False, False

    def __del__(self) -> None:
        if self._used and _dead is not None:  # None while the interpreter ends
            _dead.append((self._device, self._graph))


class CudaDevice:
    """See :class:`~cgcompile.graphs.device.CaptureDevice`; the current one without an index."""

    tensor_type = "cuda"
    notices_freed = False
    graph_step = 2 * MIB
    executables = "measured: memory of the device before and after captures, less torch's allocator"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._index = index  # torch takes ten times as long to find the index of a device
        # Called at every replay, so torch's functions as they are.
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.stream_key: Callable[[], int] = raw_memory.raw_stream_of(index)
        if torch.cuda.is_initialized():  # else with the first pool
            torch_settings.settle_attention_kernels(self.device)

    def new_pool(
        self, stream: torch.cuda.Stream, lasting: Callable[[int], bool] | None = None
    ) -> CudaPool:
        torch_settings.settle_attention_kernels(self.device)
        return CudaPool(self.device, stream)

    def new_graph(self) -> CudaGraph:
        return CudaGraph(self.device)

    def capture_stream(self) -> torch.cuda.Stream:
        return _capture_stream(self.device)

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return raw_memory.OnStream(stream)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._index)

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.current_stream(self._index).wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def recover(
        self, stream: torch.cuda.Stream, generators: Sequence[torch.Generator] = ()
    ) -> None:
        """Capture something that works: the end of it resets the random generators."""
        # After a broken capture the generator still captures, and every random op raises.
        with contextlib.suppress(RuntimeError):
            CudaPool(self.device, stream, generators)

    def around(self, function: Any = None) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def reserved(self) -> int:
        return raw_memory.reserved_bytes(self.device)

    def graph_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - raw_memory.reserved_bytes(self.device)

    def lacks_memory(self) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        used = raw_memory.allocated_bytes(self.device)
        return free < raw_memory.reserved_bytes(self.device) - used

    def give_back(self) -> None:
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
