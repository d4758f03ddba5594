"""What the pieces of a step leave, in each way to run them: :class:`Watcher`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.entry import Observer
from cgcompile.observe.comparing import Difference, Tolerance, named, without_gradients
from cgcompile.observe.mixed_run import PieceMode, left_by, run_step
from cgcompile.observe.restore import copies, put_back
from cgcompile.passes.nodes import is_allocation, written
from cgcompile.passes.pieces import Piece
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.program import Program
from cgcompile.piecewise.recording import Recording
from cgcompile.piecewise.returns import returned_names

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
        """Run all pieces in one way; see :func:`~cgcompile.observe.mixed_run.run_step`."""
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
