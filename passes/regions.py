"""State regions: stretches of a graph between a node that opens a state and the one that closes it.

Inside a ``vmap`` the tensors are batched wrappers, inside a nested ``grad`` they are dual; such
values cannot leave their region, so a region is never cut: if one of its nodes cannot be captured,
the whole region runs eager. Autocast and grad mode are different: each piece repeats them for
itself (``partition.py``), except where a graph that runs without gradients turns them on.
"""

from typing import NamedTuple

from torch import fx

from cgcompile import compat
from cgcompile.passes.nodes import short_name

_CLOSED_BY = {
    "_vmap_increment_nesting": "_vmap_decrement_nesting",
    "_grad_increment_nesting": "_grad_decrement_nesting",
    "_jvp_increment_nesting": "_jvp_decrement_nesting",
    "_enter_dual_level": "_exit_dual_level",
    "_enter_inference_mode": "_exit_inference_mode",
    "_saved_tensors_hooks_disable": "_saved_tensors_hooks_enable",
}
_LABEL = {
    "_vmap_increment_nesting": "torch.vmap",
    "_grad_increment_nesting": "torch.func.grad",
    "_jvp_increment_nesting": "torch.func.jvp",
    "_enter_dual_level": "forward-mode AD",
    "_enter_inference_mode": "torch.inference_mode",
    "_saved_tensors_hooks_disable": "disabled saved-tensor hooks",
}


class Region(NamedTuple):
    """Nodes ``first`` to ``last`` of the graph (positions, both included), as one outer region."""

    first: int
    last: int
    label: str
    gradients: bool = False  # it turns grad mode on in a graph that runs without


def state_regions(gm: fx.GraphModule) -> list[Region]:
    """The outermost regions of the graph, in order; they do not overlap."""
    found: list[Region] = []
    open_regions: list[tuple[str, int, str]] = []  # what closes it, where it began, its label
    grad_on_from: int | None = None
    grad_mode_outside = grad_mode_around(gm)
    for position, node in enumerate(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is compat.SET_GRAD_ENABLED and grad_mode_outside is False:
            if node.args[0] and grad_on_from is None:
                grad_on_from = position
            elif not node.args[0] and grad_on_from is not None:
                found.append(Region(grad_on_from, position, "torch.enable_grad", gradients=True))
                grad_on_from = None
            continue
        name = short_name(node.target)
        if name in _CLOSED_BY:
            open_regions.append((_CLOSED_BY[name], position, _LABEL[name]))
        elif open_regions and name == open_regions[-1][0]:
            _, first, label = open_regions.pop()
            found.append(Region(first, position, label))
    return _outermost(found)


def nodes_in_regions(gm: fx.GraphModule) -> set[fx.Node]:
    """Every node that lies in a state region, its ends included."""
    nodes = list(gm.graph.nodes)
    return {node for region in state_regions(gm) for node in nodes[region.first : region.last + 1]}


def grad_mode_around(gm: fx.GraphModule) -> bool | None:
    """The grad mode in which the graph starts and ends; None if it never touches it.

    Dynamo restores the mode at the end of the graph, so the last toggle tells.
    """
    toggles = [n for n in gm.graph.nodes if n.target is compat.SET_GRAD_ENABLED]
    return bool(toggles[-1].args[0]) if toggles else None


def _outermost(regions: list[Region]) -> list[Region]:
    outer: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.first, -r.last)):
        if outer and region.first <= outer[-1].last:
            if region.last > outer[-1].last:
                outer[-1] = outer[-1]._replace(last=region.last)
            outer[-1] = outer[-1]._replace(gradients=outer[-1].gradients or region.gradients)
            continue
        outer.append(region)
    return outer
