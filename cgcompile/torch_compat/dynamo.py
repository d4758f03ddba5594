"""Dynamo's graphs and their symbols."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cgcompile.torch_compat.expressions import evaluated, text_of
from cgcompile.torch_compat.raw_memory import storage_identity
from cgcompile.torch_compat.torch_ops import OpOverload, original_of

# State that a graph switches with nodes of its own: what enters a context, and what leaves it.
FOREACH_ADD_: Any = torch._foreach_add_
ENTER_AUTOCAST: Any = torch.amp._enter_autocast
LEAVES: Mapping[Any, Any] = {
    ENTER_AUTOCAST: torch.amp._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}
ENTER_INFERENCE_MODE = torch.autograd.grad_mode._enter_inference_mode
SET_GRAD_ENABLED = torch._C._set_grad_enabled


def source_name(placeholder: fx.Node) -> str | None:
    """Return Dynamo's path of an input, such as ``L['x']``; None for graphs of other origin."""
    source = getattr(placeholder, "_dynamo_source", None)
    return None if source is None else str(source.name)


class _Source(NamedTuple):
    """The path of an input that Dynamo did not make."""

    name: str


def set_source_name(placeholder: fx.Node, name: str) -> None:
    """Give an input a path of its own, such as ``L['x'].scale``."""
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


