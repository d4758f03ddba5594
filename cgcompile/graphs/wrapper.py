"""What a wrapper keeps of a capture: :class:`CUDAGraphEntry`; and how it captures.

:class:`CUDAGraphWrapper`: one callable, one captured graph for each batch descriptor.

Wrap a module or function, set a forward context around the call, and the wrapper captures the first
call of each descriptor and replays the later ones. It stores no inputs: the caller writes into the
same buffers at every step, and a call with others is an error. The entry that ``torch.compile``
returns is built from these wrappers and does the copying; use one directly for a plain module.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import (
    BatchDescriptor,
    ForwardContext,
    callers_context,
    current_forward_context,
    eager_region_is_open,
)
from cgcompile.errors import CaptureBusyError, CaptureError, DispatchError, GuardError
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import (
    IN_REGION,
    SameStorages,
    capture,
    capture_allowed,
    capture_postponed,
    captured_elsewhere,
    inside_capture,
    releasing,
    retry_while_busy,
    weight_name,
    weights_of,
)
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.device import DeviceGraph, capture_device
from cgcompile.graphs.fields import FieldsGuard, Rebinding
from cgcompile.graphs.guards import ArgumentGuard, Transparent, WeightsGuard, modules_of
from cgcompile.graphs.outputs import Passed, ReusedResult, flatten, is_record, is_reusable, rebuilt
from cgcompile.graphs.pool import LENT, GraphPool
from cgcompile.graphs.profiling import OBSERVERS, run_observed
from cgcompile.graphs.sequence import GraphSegment, GraphSequence, StepObserver
from cgcompile.graphs.stale import check_debug
from cgcompile.graphs.timeline import Timeline
from cgcompile.locks import new_lock
from cgcompile.reasons import EXPECTED, Counters, Fallback, Reason
from cgcompile.settings import checked_but, require_callable, require_fields
from cgcompile.torch_compat import is_profiling


@dataclass(frozen=True)
class CUDAGraphOptions:
    """How a wrapper captures.

    Attributes:
        debug_log_enable: log each capture (level INFO; DEBUG where False).
        gc_disable: do not collect garbage before a capture. Collecting costs 30 ms and more, and
            gives the memory of dead tensors back; whoever captures many graphs does it once.
            Automatic collection is off inside of every capture, whatever is set here.
        weak_ref_output: let the outputs of a capture go when the caller drops them, so that later
            captures of the pool use their memory. False keeps the memory of each descriptor's
            outputs for itself, so that they outlive the replays of other descriptors.
        debug_breaks: find tensors that an eager break makes and leaves for captured ops to read,
            instead of returning them. Slow; for breakable wrappers.
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True
    debug_breaks: bool = False

    def __post_init__(self) -> None:
        require_fields(self)


class Whole:
    """A step of a manager around its model, as a callable.

    Args:
        model: what the step runs; returned by ``unwrap``, for what looks at its fields.
        step: runs it.
    """

    compares_weights = True  # the manager does

    def __init__(self, model: Any, step: Callable[..., Any]) -> None:
        self._model = model
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)

    def unwrap(self) -> Any:
        """Return the model."""
        return self._model


