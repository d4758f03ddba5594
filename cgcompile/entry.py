"""What ``torch.compile`` calls at every step: :class:`CompiledGraph`, one per backend call.

A backend call is not a model: two instances of a class can share one, and one model can make
several (graph breaks, a static and then a dynamic size). A compiled graph owns the split, the
compiled pieces and the counters. Without gradients it runs the compiled pieces; with them the
same pieces uncompiled, because a compiled piece would return detached results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgcompile.errors import GradientError
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
        self._run = _restoring_grad_mode(split, self._compiled.call)
        self._run_differentiable = _restoring_grad_mode(split, self._differentiable.call)
        constants = split.constants.values() if split.differentiable else ()
        self._constants = tuple(each for each in constants if isinstance(each, torch.Tensor))
        self._may_require_grad = tuple(
            position
            for position, each in enumerate(split.inputs)
            if split.differentiable and isinstance(each.meta, torch.Tensor)
        )

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

        Raises:
            GradientError: gradients are asked for, and the model recomputes activations.
        """
        self.counters.calls += 1
        if torch.is_grad_enabled():
            for position in self._may_require_grad:
                if inputs[position].requires_grad:
                    return self._differentiable_step(inputs)
            for constant in self._constants:
                if constant.requires_grad:
                    return self._differentiable_step(inputs)
        return self._run(*inputs)

    def _differentiable_step(self, inputs: Sequence[Any]) -> Any:
        if self.split.recomputes:
            raise GradientError.recomputes()
        self.counters.plain[Reason.GRADIENTS] += 1
        return self._run_differentiable(*inputs)


def _restoring_grad_mode(split: SplitGraph, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, and grad mode as it was also where an op raises between two switches."""
    if not split.sets_grad_mode:
        return call

    def restoring(*inputs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            return call(*inputs)
        finally:
            torch.set_grad_enabled(before)

    return restoring
