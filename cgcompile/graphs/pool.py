"""What graphs share: :class:`GraphPool`, a memory pool, the stream to capture on, and one thread.

Graphs of one pool use each other's memory, so they must never run at the same time, and what one of
them returned is valid until another one runs. The rule: one owner, one pool.

Graphs of one pool write their results into the same memory at each replay. A step of a second
thread overwrites what the first one still reads, and no lock of this library can see that reading.
The rule: one thread (:class:`StepThread`), until the program declares that it locks steps and the
reading of results.

:class:`GraphMemory` is what graphs take of the memory of their device. Memory of torch's allocator
is read from it. The driver's own memory for graphs is not reported by any function of CUDA: it is
what the device loses during captures beside torch's allocator, see
:func:`cgcompile.graphs.capture.measured`. Graphs share memory, so the bytes of a set are not the
sum of its graphs', and are not estimated: :func:`measure_captures` captures the set, the largest
first, measures it, and drops it. :func:`most_that_fit` finds the largest set within a budget.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar

import torch

from cgcompile.errors import DispatchError
from cgcompile.graphs.arena import MIB, Arena, address
from cgcompile.graphs.device import CaptureDevice, DeviceGraph, DevicePool, chosen_device
from cgcompile.graphs.results import StaleResults
from cgcompile.locks import new_lock
from cgcompile.settings import require_fields
from cgcompile.torch_compat import raw_memory

T_ = TypeVar("T_")

_ROWS = {
    "pools": "torch's allocator for graphs: results, intermediates, workspaces",
    "staging": "copies of inputs, and of results of eager pieces that graphs read",
    "outputs": "buffers of what FULL graphs of a manager return",
    "executables": "what the driver allocates for the graphs themselves",
}


@dataclass(frozen=True, repr=False)
class GraphMemory:
    """Memory of the device that graphs take, in bytes; ``print`` it.

    Attributes:
        pools: what torch's allocator holds for graphs, in use or not.
        staging: buffers of inputs and of bridges.
        outputs: buffers of what FULL graphs of a manager return.
        executables: what the driver allocates for the graphs themselves: what the device lost
            during captures beside torch's allocator. Code that allocates meanwhile, of other
            processes too, is in it. The driver may keep some of it when graphs are dropped.
        workspaces: the part of ``pools`` that captures used as workspaces of cuBLAS; 0 where they
            used none, and from torch 2.15 on, which allocates one for each call.
        measured: how ``executables`` was measured, in words.
        captures: (batch, bytes) of the graphs that exist, in the order of capture: by how much
            ``pools`` and ``staging`` grew. Smaller sizes mostly add nothing.

    Example:
        >>> memory = cgcompile.serving.GraphMemory(pools=1024, outputs=256)
        >>> memory.total
        1280
    """

    pools: int = 0
    staging: int = 0
    outputs: int = 0
    executables: int = 0
    workspaces: int = 0
    measured: str = ""
    captures: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        require_fields(self)

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the total by name."""
        return {name: getattr(self, name) for name in _ROWS}

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    def line(self) -> str:
        """Return the total and the parts that are not 0 in one line."""
        parts = [f"{name} {value / MIB:.2f}" for name, value in self.parts.items() if value]
        return f"{self.total / MIB:.2f} MiB" + (f" ({', '.join(parts)})" if parts else "")

    def __repr__(self) -> str:
        return f"<GraphMemory: {self.line()}>"

    def __str__(self) -> str:
        rows = [("", self.parts[name], name, text) for name, text in _ROWS.items()]
        if self.workspaces:
            text = "of these, workspaces of cuBLAS; one for all graphs of a pool"
            rows.insert(1, ("  ", self.workspaces, "workspaces", text))
        lines = [f"{'':13} {'MiB':>9}"]
        lines += [f"{i}{name:{13 - len(i)}} {n / MIB:9.2f}  {text}" for i, n, name, text in rows]
        if self.measured:
            lines.append(f"{'':25}{self.measured}")
        lines.append(f"{'total':13} {self.total / MIB:9.2f}")
        grown = [(batch, nbytes) for batch, nbytes in self.captures if nbytes]
        if self.captures:
            lines.append(f"{len(self.captures)} captures; pools and staging grew by")
            lines += [f"{'':13} {nbytes / MIB:9.2f}  {batch}" for batch, nbytes in grown]
            rest = len(self.captures) - len(grown)
            lines += [f"{'':13} {0:9.2f}  the other {rest}"] if rest else []
        return "\n".join(lines)


