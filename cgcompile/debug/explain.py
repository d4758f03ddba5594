"""What would be split where, and why, before anything runs: :func:`explain`.

The call is traced as :func:`cgcompile.compile` traces it, on tensors without memory, and split as
the settings require; then the trace is forgotten. So it needs no GPU, and no memory for weights.
:class:`Reporter` turns a split into the values of an :class:`Explanation`. Fields are text,
numbers and tuples of such; a change of a field raises ``VERSION``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import Boundaries, target_name
from cgcompile.compile import CompiledModel, check_compilable
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.debug.output import Page, clipped, human, table, wrapped
from cgcompile.debug.subject import resolved
from cgcompile.errors import ConfigError, SymbolError
from cgcompile.passes.nodes import (
    COMPUTING,
    is_symbolic_number,
    symbols_of,
    tensors,
    user_line,
    value,
)
from cgcompile.passes.printer import count
from cgcompile.passes.split import Piece, SplitGraph, Value
from cgcompile.passes.symbols import dtype_text
from cgcompile.pieces.stitch import check_sizes, split_as_set
from cgcompile.reasons import Fallback, Reason
from cgcompile.runtime.dispatch import auto_mode
from cgcompile.runtime.inputs import full_support, why_never
from cgcompile.serving.plan import resolve_mode
from cgcompile.settings import checked_but, sizes_given
from cgcompile.tracing.preview import Look
from cgcompile.tracing.trace_cache import SHAPES, Rules


class SourceLine(NamedTuple):
    """A line of the user's.

    Attributes:
        where: ``model.py:41 in forward``.
        code: the line itself; empty where the file is not there.
    """

    where: str
    code: str

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


class Cause(NamedTuple):
    """Why something is as it is.

    Attributes:
        reason: the name of a :class:`cgcompile.Reason`, such as ``splitting_op``.
        detail: what it is about, in words.
    """

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class Bytes:
    """A number of bytes.

    Attributes:
        expression: in the symbols ``s0``, ``s1``, ..., such as ``256*s0``.
        traced: with the sizes of the call that was looked at; None where only data tells.
        at: (size, bytes) for each wanted size of the batch dimension; bytes are None where the
            model's guards exclude the size.
    """

    expression: str
    traced: int | None
    at: tuple[tuple[int, int | None], ...] = ()

    def __str__(self) -> str:
        numbers = [] if self.traced is None else [f"{human(self.traced)} as traced"]
        numbers += [f"{n}: {'refused' if b is None else human(b)}" for n, b in self.at]
        if self.traced is not None and self.expression == str(self.traced):
            numbers = [human(self.traced)]
        return f"{self.expression} B" + (f" ({', '.join(numbers)})" if numbers else "")


@dataclass(frozen=True)
class ValueReport:
    """Something that goes into a piece or comes out of it.

    Attributes:
        name: unique in the explanation; the same name is the same value.
        shape: sizes, as expressions of the symbols; None if it is no tensor.
        dtype: such as ``bf16`` or ``f32``; None if it is no tensor.
        device: where it is; None if it is no tensor.
        bytes: of its elements; None if it is no tensor.
        storage: of the memory that a view of it keeps alive; None if it is no tensor.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: at a fixed address: a parameter, a buffer or an attribute of a module.
        written: some piece may write its memory.
    """

    name: str
    shape: tuple[str, ...] | None
    dtype: str | None
    device: str | None
    bytes: Bytes | None
    storage: Bytes | None
    source: str | None
    static: bool
    written: bool


@dataclass(frozen=True)
class PieceReport:
    """One piece, in the order of execution.

    Attributes:
        index: its position.
        name: ``piece_3``, as in logs and messages.
        captured: whether CUDA graphs may hold it; else it runs eager.
        why: why it runs eager; empty if it is captured.
        support: name of the :class:`cgcompile.AttentionCGSupport`: how far it goes into a FULL
            graph.
        num_ops: nodes that compute.
        source: the user's lines: of the boundary, or of the first node.
        inputs: what it takes.
        outputs: what it returns.
        bytes_in: of the memory behind its inputs that are not static.
        bytes_out: of the memory behind its outputs.
        same_as: index of the first piece of equal structure; its own if it is the first.
        compiled: whether the compiler of pieces gets it.
        uncompiled: why a captured piece is not compiled; None if it is.
    """

    index: int
    name: str
    captured: bool
    why: tuple[Cause, ...]
    support: str
    num_ops: int
    source: tuple[SourceLine, ...]
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    bytes_in: Bytes
    bytes_out: Bytes
    same_as: int
    compiled: bool
    uncompiled: str | None


@dataclass(frozen=True)
class SymbolReport:
    """A size that varies.

    Attributes:
        name: ``s0``.
        source: the dimension that it stands for, such as ``x.size()[0]``.
        traced: its number in the call that was looked at; None if nothing was assumed of it.
        least: the least number that it may stand for.
        most: the largest; None if there is no bound.
        guards: what the model's code assumed of it.
    """

    name: str
    source: str
    traced: int | None
    least: int
    most: int | None
    guards: tuple[str, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over all pieces.

    Attributes:
        pieces: how many there are.
        captured: of them.
        eager: of them.
        distinct: of different structure.
        compiled: distinct pieces that the compiler gets.
        ops: nodes that compute.
        crossing: bytes of the memory behind all that pieces hand on, each once.
        static: bytes of parameters, buffers and attributes that pieces read, each once.
    """

    pieces: int
    captured: int
    eager: int
    distinct: int
    compiled: int
    ops: int
    crossing: Bytes
    static: Bytes


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ends a graph.

    What comes behind the first break is not known: Dynamo goes on only after running what is
    before it.

    Attributes:
        entry_point: ``"cgcompile.compile"``: the call does not become one graph at all;
            ``"torch.compile"``: it breaks there under torch's default settings alone.
        what: Dynamo's reason in one line.
        hints: of Dynamo.
        source: the user's line; None if torch has none.
        fix: what to do.
    """

    entry_point: str
    what: str
    hints: tuple[str, ...]
    source: SourceLine | None
    fix: str


@dataclass(frozen=True)
class ModeReport:
    """Which CUDA graphs would serve steps, as far as boundaries allow.

    Attributes:
        asked: the ``cudagraph_mode`` of the settings.
        result: what :class:`cgcompile.serving.CudagraphDispatcher` makes of it for such boundaries.
        without_context: the runtime mode of a call without a forward context.
        support: how far the least able boundary goes into a FULL graph; None if nothing was traced.
        lost: why ``result`` is less than was asked for; empty if it is not.
    """

    asked: str
    result: str
    without_context: str | None
    support: str | None
    lost: tuple[Cause, ...]


class SettingReport(NamedTuple):
    """One setting.

    Attributes:
        name: of it.
        value: what holds: text, a number, a bool, None or a list of such.
        origin: ``default``, ``environment``, ``options`` or ``mode`` of ``torch.compile``, or
            ``argument``.
    """

    name: str
    value: Any
    origin: str


def settings_of(config: CompilationConfig) -> tuple[SettingReport, ...]:
    """Return all settings as plain values, with where each comes from."""
    return tuple(
        SettingReport(name, _plain_setting(getattr(config, name)), origin)
        for name, origin in config.origins.items()
    )


def _plain_setting(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain_setting, value))
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(getattr(value, "name", None) or getattr(value, "__qualname__", None) or value)


VERSION = 2  # of the schema of Explanation.to_dict()


@dataclass(frozen=True)
class Explanation(Page):
    """What would be split where, and why. ``print`` it.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        model: the name of what was looked at.
        device: where its tensors are. ``meta`` stands for the device that captures.
        traced: whether one graph was made of the call. If not there are no pieces, and ``breaks``
            or ``notes`` say why.
        pieces: in order of execution.
        symbols: the sizes that vary.
        totals: sums; None if nothing was traced.
        breaks: where Dynamo would end a graph.
        modes: which CUDA graphs would serve.
        settings: all of them, with where each comes from.
        notes: what else a reader should know, in sentences.
        split: the split graph itself, with FX modules and fake values; None if nothing was traced.
            No part of equality, of :meth:`to_dict` or of JSON. ``print(explanation.split)`` shows
            all values that cross.
    """

    template: ClassVar[str] = "explanation"

    version: int
    model: str
    device: str | None
    traced: bool
    pieces: tuple[PieceReport, ...]
    symbols: tuple[SymbolReport, ...]
    totals: Totals | None
    breaks: tuple[GraphBreak, ...]
    modes: ModeReport
    settings: tuple[SettingReport, ...]
    notes: tuple[str, ...]
    split: SplitGraph | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# ---------------------------------------------------------------- as text


def _lines(result: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation: totals, sizes, mode, pieces, breaks, settings, notes."""
    yield from _total_lines(result.model, result.totals)
    for symbol in result.symbols:
        limit = "" if symbol.most is None else f" <= {symbol.most}"
        traced = "" if symbol.traced is None else f", traced with {symbol.traced}"
        text = f"{symbol.least} <= {symbol.name}{limit}, {symbol.name} = {symbol.source}{traced}"
        yield from wrapped("size", "; ".join([text, *symbol.guards]))
    yield from _mode_lines(result.modes)
    yield from _table(result.pieces)
    for graph_break in result.breaks:
        yield from wrapped("break", f"in {graph_break.entry_point}: {graph_break.what}")
        source = [] if graph_break.source is None else [f"at {graph_break.source}"]
        for text in (*source, *graph_break.hints, f"Fix: {graph_break.fix}"):
            yield from wrapped("", text)
    for name, setting, origin in result.settings:
        if origin != "default":
            yield from wrapped("set", f"{name} = {setting!r} ({origin})")
    for note in result.notes:
        yield from wrapped("note", note)


