"""Fast path of a compiled graph: repeat a replayed step after a minimal list of checks.

An engine repeats a few steps, each under a new forward context. After a replay, everything that was
computed for the call is kept in a :class:`Again`. A later call for the same step runs one generated
function, :func:`step_source`, that checks and replays: host time is about proportional to the calls
made and the objects touched. Steps that need more (copied inputs, a policy other than
``on_input_change="raise"``, an observer) are never kept, so they add no checks here. :class:`Again`
checks the inputs of a graph; ``tracing/fast_path.py`` the arguments of a whole model.
"""

import textwrap
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.context import ENTERED, ENTERED_NAMES, ForwardContext, callers_context
from cgcompile.errors import CaptureError
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.guards import same_value
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import REPLAY_OF_ONE
from cgcompile.locks import new_lock, owns_lock
from cgcompile.runtime.recording import Recording

ANOTHER = object()  # what a step returns for a call that is not that step

Generated = Callable[..., Any]


class Turn:
    """Whose turn it is to run a step of one compiled graph, and which steps it remembers.

    Attributes:
        lock: of buffers, bindings and graphs; one thread runs a step at a time.
        owner: the thread that runs one; 0 if none does.
        epoch: another object as soon as nothing that was remembered before may run.
        again: the last step, as the compiled graph remembers it; set under the lock.
        agains: all of these, by recording; to make one takes ten times as long as to run it.
        short: the last step, as a whole call of the model; None if there is none.
        shorts: all of these, by runtime mode and descriptor.
        replays: how many steps have gone these ways; counted under the lock.
    """

    __slots__ = ("again", "agains", "epoch", "lock", "owner", "replays", "short", "shorts")

    def __init__(self) -> None:
        self.lock = new_lock()
        self.owner = 0
        self.epoch = object()
        self.again: Again | None = None
        self.agains: dict[Recording, Again] = {}
        self.short: Generated | None = None
        self.shorts: dict[Hashable, Generated] = {}
        self.replays = 0

    def refuse_inside(self) -> None:
        """Raise where this thread runs a step already."""
        if self.owner == threading.get_ident() and owns_lock(self.lock):
            raise CaptureError.reentered()

    def other(self) -> Generated | None:
        """The way of the step that the context asks for, the last one from now on.

        None if there is none, or it is the last one already.
        """
        context = callers_context()
        if context is None or self.owner == threading.get_ident():
            return None
        key = context.cudagraph_runtime_mode, context.batch_descriptor
        with self.lock:
            found = self.shorts.get(key)
            if found is self.short:
                return None
            self.short = found or self.short
            return found

    def switched(self, context: ForwardContext, *call: Any) -> Any:
        """Run the step that a context asks for, if it is remembered; else :data:`ANOTHER`.

        Args:
            context: it asks for another step than the last one, :attr:`short`.
            *call: what that is given.
        """
        found = self.shorts.get((context.cudagraph_runtime_mode, context.batch_descriptor))
        if found is None:
            return ANOTHER
        self.short = found
        return found(*call)

    def forget(self) -> None:
        """Nothing that is remembered may run. Takes no lock: a collection may call it."""
        self.epoch = object()
        self.again = self.short = None
        self.agains.clear()
        self.shorts.clear()


# What is asked of a call before its inputs, with what is returned for another step.
_ASKED = (
    ENTERED
    + """\
asked = context.batch_descriptor
if context.cudagraph_runtime_mode is not mode or asked is not descriptor and asked != descriptor:
    return {other}
if turn.owner == thread or grad_is_on() or capturing() or {forward}:
    return another
"""
)

# What a compiled graph asks of its inputs; what differs at first sight is looked at closely.
_CHECKED = """\
for place, address in addresses:
    if inputs[place].data_ptr() != address:
        check(inputs)
for place, number in numbers:
    now = inputs[place]
    if now is not number and not same_value(now, number):
        check(inputs)
"""


