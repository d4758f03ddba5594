"""Compile the pieces of a split graph, each for all sizes or once for each range of sizes.

A compiler of pieces is a callable ``(gm, fake_inputs) -> callable``; the result takes the inputs of
the piece by position and returns the list or tuple of its outputs. Pieces are compiled within the
backend call, so that what a compiler assumes about sizes becomes one of Dynamo's guards, and under
``no_grad``, because a piece compiled for training keeps state that a graph cannot hold.

Note [Ranges of sizes]
``compile_sizes`` lists sizes with an artifact each, and ends of ranges that cut all sizes
into ranges; both are about one dimension of the model's inputs, which is one symbol.
:class:`Variants` decides what to compile of a piece. :class:`Ranged` runs: it reads the value of
*that symbol* from the inputs of the piece, not of any integer among them.

The rule: an artifact serves only what it was compiled for. Each was traced with sizes of its own
(Note [Sizes of its own]), so what its compiler assumed beyond its range is checked at every call
from Python; where that does not hold, the artifact for all sizes runs, or the uncompiled piece. In
a capture the artifact is selected once, so a replay pays nothing for it.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.config import CompilationConfig
from cgcompile.errors import CGCompileError, ConfigError, PieceCompileError, SymbolError
from cgcompile.graphs.contract import function_of
from cgcompile.kernels import ROWS, compile_kernels, is_on, why_unsupported
from cgcompile.passes.base import Fusions
from cgcompile.passes.nodes import (
    COMPUTING,
    calls,
    short_name,
    symbols_of,
    tensors,
    toggles_state,
    value,
)
from cgcompile.passes.split import Piece, SplitGraph
from cgcompile.pieces.cache import Compilation, Compiling, PieceCache, PieceCompiler, Runnable
from cgcompile.progress import progress
from cgcompile.torch_compat import dynamo, expressions, inductor, torch_ops

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- ranges of sizes


Reader = Callable[[Sequence[Any]], int]


@dataclass(frozen=True)
class SizeRange:
    """Sizes from ``first`` to ``last``, both included; without ``last``, all from ``first`` on."""

    first: int
    last: int | None

    def __contains__(self, size: int) -> bool:
        return self.first <= size and (self.last is None or size <= self.last)

    def __str__(self) -> str:
        if self.first == self.last:
            return f"size {self.first}"
        return f"sizes {self.first} " + ("and more" if self.last is None else f"to {self.last}")


def ranges_between(endpoints: Sequence[int]) -> tuple[SizeRange, ...]:
    """Return the ranges from 1 that end at the increasing endpoints."""
    firsts = [1, *(endpoint + 1 for endpoint in endpoints)]
    return tuple(map(SizeRange, firsts, [*endpoints, None]))


@dataclass(frozen=True, eq=False)
class Variant:
    """One artifact to compile, for some sizes; for all sizes if ``sizes`` is empty."""

    piece: Piece
    module: fx.GraphModule  # its inputs carry the fake values to compile with
    sizes: SizeRange | None = None
    own: expressions.OwnShapes | None = None  # symbols of the second trace of ``module``
    conditions: tuple[sympy.Expr, ...] = ()  # assumptions on other sizes
    readers: Mapping[sympy.Symbol, Reader] = field(default_factory=dict)  # ``sizes`` first
    fusions: Fusions | None = None  # texts of the kernel ``small_batch``

    @property
    def name(self) -> str:
        """Text such as ``piece_0`` or ``piece_0, size 8``, for messages."""
        return self.piece.name if self.sizes is None else f"{self.piece.name}, {self.sizes}"

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which its compiler must run."""
        return nullcontext() if self.own is None else self.own.context()

    def assumed(self) -> list[sympy.Expr]:
        """Return the conditions, beyond its sizes, under which the compiled code is valid."""
        guards = [*self.conditions, *(() if self.own is None else self.own.guards())]
        return [guard for guard in dict.fromkeys(guards) if guard is not sympy.true]


