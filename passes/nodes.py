"""What passes read of a graph: values and writes of nodes, regions of state, sizes as symbols.

``node.meta["example_value"]`` is the fake value that Dynamo left; a statement (``x[i] = y``) has
none.

Note [Regions of state]
A region are the nodes from one that opens a state to the one that closes it. Inside a ``vmap`` the
tensors are batched wrappers, inside a nested ``grad`` they are dual; such values cannot leave their
region, so a region is never cut: if one of its nodes cannot be captured, the whole region runs
eager. Where a graph sets a switch of the process (``sdpa_kernel``, deterministic algorithms, grad
mode on in a graph that runs without), the region in which the switch differs always runs eager: a
replay does not run the host code that sets it. Autocast, ``no_grad`` and ``inference_mode`` are
different: each piece enters them (``split.py``).

Note [Symbols]
A graph traced with dynamic sizes has one symbol per varying dimension of its inputs. Every size and
every number of bytes is an expression of these symbols, so that a capture size that the model's own
guards refuse is refused before capture, with the guard, and not by a wrong result.

Dynamo names an input ``L['self']._modules['model']._parameters['weight']``; printed tables,
messages and generated code use the dotted form that the user would write: ``model.weight``.
"""

import itertools
import keyword
import logging
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.errors import ConfigError, SymbolError
from cgcompile.reasons import Reason
from cgcompile.source_lines import ascii_text, is_users_file
from cgcompile.torch_compat import dynamo, expressions, raw_memory, torch_ops

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


class SourceLine(NamedTuple):
    """A line of the user's code; torch keeps only its text."""

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


def has_subclasses(gm: fx.GraphModule) -> bool:
    """Return whether a value in a graph is a tensor subclass that torch can take apart."""
    return any(map(raw_memory.is_wrapper, tensors([value(node) for node in gm.graph.nodes])))


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
        bodies, triton = subgraphs(gm, node), "triton_kernel_wrapper" in target_name(node.target)
        if not triton and not any(written(body, n) for body in bodies for n in body.graph.nodes):
            return []
        return [n for n in node.all_input_nodes if tensors(value(n))]
    overloads = torch_ops.op_overloads(node.target)
    if node.op != "call_method" and not overloads and _is_users_own(node.target):
        return [n for n in node.all_input_nodes if tensors(value(n))]
    known = surely_written(node)
    if known or is_known_view(node):
        return known
    own = storages(value(node))  # an unknown call may write arguments in the memory of its result
    return [n for n in node.all_input_nodes if not own.isdisjoint(storages(value(n)))]


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
    if torch_ops.is_python_operator(node.target):  # ``and_`` and ``or_`` do not write
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


def is_known_view(node: fx.Node) -> bool:
    """Return whether a call whose result is in an argument's memory only makes a view."""
    overloads = torch_ops.op_overloads(node.target)
    if not overloads and is_torchs(node):
        overloads = torch_ops.aten_overloads(node.target)
    if overloads:
        writes = {argument for op in overloads for argument in torch_ops.written_arguments(op)}
        return not any(i < len(node.args) or name in node.kwargs for i, name in writes)
    return short_name(node.target) in _VIEWS


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


_PAIRS = {  # opening function: (closing function, label)
    "_vmap_increment_nesting": ("_vmap_decrement_nesting", "torch.vmap"),
    "_jvp_increment_nesting": ("_jvp_decrement_nesting", "torch.func.jvp"),
    "_enter_dual_level": ("_exit_dual_level", "forward-mode AD"),
    "_saved_tensors_hooks_disable": ("_saved_tensors_hooks_enable", "disabled saved-tensor hooks"),
}
# Each call sets the switch; Dynamo restores the first value at the end of a context.
_SWITCHES = {
    "_sdpa_kernel": "torch.nn.attention.sdpa_kernel",
    "_set_deterministic_algorithms": "torch.use_deterministic_algorithms",
    "_set_fwd_grad_enabled": "torch.autograd.forward_ad",
    "_set_grad_enabled": "torch.enable_grad",
}


ADVANCES = "cgcompile_advances"  # key in node.meta


