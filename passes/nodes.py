"""Properties of one node of Dynamo's pre-grad graph: its value, its writes, its line.

``node.meta["example_value"]`` is the fake value that Dynamo left; a statement (``x[i] = y``) has
none.
"""

import operator
import os
import re
from collections.abc import Iterable, Mapping, Set
from operator import attrgetter
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.source_lines import ascii_text, is_users_file
from cgcompile.torch_compat import dynamo, raw_memory, torch_ops

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


class SourceLine(NamedTuple):
    """A line of the user's code, of which torch keeps a text alone."""

    where: str  # ``model.py:41 in forward``
    code: str  # empty where the file is missing

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def user_line(node: fx.Node) -> SourceLine | None:
    """Return the innermost frame: ``model.py:41 in forward``, ``q = ...``."""
    innermost, users = None, False  # frames of torch count only if there are no user frames
    lines = (node.meta.get("stack_trace") or "").splitlines()
    for frame, code in zip(lines, [*lines[1:], ""], strict=False):
        match = _FRAME.search(frame)
        if match is None or (users and not is_users_file(match["file"])):
            continue
        users = is_users_file(match["file"])
        where = f"{os.path.basename(match['file'])}:{match['line']} in {match['function'].strip()}"
        innermost = SourceLine(where, ascii_text(code.strip()))
    return innermost


# ---------------------------------------------------------------- nodes

COMPUTING = ("call_function", "call_method", "call_module")

NUMBER = "cgcompile_number"  # key in node.meta: a Python number as a 0-dim tensor

