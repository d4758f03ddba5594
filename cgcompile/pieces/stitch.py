"""How the settings split a graph; the compiling backend and what only looks share it.

The split graph as one straight Python function: what a step without graphs runs.

``GraphModule.__call__`` costs microseconds a piece and keeps every intermediate alive to the end.
The generated function calls each piece directly, drops each value after its last use (so that its
memory can be reused), and binds pieces and constants as names. It reads like this::

    def step(s0, x, layers_0_weight):
        (q, k, v) = piece_0(s0, x, layers_0_weight)
        (out,) = piece_1(q, k, v)
        del (q, k, v)
        (y,) = piece_2(s0, out, x)
        del (out,)
        return (y,)
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CompilationMode
from cgcompile.passes import split_graph
from cgcompile.passes.split import Piece, Ref, SplitGraph
from cgcompile.pieces.compilers import Runnable


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


WIDTH = 96  # of generated lines; a longer name gets a line of its own


class Step:
    """The step of one split graph, to be bound to callables: once per kind of run.

    Args:
        split: the split graph.

    Attributes:
        source: the generated Python.
    """

    def __init__(self, split: SplitGraph) -> None:
        self.source = step_source(split)
        self._code = compile(self.source, "<cgcompile step>", "exec")
        self._split = split

    def bind(self, runnables: Sequence[Runnable]) -> Callable[..., Any]:
        """The function that runs the pieces in order.

        Args:
            runnables: what to call for each piece: compiled form, module, or what replays it.
        """
        namespace: dict[str, Any] = dict(self._split.constants)
        for piece, runnable in zip(self._split.pieces, runnables, strict=True):
            namespace[piece.name] = runnable
        if self._split.numbers is not None:
            namespace["returned_sizes"] = self._split.numbers.module.forward
        exec(self._code, namespace)
        step: Callable[..., Any] = namespace.pop("step")  # else a cycle keeps what is bound
        return restoring_grad_mode(step) if self._split.sets_grad_mode else step


def restoring_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, and grad mode as it was also where an op raises between two switches."""

    def restoring(*inputs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            return step(*inputs)
        finally:
            torch.set_grad_enabled(before)

    return restoring


def step_source(split: SplitGraph) -> str:
    """The Python text of the step; the same for equal split graphs."""
    inputs = [each.name for each in split.inputs]
    calls = [(piece.name, piece) for piece in split.pieces]
    if split.numbers is not None:
        calls.append(("returned_sizes", split.numbers))
    last_use = _last_uses(split, [piece for _, piece in calls])
    lines = _statement("def step(", ", ".join(inputs), "):", indent=0)
    for position, (name, piece) in enumerate(calls):
        lines += _call(name, piece)
        done = [value for value, last in last_use.items() if last == position]
        if done:
            lines += _statement("del (", _items(done), ")", indent=4)
    lines += _statement("return (", _items(_expressions(split.result)), ")", indent=4)
    return "\n".join(lines) + "\n"


def _call(name: str, piece: Piece) -> list[str]:
    arguments = ", ".join(piece.inputs)
    if not piece.outputs:
        return _statement(f"{name}(", arguments, ")", indent=4)
    *results, last = _statement("(", _items(piece.outputs), f") = {name}(", indent=4)
    return results + _statement(last, arguments, ")", indent=0)


def _items(items: Sequence[str]) -> str:
    """The inside of a tuple display."""
    return f"{items[0]}," if len(items) == 1 else ", ".join(items)


def _statement(opening: str, listed: str, closing: str, indent: int) -> list[str]:
    """``opening`` and ``closing`` around listed names, over as many lines as they need.

    Lines break between names only, inside of the brackets.
    """
    opening = " " * indent + opening
    if len(opening) + len(listed) + len(closing) <= WIDTH:
        return [opening + listed + closing]
    outer = " " * (len(opening) - len(opening.lstrip()))
    inner = outer + "    "
    body = textwrap.wrap(
        listed,
        WIDTH,
        initial_indent=inner,
        subsequent_indent=inner,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [opening, *body, outer + closing]


def _last_uses(split: SplitGraph, calls: list[Piece]) -> dict[str, int]:
    """For each value that a piece made and the caller does not get: the last call using it."""
    made = {name for piece in calls for name in piece.outputs}
    last: dict[str, int] = {}
    for position, piece in enumerate(calls):
        for name in (*piece.inputs, *piece.outputs):
            if name in made:
                last[name] = position
    returned = set(_returned(split.result))
    return {name: position for name, position in last.items() if name not in returned}


def _returned(result: Any) -> Iterator[str]:
    """The names of the values that the caller gets."""
    if isinstance(result, Ref):
        yield result.name
    elif isinstance(result, tuple):
        for item in result:
            yield from _returned(item)


def _expressions(result: tuple[Any, ...]) -> list[str]:
    """Python text for each item that the caller gets."""
    return [_expression(item) for item in result]


def _expression(item: Any) -> str:
    if isinstance(item, Ref):
        return item.name
    return f"({_items(_expressions(item))})" if isinstance(item, tuple) else repr(item)
