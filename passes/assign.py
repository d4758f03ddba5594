"""Assign each node to a piece, captured or eager: :func:`assign_pieces`.

:meth:`Capturability.why_not` decides whether a CUDA graph can hold a node. A replay repeats
kernels, without the host. So a node cannot be captured if the host must read what the device
computes, if it runs on the CPU or on another device, or if it copies through pageable memory. What
this predicate misses fails at the first capture.

The order of the graph is kept. Consecutive nodes that cannot be captured form an eager piece, the
nodes between two of these a captured piece, with two refinements: allocations between two
boundaries move into the captured piece before them, and consecutive nodes that launch no kernel
become part of the eager piece beside them, because replaying an empty graph costs time.

Note [Cut for compilers]. Where attention is a boundary, the graph is also cut between two captured
pieces, in front of each ``cgcompile::decode_attention``, which is captured: all layers of a decoder
then give equal pieces, and one of them is compiled. A FULL graph holds all pieces.

Note [Alias hazards]. Inside a piece, views are views. Between pieces they are separate values, and
two things break. (a) A compiled piece may return a view of its own intermediate as a copy; if a
later piece writes that memory, the other value does not see it. (b) A compiler that gets two inputs
of one memory and a write to it rebuilds one from the other by the strides that the *traced* tensors
had. Those of the tensors at run time may differ.

The cure is the same (:func:`resolve_aliases`): only the base crosses, and every piece that needs
the view creates it. That costs a microsecond on the host where the piece is eager, so it is done
for hazards only.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from cgcompile.boundaries import (
    AttentionCGSupport,
    Boundaries,
    SplittingOp,
    in_eager_region,
    target_name,
)
from cgcompile.passes.base import alike, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    changes_layout,
    is_allocation,
    is_container_item,
    is_cpu_scalar,
    is_number_tensor,
    is_size_arithmetic,
    is_symbolic_number,
    is_view,
    launches_kernel,
    layout_of,
    nodes_by_storage,
    nodes_in_regions,
    on_device,
    runs_once_on_host,
    short_name,
    state_regions,
    storages,
    subgraphs,
    surely_written,
    symbols_of,
    tensors,
    toggles_state,
    value,
    written,
)
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import dynamo, torch_ops

_BRANCHES_ON_THE_HOST = {"cond", "while_loop"}
_COPIES = {"to", "cuda", "cpu", "copy_", "setitem", "_to_copy", "type_as", "type"}
_FROM_PYTHON = {"tensor", "as_tensor", "asarray", "from_numpy", "new_tensor"}
_CHECKS_ON_THE_HOST = {"equal", "allclose", "is_nonzero", "tolist", "numpy"}
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "c10d", "c10d_functional")
_CAPTURABLE_COLLECTIVES = {"nccl", "rccl", "fake"}


# ---------------------------------------------------------------- what a graph can hold


class Capturability:
    """Decides which nodes of one graph a CUDA graph can hold; nodes need fake values."""

    def __init__(
        self, gm: fx.GraphModule, boundaries: Boundaries, outer: Set[sympy.Symbol] = frozenset()
    ) -> None:  # outer: the symbols of the enclosing graph, for the body of an op
        self._gm = gm
        self._boundaries = boundaries
        self._bound = outer | bound_symbols(gm).keys()
        self.device = graph_device(gm)
        self.matched: dict[fx.Node, SplittingOp] = {}  # nodes visited so far

    def why_not(self, node: fx.Node) -> Fallback | None:
        """Return why ``node`` cannot be captured, or None if it can."""
        return (
            self._registered(node)
            or self._list_of_inputs(node)
            or self._unbacked(node)
            or self._host(node)
            or self._collective(node)
            or self._body(node)
            or self._device(node)
        )

    def _registered(self, node: fx.Node) -> Fallback | None:
        boundary = self._boundaries.match(node)
        if boundary is not None:
            self.matched[node] = boundary
            return Fallback(Reason.SPLITTING_OP, f"{boundary.name} [{boundary.support.name}]")
        if in_eager_region(node):
            return Fallback(Reason.EAGER_REGION, "cgcompile.eager_region()")
        return None

    @staticmethod
    def _list_of_inputs(node: fx.Node) -> Fallback | None:
        """Refuse a node that reads a list input: compilers of pieces take only tensors."""
        for argument in node.all_input_nodes:
            held = value(argument)
            if argument.op == "placeholder" and torch_ops.is_container(held):
                detail = f"{argument.name} is a {type(held).__name__}"
                return Fallback(Reason.UNSUPPORTED_INPUT, detail)
        return None

    def _unbacked(self, node: fx.Node) -> Fallback | None:
        """Refuse symbols that no input of the graph gives: they stand for data."""
        of_inputs = symbols_of(list(map(value, node.all_input_nodes))) - self._bound
        if symbols_of(value(node)) - self._bound - of_inputs:
            name = target_name(node.target)
            return Fallback(Reason.HOST_SYNC, f"the size or value of {name} depends on data")
        if of_inputs:
            return Fallback(Reason.UNBACKED_SIZE, "works on a size or number that depends on data")
        return None

    def _host(self, node: fx.Node) -> Fallback | None:
        name = short_name(node.target)
        if torch_ops.is_higher_order_op(node.target) and name in _BRANCHES_ON_THE_HOST:
            return Fallback(Reason.HOST_SYNC, f"torch.{name} picks its branch on the host")
        if name in _CHECKS_ON_THE_HOST and any(tensors(value(a)) for a in node.all_input_nodes):
            return Fallback(
                Reason.HOST_SYNC, f"{target_name(node.target)} reads a tensor on the host"
            )
        if torch_ops.kernel_reads(node.target, *fx.map_arg((node.args, node.kwargs), value)):
            detail = f"the CUDA kernel of {target_name(node.target)} reads values on the host"
            return Fallback(Reason.HOST_SYNC, detail)
        if self._assigns_by_mask(node):
            return Fallback(Reason.HOST_SYNC, "a masked assignment counts the mask on the host")
        return None

    @staticmethod
    def _assigns_by_mask(node: fx.Node) -> bool:
        """``x[mask] = values`` counts the mask first, unless it fills in one number."""
        by_method = short_name(node.target) in ("index_put", "index_put_") and len(node.args) > 2
        if node.target is not operator.setitem and not by_method:
            return False
        index, new = node.args[1], node.args[2]
        new = value(new) if isinstance(new, fx.Node) else new
        masks = [value(e) for e in torch_ops.tree_leaves(index) if isinstance(e, fx.Node)]
        is_mask = any(m.dtype in (torch.bool, torch.uint8) for m in tensors(masks))
        return is_mask and isinstance(new, torch.Tensor) and new.numel() != 1

    def _collective(self, node: fx.Node) -> Fallback | None:
        if _is_collective(node.target) and "wait" in short_name(node.target):
            source = node.args[0] if isinstance(node.args[0], fx.Node) else None
            return self._collective(source) if source is not None else None
        arguments = (*node.args, *node.kwargs.values())
        return why_no_collective(node.target, arguments, self.device.type)

    def _body(self, node: fx.Node) -> Fallback | None:
        """Refuse a higher-order op if a node in its body cannot be captured."""
        for body in subgraphs(self._gm, node):
            inside = Capturability(body, self._boundaries, self._bound)
            for inner in body.graph.nodes:
                fallback = inside.why_not(inner) if inner.op in COMPUTING else None
                if fallback is not None:
                    detail = f"inside {target_name(node.target)}: {fallback.detail}"
                    return Fallback(fallback.reason, detail)
        return None

    def _device(self, node: fx.Node) -> Fallback | None:
        if is_symbolic_number(value(node)):
            return None
        inputs = [t for a in node.all_input_nodes for t in tensors(value(a))]
        name, outputs = short_name(node.target), tensors(value(node))
        fills = name in _FROM_PYTHON and launches_kernel(self._gm, node)
        if self.device.type == "cpu":  # the recorder refuses copies from the host
            other = next((t for t in (*outputs, *inputs) if t.device.type == "meta"), None)
            if other is not None:
                return Fallback(
                    Reason.OTHER_DEVICE, f"{name} on {other.device}, graph on {self.device}"
                )
            copied = fills and not inputs and any(t.dim() and t.numel() for t in outputs)
            return Fallback(Reason.DEVICE_COPY, f"{name} copies Python data") if copied else None
        why = why_not_on(self.device, name, inputs, outputs, from_python=fills)
        return why or self._cpu_scalars(node)

    def _cpu_scalars(self, node: fx.Node) -> Fallback | None:
        """Return why a node cannot take its 0-dim CPU tensors on the device instead, or None."""
        # A kernel gets such a value as a launch argument, which would be baked in.
        scalars = {
            argument: on_device(value(argument), self.device, self._gm.graph)
            for argument in node.all_input_nodes
            if is_cpu_scalar(value(argument), self.device)
        }
        if not scalars or changes_layout(node) or node in self._in_regions:
            return None
        detail = f"{short_name(node.target)} takes a 0-dim tensor on the CPU only"
        why = Fallback(Reason.CPU_TENSOR, detail)
        if not scalars.keys().isdisjoint(written(self._gm, node)):
            return why
        try:
            with torch.no_grad(), dynamo.fake_context(scalars.values()):
                result = run_on_fakes(self._gm, node, scalars)
        except Exception:
            return why
        return None if value(node) is None or alike([result], [value(node)]) else why

    @cached_property
    def _in_regions(self) -> set[fx.Node]:
        return nodes_in_regions(self._gm)


def _is_collective(op: Any) -> bool:
    """Return whether an op is one of torch.distributed."""
    overloads = torch_ops.op_overloads(op)
    return bool(overloads) and overloads[0].namespace in _COLLECTIVE_NAMESPACES


def why_no_collective(op: Any, arguments: Iterable[Any], device_type: str) -> Fallback | None:
    """Return why a graph cannot hold a collective; None if it can, or if ``op`` is none."""
    if not _is_collective(op):
        return None
    # One of the arguments is the process group, with a backend for each type of device.
    backends = (torch_ops.process_group_backend(argument, device_type) for argument in arguments)
    backend = next((backend for backend in backends if backend is not None), None)
    if backend in _CAPTURABLE_COLLECTIVES:
        return None
    return Fallback(Reason.COLLECTIVE, f"{target_name(op)} over backend {backend or 'unknown'}")


def takes_python_data(name: str) -> bool:
    """Return whether a function of this name creates a tensor from Python data."""
    return name in _FROM_PYTHON


def why_not_on(
    device: torch.device,
    name: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    from_python: bool,
) -> Fallback | None:
    """Return why a graph on ``device``, not the CPU, cannot hold a call of ``name``, or None."""
    foreign = next((t for t in (*outputs, *inputs) if t.device not in (device, _CPU)), None)
    if foreign is not None:
        return Fallback(Reason.OTHER_DEVICE, f"{name} on {foreign.device}, graph on {device}")
    crosses = {t.device for t in inputs} == {_CPU} and any(t.device != _CPU for t in outputs)
    if any(t.device == _CPU for t in outputs):
        if any(t.device != _CPU for t in inputs):
            return Fallback(Reason.DEVICE_COPY, f"{name} copies from {device} to the CPU")
        return Fallback(Reason.CPU_TENSOR, f"{name} computes on the CPU")
    if from_python:
        return Fallback(Reason.DEVICE_COPY, f"{name} copies Python data to {device}")
    cpu = [t for t in inputs if t.device == _CPU]
    if cpu and (name in _COPIES or crosses):
        return Fallback(Reason.DEVICE_COPY, f"{name} copies from the CPU to {device}")
    # A captured piece reads a copy of a 0-dim CPU tensor; see :meth:`Capturability._cpu_scalars`.
    if any(t.dim() > 0 for t in cpu):
        return Fallback(Reason.CPU_TENSOR, f"{name} reads a CPU tensor")
    return None


_CPU = torch.device("cpu")


def graph_device(gm: fx.GraphModule) -> torch.device:
    """Return the device of most values of a graph; meta or CPU only if there is no other."""
    counts = Counter(t.device for node in gm.graph.nodes for t in tensors(value(node)))
    others = {device: n for device, n in counts.items() if device.type not in ("cpu", "meta")}
    if others:
        return max(others, key=others.__getitem__)
    meta = torch.device("meta")
    return meta if counts[meta] > 0 and counts[meta] >= counts[_CPU] else _CPU


PLACEMENT = "cgcompile_placement"  # the key in node.meta

_Fallbacks = dict[fx.Node, Fallback | None]
"""Why each node that needs a piece cannot be captured, in order."""


# ---------------------------------------------------------------- pieces


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
    cut: bool = False  # not merged with the captured piece before it: Note [Cut for compilers]


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
            if node.target in torch_ops.LEAVES.values() and runs:
                runs[-1].nodes += waiting  # the region closes in the piece that ends here
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


# ---------------------------------------------------------------- alias hazards


def resolve_aliases(gm: fx.GraphModule) -> None:
    """Sink views into the pieces that use them, wherever a hazard needs it."""
    _use_written_arguments(gm)
    in_region = nodes_in_regions(gm)
    for members in _shared_storages(gm):
        # A view created after an in-place change of layout would differ.
        if any(changes_layout(user) for node in members for user in node.users):
            continue
        for node in reversed(members[1:]) if _endangered_pieces(gm, members) else ():
            if is_view(gm, node) and node not in in_region:
                _sink(gm, node)
    for members in _shared_storages(gm):
        _leave_uncompiled(gm, _endangered_pieces(gm, members))
    _close_gaps(gm)


def _use_written_arguments(gm: fx.GraphModule) -> None:
    """``y = x.add_(1)`` returns ``x`` itself: let later nodes use ``x``."""
    # Fake values show the end of the trace: after ``x.set_(y)``, x shares the memory of y.
    moved: set[int] = set()
    for node in gm.graph.nodes:
        if changes_layout(node):
            moved |= storages([value(node), *map(value, node.all_input_nodes)])
    for node in gm.graph.nodes:
        # A call that may write its argument may also return another object: a dual tensor.
        known = node.op in COMPUTING and not changes_layout(node)
        for target in surely_written(node) if known else ():
            if _same_tensor(node, target) and moved.isdisjoint(storages(value(node))):
                node.replace_all_uses_with(target)
                break


def _same_tensor(one: fx.Node, other: fx.Node) -> bool:
    a, b = value(one), value(other)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return storages(a) == storages(b) != set() and layout_of(a) == layout_of(b)


def _shared_storages(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Return, for each storage with several values, their nodes in order; the first is the base."""
    return [members for members in nodes_by_storage(gm.graph.nodes).values() if len(members) > 1]


