"""Which line of the user's code is running, or raised: :class:`Line`.

The innermost frame that is neither torch's, nor Python's own library, nor ours.

Questions about one node of Dynamo's pre-grad graph: its value, what it writes, where it is from.

Every pass asks these, so they live in one place. ``node.meta["example_value"]`` is the fake value
that Dynamo left; a node without one (a statement such as ``x[i] = y``) has the value None.
"""

import inspect
import linecache
import operator
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.boundaries import target_name

_OURS = tuple({os.path.dirname(os.path.dirname(compat.__file__)), os.path.dirname(__file__)})
_SKIPPED = tuple(each + os.sep for each in (os.path.dirname(inspect.getfile(torch)), *_OURS))
_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")


class Line(NamedTuple):
    """One line of code.

    Attributes:
        file: the path.
        line: counted from 1.
        function: the name of the function that it is in.
        code: its text, in ASCII.
    """

    file: str
    line: int
    function: str
    code: str

    @property
    def where(self) -> str:
        """Such as ``model.py:41 in forward``."""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def is_users_file(file: str) -> bool:
    """Whether code of this file is the user's: of a model or of a library above torch."""
    if file.startswith(("<", *_SKIPPED)):
        return False
    below = file.removeprefix(_PYTHONS)
    return below == file or any(name in below for name in _PACKAGES)


def line_at(code: CodeType, number: int) -> Line:
    """The line of a code object."""
    text = linecache.getline(code.co_filename, number).strip()
    text = text.encode("ascii", "backslashreplace").decode()
    return Line(code.co_filename, number, code.co_name, text)


