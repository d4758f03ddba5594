"""What an eager break returns, as a flat list and back: lists, tuples, dicts and dataclasses.

A bridge takes the place of each tensor; everything around them must be the same at every replay.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError, HostValueChangedError, with_article
from cgcompile.graphs.guards import is_plain_value


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
