"""The result of a captured step for its caller: :class:`Returns`.

Memory of graphs and of the arena is overwritten by the next replay. So without a forward context
every value in it is copied for the caller, whichever piece made the value: an eager piece may
return a view of such memory. A value that is memory of an input must be that of *this* call's
input; what an eager piece allocated is the caller's already. A value that *is* an input, such as a
buffer that was changed in place, is the very object of this call: a model that keeps it keeps its
own buffer. A view of an input is another object each time, because the caller may change it. All
of this is decided once, when a step is recorded.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.graphs.arena import FreshCopies, OwnedCopy, address
from cgcompile.graphs.guards import same_layout
from cgcompile.graphs.outputs import ReusedTensors, is_reusable
from cgcompile.graphs.sequence import Slot
from cgcompile.passes.split import SplitGraph


class StepInputs(NamedTuple):
    """The inputs of a recorded step."""

    inputs: Sequence[Any]  # with buffers in place of copied inputs
    starts: Sequence[int]  # where the memory of each begins; 0 for what has none
    called: Sequence[Any]  # as the caller passed them
    permanent: Mapping[int, torch.Tensor]  # the caller's objects that are the same in all calls

    def position_of_memory(self, start: int) -> int | None:
        """Return the first input whose memory begins at an address."""
        return self.starts.index(start) if start in self.starts else None

    def position_of(self, leaf: torch.Tensor) -> int | None:
        """Return which input a tensor is: that very object, in the layout of the call."""
        for position, value in enumerate(self.inputs):
            if value is leaf:  # else the buffer has another layout now, as after ``t_()``
                return position if same_layout(leaf, self.called[position]) else None
        return None


class Returns:
    """Make the result of each replay of one recording."""

    def __init__(
        self,
        tree: Any,  # what the recorded step returned
        sources: Sequence[Any],  # what later steps find for each leaf: a slot, or an object
        step: StepInputs,
        fixed: Set[int],  # where memory of graphs, bridges and copied inputs begins
        owns: Callable[[int], bool] | None,  # addresses of results to be copied; None: no copies
        tracked: Callable[[Sequence[Any]], list[Any]] | None = None,  # with ``debug``
        owned: Callable[[torch.Tensor], OwnedCopy | None] | None = None,  # own buffers, if needed
    ) -> None:
        self._spec = compat.tree_spec(tree)
        self._tracked = tracked
        self.constants: list[Any] = []  # the items that never vary; None for the others
        # Items of the result with what makes them: an input, a view of one, a slot, a buffer.
        self._inputs: list[tuple[int, int]] = []
        self._views: list[tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = []
        self._live: list[tuple[int, int]] = []
        self._owned: list[tuple[OwnedCopy, Any]] = []  # with what fills it: a tensor, or a slot
        copied: dict[int, torch.Tensor] = {}
        reused: dict[int, torch.Tensor] = {}
        for item, (leaf, source) in enumerate(zip(compat.tree_leaves(tree), sources, strict=True)):
            in_slot = isinstance(source, Slot)
            constant = None if in_slot else source
            is_tensor = isinstance(leaf, torch.Tensor)
            start = address(leaf) if is_tensor else 0
            is_fixed = is_tensor and start in fixed
            stays = is_tensor and (is_fixed or not in_slot)
            same = step.position_of(leaf) if stays else None
            aliased = step.position_of_memory(start) if is_fixed else None
            if same is not None:
                if same in step.permanent:
                    constant = step.permanent[same]
                else:
                    self._inputs.append((item, same))
            elif aliased is not None:
                self._views.append((item, aliased, _view_of(step.inputs[aliased], leaf)))
            elif is_fixed and owned is not None and (buffer := owned(leaf)) is not None:
                self._owned.append((buffer, source if in_slot else compat.weak_tensor(leaf)))
                constant = None
                reused[item] = compat.weak_tensor(buffer.tensor)
            elif in_slot and (owns is None or not is_fixed or not owns(start)):
                self._live.append((item, source.at))
            elif is_fixed:
                (reused if owns is None else copied)[item] = compat.weak_tensor(leaf)
            elif is_reusable(source):
                reused[item] = compat.alias(source)
            self.constants.append(constant)
        self.slots = [Slot(index) for _, index in self._live]  # read after a replay
        self.slots += [source for _, source in self._owned if isinstance(source, Slot)]
        # Positions of inputs that are returned, themselves or as a view.
        self.positions = {position for _, position in self._inputs}
        self.positions |= {position for _, position, _ in self._views}
        self._copied = [*copied]
        self._copies = FreshCopies([*copied.values()]) if copied else None
        self.reused_items = [*reused]  # the items that are tensors of ``reused``
        self.reused = ReusedTensors([*reused.values()])
        varies = bool(self._views or self._inputs or self._live or self._owned or copied)
        self.is_flat = isinstance(tree, tuple) and not any(map(compat.is_container, tree))
        # Whether the result is a tuple of constants and reused tensors.
        self.is_steady = self.is_flat and not varies and tracked is None
        self._last: tuple[Any, Any] = (None, None)  # of a steady result: (tensors, with constants)

    @property
    def count(self) -> int:
        """How many items the result has."""
        return len(self.constants)

    def make(self, slots: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Return the result of a replay, from the slots after it and the inputs of the call."""
        for buffer, source in self._owned:
            buffer.fill(slots[source.at] if isinstance(source, Slot) else source)
        tensors = self.reused.get()
        if tensors is self._last[0]:
            return self._last[1]
        leaves = list(self.constants)
        for item, tensor in zip(self.reused_items, tensors, strict=True):
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
        for item, position, view in self._views:
            leaves[item] = view(inputs[position])
        if not self.is_flat:
            return compat.tree_unflatten(leaves, self._spec)
        result = tuple(leaves)
        if self.is_steady:
            self._last = (tensors, result)
        return result


def returned_names(split: SplitGraph) -> list[str]:
    """Return the name of each leaf of the result; empty for one that is no value of the graph."""
    return [getattr(leaf, "name", "") for leaf in compat.tree_leaves(split.result)]


def _view_of(source: torch.Tensor, view: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes the same view of the memory of another input."""
    size, stride, dtype = view.size(), view.stride(), view.dtype
    conjugate, negative = view.is_conj(), view.is_neg()
    own = int(source.storage_offset()) * source.element_size()
    # From the input's own offset, in elements of the view.
    offset = (int(view.storage_offset()) * view.element_size() - own) // view.element_size()

    def make(source: torch.Tensor) -> torch.Tensor:
        source = compat.physical(source.detach() if source.requires_grad else source)
        if dtype is source.dtype:
            result = source.as_strided(size, stride, source.storage_offset() + offset)
        else:
            result = torch.empty(0, dtype=dtype, device=source.device)
            start = source.storage_offset() * source.element_size() // result.element_size()
            result.set_(source.untyped_storage(), start + offset, size, stride)
        return compat.with_bits(result, conjugate, negative)

    return make
