"""The split of a graph as immutable data: :class:`SplitGraph`, and :func:`cut`, which makes it.

``cgcompile/pieces`` compiles it. The printed form is stable, ASCII, free of paths and of names that
torch invents: snapshots, logs and ``explain`` use it. Sizes are ``s0``, ``s1``, ... in the order of
the inputs; the bytes of a value are followed by those of its storage where a view keeps more memory
alive than it shows.

:func:`cut` takes a graph whose nodes carry a placement. Each piece takes the values of other pieces
as inputs (sizes first, then in order of use) and always returns a tuple; arithmetic on sizes is
repeated in each piece that needs it; autocast and grad mode are entered at the start of each piece
and left at its end. Pieces of equal structure share one ``GraphModule``.

Note [Own splitter]. ``torch.fx.passes.split_module`` does most of this, but it leaves grad mode
changed between pieces, fails on an unbacked symbol without a binding node, returns a bare value for
a single output on torch 2.11, and makes one GraphModule a piece, equal or not.

Note [Text of a graph]. Equal texts mean: the same ops in the same order on the same arguments,
inputs of equal dtype, device, size, stride and offset, and the same inputs sharing memory. Names of
nodes are left out. Parameters are inputs of a piece, so all middle layers of a decoder have one
text, and are compiled once. There are two kinds:

* of one process: symbols keep their names, and an object without a lasting name is represented by
  its address, so texts are compared while their graphs live. Any graph has such a text.
* lasting: the same in every process, for cache keys. It has no address, hash seed or path, symbols
  are numbered in order of appearance, constants are hashed, and the results of calls are included,
  because another process may have another fake of a custom op. Where that is impossible,
  :class:`Unnameable` is raised.
"""

import enum
import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from cgcompile.boundaries import AttentionCGSupport, SplittingOp
from cgcompile.counts import count
from cgcompile.passes.assign import PLACEMENT, Placement, graph_device, placement
from cgcompile.passes.base import Fusions, PassRecord, table
from cgcompile.passes.nodes import (
    NUMBER,
    SourceLine,
    Symbols,
    attribute,
    bound_symbols,
    dotted_source,
    dtype_text,
    grad_mode_around,
    identifier,
    is_cpu_scalar,
    is_number_tensor,
    is_size_arithmetic,
    is_symbolic_number,
    on_device,
    outreached_storages,
    runs_once_on_host,
    storages,
    symbols_of,
    tensors,
    user_line,
    value,
    written_storages,
)
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import dynamo, expressions, inductor, raw_memory, torch_ops


@dataclass(frozen=True, eq=False)
class Value:
    """Something that the caller passes or that crosses between pieces.

    Attributes:
        name: a valid Python identifier, unique in the graph; the one in the generated code.
        meta: the fake tensor, symbolic number or constant that was traced.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: its address is fixed: a parameter, a buffer or a module attribute.
        mutated: some node writes the memory that it is in, before or after, as far as the graph
            shows, or reads it beyond the value itself: a copy will not do. When in doubt, yes.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> [value.static for value in split.inputs]
        [True, True, False]
    """

    name: str
    meta: Any
    source: str | None = None
    static: bool = False
    mutated: bool = False


