"""A pass, the manager that runs a list of passes, and what it checks after each of them.

A pass is a small object with a ``name``, a ``uuid()`` that changes when its effect does, and a
``__call__(gm) -> gm``. It may assume a valid graph and must leave one. After each pass the manager
checks that the graph is well formed (FX's own lint), that the inputs are those that Dynamo will
pass, and that each output is what it was: Dynamo's code around the graph, and the pieces behind a
piece, were traced with it. Shape, dtype, device and layout of an output stay, always. Its strides
stay where another piece takes it: that was compiled for them.

A pass need not fill in fake values: :func:`fill_values` runs new nodes, and nodes whose arguments
have another shape, dtype or the like, on the fake values of their arguments.
"""

import functools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import sympy
import torch
from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.counts import text_table
from cgcompile.errors import CGCompileError, ConfigError, PassError
from cgcompile.passes.nodes import (
    COMPUTING,
    Symbols,
    attribute,
    changes_layout,
    dtype_text,
    is_integer,
    is_symbolic_number,
    is_torchs,
    layout_of,
    nodes_in_regions,
    symbols_of,
    tensors,
    value,
)
from cgcompile.settings import checked, require, require_callable
from cgcompile.torch_compat import dynamo, expressions, torch_ops

log = logging.getLogger(__name__)


@runtime_checkable
class GraphPass(Protocol):
    """The interface of every pass, of cgcompile or of a user.

    Example:
        >>> class Recompile:
        ...     name = "recompile"
        ...
        ...     def uuid(self):
        ...         return "1"
        ...
        ...     def __call__(self, gm):
        ...         gm.recompile()
        ...         return gm
        >>> isinstance(Recompile(), cgcompile.passes.GraphPass)
        True
    """

    name: str

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Change ``gm`` in place, or return another graph with the same inputs and outputs."""

    def uuid(self) -> str:
        """Equal for two passes that change every graph in the same way; part of cache keys."""


@dataclass(frozen=True)
class FunctionPass:
    """A plain function as a pass.

    Args:
        name: shown in messages and dumps.
        function: ``(gm) -> gm``, or ``(gm) -> None`` if it works in place.
        version: change it when the function changes what it does, or what it is bound to.

    Raises:
        ConfigError: a name that is no text, or a function that cannot be called.

    Example:
        >>> def count(gm):
        ...     print(len(gm.graph.nodes), "nodes")
        >>> counted = cgcompile.passes.FunctionPass("count", count)
        >>> gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
        >>> gm = counted(gm)
        5 nodes
    """

    name: str
    function: Callable[[fx.GraphModule], fx.GraphModule | None]
    version: str = "1"

    def __post_init__(self) -> None:
        for name in ("name", "version"):
            text = getattr(self, name)
            valid = isinstance(text, str) and bool(text)
            require(valid, name, "FunctionPass", text, "a non-empty text")
        require_callable("function", "FunctionPass", self.function)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        return self.function(gm) or gm

    def uuid(self) -> str:
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)
        return f"{self.name}/{named.__module__}.{named.__qualname__}/{self.version}"


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.

    Attributes:
        name: of the pass.
        label: what it ran over: ``graph``, or the name of a piece.
        seconds: how long it took, without the checks and dumps around it.
        ops_before: nodes that compute, before.
        ops_after: nodes that compute, after.
        difference: how many more of each op there are after it: ``{"clone": -3}``. An op that was
            replaced by another of the same kind does not show.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> [record.name for record in split.passes][:2]
        ['bind_symbols', 'pull_items']
    """

    name: str
    label: str
    seconds: float = field(compare=False)
    ops_before: int
    ops_after: int
    difference: Mapping[str, int] = field(hash=False)

    def text(self, *, seconds: bool = True) -> str:
        """Return one line, without the time if ``seconds=False``: it differs between runs."""
        return table([self], seconds=seconds)

    def __str__(self) -> str:
        return self.text()


