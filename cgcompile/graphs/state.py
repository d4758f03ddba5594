"""The Python state that a call reaches: kept, compared and put back.

Modules, lists, dicts, sets and plain objects, their ``__slots__`` too, are followed from the model,
from what a function has around it and from the arguments, as deep as :data:`_DEEPEST`. Globals, and
what other libraries keep elsewhere, are not: any code may use those meanwhile.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from cgcompile import compat

_DEEPEST = 8
_MOST = 100_000  # holders; a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_OPAQUE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, torch.Size, torch.layout)
_LIBRARIES = ("torch", "logging", "threading", "re", "weakref", "_thread", "functools")
_TABLES = ("_parameters", "_buffers", "_modules")


class Place(NamedTuple):
    """Where something is kept.

    Attributes:
        path: from the model or an argument, such as ``self.layers.0.cache``.
        owner: the object whose attribute it is, or is inside of.
        attribute: that attribute; empty if there is none.
    """

    path: str
    owner: Any
    attribute: str

    @property
    def key(self) -> tuple[int, str]:
        """Owner and attribute, to be compared; an owner may be equal to others, or unhashable."""
        return id(self.owner), self.attribute

    def item(self, key: object) -> "Place":
        """An item of the container that is here."""
        return Place(f"{self.path}[{key!r}]", self.owner, self.attribute)

    def of(self, owner: Any, attribute: str) -> "Place":
        """An attribute of the object that is here."""
        return Place(f"{self.path}.{attribute}", owner, attribute)


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


@dataclass
class Moved:
    """A tensor object and its memory and geometry, to be put back."""

    tensor: torch.Tensor
    alias: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Moved":
        """Remember where a tensor is."""
        return cls(tensor, tensor.detach())

    def put_back(self) -> None:
        """Let the tensor object have the memory again that it had."""
        now, was = self.tensor.detach(), self.alias
        if (now.shape, now.stride(), now.data_ptr()) != (was.shape, was.stride(), was.data_ptr()):
            self.tensor.data = was


class State:
    """A picture of all that is reachable, by place.

    Args:
        roots: what is followed, by the name that paths begin with.

    Attributes:
        values: what each place holds: tensors, plain values, or the objects that hold more.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.values: dict[str, tuple[Place, Any]] = {}
        self._holders: dict[int, tuple[Any, Any]] = {}  # by identity: (holder, shallow copy)
        self._tensors: dict[int, Moved] = {}
        for name, root in roots.items():
            self._follow(root, Place(name, None, ""), 0)

    @classmethod
    def of(cls, model: Any, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> "State":
        """What a model and the arguments of its calls lead to.

        Args:
            model: a module, a function or a method.
            *calls: positional and keyword arguments of each.
        """
        roots: dict[str, Any] = {"self": getattr(model, "__self__", model)}
        cells = cells_of(model)
        for name, cell in cells.items():  # of which one may be called "self", as in a decorator
            roots[name if name not in roots else f"outer {name}"] = cell.cell_contents
        for number, (args, kwargs) in enumerate(calls):
            prefix = "second " * number
            roots |= {f"{prefix}input {i}": each for i, each in enumerate(args)}
            roots |= {f"{prefix}input {name!r}": each for name, each in kwargs.items()}
        with compat.outside_inference_mode(), torch.no_grad():
            state = cls(roots)
        state._holders |= {id(cell): (cell, cell.cell_contents) for cell in cells.values()}
        return state

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Every module that is reachable."""
        found = {id(each): each for _, each in self.values.values()}
        return [each for each in found.values() if isinstance(each, torch.nn.Module)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that is reachable."""
        return [each.tensor for each in self._tensors.values()]

    def moved(self, after: "State", tensor: torch.Tensor) -> tuple[Any, Any] | None:
        """What a tensor object was here and is after, if its memory is elsewhere now."""
        pair = [each._tensors.get(id(tensor)) for each in (self, after)]
        was, now = (each.alias if each is not None else None for each in pair)
        if was is None or now is None or was.data_ptr() == now.data_ptr():
            return None
        return was, now

    def put_back(self) -> None:
        """Every container, attribute and tensor object is as it was; not the bytes of tensors."""
        for holder, before in self._holders.values():
            restore(holder, before)
        for tensor in self._tensors.values():
            tensor.put_back()

    def _follow(self, found: Any, place: Place, depth: int) -> None:
        self.values[place.path] = (place, found)
        if isinstance(found, torch.Tensor):
            if id(found) not in self._tensors and compat.is_plain_tensor(found):
                self._tensors[id(found)] = Moved.of(found)
        elif isinstance(found, (_PLAIN, _OPAQUE)) or id(found) in self._holders:
            return
        elif depth < _DEEPEST and len(self._holders) < _MOST:
            for inner, at in self._items(found, place):
                deeper = depth if isinstance(inner, torch.nn.Module) else depth + 1
                self._follow(inner, at, deeper)

    def _items(self, found: Any, place: Place) -> Iterator[tuple[Any, Place]]:
        if isinstance(found, dict):
            items = list(_plainly(found).items(found))
            self._holders[id(found)] = (found, dict(items))
            for key, each in items if len(items) < _LONG else ():
                yield each, place.item(key)
        elif isinstance(found, (list, deque, set, tuple, frozenset)):
            kept = list(_plainly(found).__iter__(found))
            if not isinstance(found, (tuple, frozenset)):
                self._holders[id(found)] = (found, kept)
            for number, each in enumerate(kept if len(kept) < _LONG else ()):
                yield each, place.item(number)
        if isinstance(found, tuple):
            return
        if is_librarys(found):
            return
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict):
            yield from self._attributes(found, attributes, place)
        slots = Slots(found)
        if slots.members:
            self._holders.setdefault(id(found), (found, None))
            self._holders[id(slots)] = (slots, slots.read())
            for member, value in slots.read().items():
                yield value, place.of(found, member.__name__)

    def _attributes(
        self, found: Any, attributes: dict[str, Any], place: Place
    ) -> Iterator[tuple[Any, Place]]:
        self._holders.setdefault(id(found), (found, None))
        self._holders[id(attributes)] = (attributes, dict(attributes))
        module = isinstance(found, torch.nn.Module)
        for name, value in list(attributes.items()):
            if module and name in _TABLES:
                self._holders[id(value)] = (value, dict(value))
                for key, each in list(value.items()):
                    yield each, place.of(found, key)
            elif not (module and name.startswith("_") and name.endswith(("hooks", "kwargs"))):
                yield value, place.of(found, name)


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


