"""Guards on sizes as text: a grammar of comparisons and arithmetic, evaluated without ``eval``.

The text comes from ``ShapeEnv.produce_guards_expression``, in which ``L['t0']`` is the first size.
It may be read from a file, so only what torch's printer of guards writes is evaluated.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

_LONGEST = 2**16  # characters; torch writes some hundred
_DEEPEST = 64


class NotAGuard(ValueError):
    """A text that is not a guard on sizes."""


_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions that torch's printers of guards write, in any supported version."""
    known: dict[str, Callable[..., Any]] = {"abs": abs, "max": max, "min": min, "round": round}
    known |= {f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc")}
    names = ("sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "_sym_sqrt")
    known |= {f"torch.{name}": getattr(torch, name) for name in names if hasattr(torch, name)}
    return known


def require_guards(text: str) -> None:
    """Raise NotAGuard for a text that :func:`guards_hold` cannot evaluate."""
    _parsed(text)


def guards_hold(text: str, sizes: Sequence[Any]) -> bool:
    """Return whether guards hold for integer or symbolic sizes; raises as above."""
    return bool(_evaluated(_parsed(text), sizes))


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise NotAGuard(f"guards of {len(text)} characters, more than {_LONGEST}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAGuard(f"guards that do not parse: {error}") from None
    _check(tree, 0)
    return tree


def _check(node: ast.expr, depth: int) -> None:
    """Allow what :func:`_evaluated` evaluates, and nothing else."""
    if depth > _DEEPEST:
        raise NotAGuard(f"guards nested deeper than {_DEEPEST}")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return
    if _size_number(node) is not None:
        return
    parts = _parts(node)
    if parts is None:
        raise NotAGuard(f"{ast.unparse(node)[:80]!r} is no comparison or arithmetic of sizes")
    for part in parts:
        _check(part, depth + 1)


def _parts(node: ast.expr) -> list[ast.expr] | None:
    """Return the operands of a node of the grammar; None for any other node."""
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return [node.operand]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return [node.left, node.right]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        # 9 ** 9 ** 9 would not return.
        small = isinstance(node.right, ast.Constant) and node.right.value in range(9)
        return [node.left] if small else None
    if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and not node.keywords and _name(node.func) in _functions():
        return node.args
    return None


def _evaluated(node: Any, sizes: Sequence[Any]) -> Any:
    """Return the value of a checked node."""
    number = _size_number(node)
    if number is not None:
        if number >= len(sizes):
            raise NotAGuard(f"guards on size {number} of {len(sizes)}")
        return sizes[number]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BoolOp):
        hold = all if isinstance(node.op, ast.And) else any
        return hold(_evaluated(part, sizes) for part in node.values)
    if isinstance(node, ast.Compare):
        values = [_evaluated(part, sizes) for part in (node.left, *node.comparators)]
        rows = zip(node.ops, values, values[1:], strict=False)
        return all(_OPERATORS[type(op)](left, right) for op, left, right in rows)
    values = [_evaluated(part, sizes) for part in _parts(node) or ()]
    if isinstance(node, ast.Call):
        return _functions()[_name(node.func)](*values)
    if isinstance(node.op, ast.Pow):
        return values[0] ** node.right.value
    return _OPERATORS[type(node.op)](*values)


def _size_number(node: ast.expr) -> int | None:
    """Return N of ``L['tN']``; None for anything else."""
    if not (isinstance(node, ast.Subscript) and _name(node.value) == "L"):
        return None
    name = node.slice.value if isinstance(node.slice, ast.Constant) else None
    plain = isinstance(name, str) and name[:1] == "t" and name[1:].isdecimal() and len(name) < 8
    return int(str(name)[1:]) if plain else None


def _name(node: ast.expr) -> str:
    """Return a name, or a name with one attribute; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
