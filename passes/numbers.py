"""Let graphs read Python numbers that vary: ops take them as 0-dim tensors.

A CUDA graph repeats the numbers that its kernels were launched with. Dynamo passes a number that
varies as a symbol (an int), or as a 0-dim CPU tensor that the graph reads with ``item`` (a float).
An op that only computes with it takes a 0-dim tensor instead, int64 or float64 before the op casts
it. A captured piece reads that tensor on the device, where it is filled before each replay, as any
0-dim CPU tensor. The rule: a use is replaced only if fake values show the same dtype and layout,
and the op then computes what eager computes with a Python number, in the same dtype.

A float that has another use as well (an argument of attention, a size, a result) becomes a constant
of the trace, see ``make_floats_constant``. An int with another use stays a number there. Sizes of
tensors are never replaced.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.passes.base import alike, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    NUMBER,
    is_symbolic_number,
    short_name,
    symbols_of,
    tensors,
    value,
)
from cgcompile.passes.regions import nodes_in_regions

_SAME = {"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div"}
_SAME |= {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
_ADDS, _SCALES, _COMPARES = {"add", "sub", "rsub"}, {"mul", "div"}, {"eq", "ne", "lt", "le"}
_COMPARES |= {"gt", "ge"}
_BINARY = {*_ADDS, *_SCALES, *_COMPARES, "floor_divide", "pow", "remainder"}
_ARITHMETIC = "add sub mul truediv floordiv mod xor lshift rshift"  # and ``iadd``, ...
_REDUCED = (torch.float16, torch.bfloat16)

# The dtypes that hold each number of a dtype. Eager refuses to write one that overflows.
_HOLD_FLOATS = {torch.bool, torch.bfloat16, torch.float32, torch.float64}
_HOLD = {torch.int64: {torch.int64, *_HOLD_FLOATS}, torch.float64: _HOLD_FLOATS}

# Arithmetic on Python numbers that tensors of int64 and float64 do with the same result.
_ON_INTS = {operator.add, operator.sub, operator.mul, operator.neg}
_ON_INTS |= {operator.floordiv, operator.mod, torch.sym_max, torch.sym_min}
_ON_FLOATS = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg}
_ON_FLOATS |= {torch.sym_float, torch.sym_max, torch.sym_min}

# Adds an op, or runs it: (function or name of a method, *arguments, **keywords) -> its result.
Emit = Callable[..., Any]


def numbers_to_tensors(gm: fx.GraphModule, floats: Collection[fx.Node]) -> None:
    """Replace the ints that ops of a graph compute with by 0-dim tensors, and these floats."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            _call_what_python_calls(module)
            _fill_elements(module)
    numbers = _Numbers(gm, floats)
    if numbers.inputs:
        numbers.replace()


# By operator: what Python calls for a number on the left of a tensor.
_LEFT = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _ARITHMETIC.split()}
_LEFT |= {operator.iand: operator.and_, operator.ior: operator.or_, operator.ipow: torch.pow}
_LEFT |= {operator.pow: torch.pow}


def _call_what_python_calls(gm: fx.GraphModule) -> None:
    """Replace operators that the code of a graph would compute in another way."""
    # It prints ``n += x``, which gives ``n`` another value for all that follows, and ``-2.0 ** x``,
    # which is ``-(2.0 ** x)``.
    replaced = False
    for node in gm.graph.nodes:
        if node.target in _LEFT and isinstance(value(node), torch.Tensor):
            left = value(node.args[0]) if isinstance(node.args[0], fx.Node) else node.args[0]
            if is_symbolic_number(left) or isinstance(left, (int, float, complex)):
                node.target = _LEFT[node.target]
                replaced = True
    if replaced:
        gm.recompile()


def _fill_elements(gm: fx.GraphModule) -> None:
    """Write a number into one element (``y[0, 1] = 2.0``) by ``fill_``, not by a copy."""
    filled = False
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        tensor, index, number = node.args
        fake, indices = _fake(tensor), index if isinstance(index, tuple) else (index,)
        if fake is None or compat.is_wrapper(fake) or not fake.is_floating_point() or node.users:
            continue
        if type(number) not in (int, float) or len(indices) != fake.dim():
            continue
        if not all(type(each) is int for each in indices):
            continue
        with gm.graph.inserting_before(node):
            element = gm.graph.call_function(operator.getitem, (tensor, index))
            written = gm.graph.call_method("fill_", (element, number))
        for added in (element, written):
            added.meta = {key: mark for key, mark in node.meta.items() if key != "example_value"}
            with torch.set_grad_enabled(fake.requires_grad), compat.fake_context([fake]):
                added.meta["example_value"] = run_on_fakes(gm, added)
        gm.graph.erase_node(node)
        filled = True
    if filled:
        gm.recompile()


