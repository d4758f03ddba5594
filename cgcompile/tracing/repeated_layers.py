"""Find the layers of a model that are traced once: :func:`repeated_layers`.

The rule: layers are repeated if they are of one class and differ in nothing but their tensors and
in plain numbers and texts, which Dynamo compares. See ``torch_compat/regions.py`` for the reason.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from cgcompile import torch_compat as compat
from cgcompile.errors import PassError
from cgcompile.passes.inline import Repeated

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


def check_tensors(
    model: Any,
    classes: Collection[type[nn.Module]],
    calls: Iterable[Iterable[Repeated]],
    scope: Mapping[str, Any],
) -> None:
    """Raise PassError unless each later call reads one layer where the first reads another."""
    # torch takes a tensor of the first layer for the same one in all calls if the caller passes it
    # as an argument too, or if another part of the model has read it before.
    owner = getattr(model, "__self__", model)
    of_layers: dict[nn.Module, list[int]] = {}
    for layer in owner.modules():
        if type(layer) in classes:
            values = [value for _, _, value in _described(layer, set())]
            of_layers[layer] = [id(x) if isinstance(x, torch.Tensor) else 0 for x in values]
    known: dict[Any, Any] = {}
    for call in calls:
        read: dict[int, int] = {}
        for pair in call:
            for node in pair:
                if node not in known:
                    known[node] = eval(compat.path_of_input(node), dict(scope))
            read[id(known[pair[0]])] = id(known[pair[1]])
        used = {
            layer: [n for n, x in enumerate(of_layers[layer]) if x in read] for layer in of_layers
        }
        first = max(used, key=lambda layer: len(used[layer]), default=None)
        if first is None or not used[first]:
            continue
        expected = [(n, read[of_layers[first][n]]) for n in used[first]]
        if not any(
            type(layer) is type(first) and all(own[n] == tensor for n, tensor in expected)
            for layer, own in of_layers.items()
        ):
            name = str(call and next(iter(call))[1].name)
            raise PassError.region(name=name, problem="tensors of several layers")


def _candidates(owner: nn.Module) -> dict[type[nn.Module], list[nn.Module]]:
    """Return the modules of each class that occurs often, but for those within such a module."""
    counts = Counter(type(module) for module in owner.modules() if module is not owner)
    candidates: dict[type[nn.Module], list[nn.Module]] = {}
    waiting = [owner]
    while waiting:
        for child in waiting.pop().children():
            if counts[type(child)] >= _FEWEST and _is_markable(child, type(owner)):
                candidates.setdefault(type(child), []).append(child)
            else:
                waiting.append(child)
    return {cls: layers for cls, layers in candidates.items() if len(layers) >= _FEWEST}


def _is_markable(module: nn.Module, owner: type[nn.Module]) -> bool:
    forward = type(module).forward
    return (
        isinstance(forward, FunctionType)
        and forward is not owner.forward
        and not type(module).__module__.startswith("torch.")
        and not any(name.startswith("_torchdynamo") for name in vars(forward))
        and next(iter(module.children()), None) is not None
        and next(module.parameters(), None) is not None
    )


def _described(value: Any, seen: set[int], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Return (path, kind, number or text) of all that a layer consists of."""
    if id(value) in seen:
        yield path, "seen", None
    elif isinstance(value, (*_PLAIN, torch.Tensor)):
        yield path, type(value), value
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
    rows = zip(*numbers, strict=True)
    plain = [column for column in rows if not isinstance(column[0], torch.Tensor)]
    columns = [column for column in plain if len(set(map(repr, column))) > 1]
    kinds = [column for column in columns if len(set(map(repr, column))) < len(column)]
    return len(set(map(repr, zip(*kinds, strict=True)))) or 1
