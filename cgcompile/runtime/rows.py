"""Which values have a row for each row of a padded batch: :class:`BatchRows`.

A forward context tells how many rows of a batch are real (``num_unpadded_tokens``), not which
dimension they are. Rows are leading dimensions. The rule, in this order:

* The leading dimension is the dynamic size that ``capture_dim`` names; else the only dynamic size;
  else the only one that is a leading dimension of an input. In this call it must be as large as the
  batch.
* In a trace without such a size, inputs whose leading dimension is as large as the batch have rows,
  and values with that leading dimension that are computed from values with rows. If another
  dimension of any value, or a dimension of a weight, is as large, the rows are unknown: as many
  heads as rows would look the same.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import sympy
import torch

from cgcompile.graphs.arena import rows_apart
from cgcompile.passes.nodes import COMPUTING, storages, tensors, value, written, written_storages
from cgcompile.passes.split import Piece, SplitGraph, returned_names
from cgcompile.pieces.compilers import Runnable


def mutated_inputs(piece: Piece) -> list[str]:
    """Return the names of the inputs whose memory the graph of a piece mutates."""
    memory = written_storages(piece.module)  # through views as well
    names = zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)
    return [name for name, node in names if not memory.isdisjoint(storages(value(node)))]


class BatchRows:
    """Finds the values with rows of one split graph."""

    def __init__(self, split: SplitGraph, capture_dim: str | None) -> None:
        self._split, self._capture_dim = split, capture_dim
        self._by_number: dict[int, frozenset[str] | None] = {}

    def of_batch(self, rows: int, inputs: Sequence[Any]) -> frozenset[str] | None:
        """Return the names of the values with rows in a call; None if that is unknown."""
        positions = [p for p in self._symbols if inputs[p] == rows]
        if positions:
            return self._with_leading(positions[0]) if len(positions) == 1 else None
        if rows not in self._by_number:
            self._by_number[rows] = self._computed_from_rows(rows)
        return self._by_number[rows]

    def left(self, rows: int, inputs: Sequence[Any]) -> Mapping[int, Sequence[str]] | None:
        """Return the values with rows that each eager piece leaves for graphs or for the caller.

        By the index of the piece; None if it leaves some, and which have rows is unknown.
        """
        if not any(self._left.values()):
            return {}
        with_rows = self.of_batch(rows, inputs)
        if with_rows is None:
            return None
        return {
            index: [name for name in names if name in with_rows]
            for index, names in self._left.items()
        }

    @cached_property
    def mutated(self) -> dict[int, list[str]]:
        """The names of the inputs that eager pieces mutate, by index."""
        pieces = self._split.pieces
        return {piece.index: mutated_inputs(piece) for piece in pieces if not piece.capture}

    @cached_property
    def _symbols(self) -> list[int]:
        """The positions of the numbers among the inputs that may count the rows."""
        split, number = self._split, self._split.symbols.number
        dims = split.symbols.dims
        named = [p for p, v in enumerate(split.inputs) if v.name in dims]
        if self._capture_dim is not None:
            named = [p for p in named if dims[split.inputs[p].name] == self._capture_dim]
        if len(named) <= 1:
            return named
        leading = {
            number(v.meta.shape[0])
            for v in split.inputs
            if isinstance(v.meta, torch.Tensor) and v.meta.dim() and not v.static
        }
        return [p for p in named if number(split.inputs[p].meta) in leading]

    @cached_property
    def _left(self) -> dict[int, list[str]]:
        """The tensors in memory of the step that eager pieces leave, by the index of the piece."""
        split = self._split
        read = {name for piece in split.pieces if piece.capture for name in piece.inputs}
        read |= set(returned_names(split))
        known = storages([v.meta for v in split.inputs])
        return {
            piece.index: [
                name
                for name in dict.fromkeys((*piece.outputs, *self.mutated[piece.index]))
                if (name in read or name not in piece.outputs)
                and isinstance(split.values[name].meta, torch.Tensor)
                and split.values[name].meta.dim()
                and known.isdisjoint(storages(split.values[name].meta))
            ]
            for piece in split.pieces
            if not piece.capture
        }

    def _with_leading(self, position: int) -> frozenset[str]:
        split = self._split
        rows: sympy.Expr = split.symbols.number(split.inputs[position].meta)
        return frozenset(
            name
            for name, v in split.values.items()
            if isinstance(v.meta, torch.Tensor)
            and any(split.symbols.number(size) == rows for size in v.meta.shape[:1])
        )

    def _computed_from_rows(self, rows: int) -> frozenset[str] | None:
        """Return the values with rows of a trace in which their number is a constant."""
        split = self._split
        if any(_elsewhere(fake, rows) for fake in self._fakes()):
            return None
        if any(v.static and _is_leading(v.meta, rows) for v in split.inputs):
            return None
        marked = {v.name for v in split.inputs if _is_leading(v.meta, rows)}
        if not marked:
            return None
        for piece in split.pieces:
            marked |= self._marked_by(piece, marked, rows)
        return frozenset(marked)

    def _fakes(self) -> Iterator[Any]:
        yield from (v.meta for v in self._split.values.values())
        for piece in self._split.distinct:
            yield from (value(node) for node in piece.module.graph.nodes)

    def _marked_by(self, piece: Piece, marked: set[str], rows: int) -> set[str]:
        """Return the results of a piece, and the inputs that it writes, that have rows."""
        graph = piece.module.graph
        placeholders = list(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
        nodes = {node for node, name in placeholders if name in marked}
        for node in graph.nodes:
            if node.op in COMPUTING and not nodes.isdisjoint(node.all_input_nodes):
                candidates = (node, *written(piece.module, node))
                nodes |= {other for other in candidates if _is_leading(value(other), rows)}
        (results,) = graph.output_node().args
        assert isinstance(results, (tuple, list))
        pairs = [*placeholders, *zip(results, piece.outputs, strict=True)]
        return {name for node, name in pairs if node in nodes}


def _is_leading(meta: Any, rows: int) -> bool:
    """Return whether a size is the leading one of a tensor, or of all tensors in a container."""
    shapes = [fake.shape for fake in tensors(meta)]
    return bool(shapes) and all(
        len(shape) > 0 and type(shape[0]) is int and shape[0] == rows for shape in shapes
    )


def _elsewhere(meta: Any, rows: int) -> bool:
    """Return whether a size is that of a dimension which is not leading."""
    sizes = (size for fake in tensors(meta) for size in fake.shape[1:])
    return any(type(size) is int and size == rows for size in sizes)


def zeroing(piece: Piece, run: Runnable, names: Collection[str], real: int) -> Runnable:
    """Return ``run`` of an eager piece, which then zeroes the padding rows of these values."""
    items = [item for item, name in enumerate(piece.outputs) if name in names]
    positions = [position for position, name in enumerate(piece.inputs) if name in names]

    def zeroed(*inputs: Any) -> Sequence[Any]:
        outputs = run(*inputs)
        tensors = [outputs[item] for item in items] + [inputs[position] for position in positions]
        for tensor in tensors:
            if rows_apart(tensor):  # zeroing would clear real rows
                tensor[real:].zero_()
        return outputs

    return zeroed if items or positions else run
