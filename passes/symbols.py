"""The sizes of a graph as sympy expressions, and readable names of its inputs.

A graph traced with dynamic sizes has one symbol per varying dimension of its inputs. Every size and
every number of bytes is an expression of these symbols, so that a capture size that the model's own
guards refuse is refused before capture, with the guard, and not by a wrong result.

Dynamo names an input ``L['self']._modules['model']._parameters['weight']``; printed tables,
messages and generated code use the dotted form that the user would write: ``model.weight``.
"""

import itertools
import keyword
import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.errors import ConfigError, SymbolError
from cgcompile.passes.nodes import bound_symbols, symbols_of, value
from cgcompile.torch_compat import dynamo, expressions, raw_memory

log = logging.getLogger(__name__)

_CONTAINERS = re.compile(r"\._(?:modules|parameters|buffers)\[")
_KEY = re.compile(r"\['([^']*)'\]")
_INDEX = re.compile(r"\[(\d+)\]")


def dotted_source(placeholder: fx.Node) -> str | None:
    """Return the dotted name of an input at the caller; None if the graph is not from Dynamo."""
    source = dynamo.source_name(placeholder)
    if source is None:
        return None
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    text = _KEY.sub(r".\1", _CONTAINERS.sub("[", text))
    is_size = re.search(r"\.(?:size|stride)\(\)\[\d+\]$", text)
    tail = is_size.group() if is_size else ""
    head = text[: len(text) - len(tail)]
    return _INDEX.sub(r".\1", head).removeprefix("self.") + tail


