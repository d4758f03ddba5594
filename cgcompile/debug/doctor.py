""":class:`Diagnosis`: what :func:`cgcompile.doctor` found, as a value that prints and is JSON.

After the fact: what made a capture fail, from the error or from the counters of a handle.

What can be said of a call before it runs: its arguments, its weights, and the mode it is in.

:func:`doctor`: what will break or cost, found before anything is captured.

The model runs plain, twice, while :mod:`~cgcompile.debug.op_observer` looks on; everything that it
changes is put back. The rules are those of the split (``passes/capturable.py``), of the host
recorder (``graphs/host.py``) and of the registry of boundaries. Read on in ``arguments``,
``state``, ``advice``, and for errors that have happened in ``failures``.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import CompiledModel, check_compilable
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import callers_context
from cgcompile.debug.explanation import Shown
from cgcompile.debug.findings import KINDS, SEVERITIES, Finding, Notes, Way, finding
from cgcompile.debug.op_observer import Case, Watch
from cgcompile.debug.restore import (
    Change,
    Memory,
    Place,
    RandomState,
    State,
    changes,
    uncompile_parts,
)
from cgcompile.debug.subject import original_of
from cgcompile.debug.targets import resolved
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    CGCompileError,
    ConfigError,
    GradientError,
    HostValueChangedError,
    with_article,
)
from cgcompile.graphs.capture import allow_capture
from cgcompile.graphs.cuda import is_unjoined
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.guards import is_plain_value, layout_text, same_value
from cgcompile.graphs.wrapper import CUDAGraphWrapper, devices_of
from cgcompile.passes.nodes import Line, came_by_us, is_users_file, line_at, raised_at
from cgcompile.reasons import EXPECTED, Counters, Reason
from cgcompile.settings import checked, checked_but
from cgcompile.tracing.dynamic_dims import bind_arguments

VERSION = 1  # of to_dict(); a key that goes or changes its meaning makes it another one


@dataclass(frozen=True)
class Diagnosis(Shown):
    """What was found, the worst first; ``print`` it.

    Attributes:
        model: the name of what was looked at.
        device: where a graph of it would be.
        findings: sorted by severity, then in the order in which a call meets them.
    """

    template: ClassVar[str] = "diagnosis"

    model: str
    device: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    @checked
    def of(cls, model: str, device: str, findings: Iterable[Finding]) -> "Diagnosis":
        """Sorted."""
        ordered = sorted(findings, key=lambda each: SEVERITIES.index(each.severity))
        return cls(model, device, tuple(ordered))

    @classmethod
    def of_error(cls, error: BaseException) -> "Diagnosis":
        """Which op made a capture or a replay fail, at which line of the user's, and the fix.

        Args:
            error: what a model, a wrapper or a manager raised; its causes are followed. Of one that
                did not come by cgcompile only the line is told.

        Raises:
            ConfigError: it is no exception.
        """
        if not isinstance(error, BaseException):
            raise ConfigError.bad_value(
                name="error", where="Diagnosis.of_error", value=error, expected="an exception"
            )
        return cls.of(type(error).__name__, "-", [of_error(error)])

    @property
    def ok(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(each.severity == "note" for each in self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(each for each in self.findings if each.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``version``, ``model``, ``device``, ``ok``, ``findings``."""
        return {
            "version": VERSION,
            "model": self.model,
            "device": self.device,
            "ok": self.ok,
            "findings": [each.to_dict() for each in self.findings],
        }

    def __str__(self) -> str:
        start = f"{self.model}:" if self.device == "-" else f"{self.model} on {self.device}:"
        if not self.findings:
            return f"{start} nothing found"
        found = [each.severity for each in self.findings]
        counts = [(name, found.count(name)) for name in SEVERITIES if name in found]
        words = ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts)
        return "\n".join([f"{start} {words}", *map(str, self.findings)])


