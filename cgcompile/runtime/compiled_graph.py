"""What ``torch.compile`` calls at every step: :class:`CompiledGraph`, one per backend call.

A backend call is not a model: two instances of a class can share one, and one model can make
several (graph breaks, a static and then a dynamic size). A compiled graph owns the split, the
compiled pieces, the pool of its CUDA graphs and the counters. A call goes through five steps, which
are the methods of :class:`CompiledGraph` in this order:

1. ``__call__``: which step is this? Its forward context and its inputs tell. The step of the last
   call takes the fast path: generated code that checks and replays it.
2. ``_with_graphs``: may it have a graph? Else there is a reason (gradients, mode, another capture).
3. ``_find``: is there one, for these weights? Under the lock: one thread runs a step at a time.
4. ``_replay``: are the inputs those of the capture? Else it is an error, or a reason.
5. ``_replay`` it, ``_capture`` it (through ``_first``), or run it plain (``_without_graphs``), and
   count that. Each call ends in exactly one of the three, or raises.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import (
    ForwardContext,
    callers_context,
    current_forward_context,
    eager_region_is_open,
    override_forward_context,
)
from cgcompile.errors import DispatchError, GradientError, GuardError
from cgcompile.graphs.capture import (
    GRADIENTS,
    IN_REGION,
    INSIDE_CAPTURE,
    releasing,
    retry_while_busy,
)
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.stale import check_debug
from cgcompile.graphs.timeline import Timeline
from cgcompile.passes.split import SplitGraph
from cgcompile.pieces.cache import Compilation
from cgcompile.pieces.compilers import Runnable
from cgcompile.pieces.size_ranges import artifacts_text
from cgcompile.pieces.stitch import Step
from cgcompile.reasons import EXPECTED, Counters, Fallback, Ledger, Reason
from cgcompile.runtime.dispatch import Admission, AutoDispatch
from cgcompile.runtime.fast_path import ANOTHER, Again, Turn
from cgcompile.runtime.inputs import Frozen, Overlaps, Roles, full_support, why_never
from cgcompile.runtime.program import Program, TracedOutputs, taking_cpu_scalars
from cgcompile.runtime.recorder import record
from cgcompile.runtime.recording import Batch, Recording
from cgcompile.runtime.weight_sets import Binding, Bindings

log = logging.getLogger(__name__)

Observer = Callable[[Program, Recording, Sequence[Any], int | None], Any]
"""Runs a recorded step in place of its replay: (program, recording, inputs, real rows) -> result.

