"""Sizes: expressions of symbols, guards on them as text, and symbols of one artifact alone.

Note [Guards as text]
The text comes from ``ShapeEnv.produce_guards_expression``, in which ``L['t0']`` is the first size.
It may be read from a file, so it is evaluated without ``eval``, by a grammar of comparisons and
arithmetic: only what torch's printer of guards writes.

Note [Sizes of its own]
What a compiler assumes about a symbol of Dynamo's becomes one of Dynamo's guards, for all sizes. An
artifact for a few sizes must not add such guards, so it is compiled from fake values of a
``ShapeEnv`` of its own. The rule: the caller of the artifact evaluates the guards of that
environment (:meth:`OwnShapes.guards`, :func:`text_of`).
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._sympy.interp import sympy_interp

from cgcompile.torch_compat.raw_memory import is_plain_tensor, storage_key
from cgcompile.torch_compat.torch_ops import (
    ENTER_INFERENCE_MODE,
    LEAVES,
    SET_GRAD_ENABLED,
    OpOverload,
)

# The handlers of torch's interpreter of expressions that have another name here than in the modules
# ``operator`` and ``math``.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "ceil_to_int": math.ceil,
    "floor_to_int": math.floor,
    "identity": operator.pos,
    "int_truediv": operator.truediv,
    "maximum": torch.sym_max,
    "minimum": torch.sym_min,
    "not_": torch.sym_not,
    "pow_by_natural": operator.pow,
    "python_mod": operator.mod,
    "round_decimal": round,
    "round_to_int": round,
    "sqrt": torch.sym_sqrt,
    "to_dtype": torch.sym_float,  # to float64, always
    "trunc_to_int": math.trunc,
    "where": torch.sym_ite,
}

_TEXTS: Mapping[Callable[..., Any], str] = {
    operator.abs: "abs({})",
    operator.add: "({} + {})",
    operator.and_: "({} & {})",
    operator.eq: "({} == {})",
    operator.floordiv: "({} // {})",
    operator.ge: "({} >= {})",
    operator.gt: "({} > {})",
    operator.le: "({} <= {})",
    operator.lt: "({} < {})",
    operator.mod: "({} % {})",
    operator.mul: "({} * {})",
    operator.ne: "({} != {})",
    operator.or_: "({} | {})",
    operator.pos: "{}",
    operator.pow: "({} ** {})",
    operator.truediv: "({} / {})",
    operator.xor: "({} ^ {})",
    torch.sym_float: "float({})",
    torch.sym_ite: "({1} if {0} else {2})",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
    torch.sym_not: "(not {})",
    torch.sym_sqrt: "math.sqrt({})",
}

NAMES_IN_TEXT: Mapping[str, Any] = {"math": math}  # besides symbols and builtins


class _Handlers:
    """The handlers of torch's interpreter; ``call`` gets a function and its arguments."""

    def __init__(self, call: Callable[..., Any], constant: Callable[[Any], Any]) -> None:
        self._call, self._constant = call, constant

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _FUNCTIONS.get(name) or getattr(operator, name, None) or getattr(math, name)
        return partial(self._handle, function)

    def _handle(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # The interpreter adds the dtype of the result, which each function has by itself.
        return self._call(function, *(a for a in arguments if not isinstance(a, torch.dtype)))

    def constant(self, number: Any, dtype: torch.dtype) -> Any:
        kinds = {torch.int64: int, torch.bool: bool}
        return self._constant(kinds.get(dtype, float)(number))

    def trunc(self, number: Any) -> Any:
        return self.to_dtype(self.trunc_to_int(number))

    def modular_indexing(self, number: Any, divisor: Any, modulus: Any) -> Any:
        return self.mod(self.floordiv(number, divisor), modulus)

    def expr_cond_pair(self, number: Any, condition: Any) -> tuple[Any, Any]:
        return number, condition

    def piecewise(self, *cases: tuple[Any, Any]) -> Any:
        *others, (result, _) = cases
        for number, condition in reversed(others):
            result = self.where(condition, number, result)
        return result


def _value(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the value of a call, or a new node that makes it where an argument is a node."""
    node = next((each for each in arguments if isinstance(each, fx.Node)), None)
    return function(*arguments) if node is None else node.graph.call_function(function, arguments)


def _text(function: Callable[..., Any], *arguments: str) -> str:
    if function in _TEXTS:
        return _TEXTS[function].format(*arguments)
    owner = "" if function is round else "math."
    return f"{owner}{function.__name__}({', '.join(arguments)})"


def _text_of_constant(number: float) -> str:
    return repr(number) if math.isfinite(number) else f"float('{number}')"


_VALUES = _Handlers(_value, lambda number: number)
_IN_TEXT = _Handlers(_text, _text_of_constant)


def evaluated(expression: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Return the value of an expression for numbers, symbolic numbers or nodes of its symbols."""
    return sympy_interp(_VALUES, dict(values), expression)


def text_of(expression: sympy.Basic) -> str:
    """Return an expression as Python text, which may use :data:`NAMES_IN_TEXT`."""
    names = {symbol: str(symbol) for symbol in expression.free_symbols}
    return str(sympy_interp(_IN_TEXT, names, expression))


# ---------------------------------------------------------------- symbols of a graph


def present_size(value: Any) -> Any:
    """Return a symbolic size with the replacement of its symbol; other values as they are."""
    if not isinstance(value, torch.SymInt):
        return value
    node: Any = value.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)


def fixed_size(size: Any) -> Any:
    """Return a symbolic size as a number if the trace has fixed it; other values as they are."""
    expression = getattr(getattr(size, "node", None), "expr", None)  # after replacements
    return int(expression) if getattr(expression, "is_Integer", False) else size


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


# ---------------------------------------------------------------- guards on sizes as text


_LONGEST = 2**16  # characters; torch writes some hundred
_DEEPEST = 64


class NotAGuard(ValueError):
    """A text that is not a guard on sizes."""


_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


_KNOWN = _OPERATORS.keys()
_Term = Callable[[Sequence[Any]], Any]


@cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions that torch's printers of guards write, in any supported version."""
    known: dict[str, Callable[..., Any]] = {"abs": abs, "max": max, "min": min, "round": round}
    known |= {f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc")}
    names = ("sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "_sym_sqrt")
    known |= {f"torch.{name}": getattr(torch, name) for name in names if hasattr(torch, name)}
    return known


def require_guards(text: str) -> None:
    """Raise NotAGuard for a text that :func:`guards_hold` cannot evaluate."""
    _parsed(text)


def inclusive(guard: Any) -> Any:
    """Return a guard on integers with ``>=`` for ``>``: torch adds either, for the same fact."""
    kinds = {sympy.StrictGreaterThan: 1, sympy.StrictLessThan: -1}
    step = kinds.get(type(guard))
    if step is None or not (guard.lhs.is_integer and guard.rhs.is_integer):
        return guard
    return sympy.Ge(guard.lhs, guard.rhs + 1) if step > 0 else sympy.Le(guard.lhs, guard.rhs - 1)


def guards_hold(text: str, sizes: Sequence[Any]) -> bool:
    """Return whether guards hold for integer or symbolic sizes; raises as above."""
    return bool(_parsed(text)(sizes))


def _parsed(text: str) -> _Term:
    if len(text) > _LONGEST:
        raise NotAGuard(f"guards of {len(text)} characters, more than {_LONGEST}")
    try:
        return _term(ast.parse(text, mode="eval").body, 0)
    except NotAGuard:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAGuard(f"guards that do not parse: {error}") from None


def _term(node: ast.expr, depth: int) -> _Term:
    """Return a function of the sizes for a node of the grammar; raise for any other node."""
    if depth > _DEEPEST:
        raise NotAGuard(f"guards nested deeper than {_DEEPEST}")
    terms = partial(map, partial(_term, depth=depth + 1))
    match node:
        case ast.Constant(value=number) if type(number) in (int, float, bool):
            return lambda sizes: number
        case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))):
            if name[:1] == "t" and name[1:].isdecimal() and len(name) < 8:
                return partial(_size, int(name[1:]))
        case ast.BoolOp(op=op, values=values):
            hold, parts = all if isinstance(op, ast.And) else any, list(terms(values))
            return lambda sizes: hold(part(sizes) for part in parts)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return partial(_applied, _OPERATORS[type(op)], list(terms([operand])))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return partial(_applied, _OPERATORS[type(op)], list(terms([left, right])))
        # 9 ** 9 ** 9 would not return.
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=n)) if n in range(9):
            return partial(_applied, lambda base: base**n, list(terms([left])))
        case ast.Compare(left=left, ops=ops, comparators=others) if {*map(type, ops)} <= _KNOWN:
            checks = [_OPERATORS[type(op)] for op in ops]
            return partial(_compared, checks, list(terms([left, *others])))
        case ast.Call(func=func, args=args, keywords=[]) if _name(func) in _functions():
            return partial(_applied, _functions()[_name(func)], list(terms(args)))
    raise NotAGuard(f"{ast.unparse(node)[:80]!r} is no comparison or arithmetic of sizes")


