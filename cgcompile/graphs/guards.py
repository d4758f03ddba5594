"""What must be equal between a capture and a replay: the guards.

A graph repeats addresses and host values, and a replay runs no Python. :class:`ArgumentGuard`
compares the arguments of a call, :class:`WeightsGuard` the weights of the modules of a runnable,
:class:`ContextGuard` the tensors of the forward context; ``fields.py`` compares the fields of all
other objects. Without them a replay would read memory that was freed, or repeat a stale value. The
rule: a difference is an error that names the argument or weight, and nothing is replayed.
"""

import dataclasses
import textwrap
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter, Signature, signature
from itertools import chain
from keyword import iskeyword
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import (
    AddressChangedError,
    GuardError,
    HostValueChangedError,
    with_article,
)
from cgcompile.graphs.reads import modules_of, slots_of

# -------------------------------------------------------------- values and layouts

_BY_VALUE: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), torch.Size)
_BY_VALUE += (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor that a graph repeats, but for its address."""
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    except RuntimeError:  # a nested tensor has no shape
        return tuple([part.shape for part in tensor.unbind()]), (), tensor.dtype, False, False


class Placed(NamedTuple):
    """The address and layout of a tensor."""

    address: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Placed":
        return cls(tensor.data_ptr(), _layout(tensor))


def same_layout(leaf: Any, other: torch.Tensor) -> bool:
    """Return whether ``leaf`` is a tensor of the shape, strides, dtype and bits of ``other``."""
    return isinstance(leaf, torch.Tensor) and _layout(leaf) == _layout(other)


def same_numbers(leaf: Any, other: torch.Tensor) -> bool:
    """Return whether ``leaf`` is a tensor of the shape and dtype of ``other``, in any layout."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not other.layout:
        return False
    return leaf.shape == other.shape and leaf.dtype is other.dtype and leaf.device == other.device


def layout_text(leaf: Any) -> str:
    """Return a value as messages show it: the layout of a tensor, a plain value, or a type."""
    if isinstance(leaf, (Placed, torch.Tensor)):
        layout = leaf.layout if isinstance(leaf, Placed) else _layout(leaf)
        shape, stride, dtype, conjugate, negative = layout
        view = " conjugate" * conjugate + " negative" * negative
        return f"a{view} tensor {tuple(shape)} with strides {tuple(stride)} of {dtype}"
    if isinstance(leaf, _BY_VALUE):
        return repr(leaf)
    return f"{with_article(type(leaf).__name__)} object"


def is_plain_value(leaf: Any) -> bool:
    """Return whether a leaf is a number, a text or the like, which can be compared."""
    return isinstance(leaf, _BY_VALUE)


def same_value(now: Any, before: Any) -> bool:
    """Return whether two host values are equal plain values, or the same object."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, _BY_VALUE):
        return False
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # -0.0 is not 0.0, and a NaN is a NaN
    return bool(now == before)


def _is_cpu_scalar(leaf: Any, tensor_type: str) -> bool:
    """Return whether a leaf is a 0-dim CPU tensor among tensors of another device type."""
    if tensor_type == "cpu" or not isinstance(leaf, torch.Tensor):
        return False
    return leaf.dim() == 0 and leaf.device.type == "cpu"


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call, with their names in messages."""
    yield from ((f"input {position}", value) for position, value in enumerate(args))
    yield from ((f"input {name!r}", value) for name, value in kwargs.items())


class Change(NamedTuple):
    """A value that differs; if ``moved``, by the address of a tensor."""

    path: str
    before: Any
    after: Any
    moved: bool = False

    def error(self, what: str, batch: object) -> GuardError:
        """Return what to raise before a replay."""
        path, before, now, moved = self
        if moved:
            return AddressChangedError.moved_in_wrapper(
                what=what, batch=str(batch), path=path, now=now, before=before
            )
        return HostValueChangedError.changed(
            what=what, batch=str(batch), path=path, now=now, before=before
        )


class Tensors:
    """The tensors with memory among some, by path: where they are, and the numbers in some."""

    # A kernel gets a 0-dim CPU tensor as a launch argument, which a graph bakes in.

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], tensor_type: str) -> None:
        pairs = [(path, tensor) for path, tensor in named if _has_address(tensor)]
        self._paths = [path for path, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]
        self._starts = [tensor.data_ptr() for tensor in self.tensors]
        self._addresses = compat.Addresses(self.tensors, range(len(self.tensors)))
        self._numbers = [
            (path, tensor, tensor.item())
            for path, tensor in pairs
            if _is_cpu_scalar(tensor, tensor_type)
        ]

    def changes(self) -> Iterator[Change]:
        """Yield the tensors that moved, then the numbers that differ. Does not synchronise."""
        if not self._addresses.hold(self.tensors):
            for path, tensor, start in zip(self._paths, self.tensors, self._starts, strict=True):
                if tensor.data_ptr() != start:
                    yield Change(path, start, tensor.data_ptr(), moved=True)
        for path, tensor, number in self._numbers:
            if not same_value(tensor.item(), number):
                yield Change(path, number, tensor.item())


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # sparse, fake, a subclass without memory of its own
        return False
    return True


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one address and one layout."""
    return _has_address(one) and _has_address(other) and Placed.of(one) == Placed.of(other)


# -------------------------------------------------------------- guards

# Types of most attributes of a module: a look-up is faster than isinstance of a tensor.
_NO_TENSORS = frozenset((bool, int, float, str, type(None), dict, OrderedDict, set, list, tuple))


class WeightsGuard:
    """The parameters, buffers, other tensors and sub-modules of the modules of a runnable."""

    # It keeps their memory, so that a graph never reads what was freed.

    def __init__(
        self,
        runnable: Any,
        tensor_type: str = "cpu",
        remedy: str = "clear_graphs()",  # what drops the graphs, in messages
        only: Collection[int] | None = None,  # identities of the tensors to compare; None: all
    ) -> None:
        owner = getattr(runnable, "__self__", runnable)
        self._remedy = remedy
        # An owner with this attribute compares weights itself.
        roots = () if getattr(owner, "compares_weights", False) is True else modules_of(runnable)
        self._items: list[tuple[dict[str, Any], str, str]] = []  # dict, name, path
        self._views: list[ValuesView[Any]] = []  # of their dicts, but attributes of modules
        self._attributes: list[tuple[dict[str, Any], str]] = []
        for prefix, module in (named for root in roots for named in root.named_modules()):
            start = f"{prefix}." if prefix else ""
            own = module.__dict__
            rest = [k for k, v in own.items() if type(v) not in _NO_TENSORS and _is_tensor(v)]
            items = [(own, name, start + name) for name in rest]
            for table in (module._parameters, module._buffers, module._modules):
                items += [(table, name, start + name) for name in table]
            compared = [
                (table, name, path)
                for table, name, path in items
                if only is None or table is module._modules or id(table[name]) in only
            ]
            tables = {id(table): table for table, _, _ in compared if table is not own}
            self._views += [table.values() for table in tables.values()]
            self._attributes += [(own, name) for table, name, _ in compared if table is own]
            self._items += compared
        self.objects = self._now()  # the tensors and sub-modules, as they were
        self._known = self._current()
        self._identities = compat.identities(self._known)
        pairs = zip((path for _, _, path in self._items), self.objects, strict=True)
        self._tensors = Tensors((pair for pair in pairs if _is_tensor(pair[1])), tensor_type)
        self._memory = [tensor.untyped_storage() for tensor in self._tensors.tensors]

    def _now(self) -> tuple[Any, ...]:
        return tuple([table.get(name) for table, name, _ in self._items])

    def _current(self) -> tuple[Any, ...]:
        """Return all that the dicts hold now: half of the time of :meth:`_now`."""
        attributes = [own.get(name) for own, name in self._attributes]
        return (*chain.from_iterable(self._views), *attributes)

    def check(self, what: str, batch: object) -> None:
        """Raise AddressChangedError or HostValueChangedError for a weight; 0.1 us for each."""
        seen = self._current()
        if compat.identities(seen) != self._identities:
            for held, before, item in zip(self._now(), self.objects, self._items, strict=True):
                if held is not before:
                    raise self._replaced(what, batch, item[2])
            self._known, self._identities = seen, compat.identities(seen)  # others were added
        for change in self._tensors.changes():
            if change.moved:
                raise self._replaced(what, batch, change.path)
            raise HostValueChangedError.cpu_scalar(
                what=what,
                batch=str(batch),
                path=change.path,
                now=change.after,
                before=change.before,
            )

    def _replaced(self, what: str, batch: object, path: str) -> AddressChangedError:
        return AddressChangedError.weight(
            what=what, batch=str(batch), path=path, remedy=self._remedy
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _wrapped(leaves: Sequence[Any]) -> Iterator[tuple[int, compat.Wrapper, list[Placed]]]:
    """Yield (position, how it is built, tensors inside) of each tensor that wraps others."""
    for position, leaf in enumerate(leaves):
        if _is_tensor(leaf) and compat.is_wrapper(leaf):
            with suppress(compat.CannotUnwrap):
                wrapper = compat.Wrapper.of(leaf)
                yield position, wrapper, list(map(Placed.of, wrapper.parts(leaf)))


def _change_inside(
    path: str, leaf: Any, wrapper: compat.Wrapper, parts: Sequence[Placed]
) -> Change | None:
    """Return what differs inside of a tensor that wraps others."""
    if not wrapper.fits(leaf):
        return Change(path, "as when captured", f"a {type(leaf).__name__} that is built otherwise")
    for name, before, tensor in zip(wrapper.paths, parts, wrapper.parts(leaf), strict=True):
        now = Placed.of(tensor)
        if now.layout != before.layout:
            return Change(f"{path}.{name}", layout_text(before), layout_text(now))
        if now.address != before.address:
            return Change(f"{path}.{name}", before.address, now.address, moved=True)
    return None


class ArgumentGuard:
    """The arguments of one captured call, opened in containers, and the settings of torch."""

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tensor_type: str = "cpu"
    ) -> None:
        self._count = len(args)
        self._tensor_type = tensor_type
        self._kernels, self._traced = compat.kernel_settings(), compat.trace_settings()
        self._names = tuple(kwargs)
        self._name_set = frozenset(kwargs)
        self._signature: Signature | None = None  # of what is called, once a call has another form
        pairs = [
            (top + path, leaf)
            for top, tree in named_arguments(args, kwargs)
            for path, leaf in compat.tree_paths(tree)
        ]
        self._reads_scalars = any(_is_cpu_scalar(leaf, tensor_type) for _, leaf in pairs)
        self._paths = [path for path, _ in pairs]
        leaves = self._numbers_of([leaf for _, leaf in pairs])
        self._known = [Placed.of(leaf) if _is_tensor(leaf) else leaf for leaf in leaves]
        self._wrapped = list(_wrapped(leaves))
        self._flat = not any(compat.is_container(value) for value in (*args, *kwargs.values()))
        self._spec = None if self._flat else compat.tree_spec((list(args), dict(kwargs)))

    def _numbers_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves, with numbers in place of 0-dim CPU tensors."""
        if not self._reads_scalars:
            return leaves
        kind = self._tensor_type
        return [leaf.item() if _is_cpu_scalar(leaf, kind) else leaf for leaf in leaves]

    def has_form(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether as many arguments are passed by position, and the same ones by name."""
        return len(args) == self._count and kwargs.keys() == self._name_set

    def in_form(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call of ``function`` in the form of the captured one, or as it is.

        An argument that the captured call left to its default may be passed with that value.
        """
        try:
            if self._signature is None:
                self._signature = _signature_of(function)
            bound = self._signature.bind(*args, **kwargs)
        except (TypeError, ValueError):  # no signature, or the call itself is wrong
            return args, kwargs
        bound.apply_defaults()
        values = bound.arguments
        parameters = self._signature.parameters
        by_position = [name for name, row in parameters.items() if row.kind in _BY_POSITION]
        first = by_position[: self._count]
        passed = {*first, *self._names}
        left = {name: value for name, value in values.items() if name not in passed}
        are_defaults = all(
            not value
            if parameters[name].kind in _VARIABLE
            else same_value(value, parameters[name].default)
            for name, value in left.items()
        )
        if len(first) < self._count or not self._name_set <= values.keys() or not are_defaults:
            return args, kwargs
        by_name = {name: values[name] for name in self._names}
        return tuple([values[name] for name in first]), by_name

    def check(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str, batch: object
    ) -> dict[str, Any]:
        """Raise AddressChangedError or HostValueChangedError where a call has other arguments.

        Returns:
            By path, the dataclasses that are other objects than those of the capture, whose fields
            are still to be compared.
        """
        self.check_settings(what, batch)
        names, made_anew = self._names, {}
        if not self.has_form(args, kwargs):
            self._refuse_structure(args, kwargs, what, batch)
        leaves: Sequence[Any] = (*args, *(kwargs[name] for name in names)) if kwargs else args
        if not self._flat:
            ordered = {name: kwargs[name] for name in names}
            if compat.tree_spec((list(args), ordered)) != self._spec:
                self._refuse_structure(args, kwargs, what, batch)
            leaves = compat.tree_leaves(leaves)
        for position, leaf in enumerate(self._numbers_of(leaves)):
            captured = self._known[position]
            if type(captured) is Placed and isinstance(leaf, torch.Tensor):
                if _layout(leaf) == captured.layout:
                    start = leaf.data_ptr()
                    if start == captured.address:
                        continue
                    change = Change(self._paths[position], captured.address, start, moved=True)
                    raise change.error(what, batch)
            elif same_value(leaf, captured):
                continue
            elif type(leaf) is type(captured) and dataclasses.is_dataclass(leaf):
                made_anew[self._paths[position]] = leaf
                continue
            before, now = layout_text(captured), layout_text(leaf)
            if now == before:
                now = f"another {type(leaf).__name__} object"
            raise Change(self._paths[position], before, now).error(what, batch)
        self._check_inside(leaves, what, batch)
        return made_anew

    def _check_inside(self, leaves: Sequence[Any], what: str, batch: object) -> None:
        """Raise an error where the tensors inside of a tensor subclass differ."""
        for position, wrapper, parts in self._wrapped:
            inside = _change_inside(self._paths[position], leaves[position], wrapper, parts)
            if inside is not None:
                raise inside.error(what, batch)

    def check_settings(self, what: str, batch: object) -> None:
        """Raise HostValueChangedError under other settings of torch: for unchanged arguments."""
        kernels, traced = compat.kernel_settings(), compat.trace_settings()
        if kernels == self._kernels and traced == self._traced:
            return
        pair = (self._traced, traced) if kernels == self._kernels else (self._kernels, kernels)
        name, before, now = compat.changed_setting(*pair)
        raise HostValueChangedError.setting(
            what=what, batch=str(batch), name=name, now=now, before=before
        )

    def _refuse_structure(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], what: str, batch: object
    ) -> NoReturn:
        now, before = _passed(len(args), kwargs), _passed(self._count, self._names)
        if now == before:
            now, before = "arguments of another nesting", "the one before"
        raise HostValueChangedError.other_arguments(
            what=what, batch=str(batch), now=now, before=before
        )


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _signature_of(function: Any) -> Signature:
    """Return the signature by which arguments of a call can be bound."""
    if not isinstance(function, torch.nn.Module):
        return signature(function)
    if any(compat.hooks_of(function)):
        raise ValueError  # a hook sees which arguments are passed by position
    return signature(function.forward)


