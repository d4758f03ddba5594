"""Make a graph splittable and small: the passes that run before nodes are assigned to pieces.

* :func:`bind_symbols`: sizes read off tensors become arithmetic on the graph's own size inputs. A
  size that came out of a captured piece would be frozen at capture.
* :func:`pull_items`: each item of a multi-value result (``chunk``, ``split``, ``topk``) is read
  right after it, so that tensors cross, never tuples.
* :class:`EliminateNoOps` removes calls without effect, :class:`EliminateClones` copies. Both keep
  every bit of every result, and which results alias, so they are on by default. A call that is a
  boundary, or in an eager region, stays.

Note [Fake aliases]. Whether two values alias is read off their fake storages. So when a copy is
removed, the fake values of its views are computed again over their new memory: a view that kept the
old one would hide a hazard from every later pass.
"""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.boundaries import Boundaries, in_eager_region
from cgcompile.errors import PassError
from cgcompile.passes.base import calls_of, fill_values, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    changes_layout,
    is_allocation,
    is_container_item,
    is_integer,
    is_known_view,
    is_size_arithmetic,
    is_torchs,
    layout_of,
    nodes_by_storage,
    nodes_in_regions,
    short_name,
    storages,
    symbols_of,
    tensors,
    value,
    written,
)
from cgcompile.torch_compat import dynamo, expressions, torch_ops

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


# ---------------------------------------------------------------- calls without effect, and copies


_CHANGES_HISTORY = {"requires_grad_", "detach_", "retain_grad", "register_hook"}
_SWITCHES_GRAD = (torch_ops.SET_GRAD_ENABLED, torch_ops.ENTER_INFERENCE_MODE)
# Views of the same layout that are not their argument: they lack its history.
_NOT_ITSELF = {"detach", "getattr", "alias"}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Memory:
    """Nodes of a graph by storage; nodes are erased only through it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._families = nodes_by_storage(self._order)
        self._in_region = nodes_in_regions(gm)
        self._switches_grad = any(node.target in _SWITCHES_GRAD for node in self._order)
        self._bound = bound_symbols(gm).keys()
        self._wrapped = any(_is_wrapped(value(node)) for node in self._order)
        self._replaced: list[Any] = []  # the key of a freed storage would be used for another

    def family(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose value is in the memory of ``node``, itself included, in order."""
        (key,) = storages(value(node))
        return self._families[key]

    def interchangeable(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether two nodes are equal plain tensors, except for their memory."""
        if not _same_layout(value(node), value(source)):
            return False
        if self._switches_grad and value(source).requires_grad:
            return False  # a view created under no_grad has no history of its base
        both = {*self.family(node), *self.family(source)}
        touching = {*both, *(user for member in both for user in member.users)}
        return self._in_region.isdisjoint(touching) and not any(map(_changes_itself, touching))

    def changes_a_result(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether the caller would get one tensor object instead of two."""
        both = {*self.family(node), *self.family(source)}
        returned = [m for m in both if any(user.op == "output" for user in m.users)]
        if len(returned) < 2 and all(member.op in COMPUTING for member in both):
            return False
        # A later node may return the same object: in-place ops and ``to`` return their argument.
        later = (m for m in returned if self._after(m, node))
        return node in returned or any(_same_layout(value(m), value(node)) for m in later)

    def first_user(self, node: fx.Node) -> fx.Node | None:
        """Return the first node that uses the memory of ``node``."""
        return min(_users(self.family(node)), key=self._order.__getitem__, default=None)

    def sharing_is_unseen(self, copy: fx.Node, source: fx.Node, filled: fx.Node) -> bool:
        """Return whether no result changes if a copy, made by ``filled``, is its source."""
        old, new = self.family(source), self.family(copy)
        if not all(self._is_of_this_graph(member) for member in (*old, *new)):
            return False
        if value(source).requires_grad or value(copy).requires_grad:
            return False  # a write to the copy could change saved tensors of autograd
        later_old = {user for user in _users(old) if self._after(user, filled)}
        if not later_old:
            return True
        later_new = {user for user in _users(new) if self._after(user, filled)}
        both = {*old, *new}
        writes = any(not both.isdisjoint(written(self._gm, user)) for user in later_old | later_new)
        return not writes and not any(user.op == "output" for user in later_old & later_new)

    def unite(self, node: fx.Node, source: fx.Node) -> bool:
        """Replace ``node`` by ``source``, an earlier node of equal layout; False if impossible."""
        fresh = self._values_over(node, source)
        if fresh is None:
            return False
        node.replace_all_uses_with(source)
        self._replaced.append(value(node))
        for member, fake in fresh.items():
            self._replaced.append(value(member))
            member.meta["example_value"] = fake
        if fresh or storages(value(node)) != storages(value(source)):
            (key,) = storages(value(node))
            moved = self._families.pop(key)
            self.family(source).extend(moved)
            self.family(source).sort(key=self._order.__getitem__)
        self.erase(node, source)
        return True

    def erase(self, node: fx.Node, source: fx.Node) -> None:
        """Remove a node; its users get ``source``."""
        node.replace_all_uses_with(source)
        self.family(source).remove(node)
        self._gm.graph.erase_node(node)

    def _values_over(self, node: fx.Node, source: fx.Node) -> dict[fx.Node, Any] | None:
        """Return fake values over the memory of ``source`` for the views of ``node``; or None."""
        if storages(value(node)) == storages(value(source)):
            return {}
        values = {node: value(source)}
        for member in self.family(node):
            if member is node:
                continue
            itself = [n for n in written(self._gm, member) if _same_tensor(value(n), value(member))]
            fake = values.get(itself[0]) if itself else self._view_over(member, values)
            if fake is None:
                return None
            values[member] = fake
        del values[node]
        return values

    def _view_over(self, view: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return the value of a view over other memory; None if no equal view exists there."""
        if view.op not in COMPUTING or not is_known_view(view) or written(self._gm, view):
            return None
        before = tensors(value(view))
        mode = dynamo.fake_context(before)
        try:
            with torch.set_grad_enabled(any(t.requires_grad for t in before)), mode:
                result = run_on_fakes(self._gm, view, values)
        except Exception:  # the copy stays
            return None
        after = tensors(result)
        equal = len(before) == len(after) and all(map(_same_layout, before, after))
        return result if equal else None

    def _is_of_this_graph(self, node: fx.Node) -> bool:
        """Return whether an op of torch in this graph allocated the node's memory."""
        known = node.op in COMPUTING and is_torchs(node) and not self._wrapped
        return known and symbols_of(value(node)) <= self._bound

    def _after(self, node: fx.Node, other: fx.Node) -> bool:
        return self._order[node] > self._order[other]


def _users(members: Iterable[fx.Node]) -> set[fx.Node]:
    return {user for member in members for user in member.users}


def _changes_itself(node: fx.Node) -> bool:
    """Return whether a call changes a tensor object beyond its data."""
    return changes_layout(node) or (
        node.op in COMPUTING and short_name(node.target) in _CHANGES_HISTORY
    )


def _is_wrapped(values: Any) -> bool:
    """Return whether a value has a tensor subclass of inner tensors, whose memory is hidden."""
    return any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors(values))


def _same_layout(one: Any, other: Any) -> bool:
    """Return whether two values are plain tensors of equal dtype, device, sizes and strides."""
    both = (one, other)
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in both):
        return False
    if any(_is_wrapped(t) or len(storages(t)) != 1 for t in both):
        return False
    history = one.requires_grad is other.requires_grad
    return history and layout_of(one) == layout_of(other)


