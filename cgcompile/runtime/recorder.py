"""Run a step once and record it on the way: :func:`record`.

A capturing call is one execution of the step. Each captured piece is recorded by its wrapper, which
replays it at once, so that the eager pieces after it and the result see real data. If the capture
of a piece fails, that piece and all after it run plain, the result is right, and nothing is kept. A
FULL capture that fails has run nothing.

What is kept is a :class:`~cgcompile.graphs.sequence.GraphSequence`: the graphs of the wrappers'
entries, and between them the eager pieces, bound to what the graphs before them fill.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CUDAGraphMode
from cgcompile.context import callers_context
from cgcompile.errors import CaptureBusyError, DispatchError, PieceCompileError
from cgcompile.graphs.arena import Block, ScalarCopy, address
from cgcompile.graphs.bridges import Bridged, Place, crossings
from cgcompile.graphs.capture import SameStorages
from cgcompile.graphs.sequence import EagerSegment, GraphSegment, GraphSequence, Segment, Slot
from cgcompile.graphs.wrapper import Captured, CUDAGraphEntry, CUDAGraphWrapper
from cgcompile.passes.nodes import raised_at, tensors
from cgcompile.passes.split import Piece
from cgcompile.pieces.compilers import Runnable
from cgcompile.reasons import Fallback, Reason
from cgcompile.runtime.program import Call, Program, arguments
from cgcompile.runtime.recording import Recording
from cgcompile.runtime.returns import returned_names

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
    why: Fallback | None
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
        DispatchError: ``strict``, and the step is not recorded after all.
        BaseException: what the step raised when it ran plain, unchanged; nothing is kept then.
    """
    mode, batch = recording.batch.mode, recording.batch.shown
    timed = program.timeline.capture(program.pool, full.name, mode, batch, recording.reserved)
    with timed as found:
        if mode is CUDAGraphMode.FULL:
            outcome = _record_full(program, full, recording, inputs)
        else:
            outcome = _record_pieces(program, wrappers, recording, inputs)
        if outcome.recording is None:
            found.why = str(outcome.why)
        else:
            found.sequence = recording.sequence
    return outcome


def _record_pieces(
    program: Program,
    wrappers: Mapping[int, CUDAGraphWrapper],
    recording: Recording,
    inputs: Sequence[Any],
) -> Outcome:
    recorder = _Recorder(program, wrappers, recording)
    try:
        result = recorder.run()
    except BaseException:
        recorder.drop()
        raise
    if recorder.why is not None:
        recorder.drop()
        why, handed = recorder.why, recorder.hand_over(result, inputs)
        if program.config.strict:
            raise DispatchError.strict(
                what="the compiled step", reason=why.reason.value, detail=why.detail
            )
        return Outcome(None, why, True, handed)
    return Outcome(recording, None, True, recorder.finish(result, inputs))


def _record_full(
    program: Program, full: CUDAGraphWrapper, recording: Recording, inputs: Sequence[Any]
) -> Outcome:
    def capture(*given: Any) -> Captured | None:
        storages = _storages(program, recording, "the step", recording.given)
        return full.record(recording.batch.descriptor, given, {}, storages=storages)

    captured: Captured | None = None
    try:
        captured = recording.in_context(capture)(*recording.given)
    except PieceCompileError:  # no graph has to do with it
        raise
    except Exception as error:
        return Outcome(None, _why(program, error, "the step", ""), False, None)
    if captured is None:
        return Outcome(None, Fallback(Reason.GRADIENTS, "a result requires grad"), False, None)
    captured.entry.sequence.batch = str(recording.batch.shown)
    result = captured.run()
    full.keep(captured.entry)
    fixed = {*recording.starts, *map(address, tensors(result))} - {0}
    returns = recording.returns(result, compat.tree_leaves(captured.entry.output), fixed, inputs)
    recording.kept = [(full, captured.entry)]
    recording.finish(captured.entry.sequence, returns, {})
    return Outcome(recording, None, True, returns.make((), inputs))