def fake_context(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return the fake mode of the first value that has one, as a context; else a null context."""
    modes = (getattr(value, "fake_mode", None) for value in values)
    return next((mode for mode in modes if mode is not None), nullcontext())


def present_size(value: Any) -> Any:
    """Return a symbolic size with the replacement of its symbol; other values as they are."""
    if not isinstance(value, torch.SymInt):
        return value
    node: Any = value.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


def known_size(size: Any) -> int | str:
    """Return a size as a number, or as an expression of symbols; equal sizes have equal texts."""
    expression = size if type(size) is int else size.node.expr  # after replacements
    if getattr(expression, "free_symbols", None):
        return text_of(expression)
    return int(expression)


def number_text(number: torch.SymInt | torch.SymFloat) -> str:
    """Return a symbolic number as Python text; equal numbers have equal texts."""
    return text_of(number.node.expr)


def size_conditions(
    shape_env: Any, sizes: Set[Any], numbers: Set[str] = frozenset()
) -> list[tuple[str, tuple[str, ...]]]:
    """Return what a trace assumed of ``sizes`` and ``numbers``: (condition in Python, symbols)."""
    # Note [Sizes of a symbol]. The symbol of a backed size is positive for sympy, whatever its
    # range, so ``s > 0`` is True without a guard: such a trace serves no size of 0.
    conditions = []
    shapes = Shapes(shape_env)
    for guard, _ in shapes.guards():
        # Sizes that are equal have one name by now, and are compared as such.
        guard = guard.xreplace({symbol: shapes.current(symbol) for symbol in guard.free_symbols})
        symbols = tuple(sorted(map(str, guard.free_symbols)))
        if symbols:
            conditions.append((text_of(guard), symbols))
    for symbol, bounds in shape_env.var_to_range.items():  # torch drops guards that these imply
        if is_unbacked(symbol) or shapes.current(symbol) != symbol:
            continue
        lower = 1 if str(symbol) in sizes and symbol.is_positive else 0
        lower = max(lower, int(bounds.lower)) if bounds.lower.is_Integer else lower
        if str(symbol) in numbers and str(symbol) not in sizes:
            if bounds.lower.is_Integer:
                conditions.append((f"{symbol} >= {bounds.lower}", (str(symbol),)))
        elif lower > (0 if str(symbol) in sizes else 2):
            conditions.append((f"{symbol} >= {lower}", (str(symbol),)))
        if bounds.upper.is_Integer:
            conditions.append((f"{symbol} <= {bounds.upper}", (str(symbol),)))
    return conditions


_SQUEEZES = frozenset({"squeeze", "squeeze_", torch.squeeze, torch.Tensor.squeeze})
_SQUEEZES |= {torch.ops.aten.squeeze, torch.ops.aten.squeeze_}


def squeeze_conditions(graph: fx.Graph) -> list[tuple[str, tuple[str, ...]]]:
    """Return the sizes that ``squeeze`` ops assumed not to be 1, as :func:`size_conditions`."""
    # Size-oblivious tracing keeps such a dimension and leaves no guard.
    conditions = {}
    for node in graph.nodes:
        op = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
        if op not in _SQUEEZES:
            continue
        tensor = node.args[0] if node.args else node.kwargs.get("input")
        fake = tensor.meta.get("example_value") if isinstance(tensor, fx.Node) else None
        if not isinstance(fake, torch.Tensor):
            continue
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", range(fake.dim()))
        for dim in [dims] if isinstance(dims, int) else dims:
            text = known_size(fake.shape[dim])
            if isinstance(text, str):
                symbols = tuple(sorted(map(str, fake.shape[dim].node.expr.free_symbols)))
                conditions[f"{text} != 1"] = symbols
    return list(conditions.items())


def is_static_input(placeholder: fx.Node) -> bool:
    """Return whether Dynamo marked an input as static: a parameter, buffer or attribute."""
    marks = placeholder.meta.get("tensor_dict") or {}
    return marks.get("_dynamo_static_input_type") is not None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a key that is equal for tensors of one storage, while it lives; None without one."""
    try:
        return storage_identity(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


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
    """Have Dynamo call methods of a backend for functions whose calls will bypass it.

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
    # Dynamo compiles code no more that it failed to compile, also for other backends. From torch
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
    """Return (backend, mode, options) of what ``torch.compile`` passes to Dynamo as the backend."""
    settings = getattr(wrapper, "kwargs", {})
    return getattr(wrapper, "compiler_fn", wrapper), settings.get("mode"), settings.get("options")


def backend_of(compiled: Any) -> tuple[Any, str | None, dict[str, Any] | None]:
    """Return (backend, mode, options) of a module of ``torch.compile``; Nones for others."""
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
    # that has varied. Those that have not, such as factors of a model, are constants.
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
        if config.assume_static_by_default or seen.setdefault(key, value) != value:
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
    """Let a trace, by default the one that is compiled now, serve no zero of another sign.

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
    """Replace nodes that compute with floats alone by constants, and drop those inputs."""
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


# ---------------------------------------------------------------- symbols


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """Return whether a symbol is a number that depends on data."""
    return bool(free_unbacked_symbols(symbol))


def expression_nodes(
    expression: sympy.Expr, bound: Mapping[sympy.Symbol, fx.Node]
) -> fx.Node | int:
    """Insert nodes that compute ``expression`` from the nodes of its symbols; return the last."""
    result = evaluated(expression, bound)
    return result if isinstance(result, fx.Node) else int(result)


class Shapes:
    """What cgcompile reads of torch's ``ShapeEnv``; the attribute names move between versions."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def current(self, symbol: sympy.Symbol) -> sympy.Expr:
        """Return the replacement of a symbol: itself, another one, or a number if specialised."""
        return self._env.replacements.get(symbol, symbol)

    def bounds(self, symbol: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
        """Return the least and the largest value of a symbol."""
        bounds = self._env.var_to_range.get(symbol)
        if bounds is None:
            return sympy.Integer(0), sympy.oo
        # See Note [Sizes of a symbol].
        lower = max(bounds.lower, sympy.Integer(1)) if symbol.is_positive else bounds.lower
        return lower, bounds.upper

    def traced_with(self, symbol: sympy.Symbol) -> int | None:
        """Return the value of a symbol at tracing; None if it is unbacked."""
        hint = self._env.backed_var_to_val.get(symbol)
        return None if hint is None else int(hint)

    def guards(self) -> list[tuple[sympy.Expr, str]]:
        """Return each guard on sizes so far, with the user's line where torch has it."""
        return [(guard.expr, _guard_line(guard)) for guard in self._env.guards]


def _guard_line(guard: Any) -> str:
    location = getattr(guard, "sloc", None)
    line = getattr(location, "maybe_user_loc", None)
    return str(line) if line else ""