def advanced(gm: fx.GraphModule) -> list[int]:
    """Return the positions of the inputs whose increment moved to the end of the graph."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch_ops.FOREACH_ADD_)
    moved = {counter for node in nodes if ADVANCES in node.meta for counter in node.args[0]}
    inputs = gm.graph.find_nodes(op="placeholder")
    return [position for position, node in enumerate(inputs) if node in moved]


# ---------------------------------------------------------------- regions of state


class Region(NamedTuple):
    """One outermost region: the nodes from position ``first`` to ``last``, inclusive."""

    first: int
    last: int
    label: str
    eager: Reason | None = None  # why it always runs eager; None if that depends on its nodes


def state_regions(gm: fx.GraphModule) -> list[Region]:
    """Return the outermost regions of the graph, in order; they do not overlap."""
    regions = [*_paired_regions(gm), *_differentiating_regions(gm)]
    for name in _SWITCHES:
        regions += _switched_regions(gm, name)
    return _outermost(regions)


def nodes_in_regions(gm: fx.GraphModule) -> set[fx.Node]:
    """Return every node in a state region, its ends included."""
    nodes = list(gm.graph.nodes)
    return {node for region in state_regions(gm) for node in nodes[region.first : region.last + 1]}


def grad_mode_around(gm: fx.GraphModule) -> bool | None:
    """Return the grad mode that the graph starts in and, by its last toggle, ends in, or None."""
    toggles = [n for n in gm.graph.nodes if n.target is torch_ops.SET_GRAD_ENABLED]
    return bool(toggles[-1].args[0]) if toggles else None


def _paired_regions(gm: fx.GraphModule) -> list[Region]:
    regions: list[Region] = []
    open_regions: list[tuple[int, str, str]] = []  # (start, closing function, label)
    for position, node in enumerate(gm.graph.nodes):
        name = short_name(node.target) if node.op == "call_function" else ""
        if name in _PAIRS:
            open_regions.append((position, *_PAIRS[name]))
        elif open_regions and name == open_regions[-1][1]:
            first, _, label = open_regions.pop()
            regions.append(Region(first, position, label))
    return regions


def _differentiating_regions(gm: fx.GraphModule) -> list[Region]:
    """Return the region from the start of a nested gradient to the last computed gradient."""
    # The values between carry the history that the gradient needs; a compiled piece would drop it.
    nodes = list(gm.graph.nodes)
    called = [(i, short_name(n.target)) for i, n in enumerate(nodes) if n.op in COMPUTING]
    starts = [i for i, name in called if name == "_grad_increment_nesting"]
    ends = [
        i for i, name in called if name in ("_grad_decrement_nesting", "_autograd_grad", "backward")
    ]
    ends += [i for i, node in enumerate(nodes) if node.target is torch.autograd.grad]
    if not ends:
        return []
    first = min(starts) if starts and min(starts) < min(ends) else called[0][0]
    return [Region(first, max(ends), "torch.func.grad", Reason.GRADIENTS)]


def _switched_regions(gm: fx.GraphModule, name: str) -> list[Region]:
    """Return where a switch has another value than at the end of the graph, calls included."""
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    calls = [
        node for node in order if node.op == "call_function" and short_name(node.target) == name
    ]
    if not calls or (name == "_set_grad_enabled" and grad_mode_around(gm) is not False):
        return []
    reason = Reason.GRADIENTS if name == "_set_grad_enabled" else Reason.STATE_REGION
    final, label = _setting(calls[-1]), _SWITCHES[name]
    regions: list[Region] = []
    began: int | None = None
    for call in calls:
        first = min([order[call], *(order[n] for n in call.all_input_nodes if n.op in COMPUTING)])
        if _setting(call) != final:
            began = first if began is None else began
        elif began is not None:
            regions.append(Region(began, order[call], label, reason))
            began = None
        elif name != "_set_grad_enabled":  # set without a context: the host has to run it
            regions.append(Region(first, order[call], label, reason))
    return regions


def _setting(call: fx.Node) -> str:
    """Return the arguments of a switching call as text, with nested calls spelled out."""
    return str(fx.map_arg((call.args, dict(call.kwargs)), lambda node: str(node.args)))


def _outermost(regions: list[Region]) -> list[Region]:
    outer: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.first, -r.last)):
        if outer and region.first <= outer[-1].last:
            last = max(outer[-1].last, region.last)
            cause = outer[-1] if outer[-1].eager or not region.eager else region
            outer[-1] = Region(outer[-1].first, last, cause.label, cause.eager)
        else:
            outer.append(region)
    return outer


log = logging.getLogger(__name__)

_CONTAINERS = re.compile(r"\._(?:modules|parameters|buffers)\[")
_KEY = re.compile(r"\['([^']*)'\]")
_INDEX = re.compile(r"\[(\d+)\]")


# ---------------------------------------------------------------- symbols


def dotted_source(placeholder: fx.Node) -> str | None:
    """Return the dotted name of an input at the caller; None if the graph is not from Dynamo."""
    source = dynamo.source_name(placeholder)
    if source is None:
        return None
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    text = _KEY.sub(r".\1", _CONTAINERS.sub("[", text))
    is_size = re.search(r"\.(?:size|stride)\(\)\[\d+\]$", text)
    tail = is_size.group() if is_size else ""
    head = text[: len(text) - len(tail)]
    return _INDEX.sub(r".\1", head).removeprefix("self.") + tail


def identifier(text: str, taken: set[str]) -> str:
    """Return a Python identifier for ``text`` that is not in ``taken``, and add it."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    unique, number = name, 1
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    taken.add(unique)
    return unique


