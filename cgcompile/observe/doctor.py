""":func:`doctor`: what will break or cost, found before anything is captured.

The model runs plain, twice, while :mod:`~cgcompile.observe.watch` looks on; everything that it
changes is put back. The rules are those of the split (``passes/capturable.py``), of the host
recorder (``graphs/host_rules.py``) and of the registry of boundaries. Read on in ``arguments``,
``state``, ``advice``, and for errors that have happened in ``failures``.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import CodeType
from typing import Any

import torch

from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import CompiledModel, check_compilable
from cgcompile.config import CompilationConfig
from cgcompile.errors import ConfigError
from cgcompile.graphs.capture import allow_capture
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.entries import devices_of
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.observe.advice import Way
from cgcompile.observe.arguments import (
    Call,
    check_arguments,
    compare_calls,
    forward_line,
    look_at_call,
)
from cgcompile.observe.diagnosis import Diagnosis
from cgcompile.observe.failures import is_of_inference_tensors, name_of, of_handle
from cgcompile.observe.notes import Notes
from cgcompile.observe.restore import (
    Change,
    Memory,
    Place,
    RandomState,
    State,
    changes,
    uncompile_parts,
)
from cgcompile.observe.subject import original_of
from cgcompile.observe.targets import resolved
from cgcompile.observe.watch import Case, Watch
from cgcompile.passes.lines import Line, is_users_file, line_at, raised_at
from cgcompile.settings import checked_but


@checked_but("config", "prepare")
def doctor(
    model: Any,
    *args: Any,
    config: CompilationConfig | Backend | Mapping[str, Any] | None = None,
    prepare: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> Diagnosis:
    """Find what graphs cannot hold in one call of a model, with your source lines and the fixes.

    The call runs plain, twice, on the device where the tensors are and in the grad mode, autocast
    and forward context of the caller; nothing is captured, and what is compiled runs uncompiled
    (but for a class whose ``forward`` is decorated with ``cgcompile.compile``, which shows as an
    error of the trace). Where the model calls a function that ``torch.compile`` made and that is
    none of its parts, such as one that is decorated, all threads run uncompiled until it returns,
    as torch has one switch for it. Tensors that the call writes, attributes,
    containers and random generators that it reaches from the model and the arguments are put back,
    bitwise. Not seen, and not put
    back: what a kernel writes that torch does not know (a Triton kernel or an extension called
    directly), and state in globals. Where a Python profiler is active, calls that reach no op
    (``torch.cuda.synchronize``) are not seen. Takes the time of two plain calls, and memory for
    what is written. Synchronises. What the split makes of a traced model is
    a question for a trace, not for this.

    Args:
        model: a module or function, compiled or not; or, without arguments, a ``Backend`` or a
            wrapper that has run: then its counters are explained.
        *args: of one call.
        config: the settings that the model will be compiled with, a ``Backend``, or a mapping as
            for ``options``; its splitting ops run eager, so nothing is said of what they do. Left
            out: those of a compiled model, else the defaults.
        prepare: makes the inputs of a call, in place of ``args``: a tuple, a dict, or ``(tuple,
            dict)``. Called twice, so that inputs that move or change show.
        **kwargs: of the call.

    Returns:
        The findings, the worst first. An error that the model raises is one of them.

    Raises:
        ConfigError: something that is no model, settings or ``prepare`` that cannot be.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.
    """
    handle = _ran(model)
    if handle is not None and not (args or kwargs or prepare):
        return Diagnosis.of(name_of(handle), "-", of_handle(handle))
    if isinstance(model, type) or not callable(original_of(model)):
        check_compilable(model, "doctor")  # any other callable is taken as a function
    if prepare is not None and not callable(prepare):
        raise ConfigError.bad_value(
            name="prepare",
            where="doctor",
            value=prepare,
            expected="a function that makes the inputs of a call",
        )
    settings = _settings(model, config)
    first = Call(args, kwargs) if prepare is None else Call.prepared(prepare)
    second = first if prepare is None else Call.prepared(prepare)
    examination = _Examination(model, settings, first, second)
    return examination.run(compare=prepare is not None)


def _ran(model: Any) -> Any:
    """What has counters, if a model has any."""
    if isinstance(model, (Backend, CUDAGraphWrapper)):
        return model
    return handle_of(model)


def _settings(model: Any, given: Any) -> CompilationConfig:
    if given is None and isinstance(model, CUDAGraphWrapper):
        return model.config
    return resolved(given if given is not None else handle_of(model), "doctor")


def _way(model: Any, config: CompilationConfig) -> Way:
    untraced = isinstance(model, CUDAGraphWrapper) or config.splitting == "breakable"
    if untraced:
        return Way.UNTRACED
    return Way.WHOLE if isinstance(model, CompiledModel) else Way.SPLIT


def _call(model: Any, call: Call) -> Any:
    """The one place that runs the model: lines of its callers are not the model's."""
    return model(*call.args, **call.kwargs)


