"""Guards on the arguments of a call, as generated Python: :func:`fits_function`.

Dynamo's guards check the whole model and cost tens of microseconds. Where they are dropped, the
arguments are still compared: their number and order, types, dtypes, devices, ranks, layouts,
whether they require grad, the sizes that are not dynamic, which sizes are equal, plain values and
containers of them; other objects by identity; and autocast::

    def fits(args, kwargs):
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
        if autocast():
            return False
        return True

``alike`` is one function of torch for all tensors of usual layouts. It rejects some that fit, such
as those of another inference mode, so the rejected ones are compared in detail.
"""

import math
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat

_PLAIN = (bool, int, str, bytes, range, type(None))
_SEALED = (torch.dtype, torch.device, torch.layout, torch.memory_format, types.MethodType)
_FEW = 4  # tensors that are compared pair by pair
_SYMBOL = re.compile(r"[A-Za-z_]\w*")

# By path, such as ``L['x'][0]``: for each dimension its size, or the name of a size that varies.
Shapes = Mapping[str, tuple[int | str, ...]]


class FitsText(NamedTuple):
    """The lines of a ``fits`` function, indented by 4, from which a fast path is generated.

    They omit checks that a comparison of whole layouts implies: those of plain tensors of usual
    layouts, and of sizes that are not fixed.
    """

    variables: list[str]  # the names of the arguments, positional ones first
    keywords: list[str]  # the names of keyword arguments, in this order; a call may vary the order
    leaves: list[list[str]]  # the lines about each positional argument
    others: list[str]  # the lines about keyword arguments
    objects: list[str]  # the lines that tell tensors from each other and from ``elsewhere``
    autocast: list[str]  # the lines about autocast
    names: dict[str, Any]  # what the lines refer to
    elsewhere: "LiveTensors"  # tensors that the trace reads, and that no argument was


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


