"""The only place that asks which torch this is, and the only one that touches private torch names.

Each wrapper says on which versions it was tried: 2.11, 2.13 and 2.15 unless it says otherwise. The
rule: no other file of cgcompile imports a name of torch that starts with an underscore, or a module
that torch does not document.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

# State that a graph switches with nodes of its own: what enters a context, and what leaves it.
LEAVES: Mapping[Any, Any] = {
    torch.amp._enter_autocast: torch.amp._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}
ENTER_INFERENCE_MODE = torch.autograd.grad_mode._enter_inference_mode
SET_GRAD_ENABLED = torch._C._set_grad_enabled


# ---------------------------------------------------------------- operators


def all_op_names() -> list[str]:
    """Every registered operator, as ``ns::op`` or ``ns::op.overload``."""
    return list(torch._C._dispatch_get_all_op_names())


def custom_op_overload(obj: Any) -> torch._ops.OpOverload | None:
    """The operator behind a function that ``torch.library.custom_op`` decorated, else None."""
    from torch._library.custom_ops import CustomOpDef

    return obj._opoverload if isinstance(obj, CustomOpDef) else None


def is_op(obj: Any) -> bool:
    """Whether ``obj`` is an op of ``torch.ops``: overload, packet or higher-order op."""
    kinds = (
        torch._ops.OpOverload,
        torch._ops.OpOverloadPacket,
        torch._ops.HigherOrderOperator,
    )
    return isinstance(obj, kinds)


def is_higher_order_op(obj: Any) -> bool:
    return isinstance(obj, torch._ops.HigherOrderOperator)


def higher_order_ops() -> list[str]:
    """The names of the higher-order ops that exist, without the namespace."""
    return sorted(torch._ops._higher_order_ops)


def op_names(op: Any) -> tuple[str, ...]:
    """The registry names under which ``op`` is known, the most specific first."""
    if isinstance(op, torch._ops.OpOverload):
        packet = op.overloadpacket._qualified_op_name
        return (f"{packet}.{op._overloadname}", packet)
    if isinstance(op, torch._ops.OpOverloadPacket):
        packet = op._qualified_op_name
        return (packet, *(f"{packet}.{overload}" for overload in op.overloads()))
    if isinstance(op, torch._ops.HigherOrderOperator):
        return (f"higher_order::{op.name()}",)
    return ()


def op_overloads(op: Any) -> tuple[torch._ops.OpOverload, ...]:
    """The overloads that a call of ``op`` may reach."""
    if isinstance(op, torch._ops.OpOverload):
        return (op,)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return tuple(getattr(op, name) for name in op.overloads())
    return ()


def written_arguments(op: torch._ops.OpOverload) -> Iterator[tuple[int, str]]:
    """Position and name of each argument that the schema of ``op`` says it writes."""
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield position, argument.name


def process_group_backend(group: Any) -> str | None:
    """The backend name of a process group given by object or registered name; None if unknown."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    try:
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        return dist.get_backend(group)
    except (RuntimeError, ValueError, KeyError, TypeError, AssertionError):
        return None


# ---------------------------------------------------------------- Dynamo's graphs


def annotate(mark: dict[str, Any]) -> AbstractContextManager[Any]:
    """A context in which every traced node gets ``node.meta["custom"]`` updated with ``mark``."""
    import torch.fx.traceback

    return torch.fx.traceback.annotate(mark)


def source_name(placeholder: fx.Node) -> str | None:
    """Where Dynamo took an input from, such as ``L['x']``; None for graphs of other origin."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return None
    name = source.name  # a method once, a property since 2.9
    return str(name() if callable(name) else name)


def graph_break(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph early, with the user's line; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    text = str(reason.reason).strip().splitlines()[0]
    stack = [frame for frame in reason.user_stack or () if frame.filename]
    return f"{text} ({os.path.basename(stack[-1].filename)}:{stack[-1].lineno})" if stack else text


def tree_leaves(value: Any) -> list[Any]:
    from torch.utils import _pytree

    return _pytree.tree_leaves(value)


def fake_context(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """The fake mode that some of these values belong to, as a context; nothing if none does."""
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return nullcontext()


def is_static_input(placeholder: fx.Node) -> bool:
    """Whether Dynamo says that this input keeps its address: a parameter, buffer or attribute."""
    marks = placeholder.meta.get("tensor_dict") or {}
    return marks.get("_dynamo_static_input_type") is not None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Equal for tensors that share a storage; None where there is no storage to ask for.

    Valid while both tensors live.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph with all that this file reads of it; values are shared."""
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


def backend_of(compiled: Any) -> tuple[Any, str | None, dict[str, Any] | None]:
    """(backend, mode, options) with which ``torch.compile`` made a module; Nones if it did not."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

    if not isinstance(compiled, OptimizedModule):
        return None, None, None
    wrapper = innermost_backend(compiled.dynamo_ctx.callback)
    settings = getattr(wrapper, "kwargs", {})
    found = getattr(wrapper, "compiler_fn", wrapper)
    return found, settings.get("mode"), settings.get("options")


def restarts() -> tuple[type[BaseException], ...]:
    """What torch raises to make Dynamo trace again: control flow that nobody may wrap."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return (RestartAnalysis, SkipFrame)


