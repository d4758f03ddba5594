"""What a captured step gives back to its caller: :class:`Returns`.

Values that graphs made lie at fixed addresses and are overwritten by the next replay; a value that
is memory of an input must be that of *this* call's input; what an eager piece has just made is the
caller's already. Worked out once, when a step is recorded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.graphs.copies import FreshCopies
from cgcompile.passes.split import SplitGraph


class _View(NamedTuple):
    """An item of the result that is memory of an input."""

    item: int
    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the input's own offset, in elements of the item
    dtype: torch.dtype
    conjugate: bool
    negative: bool


class Returns:
    """Makes the result of each replay of one recording.

    Args:
        split: the split graph.
        result: what the recorded step returned.
        items: a lasting tensor for each tensor of the result that graphs or bridges made, by its
            place among the leaves; a leaf that is not here is handed on as it comes.
        inputs: what the recorded step was given, buffers in place of copied inputs.
        originals: where a step puts what bridges replace and the caller gets, by name.
        copied: whether what lies at fixed addresses is copied for the caller.

    Attributes:
        as_it_is: whether what a step returns needs nothing done to it.
    """

    def __init__(
        self,
        split: SplitGraph,
        result: Any,
        items: Mapping[int, torch.Tensor],
        inputs: Sequence[Any],
        originals: dict[str, Any],
        copied: bool,
    ) -> None:
        names = enumerate(returned_names(split))
        self._originals = originals
        self._kept = [(item, name) for item, name in names if name in originals]
        places: dict[int, int] = {}
        for position, each in enumerate(inputs):
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes():
                places.setdefault(each.untyped_storage().data_ptr(), position)
        self._spec = compat.tree_spec(result)
        self._views: list[_View] = []
        self._fixed: list[tuple[int, torch.Tensor]] = []
        for item, tensor in items.items():
            found = places.get(tensor.untyped_storage().data_ptr())
            if found is None:
                self._fixed.append((item, tensor))
            else:
                self._views.append(_view(item, tensor, found, inputs[found]))
        self._is_flat = isinstance(result, tuple) and not any(map(compat.is_container, result))
        self.as_it_is = not (self._views or self._kept or (copied and self._fixed))
        self._copies = FreshCopies([tensor for _, tensor in self._fixed]) if copied else None

    def make(self, result: Any, inputs: Sequence[Any]) -> Any:
        """The result of one replay; the caller owns it if this copies.

        Args:
            result: what the step returned.
            inputs: what this call was given.
        """
        if self.as_it_is:
            return result
        leaves = list(result) if self._is_flat else compat.tree_leaves(result)
        if self._copies is not None:
            copies = self._copies.make()
            for (item, _), copy in zip(self._fixed, copies, strict=True):
                leaves[item] = copy
        for item, name in self._kept:
            leaves[item] = self._originals[name]
        self._originals.clear()
        for view in self._views:
            leaves[view.item] = _rebuilt(view, inputs[view.position])
        return tuple(leaves) if self._is_flat else compat.tree_unflatten(leaves, self._spec)


def returned_names(split: SplitGraph) -> list[str]:
    """The name of each leaf of the result; empty for one that is no value of the graph."""
    return [getattr(leaf, "name", "") for leaf in compat.tree_leaves(split.result)]


def _view(item: int, tensor: torch.Tensor, position: int, source: torch.Tensor) -> _View:
    start = tensor.storage_offset() * tensor.element_size()
    own = source.storage_offset() * source.element_size()
    offset = (start - own) // tensor.element_size()
    bits = (tensor.is_conj(), tensor.is_neg())
    return _View(item, position, tensor.size(), tensor.stride(), offset, tensor.dtype, *bits)


def _rebuilt(view: _View, source: torch.Tensor) -> torch.Tensor:
    """The same place in the memory of this call's input."""
    source = compat.physical(source.detach() if source.requires_grad else source)
    if view.dtype is source.dtype:
        offset = source.storage_offset() + view.offset
        made = source.as_strided(view.size, view.stride, offset)
    else:
        made = torch.empty(0, dtype=view.dtype, device=source.device)
        start = source.storage_offset() * source.element_size() // made.element_size()
        made.set_(source.untyped_storage(), start + view.offset, view.size, view.stride)
    return compat.with_bits(made, view.conjugate, view.negative)
