"""Guards of arguments and weights: what a call has must be what its capture had.

A graph repeats addresses and host values, and a replay runs no Python. :class:`ArgumentGuard`
compares the arguments of a call, :class:`WeightsGuard` the weights of the modules of a runnable;
``fields.py`` compares the fields of other objects, ``contract.py`` the forward context. The rule:
a difference is an error that names the argument or weight, and nothing is replayed.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from inspect import Parameter, Signature, signature
from itertools import chain
from typing import Any, NoReturn

import torch

from cgcompile.errors import AddressChangedError, HostValueChangedError
from cgcompile.graphs.contract import (
    Change,
    Placed,
    Tensors,
    is_cpu_scalar,
    layout_of,
    layout_text,
    named_arguments,
    same_value,
)
from cgcompile.graphs.reads import modules_of
from cgcompile.torch_compat import raw_memory, torch_ops, torch_settings

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
        self._identities = raw_memory.identities(self._known)
        pairs = zip((path for _, _, path in self._items), self.objects, strict=True)
        self._tensors = Tensors((pair for pair in pairs if _is_tensor(pair[1])), tensor_type)
        self._memory = [tensor.untyped_storage() for tensor in self._tensors.tensors]

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor needs gradients now."""
        return any([tensor.requires_grad for tensor in self._tensors.tensors])

    def _now(self) -> tuple[Any, ...]:
        return tuple([table.get(name) for table, name, _ in self._items])

    def _current(self) -> tuple[Any, ...]:
        """Return all that the dicts hold now: half of the time of :meth:`_now`."""
        attributes = [own.get(name) for own, name in self._attributes]
        return (*chain.from_iterable(self._views), *attributes)

    def check(self, what: str, batch: object) -> None:
        """Raise AddressChangedError or HostValueChangedError for a weight; 0.1 us for each."""
        seen = self._current()
        if raw_memory.identities(seen) != self._identities:
            for held, before, item in zip(self._now(), self.objects, self._items, strict=True):
                if held is not before:
                    raise self._replaced(what, batch, item[2])
            self._known, self._identities = seen, raw_memory.identities(seen)  # others were added
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


def _wrapped(leaves: Sequence[Any]) -> Iterator[tuple[int, raw_memory.Wrapper, list[Placed]]]:
    """Yield (position, how it is built, tensors inside) of each tensor that wraps others."""
    for position, leaf in enumerate(leaves):
        if _is_tensor(leaf) and raw_memory.is_wrapper(leaf):
            with suppress(raw_memory.CannotUnwrap):
                wrapper = raw_memory.Wrapper.of(leaf)
                yield position, wrapper, list(map(Placed.of, wrapper.parts(leaf)))


def _change_inside(
    path: str, leaf: Any, wrapper: raw_memory.Wrapper, parts: Sequence[Placed]
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
        self._kernels, self._traced = (
            torch_settings.kernel_settings(),
            torch_settings.trace_settings(),
        )
        self._names = tuple(kwargs)
        self._name_set = frozenset(kwargs)
        self._signature: Signature | None = None  # of what is called, once a call has another form
        pairs = [
            (top + path, leaf)
            for top, tree in named_arguments(args, kwargs)
            for path, leaf in torch_ops.tree_paths(tree)
        ]
        self._reads_scalars = any(is_cpu_scalar(leaf, tensor_type) for _, leaf in pairs)
        self._paths = [path for path, _ in pairs]
        leaves = self._numbers_of([leaf for _, leaf in pairs])
        self._known = [Placed.of(leaf) if _is_tensor(leaf) else leaf for leaf in leaves]
        self._wrapped = list(_wrapped(leaves))
        self._flat = not any(torch_ops.is_container(value) for value in (*args, *kwargs.values()))
        self._spec = None if self._flat else torch_ops.tree_spec((list(args), dict(kwargs)))

    def _numbers_of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves, with numbers in place of 0-dim CPU tensors."""
        if not self._reads_scalars:
            return leaves
        kind = self._tensor_type
        return [leaf.item() if is_cpu_scalar(leaf, kind) else leaf for leaf in leaves]

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
            if torch_ops.tree_spec((list(args), ordered)) != self._spec:
                self._refuse_structure(args, kwargs, what, batch)
            leaves = torch_ops.tree_leaves(leaves)
        for position, leaf in enumerate(self._numbers_of(leaves)):
            captured = self._known[position]
            if type(captured) is Placed and isinstance(leaf, torch.Tensor):
                if layout_of(leaf) == captured.layout:
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
        kernels, traced = torch_settings.kernel_settings(), torch_settings.trace_settings()
        if kernels == self._kernels and traced == self._traced:
            return
        pair = (self._traced, traced) if kernels == self._kernels else (self._kernels, kernels)
        name, before, now = torch_settings.changed_setting(*pair)
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
    if any(torch_ops.hooks_of(function)):
        raise ValueError  # a hook sees which arguments are passed by position
    return signature(function.forward)


def _passed(count: int, names: Iterable[str]) -> str:
    """Return how arguments were passed, in words."""
    by_name = ", ".join(map(repr, sorted(names)))
    return f"{count} arguments by position and {by_name or 'none'} by name"
