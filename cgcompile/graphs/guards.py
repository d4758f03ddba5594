"""Guards of calls and weights: what a call has must be what its capture had.

A graph repeats addresses and host values, and a replay runs no Python. :class:`CallForm` compares
how arguments are passed, and a contract (:func:`read_arguments`) what they are; :class:`Weights`
has the contract of the weights of the modules of a runnable. The rule: a difference is an error
that names the argument or weight, and nothing is replayed.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from inspect import Parameter, Signature, signature
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch

from cgcompile.errors import CaptureError, HostValueChangedError
from cgcompile.graphs.contract import (
    MISSING,
    Change,
    Contract,
    Kind,
    Layouts,
    Placed,
    Read,
    Reads,
    has_address,
    host_number,
    is_cpu_scalar,
    layout_text,
    named_arguments,
    same_value,
)
from cgcompile.graphs.fields import Fields
from cgcompile.graphs.reads import (
    CONTAINERS,
    TABLES,
    Reader,
    array_bytes,
    declared,
    is_closed_object,
    modules_of,
)
from cgcompile.torch_compat import raw_memory, torch_ops, torch_settings

_DEEPEST = 40  # objects in objects
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_TREES = (tuple, list, dict)  # opened as torch's pytree does
_SAME = (torch.nn.Module, FunctionType, MethodType, partial)

# -------------------------------------------------------------- weights

# Types of most attributes of a module: a look-up is faster than isinstance of a tensor.
_NO_TENSORS = frozenset((bool, int, float, str, type(None), dict, OrderedDict, set, list, tuple))


class Tensors:
    """The tensors with memory among some, by path: addresses, layouts, and the numbers in some."""

    # A kernel gets a 0-dim CPU tensor as a launch argument, which a graph bakes in.

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], tensor_type: str) -> None:
        pairs = [(path, tensor) for path, tensor in named if has_address(tensor)]
        self._paths = [path for path, _ in pairs]
        self.all = tuple([tensor for _, tensor in pairs])
        self._starts = [tensor.data_ptr() for tensor in self.all]
        addresses = raw_memory.Addresses(self.all, range(len(self.all)))
        self._in_place = addresses.hold_for([*self.all])
        self._layouts = Layouts(self.all)
        self._numbers = [
            (path, tensor, tensor.item())
            for path, tensor in pairs
            if is_cpu_scalar(tensor, tensor_type)
        ]

    def hold(self) -> bool:
        """Return whether no tensor and no number differs; 0.12 us for each tensor."""
        return (
            self._in_place()
            and (self._layouts.alike(*self.all) or self._layouts.hold(*self.all))
            and (not self._numbers or self._changed_number() is None)
        )

    def first_change(self) -> Change | None:
        """Return the first tensor that moved or has another layout, else the first number."""
        captured = map(Placed, self._starts, self._layouts.known)
        for path, tensor, before in zip(self._paths, self.all, captured, strict=True):
            now = Placed.of(tensor)
            if now.address != before.address:
                return Change(path, before.address, now.address, moved=True)
            if now != before:
                return Change(path, layout_text(before), layout_text(now))
        return self._changed_number()

    def _changed_number(self) -> Change | None:
        for path, tensor, number in self._numbers:
            if not same_value(tensor.item(), number):
                return Change(path, number, tensor.item())
        return None


class Weights:
    """The parameters, buffers, other tensors and sub-modules of the modules of a runnable."""

    # It keeps their memory, so that a graph never reads what was freed.

    def __init__(
        self,
        runnable: Any,
        tensor_type: str = "cpu",
        only: Collection[int] | None = None,  # identities of the tensors to compare; None: all
    ) -> None:
        self.are_compared = runnable is not None
        self._items: list[tuple[dict[str, Any], str, str]] = []  # dict, name, path
        attributes: set[int] = set()  # identities of the dicts of modules themselves
        self._bound: list[tuple[dict[str, Any], str, str]] = []  # tables in them: dict, name, path
        seen: set[torch.nn.Module] = set()  # roots may share modules
        for prefix, module in (
            named for root in modules_of(runnable) for named in root.named_modules(seen)
        ):
            start = f"{prefix}." if prefix else ""
            own = module.__dict__
            attributes.add(id(own))
            self._bound += [(own, name, start + name) for name in TABLES]
            rest = [k for k, v in own.items() if type(v) not in _NO_TENSORS and torch.is_tensor(v)]
            items = [(own, name, start + name) for name in rest]
            for table in (module._parameters, module._buffers, module._modules):
                items += [(table, name, start + name) for name in table]
            self._items += [
                (table, name, path)
                for table, name, path in items
                if only is None or table is module._modules or id(table[name]) in only
            ]
        self._bound_to = [own[name] for own, name, _ in self._bound]
        self.owners = [own for own, _, _ in self._bound[:: len(TABLES)]]
        self.objects = [table[name] for table, name, _ in self._items]  # as they were
        self.tables = [*{id(table): table for table, _, _ in self._items}.values()]
        self._views = [table.values() for table in self.tables if id(table) not in attributes]
        self._attributes = [row[:2] for row in self._items if id(row[0]) in attributes]
        self.follow()
        rows = zip(self._items, self.objects, strict=True)
        named = {id(x): (row[2], x) for row, x in rows if isinstance(x, torch.Tensor)}
        self._tensors = Tensors(named.values(), tensor_type)
        self._memory = [tensor.untyped_storage() for tensor in self._tensors.all]

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor needs gradients now."""
        return any([tensor.requires_grad for tensor in self._tensors.all])

    def leave(self, table: Any) -> bool:
        """Return whether weights are compared, but not those in a table."""
        return self.are_compared and all(table is not known for known in self.tables)

    def move(self, attributes: Mapping[int, dict[str, Any]]) -> None:
        """Follow modules with other dicts of attributes, by the identities of those before."""
        if all(attributes.get(id(own), own) is own for own in self.owners):
            return

        def now(table: dict[str, Any]) -> dict[str, Any]:
            return attributes.get(id(table), table)

        self._items = [(now(table), name, path) for table, name, path in self._items]
        self._bound = [(now(own), name, path) for own, name, path in self._bound]
        self.owners, self.tables = [*map(now, self.owners)], [*map(now, self.tables)]
        self._attributes = [(now(own), name) for own, name in self._attributes]

    def follow(self) -> None:
        """Take what the tables hold now, where others were added."""
        self._known = self._current()
        self._identities = raw_memory.identities(self._known)

    def _current(self) -> tuple[Any, ...]:
        attributes = [own.get(name) for own, name in self._attributes]
        return (*chain.from_iterable(self._views), *attributes)

    def same_objects(self) -> bool:
        """Return whether the tables hold the same objects; 0.05 us for each."""
        return raw_memory.identities(self._current()) == self._identities

    def compare(self, reads: Reads, written: Set[int] | None = None) -> None:
        """Write the comparison of addresses and layouts, 0.12 us for each tensor.

        With ``written``, objects are compared only in the tables that were written since, and
        whether these modules have other tables.
        """
        is_watched = written is not None and written.isdisjoint(map(id, self.tables))
        if not (is_watched and self.same_objects()):  # else another thread wrote before the watch
            reads.unless(f"not {reads.bound('same', self.same_objects)}()")
        pairs = [*zip(self._bound, self._bound_to, strict=True)]
        if written is not None and _same_tables(pairs):
            pairs = [row for row in pairs if id(row[0][0]) in written]
        if written is not None and pairs:
            reads.unless(f"not {reads.bound('same', partial(_same_tables, pairs))}()")
        if self._tensors.all:
            reads.unless(f"not {reads.bound('hold', self._tensors.hold)}()")

    def contract(self, remedy: str = "clear_graphs()", has_state: bool = False) -> Contract:
        """Return the contract ``holds()``; ``remedy`` drops the graphs, in messages.

        With ``has_state``, also compare which tables modules have: the state has their dicts.
        """
        reads = Reads()
        reads.names["table_of"] = _table_of
        tables = {id(table): reads.bound("table", table) for table in (*self.tables, *self.owners)}
        for (own, name, path), table in zip(self._bound, self._bound_to, strict=True):
            now = f"{tables[id(own)]}.get({name!r})"
            at = f"id(table_of({now}, {reads.bound('before', table)}))"
            if has_state:
                reads.rows.append(Read(path, at, Kind.PLACE, id(table)))
        for (table, name, path), value in zip(self._items, self.objects, strict=True):
            at = f"id({tables[id(table)]}.get({name!r}))"
            reads.rows.append(Read(path, at, Kind.PLACE, id(value)))
        self.compare(reads, {*tables} if has_state else None)
        return Contract("", reads, "weight", self._rest, remedy)

    def _rest(self) -> Change | None:
        """Return the first change of the same objects; without one, follow the tables."""
        change = self._tensors.first_change()
        if change is None:
            self.follow()
        return change


