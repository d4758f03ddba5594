"""One recorded step, what a batch descriptor captured for one set of weights: :class:`Recording`.

``recorder.py`` makes it. It holds the buffers that inputs are copied into, the addresses and
numbers that graphs have seen, the sequence of segments, and how the result of a replay is made.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CUDAGraphMode
from cgcompile.context import BatchDescriptor, ForwardContext, override_forward_context
from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.graphs.arena import Block, OwnedCopy, ScalarCopy, address, stretch
from cgcompile.graphs.guards import same_value
from cgcompile.graphs.sequence import GraphSequence, Slot, StepObserver
from cgcompile.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgcompile.pieces.stitch import restoring_grad_mode
from cgcompile.reasons import Fallback, Reason
from cgcompile.runtime.inputs import Roles
from cgcompile.runtime.program import Program
from cgcompile.runtime.returns import Given, Returns


@dataclass(frozen=True)
class Batch:
    """What a recording is for.

    Attributes:
        mode: PIECEWISE or FULL.
        descriptor: the caller's, or a synthetic one.
        own_context: no forward context was set: results are the caller's own, and eager pieces see
            a context of ours.
        copies: inputs that are only read are copied into buffers of ours.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    own_context: bool
    copies: bool

    @property
    def shown(self) -> BatchDescriptor:
        """The descriptor as people read it: a synthetic one without its mark."""
        if not self.own_context:
            return self.descriptor
        _, sizes = self.descriptor.extra
        alone = sizes == (self.descriptor.num_tokens,)  # says it twice
        return self.descriptor._replace(extra=() if alone else sizes)