@dataclass
class Fusions:
    """Texts of a fusion pass: the matches it replaced, and why it left the others."""

    fused: list[str] = field(default_factory=list)
    unfused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*(f"fused {text}" for text in self.fused), *self.unfused])


def table(records: Iterable[PassRecord], *, seconds: bool = True) -> str:
    """Return a line for each record: graph, pass, time, number of ops, difference."""
    rows = []
    for record in records:
        changes = ", ".join(f"{name} {change:+}" for name, change in record.difference.items())
        duration = [f"{record.seconds * 1e3:.2f} ms"] if seconds else []
        ops = f"{record.ops_before} -> {record.ops_after} ops"
        rows.append([record.label, record.name, *duration, ops, changes or "-"])
    return "\n".join(text_table(rows))


class PassManager:
    """Run passes in order and check the graph after each.

    Args:
        passes: objects that follow :class:`GraphPass`.
        dump_dir: a folder (created if absent) for ``00.before.txt``, ``00.<name>.txt``, ...
        disabled: names of passes to leave out.

    Attributes:
        passes: those that run, in order.

    Raises:
        PassError: something in ``passes`` is not a pass.

    Example:
        >>> from cgcompile.passes import FunctionPass, PassManager
        >>> nothing = FunctionPass("nothing", lambda gm: gm)
        >>> [each.name for each in PassManager([nothing]).passes]
        ['nothing']
    """

    @checked
    def __init__(
        self,
        passes: Iterable[Any],
        dump_dir: str | None = None,
        disabled: Collection[str] = (),
    ) -> None:
        candidates = tuple(passes)
        for candidate in candidates:
            if not isinstance(candidate, GraphPass):
                raise PassError.not_a_pass(found=candidate)
        self.passes: tuple[GraphPass, ...] = tuple(p for p in candidates if p.name not in disabled)
        require("\0" not in (dump_dir or ""), "dump_dir", "PassManager", dump_dir, "a path")
        self._dump_dir = dump_dir
        self._records: list[PassRecord] = []

    @property
    def records(self) -> tuple[PassRecord, ...]:
        """One record for each run of each pass, in order."""
        return tuple(self._records)

    def __call__(
        self, gm: fx.GraphModule, label: str = "graph", *, strided: Collection[int] = ()
    ) -> fx.GraphModule:
        """Run all passes.

        Args:
            gm: the graph, with fake values.
            label: its name in dumps and records.
            strided: numbers of the outputs whose strides must stay.

        Raises:
            PassError: a pass raised, left an invalid graph, or changed what an output is.
                cgcompile's own errors pass through.
        """
        expected, outputs, before = _signature(gm), _outputs_of(gm), _op_counts(gm)
        self._dump(gm, label, 0, "before")
        for number, graph_pass in enumerate(self.passes):
            name, calls = graph_pass.name, calls_of(gm)
            started = time.perf_counter()
            try:
                gm = graph_pass(gm)
            except Exception as error:
                if isinstance(error, (CGCompileError, *dynamo.restarts())):
                    raise
                raise PassError.raised(name=name, error=error) from error
            seconds = time.perf_counter() - started
            problem = _problem_in(gm, expected) or fill_values(gm, calls)
            if problem is not None:
                raise PassError.invalid(name=name, problem=problem)
            _check_outputs(gm, outputs, strided, name, label)
            after = _op_counts(gm)
            ops = sorted({*before, *after})
            changes = {op: after[op] - before[op] for op in ops if after[op] != before[op]}
            record = PassRecord(name, label, seconds, before.total(), after.total(), changes)
            log.debug("pass: %s", record)
            self._records.append(record)
            before = after
            self._dump(gm, label, number, name)
        return gm

    def _dump(self, gm: fx.GraphModule, label: str, number: int, name: str) -> None:
        if self._dump_dir is None:
            return
        file_name = re.sub(r"[^\w.-]", "_", f"{label}.{number:02}.{name}.txt")
        try:
            os.makedirs(self._dump_dir, exist_ok=True)
            with open(os.path.join(self._dump_dir, file_name), "w", encoding="utf-8") as file:
                file.write(_graph_text(gm) + "\n")
        except OSError as error:
            expected = f"a folder that can be written ({error})"
            raise ConfigError.bad_value(
                name="dump_passes", where="dump", value=self._dump_dir, expected=expected
            ) from None


