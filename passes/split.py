"""The result of a split as immutable, printable data: :class:`SplitGraph` and its parts.

``partition.py`` makes it, ``cgcompile/pieces`` compiles it. The printed form is stable, ASCII, free
of paths and of names that torch invents: snapshots, logs and ``explain`` use it. Sizes are ``s0``,
``s1``, ... in the order of the inputs; the bytes of a value are followed by those of its storage
where a view keeps more memory alive than it shows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.boundaries import AttentionCGSupport, SplittingOp
from cgcompile.counts import count
from cgcompile.passes.base import Fusions, PassRecord, table
from cgcompile.passes.nodes import SourceLine, tensors, value
from cgcompile.passes.symbols import Symbols
from cgcompile.reasons import Fallback
from cgcompile.torch_compat import torch_ops


@dataclass(frozen=True, eq=False)
class Value:
    """Something that the caller passes or that crosses between pieces.

    Attributes:
        name: a valid Python identifier, unique in the graph; the one in the generated code.
        meta: the fake tensor, symbolic number or constant that was traced.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: its address is fixed: a parameter, a buffer or a module attribute.
        mutated: some node writes the memory that it is in, before or after, as far as the graph
            shows, or reads it beyond the value itself: a copy will not do. When in doubt, yes.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> [value.static for value in split.inputs]
        [True, True, False]
    """

    name: str
    meta: Any
    source: str | None = None
    static: bool = False
    mutated: bool = False


@dataclass(frozen=True, eq=False)
class Piece:
    """One submodule of a split graph: a function from its inputs to a tuple of outputs.

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
        lines: the user's source lines, of the boundary or of the first node.
        op: the entry of the splitting op that it begins with, or None.
        same_as: index of the first piece of equal structure; its own index if it is the first.
        support: how far it can go into a FULL graph; ALWAYS for a captured piece.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> split.pieces[0].capture, split.pieces[0].num_ops
        (True, 1)
    """

    index: int
    module: fx.GraphModule
    capture: bool
    why: tuple[Fallback, ...]
    compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_ops: int
    same_as: int
    support: AttentionCGSupport
    uncompiled: str | None = None
    lines: tuple[SourceLine, ...] = ()
    op: SplittingOp | None = None

    @property
    def name(self) -> str:
        return f"piece_{self.index}"

    @property
    def where(self) -> str:
        """The user's line, for messages."""
        return self.lines[0][0] if self.lines else "an unknown line"


def tensor_inputs(piece: Piece) -> dict[int, str]:
    """Return the names of the inputs that the module of a piece takes as tensors, by position."""
    fakes = map(value, piece.module.graph.find_nodes(op="placeholder"))
    pairs = enumerate(zip(piece.inputs, fakes, strict=True))
    return {p: name for p, (name, fake) in pairs if isinstance(fake, torch.Tensor)}