_INPLACE = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul"
_INPLACE_OPERATORS = {getattr(operator, name) for name in ("setitem", "delitem", *_INPLACE.split())}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions and methods without a schema whose result may be a view, or their argument itself.
_VIEWS = _words("""
    bfloat16 bool cpu cuda double dropout1d dropout2d dropout3d float getattr getitem half int long
    type
""")
_ALLOCATIONS = _words("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
_RESTRIDES = {"as_strided", "as_strided_copy"}
_LAYOUT_CHANGES = _words("""
    t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ resize_ resize_as_ set_
    rename_ shallow_copy_data_
""")  # the last one is ``x.data = y`` in a graph
_RUN_ONCE_ON_THE_HOST = _words("""
    _log_api_usage_once lazy_load_decompositions _assert_scalar _check sym_constrain_range
    sym_constrain_range_for_size
""")


def value(node: fx.Node) -> Any:
    """Return a node's fake value: tensors, symbolic numbers, containers of both, or None."""
    return node.meta.get("example_value")


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, containers opened."""
    return [leaf for leaf in torch_ops.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def is_cpu_scalar(scalar: Any, device: torch.device) -> bool:
    """Return whether a value is a 0-dim CPU tensor in a graph of another device."""
    if device.type == "cpu" or not isinstance(scalar, torch.Tensor):
        return False
    return scalar.dim() == 0 and scalar.device.type == "cpu"


def on_device(scalar: torch.Tensor, device: torch.device, graph: fx.Graph) -> torch.Tensor:
    """Return a fake 0-dim tensor on a device, with the dtype of a value of the graph."""
    with dynamo.fake_context(value(node) for node in graph.nodes):
        return torch.empty((), dtype=scalar.dtype, device=device)


def is_number_tensor(node: fx.Node) -> bool:
    """Return whether the node makes a 0-dim tensor of Python numbers: each piece repeats it."""
    return node.op in COMPUTING and NUMBER in node.meta


def is_symbolic_number(number: Any) -> bool:
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_integer(number: Any) -> bool:
    """Return whether a value is a plain or symbolic integer, and no bool."""
    return isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return all properties of a strided tensor but its data; sizes are expressions."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    plain = [getattr(n.node, "expr", n.node) if is_symbolic_number(n) else n for n in numbers]
    return (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), *plain)


def symbols_of(values: Any) -> set[sympy.Symbol]:
    """Return the free symbols of numbers, and of sizes, strides and offsets of tensors."""
    numbers: list[Any] = []
    for leaf in torch_ops.tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            numbers += leaf.shape
            if leaf.layout is torch.strided:
                numbers += [*leaf.stride(), leaf.storage_offset()]
        else:
            numbers.append(leaf)
    free = (n.node.expr.free_symbols for n in numbers if is_symbolic_number(n))
    return set().union(*free)


def bound_symbols(gm: fx.GraphModule) -> dict[sympy.Symbol, fx.Node]:
    """Return the symbols that are an input of the graph, with that input."""
    bound: dict[sympy.Symbol, fx.Node] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        number = value(node)
        if is_symbolic_number(number) and isinstance(number.node.expr, sympy.Symbol):
            bound.setdefault(number.node.expr, node)
    return bound


def is_size_arithmetic(node: fx.Node, bound: Set[sympy.Symbol]) -> bool:
    """Return whether the node is arithmetic on sizes that inputs give: each piece repeats it."""
    numbers = torch_ops.tree_leaves(value(node))
    return (
        node.op in COMPUTING
        and bool(numbers)
        and all(isinstance(n, (int, float)) or is_symbolic_number(n) for n in numbers)
        and symbols_of(numbers) <= bound
        and not any(tensors(value(argument)) for argument in node.all_input_nodes)
    )


def nodes_by_storage(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """Return, for each storage, the nodes whose value is in it, in order; outputs are left out."""
    by_storage: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for key in storages(value(node)) if node.op != "output" else ():
            by_storage.setdefault(key, []).append(node)
    return by_storage


def storages(values: Any) -> set[int]:
    """Return the keys of the storages behind the tensors of a value."""
    keys = (raw_memory.storage_key(tensor) for tensor in tensors(values))
    return {key for key in keys if key is not None}


def short_name(target: Any) -> str:
    """Return the last part of a target's name: ``empty_like`` for torch, aten and method alike."""
    return target_name(target).replace("::", ".").rpartition(".")[2]


def subgraphs(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Return the graph modules that a higher-order op takes as bodies."""
    modules = (attribute(gm, n) for n in node.all_input_nodes if n.op == "get_attr")
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def attribute(gm: torch.nn.Module, node: fx.Node) -> Any:
    """Return the attribute that a ``get_attr`` node reads."""
    return attrgetter(str(node.target))(gm)


def written(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the argument nodes whose tensors ``node`` writes; where in doubt, too many."""
    if node.op not in COMPUTING:
        return []
    if torch_ops.is_higher_order_op(node.target):
        return _written_by_higher_order(gm, node)
    overloads = torch_ops.op_overloads(node.target)
    if node.op != "call_method" and not overloads and _is_users_own(node.target):
        return [n for n in node.all_input_nodes if tensors(value(n))]
    return surely_written(node) or _suspected_write(node)


def surely_written(node: fx.Node) -> list[fx.Node]:
    """Return the argument nodes that an op writes, as torch or its schema declares."""
    # Exact for ops with a schema; of torch functions and methods by torch's naming rules.
    if node.op == "call_method":
        name = str(node.target)
        return _nodes(node.args[:1]) if _is_inplace(name) or name == "__setitem__" else []
    overloads = torch_ops.op_overloads(node.target)
    if overloads:
        writes = {argument for op in overloads for argument in torch_ops.written_arguments(op)}
        positional = [node.args[i] for i, _ in writes if i < len(node.args)]
        return _nodes(positional + [node.kwargs[name] for _, name in writes if name in node.kwargs])
    return _written_by_function(node) if is_torchs(node) else []


def _is_users_own(function: Any) -> bool:
    """Return whether a function is not torch's or Python's, so that its writes are unknown."""
    top = (getattr(function, "__module__", None) or "").partition(".")[0]
    return top not in ("", "torch", "math", "operator", "_operator", "builtins")


def written_storages(gm: fx.GraphModule) -> set[int]:
    """Return the keys of the storages that some node writes."""
    return storages([value(target) for node in gm.graph.nodes for target in written(gm, node)])


def outreached_storages(gm: fx.GraphModule) -> set[int]:
    """Return the storages of inputs that ``as_strided`` may read beyond the input itself."""
    inputs = [value(node) for node in gm.graph.find_nodes(op="placeholder")]
    outreached: set[int] = set()
    for node in gm.graph.nodes:
        if node.op not in COMPUTING or short_name(node.target) not in _RESTRIDES:
            continue
        keys, views = storages(value(node.all_input_nodes[0])), tensors(value(node))
        # An offset counts from the start of the storage; another call may pass another part of it.
        has_offset = len(node.args) > 3 or node.kwargs.get("storage_offset") is not None
        bases = [t for t in tensors(inputs) if not keys.isdisjoint(storages(t))]
        if has_offset or not all(_is_within(view, base) for view in views for base in bases):
            outreached |= keys
    return outreached


def _is_within(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether one tensor's memory is known to lie within the extent of another."""
    (first, last), (start, end) = _extent(tensor), _extent(whole)
    return all(sympy.sympify(gap).is_nonnegative for gap in (first - start, end - last))


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the offsets of the first and the last element, as expressions."""
    rank = tensor.dim()
    numbers = layout_of(tensor)[-(2 * rank + 1) :]
    sizes, strides, first = numbers[:rank], numbers[rank:-1], numbers[-1]
    pairs = zip(sizes, strides, strict=True)
    return first, first + sum((size - 1) * stride for size, stride in pairs)


def _written_by_function(node: fx.Node) -> list[fx.Node]:
    """Return the writes of a torch function, which has no schema, by torch's naming rules."""
    name = short_name(node.target)
    if torch_ops.is_python_operator(node.target):  # ``and_`` and ``or_`` write nothing
        return _nodes(node.args[:1]) if node.target in _INPLACE_OPERATORS else []
    if _is_inplace(name) or torch_ops.given_argument(node, "inplace") is True:
        return _nodes(node.args[:1])
    if torch_ops.given_argument(node, "out") is not None:
        return _nodes(torch_ops.given_argument(node, "out"))
    for flag, targets in _WRITES_IF.get(name, {}).items():
        if torch_ops.given_argument(node, flag) not in (None, False):
            return _nodes([torch_ops.given_argument(node, target) for target in targets])
    return []


def is_torchs(node: fx.Node) -> bool:
    """Return whether a node calls a function of torch itself, whose effects are known."""
    if node.op == "call_method":
        owner = node.args[0] if node.args else None
        return isinstance(value(owner) if isinstance(owner, fx.Node) else owner, torch.Tensor)
    overloads = torch_ops.op_overloads(node.target)
    if overloads:
        return all(op.namespace in ("aten", "prims") for op in overloads)
    plain = node.op == "call_function" and not torch_ops.is_higher_order_op(node.target)
    return plain and not _is_users_own(node.target)


def calls(node: Any, *names: str) -> bool:
    """Return whether a node computes tensors by a function or method of torch, into new memory."""
    computing = isinstance(node, fx.Node) and node.op in ("call_function", "call_method")
    if not computing or short_name(node.target) not in names or not is_torchs(node):
        return False
    return bool(node.args and tensors(value(node))) and node.kwargs.get("out") is None


def keep_meta(node: fx.Node, replaced: fx.Node) -> None:
    """Give a node the fake value and the stack trace of an equal node that it replaces."""
    kept = ("example_value", "stack_trace")
    node.meta |= {name: replaced.meta[name] for name in kept if name in replaced.meta}


def erase_unused(
    gm: fx.GraphModule, node: fx.Node, names: Set[str], also: Set[fx.Node] = frozenset()
) -> None:
    """Erase a node without users, then its inputs.

    Args:
        names: of the ops of torch that may be erased where they write nothing.
        also: nodes that may be erased in any case.
    """
    if node.users or node.op not in COMPUTING or not is_torchs(node):
        return
    if node in also or (short_name(node.target) in names and not written(gm, node)):
        inputs = node.all_input_nodes
        gm.graph.erase_node(node)
        for source in inputs:
            erase_unused(gm, source, names, also)


def changes_layout(node: fx.Node) -> bool:
    """Return whether the node changes the shape, strides or storage of its argument in place."""
    return node.op in COMPUTING and short_name(node.target) in _LAYOUT_CHANGES


def _is_inplace(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


_STATISTICS = ("running_mean", "running_var")

# Functions that write some of their arguments if another argument is not None or False.
_WRITES_IF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "batch_norm": {"training": _STATISTICS},
    "native_batch_norm": {"training": _STATISTICS},
    "_native_batch_norm_legit": {"training": _STATISTICS},
    "cudnn_batch_norm": {"training": _STATISTICS},
    "rrelu_with_noise": {"noise": ("noise",)},
    "fused_moving_avg_obs_fake_quant": {
        "observer_on": ("running_min", "running_max", "scale", "zero_point")
    },
    "instance_norm": {"use_input_stats": _STATISTICS},
    "embedding": {"max_norm": ("weight",)},
    "embedding_bag": {"max_norm": ("weight",)},
}


def _suspected_write(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an unknown call may write: its result is in their memory."""
    if is_known_view(node):
        return []
    own = storages(value(node))
    return [n for n in node.all_input_nodes if not own.isdisjoint(storages(value(n)))]


def is_known_view(node: fx.Node) -> bool:
    """Return whether a call whose result is in an argument's memory only makes a view."""
    overloads = torch_ops.op_overloads(node.target)
    if not overloads and is_torchs(node):
        overloads = torch_ops.aten_overloads(node.target)
    if overloads:
        writes = {argument for op in overloads for argument in torch_ops.written_arguments(op)}
        return not any(i < len(node.args) or name in node.kwargs for i, name in writes)
    return short_name(node.target) in _VIEWS


def _written_by_higher_order(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    triton = "triton_kernel_wrapper" in target_name(node.target)
    bodies = subgraphs(gm, node)
    writes = triton or any(written(body, inner) for body in bodies for inner in body.graph.nodes)
    return [n for n in node.all_input_nodes if tensors(value(n))] if writes else []


def _nodes(arguments: Any) -> list[fx.Node]:
    return [leaf for leaf in torch_ops.tree_leaves(arguments) if isinstance(leaf, fx.Node)]


def is_view(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the node is a known view in its arguments' storages, and can be repeated."""
    if node.op not in COMPUTING or not is_known_view(node) or written(gm, node):
        return False
    own = storages(value(node))
    return bool(own) and own <= storages([value(argument) for argument in node.all_input_nodes])


def is_container_item(node: fx.Node) -> bool:
    """Return whether the node reads an item of a node that returned several values."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source = value(node.args[0])
    return isinstance(source, (tuple, list)) and not isinstance(source, torch.Size)


def is_allocation(node: fx.Node) -> bool:
    """Return whether the node only allocates memory, without filling it."""
    return node.op in COMPUTING and short_name(node.target) in _ALLOCATIONS


def toggles_state(node: fx.Node) -> bool:
    """Return whether the node switches a state that each piece repeats."""
    switches = (*torch_ops.LEAVES, *torch_ops.LEAVES.values(), torch_ops.SET_GRAD_ENABLED)
    return node.op == "call_function" and node.target in switches


def runs_once_on_host(node: fx.Node) -> bool:
    """Return whether the node is a check or a registration on the host, without tensors."""
    return node.op == "call_function" and short_name(node.target) in _RUN_ONCE_ON_THE_HOST


def launches_kernel(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the node launches work on the device; when in doubt, True."""
    if node.op not in COMPUTING or is_symbolic_number(value(node)) or toggles_state(node):
        return False
    if is_container_item(node) or is_allocation(node) or runs_once_on_host(node):
        return False
    return not is_view(gm, node)
