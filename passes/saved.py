"""Dynamo's graph as bytes, and back in another process: a warm start that traces nothing.

``pickle`` would run code that the file names, and would trace the graph again; here a graph is
JSON: rows for its nodes, which refer to earlier rows by number, and tables of the expressions,
storages and tensors that the nodes' fake values are made of. Reading looks names up (of functions,
operators and enums, importing their modules) and calls nothing else, with one exception: the
wrapped values of functorch exist only while they are computed, so the nodes that make them run
once, on fakes.

Note [Values are rebuilt, not recomputed]. Running each node on fakes would take a third of the
time of the trace (1.7 ms a node). It would also ask for guards and symbols again, in another order
than Dynamo did. The saved values are exact for the graph they are of; whoever keeps a graph must
drop it when torch, an operator or the model's code has changed.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.errors import CGCompileError, SavedGraphError, UnsavableGraphError
from cgcompile.passes.nodes import attribute, short_name, tensors, toggles_state, value
from cgcompile.passes.saved_sizes import read_expressions, read_state, saved_state
from cgcompile.passes.saved_targets import loaded_target, saved_target
from cgcompile.passes.saved_values import ValueReader, ValueWriter
from cgcompile.settings import checked

_MAGIC = b"cgcompile graph 1\n"
_INPUT_TYPES = (torch.Tensor, torch.nn.Parameter, torch.SymInt, torch.SymFloat, torch.SymBool)
_DIGEST = hashlib.sha256().digest_size
LARGEST_CONSTANT = 64 * 1024  # bytes of a tensor that goes into the file


@checked
def dump_graph(gm: fx.GraphModule) -> bytes:
    """Save a graph as a backend gets it from Dynamo.

    Kept of a node: its fake value, the user's stack, annotations, and for an input where Dynamo
    took it from and whether it is static. Other metadata is not.

    Args:
        gm: the graph; parameters must be inputs. It is not changed.

    Returns:
        Bytes for :func:`load_graph` of the same torch.

    Raises:
        UnsavableGraphError: another process could not make this graph; names the node.
    """
    writer = _Writer()
    try:
        graph = writer.graph(gm)
        sizes = (
            None
            if writer.values.env is None
            else saved_state(writer.values.env, writer.values.expressions)
        )
        content = {
            "torch": str(torch.version.__version__),
            "graph": graph,
            "sizes": sizes,
            "break": compat.graph_break(gm),
            "attributes": writer.attributes,
            "expressions": writer.values.expressions.rows,
            "tensors": writer.values.tensors,
            "storages": writer.values.storages,
            "texts": list(writer.texts),
        }
        body = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)
    except CGCompileError:
        raise
    except Exception as error:
        raise UnsavableGraphError.whole(because=_told(error)) from error
    return _MAGIC + hashlib.sha256(body).digest() + body


@checked
def load_graph(data: bytes) -> fx.GraphModule:
    """Make a graph that :func:`dump_graph` saved.

    Its values belong to a fake mode and symbols of its own, with the hints, ranges and guards that
    the saved ones had. ``split_graph`` and the compilers of pieces take it like Dynamo's. A graph
    names the functions that it calls, so load only bytes that you trust.

    Args:
        data: what ``dump_graph`` returned.

    Raises:
        SavedGraphError: the bytes are damaged or of another torch, something that the graph calls
            does not exist here, or a value came out different. Trace again.
    """
    content = _content(data)
    try:
        return _Reader(content).graph_module()
    except CGCompileError:
        raise
    except Exception as error:  # whatever a file that is not ours leads to
        raise SavedGraphError.damaged(because=f"{type(error).__name__}: {error}") from error


def _content(data: bytes) -> dict[str, Any]:
    begin = len(_MAGIC) + _DIGEST
    body = data[begin:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : begin]:
        raise SavedGraphError.damaged(because="the checksum is another")
    try:
        content: dict[str, Any] = json.loads(zlib.decompress(body))
        version = content["torch"]
    except Exception as error:  # the checksum is right: another program wrote this
        raise SavedGraphError.damaged(because=f"{type(error).__name__}: {error}") from error
    if version != str(torch.version.__version__):
        raise SavedGraphError.other_torch(
            found=str(version), expected=str(torch.version.__version__)
        )
    return content


# ---------------------------------------------------------------- writing


def _told(error: Exception) -> str:
    """An error in words: a ValueError is ours, and says why."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


