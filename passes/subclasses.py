"""Take tensor subclasses apart before a graph is split: :func:`unwrap_subclasses`.

A weight of torchao, or a DTensor, wraps plain tensors, and each op on it runs other ops on those.
Graphs bind plain memory. So each call in Dynamo's graph that reads or returns a subclass is
replaced by the ATen ops that it runs, and each input by the plain tensors inside of it. All other
calls stay as Dynamo traced them, so that boundaries are found as without subclasses.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cgcompile.passes.base import alike, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    bound_symbols,
    has_subclasses,
    nodes_in_regions,
    short_name,
    storages,
    symbols_of,
    tensors,
    value,
    written_storages,
)
from cgcompile.torch_compat import dynamo, expressions, raw_memory, torch_ops

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Input:
    """An input of the original graph, and the tensors that replace it in the new graph."""

    wrapper: raw_memory.Wrapper | None  # how to build the subclass; None: a plain input
    fakes: tuple[Any, ...] = ()  # fakes of the plain tensors inside
    static: bool = False
    dropped: bool = False  # the new graph does not read it
    path: str = ""
    fake: Any = None


@dataclass(frozen=True, eq=False)
class Result:
    """A result of the original graph: an input, a subclass to build, or a plain result."""

    input: int | None = None  # the position of the input that it is
    wrapper: raw_memory.Wrapper | None = None


@dataclass(frozen=True, eq=False)
class Unwrapped:
    """A graph on plain tensors, and the mapping from the inputs and results of the original."""

    graph: fx.GraphModule
    inputs: tuple[Input, ...]
    results: tuple[Result, ...]
    symbols: dict[Any, int]  # the positions of the inputs that are sizes


def unwrap_subclasses(gm: fx.GraphModule) -> Unwrapped | None:
    """Return the graph on the plain tensors inside of subclasses; None without subclasses."""
    if not has_subclasses(gm):
        return None
    try:
        return _Unwrapper(gm).run()
    except dynamo.restarts():
        raise
    except Exception as error:  # the code of the subclass may raise anything
        log.info("tensor subclasses stay whole, and the graph is not captured: %s", error)
        return None


class _Unwrapper:
    """Rewrites a copy of a graph, node by node in its order."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = dynamo.copied(gm)
        self._graph = self._gm.graph
        self._bound = bound_symbols(self._gm)
        self._in_regions = nodes_in_regions(self._gm)
        leaves = [leaf for node in self._graph.nodes for leaf in tensors(value(node))]
        wrapped = [part for leaf in filter(raw_memory.is_wrapper, leaves) for part in _inside(leaf)]
        self._fakes = [*leaves, *wrapped]
        # Nodes that are replaced, with a node or constant for each leaf of their value: a tuple of
        # nodes for a subclass.
        self._parts: dict[fx.Node, list[Any]] = {}
        self._wrappers: dict[fx.Node, list[raw_memory.Wrapper | None]] = {}
        self._replaced: set[int] = set()  # traced storages that the new graph does not use

    def run(self) -> Unwrapped:
        enters = self._graph.find_nodes(op="call_function", target=torch_ops.ENTER_AUTOCAST)
        if enters or torch_ops.any_autocast():
            raise raw_memory.CannotUnwrap("autocast is on")
        placeholders = self._graph.find_nodes(op="placeholder")
        symbols = {symbol: placeholders.index(node) for symbol, node in self._bound.items()}
        inputs = [self._input(node) for node in placeholders]
        for node in list(self._graph.nodes):
            if node.op not in COMPUTING:
                continue
            if self._touches(node):
                self._expand(node)
            elif not self._replaced.isdisjoint(storages(value(node))):
                self._run_again(node)
        results = self._results(placeholders)
        self._check_aliases()
        for node in reversed([*self._parts]):
            self._graph.erase_node(node)
        for position, node in enumerate(placeholders):
            if raw_memory.is_stand_in(value(node)) and not node.users:
                self._graph.erase_node(node)
                inputs[position] = Input(None, dropped=True, fake=value(node))
        self._graph.lint()
        self._gm.recompile()
        return Unwrapped(self._gm, tuple(inputs), tuple(results), symbols)

    def _check_aliases(self) -> None:
        """Refuse writes to memory that two inputs share: no guard compares the tensors inside."""
        seen: set[int] = set()
        written = written_storages(self._gm)
        for node in self._graph.find_nodes(op="placeholder"):
            keys = storages(value(node)) if node not in self._parts else set[int]()
            if seen & keys & written:
                raise raw_memory.CannotUnwrap(
                    f"{node.name} is memory of another input, and written"
                )
            seen |= keys

    def _input(self, node: fx.Node) -> Input:
        """Replace a subclass among the inputs by the tensors inside of it."""
        outer = value(node)
        if not raw_memory.is_wrapper(outer):
            return Input(None)
        wrapper = raw_memory.Wrapper.of(outer)
        fakes = wrapper.parts(outer)
        self._check_sizes(wrapper, node)
        if not symbols_of(fakes) <= self._bound.keys():
            raise raw_memory.CannotUnwrap(f"no input gives the sizes inside of {node.name}")
        source, new = dynamo.source_name(node), []
        for path, fake in zip(wrapper.paths, fakes, strict=True):
            with self._graph.inserting_before(node):
                part = self._graph.placeholder(f"{node.target}_{path.replace('.', '_')}")
            part.meta = {**node.meta, "example_value": fake}
            if source is not None:
                dynamo.set_source_name(part, f"{source}.{path}")
            new.append(part)
        self._parts[node], self._wrappers[node] = [tuple(new)], [wrapper]
        static = dynamo.is_static_input(node)
        return Input(wrapper, tuple(fakes), static, path=source or node.name)

    def _touches(self, node: fx.Node) -> bool:
        """Return whether a node reads or returns a subclass, or an item of a replaced result."""
        if not self._parts.keys().isdisjoint(node.all_input_nodes):
            return True
        return any(map(raw_memory.is_wrapper, tensors(value(node))))

    # -------------------------------------------------------------- one call

    def _expand(self, node: fx.Node) -> None:
        """Replace a call by the ops that it runs on plain tensors."""
        self._check(node)
        arguments = {argument: self._leaves(argument) for argument in node.all_input_nodes}
        parts = [n for leaves in arguments.values() for n in _flat(leaves)]
        new_nodes = [n for n in parts if isinstance(n, fx.Node)]
        call = _Call(self._gm, node, arguments, self._wrappers)
        traced = raw_memory.traced_on_parts(
            call, [value(n) for n in new_nodes], dynamo.fake_context(self._fakes)
        )
        nodes = self._inline(traced, node, new_nodes)
        leaves = iter(nodes)
        parts = []
        for wrapper in call.wrappers:
            count = 1 if wrapper is None else len(wrapper.paths)
            taken = tuple(next(leaves) for _ in range(count))
            parts.append(taken[0] if wrapper is None else taken)
        self._note_replaced(value(node), call.wrappers, parts)
        if call.is_leaf and call.wrappers == [None]:
            expressions.replace_uses(node, parts[0])
            self._graph.erase_node(node)
        else:
            self._parts[node], self._wrappers[node] = parts, call.wrappers

    def _check(self, node: fx.Node) -> None:
        if node in self._in_regions:
            raise raw_memory.CannotUnwrap(
                f"{node.name} is in a region that switches a state of torch"
            )
        if node.op == "call_module" or torch_ops.is_higher_order_op(node.target):
            raise raw_memory.CannotUnwrap(f"{node.name} calls {short_name(node.target)}")
        if any(tensor.requires_grad for tensor in tensors(value(node))):
            raise raw_memory.CannotUnwrap(f"{node.name} requires grad")

    def _leaves(self, argument: fx.Node) -> list[Any]:
        """Return the new nodes of an argument, one per leaf of its value."""
        if argument in self._parts:
            return self._parts[argument]
        known = value(argument)
        if raw_memory.is_stand_in(known):
            return []
        if not isinstance(known, (torch.Tensor, torch.SymInt)):
            raise raw_memory.CannotUnwrap(f"{argument.name} is a {type(known).__name__}")
        return [argument]

    def _inline(
        self, traced: fx.GraphModule, node: fx.Node, arguments: Sequence[fx.Node]
    ) -> list[Any]:
        """Copy the nodes of a trace before a node; return the nodes of the results."""
        placeholders = traced.graph.find_nodes(op="placeholder")
        copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, arguments, strict=True))
        with self._graph.inserting_before(node):
            for source in traced.graph.nodes:
                if source.op == "get_attr":
                    copies[source] = self._constant(traced, source)
                elif source.op in COMPUTING and (
                    source.users or short_name(source.target) not in _IDLE
                ):
                    copies[source] = self._graph.node_copy(source, copies.__getitem__)
                else:
                    continue
                known = source.meta.get("val")
                if source.op == "get_attr" and known is None:
                    raise raw_memory.CannotUnwrap(f"{node.name} makes a constant")
                copies[source].meta = {**node.meta, "example_value": known}
        results = traced.graph.output_node().args[0]
        return [copies[n] if isinstance(n, fx.Node) else n for n in results]  # type: ignore[union-attr]

    def _constant(self, traced: fx.GraphModule, node: fx.Node) -> fx.Node:
        held = getattr(traced, str(node.target))
        if not isinstance(held, torch.Tensor) or hasattr(held, "fake_mode"):
            raise raw_memory.CannotUnwrap(f"a constant is a {type(held).__name__}")
        number = 0
        while hasattr(self._gm, f"_inner_constant{number}"):
            number += 1
        setattr(self._gm, f"_inner_constant{number}", held)
        return self._graph.get_attr(f"_inner_constant{number}")

    def _note_replaced(
        self, old: Any, wrappers: list[raw_memory.Wrapper | None], parts: list[Any]
    ) -> None:
        """Note the traced storages that were replaced in the new graph."""
        leaves = torch_ops.tree_leaves(old)
        if len(leaves) != len(parts):
            raise raw_memory.CannotUnwrap("a call returns other results than when traced")
        for leaf, wrapper, part in zip(leaves, wrappers, parts, strict=True):
            before = [leaf] if wrapper is None else wrapper.parts(leaf)
            after = [_known(n) for n in _flat([part])]
            if not alike(after, before):
                raise raw_memory.CannotUnwrap("a call returns other sizes than when traced")
            for one, other in zip(before, after, strict=True):
                if isinstance(one, torch.Tensor) and storages(one) != storages(other):
                    self._replaced |= storages(one)

    def _run_again(self, node: fx.Node) -> None:
        """Re-run views and in-place ops on the replacement, so that fakes share its storage."""
        if node in self._in_regions:
            raise raw_memory.CannotUnwrap(
                f"{node.name} is in a region that switches a state of torch"
            )
        with torch.no_grad(), dynamo.fake_context(self._fakes):
            new = run_on_fakes(self._gm, node)
        if not alike([new], [value(node)]):
            raise raw_memory.CannotUnwrap(f"{node.name} returns other sizes than when traced")
        node.meta["example_value"] = new

    def _check_sizes(self, wrapper: raw_memory.Wrapper, node: fx.Node) -> None:
        """Refuse a result subclass whose sizes no input gives."""
        if not symbols_of([*wrapper.size, *wrapper.stride]) <= self._bound.keys():
            raise raw_memory.CannotUnwrap(f"no input gives the sizes of {node.name}")
        if symbols_of(wrapper.fixed):
            raise raw_memory.CannotUnwrap(f"{node.name} holds a size that varies")

    # -------------------------------------------------------------- results

    def _results(self, placeholders: list[fx.Node]) -> list[Result]:
        """Return plain tensors instead of subclasses."""
        output = self._graph.output_node()
        if not isinstance(output.args[0], (tuple, list)):
            raise raw_memory.CannotUnwrap("the graph returns no tuple")
        results, new = list[Result](), list[Any]()
        for item in output.args[0]:
            if not isinstance(item, fx.Node) or item not in self._parts:
                results.append(Result())
                new.append(item)
            elif item in placeholders:
                results.append(Result(input=placeholders.index(item)))
            elif len(self._parts[item]) != 1 or not isinstance(self._parts[item][0], tuple):
                raise raw_memory.CannotUnwrap(f"{item.name} is a container with a subclass")
            else:
                (wrapper,) = self._wrappers[item]
                assert wrapper is not None
                self._check_sizes(wrapper, item)
                results.append(Result(wrapper=wrapper))
                new += self._parts[item][0]
        output.args = (tuple(new),)
        return results