@dataclass(frozen=True, eq=False)
class SplitGraph:
    """A graph, cut at its boundaries; immutable.

    Attributes:
        pieces: in order of execution.
        inputs: the values that the caller passes, in order.
        values: every named value, inputs included.
        constants: tensors that the graph holds as attributes, by name.
        numbers: a piece that computes sizes which the caller gets back; None if there are none.
        result: what the caller gets, with a :class:`Value` for each node.
        symbols: the sizes, and what the traced code demands of them.
        device: where most values are; the CPU only if all are there.
        cpu_scalars: names of the 0-dim CPU tensors, and of Python numbers, that captured pieces
            read as tensors on ``device``: the modules of these pieces were traced with a copy
            there, filled before each run.
        graph_break: why Dynamo ended the graph early, or None.
        differentiable: whether any node runs in the caller's grad mode; False if the model turns
            gradients off for all of it.
        sets_grad_mode: whether pieces switch grad mode, and back.
        passes: what each pass did, in order, those over pieces last; not in the printed form.
        fusions: which attention became the op of ``decode_attention``, and why other attention
            did not; not in the printed form.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> len(split.pieces)
        1
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
    passes: tuple[PassRecord, ...] = ()
    fusions: Fusions = field(default_factory=Fusions)

    def __repr__(self) -> str:
        captured = sum(piece.capture for piece in self.pieces)
        return f"<SplitGraph: {count(len(self.pieces), 'piece')}, {captured} captured>"

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """The first piece of each structure."""
        return tuple(piece for piece in self.pieces if piece.same_as == piece.index)

    def crossing(self) -> tuple[Value, ...]:
        """Return the values that one piece makes and another piece or the caller uses."""
        return tuple(self.values[name] for piece in self.pieces for name in piece.outputs)

    def crossing_bytes(self) -> sympy.Expr:
        """Return the bytes of storage behind all crossing values, each storage counted once."""
        sizes: dict[int, sympy.Expr] = {}
        for crossing in self.crossing():
            sizes.update(map(self.symbols.storage, tensors(crossing.meta)))
        return sum(sizes.values(), sympy.Integer(0))

    def text(self, *, lines: bool = True) -> str:
        """Return the stable printed form; ``lines=False`` leaves out line numbers."""
        captured = sum(piece.capture for piece in self.pieces)
        rows = [
            f"{count(len(self.pieces), 'piece')}: {captured} captured, "
            f"{len(self.pieces) - captured} eager; {len(self.distinct)} distinct; "
            f"{self.symbols.pretty(self.crossing_bytes())} B cross"
        ]
        if self.symbols.dims:
            sizes = (f"{name} = {dim}" for name, dim in self.symbols.dims.items())
            rows.append(f"sizes: {', '.join(sizes)}")
        rows += [self._piece_text(piece, lines) for piece in self.pieces]
        if self.numbers is not None:
            rows.append(f"sizes returned: {', '.join(self.numbers.outputs)}")
        if self.graph_break is not None:
            rows.append(f"ended by a graph break: {self.graph_break if lines else '...'}")
        return "\n".join(rows)

    def passes_text(self, *, seconds: bool = True) -> str:
        """Return a table of :attr:`passes`, a line each; ``seconds=False`` leaves out the times."""
        return table(self.passes, seconds=seconds)

    def _piece_text(self, piece: Piece, lines: bool) -> str:
        kind = "captured" if piece.capture else "eager   "
        row = f"{piece.name}  {kind}  {count(piece.num_ops, 'op')}"
        if piece.same_as != piece.index:
            row += f", same as piece_{piece.same_as}"
        if piece.compiled and not piece.capture:
            row += ", compiled on its own"
        if piece.uncompiled is not None:
            row += f", left uncompiled: {piece.uncompiled}"
        rows = [row, *(f"  why  {why}" for why in piece.why)]
        shown = piece.lines[: 1 if piece.capture else 3]
        rows += [f"  at   {f'{where}: ' if lines else ''}{code}" for where, code in shown]
        if len(piece.lines) > 3 and not piece.capture:
            rows.append(f"  at   {len(piece.lines) - 3} more lines")
        rows.append(f"  in   {self._values_text(piece.inputs)}")
        rows.append(f"  out  {self._values_text(piece.outputs)}")
        return "\n".join(rows)

    def _values_text(self, names: Iterable[str]) -> str:
        values = [self.values[name] for name in names]
        texts = [self._value_text(value) for value in values if not value.static]
        static = [value.meta for value in values if value.static]
        if static:
            sizes = (self.symbols.nbytes(t) for t in static if isinstance(t, torch.Tensor))
            total = self.symbols.pretty(sum(sizes, start=0))
            texts.append(f"{len(static)} static {total} B")
        return ", ".join(texts) or "-"

    def _value_text(self, value: Value) -> str:
        if not isinstance(value.meta, torch.Tensor):
            return value.name
        own, (_, storage) = self.symbols.nbytes(value.meta), self.symbols.storage(value.meta)
        size = self.symbols.pretty(storage)
        if not (own - storage).is_nonnegative:  # an expanded tensor has more elements than memory
            size = f"{self.symbols.pretty(own)} of {size}"
        return f"{value.name} {self.symbols.shape_text(value.meta)} {size} B"

    def __str__(self) -> str:
        return self.text()


def split_data(split: SplitGraph) -> dict[str, Any]:
    """Return a split as plain data."""
    return {
        "device": str(split.device),
        "sizes": {name: str(dim) for name, dim in split.symbols.dims.items()},
        "crossing_bytes": split.symbols.pretty(split.crossing_bytes()),
        "graph_break": split.graph_break,
        "pieces": [
            {
                "name": piece.name,
                "captured": piece.capture,
                "compiled": piece.compiled,
                "same_as": f"piece_{piece.same_as}",
                "support": piece.support.name,
                "num_ops": piece.num_ops,
                "why": [{"reason": why.reason.value, "detail": why.detail} for why in piece.why],
                "lines": [line._asdict() for line in piece.lines],
                "inputs": list(piece.inputs),
                "outputs": list(piece.outputs),
            }
            for piece in split.pieces
        ],
    }


def returned_names(split: SplitGraph) -> list[str]:
    """Return the name of each leaf of the result; '' for a leaf that is a constant."""
    return [getattr(leaf, "name", "") for leaf in torch_ops.tree_leaves(split.result)]
