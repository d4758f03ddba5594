"""Names that a reader knows for the inputs of a graph: ``model.layers.0.weight``, ``x.size()[0]``.

Dynamo calls an input ``L['self']._modules['model']._parameters['weight']``; printed tables,
messages and generated code use the dotted form that the user would write.

The sizes of a graph as sympy expressions: printing, bytes, and checks before any capture.

A graph traced with dynamic sizes has one symbol per varying dimension of its inputs. Every size and
every number of bytes is an expression of these symbols, so that a capture size that the model's own
guards refuse is refused up front, with the guard, and not by a wrong result.
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

from cgcompile import torch_compat as compat
from cgcompile.errors import ConfigError, SymbolError
from cgcompile.passes.nodes import bound_symbols, symbols_of, value

_CONTAINERS = re.compile(r"\._(?:modules|parameters|buffers)\[")
_KEY = re.compile(r"\['([^']*)'\]")
_INDEX = re.compile(r"\[(\d+)\]")


def dotted_source(placeholder: fx.Node) -> str | None:
    """Where the caller has an input, in dotted form; None if Dynamo did not make the graph."""
    source = compat.source_name(placeholder)
    if source is None:
        return None
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    text = _KEY.sub(r".\1", _CONTAINERS.sub("[", text))
    is_size = re.search(r"\.(?:size|stride)\(\)\[\d+\]$", text)
    tail = is_size.group() if is_size else ""
    head = text[: len(text) - len(tail)]
    return _INDEX.sub(r".\1", head).removeprefix("self.") + tail


def identifier(text: str, taken: set[str]) -> str:
    """A Python identifier for ``text`` that is not in ``taken``, which it is added to."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    unique, number = name, 1
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    taken.add(unique)
    return unique


log = logging.getLogger(__name__)

_DTYPES = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
    "bool": "b8",
}


