"""Results of a compiled call against those of eager, at one tolerance."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


class Mismatch(Exception):
    """A call that differs from eager."""


def compare(expected: Any, actual: Any, tolerance: float, call: Any) -> float:
    """Compare all tensors of two results.

    Returns:
        The largest difference of a tensor over its largest finite absolute value.

    Raises:
        Mismatch: it is above the tolerance, or shapes, dtypes, integers, infinities or NaN differ.
    """
    ours, theirs = tensors(actual), tensors(expected)
    if len(ours) != len(theirs):
        raise Mismatch(f"{call}: {len(ours)} tensors, eager has {len(theirs)}")
    worst = 0.0
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            raise Mismatch(
                f"{call}, result {index}: {one.dtype} {tuple(one.shape)}, "
                f"eager has {other.dtype} {tuple(other.shape)}"
            )
        difference = relative(one, other)
        if not difference <= tolerance:
            raise Mismatch(f"{call}, result {index}: differs by {difference:.3g}")
        worst = max(worst, difference)
    return worst


def square_error(result: Any, exact: Any) -> float:
    """Return the mean square error of the floating-point tensors, over their mean square."""
    total = 0.0
    for one, other in zip(tensors(result), tensors(exact), strict=True):
        if one.is_floating_point() and one.numel():
            reference = other.double()
            scale = reference.square().mean().clamp_min(1e-12)
            total += float((one.double() - reference).square().mean() / scale)
    return total


def moved(before: Any, after: Any) -> float:
    """How much the result that moves most differs from that of an earlier call."""
    pairs = zip(tensors(before), tensors(after), strict=True)
    return max(
        (relative(one, other) for one, other in pairs if one.shape == other.shape), default=0
    )


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over the other's largest absolute value; inf if that is none."""
    if one.numel() == 0:
        return 0.0
    if not one.is_floating_point():
        return 0.0 if torch.equal(one, other) else float("inf")
    finite = other.isfinite()
    if not torch.equal(one[~finite].nan_to_num(7.0), other[~finite].nan_to_num(7.0)):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = other[finite].abs().max().clamp_min(1e-6)
    difference = (one[finite] - other[finite]).abs().max() / scale
    return float(difference.nan_to_num(float("inf")))
