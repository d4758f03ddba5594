"""The eager breaks of a breakable capture: where they are, and what goes in and out.

:class:`BreakMode` is a dispatch mode around each segment that finds splitting ops while they run.
Without it an attention op under no decorator would be captured, and its metadata with it. It sees
the ops of the thread that captures, those in the Python kernels of other ops and those that a
compiled model calls included. :func:`foreign_breaks` finds breaks that were written for Meta's
``piecewise-cuda-graphs``: functions under its ``no_graph`` read from a context variable of that
package whether a capture runs. Nothing is imported, and nothing of that package is changed.

A result of a break is copied to where graphs read it, and usually dies then. One that the program
keeps, such as a cache, exists twice; where either is written, the other is stale:
:class:`Original` finds that.
"""

import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from cgcompile.boundaries import Boundaries, SplittingOp
from cgcompile.errors import CaptureError
from cgcompile.graphs.arena import Block, address, numbers_as_bytes
from cgcompile.torch_compat import raw_memory, torch_ops

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By position, by name."""


def held(arguments: Arguments, owns: Callable[[torch.Tensor], bool]) -> Arguments:
    """Return arguments as a segment keeps them: weakly where the recording ``owns`` the memory."""

    def keep(leaf: Any) -> Any:
        ours = isinstance(leaf, torch.Tensor) and address(leaf) and owns(leaf)
        return raw_memory.weak_tensor(leaf) if ours else leaf

    with raw_memory.outside_inference_mode():  # once for all that is held weakly
        kept: Arguments = torch_ops.tree_map(keep, arguments)
    return kept


def transform_around(arguments: Arguments) -> str | None:
    """Return the transform of ``torch.func`` that is active, as no break runs under it; or None."""
    # Under vmap the arguments may be ordinary tensors, which are not mapped.
    transform = torch_ops.functorch_transform()
    if transform == "Vmap" and not any(
        map(torch_ops.is_wrapped, torch_ops.tree_tensors(arguments))
    ):
        return None
    return transform


def watch_containers(arguments: Arguments) -> tuple[list[Any], Callable[[], bool]]:
    """Return the leaves of arguments, and whether their containers have changed since."""
    leaves = torch_ops.tree_leaves(arguments)
    args, kwargs = arguments
    # A function cannot change the tuple and the dict that its arguments come in.
    if not any(map(torch_ops.is_container, (*args, *kwargs.values()))):
        return leaves, lambda: False
    spec = torch_ops.tree_spec(arguments)

    def changed() -> bool:
        if torch_ops.tree_spec(arguments) != spec:
            return True
        return any(map(operator.is_not, torch_ops.tree_leaves(arguments), leaves))

    return leaves, changed


class Original:
    """A result of a break that is in a bridge, while the program keeps it; both held weakly."""

    def __init__(self, name: str, source: torch.Tensor, bridge: torch.Tensor, block: Block) -> None:
        self.name = name
        self.block: Block | None = block  # of the bridge; None when the program dropped the bridge
        self.life, self.tensor = raw_memory.StorageLife(source), weakref.ref(source)
        self._source, self._bridge = raw_memory.weak_tensor(source), raw_memory.weak_tensor(bridge)
        self._before: torch.Tensor | None = None  # the values at the first check

    @property
    def is_stale(self) -> bool:
        """Whether the original or its copy was written since the first check; synchronises."""
        now = numbers_as_bytes(self._source)
        if self._before is None:
            self._before = now.clone()
            return False
        if not torch.equal(now, self._before):
            return True
        if self.block is None or not self.block.in_use:
            return False
        return not torch.equal(numbers_as_bytes(self._bridge), self._before)


_PACKAGE, _VARIABLE = "piecewise_cuda_graphs", "_current_piecewise_graph_ctx"


@contextmanager
def listen_to_no_graph(listener: Any) -> Iterator[None]:
    """Let ``no_graph`` of Meta's ``piecewise-cuda-graphs`` call ``listener`` at its breaks."""
    # The listener has ``_end_segment()``, ``_insert_eager(fn, args, kwargs)`` and
    # ``_begin_segment()``. No effect if that package is not imported. Tried on its version 0.1.0.
    variable = getattr(sys.modules.get(_PACKAGE), _VARIABLE, None)
    if not isinstance(variable, ContextVar):
        yield
        return
    token = variable.set(listener)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def foreign_breaks(recorder: Any) -> Iterator[None]:
    """Let functions under ``no_graph`` in this thread break the segments of a recorder."""
    listener = _Listener(recorder)
    with ExitStack() as stack:
        stack.push(listener.leave)  # the last: what it restores was there before
        stack.enter_context(listen_to_no_graph(listener))
        yield


