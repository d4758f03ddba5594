"""How the settings split a graph; the compiling backend and what only looks share it."""

from dataclasses import replace

from torch import fx

from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CompilationMode
from cgcompile.passes import split_graph
from cgcompile.passes.split import SplitGraph


def split_as_set(gm: fx.GraphModule, config: CompilationConfig) -> tuple[SplitGraph, Boundaries]:
    """Split a pre-grad graph of Dynamo in the mode of the settings.

    Args:
        gm: the graph; it is changed but computes what it did.
        config: mode PIECEWISE cuts at boundaries. Any other leaves them in the piece, which goes as
            far into a FULL graph as the least able of them.

    Returns:
        The split, and the boundaries that still have to be looked for in captured pieces.

    Raises:
        CGCompileError: what :func:`cgcompile.passes.split_graph` raises.
    """
    if config.mode is not CompilationMode.PIECEWISE:
        return _unsplit(gm, config)
    boundaries = Boundaries(config.splitting_ops, builtin=config.builtin_splitting_ops)
    split = split_graph(
        gm,
        boundaries,
        graph_passes=config.graph_passes,
        piece_passes=config.piece_passes,
        disabled_passes=config.disabled_passes,
        dump_dir=config.dump_passes,
    )
    return split, boundaries


def _unsplit(gm: fx.GraphModule, config: CompilationConfig) -> tuple[SplitGraph, Boundaries]:
    registry = Boundaries(config.splitting_ops)
    met = [found.support for found in map(registry.match, gm.graph.nodes) if found is not None]
    nothing = Boundaries((), builtin=False)
    split = split_graph(gm, nothing)
    pieces = tuple(replace(piece, support=min([piece.support, *met])) for piece in split.pieces)
    return replace(split, pieces=pieces), nothing


def check_sizes(split: SplitGraph, config: CompilationConfig) -> None:
    """Refuse sizes of the settings that the guards of a graph exclude.

    Raises:
        SymbolError: names the size and the guard.
        ConfigError: it is not clear which dimension the sizes speak of.
    """
    captured, compiled = config.cudagraph_capture_sizes or (), config.sizes_to_compile
    split.symbols.check_sizes(captured, config.capture_dim)
    split.symbols.check_sizes(compiled, config.capture_dim, "compile_sizes")
