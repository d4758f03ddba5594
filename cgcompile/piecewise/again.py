"""The shortest way through a compiled graph: the step of the last call once more, :class:`Again`.

An engine asks for the same few steps all day, each under a context of its own. What the last call
replayed is remembered with everything that was worked out for it; the next call that asks for it
goes through one list of questions, and then it runs. What is not asked here costs nothing, so
whatever has a longer way (copied inputs, a policy other than ``on_input_change="raise"``, an
observer) is never remembered. A host step costs about as much as it has calls: each line below is
one, or none.
"""

import threading
import weakref
from typing import Any

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError
from cgcompile.forward_context import ForwardContext
from cgcompile.graphs.guards import same_value
from cgcompile.graphs.pool import GraphPool
from cgcompile.piecewise.bindings import Binding
from cgcompile.piecewise.recording import Recording

ANOTHER = object()  # what Again.step returns for a call that is not that step


class Turn:
    """Whose turn it is to run a step of one compiled graph, and which step was the last.

    Attributes:
        lock: of buffers, bindings and graphs; one thread runs a step at a time.
        owner: the thread that runs one; 0 if none does.
        again: the last step, if it can be had by the shortest way; set under the lock.
        replays: how many steps have gone that way; counted under the lock.
    """

    __slots__ = ("again", "lock", "owner", "replays")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = 0
        self.again: Again | None = None
        self.replays = 0

    def refuse_inside(self) -> None:
        """Raise where this thread runs a step already."""
        if self.owner == threading.get_ident():
            raise CaptureError.reentered()


class Again:
    """A recorded step of a caller's context, to be recognised when it comes again.

    Args:
        turn: of the compiled graph; it keeps this, this must not keep the graph.
        recording: the step.
        binding: whose weights it is for.
        weights: tells whether a call is given the same weights; None if they cannot be others.
        frozen: tensors that a call leaves out, to be added after its inputs.
        pool: of its graphs.
    """

    __slots__ = (
        "_addresses",
        "_binding",
        "_capturing",
        "_check",
        "_descriptor",
        "_frozen",
        "_generation",
        "_grad_is_on",
        "_lock",
        "_mode",
        "_numbers",
        "_pool",
        "_replay",
        "_turn",
        "_weights",
    )

    def __init__(
        self,
        turn: Turn,
        recording: Recording,
        binding: Binding,
        weights: compat.SameObjects | None,
        frozen: tuple[torch.Tensor, ...],
        pool: GraphPool,
    ) -> None:
        batch = recording.batch
        self._turn, self._lock = turn, turn.lock
        self._mode, self._descriptor = batch.mode, batch.descriptor
        self._grad_is_on, self._capturing = torch.is_grad_enabled, pool.device.is_capturing
        self._binding = weakref.ref(binding)
        self._pool, self._generation = pool, pool.generation
        self._weights = None if weights is None else weights.hold
        self._check, self._replay = recording.check, recording.replay
        self._addresses, self._numbers = recording.addresses, recording.numbers
        self._frozen = frozen if recording.reads_last(len(frozen)) else ()

    @property
    def gone(self) -> bool:
        """Whether it will never be recognised again."""
        binding = self._binding()
        return binding is None or binding.gone

    def step(self, context: ForwardContext, thread: int, inputs: tuple[Any, ...]) -> Any:
        """Replay it, if that is what a call asks for. Nothing synchronises.

        Args:
            context: of the caller.
            thread: the id of this thread.
            inputs: of the call.

        Returns:
            The result; :data:`ANOTHER` if it is another step, or something is in the way.

        Raises:
            AddressChangedError, HostValueChangedError: as :meth:`Recording.check`.
            CaptureError: called from inside of a step of the same graph.
        """
        # The same batch, and nothing that needs the longer way.
        if context.cudagraph_runtime_mode is not self._mode or self._grad_is_on():
            return ANOTHER
        asked = context.batch_descriptor
        if asked is not self._descriptor and asked != self._descriptor:
            return ANOTHER
        if self._capturing():
            return ANOTHER
        # The same graphs for the same weights.
        binding = self._binding()
        if binding is None or binding.gone or self._pool.generation != self._generation:
            return ANOTHER
        if self._weights is not None and (not self._weights(inputs) or binding.moved(inputs)):
            return ANOTHER
        turn = self._turn
        if turn.owner == thread:
            raise CaptureError.reentered()
        with self._lock:
            if turn.again is not self:
                return ANOTHER
            # The same inputs where they were; what differs at first sight is looked at closely.
            inputs += self._frozen
            for place, address in self._addresses:
                if inputs[place].data_ptr() != address:
                    self._check(inputs)
            for place, number in self._numbers:
                now = inputs[place]
                if now is not number and not same_value(now, number):
                    self._check(inputs)
            turn.owner = thread
            try:
                result = self._replay(inputs, context.num_unpadded_tokens)
            finally:
                turn.owner = 0
            turn.replays += 1
            return result
