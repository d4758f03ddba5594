"""What graphs share: :class:`GraphPool`, a memory pool and the stream to capture on.

Graphs of one pool use each other's memory, so they must never run at the same time, and what one of
them returned is valid until another one runs. The rule: one owner, one pool.
"""

import weakref
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import torch

from cgcompile import torch_compat as compat
from cgcompile.graphs.arena import Arena, PoolBytes, address
from cgcompile.graphs.device import CaptureDevice, DeviceGraph, DevicePool, chosen_device
from cgcompile.graphs.stale import StaleResults
from cgcompile.locks import new_lock


class _HasGraphs(Protocol):
    def clear_graphs(self) -> None: ...

    def lent(self) -> Iterable[torch.Tensor]: ...


class _HasBuffers(Protocol):
    @property
    def input_bytes(self) -> int: ...


LENT = (
    "an input is what a replay of another graph of this pool returned: its memory is not held, and "
    "a capture may use it. Capture all in one step, or set weak_ref_output=False"
)


class GraphPool:
    """Memory of graphs that never run at the same time.

    Args:
        device: where the tensors are; ``"cpu"`` means the host recorder. Left out: CUDA, or without
            a GPU the CPU where ``CGCOMPILE_CAPTURE_DEVICE=host``. Or what records.

    Attributes:
        device: what records.
        generation: grows when graphs are dropped; what was built on those of before is void.
        stream: what captures run on, the same for all pools of a device; replays run on the
            caller's stream.
        arena: memory of our own for the steps that these graphs are part of.
        lock: for owners that several threads call: held from the writing of inputs to the copying
            of results.
        stale: the results that callers may hold; with ``debug`` alone.
        stream_key: identifies the stream of the last replay; None before that.

    Raises:
        CaptureError: ``device`` has no graphs.
        ConfigError: it is no device.
    """

    def __init__(self, device: CaptureDevice | torch.device | str | None = None) -> None:
        self.device = chosen_device(device, type(self).__name__)
        self.generation = 0
        self.stream = self.device.capture_stream()
        self.arena = Arena()
        self.stale = StaleResults()
        self.lock = new_lock()
        self._memory: DevicePool | None = None
        self.stream_key: int | None = None
        self._last_stream: Any = None
        self._parked: list[DeviceGraph] = []
        # Memory that captures take no more; the graphs that were captured in it hold it.
        self._retired: weakref.WeakSet[DevicePool] = weakref.WeakSet()
        self._users: weakref.WeakSet[_HasGraphs] = weakref.WeakSet()
        self._owners: weakref.WeakSet[_HasBuffers] = weakref.WeakSet()

    @property
    def memory(self) -> DevicePool:
        """The device's pool, which the first use makes."""
        if self._memory is None:
            self._memory = self.device.new_pool(self.stream, self.arena.owns)
        return self._memory

    @property
    def where(self) -> torch.device:
        """The device of the tensors that are captured."""
        return self.device.device

    @property
    def held(self) -> PoolBytes:
        """What its graphs hold of the device's pool, and of those that captures take no more."""
        memories = [*self._retired, *([] if self._memory is None else [self._memory])]
        return sum((memory.bytes for memory in memories), PoolBytes())

    @property
    def nbytes(self) -> int:
        """Bytes of all that graphs of the pool need: its own, the arena's, and owners' buffers."""
        buffers = sum(owner.input_bytes for owner in list(self._owners))
        return self.held.held + self.arena.nbytes + buffers

    @property
    def reserved(self) -> int:
        """Bytes that grow by what a capture takes, in microseconds; on CUDA of all the device."""
        return self.device.reserved() or self.held.held + self.arena.nbytes

    def add_owner(self, owner: _HasBuffers) -> None:
        """Register, weakly, an owner of buffers that graphs of the pool read."""
        self._owners.add(owner)

    def add_user(self, user: _HasGraphs) -> None:
        """Register, weakly, an owner of graphs of this pool."""
        self._users.add(user)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is this pool's."""
        return self._owns(tensor.untyped_storage().data_ptr())

    def holds(self, start: int) -> bool:
        """Whether a storage that begins at an address is memory of this pool or of its arena."""
        return start != 0 and (self._owns(start) or self.arena.owns(start))

    def _owns(self, start: int) -> bool:
        if self._memory is not None and self._memory.holds(start):
            return True
        return any(memory.holds(start) for memory in list(self._retired))

    def follow_stream(self) -> None:
        """Let the current stream wait for work of the pool on another one; call before a replay."""
        key = self.device.stream_key()
        if key != self.stream_key:
            if self._last_stream is not None:
                self.device.wait_for(self._last_stream)
            self._last_stream = self.device.current_stream()
            self.stream_key = key

    def lends(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a tensor is, or is a view of, what a replay of one of the graphs returns.

        That memory is not held, so a capture may use it.
        """
        identity, origin = compat.storage_identity, self.stale.origin
        results = (tensor for user in self._users for tensor in user.lent())
        lent = {identity(tensor.untyped_storage()) for tensor in results}
        return any(origin(identity(tensor.untyped_storage())) in lent for tensor in tensors)

    def poison(self, inputs: Iterable[Any] = (), owner: Hashable = None) -> None:
        """Fill the memory of the pool and of the arena, so that reading what is stale shows.

        For tests and debugging. NaN for floating point; for integers a number that no index has.

        Args:
            inputs: of the step that follows; they keep their values.
            owner: of the results of that step; those of other owners keep their values.
        """
        if self._memory is None:
            return
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        kept = [tensor.untyped_storage() for tensor in tensors if self.holds(address(tensor))]
        ranges = {(storage.data_ptr(), storage.nbytes()) for storage in kept}
        memory = [compat.memory_at(start, nbytes, self.where) for start, nbytes in ranges]
        saved = [target.clone() for target in memory]
        self._memory.poison()
        self.arena.poison(owner)
        for target, before in zip(memory, saved, strict=True):
            target.copy_(before)

    def poison_free(self) -> None:
        """Fill what no tensor holds and no replay returned: before a replay it holds nothing.

        For pools whose users run in one step, so that what others have returned may be read yet.
        Graphs of the pool use the rest for intermediate values. The arena is left as it is.
        """
        if self._memory is None:
            return
        users = list(self._users)
        lent = [tensor.untyped_storage() for user in users for tensor in user.lent()]
        self._memory.poison_free([(storage.data_ptr(), storage.nbytes()) for storage in lent])

    def retire(self, *broken: DeviceGraph) -> None:
        """After a failed capture: keep what may still be in use, capture into new memory.

        Graphs that were captured before stay usable: each keeps the memory that it was captured in.
        """
        self._parked += broken
        self.renew()
        self.device.recover(self.stream)

    def renew(self) -> None:
        """Capture into new memory; no later graph uses the memory of those captured before."""
        if self._memory is not None:
            self._retired.add(self._memory)
        self._memory = None

    def captures_into(self, start: int) -> bool:
        """Whether an address is in the memory that captures take from now, apart from blocks."""
        return self._memory is not None and self._memory.holds(start)

    def release(self) -> None:
        """Drop all graphs of all users, and the memory. Capturing again is allowed."""
        self.device.synchronize()  # a replay may still run, on whatever stream
        for user in list(self._users):
            user.clear_graphs()
        self.generation += 1
        self._parked.clear()
        self._retired.clear()
        self._memory = None
        self.stale.clear()
        self.arena.clear()