@dataclass(frozen=True, eq=False)
class CUDAGraphEntry:
    """What one descriptor captured.

    Attributes:
        batch_descriptor: the key.
        sequence: what was recorded; ``sequence.replay()`` runs it, ``sequence.stats`` counts that.
        output: where a replay leaves its results: tensors in pool memory, valid until another graph
            of the pool runs; and memory from outside of the pool, held here. Not to be changed.
        guard: what the arguments must be; None where others see to that.
        weights: what the parameters and buffers must be; None likewise.
        needs_grad: whether gradients would be due if grad mode were on.
        passed: what of the result the step was given; None where nobody asks for :meth:`result`.
        fields: what the fields of objects among the arguments must be; None without such objects.
    """

    batch_descriptor: BatchDescriptor
    sequence: GraphSequence
    output: Any
    guard: ArgumentGuard | None
    weights: WeightsGuard | None
    needs_grad: bool
    passed: Passed | None = None
    fields: FieldsGuard | None = None

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> None:
        """Compare arguments and weights with those of the capture.

        Raises:
            AddressChangedError: a tensor lies elsewhere.
            HostValueChangedError: another value, layout or structure.
        """
        if self.guard is not None:
            self.guard.check(args, kwargs, what, self.batch_descriptor)
        if self.fields is not None:
            self.fields.check(what, self.batch_descriptor)
        if self.weights is not None:
            self.weights.check(what, self.batch_descriptor)

    @cached_property
    def _reused(self) -> ReusedResult:
        return ReusedResult(self.output, self.passed)

    def result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a replay returns: :attr:`output`, in objects that a caller may change.

        An argument that the step returned is that of this call, and a tensor of the module is that
        tensor itself.

        Raises:
            AddressChangedError: a caller let the memory of an earlier result grow.
        """
        return self._reused.get(args, kwargs)

    def serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether :meth:`check` raises nothing."""
        try:
            self.check(args, kwargs, "")
        except GuardError:
            return False
        return True

    @property
    def graph(self) -> DeviceGraph:
        """The recording of a step that is one graph."""
        (segment,) = self.sequence.segments
        assert isinstance(segment, GraphSegment)
        return segment.graph


@dataclass(frozen=True, eq=False)
class Captured:
    """A capture that has just been made.

    Attributes:
        pool: whose graphs it has.
        entry: what later calls replay.
        result: what the captured call returned; tensors that hold nothing before :meth:`run`.
        starts: where the memory of each leaf of the result begins; 0 for what has none.
        executed: whether it has been executed on the way.
        refused: why it must not be replayed; None if it may be.
    """

    pool: GraphPool
    entry: CUDAGraphEntry
    result: Any
    starts: list[int]
    executed: bool
    refused: CaptureError | None = None

    def run(self) -> Any:
        """Execute what was captured, on the current stream, if that is still to be done.

        Returns:
            The result, computed: tensors that keep their memory while they live.
        """
        if not self.executed:
            self.pool.follow_stream()
            sequence = self.entry.sequence
            if is_profiling() or OBSERVERS.get():
                run_observed(sequence, sequence.steps)
            else:
                self.entry.graph.replay()
        return self.result


