"""Track which nodes share memory, and move a node into the memory of another: :class:`Memory`.

Note [Fake aliases]. Whether two values alias is read off their fake storages. So when a copy is
removed, the fake values of its views are computed again over their new memory: a view that kept the
old one would hide a hazard from every later pass.
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
    """The nodes of a graph by the storages of their values; while in use, it alone erases nodes."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._order = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._families = nodes_by_storage(self._order)
        self._in_region = nodes_in_regions(gm)
        self._switches_grad = any(node.target in _SWITCHES_GRAD for node in self._order)
        self._bound = bound_symbols(gm).keys()
        self._wrapped = any(_is_wrapped(value(node)) for node in self._order)
        self._replaced: list[Any] = []  # a storage that dies would give its key to another

    def family(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose value is in the memory of ``node``, itself included, in order."""
        (key,) = storages(value(node))
        return self._families[key]

    def interchangeable(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether two nodes are equal plain tensors, except for their memory."""
        if not same_layout(value(node), value(source)):
            return False
        if self._switches_grad and value(source).requires_grad:
            return False  # a view created under no_grad has no history of its base
        both = {*self.family(node), *self.family(source)}
        touching = {*both, *(user for member in both for user in member.users)}
        return self._in_region.isdisjoint(touching) and not any(map(_changes_itself, touching))

    def changes_a_result(self, node: fx.Node, source: fx.Node) -> bool:
        """Return whether the caller would get one tensor object instead of two.

        Another node may return the object of ``node``: in-place ops and ``to`` return their
        argument.
        """
        both = {*self.family(node), *self.family(source)}
        returned = [m for m in both if any(user.op == "output" for user in m.users)]
        is_input = any(member.op not in COMPUTING for member in both)
        return (is_input or len(returned) > 1) and any(
            m is node or (self._after(m, node) and same_layout(value(m), value(node)))
            for m in returned
        )

    def first_user(self, node: fx.Node) -> fx.Node | None:
        """Return the first node that uses the memory of ``node``."""
        return min(self._users(self.family(node)), key=self._order.__getitem__, default=None)

    def sharing_is_unseen(self, copy: fx.Node, source: fx.Node, filled: fx.Node) -> bool:
        """Return whether no result changes if a copy has the memory of its source.

        ``filled`` is the node that copies: ``copy`` itself, or a ``copy_`` into it.
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
            itself = [n for n in written(self._gm, member) if same_tensor(value(n), value(member))]
            fake = values.get(itself[0]) if itself else self._view_over(member, values)
            if fake is None:
                return None
            values[member] = fake
        del values[node]
        return values

    def _view_over(self, view: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Return the value of a view over other memory; None if that has no equal view."""
        if view.op not in COMPUTING or not is_known_view(view) or written(self._gm, view):
            return None
        before = tensors(value(view))
        mode = compat.fake_context(before)
        try:
            with torch.set_grad_enabled(any(t.requires_grad for t in before)), mode:
                result = run_on_fakes(self._gm, view, values)
        except Exception:  # the copy stays
            return None
        after = tensors(result)
        equal = len(before) == len(after) and all(map(same_layout, before, after))
        return result if equal else None

    def _is_of_this_graph(self, node: fx.Node) -> bool:
        """Return whether an op of torch in this graph allocated the node's memory."""
        known = node.op in COMPUTING and is_torchs(node) and not self._wrapped
        return known and symbols_of(value(node)) <= self._bound

    def _after(self, node: fx.Node, other: fx.Node) -> bool:
        return self._order[node] > self._order[other]

    @staticmethod
    def _users(members: Iterable[fx.Node]) -> Collection[fx.Node]:
        return {user for member in members for user in member.users}


def _changes_itself(node: fx.Node) -> bool:
    """Return whether a call changes a tensor object beyond its data."""
    return changes_layout(node) or (
        node.op in COMPUTING and short_name(node.target) in _CHANGES_HISTORY
    )


def _is_wrapped(values: Any) -> bool:
    """Return whether a value has a tensor subclass of inner tensors, whose memory is hidden."""
    return any(hasattr(tensor, "__tensor_flatten__") for tensor in tensors(values))


def same_layout(one: Any, other: Any) -> bool:
    """Return whether two values are plain tensors of equal dtype, device, sizes and strides.

    Sizes are compared as expressions, which adds no guard.
    """
    both = (one, other)
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in both):
        return False
    if any(_is_wrapped(t) or len(storages(t)) != 1 for t in both):
        return False
    history = one.requires_grad is other.requires_grad
    return history and layout_of(one) == layout_of(other)


def same_tensor(one: Any, other: Any) -> bool:
    """Return whether two values are equal in layout and share their memory."""
    return same_layout(one, other) and storages(one) == storages(other)
