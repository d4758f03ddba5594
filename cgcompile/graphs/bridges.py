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

from cgcompile.errors import AddressChangedError, GuardError
from cgcompile.graphs.arena import Block, Frame, OwnedCopy, address, numbers_as_bytes, stretch
from cgcompile.graphs.guards import Change, Placed, layout_text, same_layout, same_value
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

    def changed(self, now: Any, before: Any) -> GuardError:
        return Change(self.path, before, now).error(self.segment, self.batch)

    def moved(self, now: int, before: int) -> AddressChangedError:
        return AddressChangedError.moved(
            what=self.segment, batch=self.batch, path=self.path, now=now, before=before
        )

    def check_layout(self, value: Any, expected: torch.Tensor) -> None:
        if not same_layout(value, expected):
            raise self.changed(layout_text(value), layout_text(expected))


Bridges = list[tuple[Block, list[str]]]
"""Bridges, each with the names of the results that cross in it."""


def crossings(
    places: Sequence[Place],
    made: Sequence[Any],
    read: Collection[str],  # names of the results that are read at a fixed address
    lasting: Collection[str],  # those that must stay where they are, if that is fixed
    fixed: set[int],  # fixed addresses; those of the bridges are added
    frame: Frame,
) -> tuple[list[Crossing], Bridges]:
    """Return the crossings of results that had the values ``made``, and their bridges."""
    across: list[Crossing] = []
    bridges: Bridges = []
    fresh: dict[int, list[Place]] = {}
    for place in places:
        value = made[place.item]
        if not isinstance(value, torch.Tensor):
            if place.name in read:
                across.append(_same_value(place, value))
        elif address(value) in fixed:
            if place.name in read or place.name in lasting:
                across.append(_same_address(place, value))
        else:
            fresh.setdefault(address(value) or -1 - place.item, []).append(place)
    for members in fresh.values():
        if any(place.name in read for place in members):
            result = any(place.name in lasting for place in members)
            values = [made[place.item] for place in members]
            if len(members) == 1:
                block, crossing = _bridge(members[0], values[0], frame, result)
            else:
                block, crossing = _shared_bridge(members, values, frame, result)
            across.append(crossing)
            bridges.append((block, [place.name for place in members]))
            fixed.add(block.address)
    return across, bridges


def _bridge(
    place: Place, value: torch.Tensor, frame: Frame, result: bool
) -> tuple[Block, Crossing]:
    """Return what copies a fresh result to where the graphs after it read."""
    buffer = OwnedCopy(value, frame, result=result)

    def cross(results: list[Any]) -> None:
        value = results[place.item]
        place.check_layout(value, buffer.tensor)
        buffer.fill(value)
        results[place.item] = buffer.tensor

    return buffer.block, cross


def _shared_bridge(
    places: Sequence[Place], values: Sequence[torch.Tensor], frame: Frame, result: bool
) -> tuple[Block, Crossing]:
    """Return what copies the stretch of memory that several fresh results share."""
    first, last = stretch(values)
    starts = _offsets(values, first)
    block = frame.allocate(last - first, values[0].device, result)
    memory = block.memory[: last - first]
    views = [
        OwnedCopy(value, frame, within=(block, start)).tensor
        for value, start in zip(values, starts, strict=True)
    ]

    def cross(results: list[Any]) -> None:
        values = [results[place.item] for place in places]
        for place, value, view in zip(places, values, views, strict=True):
            place.check_layout(value, view)
        first, last = stretch(values)
        one_memory = len({address(value) for value in values}) == 1
        if not one_memory or _offsets(values, first) != starts:
            raise places[0].changed("memory shared in another way", "not")
        source = torch.empty(0, dtype=torch.uint8, device=values[0].device)
        source.set_(values[0].untyped_storage(), first, (last - first,), (1,))
        memory.copy_(source, non_blocking=True)
        for place, view in zip(places, views, strict=True):
            results[place.item] = view

    return block, cross


def _offsets(tensors: Sequence[torch.Tensor], first: int) -> list[Any]:
    """Return where each tensor begins, in bytes after ``first``."""
    return [tensor.storage_offset() * tensor.element_size() - first for tensor in tensors]


def _same_address(place: Place, value: torch.Tensor) -> Crossing:
    """Return a check of a result that is memory at a fixed address, such as an argument's."""
    before = Placed.of(value)

    def check(results: list[Any]) -> None:
        value = results[place.item]
        if isinstance(value, torch.Tensor):
            now = Placed.of(value)
            if now == before:
                return
            if now.address != before.address:
                raise place.moved(now.address, before.address)
        raise place.changed(layout_text(value), layout_text(before))

    return check


def _same_value(place: Place, before: Any) -> Crossing:
    """Return a check of a result that is no tensor, which the graph after it has recorded."""

    def check(results: list[Any]) -> None:
        if not same_value(results[place.item], before):
            raise place.changed(repr(results[place.item]), repr(before))

    return check


class SameOnHost:
    """Check a CPU tensor in a graph of another device, if captured code reads it: ``is_read``."""

    def __init__(self, place: Place, made: torch.Tensor) -> None:
        self.is_read = False
        self._place = place
        self._before = made.detach().clone()
        self._bytes = numbers_as_bytes(self._before)

    def __call__(self, results: list[Any]) -> None:
        if not self.is_read:
            return
        value = results[self._place.item]
        self._place.check_layout(value, self._before)
        if not torch.equal(numbers_as_bytes(value), self._bytes):
            raise self._place.changed(value.tolist(), self._before.tolist())
