""":class:`CUDAGraphWrapper`: one callable, one captured graph for each batch descriptor.

Wrap a module or function, set a forward context around the call, and the wrapper captures the first
call of each descriptor and replays the later ones. It stores no inputs: the caller writes into the
same buffers at every step, and a call with others is an error. The entry that ``torch.compile``
returns is built from these wrappers and does the copying; use one directly for a plain module.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any
from weakref import WeakMethod

import torch

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import (
    BatchDescriptor,
    ForwardContext,
    callers_context,
    context_of_capture,
)
from cgcompile.errors import (
    CaptureBusyError,
    CaptureError,
    DispatchError,
    GradientError,
)
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import (
    SameStorages,
    TouchedMemory,
    capture,
    capture_lock,
    holder_here,
    is_comparable,
    releasing,
    weight_name,
    weights_of,
    who_captures_here,
)
from cgcompile.graphs.contract import Contract
from cgcompile.graphs.device import DeviceGraph, capture_device, no_device
from cgcompile.graphs.fields import Fields, Rebinding
from cgcompile.graphs.guards import CallForm, Weights, read_arguments
from cgcompile.graphs.pool import RESULT_AS_INPUT, GraphPool
from cgcompile.graphs.reads import Transparent, read_context
from cgcompile.graphs.results import (
    Results,
    Track,
    check_debug,
    kept_output,
    results_of_call,
    track_result,
)
from cgcompile.graphs.sequence import GraphSegment, GraphSequence, SegmentRunner
from cgcompile.graphs.state import LoadedNames, ModelState, RanCode, StateContract
from cgcompile.graphs.steps import (
    GRADIENTS,
    INSIDE_CAPTURE,
    Call,
    Steps,
    StepTable,
    check_context,
)
from cgcompile.graphs.timeline import Timeline
from cgcompile.reasons import Counters, Fallback, Reason, RunPlain
from cgcompile.settings import checked_but, require_callable, require_fields
from cgcompile.torch_compat import raw_memory, torch_ops

log = logging.getLogger(__name__)

_MAX_REFUSALS = 2  # captures of a batch; the first may meet what the first step creates

Key = tuple[CUDAGraphMode, BatchDescriptor]


@dataclass(frozen=True)
class CUDAGraphOptions:
    """How a wrapper captures.

    Attributes:
        debug_log_enable: log each capture (level INFO; DEBUG where False).
        gc_disable: do not collect young garbage before a capture. Collecting it takes some
            milliseconds, and gives the memory of results that the program has dropped back to the
            pool; a bulk capture does it once. Automatic collection is off inside of every capture
            in any case.
        weak_ref_output: release the outputs of a capture when the caller drops them, so that later
            captures of the pool use their memory. False keeps the memory of each descriptor's
            outputs for itself, so that they outlive the replays of other descriptors.
        debug_breaks: find tensors that an eager break creates and leaves for captured ops to read,
            instead of returning them. Slow; for breakable wrappers.

    Example:
        >>> options = cgcompile.CUDAGraphOptions(gc_disable=True)
        >>> step = cgcompile.CUDAGraphWrapper(nn.Linear(8, 8), cudagraph_options=options)
        >>> step.counters.captures  # none before the first call
        0
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True
    debug_breaks: bool = False

    def __post_init__(self) -> None:
        require_fields(self)


class ManagedStep:
    """A step of a manager around its model, as a callable; ``unwrap`` returns the model."""

    def __init__(self, model: Any, step: Callable[..., Any], also_read: Any) -> None:
        self._model = model
        self._also_read = also_read  # by the step, beside the model; the walker follows attributes
        self._step = WeakMethod(step)  # a method: its owner holds the wrapper of this

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step()
        assert step is not None
        return step(*args, **kwargs)

    def unwrap(self) -> Any:
        return self._model


# ---------------------------------------------------------------- what a capture leaves