class KeptOutput(NamedTuple):
    """What an entry keeps of the result of a capture.

    Attributes:
        output: the result; weakly what the pool holds, if so asked. No plain tensor is one that
            the caller gets, who may change it.
        starts: where the memory of each leaf begins; 0 for what has none.
    """

    output: Any
    starts: list[int]

    @classmethod
    def of(cls, result: Any, pool: GraphPool, weakly: bool) -> "KeptOutput":
        starts: list[int] = []
        known: dict[tuple[int, int], torch.UntypedStorage | None] = {}  # by address and bytes

        def kept(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                if is_record(leaf):
                    return rebuilt(leaf, [kept(each) for each in flatten(leaf)[0]])
                starts.append(0)
                return leaf
            storage = leaf.untyped_storage()
            nbytes = storage.nbytes()
            start = storage.data_ptr() if nbytes else 0
            starts.append(start)
            place = (start, nbytes)
            if place not in known:  # results that share memory are kept as such
                if not pool.holds(start):
                    known[place] = None
                elif weakly:
                    known[place] = compat.weak_storage(start, nbytes, leaf.device)
                else:
                    known[place] = storage
            own = known[place]
            if own is not None:
                return compat.laid_over(own, leaf)
            return compat.alias(leaf) if is_reusable(leaf) else leaf

        with compat.outside_inference_mode(), compat.below_autograd():  # once for all
            return cls(compat.tree_map(kept, result), starts)


def devices_of(runnable: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.device]:
    """Where the tensors of a call and of a module are; the CPU only if all are there."""
    found = compat.tree_tensors((args, kwargs))
    if isinstance(runnable, torch.nn.Module):
        found += _weights(runnable)
    devices = dict.fromkeys(tensor.device for tensor in found)
    return [each for each in devices if each.type != "cpu"] or [torch.device("cpu")]


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, then all buffers, at a third of the cost of torch's own walk."""
    modules = _modules(module)
    tables = [each._parameters for each in modules] + [each._buffers for each in modules]
    return [weight for table in tables for weight in table.values() if weight is not None]


def _modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and all in it, each once, at a tenth of the cost of torch's own walk."""
    found, seen = [module], {module}
    for each in found:  # grows meanwhile
        for inner in each._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def gradients_due(needed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a result must be differentiable, backward or forward."""
    if not torch.is_grad_enabled():
        return compat.has_tangent((args, kwargs))
    needed = needed or any(leaf.requires_grad for leaf in compat.tree_tensors((args, kwargs)))
    return needed or compat.has_tangent((args, kwargs))


def holds_parameters_with_grad(runnable: Any) -> bool:
    """Whether a parameter of a module, or of those that something else holds, requires grad."""
    unwrap = getattr(runnable, "unwrap", None)
    roots = modules_of(unwrap() if callable(unwrap) else runnable)
    tables = [each._parameters for root in roots for each in _modules(root)]
    return any([w.requires_grad for table in tables for w in table.values() if w is not None])


# ---------------------------------------------------------------- preconditions of a graph

# What must hold before a step may replay or capture, whatever its inputs. Wrappers, compiled
# graphs, managers and encoders take the reasons, their order and their texts from here.

GRADIENTS = Fallback(
    Reason.GRADIENTS, "an input, a weight or a result requires grad, or has a tangent"
)
_NO_CONTEXT = Fallback(Reason.NO_CONTEXT, "no forward context")
_MODE_NONE = Fallback(Reason.MODE_NONE, "the forward context has runtime mode NONE")
INSIDE_CAPTURE = Fallback(Reason.INSIDE_CAPTURE, "called inside of a capture")
_BULK_CAPTURE = Fallback(Reason.WARMING, "a bulk capture runs all batches plain first")
_CAPTURE_BUSY = Fallback(Reason.CAPTURE_BUSY, "another thread is capturing")


def why_not_here(gradients: bool = False) -> Fallback | None:
    """Return why no graph may run at this point of the program, in whatever context to be set."""
    if eager_region_is_open():
        return IN_REGION
    if gradients:
        return GRADIENTS
    return INSIDE_CAPTURE if inside_capture() else None


def why_not_in(
    context: ForwardContext | None, modes: Collection[CUDAGraphMode], what: str
) -> Fallback | None:
    """Return why no graph of ``modes`` may run in a caller's forward context; None if one may.

    Raises:
        DispatchError: the context has one of the modes, and no batch descriptor.
    """
    if context is None:
        return IN_REGION if eager_region_is_open() else _NO_CONTEXT
    mode = context.cudagraph_runtime_mode
    if mode is CUDAGraphMode.NONE:
        return _MODE_NONE
    if mode not in modes:
        names = " and ".join(sorted({served.name for served in modes} - {"NONE"}))
        return Fallback(
            Reason.OTHER_MODE, f"the forward context has mode {mode.name}; graphs are for {names}"
        )
    if inside_capture():
        return INSIDE_CAPTURE
    if context.batch_descriptor is None:
        raise DispatchError.no_descriptor(what=what, mode=mode.name)
    return None


def why_never_captured(closed: bool, descriptor: BatchDescriptor) -> Fallback | None:
    """Return why a step without a graph gets none; None if it may get one, now or later."""
    if not closed and capture_allowed():
        return None
    detail = f"no graph for {descriptor}, and capture is closed"
    return Fallback(Reason.CAPTURE_FORBIDDEN, detail)


def why_not_captured_yet(warming: Fallback | None = None) -> Fallback | None:
    """Return why a step is captured by a later call; ``warming``: it has not warmed up itself."""
    if capture_postponed():
        return _BULK_CAPTURE
    return warming or (_CAPTURE_BUSY if captured_elsewhere() else None)


log = logging.getLogger(__name__)

_MOST_REFUSALS = 2  # captures of a batch; the first may meet what the first step makes
_TOO_MANY_FIELDS = "an argument has too many fields to compare before each replay"


def _why_not(error: CaptureError) -> Fallback:
    """Return why a step is to run plain; raise ``error`` where a part of the step may have run."""
    text = str(error).splitlines()[0]
    if isinstance(error, CaptureBusyError) and not error.same_thread:
        return Fallback(Reason.CAPTURE_BUSY, text)
    if not error.field:
        raise error
    return Fallback(Reason.CAPTURE_FAILED, text)


class CUDAGraphWrapper(Transparent):
    """A callable that is captured once per batch descriptor and replayed after.

    Without a forward context, with another runtime mode in it, or inside of any capture, a call
    runs ``runnable``. Attributes that the wrapper has not are those of ``runnable``; a copy or a
    pickle of a wrapper has no graphs.

    Tensors and plain values among the arguments are compared before each replay, and so are the
    fields of objects among them; an object that cannot be opened (of a C extension, a function)
    must be the same one. A step that rebinds a tensor in a field of the module, of an argument or
    of what is around a function runs plain, with a reason, and so does one that changes a number or
    another plain value that is an attribute of a module itself.

    Args:
        runnable: what to capture; tensors in and out, nested in lists, tuples and dicts at will.
        config: ``strict`` and ``capture_device`` are read; environment and defaults if left out.
        runtime_mode: the mode that this wrapper serves: PIECEWISE or FULL.
        cudagraph_options: how to capture.
        pool: memory shared with other wrappers; one of its own, on first use, if left out.
        name: what messages call it; made from ``runnable`` if left out.
        guarded: compare arguments, and the weights of a module, at every replay, and ask whether
            parameters need gradients; False is for whoever does so for many wrappers at once.

    Attributes:
        runnable: what is wrapped.
        runtime_mode: the mode that it serves.
        counters: what its calls did.
        timeline: its own captures, and when they were.
        closed: capture nothing any more; may be set.

    Raises:
        DispatchError: ``runtime_mode`` is not PIECEWISE or FULL.
        ConfigError: an argument is of another kind than above.
    """

    @checked_but("runnable", "runtime_mode")
    def __init__(
        self,
        runnable: Callable[..., Any],
        config: CompilationConfig | None = None,
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        cudagraph_options: CUDAGraphOptions | None = None,
        *,
        pool: GraphPool | None = None,
        name: str | None = None,
        guarded: bool = True,
    ) -> None:
        if runtime_mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            mode = getattr(runtime_mode, "name", repr(runtime_mode))
            raise DispatchError.bad_mode(where=type(self).__name__, mode=mode)
        require_callable("runnable", type(self).__name__, runnable)
        self.runnable = runnable
        self.config = CompilationConfig() if config is None else config
        self.runtime_mode = runtime_mode
        self.options = CUDAGraphOptions() if cudagraph_options is None else cudagraph_options
        self.counters, self.closed, self.timeline = Counters(), False, Timeline()
        self.name: str = name or getattr(runnable, "__name__", None) or type(runnable).__name__
        self._modes: tuple[CUDAGraphMode, ...] = (runtime_mode,)
        # Per mode and descriptor: one entry, or with on_input_change="recapture" several.
        self._entries: dict[tuple[CUDAGraphMode, BatchDescriptor], list[CUDAGraphEntry]] = {}
        self._refused: dict[tuple[CUDAGraphMode, BatchDescriptor], list[str]] = {}
        self._grads: set[BatchDescriptor] = set()  # their outputs require grad, in grad mode
        self._lock = new_lock()
        self._shares_pool = pool is not None
        self._pool, self._guarded = pool, guarded
        self._debug = self.config.debug and guarded
        check_debug(self._debug)
        if pool is not None:
            pool.add_user(self)

    # -------------------------------------------------------------- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay, as the forward context says.

        Returns:
            What ``runnable`` returns. Of a capture or a replay, tensors are views of pool memory,
            valid until another graph of the pool runs; clone what must live longer. A capturing
            call is one execution: what it returns is computed. Nothing synchronises.

        Raises:
            DispatchError: the context asks for this mode and has no descriptor; or ``strict``.
            AddressChangedError: an input lies elsewhere than when it was captured.
            HostValueChangedError: an input has another value, layout or structure.
            BaseException: what ``runnable`` raised, unchanged; no graph is kept then.
        """
        with self._lock:
            self.counters.calls += 1
        try:
            return self._dispatch(callers_context(), args, kwargs)
        except BaseException:
            with self._lock:
                self.counters.failures += 1
            raise

    def _dispatch(
        self, context: ForwardContext | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        present = current_forward_context() if context is None else context
        if present is not None and present.inputs_ready is not None:
            wait_for_inputs(present.inputs_ready, None if self._pool is None else self._pool.where)
        mode = CUDAGraphMode.NONE if context is None else context.cudagraph_runtime_mode
        descriptor = None if context is None else context.batch_descriptor
        if descriptor is None or mode not in self._modes or inside_capture():
            why = why_not_in(context, self._modes, self.name)
            assert why is not None
            return self._plain(why, args, kwargs)
        why, result = self._with_graphs(mode, descriptor, args, kwargs)
        if why is not None and why.reason is Reason.CAPTURE_BUSY:
            attempt = partial(self._with_graphs, mode, descriptor, args, kwargs)
            why, result = retry_while_busy(attempt, (why, result))
        return result if why is None else self._plain(why, args, kwargs)

    def _with_graphs(
        self,
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Fallback | None, Any]:
        """(None, result) of a step that ran; else (why it is to run plain, None)."""
        with self._lock:
            entries = self._entries.get((mode, descriptor))
            if not entries:
                return self._first(mode, descriptor, args, kwargs)
            if gradients_due(entries[0].needs_grad, args, kwargs):
                return GRADIENTS, None
            try:
                entries[0].check(args, kwargs, self.name)
            except GuardError as error:
                return self._changed(error, mode, entries, args, kwargs)
            return None, self._replay(entries[0], args, kwargs)

    def _changed(
        self,
        error: GuardError,
        mode: CUDAGraphMode,
        entries: list[CUDAGraphEntry],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Fallback | None, Any]:
        """The input is not that of the entry that served last."""
        chosen = self.config.on_input_change
        if chosen == "eager":
            return Fallback(Reason.INPUT_CHANGED, str(error).splitlines()[0]), None
        if chosen != "recapture":
            raise error
        for place, entry in enumerate(entries):
            if entry.serves(args, kwargs):
                entries.insert(0, entries.pop(place))
                return None, self._replay(entry, args, kwargs)
        most = self.config.max_captured_shapes
        if len(self.entries) >= most:
            detail = f"{most} steps are captured (max_captured_shapes); on_input_change"
            return Fallback(Reason.TOO_MANY_SHAPES, detail), None
        return self._first(mode, entries[0].batch_descriptor, args, kwargs)

    def _first(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Fallback | None, Any]:
        why = why_never_captured(self.closed, descriptor) or why_not_captured_yet()
        if why is not None:
            return why, None
        devices = devices_of(self.runnable, args, kwargs)
        if len(devices) > 1:
            detail = f"tensors are on {', '.join(map(str, devices))}; a graph holds one device"
            return Fallback(Reason.OTHER_DEVICE, detail), None
        if self._pool is None:
            found = capture_device(devices[0], self.config.capture_device)
            if found is None:
                return Fallback(Reason.NO_DEVICE, f"tensors are on {devices[0]}"), None
            self._pool = GraphPool(found)
            self._pool.add_user(self)
        if self.config.on_input_change == "copy":
            raise DispatchError.cannot_copy(what=self.name)
        if self._pool.lends(compat.tree_tensors((args, kwargs))):
            return Fallback(Reason.UNSUPPORTED_INPUT, LENT), None
        if self._guarded:
            fields = FieldsGuard.of(args, kwargs, self._pool.device.tensor_type)
            if fields is not None and not fields.complete:
                return Fallback(Reason.UNSUPPORTED_INPUT, _TOO_MANY_FIELDS), None
        refusals = self._refused.get((mode, descriptor), [])
        if len(refusals) >= _MOST_REFUSALS:
            return Fallback(Reason.CAPTURE_FAILED, refusals[-1]), None
        needs_grad = holds_parameters_with_grad(self.runnable) or descriptor in self._grads
        if gradients_due(needs_grad, args, kwargs):
            return GRADIENTS, None
        return self._capture(mode, descriptor, args, kwargs)

    def _capture(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Fallback | None, Any]:
        """Capture and run the step; it runs plain where a graph cannot repeat it."""
        assert self._pool is not None
        if self._debug:
            self._expire(descriptor, args, kwargs)
        with self.timeline.capture(self._pool, self.name, mode, descriptor) as outcome:
            try:
                captured = self.record(descriptor, args, kwargs, wait=False)
            except CaptureError as error:
                why, captured = _why_not(error), None
            else:
                why = GRADIENTS
            if captured is not None and captured.refused is not None:
                why = Fallback(Reason.CAPTURE_FAILED, str(captured.refused).splitlines()[0])
            elif captured is not None:
                result = captured.run()
                self.keep(captured.entry, mode)
                self.counters.captures += 1
                outcome.done(captured.entry.sequence)
                if self._debug:
                    result = self._tracked(captured.entry, result, args, kwargs)
                return None, result
            outcome.why = why.detail
        if why.reason is Reason.GRADIENTS:
            self._grads.add(descriptor)
        elif why.reason is Reason.CAPTURE_FAILED:
            self._refused.setdefault((mode, descriptor), []).append(why.detail)
        if captured is None:
            return why, None
        return None, self._ran_plain(why, captured.result)

    def record(
        self,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: str = "",
        storages: SameStorages | None = None,
        wait: bool = True,
    ) -> "Captured | None":
        """Capture ``runnable`` for a descriptor (``shown`` as text), without executing anything.

        It must not replace the memory of ``storages``; by default of all that is reachable.
        ``wait`` a few seconds for the capture of another thread.

        Returns:
            What has been captured, to be run once and then kept with :meth:`keep`; None if an
            output requires grad.

        Raises:
            CaptureBusyError: another capture runs.
            CaptureError: ``runnable`` rebinds a field or replaces such memory; both are restored.
            BaseException: what ``runnable`` raised, unchanged.
        """
        pool = self._pool
        assert pool is not None, "a wrapper captures into a pool"
        shown = shown or str(descriptor)
        rebinding = Rebinding(self.unwrap(), args, kwargs) if self._guarded else None
        with pool.device.around() if compat.holds_compiled_code(self.runnable) else nullcontext():
            try:
                graph, result = capture(
                    partial(self.runnable, *args, **kwargs),
                    pool,
                    self._log_capture(shown),
                    collect=not self.options.gc_disable,
                    storages=storages or self._storages(args, kwargs, rebinding),
                    compiled=self._may_run_compiled_code,
                    wait=wait,
                )
            except BaseException:
                if rebinding is not None:
                    rebinding.put_back(tensors_alone=True)  # which hold nothing
                raise
        if rebinding is not None:
            error = rebinding.error(self.name)
            if error is not None:
                rebinding.put_back()
                raise error
        sequence = GraphSequence((GraphSegment(self.name, graph),), pool=pool)
        return self._captured(descriptor, shown, sequence, result, args, kwargs)

    @property
    def _may_run_compiled_code(self) -> bool:
        """Whether a call may reach what ``torch.compile`` made; a function may hold it anywhere."""
        if not self._guarded:  # pieces
            return False
        owner = getattr(self.runnable, "__self__", self.runnable)
        return not isinstance(owner, torch.nn.Module) or compat.holds_compiled_code(owner)

    def _storages(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rebinding: Rebinding | None
    ) -> SameStorages:
        """The memory of arguments, weights and fields, which a capture must not replace."""
        tensors = compat.tree_tensors((args, kwargs)) + weights_of(self.unwrap())
        tensors += [] if rebinding is None else rebinding.tensors
        return SameStorages(self.name, tensors, partial(weight_name, self.unwrap()))

    def _log_capture(self, shown: str) -> str:
        """What is about to be captured, in words."""
        level = logging.INFO if self.options.debug_log_enable else logging.DEBUG
        log.log(level, "capturing %s (%s)", self.name, shown)
        return f"{self.name} ({shown})"

    def _captured(
        self,
        descriptor: BatchDescriptor,
        shown: str,
        sequence: GraphSequence,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        executed: bool = False,
    ) -> Captured | None:
        assert self._pool is not None
        if gradients_due(False, (result,), {}):
            return None
        sequence.name, sequence.batch, sequence.rows = self.name, shown, descriptor.num_tokens
        sequence.prepare = self._poisoning()
        kept = KeptOutput.of(result, self._pool, self.options.weak_ref_output)
        tensor_type = self._pool.device.tensor_type
        weights = WeightsGuard(self.unwrap(), tensor_type) if self._guarded else None
        entry = CUDAGraphEntry(
            descriptor,
            sequence,
            kept.output,
            ArgumentGuard(args, kwargs, tensor_type) if self._guarded else None,
            weights,
            self._guarded and holds_parameters_with_grad(self.runnable),
            None if weights is None else Passed.of(result, args, kwargs, weights.objects),
            FieldsGuard.of(args, kwargs, self._pool.device.tensor_type) if self._guarded else None,
        )
        return Captured(self._pool, entry, result, kept.starts, executed)

    def keep(self, entry: CUDAGraphEntry, mode: CUDAGraphMode | None = None) -> None:
        """Let later calls of the entry's descriptor replay it, in the wrapper's mode or another."""
        key = (mode or self.runtime_mode, entry.batch_descriptor)
        with self._lock:
            self._entries.setdefault(key, []).insert(0, entry)

    def _poisoning(self) -> Callable[[Sequence[Any]], None] | None:
        """What poisons before each replay; it holds the pool, not the wrapper: no cycle."""
        pool = self._pool
        if not self.config.poison or pool is None:
            return None
        if self._shares_pool:
            return lambda _: pool.poison_free()
        return lambda inputs: pool.poison(compat.tree_tensors(inputs))

    def replay_entry(
        self,
        entry: CUDAGraphEntry,
        inputs: Sequence[Any] = (),
        observer: StepObserver | None = None,
    ) -> Any:
        """Replay an entry whose inputs the caller has compared, and count that as a call.

        Args:
            entry: of this wrapper.
            inputs: of the call; ``poison`` leaves them alone.
            observer: runs each step; for debugging.

        Returns:
            :attr:`CUDAGraphEntry.output`, which callers must not change.

        Raises:
            HostValueChangedError: another autocast mode than at the capture.
        """
        if entry.guard is not None:
            entry.guard.check_autocast(self.name, entry.batch_descriptor)
        entry.sequence.replay(inputs, None, observer)
        self.counters.calls += 1
        self.counters.replays += 1
        return entry.output

    def _replay(self, entry: CUDAGraphEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._debug:
            self._expire(entry.batch_descriptor, args, kwargs)
        entry.sequence.replay((args, kwargs))
        self.counters.replays += 1
        result = entry.result(args, kwargs)
        return self._tracked(entry, result, args, kwargs) if self._debug else result

    def _owner(self, descriptor: BatchDescriptor) -> Hashable:
        """Whose next replay overwrites the results of a descriptor: None for any of the pool."""
        return None if self.options.weak_ref_output else (id(self), descriptor)

    def _expire(
        self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Make results raise that the graph of a descriptor is about to overwrite."""
        assert self._pool is not None
        for owner in {None, self._owner(descriptor)}:
            self._pool.stale.expire(owner, compat.tree_tensors((args, kwargs)))

    def _tracked(
        self, entry: CUDAGraphEntry, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A result that raises once it is stale; arguments in it stay as they are."""
        assert self._pool is not None
        descriptor = entry.batch_descriptor
        given = {id(each) for each in compat.tree_tensors((args, kwargs))}
        leaves, _ = flatten(result)
        rest = [None if id(each) in given else each for each in leaves]
        what = f"{self.name}, {descriptor}"
        holds, owner = self._pool.holds, self._owner(descriptor)
        made = self._pool.stale.hand_out(rest, holds, owner, what)
        pairs = zip(leaves, made, strict=True)
        return rebuilt(result, [leaf if new is None else new for leaf, new in pairs])

    def _plain(self, why: Fallback, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_strict(why)
        return self._ran_plain(why, self.runnable(*args, **kwargs))

    def _check_strict(self, why: Fallback) -> None:
        if self.config.strict and why.reason not in EXPECTED:
            raise DispatchError.strict(what=self.name, reason=why.reason.value, detail=why.detail)

    def _ran_plain(self, why: Fallback, result: Any) -> Any:
        """Count a step that ran without a graph; with ``strict`` that is an error."""
        self._check_strict(why)
        with self._lock:
            self.counters.plain[why.reason] += 1
            self.counters.details[why.reason] = why.detail
        self.timeline.plain(why)
        return result

    # -------------------------------------------------------------- what a user may ask

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, CUDAGraphEntry]:
        """What is captured, by descriptor; read-only.

        Of a wrapper that serves two modes, PIECEWISE hides FULL; with ``on_input_change`` set to
        ``"recapture"`` this is the entry that served last.
        """
        found: dict[BatchDescriptor, CUDAGraphEntry] = {}
        for mode in reversed(self._modes):
            for (served, descriptor), entries in [*self._entries.items()]:
                if served is mode and entries:
                    found[descriptor] = entries[0]
        return MappingProxyType(found)

    @property
    def entries(self) -> tuple[CUDAGraphEntry, ...]:
        """All that is captured, of whatever mode and descriptor; others may capture meanwhile."""
        return tuple([entry for entries in [*self._entries.values()] for entry in entries])

    def entry_of(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> CUDAGraphEntry | None:
        """What serves a batch in a runtime mode; None if nothing does."""
        return next(iter(self.entries_of(mode, batch)), None)

    def entries_of(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> list[CUDAGraphEntry]:
        """All that is captured of a batch in a runtime mode, what served last first."""
        return [*self._entries.get((mode, batch), ())]

    @property
    def pool(self) -> GraphPool | None:
        """The memory of the graphs; None before the first capture, if none was given."""
        return self._pool

    def lent(self) -> Iterator[torch.Tensor]:
        """The tensors that replays return and that do not hold their memory."""
        if self._pool is not None and self.options.weak_ref_output:
            outputs = compat.tree_tensors([entry.output for entry in self.entries])
            yield from [each for each in outputs if self._pool.holds(address(each))]

    def unwrap(self) -> Callable[..., Any]:
        """The innermost callable, through wrappers in wrappers."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, CUDAGraphWrapper) else inner

    def clear_graphs(self) -> None:
        """Drop the graphs of this wrapper. The next call of a descriptor captures again."""
        with self._lock:
            self._entries.clear()
            self._refused.clear()
            if self._pool is not None:
                self._pool.generation += 1

    def drop(self, entry: CUDAGraphEntry) -> None:
        """Drop one capture, if it was kept: its step was not finished."""
        with self._lock, suppress(ValueError):
            self._entries.get((self.runtime_mode, entry.batch_descriptor), []).remove(entry)

    def clear_all_graphs(self) -> None:
        """Drop the graphs of all wrappers that share this one's pool, and the pool's memory.

        Raises:
            CaptureError: called inside of a capture.
        """
        if self._pool is None:
            return self.clear_graphs()
        with releasing():  # raises before anything is dropped
            self.clear_graphs()
            self._pool.release()

    def __getstate__(self) -> dict[str, Any]:
        names = ("runnable", "config", "_modes", "options", "name")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        modes = state["_modes"]
        mode: Any = modes[0] if len(modes) == 1 else None  # a breakable one may serve both
        type(self).__init__(
            self, state["runnable"], state["config"], mode, state["options"], name=state["name"]
        )

    def __repr__(self) -> str:
        modes = " or ".join(mode.name for mode in self._modes)
        return f"{type(self).__name__}({self.name}, {modes}, {len(self.entries)} captured)"
