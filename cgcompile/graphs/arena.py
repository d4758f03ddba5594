"""Memory of our own at fixed addresses, for steps that never run at the same time: :class:`Arena`.

Staging of inputs and bridges are in it. Each recorded step takes blocks through a :class:`Frame`,
and all frames share the blocks: the step of the largest batch makes them, smaller ones use a
prefix. Within a step a block that was released serves the next buffer. The rule: a block is valid
until the next step of the same pool; one with an owner serves the results of its owner's steps
alone, and is valid until the next one of these. Memory is allocated outside of inference mode, so
that later calls may write it in any mode.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from cgcompile.torch_compat import raw_memory

MIB = 2**20
_ALIGNMENT = 256  # bytes; what CUDA's allocator gives


def address(tensor: torch.Tensor) -> int:
    """Return where the storage of a tensor begins; 0 if it has no memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


class Block:
    """Bytes at a fixed address."""

    __slots__ = ("lives", "memory", "owner", "poison")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.poison = 0xFF  # the byte that makes NaN, or a huge index, of what was stored last
        self.lives: list[raw_memory.StorageLife] = []  # of tensors that the program may hold
        self.owner: Hashable = None  # owner of the results that it may hold; None: any buffer

    @property
    def in_use(self) -> bool:
        """Whether a tensor that :meth:`alias` returned is still alive."""
        self.lives = [life for life in self.lives if not life.ended]
        return bool(self.lives)

    def alias(self, layout: torch.Tensor) -> torch.Tensor:
        """Return a new tensor over the block; the block is in use while the tensor is alive."""
        tensor = raw_memory.weak_tensor(layout)
        self.lives.append(raw_memory.StorageLife(tensor))
        return tensor

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def view(self, dtype: torch.dtype, size: Any, stride: Any, start: int = 0) -> torch.Tensor:
        """Return a tensor that begins ``start`` bytes into the block, outside of autograd."""
        self.poison = 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty(0, dtype=dtype, device=self.memory.device)
            offset = start // dtype.itemsize
            return tensor.set_(self.memory.untyped_storage(), offset, size, stride)


class Arena:
    """All blocks of one pool."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def owns(self, address: int) -> bool:
        """Return whether a storage that begins at an address is a block."""
        return any(block.address == address for block in self._blocks)

    def frame(self, owner: Hashable = None) -> "Frame":
        """Return a frame for one recorded step, whose results take blocks of its owner."""
        return Frame(self._blocks, owner)

    def owner_of(self, address: int) -> Hashable:
        """Return the owner of the block that begins at an address; None if there is none."""
        return next((block.owner for block in self._blocks if block.address == address), None)

    def drop(self, owner: Hashable) -> None:
        """Drop the blocks of a dropped owner; steps that use them keep them alive."""
        self._blocks[:] = [block for block in self._blocks if block.owner != owner]

    def poison(self, owner: Hashable = None) -> None:
        """Fill the blocks with NaN before a step of an owner, except results of other owners."""
        for block in self._blocks:
            if block.owner in (None, owner):
                block.memory.fill_(block.poison)

    def release(self) -> None:
        """Drop all blocks; steps that use them keep them alive."""
        self._blocks = []


class Frame:
    """The blocks that one recorded step uses; it keeps them alive."""

    def __init__(self, blocks: list[Block], owner: Hashable = None) -> None:
        self._arena = blocks
        self._owner = owner
        self._free = [block for block in blocks if not block.in_use]
        self._used: list[Block] = []

    def allocate(self, nbytes: int, device: torch.device, result: bool = False) -> Block:
        """Return the smallest free block that is large enough, or a new one."""
        owner = self._owner if result else None
        wanted = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        fitting = [
            block
            for block in self._free
            if block.nbytes >= wanted and block.memory.device == device and block.owner == owner
        ]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(block)
        else:
            block = Block(wanted, device)
            block.owner = owner
            self._arena.append(block)
        self._used.append(block)
        return block

    def release(self, block: Block) -> None:
        """Free the block for another buffer: no segment recorded from now on reads it."""
        self._free.append(block)

    def reserve(self, owner: Hashable) -> None:
        """Reserve the blocks of the step for the results of one owner."""
        for block in self._used:
            block.owner = owner


def span(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last of a tensor, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def dense_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions, outermost first, of a layout without gaps or overlaps, else None."""
    dims = range(len(shape))
    order = sorted((dim for dim in dims if shape[dim] != 1), key=strides.__getitem__, reverse=True)
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return None
        expected *= max(shape[dim], 1)
    if order == sorted(order):
        return tuple(dims)
    return (*(dim for dim in dims if shape[dim] == 1), *order)


