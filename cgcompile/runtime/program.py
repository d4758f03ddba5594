"""How an eager piece is called at replay: :func:`call_of`.

Most eager pieces are one call of an op. Calling the op itself, with its arguments bound, costs half
of what the piece's generated code costs; and an entry of the registry may name a function of its
own, which skips the dispatcher as well.

Compare what pieces with custom ops return with what was traced: :class:`TracedOutputs`.

The fake implementation of a custom op is the user's. Where it returns another shape or dtype than
the op does, all that was worked out from the trace is wrong: roles, sizes, compiled pieces. Warming
and capturing calls compare; replays do not. Strides are not compared: the ops of pieces that are
not compiled read the real ones, and compiled pieces assert those of their inputs.

Who uses each value of a PIECEWISE step, apart from the piece that makes it: :class:`Uses`.

What the recordings of one compiled graph share, worked out once: :class:`Program`.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.boundaries import Boundaries, target_name
from cgcompile.config import CompilationConfig
from cgcompile.errors import PieceCompileError
from cgcompile.graphs.arena import moved
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.timeline import Timeline
from cgcompile.passes.nodes import is_symbolic_number, storages, value, written_storages
from cgcompile.passes.split import Piece, SplitGraph
from cgcompile.passes.symbols import dtype_text
from cgcompile.pieces.compilers import Runnable
from cgcompile.pieces.stitch import Step
from cgcompile.reasons import Reason
from cgcompile.runtime.inputs import Frozen
from cgcompile.runtime.returns import returned_names


class Named(NamedTuple):
    """A value of the split graph."""

    name: str


class Call(NamedTuple):
    """A function and its arguments: names of values as :class:`Named`, all else as it is.

    Attributes:
        function: what to call.
        args: by position.
        leaves: the results of the piece as a list, from what the function returned.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    leaves: Callable[[Any], list[Any]]

    @classmethod
    def of_all(cls, piece: Piece, function: Runnable) -> "Call":
        """A function that takes all inputs of a piece and returns all its outputs."""
        return cls(function, tuple(Named(name) for name in piece.inputs), list)


def call_of(piece: Piece, plain: Runnable, boundaries: Boundaries, device: torch.device) -> Call:
    """What runs for an eager piece.

    Args:
        piece: the piece.
        plain: its own code.
        boundaries: the registry, for functions that replace ops.
        device: where the graph computes.
    """
    single = None if piece.compiled else _single_op(piece.module)
    if single is None:
        own = None if piece.compiled else _with_own_functions(piece.module, boundaries, device)
        return Call.of_all(piece, plain if own is None else own)
    node, leaves = single
    names = dict(zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    args = tuple(Named(names[arg]) if isinstance(arg, fx.Node) else arg for arg in node.args)
    return Call(_function(node.target, boundaries, device), args, leaves)


def _function(target: Any, boundaries: Boundaries, device: torch.device) -> Callable[..., Any]:
    own = _own_function(target, boundaries, device)
    if own is not None:
        return own
    overloads = compat.op_overloads(target)  # a packet looks its only overload up at every call
    function: Callable[..., Any] = overloads[0] if len(overloads) == 1 else target
    return function


def _own_function(
    target: Any, boundaries: Boundaries, device: torch.device
) -> Callable[..., Any] | None:
    entry = boundaries.match_call(target)
    return None if entry is None else entry.impl_for(device.type)


def _with_own_functions(
    gm: fx.GraphModule, boundaries: Boundaries, device: torch.device
) -> Runnable | None:
    """The code of a piece with functions in place of its ops; None if no op has one."""
    own = {
        node.name: function
        for node in gm.graph.nodes
        if node.op == "call_function"
        and (function := _own_function(node.target, boundaries, device)) is not None
    }
    if not own:
        return None
    copy = compat.copied(gm)
    for node in copy.graph.nodes:
        node.target = own.get(node.name, node.target)
    copy.recompile()
    run: Runnable = copy.forward
    return run


def _single_op(gm: fx.GraphModule) -> tuple[fx.Node, Callable[[Any], list[Any]]] | None:
    """The only op of a graph, if it is called with inputs and constants and is all there is."""
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) != 1 or not compat.op_overloads(calls[0].target) or calls[0].kwargs:
        return None
    (node,) = calls
    constants = (int, float, bool, str, type(None), torch.dtype, torch.device)
    if not all(isinstance(arg, (fx.Node, *constants)) for arg in node.args):
        return None
    (result,) = gm.graph.output_node().args
    if result == ():
        return node, _nothing
    return (node, _one) if result == (node,) else None


