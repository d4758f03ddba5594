"""Make a graph splittable: no size and no container is left to cross between two pieces.

Two passes, run before the pieces are assigned:

* :class:`BindSymbols`: sizes read off tensors become arithmetic on the graph's own size inputs. A
  size that came out of a captured piece would be frozen at capture.
* :class:`PullItems`: each item of a multi-value result (``chunk``, ``split``, ``topk``) is taken
  out next to its source, so that tensors cross, never tuples.
"""

import operator
from collections.abc import Set
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.errors import PassError
from cgcompile.passes.fakes import calls_of, fill_values
from cgcompile.passes.nodes import (
    COMPUTING,
    is_container_item,
    is_symbolic_number,
    short_name,
    symbols_of,
    tensors,
    value,
)


def bound_symbols(gm: fx.GraphModule) -> dict[sympy.Symbol, fx.Node]:
    """The symbols that an input of the graph gives directly, with that input."""
    bound: dict[sympy.Symbol, fx.Node] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        found = value(node)
        if is_symbolic_number(found) and isinstance(found.node.expr, sympy.Symbol):
            bound.setdefault(found.node.expr, node)
    return bound


# What reads a size and does nothing else; only such a node may be erased.
_SIZE_READERS = {"size", "numel", "nelement", "stride", "storage_offset", "dim", "ndimension"}
_SIZE_READERS |= {"len", "__len__", "getattr", "element_size"}
_SIZE_READERS |= {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset"}


class BindSymbols:
    """Replace sizes that are read off tensors by arithmetic on the inputs that carry them."""

    name = "bind_symbols"

    def uuid(self) -> str:
        return "bind_symbols/2"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        binder, before = _Binder(gm), calls_of(gm)
        for node in list(gm.graph.nodes):
            if node.op == "placeholder":
                binder.unite(node)
            elif node.op in COMPUTING:
                binder.visit(node)
        problem = fill_values(gm, before)
        if problem is not None:
            raise PassError.invalid(name=self.name, problem=problem)
        _lift_numbers(gm)
        return gm


def is_floating(node: fx.Node, bound: Set[sympy.Symbol]) -> bool:
    """Whether the node is arithmetic on sizes that inputs of the graph give.

    Such a node can be computed anywhere, so it belongs to no piece: each piece that needs it
    repeats it, and no size ever comes out of a captured piece.
    """
    numbers = compat.tree_leaves(value(node))
    return (
        node.op in COMPUTING
        and bool(numbers)
        and all(isinstance(n, (int, float)) or is_symbolic_number(n) for n in numbers)
        and symbols_of(numbers) <= bound
        and not any(tensors(value(argument)) for argument in node.all_input_nodes)
    )


def _lift_numbers(gm: fx.GraphModule) -> None:
    """Move attributes and arithmetic on sizes to the top: whatever moves later may use them."""
    bound = bound_symbols(gm).keys()
    placeholders = gm.graph.find_nodes(op="placeholder")
    anchor = placeholders[-1] if placeholders else None
    for node in list(gm.graph.nodes):
        if anchor is not None and (node.op == "get_attr" or is_floating(node, bound)):
            if anchor.next is not node:
                anchor.append(node)
            anchor = node


def _is_tuple_of_sizes(found: Any) -> bool:
    """Whether it is a shape, or the strides of a tensor, which are a plain tuple."""
    return isinstance(found, tuple) and all(
        isinstance(each, (int, torch.SymInt)) and not isinstance(each, bool) for each in found
    )


class _Binder:
    def __init__(self, gm: fx.GraphModule) -> None:
        self._graph = gm.graph
        self._bound = bound_symbols(gm)
        self._made: dict[sympy.Expr, fx.Node | int] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._last_placeholder = placeholders[-1] if placeholders else None

    def unite(self, placeholder: fx.Node) -> None:
        """Use one input for a size that several inputs give: Dynamo guards that they are equal."""
        found = value(placeholder)
        if not isinstance(found, torch.SymInt) or placeholder in self._bound.values():
            return
        if symbols_of(found) <= self._bound.keys():
            number = self._number(found)
            for user in list(placeholder.users):
                self._swap(user, placeholder, number)

    def visit(self, node: fx.Node) -> None:
        """Replace a size that the node reads off a tensor."""
        found = value(node)
        reads_tensor = any(tensors(value(argument)) for argument in node.all_input_nodes)
        if not reads_tensor:
            self._cancelled(node, found)
        if not reads_tensor or not symbols_of(found) <= self._bound.keys():
            return
        if _is_tuple_of_sizes(found):
            self._replace_size(node, tuple(self._number(size) for size in found))
        elif isinstance(found, (int, torch.SymInt)) and not isinstance(found, bool):
            self._replace(node, self._number(found))

    def _cancelled(self, node: fx.Node, found: Any) -> None:
        """Replace a number such as ``n * 0 + 4`` that does not depend on the value of ``n``."""
        given = symbols_of([value(argument) for argument in node.all_input_nodes])
        if given <= self._bound.keys() or not symbols_of(found) <= self._bound.keys():
            return
        if isinstance(found, torch.SymInt):
            found = self._number(found)
        elif isinstance(found, torch.SymFloat) and found.node.expr.is_number:
            found = float(found.node.expr)
        if isinstance(found, (int, float, fx.Node)):
            for user in list(node.users):
                self._swap(user, node, found)
            if compat.is_arithmetic(node.target):
                self._graph.erase_node(node)

    def _number(self, size: int | torch.SymInt) -> fx.Node | int:
        """A node, or a plain number, that has the value of ``size`` at every call."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if expression in self._bound:
            return self._bound[expression]
        if expression not in self._made:
            assert self._last_placeholder is not None  # it binds the symbols of the expression
            with self._graph.inserting_before(self._last_placeholder.next):
                made = compat.expression_nodes(self._graph, expression, self._bound)
            self._made[expression] = made
        return self._made[expression]

    def _replace_size(self, node: fx.Node, sizes: tuple[fx.Node | int, ...]) -> None:
        for user in list(node.users):
            picks_one = user.target is operator.getitem and isinstance(user.args[1], int)
            if picks_one:
                self._replace(user, sizes[user.args[1]])  # type: ignore[index]
                self._graph.erase_node(user)
        self._replace(node, sizes)

    def _replace(self, node: fx.Node, new: Any) -> None:
        for user in list(node.users):
            self._swap(user, node, new)
        if short_name(node.target) in _SIZE_READERS:
            self._graph.erase_node(node)

    @staticmethod
    def _swap(user: fx.Node, old: fx.Node, new: Any) -> None:
        user.args = fx.map_arg(user.args, lambda argument: new if argument is old else argument)
        user.kwargs = fx.map_arg(user.kwargs, lambda argument: new if argument is old else argument)


class PullItems:
    """Move each item of a multi-value result right behind the node that made it."""

    name = "pull_items"

    def uuid(self) -> str:
        return "pull_items/1"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        last: dict[fx.Node, fx.Node] = {}
        for node in list(gm.graph.nodes):
            if node.op not in COMPUTING or not is_container_item(node):
                continue
            source = node.args[0]
            anchor = last.get(source, source)
            if source.op in COMPUTING and anchor.next is not node:
                anchor.append(node)
            last[source] = node
        return gm
