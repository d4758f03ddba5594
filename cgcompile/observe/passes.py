"""The pass that makes a result wrong: :func:`wrong_pass`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from cgcompile.config import CompilationMode
from cgcompile.errors import CGCompileError
from cgcompile.observe.comparing import Difference, Tolerance, without_gradients
from cgcompile.observe.inputs import Call
from cgcompile.observe.locate import place_of
from cgcompile.observe.restore import put_back
from cgcompile.observe.subject import Subject
from cgcompile.observe.traces import Nodes, Step, Watcher, nodes_of
from cgcompile.passes import OPTIONAL
from cgcompile.passes.nodes import COMPUTING

Note = Callable[[str], None]


def removable(subject: Subject) -> list[str]:
    """The names of the passes that the model can be compiled without."""
    config = subject.config
    if config.mode is not CompilationMode.PIECEWISE or subject.wrapper is not None:
        return []
    names = [str(each.name) for each in (*config.graph_passes, *config.piece_passes)]
    return [n for n in dict.fromkeys([*names, *OPTIONAL]) if n not in config.disabled_passes]


def wrong_pass(
    subject: Subject,
    call: Call,
    expected: dict[str, Any],
    tolerance: Tolerance,
    note: Note,
) -> tuple[str, Difference] | None:
    """(its name, the first op that it makes wrong); None if no single pass is to blame.

    The original model is compiled without each pass in turn.

    Args:
        subject: the model, wrong with uncompiled pieces as well.
        call: its arguments.
        expected: what eager leaves.
        tolerance: how close numbers must be.
        note: told of each step.
    """
    own = [str(each.name) for each in (*subject.config.graph_passes, *subject.config.piece_passes)]
    for name in removable(subject):
        settings = {"disabled_passes": (*subject.config.disabled_passes, name)}
        if anew(subject, call, expected, tolerance, settings, note, f"without pass {name}"):
            other = subject.again(**settings)
            try:
                place = _place(subject, other, call, tolerance)
            finally:
                other.release()
            what = "a pass of yours" if name in own else "a pass of cgcompile"
            return name, replace(place, detail=f"{what}, {name}, changes it")
    return None


def anew(
    subject: Subject,
    call: Call,
    expected: dict[str, Any],
    tolerance: Tolerance,
    settings: dict[str, Any],
    note: Note,
    what: str = "compiled anew",
) -> bool:
    """Whether the original model, compiled anew with other settings, gives what eager gives."""
    try:
        other = subject.again(**settings)
    except CGCompileError as error:
        note(f"{what}: {str(error).splitlines()[0]}")
        return False
    try:
        found = other.outcome(other.call, call)
    finally:
        other.release()
    right = tolerance.first("the result", expected, found) is None
    note(f"{what}: {'right' if right else 'wrong'}")
    return right


def _place(subject: Subject, good: Subject, call: Call, tolerance: Tolerance) -> Difference:
    """The first node that has another value with the pass, or the new one that it reads."""
    if good.until_replayed(call):
        return Difference()
    bad_nodes, good_nodes = _nodes(subject, call), _nodes(good, call)
    for (step, bad), (_, right) in zip(bad_nodes, good_nodes, strict=False):
        for piece in step.split.pieces:
            if piece.index in bad and piece.index in right:
                node = _first(bad[piece.index], right[piece.index], tolerance)
                if node is not None:
                    return place_of(piece, node)
    return Difference()


def _nodes(subject: Subject, call: Call) -> list[tuple[Step, dict[int, Nodes]]]:
    watcher = Watcher(tolerance=Tolerance())
    with subject.observed(watcher.of):
        subject.outcome(subject.call, call)
    with put_back(subject.kept), without_gradients():
        return [(step, nodes_of(step)) for step in watcher.seen]


def _first(bad: Nodes, right: Nodes, tolerance: Tolerance) -> fx.Node | None:
    known = {node.name: leaves for node, leaves in right.made.items()}
    for node, leaves in bad.made.items():
        if node.name not in known:
            continue
        if tolerance.first(node.name, known[node.name], leaves) is None:
            continue
        new = [n for n in node.all_input_nodes if n.op in COMPUTING and n.name not in known]
        return new[0] if new else node
    new = [node for node in bad.made if node.name not in known]
    return new[-1] if new else None