class Variants:
    """The variants to compile of each piece of a split graph, by the settings."""

    def __init__(self, split: SplitGraph, config: CompilationConfig) -> None:
        self._symbols = split.symbols
        self._sizes = [SizeRange(size, size) for size in config.sizes_to_compile]
        endpoints, self._small = config.compile_ranges_endpoints, False
        if config.first_compiler == "inductor":
            self._small = _on_device(split, config)
        self._named = None
        if self._sizes or endpoints is not None:
            self._named = self._symbols.chosen(config.capture_dim)
        elif self._small:
            self._named = self._symbols.only(config.capture_dim)
        self._ranges = () if endpoints is None else ranges_between(endpoints)
        if self._small:  # an artifact from disk calls the ops of fusions
            from cgcompile.kernels import rotate_and_cache, small_linear

            for module in (rotate_and_cache, small_linear):
                module.op()
        captured = config.cudagraph_capture_sizes or ()
        # Steps of few rows are padded to the least capture size.
        self._own_range = (ROWS,) if min(captured, default=0) <= ROWS else ()
        self._likely = (*captured, *config.sizes_to_compile)
        self._compiles = config.first_compiler != "eager"
        self._constants = _constants(split)
        self._values: dict[SizeRange, dict[sympy.Symbol, int] | None] = {}

    def of(self, piece: Piece) -> list[Variant]:
        """Return the variants of a piece; the variant for all sizes, if any, is last."""
        if self._small:
            endpoints = [span.last for span in self._ranges if span.last is not None]
            cut = ranges_between(sorted({*endpoints, *self._own_range}))
            constants = self._constants[piece.same_as]
            variants = [_fused(variant, constants) for variant in self._of(piece, cut)]
            if any(variant.fusions and variant.fusions.fused for variant in variants):
                return variants
            first, *others = self._of(piece, self._ranges)
            return [replace(first, fusions=variants[0].fusions), *others]
        return self._of(piece, self._ranges)

    def _of(self, piece: Piece, spans: Sequence[SizeRange]) -> list[Variant]:
        symbol = None if self._named is None else self._symbols.current(self._named)
        whole = Variant(piece, piece.module)
        inputs = [value(node) for node in piece.module.graph.find_nodes(op="placeholder")]
        free = symbols_of(inputs)
        if not self._compiles or symbol not in free:
            return [whole]
        ordered = sorted(free, key=lambda other: (other != symbol, str(other)))
        readers = {other: read for other in ordered if (read := reader(inputs, other)) is not None}
        why = expressions.why_not_copied(piece.module, free)
        if why is None and not all(other in readers and other in self._symbols for other in free):
            why = "the value of a size in it cannot be read"
        if why is not None:
            log.info("%s: one artifact for all sizes: %s", piece.name, why)
            return [whole]
        sizes = [self._variant(piece, symbol, readers, size) for size in self._sizes]
        variants = [variant for variant in sizes if variant is not None]
        single = {variant.sizes for variant in variants}
        ranges = [self._variant(piece, symbol, readers, span) for span in spans]
        rest = [span for span in ranges if span is not None and span.sizes not in single]
        return [*variants, *(rest or [whole])]

    def _variant(
        self,
        piece: Piece,
        symbol: sympy.Symbol,
        readers: Mapping[sympy.Symbol, Reader],
        sizes: SizeRange,
    ) -> Variant | None:
        """Return the variant for some sizes; None if guards exclude all of them."""
        lower, upper = self._symbols.bounds(symbol)
        first = max(sizes.first, int(lower))
        upper = min(sympy.oo if sizes.last is None else sympy.Integer(sizes.last), upper)
        values = self._values_for(symbol, sizes, first, upper)
        if values is None:
            return None
        spans: dict[sympy.Symbol, int | expressions.Span] = {}
        conditions = []
        for other in readers:
            low, high = (first, upper) if other == symbol else self._symbols.bounds(other)
            if low < 1:
                conditions.append(sympy.Ge(other, 1))
            low = max(int(low), 1)
            spans[other] = low if low == high else expressions.Span(values[other], low, high)
        served = SizeRange(first, int(upper) if upper.is_Integer else None)
        own = expressions.OwnShapes(spans, str(served))
        try:
            module = own.copied(piece.module, dynamo.copied(piece.module))
        except Exception as error:
            name = f"{piece.name}, {served}"
            raise PieceCompileError.not_traced(
                piece=name, where=piece.where, error=error
            ) from error
        return Variant(piece, module, served, own, tuple(conditions), readers)

    def _values_for(
        self, symbol: sympy.Symbol, sizes: SizeRange, first: int, last: Any
    ) -> dict[sympy.Symbol, int] | None:
        """Return a value for each symbol to compile a range with; None if there is none."""
        if sizes not in self._values:
            hints = self._hints(symbol, first, last)
            choices = (self._symbols.numbers_with(symbol, size) for size in hints)
            self._values[sizes] = next((values for values in choices if values is not None), None)
            if self._values[sizes] is None:
                reason = "guards exclude it, or no other sizes were found that go with it"
                log.info("no artifact for %s: %s", sizes, reason)
        return self._values[sizes]

    def _hints(self, symbol: sympy.Symbol, first: int, last: Any) -> Iterator[int]:
        """Yield sizes of a range to compile with, the best first: as traced, then the largest."""
        traced = self._symbols.traced_with(symbol)
        likely = [] if traced is None else [traced]
        likely += [int(last)] if last.is_Integer else []
        likely += [*reversed(self._likely), *(1 << bit for bit in range(20)), first]
        yield from (size for size in dict.fromkeys(likely) if first <= size <= last)
        yield from (size for size in range(first, first + _TRIED) if size <= last)

    def combined(self, compiled: Sequence[tuple[Variant, Runnable]]) -> Runnable:
        """Return the function that runs a piece: it chooses among the variants and artifacts."""
        if len(compiled) == 1 and compiled[0][0].sizes is None:
            return compiled[0][1]
        piece, readers = compiled[0][0].piece, compiled[0][0].readers
        assert self._named is not None
        rest: Runnable = piece.module.forward
        rest_is = "the uncompiled piece"
        artifacts = []
        for variant, run in compiled:
            if variant.sizes is None:
                rest, rest_is = run, "the artifact for all sizes"
                continue
            assumed = variant.assumed()
            holds = _check(readers, assumed) if assumed else None
            text = self._symbols.pretty(sympy.And(*assumed)) if assumed else ""
            artifacts.append(Artifact(variant.sizes, run, holds, text))
        named, read = self._symbols.text_of(self._named), next(iter(readers.values()))
        return Ranged(piece.name, named, read, artifacts, rest, rest_is)

    def specialised(self, variant: Variant) -> dict[str, str]:
        """Return the dimensions that the compiler of a variant fixed, with the number."""
        if variant.own is None:
            return self._symbols.specialised()
        fixed = variant.own.specialised()
        return {self._symbols.text_of(symbol): str(size) for symbol, size in fixed.items()}


