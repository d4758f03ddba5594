"""Whether memory that a step writes has another name in this call: :class:`Overlaps`.

A compiled piece takes inputs that were apart when it was traced for apart, and reads them in any
order: before another one is written, say. Nothing in Dynamo's guards says so. Inputs that shared
memory when they were traced need nothing here: what they are in is left uncompiled.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.graphs.copies import span
from cgcompile.passes.pieces import Value
from cgcompile.reasons import Reason, Why


class Overlaps:
    """Compares the inputs of a call.

    Args:
        inputs: of the graph, as traced.
    """

    def __init__(self, inputs: Sequence[Value]) -> None:
        found = [(p, each) for p, each in enumerate(inputs) if isinstance(each.meta, torch.Tensor)]
        self._inputs = inputs
        self._keys = {place: compat.storage_key(each.meta) for place, each in found}
        self._written = frozenset(place for place, each in found if each.written)

    def why(self, inputs: Sequence[Any]) -> Why | None:
        """Why pieces must not run compiled, nor be captured; None if memory is as it was traced.

        Costs 0.2 us for each tensor of a graph that writes one of its inputs, else nothing.
        """
        if not self._written:
            return None
        try:
            stretches = self._near_written(inputs)
        except (NotImplementedError, RuntimeError):  # a tensor around others has no address
            return None
        for one, other in _overlapping(stretches):
            if self._keys[one] != self._keys[other] and not self._written.isdisjoint((one, other)):
                detail = f"{self._named(other)} is memory that the step writes"
                return Why(Reason.UNSUPPORTED_INPUT, f"{detail}, and of {self._named(one)}")
        return None

    def _near_written(self, inputs: Sequence[Any]) -> list[tuple[int, int, int]]:
        """(first address, that after the last, place) of inputs in allocations that are written."""
        storages = [inputs[place].untyped_storage() for place in self._written]
        ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages)
        starts = [start for start, _ in ranges]
        found = []
        for place in self._keys:
            address = inputs[place].data_ptr()
            before = bisect_right(starts, address)
            if before and address < ranges[before - 1][1]:
                tensor = inputs[place]
                found.append((address, address + span(tensor) * tensor.element_size(), place))
        return found

    def _named(self, place: int) -> str:
        value = self._inputs[place]
        return f"input {place} {value.source or value.name!r}"


def _overlapping(stretches: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """The places of each two that overlap, in order."""
    begun: list[tuple[int, int]] = []
    for start, end, place in sorted(stretches):
        begun = [(last, other) for last, other in begun if last > start]
        if end > start:  # what has no elements overlaps nothing
            yield from ((min(place, other), max(place, other)) for _, other in begun)
            begun.append((end, place))