class NumberResults(NamedTuple):
    """Results that floats of the caller alone make, such as an attribute that a call assigns."""

    positions: tuple[int, ...]  # among all results, in order
    inputs: dict[fx.Node, fx.Node]  # of the graph, each with the node that reads its float
    compute: Callable[..., tuple[torch.Tensor, ...]]  # from these inputs, on the host


def take_number_results(gm: fx.GraphModule, floats: Collection[fx.Node]) -> NumberResults | None:
    """Remove the results that floats of the caller alone make; None if there are none."""
    # Dynamo returns each as a 0-dim tensor on the CPU.
    output = gm.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return None
    float_nodes = [_made_of_floats(node, floats) for node in results]
    positions = tuple([position for position, nodes in enumerate(float_nodes) if nodes])
    if not positions:
        return None
    needed = set[fx.Node]().union(*filter(None, float_nodes))
    inputs = {n.args[0]: n for n in gm.graph.nodes if n in needed and _reads_float(n)}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in inputs:
        copies[source] = graph.node_copy(source)
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    numbers: list[Any] = [results[position] for position in positions]
    graph.output(tuple([copies[node] for node in numbers]))
    kept: list[Any] = [node for node, nodes in zip(results, float_nodes, strict=True) if not nodes]
    output.args = (tuple(kept),)
    for node in reversed(gm.graph.nodes):
        if node in needed and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return NumberResults(positions, inputs, fx.GraphModule(gm, graph).forward)


def _made_of_floats(result: Any, floats: Collection[fx.Node]) -> set[fx.Node] | None:
    """Return the nodes that compute a result from floats of the caller alone; None of others."""
    if not isinstance(result, fx.Node) or result.target is not torch.scalar_tensor:
        return None
    nodes, waiting = {result}, [*result.all_input_nodes]
    while waiting:
        node = waiting.pop()
        nodes.add(node)
        if not isinstance(value(node), torch.SymFloat):
            return None
        if not _reads_float(node):
            waiting += node.all_input_nodes
    return None if nodes.isdisjoint(floats) else nodes


def _reads_float(node: fx.Node) -> bool:
    """Return whether a node reads a float of the caller, which Dynamo passes as a CPU tensor."""
    source = node.args[0] if node.target == "item" else None
    return isinstance(source, fx.Node) and source.op == "placeholder"


class _Use(NamedTuple):
    """How an op takes a number as a tensor."""

    number: fx.Node
    dtype: torch.dtype  # of the tensor
    run: Callable[..., Any]  # (emit, the arguments of the op with the tensor) -> result


