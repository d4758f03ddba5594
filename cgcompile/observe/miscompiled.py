"""The op that a compiler gets wrong: :func:`miscompiled_op`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.config import CompilationConfig
from cgcompile.graphs.verify import copies
from cgcompile.observe.comparing import Tolerance
from cgcompile.observe.traces import Nodes, Step
from cgcompile.passes.nodes import COMPUTING, is_allocation, toggles_state, value
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.compilers import compiler_for
from cgcompile.piecewise.ways import Way


def given_to(step: Step, piece: Piece) -> tuple[Any, ...]:
    """What a piece is given in the uncompiled step, as copies."""
    found: list[Any] = []

    def around(at: Piece, run: Any, given: tuple[Any, ...]) -> Any:
        if at is piece:
            found.extend(_copied(given))
        return run(*given)

    with step.kept():
        step.run(Way.UNCOMPILED, around=around)
    return tuple(found)


def _copied(given: Sequence[Any]) -> list[Any]:
    return list(copies(dict(enumerate(given))).values())  # type: ignore[arg-type]


def miscompiled_op(step: Step, piece: Piece, tolerance: Tolerance) -> tuple[fx.Node | None, str]:
    """The first op up to which the piece, compiled alone, is wrong; and how that was found.

    The piece is cut after an op and compiled again, for about log(n) of its n ops.

    Returns:
        (the op, or None; in words).
    """
    graph = piece.module.graph
    computing = [n for n in graph.nodes if n.op in COMPUTING and not is_allocation(n)]
    nodes = [n for n in computing if isinstance(value(n), torch.Tensor)]
    if not nodes or any(map(toggles_state, graph.nodes)):
        return None, "the piece cannot be cut"
    given = given_to(step, piece)
    plain = Nodes(piece)
    plain.run(*_copied(given))
    config, count = step.program.config, 0

    def wrong(node: fx.Node) -> bool:
        nonlocal count
        count += 1
        result = run_compiled(cut_after(piece.module, node), _copied(given), config)
        return tolerance.first(node.name, {"": plain.made[node][""]}, {"": result}) is not None

    try:
        bad = [n for n in tensors_returned(graph) if n in nodes and wrong(n)]
        if not bad:
            return None, "cut after its results, it is compiled right"
        last = nodes.index(min(bad, key=nodes.index))
        first = -1
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if wrong(nodes[middle]) else (middle, last)
    except Exception as error:
        return None, f"parts of it do not compile: {type(error).__name__}: {error}".splitlines()[0]
    return nodes[last], f"cut after this op it is compiled wrong; {count} compilations"


def tensors_returned(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph returns."""
    return [n for n in compat.tree_leaves(graph.output_node().args) if isinstance(n, fx.Node)]


def cut_after(gm: fx.GraphModule, last: fx.Node) -> fx.GraphModule:
    """The graph up to a node, which is all that it returns."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        if node is last:
            break
    graph.output((copied[last],))
    return fx.GraphModule(gm, graph)


def run_compiled(gm: fx.GraphModule, given: list[Any], config: CompilationConfig) -> Any:
    """Compile a graph as the pieces are, and run it once; its only result."""
    fake = [value(node) for node in gm.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        run = compiler_for(config)(gm, fake)
        return run(*given)[0]