def measure_captures(
    captures: Iterable[Callable[[], Any]],
    taken: Callable[[], int],
    exceeds: Callable[[int], bool],
    drop: Callable[[], Any],
) -> int:
    """Capture for trial, up to the first capture that exceeds a budget; return the bytes taken."""
    try:
        for capture in captures:
            capture()
            if exceeds(taken()):
                break
        return taken()
    finally:
        drop()


def most_that_fit(
    order: Sequence[T_], least: int, fits: Callable[[Sequence[T_]], bool]
) -> Sequence[T_]:
    """Return the longest prefix of ``order`` that fits, by bisection."""
    low, high = least, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(order[:middle]):
            low = middle
        else:
            high = middle - 1
    return order[:low]


# -------------------------------------------------------------- threads of steps

# In place of an identifier:
ANY = 0  # any thread may run steps; false, for generated code
FREE = -1  # no thread has run one
ENDED = -2  # the thread that has run one is at its end


class StepThread:
    """The one thread whose steps return views of a memory; a step of another one is an error."""

    __slots__ = ("__weakref__", "_life", "_lock", "_name", "ident")

    def __init__(self) -> None:
        self.ident = FREE  # of the thread; or ANY, FREE, ENDED
        self._name = ""
        self._life: threading.local | None = None
        self._lock = new_lock()

    def admit(self, what: str, claim: bool = True, of_a_loop: bool = False) -> None:
        """Raise for a step of another thread; with ``claim`` this thread becomes the admitted one.

        Callers compare :attr:`ident` with the identifier of their thread first, which is faster.

        Raises:
            DispatchError: another thread has run steps, or rounds of a loop.
        """
        with self._lock:
            if self.ident in (ANY, get_ident()):
                return
            if self.ident != FREE:
                here, ended = threading.current_thread().name, self.ident == ENDED
                before = self._name
                if of_a_loop:
                    raise DispatchError.of_a_loop(what=what, here=here, before=before, ended=ended)
                raise DispatchError.other_thread(what=what, here=here, before=before, ended=ended)
            if claim:
                self.ident, self._name = get_ident(), threading.current_thread().name
                self._life = threading.local()
                self._life.value = _Life(self)

    def is_other(self) -> bool:
        """Return whether results of steps of another thread may be in use."""
        return self.ident not in (ANY, FREE, get_ident())

    def allow(self) -> None:
        """Admit all threads from now on."""
        with self._lock:
            self.ident, self._life = ANY, None

    def release(self) -> None:
        """Let any thread run the next step: the memory of earlier results is released."""
        with self._lock:
            if self.ident != ANY:
                self.ident, self._life = FREE, None


class _Life:
    """A local of a thread, deleted when the thread ends: identifiers of threads are used again."""

    __slots__ = ("_ident", "_owner")

    def __init__(self, owner: StepThread) -> None:
        self._ident, self._owner = owner.ident, weakref.ref(owner)

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None and owner.ident == self._ident:
            owner.ident = ENDED


# -------------------------------------------------------------- the pool

RESULT_AS_INPUT = (
    "an input is what a replay of another graph of this pool returned: its memory is not held, and "
    "a capture may use it. Capture all in one step, or set weak_ref_output=False"
)


