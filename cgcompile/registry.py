"""The registry: one handle over the compiled graphs and the wrappers of one set of settings.

Dynamo owns the compiled graphs, and a model that is not traced owns its wrapper. The registry holds
both weakly, so that one object counts, captures, invalidates and frees them. The rule: a compiled
graph or a wrapper is registered where it is created, so that :meth:`Registry.close_capture` and
:meth:`Registry.invalidate` reach all of them.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cgcompile.config import CompilationConfig
from cgcompile.context import current_forward_context
from cgcompile.graphs.capture import releasing
from cgcompile.graphs.capture_all import BulkCapture, capture_all
from cgcompile.graphs.device import wait_for_inputs
from cgcompile.graphs.pool import GraphMemory, memory_of
from cgcompile.graphs.steps import refuse_strict
from cgcompile.graphs.timeline import Timeline
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import EXPECTED, Counters, Fallback, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.settings import checked

log = logging.getLogger(__name__)

_MOST_NAMED = 4  # functions of which Dynamo compiled nothing


class Registry:
    """The handle over what was compiled with one set of settings, see :class:`cgcompile.Backend`.

    Args:
        config: the settings.

    Attributes:
        config: the settings.
        untraced: the live wrappers of untraced models.
    """

    def __init__(self, config: CompilationConfig) -> None:
        self.config = config
        self.untraced: weakref.WeakSet[CUDAGraphWrapper] = weakref.WeakSet()
        self._graphs: list[tuple[weakref.ref[CompiledGraph], Timeline]] = []
        self._ended = Counters()  # counts of graphs that were freed
        self._traces: weakref.WeakSet[Any] = weakref.WeakSet()
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_compilations = 0
        self._capture_closed = self._threads_allowed = False
        self._not_compiled: list[str] = []
        self.timeline = Timeline(config.warn_fallbacks)  # calls that reach no compiled graph

    def remember(self, traces: Any) -> None:
        """Register the traces of a compiled model, for :meth:`invalidate` to clear."""
        self._traces.add(traces)

    def attach(self, manager: Any) -> None:
        """Register a manager of a compiled model, to be told where graphs are dropped."""
        self._managers.add(manager)

    def compare_bound(self) -> None:
        """Make the next call of each trace compare the tensors that it has bound."""
        for traces in tuple(self._traces):
            traces.compare_bound()

    def adopt(self, wrapper: CUDAGraphWrapper) -> None:
        """Register the wrapper of an untraced model of :func:`cgcompile.compile`."""
        wrapper.closed = self._capture_closed
        wrapper.remedy = "backend.release()"
        wrapper.timeline.warned = self.timeline.warned
        # An engine calls a wrapper of its own without a forward context on purpose.
        wrapper.timeline.expected = EXPECTED - {Reason.NO_CONTEXT}
        if self._threads_allowed:
            wrapper.allow_threads()
        self.untraced.add(wrapper)

    def _register(self, graph: CompiledGraph) -> None:
        """Register a new compiled graph."""
        self._num_compilations += 1
        graph.timeline.warned = self.timeline.warned
        if self._capture_closed:
            graph.close_capture()
        if self._threads_allowed and graph.pool is not None:
            graph.pool.thread.allow()
        freed = [timeline.counters for ref, timeline in self._graphs if ref() is None]
        self._ended = sum(freed, self._ended)
        self._graphs[:] = [pair for pair in self._graphs if pair[0]() is not None]
        self._graphs.append((weakref.ref(graph), graph.timeline))
        graph.of_handle = self._graphs

    def _drop(self) -> None:
        """Drop the compiled graphs from the registry, with the counts of calls without a graph."""
        self._graphs.clear()
        self._ended = Counters()
        self._not_compiled.clear()
        self.timeline = Timeline(self.config.warn_fallbacks)

    @property
    def num_compilations(self) -> int:
        """The number of graphs compiled so far, including those that were freed."""
        return self._num_compilations

    @property
    def graphs(self) -> tuple[CompiledGraph, ...]:
        """The live compiled graphs, in the order of compilation.

        Dynamo owns them: ``torch._dynamo.reset()`` frees them, and so does the death of the code.
        """
        return tuple(graph for ref, _ in self._graphs if (graph := ref()) is not None)

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """The wrappers of untraced models, then the wrappers of captured pieces and steps.

        Those of compiled graphs are counted, and cleared, by their graphs.
        """
        captured = (wrapper for graph in self.graphs for wrapper in graph.wrappers)
        return (*self.untraced, *captured)

    @property
    def counters(self) -> Counters:
        """The sum of what all calls did: of graphs, of wrappers, and of calls with neither.

        Graphs that were dropped count as well.
        """
        counters = [self._ended, *(timeline.counters for _, timeline in self._graphs)]
        counters += [wrapper.counters for wrapper in self.untraced]
        return sum(counters, self.timeline.counters)

    def memory(self) -> GraphMemory:
        """Return the device memory of the graphs, including those of managers of the model.

        Returns:
            :class:`cgcompile.serving.GraphMemory`; ``print`` it. Memory of graphs that were dropped
            counts until :meth:`release`. Nothing synchronises.

        Example:
            >>> model = cgcompile.compile(nn.Linear(8, 8))
            >>> with torch.inference_mode():
            ...     for _ in range(2):
            ...         y = model(torch.randn(4, 8))
            >>> memory = model.backend.memory()
            >>> memory.pools > 0, memory.executables
            (True, 0)
        """
        managers = tuple(self._managers)
        wrappers = [*self.untraced]
        wrappers += [wrapper for manager in managers for wrapper in manager.wrappers]
        pools = [graph.pool for graph in self.graphs] + [wrapper.pool for wrapper in wrappers]
        outputs = sum(manager.meter.outputs.nbytes for manager in managers)
        return memory_of(pools, outputs, growth_of(self.graphs, wrappers))

    @checked
    def capture(
        self,
        step: Callable[[Any], Any],
        batches: Iterable[Any],
        *,
        size: Callable[[Any], int] | None = None,
    ) -> BulkCapture:
        """Warm up and capture all batches of a model, the largest first.

        Args:
            step: ``step(batch)`` prepares inputs afresh and calls the compiled model once, in a
                forward context or without one. It is called for each batch at least twice.
            batches: numbers of tokens, batch descriptors, or other arguments of ``step``.
            size: the size of a batch; left out: the number itself, or its ``num_tokens``, which
                must be in the descriptor of the forward context that ``step`` sets, if it sets one.

        Returns:
            Which batches have graphs now, and why the others have none.

        Raises:
            ConfigError: a batch has no tokens.
            DispatchError: with ``on_fallback="raise"``, a batch has no graph.
            BaseException: what ``step`` raised.
        """
        return capture_all(
            step,
            batches,
            self,
            size=size,
            settled=lambda: self.num_compilations,
            warmups=self.config.num_warmups,
            strict=self.config.strict,
        )

    @checked
    def invalidate(self, reason: str) -> None:
        """Drop all captured graphs and traces: something that they baked in has changed.

        Steps warm up and capture again, unless capture is closed. Managers of the model drop their
        graphs too, and capture again.

        Args:
            reason: what has changed; for the log.

        Raises:
            CaptureError: called inside of a step or of a capture.
        """
        managers = self._outside_of_steps()
        for graph in self.graphs:
            graph.invalidate(reason)
        for wrapper in tuple(self.untraced):
            wrapper.clear_graphs()
        for traces in tuple(self._traces):
            traces.drop()
        for manager in managers:
            manager.drop()

    def _outside_of_steps(self) -> tuple[Any, ...]:
        """Return the managers of the model; raise if this thread runs a step of one."""
        managers = tuple(self._managers)
        for manager in managers:
            manager.refuse_inside()
        return managers

    def close_capture(self) -> None:
        """Forbid captures from now on, in all threads, of graphs that are compiled later as well.

        Steps of other shapes run without a graph, counted; with ``on_fallback="raise"`` they raise.
        """
        self._capture_closed = True
        for graph in self.graphs:
            graph.close_capture()
        for wrapper in tuple(self.untraced):
            wrapper.closed = True

    def allow_threads(self) -> None:
        """Let several threads run steps under forward contexts: the program locks them.

        Under a forward context results are views of memory of graphs, which the next step of the
        compiled graph overwrites. So the first such step of a second thread is an error, unless the
        program holds one lock around each step *and* the reading of its results, and declares so by
        this call. It holds for all that is compiled later, too. Steps without a forward context
        return copies, and need no lock and no declaration.

        Example:
            >>> model = cgcompile.compile(nn.Linear(8, 8))
            >>> model.backend.allow_threads()
        """
        self._threads_allowed = True
        for graph in self.graphs:
            if graph.pool is not None:
                graph.pool.thread.allow()
        for wrapper in tuple(self.untraced):
            wrapper.allow_threads()

    def release(self) -> None:
        """Free all CUDA graphs and their memory, and allow captures again.

        Results that a replay returned under a forward context alias that memory: drop them first.
        Graphs of models that were freed are freed as well, or by the next capture. Waits for
        captures of other threads to end. Traces stay, but those whose weights were replaced.

        Raises:
            CaptureError: called inside of a step or of a capture.
        """
        managers = self._outside_of_steps()
        self._capture_closed = False
        for graph in self.graphs:
            graph.release()
        for wrapper in tuple(self.untraced):
            wrapper.clear_all_graphs()
            wrapper.closed = False
        self.compare_bound()
        for manager in managers:
            manager.drop()
        with releasing():  # graphs of models that were freed
            pass

    def recompile_limit_reached(
        self, detail: str, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Count that Dynamo stops compiling a function; it calls this before the call runs eager.

        Raises:
            DispatchError: ``on_fallback="raise"``.
        """
        fallback = Fallback(Reason.RECOMPILE_LIMIT, detail)
        refuse_strict(self.config.strict, "the model", fallback)
        if self.timeline.warned is not None:  # once per function: the timeline warns once in all
            log.warning("%s. Let what varies be a tensor, or raise the limit", detail)
            self.timeline.warned.add(fallback.reason)
        self.timeline.degraded(fallback)

    def nothing_compiled(
        self, detail: str, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Count a function of which Dynamo compiled nothing; Dynamo calls this once a function."""
        if detail not in self._not_compiled and len(self._not_compiled) < _MOST_NAMED:
            self._not_compiled.append(detail)
        text = f"Dynamo compiled nothing of {'; of '.join(self._not_compiled)}"
        reason = Reason.NOT_COMPILED
        if self.timeline.warned is not None and reason not in self.timeline.warned:
            log.warning(
                "%s. Its calls run without this backend, uncounted, also with "
                "on_fallback='raise'. Remedy: %s. (Logged once for a reason; on_fallback='count' "
                "turns it off.)",
                text.removesuffix("."),
                reason.remedy,
            )
            self.timeline.warned.add(reason)
        self.timeline.degraded(Fallback(reason, text))

    def run_plain(self, name: str, fallback: Fallback, function: Callable[[], Any]) -> Any:
        """Run and count a call that no graph serves.

        Raises:
            DispatchError: ``on_fallback="raise"``.
            BaseException: what the function raised.
        """
        context = current_forward_context()
        if context is not None and context.inputs_ready is not None:
            wait_for_inputs(context.inputs_ready, None)
        try:
            refuse_strict(self.config.strict, name, fallback)
            result = function()
        except BaseException as error:
            self.timeline.failed(error)
            raise
        self.timeline.plain(fallback, name)
        return result


def growth_of(
    graphs: Iterable[CompiledGraph], wrappers: Iterable[CUDAGraphWrapper]
) -> list[tuple[str, int]]:
    """Return (batch, bytes) of the captures of all graphs that exist, in their order."""
    records = [
        graph.timeline.record_of(step.sequence) for graph in graphs for step in graph.recordings
    ]
    records += [one.timeline.record_of(entry.sequence) for one in wrappers for entry in one.entries]
    known = sorted((each for each in records if each is not None), key=lambda each: each.start)
    return [(f"{each.mode.name} {each.batch}", each.nbytes) for each in known]
