"""Dynamo: its graphs and numbers, what it did not compile, and a call traced as a function.

Note [Repeated regions]
A region is a function marked by ``torch.compiler.nested_compile_region``; each call of it is one
node of the graph. torch 2.13 and later copy the trace of its first call to each later call for
which the guards of the first hold, and keep no guards of the later ones: without those that
:func:`guard_repeated_regions` adds, a change of a later layer would be overlooked.

Note [A call as a graph]
:func:`trace_call` uses the parts of ``torch._dynamo.convert_frame`` that torch's ahead-of-time
front ends use. A :class:`Trace` has the graph, the Python around it (:class:`TracedPython`) and its
:class:`Guards`. The rule: what a trace sets or leaves in torch, in functions and in tensors is
restored after it.
"""

import builtins
import dataclasses
import dis
import functools
import importlib
import inspect
import linecache
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx, nn
from torch.fx.graph_module import _loader
from torch.utils.checkpoint import checkpoint

from cgcompile.torch_compat.expressions import (
    is_unbacked,
    known_size,
    number_text,
    size_conditions,
    squeeze_conditions,
)
from cgcompile.torch_compat.torch_ops import is_named, original_of
from cgcompile.torch_compat.torch_settings import (
    function_mode_stack,
    traced_function_modes,
    without_function_modes,
)


def source_name(placeholder: fx.Node) -> str | None:
    """Return Dynamo's path of an input, such as ``L['x']``; None where Dynamo did not trace."""
    source = getattr(placeholder, "_dynamo_source", None)
    return None if source is None else str(source.name)


class _Source(NamedTuple):
    """The path of an input that cgcompile has added."""

    name: str


def set_source_name(placeholder: fx.Node, name: str) -> None:
    """Set Dynamo's path of an input, such as ``L['x'].scale``."""
    placeholder._dynamo_source = _Source(name)


def graph_break(gm: fx.GraphModule) -> str | None:
    """Return why Dynamo ended this graph early, with the user's line; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    text = str(reason.reason).strip().splitlines()[0]
    stack = [frame for frame in reason.user_stack or () if frame.filename]
    if not stack:
        return text
    if text == "step_unsupported":  # the only reason that torch keeps
        text = f"Dynamo cannot trace {str(stack[-1].line).strip()!r}"
    return f"{text} ({os.path.basename(stack[-1].filename)}:{stack[-1].lineno})"


@contextmanager
def fake_context(values: Iterable[Any]) -> Iterator[None]:
    """Run ops on fakes as Dynamo does, in the fake mode of the first value that has one."""
    from torch._dispatch.python import enable_python_dispatcher

    modes = (getattr(value, "fake_mode", None) for value in values)
    mode = next((mode for mode in modes if mode is not None), None)
    if mode is None:
        yield
        return
    # torch 2.11 takes symbolic sizes in composite ops only with the Python dispatcher.
    with mode, enable_python_dispatcher():
        yield


def is_static_input(placeholder: fx.Node) -> bool:
    """Return whether Dynamo marked an input as static: a parameter, buffer or attribute."""
    marks = placeholder.meta.get("tensor_dict") or {}
    return marks.get("_dynamo_static_input_type") is not None


def mark_static(placeholder: fx.Node) -> None:
    """Mark an input as static."""
    placeholder.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of Dynamo's graph with all that this package reads of it; values are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies)
    graph.output(output)
    for original, copy in copies.items():
        if hasattr(original, "_dynamo_source"):
            copy._dynamo_source = original._dynamo_source
    result = fx.GraphModule(gm, graph)
    if hasattr(gm, "compile_subgraph_reason"):
        result.compile_subgraph_reason = gm.compile_subgraph_reason
    return result


def watch_dynamo() -> None:
    """Let Dynamo report functions whose calls will bypass a backend to that backend.

    ``recompile_limit_reached(text, mode, options)``: before a call runs eager because its function
    reached the recompile limit; the call raises what the method raises. Not called where torch
    raises an error itself, with ``fullgraph=True`` or ``fail_on_recompile_limit_hit``.
    ``nothing_compiled(text, mode, options)``: after Dynamo failed to compile any part of a
    function. ``torch._dynamo.reset()`` ends these calls, until this is called again.
    """
    from torch._dynamo import callback_handler, utils

    if _look_at_limit not in (utils.get_hook_for_recompile_user_context() or ()):
        utils.register_hook_for_recompile_user_context(_look_at_limit)
    if _look_at_failure not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_look_at_failure)


def _compilation() -> tuple[Mapping[str, Any], Any, str | None, dict[str, Any] | None] | None:
    """Return (locals, backend, mode, options) of the innermost compilation of Dynamo."""
    from torch._dynamo import convert_frame
    from torch._dynamo.eval_frame import innermost_backend

    frame: Any = sys._getframe()
    while frame.f_code.co_name != "_compile" or frame.f_globals is not vars(convert_frame):
        frame = frame.f_back
        if frame is None:
            return None
    local = frame.f_locals
    return local, *_of_torch_compile(innermost_backend(local["compiler_fn"]))


def _look_at_limit() -> str:
    """Compare with the limits before each compilation, from the locals of Dynamo's ``_compile``."""
    from torch._dynamo import config
    from torch._dynamo.cache_size import exceeds_recompile_limit
    from torch._dynamo.utils import get_metrics_context

    # A nested compilation sets this metric a second time, which torch refuses.
    get_metrics_context()._metrics.pop("recompile_user_contexts", None)
    compilation = _compilation()
    if compilation is None:
        return ""
    local, backend, mode, options = compilation
    exceeded, limit = exceeds_recompile_limit(local["cache_size"], local["compile_id"])
    if not exceeded or local["one_graph"] or config.fail_on_recompile_limit_hit:
        return ""
    reached = getattr(backend, "recompile_limit_reached", None)
    if reached is not None:
        reasons = str(local.get("recompile_reason") or "").strip().splitlines()
        text = f"{_name_of(local['code'])} is compiled no more, and other calls run eager, "
        text += f"uncounted: torch._dynamo.config.{limit} is {getattr(config, limit)}"
        reached(f"{text}; the last reason: {reasons[0]}" if reasons else text, mode, options)
    return ""


