"""Fast paths: the shortest checked replay of a step, as one generated function.

An engine repeats a few steps, each under a new forward context. After a replay, :class:`FastPaths`
keeps a function that checks a call and replays the step. There are two kinds of the same generator,
:func:`_source`: one for the inputs of a compiled graph (:class:`GraphFastPath`), and one for the
arguments of a model traced without guards. Where the Python around its graph only reads sizes,
arguments of the same layouts at the same addresses give the graph the same inputs, so it compares
arguments and skips that Python::

    def step(args, kwargs):
        ...                                             # which context, which step
        if len(args) != 2 or kwargs:
            return not_served
        (v2, v3,) = args
        ...                                             # what else ``fits`` checks
        (out_0,) = reused.tensors
        if not alike(v2, v3, out_0) or v2.data_ptr() != at_1 or ...:
            ...
        with lock:
            ...
            replay()
            ...
            return out_0

The rule: where a check fails, the function returns ``not_served``, which is :data:`NOT_SERVED`, and
the full path decides. Steps that need more (copied inputs, another policy than
``on_input_change="raise"``, an override of replays) get no fast path, so they add no checks here.
"""

import logging
import textwrap
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile.context import ENTERED, ENTERED_NAMES, ForwardContext, callers_context
from cgcompile.errors import CaptureError, GuardError
from cgcompile.graphs.contract import function_of
from cgcompile.graphs.device import wait_for_inputs
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import REPLAY_OF_ONE
from cgcompile.graphs.steps import StepLock
from cgcompile.graphs.timeline import Timeline
from cgcompile.locks import owns_lock
from cgcompile.runtime.recording import Recording
from cgcompile.torch_compat import raw_memory, torch_ops, torch_settings

log = logging.getLogger(__name__)

NOT_SERVED = object()  # what a fast path returns for a call that it does not serve

_ATTEMPTS = 16  # at one step, for calls that differ in more than addresses and sizes
_CONTAINERS = (tuple, list, dict, slice)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ArgumentChecks(NamedTuple):
    """The lines of a ``fits`` function in pieces; see ``tracing/argument_guards.py``."""

    variables: list[str]  # of the arguments, positional ones first
    keywords: list[str]  # the names of keyword arguments, in this order; a call may vary the order
    leaves: list[list[str]]  # the lines about each positional argument
    others: list[str]  # the lines about keyword arguments
    objects: list[str]  # the lines that tell tensors from each other and from ``elsewhere``
    settings: list[str]  # the lines about settings of torch
    names: dict[str, Any]  # what the lines refer to
    elsewhere: Iterable[torch.Tensor]  # tensors that the trace reads, and that no argument was


