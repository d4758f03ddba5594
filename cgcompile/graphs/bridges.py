"""How results of an eager segment reach the graph segments that read them.

A graph reads the address it saw. A fresh tensor is copied into a buffer of ours, the bridge;
several that share memory cross together, so that they still share it; a tensor in memory at a fixed
address is checked to be there again; a value that is no tensor must be the same again, and so must
a CPU tensor in a graph of another device, if captured code reads it. A *crossing*
is called with the list of results and puts in place what the graphs read.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.graphs.arena import Block, Frame, OwnedCopy, address, numbers_as_bytes, stretch
from cgcompile.graphs.guards import layout_text, same_layout, same_value
from cgcompile.graphs.sequence import Crossing


class Place(NamedTuple):
    """One result of an eager segment, for messages."""

    segment: str
    batch: str
    item: int
    name: str

    def changed(self, now: Any, before: Any) -> HostValueChangedError:
        return HostValueChangedError.changed(
            what=self.segment,
            batch=self.batch,
            path=f"result {self.item} {self.name!r}",
            now=now,
            before=before,
        )

    def moved(self, now: int, before: int) -> AddressChangedError:
        path = f"result {self.item} {self.name!r}"
        return AddressChangedError.moved(
            what=self.segment, batch=self.batch, path=path, now=now, before=before
        )


class Bridged(NamedTuple):
    """What :func:`crossings` found.

    Attributes:
        crossings: to be called with the results, in order.
        blocks: the memory of each bridge, with the names of the results that cross in it.
    """

    crossings: list[Crossing]
    blocks: list[tuple[Block, list[str]]]

    @property
    def replaced(self) -> set[str]:
        """The names of the results that a bridge takes the place of."""
        return {name for _, names in self.blocks for name in names}


def crossings(
    places: Sequence[Place],
    made: Sequence[Any],
    read: Collection[str],
    lasting: Collection[str],
    fixed: set[int],
    frame: Frame,
) -> Bridged:
    """What brings the results of an eager segment across.

    Args:
        places: of all results.
        made: the results of the recorded step.
        read: names of the results that are read at a fixed address.
        lasting: names of the results whose memory, if it is at a fixed address, must stay there.
        fixed: where memory at fixed addresses begins; bridges are added.
        frame: where bridges take memory.
    """
    found = Bridged([], [])
    fresh: dict[int, list[Place]] = {}
    for place in places:
        value = made[place.item]
        if not isinstance(value, torch.Tensor):
            if place.name in read:
                found.crossings.append(_SameValue(place, value))
        elif address(value) in fixed:
            if place.name in read or place.name in lasting:
                found.crossings.append(_SameAddress(place, value))
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
        found.crossings.append(bridge)
        found.blocks.append((bridge.block, [place.name for place in members]))
        fixed.add(bridge.block.address)
    return found


class _Bridge:
    """Copies a fresh result to where the graphs after it read."""

    def __init__(self, place: Place, made: torch.Tensor, frame: Frame, result: bool) -> None:
        self._place = place
        self._buffer = OwnedCopy(made, frame, result=result)
        self.block = self._buffer.block

    def __call__(self, made: list[Any]) -> None:
        value, buffer = made[self._place.item], self._buffer
        if not same_layout(value, buffer.tensor):
            raise self._place.changed(layout_text(value), layout_text(buffer.tensor))
        buffer.fill(value)
        made[self._place.item] = buffer.tensor


class _SharedBridge:
    """Copies the stretch of memory that several fresh results share."""

    def __init__(
        self, places: Sequence[Place], made: Sequence[Any], frame: Frame, result: bool
    ) -> None:
        self._places = places
        given = [made[place.item] for place in places]
        first, last = stretch(given)
        self._starts = _offsets(given, first)
        self.block = frame.take(last - first, given[0].device, result)
        self._memory = self.block.memory[: last - first]
        self._views = [
            _laid_over(self.block, value, start)
            for value, start in zip(given, self._starts, strict=True)
        ]

    def __call__(self, made: list[Any]) -> None:
        given = [made[place.item] for place in self._places]
        for place, value, view in zip(self._places, given, self._views, strict=True):
            if not same_layout(value, view):
                raise place.changed(layout_text(value), layout_text(view))
        first, last = stretch(given)
        one_memory = len({address(value) for value in given}) == 1
        if not one_memory or _offsets(given, first) != self._starts:
            raise self._places[0].changed("memory shared in another way", "not")
        source = torch.empty(0, dtype=torch.uint8, device=given[0].device)
        source.set_(given[0].untyped_storage(), first, (last - first,), (1,))
        self._memory.copy_(source, non_blocking=True)
        for place, view in zip(self._places, self._views, strict=True):
            made[place.item] = view


def _laid_over(block: Block, layout: torch.Tensor, start: int) -> torch.Tensor:
    """A tensor of some layout that begins at a byte of a block."""
    made = block.view(layout.dtype, layout.size(), layout.stride(), start)
    with torch.inference_mode(False), torch.no_grad():
        return compat.with_bits(made, layout.is_conj(), layout.is_neg())


def _offsets(given: Sequence[torch.Tensor], first: int) -> list[Any]:
    """Where each tensor begins, in bytes after ``first``."""
    return [value.storage_offset() * value.element_size() - first for value in given]


class _SameAddress:
    """A result that lies in memory at a fixed address, such as an argument's."""

    def __init__(self, place: Place, made: torch.Tensor) -> None:
        self._place = place
        self._address = made.data_ptr()
        self._layout = torch.empty_strided(
            made.size(), made.stride(), dtype=made.dtype, device="meta"
        )
        self._bits = (made.is_conj(), made.is_neg())

    def __call__(self, made: list[Any]) -> None:
        value = made[self._place.item]
        if not isinstance(value, torch.Tensor):
            raise self._place.changed(layout_text(value), layout_text(self._layout))
        if value.data_ptr() != self._address:
            raise self._place.moved(value.data_ptr(), self._address)
        own = self._layout
        same = (value.shape, value.stride(), value.dtype) == (own.shape, own.stride(), own.dtype)
        if not same or (value.is_conj(), value.is_neg()) != self._bits:
            raise self._place.changed(layout_text(value), layout_text(own))


class _SameValue:
    """A result that is no tensor: the graph after it has recorded it."""

    def __init__(self, place: Place, made: Any) -> None:
        self._place = place
        self._made = made

    def __call__(self, made: list[Any]) -> None:
        value = made[self._place.item]
        if not same_value(value, self._made):
            raise self._place.changed(repr(value), repr(self._made))


class SameOnHost:
    """A CPU tensor in a graph of another device: captured code that reads it bakes its value in.

    Attributes:
        is_read: whether captured code has read it; may be set.
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
        if not same_layout(value, self._made):
            raise self._place.changed(layout_text(value), layout_text(self._made))
        if not torch.equal(numbers_as_bytes(value), self._bytes):
            raise self._place.changed(value.tolist(), self._made.tolist())