_IDLE = ("detach", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset")


def _inside(tensor: Any) -> list[Any]:
    return raw_memory.Wrapper.of(tensor).parts(tensor) if tensor.layout is torch.strided else []


def _known(node: Any) -> Any:
    return value(node) if isinstance(node, fx.Node) else node


def _flat(leaves: Sequence[Any]) -> list[Any]:
    return [n for leaf in leaves for n in (leaf if isinstance(leaf, tuple) else (leaf,))]


class _Call:
    """A call as a function of plain tensors and sizes; it notes how its result was built."""

    def __init__(
        self,
        gm: fx.GraphModule,
        node: fx.Node,
        arguments: dict[fx.Node, list[Any]],
        wrappers: dict[fx.Node, list[raw_memory.Wrapper | None]],
    ) -> None:
        self._gm, self._node, self._arguments, self._known = gm, node, arguments, wrappers
        self.wrappers: list[raw_memory.Wrapper | None] = []  # one per leaf of the result
        self.is_leaf = True  # whether the result is no container

    def __call__(self, *parts: Any) -> list[Any]:
        plain = iter(parts)
        values: dict[fx.Node, Any] = {}
        built: list[tuple[raw_memory.Wrapper, Any, list[Any]]] = []
        for argument, leaves in self._arguments.items():
            values[argument] = self._value(argument, leaves, plain, built)
        result = run_on_fakes(self._gm, self._node, values)
        for wrapper, tensor, inner in built:
            if not wrapper.fits(tensor) or any(
                one is not other for one, other in zip(wrapper.parts(tensor), inner, strict=True)
            ):
                raise raw_memory.CannotUnwrap(
                    f"{self._node.name} replaces what is inside of a tensor"
                )
        leaves = torch_ops.tree_leaves(result)
        self.is_leaf = len(leaves) == 1 and leaves[0] is result
        flat: list[Any] = []
        for leaf in leaves:
            how = raw_memory.Wrapper.of(leaf) if raw_memory.is_wrapper(leaf) else None
            self.wrappers.append(how)
            flat += [leaf] if how is None else how.parts(leaf)
        return flat

    def _value(self, argument: fx.Node, leaves: list[Any], plain: Any, built: list[Any]) -> Any:
        """Return an argument, its subclasses built from plain tensors."""
        known = value(argument)
        if raw_memory.is_stand_in(known):
            return raw_memory.real_object(known)
        if argument not in self._known:
            return next(plain)
        items: list[Any] = []
        for leaf, wrapper in zip(leaves, self._known[argument], strict=True):
            if wrapper is None:
                items.append(next(plain) if isinstance(leaf, fx.Node) else leaf)
                continue
            inner = [next(plain) for _ in leaf]
            items.append(wrapper.build(iter(inner)))
            built.append((wrapper, items[-1], inner))
        return torch_ops.tree_unflatten(items, torch_ops.tree_spec(known))