def _same_tensor(one: Any, other: Any) -> bool:
    """Return whether two values are equal in layout and share their memory."""
    return _same_layout(one, other) and storages(one) == storages(other)


# ---------------------------------------------------------------- passes


class _Elimination:
    name: str

    def __init__(self, boundaries: Boundaries | None = None) -> None:
        self._boundaries = boundaries

    def uuid(self) -> str:
        return f"{self.name}/1/{self._boundaries.uuid() if self._boundaries else ''}"


class EliminateNoOps(_Elimination):
    """Remove calls that return their argument: dropout that is off, ``to`` of the same type, ...

    A call is removed if it is known to create views at most, writes nothing, and its result has the
    memory, dtype, sizes and strides of its argument. Dropout is decided by its arguments, because
    its fake result is a copy although the real one is not. Arithmetic is removed for integers alone
    (``arange(n) + 0``): for floating point ``x + 0`` loses the sign of -0.0, and ``x * 1`` may
    change the bits of a NaN.

    Args:
        boundaries: splitting ops, which stay.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()
        >>> split = cgcompile.explain(model, torch.randn(4, 8)).split
        >>> next(record.difference for record in split.passes if record.name == "eliminate_noops")
        {'torch.nn.functional.dropout': -1}
    """

    name = "eliminate_noops"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        memory = _Memory(gm)
        # Dropout first: its fake result is a copy, and hides that a view is one of an input.
        for node in filter(_dropout_is_off, _removable(gm, self._boundaries)):
            _remove_alias(memory, node)
        for node in _removable(gm, self._boundaries):
            if _returns_its_argument(gm, node):
                _remove_alias(memory, node)
            else:
                number = _unchanged_number(node)
                if number is not None:
                    _remove_copy(memory, node, number, node)
        return gm


