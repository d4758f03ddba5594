"""Fake values of nodes that a pass inserted, or gave something else to compute with.

A pass need not fill in fake values, nor think of the nodes behind those that it changes:
:func:`fill_values` runs what is new, and what gets other arguments than before as far as shapes,
dtypes and the like go, on the fake values of its arguments. Without this file a pass that makes a
dtype another one is seen by nobody: the nodes behind it still tell what was traced.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.passes.nodes import (
    COMPUTING,
    attribute,
    changes_layout,
    is_symbolic_number,
    is_torchs,
    layout_of,
    symbols_of,
    tensors,
    value,
)
from cgcompile.passes.regions import nodes_in_regions


class Call(NamedTuple):
    """What a node computed, and of what, before a pass."""

    target: Any
    args: Any
    kwargs: Any
    value: Any

    def unchanged(self, node: fx.Node) -> bool:
        """Whether the node still calls the same with the same; ``args`` is replaced as a whole."""
        same = node.target == self.target and node.args is self.args
        return same and (node.kwargs is self.kwargs or node.kwargs == self.kwargs)


def calls_of(gm: fx.GraphModule) -> dict[fx.Node, Call]:
    """All nodes of a graph as they are, for :func:`fill_values` after a pass."""
    return {n: Call(n.target, n.args, n.kwargs, value(n)) for n in gm.graph.nodes}


def fill_values(gm: fx.GraphModule, before: Mapping[fx.Node, Call]) -> str | None:
    """Give computing nodes the fake values that they have after a pass; returns what failed.

    Nodes that were there without a value stay so: Dynamo's own statements (entering autocast) have
    none. Those inside of a state region (``vmap``) keep what they have.

    Args:
        gm: the graph after the pass.
        before: its nodes before it. In a graph of new nodes alone, values that the pass brought
            are taken as they are.
    """
    return _Filler(gm, before).fill()


class _Filler:
    def __init__(self, gm: fx.GraphModule, before: Mapping[fx.Node, Call]) -> None:
        self._gm, self._before = gm, before
        self._moved: set[fx.Node] = set()  # old nodes that compute something else now
        self._rebuilt = not any(node in before for node in gm.graph.nodes)
        self._in_regions: set[fx.Node] | None = None

    def fill(self) -> str | None:
        for node in self._gm.graph.nodes:
            if node.op not in COMPUTING:
                continue
            problem = self._visit(node)
            if problem is not None:
                return problem
        return None

    def _visit(self, node: fx.Node) -> str | None:
        if node not in self._before and "example_value" not in node.meta:
            try:
                node.meta["example_value"] = self._run(node, grad=False)
            except Exception as error:
                return (
                    f"node {node.name!r} has no fake value, and running it on fakes failed: {error}"
                )
            return None
        return self._again(node) if self._is_stale(node) and self._can_run(node) else None

    def _is_stale(self, node: fx.Node) -> bool:
        """Whether the value of a node may be that of another call."""
        if not self._moved.isdisjoint(node.all_input_nodes):
            return True
        call = self._before.get(node)
        if call is None:
            return not self._rebuilt  # with a value of the pass's own
        if call.unchanged(node):
            return False
        return node.target != call.target or not alike(
            [self._old_value(each) for each in _leaves(call.args, call.kwargs)],
            [self._new_value(each) for each in _leaves(node.args, node.kwargs)],
        )

    def _old_value(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        call = self._before.get(leaf)
        return self._new_value(leaf) if call is None or leaf.op == "get_attr" else call.value

    def _new_value(self, leaf: Any) -> Any:
        return known_value(self._gm, leaf) if isinstance(leaf, fx.Node) else leaf

    def _can_run(self, node: fx.Node) -> bool:
        if not (tensors(value(node)) or is_symbolic_number(value(node))):
            return False
        if changes_layout(node):
            return False  # it would change the fake value of its argument once more
        if self._in_regions is None:
            self._in_regions = nodes_in_regions(self._gm)
        return node not in self._in_regions

    def _again(self, node: fx.Node) -> str | None:
        """Run a node that has a value; take the new one if it is another one."""
        old = value(node)
        try:
            made = self._run(node, any(each.requires_grad for each in tensors(old)))
        except Exception as error:
            free = symbols_of([old, *(value(each) for each in node.all_input_nodes)])
            trusted = node not in self._before or not is_torchs(node)
            if trusted or any(map(compat.is_unbacked, free)):
                return None  # it may need what only tracing has
            return f"node {node.name!r} fails on its new arguments: {error}"
        if not alike([made], [old]):
            node.meta["example_value"] = made
            self._moved.add(node)
        return None

    def _run(self, node: fx.Node, grad: bool) -> Any:
        fake_mode = compat.fake_context(value(each) for each in self._gm.graph.nodes)
        with torch.set_grad_enabled(grad), fake_mode:
            return run_on_fakes(self._gm, node)


def known_value(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The fake value of a node, or the attribute that it reads."""
    return attribute(gm, node) if node.op == "get_attr" else value(node)


def _leaves(*found: Any) -> list[Any]:
    """What calls are made of, nodes and constants, containers opened."""
    leaves: list[Any] = []
    fx.node.map_aggregate(found, leaves.append)
    return leaves


def alike(some: list[Any], others: list[Any]) -> bool:
    """Whether values are the same as far as an op can tell that sees no data.

    Sizes that only the data tell count as equal: an op makes new symbols for them at each run.
    """
    one, other = compat.tree_leaves(some), compat.tree_leaves(others)
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout is not other.layout or one.dim() != other.dim():
            return False
        if one.layout is not torch.strided:
            return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return all(map(_same_fact, layout_of(one), layout_of(other)))
    if is_symbolic_number(one) and is_symbolic_number(other):
        return _same_fact(one.node.expr, other.node.expr)
    return type(one) is type(other) and bool(one == other)


def _same_fact(one: Any, other: Any) -> bool:
    if one == other:
        return True
    free = getattr(one, "free_symbols", set()) | getattr(other, "free_symbols", set())
    return any(map(compat.is_unbacked, free))


def run_on_fakes(
    gm: fx.GraphModule, node: fx.Node, instead: Mapping[fx.Node, Any] | None = None
) -> Any:
    """What the node makes of the fake values of its arguments, under the autocast that it is in.

    Args:
        gm: the graph of the node.
        node: a node that computes.
        instead: values to take for some arguments in place of their own.
    """
    replaced = instead or {}

    def fake(argument: fx.Node) -> Any:
        return replaced[argument] if argument in replaced else known_value(gm, argument)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), fake)
    with _autocast_at(gm, node):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return gm.get_submodule(str(node.target))(*args, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


@contextmanager
def _autocast_at(gm: fx.GraphModule, node: fx.Node) -> Iterator[None]:
    """The autocast contexts that the graph has open at a node."""
    entered: list[fx.Node] = []
    if gm.graph.find_nodes(op="call_function", target=compat.ENTER_AUTOCAST):
        for each in gm.graph.nodes:
            if each is node:
                break
            if each.target is compat.ENTER_AUTOCAST:
                entered.append(each)
            elif each.target is compat.LEAVES[compat.ENTER_AUTOCAST]:
                entered.remove(each.args[0])
    opened = []
    try:
        for each in entered:
            opened.append(compat.ENTER_AUTOCAST(*each.args, **each.kwargs))
        yield
    finally:
        for token in reversed(opened):
            compat.LEAVES[compat.ENTER_AUTOCAST](token)
