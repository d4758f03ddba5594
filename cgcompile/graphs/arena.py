"""Memory of our own at fixed addresses for steps that never run at the same time: :class:`Arena`.

Staging of inputs and bridges live here. Each recorded step takes blocks through a :class:`Frame`,
and all frames share the blocks: the step of the largest batch makes them, smaller ones use a
prefix. Within a step a block that is given back serves the next taker. The rule: what lies in a
block is valid until the next step of the same pool. A block with an owner serves the results of its
owner's steps alone: what lies there is valid until the next one of these.
"""

from collections.abc import Hashable
from typing import Any

import torch

from cgcompile import compat

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
        lives: of what was lent outside of any recorded step.
        owner: whose results it serves alone; None for any use.
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
        """Whether somebody still holds what was lent."""
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
        """For one recorded step; results of a step with an owner take blocks of that owner."""
        return Frame(self._blocks, owner)

    def owner_of(self, address: int) -> Hashable:
        """The owner of the block that begins there; None if there is none."""
        return next((each.owner for each in self._blocks if each.address == address), None)

    def free(self, owner: Hashable) -> None:
        """Drop the blocks of an owner that is gone; steps that use them still keep them."""
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
        """Let the blocks go, once the steps that use them have gone."""
        self._blocks = []


class Frame:
    """The blocks that one recorded step uses; it keeps them.

    Args:
        blocks: of the arena; new ones are added.
        owner: of the blocks that results take; None: results take blocks without one, as all else.
    """

    def __init__(self, blocks: list[Block], owner: Hashable = None) -> None:
        self._arena = blocks
        self._owner = owner
        self._free = [block for block in blocks if not block.is_lent]
        self._used: list[Block] = []

    def take(self, nbytes: int, device: torch.device, result: bool = False) -> Block:
        """The smallest free block that is large enough; a new one if there is none.

        Args:
            nbytes: how large it must be.
            device: where.
            result: the caller of the step gets what lies there.
        """
        owner = self._owner if result else None
        wanted = max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
        fitting = [
            b
            for b in self._free
            if b.nbytes >= wanted and b.memory.device == device and b.owner == owner
        ]
        if fitting:
            found = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(found)
        else:
            found = Block(wanted, device)
            found.owner = owner
            self._arena.append(found)
        self._used.append(found)
        return found

    def give(self, block: Block) -> None:
        """Nothing that is recorded from now on reads the block: it may serve something else."""
        self._free.append(block)

    def reserve(self, owner: Hashable) -> None:
        """Let the blocks that the step uses serve the results of an owner alone."""
        for block in self._used:
            block.owner = owner
