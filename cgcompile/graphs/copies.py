"""Tensors of our own with the layout of others: staging for inputs, bridges, returned values.

Memory is made outside of inference mode, so that every later call may write it, whatever mode it
runs in. Layouts of any kind are kept: what is not contiguous is copied as the stretch of memory
that it spans.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.graphs.arena import Block, Frame


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
        block: the memory that it lies in.
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
            self.tensor = compat.with_bits(strided, template.is_conj(), template.is_neg())
        self._contiguous = template.is_contiguous() and not _has_bits(template)

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

    Args:
        template: a CPU tensor with the dtype.
        frame: where the memory comes from.
        device: where the buffer is.
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

    Tensors of one memory and one dtype share memory again.

    Args:
        tensors: what is copied; they stay where they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[int, torch.dtype], list[int]] = {}
        for position, tensor in enumerate(tensors):
            address = tensor.untyped_storage().data_ptr()
            alone = -1 - position  # memory of no size is shared with nobody
            groups.setdefault((address or alone, tensor.dtype), []).append(position)
        self._count = len(tensors)
        self._single: list[tuple[int, torch.Tensor]] = []
        self._shared: list[tuple[torch.Tensor, list[_Part]]] = []
        for members in groups.values():
            given = [tensors[position] for position in members]
            if len(given) == 1 and given[0].is_contiguous() and not _has_bits(given[0]):
                self._single.append((members[0], given[0]))
                continue
            first = min(tensor.storage_offset() for tensor in given)
            last = max(tensor.storage_offset() + span(tensor) for tensor in given)
            base = compat.physical(given[0]).as_strided((last - first,), (1,), first)
            parts = [_Part.of(position, tensors[position], first) for position in members]
            self._shared.append((base, parts))

    def make(self) -> list[torch.Tensor]:
        """The copies, on the current stream; the caller owns them."""
        found: list[torch.Tensor] = [None] * self._count  # type: ignore[list-item]
        for position, tensor in self._single:
            found[position] = tensor.clone()
        for base, parts in self._shared:
            copy = base.clone()
            for part in parts:
                view = copy.as_strided(part.size, part.stride, part.offset)
                found[part.position] = compat.with_bits(view, part.conjugate, part.negative)
        return found


class _Part(NamedTuple):
    """Where a tensor lies in the memory that several share."""

    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, position: int, tensor: torch.Tensor, first: Any) -> "_Part":
        offset = tensor.storage_offset() - first
        bits = (tensor.is_conj(), tensor.is_neg())
        return cls(position, tensor.size(), tensor.stride(), offset, *bits)


def _has_bits(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()
