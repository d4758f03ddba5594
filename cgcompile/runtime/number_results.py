"""A compiled graph, and results that the host computes from Python floats of the caller."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cgcompile.passes.nodes import value
from cgcompile.passes.numbers import NumberResults


class WithNumberResults:
    """Call a compiled graph, and insert the results that were taken from it."""

    def __init__(
        self, graph: Callable[..., Any], results: NumberResults, gm: fx.GraphModule
    ) -> None:
        self.graph = graph
        self._at, self._compute = results.positions, results.compute
        inputs = {node: n for n, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        # An input that is missing became a constant, which is guarded.
        self._inputs: list[tuple[int | None, torch.Tensor | None]] = [
            (inputs[source], None)
            if source in inputs
            else (None, torch.tensor(float(value(number)), dtype=torch.float64))
            for source, number in results.inputs.items()
        ]

    def __call__(self, *inputs: Any) -> Any:
        """Run one step; see :class:`~cgcompile.runtime.compiled_graph.CompiledGraph`."""
        results = list(self.graph(*inputs))
        floats = [constant if at is None else inputs[at] for at, constant in self._inputs]
        for position, number in zip(self._at, self._compute(*floats), strict=True):
            results.insert(position, number)
        return tuple(results)
