"""Snapshots of the Python state that a call reaches: :class:`Fields` and :class:`Rebinding`.

A graph repeats what Python read at capture, and a replay runs no Python. So the fields of objects
among the arguments are compared before each replay (``guards.py``), and what a step changes
while it is captured refuses the capture (:class:`Rebinding`):

* A tensor that is rebound, added or removed refuses a capture wherever it is reachable: in an
  attribute, a container, a helper object or a closure. So does a module.
* A number, or another plain value, refuses it where it is an attribute of a module itself
  (``self.count += 1``). In helper objects, containers and closures it is bookkeeping (a list of
  calls, the counter of a hook), and may change.

Opened is what :func:`~cgcompile.graphs.reads.parts` describes. Closed are objects of torch and of
Python's own libraries, and objects of C extensions; a guard compares those by identity. Refused are
modules of TorchScript, which have their fields in C++ and may change them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch

from cgcompile.errors import CaptureError
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import bulk_memory
from cgcompile.graphs.contract import (
    MISSING,
    Change,
    has_address,
    inner_tensors,
    is_plain_value,
    layout_text,
    named_arguments,
    same_memory,
    same_value,
)
from cgcompile.graphs.reads import (
    ATTRIBUTES,
    CONTAINERS,
    ITEMS,
    TABLES,
    Form,
    array_bytes,
    behind,
    contents,
    is_closed_object,
    parts,
    restore,
)
from cgcompile.torch_compat import raw_memory

_MAX_VALUES = 100_000  # a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_STATE = frozenset((*TABLES, "training"))  # of what every module has, compared by identity
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type, torch.Size))


class Item(NamedTuple):
    """A value, and where it is held."""

    path: str  # such as ``self.layers.0.cache``
    owner: Any  # the object whose attribute holds it, in containers or not; None for a root
    attribute: str  # of the owner
    value: Any

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the owner (which may have no hash) and the attribute."""
        return id(self.owner), self.attribute


class _Holder:
    """A part of an object, with the keys and values that it held."""

    __slots__ = ("_form", "_path", "keys", "of_module", "owner", "skipped", "target", "values")

    def __init__(self, form: Form, target: Any, value: Any, item: Item) -> None:
        self._form, self._path, self.target = form, item.path, target
        self.of_module = isinstance(value, torch.nn.Module)  # these are attributes of a module
        is_whole = self.of_module and form is ATTRIBUTES
        self.skipped = names_of_modules() if is_whole else frozenset()  # they are not opened
        # The object, and its field if that is a container.
        self.owner = (item.owner, item.attribute) if form is ITEMS else (value, "")
        self.read()

    def read(self) -> None:
        """Take the present keys and values."""
        self.keys, self.values = contents(self.target)

    @property
    def compared(self) -> tuple[Any, ...]:
        """The keys of a dict whose values are compared; of a module, few that every module has."""
        if not self.skipped:
            return self.keys
        return tuple(key for key in self.keys if key in _STATE or key not in self.skipped)

    def name(self, key: Any) -> str:
        """Return the path of an item."""
        return self._path + self._form.step(key)

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.keys, self.values, strict=True)

    def item(self, key: Any, value: Any) -> Item:
        """Return a value with its path and owner."""
        owner, attribute = self.owner
        if owner is not None:
            attribute = attribute or str(getattr(key, "__name__", key))
        return Item(self.name(key), owner, attribute, value)

    def is_same(self) -> bool:
        """Return whether it holds the same objects under the same keys."""
        keys, values = contents(self.target)
        if isinstance(self.target, (set, frozenset)):
            return bool(values == self.values)
        if raw_memory.identities(values) != raw_memory.identities(self.values):
            return False
        if isinstance(self.target, dict):  # whose keys may be tensors, which == compares by item
            return raw_memory.identities(keys) == raw_memory.identities(self.keys)
        return keys == self.keys

    def changes(self) -> Iterator[Change]:
        """Yield the items that are other objects."""
        before = dict(zip(self.keys, self.values, strict=True))
        after = dict(zip(*contents(self.target), strict=True))
        for key in before | after:
            one, other = before.get(key, MISSING), after.get(key, MISSING)
            if one is not other:
                yield Change(self.name(key), one, other)

    def has_new_tensors(self) -> bool:
        """Return whether it holds a tensor that it did not hold."""
        known = set(map(id, self.values))
        now = contents(self.target)[1]
        return any(isinstance(value, torch.Tensor) and id(value) not in known for value in now)

    def restore(self) -> None:
        """Restore the keys and values."""
        restore(self.target, self.keys, self.values)


