"""What Dynamo calls in place of a compiled graph whose inputs and results are converted.

A graph that Dynamo traced may take and return what no CUDA graph holds: tensor subclasses, Python
numbers that vary, lengths that vary. An :class:`Adapter` converts the inputs of one kind to those
of the graph, and the results back. Adapters compose: each converts what the one before it returns,
and the results pass them in the opposite order. The rule: an adapter that cannot convert a call
returns a fallback, and the graph as it was traced runs instead, counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from cgcompile.reasons import Fallback
from cgcompile.runtime.compiled_graph import CompiledGraph

# Runs a call without a graph: (name, fallback, function) -> its result.
PlainRunner = Callable[[str, Fallback, Callable[[], Any]], Any]


class Prepared(NamedTuple):
    """The converted inputs of one call."""

    inputs: tuple[Any, ...]
    finish: Callable[[Any], Any] | None = None  # converts the results of the call; None: identity


@dataclass(frozen=True)
class Adapter:
    """One conversion.

    Attributes:
        prepare: converts the inputs of a call, or returns why it cannot.
        original: the graph without the conversion, which runs where there is a fallback.
    """

    prepare: Callable[[tuple[Any, ...]], Prepared | Fallback]
    original: Callable[..., Any]


class AdaptedGraph:
    """A compiled graph behind adapters, the outermost first."""

    def __init__(
        self, graph: CompiledGraph, adapters: Sequence[Adapter], run_plain: PlainRunner
    ) -> None:
        self.graph, self.adapters, self._run_plain = graph, tuple(adapters), run_plain

    def __call__(self, *inputs: Any) -> Any:
        """Run one step; see :class:`~cgcompile.runtime.compiled_graph.CompiledGraph`."""
        finishes = []
        for adapter in self.adapters:
            prepared = adapter.prepare(inputs)
            if isinstance(prepared, Fallback):
                result = self._run_plain("a step", prepared, partial(adapter.original, *inputs))
                break
            inputs, finish = prepared
            if finish is not None:
                finishes.append(finish)
        else:
            result = self.graph(*inputs)
        for finish in reversed(finishes):
            result = finish(result)
        return result


def innermost(compiled: Any) -> CompiledGraph | None:
    """Return the compiled graph in what a backend returns; None if there is none."""
    graph = compiled.graph if isinstance(compiled, AdaptedGraph) else compiled
    return graph if isinstance(graph, CompiledGraph) else None
