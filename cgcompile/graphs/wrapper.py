""":class:`CUDAGraphWrapper`: one callable, one captured graph for each batch descriptor.

Wrap a module or function, set a forward context around the call, and the wrapper captures the first
call of each descriptor and replays the later ones. It stores no inputs: the caller writes into the
same buffers at every step, and a call with others is an error. The entry that ``torch.compile``
returns is built from these wrappers and does the copying; use one directly for a module that is not
compiled.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import DispatchError, missing_attribute
from cgcompile.forward_context import BatchDescriptor, ForwardContext, callers_context
from cgcompile.graphs.capture import capture, capture_allowed, inside_capture
from cgcompile.graphs.device import DeviceGraph, capture_device
from cgcompile.graphs.guards import ArgumentGuard
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSegment, GraphSequence
from cgcompile.reasons import EXPECTED, Counters, Reason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CUDAGraphOptions:
    """How a wrapper captures.

    Attributes:
        debug_log_enable: log each capture (level INFO; DEBUG where False).
        gc_disable: do not collect garbage before a capture. Collecting costs 30 ms and more, and
            gives the memory of dead tensors back; whoever captures many graphs does it once.
            Automatic collection is off inside of every capture, whatever is set here.
        weak_ref_output: let the outputs of a capture go when the caller drops them, so that later
            captures of the pool use their memory. False keeps the memory of each descriptor's
            outputs for itself, so that they outlive the replays of other descriptors.
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True


@dataclass(frozen=True, eq=False)
class CUDAGraphEntry:
    """What one descriptor captured.

    Attributes:
        batch_descriptor: the key.
        sequence: what was recorded; ``sequence.replay()`` runs it.
        output: what every replay returns: tensors in pool memory, valid until another graph of the
            pool runs; and memory from outside of the pool, held here.
        guard: what the arguments must be.
        needs_grad: whether gradients would be due if grad mode were on.
    """

    batch_descriptor: BatchDescriptor
    sequence: GraphSequence
    output: Any
    guard: ArgumentGuard
    needs_grad: bool

    @property
    def graph(self) -> DeviceGraph:
        """The recording of a step that is one graph."""
        (segment,) = self.sequence.segments
        assert isinstance(segment, GraphSegment)
        return segment.graph


