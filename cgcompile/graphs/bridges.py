"""How results of an eager segment reach the graph segments that read them.

A graph reads the address of the capture. A fresh tensor is copied into a block of the arena, the
bridge; several that share memory cross together, so that they still share it; a tensor in memory at
a fixed address must have that address; a value that is no tensor must be the same, and so must a
CPU tensor in a graph of another device, if captured code reads it. A *crossing* is called with the
list of results and replaces those that have a bridge.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.graphs.arena import Block, Frame, OwnedCopy, address, numbers_as_bytes, stretch
from cgcompile.graphs.guards import Placed, layout_text, same_layout, same_value
from cgcompile.graphs.sequence import Crossing


class Place(NamedTuple):
    """One result of an eager segment, for messages."""

    segment: str
    batch: str
    item: int
    name: str

    @property
    def path(self) -> str:
        return f"result {self.item} {self.name!r}"

    def changed(self, now: Any, before: Any) -> HostValueChangedError:
        return HostValueChangedError.changed(
            what=self.segment, batch=self.batch, path=self.path, now=now, before=before
        )

    def moved(self, now: int, before: int) -> AddressChangedError:
        return AddressChangedError.moved(
            what=self.segment, batch=self.batch, path=self.path, now=now, before=before
        )

    def check_layout(self, value: Any, expected: torch.Tensor) -> None:
        if not same_layout(value, expected):
            raise self.changed(layout_text(value), layout_text(expected))


class Bridged(NamedTuple):
    """The crossings of a segment, in order, and each bridge with the results that cross in it."""

    crossings: list[Crossing]
    blocks: list[tuple[Block, list[str]]]

    @property
    def replaced(self) -> set[str]:
        """The names of the results that a bridge replaces."""
        return {name for _, names in self.blocks for name in names}


def crossings(
    places: Sequence[Place],
    made: Sequence[Any],
    read: Collection[str],
    lasting: Collection[str],
    fixed: set[int],
    frame: Frame,
) -> Bridged:
    """Return the crossings of the results of an eager segment.

    Args:
        places: of all results.
        made: the results of the recorded step.
        read: names of the results that are read at a fixed address.
        lasting: names of the results whose memory, if it is at a fixed address, must stay there.
        fixed: where memory at fixed addresses begins; bridges are added.
        frame: where bridges take memory.
    """
    across = Bridged([], [])
    fresh: dict[int, list[Place]] = {}
    for place in places:
        value = made[place.item]
        if not isinstance(value, torch.Tensor):
            if place.name in read:
                across.crossings.append(_SameValue(place, value))
        elif address(value) in fixed:
            if place.name in read or place.name in lasting:
                across.crossings.append(_SameAddress(place, value))
        else:
            fresh.setdefault(address(value) or -1 - place.item, []).append(place)
    for members in fresh.values():
        if not any(place.name in read for place in members):
            continue
        bridge: _Bridge | _SharedBridge
        result = any(place.name in lasting for place in members)
        if len(members) == 1:
            bridge = _Bridge(members[0], made[members[0].item], frame, result)
        else:
            bridge = _SharedBridge(members, made, frame, result)
        across.crossings.append(bridge)
        across.blocks.append((bridge.block, [place.name for place in members]))
        fixed.add(bridge.block.address)
    return across


class _Bridge:
    """Copy a fresh result to where the graphs after it read."""

    def __init__(self, place: Place, made: torch.Tensor, frame: Frame, result: bool) -> None:
        self._place = place
        self._buffer = OwnedCopy(made, frame, result=result)
        self.block = self._buffer.block

    def __call__(self, made: list[Any]) -> None:
        value, buffer = made[self._place.item], self._buffer
        self._place.check_layout(value, buffer.tensor)
        buffer.fill(value)
        made[self._place.item] = buffer.tensor


class _SharedBridge:
    """Copy the stretch of memory that several fresh results share."""

    def __init__(
        self, places: Sequence[Place], made: Sequence[Any], frame: Frame, result: bool
    ) -> None:
        self._places = places
        values = [made[place.item] for place in places]
        first, last = stretch(values)
        self._starts = _offsets(values, first)
        self.block = frame.take(last - first, values[0].device, result)
        self._memory = self.block.memory[: last - first]
        self._views = [
            _laid_over(self.block, value, start)
            for value, start in zip(values, self._starts, strict=True)
        ]

    def __call__(self, made: list[Any]) -> None:
        values = [made[place.item] for place in self._places]
        for place, value, view in zip(self._places, values, self._views, strict=True):
            place.check_layout(value, view)
        first, last = stretch(values)
        one_memory = len({address(value) for value in values}) == 1
        if not one_memory or _offsets(values, first) != self._starts:
            raise self._places[0].changed("memory shared in another way", "not")
        source = torch.empty(0, dtype=torch.uint8, device=values[0].device)
        source.set_(values[0].untyped_storage(), first, (last - first,), (1,))
        self._memory.copy_(source, non_blocking=True)
        for place, view in zip(self._places, self._views, strict=True):
            made[place.item] = view


def _laid_over(block: Block, layout: torch.Tensor, start: int) -> torch.Tensor:
    """A tensor of some layout that begins at a byte of a block."""
    made = block.view(layout.dtype, layout.size(), layout.stride(), start)
    with torch.inference_mode(False), torch.no_grad():
        return compat.with_bits(made, layout.is_conj(), layout.is_neg())


def _offsets(tensors: Sequence[torch.Tensor], first: int) -> list[Any]:
    """Where each tensor begins, in bytes after ``first``."""
    return [tensor.storage_offset() * tensor.element_size() - first for tensor in tensors]


class _SameAddress:
    """Check a result that is memory at a fixed address, such as an argument's."""

    def __init__(self, place: Place, made: torch.Tensor) -> None:
        self._place = place
        self._before = Placed.of(made)

    def __call__(self, made: list[Any]) -> None:
        value, before = made[self._place.item], self._before
        if isinstance(value, torch.Tensor):
            now = Placed.of(value)
            if now == before:
                return
            if now.address != before.address:
                raise self._place.moved(now.address, before.address)
        raise self._place.changed(layout_text(value), layout_text(before))


class _SameValue:
    """Check a result that is no tensor: the graph after it has recorded it."""

    def __init__(self, place: Place, made: Any) -> None:
        self._place = place
        self._made = made

    def __call__(self, made: list[Any]) -> None:
        value = made[self._place.item]
        if not same_value(value, self._made):
            raise self._place.changed(repr(value), repr(self._made))


class SameOnHost:
    """Check a CPU tensor in a graph of another device, whose value captured code bakes in.

    Only if captured code reads it: ``is_read`` is set then.
    """

    def __init__(self, place: Place, made: torch.Tensor) -> None:
        self.is_read = False
        self._place = place
        self._made = made.detach().clone()
        self._bytes = numbers_as_bytes(self._made)

    def __call__(self, made: list[Any]) -> None:
        if not self.is_read:
            return
        value = made[self._place.item]
        self._place.check_layout(value, self._made)
        if not torch.equal(numbers_as_bytes(value), self._bytes):
            raise self._place.changed(value.tolist(), self._made.tolist())
