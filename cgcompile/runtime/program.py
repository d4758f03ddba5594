"""What the recordings of one compiled graph share, worked out once: :class:`Program`.

Most eager pieces are one call of an op. Calling the op itself, with its arguments bound, costs half
of what the piece's generated code costs; and an entry of the registry may name a function of its
own, which skips the dispatcher as well: :func:`_eager_call`.

Note [Traced layouts]
A piece is compiled for the strides of its fake inputs, and the code of Inductor asserts them. The
piece before it may return others. An eager one: those of the kernel that the settings of the moment
choose (``sdpa_kernel``), or of a custom op whose fake implementation differs. A compiled one: those
of a decomposition, which differ from eager's (``torch.cat`` with an empty tensor). The rule: a
result reaches compiled pieces in the layout of its fake value (:class:`TracedLayout`), as a copy if
necessary, in plain steps, captures and replays alike. In a replay of an eager piece the bridge is
that copy.

Note [Rows of a batch]
A forward context tells how many rows of a batch are real (``num_unpadded_tokens``), not which
dimension they are. Rows are leading dimensions. The rule of :class:`BatchRows`, in this order:

* The leading dimension is the dynamic size that ``capture_dim`` names; else the only dynamic size;
  else the only one that is a leading dimension of an input. In this call it must be as large as the
  batch.
* In a trace without such a size, inputs whose leading dimension is as large as the batch have rows,
  and values with that leading dimension that are computed from values with rows. If another
  dimension of any value, or a dimension of a weight, is as large, the rows are unknown: as many
  heads as rows would look the same.
"""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile.boundaries import Boundaries, target_name
from cgcompile.config import CompilationConfig
from cgcompile.context import unreadable_context
from cgcompile.errors import PieceCompileError
from cgcompile.graphs.arena import dense_order, moved, rows_apart
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.timeline import Timeline
from cgcompile.passes.nodes import (
    COMPUTING,
    dtype_text,
    is_symbolic_number,
    storages,
    symbols_of,
    tensors,
    value,
    written,
    written_storages,
)
from cgcompile.passes.split import Piece, SplitGraph, returned_names, tensor_inputs
from cgcompile.pieces.compilers import Runnable
from cgcompile.pieces.stitch import Step
from cgcompile.runtime.inputs import BoundTensors, input_names
from cgcompile.torch_compat import dynamo, inductor, raw_memory, torch_ops

# ---------------------------------------------------------------- rows of a batch


def mutated_inputs(piece: Piece) -> list[str]:
    """Return the names of the inputs whose memory the graph of a piece mutates."""
    memory = written_storages(piece.module)  # through views as well
    names = zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)
    return [name for name, node in names if not memory.isdisjoint(storages(value(node)))]


