"""Host data for a buffer that graphs read: :class:`HostStaging`.

A graph reads one address, so each step writes its data there, and the host prepares the next step
while the device still works on this one. Without this file, the data of the next step overwrites
host memory that a copy has yet to read, and a smaller batch leaves rows of a larger one. The rule:
``fill`` runs on the stream that the graphs are replayed on, before the replay.
"""

from typing import Any

import torch

from cgcompile.errors import CaptureError
from cgcompile.graphs.device import CudaDevice, any_capture
from cgcompile.settings import checked_but, parse_count, parsed, require, require_whole
from cgcompile.torch_compat import raw_memory

MOST_SLOTS = 2**10


class UploadRing:
    """A ring of host slots for uploads to a device; on the CPU they are done at once."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        event: Any = torch.cuda.Event
        self._read = [event() for _ in range(num_slots)] if device.type == "cuda" else []
        self._count = num_slots
        self._next = 0
        self.device = CudaDevice(device) if device.type == "cuda" else None
        self._stream_key: int | None = None
        self._last_stream: Any = None

    def follow_stream(self) -> None:
        """Let the current stream wait for the uploads and the readers of buffers of another one."""
        if self.device is None:
            return
        key = self.device.stream_key()
        if key != self._stream_key:
            if self._last_stream is not None:
                self.device.wait_for(self._last_stream)
            self._last_stream = self.device.current_stream()
            self._stream_key = key

    def begin(self) -> int:
        """Return the next slot; the host waits until the last upload from it has been done."""
        if self._read and not self._read[self._next].query():
            self._read[self._next].synchronize()
        return self._next

    def end(self) -> None:
        """Move on: the uploads from that slot are on the current stream."""
        if self._read:
            self._read[self._next].record(self._last_stream)  # the current one
        self._next = (self._next + 1) % self._count


def host_memory(buffer: torch.Tensor) -> torch.Tensor:
    """Return memory like a buffer's, on the host: pinned where the buffer is on CUDA."""
    with torch.inference_mode(False), torch.no_grad():  # written in any mode
        return torch.empty(
            buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=buffer.is_cuda
        )


