"""What would be split where, and why, before anything runs: :func:`explain`.

The call is traced as :func:`cgcompile.compile` traces it, on tensors without memory, and split as
the settings require; then the trace is dropped. The rule: fields of results are text, numbers and
tuples of such, and a change of a field raises ``VERSION``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import Boundaries, target_name
from cgcompile.compile import CompiledModel, check_compilable
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.counts import count
from cgcompile.debug.drawing import alone, split_svg
from cgcompile.debug.op_observer import resembles
from cgcompile.debug.output import clipped, human, plain, table_lines, wrapped, written
from cgcompile.debug.pages import Page
from cgcompile.debug.subject import name_of, resolved
from cgcompile.errors import ConfigError, SymbolError
from cgcompile.passes.nodes import (
    COMPUTING,
    SourceLine,
    Symbols,
    dtype_text,
    is_symbolic_number,
    symbols_of,
    tensors,
    user_line,
    value,
)
from cgcompile.passes.split import Piece, SplitGraph, Value
from cgcompile.passes.subclasses import unwrap_subclasses
from cgcompile.pieces.compilers import fusion_texts
from cgcompile.pieces.stitch import check_sizes, split_by_config
from cgcompile.reasons import Fallback, Reason
from cgcompile.runtime.dispatch import auto_mode
from cgcompile.runtime.inputs import full_support, why_never
from cgcompile.serving.plan import resolve_mode
from cgcompile.settings import checked, checked_but, sizes_given
from cgcompile.torch_compat import dynamo, expressions, torch_ops
from cgcompile.tracing.preview import Preview
from cgcompile.tracing.trace_cache import SHAPES, Rules

VERSION = 2  # of the schema of Explanation.to_dict()


@dataclass(frozen=True)
class Bytes:
    """A number of bytes."""

    expression: str  # in the symbols ``s0``, ``s1``, ..., such as ``256*s0``
    traced: int | None  # with the sizes of the traced call; None where it depends on data
    # (size, bytes) for each requested size of the batch dimension; None where guards exclude it
    at: tuple[tuple[int, int | None], ...] = ()

    def __str__(self) -> str:
        if self.expression == str(self.traced):
            numbers = [human(int(self.expression))]
        else:
            numbers = [] if self.traced is None else [f"{human(self.traced)} as traced"]
            numbers += [f"{n}: {'refused' if b is None else human(b)}" for n, b in self.at]
        return f"{self.expression} B" + (f" ({', '.join(numbers)})" if numbers else "")


@dataclass(frozen=True, kw_only=True)
class ValueReport:
    """An input or an output of a piece; equal names are one value."""

    name: str
    shape: tuple[str, ...] | None = None  # in the symbols; this and the next four None if no tensor
    dtype: str | None = None  # such as ``bf16``
    device: str | None = None
    bytes: Bytes | None = None  # of its elements
    storage: Bytes | None = None  # of the memory that a view of it keeps alive
    source: str | None  # such as ``model.layers.0.weight``; None for results
    static: bool  # at a fixed address: a parameter, a buffer or an attribute of a module
    written: bool  # some piece may write its memory


@dataclass(frozen=True)
class PieceReport:
    """One piece."""

    index: int  # in the order of execution
    name: str
    captured: bool
    why: tuple[Fallback, ...]  # it runs eager
    support: str  # name of the AttentionCGSupport
    num_ops: int
    source: tuple[SourceLine, ...]  # of the boundary, or of the first node
    inputs: tuple[ValueReport, ...]
    outputs: tuple[ValueReport, ...]
    bytes_in: Bytes  # of the memory behind inputs that are not static
    bytes_out: Bytes  # of the memory behind outputs
    same_as: int  # index of the first piece of equal structure
    compiled: bool
    uncompiled: str | None  # why a captured piece is not compiled


@dataclass(frozen=True)
class SymbolReport:
    """A size that varies."""

    name: str  # ``s0``
    source: str  # the dimension that it stands for, such as ``x.size()[0]``
    traced: int | None  # its number in the traced call; None if it was unbacked
    least: int
    most: int | None  # None if there is no bound
    guards: tuple[str, ...]  # what the model's code assumed of it


@dataclass(frozen=True)
class Totals:
    """Sums over all pieces."""

    pieces: int
    captured: int
    eager: int
    distinct: int  # of different structure
    compiled: int  # of these
    ops: int
    crossing: Bytes  # of the memory behind the outputs of pieces, each storage once
    static: Bytes  # of parameters, buffers and attributes that pieces read, each storage once


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ends a graph; of a call without one graph, only the first is known."""

    entry_point: str  # "cgcompile.compile", or "torch.compile" if it breaks by default settings
    what: str  # Dynamo's reason in one line
    hints: tuple[str, ...]  # of Dynamo
    source: SourceLine | None
    fix: str


