"""The arguments of a traced call as a contract: :class:`Fits`.

Dynamo's guards check the whole model and cost tens of microseconds. Where they are dropped, the
arguments are still compared: their number and order, types, dtypes, devices, ranks, layouts,
whether they require grad, the sizes that are not dynamic, which sizes are equal, how tensor
subclasses are built and what is inside of them, plain values, also in attributes of tensors, and
containers of them; other objects by identity; and settings of torch that traced code reads, such as
autocast::

    def holds(args, kwargs):
        if len(args) != 2 or kwargs:
            return False
        v0, v1 = args
        if not alike(v0, v1):
            if type(v0) is not t0 or v0.dtype is not d0 or v0.device != e0 or v0.requires_grad:
                return False
            s0 = v0.shape
            if len(s0) != 2 or s0[1] != 16:
                return False
            ...
        if v0.shape[0] != v1.shape[0]:
            return False
        ...
        if settings() != was:
            return False
        return True

``alike`` is one function of torch for all tensors of usual layouts. It rejects some that fit, such
as those of another inference mode, so the rejected ones are compared in detail.
"""

import ast
import builtins
import math
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from cgcompile.graphs.contract import Contract, Reads
from cgcompile.runtime.fast_path import ArgumentChecks
from cgcompile.torch_compat import expressions, raw_memory, torch_ops, torch_settings

_PLAIN = (bool, int, str, bytes, range, type(None))
_SEALED = (torch.dtype, torch.device, torch.layout, torch.memory_format, types.MethodType)
_FEW = 4  # tensors that are compared pair by pair

# By path, such as ``L['x'][0]``: for each dimension its size, or the name of a size that varies.
Shapes = Mapping[str, tuple[int | str, ...]]

# What was assumed of sizes: (Python text, its symbols).
Conditions = Iterable[tuple[str, tuple[str, ...]]]


# Of a stride or an offset: where it is read, its text, and the condition under which it is free.
_Step = tuple[str, str, str]


