"""From a split graph to the values of an explanation."""

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import compat
from cgcompile.boundaries import target_name
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.errors import ConfigError
from cgcompile.observe.parts import (
    Bytes,
    Cause,
    GraphBreak,
    ModeReport,
    PieceReport,
    SourceLine,
    SymbolReport,
    Totals,
    ValueReport,
)
from cgcompile.passes.nodes import (
    COMPUTING,
    is_symbolic_number,
    symbols_of,
    tensors,
    user_line,
    value,
)
from cgcompile.passes.pieces import Piece, Value
from cgcompile.passes.split import SplitGraph
from cgcompile.passes.symbols import dtype_text
from cgcompile.piecewise.auto import auto_mode
from cgcompile.piecewise.roles import full_support, why_never
from cgcompile.reasons import Reason, Why
from cgcompile.serving.planning import resolve_mode


class Reporter:
    """Reports about one split.

    Args:
        split: the split.
        sizes: sizes of the batch dimension for which bytes are wanted as numbers.
        dim: which dimension they speak of; None if the graph has one alone.

    Raises:
        ConfigError: sizes are given, and it is not clear of which dimension.
    """

    def __init__(self, split: SplitGraph, sizes: Sequence[int], dim: str | None) -> None:
        self._split = split
        self._symbols = split.symbols
        chosen = self._symbols.chosen(dim) if sizes else None
        self._traced = {each: self._symbols.traced_with(each) for each in self._symbols}
        self._at: list[tuple[int, dict[sympy.Symbol, int] | None]] = []
        if chosen is not None:
            self._at = [(size, self._symbols.numbers_with(chosen, size)) for size in sizes]

    @classmethod
    def asked(
        cls, split: SplitGraph, config: CompilationConfig, sizes: Sequence[int], dim: str | None
    ) -> "Reporter":
        """For the sizes that a user asked for, else those of the settings.

        Args:
            split: the split.
            config: the settings.
            sizes: what the user gave; may be empty.
            dim: of which dimension, if the user said so.

        Raises:
            ConfigError: there are sizes, and it is not clear of which dimension.
        """
        dim, dims = dim or config.capture_dim, list(split.symbols.dims.values())
        if sizes and dim is None and len(dims) > 1:
            raise ConfigError.sizes_of_which(dims=dims)
        return cls(split, sizes or config.cudagraph_capture_sizes or (), dim)

    # -------------------------------------------------------------- bytes

    def bytes(self, expression: Any) -> Bytes:
        """An expression, its number in the traced call, and at each size."""
        at = tuple((size, _number(expression, numbers)) for size, numbers in self._at)
        traced = {symbol: n for symbol, n in self._traced.items() if n is not None}
        return Bytes(self._symbols.pretty(expression), _number(expression, traced), at)

    def _storages(self, values: Iterable[Value]) -> Bytes:
        """Of the memory behind values, each storage once."""
        found = [self._symbols.storage(each) for value in values for each in tensors(value.meta)]
        return self.bytes(sum(dict(found).values(), sympy.Integer(0)))

    # -------------------------------------------------------------- pieces

    def pieces(self) -> tuple[PieceReport, ...]:
        """All pieces, in order."""
        return tuple(map(self._piece, self._split.pieces))

    def _piece(self, piece: Piece) -> PieceReport:
        values = self._split.values
        given = [values[name] for name in piece.inputs]
        made = [values[name] for name in piece.outputs]
        return PieceReport(
            index=piece.index,
            name=piece.name,
            captured=piece.capture,
            why=tuple(map(cause, piece.why)),
            support=piece.support.name,
            num_ops=piece.num_ops,
            source=tuple(SourceLine(*line) for line in piece.lines),
            inputs=tuple(map(self._value, given)),
            outputs=tuple(map(self._value, made)),
            bytes_in=self._storages(each for each in given if not each.static),
            bytes_out=self._storages(made),
            same_as=piece.same_as,
            compiled=piece.compiled,
            uncompiled=piece.uncompiled,
        )

    def _value(self, value: Value) -> ValueReport:
        found, symbols = value.meta, self._symbols
        shape = dtype = device = size = storage = None
        if isinstance(found, torch.Tensor):
            shape = tuple(symbols.pretty(symbols.number(each)) for each in found.shape)
            dtype, device = dtype_text(found.dtype), str(found.device)
            size = self.bytes(symbols.nbytes(found))
            storage = self.bytes(symbols.storage(found)[1])
        return ValueReport(
            name=value.name,
            shape=shape,
            dtype=dtype,
            device=device,
            bytes=size,
            storage=storage,
            source=value.source,
            static=value.static,
            written=value.written,
        )

    # -------------------------------------------------------------- the whole

    def symbols(self) -> tuple[SymbolReport, ...]:
        """The sizes that vary, in the order of the inputs."""
        names = list(self._symbols.dims.items())
        found = []
        for symbol, (name, source) in zip(self._symbols, names, strict=True):
            least, most = self._symbols.bounds(symbol)
            found.append(
                SymbolReport(
                    name=name,
                    source=source,
                    traced=self._traced[symbol],
                    least=int(least),
                    most=int(most) if getattr(most, "is_Integer", False) else None,
                    guards=tuple(self._symbols.guards_on(symbol)),
                )
            )
        return tuple(found)

    def totals(self) -> Totals:
        """Sums over all pieces."""
        pieces = self._split.pieces
        captured = sum(piece.capture for piece in pieces)
        return Totals(
            pieces=len(pieces),
            captured=captured,
            eager=len(pieces) - captured,
            distinct=len(self._split.distinct),
            compiled=sum(piece.compiled for piece in self._split.distinct),
            ops=sum(piece.num_ops for piece in pieces),
            crossing=self.bytes(self._split.crossing_bytes()),
            static=self._storages(each for each in self._split.values.values() if each.static),
        )


