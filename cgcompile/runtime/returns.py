"""What a captured step gives back to its caller: :class:`Returns`.

Memory of graphs and of the arena is overwritten by the next replay. So without a forward context
every value in it is copied for the caller, whichever piece made the value: an eager piece may
return a view of such memory. A value that is memory of an input must be that of *this* call's
input; what an eager piece has just made in memory of its own is the caller's already. A value that
*is* an input, such as a buffer that was changed in place, is the very object that this call was
given: a model that keeps it keeps its own buffer. A view of an input is another object each time,
because the caller may change it. Worked out once, when a step is recorded.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.graphs.arena import FreshCopies, OwnedCopy, address
from cgcompile.graphs.guards import same_layout
from cgcompile.graphs.outputs import Lent, can_be_lent
from cgcompile.graphs.sequence import Slot
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


class Given(NamedTuple):
    """What a recorded step was given.

    Attributes:
        inputs: buffers in place of copied inputs.
        starts: where the memory of each begins; 0 for what has none.
        called: as the caller gave them.
        lasting: what the caller has in place of those that are the same in all calls, by position.
    """

    inputs: Sequence[Any]
    starts: Sequence[int]
    called: Sequence[Any]
    lasting: Mapping[int, torch.Tensor]

    def position(self, start: int) -> int | None:
        """The first input whose memory begins there."""
        return self.starts.index(start) if start in self.starts else None

    def place(self, leaf: torch.Tensor) -> int | None:
        """Which input a tensor is: that very object, in the layout that the caller gave."""
        for place, each in enumerate(self.inputs):
            if each is leaf:  # else the buffer was laid out anew, as by ``t_()``
                return place if same_layout(leaf, self.called[place]) else None
        return None


class Returns:
    """Makes the result of each replay of one recording.

    Args:
        made: what the recorded step returned, as later steps find it: what slots hold.
        sources: for each of its leaves, what later steps find in its place: a slot, or an object.
        given: what the recorded step was given.
        fixed: where the memory begins that graphs, bridges and copied inputs lie in.
        owns: tells whether memory that begins at an address is the pool's, where results are
            copied for the caller; None where they are not.
        tracked: what the caller gets in place of values that pieces made, with ``debug``.
        owned: returns a buffer for a value at a fixed address that other steps may overwrite, and
            None for any other value; left out where results are copied, or share all memory.

    Attributes:
        slots: what it reads after a replay.
        positions: of the inputs that the result is, or is memory of.
        lent: the tensors at fixed addresses that callers get.
        lent_items: which items of the result they are.
        constants: the items that are the same each time; None in place of the others.
        is_flat: whether the result is a tuple of its items.
        is_steady: whether the result has nothing but these, and constants, in a tuple.
    """

    def __init__(
        self,
        made: Any,
        sources: Sequence[Any],
        given: Given,
        fixed: Set[int],
        owns: Callable[[int], bool] | None,
        tracked: Callable[[Sequence[Any]], list[Any]] | None = None,
        owned: Callable[[torch.Tensor], OwnedCopy | None] | None = None,
    ) -> None:
        self._spec = compat.tree_spec(made)
        self.is_flat = isinstance(made, tuple) and not any(map(compat.is_container, made))
        self.constants: list[Any] = []
        self._views: list[_View] = []
        self._inputs: list[tuple[int, int]] = []
        self._live: list[tuple[int, int]] = []
        self._owned: list[tuple[OwnedCopy, Any]] = []  # with what fills it: a tensor, or a slot
        lying: list[tuple[int, torch.Tensor]] = []
        lent: list[tuple[int, torch.Tensor]] = []
        for item, (leaf, source) in enumerate(zip(compat.tree_leaves(made), sources, strict=True)):
            start = address(leaf) if isinstance(leaf, torch.Tensor) else 0
            lies = isinstance(leaf, torch.Tensor) and start in fixed
            found = given.position(start) if lies else None
            stays = isinstance(leaf, torch.Tensor) and (lies or not isinstance(source, Slot))
            place = given.place(leaf) if stays else None
            self.constants.append(None if isinstance(source, Slot) else source)
            if place is not None and place in given.lasting:
                self.constants[item] = given.lasting[place]
            elif place is not None:
                self._inputs.append((item, place))
            elif found is not None:
                self._views.append(_view(item, leaf, found, given.inputs[found]))
            elif lies and owned is not None and (buffer := owned(leaf)) is not None:
                where = source if isinstance(source, Slot) else compat.weak_tensor(leaf)
                self._owned.append((buffer, where))
                self.constants[item] = None
                lent.append((item, compat.weak_tensor(buffer.tensor)))
            elif isinstance(source, Slot) and (owns is None or not lies or not owns(start)):
                self._live.append((item, source.at))
            elif lies:
                (lent if owns is None else lying).append((item, compat.weak_tensor(leaf)))
            elif can_be_lent(source):
                lent.append((item, compat.alias(source)))
        self.slots = [Slot(index) for _, index in self._live]
        self.slots += [where for _, where in self._owned if isinstance(where, Slot)]
        self.positions = {view.position for view in self._views}
        self.positions |= {position for _, position in self._inputs}
        self._copied = [item for item, _ in lying]
        self._copies = FreshCopies([tensor for _, tensor in lying]) if lying else None
        self.lent_items = [item for item, _ in lent]
        self.lent = Lent([tensor for _, tensor in lent])
        varies = bool(self._views or self._inputs or self._live or self._owned)
        varies = varies or self._copies is not None
        self.is_steady = self.is_flat and not varies and tracked is None
        self._tracked = tracked
        self._last: tuple[Any, Any] = (None, None)  # of a steady result: (tensors, with constants)

    @property
    def count(self) -> int:
        """How many items the result has."""
        return len(self.constants)

    def make(self, slots: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """The result of one replay; the caller owns it if this copies.

        Args:
            slots: of the sequence, after its replay.
            inputs: what this call was given.
        """
        for buffer, where in self._owned:
            buffer.fill(slots[where.at] if isinstance(where, Slot) else where)
        tensors = self.lent.get()
        if tensors is self._last[0]:
            return self._last[1]
        leaves = list(self.constants)
        for item, tensor in zip(self.lent_items, tensors, strict=True):
            leaves[item] = tensor
        if self._copies is not None:
            for item, copy in zip(self._copied, self._copies.make(), strict=True):
                leaves[item] = copy
        for item, slot in self._live:
            leaves[item] = slots[slot]
        if self._tracked is not None:
            leaves = self._tracked(leaves)
        for item, position in self._inputs:
            leaves[item] = inputs[position]
        for view in self._views:
            leaves[view.item] = _rebuilt(view, inputs[view.position])
        result = self._tree(leaves)
        if self.is_steady:
            self._last = (tensors, result)
        return result

    def _tree(self, leaves: list[Any]) -> Any:
        return tuple(leaves) if self.is_flat else compat.tree_unflatten(leaves, self._spec)


def returned_names(split: SplitGraph) -> list[str]:
    """The name of each leaf of the result; empty for one that is no value of the graph."""
    return [getattr(leaf, "name", "") for leaf in compat.tree_leaves(split.result)]


def _view(item: int, tensor: torch.Tensor, position: int, source: torch.Tensor) -> _View:
    start = int(tensor.storage_offset()) * tensor.element_size()
    own = int(source.storage_offset()) * source.element_size()
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
