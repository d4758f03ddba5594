"""What one batch recorded: :class:`GraphSequence`, graph segments and eager segments in order.

FULL capture, capture of FX pieces and breakable capture all end here; they differ in who makes the
breaks. A replay is one loop over steps without arguments: a graph's ``replay``, or a function with
everything bound that it was called with. :meth:`GraphSequence.replay` is the only way to replay:
stream order, poison, the copies of inputs, observers and the count are written there, once;
:data:`REPLAY_OF_ONE` is the same of a single graph as text. Where each value of a step comes from:

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
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch

from cgcompile.graphs.arena import ScalarCopy
from cgcompile.graphs.device import DeviceGraph
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.profiling import OBSERVERS, run_observed
from cgcompile.torch_compat import PROFILING, is_profiling

Crossing = Callable[[list[Any]], None]
"""Called with the results of an eager segment; puts in place what the graphs after it read."""


class Slot(NamedTuple):
    """A value of the present step: an input of this call, or what an eager segment just made."""

    at: int


@dataclass(frozen=True, eq=False)
class GraphSegment:
    """A recording between two eager segments.

    Attributes:
        name: for messages.
        graph: the recording.
        scalars: (buffer, source) of the 0-dim CPU tensors that it reads: each buffer is filled from
            its source, a tensor or a slot, before a replay.
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
        leaves: its results as a list, from what it returned.
        originals: (item, slot) of results that are handed on as the function made them.
        crossings: what brings results to the graphs that read them.
        stores: (item, slot) of results that are handed on as the crossings left them.
        tails: tensors [N, ...] of N padded rows, of which those that are not real are zeroed.
        what: what it runs, for profilers; its name if left out.
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
        return {each.at for each in self.args if isinstance(each, Slot)}


Segment = GraphSegment | EagerSegment

StepObserver = Callable[[int, Callable[[], Any]], Any]
"""Called with the index and the step of each segment; runs the step, or does its work."""


@dataclass(slots=True)
class StepStats:
    """What the replays of one recorded step come to; its capturing call is not counted.

    Attributes:
        replays: how many there were.
        padding: rows of all of them that were padding, as far as callers passed the real ones.
    """

    replays: int = 0
    padding: int = 0


# ``GraphSequence.replay`` of a sequence for which ``is_one_graph`` holds; see ``names_of_one``.
REPLAY_OF_ONE = f"""\
if stream_key() != pool.stream_key:
    pool.follow_stream()
if {PROFILING[0]} or observers():
    run_observed(sequence, sequence.steps)
else:
    replay()
stats.replays += 1
real = context.num_unpadded_tokens
if real is not None and real < rows:
    stats.padding += rows - real
"""