def _passed(count: int, names: Iterable[str]) -> str:
    """Return how arguments were passed, in words."""
    by_name = ", ".join(map(repr, sorted(names)))
    return f"{count} arguments by position and {by_name or 'none'} by name"


# -------------------------------------------------------------- tensors in the forward context


_DEPTH = 4  # of objects in objects
# Weights are compared elsewhere.
_OPAQUE = (int, float, str, bytes, type, torch.nn.Module, ModuleType, FunctionType)
_FIELDS = ("attn_metadata", "slot_mapping", "additional")


class ContextGuard:
    """Compare the tensors of the forward context, which the captured step may have read.

    ``differs(context)`` is the fast check, a generated function: True where a tensor has another
    address or layout, or where objects are arranged in another way, so that :meth:`check` has to
    decide.
    """

    def __init__(self, context: Any, device_type: str) -> None:
        self._device_type = device_type
        tensors = dict(tensors_in_context(context, device_type))
        self._held = [tensor.untyped_storage() for tensor in tensors.values()]
        self._known = {path: Placed.of(tensor) for path, tensor in tensors.items()}
        self.differs = _ComparisonSource(device_type).function(context)

    @classmethod
    def of(cls, context: Any, device_type: str) -> "ContextGuard | None":
        """Return the guard of a context that a capture has read; None if it holds no tensors."""
        guard = cls(context, device_type)
        return guard if guard._known else None

    def check(self, context: Any, what: str, batch: object) -> None:
        """Raise AddressChangedError or HostValueChangedError for a tensor that differs."""
        if not self.differs(context):
            return
        present = dict(tensors_in_context(context, self._device_type))
        for path, before in self._known.items():
            now = Placed.of(present[path]) if path in present else None
            if now is None or now.address != before.address:
                address = None if now is None else now.address
                raise AddressChangedError.metadata(
                    what=what, batch=str(batch), path=path, now=address, before=before.address
                )
            if now != before:
                texts = layout_text(now), layout_text(before)
                raise HostValueChangedError.metadata(
                    what=what, batch=str(batch), path=path, now=texts[0], before=texts[1]
                )