def _total_lines(model: str, totals: Totals | None) -> Iterator[str]:
    if totals is None:
        yield f"{model}: no pieces"
        return
    yield clipped(
        f"{model}: {count(totals.pieces, 'piece')}: {totals.captured} captured, "
        f"{totals.eager} eager; {totals.distinct} distinct, {totals.compiled} to compile; "
        f"{count(totals.ops, 'op')}"
    )
    yield from wrapped("bytes", f"{totals.crossing} cross")
    yield from wrapped("", f"{totals.static} static")


def _mode_lines(modes: ModeReport) -> Iterator[str]:
    text = modes.result if modes.asked == modes.result else f"{modes.asked} -> {modes.result}"
    if modes.without_context is not None:
        text += f"; without a forward context {modes.without_context}"
    if modes.support is not None:
        text += f"; boundaries allow FULL graphs: {modes.support}"
    yield from wrapped("mode", text)
    for cause in modes.lost:
        yield from wrapped("", str(cause))


def _table(pieces: Sequence[PieceReport]) -> Iterator[str]:
    """Yield a row for each piece; runs of layers are printed once."""
    if not pieces:
        return
    rows = [("piece", "kind", "ops", "same as", "bytes out", "where, why"), *map(_row, pieces)]
    keys = [(piece.same_as, piece.captured) for piece in pieces]
    lines = table(rows)
    yield clipped(lines[0])
    place = 0
    while place < len(keys):
        period, times = _repeated(keys, place)
        for offset in range(period):
            yield from _piece_lines(pieces[place + offset], lines[place + offset + 1])
        if times > 1:
            first, last = place + period, place + period * times - 1
            span = f"piece_{first} .. piece_{last}"
            yield f"{span}  the same {count(period, 'piece')} {times - 1} times more"
        place += period * times