class _Lines:
    """The generated lines of a ``fits`` function, and what they refer to."""

    def __init__(self, shapes: Shapes, strides: Shapes, pinned: Collection[str]) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.references: list[weakref.ref[Any]] = []
        self.elsewhere = LiveTensors(())
        self._shapes, self._strides = shapes, strides
        self._pinned = pinned
        self._count = 0
        self._sizes: dict[str, list[str]] = {}  # by the name of a size: where it can be read
        self._derived: list[tuple[str, tuple[str, ...]]] = []  # strides that follow from sizes
        self._read: set[str] = set()  # the sizes that have a variable
        self._tensors: dict[int, str] = {}  # by identity: the variable that holds it
        self._same: dict[int, str] = {}  # likewise, of pinned tensors
        self._usual: list[tuple[str, torch.Tensor, tuple[int | str, ...]]] = []
        self._detailed: list[str] = []  # lines for these, where ``alike`` rejects them

    def fresh(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def bound(self, letter: str, value: Any) -> str:
        name = self.fresh(letter)
        self.names[name] = value
        return name

    def unless(self, condition: str) -> None:
        self.lines += [f"    if {condition}:", "        return False"]

    def leaf(self, name: str, value: Any, path: str) -> None:
        """Compare the variable ``name`` with a value of the traced call."""
        kind = self.bound("t", type(value))
        if isinstance(value, torch.Tensor) and path in self._pinned:
            self._object(name, value)
            self._same.setdefault(id(value), name)
        elif isinstance(value, torch.Tensor):
            self._tensor(name, kind, value, path)
        elif isinstance(value, (float, complex)):  # tells -0.0 from 0.0, and nan is itself
            self.unless(f"type({name}) is not {kind} or repr({name}) != {repr(value)!r}")
        elif isinstance(value, (*_PLAIN, *_SEALED)):
            self.unless(f"type({name}) is not {kind} or {name} != {self.bound('c', value)}")
        elif type(value) in (tuple, list, torch.Size):
            self.unless(f"type({name}) is not {kind} or len({name}) != {len(value)}")
            self._parts(name, [(f"[{index}]", item) for index, item in enumerate(value)], path)
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            self.unless(f"type({name}) is not {kind}")
            self._parts(
                name, [(f".{field}", getattr(value, field)) for field in value._fields], path
            )
        elif type(value) is slice:
            self.unless(f"type({name}) is not {kind}")
            parts = ("start", "stop", "step")
            self._parts(name, [(f".{part}", getattr(value, part)) for part in parts], path)
        elif type(value) is dict and all(type(key) in (str, int) for key in value):
            keys = self.bound("k", list(value))  # their order as well: a model may walk them
            self.unless(f"type({name}) is not {kind} or list({name}) != {keys}")
            self._parts(name, [(f"[{key!r}]", item) for key, item in value.items()], path)
        else:
            self._object(name, value)

    def _parts(self, name: str, parts: list[tuple[str, Any]], path: str) -> None:
        for text, part in parts:
            variable = self.fresh("v")
            self.lines.append(f"    {variable} = {name}{text}")
            self.leaf(variable, part, f"{path}{text}")

    def _tensor(self, name: str, kind: str, value: torch.Tensor, path: str) -> None:
        if id(value) in self._tensors:
            self.unless(f"{name} is not {self._tensors[id(value)]}")
            return
        self._tensors[id(value)] = name
        start = len(self.lines)
        dtype, device = self.bound("d", value.dtype), self.bound("e", value.device)
        grad = f"{'not ' if value.requires_grad else ''}{name}.requires_grad"
        unlike = f"{name}.dtype is not {dtype} or {name}.device != {device} or {grad}"
        self.unless(f"type({name}) is not {kind} or {unlike}")
        conjugate = f"{'not ' if value.is_conj() else ''}{name}.is_conj()"
        self.unless(f"{conjugate} or {'not ' if value.is_neg() else ''}{name}.is_neg()")
        shape = self.fresh("s")
        self.lines.append(f"    {shape} = {name}.shape")
        sizes = self._shapes.get(path, tuple(value.shape))
        fixed = [f"{shape}[{d}] != {n}" for d, n in enumerate(sizes) if isinstance(n, int)]
        self.unless(" or ".join([f"len({shape}) != {len(sizes)}", *fixed]))
        self._layout(name, shape, value, path)
        if _is_usual(value, sizes):
            self._usual.append((name, value, sizes))
            self._detailed += self.lines[start:]
            del self.lines[start:]
            shape = f"{name}.shape"
        for dim, size in enumerate(sizes):
            if isinstance(size, str):
                self._sizes.setdefault(size, []).append(f"{shape}[{dim}]")

    def usual(self) -> None:
        """Compare all tensors of usual layouts at once, and in detail where torch rejects them."""
        if not self._usual:
            return
        names, tensors, sizes = zip(*self._usual, strict=True)
        alike = self.bound("w", compat.alike(tensors, [_with_strides(each) for each in sizes]))
        self.lines.append(f"    if not {alike}({', '.join(names)}):")
        self.lines += [f"    {line}" for line in self._detailed]

    def _layout(self, name: str, shape: str, value: torch.Tensor, path: str) -> None:
        """Compare strides: compilers rely on them, and models read them."""
        sizes, strides = self._shapes.get(path, ()), self._strides.get(path, ())
        if value.layout is not torch.strided or value.dim() == 0:
            self.unless(f"{name}.layout is not {self.bound('l', value.layout)}")
            return
        self.unless(f"{'not ' if value.is_contiguous() else ''}{name}.is_contiguous()")
        if value.is_contiguous():
            return
        steps = self.fresh("q")
        self.lines.append(f"    {steps} = {name}.stride()")
        for dim, step in enumerate(strides):
            if isinstance(step, int) and sizes[dim] != 1:
                self.unless(f"{shape}[{dim}] > 1 and {steps}[{dim}] != {step}")
            elif isinstance(step, str):
                symbols = tuple(name for name in _SYMBOL.findall(step) if name != "math")
                fits = f"{shape}[{dim}] <= 1 or {steps}[{dim}] == ({step})"
                self._derived.append((fits, symbols))

    def _object(self, name: str, value: Any) -> None:
        """Compare by identity: the trace may have read attributes of the object."""
        try:
            reference = weakref.ref(value)
        except TypeError:
            self.unless(f"{name} is not {self.bound('o', value)}")
            return
        self.references.append(
            reference
        )  # it returns None for a freed object; a call may pass None
        self.unless(f"{name} is None or {name} is not {self.bound('r', reference)}()")

    def conditions(self, conditions: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        """Check what was assumed of sizes, where the arguments have all of them."""
        for text, symbols in conditions:
            if all(symbol in self._sizes for symbol in symbols):
                for symbol in sorted(set(symbols) - self._read):
                    self.lines.append(f"    {symbol} = {self._sizes[symbol][0]}")
                self._read.update(symbols)
                self.unless(f"not ({text})")

    def sizes(self, conditions: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        """Check which sizes are equal, or depend on others, and what else was assumed of them."""
        for places in self._sizes.values():
            for other in places[1:]:
                self.unless(f"{places[0]} != {other}")
        derived = [
            (text, places[0]) for text, places in self._sizes.items() if not text.isidentifier()
        ]
        for text, place in derived:
            symbols = tuple(name for name in _SYMBOL.findall(text) if name != "math")
            self.conditions([(f"{place} == ({text})", symbols)])
        self.conditions([*self._derived, *conditions])

    def objects(self) -> None:
        """Check that no two tensors are one object, and that the trace reads none elsewhere."""
        if self._tensors and self.elsewhere.ids:
            ids = self.bound("f", self.elsewhere.ids)
            objects = " or ".join(f"id({name}) in {ids}" for name in self._tensors.values())
            self.unless(objects)
        names = [*self._tensors.values(), *self._same.values()]
        if 1 < len(names) <= _FEW:
            pairs = combinations(names, 2)
            self.unless(" or ".join(f"{one} is {other}" for one, other in pairs))
        elif len(names) > _FEW:
            objects = ", ".join(f"id({name})" for name in names)
            self.unless(f"len({{{objects}}}) != {len(names)}")

    def autocast(self) -> None:
        """Compare autocast: it determines the types that ops compute in."""
        on = self.bound("a", compat.any_autocast)
        if not compat.any_autocast():
            self.unless(f"{on}()")
            return
        now, was = self.bound("a", compat.autocast_state), compat.autocast_state()
        self.unless(f"not {on}() or {now}() != {self.bound('c', was)}")


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
    replaced: tuple[tuple[Any, ...], dict[str, Any]] = compat.tree_map(
        lambda leaf: next(others) if is_number(leaf) else leaf, (args, kwargs)
    )
    return replaced


def tensors_in(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors in arguments by path, given the arguments by path."""
    return {
        f"{source}{path}": leaf
        for source, value in named.items()
        for path, leaf in compat.tree_paths(value)
        if isinstance(leaf, torch.Tensor)
    }


def tensors_elsewhere(
    paths: Iterable[str], arguments: Collection[str], scope: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors at those ``paths`` that begin with no path of an argument."""
    values: dict[int, Any] = {}
    for path in paths:
        if not path.startswith(tuple(arguments)):  # neither an argument nor the base of one
            with suppress(AttributeError, LookupError, NameError, TypeError):
                value = eval(path, scope)
                values[id(value)] = value
    return tuple([value for value in values.values() if isinstance(value, torch.Tensor)])


def fits_function(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    paths: Mapping[Any, str],
    shapes: Shapes,
    conditions: Iterable[tuple[str, tuple[str, ...]]],
    strides: Shapes,
    pinned: Collection[str] = (),
    collected: Collection[str] = (),
    elsewhere: Iterable[torch.Tensor] = (),
) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return ``fits(args, kwargs)``: whether a trace of this call serves another call.

    ``paths`` are Dynamo's, by position or keyword. ``shapes`` and ``strides`` are by path, and
    ``conditions`` on sizes are (Python text, its symbols). ``pinned`` tensors, which the model also
    reads in another way, must be the same objects. The order of ``collected`` keywords counts. No
    argument may be one of the tensors ``elsewhere``, which are not held.

    ``fits.source`` is its text, ``fits.text`` that text in pieces, and ``fits.references`` are weak
    references to the objects that must be the same.
    """
    checks = _Lines(shapes, strides, pinned)
    checks.elsewhere = LiveTensors(elsewhere)
    keywords = "kwargs" if not kwargs else f"len(kwargs) != {len(kwargs)}"
    checks.unless(f"len(args) != {len(args)} or {keywords}")
    variables = [checks.fresh("v") for _ in args]
    if variables:
        checks.lines.append(f"    ({', '.join(variables)},) = args")
    begun = [len(checks.lines)]
    for position, (variable, value) in enumerate(zip(variables, args, strict=True)):
        checks.leaf(variable, value, paths.get(position, ""))
        begun.append(len(checks.lines))
    absent = checks.bound("m", object())
    for name, value in kwargs.items():
        variable = checks.fresh("v")
        checks.lines.append(f"    {variable} = kwargs.get({name!r}, {absent})")
        checks.leaf(variable, value, paths.get(name, ""))
        variables.append(variable)
    if len(collected) > 1:
        order = checks.bound("k", [name for name in kwargs if name in collected])
        checks.unless(f"[name for name in kwargs if name in {order}] != {order}")
    begun.append(len(checks.lines))
    checks.usual()
    begun.append(len(checks.lines))
    checks.sizes(conditions)
    for add_checks in (checks.objects, checks.autocast):
        begun.append(len(checks.lines))
        add_checks()
    begun.append(len(checks.lines))
    source = "\n".join(["def fits(args, kwargs):", *checks.lines, "    return True"]) + "\n"
    namespace = {"math": math, **checks.names}
    exec(compile(source, "<cgcompile fits>", "exec"), namespace)
    fits: Callable[[tuple[Any, ...], dict[str, Any]], bool] = namespace.pop("fits")
    pieces = [checks.lines[start:end] for start, end in pairwise(begun)]
    leaves, rest = pieces[: len(args)], pieces[len(args) :]
    keyworded, _usual, _sizes, objects, autocast = rest
    text = FitsText(
        variables=variables,
        keywords=list(kwargs),
        leaves=leaves,
        others=keyworded,
        objects=objects,
        autocast=autocast,
        names={"math": math, **checks.names},
        elsewhere=checks.elsewhere,
    )
    fits.source, fits.text = source, text  # type: ignore[attr-defined]
    fits.references = checks.references  # type: ignore[attr-defined]
    return fits
