"""How a result of an eager piece reaches the captured piece that reads it.

A graph reads the address it saw. A fresh tensor is copied into a buffer of ours, the bridge; a
tensor that lies in memory at a fixed address is checked to be there again; a value that is no
tensor must be the same again. Each is called with the result and returns what the graph reads.
"""

from collections.abc import Callable
from typing import Any

import torch

from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.graphs.copies import OwnedCopy
from cgcompile.graphs.guards import layout_text, same_layout, same_value

Where = tuple[str, str, str]  # piece, batch, value: for messages
Crossing = Callable[[Any], Any]


class Bridge:
    """Copies a fresh result of an eager piece to where the graph after it reads."""

    def __init__(self, where: Where, made: torch.Tensor) -> None:
        self._where = where
        self.buffer = OwnedCopy(made)

    def __call__(self, made: Any) -> torch.Tensor:
        if not same_layout(made, self.buffer.tensor):
            before = layout_text(self.buffer.tensor)
            raise HostValueChangedError.changed(*self._where, layout_text(made), before)
        self.buffer.fill(made)
        return self.buffer.tensor


class SameAddress:
    """A result of an eager piece that lies in memory at a fixed address, such as an argument's."""

    def __init__(self, where: Where, made: torch.Tensor) -> None:
        self._where = where
        self._address = made.data_ptr()
        self._layout = made.to("meta")

    def __call__(self, made: Any) -> Any:
        if not same_layout(made, self._layout):
            before = layout_text(self._layout)
            raise HostValueChangedError.changed(*self._where, layout_text(made), before)
        if made.data_ptr() != self._address:
            raise AddressChangedError.moved(*self._where, made.data_ptr(), self._address)
        return made


class SameValue:
    """A result of an eager piece that is no tensor: the graph after it has recorded it."""

    def __init__(self, where: Where, made: Any) -> None:
        self._where = where
        self._made = made

    def __call__(self, made: Any) -> Any:
        if not same_value(made, self._made):
            raise HostValueChangedError.changed(*self._where, repr(made), repr(self._made))
        return made