class _Examination:
    """One look at a model."""

    def __init__(self, model: Any, config: CompilationConfig, first: Call, second: Call) -> None:
        self._model = original_of(model)
        self._config = config
        self._first, self._second = first, second
        self._notes = Notes(_way(model, config), _call.__code__)
        self._device = devices_of(getattr(self._model, "__self__", self._model), *first)[0]
        self._before = State.of(self._model, first, second)
        self._random = RandomState(self._device)
        self._memory = Memory(self._before.tensors)
        ops, builtin = config.splitting_ops, config.builtin_splitting_ops
        device = capture_device(self._device, config.capture_device)
        self._case = Case(
            self._notes,
            Boundaries(ops, builtin=builtin),
            self._device,
            self._memory,
            device.stream_key if device is not None else _one_stream,
        )
        self._ran: list[set[CodeType]] = []  # of each call

    def run(self, *, compare: bool) -> Diagnosis:
        """Look at the arguments, run the model twice, compare, and put everything back."""
        look_at_call(self._notes, self._model, self._first, self._device, compare)
        try:
            uncompile_parts(self._before)
            start = State.of(self._model, self._first, self._second)
            if self._runs(self._first):
                between = State.of(self._model, self._second)
                self._notes.closed = True
                if compare:
                    first, second = self._first, self._second
                    memory, config = self._memory, self._config
                    compare_calls(self._notes, self._model, first, second, memory, config)
                if self._runs(self._second):
                    after = State.of(self._model, self._second)
                    self._compare_state(start, between, after)
        finally:
            with ExitStack() as stack:  # each, whatever the others raise; the last comes first
                stack.callback(self._random.put_back)
                stack.callback(self._memory.put_back)
                stack.callback(self._before.put_back)
                if self._device.type == "cuda":  # the model may have used streams of its own
                    torch.cuda.synchronize(self._device)
        model = self._model
        name = getattr(model, "__qualname__", None) or type(model).__name__
        return Diagnosis.of(name, str(self._device), self._notes)

    def _runs(self, call: Call) -> bool:
        """Run the model; an error of its own is a finding."""
        watch = Watch(self._case)
        self._ran.append(watch.ran)
        try:
            with allow_capture(False), watch:
                _call(self._model, call)
        except Exception as error:
            if isinstance(error, TypeError):  # perhaps of the call, and not of what is in it
                check_arguments(self._model, *call)
            line = raised_at(error, _call.__code__)
            known = any(each.source == line for each in self._notes if line is not None)
            if not (known and self._device.type == "meta"):  # which cannot be read at all
                again = " in the second of two calls" if self._notes.closed else ""
                text = f"{type(error).__name__}{again}: {error}".strip().splitlines()[0]
                kind = "inference_tensor" if is_of_inference_tensors(error) else "forward_raised"
                self._notes.add(kind, type(error).__name__, text, line)
            return False
        return True

    def _compare_state(self, start: State, between: State, after: State) -> None:
        each_call = {change.place.key for change in changes(between, after)}
        for change in changes(between, after):
            kind, text = _what_changed(change)
            self._add(kind, text, change, self._ran[-1])
        for change in changes(start, between):
            place = change.place
            if place.key not in each_call and place.path.startswith("self.") and place.attribute:
                self._add("lazy_attribute", "the first call sets it", change, self._ran[0])

    def _add(self, kind: str, text: str, change: Change, ran: set[CodeType]) -> None:
        line = _store_line(change.place, self._model, ran) or forward_line(self._model)
        self._notes.add(kind, change.place.path, text, line)


def _store_line(place: Place, model: Any, ran: set[CodeType]) -> Line | None:
    """Return the first user line that assigns an attribute, else the first that names it.

    Read from the source of what ran: methods of its owner, then the model's forward, then the rest.
    """
    kinds = [vars(kind).items() for kind in type(place.owner).__mro__]
    methods = [method for items in kinds for name, method in items if name != "__init__"]
    methods.append(model.forward if isinstance(model, torch.nn.Module) else model)
    own = [getattr(inspect.unwrap(each), "__code__", None) for each in methods if callable(each)]
    rest = sorted(ran - {*own}, key=lambda code: (code.co_filename, code.co_firstlineno))
    codes = [each for each in (*own, *rest) if each in ran and is_users_file(each.co_filename)]
    named = rf"\.{re.escape(place.attribute)}\b"
    for pattern in (rf"{named}.*[^=!<>]=([^=]|$)", named) if place.attribute else ():
        for code in codes:
            with suppress(OSError):  # no source
                lines, first = inspect.getsourcelines(code)
                for number, text in enumerate(lines, first):
                    if re.search(pattern, text):
                        return line_at(code, number)
    return None


def _one_stream() -> int:
    return 0


def _what_changed(change: Change) -> tuple[str, str]:
    """(kind, text) of something that is another one after each call."""
    before, after = change.before, change.after
    if not isinstance(after, torch.Tensor):
        return "changing_attribute", f"it was {before!r} before a call and is {after!r} after it"
    if not isinstance(before, torch.Tensor):
        return "growing_state", f"each call adds a tensor {tuple(after.shape)}"
    if before.shape != after.shape:
        shapes = f"{tuple(before.shape)} before a call and {tuple(after.shape)} after it"
        return "growing_state", f"it was {shapes}: each call has other shapes"
    return "replaced_attribute", "each call puts it at another address"
