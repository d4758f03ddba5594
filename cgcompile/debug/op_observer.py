"""What a model does while it runs plain, judged op by op: :class:`Watch`.

Three observers share one :class:`~cgcompile.debug.findings.Notes`: a function mode sees what the
user called (``item``, ``print``, ``torch.tensor``), a dispatch mode each ATen op below it, and a
profile function of Python (:class:`PythonCalls`) what reaches neither (``torch.cuda.synchronize``,
a read of the forward context). Ops inside of a boundary run eager, and are not judged.

:class:`Streams` tells whether work on other streams forks from that of the call and is joined: a
capture holds the work of a stream that waits for the capturing one and that it waits for in the
end. :func:`resembles` recognises attention and cache writes that are not registered, by name, or by
three or more tensors [..., heads, head_dim] of one dtype and head_dim, one of which is written.
"""

import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cgcompile import torch_compat as compat
from cgcompile.boundaries import Boundaries, SplittingOp
from cgcompile.context import EagerRegion, get_forward_context, is_forward_context_available
from cgcompile.debug.findings import Notes, Way
from cgcompile.debug.restore import Snapshot
from cgcompile.graphs.breakable import eager_break_during_capture
from cgcompile.graphs.breaks import foreign_breaks
from cgcompile.graphs.capture import eager_region
from cgcompile.graphs.host import refusal, write_targets
from cgcompile.passes.capturable import takes_python_data, why_no_collective, why_not_on
from cgcompile.passes.nodes import Line, is_users_file, short_name
from cgcompile.reasons import Reason

_JOINED = "a side stream that forks from the one of the call and is joined again: a graph holds "
_TEXTS = {  # (forked, joined)
    (True, True): f"{_JOINED}it, where no break comes in between",
    (True, False): "a side stream that is not joined: the stream of the call does not wait for "
    "this work, and a capture ends in an error",
    (False, True): "a stream that does not wait for the one of the call: it runs while a graph is "
    "recorded, and no replay runs it",
}
_TEXTS[False, False] = _TEXTS[False, True]


class Work(NamedTuple):
    """An op on another stream than that of the call."""

    op: str
    line: Line | None
    text: str
    fine: bool


class Streams:
    """What the streams of one call do, and which waits for which.

    A stream that waits for an event is ordered after all that the stream of the event had done, or
    was ordered after, when the event was recorded.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self._current = current
        self._first = current()
        self._clocks: dict[int, dict[int, int]] = {self._first: {self._first: 0}}
        self._events: dict[int, tuple[Any, dict[int, int]]] = {}  # with the event, which lives so
        self._ops: list[tuple[int, int, str, Line | None, bool]] = []
        self.blind = False

    @property
    def aside(self) -> bool:
        """Whether the current stream is not that of the call."""
        return self._current() != self._first

    def works(self, op: str, line: Line | None) -> None:
        """Note an op on the current stream, which is not that of the call."""
        stream = self._current()
        clock = self._clocks.setdefault(stream, {})
        forked = self._first in clock
        clock[stream] = clock.get(stream, 0) + 1
        self._ops.append((stream, clock[stream], op, line, forked))

    def records(self, event: Any, stream: Any = None) -> None:
        """Note that an event is recorded on a stream, by default the current one."""
        self._events[id(event)] = event, dict(self._clocks.get(self._key(stream), {}))

    def waits(self, event: Any, stream: Any = None) -> None:
        """Note that a stream, by default the current one, waits for an event."""
        _, recorded = self._events.get(id(event), (None, {}))
        clock = self._clocks.setdefault(self._key(stream), {})
        clock |= {each: max(count, clock.get(each, 0)) for each, count in recorded.items()}

    def work(self) -> Iterator[Work]:
        """Yield all ops on other streams; complete at the end of the call."""
        for stream, number, op, line, forked in self._ops:
            joined = self._clocks[self._first].get(stream, 0) >= number
            text = _TEXTS[forked, joined]
            if self.blind and not (forked and joined):
                text = "another stream than the call; whether that is joined was not seen"
            yield Work(op, line, f"it runs on {text}", self.blind or (forked and joined))

    def _key(self, stream: Any) -> int:
        if stream is None:
            return self._current()
        key = getattr(stream, "cuda_stream", None)
        self.blind |= key is None
        return -1 if key is None else int(key)


_ATTENTION = re.compile(r"attn|attention|paged|(^|_)(mha|mla|mqa|gqa|sdpa)(_|$)", re.I)
_CACHE = re.compile(r"cache|(^|_)kv(_|$)", re.I)
_TORCHS = ("aten", "prims", "prim", "inductor", "c10d", "_c10d_functional", "higher_order")
_HEADS = 3  # dimensions of a tensor [tokens, heads, head_dim]


def is_attention_name(name: str) -> bool:
    """Return whether a function of this name would be attention."""
    return bool(_ATTENTION.search(name))


def resembles(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Return (kind of finding, why) of an op that is not registered, or None."""
    if getattr(func, "namespace", "aten") in _TORCHS:
        return None
    name = short_name(func)
    targets = write_targets(func, args, kwargs)
    if is_attention_name(name) and not (_writes_alone(func) and _CACHE.search(name)):
        return "unregistered_attention", "its name is that of attention"
    if _CACHE.search(name) and targets:
        return "cache_write", "it writes a cache"
    if _has_heads(compat.tree_tensors((args, kwargs)), targets):
        return "unregistered_attention", "it takes queries, keys and values, and writes one"
    return None


