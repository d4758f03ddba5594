"""Which nodes share memory, and putting a node into the memory of another: :class:`Memory`.

Note [Fake aliases]. Whether two values alias is read off their fake storages. So when a copy goes,
the fake values of its views are made again, over the memory that they lie in from now on: a view
that kept its own would hide a hazard from every later pass.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.passes.base import run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    changes_layout,
    is_known_view,
    is_torchs,
    layout_of,
    nodes_by_storage,
    short_name,
    storages,
    symbols_of,
    tensors,
    value,
    written,
)
from cgcompile.passes.regions import nodes_in_regions

_CHANGES_HISTORY = {"requires_grad_", "detach_", "retain_grad", "register_hook"}
_SWITCHES_GRAD = (compat.SET_GRAD_ENABLED, compat.ENTER_INFERENCE_MODE)


class Memory:
    """The nodes of a graph by the storages of their values; kept up to date by :meth:`unite`.

    Args:
        gm: the graph; until the last question, nodes may be erased through this class alone.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._families = nodes_by_storage(self._order)
        self._in_region = nodes_in_regions(gm)
        self._switches_grad = any(node.target in _SWITCHES_GRAD for node in self._order)
        self._bound = bound_symbols(gm).keys()
        self._wrapped = any(is_wrapped(value(node)) for node in self._order)
        self._replaced: list[Any] = []  # a storage that dies would give its key to another

    def family(self, node: fx.Node) -> list[fx.Node]:
        """Every node whose value lies in the memory of ``node``, itself included, in order."""
        (key,) = storages(value(node))
        return self._families[key]

    def interchangeable(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether two nodes are one plain tensor but for the memory that they lie in."""
        if not same_layout(value(node), value(source)):
            return False
        if self._switches_grad and value(source).requires_grad:
            return False  # a view made under no_grad is cut off from the history of its base
        both = {*self.family(node), *self.family(source)}
        touching = {*both, *(user for member in both for user in member.users)}
        return self._in_region.isdisjoint(touching) and not any(map(_changes_itself, touching))

    def changes_a_result(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether the caller would get one tensor object where two nodes are two objects now.

        What is returned may be the object that ``node`` made without being ``node``: in-place ops
        and ``to`` return their argument.
        """
        both = {*self.family(node), *self.family(source)}
        returned = [m for m in both if any(user.op == "output" for user in m.users)]
        is_input = any(member.op not in COMPUTING for member in both)
        return (is_input or len(returned) > 1) and any(
            m is node or (self._after(m, node) and same_layout(value(m), value(node)))
            for m in returned
        )

    def first_user(self, node: fx.Node) -> fx.Node | None:
        """What first uses the node, or anything that lies in its memory."""
        return min(self._users(self.family(node)), key=self._order.__getitem__, default=None)

    def sharing_is_unseen(self, copy: fx.Node, source: fx.Node, filled: fx.Node) -> bool:
        """Whether nothing could tell if a copy lay in the memory of its source.

        Args:
            copy: the node that is the copy.
            source: what it is a copy of.
            filled: the node that copies: ``copy`` itself, or a ``copy_`` into it.
        """
        old, new = self.family(source), self.family(copy)
        if not all(self._is_of_this_graph(member) for member in (*old, *new)):
            return False
        if value(source).requires_grad or value(copy).requires_grad:
            return False  # a write to the copy could reach what a gradient needs
        later_old = {user for user in self._users(old) if self._after(user, filled)}
        if not later_old:
            return True
        later_new = {user for user in self._users(new) if self._after(user, filled)}
        both = {*old, *new}
        writes = any(not both.isdisjoint(written(self._gm, user)) for user in later_old | later_new)
        return not writes and not any(user.op == "output" for user in later_old & later_new)

    def unite(self, node: fx.Node, source: fx.Node) -> bool:
        """Let ``source`` stand for ``node`` everywhere; False if that cannot be done.

        Args:
            node: a node that is ``source``, or that may share its memory; it is erased.
            source: an earlier node of equal layout.
        """
        fresh = self._values_over(node, source)
        if fresh is None:
            return False
        node.replace_all_uses_with(source)
        self._replaced.append(value(node))
        for member, found in fresh.items():
            self._replaced.append(value(member))
            member.meta["example_value"] = found
        if fresh or storages(value(node)) != storages(value(source)):
            (key,) = storages(value(node))
            moved = self._families.pop(key)
            self.family(source).extend(moved)
            self.family(source).sort(key=self._order.__getitem__)
        self.erase(node, source)
        return True

    def erase(self, node: fx.Node, source: fx.Node) -> None:
        """Remove a node that is ``source``; its users get that."""
        node.replace_all_uses_with(source)
        self.family(source).remove(node)
        self._gm.graph.erase_node(node)

    def _values_over(self, node: fx.Node, source: fx.Node) -> dict[fx.Node, Any] | None:
        """Of all else that lies in the node's memory: its fake value over that of ``source``."""
        if storages(value(node)) == storages(value(source)):
            return {}
        values = {node: value(source)}
        for member in self.family(node):
            if member is node:
                continue
            itself = [n for n in written(self._gm, member) if same_tensor(value(n), value(member))]
            found = values.get(itself[0]) if itself else self._view_over(member, values)
            if found is None:
                return None
            values[member] = found
        del values[node]
        return values

    def _view_over(self, view: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """The value of a view over other memory; None for what is no view, or comes out unlike."""
        if view.op not in COMPUTING or not is_known_view(view) or written(self._gm, view):
            return None
        before = tensors(value(view))
        mode = compat.fake_context(before)
        try:
            with torch.set_grad_enabled(any(t.requires_grad for t in before)), mode:
                found = run_on_fakes(self._gm, view, values)
        except Exception:  # whatever it is, what cannot be told is left as it was
            return None
        after = tensors(found)
        alike = len(before) == len(after) and all(map(same_layout, before, after))
        return found if alike else None

    def _is_of_this_graph(self, node: fx.Node) -> bool:
        """Whether torch made the node's memory here, so that nothing outside can know it."""
        known = node.op in COMPUTING and is_torchs(node) and not self._wrapped
        return known and symbols_of(value(node)) <= self._bound

    def _after(self, node: fx.Node, other: fx.Node) -> bool:
        return self._order[node] > self._order[other]

    @staticmethod
    def _users(members: Iterable[fx.Node]) -> Collection[fx.Node]:
        return {user for member in members for user in member.users}


def _changes_itself(node: fx.Node) -> bool:
    """Whether a call changes a tensor and not just its data, so that it matters which one it is."""
    return changes_layout(node) or (
        node.op in COMPUTING and short_name(node.target) in _CHANGES_HISTORY
    )


def is_wrapped(found: Any) -> bool:
    """Whether there is a tensor in a value that holds others, whose memory does not show."""
    return any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors(found))


def same_layout(one: Any, other: Any) -> bool:
    """Whether two values are plain tensors of one dtype, device, size, stride and offset.

    Sizes are compared as expressions, so that no guard comes of it.
    """
    both = (one, other)
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in both):
        return False
    if any(is_wrapped(t) or len(storages(t)) != 1 for t in both):
        return False
    history = one.requires_grad is other.requires_grad
    return history and layout_of(one) == layout_of(other)


def same_tensor(one: Any, other: Any) -> bool:
    """Whether two values are one tensor: equal in layout, and in the same memory."""
    return same_layout(one, other) and storages(one) == storages(other)
