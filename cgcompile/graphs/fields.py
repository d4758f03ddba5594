"""The Python state that a call reaches, read cheaply: :class:`Fields`, and its two users.

A graph repeats what Python read at capture, and a replay runs no Python. So the fields of objects
among the arguments are compared before each replay (:class:`FieldsGuard`), and what a step changes
while it is captured refuses the capture (:class:`Rebinding`):

* A tensor that is rebound, added or removed refuses a capture wherever it is reachable: in an
  attribute, a container, a helper object or a closure. So does a module.
* A number, or another plain value, refuses it where it is an attribute of a module itself
  (``self.count += 1``). In helper objects, containers and closures it is bookkeeping (a list of
  calls, the counter of a hook), and may change.

Opened are modules, dicts, lists, tuples, sets, plain objects and dataclasses, their ``__slots__``
too, closures of functions and what a ``functools.partial`` holds. Closed are objects of torch and
of Python's own libraries, and objects of C extensions; a guard compares those by identity.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import AddressChangedError, CaptureError, HostValueChangedError
from cgcompile.graphs.arena import address, storage_bytes
from cgcompile.graphs.capture import bulk_memory
from cgcompile.graphs.guards import (
    Cells,
    Change,
    Slots,
    Tensors,
    Transparent,
    is_librarys,
    is_plain_value,
    layout_text,
    named_arguments,
    restore,
    same_layout,
    same_memory,
    same_value,
)

_MAX_VALUES = 100_000  # a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_MAX_DEPTH = 16  # containers in containers, where two of them are compared
_MAX_BYTES = 1 << 20  # of an array of the host; larger ones are compared by identity
_TABLES = ("_parameters", "_buffers", "_modules")
_COMPARED = frozenset((*_TABLES, "training"))  # of what every module has
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type, torch.Size))
_CLOSED = (type, ModuleType, BuiltinFunctionType)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_MISSING = object()
_READ = itemgetter.__call__


class _Holder:
    """A container, or the attributes of an object, with what it held.

    Attributes:
        target: a dict, a list, ``Slots``, ``Cells``, ...
        skipped: names of fields that are not opened.
        of_module: whether these are attributes of a module itself.
    """

    __slots__ = ("_form", "_path", "keys", "of_module", "skipped", "target", "values")

    def __init__(
        self,
        path: str,
        form: str,
        target: Any,
        skipped: frozenset[str] = frozenset(),
        of_module: bool = False,
    ) -> None:
        self._path, self._form = path, form
        self.target, self.skipped, self.of_module = target, skipped, of_module
        self.keys, self.values = _contents(target)

    def name(self, key: Any) -> str:
        return self._path + self._form.format(getattr(key, "__name__", key))

    def is_same(self) -> bool:
        keys, values = _contents(self.target)
        if isinstance(self.target, (set, frozenset)):
            return bool(values == self.values)
        if compat.identities(values) != compat.identities(self.values):
            return False
        if isinstance(self.target, dict):  # whose keys may be tensors, which == compares by item
            return compat.identities(keys) == compat.identities(self.keys)
        return keys == self.keys

    def changes(self, alike: Callable[[Any, Any, bool], bool]) -> Iterator[Change]:
        before = dict(zip(self.keys, self.values, strict=True))
        now = dict(zip(*_contents(self.target), strict=True))
        for key in [*before, *(key for key in now if key not in before)]:
            one, other = before.get(key, _MISSING), now.get(key, _MISSING)
            if one is not other and not alike(one, other, self.of_module):
                yield Change(self.name(key), one, other)

    def exchanged(self) -> Iterator[Any]:
        """The values that it holds now or held before, but not both."""
        now = {id(value): value for value in _contents(self.target)[1]}
        before = {id(value): value for value in self.values}
        return ((before | now)[key] for key in before.keys() ^ now.keys())

    def has_new_tensors(self) -> bool:
        known = set(map(id, self.values))
        now = _contents(self.target)[1]
        return any(isinstance(value, torch.Tensor) and id(value) not in known for value in now)

    def restore(self) -> None:
        if isinstance(self.target, (dict, Slots, Cells)):
            restore(self.target, dict(zip(self.keys, self.values, strict=True)))
        else:
            items = self.values[0] if isinstance(self.target, set) else self.values
            restore(self.target, list(items))


def _contents(target: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The keys and the values of a holder."""
    if isinstance(target, dict):
        return tuple(dict.keys(target)), tuple(dict.values(target))
    if isinstance(target, (Slots, Cells)):
        fields: dict[Any, Any] = target.read()
        return tuple(fields), tuple(fields.values())
    if isinstance(target, (set, frozenset)):
        return ("items",), (frozenset(target),)
    values = tuple(target)
    return tuple(range(len(values))), values


