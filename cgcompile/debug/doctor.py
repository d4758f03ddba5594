"""What will break or cost in CUDA graphs, before anything is captured: :func:`doctor`.

The model runs plain, twice, while :mod:`~cgcompile.debug.op_observer` observes its ops, and all
that it changes is restored. The rules are those of the split (``passes/capturable.py``), of the
host recorder (``graphs/host.py``) and of the registry of boundaries. After the fact,
:meth:`Diagnosis.of_error` and the counters of a handle name the same kinds of finding.
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
from cgcompile.debug.findings import KINDS, SEVERITIES, Finding, Notes, Way, finding
from cgcompile.debug.op_observer import Case, Watch
from cgcompile.debug.output import Page
from cgcompile.debug.restore import Held, Snapshot, State
from cgcompile.debug.subject import original_of, resolved
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

VERSION = 1  # of to_dict(); raised when a key goes or changes its meaning


@dataclass(frozen=True)
class Diagnosis(Page):
    """What was found, the worst first; ``print`` it.

    Attributes:
        model: the name of what was looked at.
        device: where a graph of it would be.
        findings: sorted by severity, then in the order in which a call meets them.
    """

    template: ClassVar[str] = "diagnosis"
    computed: ClassVar[tuple[str, ...]] = ("version", "ok")
    version: ClassVar[int] = VERSION

    model: str
    device: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    @checked
    def of(cls, model: str, device: str, findings: Iterable[Finding]) -> "Diagnosis":
        """Return a diagnosis with sorted findings."""
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
        """Return the findings of one kind."""
        return tuple(each for each in self.findings if each.kind == kind)

    def __str__(self) -> str:
        start = f"{self.model}:" if self.device == "-" else f"{self.model} on {self.device}:"
        if not self.findings:
            return f"{start} nothing found"
        result = [each.severity for each in self.findings]
        counts = [(name, result.count(name)) for name in SEVERITIES if name in result]
        words = ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts)
        return "\n".join([f"{start} {words}", *map(str, self.findings)])


# What CUDA and torch say where a captured stream would have to be waited for.
_REFUSALS = ("stream is capturing", "streamcapture", "capturing stream")
# In torch's error where one is written, or kept for gradients, in another mode; reading is fine.
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
    """Return the finding that explains an error, by the deepest of its causes."""
    chain = list(_causes(error))
    deepest = chain[-1]
    value = (raised_at(each) or _named_line(str(each)) for each in reversed(chain))
    line = next((each for each in value if each is not None), None)
    message, _, rest = str(deepest).strip().partition("\n")
    op = getattr(deepest, "op", "") or "-"
    kind = _kind(deepest, op)
    if kind == "capture_failed" and not any(
        isinstance(e, CGCompileError) or came_by_us(e) for e in chain
    ):
        text = f"{type(deepest).__name__}: {message}" if message else type(deepest).__name__
        return Finding("forward_raised", "error", text, _UNRELATED, op, line)
    result = finding(
        kind, Way.UNTRACED, op, message or type(deepest).__name__, line, severity="error"
    )
    has_fix = isinstance(deepest, CGCompileError) and rest.strip()
    return replace(result, fix=" ".join(rest.split())) if has_fix else result


def of_handle(handle: Any) -> list[Finding]:
    """Return findings from the counters of a handle or of a wrapper."""
    counters: Counters = handle.counters
    rows = counters.plain + counters.degraded
    result = [
        _of_reason(reason, counters.details.get(reason, ""), count)
        for reason, count in rows.items()
        if reason not in EXPECTED
    ]
    return sorted(result, key=lambda each: (-each.count, each.kind))


def is_of_inference_tensors(error: BaseException) -> bool:
    """Return whether a tensor of inference mode was written, or needed for gradients, outside."""
    return isinstance(error, RuntimeError) and _INFERENCE in str(error).lower()


def _causes(error: BaseException) -> Iterator[BaseException]:
    result: BaseException | None = error
    while result is not None:
        yield result
        result = result.__cause__


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
    result: Any = torch.ops
    for part in op.partition(" ")[0].split("."):
        result = getattr(result, part, None)
    shape = torch.Tag.dynamic_output_shape in getattr(result, "tags", ())
    return "data_dependent_shape" if shape or op.endswith("with a mask") else "host_sync"


def _of_reason(reason: Reason, detail: str, count: int) -> Finding:
    named = _NAMED_OP.search(detail)
    op = named["op"] if named else "-"
    failed = reason is Reason.CAPTURE_FAILED
    kind = _kind_of_op(op) if failed and named else reason.value
    line = _named_line(detail)
    if kind in KINDS:
        return replace(finding(kind, Way.SPLIT, op, detail, line, severity="break"), count=count)
    fix = _FIXES.get(reason, "See cgcompile.Reason for what it means.")
    return Finding(kind, "break", detail, fix, op, line, count)


def _named_line(text: str) -> Line | None:
    """Return the last line of code that a message names, such as ``(model.py:41 in forward)``."""
    result = list(_LINE.finditer(text))
    if not result:
        return None
    last = result[-1]
    return Line(last["file"], int(last["line"]), last["function"], last["code"] or "")


_CPU = torch.device("cpu")


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def prepared(cls, prepare: Callable[[], Any]) -> "Call":
        """Return what a function makes as inputs: a tuple, a dict, both, or one argument."""
        output = prepare()
        if isinstance(output, dict):
            return cls((), output)
        if not isinstance(output, tuple):
            return cls((output,), {})
        both = len(output) == 2 and isinstance(output[0], tuple) and isinstance(output[1], dict)
        return cls(*output) if both else cls(output, {})

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield (path such as ``input 0['mask']``, leaf) of each argument, containers opened."""
        tops: list[tuple[str, Any]] = [(f"input {i}", each) for i, each in enumerate(self.args)]
        tops += [(f"input {name!r}", each) for name, each in self.kwargs.items()]
        for top, tree in tops:
            for path, leaf in compat.tree_paths(tree):
                yield top + path, leaf


