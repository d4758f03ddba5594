"""CUDA graphs with eager breaks, recorded from plain Python; no tracing.

For models that Dynamo cannot trace, and for those that are compiled as a whole. While the model
runs once, everything goes into graphs, except for splitting ops and functions under
:func:`eager_break_during_capture`, which run at every replay. :class:`BreakableCUDAGraphWrapper`
is what most users want; :class:`BreakableCUDAGraphCapture` is the raw form.

The rule: Python does not run again. What an eager break was given at capture it is given for ever;
what varies from step to step it must read from the forward context.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from cgcompile import compat
from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import CaptureError, GradientError
from cgcompile.forward_context import BatchDescriptor, in_full_mode
from cgcompile.graphs.breaks import Breaker
from cgcompile.graphs.capture import inside_capture, who_captures_elsewhere, who_captures_here
from cgcompile.graphs.device import chosen_device
from cgcompile.graphs.entries import Captured, CUDAGraphOptions
from cgcompile.graphs.fields import Rebinding
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.segments import SegmentRecorder
from cgcompile.graphs.sequence import GraphSequence, Segment
from cgcompile.graphs.storages import SameStorages
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.settings import checked_but, require_callable

F_ = TypeVar("F_", bound=Callable[..., Any])


def eager_break_during_capture(function: F_) -> F_:
    """Decorator: inside of a breakable capture, the function runs eager, then and at every replay.

    Outside of one it is called as it is; so it is inside of another break, in code that
    torch.compile traces, and where the forward context asks for mode FULL: then it is captured.
    Put it outermost, so that what other decorators do around the function happens at every replay.

    Tensors that the function returns are copied into buffers of the capture, so that the graph
    after it finds them; what it writes in place costs no copy. It must not keep tensors that it
    makes anywhere else for captured code to read.

    Raises:
        ConfigError: what is decorated cannot be called.
        CaptureError: called from another thread than the capturing one, with its memory.
    """
    require_callable("function", "eager_break_during_capture", function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        recorder = who_captures_here()
        if not isinstance(recorder, Breaker):
            _refuse_other_thread(name, args, kwargs)
            return function(*args, **kwargs)
        if in_full_mode() or not recorder.is_recording:
            return function(*args, **kwargs)
        return recorder.run_eager(name, function, args, kwargs)

    name: str = getattr(function, "__qualname__", type(function).__name__)
    return run  # type: ignore[return-value]


def _refuse_other_thread(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recorder = who_captures_elsewhere()
    if not isinstance(recorder, SegmentRecorder):
        return
    leaves = compat.tree_leaves((args, kwargs))
    # The backward pass of CUDA runs in a thread of autograd, on the stream of the forward pass.
    if compat.inside_backward() and recorder.pool.device.is_capturing():
        error = CaptureError.break_in_backward(name=name)
        recorder.fail(name, error)
        raise error
    if any(isinstance(leaf, torch.Tensor) and recorder.pool.owns(leaf) for leaf in leaves):
        error = CaptureError.other_thread(name=name, what=recorder.name)
        recorder.fail(name, error)
        raise error


class BreakableCUDAGraphCapture:
    """Context manager that records what runs inside, with eager breaks; the raw form.

    Graph segments are not executed while they are recorded, so their results hold nothing before
    the first :meth:`replay`; eager breaks do run, on the capture stream::

        capture = BreakableCUDAGraphCapture()
        with capture:
            out = model(x)
        x.copy_(new)
        capture.replay()  # ``out`` is computed, where it was

    Args:
        pool: memory shared with other captures that never run at the same time; one of its own if
            left out.
        device: where the tensors are, if no pool is given; ``"cpu"`` means the host recorder. Left
            out: CUDA, or without a GPU the CPU where ``CGCOMPILE_CAPTURE_DEVICE=host``.
        boundaries: which ops break by themselves; the built-in attention ops if left out.
        debug: find tensors that a break makes and leaves for captured ops to read. Slow.
        name: for messages.

    Raises:
        CaptureError: ``device`` has no graphs.
        ConfigError: an argument is of another kind than above.
    """

    @checked_but("device")
    def __init__(
        self,
        pool: GraphPool | None = None,
        *,
        device: torch.device | str | None = None,
        boundaries: Boundaries | None = None,
        debug: bool = False,
        name: str = "step",
    ) -> None:
        if pool is None:
            pool = GraphPool(chosen_device(device, "BreakableCUDAGraphCapture"))
        self._pool = pool
        self._boundaries = Boundaries() if boundaries is None else boundaries
        self._debug = debug
        self._name = name
        self._recorder: SegmentRecorder | None = None
        self._sequence: GraphSequence | None = None

    @staticmethod
    def current() -> "BreakableCUDAGraphCapture | None":
        """The capture that this thread is in, or None; a wrapper's own is not told."""
        recorder = who_captures_here()
        return recorder.capture if isinstance(recorder, _Raw) else None

    @staticmethod
    def is_active() -> bool:
        """Whether this thread is in a breakable capture, a wrapper's own included."""
        return isinstance(who_captures_here(), SegmentRecorder)

    def __enter__(self) -> "BreakableCUDAGraphCapture":
        """Begin.

        Raises:
            CaptureError: it holds a recording already, or the stream is being captured.
            CaptureBusyError: another capture runs, in this thread or another one.
        """
        if self._sequence is not None or self._recorder is not None:
            advice = "Make a new BreakableCUDAGraphCapture for each recording."
            raise CaptureError.twice(what="BreakableCUDAGraphCapture", advice=advice)
        recorder = _Raw(self._pool, self._name, self._boundaries, execute=False, debug=self._debug)
        recorder.capture = self
        recorder.start()
        self._recorder = recorder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        if error is not None:
            recorder.abandon()
            return
        self._sequence = recorder.finish()

    def add_eager(self, function: Callable[[], Any]) -> Any:
        """End the segment, run a function without arguments, and begin the next segment.

        Returns:
            What it returned; fresh tensors are replaced by buffers that each replay fills.

        Raises:
            ConfigError: it cannot be called; the capture goes on.
            CaptureError: no capture is running, or it is in a break already.
            BaseException: what the function raised; the capture is lost then.
        """
        require_callable("function", "add_eager()", function)
        if self._recorder is None or not self._recorder.is_recording:
            raise CaptureError.no_segment(what="add_eager()")
        name: str = getattr(function, "__qualname__", type(function).__name__)
        return self._recorder.run_eager(name, function)

    @property
    def sequence(self) -> GraphSequence | None:
        """What was recorded; None before the end, and after a failure."""
        return self._sequence

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Graph and eager segments in turn, beginning and ending with a graph."""
        return () if self._sequence is None else self._sequence.segments

    @property
    def num_graphs(self) -> int:
        """How many graphs there are: one more than breaks."""
        return 0 if self._sequence is None else self._sequence.num_graphs

    @property
    def num_eager_breaks(self) -> int:
        """How many functions run between graphs."""
        return 0 if self._sequence is None else self._sequence.num_eager_breaks

    def replay(self) -> None:
        """Run what was recorded on the current stream. Results lie where they lay at capture.

        Raises:
            CaptureError: nothing is recorded, or a capture runs in this thread.
            HostValueChangedError: a break returned something of another layout or structure.
        """
        if self._sequence is None:
            raise CaptureError.empty()
        if inside_capture():
            raise CaptureError.nested(what="replay()")
        self._pool.follow_stream()
        self._sequence.replay()


class _Raw(SegmentRecorder):
    """The recorder of a raw capture."""

    capture: BreakableCUDAGraphCapture


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """A :class:`CUDAGraphWrapper` whose graphs may have eager breaks.

    It works on a plain ``nn.Module`` and on one that ``torch.compile`` compiled as a whole (warm
    that up first: code must not be compiled inside of a capture). In mode PIECEWISE splitting ops
    and decorated functions break; in mode FULL all of it is one graph, and a splitting op that
    does not support the batch is an error. A capturing call is one execution of the step; eager
    breaks run on the caller's stream. What the runnable takes is compared as by
    :class:`CUDAGraphWrapper`; fields that eager breaks rebind are no matter.

    Args:
        runnable: what to capture.
        config: as of :class:`CUDAGraphWrapper`; ``splitting_ops`` and ``builtin_splitting_ops``
            say which ops break.
        runtime_mode: PIECEWISE or FULL; None serves both.
        cudagraph_options: how to capture.
        pool: memory shared with other wrappers.
        name: what messages call it.

    Attributes:
        boundaries: which ops break.
        before_capture: called right before each capture that begins; may be set.

    Raises:
        DispatchError: ``runtime_mode`` is not PIECEWISE, FULL or None.
        ConfigError: an argument is of another kind than above.
    """

    @checked_but("runnable", "runtime_mode")
    def __init__(
        self,
        runnable: Callable[..., Any],
        config: CompilationConfig | None = None,
        runtime_mode: CUDAGraphMode | None = None,
        cudagraph_options: CUDAGraphOptions | None = None,
        *,
        pool: GraphPool | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            runnable,
            config,
            CUDAGraphMode.PIECEWISE if runtime_mode is None else runtime_mode,
            cudagraph_options,
            pool=pool,
            name=name,
        )
        if runtime_mode is None:
            self._modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
        ops, builtin = self.config.splitting_ops, self.config.builtin_splitting_ops
        self.boundaries = Boundaries(ops, builtin=builtin)
        self.before_capture: Callable[[], None] | None = None

    @property
    def sees_composites(self) -> bool:
        """Whether a capture here lets ops skip autograd, so that composite ones arrive whole."""
        if torch.is_inference_mode_enabled():
            return False  # they do so anyway
        return not compat.holds_compiled_code(self.runnable)  # it would compile again

    def record(
        self,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: str = "",
        storages: SameStorages | None = None,
        wait: bool = True,
    ) -> Captured:
        """Capture ``runnable`` for a descriptor; it has been executed then.

        Raises:
            GradientError: a result requires grad.
            CaptureError: a splitting op ran that a FULL graph must not hold, or none ran although
                some were declared; a segment replaced the memory of a reachable tensor; or
                a field was rebound, and is as it was before.
            BaseException: what ``runnable`` raised, unchanged, with a note of how far it came.
        """
        assert self._pool is not None
        shown = shown or str(descriptor)
        rebinding = Rebinding(self.unwrap(), args, kwargs)
        recorder = SegmentRecorder(
            self._pool,
            self._log_capture(shown),
            self.boundaries,
            execute=True,
            sees_composites=self.sees_composites,
            debug=self.options.debug_breaks,
            batch=shown,
            rebinding=rebinding,
            storages=storages or self._storages(args, kwargs, rebinding),
            compiled=self._may_run_compiled_code,
        )
        recorder.start(wait=wait, before=self.before_capture)
        try:
            result = self.runnable(*args, **kwargs)
            rebinding.end_segment()
            refused = rebinding.error(self.name)
            if refused is not None and not recorder.has_run:
                raise refused
        except BaseException as error:
            compat.add_note(error, f"{self.name}: in a breakable capture, {recorder.reached}")
            recorder.abandon()
            if not recorder.has_run:  # else tensors may be computed
                rebinding.put_back(tensors_alone=getattr(error, "field", "") == "")
            raise
        sequence = recorder.finish()
        if refused is not None:
            rebinding.move_out(self._pool.holds)
        sequence.name, sequence.batch = self.name, shown
        captured = self._captured(descriptor, sequence, result, args, kwargs, executed=True)
        if captured is None:
            raise GradientError.of_a_capture(what=self.name)
        return replace(captured, refused=refused)
