"""What a saved graph holds of torch's own objects, and how they are made again.

See ``cgcompile/compat/__init__.py``; everything here was tried on 2.11, 2.13 and 2.15.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

# ---------------------------------------------------------------- expressions


@cache
def expression_heads() -> Mapping[str, Any]:
    """The functions that sizes are made of: torch's own, then those of sympy, by a stable name."""
    from torch.utils._sympy import functions

    found: dict[str, Any] = {}
    for name in sympy.__all__:
        head = getattr(sympy, name, None)
        if isinstance(head, type) and issubclass(head, sympy.Basic):
            found[f"sympy.{head.__name__}"] = head
    for name, head in vars(functions).items():
        own = getattr(head, "__module__", None) == functions.__name__
        if own and isinstance(head, type) and issubclass(head, sympy.Basic):
            found[f"torch.{name}"] = head
    return found


@cache
def endless_numbers() -> Mapping[str, sympy.Expr]:
    """The ends of ranges without an end, by name: torch has integer ones of its own."""
    from torch.utils._sympy.numbers import int_oo

    return {"int_oo": int_oo, "-int_oo": -int_oo, "oo": sympy.oo, "-oo": -sympy.oo}


def traced_expression(number: Any) -> sympy.Expr:
    """The expression of a symbolic number as it was traced, before equalities were found."""
    return number.node._expr


# ---------------------------------------------------------------- sizes


@dataclass
class SizeState:
    """What is known of the sizes of one trace, as sympy objects and plain data.

    Attributes:
        symbols: symbol -> (hint or None, least, most, has the mark "size-like", is an unbacked
            input, hint that the user gave, order of allocation if unbacked, source or None).
        replacements: what symbols turned out to be equal to.
        guards: (expression, size-oblivious, the user's line).
        asserts: (symbol that it waits for, expression, message).
        divisible: remainders that are known to be 0.
        settings: of the environment, by name.
        unbacked: how many unbacked integers were made.
    """

    symbols: dict[sympy.Symbol, tuple[Any, ...]] = field(default_factory=dict)
    replacements: list[tuple[sympy.Symbol, sympy.Expr]] = field(default_factory=list)
    guards: list[tuple[sympy.Expr, bool, str]] = field(default_factory=list)
    asserts: list[tuple[sympy.Symbol | None, sympy.Expr, str]] = field(default_factory=list)
    divisible: list[sympy.Expr] = field(default_factory=list)
    settings: dict[str, bool] = field(default_factory=dict)
    unbacked: int = 0


