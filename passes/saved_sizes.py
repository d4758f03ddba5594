"""Expressions of sizes in a saved graph, and the trace that they belong to.

Each distinct expression is one row of a table and refers to earlier rows, so that nothing is
parsed or evaluated as text.
"""

import operator
from dataclasses import fields
from typing import Any

import sympy

from cgcompile import compat


class ExpressionWriter:
    """The table of expressions of a graph that is being saved."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._known: dict[Any, int] = {}
        self._endless = {value: name for name, value in compat.endless_numbers().items()}
        self._heads = {head: name for name, head in compat.expression_heads().items()}

    def add(self, expression: sympy.Basic) -> int:
        """The row of an expression.

        Raises:
            ValueError: it has a part of unknown kind.
        """
        key = (type(expression), expression)  # 1 and 1.0 and true are equal
        if key not in self._known:
            row = self._row(expression)
            self.rows.append(row)
            self._known[key] = len(self.rows) - 1
        return self._known[key]

    def _row(self, expression: Any) -> Any:
        if isinstance(expression, sympy.Symbol):
            return ["symbol", expression.name, dict(expression.assumptions0)]
        if expression in (sympy.true, sympy.false):
            return ["truth", bool(expression)]
        if expression in self._endless:
            return ["endless", self._endless[expression]]
        if isinstance(expression, sympy.Integer):
            return ["integer", int(expression)]
        if isinstance(expression, sympy.Rational):
            return ["ratio", int(expression.p), int(expression.q)]
        if isinstance(expression, sympy.Float) and sympy.Float(float(expression)) == expression:
            return ["float", float(expression)]
        head = self._heads.get(type(expression))
        if head is None or not expression.args:
            raise ValueError(f"an expression of kind {type(expression).__name__}")
        parts = [self.add(part) for part in expression.args]
        for evaluate in (True, False):
            if _applied(type(expression), expression.args, evaluate) == expression:
                return [head, evaluate, *parts]
        raise ValueError(f"the expression {expression}, which cannot be built from its parts")


def _applied(head: Any, parts: Any, evaluate: bool) -> Any:
    try:
        return head(*parts) if evaluate else head(*parts, evaluate=False)
    except TypeError:
        return None


def read_expressions(rows: list[Any]) -> list[sympy.Basic]:
    """The expressions of a table."""
    heads, endless = compat.expression_heads(), compat.endless_numbers()
    made: list[Any] = []
    for kind, *parts in rows:
        if kind == "symbol":
            found = sympy.Symbol(parts[0], **parts[1])
        elif kind == "truth":
            found = sympy.true if parts[0] else sympy.false
        elif kind == "endless":
            found = endless[parts[0]]
        elif kind == "integer":
            found = sympy.Integer(operator.index(parts[0]))
        elif kind == "ratio":
            found = sympy.Rational(*map(operator.index, parts))  # sympy evaluates texts
        elif kind == "float":
            found = sympy.Float(parts[0])
        else:
            found = _applied(heads[kind], [made[part] for part in parts[1:]], parts[0])
        made.append(found)
    return made


def saved_state(env: Any, expressions: ExpressionWriter) -> list[Any]:
    """What is known of the sizes of a trace, in the order of the fields of ``SizeState``.

    Raises:
        ValueError: something is of unknown kind.
    """
    state = compat.size_state(env)

    def row(found: Any) -> Any:
        return ["x", expressions.add(found)] if isinstance(found, sympy.Basic) else found

    rows: list[Any] = []
    for each in fields(state):
        found = getattr(state, each.name)
        if each.name == "symbols":
            found = [[symbol, *known] for symbol, known in found.items()]
        if isinstance(found, list):
            found = [
                [row(item) for item in entry] if isinstance(entry, (list, tuple)) else row(entry)
                for entry in found
            ]
        rows.append(found)
    return rows


def read_state(rows: list[Any], expressions: list[sympy.Basic]) -> compat.SizeState:
    """The inverse of :func:`saved_state`."""

    def value(row: Any) -> Any:
        if not isinstance(row, list):
            return row
        if len(row) == 2 and row[0] == "x":
            return expressions[row[1]]
        return [value(item) for item in row]

    symbols, replacements, guards, asserts, divisible, settings, unbacked = map(value, rows)
    return compat.SizeState(
        symbols={symbol: tuple(known) for symbol, *known in symbols},
        replacements=[(symbol, found) for symbol, found in replacements],
        guards=[(expression, oblivious, line) for expression, oblivious, line in guards],
        asserts=[(symbol, expression, text) for symbol, expression, text in asserts],
        divisible=divisible,
        settings=settings,
        unbacked=unbacked,
    )
