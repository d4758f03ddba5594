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
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

_SCALARS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_SEALED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_DEPTH = 3  # of containers: what is deeper has expressions of its own where it was looked at
_TORCH = str(Path(inspect.getfile(torch)).parent)


# By the identity of a tensor and the dimension: the name of a size that varies.
Varies = Mapping[tuple[int, int], str]


def described(
    sources: Iterable[str], scope: Mapping[str, Any], varies: Varies = MappingProxyType({})
) -> dict[str, str]:
    """What each expression gives, in words that are the same in every process.

    Args:
        sources: Python expressions.
        scope: the names in them.
        varies: sizes that may be others.
    """
    same: dict[int, int] = {}
    found = {}
    for number, source in enumerate(sources):
        try:
            value = eval(source, dict(scope))
        except Exception as error:  # an attribute that is not there was looked for
            found[source] = f"absent: {type(error).__name__}"
            continue
        if not isinstance(value, torch.Tensor):
            found[source] = _text(value, _DEPTH)
            continue
        free = any((id(value), dim) in varies for dim in range(value.dim()))
        text = text_of(value, varies) if free else _text(value, _DEPTH)
        # Tied weights are one input of the graph.
        found[source] = f"{text} same as {same.setdefault(id(value), number)}"
    return found


def _text(value: Any, depth: int) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return f"{kind} {value.name}"
    if type(value) in _SCALARS or isinstance(value, _SEALED):
        return f"{kind} {value!r}"
    if isinstance(value, torch.Tensor):
        layout = tuple(value.stride()) if value.layout is torch.strided else value.layout
        shape = tuple(value.shape)
        return f"{kind} {value.dtype} {shape} {layout} {value.device} {value.requires_grad}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{kind} {value.__module__}.{value.__qualname__}"
    if isinstance(value, types.MethodType):
        return f"method {value.__func__.__module__}.{value.__func__.__qualname__}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join(_text(each, depth - 1) for each in value) if depth else ""
        return f"{kind} of {len(value)}: {inside}"
    if isinstance(value, Mapping):
        keys = [repr(key) for key in value if type(key) in _SCALARS]
        inside = ", ".join(keys) if depth else ""
        return f"{kind} of {len(value)}: {inside}"
    if kind.startswith("torch.") and not isinstance(value, torch.nn.Module):
        shown = repr(value)  # operators and the like; what they remember changes as they are used
        return f"{kind} {shown}" if " at 0x" not in shown else kind
    training = getattr(value, "training", "") if isinstance(value, torch.nn.Module) else ""
    names = sorted(map(str, getattr(value, "__dict__", ())))  # hasattr() may have been asked
    return f"{kind} {training} {', '.join(names)}"


def text_of(value: Any, varies: Varies) -> str:
    """An argument of a call, with names in place of sizes that vary."""
    if isinstance(value, torch.Tensor):
        sizes = [varies.get((id(value), dim), size) for dim, size in enumerate(value.shape)]
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return f"{kind} {value.dtype} {sizes} {value.device} {value.requires_grad}"
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