def _writes_alone(func: Any) -> bool:
    return compat.returns_nothing(func) and not re.search(r"out(put)?\b|decode|prefill", str(func))


def _has_heads(inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    wide = [t for t in inputs if t.dim() >= _HEADS and t.is_floating_point()]
    alike = [t for t in wide if any(_same_heads(t, other) for other in targets)]
    return len(alike) >= _HEADS


def _same_heads(one: torch.Tensor, other: torch.Tensor) -> bool:
    return other.dim() >= _HEADS and one.shape[-1] == other.shape[-1] and one.dtype == other.dtype


_UNSEEN = (torch.Event, torch.Stream)  # written in C, so that arguments do not show


class PythonCalls:
    """Context manager: sees calls that reach no mode of torch, by a profile function.

    Functions that ``torch.compile`` made run uncompiled; while they run, those of other threads as
    well. Where another profiler is active it sees nothing.
    """

    def __init__(self, notes: Notes, streams: Streams | None = None) -> None:
        self.notes = notes
        self._streams = streams
        self._enters_stream = _code(torch.cuda.StreamContext.__enter__)
        self._orders = (_code(torch.cuda.Event.record), _code(torch.cuda.Event.wait))
        self.ran: set[CodeType] = set()
        self.sees = False
        self._regions: list[Any] = []
        self._waits = {
            _code(torch.cuda.synchronize): "torch.cuda.synchronize",
            _code(torch.cuda.Stream.synchronize): "torch.cuda.Stream.synchronize",
            _code(torch.cuda.Event.synchronize): "torch.cuda.Event.synchronize",
            _code(torch.accelerator.synchronize): "torch.accelerator.synchronize",
        }
        self._tracing_checks = {
            _code(torch.compiler.is_compiling),
            _code(torch.compiler.is_dynamo_compiling),
            _code(torch.cuda.is_current_stream_capturing),
        }
        self._reads = {_code(get_forward_context), _code(is_forward_context_available)}
        self._break = _code(eager_break_during_capture(operator.neg))
        self._region = _code(eager_region)
        self._leave = _code(EagerRegion.__exit__)
        self._compiled = compat.code_of_compiled_functions()
        self._uncompiled: list[AbstractContextManager[Any]] = []  # around each that runs

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
        """One event of the profile function."""
        if event == "call":
            self._called(frame)
        elif event == "return":
            self._returned(frame, what)
        elif event == "c_call" and type(getattr(what, "__self__", None)) in _UNSEEN:
            self._missed()
        elif event == "c_call" and is_attention_name(getattr(what, "__name__", "")):
            top = str(getattr(what, "__module__", None) or "torch").partition(".")[0]
            if top not in ("torch", "builtins"):
                text = "neither torch nor a trace sees what it does: a graph repeats this step's"
                self.notes.here("opaque_call", f"{top}.{what.__name__}", text)

    def _called(self, frame: FrameType) -> None:
        code, notes = frame.f_code, self.notes
        self.ran.add(code)
        if code in self._waits:
            name = self._waits[code]
            notes.here("synchronize", name, f"{name}() makes the host wait for the device")
        elif code in self._orders:
            self._ordered(code, frame)
        elif code is self._enters_stream and self._streams is None:
            text = "what is inside would run on another stream of a GPU"
            notes.here("side_stream", "torch.cuda.stream", text, severity="note")
        elif code in self._tracing_checks:
            self._guard(frame.f_back)
        elif code in self._reads:
            text = f"{code.co_name}() outside of a splitting op: a graph keeps this step's context"
            notes.here("context_read", code.co_name, text)
        elif code is self._break and notes.way is Way.UNTRACED:
            notes.hush(1)
        elif code is self._compiled:
            self._uncompiled.append(compat.uncompiled())
            self._uncompiled[-1].__enter__()
        elif code is self._leave and any(frame.f_locals["self"] is r for r in self._regions):
            self._regions = [r for r in self._regions if r is not frame.f_locals["self"]]
            notes.hush(-1)

    def _ordered(self, code: CodeType, frame: FrameType) -> None:
        """An event is recorded or waited for: all waits of streams go through these."""
        if self._streams is not None:
            note = (self._streams.records, self._streams.waits)[self._orders.index(code)]
            note(frame.f_locals["self"], frame.f_locals["stream"])

    def _missed(self) -> None:
        if self._streams is not None:
            self._streams.blind = True

    def _guard(self, caller: FrameType | None) -> None:
        """A frame has got an answer to whether it is traced or captured."""
        if caller is not None and is_users_file(caller.f_code.co_filename):
            self.notes.guarded.add((caller.f_code.co_filename, caller.f_code.co_name))

    def _returned(self, frame: FrameType, what: Any) -> None:
        code = frame.f_code
        if isinstance(what, bool) and (code.co_filename, code.co_name) in self.notes.guarded:
            self._guard(frame.f_back)  # a predicate that passes the answer on
        if code is self._compiled and self._uncompiled:
            self._uncompiled.pop().__exit__(None, None, None)
        elif code is self._break and self.notes.way is Way.UNTRACED:
            self.notes.hush(-1)
        elif code is self._region and self.notes.way is not Way.UNTRACED:
            self._regions.append(what)
            self.notes.hush(1)


def _code(function: Any) -> CodeType:
    result = getattr(function, "__code__", None)
    return result if isinstance(result, CodeType) else (lambda: None).__code__


_CPU = torch.device("cpu")
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
# Dynamo cuts its graph at these: one trace of the whole model is not to be had.
_UNTRACEABLE = {"tolist", "__bool__", "is_nonzero", "__repr__", "__format__", "__array__"}
_ON_THE_CPU = {"arange", "linspace", "logspace", "eye", "zeros", "ones", "full", "empty", "rand"}
_ON_THE_CPU |= {"randn", "randint", "randperm", "tril_indices", "triu_indices", "scalar_tensor"}


class Case:
    """What is looked at, for all observers."""

    def __init__(
        self,
        notes: Notes,
        boundaries: Boundaries,
        device: torch.device,
        snapshot: Snapshot,
        stream_key: Callable[[], int],
    ) -> None:
        self.notes = notes
        self.device = device
        self.snapshot = snapshot
        self.streams = Streams(stream_key)
        self._boundaries = boundaries
        self._known: dict[Any, SplittingOp | None] = {}

    def match(self, function: Any) -> SplittingOp | None:
        """Return the boundary that a call is, or None."""
        try:
            if function not in self._known:
                self._known[function] = self._boundaries.match_call(function)
            return self._known[function]
        except TypeError:  # an unhashable callable is in no table
            return None


class Watch:
    """Context manager: all three observers, around one call of the model."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._calls = PythonCalls(case.notes, case.streams if case.device.type == "cuda" else None)
        self._stack = ExitStack()

    @property
    def ran(self) -> set[CodeType]:
        """The code that ran, as far as it was seen."""
        return self._calls.ran

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_Ops(self._case))
            stack.enter_context(_Functions(self._case))
            stack.enter_context(self._calls)
            if not self._calls.sees:  # compiled functions come
                stack.enter_context(compat.uncompiled())
            if self._case.notes.way is Way.UNTRACED:
                stack.enter_context(foreign_breaks(_ForeignBreaks(self._case.notes)))
            self._stack = stack.pop_all()

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._stack.close()
        streams, notes = self._case.streams, self._case.notes
        streams.blind |= not self._calls.sees or kind is not None  # an error comes before the join
        if notes.listens:
            for work in sorted(streams.work(), key=lambda item: item.fine):
                severity = "note" if work.fine and notes.way is Way.UNTRACED else None
                notes.about(work.line, "side_stream", work.op, work.text, severity=severity)


class _ForeignBreaks:
    """Functions of another package that break captures: nothing is said of what they do."""

    is_recording = True

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def pause(self, name: str) -> AbstractContextManager[None]:
        return self._notes.quietly()

    def add_eager(self, *call: Any) -> None:
        """Nothing is recorded here."""


class _Functions(TorchFunctionMode):
    """Sees what the user calls of torch."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self._notes = case.notes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._notes.listens:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        transform, reported = compat.functorch_transform(), False
        if transform is not None:
            text = f"{name} runs inside of {transform}"
            self._notes.here("functorch", f"torch.func {transform}", text)
        if self._case.match(func) is not None:
            reported = True
        elif name in _READS and args and isinstance(args[0], torch.Tensor):
            reported = self._reads(name, args[0])
        elif name == "cpu" and isinstance(args[0], torch.Tensor):
            reported = self._to_cpu(args[0])
        elif takes_python_data(name) or name in _ON_THE_CPU:
            reported = self._made(name, kwargs)
        with self._notes.quietly() if reported else nullcontext():
            return func(*args, **kwargs)

    def _reads(self, name: str, tensor: torch.Tensor) -> bool:
        if tensor.device == self._case.device:
            whole = self._notes.way is Way.WHOLE and name in _UNTRACEABLE
            text = f"{_READS[name]} makes the host wait for a value of the device"
            severity = "error" if whole else None
            self._notes.here("host_sync", _READS[name], text, severity=severity)
        elif not name.startswith(("__repr", "__format")):
            text = f"{_READS[name]} takes a number from a CPU tensor, which a replay does not do"
            self._notes.here("stale_scalar", _READS[name], text)
        return True

    def _to_cpu(self, tensor: torch.Tensor) -> bool:
        if self._case.device == _CPU:
            text = "on a GPU it would copy to the CPU and wait"
            self._notes.here("device_copy", ".cpu()", text, severity="note")
            return False
        why = why_not_on(self._case.device, "cpu", [tensor], [_NOWHERE], from_python=False)
        if why is not None and tensor.device != _CPU:
            self._notes.here("device_copy", ".cpu()", f"{why.detail} and waits")
        return tensor.device != _CPU

    def _made(self, name: str, kwargs: dict[str, Any]) -> bool:
        """A constant that forward makes. On the CPU it is harmless; on a GPU it may not be."""
        python = takes_python_data(name)
        if self._case.device == _CPU:
            if python or ("device" not in kwargs and torch.get_default_device() == _CPU):
                where = "copied from Python" if python else "made on the CPU"
                text = f"for a model on a GPU it would be {where} at each call"
                self._notes.here(
                    "device_copy" if python else "cpu_tensor", name, text, severity="note"
                )
            return False
        goes = torch.device(kwargs.get("device") or torch.get_default_device())
        if python and goes.type == self._case.device.type:
            text = f"{name} copies Python data to {self._case.device}"
            self._notes.here("device_copy", name, text)
            return True
        return False


_NOWHERE = torch.empty(0)  # stands for a tensor on the CPU


class _Ops(compat.DispatchMode):
    """Sees each op, below the functions that the user called."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self._notes = case.notes

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        case, inputs = self._case, compat.tree_tensors((args, kwargs))
        case.snapshot.about_to_call(func, args, kwargs)
        boundary = case.match(func) is not None
        if not boundary and self._notes.listens:
            self._before(func, args, kwargs, inputs)
        output = self._run(func, args, kwargs, boundary)
        case.snapshot.called(output, inputs)
        if not boundary and self._notes.listens:
            self._after(func, inputs, compat.tree_tensors(output))
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], boundary: bool) -> Any:
        kernel = compat.python_kernel(func, self._case.device.type)
        with self._notes.quietly() if boundary else nullcontext():
            if kernel is None:
                return func(*args, **kwargs)
            with self:  # the ops in its body count, and what they write
                return kernel(*args, **kwargs)

    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> None:
        name, notes = str(func), self._notes
        alike = resembles(func, args, kwargs)
        if alike is not None:
            text = f"{alike[1]}, and it is no splitting op"
            notes.here(alike[0], compat.op_names(func)[-1], f"{text}: a graph repeats this step's")
        refused = refusal(func, args, kwargs)
        if refused is not None and refused.generator:
            notes.here("generator", name, "a graph cannot hold a generator that it does not know")
        elif refused is not None and refused.shape:
            notes.here(
                "data_dependent_shape", name, f"the size of what {name} makes depends on data"
            )
        elif refused is not None and all(t.device == self._case.device for t in inputs):
            notes.here("host_sync", name, f"{name} makes the host wait for a value of the device")
        elif compat.draws_random(func) and not _is_off(func, args):
            notes.here("random", name, "it draws random numbers")
        why = why_no_collective(func, (*args, *kwargs.values()), self._case.device.type)
        if why is not None:
            notes.here("collective", name, why.detail)
        if self._case.streams.aside:
            self._case.streams.works(name, notes.line())

    def _after(self, func: Any, inputs: list[torch.Tensor], output: list[torch.Tensor]) -> None:
        notes, name = self._notes, short_name(func)
        if self._case.device != _CPU and name not in ("lift_fresh", "detach_", "detach"):
            why = why_not_on(self._case.device, name, inputs, output, from_python=False)
            if why is not None:
                severity = "note" if self._may_copy(why.reason, [*inputs, *output]) else None
                notes.here(why.reason.value, name, why.detail, severity=severity)

    def _may_copy(self, reason: Reason, tensors: list[torch.Tensor]) -> bool:
        """Whether a graph can hold a copy: from or into pinned memory, where nothing is traced."""
        if self._notes.way is not Way.UNTRACED or reason is not Reason.DEVICE_COPY:
            return False
        return all(tensor.is_pinned() for tensor in tensors if tensor.device == _CPU)


def _is_off(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of dropout returns its argument."""
    return short_name(func) in ("dropout", "native_dropout") and len(args) > 2 and not args[2]
