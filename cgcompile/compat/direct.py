"""Inductor's own function in a compiled piece, and how to call it alone.

What ``standalone_compile`` returns calls Inductor's function through some thirty Python calls of
AOTAutograd and Inductor. :class:`Direct` leaves them out where they do nothing for this piece. See
``cgcompile/compat/__init__.py``.

Note [Why that is the same]
AOTAutograd fixes at compile time what its wrappers do with the arguments and results of a graph:
drop doubled ones, unwrap subclasses, add random state or tokens, make aliases again. So whether
they do anything shows at one call: Inductor's function is given the very objects that the artifact
was given, in the same order, and the artifact returns the very objects that the function returned.
Nothing of this depends on the values. One thing might pass unseen: a result that is, or may share
memory with, an argument, because the code around may copy an argument that lies at an unaligned
address. Such pieces keep the wrappers, and so do those that write an argument (autograd is told
there) and those that leave a mode of the thread other than the function does.

What the wrappers do besides, and why it may be left out:

* they switch grad mode off where it is on, and autocast where the piece was compiled under it; and
  they name the call for profilers: so they are kept while any of these is on. One look for each
  piece, not for each step, because a step may switch grad mode between its pieces;
* at the first call they look for aliases that custom ops hide and end the autotuning cache of the
  piece: the first call is made through them, always;
* they report times of autotuning that were gathered meanwhile: the next call of any other compiled
  code does that, or nobody asks;
* they note on results which dimensions change, for what Dynamo may compile after them. No replay
  does that either; it saves Dynamo a recompilation, once, and a first call still does it;
* they record the order of graphs for torch's own debugging (``torch._inductor.debug``): lost.

What is called alone is still ``current_callable``: it realigns arguments, and makes the piece one
call for dispatch modes, both at run time.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

from cgcompile.compat.modes import any_autocast, top_mode
from cgcompile.compat.traces import is_profiling


class Direct:
    """What Inductor made of a piece, called without torch's wrappers once they are seen to do
    nothing.

    A call returns what the artifact would, as a list or tuple. The first call goes through the
    artifact.

    Args:
        artifact: what ``standalone_compile`` returned.

    Attributes:
        artifact: the same.
        alone: Inductor's function, which takes a list and clears it; None while nothing is known,
            and where the wrappers are needed.
    """

    def __init__(self, artifact: Callable[..., Any]) -> None:
        self.artifact = artifact
        self.alone: Callable[[list[Any]], Sequence[Any]] | None = None
        self._open = True  # whether the next call may find out
        self._looking = threading.Lock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if torch.is_grad_enabled() or any_autocast() or is_profiling():
            return self._wrapped(inputs)
        if self.alone is not None:
            return self.alone(list(inputs))
        if self._open and top_mode() is None and self._looking.acquire(blocking=False):
            try:
                return self._find_out(inputs)
            finally:
                self._looking.release()
        return self._wrapped(inputs)

    def _wrapped(self, inputs: tuple[Any, ...]) -> Sequence[Any]:
        made: Sequence[Any] = self.artifact(*inputs)
        return made

    def _find_out(self, inputs: tuple[Any, ...]) -> Sequence[Any]:
        if not self._open:  # another thread has
            return self._wrapped(inputs)
        graph = inductor_graph(self.artifact)
        if graph is None or _writes(graph):
            self._open = False
            return self._wrapped(inputs)
        function = graph.current_callable
        witness = _Witness(function)
        graph.current_callable = witness  # the object is ours alone, and for this call
        before = _state(inputs)
        try:
            made = self._wrapped(inputs)
        finally:
            graph.current_callable = function
        if witness.agrees(before, inputs, made, _state(inputs)):
            self.alone = function
        self._open = False
        return made


class _Witness:
    """Inductor's function, remembering what one thread gave it and got."""

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._function = function
        self._thread = threading.get_ident()
        self._calls: list[tuple[list[Any], Any, list[Any], Any]] = []

    def __call__(self, given: list[Any]) -> Sequence[Any]:
        if threading.get_ident() != self._thread:
            return self._function(given)
        seen = list(given)
        before = _state(seen)
        made = self._function(given)
        self._calls.append((seen, before, list(made), _state(seen)))
        return made

    def agrees(self, before: Any, inputs: Sequence[Any], made: Any, after: Any) -> bool:
        """Whether the wrappers did nothing. See Note [Why that is the same].

        Args:
            before: the state of the thread before the artifact was called.
            inputs: what it was given.
            made: what it returned.
            after: the state after that.
        """
        if len(self._calls) != 1:
            return False
        seen, entered, returned, left = self._calls[0]
        return (
            _same(seen, inputs)
            and isinstance(made, (list, tuple))
            and _same(returned, made)
            and (entered, left) == (before, after)
            and not _memory(seen) & _memory(returned)
        )


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(_is, some, others))


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is int and type(other) is int and one == other)


def _state(values: Sequence[Any]) -> Any:
    """What wrappers may change around a function: modes of this thread, counts of writes."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), any_autocast()
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return modes, [None if each.is_inference() else each._version for each in tensors]


def _memory(values: Sequence[Any]) -> set[int]:
    """Where the storages of tensors begin; of each tensor that is not plain, the tensor itself."""
    found = set()
    for each in values:
        if isinstance(each, torch.Tensor):
            try:
                found.add(each.untyped_storage().data_ptr())
            except (NotImplementedError, RuntimeError):  # it has no storage
                found.add(id(each))
    return found - {0}


def _writes(graph: Any) -> bool:
    """Whether a function writes arguments; so where this torch does not tell."""
    told = [getattr(graph, name, None) for name in ("mutated_inputs", "mutated_input_idxs")]
    return any(each is None or len(each) > 0 for each in told)


# ---------------------------------------------------------------- in the depth of an artifact


def inductor_graph(artifact: Any) -> Any:
    """The ``CompiledFxGraph`` that an artifact calls; None unless there is exactly one."""
    from torch._inductor.output_code import CompiledFxGraph

    found = [
        each
        for each in _callables(artifact)
        if isinstance(each, CompiledFxGraph) and each.current_callable is not None
    ]
    return found[0] if len(found) == 1 else None


def _callables(start: Any) -> Iterator[Any]:
    """What may run when something is called: itself and, through closures and attributes, more."""
    waiting, seen = [start], {id(start): start}
    while waiting and len(seen) < _MOST:
        found = waiting.pop()
        yield found
        for each in _held(found):
            if id(each) not in seen and callable(each) and not isinstance(each, _ENDS):
                seen[id(each)] = each
                waiting.append(each)


_MOST = 1000  # some twenty are met
_ENDS = (type, torch.nn.Module, torch.Tensor)


def _held(found: Any) -> Iterator[Any]:
    if isinstance(found, MethodType):
        yield from (found.__self__, found.__func__)
        return
    if isinstance(found, functools.partial):
        yield from (found.func, *found.args)
        return
    if isinstance(found, FunctionType):
        for cell in found.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
    yield from getattr(found, "__dict__", {}).values()