@cache
def names_of_modules() -> frozenset[str]:
    """Return what every module has, of which :data:`TABLES` are opened by themselves."""
    return frozenset(torch.nn.Module().__dict__)


class Fields:
    """A snapshot of the fields that are reachable from some roots, given by name."""

    def __init__(
        self, roots: Mapping[str, Any], tensor_type: str = "cpu", longest: int = _LONG
    ) -> None:
        self._roots = dict(roots)
        self._tensor_type = tensor_type  # of graphs: in others a 0-dim CPU tensor is a number
        self._longest = longest  # containers with as many items are not compared
        self.read()

    def read(self) -> None:
        """Take the present fields."""
        self.complete = True  # False where there are too many to be read
        self._holders: list[_Holder] = []
        self.arrays: list[tuple[str, Any, bytes]] = []
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        seen: set[int] = set()
        todo = [Item(path, None, "", root) for path, root in self._roots.items()]
        for item in todo:  # grows meanwhile
            path, value = item.path, behind(item.value)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = (path, value)
                tensors.update((id(inner), (path, inner)) for inner in inner_tensors(value))
                continue
            data = array_bytes(value)
            if data is not None:
                self.arrays.append((path, value, data))
                continue
            if isinstance(value, torch.jit.ScriptModule):
                raise CaptureError.scripted(field=path, found=type(value).__name__)
            for form, target in () if is_closed_object(value) else parts(value):
                is_builtin = isinstance(target, CONTAINERS)  # code of a user reads other items
                if form is ITEMS and not (is_builtin and len(target) < self._longest):
                    continue
                holder = _Holder(form, target, value, item)
                self._holders.append(holder)
                skipped = holder.skipped
                todo += [
                    holder.item(key, field)
                    for key, field in holder.pairs()
                    if type(field) not in _PLAIN and not (skipped and key in skipped)
                ]
            if len(todo) > _MAX_VALUES:
                self.complete = False
                break
        self.named = [row for row in tensors.values() if has_address(row[1])]
        self._index()

    def _index(self) -> None:
        """Prepare the comparison: plain dicts, of which modules have thousands, in one pass."""
        holders = [holder for holder in self._holders if type(holder.target) is dict]
        self._dicts = [holder.target for holder in holders]
        self._sizes = [*map(len, self._dicts)]
        groups: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}  # by keys; few in a model
        for holder in holders:
            groups.setdefault(holder.compared, []).append(holder.target)
        # itemgetter returns a tuple for two keys or more.
        self._groups = [(itemgetter(*keys, keys[0]), held) for keys, held in groups.items() if keys]
        self._known = _identities(self._groups)
        closed = (dict, tuple, frozenset)
        self._others = [holder for holder in self._holders if type(holder.target) not in closed]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with memory that were reachable."""
        return [tensor for _, tensor in self.named]

    def items(self) -> Iterator[Item]:
        """Yield the roots and all that was held, but for items of very long containers."""
        yield from (Item(path, None, "", root) for path, root in self._roots.items())
        for holder in self._holders:
            if len(holder.keys) < _LONG:
                yield from map(holder.item, holder.keys, holder.values)

    def same_objects(self) -> bool:
        """Return whether every field holds the same object."""
        if [*map(len, self._dicts)] != self._sizes or _identities(self._groups) != self._known:
            return False
        return all(holder.is_same() for holder in self._others)

    def follow(self) -> None:
        """Take the present fields where they differ."""
        changed = [holder for holder in self._holders if not holder.is_same()]
        for change in chain.from_iterable(holder.changes() for holder in changed):
            if not (_is_plain(change.before) and _is_plain(change.after)):
                return self.read()
        for holder in changed:  # no other objects are reachable than before
            holder.read()
        if changed:
            self._index()

    def changes(self) -> Iterator[tuple[Change, bool]]:
        """Yield the fields that hold other objects, and whether they are those of a module."""
        for holder in self._holders:
            for change in () if holder.is_same() else holder.changes():
                yield change, holder.of_module

    def restore(self, tensors_alone: bool = False) -> None:
        """Restore every field; with ``tensors_alone``, of holders that have a new tensor."""
        for holder in self._holders:
            if not holder.is_same() and (not tensors_alone or holder.has_new_tensors()):
                holder.restore()


def _identities(groups: Iterable[tuple[Any, list[dict[Any, Any]]]]) -> bytes | None:
    """Return the identities of what dicts hold under their keys; None if one has another key."""
    rows = chain.from_iterable(map(get, dicts) for get, dicts in groups)
    try:
        return raw_memory.identities(tuple(chain.from_iterable(rows)))
    except KeyError:
        return None


def _repeats(change: Change, of_module: bool) -> bool:
    """Return whether a replay need not rebind a field that the step rebound."""
    before, after = change.before, change.after
    if _is_plain(before) and _is_plain(after):
        missing = before is MISSING or after is MISSING
        return not of_module or (not missing and same_value(after, before))
    if any(isinstance(value, torch.nn.Module) for value in (before, after)):
        return False
    one, other = _tensors_in(before), _tensors_in(after)
    return len(one) == len(other) and all(map(same_memory, one, other))


def _is_plain(value: Any) -> bool:
    return value is MISSING or is_plain_value(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors that are reachable from a value."""
    return [] if _is_plain(value) else Fields({"": value}).tensors


