"""Run a step once and record it on the way: :func:`record`.

A capturing call is one execution of the step. The wrapper of each captured piece records it, and
the recorder replays it at once, so that the eager pieces after it and the result see real data. If
the capture of a piece fails, that piece and all after it run plain, the result is right, and
nothing is kept. A FULL capture that fails has run nothing.

What is kept is a :class:`~cgcompile.graphs.sequence.GraphSequence`: the graphs of the wrappers'
entries, and between them the eager pieces, bound to what the graphs before them fill.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from cgcompile.config import CUDAGraphMode
from cgcompile.context import callers_context
from cgcompile.errors import CaptureBusyError, PieceCompileError
from cgcompile.graphs.arena import Block, ScalarCopy, address, rows_apart
from cgcompile.graphs.capture import SameStorages
from cgcompile.graphs.sequence import (
    Bridges,
    Crossing,
    EagerSegment,
    GraphSegment,
    GraphSequence,
    Place,
    Segment,
    Slot,
    crossings,
)
from cgcompile.graphs.steps import refuse_strict
from cgcompile.graphs.wrapper import Captured, CUDAGraphEntry, CUDAGraphWrapper
from cgcompile.passes.nodes import tensors
from cgcompile.passes.split import Piece, returned_names
from cgcompile.pieces.compilers import Runnable
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.runtime.program import EagerCall, Program, in_traced_layouts
from cgcompile.runtime.recording import Recording
from cgcompile.source_lines import raised_at
from cgcompile.torch_compat import torch_ops

log = logging.getLogger(__name__)


def record(
    program: Program,
    wrappers: Mapping[int, CUDAGraphWrapper],
    full: CUDAGraphWrapper,
    recording: Recording,
    inputs: Sequence[Any],
) -> Any:
    """Run one step, record it by ``full`` or the wrappers of its pieces, and return its result.

    Raises:
        RunPlain: the step cannot be captured; with its result, if it has run.
    """
    mode, batch = recording.batch.mode, recording.batch.display
    capturing = program.timeline.record_capture(
        program.pool, full.name, mode, batch, recording.reserved
    )
    with capturing as ended:
        if mode is CUDAGraphMode.FULL:
            result = _record_full(program, full, recording, inputs)
        else:
            result = _Recorder(program, wrappers, recording, inputs).run()
        ended(recording.sequence)
    return result


def _record_full(
    program: Program, full: CUDAGraphWrapper, recording: Recording, inputs: Sequence[Any]
) -> Any:
    def capture(*args: Any) -> Captured:
        storages = _storages(program, recording, "the step", recording.inputs)
        return full.record(recording.batch.descriptor, args, {}, storages)

    try:
        captured = recording.in_context(capture)(*recording.inputs)
    except (PieceCompileError, RunPlain):  # the compiler failed, not the capture
        raise
    except Exception as error:
        _refuse_capture(program, error, "the step", "")
    captured.entry.sequence.batch = str(recording.batch.display)
    result = captured.run()
    full.keep(captured.entry)
    fixed = {*recording.starts, *map(address, tensors(result))} - {0}
    results = recording.results(result, torch_ops.tree_leaves(captured.entry.output), fixed, inputs)
    recording.kept, recording.context = [(full, captured.entry)], captured.entry.context
    recording.finish(captured.entry.sequence, results, {})
    return results.make((), inputs)


def _storages(
    program: Program, recording: Recording, what: str, args: Sequence[Any]
) -> SameStorages:
    """Snapshot the storages of the step's inputs."""
    positions = recording.positions

    def name_of(tensor: torch.Tensor) -> str:
        value = program.split.inputs[positions[id(tensor)]]
        return repr(value.source or value.name)

    known = recording.comparable
    return SameStorages(what, [x for x in args if id(x) in known], name_of)


