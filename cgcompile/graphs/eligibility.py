"""Whether a step may have a graph: functions ``check_...``, with the texts for users.

Each raises :class:`~cgcompile.reasons.RunPlain` where a step runs without one. The rule: what has
no graph here is decided in this file for all front ends. :class:`allow_capture` closes capture for
a block of code; :func:`eager_region` is code that runs outside of graphs.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

from torch.compiler import is_dynamo_compiling

from cgcompile.boundaries import REGION_MARK
from cgcompile.config import CUDAGraphMode
from cgcompile.context import (
    BatchDescriptor,
    EagerRegion,
    ForwardContext,
    eager_region_is_open,
)
from cgcompile.errors import CaptureError, DispatchError
from cgcompile.graphs.capture import (
    capture_postponed,
    captured_elsewhere,
    holder_here,
    inside_capture,
)
from cgcompile.graphs.device import any_capture
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.settings import require_kind
from cgcompile.torch_compat import torch_ops

_allowed: ContextVar[bool] = ContextVar("cgcompile_capture_allowed", default=True)


class allow_capture:
    """Context manager: whether unknown shapes may be captured in this thread or task; re-entrant.

    A server that has captured what it wants closes capture: ``with allow_capture(False):`` around
    its loop. Other shapes then run without a graph, counted; with ``strict=True`` it raises.

    Args:
        allowed: whether captures may begin.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> x = torch.randn(4, 8)
        >>> with torch.inference_mode(), cgcompile.graphs.allow_capture(False):
        ...     y = model(x), model(x)
        >>> model.backend.counters.captures
        0
    """

    __slots__ = ("_allowed", "_tokens")

    def __init__(self, allowed: bool) -> None:
        require_kind("allowed", "allow_capture", allowed, bool)
        self._allowed = allowed
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_allowed.set(self._allowed))

    def __exit__(self, *error: object) -> None:
        _allowed.reset(self._tokens.pop())


def capture_allowed() -> bool:
    """Return whether a capture may begin here."""
    return _allowed.get()


IN_REGION = Fallback(Reason.EAGER_REGION, "called inside of cgcompile.eager_region()")
INSIDE_CAPTURE = Fallback(Reason.INSIDE_CAPTURE, "called inside of a capture")
GRADIENTS = Fallback(
    Reason.GRADIENTS, "an input, a weight or a result requires grad, or has a tangent"
)


def check_here(gradients: bool = False) -> None:
    """Raise RunPlain where no graph may run at this point of the program, whatever its context."""
    if eager_region_is_open():
        raise RunPlain(IN_REGION)
    if gradients:
        raise RunPlain(GRADIENTS)
    if inside_capture():
        raise RunPlain(INSIDE_CAPTURE)


def check_context(
    context: ForwardContext | None, modes: Collection[CUDAGraphMode], what: str
) -> None:
    """Raise RunPlain where no graph of ``modes`` may run in a caller's forward context."""
    if context is None:
        no_context = Fallback(Reason.NO_CONTEXT, "no forward context")
        raise RunPlain(IN_REGION if eager_region_is_open() else no_context)
    mode = context.cudagraph_runtime_mode
    if mode is CUDAGraphMode.NONE:
        lacks = "a batch_descriptor, and no cudagraph_runtime_mode"
        detail = lacks if context.lacks_mode else "runtime mode NONE"
        raise RunPlain(Fallback(Reason.MODE_NONE, f"the forward context has {detail}"))
    if mode not in modes:
        names = " and ".join(sorted({served.name for served in modes} - {"NONE"}))
        detail = f"the forward context has mode {mode.name}; graphs are for {names}"
        raise RunPlain(Fallback(Reason.OTHER_MODE, detail))
    if inside_capture():
        raise RunPlain(INSIDE_CAPTURE)
    if context.batch_descriptor is None:
        raise DispatchError.no_descriptor(what=what, mode=mode.name)


def check_open(closed: bool, descriptor: BatchDescriptor) -> None:
    """Raise RunPlain where captures have ended, or are not allowed here."""
    if closed or not capture_allowed():
        detail = f"no graph for {descriptor}, and capture is closed"
        raise RunPlain(Fallback(Reason.CAPTURE_FORBIDDEN, detail))


def check_not_busy() -> None:
    """Raise RunPlain where a capture has to wait: for a bulk capture, or for another thread."""
    if capture_postponed():
        raise RunPlain(Fallback(Reason.WARMING, "a bulk capture runs all batches plain first"))
    if captured_elsewhere():
        raise RunPlain(Fallback(Reason.CAPTURE_BUSY, "another thread is capturing"))


def eager_region() -> AbstractContextManager[Any]:
    """Context manager for model code: run what is inside eager, as one boundary.

    In traced code it marks the nodes of the graph. Elsewhere compiled models, wrappers and managers
    that are called inside run without graphs, uncompiled where they can, in this thread or task.

    Where Dynamo breaks the graph inside, it gives up the frame and the region is entered in Python.

    Raises:
        CaptureError: cgcompile captures this code itself, not a trace of it.

    Example:
        >>> def model(x):
        ...     x = x + 1
        ...     with cgcompile.eager_region():
        ...         x = x.sin()
        ...     return x * 2
        >>> split = cgcompile.explain(model, torch.randn(4))
        >>> [piece.captured for piece in split.pieces]
        [True, False, True]
    """
    if is_dynamo_compiling():
        return torch_ops.annotate(REGION_MARK)
    if holder_here() is not None and any_capture():
        raise CaptureError.region_inside()
    return EagerRegion()