class _Numbers:
    """The numbers of one graph that vary, and what computes with them."""

    def __init__(self, gm: fx.GraphModule, floats: Collection[fx.Node]) -> None:
        self._gm = gm
        self._fakes = [value(node) for node in gm.graph.nodes]
        sizes = symbols_of(tensors(self._fakes))
        self.inputs: dict[fx.Node, frozenset[fx.Node]] = {}  # of the graph, by numbers they make
        self._uses: dict[fx.Node, _Use] = {}
        self._tensors: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self._constant: set[fx.Node] = set()  # inputs: floats that have another use
        for node in gm.graph.nodes:
            number = value(node)
            if node.op == "placeholder" and isinstance(number, torch.SymInt):
                if number.node.expr.is_Symbol and sizes.isdisjoint(symbols_of(number)):
                    self.inputs[node] = frozenset((node,))
            elif node in floats:
                self.inputs[node] = frozenset((node.args[0],))

    def replace(self) -> None:
        """Replace each float that has no other use, and of each int the uses that can be."""
        users = self._users()
        together = [_floats(inputs) for inputs in (*users.values(), *self.inputs.values())]
        for _ in together:  # what is computed with a constant is one as well
            for floats in together:
                if not floats.isdisjoint(self._constant):
                    self._constant |= floats
        for node, use in self._uses.items():
            if self._constant.isdisjoint(users[node]):
                self._replace(node, use)
        for node in reversed(self.inputs):
            if not node.users and node.op != "placeholder":
                self._gm.graph.erase_node(node)
        self._gm.recompile()

    def _users(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Find what takes a number and makes none; return the inputs that each depends on."""
        in_regions = nodes_in_regions(self._gm)
        users: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self._gm.graph.nodes:
            if node in self.inputs:
                continue
            dependencies = [self.inputs[n] for n in node.all_input_nodes if n in self.inputs]
            if dependencies and self._is_arithmetic(node):
                self.inputs[node] = frozenset().union(*dependencies)
            elif dependencies:
                users[node] = frozenset().union(*dependencies)
                use = None if node in in_regions else self._use(node)
                if use is None:
                    self._constant |= _floats(users[node])
                else:
                    self._uses[node] = use
        return users

    def _is_arithmetic(self, node: fx.Node) -> bool:
        """Return whether tensors can do the arithmetic of a number, on numbers and sizes."""
        number = value(node)
        if node.op not in COMPUTING or node.kwargs or not is_symbolic_number(number):
            return False
        if isinstance(number, torch.SymInt):
            return node.target in _ON_INTS
        return isinstance(number, torch.SymFloat) and node.target in _ON_FLOATS

    def _use(self, node: fx.Node) -> _Use | None:
        """Return how an op takes its number as a tensor; None if its result would be another."""
        numbers = [n for n in node.all_input_nodes if n in self.inputs]
        if node.op not in COMPUTING or len(numbers) != 1:
            return None
        use = _binary(node, numbers[0]) or _filling(node, numbers[0])
        if use is None:
            return None
        grad = any(tensor.requires_grad for tensor in tensors(value(node)))
        try:
            with torch.set_grad_enabled(grad), compat.fake_context(self._fakes):
                known = {numbers[0]: torch.empty((), dtype=use.dtype)}
                args = fx.map_arg(node.args, lambda n: known[n] if n in known else value(n))
                result = use.run(_run, *args)
        except Exception:  # whatever the reason, the op keeps its number
            return None
        return use if alike([result], [value(node)]) else None

    def _replace(self, node: fx.Node, use: _Use) -> None:
        """Let an op take its number as a tensor."""
        graph, number = self._gm.graph, self._tensor(use.number, use.dtype)
        added: list[fx.Node] = []

        def emit(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
            added.append(self._added(node, function, args, kwargs))
            return added[-1]

        with graph.inserting_before(node):
            args = fx.map_arg(node.args, lambda n: number if n is use.number else n)
            result = use.run(emit, *args)
        result.meta["example_value"] = value(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)

    def _added(self, like: fx.Node, function: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a node at the place of insertion, with the line and the marks of another."""
        graph = self._gm.graph
        method = isinstance(function, str)
        add = graph.call_method if method else graph.call_function
        node = add(function, tuple(args), kwargs)
        marks = {} if like.op == "placeholder" else like.meta
        node.meta = {key: mark for key, mark in marks.items() if key != "example_value"}
        grad = any(tensor.requires_grad for tensor in tensors(value(like)))
        with torch.set_grad_enabled(grad), compat.fake_context(self._fakes):
            node.meta["example_value"] = run_on_fakes(self._gm, node)
        return node

    # -------------------------------------------------------------- numbers as tensors

    def _tensor(self, number: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the node that has a number as a 0-dim tensor; each piece repeats it."""
        key = number, dtype
        if key not in self._tensors:
            own = _dtype_of(number)
            if dtype is not own:
                source = self._tensor(number, own)
                self._tensors[key] = self._behind(source, "to", (source, dtype))
            elif number.op == "placeholder":
                kwargs = {"dtype": dtype}
                self._tensors[key] = self._behind(number, torch.scalar_tensor, (number,), kwargs)
            elif number.target == "item":
                (self._tensors[key],) = self.inputs[number]
                self._tensors[key].meta[NUMBER] = True
            else:
                self._tensors[key] = self._arithmetic(number, own)
        return self._tensors[key]

    def _arithmetic(self, number: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return a node that computes as a tensor what a node computes from numbers."""
        args = [self._operand(arg, dtype) for arg in number.args]
        function = _FUNCTIONS.get(number.target)
        if function is None:  # to a float, which the operand is by now
            source: fx.Node = args[0]
            return source
        if number.target in _LIMITS and not all(arg in self.inputs for arg in number.args):
            args.sort(key=lambda arg: not isinstance(_fake(arg), torch.Tensor))  # the tensor first
            args, function = [*args[:1], *_LIMITS[number.target], args[1]], torch.clamp
        return self._behind(number, function, args)

    def _operand(self, operand: Any, dtype: torch.dtype) -> Any:
        """Return an operand of arithmetic: a number of an input as a tensor, others as they are."""
        return self._tensor(operand, dtype) if operand in self.inputs else operand

    def _behind(self, node: fx.Node, function: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """Add a node behind another, and behind all inputs of the graph."""
        last = self._gm.graph.find_nodes(op="placeholder")[-1]
        with self._gm.graph.inserting_after(last if node.op == "placeholder" else node):
            added = self._added(node, function, args, kwargs or {})
        added.meta[NUMBER] = True
        return added


_FUNCTIONS: Mapping[Any, Any] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
    operator.neg: torch.neg,
    torch.sym_max: torch.maximum,
    torch.sym_min: torch.minimum,
}


# What ``clamp`` takes before a limit that is no tensor.
_LIMITS: Mapping[Any, tuple[Any, ...]] = {torch.sym_max: (), torch.sym_min: (None,)}


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(function, str):
        return getattr(args[0], function)(*args[1:], **kwargs)
    return function(*args, **kwargs)


def _floats(inputs: frozenset[fx.Node]) -> set[fx.Node]:
    return {node for node in inputs if isinstance(value(node), torch.Tensor)}


def _dtype_of(number: fx.Node) -> torch.dtype:
    return torch.int64 if isinstance(value(number), torch.SymInt) else torch.float64


def _name_of(node: fx.Node) -> tuple[str, bool]:
    """Return the name of the function of an op, and whether it writes its first argument."""
    name = short_name(node.target)
    if name[2:-2] in _COMPARES:  # torch 2.11 calls ``__eq__``
        name = name[2:-2]
    inplace = name.endswith("_")
    if compat.is_python_operator(node.target) and name[1:] in _ARITHMETIC.split():
        name, inplace = name[1:], True
    name = name.rstrip("_")
    return _SAME.get(name, name), inplace


def _fake(argument: Any) -> torch.Tensor | None:
    """Return the fake value of an argument that is a tensor; None for others."""
    fake = value(argument) if isinstance(argument, fx.Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


def _common(number: fx.Node, tensor: torch.Tensor | None) -> torch.dtype | None:
    """Return the dtype in which an op computes with a Python number; None if complex."""
    if tensor is None or tensor.is_complex():
        return None
    return torch.result_type(tensor, 1 if _dtype_of(number) is torch.int64 else 1.5)


def _binary(node: fx.Node, number: fx.Node) -> _Use | None:
    """Return how an op of a tensor and a number takes the number as a tensor."""
    name, inplace = _name_of(node)
    if name not in _BINARY or len(node.args) != 2 or node.kwargs:
        return None
    tensor = _fake(next((arg for arg in node.args if arg is not number), None))
    common = _common(number, tensor)
    if tensor is None or common is None:
        return None
    if name == "pow" and (number is node.args[1] or not tensor.is_floating_point()):
        return None  # kernels depend on the value of an exponent
    if name == "div":
        common = value(node).dtype  # ints are divided as floats
    # With a Python number kernels compute in float32, those of the CPU that add excepted.
    on_cpu = tensor.device.type == "cpu"
    wide = common in _REDUCED and (name in _SCALES or (name in _ADDS and not on_cpu))
    if common in _REDUCED and not wide and name not in (*_ADDS, *_COMPARES):
        return None
    at = 1 if node.args[0] is number else 0  # of the tensor
    inverts = name == "div" and at == 1 and compat.is_python_operator(node.target)
    function = torch.mul if inverts else getattr(torch, name)

    def run(emit: Emit, one: Any, two: Any) -> Any:
        if inplace and not wide:
            return emit(f"{name}_", one, two)
        operands = [one, two]
        if inverts:  # as Python does for a number by a tensor
            operands[1] = emit("reciprocal", two)
        if wide:
            operands[at] = emit("to", operands[at], torch.float32)
        result = emit(function, *operands)
        if inplace:
            return emit("copy_", one, result)
        return emit("to", result, common) if wide else result

    return _Use(number, torch.float32 if wide else common, run)


def _filling(node: fx.Node, number: fx.Node) -> _Use | None:
    """Return how an op that writes a number into a tensor takes it as a tensor."""
    name, inplace = _name_of(node)
    result = value(node)
    at = [index for index, arg in enumerate(node.args) if arg is number]
    if not isinstance(result, torch.Tensor) or len(at) != 1 or result.is_complex():
        return None
    keywords, dtype = set(node.kwargs), result.dtype
    if dtype not in _HOLD[_dtype_of(number)]:
        return None
    if name == "full" and at == [1] and keywords <= {"dtype", "device"}:

        def full(emit: Emit, size: Any, fill: Any) -> Any:
            return emit("fill_", emit(torch.empty, size, dtype=dtype, device=result.device), fill)

        return _Use(number, dtype, full)
    if name == "full_like" and at == [1] and keywords <= {"dtype", "device"}:

        def full_like(emit: Emit, like: Any, fill: Any) -> Any:
            return emit("fill_", emit(torch.empty_like, like, **node.kwargs), fill)

        return _Use(number, dtype, full_like)
    if (name, at) not in (("fill", [1]), ("masked_fill", [2]), ("where", [1]), ("where", [2])):
        return None
    if keywords or (name == "fill" and not inplace):
        return None

    def masked_fill(emit: Emit, tensor: Any, mask: Any, fill: Any) -> Any:
        filled = emit(torch.where, mask, fill, tensor)  # ``masked_fill`` reads the tensor ``fill``
        return emit("copy_", tensor, filled) if inplace else emit("contiguous", filled)

    def run(emit: Emit, *args: Any) -> Any:
        return emit(node.target, *args)

    return _Use(number, dtype, masked_fill if name == "masked_fill" else run)