class Recording:
    """A captured step.

    Args:
        program: what is recorded.
        roles: of the inputs, in the mode of the batch.
        batch: what it is for.
        inputs: what the capturing call was given.
        weights: where the memory of static inputs begins, by position.
        owner: the weight set, where the compiled graph serves several: its results stay valid until
            its own next call, in memory of that weight set. None for the only one.

    Attributes:
        batch: what it is for.
        roles: of the inputs.
        frame: where its bridges and copies of inputs take memory.
        given: until it is finished, ``inputs`` with buffers in place of what is copied.
        starts: until then, where the memory of each of these begins; 0 for what has none.
        reserved: bytes of the pool before buffers for it were made; see ``GraphPool.reserved``.
        sequence: once it is finished, what a replay runs.
        sources: where a replay leaves the values that pieces make, by name, as far as it is known.
        addresses: (position, address) of the inputs that graphs read where they were.
        owner: as given.
        chained: those of them that are results of other weight sets.
        numbers: (position, number) of those whose value graphs hold.
        kept: the entries that it replays, each with its wrapper.
    """

    def __init__(
        self,
        program: Program,
        roles: Roles,
        batch: Batch,
        inputs: Sequence[Any],
        weights: Mapping[int, int],
        owner: Hashable = None,
    ) -> None:
        self.batch = batch
        self.roles = roles
        self.reserved = program.pool.reserved
        self.owner = owner
        self.frame = program.pool.arena.frame(None if batch.own_context else owner)
        self.sequence: GraphSequence
        self.sources: Mapping[str, Any] = {}
        self._program = program
        self._pool = program.pool
        own = ForwardContext.synthetic(batch.mode, batch.descriptor)
        self._context = override_forward_context(own) if batch.own_context else None
        self._copied: list[tuple[int, OwnedCopy]] = []
        self.addresses: list[tuple[int, int]] = []
        self.chained: list[tuple[int, int]] = []
        self.numbers: list[tuple[int, Any]] = []
        self.kept: Sequence[tuple[CUDAGraphWrapper, CUDAGraphEntry]] = ()
        self._written_memory = {*_starts([inputs[p] for p in program.written_positions], {})} - {0}
        if batch.copies:
            self._copied = [(p, OwnedCopy(inputs[p], self.frame)) for p in roles.read]
        device = program.split.device
        self._copied += [(p, ScalarCopy(inputs[p], self.frame, device)) for p in roles.scalars]
        if not batch.own_context:  # else these are part of the key
            addressed = roles.written if batch.copies else (*roles.read, *roles.written)
            self.addresses = [(p, inputs[p].data_ptr()) for p in addressed]
            self._held = [inputs[p].untyped_storage() for p in addressed]
            holds = program.pool.holds
            self.chained = [(p, at) for p, at in self.addresses if holds(address(inputs[p]))]
            self.numbers = [(p, inputs[p]) for p in roles.numbers]
        self._debug = program.config.debug
        self.given = self._filled(inputs)
        self.starts = _starts(self.given, weights)
        self._returns: Returns
        self._generation = program.pool.generation

    def _filled(self, inputs: Sequence[Any]) -> list[Any]:
        given = list(inputs)
        for position, buffer in self._copied:
            buffer.fill(inputs[position])
            given[position] = buffer.tensor
        return given

    def is_fixed(self, position: int) -> bool:
        """Whether an input is the same object at every replay: a buffer of ours, or frozen."""
        if position in self.roles.is_static and self._program.is_frozen(position):
            return True
        return any(position == each for each, _ in self._copied)

    # -------------------------------------------------------------- guards

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare with the captured addresses, layouts and numbers.

        Raises:
            AddressChangedError: a tensor that the graphs read lies elsewhere.
            HostValueChangedError: a number that the graphs hold is another one.
        """
        for position, before in self.addresses:
            if inputs[position].data_ptr() != before:
                what, batch, path = self._where(position)
                now = inputs[position].data_ptr()
                raise AddressChangedError.moved(
                    what=what, batch=batch, path=path, now=now, before=before
                )
        for position, value in self.numbers:
            if not same_value(inputs[position], value):
                what, batch, path = self._where(position)
                raise HostValueChangedError.changed(
                    what=what, batch=batch, path=path, now=inputs[position], before=value
                )

    def path(self, position: int) -> str:
        """An input, for messages."""
        value = self._program.split.inputs[position]
        return f"input {position} {value.source or value.name!r}"

    def _where(self, position: int) -> tuple[str, str, str]:
        return "the compiled step", str(self.batch.descriptor), self.path(position)

    def overlap(self, inputs: Sequence[Any]) -> Fallback | None:
        """Why a copied input must not be copied this time: it is memory that the step writes."""
        if not self._written_memory:
            return None
        for position, _ in self._copied:
            if inputs[position].untyped_storage().data_ptr() in self._written_memory:
                path = self._where(position)[2]
                return Fallback(Reason.UNSUPPORTED_INPUT, f"{path} is memory that the step writes")
        return None

    def own_memory(self, inputs: Sequence[Any], keeps: Callable[[int], bool]) -> Fallback | None:
        """Why these inputs cannot be captured: one is a result whose memory is not held.

        Args:
            inputs: of the call.
            keeps: whether memory of the pool that begins at an address is not written by a graph of
                this weight set.
        """
        for position, _ in self.chained:
            if not keeps(address(inputs[position])):
                path = self._where(position)[2]
                detail = f"{path} is a result of this graph, which the next step overwrites"
                return Fallback(Reason.UNSUPPORTED_INPUT, f"{detail}: clone it")
        return None

    def passing(self, inputs: Sequence[Any], plain: Callable[[int], bool]) -> Fallback | None:
        """Why these inputs cannot be captured: one is a result that lies elsewhere at every step.

        Args:
            inputs: of the call.
            plain: whether memory that begins at an address is what other weights returned plain.
        """
        for position, _ in self.addresses:
            if plain(address(inputs[position])):
                path = self.path(position)
                detail = f"{path} is a result of a step without a graph: its memory does not stay"
                return Fallback(Reason.UNSUPPORTED_INPUT, detail)
        return None

    def follows(self, inputs: Sequence[Any]) -> bool:
        """Whether an input that is a result of another weight set lies elsewhere, and no other."""
        if not self.chained or self.moved(inputs, self.chained) is None:
            return False
        rest = [each for each in self.addresses if each not in self.chained]
        return self.moved(inputs, rest) is None

    def reads_results(self, inputs: Sequence[Any]) -> bool:
        """Whether the inputs that were results at capture are results again."""
        return all(self._pool.holds(address(inputs[position])) for position, _ in self.chained)

    @staticmethod
    def moved(inputs: Sequence[Any], addresses: Sequence[tuple[int, int]]) -> int | None:
        """The position of the first input that lies elsewhere than at capture."""
        return next((p for p, before in addresses if inputs[p].data_ptr() != before), None)

    @property
    def void(self) -> bool:
        """Whether graphs that it replays have been cleared."""
        return self._generation != self._program.pool.generation

    def reads_last(self, count: int) -> bool:
        """Whether a replay looks at one of the last ``count`` inputs of a call."""
        first = len(self._program.split.inputs) - count
        found = {position for position, _ in (*self.addresses, *self.numbers)}
        found |= self.sequence.positions | self._returns.positions
        return self.sequence.prepare is not None or any(position >= first for position in found)

    @property
    def alone(self) -> GraphSequence | None:
        """Its sequence, where a replay is that of one graph, and :attr:`lent` all that varies."""
        if self._context is not None or self._program.split.sets_grad_mode:
            return None
        return self.sequence if self.sequence.is_one_graph and self._returns.is_steady else None

    @property
    def returned(self) -> Returns:
        """What makes the result of a replay."""
        return self._returns

    # -------------------------------------------------------------- running

    def replay(
        self,
        inputs: Sequence[Any],
        real: int | None = None,
        observer: StepObserver | None = None,
    ) -> Any:
        """Replay the step on the inputs of a call; see :meth:`GraphSequence.replay`.

        Returns:
            What the graph returns: the caller's own, or without copies views of pool memory.
        """
        slots = self._run(inputs, real, observer)
        if not slots:
            return self._returns.make(slots, inputs)
        try:
            return self._returns.make(slots, inputs)
        finally:
            self.sequence.clear()

    def value(self, name: str, inputs: Sequence[Any]) -> Any:
        """What a named value is in the midst of a replay; None if that is not known.

        Args:
            name: of an input, a constant, or what a piece makes.
            inputs: what this call was given.
        """
        split = self._program.split
        if name in split.constants:
            return split.constants[name]
        for position, each in enumerate(split.inputs):
            if each.name == name:
                copied = {place: buffer.tensor for place, buffer in self._copied}
                return copied.get(position, inputs[position])
        source = self.sources.get(name)
        return self.sequence.slots[source.at] if isinstance(source, Slot) else source

    def _preparing(self) -> Callable[[Sequence[Any]], None] | None:
        """What fills memory before each replay: copies of inputs, and what shows stale reads."""
        copied, pool, owner = self._copied, self._pool, self.owner
        poison, debug = self._program.config.poison, self._debug
        if not (copied or poison or debug):
            return None

        def prepare(inputs: Sequence[Any]) -> None:
            if poison:
                pool.poison(inputs, owner)
            for position, buffer in copied:
                buffer.fill(inputs[position])
            if debug:
                pool.stale.expire(owner, inputs)

        return prepare

    def expire(self, inputs: Sequence[Any]) -> None:
        """Make results raise that this step is about to overwrite."""
        self._pool.stale.expire(self.owner, inputs)

    def in_context(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step`` in the forward context of this batch, where no caller has set one."""
        if self._context is None:
            return step

        context = self._context

        def run(*given: Any) -> Any:
            with context:
                return step(*given)

        return run

    def finish(self, sequence: GraphSequence, returns: Returns, sources: Mapping[str, Any]) -> None:
        """The step is recorded: keep what replays it, and what makes its result.

        Args:
            sequence: what a replay runs.
            returns: what makes the result.
            sources: where a replay leaves the values that pieces make, by name.
        """
        self.sequence = sequence
        sequence.prepare = self._preparing()
        self.sources = sources
        run = self.in_context(sequence.replay)
        self._run = restoring_grad_mode(run) if self._program.split.sets_grad_mode else run
        self._returns = returns
        self._generation = self._program.pool.generation
        self.given, self.starts = [], []  # what dies must be able to die

    def returns(
        self, made: Any, sources: Sequence[Any], fixed: Set[int], inputs: Sequence[Any]
    ) -> Returns:
        """How results are made, from what a step returned that was given ``inputs``."""
        lasting = self._program.frozen.by_position(len(inputs))
        given = Given(self.given, self.starts, inputs, lasting)
        owns = self._pool.holds if self.batch.own_context else None
        tracked = None
        if self._debug and not self.batch.own_context:
            what = f"the compiled step, {self.batch.descriptor}"
            hand_out, holds = self._pool.stale.hand_out, self._pool.holds
            tracked = partial(hand_out, owns=holds, owner=self.owner, what=what)
        shares = self.owner is not None and not self.batch.own_context
        owned = self._own_results(made) if shares else None
        return Returns(made, sources, given, fixed, owns, tracked, owned)

    def _own_results(self, made: Any) -> Callable[[torch.Tensor], OwnedCopy | None]:
        """Return what makes buffers of this weight set for results in memory that other steps use.

        Results that share memory get buffers that share it as well.
        """
        blocks: dict[int, tuple[Block, int]] = {}
        members: dict[int, list[torch.Tensor]] = {}
        for leaf in compat.tree_tensors(made):
            members.setdefault(address(leaf), []).append(leaf)

        def owned(result: torch.Tensor) -> OwnedCopy | None:
            start = address(result)
            if not self._pool.holds(start) or self._pool.arena.owner_of(start) == self.owner:
                return None
            if start not in blocks:
                first, last = stretch(members[start])
                blocks[start] = (self.frame.take(last - first, result.device, result=True), first)
            block, first = blocks[start]
            begin = int(result.storage_offset()) * result.element_size() - first
            return OwnedCopy(result, self.frame, within=(block, begin))

        return owned


def _starts(values: Sequence[Any], known: Mapping[int, int]) -> list[int]:
    return [
        known[place] if place in known else address(x) if isinstance(x, torch.Tensor) else 0
        for place, x in enumerate(values)
    ]
