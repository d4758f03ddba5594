"""What tensors are made of: raw memory, storages and addresses, the tensors inside of subclasses.

CUDA's graphs, streams and allocator are here too, as are the comparisons of many objects at once.
"""

import ctypes
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

# ---------------------------------------------------------------- raw memory


def weak_tensor(tensor: torch.Tensor, holder: Any = None) -> torch.Tensor:
    """Return a tensor over the same memory that keeps ``holder`` alive, not this; about 3 us."""
    # Equal address, shape, strides, dtype, and conjugate and negative bits; never an inference
    # tensor, never requires grad. Reading it after the memory was freed is undefined.
    storage = tensor.untyped_storage()
    start, nbytes = storage.data_ptr(), storage.nbytes()
    return laid_over(weak_storage(start, nbytes, tensor.device, holder), tensor)


def weak_storage(
    address: int, nbytes: int, device: torch.device, holder: Any = None
) -> torch.UntypedStorage:
    """Return a storage of memory that it does not keep alive; it keeps ``holder`` alive."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    if holder is not None:
        storage.holder = holder  # torch keeps the Python object of a storage as long as the storage
    return storage


def memory_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory as a uint8 tensor that does not keep it alive."""
    raw = weak_storage(address, nbytes, device)
    with outside_inference_mode():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(raw, 0, (nbytes,), (1,))


def can_expire_storages() -> bool:
    """Return whether this build can make a storage raise; those without CUDA cannot up to 2.13."""
    return hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