def check_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a model by name."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    name = getattr(model, "__qualname__", None) or type(model).__name__
    try:
        signature = inspect.signature(called)
    except ValueError:  # it is not written in Python
        return dict(kwargs)
    return dict(bind_arguments(name, signature, args, kwargs).arguments)


def forward_line(model: Any) -> Line | None:
    """Return the first line of the function that a call of a model runs, if it is the user's."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return line_at(code, code.co_firstlineno)


def _counted(named: Sequence[tuple[str, Any]]) -> str:
    """Return ``input 0 is`` or ``self.weight and 3 more are``."""
    more = len(named) - 1
    return f"{named[0][0]} and {more} more are" if more else f"{named[0][0]} is"


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, or of the module of a bound method."""
    module = getattr(model, "__self__", model)
    if isinstance(module, torch.nn.Module):
        yield from module.named_parameters("self")
        yield from module.named_buffers("self")


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
    not one of its parts, such as a decorated one, all threads run uncompiled until it returns, as
    torch has one switch for it. Tensors that the call writes, attributes, containers and random
    generators that it reaches from the model and the arguments are restored, bitwise. Not seen, and
    not restored: what a kernel writes that torch does not know (a Triton kernel or an extension
    called directly), and state in globals. Where a Python profiler is active, calls that reach no
    op (``torch.cuda.synchronize``) are not seen. Takes the time of two plain calls, and memory for
    what is written. Synchronises. :func:`cgcompile.explain` shows what the split makes of it.

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
    own_counters = isinstance(model, (Backend, CUDAGraphWrapper))
    handle = model if own_counters else handle_of(model)
    if handle is not None and not (args or kwargs or prepare):
        name = "Backend" if isinstance(handle, Backend) else str(handle.name)
        return Diagnosis.of(name, "-", of_handle(handle))
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


def _settings(model: Any, inputs: Any) -> CompilationConfig:
    if inputs is None and isinstance(model, CUDAGraphWrapper):
        return model.config
    return resolved(inputs if inputs is not None else handle_of(model), "doctor")


