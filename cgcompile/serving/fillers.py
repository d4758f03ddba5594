"""Batches that nobody asked for: to warm up and capture with, and for a rank without work."""

from collections.abc import Sequence
from typing import Any

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.serving.buffers import StaticInputs
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.steps import Batch, dummy_batch
from cgcompile.serving.variants import Axis


class Fillers:
    """Makes batches that fit the buffers of one manager, and knows its optional inputs.

    Args:
        inputs: the buffers.
        dispatcher: whose axes say which optional inputs are there.

    Raises:
        ManagerError: an optional input without an axis.
    """

    def __init__(self, inputs: StaticInputs, dispatcher: CudagraphDispatcher) -> None:
        self._inputs = inputs
        self._most = dispatcher.limits.max_num_reqs
        self._optional = _places(inputs, dispatcher.axes)

    def check(self, batch: Batch) -> None:
        """Raise unless the optional inputs of a batch are there as its ``extra`` says.

        A batch without tokens has no graph, and its ``extra`` is not looked at.

        Raises:
            ManagerError: one is not.
        """
        for name, place in self._optional.items() if batch.num_tokens else ():
            if batch.extra[place] is not (batch.inputs.get(name) is not None):
                raise ManagerError.presence(name=name, said=batch.extra[place])

    def dummy(self, descriptor: BatchDescriptor) -> Batch:
        """A batch of a padded size; see :func:`~cgcompile.serving.steps.dummy_batch`."""
        return dummy_batch(descriptor, self._inputs.specs, self._most, self._absent(descriptor))

    def idle(self, descriptor: BatchDescriptor, state: Any) -> Batch:
        """One request without tokens, to be padded to a size: no row of it is real.

        What is written for a row follows from the tails of the buffers alone, so that a tail that
        writes to no cache (slot -1) is all it takes for an idle rank to leave caches alone.

        Args:
            descriptor: the padded sizes.
            state: for the engine's ``metadata``.
        """
        absent = dict.fromkeys(self._absent(descriptor))
        longest = descriptor.max_query_len or 1
        if descriptor.uniform and descriptor.num_reqs:
            longest = descriptor.num_tokens // descriptor.num_reqs
        return Batch(
            0,
            1,
            {**self._inputs.idle(), **absent},
            longest,
            descriptor.uniform,
            descriptor.has_lora,
            descriptor.num_active_loras,
            descriptor.extra,
            state,
        )

    def _absent(self, descriptor: BatchDescriptor) -> set[str]:
        """Optional inputs that a batch is without; all of them in a step without a graph."""
        extra = descriptor.extra
        return {name for name, at in self._optional.items() if not extra or not extra[at]}


def _places(inputs: StaticInputs, axes: Sequence[Axis]) -> dict[str, int]:
    """The place in ``extra`` that says whether an optional input is there."""
    exact = (place for place, a in enumerate(axes) if a.rule == "exact" and not a.full_only)
    names = {axes[place].name: place for place in exact}
    found = [spec.name for spec in inputs.specs if spec.optional]
    for name in found:
        if name not in names:
            raise ManagerError.no_axis(name=name)
    return {name: names[name] for name in found}
