"""Several artifacts of one piece: which sizes each is compiled for, and which one a call takes.

``compile_sizes`` asks for artifacts of one size, ``compile_ranges_endpoints`` for artifacts of
ranges; both speak of one dimension of the model's inputs, which is one symbol. :class:`Variants`
says what to compile of a piece, :class:`Ranged` is what runs: it reads the value of *that symbol*
where the piece has it, and never takes the first integer that it meets.

The rule: an artifact serves only what it was compiled for. Each has sizes of its own (Note [Sizes
of its own]), so what its compiler assumed beyond its range is checked at every call that Python
sees; where that does not hold, the artifact for all sizes runs, or the uncompiled piece. Inside a
capture the choice is made while recording, so a replay pays nothing for it.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig
from cgcompile.errors import PieceCompileError
from cgcompile.passes.nodes import symbols_of, value
from cgcompile.passes.split import Piece, SplitGraph
from cgcompile.pieces.cache import Runnable

log = logging.getLogger(__name__)

Reader = Callable[[Sequence[Any]], int]


@dataclass(frozen=True)
class SizeRange:
    """Sizes from ``first`` to ``last``, both included; no ``last``: and all that are larger."""

    first: int
    last: int | None

    def __contains__(self, size: int) -> bool:
        return self.first <= size and (self.last is None or size <= self.last)

    def __str__(self) -> str:
        if self.first == self.last:
            return f"size {self.first}"
        return f"sizes {self.first} " + ("and more" if self.last is None else f"to {self.last}")


def ranges_between(endpoints: Sequence[int]) -> tuple[SizeRange, ...]:
    """The ranges that increasing endpoints cut 1, 2, 3, ... into; an endpoint ends its range."""
    firsts = [1, *(endpoint + 1 for endpoint in endpoints)]
    return tuple(map(SizeRange, firsts, [*endpoints, None]))


@dataclass(frozen=True, eq=False)
class Variant:
    """One artifact to be.

    Attributes:
        piece: what it is of.
        module: the graph to compile; its inputs carry the fake values to compile with. That of the
            piece itself where ``sizes`` is None.
        sizes: the sizes it is for; None for all, as they were traced.
        own: the sizes of its own, in which ``module`` was traced again, or None.
        given: conditions on other sizes under which it was made.
        readers: how to read the symbols that the inputs have, the one that decides first; empty
            where ``sizes`` is None.
    """

    piece: Piece
    module: fx.GraphModule
    sizes: SizeRange | None = None
    own: compat.OwnShapes | None = None
    given: tuple[sympy.Expr, ...] = ()
    readers: Mapping[sympy.Symbol, Reader] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``piece_0``, or ``piece_0, size 8``; for messages."""
        return self.piece.name if self.sizes is None else f"{self.piece.name}, {self.sizes}"

    def context(self) -> AbstractContextManager[None]:
        """Where its compiler must run."""
        return nullcontext() if self.own is None else self.own.context()

    def assumed(self) -> list[sympy.Expr]:
        """After it was compiled: what must hold, beyond its sizes, where it runs."""
        found = [*self.given, *(() if self.own is None else self.own.guards())]
        return [each for each in dict.fromkeys(found) if each is not sympy.true]


