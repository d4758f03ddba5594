"""CUDA graphs, streams and raw memory. See ``cgcompile/compat/__init__.py``."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# ---------------------------------------------------------------- raw memory


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive.

    Equal address, shape, strides, dtype, and conjugate and negative bits; never an inference
    tensor, never requires grad. About 3 us, 4 in inference mode. Reading it after the memory is
    gone is undefined.
    """
    storage = tensor.untyped_storage()
    return laid_over(weak_storage(storage.data_ptr(), storage.nbytes(), tensor.device), tensor)


def weak_storage(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage of memory that it does not keep alive."""
    raw: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    found: torch.UntypedStorage = raw
    return found


def memory_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Raw memory as a uint8 tensor that does not keep it alive."""
    raw = weak_storage(address, nbytes, device)
    with outside_inference_mode():
        return torch.empty(0, dtype=torch.uint8, device=device).set_(raw, 0, (nbytes,), (1,))


def can_expire_storages() -> bool:
    """Whether this build of torch can make a storage raise; those without CUDA may not, to 2.13."""
    return hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


def expire_storage(storage: torch.UntypedStorage, text: str) -> None:
    """Let go of the memory of a storage: from now on reading or writing it raises RuntimeError."""
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, text)


def storage_identity(tensor: torch.Tensor) -> int:
    """Equal for tensors of one storage object, not of one memory, while it lives."""
    found: int = tensor.untyped_storage()._cdata
    return found


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """As :func:`weak_tensor`, but keeping the memory alive."""
    return laid_over(tensor.untyped_storage(), tensor)


def laid_over(storage: torch.UntypedStorage, layout: torch.Tensor) -> torch.Tensor:
    """A tensor of the layout of another, outside of inference mode and of autograd."""
    if torch.is_inference_mode_enabled():
        with torch._C._InferenceMode(False):
            return laid_over(storage, layout)
    conjugate, negative = layout.is_conj(), layout.is_neg()
    if type(layout) is not torch.Tensor or conjugate or negative:
        # A subclass has its own idea of ``new_empty``, and bits would be resolved there.
        found = torch.empty(0, dtype=layout.dtype, device=layout.device)
        found.set_(storage, layout.storage_offset(), layout.size(), layout.stride())
        return with_bits(found, conjugate, negative)
    found = layout.new_empty(0)
    return found.set_(storage, layout.storage_offset(), layout.size(), layout.stride())


def outside_inference_mode() -> AbstractContextManager[Any]:
    """A context in which new tensors are none of inference mode; a third of torch's own cost.

    Where it leaves inference mode, it turns grad mode on: for results that do not require grad.
    """
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    context: AbstractContextManager[Any] = torch._C._InferenceMode(False)
    return context


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers as they lie in memory: the tensor without its conjugate and negative bits."""
    if tensor.is_conj():
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def with_bits(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """A view of a physical tensor with these bits set."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


class StorageLife:
    """Tells whether the storage of a tensor is still alive, without keeping it so."""

    __slots__ = ("_weak",)

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._weak = StorageWeakRef(tensor.untyped_storage())

    @property
    def ended(self) -> bool:
        return self._weak.expired()


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a (fake) tensor is a dense tensor with one storage, and no subclass around others."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


_ITEMS_OF_TUPLE = tuple.__basicsize__  # CPython: where the items begin, from the tuple's address
_POINTER = ctypes.sizeof(ctypes.c_void_p)


class SameObjects:
    """Tells whether some places of a tuple hold other objects than they held.

    Meaningful while those objects live. Long stretches are compared as memory, see
    :func:`identities`.
    """

    _SHORT = 4

    def __init__(self, objects: tuple[Any, ...], stretches: list[tuple[int, int]]) -> None:
        every = identities(objects)
        self._single = [
            (place, id(objects[place]))
            for first, last in stretches
            if last - first <= self._SHORT
            for place in range(first, last)
        ]
        self._long = [
            (
                _ITEMS_OF_TUPLE + first * _POINTER,
                (ctypes.c_char * ((last - first) * _POINTER)).from_address,
                every[first * _POINTER : last * _POINTER],
            )
            for first, last in stretches
            if last - first > self._SHORT
        ]

    def differ(self, objects: tuple[Any, ...]) -> bool:
        """Whether a tuple of equal length holds another object in one of these places."""
        for place, was in self._single:
            if id(objects[place]) != was:
                return True
        items = id(objects)
        for start, memory_at, known in self._long:  # noqa: SIM110  (a generator costs a call)
            if memory_at(items + start).raw != known:
                return True
        return False