@dataclass(frozen=True, eq=False)
class CUDAGraphEntry:
    """What one descriptor captured.

    Attributes:
        batch_descriptor: the key.
        sequence: the recording; ``sequence.replay()`` runs it, ``sequence.replays`` counts that.
        output: where a replay leaves its results: tensors in pool memory, valid until another graph
            of the pool runs; and memory from outside of the pool, held here. Not to be changed.
        form: compares how arguments are passed; None where the owner of the wrapper does.
        guard: compares the arguments, and the fields of objects among them; None where the
            owner of the wrapper does.
        weights: its parameters and buffers; None where the owner of the wrapper compares them.
        needs_grad: whether gradients would be due if grad mode were on.
        reused: makes the result of each replay; None where the owner of the wrapper does.
        context: compares the tensors of the forward context; None if the capture did not read it.
        state: compares the weights, and what Python code read of the model; None where the owner of
            the wrapper does.

    Example:
        >>> step = cgcompile.CUDAGraphWrapper(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> context = cgcompile.set_forward_context(
        ...     cudagraph_runtime_mode="FULL", batch_descriptor=cgcompile.BatchDescriptor(4)
        ... )
        >>> with torch.inference_mode(), context:
        ...     for _ in range(3):
        ...         y = step(x)
        >>> [entry.batch_descriptor.num_tokens for entry in step.entries]
        [4]
    """

    batch_descriptor: BatchDescriptor
    sequence: GraphSequence
    output: Any
    form: CallForm | None = None
    guard: Contract | None = None
    weights: Weights | None = None
    needs_grad: bool = False
    reused: Results | None = None
    context: Contract | None = None
    state: StateContract | Contract | None = None

    def check_managed(self, what: str, context: Any = None) -> None:
        """Compare all but arguments and weights; ``context`` has the metadata, if there are any.

        Raises:
            AddressChangedError: a tensor of the metadata has another address, or one was dropped.
            HostValueChangedError: another setting of torch, or another value.
        """
        if self.form is not None:
            self.form.check_settings(what, self.batch_descriptor)
        if self.context is not None and context is not None:
            self.context.check(what, self.batch_descriptor, context)
        if self.state is not None:
            self.state.check(what, self.batch_descriptor)
        self.sequence.check_held()

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> None:
        """Compare arguments of the form of the capture, and weights, with those of the capture.

        Raises:
            AddressChangedError: a tensor has another address, or was dropped.
            HostValueChangedError: another value, layout or structure.
        """
        if self.form is not None:
            self.form.check_settings(what, self.batch_descriptor)
        if self.guard is not None:
            self.guard.check(what, self.batch_descriptor, args, kwargs)
        if self.context is not None:
            self.context.check(what, self.batch_descriptor, callers_context())
        if self.state is not None:
            self.state.check(what, self.batch_descriptor)
        self.sequence.check_held()

    def result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return :attr:`output` of a replay, in objects that a caller may change.

        An argument that the step returned is that of this call, and a tensor of the module is that
        tensor itself.

        Raises:
            AddressChangedError: a caller let the memory of an earlier result grow.
        """
        results = self.reused or results_of_call(self.output)
        return results.make((), results.inputs_of(args, kwargs) if results.positions else ())

    @property
    def graph(self) -> DeviceGraph:
        """The recording of a step that is one graph."""
        (segment,) = self.sequence.segments
        assert isinstance(segment, GraphSegment)
        return segment.graph


@dataclass(frozen=True, eq=False)
class Captured:
    """A capture that has just ended."""

    entry: CUDAGraphEntry  # what later calls replay
    result: Any  # of the captured call; its tensors hold nothing before :meth:`run`
    starts: list[int]  # where the memory of each leaf of the result begins; 0 for what has none
    executed: bool  # during the capture
    refused: CaptureError | None = None  # why it must not be replayed

    def run(self) -> Any:
        """Execute the step on the current stream, unless the capture did; return the result."""
        if not self.executed:
            self.entry.sequence.run_once()
        return self.result


def is_recording() -> bool:
    """Return whether this thread captures, and is in no eager break."""
    return bool(getattr(who_captures_here(), "is_recording", True))


def _under(mode: AbstractContextManager[Any], step: Callable[[], Any]) -> Any:
    with mode:
        return step()


def _storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the memory of dense tensors."""
    return [tensor.untyped_storage() for tensor in tensors if raw_memory.is_plain_tensor(tensor)]