def expire_storage(storage: torch.UntypedStorage, text: str) -> None:
    """Make each later read or write of a storage raise RuntimeError."""
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, text)


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a key of a storage object, not of its memory, while it lives."""
    return storage._cdata


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a key that is equal for tensors of one storage, while it lives; None without one."""
    try:
        return storage_identity(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage, as uint8 [bytes]."""
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def is_held_here_alone(storage: torch.UntypedStorage) -> bool:
    """Return whether only Python objects hold a storage, and no tensor."""
    return torch._C._storage_Use_Count(storage._cdata) == 1


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as :func:`weak_tensor` does, but keep the memory alive."""
    return laid_over(tensor.untyped_storage(), tensor)


def laid_over(storage: torch.UntypedStorage, layout: torch.Tensor) -> torch.Tensor:
    """Return a tensor over a storage with the layout of another; no inference tensor, no grad."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return laid_over(storage, layout)
    conjugate, negative = layout.is_conj(), layout.is_neg()
    if type(layout) is not torch.Tensor or conjugate or negative:
        # A subclass may override ``new_empty``, which also resolves the bits.
        tensor = torch.empty(0, dtype=layout.dtype, device=layout.device)
        tensor.set_(storage, layout.storage_offset(), layout.size(), layout.stride())
        return with_bits(tensor, conjugate, negative)
    tensor = layout.new_empty(0)
    return tensor.set_(storage, layout.storage_offset(), layout.size(), layout.stride())


def grad_mode_name() -> str:
    """Return the mode of autograd that Dynamo guards, by the name of its context manager."""
    if torch.is_inference_mode_enabled():
        return "inference_mode"
    return "enable_grad" if torch.is_grad_enabled() else "no_grad"


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context without inference mode."""
    # Where it leaves inference mode, grad mode is on: use it for tensors that do not require grad.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the conjugate and negative bits: the numbers in memory."""
    return with_bits(tensor, tensor.is_conj(), tensor.is_neg())


def with_bits(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """Return a view of a tensor with these bits flipped."""
    if conjugate:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if negative else tensor


class StorageLife:
    """A weak reference to the storage of a tensor; ``ended`` is whether it was freed."""

    # In C++: a weak reference of Python to a storage is not. While it exists, no other storage has
    # the identity of this one.

    __slots__ = ("_weak",)

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._weak = StorageWeakRef(tensor.untyped_storage())

    @property
    def ended(self) -> bool:
        return self._weak.expired()

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, unless it was freed."""
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a (fake) tensor is dense, with one storage, and wraps no other tensors."""
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


_ITEMS_OF_TUPLE = tuple.__basicsize__  # CPython: where the items begin, from the tuple's address
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class SameObjects:
    """Compare objects in ranges ``[first, last)`` of a tuple by identity, while they live."""

    # Long ranges are compared as memory, see :func:`identities`.

    _SHORT = 4

    def __init__(self, objects: tuple[Any, ...], ranges: list[tuple[int, int]]) -> None:
        memory = identities(objects)
        self._single = [
            (index, id(objects[index]))
            for first, last in ranges
            if last - first <= self._SHORT
            for index in range(first, last)
        ]
        self._long = [
            (
                _ITEMS_OF_TUPLE + first * _POINTER,
                (ctypes.c_char * ((last - first) * _POINTER)).from_address,
                memory[first * _POINTER : last * _POINTER],
            )
            for first, last in ranges
            if last - first > self._SHORT
        ]

    def hold(self, objects: tuple[Any, ...]) -> bool:
        """Return whether a tuple of equal length has the same objects in the ranges."""
        for index, known in self._single:
            if id(objects[index]) != known:
                return False
        items = id(objects)
        for start, memory_at, known_items in self._long:
            if memory_at(items + start).raw != known_items:
                return False
        return True


def identities(objects: tuple[Any, ...]) -> bytes:
    """Return the addresses of the objects in a tuple as bytes, to compare while these exist."""
    # Reads the memory of the tuple (CPython 3.10 to 3.14): 0.5 us for 300 objects; ``id`` takes 13.
    return ctypes.string_at(id(objects) + _ITEMS_OF_TUPLE, len(objects) * _POINTER)


_equal_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Addresses:
    """Compare the addresses of the tensors at some indices of a list; in C++ in CUDA builds."""

    def __init__(self, objects: Sequence[Any], indices: Sequence[int]) -> None:
        self._indices = list(indices)
        # By index, as the C++ helper requires.
        self._known: list[int | None] = [None] * len(objects)
        for index in indices:
            self._known[index] = objects[index].data_ptr()

    def hold(self, objects: Sequence[Any]) -> bool:
        """Return whether no tensor moved."""
        if not self._indices:
            return True
        if _equal_addresses is not None:
            listed = objects if type(objects) is list else list(objects)
            return bool(_equal_addresses(listed, self._known, self._indices))
        for index in self._indices:  # noqa: SIM110  (a generator costs a call)
            if objects[index].data_ptr() != self._known[index]:
                return False
        return True

    def hold_for(self, objects: list[Any]) -> Callable[[], bool]:
        """Return :meth:`hold` of one list, without its Python code."""
        if _equal_addresses is None or not self._indices:
            tensors = [objects[index] for index in self._indices]
            known = [self._known[index] for index in self._indices]
            return lambda: [*map(torch.Tensor.data_ptr, tensors)] == known
        return functools.partial(_equal_addresses, objects, self._known, self._indices)


_IMMUTABLE = 1 << 8  # the flag of a type whose attributes cannot be written


def dicts_of_class(kind: Any) -> list[dict[str, Any]]:
    """Return the dicts of a class and its bases, where attributes are written; else empty."""
    # ``vars`` of a class returns a view of its dict.
    bases = kind.__mro__ if isinstance(kind, type) else ()
    mutable = [base for base in bases if not base.__flags__ & _IMMUTABLE]
    return [table for base in mutable for table in gc.get_referents(vars(base))]


class DictVersions:
    """Notice writes to dicts; ``hold()`` returns whether none was written, 10 ns for each dict."""

    # By the guards of Dynamo, all at once. A write of an equal value counts as well. The guards
    # load Dynamo, which takes a second. ``owners`` are objects by the identity of their
    # ``__dict__``: another ``__dict__`` or class counts as a write. Each adds 10 ns, and 30 to
    # 40 ns from Python 3.12.

    def __init__(
        self, dicts: tuple[dict[Any, Any], ...], owners: Mapping[int, Sequence[Any]] | None = None
    ) -> None:
        self.dicts = dicts
        self.hold: Callable[[], bool] = lambda: True
        self._owners = owners or {}  # objects by the identity of their dict
        self._before: list[tuple[Any, ...]] = []
        if not dicts:
            return
        from torch._C._dynamo.guards import dict_version

        self._version: Callable[[Any], int] = dict_version
        self._before = [*map(self._form, dicts)]
        owned = [(value, owner) for value in dicts for owner in self._owners.get(id(value), ())]
        empty = [value for value in dicts if not value]  # each takes half as long
        rows = [(value, None) for value in dicts if value]
        if _counts_writes(dict_version):
            check = _guards(rows, by_version=True)
            has_dicts = _guards(owned, by_version=False) if owned else None
            self.hold = _unless_written(check, dict_version, empty, has_dicts)
            return
        rows = owned + [row for row in rows if id(row[0]) not in self._owners]
        self.hold = _guards(rows, by_version=True)
        if empty:
            self.hold = functools.partial(_hold_and_empty, self.hold, empty)

    def changed(self) -> list[dict[Any, Any]]:
        """Return the dicts that were written, or are no more those of their objects."""
        rows = zip(self.dicts, self._before, strict=True)
        return [value for value, before in rows if self._form(value) != before]

    def _form(self, value: dict[Any, Any]) -> tuple[Any, ...]:
        owners = self._owners.get(id(value), ())
        forms = [(type(owner), owner.__dict__ is value) for owner in owners]
        return self._version(value), bool(value), *forms


def _guards(rows: Sequence[tuple[dict[Any, Any], Any]], by_version: bool) -> Callable[[], bool]:
    """Return a function that compares dicts, or objects with their dicts."""
    from torch._C._dynamo.guards import RootGuardManager
    from torch._dynamo.guards import GuardManagerType

    root, kind = RootGuardManager(), GuardManagerType.GUARD_MANAGER
    values = tuple([value if owner is None else owner for value, owner in rows])
    for index, (value, owner) in enumerate(rows):
        item = root.tuple_getitem_manager(index, str(index), values[index], kind)
        if owner is not None:
            item.add_type_match_guard(id(type(owner)), [""], None)
            item = item.get_generic_dict_manager(f"{index}.__dict__", value, kind)
        if by_version:
            item.add_dict_version_guard(value, [""], None)
        else:
            item.add_id_match_guard(id(value), [""], None)
    return functools.partial(root.check, values)


def _hold_and_empty(check: Callable[[], bool], empty: list[dict[Any, Any]]) -> bool:
    return False if any(empty) else check()


@functools.cache
def _counts_writes(version: Callable[[Any], int]) -> bool:
    """Return whether only a write to a dict that was asked for its version takes a new one."""
    # CPython 3.12 has no versions of dicts any more: torch watches dicts, and numbers their writes.
    watched: dict[int, int] = {}
    first = version(watched)
    watched[0] = 0
    unwatched = {index: [index] for index in range(8)}
    unwatched.clear()
    return version({}) == first + 2


def _unless_written(
    check: Callable[[], bool],
    version: Callable[[Any], int],
    empty: list[dict[Any, Any]],
    has_dicts: Callable[[], bool] | None,
) -> Callable[[], bool]:
    """Return ``check``, but called only if a watched dict of the process was written; 0.2 us."""
    # ``update`` of an empty dict by a dict takes no number: torch does not count copies. Neither
    # does another ``__dict__`` of an object.
    last = 0

    def hold() -> bool:
        nonlocal last
        now = version({})  # the next number
        if (now == last + 1 or check()) and not any(empty):
            last = now
            return has_dicts is None or has_dicts()
        return False

    return hold


# ---------------------------------------------------------------- CUDA graphs


def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Return torch's C++ method that replays a graph, without its Python wrapper."""
    # In torch 2.15 the wrapper handles hooks and retained streams, which our graphs do not use.
    return super(torch.cuda.CUDAGraph, graph).replay


def drop_blas_workspaces() -> None:
    """Free the workspaces that torch caches for cuBLAS, one per handle and stream."""
    # torch allocates them again when needed. 2.15 caches them only with
    # ``TORCH_CUBLAS_WORKSPACE_CACHE=1``.
    torch._C._cuda_clearCublasWorkspaces()


def empty_host_cache() -> None:
    """Free what torch's allocator of pinned memory keeps: free blocks, and pools without graphs."""
    # ``torch.cuda.graph`` does so at each capture. 2.11 has no public name for it.
    getattr(torch.accelerator, "empty_host_cache", torch._C._host_emptyCache)()


def raw_stream_of(device_index: int) -> Callable[[], int]:
    """Return a function that returns the handle of the current stream of a device."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device_index)


class OnStream:
    """Context manager: ``torch.cuda.stream`` at a tenth of its cost; CUDA must be initialised."""

    # Where another device than the stream's is current, it uses torch's own context.

    __slots__ = ("_before", "_full", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._full: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        stream = self._stream
        if torch.cuda.current_device() != stream.device_index:
            self._full = torch.cuda.stream(stream)
            self._full.__enter__()
            return
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: Any) -> None:
        if self._full is not None:
            self._full.__exit__(*error)
        else:
            _set_stream(*self._before)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def cuda_is_capturing() -> bool:
    """Return whether the current CUDA stream of this thread is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Tells whether an address is in the memory of the CUDA graph that a thread captures; else None.
CAPTURED_MEMORY: ContextVar[Callable[[int], bool] | None] = ContextVar("memory", default=None)


def _segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the allocator's record of each segment of a private pool."""
    # Reads all pools, by the private function: in 2.11 ``torch.cuda.memory_snapshot`` releases
    # references that it does not own, which crashes the process later (fixed in 2.15).
    segments = torch._C._cuda_memorySnapshot(None)["segments"]
    return [row for row in segments if tuple(row["segment_pool_id"]) == tuple(pool)]


def pool_segments(pool: tuple[int, int]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the segments of a private pool."""
    return [(segment["address"], segment["total_size"]) for segment in _segments(pool)]


def free_blocks(pool: tuple[int, int]) -> list[tuple[int, int]]:
    """Return (address, bytes) of the free blocks of a private pool."""
    blocks = []
    for segment in _segments(pool):
        start = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                blocks.append((start, block["size"]))
            start += block["size"]
    return blocks


def reserved_bytes(device: torch.device, ever: bool = False) -> int:
    """Return the bytes that torch's allocator holds, or with ``ever`` has ever reserved."""
    return _bytes("reserved_bytes", device).get("allocated" if ever else "current", 0)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of torch's allocator that are in use."""
    return _bytes("allocated_bytes", device).get("current", 0)


def _bytes(kind: str, device: torch.device) -> Mapping[str, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    counts: Mapping[str, int] = stats.get(kind, {}).get("all", {})
    return counts


def stop_allocating_to(device_index: int, pool: tuple[int, int]) -> None:
    """Remove what a failed capture left in the allocator: a route to the pool, a use count."""
    # No effect where the capture ended that itself, or never began.
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is None or release is None:
        return
    try:
        end(device_index, pool)
    except RuntimeError:
        return  # no route, so no use count either
    with suppress(RuntimeError):
        release(device_index, pool)


def alike(
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[tuple[list[int | None], list[int]]] | None = None,
) -> Callable[..., bool]:
    """Return a function that compares other tensors with these; 0.15 us for two of them."""
    # True: equal types, dtypes, devices, ``requires_grad``, ranks, and strides and sizes of
    # ``layouts`` (a size of None is any), by default those of the tensors. False may also mean
    # another dispatch key, as of an inference tensor.
    sizes: Any = None if layouts is None else [sizes for sizes, _ in layouts]
    strides: Any = None if layouts is None else [strides for _, strides in layouts]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    check: Callable[..., bool] = guards.check
    return check


# ---------------------------------------------------------------- tensor subclasses


class CannotUnwrap(Exception):
    """A tensor subclass, or a call on one, has no equivalent on plain tensors; with the reason."""


@dataclass(frozen=True, eq=False)
class Held:
    """An object, not a tensor, that a subclass wraps, such as a device mesh."""

    value: Any


@dataclass(frozen=True, eq=False)
class Wrapper:
    """How a traceable wrapper subclass is built from the plain tensors inside of it."""

    kind: Any  # the subclass
    names: tuple[str, ...]  # attribute names of the inner tensors
    inner: tuple["Wrapper | Held | None", ...]  # one per name; None: a plain tensor
    context: Any
    size: Any
    stride: Any

    @classmethod
    def of(cls, tensor: Any) -> "Wrapper":
        """Return how a (fake) tensor is built."""
        if tensor.layout is not torch.strided:
            raise CannotUnwrap(f"a {type(tensor).__name__} has the layout {tensor.layout}")
        names, context = tensor.__tensor_flatten__()
        if not all(name.isidentifier() for name in names):
            raise CannotUnwrap(f"a {type(tensor).__name__} has inner tensors without names")
        inner = tuple(_kind_of(getattr(tensor, name)) for name in names)
        size, stride = tensor.size(), tensor.stride()
        return cls(type(tensor), tuple(names), inner, context, size, stride)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the plain tensors, such as ``qdata`` or ``packed.scale``."""
        paths: list[str] = []
        for name, kind in zip(self.names, self.inner, strict=True):
            if isinstance(kind, Wrapper):
                paths += [f"{name}.{path}" for path in kind.paths]
            elif kind is None:
                paths.append(name)
        return tuple(paths)

    @property
    def fixed(self) -> list[Any]:
        """Parts that must equal the trace: contexts, and sizes of inner subclasses."""
        inner = [kind for kind in self.inner if isinstance(kind, Wrapper)]
        fixed = [self.context, *((kind.size, kind.stride) for kind in inner)]
        return fixed + [each for kind in inner for each in kind.fixed]

    def parts(self, tensor: Any) -> list[Any]:
        """Return the plain tensors inside of a tensor that is built alike."""
        parts: list[Any] = []
        for name, kind in zip(self.names, self.inner, strict=True):
            value = getattr(tensor, name)
            if isinstance(kind, Wrapper):
                parts += kind.parts(value)
            elif kind is None:
                parts.append(value)
        return parts

    def build(self, parts: Iterator[Any], size: Any = None, stride: Any = None) -> Any:
        """Return a tensor of these parts; inner subclasses have the sizes of the trace."""
        inner: dict[str, Any] = {}
        for name, kind in zip(self.names, self.inner, strict=True):
            if isinstance(kind, Wrapper):
                inner[name] = kind.build(parts)
            else:
                inner[name] = next(parts) if kind is None else kind.value
        size = self.size if size is None else size
        stride = self.stride if stride is None else stride
        return self.kind.__tensor_unflatten__(inner, self.context, size, stride)

    def fits(self, tensor: Any) -> bool:
        """Return whether a tensor is built in the same way; the plain tensors may differ."""
        if type(tensor) is not self.kind:
            return False
        names, context = tensor.__tensor_flatten__()
        if tuple(names) != self.names or not _equal(context, self.context):
            return False
        for name, kind in zip(names, self.inner, strict=True):
            value = getattr(tensor, name)
            if isinstance(kind, Wrapper):
                if not kind.fits(value):
                    return False
            elif isinstance(kind, Held):
                if value is not kind.value and not _equal(value, kind.value):
                    return False
            elif is_wrapper(value) or not isinstance(value, torch.Tensor):
                return False
        return True


def _kind_of(value: Any) -> Wrapper | Held | None:
    if not isinstance(value, torch.Tensor):
        return Held(real_object(value))
    if is_wrapper(value):
        return Wrapper.of(value)
    if value.layout is not torch.strided:
        raise CannotUnwrap(f"an inner tensor has the layout {value.layout}")
    return None


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # e.g. the truth of a tensor of several elements
        return False


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass that torch can take apart."""
    protocol = ("__tensor_flatten__", "__tensor_unflatten__")
    return isinstance(value, torch.Tensor) and all(hasattr(type(value), name) for name in protocol)


def real_object(value: Any) -> Any:
    """Return the object behind a stand-in of Dynamo's graph; other values unchanged."""
    return getattr(value, "real_obj", value)


def is_stand_in(value: Any) -> bool:
    """Return whether a value in a graph of Dynamo stands for an object that is no tensor."""
    return hasattr(value, "real_obj")


def traced_on_parts(
    function: Callable[..., Any], fakes: Sequence[Any], mode: AbstractContextManager[Any]
) -> fx.GraphModule:
    """Trace a function of fake tensors and sizes to a graph of ATen ops."""
    with torch.no_grad(), mode:
        return make_fx(function)(*fakes)