@cache
def _names_of_modules() -> frozenset[str]:
    """What every module has, of which :data:`_TABLES` are opened by themselves."""
    return frozenset(torch.nn.Module().__dict__)


def _holders(value: Any, path: str) -> Iterator[_Holder]:
    """The holders of the fields of a value; none if it is compared as a whole."""
    is_module = isinstance(value, torch.nn.Module)
    if is_module:
        attributes = value.__dict__
        yield _Holder(path, ".{}", attributes, _names_of_modules(), True)
        for table in _TABLES:
            yield _Holder(path, ".{}", attributes.get(table, {}), of_module=True)
    if isinstance(value, FunctionType):
        yield _Holder(path, " closure {}", Cells(value))
        return
    if isinstance(value, partial):
        yield _Holder(path, "[{}]", (value.func, value.args, value.keywords))
        return
    if isinstance(value, _CONTAINERS):
        if len(value) < _LONG:
            yield _Holder(path, "[{!r}]", value)
    elif isinstance(value, _CLOSED) or _is_closed(value):
        return
    if not is_module and not isinstance(value, Transparent):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield _Holder(path, ".{}", attributes)
    slots = Slots(value)
    if slots.members:
        yield _Holder(path, ".{}", slots, of_module=is_module)


def _is_closed(value: Any) -> bool:
    """Whether an object is a part of torch, of Python or of cgcompile."""
    return is_librarys(value) or type(value).__module__.partition(".")[0] == "cgcompile"


def _behind(value: Any) -> Any:
    """What is read in place of a value: the owner of a method, what a wrapper wraps."""
    while isinstance(value, (MethodType, Transparent)):
        value = value.__self__ if isinstance(value, MethodType) else value.unwrap()
    return value


def _bytes(value: Any) -> bytes | None:
    """The contents of an array of the host, with its type and shape; None of anything else."""
    if not isinstance(value, (bytearray, array)) and type(value).__module__ != "numpy":
        return None
    try:
        view = memoryview(value)
        small = view.nbytes <= _MAX_BYTES
        return f"{view.format} {view.shape} ".encode() + view.tobytes() if small else None
    except (TypeError, ValueError, NotImplementedError):
        return None


