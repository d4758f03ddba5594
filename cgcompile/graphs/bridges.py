"""How results of an eager segment reach the graph segments that read them.

A graph reads the address of the capture. A fresh tensor is copied into a block of the arena, the
bridge, whose layout it gets; several that share memory cross together, so that they still share it;
a tensor in memory at a fixed address must have that address; a value that is no tensor must be the
same, and so must a CPU tensor in a graph of another device, if captured code reads it. A *crossing*
is called with the list of results and replaces those that have a bridge.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile.errors import AddressChangedError, GuardError
from cgcompile.graphs.arena import Block, Frame, OwnedCopy, address, numbers_as_bytes, stretch
from cgcompile.graphs.contract import (
    Change,
    Placed,
    layout_text,
    same_layout,
    same_numbers,
    same_value,
)
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
    outputs: Sequence[Any],
    read: Collection[str],  # names of the results that are read at a fixed address
    lasting: Collection[str],  # those that must stay where they are, if that is fixed
    fixed: set[int],  # fixed addresses; addresses of new bridges are added
    frame: Frame,
) -> tuple[list[Crossing], Bridges]:
    """Return the crossings of the results ``outputs`` of a break, and their bridges."""
    across: list[Crossing] = []
    bridges: Bridges = []
    fresh: dict[int, list[Place]] = {}
    for position in places:
        value = outputs[position.item]
        if not isinstance(value, torch.Tensor):
            if position.name in read:
                across.append(_same_value(position, value))
        elif address(value) in fixed:
            if position.name in read or position.name in lasting:
                across.append(_same_address(position, value))
        else:
            fresh.setdefault(address(value) or -1 - position.item, []).append(position)
    for members in fresh.values():
        if any(position.name in read for position in members):
            result = any(position.name in lasting for position in members)
            values = [outputs[position.item] for position in members]
            if len(members) == 1:
                block, crossing = _bridge(members[0], values[0], frame, result)
            else:
                block, crossing = _shared_bridge(members, values, frame, result)
            across.append(crossing)
            bridges.append((block, [position.name for position in members]))
            fixed.add(block.address)
    return across, bridges


def _bridge(
    position: Place, value: torch.Tensor, frame: Frame, result: bool
) -> tuple[Block, Crossing]:
    """Return a function that copies a new result to the address that later graphs read."""
    buffer = OwnedCopy(value, frame, result=result)

    def cross(results: list[Any]) -> None:
        value = results[position.item]
        if not (buffer.takes_any_layout and same_numbers(value, buffer.tensor)):
            position.check_layout(value, buffer.tensor)
        buffer.fill(value)
        results[position.item] = buffer.tensor

    return buffer.block, cross


def _shared_bridge(
    places: Sequence[Place], values: Sequence[torch.Tensor], frame: Frame, result: bool
) -> tuple[Block, Crossing]:
    """Return a function that copies the memory that several new results share."""
    first, last = stretch(values)
    starts = _offsets(values, first)
    block = frame.allocate(last - first, values[0].device, result)
    memory = block.memory[: last - first]
    views = [
        OwnedCopy(value, frame, within=(block, start)).tensor
        for value, start in zip(values, starts, strict=True)
    ]

    def cross(results: list[Any]) -> None:
        values = [results[position.item] for position in places]
        for position, value, view in zip(places, values, views, strict=True):
            position.check_layout(value, view)
        first, last = stretch(values)
        one_memory = len({address(value) for value in values}) == 1
        if not one_memory or _offsets(values, first) != starts:
            raise places[0].changed("memory shared in another way", "not")
        source = torch.empty(0, dtype=torch.uint8, device=values[0].device)
        source.set_(values[0].untyped_storage(), first, (last - first,), (1,))
        memory.copy_(source, non_blocking=True)
        for position, view in zip(places, views, strict=True):
            results[position.item] = view

    return block, cross


def _offsets(tensors: Sequence[torch.Tensor], first: int) -> list[Any]:
    """Return where each tensor begins, in bytes after ``first``."""
    return [tensor.storage_offset() * tensor.element_size() - first for tensor in tensors]


def _same_address(position: Place, value: torch.Tensor) -> Crossing:
    """Return a check that a result is at a fixed address, such as that of an argument."""
    before = Placed.of(value)

    def check(results: list[Any]) -> None:
        value = results[position.item]
        if isinstance(value, torch.Tensor):
            now = Placed.of(value)
            if now == before:
                return
            if now.address != before.address:
                raise position.moved(now.address, before.address)
        raise position.changed(layout_text(value), layout_text(before))

    return check


def _same_value(position: Place, before: Any) -> Crossing:
    """Return a check that a result, which is no tensor, equals the recorded one."""

    def check(results: list[Any]) -> None:
        if not same_value(results[position.item], before):
            raise position.changed(repr(results[position.item]), repr(before))

    return check


class SameOnHost:
    """Compare a CPU tensor with its value at capture, if a graph of another device reads it."""

    def __init__(self, position: Place, value: torch.Tensor) -> None:
        self.is_read = False
        self._place = position
        self._before = value.detach().clone()
        self._bytes = numbers_as_bytes(self._before)

    def __call__(self, results: list[Any]) -> None:
        if not self.is_read:
            return
        value = results[self._place.item]
        self._place.check_layout(value, self._before)
        if not torch.equal(numbers_as_bytes(value), self._bytes):
            raise self._place.changed(value.tolist(), self._before.tolist())
