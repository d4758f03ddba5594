"""From a value that differs to the op and the user's line: :func:`finding_of`, :func:`op_of`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.config import CUDAGraphMode
from cgcompile.graphs.capture import capture
from cgcompile.graphs.copies import numbers_as_bytes
from cgcompile.graphs.host import HostDevice, HostGraph
from cgcompile.graphs.host_steps import OpRun
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSegment
from cgcompile.graphs.verify import Difference
from cgcompile.observe.comparing import Tolerance
from cgcompile.observe.traces import Parting, Step, nodes_of, same_layout
from cgcompile.observe.verification import Finding
from cgcompile.passes.nodes import is_container_item, is_view, user_line, written
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.ways import Way

WHOLE = "the whole step"


@dataclass(frozen=True)
class Place:
    """An op of the user's program.

    Attributes:
        piece: that holds it; empty if unknown.
        op: its name; empty if unknown.
        line: the user's, with the code.
        detail: what was seen of it; empty if it is only the one that makes the value.
    """

    piece: str = ""
    op: str = ""
    line: str = ""
    detail: str = ""


def place_of(piece: Piece, node: fx.Node | None, detail: str = "") -> Place:
    """A node of a piece as a place."""
    if node is None:
        return Place(piece.name, detail=detail)
    line = user_line(node) if _own_lines(piece) else None
    if line is None and piece.lines:
        line, detail = piece.lines[0], f"{detail}; the piece begins at that line"
    return Place(piece.name, op_name(node), ": ".join(line or ()), detail)


def _own_lines(piece: Piece) -> bool:
    """Whether the lines of its nodes are its own: equal pieces share those of the first one."""
    lines = [user_line(node) for node in piece.module.graph.nodes]
    return not piece.lines or piece.lines[0] in lines


def op_name(node: fx.Node) -> str:
    """The op of a node, as dumps show it."""
    return target_name(node.target).replace("_VariableFunctionsClass.", "")


def producer(piece: Piece, name: str) -> fx.Node | None:
    """The node of a piece that makes, or last writes, a named value; views are looked through."""
    graph = piece.module.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    found: fx.Node | None = None
    if name in piece.outputs:
        results: Any = graph.output_node().args[0]
        found = results[piece.outputs.index(name)]
    for node in graph.nodes:
        if any(names.get(target) == name for target in written(piece.module, node)):
            found = node
    while isinstance(found, fx.Node) and (is_container_item(found) or is_view(piece.module, found)):
        found = found.all_input_nodes[0]
    return found if isinstance(found, fx.Node) and found.op != "placeholder" else None


def finding_of(parting: Parting, number: int, tolerance: Tolerance) -> Finding:
    """What a parting of two ways is, in words: with op, line, and the rows that are padding."""
    step, difference = parting.step, parting.difference
    place = op_of(parting, tolerance)
    if parting.overwritten:
        detail = "; ".join(filter(None, ("it was right before, and is overwritten", place.detail)))
        place = replace(place, detail=detail)
    name = WHOLE if parting.piece is None else parting.piece.name
    place = replace(place, piece=place.piece or name)
    return made(parting.stage, number, difference, step.real, place)


def made(
    stage: str, number: int, difference: Difference, real: int | None, place: Place
) -> Finding:
    """A finding of a difference at a place; ``real`` rows are no padding."""
    padding = tuple(row for row in difference.rows if real is not None and row >= real)
    detail = "; ".join(filter(None, (difference.detail, place.detail.removeprefix("; "))))
    return Finding(
        stage,
        number,
        place.piece,
        place.op,
        place.line,
        difference.what,
        difference.rows,
        padding,
        difference.largest,
        detail,
    )


def op_of(parting: Parting, tolerance: Tolerance) -> Place:
    """The op at which two ways part, as closely as the device lets one look."""
    piece, name = parting.piece, parting.difference.what
    if parting.overwritten:
        return overwriting_op(parting, tolerance)
    if parting.stage == "replay":
        found = recorded_op(parting.step, piece, tolerance)
        if found is not None:
            return found
    if piece is None:
        return Place()
    return place_of(piece, producer(piece, name), "this op makes the value")


def overwriting_op(parting: Parting, tolerance: Tolerance) -> Place:
    """The op of a piece that spoils a value of an earlier one."""
    step, piece, name = parting.step, parting.piece, parting.difference.what
    assert piece is not None
    if parting.stage != "replay" or not isinstance(_graph(step, piece.index), HostGraph):
        return place_of(piece, None)
    found: list[OpRun] = []

    def run(at: int, replay: Callable[[], Any]) -> None:
        if at != piece.index:
            replay()
            return
        before = step.recording.value(name, step.inputs).clone()

        def told(run: OpRun) -> None:
            now = step.recording.value(name, step.inputs)
            if not found and not torch.equal(numbers_as_bytes(now), numbers_as_bytes(before)):
                found.append(run)

        _graph(step, at).watch(told)

    with step.kept():
        step.recording.watch(step.inputs, step.real, run)
        at = _node_of(step, piece, found[0], tolerance) if found else None
    return place_of(piece, None) if at is None else place_of(*at)


# ---------------------------------------------------------------- inside of a recording


def recorded_op(step: Step, piece: Piece | None, tolerance: Tolerance) -> Place | None:
    """The first op of a host recording that does not do what the program does now.

    The piece is recorded once more, as the program is now, and both recordings run op by op. A CUDA
    graph does not let one look into it.
    """
    full = step.recording.batch.mode is CUDAGraphMode.FULL
    place = 0 if full else None if piece is None else piece.index
    if place is None or not isinstance(_graph(step, place), HostGraph):
        return None
    with step.kept():
        recorded = _recorded_runs(step, place)
    with step.kept():
        now = _runs_now(step, None if full else piece)
    if recorded is None or now is None:
        return None
    found = first_op(recorded, now, tolerance)
    if found is None:
        return None
    position, detail = found
    named = now[position].name if position < len(now) else recorded[position].name
    for later in now[position:]:
        at = _node_of(step, None if full else piece, later, tolerance)
        if at is not None:
            seen = place_of(*at, detail)
            return Place(seen.piece, seen.op, seen.line, f"{named}: {detail}")
    return Place("" if piece is None else piece.name, named, "", detail)


def first_op(
    recorded: Sequence[OpRun], now: Sequence[OpRun], tolerance: Tolerance
) -> tuple[int, str] | None:
    """(position, what differs) of the first op that two recordings of one thing do not share."""
    for position, (old, new) in enumerate(zip_longest(recorded, now)):
        if old is None or new is None or old.name != new.name:
            names = [each.name if each else "nothing" for each in (old, new)]
            return position, f"recorded was {names[0]}, the program runs {names[1]} now"
        if set(old.left) != set(new.left):
            return position, "the recording has other arguments or results"
        made = tolerance.first(old.name, new.left, old.left)
        if made is not None:  # what an op reads and does not use may be anything
            read = tolerance.first(old.name, new.given, old.given)
            seen, what = (made, "makes") if read is None else (read, "reads")
            return position, f"{what} something else in the recording, {seen.what}: {seen.detail}"
    return None


def _graph(step: Step, place: int) -> Any:
    segments = step.recording.sequence.segments
    segment = segments[place] if place < len(segments) else None
    return segment.graph if isinstance(segment, GraphSegment) else None


def _recorded_runs(step: Step, place: int) -> list[OpRun] | None:
    found: list[OpRun] = []

    def run(at: int, replay: Callable[[], Any]) -> None:
        if at == place:
            _graph(step, at).watch(found.append)
        else:
            replay()

    step.recording.watch(step.inputs, step.real, run)
    return found


def _runs_now(step: Step, piece: Piece | None) -> list[OpRun] | None:
    """Record a piece, or the whole step, as the program is now; its ops, in order."""
    if piece is None:
        whole = step.program.step.bind(step.program.runnables)
        run = step.recording.in_context(lambda: record_now(lambda: whole(*step.inputs)))
        runs: list[OpRun] = run()[0]
        return runs
    found: list[OpRun] = []

    def around(at: Piece, runnable: Any, given: tuple[Any, ...]) -> Any:
        if at is not piece:
            return runnable(*given)
        runs, result = record_now(lambda: runnable(*given))
        found.extend(runs)
        return result

    step.run(Way.COMPILED, around=around)
    return found


def record_now(run: Callable[[], Any]) -> tuple[list[OpRun], Any]:
    """Record something on the host device and run it op by op: (its ops, its result)."""
    pool = GraphPool(HostDevice())
    graph, result = capture(run, pool, "a second recording, to compare", collect=False)
    assert isinstance(graph, HostGraph)
    runs: list[OpRun] = []
    graph.watch(runs.append)
    return runs, result


def _node_of(
    step: Step, piece: Piece | None, run: OpRun, tolerance: Tolerance
) -> tuple[Piece, fx.Node] | None:
    """The node of the user's graph that makes, or writes, what an op makes."""
    results = [v for name, v in run.left.items() if name.startswith("result")]
    wanted = next((each for each in results if isinstance(each, torch.Tensor)), None)
    if wanted is None:
        return None
    nodes = nodes_of(step)
    for each in step.split.pieces:
        if piece is not None and each is not piece:
            continue
        for node, leaves in nodes[each.index].made.items():
            if _makes(leaves, wanted, tolerance):
                return each, node
    return None


def _makes(leaves: Mapping[str, Any], wanted: torch.Tensor, tolerance: Tolerance) -> bool:
    like = {path: leaf for path, leaf in leaves.items() if same_layout(leaf, wanted)}
    return any(
        tolerance.first("", {path: leaf}, {path: wanted}) is None for path, leaf in like.items()
    )
