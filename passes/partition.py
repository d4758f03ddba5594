"""Cut a graph whose nodes carry a placement into pieces: :func:`cut`.

Each piece takes the values of other pieces as inputs (sizes first, then in order of use) and always
returns a tuple; arithmetic on sizes is repeated in each piece that needs it; autocast and grad mode
are entered at the start of each piece and left at its end. Pieces of equal structure share one
``GraphModule``.

Note [Own splitter]. ``torch.fx.passes.split_module`` does most of this, but it leaves grad mode
changed between pieces, fails on an unbacked symbol without a binding node, returns a bare value for
a single output on torch 2.11, and makes one GraphModule a piece, equal or not.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from cgcompile.boundaries import AttentionCGSupport
from cgcompile.passes.assign import PLACEMENT, Placement, placement
from cgcompile.passes.capturable import graph_device
from cgcompile.passes.nodes import (
    NUMBER,
    attribute,
    bound_symbols,
    is_cpu_scalar,
    is_number_tensor,
    is_size_arithmetic,
    on_device,
    outreached_storages,
    runs_once_on_host,
    storages,
    symbols_of,
    user_line,
    value,
    written_storages,
)
from cgcompile.passes.printer import GraphText
from cgcompile.passes.regions import grad_mode_around
from cgcompile.passes.split import Piece, SplitGraph, Value
from cgcompile.passes.symbols import Symbols, dotted_source, identifier
from cgcompile.reasons import Fallback, Reason
from cgcompile.torch_compat import dynamo, torch_ops


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
