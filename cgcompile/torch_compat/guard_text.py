"""Guards on sizes as text: an allow-list of comparisons and arithmetic, evaluated after the check.

The text comes from ``ShapeEnv.produce_guards_expression``, in which ``L['t0']`` is the first size.
It may be read from a file, so only what torch's printer of guards writes is evaluated.
"""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

_LONGEST = 2**16  # characters; torch writes some hundred
_DEEPEST = 64


class NotAGuard(ValueError):
    """A text that is not a guard on sizes."""


_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr),
    *(ast.BitXor, ast.USub, ast.UAdd, ast.Not, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


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
    """Return whether guards hold for integer or symbolic sizes; raise as above."""
    tree, count = _parsed(text)
    if count > len(sizes):
        raise NotAGuard(f"guards on size {count - 1} of {len(sizes)}")
    names = {f"t{number}": size for number, size in enumerate(sizes)}
    builtins = {name: _functions()[name] for name in ("abs", "max", "min", "round")}
    scope = {"__builtins__": builtins, "math": math, "torch": torch, "L": names}
    return bool(eval(compile(tree, "guards", "eval"), scope))


def _parsed(text: str) -> tuple[ast.Expression, int]:
    """Return the checked tree and the number of sizes that it needs."""
    if len(text) > _LONGEST:
        raise NotAGuard(f"guards of {len(text)} characters, more than {_LONGEST}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAGuard(f"guards that do not parse: {error}") from None
    return tree, _checked(tree.body, 0)


def _checked(node: ast.expr, depth: int) -> int:
    """Return the number of sizes that a node needs; raise NotAGuard outside the allow-list."""
    if depth > _DEEPEST:
        raise NotAGuard(f"guards nested deeper than {_DEEPEST}")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return 0
    number = _size_number(node)
    if number is not None:
        return number + 1
    operands = _operands(node)
    if operands is None:
        raise NotAGuard(f"{ast.unparse(node)[:80]!r} is no comparison or arithmetic of sizes")
    return max((_checked(operand, depth + 1) for operand in operands), default=0)


def _operands(node: ast.expr) -> list[ast.expr] | None:
    """Return the operands of an allowed node; None for any other node."""
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, _OPERATORS):
        return [node.operand]
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        return [node.left, node.right]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        # 9 ** 9 ** 9 would not return.
        small = isinstance(node.right, ast.Constant) and node.right.value in range(9)
        return [node.left] if small else None
    if isinstance(node, ast.Compare) and all(isinstance(op, _OPERATORS) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and not node.keywords and ast.unparse(node.func) in _functions():
        return node.args
    return None


def _size_number(node: ast.expr) -> int | None:
    """Return N of ``L['tN']``; None for anything else."""
    if not (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "L"):
        return None
    name = node.slice.value if isinstance(node.slice, ast.Constant) else None
    plain = isinstance(name, str) and name[:1] == "t" and name[1:].isdecimal() and len(name) < 8
    return int(str(name)[1:]) if plain and name == f"t{int(str(name)[1:])}" else None