def _plainly(container: Any) -> Any:
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
        kind = _plainly(holder)
        now = [part for item in kind.items(holder) for part in item]
        if _differ(now, [part for item in before.items() for part in item]):
            kind.clear(holder)
            for key, value in before.items():
                kind.__setitem__(holder, key, value)
    elif isinstance(holder, (list, deque, set)):
        kind = _plainly(holder)
        if _differ(list(kind.__iter__(holder)), before):
            kind.clear(holder)
            put: Any = kind.update if kind is set else kind.extend
            put(holder, before)


def _differ(now: list[Any], was: list[Any]) -> bool:
    return len(now) != len(was) or any(a is not b for a, b in zip(now, was, strict=True))


class Change(NamedTuple):
    """What a call left other than it was.

    Attributes:
        place: where.
        before: what it held; None if the place is new.
        after: what it holds.
    """

    place: Place
    before: Any
    after: Any


def changes(before: State, after: State) -> list[Change]:
    """The places that hold another tensor object or memory, another plain value, or that are new.

    Of a tensor object that was moved (``weight.data = ...``) both are given as they were.
    """
    found = []
    for path, (place, now) in after.values.items():
        was = before.values[path][1] if path in before.values else None
        if now is was and isinstance(now, torch.Tensor):
            moved = before.moved(after, now)
            found += [Change(place, *moved)] if moved is not None else []
        if now is was or not isinstance(now, (torch.Tensor, bool, int, float, str)):
            continue
        if isinstance(now, torch.Tensor) or type(now) is not type(was) or now != was:
            found.append(Change(place, was, now))
    return found


class RandomState:
    """The random numbers of Python and torch, to draw them again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """The next numbers are those that would have come."""
        random.setstate(self._python)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