def _graph_text(gm: fx.GraphModule) -> str:
    """Return a line for each node: ``name = target(arguments)  # shape``; free of paths."""
    lines = []
    for node in gm.graph.nodes:
        arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
        shape = f"  # {tuple(value(node).shape)}" if hasattr(value(node), "shape") else ""
        call = f"{target_name(node.target)}({', '.join(arguments)})"
        lines.append(f"{node.name} = {node.op} {call}{shape}")
    return "\n".join(lines)


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    """Count the nodes of each op that compute, by the names that dumps show."""
    names = (target_name(node.target) for node in gm.graph.nodes if node.op in COMPUTING)
    # The class that holds torch's functions written in C++ is private.
    return Counter(name.replace("_VariableFunctionsClass.", "") for name in names)


def _signature(gm: fx.GraphModule) -> tuple[list[str], int]:
    """Return the names of the inputs in order, and the number of outputs: a pass keeps them."""
    inputs = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    return inputs, len(torch_ops.tree_leaves(gm.graph.output_node().args[0]))


def _problem_in(gm: fx.GraphModule, expected: tuple[list[str], int]) -> str | None:
    """Return the first thing wrong with the form of a graph, as text; None if it is valid."""
    try:
        gm.graph.lint()
        inputs, outputs = _signature(gm)
    except Exception as error:  # lint raises RuntimeError, KeyError, AttributeError, ...
        return f"{type(error).__name__}: {error}"
    if inputs != expected[0]:
        return f"its inputs are {inputs}, expected {expected[0]}"
    if outputs != expected[1]:
        return f"it has {outputs} outputs, expected {expected[1]}"
    return None


# ---------------------------------------------------------------- fake values


_Call = tuple[Any, Any, Any, Any]  # target, args, kwargs and value of a node before a pass


def calls_of(gm: fx.GraphModule) -> dict[fx.Node, _Call]:
    """Return all nodes of a graph as they are, for :func:`fill_values` after a pass."""
    return {n: (n.target, n.args, n.kwargs, value(n)) for n in gm.graph.nodes}


def fill_values(gm: fx.GraphModule, before: Mapping[fx.Node, _Call]) -> str | None:
    """Recompute the fake values of nodes after a pass; return the nodes that failed."""
    # Nodes that had no value before get none: Dynamo's own statements (entering autocast) have
    # none. Nodes in a state region (``vmap``) keep theirs. In a graph of new nodes alone, values
    # that the pass brought are kept.
    filler = _Filler(gm, before)
    problems = (filler.visit(node) for node in gm.graph.nodes if node.op in COMPUTING)
    return next((problem for problem in problems if problem is not None), None)