class HostStaging:
    """Uploads rows of host data to the front of a buffer, without races.

    Not for several threads at a time.

    Args:
        buffer: [N, ...] of any dtype, contiguous, on CUDA or on the CPU. It is kept alive, and must
            not be written otherwise.
        num_slots: how many host copies of the buffer to own (pinned for CUDA), from 1 to 2**10.
            With 1, a fill waits until the upload before it is done; with 2, until the one before
            that is.
        sentinel: what rows without data hold; None leaves them as they are.

    Attributes:
        buffer: the buffer.

    Raises:
        ConfigError: for a buffer, number or sentinel that cannot serve.

    Example:
        >>> buffer = torch.zeros(4, dtype=torch.int64)
        >>> staging = cgcompile.serving.HostStaging(buffer, sentinel=-1)
        >>> rows = staging.fill(torch.tensor([7, 8]))
        >>> buffer
        tensor([ 7,  8, -1, -1])
    """

    @checked_but("buffer", "num_slots", "sentinel")
    def __init__(
        self,
        buffer: torch.Tensor,
        *,
        num_slots: int = 1,
        sentinel: int | float | bool | None = None,
    ) -> None:
        _check_buffer(buffer)
        num_slots = parsed("num_slots", "HostStaging", num_slots, parse_count(1))
        require_whole("num_slots", "HostStaging", num_slots, 1, MOST_SLOTS)
        fits = sentinel is None or can_represent(buffer.dtype, sentinel)
        expected = f"a value that {buffer.dtype} can hold, or None"
        require(fits, "sentinel", "HostStaging", sentinel, expected)
        self.buffer = buffer
        self._target = raw_memory.alias(
            buffer
        )  # no inference tensor: a fill may write it in any mode
        self._slots = [host_memory(buffer) for _ in range(num_slots)]
        if sentinel is not None:
            for memory in self._slots:
                memory.fill_(sentinel)
        self._rows_in = [0] * num_slots  # how many rows at the front of each may hold data
        self._ring = UploadRing(buffer.device, num_slots)
        self._sentinel = sentinel
        self._real = buffer.shape[0]  # rows of the buffer that may hold no sentinel

    def fill(self, rows: torch.Tensor) -> torch.Tensor:
        """Make ``rows`` the data of the buffer, by at most one upload on the current stream.

        The sentinel, if there is one, overwrites older data in the rows after them. The host waits
        only until the upload that last used the slot is done, never for the whole device. On a
        stream other than the last fill's, the upload waits for the work so far of the last one.

        Args:
            rows: [n, ...] on the CPU, 0 <= n <= N, dtype and trailing shape of the buffer. The
                caller may overwrite it afterwards.

        Returns:
            ``buffer[:n]``, a view.

        Raises:
            ConfigError: for other rows; nothing has changed then.
            CaptureError: inside a capture, where an upload would be recorded; nothing has changed.
        """
        self._check_rows(rows)
        if any_capture():
            raise CaptureError.refused(op="HostStaging.fill()")
        count = rows.shape[0]
        extent = count if self._sentinel is None else max(count, self._real)
        self._ring.follow_stream()  # also without rows: the caller reads the buffer next
        if extent:
            memory = self._written(self._ring.begin(), rows)
            self._target[:extent].copy_(memory[:extent], non_blocking=True)
            self._ring.end()
        self._real = count
        return self.buffer[:count]

    def _written(self, slot: int, rows: torch.Tensor) -> torch.Tensor:
        """Write rows to the front of a slot, and the sentinel where older data would remain."""
        memory, count, before = self._slots[slot], rows.shape[0], self._rows_in[slot]
        self._rows_in[slot] = max(before, count)  # holds as well if a copy fails
        memory[:count].copy_(rows.detach() if rows.requires_grad else rows)
        if self._sentinel is not None and before > count:
            memory[count:before].fill_(self._sentinel)
        self._rows_in[slot] = count
        return memory

    def _check_rows(self, rows: torch.Tensor) -> None:
        buffer, where = self.buffer, "HostStaging.fill()"
        is_tensor = isinstance(rows, torch.Tensor)
        require(is_tensor, "rows", where, rows, "a torch.Tensor on the CPU")
        require(rows.device.type == "cpu", "rows.device", where, str(rows.device), "'cpu'")
        require(rows.dtype == buffer.dtype, "rows.dtype", where, rows.dtype, f"{buffer.dtype}")
        fits = rows.dim() == buffer.dim() and rows.shape[1:] == buffer.shape[1:]
        if not fits or rows.shape[0] > buffer.shape[0]:
            wanted = ", ".join(["n", *map(str, buffer.shape[1:])])
            expected = f"[{wanted}] with n at most {buffer.shape[0]}"
            require(False, "rows.shape", where, list(rows.shape), expected)


def _check_buffer(buffer: torch.Tensor) -> None:
    def check(good: bool, name: str, value: object, expected: str) -> None:
        require(good, name, "HostStaging", value, expected)

    check(isinstance(buffer, torch.Tensor), "buffer", buffer, "a torch.Tensor")
    kind = buffer.device.type
    check(kind in ("cuda", "cpu"), "buffer.device", str(buffer.device), "'cuda' or 'cpu'")
    check(buffer.layout is torch.strided, "buffer.layout", buffer.layout, "torch.strided")
    check(buffer.dim() > 0, "buffer.shape", [], "at least one dimension, that of the rows")
    check(buffer.is_contiguous(), "buffer.stride()", buffer.stride(), "a contiguous tensor")


def can_represent(dtype: torch.dtype, value: Any) -> bool:
    """Return whether a dtype has a value: floats are rounded, numbers and flags must be exact."""
    try:
        stored = torch.empty((), dtype=dtype, device="cpu").fill_(value).item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    return dtype.is_floating_point or dtype.is_complex or bool(stored == value)
