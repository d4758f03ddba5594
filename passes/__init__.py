"""FX graph in, split graph out. Nothing here knows of capture, compilation or serving.

The pipeline of a split is :data:`PIPELINE`, in order; the user's own passes run before it (over the
whole graph) and after the cut (over each distinct captured piece). Read on in the same order:
``normalize``, ``assign`` (with ``capturable`` and ``regions``), ``aliases``, ``partition``,
``split``, ``printer``. ``saved`` keeps the graph that comes in for another process.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from cgcompile import compat
from cgcompile.boundaries import Boundaries
from cgcompile.passes.aliases import ResolveAliases
from cgcompile.passes.assign import AssignPieces
from cgcompile.passes.base import FunctionPass, GraphPass, PassManager
from cgcompile.passes.normalize import BindSymbols, PullItems
from cgcompile.passes.partition import cut
from cgcompile.passes.pieces import Piece, Value
from cgcompile.passes.saved import dump_graph, load_graph
from cgcompile.passes.split import SplitGraph

__all__ = [
    "PIPELINE",
    "FunctionPass",
    "GraphPass",
    "PassManager",
    "Piece",
    "SplitGraph",
    "Value",
    "dump_graph",
    "load_graph",
    "split_graph",
]

# Each is made with the registry of splitting ops, which only the assignment looks at.
PIPELINE = (
    lambda boundaries: BindSymbols(),
    lambda boundaries: PullItems(),
    lambda boundaries: AssignPieces(boundaries),
    lambda boundaries: ResolveAliases(),
)


def split_graph(
    gm: fx.GraphModule,
    boundaries: Boundaries,
    *,
    graph_passes: Iterable[Any] = (),
    piece_passes: Iterable[Any] = (),
    dump_dir: str | None = None,
) -> SplitGraph:
    """Split Dynamo's pre-grad graph at its boundaries.

    Args:
        gm: the graph; it is changed (sizes are bound to inputs) but computes what it did.
        boundaries: the registry that says what is a splitting op.
        graph_passes: passes over the whole graph, before ours.
        piece_passes: passes over each distinct captured piece, after the cut.
        dump_dir: a folder for the graph before and after every pass.

    Raises:
        PassError: a pass raised or left an invalid graph.
        SymbolError: a size that no input gives would cross into a captured piece.
    """
    graph_passes = tuple(graph_passes)
    if graph_passes:
        gm = compat.copied(gm)  # Dynamo still owns its graph, and must not find it broken
    ours = [make(boundaries) for make in PIPELINE]
    gm = PassManager([*graph_passes, *ours], dump_dir)(gm)
    split = cut(gm)
    _check_sizes_are_bound(split)
    on_pieces = PassManager(piece_passes, dump_dir)
    return _run_on_pieces(split, on_pieces) if on_pieces.passes else split


def _check_sizes_are_bound(split: SplitGraph) -> None:
    for piece in split.pieces:
        if piece.capture:
            for name in (*piece.inputs, *piece.outputs):
                split.symbols.check_bound(split.values[name].meta, name, piece.name)


def _run_on_pieces(split: SplitGraph, manager: PassManager) -> SplitGraph:
    changed: dict[int, fx.GraphModule] = {}
    for piece in split.distinct:
        if piece.capture:
            changed[piece.index] = manager(piece.module, piece.name)
            changed[piece.index].recompile()  # a pass edits the graph, not the code made from it
    pieces = tuple(
        replace(piece, module=changed.get(piece.same_as, piece.module)) for piece in split.pieces
    )
    return replace(split, pieces=pieces)
