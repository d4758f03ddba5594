"""Compare a recorded step with the plain one, piece by piece: :func:`verify_recording`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.graphs.opened import named_values
from cgcompile.graphs.verify import Difference, copies, first_difference, put_back
from cgcompile.passes.nodes import is_allocation
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.calls import written_inputs
from cgcompile.piecewise.program import Program
from cgcompile.piecewise.recording import Recording
from cgcompile.piecewise.ways import Way, run_step

Observer = Callable[[Program, Recording, Sequence[Any], int | None], Any]
"""Runs a recorded step in place of its replay: (program, recording, inputs, real rows) -> result.

It leaves what one execution of the step leaves, and returns what that returns."""


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
    left = {piece.index: {*filled_outputs(piece), *written_inputs(piece)} for piece in split.pieces}
    plain: dict[int, dict[str, Any]] = {}

    def remember(piece: Piece, values: Mapping[str, Any]) -> None:
        plain[piece.index] = copies({n: v for n, v in values.items() if n in left[piece.index]})

    with put_back(written_now(program, inputs)):
        made = run_step(program, recording, inputs, real, {}, remember)
        expected = copies(named_values(made))
    found: list[Difference] = []

    def compare(piece: Piece, values: Mapping[str, Any]) -> None:
        seen = {n: v for n, v in plain[piece.index].items() if values[n] is not None}
        where = f"{piece.name} ({piece.where})"
        difference = None if found else first_difference(where, seen, values, rtol, atol)
        found.extend([] if difference is None else [difference])

    replayed = {piece.index: Way.REPLAYED for piece in split.pieces}
    result = run_step(program, recording, inputs, real, replayed, compare)
    if not found:
        last = first_difference("the result", expected, named_values(result), rtol, atol)
        found.extend([last] if last is not None else [])
    return Verified(result, found[0] if found else None)


def verifier(found: list[Difference | None], rtol: float, atol: float) -> Observer:
    """Verifies each step in place of its replay; ``found`` gets the difference, or None."""

    def verify(program: Program, recording: Recording, inputs: Any, real: int | None) -> Any:
        verified = verify_recording(program, recording, inputs, real, rtol, atol)
        found.append(verified.difference)
        return verified.result

    return verify


def written_now(program: Program, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs of a call that the step writes."""
    return [inputs[position] for position in program.written_positions]


def filled_outputs(piece: Piece) -> list[str]:
    """The outputs of a piece that hold something: some are memory for the next piece to write."""
    (results,) = piece.module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    pairs = zip(piece.outputs, results, strict=True)
    return [name for name, node in pairs if not (isinstance(node, fx.Node) and is_allocation(node))]