def _way(model: Any, config: CompilationConfig) -> Way:
    untraced = isinstance(model, CUDAGraphWrapper) or config.splitting == "breakable"
    if untraced:
        return Way.UNTRACED
    return Way.WHOLE if isinstance(model, CompiledModel) else Way.SPLIT


def _call(model: Any, call: Call) -> Any:
    """Call the model, here alone: lines of the callers of this function are not the model's."""
    return model(*call.args, **call.kwargs)


class _Examination:
    """Looks at one model: at its arguments, at two plain calls, and at what they leave."""

    def __init__(self, model: Any, config: CompilationConfig, first: Call, second: Call) -> None:
        self._model = original_of(model)
        self._source = forward_line(self._model)
        self._config = config
        self._first, self._second = first, second
        self._notes = Notes(_way(model, config), _call.__code__)
        self._device = devices_of(getattr(self._model, "__self__", self._model), *first)[0]
        self._before = State.of(self._model, first, second)
        self._snapshot = Snapshot(self._before.tensors)
        ops, builtin = config.splitting_ops, config.builtin_splitting_ops
        device = capture_device(self._device, config.capture_device)
        self._case = Case(
            self._notes,
            Boundaries(ops, builtin=builtin),
            self._device,
            self._snapshot,
            device.stream_key if device is not None else lambda: 0,
        )
        self._ran: list[set[CodeType]] = []  # of each call

    def run(self, *, compare: bool) -> Diagnosis:
        """Look at the arguments, run the model twice, compare, and restore everything."""
        self._look_at_call(varies=compare)
        try:
            self._before.uncompile()
            start = State.of(self._model, self._first, self._second)
            if self._runs(self._first):
                between = State.of(self._model, self._second)
                self._notes.closed = True
                if compare:
                    self._compare_calls()
                if self._runs(self._second):
                    after = State.of(self._model, self._second)
                    self._compare_state(start, between, after)
        finally:
            with ExitStack() as stack:  # each, whatever the others raise; the last comes first
                stack.callback(self._snapshot.restore)
                stack.callback(self._before.restore)
                if self._device.type == "cuda":  # the model may have used streams of its own
                    torch.cuda.synchronize(self._device)
        name = getattr(self._model, "__qualname__", None) or type(self._model).__name__
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

    def _add(self, kind: str, about: str, text: str, severity: str | None = None) -> None:
        """Add a finding about the call as a whole."""
        self._notes.add(kind, about, text, self._source, severity=severity)

    # -------------------------------------------------------------- before the calls

    def _look_at_call(self, *, varies: bool) -> None:
        """Add findings about arguments and weights; numbers are compared later if they vary."""
        weights, leaves = list(named_weights(self._model)), list(self._first.leaves())
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._look_at_input(path, leaf)
            elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and not varies:
                text = f"it is {leaf!r}: a graph, and a trace, holds the number that it saw"
                self._add("host_argument", path, text)
        away = [(path, weight) for path, weight in weights if weight.device != self._device]
        if away:
            device = away[0][1].device
            text = f"{_counted(away)} on {device}; a graph of this model is on {self._device}"
            self._add(self._kind_of_device(device), away[0][0], text)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            tensors = [(p, leaf) for p, leaf in leaves if isinstance(leaf, torch.Tensor)] + weights
            due = [(path, tensor) for path, tensor in tensors if tensor.requires_grad]
            if due:
                text = f"grad mode is on, and {_counted(due)} requiring grad"
                self._add("gradients", due[0][0], f"{text}: steps run without graphs")

    def _look_at_input(self, path: str, leaf: torch.Tensor) -> None:
        if not compat.is_plain_tensor(leaf):
            kind = with_article(type(leaf).__name__)
            text = f"it is {kind} of layout {leaf.layout}, which no graph takes"
            self._add("unsupported_input", path, text)
        elif leaf.device != self._device and (leaf.dim() or leaf.device != _CPU):
            text = f"it is on {leaf.device}; a graph of this model is on {self._device}"
            self._add(self._kind_of_device(leaf.device), path, text)

    def _kind_of_device(self, device: torch.device) -> str:
        return "cpu_tensor" if device == _CPU else "other_device"

    # -------------------------------------------------------------- between and after them

    def _compare_calls(self) -> None:
        """Add findings about what differs between the arguments of two prepared calls."""
        now = dict(self._second.leaves())
        if set(now) != set(dict(self._first.leaves())):
            text = "two calls have arguments of another number, name or nesting"
            self._add("changing_argument", "the arguments", text)
            return
        for path, before in self._first.leaves():
            after = now[path]
            if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
                self._compare_tensors(path, before, after)
            elif is_plain_value(before) and not same_value(after, before):
                values = f"{layout_text(before)} in one call and {layout_text(after)} in the next"
                self._add("changing_argument", path, f"it is {values}")

    def _compare_tensors(self, path: str, before: torch.Tensor, after: torch.Tensor) -> None:
        one, other = before.data_ptr(), after.data_ptr()
        if before.shape != after.shape or one == other:
            return
        text = f"it is at {one:#x} in one call and at {other:#x} in the next"
        if self._snapshot.was_written(before):
            text = f"{text}, and forward writes it: each address has graphs of its own"
            self._add("rebound_input", path, text)
            return
        context = callers_context()
        fixed = context is not None and context.cudagraph_runtime_mode is not CUDAGraphMode.NONE
        strict = fixed and self._config.on_input_change == "raise"
        self._add("moving_input", path, text, "error" if strict else None)

    def _compare_state(self, start: State, between: State, after: State) -> None:
        each_call = set()
        for before, held in between.changes(after):
            each_call.add(held.key)
            kind, text = _what_changed(before, held.value)
            self._add_change(kind, text, held, self._ran[-1])
        for _, held in start.changes(between):
            if held.key not in each_call and held.path.startswith("self.") and held.attribute:
                self._add_change("lazy_attribute", "the first call sets it", held, self._ran[0])

    def _add_change(self, kind: str, text: str, held: Held, ran: set[CodeType]) -> None:
        line = _store_line(held, self._model, ran) or self._source
        self._notes.add(kind, held.path, text, line)


