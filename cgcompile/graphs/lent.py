"""What callers get of the memory of graphs, step after step: :class:`Lent` and :class:`LentTree`.

A graph writes its results to the same place each time, so its steps may return the same tensor
objects: to make others takes microseconds. But a caller may change what it was given, in place:
``logits.t_()``, ``resize_()``, ``set_()``, ``logits.data = ...``, ``requires_grad_()``, or an item
of a dictionary. The rule: no later step shows anything of that. What was changed stays with the
caller as it is, and the next step returns another object over the same memory.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.errors import AddressChangedError
from cgcompile.graphs.guards import same_layout
from cgcompile.graphs.results import flatten, rebuilt

Layout = tuple[list[int | None], list[int]]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Lent:
    """Tensors that are handed out at each step.

    To look whether one was changed takes 0.2 us, a third of what making it anew would.

    Args:
        kept: plain tensors over the memory, in the layout that callers get; never handed out.

    Attributes:
        tensors: what was handed out last. Views of graph memory; none requires grad.
        starts: where the elements of each begin, as addresses.
        alike: tells, in one call, whether they are as they were but for where they lie.
    """

    def __init__(self, kept: Sequence[torch.Tensor]) -> None:
        self._kept = tuple(kept)
        self.starts = tuple([each.data_ptr() for each in kept])
        self.tensors = tuple(map(compat.alias, kept))
        self.alike = self._told()

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors as no caller has changed them; the same tuple if none has.

        Raises:
            AddressChangedError: a caller let their memory grow, so that it lies elsewhere now.
        """
        tensors = self.tensors
        if not self.alike(*tensors):
            return self._renewed()
        for tensor, start in zip(tensors, self.starts, strict=True):
            if tensor.data_ptr() != start:
                return self._renewed()
        return tensors

    def _renewed(self) -> tuple[torch.Tensor, ...]:
        """Others in place of those that were changed; torch may also say so of another mode."""
        for kept, start in zip(self._kept, self.starts, strict=True):
            if kept.data_ptr() != start:
                raise AddressChangedError.grown(now=kept.data_ptr(), before=start)
        pairs = list(zip(self.tensors, self._kept, strict=True))
        changed = [not _is_as_kept(one, kept) for one, kept in pairs]
        if any(changed):
            self.tensors = tuple(
                [
                    compat.alias(pair[1]) if new else pair[0]
                    for pair, new in zip(pairs, changed, strict=True)
                ]
            )
        self.alike = self._told()
        return self.tensors

    def _told(self) -> Callable[..., bool]:
        layouts: list[Layout] = [(list(each.shape), list(each.stride())) for each in self._kept]
        return compat.alike(self.tensors, layouts)


def _is_as_kept(one: torch.Tensor, kept: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or one.requires_grad or not same_layout(one, kept):
        return False
    return one.data_ptr() == kept.data_ptr()


class Passed(NamedTuple):
    """The leaves of a result that the step was given, and returned as they are.

    They belong to the caller already, who gets the very objects, as from the step itself.

    Attributes:
        weights: tensors of the module, by the place of the leaf.
        arguments: where each of the others is among the leaves of a call's arguments, likewise.
        names: of the arguments that are passed by name, in the order of those leaves.
    """

    weights: Mapping[int, torch.Tensor]
    arguments: Mapping[int, int]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], weights: Sequence[Any]
    ) -> "Passed":
        """What a call has returned of what it was given, and of the tensors of its module."""
        found = cls({}, {}, tuple(kwargs))
        places = {id(each): place for place, each in enumerate(found._given(args, kwargs))}
        known = {id(each) for each in weights}
        own: dict[int, torch.Tensor] = {}
        passed: dict[int, int] = {}
        for item, leaf in enumerate(flatten(result)[0]):
            if isinstance(leaf, torch.Tensor) and id(leaf) in known:
                own[item] = leaf
            elif isinstance(leaf, torch.Tensor) and id(leaf) in places:
                passed[item] = places[id(leaf)]
        return cls(own, passed, tuple(kwargs))

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return flatten([list(args), [kwargs[name] for name in self.names]])[0]

    def put(self, leaves: list[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Put the arguments of a call in their places among the leaves of its result."""
        if self.arguments:
            given = self._given(args, kwargs)
            for item, place in self.arguments.items():
                leaves[item] = given[place]


class LentTree:
    """What a step returns: tensors that are lent, in containers that are made for each step.

    Args:
        output: the structure, and tensors that are never handed out. What is neither a plain
            tensor nor a container, such as a parameter, is the same object at each step.
        passed: what is not lent, because the step was given it.
    """

    def __init__(self, output: Any, passed: Passed | None = None) -> None:
        self._output = output
        self._passed = passed or Passed({}, {}, ())
        self._leaves, _ = flatten(output)
        self._is_flat = type(output) is tuple and all(map(operator.is_, output, self._leaves))
        for place, weight in self._passed.weights.items():
            self._leaves[place] = weight
        own = {*self._passed.weights, *self._passed.arguments}
        self._places = [
            place
            for place, leaf in enumerate(self._leaves)
            if place not in own and can_be_lent(leaf)
        ]
        self._lent = Lent([self._leaves[place] for place in self._places])
        self._is_tensor = self._places == [0] and self._leaves[0] is output

    def get(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING) -> Any:
        """The result of a step.

        Args:
            args: of the call; they are looked at where the step returns some of them.
            kwargs: likewise.

        Raises:
            AddressChangedError: as :meth:`Lent.get`.
        """
        tensors = self._lent.get()
        if self._is_tensor:
            return tensors[0]
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        self._passed.put(leaves, args, kwargs)
        return tuple(leaves) if self._is_flat else rebuilt(self._output, leaves)


def can_be_lent(leaf: Any) -> bool:
    """Whether another tensor over the same memory can stand for a leaf of a result."""
    if type(leaf) is not torch.Tensor or leaf.requires_grad:
        return False
    if leaf.is_quantized or leaf.is_nested:  # more than a layout over memory
        return False
    return compat.is_plain_tensor(leaf)
