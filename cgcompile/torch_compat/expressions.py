"""Expressions of sizes: nodes that compute them, their values, and Python text of them."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter

# What torch's interpreter of expressions calls, where the module ``operator`` has no such name.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "ceil_to_int": math.ceil,
    "floor_to_int": math.floor,
    "identity": operator.pos,
    "int_truediv": operator.truediv,
    "log2": torch._sym_log2,  # type: ignore[attr-defined]
    "maximum": torch.sym_max,
    "minimum": torch.sym_min,
    "not_": torch.sym_not,
    "pow_by_natural": operator.pow,
    "python_mod": operator.mod,
    "round_decimal": round,
    "round_to_int": round,
    "sqrt": torch.sym_sqrt,
    "to_dtype": torch.sym_float,  # float64 is the only one
    "trunc_to_int": math.trunc,
    "where": torch.sym_ite,
}

# What the text of an expression may name, besides its symbols and builtins.
NAMES_IN_TEXT: Mapping[str, Any] = {"math": math, "torch": torch}


class _Operators:
    """The operators of expressions on numbers, symbolic numbers and nodes of a graph."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _FUNCTIONS.get(name) or getattr(operator, name)
        return partial(_applied, function)

    def constant(self, number: Any, dtype: torch.dtype) -> int | float | bool:
        kinds = {torch.int64: int, torch.bool: bool}
        return kinds.get(dtype, float)(number)

    def trunc(self, number: Any) -> Any:
        return self.to_dtype(self.trunc_to_int(number))

    def modular_indexing(self, number: Any, divisor: Any, modulus: Any) -> Any:
        return self.mod(self.floordiv(number, divisor), modulus)

    def expr_cond_pair(self, number: Any, condition: Any) -> tuple[Any, Any]:
        return number, condition

    def piecewise(self, *cases: tuple[Any, Any]) -> Any:
        *others, (result, _) = cases
        for number, condition in reversed(others):
            result = self.where(condition, number, result)
        return result


_OPERATORS = _Operators()


def _applied(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of ``function``, or a new node that calls it, if an argument is a node."""
    # The interpreter adds the dtype of the result, which each function here has by itself.
    arguments = tuple(each for each in arguments if not isinstance(each, torch.dtype))
    node = next((each for each in arguments if isinstance(each, fx.Node)), None)
    return function(*arguments) if node is None else node.graph.call_function(function, arguments)


def evaluated(expression: sympy.Expr, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Return the value of an expression for numbers, symbolic numbers or nodes of its symbols."""
    return sympy_interp(_OPERATORS, dict(values), expression)


def text_of(expression: sympy.Basic) -> str:
    """Return an expression as Python text, which may use :data:`NAMES_IN_TEXT`."""
    return str(PythonPrinter().doprint(expression))


def python_predicate(
    conditions: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]
) -> Callable[..., bool]:
    """Return a Python function of the values of ``symbols``: whether all conditions hold."""
    text = " and ".join(f"({text_of(condition)})" for condition in conditions) or "True"
    arguments = ", ".join(map(str, symbols))
    predicate: Callable[..., bool] = eval(f"lambda {arguments}: {text}", {**NAMES_IN_TEXT})
    return predicate
