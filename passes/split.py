"""The split as a value: :class:`SplitGraph`. Plain data, immutable, printable.

``partition.py`` makes it, ``piecewise`` compiles it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from cgcompile.passes.base import PassRecord, table
from cgcompile.passes.nodes import tensors
from cgcompile.passes.pieces import Piece, Value
from cgcompile.passes.printer import count, piece_text
from cgcompile.passes.symbols import Symbols


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
        device: where most values are; the CPU only if nothing is elsewhere.
        cpu_scalars: names of the 0-dim CPU tensors that captured pieces read on ``device``: the
            modules of these pieces were traced with a copy there, filled before each run.
        graph_break: why Dynamo ended the graph early, or None.
        differentiable: whether any part runs in the caller's grad mode; False if the model turns
            gradients off for all of it.
        sets_grad_mode: whether pieces switch grad mode, and back.
        recomputes: whether the model holds ``torch.utils.checkpoint``.
        passes: what each pass did, in order, those over pieces last; no part of the printed form.
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[Value, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Any]
    numbers: Piece | None
    result: Any
    symbols: Symbols
    device: torch.device
    cpu_scalars: frozenset[str] = frozenset()
    graph_break: str | None = None
    differentiable: bool = True
    sets_grad_mode: bool = False
    recomputes: bool = False
    passes: tuple[PassRecord, ...] = ()

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """The first piece of each structure."""
        return tuple(piece for piece in self.pieces if piece.same_as == piece.index)

    def crossing(self) -> tuple[Value, ...]:
        """Tensors that one piece makes and another, or the caller, uses."""
        return tuple(self.values[name] for piece in self.pieces for name in piece.outputs)

    def crossing_bytes(self) -> sympy.Expr:
        """Bytes of storage behind all crossing values, each storage counted once."""
        found: dict[int, sympy.Expr] = {}
        for each in self.crossing():
            for tensor in tensors(each.meta):
                key, size = self.symbols.storage(tensor)
                found[key] = size
        return sum(found.values(), sympy.Integer(0))

    def text(self, *, lines: bool = True) -> str:
        """The stable printed form; ``lines=False`` leaves out line numbers."""
        rows = [self._header()]
        rows += [piece_text(piece, self.values, self.symbols, lines) for piece in self.pieces]
        if self.numbers is not None:
            rows.append(f"sizes returned: {', '.join(self.numbers.outputs)}")
        if self.graph_break is not None:
            rows.append(f"ended by a graph break: {self.graph_break if lines else '...'}")
        return "\n".join(rows)

    def passes_text(self, *, seconds: bool = True) -> str:
        """A table of :attr:`passes`, a line each; ``seconds=False`` leaves out the times."""
        return table(self.passes, seconds=seconds)

    def _header(self) -> str:
        captured = sum(piece.capture for piece in self.pieces)
        text = (
            f"{count(len(self.pieces), 'piece')}: {captured} captured, "
            f"{len(self.pieces) - captured} eager; {len(self.distinct)} distinct; "
            f"{self.symbols.pretty(self.crossing_bytes())} B cross"
        )
        sizes = [f"{name} = {dim}" for name, dim in self.symbols.dims.items()]
        return f"{text}\nsizes: {', '.join(sizes)}" if sizes else text

    def __str__(self) -> str:
        return self.text()
