"""What an engine passes to the manager for one step: :class:`Batch`, :class:`Metadata`, hooks."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.pool import GraphPool
from cgcompile.serving.buffers import InputBuffer
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
        uniform_decode: every request decodes the same number of tokens. The engine states it:
            prompts of equal length have the same numbers and are no decode.
        has_lora: LoRA adapters are active.
        num_active_loras: how many.
        extra: the values of the dispatcher's axes, in their order.
        state: what else the engine's ``metadata`` needs; the manager does not read it.

    Example:
        >>> inputs = {"input_ids": torch.tensor([1, 2, 3])}
        >>> batch = cgcompile.serving.Batch(3, 3, inputs, max_query_len=1, uniform_decode=True)
        >>> batch.num_tokens, batch.has_lora
        (3, False)
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
            if number is not None:  # the dispatcher raises for None
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

    Example:
        >>> def metadata(batch, descriptor, buffers):  # for CudaGraphManager(metadata=...)
        ...     return cgcompile.serving.Metadata(buffers["starts"], slot_mapping=buffers["slots"])
        >>> metadata(None, None, {"starts": [0, 3], "slots": [7, 8, 9]}).attn_metadata
        [0, 3]
    """

    attn_metadata: Any = None
    slot_mapping: Any = None
    num_tokens_across_dp: torch.Tensor | None = None
    additional: Mapping[str, Any] = field(default_factory=dict)


class GraphHooks:
    """What others do around graphs: offloaders with a copy stream, communicators, allocators.

    Each method does nothing here; override what you need.

    Example:
        >>> class Count(cgcompile.serving.GraphHooks):
        ...     replays = 0
        ...
        ...     def before_replay(self):
        ...         self.replays += 1
        >>> hooks = Count()  # for CudaGraphManager(hooks=[hooks])
        >>> hooks.before_replay()
        >>> hooks.replays
        1
    """

    def before_capture(self, pool: GraphPool | None) -> None:
        """Run before each set of captures.

        Args:
            pool: where memory comes from; None without graphs.
        """

    def around_captures(self) -> AbstractContextManager[Any]:
        """Return a context around each set of captures, such as a communicator's."""
        return nullcontext()

    def before_full_capture(self) -> None:
        """Run right before each capture of a whole step that begins, after its warm-up.

        Wait for copies here. Not called where the step cannot be captured and runs plain.
        """

    def end_of_capture(self) -> None:
        """Run inside the capture of a whole step, after model and epilogue: join streams here."""

    def before_replay(self) -> None:
        """Run before a step that may replay graphs: wait for copies that no graph contains."""

    def after_replay(self) -> None:
        """Run after the replay of a whole step."""


def axes_of_optional(specs: Sequence[InputBuffer], axes: Sequence[Axis]) -> dict[str, int]:
    """Return for each optional input the index in ``extra`` that states whether it is present."""
    indices = {
        axis.name: index
        for index, axis in enumerate(axes)
        if axis.rule == "exact" and not axis.full_only
    }
    names = [spec.name for spec in specs if spec.optional]
    for name in names:
        if name not in indices:
            raise ManagerError.no_axis(name=name)
    return {name: indices[name] for name in names}


def padding_batch(
    descriptor: BatchDescriptor,
    num_tokens: int,
    num_reqs: int,
    values: Mapping[str, torch.Tensor],
    optional: Mapping[str, int],
    state: Any = None,
) -> Batch:
    """Return a batch without requests of the engine, to be padded to the size of a graph."""
    extra = descriptor.extra  # empty in a step without a graph
    absent = dict.fromkeys(name for name, at in optional.items() if not extra or not extra[at])
    if descriptor.uniform:
        longest = descriptor.query_len or 1
    else:
        longest = descriptor.max_query_len or num_tokens or 1
    variant = descriptor.has_lora, descriptor.num_active_loras, extra
    inputs = {**values, **absent}
    return Batch(num_tokens, num_reqs, inputs, longest, descriptor.uniform, *variant, state)