def running_line(frame: FrameType | None, until: CodeType) -> Line | None:
    """The user's line that a frame is in, or was called from; None if it is above ``until``."""
    while frame is not None and frame.f_code is not until:
        if is_users_file(frame.f_code.co_filename):
            return line_at(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def came_by_us(error: BaseException) -> bool:
    """Whether an error was raised by code of ours, or by what that called."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename.startswith(_SKIPPED[1:]) for frame, _ in frames)


def raised_at(error: BaseException, until: CodeType | None = None) -> Line | None:
    """The innermost user's line of a traceback.

    Args:
        error: with its traceback.
        until: what its callers did is left out; left out: the whole traceback.
    """
    found = None
    for code, number in _traced(error):
        if code is until:
            found = None
        elif is_users_file(code.co_filename):
            found = line_at(code, number)
    return found


def _traced(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next


COMPUTING = ("call_function", "call_method", "call_module")

_INPLACE_OPERATORS = {
    operator.setitem,
    operator.delitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.ilshift,
    operator.irshift,
    operator.imatmul,
}
# Functions and methods whose result is a view, or at times their argument itself.
_VIEWS = {"H", "T", "adjoint", "alias", "as_strided", "bfloat16", "bool", "broadcast_to", "chunk"}
_VIEWS |= {"conj", "contiguous", "cpu", "cuda", "detach", "diagonal", "double", "dsplit", "expand"}
_VIEWS |= {"expand_as", "flatten", "float", "getattr", "getitem", "half", "hsplit", "imag", "int"}
_VIEWS |= {"lift_fresh", "long", "mH", "mT", "movedim", "moveaxis", "narrow", "permute"}
_VIEWS |= {"positive", "ravel", "real", "reshape", "reshape_as", "resolve_conj", "resolve_neg"}
_VIEWS |= {"select", "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t"}
_VIEWS |= {"tensor_split", "to", "transpose", "type", "type_as", "unbind", "unflatten", "unfold"}
_VIEWS |= {"unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "view_as_complex"}
_VIEWS |= {"view_as_real", "vsplit"}
# Dropout that is off returns its argument.
_VIEWS |= {"alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d"}
_VIEWS |= {"feature_alpha_dropout", "feature_dropout"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty"}
_ALLOCATIONS |= {"new_empty_strided"}
_RESTRIDES = {"as_strided", "as_strided_copy"}
_RUN_ONCE_ON_THE_HOST = {"_log_api_usage_once", "lazy_load_decompositions", "_assert_scalar"}
_RUN_ONCE_ON_THE_HOST |= {"sym_constrain_range", "sym_constrain_range_for_size", "_check"}


def value(node: fx.Node) -> Any:
    """The fake value of a node: tensors, symbolic numbers, or containers of them; None if none."""
    return node.meta.get("example_value")


def tensors(found: Any) -> list[torch.Tensor]:
    """The tensors in a value, containers opened."""
    return [leaf for leaf in compat.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def is_cpu_scalar(found: Any, device: torch.device) -> bool:
    """Whether a value is a 0-dim CPU tensor in a graph of another device."""
    if device.type == "cpu" or not isinstance(found, torch.Tensor):
        return False
    return found.dim() == 0 and found.device.type == "cpu"


def on_device(scalar: torch.Tensor, device: torch.device, graph: fx.Graph) -> torch.Tensor:
    """Return a fake 0-dim tensor of another device with the dtype of ``scalar``.

    Args:
        scalar: a value of the graph.
        device: where the fake is.
        graph: its values belong to the fake mode.
    """
    with compat.fake_context(value(node) for node in graph.nodes):
        return torch.empty((), dtype=scalar.dtype, device=device)


def is_symbolic_number(found: Any) -> bool:
    return isinstance(found, (torch.SymInt, torch.SymFloat, torch.SymBool))


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells two strided tensors apart, without their data; sizes are expressions."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    plain = [getattr(n.node, "expr", n.node) if is_symbolic_number(n) else n for n in numbers]
    return (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), *plain)


def symbols_of(found: Any) -> set[sympy.Symbol]:
    """The free symbols in a value: of numbers, and of sizes, strides and offsets of tensors."""
    numbers: list[Any] = []
    for leaf in compat.tree_leaves(found):
        if isinstance(leaf, torch.Tensor):
            numbers += leaf.shape
            if leaf.layout is torch.strided:
                numbers += [*leaf.stride(), leaf.storage_offset()]
        else:
            numbers.append(leaf)
    free = (n.node.expr.free_symbols for n in numbers if is_symbolic_number(n))
    return set().union(*free)


def storages(found: Any) -> set[int]:
    """Keys of the storages behind the tensors of a value."""
    keys = (compat.storage_key(tensor) for tensor in tensors(found))
    return {key for key in keys if key is not None}


def short_name(target: Any) -> str:
    """The last part of a target's name: ``empty_like`` for torch, aten and method alike."""
    return target_name(target).replace("::", ".").rpartition(".")[2]


def subgraphs(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graph modules that a higher-order op takes as bodies."""
    found = []
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            module = attribute(gm, argument)
            if isinstance(module, fx.GraphModule):
                found.append(module)
    return found


def attribute(gm: torch.nn.Module, node: fx.Node) -> Any:
    """What a ``get_attr`` node reads."""
    found: Any = gm
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def written(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose tensors ``node`` writes.

    Exact for operators with a schema; for torch functions and methods it follows torch's naming
    rules (a trailing underscore, ``out=``, ``inplace=True``); a higher-order op whose body writes,
    and a call that returns its argument's memory without being a known view, are taken to write.
    """
    if node.op not in COMPUTING:
        return []
    if node.op == "call_method":
        name = str(node.target)
        inplace = _is_inplace(name) or name == "__setitem__"
        return _nodes(node.args[:1]) if inplace else _suspected_write(node)
    overloads = compat.op_overloads(node.target)
    if overloads:
        places = {place for op in overloads for place in compat.written_arguments(op)}
        given = [node.args[i] for i, _ in places if i < len(node.args)]
        return _nodes(given + [node.kwargs[name] for _, name in places if name in node.kwargs])
    if compat.is_higher_order_op(node.target):
        return _written_by_higher_order(gm, node)
    if _is_users_own(node.target):
        return [n for n in node.all_input_nodes if tensors(value(n))]
    return _written_by_function(node) or _suspected_write(node)


def _is_users_own(function: Any) -> bool:
    """Whether a function in the graph is not torch's or Python's: nothing tells what it writes."""
    top = (getattr(function, "__module__", None) or "").partition(".")[0]
    return top not in ("", "torch", "math", "operator", "_operator", "builtins")


def written_storages(gm: fx.GraphModule) -> set[int]:
    """Keys of the storages that some node writes."""
    found: set[int] = set()
    for node in gm.graph.nodes:
        for target in written(gm, node):
            found |= storages(value(target))
    return found


def outreached_storages(gm: fx.GraphModule) -> set[int]:
    """Keys of the storages of arguments that ``as_strided`` may read beyond the argument itself.

    A copy of such an argument lacks what is read. An offset that is given counts from where the
    storage begins, and nothing says how far before an argument that is at another call.
    """
    inputs = [value(node) for node in gm.graph.find_nodes(op="placeholder")]
    found: set[int] = set()
    for node in gm.graph.nodes:
        if node.op not in COMPUTING or short_name(node.target) not in _RESTRIDES:
            continue
        keys, made = storages(value(node.all_input_nodes[0])), tensors(value(node))
        given = len(node.args) > 3 or node.kwargs.get("storage_offset") is not None
        within = [t for t in tensors(inputs) if not keys.isdisjoint(storages(t))]
        if given or not all(_lies_within(one, other) for one in made for other in within):
            found |= keys
    return found


def _lies_within(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether the elements of one tensor lie between the first and the last of another.

    A no may mean that their symbolic sizes do not tell.
    """
    (first, last), (start, end) = _extent(tensor), _extent(whole)
    return all(sympy.sympify(gap).is_nonnegative for gap in (first - start, end - last))


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The offsets of the first and the last element, as expressions."""
    rank = tensor.dim()
    numbers = layout_of(tensor)[-(2 * rank + 1) :]
    sizes, strides, first = numbers[:rank], numbers[rank:-1], numbers[-1]
    pairs = zip(sizes, strides, strict=True)
    return first, first + sum((size - 1) * stride for size, stride in pairs)


def _written_by_function(node: fx.Node) -> list[fx.Node]:
    """Writes of a torch function, which has no schema, by torch's naming rules."""
    name = short_name(node.target)
    if node.target in _INPLACE_OPERATORS or _is_inplace(name):
        return _nodes(node.args[:1])
    if given_argument(node, "inplace") is True:
        return _nodes(node.args[:1])
    if given_argument(node, "out") is not None:
        return _nodes(given_argument(node, "out"))
    for flag, targets in _WRITES_IF.get(name, {}).items():
        if given_argument(node, flag) not in (None, False):
            return _nodes([given_argument(node, target) for target in targets])
    return []


def is_torchs(node: fx.Node) -> bool:
    """Whether the node calls what torch itself defines; of such a call it is known what it does."""
    if node.op == "call_method":
        return bool(node.args) and isinstance(_value_of(node.args[0]), torch.Tensor)
    overloads = compat.op_overloads(node.target)
    if overloads:
        return all(op.namespace in ("aten", "prims") for op in overloads)
    plain = node.op == "call_function" and not compat.is_higher_order_op(node.target)
    return plain and not _is_users_own(node.target)


def _value_of(argument: Any) -> Any:
    return value(argument) if isinstance(argument, fx.Node) else argument


def changes_layout(node: fx.Node) -> bool:
    """Whether the node gives its argument another shape, stride or storage in place."""
    return node.op in COMPUTING and short_name(node.target) in _LAYOUT_CHANGES


_LAYOUT_CHANGES = {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"}
_LAYOUT_CHANGES |= {"as_strided_", "resize_", "resize_as_", "set_", "rename_"}
_LAYOUT_CHANGES |= {"shallow_copy_data_"}  # what ``x.data = y`` is in a graph


def _is_inplace(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


# Functions that write some of their arguments if another one is given, or true.
_WRITES_IF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "batch_norm": {"training": ("running_mean", "running_var")},
    "instance_norm": {"use_input_stats": ("running_mean", "running_var")},
    "embedding": {"max_norm": ("weight",)},
    "embedding_bag": {"max_norm": ("weight",)},
}


def _suspected_write(node: fx.Node) -> list[fx.Node]:
    """What a call may have written that returns its argument's memory and is no known view."""
    if is_known_view(node):
        return []
    own = storages(value(node))
    return [n for n in node.all_input_nodes if not own.isdisjoint(storages(value(n)))]


def is_known_view(node: fx.Node) -> bool:
    """Whether the call is one that makes a view (or returns its argument) and nothing else."""
    overloads = compat.op_overloads(node.target)
    if overloads:
        return not any(True for op in overloads for _ in compat.written_arguments(op))
    return short_name(node.target) in _VIEWS


def given_argument(node: fx.Node, name: str) -> Any:
    """The argument that a call gives a function under this name, by position or by keyword."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = _position(node.target, name)
    return node.args[position] if position is not None and position < len(node.args) else None


_NORM = ["input", "weight", "bias", "running_mean", "running_var"]
_BUILTIN_PARAMETERS = {
    "batch_norm": [*_NORM, "training"],
    "instance_norm": [*_NORM, "use_input_stats"],
}


@cache
def _position(function: Any, name: str) -> int | None:
    names: Any = compat.parameter_names(function)
    if names is None:
        names = _BUILTIN_PARAMETERS.get(short_name(function), [])
    return names.index(name) if name in names else None


def _written_by_higher_order(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    triton = "triton_kernel_wrapper" in target_name(node.target)
    bodies = subgraphs(gm, node)
    writes = triton or any(written(body, inner) for body in bodies for inner in body.graph.nodes)
    return [n for n in node.all_input_nodes if tensors(value(n))] if writes else []


def _nodes(arguments: Any) -> list[fx.Node]:
    return [leaf for leaf in compat.tree_leaves(arguments) if isinstance(leaf, fx.Node)]


def is_view(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node only makes new tensors over storages that its arguments have.

    Such a node may be made again elsewhere, so a call that is not known to be a view is none.
    """
    if node.op not in COMPUTING or not is_known_view(node) or written(gm, node):
        return False
    own = storages(value(node))
    given: set[int] = set()
    for argument in node.all_input_nodes:
        given |= storages(value(argument))
    return bool(own) and own <= given


def is_container_item(node: fx.Node) -> bool:
    """Whether the node picks an item out of a node that returned several values."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    source = value(node.args[0])
    return isinstance(source, (tuple, list)) and not isinstance(source, torch.Size)


def is_allocation(node: fx.Node) -> bool:
    """Whether the node only allocates memory, without filling it."""
    return node.op in COMPUTING and short_name(node.target) in _ALLOCATIONS


def toggles_state(node: fx.Node) -> bool:
    """Whether the node switches a state that each piece repeats for itself."""
    switches = (*compat.LEAVES, *compat.LEAVES.values(), compat.SET_GRAD_ENABLED)
    return node.op == "call_function" and node.target in switches


def runs_once_on_host(node: fx.Node) -> bool:
    """Whether the node is a check or a registration on the host, without effect on tensors."""
    return node.op == "call_function" and short_name(node.target) in _RUN_ONCE_ON_THE_HOST


def launches_kernel(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node does work on the device; when in doubt, yes."""
    if node.op not in COMPUTING or is_symbolic_number(value(node)) or toggles_state(node):
        return False
    if is_container_item(node) or is_allocation(node):
        return False
    if runs_once_on_host(node):
        return False
    return not is_view(gm, node)


# ---------------------------------------------------------------- where a node is from

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


def frames(node: fx.Node) -> Iterator[tuple[str, int, str, str]]:
    """(file, line, function, code) of each frame of the user's stack, outermost first."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    for i, text in enumerate(lines):
        found = _FRAME.search(text)
        if found:
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            yield found["file"], int(found["line"]), found["function"].strip(), code


def user_line(node: fx.Node) -> tuple[str, str] | None:
    """(where, code) of the innermost frame, such as ``("model.py:41 in forward", "q = ...")``.

    Frames of torch, which ``torch.vmap`` brings, count only where there are no others.
    """
    innermost, users = None, False
    for file, line, function, code in frames(node):
        if users and not is_users_file(file):
            continue
        users = is_users_file(file)
        text = code.encode("ascii", "backslashreplace").decode()
        innermost = (f"{os.path.basename(file)}:{line} in {function}", text)
    return innermost
