"""Where a step of a wrapper differs from the plain one: :func:`wrapper_place`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from cgcompile import compat
from cgcompile.boundaries import SplittingOp, target_name
from cgcompile.errors import CGCompileError, DispatchError
from cgcompile.forward_context import callers_context, in_full_mode
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.breaks import Breaker, BreakMode
from cgcompile.graphs.capture import capture_turn
from cgcompile.graphs.entries import CUDAGraphEntry
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.observe.comparing import (
    Difference,
    Tolerance,
    first_difference,
    without_gradients,
)
from cgcompile.observe.inputs import Call
from cgcompile.observe.opened import named_values, uncompared
from cgcompile.observe.restore import Undone, buffers_of, copies, put_back

log = logging.getLogger(__name__)


def wrapper_place(
    wrapper: CUDAGraphWrapper, call: Call, tolerance: Tolerance, kept: Sequence[torch.Tensor]
) -> Difference:
    """Return the first eager break whose arguments differ, or the result.

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
    if descriptor is None or wrapper.entry_of(mode, descriptor) is None:
        return Difference(detail="no graph serves the step")
    args, kwargs = call
    tensors = compat.tree_tensors(call)
    dtypes = [each.dtype for each in tensors if each.is_floating_point()]
    rtol, atol = tolerance.of(dtypes[0]) if dtypes else (0.0, 0.0)
    try:
        with without_gradients(), put_back([*tensors, *kept]):
            found = wrapper_difference(wrapper, *args, rtol=rtol, atol=atol, **kwargs)
    except CGCompileError as error:
        return Difference(detail=str(error).splitlines()[0])
    return (
        Difference()
        if found is None
        else Difference(piece=found.piece, detail=f"{found.value}: {found.detail}")
    )


def wrapper_difference(
    wrapper: CUDAGraphWrapper,
    *args: Any,
    rtol: float = 0.0,
    atol: float = 0.0,
    **kwargs: Any,
) -> Difference | None:
    """Replay a step of a wrapper and run it plain, on the same inputs; compare every break.

    The arguments of each eager break are compared as it leaves them, tensors and plain values, and
    what comes out in the end. Of dataclasses and plain objects what is in them is compared; what
    has no fields and no ``==`` of its own is not, with a line in the log. What the plain step
    changes is put back before the replay: tensors among the arguments, and tensors, attributes and
    containers that the model leads to, weights included. What is written elsewhere, such as a
    global or a cache that the forward context leads to, is written twice. Of a model with compiled
    code all tensors are copied, as its writes are not seen; else those that are written, the
    arguments and the buffers. Synchronises.

    Args:
        wrapper: whose step it is.
        *args: as a call takes them, in the forward context of the step.
        rtol: relative tolerance; 0 for bitwise.
        atol: absolute tolerance.
        **kwargs: as a call takes them.

    Returns:
        The first difference, or None.

    Raises:
        DispatchError: no graph serves the step, or the plain step breaks at other places than the
            recorded one.
        GuardError: an input is not that of the capture.
    """
    entry = _entry(wrapper)
    entry.check(args, kwargs, wrapper.name)
    undone = Undone(wrapper.unwrap(), args, kwargs)
    opaque = compat.holds_compiled_code(wrapper.unwrap())
    state = undone.tensors if opaque else buffers_of(wrapper.unwrap())
    breaks = [each for each in entry.sequence.segments if isinstance(each, EagerSegment)]
    with put_back([*compat.tree_tensors((args, kwargs)), *state]), undone:
        watcher = _Watcher(wrapper)
        plain = copies(named_values(watcher.run(args, kwargs)))
    names = [name for name, _ in watcher.seen]
    if wrapper.pool is not None:
        wrapper.pool.follow_stream()
    replayed: list[dict[str, Any]] = []
    for segment, step in zip(entry.sequence.segments, entry.sequence.steps, strict=True):
        step()
        if isinstance(segment, EagerSegment):
            replayed.append(copies(named_values((segment.args, dict(segment.kwargs)))))
    if names != [each.name for each in breaks]:
        raise DispatchError.other_breaks(
            what=wrapper.name, now=names, before=[each.name for each in breaks]
        )
    for place, (name, given) in enumerate(watcher.seen):
        found = first_difference(f"break {place} ({name})", given, replayed[place], rtol, atol)
        if found is not None:
            return found
    output = copies(named_values(entry.output))
    for name in uncompared(plain, output):
        log.warning("%s: %s of the result is not compared", wrapper.name, name)
    return first_difference("the result", plain, output, rtol, atol)


def _entry(wrapper: CUDAGraphWrapper) -> CUDAGraphEntry:
    """What serves the step of the forward context."""
    context = callers_context()
    if context is None or context.batch_descriptor is None:
        raise DispatchError.nothing_verified(why="no forward context with a batch descriptor")
    mode, descriptor = context.cudagraph_runtime_mode, context.batch_descriptor
    found = wrapper.entry_of(mode, descriptor)
    if found is None:
        detail = f"{wrapper.name} has nothing for {mode.name}, {descriptor}"
        raise DispatchError.nothing_verified(why=detail)
    return found


class _Watcher(Breaker):
    """Runs a step plain and notes what its breaks are given.

    Attributes:
        seen: name and arguments of each break, in order.
    """

    def __init__(self, wrapper: CUDAGraphWrapper) -> None:
        self.name = wrapper.name
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._wrapper = wrapper
        self._in_break = False

    @property
    def is_recording(self) -> bool:
        return not self._in_break

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        wrapper = self._wrapper
        if not isinstance(wrapper, BreakableCUDAGraphWrapper) or wrapper.pool is None:
            return wrapper.runnable(*args, **kwargs)
        below = wrapper.sees_composites
        composites = below or torch.is_inference_mode_enabled()
        mode = BreakMode(self, wrapper.boundaries, wrapper.pool.device.tensor_type, composites)
        with ExitStack() as stack:
            stack.enter_context(capture_turn(f"verify {self.name}", self))
            stack.enter_context(wrapper.pool.device.around())
            if below:
                stack.enter_context(compat.below_autograd())
            self._mode = mode
            mode.switch_on()
            stack.callback(mode.switch_off)
            return wrapper.runnable(*args, **kwargs)

    def meet(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :class:`~cgcompile.graphs.breaks.Breaker`."""
        if in_full_mode():
            return op(*args, **kwargs)
        return self.run_eager(target_name(op), op, args, kwargs)

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with all watching off, and note how it leaves its arguments."""
        self._mode.switch_off()
        self._in_break = True
        try:
            made = function(*args, **(kwargs or {}))
            self.seen.append((name, copies(named_values((args, dict(kwargs or {}))))))
            return made
        finally:
            self._in_break = False
            self._mode.switch_on()
