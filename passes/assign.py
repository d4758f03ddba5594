"""Assign each node to a piece, captured or eager: :func:`assign_pieces`.

The order of the graph is kept. Consecutive nodes that cannot be captured form an eager piece, the
nodes between two of these a captured piece, with two refinements: allocations between two
boundaries move into the captured piece before them, and a run of nodes that launches no kernel
joins its eager neighbour, because replaying an empty graph costs time.

Note [Cut for compilers]. Where attention is a boundary, a captured piece also ends in front of each
``cgcompile::decode_attention``, which is captured: the layers of a decoder stay equal pieces, and
one of them is compiled. A FULL graph holds all pieces.
"""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import fx

from cgcompile.boundaries import AttentionCGSupport, Boundaries, SplittingOp, target_name
from cgcompile.passes.capturable import Capturability
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    is_allocation,
    is_container_item,
    is_number_tensor,
    is_size_arithmetic,
    launches_kernel,
    runs_once_on_host,
    toggles_state,
)
from cgcompile.passes.regions import state_regions
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import torch_ops

PLACEMENT = "cgcompile_placement"  # the key in node.meta

_Fallbacks = dict[fx.Node, Fallback | None]
"""Why each node that needs a piece cannot be captured, in order."""


@dataclass(frozen=True)
class Placement:
    """The piece of a node; the attributes mean the same as in ``Piece``."""

    piece: int  # ascending along the graph
    capture: bool
    why: Fallback | None  # why this very node cannot be captured
    compiled: bool
    uncompiled: str | None = None
    support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    op: SplittingOp | None = None  # the entry that makes the node a boundary


def placement(node: fx.Node) -> Placement | None:
    """Return the placement of a node; None for inputs, attributes and floating numbers."""
    return node.meta.get(PLACEMENT)


@dataclass
class _Run:
    """Consecutive nodes of one piece."""

    capture: bool
    nodes: list[fx.Node] = field(default_factory=list)
    cut: bool = False  # a captured run is before it, see Note [Cut for compilers]


def assign_pieces(gm: fx.GraphModule, boundaries: Boundaries) -> None:
    """Write a :class:`Placement` into the meta of every node that computes."""
    fallbacks, ops = _why_not_captured(gm, boundaries)
    in_region = _spread_over_regions(gm, fallbacks)
    cuts = boundaries.match_call(F.scaled_dot_product_attention) is not None
    runs = _group(gm, fallbacks, cuts)
    for number, run in enumerate(_settle(gm, runs, in_region, fallbacks)):
        compiled = run.capture or _compiles_alone(run.nodes, ops, fallbacks)
        for node in run.nodes:
            fallback, support, op = fallbacks[node], AttentionCGSupport.ALWAYS, ops.get(node)
            if fallback is not None and fallback.reason is not Reason.NO_KERNEL:
                support = AttentionCGSupport.NEVER if op is None else op.support
            node.meta[PLACEMENT] = Placement(
                number, run.capture, fallback, compiled, support=support, op=op
            )


def _compiles_alone(
    run: list[fx.Node], ops: dict[fx.Node, SplittingOp], fallbacks: _Fallbacks
) -> bool:
    """Return whether all ops of an eager run are registered with ``compiled``."""
    nodes = [node for node in run if not is_container_item(node)]
    rest = [fallbacks[node] for node in nodes if node not in ops]
    matched = [ops[node] for node in nodes if node in ops]
    launch_nothing = all(f is None or f.reason is Reason.NO_KERNEL for f in rest)
    return bool(matched) and launch_nothing and all(op.compiled for op in matched)


def _why_not_captured(
    gm: fx.GraphModule, boundaries: Boundaries
) -> tuple[_Fallbacks, dict[fx.Node, SplittingOp]]:
    """Return, for every node that needs a piece, why it cannot be captured; and splitting ops."""
    predicate = Capturability(gm, boundaries)
    bound = bound_symbols(gm).keys()
    fallbacks: _Fallbacks = {}
    for node in gm.graph.nodes:
        if node.op not in COMPUTING or is_size_arithmetic(node, bound) or is_number_tensor(node):
            continue
        if is_container_item(node) and (source := node.args[0]) in fallbacks:
            fallbacks[node] = fallbacks[source]
            if source in predicate.matched:
                predicate.matched[node] = predicate.matched[source]
        else:
            fallbacks[node] = predicate.why_not(node)
    return fallbacks, predicate.matched