def _repeated(keys: Sequence[tuple[int, bool]], index: int) -> tuple[int, int]:
    """Return (period, times) of the repetition that begins there and saves the most rows."""
    best = (1, 1)
    for period in range(1, min(16, (len(keys) - index) // 2) + 1):
        times = 1
        while (
            keys[index + period * times : index + period * (times + 1)]
            == (keys[index : index + period])
        ):
            times += 1
        if times > 2 and period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best


def _row(piece: PieceReport) -> tuple[str, ...]:
    where = str(piece.source[0]) if piece.source else "-"
    same = "-" if piece.same_as == piece.index else f"piece_{piece.same_as}"
    size, kind = piece.bytes_out.expression, "captured" if piece.captured else "eager"
    return piece.name, kind, str(piece.num_ops), same, size, where


def _piece_lines(piece: PieceReport, row: str) -> Iterator[str]:
    yield clipped(row)
    if piece.same_as != piece.index:
        return
    for why in piece.why:
        yield from wrapped("", str(why), 10)
    if piece.uncompiled is not None:
        yield from wrapped("", f"left uncompiled: {piece.uncompiled}", 10)
    if piece.compiled and not piece.captured:
        yield from wrapped("", "compiled on its own", 10)


# ---------------------------------------------------------------- from a split


class Reporter:
    """Reports about one split."""

    def __init__(
        self, split: SplitGraph, config: CompilationConfig, sizes: Sequence[int], dim: str | None
    ) -> None:
        self._split = split
        self._symbols = split.symbols
        dim, dims = dim or config.capture_dim, list(split.symbols.dims.values())
        if sizes and dim is None and len(dims) > 1:
            raise ConfigError.sizes_of_which(dims=dims)
        sizes = sizes or config.cudagraph_capture_sizes or ()
        chosen = self._symbols.chosen(dim) if sizes else None
        self._traced = {symbol: self._symbols.traced_with(symbol) for symbol in self._symbols}
        self._at: list[tuple[int, dict[sympy.Symbol, int] | None]] = []
        if chosen is not None:
            self._at = [(size, self._symbols.numbers_with(chosen, size)) for size in sizes]

    def bytes(self, expression: Any) -> Bytes:
        """Return an expression, its number in the traced call, and at each size."""
        at = tuple((size, _number(expression, numbers)) for size, numbers in self._at)
        traced = {symbol: n for symbol, n in self._traced.items() if n is not None}
        return Bytes(self._symbols.pretty(expression), _number(expression, traced), at)

    def _storages(self, values: Iterable[Value]) -> Bytes:
        """Of the memory behind values, each storage once."""
        result = [self._symbols.storage(each) for value in values for each in tensors(value.meta)]
        return self.bytes(sum(dict(result).values(), sympy.Integer(0)))

    def pieces(self) -> tuple[PieceReport, ...]:
        """Return all pieces, in order."""
        return tuple(map(self._piece, self._split.pieces))

    def _piece(self, piece: Piece) -> PieceReport:
        values = self._split.values
        arguments = [values[name] for name in piece.inputs]
        output = [values[name] for name in piece.outputs]
        return PieceReport(
            index=piece.index,
            name=piece.name,
            captured=piece.capture,
            why=tuple(map(_cause, piece.why)),
            support=piece.support.name,
            num_ops=piece.num_ops,
            source=tuple(SourceLine(*line) for line in piece.lines),
            inputs=tuple(map(self._value, arguments)),
            outputs=tuple(map(self._value, output)),
            bytes_in=self._storages(each for each in arguments if not each.static),
            bytes_out=self._storages(output),
            same_as=piece.same_as,
            compiled=piece.compiled,
            uncompiled=piece.uncompiled,
        )

    def _value(self, value: Value) -> ValueReport:
        result, symbols = value.meta, self._symbols
        shape = dtype = device = size = storage = None
        if isinstance(result, torch.Tensor):
            shape = tuple(symbols.pretty(symbols.number(each)) for each in result.shape)
            dtype, device = dtype_text(result.dtype), str(result.device)
            size = self.bytes(symbols.nbytes(result))
            storage = self.bytes(symbols.storage(result)[1])
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

    def symbols(self) -> tuple[SymbolReport, ...]:
        """Return the sizes that vary, in the order of the inputs."""
        names = list(self._symbols.dims.items())
        result = []
        for symbol, (name, source) in zip(self._symbols, names, strict=True):
            least, limit = self._symbols.bounds(symbol)
            result.append(
                SymbolReport(
                    name=name,
                    source=source,
                    traced=self._traced[symbol],
                    least=int(least),
                    most=int(limit) if getattr(limit, "is_Integer", False) else None,
                    guards=tuple(self._symbols.guards_on(symbol)),
                )
            )
        return tuple(result)

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
    result = sympy.sympify(expression).subs(numbers)
    return int(result) if result.is_number else None


_DATA_FIX = (
    "cgcompile.compile() keeps it in the graph and runs it eager; or set "
    "torch._dynamo.config.capture_scalar_outputs and capture_dynamic_output_shape_ops"
)


def data_breaks(split: SplitGraph) -> tuple[GraphBreak, ...]:
    """Where ``torch.compile`` breaks a graph by default: at ops that read data for the host."""
    result: dict[tuple[str, SourceLine | None], None] = {}
    for piece in split.pieces:
        if any(why.reason is Reason.HOST_SYNC for why in piece.why):
            for node in piece.module.graph.nodes:
                if node.op in COMPUTING and _reads_data(node):
                    line = user_line(node)
                    where = None if line is None else SourceLine(*line)
                    result[f"{target_name(node.target)} reads data", where] = None
    return tuple(GraphBreak("torch.compile", what, (), line, _DATA_FIX) for what, line in result)


def _reads_data(node: fx.Node) -> bool:
    """Return whether a number or a size comes of data here, not of such a number or size before."""
    inputs = {each for argument in node.all_input_nodes for each in _unbacked(argument)}
    output = _unbacked(node) - inputs
    return bool(output) and (is_symbolic_number(value(node)) or not inputs)


def _unbacked(node: fx.Node) -> set[sympy.Symbol]:
    return {each for each in symbols_of(value(node)) if compat.is_unbacked(each)}


def _cause(why: Fallback) -> Cause:
    return Cause(why.reason.value, why.detail)


def mode_report(
    split: SplitGraph | None, config: CompilationConfig, query_lens: Sequence[int]
) -> ModeReport:
    """Return which CUDA graphs would serve, on a device that has them."""
    wanted = config.cudagraph_mode
    assert wanted is not None
    if split is None:
        return ModeReport(wanted.name, wanted.name, None, None, ())
    support = full_support(split)
    never = why_never(split, wanted, True)
    if never is not None:
        lost: tuple[Cause, ...] = () if wanted is CUDAGraphMode.NONE else (_cause(never),)
        return ModeReport(wanted.name, "NONE", "NONE", support.name, lost)
    piecewise = config.mode is CompilationMode.PIECEWISE
    piecewise &= any(piece.capture for piece in split.pieces)
    auto = auto_mode(split, wanted).name
    about = _least_able(split)
    try:
        result = resolve_mode(
            wanted, support, query_lens=query_lens, piecewise=piecewise, support_why=about
        )
    except ConfigError:  # no graph is possible at all
        detail = f"attention support is {support.name} ({about}), and there are no pieces"
        lost = (Cause(Reason.ATTENTION_SUPPORT.value, detail),)
        return ModeReport(wanted.name, "NONE", auto, support.name, lost)
    lost = tuple(map(_cause, result.whys))
    return ModeReport(wanted.name, result.mode.name, auto, support.name, lost)


def _least_able(split: SplitGraph) -> str:
    """Return which boundaries go the least far into a FULL graph, in words."""
    least = full_support(split)
    pieces = [piece for piece in split.pieces if piece.support is least and piece.why]
    if not pieces:
        return "a piece reads memory of the CPU" if least.name == "NEVER" else ""
    first, more = pieces[0], len(pieces) - 1
    where = f"{first.why[0].detail}, {first.where}"
    return f"{where}, and {more} more" if more else where


_FIX = (
    "Change that line, put it into an op of your own, or take torch.compile(model, "
    "backend='cgcompile'), which makes several graphs of it, or splitting='breakable' with "
    "cgcompile.compile(), which needs no trace."
)
_RAISES_FIX = "The model raises with these arguments: call it with ones that it takes."
_META_NOTE = "meta tensors stand for tensors of the device that captures"
_CPU_NOTE = (
    "all tensors are on the CPU, so copies between host and device cannot be told: "
    "make the model under torch.device('meta') to see what a GPU would refuse"
)
_FIRST_NOTE = "what Dynamo says of the code behind the first break is not known before it has run"


@checked_but("config", "sizes", "dynamic_dims")
def explain(
    model: Any,
    *args: Any,
    config: CompilationConfig | Backend | Mapping[str, Any] | None = None,
    dynamic_dims: Mapping[str, Any] | None = None,
    dynamic_shapes: str | None = None,
    sizes: Sequence[int] | str = (),
    capture_dim: str | None = None,
    query_lens: Sequence[int] = (1,),
    **kwargs: Any,
) -> Explanation:
    """Say what would be split where, and why; nothing is run, compiled or captured.

    No GPU is needed, and no memory for weights: the model may be on the meta device, or made under
    a ``FakeTensorMode``. Meta tensors stand for those of the device that captures. Tensor arguments
    that are where no weight is are taken to be with the weights: those on the CPU of a meta model,
    unless some argument is on meta too, and those on meta of any other model.

    Your passes and predicates among the settings are called, as they take part in the split. The
    model, the arguments and the globals of its module are as before afterwards. It is traced
    without gradients. It synchronises nothing.

    Args:
        model: a module, bound method or function; or what ``torch.compile`` or
            ``cgcompile.compile`` made of one, whose settings are then taken.
        *args: of the call.
        config: the settings: a config, a backend, or a mapping as for ``options``; environment and
            defaults if left out.
        dynamic_dims: which dimensions vary, as for :func:`cgcompile.compile`; that of a compiled
            model if left out.
        dynamic_shapes: what a trace may assume of them, as there.
        sizes: sizes of the batch dimension for which bytes are wanted as numbers, beside those of
            this call, as numbers or as text ``"8,64"``; left out: ``cudagraph_capture_sizes``.
        capture_dim: which dimension they are sizes of, such as ``"x.size()[0]"``, where several
            vary; left out: the setting of that name.
        query_lens: tokens per request of uniform decode, for the mode that would result.
        **kwargs: of the call.

    Returns:
        What was found. Where the call does not become one graph, or the settings trace nothing,
        there are no pieces, and ``breaks`` and ``notes`` say why.

    Raises:
        ConfigError: settings or dimensions that cannot be.
        TraceError: a dimension that is to vary is fixed by the model, or does not exist.
        SymbolError: a size that no input gives would cross into a captured piece.
        PassError: a pass raised or left an invalid graph.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.
    """
    wanted = sizes_given("sizes", "explain", sizes)
    runnable, settings, dims, rules = _traced_as(model, config, dynamic_dims, dynamic_shapes)
    chosen = resolved(settings, "explain")
    call = _with_weights(runnable, args, kwargs)
    split, breaks, notes = _split_of(Look(runnable, dims, rules), chosen, call)
    reporter = None
    if split is not None:
        _check_dim(split, capture_dim)
        reporter = Reporter(split, chosen, wanted, capture_dim)
    return Explanation(
        version=VERSION,
        model=getattr(runnable, "__qualname__", type(runnable).__name__),
        device=None if split is None else str(split.device),
        traced=split is not None,
        pieces=() if reporter is None else reporter.pieces(),
        symbols=() if reporter is None else reporter.symbols(),
        totals=None if reporter is None else reporter.totals(),
        breaks=breaks,
        modes=mode_report(split, chosen, query_lens),
        settings=settings_of(chosen),
        notes=notes,
        split=split,
    )


def _split_of(
    look: Look, config: CompilationConfig, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[SplitGraph | None, tuple[GraphBreak, ...], tuple[str, ...]]:
    """Return (split, breaks, notes) of a call; no split where no one graph is made of it."""
    if config.splitting == "breakable":
        return None, (), _untraced(config)
    splits: list[SplitGraph] = []

    def split_graph(graph: Any, inputs: Any) -> None:
        splits.append(split_as_set(graph, config)[0])

    try:
        look.at(*call, split_graph)
    except compat.CannotTrace as error:
        return None, (_broken(error),), (_FIRST_NOTE,)
    if not splits:
        return None, (), ("the call computes nothing with tensors",)
    return splits[-1], data_breaks(splits[-1]), _notes(splits[-1], config)


def _traced_as(
    model: Any,
    config: Any,
    dims: Mapping[str, Any] | None,
    shapes: str | None,
) -> tuple[Any, Any, Mapping[str, Any] | None, Rules]:
    """Return (what to trace, settings, dimensions, rules) of a model, compiled or not."""
    if shapes is not None and shapes not in SHAPES:
        raise ConfigError.bad_value(
            name="dynamic_shapes", where="explain", value=shapes, expected=f"one of {SHAPES}"
        )
    inputs = Rules() if shapes is None else Rules(shapes=shapes)
    if isinstance(model, CompiledModel):
        own_dims, own_rules = model.asked
        inputs = own_rules if shapes is None else inputs
        model, config = model.unwrap(), model.backend if config is None else config
        dims = own_dims if dims is None else dims
    else:
        original = compat.original_of(model)
        if original is not None:
            config = handle_of(model) if config is None else config
            model = original
    check_compilable(model, "explain")
    return model, config, dims, inputs


def _check_dim(split: SplitGraph, dim: str | None) -> None:
    """Refuse sizes of a dimension that does not vary."""
    dims = list(split.symbols.dims.values())
    if dim is not None and dim not in dims:
        expected = f"one of {', '.join(dims)}" if dims else "none, as no dimension varies"
        raise ConfigError.bad_value(
            name="capture_dim", where="explain", value=dim, expected=expected
        )


def _with_weights(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments where the weights are."""
    module = getattr(model, "__self__", model)
    if not isinstance(module, torch.nn.Module):
        return args, kwargs
    weights = {each.device for each in (*module.parameters(), *module.buffers())}
    inputs = {each.device.type for each in compat.tree_tensors((args, kwargs))}
    if not weights or (any(each.type == "meta" for each in weights) and "meta" in inputs):
        return args, kwargs
    wanted = next((each for each in weights if each.type == "meta"), None)
    moved = "cpu" if wanted is not None else "meta"
    target = wanted or next(iter(weights))

    def there(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == moved:
            return compat.without_memory(leaf, target)
        return leaf

    return compat.tree_map(there, args), compat.tree_map(there, kwargs)


def _untraced(config: CompilationConfig) -> tuple[str, ...]:
    registry = Boundaries(config.splitting_ops, builtin=config.builtin_splitting_ops)
    can = [each.name for each in registry if each.predicate is None]
    return (
        "splitting='breakable' traces nothing: which parts there are is known once a capture has "
        "run, and then cgcompile.coverage(model) tells which graphs there are",
        f"captures will break at decorated functions and at {len(can)} registered ops that run: "
        + ", ".join(can),
        "not told: symbols, sizes, bytes, graph breaks. explain() with splitting='fx' tells what a "
        "trace would give",
    )


def _broken(error: compat.CannotTrace) -> GraphBreak:
    line = None if error.line is None else SourceLine(*error.line)
    fix = _RAISES_FIX if error.model_raises else _FIX
    return GraphBreak("cgcompile.compile", error.what, error.hints, line, fix)


def _notes(split: SplitGraph, config: CompilationConfig) -> tuple[str, ...]:
    result = []
    if split.device.type == "meta":
        result.append(_META_NOTE)
    if split.device.type == "cpu":
        result.append(_CPU_NOTE)
    if config.mode is CompilationMode.NONE:
        result.append("mode NONE compiles nothing; pieces show what would go into a FULL graph")
    try:
        check_sizes(split, config)
    except SymbolError as error:
        result.append(f"compiling will raise SymbolError: {error}")
    return tuple(result)
