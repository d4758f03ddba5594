"""Advance counters, such as the lengths of the layers of a static cache, by one op for all.

The rule: ``counter.add_(int)`` of an input [] moves to the end of the graph only if it is the last
node that touches the counter's storage and the one that writes it, and if all nodes after it are
known: an op of a user may read the counter where the graph does not show it. A call whose inputs
share memory with a counter, unlike the traced ones, is refused.
"""

from collections.abc import Mapping

import torch
from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.passes.nodes import (
    ADVANCES,
    COMPUTING,
    is_torchs,
    nodes_in_regions,
    storages,
    value,
    written,
)
from cgcompile.torch_compat import raw_memory, torch_ops


def increments(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Return the counters whose increment can move to the end of the graph, with that node."""
    inputs = gm.graph.find_nodes(op="placeholder")
    counters = {key: node for node in inputs if _is_counter(node) for key in storages(value(node))}
    if not counters:
        return {}
    touching: dict[int, list[fx.Node]] = {key: [] for key in counters}
    movable: set[fx.Node] = set()
    for node in gm.graph.nodes:
        for key in storages([value(n) for n in (node, *node.all_input_nodes)]) & counters.keys():
            touching[key].append(node)
        if node.op in COMPUTING and not _is_known(node):
            movable.clear()
        movable.add(node)
    movable -= nodes_in_regions(gm)
    moved: dict[fx.Node, fx.Node] = {}
    for key, counter in counters.items():
        *reads, last = touching[key]
        writes = (storages(list(map(value, written(gm, node)))) for node in reads)
        if last in movable and _increments(last, counter) and all(key not in w for w in writes):
            moved[counter] = last
    return moved


def advance(gm: fx.GraphModule, moved: Mapping[fx.Node, fx.Node]) -> None:
    """Increment counters at the end of a graph, instead of where :func:`increments` found it."""
    groups: dict[tuple[int, torch.device], list[fx.Node]] = {}
    for counter, node in moved.items():
        number, device = node.args[1], value(counter).device
        groups.setdefault((number, device), []).append(counter)  # type: ignore[arg-type]
        gm.graph.erase_node(node)
    with gm.graph.inserting_before(gm.graph.output_node()):
        for (number, _), counters in groups.items():
            node = gm.graph.call_function(torch_ops.FOREACH_ADD_, (counters, number))
            node.meta[ADVANCES] = True


def _is_counter(node: fx.Node) -> bool:
    number = value(node)
    plain = isinstance(number, torch.Tensor) and raw_memory.is_plain_tensor(number)
    return plain and (number.dtype, number.dim()) == (torch.int64, 0)


def _increments(node: fx.Node, counter: fx.Node) -> bool:
    called = node.op == "call_method" and node.target == "add_"
    alone = called and not node.kwargs and not node.users and len(node.args) == 2
    return alone and node.args[0] is counter and type(node.args[1]) is int


def _is_known(node: fx.Node) -> bool:
    # A tensor of inference mode cannot be written after the region.
    if node.target is torch_ops.LEAVES[torch_ops.ENTER_INFERENCE_MODE]:
        return False
    return is_torchs(node) or target_name(node.target).startswith("cgcompile::")
