"""One call in a recording of the host device: :class:`HostStep`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError
from cgcompile.graphs.host_pool import Life


@dataclass
class HostStep:
    """One recorded call.

    Attributes:
        name: of the op, for messages.
        call: the op.
        args: its positional arguments, tensors held weakly.
        kwargs: its keyword arguments, likewise.
        outside: inputs that the pool does not own, as (life, what it is in words).
        results: for each storage that the op makes: which of its outputs shows it, and where its
            bytes go.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outside: list[tuple[Life, str]]
    results: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def run(self) -> Any:
        """Call it, and put what it made where the recording has it; returns what it made."""
        for life, shape in self.outside:
            if life.ended:
                raise CaptureError.freed_input(what=self.name, shape=shape)
        made = self.call(*self.args, **self.kwargs)
        if self.results:
            leaves = compat.tree_leaves(made)
            for position, target in self.results:
                target.copy_(all_bytes(leaves[position]))
        return made


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of a tensor, as uint8 [bytes]."""
    return storage_bytes(tensor.untyped_storage())


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