def _piece(node: fx.Node) -> int:
    """Return the index of a node's piece: -1 for inputs, a large number for the output."""
    if node.op == "output":
        return 1 << 30
    assigned = placement(node)
    return assigned.piece if assigned is not None else -1


def _endangered_pieces(gm: fx.GraphModule, members: list[fx.Node]) -> set[int]:
    """Return the captured pieces with an alias hazard among the values of one storage."""
    keys = set(members)
    writers = {
        _piece(user)
        for node in members
        for user in node.users
        if not keys.isdisjoint(written(gm, user))
    }
    if not writers:
        return set()
    readers = {  # value that is one tensor -> the other pieces that use it
        node: {_piece(user) for user in node.users} - {_piece(node)}
        for node in members
        if len(tensors(value(node))) == 1
    }
    endangered = set()
    for piece in {_piece(node) for node in members if _is_captured(node)}:  # (a)
        leaving = [node for node, others in readers.items() if _piece(node) == piece and others]
        if len(leaving) > 1 and max(writers) > piece and _piece(members[0]) == piece:
            endangered.add(piece)
    for piece in writers:  # (b)
        inputs = [node for node, others in readers.items() if piece in others]
        nodes = gm.graph.nodes if len(inputs) > 1 else ()
        if any(_piece(node) == piece and _is_captured(node) for node in nodes):
            endangered.add(piece)
    return endangered


