"""The weight sets of one compiled graph, each with the steps recorded for it.

Dynamo gives two instances of a class one compiled graph, and passes the parameters at every call. A
CUDA graph holds the addresses of one set of them. So recordings are kept per *weight set*: the very
objects of all parameters, buffers and module attributes, and, where inputs are copied, the
addresses of the inputs that the step mutates, which cannot be copied (a key-value cache passed as
an argument). A weight set is dropped when one of its objects dies.
"""

import operator
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from cgcompile.config import CUDAGraphMode
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import captured_elsewhere, is_comparable
from cgcompile.graphs.steps import Steps
from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.runtime.program import Program
from cgcompile.runtime.recording import Recording, Static
from cgcompile.torch_compat import raw_memory, torch_ops

_MOST_SEEN = 4096  # shapes whose warm-up is counted, per weight set
_MOST_PLAIN = 256  # results of steps without graphs that are known
_MOST_IDLE = 1024  # most weight sets without graphs that are kept; they hold a few bytes
MOVED = 3  # times in a row that weights moved, before that is a fallback

# A bulk capture collects garbage once; a piece is one of dozens of a step.
_OPTIONS = CUDAGraphOptions(debug_log_enable=False, gc_disable=True)


class WeightSet:
    """One set of weights, and what was recorded for it."""

    def __init__(self, program: Program, weights: Hashable) -> None:
        self._program = program
        self.weights = weights  # equal for the same weights with other mutated inputs
        self.steps = Steps[Hashable, Recording](attempts=1)  # each key is warmed before
        self.dropped: Counter[Hashable] = Counter()  # recordings whose chained input moved, by key
        self.seen: dict[Hashable, int] = {}  # warming calls by key
        self.new_in_a_row = self._served = 0  # calls in a row with a key that no call had before
        self.varying: tuple[str, Sequence[Any]] | None = None  # a number, and values of these calls
        self.moved_in_a_row = 0  # calls in a row in which a weight had moved
        self.unsettled = False  # a warming call must show that the weights stay
        self.shares_results = False  # graphs of other weights could write to its results' memory
        self.static = Static({}, (), frozenset())
        self._held: list[torch.UntypedStorage] = []
        # Where the weights are, which ``module.to()`` and ``weight.data = ...`` move.
        self.addresses = raw_memory.Addresses((), ())
        self._last: list[int] | None = None  # addresses of watched weights at the last call
        self._mutated: list[raw_memory.StorageLife] = []

    def hold(
        self,
        inputs: Sequence[Any],
        static: Sequence[int],
        watched: Sequence[int],
        mutated: Sequence[int],
    ) -> None:
        """Prepare for the first capture: graphs read the weights and mutated inputs in place."""
        # The memory of weights is held. A mutated input may be freed, and its graphs with it.
        self._held = [inputs[position].untyped_storage() for position in static]
        starts = [0] * len(inputs)
        for position in static:
            starts[position] = address(inputs[position])
        positions = {id(inputs[position]): position for position in reversed(static)}
        weights = filter(is_comparable, [inputs[position] for position in static])
        self.static = Static(positions, starts, frozenset(map(id, weights)))
        self.addresses = raw_memory.Addresses(inputs, watched)
        self._mutated = [raw_memory.StorageLife(inputs[position]) for position in mutated]

    def follow(self, inputs: Sequence[Any], watched: Sequence[int]) -> tuple[int, ...]:
        """Return the positions of weights that moved since the last call; before a capture."""
        # Warming calls count from the last move: a step may move a weight each time.
        before, self._last = self._last, [inputs[position].data_ptr() for position in watched]
        if before is None or before == self._last:
            self.moved_in_a_row = 0
            return ()
        self.moved_in_a_row += 1
        self.seen.clear()
        pairs = zip(watched, before, self._last, strict=True)
        return tuple([position for position, was, now in pairs if was != now])

    def release(self) -> None:
        """Release the memory of the weights: no step of this set is replayed any more."""
        self._held, self.static = [], Static({}, (), frozenset())

    @property
    def outlived(self) -> bool:
        """Whether memory of a mutated input that graphs were captured for has been freed."""
        return any(life.ended for life in self._mutated)

    @cached_property
    def wrappers(self) -> dict[int, CUDAGraphWrapper]:
        """The wrappers of the captured pieces, by index; recordings replay their entries."""
        split, runnables = self._program.split, self._program.runnables
        wrappers = {
            piece.index: self._wrapper(runnables[piece.index], CUDAGraphMode.PIECEWISE, piece.name)
            for piece in split.pieces
            if piece.capture
        }
        for index in self._program.reads_more:
            wrappers[index].notes_memory = True
        return wrappers

    @cached_property
    def full(self) -> CUDAGraphWrapper:
        """The wrapper of the whole step."""
        return self._wrapper(self._program.run_full, CUDAGraphMode.FULL, "step")

    def _wrapper(
        self, runnable: Callable[..., Any], mode: CUDAGraphMode, name: str
    ) -> CUDAGraphWrapper:
        config, pool = self._program.config, self._program.pool
        return CUDAGraphWrapper(
            runnable, config, mode, _OPTIONS, pool=pool, name=name, guarded=False
        )

    @property
    def recorded(self) -> list[Recording]:
        """The recorded steps; a copy, as another thread may capture."""
        return list(self.steps)

    @property
    def captured(self) -> int:
        """The number of recorded steps."""
        return len(self.recorded)

    @property
    def replays(self) -> int:
        return sum([recording.sequence.replays for recording in self.recorded])

    def count_warming(self, key: Hashable) -> int:
        """Count a warming call of ``key``; return how many there were before."""
        before, served = self.seen.get(key, 0), self.captured + self.replays
        in_a_row = self.new_in_a_row if served == self._served else 0
        self.new_in_a_row, self._served = (0 if before else in_a_row + 1), served
        if self.new_in_a_row <= 1:
            self.varying = None
        if before == 0 and len(self.seen) >= _MOST_SEEN:
            del self.seen[next(iter(self.seen))]
        self.seen[key] = before + 1
        return before