class CUDAGraphWrapper:
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

    Attributes:
        runnable: what is wrapped.
        runtime_mode: the mode that it serves.
        counters: what its calls did.

    Raises:
        DispatchError: ``runtime_mode`` is not PIECEWISE or FULL.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        config: CompilationConfig | None = None,
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        cudagraph_options: CUDAGraphOptions | None = None,
        *,
        pool: GraphPool | None = None,
        name: str | None = None,
    ) -> None:
        if runtime_mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise DispatchError.bad_mode(str(getattr(runtime_mode, "name", runtime_mode)))
        self.runnable = runnable
        self.config = CompilationConfig() if config is None else config
        self.runtime_mode = runtime_mode
        self.options = CUDAGraphOptions() if cudagraph_options is None else cudagraph_options
        self.counters = Counters()
        self.name: str = name or getattr(runnable, "__name__", None) or type(runnable).__name__
        self._entries: dict[BatchDescriptor, CUDAGraphEntry] = {}
        self._grads: set[BatchDescriptor] = set()  # their outputs require grad, in grad mode
        self._lock = threading.RLock()
        self._pool = pool
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
        if mode is not self.runtime_mode:
            none = mode is CUDAGraphMode.NONE
            reason = Reason.MODE_NONE if none else Reason.OTHER_MODE
            return self._plain(reason, f"the context says {mode.name}", args, kwargs)
        if inside_capture():
            return self._plain(Reason.INSIDE_CAPTURE, "inside of a capture", args, kwargs)
        descriptor = context.batch_descriptor
        if descriptor is None:
            raise DispatchError.no_descriptor(self.name, mode.name)
        with self._lock:
            entry = self._entries.get(descriptor)
            if entry is None:
                return self._first(descriptor, args, kwargs)
            if _gradients_due(entry.needs_grad, args, kwargs):
                return self._plain(Reason.GRADIENTS, _GRADIENTS, args, kwargs)
            return self._replay(entry, args, kwargs)

    def _first(
        self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not capture_allowed():
            detail = f"no graph for {descriptor}, and allow_capture(False) is set"
            return self._plain(Reason.CAPTURE_FORBIDDEN, detail, args, kwargs)
        devices = self._tensor_devices(args, kwargs)
        if len(devices) > 1:
            detail = f"tensors are on {', '.join(map(str, devices))}; a graph holds one device"
            return self._plain(Reason.OTHER_DEVICE, detail, args, kwargs)
        if self._pool is None:
            found = capture_device(devices[0], self.config.capture_device)
            if found is None:
                return self._plain(Reason.NO_DEVICE, f"tensors are on {devices[0]}", args, kwargs)
            self._pool = GraphPool(found)
            self._pool.add_user(self)
        needs_grad = _holds_parameters_with_grad(self.runnable) or descriptor in self._grads
        if not _gradients_due(needs_grad, args, kwargs):
            captured = self.record(descriptor, args, kwargs)
            if captured is not None:
                result = captured.run()
                self.keep(captured.entry)
                self.counters.captures += 1
                return result
            self._grads.add(descriptor)
        return self._plain(Reason.GRADIENTS, _GRADIENTS, args, kwargs)

    def record(
        self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "Captured | None":
        """Capture ``runnable`` for a descriptor, without executing anything.

        Returns:
            What has been captured, to be run once and then kept with :meth:`keep`; None if an
            output requires grad.

        Raises:
            CaptureBusyError: another capture runs.
            BaseException: what ``runnable`` raised, unchanged.
        """
        pool = self._pool
        assert pool is not None, "a wrapper captures into a pool"
        what = f"{self.name} ({self.runtime_mode.name}, {descriptor})"
        level = logging.INFO if self.options.debug_log_enable else logging.DEBUG
        log.log(level, "capturing %s", what)
        graph, result = capture(
            lambda: self.runnable(*args, **kwargs),
            pool,
            what,
            collect=not self.options.gc_disable,
        )
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in _tensors(result)):
            graph.reset()
            return None
        output = compat.tree_map(self._kept, result)
        entry = CUDAGraphEntry(
            descriptor,
            GraphSequence((GraphSegment(self.name, graph, output),)),
            output,
            ArgumentGuard(args, kwargs, pool.device.tensor_type),
            _holds_parameters_with_grad(self.runnable),
        )
        return Captured(self, entry, result)

    def keep(self, entry: CUDAGraphEntry) -> None:
        """Let later calls of the entry's descriptor replay it."""
        with self._lock:
            self._entries[entry.batch_descriptor] = entry

    def _kept(self, leaf: Any) -> Any:
        """How an entry keeps an output: weakly where the pool owns the memory, if so asked."""
        assert self._pool is not None
        if not isinstance(leaf, torch.Tensor) or not leaf.untyped_storage().nbytes():
            return leaf
        if not self._pool.owns(leaf):
            return leaf
        return compat.weak_tensor(leaf) if self.options.weak_ref_output else compat.alias(leaf)

    def _replay(self, entry: CUDAGraphEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry.guard.check(args, kwargs, self.name, entry.batch_descriptor)
        assert self._pool is not None
        self._pool.follow_stream()
        entry.sequence.replay()
        self.counters.replays += 1
        return entry.output

    def _plain(
        self, reason: Reason, detail: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.config.strict and reason not in EXPECTED:
            raise DispatchError.strict(self.name, reason.value, detail)
        result = self.runnable(*args, **kwargs)
        with self._lock:
            self.counters.plain[reason] += 1
            self.counters.details[reason] = detail
        return result

    def _tensor_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.device]:
        """Where the tensors of the call and of the module are; the CPU only if all are there."""
        found = _tensors((args, kwargs))
        if isinstance(self.runnable, torch.nn.Module):
            found += [*self.runnable.parameters(), *self.runnable.buffers()]
        devices = dict.fromkeys(tensor.device for tensor in found)
        return [each for each in devices if each.type != "cpu"] or [torch.device("cpu")]

    # -------------------------------------------------------------- what a user may ask

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, CUDAGraphEntry]:
        """What is captured, by descriptor; read-only."""
        return MappingProxyType(self._entries)

    @property
    def pool(self) -> GraphPool | None:
        """The memory of the graphs; None before the first capture, if none was given."""
        return self._pool

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

    def drop(self, descriptor: BatchDescriptor) -> None:
        """Drop the graph of one descriptor, if there is one: its step was not finished."""
        with self._lock:
            self._entries.pop(descriptor, None)

    def clear_all_graphs(self) -> None:
        """Drop the graphs of all wrappers that share this one's pool, and the pool's memory."""
        self.clear_graphs()
        if self._pool is not None:
            self._pool.release()

    def __getattr__(self, name: str) -> Any:
        # Through __dict__, because a copy has no runnable for a moment. How to copy and pickle a
        # module is its own affair.
        if "runnable" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            kind = type(self.__dict__.get("runnable")).__name__
            raise AttributeError(missing_attribute(type(self).__name__, kind, name))
        runnable = self.__dict__["runnable"]
        try:
            return getattr(runnable, name)
        except AttributeError:
            kind = type(runnable).__name__
            text = missing_attribute(type(self).__name__, kind, name)
            raise AttributeError(text) from None

    def __getstate__(self) -> dict[str, Any]:
        names = ("runnable", "config", "runtime_mode", "options", "name")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CUDAGraphWrapper.__init__(
            self,
            state["runnable"],
            state["config"],
            state["runtime_mode"],
            state["options"],
            name=state["name"],
        )

    def __repr__(self) -> str:
        return (
            f"CUDAGraphWrapper({self.name}, {self.runtime_mode.name}, "
            f"{len(self._entries)} captured)"
        )


@dataclass(frozen=True, eq=False)
class Captured:
    """A capture that has just been made; nothing has been executed yet.

    Attributes:
        wrapper: whose it is.
        entry: what later calls replay.
        result: what the captured call returned: tensors that hold nothing yet.
    """

    wrapper: CUDAGraphWrapper
    entry: CUDAGraphEntry
    result: Any

    def run(self) -> Any:
        """Execute what was captured, on the current stream.

        Returns:
            The result, computed: tensors that keep their memory while they live.
        """
        pool = self.wrapper.pool
        assert pool is not None
        pool.follow_stream()
        self.entry.sequence.replay()
        return self.result


_GRADIENTS = "grad mode is on, and an input, a parameter or an output requires grad"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in compat.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _gradients_due(needed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return needed or any(leaf.requires_grad for leaf in _tensors((args, kwargs)))


def _holds_parameters_with_grad(runnable: Any) -> bool:
    while isinstance(runnable, CUDAGraphWrapper):
        runnable = runnable.runnable
    module = getattr(runnable, "__self__", runnable)  # of a bound method such as module.forward
    if not isinstance(module, torch.nn.Module):
        return False
    return any(each.requires_grad for each in module.parameters())
