"""What an eager break is given, and whether it changed that: :class:`Containers`."""

import operator
from typing import Any

from cgcompile import compat

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By position, by name."""


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