class WeightSets:
    """The weight sets of one compiled graph, by the inputs of a call."""

    def __init__(
        self,
        program: Program,
        on_drop: Callable[[], None],  # called when a set is dropped, maybe inside of a collection
        static: Sequence[int],  # positions of parameters, buffers and module attributes
    ) -> None:
        self._program, self._on_drop = program, on_drop
        self._static, self._is_static = tuple(static), frozenset(static)
        self._watched = tuple([each for each in static if not program.is_frozen(each)])
        self._objects = picker(self._watched)
        self._ranges = _ranges(self._watched)
        size = len(raw_memory.identities((None,)))
        self._slices = [slice(first * size, last * size) for first, last in self._ranges]
        self._known: dict[Hashable, WeightSet] = {}
        self._references: dict[Hashable, list[weakref.ref[Any]]] = {}
        self._dead: list[WeightSet | Recording] = []
        self._plain: deque[tuple[int, bytes, raw_memory.StorageLife]] = deque(maxlen=_MOST_PLAIN)
        self._dropped_idle = 0  # weight sets without graphs, since the last capture
        self._unused: Hashable = None  # the last dropped one, if its graphs were never replayed
        self._unused_in_a_row = 0
        self._added: tuple[int, ...] = ()  # the identities of the weights that were added last
        self.replaced: tuple[int, ...] = ()  # positions that differed in the last two weight sets
        self._last: tuple[Hashable, WeightSet | None] = (None, None)

    def __iter__(self) -> Iterator[WeightSet]:
        return iter(tuple(self._known.values()))

    def find(
        self, inputs: tuple[Any, ...], mutated: Sequence[int]
    ) -> tuple[Hashable, WeightSet | None]:
        """Return (key, weight set) of a call; without a context, ``mutated`` inputs are bound."""
        # It chooses graphs: other weights are no difference to refuse, so there is no contract.
        key: Hashable = self._weights(inputs)
        if mutated:
            key = (key, *(inputs[position].data_ptr() for position in mutated))
        if key != self._last[0]:  # comparing is much cheaper than hashing some kilobytes
            self._last = key, self._known.get(key)
        weight_set = self._last[1]
        if weight_set is None:
            return key, None
        if not weight_set.steps:
            moved = weight_set.follow(inputs, self._watched)
            self.replaced = moved or self.replaced
            return key, weight_set
        strict = bool(mutated) and self._program.pool.device.notices_freed
        if weight_set.addresses.hold(inputs) and not (strict and weight_set.outlived):
            return key, weight_set
        if not weight_set.captured:  # the step itself may move them, and has no graph for that
            return key, weight_set
        unused = not weight_set.replays
        self._unused = key if unused else None
        self._unused_in_a_row = self._unused_in_a_row + 1 if unused else 0
        self._drop(key)
        return key, None

    def _weights(self, inputs: tuple[Any, ...]) -> bytes:
        identities = raw_memory.identities(inputs)
        return b"".join([identities[part] for part in self._slices])

    def ran_plain(self, inputs: tuple[Any, ...], result: Any) -> None:
        """Note the results of a step that ran without graphs under a forward context."""
        if len(self._known) < 2:
            return
        dynamic = [each for position, each in enumerate(inputs) if position not in self._is_static]
        starts = {address(tensor) for tensor in torch_ops.tree_tensors(dynamic)}
        weights = self._weights(inputs)
        for leaf in filter(raw_memory.is_plain_tensor, torch_ops.tree_tensors(result)):
            if address(leaf) not in starts:
                self._plain.append((address(leaf), weights, raw_memory.StorageLife(leaf)))

    def is_plain_result(self, weight_set: WeightSet, start: int) -> bool:
        """Return whether a step of other weights returned this memory without a graph."""
        return any(
            at == start and weights != weight_set.weights and not life.ended
            for at, weights, life in [*self._plain]  # another thread may add to it
        )

    def checks(
        self, weight_set: WeightSet, inputs: tuple[Any, ...]
    ) -> list[Callable[[tuple[Any, ...]], bool]]:
        """Return predicates that are true for a call with the same weights in place."""
        if not self._watched:
            return []
        same = raw_memory.SameObjects(inputs, self._ranges)
        return [same.hold, weight_set.addresses.hold]

    def add(self, key: Hashable, inputs: tuple[Any, ...]) -> WeightSet:
        """Add a weight set for a new key; the oldest one without graphs may be dropped."""
        self.release_dropped()
        idle = [known for known, each in list(self._known.items()) if not each.captured]
        if len(idle) >= _MOST_IDLE:
            self._drop(idle[0])
        weights = key[0] if isinstance(key, tuple) else key
        weight_set = self._known[key] = WeightSet(self._program, weights)
        weight_set.follow(inputs, self._watched)
        weight_set.unsettled = self._unused == key and self._unused_in_a_row >= MOVED
        self._unused = None
        self._last = None, None
        objects = self._objects(inputs)
        before, self._added = self._added, tuple(map(id, objects))
        pairs = zip(self._watched, before, self._added, strict=False)  # nothing before the first
        self.replaced = tuple([position for position, one, other in pairs if one != other])
        reference = weakref.ref(self)

        def died(_: Any) -> None:
            weight_sets = reference()
            if weight_sets is not None:
                weight_sets._drop(key)

        self._references[key] = [weakref.ref(each, died) for each in objects]
        return weight_set

    def hold(self, weight_set: WeightSet, inputs: tuple[Any, ...], mutated: Sequence[int]) -> None:
        """Prepare for the first capture for a weight set."""
        weight_set.hold(inputs, self._static, self._watched, mutated)
        self._dropped_idle = 0

    def owner(self, weight_set: WeightSet, own_context: bool) -> Hashable:
        """Return the owner of results, before a capture; None for the only weight set.

        Note [Results of several weight sets]: layers of one class share a compiled graph, and the
        result of one is the input of the next. So a result under a forward context stays valid
        until the next call *with its weights*: where there are several weight sets, a replay copies
        results out of the memory that all graphs use for intermediates, into blocks of its weight
        set. Recordings of a time with one weight set do not copy: from the second one on they keep
        all their memory to themselves, and captures take new memory. With ``own_context``, results
        are copied for the caller.
        """
        others = [each for each in self if each.weights != weight_set.weights]
        for other in others:
            if other.shares_results:
                self._program.pool.renew()
                for recording in other.recorded:
                    recording.frame.reserve(other.weights)
                other.shares_results = False
        if not others and not own_context:
            weight_set.shares_results = True
        return weight_set.weights if others else None

    def keeps(self, weight_set: WeightSet, start: int) -> bool:
        """Return whether the graphs of a weight set leave this memory of the pool unchanged."""
        pool = self._program.pool
        if pool.arena.owns(start):
            return pool.arena.owner_of(start) not in (None, weight_set.weights)
        return not pool.captures_into(start)

    def drop_recording(self, weight_set: WeightSet, key: Hashable) -> None:
        """Drop a recorded step; its graphs are freed before the next capture."""
        (recording,) = weight_set.steps.captured.pop(key)
        weight_set.dropped[key] += 1
        for wrapper, entry in recording.kept:
            wrapper.drop(entry)
        self._dead.append(recording)

    @property
    def idle(self) -> int:
        """The number of weight sets seen without graphs, including those dropped."""
        return self._dropped_idle + sum(not each.captured for each in self)

    @property
    def captured(self) -> int:
        """The number of weight sets with graphs; sets of freed memory are dropped first."""
        for key, weight_set in list(self._known.items()):
            if weight_set.outlived:
                self._drop(key)
        self.release_dropped()
        return sum(weight_set.captured > 0 for weight_set in self)

    def release_dropped(self) -> None:
        """Release the graphs of dropped weight sets, if no capture runs."""
        if self._dead and not captured_elsewhere():
            self._program.pool.device.synchronize()  # a replay may still run on any stream
            self._dead.clear()

    def release(self) -> None:
        """Drop all weight sets, and the memory of their weights."""
        self._last = None, None
        for weight_set in self:
            weight_set.release()
        self._on_drop()
        self._known.clear()
        self._references.clear()
        self._dead.clear()
        self._plain.clear()

    def _drop(self, key: Hashable) -> None:
        """Drop a weight set, maybe inside of a garbage collection: graphs are freed later."""
        self._last = None, None
        weight_set = self._known.pop(key, None)
        if weight_set is not None:
            weight_set.release()
            self._on_drop()
            if all(each.weights != weight_set.weights for each in self):
                self._program.pool.arena.drop(weight_set.weights)
            if weight_set.steps:
                self._dead.append(weight_set)
            else:
                self._dropped_idle += 1
        self._references.pop(key, None)


def _ranges(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending positions as ranges: ``(0, 2, 3)`` is ``[(0, 1), (2, 4)]``."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges


def picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes these items out of a tuple, as a tuple, without a loop."""
    if not positions:
        return lambda items: ()
    first, last = positions[0], positions[-1] + 1
    if list(positions) == list(range(first, last)):
        return operator.itemgetter(slice(first, last))
    return operator.itemgetter(*positions)
