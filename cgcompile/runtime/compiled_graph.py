"""What ``torch.compile`` calls at every step: :class:`CompiledGraph`, one per backend call.

A backend call is not a model: two instances of a class can share one, and one model can make
several (graph breaks, a static and then a dynamic size). A compiled graph owns the split, the
compiled pieces, the pool of its CUDA graphs and the counters. A call goes through five steps, which
are the methods of :class:`CompiledGraph` in this order:

1. ``__call__``: is it the step of the last call? Then its fast path checks and replays it.
2. ``_with_graph``: may it have a graph? Else there is a reason (gradients, mode, another capture).
3. ``_find``: is there one, for these weights? Under the lock: one thread runs a step at a time.
4. ``_replay``: are the inputs those of the capture? Then replay it; else an error, or a reason.
5. ``_capture`` it, or run it without a graph (``_run_plain``), and count that.

Each call replays, captures, runs plain, or raises. Steps 2 to 5 return ``(fallback, result)``: a
reason why the call has to run plain, or None and its result.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch

from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import (
    ForwardContext,
    callers_context,
    current_forward_context,
    eager_region_is_open,
    override_forward_context,
)
from cgcompile.counts import count
from cgcompile.errors import DispatchError, GuardError
from cgcompile.graphs.capture import Attempt, after_other_captures, prepares_graphs, releasing
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.device import any_capture, capture_device
from cgcompile.graphs.eligibility import GRADIENTS, IN_REGION, INSIDE_CAPTURE
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.results import check_debug
from cgcompile.graphs.timeline import Timeline
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.passes.split import SplitGraph
from cgcompile.pieces.cache import Compilation
from cgcompile.pieces.compilers import Runnable
from cgcompile.pieces.size_ranges import artifacts_text
from cgcompile.pieces.stitch import Step
from cgcompile.reasons import EXPECTED, Counters, Fallback, Reason
from cgcompile.runtime.dispatch import Dispatch
from cgcompile.runtime.fast_path import NOT_SERVED, FastPaths, GraphFastPath
from cgcompile.runtime.inputs import BoundTensors, Overlaps, Roles, why_never
from cgcompile.runtime.layouts import returning_traced_layouts
from cgcompile.runtime.program import (
    Program,
    copying_cpu_scalars,
    not_reading_context,
    uncompiled,
)
from cgcompile.runtime.recorder import record
from cgcompile.runtime.recording import BatchKey, Recording
from cgcompile.runtime.rows import BatchRows, unknown_rows, zeroing
from cgcompile.runtime.weight_sets import WeightSet, WeightSets
from cgcompile.torch_compat import raw_memory, torch_ops, torch_settings

log = logging.getLogger(__name__)

ReplayOverride = Callable[[Program, Recording, Sequence[Any], int | None], Any]
"""Runs a recorded step in place of its replay: (program, recording, inputs, real rows) -> result.

