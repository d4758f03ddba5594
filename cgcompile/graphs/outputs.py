"""Results of steps: containers as a flat list and back, and tensors that steps return again.

An eager break returns lists, tuples, dicts and dataclasses (:func:`flatten`). A bridge takes the
place of each tensor; everything around them must be the same at every replay.

A graph writes its results to the same addresses each time, so its steps may return the same tensor
objects, which saves microseconds (:class:`ReusedTensors`). A caller may change such an object in
place: ``logits.t_()``, ``resize_()``, ``set_()``, ``logits.data = ...``, ``requires_grad_()``. The
rule: no later step shows that. The caller keeps the changed object, and the next step returns
another one over the same memory.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    with_article,
)
from cgcompile.graphs.guards import Change, is_plain_value, same_layout

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass, whose fields are opened."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def field_names(record: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, in order."""
    return tuple(field.name for field in dataclasses.fields(record))


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a value, and its structure, equal for values that are built alike."""
    leaves: list[Any] = []
    structure: list[Any] = [compat.tree_spec(value)]
    for leaf in compat.tree_leaves(value):
        if not is_record(leaf):
            leaves.append(leaf)
            structure.append(None)
            continue
        fields = [flatten(getattr(leaf, name)) for name in field_names(leaf)]
        leaves += [inner for inside, _ in fields for inner in inside]
        structure.append((type(leaf), *(inside for _, inside in fields)))
    return leaves, structure


def rebuilt(value: Any, leaves: Sequence[Any]) -> Any:
    """Return a value built like another one, of other leaves."""
    return _rebuilt(value, iter(leaves))


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    tops = []
    for leaf in compat.tree_leaves(value):
        if not is_record(leaf):
            tops.append(next(leaves))
            continue
        record = copy.copy(leaf)
        for name in field_names(leaf):
            inner = _rebuilt(getattr(leaf, name), leaves)
            object.__setattr__(record, name, inner)  # a frozen one too: it is a copy
        tops.append(record)
    return compat.tree_unflatten(tops, compat.tree_spec(value))


def check_leaves(leaves: Sequence[Any], name: str) -> None:
    """Raise CaptureError for a result that is neither a dense tensor nor a plain value."""
    for leaf in leaves:
        kind = with_article(type(leaf).__name__)
        if not isinstance(leaf, torch.Tensor):
            if not is_plain_value(leaf):
                raise CaptureError.opaque_result(name=name, found=f"{kind} object")
        elif compat.is_wrapped(leaf):
            transform = compat.functorch_transform() or "vmap"
            raise CaptureError.under_transform(name=name, transform=transform)
        elif not compat.is_plain_tensor(leaf):
            raise CaptureError.opaque_result(name=name, found=f"{kind} of no dense memory")


def opener(name: str, batch: str, captured: Any, structure: Any) -> Callable[[Any], list[Any]]:
    """Return what flattens later results of a break, and refuses another structure."""

    def opened(result: Any) -> list[Any]:
        leaves, now = flatten(result)
        if now != structure:
            raise Change("the result", "not", "built in another way").error(name, batch)
        return leaves

    if isinstance(captured, torch.Tensor):
        return lambda result: [result]
    if captured is None:  # an op that writes into its arguments: worth a shorter path
        return lambda result: [None] if result is None else opened(result)
    return opened


class ReusedTensors:
    """Tensors over fixed memory, which each step returns; 0.2 us to see that none was changed."""

    def __init__(self, kept: Sequence[torch.Tensor]) -> None:
        self._kept = tuple(kept)  # no caller gets these
        self.starts = tuple([tensor.data_ptr() for tensor in kept])
        self.tensors = tuple(map(compat.alias, kept))  # what callers have got last
        self._alike = self._comparison()

    def get(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors; replace those that a caller has changed."""
        tensors = self.tensors
        if not self._alike(*tensors):
            return self._renewed()
        for tensor, start in zip(tensors, self.starts, strict=True):
            if tensor.data_ptr() != start:
                return self._renewed()
        return tensors

    def _renewed(self) -> tuple[torch.Tensor, ...]:
        """Replace the tensors that were changed: perhaps none, but inference mode was."""
        for kept, start in zip(self._kept, self.starts, strict=True):
            if kept.data_ptr() != start:
                raise AddressChangedError.grown(now=kept.data_ptr(), before=start)
        renewed = [
            tensor if _is_unchanged(tensor, kept) else compat.alias(kept)
            for tensor, kept in zip(self.tensors, self._kept, strict=True)
        ]
        if any(map(operator.is_not, renewed, self.tensors)):
            self.tensors = tuple(renewed)
        self._alike = self._comparison()
        return self.tensors

    def _comparison(self) -> Callable[..., bool]:
        """Return what compares all but addresses, in one call."""
        return compat.alike(self.tensors, [(list(t.shape), list(t.stride())) for t in self._kept])


def _is_unchanged(tensor: torch.Tensor, kept: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.requires_grad or not same_layout(tensor, kept):
        return False
    return tensor.data_ptr() == kept.data_ptr()


def _argument_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> list[Any]:
    return flatten([list(args), [kwargs[name] for name in names]])[0]


class ReusedResult:
    """The result of a step: reused tensors, arguments and weights, in new containers each time."""

    def __init__(
        self,
        output: Any,
        result: Any = (),  # of the capture, of which ``output`` is kept
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NOTHING,
        weights: Sequence[Any] = (),
    ) -> None:
        self._output, self._names = output, tuple(kwargs)
        indices = {id(x): at for at, x in enumerate(_argument_leaves(args, kwargs, self._names))}
        own = {id(weight) for weight in weights}
        tensors = {
            item: leaf
            for item, leaf in enumerate(flatten(result)[0])
            if isinstance(leaf, torch.Tensor)
        }
        passed = {item: leaf for item, leaf in tensors.items() if id(leaf) in own}
        self._arguments = {  # item of the result: index among the leaves of the arguments
            item: indices[id(leaf)]
            for item, leaf in tensors.items()
            if item not in passed and id(leaf) in indices
        }
        leaves, _ = flatten(output)
        self._is_flat = type(output) is tuple and all(map(operator.is_, output, leaves))
        self._items = [
            item
            for item, leaf in enumerate(leaves)
            if item not in passed and item not in self._arguments and is_reusable(leaf)
        ]
        self._reused = ReusedTensors([leaves[item] for item in self._items])
        self._is_tensor = self._items == [0] and leaves[0] is output
        for item, weight in passed.items():
            leaves[item] = weight
        self._leaves = leaves

    def get(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING) -> Any:
        """Return the result of the step of a call; raises as :meth:`ReusedTensors.get`."""
        tensors = self._reused.get()
        if self._is_tensor:
            return tensors[0]
        leaves = list(self._leaves)
        for item, tensor in zip(self._items, tensors, strict=True):
            leaves[item] = tensor
        if self._arguments:
            arguments = _argument_leaves(args, kwargs, self._names)
            for item, index in self._arguments.items():
                leaves[item] = arguments[index]
        return tuple(leaves) if self._is_flat else rebuilt(self._output, leaves)


def is_reusable(leaf: Any) -> bool:
    """Return whether another tensor over the same memory can stand for a leaf of a result."""
    if type(leaf) is not torch.Tensor or leaf.requires_grad:
        return False
    if leaf.is_quantized or leaf.is_nested:  # more than a layout over memory
        return False
    return compat.is_plain_tensor(leaf)