def _nothing(made: Any) -> list[Any]:
    return []


def _one(made: Any) -> list[Any]:
    return [made]


def written_inputs(piece: Piece) -> list[str]:
    """Return the names of the inputs whose memory a piece writes, as far as its graph tells."""
    memory = written_storages(piece.module)  # through views as well
    names = zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)
    return [name for name, node in names if not memory.isdisjoint(storages(value(node)))]


def said(piece: Piece) -> str:
    """What an eager piece runs, in a word or two: its first splitting op, or why it is eager."""
    if not piece.why:
        return "returned sizes"
    first = piece.why[0]
    if first.reason is Reason.SPLITTING_OP:
        return first.detail.rpartition(" [")[0] or first.detail
    return str(first.reason.value)


def arguments(call: Call, source: Callable[[str], Any]) -> tuple[Any, ...]:
    """The arguments of a call, names replaced by what they stand for."""
    return tuple([source(arg.name) if type(arg) is Named else arg for arg in call.args])


_TORCHS = ("aten", "prims", "prim")


class TracedOutputs:
    """Compares the results of pieces that hold custom ops with their fake values.

    Args:
        split: the split graph.
    """

    def __init__(self, split: SplitGraph) -> None:
        self._split = split
        holds = {p.same_as: next(_custom_ops(p.module), None) is not None for p in split.distinct}
        self._pieces = {p.index for p in split.pieces if p.outputs and holds[p.same_as]}

    def comparing(
        self, step: Step, runnables: Sequence[Runnable], run: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``run``, the bound step, or one that compares where a piece holds a custom op."""
        if not self._pieces:
            return run

        def compared(*inputs: Any) -> Any:
            pairs = zip(self._split.pieces, runnables, strict=True)
            return step.bind([self.compared(piece, r, inputs) for piece, r in pairs])(*inputs)

        return compared

    def compared(self, piece: Piece, run: Runnable, inputs: Sequence[Any]) -> Runnable:
        """Return ``run``, or where a piece holds a custom op one that compares its results.

        Args:
            piece: whose code it is.
            run: takes the inputs of the piece.
            inputs: of the step.
        """
        if piece.index not in self._pieces:
            return run

        def compared(*given: Any) -> Sequence[Any]:
            outputs = run(*given)
            self._compare(piece, outputs, inputs)
            return outputs

        return compared

    def _compare(self, piece: Piece, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        sizes = self._sizes(inputs)
        for item, (name, output) in enumerate(zip(piece.outputs, outputs, strict=True)):
            traced = self._split.values[name].meta
            if not isinstance(output, torch.Tensor) or not isinstance(traced, torch.Tensor):
                continue
            expected = [self._size(size, sizes) for size in traced.shape]
            same = output.dtype is traced.dtype and len(expected) == output.dim()
            pairs = zip(expected, output.shape, strict=False)
            if not same or any(size not in (None, now) for size, now in pairs):
                raise PieceCompileError.unlike_traced(
                    piece=piece.name,
                    where=piece.where,
                    op=_made_by(piece.module, item),
                    found=_text(output.dtype, output.shape),
                    traced=_text(
                        traced.dtype, ["?" if size is None else size for size in expected]
                    ),
                )

    def _sizes(self, inputs: Sequence[Any]) -> dict[sympy.Basic, int]:
        """The number that each symbol stands for in a call."""
        pairs = zip(self._split.inputs, inputs, strict=False)
        return {
            value.meta.node.expr: number
            for value, number in pairs
            if is_symbolic_number(value.meta) and isinstance(number, int)
        }

    def _size(self, size: Any, sizes: Mapping[sympy.Basic, int]) -> int | None:
        """A traced size as a number; None where it depends on data."""
        number = self._split.symbols.number(size).subs(sizes)
        return int(number) if number.is_number else None


def _custom_ops(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that call ops which are not torch's own, subgraphs included."""
    for graph in module.modules():
        nodes = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
        for node in nodes:
            overloads = compat.op_overloads(node.target) if node.op == "call_function" else ()
            if any(overload.namespace not in _TORCHS for overload in overloads):
                yield node


def _made_by(module: fx.GraphModule, item: int) -> str:
    """The custom op that returns an output of a piece; else all those in it."""
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
    """The uses of the values of a split graph; the same for all its recordings.

    Args:
        split: the split graph.
        own: results are copied for the caller.

    Attributes:
        made: names of the values that pieces make.
        captured: names that captured pieces read.
        read: these, and with a context those that the caller gets at a fixed address.
        returned: names that the caller gets.
        originals: names of results that the caller gets as the eager piece made them, even where
            graphs read a copy: nothing writes them.
        live: names that eager pieces read, the caller, or what copies 0-dim CPU tensors.
        last: for each name, the index of the last piece that uses it; past the end if the caller
            gets what lies at its address.
    """

    def __init__(self, split: SplitGraph, own: bool) -> None:
        self.made = {name for piece in split.pieces for name in piece.outputs}
        self.returned = set(returned_names(split)) - {""}
        values = split.values
        eager = {
            name: piece.index
            for piece in split.pieces
            if not piece.capture
            for name in piece.outputs
        }
        unwritten = {name for name in self.returned & eager.keys() if not values[name].written}
        self.originals = self._apart(split, unwritten, eager) if own else set()
        self.captured = {name for piece in split.pieces if piece.capture for name in piece.inputs}
        self.captured -= split.cpu_scalars  # graphs read a copy on the device
        self.read = set(self.captured)
        if not own:
            self.read |= self.returned  # the next graph may read it at that address
        self.live = {name for piece in split.pieces if not piece.capture for name in piece.inputs}
        self.live |= self.returned | split.cpu_scalars
        self.last = {name: piece.index for piece in split.pieces for name in piece.inputs}
        end = len(split.pieces)
        if split.numbers is not None:
            self.live |= set(split.numbers.inputs)
            self.last.update(dict.fromkeys(split.numbers.inputs, end))
        self.last.update(dict.fromkeys(self.returned - self.originals, end))

    def _apart(
        self, split: SplitGraph, names: Iterable[str], makers: Mapping[str, int]
    ) -> set[str]:
        """Those of these names that share memory with no result that another piece makes.

        Such a result lies in the copy, and the caller may write to one and look at the other.
        """
        memory: dict[int, set[int | None]] = {}
        for name in self.returned & split.values.keys():  # numbers lie in no memory
            for key in storages(split.values[name].meta):
                memory.setdefault(key, set()).add(makers.get(name))
        return {
            name
            for name in names
            if all(len(memory[key]) == 1 for key in storages(split.values[name].meta))
        }


@dataclass(frozen=True, eq=False)
class Program:
    """What all recordings of one compiled graph share.

    Attributes:
        split: the split graph.
        step: its generated function, to be bound.
        runnables: the compiled form of each piece.
        boundaries: the registry that it was split by.
        pool: memory and capture stream.
        config: the settings.
        timeline: what was captured, and when.
        frozen: the last inputs, where they are the same objects in all calls.
    """

    split: SplitGraph
    step: Step
    runnables: Sequence[Runnable]
    boundaries: Boundaries
    pool: GraphPool
    config: CompilationConfig
    timeline: Timeline
    frozen: Frozen

    def is_frozen(self, position: int) -> bool:
        """Whether an input is the same object in all calls, which somebody else keeps."""
        return position >= len(self.split.inputs) - self.frozen.count

    @cached_property
    def calls(self) -> dict[int, Call]:
        """How the eager pieces are called at replay, by index."""
        return {
            piece.index: call_of(
                piece, self.runnables[piece.index], self.boundaries, self.split.device
            )
            for piece in self.split.pieces
            if not piece.capture
        }

    @cached_property
    def traced(self) -> TracedOutputs:
        """Compares the results of custom ops with what was traced."""
        return TracedOutputs(self.split)

    @cached_property
    def said(self) -> dict[int, str]:
        """What the eager pieces run, in a word or two, by index; that of sizes past the end."""
        numbers = [] if self.split.numbers is None else [self.split.numbers]
        return {each.index: said(each) for each in (*self.split.pieces, *numbers)}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Of the inputs, by name."""
        return {each.name: position for position, each in enumerate(self.split.inputs)}

    @cached_property
    def cpu_scalars(self) -> dict[int, tuple[int, ...]]:
        """Which inputs of each captured piece are copies of 0-dim CPU tensors, by index."""
        return cpu_scalars(self.split)

    @cached_property
    def written(self) -> dict[int, list[str]]:
        """The names of the inputs that eager pieces write, by index."""
        pieces = self.split.pieces
        return {each.index: written_inputs(each) for each in pieces if not each.capture}

    @cached_property
    def written_positions(self) -> tuple[int, ...]:
        """Of the inputs that some piece writes."""
        return tuple(p for p, each in enumerate(self.split.inputs) if each.written)

    @cached_property
    def uses(self) -> tuple[Uses, Uses]:
        """Who uses each value: with a context of the caller's, with one of our own."""
        return Uses(self.split, False), Uses(self.split, True)

    @cached_property
    def with_rows(self) -> frozenset[str]:
        """The values that eager pieces leave which have a row for each row of the batch."""
        rows = _rows(self.split, self.config.capture_dim)
        eager = [each for each in self.split.pieces if not each.capture]
        names = {n for each in eager for n in (*each.outputs, *self.written[each.index])}
        return frozenset(name for name in names if rows in self._first_dim(name))

    def _first_dim(self, name: str) -> list[sympy.Expr]:
        meta = self.split.values[name].meta
        sizes = meta.shape[:1] if isinstance(meta, torch.Tensor) else ()
        return [self.split.symbols.number(size) for size in sizes]


def _rows(split: SplitGraph, wanted: str | None) -> sympy.Expr | None:
    """The symbol of the rows of a batch, where it is plain which dimension that is."""
    dims = [name for name, dim in split.symbols.dims.items() if wanted in (None, dim)]
    if len(dims) != 1:
        return None
    found = [each.meta for each in split.inputs if each.name in dims]
    return split.symbols.number(found[0]) if found else None


def cpu_scalars(split: SplitGraph) -> dict[int, tuple[int, ...]]:
    """Which inputs of each captured piece are copies of 0-dim CPU tensors, by index."""
    return {
        piece.index: places
        for piece in split.pieces
        if piece.capture
        and (places := tuple(k for k, n in enumerate(piece.inputs) if n in split.cpu_scalars))
    }


def taking_cpu_scalars(split: SplitGraph, runnables: Sequence[Runnable]) -> list[Runnable]:
    """Return what runs each piece, with 0-dim CPU tensors copied to the device first."""
    made = list(runnables)
    for index, places in cpu_scalars(split).items():
        made[index] = _taking(runnables[index], places, split.device)
    return made


def _taking(run: Runnable, places: Sequence[int], device: torch.device) -> Runnable:
    def moving(*given: Any) -> Any:
        args = list(given)
        for place in places:
            args[place] = moved(args[place], device)
        return run(*args)

    return moving
