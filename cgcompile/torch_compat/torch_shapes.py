"""Symbolic sizes of one artifact, separate from Dynamo's.

Note [Sizes of its own]. What a compiler assumes about a symbol of Dynamo's becomes one of Dynamo's
guards, for all sizes. An artifact for a few sizes must not add such guards, so it is compiled from
fake values of a ``ShapeEnv`` of its own. The rule: the caller of the artifact evaluates the guards
of that environment (:meth:`OwnShapes.guards`, ``python_predicate`` of ``expressions.py``).
"""

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cgcompile.torch_compat.dynamo import (
    ENTER_INFERENCE_MODE,
    LEAVES,
    SET_GRAD_ENABLED,
    Shapes,
    storage_key,
)
from cgcompile.torch_compat.expressions import evaluated
from cgcompile.torch_compat.raw_memory import is_plain_tensor

_NO_EFFECT_ON_SIZES = (SET_GRAD_ENABLED, ENTER_INFERENCE_MODE, LEAVES[ENTER_INFERENCE_MODE])
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Span(NamedTuple):
    """The range of a symbol, and the number to compile with where one is needed."""

    hint: int
    least: Any
    most: Any


class OwnShapes:
    """An environment of its own in which each symbol of Dynamo's is a number, or bounded."""

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