@dataclass(frozen=True)
class ModeReport:
    """Which CUDA graphs would serve steps, as far as boundaries allow."""

    asked: str  # the cudagraph_mode of the settings
    result: str  # what serving.CudagraphDispatcher makes of it
    without_context: str | None  # the runtime mode of a call without a forward context
    support: str | None  # the AttentionCGSupport of the least able boundary; None if untraced
    lost: tuple[Fallback, ...]  # why the result is less than the settings


class SettingReport(NamedTuple):
    """One setting; the origin is as in ``CompilationConfig.origins``."""

    name: str
    value: Any
    origin: str


def settings_of(config: CompilationConfig) -> tuple[SettingReport, ...]:
    """Return all settings as plain values, with the origin of each."""
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation(Page):
    """What would be split where, and why. ``print`` it.

    Attributes:
        version: of the schema of :meth:`to_dict`; raised with each change of it.
        model: the name of the model.
        device: of its tensors. ``meta`` stands for the device that captures.
        traced: whether the call became one graph. If not there are no pieces, and ``breaks`` or
            ``notes`` contain the cause.
        pieces: in order of execution.
        symbols: the sizes that vary.
        totals: sums; None if nothing was traced.
        breaks: where Dynamo would end a graph.
        modes: which CUDA graphs would serve.
        settings: all of them, with the origin of each.
        notes: further remarks, in sentences.
        split: the split graph itself, with FX modules and fake values; None if nothing was traced.
            No part of equality, of :meth:`to_dict` or of JSON. ``print(explanation.split)`` shows
            all values that cross.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8))
        >>> split.totals.captured, split.breaks
        (1, ())
    """

    template: ClassVar[str] = "explanation"

    version: int
    model: str
    device: str | None = None
    traced: bool = False
    pieces: tuple[PieceReport, ...] = ()
    symbols: tuple[SymbolReport, ...] = ()
    totals: Totals | None = None
    breaks: tuple[GraphBreak, ...]
    modes: ModeReport
    settings: tuple[SettingReport, ...]
    notes: tuple[str, ...]
    split: SplitGraph | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @checked
    def to_svg(self, path: str | PathLike[str]) -> Path:
        """Write a drawing of the pieces, and of the bytes that they pass on, as an SVG file.

        Returns:
            The path of the drawing.

        Raises:
            OSError: the drawing cannot be written there.
        """
        label = f"The pieces of {self.model}"
        return written(path, "to_svg", lambda: alone(split_svg(plain(self.pieces), label)))


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
    yield from _piece_lines(result.pieces)
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
    yield from wrapped("mode", text)
    if modes.support is not None:
        yield from wrapped("", f"FULL graphs: {modes.support} (boundaries)")
    for cause in modes.lost:
        yield from wrapped("", str(cause))