def _refuse_capture(program: Program, error: Exception, what: str, where: str) -> NoReturn:
    """Raise RunPlain for a capture that failed; with ``strict`` an error caused by the failure."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, CaptureBusyError):
        fallback = Fallback(Reason.CAPTURE_BUSY, first)
    else:
        line = raised_at(error)  # line of the user's op; compiled pieces have no lines
        at = "" if line is None else f" ({line})"
        detail = f"{what}{where}: {type(error).__name__}: {first}{at}"
        fallback = Fallback(Reason.CAPTURE_FAILED, detail)
    refuse_strict(program.config.strict, "the compiled step", fallback, cause=error)
    log.warning("%s%s cannot be captured: %s: %s", what, where, type(error).__name__, first)
    log.debug("the capture of %s failed", what, exc_info=error)
    raise RunPlain(fallback)


class _Recorder:
    """Runs a PIECEWISE step once: captured pieces by their wrappers, eager pieces over bridges."""

    def __init__(
        self,
        program: Program,
        wrappers: Mapping[int, CUDAGraphWrapper],
        recording: Recording,
        inputs: Sequence[Any],
    ) -> None:
        self._fallback: Fallback | None = None  # why the step is not recorded after all
        self._program = program
        self._wrappers = wrappers
        self._recording = recording
        self._call_inputs = inputs
        self._uses = program.uses[recording.batch.own_context]
        self._segments: list[Segment] = []
        self._kept: list[tuple[CUDAGraphWrapper, CUDAGraphEntry]] = []
        self._slots: list[Any] = []  # the values of this step
        self._inputs: list[tuple[Slot, int]] = []
        # What later steps use for a value, by name: an object, or the slot that holds it.
        self._sources: dict[str, Any] = dict(program.split.constants)
        self._bridges: list[tuple[Block, list[str]]] = []  # bridges with readers to come
        self._scalars: dict[str, ScalarCopy] = {}  # name -> device copy of a 0-dim CPU tensor
        self._starts: dict[str, int] = {}  # the addresses of results, by name
        self._batch = str(recording.batch.descriptor)
        self._pool_memory: set[int] = set()
        # The values with rows that eager pieces leave, by piece; None where that is not known.
        rows, own = recording.batch.descriptor.num_tokens, recording.batch.own_context
        self._rows_left = {} if own else program.rows.left(rows, inputs)
        roles, starts = recording.roles, recording.starts
        lasting = {starts[p] for p in (*roles.read, *roles.mutated)}.union(recording.static_starts)
        constants = tensors(list(program.split.constants.values()))
        self._fixed = lasting.union(map(address, constants)) - {0}  # addresses
        # Addresses of the other inputs.
        self._moving = {starts[p] for p in program.dynamic_positions} - self._fixed - {0}

    def run(self) -> Any:
        """Return the result of the step; raise RunPlain with it if a piece was not captured."""
        try:
            step = self._program.step.bind([self._recorded(p) for p in self._program.split.pieces])
            result = self._recording.in_context(step)(*self._recording.inputs)
        except BaseException:
            self._drop()
            raise
        if self._fallback is None:
            return self._finish(result)
        self._drop()
        raise RunPlain(self._fallback, self._copied_out(result))

    def _finish(self, result: Any) -> Any:
        """Keep the step that has run; return the result of the call."""
        numbers = self._program.split.numbers
        if numbers is not None:
            call = EagerCall.of_all(numbers, numbers.module.forward)
            args = [self._value(name) for name in numbers.inputs]
            self._append(numbers, call, list(numbers.module.forward(*args)), [], [])
        leaves = torch_ops.tree_leaves(result)
        names = zip(returned_names(self._program.split), leaves, strict=True)
        sources = [self._source(name) if name else leaf for name, leaf in names]
        pairs = zip(sources, leaves, strict=True)
        values = [self._slots[s.at] if isinstance(s, Slot) else leaf for s, leaf in pairs]
        result = torch_ops.tree_unflatten(values, torch_ops.tree_spec(result))
        inputs, recording = self._call_inputs, self._recording
        results = recording.results(result, sources, self._fixed, inputs)
        sequence = GraphSequence(
            self._segments,
            self._inputs,
            len(self._slots),
            [Slot(index) for index in results.used_slots],
            batch=str(recording.batch.display),
            pool=self._program.pool,
            rows=recording.batch.descriptor.num_tokens,
        )
        if self._rows_left is None:
            rows, timeline = recording.batch.descriptor.num_tokens, self._program.timeline
            sequence.not_zeroed = partial(timeline.not_zeroed, rows)
            context = callers_context()
            real = None if context is None else context.num_unpadded_tokens
            if real is not None and real < rows:
                sequence.not_zeroed()
        pieces = [entry.sequence for _, entry in self._kept]
        sequence.held = [row for piece in pieces for row in piece.held]
        sequence.watched = [row for piece in pieces for row in piece.watched]
        recording.kept = self._kept
        recording.finish(sequence, results, self._sources)
        return results.make(self._slots, inputs)

    def _copied_out(self, result: Any) -> Any:
        """Return the result of a call whose step is not kept: copied out of memory of the pool."""
        leaves = torch_ops.tree_leaves(result)
        arena = self._program.pool.arena
        fixed = self._fixed | {address(x) for x in tensors(leaves) if arena.owns(address(x))}
        results = self._recording.results(result, leaves, fixed, self._call_inputs)
        return results.make((), self._call_inputs)

    def _drop(self) -> None:
        for wrapper, entry in self._kept:
            wrapper.drop(entry)

    # -------------------------------------------------------------- where values are

    def _source(self, name: str) -> Any:
        if name not in self._sources:
            position = self._program.positions[name]
            value = self._recording.inputs[position]
            self._sources[name] = value
            if not self._recording.is_fixed(position):
                self._sources[name] = self._slot(value)
                self._inputs.append((self._sources[name], position))
        return self._sources[name]

    def _slot(self, value: Any) -> Slot:
        self._slots.append(value)
        return Slot(len(self._slots) - 1)

    def _value(self, name: str) -> Any:
        source = self._source(name)
        return self._slots[source.at] if isinstance(source, Slot) else source

    def _release(self, index: int) -> None:
        """Free bridges whose last reader has run."""
        for block, names in list(self._bridges):
            if self._is_read_after(index, names):
                continue
            start = block.address
            views = [n for n, at in self._starts.items() if at == start and n not in names]
            returned = not self._uses.returned.isdisjoint(views)
            if not returned and not self._is_read_after(index, views):
                self._bridges.remove((block, names))
                self._recording.frame.release(block)
                self._fixed.discard(start)
                for name in (*names, *views):
                    self._starts.pop(name, None)

    def _is_read_after(self, index: int, names: Sequence[str]) -> bool:
        last = self._uses.last
        return any([last.get(name, index) > index for name in names])

    # -------------------------------------------------------------- pieces

    def _recorded(self, piece: Piece) -> Runnable:
        run = self._captured(piece) if piece.capture else self._eager(piece)
        return self._program.traced.comparing(piece, run, self._recording.inputs)

    def _captured(self, piece: Piece) -> Runnable:
        plain = self._program.runnables[piece.index]
        wrapper = self._wrappers[piece.index]

        def run(*inputs: Any) -> Sequence[Any]:
            captured = None
            if self._fallback is None:
                inputs, scalars = self._with_scalars(piece, inputs)
                try:
                    captured = self._capture(piece, wrapper, inputs, scalars)
                except RunPlain as refusal:
                    self._fallback = refusal.why
            if captured is None:
                return plain(*inputs)
            outputs: Sequence[Any] = captured.run()
            wrapper.keep(captured.entry)
            self._kept.append((wrapper, captured.entry))
            self._release(piece.index)
            return outputs

        return run

    def _with_scalars(
        self, piece: Piece, inputs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[tuple[ScalarCopy, Any], ...]]:
        """Copy 0-dim CPU inputs to the device; return the inputs and the new (copy, source)."""
        args, scalars = list(inputs), []
        for position in self._program.cpu_scalars.get(piece.index, ()):
            name = piece.inputs[position]
            buffer = self._scalars.get(name)
            if buffer is None or self._program.split.values[name].mutated:
                device = self._program.split.device
                buffer = ScalarCopy(inputs[position], self._recording.frame, device)
                buffer.fill(inputs[position])
                self._scalars[name] = buffer
                self._fixed.add(buffer.block.address)
                scalars.append((buffer, self._source(name)))
            args[position] = buffer.tensor
        return tuple(args), tuple(scalars)

    def _capture(
        self,
        piece: Piece,
        wrapper: CUDAGraphWrapper,
        inputs: tuple[Any, ...],
        scalars: tuple[tuple[ScalarCopy, Any], ...],
    ) -> Captured:
        """Capture a piece; the addresses of its outputs are known, though nothing has run."""
        try:
            storages = _storages(self._program, self._recording, piece.name, inputs)
            descriptor = self._recording.batch.descriptor
            captured = wrapper.record(descriptor, inputs, {}, storages, shown=self._batch)
        except RunPlain:
            raise
        except Exception as error:
            _refuse_capture(self._program, error, piece.name, f" ({piece.where})")
        own = set(captured.starts).difference(self._fixed, (0,))
        self._pool_memory |= own
        self._fixed |= own
        self._starts.update(zip(piece.outputs, captured.starts, strict=True))
        self._sources.update(zip(piece.outputs, captured.entry.output, strict=True))
        (segment,) = captured.entry.sequence.segments
        assert isinstance(segment, GraphSegment)
        self._segments.append(replace(segment, scalars=scalars) if scalars else segment)
        return captured

    def _eager(self, piece: Piece) -> Runnable:
        plain = self._program.runnables[piece.index]
        call = self._program.calls[piece.index]
        layouts = self._program.layouts.get(piece.index, {})
        where = f"{piece.name} ({piece.where})", self._batch
        places = [Place(*where, item, name) for item, name in enumerate(piece.outputs)]

        def run(*inputs: Any) -> Sequence[Any]:
            if self._fallback is not None:
                return plain(*inputs)
            values = dict(zip(piece.inputs, inputs, strict=True))
            outputs = call.results(call.function(*call.arguments(values.__getitem__)))
            outputs = list(in_traced_layouts(outputs, layouts))  # bridges get these layouts
            frame, uses = self._recording.frame, self._uses
            aliases = self._aliases_of_inputs(piece, outputs)
            read = uses.read - (aliases - uses.captured)
            across = crossings(places, outputs, read, uses.returned, self._fixed, frame)
            self._append(piece, call, outputs, *across, uses.originals | aliases)
            return outputs

        return run

    def _aliases_of_inputs(self, piece: Piece, outputs: Sequence[Any]) -> set[str]:
        """Return the results that are memory of an input; the caller gets them uncopied."""
        pairs = zip(piece.outputs, outputs, strict=True)
        aliases = {
            name for name, x in pairs if isinstance(x, torch.Tensor) and address(x) in self._moving
        }
        return aliases & self._uses.returned

    def _append(
        self,
        piece: Piece,
        call: EagerCall,
        outputs: list[Any],
        across: list[Crossing],
        bridges: Bridges,
        originals: Collection[str] = (),
    ) -> None:
        """Record an eager piece that has run; its results cross, here as at every replay."""
        bridged = {name for _, names in bridges for name in names}
        args = call.arguments(self._source)
        kept = [
            (item, self._slot(outputs[item]))
            for item, name in enumerate(piece.outputs)
            if name in bridged and name in originals
        ]
        for crossing in across:
            crossing(outputs)
        stores = []
        for item, name in enumerate(piece.outputs):
            if name in bridged:
                self._sources[name] = outputs[item]
            elif name in self._uses.live:
                self._sources[name] = self._slot(outputs[item])
                stores.append((item, self._sources[name]))
        pairs = zip(piece.outputs, outputs, strict=True)
        self._starts.update({n: address(x) for n, x in pairs if isinstance(x, torch.Tensor)})
        self._bridges += bridges
        tails = self._tails(piece)
        context = callers_context() if tails else None
        if context is not None and context.num_unpadded_tokens is not None:
            for tail in tails:  # a replay does the same
                tail[context.num_unpadded_tokens :].zero_()
        self._segments.append(
            EagerSegment(
                piece.name,
                call.function,
                args,
                leaves=call.results,
                originals=tuple(kept),
                crossings=tuple(across),
                stores=tuple(stores),
                tails=tails,
                what=self._program.labels[piece.index],
            )
        )
        for item, slot in kept:  # the caller gets these
            self._sources[piece.outputs[item]] = slot
        self._release(piece.index)

    def _tails(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Return the results of an eager piece that graphs read, with a row per batch row."""
        with_rows = (self._rows_left or {}).get(piece.index)
        if not with_rows:
            return ()
        sources, pool = self._sources, self._program.pool
        names = [name for name in piece.outputs if isinstance(sources.get(name), torch.Tensor)]
        for name in self._program.rows.mutated.get(piece.index, ()):
            start = self._starts.get(name, 0)
            if start in self._pool_memory or (start and pool.arena.owns(start)):
                names.append(name)
        rows = [sources[name] for name in names if name in with_rows]
        return tuple([each for each in rows if rows_apart(each)])  # zeroing would clear real rows
