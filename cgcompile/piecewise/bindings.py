"""Which weights a recorded step belongs to: :class:`Binding`, and all of one compiled graph.

Dynamo gives two instances of a class one compiled graph, and passes the parameters at every call. A
CUDA graph holds the addresses of one set of them. So recordings are kept per *binding*: the very
objects of all parameters, buffers and module attributes, and, where inputs are copied, the
addresses of the inputs that the step writes, which cannot be copied (a key-value cache passed as
an argument). A binding goes when one of its objects dies.
"""

import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CUDAGraphMode
from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.piecewise.recording import Program, Recording
from cgcompile.reasons import Why

_SEEN = 4096  # shapes whose warm-up is remembered, per binding

# Garbage is collected by whoever captures many graphs; a piece is one of dozens of a step.
_OPTIONS = CUDAGraphOptions(debug_log_enable=False, gc_disable=True)


class Binding:
    """One set of weights, and what was recorded for it.

    Attributes:
        wrappers: of the captured pieces, by index; their entries are what recordings replay.
        full: the wrapper of the whole step.
        recordings: recorded steps by key; or why a step cannot be recorded.
        seen: how many warming calls each key has had.
    """

    def __init__(self, program: Program, whole: Callable[..., Any], objects: Sequence[Any]) -> None:
        config = program.config
        self.wrappers = {
            piece.index: CUDAGraphWrapper(
                program.runnables[piece.index],
                config,
                CUDAGraphMode.PIECEWISE,
                _OPTIONS,
                pool=program.pool,
                name=piece.name,
            )
            for piece in program.split.pieces
            if piece.capture
        }
        self.full = CUDAGraphWrapper(
            whole, config, CUDAGraphMode.FULL, _OPTIONS, pool=program.pool, name="step"
        )
        self.recordings: dict[Hashable, Recording | Why] = {}
        self.seen: dict[Hashable, int] = {}
        # Graphs read this memory: a weight that moves must leave it readable, if stale.
        self._storages = [t.untyped_storage() for t in objects if isinstance(t, torch.Tensor)]

    @property
    def captured(self) -> int:
        """How many steps are recorded."""
        return sum(isinstance(each, Recording) for each in self.recordings.values())

    def count_warming(self, key: Hashable) -> int:
        """One more warming call of ``key``; returns how many there were before."""
        before = self.seen.get(key, 0)
        if before == 0 and len(self.seen) >= _SEEN:
            del self.seen[next(iter(self.seen))]
        self.seen[key] = before + 1
        return before


class Bindings:
    """The bindings of one compiled graph, found by what a call is given.

    Args:
        program: what is recorded.
        whole: runs the whole step.
        static: positions of parameters, buffers and module attributes.
        written: positions of the other inputs that the step writes.
        most: how many bindings may have graphs.
    """

    def __init__(
        self,
        program: Program,
        whole: Callable[..., Any],
        static: Sequence[int],
        written: Sequence[int],
        most: int,
    ) -> None:
        self._program = program
        self._whole = whole
        self._statics = picker(static)
        size = len(compat.identities((None,)))
        self._runs = [(start * size, end * size) for start, end in _runs(static)]
        self._written = tuple(written)
        self._most = most
        self._known: dict[Hashable, Binding] = {}
        self._watches: dict[Hashable, list[weakref.ref[Any]]] = {}
        self._dead: list[Binding] = []
        self._last: Hashable = None
        self._last_binding: Binding | None = None

    def __iter__(self) -> Any:
        return iter(tuple(self._known.values()))

    def find(self, inputs: tuple[Any, ...], by_address: bool) -> tuple[Hashable, Binding | None]:
        """(key, binding) of a call; ``by_address`` where written inputs are not checked later."""
        every = compat.identities(inputs)
        key: Hashable = b"".join([every[start:end] for start, end in self._runs])
        if by_address and self._written:
            key = (key, *(inputs[position].data_ptr() for position in self._written))
        if key != self._last:  # comparing is much cheaper than hashing some kilobytes
            self._last, self._last_binding = key, self._known.get(key)
        return key, self._last_binding

    def add(self, key: Hashable, inputs: tuple[Any, ...]) -> Binding:
        """A new binding for a key that is not known; the oldest one without graphs may go."""
        idle = [known for known, binding in self._known.items() if not binding.captured]
        if len(idle) >= self._most:
            self._forget(idle[0])
        objects = self._statics(inputs)
        self._known[key] = Binding(self._program, self._whole, objects)
        self._last = None
        myself = weakref.ref(self)

        def died(_: Any) -> None:
            bindings = myself()
            if bindings is not None:
                bindings._forget(key)

        self._watches[key] = [weakref.ref(each, died) for each in objects]
        return self._known[key]

    def full(self) -> bool:
        """Whether as many bindings have graphs as may."""
        return sum(binding.captured > 0 for binding in self._known.values()) >= self._most

    def reap(self) -> None:
        """Free the graphs of bindings whose weights died. Call it where no capture runs."""
        self._dead.clear()

    def clear(self) -> None:
        """Forget all bindings."""
        self._last, self._last_binding = None, None
        self._known.clear()
        self._watches.clear()
        self._dead.clear()

    def _forget(self, key: Hashable) -> None:
        """Take a binding out. It may run inside of a collection: graphs are freed later."""
        self._last, self._last_binding = None, None
        binding = self._known.pop(key, None)
        if binding is not None:
            self._dead.append(binding)
        self._watches.pop(key, None)


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
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