def _size(number: int, sizes: Sequence[Any]) -> Any:
    if number >= len(sizes):
        raise NotAGuard(f"guards on size {number} of {len(sizes)}")
    return sizes[number]


def _applied(function: Callable[..., Any], parts: list[_Term], sizes: Sequence[Any]) -> Any:
    return function(*(part(sizes) for part in parts))


def _compared(checks: list[Callable[..., Any]], parts: list[_Term], sizes: Sequence[Any]) -> bool:
    values = [part(sizes) for part in parts]
    return all(check(*pair) for check, *pair in zip(checks, values, values[1:], strict=False))


def _name(node: ast.expr) -> str:
    """Return a name, or a name with one attribute; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# ---------------------------------------------------------------- symbolic sizes of one artifact


_NO_EFFECT_ON_SIZES = (SET_GRAD_ENABLED, ENTER_INFERENCE_MODE, LEAVES[ENTER_INFERENCE_MODE])
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Span(NamedTuple):
    """The range of a symbol, and the number to compile with where one is needed."""

    hint: int
    least: Any
    most: Any


class OwnShapes:
    """A separate environment, in which each symbol of Dynamo's is a number, or bounded."""

    # The bounds decide comparisons without a guard, and Inductor reads them. ``label`` becomes part
    # of the names of symbols, so that torch's caches find an artifact of the same bounds. Where two
    # labels are equal, the bounds of the artifact that was found are returned by :meth:`guards`.

    def __init__(self, sizes: Mapping[sympy.Symbol, int | Span], label: str) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._values: dict[sympy.Symbol, Any] = {}
        self._original: dict[sympy.Symbol, sympy.Symbol] = {}
        for symbol, size in sizes.items():
            self._values[symbol] = size
            if isinstance(size, Span):
                self._values[symbol] = self._bounded(symbol, size, f"{symbol} of {label}")
                self._original[self._values[symbol].node.expr] = symbol

    def _bounded(self, symbol: sympy.Symbol, span: Span, name: str) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, constrain_range

        source = ConstantSource(name)
        positive = True if span.least > 0 else None  # see Note [Sizes of a symbol]
        own = self._env.create_symbol(span.hint, source, DimDynamic.DYNAMIC, None, positive)
        number = self._env.create_symintnode(own, hint=span.hint, source=source)
        constrain_range(number, min=span.least, max=span.most)
        return number

    def number(self, value: Any) -> Any:
        """Return a plain or symbolic number of Dynamo's in this environment."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        values = {symbol: self._values[symbol] for symbol in expression.free_symbols}
        return evaluated(expression, values)

    def copied(self, gm: fx.GraphModule, copy: fx.GraphModule) -> fx.GraphModule:
        """Give ``copy``, a copy of a piece, values of this environment; sizes become constants."""
        # :func:`why_not_copied` must be None for the piece.
        from torch._dispatch.python import enable_python_dispatcher

        shared = _shared_storages(gm)
        bases: dict[int, torch.Tensor] = {}
        inputs = []
        # torch 2.11 takes symbolic sizes in composite ops only with the Python dispatcher.
        with torch.no_grad(), self.context(), self._mode, enable_python_dispatcher():
            for node in copy.graph.find_nodes(op="placeholder"):
                original = node.meta.get("example_value")
                value = self._fake(original, shared, bases)
                node.meta["example_value"] = value
                inputs.append(value)
                if isinstance(original, torch.SymInt) and isinstance(value, int):
                    replace_uses(node, value)
            copy.recompile()
            _Values(copy).run(*inputs)
        return copy

    def _fake(self, value: Any, shared: set[int], bases: dict[int, torch.Tensor]) -> Any:
        if not isinstance(value, torch.Tensor):
            return self.number(value)
        sizes = [self.number(size) for size in value.shape]
        strides = [self.number(stride) for stride in value.stride()]
        if not _needs_a_base(value, shared):
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        key = storage_key(value)
        base = None if key is None else bases.get(key)
        if base is None:
            count = self.number(value.untyped_storage().nbytes()) // value.element_size()
            base = torch.empty([count], dtype=value.dtype, device=value.device)
            if key is not None:
                bases[key] = base
        offset = self.number(value.storage_offset())
        return base.view(value.dtype).as_strided(sizes, strides, offset)

    def context(self) -> AbstractContextManager[Any]:
        """Return the tracing context of this environment, for compilers, in place of Dynamo's."""
        from torch._guards import TracingContext, tracing

        context: AbstractContextManager[Any] = tracing(TracingContext(self._mode))
        return context

    def guards(self) -> list[sympy.Expr]:
        """Return the assumptions beyond the bounds, in Dynamo's symbols."""
        return [self._in_originals(guard.expr) for guard in self._env.guards]

    def _in_originals(self, expression: sympy.Expr) -> sympy.Expr:
        hints = self._env.backed_var_to_val
        names = {s: self._original.get(s, hints.get(s, s)) for s in expression.free_symbols}
        return expression.xreplace(names)

    def specialised(self) -> dict[sympy.Symbol, int]:
        """Return Dynamo's symbols that a compiler specialised here, with their numbers."""
        values = {own: self._env.replacements.get(own, own) for own in self._original}
        return {self._original[own]: int(value) for own, value in values.items() if value.is_number}


