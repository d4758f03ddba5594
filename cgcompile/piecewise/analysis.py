"""What a piece really does, judged on its functional ATen graph: :func:`analyse`.

The split works on Dynamo's graph, where a call such as ``torch.nn.functional.embedding_bag`` is one
node. functorch lowers a piece to ATen operators, on which three things can be read off: which
inputs it writes, which operator torch itself thinks a CUDA graph cannot hold, and how much memory
its intermediates need at once. It traces the piece once more, so nothing calls it on the way to a
step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.nodes import tensors, value
from cgcompile.passes.pieces import Piece
from cgcompile.passes.symbols import Symbols


@dataclass(frozen=True)
class PieceFacts:
    """What the ATen graph of a piece tells.

    Attributes:
        ops: the operators, in order, as ``aten.mm.default``.
        mutated: names of the inputs that the piece writes.
        uncapturable: the first operator that torch thinks a CUDA graph cannot hold, or None.
        peak_bytes: the most bytes that intermediates and outputs hold at once, as an expression of
            the graph's symbols; views count as their storage, inputs do not count.
    """

    ops: tuple[str, ...]
    mutated: tuple[str, ...]
    uncapturable: str | None
    peak_bytes: sympy.Expr


def analyse(piece: Piece, symbols: Symbols) -> PieceFacts:
    """Lower a piece to ATen operators and read them.

    Args:
        piece: a piece of a split graph, inside the backend call that made it or later.
        symbols: those of the same split graph; ``Symbols.tabulate`` turns the bytes into numbers.
    """
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    fake_inputs = [value(node) for node in piece.module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        compat.compile_aten(piece.module, fake_inputs, keep)
    (aten,) = graphs
    return PieceFacts(
        ops=tuple(str(node.target) for node in aten.graph.nodes if node.op == "call_function"),
        mutated=_mutated(piece, aten),
        uncapturable=compat.uncapturable_op(aten),
        peak_bytes=_peak_bytes(aten, symbols),
    )


def _mutated(piece: Piece, aten: fx.GraphModule) -> tuple[str, ...]:
    """A functional graph writes an input by one ``copy_`` into its placeholder, at the end."""
    placeholders = aten.graph.find_nodes(op="placeholder")
    names = dict(zip(placeholders, piece.inputs, strict=True))
    copies = aten.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return tuple(names[copy.args[0]] for copy in copies if copy.args[0] in names)


def _peak_bytes(aten: fx.GraphModule, symbols: Symbols) -> sympy.Expr:
    """The largest sum over storages that are alive at one node, by liveness of their last use.

    Which sum is largest can depend on the sizes; then the expression is a ``Max``.
    """
    nodes = list(aten.graph.nodes)
    inputs = {key for node in nodes if node.op == "placeholder" for key in _storages(node, symbols)}
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for user in (node, *node.all_input_nodes):
            for key in _storages(user, symbols):
                last_use[key] = position
    alive: dict[int, sympy.Expr] = {}
    sums: set[sympy.Expr] = set()
    for position, node in enumerate(nodes):
        for key, size in _storages(node, symbols).items():
            if key not in inputs:
                alive[key] = size
        sums.add(sum(alive.values(), sympy.Integer(0)))
        alive = {key: size for key, size in alive.items() if last_use[key] > position}
    return sympy.Max(*sums)


def _storages(node: fx.Node, symbols: Symbols) -> dict[int, sympy.Expr]:
    return dict(symbols.storage(tensor) for tensor in tensors(node.meta.get("val")))
