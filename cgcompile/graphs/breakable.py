"""Record a step from plain Python, segment by segment: :class:`SegmentRecorder`.

It is a transaction. Between :meth:`~SegmentRecorder.start` and :meth:`~SegmentRecorder.finish` the
work of this thread goes into graphs, with a break wherever a splitting op or a decorated function
runs; at the end there is a :class:`~cgcompile.graphs.sequence.GraphSequence`, or nothing and the
first exception. ``breakable.py`` has what users call.

CUDA graphs with eager breaks, recorded from plain Python; no tracing.

For models that Dynamo cannot trace, and for those that are compiled as a whole. While the model
runs once, everything goes into graphs, except for splitting ops and functions under
:func:`eager_break_during_capture`, which run at every replay. :class:`BreakableCUDAGraphWrapper`
is what most users want; :class:`BreakableCUDAGraphCapture` is the raw form.

The rule: Python does not run again. What an eager break was given at capture it is given for ever;
what varies from step to step it must read from the forward context.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from cgcompile import torch_compat as compat
from cgcompile.boundaries import Boundaries, SplittingOp, target_name
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import BatchDescriptor, current_forward_context, in_full_mode
from cgcompile.descriptor import allows_full
from cgcompile.errors import CaptureError, GradientError
from cgcompile.graphs.arena import Block, address
from cgcompile.graphs.breaks import (
    Arguments,
    Breaker,
    BreakMode,
    Containers,
    Makers,
    Original,
    foreign_breaks,
    held,
    transform_around,
)
from cgcompile.graphs.bridges import Place, SameOnHost, crossings
from cgcompile.graphs.capture import (
    SameStorages,
    capture_turn,
    inside_capture,
    who_captures_elsewhere,
    who_captures_here,
    without_garbage_collection,
)
from cgcompile.graphs.cuda import bury_graphs
from cgcompile.graphs.device import DeviceGraph, chosen_device
from cgcompile.graphs.fields import Rebinding
from cgcompile.graphs.outputs import check_leaves, flatten, opener, rebuilt
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import Crossing, EagerSegment, GraphSegment, GraphSequence, Segment
from cgcompile.graphs.wrapper import Captured, CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.settings import checked_but, require_callable

log = logging.getLogger(__name__)


class SegmentRecorder(Breaker):
    """Records one step.

    Args:
        pool: where memory comes from.
        name: of what is captured, for messages.
        boundaries: which ops break.
        execute: replay each graph segment on the caller's stream as soon as it has ended, and run
            eager segments there, so that the recording is one execution of the step. Otherwise
            graph segments are not executed, and eager ones run on the capture stream.
        sees_composites: let ops skip autograd, so that composite ones arrive whole.
        debug: find tensors that a break makes and leaves behind.
        batch: what is captured, for messages.
        rebinding: told where segments begin and end; None: fields are not compared.
        storages: tensors whose memory segments must not replace.
        compiled: whether what ``torch.compile`` made may run inside.

    Attributes:
        is_full: whether the forward context asks for one graph without breaks.
        has_run: whether a part of the step was executed.
    """

    def __init__(
        self,
        pool: GraphPool,
        name: str,
        boundaries: Boundaries,
        *,
        execute: bool,
        sees_composites: bool = False,
        debug: bool = False,
        batch: str = "one batch",
        rebinding: Rebinding | None = None,
        storages: SameStorages | None = None,
        compiled: bool = True,
    ) -> None:
        self.pool = pool
        self._storages = storages
        self._compiled = compiled
        self.name = name
        self._boundaries = boundaries
        self._execute = execute
        self._below_autograd = sees_composites
        self._debug = debug
        self._batch = batch
        self._rebinding = rebinding
        self.has_run = False
        self._frame = pool.arena.frame()
        self._segments: list[Segment] = []
        self._graph: DeviceGraph | None = None
        self._graphs = 0  # that have ended
        self._failed: tuple[str, BaseException] | None = None
        self._bridges: list[Block] = []
        self._copied: dict[int, tuple[list[compat.StorageLife], str]] = {}  # by bridge
        self._host_results: dict[int, list[SameOnHost]] = {}  # by address
        self._kept: list[Original] = []  # copied results, until the program lets the original go
        self._writes: list[tuple[list[compat.StorageLife], str, str]] = []  # to bridges
        self._left_behind: dict[int, tuple[compat.StorageLife, str]] = {}
        self._outside: dict[int, compat.StorageLife] = {}  # by address
        self._stack = ExitStack()

    # -------------------------------------------------------------- begin and end

    def start(self, *, wait: bool = True, before: Callable[[], None] | None = None) -> None:
        """Begin to record; on an exception nothing is left behind.

        Args:
            wait: wait a few seconds for the capture of another thread.
            before: called right before the capture begins, when nothing can refuse it any more.

        Raises:
            CaptureBusyError: another capture runs, in this thread or another one.
            CaptureError: the current stream is being captured by someone else.
        """
        device = self.pool.device
        if device.is_capturing():
            raise CaptureError.nested(what=f"capture of {self.name}")
        context = current_forward_context()
        self.is_full = in_full_mode()
        self._descriptor = None if context is None else context.batch_descriptor
        composites = self._below_autograd or torch.is_inference_mode_enabled()
        self._mode = BreakMode(self, self._boundaries, device.tensor_type, composites)
        with ExitStack() as stack:
            stack.enter_context(capture_turn(self.name, self, wait=wait, before=before))
            bury_graphs()
            stack.enter_context(without_garbage_collection())
            self._callers_stream = device.current_stream()
            stack.enter_context(device.on_stream(self.pool.stream))
            device.wait_for(self._callers_stream)
            stack.enter_context(device.around())
            stack.enter_context(compat.own_cached_casts(self._compiled))
            if self._below_autograd:
                stack.enter_context(compat.below_autograd())
            if not self.is_full:
                stack.enter_context(foreign_breaks(self))
            try:
                if device.is_capturing():
                    raise CaptureError.nested(what=f"capture of {self.name}")
                self._begin()
            except BaseException:
                self._mode.switch_off()
                self._give_up()
                raise
            self._stack = stack.pop_all()

    def finish(self) -> GraphSequence:
        """End the recording.

        Raises:
            CaptureError: an exception of a break was swallowed; a thread took part that must not;
                no declared splitting op ran.
        """
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
                self._refuse_stale_copies()
            for lives, op, name in self._writes:
                if not all(life.ended for life in lives):
                    raise CaptureError.writes_a_copy(op=op, name=name)
            breaks = any(isinstance(each, EagerSegment) for each in self._segments)
            if self._boundaries.declared and not breaks and not self.is_full:
                raise CaptureError.no_breaks(
                    what=self.name, names=", ".join(self._boundaries.declared)
                )
        except BaseException:
            self.abandon()
            raise
        self._leave()
        return GraphSequence(self._segments, pool=self.pool)

    def abandon(self) -> None:
        """End the recording after an exception; nothing of it is kept. Never raises."""
        try:
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
        broken = [each.graph for each in self._segments if isinstance(each, GraphSegment)]
        graph, self._graph, self._segments = self._graph, None, []
        if graph is not None:
            graph.abandon()
            broken.append(graph)
        self.pool.retire(*broken)

    def _leave(self) -> None:
        device = self.pool.device
        # Breaks may have run on the capture stream, which is others' once the turn is given back.
        with self._stack, device.on_stream(self._callers_stream):
            device.wait_for(self.pool.stream)

    def fail(self, name: str, error: BaseException) -> None:
        """Whatever the program does now, the recording is lost."""
        self._failed = self._failed or (name, error)

    # -------------------------------------------------------------- segments

    @property
    def is_recording(self) -> bool:
        """Whether a graph segment is open."""
        return self._graph is not None

    @property
    def reached(self) -> str:
        """How far it has come, for messages."""
        breaks = [each.name for each in self._segments if isinstance(each, EagerSegment)]
        return f"after break {len(breaks)} ({breaks[-1]})" if breaks else "before the first break"

    def _begin(self) -> None:
        torch.clear_autocast_cache()  # a break may have cast weights, into memory that it frees
        if self._storages is not None and not self._storages.at_same_addresses:
            self._storages.accept()  # a break may do so: it runs at each replay
        memory = self.pool.memory
        self._graph = self.pool.device.new_graph()
        self._graph.begin(memory)  # where it raises, the graph is there to be abandoned
        self._mode.switch_on()

    def _end(self) -> None:
        assert self._graph is not None
        self._mode.switch_off()
        if self._storages is not None and not self._storages.at_same_addresses:
            self._storages.check()
        torch.clear_autocast_cache()
        self._graph.end()  # where it raises, the graph is still there to be abandoned
        graph, self._graph = self._graph, None
        self._segments.append(GraphSegment(f"{self.name}[{self._graphs}]", graph))
        self._graphs += 1
        if self._execute:
            self.has_run = True
            with self._on_stream_of_breaks():
                self.pool.follow_stream()
                graph.replay()

    # -------------------------------------------------------------- breaks

    def pass_by(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See :class:`~cgcompile.graphs.breaks.Breaker`."""
        for leaf in compat.tree_tensors((args, kwargs)) if self._left_behind else ():
            life, name = self._left_behind.get(address(leaf), (None, ""))
            if life is not None and not life.ended:
                raise CaptureError.escaped(op=str(op), name=name)
        for leaf in compat.tree_tensors((args, kwargs)) if self._host_results else ():
            for result in self._host_results.get(address(leaf), ()):
                result.is_read |= not getattr(op, "is_view", False)
        for leaf in compat.written_tensors(op, args, kwargs) if self._copied else ():
            if address(leaf) in self._copied:
                lives, name = self._copied[address(leaf)]
                self._writes.append((lives, str(op), name))

    def meet(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :class:`~cgcompile.graphs.breaks.Breaker`."""
        if not self.is_full:
            own = entry.impl_for(self.pool.device.tensor_type) if not kwargs else None
            silent = compat.returns_nothing(op)
            return self._between(target_name(op), own or op, (args, dict(kwargs)), silent)
        if not allows_full(entry.support, self._descriptor):
            raise CaptureError.inside_full(
                op=entry.name, support=entry.support.name, batch=self._batch
            )
        return op(*args, **kwargs)

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """End the segment, run a function, and begin the next segment.

        Returns:
            What the function returned, with bridges in place of the tensors that it made.

        Raises:
            CaptureError: it runs inside of a transform of ``torch.func``, or of a backward pass.
            BaseException: what the function raised, unchanged; the recording is lost then.
        """
        given = args, dict(kwargs or {})
        transform = transform_around(given)
        if transform is not None:
            error = CaptureError.under_transform(name=name, transform=transform)
            self.fail(name, error)
            raise error
        return self._between(name, function, given, False)

    def _between(
        self, name: str, function: Callable[..., Any], given: Arguments, silent: bool
    ) -> Any:
        """As :meth:`run_eager`; what a ``silent`` function returns is nothing by its schema."""
        if compat.inside_backward():
            error = CaptureError.break_in_backward(name=name)
            self.fail(name, error)
            raise error
        with self.pause(name):
            return self._break(name, function, given, silent)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """End the segment; what runs inside is in none; then begin the next one.

        On an exception the recording is lost.
        """
        if self._rebinding is not None:
            self._rebinding.end_segment()
        try:
            self._end()
            with self._on_stream_of_breaks():
                self._refuse_stale_copies()
                self._bring_back_bridges()
                yield
            if self._rebinding is not None:
                self._rebinding.begin_segment()
            self._begin()
        except BaseException as error:
            self.fail(name, error)
            raise

    def add_eager(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See :class:`~cgcompile.graphs.breaks.Recorder`; what it returns is not looked at."""
        self._refuse_stale_copies()
        name = getattr(function, "__qualname__", type(function).__name__)
        kept = held((args, kwargs), self._owns)
        self._segments.append(EagerSegment(name, function, *kept, lambda _: []))

    def _on_stream_of_breaks(self) -> AbstractContextManager[Any]:
        """The caller's stream, where graph segments are replayed; else the capture stream."""
        stream = self._callers_stream if self._execute else self.pool.stream
        return self.pool.device.on_stream(stream)

    def _break(
        self, name: str, function: Callable[..., Any], given: Arguments, silent: bool
    ) -> Any:
        """Run a function between two segments and record it; see :meth:`run_eager`."""
        kept = held(given, self._owns)
        before = Containers(given)
        made = self._run(name, function, given)
        self._refuse_stale_copies()
        if before.changed:
            raise CaptureError.mutates_arguments(name=name)
        return self._record(name, function, kept, before.leaves, None if silent else made, silent)

    def _run(self, name: str, function: Callable[..., Any], given: Arguments) -> Any:
        args, kwargs = given
        if not self._debug:
            return function(*args, **kwargs)
        with Makers(self.pool.device.tensor_type) as makers:
            made = function(*args, **kwargs)
        returned = {address(leaf) for leaf in flatten(made)[0] if isinstance(leaf, torch.Tensor)}
        for where, life in makers.alive.items():
            if where not in returned:
                self._left_behind[where] = (life, name)
        return made

    def _record(
        self,
        name: str,
        function: Callable[..., Any],
        kept: Arguments,
        given: list[Any],
        made: Any,
        silent: bool,
    ) -> Any:
        leaves, structure = ([], None) if silent else flatten(made)
        check_leaves(leaves, name)
        found = self._across(name, leaves, given) if leaves else ()
        opened = opener(name, self._batch, made, structure)
        self._segments.append(EagerSegment(name, function, *kept, leaves=opened, crossings=found))
        return None if silent else rebuilt(made, leaves)

    def _across(self, name: str, leaves: list[Any], given: list[Any]) -> tuple[Crossing, ...]:
        """Bring results to where graphs read them; ``leaves`` are what the program gets then."""
        lives = {
            item: compat.StorageLife(each)
            for item, each in enumerate(leaves)
            if isinstance(each, torch.Tensor)
        }
        sources = {item: compat.weak_tensor(leaves[item]) for item in lives}
        places = [Place(name, self._batch, item, f"[{item}]") for item in range(len(leaves))]
        names = {place.name for place in places}
        ours = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and self._owns(leaf)]
        fixed = {address(tensor) for tensor in (*compat.tree_tensors(given), *ours)} - {0}
        across = crossings(places, leaves, names, (), fixed, self._frame)
        for crossing in across.crossings:
            crossing(leaves)
        host = self._on_host(places, leaves)
        for block, crossed in across.blocks:
            self._bridges.append(block)
            members = [place for place in places if place.name in crossed]
            self._copied[block.address] = ([lives[place.item] for place in members], name)
            for place in members:
                source, lent = sources[place.item], leaves[place.item]
                kept = Original(name, lives[place.item], source, compat.weak_tensor(lent), block)
                self._kept.append(kept)
            for place in places:
                if place.name in crossed:
                    leaves[place.item] = block.lend(leaves[place.item])
        return (*across.crossings, *host)

    def _on_host(self, places: Sequence[Place], leaves: list[Any]) -> list[Crossing]:
        """Return checks of the CPU tensors that a break returned, in a graph of another device."""
        checks: list[Crossing] = []
        if self.pool.device.tensor_type == "cpu":
            return checks
        for place in places:
            leaf = leaves[place.item]
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and address(leaf):
                check = SameOnHost(place, leaf)
                self._host_results.setdefault(address(leaf), []).append(check)
                checks.append(check)
        return checks

    def _owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that lives as long as the recording."""
        where = address(tensor)
        known = self._outside.get(where)
        if known is not None and not known.ended:
            return False
        ours = self.pool.owns(tensor) or self.pool.arena.owns(where)
        if not ours:
            # Asking the allocator takes milliseconds; an address may be used again.
            self._outside[where] = compat.StorageLife(tensor)
        return ours

    def _refuse_stale_copies(self) -> None:
        """Of what a break returned and the program keeps there are two now: they must be equal."""
        for kept in [kept for kept in self._kept if kept.life.ended]:
            self._kept.remove(kept)
        for kept in self._kept:
            if kept.is_stale:
                raise CaptureError.stale_copy(name=kept.name)

    def _bring_back_bridges(self) -> None:
        """Let bridges that the program holds no more serve this break."""
        for block in [block for block in self._bridges if not block.is_lent]:
            self._bridges.remove(block)
            self._frame.give(block)


F_ = TypeVar("F_", bound=Callable[..., Any])


def eager_break_during_capture(function: F_) -> F_:
    """Decorator: inside of a breakable capture, the function runs eager, then and at every replay.

    Outside of one it is called as it is; so it is inside of another break, in code that
    torch.compile traces, and where the forward context asks for mode FULL: then it is captured.
    Put it outermost, so that what other decorators do around the function happens at every replay.

    Tensors that the function returns are copied into buffers of the capture, so that the graph
    after it finds them; what it writes in place costs no copy. It must not keep tensors that it
    makes anywhere else for captured code to read.

    Raises:
        ConfigError: what is decorated cannot be called.
        CaptureError: called from another thread than the capturing one, with its memory.
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

    name: str = getattr(function, "__qualname__", type(function).__name__)
    return run  # type: ignore[return-value]


def _refuse_other_thread(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recorder = who_captures_elsewhere()
    if not isinstance(recorder, SegmentRecorder):
        return
    leaves = compat.tree_leaves((args, kwargs))
    # The backward pass of CUDA runs in a thread of autograd, on the stream of the forward pass.
    if compat.inside_backward() and recorder.pool.device.is_capturing():
        error = CaptureError.break_in_backward(name=name)
        recorder.fail(name, error)
        raise error
    if any(isinstance(leaf, torch.Tensor) and recorder.pool.owns(leaf) for leaf in leaves):
        error = CaptureError.other_thread(name=name, what=recorder.name)
        recorder.fail(name, error)
        raise error


class BreakableCUDAGraphCapture:
    """Context manager that records what runs inside, with eager breaks; the raw form.

    Graph segments are not executed while they are recorded, so their results hold nothing before
    the first :meth:`replay`; eager breaks do run, on the capture stream::

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
        """The capture that this thread is in, or None; a wrapper's own is not told."""
        recorder = who_captures_here()
        return recorder.capture if isinstance(recorder, _Raw) else None

    @staticmethod
    def is_active() -> bool:
        """Whether this thread is in a breakable capture, a wrapper's own included."""
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
        recorder = _Raw(self._pool, self._name, self._boundaries, execute=False, debug=self._debug)
        recorder.capture = self
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
            What it returned; fresh tensors are replaced by buffers that each replay fills.

        Raises:
            ConfigError: it cannot be called; the capture goes on.
            CaptureError: no capture is running, or it is in a break already.
            BaseException: what the function raised; the capture is lost then.
        """
        require_callable("function", "add_eager()", function)
        if self._recorder is None or not self._recorder.is_recording:
            raise CaptureError.no_segment(what="add_eager()")
        name: str = getattr(function, "__qualname__", type(function).__name__)
        return self._recorder.run_eager(name, function)

    @property
    def sequence(self) -> GraphSequence | None:
        """What was recorded; None before the end, and after a failure."""
        return self._sequence

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Graph and eager segments in turn, beginning and ending with a graph."""
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
        """Run what was recorded on the current stream. Results lie where they lay at capture.

        Raises:
            CaptureError: nothing is recorded, or a capture runs in this thread.
            HostValueChangedError: a break returned something of another layout or structure.
        """
        if self._sequence is None:
            raise CaptureError.empty()
        if inside_capture():
            raise CaptureError.nested(what="replay()")
        self._sequence.replay()


class _Raw(SegmentRecorder):
    """The recorder of a raw capture."""

    capture: BreakableCUDAGraphCapture


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """A :class:`CUDAGraphWrapper` whose graphs may have eager breaks.

    It works on a plain ``nn.Module`` and on one that ``torch.compile`` compiled as a whole (warm
    that up first: code must not be compiled inside of a capture). In mode PIECEWISE splitting ops
    and decorated functions break; in mode FULL all of it is one graph, and a splitting op that
    does not support the batch is an error. A capturing call is one execution of the step; eager
    breaks run on the caller's stream. What the runnable takes is compared as by
    :class:`CUDAGraphWrapper`; fields that eager breaks rebind are no matter.

    Args:
        runnable: what to capture.
        config: as of :class:`CUDAGraphWrapper`; ``splitting_ops`` and ``builtin_splitting_ops``
            say which ops break.
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
    """

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
        ops, builtin = self.config.splitting_ops, self.config.builtin_splitting_ops
        self.boundaries = Boundaries(ops, builtin=builtin)
        self.before_capture: Callable[[], None] | None = None

    @property
    def sees_composites(self) -> bool:
        """Whether a capture here lets ops skip autograd, so that composite ones arrive whole."""
        if torch.is_inference_mode_enabled():
            return False  # they do so anyway
        return not compat.holds_compiled_code(self.runnable)  # it would compile again

    def record(
        self,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: str = "",
        storages: SameStorages | None = None,
        wait: bool = True,
    ) -> Captured:
        """Capture ``runnable`` for a descriptor; it has been executed then.

        Raises:
            GradientError: a result requires grad.
            CaptureError: a splitting op ran that a FULL graph must not hold, or none ran although
                some were declared; a segment replaced the memory of a reachable tensor; or
                a field was rebound, and is as it was before.
            BaseException: what ``runnable`` raised, unchanged, with a note of how far it came.
        """
        assert self._pool is not None
        shown = shown or str(descriptor)
        rebinding = Rebinding(self.unwrap(), args, kwargs)
        recorder = SegmentRecorder(
            self._pool,
            self._log_capture(shown),
            self.boundaries,
            execute=True,
            sees_composites=self.sees_composites,
            debug=self.options.debug_breaks,
            batch=shown,
            rebinding=rebinding,
            storages=storages or self._storages(args, kwargs, rebinding),
            compiled=self._may_run_compiled_code,
        )
        recorder.start(wait=wait, before=self.before_capture)
        try:
            result = self.runnable(*args, **kwargs)
            rebinding.end_segment()
            refused = rebinding.error(self.name)
            if refused is not None and not recorder.has_run:
                raise refused
        except BaseException as error:
            compat.add_note(error, f"{self.name}: in a breakable capture, {recorder.reached}")
            recorder.abandon()
            if not recorder.has_run:  # else tensors may be computed
                rebinding.put_back(tensors_alone=getattr(error, "field", "") == "")
            raise
        sequence = recorder.finish()
        if refused is not None:
            rebinding.move_out(self._pool.holds)
        captured = self._captured(descriptor, shown, sequence, result, args, kwargs, executed=True)
        if captured is None:
            raise GradientError.of_a_capture(what=self.name)
        return replace(captured, refused=refused)
