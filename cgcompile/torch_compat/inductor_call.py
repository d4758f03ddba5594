"""Call Inductor's function of a piece, without the wrappers of AOTAutograd around it.

The wrappers cost as much host time as a small kernel, for each piece of a step without a graph.
What they do with arguments and results (drop duplicates, unwrap subclasses, regenerate aliases) is
fixed at compile time, so one call shows whether they do anything: Inductor's function gets the very
objects that the artifact got, in order, and the artifact returns the very objects that the function
returned. Pieces that write an input, or whose results share memory with one, keep their wrappers.

The wrappers also switch grad mode and autocast off, and name the call for profilers: they run while
any of these is on. They report hidden aliases of custom ops at the first call, which goes through
them. They mark the dynamic dimensions of results for what Dynamo compiles later: as after a replay,
that is lost, and may cost one more compilation of a function that takes such a result.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch

from cgcompile.locks import new_lock
from cgcompile.torch_compat.structured_trace import is_profiling
from cgcompile.torch_compat.torch_ops import any_autocast, top_mode


class InductorCall:
    """Call an artifact of ``standalone_compile``, or Inductor's function where that is the same.

    Attributes:
        artifact: the same, with all wrappers.
        function: Inductor's function, which takes a list and clears it; None while this is unknown,
            and where the wrappers are needed.
    """

    def __init__(self, artifact: Callable[..., Any]) -> None:
        self.artifact = artifact
        self.function: Callable[[list[Any]], Sequence[Any]] | None = None
        self._known = False
        self._lock = new_lock(watch=False)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if torch.is_grad_enabled() or any_autocast() or is_profiling():
            return self.artifact(*inputs)
        if self.function is not None:
            return self.function(list(inputs))
        if not self._known and top_mode() is None and self._lock.acquire(blocking=False):
            try:
                if not self._known:
                    return self._compare(inputs)
            finally:
                self._lock.release()
        return self.artifact(*inputs)

    def _compare(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Call the artifact, and note whether its wrappers change anything."""
        graph = compiled_graph(self.artifact)
        if graph is None or _writes_inputs(graph):
            self._known = True
            return self.artifact(*inputs)
        function, thread, calls = graph.current_callable, get_ident(), []

        def noted(args: list[Any]) -> Sequence[Any]:
            if get_ident() != thread:
                return function(args)
            taken, before = list(args), _modes()
            returned: Sequence[Any] = function(args)
            calls.append((taken, list(returned), before, _modes()))
            return returned

        graph.current_callable = noted
        before = _modes()
        try:
            results: Sequence[Any] = self.artifact(*inputs)
        finally:
            graph.current_callable = function
        if len(calls) == 1 and isinstance(results, (list, tuple)):
            taken, outputs, *states = calls[0]
            same = _same(taken, inputs) and _same(outputs, results)
            same = same and states == [before, _modes()]
            if same and not _memory(taken) & _memory(outputs):
                self.function = function
        self._known = True
        return results


def _same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(values, others, strict=False)
    return len(values) == len(others) and all(
        one is other or (type(one) is int and type(other) is int and one == other)
        for one, other in pairs
    )


def _modes() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any_autocast()


def _memory(values: Sequence[Any]) -> set[int]:
    """Return where the memory of tensors begins; of a tensor without a storage, its id."""
    starts = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            try:
                starts.add(value.untyped_storage().data_ptr())
            except (NotImplementedError, RuntimeError):
                starts.add(id(value))
    return starts - {0}


def _writes_inputs(graph: Any) -> bool:
    """Return whether a function writes inputs; True if this torch has no record of it."""
    lists = [getattr(graph, name, None) for name in ("mutated_inputs", "mutated_input_idxs")]
    return any(written is None or len(written) > 0 for written in lists)


# ---------------------------------------------------------------- where an artifact keeps it


def compiled_graph(artifact: Any) -> Any:
    """Return the ``CompiledFxGraph`` that an artifact calls; None unless there is exactly one."""
    reached: dict[int, Any] = {}  # objects that a call may run, about twenty
    waiting = [artifact]
    while waiting and len(reached) < _MOST:
        value = waiting.pop()
        is_end = isinstance(value, (type, torch.nn.Module, torch.Tensor))
        if callable(value) and not is_end and id(value) not in reached:
            reached[id(value)] = value
            waiting.extend(_held(value))
    graphs = [value for value in reached.values() if type(value).__name__ == "CompiledFxGraph"]
    return graphs[0] if len(graphs) == 1 and graphs[0].current_callable is not None else None


_MOST = 1000


def _held(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from (getattr(function, name, None) for name in ("__self__", "__func__"))
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args)
    yield from getattr(function, "__dict__", {}).values()