class LiveTensors:
    """Tensors, held weakly; ``ids`` has the identities of those that are alive."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.ids: set[int] = set()
        self._references = [self._watched(tensor) for tensor in tensors]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tensor for ref in self._references if (tensor := ref()) is not None)

    def _watched(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        ids, identity = self.ids, id(tensor)
        ids.add(identity)
        return weakref.ref(tensor, lambda _: ids.discard(identity))


class Fits:
    """Writes the contract ``function(args, kwargs)``: whether a trace of a call serves another."""

    # ``paths`` are Dynamo's, by position or keyword; ``shapes`` and ``strides`` are by path, and so
    # are the ``offsets`` into memory, and the ``numbers`` that are inputs of the trace, which may
    # have other values. ``alone``: no guards of Dynamo are checked beside these.
    # ``pinned`` tensors, which the model also reads in another way, must be the same objects. The
    # order of ``collected`` keywords counts. No argument may be one of the tensors ``elsewhere``,
    # which are not held. ``references`` are weak, to the objects that must be the same. The values
    # at the paths ``constants``, attributes of the arguments, are part of the trace.

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        paths: Mapping[Any, str],
        *,
        shapes: Shapes,
        strides: Shapes,
        offsets: Mapping[str, str],
        conditions: Conditions,
        numbers: Mapping[str, str],
        pinned: Collection[str] = (),
        collected: Collection[str] = (),
        elsewhere: Iterable[torch.Tensor] = (),
        alone: bool = False,
        constants: Collection[str] = (),
    ) -> None:
        self.references: list[weakref.ref[Any]] = []
        reads = Reads()
        reads.names |= expressions.NAMES_IN_TEXT
        self._lines, self._unless, self._bound = reads.lines, reads.unless, reads.bound
        self._elsewhere = LiveTensors(elsewhere)
        self._shapes, self._strides, self._pinned = shapes, strides, pinned
        self._offsets, self._numbers, self._alone = offsets, numbers, alone
        self._attributes = _attributes(constants, shapes)
        self.varies = False  # whether an argument is such a number
        self._count = 0
        self._sizes: dict[str, list[str]] = {}  # by the name of a size: where it can be read
        self._steps: list[_Step] = []  # of strides and offsets
        self._read: set[str] = set()  # the sizes that have a variable
        self._tensors: dict[int, str] = {}  # by identity: the variable that holds it
        self._same: dict[int, str] = {}  # the same, of pinned tensors
        self._usual: list[tuple[str, torch.Tensor, tuple[int | str, ...]]] = []
        self._detailed: list[str] = []  # lines for these, where ``alike`` rejects them

        keywords = "kwargs" if not kwargs else f"len(kwargs) != {len(kwargs)}"
        self._unless(f"len(args) != {len(args)} or {keywords}")
        variables = [self._fresh("v") for _ in args]
        if variables:
            self._lines.append(f"({', '.join(variables)},) = args")
        leaves = []
        for position, (variable, value) in enumerate(zip(variables, args, strict=True)):
            leaves.append(self._added(self._leaf, variable, value, paths.get(position, "")))
        names = [self._fresh("v") for _ in kwargs]
        others = self._added(self._keywords, kwargs, names, paths, collected)
        self._compare_usual()
        self._compare_sizes(conditions)
        objects = self._added(self._compare_objects)
        settings = self._added(self._compare_settings)

        self.function = Contract("args, kwargs", reads, "argument").holds
        self.checks = ArgumentChecks(
            variables=[*variables, *names],
            keywords=list(kwargs),
            leaves=leaves,
            others=others,
            objects=objects,
            settings=settings,
            names=reads.names,
            elsewhere=self._elsewhere,
        )

    def _added(self, compare: Callable[..., None], *args: Any) -> list[str]:
        """Return the lines that a method adds."""
        start = len(self._lines)
        compare(*args)
        return self._lines[start:]

    def _keywords(
        self,
        kwargs: Mapping[str, Any],
        variables: Sequence[str],
        paths: Mapping[Any, str],
        collected: Collection[str],
    ) -> None:
        absent = self._bound("m", object())
        for variable, (name, value) in zip(variables, kwargs.items(), strict=True):
            self._lines.append(f"{variable} = kwargs.get({name!r}, {absent})")
            self._leaf(variable, value, paths.get(name, ""))
        if len(collected) > 1:
            order = self._bound("k", [name for name in kwargs if name in collected])
            self._unless(f"[name for name in kwargs if name in {order}] != {order}")

    def _fresh(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _leaf(self, name: str, value: Any, path: str) -> None:
        """Compare the variable ``name`` with a value of the traced call."""
        kind = self._bound("t", type(value))
        if isinstance(value, torch.Tensor):
            self._tensor(name, kind, value, path)
        elif path in self._numbers and type(value) in (int, float):
            self.varies = True
            finite = f" or not math.isfinite({name})" if type(value) is float else ""
            self._unless(f"type({name}) is not {kind}{finite}")
            self._sizes.setdefault(self._numbers[path], []).append(name)
        elif isinstance(value, (float, complex)):  # as text: -0.0 is not 0.0, nan is nan
            self._unless(f"type({name}) is not {kind} or repr({name}) != {repr(value)!r}")
        elif isinstance(value, (*_PLAIN, *_SEALED)):
            self._unless(f"type({name}) is not {kind} or {name} != {self._bound('c', value)}")
        else:
            self._container(name, kind, value, path)

    def _container(self, name: str, kind: str, value: Any, path: str) -> None:
        """Compare a container part by part, and any other object by identity."""
        rest = ""
        if type(value) in (tuple, list, torch.Size):
            rest = f" or len({name}) != {len(value)}"
            parts = {f"[{index}]": item for index, item in enumerate(value)}
        elif isinstance(value, slice) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            fields = getattr(value, "_fields", ("start", "stop", "step"))
            parts = {f".{field}": getattr(value, field) for field in fields}
        elif type(value) is dict and all(type(key) in (str, int) for key in value):
            keys = self._bound("k", list(value))  # their order as well: a model may walk them
            rest = f" or list({name}) != {keys}"
            parts = {f"[{key!r}]": item for key, item in value.items()}
        else:
            self._object(name, value)
            return
        self._unless(f"type({name}) is not {kind}{rest}")
        for text, part in parts.items():
            variable = self._fresh("v")
            self._lines.append(f"{variable} = {name}{text}")
            self._leaf(variable, part, f"{path}{text}")

    def _tensor(self, name: str, kind: str, value: torch.Tensor, path: str) -> None:
        known = self._tensors.get(id(value)) or self._same.get(id(value))
        if known is not None:
            self._unless(f"{name} is not {known}")
        if path in self._pinned:
            self._object(name, value)
            self._places(name, value, path, f"{name}.shape")
        if known is not None or path in self._pinned:
            self._same.setdefault(id(value), known or name)
            return
        self._tensors[id(value)] = name
        start = len(self._lines)
        dtype, device = self._bound("d", value.dtype), self._bound("e", value.device)
        grad = f"{'not ' if value.requires_grad else ''}{name}.requires_grad"
        unlike = f"{name}.dtype is not {dtype} or {name}.device != {device} or {grad}"
        self._unless(f"type({name}) is not {kind} or {unlike}")
        conjugate = f"{'not ' if value.is_conj() else ''}{name}.is_conj()"
        self._unless(f"{conjugate} or {'not ' if value.is_neg() else ''}{name}.is_neg()")
        shape = self._fresh("s")
        self._lines.append(f"{shape} = {name}.shape")
        sizes = self._shapes.get(path, tuple(value.shape))
        fixed = [f"{shape}[{d}] != {n}" for d, n in enumerate(sizes) if isinstance(n, int)]
        self._unless(" or ".join([f"len({shape}) != {len(sizes)}", *fixed]))
        self._layout(name, shape, value, path)
        if _is_usual(value, sizes):
            self._usual.append((name, value, sizes))
            self._detailed += self._lines[start:]
            del self._lines[start:]
            shape = f"{name}.shape"
        self._places(name, value, path, shape)
        self._inside(name, value, path)
        for text in self._attributes.get(path, ()):
            self._attribute(name, value, text, path)

    def _places(self, name: str, value: torch.Tensor, path: str, shape: str) -> None:
        """Note where the symbols of a tensor are read; the variable ``shape`` has its sizes."""
        for dim, size in enumerate(self._shapes.get(path, ())):
            if isinstance(size, str):
                self._sizes.setdefault(size, []).append(f"{shape}[{dim}]")
        if path in self._offsets:
            self._steps.append((f"{name}.storage_offset()", self._offsets[path], "False"))
        for dim, step in enumerate(self._strides.get(path, ())):
            if isinstance(step, str):
                free = "True" if value.is_contiguous() else f"{name}.shape[{dim}] <= 1"
                self._steps.append((f"{name}.stride()[{dim}]", step, free))

    def _inside(self, name: str, value: torch.Tensor, path: str) -> None:
        """Compare how a tensor subclass is built, and each tensor inside of it as an argument."""
        try:
            wrapper = raw_memory.Wrapper.of(value) if raw_memory.is_wrapper(value) else None
        except raw_memory.CannotUnwrap:
            return
        if wrapper is None:
            return
        self._unless(f"not {self._bound('b', wrapper.fits)}({name})")
        for inner in wrapper.names:
            if isinstance(part := getattr(value, inner), torch.Tensor):
                variable = self._fresh("v")
                self._lines.append(f"{variable} = {name}.{inner}")
                self._leaf(variable, part, f"{path}.{inner}")

    def _attribute(self, name: str, value: torch.Tensor, text: str, path: str) -> None:
        """Compare a plain value that the trace read from a Python attribute of a tensor."""
        try:
            known = eval(f"value{text}", {"value": value})
        except (AttributeError, LookupError, NameError, SyntaxError, TypeError):
            return  # at a place that guards of torch alone can read
        if not isinstance(known, (*_PLAIN, *_SEALED, float, complex)):
            return
        variable = self._fresh("v")
        self._lines += [
            "try:",
            f"    {variable} = {name}{text}",
            "except (AttributeError, LookupError, TypeError):",
            "    return False",
        ]
        self._leaf(variable, known, f"{path}{text}")

    def _compare_usual(self) -> None:
        """Compare all tensors of usual layouts at once, and in detail where torch rejects them."""
        if not self._usual:
            return
        names, tensors, sizes = zip(*self._usual, strict=True)
        alike = self._bound("w", raw_memory.alike(tensors, [_with_strides(each) for each in sizes]))
        self._lines.append(f"if not {alike}({', '.join(names)}):")
        self._lines += [f"    {line}" for line in self._detailed]

    def _layout(self, name: str, shape: str, value: torch.Tensor, path: str) -> None:
        """Compare strides: compilers rely on them, and models read them."""
        sizes, strides = self._shapes.get(path, ()), self._strides.get(path, ())
        if value.layout is not torch.strided or value.dim() == 0:
            self._unless(f"{name}.layout is not {self._bound('l', value.layout)}")
            return
        self._unless(f"{'not ' if value.is_contiguous() else ''}{name}.is_contiguous()")
        if value.is_contiguous():
            return
        steps = self._fresh("q")
        self._lines.append(f"{steps} = {name}.stride()")
        for dim, step in enumerate(strides):
            if isinstance(step, int) and sizes[dim] != 1:
                self._unless(f"{shape}[{dim}] > 1 and {steps}[{dim}] != {step}")

    def _object(self, name: str, value: Any) -> None:
        """Compare by identity: the trace may have read attributes of the object."""
        try:
            reference = weakref.ref(value)
        except TypeError:
            self._unless(f"{name} is not {self._bound('o', value)}")
            return
        self.references.append(reference)  # it returns None for a freed object, as a call may pass
        self._unless(f"{name} is None or {name} is not {self._bound('r', reference)}()")

    def _conditions(self, conditions: Conditions) -> None:
        """Check what was assumed of sizes, where the arguments have all of them."""
        for text, symbols in conditions:
            if all(symbol in self._sizes for symbol in symbols):
                for symbol in sorted(set(symbols) - self._read):
                    self._lines.append(f"{symbol} = {self._sizes[symbol][0]}")
                self._read.update(symbols)
                self._unless(f"not ({text})")
            elif self._alone:  # what cannot be compared is traced again
                self._lines.append(f"return False  # {text}")

    def _compare_sizes(self, conditions: Conditions) -> None:
        """Check which sizes are equal, or depend on others, and what else was assumed of them."""
        steps = list(self._steps_of_arguments())
        for places in self._sizes.values():
            for other in places[1:]:
                self._unless(f"{places[0]} != {other}")
        derived = [text for text in self._sizes if not text.isidentifier()]
        for text in derived:
            self._conditions([(f"{self._sizes[text][0]} == ({text})", _symbols(text))])
        self._conditions([*steps, *conditions])

    def _steps_of_arguments(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the conditions on strides and offsets; those that are symbols are like sizes."""
        # The stride of a dimension of size 1 is free where it follows from sizes. Another symbol is
        # an input of the graph, which reads it from one of its places: all must agree.
        sizes = set(self._sizes)
        for read, text, free in self._steps:
            symbols = _symbols(text)
            if sizes.issuperset(symbols):
                if free != "True":
                    yield f"{free} or {read} == ({text})", symbols
            elif text.isidentifier():
                self._sizes.setdefault(text, []).append(read)
            else:
                yield f"{read} == ({text})", symbols

    def _compare_objects(self) -> None:
        """Check that no two tensors are one object, and that the trace reads none elsewhere."""
        if self._tensors and self._elsewhere.ids:
            ids = self._bound("f", self._elsewhere.ids)
            objects = " or ".join(f"id({name}) in {ids}" for name in self._tensors.values())
            self._unless(objects)
        names = list({**self._same, **self._tensors}.values())
        if 1 < len(names) <= _FEW:
            pairs = combinations(names, 2)
            self._unless(" or ".join(f"{one} is {other}" for one, other in pairs))
        elif len(names) > _FEW:
            objects = ", ".join(f"id({name})" for name in names)
            self._unless(f"len({{{objects}}}) != {len(names)}")

    def _compare_settings(self) -> None:
        """Compare what Dynamo compares too: autocast, default dtype and device, determinism, ..."""
        now, was = self._bound("a", torch_settings.trace_settings), torch_settings.trace_settings()
        self._unless(f"{now}() != {self._bound('c', was)}")


