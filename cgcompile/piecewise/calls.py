"""How an eager piece is called at replay: :func:`call_of`.

Most eager pieces are one call of an op. Calling the op itself, with its arguments bound, costs half
of what the piece's generated code costs; and an entry of the registry may name a function of its
own, which skips the dispatcher as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile import compat
from cgcompile.boundaries import Boundaries
from cgcompile.passes.nodes import written
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.compilers import Runnable
from cgcompile.reasons import Reason


class Named(NamedTuple):
    """A value of the split graph."""

    name: str


class Call(NamedTuple):
    """A function and its arguments: names of values as :class:`Named`, all else as it is.

    Attributes:
        function: what to call.
        args: by position.
        leaves: the results of the piece as a list, from what the function returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    leaves: Callable[[Any], list[Any]]

    @classmethod
    def of_all(cls, piece: Piece, function: Runnable) -> "Call":
        """A function that takes all inputs of a piece and returns all its outputs."""
        return cls(function, tuple(Named(name) for name in piece.inputs), list)


def call_of(piece: Piece, plain: Runnable, boundaries: Boundaries, device: torch.device) -> Call:
    """What runs for an eager piece.

    Args:
        piece: the piece.
        plain: its own code.
        boundaries: the registry, for functions that replace ops.
        device: where the graph computes.
    """
    single = None if piece.compiled else _single_op(piece.module)
    if single is None:
        own = None if piece.compiled else _with_own_functions(piece.module, boundaries, device)
        return Call.of_all(piece, plain if own is None else own)
    node, leaves = single
    names = dict(zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    args = tuple(Named(names[arg]) if isinstance(arg, fx.Node) else arg for arg in node.args)
    return Call(_function(node.target, boundaries, device), args, leaves)


def _function(target: Any, boundaries: Boundaries, device: torch.device) -> Callable[..., Any]:
    own = _own_function(target, boundaries, device)
    if own is not None:
        return own
    overloads = compat.op_overloads(target)  # a packet looks its only overload up at every call
    return overloads[0] if len(overloads) == 1 else target


def _own_function(
    target: Any, boundaries: Boundaries, device: torch.device
) -> Callable[..., Any] | None:
    entry = boundaries.match_call(target)
    return None if entry is None else entry.impl_for(device.type)


def _with_own_functions(
    gm: fx.GraphModule, boundaries: Boundaries, device: torch.device
) -> Runnable | None:
    """The code of a piece with functions in place of its ops; None if no op has one."""
    own = {
        node.name: function
        for node in gm.graph.nodes
        if node.op == "call_function"
        and (function := _own_function(node.target, boundaries, device)) is not None
    }
    if not own:
        return None
    copy = compat.copied(gm)
    for node in copy.graph.nodes:
        node.target = own.get(node.name, node.target)
    copy.recompile()
    run: Runnable = copy.forward
    return run


def _single_op(gm: fx.GraphModule) -> tuple[fx.Node, Callable[[Any], list[Any]]] | None:
    """The only op of a graph, if it is called with inputs and constants and is all there is."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) != 1 or not compat.op_overloads(calls[0].target) or calls[0].kwargs:
        return None
    (node,) = calls
    constants = (int, float, bool, str, type(None), torch.dtype, torch.device)
    if not all(isinstance(arg, (fx.Node, *constants)) for arg in node.args):
        return None
    (result,) = gm.graph.output_node().args
    if result == ():
        return node, _nothing
    return (node, _one) if result == (node,) else None


def _nothing(made: Any) -> list[Any]:
    return []


def _one(made: Any) -> list[Any]:
    return [made]


def written_inputs(piece: Piece) -> list[str]:
    """The names of the inputs that a piece writes, as far as its graph tells."""
    graph = piece.module.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    found = [each for node in graph.nodes for each in written(piece.module, node)]
    return list(dict.fromkeys(names[node] for node in found if node in names))


def said(piece: Piece) -> str:
    """What an eager piece runs, in a word or two: its first splitting op, or why it is eager."""
    if not piece.why:
        return "returned sizes"
    first = piece.why[0]
    if first.reason is Reason.SPLITTING_OP:
        return first.detail.rpartition(" [")[0] or first.detail
    return str(first.reason.value)


def arguments(call: Call, source: Callable[[str], Any]) -> tuple[Any, ...]:
    """The arguments of a call, names replaced by what they stand for."""
    return tuple([source(arg.name) if type(arg) is Named else arg for arg in call.args])