# What CUDA and torch say where a captured stream would have to be waited for.
_REFUSALS = ("stream is capturing", "streamcapture", "capturing stream")
# What torch says where one is written, or kept for gradients, in another mode; reading is fine.
_INFERENCE = "inference tensor"
_LINE = re.compile(
    r"\((?P<file>[^()\s]+\.py):(?P<line>\d+) in (?P<function>\w+|<\w+>)(?:: (?P<code>.*))?\)"
)
_NAMED_OP = re.compile(r"(?P<op>[\w:.]+(?: with [\w ]+?)?): operation not permitted")

_UNRELATED = (
    "No graph has to do with it: it was raised elsewhere. Mend what it names; it comes without "
    "cgcompile as well."
)
_FIXES = {
    Reason.TOO_MANY_SHAPES: "Pad batches to fewer sizes, or raise max_captured_shapes.",
    Reason.VARYING_NUMBER: "Pass it as a tensor, or let splitting ops alone read it.",
    Reason.TOO_MANY_BINDINGS: "Keep weights and written inputs where they are: pass the same "
    "buffers at each call; or raise max_bindings.",
    Reason.NO_DEVICE: "Put the model on a GPU; for a study on the CPU: capture_device='host'.",
    Reason.CAPTURE_FORBIDDEN: "Capture this shape before capture is closed.",
    Reason.CAPTURE_BUSY: "Capture in one thread at a time.",
    Reason.ATTENTION_SUPPORT: "Say how far the op can go: SplittingOp(..., "
    "support=AttentionCGSupport....); or take cudagraph_mode='PIECEWISE'.",
    Reason.UNLISTED_SIZE: "Pad the batch to one of cudagraph_capture_sizes, or add the size.",
    Reason.INPUT_CHANGED: "Write into the same buffers at each step, or choose "
    "on_input_change='copy' or 'recapture'.",
}


def of_error(error: BaseException) -> Finding:
    """What made an error, the deepest of its causes.

    Args:
        error: with its traceback.
    """
    chain = list(_causes(error))
    deepest = chain[-1]
    found = (raised_at(each) or _named_line(str(each)) for each in reversed(chain))
    line = next((each for each in found if each is not None), None)
    message, _, rest = str(deepest).strip().partition("\n")
    op = getattr(deepest, "op", "") or "-"
    kind = _kind(deepest, op)
    if kind == "capture_failed" and not any(_is_of_graphs(each) for each in chain):
        text = f"{type(deepest).__name__}: {message}" if message else type(deepest).__name__
        return Finding("forward_raised", "error", text, _UNRELATED, op, line)
    made = finding(kind, Way.UNTRACED, op, message or type(deepest).__name__, line)
    ours = isinstance(deepest, CGCompileError) and rest.strip()
    return replace(made, severity="error", fix=" ".join(rest.split()) if ours else made.fix)


def of_handle(handle: Any) -> list[Finding]:
    """What the calls of a handle or of a wrapper could not do, from its counters.

    Args:
        handle: a :class:`cgcompile.Backend` or a :class:`cgcompile.CUDAGraphWrapper`.
    """
    counters: Counters = handle.counters
    rows = counters.plain + counters.degraded
    found = [
        _of_reason(reason, counters.details.get(reason, ""), count)
        for reason, count in rows.items()
        if reason not in EXPECTED
    ]
    return sorted(found, key=lambda each: (-each.count, each.kind))


def is_of_inference_tensors(error: BaseException) -> bool:
    """Whether a tensor made in inference mode was written, or needed for gradients, outside of it.

    Args:
        error: what the model raised.
    """
    return isinstance(error, RuntimeError) and _INFERENCE in str(error).lower()


def name_of(handle: Any) -> str:
    """What a handle or a wrapper is called in a report."""
    return "Backend" if isinstance(handle, Backend) else str(handle.name)


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_of_graphs(error: BaseException) -> bool:
    return isinstance(error, CGCompileError) or came_by_us(error)


