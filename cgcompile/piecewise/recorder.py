"""Run a step once and record it on the way: :func:`record`.

A capturing call is one execution of the step. Each captured piece is recorded by its wrapper, which
replays it at once, so that the eager pieces after it and the result see real data. If the capture
of a piece fails, that piece and all after it run plain, the result is right, and nothing is kept. A
FULL capture that fails has run nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cgcompile.config import CUDAGraphMode
from cgcompile.errors import CaptureBusyError, DispatchError
from cgcompile.graphs.wrapper import Captured, CUDAGraphWrapper
from cgcompile.passes.nodes import tensors
from cgcompile.passes.pieces import Piece
from cgcompile.piecewise.bridges import Crossing, Place, address, crossings
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.recording import Program, Recording
from cgcompile.piecewise.returns import returned_names
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
        return _record_full(program, full, recording, inputs)
    recorder = _Recorder(program, wrappers, recording)
    try:
        result = recorder.run()
    except BaseException:
        recorder.drop()
        raise
    if recorder.why is not None:
        recorder.drop()
        return Outcome(None, recorder.why, True, result)
    recording.finish(recorder.replay(), result, recorder.fixed, recorder.originals)
    return Outcome(recording, None, True, recording.result(result, inputs))


def _record_full(
    program: Program, full: CUDAGraphWrapper, recording: Recording, inputs: Sequence[Any]
) -> Outcome:
    def capture(*given: Any) -> Captured | None:
        return full.record(recording.batch.descriptor, given, {})

    captured: Captured | None = None
    try:
        captured = recording.in_context(capture)(recording.given)
    except Exception as error:
        return Outcome(None, _why(program, error, "the step", ""), False, None)
    if captured is None:
        return Outcome(None, Why(Reason.GRADIENTS, "a result requires grad"), False, None)
    result = captured.run()
    full.keep(captured.entry)
    replay, output = captured.entry.graph.replay, captured.entry.output

    def run(given: Sequence[Any]) -> Any:
        replay()
        return output

    fixed = {address(leaf) for leaf in tensors((result, recording.given))} - {0}
    recording.finish(run, output, fixed, {}, replay)
    return Outcome(recording, None, True, recording.result(result, inputs))


def _why(program: Program, error: Exception, what: str, where: str) -> Why:
    """Why a capture failed; with ``strict`` that is raised, and the failure is its cause."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, CaptureBusyError):
        why = Why(Reason.CAPTURE_BUSY, first)
    else:
        why = Why(Reason.CAPTURE_FAILED, f"{what}{where}: {type(error).__name__}: {first}")
    if program.config.strict:
        raise DispatchError.strict("the compiled step", why.reason.value, why.detail) from error
    log.warning("%s%s cannot be captured: %s: %s", what, where, type(error).__name__, first)
    log.debug("the capture of %s failed", what, exc_info=error)
    return why


class _Recorder:
    """Runs a PIECEWISE step once: captured pieces by their wrappers, eager pieces over bridges.

    Attributes:
        why: why the step is not recorded after all, or None.
        fixed: where the memory begins that later steps find at the same place.
        originals: of results that bridges replace and the caller gets, and that nothing writes:
            what the eager piece made in the present step, by name.
    """

    def __init__(
        self, program: Program, wrappers: Mapping[int, CUDAGraphWrapper], recording: Recording
    ) -> None:
        self.why: Why | None = None
        self.originals: dict[str, Any] = {}
        self._program = program
        self._wrappers = wrappers
        self._recording = recording
        self._replays: list[Runnable] = list(program.runnables)
        pieces = program.split.pieces
        self._read = {name for piece in pieces if piece.capture for name in piece.inputs}
        returned = set(returned_names(program.split))
        values = program.split.values
        self._unwritten = {name for name in returned & values.keys() if not values[name].written}
        roles = recording.roles
        lasting = [recording.given[p] for p in (*roles.static, *roles.read, *roles.written)]
        constants = list(program.split.constants.values())
        self.fixed = {address(tensor) for tensor in tensors((lasting, constants))} - {0}
        if not recording.batch.own_context:
            self._read |= returned  # the next graph may read it where it lies

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
            captured = self._capture(piece, given) if self.why is None else None
            if captured is None:
                return plain(*given)
            made: Sequence[Any] = captured.run()
            self._wrappers[piece.index].keep(captured.entry)
            return made

        return run

    def _capture(self, piece: Piece, given: tuple[Any, ...]) -> Captured | None:
        wrapper = self._wrappers[piece.index]
        try:
            captured = wrapper.record(self._recording.batch.descriptor, given, {})
        except Exception as error:
            self.why = _why(self._program, error, piece.name, f" ({piece.where})")
            return None
        if captured is None:
            self.why = Why(Reason.GRADIENTS, f"a result of {piece.name} requires grad")
            return None
        self.fixed |= {address(leaf) for leaf in tensors(captured.result)} - {0}
        self._replays[piece.index] = _replayed(captured.entry.graph.replay, captured.entry.output)
        return captured

    def _eager(self, piece: Piece) -> Runnable:
        plain = self._program.runnables[piece.index]
        where = f"{piece.name} ({piece.where})", str(self._recording.batch.descriptor)
        places = [Place(*where, k, name) for k, name in enumerate(piece.outputs)]
        if self._read.isdisjoint(piece.outputs):
            return plain

        def run(*given: Any) -> Sequence[Any]:
            made = list(plain(*given))
            if self.why is None:
                across, replaced = crossings(places, made, self._read, self.fixed)
                ours = self._recording.batch.own_context
                kept = [p for p in places if ours and p.name in replaced & self._unwritten]
                bridged = _bridged(plain, across, kept, self.originals)
                self._replays[piece.index] = bridged
                _cross(made, across, kept, self.originals)
            return made

        return run


def _replayed(replay: Callable[[], None], output: Sequence[Any]) -> Runnable:
    def run(*given: Any) -> Sequence[Any]:
        replay()
        return output

    return run


def _bridged(
    plain: Runnable,
    across: Sequence[Crossing],
    kept: Sequence[Place],
    originals: dict[str, Any],
) -> Runnable:
    def run(*given: Any) -> Sequence[Any]:
        made = list(plain(*given))
        _cross(made, across, kept, originals)
        return made

    return run


def _cross(
    made: list[Any],
    across: Sequence[Crossing],
    kept: Sequence[Place],
    originals: dict[str, Any],
) -> None:
    for place in kept:
        originals[place.name] = made[place.item]
    for crossing in across:
        crossing(made)