def identities(objects: tuple[Any, ...]) -> bytes:
    """The addresses of the objects in a tuple, as bytes: equal for the same objects in order.

    Meaningful while the objects live. Read from the tuple itself (CPython 3.10 to 3.14), which
    takes 0.5 us for 300 objects; ``id`` of each would take 13.
    """
    return ctypes.string_at(id(objects) + _ITEMS_OF_TUPLE, len(objects) * _POINTER)


_equal_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Addresses:
    """Tells whether the tensors in some places of a list are where they were.

    CUDA builds have a helper in C++ for it (2.11 to 2.15); elsewhere each is asked in turn.
    """

    def __init__(self, objects: Sequence[Any], places: Sequence[int]) -> None:
        self._places = list(places)
        self._known: list[int | None] = [None] * len(objects)  # by place, as the helper wants them
        for place in places:
            self._known[place] = objects[place].data_ptr()

    def hold(self, objects: Sequence[Any]) -> bool:
        """Whether all are still there."""
        if not self._places:
            return True
        if _equal_addresses is not None:
            return bool(_equal_addresses(list(objects), self._known, self._places))
        for place in self._places:  # noqa: SIM110  (a generator costs a call)
            if objects[place].data_ptr() != self._known[place]:
                return False
        return True


# ---------------------------------------------------------------- CUDA graphs


def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What replays an instantiated graph: torch's C++ method, without the Python in front of it.

    torch 2.15 has bookkeeping there for hooks and retained streams that our graphs do not use.
    """
    method = torch._C._CUDAGraph.replay
    bound: Callable[[], None] = method.__get__(graph)
    return bound


def drop_blas_workspaces() -> None:
    """Free the workspaces that torch caches for cuBLAS, one per handle and stream.

    Each is made again where it is needed next. 2.15 caches them only with
    ``TORCH_CUBLAS_WORKSPACE_CACHE=1``.
    """
    torch._C._cuda_clearCublasWorkspaces()


def raw_stream_of(device_index: int) -> Callable[[], int]:
    """What tells the handle of the current stream of a device; equal numbers, same stream."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device_index)


class OnStream:
    """Context manager: ``torch.cuda.stream``, at a tenth of its cost; for CUDA that is initialised.

    Where another device than the stream's is current, it is torch's own context.
    """

    __slots__ = ("_before", "_stream", "_torchs")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._torchs: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        stream = self._stream
        if torch._C._cuda_getDevice() != stream.device_index:
            self._torchs = torch.cuda.stream(stream)
            self._torchs.__enter__()
            return
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: Any) -> None:
        if self._torchs is not None:
            self._torchs.__exit__(*error)
        else:
            _set_stream(*self._before)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def cuda_is_capturing() -> bool:
    """Whether the current CUDA stream of this thread is being captured; builds without CUDA: no."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Whether the current CUDA stream of this thread is being captured. For an initialised device only.
cuda_stream_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def _segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """What the allocator tells of the memory of a private pool.

    Asks for all pools: in 2.11 ``torch.cuda.memory_snapshot(pool)`` gives up a reference to a tuple
    that it does not own, which crashes the process later (2.15 has it mended).
    """
    found = torch._C._cuda_memorySnapshot(None)["segments"]
    return [each for each in found if tuple(each["segment_pool_id"]) == tuple(pool)]


def pool_segments(pool: tuple[int, int]) -> list[tuple[int, int]]:
    """(address, bytes) of the memory that a private pool holds."""
    return [(each["address"], each["total_size"]) for each in _segments(pool)]


def free_blocks(pool: tuple[int, int]) -> list[tuple[int, int]]:
    """(address, bytes) of the memory of a private pool that no tensor holds."""
    found = []
    for segment in _segments(pool):
        start = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                found.append((start, block["size"]))
            start += block["size"]
    return found


def pool_bytes(pool: tuple[int, int]) -> tuple[int, int, int]:
    """Bytes that a private pool holds: all, those in use, and all in segments for small blocks."""
    found = _segments(pool)
    small = [each["total_size"] for each in found if each["segment_type"] == "small"]
    used = sum(each["allocated_size"] for each in found)
    return sum(each["total_size"] for each in found), used, sum(small)


def stop_allocating_to(device_index: int, pool: tuple[int, int]) -> None:
    """Undo what a capture that broke left in the allocator.

    It still routes to the pool, and counts the capture as a user of it; unless the capture has told
    it itself, or never began. Tried on 2.11.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release = getattr(torch._C, "_cuda_releasePool", None)
    if end is None or release is None:
        return
    try:
        end(device_index, pool)
    except RuntimeError:
        return  # nothing of this capture is routed, so nothing is counted
    with suppress(RuntimeError):
        release(device_index, pool)
