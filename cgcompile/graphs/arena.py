"""Memory of our own at fixed addresses, for steps that never run at the same time: :class:`Arena`.

Staging of inputs and bridges are in it. Each recorded step takes blocks through a :class:`Frame`,
and all frames share the blocks: the step of the largest batch makes them, smaller ones use a
prefix. Within a step a block that was released serves the next buffer. The rule: a block is valid
until the next step of the same pool; one with an owner serves the results of its owner's steps
alone, and is valid until the next one of these. :class:`OwnedCopy` and :class:`FreshCopies` are
buffers with the layout of other tensors, of any kind: what is not contiguous is copied as the
stretch of memory that it spans. Memory is made outside of inference mode, so that every later call
may write it, whatever mode it runs in.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat

MIB = 2**20


class PoolBytes(NamedTuple):
    """Memory of one pool, in bytes."""

    held: int = 0  # taken from the device, in use or not
    live: int = 0  # of that, what tensors hold now
    small: int = 0  # of what is held, the part that is kept for small blocks

    def __add__(self, other: object) -> "PoolBytes":
        assert isinstance(other, PoolBytes)
        return PoolBytes(*(a + b for a, b in zip(self, other, strict=True)))


_ALIGNMENT = 256  # bytes; what CUDA's allocator gives


def address(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor begins; 0 if it has no memory."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else 0


class Block:
    """Bytes at a fixed address.

    Attributes:
        memory: uint8 [nbytes].
        poison: the byte that shows as NaN, or as a huge index, in what was stored last.
        lives: of tensors of the block that the program may hold.
        owner: the one whose results it serves alone; None for any use.
    """

    __slots__ = ("lives", "memory", "owner", "poison")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.poison = 0xFF
        self.lives: list[compat.StorageLife] = []
        self.owner: Hashable = None

    @property
    def is_lent(self) -> bool:
        """Whether a tensor that :meth:`lend` returned is still alive."""
        self.lives = [life for life in self.lives if not life.ended]
        return bool(self.lives)

    def lend(self, layout: torch.Tensor) -> torch.Tensor:
        """A tensor of the block with a life of its own: the block is in use while it lives."""
        lent = compat.weak_tensor(layout)
        self.lives.append(compat.StorageLife(lent))
        return lent

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def view(self, dtype: torch.dtype, size: Any, stride: Any, start: int = 0) -> torch.Tensor:
        """A tensor that begins ``start`` bytes into the block, outside of autograd."""
        self.poison = 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=self.memory.device)
            offset = start // dtype.itemsize
            return made.set_(self.memory.untyped_storage(), offset, size, stride)


class Arena:
    """All blocks of one pool."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def owns(self, address: int) -> bool:
        """Whether a storage that begins there is a block."""
        return any(block.address == address for block in self._blocks)

    def frame(self, owner: Hashable = None) -> "Frame":
        """Return a frame for one recorded step, whose results take blocks of its owner."""
        return Frame(self._blocks, owner)

    def owner_of(self, address: int) -> Hashable:
        """The owner of the block that begins there; None if there is none."""
        return next((block.owner for block in self._blocks if block.address == address), None)

    def free(self, owner: Hashable) -> None:
        """Drop the blocks of an owner that is gone; steps that use them keep them alive."""
        self._blocks[:] = [block for block in self._blocks if block.owner != owner]

    def poison(self, owner: Hashable = None) -> None:
        """Fill blocks with what shows: nothing may be read there before it is written.

        Args:
            owner: of the step that follows; results of other owners keep their values.
        """
        for block in self._blocks:
            if block.owner in (None, owner):
                block.memory.fill_(block.poison)

    def clear(self) -> None:
        """Drop all blocks; steps that use them keep them alive."""
        self._blocks = []