def _on_device(split: SplitGraph, config: CompilationConfig) -> bool:
    """Return whether small linear layers are to be fused, on the device of a graph."""
    nodes = [node for piece in split.distinct for node in piece.module.graph.nodes]
    inputs = (value(node) for node in nodes if node.op in ("placeholder", "get_attr"))
    devices = {tensor.device for values in inputs for tensor in tensors(values)}
    if not any(calls(node, "linear") for node in nodes):  # there is nothing to insist on
        devices = {device for device in devices if why_unsupported(device) is None}
    return is_on(config, "small_batch", devices, why_unsupported)


def _constants(split: SplitGraph) -> dict[int, set[int]]:
    """Return the positions of inputs that no piece writes; the pieces have one structure.

    Results of pieces are not among them: the piece in front writes them.
    """
    names = {known.name for known in split.inputs if known.static and not known.mutated}
    positions: dict[int, set[int]] = {}
    for piece in split.pieces:
        own = {position for position, name in enumerate(piece.inputs) if name in names}
        positions[piece.same_as] = own & positions.get(piece.same_as, own)
    return positions


def _fused(variant: Variant, constants: Collection[int]) -> Variant:
    """Return a variant in which small linear layers are fused."""
    # Imported only where a device runs the kernels.
    from cgcompile.passes.rotary import fuse_rotary
    from cgcompile.passes.small_batch import fuse_small_linears

    module = variant.module if variant.own is not None else dynamo.copied(variant.module)
    with variant.context():
        rotary = fuse_rotary(module, why_unsupported)
        fusions = fuse_small_linears(module, why_unsupported, constants)
        fusions.fused += rotary.fused
        fusions.unfused += rotary.unfused
    for line in str(fusions).splitlines():
        log.info("%s: %s", variant.name, line)
    return replace(variant, module=module if fusions.fused else variant.module, fusions=fusions)


_TRIED = 64  # most sizes of a range to try, until one has no guard


