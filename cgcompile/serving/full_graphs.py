"""The FULL graphs of one manager: :class:`FullGraphs` records, finds and guards them.

A step is a call of the step table, :class:`FullCall`. It differs from that of a wrapper in this:
its arguments are the buffers of the manager, which are not compared; the forward context is entered
where there is no replay, because a graph does not read it; a result is cut to the real rows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from cgcompile.compile import CompiledModel
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import ForwardContext
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.contract import Contract
from cgcompile.graphs.guards import Weights
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.reads import Transparent
from cgcompile.graphs.results import StaleResults, track_result
from cgcompile.graphs.steps import INSIDE_CAPTURE
from cgcompile.graphs.wrapper import CUDAGraphEntry, ManagedCall, ManagedStep, gradients_due
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.serving.batch import GraphHooks
from cgcompile.serving.buffers import Outputs
from cgcompile.serving.dispatcher import CudagraphDispatcher, check_numbers

FULL = CUDAGraphMode.FULL
Sizes = tuple[int, int]  # tokens, requests
Epilogue = Callable[[Any, dict[str, Any]], Any]  # what the model returned, buffers -> the result
REMEDY = "release(), capture()"  # of a manager whose weights were replaced


class FullCall(ManagedCall):
    """A step on a FULL graph, or under the forward context that it enters itself."""

    __slots__ = ("in_context", "padded", "real")

    padded: Sizes
    real: Sizes
    in_context: Callable[["FullCall"], AbstractContextManager[ForwardContext | None]]

    def record(self) -> tuple[CUDAGraphEntry, Any]:
        with self.in_context(self) as context:
            recorded = super().record()
        self.ran_plain = None if context is None else context.ran_plain
        return recorded

    def plain(self, why: Fallback) -> Any:
        with self.in_context(self):
            return super().plain(why)


class FilledCall(FullCall):
    """A replay on what the buffers hold; without a graph it is an error."""

    __slots__ = ()

    def enter(self) -> None:
        if inside_capture():
            raise RunPlain(INSIDE_CAPTURE)

    def check_due(self) -> None:
        raise RunPlain(Fallback(Reason.NOT_CAPTURED, "no captured step is equal to this one"))

    def plain(self, why: Fallback) -> Any:
        raise ManagerError.no_replay(batch=str(self.descriptor), why=why)


def _before_capture(hooks: Sequence[GraphHooks]) -> None:
    for hook in hooks:
        hook.before_full_capture()


class FullGraphs:
    """Graphs of whole steps: model, epilogue, joins of hooks, the copy of results to outputs."""

    def __init__(
        self,
        model: Callable[..., Any],
        epilogue: Epilogue | None,
        dispatcher: CudagraphDispatcher,
        outputs: Outputs,
        hooks: Sequence[GraphHooks],
        pool: GraphPool | None,
        config: CompilationConfig,
        weights_on: str | None,
    ) -> None:
        self.outputs = outputs
        self.sizes = (0, 0)  # (tokens, requests) of the step that runs, padded
        self.buffers: dict[str, Any] = {}  # all that the step has staged, padded
        self._model, self._epilogue = model, epilogue
        self._dispatcher = dispatcher
        self._hooks = hooks
        self._config = config
        self._weights_on = weights_on  # the device type of guarded weights; None: not guarded
        read: Any = model  # what the contract of a graph compares
        if epilogue is not None:
            read = (model.unwrap() if isinstance(model, Transparent) else model, epilogue)
        whole = ManagedStep(read, self._record, hooks)
        self.wrapper = BreakableCUDAGraphWrapper(whole, config, FULL, pool=pool, name="step")
        self.wrapper.before_capture = partial(_before_capture, hooks)
        self.wrapper.remedy = REMEDY
        self._by_size: dict[int, list[BatchDescriptor]] = {}
        self._bound: Contract | None = None  # of what a model without guards has bound
        self._stale = StaleResults()

    def _record(self, **arguments: Any) -> Any:
        """Run what a FULL graph records."""
        result = self._model(**arguments)
        if self._epilogue is not None:
            result = self._epilogue(result, self.buffers)
        for hook in self._hooks:
            hook.end_of_capture()
        if gradients_due(False, (result,), {}):  # runs plain then, and must stay differentiable
            return result
        return self.outputs.keep(result, self.sizes)

    def finished(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a callable, and the epilogue on what that returns."""
        epilogue = self._epilogue
        if epilogue is None:
            return run
        return lambda **arguments: epilogue(run(**arguments), self.buffers)

    def run(self, call: FullCall) -> Any:
        """Run a step on its graph, capture that, or run it plain; return the real rows."""
        padded = self.sizes = call.padded
        result = self.wrapper.step_table.run(call)
        cut = self.outputs.replayed if call.ran_plain is None else self.outputs.real
        return cut(result, padded, call.real)

    def guard_bound(self) -> None:
        """Guard the weights that the traces of a model without guards have bound."""
        if self._weights_on is not None and isinstance(self._model, CompiledModel):
            frozen = [tensor for trace in self._model.traces for _, tensor in trace.frozen]
            only = frozenset(map(id, frozen))
            weights = Weights(self._model.unwrap(), self._weights_on, only)
            self._bound = weights.contract(REMEDY) if frozen else None

    def add(self, descriptor: BatchDescriptor) -> None:
        """Note a captured graph."""
        same_size = self._by_size.setdefault(descriptor.num_tokens, [])
        if descriptor not in same_size:
            same_size.append(descriptor)
            same_size.sort(key=lambda key: not key.uniform)

    def find(
        self, num_tokens: int, uniform: bool | None, loras: int, extra: tuple[Any, ...]
    ) -> BatchDescriptor:
        """Return the graph of a padded size and variant; of several the one for uniform decode."""
        if not (type(num_tokens) is type(loras) is int and type(uniform) in (bool, type(None))):
            check_numbers(num_tokens, None, None, loras, uniform is not None and uniform)
        for key in self._by_size.get(num_tokens, ()):
            same = (key.num_active_loras, key.extra) == (loras, extra)
            same &= uniform in (None, key.uniform)
            if same and self._dispatcher.is_captured(FULL, key):
                return key
        usable = {
            size
            for size, keys in self._by_size.items()
            for key in keys
            if self._dispatcher.is_captured(FULL, key)
        }
        raise ManagerError.no_graph(num_tokens=num_tokens, captured=sorted(usable))

    def check_bound(self, descriptor: BatchDescriptor) -> None:
        """Raise GuardError if a weight that traces have bound differs, for a step in pieces."""
        # Pieces check other weights themselves, and FULL graphs all of them.
        if self._bound is not None:
            self._bound.check("the traced step", descriptor)

    def check_before(self, descriptor: BatchDescriptor) -> None:
        """Raise GuardError where a replay would, before other ranks wait for it."""
        entry = self.wrapper.entry_of(FULL, descriptor)
        if not descriptor.num_tokens:  # of an idle rank, which runs the graph of the others
            entry = next(iter(self.wrapper.entries), None)
        if entry is not None and entry.state is not None:
            entry.state.check(self.wrapper.name, descriptor)

    def expire_results(self, mode: CUDAGraphMode) -> None:
        """Make reads of earlier results visible from now on: as NaN, or as an error."""
        if "stale" in self._config.debug:
            self._stale.expire(None)
        if "poison" in self._config.debug and mode is FULL:
            self.outputs.poison()

    def track(self, result: Any, descriptor: BatchDescriptor) -> Any:
        """Return a result that raises once it is stale."""
        what = f"the manager's step, {descriptor}"
        track = partial(self._stale.track, owns=self.outputs.owns, owner=None, what=what)
        return track_result(result, track)

    def release(self) -> None:
        """Drop the graphs and the output buffers."""
        self.wrapper.clear_all_graphs()
        self.outputs.release()
        self._stale.release()

    def drop(self) -> None:
        """Drop what is known of graphs that were added, and of the weights of traces."""
        self._bound = None
        self._by_size.clear()
