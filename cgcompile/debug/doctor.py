"""Find what CUDA graphs cannot hold, before anything is captured: :func:`doctor`.

The model runs eagerly, twice, while :mod:`~cgcompile.debug.op_observer` observes its ops, and its
state is restored. The rules are those of the split (``passes/assign.py``), of the CPU recorder
(``graphs/host_rules.py``) and of the registry of boundaries. :meth:`Diagnosis.of_error` and the
counters of a handle give the same kinds of finding after a capture.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any, ClassVar

import torch

from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import CompiledModel, check_compilable
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import callers_context
from cgcompile.debug.compare import Call, prepared, require_prepare
from cgcompile.debug.findings import (
    KINDS,
    SEVERITIES,
    Finding,
    Way,
    finding,
    is_of_inference_tensors,
    kind_of,
    kind_of_op,
)
from cgcompile.debug.op_observer import Notes, Watch
from cgcompile.debug.output import sentence
from cgcompile.debug.pages import Page
from cgcompile.debug.restore import Snapshot, State
from cgcompile.debug.subject import (
    check_arguments,
    name_of,
    of_loop,
    original_of,
    recorders_of,
    resolved,
)
from cgcompile.encoder.manager import EncoderCudaGraphManager
from cgcompile.errors import CGCompileError, ConfigError, with_article
from cgcompile.graphs.contract import is_plain_value, layout_text, named_arguments, same_value
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.fields import Item
from cgcompile.graphs.steps import allow_capture
from cgcompile.graphs.wrapper import CUDAGraphWrapper, devices_of
from cgcompile.reasons import EXPECTED, LAST_CALL, Reason
from cgcompile.settings import checked, checked_but, require
from cgcompile.source_lines import Line, came_by_us, is_users_file, line_at, raised_at
from cgcompile.torch_compat import raw_memory, torch_ops

VERSION = 1  # of to_dict(); raised when a key goes or changes its meaning
_ENCODER_FIX = (
    "Keep the value on the device (torch.where in place of a branch, fixed shapes), or compute it "
    "in tables= or offsets= of PatchEncoder, which run before the forward: an encoder graph holds "
    "the whole forward and is not split."
)


@dataclass(frozen=True, repr=False)
class Diagnosis(Page):
    """What was found, the worst first; ``print`` it.

    Attributes:
        model: the name of the model.
        device: where a graph of it would be.
        findings: sorted by severity, then in the order in which a call meets them.

    Example:
        >>> with torch.no_grad():
        ...     found = cgcompile.debug.doctor(nn.Linear(8, 8), torch.randn(4, 8))
        >>> found.ok, found.findings
        (True, ())
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
        ordered = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
        return cls(model, device, tuple(ordered))

    @classmethod
    def of_error(cls, error: BaseException) -> "Diagnosis":
        """Return which op made a capture or a replay fail, at which user line, and the fix.

        Args:
            error: what a model, a wrapper or a manager raised; its causes are followed. Of an error
                that no graph has raised only the line is given.

        Raises:
            ConfigError: it is no exception.
        """
        valid = isinstance(error, BaseException)
        require(valid, "error", "Diagnosis.of_error", error, "an exception")
        return cls.of(type(error).__name__, "-", [_of_error(error)])

    @property
    def ok(self) -> bool:
        """Whether all findings are notes."""
        return all(finding.severity == "note" for finding in self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)

    def __str__(self) -> str:
        start = f"{self.model}:" if self.device == "-" else f"{self.model} on {self.device}:"
        if not self.findings:
            return f"{start} nothing found"
        severities = [finding.severity for finding in self.findings]
        counts = [(name, severities.count(name)) for name in SEVERITIES if name in severities]
        words = ", ".join(f"{n} {name}{'s' if n > 1 else ''}" for name, n in counts)
        return "\n".join([f"{start} {words}", *map(str, self.findings)])