class _Listener:
    """The methods that ``no_graph`` calls, by its names for them."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._pause: ExitStack | None = None
        self._inside = 0  # depth of breaks inside of a break, which are ignored

    def _end_segment(self) -> None:
        if self._pause is not None or not self._recorder.is_recording:
            self._inside += 1
            return
        with ExitStack() as stack:
            stack.enter_context(self._recorder.pause("a function under no_graph"))
            self._pause = stack.pop_all()

    def _insert_eager(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._inside:
            self._recorder.add_eager(fn, args, kwargs)

    def _begin_segment(self) -> None:
        if self._inside:
            self._inside -= 1
            return
        pause, self._pause = self._pause, None
        assert pause is not None
        pause.close()

    def leave(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End a break whose function raised: ``no_graph`` does not."""
        pause, self._pause = self._pause, None
        if pause is not None:
            lost = error or RuntimeError("a function under no_graph raised")
            pause.__exit__(type(lost), lost, trace)


_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default  # an op that the math kernel of SDPA calls


class Breaker:
    """Base class: runs the splitting ops and the decorated functions of a step."""

    @property
    def is_recording(self) -> bool:
        """Whether it is outside of any break."""
        raise NotImplementedError

    def on_splitting_op(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a splitting op, in a break or not, and return its result."""
        raise NotImplementedError

    def on_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an op that is no splitting op, before it is called."""

    def passes_over(self, inputs: Sequence[Any], boundaries: Boundaries) -> bool:
        """Return whether ops of a compiled piece need no look; note its inputs then."""
        return False

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function in an eager break, and return its result."""
        raise NotImplementedError


class BreakMode(torch_ops.DispatchMode):
    """Pass each op of the segments of one capture to a breaker."""

    def __init__(
        self,
        breaker: Breaker,
        boundaries: Boundaries,
        tensor_type: str,
        sees_composites: bool,  # composite ops such as SDPA arrive as one op, for any kernel
    ) -> None:
        super().__init__()
        self._breaker = breaker
        self._boundaries = boundaries
        self._tensor_type = tensor_type
        self._sees_composites = sees_composites
        # By op: its entry, unless it is captured, and its kernel if that is written in Python.
        self._known: dict[Any, tuple[SplittingOp | None, Callable[..., Any] | None]] = {}
        self._sdpa_breaks = boundaries.match_call(_SDPA) is not None
        self._on = False  # whether it is on torch's stack of modes
        self._kept_by_torch = False  # whether torch restores it there

    def switch_on(self) -> None:
        if not self._kept_by_torch and not self._on:
            super().switch_on()
            self._on = True

    def switch_off(self) -> None:
        if not self._on:
            return
        top = torch_ops.top_mode()
        if top is not self:
            raise CaptureError.mode_in_between(found=type(top).__name__)
        self._on = False
        super().switch_off()

    def passes_over(self, inputs: Sequence[Any], boundaries: Boundaries) -> bool:
        return self._on and self._breaker.passes_over(inputs, boundaries)

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._kept_by_torch
        self._on, self._kept_by_torch = False, True
        try:
            return self._call(func, args, kwargs)
        finally:
            self._on, self._kept_by_torch = True, before

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry, kernel = self._known.get(func) or self._look_up(func, args)
        if entry is not None:
            return self._breaker.on_splitting_op(entry, func, args, kwargs)
        if func is _SAFE_SOFTMAX and self._sdpa_breaks and not self._sees_composites:
            raise CaptureError.math_attention()
        self._breaker.on_op(func, args, kwargs)
        if kernel is None:
            return func(*args, **kwargs)
        self._kept_by_torch = False  # see the ops in the body of the kernel
        self.switch_on()
        try:
            return kernel(*args, **kwargs)
        finally:
            self.switch_off()  # a capture that was abandoned has done so
            self._kept_by_torch = True

    def _look_up(
        self, func: Any, args: tuple[Any, ...]
    ) -> tuple[SplittingOp | None, Callable[..., Any] | None]:
        """Return how an op is called; each op is looked up once."""
        op = torch_ops.functionalized_op(func, args)
        known = (
            self._boundaries.match_call(op or func),
            torch_ops.python_kernel(func, self._tensor_type),
        )
        if op is None:  # otherwise the next call may be of another op
            self._known[func] = known
        return known
