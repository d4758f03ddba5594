"""Inline the regions that Dynamo traced once: :func:`inline_regions`.

A function marked by ``torch.compiler.nested_compile_region`` is a submodule of the graph, and each
call of it a node ``invoke_subgraph(submodule, name, *operands)``. Splitting needs one flat graph.
The rule: after it, the graph is the one that Dynamo makes without the mark, fake values included.
"""

import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.errors import PassError
from cgcompile.passes.base import alike, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    attribute,
    changes_layout,
    is_symbolic_number,
    storages,
    symbols_of,
    tensors,
    toggles_state,
    value,
)
from cgcompile.passes.regions import nodes_in_regions

Repeated = tuple[fx.Node, fx.Node]
"""An input of the first call of a region, and the input in its place in a later call."""


def has_regions(gm: fx.GraphModule) -> bool:
    """Return whether a graph calls a region."""
    return next(_calls(gm), None) is not None


def inline_regions(gm: fx.GraphModule) -> list[list[Repeated]]:
    """Replace the calls of regions by their ops; return the inputs that stand for each other.

    Raises:
        PassError: a region cannot be inlined; the graph is unchanged or must be dropped.
    """
    repeated: list[list[Repeated]] = []
    first_calls: dict[str, fx.Node] = {}
    copied: dict[fx.Node, int] = {}
    known: list[set[int]] = []
    calls = list(_calls(gm))
    for call in calls:
        _check(gm, call)
    _check_states(gm, calls)
    for call in calls:
        name = str(call.args[0].target)  # type: ignore[union-attr]
        first = first_calls.setdefault(name, call)
        pairs = zip(first.args[2:], call.args[2:], strict=True)
        repeated.append(
            [
                (one, other)
                for one, other in pairs
                if isinstance(one, fx.Node) and one.op == "placeholder"
                if isinstance(other, fx.Node) and other.op == "placeholder"
            ]
        )
    for number, call in enumerate(calls):
        known.append(_storages_of_inputs(gm, call))
        copied.update(dict.fromkeys(_inline(gm, call), number))
    bodies = [node for node in gm.graph.find_nodes(op="get_attr") if node.target in first_calls]
    for call in calls:
        gm.graph.erase_node(call)
    for body in bodies:
        gm.graph.erase_node(body)
    for name in first_calls:
        delattr(gm, name)
    for node in reversed(copied):  # Dynamo leaves sizes in a region that nothing uses
        if not node.users and _is_of_sizes(node):
            gm.graph.erase_node(node)
    if calls:
        _refresh(gm, copied, known)
        gm.recompile()
    return repeated


def _is_of_sizes(node: fx.Node) -> bool:
    """Return whether a node only reads sizes or takes an item."""
    if node.target in ("size", "numel", "dim", torch.Size, operator.getitem):
        return True
    is_arithmetic = getattr(node.target, "__module__", None) == "_operator"
    return is_arithmetic and is_symbolic_number(value(node))


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for node in gm.graph.find_nodes(op="get_attr"):
        yield from (user for user in node.users if compat.is_named(user.target, "invoke_subgraph"))


def _check(gm: fx.GraphModule, call: fx.Node) -> None:
    """Refuse what cannot be copied, or run on fakes, a second time."""
    body = attribute(gm, call.args[0])  # type: ignore[arg-type]
    inputs = body.graph.find_nodes(op="placeholder")
    known = symbols_of([value(node) for node in inputs])
    in_regions = nodes_in_regions(body)
    for node in body.graph.nodes:
        problem = None
        if any(map(compat.is_unbacked, symbols_of(value(node)) - known)):
            problem = "a size that depends on data"
        elif changes_layout(node):
            problem = f"{node.target}, which changes a layout in place"
        elif node in in_regions:
            problem = "a part that switches a state of torch"
        if problem is not None:
            raise PassError.region(name=call.name, problem=problem)
    if any(user.target is not operator.getitem or user.args[0] is not call for user in call.users):
        raise PassError.region(name=call.name, problem="a result that is used whole")
    if len(inputs) != len(call.args) - 2:
        raise PassError.region(name=call.name, problem="other inputs than its call")


