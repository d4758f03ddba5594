"""Run a step once and record it on the way: :func:`record`.

A capturing call is one execution of the step. Each captured piece is recorded by its wrapper, which
replays it at once, so that the eager pieces after it and the result see real data. If the capture
of a piece fails, that piece and all after it run plain, the result is right, and nothing is kept. A
FULL capture that fails has run nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile.config import CUDAGraphMode
from cgcompile.errors import CaptureBusyError
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.passes.nodes import tensors
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.bridges import Bridge, Crossing, SameAddress, SameValue
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.recording import Program, Recording, address
from cgcompile.reasons import Reason, Why

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """How a capturing call ended.

    Attributes:
        recording: what later calls replay, or None.
        why: why there is none.
        ran: whether the step has run; ``result`` is what it returned.
        result: what the call returns to its caller.
    """

    recording: Recording | None
    why: Why | None
    ran: bool
    result: Any


def record(
    program: Program,
    wrappers: Mapping[int, CUDAGraphWrapper],
    full: CUDAGraphWrapper,
    recording: Recording,
    inputs: Sequence[Any],
) -> Outcome:
    """Run one step and record it on the way.

    Args:
        program: what to run.
        wrappers: of the captured pieces, by index.
        full: of the whole step.
        recording: what is to be finished.
        inputs: what the call was given.

    Raises:
        BaseException: what the step raised when it ran plain, unchanged; nothing is kept then.
    """
    if recording.batch.mode is CUDAGraphMode.FULL:
        return _record_full(full, recording, inputs)
    recorder = _Recorder(program, wrappers, recording)
    try:
        result = recorder.run()
    except BaseException:
        recorder.drop()
        raise
    if recorder.why is not None:
        recorder.drop()
        return Outcome(None, recorder.why, True, result)
    recording.finish(recorder.replay(), result, recorder.fixed)
    return Outcome(recording, None, True, recording.result(result, inputs))


def _record_full(full: CUDAGraphWrapper, recording: Recording, inputs: Sequence[Any]) -> Outcome:
    captured = None

    def capture(*given: Any) -> Any:
        return full.capture(recording.batch.descriptor, given, {})

    try:
        captured = recording.in_context(capture)(recording.given)
    except Exception as error:
        return Outcome(None, _why(error, "the step", ""), False, None)
    if captured is None:
        return Outcome(None, Why(Reason.GRADIENTS, "a result requires grad"), False, None)
    replay, output = captured.entry.graph.replay, captured.entry.output

    def run(given: Sequence[Any]) -> Any:
        replay()
        return output

    fixed = {address(leaf) for leaf in tensors((captured.result, recording.given))} - {0}
    recording.finish(run, captured.result, fixed)
    return Outcome(recording, None, True, recording.result(captured.result, inputs))


def _why(error: Exception, what: str, where: str) -> Why:
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, CaptureBusyError):
        return Why(Reason.CAPTURE_BUSY, first)
    log.warning("%s%s cannot be captured: %s: %s", what, where, type(error).__name__, first)
    log.debug("the capture of %s failed", what, exc_info=error)
    return Why(Reason.CAPTURE_FAILED, f"{what}{where}: {type(error).__name__}: {first}")


class _Recorder:
    """Runs a PIECEWISE step once: captured pieces by their wrappers, eager pieces over bridges.

    Attributes:
        why: why the step is not recorded after all, or None.
        fixed: addresses of the memory that later steps find at the same place.
    """

    def __init__(
        self, program: Program, wrappers: Mapping[int, CUDAGraphWrapper], recording: Recording
    ) -> None:
        self.why: Why | None = None
        self._program = program
        self._wrappers = wrappers
        self._recording = recording
        self._replays: list[Runnable] = list(program.runnables)
        self._read: set[str] = set()
        for piece in program.split.pieces:
            self._read |= set(piece.inputs) if piece.capture else set()
        live = {each.name for each in program.split.inputs} - self._read
        lasting = [
            given
            for given, each in zip(recording.given, program.split.inputs, strict=True)
            if each.name not in live or each.static or each.written
        ]
        self.fixed = {
            address(t) for t in tensors((lasting, list(program.split.constants.values())))
        }
        self.fixed -= {0}

    def run(self) -> Any:
        pieces = self._program.split.pieces
        step = self._program.step.bind([self._recorded(piece) for piece in pieces])
        return self._recording.in_context(step)(self._recording.given)

    def replay(self) -> Callable[[Sequence[Any]], Any]:
        return self._recording.in_context(self._program.step.bind(self._replays))

    def drop(self) -> None:
        """Forget what was captured on the way."""
        for wrapper in self._wrappers.values():
            wrapper.drop(self._recording.batch.descriptor)

    def _recorded(self, piece: Piece) -> Runnable:
        return self._captured(piece) if piece.capture else self._eager(piece)

    def _captured(self, piece: Piece) -> Runnable:
        plain = self._program.runnables[piece.index]

        def run(*given: Any) -> Sequence[Any]:
            if self.why is None:
                captured = self._capture(piece, given)
                if captured is not None:
                    return captured
            return plain(*given)

        return run

    def _capture(self, piece: Piece, given: tuple[Any, ...]) -> Sequence[Any] | None:
        wrapper = self._wrappers[piece.index]
        try:
            captured = wrapper.capture(self._recording.batch.descriptor, given, {})
        except Exception as error:
            self.why = _why(error, piece.name, f" ({piece.where})")
            return None
        if captured is None:
            self.why = Why(Reason.GRADIENTS, f"a result of {piece.name} requires grad")
            return None
        self.fixed |= {address(leaf) for leaf in tensors(captured.result)} - {0}
        self._replays[piece.index] = _replayed(captured.entry.graph.replay, captured.entry.output)
        made: Sequence[Any] = captured.result
        return made

    def _eager(self, piece: Piece) -> Runnable:
        plain = self._program.runnables[piece.index]
        crossing = [(k, name) for k, name in enumerate(piece.outputs) if name in self._read]

        def run(*given: Any) -> Sequence[Any]:
            made = list(plain(*given))
            if crossing and self.why is None:
                bridges = [(k, self._bridge(piece, name, made[k])) for k, name in crossing]
                self._replays[piece.index] = _bridged(plain, bridges)
                for k, bridge in bridges:
                    made[k] = bridge(made[k])
            return made

        return run

    def _bridge(self, piece: Piece, name: str, made: Any) -> Crossing:
        where = (f"{piece.name} ({piece.where})", str(self._recording.batch.descriptor), name)
        if not isinstance(made, torch.Tensor):
            return SameValue(where, made)
        if address(made) in self.fixed:
            return SameAddress(where, made)
        bridge = Bridge(where, made)
        self.fixed.add(address(bridge.buffer.tensor))
        return bridge


def _replayed(replay: Callable[[], None], output: Sequence[Any]) -> Runnable:
    def run(*given: Any) -> Sequence[Any]:
        replay()
        return output

    return run


def _bridged(plain: Runnable, bridges: Sequence[tuple[int, Crossing]]) -> Runnable:
    def run(*given: Any) -> Sequence[Any]:
        made = list(plain(*given))
        for k, bridge in bridges:
            made[k] = bridge(made[k])
        return made

    return run
