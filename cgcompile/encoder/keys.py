"""What a graph of an encoder is for: :class:`GraphKey`."""

from typing import NamedTuple

from cgcompile.descriptors import BatchDescriptor


class GraphKey(NamedTuple):
    """What one graph was captured for.

    Attributes:
        path: its set of graphs.
        budget: rows of its result.
        axes: one value for each capture axis.
    """

    path: str
    budget: int
    axes: tuple[int, ...] = ()

    @property
    def descriptor(self) -> BatchDescriptor:
        """As the forward context has it."""
        return BatchDescriptor(self.budget, extra=(self.path, *self.axes))