def _kind(error: BaseException, op: str) -> str:
    if isinstance(error, GradientError):
        return "gradients"
    if isinstance(error, AddressChangedError):
        return "replaced_attribute" if ": weight '" in str(error) else "moving_input"
    if isinstance(error, HostValueChangedError):
        return "changing_argument"
    if isinstance(error, CaptureError) and op != "-" and "not permitted" in str(error):
        return _kind_of_op(op)
    if isinstance(error, CaptureError) and "inside of torch.func" in str(error):
        return "functorch"
    if is_unjoined(error):
        return "side_stream"
    if is_of_inference_tensors(error):
        return "inference_tensor"
    if any(text in str(error).lower() for text in _REFUSALS):
        return "host_sync"
    return "capture_failed"


def _kind_of_op(op: str) -> str:
    if "generator" in op:
        return "generator"
    found: Any = torch.ops
    for part in op.partition(" ")[0].split("."):
        found = getattr(found, part, None)
    shape = torch.Tag.dynamic_output_shape in getattr(found, "tags", ())
    return "data_dependent_shape" if shape or op.endswith("with a mask") else "host_sync"


def _of_reason(reason: Reason, detail: str, count: int) -> Finding:
    named = _NAMED_OP.search(detail)
    op = named["op"] if named else "-"
    failed = reason is Reason.CAPTURE_FAILED
    kind = _kind_of_op(op) if failed and named else reason.value
    line = _named_line(detail)
    if kind in KINDS:
        made = finding(kind, Way.SPLIT, op, detail, line, severity="break")
        return replace(made, count=count)
    fix = _FIXES.get(reason, "See cgcompile.Reason for what it means.")
    return Finding(kind, "break", detail, fix, op, line, count)


def _named_line(text: str) -> Line | None:
    """The last line of code that a message names, such as ``(model.py:41 in forward)``."""
    found = list(_LINE.finditer(text))
    if not found:
        return None
    last = found[-1]
    return Line(last["file"], int(last["line"]), last["function"], last["code"] or "")


_CPU = torch.device("cpu")


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def prepared(cls, prepare: Callable[[], Any]) -> "Call":
        """What a function that makes inputs gives: a tuple, a dict, both, or one argument."""
        made = prepare()
        if isinstance(made, dict):
            return cls((), made)
        if not isinstance(made, tuple):
            return cls((made,), {})
        both = len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict)
        return cls(*made) if both else cls(made, {})

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(path such as ``input 0['mask']``, leaf) of each argument, containers opened."""
        tops: list[tuple[str, Any]] = [(f"input {i}", each) for i, each in enumerate(self.args)]
        tops += [(f"input {name!r}", each) for name, each in self.kwargs.items()]
        for top, tree in tops:
            for path, leaf in compat.tree_paths(tree):
                yield top + path, leaf


def check_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a model by name.

    Args:
        model: a module, a method or a function.
        args: of the call.
        kwargs: of the call.

    Raises:
        ArgumentsError: it does not take these.
    """
    called = model.forward if isinstance(model, torch.nn.Module) else model
    name = getattr(model, "__qualname__", None) or type(model).__name__
    try:
        signature = inspect.signature(called)
    except ValueError:  # of something that is not written in Python: nobody says
        return dict(kwargs)
    return dict(bind_arguments(name, signature, args, kwargs).arguments)