def _storages(
    program: Program, recording: Recording, what: str, given: Sequence[Any]
) -> SameStorages:
    """The memory of those inputs of the step that a capture is given, which it must not replace."""
    places = {id(each): p for p, each in enumerate(recording.given)}

    def name_of(tensor: torch.Tensor) -> str:
        value = program.split.inputs[places[id(tensor)]]
        return repr(value.source or value.name)

    lasting = [tensor for tensor in tensors(list(given)) if id(tensor) in places]
    return SameStorages(what, lasting, name_of)


def _why(program: Program, error: Exception, what: str, where: str) -> Fallback:
    """Why a capture failed; with ``strict`` that is raised, and the failure is its cause."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, CaptureBusyError):
        why = Fallback(Reason.CAPTURE_BUSY, first)
    else:
        line = raised_at(error)  # in an op of the user's; a compiled piece has no lines
        at = "" if line is None else f" ({line})"
        why = Fallback(Reason.CAPTURE_FAILED, f"{what}{where}: {type(error).__name__}: {first}{at}")
    if program.config.strict:
        raise DispatchError.strict(
            what="the compiled step", reason=why.reason.value, detail=why.detail
        ) from error
    log.warning("%s%s cannot be captured: %s: %s", what, where, type(error).__name__, first)
    log.debug("the capture of %s failed", what, exc_info=error)
    return why


class _Recorder:
    """Runs a PIECEWISE step once: captured pieces by their wrappers, eager pieces over bridges.

    Attributes:
        why: why the step is not recorded after all, or None.
    """

    def __init__(
        self, program: Program, wrappers: Mapping[int, CUDAGraphWrapper], recording: Recording
    ) -> None:
        self.why: Fallback | None = None
        self._program = program
        self._wrappers = wrappers
        self._recording = recording
        self._uses = program.uses[recording.batch.own_context]
        self._segments: list[Segment] = []
        self._kept: list[tuple[CUDAGraphWrapper, CUDAGraphEntry]] = []
        self._slots: list[Any] = []  # the values of this step
        self._inputs: list[tuple[Slot, int]] = []
        self._sources: dict[str, Any] = dict(program.split.constants)
        self._bridges: list[tuple[Block, list[str]]] = []  # that something still reads
        self._scalars: dict[str, ScalarCopy] = {}  # of 0-dim CPU tensors, on the device, by name
        self._lying: dict[str, int] = {}  # names whose memory begins at a fixed address
        self._batch = str(recording.batch.descriptor)
        self._pool_memory: set[int] = set()
        roles, starts = recording.roles, recording.starts
        lasting = {starts[p] for p in (*roles.static, *roles.read, *roles.written)}
        constants = tensors(list(program.split.constants.values()))
        self._fixed = lasting.union(map(address, constants)) - {0}
        self._moving = set(starts) - self._fixed - {0}  # memory of the other inputs

    def run(self) -> Any:
        pieces = self._program.split.pieces
        step = self._program.step.bind([self._recorded(piece) for piece in pieces])
        return self._recording.in_context(step)(*self._recording.given)

    def finish(self, made: Any, inputs: Sequence[Any]) -> Any:
        """The step has run: keep it. Returns what the call returns to its caller."""
        numbers = self._program.split.numbers
        if numbers is not None:
            call = Call.of_all(numbers, numbers.module.forward)
            given = [self._value(name) for name in numbers.inputs]
            self._append(numbers, call, list(numbers.module.forward(*given)), Bridged([], []))
        leaves = compat.tree_leaves(made)
        names = returned_names(self._program.split)
        sources = [
            self._source(name) if name else leaf for name, leaf in zip(names, leaves, strict=True)
        ]
        pairs = zip(sources, leaves, strict=True)
        values = [self._slots[s.at] if isinstance(s, Slot) else leaf for s, leaf in pairs]
        made = compat.tree_unflatten(values, compat.tree_spec(made))
        returns = self._recording.returns(made, sources, self._fixed, inputs)
        sequence = GraphSequence(
            self._segments,
            self._inputs,
            len(self._slots),
            returns.slots,
            batch=str(self._recording.batch.shown),
            pool=self._program.pool,
            rows=self._recording.batch.descriptor.num_tokens,
        )
        made_here = self._uses.made
        known = {name: source for name, source in self._sources.items() if name in made_here}
        self._recording.kept = self._kept
        self._recording.finish(sequence, returns, known)
        return returns.make(self._slots, inputs)

    def hand_over(self, made: Any, inputs: Sequence[Any]) -> Any:
        """What a call returns whose step is not kept: nothing of ours, where results are copied."""
        leaves = compat.tree_leaves(made)
        arena = self._program.pool.arena
        lying = {address(leaf) for leaf in tensors(leaves) if arena.owns(address(leaf))}
        fixed = self._fixed | lying
        return self._recording.returns(made, leaves, fixed, inputs).make((), inputs)

    def drop(self) -> None:
        """Forget what was captured on the way."""
        for wrapper, entry in self._kept:
            wrapper.drop(entry)

    # -------------------------------------------------------------- where values are

    def _source(self, name: str) -> Any:
        """What later steps find in place of a value: an object, or the slot that it is put in."""
        if name not in self._sources:
            position = self._program.positions[name]
            if self._recording.is_fixed(position):
                self._sources[name] = self._recording.given[position]
            else:
                self._sources[name] = self._slot(self._recording.given[position])
                self._inputs.append((self._sources[name], position))
        return self._sources[name]

    def _slot(self, value: Any) -> Slot:
        self._slots.append(value)
        return Slot(len(self._slots) - 1)

    def _value(self, name: str) -> Any:
        source = self._source(name)
        return self._slots[source.at] if isinstance(source, Slot) else source

    def _release(self, index: int) -> None:
        """Give back the bridges that no piece after this one reads, under whatever name."""
        for block, names in list(self._bridges):
            if self._is_read_after(index, names):
                continue
            views = [n for n, at in self._lying.items() if at == block.address and n not in names]
            returned = not self._uses.returned.isdisjoint(views)
            if not returned and not self._is_read_after(index, views):
                self._bridges.remove((block, names))
                self._recording.frame.give(block)
                self._fixed.discard(block.address)
                for name in (*names, *views):
                    self._lying.pop(name, None)

    def _is_read_after(self, index: int, names: Sequence[str]) -> bool:
        last = self._uses.last
        return any([last.get(name, index) > index for name in names])

    # -------------------------------------------------------------- pieces

    def _recorded(self, piece: Piece) -> Runnable:
        run = self._captured(piece) if piece.capture else self._eager(piece)
        return self._program.traced.compared(piece, run, self._recording.given)

    def _captured(self, piece: Piece) -> Runnable:
        plain = self._program.runnables[piece.index]
        wrapper = self._wrappers[piece.index]

        def run(*given: Any) -> Sequence[Any]:
            captured = None
            if self.why is None:
                given, scalars = self._with_scalars(piece, given)
                captured = self._capture(piece, wrapper, given, scalars)
            if captured is None:
                return plain(*given)
            made: Sequence[Any] = captured.run()
            wrapper.keep(captured.entry)
            self._kept.append((wrapper, captured.entry))
            self._release(piece.index)
            return made

        return run

    def _with_scalars(
        self, piece: Piece, given: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[tuple[ScalarCopy, Any], ...]]:
        """What a piece takes, with copies of its 0-dim CPU tensors; and what fills the copies."""
        places = self._program.cpu_scalars.get(piece.index, ())
        args, scalars = list(given), []
        for place in places:
            name = piece.inputs[place]
            buffer = self._scalars.get(name)
            if buffer is None or self._program.split.values[name].written:
                buffer = ScalarCopy(given[place], self._recording.frame, self._program.split.device)
                buffer.fill(given[place])
                self._scalars[name] = buffer
                self._fixed.add(buffer.block.address)
                scalars.append((buffer, self._source(name)))
            args[place] = buffer.tensor
        return tuple(args), tuple(scalars)

    def _capture(
        self,
        piece: Piece,
        wrapper: CUDAGraphWrapper,
        given: tuple[Any, ...],
        scalars: tuple[tuple[ScalarCopy, Any], ...],
    ) -> Captured | None:
        """Capture a piece; what it makes lies where it will, though nothing has run."""
        try:
            storages = _storages(self._program, self._recording, piece.name, given)
            captured = wrapper.record(
                self._recording.batch.descriptor, given, {}, self._batch, storages
            )
        except Exception as error:
            self.why = _why(self._program, error, piece.name, f" ({piece.where})")
            return None
        if captured is None:
            self.why = Fallback(Reason.GRADIENTS, f"a result of {piece.name} requires grad")
            return None
        own = set(captured.starts).difference(self._fixed, (0,))
        self._pool_memory |= own
        self._fixed |= own
        self._lying.update(zip(piece.outputs, captured.starts, strict=True))
        self._sources.update(zip(piece.outputs, captured.entry.output, strict=True))
        (segment,) = captured.entry.sequence.segments
        assert isinstance(segment, GraphSegment)
        self._segments.append(replace(segment, scalars=scalars) if scalars else segment)
        return captured

    def _eager(self, piece: Piece) -> Runnable:
        program = self._program
        plain = program.runnables[piece.index]
        call = program.calls[piece.index]
        where = f"{piece.name} ({piece.where})", self._batch
        places = [Place(*where, k, name) for k, name in enumerate(piece.outputs)]

        def run(*given: Any) -> Sequence[Any]:
            if self.why is not None:
                return plain(*given)
            values = dict(zip(piece.inputs, given, strict=True))
            made = call.leaves(call.function(*arguments(call, values.__getitem__)))
            frame, uses = self._recording.frame, self._uses
            aliases = self._aliases_of_inputs(piece, made)
            read = uses.read - (aliases - uses.captured)
            across = crossings(places, made, read, uses.returned, self._fixed, frame)
            self._append(piece, call, made, across, uses.originals | aliases)
            return made

        return run

    def _aliases_of_inputs(self, piece: Piece, made: Sequence[Any]) -> set[str]:
        """Return the results that are memory of an input; the caller gets them uncopied."""
        pairs = zip(piece.outputs, made, strict=True)
        aliases = {
            name for name, x in pairs if isinstance(x, torch.Tensor) and address(x) in self._moving
        }
        return aliases & self._uses.returned

    def _append(
        self,
        piece: Piece,
        call: Call,
        made: list[Any],
        across: Bridged,
        originals: Collection[str] = (),
    ) -> None:
        """Record an eager piece that has run; its results cross, here as at every replay."""
        uses, bridged = self._uses, across.replaced
        args = arguments(call, self._source)
        kept = [
            (item, self._slot(made[item]))
            for item, name in enumerate(piece.outputs)
            if name in bridged and name in originals
        ]
        for crossing in across.crossings:
            crossing(made)
        stores = []
        for item, name in enumerate(piece.outputs):
            if name in bridged:
                self._sources[name] = made[item]
            elif name in uses.live:
                self._sources[name] = self._slot(made[item])
                stores.append((item, self._sources[name]))
        pairs = zip(piece.outputs, made, strict=True)
        self._lying.update({n: address(x) for n, x in pairs if isinstance(x, torch.Tensor)})
        self._bridges += across.blocks
        tails = self._tails(piece)
        context = callers_context() if tails else None
        if context is not None and context.num_unpadded_tokens is not None:
            for tail in tails:  # as every replay does
                tail[context.num_unpadded_tokens :].zero_()
        self._segments.append(
            EagerSegment(
                piece.name,
                call.function,
                args,
                leaves=call.leaves,
                originals=tuple(kept),
                crossings=tuple(across.crossings),
                stores=tuple(stores),
                tails=tails,
                what=self._program.said[piece.index],
            )
        )
        for item, slot in kept:  # the caller gets these
            self._sources[piece.outputs[item]] = slot
        self._release(piece.index)

    def _tails(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """What an eager piece leaves for graphs to read, with a row for each row of the batch."""
        with_rows = self._program.with_rows
        if not with_rows or self._recording.batch.own_context:
            return ()
        sources = self._sources
        found = [name for name in piece.outputs if isinstance(sources.get(name), torch.Tensor)]
        for name in self._program.written.get(piece.index, ()):
            where = self._lying.get(name, 0)
            if where in self._pool_memory or (where and self._program.pool.arena.owns(where)):
                found.append(name)
        return tuple([self._sources[name] for name in found if name in with_rows])
