"""Which weights a recorded step belongs to: :class:`Binding`, and all of one compiled graph.

Dynamo gives two instances of a class one compiled graph, and passes the parameters at every call. A
CUDA graph holds the addresses of one set of them. So recordings are kept per *binding*: the very
objects of all parameters, buffers and module attributes, and, where inputs are copied, the
addresses of the inputs that the step writes, which cannot be copied (a key-value cache passed as
an argument). A binding goes when one of its objects dies.
"""

import operator
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CUDAGraphMode
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import captured_elsewhere
from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.reasons import Fallback
from cgcompile.runtime.program import Program
from cgcompile.runtime.recording import Recording

_SEEN = 4096  # shapes whose warm-up is remembered, per binding
_PLAIN = 256  # results of steps without graphs that are remembered
MOVED = 3  # times in a row that weights had other memory, before that is called a reason
_IDLE = 1024  # bindings without graphs that are remembered; they hold next to nothing

# Garbage is collected by whoever captures many graphs; a piece is one of dozens of a step.
_OPTIONS = CUDAGraphOptions(debug_log_enable=False, gc_disable=True)


class Binding:
    """One set of weights, and what was recorded for it.

    Attributes:
        recordings: recorded steps by key; or why a step cannot be recorded.
        seen: how many warming calls each key has had.
        new_in_a_row: how many calls in a row had a key that no call before had.
        varying: the reason that was counted for these calls, or None.
        gone: whether one of its objects has died, or its memory.
        unsettled: whether a warming call must show that the weights stay, whatever the settings.
        moved_in_a_row: how many calls in a row found a weight elsewhere than the call before.
        starts: where the memory of each weight begins, by position, once graphs are captured.
        weights: equal for bindings of the same weights.
        shares_results: whether graphs of other weights could write to the memory of its results.
        dropped: how many recordings of each key were dropped because a result that they read, of
            other weights, lies elsewhere.
    """

    def __init__(
        self,
        program: Program,
        whole: Callable[..., Any],
        forget: Callable[[], None],
        weights: Hashable,
    ) -> None:
        self._program = program
        self.weights = weights
        self.shares_results = False
        self.dropped: Counter[Hashable] = Counter()
        self._whole = whole
        self._forget = forget
        self.recordings: dict[Hashable, Recording | Fallback] = {}
        self.seen: dict[Hashable, int] = {}
        self.new_in_a_row = self._served = 0
        self.varying: Fallback | None = None
        self._held: list[torch.UntypedStorage] = []
        self.starts: dict[int, int] = {}
        self._addresses = compat.Addresses((), ())
        self._last: list[int] | None = None  # addresses of watched weights at the last call
        self.gone = False
        self.unsettled = False
        self.moved_in_a_row = 0
        self._written: list[compat.StorageLife] = []

    def hold(
        self,
        inputs: Sequence[Any],
        static: Sequence[int],
        watched: Sequence[int],
        written: Sequence[int],
    ) -> None:
        """Graphs are about to be captured for the weights and written inputs at these positions.

        Graphs read that memory, so the weights' is held. A written input may go, and its graphs
        with it.
        """
        self._held = [inputs[place].untyped_storage() for place in static]
        self.starts = {place: address(inputs[place]) for place in static}
        self._addresses = compat.Addresses(inputs, watched)
        self._written = [compat.StorageLife(inputs[place]) for place in written]

    def follow(self, inputs: Sequence[Any], watched: Sequence[int]) -> tuple[int, ...]:
        """Before a capture: a call has weights here; positions of those that moved since the last.

        Warming calls count from the last move, so that a step that moves a weight each time is not
        captured each time.
        """
        before, self._last = self._last, [inputs[place].data_ptr() for place in watched]
        if before is None or before == self._last:
            self.moved_in_a_row = 0
            return ()
        self.moved_in_a_row += 1
        self.seen.clear()
        pairs = zip(watched, before, self._last, strict=True)
        return tuple([place for place, was, now in pairs if was != now])

    def moved(self, inputs: tuple[Any, ...]) -> bool:
        """Whether a weight has other memory now, as after ``module.to()``, ``weight.data = ...``.

        All are looked at in every call: 0.07 us a weight where torch has a C++ helper for it.
        """
        return not self._addresses.hold(inputs)

    def let_go(self) -> None:
        """One of the objects has died: nothing of this is replayed any more."""
        self.gone = True
        self._held = []
        self._forget()

    @property
    def outlived(self) -> bool:
        """Whether memory of a written input that graphs were captured for has been freed."""
        return any(life.ended for life in self._written)

    @cached_property
    def wrappers(self) -> dict[int, CUDAGraphWrapper]:
        """Of the captured pieces, by index; their entries are what recordings replay."""
        split, runnables = self._program.split, self._program.runnables
        return {
            piece.index: self._wrapper(runnables[piece.index], CUDAGraphMode.PIECEWISE, piece.name)
            for piece in split.pieces
            if piece.capture
        }

    @cached_property
    def full(self) -> CUDAGraphWrapper:
        """The wrapper of the whole step."""
        return self._wrapper(self._whole, CUDAGraphMode.FULL, "step")

    def _wrapper(
        self, runnable: Callable[..., Any], mode: CUDAGraphMode, name: str
    ) -> CUDAGraphWrapper:
        config, pool = self._program.config, self._program.pool
        return CUDAGraphWrapper(
            runnable, config, mode, _OPTIONS, pool=pool, name=name, guarded=False
        )

    @property
    def recorded(self) -> list[Recording]:
        """The steps that are recorded."""
        return [each for each in self.recordings.values() if isinstance(each, Recording)]

    @property
    def captured(self) -> int:
        """How many steps are recorded."""
        return len(self.recorded)

    def count_warming(self, key: Hashable) -> int:
        """One more warming call of ``key``; returns how many there were before."""
        before = self.seen.get(key, 0)
        served = self.captured + sum([each.sequence.stats.replays for each in self.recorded])
        in_a_row = self.new_in_a_row if served == self._served else 0
        self.new_in_a_row, self._served = (0 if before else in_a_row + 1), served
        if self.new_in_a_row <= 1:
            self.varying = None
        if before == 0 and len(self.seen) >= _SEEN:
            del self.seen[next(iter(self.seen))]
        self.seen[key] = before + 1
        return before