def _check_states(gm: fx.GraphModule, calls: list[fx.Node]) -> None:
    """Refuse calls of one region in other states of torch: its Python code may read them."""
    states: dict[Any, Any] = {}  # by the node that entered it, or by what it switches
    first: dict[Any, list[Any]] = {}
    for node in gm.graph.nodes:
        if node in calls:
            state = [*states.items()]
            if first.setdefault(node.args[0].target, state) != state:
                raise PassError.region(name=node.name, problem="another state of torch than before")
        elif toggles_state(node):
            if node.args and isinstance(node.args[0], fx.Node):
                states.pop(node.args[0], None)
            else:
                has_exit = node.target in compat.LEAVES
                states[node if has_exit else node.target] = node.args


def _storages_of_inputs(gm: fx.GraphModule, call: fx.Node) -> set[int]:
    body = attribute(gm, call.args[0])  # type: ignore[arg-type]
    return storages([value(node) for node in body.graph.find_nodes(op="placeholder")])


def _inline(gm: fx.GraphModule, call: fx.Node) -> list[fx.Node]:
    """Copy the ops of a region before its call, and let users read them; return the copies."""
    body = attribute(gm, call.args[0])  # type: ignore[arg-type]
    copies: dict[fx.Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True)
    )
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                copies[node] = _shared_attribute(gm, body, node)
            elif node.op in COMPUTING:
                copies[node] = gm.graph.node_copy(node, copies.__getitem__)
    results = body.graph.output_node().args[0]
    for user in list(call.users):
        result = results[user.args[1]]
        user.replace_all_uses_with(copies[result])
        gm.graph.erase_node(user)
    return [copy for node, copy in copies.items() if node.op in COMPUTING]


def _shared_attribute(gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Read an attribute of a region from the whole graph, which gets it."""
    held = attribute(body, node)
    name = base = str(node.target).replace(".", "_")
    number = 0
    while hasattr(gm, name) and getattr(gm, name) is not held:
        number += 1
        name = f"{base}_{number}"
    setattr(gm, name, held)
    copy = gm.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy


def _refresh(gm: fx.GraphModule, copied: Mapping[fx.Node, int], known: list[set[int]]) -> None:
    """Give copied nodes, and all that depends on them, fake values of their own."""
    # ``copied`` has the number of the call of each copy, ``known`` the storages that the call has.
    in_regions = nodes_in_regions(gm)
    fake_mode = compat.fake_context(map(value, gm.graph.nodes))
    changed = set(copied)
    for node in gm.graph.nodes:
        old = value(node)
        if node.op not in COMPUTING or old is None:
            continue
        if node not in copied and changed.isdisjoint(node.all_input_nodes):
            continue
        new = None
        if node in copied:
            seen = known[copied[node]]
            if seen.isdisjoint(storages(old)):
                new = compat.another_fake(old)
            seen |= storages(old)
        if new is None:
            if node in in_regions or changes_layout(node):
                raise PassError.region(name=node.name, problem="a value that cannot be made again")
            new = _run(gm, node, fake_mode)
        node.meta["example_value"] = new
        changed.add(node)


def _run(gm: fx.GraphModule, node: fx.Node, fake_mode: AbstractContextManager[Any]) -> Any:
    """Run a node on fakes in the modes in which it was traced; its value is like before."""
    old = value(node)
    grad = any(tensor.requires_grad for tensor in tensors(old))
    inference = any(tensor.is_inference() for tensor in tensors(old))
    try:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), fake_mode:
            new = run_on_fakes(gm, node)
    except Exception as error:
        raise PassError.region(name=node.name, problem=str(error)) from error
    if not alike([new], [old]):
        raise PassError.region(name=node.name, problem=f"{old}, and {new} where it is repeated")
    return new
