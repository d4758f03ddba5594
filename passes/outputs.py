"""What each output of a graph must still be after a pass: :func:`changed_output`.

Dynamo's code around the graph, and the pieces behind a piece, were traced with what the outputs
were. Without this check a caller silently gets another shape or dtype.

Shape, dtype, device and layout stay, always. Strides stay where another piece takes the output: it
was compiled for them, and Inductor's code asserts them. An output that only the caller sees may be
laid out in another way: nothing that was traced depends on it, and whoever asks a tensor for more,
as ``view`` does, is told by torch.
"""

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.fakes import known_value
from cgcompile.passes.nodes import is_symbolic_number
from cgcompile.passes.symbols import Symbols, dtype_text

_UNKNOWN = object()  # of a node that has no fake value


class Change(NamedTuple):
    """An output that is not what it was: its number, and both as text."""

    place: int
    found: str
    expected: str


def outputs_of(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The fake value of each output, in order."""
    leaves = compat.tree_leaves(gm.graph.output_node().args[0])
    return tuple(_output(gm, each) for each in leaves)


def _output(gm: fx.GraphModule, leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    known = leaf.op == "get_attr" or "example_value" in leaf.meta
    return known_value(gm, leaf) if known else _UNKNOWN


def changed_output(
    gm: fx.GraphModule, expected: Iterable[Any], strided: Collection[int] = ()
) -> Change | None:
    """The first output that is not what it was; None if there is none.

    Sizes are compared as expressions: two that no allowed size tells apart are equal. A size that
    only the data tell is equal to any other, and so is what is neither tensor nor number.

    Args:
        gm: a graph after a pass, with fake values.
        expected: what :func:`outputs_of` told before it; as many as now.
        strided: numbers of the outputs whose strides must stay as well.
    """
    symbols: Symbols | None = None
    for place, (found, before) in enumerate(zip(outputs_of(gm), expected, strict=True)):
        if found is before or found is _UNKNOWN or before is _UNKNOWN:
            continue
        symbols = symbols or Symbols(gm)
        if not _same(found, before, symbols, place in strided):
            texts = [_text(each, symbols, place in strided) for each in (found, before)]
            return Change(place, *texts)
    return None


def _same(one: Any, other: Any, symbols: Symbols, strided: bool) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.layout, one.dim()) != (other.dtype, other.layout, other.dim()):
            return False
        if one.device != other.device or not _all_same(one.shape, other.shape, symbols):
            return False
        if not strided or one.layout is not torch.strided:
            return True
        # The stride of a dimension of size 1 is never used.
        matter = [dim for dim, size in enumerate(one.shape) if type(size) is not int or size != 1]
        one_strides, other_strides = one.stride(), other.stride()
        return _all_same(
            [one_strides[d] for d in matter], [other_strides[d] for d in matter], symbols
        )
    if _is_whole(one) and _is_whole(other):
        return _all_same([one], [other], symbols)
    return isinstance(one, torch.Tensor) is isinstance(other, torch.Tensor)


def _is_whole(found: Any) -> bool:
    return isinstance(found, (int, torch.SymInt)) and not isinstance(found, bool)


def _all_same(some: Iterable[Any], others: Iterable[Any], symbols: Symbols) -> bool:
    return all(_same_number(a, b, symbols) for a, b in zip(some, others, strict=True))


def _same_number(one: Any, other: Any, symbols: Symbols) -> bool:
    if one is other:
        return True
    if not all(type(n) is int or hasattr(n.node, "expr") for n in (one, other)):
        return True  # a length of nested tensors: nobody can tell
    a, b = symbols.number(one), symbols.number(other)
    free: set[sympy.Symbol] = a.free_symbols | b.free_symbols
    if a == b or any(symbol not in symbols for symbol in free):
        return True
    if sympy.expand(a - b) == 0:
        return True
    if not free:
        return False
    tried = (symbols.numbers_with(symbol, size) for symbol in free for size in _TRIED)
    values = ((a.subs(each), b.subs(each)) for each in tried if each is not None)
    return all(x == y for x, y in values)


# Sizes at which two expressions are compared that sympy does not know to be equal.
_TRIED = (2, 3, 4, 5, 7, 8, 12, 16, 24, 30, 31, 32, 48, 64, 100, 128, 240, 256, 1000, 1024, 4096)


def _text(found: Any, symbols: Symbols, strided: bool) -> str:
    """``f32[s0, 16] on cpu``."""
    if is_symbolic_number(found):
        return symbols.pretty(found.node.expr)
    if not isinstance(found, torch.Tensor):
        return f"{found!r}"
    if found.layout is not torch.strided:
        return f"{dtype_text(found.dtype)}{list(found.shape)} {found.layout} on {found.device}"
    text = f"{symbols.shape_text(found)} on {found.device}"
    if not strided:
        return text
    strides = ", ".join(symbols.pretty(symbols.number(stride)) for stride in found.stride())
    return f"{text}, strides ({strides})"