def trace_of(value: Any) -> Any:
    """The size environment that a fake tensor or a symbolic number belongs to; None if none."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.shape_env
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


def size_state(env: Any) -> SizeState:
    """Read a size environment."""
    settings = asdict(env.settings)
    return SizeState(
        symbols={
            symbol: (
                env.backed_var_to_val.get(symbol),
                found.lower,
                found.upper,
                symbol in env.size_like,
                symbol in env.unbacked_inputs,
                env.var_to_hint_override.get(symbol),
                env.unbacked_alloc_order.get(symbol),
                next((str(source.name) for source in env.var_to_sources.get(symbol, ())), None),
            )
            for symbol, found in env.var_to_range.items()
        },
        replacements=list(env.replacements.items()),
        guards=[
            (
                guard.expr,
                bool(guard.size_oblivious),
                getattr(guard.sloc, "maybe_user_loc", "") or "",
            )
            for guard in env.guards
        ],
        asserts=[
            (symbol, each.expr, str(each.msg))
            for symbol, several in env.deferred_runtime_asserts.items()
            for each in several
        ],
        divisible=sorted(env.divisible, key=str),
        settings={name: value for name, value in settings.items() if isinstance(value, bool)},
        unbacked=env.unbacked_symint_counter,
    )


def new_trace(state: SizeState) -> Any:
    """A fake mode whose size environment knows what another one did.

    The state is put there as it is, without the reasoning that led to it.
    """
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
    from torch.utils._sympy.value_ranges import ValueRanges

    env = ShapeEnv(**state.settings)
    location = _location(None)
    for symbol, known in state.symbols.items():
        hint, least, most, size_like, is_input, override, order, source = known
        if hint is not None:
            env.backed_var_to_val[symbol] = hint
        env.var_to_range[symbol] = ValueRanges(least, most)
        env.var_to_range_sloc[symbol] = ValueRangesSLoc(location, location)
        if source is not None:
            env.var_to_sources[symbol] = [ConstantSource(source)]
        if size_like:
            env.size_like.add(symbol)
        if is_input:
            env.unbacked_inputs.add(symbol)
        if override is not None:
            env.var_to_hint_override[symbol] = override
        if order is not None:
            env.unbacked_alloc_order[symbol] = order
            env.var_to_stack[symbol] = _no_stack()
        if hasattr(env, "name_to_symbol"):  # 2.15
            env.name_to_symbol[symbol.name] = symbol
        with suppress(ValueError):  # new symbols must get other names
            env.unique_ids.add(int(symbol.name.lstrip("abcdefghijklmnopqrstuvwxyz_")))
    env.unbacked_symint_counter = state.unbacked
    for symbol, expression in state.replacements:
        env.replacements[symbol] = expression
        env.replacements_slocs[symbol] = location
    # A number that was made while this counted 0 never looks replacements up (2.13 on).
    env._replacements_version_counter = len(state.replacements)
    env.divisible.update(state.divisible)
    _add_guards(env, state)
    env._update_version_counter()
    return FakeTensorMode(shape_env=env)


def _add_guards(env: Any, state: SizeState) -> None:
    from torch.fx.experimental.symbolic_shapes import RuntimeAssert, ShapeGuard

    for expression, size_oblivious, line in state.guards:
        env.guards.append(ShapeGuard(expression, _location(line), size_oblivious))
        env.axioms.update(dict(env.get_implications(env.simplify(expression))))
        env.symbol_guard_counter.update(expression.free_symbols)
    for symbol, expression, message in state.asserts:
        waiting = env.deferred_runtime_asserts.setdefault(symbol, [])
        waiting.append(RuntimeAssert(expression, message, _no_stack()))
        env.num_deferred_runtime_asserts += 1


def _location(line: str | None) -> Any:
    from torch._guards import SLoc

    return SLoc("a saved graph", line or None)


def _no_stack() -> Any:
    """What stands for the traceback of a trace that is over."""
    from torch.utils._traceback import CapturedTraceback

    return CapturedTraceback(None)


_NUMBERS = {"int": torch.SymInt, "float": torch.SymFloat, "bool": torch.SymBool}


def symbolic_number(mode: Any, kind: str, expression: sympy.Expr) -> Any:
    """A ``SymInt``, ``SymFloat`` or ``SymBool`` (``kind`` int, float, bool) of an expression."""
    from torch.fx.experimental.sym_node import _NO_HINT, SymNode

    python = {"int": int, "float": float, "bool": bool}[kind]
    known = expression.xreplace(mode.shape_env.backed_var_to_val)
    plain = known.is_number or known in (sympy.true, sympy.false)
    node = SymNode(expression, mode.shape_env, python, python(known) if plain else _NO_HINT)
    return _NUMBERS[kind](node)


# ---------------------------------------------------------------- tensors


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of functorch's wrappers, which live inside ``vmap`` and ``grad``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def odd_fake(tensor: torch.Tensor) -> str | None:
    """Why a tensor is not a plain fake tensor over a storage; None if it is."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(tensor) is not FakeTensor:
        return "not a fake tensor" if type(tensor) is torch.Tensor else "a subclass of Tensor"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"of layout {tensor.layout}"
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return "conjugate, negative or zero by a bit"
    return None


def is_fake_parameter(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "_is_param", False))


def resize_storage(tensor: torch.Tensor, nbytes: Any) -> None:
    """Give the storage of a tensor on the meta device a size, which may be symbolic.

    A tenth of the time of ``torch.empty`` of a symbolic size, which computes with it.
    """
    torch.ops.inductor.resize_storage_bytes_(tensor, nbytes)


