"""What ``torch.compile`` calls at every step: :class:`CompiledGraph`, one per backend call.

A backend call is not a model: two instances of a class can share one, and one model can make
several (graph breaks, a static and then a dynamic size). A compiled graph owns the split, the
compiled pieces, the pool of its CUDA graphs and the counters. A call first tries the fast path of
the last step, which checks and replays it. Else :meth:`cgcompile.graphs.steps.StepTable.run`
decides, in this order, and the methods of :class:`_GraphCall` are its parts:

1. ``enter``: may it have a graph? Else there is a reason (gradients, mode, another capture).
2. ``find``: is there one, for these weights? Under the lock: one thread runs a step at a time.
3. ``compare``: are the inputs those of the capture? Then ``replay``; else an error, or a reason.
4. ``check_due``, ``check_fit``: may it be captured now? Then ``record``.
5. ``plain``: run it without a graph, for the reason that is counted.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import ForwardContext, override_forward_context
from cgcompile.counts import count
from cgcompile.descriptor import BatchDescriptor
from cgcompile.graphs.capture import releasing
from cgcompile.graphs.device import any_capture, capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.results import check_debug
from cgcompile.graphs.steps import GRADIENTS, INSIDE_CAPTURE, Call, StepTable
from cgcompile.graphs.timeline import Timeline
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.passes.split import SplitGraph
from cgcompile.pieces.cache import Compilation
from cgcompile.pieces.compilers import Runnable, artifacts_text
from cgcompile.pieces.stitch import Step
from cgcompile.reasons import Counters, Fallback, Reason, RunPlain
from cgcompile.runtime.dispatch import Dispatch
from cgcompile.runtime.fast_path import NOT_SERVED, FastPaths, GraphFastPath
from cgcompile.runtime.inputs import BoundTensors, Overlaps, Roles, why_never
from cgcompile.runtime.program import (
    BatchRows,
    Program,
    copying_cpu_scalars,
    not_reading_context,
    returning_traced_layouts,
    uncompiled,
    zeroing,
)
from cgcompile.runtime.recorder import record
from cgcompile.runtime.recording import BatchKey, Recording
from cgcompile.runtime.weight_sets import WeightSet, WeightSets
from cgcompile.torch_compat import raw_memory, torch_ops, torch_settings

log = logging.getLogger(__name__)

ReplayOverride = Callable[[Program, Recording, Sequence[Any], int | None], Any]
"""Runs a recorded step in place of its replay: (program, recording, inputs, real rows) -> result.