@checked_but("config", "prepare")
def doctor(
    model: Any,
    *args: Any,
    config: CompilationConfig | Backend | Mapping[str, Any] | None = None,
    prepare: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> Diagnosis:
    """Find what graphs cannot hold in one call of a model, with your source lines and the fixes.

    The call runs eagerly, twice, on the device where the tensors are and in the grad mode, autocast
    and forward context of the caller; nothing is captured, and compiled parts run uncompiled (a
    class whose ``forward`` is decorated with ``cgcompile.compile`` is reported as an error of the
    trace). While the model calls a decorated function of ``torch.compile``, all threads run
    uncompiled, as torch has one switch for it. Tensors that the call writes, attributes, containers
    and random generators that are reachable from the model and the arguments are restored, bitwise.
    Neither seen nor restored: what a kernel writes that torch does not know (a Triton kernel or an
    extension called directly), and state in globals. Where a Python profiler is active, calls that
    reach no op (``torch.cuda.synchronize``) are not seen. Takes the time of two plain calls, and
    memory for what is written. Synchronises. :func:`cgcompile.explain` shows the split.

    Args:
        model: a module or function, compiled or not; or, without arguments, a ``Backend`` or a
            wrapper that has run, whose counters are explained.
        *args: of one call.
        config: the settings that the model will be compiled with, a ``Backend``, or a mapping as
            for ``options``; its splitting ops run eager and are not judged. Left out: those of a
            compiled model, else the defaults.
        prepare: makes the inputs of a call, in place of ``args``: a tuple, a dict, or ``(tuple,
            dict)``. Called twice, to find inputs that move or change.
        **kwargs: of the call.

    Returns:
        The findings, the worst first. An error that the model raises is one of them.

    Raises:
        ConfigError: something that is no model, settings or ``prepare`` that cannot be.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.

    Example:
        >>> with torch.no_grad():
        ...     found = cgcompile.debug.doctor(lambda x: x * x.max().item(), torch.randn(4))
        >>> found.ok
        False
    """
    model = of_loop(model)
    is_wrapper = isinstance(model, CUDAGraphWrapper)
    handle: Any = model if is_wrapper or isinstance(model, Backend) else handle_of(model)
    if handle is not None and not (args or kwargs or prepare):
        name = "Backend" if isinstance(handle, Backend) else str(handle.name)
        return Diagnosis.of(name, "-", _of_counters(handle))
    _check_model(model)
    require_prepare("doctor", prepare, args, kwargs)
    if config is None and is_wrapper:
        settings = handle.config
    else:
        settings = resolved(handle_of(model) if config is None else config, "doctor")
    first = (args, kwargs) if prepare is None else prepared(prepare)
    second = first if prepare is None else prepared(prepare)
    return _Examination(model, settings, first, second).run(compare=prepare is not None)


def _check_model(model: Any) -> None:
    """Raise unless there is a function to call; any other callable is taken as one."""
    if isinstance(model, EncoderCudaGraphManager):
        raise ConfigError.impossible(
            what="doctor() of an encoder manager",
            because="it examines one call of a function",
            instead="Give the forward of the encoder and the buffers of one graph: "
            "doctor(forward, manager.graph_inputs(GraphKey('default', budget))).",
        )
    if isinstance(model, type) or not callable(original_of(model)):
        check_compilable(model, "doctor")


# ---------------------------------------------------------------- after the fact

_LINE = re.compile(
    r"\((?P<file>[^()\s]+\.py):(?P<line>\d+) in (?P<function>\w+|<\w+>)(?:: (?P<code>.*))?\)"
)
_NAMED_OP = re.compile(r"(?P<op>[\w:.]+(?: with [\w ]+?)?): operation not permitted")
_UNRELATED = (
    "The error was raised outside of cgcompile and also occurs without graphs. Fix its cause."
)


def _of_error(error: BaseException) -> Finding:
    """Return the finding that explains an error, by the deepest of its causes."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    deepest = chain[-1]
    lines = (raised_at(cause) or _named_line(str(cause)) for cause in reversed(chain))
    line = next((line for line in lines if line is not None), None)
    message, _, advice = str(deepest).strip().partition("\n")
    name, op = type(deepest).__name__, getattr(deepest, "op", "") or "-"
    kind = kind_of(deepest)
    ours = any(isinstance(cause, CGCompileError) or came_by_us(cause) for cause in chain)
    if kind == "capture_failed" and not ours:
        text = f"{name}: {message}" if message else name
        return Finding("forward_raised", "error", text, _UNRELATED, op, line)
    result = finding(Way.UNTRACED, kind, op, message or name, line, "error")
    if isinstance(deepest, CGCompileError) and advice.strip():
        return replace(result, fix=" ".join(advice.split()))
    return result


def _of_counters(handle: Backend | CUDAGraphWrapper) -> list[Finding]:
    """Return findings from the counters of a handle or of a wrapper, the most frequent first."""
    counters, result = handle.counters, []
    owners = dict.fromkeys([handle, *recorders_of(handle, "doctor")])
    for timeline in [owner.timeline for owner in owners]:
        if timeline.live.failures:
            text, line = f"the last: {timeline.last_failure}", _named_line(timeline.last_failure)
            failed = finding(Way.SPLIT, "call_failed", "-", text, line)
            result.append(replace(failed, count=timeline.live.failures))
    for reason, count in (counters.plain + counters.degraded).items():
        if reason in EXPECTED:
            continue
        detail = counters.details.get(reason, "")
        cause = detail.partition(LAST_CALL)[0]
        named, line = _NAMED_OP.search(cause), _named_line(cause)
        op = named["op"] if named else "-"
        kind = kind_of_op(op) if named and reason is Reason.CAPTURE_FAILED else reason.value
        if kind in KINDS:
            fallback = finding(Way.SPLIT, kind, op, detail, line, "break")
            result.append(replace(fallback, count=count))
        else:
            result.append(Finding(kind, "break", detail, sentence(reason.remedy), op, line, count))
    return sorted(result, key=lambda finding: (-finding.count, finding.kind))


def _named_line(text: str) -> Line | None:
    """Return the last line of code that a message names, such as ``(model.py:41 in forward)``."""
    lines = list(_LINE.finditer(text))
    if not lines:
        return None
    last = lines[-1]
    return Line(last["file"], int(last["line"]), last["function"], last["code"] or "")


# ---------------------------------------------------------------- one examination

_CPU = torch.device("cpu")


def _leaves(call: Call) -> list[tuple[str, Any]]:
    """Return (path such as ``input 0['mask']``, leaf) of the arguments, containers opened."""
    arguments = [(top, torch_ops.tree_paths(tree)) for top, tree in named_arguments(*call)]
    return [(top + path, leaf) for top, paths in arguments for path, leaf in paths]


def _call(model: Any, call: Call) -> Any:
    """Call the model; lines of the callers of this function are not the model's."""
    return model(*call[0], **call[1])


def _in_encoder(entry: Finding) -> Finding:
    """Return the finding with a fix for encoder graphs, which are not split."""
    splits = "eager_region" in entry.fix or "eager_break" in entry.fix or "splitting" in entry.fix
    return replace(entry, fix=_ENCODER_FIX) if splits else entry


class _Examination:
    """Examine one model: its arguments, two plain calls, and the state that they change."""

    def __init__(self, model: Any, config: CompilationConfig, first: Call, second: Call) -> None:
        self._model = original_of(model)
        self._source = _forward_line(self._model)
        self._config = config
        self._first, self._second = first, second
        if isinstance(model, CUDAGraphWrapper) or config.splitting == "breakable":
            way = Way.UNTRACED
        else:
            way = Way.WHOLE if isinstance(model, CompiledModel) else Way.SPLIT
        self._notes = Notes(way, _call.__code__)
        self._device = devices_of(getattr(self._model, "__self__", self._model), *first)[0]
        self._before = State(self._model, first, second)
        self._snapshot = Snapshot(self._before.tensors)
        captures = capture_device(self._device, config.capture_device)
        self._watch = partial(
            Watch,
            self._notes,
            Boundaries(config.splitting_ops),
            self._device,
            self._snapshot,
            captures.stream_key if captures is not None else lambda: 0,
        )

    def run(self, *, compare: bool) -> Diagnosis:
        """Examine the arguments, run the model twice, compare, and restore everything."""
        self._examine_inputs(varies=compare)
        try:
            self._before.uncompile()
            start = State(self._model, self._first, self._second)
            ran = self._run(self._first)
            if ran is not None:
                between = State(self._model, self._second)
                self._notes.muted += 1  # the second call is observed for its changes alone
                if compare:
                    self._compare_calls()
                ran_second = self._run(self._second, " in the second of two calls")
                if ran_second is not None:
                    self._compare_state(start, between, ran, ran_second)
        finally:
            with ExitStack() as stack:  # all run, also if one raises; the last one first
                stack.callback(self._snapshot.restore)
                stack.callback(self._before.restore)
                if self._device.type == "cuda":  # the model may have used streams of its own
                    torch.cuda.synchronize(self._device)
        findings = list(self._notes)
        if getattr(self._model, "__name__", "") == "encoder_cudagraph_forward":
            findings = list(map(_in_encoder, findings))
        return Diagnosis.of(name_of(self._model), str(self._device), findings)

    def _run(self, call: Call, which: str = "") -> set[CodeType] | None:
        """Run the model and return the code that ran; None after an error, which is noted."""
        watch, seed = self._watch(), torch.initial_seed()
        try:
            with allow_capture(False), watch.observing():
                _call(self._model, call)
        except Exception as error:
            if isinstance(error, TypeError):  # perhaps of the call, and not of what is in it
                check_arguments(self._model, *call)
            line = raised_at(error, _call.__code__)
            known = line is not None and any(note.source == line for note in self._notes)
            if not (known and self._device.type == "meta"):  # which cannot be read at all
                kind = "inference_tensor" if is_of_inference_tensors(error) else "forward_raised"
                name = type(error).__name__
                text = f"{name}{which}: {error}".strip().splitlines()[0]
                self._notes.add(kind, name, text, line)
            return None
        if torch.initial_seed() != seed:
            self._add("generator", "torch.manual_seed", "the seed changes, and a replay sets none")
        return watch.ran

    def _add(self, kind: str, about: str, text: str, severity: str | None = None) -> None:
        """Add a note about the call as a whole."""
        self._notes.add(kind, about, text, self._source, severity)

    def _examine_inputs(self, *, varies: bool) -> None:
        """Add notes about arguments and weights; numbers are compared later if they vary."""
        leaves = _leaves(self._first)
        weights: list[tuple[str, torch.Tensor]] = []
        module = getattr(self._model, "__self__", self._model)
        if isinstance(module, torch.nn.Module):
            weights = [*module.named_parameters("self"), *module.named_buffers("self")]
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._examine_tensor(path, leaf)
            elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool) and not varies:
                text = f"it is {leaf!r}: a graph, and a trace, holds the number that it saw"
                self._add("host_argument", path, text)
        away = [(path, weight) for path, weight in weights if weight.device != self._device]
        if away:
            self._add_elsewhere(away[0][0], _counted(away), away[0][1].device)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            tensors = [(p, leaf) for p, leaf in leaves if isinstance(leaf, torch.Tensor)] + weights
            due = [(path, tensor) for path, tensor in tensors if tensor.requires_grad]
            if due:
                text = f"grad mode is on, and {_counted(due)} requiring grad"
                self._add("gradients", due[0][0], f"{text}: steps run without graphs")

    def _examine_tensor(self, path: str, leaf: torch.Tensor) -> None:
        if not raw_memory.is_plain_tensor(leaf):
            kind = with_article(type(leaf).__name__)
            text = f"it is {kind} of layout {leaf.layout}, which no graph takes"
            self._add("unsupported_input", path, text)
        elif leaf.device != self._device and (leaf.dim() or leaf.device != _CPU):
            self._add_elsewhere(path, "it is", leaf.device)

    def _add_elsewhere(self, path: str, start: str, device: torch.device) -> None:
        kind = "cpu_tensor" if device == _CPU else "other_device"
        text = f"{start} on {device}; a graph of this model is on {self._device}"
        self._add(kind, path, text)

    # -------------------------------------------------------------- between and after the calls

    def _compare_calls(self) -> None:
        """Add notes about what differs between the arguments of two prepared calls."""
        before, after = dict(_leaves(self._first)), dict(_leaves(self._second))
        if set(after) != set(before):
            text = "two calls have arguments of another number, name or nesting"
            self._add("changing_argument", "the arguments", text)
            return
        for path, old in before.items():
            new = after[path]
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                self._compare_tensors(path, old, new)
            elif is_plain_value(old) and not same_value(new, old):
                values = f"{layout_text(old)} in one call and {layout_text(new)} in the next"
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

    def _compare_state(
        self, start: State, between: State, ran: set[CodeType], ran_second: set[CodeType]
    ) -> None:
        """Add notes about attributes that each call, or the first one, replaces."""
        each_call = set()
        for before, held in between.changes(State(self._model, self._second)):
            each_call.add(held.key)
            kind, text = _what_changed(before, held.value)
            self._add_change(kind, text, held, ran_second)
        for _, held in start.changes(between):
            if held.key not in each_call and held.path.startswith("self.") and held.attribute:
                self._add_change("lazy_attribute", "the first call sets it", held, ran)

    def _add_change(self, kind: str, text: str, held: Item, ran: set[CodeType]) -> None:
        line = _store_line(held, self._model, ran) or self._source
        self._notes.add(kind, held.path, text, line)


def _counted(named: Sequence[tuple[str, Any]]) -> str:
    """Return ``input 0 is`` or ``self.weight and 3 more are``."""
    more = len(named) - 1
    return f"{named[0][0]} and {more} more are" if more else f"{named[0][0]} is"


def _forward_line(model: Any) -> Line | None:
    """Return the first line of the function that a call of a model runs, if it is the user's."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return line_at(code, code.co_firstlineno)


def _store_line(held: Item, model: Any, ran: set[CodeType]) -> Line | None:
    """Return the first user line that assigns an attribute, else the first that names it.

    Read from the source of what ran: methods of its owner, then the model's forward, then the rest.
    """
    kinds = [vars(kind).items() for kind in type(held.owner).__mro__]
    methods = [method for items in kinds for name, method in items if name != "__init__"]
    methods.append(model.forward if isinstance(model, torch.nn.Module) else model)
    own = [
        getattr(inspect.unwrap(method), "__code__", None) for method in methods if callable(method)
    ]
    rest = sorted(ran - {*own}, key=lambda code: (code.co_filename, code.co_firstlineno))
    codes = [code for code in (*own, *rest) if code in ran and is_users_file(code.co_filename)]
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
