"""Values by their paths, dataclasses and plain objects opened: :func:`named_values`.

Whoever compares two runs of a step compares what is in their results: an object that each run makes
anew is never the same object. What cannot be compared at all is neither right nor wrong, and said.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.graphs.guards import is_plain_value, layout_text, same_value
from cgcompile.graphs.results import field_names, is_record
from cgcompile.graphs.state import Slots

_DEEPEST = 16  # objects in objects
_CLOSED: tuple[type, ...] = (torch.Tensor, torch.nn.Module, type, ModuleType, Enum)
_CLOSED += (FunctionType, MethodType, BuiltinFunctionType)  # code: its attributes say nothing


class Opened(NamedTuple):
    """An object whose fields are values of their own.

    Attributes:
        value: the object.
        names: of its fields.
        inside: the names of all values that are in it.
    """

    value: Any
    names: tuple[str, ...]
    inside: tuple[str, ...]

    def __str__(self) -> str:
        return f"{layout_text(self.value)} with {', '.join(self.names)}"


def named_values(value: Any, top: str = "") -> dict[str, Any]:
    """The leaves of a value by their paths, such as ``['k'].scores[0]``.

    Containers that pytree knows are opened, the fields of dataclasses and the attributes of plain
    objects. Each object that is opened comes before what is in it, as an :class:`Opened`.

    Args:
        value: of any kind.
        top: the path of the value itself, if it is no container.
    """
    found: dict[str, Any] = {}
    for path, leaf in compat.tree_paths(value):
        _open(leaf, path or top, (), found)
    return found


def _open(leaf: Any, here: str, around: tuple[Any, ...], found: dict[str, Any]) -> None:
    found[here] = leaf
    levels = [len(around) - place for place, each in enumerate(around) if each is leaf]
    if levels:
        found[here] = f"the object {levels[0]} levels up"
        return
    fields = _fields(leaf) if len(around) < _DEEPEST else {}
    if not fields:
        return
    inside: dict[str, Any] = {}
    for name, each in fields.items():
        for path, inner in compat.tree_paths(each):
            _open(inner, f"{here}.{name}{path}", (*around, leaf), inside)
    found[here] = Opened(leaf, tuple(sorted(fields)), tuple(inside))
    found |= inside


def _fields(leaf: Any) -> dict[str, Any]:
    """What an object has; nothing of one that is looked at as a whole."""
    if is_record(leaf):
        return {name: getattr(leaf, name) for name in field_names(leaf) if hasattr(leaf, name)}
    if is_plain_value(leaf) or isinstance(leaf, _CLOSED):
        return {}
    slots = {member.__name__: each for member, each in Slots(leaf).read().items()}
    attributes = getattr(leaf, "__dict__", None)
    return {**slots, **attributes} if isinstance(attributes, dict) else slots


def names_compared(plain: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """The names of what is to be compared, in order.

    An object that both have, such as one that the model keeps, is equal to itself, whatever became
    of its attributes between the two.
    """
    kept: set[str] = set()
    for name, value in plain.items():
        other = found.get(name)
        if isinstance(value, Opened) and isinstance(other, Opened) and value.value is other.value:
            kept.update(value.inside)
        elif name not in kept:
            yield name


def alike(found: Any, expected: Any) -> bool | None:
    """Whether two values that are no tensors are equal; None if nobody can tell."""
    if isinstance(found, Opened) and isinstance(expected, Opened):
        return type(found.value) is type(expected.value) and found.names == expected.names
    if same_value(found, expected):
        return True
    if type(found) is not type(expected) or is_plain_value(expected):
        return False
    own: Any = type(expected).__eq__
    if callable(expected) or own is object.__eq__:
        return None
    try:
        same = found == expected
    except Exception:  # of the user's code
        return None
    return same if isinstance(same, bool) else None


def value_text(value: Any) -> str:
    """A value as messages show it."""
    return str(value) if isinstance(value, Opened) else layout_text(value)


def uncompared(plain: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what nobody can compare: objects without fields and without an own ``==``."""
    return tuple(
        name
        for name in names_compared(plain, found)
        if name in found
        and not isinstance(plain[name], torch.Tensor)
        and alike(found[name], plain[name]) is None
    )