def tensors_in_context(context: Any, device_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return path and tensor of all tensors on a device; does not synchronise."""
    for name in _FIELDS:
        value = getattr(context, name)
        if value is not None:
            yield from _tensors_below(value, name, device_type, _DEPTH)


def _tensors_below(
    value: Any, path: str, device_type: str, depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if _is_read(value, device_type):
            yield path, value
    elif depth and value is not None and not isinstance(value, _OPAQUE):
        for step, _, item in _items(value):
            yield from _tensors_below(item, path + step, device_type, depth - 1)


def _is_read(tensor: torch.Tensor, device_type: str) -> bool:
    return tensor.device.type == device_type and compat.is_plain_tensor(tensor)


def _items(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return the text of each step into an object, the key (None: an attribute), the item."""
    if isinstance(value, (tuple, list, deque)):
        yield from ((f"[{index}]", index, item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", key, item) for key, item in value.items() if key is not None)
    else:
        attributes = getattr(value, "__dict__", {})
        kind: Any = type(value)  # mypy takes it for unhashable
        yield from ((f".{name}", None, item) for name, item in attributes.items())
        for name in _declared(kind):
            if name not in attributes and hasattr(value, name):
                yield f".{name}", None, getattr(value, name)


@lru_cache(maxsize=256)
def _declared(kind: Any) -> tuple[str, ...]:
    """Return attributes that may be in no ``__dict__``: slots, and fields with a default."""
    slots = [member.__name__ for member in slots_of(kind)]
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(dict.fromkeys([*(spec.name for spec in fields), *slots]))


class _ComparisonSource:
    """Writes the function ``differs`` of a :class:`ContextGuard`."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._variables: dict[tuple[int, int], str] = {}  # of objects, by id and depth

    def function(self, context: Any) -> Callable[[Any], bool]:
        for name in _FIELDS:
            self._visit(getattr(context, name), f"context.{name}", _DEPTH)
        body = textwrap.indent("\n".join(self._lines), " " * 8)
        source = (
            f"def differs(context):\n    try:\n{body or '        pass'}\n"
            "    except (AttributeError, LookupError, RuntimeError, TypeError):\n"
            "        return True\n"
            "    return False\n"
        )
        exec(_compiled(source), self._names)
        differs: Callable[[Any], bool] = self._names.pop("differs")
        return differs

    def _visit(self, value: Any, expression: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if _is_read(value, self._device_type):
                self._compare(value, expression)
        elif depth and value is not None and not isinstance(value, _OPAQUE):
            first = self._variables.get((id(value), depth))
            if first is not None:  # layers often share one object
                self._lines += [f"if {expression} is not {first}:", "    return True"]
                return
            line = len(self._lines)
            variable = f"v{line}"
            self._lines.append(f"{variable} = {expression}")
            for step, key, item in _items(value):
                before = len(self._lines)
                self._visit(item, self._access(value, variable, step, key), depth - 1)
                if key is not None and len(self._lines) == before:
                    self._names.popitem()  # the key, which must not be kept alive
            if len(self._lines) == line + 1:  # no tensors in it
                self._lines.pop()
            else:
                self._variables[id(value), depth] = variable

    def _compare(self, tensor: torch.Tensor, expression: str) -> None:
        """Write the comparison of a tensor; in text it takes a third of a call of ``Placed.of``."""
        line = len(self._lines)
        address = f"(t{line} := {expression}).data_ptr() != {self._bound('at', tensor.data_ptr())}"
        shape, stride, dtype, conjugate, negative = layout = _layout(tensor)
        if tensor.is_nested:
            self._names["layout"] = _layout
            other = f"layout(t{line}) != {self._bound('layout', layout)}"
            self._lines += [f"if {address} or {other}:", "    return True"]
            return
        parts = [
            address,
            f"t{line}.shape != {self._bound('shape', shape)}",
            f"t{line}.stride() != {self._bound('stride', stride)}",
            f"t{line}.dtype is not {self._bound('dtype', dtype)}",
        ]
        if dtype.is_floating_point or dtype.is_complex:  # no other dtype has these bits
            parts += [
                f"t{line}.is_conj() is not {conjugate}",
                f"t{line}.is_neg() is not {negative}",
            ]
        self._lines += [f"if {' or '.join(parts)}:", "    return True"]

    def _access(self, value: Any, variable: str, step: str, key: Any) -> str:
        """Return the expression of an attribute or item; it must not change a mapping."""
        if key is None:
            name = step[1:]
            plain = name.isidentifier() and not iskeyword(name)
            return variable + step if plain else f"getattr({variable}, {name!r})"
        key = self._bound("key", key)
        is_sequence = type(value) is dict or isinstance(value, (tuple, list, deque))
        return f"{variable}[{key}]" if is_sequence else f"{variable}.get({key})"

    def _bound(self, prefix: str, value: Any) -> str:
        name = f"{prefix}_{len(self._names)}"
        self._names[name] = value
        return name


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<cgcompile context guard>", "exec")
