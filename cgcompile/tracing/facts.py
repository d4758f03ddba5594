"""What a trace depends on, as text: it serves another process where all of it is the same.

Dynamo names everything that a trace has looked at by a Python expression, such as
``L['self'].config.num_hidden_layers``. Each is evaluated again and described; two equal
descriptions mean that Dynamo would have traced the same. The files that the traced code is from
are compared by their content.
"""

import enum
import hashlib
import inspect
import os
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from cgcompile import compat

_SCALARS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_SEALED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_DEPTH = 3  # of containers: what is deeper has expressions of its own where it was looked at
_TORCH = str(Path(inspect.getfile(torch)).parent)


class Unsayable(Exception):
    """A trace depends on something that has no description; never seen by a caller."""


# By the identity of a tensor and the dimension: the name of a size that varies.
Varies = Mapping[tuple[int, int], str]


def described(
    sources: Iterable[str],
    scope: Mapping[str, Any],
    varies: Varies = MappingProxyType({}),
    compared: Collection[str] = (),
) -> dict[str, str]:
    """What each expression gives, in words that are the same in every process.

    Args:
        sources: Python expressions.
        scope: the names in them.
        varies: sizes that may be others.
        compared: expressions whose very value counts; they must have a description.

    Raises:
        Unsayable: such a value has none.
    """
    same: dict[int, int] = {}
    alive = []  # an object that dies would give its identity away
    found = {}
    for number, source in enumerate(sources):
        try:
            value = eval(source, dict(scope))
        except Exception as error:  # an attribute that is not there was looked for
            found[source] = f"absent: {type(error).__name__}"
            continue
        alive.append(value)
        free = isinstance(value, torch.Tensor) and any(
            (id(value), dim) in varies for dim in range(value.dim())
        )
        text = text_of(value, varies) if free else _text(value, _DEPTH)
        if compat.is_constant_result(value):
            raise Unsayable(f"{source} is computed while it is traced")
        if source in compared and not _has_value(value):
            raise Unsayable(f"it depends on {source}, a {type(value).__qualname__}")
        if not _has_value(value) or isinstance(value, torch.Tensor):
            # Tied weights are one input of the graph, and a model may ask which object it has.
            text += f" same as {same.setdefault(id(value), number)}"
        found[source] = text
    return found


def _has_value(value: Any) -> bool:
    """Whether the description of something tells all of it."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_has_value, value))
    sealed = (*_SCALARS, *_SEALED, enum.Enum, type, types.ModuleType, types.FunctionType)
    return isinstance(value, (*sealed, types.BuiltinFunctionType, types.MethodType, torch.Tensor))


def _code_text(code: types.CodeType) -> str:
    """Where code is from, and a hash of what it does."""
    inner = [_code_text(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    plain = [repr(each) for each in code.co_consts if type(each) in _SCALARS]
    text = repr((code.co_code, code.co_names, code.co_varnames, plain, inner))
    return f"line {code.co_firstlineno} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _text(value: Any, depth: int) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{kind} {value.name}"
    if isinstance(value, _SEALED):
        return f"{kind} {value!r}"
    for scalar in _SCALARS:
        if isinstance(value, scalar):  # of a subclass, too
            plain: Any = scalar.__repr__
            return f"{kind} {plain(value)}"
    if isinstance(value, torch.Tensor):
        layout = tuple(value.stride()) if value.layout is torch.strided else value.layout
        grad = f"{value.requires_grad} {value.is_inference()}"
        return f"{kind} {value.dtype} {tuple(value.shape)} {layout} {value.device} {grad}"
    code = _code_or_name(value)
    if code is not None:
        return f"{kind} {code}"
    if isinstance(value, (tuple, list, set, frozenset, Mapping)):
        parts = [_text(each, depth - 1) for each in value] if depth > 0 else []
        parts = sorted(parts) if isinstance(value, (set, frozenset)) else parts
        return f"{kind} of {len(value)}: {', '.join(parts)}"
    return f"{kind} {_remembered(value, kind)}"


def _code_or_name(value: Any) -> str | None:
    """What tells a function, class or module from others; None for anything else."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code_text(value.__code__)}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    return value.__name__ if isinstance(value, types.ModuleType) else None


def _remembered(value: Any, kind: str) -> str:
    """Of an object the names of its attributes: ``hasattr`` may have been asked."""
    if kind.startswith("torch.") and not isinstance(value, torch.nn.Module):
        shown = repr(value)  # operators and the like; what they remember changes as they are used
        return shown if " at 0x" not in shown else ""
    training = getattr(value, "training", "") if isinstance(value, torch.nn.Module) else ""
    return f"{training} {', '.join(sorted(map(str, getattr(value, '__dict__', ()))))}"


def text_of(value: Any, varies: Varies) -> str:
    """An argument of a call, with names in place of sizes that vary."""
    if isinstance(value, torch.Tensor):
        sizes = [varies.get((id(value), dim), size) for dim, size in enumerate(value.shape)]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        plain = value.layout is torch.strided
        layout: Any = value.layout if not plain else "contiguous"
        if plain and not value.is_contiguous():
            layout = tuple(value.stride())
        grad = f"{value.requires_grad} {value.is_inference()}"
        return f"{kind} {value.dtype} {sizes} {layout} {value.device} {grad}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__qualname__}({', '.join(text_of(each, varies) for each in value)})"
    if isinstance(value, Mapping):
        items = (f"{key!r}: {text_of(each, varies)}" for key, each in value.items())
        return f"{type(value).__qualname__}({', '.join(items)})"
    return _text(value, _DEPTH)


def first_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first expression with another description, and both; None if all are equal."""
    for source, text in before.items():
        if now.get(source) != text:
            return f"{source} is {_short(now.get(source, 'absent'))}, was {_short(text)}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def files_of(code: Iterable[types.CodeType]) -> dict[str, str] | str:
    """The files that code is from, with a hash of their content; or why that is not known.

    torch's own are left out: its version stands for them.
    """
    found: dict[str, str] = {}
    for each in code:
        name = each.co_filename
        if name in found or name.startswith((_TORCH, "<frozen ")) or _is_generated(each):
            continue
        digest = file_hash(name)
        if digest is None:
            return f"{each.co_name} is from {name}, which is no file"
        found[name] = digest
    return found


def _is_generated(code: types.CodeType) -> bool:
    """Whether the standard library has made this code, for a dataclass or a named tuple."""
    return code.co_filename == "<string>" and code.co_name.startswith("__")


def file_hash(name: str) -> str | None:
    """A hash of the content of a file; None if there is no such file."""
    if not os.path.isfile(name):
        return None
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()
