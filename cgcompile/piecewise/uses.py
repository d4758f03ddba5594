"""Who uses each value of a PIECEWISE step, apart from the piece that makes it: :class:`Uses`."""

from collections.abc import Iterable, Mapping

from cgcompile.passes.nodes import storages
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.returns import returned_names


class Uses:
    """The uses of the values of a split graph; the same for all its recordings.

    Args:
        split: the split graph.
        own: results are copied for the caller.

    Attributes:
        made: names of the values that pieces make.
        read: names that graphs read at a fixed address, or that must be there for the caller.
        returned: names that the caller gets.
        originals: names of results that the caller gets as the eager piece made them, even where
            graphs read a copy: nothing writes them.
        live: names that eager pieces read, the caller, or what copies 0-dim CPU tensors.
        last: for each name, the index of the last piece that uses it; past the end if the caller
            gets what lies at its address.
    """

    def __init__(self, split: SplitGraph, own: bool) -> None:
        self.made = {name for piece in split.pieces for name in piece.outputs}
        self.returned = set(returned_names(split)) - {""}
        values = split.values
        eager = {
            name: piece.index
            for piece in split.pieces
            if not piece.capture
            for name in piece.outputs
        }
        unwritten = {name for name in self.returned & eager.keys() if not values[name].written}
        self.originals = self._apart(split, unwritten, eager) if own else set()
        self.read = {name for piece in split.pieces if piece.capture for name in piece.inputs}
        self.read -= split.cpu_scalars  # graphs read a copy on the device
        if not own:
            self.read |= self.returned  # the next graph may read it where it lies
        self.live = {name for piece in split.pieces if not piece.capture for name in piece.inputs}
        self.live |= self.returned | split.cpu_scalars
        self.last = {name: piece.index for piece in split.pieces for name in piece.inputs}
        end = len(split.pieces)
        if split.numbers is not None:
            self.live |= set(split.numbers.inputs)
            self.last.update(dict.fromkeys(split.numbers.inputs, end))
        self.last.update(dict.fromkeys(self.returned - self.originals, end))

    def _apart(
        self, split: SplitGraph, names: Iterable[str], makers: Mapping[str, int]
    ) -> set[str]:
        """Those of these names that share memory with no result that another piece makes.

        Such a result lies in the copy, and the caller may write to one and look at the other.
        """
        memory: dict[int, set[int | None]] = {}
        for name in self.returned & split.values.keys():  # numbers lie in no memory
            for key in storages(split.values[name].meta):
                memory.setdefault(key, set()).add(makers.get(name))
        return {
            name
            for name in names
            if all(len(memory[key]) == 1 for key in storages(split.values[name].meta))
        }