def forward_line(model: Any) -> Line | None:
    """The line in which the function that a call of a model runs begins, if it is the user's."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return line_at(code, code.co_firstlineno)


def look_at_call(notes: Notes, model: Any, call: Call, device: torch.device, varies: bool) -> None:
    """Findings about arguments and weights.

    Args:
        notes: where they go.
        model: a module or a function.
        call: its arguments.
        device: of the graph.
        varies: a second call will show which numbers change, so that nothing is said of them here.
    """
    source = forward_line(model)
    weights = list(named_weights(model))
    for path, leaf in call.leaves():
        if isinstance(leaf, torch.Tensor):
            _look_at_input(notes, path, leaf, device, source)
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and not varies:
            text = f"it is {leaf!r}: a graph, and a trace, holds the number that it saw"
            notes.add("host_argument", path, text, source)
    away = [(path, each) for path, each in weights if each.device != device]
    if away:
        path, first = away[0]
        kind = "cpu_tensor" if first.device == _CPU else "other_device"
        text = f"{_counted(away)} on {first.device}; a graph of this model is on {device}"
        notes.add(kind, path, text, source)
    _look_at_gradients(notes, [*call.leaves(), *weights], source)


def _look_at_input(
    notes: Notes, path: str, leaf: torch.Tensor, device: torch.device, source: Line | None
) -> None:
    if leaf.layout is not torch.strided or not compat.is_plain_tensor(leaf):
        kind = with_article(type(leaf).__name__)
        text = f"it is {kind} of layout {leaf.layout}, which no graph takes"
        notes.add("unsupported_input", path, text, source)
    elif leaf.device != device and (leaf.dim() or leaf.device != _CPU):
        kind = "cpu_tensor" if leaf.device == _CPU else "other_device"
        text = f"it is on {leaf.device}; a graph of this model is on {device}"
        notes.add(kind, path, text, source)


def _look_at_gradients(notes: Notes, named: Sequence[tuple[str, Any]], source: Line | None) -> None:
    tensors = [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        due = [(path, each) for path, each in tensors if each.requires_grad]
        if due:
            text = f"grad mode is on, and {_counted(due)} requiring grad: steps run without graphs"
            notes.add("gradients", due[0][0], text, source)


def _counted(named: Sequence[tuple[str, Any]]) -> str:
    """``input 0 is`` or ``self.weight and 3 more are``."""
    more = len(named) - 1
    return f"{named[0][0]} and {more} more are" if more else f"{named[0][0]} is"


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module, or of the module of a bound method."""
    module = getattr(model, "__self__", model)
    if isinstance(module, torch.nn.Module):
        yield from module.named_parameters("self")
        yield from module.named_buffers("self")


def compare_calls(
    notes: Notes, model: Any, first: Call, second: Call, memory: Memory, config: CompilationConfig
) -> None:
    """Findings about what differs between two prepared calls.

    Args:
        notes: where they go.
        model: a module or a function.
        first: the call that was run.
        second: made while the first one's inputs still live.
        memory: knows what the first call has written.
        config: says what becomes of inputs that moved.
    """
    source = forward_line(model)
    now = dict(second.leaves())
    if set(now) != set(dict(first.leaves())):
        text = "two calls have arguments of another number, name or nesting"
        notes.add("changing_argument", "the arguments", text, source)
        return
    for path, before in first.leaves():
        after = now[path]
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            _compare_tensors(notes, path, before, after, memory, config, source)
        elif is_plain_value(before) and not same_value(after, before):
            text = f"it is {layout_text(before)} in one call and {layout_text(after)} in the next"
            notes.add("changing_argument", path, text, source)


def _compare_tensors(
    notes: Notes,
    path: str,
    before: torch.Tensor,
    after: torch.Tensor,
    memory: Memory,
    config: CompilationConfig,
    source: Line | None,
) -> None:
    if before.shape != after.shape or before.data_ptr() == after.data_ptr():
        return
    where = f"it is at {before.data_ptr():#x} in one call and at {after.data_ptr():#x} in the next"
    if memory.was_written(before):
        text = f"{where}, and forward writes it: each address has graphs of its own"
        notes.add("rebound_input", path, text, source)
        return
    context = callers_context()
    fixed = context is not None and context.cudagraph_runtime_mode is not CUDAGraphMode.NONE
    strict = fixed and config.on_input_change == "raise"
    notes.add("moving_input", path, where, source, severity="error" if strict else None)


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