class Symbols:
    """The symbols that the inputs of one graph give, in the order of the inputs.

    Args:
        gm: a graph whose inputs carry fake values.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        bound = bound_symbols(gm)
        self._dims = {symbol: dotted_source(node) or node.name for symbol, node in bound.items()}
        self._short = {symbol: sympy.Symbol(f"s{i}") for i, symbol in enumerate(bound)}
        self._shapes = compat.Shapes.of(value(node) for node in bound.values())

    @property
    def dims(self) -> dict[str, str]:
        """Printed symbol -> the input dimension it stands for: ``{"s0": "x.size()[0]"}``."""
        return {str(self._short[symbol]): dim for symbol, dim in self._dims.items()}

    def __iter__(self) -> Iterator[sympy.Symbol]:
        return iter(self._dims)

    def __contains__(self, symbol: sympy.Symbol) -> bool:
        return symbol in self._dims

    # -------------------------------------------------------------- printing

    def pretty(self, expression: Any) -> str:
        """An expression in the printed symbols ``s0``, ``s1``, ..., in order of the inputs."""
        return str(sympy.sympify(expression).subs(self._short))

    def number(self, found: Any) -> sympy.Expr:
        """The expression of a plain or symbolic number."""
        return found.node.expr if hasattr(found, "node") else sympy.sympify(found)

    def shape_text(self, tensor: torch.Tensor) -> str:
        """``f32[s0, 16]``."""
        sizes = ", ".join(self.pretty(self.number(size)) for size in tensor.shape)
        return f"{dtype_text(tensor.dtype)}[{sizes}]"

    # -------------------------------------------------------------- bytes

    def nbytes(self, tensor: torch.Tensor) -> sympy.Expr:
        """Bytes of the elements of a tensor."""
        count = sympy.Integer(tensor.element_size())
        for size in tensor.shape:
            count = count * self.number(size)
        return count

    def storage(self, tensor: torch.Tensor) -> tuple[int, sympy.Expr]:
        """(key, bytes) of the storage behind a tensor; a view pins all of it."""
        key = compat.storage_key(tensor)
        if key is None:
            return id(tensor), self.nbytes(tensor)
        return key, sympy.expand(self.number(tensor.untyped_storage().nbytes()))

    def tabulate(
        self, expression: sympy.Expr, sizes: Sequence[int], dim: str | None = None
    ) -> dict[int, int]:
        """The value of an expression of one symbol at each size.

        Args:
            expression: such as ``SplitGraph.crossing_bytes()``.
            sizes: values of the dimension.
            dim: which dimension varies; may be left out if the graph has one.

        Raises:
            ConfigError: the graph has several dimensions and none was named.
        """
        symbol = self.chosen(dim)
        function = sympy.lambdify([symbol] if symbol is not None else [], expression, "math")
        return {n: int(function(n) if symbol is not None else function()) for n in sizes}

    # -------------------------------------------------------------- checks

    def check_bound(self, found: Any, name: str, where: str) -> None:
        """Refuse a value whose size depends on a symbol that no input gives."""
        free = symbols_of(found) - self._dims.keys()
        if free:
            raise SymbolError.free(value=name, symbols=sorted(map(str, free)), where=where)

    def specialised(self) -> dict[str, str]:
        """The dimensions that were fixed to a number since they were traced, with that number."""
        fixed = {}
        for symbol, dim in self._dims.items():
            now = self._shapes.replacement(symbol) if self._shapes is not None else symbol
            if now.is_number:
                fixed[dim] = str(now)
        return fixed

    def guards_on(self, symbol: sympy.Symbol) -> list[str]:
        """What the traced code assumed of a symbol, as printed expressions, each once."""
        if self._shapes is None:
            return []
        guards = [guard for guard, _ in self._shapes.guards() if symbol in guard.free_symbols]
        return list(dict.fromkeys(map(self.pretty, guards)))

    def bounds(self, symbol: sympy.Symbol) -> tuple[Any, Any]:
        """The least and the largest number that a symbol may stand for."""
        return (0, sympy.oo) if self._shapes is None else self._shapes.bounds(symbol)

    def numbers_with(self, symbol: sympy.Symbol, size: int) -> dict[sympy.Symbol, int] | None:
        """A number for each symbol, with which the traced code may be right at a size.

        Args:
            symbol: which one has that size.
            size: the number it stands for.

        Returns:
            Preferably the numbers that the graph was traced with; None if a guard or range excludes
            the size, or no others were found that go with it.
        """
        if self._shapes is None:
            return None
        guards = [guard for guard, _ in self._shapes.guards()]
        if not self._allows({symbol: size}, guards):
            return None
        others = [other for other in self._dims if other != symbol]
        scale = size / (self._shapes.hint(symbol) or size or 1)
        choices = [self._likely(other, size, scale) for other in others]
        for numbers in itertools.islice(itertools.product(*choices), 256):
            found = {symbol: size, **dict(zip(others, numbers, strict=True))}
            if self._allows(found, guards):
                return found
        return None

    def _likely(self, symbol: sympy.Symbol, size: int, scale: float) -> list[int]:
        """Numbers that may go with a size: as traced, the same, scaled alike, the least."""
        least, traced = max(int(self.bounds(symbol)[0]), 2), self.traced_with(symbol)
        if traced is None:
            return list(dict.fromkeys([size, least]))
        scaled = math.ceil(traced * scale)
        return list(dict.fromkeys([traced, size, scaled, 2 * scaled, least]))

    def _allows(self, numbers: dict[sympy.Symbol, int], guards: list[sympy.Expr]) -> bool:
        for symbol, number in numbers.items():
            least, most = self.bounds(symbol)
            if not least <= number <= most:
                return False
        return all(guard.subs(numbers) is not sympy.false for guard in guards)

    def traced_with(self, symbol: sympy.Symbol) -> int | None:
        """The number that a symbol stood for at tracing; None if torch does not say."""
        return None if self._shapes is None else self._shapes.hint(symbol)

    def current(self, symbol: sympy.Symbol) -> sympy.Expr:
        """What a symbol stands for by now: itself, unless a guard has made it equal to another."""
        return symbol if self._shapes is None else self._shapes.replacement(symbol)

    def check_sizes(
        self, sizes: Sequence[int], dim: str | None, setting: str = "cudagraph_capture_sizes"
    ) -> None:
        """Refuse a size that a guard or range of the traced code excludes.

        Sizes 0 and 1 of a backed dimension are not checked: torch traces a graph of their own.

        Args:
            sizes: values of the dimension.
            dim: which dimension they speak of; may be left out if the graph has one.
            setting: what lists them, for the message.

        Raises:
            SymbolError: names the size and the guard.
            ConfigError: it is not clear which dimension the sizes speak of.
        """
        symbol = self.chosen(dim) if sizes else None
        if symbol is None or self._shapes is None:
            return
        least, most = self._shapes.bounds(symbol)
        own_graph = () if compat.is_unbacked(symbol) else (0, 1)
        for size in sizes:
            if size in own_graph:
                continue
            if not least <= size <= most:
                self._refuse(
                    setting, size, symbol, f"{least} <= {self._short[symbol]} <= {most}", ""
                )
            for guard, line in self._shapes.guards():
                if guard.subs(symbol, size) is sympy.false:
                    self._refuse(setting, size, symbol, self.pretty(guard), line)

    def _refuse(self, setting: str, size: int, symbol: sympy.Symbol, guard: str, line: str) -> None:
        where = f" ({line})" if line else ""
        raise SymbolError.size_refused(
            setting=setting, size=size, dim=self.text_of(symbol), guard=guard, where=where
        )

    def text_of(self, symbol: sympy.Symbol) -> str:
        """``s0 = x.size()[0]``."""
        return f"{self._short[symbol]} = {self._dims[symbol]}"

    def chosen(self, dim: str | None) -> sympy.Symbol | None:
        """The symbol of a dimension; None if the graph has no such dimension, or none at all.

        Raises:
            ConfigError: the graph has several dimensions and none was named.
        """
        if not self._dims:
            return None
        if dim is None and len(self._dims) == 1:
            return next(iter(self._dims))
        if dim is None:
            raise ConfigError.which_dimension(dims=list(self._dims.values()))
        for symbol, name in self._dims.items():
            if name == dim:
                return symbol
        # One model can make several graphs; this one has no such input.
        log.warning("capture_dim %s is not among %s", dim, ", ".join(self._dims.values()))
        return None


def dtype_text(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``, ``b8``: a dtype in a few characters."""
    name = str(dtype).removeprefix("torch.")
    head = name.rstrip("0123456789")
    return _DTYPES[head] + name[len(head) :] if head in _DTYPES else name
