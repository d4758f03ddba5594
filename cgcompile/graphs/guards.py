"""The attributes and items of objects, read and put back without their own methods.

Which modules a model's graphs read the weights of: :func:`modules_of`.

Weights are compared before replays. One that nobody finds is never compared, and a graph would go
on with memory that was freed since.

What must be equal between a capture and a replay, checked at every replay.

A graph repeats addresses and host values. :class:`ArgumentGuard` holds what one captured call was
given: of each tensor the address and the layout, of everything else the value. A difference is an
error that names the argument; nothing is replayed then.

Attributes of a wrapper are those of what it wraps: :class:`Transparent`.

Code that looks into a model (``model.layers``, ``model.config``) must not care that it is wrapped.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import (
    AddressChangedError,
    HostValueChangedError,
    missing_attribute,
    with_article,
)

_LIBRARIES = ("torch", "logging", "threading", "re", "weakref", "_thread", "functools")


class Slots:
    """The attributes of an object that are in no ``__dict__``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.members = [  # of one name there may be several, each with a value of its own
            member
            for kind in type(owner).__mro__
            if "__slots__" in vars(kind)
            for member in vars(kind).values()
            if isinstance(member, MemberDescriptorType)
        ]

    def read(self) -> dict[MemberDescriptorType, Any]:
        found = {}
        for member in self.members:
            with suppress(AttributeError):  # nothing is there
                found[member] = member.__get__(self._owner)
        return found

    def put_back(self, before: dict[MemberDescriptorType, Any]) -> None:
        for member in self.read().keys() - before.keys():
            member.__delete__(self._owner)
        for member, value in before.items():
            member.__set__(self._owner, value)  # that of a frozen object too


def is_librarys(found: Any) -> bool:
    """Whether an object is a part of torch or of Python that nobody should look into."""
    if isinstance(found, torch.nn.Module):
        return False
    top = type(found).__module__.partition(".")[0]
    return top in _LIBRARIES


def cells_of(function: Any) -> dict[str, CellType]:
    """What holds the values that a function has from around it, as far as they are there."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell for name, cell in zip(names, cells, strict=True) if _is_bound(cell)}


def _is_bound(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that is bound later
        return False
    return True


def plainly(container: Any) -> Any:
    """The type whose methods do no more than they say; those of a subclass may.

    An ``OrderedDict`` has its own order.
    """
    kinds = (OrderedDict, dict, list, deque, set, frozenset, tuple)
    return next(kind for kind in kinds if isinstance(container, kind))


def restore(holder: Any, before: Any) -> None:
    if isinstance(holder, Slots):
        holder.put_back(before)
    elif isinstance(holder, CellType):
        holder.cell_contents = before
    elif isinstance(holder, dict):
        kind = plainly(holder)
        now = [part for item in kind.items(holder) for part in item]
        if _differ(now, [part for item in before.items() for part in item]):
            kind.clear(holder)
            for key, value in before.items():
                kind.__setitem__(holder, key, value)
    elif isinstance(holder, (list, deque, set)):
        kind = plainly(holder)
        if _differ(list(kind.__iter__(holder)), before):
            kind.clear(holder)
            put: Any = kind.update if kind is set else kind.extend
            put(holder, before)


def _differ(now: list[Any], was: list[Any]) -> bool:
    return len(now) != len(was) or any(a is not b for a, b in zip(now, was, strict=True))


_HOLD_NOTHING = frozenset((str, bytes, int, float, bool, type(None), type, torch.Tensor))


def modules_of(model: Any) -> list[torch.nn.Module]:
    """The model, if it is a module; else those that it or its attributes hold.

    It, or an attribute, may be a module, a method of one, a function that has one in its closure or
    its defaults, a ``functools.partial``, an object that can be called and has one in its
    attributes, or a container of any of these. What a function finds in globals is not seen,
    nor what is in other objects: an engine among them would have the weights of all its models.
    """
    if isinstance(model, torch.nn.Module):
        return [model]
    found: dict[int, torch.nn.Module] = {}  # a tower may be its own forward
    seen = {id(model)}
    todo = deque(_held(model) or _attributes(model))
    while todo:
        each = todo.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.nn.Module):
            found[id(each)] = each
        else:  # a tokenizer among them has words by the hundred thousand
            todo += [item for item in _held(each) if type(item) not in _HOLD_NOTHING]
    return list(found.values())


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, MethodType):
        owner = value.__self__
        held = () if isinstance(owner, torch.nn.Module) else _attributes(owner)
        return (owner, value.__func__, *held)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*map(_content, value.__closure__ or ()), *defaults)
    return _attributes(value) if callable(value) else ()


def _attributes(value: Any) -> Iterable[Any]:
    if isinstance(value, type):
        return ()
    return (*getattr(value, "__dict__", {}).values(), *Slots(value).read().values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the function was defined before what it names
        return None


_BY_VALUE: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), torch.Size)
_BY_VALUE += (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Layout(NamedTuple):
    """Everything about a tensor that a graph repeats, but for its address."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Layout":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def __str__(self) -> str:
        view = " conjugate" * self.conjugate + " negative" * self.negative
        strides = f"strides {tuple(self.stride)}"
        return f"a{view} tensor {tuple(self.shape)} with {strides} of {self.dtype}"


