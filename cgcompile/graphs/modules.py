"""Which modules a model's graphs read the weights of: :func:`modules_of`.

Weights are compared before replays. One that nobody finds is never compared, and a graph would go
on with memory that was freed since.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from cgcompile.graphs.state import Slots

_HOLD_NOTHING = frozenset((str, bytes, int, float, bool, type(None), type, torch.Tensor))


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The model, if it is a module; else those that it or its attributes hold.

    It, or an attribute, may be a module, a method of one, a function that has one in its closure or
    its defaults, a ``functools.partial``, an object that can be called and has one in its
    attributes, or a container of any of these. What a function finds in globals is not seen,
    nor what is in other objects: an engine among them would have the weights of all its models.
    """
    if isinstance(model, torch.nn.Module):
        return [model]
    found: dict[int, torch.nn.Module] = {}  # a tower may be its own forward
    seen = {id(model)}
    todo = deque(_held(model) or _attributes(model))
    while todo:
        each = todo.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.nn.Module):
            found[id(each)] = each
        else:  # a tokenizer among them has words by the hundred thousand
            todo += [item for item in _held(each) if type(item) not in _HOLD_NOTHING]
    return list(found.values())


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, MethodType):
        owner = value.__self__
        held = () if isinstance(owner, torch.nn.Module) else _attributes(owner)
        return (owner, value.__func__, *held)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*map(_content, value.__closure__ or ()), *defaults)
    return _attributes(value) if callable(value) else ()


def _attributes(value: Any) -> Iterable[Any]:
    if isinstance(value, type):
        return ()
    return (*getattr(value, "__dict__", {}).values(), *Slots(value).read().values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the function was defined before what it names
        return None
