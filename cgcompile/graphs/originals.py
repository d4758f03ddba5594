"""What an eager break returned, beside the copy of it that graphs read: :class:`Original`.

A tensor that the break has just made dies after it was copied. One that the program keeps, such as
a cache, would then exist twice; where either is written, the other is stale, without an error.
"""

import torch

from cgcompile import compat
from cgcompile.graphs.arena import Block
from cgcompile.graphs.copies import numbers_as_bytes


class Original:
    """A result of a break that was copied, and that somebody may keep.

    Made, and asked, on the stream that breaks run on.

    Args:
        name: of the break.
        life: of the original.
        source: the original; held weakly.
        bridge: the copy that graphs read; held weakly.
        block: what the copy lies in.
    """

    def __init__(
        self,
        name: str,
        life: compat.StorageLife,
        source: torch.Tensor,
        bridge: torch.Tensor,
        block: Block,
    ) -> None:
        self.name = name
        self.life = life
        self._source = source
        self._bridge = bridge
        self._block = block
        self._was = numbers_as_bytes(source).clone()

    @property
    def is_stale(self) -> bool:
        """Whether the original or its copy has been written; synchronises."""
        if not torch.equal(numbers_as_bytes(self._source), self._was):
            return True
        return self._block.is_lent and not torch.equal(numbers_as_bytes(self._bridge), self._was)
