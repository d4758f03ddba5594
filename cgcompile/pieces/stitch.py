"""Split a graph by the settings, and generate the Python function that runs its pieces in order.

``GraphModule.__call__`` costs microseconds a piece and keeps every intermediate alive to the end.
The generated function calls each piece directly, drops each value after its last use, so that its
memory can be reused, and has pieces and constants as globals. For example::

    def step(s0, x, layers_0_weight):
        (q, k, v) = piece_0(s0, x, layers_0_weight)
        (out,) = piece_1(q, k, v)
        del (q, k, v)
        (y,) = piece_2(s0, out, x)
        del (out,)
        return (y,)
"""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig, CompilationMode
from cgcompile.graphs.contract import function_of
from cgcompile.passes import split_graph
from cgcompile.passes.split import Piece, SplitGraph, Value
from cgcompile.pieces.compilers import Runnable
from cgcompile.torch_compat import torch_ops


def split_by_config(gm: fx.GraphModule, config: CompilationConfig) -> tuple[SplitGraph, Boundaries]:
    """Split a pre-grad graph of Dynamo, and return the boundaries that its pieces may contain."""
    # The graph is changed but computes the same.
    boundaries = Boundaries(config.splitting_ops)
    if config.mode is not CompilationMode.PIECEWISE:
        # One piece has all boundaries; its support of a FULL graph is the least of theirs.
        inside = [op.support for op in map(boundaries.match, gm.graph.nodes) if op is not None]
        nothing = Boundaries((), builtin=False)
        split = split_graph(gm, nothing, decode_attention=config.replaces_attention)
        pieces = [replace(piece, support=min([piece.support, *inside])) for piece in split.pieces]
        return replace(split, pieces=tuple(pieces)), nothing
    split = split_graph(
        gm,
        boundaries,
        graph_passes=config.graph_passes,
        piece_passes=config.piece_passes,
        disabled_passes=config.disabled_passes,
        decode_attention=config.replaces_attention,
        dump_dir=config.dump_passes,
    )
    return split, boundaries


def check_sizes(split: SplitGraph, config: CompilationConfig) -> None:
    """Refuse sizes of the settings that the guards of a graph exclude."""
    captured, compiled = config.cudagraph_capture_sizes or (), config.sizes_to_compile
    split.symbols.check_sizes(captured, config.capture_dim)
    split.symbols.check_sizes(compiled, config.capture_dim, "compile_sizes")


_FILE = "<cgcompile step>"  # file name of the generated code in tracebacks
_CALLED = re.compile(r"(?:^|\s)piece_(\d+)\(")
_WIDTH = 96  # width of generated lines; a longer name gets a line to itself


class Step:
    """The generated function of one split graph, bound to callables once per kind of run."""

    def __init__(self, split: SplitGraph) -> None:
        self.source = _step_source(split)
        self._split = split

    def bind(self, runnables: Sequence[Runnable]) -> Callable[..., Any]:
        """Return the function, with a callable for each piece: compiled form, module or replay."""
        namespace: dict[str, Any] = dict(self._split.constants)
        for piece, runnable in zip(self._split.pieces, runnables, strict=True):
            namespace[piece.name] = runnable
        if self._split.numbers is not None:
            namespace["returned_sizes"] = self._split.numbers.module.forward
        step = function_of(self.source, namespace, _FILE)
        return restoring_grad_mode(step) if self._split.sets_grad_mode else step

    def add_note(self, error: BaseException) -> None:
        """Name the piece that raised, as a note: compiled code does not name the user's line."""
        traceback, reached = error.__traceback__, 0
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == _FILE:
                reached = traceback.tb_lineno
            traceback = traceback.tb_next
        lines = self.source.splitlines()[:reached]
        called = next(filter(None, map(_CALLED.search, reversed(lines))), None)
        if called is not None:
            piece = self._split.pieces[int(called[1])]
            where = ": ".join(piece.lines[0]) if piece.lines else piece.where
            torch_ops.add_note(
                error, f"in {piece.name} of the compiled model, which begins at {where}"
            )


def restoring_grad_mode(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step``, which then restores grad mode also if an op raises between two switches."""

    def restoring(*inputs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            return step(*inputs)
        finally:
            torch.set_grad_enabled(before)

    return restoring


def _step_source(split: SplitGraph) -> str:
    """Return the Python text of the step; equal split graphs have equal texts."""
    inputs = [value.name for value in split.inputs]
    calls = [(piece.name, piece) for piece in split.pieces]
    if split.numbers is not None:
        calls.append(("returned_sizes", split.numbers))
    last_use = _last_uses(split, [piece for _, piece in calls])
    lines = _statement("def step(", ", ".join(inputs), "):", indent=0)
    for position, (name, piece) in enumerate(calls):
        lines += _call(name, piece)
        unused = [value for value, last in last_use.items() if last == position]
        if unused:
            lines += _statement("del (", _items(unused), ")", indent=4)
    lines += _statement("return (", _items(list(map(_expression, split.result))), ")", indent=4)
    return "\n".join(lines) + "\n"


def _call(name: str, piece: Piece) -> list[str]:
    arguments = ", ".join(piece.inputs)
    if not piece.outputs:
        return _statement(f"{name}(", arguments, ")", indent=4)
    *results, last = _statement("(", _items(piece.outputs), f") = {name}(", indent=4)
    return results + _statement(last, arguments, ")", indent=0)


def _items(items: Sequence[str]) -> str:
    """Return the inside of a tuple display."""
    return f"{items[0]}," if len(items) == 1 else ", ".join(items)


def _statement(opening: str, listed: str, closing: str, indent: int) -> list[str]:
    """Return listed names within ``opening`` and ``closing``; lines break between names only."""
    opening = " " * indent + opening
    if len(opening) + len(listed) + len(closing) <= _WIDTH:
        return [opening + listed + closing]
    outer = " " * (len(opening) - len(opening.lstrip()))
    width = _WIDTH - len(outer) - 4
    body = textwrap.wrap(listed, width, break_long_words=False, break_on_hyphens=False)
    return [opening, *(f"{outer}    {line}" for line in body), outer + closing]


def _last_uses(split: SplitGraph, calls: list[Piece]) -> dict[str, int]:
    """Return the last call that uses each value of a piece which the caller does not get."""
    outputs = {name for piece in calls for name in piece.outputs}
    last: dict[str, int] = {}
    for position, piece in enumerate(calls):
        for name in (*piece.inputs, *piece.outputs):
            if name in outputs:
                last[name] = position
    returned = {
        item.name for item in torch_ops.tree_leaves(split.result) if isinstance(item, Value)
    }
    return {name: position for name, position in last.items() if name not in returned}


def _expression(item: Any) -> str:
    """Return Python text for an item that the caller gets."""
    if isinstance(item, Value):
        return item.name
    if isinstance(item, tuple):
        return f"({_items(list(map(_expression, item)))})"
    return repr(item)
