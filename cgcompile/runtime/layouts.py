"""The layouts that compiled pieces were traced for: :class:`TracedLayout`.

A piece is compiled for the strides of its fake inputs, and the code of Inductor asserts them. The
piece before it may return others. An eager one: those of the kernel that the settings of the moment
choose (``sdpa_kernel``), or of a custom op whose fake implementation differs. A compiled one: those
of a decomposition, which differ from eager's (``torch.cat`` with an empty tensor). The rule: a
result reaches compiled pieces in the layout of its fake value, as a copy if necessary, in plain
steps, captures and replays alike. In a replay of an eager piece the bridge is that copy.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from cgcompile.graphs.arena import dense_order
from cgcompile.passes.nodes import storages, symbols_of
from cgcompile.passes.split import Piece, SplitGraph, returned_names
from cgcompile.pieces.compilers import Runnable
from cgcompile.torch_compat import raw_memory

_UNUSUAL = 1009  # the first of the sizes that stand for symbols


class TracedLayout:
    """The strides of a fake tensor, for all sizes that it may have."""

    def __init__(self, fake: torch.Tensor, numbers: Callable[[Any], Any]) -> None:
        sizes, strides = [*map(numbers, fake.shape)], [*map(numbers, fake.stride())]
        symbols = sorted(symbols_of(fake), key=str)
        # What holds for one choice of unusual sizes holds for all.
        unusual = {symbol: _UNUSUAL + 2 * index for index, symbol in enumerate(symbols)}
        plain = [number.subs(unusual) for number in (*sizes, *strides)]
        self.is_known = all(number.is_integer and number.is_number for number in plain)
        if not self.is_known:
            return
        shape, steps = [*map(int, plain[: len(sizes)])], [*map(int, plain[len(sizes) :])]
        self._dims, self._order = len(shape), dense_order(shape, steps)
        self._is_contiguous = self._order == tuple(range(len(shape)))
        own = {size: dim for dim, size in enumerate(sizes) if size in symbols}
        apart = all(step for size, step in zip(shape, steps, strict=True) if size != 1)
        self.is_known = self._order is not None or (apart and own.keys() >= _symbols_in(strides))

        @lru_cache(maxsize=128)
        def strides_for(shape: torch.Size) -> tuple[int, ...]:
            values = {size: shape[dim] for size, dim in own.items()}
            return tuple([int(stride.subs(values)) for stride in strides])

        self._strides_for = strides_for

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the layout; strides of dimensions of size 1 do not count."""
        if self._is_contiguous or tensor.dim() != self._dims:
            return tensor.is_contiguous() or tensor.dim() != self._dims
        if self._order is not None:
            return tensor.permute(self._order).is_contiguous()
        strides = self._strides_for(tensor.shape)
        if tensor.stride() == strides or not tensor.numel():
            return True
        dims = zip(tensor.shape, tensor.stride(), strides, strict=True)
        return all(size == 1 or stride == traced for size, stride, traced in dims)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in the layout."""
        if self._order is not None:
            return tensor.permute(self._order).contiguous().permute(_inverse(self._order))
        strides = self._strides_for(tensor.shape)
        return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _symbols_in(numbers: Sequence[Any]) -> set[Any]:
    """Return the free symbols of expressions."""
    return set().union(*(number.free_symbols for number in numbers))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


Layouts = Mapping[int, TracedLayout]
"""By the position of an output of a piece."""


def traced_layouts(split: SplitGraph) -> dict[int, Layouts]:
    """Return the layouts of results that compiled pieces read, by the piece that returns them."""
    read = {name for piece in split.pieces if piece.compiled for name in piece.inputs}
    returned = set(returned_names(split))
    by_piece: dict[int, Layouts] = {}
    for piece in split.pieces:
        if read.isdisjoint(piece.outputs):
            continue
        layouts = {
            item: TracedLayout(split.values[name].meta, split.symbols.number)
            for item, name in enumerate(piece.outputs)
            if name in read and _may_be_copied(split, piece, name, returned)
        }
        by_piece[piece.index] = {item: known for item, known in layouts.items() if known.is_known}
    return {index: layouts for index, layouts in by_piece.items() if layouts}


def _may_be_copied(split: SplitGraph, piece: Piece, name: str, returned: set[str]) -> bool:
    """Return whether a result may be copied: no other value has to share its memory."""
    result = split.values[name]
    if not isinstance(result.meta, torch.Tensor) or not raw_memory.is_plain_tensor(result.meta):
        return False
    if result.meta.is_conj() or result.meta.is_neg() or result.meta.layout is not torch.strided:
        return False
    memory = storages(result.meta)
    inputs = storages([split.values[input_name].meta for input_name in piece.inputs])
    if not memory or not memory.isdisjoint(inputs):
        return False
    owners = Counter(key for other in piece.outputs for key in storages(split.values[other].meta))
    alone = all(owners[key] == 1 for key in memory)
    return alone or not (result.mutated or name in returned)


def in_traced_layouts(outputs: Sequence[Any], layouts: Layouts) -> Sequence[Any]:
    """Return the results of a piece, copied where they have another layout than traced."""
    for item, layout in layouts.items():
        output = outputs[item]
        if isinstance(output, torch.Tensor) and not layout.fits(output):
            outputs = list(outputs)
            outputs[item] = layout.copied(output)
    return outputs


def returning_traced_layouts(split: SplitGraph, runnables: Sequence[Runnable]) -> list[Runnable]:
    """Return the functions of the pieces; results have the layouts that compiled pieces expect."""
    wrapped = list(runnables)
    for index, layouts in traced_layouts(split).items():
        wrapped[index] = _returning(runnables[index], layouts)
    return wrapped


def _returning(run: Runnable, layouts: Layouts) -> Runnable:
    def checked(*inputs: Any) -> Sequence[Any]:
        return in_traced_layouts(run(*inputs), layouts)

    return checked