def _check(
    readers: Mapping[sympy.Symbol, Reader], assumed: Sequence[sympy.Expr]
) -> Callable[[Sequence[Any]], bool]:
    symbols = sorted(set().union(*(guard.free_symbols for guard in assumed)), key=str)
    values = [readers[symbol] for symbol in symbols]
    arguments, text = ", ".join(map(str, symbols)), " and ".join(map(expressions.text_of, assumed))
    source = f"def holds({arguments}):\n    return {text or True}\n"
    holds = function_of(source, expressions.NAMES_IN_TEXT)
    return lambda inputs: holds(*(read(inputs) for read in values))


# ---------------------------------------------------------------- reading a symbol


def reader(inputs: Sequence[Any], symbol: sympy.Symbol) -> Reader | None:
    """Return a function of a piece's inputs that returns the value of one symbol, or None."""
    # It reads an input that is that number, or has it as a size, or has a size from which it
    # follows (``2*s0``, ``s0 + 1``), in this order. ``inputs`` are the fake values.
    sizes: list[tuple[Any, Reader]] = [(size, itemgetter(k)) for k, size in enumerate(inputs)]
    for k, tensor in enumerate(inputs):
        if isinstance(tensor, torch.Tensor):
            sizes += [(size, partial(_size, k, dim)) for dim, size in enumerate(tensor.shape)]
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


def _size(position: int, dim: int, inputs: Sequence[Any]) -> int:
    return int(inputs[position].shape[dim])


def _inverted(expression: sympy.Expr, symbol: sympy.Symbol, read: Reader) -> Reader | None:
    """Return how to compute ``symbol`` from the value of ``factor * symbol + offset``."""
    factor, offset = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    linear = factor.is_Integer and offset.is_Integer and factor != 0
    if not linear or sympy.expand(factor * symbol + offset - expression) != 0:
        return None
    by, less = int(factor), int(offset)
    return lambda inputs: (read(inputs) - less) // by


# ---------------------------------------------------------------- at a call


@dataclass(frozen=True, eq=False)
class Artifact:
    """The compiled code of a piece for some sizes."""

    sizes: SizeRange
    run: Runnable
    holds: Callable[[Sequence[Any]], bool] | None = None  # checks the compiler's assumptions
    assumed: str = ""  # the assumptions as text

    def __str__(self) -> str:
        return f"{self.sizes}, if {self.assumed}" if self.assumed else str(self.sizes)


class Ranged:
    """Run the artifact of a piece for the value of ``dim``, which ``read`` reads; else ``rest``."""

    def __init__(
        self,
        name: str,
        dim: str,
        read: Reader,
        artifacts: Sequence[Artifact],
        rest: Runnable,
        rest_is: str,
    ) -> None:
        self._name, self._dim, self._read = name, dim, read
        self._rest, self._rest_is = rest, rest_is
        self._artifacts = sorted(  # those of one size before the ranges that contain it
            artifacts, key=lambda known: (known.sizes.first != known.sizes.last, known.sizes.first)
        )

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        size = self._read(inputs)
        for artifact in self._artifacts:
            if size in artifact.sizes and (artifact.holds is None or artifact.holds(inputs)):
                return artifact.run(*inputs)
        return self._rest(*inputs)

    def __str__(self) -> str:
        rows = [f"  {entry}" for entry in self._artifacts]
        return "\n".join([f"{self._name} by {self._dim}", *rows, f"  otherwise {self._rest_is}"])


def fusion_texts(split: SplitGraph, config: CompilationConfig) -> Iterator[str]:
    """Yield the texts of the kernels ``decode_attention`` and ``small_batch``."""
    for line in str(split.fusions).splitlines():
        yield f"decode_attention: {line}"
    try:
        if not _on_device(split, config):
            return
        if config.first_compiler != "inductor":
            yield f"small_batch: compiler {config.first_compiler!r} is not Inductor"
            return
        variants = Variants(split, config)
    except ConfigError as error:
        yield str(error)
        return
    if config.capture_dim is None and len(split.symbols.dims) > 1:
        yield "small_batch: several dimensions vary; capture_dim names that of the batch"
    for piece in split.distinct:
        if piece.compiled:
            for variant in variants.of(piece):
                for line in str(variant.fusions or "").splitlines():
                    yield f"{variant.name}: {line}"