@dataclass(frozen=True, eq=False)
class Piece:
    """One submodule of a split graph: a function from its inputs to a tuple of outputs.

    Attributes:
        index: position in the order of execution.
        module: the FX module; the same object for pieces of equal structure.
        capture: whether CUDA graphs may hold it; otherwise it runs eager.
        why: why it runs eager, one entry per distinct reason; empty if it is captured.
        compiled: whether the compiler of pieces gets it.
        uncompiled: why a captured piece is not compiled, or None.
        inputs: names of the values that ``module`` takes, in order.
        outputs: names of the values that it returns, in order.
        num_ops: nodes that compute.
        lines: the user's source lines, of the boundary or of the first node.
        op: the entry of the splitting op that it begins with, or None.
        same_as: index of the first piece of equal structure; its own index if it is the first.
        support: how far it can go into a FULL graph; ALWAYS for a captured piece.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> split.pieces[0].capture, split.pieces[0].num_ops
        (True, 1)
    """

    index: int
    module: fx.GraphModule
    capture: bool
    why: tuple[Fallback, ...]
    compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_ops: int
    same_as: int
    support: AttentionCGSupport
    uncompiled: str | None = None
    lines: tuple[SourceLine, ...] = ()
    op: SplittingOp | None = None

    @property
    def name(self) -> str:
        return f"piece_{self.index}"

    @property
    def where(self) -> str:
        """The user's line, for messages."""
        return self.lines[0][0] if self.lines else "an unknown line"


def tensor_inputs(piece: Piece) -> dict[int, str]:
    """Return the names of the inputs that the module of a piece takes as tensors, by position."""
    fakes = map(value, piece.module.graph.find_nodes(op="placeholder"))
    pairs = enumerate(zip(piece.inputs, fakes, strict=True))
    return {p: name for p, (name, fake) in pairs if isinstance(fake, torch.Tensor)}