def _piece_lines(pieces: Sequence[PieceReport]) -> Iterator[str]:
    """Yield a row for each distinct piece, with the number of equal ones."""
    equal: dict[tuple[int, bool], list[PieceReport]] = {}
    for piece in pieces:
        equal.setdefault((piece.same_as, piece.captured), []).append(piece)
    cells = [("piece", "kind", "times", "ops", "bytes out", "where, why")]
    for first, *others in equal.values():
        kind, where = "captured" if first.captured else "eager", [*map(str, first.source), "-"]
        numbers = str(1 + len(others)), str(first.num_ops), first.bytes_out.expression
        cells.append((first.name, kind, *numbers, where[0]))
    if pieces:
        yield from table_lines(cells, [[*_remarks(first)] for first, *_ in equal.values()])


def _remarks(piece: PieceReport) -> Iterator[str]:
    yield from map(str, piece.why)
    if piece.uncompiled is not None:
        yield f"left uncompiled: {piece.uncompiled}"
    if piece.compiled and not piece.captured:
        yield "compiled on its own"


# ---------------------------------------------------------------- from a split


def split_fields(
    split: SplitGraph, config: CompilationConfig, sizes: Sequence[int] = (), dim: str | None = None
) -> dict[str, Any]:
    """Return the fields ``pieces``, ``symbols`` and ``totals`` of a report on a split."""
    bytes_of = _measure(split.symbols, config, sizes, dim)
    return {
        "pieces": tuple(_piece(split, piece, bytes_of) for piece in split.pieces),
        "symbols": tuple(_symbols(split.symbols)),
        "totals": _totals(split, bytes_of),
    }


def _measure(
    symbols: Symbols, config: CompilationConfig, sizes: Sequence[int], dim: str | None
) -> Callable[[Any], Bytes]:
    """Return what evaluates an expression in the traced call, and at each size."""
    dim, dims = dim or config.capture_dim, list(symbols.dims.values())
    if sizes and dim is None and len(dims) > 1:
        raise ConfigError.sizes_of_which(dims=dims)
    sizes = sizes or config.cudagraph_capture_sizes or ()
    chosen = symbols.chosen(dim) if sizes else None
    numbers = {symbol: symbols.traced_with(symbol) for symbol in symbols}
    traced = {symbol: number for symbol, number in numbers.items() if number is not None}
    at = [] if chosen is None else [(size, symbols.numbers_with(chosen, size)) for size in sizes]

    def bytes_of(expression: Any) -> Bytes:
        evaluated = tuple((size, _evaluated(expression, numbers)) for size, numbers in at)
        return Bytes(symbols.pretty(expression), _evaluated(expression, traced), evaluated)

    return bytes_of


def _storages(symbols: Symbols, values: Iterable[Value]) -> sympy.Expr:
    """Return the bytes of the memory behind values, each storage once."""
    memory = [tensor for value in values for tensor in tensors(value.meta)]
    return sum(dict(map(symbols.storage, memory)).values(), sympy.Integer(0))


def _piece(split: SplitGraph, piece: Piece, bytes_of: Callable[[Any], Bytes]) -> PieceReport:
    inputs = [split.values[name] for name in piece.inputs]
    outputs = [split.values[name] for name in piece.outputs]
    moving = (value for value in inputs if not value.static)
    return PieceReport(
        index=piece.index,
        name=piece.name,
        captured=piece.capture,
        why=piece.why,
        support=piece.support.name,
        num_ops=piece.num_ops,
        source=piece.lines,
        inputs=tuple(_value(split.symbols, value, bytes_of) for value in inputs),
        outputs=tuple(_value(split.symbols, value, bytes_of) for value in outputs),
        bytes_in=bytes_of(_storages(split.symbols, moving)),
        bytes_out=bytes_of(_storages(split.symbols, outputs)),
        same_as=piece.same_as,
        compiled=piece.compiled,
        uncompiled=piece.uncompiled,
    )


def _value(symbols: Symbols, value: Value, bytes_of: Callable[[Any], Bytes]) -> ValueReport:
    tensor = value.meta
    report = ValueReport(
        name=value.name, source=value.source, static=value.static, written=value.mutated
    )
    if not isinstance(tensor, torch.Tensor):
        return report
    return replace(
        report,
        shape=tuple(symbols.pretty(symbols.number(size)) for size in tensor.shape),
        dtype=dtype_text(tensor.dtype),
        device=str(tensor.device),
        bytes=bytes_of(symbols.nbytes(tensor)),
        storage=bytes_of(symbols.storage(tensor)[1]),
    )