class _Writer:
    def __init__(self) -> None:
        self.values = ValueWriter()
        self.attributes: list[Any] = []
        self.texts: dict[str, int] = {}
        self._attribute_rows: dict[int, int] = {}

    def graph(self, gm: fx.GraphModule, inside: bool = False) -> dict[str, Any]:
        """The saved form of a graph, or of one that a higher-order op holds (``inside``)."""
        if not compat.has_plain_code(gm.graph):
            raise UnsavableGraphError.whole(because="it has a calling convention of its own")
        numbers: dict[fx.Node, int] = {}
        runs = _nodes_to_run(gm)
        if runs and inside:
            raise UnsavableGraphError.whole(
                because="the body of a higher-order op has functorch state"
            )
        rows = []
        for number, node in enumerate(gm.graph.nodes):
            try:
                rows.append(self._node(gm, node, numbers, node in runs))
            except CGCompileError:
                raise
            except Exception as error:  # ours, or whatever the code of a value's class raises
                raise UnsavableGraphError.node(node=node.name, because=_told(error)) from error
            numbers[node] = number
        held = {
            str(node.target): self._attribute_rows[id(attribute(gm, node))]
            for node in gm.graph.find_nodes(op="get_attr")
        }
        return {"nodes": rows, "held": held}

    def _node(
        self, gm: fx.GraphModule, node: fx.Node, numbers: dict[fx.Node, int], runs: bool
    ) -> list[Any]:
        target: Any = str(node.target)
        if node.op == "call_function":
            target = saved_target(node.target)
        elif node.op == "call_module":
            raise ValueError(f"it calls the module {target}, which is no part of the graph")
        elif node.op == "get_attr":
            self._attribute(node, attribute(gm, node))
        meta = self._meta(node, numbers, runs)
        args = self.values.saved(node.args, numbers)
        kwargs = self.values.saved(dict(node.kwargs), numbers) if node.kwargs else None
        return [node.op, node.name, target, args, kwargs, meta]

    def _meta(self, node: fx.Node, numbers: dict[fx.Node, int], runs: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if runs:
            meta["run"] = _text(value(node)) if "example_value" in node.meta else None
        elif "example_value" in node.meta:
            meta["value"] = self.values.saved(value(node), {})
        if node.meta.get("stack_trace"):
            meta["stack"] = self.texts.setdefault(node.meta["stack_trace"], len(self.texts))
        if node.meta.get("custom"):
            meta["custom"] = self.values.saved(node.meta["custom"], {})
        if node.meta.get("unbacked_bindings"):
            meta["bindings"] = self._bindings(node.meta["unbacked_bindings"])
        if node.op == "placeholder":
            source = compat.source_name(node)
            if source is not None:
                meta["source"] = source
            if compat.is_static_input(node):
                meta["static"] = True
            if node.type in _INPUT_TYPES:
                meta["type"] = _INPUT_TYPES.index(node.type)
        return meta

    def _bindings(self, bindings: dict[Any, Any]) -> list[Any]:
        """Which unbacked symbols a node makes, and where in its value they are."""
        rows = []
        for symbol, path in bindings.items():
            steps = compat.saved_key_path(path)
            if steps is None:
                raise ValueError(f"the symbol {symbol} is in a place of unknown kind")
            saved = [[kind, self.values.saved(what, {})] for kind, what in steps]
            rows.append([self.values.expressions.add(symbol), saved])
        return rows

    def _attribute(self, node: fx.Node, held: Any) -> None:
        if id(held) in self._attribute_rows:
            return
        if isinstance(held, fx.GraphModule):
            row = ["graph", self.graph(held, inside=True)]
        elif type(held) in (torch.Tensor, torch.nn.Parameter) and not _is_odd(held):
            row = ["constant", *_saved_constant(held)]
        else:
            kind = type(held)
            raise ValueError(f"it holds an attribute of type {kind.__module__}.{kind.__qualname__}")
        self.attributes.append(row)
        self._attribute_rows[id(held)] = len(self.attributes) - 1


def _is_odd(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.device.type == "meta"
    )


def _saved_constant(tensor: torch.Tensor) -> list[Any]:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > LARGEST_CONSTANT:
        raise ValueError(f"it holds a constant of {nbytes} bytes, more than {LARGEST_CONSTANT}")
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        list(tensor.shape),
        base64.b64encode(bytes(content.tolist())).decode(),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    ]


