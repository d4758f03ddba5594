"""The capture of one graph as a transaction: :func:`capture`, and the capture lock.

A capture leaves a finished graph, or nothing: after a failure the first exception is raised as it
is, stream and garbage collector are as they were, and the next capture works. On CUDA one capture a
process is safe, so :class:`capture_lock` is a lock of the process; a second thread waits for it, a
few seconds at most. :class:`SameStorages` refuses a capture that replaces the memory of a tensor it
did not create (``weight.data = ...``, ``weight.t_()``): a replay does not repeat that.
:class:`TouchedMemory` notes the memory that captured ops read and write.
``steps`` has what must hold before a step may replay or capture.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any, ClassVar

import torch

from cgcompile.context import BatchDescriptor
from cgcompile.errors import CaptureBusyError, CaptureError
from cgcompile.graphs.arena import address
from cgcompile.graphs.contract import layout_of
from cgcompile.graphs.device import DeviceGraph, any_capture, destroy_unused_graphs
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.reads import modules_of
from cgcompile.graphs.sequence import HeldMemory
from cgcompile.locks import new_lock
from cgcompile.torch_compat import raw_memory, torch_ops

# ---------------------------------------------------------------- memory that stays


def is_comparable(value: Any) -> bool:
    """Return whether :class:`SameStorages` compares the memory of a value."""
    # Not of subclasses; torch cannot compare that of quantized and nested ones (is_set_to).
    if not isinstance(value, torch.Tensor) or value.is_quantized or value.is_nested:
        return False
    return raw_memory.is_plain_tensor(value)


class SameStorages:
    """Compare memory and layout of tensors before and after a capture, and restore them."""

    def __init__(
        self,
        what: str,
        tensors: Iterable[torch.Tensor],  # for which :func:`is_comparable` holds
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        self._what, self._name_of = what, name_of
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._accept()

    def _accept(self) -> None:
        with torch_ops.without_modes():
            self._before = [tensor.data for tensor in self.tensors]
        self._addresses: raw_memory.Addresses | None = None  # of these; few owners compare them

    def _same_addresses(self) -> bool:
        if self._addresses is None:
            self._addresses = raw_memory.Addresses(self._before, range(len(self._before)))
        return self._addresses.hold(self.tensors)

    def accept(self) -> None:
        """Accept the present addresses of the tensors; layouts are compared at the end."""
        if not self._same_addresses():
            self._accept()

    def check_addresses(self) -> None:
        """Run :meth:`check` if a tensor has another address; a changed layout is no reason."""
        if not self._same_addresses():
            self.check()

    def check(self) -> None:
        """Restore the tensors that have other memory, or another layout, than before, and raise."""
        changed = self.restore()
        if changed:
            name = self._name_of(changed[0])
            if len(changed) > 1:
                name += f" (and {len(changed) - 1} more)"
            raise CaptureError.replaces_memory(what=self._what, name=name)

    def restore(self) -> list[torch.Tensor]:
        """Give each tensor the memory and layout that it had; return those that had others."""
        pairs = zip(self.tensors, self._before, strict=True)
        with torch_ops.without_modes():
            changed = [(now, before) for now, before in pairs if not now.is_set_to(before)]
            for tensor, before in changed:
                tensor.data = before
        return [tensor for tensor, _ in changed]


def weights_of(runnable: object) -> list[torch.Tensor]:
    """Return all parameters, then all buffers, of the modules that a runnable is or holds."""
    modules = modules_of(runnable, inner=True)
    tables = [module._parameters for module in modules] + [module._buffers for module in modules]
    return [weight for table in tables for weight in table.values() if weight is not None]


def weight_name(runnable: object, weight: torch.Tensor) -> str:
    """Return the name of a parameter or buffer, or its type if it is an argument."""
    for root in modules_of(runnable):
        for named in (root.named_parameters(), root.named_buffers()):
            for name, tensor in named:
                if tensor is weight:
                    return repr(name)
    return f"a tensor {tuple(weight.shape)} {weight.dtype}"


# ---------------------------------------------------------------- bulk captures

_postponed: ContextVar[bool] = ContextVar("cgcompile_capture_postponed", default=False)


class _Bulk:
    """What the captures of one bulk capture share."""

    def __init__(self) -> None:
        self.memory: dict[Any, Any] = {}  # what captures keep for the next ones
        self.descriptors: list[BatchDescriptor] = []  # of callers, that were captured
        # By device: the pool of the first capture, and the driver's memory for graphs before it.
        self.levels: dict[torch.device, tuple[GraphPool, int]] = {}

    def end(self) -> None:
        for pool, level in self.levels.values():
            pool.captured_since(level)


_in_bulk: ContextVar[_Bulk | None] = ContextVar("cgcompile_capture_in_bulk", default=None)


@contextmanager
def postponed_capture() -> Iterator[None]:
    """Context manager: calls that would capture run plain, as warming calls."""
    token = _postponed.set(True)
    try:
        yield
    finally:
        _postponed.reset(token)


def capture_postponed() -> bool:
    """Return whether captures are postponed here; see :func:`postponed_capture`."""
    return _postponed.get()


# ---------------------------------------------------------------- the capture lock

_PATIENCE = 5.0  # seconds; a capture takes less
_PATIENCE_OF_RELEASE = 60.0
_lock = new_lock(watch=False)  # one for each process; waits have a limit, against deadlocks


class capture_lock:
    """Context manager that holds the capture lock; it waits for the capture of another thread."""

    # No generator, which a garbage collection would end.

    holder: ClassVar["capture_lock | None"] = None

    def __init__(
        self,
        what: str,
        owner: object = None,
        *,
        wait: float = _PATIENCE,
        before: Callable[[], None] | None = None,  # called as soon as no other thread can capture
    ) -> None:
        self.what, self.owner, self._wait, self._before = what, owner, wait, before

    def __enter__(self) -> None:
        here = holder_here() is not None
        if here or not _lock.acquire(timeout=self._wait):
            holder = capture_lock.holder
            running = "something" if holder is None else holder.what
            raise CaptureBusyError.busy(what=self.what, running=running, same_thread=here)
        try:
            if self._before is not None:
                self._before()
        except BaseException:
            _lock.release()
            raise
        self.thread, self.process = get_ident(), os.getpid()
        capture_lock.holder = self

    def __exit__(self, *error: object) -> None:
        capture_lock.holder = None
        _lock.release()


def holder_here() -> capture_lock | None:
    """Return the holder of the lock, if it is this thread."""
    holder = capture_lock.holder
    return holder if holder is not None and holder.thread == get_ident() else None


def _holder_elsewhere() -> capture_lock | None:
    """Return the holder if it is another thread of this process; after a fork there is none."""
    holder = capture_lock.holder
    if holder is None or holder.thread == get_ident() or holder.process != os.getpid():
        return None
    return holder


def inside_capture() -> bool:
    """Return whether this thread captures, between two segments too, or its work is captured."""
    return holder_here() is not None or any_capture()


def captured_elsewhere() -> bool:
    """Return whether another thread is capturing now."""
    return _holder_elsewhere() is not None


def who_captures_here() -> object:
    """Return the owner of the capture of this thread; None without a capture."""
    holder = holder_here()
    return None if holder is None else holder.owner


def who_captures_elsewhere() -> object:
    """Return the owner of the capture of another thread; None if there is none."""
    holder = _holder_elsewhere()
    return None if holder is None else holder.owner


def ends_of_captures() -> Iterator[None]:
    """Yield whenever the captures of other threads have ended, for some seconds."""
    # Callers must hold no lock that these captures may take.
    until = time.monotonic() + _PATIENCE
    while (left := until - time.monotonic()) > 0 and _lock.acquire(timeout=left):
        _lock.release()
        yield


@contextmanager
def releasing() -> Iterator[None]:
    """Context manager for code that drops graphs: no capture runs, and memory is freed."""
    # It waits for captures of other threads: callers must hold no lock that these may take.
    if inside_capture():
        raise CaptureError.release_inside(what="a capture")
    with capture_lock("release", wait=_PATIENCE_OF_RELEASE):
        try:
            yield
        finally:
            destroy_unused_graphs(give_back=True)


# ---------------------------------------------------------------- garbage collection

# Note [Garbage before a capture]
# Automatic collection is off inside of captures, so no garbage can end one; what is collected
# before is a matter of memory. Results that the program has dropped in cycles of objects hold
# memory of the pool: those of recent steps are young objects. Other tensors give their memory back
# to the general pool of torch's allocator, of which a capture gets nothing. So the two young
# generations suffice: a few milliseconds. A full collection looks at every object of the process,
# 0.15 to 0.25 s, more than half of the time of 20 captures, and frees no memory for them.
# A device that is nearly full is another matter. Inside of a capture torch's allocator returns
# nothing of what it keeps unused, the memory of destroyed graphs among it, and an allocation fails
# where outside it would succeed. So where the allocator keeps more than the device has free, all
# garbage is collected and all unused memory returned before the capture.

# A program that freezes has thousands of objects; a collection of Python 3.12 leaves hundreds.
_FROZEN_BY_A_PROGRAM = 1000


class without_garbage_collection:
    """Context manager: switch automatic garbage collection off until the last such block ends."""

    # A collection could free a graph or a module of kernels, which ends a running capture; and it
    # takes a good part of the time of a trace, which creates millions of objects.
    _guard: ClassVar[Any] = new_lock(watch=False)
    _depth: ClassVar[int] = 0  # of blocks in all threads: automatic collection is the process's
    _was_on: ClassVar[bool] = False

    def __enter__(self) -> None:
        kind = without_garbage_collection
        with kind._guard:
            if not kind._depth:
                kind._was_on = gc.isenabled()
                gc.disable()
            kind._depth += 1

    def __exit__(self, *error: object) -> None:
        kind = without_garbage_collection
        with kind._guard:
            kind._depth -= 1
            if not kind._depth and kind._was_on:
                gc.enable()


def _collect_young() -> None:
    """Collect the garbage of recent steps; see Note [Garbage before a capture]."""
    gc.collect(1)


@contextmanager
def bulk_captures() -> Iterator[None]:
    """Around several bulk captures: collect garbage once before all, and as usual between them.

    A block inside of another adds nothing.
    """
    if _in_bulk.get() is not None:
        yield
        return
    # Objects are frozen until the end, unless the program has frozen some: a collection of all
    # objects between the captures is short.
    _collect_young()
    freeze = gc.get_freeze_count() < _FROZEN_BY_A_PROGRAM
    if freeze:
        gc.freeze()
    bulk = _Bulk()
    token = _in_bulk.set(bulk)
    try:
        yield
    finally:
        _in_bulk.reset(token)
        if freeze:
            gc.unfreeze()
        bulk.end()


@contextmanager
def bulk_capture() -> Iterator[None]:
    """Context manager for many captures: collect garbage once before them, and then at the end."""
    with bulk_captures(), without_garbage_collection():
        yield


def prepares_graphs() -> bool:
    """Return whether this thread or task is inside of a bulk capture, its warm-up included."""
    return _in_bulk.get() is not None or capture_postponed()


def bulk_descriptors() -> list[BatchDescriptor]:
    """Return the descriptors of callers that this bulk captured; a new list outside of a bulk."""
    bulk = _in_bulk.get()
    return [] if bulk is None else bulk.descriptors


def bulk_memory() -> dict[Any, Any]:
    """Return what captures of this bulk keep for later ones; empty outside of a bulk capture."""
    bulk = _in_bulk.get()
    return {} if bulk is None else bulk.memory


@contextmanager
def measured(pool: GraphPool) -> Iterator[None]:
    """Add what the driver allocates for the captures inside to :attr:`GraphPool.executables`."""
    # In a bulk capture the device is read before the first capture and after the last, because
    # that takes as long as a part of a capture; all of it is added to the pool of the first.
    bulk = _in_bulk.get()
    if bulk is not None:
        if pool.where not in bulk.levels:
            bulk.levels[pool.where] = pool, pool.device.graph_bytes()
        yield
        return
    before = pool.device.graph_bytes()
    try:
        yield
    finally:
        pool.captured_since(before)


# ---------------------------------------------------------------- a capture


def enter_capture(
    stack: ExitStack,
    pool: GraphPool,
    what: str,
    owner: object = None,
    *,
    wait: bool = True,
    before: Callable[[], None] | None = None,
    collect: bool = False,
) -> None:
    """Enter what surrounds a capture: its lock, no garbage collection, the pool's stream."""
    device = pool.device
    if device.is_capturing():
        raise CaptureError.nested(what=f"capture of {what}")
    patience = _PATIENCE if wait else 0
    stack.enter_context(capture_lock(what, owner, wait=patience, before=before))
    may_collect = collect and _in_bulk.get() is None
    if may_collect:
        _collect_young()
    destroy_unused_graphs()
    # See Note [Garbage before a capture].
    if (may_collect or pool.is_new) and device.lacks_memory():
        gc.collect()
        destroy_unused_graphs()
        device.give_back()
    stack.enter_context(without_garbage_collection())
    stack.enter_context(device.on_stream(pool.stream))
    if device.is_capturing():
        raise CaptureError.nested(what=f"capture of {what}")