class GraphSequence:
    """The segments of one recorded step, to be replayed in order.

    Not thread-safe: the owner of the pool lets one step run at a time.

    Args:
        segments: in order.
        inputs: (slot, position) of the inputs of a call that eager segments read.
        slots: how many slots there are.
        kept: slots that are read after the replay.
        name: of what was recorded, for profilers; may be set until a profiler reads it.
        batch: what it was recorded for, as text, likewise.
        pool: the memory of the graphs; None: the caller orders streams.
        rows: of the captured batch, padding included.

    Attributes:
        segments: in order.
        positions: of the inputs of a call that it reads.
        steps: what runs for each of them.
        slots: the values of the present step; empty between steps.
        rows: as given; may be set.
        prepare: called with the inputs before each replay, on the stream of the replay: fills
            copies of inputs, poisons memory. None for nothing; set by what records.
        stats: counts the replays.
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
        self.stats = StepStats()
        self._pool = pool
        self._stream_key = None if pool is None else pool.device.stream_key
        self.steps: tuple[Callable[[], Any], ...]
        self.slots: list[Any] = [None] * slots
        self._empty = [None] * slots
        self._inputs = tuple((slot.at, position) for slot, position in inputs)
        self.positions = {position for _, position in inputs}
        self._real = [0]  # how many rows are real in the present step
        replays = [
            each.graph.replay
            for each in self.segments
            if isinstance(each, GraphSegment) and not each.scalars
        ]
        if len(replays) == len(self.segments):  # as that of every piece
            self.steps = self._padded_steps = tuple(replays)
            return
        done = self._done_after({slot.at for slot in kept})
        pairs = [*zip(self.segments, done, strict=True)]
        self.steps = tuple([self._step(each, ends, False) for each, ends in pairs])
        self._padded_steps = tuple(
            [
                self._step(each, ends, True) if isinstance(each, EagerSegment) and each.tails else s
                for (each, ends), s in zip(pairs, self.steps, strict=True)
            ]
        )

    # -------------------------------------------------------------- what a user may ask

    @property
    def num_graphs(self) -> int:
        """How many recordings there are."""
        return sum(isinstance(each, GraphSegment) for each in self.segments)

    @property
    def num_eager_breaks(self) -> int:
        """How many functions run between them."""
        return len(self.segments) - self.num_graphs

    def text(self) -> str:
        """One line for each segment, in order."""
        kinds = {GraphSegment: "graph", EagerSegment: "eager"}
        return "\n".join(f"{kinds[type(each)]} {each.name}" for each in self.segments)

    @cached_property
    def label(self) -> str:
        """What profilers call a replay of it; equal in all processes and runs of a model."""
        return self._labelled(self.name)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """What profilers call each segment: breaks without the batch, so that they add up."""
        if len(self.segments) == 1 and self.num_graphs:
            return (self.label,)
        found = []
        for place, each in enumerate(self.segments):
            if isinstance(each, GraphSegment):
                found.append(self._labelled(f"piece_{place}"))
            else:
                found.append(f"cgcompile/break_{place} {each.what or each.name}")
        return tuple(found)

    def _labelled(self, name: str) -> str:
        return f"cgcompile/{name} [{self.batch}]" if self.batch else f"cgcompile/{name}"

    # -------------------------------------------------------------- replay

    def replay(
        self,
        inputs: Sequence[Any] = (),
        real: int | None = None,
        observer: StepObserver | None = None,
    ) -> list[Any]:
        """Run all segments on the current stream, and count that. Nothing synchronises.

        Args:
            inputs: what this call was given, where eager segments or :attr:`prepare` read it.
            real: how many rows of the batch are real, if that is known.
            observer: runs each step in place of the loop; for debugging.

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
        slots, steps, stats = self.slots, self.steps, self.stats
        for slot, position in self._inputs:
            slots[slot] = inputs[position]
        padding = 0
        if real is not None and real < self.rows:
            padding = self.rows - real
            self._real[0], steps = real, self._padded_steps
        try:
            if observer is not None:
                for place, step in enumerate(steps):
                    observer(place, step)
            elif is_profiling() or OBSERVERS.get():  # read once a step, not once a segment
                run_observed(self, steps)
            else:
                for step in steps:
                    step()
        except BaseException:
            self.clear()
            raise
        stats.replays += 1
        stats.padding += padding
        return slots

    @property
    def is_one_graph(self) -> bool:
        """Whether a replay is that of one graph, with nothing to fill: :data:`REPLAY_OF_ONE`."""
        plain = self.prepare is None and not self._inputs and self._pool is not None
        return plain and len(self.steps) == self.num_graphs == 1

    def names_of_one(self) -> dict[str, Any]:
        """What :data:`REPLAY_OF_ONE` refers to, but for the ``context`` of the call."""
        return {
            "sequence": self,
            "replay": self.steps[0],
            "pool": self._pool,
            "stream_key": self._stream_key,
            "profiler": PROFILING[1],
            "observers": OBSERVERS.get,
            "run_observed": run_observed,
            "stats": self.stats,
            "rows": self.rows,
        }

    def fill(self, place: int) -> None:
        """Fill the copies of 0-dim CPU tensors of a graph segment that is not replayed itself."""
        segment, slots = self.segments[place], self.slots
        for buffer, source in segment.scalars if isinstance(segment, GraphSegment) else ():
            buffer.fill(slots[source.at] if isinstance(source, Slot) else source)

    def clear(self) -> None:
        """Forget the values of the step: nothing that a caller made may be kept."""
        self.slots[:] = self._empty

    # -------------------------------------------------------------- steps

    def _done_after(self, kept: set[int]) -> list[list[int]]:
        """For each segment, the slots that it is the last to use."""
        last: dict[int, int] = {}
        for place, each in enumerate(self.segments):
            made: set[int] = set()
            if isinstance(each, EagerSegment):
                made = {slot.at for _, slot in (*each.originals, *each.stores)}
            last.update(dict.fromkeys(each.reads | made, place))
        done: list[list[int]] = [[] for _ in self.segments]
        given = {slot for slot, _ in self._inputs}
        for slot, place in last.items():
            if slot not in kept and slot not in given:
                done[place].append(slot)
        return done

    def _step(self, segment: Segment, done: list[int], padded: bool) -> Callable[[], Any]:
        if isinstance(segment, GraphSegment):
            return self._graph_step(segment, done)
        call = self._call(segment)
        tails = segment.tails if padded else ()
        handed_on = segment.originals or segment.crossings or segment.stores
        if not (handed_on or tails or done):
            return call
        slots, count = self.slots, self._real  # not self: a cycle lives until a collection

        def run() -> None:
            made = segment.leaves(call())
            for item, slot in segment.originals:
                slots[slot.at] = made[item]
            for crossing in segment.crossings:
                crossing(made)
            for item, slot in segment.stores:
                slots[slot.at] = made[item]
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
        """The function of a segment with its arguments bound."""
        slots, function = self.slots, segment.function
        live = [(k, each.at) for k, each in enumerate(segment.args) if isinstance(each, Slot)]
        if not live:
            return partial(function, *segment.args, **segment.kwargs)
        kinds = tuple([isinstance(each, Slot) for each in segment.args])
        given = [each.at if isinstance(each, Slot) else each for each in segment.args]
        if segment.kwargs:
            function = partial(function, **segment.kwargs)
        return _caller(kinds)(function, slots, *given)


@cache
def _caller(live: tuple[bool, ...]) -> Callable[..., Callable[[], Any]]:
    """What makes a call without arguments: ``(function, slots, *given) -> call``.

    Args:
        live: which of the given are slots, whose values are read at each call; as text, so that
            nothing is built, filled in and unpacked again: ``function(a0, slots[a1], a2)``.
    """
    names = [f"a{place}" for place in range(len(live))]
    read = [f"slots[{a}]" if each else a for a, each in zip(names, live, strict=True)]
    text = f"lambda {', '.join(['function', 'slots', *names])}: lambda: function({', '.join(read)})"
    made: Callable[..., Callable[[], Any]] = eval(text)
    return made
