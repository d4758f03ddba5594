"""What an engine passes to the manager for one step: :class:`Batch`, :class:`Metadata`, hooks.

And batches without requests: to warm up and capture with, and for a rank without work.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.pool import GraphPool
from cgcompile.serving.buffers import StaticInputs
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.plan import Axis
from cgcompile.settings import whole


@dataclass(frozen=True)
class Batch:
    """One step, unpadded.

    Attributes:
        num_tokens: rows of the step.
        num_reqs: requests of the step.
        inputs: the real rows of each input buffer, by name; None for an optional one.
        max_query_len: the longest query; None if unknown.
        uniform_decode: every request decodes the same number of tokens. The engine says so: prompts
            of equal length look alike, and are not.
        has_lora: LoRA adapters are active.
        num_active_loras: how many.
        extra: the values of the dispatcher's axes, in their order.
        state: whatever the engine's ``metadata`` needs beside; not looked at here.
    """

    num_tokens: int
    num_reqs: int
    inputs: Mapping[str, torch.Tensor | None]
    max_query_len: int | None = None
    uniform_decode: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    extra: tuple[Any, ...] = ()
    state: Any = None

    def __post_init__(self) -> None:
        counted = type(self.num_tokens) is type(self.num_reqs) is type(self.num_active_loras) is int
        if counted and type(self.max_query_len) in (int, type(None)):
            return
        for name in ("num_tokens", "num_reqs", "max_query_len", "num_active_loras"):
            number = whole(getattr(self, name))
            if number is not None:  # else the dispatcher names it
                object.__setattr__(self, name, number)

    def numbers(self) -> dict[str, Any]:
        """Return the arguments of :meth:`CudagraphDispatcher.dispatch`, by name."""
        return {
            "num_tokens": self.num_tokens,
            "num_reqs": self.num_reqs,
            "max_query_len": self.max_query_len,
            "uniform_decode": self.uniform_decode,
            "has_lora": self.has_lora,
            "num_active_loras": self.num_active_loras,
            "extra": self.extra,
        }


NO_WORK = Batch(0, 0, {})


@dataclass(frozen=True)
class Metadata:
    """What the forward context of a step holds, built after padding.

    Attributes:
        attn_metadata: for attention ops.
        slot_mapping: where new keys and values go.
        num_tokens_across_dp: int32 [R] on the CPU, the tokens of each of R ranks; None: what the
            manager's agreement found.
        additional: anything else.
    """

    attn_metadata: Any = None
    slot_mapping: Any = None
    num_tokens_across_dp: torch.Tensor | None = None
    additional: Mapping[str, Any] = field(default_factory=dict)


class GraphHooks:
    """What others do around graphs: offloaders with a copy stream, communicators, allocators.

    Each method does nothing here; override what you need.
    """

    def before_capture(self, pool: GraphPool | None) -> None:
        """Before each set of captures; ``pool`` is where memory comes from, None without graphs."""

    def before_full_capture(self) -> None:
        """Right before each capture of a whole step that begins, after its warm-up.

        Wait for copies here. Not called where the step cannot be captured and runs plain.
        """

    def end_of_capture(self) -> None:
        """Inside the capture of a whole step, after the model: join other streams here."""

    def before_replay(self) -> None:
        """Before a step that may replay graphs: wait for copies that the graphs cannot see."""

    def after_replay(self) -> None:
        """After it."""


class AllHooks:
    """Calls the hooks of one manager, in their order."""

    def __init__(self, hooks: Iterable[GraphHooks]) -> None:
        self._hooks = tuple(hooks)

    def before_capture(self, pool: GraphPool | None) -> None:
        for hook in self._hooks:
            hook.before_capture(pool)

    def before_full_capture(self) -> None:
        for hook in self._hooks:
            hook.before_full_capture()

    def end_of_capture(self) -> None:
        for hook in self._hooks:
            hook.end_of_capture()

    def around(self, step: Callable[[], Any]) -> Any:
        """Run a step that may replay, between the hooks before and after it.

        ``after_replay`` is called of each hook whose ``before_replay`` returned, whatever happens.
        """
        begun = 0
        try:
            for hook in self._hooks:
                hook.before_replay()
                begun += 1
            return step()
        finally:
            for hook in self._hooks[:begun]:
                hook.after_replay()


class PaddingBatches:
    """Makes batches that fit the buffers of one manager, and checks its optional inputs."""

    def __init__(self, inputs: StaticInputs, dispatcher: CudagraphDispatcher) -> None:
        self._inputs = inputs
        self._max_num_reqs = dispatcher.limits.max_num_reqs
        self._optional = _axis_of_optional(inputs, dispatcher.axes)

    def check(self, batch: Batch) -> None:
        """Raise unless the optional inputs of a batch are present as its ``extra`` states.

        A batch without tokens has no graph: its ``extra`` is not checked.
        """
        for name, index in self._optional.items() if batch.num_tokens else ():
            if batch.extra[index] is not (batch.inputs.get(name) is not None):
                raise ManagerError.presence(name=name, said=batch.extra[index])

    def dummy(self, descriptor: BatchDescriptor) -> Batch:
        """Return a batch of a padded size that any model can run: see :meth:`InputBuffer.dummy`.

        A graph for mixed batches is captured with one query of all tokens as the longest, so that
        the kernels of prefill are captured.
        """
        tokens = descriptor.num_tokens
        reqs = descriptor.num_reqs or min(tokens, self._max_num_reqs)
        absent = self._absent(descriptor)
        values = {
            spec.name: None if spec.name in absent else spec.dummy(tokens, reqs)
            for spec in self._inputs.specs
        }
        longest = tokens // reqs if descriptor.uniform else descriptor.max_query_len or tokens
        return _padding_batch(descriptor, tokens, reqs, values, longest)

    def idle(self, descriptor: BatchDescriptor, state: Any) -> Batch:
        """Return one request without tokens, to be padded to a size: no row of it is real.

        Rows follow from the tails of the buffers alone, so that a tail that writes to no cache
        (slot -1) makes an idle rank leave caches alone.
        """
        values = {**self._inputs.idle(), **dict.fromkeys(self._absent(descriptor))}
        longest = descriptor.query_len or descriptor.max_query_len or 1
        return _padding_batch(descriptor, 0, 1, values, longest, state)

    def _absent(self, descriptor: BatchDescriptor) -> set[str]:
        """Return the optional inputs that a batch lacks; all of them in a step without a graph."""
        extra = descriptor.extra
        return {name for name, at in self._optional.items() if not extra or not extra[at]}


def _padding_batch(
    descriptor: BatchDescriptor,
    num_tokens: int,
    num_reqs: int,
    values: dict[str, torch.Tensor | None],
    longest: int,
    state: Any = None,
) -> Batch:
    uniform, variant = descriptor.uniform, (descriptor.has_lora, descriptor.num_active_loras)
    return Batch(num_tokens, num_reqs, values, longest, uniform, *variant, descriptor.extra, state)


def _axis_of_optional(inputs: StaticInputs, axes: Sequence[Axis]) -> dict[str, int]:
    """Return for each optional input the index in ``extra`` that states whether it is present."""
    indices = {
        axis.name: index
        for index, axis in enumerate(axes)
        if axis.rule == "exact" and not axis.full_only
    }
    names = [spec.name for spec in inputs.specs if spec.optional]
    for name in names:
        if name not in indices:
            raise ManagerError.no_axis(name=name)
    return {name: indices[name] for name in names}