def _is_captured(node: fx.Node) -> bool:
    assigned = placement(node)
    return assigned is not None and assigned.capture


def _leave_uncompiled(gm: fx.GraphModule, pieces: set[int]) -> None:
    """Run a hazard that stays op by op: uncompiled kernels keep views as views."""
    for node in gm.graph.nodes if pieces else ():
        assigned = placement(node)
        if assigned is not None and assigned.piece in pieces:
            node.meta[PLACEMENT] = replace(
                assigned, compiled=False, uncompiled="memory that it writes has another name"
            )


def _sink(gm: fx.GraphModule, view: fx.Node) -> None:
    """Create ``view`` in each other piece that uses it."""
    placements = map(placement, reversed(gm.graph.nodes))
    own, last = _piece(view), next(filter(None, placements), None)
    users_by_piece: dict[int, list[fx.Node]] = {}
    for user in view.users:  # results are created in the last piece
        piece = last.piece if user.op == "output" and last is not None else _piece(user)
        if piece != own:
            users_by_piece.setdefault(piece, []).append(user)
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    for users in users_by_piece.values():
        first = min(users, key=order.__getitem__)
        assigned = placement(first) or last
        with gm.graph.inserting_before(first):
            copy = gm.graph.node_copy(view)
        copy.meta[PLACEMENT] = assigned
        for user in users:
            user.replace_input_with(view, copy)
    if not view.users:
        gm.graph.erase_node(view)


def _close_gaps(gm: fx.GraphModule) -> None:
    """Renumber the pieces from 0: sinking may leave pieces without nodes."""
    numbers: dict[int, int] = {}
    for node in gm.graph.nodes:
        assigned = placement(node)
        if assigned is not None:
            number = numbers.setdefault(assigned.piece, len(numbers))
            node.meta[PLACEMENT] = replace(assigned, piece=number)