def _same_tables(pairs: Iterable[tuple[tuple[dict[str, Any], str, str], Any]]) -> bool:
    """Return whether the dicts of modules hold the same tables of weights and modules."""
    return all([_table_of(own.get(name), table) is table for (own, name, _), table in pairs])


def _table_of(now: Any, table: dict[str, Any]) -> Any:
    """Return ``table`` if one of the same objects is in its place, as after ``ModuleList.pop``."""
    is_same = now is table or (
        isinstance(now, dict)
        and now.keys() == table.keys()
        and all([now[name] is table[name] for name in table])
    )
    return table if is_same else now


# -------------------------------------------------------------- arguments


class CallForm:
    """How the arguments of one captured call were passed, under which settings of torch."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._count, self._names, self._name_set = len(args), tuple(kwargs), frozenset(kwargs)
        self._kernels = torch_settings.kernel_settings()
        self._traced = torch_settings.trace_settings()
        self._signature: Signature | None = None  # of what is called, once a call has another form

    def has_form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
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

    def check_settings(self, what: str, batch: object) -> None:
        """Raise HostValueChangedError under other settings of torch: for unchanged arguments."""
        kernels, traced = torch_settings.kernel_settings(), torch_settings.trace_settings()
        if kernels == self._kernels and traced == self._traced:
            return
        pair = (self._traced, traced) if kernels == self._kernels else (self._kernels, kernels)
        name, before, now = torch_settings.changed_setting(*pair)
        raise HostValueChangedError.setting(
            what=what, batch=str(batch), name=name, now=now, before=before
        )

    def check_form(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], what: str, batch: object
    ) -> None:
        """Raise HostValueChangedError where other arguments are passed by position or name."""
        if not self.has_form(args, kwargs):
            now, before = _passed(len(args), kwargs), _passed(self._count, self._names)
            raise HostValueChangedError.other_arguments(
                what=what, batch=str(batch), now=now, before=before
            )


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _signature_of(function: Any) -> Signature:
    """Return the signature by which arguments of a call can be bound."""
    if not isinstance(function, torch.nn.Module):
        return signature(function)
    if any(torch_ops.hooks_of(function)):
        raise ValueError  # a hook sees which arguments are passed by position
    return signature(function.forward)


def _passed(count: int, names: Iterable[str]) -> str:
    """Return how arguments were passed, in words."""
    by_name = ", ".join(map(repr, sorted(names)))
    return f"{count} arguments by position and {by_name or 'none'} by name"


# -------------------------------------------------------------- what is read of them


def read_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], tensor_type: str) -> Contract:
    """Return the contract ``holds(args, kwargs)`` of the arguments of a call.

    Raises:
        CaptureError: they hold a module of TorchScript, or more than can be compared.
    """
    reader = _ArgumentReader(tensor_type)
    places = [*(f"args[{at}]" for at in range(len(args))), *(f"kwargs[{key!r}]" for key in kwargs)]
    for at, (path, value) in zip(places, named_arguments(args, kwargs), strict=True):
        reader.visit(value, path, at, at, _DEEPEST)
    return reader.contract("args, kwargs")


class _ArgumentReader(Reader):
    """Collects all of the arguments of a call.

    The containers of torch's pytree and dataclasses may be others that hold the same, and so may
    containers and objects in those. Any other object must be the same one, with equal fields.
    """

    _exact = True

    def __init__(self, tensor_type: str, in_object: bool = False) -> None:
        super().__init__(tensor_type, lambda name: True)
        self._in_object = in_object
        self._same: dict[str, Any] = {}  # objects that must be the same ones, by path

    def contract(self, parameters: str) -> Contract:
        """Return the contract; it holds no memory of arguments, which a caller may free."""
        fields = _SameFields(self._same, self._tensor_type)
        if self.unreached or not fields.complete:
            raise CaptureError.too_many_fields()
        if self._same:
            self.reads.unless(f"not {self.reads.bound('same', fields.hold)}()")
        self.reads.held.clear()
        return Contract(parameters, self.reads, "argument", fields.first_change)

    def _object(
        self, value: Any, path: str, expression: str, local: str, depth: int, loaded: bool
    ) -> None:
        if self._may_be_another(value):
            before, self._in_object = self._in_object, self._in_object or type(value) not in _TREES
            self._open(value, path, expression, local, depth, loaded)
            self._in_object = before
        elif not self._in_object and torch_ops.is_container(value):
            self._open_tree(value, path, expression, local, depth)
        else:
            self.reads.identity(path, expression, value, local)
            self._same[path] = value

    def _may_be_another(self, value: Any) -> bool:
        """Return whether another object that holds the same may take the place of this one."""
        if type(value) in _TREES and not self._in_object:
            return True
        if isinstance(value, _SAME) or is_closed_object(value):
            return False
        if not self._in_object:
            return dataclasses.is_dataclass(value)
        if isinstance(value, CONTAINERS):
            return len(value) < _LONG
        return hasattr(value, "__dict__") or bool(declared(value))

    def _open_tree(self, value: Any, path: str, expression: str, local: str, depth: int) -> None:
        """Add the leaves of another container of torch's pytree."""
        reads, spec, variable = self.reads, torch_ops.tree_spec(value), f"v{len(self.reads.lines)}"
        reads.names |= {"spec_of": torch_ops.tree_spec, "leaves": torch_ops.tree_leaves}
        reads.unless(f"spec_of({local}) != {reads.bound('spec', spec)}")
        reads.lines.append(f"{variable} = leaves({local})")
        structure = f"str(spec_of({expression}))"
        reads.rows.append(Read(f"the structure of {path}", structure, Kind.VALUE, str(spec)))
        for index, (step, leaf) in enumerate(torch_ops.tree_paths(value)):
            at, item = f"leaves({expression})", f"[{index}]"
            self.visit(leaf, path + step, at + item, variable + item, depth - 1)

    def _begin(
        self, value: Any, path: str, expression: str, variable: str, loaded: bool
    ) -> list[Read]:
        reads, last = self.reads, list[Read]()
        if isinstance(value, CONTAINERS):
            last += reads.form(path, expression, value, variable)
        else:
            kind = f"type({expression})"
            reads.identity(f"the type of {path}", kind, type(value), f"type({variable})")
        if isinstance(getattr(value, "__dict__", None), dict):
            fields = f"{expression}.__dict__"
            last += reads.form(path, fields, value.__dict__, f"{variable}.__dict__")
        for name in declared(value):
            if not hasattr(value, name):  # an empty slot
                at = f"hasattr({{}}, {name!r})"
                what = f"whether {path} has {name}"
                reads.value(what, at.format(expression), False, at.format(variable))
        return last

    def _tensor(self, tensor: torch.Tensor, path: str, expression: str, local: str) -> None:
        reads = self.reads
        if is_cpu_scalar(tensor, self._tensor_type):
            read = reads.bound("number", partial(host_number, tensor_type=self._tensor_type))
            reads.value(path, f"{read}({expression})", tensor.item(), f"{read}({local})")
        elif has_address(tensor):
            reads.tensor(path, expression, tensor, local)
        else:
            reads.identity(path, expression, tensor, local)
        if raw_memory.is_wrapper(tensor):
            with suppress(raw_memory.CannotUnwrap):
                reads.wrapper(path, expression, tensor, local)
        if self._in_object and not tensor.requires_grad:
            reads.names["grad"] = torch.is_grad_enabled
            at = "{}.requires_grad and grad()"
            reads.value(f"{path}.requires_grad", at.format(expression), False, at.format(local))


class _SameFields(Fields):
    """The fields of objects that must be the same ones, as a row of a contract."""

    def read(self) -> None:
        """Take the present fields."""
        super().read()
        self._tensors = Tensors(self.named, self._tensor_type)

    def hold(self) -> bool:
        """Return whether every field holds the same object, which did not change in place."""
        return self.same_objects() and self._tensors.hold() and self._changed_array() is None

    def first_change(self) -> Change | None:
        """Return the first field that differs; without one, compare with the present fields."""
        for change, _ in self.changes():
            path, before, after = change[:3]
            if before is MISSING or after is MISSING:
                return Change(path, layout_text(before), layout_text(after))
            reader = _ArgumentReader(self._tensor_type, in_object=True)
            reader.visit(before, path, "value", "value", _DEEPEST)
            differs = reader.contract("value").first_change(after)
            if differs is not None:
                return differs
        differs = self._tensors.first_change() or self._changed_array()
        if differs is None:
            self.follow()
        return differs

    def _changed_array(self) -> Change | None:
        for path, value, data in self.arrays:
            if array_bytes(value) != data:
                return Change(path, "other contents", f"an array of {type(value).__name__}")
        return None
