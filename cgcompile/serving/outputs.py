"""One set of output buffers for the FULL graphs of all sizes: :class:`OutputBuffers`.

Each graph copies its results to the front of the same buffers, inside the graph, so that the
results of all sizes lie in the memory of the largest. The rule: what a step returned is valid until
the next one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.errors import ManagerError
from cgcompile.graphs.arena import address
from cgcompile.serving.buffers import REQS, TOKENS


class Outputs:
    """What the rows of a model's results stand for.

    Args:
        rows: ``"tokens"`` or ``"reqs"``: what the first dimension of each tensor counts; one for
            all, or one for each in the order of the flattened result.

    Raises:
        ManagerError: something else.
    """

    def __init__(self, rows: str | Sequence[str]) -> None:
        self._rows = rows if isinstance(rows, str) else tuple(rows)
        self._known: dict[tuple[int, int], tuple[Any, list[Any], list[int], Any]] = {}
        for each in (rows,) if isinstance(rows, str) else rows:
            if each not in (TOKENS, REQS):
                raise ManagerError.rows(found=each)

    def places(self, leaves: Sequence[Any], sizes: tuple[int, int]) -> list[int]:
        """For each result 0 if its rows are tokens, 1 if they are requests.

        Args:
            leaves: the flattened result.
            sizes: (tokens, requests) that the step ran with.

        Raises:
            ManagerError: a result has other rows than declared, or is no tensor.
        """
        rows = [self._rows] * len(leaves) if isinstance(self._rows, str) else list(self._rows)
        if len(rows) != len(leaves):
            raise ManagerError.count(declared=len(rows), found=len(leaves))
        found = [(TOKENS, REQS).index(each) for each in rows]
        for leaf, place in zip(leaves, found, strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise ManagerError.output(
                    found=type(leaf).__name__, rows=rows[0], size=sizes[place]
                )
            if not leaf.dim() or leaf.shape[0] != sizes[place]:
                raise ManagerError.output(
                    found=str(list(leaf.shape)), rows=(TOKENS, REQS)[place], size=sizes[place]
                )
        return found

    def real(self, result: Any, padded: tuple[int, int], real: tuple[int, int]) -> Any:
        """The rows of a padded result that are real, as views.

        Args:
            result: what the step returned.
            padded: (tokens, requests) that it ran with.
            real: (tokens, requests) of the batch.
        """
        leaves = compat.tree_leaves(result)
        places = self.places(leaves, padded)
        if padded == real:
            return result
        return _cut(leaves, places, real, compat.tree_spec(result))

    def replayed(self, result: Any, padded: tuple[int, int], real: tuple[int, int]) -> Any:
        """As :meth:`real`, of what a graph returns: the same object at each step.

        It is looked at once. What a caller gets is made afresh, for the caller to do with as it
        likes.
        """
        known = self._known.get(padded)
        if known is None or known[0] is not result:
            leaves = compat.tree_leaves(result)
            places = self.places(leaves, padded)
            known = self._known[padded] = (result, leaves, places, compat.tree_spec(result))
        _, leaves, places, spec = known
        if leaves and leaves[0] is result:
            return result[: real[places[0]]]
        return _cut(leaves, places, real, spec)

    def forget(self) -> None:
        """Let go of results: the graphs are released."""
        self._known.clear()


def _cut(leaves: list[Any], places: list[int], real: tuple[int, int], spec: Any) -> Any:
    cut = [leaf[: real[place]] for leaf, place in zip(leaves, places, strict=True)]
    return compat.tree_unflatten(cut, spec)


class OutputBuffers:
    """Buffers for what a model returns: a tensor, or tensors in tuples, lists and dicts.

    Args:
        outputs: what rows stand for.
        most: (tokens, requests) of the largest batch.
    """

    def __init__(self, outputs: Outputs, most: tuple[int, int]) -> None:
        self._outputs = outputs
        self._most = most
        self._buffers: list[torch.Tensor] = []
        self._spec: Any = None

    @property
    def nbytes(self) -> int:
        """Memory of the buffers, in bytes; 0 before the first step."""
        return sum(each.nbytes for each in self._buffers)

    def owns(self, start: int) -> bool:
        """Whether a storage that begins at an address is one of the buffers."""
        return any(address(buffer) == start for buffer in self._buffers)

    def poison(self) -> None:
        """Fill the buffers with NaN, or with -1: the next step overwrites them."""
        for buffer in self._buffers:
            buffer.view(torch.uint8).fill_(0xFF)

    @property
    def whole(self) -> Any:
        """The buffers in the structure of the results; None before the first step."""
        if self._spec is None:
            return None
        return compat.tree_unflatten(list(self._buffers), self._spec)

    def keep(self, result: Any, sizes: tuple[int, int]) -> Any:
        """Copy what a step of these sizes made to the front of the buffers.

        The buffers are made if there are none.

        Returns:
            The same structure, of views of the buffers.

        Raises:
            ManagerError: a result has other rows than declared, or the step returns something else
                than the first one.
        """
        leaves, spec = compat.tree_leaves(result), compat.tree_spec(result)
        places = self._outputs.places(leaves, sizes)
        if self._spec is None:
            self._spec = spec
            pairs = zip(leaves, places, strict=True)
            self._buffers = [_empty(leaf, self._most[place]) for leaf, place in pairs]
        if spec != self._spec or not all(map(_fits, self._buffers, leaves)):
            raise ManagerError.other_outputs()
        fronts = [b[: leaf.shape[0]] for b, leaf in zip(self._buffers, leaves, strict=True)]
        for front, leaf in zip(fronts, leaves, strict=True):
            front.copy_(leaf)
        return compat.tree_unflatten(fronts, spec)

    def release(self) -> None:
        """Forget the buffers."""
        self._buffers, self._spec = [], None


def _empty(like: torch.Tensor, rows: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # written in whatever mode
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _fits(buffer: torch.Tensor, leaf: torch.Tensor) -> bool:
    return buffer.dtype == leaf.dtype and buffer.shape[1:] == leaf.shape[1:]