def _look_at_failure(_: Any) -> None:
    """Read the error, if any, with which a compilation ends."""
    from torch._dynamo import config

    # The backend was called if the function was compiled up to a graph break: that is no error.
    error = sys.exc_info()[1]
    soft = any(kind.__name__ in ("Unsupported", "UserError") for kind in type(error).__mro__)
    compilation = _compilation() if error is not None else None
    if compilation is None or not (soft or config.suppress_errors) or compilation[0]["one_graph"]:
        return
    local, backend, mode, options = compilation
    nothing_compiled = getattr(backend, "nothing_compiled", None)
    if nothing_compiled is not None:
        stack = [frame for frame in getattr(error, "real_stack", None) or () if frame.filename]
        at = [(last.filename, last.lineno) for last in stack[-1:]]
        text = _failure(_name_of(local["code"]), error, *at)
        nothing_compiled(text, mode, options)


def given_up() -> list[str]:
    """Return the functions that Dynamo did not compile lately, for any backend, with reasons."""
    # Dynamo does not compile code again that it failed to compile, for any backend. From torch
    # 2.15 on a function of which nothing is left but a break, such as that around a bare LSTM, is
    # no failure; the break is counted.
    from torch._dynamo.utils import counters, get_compilation_metrics

    failures = [
        _failure(
            f"{metrics.co_name} ({os.path.basename(str(metrics.co_filename))}:"
            f"{metrics.co_firstlineno})",
            metrics.fail_reason,
            (metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno),
        )
        for metrics in get_compilation_metrics()
        if metrics.fail_type == "Unsupported" and metrics.fail_user_frame_filename
    ]
    return failures or [_failure("a function", text) for text in counters["graph_break"]]


def _name_of(code: Any) -> str:
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _failure(function: str, error: Any, at: tuple[Any, Any] | None = None) -> str:
    """Return the function, the first line and first hint of an error, and the user's line."""
    what, *rest = [*map(str.strip, str(error).splitlines()), type(error).__name__]
    line = "" if at is None else f" ({os.path.basename(str(at[0]))}:{at[1]})"
    hints = [text for text in rest if text.startswith("Hint: ")]
    hints = hints or [text for text in rest if text.startswith("Explanation: ")]
    return ". ".join([f"{function}: {what}{line}", *hints[:1]])


def _of_torch_compile(wrapper: Any) -> tuple[Any, str | None, dict[str, Any] | None]:
    """Return (backend, mode, options) of the backend that ``torch.compile`` passes to Dynamo."""
    settings = getattr(wrapper, "kwargs", {})
    return getattr(wrapper, "compiler_fn", wrapper), settings.get("mode"), settings.get("options")


def backend_of(compiled: Any) -> tuple[Any, str | None, dict[str, Any] | None]:
    """Return (backend, mode, options) of a compiled module; three times None for others."""
    from torch._dynamo.eval_frame import innermost_backend

    if original_of(compiled) is None:
        return None, None, None
    return _of_torch_compile(innermost_backend(compiled.dynamo_ctx.callback))


def restarts() -> tuple[type[BaseException], ...]:
    """Return the exceptions with which torch restarts a trace; they must not be wrapped."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return (RestartAnalysis, SkipFrame)


def varied_floats(gm: fx.GraphModule, seen: dict[Any, float]) -> set[fx.Node]:
    """Return the nodes that read a Python float of the caller which has had several values.

    ``seen`` has one value of each float that a graph was traced with.
    """
    # With ``dynamic=True`` every float is an input at once, else, and for :func:`trace_call`, one
    # that has varied. Those that have not, such as factors of a model, are constants. A trace of
    # ``aot_compile`` has ended, and is not restarted.
    from torch._dynamo import config
    from torch._dynamo.symbolic_convert import tls

    trace = getattr(tls, "current_tx", None)
    varied = set()
    for node in gm.graph.nodes:
        if node.target != "item" or node.args[0].op != "placeholder" or not _floats_of(node):
            continue
        number = node.meta["example_value"].node
        if not number.expr.free_symbols:
            continue  # something depends on its value
        code = None if trace is None else trace.f_code
        value, key = number.hint, (code, source_name(node.args[0]))
        varies = config.assume_static_by_default or trace is None
        if varies or seen.setdefault(key, value) != value:
            varied.add(node)
    return varied


def make_floats_constant(gm: fx.GraphModule, but: Iterable[fx.Node] = ()) -> None:
    """Make the symbolic Python floats of a graph guarded constants; restart the trace if needed.

    Floats that ``but`` have stay symbolic.
    """
    # With ``dynamic=True`` Dynamo passes a Python float as a CPU tensor and reads it with ``item``:
    # a host read inside of a piece, and a captured kernel would keep the first value.
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    kept = set[sympy.Symbol]().union(*map(_floats_of, but))
    zeros = _make_zeros_constant(gm, kept)
    users = {node: floats for node in gm.graph.nodes if (floats := _floats_of(node))}
    users = {node: floats for node, floats in users.items() if kept.isdisjoint(floats)}
    names = sorted({str(symbol) for floats in users.values() for symbol in floats - zeros})
    new = [name for name in names if not TensorifyState.should_specialize(name)]
    for name in (*new, *map(str, zeros)):
        TensorifyState.specialize(name)  # Inductor would restart the trace
    if users and not _fold(gm, list(users)) and new:
        raise TensorifyScalarRestartAnalysis


def _make_zeros_constant(gm: fx.GraphModule, kept: set[sympy.Symbol]) -> set[sympy.Symbol]:
    """Make floats of the caller that are zero constants, with their sign; return their symbols."""
    # torch would lose the sign.
    tracer = _tracer()
    zeros = set[sympy.Symbol]()
    for node in list(gm.graph.nodes) if tracer is not None else ():
        symbols = _floats_of(node)
        source = node.args[0] if node.target == "item" else None
        if not isinstance(source, fx.Node) or not symbols or not symbols.isdisjoint(kept):
            continue
        known, argument = node.meta["example_value"], source.meta.get("grapharg")
        if argument is None or known.node.hint != 0:
            continue
        number = _guard_sign(argument.source, tracer)
        if number is None or float(known) != 0:  # guards the value, as well
            continue
        zeros |= symbols
        node.replace_all_uses_with(number)
        if tracer.graph is gm.graph:
            tracer.remove_node(node)
            if not source.users:
                tracer.remove_node(source)
        else:
            gm.graph.erase_node(node)
    if zeros:
        gm.recompile()
    return zeros


def _tracer() -> Any:
    """Return Dynamo's ``OutputGraph`` whose graph a backend compiles now; None without one."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(getattr(tls, "current_tx", None), "output", None)