def _attributes(paths: Iterable[str], owners: Iterable[str]) -> dict[str, list[str]]:
    """Return what follows the path of a tensor in other paths, such as ``.scale``, by that path."""
    attributes: dict[str, list[str]] = {}
    for path in paths:
        for owner in owners:
            if path.startswith((f"{owner}.", f"{owner}[")):
                attributes.setdefault(owner, []).append(path.removeprefix(owner))
    return attributes


def _symbols(text: str) -> tuple[str, ...]:
    """Return the symbols in the text of an expression; other names are of modules and builtins."""
    nodes = ast.walk(ast.parse(text, mode="eval"))
    names = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
    return tuple(
        n for n in names if n not in expressions.NAMES_IN_TEXT and not hasattr(builtins, n)
    )


def _is_usual(value: torch.Tensor, sizes: tuple[int | str, ...]) -> bool:
    """Return whether it is a plain contiguous tensor with a fixed size in all dimensions but 0."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    rows_are_fixed = all(isinstance(size, int) for size in sizes[1:])
    return plain and value.dim() > 0 and rows_are_fixed and value.is_contiguous()


def _with_strides(sizes: Sequence[int | str]) -> tuple[list[int | None], list[int]]:
    """Return (sizes, strides) of such a tensor; None for a size that varies."""
    fixed = [size if isinstance(size, int) else None for size in sizes]
    lengths = [max(size, 1) for size in fixed[1:] if size is not None]
    return fixed, [math.prod(lengths[dim:]) for dim in range(len(sizes))]


def is_number(value: Any) -> bool:
    """Return whether a trace treats a value as a constant number. Bools have only two values."""
    return type(value) in (int, float, complex)


def with_numbers(
    args: tuple[Any, ...], kwargs: dict[str, Any], numbers: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with its numbers replaced, in order."""
    others = iter(numbers)
    replaced: tuple[tuple[Any, ...], dict[str, Any]] = torch_ops.tree_map(
        lambda leaf: next(others) if is_number(leaf) else leaf, (args, kwargs)
    )
    return replaced


def tensors_in(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in arguments by path, given the arguments by path."""
    return {
        f"{source}{path}": leaf
        for source, value in named.items()
        for path, leaf in torch_ops.tree_paths(value)
        if isinstance(leaf, torch.Tensor)
    }