class Variants:
    """What to compile of each piece of a split graph.

    Args:
        split: the split graph.
        config: the settings.

    Raises:
        ConfigError: there are sizes, and it is not clear which dimension they speak of.
    """

    def __init__(self, split: SplitGraph, config: CompilationConfig) -> None:
        self._symbols = split.symbols
        self._sizes = [SizeRange(size, size) for size in config.sizes_to_compile]
        endpoints = config.compile_ranges_endpoints
        self._ranges = () if endpoints is None else ranges_between(endpoints)
        self._likely = (*(config.cudagraph_capture_sizes or ()), *config.sizes_to_compile)
        wanted = self._sizes or self._ranges
        self._named = self._symbols.chosen(config.capture_dim) if wanted else None
        self._compiles = config.compiler != "eager"
        self._found: dict[SizeRange, dict[sympy.Symbol, int] | None] = {}

    def of(self, piece: Piece) -> list[Variant]:
        """The artifacts to make of a piece; the one for all sizes, where there is one, is last.

        Args:
            piece: a piece that is compiled.
        """
        symbol = None if self._named is None else self._symbols.current(self._named)
        whole = Variant(piece, piece.module)
        inputs = [value(node) for node in piece.module.graph.find_nodes(op="placeholder")]
        free = symbols_of(inputs)
        if not self._compiles or symbol not in free:
            return [whole]
        ordered = sorted(free, key=lambda each: (each != symbol, str(each)))
        readers = {each: read for each in ordered if (read := reader(inputs, each)) is not None}
        why = compat.why_not_copied(piece.module, free)
        if why is None and not all(each in readers and each in self._symbols for each in free):
            why = "the value of a size in it cannot be read"
        if why is not None:
            log.info("%s: one artifact for all sizes: %s", piece.name, why)
            return [whole]
        sizes = [each for size in self._sizes for each in self._made(piece, symbol, readers, size)]
        single = {each.sizes for each in sizes}
        ranges = [
            each
            for size in self._ranges
            for each in self._made(piece, symbol, readers, size)
            if each.sizes not in single
        ]
        return [*sizes, *ranges] if ranges else [*sizes, whole]

    def _made(
        self,
        piece: Piece,
        symbol: sympy.Symbol,
        readers: Mapping[sympy.Symbol, Reader],
        wanted: SizeRange,
    ) -> Iterator[Variant]:
        """The variant for some sizes; none if the graph never has any of them."""
        least, most = self._symbols.bounds(symbol)
        first = max(wanted.first, int(least))
        most = min(sympy.oo if wanted.last is None else sympy.Integer(wanted.last), most)
        numbers = self._numbers(symbol, wanted, first, most)
        if numbers is None:
            return
        spans: dict[sympy.Symbol, int | compat.Span] = {}
        given = []
        for each in readers:
            low, high = (first, most) if each == symbol else self._symbols.bounds(each)
            if low < 1:
                given.append(sympy.Ge(each, 1))
            low = max(int(low), 1)
            spans[each] = low if low == high else compat.Span(numbers[each], low, high)
        served = SizeRange(first, int(most) if most.is_Integer else None)
        own = compat.OwnShapes(spans, str(served))
        try:
            module = own.copied(piece.module, compat.copied(piece.module))
        except Exception as error:
            name = f"{piece.name}, {served}"
            raise PieceCompileError.not_traced(
                piece=name, where=piece.where, error=error
            ) from error
        yield Variant(piece, module, served, own, tuple(given), readers)

    def _numbers(
        self, symbol: sympy.Symbol, wanted: SizeRange, first: int, most: Any
    ) -> dict[sympy.Symbol, int] | None:
        """A number for each symbol to compile a range with; None if there is none."""
        if wanted not in self._found:
            hints = self._hints(symbol, first, most)
            found = (self._symbols.numbers_with(symbol, size) for size in hints)
            self._found[wanted] = next((each for each in found if each is not None), None)
            if self._found[wanted] is None:
                reason = "guards exclude it, or no other sizes were found that go with it"
                log.info("no artifact for %s: %s", wanted, reason)
        return self._found[wanted]

    def _hints(self, symbol: sympy.Symbol, first: int, most: Any) -> Iterator[int]:
        """Sizes of a range to compile with, the best first: as traced, then the largest."""
        traced = self._symbols.traced_with(symbol)
        likely = [] if traced is None else [traced]
        likely += [int(most)] if most.is_Integer else []
        likely += [*reversed(self._likely), *(1 << bit for bit in range(20)), first]
        yield from (size for size in dict.fromkeys(likely) if first <= size <= most)
        yield from (size for size in range(first, first + _TRIED) if size <= most)

    def choosing(self, made: Sequence[tuple[Variant, Runnable]]) -> Runnable:
        """What runs a piece, of the artifacts that :meth:`of` asked for.

        Args:
            made: each variant with what was compiled of it.
        """
        if len(made) == 1 and made[0][0].sizes is None:
            return made[0][1]
        piece, readers = made[0][0].piece, made[0][0].readers
        assert self._named is not None
        rest: Runnable = piece.module.forward
        rest_is = "the uncompiled piece"
        artifacts = []
        for variant, run in made:
            if variant.sizes is None:
                rest, rest_is = run, "the artifact for all sizes"
                continue
            assumed = variant.assumed()
            holds = _checked(readers, assumed) if assumed else None
            text = self._symbols.pretty(sympy.And(*assumed)) if assumed else ""
            artifacts.append(Artifact(variant.sizes, run, holds, text))
        named, read = self._symbols.text_of(self._named), next(iter(readers.values()))
        return Ranged(piece.name, named, read, artifacts, rest, rest_is)

    def specialised(self, variant: Variant) -> dict[str, str]:
        """The dimensions that the compiler of a variant fixed to a number, with that number."""
        if variant.own is None:
            return self._symbols.specialised()
        fixed = variant.own.specialised()
        return {self._symbols.text_of(symbol): str(size) for symbol, size in fixed.items()}


_TRIED = 64  # sizes of a range, from its first on, that may be needed to find one without a guard


def _checked(
    readers: Mapping[sympy.Symbol, Reader], assumed: Sequence[sympy.Expr]
) -> Callable[[Sequence[Any]], bool]:
    symbols = sorted(set().union(*(each.free_symbols for each in assumed)), key=str)
    values = [readers[symbol] for symbol in symbols]
    holds = compat.python_predicate(assumed, symbols)
    return lambda given: holds(*(read(given) for read in values))