@dataclass(frozen=True, eq=False)
class SplitGraph:
    """A graph, cut at its boundaries; immutable.

    Attributes:
        pieces: in order of execution.
        inputs: the values that the caller passes, in order.
        values: every named value, inputs included.
        constants: tensors that the graph holds as attributes, by name.
        numbers: a piece that computes sizes which the caller gets back; None if there are none.
        result: what the caller gets, with a :class:`Value` for each node.
        symbols: the sizes, and what the traced code demands of them.
        device: where most values are; the CPU only if all are there.
        cpu_scalars: names of the 0-dim CPU tensors, and of Python numbers, that captured pieces
            read as tensors on ``device``: the modules of these pieces were traced with a copy
            there, filled before each run.
        graph_break: why Dynamo ended the graph early, or None.
        differentiable: whether any node runs in the caller's grad mode; False if the model turns
            gradients off for all of it.
        sets_grad_mode: whether pieces switch grad mode, and back.
        passes: what each pass did, in order, those over pieces last; not in the printed form.
        fusions: which attention became the op of ``decode_attention``, and why other attention
            did not; not in the printed form.

    Example:
        >>> split = cgcompile.explain(nn.Linear(8, 8), torch.randn(4, 8)).split
        >>> len(split.pieces)
        1
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[Value, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Any]
    numbers: Piece | None
    result: Any
    symbols: Symbols
    device: torch.device
    cpu_scalars: frozenset[str] = frozenset()
    graph_break: str | None = None
    differentiable: bool = True
    sets_grad_mode: bool = False
    passes: tuple[PassRecord, ...] = ()
    fusions: Fusions = field(default_factory=Fusions)

    def __repr__(self) -> str:
        captured = sum(piece.capture for piece in self.pieces)
        return f"<SplitGraph: {count(len(self.pieces), 'piece')}, {captured} captured>"

    @property
    def distinct(self) -> tuple[Piece, ...]:
        """The first piece of each structure."""
        return tuple(piece for piece in self.pieces if piece.same_as == piece.index)

    def crossing(self) -> tuple[Value, ...]:
        """Return the values that one piece makes and another piece or the caller uses."""
        return tuple(self.values[name] for piece in self.pieces for name in piece.outputs)

    def crossing_bytes(self) -> sympy.Expr:
        """Return the bytes of storage behind all crossing values, each storage counted once."""
        sizes: dict[int, sympy.Expr] = {}
        for crossing in self.crossing():
            sizes.update(map(self.symbols.storage, tensors(crossing.meta)))
        return sum(sizes.values(), sympy.Integer(0))

    def text(self, *, lines: bool = True) -> str:
        """Return the stable printed form; ``lines=False`` leaves out line numbers."""
        captured = sum(piece.capture for piece in self.pieces)
        rows = [
            f"{count(len(self.pieces), 'piece')}: {captured} captured, "
            f"{len(self.pieces) - captured} eager; {len(self.distinct)} distinct; "
            f"{self.symbols.pretty(self.crossing_bytes())} B cross"
        ]
        if self.symbols.dims:
            sizes = (f"{name} = {dim}" for name, dim in self.symbols.dims.items())
            rows.append(f"sizes: {', '.join(sizes)}")
        rows += [self._piece_text(piece, lines) for piece in self.pieces]
        if self.numbers is not None:
            rows.append(f"sizes returned: {', '.join(self.numbers.outputs)}")
        if self.graph_break is not None:
            rows.append(f"ended by a graph break: {self.graph_break if lines else '...'}")
        return "\n".join(rows)

    def passes_text(self, *, seconds: bool = True) -> str:
        """Return a table of :attr:`passes`, a line each; ``seconds=False`` leaves out the times."""
        return table(self.passes, seconds=seconds)

    def _piece_text(self, piece: Piece, lines: bool) -> str:
        kind = "captured" if piece.capture else "eager   "
        row = f"{piece.name}  {kind}  {count(piece.num_ops, 'op')}"
        if piece.same_as != piece.index:
            row += f", same as piece_{piece.same_as}"
        if piece.compiled and not piece.capture:
            row += ", compiled on its own"
        if piece.uncompiled is not None:
            row += f", left uncompiled: {piece.uncompiled}"
        rows = [row, *(f"  why  {why}" for why in piece.why)]
        shown = piece.lines[: 1 if piece.capture else 3]
        rows += [f"  at   {f'{where}: ' if lines else ''}{code}" for where, code in shown]
        if len(piece.lines) > 3 and not piece.capture:
            rows.append(f"  at   {len(piece.lines) - 3} more lines")
        rows.append(f"  in   {self._values_text(piece.inputs)}")
        rows.append(f"  out  {self._values_text(piece.outputs)}")
        return "\n".join(rows)

    def _values_text(self, names: Iterable[str]) -> str:
        values = [self.values[name] for name in names]
        texts = [self._value_text(value) for value in values if not value.static]
        static = [value.meta for value in values if value.static]
        if static:
            sizes = (self.symbols.nbytes(t) for t in static if isinstance(t, torch.Tensor))
            total = self.symbols.pretty(sum(sizes, start=0))
            texts.append(f"{len(static)} static {total} B")
        return ", ".join(texts) or "-"

    def _value_text(self, value: Value) -> str:
        if not isinstance(value.meta, torch.Tensor):
            return value.name
        own, (_, storage) = self.symbols.nbytes(value.meta), self.symbols.storage(value.meta)
        size = self.symbols.pretty(storage)
        if not (own - storage).is_nonnegative:  # an expanded tensor has more elements than memory
            size = f"{self.symbols.pretty(own)} of {size}"
        return f"{value.name} {self.symbols.shape_text(value.meta)} {size} B"

    def __str__(self) -> str:
        return self.text()


def split_data(split: SplitGraph) -> dict[str, Any]:
    """Return a split as plain data."""
    return {
        "device": str(split.device),
        "sizes": {name: str(dim) for name, dim in split.symbols.dims.items()},
        "crossing_bytes": split.symbols.pretty(split.crossing_bytes()),
        "graph_break": split.graph_break,
        "pieces": [
            {
                "name": piece.name,
                "captured": piece.capture,
                "compiled": piece.compiled,
                "same_as": f"piece_{piece.same_as}",
                "support": piece.support.name,
                "num_ops": piece.num_ops,
                "why": [{"reason": why.reason.value, "detail": why.detail} for why in piece.why],
                "lines": [line._asdict() for line in piece.lines],
                "inputs": list(piece.inputs),
                "outputs": list(piece.outputs),
            }
            for piece in split.pieces
        ],
    }


def returned_names(split: SplitGraph) -> list[str]:
    """Return the name of each leaf of the result; '' for a leaf that is a constant."""
    return [getattr(leaf, "name", "") for leaf in torch_ops.tree_leaves(split.result)]


# ---------------------------------------------------------------- the cut


def cut(gm: fx.GraphModule) -> SplitGraph:
    """Return the split of a graph by the placements of its nodes; ``gm`` is not changed."""
    return _Cutter(gm).split()


@dataclass(frozen=True)
class _State:
    """The state that toggling nodes have set at some point of the graph."""

    entered: tuple[fx.Node, ...]  # the contexts that are open, by the nodes that entered them
    grad: bool | None  # grad mode as the graph set it; None if it never does

    def allows_gradients(self) -> bool:
        """Return whether a result may need gradients, if the caller's grad mode is on."""
        inference = any(enter.target is torch_ops.ENTER_INFERENCE_MODE for enter in self.entered)
        return self.grad is not False and not inference