It leaves what one execution of the step leaves, and returns what that returns."""

_MOST_NAMED = 4  # inputs whose shapes name a step in messages
_MOST_DROPPED = 8  # most recordings of one step; then calls with a moved input run plain

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
        frozen: int = 0,  # how many of the last inputs are the same objects in all calls
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
        self.differences: list[str] = []  # why no trace of the function is padded
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
        device = capture_device(split.device, config.capture_device)
        self._never = why_never(split, config.cudagraph_mode, device is not None)
        self.pool = None if device is None else GraphPool(device)  # the memory of its graphs
        steps = self._step_table = StepTable("the compiled step", config, self.timeline, self.pool)
        steps.running = self.fast_paths
        if steps.on_change == "recapture":
            steps.on_change = "raise"  # the keys of steps have the addresses of inputs
        self._dispatch = Dispatch(split, config, self._roles, steps)
        if self.pool is None:
            return
        check_debug("stale" in config.debug)
        self._is_capturing = self.pool.device.is_capturing
        more = (self.pool, config, self.timeline, self._frozen, self._rows)
        self._program = Program(split, step, runnables, boundaries, *more)
        self._run_compared = self._program.traced.comparing_step(step, runnables, self._run)
        drop, static = self.fast_paths.drop, self._roles[FULL].static
        self._weight_sets = WeightSets(self._program, drop, static)

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
                steps under contexts, see :meth:`Registry.allow_threads`; or
                ``on_fallback="raise"``, and the step would run without a graph.
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
            return self._step_table.run(_GraphCall(self, inputs))
        except BaseException as error:
            self._step.add_note(error)
            raise

    # -------------------------------------------------------------- what a call uses

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
            self.timeline.not_zeroed(rows)
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
        """Run a step without a graph and without counting it, to compare its results."""
        with override_forward_context(ForwardContext.synthetic(NONE, None)):
            return self._run(*inputs)

    def degrade(self, why: Fallback, what: str) -> None:
        """Count a call that takes a lesser mode than was requested; with ``strict`` raise."""
        self._step_table.degrade(why, what)

    def why_without(self, inputs: tuple[Any, ...]) -> Fallback | None:
        """Return why no step of these inputs has a graph now, or None: gradients, mode, capture."""
        if self._needs_grad(inputs):
            return GRADIENTS
        if self._never is not None:
            return self._never
        return INSIDE_CAPTURE if self._is_capturing() else None

    def _needs_grad(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return torch_ops.has_tangent(inputs)
        needed = any(inputs[position].requires_grad for position in self._may_require_grad)
        needed = needed or any(constant.requires_grad for constant in self._constants)
        return needed or torch_ops.has_tangent(inputs)

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
        self._step_table.closed = True

    def override_replay(self, override: ReplayOverride | None) -> None:
        """Let ``override`` run each recorded step in place of its replay; None ends that."""
        self.fast_paths.refuse_inside()
        with self.fast_paths.lock:
            self.fast_paths.drop()
            self._replay_override = override

    def invalidate(self, reason: str) -> None:
        """Drop all graphs because a baked-in value has changed; ``reason`` is logged."""
        log.info("graphs dropped: %s", reason)
        self._release()

    def release(self) -> None:
        """Free all graphs and their memory. Later calls warm up and capture again."""
        self._release()
        self._step_table.closed = False

    def _release(self) -> None:
        self.fast_paths.refuse_inside()
        with releasing(), self.fast_paths.lock:
            self.fast_paths.drop()
            if self.pool is not None:
                self.pool.device.synchronize()  # a replay may still run on any stream
                self._weight_sets.release()
                self._dispatch.use(self._dispatch.initial_mode)
                self.pool.release()


class _GraphCall(Call[Recording]):
    """A call of a compiled graph; without a forward context its sizes make a descriptor."""

    __slots__ = ("_graph", "_inputs", "_mode", "_overlaps", "_passed", "_weight_set")

    def __init__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> None:
        self._graph, self._passed = graph, inputs
        self._inputs = inputs + graph._frozen.held

    @property
    def owns_result(self) -> bool:  # type: ignore[override]
        return self.context is None

    def enter(self) -> None:
        graph = self._graph
        why = graph.why_without(self._inputs)
        if why is not None:
            if why is INSIDE_CAPTURE or (why is graph._never and any_capture()):
                # Another graph would record weights that the model no longer has.
                traces = None if graph.traces is None else graph.traces()
                if traces is not None:
                    traces.refuse_replaced(graph)
            raise RunPlain(why)
        graph.fast_paths.refuse_inside()
        self._mode = graph._dispatch.mode_for(self.context)

    def find(self) -> list[Recording] | None:
        graph, context, inputs = self._graph, self.context, self._inputs
        key = self.key = graph._dispatch.key(self._mode, context, inputs)
        mutated = graph._dispatch.mutated if context is None else ()
        name, weight_set = graph._weight_sets.find(inputs, mutated)
        if weight_set is None:
            weight_set = graph._weight_sets.add(name, inputs)
        self._weight_set, self.steps = weight_set, weight_set.steps
        for recording in weight_set.steps.captured.get(key, ()):
            if recording.void:  # its graphs have been cleared
                del weight_set.steps.captured[key]
                graph.fast_paths.drop()
            elif recording.from_other_weights and recording.chain_moved(inputs):
                self._drop_moved(recording)
        return self.steps.captured.get(key)

    def _drop_moved(self, recording: Recording) -> None:
        """Drop a step whose input, a result of other weights, moved, unless it moves too often."""
        graph, weight_set, key = self._graph, self._weight_set, self.key
        path = recording.path(recording.from_other_weights[0][0])
        if not recording.reads_results(self._inputs):
            detail = f"{path} was a result of other weights at capture, and is not now"
            raise RunPlain(Fallback(Reason.INPUT_CHANGED, detail))
        if weight_set.dropped[key] >= _MOST_DROPPED:
            detail = f"{path} was captured at {_MOST_DROPPED} addresses, and has moved again"
            raise RunPlain(Fallback(Reason.INPUT_CHANGED, detail))
        graph._weight_sets.drop_recording(weight_set, key)
        graph.fast_paths.drop()

    def compare(self, step: Recording) -> None:
        if self.context is None:  # inputs are part of the key, or copied
            step.sequence.check_held()
        else:
            step.check(self._inputs)
        step.check_copies(self._inputs)

    def replay(self, step: Recording) -> Any:
        graph, context, inputs = self._graph, self.context, self._inputs
        real = None if context is None else context.num_unpadded_tokens
        if graph._replay_override is not None:
            return graph._replay_override(graph._program, step, inputs, real)
        result = step.replay(inputs, real)
        config = graph._config
        simple = config.on_input_change == "raise" and not step.from_other_weights
        if (
            simple
            and "stale" not in config.debug
            and context is not None
            and step.batch.mode is context.cudagraph_runtime_mode
        ):
            graph.fast_paths.graph = graph._fast_path(self._weight_set, step, inputs)
        return result

    # -------------------------------------------------------------- capture

    @property
    def batch(self) -> BatchKey:
        """The batch of the step; without a context, from its concrete sizes."""
        return self._graph._dispatch.batch(self._mode, self.context, self._inputs)

    @property
    def descriptor(self) -> BatchDescriptor:  # type: ignore[override]
        return self.batch.descriptor

    def check_due(self) -> None:
        graph = self._graph
        more = self.key, self.batch, self._inputs
        graph._dispatch.check_due(graph._weight_sets, self._weight_set, *more)

    def check_fit(self) -> None:
        if self.context is not None:
            self._graph._dispatch.check_rows(self.descriptor, self._inputs)

    def record(self) -> tuple[Recording, Any]:
        """Run and record the step; where a FULL graph is refused, as a PIECEWISE one."""
        graph, weight_set, batch = self._graph, self._weight_set, self.batch
        mutated = graph._dispatch.mutated if self.context is None else ()
        if not weight_set.captured:
            graph._weight_sets.hold(weight_set, self._inputs, mutated)
        try:
            return self._record(batch)
        except RunPlain as refusal:
            why = refusal.why
            if why.reason is not Reason.CAPTURE_FAILED or batch.mode is not FULL:
                raise
            if not graph._dispatch.has_pieces:
                raise
        graph.timeline.degraded(why)
        if batch.own_context:
            graph._dispatch.use(PIECEWISE)
            if graph._dispatch.mutated != mutated:
                raise RunPlain(why)  # another weight set; its first call is still to come
            self.key = graph._dispatch.key(PIECEWISE, None, self._inputs)
        return self._record(replace(batch, mode=PIECEWISE))

    def _record(self, batch: BatchKey) -> tuple[Recording, Any]:
        graph, weight_set, inputs = self._graph, self._weight_set, self._inputs
        if graph.before_capture is not None:
            graph.before_capture()
            graph.before_capture = None
        sets, program = graph._weight_sets, graph._program
        sets.release_dropped()
        owner = sets.owner(weight_set, batch.own_context)
        program.pool.follow_stream()  # a recording copies inputs into shared blocks
        roles = graph._roles[batch.mode]
        recording = Recording(program, roles, batch, inputs, weight_set.static, owner)
        graph._overlaps.check(inputs)
        recording.check_copies(inputs)
        recording.check_bound(
            inputs, partial(sets.keeps, weight_set), partial(sets.is_plain_result, weight_set)
        )
        if "stale" in graph._config.debug:
            recording.expire(inputs)
        result = record(program, weight_set.wrappers, weight_set.full, recording, inputs)
        graph._grad_mode = raw_memory.grad_mode_name()
        return recording, result

    # -------------------------------------------------------------- without a graph

    def explain(self, why: Fallback) -> Fallback:
        graph = self._graph
        if why.reason is Reason.CAPTURE_FORBIDDEN:
            why = why._replace(detail="; ".join([why.detail, *self._captured_otherwise()]))
        inputs = self._passed + graph._frozen.for_plain_run
        if why.reason is Reason.EAGER_REGION and graph._needs_grad(inputs):
            why = GRADIENTS
        self._overlaps = False
        try:
            graph._overlaps.check(inputs)
        except RunPlain as refusal:
            self._overlaps, why = True, refusal.why
        return why

    def _captured_otherwise(self) -> Iterator[str]:
        """Yield the settings of torch, and the grad mode, under which the step has a graph."""
        now, batch = torch_settings.kernel_settings(), self.batch
        for recording in self._weight_set.recorded:
            if recording.batch == batch and recording.settings != now:
                name, before, after = torch_settings.changed_setting(recording.settings, now)
                yield f"it has one where {name} is {before}, now {after}"
                break
        here, graph = raw_memory.grad_mode_name(), self._graph
        for other in [known for ref, _ in graph.of_handle if (known := ref()) is not None]:
            if other._grad_mode in ("", here) or other._named != graph._named:
                continue  # each grad mode has its own trace
            same = (s for s in other.weight_sets if s.weights == self._weight_set.weights)
            if any(s.steps.captured.get(self.key) for s in same):
                yield f"it has one in {other._grad_mode}, and this call is in {here}"
                break

    def plain(self, why: Fallback) -> Any:
        graph, context, reason = self._graph, self.context, why.reason
        inputs = self._passed + graph._frozen.for_plain_run
        run = graph._run_compared if reason is Reason.WARMING else graph._run
        if self._overlaps or reason in (Reason.GRADIENTS, Reason.EAGER_REGION):
            run = graph._run_differentiable
        elif context is not None and reason is not Reason.INSIDE_CAPTURE:
            run = graph._zeroing_rows(run, context, inputs)
        elif reason is Reason.INSIDE_CAPTURE and graph.pool is not None:
            run = graph._program.run_in_capture
        if context is None and reason is not Reason.INSIDE_CAPTURE:
            with override_forward_context(ForwardContext.synthetic(NONE, None)):
                result = run(*inputs)
            graph._dispatch.growth.remember(result)
        else:
            result = run(*inputs)
        if context is not None and graph.pool is not None:
            graph._weight_sets.ran_plain(inputs, result)
        return graph._frozen.restore(result)

    def count(self, timeline: Timeline, why: Fallback) -> None:
        if self.context is not None:
            return timeline.plain(why)
        graph, inputs = self._graph, self._passed + self._graph._frozen.for_plain_run
        timeline.plain(why, {name: inputs[position].shape for position, name in graph._named})