def capture(
    function: Callable[[], Any],
    pool: GraphPool,
    what: str,
    *,
    collect: bool = False,  # garbage first, so that dead tensors release their memory
    storages: SameStorages | None = None,  # memory not to be replaced; restored if it is
    compiled: bool = False,  # ``function`` calls code of ``torch.compile``
    wait: bool = True,
    generators: Sequence[torch.Generator] = (),  # from which it draws, beside the default one
) -> tuple[DeviceGraph, Any]:
    """Record what ``function`` does, without doing it; return the graph and its result."""
    with ExitStack() as stack:
        enter_capture(stack, pool, what, wait=wait, collect=collect)
        graph, memory = pool.device.new_graph(), pool.memory
        try:
            with torch_ops.own_cached_casts(compiled):
                graph.begin(memory, generators)
                result = function()
                if storages is not None:
                    storages.check()
                graph.end()
        except BaseException:
            graph.abandon()
            if storages is not None:
                storages.restore()
            pool.retire(graph, generators=generators)
            raise
    return graph, result


# ---------------------------------------------------------------- memory that ops touch


class _EachOp(torch_ops.DispatchMode):
    """Run each op; of one whose kernel is written in Python, pass the ops in its body too."""

    def __init__(self, tensor_type: str) -> None:
        super().__init__()
        self._tensor_type = tensor_type
        self._kernels: dict[Any, Callable[..., Any] | None] = {}  # by op

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in self._kernels:
            self._kernels[func] = torch_ops.python_kernel(func, self._tensor_type)
        kernel = self._kernels[func]
        if kernel is None:
            return func(*args, **kwargs)
        with self:
            return kernel(*args, **kwargs)


