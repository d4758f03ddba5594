"""Separate what an encoder computes on the host from what a graph records: :class:`LiftedRun`.

Many towers compute positions and offsets from a grid, in Python, with values that are read on the
host; no graph can hold that. A *host value* is a tensor that comes from host inputs and numbers
alone, without weights or rows. It is *lifted*: where it enters a module, or an op with other
tensors, a buffer takes its place. Host ops run once, into a :class:`HostTrace`; a run on a filled
trace takes their results from it, and runs the ops of the device alone. The rule: the tower itself
may read host values, its modules only host inputs that they are given.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgcompile.encoder.errors import EncoderError
from cgcompile.graphs.host_rules import host_values
from cgcompile.graphs.reads import modules_of
from cgcompile.torch_compat import torch_ops

_READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy")
_COMPARED = (bool, int, float, complex, str, torch.dtype, type(None))

Site = tuple[int, int]
"""An argument of a call on the device: the index of the call, and of the argument."""


Call = tuple[str, tuple[Any, ...]]
"""The name of a module or op, and its arguments: numbers, which host value, or the type."""


@dataclass
class HostTrace:
    """The host values and the device calls of one run."""

    inputs: dict[str, Any]  # the host inputs, by name
    results: list[tuple[str, Any]] = field(default_factory=list)  # results of host ops, in order
    values: list[torch.Tensor] = field(default_factory=list)  # lifted values, on the CPU
    names: list[str] = field(default_factory=list)  # names of ``values``
    calls: list[Call] = field(default_factory=list)  # on the device, by the tower itself
    inner: list[Call] = field(default_factory=list)  # calls of modules
    leaks: bool = False  # host values enter ops inside of modules
    modules: set[int] = field(default_factory=set)  # indices of calls
    moved: dict[int, torch.Tensor] = field(default_factory=dict)  # id(host value) -> copy


class LiftedRun(TorchFunctionMode):
    """One run of a tower, which fills an empty trace, or takes host results from a filled one.

    ``buffers`` replace lifted values, in order, and ``bounds`` numbers that modules get. Calls
    inside of modules pass unseen unless ``deep``. Without ``lifts`` host values are constants.
    """

    def __init__(
        self,
        trace: HostTrace,
        device: torch.device,
        *,
        lifts: bool = True,
        buffers: Sequence[torch.Tensor] | None = None,
        bounds: Mapping[Site, int] | None = None,
        deep: bool = True,
    ) -> None:
        super().__init__()
        self._trace, self._device, self._lifts, self._deep = trace, device, lifts, deep
        self._buffers, self._bounds = buffers, bounds or {}
        self._filled = bool(trace.results or trace.calls)
        # Strong references, so that no other tensor gets the id of a host value.
        self._hosts = {id(leaf): leaf for leaf in torch_ops.tree_tensors(trace.inputs)}
        self._inputs = {id(value) for value in trace.inputs.values()}
        self._lifted: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, str] = {}  # which host value it is, by id of a buffer
        self._ops = self._calls = 0  # of this run so far
        self._modules = [("", False)]  # those that run now: name, and whether on the device
        self._hooking = self._off = False  # in a hook of ours; inside of a module, unless deep
        self._thread = get_ident()  # others may call the tower meanwhile

    def of(self, tower: Callable[..., Any], named: Mapping[str, Any]) -> Any:
        """Return the result of the tower."""
        with ExitStack() as hooks:
            for module in modules_of(tower):
                for name, child in module.named_modules():
                    if child is not module:
                        enter, leave = partial(self._enter, name), self._leave
                        before = child.register_forward_pre_hook(enter, with_kwargs=True)
                        hooks.callback(before.remove)
                        behind = child.register_forward_hook(leave, always_call=True)
                        hooks.callback(behind.remove)
            with host_values(self._hosts), self:
                return tower(**named, **self._trace.inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", type(func).__name__)
        if self._off or self._hooking or (name == "__get__" and id(args[0]) not in self._hosts):
            return func(*args, **kwargs)
        leaves = torch_ops.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        hosts = [tensor for tensor in tensors if id(tensor) in self._hosts]
        module, inside = self._modules[-1]
        if len(hosts) == len(tensors) and (not inside or (hosts and not self._lifts)):
            return self._host_op(name, partial(func, *args, **kwargs))
        where = f"{module}.{name}" if module else name
        if name in _READS:
            raise EncoderError.derive_read(where=where, found=list(tensors[0].shape))
        if hosts or slice in map(type, leaves):
            args, kwargs = torch_ops.tree_map(partial(self._on_device, where), (args, kwargs))
            leaves = torch_ops.tree_leaves((args, kwargs))
        self._called(where, leaves)
        return func(*args, **kwargs)

    def _is_host(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and id(leaf) in self._hosts

    def _host_op(self, name: str, run: Callable[[], Any]) -> Any:
        if self._filled:
            known, result = (*self._trace.results, ("no further op", None))[self._ops]
            if known != name:
                raise EncoderError.derive_order(found=name, expected=known)
        else:
            result = run()
            self._trace.results.append((name, result))
        self._ops += 1
        for tensor in torch_ops.tree_tensors(result):
            self._hosts[id(tensor)] = tensor
        return result

    def _on_device(self, where: str, leaf: Any) -> Any:
        """Return the device value that replaces a host value."""
        if isinstance(leaf, slice):  # as indices host values are numbers
            ends = (leaf.start, leaf.stop, leaf.step)
            return slice(
                *[self._host_op("int", partial(int, e)) if self._is_host(e) else e for e in ends]
            )
        if not self._is_host(leaf):
            return leaf
        if id(leaf) in self._lifted:
            return self._lifted[id(leaf)]
        number = len(self._lifted)
        if not self._filled:
            self._trace.values.append(leaf.detach().to("cpu", copy=True))
            self._trace.names.append(where)
            self._trace.leaks |= self._modules[-1][1] and not self._hooking
        if self._buffers is not None:
            if number >= len(self._buffers):
                raise EncoderError.derive_order(found=where, expected="no further host value")
            tensor = self._buffers[number]
        elif self._filled:
            tensor = self._trace.moved[id(leaf)]
        else:
            tensor = self._trace.moved[id(leaf)] = leaf.detach().to(self._device, copy=True)
        self._lifted[id(leaf)] = tensor
        self._numbers[id(tensor)] = f"host value {number}"
        return tensor

    def _called(self, where: str, leaves: Sequence[Any]) -> None:
        """Note a call on the device."""
        inside = self._modules[-1][1] and not self._hooking
        if not self._filled:
            calls = self._trace.inner if inside else self._trace.calls
            calls.append((where, tuple(map(self._comparable, leaves))))
        self._calls += not inside

    def _enter(self, name: str, module: Any, args: Any, kwargs: Any = None) -> Any:
        """Lift the host values that a module gets, unless it gets host inputs, to read them."""
        if get_ident() != self._thread:  # torch leaves out kwargs once the hook is removed
            return None
        inside = self._modules[-1][1]
        reads = not inside and any(id(value) in self._inputs for value in (*args, *kwargs.values()))
        self._modules.append((name, not reads))
        if inside or reads or not self._lifts:
            return None
        names = {id(value): key for key, value in kwargs.items()}
        index = iter(range(len(torch_ops.tree_leaves((args, kwargs)))))

        def replaced(leaf: Any) -> Any:
            bound = self._bounds.get((self._calls, next(index)))
            where = names.get(id(leaf), f"input of {name}")
            return self._on_device(where, leaf) if bound is None else bound

        self._hooking = True
        try:
            arguments = torch_ops.tree_map(replaced, (args, kwargs))
            if not self._filled:
                self._trace.modules.add(self._calls)
            self._called(name, torch_ops.tree_leaves(arguments))
        finally:
            self._hooking = False
        # The mode stays on the stack, where modes of the tower may be above it.
        self._off = not self._deep
        return arguments

    def _leave(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self._modules.pop()
            self._off = self._off and self._modules[-1][1]

    def _comparable(self, leaf: Any) -> Any:
        """Return a comparable form of a value: numbers and names are their own."""
        if isinstance(leaf, _COMPARED) and leaf == leaf:  # not NaN
            return leaf
        if isinstance(leaf, (slice, float)):
            return repr(leaf)
        return self._numbers.get(id(leaf)) or type(leaf).__name__
