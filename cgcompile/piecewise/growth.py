"""Notice a result that comes back as an input, larger: every step then has a new shape.

That is what a key-value cache does that is extended by ``torch.cat``. Capturing it would record one
graph a step and replay none.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cgcompile.passes.split import SplitGraph
from cgcompile.reasons import Reason, Why


class Growth:
    """Watches the results of plain steps of one split graph."""

    def __init__(self, split: SplitGraph) -> None:
        self._inputs = split.inputs
        self._grows = list(_growing(split))
        self._last: list[tuple[int, torch.Size]] = []  # what came out longer, by input

    def remember(self, result: Any) -> None:
        """Note the shapes of what the step returned, for the next call."""
        if self._grows:
            self._last = [(position, result[item].shape) for position, item in self._grows]

    def why(self, inputs: Sequence[Any]) -> Why | None:
        """Why a step should not be captured: the last result came back; else None."""
        for position, shape in self._last:
            if inputs[position].shape == shape:
                value = self._inputs[position]
                detail = (
                    f"{value.source or value.name} is the result of the last step and grows with "
                    "each. Keep it in a buffer of fixed size that the model writes in place: in "
                    "transformers a StaticCache (cache_implementation='static'), not a DynamicCache"
                )
                return Why(Reason.GROWING_STATE, detail)
        return None


def _growing(split: SplitGraph) -> list[tuple[int, int]]:
    """(input, item of the result) where the result is the input made longer in one dimension."""
    found = []
    items = split.result if isinstance(split.result, tuple) else ()
    for position, value in enumerate(split.inputs):
        if not isinstance(value.meta, torch.Tensor) or value.static:
            continue
        for item, ref in enumerate(items):
            made = split.values.get(getattr(ref, "name", ""))
            if made is not None and _is_longer(split, value.meta, made.meta):
                found.append((position, item))
    return found


def _is_longer(split: SplitGraph, before: torch.Tensor, after: object) -> bool:
    if not isinstance(after, torch.Tensor) or before.dim() != after.dim():
        return False
    if before.dtype != after.dtype:
        return False
    number = split.symbols.number
    differences = [number(b) - number(a) for a, b in zip(before.shape, after.shape, strict=True)]
    changed = [difference for difference in differences if difference != 0]
    return len(changed) == 1 and bool(changed[0].is_positive)
