"""The printed form of a split: stable, ASCII, free of paths and of names that torch invents.

Snapshots, logs and ``explain`` all use it. Sizes are ``s0``, ``s1``, ... in the order of the
inputs; a value's bytes are followed by those of its storage where a view pins more than it shows.
"""

import torch

from cgcompile.passes.split import Piece, SplitGraph, Value


def split_text(split: SplitGraph, *, lines: bool = True) -> str:
    """The split as text: a header, then a few lines for each piece."""
    blocks = [_header(split)]
    blocks += [_piece_text(split, piece, lines) for piece in split.pieces]
    if split.numbers is not None:
        blocks.append(f"sizes returned: {', '.join(split.numbers.outputs)}")
    if split.graph_break is not None:
        blocks.append(f"ended by a graph break: {split.graph_break if lines else '...'}")
    return "\n".join(blocks)


def _header(split: SplitGraph) -> str:
    captured = sum(piece.capture for piece in split.pieces)
    eager = len(split.pieces) - captured
    text = (
        f"{_count(len(split.pieces), 'piece')}: {captured} captured, {eager} eager; "
        f"{len(split.distinct)} distinct; "
        f"{split.symbols.pretty(split.crossing_bytes())} B cross"
    )
    sizes = [f"{name} = {dim}" for name, dim in split.symbols.dims.items()]
    return "\n".join([text, *(["sizes: " + ", ".join(sizes)] if sizes else [])])


def _piece_text(split: SplitGraph, piece: Piece, lines: bool) -> str:
    kind = "captured" if piece.capture else "eager   "
    row = f"{piece.name}  {kind}  {_count(piece.num_ops, 'op')}"
    if piece.same_as != piece.index:
        row += f", same as piece_{piece.same_as}"
    if piece.compiled and not piece.capture:
        row += ", compiled on its own"
    if piece.uncompiled is not None:
        row += f", left uncompiled: {piece.uncompiled}"
    rows = [row, *(f"  why  {why}" for why in piece.why)]
    shown = piece.lines[:3] if not piece.capture else piece.lines[:1]
    rows += [f"  at   {f'{where}: ' if lines else ''}{code}" for where, code in shown]
    if len(piece.lines) > 3 and not piece.capture:
        rows.append(f"  at   {len(piece.lines) - 3} more lines")
    rows.append("  in   " + _values_text(split, piece.inputs))
    rows.append("  out  " + _values_text(split, piece.outputs))
    return "\n".join(rows)


def _values_text(split: SplitGraph, names: tuple[str, ...]) -> str:
    values = [split.values[name] for name in names]
    moving = [_value_text(split, each) for each in values if not each.static]
    static = [each for each in values if each.static]
    if static:
        tensors = [each.meta for each in static if isinstance(each.meta, torch.Tensor)]
        total = sum((split.symbols.nbytes(tensor) for tensor in tensors), start=0)
        moving.append(f"{len(static)} static {split.symbols.pretty(total)} B")
    return ", ".join(moving) or "-"


def _value_text(split: SplitGraph, each: Value) -> str:
    found, symbols = each.meta, split.symbols
    if not isinstance(found, torch.Tensor):
        return each.name
    own, (_, storage) = symbols.nbytes(found), symbols.storage(found)
    if (own - storage).is_nonnegative:  # an expanded tensor has more elements than memory
        return f"{each.name} {symbols.shape_text(found)} {symbols.pretty(storage)} B"
    size = f"{symbols.pretty(own)} of {symbols.pretty(storage)}"
    return f"{each.name} {symbols.shape_text(found)} {size} B"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
