"""Keep two tensors that alias from crossing a boundary where that would give wrong results.

Note [Alias hazards]. Inside a piece, views are views. Between pieces they are separate values, and
two things break. (a) A compiled piece may return a view of its own intermediate as a copy; if a
later piece writes that memory, the other value does not see it. (b) A compiler that gets two inputs
of one memory and a write to it rebuilds one from the other by the layout that the *traced* tensors
had, which the tensors at run time need not have.

The cure is the same: only the base crosses, and every piece that needs the view creates it. That
costs a microsecond on the host where the piece is eager, so it is done for hazards only.
"""

from dataclasses import replace

import torch
from torch import fx

from cgcompile.passes.assign import PLACEMENT, placement
from cgcompile.passes.nodes import (
    COMPUTING,
    changes_layout,
    is_view,
    layout_of,
    nodes_by_storage,
    nodes_in_regions,
    storages,
    surely_written,
    tensors,
    value,
    written,
)


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
