"""What becomes of each input of a split graph when a step is captured: :class:`Roles`.

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
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from cgcompile import compat
from cgcompile.boundaries import AttentionCGSupport
from cgcompile.config import CUDAGraphMode
from cgcompile.passes.nodes import is_cpu_scalar, is_symbolic_number, storages, tensors
from cgcompile.passes.pieces import Value
from cgcompile.passes.split import SplitGraph
from cgcompile.reasons import EXPECTED, Reason, Why


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


def _why_eager(split: SplitGraph) -> Why:
    """Why a graph of eager pieces alone is not captured: what ``strict`` refuses comes first."""
    found = [
        Why(why.reason, f"every piece runs eager; {piece.name}: {why.detail}")
        for piece in split.pieces
        for why in piece.why
        if why.reason is not Reason.NO_KERNEL
    ]
    return next((why for why in found if why.reason not in EXPECTED), found[0])


def why_never(split: SplitGraph, wanted: CUDAGraphMode, has_device: bool) -> Why | None:
    """Why no call of a graph is captured, whatever it is given; None if it may be."""
    if wanted is CUDAGraphMode.NONE:
        return Why(Reason.MODE_NONE, "cudagraph_mode is NONE")
    captured = any(piece.capture for piece in split.pieces)
    whys = [why.reason for piece in split.pieces for why in piece.why]
    if not captured and all(reason is Reason.NO_KERNEL for reason in whys):
        return Why(Reason.NO_KERNEL, "this graph launches no kernel")
    if not captured and full_support(split) is AttentionCGSupport.NEVER:
        return _why_eager(split)
    if not has_device:
        detail = (
            f"tensors are on {str(split.device)!r}; graphs need a CUDA device, or "
            "capture_device='host' (CGCOMPILE_CAPTURE_DEVICE=host) for a recorder on the CPU"
        )
        return Why(Reason.NO_DEVICE, detail)
    unsupported = unsupported_input(split)
    return Why(Reason.UNSUPPORTED_INPUT, unsupported) if unsupported else None
