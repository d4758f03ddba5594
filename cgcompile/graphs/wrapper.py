""":class:`CUDAGraphWrapper`: one callable, one captured graph for each batch descriptor.

Wrap a module or function, set a forward context around the call, and the wrapper captures the first
call of each descriptor and replays the later ones. It stores no inputs: the caller writes into the
same buffers at every step, and a call with others is an error. The entry that ``torch.compile``
returns is built from these wrappers and does the copying; use one directly for a plain module.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import DispatchError, GuardError
from cgcompile.forward_context import BatchDescriptor, ForwardContext, callers_context
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import (
    capture,
    capture_allowed,
    capture_postponed,
    inside_capture,
    releasing,
)
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.entries import (
    Captured,
    CUDAGraphEntry,
    CUDAGraphOptions,
    KeptOutput,
    check_kinds,
    devices_of,
    gradients_due,
    holds_parameters_with_grad,
)
from cgcompile.graphs.guards import ArgumentGuard, WeightsGuard
from cgcompile.graphs.lent import Passed
from cgcompile.graphs.pool import LENT, GraphPool
from cgcompile.graphs.sequence import GraphSegment, GraphSequence
from cgcompile.graphs.timeline import Timeline
from cgcompile.graphs.transparent import Transparent
from cgcompile.reasons import EXPECTED, Counters, Reason, Why
from cgcompile.settings import checked_but

log = logging.getLogger(__name__)

_GRADIENTS = "an input, a parameter or an output requires grad, or has a tangent"


class CUDAGraphWrapper(Transparent):
    """A callable that is captured once per batch descriptor and replayed after.

    Without a forward context, with another runtime mode in it, or inside of any capture, a call
    runs ``runnable``. Attributes that the wrapper has not are those of ``runnable``; a copy or a
    pickle of a wrapper has no graphs.

    Args:
        runnable: what to capture; tensors in and out, nested in lists, tuples and dicts at will.
        config: ``strict`` and ``capture_device`` are read; environment and defaults if left out.
        runtime_mode: the mode that this wrapper serves: PIECEWISE or FULL.
        cudagraph_options: how to capture.
        pool: memory shared with other wrappers; one of its own, on first use, if left out.
        name: what messages call it; made from ``runnable`` if left out.
        guarded: compare arguments, and the weights of a module, at every replay, and ask whether
            parameters need gradients; False is for whoever does so for many wrappers at once.

    Attributes:
        runnable: what is wrapped.
        runtime_mode: the mode that it serves.
        counters: what its calls did.
        timeline: its own captures, and when they were.
        closed: capture nothing any more; may be set.

    Raises:
        DispatchError: ``runtime_mode`` is not PIECEWISE or FULL.
        ConfigError: an argument is of another kind than above.
    """

    @checked_but("runnable", "runtime_mode")
    def __init__(
        self,
        runnable: Callable[..., Any],
        config: CompilationConfig | None = None,
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        cudagraph_options: CUDAGraphOptions | None = None,
        *,
        pool: GraphPool | None = None,
        name: str | None = None,
        guarded: bool = True,
    ) -> None:
        if runtime_mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise DispatchError.bad_mode(str(getattr(runtime_mode, "name", runtime_mode)))
        check_kinds(type(self).__name__, runnable, config, cudagraph_options, pool)
        self.runnable = runnable
        self.config = CompilationConfig() if config is None else config
        self.runtime_mode = runtime_mode
        self.options = CUDAGraphOptions() if cudagraph_options is None else cudagraph_options
        self.counters, self.closed, self.timeline = Counters(), False, Timeline()
        self.name: str = name or getattr(runnable, "__name__", None) or type(runnable).__name__
        self._modes: tuple[CUDAGraphMode, ...] = (runtime_mode,)
        # Per mode and descriptor: one entry, or with on_input_change="recapture" several.
        self._entries: dict[tuple[CUDAGraphMode, BatchDescriptor], list[CUDAGraphEntry]] = {}
        self._grads: set[BatchDescriptor] = set()  # their outputs require grad, in grad mode
        self._lock = threading.RLock()
        self._poison = self.config.poison and pool is None  # what is shared may be in use
        self._pool, self._guarded = pool, guarded
        if pool is not None:
            pool.add_user(self)

    # -------------------------------------------------------------- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run, capture or replay, as the forward context says.

        Returns:
            What ``runnable`` returns. Of a capture or a replay, tensors are views of pool memory,
            valid until another graph of the pool runs; clone what must live longer. A capturing
            call is one execution: what it returns is computed. Nothing synchronises.

        Raises:
            DispatchError: the context asks for this mode and has no descriptor; or ``strict``.
            AddressChangedError: an input lies elsewhere than when it was captured.
            HostValueChangedError: an input has another value, layout or structure.
            CaptureError: a capture is due while another one runs.
            BaseException: what ``runnable`` raised, unchanged; no graph is kept then.
        """
        with self._lock:
            self.counters.calls += 1
        try:
            return self._dispatch(callers_context(), args, kwargs)
        except BaseException:
            with self._lock:
                self.counters.failures += 1
            raise

    def _dispatch(
        self, context: ForwardContext | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if context is None:
            return self._plain(Reason.NO_CONTEXT, "no forward context", args, kwargs)
        mode = context.cudagraph_runtime_mode
        if context.inputs_ready is not None:
            wait_for_inputs(context.inputs_ready, None if self._pool is None else self._pool.where)
        if mode not in self._modes:
            reason = Reason.MODE_NONE if mode is CUDAGraphMode.NONE else Reason.OTHER_MODE
            return self._plain(reason, f"the context says {mode.name}", args, kwargs)
        if inside_capture():
            return self._plain(Reason.INSIDE_CAPTURE, "inside of a capture", args, kwargs)
        descriptor = context.batch_descriptor
        if descriptor is None:
            raise DispatchError.no_descriptor(self.name, mode.name)
        with self._lock:
            entries = self._entries.get((mode, descriptor))
            if not entries:
                return self._first(mode, descriptor, args, kwargs)
            if gradients_due(entries[0].needs_grad, args, kwargs):
                return self._plain(Reason.GRADIENTS, _GRADIENTS, args, kwargs)
            try:
                entries[0].check(args, kwargs, self.name)
            except GuardError as error:
                return self._changed(error, mode, entries, args, kwargs)
            return self._replay(entries[0], args, kwargs)

    def _changed(
        self,
        error: GuardError,
        mode: CUDAGraphMode,
        entries: list[CUDAGraphEntry],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The input is not that of the entry that served last."""
        chosen = self.config.on_input_change
        if chosen == "eager":
            return self._plain(Reason.INPUT_CHANGED, str(error).splitlines()[0], args, kwargs)
        if chosen != "recapture":
            raise error
        for place, entry in enumerate(entries):
            if entry.serves(args, kwargs):
                entries.insert(0, entries.pop(place))
                return self._replay(entry, args, kwargs)
        most = self.config.max_captured_shapes
        if len(self.entries) >= most:
            detail = f"{most} steps are captured (max_captured_shapes); on_input_change"
            return self._plain(Reason.TOO_MANY_SHAPES, detail, args, kwargs)
        return self._first(mode, entries[0].batch_descriptor, args, kwargs)

    def _first(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self.closed or not capture_allowed():
            detail = f"no graph for {descriptor}, and capture is closed"
            return self._plain(Reason.CAPTURE_FORBIDDEN, detail, args, kwargs)
        if capture_postponed():
            return self._plain(Reason.WARMING, "a bulk capture comes", args, kwargs)
        devices = devices_of(self.runnable, args, kwargs)
        if len(devices) > 1:
            detail = f"tensors are on {', '.join(map(str, devices))}; a graph holds one device"
            return self._plain(Reason.OTHER_DEVICE, detail, args, kwargs)
        if self._pool is None:
            found = capture_device(devices[0], self.config.capture_device)
            if found is None:
                return self._plain(Reason.NO_DEVICE, f"tensors are on {devices[0]}", args, kwargs)
            self._pool = GraphPool(found)
            self._pool.add_user(self)
        if self.config.on_input_change == "copy":
            raise DispatchError.cannot_copy(self.name)
        if self._pool.lends(compat.tree_tensors((args, kwargs))):
            return self._plain(Reason.UNSUPPORTED_INPUT, LENT, args, kwargs)
        needs_grad = holds_parameters_with_grad(self.runnable) or descriptor in self._grads
        if not gradients_due(needs_grad, args, kwargs):
            with self.timeline.capture(self._pool, self.name, mode, descriptor) as outcome:
                captured = self.record(descriptor, args, kwargs)
                if captured is not None:
                    result = captured.run()
                    self.keep(captured.entry, mode)
                    self.counters.captures += 1
                    outcome.done(captured.entry.sequence)
                    return result
                outcome.why = _GRADIENTS
            self._grads.add(descriptor)
        return self._plain(Reason.GRADIENTS, _GRADIENTS, args, kwargs)

    def record(
        self,
        descriptor: BatchDescriptor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shown: str = "",
    ) -> "Captured | None":
        """Capture ``runnable`` for a descriptor (``shown`` as text), without executing anything.

        Returns:
            What has been captured, to be run once and then kept with :meth:`keep`; None if an
            output requires grad.

        Raises:
            CaptureBusyError: another capture runs.
            BaseException: what ``runnable`` raised, unchanged.
        """
        pool = self._pool
        assert pool is not None, "a wrapper captures into a pool"
        shown = shown or str(descriptor)
        with pool.device.around() if compat.holds_compiled_code(self.runnable) else nullcontext():
            graph, result = capture(
                partial(self.runnable, *args, **kwargs),
                pool,
                self._log_capture(shown),
                collect=not self.options.gc_disable,
            )
        sequence = GraphSequence((GraphSegment(self.name, graph),), name=self.name, batch=shown)
        return self._captured(descriptor, sequence, result, args, kwargs)

    def _log_capture(self, shown: str) -> str:
        """What is about to be captured, in words."""
        level = logging.INFO if self.options.debug_log_enable else logging.DEBUG
        log.log(level, "capturing %s (%s)", self.name, shown)
        return f"{self.name} ({shown})"

    def _captured(
        self,
        descriptor: BatchDescriptor,
        sequence: GraphSequence,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        executed: bool = False,
    ) -> Captured | None:
        assert self._pool is not None
        if gradients_due(False, (result,), {}):
            return None
        kept = KeptOutput.of(result, self._pool, self.options.weak_ref_output)
        weights = WeightsGuard(self.unwrap()) if self._guarded else None
        entry = CUDAGraphEntry(
            descriptor,
            sequence,
            kept.output,
            ArgumentGuard(args, kwargs, self._pool.device.tensor_type) if self._guarded else None,
            weights,
            self._guarded and holds_parameters_with_grad(self.runnable),
            None if weights is None else Passed.of(result, args, kwargs, weights.objects),
        )
        return Captured(self._pool, entry, result, kept.starts, executed)

    def keep(self, entry: CUDAGraphEntry, mode: CUDAGraphMode | None = None) -> None:
        """Let later calls of the entry's descriptor replay it, in the wrapper's mode or another."""
        key = (mode or self.runtime_mode, entry.batch_descriptor)
        with self._lock:
            self._entries.setdefault(key, []).insert(0, entry)

    def _replay(self, entry: CUDAGraphEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._pool is not None
        self._pool.follow_stream()
        if self._poison:
            self._pool.poison(compat.tree_tensors((args, kwargs)))
        entry.sequence.replay()
        self.counters.replays += 1
        entry.tally.replays += 1
        return entry.result(args, kwargs)

    def _plain(
        self, reason: Reason, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.config.strict and reason not in EXPECTED:
            raise DispatchError.strict(self.name, reason.value, detail)
        result = self.runnable(*args, **kwargs)
        with self._lock:
            self.counters.plain[reason] += 1
            self.counters.details[reason] = detail
        self.timeline.plain(Why(reason, detail))
        return result

    # -------------------------------------------------------------- what a user may ask

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, CUDAGraphEntry]:
        """What is captured, by descriptor; read-only.

        Of a wrapper that serves two modes, PIECEWISE hides FULL; with ``on_input_change`` set to
        ``"recapture"`` this is the entry that served last.
        """
        found: dict[BatchDescriptor, CUDAGraphEntry] = {}
        for mode in reversed(self._modes):
            for (served, descriptor), entries in [*self._entries.items()]:
                if served is mode and entries:
                    found[descriptor] = entries[0]
        return MappingProxyType(found)

    @property
    def entries(self) -> tuple[CUDAGraphEntry, ...]:
        """All that is captured, of whatever mode and descriptor; others may capture meanwhile."""
        return tuple([entry for entries in [*self._entries.values()] for entry in entries])

    def entry_of(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> CUDAGraphEntry | None:
        """What serves a batch in a runtime mode; None if nothing does."""
        return next(iter(self.entries_of(mode, batch)), None)

    def entries_of(self, mode: CUDAGraphMode, batch: BatchDescriptor) -> list[CUDAGraphEntry]:
        """All that is captured of a batch in a runtime mode, what served last first."""
        return [*self._entries.get((mode, batch), ())]

    @property
    def pool(self) -> GraphPool | None:
        """The memory of the graphs; None before the first capture, if none was given."""
        return self._pool

    def lent(self) -> Iterator[torch.Tensor]:
        """The tensors that replays return and that do not hold their memory."""
        if self._pool is not None and self.options.weak_ref_output:
            outputs = compat.tree_tensors([entry.output for entry in self.entries])
            yield from [each for each in outputs if self._pool.holds(address(each))]

    def unwrap(self) -> Callable[..., Any]:
        """The innermost callable, through wrappers in wrappers."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, CUDAGraphWrapper) else inner

    def clear_graphs(self) -> None:
        """Drop the graphs of this wrapper. The next call of a descriptor captures again."""
        with self._lock:
            self._entries.clear()
            if self._pool is not None:
                self._pool.generation += 1

    def drop(self, entry: CUDAGraphEntry) -> None:
        """Drop one capture, if it was kept: its step was not finished."""
        with self._lock, suppress(ValueError):
            self._entries.get((self.runtime_mode, entry.batch_descriptor), []).remove(entry)

    def clear_all_graphs(self) -> None:
        """Drop the graphs of all wrappers that share this one's pool, and the pool's memory.

        Raises:
            CaptureError: called inside of a capture.
        """
        if self._pool is None:
            return self.clear_graphs()
        with releasing():  # raises before anything is dropped
            self.clear_graphs()
            self._pool.release()

    def __getstate__(self) -> dict[str, Any]:
        names = ("runnable", "config", "_modes", "options", "name")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        modes = state["_modes"]
        mode: Any = modes[0] if len(modes) == 1 else None  # a breakable one may serve both
        type(self).__init__(
            self, state["runnable"], state["config"], mode, state["options"], name=state["name"]
        )

    def __repr__(self) -> str:
        modes = " or ".join(mode.name for mode in self._modes)
        return f"{type(self).__name__}({self.name}, {modes}, {len(self.entries)} captured)"
