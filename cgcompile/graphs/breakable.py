"""CUDA graphs with eager breaks, recorded from plain Python; no tracing.

For models that Dynamo cannot trace, and for those that are compiled as a whole. While the model
runs once, everything goes into graphs, except for splitting ops and functions under
:func:`eager_break_during_capture`, which run at every replay. :class:`BreakableCUDAGraphWrapper`
is what most users want; :class:`BreakableCUDAGraphCapture` is the raw form. Both record with
:class:`SegmentRecorder`, a transaction: at the end there is a
:class:`~cgcompile.graphs.sequence.GraphSequence`, or nothing and the first exception.

The rule: Python does not run again. The arguments of an eager break are those of the capture; what
varies from step to step it must read from the forward context.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from cgcompile.boundaries import Boundaries, SplittingOp, target_name
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import (
    callers_context,
    current_forward_context,
    in_full_mode,
    override_forward_context,
)
from cgcompile.descriptor import allows_full
from cgcompile.errors import CaptureError
from cgcompile.graphs.arena import Block, address
from cgcompile.graphs.breaks import (
    Arguments,
    Breaker,
    BreakMode,
    Original,
    foreign_breaks,
    held,
    transform_around,
    watch_containers,
)
from cgcompile.graphs.capture import (
    NewMemory,
    SameStorages,
    TouchedMemory,
    enter_capture,
    inside_capture,
    who_captures_elsewhere,
    who_captures_here,
)
from cgcompile.graphs.device import DeviceGraph, chosen_device
from cgcompile.graphs.fields import Rebinding
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.results import check_leaves, flatten, opener, rebuilt
from cgcompile.graphs.sequence import (
    Crossing,
    EagerSegment,
    GraphSegment,
    GraphSequence,
    Place,
    SameOnHost,
    Segment,
    crossings,
)
from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.settings import checked_but, require_callable
from cgcompile.torch_compat import raw_memory, torch_ops

log = logging.getLogger(__name__)

F_ = TypeVar("F_", bound=Callable[..., Any])
E_ = TypeVar("E_", bound=BaseException)


def _name_of(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__qualname__", type(function).__name__)
    return name


class SegmentRecorder(Breaker):
    """Records one step: what this thread runs between :meth:`start` and :meth:`finish`."""

    # With ``state`` the recording is one execution of the step: graph segments are replayed on the
    # caller's stream as soon as they have ended, and eager ones run there. Without it graph
    # segments are not executed, and eager ones run on the capture stream.

    def __init__(
        self,
        pool: GraphPool,
        name: str,
        boundaries: Boundaries,
        *,
        state: tuple[Rebinding, SameStorages] | None = None,  # to compare around each segment
        sees_composites: bool = False,  # capture below autograd: modes get SDPA as one op
        debug: bool = False,  # find tensors that a break leaves behind
        batch: str = "one batch",  # for messages
        compiled: bool = True,  # code of ``torch.compile`` may run inside
    ) -> None:
        self.pool, self.name = pool, name
        self.owner: BreakableCUDAGraphCapture | None = None
        self.is_full = False  # whether the forward context demands one graph without breaks
        self.has_run = False  # whether a part of the step was executed
        self._boundaries, self._batch = boundaries, batch
        self._executes = state is not None
        self._rebinding = None if state is None else state[0]
        self._storages = None if state is None else state[1]
        self._below_autograd, self._debug, self._compiled = sees_composites, debug, compiled
        self._frame = pool.arena.frame()
        self._segments: list[Segment] = []
        self._graph: DeviceGraph | None = None
        self._failed: tuple[str, BaseException] | None = None
        self._bridges: list[Block] = []
        self._touched = TouchedMemory(pool.device.tensor_type)
        # By identity: boundaries that compiled pieces were split at, and whether those cover ours.
        self._met: dict[int, tuple[Boundaries, bool]] = {}
        self._copied: dict[int, tuple[list[raw_memory.StorageLife], str]] = {}  # by bridge
        self._host_results: dict[int, list[SameOnHost]] = {}  # by address
        self._originals: list[Original] = []  # copied results, until the program drops them
        self._writes: list[tuple[list[raw_memory.StorageLife], str, str]] = []  # to bridges
        self._left_behind: dict[int, tuple[raw_memory.StorageLife, str]] = {}
        self._outside: dict[int, raw_memory.StorageLife] = {}  # by address
        self._stack = ExitStack()
        self._mode: BreakMode | None = None  # while it records

    # -------------------------------------------------------------- begin and end

    def start(self, *, wait: bool = True, before: Callable[[], None] | None = None) -> None:
        """Begin to record; see :func:`enter_capture`. On an exception nothing is left behind."""
        device, context = self.pool.device, current_forward_context()
        self.is_full = in_full_mode()
        self._descriptor = None if context is None else context.batch_descriptor
        self._callers_stream = device.current_stream()
        composites = self._below_autograd or torch.is_inference_mode_enabled()
        mode = BreakMode(self, self._boundaries, device.tensor_type, composites)
        self._mode = mode
        with ExitStack() as stack:
            enter_capture(stack, self.pool, self.name, self, wait=wait, before=before)
            device.wait_for(self._callers_stream)
            stack.enter_context(device.around())
            stack.enter_context(torch_ops.own_cached_casts(self._compiled))
            if self._below_autograd:
                stack.enter_context(torch_ops.below_autograd())
            if not self.is_full:
                stack.enter_context(foreign_breaks(self))
            try:
                self._begin()
            except BaseException:
                mode.switch_off()
                self._give_up()
                raise
            self._stack = stack.pop_all()

    def finish(self) -> GraphSequence:
        """End the recording; refuse it if a break failed or no declared splitting op ran."""
        try:
            if self._failed is not None:
                name, error = self._failed
                raise CaptureError.swallowed(what=self.name, name=name, error=error) from error
            if self._graph is None:
                raise CaptureError.open_break(what=self.name)
            if self._storages is not None:
                self._storages.check()  # layouts too; after each segment, addresses alone
            self._end()
            with self._on_stream_of_breaks():
                self._refuse_stale_originals()
            for lives, op, name in self._writes:
                if not all(life.ended for life in lives):
                    raise CaptureError.writes_a_copy(op=op, name=name)
            declared = self._boundaries.declared
            if declared and not self._breaks and not self.is_full:
                raise CaptureError.no_breaks(what=self.name, names=", ".join(declared))
        except BaseException:
            self.abandon()
            raise
        self._leave()
        sequence = GraphSequence(self._segments, pool=self.pool)
        sequence.held = self._touched.outside(self.pool.holds)
        return sequence

    def abandon(self) -> None:
        """End the recording after an exception; nothing of it is kept. Never raises."""
        try:
            if self._mode is not None:
                self._mode.switch_off()
            self._give_up()
        except Exception:  # the first exception is what the user must see
            log.exception("after the capture of %s had failed", self.name)
        finally:
            with suppress(RuntimeError):
                self._leave()

    def _give_up(self) -> None:
        """Park what was recorded; later captures go into new memory."""
        if self._storages is not None:
            self._storages.restore()
        graphs = [segment.graph for segment in self._segments if isinstance(segment, GraphSegment)]
        graph, self._graph, self._segments = self._graph, None, []
        if graph is not None:
            graph.abandon()
            graphs.append(graph)
        self.pool.retire(*graphs)

    def _leave(self) -> None:
        # The mode holds the recorder: a cycle would hold graphs and tensors until it is collected.
        self._mode = None
        self._rebinding = self._storages = None
        device = self.pool.device
        # Breaks may have run on the capture stream; other threads use it once the lock is free.
        with self._stack, device.on_stream(self._callers_stream):
            device.wait_for(self.pool.stream)

    def fail(self, name: str, error: E_) -> E_:
        """Note that the recording is lost, even if the program swallows the exception."""
        self._failed = self._failed or (name, error)
        return error

    # -------------------------------------------------------------- segments

    @property
    def is_recording(self) -> bool:
        """Whether a graph segment is open."""
        return self._graph is not None

    @property
    def _breaks(self) -> list[str]:
        return [segment.name for segment in self._segments if isinstance(segment, EagerSegment)]

    @property
    def reached(self) -> str:
        """How far it has come, for messages."""
        breaks = self._breaks
        return f"after break {len(breaks)} ({breaks[-1]})" if breaks else "before the first break"

    def _begin(self) -> None:
        torch.clear_autocast_cache()  # a break may have cast weights, into memory that it frees
        if self._storages is not None:
            self._storages.accept()  # a break may replace memory: it runs at each replay
        assert self._mode is not None
        memory = self.pool.memory
        self._graph = self.pool.device.new_graph()
        self._graph.begin(memory)  # where it raises, the graph is there to be abandoned
        self._mode.switch_on()

    def _end(self) -> None:
        assert self._graph is not None
        assert self._mode is not None
        self._mode.switch_off()
        if self._storages is not None:
            self._storages.check_addresses()
        torch.clear_autocast_cache()
        self._graph.end()  # where it raises, the graph is still there to be abandoned
        graph, self._graph = self._graph, None
        index = len(self._segments) - len(self._breaks)
        self._segments.append(GraphSegment(f"{self.name}[{index}]", graph))
        if self._executes:
            self.has_run = True
            with self._on_stream_of_breaks():
                self.pool.follow_stream()
                graph.replay()

    # -------------------------------------------------------------- breaks

    def on_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._touched.note(args, kwargs)
        if self._left_behind or self._host_results:
            for leaf in torch_ops.tree_tensors((args, kwargs)):
                life, name = self._left_behind.get(address(leaf), (None, ""))
                if life is not None and not life.ended:
                    raise CaptureError.escaped(op=str(op), name=name)
                for result in self._host_results.get(address(leaf), ()):
                    result.is_read |= not getattr(op, "is_view", False)
        for leaf in torch_ops.written_tensors(op, args, kwargs) if self._copied else ():
            if address(leaf) in self._copied:
                lives, name = self._copied[address(leaf)]
                self._writes.append((lives, str(op), name))

    def passes_over(self, inputs: Sequence[Any], boundaries: Boundaries) -> bool:
        if not self.is_full:  # breaks leave memory whose use is noted
            return False
        if id(boundaries) not in self._met:
            self._met[id(boundaries)] = boundaries, self._boundaries.are_met_by(boundaries)
        return self._met[id(boundaries)][1] and self._touched.passes_over(inputs)

    def on_splitting_op(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.is_full:
            own = entry.impl_for(self.pool.device.tensor_type) if not kwargs else None
            silent = torch_ops.returns_nothing(op)
            return self._between(target_name(op), own or op, (args, dict(kwargs)), silent)
        if not allows_full(entry.support, self._descriptor):
            raise CaptureError.inside_full(
                op=entry.name, support=entry.support.name, batch=self._batch
            )
        with self._touched:
            return op(*args, **kwargs)

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function between two segments; bridges replace the tensors that it creates."""
        arguments = args, dict(kwargs or {})
        transform = transform_around(arguments)
        if transform is not None:
            raise self.fail(name, CaptureError.under_transform(name=name, transform=transform))
        return self._between(name, function, arguments, False)

    def _between(
        self, name: str, function: Callable[..., Any], arguments: Arguments, silent: bool
    ) -> Any:
        """Run a break; the schema of a ``silent`` function returns nothing."""
        if torch_ops.inside_backward():
            raise self.fail(name, CaptureError.break_in_backward(name=name))
        with self.pause(name):
            return self._break(name, function, arguments, silent)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """End the segment, run the block outside of any, begin the next one; failures are noted."""
        if self._rebinding is not None:
            self._rebinding.end_segment()
        context = callers_context()
        origin = None if context is None else context.origin
        around = nullcontext() if origin is None else override_forward_context(origin)
        try:
            self._end()
            with self._on_stream_of_breaks(), around:  # a break reads the caller's context
                self._refuse_stale_originals()  # that captured code wrote
                self._reuse_bridges()
                alive = [original.tensor() for original in self._originals]
                yield
                self._refuse_stale_originals()  # that the break wrote
                del alive  # no sooner: a break may write an original and drop it
            if self._rebinding is not None:
                self._rebinding.begin_segment()
            self._begin()
        except BaseException as error:
            self.fail(name, error)
            raise

    def _reuse_bridges(self) -> None:
        """Let bridges that the program has dropped serve later breaks."""
        for block in [block for block in self._bridges if not block.in_use]:
            self._bridges.remove(block)
            self._frame.release(block)
            for original in self._originals:
                if original.block is block:
                    original.block = None

    def add_eager(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a foreign break that has run; its result is not compared."""
        bound = held((args, kwargs), self._owns)
        self._segments.append(EagerSegment(_name_of(function), function, *bound, lambda _: []))

    def _on_stream_of_breaks(self) -> AbstractContextManager[Any]:
        """Switch to the caller's stream if the step is executed; else to the capture stream."""
        stream = self._callers_stream if self._executes else self.pool.stream
        return self.pool.device.on_stream(stream)

    def _break(
        self, name: str, function: Callable[..., Any], arguments: Arguments, silent: bool
    ) -> Any:
        """Run a function between two segments and record it; see :meth:`run_eager`."""
        args, kwargs = arguments
        bound = held(arguments, self._owns)
        inputs, changed = watch_containers(arguments)
        if self._debug:
            result = self._run_watched(name, function, arguments)
        else:
            result = function(*args, **kwargs)
        self._refuse_stale_originals()  # while the result, which may be one of them, is alive
        if changed():
            raise CaptureError.mutates_arguments(name=name)
        result = None if silent else result
        leaves, structure = ([], None) if silent else flatten(result)
        check_leaves(leaves, name)
        across = self._across(name, leaves, inputs) if leaves else ()
        opened = opener(name, self._batch, result, structure)
        self._segments.append(EagerSegment(name, function, *bound, leaves=opened, crossings=across))
        return None if silent else rebuilt(result, leaves)

    def _run_watched(self, name: str, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Run a break; note the memory that it allocates and does not return."""
        args, kwargs = arguments
        with NewMemory(self.pool.device.tensor_type) as memory:
            result = function(*args, **kwargs)
        returned = {address(leaf) for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)}
        for start, life in memory.alive.items():
            if start not in returned:
                self._left_behind[start] = (life, name)
        return result

    def _across(self, name: str, leaves: list[Any], inputs: list[Any]) -> tuple[Crossing, ...]:
        """Copy results to where graphs read them; ``leaves`` become what the program gets."""
        results = list(leaves)
        places = [Place(name, self._batch, item, f"[{item}]") for item in range(len(leaves))]
        ours = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and self._owns(leaf)]
        fixed = {address(tensor) for tensor in (*torch_ops.tree_tensors(inputs), *ours)} - {0}
        names = {position.name for position in places}
        across, bridges = crossings(places, leaves, names, (), fixed, self._frame)
        for crossing in across:
            crossing(leaves)
        host = self._on_host(places, leaves)
        for block, crossed in bridges:
            items = [position.item for position in places if position.name in crossed]
            originals = [Original(name, results[item], leaves[item], block) for item in items]
            self._bridges.append(block)
            self._originals += originals
            self._copied[block.address] = ([original.life for original in originals], name)
            for item in items:
                leaves[item] = block.alias(leaves[item])
        return (*across, *host)

    def _on_host(self, places: Sequence[Place], leaves: list[Any]) -> list[Crossing]:
        """Return checks of the CPU tensors that a break returned, in a graph of another device."""
        checks: list[Crossing] = []
        if self.pool.device.tensor_type == "cpu":
            return checks
        for position in places:
            leaf = leaves[position.item]
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and address(leaf):
                check = SameOnHost(position, leaf)
                self._host_results.setdefault(address(leaf), []).append(check)
                checks.append(check)
        return checks

    def _owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in memory that lives as long as the recording."""
        start = address(tensor)
        known = self._outside.get(start)
        if known is not None and not known.ended:
            return False
        ours = self.pool.owns(tensor) or self.pool.arena.owns(start)
        if not ours:
            # A query of the allocator takes milliseconds; an address may be used again.
            self._outside[start] = raw_memory.StorageLife(tensor)
        return ours

    def _refuse_stale_originals(self) -> None:
        """Refuse results of breaks that the program keeps and that differ from their bridges."""
        self._originals = [original for original in self._originals if not original.life.ended]
        for original in self._originals:
            if original.is_stale:
                raise CaptureError.stale_copy(name=original.name)


def eager_break_during_capture(function: F_) -> F_:
    """Decorator: inside of a breakable capture, the function runs eager, then and at every replay.

    Outside of one it is called as it is; so it is inside of another break, in code that
    torch.compile traces, and where the forward context has mode FULL: then it is captured.
    Put it outermost, so that what other decorators do around the function happens at every replay.

    Tensors that the function returns are copied into buffers of the capture, so that the graph
    after it reads them; what it writes in place costs no copy. It must not keep tensors that it
    creates anywhere else for captured code to read.

    Raises:
        ConfigError: ``function`` cannot be called.
        CaptureError: called from another thread than the capturing one, with its memory.

    Example:
        >>> @cgcompile.eager_break_during_capture
        ... def scaled(x):
        ...     return x * cgcompile.get_forward_context().attn_metadata
        >>> step = cgcompile.BreakableCUDAGraphWrapper(lambda x: scaled(x + 1))
        >>> x = torch.zeros(2)
        >>> for scale in (1.0, 2.0, 3.0):
        ...     context = cgcompile.set_forward_context(
        ...         scale,
        ...         cudagraph_runtime_mode="PIECEWISE",
        ...         batch_descriptor=cgcompile.BatchDescriptor(2),
        ...     )
        ...     with torch.inference_mode(), context:
        ...         print(step(x).tolist())
        [1.0, 1.0]
        [2.0, 2.0]
        [3.0, 3.0]
    """
    require_callable("function", "eager_break_during_capture", function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        recorder = who_captures_here()
        if not isinstance(recorder, Breaker):
            _refuse_other_thread(name, args, kwargs)
            return function(*args, **kwargs)
        if in_full_mode() or not recorder.is_recording:
            return function(*args, **kwargs)
        return recorder.run_eager(name, function, args, kwargs)

    name = _name_of(function)
    return run  # type: ignore[return-value]


def _refuse_other_thread(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a break in another thread than the one that captures, with its memory."""
    recorder = who_captures_elsewhere()
    if not isinstance(recorder, SegmentRecorder):
        return
    pool = recorder.pool
    # The backward pass of CUDA runs in a thread of autograd, on the stream of the forward pass.
    if torch_ops.inside_backward() and pool.device.is_capturing():
        raise recorder.fail(name, CaptureError.break_in_backward(name=name))
    if any(map(pool.owns, torch_ops.tree_tensors((args, kwargs)))):
        raise recorder.fail(name, CaptureError.other_thread(name=name, what=recorder.name))


class BreakableCUDAGraphCapture:
    """Capture a block of code as CUDA graphs with eager breaks between them.

    1. Entering begins the capture of the first graph segment.
    2. A splitting op, or a function decorated with :func:`eager_break_during_capture`, ends the
       segment, runs eager on the capture stream, and begins the next one.
    3. Leaving ends the last segment. :meth:`replay` runs segments and breaks in order.

    Segments are recorded and not executed: their results are undefined before the first
    :meth:`replay`, which reads inputs at the addresses that they had::

        capture = BreakableCUDAGraphCapture()
        with capture:
            out = model(x)
        x.copy_(new)
        capture.replay()  # ``out`` is computed, where it was

    Args:
        pool: memory shared with other captures that never run at the same time; one of its own if
            left out.
        device: where the tensors are, if no pool is given; ``"cpu"`` means the host recorder. Left
            out: CUDA, or without a GPU the CPU where ``CGCOMPILE_CAPTURE_DEVICE=host``.
        boundaries: which ops break by themselves; the built-in attention ops if left out.
        debug: find tensors that a break makes and leaves for captured ops to read. Slow.
        name: for messages.

    Raises:
        CaptureError: ``device`` has no graphs.
        ConfigError: an argument is of another kind than above.

    Example:
        >>> x = torch.ones(3)
        >>> capture = cgcompile.BreakableCUDAGraphCapture(device="cpu")
        >>> with torch.no_grad(), capture:
        ...     y = x * 2
        >>> _ = x.fill_(3.0)
        >>> capture.replay()
        >>> y
        tensor([6., 6., 6.])
    """

    @checked_but("device")
    def __init__(
        self,
        pool: GraphPool | None = None,
        *,
        device: torch.device | str | None = None,
        boundaries: Boundaries | None = None,
        debug: bool = False,
        name: str = "step",
    ) -> None:
        if pool is None:
            pool = GraphPool(chosen_device(device, "BreakableCUDAGraphCapture"))
        self._pool = pool
        self._boundaries = Boundaries() if boundaries is None else boundaries
        self._debug = debug
        self._name = name
        self._recorder: SegmentRecorder | None = None
        self._sequence: GraphSequence | None = None

    @staticmethod
    def current() -> "BreakableCUDAGraphCapture | None":
        """Return the capture that this thread is in, or None; also None inside of a wrapper's."""
        recorder = who_captures_here()
        return recorder.owner if isinstance(recorder, SegmentRecorder) else None

    @staticmethod
    def is_active() -> bool:
        """Return whether this thread is in a breakable capture, a wrapper's own included."""
        return isinstance(who_captures_here(), SegmentRecorder)

    def __enter__(self) -> "BreakableCUDAGraphCapture":
        """Begin.

        Raises:
            CaptureError: it holds a recording already, or the stream is being captured.
            CaptureBusyError: another capture runs, in this thread or another one.
        """
        if self._sequence is not None or self._recorder is not None:
            advice = "Make a new BreakableCUDAGraphCapture for each recording."
            raise CaptureError.twice(what="BreakableCUDAGraphCapture", advice=advice)
        recorder = SegmentRecorder(self._pool, self._name, self._boundaries, debug=self._debug)
        recorder.owner = self
        recorder.start()
        self._recorder = recorder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        if error is not None:
            recorder.abandon()
            return
        self._sequence = recorder.finish()

    def add_eager(self, function: Callable[[], Any]) -> Any:
        """End the segment, run a function without arguments, and begin the next segment.

        Returns:
            Its result; fresh tensors are replaced by buffers that each replay fills.

        Raises:
            ConfigError: it cannot be called; the capture goes on.
            CaptureError: no capture is running, or it is in a break already.
            BaseException: what the function raised; the capture is lost then.
        """
        require_callable("function", "add_eager()", function)
        if self._recorder is None or not self._recorder.is_recording:
            raise CaptureError.no_segment(what="add_eager()")
        return self._recorder.run_eager(_name_of(function), function)

    @property
    def sequence(self) -> GraphSequence | None:
        """The recording; None before the end, and after a failure."""
        return self._sequence

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Graph and eager segments, alternating, beginning and ending with a graph."""
        return () if self._sequence is None else self._sequence.segments

    @property
    def num_graphs(self) -> int:
        """How many graphs there are: one more than breaks."""
        return 0 if self._sequence is None else self._sequence.num_graphs

    @property
    def num_eager_breaks(self) -> int:
        """How many functions run between graphs."""
        return 0 if self._sequence is None else self._sequence.num_eager_breaks

    def replay(self) -> None:
        """Run the recording on the current stream; results keep the addresses of the capture.

        Raises:
            CaptureError: nothing is recorded, or a capture runs in this thread.
            HostValueChangedError: a break returned something of another layout or structure.
        """
        if self._sequence is None:
            raise CaptureError.empty()
        if inside_capture():
            raise CaptureError.nested(what="replay()")
        self._sequence.replay()


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """A :class:`CUDAGraphWrapper` whose graphs may have eager breaks; it needs no trace.

    A call does the steps of :class:`CUDAGraphWrapper`. A capture depends on the runtime mode:

    1. PIECEWISE: splitting ops and functions decorated with :func:`eager_break_during_capture` run
       eager between graph segments, at each replay, on the caller's stream.
    2. FULL: the whole step is one graph. A splitting op that does not support the batch is an
       error.

    ``runnable`` may be a plain ``nn.Module``, or one that ``torch.compile`` compiled as a whole:
    warm that up first, because code must not be compiled inside of a capture. Fields that eager
    breaks rebind are not compared before a replay.

    Args:
        runnable: what to capture.
        config: as of :class:`CUDAGraphWrapper`; ``splitting_ops`` sets which ops break.
        runtime_mode: PIECEWISE or FULL; None serves both.
        cudagraph_options: how to capture.
        pool: memory shared with other wrappers.
        name: what messages call it.

    Attributes:
        boundaries: which ops break.
        before_capture: called right before each capture that begins; may be set.

    Raises:
        DispatchError: ``runtime_mode`` is not PIECEWISE, FULL or None.
        ConfigError: an argument is of another kind than above.

    Example:
        >>> step = cgcompile.BreakableCUDAGraphWrapper(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> context = cgcompile.set_forward_context(
        ...     cudagraph_runtime_mode="PIECEWISE", batch_descriptor=cgcompile.BatchDescriptor(4)
        ... )
        >>> with torch.inference_mode(), context:
        ...     for _ in range(3):
        ...         y = step(x)
        >>> step.counters.captures, step.counters.replays
        (1, 2)
    """

    _executes = True

    @checked_but("runnable", "runtime_mode")
    def __init__(
        self,
        runnable: Callable[..., Any],
        config: CompilationConfig | None = None,
        runtime_mode: CUDAGraphMode | None = None,
        cudagraph_options: CUDAGraphOptions | None = None,
        *,
        pool: GraphPool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            runnable,
            config,
            CUDAGraphMode.PIECEWISE if runtime_mode is None else runtime_mode,
            cudagraph_options,
            pool=pool,
            name=name,
        )
        if runtime_mode is None:
            self._modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
        self.boundaries = Boundaries(self.config.splitting_ops)
        self.before_capture: Callable[[], None] | None = None

    @property
    def sees_composites(self) -> bool:
        """Whether a capture here lets ops skip autograd, so that composite ones arrive whole."""
        if torch.is_inference_mode_enabled():
            return False  # they do so anyway
        return not torch_ops.holds_compiled_code(self.runnable)  # it would compile again

    def _record_step(
        self,
        step: Callable[[], Any],
        shown: str,
        rebinding: Rebinding | None,
        storages: SameStorages,
        wait: bool,
    ) -> tuple[GraphSequence, Any, CaptureError | None]:
        """Run and capture a step; return its sequence, its result, and why not to replay it."""
        assert self._pool is not None
        assert rebinding is not None
        recorder = SegmentRecorder(
            self._pool,
            f"{self.name} ({shown})",
            self.boundaries,
            state=(rebinding, storages),
            sees_composites=self.sees_composites,
            debug=self.options.debug_breaks,
            batch=shown,
            compiled=self._may_run_compiled_code,
        )
        recorder.start(wait=wait, before=self.before_capture)
        try:
            result = step()
            rebinding.end_segment()
            refused = rebinding.error(self.name)
            if refused is not None and not recorder.has_run:
                raise refused
        except BaseException as error:
            torch_ops.add_note(error, f"{self.name}: in a breakable capture, {recorder.reached}")
            recorder.abandon()
            if not recorder.has_run:  # else tensors may be computed
                rebinding.restore(tensors_alone=getattr(error, "field", "") == "")
            raise
        sequence = recorder.finish()
        if refused is not None:
            rebinding.move_out(self._pool.holds)
        return sequence, result, refused
