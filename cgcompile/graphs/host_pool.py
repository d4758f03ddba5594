"""Memory of host graphs: blocks that are used again as soon as no tensor holds them.

The private pools of CUDA's caching allocator behave like this. A block that a capture hands out is
filled with poison, when it is handed out and when the capture ends, so that reading memory that no
replay has written shows.
"""

import ctypes
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from cgcompile import compat

_ALIGNMENT = 64  # what vectorised kernels ask for


class _Block:
    """Bytes, and who lives in them now."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = (ctypes.c_char * (nbytes + _ALIGNMENT))()
        self._start = -ctypes.addressof(self._buffer) % _ALIGNMENT
        self.nbytes = nbytes
        self.address = ctypes.addressof(self._buffer) + self._start
        self.life: compat.StorageLife | None = None
        self.dtype = torch.uint8

    def bytes(self, nbytes: int) -> torch.Tensor:
        """The first bytes as a tensor of a storage of its own, which keeps the memory."""
        with torch.inference_mode(False):
            return torch.frombuffer(
                self._buffer, dtype=torch.uint8, count=nbytes, offset=self._start
            )

    @property
    def free(self) -> bool:
        return self.life is None or self.life.ended

    def poison(self) -> None:
        """NaN for floating numbers, a huge number for integers, True for bools."""
        value = 0x7F
        if self.dtype.is_floating_point or self.dtype.is_complex:
            value = 0xFF
        elif self.dtype is torch.bool:
            value = 1
        ctypes.memset(self.address, value, self.nbytes)


class Life(Protocol):
    """Tells whether memory has been freed."""

    @property
    def ended(self) -> bool: ...


class _PoolLife:
    """The life of memory in a pool: until the pool is dropped, whichever tensors view it."""

    def __init__(self, pool: "HostPool") -> None:
        self._pool = weakref.ref(pool)

    @property
    def ended(self) -> bool:
        return self._pool() is None


# All pools that exist, as CUDA's allocator knows its private pools.
_pools: "weakref.WeakSet[HostPool]" = weakref.WeakSet()


def life_of(tensor: torch.Tensor) -> Life:
    """Return what tells when the memory of a tensor is freed."""
    start = tensor.untyped_storage().data_ptr()
    pool = next((pool for pool in list(_pools) if pool.holds(start)), None)
    return compat.StorageLife(tensor) if pool is None else _PoolLife(pool)


def nowhere(address: int) -> bool:
    """No other memory lives as long as a pool."""
    return False


class HostPool:
    """Blocks for graphs that never run at the same time.

    Args:
        lasting: tells of an address whether other memory begins there that lives as long.
    """

    def __init__(self, lasting: Callable[[int], bool] = nowhere) -> None:
        _pools.add(self)
        self._lasting = lasting
        self._blocks: list[_Block] = []
        self._handed_out: set[_Block] = set()
        self._data: dict[_Block, bytes | None] = {}  # in use when the capture began

    @property
    def reserved(self) -> int:
        """Bytes of all blocks, in use or not."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def live(self) -> int:
        """Bytes of the blocks that some tensor holds."""
        return sum(block.nbytes for block in self._blocks if not block.free)

    def holds(self, address: int) -> bool:
        return any(b.address <= address < b.address + b.nbytes for b in self._blocks)

    def lasts(self, address: int) -> bool:
        """Whether memory that begins there lives as long as the pool."""
        return self.holds(address) or self._lasting(address)

    def begin(self) -> None:
        """A capture begins."""
        self._handed_out.clear()
        self._data = {block: None for block in self._blocks if not block.free}

    def end(self) -> None:
        """A capture ends: what it allocated holds nothing yet.

        Memory that was in use when it began, was freed and used again, holds what it held: the
        capture may have read it before.
        """
        for block in self._handed_out:
            data = self._data.get(block)
            if data is None:
                block.poison()
            else:
                ctypes.memmove(block.address, data, block.nbytes)
        self._data.clear()

    def poison(self, kept: list[tuple[int, int]] | None = None) -> None:
        """Nothing that the blocks hold is good any more.

        Args:
            kept: left as they are, and so is what tensors hold: (address, bytes); None: nothing is.
        """
        starts = {start for start, _ in kept or ()}
        for block in self._blocks:
            if kept is None or (block.free and block.address not in starts):
                block.poison()

    def allocate(self, nbytes: int, dtype: torch.dtype) -> torch.UntypedStorage:
        """Memory for a tensor; the smallest free block that is large enough, else a new one.

        The storage that is returned keeps the block in use while it lives.
        """
        wanted = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        fitting = [b for b in self._blocks if b.free and b.nbytes >= wanted]
        block = min(fitting, key=lambda b: b.nbytes, default=None)
        if block is None:
            block = _Block(wanted)
            self._blocks.append(block)
        if block in self._data and self._data[block] is None:
            self._data[block] = ctypes.string_at(block.address, block.nbytes)
        block.dtype = dtype
        block.poison()
        self._handed_out.add(block)
        tensor = block.bytes(nbytes)
        block.life = compat.StorageLife(tensor)
        return tensor.untyped_storage()