It leaves what one execution of the step leaves, and returns what that returns."""

OTHER_THREAD = Fallback(
    Reason.OTHER_THREAD, "results of steps under a forward context in another thread may be in use"
)

_MOST_NAMED = 4  # inputs whose shapes name a step in messages
_MOST_DROPPED = 8  # recordings of one step; after these a moved input runs plain

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def _named_inputs(split: SplitGraph) -> list[tuple[int, str]]:
    """Return (position, name) of the first inputs whose shapes name a step."""
    return [
        (position, value.source or value.name)
        for position, value in enumerate(split.inputs)
        if isinstance(value.meta, torch.Tensor) and value.meta.dim() and not value.static
    ][:_MOST_NAMED]


class CompiledGraph:
    """One traced graph: split, compiled, and captured per batch."""

    def __init__(
        self,
        split: SplitGraph,
        runnables: Sequence[Runnable],
        boundaries: Boundaries,
        config: CompilationConfig,
        compilation: Compilation,
        *,
        frozen: int = 0,  # number of last inputs that are the same objects in all calls
    ) -> None:
        assert config.cudagraph_mode is not None
        self.split = split
        self.compilation = compilation  # pieces that were compiled, loaded or shared
        # What calls did, what was captured, and when.
        self.timeline = Timeline(config.warn_fallbacks)
        step = self._step = Step(split)
        self.source = step.source  # the generated Python that runs the pieces
        self.artifacts = artifacts_text(split, runnables)
        self.fast_paths = FastPaths(self.timeline)
        self.before_capture: Callable[[], None] | None = None  # called once, before the first
        self.graph_break: str | None = None  # why Dynamo ended the graph early, and where
        self.differences: list[Fallback] = []  # why no trace of the function is padded
        self.traces: weakref.ref[Any] | None = None  # traces of the model that bind its weights
        # All graphs of its handle, with the timeline of each.
        self.of_handle: Sequence[tuple[weakref.ref[CompiledGraph], Timeline]] = ()
        self._config = config
        self._grad_mode = ""  # grad mode of the last capture
        self._replay_override: ReplayOverride | None = None
        self._frozen = BoundTensors(frozen)
        self._overlaps = Overlaps(split)
        self._rows = BatchRows(split, config.capture_dim)
        runnables = returning_traced_layouts(split, copying_cpu_scalars(split, runnables))
        runnables = self._runnables = list(map(not_reading_context, split.pieces, runnables))
        self._run = self._run_compared = step.bind(runnables)
        self._run_differentiable = step.bind(uncompiled(split))
        self._named = _named_inputs(split)
        constants = split.constants.values() if split.differentiable else ()
        self._constants = tuple(x for x in constants if isinstance(x, torch.Tensor))
        self._may_require_grad = tuple(
            position
            for position, value in enumerate(split.inputs)
            if split.differentiable and isinstance(value.meta, torch.Tensor)
        )
        self._roles = {mode: Roles.of(split, mode) for mode in (FULL, PIECEWISE)}
        self._dispatch = Dispatch(split, config, self._roles, self.timeline)
        device = capture_device(split.device, config.capture_device)
        self._never = why_never(split, config.cudagraph_mode, device is not None)
        self.pool = None if device is None else GraphPool(device)  # the memory of its graphs
        if self.pool is None:
            return
        check_debug(config.debug)
        self._is_capturing = self.pool.device.is_capturing
        more = (self.pool, config, self.timeline, self._frozen, self._rows)
        self._program = Program(split, step, runnables, boundaries, *more)
        self._run_compared = self._program.traced.comparing_step(step, runnables, self._run)
        drop, static = self.fast_paths.drop, self._roles[FULL].static
        self._weight_sets = WeightSets(self._program, self._run_compared, drop, static)

    def __repr__(self) -> str:
        counts = self.counters
        numbers = ("call", counts.calls), ("capture", counts.captures), ("replay", counts.replays)
        calls = ", ".join(count(number, noun) for noun, number in numbers)
        return f"<CompiledGraph: {count(len(self.split.pieces), 'piece')}; {calls}>"

    # -------------------------------------------------------------- the five steps of a call

    def __call__(self, *inputs: Any) -> Any:
        """Run one step: replay it, capture it, or run it plain. Nothing synchronises.

        Args:
            *inputs: the inputs of the traced graph, as Dynamo passes them: sizes and tensors.

        Returns:
            What the graph returns. Without a forward context the caller owns it. Under one, results
            of graphs are views of their memory, valid until the next call of this compiled graph
            with the same weights. A capturing call is one execution of the step.

        Raises:
            DispatchError: the context requests a graph without a descriptor; another thread has run
                steps under contexts, see :meth:`Registry.allow_threads`; or ``strict``, and the
                step would run without a graph.
            AddressChangedError: under a context, an input has moved since capture.
            HostValueChangedError: under a context, a number that is baked into graphs differs.
            CaptureError: called from inside one of its own captured steps.
            BaseException: what the step raised, unchanged.
        """
        fast_path = self.fast_paths.graph
        if fast_path is not None:
            result = fast_path.step(inputs)
            if result is not NOT_SERVED:
                return result
        try:
            context = callers_context()
            in_region = context is None and eager_region_is_open()
            if in_region:
                context = current_forward_context()
            if context is not None and context.inputs_ready is not None:
                wait_for_inputs(context.inputs_ready, self.split.device)
            fallback: Fallback | None = IN_REGION
            if not in_region:
                fallback, result = self._with_graph(context, inputs + self._frozen.held)
            if fallback is not None:
                inputs += self._frozen.for_plain_run
                result = self._run_plain(fallback, context, inputs)
        except BaseException as error:
            self._step.add_note(error)
            self.timeline.failed(error)
            raise
        return result

    def _with_graph(self, context: ForwardContext | None, inputs: tuple[Any, ...]) -> Attempt:
        """Refuse what may not have a graph; run the rest, again while another thread captures."""
        why = self.why_without(inputs)
        if why is not None:
            if why is INSIDE_CAPTURE or (why is self._never and any_capture()):
                self._refuse_replaced()
            return why, None
        self.fast_paths.refuse_inside()
        mode = self._dispatch.mode_for(context)
        if isinstance(mode, Fallback):
            return mode, None
        return after_other_captures(
            self._find(mode, context, inputs), self._find, mode, context, inputs
        )

    def _refuse_replaced(self) -> None:
        """Raise where another graph would record weights that the model no longer has."""
        traces = None if self.traces is None else self.traces()
        if traces is not None:
            traces.refuse_replaced(self)

    def _find(
        self, mode: CUDAGraphMode, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> Attempt:
        """Find the recording of the step, for the weights of this call; replay or capture it."""
        paths = self.fast_paths
        with paths.lock:
            paths.owner = get_ident()
            try:
                key = self._dispatch.key(mode, context, inputs)
                mutated = self._dispatch.mutated if context is None else ()
                name, weight_set = self._weight_sets.find(inputs, mutated)
                if weight_set is None:
                    weight_set = self._weight_sets.add(name, inputs)
                recording = weight_set.recordings.get(key)
                if isinstance(recording, Fallback):
                    return recording, None
                if recording is not None and recording.void:  # its graphs have been cleared
                    del weight_set.recordings[key]
                    paths.drop()
                elif recording is not None:
                    if not recording.from_other_weights or not recording.chain_moved(inputs):
                        return self._replay(weight_set, recording, context, inputs)
                    fallback = self._drop_moved(weight_set, key, recording, inputs)
                    if fallback is not None:
                        return fallback, None
                return self._capture_if_due(weight_set, key, mode, context, inputs)
            finally:
                paths.owner = 0

    def _replay(
        self,
        weight_set: WeightSet,
        recording: Recording,
        context: ForwardContext | None,
        inputs: tuple[Any, ...],
    ) -> Attempt:
        """Compare the inputs with those of the capture, replay the step, and count it."""
        real, policy = None, self._config.on_input_change
        try:
            if context is None:  # inputs are part of the key, or copied
                recording.sequence.check_held()
            else:
                real = context.num_unpadded_tokens
                recording.check(inputs)
        except GuardError as error:
            if policy != "eager":
                raise
            return Fallback(Reason.INPUT_CHANGED, str(error).splitlines()[0]), None
        fallback = recording.why_not_copied(inputs) or self._why_other_thread(context)
        if fallback is not None:
            return fallback, None
        if self._replay_override is not None:
            result = self._replay_override(self._program, recording, inputs, real)
            self.timeline.replayed()
            return None, result
        result = recording.replay(inputs, real)
        simple = policy == "raise" and not recording.from_other_weights and not self._config.debug
        if (
            simple
            and context is not None
            and recording.batch.mode is context.cudagraph_runtime_mode
        ):
            self.fast_paths.graph = self._fast_path(weight_set, recording, inputs)
        self.timeline.replayed()
        return None, result

    def _capture_if_due(
        self,
        weight_set: WeightSet,
        key: Hashable,
        mode: CUDAGraphMode,
        context: ForwardContext | None,
        inputs: tuple[Any, ...],
    ) -> Attempt:
        """Capture a step that is not recorded, or return why this call does not."""
        batch = self._dispatch.batch(mode, context, inputs)
        fallback = self._dispatch.why_not_now(self._weight_sets, weight_set, key, batch, inputs)
        if fallback is not None:
            if fallback.reason is Reason.CAPTURE_FORBIDDEN:
                fallback = self._naming_setting(fallback, weight_set, batch)
                fallback = self._naming_grad_mode(fallback, weight_set, key)
            return fallback, None
        fallback = self._why_other_thread(context)
        if fallback is not None:
            return fallback, None
        if context is not None:
            self._dispatch.check_rows(batch.descriptor, inputs)
        if not weight_set.captured:
            mutated = self._dispatch.mutated if context is None else ()
            self._weight_sets.hold(weight_set, inputs, mutated)
        return self._capture(weight_set, key, batch, inputs)

    def _why_other_thread(self, context: ForwardContext | None) -> Fallback | None:
        """Raise, or return a reason, where results of another thread would be overwritten."""
        assert self.pool is not None
        thread = self.pool.thread
        if thread.ident == self.fast_paths.owner:
            return None
        if context is not None:
            thread.admit("the compiled step", claim=not prepares_graphs())
            return None
        return OTHER_THREAD if thread.is_other() else None

    def _naming_setting(
        self, fallback: Fallback, weight_set: WeightSet, batch: BatchKey
    ) -> Fallback:
        """Add to a fallback the setting of torch under which the step has a graph."""
        now = torch_settings.kernel_settings()
        for recording in weight_set.recorded:
            if recording.batch == batch and recording.settings != now:
                name, before, after = torch_settings.changed_setting(recording.settings, now)
                detail = f"{fallback.detail}; it has one where {name} is {before}, now {after}"
                return fallback._replace(detail=detail)
        return fallback

    def _naming_grad_mode(
        self, fallback: Fallback, weight_set: WeightSet, key: Hashable
    ) -> Fallback:
        """Add to a fallback the other grad mode, and so the other trace, that has the graph."""
        here = raw_memory.grad_mode_name()
        for other in [graph for ref, _ in self.of_handle if (graph := ref()) is not None]:
            if other._grad_mode in ("", here) or other._named != self._named:
                continue
            same = (s for s in other.weight_sets if s.weights == weight_set.weights)
            if any(isinstance(s.recordings.get(key), Recording) for s in same):
                detail = f"it has one in {other._grad_mode}, and this call is in {here}"
                return fallback._replace(detail=f"{fallback.detail}; {detail}")
        return fallback

    def _capture(
        self, weight_set: WeightSet, key: Hashable, batch: BatchKey, inputs: tuple[Any, ...]
    ) -> Attempt:
        """Run and record a step; where a FULL graph is refused, as a PIECEWISE one."""
        if self.before_capture is not None:
            self.before_capture()
            self.before_capture = None
        sets, program = self._weight_sets, self._program
        sets.release_dropped()
        owner = sets.owner(weight_set, batch.own_context)
        program.pool.follow_stream()  # a recording copies inputs into shared blocks
        roles = self._roles[batch.mode]
        recording = Recording(program, roles, batch, inputs, weight_set.starts, owner)
        keeps = partial(sets.keeps, weight_set)
        is_plain_result = partial(sets.is_plain_result, weight_set)
        fallback = (
            self._overlaps.why(inputs)
            or recording.why_not_copied(inputs)
            or recording.why_not_bound(inputs, keeps, is_plain_result)
        )
        if fallback is not None:
            return fallback, None
        if self._config.debug:
            recording.expire(inputs)
        wrappers, full = weight_set.wrappers, weight_set.full
        fallback, ran, result = record(program, wrappers, full, recording, inputs)
        if fallback is None:
            weight_set.recordings[key] = recording
            self._grad_mode = raw_memory.grad_mode_name()
            self.timeline.captured()
            return None, result
        if fallback.reason is Reason.CAPTURE_FAILED:
            if batch.mode is FULL and self._dispatch.has_pieces:
                return self._capture_pieces(fallback, weight_set, key, batch, inputs)
            weight_set.recordings[key] = fallback
        if not ran:
            return fallback, None
        self.timeline.plain(fallback, self._shapes(inputs) if batch.own_context else "")
        return None, result

    def _capture_pieces(
        self,
        fallback: Fallback,
        weight_set: WeightSet,
        key: Hashable,
        batch: BatchKey,
        inputs: tuple[Any, ...],
    ) -> Attempt:
        """Capture the pieces of a step whose FULL capture failed before anything ran."""
        self.timeline.degraded(fallback)
        if batch.own_context:
            mutated = self._dispatch.mutated
            self._dispatch.use(PIECEWISE)
            if self._dispatch.mutated != mutated:
                return fallback, None  # another weight set; its first call is still to come
            key = self._dispatch.key(PIECEWISE, None, inputs)
        return self._capture(weight_set, key, replace(batch, mode=PIECEWISE), inputs)

    def _run_plain(
        self, fallback: Fallback, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> Any:
        """Run the step without a graph, and count why."""
        if fallback.reason is Reason.EAGER_REGION and self._needs_grad(inputs):
            fallback = GRADIENTS
        overlap = self._overlaps.why(inputs)
        fallback = overlap or fallback
        reason = fallback.reason
        if self._config.strict and reason not in EXPECTED:
            raise DispatchError.strict(what="the compiled step", why=fallback)
        run = self._run_compared if reason is Reason.WARMING else self._run
        if overlap is not None or reason in (Reason.GRADIENTS, Reason.EAGER_REGION):
            run = self._run_differentiable
        elif context is not None and reason is not Reason.INSIDE_CAPTURE:
            run = self._zeroing_rows(run, context, inputs)
        if context is None and reason is not Reason.INSIDE_CAPTURE:
            with override_forward_context(ForwardContext.synthetic(NONE, None)):
                result = run(*inputs)
            self._dispatch.growth.remember(result)
        else:
            result = run(*inputs)
        self.timeline.plain(fallback, self._shapes(inputs) if context is None else "")
        if context is not None and self.pool is not None:
            self._weight_sets.ran_plain(inputs, result)
        return self._frozen.restore(result)

    def _zeroing_rows(
        self, run: Callable[..., Any], context: ForwardContext, inputs: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Return ``run``, or a step that zeroes padding rows after eager pieces, as replays do."""
        batch, real = context.batch_descriptor, context.num_unpadded_tokens
        rows = context.num_tokens if batch is None else batch.num_tokens
        if real is None or rows is None or real >= rows:
            return run
        left = self._rows.left(rows, inputs)
        if left is None:
            self.timeline.not_zeroed(unknown_rows(rows))
            return run
        pairs = zip(self.split.pieces, self._runnables, strict=True)
        runnables = [
            zeroing(piece, plain, left.get(piece.index, ()), real) for piece, plain in pairs
        ]
        zeroed = self._step.bind(runnables)
        if run is self._run:
            return zeroed
        return self._program.traced.comparing_step(self._step, runnables, zeroed)

    def run_uncounted(self, inputs: tuple[Any, ...]) -> Any:
        """Run a step without a graph, beside the counted calls: to compare its results."""
        with override_forward_context(ForwardContext.synthetic(NONE, None)):
            return self._run(*inputs)

    # -------------------------------------------------------------- what a call uses

    @property
    def strict(self) -> bool:
        """Whether a step without a graph is an error."""
        return self._config.strict

    def why_without(self, inputs: tuple[Any, ...]) -> Fallback | None:
        """Return why no step of these inputs has a graph now, or None: gradients, mode, capture."""
        if self._needs_grad(inputs):
            return GRADIENTS
        if self._never is not None:
            return self._never
        return INSIDE_CAPTURE if self._is_capturing() else None

    def _shapes(self, inputs: tuple[Any, ...]) -> dict[str, Sequence[int]]:
        """Return the shapes of the first inputs that are not static, by name."""
        return {name: inputs[position].shape for position, name in self._named}

    def _needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return torch_ops.has_tangent(inputs)
        needed = any(inputs[position].requires_grad for position in self._may_require_grad)
        needed = needed or any(constant.requires_grad for constant in self._constants)
        return needed or torch_ops.has_tangent(inputs)

    def _drop_moved(
        self, weight_set: WeightSet, key: Hashable, recording: Recording, inputs: tuple[Any, ...]
    ) -> Fallback | None:
        """Drop a step whose input, a result of other weights, moved; else return the fallback."""
        path = recording.path(recording.from_other_weights[0][0])
        if not recording.reads_results(inputs):
            detail = f"{path} was a result of other weights at capture, and is not now"
            return Fallback(Reason.INPUT_CHANGED, detail)
        if weight_set.dropped[key] >= _MOST_DROPPED:
            detail = f"{path} was captured at {_MOST_DROPPED} addresses, and has moved again"
            return Fallback(Reason.INPUT_CHANGED, detail)
        self._weight_sets.drop_recording(weight_set, key)
        self.fast_paths.drop()
        return None

    def _fast_path(
        self, weight_set: WeightSet, recording: Recording, inputs: tuple[Any, ...]
    ) -> GraphFastPath:
        """Return the fast path of a step that has just been replayed."""
        paths = self.fast_paths
        fast_path = paths.by_recording.get(recording)
        if fast_path is None or fast_path.names["epoch"] is not paths.epoch:
            checks = self._weight_sets.checks(weight_set, inputs)
            pool, failed = self._program.pool, self.timeline.failed
            fast_path = GraphFastPath(paths, recording, checks, self._frozen.held, pool, failed)
            paths.by_recording[recording] = fast_path
        return fast_path

    # -------------------------------------------------------------- the handle

    def freeze(self, tensors: tuple[torch.Tensor, ...], held: tuple[torch.Tensor, ...]) -> None:
        """Bind the last inputs, which calls leave out; ``held`` views have the same memory."""
        self._frozen.bind(tensors, held)
        if self.split.differentiable:
            self._constants += tensors

    @property
    def counters(self) -> Counters:
        """Counts of replays, captures and plain calls so far."""
        return self.timeline.counters

    @property
    def weight_sets(self) -> tuple[WeightSet, ...]:
        return () if self.pool is None else tuple(self._weight_sets)

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """The wrappers that have graphs of a piece, or of the whole step."""
        captured = [weight_set for weight_set in self.weight_sets if weight_set.captured]
        wrappers = [one for sets in captured for one in (*sets.wrappers.values(), sets.full)]
        return tuple(wrapper for wrapper in wrappers if wrapper.entries)

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """The recorded steps."""
        return tuple(each for weight_set in self.weight_sets for each in weight_set.recorded)

    def close_capture(self) -> None:
        """Forbid captures: a step without a graph runs plain, or raises if ``strict``."""
        self._dispatch.closed = True

    def override_replay(self, override: ReplayOverride | None) -> None:
        """Let ``override`` run each recorded step in place of its replay; None ends that."""
        self.fast_paths.refuse_inside()
        with self.fast_paths.lock:
            self.fast_paths.drop()
            self._replay_override = override

    def invalidate(self, reason: str) -> None:
        """Drop all graphs because something that is baked in has changed: ``reason``, to log."""
        log.info("graphs dropped: %s", reason)
        self._release()

    def release(self) -> None:
        """Free all graphs and their memory. Later calls warm up and capture again."""
        self._release()
        self._dispatch.closed = False

    def _release(self) -> None:
        self.fast_paths.refuse_inside()
        with releasing(), self.fast_paths.lock:
            self.fast_paths.drop()
            if self.pool is not None:
                self.pool.device.synchronize()  # a replay may still run on any stream
                self._weight_sets.release()
                self._dispatch.use(self._dispatch.initial_mode)
                self.pool.release()
