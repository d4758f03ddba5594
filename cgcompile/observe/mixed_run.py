"""Run a recorded step with some pieces replayed and others not: :func:`run_step`.

For debugging alone: which pieces make a result wrong is found by running a step in several ways.
What a piece makes that is not replayed lies in memory of its own, and is put where graphs read it
for just as long as one does.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cgcompile.config import CUDAGraphMode
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.calls import written_inputs
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.program import Program
from cgcompile.piecewise.recording import Recording
from cgcompile.piecewise.returns import returned_names

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
    return recording.watch(inputs, real, step.segment)


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