def _symbols(symbols: Symbols) -> Iterator[SymbolReport]:
    for symbol, (name, source) in zip(symbols, symbols.dims.items(), strict=True):
        least, limit = symbols.bounds(symbol)
        most = int(limit) if getattr(limit, "is_Integer", False) else None
        guards = tuple(symbols.guards_on(symbol))
        yield SymbolReport(name, source, symbols.traced_with(symbol), int(least), most, guards)


def _totals(split: SplitGraph, bytes_of: Callable[[Any], Bytes]) -> Totals:
    static = (value for value in split.values.values() if value.static)
    captured = sum(piece.capture for piece in split.pieces)
    return Totals(
        pieces=len(split.pieces),
        captured=captured,
        eager=len(split.pieces) - captured,
        distinct=len(split.distinct),
        compiled=sum(piece.compiled for piece in split.distinct),
        ops=sum(piece.num_ops for piece in split.pieces),
        crossing=bytes_of(split.crossing_bytes()),
        static=bytes_of(_storages(split.symbols, static)),
    )


def _evaluated(expression: Any, numbers: dict[sympy.Symbol, int] | None) -> int | None:
    if numbers is None:
        return None
    result = sympy.sympify(expression).subs(numbers)
    return int(result) if result.is_number else None


_DATA_FIX = (
    "cgcompile.compile() keeps it in the graph and runs it eager; or set "
    "torch._dynamo.config.capture_scalar_outputs and capture_dynamic_output_shape_ops"
)


def _data_breaks(split: SplitGraph) -> tuple[GraphBreak, ...]:
    """Return where ``torch.compile`` breaks by default: at ops that read data for the host."""
    breaks: dict[GraphBreak, None] = {}
    for piece in split.pieces:
        if any(cause.reason is Reason.HOST_SYNC for cause in piece.why):
            for node in piece.module.graph.nodes:
                if node.op in COMPUTING and _reads_data(node):
                    what = f"{target_name(node.target)} reads data"
                    graph_break = GraphBreak("torch.compile", what, (), user_line(node), _DATA_FIX)
                    breaks[graph_break] = None
    return tuple(breaks)


def _reads_data(node: fx.Node) -> bool:
    """Return whether a node reads a number or a size from data, not from an earlier one."""
    inputs = {symbol for argument in node.all_input_nodes for symbol in _unbacked(argument)}
    output = _unbacked(node) - inputs
    return bool(output) and (is_symbolic_number(value(node)) or not inputs)


def _unbacked(node: fx.Node) -> set[sympy.Symbol]:
    return {symbol for symbol in symbols_of(value(node)) if expressions.is_unbacked(symbol)}


