"""The tensors that a trace binds to its graph, so that calls leave them out: :class:`Frozen`.

What becomes of each input of a split graph when a step is captured: :class:`Roles`.

A graph repeats addresses and numbers, so every input that a captured segment reads needs an answer.
In a FULL graph all of the step is one segment; in a PIECEWISE one the eager pieces are not.

=================================== ========================= ===================================
input                               read by a graph segment   read by eager pieces alone
=================================== ========================= ===================================
parameter, buffer, constant         static: same object       static
number                              key: by value             live: this call's
0-dim CPU tensor in a graph of      copied to the device      live
another device                      before each replay
tensor that is only read            read: see below           live
tensor that is written, or shares   written: bound by its     live
memory with one that is             address
=================================== ========================= ===================================

An input is read by a segment also where the segment reads a view that an eager piece made of it.

*read* tensors are copied into buffers of ours where nobody set a forward context, and bound by
address where somebody did, because then they are the caller's persistent buffers.

Whether memory that a step writes has another name in this call: :class:`Overlaps`.

A compiled piece takes inputs that were apart when it was traced for apart, and reads them in any
order: before another one is written, say. Nothing in Dynamo's guards says so. Inputs that shared
memory when they were traced need nothing here: what they are in is left uncompiled.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.boundaries import AttentionCGSupport
from cgcompile.config import CUDAGraphMode
from cgcompile.graphs.arena import span
from cgcompile.passes.nodes import is_cpu_scalar, is_symbolic_number, storages, tensors
from cgcompile.passes.split import SplitGraph, Value
from cgcompile.reasons import EXPECTED, Fallback, Reason


class Frozen:
    """The last inputs of a graph, where they are the same in all calls.

    Graphs are given other views of the same memory, which keep it. A caller gets the tensors
    themselves: a model that changes a buffer in place and keeps what came of it keeps its buffer.

    Args:
        count: how many there are.

    Attributes:
        count: how many there are.
        tensors: as the model has them; gradients need them. Empty until :meth:`bind`.
        held: the same memory, for all else.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.held: tuple[torch.Tensor, ...] = ()
        self._originals: dict[int, torch.Tensor] = {}  # by the id of what stands for them

    def bind(self, tensors: tuple[torch.Tensor, ...], held: tuple[torch.Tensor, ...]) -> None:
        """From now on, calls leave them out."""
        self.tensors, self.held = tensors, held
        pairs = zip(held, tensors, strict=True)
        self._originals = {id(view): each for view, each in pairs if view is not each}

    @property
    def now(self) -> tuple[torch.Tensor, ...]:
        """What a call that runs plain takes in their place."""
        return self.tensors if torch.is_grad_enabled() else self.held

    def by_position(self, inputs: int) -> Mapping[int, torch.Tensor]:
        """As the model has them, by their positions among all inputs of a graph."""
        return dict(enumerate(self.tensors, inputs - len(self.tensors)))

    def put_back(self, result: Any) -> Any:
        """A result with the tensors themselves where it has what stands for them."""
        if not self._originals:
            return result
        leaves = compat.tree_leaves(result)
        found = [self._originals.get(id(leaf), leaf) for leaf in leaves]
        if all(one is other for one, other in zip(leaves, found, strict=True)):
            return result
        return compat.tree_unflatten(found, compat.tree_spec(result))


@dataclass(frozen=True)
class Roles:
    """Positions of inputs, by what becomes of them in one runtime mode.

    Attributes:
        static: parameters, buffers and module attributes.
        numbers: whole numbers that a graph segment reads.
        scalars: 0-dim CPU tensors that the one segment of a FULL graph reads on another device; a
            parameter is also among ``static``. In a PIECEWISE graph all of these are live.
        read: tensors that graph segments only read.
        written: tensors that a graph segment reads or writes and that some piece writes, or that
            share memory with one.
    """

    static: tuple[int, ...]
    numbers: tuple[int, ...]
    scalars: tuple[int, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]

    @cached_property
    def is_static(self) -> frozenset[int]:
        """The positions of ``static``, to be asked for one."""
        return frozenset(self.static)

    @classmethod
    def of(cls, split: SplitGraph, mode: CUDAGraphMode) -> "Roles":
        names = _read_by_graphs(split, mode)
        device = split.device
        names -= split.cpu_scalars
        names -= {value.name for value in split.inputs if is_cpu_scalar(value.meta, device)}
        memory = storages([split.values[name].meta for name in names])
        places: dict[str, list[int]] = {name: [] for name in cls.__annotations__}
        for position, value in enumerate(split.inputs):
            seen = value.name in names or not memory.isdisjoint(storages(value.meta))
            role = _role(value, seen)
            if role is not None:
                places[role].append(position)
            if mode is CUDAGraphMode.FULL and value.name in split.cpu_scalars:
                places["scalars"].append(position)
        return cls(**{name: tuple(found) for name, found in places.items()})


def _read_by_graphs(split: SplitGraph, mode: CUDAGraphMode) -> set[str]:
    if mode is CUDAGraphMode.FULL:
        return {value.name for value in split.inputs}
    return {name for piece in split.pieces if piece.capture for name in piece.inputs}


def _role(value: Value, seen: bool) -> str | None:
    if not isinstance(value.meta, torch.Tensor):
        return "numbers" if seen else None
    if value.static:
        return "static"
    if not seen:
        return None
    return "written" if value.written else "read"