def _nodes_to_run(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that have to run on fakes: what makes wrapped values, and the state around it."""
    wrapped = {n for n in gm.graph.nodes if any(map(compat.is_wrapped, tensors(value(n))))}
    if not wrapped:
        return set()
    found, depth = set(wrapped), 0
    for node in gm.graph.nodes:
        name = short_name(node.target) if node.op == "call_function" else ""
        depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        computes = node.op in ("call_function", "call_method")
        if name in compat.FUNCTORCH_STATE_WE_LEAVE_ALONE:
            raise UnsavableGraphError.node(
                node=node.name, because=f"values inside of {name} are not kept"
            )
        switches = name in compat.FUNCTORCH_STATE or toggles_state(node)
        if switches or (depth > 0 and computes and "example_value" not in node.meta):
            found.add(node)
    return found


def _text(found: Any) -> str:
    """What must come out again of a node that runs on fakes."""
    return "; ".join(
        f"{leaf.dtype} {list(leaf.shape)} {list(leaf.stride())}"
        if isinstance(leaf, torch.Tensor)
        else str(leaf)
        for leaf in compat.tree_leaves(found)
    )


# ---------------------------------------------------------------- reading


class _Reader:
    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        expressions = read_expressions(content["expressions"])
        state = content["sizes"]
        sizes = compat.SizeState() if state is None else read_state(state, expressions)
        self._mode = compat.new_trace(sizes)
        self._expressions = expressions
        self._values = ValueReader(self._mode, expressions, content["tensors"], content["storages"])
        self._targets: dict[tuple[str, ...], Any] = {}
        self._held: list[Any] = []

    def graph_module(self) -> fx.GraphModule:
        with compat.making_fakes(self._mode):
            for kind, *parts in self._content["attributes"]:
                made = self._graph(parts[0]) if kind == "graph" else _constant(*parts)
                self._held.append(made)
            gm = self._graph(self._content["graph"])
        compat.keep_graph_break(gm, self._content["break"])
        return gm

    def _graph(self, saved: dict[str, Any]) -> fx.GraphModule:
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        for row in saved["nodes"]:
            nodes.append(self._node(graph, row, nodes))
        held = {name: self._held[number] for name, number in saved["held"].items()}
        gm = compat.lazy_module(held, graph)
        runs = {
            node: row[5]["run"]
            for node, row in zip(nodes, saved["nodes"], strict=True)
            if "run" in row[5]
        }
        if runs:
            self._run(gm, runs)
        return gm

    def _node(self, graph: fx.Graph, row: list[Any], nodes: list[fx.Node]) -> fx.Node:
        op, name, target, args, kwargs, meta = row
        if op == "call_function":
            target = self._target(tuple(target), name)
        node = graph.create_node(
            op,
            target,
            self._values.value(args, nodes),
            {} if kwargs is None else self._values.value(kwargs, nodes),
            name=name,
            type_expr=_INPUT_TYPES[meta["type"]] if "type" in meta else None,
        )
        if node.name != name:
            raise SavedGraphError.differs(node=name, expected=f"the name {name}", found=node.name)
        if "value" in meta:
            node.meta["example_value"] = self._values.value(meta["value"], [])
        if "stack" in meta:
            node.meta["stack_trace"] = self._content["texts"][meta["stack"]]
        if "custom" in meta:
            node.meta["custom"] = self._values.value(meta["custom"], [])
        if "bindings" in meta:
            node.meta["unbacked_bindings"] = {
                self._expressions[symbol]: compat.key_path(
                    [(kind, self._values.value(what, [])) for kind, what in steps]
                )
                for symbol, steps in meta["bindings"]
            }
        if op == "placeholder":
            compat.keep_input(node, meta.get("source"), meta.get("static", False))
        return node

    def _target(self, saved: tuple[str, ...], node: str) -> Any:
        if saved not in self._targets:
            self._targets[saved] = loaded_target(saved, node)
        return self._targets[saved]

    def _run(self, gm: fx.GraphModule, runs: dict[fx.Node, str | None]) -> None:
        """Run the nodes that make wrapped values, in order, and compare what they make."""
        made: dict[fx.Node, Any] = {}
        entered: list[fx.Node] = []

        def argument(node: fx.Node) -> Any:
            if node in made:
                return made[node]
            return attribute(gm, node) if node.op == "get_attr" else value(node)

        with compat.running_on_fakes(self._mode):
            try:
                for node, expected in runs.items():
                    made[node] = _called(node, argument)
                    if node.target in compat.LEAVES:
                        entered.append(node)
                    elif node.target in compat.LEAVES.values():
                        entered.remove(node.args[0])  # type: ignore[arg-type]
                    if expected is not None:
                        node.meta["example_value"] = made[node]
                        found = _text(made[node])
                        if found != expected:
                            raise SavedGraphError.differs(
                                node=node.name, expected=expected, found=found
                            )
            finally:
                for node in reversed(entered):
                    compat.LEAVES[node.target](made[node])


def _called(node: fx.Node, argument: Callable[[fx.Node], Any]) -> Any:
    """What a node makes of the values of its arguments."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), argument)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _constant(
    dtype: str, device: str, shape: list[int], content: str, gradient: bool, parameter: bool
) -> torch.Tensor:
    data = bytearray(base64.b64decode(content))
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind, device="cpu")
    tensor = flat.clone().reshape(shape).to(device)
    return torch.nn.Parameter(tensor, gradient) if parameter else tensor.requires_grad_(gradient)