def fake_over(
    mode: Any, memory: torch.Tensor, device: torch.device, *, gradient: bool, parameter: bool
) -> torch.Tensor:
    """A fake tensor on a device, over a tensor on the meta device; about 10 us."""
    from torch._subclasses.fake_tensor import FakeTensor

    found = FakeTensor(mode, memory.requires_grad_(gradient), device)
    if parameter:
        found._is_param = True
    return found


def making_fakes(mode: Any) -> AbstractContextManager[Any]:
    """A context in which tensors on the meta device are made without guards on their sizes.

    Modes of the caller do not see them.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(mode.shape_env.suppress_guards())
    return stack


# ---------------------------------------------------------------- running on fakes

# Functions that wrapped values depend on, by the last part of their names.
FUNCTORCH_STATE = frozenset(
    {
        "_grad_decrement_nesting",
        "_grad_increment_nesting",
        "_vmap_decrement_nesting",
        "_vmap_increment_nesting",
        "lazy_load_decompositions",
    }
)
# State that a failure in the middle would leave switched on: forward-mode AD, functionalisation.
FUNCTORCH_STATE_WE_LEAVE_ALONE = frozenset(
    {"_enter_dual_level", "_func_increment_nesting", "_jvp_increment_nesting"}
)


@contextmanager
def running_on_fakes(mode: Any) -> Iterator[None]:
    """A context for nodes of a Dynamo graph; what they leave entered is left at its end."""
    from torch._C import _functorch
    from torch._dispatch.python import enable_python_dispatcher

    def level() -> int:
        return _functorch.maybe_current_level() or 0

    before = level()
    with torch.no_grad(), mode.shape_env.suppress_guards(), mode, enable_python_dispatcher():
        try:
            yield
        finally:
            while level() > before:
                kind = _functorch.peek_interpreter_stack().key()
                if kind == _functorch.TransformType.Vmap:
                    _functorch._vmap_decrement_nesting()
                else:
                    _functorch._grad_decrement_nesting()


# ---------------------------------------------------------------- metadata and modules


def saved_key_path(path: Sequence[Any]) -> list[tuple[str, Any]] | None:
    """A path of ``unbacked_bindings`` as (kind, what) pairs; None if a step is of unknown kind."""
    kinds = _key_kinds()
    found = []
    for step in path:
        name = type(step).__name__
        if kinds.get(name) is not type(step):
            return None
        names = [each.name for each in fields(step)]
        found.append((name, getattr(step, names[0]) if names else None))
    return found


def key_path(steps: Sequence[tuple[str, Any]]) -> tuple[Any, ...]:
    """The inverse of :func:`saved_key_path`."""
    kinds = _key_kinds()
    return tuple(kinds[name]() if what is None else kinds[name](what) for name, what in steps)


@cache
def _key_kinds() -> Mapping[str, Any]:
    from torch.fx.experimental import symbolic_shapes
    from torch.utils import _pytree

    named = ("CallMethodKey", "InnerTensorKey", "DivideByKey", "ConvertIntKey")
    found = {name: getattr(symbolic_shapes, name) for name in named}
    for name in ("SequenceKey", "MappingKey", "GetAttrKey"):
        found[name] = getattr(_pytree, name)
    return found


def lazy_module(attributes: Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose code is made at its first call."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(dict(attributes), graph)


def op_of_name(name: str) -> Any:
    """The overload (``ns::op.overload``) or packet (``ns::op``) of a registry name, or None."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(torch.ops, namespace), packet)
        return getattr(found, overload) if overload else found
    except AttributeError:
        return None


def op_schema(op: Any) -> str:
    """What an overload, or the overloads of a packet, take and return."""
    if isinstance(op, torch._ops.OpOverload):
        return str(op._schema)
    return "\n".join(str(getattr(op, name)._schema) for name in sorted(op.overloads()))


def higher_order_op(name: str) -> Any:
    """The higher-order op of a name, or None."""
    return torch._ops._higher_order_ops.get(name)


def has_plain_code(graph: fx.Graph) -> bool:
    """Whether the code of a graph takes its inputs and returns its output as they stand in it."""
    return type(graph._codegen) is fx.graph.CodeGen