def unsupported_input(split: SplitGraph) -> str | None:
    """The first input or crossing value that graphs cannot hold, in words; None if all can."""
    for value in split.values.values():
        for tensor in tensors(value.meta):
            if not compat.is_plain_tensor(tensor):
                return f"{value.source or value.name} is no plain dense tensor"
        other = not isinstance(value.meta, (torch.Tensor, int))
        if other and value in split.inputs and not is_symbolic_number(value.meta):
            return f"{value.source or value.name} is a {type(value.meta).__name__}"
    return None


def full_support(split: SplitGraph) -> AttentionCGSupport:
    """How far the whole step can go into a FULL graph: as far as its least able piece.

    Not at all if a piece reads memory of the CPU, such as sequence lengths, in a graph of another
    device: what the host reads there would be repeated. A captured piece may read a 0-dim CPU
    tensor that is an input of the step, because that is copied to the device before a replay.
    """
    if split.device.type != "cpu":
        copied = split.cpu_scalars.intersection(value.name for value in split.inputs)
        for piece in split.pieces:
            names = [name for name in piece.inputs if not (piece.capture and name in copied)]
            found = tensors([split.values[name].meta for name in names])
            if any(each.device.type == "cpu" for each in found):
                return AttentionCGSupport.NEVER
    return min((piece.support for piece in split.pieces), default=AttentionCGSupport.ALWAYS)


def _why_eager(split: SplitGraph) -> Fallback:
    """Why a graph of eager pieces alone is not captured: what ``strict`` refuses comes first."""
    found = [
        Fallback(why.reason, f"every piece runs eager; {piece.name}: {why.detail}")
        for piece in split.pieces
        for why in piece.why
        if why.reason is not Reason.NO_KERNEL
    ]
    return next((why for why in found if why.reason not in EXPECTED), found[0])


def why_never(split: SplitGraph, wanted: CUDAGraphMode, has_device: bool) -> Fallback | None:
    """Why no call of a graph is captured, whatever it is given; None if it may be."""
    if wanted is CUDAGraphMode.NONE:
        return Fallback(Reason.MODE_NONE, "cudagraph_mode is NONE")
    captured = any(piece.capture for piece in split.pieces)
    whys = [why.reason for piece in split.pieces for why in piece.why]
    if not captured and all(reason is Reason.NO_KERNEL for reason in whys):
        return Fallback(Reason.NO_KERNEL, "this graph launches no kernel")
    if not captured and full_support(split) is AttentionCGSupport.NEVER:
        return _why_eager(split)
    if not has_device:
        detail = (
            f"tensors are on {str(split.device)!r}; graphs need a CUDA device, or "
            "capture_device='host' (CGCOMPILE_CAPTURE_DEVICE=host) for a recorder on the CPU"
        )
        return Fallback(Reason.NO_DEVICE, detail)
    unsupported = unsupported_input(split)
    return Fallback(Reason.UNSUPPORTED_INPUT, unsupported) if unsupported else None


class Overlaps:
    """Compares the inputs of a call.

    Args:
        inputs: of the graph, as traced.
    """

    def __init__(self, inputs: Sequence[Value]) -> None:
        found = [(p, each) for p, each in enumerate(inputs) if isinstance(each.meta, torch.Tensor)]
        self._inputs = inputs
        self._keys = {place: compat.storage_key(each.meta) for place, each in found}
        self._written = frozenset(place for place, each in found if each.written)

    def why(self, inputs: Sequence[Any]) -> Fallback | None:
        """Why pieces must not run compiled, nor be captured; None if memory is as it was traced.

        Costs 0.2 us for each tensor of a graph that writes one of its inputs, else nothing.
        """
        if not self._written:
            return None
        try:
            stretches = self._near_written(inputs)
        except (NotImplementedError, RuntimeError):  # a tensor around others has no address
            return None
        for one, other in _overlapping(stretches):
            if self._keys[one] != self._keys[other] and not self._written.isdisjoint((one, other)):
                detail = f"{self._named(other)} is memory that the step writes"
                return Fallback(Reason.UNSUPPORTED_INPUT, f"{detail}, and of {self._named(one)}")
        return None

    def _near_written(self, inputs: Sequence[Any]) -> list[tuple[int, int, int]]:
        """(first address, that after the last, place) of inputs in allocations that are written."""
        storages = [inputs[place].untyped_storage() for place in self._written]
        ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages)
        starts = [start for start, _ in ranges]
        found = []
        for place in self._keys:
            address = inputs[place].data_ptr()
            before = bisect_right(starts, address)
            if before and address < ranges[before - 1][1]:
                tensor = inputs[place]
                found.append((address, address + span(tensor) * tensor.element_size(), place))
        return found

    def _named(self, place: int) -> str:
        value = self._inputs[place]
        return f"input {place} {value.source or value.name!r}"


def _overlapping(stretches: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """The places of each two that overlap, in order."""
    begun: list[tuple[int, int]] = []
    for start, end, place in sorted(stretches):
        begun = [(last, other) for last, other in begun if last > start]
        if end > start:  # what has no elements overlaps nothing
            yield from ((min(place, other), max(place, other)) for _, other in begun)
            begun.append((end, place))
