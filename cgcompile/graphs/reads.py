"""What a capture read from Python: the one walker of objects.

A graph repeats what Python read while it was captured, so guards, snapshots and tools look at the
same objects in the same way: attributes, ``__slots__``, closures and containers are opened here.
Objects of torch and of Python's own libraries are closed.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dis import Instruction, get_instructions
from functools import partial
from itertools import chain
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch

_LIBRARIES = ("torch", "logging", "threading", "re", "weakref", "_thread", "functools")

# -------------------------------------------------------------- attributes and items of objects


def slots_of(kind: type) -> tuple[MemberDescriptorType, ...]:
    """Return the slots of a class; of one name there may be several, each with its own value."""
    return tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, MemberDescriptorType)
    )


class Slots:
    """The attributes of an object that are in no ``__dict__``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.members = slots_of(type(owner))

    def read(self) -> dict[MemberDescriptorType, Any]:
        values = {}
        for member in self.members:
            with suppress(AttributeError):  # the slot is empty
                values[member] = member.__get__(self._owner)
        return values

    def restore(self, before: dict[MemberDescriptorType, Any]) -> None:
        for member in self.read().keys() - before.keys():
            member.__delete__(self._owner)
        for member, value in before.items():
            member.__set__(self._owner, value)  # that of a frozen object too


class Cells:
    """The bound variables that a function has from around it."""

    def __init__(self, function: Any) -> None:
        self._cells = cells_of(function)

    def read(self) -> dict[str, Any]:
        return {name: cell.cell_contents for name, cell in self._cells.items()}

    def restore(self, before: dict[str, Any]) -> None:
        for name, value in before.items():
            self._cells[name].cell_contents = value


def is_librarys(value: Any) -> bool:
    """Return whether an object is a part of torch or of Python, which is not opened."""
    if isinstance(value, torch.nn.Module):
        return False
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def cells_of(function: Any) -> dict[str, CellType]:
    """Return the bound cells of the variables that a function has from around it."""
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
    """Return the builtin type of a container, whose methods no subclass changes."""
    kinds = (OrderedDict, dict, list, deque, set, frozenset, tuple)  # the first has its own order
    return next(kind for kind in kinds if isinstance(container, kind))


def restore(holder: Any, before: Any) -> None:
    """Restore the contents of a container, a cell or a set of attributes, if they differ."""
    if isinstance(holder, (Slots, Cells)):
        holder.restore(before)
    elif isinstance(holder, CellType):
        holder.cell_contents = before
    elif isinstance(holder, dict):
        kind = plainly(holder)
        if _differ(chain(*kind.items(holder)), chain(*before.items())):
            kind.clear(holder)
            for key, value in before.items():
                kind.__setitem__(holder, key, value)
    elif isinstance(holder, (list, deque, set)):
        kind = plainly(holder)
        if _differ(kind.__iter__(holder), before):
            kind.clear(holder)
            put: Any = kind.update if kind is set else kind.extend
            put(holder, before)


def _differ(now: Iterable[Any], before: Iterable[Any]) -> bool:
    one, other = tuple(now), tuple(before)
    return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))


# -------------------------------------------------------------- modules of a runnable

_HOLD_NOTHING = frozenset((str, bytes, int, float, bool, type(None), type, torch.Tensor))


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Return the model, if it is a module; else the modules that it or its attributes hold."""
    # Of globals those alone that a function names: an engine has the weights of all models.
    if isinstance(model, torch.nn.Module):
        return [model]
    modules: dict[int, torch.nn.Module] = {}  # a tower may be its own forward
    seen = {id(model)}
    todo = deque(_held(model) or _attributes(model))
    while todo:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules[id(value)] = value
        else:  # a tokenizer among them has words by the hundred thousand
            todo += [item for item in _held(value) if type(item) not in _HOLD_NOTHING]
    return list(modules.values())


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, MethodType):
        owner = value.__self__
        attributes = () if isinstance(owner, torch.nn.Module) else _attributes(owner)
        return (owner, value.__func__, *attributes)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*Cells(value).read().values(), *defaults, *_named_globals(value))
    return _attributes(value) if callable(value) else ()


def _named_globals(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that the code names: modules, containers, functions of the same file."""
    scope = function.__globals__
    if scope.get("__name__", "").partition(".")[0] in _LIBRARIES:
        return
    codes = [function.__code__]
    for code in codes:  # grows meanwhile, by inner functions
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names:  # of attributes too, which alone are no reason
            value = scope.get(name)
            own = isinstance(value, FunctionType) and value.__globals__ is scope
            holds = own or isinstance(value, (torch.nn.Module, Mapping, list, tuple))
            if holds and any(_loads(instruction, name) for instruction in get_instructions(code)):
                yield value


def _loads(instruction: Instruction, name: str) -> bool:
    return instruction.opname == "LOAD_GLOBAL" and instruction.argval == name


def _attributes(value: Any) -> Iterable[Any]:
    if isinstance(value, type):
        return ()
    return (*getattr(value, "__dict__", {}).values(), *Slots(value).read().values())
