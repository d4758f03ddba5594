"""Nested values: lists, tuples, dicts and what programs registered. See ``compat/__init__.py``.

The structure is what torch's ``_pytree`` takes it for. What most steps pass, plain containers of
tensors and numbers, is walked here: it costs a tenth.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

# Types, exactly, that nobody opens; anything else is for torch to say.
_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))


def tree_leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind in _LEAVES:
        found.append(value)
    elif kind is tuple or kind is list or kind is dict:
        for each in value.values() if kind is dict else value:
            if type(each) in _LEAVES:
                found.append(each)
            else:
                _gather(each, found)
    else:
        found += _pytree.tree_leaves(value)


def tree_tensors(value: Any) -> list[Any]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tree_paths(tree: Any) -> list[tuple[str, Any]]:
    """(path such as ``[0]['k']``, leaf) of each leaf, in the order of ``tree_leaves``."""
    if type(tree) in _LEAVES:
        return [("", tree)]
    found, _ = _pytree.tree_flatten_with_path(tree)
    return [(_pytree.keystr(path), leaf) for path, leaf in found]


def tree_spec(tree: Any) -> Any:
    """The structure of a tree; equal for trees of equal structure."""
    return _pytree.tree_structure(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def is_container(value: Any) -> bool:
    """Whether the leaves of a value are inside of it: list, tuple, dict or a registered type."""
    return type(value) not in _LEAVES and not _pytree.tree_is_leaf(value)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to each leaf, in the order of ``tree_leaves``."""
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is tuple or kind is list:
        made = [function(x) if type(x) in _LEAVES else tree_map(function, x) for x in tree]
        return tuple(made) if kind is tuple else made
    if kind is dict:
        return {key: tree_map(function, each) for key, each in tree.items()}
    return _pytree.tree_map(function, tree)