def artifacts_text(split: SplitGraph, runnables: Sequence[Runnable]) -> str:
    """Return which artifacts the compiled pieces of a split graph have; each structure once."""
    rows = []
    for piece in split.distinct:
        run = runnables[piece.index]
        if isinstance(run, Ranged):
            rows.append(str(run))
        elif piece.compiled:
            rows.append(f"{piece.name}\n  one artifact for all sizes")
    return "\n".join(rows)


# ---------------------------------------------------------------- pieces


def compile_pieces(
    split: SplitGraph, config: CompilationConfig, cache: PieceCache
) -> tuple[list[Runnable], Compilation]:
    """Compile each distinct piece; return a callable per piece, in order, and the record.

    Pieces of equal structure share theirs, also with other graphs of the cache.

    Raises:
        PieceCompileError: the compiler raised; names the piece and the user's source line.
        SymbolError: the user's compiler fixed a dynamic size to a number. Where one of torch's own
            does that, it is logged: its guard makes Dynamo compile again for another size.
    """
    compiler, chosen = _compiler_for(config), config.first_compiler
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", repr(chosen))
    variants = Variants(split, config)
    compiled: dict[int, Runnable] = {}
    distinct = [piece for piece in split.distinct if piece.compiled]
    with (
        torch.no_grad(),
        inductor.as_without_aot_compile(),
        Compiling(cache, compiler, config) as work,
        _kernels_ahead(config.cudagraph_capture_sizes or ()) as compile_ahead,
    ):
        for piece in progress(distinct, "cgcompile: pieces", "piece"):
            artifacts = []
            for variant in variants.of(piece):
                compile_ahead(variant)
                log.debug("compiling %s (%d ops) with %s", variant.name, piece.num_ops, name)
                with variant.context():
                    run = _compile_or_not(variant, work, name, isinstance(config.compiler, tuple))
                if callable(chosen):
                    run = _checked_outputs(piece, name, run)
                elif not piece.outputs:
                    run = _without_outputs(run)
                fixed = variants.specialised(variant)
                _check_sizes_stay_free(variant, fixed, users_own=callable(chosen))
                artifacts.append((variant, run))
            compiled[piece.index] = variants.combined(artifacts)
    log.info("compiled %d pieces for %d, with %s", len(compiled), len(split.pieces), name)
    runnables = [
        compiled.get(piece.same_as) or dynamo.with_checkpoints(piece.module).forward
        for piece in split.pieces
    ]
    return runnables, work.result()


@contextmanager
def _kernels_ahead(sizes: Sequence[int]) -> Iterator[Callable[[Variant], None]]:
    """Yield what compiles the kernels of ops of cgcompile in threads; wait for them at the end.

    Triton compiles most of a kernel without Python's lock, beside Inductor. What fails here is
    compiled by the first call, which raises.

    Args:
        sizes: of the batch, for which kernels are compiled besides those as traced.
    """
    submitted: set[str] = set()
    with ThreadPoolExecutor(thread_name_prefix="cgcompile kernels") as threads:

        def compile_ahead(variant: Variant) -> None:
            span = variant.sizes
            own = [None, *(size for size in sizes if span is not None and size in span)]
            for name, arguments in _calls_of_kernels(variant.module, own):
                if repr((name, arguments)) not in submitted:
                    submitted.add(repr((name, arguments)))
                    threads.submit(compile_kernels, name, arguments[0].device, arguments)

        yield compile_ahead


def _calls_of_kernels(gm: fx.GraphModule, sizes: Sequence[int | None]) -> Iterator[tuple[str, Any]]:
    """Yield (name, arguments) of calls of ops that have kernels of cgcompile, on CUDA."""
    for node in gm.graph.nodes:
        if [op.namespace for op in torch_ops.op_overloads(node.target)] == ["cgcompile"]:
            arguments = fx.map_arg(node.args, value)
            if _runs_kernels(arguments[0]):
                for size in sizes:
                    yield short_name(node.target), expressions.with_numbers(arguments, size)


