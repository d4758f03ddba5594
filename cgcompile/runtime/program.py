"""What the recordings of one compiled graph share, worked out once: :class:`Program`.

Most eager pieces are one call of an op. Calling the op itself, with its arguments bound, costs half
of what the piece's generated code costs; and an entry of the registry may name a function of its
own, which skips the dispatcher as well: :func:`_eager_call`.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.boundaries import Boundaries, target_name
from cgcompile.config import CompilationConfig
from cgcompile.context import unreadable_context
from cgcompile.errors import PieceCompileError
from cgcompile.graphs.arena import moved
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.timeline import Timeline
from cgcompile.passes.nodes import is_symbolic_number, storages
from cgcompile.passes.split import Piece, SplitGraph, returned_names, tensor_inputs
from cgcompile.passes.symbols import dtype_text
from cgcompile.pieces.compilers import Runnable
from cgcompile.pieces.stitch import Step
from cgcompile.runtime.inputs import BoundTensors
from cgcompile.runtime.layouts import Layouts, traced_layouts
from cgcompile.runtime.rows import BatchRows
from cgcompile.torch_compat import dynamo, torch_ops

_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NAMESPACES_OF_TORCH = ("aten", "prims", "prim")


class Name(NamedTuple):
    """An argument that is a value of the split graph."""

    name: str


class EagerCall(NamedTuple):
    """A function, its arguments (a :class:`Name` for a value), and how to list its results."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    results: Callable[[Any], list[Any]]

    @classmethod
    def of_all(cls, piece: Piece, function: Runnable) -> "EagerCall":
        """Return the call of a function from all inputs to all outputs of a piece."""
        return cls(function, tuple(map(Name, piece.inputs)), list)

    def arguments(self, source: Callable[[str], Any]) -> tuple[Any, ...]:
        """Return the arguments, with ``source(name)`` in place of names."""
        return tuple([source(arg.name) if type(arg) is Name else arg for arg in self.args])


