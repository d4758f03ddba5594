"""The adapter of Python numbers that vary: the graph reads them as 0-dim tensors.

A CUDA graph repeats the numbers that its kernels were launched with. Dynamo passes a number that
varies as a symbol (an int), or as a 0-dim CPU tensor that the graph reads with ``item`` (a float).
An op that only computes with it takes a 0-dim tensor instead, int64 or float64 before the op casts
it: a new input of the graph. A captured piece reads that tensor on the device, where it is filled
before each replay, as any 0-dim CPU tensor. Arithmetic on numbers stays arithmetic of Python, which
the host does at each call (:class:`HostNumbers`). The rule: a use is replaced only if fake values
show the same dtype and layout, and the op then computes what eager computes with a Python number,
in the same dtype; a call with numbers with which the graph would compute otherwise than eager is
not converted, and what raises in Python raises as in eager.

A float that has another use as well (an argument of attention, a size, a result) becomes a constant
of the trace, see ``make_floats_constant``. An int with another use stays a number there. Sizes of
tensors are never replaced.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.adapters.adapter import Adapter, Prepared
from cgcompile.passes.base import alike, run_on_fakes
from cgcompile.passes.nodes import (
    COMPUTING,
    NUMBER,
    bound_symbols,
    is_symbolic_number,
    nodes_in_regions,
    short_name,
    symbols_of,
    tensors,
    value,
)
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.runtime.weight_sets import picker
from cgcompile.torch_compat import dynamo, expressions, raw_memory, torch_ops

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

# Arithmetic on Python numbers that the host does at each call.
_ON_HOST = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow}
_ON_HOST |= {operator.floordiv, operator.mod, torch.sym_max, torch.sym_min, torch.sym_float}

# Adds an op, or runs it: (function or name of a method, *arguments, **keywords) -> its result.
Emit = Callable[..., Any]


class HostNumber(NamedTuple):
    """A Python number that the host computes at each call, for a 0-dim tensor input."""

    kind: Any  # int or float; a number of another type is not converted
    dtype: torch.dtype  # dtype of the tensor
    limit: float  # largest finite float that eager converts to the dtype
    of: str  # names of the caller's numbers that it depends on, for messages


class HostNumbers(NamedTuple):
    """A graph with numbers as tensor inputs, and the host function that computes them."""

    graph: fx.GraphModule
    inputs: tuple[int, ...]  # the graph's inputs: positions in all inputs + added tensors
    numbers: tuple[HostNumber, ...]  # the first ``num_added`` become new tensors
    num_added: int
    sources: tuple[int, ...]  # positions of the inputs that ``compute`` takes
    compute: Callable[..., tuple[Any, ...]]  # sources -> the numbers, then the results
    results: tuple[int, ...]  # positions of the results that are computed on the host


# By operator: what Python calls for a number on the left of a tensor.
_LEFT = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _ARITHMETIC.split()}
_LEFT |= {operator.iand: operator.and_, operator.ior: operator.or_, operator.ipow: torch.pow}
_LEFT |= {operator.pow: torch.pow}


def _call_what_python_calls(gm: fx.GraphModule) -> None:
    """Replace operators that the code of a graph would compute in another way."""
    # It prints ``n += x``, which gives ``n`` another value for all that follows, and ``-2.0 ** x``,
    # which is ``-(2.0 ** x)``; of a constant, torch 2.11 prints ``-2.0.__abs__()``, also negative.
    replaced = False
    for node in list(gm.graph.nodes):
        if node.op == "call_method" and isinstance(node.args[0], (int, float)):
            if not node.all_input_nodes:
                number = getattr(node.args[0], node.target)(*node.args[1:], **node.kwargs)
                node.replace_all_uses_with(number)
                gm.graph.erase_node(node)
                replaced = True
            continue
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
        if (
            fake is None
            or raw_memory.is_wrapper(fake)
            or not fake.is_floating_point()
            or node.users
        ):
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
            with torch.set_grad_enabled(fake.requires_grad), dynamo.fake_context([fake]):
                added.meta["example_value"] = run_on_fakes(gm, added)
        gm.graph.erase_node(node)
        filled = True
    if filled:
        gm.recompile()


def _made_of_floats(result: fx.Node, floats: Collection[fx.Node]) -> bool:
    """Return whether a result depends only on input floats, at least one of which varies."""
    if result.target is not torch.scalar_tensor:
        return False
    nodes = _made_of(result)
    numbers = (n for n in nodes if n is not result and n.op != "placeholder")
    return not nodes.isdisjoint(floats) and all(
        isinstance(value(n), torch.SymFloat) for n in numbers
    )


def _made_of(result: fx.Node) -> set[fx.Node]:
    """Return a result and the nodes that compute it, down to the reads of floats."""
    nodes, waiting = {result}, [*result.all_input_nodes]
    while waiting:
        node = waiting.pop()
        nodes.add(node)
        if not _reads_float(node):
            waiting += node.all_input_nodes
    return nodes


def _reads_float(node: fx.Node) -> bool:
    """Return whether a node reads a float of the caller, which Dynamo passes as a CPU tensor."""
    source = node.args[0] if node.target == "item" else None
    return isinstance(source, fx.Node) and source.op == "placeholder"


class _Use(NamedTuple):
    """How an op takes a number as a tensor."""

    number: fx.Node
    dtype: torch.dtype  # dtype of the tensor
    run: Callable[..., Any]  # (emit, the arguments of the op with the tensor) -> result


class Numbers:
    """The numbers of one graph that vary, and what computes with them.

    Each float that varies becomes a tensor if it has no other use, and is a constant else; of each
    int those uses are replaced that can be.
    """

    def __init__(self, gm: fx.GraphModule, floats: Collection[fx.Node]) -> None:
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):
                _call_what_python_calls(module)
                _fill_elements(module)
        self._gm = gm
        self._bound = bound_symbols(gm)
        self._fakes = [value(node) for node in gm.graph.nodes]
        sizes = symbols_of(tensors(self._fakes))
        self._inputs: dict[fx.Node, frozenset[fx.Node]] = {}  # number -> inputs it depends on
        self._uses: dict[fx.Node, _Use] = {}
        self._results: dict[int, fx.Node] = {}  # results computed from numbers only
        self._constant: set[fx.Node] = set()  # inputs: floats that have another use
        for node in gm.graph.nodes:
            number = value(node)
            if node.op == "placeholder" and isinstance(number, torch.SymInt):
                if number.node.expr.is_Symbol and sizes.isdisjoint(symbols_of(number)):
                    self._inputs[node] = frozenset((node,))
            elif node in floats:
                self._inputs[node] = frozenset((node.args[0],))
        output = gm.graph.output_node()
        returned = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
        # Dynamo returns a float as a 0-dim tensor on the CPU.
        self._results = {
            item: node
            for item, node in enumerate(returned)
            if isinstance(node, fx.Node)
            and [*node.users] == [output]
            and _made_of_floats(node, floats)
        }
        users = self._users()
        ints = ((item, node) for item, node in enumerate(returned) if node in self._inputs)
        self._results = dict(sorted([*self._results.items(), *ints]))
        together = [_floats(inputs) for inputs in (*users.values(), *self._inputs.values())]
        for _ in together:  # a number computed with a constant is a constant
            for one in together:
                if not one.isdisjoint(self._constant):
                    self._constant |= one
        self._uses = {n: u for n, u in self._uses.items() if self._constant.isdisjoint(users[n])}
        for node in reversed([*self._inputs]):
            if not node.users and node.op != "placeholder":
                gm.graph.erase_node(node)
                del self._inputs[node]

    @property
    def tensors(self) -> set[fx.Node]:
        """The nodes whose floats are taken as tensors, or computed by the host."""
        return {node for node, of in self._inputs.items() if of.isdisjoint(self._constant)}

    def _users(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Map each node that takes a number and returns a tensor to the inputs it depends on."""
        in_regions = nodes_in_regions(self._gm)
        users: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self._gm.graph.nodes:
            if node in self._inputs or node in self._results.values():
                continue
            dependencies = [self._inputs[n] for n in node.all_input_nodes if n in self._inputs]
            if dependencies and self._is_arithmetic(node):
                self._inputs[node] = frozenset().union(*dependencies)
            elif dependencies:
                users[node] = frozenset().union(*dependencies)
                use = None if node in in_regions else self._use(node)
                if use is None:
                    self._constant |= _floats(users[node])
                else:
                    self._uses[node] = use
        return users

    def _is_arithmetic(self, node: fx.Node) -> bool:
        """Return whether the host can compute a number from the inputs."""
        if node in self._inputs or _reads_float(node):
            return True
        number, operands = value(node), node.all_input_nodes
        if isinstance(number, torch.SymInt) and not any(n in self._inputs for n in operands):
            return symbols_of(number) <= self._bound.keys()  # its symbols are sizes
        if node.target not in _ON_HOST or node.kwargs:
            return False
        if not isinstance(number, (torch.SymInt, torch.SymFloat)):
            return False
        return all(map(self._is_arithmetic, operands))

    def _use(self, node: fx.Node) -> _Use | None:
        """Return how an op takes its number as a tensor; None if its result would be another."""
        numbers = [n for n in node.all_input_nodes if n in self._inputs]
        if node.op not in COMPUTING or len(numbers) != 1:
            return None
        use = _binary(node, numbers[0]) or _filling(node, numbers[0])
        if use is None:
            return None
        grad = any(tensor.requires_grad for tensor in tensors(value(node)))
        try:
            with torch.set_grad_enabled(grad), dynamo.fake_context(self._fakes):
                known = {numbers[0]: torch.empty((), dtype=use.dtype)}
                args = fx.map_arg(node.args, lambda n: known[n] if n in known else value(n))
                result = use.run(_run, *args)
        except Exception:  # the op keeps its number, for any reason
            return None
        return use if alike([result], [value(node)]) else None

    def taken(self) -> HostNumbers | None:
        """Return a copy of the graph that takes the numbers as tensors; None if there are none."""
        if not self._uses and not self._results:
            return None
        gm = dynamo.copied(self._gm)
        copies = dict(zip(self._gm.graph.nodes, gm.graph.nodes, strict=True))
        positions = {n: p for p, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        numbers = sorted(dict.fromkeys(use.number for use in self._uses.values()), key=_reads_float)
        described, rewrite = [], _Rewrite(gm, self._fakes)
        for at, number in enumerate(numbers):
            sources = sorted((copies[n] for n in self._inputs[number]), key=positions.__getitem__)
            described.append(self._described(number, sources))
            added = rewrite.take(copies[number], sources[-1], described[-1])
            if added is not None:
                positions[added] = len(self._gm.graph.find_nodes(op="placeholder")) + at
        for node, use in self._uses.items():
            rewrite.replace(copies[node], use._replace(number=copies[use.number]))
        output = gm.graph.output_node()
        returned = output.args[0]
        if self._results and isinstance(returned, (tuple, list)):
            kept = [node for item, node in enumerate(returned) if item not in self._results]
            output.args = (tuple(kept),)
        of_numbers = {*self._inputs, *frozenset().union(*self._inputs.values())}
        removed = {copies[node] for node in of_numbers if node in copies}  # the rest are constants
        made_of = set[fx.Node]().union(*(_made_of(copies[n]) for n in self._results.values()))
        removed.update(node for node in made_of if node.op != "placeholder")  # tensors have sizes
        for node in reversed(gm.graph.nodes):
            if node in removed and not node.users:
                gm.graph.erase_node(node)
        gm.graph.lint()
        gm.recompile()
        inputs = tuple([positions[node] for node in gm.graph.find_nodes(op="placeholder")])
        computed = self._on_host([*numbers, *self._results.values()])
        num_added = sum(not _reads_float(number) for number in numbers)
        results = tuple(self._results)
        return HostNumbers(gm, inputs, tuple(described), num_added, *computed, results)

    def _described(self, number: fx.Node, sources: Sequence[fx.Node]) -> HostNumber:
        dtypes = {use.dtype for use in self._uses.values() if use.number is number}
        of = ", ".join([dynamo.source_name(source) or source.name for source in sources])
        if _dtype_of(number) is torch.int64:
            return HostNumber(int, torch.int64, math.inf, of)
        limit = min([torch.finfo(d).max for d in dtypes if d.is_floating_point], default=math.inf)
        return HostNumber(float, torch.float64, limit, of)

    def _on_host(self, wanted: list[fx.Node]) -> tuple[tuple[int, ...], Callable[..., Any]]:
        """Return (positions of its inputs, a Python function) that computes these nodes."""
        needed, waiting = set[fx.Node](), [*wanted]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += self._operands(node)
        graph, copies = fx.Graph(), dict[fx.Node, Any]()
        sources = []
        for position, node in enumerate(self._gm.graph.find_nodes(op="placeholder")):
            if node in needed:
                copies[node] = graph.node_copy(node)
                sources.append(position)
        bound = {symbol: copies[n] for symbol, n in self._bound.items() if n in copies}
        for node in self._gm.graph.nodes:
            if node in needed and node not in copies:
                if self._is_size(node):
                    copies[node] = expressions.expression_nodes(value(node).node.expr, bound)
                else:
                    copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple([copies[node] for node in wanted]))
        return tuple(sources), fx.GraphModule(self._gm, graph).forward

    def _operands(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the operands of a number; for a size, the inputs that have its symbols."""
        if self._is_size(node):
            return [self._bound[symbol] for symbol in symbols_of(value(node))]
        return node.all_input_nodes

    def _is_size(self, node: fx.Node) -> bool:
        """Return whether a node computes an int from sizes only."""
        is_int = isinstance(value(node), torch.SymInt)
        return is_int and node.op != "placeholder" and node not in self._inputs


class _Rewrite:
    """Lets the ops of a graph take numbers as tensors."""

    def __init__(self, gm: fx.GraphModule, fakes: list[Any]) -> None:
        self._gm, self._fakes = gm, fakes
        self._tensors: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def take(self, number: fx.Node, source: fx.Node, described: HostNumber) -> fx.Node | None:
        """Take a number as a 0-dim tensor; return the input that was added behind ``source``."""
        if _reads_float(number):  # the number is a tensor already
            (taken,), added = number.all_input_nodes, None
        else:
            with self._gm.graph.inserting_after(source):
                taken = added = self._gm.graph.placeholder(f"{number.name}_as_tensor")
            with dynamo.fake_context(self._fakes):
                taken.meta["example_value"] = torch.empty((), dtype=described.dtype)
            dynamo.set_source_name(taken, described.of)
        taken.meta[NUMBER] = True
        self._tensors[number, described.dtype] = taken
        return added

    def replace(self, node: fx.Node, use: _Use) -> None:
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

    def _tensor(self, number: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Return the node that has a number as a 0-dim tensor; each piece repeats a cast."""
        key = number, dtype
        if key not in self._tensors:
            source = self._tensors[number, _dtype_of(number)]
            last = self._gm.graph.find_nodes(op="placeholder")[-1]
            with self._gm.graph.inserting_after(last):
                self._tensors[key] = self._added(source, "to", (source, dtype), {})
            self._tensors[key].meta[NUMBER] = True
        return self._tensors[key]

    def _added(self, like: fx.Node, function: Any, args: Any, kwargs: Any) -> fx.Node:
        """Add a node at the place of insertion, with the line and the marks of another."""
        graph = self._gm.graph
        method = isinstance(function, str)
        add = graph.call_method if method else graph.call_function
        node = add(function, tuple(args), kwargs)
        marks = {} if like.op == "placeholder" else like.meta
        node.meta = {key: mark for key, mark in marks.items() if key != "example_value"}
        grad = any(tensor.requires_grad for tensor in tensors(value(like)))
        with torch.set_grad_enabled(grad), dynamo.fake_context(self._fakes):
            node.meta["example_value"] = run_on_fakes(self._gm, node)
        return node


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
    if torch_ops.is_python_operator(node.target) and name[1:] in _ARITHMETIC.split():
        name, inplace = name[1:], True
    name = name.rstrip("_")
    return _SAME.get(name, name), inplace


def _fake(argument: Any) -> torch.Tensor | None:
    """Return the fake value of a tensor argument, else None."""
    fake = value(argument) if isinstance(argument, fx.Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


def _binary(node: fx.Node, number: fx.Node) -> _Use | None:
    """Return how an op of a tensor and a number takes the number as a tensor."""
    name, inplace = _name_of(node)
    if name not in _BINARY or len(node.args) != 2 or node.kwargs:
        return None
    tensor = _fake(next((arg for arg in node.args if arg is not number), None))
    if tensor is None or tensor.is_complex():
        return None
    common = torch.result_type(tensor, 1 if _dtype_of(number) is torch.int64 else 1.5)
    if name == "pow" and (number is node.args[1] or not tensor.is_floating_point()):
        return None  # kernels depend on the value of an exponent
    if name == "div":
        common = value(node).dtype  # ints are divided as floats
    # With a Python number kernels compute in float32, except additions on the CPU.
    on_cpu = tensor.device.type == "cpu"
    wide = common in _REDUCED and (name in _SCALES or (name in _ADDS and not on_cpu))
    if common in _REDUCED and not wide and name not in (*_ADDS, *_COMPARES):
        return None
    at = 1 if node.args[0] is number else 0  # position of the tensor
    inverts = name == "div" and at == 1 and torch_ops.is_python_operator(node.target)
    function = torch.mul if inverts else getattr(torch, name)

    def run(emit: Emit, one: Any, two: Any) -> Any:
        if inplace and not wide:
            return emit(f"{name}_", one, two)
        operands = [one, two]
        if inverts:  # Python computes ``number / tensor`` by the reciprocal
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


# ---------------------------------------------------------------- the adapter


def adapt_numbers(
    gm: fx.GraphModule, floats: Collection[fx.Node], *, folds: bool
) -> tuple[fx.GraphModule, list[Adapter]]:
    """Return the graph that takes numbers as tensors, and its adapter; the graph itself without.

    Args:
        gm: changed in place: other floats become constants if ``folds``.
        floats: nodes that read a Python float of the caller which varies.
        folds: whether pieces are compiled from the graph, which then takes no other float.
    """
    varying = Numbers(gm, floats)
    if folds:
        dynamo.make_floats_constant(gm, but=varying.tensors)
    numbers = varying.taken()
    if numbers is None:
        return gm, []
    original = dynamo.with_checkpoints(gm).forward
    return numbers.graph, [Adapter(_Computing(numbers).prepare, original)]


class _Computing:
    """Computes the numbers of a call on the host."""

    def __init__(self, numbers: HostNumbers) -> None:
        self._numbers, self._added = numbers.numbers, numbers.numbers[: numbers.num_added]
        self._compute, self._results = numbers.compute, numbers.results
        self._sources, self._inputs = picker(numbers.sources), picker(numbers.inputs)

    def prepare(self, inputs: tuple[Any, ...]) -> Prepared:
        """Return the inputs with the numbers as tensors; raise RunPlain where one cannot be."""
        try:
            computed = self._compute(*self._sources(inputs))
        except (ArithmeticError, ValueError) as error:  # raised by the original graph, too
            detail = f"a number made of the inputs raises {type(error).__name__}: {error}"
            raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, detail)) from error
        for number, known in zip(computed, self._numbers, strict=False):  # results are more
            if not _fits(number, known):
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, _why_not(number, known)))
        pairs = zip(computed, self._added, strict=False)
        tensors = tuple([torch.tensor(number, dtype=known.dtype) for number, known in pairs])
        insert = partial(self._inserted, computed) if self._results else None
        return Prepared(self._inputs(inputs + tensors), insert)

    def _inserted(self, computed: tuple[Any, ...], result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result with the numbers in it that the host has computed."""
        results = list(result)
        for item, number in zip(self._results, computed[len(self._numbers) :], strict=True):
            results.insert(item, number)
        return tuple(results)


def _fits(number: Any, known: HostNumber) -> bool:
    """Return whether ops compute with the tensor of a number as eager does with the number."""
    if type(number) is not known.kind:
        return False
    if known.kind is int:
        return bool(-(1 << 63) <= number < 1 << 63)
    return abs(number) <= known.limit or not math.isfinite(number)


def _why_not(number: Any, known: HostNumber) -> str:
    what = f"a number made of {known.of} is {number!r}"
    if type(number) is not known.kind:
        return f"{what}, no {known.kind.__name__} as when it was traced"
    return f"{what}, beyond {'int64' if known.kind is int else format(known.limit, '.4g')}"