def _runs_kernels(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _compile_or_not(variant: Variant, work: Compiling, name: str, or_eager: bool) -> Runnable:
    try:
        return _compile_one(variant, work, name)
    except PieceCompileError as error:
        if not or_eager:
            raise
        log.warning("%s\n  It runs uncompiled.", error)
        work.failed(variant.name, str(error).splitlines()[0])
        return variant.module.forward


def _compile_one(variant: Variant, work: Compiling, name: str) -> Runnable:
    module, covered = _without_inference_mode(variant.module)
    placeholders = module.graph.find_nodes(op="placeholder")
    fake_inputs = [expressions.present_size(value(node)) for node in placeholders]
    try:
        run = work.make(module, fake_inputs, variant.name, variant.piece.where)
    except Exception as error:
        if isinstance(error, (CGCompileError, *dynamo.restarts())):
            raise
        where = variant.piece.where
        raise PieceCompileError.raised(
            piece=variant.name, compiler=name, where=where, error=error
        ) from error
    if not callable(run):
        raise PieceCompileError.not_callable(piece=variant.name, compiler=name, found=run)
    return torch.inference_mode()(run) if covered else run


def _without_inference_mode(gm: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """Return a piece without the nodes that enter inference mode, and whether it was all inside."""
    # torch 2.11 cannot trace these nodes and crashes the process. A piece is compiled without
    # gradients anyway; one that was all inside runs in inference mode as a whole instead.
    if not gm.graph.find_nodes(op="call_function", target=torch_ops.ENTER_INFERENCE_MODE):
        return gm, False
    gm, depth, covered = dynamo.copied(gm), 0, True
    switches = []
    for node in gm.graph.nodes:
        if node.target is torch_ops.ENTER_INFERENCE_MODE:
            depth += bool(node.args[0])
            switches.append(node)
        elif node.target is torch_ops.LEAVES[torch_ops.ENTER_INFERENCE_MODE]:
            depth -= bool(node.args[0].args[0])
            switches.append(node)
        elif node.op in COMPUTING and not toggles_state(node):
            covered &= depth > 0
    for node in reversed(switches):
        gm.graph.erase_node(node)
    gm.recompile()
    return gm, covered


def _check_sizes_stay_free(variant: Variant, fixed: Mapping[str, str], users_own: bool) -> None:
    where = f"{variant.name} ({variant.piece.where})"
    for dim, size in fixed.items():
        if users_own:
            raise SymbolError.specialised(dim=dim, size=size, where=where)
        log.warning("%s: the compiler fixed %s to %s; other sizes compile again", where, dim, size)


def _checked_outputs(piece: Piece, name: str, run: Runnable) -> Runnable:
    """Check the number of results of the user's artifact: a bare tensor would be unpacked."""

    def checked(*inputs: Any) -> Sequence[Any]:
        outputs = run(*inputs)
        if not isinstance(outputs, (tuple, list)) or len(outputs) != len(piece.outputs):
            number = f"{len(outputs)} of them" if isinstance(outputs, (tuple, list)) else "no list"
            raise PieceCompileError.bad_outputs(
                piece=piece.name, compiler=name, expected=len(piece.outputs), found=number
            )
        return outputs

    return checked


def _without_outputs(run: Runnable) -> Runnable:
    """Drop the dummy result that Inductor needs of a piece without outputs."""

    def without_outputs(*inputs: Any) -> Sequence[Any]:
        run(*inputs)
        return ()

    return without_outputs


def _compiler_for(config: CompilationConfig) -> PieceCompiler:
    """Return the compiler of a configuration, whose Inductor settings are checked."""
    patches = inductor_patches(config)
    compiler = config.first_compiler
    if callable(compiler):
        own: Callable[..., Any] = compiler
        return own
    if compiler == "eager":
        return _forward
    if compiler == "aot":  # the functional ATen graph, run op by op
        return lambda gm, fake_inputs: inductor.compile_aten(gm, fake_inputs, _forward)
    return lambda gm, fake_inputs: inductor.compile_inductor(gm, fake_inputs, patches)


def inductor_patches(config: CompilationConfig) -> dict[str, Any]:
    """Return the user's Inductor settings; raise ConfigError for a name that this torch lacks."""
    patches = dict(config.inductor_options)
    for name in patches:
        if not inductor.is_inductor_option(name):
            raise ConfigError.unknown_inductor_option(
                name=name, known=inductor.inductor_option_names()
            )
    return patches


def _forward(gm: fx.GraphModule, fake_inputs: Sequence[Any]) -> Runnable:
    return gm.forward
