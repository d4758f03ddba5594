"""What graphs take of a device, in numbers: :class:`PoolBytes`."""

from typing import NamedTuple

MIB = 2**20


class PoolBytes(NamedTuple):
    """Memory of one pool, in bytes.

    Attributes:
        held: taken from the device, in use or not.
        live: of that, what tensors hold now.
        small: of what is held, the part that is kept for small blocks.
    """

    held: int = 0
    live: int = 0
    small: int = 0

    def __add__(self, other: object) -> "PoolBytes":
        assert isinstance(other, PoolBytes)
        return PoolBytes(*(a + b for a, b in zip(self, other, strict=True)))
