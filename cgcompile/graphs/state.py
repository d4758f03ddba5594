"""The attributes and items of objects, read and put back without their own methods."""

from collections import OrderedDict, deque
from contextlib import suppress
from types import CellType, MemberDescriptorType
from typing import Any

import torch

_LIBRARIES = ("torch", "logging", "threading", "re", "weakref", "_thread", "functools")


class Slots:
    """The attributes of an object that are in no ``__dict__``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.members = [  # of one name there may be several, each with a value of its own
            member
            for kind in type(owner).__mro__
            if "__slots__" in vars(kind)
            for member in vars(kind).values()
            if isinstance(member, MemberDescriptorType)
        ]

    def read(self) -> dict[MemberDescriptorType, Any]:
        found = {}
        for member in self.members:
            with suppress(AttributeError):  # nothing is there
                found[member] = member.__get__(self._owner)
        return found

    def put_back(self, before: dict[MemberDescriptorType, Any]) -> None:
        for member in self.read().keys() - before.keys():
            member.__delete__(self._owner)
        for member, value in before.items():
            member.__set__(self._owner, value)  # that of a frozen object too


def is_librarys(found: Any) -> bool:
    """Whether an object is a part of torch or of Python that nobody should look into."""
    if isinstance(found, torch.nn.Module):
        return False
    top = type(found).__module__.partition(".")[0]
    return top in _LIBRARIES


def cells_of(function: Any) -> dict[str, CellType]:
    """What holds the values that a function has from around it, as far as they are there."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell for name, cell in zip(names, cells, strict=True) if _is_bound(cell)}


def _is_bound(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that is bound later
        return False
    return True


def plainly(container: Any) -> Any:
    """The type whose methods do no more than they say; those of a subclass may.

    An ``OrderedDict`` has its own order.
    """
    kinds = (OrderedDict, dict, list, deque, set, frozenset, tuple)
    return next(kind for kind in kinds if isinstance(container, kind))


def restore(holder: Any, before: Any) -> None:
    if isinstance(holder, Slots):
        holder.put_back(before)
    elif isinstance(holder, CellType):
        holder.cell_contents = before
    elif isinstance(holder, dict):
        kind = plainly(holder)
        now = [part for item in kind.items(holder) for part in item]
        if _differ(now, [part for item in before.items() for part in item]):
            kind.clear(holder)
            for key, value in before.items():
                kind.__setitem__(holder, key, value)
    elif isinstance(holder, (list, deque, set)):
        kind = plainly(holder)
        if _differ(list(kind.__iter__(holder)), before):
            kind.clear(holder)
            put: Any = kind.update if kind is set else kind.extend
            put(holder, before)


def _differ(now: list[Any], was: list[Any]) -> bool:
    return len(now) != len(was) or any(a is not b for a, b in zip(now, was, strict=True))
