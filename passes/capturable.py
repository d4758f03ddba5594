"""Decide whether a CUDA graph can hold a node, or why not: :meth:`Capturability.why_not`.

A replay repeats kernels, without the host. So a node cannot be captured if the host must read what
the device computes, if it runs on the CPU or on another device, or if it copies through pageable
memory. What this predicate misses fails at the first capture.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.boundaries import Boundaries, SplittingOp, in_eager_region, target_name
from cgcompile.passes.base import alike, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    changes_layout,
    is_cpu_scalar,
    is_symbolic_number,
    launches_kernel,
    on_device,
    short_name,
    subgraphs,
    symbols_of,
    tensors,
    value,
    written,
)
from cgcompile.passes.regions import nodes_in_regions
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import dynamo, torch_ops

_BRANCHES_ON_THE_HOST = {"cond", "while_loop"}
_COPIES = {"to", "cuda", "cpu", "copy_", "setitem", "_to_copy", "type_as", "type"}
_FROM_PYTHON = {"tensor", "as_tensor", "asarray", "from_numpy", "new_tensor"}
_CHECKS_ON_THE_HOST = {"equal", "allclose", "is_nonzero", "tolist", "numpy"}
_COLLECTIVE_NAMESPACES = ("_c10d_functional", "c10d", "c10d_functional")
_CAPTURABLE_COLLECTIVES = {"nccl", "rccl", "fake"}


class Capturability:
    """Decides which nodes of one graph a CUDA graph can hold; nodes need fake values."""

    def __init__(
        self, gm: fx.GraphModule, boundaries: Boundaries, outer: Set[sympy.Symbol] = frozenset()
    ) -> None:  # outer: the symbols of the enclosing graph, for the body of an op
        self._gm = gm
        self._boundaries = boundaries
        self._bound = outer | bound_symbols(gm).keys()
        self.device = graph_device(gm)
        self.matched: dict[fx.Node, SplittingOp] = {}  # nodes visited so far

    def why_not(self, node: fx.Node) -> Fallback | None:
        """Return why ``node`` cannot be captured, or None if it can."""
        return (
            self._registered(node)
            or self._list_of_inputs(node)
            or self._unbacked(node)
            or self._host(node)
            or self._collective(node)
            or self._body(node)
            or self._device(node)
        )

    def _registered(self, node: fx.Node) -> Fallback | None:
        boundary = self._boundaries.match(node)
        if boundary is not None:
            self.matched[node] = boundary
            return Fallback(Reason.SPLITTING_OP, f"{boundary.name} [{boundary.support.name}]")
        if in_eager_region(node):
            return Fallback(Reason.EAGER_REGION, "cgcompile.eager_region()")
        return None

    @staticmethod
    def _list_of_inputs(node: fx.Node) -> Fallback | None:
        """Refuse a node that reads a list input: compilers of pieces take only tensors."""
        for argument in node.all_input_nodes:
            held = value(argument)
            if argument.op == "placeholder" and torch_ops.is_container(held):
                detail = f"{argument.name} is a {type(held).__name__}"
                return Fallback(Reason.UNSUPPORTED_INPUT, detail)
        return None

    def _unbacked(self, node: fx.Node) -> Fallback | None:
        """Refuse symbols that no input of the graph gives: they stand for data."""
        of_inputs = symbols_of(list(map(value, node.all_input_nodes))) - self._bound
        if symbols_of(value(node)) - self._bound - of_inputs:
            name = target_name(node.target)
            return Fallback(Reason.HOST_SYNC, f"the size or value of {name} depends on data")
        if of_inputs:
            return Fallback(Reason.UNBACKED_SIZE, "works on a size or number that depends on data")
        return None

    def _host(self, node: fx.Node) -> Fallback | None:
        name = short_name(node.target)
        if torch_ops.is_higher_order_op(node.target) and name in _BRANCHES_ON_THE_HOST:
            return Fallback(Reason.HOST_SYNC, f"torch.{name} picks its branch on the host")
        if name in _CHECKS_ON_THE_HOST and any(tensors(value(a)) for a in node.all_input_nodes):
            return Fallback(
                Reason.HOST_SYNC, f"{target_name(node.target)} reads a tensor on the host"
            )
        if torch_ops.kernel_reads(node.target, *fx.map_arg((node.args, node.kwargs), value)):
            detail = f"the CUDA kernel of {target_name(node.target)} reads values on the host"
            return Fallback(Reason.HOST_SYNC, detail)
        if self._assigns_by_mask(node):
            return Fallback(Reason.HOST_SYNC, "a masked assignment counts the mask on the host")
        return None

    @staticmethod
    def _assigns_by_mask(node: fx.Node) -> bool:
        """``x[mask] = values`` counts the mask first, unless it fills in one number."""
        by_method = short_name(node.target) in ("index_put", "index_put_") and len(node.args) > 2
        if node.target is not operator.setitem and not by_method:
            return False
        index, new = node.args[1], node.args[2]
        new = value(new) if isinstance(new, fx.Node) else new
        masks = [value(e) for e in torch_ops.tree_leaves(index) if isinstance(e, fx.Node)]
        is_mask = any(m.dtype in (torch.bool, torch.uint8) for m in tensors(masks))
        return is_mask and isinstance(new, torch.Tensor) and new.numel() != 1

    def _collective(self, node: fx.Node) -> Fallback | None:
        if _is_collective(node.target) and "wait" in short_name(node.target):
            source = node.args[0] if isinstance(node.args[0], fx.Node) else None
            return self._collective(source) if source is not None else None
        arguments = (*node.args, *node.kwargs.values())
        return why_no_collective(node.target, arguments, self.device.type)

    def _body(self, node: fx.Node) -> Fallback | None:
        """Refuse a higher-order op if a node in its body cannot be captured."""
        for body in subgraphs(self._gm, node):
            inside = Capturability(body, self._boundaries, self._bound)
            for inner in body.graph.nodes:
                fallback = inside.why_not(inner) if inner.op in COMPUTING else None
                if fallback is not None:
                    detail = f"inside {target_name(node.target)}: {fallback.detail}"
                    return Fallback(fallback.reason, detail)
        return None

    def _device(self, node: fx.Node) -> Fallback | None:
        if is_symbolic_number(value(node)):
            return None
        inputs = [t for a in node.all_input_nodes for t in tensors(value(a))]
        name, outputs = short_name(node.target), tensors(value(node))
        fills = name in _FROM_PYTHON and launches_kernel(self._gm, node)
        if self.device.type == "cpu":  # the recorder refuses copies from the host
            other = next((t for t in (*outputs, *inputs) if t.device.type == "meta"), None)
            if other is not None:
                return Fallback(
                    Reason.OTHER_DEVICE, f"{name} on {other.device}, graph on {self.device}"
                )
            copied = fills and not inputs and any(t.dim() and t.numel() for t in outputs)
            return Fallback(Reason.DEVICE_COPY, f"{name} copies Python data") if copied else None
        why = why_not_on(self.device, name, inputs, outputs, from_python=fills)
        return why or self._cpu_scalars(node)

    def _cpu_scalars(self, node: fx.Node) -> Fallback | None:
        """Return why a node cannot take its 0-dim CPU tensors on the device instead, or None."""
        # A kernel gets such a value as a launch argument, which would be baked in.
        scalars = {
            argument: on_device(value(argument), self.device, self._gm.graph)
            for argument in node.all_input_nodes
            if is_cpu_scalar(value(argument), self.device)
        }
        if not scalars or changes_layout(node) or node in self._in_regions:
            return None
        detail = f"{short_name(node.target)} takes a 0-dim tensor on the CPU only"
        why = Fallback(Reason.CPU_TENSOR, detail)
        if not scalars.keys().isdisjoint(written(self._gm, node)):
            return why
        try:
            with torch.no_grad(), dynamo.fake_context(scalars.values()):
                result = run_on_fakes(self._gm, node, scalars)
        except Exception:
            return why
        return None if value(node) is None or alike([result], [value(node)]) else why

    @cached_property
    def _in_regions(self) -> set[fx.Node]:
        return nodes_in_regions(self._gm)


def _is_collective(op: Any) -> bool:
    """Return whether an op is one of torch.distributed."""
    overloads = torch_ops.op_overloads(op)
    return bool(overloads) and overloads[0].namespace in _COLLECTIVE_NAMESPACES


def why_no_collective(op: Any, arguments: Iterable[Any], device_type: str) -> Fallback | None:
    """Return why a graph cannot hold a collective; None if it can, or if ``op`` is none."""
    if not _is_collective(op):
        return None
    # One of the arguments is the process group, with a backend for each type of device.
    backends = (torch_ops.process_group_backend(argument, device_type) for argument in arguments)
    backend = next((backend for backend in backends if backend is not None), None)
    if backend in _CAPTURABLE_COLLECTIVES:
        return None
    return Fallback(Reason.COLLECTIVE, f"{target_name(op)} over backend {backend or 'unknown'}")


def takes_python_data(name: str) -> bool:
    """Return whether a function of this name creates a tensor from Python data."""
    return name in _FROM_PYTHON


def why_not_on(
    device: torch.device,
    name: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    from_python: bool,
) -> Fallback | None:
    """Return why a graph on ``device``, not the CPU, cannot hold a call of ``name``, or None."""
    foreign = next((t for t in (*outputs, *inputs) if t.device not in (device, _CPU)), None)
    if foreign is not None:
        return Fallback(Reason.OTHER_DEVICE, f"{name} on {foreign.device}, graph on {device}")
    crosses = {t.device for t in inputs} == {_CPU} and any(t.device != _CPU for t in outputs)
    if any(t.device == _CPU for t in outputs):
        if any(t.device != _CPU for t in inputs):
            return Fallback(Reason.DEVICE_COPY, f"{name} copies from {device} to the CPU")
        return Fallback(Reason.CPU_TENSOR, f"{name} computes on the CPU")
    if from_python:
        return Fallback(Reason.DEVICE_COPY, f"{name} copies Python data to {device}")
    cpu = [t for t in inputs if t.device == _CPU]
    if cpu and (name in _COPIES or crosses):
        return Fallback(Reason.DEVICE_COPY, f"{name} copies from the CPU to {device}")
    # A captured piece reads a copy of a 0-dim CPU tensor; see :meth:`Capturability._cpu_scalars`.
    if any(t.dim() > 0 for t in cpu):
        return Fallback(Reason.CPU_TENSOR, f"{name} reads a CPU tensor")
    return None


_CPU = torch.device("cpu")


def graph_device(gm: fx.GraphModule) -> torch.device:
    """Return the device of most values of a graph; meta or CPU only if there is no other."""
    counts = Counter(t.device for node in gm.graph.nodes for t in tensors(value(node)))
    others = {device: n for device, n in counts.items() if device.type not in ("cpu", "meta")}
    if others:
        return max(others, key=others.__getitem__)
    meta = torch.device("meta")
    return meta if counts[meta] > 0 and counts[meta] >= counts[_CPU] else _CPU