def _store_line(held: Held, model: Any, ran: set[CodeType]) -> Line | None:
    """Return the first user line that assigns an attribute, else the first that names it.

    Read from the source of what ran: methods of its owner, then the model's forward, then the rest.
    """
    kinds = [vars(kind).items() for kind in type(held.owner).__mro__]
    methods = [method for items in kinds for name, method in items if name != "__init__"]
    methods.append(model.forward if isinstance(model, torch.nn.Module) else model)
    own = [getattr(inspect.unwrap(each), "__code__", None) for each in methods if callable(each)]
    rest = sorted(ran - {*own}, key=lambda code: (code.co_filename, code.co_firstlineno))
    codes = [each for each in (*own, *rest) if each in ran and is_users_file(each.co_filename)]
    named = rf"\.{re.escape(held.attribute)}\b"
    for pattern in (rf"{named}.*[^=!<>]=([^=]|$)", named) if held.attribute else ():
        for code in codes:
            with suppress(OSError):  # no source
                lines, first = inspect.getsourcelines(code)
                for number, text in enumerate(lines, first):
                    if re.search(pattern, text):
                        return line_at(code, number)
    return None


def _what_changed(before: Any, after: Any) -> tuple[str, str]:
    """Return (kind, text) of a value that each call replaces."""
    if not isinstance(after, torch.Tensor):
        return "changing_attribute", f"it was {before!r} before a call and is {after!r} after it"
    if not isinstance(before, torch.Tensor):
        return "growing_state", f"each call adds a tensor {tuple(after.shape)}"
    if before.shape != after.shape:
        shapes = f"{tuple(before.shape)} before a call and {tuple(after.shape)} after it"
        return "growing_state", f"it was {shapes}: each call has other shapes"
    return "replaced_attribute", "each call puts it at another address"