_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c", "bool": "b8"}


class Symbols(expressions.Shapes):
    """The symbols of the inputs of one graph, in the order of the inputs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        bound = bound_symbols(gm)
        self._dims = {symbol: dotted_source(node) or node.name for symbol, node in bound.items()}
        self._short = {symbol: sympy.Symbol(f"s{i}") for i, symbol in enumerate(bound)}
        envs = (value(node).node.shape_env for node in bound.values())
        super().__init__(next(envs, None))  # None without symbols, and then not used

    @property
    def dims(self) -> dict[str, str]:
        """Printed symbol -> the input dimension it stands for: ``{"s0": "x.size()[0]"}``."""
        return {str(self._short[symbol]): dim for symbol, dim in self._dims.items()}

    def __iter__(self) -> Iterator[sympy.Symbol]:
        return iter(self._dims)

    def __contains__(self, symbol: sympy.Symbol) -> bool:
        return symbol in self._dims

    def pretty(self, expression: Any) -> str:
        """Return the text of an expression, with ``s0``, ``s1``, ... in the order of the inputs."""
        return str(sympy.sympify(expression).subs(self._short))

    def number(self, number: Any) -> sympy.Expr:
        """Return the expression of a plain or symbolic number."""
        return number.node.expr if hasattr(number, "node") else sympy.sympify(number)

    def shape_text(self, tensor: torch.Tensor) -> str:
        """Return text such as ``f32[s0, 16]``."""
        sizes = ", ".join(self.pretty(self.number(size)) for size in tensor.shape)
        return f"{dtype_text(tensor.dtype)}[{sizes}]"

    def nbytes(self, tensor: torch.Tensor) -> sympy.Expr:
        """Return the bytes of the elements of a tensor."""
        return sympy.Mul(tensor.element_size(), *map(self.number, tensor.shape))

    def storage(self, tensor: torch.Tensor) -> tuple[int, sympy.Expr]:
        """Return (key, bytes) of the storage behind a tensor; a view keeps all of it alive."""
        key = raw_memory.storage_key(tensor)
        if key is None:
            return id(tensor), self.nbytes(tensor)
        return key, sympy.expand(self.number(tensor.untyped_storage().nbytes()))

    def check_bound(self, values: Any, name: str, where: str) -> None:
        """Refuse a value whose size depends on a symbol that no input gives."""
        free = symbols_of(values) - self._dims.keys()
        if free:
            raise SymbolError.free(value=name, symbols=sorted(map(str, free)), where=where)

    def specialised(self) -> dict[str, str]:
        """Return the dimensions that were fixed to a number after tracing, with that number."""
        fixed = {}
        for symbol, dim in self._dims.items():
            now = self.current(symbol)
            if now.is_number:
                fixed[dim] = str(now)
        return fixed

    def guards_on(self, symbol: sympy.Symbol) -> list[str]:
        """Return the guards on a symbol, as text, without duplicates."""
        guards = [guard for guard, _ in self.guards() if symbol in guard.free_symbols]
        return list(dict.fromkeys(map(self.pretty, guards)))

    def numbers_with(self, symbol: sympy.Symbol, size: int) -> dict[sympy.Symbol, int] | None:
        """Return values of all symbols that the guards allow where one is ``size``, or None."""
        guards = [guard for guard, _ in self.guards()]
        if not self._allows({symbol: size}, guards):
            return None
        others = [other for other in self._dims if other != symbol]
        scale = size / (self.traced_with(symbol) or size or 1)
        choices = [self._likely(other, size, scale) for other in others]
        for numbers in itertools.islice(itertools.product(*choices), 256):
            candidate = {symbol: size, **dict(zip(others, numbers, strict=True))}
            if self._allows(candidate, guards):
                return candidate
        return None

    def _likely(self, symbol: sympy.Symbol, size: int, scale: float) -> list[int]:
        """Return values that may go with a size: as traced, the same, scaled alike, the least."""
        least, traced = max(int(self.bounds(symbol)[0]), 2), self.traced_with(symbol)
        if traced is None:
            return list(dict.fromkeys([size, least]))
        scaled = math.ceil(traced * scale)
        return list(dict.fromkeys([traced, size, scaled, 2 * scaled, least]))

    def _allows(self, numbers: dict[sympy.Symbol, int], guards: list[sympy.Expr]) -> bool:
        for symbol, number in numbers.items():
            lower, upper = self.bounds(symbol)
            if not lower <= number <= upper:
                return False
        return all(guard.subs(numbers) is not sympy.false for guard in guards)

    def check_sizes(
        self, sizes: Sequence[int], dim: str | None, setting: str = "cudagraph_capture_sizes"
    ) -> None:
        """Refuse a size that a guard or range of the traced code excludes."""
        # Sizes 0 and 1 of a backed dimension are not checked: torch traces a graph for each.
        symbol = self.chosen(dim) if sizes else None
        if symbol is None:
            return
        lower, upper = self.bounds(symbol)
        own_graph = () if expressions.is_unbacked(symbol) else (0, 1)
        for size in sizes:
            if size in own_graph:
                continue
            if not lower <= size <= upper:
                limits = f"{lower} <= {self._short[symbol]} <= {upper}"
                self._refuse(setting, size, symbol, limits, "")
            for guard, line in self.guards():
                if guard.subs(symbol, size) is sympy.false:
                    self._refuse(setting, size, symbol, self.pretty(guard), line)

    def _refuse(self, setting: str, size: int, symbol: sympy.Symbol, guard: str, line: str) -> None:
        where = f" ({line})" if line else ""
        raise SymbolError.size_refused(
            setting=setting, size=size, dim=self.text_of(symbol), guard=guard, where=where
        )

    def text_of(self, symbol: sympy.Symbol) -> str:
        """Return text such as ``s0 = x.size()[0]``."""
        return f"{self._short[symbol]} = {self._dims[symbol]}"

    def only(self, dim: str | None) -> sympy.Symbol | None:
        """Return the symbol of a dimension, which may be left out if the graph has one, or None."""
        symbols = [symbol for symbol, name in self._dims.items() if dim in (None, name)]
        return symbols[0] if len(symbols) == 1 else None

    def chosen(self, dim: str | None) -> sympy.Symbol | None:
        """Return the symbol of a dimension, which may be left out if the graph has one, or None."""
        if not self._dims:
            return None
        if dim is None and len(self._dims) == 1:
            return next(iter(self._dims))
        if dim is None:
            raise ConfigError.which_dimension(dims=list(self._dims.values()))
        for symbol, name in self._dims.items():
            if name == dim:
                return symbol
        # One model can have several graphs; this one has no such input.
        log.warning("capture_dim %s is not among %s", dim, ", ".join(self._dims.values()))
        return None


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype in a few characters: ``f32``, ``bf16``, ``i64``, ``b8``."""
    name = str(dtype).removeprefix("torch.")
    head = name.rstrip("0123456789")
    return _DTYPES[head] + name[len(head) :] if head in _DTYPES else name
