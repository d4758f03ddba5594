"""Results that belong to the caller: copied out of a graph once, then cut into views.

What a graph returns lies in its pool, and the next replay writes there. So the rows that are real
are copied right after a replay, with one kernel per tensor, however many items they belong to.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.errors import EncoderError


def checked_rows(
    tree: Any, least: int, columns: int | None, method: str, exactly: bool = False
) -> list[torch.Tensor]:
    """The tensors of a result, each with enough rows; see :func:`check_columns`.

    Raises:
        EncoderError: no tensor, or too few rows; or, ``exactly``, another number of them; or
            other columns.
    """
    leaves = compat.tree_leaves(tree)
    for leaf in leaves or [None]:
        fits = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        if fits and (len(leaf) == least if exactly else len(leaf) >= least):
            continue
        found = list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        count = "" if exactly else "at least "
        expected = f"tensors of {count}{least} rows each, the output tokens"
        raise EncoderError.returned(method=method, found=str(found), expected=expected)
    if columns is not None:
        check_columns(leaves, columns, method)
    return leaves


def check_columns(leaves: Sequence[Any], columns: int, method: str) -> None:
    """Raise unless one tensor of a result has so many columns.

    Raises:
        EncoderError: none has.
    """
    sizes = [leaf.shape[-1] if leaf.dim() > 1 else 1 for leaf in leaves]
    if columns not in sizes:
        raise EncoderError.columns(method=method, found=dict.fromkeys(sizes), expected=columns)


def own_rows(tree: Any, rows: int) -> Any:
    """The first rows of a graph's result, in memory of their own; ordered after the replay."""
    return compat.tree_map(lambda leaf: leaf[:rows].clone(), tree)


def empty_rows(tree: Any) -> Any:
    """A result of the same structure without rows."""
    return compat.tree_map(lambda leaf: leaf.new_empty((0, *leaf.shape[1:])), tree)


def split_rows(tree: Any, counts: Sequence[int]) -> list[Any]:
    """A result of several items, [sum of counts, ...], as views of one item each."""
    total = sum(counts)
    if isinstance(tree, torch.Tensor):
        return list(torch.split(tree[:total], list(counts)))
    leaves, spec = compat.tree_leaves(tree), compat.tree_spec(tree)
    parts = [torch.split(leaf[:total], list(counts)) for leaf in leaves]
    return [compat.tree_unflatten(list(mine), spec) for mine in zip(*parts, strict=True)]


def joined_rows(trees: Sequence[Any]) -> Any:
    """Results one after the other; a single one as it is, and one without rows not at all."""
    kept = [each for each in trees if any(len(leaf) for leaf in compat.tree_leaves(each))]
    kept = kept or list(trees[:1])
    if len(kept) == 1:
        return kept[0]
    columns = zip(*map(compat.tree_leaves, kept), strict=True)
    spec = compat.tree_spec(kept[0])
    return compat.tree_unflatten([torch.cat(column) for column in columns], spec)