class _Cutter:
    """Builds the pieces of a split from the placements of one graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._bound = bound_symbols(gm)
        self._device = graph_device(gm)
        self._cpu_scalars: set[str] = set()  # CPU scalars that captured pieces read
        self._grad_outside = grad_mode_around(gm)
        self._members: dict[int, list[fx.Node]] = {}
        self._before: dict[int, _State] = {}
        self._after: dict[int, _State] = {}
        self._differentiable = False
        self._walk()
        self._written = written_storages(gm) | outreached_storages(gm)
        self._names = self._name_everything()
        self._modules: dict[Hashable, tuple[int, fx.GraphModule]] = {}

    def _walk(self) -> None:
        """Collect the nodes of each piece, and the state before and after it."""
        state = _State((), self._grad_outside)
        for node in self._gm.graph.nodes:
            assigned = placement(node)
            if assigned is None:
                continue
            self._members.setdefault(assigned.piece, []).append(node)
            self._before.setdefault(assigned.piece, state)
            if node.target in torch_ops.LEAVES:
                state = _State((*state.entered, node), state.grad)
            elif node.target in torch_ops.LEAVES.values():
                rest = tuple(enter for enter in state.entered if enter is not node.args[0])
                state = _State(rest, state.grad)
            elif node.target is torch_ops.SET_GRAD_ENABLED:
                state = _State(state.entered, bool(node.args[0]))
            elif not runs_once_on_host(node):
                self._differentiable |= state.allows_gradients()
            self._after[assigned.piece] = state

    def _name_everything(self) -> dict[fx.Node, str]:
        # The generated step calls pieces by these names; no value may hide one.
        taken = {"step", "returned_sizes", *(f"piece_{index}" for index in self._members)}
        names: dict[fx.Node, str] = {}
        for node in self._bound.values():
            names[node] = identifier(f"s{len(names)}", taken)
        for node in self._gm.graph.nodes:
            if node not in names and node.op != "output":
                source = dotted_source(node) if node.op == "placeholder" else None
                names[node] = identifier(source or node.name, taken)
        return names

    def split(self) -> SplitGraph:
        pieces = tuple(self._piece(index, members) for index, members in self._members.items())
        inputs = tuple(self._value(n) for n in self._gm.graph.find_nodes(op="placeholder"))
        computed = [self._value(n) for members in self._members.values() for n in members]
        crossing = {name for piece in pieces for name in piece.outputs}
        constants = self._constants()
        values = {v.name: v for v in (*inputs, *(v for v in computed if v.name in crossing))}
        for name, constant in constants.items():
            values[name] = Value(name, constant, source=name, static=True)
        output = self._gm.graph.output_node().args[0]
        return SplitGraph(
            pieces=pieces,
            inputs=inputs,
            values=values,
            constants=constants,
            numbers=self._returned_sizes(),
            result=self._result(output),
            symbols=Symbols(self._gm),
            device=self._device,
            cpu_scalars=frozenset(self._cpu_scalars),
            graph_break=dynamo.graph_break(self._gm),
            differentiable=self._differentiable,
            sets_grad_mode=self._grad_outside is not None,
        )

    def _result(self, output: Any) -> Any:
        """Return the result of the graph, with a Value for each node."""
        if isinstance(output, fx.Node):
            return self._value(output)
        if isinstance(output, (tuple, list)):
            return tuple(self._result(item) for item in output)
        return output

    def _value(self, node: fx.Node) -> Value:
        is_input = node.op == "placeholder"
        return Value(
            self._names[node],
            value(node),
            dotted_source(node) if is_input else None,
            is_input and dynamo.is_static_input(node),
            not self._written.isdisjoint(storages(value(node))),
        )

    def _constants(self) -> dict[str, Any]:
        nodes = self._gm.graph.find_nodes(op="get_attr")
        constants = {self._names[node]: attribute(self._gm, node) for node in nodes}
        return {k: v for k, v in constants.items() if not isinstance(v, fx.GraphModule)}

    def _returned_sizes(self) -> Piece | None:
        """Return a piece that computes the sizes which the caller gets, or None."""
        output = self._gm.graph.output_node()
        sizes = [n for n in output.all_input_nodes if is_size_arithmetic(n, self._bound.keys())]
        if not sizes:
            return None
        state = _State((), self._grad_outside)
        graph, inputs = self._graph([], sizes, state, state)
        return Piece(
            index=len(self._members),
            module=fx.GraphModule(self._gm, graph, class_name="Sizes"),
            capture=False,
            why=(Fallback(Reason.NO_KERNEL, "arithmetic on sizes"),),
            compiled=False,
            inputs=inputs,
            outputs=tuple(self._names[node] for node in sizes),
            num_ops=len(sizes),
            same_as=len(self._members),
            support=AttentionCGSupport.ALWAYS,
        )

    def _piece(self, index: int, members: list[fx.Node]) -> Piece:
        placements: dict[fx.Node, Placement] = {node: node.meta[PLACEMENT] for node in members}
        first = placements[members[0]]
        outputs = [n for n in members if self._is_output(n, index)]
        state = self._before[index], self._after[index]
        graph, inputs = self._graph(members, outputs, *state)
        if first.capture:
            self._take_scalars_on_device(graph, inputs)
        key = (first.capture, first.compiled, GraphText(lasting=False).of(self._gm, graph))
        if key not in self._modules:
            self._modules[key] = (index, fx.GraphModule(self._gm, graph, class_name="Piece"))
        same_as, module = self._modules[key]
        causes = [n for n, p in placements.items() if p.why and p.why.reason not in _SECONDARY]
        lines = map(user_line, causes or members)
        return Piece(
            index=index,
            module=module,
            capture=first.capture,
            why=_distinct(p.why for p in placements.values()),
            compiled=first.compiled,
            uncompiled=first.uncompiled,
            inputs=inputs,
            outputs=tuple(self._names[node] for node in outputs),
            num_ops=len(members),
            lines=tuple(dict.fromkeys(line for line in lines if line is not None)),
            same_as=same_as,
            support=min(p.support for p in placements.values()),
            op=next((p.op for p in placements.values() if p.why is not None), None),
        )

    def _is_output(self, node: fx.Node, index: int) -> bool:
        """Return whether something outside of the piece uses the node's value."""
        if node.target in torch_ops.LEAVES:
            return False
        return any(
            user.op == "output" or ((p := placement(user)) is not None and p.piece != index)
            for user in node.users
        )

    def _graph(
        self,
        members: list[fx.Node],
        outputs: list[fx.Node],
        before: _State,
        after: _State,
    ) -> tuple[fx.Graph, tuple[str, ...]]:
        """Return the graph of a piece, and the names of its inputs."""
        foreign, floating, bodies = self._needs(members, outputs)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in foreign:
            copies[node] = graph.placeholder(self._names[node])
            copies[node].meta = node.meta.copy()
        for node in (*bodies, *floating):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for enter in before.entered:
            copies[enter] = graph.node_copy(enter)
        if before.grad != self._grad_outside:
            graph.call_function(torch_ops.SET_GRAD_ENABLED, (before.grad,))
        for node in members:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for enter in reversed(after.entered):
            graph.call_function(torch_ops.LEAVES[enter.target], (copies[enter],))
        if after.grad != self._grad_outside:
            graph.call_function(torch_ops.SET_GRAD_ENABLED, (self._grad_outside,))
        graph.output(tuple(copies[node] for node in outputs))
        return graph, tuple(self._names[node] for node in foreign)

    def _take_scalars_on_device(self, graph: fx.Graph, inputs: tuple[str, ...]) -> None:
        """Let a captured piece take its 0-dim CPU tensors as tensors of the device."""
        placeholders = graph.find_nodes(op="placeholder")
        for node, name in zip(placeholders, inputs, strict=True):
            if is_cpu_scalar(value(node), self._device) or NUMBER in node.meta:
                node.meta["example_value"] = on_device(value(node), self._device, self._gm.graph)
                self._cpu_scalars.add(name)
        for node in filter(is_number_tensor, graph.nodes):
            node.meta["example_value"] = on_device(value(node), self._device, self._gm.graph)

    def _needs(
        self, members: list[fx.Node], outputs: list[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return the inputs of a piece: values, floats, bodies of higher-order ops."""
        inside = set(members)
        values: dict[fx.Node, None] = {}
        floating: dict[fx.Node, None] = {}
        bodies: dict[fx.Node, None] = {}

        def use(node: fx.Node) -> None:
            if node in inside or node.target in torch_ops.LEAVES:
                return
            if is_size_arithmetic(node, self._bound.keys()) or is_number_tensor(node):
                for argument in node.all_input_nodes:
                    use(argument)
                floating[node] = None
            elif node.op == "get_attr" and isinstance(attribute(self._gm, node), fx.GraphModule):
                bodies[node] = None
            else:
                values[node] = None

        for node in (*(a for member in members for a in member.all_input_nodes), *outputs):
            use(node)
        symbols = symbols_of(list(map(value, values)))
        sizes = [node for symbol, node in self._bound.items() if symbol in symbols]
        rest = [node for node in values if node not in sizes]
        return [*sizes, *rest], list(floating), list(bodies)


# Reasons that a node has only because of its neighbours, listed after the others.
_SECONDARY = (Reason.UNBACKED_SIZE, Reason.STATE_REGION, Reason.NO_KERNEL)


def _distinct(whys: Iterable[Fallback | None]) -> tuple[Fallback, ...]:
    """Return distinct reasons, causes first; NO_KERNEL only if there is no other."""
    distinct = sorted(
        dict.fromkeys(why for why in whys if why is not None),
        key=lambda why: why.reason in _SECONDARY,
    )
    shown = tuple(why for why in distinct if why.reason is not Reason.NO_KERNEL)
    return shown or tuple(distinct)


# ---------------------------------------------------------------- the text of a graph


_LARGEST_CONSTANT = 1 << 16  # bytes of a tensor that a lasting text hashes
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CONTAINERS = ("tuple", "list", "immutable_list", "dict", "immutable_dict")


class Unnameable(Exception):
    """The reason why a graph has no lasting text; it never reaches a caller of cgcompile."""


class GraphText:
    """Write one graph and the bodies in it as text; see Note [Text of a graph]."""

    def __init__(self, *, lasting: bool) -> None:
        self.devices: set[torch.device] = set()  # devices of all tensors so far
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}  # renamed, in a lasting text
        self._lasting = lasting
        self._inputs = 0
        self._storages: dict[int, int] = {}  # the first input in that memory

    def of(self, owner: torch.nn.Module, graph: fx.Graph, indent: str = "") -> str:
        """Return the text of a graph; ``owner`` has the attributes that its nodes read."""
        rows: list[str] = []
        number: dict[fx.Node, str] = {}
        for node in graph.nodes:
            number[node] = f"%{len(number)}"
            head = f"{indent}{number[node]} = "
            if node.op == "placeholder":
                rows.append(f"{head}input {self._input(value(node))}")
            elif node.op == "get_attr":
                rows.append(head + self._attribute(attribute(owner, node), indent))
            elif node.op == "output":
                rows.append(f"{indent}return {self._argument(node.args[0], number)}")
            else:
                rows.append(head + self._call(node, number))
        return "\n".join(rows)

    def _refuse_lasting(self, reason: str) -> None:
        """Refuse a value whose text is only valid in this process."""
        if self._lasting:
            raise Unnameable(reason)

    # -------------------------------------------------------------- nodes

    def _call(self, node: fx.Node, number: dict[fx.Node, str]) -> str:
        arguments = [self._argument(argument, number) for argument in node.args]
        named = sorted(node.kwargs.items())
        arguments += [f"{name}={self._argument(argument, number)}" for name, argument in named]
        text = f"{self._target(node)}({', '.join(arguments)})"
        if self._lasting:
            text += " -> " + ", ".join(map(self._value, torch_ops.tree_leaves(value(node))))
        return text

    def _target(self, node: fx.Node) -> str:
        target: Any = node.target
        if node.op == "call_method":
            return f"method {target}"
        if node.op == "call_module":
            self._refuse_lasting(f"it calls the module {target}, whose code may change")
            return f"module {target}"
        name = inductor.qualified_name(target)
        if name is None:
            text = getattr(target, "__qualname__", None) or type(target).__name__
            self._refuse_lasting(f"it calls {text}, whose code is not torch's and may change")
            return _address(target)
        if "triton_kernel" in name:
            self._refuse_lasting("it holds a Triton kernel of the user's, whose code may change")
        inside = inductor.traced_through(target) if self._lasting else None
        if inside is not None:
            self._refuse_lasting(f"{inside}, by code that may change")
        return name

    def _attribute(self, held: Any, indent: str) -> str:
        if isinstance(held, fx.GraphModule):
            return f"graph\n{self.of(held, held.graph, indent + '  ')}"
        if not self._lasting:
            return f"constant {_address(held)}"
        if type(held) not in (torch.Tensor, torch.nn.Parameter):
            raise Unnameable(f"it holds a {type(held).__name__}")
        if not raw_memory.is_plain_tensor(held) or held.is_meta or held.nbytes > _LARGEST_CONSTANT:
            raise Unnameable(f"it holds a tensor of {held.nbytes} bytes")
        data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(bytes(data.tolist())).hexdigest()
        return f"constant {self._value(held)} {digest}"

    # -------------------------------------------------------------- values

    def _input(self, fake: Any) -> str:
        position, self._inputs = self._inputs, self._inputs + 1
        if not isinstance(fake, torch.Tensor):
            return self._value(fake)
        text = self._value(fake) + self._memory(fake, position)
        text += " parameter" if isinstance(fake, torch.nn.Parameter) else ""
        text += " requires grad" if fake.requires_grad else ""
        return text + (" inference" if fake.is_inference() else "")

    def _memory(self, tensor: Any, position: int) -> str:
        """Name the earlier input with the same memory; of a subclass, for each inner tensor."""
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            inner = [getattr(tensor, name) for name in names]
            return "".join(self._memory(each, position) for each in tensors(inner))
        storage = raw_memory.storage_key(tensor)
        first = position if storage is None else self._storages.setdefault(storage, position)
        return f" in the memory of input {first}" if first != position else ""

    def _value(self, fake: Any) -> str:
        if isinstance(fake, torch.Tensor):
            return self._tensor(fake)
        if isinstance(fake, torch.SymInt):
            return f"size {self._number(fake)}"
        if type(fake) in _PLAIN:
            return repr(fake)
        if not (is_symbolic_number(fake) and all(s.is_integer for s in symbols_of(fake))):
            self._refuse_lasting(f"a {type(fake).__name__} is among its values")
        text = self._number(fake) if is_symbolic_number(fake) else repr(fake)
        return f"{type(fake).__name__} {text}"

    def _tensor(self, tensor: Any) -> str:
        kind = type(tensor).__name__
        if hasattr(tensor, "__tensor_flatten__"):
            self._refuse_lasting(f"a {kind} is among its values")
            names, context = tensor.__tensor_flatten__()
            inner = ", ".join(self._value(getattr(tensor, name)) for name in names)
            return f"{type(tensor)} {context!r} of ({inner})"
        self.devices.add(tensor.device)
        text = f"{dtype_text(tensor.dtype)}[{self._numbers(tensor.shape)}] {tensor.device}"
        if tensor.layout is torch.strided:
            text += f" strides ({self._numbers(tensor.stride())})"
            if self._number(tensor.storage_offset()) != "0":
                text += f" offset {self._number(tensor.storage_offset())}"
        else:
            self._refuse_lasting(f"a {tensor.layout} tensor is among its values")
            text += f" {tensor.layout}"
        text += "" if kind in ("FakeTensor", "Tensor", "Parameter") else f" {type(tensor)}"
        return text + (" conj" if tensor.is_conj() else "") + (" neg" if tensor.is_neg() else "")

    def _argument(self, argument: Any, number: dict[fx.Node, str]) -> str:
        if isinstance(argument, fx.Node):
            return number[argument]
        kind = type(argument).__name__
        if isinstance(argument, (tuple, list)):
            inside = ", ".join(self._argument(item, number) for item in argument)
            text = f"({inside})" if isinstance(argument, tuple) else f"[{inside}]"
            return text if kind in _CONTAINERS else kind + text
        if isinstance(argument, dict):
            rows = [f"{key!r}: {self._argument(item, number)}" for key, item in argument.items()]
            text = "{" + ", ".join(sorted(rows)) + "}"
            return text if kind in _CONTAINERS else kind + text
        if isinstance(argument, slice):
            parts = (argument.start, argument.stop, argument.step)
            return "slice(" + ", ".join(self._argument(part, number) for part in parts) + ")"
        if isinstance(argument, enum.Enum):
            return f"{type(argument).__module__}.{type(argument).__qualname__}.{argument.name}"
        if isinstance(argument, (torch.layout, torch.memory_format, type(...))):
            return str(argument)
        if type(argument) in _PLAIN or isinstance(argument, torch.SymInt):
            return self._value(argument)
        name = inductor.qualified_name(argument) if callable(argument) else None
        if name is None:
            self._refuse_lasting(f"a {kind} is among its arguments")
        return name or _address(argument)

    # -------------------------------------------------------------- sizes

    def _numbers(self, numbers: Iterable[Any]) -> str:
        return ", ".join(map(self._number, numbers))

    def _number(self, number: Any) -> str:
        return self.expression(number.node.expr) if is_symbolic_number(number) else str(number)

    def expression(self, size: Any) -> str:
        """Return the text of an expression of sizes, in the symbols of this text."""
        if not self._lasting:
            return str(size)
        expression = sympy.sympify(size)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.symbols:
                if expressions.is_unbacked(symbol):
                    raise Unnameable("it has a size that depends on data")
                name = f"s{len(self.symbols)}"
                self.symbols[symbol] = sympy.Symbol(name, **symbol.assumptions0)
        expression = expression.xreplace(self.symbols)
        exact = expression.has(sympy.Float)  # ``str`` would round them
        return expressions.text_of(expression) if exact else str(expression)


def _address(thing: Any) -> str:
    return f"{type(thing).__name__} at {id(thing):#x}"