def _eager_call(
    piece: Piece,
    plain: Runnable,
    boundaries: Boundaries,
    device: torch.device,
    read_by_eager: bool,  # compiled, eager pieces read a result, so that its layout counts
) -> EagerCall:
    """Return the call of an eager piece at replay; ``plain`` is its traced code."""
    if piece.compiled:
        return EagerCall.of_all(piece, plain)
    own = {
        node: function
        for node in piece.module.graph.nodes
        if node.op == "call_function"
        and (entry := boundaries.match_call(node.target)) is not None
        and (function := entry.impl_for(device.type)) is not None
    }
    node = None if read_by_eager else _single_op(piece.module)
    if node is None:
        return EagerCall.of_all(piece, _with_functions(piece.module, own) if own else plain)
    names = dict(zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    args = tuple(Name(names[arg]) if isinstance(arg, fx.Node) else arg for arg in node.args)
    overloads = torch_ops.op_overloads(node.target)  # a packet looks its overload up at every call
    target: Any = overloads[0] if len(overloads) == 1 else node.target
    return EagerCall(own.get(node, target), args, _one if piece.outputs else _nothing)


def _with_functions(
    gm: fx.GraphModule, functions: Mapping[fx.Node, Callable[..., Any]]
) -> Runnable:
    """Return the code of a piece with functions in place of ops."""
    by_name = {node.name: function for node, function in functions.items()}
    copy = dynamo.copied(gm)
    for node in copy.graph.nodes:
        node.target = by_name.get(node.name, node.target)
    copy.recompile()
    run: Runnable = copy.forward
    return run


def _single_op(gm: fx.GraphModule) -> fx.Node | None:
    """Return the only op of a graph, if it is called with inputs and constants and is all of it."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) != 1 or not torch_ops.op_overloads(calls[0].target) or calls[0].kwargs:
        return None
    (node,) = calls
    is_flat = all(isinstance(arg, (fx.Node, *_CONSTANTS)) for arg in node.args)
    (result,) = gm.graph.output_node().args
    return node if is_flat and result in ((), (node,)) else None


def _nothing(_: Any) -> list[Any]:
    return []


def _one(result: Any) -> list[Any]:
    return [result]


def not_reading_context(piece: Piece, run: Runnable) -> Runnable:
    """Return ``run`` of a captured piece; its custom ops may not read the context in a capture."""
    if not piece.capture or not _calls_users_code(piece.module):
        return run

    def checked(*inputs: Any) -> Sequence[Any]:
        context = unreadable_context(f"{piece.name} ({piece.where})") if inside_capture() else None
        with nullcontext() if context is None else context:
            return run(*inputs)

    return checked


def _label(piece: Piece) -> str:
    """Return the label of an eager piece: its first splitting op, or why it is eager."""
    if piece.op is not None:
        return piece.op.name
    return str(piece.why[0].reason.value) if piece.why else "returned sizes"


class TracedOutputs:
    """Compares the results of pieces that hold custom ops with their fake values."""

    # The fake implementation is the user's; roles, sizes and compiled pieces depend on it. Warming
    # and capturing calls compare shapes and dtypes; replays do not.

    def __init__(self, split: SplitGraph) -> None:
        self._split = split
        custom = {piece.same_as for piece in split.distinct if any(_custom_ops(piece.module))}
        self._pieces = {p.index for p in split.pieces if p.outputs and p.same_as in custom}

    def comparing_step(
        self, step: Step, runnables: Sequence[Runnable], run: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``run``, or a step that compares the results of custom ops with their fakes."""
        if not self._pieces:
            return run

        def compared(*inputs: Any) -> Any:
            pairs = zip(self._split.pieces, runnables, strict=True)
            return step.bind([self.comparing(piece, r, inputs) for piece, r in pairs])(*inputs)

        return compared

    def comparing(self, piece: Piece, run: Runnable, inputs: Sequence[Any]) -> Runnable:
        """Return ``run`` of a piece, or a function that compares; ``inputs`` are the step's."""
        if piece.index not in self._pieces:
            return run

        def compared(*args: Any) -> Sequence[Any]:
            outputs = run(*args)
            self._compare(piece, outputs, inputs)
            return outputs

        return compared

    def _compare(self, piece: Piece, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        pairs = zip(self._split.inputs, inputs, strict=False)
        symbols = {
            value.meta.node.expr: number
            for value, number in pairs
            if is_symbolic_number(value.meta) and isinstance(number, int)
        }
        for item, (name, output) in enumerate(zip(piece.outputs, outputs, strict=True)):
            traced = self._split.values[name].meta
            if not isinstance(output, torch.Tensor) or not isinstance(traced, torch.Tensor):
                continue
            numbers = [self._split.symbols.number(size).subs(symbols) for size in traced.shape]
            expected = [int(n) if n.is_number else None for n in numbers]  # None: depends on data
            same = output.dtype is traced.dtype and len(expected) == output.dim()
            sizes = zip(expected, output.shape, strict=False)
            if not same or any(wanted not in (None, size) for wanted, size in sizes):
                shape = ["?" if size is None else size for size in expected]
                raise PieceCompileError.unlike_traced(
                    piece=piece.name,
                    where=piece.where,
                    op=_op_of_output(piece.module, item),
                    found=_text(output.dtype, output.shape),
                    traced=_text(traced.dtype, shape),
                )


def _calls_users_code(module: fx.GraphModule) -> bool:
    """Return whether a graph calls custom ops, or functions that are not traced into."""
    if any(_custom_ops(module)):
        return True
    functions = [node.target for node in module.graph.nodes if node.op == "call_function"]
    rooms = {str(getattr(f, "__module__", "")).partition(".")[0] for f in functions}
    return not rooms <= _ROOMS_OF_TORCH


# Modules of functions that read no forward context; the first part of their names.
_ROOMS_OF_TORCH = {"torch", "_operator", "operator", "math", "builtins", "", "None"}


def _custom_ops(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes that call ops which are not torch's own, subgraphs included."""
    for graph in module.modules():
        nodes = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
        for node in nodes:
            overloads = torch_ops.op_overloads(node.target) if node.op == "call_function" else ()
            if any(overload.namespace not in _NAMESPACES_OF_TORCH for overload in overloads):
                yield node


def _op_of_output(module: fx.GraphModule, item: int) -> str:
    """Return the custom op that returns an output of a piece; else all custom ops in it."""
    (results,) = module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    node: Any = results[item]
    while isinstance(node, fx.Node) and node.target is operator.getitem:
        node = node.args[0]
    ops = list(_custom_ops(module))
    chosen = [node] if node in ops else ops
    return " or ".join(dict.fromkeys(target_name(op.target) for op in chosen))


def _text(dtype: torch.dtype, sizes: Sequence[Any]) -> str:
    return f"{dtype_text(dtype)}[{', '.join(map(str, sizes))}]"


class Uses:
    """Who uses each value of a PIECEWISE step, by name, apart from the piece that makes it."""

    def __init__(self, split: SplitGraph, own: bool) -> None:  # own: results are copied
        eager = [piece for piece in split.pieces if not piece.capture]
        sources = {name: piece.index for piece in eager for name in piece.outputs}
        self.outputs = {name for piece in split.pieces for name in piece.outputs}
        self.returned = set(returned_names(split)) - {""}
        # Results that the caller gets uncopied, even where graphs read a copy: nothing mutates
        # them.
        names = {n for n in self.returned & sources.keys() if not split.values[n].mutated}
        self.originals = self._apart(split, names, sources) if own else set()
        # Read by captured pieces; of 0-dim CPU tensors graphs read a copy on the device.
        self.captured = {name for piece in split.pieces if piece.capture for name in piece.inputs}
        self.captured -= split.cpu_scalars
        # With a context also what the caller gets: the next graph may read it at that address.
        self.read = self.captured if own else self.captured | self.returned
        # Read by eager pieces, by the caller, or by copies of 0-dim CPU tensors.
        self.live = {name for piece in eager for name in piece.inputs}
        self.live |= self.returned | split.cpu_scalars
        # The last piece that uses a name; past the end if the caller gets memory at its address.
        self.last = {name: piece.index for piece in split.pieces for name in piece.inputs}
        end = len(split.pieces)
        if split.numbers is not None:
            self.live |= set(split.numbers.inputs)
            self.last.update(dict.fromkeys(split.numbers.inputs, end))
        self.last.update(dict.fromkeys(self.returned - self.originals, end))

    def _apart(
        self, split: SplitGraph, names: Iterable[str], sources: Mapping[str, int]
    ) -> set[str]:
        """Return the names that share memory with no result of another piece."""
        # Such a result is in the copy, and the caller may write to one and read the other.
        memory: dict[int, set[int | None]] = {}
        for name in self.returned & split.values.keys():  # numbers have no memory
            for key in storages(split.values[name].meta):
                memory.setdefault(key, set()).add(sources.get(name))
        return {
            name
            for name in names
            if all(len(memory[key]) == 1 for key in storages(split.values[name].meta))
        }


@dataclass(frozen=True, eq=False)
class Program:
    """The state that all recordings of one compiled graph share."""

    split: SplitGraph
    step: Step  # its generated function, to be bound
    runnables: Sequence[Runnable]  # the compiled form of each piece
    boundaries: Boundaries
    pool: GraphPool
    config: CompilationConfig
    timeline: Timeline
    frozen: BoundTensors
    rows: BatchRows  # the values that have a row per batch row

    def is_frozen(self, position: int) -> bool:
        """Return whether an input is the same object in all calls, which the trace keeps."""
        return position >= len(self.split.inputs) - self.frozen.count

    @cached_property
    def calls(self) -> dict[int, EagerCall]:
        """The call of each eager piece at replay, by index."""
        device, runnables = self.split.device, self.runnables
        eager = [piece for piece in self.split.pieces if not piece.capture]
        # Graphs get a copy in the right layout over a bridge.
        read = {name for piece in eager if piece.compiled for name in piece.inputs}
        return {
            piece.index: _eager_call(
                piece,
                runnables[piece.index],
                self.boundaries,
                device,
                not read.isdisjoint(piece.outputs),
            )
            for piece in eager
        }

    @cached_property
    def layouts(self) -> dict[int, Layouts]:
        """The layouts in which compiled pieces expect the results of others, by piece."""
        return traced_layouts(self.split)

    @cached_property
    def traced(self) -> TracedOutputs:
        return TracedOutputs(self.split)

    @cached_property
    def labels(self) -> dict[int, str]:
        """The labels of the pieces, by index; returned sizes past the end."""
        numbers = [] if self.split.numbers is None else [self.split.numbers]
        return {piece.index: _label(piece) for piece in (*self.split.pieces, *numbers)}

    @cached_property
    def positions(self) -> dict[str, int]:
        """The positions of inputs, by name."""
        return {value.name: position for position, value in enumerate(self.split.inputs)}

    @cached_property
    def cpu_scalars(self) -> dict[int, tuple[int, ...]]:
        return cpu_scalars(self.split)

    @cached_property
    def mutated_positions(self) -> tuple[int, ...]:
        """The positions of the inputs that some piece mutates."""
        return tuple(p for p, value in enumerate(self.split.inputs) if value.mutated)

    @cached_property
    def uses(self) -> tuple[Uses, Uses]:
        """The uses of each value: under the caller's context, under a synthetic one."""
        return Uses(self.split, False), Uses(self.split, True)


def cpu_scalars(split: SplitGraph) -> dict[int, tuple[int, ...]]:
    """Return which inputs of each captured piece are copies of 0-dim CPU tensors, by index."""
    positions = {
        piece.index: tuple(p for p, n in tensor_inputs(piece).items() if n in split.cpu_scalars)
        for piece in split.pieces
        if piece.capture
    }
    return {index: inputs for index, inputs in positions.items() if inputs}


def copying_cpu_scalars(split: SplitGraph, runnables: Sequence[Runnable]) -> list[Runnable]:
    """Return the functions of the pieces, with 0-dim CPU tensors copied to the device."""
    copying = list(runnables)
    for index, positions in cpu_scalars(split).items():
        copying[index] = _copying(runnables[index], positions, split.device)
    return copying


def uncompiled(split: SplitGraph) -> list[Runnable]:
    """Return the code of each piece, for tensors that may require grad."""
    return [dynamo.with_checkpoints(piece.module).forward for piece in split.pieces]


def _copying(run: Runnable, positions: Sequence[int], device: torch.device) -> Runnable:
    def copied(*inputs: Any) -> Any:
        args = list(inputs)
        for position in positions:
            args[position] = moved(args[position], device)
        return run(*args)

    return copied