class _Filler:
    """Visits the nodes of a graph in order; see :func:`fill_values`."""

    def __init__(self, gm: fx.GraphModule, before: Mapping[fx.Node, _Call]) -> None:
        self._gm, self._before = gm, before
        self._changed: set[fx.Node] = set()  # old nodes that compute something else now
        self._rebuilt = not any(node in before for node in gm.graph.nodes)

    @functools.cached_property
    def _in_regions(self) -> set[fx.Node]:
        return nodes_in_regions(self._gm)

    def visit(self, node: fx.Node) -> str | None:
        old, new = value(node), node not in self._before and "example_value" not in node.meta
        if not new and not (self._is_stale(node) and self._can_run(node)):
            return None
        grad = any(tensor.requires_grad for tensor in tensors(old))
        try:
            fake_mode = dynamo.fake_context(map(value, self._gm.graph.nodes))
            with torch.set_grad_enabled(grad), fake_mode:
                result = run_on_fakes(self._gm, node)
        except Exception as error:
            if new:
                problem = "has no fake value, and running it on fakes failed"
                return f"node {node.name!r} {problem}: {error}"
            free = symbols_of([old, *map(value, node.all_input_nodes)])
            trusted = node not in self._before or not is_torchs(node)
            if trusted or any(map(expressions.is_unbacked, free)):
                return None  # the op may need state of the tracer
            return f"node {node.name!r} fails on its new arguments: {error}"
        if new or not alike([result], [old]):
            node.meta["example_value"] = result
            if not new:
                self._changed.add(node)
        return None

    def _is_stale(self, node: fx.Node) -> bool:
        """Return whether the value of a node may be from an earlier form of its call."""
        if not self._changed.isdisjoint(node.all_input_nodes):
            return True
        if node not in self._before:
            return not self._rebuilt  # with a value of the pass's own
        target, args, kwargs, _ = self._before[node]
        if node.target != target:
            return True
        if node.args is args and (node.kwargs is kwargs or node.kwargs == kwargs):
            return False  # FX replaces ``args`` whole
        old = [self._old_value(leaf) for leaf in _leaves(args, kwargs)]
        return not alike(old, [_known_value(self._gm, n) for n in _leaves(node.args, node.kwargs)])

    def _old_value(self, leaf: Any) -> Any:
        call = self._before.get(leaf) if isinstance(leaf, fx.Node) else None
        return _known_value(self._gm, leaf) if call is None or leaf.op == "get_attr" else call[3]

    def _can_run(self, node: fx.Node) -> bool:
        if not (tensors(value(node)) or is_symbolic_number(value(node))):
            return False
        # A change of layout would change the fake value of its argument a second time.
        return not changes_layout(node) and node not in self._in_regions


def _known_value(gm: fx.GraphModule, leaf: Any) -> Any:
    """Return the fake value of a node, the attribute that it reads, or the constant itself."""
    if not isinstance(leaf, fx.Node):
        return leaf
    return attribute(gm, leaf) if leaf.op == "get_attr" else value(leaf)


def _leaves(*arguments: Any) -> list[Any]:
    """Return the nodes and constants in arguments, containers opened."""
    leaves: list[Any] = []
    fx.node.map_aggregate(arguments, leaves.append)
    return leaves


