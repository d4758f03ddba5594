"""What an eager break is given: how it is kept, and whether the break changed it."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from cgcompile import compat
from cgcompile.graphs.arena import address

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By position, by name."""


def held(given: Arguments, owns: Callable[[torch.Tensor], bool]) -> Arguments:
    """How a segment keeps arguments.

    Weakly where the memory is that of the recording, or it could not be used again; strongly where
    nobody else may keep it.

    Args:
        given: the arguments.
        owns: whether a tensor lies in memory of the recording.
    """

    def keep(leaf: Any) -> Any:
        ours = isinstance(leaf, torch.Tensor) and address(leaf) and owns(leaf)
        return compat.weak_tensor(leaf) if ours else leaf

    with compat.outside_inference_mode():  # once for all that is held weakly
        kept: Arguments = compat.tree_map(keep, given)
    return kept


def transform_around(given: Arguments) -> str | None:
    """The transform of ``torch.func`` that lets no break run; None if there is none.

    Under ``vmap`` a break may be given what is not mapped: that is an ordinary tensor.
    """
    found = compat.functorch_transform()
    if found == "Vmap" and not any(map(compat.is_wrapped, compat.tree_tensors(given))):
        return None
    return found


class Containers:
    """The arguments of a break, to be compared with themselves after it.

    A function cannot change the tuple and the dict that its arguments come in, so without a
    container among them there is nothing to compare.

    Attributes:
        leaves: what is in the arguments, at first.
    """

    def __init__(self, given: Arguments) -> None:
        self._given = given
        self.leaves = compat.tree_leaves(given)
        args, kwargs = given
        nested = any(map(compat.is_container, (*args, *kwargs.values())))
        self._spec = compat.tree_spec(given) if nested else None

    @property
    def changed(self) -> bool:
        if self._spec is None:
            return False
        now = compat.tree_leaves(self._given)
        if compat.tree_spec(self._given) != self._spec:
            return True
        return any(map(operator.is_not, now, self.leaves))