def stretch(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Return the first and last byte that tensors reach, counted from where their memory begins."""
    starts = [t.storage_offset() * t.element_size() for t in tensors]
    ends = [s + span(t) * t.element_size() for s, t in zip(starts, tensors, strict=True)]
    largest = max(t.element_size() for t in tensors)
    return min(starts) // largest * largest, max(ends)


def numbers_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor, without gaps, as uint8 [bytes]: equal for equal bits."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in a dtype that torch compares: it cannot for floats of eight bits."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.float() if narrow else tensor


def rows_apart(tensor: torch.Tensor) -> bool:
    """Return whether rows have separate memory; rows that were expanded or unfolded share it."""
    if tensor.is_contiguous():
        return True
    reach = 0
    for dim in sorted(range(tensor.dim()), key=tensor.stride):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size > 1 and (stride or not dim):  # a column may be repeated
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def takes_any_layout(tensor: torch.Tensor) -> bool:
    """Return whether a copy in the layout of a tensor can be filled from another layout."""
    return not (any(bits_of(tensor)) or 0 in tensor.stride() or not rows_apart(tensor))


class OwnedCopy:
    """A buffer at a fixed address, with the layout of one tensor, for copies of inputs."""

    # A tensor with gaps or overlaps is copied as one range of bytes, from its first to its last.

    __slots__ = ("_flat", "_is_dense", "block", "takes_any_layout", "tensor")

    def __init__(
        self,
        template: torch.Tensor,
        frame: Frame,
        device: torch.device | None = None,
        result: bool = False,
        within: tuple[Block, int] | None = None,
    ) -> None:
        size = span(template)
        nbytes = size * template.element_size()
        block, start = within or (frame.allocate(nbytes, device or template.device, result), 0)
        self.block: Block = block
        with torch.inference_mode(False), torch.no_grad():
            self._flat = block.view(template.dtype, (size,), (1,), start)
            strided = self._flat.as_strided(template.size(), template.stride())
            self.tensor = raw_memory.with_bits(strided, *bits_of(template))
        order = dense_order(template.shape, template.stride())
        self._is_dense = order is not None and not any(bits_of(template))
        self.takes_any_layout = self._is_dense or takes_any_layout(template)

    def fill(self, source: torch.Tensor) -> None:
        """Copy ``source``, on the current stream; of the same layout, unless it takes any."""
        if source.requires_grad:
            source = source.detach()
        if self._is_dense or (self.takes_any_layout and source.stride() != self.tensor.stride()):
            self.tensor.copy_(source, non_blocking=True)
        else:
            memory = raw_memory.physical(source).as_strided(self._flat.shape, (1,))
            self._flat.copy_(memory, non_blocking=True)


class ScalarCopy(OwnedCopy):
    """A 0-dim tensor on a device, refilled from 0-dim CPU tensors."""

    def __init__(self, template: torch.Tensor, frame: Frame, device: torch.device) -> None:
        super().__init__(torch.empty((), dtype=template.dtype, device="meta"), frame, device)

    def fill(self, source: torch.Tensor) -> None:
        """Copy the value of ``source``, on the current stream: it needs no pinned memory."""
        if source.requires_grad:
            source = source.detach()
        self.tensor.fill_(source)


def moved(scalar: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a 0-dim CPU tensor as a tensor on a device; unchanged if it is there."""
    if scalar.device == device:
        return scalar
    with torch.no_grad():
        return torch.empty((), dtype=scalar.dtype, device=device).fill_(scalar)


def bits_of(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return the conjugate and the negative bit."""
    return tensor.is_conj(), tensor.is_neg()
