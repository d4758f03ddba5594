"""Compile the pieces of a split graph.

A compiler of pieces is a callable ``(gm, fake_inputs) -> callable``; the result takes the inputs of
the piece by position and returns the list or tuple of its outputs. Everything is compiled inside
the backend call, so that what a compiler assumes about sizes becomes one of Dynamo's guards, and
under ``no_grad``, because a piece compiled for training keeps state that a graph cannot hold.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from tqdm import tqdm

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig
from cgcompile.errors import CGCompileError, ConfigError, PieceCompileError, SymbolError
from cgcompile.passes.nodes import COMPUTING, toggles_state, value
from cgcompile.passes.split import Piece, SplitGraph
from cgcompile.pieces.cache import Compilation, Compiling, PieceCache, PieceCompiler
from cgcompile.pieces.size_ranges import Runnable, Variant, Variants

log = logging.getLogger(__name__)


def compile_pieces(
    split: SplitGraph, config: CompilationConfig, cache: PieceCache
) -> tuple[list[Runnable], Compilation]:
    """One callable per piece, in order, and the record of where each came from.

    Pieces of equal structure share theirs, with those of other graphs in the cache as well.

    Raises:
        PieceCompileError: the compiler raised; names the piece and the user's source line.
        SymbolError: the user's compiler fixed a dynamic size to a number. Where one of torch's own
            does that, it is logged: its guard makes Dynamo compile again for another size.
    """
    compiler = compiler_for(config)
    name = compiler_name(config)
    todo = [piece for piece in split.distinct if piece.compiled]
    variants = Variants(split, config)
    made: dict[int, Runnable] = {}
    progress = tqdm(todo, desc="cgcompile: pieces", unit="piece", disable=None, leave=False)
    with torch.no_grad(), progress, Compiling(cache, compiler, config) as work:
        for piece in progress:
            parts = []
            for variant in variants.of(piece):
                log.debug("compiling %s (%d ops) with %s", variant.name, piece.num_ops, name)
                with variant.context():
                    run = _compile_or_not(variant, work, name, config.on_compile_error)
                if callable(config.compiler):
                    run = _checked_outputs(piece, name, run)
                elif not piece.outputs:
                    run = _without_outputs(run)
                fixed = variants.specialised(variant)
                _check_sizes_stay_free(variant, fixed, users_own=callable(config.compiler))
                parts.append((variant, run))
            made[piece.index] = variants.choosing(parts)
    log.info("compiled %d pieces for %d, with %s", len(made), len(split.pieces), name)
    runnables = [made.get(piece.same_as, piece.module.forward) for piece in split.pieces]
    return runnables, work.result()


def _compile_or_not(variant: Variant, work: Compiling, name: str, on_error: str) -> Runnable:
    try:
        return _compile_one(variant, work, name)
    except PieceCompileError as error:
        if on_error == "raise":
            raise
        log.warning("%s\n  It runs uncompiled.", error)
        work.failed(variant.name, str(error).splitlines()[0])
        return variant.module.forward


def _compile_one(variant: Variant, work: Compiling, name: str) -> Runnable:
    module, covered = _without_inference_mode(variant.module)
    placeholders = module.graph.find_nodes(op="placeholder")
    fake_inputs = [compat.present_size(value(node)) for node in placeholders]
    try:
        made = work.make(module, fake_inputs, variant.name, variant.piece.where)
    except Exception as error:
        if isinstance(error, (CGCompileError, *compat.restarts())):
            raise
        where = variant.piece.where
        raise PieceCompileError.raised(
            piece=variant.name, compiler=name, where=where, error=error
        ) from error
    if not callable(made):
        raise PieceCompileError.not_callable(piece=variant.name, compiler=name, found=made)
    return torch.inference_mode()(made) if covered else made


def _without_inference_mode(gm: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """A piece without the nodes that enter inference mode, and whether it was all inside.

    torch 2.11 cannot trace them and breaks the process trying. A piece is compiled without
    gradients anyway; one that was all inside runs in inference mode as a whole instead.
    """
    if not gm.graph.find_nodes(op="call_function", target=compat.ENTER_INFERENCE_MODE):
        return gm, False
    gm, depth, covered = compat.copied(gm), 0, True
    switches = []
    for node in gm.graph.nodes:
        if node.target is compat.ENTER_INFERENCE_MODE:
            depth += bool(node.args[0])
            switches.append(node)
        elif node.target is compat.LEAVES[compat.ENTER_INFERENCE_MODE]:
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
    """What the user's compiler made, with its results counted: a bare tensor would be unpacked."""

    def checked(*inputs: Any) -> Sequence[Any]:
        outputs = run(*inputs)
        if not isinstance(outputs, (tuple, list)) or len(outputs) != len(piece.outputs):
            found = f"{len(outputs)} of them" if isinstance(outputs, (tuple, list)) else "no list"
            raise PieceCompileError.bad_outputs(
                piece=piece.name, compiler=name, expected=len(piece.outputs), found=found
            )
        return outputs

    return checked


def _without_outputs(run: Runnable) -> Runnable:
    """Drop what a piece without outputs returns: Inductor compiles it with one."""

    def without_outputs(*inputs: Any) -> Sequence[Any]:
        run(*inputs)
        return ()

    return without_outputs


def compiler_name(config: CompilationConfig) -> str:
    chosen = config.compiler
    return chosen if isinstance(chosen, str) else getattr(chosen, "__name__", repr(chosen))


def compiler_for(config: CompilationConfig) -> PieceCompiler:
    """The compiler that a configuration asks for.

    Raises:
        ConfigError: an Inductor setting that this torch does not have.
    """
    patches = inductor_patches(config)
    if callable(config.compiler):
        return config.compiler
    if config.compiler == "eager":
        return lambda gm, fake_inputs: gm.forward
    if config.compiler == "aot":
        return _aot
    return lambda gm, fake_inputs: compat.compile_standalone(gm, fake_inputs, patches)


def inductor_patches(config: CompilationConfig) -> dict[str, Any]:
    """The user's Inductor settings, checked against those that this torch knows."""
    patches = dict(config.inductor_options)
    for name in patches:
        if name not in compat.inductor_option_names():
            raise ConfigError.unknown_inductor_option(
                name=name, known=compat.inductor_option_names()
            )
    return patches


def _aot(gm: fx.GraphModule, fake_inputs: Sequence[Any]) -> Runnable:
    """The functional ATen graph of a piece, run op by op."""
    return compat.compile_aten(gm, fake_inputs, lambda aten, inputs: aten.forward)
