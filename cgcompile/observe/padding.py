"""Where padding reaches real rows: :func:`padding_place`."""

from typing import Any

import torch

from cgcompile.observe.comparing import Difference, Tolerance, without_gradients
from cgcompile.observe.inputs import Call
from cgcompile.observe.locate import place_of
from cgcompile.observe.restore import put_back
from cgcompile.observe.subject import Subject
from cgcompile.observe.traces import Nodes, Watcher, nodes_of


def padding_place(
    subject: Subject, exact: Call, larger: Call, real: int, tolerance: Tolerance
) -> Difference:
    """The first op whose real rows differ between a step of the exact size and a padded one.

    Args:
        subject: the model; both calls replay.
        exact: the call of real rows alone.
        larger: the call with padded rows.
        real: how many rows are real.
        tolerance: how close numbers must be.
    """
    runs = []
    for call in (exact, larger):
        watcher = Watcher(tolerance)
        with subject.observed(watcher.of):
            subject.outcome(subject.call, call)
        if not watcher.seen:
            return Difference(detail="and no step of it was seen")
        with put_back(subject.kept), without_gradients():
            runs.append((watcher.seen, [nodes_of(step) for step in watcher.seen]))
    (steps, exact_nodes), (_, padded_nodes) = runs
    for step, small, large in zip(steps, exact_nodes, padded_nodes, strict=False):
        for piece in step.split.pieces:
            if piece.index not in large:
                continue
            name = _first(small[piece.index], large[piece.index], real, tolerance)
            if name is not None:
                node = next(n for n in piece.module.graph.nodes if n.name == name)
                return place_of(piece, node, "first in this op")
    return Difference(detail="and no op of the uncompiled pieces does so")


def _first(small: Nodes, large: Nodes, real: int, tolerance: Tolerance) -> str | None:
    """The name of the first node whose real rows differ."""
    padded = {node.name: leaves for node, leaves in large.made.items()}
    for node, leaves in small.made.items():
        others = padded.get(node.name, {})
        pairs = {p: _real(others.get(p), leaf, real) for p, leaf in leaves.items()}
        known = {p: leaf for p, leaf in leaves.items() if _same(leaf, pairs[p])}
        if tolerance.first(node.name, known, pairs) is not None:
            return str(node.name)
    return None


def _real(large: Any, small: Any, real: int) -> Any:
    both = isinstance(large, torch.Tensor) and isinstance(small, torch.Tensor)
    if not both or large.dim() != small.dim():
        return large
    for dim, (more, fewer) in enumerate(zip(large.shape, small.shape, strict=True)):
        if more != fewer and fewer == real:
            large = large.narrow(dim, 0, real)
    return large


def _same(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape
