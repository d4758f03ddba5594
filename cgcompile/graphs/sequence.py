"""What one batch recorded: :class:`GraphSequence`, graph segments and eager segments in order.

FULL capture, capture of FX pieces and breakable capture all end here; they differ in who makes the
breaks. A replay is one loop over steps without arguments: a graph's ``replay``, or a function with
all arguments bound. :meth:`GraphSequence.replay` is the way to replay: stream order, poison, the
copies of inputs, observers and the count are written there, once; :data:`REPLAY_OF_ONE` is the same
of a single graph as text. Where each value of a step comes from:

=============================== ============================ ============================ =========
value                           read by a graph segment      read by an eager segment     released
=============================== ============================ ============================ =========
parameter, buffer               bound; guarded by identity   this call's; bound, where    never
                                and address                  the trace holds it
input that is only read         forward context: bound,      this call's                  step ends
                                guarded by address; without:
                                copied into the arena
input that is written, or       bound by address, guarded,   this call's                  step ends
shares memory with one          never copied
integer                         part of the key, or guarded  this call's                  step ends
                                by value
0-dim CPU tensor                a copy on the device, filled this call's                  step ends
                                before each replay
result of a graph segment       pool memory                  bound to that memory         last use
result of an eager segment      copied over a bridge in the  the bridge; a slot, if no    last use
                                arena; or checked, if it is  graph segment reads it
                                memory at a fixed address
returned to the caller          pool memory, an arena, or    -                            next call
                                what an eager segment made
=============================== ============================ ============================ =========

Breakable capture does not run Python again, so there "this call's" values are bound too: what
varies from step to step must come from the forward context. An eager segment always runs under the
forward context of the present step.

A replay checks once a step for observers: torch's profiler, :func:`tracing_ranges`, or others in
:data:`OBSERVERS`. Only then it takes :func:`run_observed`, the slow form of its loop. Names are
equal in all processes and runs of a model: ``cgcompile/piece_0 [num_tokens=64]``,
``cgcompile/break_1 ns::attention``, and around them ``cgcompile/step [num_tokens=64]``.

Note [Bridges]
How results of an eager segment reach the graph segments that read them (:func:`crossings`). A graph
reads the address of the capture. A fresh tensor is copied into a block of the arena, the bridge,
whose layout it gets; several that share memory cross together, so that they still share it; a
tensor in memory at a fixed address must have that address; a value that is no tensor must be the
same, and so must a CPU tensor in a graph of another device, if captured code reads it. A *crossing*
is called with the list of results and replaces those that have a bridge.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from threading import get_ident
from typing import Any, NamedTuple

import torch

from cgcompile.errors import AddressChangedError, CaptureError, GuardError
from cgcompile.graphs.arena import (
    Block,
    Frame,
    OwnedCopy,
    ScalarCopy,
    address,
    numbers_as_bytes,
    stretch,
)
from cgcompile.graphs.contract import (
    Change,
    Contract,
    Placed,
    Reads,
    function_of,
    is_plain_value,
    layout_text,
    same_layout,
)
from cgcompile.graphs.device import DeviceGraph
from cgcompile.graphs.pool import GraphPool
from cgcompile.settings import checked
from cgcompile.torch_compat import torch_settings
from cgcompile.torch_compat.raw_memory import is_held_here_alone, storage_identity
from cgcompile.torch_compat.torch_settings import PROFILING, is_profiling

Crossing = Callable[[list[Any]], None]
"""Called with the results of an eager segment; copies or checks those that graphs after it read."""


class Slot(NamedTuple):
    """A value of the present step: an input of this call, or a result of an eager segment."""

    at: int


@dataclass(frozen=True, eq=False)
class GraphSegment:
    """A recording between two eager segments.

    Attributes:
        name: for messages.
        graph: the recording.
        scalars: (buffer, source) of the 0-dim CPU tensors that it reads; a replay fills each buffer
            from its source, a tensor or a slot.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode():
        ...     y = model(x), model(x)
        >>> sequence = model.backend.graphs[-1].recordings[0].sequence
        >>> [type(segment).__name__ for segment in sequence.segments]
        ['GraphSegment']
    """

    name: str
    graph: DeviceGraph
    scalars: tuple[tuple[ScalarCopy, Any], ...] = ()

    @property
    def reads(self) -> set[int]:
        """The slots that it reads."""
        return {source.at for _, source in self.scalars if isinstance(source, Slot)}


@dataclass(frozen=True, eq=False)
class EagerSegment:
    """A function that runs at every replay.

    Attributes:
        name: for messages.
        function: what runs.
        args: its positional arguments: bound objects, or slots.
        kwargs: its keyword arguments, bound.
        leaves: returns its results as a list, from what it returned.
        originals: (item, slot) of results that later segments read as the function returned them.
        crossings: called in order with the results, to bring them to the graphs that read them.
        stores: (item, slot) of results that later segments read as the crossings left them.
        tails: results [N, ...] with N rows of the padded batch; those after the real are zeroed.
            Of compiled models alone: sizes without a trace do not show which ones are rows.
        what: the function's name for profilers; ``name`` if left out.

    Example:
        >>> def attend(x):
        ...     return nn.functional.scaled_dot_product_attention(x, x, x) + 1
        >>> model = cgcompile.compile(attend, cudagraph_mode="PIECEWISE")
        >>> x = torch.randn(1, 4, 8)
        >>> with torch.inference_mode():
        ...     y = model(x), model(x)
        >>> sequence = model.backend.graphs[-1].recordings[0].sequence
        >>> [type(segment).__name__ for segment in sequence.segments]
        ['EagerSegment', 'GraphSegment']
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    leaves: Callable[[Any], list[Any]] = list
    originals: tuple[tuple[int, Slot], ...] = ()
    crossings: tuple[Crossing, ...] = ()
    stores: tuple[tuple[int, Slot], ...] = ()
    tails: tuple[torch.Tensor, ...] = ()
    what: str = ""

    @property
    def reads(self) -> set[int]:
        """The slots that it reads."""
        return {arg.at for arg in self.args if isinstance(arg, Slot)}


class HeldMemory(NamedTuple):
    """Memory from outside of the pool that captured ops touched, and the layout of a tensor."""

    storage: torch.UntypedStorage
    address: int  # at the end of the capture
    layout: tuple[Any, ...]


Segment = GraphSegment | EagerSegment

SegmentRunner = Callable[[int, Callable[[], Any]], Any]
"""Called with the index and the step of each segment; runs the step, or something in its place."""


# ``GraphSequence.replay`` of a sequence for which ``is_one_graph`` holds; see ``names_of_one``.
REPLAY_OF_ONE = f"""\
if stream_key() != pool.stream_key:
    pool.follow_stream()
if {PROFILING[0]} or observers():
    run_observed(sequence, sequence.steps)
else:
    replay()
sequence.replays += 1
real = context.num_unpadded_tokens
if real is not None and real < rows:
    sequence.padding += rows - real
"""


class GraphSequence:
    """The segments of one recorded step, to be replayed in order.

    Not thread-safe: the owner of the pool lets one step run at a time.

    Args:
        segments: in order.
        inputs: (slot, position) of the inputs of a call that eager segments read.
        slots: how many slots there are.
        kept: slots that are read after the replay.
        name: of the captured step, for profilers; may be set until a profiler reads it.
        batch: the captured batch as text, for profilers; may be set like ``name``.
        pool: the memory of the graphs; None: the caller orders streams.
        rows: of the captured batch, padding included; may be set.

    Attributes:
        segments: in order.
        positions: of the inputs of a call that it reads.
        steps: functions without arguments that run the segments.
        slots: the values of the present step; empty between steps.
        prepare: called with the inputs before each replay, on its stream, to fill copies of inputs
            or to poison memory; None for nothing. May be set.
        not_zeroed: called at each padded replay where which results have rows is unknown; may be
            set.
        replays: how many there were, without the capturing call.
        held: memory from outside of the pool that captured ops touched, kept alive: a replay never
            reads what was freed. May be set.
        watched: the part of it that :meth:`check_held` compares.
        padding: padded rows of the capture and of replays whose caller passed how many are real.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode():
        ...     y = model(x), model(x)
        >>> print(model.backend.graphs[-1].recordings[0].sequence.text())
        graph step
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        inputs: Sequence[tuple[Slot, int]] = (),
        slots: int = 0,
        kept: Collection[Slot] = (),
        name: str = "step",
        batch: str = "",
        *,
        pool: GraphPool | None = None,
        rows: int = 0,
    ) -> None:
        self.segments = tuple(segments)
        self.name, self.batch, self.rows = name, batch, rows
        self.prepare: Callable[[Sequence[Any]], None] | None = None
        self.held: Sequence[HeldMemory] = ()
        self.watched: Sequence[HeldMemory] = ()
        self.replays = self.padding = 0
        self._pool = pool
        self._stream_key = None if pool is None else pool.device.stream_key
        self.slots: list[Any] = [None] * slots
        self._empty = [None] * slots
        self._inputs = tuple((slot.at, position) for slot, position in inputs)
        self.positions = {position for _, position in inputs}
        self.not_zeroed: Callable[[], None] | None = None
        self._real = [0]  # how many rows are real in the present step
        # A piece, or a whole step, is one graph without slots.
        done = self._done_after({slot.at for slot in kept}) if slots else [[] for _ in segments]
        steps, padded_steps = [], []
        for segment, ends in zip(self.segments, done, strict=True):
            steps.append(self._step(segment, ends, False))
            tails = isinstance(segment, EagerSegment) and segment.tails
            padded_steps.append(self._step(segment, ends, True) if tails else steps[-1])
        self.steps, self._padded_steps = tuple(steps), tuple(padded_steps)

    # -------------------------------------------------------------- memory from outside

    def watch(self, compared: Collection[torch.UntypedStorage]) -> None:
        """Watch the held memory, except storages that are ``compared`` elsewhere."""
        elsewhere = set(map(storage_identity, compared))
        self.watched = [row for row in self.held if storage_identity(row.storage) not in elsewhere]

    def dropped(self) -> str | None:
        """Return the layout of a watched tensor that was dropped or resized; None without one."""
        for storage, start, layout in self.watched:
            if is_held_here_alone(storage) or storage.data_ptr() != start:
                return layout_text(Placed(start, layout))
        return None

    def check_held(self) -> None:
        """Raise AddressChangedError for watched memory that the program dropped or resized."""
        layout = self.dropped() if self.watched else None
        if layout is not None:
            raise AddressChangedError.dropped(what=self.name, batch=self.batch, layout=layout)

    # -------------------------------------------------------------- what it consists of

    @property
    def num_graphs(self) -> int:
        """How many recordings there are."""
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_eager_breaks(self) -> int:
        """How many functions run between them."""
        return len(self.segments) - self.num_graphs

    def text(self) -> str:
        """One line for each segment, in order."""
        kinds = {GraphSegment: "graph", EagerSegment: "eager"}
        return "\n".join(f"{kinds[type(item)]} {item.name}" for item in self.segments)

    @cached_property
    def label(self) -> str:
        """The name of a replay for profilers; equal in all processes and runs of a model."""
        return self._labelled(self.name)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of segments for profilers: breaks without the batch, so that they add up."""
        if len(self.segments) == 1 and self.num_graphs:
            return (self.label,)
        return tuple(
            self._labelled(f"piece_{index}")
            if isinstance(segment, GraphSegment)
            else f"cgcompile/break_{index} {segment.what or segment.name}"
            for index, segment in enumerate(self.segments)
        )

    def _labelled(self, name: str) -> str:
        return f"cgcompile/{name} [{self.batch}]" if self.batch else f"cgcompile/{name}"

    # -------------------------------------------------------------- replay

    def replay(
        self,
        inputs: Sequence[Any] = (),
        real: int | None = None,
        runner: SegmentRunner | None = None,
    ) -> list[Any]:
        """Run all segments on the current stream, and count that. Nothing synchronises.

        Args:
            inputs: of this call, where eager segments or :attr:`prepare` read them.
            real: how many rows of the batch are real, if that is known.
            runner: runs each step in place of the loop; for debugging.

        Returns:
            The slots, to be read before :meth:`clear`.

        Raises:
            BaseException: what an eager segment raised; the slots are empty then.
        """
        key, pool = self._stream_key, self._pool
        if key is not None and pool is not None and key() != pool.stream_key:
            pool.follow_stream()
        if self.prepare is not None:
            self.prepare(inputs)
        slots, steps = self.slots, self.steps
        for slot, position in self._inputs:
            slots[slot] = inputs[position]
        padding = 0
        if real is not None and real < self.rows:
            padding = self.rows - real
            self._real[0], steps = real, self._padded_steps
            if self.not_zeroed is not None:
                self.not_zeroed()
        try:
            if runner is not None:
                for index, step in enumerate(steps):
                    runner(index, step)
            elif is_profiling() or OBSERVERS.get():  # read once a step, not once a segment
                run_observed(self, steps)
            else:
                for step in steps:
                    step()
        except BaseException:
            self.clear()
            raise
        self.replays += 1
        self.padding += padding
        return slots

    def run_once(self) -> None:
        """Run all segments on the current stream, just after the capture; that is not counted."""
        if self._pool is not None:
            self._pool.follow_stream()
        if is_profiling() or any([block.captures for block in OBSERVERS.get()]):
            run_observed(self, self.steps)
        else:
            for step in self.steps:
                step()

    @property
    def is_one_graph(self) -> bool:
        """Whether a replay runs one graph and fills no memory: see :data:`REPLAY_OF_ONE`."""
        plain = self.prepare is None and not self._inputs and self._pool is not None
        return plain and len(self.steps) == self.num_graphs == 1

    def names_of_one(self) -> dict[str, Any]:
        """Return the names in :data:`REPLAY_OF_ONE`, without the ``context`` of the call."""
        return {
            "sequence": self,
            "replay": self.steps[0],
            "pool": self._pool,
            "stream_key": self._stream_key,
            "profiler": PROFILING[1],
            "observers": OBSERVERS.get,
            "run_observed": run_observed,
            "rows": self.rows,
        }

    def fill(self, index: int) -> None:
        """Fill the copies of 0-dim CPU tensors of a graph segment that is not replayed itself."""
        segment, slots = self.segments[index], self.slots
        for buffer, source in segment.scalars if isinstance(segment, GraphSegment) else ():
            buffer.fill(slots[source.at] if isinstance(source, Slot) else source)

    def clear(self) -> None:
        """Drop the values of the step, so that tensors of callers are not kept alive."""
        self.slots[:] = self._empty

    # -------------------------------------------------------------- steps

    def _done_after(self, kept: set[int]) -> list[list[int]]:
        """Return the slots that each segment is the last one to use."""
        last: dict[int, int] = {}
        for index, segment in enumerate(self.segments):
            used = segment.reads
            if isinstance(segment, EagerSegment):
                used |= {slot.at for _, slot in (*segment.originals, *segment.stores)}
            last.update(dict.fromkeys(used, index))
        done: list[list[int]] = [[] for _ in self.segments]
        kept = kept | {slot for slot, _ in self._inputs}
        for slot in last.keys() - kept:
            done[last[slot]].append(slot)
        return done

    def _step(self, segment: Segment, done: list[int], padded: bool) -> Callable[[], Any]:
        """Return a function that runs a segment and empties slots without later users."""
        if isinstance(segment, GraphSegment):
            return self._graph_step(segment, done)
        call = self._call(segment)
        tails = segment.tails if padded else ()
        handed_on = segment.originals or segment.crossings or segment.stores
        if not (handed_on or tails or done):
            return call
        slots, count = self.slots, self._real  # not self, which would be a cycle

        def run() -> None:
            results = segment.leaves(call())
            for item, slot in segment.originals:
                slots[slot.at] = results[item]
            for crossing in segment.crossings:
                crossing(results)
            for item, slot in segment.stores:
                slots[slot.at] = results[item]
            for tail in tails:
                tail[count[0] :].zero_()
            for index in done:
                slots[index] = None

        return run

    def _graph_step(self, segment: GraphSegment, done: list[int]) -> Callable[[], Any]:
        replay, slots = segment.graph.replay, self.slots
        if not segment.scalars:
            return replay

        def run() -> None:
            for buffer, source in segment.scalars:
                buffer.fill(slots[source.at] if isinstance(source, Slot) else source)
            replay()
            for index in done:
                slots[index] = None

        return run

    def _call(self, segment: EagerSegment) -> Callable[[], Any]:
        """Return the function of a segment with its arguments bound."""
        function, args = segment.function, segment.args
        live = tuple([isinstance(arg, Slot) for arg in args])
        if not any(live):
            return partial(function, *args, **segment.kwargs)
        if segment.kwargs:
            function = partial(function, **segment.kwargs)
        bound = [arg.at if isinstance(arg, Slot) else arg for arg in args]
        return _binder(live)(function, self.slots, *bound)


@cache
def _binder(live: tuple[bool, ...]) -> Callable[..., Callable[[], Any]]:
    """Return what binds arguments: ``(function, slots, *args) -> (() -> result)``."""
    # Text, so that a call builds no list: ``lambda: function(a0, slots[a1], a2)``.
    names = [f"a{index}" for index in range(len(live))]
    values = [f"slots[{a}]" if is_slot else a for a, is_slot in zip(names, live, strict=True)]
    parameters, values_text = ", ".join(["function", "slots", *names]), ", ".join(values)
    return function_of(f"def bind({parameters}):\n    return lambda: function({values_text})\n", {})


# ---------------------------------------------------------------- observers of replays

Observer = Callable[[Any, int | None], AbstractContextManager[Any]]
"""Called with a sequence that is replayed and the index of a segment, or None for all of it.

Returns a context around that. A sequence has a ``label``, and ``labels``, one for each segment.
"""


@dataclass
class _Observing:
    """A block of :func:`observing`. A task that began inside keeps it after it has ended."""

    observer: Observer
    thread: int
    captures: bool  # whether it sees the execution that is a part of a capture
    ended: bool = False


# Observers of this thread, and of tasks that began inside of their blocks.
OBSERVERS: ContextVar[tuple[_Observing, ...]] = ContextVar("cgcompile_observers", default=())


@contextmanager
def observing(observer: Observer, captures: bool = True) -> Iterator[None]:
    """Let an observer see the replays of this thread or task, beside those around it."""
    block = _Observing(observer, get_ident(), captures)
    token = OBSERVERS.set((*OBSERVERS.get(), block))
    try:
        yield
    finally:
        block.ended = True
        OBSERVERS.reset(token)


def run_observed(sequence: Any, steps: Sequence[Callable[[], Any]]) -> None:
    """Run the steps of a sequence inside of the contexts of its observers."""
    thread, blocks = get_ident(), OBSERVERS.get()
    observers = [b.observer for b in blocks if b.thread == thread and not b.ended]
    if torch_settings.is_profiling():
        observers.insert(0, _named_ranges(torch.profiler.record_function))

    def observed(index: int | None) -> ExitStack:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer(sequence, index))
            return stack.pop_all()

    with observed(None):
        for index, step in enumerate(steps):
            with observed(index):
                step()


def _named_ranges(named: Callable[[str], AbstractContextManager[Any]]) -> Observer:
    """Return an observer with a range around each segment, and around all if there are several."""

    def around(sequence: Any, index: int | None) -> AbstractContextManager[Any]:
        if index is not None:
            return named(sequence.labels[index])
        # the range of a single segment has the same name
        return named(sequence.label) if len(sequence.labels) > 1 else nullcontext()

    return around


@contextmanager
@checked
def tracing_ranges(
    push: Callable[[str], Any] = torch.cuda.nvtx.range_push,
    pop: Callable[[], Any] = torch.cuda.nvtx.range_pop,
) -> Iterator[None]:
    """Context manager: replays push an NVTX range around each piece and break, for Nsight Systems.

    Torch's own profiler shows the ranges without it. Whether Nsight records cannot be queried,
    hence the context. It holds in this thread or task, and in tasks that begin inside of it, until
    it is left; replays outside of it cost nothing more. Nothing synchronises.

    Args:
        push: opens a range of a name; for other profilers, such as
            ``torch.profiler.itt.range_push``.
        pop: closes the last one.

    Raises:
        CaptureError: this torch was built without NVTX.
        ConfigError: something that cannot be called.

    Example:
        >>> names = []
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode():
        ...     y = model(x), model(x)
        ...     with cgcompile.debug.tracing_ranges(names.append, lambda: None):
        ...         y = model(x)
        >>> len(names)
        2
    """
    try:
        push("cgcompile/ranges")
        pop()
    except RuntimeError as error:
        raise CaptureError.no_ranges(found=str(error).strip().splitlines()[0]) from error

    @contextmanager
    def pushed(name: str) -> Iterator[None]:
        push(name)
        try:
            yield
        finally:
            pop()

    with observing(_named_ranges(pushed)):
        yield


# ---------------------------------------------------------------- bridges to graph segments


class Place(NamedTuple):
    """One result of an eager segment, for messages."""

    segment: str
    batch: str
    item: int
    name: str

    @property
    def path(self) -> str:
        return f"result {self.item} {self.name!r}"

    def changed(self, now: Any, before: Any) -> GuardError:
        return Change(self.path, before, now).error(self.segment, self.batch)

    def check_layout(self, value: Any, expected: torch.Tensor) -> None:
        if not same_layout(value, expected):
            raise self.changed(layout_text(value), layout_text(expected))


Bridges = list[tuple[Block, list[str]]]
"""Bridges, each with the names of the results that cross in it."""


def crossings(
    places: Sequence[Place],
    outputs: Sequence[Any],
    read: Collection[str],  # names of the results that are read at a fixed address
    lasting: Collection[str],  # those that must stay where they are, if that is fixed
    fixed: set[int],  # fixed addresses; addresses of new bridges are added
    frame: Frame,
) -> tuple[list[Crossing], Bridges]:
    """Return the crossings of the results ``outputs`` of a break, and their bridges."""
    across: list[Crossing] = []
    bridges: Bridges = []
    reads = Reads()  # of results that must be as they were
    fresh: dict[int, list[Place]] = {}
    for position in places:
        value = outputs[position.item]
        if not isinstance(value, torch.Tensor):
            if position.name in read:
                compare = reads.value if is_plain_value(value) else reads.identity
                compare(position.path, f"results[{position.item}]", value)
        elif address(value) in fixed:
            if position.name in read or position.name in lasting:
                reads.tensor(position.path, f"results[{position.item}]", value)
        else:
            fresh.setdefault(address(value) or -1 - position.item, []).append(position)
    if reads.rows:
        reads.held.clear()  # a caller may free it
        check = Contract("results", reads, "input").check
        across.append(partial(check, places[0].segment, places[0].batch))
    for members in fresh.values():
        if any(position.name in read for position in members):
            result = any(position.name in lasting for position in members)
            values = [outputs[position.item] for position in members]
            if len(members) == 1:
                block, crossing = _bridge(members[0], values[0], frame, result)
            else:
                block, crossing = _shared_bridge(members, values, frame, result)
            across.append(crossing)
            bridges.append((block, [position.name for position in members]))
            fixed.add(block.address)
    return across, bridges


def _bridge(
    position: Place, value: torch.Tensor, frame: Frame, result: bool
) -> tuple[Block, Crossing]:
    """Return a function that copies a new result to the address that later graphs read."""
    buffer = OwnedCopy(value, frame, result=result)
    item, target, any_layout = position.item, buffer.tensor, buffer.takes_any_layout
    shape, dtype, device, layout = target.shape, target.dtype, target.device, target.layout

    def cross(results: list[Any]) -> None:
        value = results[item]
        if not (
            any_layout
            and isinstance(value, torch.Tensor)
            and value.shape == shape
            and value.dtype is dtype
            and value.device == device
            and value.layout is layout
        ):
            position.check_layout(value, target)
        buffer.fill(value)
        results[item] = target

    return buffer.block, cross


def _shared_bridge(
    places: Sequence[Place], values: Sequence[torch.Tensor], frame: Frame, result: bool
) -> tuple[Block, Crossing]:
    """Return a function that copies the memory that several new results share."""
    first, last = stretch(values)
    starts = _offsets(values, first)
    block = frame.allocate(last - first, values[0].device, result)
    memory = block.memory[: last - first]
    views = [
        OwnedCopy(value, frame, within=(block, start)).tensor
        for value, start in zip(values, starts, strict=True)
    ]

    def cross(results: list[Any]) -> None:
        values = [results[position.item] for position in places]
        for position, value, view in zip(places, values, views, strict=True):
            position.check_layout(value, view)
        first, last = stretch(values)
        one_memory = len({address(value) for value in values}) == 1
        if not one_memory or _offsets(values, first) != starts:
            raise places[0].changed("memory shared in another way", "not")
        source = torch.empty(0, dtype=torch.uint8, device=values[0].device)
        source.set_(values[0].untyped_storage(), first, (last - first,), (1,))
        memory.copy_(source, non_blocking=True)
        for position, view in zip(places, views, strict=True):
            results[position.item] = view

    return block, cross


def _offsets(tensors: Sequence[torch.Tensor], first: int) -> list[Any]:
    """Return where each tensor begins, in bytes after ``first``."""
    return [tensor.storage_offset() * tensor.element_size() - first for tensor in tensors]


class SameOnHost:
    """Compare a CPU tensor with its value at capture, if a graph of another device reads it."""

    # No row of a contract: only the end of a recording shows whether a graph reads it.

    def __init__(self, position: Place, value: torch.Tensor) -> None:
        self.is_read = False
        self._place = position
        self._before = value.detach().clone()
        self._bytes = numbers_as_bytes(self._before)

    def __call__(self, results: list[Any]) -> None:
        if not self.is_read:
            return
        value = results[self._place.item]
        self._place.check_layout(value, self._before)
        if not torch.equal(numbers_as_bytes(value), self._bytes):
            raise self._place.changed(value.tolist(), self._before.tolist())
