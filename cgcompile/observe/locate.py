"""From a value that differs to the op and the user's line: :func:`finding_of`, :func:`op_of`."""

from dataclasses import replace
from typing import Any

from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.observe.comparing import Difference
from cgcompile.observe.traces import Parting
from cgcompile.passes.nodes import is_container_item, is_view, user_line, written
from cgcompile.passes.pieces import Piece

WHOLE = "the whole step"


def place_of(piece: Piece, node: fx.Node | None, detail: str = "") -> Difference:
    """Return the piece, op and line of a node, as a difference of which no more is known."""
    line = user_line(node) if node is not None and _own_lines(piece) else None
    if line is None and piece.lines:
        line, detail = piece.lines[0], f"{detail}; the piece begins at that line"
    op = "" if node is None else op_name(node)
    return Difference(piece=piece.name, op=op, line=": ".join(line or ()), detail=detail)


def _own_lines(piece: Piece) -> bool:
    """Whether the lines of its nodes are its own: equal pieces share those of the first one."""
    lines = [user_line(node) for node in piece.module.graph.nodes]
    return not piece.lines or piece.lines[0] in lines


def op_name(node: fx.Node) -> str:
    """The op of a node, as dumps show it."""
    return target_name(node.target).replace("_VariableFunctionsClass.", "")


def producer(piece: Piece, name: str) -> fx.Node | None:
    """The node of a piece that makes, or last writes, a named value; views are looked through."""
    graph = piece.module.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    found: fx.Node | None = None
    if name in piece.outputs:
        results: Any = graph.output_node().args[0]
        found = results[piece.outputs.index(name)]
    for node in graph.nodes:
        if any(names.get(target) == name for target in written(piece.module, node)):
            found = node
    while isinstance(found, fx.Node) and (is_container_item(found) or is_view(piece.module, found)):
        found = found.all_input_nodes[0]
    return found if isinstance(found, fx.Node) and found.op != "placeholder" else None


def finding_of(parting: Parting, number: int) -> Difference:
    """What a parting of two ways is, in words: with op, line, and the rows that are padding."""
    step, difference = parting.step, parting.difference
    place = op_of(parting)
    if parting.overwritten:
        detail = "; ".join(filter(None, ("it was right before, and is overwritten", place.detail)))
        place = replace(place, detail=detail)
    name = WHOLE if parting.piece is None else parting.piece.name
    place = replace(place, piece=place.piece or name)
    return made(parting.stage, number, difference, step.real, place)


def made(
    stage: str, number: int, difference: Difference, real: int | None, place: Difference
) -> Difference:
    """A finding of a difference at a place; ``real`` rows are no padding."""
    padding = tuple(row for row in difference.rows if real is not None and row >= real)
    detail = "; ".join(filter(None, (difference.detail, place.detail.removeprefix("; "))))
    return replace(
        difference,
        stage=stage,
        inputs=number,
        piece=place.piece,
        op=place.op,
        line=place.line,
        padding_rows=padding,
        detail=detail,
    )


def op_of(parting: Parting) -> Difference:
    """Return the op that makes the value in which two ways part."""
    piece = parting.piece
    if piece is None:
        return Difference()
    if parting.overwritten:
        return place_of(piece, None)
    return place_of(piece, producer(piece, parting.difference.value), "this op makes the value")
