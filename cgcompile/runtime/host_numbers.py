"""A compiled graph that takes numbers as tensors, called with the numbers of the caller.

The host computes at each call, in Python, what eager computes from them. The rule: a number with
which the graph would compute otherwise than eager runs the original graph, counted by name; what
raises in Python raises as in eager.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from cgcompile.passes.numbers import HostNumber, HostNumbers
from cgcompile.reasons import Fallback, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.runtime.padding import PaddedGraph
from cgcompile.runtime.weight_sets import picker

# Runs a call without a graph: (name, fallback, function) -> its result.
RunPlain = Callable[[str, Fallback, Callable[[], Any]], Any]


class WithHostNumbers:
    """What Dynamo calls in place of a compiled graph that takes numbers as tensors."""

    def __init__(
        self,
        graph: CompiledGraph | PaddedGraph,
        numbers: HostNumbers,
        original: Callable[..., Any],
        run_plain: RunPlain,
    ) -> None:
        self.graph, self.split = graph, graph.split
        self._original, self._run_plain = original, run_plain
        self._failed = (graph.graph if isinstance(graph, PaddedGraph) else graph).timeline.failed
        self._numbers, self._added = numbers.numbers, numbers.numbers[: numbers.num_added]
        self._compute, self._results = numbers.compute, numbers.results
        self._sources, self._inputs = picker(numbers.sources), picker(numbers.inputs)

    def __call__(self, *inputs: Any) -> Any:
        """Run one step; see :class:`~cgcompile.runtime.compiled_graph.CompiledGraph`."""
        try:
            computed = self._compute(*self._sources(inputs))
        except (ArithmeticError, ValueError):
            return self._run_as_eager(inputs)
        for number, known in zip(computed, self._numbers, strict=False):  # results are more
            if not _fits(number, known):
                fallback = Fallback(Reason.UNSUPPORTED_INPUT, _why_not(number, known))
                return self._run_plain("a step", fallback, lambda: self._original(*inputs))
        pairs = zip(computed, self._added, strict=False)
        tensors = tuple([torch.tensor(number, dtype=known.dtype) for number, known in pairs])
        result = self.graph(*self._inputs(inputs + tensors))
        if not self._results:
            return result
        results = list(result)
        for item, number in zip(self._results, computed[len(self._numbers) :], strict=True):
            results.insert(item, number)
        return tuple(results)

    def _run_as_eager(self, inputs: tuple[Any, ...]) -> Any:
        """Run the original graph: it raises where eager does, after what eager does before that."""
        try:
            return self._original(*inputs)
        except BaseException as error:
            self._failed(error)
            raise


def _fits(number: Any, known: HostNumber) -> bool:
    """Return whether ops compute with the tensor of a number as eager does with the number."""
    if type(number) is not known.kind:
        return False
    if known.kind is int:
        return bool(-(1 << 63) <= number < 1 << 63)
    return abs(number) <= known.limit or not math.isfinite(number)


def _why_not(number: Any, known: HostNumber) -> str:
    what = f"a number made of {known.of} is {number!r}"
    if type(number) is not known.kind:
        return f"{what}, no {known.kind.__name__} as when it was traced"
    return f"{what}, beyond {'int64' if known.kind is int else format(known.limit, '.4g')}"
