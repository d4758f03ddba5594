"""Make a graph splittable, so that no size and no container crosses between two pieces.

Two passes, run before the pieces are assigned:

* :func:`bind_symbols`: sizes read off tensors become arithmetic on the graph's own size inputs. A
  size that came out of a captured piece would be frozen at capture.
* :func:`pull_items`: each item of a multi-value result (``chunk``, ``split``, ``topk``) is read
  right after it, so that tensors cross, never tuples.
"""

import operator
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.errors import PassError
from cgcompile.passes.base import calls_of, fill_values
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    is_container_item,
    is_integer,
    is_size_arithmetic,
    short_name,
    symbols_of,
    tensors,
    value,
)
from cgcompile.torch_compat import expressions, torch_ops

# Calls that read a size and do nothing else; only such a node may be erased.
_SIZE_READERS = {"size", "numel", "nelement", "stride", "storage_offset", "dim", "ndimension"}
_SIZE_READERS |= {"len", "__len__", "getattr", "element_size", *(f"sym_{n}" for n in _SIZE_READERS)}


def bind_symbols(gm: fx.GraphModule) -> None:
    """Replace sizes that are read off tensors by arithmetic on the inputs that carry them."""
    binder, before = _Binder(gm), calls_of(gm)
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            binder.unite(node)
        elif node.op in COMPUTING:
            binder.visit(node)
    problem = fill_values(gm, before)
    if problem is not None:
        raise PassError.invalid(name="bind_symbols", problem=problem)
    _lift_numbers(gm)


def _lift_numbers(gm: fx.GraphModule) -> None:
    """Move attributes and arithmetic on sizes to the top, before all nodes that may move later."""
    bound = bound_symbols(gm).keys()
    placeholders = gm.graph.find_nodes(op="placeholder")
    anchor = placeholders[-1] if placeholders else None
    for node in list(gm.graph.nodes):
        if anchor is not None and (node.op == "get_attr" or is_size_arithmetic(node, bound)):
            if anchor.next is not node:
                anchor.append(node)
            anchor = node


class _Binder:
    """Replace sizes, node by node in the order of the graph; see :func:`bind_symbols`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._graph = gm.graph
        self._bound = bound_symbols(gm)
        self._computed: dict[sympy.Expr, fx.Node | int] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._last_placeholder = placeholders[-1] if placeholders else None

    def unite(self, placeholder: fx.Node) -> None:
        """Read a size from one input where several have it: Dynamo guards that they are equal."""
        size = value(placeholder)
        if not isinstance(size, torch.SymInt) or placeholder in self._bound.values():
            return
        if symbols_of(size) <= self._bound.keys():
            expressions.replace_uses(placeholder, self._number(size))

    def visit(self, node: fx.Node) -> None:
        """Replace a size that the node reads off a tensor."""
        result = value(node)
        if not any(tensors(value(argument)) for argument in node.all_input_nodes):
            self._replace_cancelled(node, result)
        elif not symbols_of(result) <= self._bound.keys():
            return
        elif isinstance(result, tuple) and all(map(is_integer, result)):  # a shape, or strides
            sizes = tuple(map(self._number, result))
            for user in list(node.users):
                if user.target is operator.getitem and isinstance(user.args[1], int):
                    self._replace(user, sizes[user.args[1]])
                    self._graph.erase_node(user)
            self._replace(node, sizes)
        elif is_integer(result):
            self._replace(node, self._number(result))

    def _replace_cancelled(self, node: fx.Node, result: Any) -> None:
        """Replace a number such as ``n * 0 + 4`` that does not depend on the value of ``n``."""
        free = symbols_of([value(argument) for argument in node.all_input_nodes])
        if free <= self._bound.keys() or not symbols_of(result) <= self._bound.keys():
            return
        if isinstance(result, torch.SymInt):
            result = self._number(result)
        elif isinstance(result, torch.SymFloat) and result.node.expr.is_number:
            result = float(result.node.expr)
        if isinstance(result, (int, float, fx.Node)):
            expressions.replace_uses(node, result)
            if torch_ops.is_arithmetic(node.target):
                self._graph.erase_node(node)

    def _number(self, size: int | torch.SymInt) -> fx.Node | int:
        """Return a node, or a plain number, that has the value of ``size`` at every call."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression in self._bound:
            return self._bound[expression]
        if expression not in self._computed:
            assert self._last_placeholder is not None  # it binds the symbols
            with self._graph.inserting_before(self._last_placeholder.next):
                number = expressions.expression_nodes(expression, self._bound)
            self._computed[expression] = number
        return self._computed[expression]

    def _replace(self, node: fx.Node, new: Any) -> None:
        expressions.replace_uses(node, new)
        if short_name(node.target) in _SIZE_READERS:
            self._graph.erase_node(node)


def pull_items(gm: fx.GraphModule) -> None:
    """Move each item of a multi-value result right behind the node that returns it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op not in COMPUTING or not is_container_item(node):
            continue
        source = node.args[0]
        anchor = last.get(source, source)
        if source.op in COMPUTING and anchor.next is not node:
            anchor.append(node)
        last[source] = node
