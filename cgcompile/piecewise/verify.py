"""Compare a recorded step with the plain one, piece by piece: :func:`verify_recording`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile import compat
from cgcompile.graphs.sequence import EagerSegment, Slot
from cgcompile.graphs.verify import Difference, copies, first_difference, put_back
from cgcompile.passes.nodes import is_allocation
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.calls import written_inputs
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.recording import Program, Recording


class Verified(NamedTuple):
    """A verified replay.

    Attributes:
        result: what the replay returns to its caller.
        difference: the first one, or None.
    """

    result: Any
    difference: Difference | None


def verify_recording(
    program: Program,
    recording: Recording,
    inputs: Sequence[Any],
    real: int | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Verified:
    """Run a step plain and then replay it, on the same inputs; compare what each piece leaves.

    Inputs that the step writes are put back in between, so that in the end one step has run.
    Synchronises.

    Args:
        program: whose step it is.
        recording: what is replayed; its guards hold for these inputs.
        inputs: of the call.
        real: how many rows of the batch are real, where fewer are than were captured.
        rtol: relative tolerance; 0 for bitwise.
        atol: absolute tolerance.
    """
    split = program.split
    plain: dict[int, dict[str, Any]] = {}
    zeroed = _zeroed(program, recording)
    left = {piece.index: [*_filled(piece), *written_inputs(piece)] for piece in split.pieces}

    def spying(piece: Piece, run: Runnable) -> Runnable:
        def spied(*given: Any) -> Sequence[Any]:
            made = list(run(*given))
            values = dict(zip((*piece.inputs, *piece.outputs), (*given, *made), strict=True))
            for name in zeroed.get(piece.index, ()) if real is not None else ():
                values[name][real:].zero_()  # as a replay does
            plain[piece.index] = copies({name: values[name] for name in left[piece.index]})
            return made

        return spied

    pairs = zip(split.pieces, program.runnables, strict=True)
    step = program.step.bind([spying(piece, run) for piece, run in pairs])
    written = [given for given, each in zip(inputs, split.inputs, strict=True) if each.written]
    with put_back([each for each in written if isinstance(each, torch.Tensor)]):
        expected = copies(dict(compat.tree_paths(recording.in_context(step)(*inputs))))
    found: list[Difference] = []

    def compare(place: int, slots: Sequence[Any]) -> None:
        if found or len(recording.sequence.segments) < len(split.pieces):
            return  # in a FULL graph nothing of a piece can be seen
        for piece in split.pieces[place : place + 1]:
            sources = {name: recording.sources.get(name) for name in left[piece.index]}
            now = {
                name: slots[source.at] if isinstance(source, Slot) else source
                for name, source in sources.items()
            }
            seen = {name: plain[piece.index][name] for name, v in now.items() if v is not None}
            where = f"{piece.name} ({piece.where})"
            difference = first_difference(where, seen, now, rtol, atol)
            found.extend([difference] if difference is not None else [])

    result = recording.watch(inputs, real, compare)
    if not found:
        last = first_difference("the result", expected, dict(compat.tree_paths(result)), rtol, atol)
        found.extend([last] if last is not None else [])
    return Verified(result, found[0] if found else None)


def _filled(piece: Piece) -> list[str]:
    """The outputs of a piece that hold something: some are memory for the next piece to write."""
    (results,) = piece.module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    pairs = zip(piece.outputs, results, strict=True)
    return [name for name, node in pairs if not (isinstance(node, fx.Node) and is_allocation(node))]


def _zeroed(program: Program, recording: Recording) -> dict[int, list[str]]:
    """The values of which a replay zeroes the rows that are not real, by the piece after which."""
    found: dict[int, list[str]] = {}
    for piece, segment in zip(program.split.pieces, recording.sequence.segments, strict=False):
        tails = segment.tails if isinstance(segment, EagerSegment) else ()
        names = [n for n, s in recording.sources.items() if any(s is tail for tail in tails)]
        found[piece.index] = names
    return found