def step_source(
    signature: str, first: str, then: str, inputs: str | None, result: str, other: str = "another"
) -> str:
    """The text of a function that runs one remembered step, or returns ``another``.

    Args:
        signature: its parameters.
        first: lines that return ``another`` for a call with other inputs.
        then: lines that run when it is the turn of the call.
        inputs: the inputs of the graph; None for one graph that reads them where they were.
        result: what the function returns, where ``made`` is what the graph returned.
        other: what it returns where the context asks for another step.
    """
    text = textwrap.indent
    asked = _ASKED.format(other=other, forward=compat.FORWARD_GRADIENTS[0])
    run = (
        REPLAY_OF_ONE
        if inputs is None
        else f"made = replay({inputs}, context.num_unpadded_tokens)\n"
    )
    return (
        f"def step({signature}):\n{text(asked + first, ' ' * 4)}"
        "    with lock:\n"
        "        if turn.epoch is not epoch or pool.generation != generation:\n"
        "            return another\n"
        "        turn.owner = thread\n"
        "        try:\n"
        "            if context.inputs_ready is not None:\n"
        "                wait(context.inputs_ready, device)\n"
        f"{text(then + run, ' ' * 12)}"
        "        except BaseException:\n"
        "            failed()\n"
        "            raise\n"
        "        finally:\n"
        "            turn.owner = 0\n"
        "        turn.replays += 1\n"
        f"        return {result}\n"
    )


@cache
def _code(source: str) -> CodeType:
    return compile(source, "<cgcompile again>", "exec")


def made_step(source: str, names: Mapping[str, Any]) -> Generated:
    """The function of a text."""
    namespace = dict(names)
    exec(_code(source), namespace)
    step: Generated = namespace.pop("step")  # else a cycle keeps what is bound
    return step


class Again:
    """A recorded step of a caller's context, to be recognised when it comes again.

    Args:
        turn: of the compiled graph; it keeps this, this must not keep the graph.
        recording: the step.
        weights: what tells of the inputs of a call that its weights are others, or lie elsewhere;
            empty if they cannot be.
        frozen: tensors that a call leaves out, to be added after its inputs.
        pool: of its graphs.
        failed: counts a step that raised.

    Attributes:
        step: ``step(inputs)`` replays it: the result, or :data:`ANOTHER` if the call asks for
            another step, or something is in the way. It raises what :meth:`Recording.check` and
            an eager piece raise, and has counted that.
        recording: the step.
        frozen: as given, where a replay looks at them.
        watches_weights: whether a call may bring others.
        names: what the text of such a step refers to.
    """

    __slots__ = ("frozen", "names", "recording", "step", "watches_weights")

    def __init__(
        self,
        turn: Turn,
        recording: Recording,
        weights: Sequence[Callable[[tuple[Any, ...]], bool]],
        frozen: tuple[torch.Tensor, ...],
        pool: GraphPool,
        failed: Callable[[], None],
    ) -> None:
        self.recording = recording
        self.watches_weights = bool(weights)
        self.frozen = frozen if recording.reads_last(len(frozen)) else ()
        self.names: dict[str, Any] = {
            **ENTERED_NAMES,
            "another": ANOTHER,
            "mode": recording.batch.mode,
            "descriptor": recording.batch.descriptor,
            "grad_is_on": torch.is_grad_enabled,
            "forward_ad": compat.FORWARD_GRADIENTS[1],
            "capturing": pool.device.is_capturing,
            "pool": pool,
            "generation": pool.generation,
            "turn": turn,
            "lock": turn.lock,
            "epoch": turn.epoch,
            "wait": wait_for_inputs,
            "device": pool.where,
            "replay": recording.replay,
            "failed": failed,
        }
        own = {
            "addresses": recording.addresses,
            "numbers": recording.numbers,
            "check": recording.check,
            "same_value": same_value,
            "frozen": self.frozen,
        }
        first = then = ""
        for place, others in enumerate(weights):
            own[f"others_{place}"] = others
            first += f"if others_{place}(inputs):\n    return another\n"
        if self.frozen:
            then = "inputs += frozen\n"
        source = step_source("inputs", first, then + _CHECKED, "inputs", "made")
        self.step = made_step(source, self.names | own)

    @property
    def alone(self) -> dict[str, Any] | None:
        """Further names of a step that is one graph and nothing else; None for another one."""
        sequence = self.recording.alone
        return None if sequence is None else sequence.names_of_one()