def same_layout(leaf: Any, other: torch.Tensor) -> bool:
    """Whether ``leaf`` is a tensor of the shape, strides, dtype and bits of ``other``."""
    return isinstance(leaf, torch.Tensor) and _Layout.of(leaf) == _Layout.of(other)


def layout_text(leaf: Any) -> str:
    """A value as messages show it: the layout of a tensor, a plain value, or a kind of object."""
    if isinstance(leaf, torch.Tensor):
        return str(_Layout.of(leaf))
    if isinstance(leaf, _BY_VALUE):
        return repr(leaf)
    return f"{with_article(type(leaf).__name__)} object"


def is_plain_value(leaf: Any) -> bool:
    """Whether a leaf is a number, a text or the like, which can be compared."""
    return isinstance(leaf, _BY_VALUE)


def same_value(now: Any, before: Any) -> bool:
    """Whether two host values are interchangeable: equal plain values, or the same object."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, _BY_VALUE):
        return False
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # tells -0.0 from 0.0, and takes a NaN for a NaN
    return bool(now == before)


def is_cpu_scalar(leaf: Any, tensor_type: str) -> bool:
    """Whether a leaf is a 0-dim CPU tensor among tensors of another device type."""
    if tensor_type == "cpu" or not isinstance(leaf, torch.Tensor):
        return False
    return leaf.dim() == 0 and leaf.device.type == "cpu"


def _autocast(tensor_type: str) -> torch.dtype | None:
    """The dtype to which ops are cast now, or None."""
    on = torch.is_autocast_enabled(tensor_type)
    return torch.get_autocast_dtype(tensor_type) if on else None


# Most attributes of a module; Python tells their type sooner than torch tells a tensor.
_NO_TENSORS = frozenset((bool, int, float, str, type(None), dict, OrderedDict, set, list, tuple))


class WeightsGuard:
    """The parameters, buffers and other tensors of what was captured: the same, where they were.

    Sub-modules must be the same too. Keeps the memory, so that a graph never reads what was freed.
    0-dim CPU tensors in graphs of another device must have the same value: kernels got it as a
    launch argument, which a graph bakes in. Tensors that are in no module, and modules that a
    function finds in globals, are not seen.

    Args:
        runnable: what was captured: a module, or what holds some; see
            :func:`~cgcompile.graphs.guards.modules_of`. Nothing is looked at if it, or the object
            whose method it is, says ``compares_weights``: by itself, that is.
        tensor_type: the device type of the tensors that graphs are captured of.
    """

    def __init__(self, runnable: Any, tensor_type: str = "cpu") -> None:
        owner = getattr(runnable, "__self__", runnable)
        roots = () if getattr(owner, "compares_weights", False) is True else modules_of(runnable)
        modules = [named for root in roots for named in root.named_modules()]
        self._places: list[tuple[dict[str, Any], str, str]] = []
        for prefix, each in modules:
            start = f"{prefix}." if prefix else ""
            for table in (each._parameters, each._buffers, each._modules):
                self._places += [(table, name, start + name) for name in table]
            own = each.__dict__
            self._places += [
                (own, name, start + name)
                for name, v in own.items()
                if type(v) not in _NO_TENSORS and isinstance(v, torch.Tensor)
            ]
        self._objects = self._now()
        places = [p for p, each in enumerate(self._objects) if isinstance(each, torch.Tensor)]
        self._held = {p: self._objects[p].untyped_storage() for p in places}
        self._starts = {p: self._objects[p].data_ptr() for p in places}
        self._identities = compat.identities(self._objects)
        self._addresses = compat.Addresses(self._objects, places)
        scalars = [p for p in places if is_cpu_scalar(self._objects[p], tensor_type)]
        self._scalars = [(p, self._objects[p].item()) for p in scalars]

    @property
    def objects(self) -> tuple[Any, ...]:
        """The tensors and sub-modules, as they were."""
        return self._objects

    def _now(self) -> tuple[Any, ...]:
        return tuple([table.get(name) for table, name, _ in self._places])

    def check(self, what: str, batch: object) -> None:
        """Compare with the module as it is. About 0.1 us a weight; does not synchronise.

        Raises:
            AddressChangedError: a weight or a sub-module was replaced, or a weight moved.
            HostValueChangedError: a 0-dim CPU tensor has another value.
        """
        now = self._now()
        if compat.identities(now) == self._identities and self._addresses.hold(now):
            for place, value in self._scalars:
                if not same_value(now[place].item(), value):
                    path, new = self._places[place][2], now[place].item()
                    raise HostValueChangedError.cpu_scalar(
                        what=what, batch=str(batch), path=path, now=new, before=value
                    )
            return
        for place, (before, each) in enumerate(zip(self._objects, now, strict=True)):
            start = self._starts.get(place)
            if each is not before or (start is not None and each.data_ptr() != start):
                raise AddressChangedError.weight(
                    what=what, batch=str(batch), path=self._places[place][2]
                )


class ArgumentGuard:
    """The arguments of one captured call.

    Tensors and plain values are found inside of lists, tuples and dicts too; any other object must
    be the same object again.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tensor_type: str = "cpu"
    ) -> None:
        self._count = len(args)
        self._tensor_type = tensor_type
        self._autocast = _autocast(tensor_type)
        self._reads_scalars = False
        self._names = tuple(kwargs)
        self._flat = not any(compat.is_container(each) for each in (*args, *kwargs.values()))
        tops = [f"input {i}" for i in range(len(args))] + [f"input {name!r}" for name in kwargs]
        self._paths: list[str] = []
        self._known: list[Any] = []  # per leaf: (address, layout) of a tensor, or the value
        self._is_tensor: list[bool] = []
        for top, tree in zip(tops, (*args, *kwargs.values()), strict=True):
            for path, leaf in compat.tree_paths(tree):
                self._reads_scalars |= self._is_scalar(leaf)
                leaf = leaf.item() if self._is_scalar(leaf) else leaf
                tensor = isinstance(leaf, torch.Tensor)
                self._paths.append(top + path)
                self._is_tensor.append(tensor)
                self._known.append((leaf.data_ptr(), _Layout.of(leaf)) if tensor else leaf)
        self._spec = None if self._flat else compat.tree_spec((list(args), dict(kwargs)))

    def check(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str, batch: object
    ) -> None:
        """Compare with what this call gives. Costs about 0.3 us a tensor; does not synchronise.

        Raises:
            AddressChangedError: a tensor lies elsewhere.
            HostValueChangedError: another value, layout or structure.
        """
        self.check_autocast(what, batch)
        if len(args) != self._count or (kwargs and set(kwargs) != set(self._names)):
            self._structure(args, kwargs, what, batch)
        if not kwargs and self._names:
            self._structure(args, kwargs, what, batch)
        leaves: Sequence[Any] = args
        if kwargs:
            leaves = (*args, *(kwargs[name] for name in self._names))
        if not self._flat:
            ordered = {name: kwargs[name] for name in self._names}
            if compat.tree_spec((list(args), ordered)) != self._spec:
                self._structure(args, kwargs, what, batch)
            leaves = compat.tree_leaves(leaves)
        if self._reads_scalars:
            leaves = [leaf.item() if self._is_scalar(leaf) else leaf for leaf in leaves]
        for position, leaf in enumerate(leaves):
            known = self._known[position]
            if not self._is_tensor[position]:
                if not same_value(leaf, known):
                    path = self._paths[position]
                    found = layout_text(leaf)
                    raise HostValueChangedError.changed(
                        what=what, batch=str(batch), path=path, now=found, before=layout_text(known)
                    )
            elif not isinstance(leaf, torch.Tensor):
                raise HostValueChangedError.changed(
                    what=what,
                    batch=str(batch),
                    path=self._paths[position],
                    now=layout_text(leaf),
                    before=str(known[1]),
                )
            else:
                self._check_tensor(leaf, known, self._paths[position], what, batch)

    def check_autocast(self, what: str, batch: object) -> None:
        """Compare the autocast mode alone: for arguments that cannot have changed.

        Raises:
            HostValueChangedError: another mode.
        """
        now = _autocast(self._tensor_type)
        if now != self._autocast:
            raise HostValueChangedError.changed(
                what=what, batch=str(batch), path="autocast", now=now, before=self._autocast
            )

    def _is_scalar(self, leaf: Any) -> bool:
        return is_cpu_scalar(leaf, self._tensor_type)

    def _check_tensor(
        self, leaf: torch.Tensor, known: tuple[Any, ...], path: str, what: str, batch: object
    ) -> None:
        address, layout = known
        if _Layout.of(leaf) != layout:
            raise HostValueChangedError.changed(
                what=what, batch=str(batch), path=path, now=layout_text(leaf), before=str(known[1])
            )
        if leaf.data_ptr() != address:
            where = leaf.data_ptr()
            raise AddressChangedError.moved_in_wrapper(
                what=what, batch=str(batch), path=path, now=where, before=address
            )

    def _structure(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], what: str, batch: object
    ) -> None:
        now, before = _passed(len(args), kwargs), _passed(self._count, self._names)
        if now == before:
            now, before = "arguments of another nesting", "the one before"
        raise HostValueChangedError.other_arguments(
            what=what, batch=str(batch), now=now, before=before
        )


def _passed(count: int, names: Iterable[str]) -> str:
    """How arguments were passed, in words."""
    by_name = ", ".join(map(repr, sorted(names)))
    return f"{count} arguments by position and {by_name or 'none'} by name"


class Transparent:
    """Has ``runnable``, and shows its attributes beside its own."""

    def __getattr__(self, name: str) -> Any:
        # Through __dict__, because a copy has no runnable for a moment. How to copy and pickle a
        # module is its own affair.
        if "runnable" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            kind = type(self.__dict__.get("runnable")).__name__
            raise AttributeError(missing_attribute(type(self).__name__, kind, name))
        runnable = self.__dict__["runnable"]
        try:
            return getattr(runnable, name)
        except AttributeError:
            kind = type(runnable).__name__
            text = missing_attribute(type(self).__name__, kind, name)
            raise AttributeError(text) from None
