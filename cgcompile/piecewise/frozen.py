"""The tensors that a trace binds to its graph, so that calls leave them out: :class:`Frozen`."""

from collections.abc import Mapping
from typing import Any

import torch

from cgcompile import compat


class Frozen:
    """The last inputs of a graph, where they are the same in all calls.

    Graphs are given other views of the same memory, which keep it. A caller gets the tensors
    themselves: a model that changes a buffer in place and keeps what came of it keeps its buffer.

    Args:
        count: how many there are.

    Attributes:
        count: how many there are.
        tensors: as the model has them; gradients need them. Empty until :meth:`bind`.
        held: the same memory, for all else.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.held: tuple[torch.Tensor, ...] = ()
        self._originals: dict[int, torch.Tensor] = {}  # by the id of what stands for them

    def bind(self, tensors: tuple[torch.Tensor, ...], held: tuple[torch.Tensor, ...]) -> None:
        """From now on, calls leave them out."""
        self.tensors, self.held = tensors, held
        pairs = zip(held, tensors, strict=True)
        self._originals = {id(view): each for view, each in pairs if view is not each}

    @property
    def now(self) -> tuple[torch.Tensor, ...]:
        """What a call that runs plain takes in their place."""
        return self.tensors if torch.is_grad_enabled() else self.held

    def by_position(self, inputs: int) -> Mapping[int, torch.Tensor]:
        """As the model has them, by their positions among all inputs of a graph."""
        return dict(enumerate(self.tensors, inputs - len(self.tensors)))

    def put_back(self, result: Any) -> Any:
        """A result with the tensors themselves where it has what stands for them."""
        if not self._originals:
            return result
        leaves = compat.tree_leaves(result)
        found = [self._originals.get(id(leaf), leaf) for leaf in leaves]
        if all(one is other for one, other in zip(leaves, found, strict=True)):
            return result
        return compat.tree_unflatten(found, compat.tree_spec(result))