def _mode_report(
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
        whys = () if wanted is CUDAGraphMode.NONE else (never,)
        return ModeReport(wanted.name, "NONE", "NONE", support.name, whys)
    piecewise = config.mode is CompilationMode.PIECEWISE
    piecewise &= any(piece.capture for piece in split.pieces)
    about = _least_able(split)
    try:
        resolution = resolve_mode(
            wanted, support, query_lens=query_lens, piecewise=piecewise, support_why=about
        )
        result, lost = resolution.mode.name, tuple(resolution.whys)
    except ConfigError:  # no graph is possible at all
        detail = f"attention support is {support.name} ({about}), and there are no pieces"
        result, lost = "NONE", (Fallback(Reason.ATTENTION_SUPPORT, detail),)
    return ModeReport(wanted.name, result, auto_mode(split, wanted).name, support.name, lost)


def _least_able(split: SplitGraph) -> str:
    """Return the boundaries with the least support of FULL graphs, as text."""
    least = full_support(split)
    pieces = [piece for piece in split.pieces if piece.support is least and piece.why]
    if not pieces:
        return "a piece reads memory of the CPU" if least.name == "NEVER" else ""
    first, more = pieces[0], len(pieces) - 1
    where = f"{first.why[0].detail}, {first.where}"
    return f"{where}, and {more} more" if more else where


# ---------------------------------------------------------------- the call


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
    """Return what would be split where, and why; nothing is run, compiled or captured.

    Needs no GPU and no memory for weights: the model may be on the meta device, or created under a
    ``FakeTensorMode``. Meta tensors stand for tensors of the device that captures; of a meta model,
    so do CPU arguments. Passes and predicates among the settings are called. The model, the
    arguments and the globals of its module are unchanged. Gradients are off. Never synchronises.

    Args:
        model: a module, bound method or function; or what ``torch.compile`` or
            :func:`cgcompile.compile` made of one, whose settings are then used.
        *args: positional arguments of the call; ``**kwargs``: its keyword arguments.
        config: a config, a backend, or a mapping as for ``options``; None: as in the environment.
        dynamic_dims: which dimensions vary, as for :func:`cgcompile.compile`; None: as compiled.
        dynamic_shapes: what a trace may assume of these dimensions; None: as compiled.
        sizes: sizes of the batch dimension at which bytes are evaluated, as numbers or as text
            ``"8,64"``; empty: ``cudagraph_capture_sizes``.
        capture_dim: the dimension of ``sizes``, such as ``"x.size()[0]"``; None: the setting.
        query_lens: tokens per request of uniform decode, for the resulting mode.

    Returns:
        The split; where it has no pieces, ``breaks`` and ``notes`` contain the cause.

    Raises:
        ConfigError: settings or dimensions are invalid.
        TraceError: the model fixes a dynamic dimension, or the dimension does not exist.
        SymbolError: a size that no input has would cross into a captured piece.
        PassError: a pass raised or left an invalid graph.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.

    >>> cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).traced
    True
    """
    numbers = sizes_given("sizes", "explain", sizes)
    runnable, settings, dims, rules = _traced_as(model, config, dynamic_dims, dynamic_shapes)
    chosen = resolved(settings, "explain")
    call = _with_weights(runnable, args, kwargs)
    split, breaks, notes = _split_of(Preview(runnable, dims, rules), chosen, call)
    result = Explanation(
        version=VERSION,
        model=name_of(runnable),
        breaks=breaks,
        modes=_mode_report(split, chosen, query_lens),
        settings=settings_of(chosen),
        notes=notes,
    )
    if split is None:
        return result
    _check_dim(split, capture_dim)
    fields = split_fields(split, chosen, numbers, capture_dim)
    return replace(result, device=str(split.device), traced=True, split=split, **fields)


_FIX = (
    "Change that line, put it into an op of your own, or take torch.compile(model, "
    "backend='cgcompile'), which makes several graphs of it, or splitting='breakable' with "
    "cgcompile.compile(), which needs no trace."
)
_RAISES_FIX = "The model raises with these arguments: call it with ones that it takes."
_META_NOTE = "meta tensors stand for tensors of the device that captures"
_CPU_NOTE = (
    "all tensors are on the CPU, so copies between host and device cannot be detected: "
    "make the model under torch.device('meta') to see what a GPU would refuse"
)
_FIRST_NOTE = "breaks after the first one are unknown until the code before them has run"


def _split_of(
    preview: Preview, config: CompilationConfig, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> tuple[SplitGraph | None, tuple[GraphBreak, ...], tuple[str, ...]]:
    """Return (split, breaks, notes) of a call; no split where it does not become one graph."""
    if config.splitting == "breakable":
        return None, (), _untraced(config)
    try:
        split = preview.trace(*call, partial(_split, config))
    except dynamo.CannotTrace as error:
        line = None if error.line is None else SourceLine(*error.line)
        fix = _RAISES_FIX if error.model_raises else _FIX
        graph_break = GraphBreak("cgcompile.compile", error.what, error.hints, line, fix)
        return None, (graph_break,), (_FIRST_NOTE,)
    if split is None:
        return None, (), ("the call computes nothing with tensors",)
    return split, _data_breaks(split), (*_notes(split, config), *fusion_texts(split, config))


def _split(config: CompilationConfig, graph: fx.GraphModule, _: Any) -> SplitGraph:
    unwrapped = unwrap_subclasses(graph)
    return split_by_config(graph if unwrapped is None else unwrapped.graph, config)[0]


def _traced_as(
    model: Any, config: Any, dims: Mapping[str, Any] | None, shapes: str | None
) -> tuple[Any, Any, Mapping[str, Any] | None, Rules]:
    """Return (what to trace, settings, dimensions, rules) of a model, compiled or not."""
    if shapes is not None and shapes not in SHAPES:
        raise ConfigError.bad_value(
            name="dynamic_shapes", where="explain", value=shapes, expected=f"one of {SHAPES}"
        )
    rules = Rules() if shapes is None else Rules(shapes=shapes)
    original = torch_ops.original_of(model)
    if isinstance(model, CompiledModel):
        own_dims, own_rules = model.trace_arguments
        rules = own_rules if shapes is None else rules
        dims = own_dims if dims is None else dims
        config = model.backend if config is None else config
        model = model.unwrap()
    elif original is not None:
        config = handle_of(model) if config is None else config
        model = original
    check_compilable(model, "explain")
    return model, config, dims, rules


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
    """Return the arguments on the device of the weights; see :func:`explain`."""
    module = getattr(model, "__self__", model)
    weights = (
        {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        if isinstance(module, torch.nn.Module)
        else set()
    )
    meta = next((device for device in weights if device.type == "meta"), None)
    on_meta = any(tensor.is_meta for tensor in torch_ops.tree_tensors((args, kwargs)))
    if not weights or (meta is not None and on_meta):
        return args, kwargs
    replaced = "meta" if meta is None else "cpu"
    target = meta or next(iter(weights))

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == replaced:
            return dynamo.without_memory(leaf, target)
        return leaf

    return torch_ops.tree_map(move, args), torch_ops.tree_map(move, kwargs)


def _untraced(config: CompilationConfig) -> tuple[str, ...]:
    registry = Boundaries(config.splitting_ops)
    names = [op.name for op in registry if op.predicate is None]
    return (
        "splitting='breakable' traces nothing: which parts there are is known once a capture has "
        "run, and then cgcompile.coverage(model) lists the graphs",
        f"captures will break at decorated functions and at {len(names)} registered ops that run: "
        + ", ".join(names),
        "not reported: symbols, sizes, bytes, graph breaks; explain() with splitting='fx' reports "
        "what a trace would give",
    )


def _notes(split: SplitGraph, config: CompilationConfig) -> tuple[str, ...]:
    notes = {"meta": [_META_NOTE], "cpu": [_CPU_NOTE]}.get(split.device.type, [])
    if config.mode is CompilationMode.NONE:
        notes.append("mode NONE compiles nothing; pieces show what would go into a FULL graph")
    try:
        check_sizes(split, config)
    except SymbolError as error:
        notes.append(f"compiling will raise SymbolError: {error}")
    return (*notes, *_unregistered(split))


def _unregistered(split: SplitGraph) -> list[str]:
    """Return a note about each captured op that looks like attention."""
    notes: dict[str, str] = {}
    for piece in [piece for piece in split.pieces if piece.capture]:
        for node in piece.module.graph.nodes:
            op = getattr(node.target, "default", node.target)
            if node.op != "call_function" or not hasattr(op, "namespace"):
                continue
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
            kind, why = resembles(op, args, kwargs) or ("", "")
            if kind == "unregistered_attention":
                name = target_name(node.target)
                notes[name] = (
                    f"piece_{piece.index} captures {name}: {why}. If it reads the forward context "
                    f"or waits for the device, split there: splitting_ops=({name!r},)"
                )
    return [*notes.values()]
