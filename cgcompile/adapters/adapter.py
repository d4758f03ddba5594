"""Conversions of inputs and results around a compiled graph.

A graph that Dynamo traced may take and return what no CUDA graph holds: tensor subclasses, Python
numbers that vary, lengths that vary. An :class:`Adapter` converts inputs of one kind to those of
the graph, and the results back. Adapters compose: each converts what the one before it returns,
and the results pass them in the opposite order. The rule: an adapter that cannot convert a call
raises RunPlain, and the graph as it was traced runs instead, counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from cgcompile.reasons import Fallback, RunPlain
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
        prepare: converts the inputs of a call; raises RunPlain where it cannot.
        original: the graph without the conversion, which runs then.
    """

    prepare: Callable[[tuple[Any, ...]], Prepared]
    original: Callable[..., Any]


class AdaptedGraph:
    """A compiled graph behind adapters, the outermost first."""

    def __init__(
        self, graph: CompiledGraph, adapters: Sequence[Adapter], run_plain: PlainRunner
    ) -> None:
        self.graph, self.adapters, self._run_plain = graph, tuple(adapters), run_plain

    def __call__(self, *inputs: Any) -> Any:
        """Run one step; see :class:`~cgcompile.runtime.compiled_graph.CompiledGraph`."""
        finishes, why = [], None
        run: Callable[..., Any] = self.graph
        for adapter in self.adapters:
            try:
                inputs, finish = adapter.prepare(inputs)
            except RunPlain as refusal:
                why, run = refusal.why, adapter.original
                break
            if finish is not None:
                finishes.append(finish)
        if why is None:
            result = run(*inputs)
        else:
            result = self._run_plain("a step", why, partial(run, *inputs))
        for finish in reversed(finishes):
            result = finish(result)
        return result


def innermost(compiled: Any) -> CompiledGraph | None:
    """Return the compiled graph that a backend returned, without its adapters; None without one."""
    graph = compiled.graph if isinstance(compiled, AdaptedGraph) else compiled
    return graph if isinstance(graph, CompiledGraph) else None