class GraphPool:
    """Memory of graphs that never run at the same time.

    Args:
        device: where the tensors are; ``"cpu"`` means the host recorder. Left out: CUDA, or without
            a GPU the CPU where ``CGCOMPILE_CAPTURE_DEVICE=host``.

    Attributes:
        device: the capture device.
        generation: grows when graphs are dropped; what was built on earlier graphs is void.
        stream: what captures run on, the same for all pools of a device; replays run on the
            caller's stream.
        arena: memory of the library for the steps that these graphs are part of.
        lock: held by owners that several threads call, until results are copied.
        thread: which thread gets results that are views.
        stale: the results that callers may hold; with ``debug`` alone.
        stream_key: identifies the stream of the last replay; None before that.
        executables: what the driver allocated for its graphs, in bytes, as measured.

    Raises:
        CaptureError: ``device`` has no graphs.
        ConfigError: it is no device.

    Example:
        >>> pool = cgcompile.GraphPool("cpu")  # for two captures that never run at the same time
        >>> first = cgcompile.BreakableCUDAGraphCapture(pool)
        >>> second = cgcompile.BreakableCUDAGraphCapture(pool)
        >>> x = torch.ones(2)
        >>> with torch.no_grad(), first:
        ...     y = x + 1
        >>> with torch.no_grad(), second:
        ...     z = x * 5
        >>> first.replay()
        >>> y
        tensor([2., 2.])
    """

    def __init__(self, device: CaptureDevice | torch.device | str | None = None) -> None:
        self.device = chosen_device(device, type(self).__name__)
        self.generation = 0
        self.stream = self.device.capture_stream()
        self.arena = Arena()
        self.stale = StaleResults()
        self.lock = new_lock()
        self.thread = StepThread()
        self._memory: DevicePool | None = None
        self.stream_key: int | None = None
        self.executables = 0
        self._last_stream: Any = None
        self._parked: list[DeviceGraph] = []
        # Earlier pools, which serve no more captures; their graphs keep them alive.
        self._retired: weakref.WeakSet[DevicePool] = weakref.WeakSet()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()  # wrappers
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<GraphPool on {self.where}: {self.nbytes} bytes>"

    @property
    def is_new(self) -> bool:
        """Whether no capture has taken memory of the device."""
        return self._memory is None

    @property
    def memory(self) -> DevicePool:
        """The device's pool, created on first use."""
        if self._memory is None:
            self._memory = self.device.new_pool(self.stream, self.arena.owns)
        return self._memory

    @property
    def holder(self) -> Any:
        """What keeps the memory of the pool: results hold it, which may outlive the graphs."""
        return self._memory, self.arena

    @property
    def where(self) -> torch.device:
        """The device of the tensors that are captured."""
        return self.device.device

    @property
    def usage(self) -> GraphMemory:
        """What its graphs take of the device; buffers of owners are part of the staging."""
        buffers: int = sum(owner.input_bytes for owner in list(self._owners))
        return GraphMemory(
            sum(memory.reserved for memory in self._memories),
            self.arena.nbytes + buffers,
            executables=max(0, self.executables),
            workspaces=sum(memory.workspaces for memory in self._memories),
            measured=self.device.executables,
        )

    @property
    def _memories(self) -> list[DevicePool]:
        return [*self._retired, *([] if self._memory is None else [self._memory])]

    @property
    def nbytes(self) -> int:
        """Bytes of all that graphs of the pool need: its own, the arena's, and owners' buffers."""
        usage = self.usage
        return usage.pools + usage.staging

    @property
    def reserved(self) -> int:
        """A counter of bytes that grows by what a capture takes; on CUDA of the whole device."""
        if taken := self.device.reserved():
            return taken  # what follows reads all records of the allocator
        return sum(memory.reserved for memory in self._memories) + self.arena.nbytes

    def captured_since(self, level: int) -> None:
        """Add what the driver took for graphs since ``device.graph_bytes()`` was ``level``."""
        with suppress(RuntimeError):  # the device has failed; its error is raised elsewhere
            self.executables += self.device.graph_bytes() - level

    def add_owner(self, owner: Any) -> None:
        """Register, weakly, an owner of ``input_bytes`` of buffers that the graphs read."""
        self._owners.add(owner)

    def add_user(self, user: Any) -> None:
        """Register, weakly, a wrapper with graphs of this pool."""
        self._users.add(user)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor is this pool's."""
        return self._owns(tensor.untyped_storage().data_ptr())

    def holds(self, start: int) -> bool:
        """Return whether a storage at an address is memory of this pool or of its arena."""
        return start != 0 and (self._owns(start) or self.arena.owns(start))

    def _owns(self, start: int) -> bool:
        if self._memory is not None and self._memory.holds(start):
            return True
        return bool(self._retired) and any(memory.holds(start) for memory in list(self._retired))

    def follow_stream(self) -> None:
        """Let the current stream wait for work of the pool on another one; call before a replay."""
        key = self.device.stream_key()
        if key != self.stream_key:
            if self._last_stream is not None:
                self.device.wait_for(self._last_stream)
            self._last_stream = self.device.current_stream()
            self.stream_key = key

    def aliases_results(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one is memory of a graph's result: not held, a capture may use it."""
        identity, origin = raw_memory.storage_identity, self.stale.origin
        results = {identity(tensor.untyped_storage()) for tensor in self._weak_results()}
        return any(origin(identity(tensor.untyped_storage())) in results for tensor in tensors)

    def _weak_results(self) -> Iterator[torch.Tensor]:
        """Yield the results of replays that do not hold their memory."""
        for user in list(self._users):
            yield from user.weak_results()

    def poison(self, inputs: Iterable[Any] = (), owner: Hashable = None) -> None:
        """Fill the memory of the pool and of the arena, so that reading stale values shows.

        For tests and debugging. NaN for floating point; for integers a number that no index has.

        Args:
            inputs: of the next step; they keep their values.
            owner: of the results of that step; those of other owners keep their values.
        """
        if self._memory is None:
            return
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        kept = [tensor.untyped_storage() for tensor in tensors if self.holds(address(tensor))]
        ranges = {(storage.data_ptr(), storage.nbytes()) for storage in kept}
        memory = [raw_memory.memory_at(start, nbytes, self.where) for start, nbytes in ranges]
        saved = [target.clone() for target in memory]
        self._memory.poison()
        self.arena.poison(owner)
        for target, before in zip(memory, saved, strict=True):
            target.copy_(before)

    def poison_free(self) -> None:
        """Fill memory that no tensor holds and no replay returned; for pools with several users."""
        if self._memory is not None:
            kept = [tensor.untyped_storage() for tensor in self._weak_results()]
            self._memory.poison_free([(storage.data_ptr(), storage.nbytes()) for storage in kept])

    def retire(self, *broken: DeviceGraph, generators: Sequence[torch.Generator] = ()) -> None:
        """Keep the graphs of a failed capture, which may be in use, and capture into new memory.

        The ``generators`` that were registered for the capture are usable again.
        """
        self._parked += broken
        self.renew()
        self.device.recover(self.stream, generators)

    def renew(self) -> None:
        """Capture into new memory; each earlier graph keeps its own."""
        if self._memory is not None:
            self._retired.add(self._memory)
        self._memory = None

    def captures_into(self, start: int) -> bool:
        """Return whether an address is in the memory that captures take from now."""
        return self._memory is not None and self._memory.holds(start)

    def release(self) -> None:
        """Drop all graphs of all users, and the memory. Synchronises; captures may follow."""
        self.device.synchronize()  # a replay may still run on any stream
        for user in list(self._users):
            user.clear_graphs()
        self.generation += 1
        self._parked.clear()
        self._retired.clear()
        self._memory = None
        self.executables = 0
        self.stale.release()
        self.arena.release()
        self.thread.release()


def memory_of(
    pools: Iterable[GraphPool | None],
    outputs: int = 0,
    captures: Iterable[tuple[str, int]] = (),
    executables: int | None = None,  # measured by the caller; None: the sum of the pools
) -> GraphMemory:
    """Return what graphs of pools take, each pool counted once."""
    distinct = {id(pool): pool for pool in pools if pool is not None}
    usages = [pool.usage for pool in distinct.values()]
    if executables is None:
        executables = sum(usage.executables for usage in usages)
    return GraphMemory(
        sum(usage.pools for usage in usages),
        sum(usage.staging for usage in usages),
        outputs,
        executables,
        sum(usage.workspaces for usage in usages),
        "; ".join(dict.fromkeys(usage.measured for usage in usages)),
        tuple(captures),
    )