class EliminateClones(_Elimination):
    """Remove copies that can share the memory of their source without a change of any result.

    A copy is ``clone``, ``to(copy=True)``, or ``copy_`` into memory just allocated. It is removed
    if the layouts are equal, and either the source (or memory that it shares) is not used after it,
    or neither is written after it and the caller does not get both. It stays if the source is an
    input of the graph, the result of an op other than torch's, or part of a gradient's history.

    Args:
        boundaries: splitting ops, which stay.

    Example:
        >>> def model(x):
        ...     return torch.relu(x).clone() + 1
        >>> split = cgcompile.explain(model, torch.randn(4)).split
        >>> next(record.difference for record in split.passes if record.name == "eliminate_clones")
        {'clone': -1}
    """

    name = "eliminate_clones"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        memory = _Memory(gm)
        for node in _removable(gm, self._boundaries):
            name = short_name(node.target)
            if name in ("clone", "to", "_to_copy"):
                _remove_copy(memory, node, node.args[0], node)  # type: ignore[arg-type]
            elif name == "copy_" and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
                _remove_filled(memory, node, node.args[0], node.args[1])  # type: ignore[arg-type]
        return gm


def _removable(gm: fx.GraphModule, boundaries: Boundaries | None) -> Iterator[fx.Node]:
    """Yield torch calls on a tensor that are no boundary, in order; the caller may erase them."""
    for node in list(gm.graph.nodes):
        if node.op not in COMPUTING or not is_torchs(node) or in_eager_region(node):
            continue
        first = node.args[0] if node.args else None
        on_tensor = isinstance(first, fx.Node) and isinstance(value(first), torch.Tensor)
        if on_tensor and (boundaries is None or boundaries.match(node) is None):
            yield node


# ---------------------------------------------------------------- no-ops


def _returns_its_argument(gm: fx.GraphModule, node: fx.Node) -> bool:
    if _dropout_is_off(node):
        return True  # also for the in-place form
    if not is_known_view(node) or short_name(node.target) in _NOT_ITSELF or written(gm, node):
        return False
    return _same_tensor(value(node), value(node.args[0]))  # type: ignore[arg-type]


def _dropout_is_off(node: fx.Node) -> bool:
    if node.op != "call_function" or short_name(node.target) != "dropout":
        return False
    if node.target is torch.nn.functional.dropout:
        p, on = torch_ops.given_argument(node, "p"), torch_ops.given_argument(node, "training")
    elif len(node.args) == 3:  # torch.dropout and aten::dropout
        p, on = node.args[1:]
    else:
        return False
    return on is False or (isinstance(p, (int, float)) and p == 0)


def _remove_alias(memory: _Memory, node: fx.Node) -> None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    alike = _same_layout(value(node), value(source)) and memory.interchangeable(node, source)
    # Dropout that is off returns its argument itself.
    if alike and (_dropout_is_off(node) or not memory.changes_a_result(node, source)):
        memory.unite(node, source)


def _unchanged_number(node: fx.Node) -> fx.Node | None:
    """Return the integer tensor to which a call adds 0, or which it multiplies by 1; or None."""
    name = short_name(node.target)
    if name not in ("add", "sub", "mul") or len(node.args) != 2 or node.kwargs:
        return None
    tensor, number = node.args
    fake = value(tensor) if isinstance(tensor, fx.Node) else None
    if not isinstance(fake, torch.Tensor) or fake.dtype not in _INTEGERS:
        return None
    neutral = 1 if name == "mul" else 0
    return tensor if type(number) is int and number == neutral else None  # type: ignore[return-value]


# ---------------------------------------------------------------- copies


def _remove_copy(memory: _Memory, copy: fx.Node, source: fx.Node, filled: fx.Node) -> bool:
    """Replace a copy, made by ``filled``, by its source if no result changes."""
    return (
        _same_layout(value(copy), value(source))
        and storages(value(copy)) != storages(value(source))
        and memory.interchangeable(copy, source)
        and memory.sharing_is_unseen(copy, source, filled)
        and memory.unite(copy, source)
    )


def _remove_filled(memory: _Memory, fill: fx.Node, target: fx.Node, source: fx.Node) -> None:
    """Remove a buffer that ``copy_`` fills before any other use; see :func:`_remove_copy`."""
    if not is_allocation(target) or not is_torchs(target):
        return
    if memory.first_user(target) is fill and _remove_copy(memory, target, source, fill):
        memory.erase(fill, source)
