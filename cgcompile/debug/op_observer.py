"""Observe one call of a model, op by op: :class:`Watch`, the recorder's rules in a collecting mode.

A capture on the CPU recorder raises at the first op that a graph cannot hold. Here each such op is
noted, and runs (:class:`~cgcompile.graphs.host_rules.OpRules`), on any device. What no op shows
comes from a function mode (``print``, ``torch.tensor``, ``torch.func``) and a profile function
(:class:`PythonCalls`: ``torch.cuda.synchronize``, reads of the forward context, streams). Ops
inside a boundary run eager, and are not judged.
"""

import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgcompile.boundaries import Boundaries
from cgcompile.context import (
    eager_region_is_open,
    get_forward_context,
    is_forward_context_available,
)
from cgcompile.debug.findings import SEVERITIES, Finding, Way, finding, kind_of
from cgcompile.debug.restore import Snapshot, dense_parts
from cgcompile.graphs.arena import address
from cgcompile.graphs.breakable import eager_break_during_capture
from cgcompile.graphs.breaks import foreign_breaks
from cgcompile.graphs.host_rules import OpRules, write_targets
from cgcompile.passes.assign import takes_python_data, why_no_collective, why_not_on
from cgcompile.passes.nodes import short_name
from cgcompile.reasons import Reason
from cgcompile.source_lines import Line, is_users_file, running_line
from cgcompile.torch_compat import torch_ops

_CPU = torch.device("cpu")


_GUARDED = "the function checks whether it is traced or captured, and may leave this out then"


_NOW = Line("", 0, "", "")  # stands for the line that runs now


