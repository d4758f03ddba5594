"""Guards on sizes as text: a grammar of comparisons and arithmetic, evaluated without ``eval``.

The text comes from ``ShapeEnv.produce_guards_expression``, in which ``L['t0']`` is the first size.
It may be read from a file, so only what torch's printer of guards writes is evaluated.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
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


_KNOWN = _OPERATORS.keys()
_Term = Callable[[Sequence[Any]], Any]


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
    return bool(_parsed(text)(sizes))


def _parsed(text: str) -> _Term:
    if len(text) > _LONGEST:
        raise NotAGuard(f"guards of {len(text)} characters, more than {_LONGEST}")
    try:
        return _term(ast.parse(text, mode="eval").body, 0)
    except NotAGuard:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAGuard(f"guards that do not parse: {error}") from None


def _term(node: ast.expr, depth: int) -> _Term:
    """Return a function of the sizes for a node of the grammar; raise for any other node."""
    if depth > _DEEPEST:
        raise NotAGuard(f"guards nested deeper than {_DEEPEST}")
    terms = partial(map, partial(_term, depth=depth + 1))
    match node:
        case ast.Constant(value=number) if type(number) in (int, float, bool):
            return lambda sizes: number
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))):
            if name[:1] == "t" and name[1:].isdecimal() and len(name) < 8:
                return partial(_size, int(name[1:]))
        case ast.BoolOp(op=op, values=values):
            hold, parts = all if isinstance(op, ast.And) else any, list(terms(values))
            return lambda sizes: hold(part(sizes) for part in parts)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return partial(_applied, _OPERATORS[type(op)], list(terms([operand])))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return partial(_applied, _OPERATORS[type(op)], list(terms([left, right])))
        # 9 ** 9 ** 9 would not return.
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=n)) if n in range(9):
            return partial(_applied, lambda base: base**n, list(terms([left])))
        case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= _KNOWN:
            checks = [_OPERATORS[type(op)] for op in ops]
            return partial(_compared, checks, list(terms([left, *others])))
        case ast.Call(func=func, args=args, keywords=[]) if _name(func) in _functions():
            return partial(_applied, _functions()[_name(func)], list(terms(args)))
    raise NotAGuard(f"{ast.unparse(node)[:80]!r} is no comparison or arithmetic of sizes")


def _size(number: int, sizes: Sequence[Any]) -> Any:
    if number >= len(sizes):
        raise NotAGuard(f"guards on size {number} of {len(sizes)}")
    return sizes[number]


def _applied(function: Callable[..., Any], parts: list[_Term], sizes: Sequence[Any]) -> Any:
    return function(*(part(sizes) for part in parts))


def _compared(checks: list[Callable[..., Any]], parts: list[_Term], sizes: Sequence[Any]) -> bool:
    values = [part(sizes) for part in parts]
    return all(check(*pair) for check, *pair in zip(checks, values, values[1:], strict=False))


def _name(node: ast.expr) -> str:
    """Return a name, or a name with one attribute; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