class BatchRows:
    """Finds the values with rows of one split graph."""

    def __init__(self, split: SplitGraph, capture_dim: str | None) -> None:
        self._split, self._capture_dim = split, capture_dim
        self._by_number: dict[int, frozenset[str] | None] = {}
        self._by_position: dict[int, frozenset[str]] = {}

    def of_batch(self, rows: int, inputs: Sequence[Any]) -> frozenset[str] | None:
        """Return the names of the values with rows in a call; None if that is unknown."""
        positions = [p for p in self._symbols if inputs[p] == rows]
        if positions:
            if len(positions) > 1:
                return None
            (position,) = positions
            if position not in self._by_position:
                self._by_position[position] = self._with_leading(position)
            return self._by_position[position]
        if rows not in self._by_number:
            self._by_number[rows] = self._computed_from_rows(rows)
        return self._by_number[rows]

    def left(self, rows: int, inputs: Sequence[Any]) -> Mapping[int, Sequence[str]] | None:
        """Return the values with rows that each eager piece leaves for graphs or for the caller.

        By the index of the piece; None if it leaves some, and which have rows is unknown.
        """
        if not any(self._left.values()):
            return {}
        with_rows = self.of_batch(rows, inputs)
        if with_rows is None:
            return None
        return {
            index: [name for name in names if name in with_rows]
            for index, names in self._left.items()
        }

    @cached_property
    def mutated(self) -> dict[int, list[str]]:
        """The names of the inputs that eager pieces mutate, by index."""
        pieces = self._split.pieces
        return {piece.index: mutated_inputs(piece) for piece in pieces if not piece.capture}

    @cached_property
    def _symbols(self) -> list[int]:
        """The positions of the numbers among the inputs that may count the rows."""
        split, number = self._split, self._split.symbols.number
        dims = split.symbols.dims
        named = [p for p, v in enumerate(split.inputs) if v.name in dims]
        if self._capture_dim is not None:
            named = [p for p in named if dims[split.inputs[p].name] == self._capture_dim]
        if len(named) <= 1:
            return named
        leading = {
            number(v.meta.shape[0])
            for v in split.inputs
            if isinstance(v.meta, torch.Tensor) and v.meta.dim() and not v.static
        }
        return [p for p in named if number(split.inputs[p].meta) in leading]

    @cached_property
    def _left(self) -> dict[int, list[str]]:
        """The tensors in memory of the step that eager pieces leave, by the index of the piece."""
        split = self._split
        read = {name for piece in split.pieces if piece.capture for name in piece.inputs}
        read |= set(returned_names(split))
        known = storages([v.meta for v in split.inputs])
        return {
            piece.index: [
                name
                for name in dict.fromkeys((*piece.outputs, *self.mutated[piece.index]))
                if (name in read or name not in piece.outputs)
                and isinstance(split.values[name].meta, torch.Tensor)
                and split.values[name].meta.dim()
                and known.isdisjoint(storages(split.values[name].meta))
            ]
            for piece in split.pieces
            if not piece.capture
        }

    def _with_leading(self, position: int) -> frozenset[str]:
        split = self._split
        rows: sympy.Expr = split.symbols.number(split.inputs[position].meta)
        return frozenset(
            name
            for name, v in split.values.items()
            if isinstance(v.meta, torch.Tensor)
            and any(split.symbols.number(size) == rows for size in v.meta.shape[:1])
        )

    def _computed_from_rows(self, rows: int) -> frozenset[str] | None:
        """Return the values with rows of a trace in which their number is a constant."""
        split = self._split
        if any(_elsewhere(fake, rows) for fake in self._fakes()):
            return None
        if any(v.static and _is_leading(v.meta, rows) for v in split.inputs):
            return None
        marked = {v.name for v in split.inputs if _is_leading(v.meta, rows)}
        if not marked:
            return None
        for piece in split.pieces:
            marked |= self._marked_by(piece, marked, rows)
        return frozenset(marked)

    def _fakes(self) -> Iterator[Any]:
        yield from (v.meta for v in self._split.values.values())
        for piece in self._split.distinct:
            yield from (value(node) for node in piece.module.graph.nodes)

    def _marked_by(self, piece: Piece, marked: set[str], rows: int) -> set[str]:
        """Return the results of a piece, and the inputs that it writes, that have rows."""
        graph = piece.module.graph
        placeholders = list(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
        nodes = {node for node, name in placeholders if name in marked}
        for node in graph.nodes:
            if node.op in COMPUTING and not nodes.isdisjoint(node.all_input_nodes):
                candidates = (node, *written(piece.module, node))
                nodes |= {other for other in candidates if _is_leading(value(other), rows)}
        (results,) = graph.output_node().args
        assert isinstance(results, (tuple, list))
        pairs = [*placeholders, *zip(results, piece.outputs, strict=True)]
        return {name for node, name in pairs if node in nodes}


def _is_leading(meta: Any, rows: int) -> bool:
    """Return whether a size is the leading one of a tensor, or of all tensors in a container."""
    shapes = [fake.shape for fake in tensors(meta)]
    return bool(shapes) and all(
        len(shape) > 0 and type(shape[0]) is int and shape[0] == rows for shape in shapes
    )


def _elsewhere(meta: Any, rows: int) -> bool:
    """Return whether a dimension that is not the leading one has this size."""
    sizes = (size for fake in tensors(meta) for size in fake.shape[1:])
    return any(type(size) is int and size == rows for size in sizes)


def zeroing(piece: Piece, run: Runnable, names: Collection[str], real: int) -> Runnable:
    """Return ``run`` of an eager piece, which then zeroes the padding rows of these values."""
    items = [item for item, name in enumerate(piece.outputs) if name in names]
    positions = [position for position, name in enumerate(piece.inputs) if name in names]

    def zeroed(*inputs: Any) -> Sequence[Any]:
        outputs = run(*inputs)
        tensors = [outputs[item] for item in items] + [inputs[position] for position in positions]
        for tensor in tensors:
            if rows_apart(tensor):  # if rows overlap, zeroing padding would overwrite real rows
                tensor[real:].zero_()
        return outputs

    return zeroed if items or positions else run


_UNUSUAL = 1009  # the first of the sizes that stand for symbols


# ---------------------------------------------------------------- traced layouts


class TracedLayout:
    """The strides of a fake tensor, for all sizes that it may have."""

    def __init__(self, fake: torch.Tensor, numbers: Callable[[Any], Any]) -> None:
        sizes, strides = [*map(numbers, fake.shape)], [*map(numbers, fake.stride())]
        symbols = sorted(symbols_of(fake), key=str)
        # A layout that is right for unusual sizes is right for all sizes.
        unusual = {symbol: _UNUSUAL + 2 * index for index, symbol in enumerate(symbols)}
        plain = [number.subs(unusual) for number in (*sizes, *strides)]
        self.is_known = all(number.is_integer and number.is_number for number in plain)
        if not self.is_known:
            return
        shape, steps = [*map(int, plain[: len(sizes)])], [*map(int, plain[len(sizes) :])]
        self._dims, self._order = len(shape), dense_order(shape, steps)
        self.is_contiguous = self._order == tuple(range(len(shape)))
        own = {size: dim for dim, size in enumerate(sizes) if size in symbols}
        apart = all(step for size, step in zip(shape, steps, strict=True) if size != 1)
        needed = set().union(*(stride.free_symbols for stride in strides))
        self.is_known = self._order is not None or (apart and own.keys() >= needed)

        @lru_cache(maxsize=128)
        def strides_for(shape: torch.Size) -> tuple[int, ...]:
            values = {size: shape[dim] for size, dim in own.items()}
            return tuple([int(stride.subs(values)) for stride in strides])

        self._strides_for = strides_for

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the layout; strides of dimensions of size 1 do not count."""
        if self.is_contiguous or tensor.dim() != self._dims:
            return tensor.is_contiguous() or tensor.dim() != self._dims
        if self._order is not None:
            return tensor.permute(self._order).is_contiguous()
        strides = self._strides_for(tensor.shape)
        if tensor.stride() == strides or not tensor.numel():
            return True
        dims = zip(tensor.shape, tensor.stride(), strides, strict=True)
        return all(size == 1 or stride == traced for size, stride, traced in dims)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in the layout."""
        if self._order is not None:
            inverse = sorted(range(self._dims), key=self._order.__getitem__)
            return tensor.permute(self._order).contiguous().permute(inverse)
        strides = self._strides_for(tensor.shape)
        return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


Layouts = Mapping[int, TracedLayout]
"""By the position of an output of a piece."""


def traced_layouts(split: SplitGraph) -> dict[int, Layouts]:
    """Return the layouts of results that compiled pieces read, by the piece that returns them."""
    read = {name for piece in split.pieces if piece.compiled for name in piece.inputs}
    returned = set(returned_names(split))
    by_piece: dict[int, Layouts] = {}
    for piece in split.pieces:
        if read.isdisjoint(piece.outputs):
            continue
        layouts = {
            item: TracedLayout(split.values[name].meta, split.symbols.number)
            for item, name in enumerate(piece.outputs)
            if name in read and _may_be_copied(split, piece, name, returned)
        }
        by_piece[piece.index] = {item: known for item, known in layouts.items() if known.is_known}
    return {index: layouts for index, layouts in by_piece.items() if layouts}


def _may_be_copied(split: SplitGraph, piece: Piece, name: str, returned: set[str]) -> bool:
    """Return whether a result may be copied: no other value has to share its memory."""
    result = split.values[name]
    if not isinstance(result.meta, torch.Tensor) or not raw_memory.is_plain_tensor(result.meta):
        return False
    if result.meta.is_conj() or result.meta.is_neg() or result.meta.layout is not torch.strided:
        return False
    memory = storages(result.meta)
    inputs = storages([split.values[input_name].meta for input_name in piece.inputs])
    if not memory or not memory.isdisjoint(inputs):
        return False
    owners = Counter(key for other in piece.outputs for key in storages(split.values[other].meta))
    alone = all(owners[key] == 1 for key in memory)
    return alone or not (result.mutated or name in returned)


def in_traced_layouts(outputs: Sequence[Any], layouts: Layouts) -> Sequence[Any]:
    """Return the results of a piece, copied where they have another layout than traced."""
    for item, layout in layouts.items():
        output = outputs[item]
        if isinstance(output, torch.Tensor) and not layout.fits(output):
            outputs = list(outputs)
            outputs[item] = layout.copied(output)
    return outputs


def returning_traced_layouts(split: SplitGraph, runnables: Sequence[Runnable]) -> list[Runnable]:
    """Return the functions of the pieces; results have the layouts that compiled pieces expect."""
    wrapped = list(runnables)
    for index, layouts in traced_layouts(split).items():
        wrapped[index] = _returning(runnables[index], layouts)
    return wrapped


def _returning(run: Runnable, layouts: Layouts) -> Runnable:
    def checked(*inputs: Any) -> Sequence[Any]:
        outputs = run(*inputs)
        for item in contiguous:  # the usual layout, at each replay of an eager piece
            output = outputs[item]
            if isinstance(output, torch.Tensor) and not output.is_contiguous():
                return in_traced_layouts(outputs, layouts)
        return in_traced_layouts(outputs, others) if others else outputs

    contiguous = [item for item, layout in layouts.items() if layout.is_contiguous]
    others = {item: layout for item, layout in layouts.items() if not layout.is_contiguous}
    return checked


_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)
_NAMESPACES_OF_TORCH = ("aten", "prims", "prim")


