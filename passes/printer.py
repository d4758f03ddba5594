"""The printed form of a piece: stable, ASCII, free of paths and of names that torch invents.

Snapshots, logs and ``explain`` all use it. Sizes are ``s0``, ``s1``, ... in the order of the
inputs; a value's bytes are followed by those of its storage where a view pins more than it shows.
"""

from collections.abc import Mapping

import torch

from cgcompile.passes.pieces import Piece, Value
from cgcompile.passes.symbols import Symbols


def piece_text(piece: Piece, values: Mapping[str, Value], symbols: Symbols, lines: bool) -> str:
    """A piece as a few lines: what it is, why, where from, what goes in and out."""
    kind = "captured" if piece.capture else "eager   "
    row = f"{piece.name}  {kind}  {count(piece.num_ops, 'op')}"
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
    rows.append("  in   " + _values_text([values[name] for name in piece.inputs], symbols))
    rows.append("  out  " + _values_text([values[name] for name in piece.outputs], symbols))
    return "\n".join(rows)


def _values_text(values: list[Value], symbols: Symbols) -> str:
    moving = [_value_text(each, symbols) for each in values if not each.static]
    static = [each for each in values if each.static]
    if static:
        tensors = [each.meta for each in static if isinstance(each.meta, torch.Tensor)]
        total = sum((symbols.nbytes(tensor) for tensor in tensors), start=0)
        moving.append(f"{len(static)} static {symbols.pretty(total)} B")
    return ", ".join(moving) or "-"


def _value_text(each: Value, symbols: Symbols) -> str:
    found = each.meta
    if not isinstance(found, torch.Tensor):
        return each.name
    own, (_, storage) = symbols.nbytes(found), symbols.storage(found)
    if (own - storage).is_nonnegative:  # an expanded tensor has more elements than memory
        return f"{each.name} {symbols.shape_text(found)} {symbols.pretty(storage)} B"
    size = f"{symbols.pretty(own)} of {symbols.pretty(storage)}"
    return f"{each.name} {symbols.shape_text(found)} {size} B"


def count(number: int, noun: str) -> str:
    """``1 piece``, ``2 pieces``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
