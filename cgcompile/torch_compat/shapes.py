"""Sizes of one artifact, apart from Dynamo's. See ``cgcompile/compat/__init__.py``.

Note [Sizes of its own]. What a compiler assumes about a symbol of Dynamo's becomes one of Dynamo's
guards, for all sizes. An artifact for a few sizes only must not do that, so it is compiled from
fake values that live in a ``ShapeEnv`` made for it alone. Nobody evaluates the guards of such an
environment: whoever runs the artifact must (:meth:`OwnShapes.guards`, :func:`python_predicate`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile.torch_compat.capture import is_plain_tensor
from cgcompile.torch_compat.dynamo import (
    ENTER_INFERENCE_MODE,
    LEAVES,
    SET_GRAD_ENABLED,
    storage_key,
)

_NO_EFFECT_ON_SIZES = (SET_GRAD_ENABLED, ENTER_INFERENCE_MODE, LEAVES[ENTER_INFERENCE_MODE])
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Span(NamedTuple):
    """The numbers that a symbol may stand for, and the one to compile with where one is needed."""

    hint: int
    least: Any
    most: Any


class OwnShapes:
    """Sizes in an environment of their own: each symbol a number, or bounded.

    On torch 2.11, 2.13 and 2.15 alike the bounds hold for whatever asks the environment: they
    decide comparisons without a guard, and Inductor reads them. They are no promise that a compiler
    makes use of them.
    """

    def __init__(self, sizes: Mapping[sympy.Symbol, int | Span], label: str) -> None:
        from torch._subclasses import FakeTensorMode
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
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
        from torch.utils._sympy.value_ranges import ValueRanges

        bounds = StrictMinMaxConstraint(vr=ValueRanges(span.least, span.most), warn_only=True)
        source = ConstantSource(name)
        positive = True if span.least > 0 else None  # see Note [Sizes of a symbol]
        made = self._env.create_symbol(span.hint, source, DimDynamic.DYNAMIC, bounds, positive)
        return self._env.create_symintnode(made, hint=span.hint, source=source)

    # -------------------------------------------------------------- values

    def number(self, found: Any) -> Any:
        """A plain or symbolic number of Dynamo's, in this environment."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        if not isinstance(found, torch.SymInt):
            return found
        expression = found.node.expr
        if expression.is_number:
            return int(expression)
        values = {symbol: self._values[symbol] for symbol in expression.free_symbols}
        return sympy_interp(PythonReferenceAnalysis, values, expression)

    def copied(self, gm: fx.GraphModule, copy: fx.GraphModule) -> fx.GraphModule:
        """Give ``copy``, a copy of a piece, values of this environment; sizes become constants."""
        from torch._dispatch.python import enable_python_dispatcher

        shared = _shared_storages(gm)
        bases: dict[int, torch.Tensor] = {}
        inputs = []
        # torch 2.11 takes symbolic sizes in composite ops only with the Python dispatcher.
        with torch.no_grad(), self.context(), self._mode, enable_python_dispatcher():
            for node in copy.graph.find_nodes(op="placeholder"):
                before = node.meta.get("example_value")
                made = self._fake(before, shared, bases)
                node.meta["example_value"] = made
                inputs.append(made)
                if isinstance(before, torch.SymInt) and isinstance(made, int):
                    _replace(node, made)
            copy.recompile()
            _Values(copy).run(*inputs)
        return copy

    def _fake(self, found: Any, shared: set[int], bases: dict[int, torch.Tensor]) -> Any:
        if not isinstance(found, torch.Tensor):
            return self.number(found)
        sizes = [self.number(size) for size in found.shape]
        strides = [self.number(stride) for stride in found.stride()]
        offset = self.number(found.storage_offset())
        key = storage_key(found)
        if not _needs_a_base(found, shared):
            return torch.empty_strided(sizes, strides, dtype=found.dtype, device=found.device)
        if key is None or key not in bases:
            count = self.number(found.untyped_storage().nbytes()) // found.element_size()
            base = torch.empty([count], dtype=found.dtype, device=found.device)
            if key is not None:
                bases[key] = base
        else:
            base = bases[key]
        return base.view(found.dtype).as_strided(sizes, strides, offset)

    @contextmanager
    def context(self) -> Iterator[None]:
        """What compilers find as torch's tracing context: this environment, not Dynamo's."""
        from torch._guards import TracingContext, tracing

        with tracing(TracingContext(self._mode)):
            yield

    # -------------------------------------------------------------- what was assumed

    def guards(self) -> list[sympy.Expr]:
        """What has been assumed beyond the bounds, in Dynamo's symbols."""
        return [self._in_originals(guard.expr) for guard in self._env.guards]

    def _in_originals(self, expression: sympy.Expr) -> sympy.Expr:
        hints = self._env.backed_var_to_val
        names = {s: self._original.get(s, hints.get(s, s)) for s in expression.free_symbols}
        return expression.xreplace(names)

    def specialised(self) -> dict[sympy.Symbol, int]:
        """Dynamo's symbols that a compiler fixed to one number here."""
        found = {own: self._env.replacements.get(own, own) for own in self._original}
        return {self._original[own]: int(now) for own, now in found.items() if now.is_number}


class _Values(fx.Interpreter):
    """Leaves the value of each node with it; grad mode stays what it is."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target in _NO_EFFECT_ON_SIZES:
            return None
        made = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output"):
            n.meta["example_value"] = made
        return made


def _replace(node: fx.Node, number: int) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda each: number if each is node else each)
        user.kwargs = fx.map_arg(user.kwargs, lambda each: number if each is node else each)


def _shared_storages(gm: fx.GraphModule) -> set[int]:
    """Keys of the storages that several inputs have."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    keys = [storage_key(each) for each in values if isinstance(each, torch.Tensor)]
    return {key for key in keys if key is not None and keys.count(key) > 1}


def _needs_a_base(tensor: torch.Tensor, shared: set[int]) -> bool:
    """Whether a tensor is not all there is of its memory, so that it must be made as a view."""
    offset = tensor.storage_offset()
    return storage_key(tensor) in shared or not isinstance(offset, int) or offset != 0


def why_not_copied(gm: fx.GraphModule, symbols: Set[sympy.Symbol]) -> str | None:
    """Why :meth:`OwnShapes.copied` cannot make the inputs of a piece again; None if it can."""
    shared = _shared_storages(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        found = node.meta.get("example_value")
        if isinstance(found, torch.Tensor):
            flags = found.is_conj() or found.is_neg() or found.is_quantized
            if not is_plain_tensor(found) or flags:
                return f"input {node.name!r} is no plain dense tensor"
            size: Any = found.untyped_storage().nbytes()
            free: Set[Any] = size.node.expr.free_symbols if hasattr(size, "node") else set()
            if _needs_a_base(found, shared) and not free <= symbols:
                return f"input {node.name!r} is a view of memory whose size no input tells"
        elif not isinstance(found, (torch.SymInt, *_CONSTANTS)):
            return f"input {node.name!r} is a {type(found).__name__}"
    return None


def python_predicate(
    conditions: Sequence[sympy.Expr], symbols: Sequence[sympy.Symbol]
) -> Callable[..., bool]:
    """A Python function of the values of ``symbols``: whether all conditions hold."""
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    text = " and ".join(f"({printer.doprint(condition)})" for condition in conditions) or "True"
    arguments = ", ".join(map(str, symbols))
    made: Callable[..., bool] = eval(f"lambda {arguments}: {text}", {"math": math, "torch": torch})
    return made
