"""Expressions of sizes: their values, nodes that compute them, and Python text of them."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp

# The handlers of torch's interpreter of expressions that have another name here than in the modules
# ``operator`` and ``math``.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "ceil_to_int": math.ceil,
    "floor_to_int": math.floor,
    "identity": operator.pos,
    "int_truediv": operator.truediv,
    "maximum": torch.sym_max,
    "minimum": torch.sym_min,
    "not_": torch.sym_not,
    "pow_by_natural": operator.pow,
    "python_mod": operator.mod,
    "round_decimal": round,
    "round_to_int": round,
    "sqrt": torch.sym_sqrt,
    "to_dtype": torch.sym_float,  # to float64, always
    "trunc_to_int": math.trunc,
    "where": torch.sym_ite,
}

_TEXTS: Mapping[Callable[..., Any], str] = {
    operator.abs: "abs({})",
    operator.add: "({} + {})",
    operator.and_: "({} & {})",
    operator.eq: "({} == {})",
    operator.floordiv: "({} // {})",
    operator.ge: "({} >= {})",
    operator.gt: "({} > {})",
    operator.le: "({} <= {})",
    operator.lt: "({} < {})",
    operator.mod: "({} % {})",
    operator.mul: "({} * {})",
    operator.ne: "({} != {})",
    operator.or_: "({} | {})",
    operator.pos: "{}",
    operator.pow: "({} ** {})",
    operator.truediv: "({} / {})",
    operator.xor: "({} ^ {})",
    torch.sym_float: "float({})",
    torch.sym_ite: "({1} if {0} else {2})",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
    torch.sym_not: "(not {})",
    torch.sym_sqrt: "math.sqrt({})",
}

NAMES_IN_TEXT: Mapping[str, Any] = {"math": math}  # besides symbols and builtins


class _Handlers:
    """The handlers of torch's interpreter; ``call`` gets a function and its arguments."""

    def __init__(self, call: Callable[..., Any], constant: Callable[[Any], Any]) -> None:
        self._call, self._constant = call, constant

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _FUNCTIONS.get(name) or getattr(operator, name, None) or getattr(math, name)
        return partial(self._handle, function)

    def _handle(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # The interpreter adds the dtype of the result, which each function has by itself.
        return self._call(function, *(a for a in arguments if not isinstance(a, torch.dtype)))

    def constant(self, number: Any, dtype: torch.dtype) -> Any:
        kinds = {torch.int64: int, torch.bool: bool}
        return self._constant(kinds.get(dtype, float)(number))

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


def _value(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a call, or a new node that makes it where an argument is a node."""
    node = next((each for each in arguments if isinstance(each, fx.Node)), None)
    return function(*arguments) if node is None else node.graph.call_function(function, arguments)


def _text(function: Callable[..., Any], *arguments: str) -> str:
    if function in _TEXTS:
        return _TEXTS[function].format(*arguments)
    owner = "" if function is round else "math."
    return f"{owner}{function.__name__}({', '.join(arguments)})"


def _text_of_constant(number: float) -> str:
    return repr(number) if math.isfinite(number) else f"float('{number}')"


_VALUES = _Handlers(_value, lambda number: number)
_IN_TEXT = _Handlers(_text, _text_of_constant)


def evaluated(expression: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Return the value of an expression for numbers, symbolic numbers or nodes of its symbols."""
    return sympy_interp(_VALUES, dict(values), expression)


def text_of(expression: sympy.Basic) -> str:
    """Return an expression as Python text, which may use :data:`NAMES_IN_TEXT`."""
    names = {symbol: str(symbol) for symbol in expression.free_symbols}
    return str(sympy_interp(_IN_TEXT, names, expression))


def python_predicate(
    conditions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]
) -> Callable[..., bool]:
    """Return a Python function of the values of ``symbols``: whether all conditions hold."""
    text = " and ".join(map(text_of, conditions)) or "True"
    arguments = ", ".join(map(str, symbols))
    predicate: Callable[..., bool] = eval(f"lambda {arguments}: {text}", {**NAMES_IN_TEXT})
    return predicate
