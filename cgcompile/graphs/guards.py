"""What must be equal between a capture and a replay, checked at every replay.

A graph repeats addresses and host values. :class:`ArgumentGuard` holds what one captured call was
given: of each tensor the address and the layout, of everything else the value. A difference is an
error that names the argument; nothing is replayed then.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.errors import AddressChangedError, HostValueChangedError, with_article
from cgcompile.graphs.modules import modules_of

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
            :func:`~cgcompile.graphs.modules.modules_of`. Nothing is looked at if it, or the object
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
