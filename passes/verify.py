"""What must be true of a graph before and after every pass.

``verify`` checks: the graph is well formed (FX's own lint), the inputs are the ones that Dynamo
will pass, the number of outputs is unchanged, and every computing node has a fake value. A pass
that inserts nodes need not fill in their fake values; :func:`fill_values` does, by running the
new node on the fake values of its arguments.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.passes.nodes import COMPUTING, attribute, value


def signature(gm: fx.GraphModule) -> tuple[tuple[str, ...], int]:
    """What a pass must keep: the names of the inputs in order, and the number of outputs."""
    inputs = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
    return inputs, len(compat.tree_leaves(gm.graph.output_node().args[0]))


def problem_in(gm: fx.GraphModule, expected: tuple[tuple[str, ...], int]) -> str | None:
    """The first thing wrong with the graph, in words; None if it is valid."""
    try:
        gm.graph.lint()
        found = signature(gm)
    except Exception as error:  # lint raises RuntimeError, KeyError, AttributeError, ...
        return f"{type(error).__name__}: {error}"
    if found[0] != expected[0]:
        return f"its inputs are {list(found[0])}, expected {list(expected[0])}"
    if found[1] != expected[1]:
        return f"it has {found[1]} outputs, expected {expected[1]}"
    return None


def fill_values(gm: fx.GraphModule, known: Set[fx.Node]) -> str | None:
    """Give every new computing node without a fake value one; returns what failed, or None.

    Nodes in ``known`` are left alone: Dynamo's own statements (entering autocast) have no value.
    """
    missing = [
        node
        for node in gm.graph.nodes
        if node.op in COMPUTING and node not in known and "example_value" not in node.meta
    ]
    if not missing:
        return None
    fake_mode = compat.fake_context(value(node) for node in gm.graph.nodes)
    for node in missing:
        try:
            with torch.no_grad(), fake_mode:
                node.meta["example_value"] = run_on_fakes(gm, node)
        except Exception as error:
            return f"node {node.name!r} has no fake value, and running it on fakes failed: {error}"
    return None


def run_on_fakes(
    gm: fx.GraphModule, node: fx.Node, instead: Mapping[fx.Node, Any] | None = None
) -> Any:
    """What the node makes of the fake values of its arguments.

    Args:
        gm: the graph of the node.
        node: a node that computes.
        instead: values to take for some arguments in place of their own.
    """
    replaced = instead or {}

    def fake(argument: fx.Node) -> Any:
        if argument in replaced:
            return replaced[argument]
        return attribute(gm, argument) if argument.op == "get_attr" else value(argument)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), fake)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