def guard_signs_of_zeros(output: Any = None) -> None:
    """Guard the signs of zeros in a trace, by default in the one that is compiled now.

    Guards of torch compare by ``==``, for which 0.0 is -0.0.
    """
    output = _tracer() if output is None else output
    for guard in [] if output is None else list(output.guards):
        if is_constant(guard):
            _guard_sign(guard.originating_source, output)


def is_constant(guard: Any) -> bool:
    """Return whether a guard of Dynamo compares a value that is part of the trace."""
    return guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH")


def _guard_sign(source: Any, output: Any) -> float | None:
    """Guard the sign of the number at a source if it is a float zero; return the number."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource

    try:
        number = eval(source.name, {"L": output.local_scope, "G": output.global_scope})
    except (AttributeError, LookupError, NameError, SyntaxError, TypeError):
        return None  # only guards can read this source
    if type(number) is not float:
        return None
    if number == 0:  # "0x0.0p+0" or "-0x0.0p+0"
        text = CallFunctionNoArgsSource(AttrSource(source, "hex"))
        output.guards.add(text.make_guard(GuardBuilder.EQUALS_MATCH))
    return number


def must_be_constant(number: torch.SymInt | torch.SymFloat) -> bool:
    """Return whether a restarted trace is to have a number of this one as a constant."""
    from torch._dynamo.symbolic_convert import TensorifyState

    return any(TensorifyState.should_specialize(str(s)) for s in number.node._expr.free_symbols)


@contextmanager
def floats_settled(floats: Iterable[fx.Node]) -> Iterator[None]:
    """Let compilers ignore floats that are tensors or constants by now; forget them at the end."""
    # A compiler would restart the trace for each float of the trace that it does not find in a
    # graph. torch keeps the names, and a later trace of the same float would begin with a constant.
    from torch._dynamo.symbolic_convert import TensorifyState

    names = {str(symbol) for node in floats for symbol in _floats_of(node)}
    names = {name for name in names if not TensorifyState.should_specialize(name)}
    for name in names:
        TensorifyState.specialize(name)
    try:
        yield
    except BaseException:
        TensorifyState.force_specializations -= names
        raise
    TensorifyState.clear()


def _floats_of(node: fx.Node) -> set[sympy.Symbol]:
    """Return the symbols of Python floats in the value of a node, before replacements."""
    value = node.meta.get("example_value")
    numbers = [*value.shape] if isinstance(value, torch.Tensor) else [value]
    free: set[sympy.Symbol] = set()
    for number in numbers:
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            free |= getattr(number.node, "_expr", sympy.true).free_symbols
    return {symbol for symbol in free if not (symbol.is_integer or is_unbacked(symbol))}


def _fold(gm: fx.GraphModule, computed: list[fx.Node]) -> bool:
    """Replace nodes that compute only with floats by constants, and drop the inputs of these."""
    # Dynamo makes the call of the graph after the backend, from the inputs that are left. A second
    # trace, which gives the same graph, takes as long as the first.
    dynamo = _tracer()
    items = [node for node in computed if node.target == "item"]
    inputs = dict.fromkeys(node for item in items for node in item.all_input_nodes)
    free = all(type(node.meta["example_value"]) is torch.SymFloat for node in computed)
    free &= all(node in items or node.op == "call_function" for node in computed)
    free &= all(set(node.all_input_nodes) <= {*computed, *inputs} for node in computed)
    free &= all(node.op == "placeholder" and set(node.users) <= set(items) for node in inputs)
    if not free or dynamo is None or dynamo.graph is not gm.graph:
        return False
    for node in computed:
        run: Any = node.target
        known = node.meta["example_value"]  # a float is guarded
        number = float(known) if node in items else run(*node.args, **node.kwargs)
        node.replace_all_uses_with(number)
    for node in (*reversed(computed), *inputs):
        dynamo.remove_node(node)
    gm.recompile()
    return True


# ---------------------------------------------------------------- ahead of time


class Traced(NamedTuple):
    """What ``aot_compile`` has traced, while a backend compiles its graph."""

    output: Any  # Dynamo's OutputGraph
    codes: tuple[types.CodeType, ...]  # of all functions that were read
    modules: Mapping[str, str]  # names of modules, by the globals that refer to them
    function: Any  # that was traced; the others were inlined


def traced_ahead() -> Traced | None:
    """Return what ``aot_compile`` has traced; None if it does not call the backend."""
    from torch._dynamo.aot_compile import aot_compile_fullgraph

    frame: Any = sys._getframe()
    while frame.f_code is not aot_compile_fullgraph.__code__:
        frame = frame.f_back
        if frame is None:
            return None
    function, _ = traced_function(frame.f_locals["model"])
    return _traced(frame.f_locals["graph_capture_output"], function)


def _traced(capture: Any, function: Any) -> Traced:
    codes, modules = tuple(capture.traced_code), dict(capture.import_sources)
    return Traced(capture.output_graph, codes, modules, function)


# ---------------------------------------------------------------- activation checkpointing


_OP = "tag_activation_checkpoint"
_CONTEXT = "_checkpoint_context_fn"  # of selective checkpointing, in the ``meta`` of a body


def with_checkpoints(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with right gradients if run op by op: a copy, or itself if it is one."""
    # Run op by op, the op of Dynamo recomputes with other random numbers: it leaves that to
    # Inductor. :func:`torch.utils.checkpoint.checkpoint` restores their state.
    bodies = {
        node: body
        for node in gm.graph.find_nodes(op="get_attr")
        if isinstance(body := attrgetter(str(node.target))(gm), fx.GraphModule)
    }
    replaced = {node: with_checkpoints(body) for node, body in bodies.items()}
    calls = [node for node in bodies for node in node.users if is_named(node.target, _OP)]
    if not calls and replaced == bodies:
        return gm
    result = copied(gm)
    copies = dict(zip(gm.graph.nodes, result.graph.nodes, strict=True))
    for number, (node, body) in enumerate(replaced.items()):
        name = f"_checkpoint_body_{number}"
        result.add_module(name, body)
        copies[node].target = name
    for number, call in enumerate(calls):
        name, copy = f"_checkpoint_{number}", copies[call]
        body, context_fn = replaced[call.args[0]], bodies[call.args[0]].meta.get(_CONTEXT)
        result.add_module(name, _Checkpoint(body, call.kwargs, context_fn))
        copy.op, copy.target, copy.args, copy.kwargs = "call_module", name, copy.args[1:], {}
    result.recompile()
    return result


