"""Compile the pieces of a split graph.

A compiler of pieces is a callable ``(gm, fake_inputs) -> callable``; the result takes the inputs of
the piece by position and returns the list or tuple of its outputs. Pieces are compiled within the
backend call, so that what a compiler assumes about sizes becomes one of Dynamo's guards, and under
``no_grad``, because a piece compiled for training keeps state that a graph cannot hold.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from cgcompile.config import CompilationConfig
from cgcompile.errors import CGCompileError, ConfigError, PieceCompileError, SymbolError
from cgcompile.kernels import compile_kernels
from cgcompile.passes.nodes import COMPUTING, short_name, toggles_state, value
from cgcompile.passes.split import Piece, SplitGraph
from cgcompile.pieces.cache import Compilation, Compiling, PieceCache, PieceCompiler
from cgcompile.pieces.size_ranges import Runnable, Variant, Variants
from cgcompile.progress import progress
from cgcompile.torch_compat import dynamo, expressions, inductor, torch_ops

log = logging.getLogger(__name__)


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