def _number(expression: Any, numbers: dict[sympy.Symbol, int] | None) -> int | None:
    if numbers is None:
        return None
    found = sympy.sympify(expression).subs(numbers)
    return int(found) if found.is_number else None


_DATA_FIX = (
    "cgcompile.compile() keeps it in the graph and runs it eager; or set "
    "torch._dynamo.config.capture_scalar_outputs and capture_dynamic_output_shape_ops"
)


def data_breaks(split: SplitGraph) -> tuple[GraphBreak, ...]:
    """Where ``torch.compile`` breaks a graph by default: at ops that read data for the host."""
    found: dict[tuple[str, SourceLine | None], None] = {}
    for piece in split.pieces:
        if any(why.reason is Reason.HOST_SYNC for why in piece.why):
            for node in piece.module.graph.nodes:
                if node.op in COMPUTING and _reads_data(node):
                    line = user_line(node)
                    where = None if line is None else SourceLine(*line)
                    found[f"{target_name(node.target)} reads data", where] = None
    return tuple(GraphBreak("torch.compile", what, (), line, _DATA_FIX) for what, line in found)


def _reads_data(node: fx.Node) -> bool:
    """Whether a number or a size comes of data here, not of such a number or size before."""
    given = {each for argument in node.all_input_nodes for each in _unbacked(argument)}
    made = _unbacked(node) - given
    return bool(made) and (is_symbolic_number(value(node)) or not given)


def _unbacked(node: fx.Node) -> set[sympy.Symbol]:
    return {each for each in symbols_of(value(node)) if compat.is_unbacked(each)}


def cause(why: Why) -> Cause:
    """A reason as plain text."""
    return Cause(why.reason.value, why.detail)


def mode_report(
    split: SplitGraph | None, config: CompilationConfig, query_lens: Sequence[int]
) -> ModeReport:
    """Which CUDA graphs would serve, on a device that has them.

    Args:
        split: None if nothing was traced: then only the settings speak.
        config: the settings.
        query_lens: tokens per request of uniform decode.
    """
    wanted = config.cudagraph_mode
    assert wanted is not None
    if split is None:
        return ModeReport(wanted.name, wanted.name, None, None, ())
    support = full_support(split)
    never = why_never(split, wanted, True)
    if never is not None:
        lost: tuple[Cause, ...] = () if wanted is CUDAGraphMode.NONE else (cause(never),)
        return ModeReport(wanted.name, "NONE", "NONE", support.name, lost)
    piecewise = config.mode is CompilationMode.PIECEWISE
    piecewise &= any(piece.capture for piece in split.pieces)
    auto = auto_mode(split, wanted).name
    about = _least_able(split)
    try:
        found = resolve_mode(
            wanted, support, query_lens=query_lens, piecewise=piecewise, support_why=about
        )
    except ConfigError:  # no graph is possible at all
        detail = f"attention support is {support.name} ({about}), and there are no pieces"
        lost = (Cause(Reason.ATTENTION_SUPPORT.value, detail),)
        return ModeReport(wanted.name, "NONE", auto, support.name, lost)
    lost = tuple(map(cause, found.whys))
    return ModeReport(wanted.name, found.mode.name, auto, support.name, lost)


def _least_able(split: SplitGraph) -> str:
    """Which boundaries go the least far into a FULL graph, in words."""
    least = full_support(split)
    pieces = [piece for piece in split.pieces if piece.support is least and piece.why]
    if not pieces:
        return "a piece reads memory of the CPU" if least.name == "NEVER" else ""
    first, more = pieces[0], len(pieces) - 1
    where = f"{first.why[0].detail}, {first.where}"
    return f"{where}, and {more} more" if more else where
