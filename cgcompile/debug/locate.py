"""Run a recorded step with some pieces replayed and others not: :func:`run_step`.

For debugging alone: which pieces make a result wrong is found by running a step in several ways.
What a piece makes that is not replayed lies in memory of its own, and is put where graphs read it
for just as long as one does.

What the pieces of a step leave, in each way to run them: :class:`Watcher`.

From a value that differs to the op and the user's line: :func:`finding_of`, :func:`op_of`.

Where padding reaches real rows: :func:`padding_place`.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.boundaries import target_name
from cgcompile.config import CUDAGraphMode
from cgcompile.debug.compare import Call, Difference, Tolerance, named, without_gradients
from cgcompile.debug.restore import copies, put_back
from cgcompile.debug.subject import Subject
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.passes.nodes import is_allocation, is_container_item, is_view, user_line, written
from cgcompile.passes.split import Piece, SplitGraph
from cgcompile.pieces.compilers import Runnable
from cgcompile.runtime.compiled_graph import Observer
from cgcompile.runtime.program import Program, written_inputs
from cgcompile.runtime.recording import Recording
from cgcompile.runtime.returns import returned_names

Around = Callable[[Piece, Runnable, tuple[Any, ...]], Sequence[Any]]
"""Called with a piece, what runs it, and its inputs; returns its outputs."""

After = Callable[[Piece, Mapping[str, Any]], None]
"""Told what a piece has left: its outputs and the inputs that it writes, by name; not copied."""


class PieceMode(enum.Enum):
    """How a piece runs."""

    UNCOMPILED = "uncompiled"  # its FX graph, op by op
    COMPILED = "compiled"  # what the compiler made of it
    REPLAYED = "replayed"  # from its CUDA graph


def run_step(
    program: Program,
    recording: Recording,
    inputs: Sequence[Any],
    real: int | None,
    ways: Mapping[int, PieceMode],
    after: After | None = None,
    around: Around | None = None,
) -> Any:
    """Run a recorded step once, each piece in its way. It is one execution of the step.

    Pieces that are not captured run as they are. In a FULL graph there are no pieces: it is
    replayed if any is to be, and ``after`` is told nothing.

    Args:
        program: whose step it is.
        recording: what is replayed; its guards hold for these inputs.
        inputs: of the call.
        real: how many rows of the batch are real, where fewer are than were captured.
        ways: of the pieces, by index.
        after: told what each piece leaves.
        around: calls each piece that is not replayed.

    Returns:
        What the call returns.
    """
    replayed = {index for index, way in ways.items() if way is PieceMode.REPLAYED}
    if replayed and recording.batch.mode is CUDAGraphMode.FULL:
        return recording.replay(inputs, real)
    step = _Mixed(program, recording, inputs, ways, after, around)
    if not replayed:
        return step.plain(real)
    return recording.replay(inputs, real, step.segment)


def left_by(piece: Piece) -> list[str]:
    """The names of what a piece makes, memory that it only allocates included, and writes."""
    return [*piece.outputs, *written_inputs(piece)]


class _Mixed:
    """One run of a step."""

    def __init__(
        self,
        program: Program,
        recording: Recording,
        inputs: Sequence[Any],
        ways: Mapping[int, PieceMode],
        after: After | None,
        around: Around | None,
    ) -> None:
        self._program = program
        self._recording = recording
        self._inputs = inputs
        self._ways = ways
        self._after = after
        self._around = around
        self._own: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # (where graphs read, ours)

    # -------------------------------------------------------------- without any replay

    def plain(self, real: int | None) -> Any:
        zeroed = self._zeroed() if real is not None else {}

        def called(piece: Piece) -> Runnable:
            def run(*given: Any) -> Sequence[Any]:
                made = self._call(piece, given)
                values = dict(zip((*piece.inputs, *piece.outputs), (*given, *made), strict=True))
                for name in zeroed.get(piece.index, ()):
                    values[name][real:].zero_()  # as a replay does
                self._tell(piece, values)
                return made

            return run

        step = self._program.step.bind([called(piece) for piece in self._program.split.pieces])
        return self._recording.in_context(step)(*self._inputs)

    def _zeroed(self) -> dict[int, list[str]]:
        """The values of which a replay zeroes the rows that are not real, by the piece after."""
        found: dict[int, list[str]] = {}
        pairs = zip(self._program.split.pieces, self._recording.sequence.segments, strict=False)
        for piece, segment in pairs:
            tails = segment.tails if isinstance(segment, EagerSegment) else ()
            sources = self._recording.sources.items()
            found[piece.index] = [n for n, s in sources if any(s is tail for tail in tails)]
        return found

    def _call(self, piece: Piece, given: tuple[Any, ...]) -> list[Any]:
        run = self._program.runnables[piece.index]
        if self._ways.get(piece.index) is PieceMode.UNCOMPILED and piece.compiled:
            run = piece.module.forward
        return list(run(*given) if self._around is None else self._around(piece, run, given))

    def _tell(self, piece: Piece, values: Mapping[str, Any]) -> None:
        if self._after is not None:
            self._after(piece, {name: values[name] for name in left_by(piece)})

    # -------------------------------------------------------------- with some replays

    def segment(self, place: int, step: Callable[[], Any]) -> None:
        """Run a segment of the recording, or the piece that it stands for."""
        pieces = self._program.split.pieces
        if place >= len(pieces):  # sizes that are returned
            step()
            return
        piece = pieces[place]
        lent = self._lend(piece.inputs)
        if piece.capture and self._ways.get(piece.index) is not PieceMode.REPLAYED:
            self._recording.sequence.fill(place)  # a later segment may read the same copy
            self._instead(piece)
        else:
            step()
        if self._own:
            self._written([self._value(name) for name in written_inputs(piece)])
        self._take_back(lent)
        if self._after is not None:
            self._tell(piece, {name: self._left(name) for name in left_by(piece)})
        if place == len(pieces) - 1:
            self._lend(returned_names(self._program.split))

    def _value(self, name: str) -> Any:
        return self._recording.value(name, self._inputs)

    def _left(self, name: str) -> Any:
        """What a piece has left: of one that is not replayed it lies elsewhere."""
        return self._own[name][1] if name in self._own else self._value(name)

    def _instead(self, piece: Piece) -> None:
        made = self._call(piece, tuple([self._value(name) for name in piece.inputs]))
        for name, value in zip(piece.outputs, made, strict=True):
            place = self._value(name)
            if not isinstance(value, torch.Tensor) or not isinstance(place, torch.Tensor):
                continue
            if _memory(place) != _memory(value):
                self._own[name] = (place, value.detach())

    def _lend(self, names: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put values of pieces that are not replayed where they are read: (place, what was there).

        Only while they are read: else they would spoil what a replayed piece has left there, and
        replays would spoil them.
        """
        lent = []
        for name in names:
            if name in self._own:
                place, value = self._own[name]
                lent.append((place, place.clone()))
                place.copy_(value)
        return lent

    def _take_back(self, lent: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for place, before in reversed(lent):
            place.copy_(before)

    def _written(self, tensors: Sequence[Any]) -> None:
        """These have been written: what lies in their memory is right as it is now."""
        written = {_memory(each) for each in tensors if isinstance(each, torch.Tensor)}
        for name, (place, _) in list(self._own.items()):
            if _memory(place) in written:
                self._own[name] = (place, place.clone())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


STAGES = {PieceMode.COMPILED: "compilation", PieceMode.REPLAYED: "replay"}


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a recorded step.

    Attributes:
        graph: the number of the compiled graph.
        program: whose step it is.
        recording: what replays it.
        inputs: of the call.
        real: how many rows are real; None: all.
    """

    graph: int
    program: Program
    recording: Recording
    inputs: Sequence[Any]
    real: int | None

    @property
    def split(self) -> SplitGraph:
        """The split graph."""
        return self.program.split

    def run(self, way: PieceMode, **told: Any) -> Any:
        """Run all pieces in one way; see :func:`~cgcompile.debug.locate.run_step`."""
        ways = {piece.index: way for piece in self.split.pieces}
        return run_step(self.program, self.recording, self.inputs, self.real, ways, **told)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What the step writes inside is put back after it; no gradients."""
        with without_gradients(), put_back(written_now(self.program, self.inputs)):
            yield


class Left:
    """What is there after each piece: what it leaves, and earlier values that are still needed.

    Attributes:
        after: by the index of the piece, copies by name.
    """

    def __init__(self, split: SplitGraph) -> None:
        self.after: dict[int, dict[str, Any]] = {}
        self._now: dict[str, Any] = {}
        self._last = {name: piece.index for piece in split.pieces for name in piece.inputs}
        returned = dict.fromkeys(returned_names(split), len(split.pieces))
        self._last.update(returned)

    def note(self, piece: Piece, values: Mapping[str, Any]) -> None:
        """Told by the run."""
        empty = set(piece.outputs) - set(filled_outputs(piece))
        own = {n: v for n, v in values.items() if n not in empty}
        older = {n: v for n, v in self._now.items() if self._last.get(n, -1) > piece.index}
        self._now = {**own, **{n: v for n, v in older.items() if n not in values}}
        self.after[piece.index] = copies({n: v for n, v in self._now.items() if v is not None})


@dataclass(frozen=True, eq=False)
class Parting:
    """Where two ways to run a step part.

    Attributes:
        step: the call.
        stage: ``compilation`` or ``replay``.
        piece: after which they do; None: in a FULL graph, or in the result alone.
        difference: the first one.
    """

    step: Step
    stage: str
    piece: Piece | None
    difference: Difference

    @property
    def overwritten(self) -> bool:
        """Whether it is a value of an earlier piece, which this one spoils."""
        return self.piece is not None and self.difference.value not in left_by(self.piece)


class Watcher:
    """Observes steps: runs each in all ways, and replays it.

    Attributes:
        partings: of each graph that has one, the first.
        seen: the steps that were run.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self.partings: list[Parting] = []
        self.seen: list[Step] = []
        self._tolerance = tolerance

    def of(self, number: int) -> Observer:
        """The observer of a compiled graph."""

        def watch(program: Program, recording: Recording, inputs: Any, real: int | None) -> Any:
            return self._watch(Step(number, program, recording, inputs, real))

        return watch

    def _watch(self, step: Step) -> Any:
        self.seen.append(step)
        before: Any = None
        result: Any = None
        for way in (PieceMode.UNCOMPILED, PieceMode.COMPILED, PieceMode.REPLAYED):
            left = Left(step.split)
            if way is PieceMode.REPLAYED:
                result = step.run(way, after=left.note)
                made = copies(named(result))
            else:
                with step.kept():
                    made = copies(named(step.run(way, after=left.note)))
            now = (left.after, made)
            parting = None if before is None else self._part(step, way, before, now)
            if parting is not None:
                self.partings.append(parting)
                return result if way is PieceMode.REPLAYED else step.run(PieceMode.REPLAYED)
            before = now
        return result

    def _part(self, step: Step, way: PieceMode, before: Any, now: Any) -> Parting | None:
        for piece in step.split.pieces:
            found = now[0].get(piece.index)
            if found is None:
                continue
            known = {n: v for n, v in before[0][piece.index].items() if n in found}
            difference = self._tolerance.first(piece.name, known, found)
            if difference is not None:
                return Parting(step, STAGES[way], piece, difference)
        difference = self._tolerance.first("the result", before[1], now[1])
        return None if difference is None else Parting(step, STAGES[way], None, difference)


# ---------------------------------------------------------------- nodes of a piece


class Nodes(fx.Interpreter):
    """Runs an uncompiled piece and keeps a copy of what each node leaves.

    Attributes:
        made: the leaves of each node's value, by path, and of the arguments that it writes, as
            copies. Nodes that only allocate are left out: what is in new memory is nobody's.
    """

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.module)
        self._piece = piece.module
        self.made: dict[fx.Node, dict[str, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        """See :class:`torch.fx.Interpreter`."""
        value = super().run_node(node)
        if node.op not in ("placeholder", "output") and not is_allocation(node):
            left = dict(compat.tree_paths(value))
            for number, target in enumerate(written(self._piece, node)):
                paths = compat.tree_paths(self.env[target])
                left |= {f"written {number}{path}": leaf for path, leaf in paths}
            self.made[node] = copies(left)
        return value


def nodes_of(step: Step) -> dict[int, Nodes]:
    """What each node of each piece makes, in the uncompiled step; by the index of the piece."""
    found: dict[int, Nodes] = {}

    def run(piece: Piece, runnable: Any, given: tuple[Any, ...]) -> Any:
        found[piece.index] = Nodes(piece)
        return found[piece.index].run(*given)

    with step.kept():
        step.run(PieceMode.UNCOMPILED, around=run)
    return found


def written_now(program: Program, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs of a call that the step writes."""
    return [inputs[position] for position in program.written_positions]


def filled_outputs(piece: Piece) -> list[str]:
    """The outputs of a piece that hold something: some are memory for the next piece to write."""
    (results,) = piece.module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    pairs = zip(piece.outputs, results, strict=True)
    return [name for name, node in pairs if not (isinstance(node, fx.Node) and is_allocation(node))]


WHOLE = "the whole step"


def place_of(piece: Piece, node: fx.Node | None, detail: str = "") -> Difference:
    """Return the piece, op and line of a node, as a difference of which no more is known."""
    line = user_line(node) if node is not None and _own_lines(piece) else None
    if line is None and piece.lines:
        line, detail = piece.lines[0], f"{detail}; the piece begins at that line"
    op = "" if node is None else op_name(node)
    return Difference(piece=piece.name, op=op, line=": ".join(line or ()), detail=detail)


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


def finding_of(parting: Parting, number: int) -> Difference:
    """What a parting of two ways is, in words: with op, line, and the rows that are padding."""
    step, difference = parting.step, parting.difference
    place = op_of(parting)
    if parting.overwritten:
        detail = "; ".join(filter(None, ("it was right before, and is overwritten", place.detail)))
        place = replace(place, detail=detail)
    name = WHOLE if parting.piece is None else parting.piece.name
    place = replace(place, piece=place.piece or name)
    return made(parting.stage, number, difference, step.real, place)


def made(
    stage: str, number: int, difference: Difference, real: int | None, place: Difference
) -> Difference:
    """A finding of a difference at a place; ``real`` rows are no padding."""
    padding = tuple(row for row in difference.rows if real is not None and row >= real)
    detail = "; ".join(filter(None, (difference.detail, place.detail.removeprefix("; "))))
    return replace(
        difference,
        stage=stage,
        inputs=number,
        piece=place.piece,
        op=place.op,
        line=place.line,
        padding_rows=padding,
        detail=detail,
    )


def op_of(parting: Parting) -> Difference:
    """Return the op that makes the value in which two ways part."""
    piece = parting.piece
    if piece is None:
        return Difference()
    if parting.overwritten:
        return place_of(piece, None)
    return place_of(piece, producer(piece, parting.difference.value), "this op makes the value")


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