class Frame:
    """The blocks that one recorded step uses; it keeps them alive."""

    def __init__(self, blocks: list[Block], owner: Hashable = None) -> None:
        self._arena = blocks
        self._owner = owner
        self._free = [block for block in blocks if not block.is_lent]
        self._used: list[Block] = []

    def take(self, nbytes: int, device: torch.device, result: bool = False) -> Block:
        """Take the smallest free block that is large enough, or a new one.

        A ``result``, which the caller of the step gets, takes one of the owner.
        """
        owner = self._owner if result else None
        wanted = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        fitting = [
            b
            for b in self._free
            if b.nbytes >= wanted and b.memory.device == device and b.owner == owner
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

    def give(self, block: Block) -> None:
        """Let the block serve another buffer: nothing recorded from now on reads it."""
        self._free.append(block)

    def reserve(self, owner: Hashable) -> None:
        """Let the blocks of the step serve the results of an owner alone."""
        for block in self._used:
            block.owner = owner


def span(tensor: torch.Tensor) -> int:
    """How many elements of memory a tensor reaches over, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor reaches over, as one dimension."""
    return compat.physical(tensor).as_strided((span(tensor),), (1,))


def stretch(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """First and last byte that tensors of one memory reach, counted from where it begins."""
    starts = [t.storage_offset() * t.element_size() for t in tensors]
    ends = [s + span(t) * t.element_size() for s, t in zip(starts, tensors, strict=True)]
    largest = max(t.element_size() for t in tensors)
    return min(starts) // largest * largest, max(ends)


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as uint8 [bytes]."""
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def numbers_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as uint8 [bytes], in order, gaps left out: equal for equal bits."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that torch compares: it cannot for floats of eight bits."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.float() if narrow else tensor


class OwnedCopy:
    """A buffer with the layout of one tensor, refilled from others of the same layout.

    Args:
        template: what has the layout.
        frame: where the memory comes from.
        device: where the buffer is; that of the template if left out.
        result: the caller of the step gets the buffer.
        within: a block that several buffers share, and the byte of it where this one begins.

    Attributes:
        tensor: the buffer; its address never changes.
        block: the memory of the buffer.
    """

    __slots__ = ("_contiguous", "_flat", "block", "tensor")

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
        block, start = within or (frame.take(nbytes, device or template.device, result), 0)
        self.block: Block = block
        with torch.inference_mode(False), torch.no_grad():
            self._flat = block.view(template.dtype, (size,), (1,), start)
            strided = self._flat.as_strided(template.size(), template.stride())
            self.tensor = compat.with_bits(strided, *_bits(template))
        self._contiguous = template.is_contiguous() and not any(_bits(template))

    def fill(self, source: torch.Tensor) -> None:
        """Copy ``source``, on the current stream. The caller vouches for its layout."""
        if source.requires_grad:
            source = source.detach()
        if self._contiguous:
            self.tensor.copy_(source, non_blocking=True)
        else:
            self._flat.copy_(flat(source), non_blocking=True)


class ScalarCopy(OwnedCopy):
    """A 0-dim tensor on a device, refilled from 0-dim CPU tensors.

    A fill takes the value as a launch argument: it needs no pinned memory and does not synchronise.
    """

    def __init__(self, template: torch.Tensor, frame: Frame, device: torch.device) -> None:
        super().__init__(torch.empty((), dtype=template.dtype, device="meta"), frame, device)

    def fill(self, source: torch.Tensor) -> None:
        """Copy the value of ``source``, on the current stream."""
        self.tensor.fill_(source.detach() if source.requires_grad else source)


def moved(scalar: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a 0-dim CPU tensor on a device; one that is there is returned as it is."""
    if scalar.device == device:
        return scalar
    with torch.no_grad():
        return torch.empty((), dtype=scalar.dtype, device=device).fill_(scalar)


class FreshCopies:
    """Copies of tensors at fixed addresses, new at every call.

    The copies of tensors of one memory and one dtype share memory, too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[int, torch.dtype], list[int]] = {}
        for position, tensor in enumerate(tensors):
            address = tensor.untyped_storage().data_ptr()
            alone = -1 - position  # empty memory is not shared
            groups.setdefault((address or alone, tensor.dtype), []).append(position)
        self._count = len(tensors)
        self._single: list[tuple[int, torch.Tensor]] = []
        # Memory that several share; position, layout and bits of each of them.
        self._shared: list[tuple[torch.Tensor, list[tuple[int, Any, tuple[bool, bool]]]]] = []
        for members in groups.values():
            group = [tensors[position] for position in members]
            if len(group) == 1 and group[0].is_contiguous() and not any(_bits(group[0])):
                self._single.append((members[0], group[0]))
                continue
            first = min(tensor.storage_offset() for tensor in group)
            last = max(tensor.storage_offset() + span(tensor) for tensor in group)
            base = compat.physical(group[0]).as_strided((last - first,), (1,), first)
            layouts = [(t.size(), t.stride(), t.storage_offset() - first) for t in group]
            self._shared.append((base, [*zip(members, layouts, map(_bits, group), strict=True)]))

    def make(self) -> list[torch.Tensor]:
        """The copies, on the current stream; the caller owns them."""
        copies: list[torch.Tensor] = [None] * self._count  # type: ignore[list-item]
        for position, tensor in self._single:
            copies[position] = tensor.clone()
        for base, parts in self._shared:
            copy = base.clone()
            for position, layout, bits in parts:
                copies[position] = compat.with_bits(copy.as_strided(*layout), *bits)
        return copies


def _bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """The conjugate and the negative bit."""
    return tensor.is_conj(), tensor.is_neg()