It leaves what one execution of the step leaves, and returns what that returns."""

_MOST_DROPPED = 8  # recordings of one step, until it runs plain where an input has moved

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


class CompiledGraph:
    """One traced graph: split, compiled, captured per batch.

    Args:
        split: the split graph.
        runnables: what to call for each piece.
        boundaries: the registry that it was split by.
        config: the settings.
        compilation: where the callables came from.
        frozen: how many of the last inputs are the same objects, at the same addresses, in all
            calls.

    Attributes:
        split: the split graph; ``print(graph.split)`` shows it.
        compilation: which pieces were compiled, loaded or shared, and what it took; ``print`` it.
        source: the generated Python that runs the pieces.
        artifacts: which artifacts of each compiled piece serve which sizes, as text.
        timeline: what was captured, and when.
        pool: the memory of its graphs; None where no device captures.
        turn: which steps it remembers, and whose turn it is.
        before_capture: called once, before the first capture.
    """

    def __init__(
        self,
        split: SplitGraph,
        runnables: Sequence[Runnable],
        boundaries: Boundaries,
        config: CompilationConfig,
        compilation: Compilation,
        *,
        frozen: int = 0,
    ) -> None:
        self.split = split
        self.compilation = compilation
        self.timeline = Timeline()
        self._ledger = Ledger(self.timeline.plain, self.timeline.refused)
        self._config = config
        step = Step(split)
        self.source = step.source
        self.artifacts = artifacts_text(split, runnables)
        runnables = taking_cpu_scalars(split, runnables)
        self._run = step.bind(runnables)
        traced = TracedOutputs(split)
        self._run_compared = traced.comparing(step, runnables, self._run)
        self._run_differentiable = step.bind([piece.module.forward for piece in split.pieces])
        constants = split.constants.values() if split.differentiable else ()
        self._constants = tuple(each for each in constants if isinstance(each, torch.Tensor))
        self._may_require_grad = tuple(
            position
            for position, each in enumerate(split.inputs)
            if split.differentiable and isinstance(each.meta, torch.Tensor)
        )
        self.turn = Turn()
        self._observer: Observer | None = None
        self.before_capture: Callable[[], None] | None = None
        self._frozen = Frozen(frozen)
        self._overlaps = Overlaps(split.inputs)
        self._prepare(step, runnables, boundaries)

    def _prepare(self, step: Step, runnables: Sequence[Runnable], boundaries: Boundaries) -> None:
        """Work out what can be captured, once."""
        split, config = self.split, self._config
        assert config.cudagraph_mode is not None
        wanted = config.cudagraph_mode
        self._roles = {mode: Roles.of(split, mode) for mode in (FULL, PIECEWISE)}
        self._auto = AutoDispatch(split, config, wanted)
        device = capture_device(split.device, config.capture_device)
        self._never = why_never(split, wanted, device is not None)
        self.pool = None if device is None else GraphPool(device)
        if self.pool is None:
            return
        self._is_capturing = self.pool.device.is_capturing
        self._program = Program(
            split, step, runnables, boundaries, self.pool, config, self.timeline, self._frozen
        )
        check_debug(config.debug)
        static = self._roles[FULL].static
        forget = self.turn.forget
        self._bindings = Bindings(self._program, self._run_compared, forget, static)
        captured = any(piece.capture for piece in split.pieces)
        self._has_pieces = captured and wanted.has_mode(PIECEWISE)
        support, inputs = full_support(split), split.inputs
        self._admission = Admission(
            config, support, self._roles, self._auto, inputs, self._bindings, self._ledger
        )

    # -------------------------------------------------------------- a call

    def __call__(self, *inputs: Any) -> Any:
        """Run one step: replay it, capture it, or run it plain.

        Args:
            *inputs: the inputs of the traced graph, as Dynamo passes them: sizes and tensors.

        Returns:
            What the graph returns. Without a forward context the caller owns it. Under one, what
            graphs made are views of their memory, valid until the next call of this compiled
            graph with the same weights. A capturing call is one execution of the step. Nothing
            synchronises.

        Raises:
            GradientError: gradients are asked for, and the model recomputes activations.
            DispatchError: the context asks for a graph without a descriptor; or ``strict``, and the
                step would run without a graph.
            AddressChangedError: under a context, an input lies elsewhere than at capture.
            HostValueChangedError: under a context, a number that the graphs hold is another one.
            CaptureError: called from inside one of its own captured steps.
            BaseException: what the step raised, unchanged.
        """
        again = self.turn.again
        if again is not None:
            result = again.step(inputs)
            if result is not ANOTHER:
                return result
        try:
            context = callers_context()
            in_region = context is None and eager_region_is_open()
            if in_region:
                context = current_forward_context()
            if context is not None and context.inputs_ready is not None:
                wait_for_inputs(context.inputs_ready, self.split.device)
            why: Fallback | None = IN_REGION
            if not in_region:
                why, result = self._with_graphs(context, inputs + self._frozen.held)
            if why is not None:
                result = self._without_graphs(why, context, inputs + self._frozen.now)
        except BaseException:
            self._ledger.failed()
            raise
        return result

    def _with_graphs(
        self, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> tuple[Fallback | None, Any]:
        """Return (None, result) of a step that ran; else (why no graph can run it, None).

        May it have a graph? Then :meth:`_in_turn`, again while another thread captures.
        """
        if self._needs_grad(inputs):
            return GRADIENTS, None
        if self._never is not None:
            return self._never, None
        if self._is_capturing():
            return INSIDE_CAPTURE, None
        turn = self.turn
        turn.refuse_inside()
        mode = self._auto.mode if context is None else self._admission.mode_for(context)
        if isinstance(mode, Fallback):
            return mode, None
        result = self._in_turn(mode, context, inputs)
        if result[0] is not None and result[0].reason is Reason.CAPTURE_BUSY:
            return retry_while_busy(partial(self._in_turn, mode, context, inputs), result)
        return result

    def _in_turn(
        self, mode: CUDAGraphMode, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> tuple[Fallback | None, Any]:
        """As :meth:`_find`, while no other thread runs a step."""
        turn = self.turn
        with turn.lock:
            turn.owner = get_ident()
            try:
                return self._find(mode, context, inputs)
            finally:
                turn.owner = 0

    def _find(
        self, mode: CUDAGraphMode, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> tuple[Fallback | None, Any]:
        """Is there a graph? Look for the recording of the step, for the weights of this call."""
        if context is None:
            key, written = self._auto.key(inputs), self._auto.written
        else:
            key, written = self._admission.key(mode, context, inputs), ()
        name, binding = self._bindings.find(inputs, written)
        recording = None if binding is None else binding.recordings.get(key)
        if binding is not None and isinstance(recording, Recording) and not recording.void:
            if not recording.chained or not recording.follows(inputs):
                return self._replay(binding, recording, context, inputs)
            why = self._dropped(binding, key, recording, inputs)
            if why is not None:
                return why, None
        elif isinstance(recording, Fallback):
            return recording, None
        elif binding is not None and recording is not None:
            del binding.recordings[key]  # its graphs have been cleared
            self.turn.forget()
        if binding is None:
            binding = self._bindings.add(name, inputs)
        return self._first(binding, key, mode, context, inputs)

    def _replay(
        self,
        binding: Binding,
        recording: Recording,
        context: ForwardContext | None,
        inputs: tuple[Any, ...],
    ) -> tuple[Fallback | None, Any]:
        """Are the inputs those of the capture? Then replay the step, and count it."""
        real = None
        if context is not None:
            real = context.num_unpadded_tokens
            try:
                recording.check(inputs)
            except GuardError as error:
                if self._config.on_input_change != "eager":
                    raise
                return Fallback(Reason.INPUT_CHANGED, str(error).splitlines()[0]), None
        overlap = recording.overlap(inputs)
        if overlap is not None:
            return overlap, None
        if self._observer is not None:
            result = self._observer(self._program, recording, inputs, real)
            self._ledger.replayed()
            return None, result
        result = recording.replay(inputs, real)
        again = self._config.on_input_change == "raise" and not recording.chained
        again = again and not self._config.debug
        if again and context is not None and recording.batch.mode is context.cudagraph_runtime_mode:
            self.turn.again = self._again(binding, recording, inputs)
        self._ledger.replayed()
        return None, result

    def _first(
        self,
        binding: Binding,
        key: Hashable,
        mode: CUDAGraphMode,
        context: ForwardContext | None,
        inputs: tuple[Any, ...],
    ) -> tuple[Fallback | None, Any]:
        """There is none. Capture the step, or return why this call does not."""
        descriptor = None if context is None else context.batch_descriptor
        descriptor = self._auto.descriptor(inputs) if descriptor is None else descriptor
        copies = context is None or self._config.on_input_change == "copy"
        batch = Batch(mode, descriptor, own_context=context is None, copies=copies)
        why = self._admission.why_not_now(binding, key, batch, inputs)
        if why is not None:
            return why, None
        if context is not None:
            self._admission.check_rows(descriptor, inputs)
        if not binding.captured:
            written = self._auto.written if context is None else ()
            self._bindings.hold(binding, inputs, written)
        return self._capture(binding, key, batch, inputs)

    def _capture(
        self, binding: Binding, key: Hashable, batch: Batch, inputs: tuple[Any, ...]
    ) -> tuple[Fallback | None, Any]:
        """Run and record a step; where a FULL graph is refused, as a PIECEWISE one."""
        if self.before_capture is not None:
            self.before_capture()
            self.before_capture = None
        self._bindings.reap()
        roles, weights = self._roles[batch.mode], binding.starts
        owner = self._bindings.owner(binding, batch.own_context)
        self._program.pool.follow_stream()  # a recording copies inputs into shared blocks
        recording = Recording(self._program, roles, batch, inputs, weights, owner)
        overlap = self._overlaps.why(inputs) or recording.overlap(inputs)
        overlap = overlap or recording.own_memory(inputs, partial(self._bindings.keeps, binding))
        overlap = overlap or recording.passing(
            inputs, partial(self._bindings.is_plain_result, binding)
        )
        if overlap is not None:
            return overlap, None
        if self._config.debug:
            recording.expire(inputs)
        outcome = record(self._program, binding.wrappers, binding.full, recording, inputs)
        if outcome.recording is not None:
            binding.recordings[key] = outcome.recording
            self._ledger.captured()
            return None, outcome.result
        assert outcome.why is not None
        if outcome.why.reason is Reason.CAPTURE_FAILED:
            if batch.mode is FULL and self._has_pieces:
                return self._capture_pieces(outcome.why, binding, key, batch, inputs)
            binding.recordings[key] = outcome.why
        if not outcome.ran:
            return outcome.why, None
        self._ledger.plain(outcome.why)
        return None, outcome.result

    def _capture_pieces(
        self, why: Fallback, binding: Binding, key: Hashable, batch: Batch, inputs: tuple[Any, ...]
    ) -> tuple[Fallback | None, Any]:
        """After a FULL capture that failed before anything ran: the same step, piece by piece."""
        self._ledger.degraded(why)
        if batch.own_context:
            written = self._auto.written
            self._auto.use(PIECEWISE)
            if self._auto.written != written:
                return why, None  # another binding; its first call is still to come
            key = self._auto.key(inputs)
        return self._capture(binding, key, replace(batch, mode=PIECEWISE), inputs)

    def _without_graphs(
        self, why: Fallback, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> Any:
        """Run the step plain, and count why."""
        if why.reason is Reason.EAGER_REGION and self._needs_grad(inputs):
            why = GRADIENTS
        if why.reason is Reason.GRADIENTS and self.split.recomputes:
            raise GradientError.recomputes()
        overlap = self._overlaps.why(inputs)
        why = overlap or why
        if self._config.strict and why.reason not in EXPECTED:
            raise DispatchError.strict(
                what="the compiled step", reason=why.reason.value, detail=why.detail
            )
        uncompiled = overlap is not None or why.reason in (Reason.GRADIENTS, Reason.EAGER_REGION)
        run = self._run_compared if why.reason is Reason.WARMING else self._run
        run = self._run_differentiable if uncompiled else run
        if context is None and why.reason is not Reason.INSIDE_CAPTURE:
            with override_forward_context(ForwardContext.synthetic(NONE, None)):
                result = run(*inputs)
            self._auto.growth.remember(result)
        else:
            result = run(*inputs)
        self._ledger.plain(why)
        if context is not None and self.pool is not None:
            self._bindings.ran_plain(inputs, result)
        return self._frozen.put_back(result)

    # -------------------------------------------------------------- what a call uses

    def _needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return compat.has_tangent(inputs)
        needed = any(inputs[position].requires_grad for position in self._may_require_grad)
        needed = needed or any(constant.requires_grad for constant in self._constants)
        return needed or compat.has_tangent(inputs)

    def _dropped(
        self, binding: Binding, key: Hashable, recording: Recording, inputs: tuple[Any, ...]
    ) -> Fallback | None:
        """Drop a step that reads a result of other weights, where that result lies elsewhere now.

        As after those weights were replaced, and their step was captured again.

        Returns:
            Why the step is kept, and runs plain; None if it was dropped.
        """
        path = recording.path(recording.chained[0][0])
        if not recording.reads_results(inputs):
            detail = f"{path} was a result of other weights at capture, and is not now"
            return Fallback(Reason.INPUT_CHANGED, detail)
        if binding.dropped[key] >= _MOST_DROPPED:
            detail = f"{path} was captured at {_MOST_DROPPED} addresses, and lies elsewhere"
            return Fallback(Reason.INPUT_CHANGED, detail)
        self._bindings.drop(binding, key)
        self.turn.forget()
        return None

    def _again(self, binding: Binding, recording: Recording, inputs: tuple[Any, ...]) -> Again:
        """What recognises a step that has just been replayed."""
        again = self.turn.agains.get(recording)
        if again is None or again.names["epoch"] is not self.turn.epoch:
            others = self._bindings.others(binding, inputs)
            pool, failed = self._program.pool, self._ledger.failed
            again = Again(self.turn, recording, others, self._frozen.held, pool, failed)
            self.turn.agains[recording] = again
        return again

    # -------------------------------------------------------------- what a user may ask

    def freeze(self, tensors: tuple[torch.Tensor, ...], held: tuple[torch.Tensor, ...]) -> None:
        """From now on, calls leave out the last inputs: they are always these tensors.

        Args:
            tensors: as the model has them; gradients need them.
            held: the same memory, for all else.
        """
        self._frozen.bind(tensors, held)
        if self.split.differentiable:
            self._constants += tensors

    @property
    def counters(self) -> Counters:
        """What the calls did so far; ``print(graph.counters)`` shows it."""
        again = self.turn.replays
        return self._ledger.counters + Counters(calls=again, replays=again)

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """The sets of weights that were seen, each with what was recorded for it."""
        return () if self.pool is None else tuple(self._bindings)

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """The recorded steps. Another thread may capture meanwhile."""
        found = (each for binding in self.bindings for each in [*binding.recordings.values()])
        return tuple(each for each in found if isinstance(each, Recording))

    def close_capture(self) -> None:
        """Capture nothing any more; what has no graph runs plain, or raises if ``strict``."""
        if self.pool is not None:
            self._admission.closed = True

    def observe(self, observer: Observer | None) -> None:
        """Let ``observer`` run each recorded step, in place of its replay; None: no more."""
        self.turn.refuse_inside()
        with self.turn.lock:
            self.turn.forget()
            self._observer = observer

    def invalidate(self, reason: str) -> None:
        """Drop all graphs because something that they hold is not so any more.

        Args:
            reason: what has changed; for the log.
        """
        log.info("graphs dropped: %s", reason)
        self._release()

    def release(self) -> None:
        """Free all graphs and their memory. Later calls warm up and capture again."""
        self._release()
        if self.pool is not None:
            self._admission.closed = False

    def _release(self) -> None:
        self.turn.refuse_inside()
        with releasing(), self.turn.lock:
            self.turn.forget()
            if self.pool is not None:
                self.pool.device.synchronize()  # a replay may still run, on whatever stream
                self._bindings.clear()
                self._auto.reset()
                self.pool.release()
