"""Find splitting ops while they run: :class:`BreakMode`, a dispatch mode around each segment.

Without it an attention op that nobody decorated would be captured, and its metadata with it. It
sees the ops of the thread that captures, those in the Python kernels of other ops and those that a
compiled model calls included.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.boundaries import Boundaries, SplittingOp
from cgcompile.errors import CaptureError

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default  # what the math kernel of it calls


class Breaker:
    """What is told of splitting ops and of decorated functions."""

    @property
    def is_recording(self) -> bool:
        """Whether it is outside of any break."""
        raise NotImplementedError

    def meet(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A splitting op is called: run it, in a break or not, and return its result."""
        raise NotImplementedError

    def pass_by(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Another op is about to be called."""

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """A function is called that breaks: run it and return its result."""
        raise NotImplementedError


class BreakMode(compat.DispatchMode):
    """Sees each op of the segments of one capture.

    Args:
        breaker: what is told.
        boundaries: which ops are splitting ops.
        tensor_type: the device type of the tensors that are captured.
        sees_composites: whether an op such as SDPA arrives whole, whichever kernel it takes.
    """

    def __init__(
        self, breaker: Breaker, boundaries: Boundaries, tensor_type: str, sees_composites: bool
    ) -> None:
        super().__init__()
        self._breaker = breaker
        self._boundaries = boundaries
        self._tensor_type = tensor_type
        self._sees_composites = sees_composites
        self._known: dict[Any, _Known] = {}
        self._sdpa_breaks = boundaries.match_call(_SDPA) is not None
        self._on = False  # whether it is on torch's stack of modes
        self._kept_by_torch = False  # whether torch puts it there again by itself

    def switch_on(self) -> None:
        if not self._kept_by_torch and not self._on:
            super().switch_on()
            self._on = True

    def switch_off(self) -> None:
        if not self._on:
            return
        top = compat.top_mode()
        if top is not self:
            raise CaptureError.mode_in_between(found=type(top).__name__)
        self._on = False
        super().switch_off()

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self._kept_by_torch
        self._on, self._kept_by_torch = False, True
        try:
            return self._call(func, args, kwargs)
        finally:
            self._on, self._kept_by_torch = True, before

    def _inside(self, call: Callable[[], Any]) -> Any:
        """Run something within an op of its own, and see the ops of it."""
        self._kept_by_torch = False
        self.switch_on()
        try:
            return call()
        finally:
            self.switch_off()  # a capture that was abandoned has done so
            self._kept_by_torch = True

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._known.get(func) or self._look_up(func, args)
        if known.entry is not None:
            return self._breaker.meet(known.entry, func, args, kwargs)
        if func is _SAFE_SOFTMAX and self._sdpa_breaks and not self._sees_composites:
            raise CaptureError.math_attention()
        self._breaker.pass_by(func, args, kwargs)
        kernel = known.kernel
        if kernel is None:
            return func(*args, **kwargs)
        return self._inside(lambda: kernel(*args, **kwargs))  # the ops in its body count

    def _look_up(self, func: Any, args: tuple[Any, ...]) -> "_Known":
        """What is to be known of an op; asked once, as a segment calls dozens."""
        op = compat.functionalized_op(func, args)
        kernel = compat.python_kernel(func, self._tensor_type)
        found = _Known(self._boundaries.match_call(op or func), kernel)
        if op is None:  # else the next call is made for another one
            self._known[func] = found
        return found


class _Known(NamedTuple):
    """What a capture knows of an op.

    Attributes:
        entry: what it is registered as; None for one that is captured.
        kernel: what runs for it, if that is written in Python.
    """

    entry: SplittingOp | None
    kernel: Callable[..., Any] | None


class Makers(compat.DispatchMode):
    """Notes the memory that ops make, to find what a break leaves behind. For debugging."""

    def __init__(self, tensor_type: str) -> None:
        super().__init__()
        self._tensor_type = tensor_type
        self._lives: dict[int, compat.StorageLife] = {}

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = compat.python_kernel(func, self._tensor_type)
        if kernel is not None:
            with self:
                made = kernel(*args, **kwargs)
        else:
            made = func(*args, **kwargs)
        given = {_address(leaf) for leaf in compat.tree_tensors((args, kwargs))}
        for leaf in compat.tree_tensors(made):
            if _address(leaf) not in given | {0}:
                self._lives[_address(leaf)] = compat.StorageLife(leaf)
        return made

    @property
    def alive(self) -> dict[int, compat.StorageLife]:
        """Where memory begins that was made here and still lives."""
        return {address: life for address, life in self._lives.items() if not life.ended}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
