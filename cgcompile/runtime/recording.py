"""One recorded step, what a batch descriptor captured for one weight set: :class:`Recording`.

``recorder.py`` makes it. It holds the buffers that inputs are copied into, the addresses and
numbers that are baked into its graphs, the sequence of segments, and how results are made.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cgcompile.config import CUDAGraphMode
from cgcompile.context import (
    BatchDescriptor,
    ForwardContext,
    callers_context,
    override_forward_context,
)
from cgcompile.graphs.arena import Block, OwnedCopy, ScalarCopy, address, stretch
from cgcompile.graphs.capture import is_comparable
from cgcompile.graphs.contract import Contract, Reads, same_layout
from cgcompile.graphs.results import Results, Track, builder, is_reusable, view_of
from cgcompile.graphs.sequence import GraphSequence, SegmentRunner, Slot
from cgcompile.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgcompile.pieces.stitch import restoring_grad_mode
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.runtime.inputs import Roles
from cgcompile.runtime.program import Program
from cgcompile.torch_compat import raw_memory, torch_ops, torch_settings


@dataclass(frozen=True)
class BatchKey:
    """The batch that a recording serves."""

    mode: CUDAGraphMode  # PIECEWISE or FULL
    descriptor: BatchDescriptor  # the caller's, or a synthetic one
    own_context: bool  # no forward context: results are copied, eager pieces see a synthetic one
    copies: bool  # inputs that are only read are copied into buffers

    @property
    def display(self) -> BatchDescriptor:
        """The descriptor without the mark of a synthetic one."""
        if not self.own_context:
            return self.descriptor
        _, sizes = self.descriptor.extra
        repeated = sizes == (self.descriptor.num_tokens,)
        return self.descriptor._replace(extra=() if repeated else sizes)


class Static(NamedTuple):
    """The inputs that are the same objects in all steps of a weight set, which holds none."""

    positions: dict[int, int]  # by id
    starts: Sequence[int]  # where the memory of each begins, by position; 0 for other inputs
    comparable: frozenset[int]  # ids of those whose memory can be compared


class Recording:
    """A captured step."""

    def __init__(
        self,
        program: Program,
        roles: Roles,
        batch: BatchKey,
        inputs: Sequence[Any],  # of the capturing call
        static: Static,
        owner: Hashable = None,  # the weight set whose memory has the results, if there are several
    ) -> None:
        self.batch = batch
        self.roles = roles
        self.settings = torch_settings.kernel_settings()  # they choose kernels
        self.reserved = program.pool.reserved  # bytes, before there are buffers for this step
        self.owner = owner
        self.frame = program.pool.arena.frame(None if batch.own_context else owner)
        self.sequence: GraphSequence  # what a replay runs, once the step is recorded
        self.sources: Mapping[str, Any] = {}  # of the values that pieces return, as far as known
        self.kept: Sequence[tuple[CUDAGraphWrapper, CUDAGraphEntry]] = ()  # what it replays
        self.context: Contract | None = None  # of a FULL graph whose ops read it
        self._program = program
        self._pool = program.pool
        own = ForwardContext.synthetic(batch.mode, batch.descriptor)
        self._context = override_forward_context(own) if batch.own_context else None
        written = [inputs[position] for position in program.mutated_positions]
        self._written_memory = {address(x) for x in written if isinstance(x, torch.Tensor)} - {0}
        self._copied: list[tuple[int, OwnedCopy]] = []  # by position
        if batch.copies:
            self._copied = [(p, OwnedCopy(inputs[p], self.frame)) for p in roles.read]
        device = program.split.device
        self._copied += [(p, ScalarCopy(inputs[p], self.frame, device)) for p in roles.scalars]
        self.addresses: list[tuple[int, int]] = []  # by position, of what graphs read in place
        self.from_other_weights: list[tuple[int, int]] = []  # those in graph memory at capture
        self.numbers: list[tuple[int, Any]] = []  # by position, those that are baked in
        if not batch.own_context:  # otherwise numbers are part of the key
            bound = roles.mutated if batch.copies else (*roles.read, *roles.mutated)
            self.addresses = [(p, inputs[p].data_ptr()) for p in bound]
            self._held = [inputs[p].untyped_storage() for p in bound]
            holds = program.pool.holds
            self.from_other_weights = [
                (p, at) for p, at in self.addresses if holds(address(inputs[p]))
            ]
            fixed = any(not b.takes_any_layout for p, b in self._copied if p in roles.restrided)
            copies = batch.copies and not fixed  # otherwise strides are those of the capture
            baked_in = roles.numbers if copies else (*roles.numbers, *roles.strides)
            self.numbers = [(p, inputs[p]) for p in baked_in]
        self.bound = self._contract()
        # Until the step is recorded: the inputs, with buffers in place of what is copied, and where
        # the memory of each begins; 0 without memory. Positions are by the id of an input.
        self.inputs = list(inputs)
        for position, buffer in self._copied:
            buffer.fill(inputs[position])
            self.inputs[position] = buffer.tensor
        self._note_addresses(static)
        self._results: Results
        self._generation = program.pool.generation

    def _note_addresses(self, static: Static) -> None:
        """Note where the memory of each input begins, and which inputs are compared by it."""
        self.positions, self.starts = static.positions.copy(), [*static.starts]
        for position in self.roles.scalars:
            self.positions[id(self.inputs[position])] = position
        for position in self._program.dynamic_positions:
            value = self.inputs[position]
            self.positions.setdefault(id(value), position)
            self.starts[position] = address(value) if isinstance(value, torch.Tensor) else 0
        self.static_starts: Sequence[int] = static.starts
        dynamic = [self.inputs[position] for position in self._program.dynamic_positions]
        # Ids of the inputs whose memory the step could replace.
        self.comparable = static.comparable.union(map(id, filter(is_comparable, dynamic)))

    def is_fixed(self, position: int) -> bool:
        """Return whether an input is the same object at every replay: an own buffer, or frozen."""
        if position in self.roles.is_static and self._program.is_frozen(position):
            return True
        return any(position == copied for copied, _ in self._copied)

    # -------------------------------------------------------------- guards

    def _contract(self) -> Contract | None:
        """Return the contract ``holds(inputs)`` of the addresses and numbers, if there are any."""
        reads = Reads()
        for position, start in self.addresses:
            reads.address(self.path(position), f"inputs[{position}]", start)
        for position, number in self.numbers:
            reads.value(self.path(position), f"inputs[{position}]", number)
        return Contract("inputs", reads, "input") if reads.rows else None

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare with the captured addresses and numbers; raise where one differs."""
        what, batch = "the compiled step", self.batch.descriptor
        if self.bound is not None:
            self.bound.check(what, batch, inputs)
        if self.context is not None:
            self.context.check(what, batch, callers_context())
        self.sequence.check_held()

    def path(self, position: int) -> str:
        """Return the name of an input, for messages."""
        return self._program.input_names[position]

    def check_copies(self, inputs: Sequence[Any]) -> None:
        """Raise RunPlain where an input to copy is memory that the step mutates."""
        if not self._written_memory:
            return
        for position, _ in self._copied:
            if inputs[position].untyped_storage().data_ptr() in self._written_memory:
                detail = f"{self.path(position)} is memory that the step writes"
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, detail))

    def check_bound(
        self,
        inputs: Sequence[Any],
        keeps: Callable[[int], bool],  # no graph of this weight set writes that address
        is_plain_result: Callable[[int], bool],  # returned for other weights without a graph
    ) -> None:
        """Raise RunPlain where an input cannot be read at the next step."""
        for position, _ in self.from_other_weights:
            if not keeps(address(inputs[position])):
                path = self.path(position)
                detail = f"{path} is a result of this graph, which the next step overwrites"
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, f"{detail}: clone it"))
        for position, _ in self.addresses:
            if is_plain_result(address(inputs[position])):
                path = self.path(position)
                detail = f"{path} is a result of a step without a graph: its memory does not stay"
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, detail))

    def chain_moved(self, inputs: Sequence[Any]) -> bool:
        """Return whether results of other weight sets have moved, and no other input."""
        if not self.from_other_weights or not _have_moved(inputs, self.from_other_weights):
            return False
        return not _have_moved(
            inputs, [pair for pair in self.addresses if pair not in self.from_other_weights]
        )

    def reads_results(self, inputs: Sequence[Any]) -> bool:
        """Return whether the inputs that were results at capture are results again."""
        return all(
            self._pool.holds(address(inputs[position])) for position, _ in self.from_other_weights
        )

    @property
    def void(self) -> bool:
        """Whether graphs that it replays have been cleared."""
        return self._generation != self._program.pool.generation

    def reads_last(self, count: int) -> bool:
        """Return whether a replay reads one of the last ``count`` inputs of a call."""
        first = len(self._program.split.inputs) - count
        read = {position for position, _ in (*self.addresses, *self.numbers)}
        read |= self.sequence.positions | self._results.positions
        return self.sequence.prepare is not None or any(position >= first for position in read)

    @property
    def one_graph(self) -> GraphSequence | None:
        """The sequence, if it is one graph whose results are constants or reused tensors."""
        if self._context is not None or self._program.split.sets_grad_mode:
            return None
        steady = self._results.is_steady and self._results.is_flat
        return self.sequence if steady and self.sequence.is_one_graph else None

    @property
    def returned(self) -> Results:
        return self._results

    # -------------------------------------------------------------- running

    def replay(
        self,
        inputs: Sequence[Any],
        real: int | None = None,
        runner: SegmentRunner | None = None,
    ) -> Any:
        """Replay the step on the inputs of a call; return its result."""
        slots = self._run(inputs, real, runner)
        if not slots:
            return self._results.make(slots, inputs)
        try:
            return self._results.make(slots, inputs)
        finally:
            self.sequence.clear()

    def value(self, name: str, inputs: Sequence[Any]) -> Any:
        """Return a value of the split graph during a replay; None if it is not known."""
        split = self._program.split
        if name in split.constants:
            return split.constants[name]
        position = self._program.positions.get(name)
        if position is not None:
            copied = {position: buffer.tensor for position, buffer in self._copied}
            return copied.get(position, inputs[position])
        source = self.sources.get(name)
        return self.sequence.slots[source.at] if isinstance(source, Slot) else source

    def expire(self, inputs: Sequence[Any]) -> None:
        """Make results raise that this step will overwrite."""
        self._pool.stale.expire(self.owner, inputs)

    def in_context(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``step`` in the synthetic context of this batch, if it has one."""
        if self._context is None:
            return step
        context = self._context

        def run(*inputs: Any) -> Any:
            with context:
                return step(*inputs)

        return run

    # -------------------------------------------------------------- recording

    def finish(self, sequence: GraphSequence, results: Results, sources: Mapping[str, Any]) -> None:
        """Keep the sequence, the maker of results, and where a replay leaves named values."""
        self.sequence = sequence
        context = None if self.batch.own_context else callers_context()
        if context is not None and context.num_unpadded_tokens is not None:
            sequence.padding = self.batch.descriptor.num_tokens - context.num_unpadded_tokens
        sequence.prepare = self._prepare_function()
        self.sources = sources
        run = self.in_context(sequence.replay)
        self._run = restoring_grad_mode(run) if self._program.split.sets_grad_mode else run
        self._results = results
        self._generation = self._program.pool.generation
        # They are held no longer.
        self.inputs, self.starts, self.static_starts = [], [], ()

    def _prepare_function(self) -> Callable[[Sequence[Any]], None] | None:
        """Return what fills memory before each replay: copies of inputs, and debug settings."""
        copied, pool, owner = self._copied, self._pool, self.owner
        parts = self._program.config.debug
        poison, debug = "poison" in parts, "stale" in parts
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

    def results(
        self,
        result: Any,  # of the capturing call
        sources: Sequence[Any],  # what later steps find for each leaf: a slot, or an object
        fixed: Set[int],  # where memory of graphs, bridges and copied inputs begins
        inputs: Sequence[Any],  # of the capturing call
    ) -> Results:
        """Return what makes the results of later steps."""
        copies, holds = self.batch.own_context, self._pool.holds
        buffer_of = None if copies or self.owner is None else self._own_results(result)
        permanent = self._program.frozen.by_position(len(inputs))
        constants: list[Any] = []
        passed: dict[int, int] = {}
        views: dict[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {}
        slots: dict[int, int] = {}
        filled: dict[int, tuple[OwnedCopy, torch.Tensor | int]] = {}
        copied: dict[int, torch.Tensor] = {}
        reused: dict[int, torch.Tensor] = {}
        leaves = torch_ops.tree_leaves(result)
        for item, (leaf, source) in enumerate(zip(leaves, sources, strict=True)):
            slot = source.at if isinstance(source, Slot) else None
            constants.append(source if slot is None else None)
            is_tensor = isinstance(leaf, torch.Tensor)
            start = address(leaf) if is_tensor else 0
            is_fixed = is_tensor and start in fixed
            stays = is_tensor and (is_fixed or slot is None)
            position = self._position_of(leaf, inputs) if stays else None
            if position is not None and position in permanent:
                constants[item] = permanent[position]
            elif position is not None:
                passed[item] = position
            elif is_fixed and start in self.starts:
                at = self.starts.index(start)
                views[item] = at, view_of(self.inputs[at], leaf)
            elif is_fixed and buffer_of is not None and (buffer := buffer_of(leaf)) is not None:
                filled[item] = buffer, raw_memory.weak_tensor(leaf) if slot is None else slot
                constants[item] = None
                reused[item] = raw_memory.weak_tensor(buffer.tensor, self._pool.holder)
            elif slot is not None and not (copies and is_fixed and holds(start)):
                slots[item] = slot
            elif is_fixed:
                holder = None if copies else self._pool.holder
                (copied if copies else reused)[item] = raw_memory.weak_tensor(leaf, holder)
            elif is_reusable(source):
                reused[item] = raw_memory.alias(source)
        return Results(
            builder(result, leaves),
            constants,
            inputs=passed,
            views=views,
            slots=slots,
            filled=filled,
            copied=copied,
            reused=reused,
            track=self._track(),
        )

    def _track(self) -> Track | None:
        """Return what makes results in memory of graphs raise once they are stale, if it should."""
        if self.batch.own_context or "stale" not in self._program.config.debug:
            return None
        what, stale = f"the compiled step, {self.batch.descriptor}", self._pool.stale
        return partial(stale.track, owns=self._pool.holds, owner=self.owner, what=what)

    def _position_of(self, leaf: torch.Tensor, inputs: Sequence[Any]) -> int | None:
        """Return the position of an input that is this object, with the layout of the call."""
        position = self.positions.get(id(leaf))
        if position is None or not same_layout(leaf, inputs[position]):
            return None  # the buffer may have another layout now, as after ``t_()``
        return position

    def _own_results(self, result: Any) -> Callable[[torch.Tensor], OwnedCopy | None]:
        """Return what makes buffers of this weight set for results in memory of other steps."""
        # Results that share memory get buffers that share it as well.
        blocks: dict[int, tuple[Block, int]] = {}
        members: dict[int, list[torch.Tensor]] = {}
        for leaf in torch_ops.tree_tensors(result):
            members.setdefault(address(leaf), []).append(leaf)

        def owned(leaf: torch.Tensor) -> OwnedCopy | None:
            start = address(leaf)
            if not self._pool.holds(start) or self._pool.arena.owner_of(start) == self.owner:
                return None
            if start not in blocks:
                first, last = stretch(members[start])
                blocks[start] = (self.frame.allocate(last - first, leaf.device, result=True), first)
            block, first = blocks[start]
            begin = int(leaf.storage_offset()) * leaf.element_size() - first
            return OwnedCopy(leaf, self.frame, within=(block, begin))

        return owned


def _have_moved(inputs: Sequence[Any], addresses: Sequence[tuple[int, int]]) -> bool:
    return any(inputs[position].data_ptr() != before for position, before in addresses)
