"""What a model does while it runs plain, judged op by op: :class:`Watch`.

Three observers share one :class:`~cgcompile.observe.notes.Notes`: a function mode sees what the
user called (``item``, ``print``, ``torch.tensor``), a dispatch mode each ATen op below it, and a
profile function of Python what reaches neither (``torch.cuda.synchronize``, a read of the forward
context). Ops inside of a boundary run eager, so nothing is said of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgcompile import compat
from cgcompile.boundaries import Boundaries, SplittingOp
from cgcompile.graphs.foreign import foreign_breaks
from cgcompile.graphs.host_rules import refusal
from cgcompile.observe.advice import Way
from cgcompile.observe.attention import resembles
from cgcompile.observe.calls import PythonCalls
from cgcompile.observe.notes import Notes
from cgcompile.observe.restore import Memory
from cgcompile.observe.streams import Streams
from cgcompile.passes.capturable import takes_python_data, why_no_collective, why_not_on
from cgcompile.passes.nodes import short_name
from cgcompile.reasons import Reason

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
    """What is looked at, for all observers.

    Args:
        notes: where findings go.
        boundaries: what runs eager.
        device: of the graph.
        memory: told of every write.
        stream_key: a number, equal for equal current streams.

    Attributes:
        streams: what runs on other streams.
    """

    def __init__(
        self,
        notes: Notes,
        boundaries: Boundaries,
        device: torch.device,
        memory: Memory,
        stream_key: Callable[[], int],
    ) -> None:
        self.notes = notes
        self.device = device
        self.memory = memory
        self.streams = Streams(stream_key)
        self._boundaries = boundaries
        self._known: dict[Any, SplittingOp | None] = {}

    def match(self, function: Any) -> SplittingOp | None:
        """The boundary that a call is, or None."""
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
            for each in sorted(streams.work(), key=lambda work: work.fine):
                severity = "note" if each.fine and notes.way is Way.UNTRACED else None
                notes.about(each.line, "side_stream", each.op, each.text, severity=severity)


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
        case, given = self._case, compat.tree_tensors((args, kwargs))
        case.memory.about_to_call(func, args, kwargs)
        boundary = case.match(func) is not None
        if not boundary and self._notes.listens:
            self._before(func, args, kwargs, given)
        made = self._run(func, args, kwargs, boundary)
        results = compat.tree_tensors(made)
        case.memory.made(results, given)
        if not boundary and self._notes.listens:
            self._after(func, given, results)
        return made

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], boundary: bool) -> Any:
        kernel = compat.python_kernel(func, self._case.device.type)
        with self._notes.quietly() if boundary else nullcontext():
            if kernel is None:
                return func(*args, **kwargs)
            with self:  # the ops in its body count, and what they write
                return kernel(*args, **kwargs)

    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
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
        elif refused is not None and all(t.device == self._case.device for t in given):
            notes.here("host_sync", name, f"{name} makes the host wait for a value of the device")
        elif compat.draws_random(func) and not _is_off(func, args):
            notes.here("random", name, "it draws random numbers")
        why = why_no_collective(func, (*args, *kwargs.values()), self._case.device.type)
        if why is not None:
            notes.here("collective", name, why.detail)
        if self._case.streams.aside:
            self._case.streams.works(name, notes.line())

    def _after(self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        notes, name = self._notes, short_name(func)
        if self._case.device != _CPU and name not in ("lift_fresh", "detach_", "detach"):
            why = why_not_on(self._case.device, name, given, made, from_python=False)
            if why is not None:
                severity = "note" if self._may_copy(why.reason, [*given, *made]) else None
                notes.here(why.reason.value, name, why.detail, severity=severity)

    def _may_copy(self, reason: Reason, tensors: list[torch.Tensor]) -> bool:
        """Whether a graph can hold a copy: from or into pinned memory, where nothing is traced."""
        if self._notes.way is not Way.UNTRACED or reason is not Reason.DEVICE_COPY:
            return False
        return all(tensor.is_pinned() for tensor in tensors if tensor.device == _CPU)


def _is_off(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of dropout returns its argument."""
    return short_name(func) in ("dropout", "native_dropout") and len(args) > 2 and not args[2]