class FastPaths(StepLock):
    """The fast paths of one compiled graph, and the lock under which its steps run."""

    __slots__ = (
        "attempts",
        "by_recording",
        "call",
        "calls",
        "epoch",
        "graph",
        "timeline",
    )

    def __init__(self, timeline: Timeline | None = None) -> None:
        super().__init__()
        self.epoch = object()  # replaced when the fast paths made so far may not run any more
        self.graph: GraphFastPath | None = None  # of the last step; set under the lock
        self.by_recording: dict[Recording, GraphFastPath] = {}  # slow to make
        self.call: Callable[..., Any] | None = None  # of the last call of the model
        self.calls: dict[Hashable, Callable[..., Any]] = {}  # by runtime mode and descriptor
        self.attempts: dict[Hashable, int] = {}
        self.timeline = timeline  # counts their replays

    @property
    def replays(self) -> int:
        """How many replays the fast paths made."""
        return 0 if self.timeline is None else self.timeline.fast_replays

    def refuse_inside(self) -> None:
        """Raise if this thread is running a step."""
        if self.owner == threading.get_ident() and owns_lock(self.lock):
            raise CaptureError.reentered()

    def find_requested(self) -> Callable[..., Any] | None:
        """Return the fast path of the call that the context requests, unless it is the last one."""
        context = callers_context()
        if context is None or self.owner == threading.get_ident():
            return None
        with self.lock:
            call = self.calls.get((context.cudagraph_runtime_mode, context.batch_descriptor))
            if call is self.call:
                return None
            self.call = call or self.call
            return call

    def call_requested(self, context: ForwardContext, *call: Any) -> Any:
        """Run a call by the fast path that its context requests; :data:`NOT_SERVED` without one."""
        fast_path = self.calls.get((context.cudagraph_runtime_mode, context.batch_descriptor))
        if fast_path is None:
            return NOT_SERVED
        self.call = fast_path
        return fast_path(*call)

    def drop(self) -> None:
        """Drop all fast paths. Takes no lock: a garbage collection may call it."""
        self.epoch = object()
        self.graph = self.call = None
        self.by_recording.clear()
        self.calls.clear()
        self.attempts.clear()

    def add(
        self,
        checks: ArgumentChecks,
        python: Callable[[Callable[..., Any]], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: Any,  # the first of ``args`` where no caller passes it
        hooks: Sequence[Any],  # must stay empty
        called: tuple[torch.nn.Module, Any] | None,  # a module, and its forward, which must stay
    ) -> None:
        """Generate the fast path of a call that just ran, if it replayed a recorded step."""
        graph, context = self.graph, callers_context()
        if graph is None or context is None or any(hooks):
            return
        if self.owner == threading.get_ident():
            return  # a call inside of a step has run plain: the step holds the lock
        key = graph.recording.batch.mode, graph.recording.batch.descriptor
        if key != (context.cudagraph_runtime_mode, context.batch_descriptor):
            return
        attempts = self.attempts.get(key, 0)
        if attempts == _ATTEMPTS:
            return
        self.attempts[key] = attempts + 1
        try:
            lines = _CallLines(graph, checks, (*args, *(kwargs[name] for name in checks.keywords)))
            lines.called(hooks, called)
            source, names = _call_source(graph, lines, python, args, kwargs, bound)
        except (_NoFastPath, GuardError):
            return
        except Exception as error:  # the full path serves all calls
            log.warning("no fast path: %s: %s", type(error).__name__, error)
            return
        step = function_of(source, names)
        with self.lock:
            if self.graph is graph:
                self.call = self.calls[key] = step


# Checks which step the context requests; ``other`` is returned for another one.
_CONTEXT = (
    ENTERED
    + """\
wanted = context.batch_descriptor
if context.cudagraph_runtime_mode is not mode or wanted is not descriptor and wanted != descriptor:
    return {other}
if step_thread.ident != thread and step_thread.ident:
    return not_served
if paths.owner == thread or grad_is_on() or capturing() or {forward}:
    return not_served
if kernel_settings() != settings:
    return not_served
"""
)


def _source(
    signature: str, before: str, inside: str, inputs: str | None, result: str, other: str
) -> str:
    """Return the text of a fast path, of lines ``before`` the lock is taken and ``inside``."""
    # Without ``inputs``, the step is one graph that reads them where they were at capture.
    indent = textwrap.indent
    context = _CONTEXT.format(other=other, forward=torch_ops.FORWARD_GRADIENTS[0])
    run = f"outputs = replay({inputs}, context.num_unpadded_tokens)\n"
    return (
        f"def step({signature}):\n{indent(context + before, ' ' * 4)}"
        "    with lock:\n"
        "        if paths.epoch is not epoch or pool.generation != generation:\n"
        "            return not_served\n"
        "        paths.owner = thread\n"
        "        try:\n"
        "            if context.inputs_ready is not None:\n"
        "                wait(context.inputs_ready, device)\n"
        f"{indent(inside + (REPLAY_OF_ONE if inputs is None else run), ' ' * 12)}"
        "        except BaseException as error:\n"
        "            failed(error)\n"
        "            raise\n"
        "        finally:\n"
        "            paths.owner = 0\n"
        "        timeline.fast_replays += 1\n"
        f"        return {result}\n"
    )


class GraphFastPath:
    """The fast path of a compiled graph for one recording: ``step(inputs)``."""

    __slots__ = ("frozen", "names", "recording", "step", "watches_weights")

    def __init__(
        self,
        paths: FastPaths,
        recording: Recording,
        weight_checks: Sequence[Callable[[tuple[Any, ...]], bool]],  # whether inputs have the same
        frozen: tuple[torch.Tensor, ...],
        pool: GraphPool,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.recording = recording
        self.watches_weights = bool(weight_checks)
        self.frozen = frozen if recording.reads_last(len(frozen)) else ()
        self.names: dict[str, Any] = {  # of both kinds of fast paths; none keeps the graph alive
            **ENTERED_NAMES,
            "not_served": NOT_SERVED,
            "mode": recording.batch.mode,
            "descriptor": recording.batch.descriptor,
            "grad_is_on": torch.is_grad_enabled,
            "forward_ad": torch_ops.FORWARD_GRADIENTS[1],
            "capturing": pool.device.is_capturing,
            "kernel_settings": torch_settings.kernel_settings,
            "settings": recording.settings,
            "pool": pool,
            "step_thread": pool.thread,
            "generation": pool.generation,
            "paths": paths,
            "timeline": paths.timeline,
            "lock": paths.lock,
            "epoch": paths.epoch,
            "wait": wait_for_inputs,
            "device": pool.where,
            "replay": recording.replay,
            "failed": failed,
            "frozen": self.frozen,
        }
        own: dict[str, Any] = {"check": recording.check}
        before = ""
        if recording.context is not None:
            self.names["metadata_holds"] = recording.context.holds
            before += "if not metadata_holds(context):\n    return not_served\n"
        if recording.sequence.watched:
            self.names["dropped"] = recording.sequence.dropped
            before += "if dropped() is not None:\n    return not_served\n"
        for index, check in enumerate(weight_checks):
            own[f"weights_hold_{index}"] = check
            before += f"if not weights_hold_{index}(inputs):\n    return not_served\n"
        inside = "inputs += frozen\n" if self.frozen else ""
        if recording.bound is not None:
            own["holds"] = recording.bound.holds
            inside += "if not holds(inputs):\n    check(inputs)\n"  # which raises
        source = _source("inputs", before, inside, "inputs", "outputs", "not_served")
        self.step = function_of(source, self.names | own)


def _call_source(
    graph: GraphFastPath,
    lines: "_CallLines",
    python: Callable[[Callable[..., Any]], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: Any,
) -> tuple[str, dict[str, Any]]:
    """Return the source of the fast path of a call, and the names that it refers to."""
    if graph.watches_weights:
        raise _NoFastPath  # the full path finds the graphs of other weights
    inputs, result = _around(graph, python, args, kwargs)
    lines.arguments(len(args), list(kwargs), 0 if bound is None else 1, inputs)
    lines.layouts(inputs)
    source = _source(
        "args, kwargs",
        "\n".join(lines.lines) + "\n",
        "",
        lines.inputs(inputs) if lines.one_graph is None else None,
        lines.result(result),
        "paths.call_requested(context, args, kwargs)",
    )
    return source, lines.names


def _around(
    graph: GraphFastPath,
    python: Callable[[Callable[..., Any]], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs of the graph for a call, and the result with marks in place of outputs."""
    calls: list[tuple[Any, ...]] = []
    marks = tuple([_Output(item) for item in range(graph.recording.returned.count)])

    def marked(*inputs: Any) -> tuple[_Output, ...]:
        calls.append(inputs)
        return marks

    result = python(marked)(*args, **kwargs)
    graph.recording.check((*calls[0], *graph.frozen))
    return calls[0], result


class _NoFastPath(Exception):
    """A call has an argument that a fast path cannot compare, or a result it cannot return."""


class _Output(NamedTuple):
    """An output of the graph, in the result of a call."""

    item: int


class _CallLines:
    """The generated lines about the arguments and the result of a call, and their names."""

    def __init__(self, graph: GraphFastPath, checks: ArgumentChecks, values: Sequence[Any]) -> None:
        if any(isinstance(value, _CONTAINERS) for value in values):
            raise _NoFastPath  # the next call may pass it with other items
        self.lines: list[str] = []
        self.names: dict[str, Any] = {**checks.names, **graph.names}
        self.one_graph = graph.recording.one_graph
        if "metadata_holds" in self.names:
            self._unless("not metadata_holds(context)")
        if "dropped" in self.names:
            self._unless("dropped() is not None")
        if self.one_graph is not None:
            self.names |= self.one_graph.names_of_one()
        self._graph, self._recording, self._checks = graph, graph.recording, checks
        self._pairs = list(zip(checks.variables, values, strict=True))
        self._variables = {id(value): variable for variable, value in self._pairs}
        self._containers: set[int] = set()  # of the result

    def _unless(self, condition: str) -> None:
        self.lines += [f"if {condition}:", "    return not_served"]

    def _bound(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name

    def called(self, hooks: Sequence[Any], called: tuple[torch.nn.Module, Any] | None) -> None:
        """Add checks of the called module: it has no hooks, and the same ``forward``."""
        conditions = [self._bound(f"hooks_{index}", hook) for index, hook in enumerate(hooks)]
        if called is not None:
            module, forward = self._bound("module", called[0]), self._bound("forward", called[1])
            conditions.append(f"{module}.forward != {forward}")
        if conditions:
            self._unless(" or ".join(conditions))

    def _have_own_addresses(self, inputs: Sequence[Any]) -> bool:
        """Return whether :meth:`layouts` checks the address of each tensor, and all differ."""
        # Then arguments are different tensors, and no tensor that the trace reads from elsewhere.
        addresses = self._recording.addresses
        starts = {id(inputs[index]): start for index, start in addresses if index < len(inputs)}
        tensors = [value for _, value in self._pairs if isinstance(value, torch.Tensor)]
        begins = [starts.get(id(tensor)) for tensor in tensors]
        if None in begins or len(set(begins)) < len(begins):
            return False
        elsewhere = self._checks.elsewhere
        return all(raw_memory.is_plain_tensor(x) and x.data_ptr() not in begins for x in elsewhere)

    def arguments(
        self, count: int, keywords: Sequence[str], bound: int, inputs: Sequence[Any]
    ) -> None:
        """Add the checks of ``fits``, but for sizes, without the ``bound`` first arguments."""
        many = "kwargs" if not keywords else f"len(kwargs) != {len(keywords)}"
        self._unless(f"len(args) != {count - bound} or {many}")
        checks = self._checks
        if count > bound:
            self.lines.append(f"({', '.join(checks.variables[bound:count])},) = args")
        lines = [line for leaf in checks.leaves[bound:] for line in leaf] + checks.others
        lines += [] if self._have_own_addresses(inputs) else checks.objects
        lines += checks.settings
        self.lines += [line.replace("return False", "return not_served") for line in lines]

    def layouts(self, inputs: Sequence[Any]) -> None:
        """Check that tensors have the same sizes, strides and addresses as at the replay."""
        tensors = [pair for pair in self._pairs if isinstance(pair[1], torch.Tensor)]
        if not all(
            type(value) in _PLAIN and raw_memory.is_plain_tensor(value) for _, value in tensors
        ):
            raise _NoFastPath
        conditions = self._moved(inputs)
        unpack = ""
        reused = self._recording.returned.reused
        if self.one_graph is not None and reused.tensors:
            self.names["reused"] = reused
            outs = [f"out_{index}" for index in range(len(reused.tensors))]
            unpack = f"({', '.join(outs)},) = reused."
            self.lines.append(unpack + "tensors")
            for out, tensor, start in zip(outs, reused.tensors, reused.starts, strict=True):
                tensors.append((out, tensor))
                conditions.append(f"{out}.data_ptr() != {self._bound(f'at_{out}', start)}")
        if tensors:
            values = [value for _, value in tensors]
            layouts = [(list(tensor.shape), list(tensor.stride())) for tensor in values]
            self.names["alike"] = raw_memory.alike(values, layouts)
            variables = ", ".join(variable for variable, _ in tensors)
            conditions.insert(0, f"not alike({variables})")
        if conditions:
            self._unless(" or ".join(conditions))
        if unpack:  # a caller may have changed the layout of a result: take new ones then
            check = self.lines.pop(-2)
            retry = [f"    {unpack}get()", f"    {check}", "        return not_served"]
            self.lines[-1:] = [check, *retry]

    def _moved(self, inputs: Sequence[Any]) -> list[str]:
        """Return the conditions under which an input moved."""
        for index, _ in self._recording.numbers:
            if index >= len(inputs) or isinstance(inputs[index], torch.Tensor):
                raise _NoFastPath  # a number in memory
        conditions = []
        for index, address in self._recording.addresses:
            frozen = index - len(inputs)
            tensor = self._variable(inputs[index]) if frozen < 0 else f"frozen[{frozen}]"
            conditions.append(f"{tensor}.data_ptr() != {self._bound(f'at_{index}', address)}")
        return conditions

    def _variable(self, value: Any) -> str:
        """Return the variable of an argument."""
        if id(value) not in self._variables:
            raise _NoFastPath
        return self._variables[id(value)]

    def inputs(self, inputs: Sequence[Any]) -> str:
        """Return the inputs of the graph: arguments, and numbers that depend on their layouts."""
        items = [
            self._variable(x) if isinstance(x, torch.Tensor) else self._bound(f"n_{index}", x)
            for index, x in enumerate(inputs)
        ]
        return _tuple(items) + (" + frozen" if self._graph.frozen else "")

    def result(self, value: Any) -> str:
        """Return the result of a call as an expression over the outputs of the graph."""
        kind = type(value)
        if kind is _Output:
            return self._output(value.item)
        if kind is list or kind is dict:
            if id(value) in self._containers:
                raise _NoFastPath  # the result holds one object twice
            self._containers.add(id(value))
        if kind is tuple or kind is list:
            items = [self.result(item) for item in value]
            return _tuple(items) if kind is tuple else f"[{', '.join(items)}]"
        if kind is dict and all(type(key) is str for key in value):
            items = [f"{key!r}: {self.result(item)}" for key, item in value.items()]
            return f"{{{', '.join(items)}}}"
        if value is None or kind in (bool, int, str):
            return repr(value)
        return self._variable(value)

    def _output(self, item: int) -> str:
        returned = self._recording.returned
        if self.one_graph is None:
            if not returned.is_flat:
                raise _NoFastPath
            return f"outputs[{item}]"
        if item in returned.reused_items:
            return f"out_{returned.reused_items.index(item)}"
        return self._bound(f"constant_{item}", returned.constants[item])


def _tuple(items: Sequence[str]) -> str:
    """Return a tuple as text."""
    return f"({', '.join(items)},)" if items else "()"
