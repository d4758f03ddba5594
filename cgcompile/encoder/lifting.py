"""Separate what an encoder computes on the host from what a graph records: :func:`run_lifted`.

Many towers compute positions and offsets from a grid, in Python, with values that are read on the
host; no graph can hold that. A *host value* is a tensor that comes from host inputs and numbers
alone, without weights or rows. It is *lifted*: where it enters a module, or an op with other
tensors, a buffer takes its place. Host ops run once, in a :class:`HostTrace`; a run that is given
one takes their results from it, and runs the ops of the device alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgcompile import torch_compat as compat
from cgcompile.errors import EncoderError
from cgcompile.graphs.guards import modules_of
from cgcompile.graphs.host import host_values

_READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy")
_COMPARED = (bool, int, float, complex, str, torch.dtype)

Call = tuple[str, tuple[Any, ...]]
"""Where a module or an op of the device is called, and its arguments that are no tensors."""


@dataclass
class HostTrace:
    """What one run computed on the host, and what it called on the device."""

    inputs: dict[str, Any]  # the host inputs, by name
    results: list[tuple[str, Any]] = field(default_factory=list)  # of host ops, in order
    values: list[torch.Tensor] = field(default_factory=list)  # lifted ones, copies on the CPU
    names: list[str] = field(default_factory=list)  # of the values
    calls: list[Call] = field(default_factory=list)
    entries: set[int] = field(default_factory=set)  # indices of calls that are of modules
    moved: dict[int, torch.Tensor] = field(default_factory=dict)  # by id of a host value
    last: int = 0  # index of the call that took the last value


class _Stopped(Exception):
    """All that was needed of a run is known."""


def run_lifted(
    tower: Callable[..., Any],
    named: Mapping[str, Any],
    trace: HostTrace,
    device: torch.device,
    *,
    lifts: bool = True,
    buffers: Sequence[torch.Tensor] | None = None,
    bounds: Mapping[tuple[int, int], int] | None = None,
    stop: int | None = None,
) -> Any:
    """Run a tower; fill an empty trace, or take the results of host ops from a filled one.

    ``buffers`` replace lifted values, in order, and ``bounds`` numbers that modules get, by index
    of the call and of the argument. Without ``lifts`` host values are constants. The run ends behind
    the call of index ``stop``, without a result.
    """
    run = _Run(trace, device, lifts, buffers, bounds or {}, stop)
    with ExitStack() as hooks:
        for module in modules_of(tower):
            for name, child in module.named_modules():
                if child is not module:  # what the tower itself does is not inside of a module
                    enter = partial(run.enter, name)
                    handle = child.register_forward_pre_hook(enter, with_kwargs=True)
                    hooks.callback(handle.remove)
                    leave = child.register_forward_hook(run.leave, always_call=True)
                    hooks.callback(leave.remove)
        with host_values(run.hosts), suppress(_Stopped), run:
            return tower(**named, **trace.inputs)


class _Run(TorchFunctionMode):
    """One run of a tower."""

    def __init__(
        self,
        trace: HostTrace,
        device: torch.device,
        lifts: bool,
        buffers: Sequence[torch.Tensor] | None,
        bounds: Mapping[tuple[int, int], int],
        stop: int | None,
    ) -> None:
        super().__init__()
        self._trace, self._device, self._lifts = trace, device, lifts
        self._buffers, self._bounds, self._stop = buffers, bounds, stop
        self._replays, self._next = bool(trace.results or trace.calls), 0
        # Strong references, so that no other tensor gets the id of a host value.
        self.hosts = {id(leaf): leaf for leaf in compat.tree_tensors(trace.inputs)}
        self._raw = {id(value) for value in trace.inputs.values()}
        self._lifted: dict[int, torch.Tensor] = {}
        self._called = 0
        self._modules: list[tuple[str, bool]] = [("", False)]  # name; on the device
        self._hooking = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._hooking:
            return func(*args, **kwargs)
        tensors = compat.tree_tensors((args, kwargs))
        name, inside = getattr(func, "__name__", type(func).__name__), self._modules[-1][1]
        if all(map(self._is_host, tensors)):
            if not inside or (tensors and not self._lifts):
                return self._host_op(name, partial(func, *args, **kwargs))
        where = f"{self._modules[-1][0]}.{name}".lstrip(".")
        if name in _READS:
            found = [list(tensor.shape) for tensor in tensors]
            raise EncoderError.derive_read(where=where, found=found[0])
        args, kwargs = compat.tree_map(partial(self._on_device, where), (args, kwargs))
        self._count(where, (args, kwargs))
        return func(*args, **kwargs)

    def _is_host(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and id(leaf) in self.hosts

    def _host_op(self, name: str, run: Callable[[], Any]) -> Any:
        if not self._replays:
            result = run()
            self._trace.results.append((name, result))
        else:
            known = self._trace.results[self._next : self._next + 1]
            if not known or known[0][0] != name:
                raise EncoderError.derive_order(
                    found=name, expected=known[0][0] if known else "no further op"
                )
            result = known[0][1]
            self._next += 1
        for tensor in compat.tree_tensors(result):
            self.hosts[id(tensor)] = tensor
        return result

    def _on_device(self, where: str, leaf: Any) -> Any:
        """Return what takes the place of a host value on the device."""
        if isinstance(leaf, slice):  # as indices host values are numbers
            ends = leaf.start, leaf.stop, leaf.step
            read = [self._host_op("__index__", end.__index__) if self._is_host(end) else end for end in ends]
            return slice(*read)
        if not self._is_host(leaf):
            return leaf
        if id(leaf) not in self._lifted:
            number = len(self._lifted)
            if self._buffers is not None:
                if number >= len(self._buffers):
                    raise EncoderError.derive_order(found=where, expected="no further value")
                self._lifted[id(leaf)] = self._buffers[number]
            elif self._replays:
                self._lifted[id(leaf)] = self._trace.moved[id(leaf)]
            else:
                self._lifted[id(leaf)] = leaf.detach().to(self._device, copy=True)
                self._trace.moved[id(leaf)] = self._lifted[id(leaf)]
            if not self._replays:
                self._trace.values.append(leaf.detach().to("cpu", copy=True))
                self._trace.names.append(where)
                self._trace.last = self._called
        return self._lifted[id(leaf)]

    def _count(self, where: str, arguments: Any) -> None:
        """Note a call on the device."""
        if not self._replays:
            leaves = compat.tree_leaves(arguments)
            self._trace.calls.append((where, tuple(map(_comparable, leaves))))
        self._called += 1
        if self._stop is not None and self._called > self._stop:
            raise _Stopped

    def enter(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Lift the host values that a module gets, unless it gets host inputs, which it may read."""
        inside = self._modules[-1][1]
        takes_inputs = any(id(value) in self._raw for value in (*args, *kwargs.values()))
        self._modules.append((name, inside or not takes_inputs))
        if takes_inputs or not self._lifts:
            return None
        self._hooking = True
        try:
            names = {id(value): key for key, value in kwargs.items()}
            index = iter(range(len(compat.tree_leaves((args, kwargs)))))

            def replaced(leaf: Any) -> Any:
                bound = self._bounds.get((self._called, next(index)))
                where = names.get(id(leaf), f"input of {name}")
                return self._on_device(where, leaf) if bound is None else bound

            changed = compat.tree_map(replaced, (args, kwargs))
            if not self._replays:
                self._trace.entries.add(self._called)
            self._count(name, changed)
        finally:
            self._hooking = False
        return changed

    def leave(self, *_: Any) -> None:
        """Note the end of a module."""
        self._modules.pop()


def _comparable(leaf: Any) -> Any:
    """Return a number or name as it is, of others what can be compared."""
    if isinstance(leaf, _COMPARED) or leaf is None:
        return leaf if leaf == leaf else "nan"
    return repr(leaf) if isinstance(leaf, slice) else type(leaf).__name__