class _Values(fx.Interpreter):
    """Store the value of each node; grad mode does not change."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target in _NO_EFFECT_ON_SIZES:
            return None
        value = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output"):
            n.meta["example_value"] = value
        return value


def replace_uses(node: fx.Node, new: Any) -> None:
    """As ``Node.replace_all_uses_with``, also for a number or a tuple of numbers."""
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda arg: new if arg is node else arg)
        user.kwargs = fx.map_arg(user.kwargs, lambda arg: new if arg is node else arg)


@dataclass(frozen=True)
class Layout:
    """The metadata that a fake tensor is made from."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def with_numbers(arguments: Any, size: int | None) -> Any:
    """Return arguments of an op with layouts in place of tensors, and a number for each symbol.

    Args:
        arguments: tensors, symbolic and plain values, in tuples and lists.
        size: the value of the symbol, if they have one alone; else, and with None, as traced.
    """
    numbers: list[Any] = []

    def listed(leaf: Any) -> Any:
        numbers.extend((*leaf.shape, *leaf.stride()) if isinstance(leaf, torch.Tensor) else [leaf])

    fx.node.map_aggregate(arguments, listed)
    symbolic = [number for number in numbers if isinstance(number, torch.SymInt)]
    symbols = {symbol for number in symbolic for symbol in number.node.expr.free_symbols}
    known = {symbol: size for symbol in symbols if size is not None and len(symbols) == 1}

    def number(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        return int(value.node.expr.subs(known)) if known else int(value.node.hint)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return number(value)
        sizes, strides = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
        return Layout(sizes, strides, value.dtype, value.device)

    return fx.node.map_aggregate(arguments, leaf)


def call_with_fakes(function: Callable[..., Any], arguments: Any) -> Any:
    """Call a function with fake tensors of layouts."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def leaf(value: Any) -> Any:
        if not isinstance(value, Layout):
            return value
        dtype, device = value.dtype, value.device
        return torch.empty_strided(value.sizes, value.strides, dtype=dtype, device=device)

    with FakeTensorMode():
        return function(*fx.node.map_aggregate(arguments, leaf))


def statically_equal(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal for all values of their symbols; adds no guard."""
    return statically_known_true(one == other)


def equal_if_defined(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal, or no op broadcasts one to the other; adds no guard."""
    if statically_equal(one, other):
        return True
    return statically_known_true(one > 1) and statically_known_true(other > 1)


def largest_size(size: Any) -> int | None:
    """Return the largest value of a size that is a number, or a symbol times a number; or None."""
    if type(size) is int:
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    factor, symbol = expression.as_coeff_Mul()
    if not isinstance(symbol, sympy.Symbol):
        return None
    most = factor * Shapes(size.node.shape_env).bounds(symbol)[1]
    return int(most) if most.is_Integer else None


def _shared_storages(gm: fx.GraphModule) -> set[int]:
    """Return the keys of storages that several inputs share."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    keys = [storage_key(value) for value in values if isinstance(value, torch.Tensor)]
    return {key for key in keys if key is not None and keys.count(key) > 1}


def _needs_a_base(tensor: torch.Tensor, shared: set[int]) -> bool:
    """Return whether a tensor must be created as a view, because it is a part of its memory."""
    offset = tensor.storage_offset()
    return storage_key(tensor) in shared or not isinstance(offset, int) or offset != 0


def why_not_copied(gm: fx.GraphModule, symbols: Set[sympy.Symbol]) -> str | None:
    """Return why :meth:`OwnShapes.copied` cannot create the inputs of a piece; None if it can."""
    shared = _shared_storages(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            flags = value.is_conj() or value.is_neg() or value.is_quantized
            if not is_plain_tensor(value) or flags:
                return f"input {node.name!r} is no plain dense tensor"
            size: Any = value.untyped_storage().nbytes()
            free: Set[Any] = size.node.expr.free_symbols if hasattr(size, "node") else set()
            if _needs_a_base(value, shared) and not free <= symbols:
                return f"input {node.name!r} is a view of memory whose size no input determines"
        elif not isinstance(value, (torch.SymInt, *_CONSTANTS)):
            return f"input {node.name!r} is a {type(value).__name__}"
    return None