class Rebinding:
    """Find the fields that captured code rebinds; eager breaks may, they run at each replay."""

    # Within one bulk capture, what is reachable from the runnable is read once, compared after.

    def __init__(self, runnable: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        unwrap = getattr(runnable, "unwrap", None)
        subject = behind(unwrap() if callable(unwrap) else runnable)
        name = subject.__name__ if isinstance(subject, FunctionType) else "self"
        memory = bulk_memory()
        key = (Rebinding, id(subject))  # the fields hold the subject
        if key in memory:
            if not memory[key].same_objects():
                memory[key].follow()
        else:
            memory[key] = Fields({name: subject})
        arguments = {n: v for n, v in named_arguments(args, kwargs) if type(v) not in _PLAIN}
        self._fields: list[Fields] = [memory[key], Fields(arguments)]
        self._change: Change | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are reachable."""
        return [tensor for fields in self._fields for tensor in fields.tensors]

    def end_segment(self) -> None:
        """Compare the fields after captured code, and take what it may change as it is now."""
        for fields in self._fields:
            if self._change is None and not fields.same_objects():
                changes = (
                    row for row, of_module in fields.changes() if not _repeats(row, of_module)
                )
                self._change = next(changes, None)
                if self._change is None:
                    fields.follow()

    def begin_segment(self) -> None:
        """Take the fields as they are now: an eager break may change them."""
        for fields in self._fields:
            if not fields.same_objects():
                fields.follow()

    def error(self, what: str) -> CaptureError | None:
        """Return what to raise at the end of a capture that has rebound a field."""
        self.end_segment()
        if self._change is None:
            return None
        path, (before, after) = self._change.path, map(layout_text, self._change[1:3])
        return CaptureError.rebinds(what=what, field=path, before=before, after=after)

    def restore(self, tensors_alone: bool = False) -> None:
        """Restore every field as it was before the segment; see :meth:`Fields.restore`."""
        for fields in self._fields:
            fields.restore(tensors_alone)

    def move_out(self, holds: Callable[[int], bool]) -> None:
        """Copy the tensors of fields out of memory of graphs, which ``holds`` an address."""
        storages: dict[int, torch.UntypedStorage] = {}
        self.begin_segment()
        for tensor in filter(raw_memory.is_plain_tensor, self.tensors):
            start = address(tensor)
            if not start or not holds(start):
                continue
            if start not in storages:
                with torch.inference_mode(False), torch.no_grad():
                    memory = raw_memory.storage_bytes(tensor.untyped_storage())
                    storages[start] = memory.clone().untyped_storage()
            layout = tensor.storage_offset(), tensor.size(), tensor.stride()
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.set_(storages[start], *layout)
