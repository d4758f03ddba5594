"""Find the layers of a model that are traced once: :func:`repeated_layers`.

The rule: layers are repeated if they are of one class and differ in nothing but their tensors and
in plain numbers and texts, which Dynamo compares. See ``torch_compat/regions.py`` for the reason.
"""

from collections import Counter
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

_FEWEST = 4  # layers of a class: with fewer of them a trace is hardly shorter
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def repeated_layers(model: Any) -> dict[type[nn.Module], int]:
    """Return the classes of the repeated layers of a model, with the traces that each may need."""
    owner = getattr(model, "__self__", model)
    if not isinstance(owner, nn.Module):
        return {}
    classes: dict[type[nn.Module], int] = {}
    for cls, layers in _candidates(owner).items():
        described = [list(_described(layer, set())) for layer in layers]
        structures = [[(path, kind) for path, kind, _ in each] for each in described]
        if all(structure == structures[0] for structure in structures):
            classes[cls] = 2 * _variants([[number for _, _, number in each] for each in described])
    return classes


def _candidates(owner: nn.Module) -> dict[type[nn.Module], list[nn.Module]]:
    """Return the modules of each class that occurs often, but for those within such a module."""
    counts = Counter(type(module) for module in owner.modules() if module is not owner)
    found: dict[type[nn.Module], list[nn.Module]] = {}
    waiting = [owner]
    while waiting:
        for child in waiting.pop().children():
            if counts[type(child)] >= _FEWEST and _is_markable(child):
                found.setdefault(type(child), []).append(child)
            else:
                waiting.append(child)
    return {cls: layers for cls, layers in found.items() if len(layers) >= _FEWEST}


def _is_markable(module: nn.Module) -> bool:
    forward = type(module).forward
    return (
        isinstance(forward, FunctionType)
        and not type(module).__module__.startswith("torch.")
        and not any(name.startswith("_torchdynamo") for name in vars(forward))
        and next(iter(module.children()), None) is not None
        and next(module.parameters(), None) is not None
    )


def _described(value: Any, seen: set[int], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Return (path, kind, number or text) of all that a layer consists of."""
    if id(value) in seen:
        yield path, "seen", None
    elif isinstance(value, _PLAIN):
        yield path, type(value), value
    elif isinstance(value, torch.Tensor):
        yield path, type(value), None
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        yield path, type(value), None
        for name, attribute in sorted(vars(value).items()):
            yield from _described(attribute, seen, f"{path}.{name}")
    elif type(value) in (list, tuple) or isinstance(value, dict):
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield path, (type(value), len(value)), None
        for key, item in items:
            yield from _described(item, seen, f"{path}[{key!r}]")
    elif isinstance(value, (set, frozenset)):
        yield path, (type(value), repr(sorted(map(repr, value)))), None
    else:
        yield path, id(value), None  # a function or an object: the same one in all layers


def _variants(numbers: list[list[Any]]) -> int:
    """Return how many kinds of layers there are, but for numbers that differ in all of them."""
    columns = [column for column in zip(*numbers, strict=True) if len(set(map(repr, column))) > 1]
    kinds = [column for column in columns if len(set(map(repr, column))) < len(column)]
    return len(set(map(repr, zip(*kinds, strict=True)))) or 1