def run_on_fakes(
    gm: fx.GraphModule, node: fx.Node, replaced: Mapping[fx.Node, Any] | None = None
) -> Any:
    """Run a node under its autocast on the fake values of its arguments, or on ``replaced``."""
    known = replaced or {}

    def fake(argument: fx.Node) -> Any:
        return known[argument] if argument in known else _known_value(gm, argument)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), fake)
    with _autocast_at(gm, node):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return gm.get_submodule(str(node.target))(*args, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


@contextmanager
def _autocast_at(gm: fx.GraphModule, node: fx.Node) -> Iterator[None]:
    """Enter the autocast contexts that the graph has open at a node."""
    entered: list[fx.Node] = []
    leave = torch_ops.LEAVES[torch_ops.ENTER_AUTOCAST]
    if gm.graph.find_nodes(op="call_function", target=torch_ops.ENTER_AUTOCAST):
        for other in gm.graph.nodes:
            if other is node:
                break
            if other.target is torch_ops.ENTER_AUTOCAST:
                entered.append(other)
            elif other.target is leave:
                entered.remove(other.args[0])
    with ExitStack() as stack:
        for enter in entered:
            stack.callback(leave, torch_ops.ENTER_AUTOCAST(*enter.args, **enter.kwargs))
        yield


def alike(some: list[Any], others: list[Any]) -> bool:
    """Return whether values are the same without their data; unbacked sizes are equal."""
    # An op creates new symbols for these at each run.
    one, other = torch_ops.tree_leaves(some), torch_ops.tree_leaves(others)
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout is not other.layout or one.dim() != other.dim():
            return False
        if one.layout is not torch.strided:
            return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return all(map(_equal_or_unbacked, layout_of(one), layout_of(other)))
    if is_symbolic_number(one) and is_symbolic_number(other):
        return _equal_or_unbacked(one.node.expr, other.node.expr)
    return type(one) is type(other) and bool(one == other)


def _equal_or_unbacked(one: Any, other: Any) -> bool:
    free = getattr(one, "free_symbols", set()) | getattr(other, "free_symbols", set())
    return one == other or any(map(expressions.is_unbacked, free))


# ---------------------------------------------------------------- outputs


_UNKNOWN = object()  # stands for a missing fake value


def _outputs_of(gm: fx.GraphModule) -> tuple[Any, ...]:
    """Return the fake value of each output, in order."""
    leaves = torch_ops.tree_leaves(gm.graph.output_node().args[0])
    return tuple(
        _UNKNOWN
        if isinstance(leaf, fx.Node) and leaf.op != "get_attr" and "example_value" not in leaf.meta
        else _known_value(gm, leaf)
        for leaf in leaves
    )


def _check_outputs(
    gm: fx.GraphModule, expected: Iterable[Any], strided: Collection[int], name: str, label: str
) -> None:
    """Raise PassError for the first output that a pass changed."""
    symbols: Symbols | None = None
    for index, (after, before) in enumerate(zip(_outputs_of(gm), expected, strict=True)):
        if after is before or after is _UNKNOWN or before is _UNKNOWN:
            continue
        symbols = symbols or Symbols(gm)
        facts, others = _facts(after, index in strided), _facts(before, index in strided)
        pairs = zip(facts[1], others[1], strict=False)
        if facts[0] != others[0] or not all(_equal_numbers(*pair, symbols) for pair in pairs):
            raise PassError.changed_output(
                name=name,
                graph=label,
                place=index,
                found=_output_text(after, symbols, index in strided),
                expected=_output_text(before, symbols, index in strided),
            )


def _facts(output: Any, strided: bool) -> tuple[Any, list[Any]]:
    """Return the properties that a pass must keep of an output; None if it is unused."""
    if not isinstance(output, torch.Tensor):
        return None, [output] if is_integer(output) else []
    numbers = [*output.shape]
    if strided and output.layout is torch.strided:
        pairs = zip(output.shape, output.stride(), strict=True)
        numbers += [None if type(size) is int and size == 1 else stride for size, stride in pairs]
    return (output.dtype, output.layout, output.device, output.dim()), numbers


def _equal_numbers(one: Any, other: Any, symbols: Symbols) -> bool:
    """Return whether numbers are equal at all allowed sizes, as far as some sizes show."""
    # A size that depends on data is equal to any other, and so is None.
    if one is other or one is None or other is None:
        return True
    if not all(type(n) is int or hasattr(n.node, "expr") for n in (one, other)):
        return True  # a length of nested tensors, which has no expression
    a, b = symbols.number(one), symbols.number(other)
    free: set[sympy.Symbol] = a.free_symbols | b.free_symbols
    if a == b or any(symbol not in symbols for symbol in free) or sympy.expand(a - b) == 0:
        return True
    if not free:
        return False
    tried = (symbols.numbers_with(symbol, size) for symbol in free for size in _TRIED)
    return all(a.subs(numbers) == b.subs(numbers) for numbers in tried if numbers is not None)


# Sizes at which two expressions are compared that are equal, but not as sympy compares them.
_TRIED = (2, 3, 4, 5, 7, 8, 12, 16, 24, 30, 31, 32, 48, 64, 100, 128, 240, 256, 1000, 1024, 4096)


def _output_text(output: Any, symbols: Symbols, strided: bool) -> str:
    """Return text such as ``f32[s0, 16] on cpu``."""
    if is_symbolic_number(output):
        return symbols.pretty(output.node.expr)
    if not isinstance(output, torch.Tensor):
        return f"{output!r}"
    if output.layout is not torch.strided:
        return f"{dtype_text(output.dtype)}{list(output.shape)} {output.layout} on {output.device}"
    text = f"{symbols.shape_text(output)} on {output.device}"
    if not strided:
        return text
    strides = ", ".join(symbols.pretty(symbols.number(stride)) for stride in output.stride())
    return f"{text}, strides ({strides})"
