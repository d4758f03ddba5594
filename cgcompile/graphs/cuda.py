"""The capture device of CUDA (and of ROCm, which torch shows under the same names).

Written with ``capture_begin`` and ``capture_end`` rather than ``torch.cuda.graph``, which
synchronises and empties the allocator's cache at every entry, does not restore the stream after a
failure, and hides the first error behind the one of ``capture_end``.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError


def _nothing_recorded() -> None:
    raise CaptureError.empty()


def wait_for_inputs(ready: torch.cuda.Stream | torch.cuda.Event) -> None:
    """Let the current stream wait for what another one writes; nothing inside of a capture."""
    if compat.cuda_is_capturing():
        return
    current = torch.cuda.current_stream()
    if isinstance(ready, torch.cuda.Event):
        current.wait_event(ready)
    else:
        current.wait_stream(ready)


class CudaPool:
    """A private pool of torch's caching allocator, kept open by a small graph of its own.

    A pool whose last graph dies cannot be captured into again while tensors of it live.
    """

    def __init__(self, device: torch.device) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self._device = device
        self._segments: list[tuple[int, int]] = []
        torch.cuda.current_blas_handle()  # made here, because none can be made inside of a capture
        self._anchor = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            self._anchor.capture_begin(pool=self.id, capture_error_mode="thread_local")
            try:
                self._held = torch.zeros(1, device=device)
            finally:
                self._anchor.capture_end()

    def holds(self, address: int) -> bool:
        """Whether an address lies in memory of the pool. Asks the allocator when in doubt."""
        if not self._in_known_segment(address):
            self._look_again()
        return self._in_known_segment(address)

    def poison(self) -> None:
        """Every byte 0xFF: NaN for floating point, -1 for integers."""
        self._look_again()
        for start, size in self._segments:
            compat.memory_at(start, size, self._device).fill_(0xFF)

    def _look_again(self) -> None:
        found = torch.cuda.memory_snapshot(self.id, include_traces=False)
        self._segments = [(each["address"], each["total_size"]) for each in found]

    def _in_known_segment(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self._segments)


class CudaGraph:
    """One CUDA graph. See :class:`~cgcompile.graphs.device.DeviceGraph`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self._pool: CudaPool | None = None
        self.replay: Callable[[], None] = _nothing_recorded

    def begin(self, pool: CudaPool) -> None:
        if self._pool is not None:
            raise CaptureError.twice("CudaGraph")
        self._pool = pool
        self._stream = torch.cuda.current_stream(self._device)
        try:
            # "global" mode would let unsafe calls of other threads fail this capture.
            self._graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        except BaseException:
            self.abandon()
            raise

    def end(self) -> None:
        self._graph.capture_end()
        self.replay = compat.replay_of(self._graph)

    def abandon(self) -> None:
        assert self._pool is not None
        try:
            with torch.cuda.stream(self._stream):  # the program may have left another one current
                self._graph.capture_end()
        except RuntimeError:  # says again, in other words, that the capture had failed
            assert self._device.index is not None
            compat.stop_allocating_to(self._device.index, self._pool.id)

    def reset(self) -> None:
        self.replay = _nothing_recorded
        self._graph.reset()
        self._pool = None


class CudaDevice:
    """See :class:`~cgcompile.graphs.device.CaptureDevice`.

    Args:
        device: the CUDA device; the current one if it has no index.
    """

    name = "cuda"
    tensor_type = "cuda"
    notices_freed = False

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # On the way of every replay, so torch's C functions as they are.
        self.is_capturing: Callable[[], bool] = compat.cuda_stream_is_capturing
        self.stream_key: Callable[[], int] = compat.raw_stream_of(index)

    def new_pool(self, lasting: Callable[[int], bool] | None = None) -> CudaPool:
        return CudaPool(self.device)

    def new_graph(self) -> CudaGraph:
        return CudaGraph(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def recover(self) -> None:
        """Capture something that works.

        A capture that broke leaves the random generator in the belief that it goes on, so that
        every random op after it raises; the end of a good capture sets it right.
        """
        with contextlib.suppress(RuntimeError):
            CudaPool(self.device)

    def around(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def poison(self, pool: CudaPool) -> None:
        pool.poison()

    def owns(self, pool: CudaPool, tensor: torch.Tensor) -> bool:
        return pool.holds(tensor.untyped_storage().data_ptr())