class Notes:
    """Collect findings; equal ones from the same line are counted."""

    is_recording = True  # for functions that break captures: see ``pause``

    def __init__(self, way: Way, until: CodeType) -> None:
        self.way = way
        self.muted = 0  # above 0 in code that runs eager, or that is noted already
        self.guarded: set[tuple[str, str]] = set()  # (file, name) of functions
        self._until = until  # the code that calls the model
        # Nothing is traced: no region. A region around the examination is the caller's.
        self._leaves_out_regions = way is not Way.UNTRACED and not eager_region_is_open()
        self._findings: dict[tuple[object, ...], Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        yield from self._findings.values()

    @property
    def listens(self) -> bool:
        """Whether code that runs now would be captured, and is not noted already."""
        in_region = self._leaves_out_regions and eager_region_is_open()
        return not self.muted and not in_region

    @contextmanager
    def pause(self, name: str = "") -> Iterator[None]:
        """Context manager: collect no findings, as in a function that breaks captures."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    def add_eager(self, *call: Any) -> None:
        """Ignore a function that broke a capture, as there is no recording."""

    def line(self) -> Line | None:
        """Return the user's line that runs now."""
        return running_line(sys._getframe(1), self._until)

    def here(
        self,
        kind: str,
        op: str,
        message: str,
        severity: str | None = None,
        line: Line | None = _NOW,
    ) -> None:
        """Add a finding about the line that runs now; a note where a capture is checked for."""
        if not self.listens:
            return
        line = running_line(sys._getframe(1), self._until) if line is _NOW else line
        if line is not None and (line.file, line.function) in self.guarded:
            message, severity = f"{message}; {_GUARDED}", "note"
        self.add(kind, op, message, line, severity)

    def add(
        self, kind: str, op: str, message: str, line: Line | None, severity: str | None = None
    ) -> None:
        """Add a finding, or count it and keep the worst severity; None: that of its kind."""
        new = finding(self.way, kind, op, message, line, severity)
        key = (kind, op if line is None else line[:2])
        old = self._findings.get(key, replace(new, count=0))
        worst = min(old.severity, new.severity, key=SEVERITIES.index)
        self._findings[key] = replace(old, count=old.count + 1, severity=worst)


# ---------------------------------------------------------------- streams


class Streams:
    """Which streams of one call work, and which waits for which.

    A capture holds the work of a stream that waits for the capturing one (forks) and that the
    capturing one waits for in the end (joins). A stream that waits for an event is ordered after
    all work before the event was recorded: each has a clock, the last known work of each stream.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self._current = current
        self._first = current()
        self._clocks: dict[int, dict[int, int]] = {self._first: {self._first: 0}}
        self._events: dict[int, tuple[Any, dict[int, int]]] = {}  # with the event: ids are reused
        self._ops: list[tuple[int, int, str, Line | None, bool]] = []
        self.incomplete = False  # waits were not seen

    @property
    def off_main_stream(self) -> bool:
        """Whether the current stream differs from the stream of the call."""
        return self._current() != self._first

    def add_work(self, op: str, line: Line | None) -> None:
        """Note an op on another stream than that of the call."""
        stream = self._current()
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        self._ops.append((stream, clock[stream], op, line, self._first in clock))

    def record(self, event: Any, stream: Any = None) -> None:
        """Note that an event is recorded on a stream, by default the current one."""
        self._events[id(event)] = event, dict(self._clocks.get(self._key(stream), {}))

    def wait(self, event: Any, stream: Any = None) -> None:
        """Note that a stream, by default the current one, waits for an event."""
        _, recorded = self._events.get(id(event), (None, {}))
        clock = self._clocks.setdefault(self._key(stream), {})
        clock |= {other: max(count, clock.get(other, 0)) for other, count in recorded.items()}

    def work(self) -> Iterator[tuple[str, Line | None, str, bool]]:
        """Yield (op, line, message, whether it is fine) of work on other streams."""
        for stream, number, op, line, forked in self._ops:
            joined = self._clocks[self._first].get(stream, 0) >= number
            if forked and joined:
                text = "a side stream that forks and joins: graphs hold it, if no break is between"
            elif self.incomplete:
                text = "another stream than the call; whether that is joined was not seen"
            elif forked:
                text = "a side stream that is not joined: a capture of it ends in an error"
            else:
                text = "a stream that does not wait for that of the call: no replay runs it"
            yield op, line, f"it runs on {text}", self.incomplete or (forked and joined)

    def _key(self, stream: Any) -> int:
        if stream is None:
            return self._current()
        key = getattr(stream, "cuda_stream", None)
        self.incomplete |= key is None
        return -1 if key is None else int(key)


# ---------------------------------------------------------------- ops that are not registered

_ATTENTION = re.compile(r"attn|attention|paged|(^|_)(mha|mla|mqa|gqa|sdpa)(_|$)", re.I)
_CACHE = re.compile(r"cache|(^|_)kv(_|$)", re.I)
_KNOWN = (
    "aten",
    "prims",
    "prim",
    "inductor",
    "c10d",
    "_c10d_functional",
    "higher_order",
    "cgcompile",
)
_HEADS = 3  # dimensions of a tensor [tokens, heads, head_dim]


def resembles(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Return (kind, message) of an op that looks like attention or a cache write, or None.

    It does by its name, or by three or more tensors [..., heads, head_dim] of one dtype and
    head_dim, one of which is written.
    """
    if getattr(func, "namespace", "aten") in _KNOWN:
        return None
    name, targets = short_name(func), write_targets(func, args, kwargs)
    is_cache = _CACHE.search(name) is not None
    returns = not torch_ops.returns_nothing(func) or re.search(
        r"out(put)?\b|decode|prefill", str(func)
    )
    if _ATTENTION.search(name) and (returns or not is_cache):
        return "unregistered_attention", "its name is that of attention"
    if is_cache and targets:
        return "cache_write", "it writes a cache"
    if _has_heads(torch_ops.tree_tensors((args, kwargs)), targets):
        return "unregistered_attention", "it takes queries, keys and values, and writes one"
    return None


def _has_heads(inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    wide = [t for t in inputs if t.dim() >= _HEADS and t.is_floating_point()]
    written = {(t.shape[-1], t.dtype) for t in targets if t.dim() >= _HEADS}
    return sum((tensor.shape[-1], tensor.dtype) in written for tensor in wide) >= _HEADS


# ---------------------------------------------------------------- calls that reach no op

_UNSEEN = (torch.Event, torch.Stream)  # written in C, so that arguments do not show
_WAITS = {
    "torch.cuda.synchronize": torch.cuda.synchronize,
    "torch.cuda.Stream.synchronize": torch.cuda.Stream.synchronize,
    "torch.cuda.Event.synchronize": torch.cuda.Event.synchronize,
    "torch.accelerator.synchronize": torch.accelerator.synchronize,
}


class PythonCalls:
    """Context manager: see calls that reach no mode of torch, by a profile function.

    Functions that ``torch.compile`` made run uncompiled; while they run, those of other threads as
    well. Where another profiler is active it sees nothing.
    """

    def __init__(self, notes: Notes, streams: Streams | None = None) -> None:
        self.ran: set[CodeType] = set()
        self.sees = False
        self._notes = notes
        self._streams = streams
        self._compiled = _code(torch_ops.code_of_compiled_functions())
        self._uncompiled: list[AbstractContextManager[Any]] = []  # around each that runs
        self._break = _code(None)
        self._on_call: dict[CodeType, Callable[[FrameType], None]] = {
            self._compiled: self._enter_compiled
        }
        for name, function in _WAITS.items():
            self._on_call[_code(function)] = partial(self._wait, name)
        for function in (
            torch.compiler.is_compiling,
            torch.compiler.is_dynamo_compiling,
            torch.cuda.is_current_stream_capturing,
        ):
            self._on_call[_code(function)] = lambda frame: self._guard(frame.f_back)
        for function in (get_forward_context, is_forward_context_available):
            self._on_call[_code(function)] = self._read_context
        if streams is None:
            self._on_call[_code(torch.cuda.StreamContext.__enter__)] = self._side_stream
        else:
            self._on_call[_code(torch.cuda.Event.record)] = partial(_order, streams.record)
            self._on_call[_code(torch.cuda.Event.wait)] = partial(_order, streams.wait)
        if notes.way is Way.UNTRACED:
            self._break = _code(eager_break_during_capture(operator.neg))
            self._on_call[self._break] = lambda frame: self._mute(1)

    def __enter__(self) -> "PythonCalls":
        self.sees = sys.getprofile() is None
        if self.sees:
            sys.setprofile(self.see)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.sees:
            sys.setprofile(None)
        while self._uncompiled:  # another profiler took over while one ran, so its end was not seen
            self._uncompiled.pop().__exit__(None, None, None)

    def see(self, frame: FrameType, event: str, what: Any) -> None:
        """Handle one event of the profile function."""
        if event == "call":
            self.ran.add(frame.f_code)
            handler = self._on_call.get(frame.f_code)
            if handler is not None:
                handler(frame)
        elif event == "return":
            self._returned(frame, what)
        elif event == "c_call" and type(getattr(what, "__self__", None)) in _UNSEEN:
            if self._streams is not None:
                self._streams.incomplete = True
        elif event == "c_call" and _ATTENTION.search(getattr(what, "__name__", "")):
            top = str(getattr(what, "__module__", None) or "torch").partition(".")[0]
            if top not in ("torch", "builtins"):
                text = "neither torch nor a trace sees what it does; a graph repeats this step"
                self._notes.here("opaque_call", f"{top}.{what.__name__}", text)

    def _wait(self, name: str, frame: FrameType) -> None:
        self._notes.here("synchronize", name, f"{name}() makes the host wait for the device")

    def _read_context(self, frame: FrameType) -> None:
        name = frame.f_code.co_name
        text = f"{name}() outside of a splitting op: a graph keeps this step's context"
        self._notes.here("context_read", name, text)

    def _side_stream(self, frame: FrameType) -> None:
        text = "what is inside would run on another stream of a GPU"
        self._notes.here("side_stream", "torch.cuda.stream", text, "note")

    def _enter_compiled(self, frame: FrameType) -> None:
        self._uncompiled.append(torch_ops.uncompiled())
        self._uncompiled[-1].__enter__()

    def _mute(self, by: int) -> None:
        self._notes.muted += by

    def _guard(self, caller: FrameType | None) -> None:
        """Note a function that has checked whether it is traced or captured."""
        if caller is not None and is_users_file(caller.f_code.co_filename):
            self._notes.guarded.add((caller.f_code.co_filename, caller.f_code.co_name))

    def _returned(self, frame: FrameType, what: Any) -> None:
        code = frame.f_code
        if isinstance(what, bool) and (code.co_filename, code.co_name) in self._notes.guarded:
            self._guard(frame.f_back)  # a predicate that returns the result of the check
        if code is self._compiled and self._uncompiled:
            self._uncompiled.pop().__exit__(None, None, None)
        elif code is self._break:
            self._mute(-1)


def _order(note: Callable[[Any, Any], None], frame: FrameType) -> None:
    note(frame.f_locals["self"], frame.f_locals["stream"])


def _code(function: Any) -> CodeType:
    """Return the code of a function; code that never runs for a function written in C."""
    result = getattr(function, "__code__", function)
    return result if isinstance(result, CodeType) else (lambda: None).__code__


# ---------------------------------------------------------------- functions and ops

# What the host does with a tensor, by the name of the function -> as a user writes it.
_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": "numpy.asarray()",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "use as an index or a size",
    "__bool__": "use as a condition",
    "is_nonzero": "use as a condition",
    "__repr__": "print() or repr()",
    "__format__": "use in an f-string",
}
# Dynamo breaks its graph at these: one trace of the whole model is impossible.
_UNTRACEABLE = {"tolist", "__bool__", "is_nonzero", "__repr__", "__format__", "__array__"}
_ON_THE_CPU = {"arange", "linspace", "logspace", "eye", "zeros", "ones", "full", "empty", "rand"}
_ON_THE_CPU |= {"randn", "randint", "randperm", "tril_indices", "triu_indices", "scalar_tensor"}
_CPU_TENSOR = torch.empty(0, device="cpu")  # stands for the result of a copy


class Watch(OpRules):
    """Observe one call of the model: each op is judged, and runs."""

    def __init__(
        self,
        notes: Notes,
        boundaries: Boundaries,
        device: torch.device,
        snapshot: Snapshot,
        current_stream: Callable[[], int],
    ) -> None:
        super().__init__()
        self.notes = notes
        self.device = device
        self.snapshot = snapshot
        self.streams = Streams(current_stream)
        self._match = cache(boundaries.match_call)
        self._calls = PythonCalls(notes, self.streams if device.type == "cuda" else None)

    @property
    def ran(self) -> set[CodeType]:
        """The code that ran, as far as it was seen."""
        return self._calls.ran

    def is_boundary(self, function: Any) -> bool:
        """Return whether a call is a boundary."""
        try:
            return self._match(function) is not None
        except TypeError:  # an unhashable callable is in no table
            return False

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the call inside; then note the work on other streams."""
        ended = False
        try:
            with ExitStack() as stack:
                stack.enter_context(self)
                stack.enter_context(_Functions(self))
                stack.enter_context(self._calls)
                if not self._calls.sees:  # compiled functions come
                    stack.enter_context(torch_ops.uncompiled())
                if self.notes.way is Way.UNTRACED:
                    stack.enter_context(foreign_breaks(self.notes))
                yield
                ended = True
        finally:  # an error may have come before a join
            self.streams.incomplete |= not self._calls.sees or not ended
            for op, line, text, fine in sorted(self.streams.work(), key=operator.itemgetter(3)):
                severity = "note" if fine and self.notes.way is Way.UNTRACED else None
                self.notes.here("side_stream", op, text, severity, line)

    # -------------------------------------------------------------- one op

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = torch_ops.tree_tensors((args, kwargs))
        self.snapshot.before_call(func, args, kwargs)
        boundary = self.is_boundary(func)
        if not boundary and self.notes.listens:
            self._before(func, args, kwargs, inputs)
        kernel = torch_ops.python_kernel(func, self.device.type)
        with self.notes.pause() if boundary else nullcontext():
            if kernel is None:
                output = func(*args, **kwargs)
            else:
                with self:  # the ops in its body count, and what they write
                    output = kernel(*args, **kwargs)
        allocated = self.snapshot.after_call(output, inputs)
        if self.device == _CPU:
            lifted = torch_ops.op_names(func)[-1].startswith("aten::lift_fresh")
            numbers = lifted or self.are_numbers(inputs)
            written = [output] if lifted else [] if numbers else write_targets(func, args, kwargs)
            self.mark({*allocated, *map(address, dense_parts(written))}, numbers)
        elif not boundary and self.notes.listens:
            self._after(func, inputs, torch_ops.tree_tensors(output))
        return output

    def is_number(self, tensor: torch.Tensor) -> bool:
        if self.device == _CPU:
            return super().is_number(tensor)
        return tensor.dim() == 0 and tensor.device == _CPU

    def severity_of_data(self, refused: bool = True) -> str | None:
        """Return the severity of a copy of Python data on the CPU; None is that of its kind.

        It is a note where Dynamo makes a constant of it, or a kernel takes the number by value.
        """
        return None if refused and self.notes.way is Way.UNTRACED else "note"

    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> None:
        name, notes = str(func), self.notes
        alike = resembles(func, args, kwargs)
        if alike is not None:
            text = f"{alike[1]}, and it is no splitting op; a graph repeats this step"
            notes.here(alike[0], torch_ops.op_names(func)[-1], text)
        error = self.refusal(func, args, kwargs)
        kind = "" if error is None else kind_of(error)
        here = all(tensor.device == self.device for tensor in inputs)
        # On another device than the CPU, results show whether data was copied: see _after.
        judged = self.device == _CPU if kind == "device_copy" else here or kind != "host_sync"
        if error is not None and judged:
            severity = self.severity_of_data() if kind == "device_copy" else None
            notes.here(kind, error.op, str(error).partition("\n")[0], severity)
        elif torch_ops.draws_random(func) and not _is_off(func, args):
            notes.here("random", name, "it draws random numbers")
        why = why_no_collective(func, (*args, *kwargs.values()), self.device.type)
        if why is not None:
            notes.here("collective", name, why.detail)
        if self.streams.off_main_stream:
            self.streams.add_work(name, notes.line())

    def _after(self, func: Any, inputs: list[torch.Tensor], output: list[torch.Tensor]) -> None:
        name = short_name(func)
        if name in ("lift_fresh", "detach_", "detach"):
            return
        why = why_not_on(self.device, name, inputs, output, from_python=False)
        if why is None:
            return
        # A capture of plain Python can hold a copy from or into pinned memory.
        severity = None
        if self.notes.way is Way.UNTRACED and why.reason is Reason.DEVICE_COPY:
            on_cpu = [tensor for tensor in (*inputs, *output) if tensor.device == _CPU]
            severity = "note" if all(tensor.is_pinned() for tensor in on_cpu) else None
        self.notes.here(why.reason.value, name, why.detail, severity)


def _is_off(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of dropout returns its argument."""
    return short_name(func) in ("dropout", "native_dropout") and len(args) > 2 and not args[2]


class _Functions(TorchFunctionMode):
    """See what the user calls of torch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._notes = watch.notes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._notes.listens:
            return func(*args, **kwargs)
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        transform = torch_ops.functorch_transform()
        if transform is not None:
            text = f"{name} runs inside of {transform}"
            self._notes.here("functorch", f"torch.func {transform}", text)
        noted = self._watch.is_boundary(func)
        if not noted and isinstance(first, torch.Tensor) and name in _READS:
            noted = self._note_read(name, first)
        elif not noted and isinstance(first, torch.Tensor) and name == "cpu":
            noted = self._note_copy_to_cpu(first)
        elif not noted and (takes_python_data(name) or name in _ON_THE_CPU):
            noted = self._note_constant(name, kwargs)
        data = self._watch.device == _CPU and takes_python_data(name)
        with self._notes.pause() if noted or data else nullcontext():
            result = func(*args, **kwargs)
        if data and not noted and result is not first:
            text = "for a model on a GPU it would be copied from Python at each call"
            refused = bool(result.dim() and result.numel())
            self._notes.here("device_copy", name, text, self._watch.severity_of_data(refused))
        return result

    def _note_read(self, name: str, tensor: torch.Tensor) -> bool:
        if tensor.device == self._watch.device:
            if self._watch.is_number(tensor):
                return True  # computed from Python numbers alone
            whole = self._notes.way is Way.WHOLE and name in _UNTRACEABLE
            text = f"{_READS[name]} makes the host wait for a value of the device"
            self._notes.here("host_sync", _READS[name], text, "error" if whole else None)
        elif not name.startswith(("__repr", "__format")):
            text = f"{_READS[name]} takes a number from a CPU tensor, which a replay does not do"
            self._notes.here("stale_scalar", _READS[name], text)
        return True

    def _note_copy_to_cpu(self, tensor: torch.Tensor) -> bool:
        if self._watch.device == _CPU:
            text = "on a GPU it would copy to the CPU and wait"
            self._notes.here("device_copy", ".cpu()", text, "note")
            return False
        why = why_not_on(self._watch.device, "cpu", [tensor], [_CPU_TENSOR], from_python=False)
        if why is not None and tensor.device != _CPU:
            self._notes.here("device_copy", ".cpu()", f"{why.detail} and waits")
        return tensor.device != _CPU

    def _note_constant(self, name: str, kwargs: dict[str, Any]) -> bool:
        """Note a constant that forward makes: harmless on the CPU, perhaps not on a GPU."""
        from_python = takes_python_data(name)
        if self._watch.device == _CPU:
            is_default = "device" not in kwargs and torch.get_default_device() == _CPU
            if is_default and not from_python:
                text = "for a model on a GPU it would be made on the CPU at each call"
                self._notes.here("cpu_tensor", name, text, "note")
            return False
        target = torch.device(kwargs.get("device") or torch.get_default_device())
        if from_python and target.type == self._watch.device.type:
            text = f"{name} copies Python data to {self._watch.device}"
            self._notes.here("device_copy", name, text)
            return True
        return False
