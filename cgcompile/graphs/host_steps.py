"""One call in a recording of the host device: :class:`HostStep`, and how it is looked at."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError
from cgcompile.graphs.host_pool import Life


class OpRun(NamedTuple):
    """One run of one recorded call.

    Attributes:
        name: of the op.
        line: where the program called it, such as ``model.py:12 in forward: y = f(x)``; empty if
            that was not noted.
        given: its arguments as they were before, by path; tensors are copies.
        left: its results, and its tensor arguments as they were after; likewise.
    """

    name: str
    line: str
    given: dict[str, Any]
    left: dict[str, Any]


@dataclass
class HostStep:
    """One recorded call.

    Attributes:
        name: of the op, for messages.
        call: the op.
        args: its positional arguments, tensors held weakly.
        kwargs: its keyword arguments, likewise.
        outside: inputs that the pool does not own, as (life, what it is in words).
        line: where the program called it, if that was noted.
        results: for each storage that the op makes: which of its outputs shows it, and where its
            bytes go.
    """

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outside: list[tuple[Life, str]]
    line: str = ""
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

    def watched(self) -> OpRun:
        """Run it, and copy what it is given and what it leaves."""
        given = _copies("argument", (*self.args, *self.kwargs.values()))
        made = _copies("result", self.run())
        after = _copies("argument", (*self.args, *self.kwargs.values()))
        return OpRun(self.name, self.line, given, {**made, **after})


def _copies(what: str, tree: Any) -> dict[str, Any]:
    return {
        f"{what} {path}".strip(): leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in compat.tree_paths(tree)
    }


def all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of a tensor, as uint8 [bytes]."""
    return storage_bytes(tensor.untyped_storage())


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