# ---------------------------------------------------------------- calls of eager pieces


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
    overloads = torch_ops.op_overloads(node.target)  # a packet finds its overload at every call
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


def _passed_over(run: Runnable, boundaries: Boundaries) -> Runnable:
    """Return ``run`` for a FULL capture, which looks at ops for memory that they touch."""

    # An op under a dispatch mode takes 20 us and more on the host.
    def passed_over(*inputs: Any) -> Any:
        mode = torch_ops.top_mode()
        if not (isinstance(mode, torch_ops.DispatchMode) and mode.passes_over(inputs, boundaries)):
            return run(*inputs)
        mode.switch_off()
        try:
            return run(*inputs)
        finally:
            mode.switch_on()

    return passed_over


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
    """The users of each value of a PIECEWISE step, by name, without the piece that makes it."""

    def __init__(self, split: SplitGraph, own: bool) -> None:  # own: results are copied
        eager = [piece for piece in split.pieces if not piece.capture]
        sources = {name: piece.index for piece in eager for name in piece.outputs}
        self.returned = set(returned_names(split)) - {""}
        # Results that the caller gets without a copy, also where graphs read a copy: no op mutates
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
        # The caller may write to one of two such results and read the other: both are in one copy.
        memory: dict[int, set[int | None]] = {}
        for name in self.returned & split.values.keys():  # numbers have no memory
            for key in storages(split.values[name].meta):
                memory.setdefault(key, set()).add(sources.get(name))
        return {
            name
            for name in names
            if all(len(memory[key]) == 1 for key in storages(split.values[name].meta))
        }


# ---------------------------------------------------------------- the program


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
    def reads_more(self) -> frozenset[int]:
        """The captured pieces that may read or write memory beside their inputs and results."""
        # What ops of torch read and write is an input of the piece, or its own. A compiler or a
        # pass of the user may use what a graph does not show, as a workspace.
        compiler, options = self.config.first_compiler, dict(self.config.inductor_options)
        has_passes = compiler == "inductor" and inductor.has_users_passes(options)
        pieces = [piece for piece in self.split.pieces if piece.capture]
        if not (callable(compiler) or has_passes):
            pieces = [piece for piece in pieces if _calls_users_code(piece.module)]
        return frozenset([piece.index for piece in pieces])

    @cached_property
    def _inside(self) -> list[Runnable]:
        return [
            _passed_over(run, self.boundaries)
            if piece.capture and piece.index not in self.reads_more
            else run
            for piece, run in zip(self.split.pieces, self.runnables, strict=True)
        ]

    @cached_property
    def run_in_capture(self) -> Callable[..., Any]:
        """The step, for a capture by other code."""
        return self.step.bind(self._inside)

    @cached_property
    def run_full(self) -> Callable[..., Any]:
        """The step, for a FULL capture; compared as a warming step is."""
        return self.traced.comparing_step(self.step, self._inside, self.run_in_capture)

    @cached_property
    def labels(self) -> dict[int, str]:
        """The labels of the pieces, by index; returned sizes past the end."""
        numbers = [] if self.split.numbers is None else [self.split.numbers]
        return {piece.index: _label(piece) for piece in (*self.split.pieces, *numbers)}

    @cached_property
    def input_names(self) -> list[str]:
        """The names of inputs, for messages."""
        return input_names(self.split.inputs)

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
    def dynamic_positions(self) -> tuple[int, ...]:
        """The positions of the inputs that may be other objects in each step."""
        inputs = enumerate(self.split.inputs)
        return tuple(p for p, v in inputs if not (v.static and isinstance(v.meta, torch.Tensor)))

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
