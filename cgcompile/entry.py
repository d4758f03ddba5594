"""What ``torch.compile`` calls at every step: :class:`CompiledGraph`, one per backend call.

A backend call is not a model: two instances of a class can share one, and one model can make
several (graph breaks, a static and then a dynamic size). A compiled graph owns the split, the
compiled pieces and the counters. Without gradients it runs the compiled pieces; with them the
same pieces uncompiled, because a compiled piece would return detached results.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.stitch import Stitched, stitch
from cgcompile.reasons import Counters, Reason


class CompiledGraph:
    """One traced graph: split, compiled, ready to run.

    Args:
        split: the split graph.
        runnables: what to call for each piece.

    Attributes:
        split: the split graph; ``print(graph.split)`` shows it.
        counters: calls so far, and those that ran plain by reason.
    """

    def __init__(self, split: SplitGraph, runnables: Sequence[Runnable]) -> None:
        self.split = split
        self.counters = Counters()
        self._compiled: Stitched = stitch(split, runnables)
        self._differentiable: Stitched = stitch(split, [p.module.forward for p in split.pieces])
        self._run = self._compiled.call

    @property
    def source(self) -> str:
        """The generated Python that runs the pieces."""
        return self._compiled.source

    def __call__(self, *inputs: Any) -> Any:
        """Run one step.

        Args:
            *inputs: the inputs of the traced graph, as Dynamo passes them: sizes and tensors.

        Returns:
            What the graph returns, owned by the caller. Nothing synchronises.
        """
        self.counters.calls += 1
        if torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in inputs
        ):
            self.counters.plain[Reason.GRADIENTS] += 1
            return self._differentiable.call(*inputs)
        return self._run(*inputs)