class Fields:
    """A snapshot of the fields that are reachable from some roots.

    Args:
        roots: what is read, by the name that paths begin with.
        tensor_type: the device type of graphs; 0-dim CPU tensors beside it are numbers.

    Attributes:
        complete: whether all fields were read; False where there are too many.
    """

    def __init__(self, roots: Mapping[str, Any], tensor_type: str = "cpu") -> None:
        self._roots = dict(roots)
        self._tensor_type = tensor_type
        self.read()

    def read(self) -> None:
        """Take the fields as they are now."""
        self.complete = True
        self._holders: list[_Holder] = []
        self._arrays: list[tuple[str, Any, bytes]] = []
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        seen: set[int] = set()
        todo = list(self._roots.items())
        for path, value in todo:  # grows meanwhile
            value = _behind(value)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                tensors[id(value)] = (path, value)
                continue
            data = _bytes(value)
            if data is not None:
                self._arrays.append((path, value, data))
                continue
            for holder in _holders(value, path):
                self._holders.append(holder)
                skipped = holder.skipped
                todo += [
                    (holder.name(key), item)
                    for key, item in zip(holder.keys, holder.values, strict=True)
                    if type(item) not in _PLAIN and not (skipped and key in skipped)
                ]
            if len(todo) > _MAX_VALUES:
                self.complete = False
                break
        self._index()
        self._tensors = Tensors(tensors.values(), self._tensor_type)

    def _index(self) -> None:
        """Prepare :meth:`is_same`: plain dicts (modules have thousands) are read as one."""
        self._dicts: list[dict[str, Any]] = []
        self._full: list[dict[str, Any]] = []
        self._readers: list[itemgetter[Any]] = []
        self._others: list[_Holder] = []
        for holder in self._holders:
            target = holder.target
            if type(target) is dict and all(type(key) is str for key in holder.keys):
                skipped = holder.skipped - _COMPARED
                self._dicts.append(target)
                names = [key for key in holder.keys if key not in skipped]
                if names:  # the first twice: an itemgetter of one name returns no tuple
                    self._readers.append(itemgetter(names[0], *names))
                    self._full.append(target)
            elif not isinstance(target, (tuple, frozenset)):
                self._others.append(holder)
        self._sizes = [len(target) for target in self._dicts]
        self._identities = compat.identities(self._items() or ())

    def _items(self) -> tuple[Any, ...] | None:
        """The items of all plain dicts as they are now; None if one is missing."""
        try:
            return tuple(chain.from_iterable(map(_READ, self._readers, self._full)))
        except KeyError:
            return None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with memory that were reachable."""
        return self._tensors.tensors

    def is_same(self) -> bool:
        """Whether every field holds the same object, and every tensor is where it was."""
        if list(map(len, self._dicts)) != self._sizes:
            return False
        values = self._items()
        if values is None or compat.identities(values) != self._identities:
            return False
        if not all(holder.is_same() for holder in self._others):
            return False
        return self._tensors.at_same_addresses and not self._arrays and not self._tensors.numbers

    def follow(self) -> None:
        """Take the fields as they are now, where they differ."""
        if self.is_same():
            return
        changed = [holder for holder in self._holders if not holder.is_same()]
        exchanged = chain.from_iterable(holder.exchanged() for holder in changed)
        if not self._tensors.at_same_addresses or any(type(v) not in _PLAIN for v in exchanged):
            return self.read()
        for holder in changed:  # no other objects are reachable than before
            holder.keys, holder.values = _contents(holder.target)
        if changed:
            self._index()

    def changes(self, alike: Callable[[Any, Any, bool], bool]) -> Iterator[Change]:
        """The fields that hold other objects.

        Args:
            alike: whether a graph may take one value for another; and whether they are those of an
                attribute of a module.
        """
        for holder in self._holders:
            if not holder.is_same():
                yield from holder.changes(alike)

    def changes_in_place(self) -> Iterator[Change]:
        """The same objects, where they hold something else: tensors that moved, numbers, arrays."""
        yield from self._tensors.changes()
        for path, value, data in self._arrays:
            if _bytes(value) != data:
                yield Change(path, "other contents", f"an array of {type(value).__name__}")

    def put_back(self, tensors_alone: bool = False) -> None:
        """Restore every field; with ``tensors_alone``, where a holder has another tensor."""
        for holder in self._holders:
            if not holder.is_same() and not (tensors_alone and not holder.has_new_tensors()):
                holder.restore()


def _opens(value: Any) -> bool:
    """Whether a value is compared by what it holds."""
    if is_plain_value(value) or isinstance(value, (torch.Tensor, *_CONTAINERS)):
        return True
    if isinstance(value, (*_CLOSED, FunctionType, MethodType, partial)):
        return False
    return not _is_closed(value) and (hasattr(value, "__dict__") or bool(Slots(value).members))


def _alike(before: Any, after: Any, of_module: bool = False, depth: int = _MAX_DEPTH) -> bool:
    """Whether a graph that read one value may be replayed with the other."""
    if before is after:
        return True
    if type(before) is not type(after) or not depth:
        return False
    if isinstance(before, torch.Tensor):
        return same_memory(before, after)
    if is_plain_value(before):
        return same_value(after, before)
    if isinstance(before, frozenset):
        return bool(before == after)
    if isinstance(before, torch.nn.Module) or not _opens(before):
        return False
    pairs = [*zip(_holders(before, ""), _holders(after, ""), strict=True)]
    return bool(pairs) and all(
        one.keys == other.keys
        and all(
            _alike(a, b, of_module, depth - 1)
            for a, b in zip(one.values, other.values, strict=True)
        )
        for one, other in pairs
    )


def _repeats(before: Any, after: Any, of_module: bool) -> bool:
    """Whether a replay need not rebind a field, which the step did; see above for the rule."""
    if _is_plain(before) and _is_plain(after):
        missing = before is _MISSING or after is _MISSING
        return not of_module or (not missing and same_value(after, before))
    if any(isinstance(value, torch.nn.Module) for value in (before, after)):
        return False
    one, other = _tensors_in(before), _tensors_in(after)
    return len(one) == len(other) and all(map(same_memory, one, other))


def _is_plain(value: Any) -> bool:
    return value is _MISSING or is_plain_value(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that are reachable from a value."""
    return [] if _is_plain(value) else Fields({"": value}).tensors