class Bindings:
    """The bindings of one compiled graph, found by what a call is given.

    Args:
        program: what is recorded.
        whole: runs the whole step.
        forget: called as soon as a binding is gone; it may be in the midst of a collection.
        static: positions of parameters, buffers and module attributes. Those that are not frozen
            may be other objects, or lie elsewhere, in another call.

    Attributes:
        replaced: positions of those that were other objects in the last two bindings.
    """

    def __init__(
        self,
        program: Program,
        whole: Callable[..., Any],
        forget: Callable[[], None],
        static: Sequence[int],
    ) -> None:
        self._program = program
        self._whole, self._gone = whole, forget
        self._static = tuple(static)
        self._are_static = frozenset(static)
        self._watched = tuple([each for each in static if not program.is_frozen(each)])
        self._statics = picker(self._watched)
        size = len(compat.identities((None,)))
        self._stretches = _stretches(self._watched)
        self._runs = [(first * size, last * size) for first, last in self._stretches]
        self._known: dict[Hashable, Binding] = {}
        self._watches: dict[Hashable, list[weakref.ref[Any]]] = {}
        self._dead: list[Binding | Recording] = []
        self._plain: deque[tuple[int, bytes, compat.StorageLife]] = deque(maxlen=_PLAIN)
        self._lost = 0
        self._unused: Hashable = None  # of a binding whose graphs were dropped and never replayed
        self._unused_in_a_row = 0
        self._added: tuple[int, ...] = ()  # the objects of the binding that was added last
        self.replaced: tuple[int, ...] = ()
        self._last: Hashable = None
        self._last_binding: Binding | None = None

    def __iter__(self) -> Iterator[Binding]:
        return iter(tuple(self._known.values()))

    def find(
        self, inputs: tuple[Any, ...], written: Sequence[int]
    ) -> tuple[Hashable, Binding | None]:
        """(key, binding) of a call.

        Args:
            inputs: what the call was given.
            written: positions of written inputs that are bound by address, because no forward
                context stands for them.
        """
        key: Hashable = self._weights(inputs)
        if written:
            key = (key, *(inputs[position].data_ptr() for position in written))
        if key != self._last:  # comparing is much cheaper than hashing some kilobytes
            self._last, self._last_binding = key, self._known.get(key)
        binding = self._last_binding
        if binding is None:
            return key, None
        if not binding.recordings:
            moved = binding.follow(inputs, self._watched)
            self.replaced = moved or self.replaced
            return key, binding
        strict = bool(written) and self._program.pool.device.notices_freed
        if binding.moved(inputs) or (strict and binding.outlived):
            if not binding.captured:  # the step itself may move them, and has no graph for that
                return key, binding
            unused = not any([each.sequence.stats.replays for each in binding.recorded])
            self._unused = key if unused else None
            self._unused_in_a_row = self._unused_in_a_row + 1 if unused else 0
            self._forget(key)
            binding = None
        return key, binding

    def _weights(self, inputs: tuple[Any, ...]) -> bytes:
        every = compat.identities(inputs)
        return b"".join([every[start:end] for start, end in self._runs])

    def ran_plain(self, inputs: tuple[Any, ...], result: Any) -> None:
        """Remember what a step under a forward context has returned that ran without graphs."""
        if len(self._known) < 2:
            return
        dynamic = [each for place, each in enumerate(inputs) if place not in self._are_static]
        leaves = filter(compat.is_plain_tensor, compat.tree_tensors(result))
        given = {address(each) for each in compat.tree_tensors(dynamic)}
        weights = self._weights(inputs)
        for leaf in leaves:
            if address(leaf) not in given:
                self._plain.append((address(leaf), weights, compat.StorageLife(leaf)))

    def is_plain_result(self, binding: Binding, start: int) -> bool:
        """Whether memory that begins there is what a step with other weights returned plain."""
        return any(
            at == start and weights != binding.weights and not life.ended
            for at, weights, life in [*self._plain]  # another thread may add to it
        )

    def others(
        self, binding: Binding, inputs: tuple[Any, ...]
    ) -> list[Callable[[tuple[Any, ...]], bool]]:
        """What tells of a later call whether its weights are others, or lie elsewhere.

        Args:
            binding: that of a call.
            inputs: what that call was given.
        """
        if not self._watched:
            return []
        return [compat.SameObjects(inputs, self._stretches).differ, binding.moved]

    def add(self, key: Hashable, inputs: tuple[Any, ...]) -> Binding:
        """A new binding for a key that is not known; the oldest one without graphs may go."""
        self.reap()
        idle = [known for known, each in list(self._known.items()) if not each.captured]
        if len(idle) >= _IDLE:
            self._forget(idle[0])
        weights = key[0] if isinstance(key, tuple) else key
        binding = self._known[key] = Binding(self._program, self._whole, self._gone, weights)
        binding.follow(inputs, self._watched)
        binding.unsettled = self._unused == key and self._unused_in_a_row >= MOVED
        self._unused = None
        self._last = None
        before, self._added = self._added, tuple(map(id, self._statics(inputs)))
        pairs = zip(self._watched, before, self._added, strict=False)  # nothing before the first
        self.replaced = tuple([place for place, one, other in pairs if one != other])
        myself = weakref.ref(self)

        def died(_: Any) -> None:
            bindings = myself()
            if bindings is not None:
                bindings._forget(key)

        self._watches[key] = [weakref.ref(each, died) for each in self._statics(inputs)]
        return binding

    def hold(self, binding: Binding, inputs: tuple[Any, ...], written: Sequence[int]) -> None:
        """The first graph of a binding is about to be captured."""
        binding.hold(inputs, self._static, self._watched, written)
        self._lost = 0

    def owner(self, binding: Binding, own_context: bool) -> Hashable:
        """Return what owns the results of a step that is about to be captured for a binding.

        Note [Results of several weight sets]: layers of one class share a compiled graph, and the
        result of one is the input of the next. So a result under a forward context stays valid
        until the next call *with its weights*: where there are several weight sets, a replay copies
        results out of the memory that all graphs use for intermediates, into blocks of its weight
        set. Recordings of a time with one weight set do not copy: from the second one on they keep
        all their memory to themselves, and captures take new memory.

        Args:
            binding: of the step.
            own_context: results are copied for the caller.

        Returns:
            The weights; None if the compiled graph has seen no others.
        """
        others = [each for each in self if each.weights != binding.weights]
        for other in others:
            if other.shares_results:
                self._program.pool.renew()
                for recording in other.recorded:
                    recording.frame.reserve(other.weights)
                other.shares_results = False
        if not others and not own_context:
            binding.shares_results = True
        return binding.weights if others else None

    def keeps(self, binding: Binding, start: int) -> bool:
        """Whether no graph of a binding writes the memory of the pool that begins there."""
        pool = self._program.pool
        if pool.arena.owns(start):
            return pool.arena.owner_of(start) not in (None, binding.weights)
        return not pool.captures_into(start)

    def drop(self, binding: Binding, key: Hashable) -> None:
        """Forget a recorded step; its graphs are freed before the next capture."""
        recording = binding.recordings.pop(key)
        binding.dropped[key] += 1
        if isinstance(recording, Recording):
            for wrapper, entry in recording.kept:
                wrapper.drop(entry)
            self._dead.append(recording)

    @property
    def idle(self) -> int:
        """How many bindings without graphs have been seen, those since gone included."""
        return self._lost + sum(not binding.captured for binding in self)

    @property
    def captured(self) -> int:
        """How many bindings have graphs; those of freed memory are dropped first."""
        for key, binding in list(self._known.items()):
            if binding.outlived:
                self._forget(key)
        self.reap()
        return sum(binding.captured > 0 for binding in self)

    def reap(self) -> None:
        """Free the graphs of bindings that are gone, where no capture runs."""
        if self._dead and not captured_elsewhere():
            self._program.pool.device.synchronize()  # a replay may still run, on whatever stream
            self._dead.clear()

    def clear(self) -> None:
        """Forget all bindings."""
        self._last, self._last_binding = None, None
        for binding in self:
            binding.let_go()
        self._known.clear()
        self._watches.clear()
        self._dead.clear()
        self._plain.clear()

    def _forget(self, key: Hashable) -> None:
        """Take a binding out. It may run inside of a collection: graphs are freed later."""
        self._last, self._last_binding = None, None
        binding = self._known.pop(key, None)
        if binding is not None:
            binding.let_go()
            if all(each.weights != binding.weights for each in self):
                self._program.pool.arena.free(binding.weights)
        if binding is not None and binding.recordings:
            self._dead.append(binding)
        elif binding is not None:
            self._lost += 1
        self._watches.pop(key, None)


def _stretches(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as stretches: ``(0, 2, 3)`` is ``[(0, 1), (2, 4)]``."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


def picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these items out of a tuple, as a tuple, as fast as Python can."""
    if not positions:
        return lambda items: ()
    first, last = positions[0], positions[-1] + 1
    if list(positions) == list(range(first, last)):
        return operator.itemgetter(slice(first, last))
    return operator.itemgetter(*positions)