class TouchedMemory(_EachOp):
    """Note the memory that captured ops read and write, so that the recording can hold it."""

    # Weakly: memory of the pool is used again inside of a capture. A Triton kernel that is launched
    # without an op is not seen.

    def __init__(self, tensor_type: str, but: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__(tensor_type)
        self._but = {*map(raw_memory.storage_identity, but)}  # they are not noted
        # By storage, with the layout of the first tensor.
        self._lives: dict[int, tuple[raw_memory.StorageLife, tuple[Any, ...]]] = {}

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.note(args, kwargs)
        return super().on_call(func, args, kwargs)

    def passes_over(self, inputs: Sequence[Any], boundaries: Any = None) -> bool:
        """Note the memory of the inputs of a compiled piece, whose ops touch no other."""
        self._note(filter(_is_dense, inputs))
        return True

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the memory of the tensors among the arguments of an op."""
        self._note(_dense((args, kwargs)))

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for leaf in tensors:
            key = raw_memory.storage_identity(leaf.untyped_storage())
            if key in self._lives or key in self._but:
                continue
            if leaf.numel():  # else no byte of it is touched
                self._lives[key] = raw_memory.StorageLife(leaf), layout_of(leaf)

    def outside(self, owns: Callable[[int], bool]) -> list[HeldMemory]:
        """Return what is alive and not at an address that the pool ``owns``; after the capture."""
        rows = [(life.storage(), layout) for life, layout in self._lives.values()]
        return [
            HeldMemory(storage, storage.data_ptr(), layout)
            for storage, layout in rows
            if storage is not None and storage.nbytes() and not owns(storage.data_ptr())
        ]


class NewMemory(_EachOp):
    """Note the memory that ops allocate, to find what a break leaves behind; for debugging."""

    def __init__(self, tensor_type: str) -> None:
        super().__init__(tensor_type)
        self._lives: dict[int, raw_memory.StorageLife] = {}

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().on_call(func, args, kwargs)
        known = {address(leaf) for leaf in _dense((args, kwargs))} | {0}
        for leaf in _dense(result):
            if address(leaf) not in known:
                self._lives[address(leaf)] = raw_memory.StorageLife(leaf)
        return result

    @property
    def alive(self) -> dict[int, raw_memory.StorageLife]:
        """The memory that was allocated here and is still in use, by address."""
        return {start: life for start, life in self._lives.items() if not life.ended}


def _dense(tree: Any) -> list[torch.Tensor]:
    return [*filter(_is_dense, torch_ops.tree_leaves(tree))]


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