class FieldsGuard:
    """The fields of the objects among the arguments of one captured call.

    Attributes:
        complete: whether there are few enough fields to compare.
    """

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self.complete = fields.complete

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor_type: str
    ) -> "FieldsGuard | None":
        """A guard for what the arguments hold; None where all are tensors and plain values."""
        roots = {
            top + path: leaf
            for top, tree in named_arguments(args, kwargs)
            for path, leaf in compat.tree_paths(tree)
            if not isinstance(leaf, torch.Tensor) and not is_plain_value(leaf)
        }
        return cls(Fields(roots, tensor_type)) if roots else None

    def check(self, what: str, batch: object) -> None:
        """Compare with the fields as they are. Does not synchronise.

        Raises:
            AddressChangedError: a field holds a tensor that is elsewhere.
            HostValueChangedError: a field holds another value.
        """
        fields = self._fields
        if fields.is_same():
            return
        change = next(chain(fields.changes(_alike), fields.changes_in_place()), None)
        if change is None:
            fields.read()  # equal values in new objects, which are compared from now on
            return
        path, before, after, moved = change
        if isinstance(before, torch.Tensor) and same_layout(after, before):
            before, after, moved = before.data_ptr(), after.data_ptr(), True
        if moved:
            raise AddressChangedError.moved_in_wrapper(
                what=what, batch=str(batch), path=path, now=after, before=before
            )
        now, was = _text(after), _text(before)
        raise HostValueChangedError.changed(
            what=what, batch=str(batch), path=path, now=now, before=was
        )


def _text(value: Any) -> str:
    return "missing" if value is _MISSING else layout_text(value)


class Rebinding:
    """Find what captured code rebinds; eager breaks may rebind fields, they run at each replay.

    ``SameStorages`` finds tensors whose memory it replaces. Within one bulk capture, what is
    reachable from ``runnable`` is read once, and compared after.
    """

    def __init__(self, runnable: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        unwrap = getattr(runnable, "unwrap", None)
        subject = _behind(unwrap() if callable(unwrap) else runnable)
        name = subject.__name__ if isinstance(subject, FunctionType) else "self"
        memory = bulk_memory()
        key = (Rebinding, id(subject))  # the fields hold the subject
        if key in memory:
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
        """Compare: captured code has run. What it may change is taken as it is now."""
        for fields in self._fields:
            if self._change is None and not fields.is_same():
                self._change = next(fields.changes(_repeats), None)
                if self._change is None:
                    fields.follow()

    def begin_segment(self) -> None:
        """Take the fields as they are now: what an eager break has changed is no matter."""
        for fields in self._fields:
            fields.follow()

    def error(self, what: str) -> CaptureError | None:
        """What to raise if captured code has rebound a field."""
        if self._change is None:
            return None
        path, before, after, _ = self._change
        return CaptureError.rebinds(what=what, field=path, before=_text(before), after=_text(after))

    def put_back(self, tensors_alone: bool = False) -> None:
        """Restore every field as it was before the segment; see :meth:`Fields.put_back`."""
        for fields in self._fields:
            fields.put_back(tensors_alone)

    def move_out(self, holds: Callable[[int], bool]) -> None:
        """Give the tensors that fields hold memory of their own, where a graph's is theirs.

        Args:
            holds: whether a storage that begins at an address is memory of graphs.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        self.begin_segment()
        for tensor in filter(compat.is_plain_tensor, self.tensors):
            start = address(tensor)
            if not start or not holds(start):
                continue
            if start not in storages:
                with torch.inference_mode(False), torch.no_grad():
                    memory = storage_bytes(tensor.untyped_storage())
                    storages[start] = memory.clone().untyped_storage()
            layout = tensor.storage_offset(), tensor.size(), tensor.stride()
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.set_(storages[start], *layout)
