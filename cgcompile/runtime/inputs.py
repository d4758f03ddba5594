"""The inputs of a split graph: what each is for, and what no graph can take.

A graph repeats addresses and numbers, so every input that a captured segment reads has one of the
:class:`Roles`. In a FULL graph all of the step is one segment; in a PIECEWISE one the eager pieces
are not.

=================================== ========================= ===================================
input                               read by a graph segment   read by eager pieces alone
=================================== ========================= ===================================
parameter, buffer, constant         static: same object       static
number                              key: by value             live: this call's
stride or offset of copied inputs   that of the buffer        live
0-dim CPU tensor in a graph of      copied to the device      live
another device, or a number that    before each replay
ops take as one
tensor that is only read            read: see below           live
tensor that is mutated, or aliases  mutated: bound by its     live
one that is                         address
=================================== ========================= ===================================

An input is read by a segment also where the segment reads a view that an eager piece made of it.
*read* tensors are copied into owned buffers without a forward context, and bound by address with
one, because then they are the caller's persistent buffers.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import sympy
import torch

from cgcompile.boundaries import AttentionCGSupport
from cgcompile.config import CUDAGraphMode
from cgcompile.errors import GuardError
from cgcompile.graphs.arena import span
from cgcompile.graphs.device import no_device
from cgcompile.passes.nodes import (
    advanced,
    is_cpu_scalar,
    is_symbolic_number,
    storages,
    symbols_of,
    tensors,
)
from cgcompile.passes.nodes import value as value_of
from cgcompile.passes.split import SplitGraph, Value
from cgcompile.reasons import EXPECTED, Fallback, Reason, RunPlain
from cgcompile.torch_compat import raw_memory, torch_ops


class BoundTensors:
    """The last inputs of a graph, where a trace binds them: calls leave them out."""

    # Graphs take views of the same memory, which keep it; callers get the tensors themselves.

    def __init__(self, count: int) -> None:
        self.count = count
        self.tensors: tuple[torch.Tensor, ...] = ()  # tensors of the model, for gradients
        self.held: tuple[torch.Tensor, ...] = ()  # the same memory, for all else
        self._originals: dict[int, torch.Tensor] = {}  # id of a view -> tensor of the model

    def bind(self, tensors: tuple[torch.Tensor, ...], held: tuple[torch.Tensor, ...]) -> None:
        """Bind these tensors: calls leave them out from now on."""
        self.tensors, self.held = tensors, held
        pairs = zip(held, tensors, strict=True)
        self._originals = {id(view): tensor for view, tensor in pairs if view is not tensor}

    @property
    def for_plain_run(self) -> tuple[torch.Tensor, ...]:
        return self.tensors if torch.is_grad_enabled() else self.held

    def by_position(self, inputs: int) -> Mapping[int, torch.Tensor]:
        """Return the tensors of the model by their positions among all inputs."""
        return dict(enumerate(self.tensors, inputs - len(self.tensors)))

    def restore(self, result: Any) -> Any:
        """Return a result with the tensors of the model in place of their views."""
        if not self._originals:
            return result
        leaves = torch_ops.tree_leaves(result)
        restored = [self._originals.get(id(leaf), leaf) for leaf in leaves]
        if all(one is other for one, other in zip(leaves, restored, strict=True)):
            return result
        return torch_ops.tree_unflatten(restored, torch_ops.tree_spec(result))


@dataclass(frozen=True)
class Roles:
    """Positions of inputs by their role in one runtime mode."""

    static: tuple[int, ...]  # parameters, buffers and module attributes
    numbers: tuple[int, ...]  # integers that a graph segment reads
    strides: tuple[int, ...]  # other integers: only strides and offsets of ``read`` tensors
    restrided: tuple[int, ...]  # these tensors
    scalars: tuple[int, ...]  # 0-dim CPU tensors of a FULL graph; some are ``static`` as well
    read: tuple[int, ...]  # tensors that graph segments only read
    mutated: tuple[int, ...]  # mutated tensors, and their aliases, that a graph segment uses

    @cached_property
    def is_static(self) -> frozenset[int]:
        return frozenset(self.static)

    @classmethod
    def of(cls, split: SplitGraph, mode: CUDAGraphMode) -> "Roles":
        full = mode is CUDAGraphMode.FULL
        pieces = [piece.inputs for piece in split.pieces if piece.capture]
        inputs = [[value.name for value in split.inputs]] if full else pieces
        names = {name for each in inputs for name in each} - split.cpu_scalars
        names -= {v.name for v in split.inputs if is_cpu_scalar(v.meta, split.device)}
        memory = storages([split.values[name].meta for name in names])
        roles: dict[str, list[int]] = {name: [] for name in cls.__annotations__}
        for position, value in enumerate(split.inputs):
            is_read = value.name in names or not memory.isdisjoint(storages(value.meta))
            if isinstance(value.meta, torch.Tensor) and value.static:
                roles["static"].append(position)
            elif is_read:
                tensor_role = "mutated" if value.mutated else "read"
                is_tensor = isinstance(value.meta, torch.Tensor)
                roles[tensor_role if is_tensor else "numbers"].append(position)
            if full and value.name in split.cpu_scalars:
                roles["scalars"].append(position)
        free = _of_layouts_alone(split, roles["numbers"], roles["read"])
        symbols = {p: symbols_of(value.meta) for p, value in enumerate(split.inputs) if free}
        roles["strides"] = [p for p in roles["numbers"] if free and symbols[p] <= free]
        roles["numbers"] = [p for p in roles["numbers"] if p not in roles["strides"]]
        roles["restrided"] = [p for p in roles["read"] if free and symbols[p] & free]
        return cls(**{name: tuple(positions) for name, positions in roles.items()})


def _of_layouts_alone(
    split: SplitGraph, numbers: Sequence[int], read: Sequence[int]
) -> set[sympy.Symbol]:
    """Return the symbols that are only strides or offsets of ``read`` tensors."""
    # Graphs copy these tensors into buffers with the layouts of the capture.
    symbols = symbols_of([split.inputs[position].meta for position in numbers])
    names = {split.inputs[position].name for position in numbers}
    copied = {split.inputs[position].name for position in read}
    for name, known in split.values.items() if symbols else ():
        if name not in names:
            symbols -= symbols_of([*known.meta.shape] if name in copied else known.meta)
    for node in (node for piece in split.pieces for node in piece.module.graph.nodes):
        if symbols and (node.users or node.op != "placeholder") and not tensors(value_of(node)):
            symbols -= symbols_of(value_of(node))  # an op computes with it
    return symbols


def full_support(split: SplitGraph) -> AttentionCGSupport:
    """Return the support of FULL graphs by the whole step: the least support of its pieces."""
    # A replay does not read CPU memory again. Captured pieces read copies of 0-dim inputs.
    if split.device.type != "cpu":
        copied = split.cpu_scalars.intersection(value.name for value in split.inputs)
        for piece in split.pieces:
            names = [name for name in piece.inputs if not (piece.capture and name in copied)]
            metas = tensors([split.values[name].meta for name in names])
            if any(meta.device.type == "cpu" for meta in metas):
                return AttentionCGSupport.NEVER
    return min((piece.support for piece in split.pieces), default=AttentionCGSupport.ALWAYS)


def why_never(split: SplitGraph, mode: CUDAGraphMode, has_device: bool) -> Fallback | None:
    """Return why no call of a graph is captured, for any inputs; None if calls may be."""
    if mode is CUDAGraphMode.NONE:
        return Fallback(Reason.MODE_NONE, "cudagraph_mode is NONE")
    if not any(piece.capture for piece in split.pieces):
        whys = [why for piece in split.pieces for why in piece.why]
        if all(why.reason is Reason.NO_KERNEL for why in whys):
            return Fallback(Reason.NO_KERNEL, "this graph launches no kernel")
        if full_support(split) is AttentionCGSupport.NEVER:
            eager = [
                Fallback(why.reason, f"every piece runs eager; {piece.name}: {why.detail}")
                for piece in split.pieces
                for why in piece.why
                if why.reason is not Reason.NO_KERNEL
            ]
            return min(eager, key=lambda why: why.reason in EXPECTED)  # what strict refuses first
    if not has_device:
        return no_device(split.device)
    unsupported = _unsupported_value(split)
    return Fallback(Reason.UNSUPPORTED_INPUT, unsupported) if unsupported else None


def _unsupported_value(split: SplitGraph) -> str | None:
    """Return the first input or crossing value that graphs cannot hold, in words."""
    for value in split.values.values():
        name = value.source or value.name
        if not all(map(raw_memory.is_plain_tensor, tensors(value.meta))):
            return f"{name} is no plain dense tensor"
        other = not isinstance(value.meta, (torch.Tensor, int))
        if other and value in split.inputs and not is_symbolic_number(value.meta):
            return f"{name} is a {type(value.meta).__name__}"
    return None


class Overlaps:
    """Finds memory that a step mutates and that another input of the call shares."""

    # A compiled piece assumes that inputs overlap as when traced; no guard of Dynamo covers that.

    def __init__(self, split: SplitGraph) -> None:
        tensors = [(p, v) for p, v in enumerate(split.inputs) if isinstance(v.meta, torch.Tensor)]
        self._inputs = split.inputs
        self._storages = {
            position: raw_memory.storage_key(value.meta) for position, value in tensors
        }
        self._mutated = frozenset(position for position, value in tensors if value.mutated)
        moved = {piece.inputs[k] for piece in split.pieces for k in advanced(piece.module)}
        self._counters = {position for position, value in tensors if value.name in moved}

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise RunPlain where memory that a step writes is not as when it was traced."""
        if not self._mutated:
            return
        try:
            ranges = self._near_mutated(inputs)
        except (NotImplementedError, RuntimeError):  # a wrapper subclass has no address
            return
        for one, other in _overlapping(ranges):
            apart = self._storages[one] != self._storages[other]
            if apart and not self._mutated.isdisjoint((one, other)):
                for counter, alias in ((one, other), (other, one)):
                    if counter in self._counters:
                        paths = self._path(counter), self._path(alias)
                        raise GuardError.shared_counter(path=paths[0], other=paths[1])
                detail = f"{self._path(other)} is memory that the step writes"
                detail += f", and of {self._path(one)}"
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, detail))

    def _near_mutated(self, inputs: Sequence[Any]) -> list[tuple[int, int, int]]:
        """Return (start, end, position) of the inputs in allocations that the step mutates."""
        storages = [inputs[position].untyped_storage() for position in self._mutated]
        ranges = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)
        starts = [start for start, _ in ranges]
        near = []
        for position in self._storages:
            address = inputs[position].data_ptr()
            before = bisect_right(starts, address)
            if before and address < ranges[before - 1][1]:
                tensor = inputs[position]
                near.append((address, address + span(tensor) * tensor.element_size(), position))
        return near

    def _path(self, position: int) -> str:
        return input_names(self._inputs)[position]


def input_names(inputs: Sequence[Value]) -> list[str]:
    """Return the names of inputs, for messages; arguments of the caller are numbered."""
    numbers = count()
    names = [(value.static, repr(value.source or value.name)) for value in inputs]
    return [name if static else f"input {next(numbers)} {name}" for static, name in names]


def _overlapping(ranges: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each pair of ranges that overlap, in order."""
    open_ranges: list[tuple[int, int]] = []
    for start, end, position in sorted(ranges):
        open_ranges = [(last, other) for last, other in open_ranges if last > start]
        if end > start:  # an empty tensor overlaps nothing
            yield from ((min(position, other), max(position, other)) for _, other in open_ranges)
            open_ranges.append((end, position))