# ---------------------------------------------------------------- reading a symbol


def reader(inputs: Sequence[Any], symbol: sympy.Symbol) -> Reader | None:
    """A function of what a piece is given that returns the value of one symbol; None if none can.

    Args:
        inputs: the fake values of the inputs of the piece.
        symbol: what to read: of an input that is that number, or has it as a size, or has a size
            that tells it (``2*s0``, ``s0 + 1``), in this order.
    """
    places = [(each, itemgetter(k)) for k, each in enumerate(inputs)]
    sizes: list[tuple[Any, Reader]] = [p for p in places if isinstance(p[0], torch.SymInt)]
    for k, each in enumerate(inputs):
        if isinstance(each, torch.Tensor):
            sizes += [(size, _size_of(k, dim)) for dim, size in enumerate(each.shape)]
    derived = None
    for size, read in sizes:
        if not isinstance(size, torch.SymInt):
            continue
        expression = size.node.expr
        if expression == symbol:
            return read
        if derived is None and expression.free_symbols == {symbol}:
            derived = _inverted(expression, symbol, read)
    return derived


def _size_of(position: int, dim: int) -> Reader:
    return lambda given: int(given[position].shape[dim])


def _inverted(expression: sympy.Expr, symbol: sympy.Symbol, read: Reader) -> Reader | None:
    """How to get ``symbol`` from the value of ``factor * symbol + offset``."""
    factor, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    if not (factor.is_Integer and offset.is_Integer and factor != 0):
        return None
    if sympy.expand(factor * symbol + offset - expression) != 0:
        return None
    by, less = int(factor), int(offset)
    return lambda given: (read(given) - less) // by


# ---------------------------------------------------------------- choosing


@dataclass(frozen=True, eq=False)
class Artifact:
    """What was compiled of a piece for some sizes.

    Attributes:
        sizes: what it serves.
        run: what was compiled.
        holds: of the inputs, whether what its compiler assumed besides is so; None: it is.
        assumed: that in words.
    """

    sizes: SizeRange
    run: Runnable
    holds: Callable[[Sequence[Any]], bool] | None = None
    assumed: str = ""

    def __str__(self) -> str:
        return f"{self.sizes}, if {self.assumed}" if self.assumed else str(self.sizes)


class Ranged:
    """A piece with several artifacts. Called with the inputs of the piece, it runs the right one.

    Args:
        name: of the first piece of this structure.
        dim: the dimension that decides, such as ``s0 = x.size()[0]``.
        read: the value of that dimension, of the inputs of the piece.
        artifacts: what was compiled.
        rest: what runs where none of them may.
        rest_is: what that is, in words.

    Attributes:
        artifacts: those for single sizes first, then ranges, in order.
    """

    def __init__(
        self,
        name: str,
        dim: str,
        read: Reader,
        artifacts: Sequence[Artifact],
        rest: Runnable,
        rest_is: str,
    ) -> None:
        single = [each for each in artifacts if each.sizes.first == each.sizes.last]
        ranges = [each for each in artifacts if each.sizes.first != each.sizes.last]
        self._single: dict[int, list[Artifact]] = {}  # a range may be of one size, too
        for each in single:
            self._single.setdefault(each.sizes.first, []).append(each)
        self._ranges = sorted(ranges, key=lambda each: each.sizes.first)
        self._firsts = [each.sizes.first for each in self._ranges]
        self.artifacts = (*single, *self._ranges)
        self._name = name
        self._dim = dim
        self._read = read
        self._rest = rest
        self._rest_is = rest_is

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        for found in self.serving(self._read(inputs)):
            if found.holds is None or found.holds(inputs):
                return found.run(*inputs)
        return self._rest(*inputs)

    def serving(self, size: int) -> Iterator[Artifact]:
        """The artifacts that are for a size, the narrowest first."""
        yield from self._single.get(size, ())
        position = bisect_right(self._firsts, size) - 1
        if position >= 0 and size in self._ranges[position].sizes:
            yield self._ranges[position]

    def text(self) -> str:
        """Which artifact serves what, one line each, in the order in which they are tried."""
        rows = [f"  {each}" for each in self.artifacts]
        return "\n".join([f"{self._name} by {self._dim}", *rows, f"  otherwise {self._rest_is}"])


def artifacts_text(split: SplitGraph, runnables: Sequence[Runnable]) -> str:
    """Which artifacts the compiled pieces of a split graph have; each structure once.

    Args:
        split: the split graph.
        runnables: what runs each piece.
    """
    rows = []
    for piece in split.distinct:
        run = runnables[piece.index]
        if isinstance(run, Ranged):
            rows.append(run.text())
        elif piece.compiled:
            rows.append(f"{piece.name}\n  one artifact for all sizes")
    return "\n".join(rows)
