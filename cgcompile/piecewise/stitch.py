"""The split graph as one straight Python function: what a step without graphs runs.

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
from dataclasses import dataclass
from typing import Any

from cgcompile.passes.pieces import Piece, Ref
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.compilers import Runnable


@dataclass(frozen=True)
class Stitched:
    """A generated function.

    Attributes:
        source: its Python text.
        call: takes the inputs of the split graph by position, returns what the graph returns.
    """

    source: str
    call: Callable[..., Any]


def stitch(split: SplitGraph, runnables: Sequence[Runnable]) -> Stitched:
    """Generate the function that runs the pieces in order.

    Args:
        split: the split graph.
        runnables: what to call for each piece: its compiled form, its module, or a wrapper.
    """
    source = step_source(split)
    namespace: dict[str, Any] = dict(split.constants)
    for piece, runnable in zip(split.pieces, runnables, strict=True):
        namespace[piece.name] = runnable
    if split.numbers is not None:
        namespace["returned_sizes"] = split.numbers.module.forward
    exec(compile(source, "<cgcompile step>", "exec"), namespace)
    return Stitched(source, namespace["step"])


def step_source(split: SplitGraph) -> str:
    """The Python text of the step; the same for equal split graphs."""
    inputs = [each.name for each in split.inputs]
    calls = [(piece.name, piece) for piece in split.pieces]
    if split.numbers is not None:
        calls.append(("returned_sizes", split.numbers))
    last_use = _last_uses(split, [piece for _, piece in calls])
    lines = _wrapped(f"def step({', '.join(inputs)}):", indent=0)
    for position, (name, piece) in enumerate(calls):
        results = f"{_tuple(piece.outputs)} = " if piece.outputs else ""
        lines += _wrapped(f"{results}{name}({', '.join(piece.inputs)})", indent=4)
        done = [value for value, last in last_use.items() if last == position]
        if done:
            lines += _wrapped(f"del {_tuple(done)}", indent=4)
    lines += _wrapped(f"return {_expression(split.result)}", indent=4)
    return "\n".join(lines) + "\n"


def _wrapped(statement: str, indent: int) -> list[str]:
    """A statement over as many lines as it needs; all our commas and spaces are in brackets."""
    first, rest = " " * indent, " " * (indent + 4)
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(statement, 96, initial_indent=first, subsequent_indent=rest, **options)  # type: ignore[arg-type]


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


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _expression(result: Any) -> str:
    """Python text for the returned structure."""
    if isinstance(result, Ref):
        return result.name
    if isinstance(result, tuple):
        return _tuple([_expression(item) for item in result])
    return repr(result)