def make_floats_constant(gm: fx.GraphModule) -> None:
    """Make Dynamo trace again with its symbolic Python floats as guarded constants.

    With ``dynamic=True`` Dynamo passes a Python float as a CPU tensor and reads it with ``item``.
    Inside a piece that is a host read, and a captured kernel would keep the first value.

    Raises:
        TensorifyScalarRestartAnalysis: there were such floats; Dynamo handles it.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    names = {
        str(symbol)
        for node in gm.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.SymFloat)
        for symbol in node.meta["example_value"].node._expr.free_symbols  # before replacements
        if symbol_is_type(symbol, SymT.FLOAT)
    }
    new = [name for name in sorted(names) if not TensorifyState.should_specialize(name)]
    for name in new:
        TensorifyState.specialize(name)
    if new:
        raise TensorifyScalarRestartAnalysis


# ---------------------------------------------------------------- symbols


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """Whether the symbol stands for a number that only the data tells."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def expression_nodes(
    graph: fx.Graph, expression: sympy.Expr, bound: Mapping[sympy.Symbol, fx.Node]
) -> fx.Node | int:
    """Insert nodes that compute ``expression`` from the nodes of its symbols; return the last."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    proxies = {symbol: fx.Proxy(bound[symbol]) for symbol in expression.free_symbols}
    result = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    return result.node if isinstance(result, fx.Proxy) else int(result)


class Shapes:
    """What cgcompile reads of torch's ``ShapeEnv``; the attribute names move between versions."""

    def __init__(self, env: Any) -> None:
        self._env = env

    @classmethod
    def of(cls, symints: Iterable[torch.SymInt]) -> "Shapes | None":
        for symint in symints:
            return cls(symint.node.shape_env)
        return None

    def replacement(self, symbol: sympy.Symbol) -> sympy.Expr:
        """What the symbol stands for now: itself, another symbol, or a number if specialised."""
        return self._env.replacements.get(symbol, symbol)

    def bounds(self, symbol: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr]:
        found = self._env.var_to_range.get(symbol)
        return (sympy.Integer(0), sympy.oo) if found is None else (found.lower, found.upper)

    def guards(self) -> list[tuple[sympy.Expr, str]]:
        """Each guard on sizes so far, with the user's line where torch knows it."""
        return [(guard.expr, _guard_line(guard)) for guard in self._env.guards]


def _guard_line(guard: Any) -> str:
    location = getattr(guard, "sloc", None)
    line = getattr(location, "maybe_user_loc", None)
    return str(line) if line else ""


# ---------------------------------------------------------------- compilers


@cache
def inductor_option_names() -> frozenset[str]:
    import torch._inductor.config as config

    return frozenset(config._config)


def inductor_mode_options(torch_mode: str) -> dict[str, Any]:
    """Inductor's settings for a ``torch.compile`` mode, without its own CUDA graphs."""
    from torch._inductor import list_mode_options

    options = dict(list_mode_options(torch_mode))
    options.pop("triton.cudagraphs", None)
    return options


def compile_whole(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile an unsplit graph as ``torch.compile(backend="inductor")`` would."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(inputs), config_patches=dict(patches))


def compile_standalone(
    gm: fx.GraphModule, fake_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile one piece with Inductor, for all sizes of the symbols in ``fake_inputs``.

    ``gm`` is not changed. Outputs of the result are a list. Settings this torch does not have are
    left out; the user's own were checked before.
    """
    from torch._inductor import standalone_compile

    wanted = {**_PIECE_PATCHES, **patches}
    known = {name: value for name, value in wanted.items() if name in inductor_option_names()}
    return standalone_compile(
        _with_a_tensor_output(gm),
        list(fake_inputs),
        dynamic_shapes="from_graph",
        options={"config_patches": known},
    )


def uncapturable_op(aten: fx.GraphModule) -> str | None:
    """The first node of an ATen graph that torch's own CUDA graphs refuse, as ``op``; else None."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    node = get_first_incompatible_cudagraph_node(aten)
    return None if node is None else str(node.target)


def _with_a_tensor_output(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm``, or a copy of one without outputs that returns an input: callers ignore it.

    ``standalone_compile`` looks for the fake mode, and with it the sizes, in the outputs.
    """
    tensor_input = next(
        (
            node
            for node in gm.graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        ),
        None,
    )
    if gm.graph.output_node().args[0] or tensor_input is None:
        return gm
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, copies)
    graph.output((copies[tensor_input],))
    return fx.GraphModule(gm, graph)


# No CUDA graphs and no partition of Inductor's own inside a piece; the wrapped region makes a
# compiled piece one call for a dispatch mode, which the host recorder needs.
_PIECE_PATCHES: Mapping[str, Any] = {
    "triton.cudagraphs": False,
    "graph_partition": False,
    "wrap_inductor_compiled_regions": True,
}


def compile_aten(
    gm: fx.GraphModule,
    fake_inputs: Sequence[Any],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Lower a piece to its functional ATen graph and give that to ``compiler`` (functorch)."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    def boxed(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(compiler(graph, inputs))

    return aot_module_simplified(
        gm, list(fake_inputs), fw_compiler=boxed, keep_inference_input_mutations=True
    )