def identifier(text: str, taken: set[str]) -> str:
    """Return a Python identifier for ``text`` that is not in ``taken``, and add it."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    unique, number = name, 1
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    taken.add(unique)
    return unique


_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b8"}


class Symbols(expressions.Shapes):
    """The symbols of the inputs of one graph, in the order of the inputs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        bound = bound_symbols(gm)
        self._dims = {symbol: dotted_source(node) or node.name for symbol, node in bound.items()}
        self._short = {symbol: sympy.Symbol(f"s{i}") for i, symbol in enumerate(bound)}
        envs = (value(node).node.shape_env for node in bound.values())
        super().__init__(next(envs, None))  # None without symbols, and then not used

    @property
    def dims(self) -> dict[str, str]:
        """Printed symbol -> the input dimension it stands for: ``{"s0": "x.size()[0]"}``."""
        return {str(self._short[symbol]): dim for symbol, dim in self._dims.items()}

    def __iter__(self) -> Iterator[sympy.Symbol]:
        return iter(self._dims)

    def __contains__(self, symbol: sympy.Symbol) -> bool:
        return symbol in self._dims

    def pretty(self, expression: Any) -> str:
        """Return the text of an expression, with ``s0``, ``s1``, ... in the order of the inputs."""
        return str(sympy.sympify(expression).subs(self._short))

    def number(self, number: Any) -> sympy.Expr:
        """Return the expression of a plain or symbolic number."""
        return number.node.expr if hasattr(number, "node") else sympy.sympify(number)

    def shape_text(self, tensor: torch.Tensor) -> str:
        """Return text such as ``f32[s0, 16]``."""
        sizes = ", ".join(self.pretty(self.number(size)) for size in tensor.shape)
        return f"{dtype_text(tensor.dtype)}[{sizes}]"

    def nbytes(self, tensor: torch.Tensor) -> sympy.Expr:
        """Return the bytes of the elements of a tensor."""
        return sympy.Mul(tensor.element_size(), *map(self.number, tensor.shape))

    def storage(self, tensor: torch.Tensor) -> tuple[int, sympy.Expr]:
        """Return (key, bytes) of the storage behind a tensor; a view keeps all of it alive."""
        key = raw_memory.storage_key(tensor)
        if key is None:
            return id(tensor), self.nbytes(tensor)
        return key, sympy.expand(self.number(tensor.untyped_storage().nbytes()))

    def check_bound(self, values: Any, name: str, where: str) -> None:
        """Refuse a value whose size depends on a symbol that no input gives."""
        free = symbols_of(values) - self._dims.keys()
        if free:
            raise SymbolError.free(value=name, symbols=sorted(map(str, free)), where=where)

    def specialised(self) -> dict[str, str]:
        """Return the dimensions that were fixed to a number after tracing, with that number."""
        fixed = {}
        for symbol, dim in self._dims.items():
            now = self.current(symbol)
            if now.is_number:
                fixed[dim] = str(now)
        return fixed

    def guards_on(self, symbol: sympy.Symbol) -> list[str]:
        """Return the guards on a symbol, as text, without duplicates."""
        guards = [guard for guard, _ in self.guards() if symbol in guard.free_symbols]
        return list(dict.fromkeys(map(self.pretty, guards)))

    def numbers_with(self, symbol: sympy.Symbol, size: int) -> dict[sympy.Symbol, int] | None:
        """Return values of all symbols that the guards allow where one is ``size``, or None."""
        guards = [guard for guard, _ in self.guards()]
        if not self._allows({symbol: size}, guards):
            return None
        others = [other for other in self._dims if other != symbol]
        scale = size / (self.traced_with(symbol) or size or 1)
        choices = [self._likely(other, size, scale) for other in others]
        for numbers in itertools.islice(itertools.product(*choices), 256):
            candidate = {symbol: size, **dict(zip(others, numbers, strict=True))}
            if self._allows(candidate, guards):
                return candidate
        return None

    def _likely(self, symbol: sympy.Symbol, size: int, scale: float) -> list[int]:
        """Return values that may go with a size: as traced, the same, scaled alike, the least."""
        least, traced = max(int(self.bounds(symbol)[0]), 2), self.traced_with(symbol)
        if traced is None:
            return list(dict.fromkeys([size, least]))
        scaled = math.ceil(traced * scale)
        return list(dict.fromkeys([traced, size, scaled, 2 * scaled, least]))

    def _allows(self, numbers: dict[sympy.Symbol, int], guards: list[sympy.Expr]) -> bool:
        for symbol, number in numbers.items():
            lower, upper = self.bounds(symbol)
            if not lower <= number <= upper:
                return False
        return all(guard.subs(numbers) is not sympy.false for guard in guards)

    def check_sizes(
        self, sizes: Sequence[int], dim: str | None, setting: str = "cudagraph_capture_sizes"
    ) -> None:
        """Refuse a size that a guard or range of the traced code excludes."""
        # Sizes 0 and 1 of a backed dimension are not checked: torch traces a graph for each.
        symbol = self.chosen(dim) if sizes else None
        if symbol is None:
            return
        lower, upper = self.bounds(symbol)
        own_graph = () if expressions.is_unbacked(symbol) else (0, 1)
        for size in sizes:
            if size in own_graph:
                continue
            if not lower <= size <= upper:
                limits = f"{lower} <= {self._short[symbol]} <= {upper}"
                self._refuse(setting, size, symbol, limits, "")
            for guard, line in self.guards():
                if guard.subs(symbol, size) is sympy.false:
                    self._refuse(setting, size, symbol, self.pretty(guard), line)

    def _refuse(self, setting: str, size: int, symbol: sympy.Symbol, guard: str, line: str) -> None:
        where = f" ({line})" if line else ""
        raise SymbolError.size_refused(
            setting=setting, size=size, dim=self.text_of(symbol), guard=guard, where=where
        )

    def text_of(self, symbol: sympy.Symbol) -> str:
        """Return text such as ``s0 = x.size()[0]``."""
        return f"{self._short[symbol]} = {self._dims[symbol]}"

    def only(self, dim: str | None) -> sympy.Symbol | None:
        """Return the symbol of a dimension, which may be left out if the graph has one, or None."""
        symbols = [symbol for symbol, name in self._dims.items() if dim in (None, name)]
        return symbols[0] if len(symbols) == 1 else None

    def chosen(self, dim: str | None) -> sympy.Symbol | None:
        """Return the symbol of a dimension, which may be left out if the graph has one, or None."""
        if not self._dims:
            return None
        if dim is None and len(self._dims) == 1:
            return next(iter(self._dims))
        if dim is None:
            raise ConfigError.which_dimension(dims=list(self._dims.values()))
        for symbol, name in self._dims.items():
            if name == dim:
                return symbol
        # One model can have several graphs; this one has no such input.
        log.warning("capture_dim %s is not among %s", dim, ", ".join(self._dims.values()))
        return None


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype in a few characters: ``f32``, ``bf16``, ``i64``, ``b8``."""
    name = str(dtype).removeprefix("torch.")
    head = name.rstrip("0123456789")
    return _DTYPES[head] + name[len(head) :] if head in _DTYPES else name
