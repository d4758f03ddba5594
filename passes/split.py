"""The split as a value: :class:`SplitGraph`, made of :class:`Piece` and :class:`Value`.

Plain data, immutable, printable. ``partition.py`` makes it, ``piecewise`` compiles it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.passes.nodes import tensors
from cgcompile.passes.symbols import Symbols
from cgcompile.reasons import Why


@dataclass(frozen=True, eq=False)
class Value:
    """Something that the caller passes or that crosses between pieces.

    Attributes:
        name: a valid Python identifier, unique in the graph; the one in the generated code.
        meta: the fake tensor, symbolic number or constant that was traced.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: the caller promises a fixed address: a parameter, a buffer or a module attribute.
    """

    name: str
    meta: Any
    source: str | None = None
    static: bool = False

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.meta, torch.Tensor)


@dataclass(frozen=True, eq=False)
class Piece:
    """One part of a split graph: a function from its inputs to a tuple of outputs.

    Attributes:
        index: position in the order of execution.
        module: the FX module; the same object for pieces of equal structure.
        capture: whether CUDA graphs may hold it; otherwise it runs eager.
        why: why it runs eager, one entry per distinct reason; empty if it is captured.
        compiled: whether the compiler of pieces gets it.
        uncompiled: why a captured piece is not compiled, or None.
        inputs: names of the values that ``module`` takes, in order.
        outputs: names of the values that it returns, in order.
        num_ops: nodes that compute.
        lines: the user's source lines, as (where, code), of the boundary or of the first node.
        same_as: index of the first piece of equal structure; its own index if it is the first.
    """

    index: int
    module: fx.GraphModule
    capture: bool
    why: tuple[Why, ...]
    compiled: bool
    uncompiled: str | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_ops: int
    lines: tuple[tuple[str, str], ...]
    same_as: int

    @property
    def name(self) -> str:
        return f"piece_{self.index}"

    @property
    def where(self) -> str:
        """The user's line, for messages."""
        return self.lines[0][0] if self.lines else "an unknown line"


@dataclass(frozen=True)
class Ref:
    """The place of a named value in ``SplitGraph.result``."""

    name: str


@dataclass(frozen=True, eq=False)
class SplitGraph:
    """A graph, cut at its boundaries; immutable.

    Attributes:
        pieces: in order of execution.
        inputs: the values that the caller passes, in order.
        values: every named value, inputs included.
        constants: tensors that the graph holds as attributes, by name.
        numbers: a piece that computes sizes which the caller gets back; None if there are none.
        result: what the caller gets, with :class:`Ref` where a value stands.
        symbols: the sizes, and what the traced code demands of them.
        graph_break: why Dynamo ended the graph early, or None.
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[Value, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Any]
    numbers: Piece | None
    result: Any
    symbols: Symbols
    graph_break: str | None = None

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """The first piece of each structure."""
        return tuple(piece for piece in self.pieces if piece.same_as == piece.index)

    def crossing(self) -> tuple[Value, ...]:
        """Tensors that one piece makes and another, or the caller, uses."""
        return tuple(self.values[name] for piece in self.pieces for name in piece.outputs)

    def crossing_bytes(self) -> sympy.Expr:
        """Bytes of storage behind all crossing values, each storage once, in the graph's symbols."""
        found: dict[int, sympy.Expr] = {}
        for each in self.crossing():
            for tensor in tensors(each.meta):
                key, size = self.symbols.storage(tensor)
                found[key] = size
        return sum(found.values(), sympy.Integer(0))

    def text(self, *, lines: bool = True) -> str:
        """The stable printed form; ``lines=False`` leaves out line numbers."""
        from cgcompile.passes.printer import split_text

        return split_text(self, lines=lines)

    def __str__(self) -> str:
        return self.text()