class _Checkpoint(nn.Module):
    def __init__(self, body: fx.GraphModule, options: Mapping[str, Any], context_fn: Any) -> None:
        super().__init__()
        self._body = body
        self._options = {**options, "use_reentrant": False}  # which gives gradients to every input
        if context_fn is not None:
            self._options["context_fn"] = context_fn

    def forward(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._body(*inputs)
        return checkpoint(self._body, *inputs, **self._options)


# ---------------------------------------------------------------- repeated regions


class CannotRepeat(Exception):
    """The trace of a region is wrong for one of its later calls; the text is the reason."""


def is_region(node: fx.Node) -> bool:
    """Return whether a node calls a function that the user marked as a region."""
    return is_named(node.target, "invoke_subgraph")


def guard_repeated_regions(gm: fx.GraphModule, output_graph: Any = None) -> None:
    """Add the guards on what the first call of a region read, for what its later calls read.

    ``output_graph``: of Dynamo; left out: of the trace whose graph a backend compiles now.

    Raises:
        CannotRepeat: torch copied the trace of another call, and it does not apply.
    """
    pairs = list(_repeated_inputs(gm))
    if not pairs:
        return
    if output_graph is None:
        from torch._dynamo.symbolic_convert import tls

        output_graph = tls.current_tx.output
    scope = {"L": output_graph.local_scope, "G": output_graph.global_scope}
    moves: dict[Any, dict[Any, _Moved]] = {}  # by the source in the first call, and in the later
    for sources in pairs:
        one, other = _innermost_difference(*sources)
        moves.setdefault(one, {}).setdefault(other, _Moved(one, other))
    guards: Any = output_graph.guards
    known = {_key(guard) for guard in guards}
    tensors = {key[0] for key in known if key[1] in ("TENSOR_MATCH", "DUPLICATE_INPUT")}
    for guard in list(guards):
        if "type(" in guard.name:  # a guard on a class: it holds for later calls too
            continue
        for source in [source for source in _chain(guard.originating_source) if source in moves]:
            for added in [moved.guard(guard) for moved in moves[source].values()]:
                if _key(added) not in known and _is_missing(guard, added, tensors, scope):
                    known.add(_key(added))
                    guards.add(added)


def _repeated_inputs(gm: fx.GraphModule) -> Iterator[tuple[Any, Any]]:
    """Yield (source, source) of the inputs of a first and of a later call that correspond."""
    first_calls: dict[Any, fx.Node] = {}
    for call in filter(is_region, gm.graph.nodes):
        first = first_calls.setdefault(call.args[0].target, call)
        for pair in zip(first.args[2:], call.args[2:], strict=True):
            sources = [getattr(node, "_dynamo_source", None) for node in pair]
            if None not in sources and sources[0] != sources[1]:
                yield sources[0], sources[1]


def _is_missing(guard: Any, added: Any, tensors: set[str], scope: dict[str, Any]) -> bool:
    """Return whether a guard of a later call has to be added to the trace."""
    kind = added.create_fn_name()
    try:
        first, later = (eval(name, dict(scope)) for name in (guard.name, added.name))
    except (AttributeError, LookupError, TypeError):
        return False  # a later call that was traced on its own, with an equal result
    if isinstance(first, torch.nn.Module) and _code(first) != _code(later):
        raise CannotRepeat(f"{added.name} has another class, forward or hook than {guard.name}")
    if kind == "TENSOR_MATCH" and added.name not in tensors:
        raise CannotRepeat(f"{added.name} is no input of the graph")
    if kind == "DUPLICATE_INPUT":
        return later is eval(added.create_fn.keywords["source_b"].name, dict(scope))
    return kind != "TENSOR_MATCH"


def _code(module: Any) -> tuple[Any, ...]:
    """Return the code that a call of a module runs, which torch does not compare."""
    hooks = [*module._forward_pre_hooks.values()], [*module._forward_hooks.values()]
    return type(module), vars(module).get("forward"), *hooks


def _innermost_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the innermost parts in which two sources differ, such as two layers of a list."""
    while (
        type(one) is type(other)
        and getattr(one, "base", None) not in (None, getattr(other, "base", None))
        and dataclasses.replace(one, base=other.base) == other
    ):
        one, other = one.base, other.base
    return one, other


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def _key(guard: Any) -> tuple[str, str, str]:
    function = guard.create_fn
    extra = {**getattr(function, "keywords", {})}
    extra.pop("value", None)  # the tensor itself
    return str(guard.name), guard.create_fn_name(), repr(sorted(extra.items(), key=str))


def _is_source(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "guard_source")


class _Moved:
    """The sources below one source, moved below another."""

    def __init__(self, one: Any, other: Any) -> None:
        self._known: dict[Any, Any] = {one: other}

    def guard(self, guard: Any) -> Any:
        function = guard.create_fn
        if isinstance(function, functools.partial):
            moved = {
                name: self.source(value) if _is_source(value) else value
                for name, value in function.keywords.items()
            }
            function = functools.partial(function.func, *function.args, **moved)
        return type(guard)(self.source(guard.originating_source), function)

    def source(self, source: Any) -> Any:
        if source not in self._known:
            changes = {
                field.name: self.source(value)
                for field in dataclasses.fields(source)
                if _is_source(value := getattr(source, field.name))
            }
            moved = dataclasses.replace(source, **changes) if changes else source
            self._known[source] = moved
        return self._known[source]


# ---------------------------------------------------------------- a call as a graph


@contextmanager
def new_sources() -> Iterator[set[str]]:
    """Collect the names of sources that FX generates within it; complete at the end."""
    new: set[str] = set()
    before = set(_loader.eval_cache)
    yield new
    new |= set(_loader.eval_cache) - before


def drop_sources_with(owner: Any, names: Iterable[str]) -> None:
    """Drop sources when ``owner`` is freed: FX and ``linecache`` never do."""
    weakref.finalize(owner, _drop, tuple(names)).atexit = False


def _drop(names: tuple[str, ...]) -> None:
    for name in names:
        _loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)


_INSTALLED = re.compile(r"__builtins__$|__(compiled_fn|import|builtins_dict)_|___|\w*_\d+_c\d+$")
_OF_ONE_TRACE = re.compile(r"__\w+_\d+$|__compiled_fn_|\w*_\d+_c\d+$")

# Instructions that change only local variables and new objects; those with a name; and the names
# that plain code reads. Python 3.11 to 3.13.
_NAMED = frozenset(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"))
_STEPS = (
    "RESUME NOP PRECALL CALL PUSH_NULL COPY SWAP POP_TOP LOAD_CONST LOAD_FAST LOAD_FAST_CHECK "
    "LOAD_FAST_LOAD_FAST STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST DELETE_FAST "
    "BINARY_SUBSCR BUILD_LIST BUILD_TUPLE BUILD_MAP BUILD_CONST_KEY_MAP LIST_EXTEND LIST_APPEND "
    "IS_OP LIST_TO_TUPLE CALL_INTRINSIC_1 JUMP_FORWARD POP_JUMP_FORWARD_IF_FALSE TO_BOOL "
    "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE RETURN_VALUE RETURN_CONST"
)
_PLAIN_STEPS = _NAMED.union(_STEPS.split(" "))
_PLAIN_MODULES = ("torch._dynamo.utils", "torch.autograd.profiler")
_PLAIN_NAMES = frozenset(("call_size", "call_stride", "_is_profiler_enabled"))
_PLAIN_NAMES |= {"record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit"}


def is_of_one_trace(name: str) -> bool:
    """Return whether Dynamo generated the name of a global for one trace."""
    return bool(_OF_ONE_TRACE.match(name)) and not name.startswith("__import_")


class _Globals(dict[str, Any]):
    """The live globals of a function, and names of our own before them."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        super().__init__()
        self._live = live

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict__"):  # Dynamo's name for it
            return builtins.__dict__
        return self._live[name]


def _helpers(name: str) -> types.ModuleType:
    """Return a module with cheap versions of ``torch._dynamo.utils`` that Dynamo's code calls."""
    # torch's versions disable Dynamo around themselves, which costs more than the rest of a call.
    # These suffice for plain tensors; a subclass has a separate trace.
    module = types.ModuleType(name)  # not a subclass: attributes of a plain module are faster
    own = {
        "call_size": torch.Tensor.size,
        "call_stride": torch.Tensor.stride,
        "call_storage_offset": torch.Tensor.storage_offset,
        # No profiler range around a few instructions: ``bool`` accepts the same arguments, has no
        # effect, and costs half of an empty function.
        "record_pregraph_bytecode_enter": bool,
        "record_pregraph_bytecode_exit": bool,
        "__getattr__": lambda other: getattr(importlib.import_module(name), other),
    }
    vars(module).update(own)
    return module


def _module(name: str) -> types.ModuleType:
    return _helpers(name) if name == "torch._dynamo.utils" else importlib.import_module(name)


@dataclass(frozen=True)
class TracedPython:
    """The Python that Dynamo generated around a graph."""

    code: types.CodeType  # takes the arguments of the function, and calls the graph
    modules: Mapping[str, str]  # names of modules, by the globals that refer to them
    graph: str | None  # the global name of the graph; None without a graph
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of other globals

    def function(
        self, original: types.FunctionType, compiled: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """Return the traced call as a function of the same signature, without guards."""
        # ``compiled`` takes the inputs of the graph that are not frozen.
        # Those of the user stay live.
        names: dict[str, Any] = _Globals(original.__globals__)
        names.update((n, v) for n, v in original.__globals__.items() if _INSTALLED.match(n))
        names.update((alias, _module(n)) for alias, n in self.modules.items())
        names.update(self.objects)
        if self.graph is not None:
            names[self.graph] = compiled
        if _globals_read(self.code) <= names.keys():
            names = dict(names)  # no globals of the user: Python caches lookups in a plain dict
        closure = original.__closure__ if self.code.co_freevars else None
        function = types.FunctionType(
            self.code, names, original.__name__, original.__defaults__, closure
        )
        function.__kwdefaults__ = original.__kwdefaults__
        return function

    def installed(self) -> set[str]:
        """Return the globals that Dynamo made for this trace alone, and that the code reads."""
        read = {name for name in _globals_read(self.code) if _INSTALLED.match(name)}
        read = {name for name in read if not name.startswith("__builtins")}
        return read - {*self.modules, self.graph}

    @property
    def is_plain(self) -> bool:
        """Whether it only reads its arguments, their sizes and the graph, and has no effects."""
        known = {name for name, module in self.modules.items() if module in _PLAIN_MODULES}
        for step in dis.get_instructions(self.code):
            name = step.argval if step.opname in _NAMED else None
            plain = name in known or name in _PLAIN_NAMES or name in (None, self.graph)
            if step.opname not in _PLAIN_STEPS or not plain:
                return False
        return self.graph is not None


def _globals_read(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {step.argval for step in dis.get_instructions(code) if step.opname in loads}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_read(constant)
    return names


@contextmanager
def measured() -> Iterator[None]:
    """Open the outermost span of torch's timings, which torch requires."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    with get_metrics_context(), dynamo_timed("cgcompile"):
        yield


@contextmanager
def patched(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of torch and restore them; ``config.patch`` leaks context variables."""
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


class CannotTrace(Exception):
    """Dynamo cannot make one graph of a call; the text is the reason."""

    model_raises = False  # whether the reason is that the Python code of the model raises
    becomes_several = True  # whether torch.compile makes several graphs of the call
    what = ""  # reason in one line
    hints: tuple[str, ...] = ()  # torch's hints, a line each
    line: tuple[str, str] | None = None  # user's line: ("model.py:41 in forward", "y = ...")


class CannotBind(Exception):
    """torch cannot bind the tensors that a trace reads; the text is the reason."""


# A tensor that is no argument, with its path, a Python expression over ``L`` (locals) and ``G``.
FrozenTensor = tuple[str, torch.Tensor]


class Trace:
    """One call of a function as a pre-grad graph, or None without tensor ops, and its Python."""

    # ``inputs`` are what the graph was traced with, the ``frozen`` tensors last.

    def __init__(self, function: types.FunctionType, output: Any) -> None:
        self.original = function  # a bound object is its first argument
        self._output = output  # Dynamo's OutputGraph
        # Whether the graph has the effects of torch function modes.
        self.function_modes = bool(self._graph_output.torch_function_mode_stack)
        traced = output.backend_input
        self.graph: fx.GraphModule | None = None if traced is None else traced.graph_module
        self.inputs: list[Any] = [] if traced is None else list(traced.example_inputs)
        self.frozen: tuple[FrozenTensor, ...] = ()
        self._squeezes: list[tuple[str, tuple[str, ...]]] = []
        if self.graph is not None:
            guard_repeated_regions(self.graph, self._graph_output)
            self._squeezes = squeeze_conditions(self.graph.graph)
            self.frozen = _lift(self.graph)
            self.inputs += [tensor for _, tensor in self.frozen]

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enter Dynamo's context of this trace, in which a backend compiles the graph."""
        from torch._guards import TracingContext, tracing

        traced = self._output.backend_input
        context = TracingContext(traced.fake_mode)
        context.tensor_to_context = traced.tensor_to_context
        with measured(), tracing(context), without_function_modes():
            yield

    def close(self) -> None:
        """Let the objects of the trace be freed; it must not be read later."""
        # Dynamo leaves the graph in the globals of the function. The fake tensors, their sizes and
        # the ``ShapeEnv`` form a cycle through C++, which the garbage collector does not follow.
        if self.shape_env is not None:
            drop_fakes(self.shape_env)
        if self.python.graph is not None:
            drop_globals(self.original.__globals__, {self.python.graph})

    @property
    def python(self) -> TracedPython:
        """The Python around the graph."""
        capture, traced = self._output.graph_capture_output, self._output.backend_input
        graph = getattr(traced, "backend_id", None)
        return TracedPython(capture.bytecode, dict(capture.import_sources), graph)

    @property
    def sizes(self) -> dict[str, tuple[int | str, ...]]:
        """The sizes of all tensors that the trace read, by path; dynamic ones as Python text."""
        return {path: tuple(map(known_size, fake.shape)) for path, fake in self._fakes()}

    @property
    def strides(self) -> dict[str, tuple[int | str, ...]]:
        """Return the strides of all tensors that the trace read and that have strides, by path."""
        return {
            path: tuple(map(known_size, fake.stride()))
            for path, fake in self._fakes()
            if fake.layout is torch.strided
        }

    @property
    def offsets(self) -> dict[str, str]:
        """The offsets into memory that are dynamic, by path."""
        offsets = {
            path: known_size(fake.storage_offset())
            for path, fake in self._fakes()
            if fake.layout is torch.strided
        }
        return {path: offset for path, offset in offsets.items() if isinstance(offset, str)}

    def _fakes(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tracked in self.shape_env.tracked_fakes or ():
            if isinstance(tracked.fake, torch.Tensor):
                yield str(tracked.source.name), tracked.fake

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers of the call that are inputs of the trace, by path, as Python text."""
        numbers = self._symbolic_numbers()
        return {path: number_text(n) for path, n in numbers if n.node.expr.free_symbols}

    @property
    def constants_to_be(self) -> set[str]:
        """Numbers to specialise in the next attempt."""
        return {path for path, number in self._symbolic_numbers() if must_be_constant(number)}

    def _symbolic_numbers(self) -> Iterator[tuple[str, torch.SymInt | torch.SymFloat]]:
        for tracked in self.shape_env.tracked_fakes or ():
            number, source = tracked.fake, tracked.source
            if isinstance(number, torch.Tensor):
                number, source = getattr(number, "item_memo", None), getattr(source, "base", None)
            if isinstance(number, (torch.SymInt, torch.SymFloat)) and source is not None:
                yield str(source.name), number

    def size_conditions(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (condition in Python, its symbols) of what was assumed of sizes so far."""
        sizes = {size for shape in self.sizes.values() for size in shape}
        numbers = set(self.numbers.values())
        return [*size_conditions(self.shape_env, sizes, numbers), *self._squeezes]

    @property
    def aliases(self) -> list[tuple[str, str]]:
        """(path, path) of each tensor that the trace read by two paths."""
        pairs = []
        for guard in self._graph_output.guards:
            other = getattr(guard.create_fn, "keywords", {}).get("source_b")
            if other is not None:
                pairs.append((str(guard.name), str(other.name)))
        return pairs

    @property
    def constants(self) -> list[str]:
        """The paths of the values that are part of the trace."""
        guards = self._graph_output.guards
        return [str(guard.name) for guard in guards if is_constant(guard)]

    @property
    def global_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the trace read from globals, by path."""
        values = {}
        scope = {"G": self.original.__globals__, "torch": torch}
        for guard in self._graph_output.guards:
            if str(guard.name).startswith("G["):
                with suppress(AttributeError, LookupError, NameError, TypeError):
                    values[str(guard.name)] = eval(str(guard.name), dict(scope))
        return {path: value for path, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def ahead(self) -> Traced:
        """What was traced, as ``aot_compile`` has it."""
        return _traced(self._output.graph_capture_output, self.original)

    @property
    def _graph_output(self) -> Any:
        return self._output.graph_capture_output.output_graph

    @property
    def shape_env(self) -> Any:
        return self._graph_output.shape_env

    @property
    def written_globals(self) -> tuple[str, ...]:
        """The global names that the call assigns to."""
        steps = dis.get_instructions(self._output.graph_capture_output.bytecode)
        stores = ("STORE_GLOBAL", "DELETE_GLOBAL")
        return tuple(sorted({step.argval for step in steps if step.opname in stores}))

    def guards(self, *, sizes_only: bool) -> "Guards":
        """Return Dynamo's guards; ``sizes_only``: only guards on sizes and on captured tensors."""
        from torch._dynamo import config

        guard_signs_of_zeros(self._graph_output)
        chosen = _sizes_only if sizes_only else None
        hooks_too = patched(config, {"skip_nnmodule_hook_guards": False})
        with measured(), _as_cannot_trace(), hooks_too:
            code = self.original.__code__
            return Guards(_weak_guards()(code, self._graph_output, guard_filter_fn=chosen))


def current_shape_env() -> Any:
    """Return the ``ShapeEnv`` of the trace whose graph a backend compiles now, or None."""
    context = torch._guards.TracingContext.try_get()
    return getattr(getattr(context, "fake_mode", None), "shape_env", None)


def drop_fakes(shape_env: Any) -> None:
    """Let the fake tensors of an ended trace be freed, see :meth:`Trace.close`."""
    shape_env.tracked_fakes = None


def drop_trace_caches() -> None:
    """Empty caches whose keys hold what a trace has used, such as each ``ShapeEnv``."""
    # Entries with a ``ShapeEnv`` are of use only to the trace that made them. Dynamo reads
    # attributes with ``inspect.getattr_static``, which keeps classes in Python 3.12.0 to 3.12.3.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    classes = getattr(inspect, "_shadowed_dict_from_mro_tuple", None)
    for cached in (*vars(ShapeEnv).values(), classes):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()


@cache
def _weak_guards() -> Any:
    """Return Dynamo's class of guards without its finalizers, and without a second tree."""
    # A finalizer of each object that is compared by identity would keep the guards as long as that
    # object, such as a class or a module-level function, lives. The second tree has the guards that
    # differ between the entries of Dynamo's own cache; torch 2.11 never frees it.
    from torch._dynamo.guards import CheckFunctionManager, GuardManagerWrapper

    class OneTree(GuardManagerWrapper):
        def prepare_diff_guard_manager(self) -> None:
            pass

    class WeakGuards(CheckFunctionManager):
        def build_guards(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            builder, guard_manager = super().build_guards(*args, **kwargs)
            tree = OneTree.__new__(OneTree)
            vars(tree).update(vars(guard_manager))
            builder.guard_manager = tree
            return builder, tree

        def id_ref(self, obj: object, obj_str: str) -> int:
            with suppress(TypeError):  # objects without weak references
                vars(self).setdefault("identities", {}).setdefault(id(obj), weakref.ref(obj))
            return id(obj)

        def lookup_weakrefs(self, obj: object) -> Any:
            return vars(self).get("identities", {}).get(id(obj))

    return WeakGuards


class Guards:
    """The guards on the locals of a call; never true after an object they compare is freed."""

    def __init__(self, checks: Any) -> None:
        self._checks = checks  # keeps the objects that the guards read
        self.hold: Callable[[dict[str, Any]], bool] = checks.guard_manager.check
        self.is_alive = True  # whether all objects that are compared by identity are
        this = weakref.ref(self)

        def expire(_: Any) -> None:
            guards = this()
            if guards is not None:
                guards.hold, guards.is_alive = lambda names: False, False

        objects = [reference() for reference in vars(checks).get("identities", {}).values()]
        self._identities = [weakref.ref(obj, expire) for obj in objects if obj is not None]

    def first_that_fails(self, names: dict[str, Any]) -> str:
        """Return the first guard that does not hold, as Python, with the user's line."""
        if not self.is_alive:
            return "an object that was compared by identity was freed"
        result = self._checks.guard_manager.check_verbose(names)
        parts = [str(part).strip() for part in result.verbose_code_parts]
        return " ".join(parts[0].split()) if parts else str(result)


def _sizes_only(entries: Any) -> list[bool]:
    return [
        entry.guard_type == "SHAPE_ENV"
        or (entry.guard_type == "TENSOR_MATCH" and str(entry.orig_guard.name).startswith(_OUTSIDE))
        for entry in entries
    ]


_OUTSIDE = ("L['self'].", "G[")  # begins the paths of tensors of modules and globals


def traced_function(called: Any) -> tuple[types.FunctionType, Any]:
    """Return (function, bound object or None) that Dynamo traces for a callable."""
    from torch._dynamo.convert_frame import get_traced_fn

    forward = getattr(called, "forward", None) if isinstance(called, torch.nn.Module) else called
    is_function = isinstance(forward, (types.FunctionType, types.MethodType))
    return get_traced_fn(called if is_function else called.__call__)


def users_function(called: Any) -> Any:
    """Return the function with the user's parameters: of a module with hooks its ``forward``."""
    forward = called.forward if isinstance(called, torch.nn.Module) else called
    is_method = isinstance(forward, types.MethodType)  # it may also be a functools.partial
    return traced_function(forward)[0] if is_method else forward


def trace_call(
    called: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    freeze: bool,
    varying: Collection[str] = (),
) -> Trace:
    """Trace a call without running it; raises CannotTrace if it does not become one graph."""
    # The numbers at the paths ``varying`` become inputs. ``freeze``: bind the current tensors of
    # modules, globals and closures, instead of looking them up at each call; raises CannotBind
    # where torch does not.
    from torch._dynamo import config, convert_frame

    patches = {
        "automatic_dynamic_shapes": bool(varying),
        "assume_static_by_default": True,
        "install_free_tensors": freeze,
        "capture_scalar_outputs": True,
        "capture_dynamic_output_shape_ops": True,
        "skip_nnmodule_hook_guards": False,
    }
    function = traced_function(called)[0]
    with ExitStack() as stack:
        stack.enter_context(convert_frame.compile_lock)
        stack.enter_context(_as_cannot_trace())
        stack.enter_context(patched(config, patches))
        stack.enter_context(_varying(varying))
        stack.enter_context(measured())
        before = set(function.__globals__)
        with new_sources() as sources:
            try:
                output = _captured(called, args, kwargs)
                trace = Trace(function, output)
            except BaseException as error:
                drop_globals(function.__globals__, _installed_since(before, function))
                if isinstance(error, AssertionError) and "Freevar has no source" in str(error):
                    raise CannotBind(str(error)) from error  # read in a region of the user
                raise
        new = _installed_since(before, function)
    code = trace.python.code
    drop_sources_with(code, sources)
    weakref.finalize(code, drop_globals, function.__globals__, new).atexit = False
    return trace


def _captured(called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what Dynamo makes of a call; torch function modes are traced."""
    from torch._dynamo import convert_frame

    modes = function_mode_stack()
    if modes:
        with traced_function_modes(modes):
            output = convert_frame.fullgraph_capture(called, args, dict(kwargs))
        if list(output.graph_capture_output.output_graph.torch_function_mode_stack) == modes:
            return output  # otherwise Dynamo traces them, as in 2.11
    return convert_frame.fullgraph_capture(called, args, dict(kwargs))


@contextmanager
def _varying(paths: Collection[str]) -> Iterator[None]:
    """Let Dynamo take the numbers at these paths, and no others, for varying ones."""
    # It replaces Dynamo's record of other calls, which is restored.
    from torch._dynamo.pgo import get_code_state

    seen = get_code_state()
    before, factory = dict(seen), seen.default_factory

    def varied() -> Any:
        state: Any = factory()  # type: ignore[misc]
        for path in paths:
            entry = state.automatic_dynamic[path]
            for number in range(3):  # different values
                entry |= type(entry).make_scalar(number)
        return state

    seen.clear()
    seen.default_factory = varied if paths else factory
    try:
        yield
    finally:
        seen.clear()
        seen.update(before)
        seen.default_factory = factory


def _installed_since(before: set[str], function: types.FunctionType) -> set[str]:
    return {name for name in function.__globals__.keys() - before if is_of_one_trace(name)}


def drop_globals(names: dict[str, Any], dropped: Iterable[str]) -> None:
    """Remove globals that Dynamo installed for one trace."""
    from torch._dynamo.utils import CleanupHook

    disown = getattr(CleanupHook, "disown", None)  # 2.15 records who installed a name
    for name in dropped:
        names.pop(name, None)
        if disown is not None:
            disown(names, name)


@contextmanager
def _as_cannot_trace() -> Iterator[None]:
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import (
        ConstraintViolationError,
        GuardOnDataDependentSymNode,  # raised unwrapped by the fake of an op
    )

    try:
        yield
    except (TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode) as error:
        raise _in_short(error) from error
    except NotImplementedError as error:  # torch.fx takes no such value as the argument of an op
        if not str(error).startswith("argument of type"):
            raise
        raise _in_short(error) from error


def _in_short(error: BaseException) -> CannotTrace:
    """Return the beginning of torch's explanation, and the user's line."""
    explanation = getattr(error, "explanation", "")  # set by :func:`raised_while_tracing`
    lines = [line.strip() for line in (explanation or str(error)).splitlines() if line.strip()]
    stack = [frame for frame in getattr(error, "real_stack", None) or () if frame.filename]
    hints = [line for line in lines if line.startswith(("Explanation:", "Hint:"))][:2]
    if explanation:
        hints, frames = lines[1:], [f'File "{at.filename}", line {at.lineno}' for at in stack]
    else:
        frames = [line for line in lines if line.startswith('File "')]
    text = "\n  ".join([*lines[:1], *hints, *frames[-1:]]) or type(error).__name__
    short = CannotTrace(text)
    short.model_raises = str(error).lstrip().startswith("Observed exception")
    short.becomes_several = not explanation
    short.what, short.hints = text.splitlines()[0], tuple(hints)
    if stack:
        last = stack[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"
        short.line = where, (last.line or "").strip()
    return short


def _lift(graph: fx.GraphModule) -> tuple[FrozenTensor, ...]:
    """Replace the tensors that Dynamo put into a graph by placeholders, which come last."""
    # Pieces take weights as inputs, so that equal layers are equal pieces.
    sources = getattr(graph, "_param_name_to_source", None) or {}
    last = graph.graph.find_nodes(op="placeholder")
    frozen: list[FrozenTensor] = []
    lifted: dict[str, fx.Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, str(node.target), None)
        if node.target not in sources or not isinstance(tensor, torch.Tensor):
            continue
        if node.target not in lifted:
            source = sources[node.target]
            where = last[-1].next if last else next(iter(graph.graph.nodes))
            with graph.graph.inserting_before(where):
                placeholder = graph.graph.placeholder(str(node.target))
            placeholder.meta = dict(node.meta)
            placeholder._dynamo_source = source
            last = [placeholder]
            lifted[str(node.target)] = placeholder
            frozen.append((str(source.name), tensor))
        node.replace_all_uses_with(lifted[str(node.target)])
        graph.graph.erase_node(node)
    for name in lifted:
        delattr(graph, name)
    graph.recompile()
    return tuple(frozen)


def size_oblivious(on: bool) -> Any:
    """Return a context in which a trace treats sizes 0 and 1 of dynamic dimensions like others."""
    from torch.fx.experimental import _config

    return patched(_config, {"backed_size_oblivious": on})


@contextmanager
def _attributes_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the attributes of tensors, among them Dynamo's marks."""
    before = {id(tensor): (tensor, dict(tensor.__dict__)) for tensor in tensors}
    try:
        yield
    finally:
        for tensor, attributes in before.values():
            if tensor.__dict__ != attributes:
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)


MARKS = ("_dynamo_", "_has_dynamo", "_specialize_on")


@contextmanager
def marked(dims: list[tuple[torch.Tensor, int, str | None]], unbacked: bool) -> Iterator[None]:
    """Mark (tensor, dimension, name) as dynamic for a trace, and remove the marks after it."""
    # ``unbacked``: the trace may assume nothing of the sizes; equal names are equal sizes.
    from torch._dynamo import mark_dynamic
    from torch._dynamo.decorators import mark_unbacked

    tensors = [tensor for tensor, _, _ in dims]
    with _attributes_kept(tensors):
        for tensor in tensors:
            for mark in [mark for mark in tensor.__dict__ if mark.startswith(MARKS)]:
                del tensor.__dict__[mark]
        for tensor, dim, name in dims:
            if unbacked:
                mark_unbacked(tensor, dim, shape_id=name)
            else:
                mark_dynamic(tensor, dim)
        yield


@contextmanager
def without_traces_left(called: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore what traces change: globals of the function, marks of tensors, Dynamo's counters."""
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    names = traced_function(called)[0].__globals__
    # Under the lock only this thread adds names and counts.
    with convert_frame.compile_lock, _attributes_kept(tensors):
        before = set(names)
        counted = {kind: dict(counts) for kind, counts in counters.items()}
        try:
            yield
        finally:
            for name in [name for name in names if name not in before]:
                if name.startswith("__"):
                    del names[name]
            for kind in [*counters]:
                counters[kind].clear()  # in place: other modules hold references
                counters[kind].update(counted.get(kind, {}))
                if kind not in counted:
                    del counters[kind]


def without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same sizes, strides, dtype and marks on a device, without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if device.type == "meta" else FakeTensorMode():
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        ).requires_grad_(tensor.requires_grad)
    fake.__dict__.update(tensor.__dict__)
    return fake
