"""One recorded step, what a batch descriptor captured for one set of weights: :class:`Recording`.

``recorder.py`` makes it. It holds the buffers that inputs are copied into, the addresses and
numbers that graphs have seen, and how the result of a replay is made.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.forward_context import (
    BatchDescriptor,
    ForwardContext,
    override_forward_context,
)
from cgcompile.graphs.copies import OwnedCopy
from cgcompile.graphs.guards import same_value
from cgcompile.graphs.pool import GraphPool
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.bridges import address
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.returns import Returns, returned_names
from cgcompile.piecewise.roles import Roles
from cgcompile.piecewise.stitch import Step
from cgcompile.reasons import Reason, Why


@dataclass(frozen=True, eq=False)
class Program:
    """What all recordings of one compiled graph share.

    Attributes:
        split: the split graph.
        step: its generated function, to be bound.
        runnables: the compiled form of each piece.
        pool: memory and capture stream.
        config: the settings.
    """

    split: SplitGraph
    step: Step
    runnables: Sequence[Runnable]
    pool: GraphPool
    config: CompilationConfig


@dataclass(frozen=True)
class Batch:
    """What a recording is for.

    Attributes:
        mode: PIECEWISE or FULL.
        descriptor: the caller's, or a synthetic one.
        own_context: no forward context was set: inputs are copied, results are the caller's own,
            and eager pieces see a context of ours.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    own_context: bool


class Recording:
    """A captured step.

    Args:
        program: what is recorded.
        roles: of the inputs, in the mode of the batch.
        batch: what it is for.
        inputs: what the capturing call was given.

    Attributes:
        batch: what it is for.
        roles: of the inputs.
        given: until it is finished, ``inputs`` with buffers in place of what is copied.
        direct: replays and returns, where a step is one graph and nothing else; else None.
    """

    def __init__(self, program: Program, roles: Roles, batch: Batch, inputs: Sequence[Any]) -> None:
        self.batch = batch
        self.roles = roles
        self._program = program
        self._context = override_forward_context(
            ForwardContext.synthetic(batch.mode, batch.descriptor)
        )
        self._copied: list[tuple[int, OwnedCopy]] = []
        self._addresses: list[tuple[int, int]] = []
        self._values: list[tuple[int, Any]] = []
        self._written_memory = frozenset(_memory(program.split, inputs))
        if batch.own_context:
            self._copied = [(p, OwnedCopy(inputs[p])) for p in roles.read]
        else:  # without a context of the caller's own, these are part of the key
            addressed = (*roles.read, *roles.written)
            self._addresses = [(p, inputs[p].data_ptr()) for p in addressed]
            self._held = [inputs[p].untyped_storage() for p in addressed]
            self._values = [(p, number(inputs[p])) for p in (*roles.numbers, *roles.scalars)]
        self.given = self._filled(inputs)
        self.direct: Callable[[], Any] | None = None
        self._replay: Callable[[Sequence[Any]], Any]
        self._returns: Returns
        self._generation = program.pool.generation

    def _filled(self, inputs: Sequence[Any]) -> list[Any]:
        given = list(inputs)
        for position, buffer in self._copied:
            buffer.fill(inputs[position])
            given[position] = buffer.tensor
        return given

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare with the captured addresses and numbers.

        Raises:
            AddressChangedError: a tensor that the graphs read lies elsewhere.
            HostValueChangedError: a number that the graphs hold is another one.
        """
        for position, before in self._addresses:
            if inputs[position].data_ptr() != before:
                raise AddressChangedError.moved(
                    *self._where(position), inputs[position].data_ptr(), before
                )
        for position, value in self._values:
            if not same_value(number(inputs[position]), value):
                raise HostValueChangedError.changed(
                    *self._where(position), number(inputs[position]), value
                )

    def _where(self, position: int) -> tuple[str, str, str]:
        value = self._program.split.inputs[position]
        path = f"input {position} {value.source or value.name!r}"
        return "the compiled step", str(self.batch.descriptor), path

    def overlap(self, inputs: Sequence[Any]) -> Why | None:
        """Why a copied input must not be copied this time: it is memory that the step writes."""
        if not self._written_memory:
            return None
        for position, _ in self._copied:
            if inputs[position].untyped_storage().data_ptr() in self._written_memory:
                path = self._where(position)[2]
                return Why(Reason.UNSUPPORTED_INPUT, f"{path} is memory that the step writes")
        return None

    def replay(self, inputs: Sequence[Any]) -> Any:
        """Run the step again. Nothing synchronises.

        Returns:
            What the graph returns: the caller's own, or without copies views of pool memory.
        """
        self._program.pool.follow_stream()
        result = self._replay(self._filled(inputs) if self._copied else inputs)
        return result if self._as_it_is else self._returns.make(result, inputs)

    def in_context(self, step: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
        """``step`` on a list of inputs, in the forward context of this batch."""
        if not self.batch.own_context:
            return lambda given: step(*given)

        def run(given: Sequence[Any]) -> Any:
            with self._context:
                return step(*given)

        return run

    def finish(
        self,
        replay: Callable[[Sequence[Any]], Any],
        result: Any,
        fixed: Set[int],
        originals: dict[str, Any],
        graph: Callable[[], None] | None = None,
    ) -> None:
        """The step is recorded: keep how it is replayed and what it returns.

        Args:
            replay: runs the step on inputs as ``given`` has them.
            result: what the recorded step returned.
            fixed: where the memory begins that graphs, bridges and copied inputs lie in.
            originals: where a step puts what bridges replace and the caller gets, by name.
            graph: replays all of the step, if it is one graph; ``result`` is what it fills then.
        """
        items = {
            item: compat.weak_tensor(leaf)
            for item, leaf in enumerate(compat.tree_leaves(result))
            if isinstance(leaf, torch.Tensor) and address(leaf) in fixed
        }
        for item, name in enumerate(returned_names(self._program.split)):
            if name in originals:
                items.pop(item, None)
        self._replay = replay
        copied = self.batch.own_context
        self._returns = Returns(self._program.split, result, items, self.given, originals, copied)
        self._as_it_is = self._returns.as_it_is
        if graph is not None and self._as_it_is and not self._copied:
            self.direct = _replay_in_order(self._program.pool, graph, result)
        self._generation = self._program.pool.generation
        self.given = []  # what dies must be able to die

    @property
    def void(self) -> bool:
        """Whether graphs that it replays have been cleared."""
        return self._generation != self._program.pool.generation

    def result(self, result: Any, inputs: Sequence[Any]) -> Any:
        """What the capturing call gives to its caller."""
        return self._returns.make(result, inputs)


def _replay_in_order(pool: GraphPool, graph: Callable[[], None], result: Any) -> Callable[[], Any]:
    """A step that is one graph: replayed on the current stream, after what other streams run."""
    follow = pool.follow_stream

    def run() -> Any:
        follow()
        graph()
        return result

    return run


def number(value: Any) -> Any:
    """A number as the host knows it. Of CPU memory, so that nothing synchronises."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _memory(split: SplitGraph, inputs: Sequence[Any]) -> Set[int]:
    """Where the memory of the written inputs begins."""
    written = (given for given, each in zip(inputs, split.inputs, strict=True) if each.written)
    return {address(given) for given in written if isinstance(given, torch.Tensor)} - {0}
