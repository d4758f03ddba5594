"""Compare what pieces with custom ops return with what was traced: :class:`TracedOutputs`.

The fake implementation of a custom op is the user's. Where it returns another shape or dtype than
the op does, all that was worked out from the trace is wrong: roles, sizes, compiled pieces. Warming
and capturing calls compare; replays do not. Strides are not compared: the ops of pieces that are
not compiled read the real ones, and compiled pieces assert those of their inputs.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile import compat
from cgcompile.boundaries import target_name
from cgcompile.errors import PieceCompileError
from cgcompile.passes.nodes import is_symbolic_number
from cgcompile.passes.pieces import Piece
from cgcompile.passes.split import SplitGraph
from cgcompile.passes.symbols import dtype_text
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.stitch import Step

_TORCHS = ("aten", "prims", "prim")


class TracedOutputs:
    """Compares the results of pieces that hold custom ops with their fake values.

    Args:
        split: the split graph.
    """

    def __init__(self, split: SplitGraph) -> None:
        self._split = split
        holds = {p.same_as: next(_custom_ops(p.module), None) is not None for p in split.distinct}
        self._pieces = {p.index for p in split.pieces if p.outputs and holds[p.same_as]}

    def comparing(
        self, step: Step, runnables: Sequence[Runnable], run: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``run``, the bound step, or one that compares where a piece holds a custom op."""
        if not self._pieces:
            return run

        def compared(*inputs: Any) -> Any:
            pairs = zip(self._split.pieces, runnables, strict=True)
            return step.bind([self.compared(piece, r, inputs) for piece, r in pairs])(*inputs)

        return compared

    def compared(self, piece: Piece, run: Runnable, inputs: Sequence[Any]) -> Runnable:
        """Return ``run``, or where a piece holds a custom op one that compares its results.

        Args:
            piece: whose code it is.
            run: takes the inputs of the piece.
            inputs: of the step.
        """
        if piece.index not in self._pieces:
            return run

        def compared(*given: Any) -> Sequence[Any]:
            outputs = run(*given)
            self._compare(piece, outputs, inputs)
            return outputs

        return compared

    def _compare(self, piece: Piece, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        sizes = self._sizes(inputs)
        for item, (name, output) in enumerate(zip(piece.outputs, outputs, strict=True)):
            traced = self._split.values[name].meta
            if not isinstance(output, torch.Tensor) or not isinstance(traced, torch.Tensor):
                continue
            expected = [self._size(size, sizes) for size in traced.shape]
            same = output.dtype is traced.dtype and len(expected) == output.dim()
            pairs = zip(expected, output.shape, strict=False)
            if not same or any(size not in (None, now) for size, now in pairs):
                raise PieceCompileError.unlike_traced(
                    piece=piece.name,
                    where=piece.where,
                    op=_made_by(piece.module, item),
                    found=_text(output.dtype, output.shape),
                    traced=_text(
                        traced.dtype, ["?" if size is None else size for size in expected]
                    ),
                )

    def _sizes(self, inputs: Sequence[Any]) -> dict[sympy.Basic, int]:
        """The number that each symbol stands for in a call."""
        pairs = zip(self._split.inputs, inputs, strict=False)
        return {
            value.meta.node.expr: number
            for value, number in pairs
            if is_symbolic_number(value.meta) and isinstance(number, int)
        }

    def _size(self, size: Any, sizes: Mapping[sympy.Basic, int]) -> int | None:
        """A traced size as a number; None where it depends on data."""
        number = self._split.symbols.number(size).subs(sizes)
        return int(number) if number.is_number else None


def _custom_ops(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that call ops which are not torch's own, subgraphs included."""
    for graph in module.modules():
        nodes = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
        for node in nodes:
            overloads = compat.op_overloads(node.target) if node.op == "call_function" else ()
            if any(overload.namespace not in _TORCHS for overload in overloads):
                yield node


def _made_by(module: fx.GraphModule, item: int) -> str:
    """The custom op that returns an output of a piece; else all those in it."""
    (results,) = module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    node: Any = results[item]
    while isinstance(node, fx.Node) and node.target is operator.getitem:
        node = node.args[0]
    ops = list(_custom_ops(module))
    chosen = [node] if node in ops else ops
    return " or ".join(dict.fromkeys(target_name(op.target) for op in chosen))


def _text(dtype: torch.dtype, sizes: Sequence[Any]) -> str:
    return f"{dtype_text(dtype)}[{', '.join(map(str, sizes))}]"
