"""What an eager break returns, as a flat list and back: lists, tuples, dicts and dataclasses.

A bridge takes the place of each tensor; everything around them must be the same at every replay.

What callers get of the memory of graphs, step after step: :class:`Lent` and :class:`LentTree`.

A graph writes its results to the same place each time, so its steps may return the same tensor
objects: to make others takes microseconds. But a caller may change what it was given, in place:
``logits.t_()``, ``resize_()``, ``set_()``, ``logits.data = ...``, ``requires_grad_()``, or an item
of a dictionary. The rule: no later step shows anything of that. What was changed stays with the
caller as it is, and the next step returns another object over the same memory.

Give a captured model new weights: :func:`update_weights`.

Graphs read weights where they were at capture. Values written there are seen by the next replay,
with nothing captured again; tensors put in their place are not.
"""

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    HostValueChangedError,
    WeightsError,
    with_article,
)
from cgcompile.graphs.guards import is_plain_value, same_layout
from cgcompile.settings import checked


class _Fields(NamedTuple):
    """A dataclass among the leaves of a container."""

    kind: type
    names: tuple[str, ...]
    inside: tuple["Structure", ...]


class Structure(NamedTuple):
    """Containers without what is in them; equal for values that are built alike."""

    spec: Any
    leaves: tuple[_Fields | None, ...]


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass, with fields to look into."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def field_names(record: Any) -> tuple[str, ...]:
    """The names of the fields of a dataclass, in order."""
    return tuple(field.name for field in dataclasses.fields(record))


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value in order, and what is around them."""
    found: list[Any] = []
    tops = compat.tree_leaves(value)
    fields = tuple(_fields(leaf, found) for leaf in tops)
    return found, Structure(compat.tree_spec(value), fields)


def _fields(leaf: Any, found: list[Any]) -> _Fields | None:
    if not is_record(leaf):
        found.append(leaf)
        return None
    names = field_names(leaf)
    inside = []
    for name in names:
        leaves, structure = flatten(getattr(leaf, name))
        found += leaves
        inside.append(structure)
    return _Fields(type(leaf), names, tuple(inside))


def rebuilt(value: Any, leaves: Sequence[Any]) -> Any:
    """A value built like another one, of other leaves."""
    return _rebuilt(value, iter(leaves))


def _rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    tops = []
    for leaf in compat.tree_leaves(value):
        if not is_record(leaf):
            tops.append(next(leaves))
            continue
        made = copy.copy(leaf)
        for name in field_names(leaf):
            inner = _rebuilt(getattr(leaf, name), leaves)
            object.__setattr__(made, name, inner)  # a frozen one too: it is a copy
        tops.append(made)
    return compat.tree_unflatten(tops, compat.tree_spec(value))


def check_leaves(leaves: Sequence[Any], name: str) -> None:
    """Refuse what no bridge can carry.

    Raises:
        CaptureError: a leaf is neither a dense tensor nor a plain value.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if compat.is_wrapped(leaf):
                raise CaptureError.under_transform(
                    name=name, transform=compat.functorch_transform() or "vmap"
                )
            if not compat.is_plain_tensor(leaf):
                raise CaptureError.opaque_result(
                    name=name, found=f"{with_article(type(leaf).__name__)} of no dense memory"
                )
        elif not is_plain_value(leaf):
            raise CaptureError.opaque_result(
                name=name, found=f"{with_article(type(leaf).__name__)} object"
            )


def opener(
    name: str, batch: str, made: Any, structure: Structure | None
) -> Callable[[Any], list[Any]]:
    """What makes a list of a later result, and refuses one that is built in another way.

    Args:
        name: of the break, and ``batch``: of the capture, for messages.
        made: what it returned at capture, and ``structure``: how that is built.
    """

    def opened(again: Any) -> list[Any]:
        leaves, now = flatten(again)
        if now != structure:
            found, was = "built in another way", "not"
            raise HostValueChangedError.changed(
                what=name, batch=batch, path="the result", now=found, before=was
            )
        return leaves

    if isinstance(made, torch.Tensor):
        return lambda again: [again]
    if made is None:  # what writes into its arguments; worth a short way
        return lambda again: [None] if again is None else opened(again)
    return opened


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


@checked
def update_weights(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Write new values into the parameters and buffers of a module, in place.

    All of them are checked before the first is written, so a refused call changes nothing. Work of
    the current stream that reads the weights comes first. Values on the CPU are read before it
    returns.

    Args:
        module: a module, or what ``torch.compile`` made of it.
        state: new tensors by name, as ``state_dict()`` gives them, of a compiled module too; other
            names keep their values. Of equal shape; dtype and device are converted.

    Raises:
        WeightsError: a name that the module does not have, or another shape.
    """
    module = getattr(module, "_orig_mod", module)
    state = {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    for name, value in state.items():
        if name not in own:
            raise WeightsError.unknown(name=name, known=list(own))
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if found != tuple(own[name].shape):
            raise WeightsError.shape(
                name=name, found=str(found), expected=str(tuple(own[name].shape))
            )
    for name, value in state.items():
        target = own[name]
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(value)
