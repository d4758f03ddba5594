"""Where a step of a wrapper differs from the plain one: :func:`wrapper_place`."""

from collections.abc import Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.errors import CGCompileError
from cgcompile.forward_context import callers_context
from cgcompile.graphs.entries import CUDAGraphEntry
from cgcompile.graphs.host import HostDevice, HostGraph
from cgcompile.graphs.host_steps import OpRun
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSegment, GraphSequence
from cgcompile.graphs.verify import put_back, verify_wrapper
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.observe.comparing import Tolerance, without_gradients
from cgcompile.observe.inputs import Call
from cgcompile.observe.locate import Place, first_op


def wrapper_place(
    wrapper: CUDAGraphWrapper, call: Call, tolerance: Tolerance, kept: Sequence[torch.Tensor]
) -> Place:
    """The first op of a host recording that the program does not run like that now, or the break.

    In the forward context of the step.

    Args:
        wrapper: whose step it is.
        call: the arguments of the step; their tensors are put back.
        tolerance: how close numbers must be.
        kept: what else the step writes, to be put back as well.
    """
    context = callers_context()
    descriptor = None if context is None else context.batch_descriptor
    mode = wrapper.runtime_mode if context is None else context.cudagraph_runtime_mode
    entry = None if descriptor is None else wrapper.entry_of(mode, descriptor)
    if entry is None:
        return Place(detail="no graph serves the step")
    state = [*compat.tree_tensors(call), *kept]
    with without_gradients():
        found = _op(wrapper, entry, call, tolerance, state)
        if found is not None:
            return found
        with put_back(state):
            return _break(wrapper, call, tolerance)


def _op(
    wrapper: CUDAGraphWrapper,
    entry: CUDAGraphEntry,
    call: Call,
    tolerance: Tolerance,
    state: list[torch.Tensor],
) -> Place | None:
    graphs = [each.graph for each in entry.sequence.segments if isinstance(each, GraphSegment)]
    if not all(isinstance(each, HostGraph) for each in graphs):
        return None  # a CUDA graph does not let one look into it
    args, kwargs = call
    with put_back(state):
        recorded = _runs(entry.sequence)
    again = type(wrapper)(
        wrapper.runnable,
        wrapper.config,
        wrapper.runtime_mode,
        wrapper.options,
        pool=GraphPool(HostDevice(lines=True)),
        name=wrapper.name,
    )
    try:
        with put_back(state):
            captured = again.record(entry.batch_descriptor, args, kwargs)
    except CGCompileError as error:
        return Place(detail=f"it cannot be recorded again: {str(error).splitlines()[0]}")
    if captured is None:
        return None
    with put_back(state):
        now = _runs(captured.entry.sequence)
    found = first_op(recorded, now, tolerance)
    if found is None:
        return None
    position, detail = found
    if position >= len(now):
        return Place("", recorded[position].name, "", detail)
    return Place(_segment(entry, position), now[position].name, now[position].line, detail)


def _segment(entry: CUDAGraphEntry, position: int) -> str:
    """The graph segment that holds the op at a position."""
    count = 0
    for place, segment in enumerate(entry.sequence.segments):
        if isinstance(segment, GraphSegment) and isinstance(segment.graph, HostGraph):
            count += len(segment.graph.ops)
            if position < count:
                return f"segment {place}"
    return ""


def _runs(sequence: GraphSequence) -> list[OpRun]:
    """Replay a sequence op by op."""
    found: list[OpRun] = []
    segments = sequence.segments

    def run(place: int, step: Any) -> None:
        segment = segments[place]
        if isinstance(segment, GraphSegment) and isinstance(segment.graph, HostGraph):
            segment.graph.watch(found.append)
        else:
            step()

    sequence.watch((), None, run)
    sequence.clear()
    return found


def _break(wrapper: CUDAGraphWrapper, call: Call, tolerance: Tolerance) -> Place:
    args, kwargs = call
    dtypes = [each.dtype for each in compat.tree_tensors(call) if each.is_floating_point()]
    rtol, atol = tolerance.of(dtypes[0]) if dtypes else (0.0, 0.0)
    try:
        found = verify_wrapper(wrapper, *args, rtol=rtol, atol=atol, **kwargs)
    except CGCompileError as error:
        return Place(detail=str(error).splitlines()[0])
    return Place() if found is None else Place(found.where, detail=f"{found.what}: {found.detail}")