# ---------------------------------------------------------------- what a call needs


def devices_of(runnable: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.device]:
    """Return the devices of the tensors of a call and of a module; the CPU only if it is alone."""
    tensors = torch_ops.tree_tensors((args, kwargs))
    if isinstance(runnable, torch.nn.Module):
        tensors += weights_of(runnable)
    if not tensors:  # they are inside of objects, or around the function
        tensors = Fields({"runnable": runnable, "args": args, "kwargs": kwargs}).tensors
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return [device for device in devices if device.type != "cpu"] or [torch.device("cpu")]


def gradients_due(needed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a result must be differentiable, backward or forward."""
    if not torch.is_grad_enabled():
        return torch_ops.has_tangent((args, kwargs))
    needed = needed or any(leaf.requires_grad for leaf in torch_ops.tree_tensors((args, kwargs)))
    return needed or torch_ops.has_tangent((args, kwargs))


def holds_parameters_with_grad(runnable: Any) -> bool:
    """Return whether a weight of a module, or of those that something else holds, requires grad."""
    unwrap = getattr(runnable, "unwrap", None)
    weights = weights_of(unwrap() if callable(unwrap) else runnable)
    return any([weight.requires_grad for weight in weights])


def requires_grad_beside(
    tensors: Iterable[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether one of ``tensors`` requires grad and is no argument of a call."""
    with_grad = {id(tensor) for tensor in tensors if tensor.requires_grad}
    return bool(with_grad) and not with_grad <= set(map(id, torch_ops.tree_tensors((args, kwargs))))


class WrapperCall(Call[CUDAGraphEntry]):
    """A call of a wrapper, under the mode and the descriptor of its forward context."""

    __slots__ = ("_args", "_compared", "_kwargs", "_wrapper")

    def __init__(
        self, wrapper: "CUDAGraphWrapper", args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._wrapper, self._args, self._kwargs = wrapper, args, kwargs
        self.steps = wrapper.captured_steps

    def enter(self) -> None:
        wrapper, context = self._wrapper, self.context
        check_context(context, wrapper._modes, wrapper.name)
        assert context is not None
        assert context.batch_descriptor is not None
        self.descriptor = context.batch_descriptor
        self.key = context.cudagraph_runtime_mode, self.descriptor

    def check_gradients(self, step: CUDAGraphEntry) -> None:
        """Raise RunPlain where the result has to be differentiable."""
        needs_grad = step.needs_grad
        if torch.is_grad_enabled() and step.weights is not None:
            needs_grad = needs_grad or step.weights.requires_grad
        if gradients_due(needs_grad, self._args, self._kwargs):
            raise RunPlain(GRADIENTS)

    def compare(self, step: CUDAGraphEntry) -> None:
        args, kwargs, form = self._args, self._kwargs, step.form
        self.check_gradients(step)
        if form is not None and not form.has_form(args, kwargs):
            args, kwargs = form.in_form(self._wrapper.unwrap(), args, kwargs)
            form.check_form(args, kwargs, self._wrapper.name, step.batch_descriptor)
        step.check(args, kwargs, self._wrapper.name)
        self._compared = args, kwargs  # passed as at the capture

    def replay(self, step: CUDAGraphEntry) -> Any:
        args, kwargs = self._compared
        result = step.result(args, kwargs)  # first: raises where a graph would write freed memory
        step.sequence.replay(self._compared)
        return result

    def check_fit(self) -> None:
        wrapper, args, kwargs = self._wrapper, self._args, self._kwargs
        wrapper._check_fit(args, kwargs)
        needs_grad = holds_parameters_with_grad(wrapper.runnable)
        needs_grad = needs_grad or self.descriptor in wrapper._grads
        if gradients_due(needs_grad, args, kwargs):
            raise RunPlain(GRADIENTS)

    def record(self) -> tuple[CUDAGraphEntry, Any]:
        wrapper, descriptor = self._wrapper, self.descriptor
        pool, timeline = wrapper.pool, wrapper.timeline
        assert pool is not None
        with timeline.record_capture(pool, wrapper.name, self.key[0], descriptor) as ended:
            try:
                captured = wrapper.record(descriptor, self._args, self._kwargs, wait=False)
            except RunPlain:
                wrapper._grads.add(descriptor)
                raise
            except CaptureError as error:
                busy = isinstance(error, CaptureBusyError) and not error.same_thread
                if not (busy or error.field):
                    raise  # a part of the step may have run
                reason = Reason.CAPTURE_BUSY if busy else Reason.CAPTURE_FAILED
                raise RunPlain(Fallback(reason, str(error).splitlines()[0])) from None
            if captured.refused is not None:
                detail = str(captured.refused).splitlines()[0]
                raise RunPlain(Fallback(Reason.CAPTURE_FAILED, detail), captured.result)
            result = captured.run()
            ended(captured.entry.sequence)
            if wrapper.step_table.debug:
                arguments = torch_ops.tree_tensors((self._args, self._kwargs))
                result = track_result(result, wrapper._track(descriptor), arguments)
            return captured.entry, result

    def plain(self, why: Fallback) -> Any:
        return self._wrapper.runnable(*self._args, **self._kwargs)

    def expire(self) -> None:
        pool = self._wrapper.pool
        assert pool is not None
        for owner in {None, self._wrapper._owner(self.descriptor)}:
            pool.stale.expire(owner, torch_ops.tree_tensors((self._args, self._kwargs)))


class ManagedCall(WrapperCall):
    """A step of a manager: its arguments are buffers of the manager, which are not compared."""

    __slots__ = ("metadata", "ran_plain")

    def __init__(
        self,
        wrapper: "CUDAGraphWrapper",
        descriptor: BatchDescriptor,
        arguments: dict[str, Any],
        metadata: Any = None,  # to be compared with that of the capture, as a forward context
    ) -> None:
        self._wrapper, self._args, self._kwargs = wrapper, (), arguments
        self.steps, self.metadata = wrapper.captured_steps, metadata
        self.descriptor, self.key = descriptor, (CUDAGraphMode.FULL, descriptor)
        self.ran_plain: Fallback | None = None  # why it, or a part of it, has run without a graph

    def enter(self) -> None:
        # A capture by the program itself is refused where buffers are filled.
        if capture_lock.holder is not None and holder_here() is not None:
            raise RunPlain(INSIDE_CAPTURE)

    def compare(self, step: CUDAGraphEntry) -> None:
        if torch.is_grad_enabled():
            self.check_gradients(step)
        step.check_managed(self._wrapper.name, self.metadata)

    def replay(self, step: CUDAGraphEntry) -> Any:
        step.sequence.replay()
        return step.output

    def count(self, timeline: Timeline, why: Fallback) -> None:
        self.ran_plain = why
        timeline.plain(why, self.descriptor)


class CUDAGraphWrapper(Transparent):
    """Capture a callable as one CUDA graph per batch descriptor, and replay it.

    Each call reads the forward context, and does one of these:

    1. It calls ``runnable``, if there is no context, if the context has another runtime mode, or
       inside of any capture.
    2. It captures ``runnable`` for the batch descriptor, if there is no graph for it.
    3. It compares what the capture read with the same now, and replays the graph. A difference is
       an error, or handled as ``on_input_change`` sets.

    Compared are tensors and plain values among the arguments, passed by position or by name, and
    the fields of objects among them; what the code of ``runnable`` may have read of its state
    (attributes, containers, closures, globals, hooks: ``checks``); and the settings of torch
    that choose kernels or dtypes (``sdpa_kernel``, autocast, ...). A dataclass among the arguments
    may be another one with equal fields; any other object must be the same one.

    A step runs plain, with a reason, if it rebinds a tensor in a field of the module, of an
    argument or of what is around a function, or if it changes a number or another plain value that
    is an attribute of a module itself. Attributes that the wrapper does not have are read from
    ``runnable``. A copy or a pickle of a wrapper has no graphs.

    Args:
        runnable: what to capture; tensors in and out, nested in lists, tuples and dicts at will.
        config: ``on_fallback``, ``capture_device`` and others; left out: environment and defaults.
        runtime_mode: the mode that this wrapper serves: PIECEWISE or FULL.
        cudagraph_options: how to capture.
        pool: memory shared with other wrappers; one of its own, on first use, if left out.
        name: for messages; taken from ``runnable`` if left out.
        guarded: compare arguments, and the weights of a module, at every replay, and check whether
            parameters need gradients; False where the owner of many wrappers does so at once.

    Attributes:
        runnable: what is wrapped.
        runtime_mode: the mode that it serves.
        timeline: its own captures, and when they were.
        closed: capture nothing any more; may be set.
        returns_views: whether callers read results in memory of the pool after a step; may be set.

    Raises:
        DispatchError: ``runtime_mode`` is not PIECEWISE or FULL.
        ConfigError: an argument is of another kind than above.

    Example:
        >>> step = cgcompile.CUDAGraphWrapper(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> context = cgcompile.set_forward_context(
        ...     cudagraph_runtime_mode="FULL", batch_descriptor=cgcompile.BatchDescriptor(4)
        ... )
        >>> with torch.inference_mode(), context:
        ...     for _ in range(3):
        ...         y = step(x)
        >>> step.counters.captures, step.counters.replays
        (1, 2)
    """

    _executes = False  # whether :meth:`_record_step` runs the step as well

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
        self.timeline = Timeline(self.config.warn_fallbacks)
        self.remedy = "clear_graphs()"  # what drops its graphs, in messages; its owner may set it
        self.generators: Sequence[torch.Generator] = ()  # of steps, beside the default one
        self.notes_memory = False  # of a piece: its ops may touch memory beside its arguments
        self.name: str = name or getattr(runnable, "__name__", None) or type(runnable).__name__
        self._modes: tuple[CUDAGraphMode, ...] = (runtime_mode,)
        self._state: ModelState | None = None  # of the model, once a step was captured
        self._grads: set[BatchDescriptor] = set()  # their outputs require grad, in grad mode
        self._shares_pool = pool is not None
        self._pool, self._guarded = pool, guarded
        steps = self.step_table = StepTable(self.name, self.config, self.timeline, pool)
        self.captured_steps = Steps[Key, CUDAGraphEntry](_MAX_REFUSALS)
        steps.debug = "stale" in self.config.debug and guarded
        check_debug(steps.debug)
        if pool is not None:
            pool.add_user(self)

    # -------------------------------------------------------------- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay, depending on the forward context.

        Returns:
            What ``runnable`` returns. Of a capture or a replay, tensors are views of pool memory,
            valid until another graph of the pool runs; clone what must live longer. A capturing
            call is one execution: its result is computed. Nothing synchronises.

        Raises:
            DispatchError: the context has this mode and no descriptor; another thread has run
                steps, see :meth:`allow_threads`; or ``on_fallback="raise"``.
            AddressChangedError: an input has another address than at the capture.
            HostValueChangedError: an input has another value, layout or structure.
            BaseException: what ``runnable`` raised, unchanged; no graph is kept then.
        """
        return self.step_table.run(WrapperCall(self, args, kwargs))

    def _check_fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that a step with these inputs can be captured; create the pool on first use."""
        devices = devices_of(self.runnable, args, kwargs)
        if len(devices) > 1:
            detail = f"tensors are on {', '.join(map(str, devices))}; a graph holds one device"
            raise RunPlain(Fallback(Reason.OTHER_DEVICE, detail))
        if self._pool is None:
            device = capture_device(devices[0], self.config.capture_device)
            if device is None:
                raise RunPlain(no_device(devices[0]))
            self._pool = GraphPool(device)
            self._pool.thread = self.step_table.thread
            self._pool.add_user(self)
            self.step_table.device = self._pool.where
        if self.config.on_input_change == "copy":
            raise DispatchError.cannot_copy(what=self.name)
        if self._pool.aliases_results(torch_ops.tree_tensors((args, kwargs))):
            raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, RESULT_AS_INPUT))
        if self._guarded:
            try:
                read_arguments(args, kwargs, self._pool.device.tensor_type)
            except CaptureError as error:
                why = Fallback(Reason.UNSUPPORTED_INPUT, str(error).splitlines()[0])
                raise RunPlain(why) from None

    # -------------------------------------------------------------- record

    def record(
        self,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        storages: SameStorages | None = None,
        wait: bool = True,
        shown: str = "",  # the text of the descriptor, if the caller has it
    ) -> Captured:
        """Capture ``runnable`` for a descriptor; raise RunPlain if gradients are due.

        It must not rebind fields, nor replace the memory of ``storages``, by default of all that is
        reachable: both are restored. Run the result once, then :meth:`keep` its entry.
        """
        assert self._pool is not None, "a wrapper captures into a pool"
        shown = shown or str(descriptor)
        self._log("capturing %s (%s)", self.name, shown)
        rebinding = Rebinding(self.unwrap(), args, kwargs) if self._guarded else None
        fields = [] if rebinding is None else rebinding.tensors
        reads_grad = requires_grad_beside(fields, args, kwargs)
        due = Fallback(Reason.GRADIENTS, f"a result of {self.name} requires grad")
        if reads_grad and torch.is_grad_enabled() and self._executes:
            raise RunPlain(due)  # its ops skip autograd: a result would not show it
        own = cache(partial(weights_of, self.unwrap()))  # read once
        if storages is None:
            storages = self._storages([*torch_ops.tree_tensors((args, kwargs)), *fields, *own()])
        self._read_state()
        ran = RanCode(is_recording)
        step = partial(self.runnable, *args, **kwargs)
        step = partial(_under, ran, step) if self._reads_more else step
        with context_of_capture() if self._reads_more else nullcontext() as context:
            sequence, result, refused = self._record_step(step, shown, rebinding, storages, wait)
        if gradients_due(False, (result,), {}):
            if self._executes:
                raise GradientError.of_a_capture(what=self.name)
            raise RunPlain(due)
        sequence.name, sequence.batch, sequence.rows = self.name, shown, descriptor.num_tokens
        sequence.prepare = self._poisoning()
        touched = {row.address for row in sequence.held}
        read = self._hold(sequence, args, kwargs, context, ran, own)
        output, starts = kept_output(result, self._pool, self.options.weak_ref_output)
        tensor_type = self._pool.device.tensor_type
        if not self._guarded:
            entry = CUDAGraphEntry(descriptor, sequence, output, context=read)
        else:
            weights, state = self._contract(ran, touched)
            track = self._track(descriptor) if self.step_table.debug else None
            reads_grad &= not torch.is_grad_enabled()  # where the result has shown it
            entry = CUDAGraphEntry(
                descriptor,
                sequence,
                output,
                CallForm(args, kwargs),
                read_arguments(args, kwargs, tensor_type),
                weights,
                reads_grad or holds_parameters_with_grad(self.runnable),
                results_of_call(output, result, args, kwargs, weights.objects, track),
                read,
                state,
            )
        return Captured(entry, result, starts, self._executes, refused)

    def _log(self, text: str, *values: object) -> None:
        log.log(logging.INFO if self.options.debug_log_enable else logging.DEBUG, text, *values)

    def _storages(self, tensors: list[torch.Tensor]) -> SameStorages:
        """Return what restores the memory of tensors."""
        name_of = partial(weight_name, self.unwrap())
        return SameStorages(self.name, filter(is_comparable, tensors), name_of)

    def _compared(self, check: str) -> Any:
        """Return the model that is compared: that of a manager, if its ``checks`` name it."""
        runnable = self.unwrap()
        if not isinstance(runnable, ManagedStep):
            return runnable
        model = runnable.unwrap() if check in self.config.checks else None
        return model.unwrap() if isinstance(model, Transparent) else model

    def _read_state(self) -> None:
        """Read the state of the model before a capture."""
        if not (self._guarded and "state" in self.config.checks):
            return
        if self._state is None:
            self._state = ModelState(self._compared("state"))
        self._state.begin()

    def _contract(
        self, ran: RanCode, touched: set[int]
    ) -> tuple[Weights, StateContract | Contract]:
        """Return the weights after a capture, and the contract of them and of the state."""
        assert self._pool is not None
        read = partial(Weights, self._compared("weights"), self._pool.device.tensor_type)
        state = self._state
        contract = None if state is None else state.contract(ran, touched, self.remedy, read)
        if contract is not None:
            return contract.weights, contract
        weights = read()
        return weights, weights.contract(self.remedy)

    def _hold(
        self,
        sequence: GraphSequence,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ForwardContext | None,
        ran: RanCode,
        own: Callable[[], list[torch.Tensor]],
    ) -> Contract | None:
        """Let the sequence hold the memory that it touched, but for that of arguments.

        Returns:
            The contract of the forward context, if that is to be compared.
        """
        assert self._pool is not None
        checks, metadata = "metadata" in self.config.checks, None
        if context is not None and (context.was_read or not checks):
            loads = LoadedNames(ran.codes).names.__contains__
            metadata = read_context(context, self._pool.device.tensor_type, loads)
        if sequence.held:
            # Before a replay, the addresses of arguments are compared with those of the capture.
            identity = raw_memory.storage_identity
            arguments = {identity(x) for x in _storages_of(torch_ops.tree_tensors((args, kwargs)))}
            sequence.held = [row for row in sequence.held if identity(row.storage) not in arguments]
            compared = _storages_of(own())
            sequence.watch(compared if metadata is None else compared + metadata.held)
        return metadata if checks and metadata is not None and metadata.rows else None

    def _record_step(
        self,
        step: Callable[[], Any],
        shown: str,
        rebinding: Rebinding | None,
        storages: SameStorages,
        wait: bool,
    ) -> tuple[GraphSequence, Any, CaptureError | None]:
        """Capture a step; return its sequence, its result, and why it must not be replayed."""
        pool = self._pool
        assert pool is not None
        touched = None
        if self._reads_more or self.notes_memory:
            # The owner of an unguarded wrapper holds the arguments itself.
            arguments = () if self._guarded else _storages_of(storages.tensors)
            touched = TouchedMemory(pool.device.tensor_type, arguments)
        with pool.device.around(self.runnable):
            try:
                graph, result = capture(
                    step if touched is None else partial(_under, touched, step),
                    pool,
                    f"{self.name} ({shown})",
                    collect=not self.options.gc_disable,
                    storages=storages,
                    compiled=self._may_run_compiled_code,
                    wait=wait,
                    generators=self.generators,
                )
            except BaseException:
                if rebinding is not None:
                    rebinding.restore(tensors_alone=True)  # which hold nothing
                raise
        if rebinding is not None:
            error = rebinding.error(self.name)
            if error is not None:
                rebinding.restore()
                raise error
        sequence = GraphSequence((GraphSegment(self.name, graph),), pool=pool)
        sequence.held = () if touched is None else touched.outside(pool.holds)
        return sequence, result, None

    @property
    def _reads_more(self) -> bool:
        """Whether a call may read the context, and more than its arguments; pieces cannot."""
        return self._guarded or self.runtime_mode is CUDAGraphMode.FULL

    @property
    def _may_run_compiled_code(self) -> bool:
        """Whether a call may run code of torch.compile; of a function this is unknown, so True."""
        if not self._guarded:  # pieces
            return False
        owner = getattr(self.runnable, "__self__", self.runnable)
        return not isinstance(owner, torch.nn.Module) or torch_ops.holds_compiled_code(owner)

    def keep(self, entry: CUDAGraphEntry, mode: CUDAGraphMode | None = None) -> None:
        """Let later calls of the entry's descriptor replay it, in the wrapper's mode or another."""
        with self.step_table.running.lock:
            self.captured_steps.keep((mode or self.runtime_mode, entry.batch_descriptor), entry)

    # -------------------------------------------------------------- replay

    def replay_entry(
        self,
        entry: CUDAGraphEntry,
        inputs: Sequence[Any] = (),
        runner: SegmentRunner | None = None,
    ) -> Any:
        """Replay an entry whose inputs the caller has compared; return its ``output``.

        Callers must not change that. ``poison`` leaves ``inputs`` alone. Compared with the capture
        are the settings of torch, and whether the program still has tensors that are no arguments.
        """
        entry.check_managed(self.name)
        entry.sequence.replay(inputs, None, runner)
        self.timeline.replays += 1
        return entry.output

    def _poisoning(self) -> Callable[[Sequence[Any]], None] | None:
        """Return what poisons before each replay; it holds the pool, not the wrapper: no cycle."""
        pool = self._pool
        if "poison" not in self.config.debug or pool is None:
            return None
        if self._shares_pool:
            return lambda _: pool.poison_free()
        return lambda inputs: pool.poison(torch_ops.tree_tensors(inputs))

    def _owner(self, descriptor: BatchDescriptor) -> Hashable:
        """Return whose next replay overwrites the results of a descriptor; None for any replay."""
        return None if self.options.weak_ref_output else (id(self), descriptor)

    def _track(self, descriptor: BatchDescriptor) -> Track:
        """Return what makes the results of a descriptor raise once they are stale."""
        assert self._pool is not None
        owner, what = self._owner(descriptor), f"{self.name}, {descriptor}"
        return partial(self._pool.stale.track, owns=self._pool.holds, owner=owner, what=what)

    @property
    def closed(self) -> bool:
        """Whether it captures nothing any more."""
        return self.step_table.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self.step_table.closed = closed

    @property
    def returns_views(self) -> bool:
        """Whether callers read results in memory of the pool after a step."""
        return self.step_table.returns_views

    @returns_views.setter
    def returns_views(self, views: bool) -> None:
        self.step_table.returns_views = views

    # -------------------------------------------------------------- what is captured

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, CUDAGraphEntry]:
        """The entries by descriptor; read-only.

        Of a wrapper that serves two modes, PIECEWISE hides FULL; with ``on_input_change`` set to
        ``"recapture"`` this is the entry that was used last.
        """
        entries = [*self.captured_steps.captured.items()]  # other threads may capture meanwhile
        ordered = sorted(entries, key=lambda item: -self._modes.index(item[0][0]))
        return MappingProxyType({key[1]: values[0] for key, values in ordered if values})

    @property
    def entries(self) -> tuple[CUDAGraphEntry, ...]:
        """All entries, of whatever mode and descriptor."""
        return tuple(self.captured_steps)

    def entry_of(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> CUDAGraphEntry | None:
        """Return the entry of a batch in a runtime mode that was used last, or None."""
        entries = self.captured_steps.captured.get((mode, batch))
        return entries[0] if entries else None

    def entries_of(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> list[CUDAGraphEntry]:
        """Return all entries of a batch in a runtime mode, the one used last first."""
        return [*self.captured_steps.captured.get((mode, batch), ())]

    @property
    def pool(self) -> GraphPool | None:
        """The memory of the graphs; None before the first capture, if no pool was passed."""
        return self._pool

    def weak_results(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that replays return and that do not hold their memory."""
        if self._pool is not None and self.options.weak_ref_output:
            outputs = torch_ops.tree_tensors([entry.output for entry in self.entries])
            yield from [tensor for tensor in outputs if self._pool.holds(address(tensor))]

    def unwrap(self) -> Callable[..., Any]:
        """Return the innermost callable, through wrappers in wrappers."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, CUDAGraphWrapper) else inner

    @property
    def counters(self) -> Counters:
        """What its calls did so far; a copy."""
        return self.timeline.counters

    def allow_threads(self) -> None:
        """Let several threads run steps under a forward context: the program locks them.

        Results are views of pool memory, which the next step overwrites. So the first step of a
        second thread is an error, unless the program holds one lock around each step *and* the
        reading of its results, and declares so by this call. It holds for all wrappers of the pool.

        Example:
            >>> step = cgcompile.CUDAGraphWrapper(nn.Linear(8, 8))
            >>> step.allow_threads()
        """
        self.step_table.thread.allow()

    # -------------------------------------------------------------- clear

    def clear_graphs(self) -> None:
        """Drop the graphs of this wrapper. The next call of a descriptor captures again."""
        with self.step_table.running.lock:
            self.captured_steps.release()
            if self._pool is not None:
                self._pool.generation += 1
                if not self._shares_pool:
                    self._pool.stale.release()

    def drop(self, entry: CUDAGraphEntry) -> None:
        """Drop one entry, if it was kept: its step was not finished."""
        with self.step_table.running.lock:
            self.captured_steps.drop((self.runtime_mode, entry.batch_descriptor), entry)

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