def _spread_over_regions(gm: fx.GraphModule, fallbacks: _Fallbacks) -> set[fx.Node]:
    """Make regions with an eager node eager as a whole; return the nodes in any region."""
    nodes = list(gm.graph.nodes)
    inside: set[fx.Node] = set()
    for region in state_regions(gm):
        members = [node for node in nodes[region.first : region.last + 1] if node in fallbacks]
        inside |= set(members)
        cause = next((fallbacks[node] for node in members if fallbacks[node] is not None), None)
        if cause is None and region.eager is None:
            continue
        detail = f"in one {region.label} region" + (f" with {cause.detail}" if cause else "")
        reason = region.eager or Reason.STATE_REGION
        for node in members:
            fallbacks[node] = fallbacks[node] or Fallback(reason, detail)
    for node, fallback in fallbacks.items():  # items of a result follow it out of its region
        if fallback is None and is_container_item(node) and fallbacks.get(node.args[0]) is not None:  # type: ignore[arg-type]
            fallbacks[node] = fallbacks[node.args[0]]  # type: ignore[index]
    return inside


def _group(gm: fx.GraphModule, fallbacks: _Fallbacks, cuts: bool) -> list[_Run]:
    """Cut the nodes where captured and eager ones alternate; neutral nodes join a neighbour."""
    runs: list[_Run] = []
    waiting: list[fx.Node] = []
    launches = False  # whether the last run launches a kernel
    for node, fallback in fallbacks.items():
        if fallback is None and _is_neutral(node):
            waiting.append(node)
            if (
                node.target in torch_ops.LEAVES.values() and runs
            ):  # close in the piece that ends here
                runs[-1].nodes += waiting
                waiting = []
            continue
        cut = cuts and launches and target_name(node.target) == "cgcompile::decode_attention"
        if not runs or runs[-1].capture != (fallback is None) or cut:
            cut = bool(runs) and runs[-1].capture and fallback is None
            runs.append(_Run(capture=fallback is None, cut=cut))
            launches = False
        launches = launches or launches_kernel(gm, node)
        runs[-1].nodes += [*waiting, node]
        waiting = []
    if waiting:
        runs = runs or [_Run(capture=True)]
        runs[-1].nodes += waiting
    return runs


def _is_neutral(node: fx.Node) -> bool:
    return toggles_state(node) or (runs_once_on_host(node) and not node.all_input_nodes)


def _settle(
    gm: fx.GraphModule,
    runs: list[_Run],
    in_region: set[fx.Node],
    fallbacks: _Fallbacks,
) -> list[_Run]:
    """Dissolve captured runs that launch no kernel, and join eager neighbours."""
    settled: list[_Run] = []
    for run in runs:
        if run.capture and not any(launches_kernel(gm, node) for node in run.nodes):
            captured = settled[-2] if len(settled) >= 2 else None
            if captured is not None:
                _hoist_allocations(run, captured, settled[-1], in_region)
            for node in run.nodes:
                fallbacks[node] = Fallback(Reason.NO_KERNEL, "launches no kernel")
            run.capture = False
        if settled and settled[-1].capture == run.capture and not run.cut:
            settled[-1].nodes += run.nodes
        elif run.nodes:
            settled.append(run)
    return settled


def _hoist_allocations(
    run: _Run, captured: _Run, eager_between: _Run, in_region: set[fx.Node]
) -> None:
    """Move allocations of ``run`` to the end of ``captured``, so that they have fixed addresses."""
    too_late = {*eager_between.nodes, *run.nodes}
    for node in list(run.nodes):
        movable = is_allocation(node) and node not in in_region
        if movable and too_late.isdisjoint(node.all_input_nodes):
            captured.nodes[-1].append(node)
            captured.nodes.append(node)
            run.nodes.remove(node)
            too_late.discard(node)
