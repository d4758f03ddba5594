"""Find state regions: the nodes from one that opens a state to the one that closes it.

Inside a ``vmap`` the tensors are batched wrappers, inside a nested ``grad`` they are dual; such
values cannot leave their region, so a region is never cut: if one of its nodes cannot be captured,
the whole region runs eager. Where a graph sets a switch of the process (``sdpa_kernel``,
deterministic algorithms, grad mode on in a graph that runs without), the region in which the
switch differs always runs eager: a replay does not run the host code that sets it.

Autocast, ``no_grad`` and ``inference_mode`` are different: each piece enters them
(``partition.py``).
"""

from typing import NamedTuple

import torch
from torch import fx

from cgcompile.passes.nodes import COMPUTING, short_name
from cgcompile.reasons import Reason
from cgcompile.torch_compat import torch_ops

_PAIRS = {  # opening function: (closing function, label)
    "_vmap_increment_nesting": ("_vmap_decrement_nesting", "torch.vmap"),
    "_jvp_increment_nesting": ("_jvp_decrement_nesting", "torch.func.jvp"),
    "_enter_dual_level": ("_exit_dual_level", "forward-mode AD"),
    "_saved_tensors_hooks_disable": ("_saved_tensors_hooks_enable", "disabled saved-tensor hooks"),
}
# Each call sets the switch; Dynamo restores the first value at the end of a context.
_SWITCHES = {
    "_sdpa_kernel": "torch.nn.attention.sdpa_kernel",
    "_set_deterministic_algorithms": "torch.use_deterministic_algorithms",
    "_set_fwd_grad_enabled": "torch.autograd.forward_ad",
    "_set_grad_enabled": "torch.enable_grad",
}


class Region(NamedTuple):
    """One outermost region: the nodes from position ``first`` to ``last``, inclusive."""

    first: int
    last: int
    label: str
    eager: Reason | None = None  # why it always runs eager; None if that depends on its nodes


def state_regions(gm: fx.GraphModule) -> list[Region]:
    """Return the outermost regions of the graph, in order; they do not overlap."""
    regions = [*_paired_regions(gm), *_differentiating_regions(gm)]
    for name in _SWITCHES:
        regions += _switched_regions(gm, name)
    return _outermost(regions)


def nodes_in_regions(gm: fx.GraphModule) -> set[fx.Node]:
    """Return every node in a state region, its ends included."""
    nodes = list(gm.graph.nodes)
    return {node for region in state_regions(gm) for node in nodes[region.first : region.last + 1]}


def grad_mode_around(gm: fx.GraphModule) -> bool | None:
    """Return the grad mode that the graph starts in and, by its last toggle, ends in, or None."""
    toggles = [n for n in gm.graph.nodes if n.target is torch_ops.SET_GRAD_ENABLED]
    return bool(toggles[-1].args[0]) if toggles else None


def _paired_regions(gm: fx.GraphModule) -> list[Region]:
    regions: list[Region] = []
    open_regions: list[tuple[int, str, str]] = []  # (start, closing function, label)
    for position, node in enumerate(gm.graph.nodes):
        name = short_name(node.target) if node.op == "call_function" else ""
        if name in _PAIRS:
            open_regions.append((position, *_PAIRS[name]))
        elif open_regions and name == open_regions[-1][1]:
            first, _, label = open_regions.pop()
            regions.append(Region(first, position, label))
    return regions


def _differentiating_regions(gm: fx.GraphModule) -> list[Region]:
    """Return the region from the start of a nested gradient to the last computed gradient."""
    # The values between carry the history that the gradient needs; a compiled piece would drop it.
    nodes = list(gm.graph.nodes)
    called = [(i, short_name(n.target)) for i, n in enumerate(nodes) if n.op in COMPUTING]
    starts = [i for i, name in called if name == "_grad_increment_nesting"]
    ends = [
        i for i, name in called if name in ("_grad_decrement_nesting", "_autograd_grad", "backward")
    ]
    ends += [i for i, node in enumerate(nodes) if node.target is torch.autograd.grad]
    if not ends:
        return []
    first = min(starts) if starts and min(starts) < min(ends) else called[0][0]
    return [Region(first, max(ends), "torch.func.grad", Reason.GRADIENTS)]


def _switched_regions(gm: fx.GraphModule, name: str) -> list[Region]:
    """Return where a switch has another value than at the end of the graph, calls included."""
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    calls = [
        node for node in order if node.op == "call_function" and short_name(node.target) == name
    ]
    if not calls or (name == "_set_grad_enabled" and grad_mode_around(gm) is not False):
        return []
    reason = Reason.GRADIENTS if name == "_set_grad_enabled" else Reason.STATE_REGION
    final, label = _setting(calls[-1]), _SWITCHES[name]
    regions: list[Region] = []
    began: int | None = None
    for call in calls:
        first = min([order[call], *(order[n] for n in call.all_input_nodes if n.op in COMPUTING)])
        if _setting(call) != final:
            began = first if began is None else began
        elif began is not None:
            regions.append(Region(began, order[call], label, reason))
            began = None
        elif name != "_set_grad_enabled":  # set without a context: the host has to run it
            regions.append(Region(first, order[call], label, reason))
    return regions


def _setting(call: fx.Node) -> str:
    """Return the arguments of a switching call as text, with nested calls spelled out."""
    return str(fx.map_arg((call.args, dict(call.kwargs)), lambda node: str(node.args)))


def _outermost(regions: list[Region]) -> list[Region]:
    outer: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.first, -r.last)):
        if outer and region.first <= outer[-1].last:
            last = max(outer[-1].last, region.last)
            cause = outer[-1] if outer[-1].eager or not region.eager else region
            outer[-1] = Region(outer[-1].first, last, cause.label, cause.eager)
        else:
            outer.append(region)
    return outer
