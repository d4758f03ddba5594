"""Find where a wrong step goes wrong: piece, op and line.

:func:`run_step` runs a recorded step with some pieces replayed, others compiled or uncompiled. What
a piece makes that is not replayed has memory of its own, and is copied to where graphs read it only
while one does. :class:`Watcher` compares the three ways piece by piece, and :class:`Nodes` runs a
piece node by node.
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
from cgcompile.debug.compare import Call, Difference, Tolerance, copied
from cgcompile.debug.restore import copies, restored_after
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
    replayed if any is to be, and ``after`` is not called.
    """
    replayed = {index for index, way in ways.items() if way is PieceMode.REPLAYED}
    if replayed and recording.batch.mode is CUDAGraphMode.FULL:
        return recording.replay(inputs, real)
    step = _Mixed(program, recording, inputs, ways, after, around)
    if not replayed:
        return step.plain(real)
    return recording.replay(inputs, real, step.segment)


def left_by(piece: Piece) -> list[str]:
    """Return the names of what a piece makes, allocated memory included, and of what it writes."""
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
            def run(*arguments: Any) -> Sequence[Any]:
                output = self._call(piece, arguments)
                values = dict(
                    zip((*piece.inputs, *piece.outputs), (*arguments, *output), strict=True)
                )
                for name in zeroed.get(piece.index, ()):
                    values[name][real:].zero_()  # as a replay does
                self._tell(piece, values)
                return output

            return run

        step = self._program.step.bind([called(piece) for piece in self._program.split.pieces])
        return self._recording.in_context(step)(*self._inputs)

    def _zeroed(self) -> dict[int, list[str]]:
        """Return the values whose padding rows a replay zeroes, by the piece before that."""
        result: dict[int, list[str]] = {}
        pairs = zip(self._program.split.pieces, self._recording.sequence.segments, strict=False)
        for piece, segment in pairs:
            tails = segment.tails if isinstance(segment, EagerSegment) else ()
            sources = self._recording.sources.items()
            result[piece.index] = [n for n, s in sources if any(s is tail for tail in tails)]
        return result

    def _call(self, piece: Piece, inputs: tuple[Any, ...]) -> list[Any]:
        run = self._program.runnables[piece.index]
        if self._ways.get(piece.index) is PieceMode.UNCOMPILED and piece.compiled:
            run = piece.module.forward
        return list(run(*inputs) if self._around is None else self._around(piece, run, inputs))

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
        borrowed = self._copy_in(piece.inputs)
        if piece.capture and self._ways.get(piece.index) is not PieceMode.REPLAYED:
            self._recording.sequence.fill(place)  # a later segment may read the same copy
            self._instead(piece)
        else:
            step()
        if self._own:
            self._written([self._value(name) for name in written_inputs(piece)])
        self._copy_back(borrowed)
        if self._after is not None:
            self._tell(piece, {name: self._left(name) for name in left_by(piece)})
        if place == len(pieces) - 1:
            self._copy_in(returned_names(self._program.split))

    def _value(self, name: str) -> Any:
        return self._recording.value(name, self._inputs)

    def _left(self, name: str) -> Any:
        """Return what a piece left: a piece that is not replayed has memory of its own."""
        return self._own[name][1] if name in self._own else self._value(name)

    def _instead(self, piece: Piece) -> None:
        output = self._call(piece, tuple([self._value(name) for name in piece.inputs]))
        for name, value in zip(piece.outputs, output, strict=True):
            place = self._value(name)
            if not isinstance(value, torch.Tensor) or not isinstance(place, torch.Tensor):
                continue
            if _memory(place) != _memory(value):
                self._own[name] = (place, value.detach())

    def _copy_in(self, names: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Put values of pieces that are not replayed where they are read: (place, what was there).

        Only while they are read: else they would spoil what a replayed piece has left there, and
        replays would spoil them.
        """
        borrowed = []
        for name in names:
            if name in self._own:
                place, value = self._own[name]
                borrowed.append((place, place.clone()))
                place.copy_(value)
        return borrowed

    def _copy_back(self, borrowed: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for place, before in reversed(borrowed):
            place.copy_(before)

    def _written(self, tensors: Sequence[Any]) -> None:
        """Take the memory of tensors that were written as it is now."""
        written = {_memory(each) for each in tensors if isinstance(each, torch.Tensor)}
        for name, (place, _) in list(self._own.items()):
            if _memory(place) in written:
                self._own[name] = (place, place.clone())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


STAGES = {PieceMode.COMPILED: "compilation", PieceMode.REPLAYED: "replay"}


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a recorded step."""

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
        """Restore after it what the step writes inside; no gradients."""
        written = [self.inputs[position] for position in self.program.written_positions]
        with torch.no_grad(), restored_after(written):
            yield


class Left:
    """The values after each piece: those it leaves, and earlier ones that are still needed."""

    def __init__(self, split: SplitGraph) -> None:
        self.after: dict[int, dict[str, Any]] = {}
        self._now: dict[str, Any] = {}
        self._last = {name: piece.index for piece in split.pieces for name in piece.inputs}
        returned = dict.fromkeys(returned_names(split), len(split.pieces))
        self._last.update(returned)

    def note(self, piece: Piece, values: Mapping[str, Any]) -> None:
        """Copy what a piece left; see :data:`After`."""
        empty = set(piece.outputs) - set(filled_outputs(piece))
        own = {n: v for n, v in values.items() if n not in empty}
        older = {n: v for n, v in self._now.items() if self._last.get(n, -1) > piece.index}
        self._now = {**own, **{n: v for n, v in older.items() if n not in values}}
        self.after[piece.index] = copies({n: v for n, v in self._now.items() if v is not None})


class Watcher:
    """Runs each observed step in all ways, and replays it.

    Attributes:
        differences: (number of the graph, where two ways differ first) of each such step.
        seen: the steps that ran.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        self.differences: list[tuple[int, Difference]] = []
        self.seen: list[Step] = []
        self._tolerance = tolerance

    def of(self, number: int) -> Observer:
        """Return the observer of a compiled graph."""

        def watch(program: Program, recording: Recording, inputs: Any, real: int | None) -> Any:
            return self._watch(Step(number, program, recording, inputs, real))

        return watch

    def _watch(self, step: Step) -> Any:
        self.seen.append(step)
        before: Any = None
        result: Any = None
        for way in PieceMode:
            left = Left(step.split)
            if way is PieceMode.REPLAYED:
                result = step.run(way, after=left.note)
                now = left.after, copied(result)
            else:
                with step.kept():
                    values = copied(step.run(way, after=left.note))
                now = left.after, values
            difference = None if before is None else self._compare(step, way, before, now)
            if difference is not None:
                self.differences.append((step.graph, difference))
                return result if way is PieceMode.REPLAYED else step.run(PieceMode.REPLAYED)
            before = now
        return result

    def _compare(self, step: Step, way: PieceMode, before: Any, now: Any) -> Difference | None:
        """Return where a way differs from the one before, with the op that makes the value."""
        for piece in step.split.pieces:
            values = now[0].get(piece.index)
            if values is None:
                continue
            known = {name: v for name, v in before[0][piece.index].items() if name in values}
            difference = self._tolerance.first(piece.name, known, values)
            if difference is not None:
                return located(STAGES[way], difference, step.real, _maker(piece, difference.value))
        difference = self._tolerance.first("the result", before[1], now[1])
        if difference is None:
            return None
        return located(STAGES[way], difference, step.real, Difference(piece=WHOLE))


# ---------------------------------------------------------------- nodes of a piece


class Nodes(fx.Interpreter):
    """Runs an uncompiled piece and keeps a copy of what each node leaves."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.module)
        self._piece = piece.module
        self.made: dict[fx.Node, dict[str, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        """Run a node, and copy what it leaves."""
        value = super().run_node(node)
        if node.op not in ("placeholder", "output") and not is_allocation(node):
            left = dict(compat.tree_paths(value))
            for number, target in enumerate(written(self._piece, node)):
                paths = compat.tree_paths(self.env[target])
                left |= {f"written {number}{path}": leaf for path, leaf in paths}
            self.made[node] = copies(left)
        return value


Seen = list[tuple[Step, dict[int, Nodes]]]
"""Steps, and what each node of their uncompiled pieces makes, by the index of the piece."""


def nodes_seen(subject: Subject, call: Call) -> Seen:
    """Run a call, and each of its steps again uncompiled, node by node."""
    watcher = Watcher(Tolerance())
    with subject.observed(watcher.of):
        subject.outcome(subject.call, call)
    with restored_after(subject.kept), torch.no_grad():
        return [(step, _nodes_of(step)) for step in watcher.seen]


def _nodes_of(step: Step) -> dict[int, Nodes]:
    nodes: dict[int, Nodes] = {}

    def run(piece: Piece, runnable: Any, inputs: tuple[Any, ...]) -> Any:
        nodes[piece.index] = Nodes(piece)
        return nodes[piece.index].run(*inputs)

    with step.kept():
        step.run(PieceMode.UNCOMPILED, around=run)
    return nodes


def first_node(
    one: Seen, other: Seen, differs: Callable[[Nodes, Nodes], fx.Node | None]
) -> tuple[Piece, fx.Node] | None:
    """Return the first node, of either run, that ``differs`` returns for two runs of a piece."""
    for (step, nodes), (_, others) in zip(one, other, strict=False):
        for piece in step.split.pieces:
            if piece.index in nodes and piece.index in others:
                node = differs(nodes[piece.index], others[piece.index])
                if node is not None:
                    return piece, node
    return None


def filled_outputs(piece: Piece) -> list[str]:
    """Return the outputs that hold values: others are memory for the next piece to write."""
    (results,) = piece.module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    pairs = zip(piece.outputs, results, strict=True)
    return [name for name, node in pairs if not (isinstance(node, fx.Node) and is_allocation(node))]


WHOLE = "the whole step"


def place_of(piece: Piece, node: fx.Node | None, detail: str = "") -> Difference:
    """Return the piece, op and line of a node, as a difference of which no more is known."""
    line = user_line(node) if node is not None and _own_lines(piece) else None
    if line is None and piece.lines:
        line = piece.lines[0]
        detail = "; ".join(filter(None, (detail, "the piece begins at that line")))
    op = "" if node is None else op_name(node)
    return Difference(piece=piece.name, op=op, line=": ".join(line or ()), detail=detail)


def _own_lines(piece: Piece) -> bool:
    """Return whether the lines of the nodes are its own: equal pieces share those of the first."""
    lines = [user_line(node) for node in piece.module.graph.nodes]
    return not piece.lines or piece.lines[0] in lines


def op_name(node: fx.Node) -> str:
    """Return the op of a node, as dumps show it."""
    return target_name(node.target).replace("_VariableFunctionsClass.", "")


def producer(piece: Piece, name: str) -> fx.Node | None:
    """Return the node of a piece that makes, or last writes, a value; views are looked through."""
    graph = piece.module.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    node: Any = None
    if name in piece.outputs:
        results: Any = graph.output_node().args[0]
        node = results[piece.outputs.index(name)]
    for writer in graph.nodes:
        if any(names.get(target) == name for target in written(piece.module, writer)):
            node = writer
    while isinstance(node, fx.Node) and (is_container_item(node) or is_view(piece.module, node)):
        node = node.all_input_nodes[0]
    return node if isinstance(node, fx.Node) and node.op != "placeholder" else None


def _maker(piece: Piece, name: str) -> Difference:
    """Return the op of a piece that makes a value; or that the piece overwrites it."""
    if name in left_by(piece):
        return place_of(piece, producer(piece, name), "this op makes the value")
    place = place_of(piece, None)
    detail = "; ".join(filter(None, ("it was right before, and is overwritten", place.detail)))
    return replace(place, detail=detail)


def located(
    stage: str, difference: Difference, real: int | None, place: Difference, number: int = 0
) -> Difference:
    """Return a difference with its stage, place and padding rows: those behind ``real`` ones."""
    padding = tuple(row for row in difference.rows if real is not None and row >= real)
    detail = "; ".join(filter(None, (difference.detail, place.detail)))
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


def padding_place(
    subject: Subject, exact: Call, larger: Call, real: int, tolerance: Tolerance
) -> Difference:
    """Return the first op whose real rows differ between an exact step and a padded one."""

    def differs(small: Nodes, large: Nodes) -> fx.Node | None:
        padded = {node.name: leaves for node, leaves in large.made.items()}
        for node, leaves in small.made.items():
            others = padded.get(node.name, {})
            cut = {path: real_part(others.get(path), leaf, real) for path, leaf in leaves.items()}
            known = {path: leaf for path, leaf in leaves.items() if _same(leaf, cut[path])}
            if tolerance.first(node.name, known, cut) is not None:
                return node
        return None

    runs = [nodes_seen(subject, call) for call in (exact, larger)]
    if not all(runs):
        return Difference(detail="and no step of it was seen")
    first = first_node(runs[0], runs[1], differs)
    if first is None:
        return Difference(detail="and no op of the uncompiled pieces does so")
    return place_of(*first, "first in this op")


def real_part(padded: Any, exact: Any, real: int) -> Any:
    """Return the ``real`` rows of a padded value, in the dimensions where an exact one has them."""
    both = isinstance(padded, torch.Tensor) and isinstance(exact, torch.Tensor)
    if not both or padded.dim() != exact.dim():
        return padded
    for dim, (more, fewer) in enumerate(zip(padded.shape, exact.shape, strict=True)):
        if more > fewer == real:
            padded = padded.narrow(dim, 0, real)
    return padded


def _same(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape
