"""Record a step from plain Python, segment by segment: :class:`SegmentRecorder`.

It is a transaction. Between :meth:`~SegmentRecorder.start` and :meth:`~SegmentRecorder.finish` the
work of this thread goes into graphs, with a break wherever a splitting op or a decorated function
runs; at the end there is a :class:`~cgcompile.graphs.sequence.GraphSequence`, or nothing and the
first exception. ``breakable.py`` has what users call.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch

from cgcompile import compat
from cgcompile.boundaries import Boundaries, SplittingOp, allows_full, target_name
from cgcompile.errors import CaptureError
from cgcompile.forward_context import current_forward_context, in_full_mode
from cgcompile.graphs.arena import Block, address
from cgcompile.graphs.breaks import Breaker, BreakMode, Makers
from cgcompile.graphs.bridges import Place, SameOnHost, crossings
from cgcompile.graphs.capture import capture_turn, without_garbage_collection
from cgcompile.graphs.cuda import bury_graphs
from cgcompile.graphs.device import DeviceGraph
from cgcompile.graphs.fields import Rebinding
from cgcompile.graphs.foreign import foreign_breaks
from cgcompile.graphs.given import Arguments, Containers, held, transform_around
from cgcompile.graphs.originals import Original
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.results import check_leaves, flatten, opener, rebuilt
from cgcompile.graphs.sequence import (
    Crossing,
    EagerSegment,
    GraphSegment,
    GraphSequence,
    Segment,
)
from cgcompile.graphs.storages import SameStorages

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
        return GraphSequence(self._segments)

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
        """See :class:`~cgcompile.graphs.foreign.Recorder`; what it returns is not looked at."""
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
