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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import AddressChangedError, CaptureError, HostValueChangedError
from cgcompile.graphs.arena import address
from cgcompile.graphs.capture import bulk_memory
from cgcompile.graphs.guards import (
    Slots,
    Transparent,
    cells_of,
    is_librarys,
    is_plain_value,
    layout_text,
    restore,
    same_layout,
    same_value,
)

_MOST = 100_000  # values; a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_DEEPEST = 16  # containers in containers, where two of them are compared
_BYTES = 1 << 20  # of an array of the host; larger ones are compared by identity
_TABLES = ("_parameters", "_buffers", "_modules")
_COMPARED = frozenset((*_TABLES, "training"))  # of what every module has
_READ = itemgetter.__call__
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), type, torch.Size))
_CLOSED = (type, ModuleType, BuiltinFunctionType)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_MISSING = object()


class Change(NamedTuple):
    """A field that differs.

    Attributes:
        path: of the field.
        before: what it held, or :data:`_MISSING`.
        after: what it holds, likewise.
        moved: whether these are the addresses of one tensor object.
    """

    path: str
    before: Any
    after: Any
    moved: bool = False


class _Holder(NamedTuple):
    """A place with fields.

    Attributes:
        path: of the object that has them.
        form: how the name of a field is appended to the path.
        target: a dict, a list, ``Slots``, a tuple of cells, ...
        skipped: names of fields that are not opened.
        of_module: whether these are attributes of a module itself.
    """

    path: str
    form: str
    target: Any
    skipped: frozenset[str] = frozenset()
    of_module: bool = False

    def name(self, key: Any) -> str:
        return self.path + self.form.format(getattr(key, "__name__", key))


class _Cells:
    """The variables that a function has from around it."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self.cells = cells


def _slots(value: Any) -> Slots | None:
    """The attributes of an object that are in its ``__slots__``; None if it has none there."""
    slots = Slots(value)
    return slots if slots.members else None


def _contents(target: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The keys and the values of a holder."""
    if isinstance(target, dict):
        return tuple(dict.keys(target)), tuple(dict.values(target))
    if isinstance(target, Slots):
        found = target.read()
        return tuple(found), tuple(found.values())
    if isinstance(target, _Cells):
        return tuple(target.cells), tuple([each.cell_contents for each in target.cells.values()])
    if isinstance(target, (set, frozenset)):
        return ("items",), (frozenset(target),)
    values = tuple(target)
    return tuple(range(len(values))), values


def _base_of_modules() -> frozenset[str]:
    """What every module has, of which :data:`_TABLES` are opened by themselves."""
    return frozenset(torch.nn.Module().__dict__)


def _holders(value: Any, path: str, base: frozenset[str]) -> Iterator[_Holder]:
    """Where a value has fields; nothing of one that is compared as a whole."""
    is_module = isinstance(value, torch.nn.Module)
    if is_module:
        attributes = value.__dict__
        yield _Holder(path, ".{}", attributes, base, True)
        for table in _TABLES:
            yield _Holder(path, ".{}", attributes.get(table, {}), of_module=True)
    if isinstance(value, FunctionType):
        yield _Holder(path, " closure {}", _Cells(cells_of(value)))
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
    slots = _slots(value)
    if slots is not None:
        yield _Holder(path, ".{}", slots, of_module=is_module)


def _is_closed(value: Any) -> bool:
    """Whether an object is a part of torch, of Python or of cgcompile."""
    return is_librarys(value) or type(value).__module__.partition(".")[0] == "cgcompile"


def _behind(value: Any) -> Any:
    """What is read in place of a value: the owner of a method, what a wrapper wraps."""
    while True:
        if isinstance(value, MethodType):
            value = value.__self__
        elif isinstance(value, Transparent):
            value = value.unwrap()
        else:
            return value


def _bytes(value: Any) -> bytes | None:
    """The contents of an array of the host, with its type and shape; None of anything else."""
    if not isinstance(value, (bytearray, array)) and type(value).__module__ != "numpy":
        return None
    try:
        view = memoryview(value)
        small = view.nbytes <= _BYTES
        return f"{view.format} {view.shape} ".encode() + view.tobytes() if small else None
    except (TypeError, ValueError, NotImplementedError):
        return None


class Fields:
    """A picture of the fields that are reachable from some roots.

    Args:
        roots: what is read, by the name that paths begin with.
        tensor_type: the device type of graphs; 0-dim CPU tensors beside it are numbers.

    Attributes:
        complete: whether all fields were read; False where there are too many.
    """

    def __init__(self, roots: Mapping[str, Any], tensor_type: str = "cpu") -> None:
        self._roots = dict(roots)
        self._tensor_type = tensor_type
        self._base = _base_of_modules()
        self.read()

    def read(self) -> None:
        """Take the fields as they are now."""
        self.complete = True
        self._holders: list[tuple[_Holder, tuple[Any, ...], tuple[Any, ...]]] = []
        self._arrays: list[tuple[str, Any, bytes]] = []
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        seen: set[int] = set()
        todo = [(path, root) for path, root in self._roots.items()]
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
            for holder in _holders(value, path, self._base):
                keys, values = _contents(holder.target)
                self._holders.append((holder, keys, values))
                skipped = holder.skipped
                todo += [
                    (holder.name(key), each)
                    for key, each in zip(keys, values, strict=True)
                    if type(each) not in _PLAIN and not (skipped and key in skipped)
                ]
            if len(todo) > _MOST:
                self.complete = False
                break
        self._index()
        self._keep(list(tensors.values()))

    def _index(self) -> None:
        """Prepare :meth:`is_same`: plain dicts (modules have thousands) are read as one."""
        self._dicts: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._full: list[dict[str, Any]] = []
        self._read: list[itemgetter[Any]] = []
        self._others: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        expected: list[Any] = []
        for holder, keys, values in self._holders:
            target = holder.target
            if type(target) is dict and all(type(key) is str for key in keys):
                names = [key for key in keys if key not in holder.skipped or key in _COMPARED]
                self._dicts.append(target)
                self._sizes.append(len(keys))
                if names:
                    names.append(names[0])  # an itemgetter of one name returns no tuple
                    self._read.append(itemgetter(*names))
                    self._full.append(target)
                    expected += self._read[-1](dict(zip(keys, values, strict=True)))
            elif not isinstance(target, (tuple, frozenset)):
                self._others.append((target, keys, values))
        self._values = compat.identities(tuple(expected))

    def _keep(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Remember where tensors are, and the numbers in those that are numbers."""
        with_memory = [pair for pair in tensors if _has_address(pair[1])]
        self._paths = [path for path, _ in with_memory]
        self._tensors = [tensor for _, tensor in with_memory]
        self._starts = [tensor.data_ptr() for tensor in self._tensors]
        self._addresses = compat.Addresses(self._tensors, range(len(self._tensors)))
        self._numbers = []
        if self._tensor_type != "cpu":
            self._numbers = [
                (path, tensor, tensor.item())
                for path, tensor in with_memory
                if tensor.dim() == 0 and tensor.device.type == "cpu"
            ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with memory that were reachable."""
        return self._tensors

    def is_same(self) -> bool:
        """Whether every field holds the same object, and every tensor is where it was."""
        if list(map(len, self._dicts)) != self._sizes:
            return False
        try:
            values = tuple(chain.from_iterable(map(_READ, self._read, self._full)))
        except KeyError:
            return False
        if compat.identities(values) != self._values:
            return False
        if not all(_holds(*each) for each in self._others):
            return False
        return self._addresses.hold(self._tensors) and not self._arrays and not self._numbers

    def follow(self) -> None:
        """Take the fields as they are now, where they differ."""
        if self.is_same():
            return
        for place, (holder, keys, values) in enumerate(self._holders):
            if not _holds(holder.target, keys, values):
                now, new = _contents(holder.target)
                if not all(type(each) in _PLAIN for each in _difference(values, new)):
                    break
                self._holders[place] = (holder, now, new)
        else:
            if self._addresses.hold(self._tensors):
                self._index()  # no other objects are reachable than before
                return
        self.read()

    def changes(self, alike: Callable[[Any, Any, bool], bool]) -> Iterator[Change]:
        """The fields that hold other objects.

        Args:
            alike: whether a graph may take one value for another; and whether they are those of an
                attribute of a module.
        """
        for holder, keys, values in self._holders:
            if _holds(holder.target, keys, values):
                continue
            was = dict(zip(keys, values, strict=True))
            present = dict(zip(*_contents(holder.target), strict=True))
            for key in [*was, *(key for key in present if key not in was)]:
                before, after = was.get(key, _MISSING), present.get(key, _MISSING)
                if before is not after and not alike(before, after, holder.of_module):
                    yield Change(holder.name(key), before, after)

    def changes_in_place(self) -> Iterator[Change]:
        """The same objects, where they hold something else: tensors that moved, numbers, arrays."""
        for path, tensor, start in zip(self._paths, self._tensors, self._starts, strict=True):
            if tensor.data_ptr() != start:
                yield Change(path, start, tensor.data_ptr(), moved=True)
        for path, tensor, number in self._numbers:
            if not same_value(tensor.item(), number):
                yield Change(path, number, tensor.item())
        for path, value, data in self._arrays:
            if _bytes(value) != data:
                yield Change(path, "other contents", f"an array of {type(value).__name__}")

    def put_back(self, tensors_alone: bool = False) -> None:
        """Make every field what it was.

        Args:
            tensors_alone: only where a field holds another tensor.
        """
        for holder, keys, values in self._holders:
            target = holder.target
            if _holds(target, keys, values):
                continue
            if tensors_alone and not _brings_tensors(values, _contents(target)[1]):
                continue
            if isinstance(target, _Cells):
                for cell, value in zip(target.cells.values(), values, strict=True):
                    cell.cell_contents = value
            elif isinstance(target, set):
                restore(target, list(values[0]))
            elif isinstance(target, (dict, Slots)):
                restore(target, dict(zip(keys, values, strict=True)))
            else:
                restore(target, list(values))


def _holds(target: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    """Whether a holder has these objects, by these keys."""
    now, new = _contents(target)
    if isinstance(target, (set, frozenset)):
        return bool(new == values)
    if compat.identities(new) != compat.identities(values):
        return False
    if isinstance(target, dict):  # whose keys may be tensors, which == compares by item
        return compat.identities(now) == compat.identities(keys)
    return now == keys


def _difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[Any]:
    """The objects that are in one of two tuples alone."""
    was, now = {id(each): each for each in before}, {id(each): each for each in after}
    return [(was | now)[key] for key in was.keys() ^ now.keys()]


def _brings_tensors(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    known = set(map(id, before))
    return any(isinstance(each, torch.Tensor) and id(each) not in known for each in after)


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # sparse, fake, a subclass without memory of its own
        return False
    return True


def _opens(value: Any) -> bool:
    """Whether a value is compared by what it holds."""
    if value is None or is_plain_value(value) or isinstance(value, (torch.Tensor, *_CONTAINERS)):
        return True
    if isinstance(value, (*_CLOSED, FunctionType, MethodType, partial)):
        return False
    return not _is_closed(value) and (hasattr(value, "__dict__") or _slots(value) is not None)


def _alike(before: Any, after: Any, of_module: bool = False, depth: int = _DEEPEST) -> bool:
    """Whether a graph that read one value may be replayed with the other."""
    if before is after:
        return True
    if type(before) is not type(after) or not depth:
        return False
    if isinstance(before, torch.Tensor):
        return _same_place(before, after)
    if is_plain_value(before):
        return same_value(after, before)
    if isinstance(before, frozenset):
        return bool(before == after)
    if isinstance(before, torch.nn.Module) or not _opens(before):
        return False
    base: frozenset[str] = frozenset()
    pairs = zip(_holders(before, "", base), _holders(after, "", base), strict=True)
    contents = [(_contents(one.target), _contents(other.target)) for one, other in pairs]
    return bool(contents) and all(
        one[0] == other[0]
        and all(_alike(a, b, of_module, depth - 1) for a, b in zip(one[1], other[1], strict=True))
        for one, other in contents
    )


def _same_place(before: torch.Tensor, after: torch.Tensor) -> bool:
    same = _has_address(before) and _has_address(after)
    return same and same_layout(after, before) and after.data_ptr() == before.data_ptr()


def _repeats(before: Any, after: Any, of_module: bool) -> bool:
    """Whether a replay need not rebind a field, which the step did; see above for the rule."""
    if _is_plain(before) and _is_plain(after):
        missing = before is _MISSING or after is _MISSING
        return not of_module or (not missing and same_value(after, before))
    if any(isinstance(each, torch.nn.Module) for each in (before, after)):
        return False
    was, now = _tensors_in(before), _tensors_in(after)
    return len(was) == len(now) and all(map(_same_place, was, now))


def _is_plain(value: Any) -> bool:
    return value is None or value is _MISSING or is_plain_value(value)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that are reachable from a value."""
    if _is_plain(value):
        return []
    return Fields({"": value}).tensors


class FieldsGuard:
    """The fields of the objects among the arguments of one captured call.

    Args:
        args: of the call.
        kwargs: of the call.
        tensor_type: the device type of the graph.

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
        roots = objects_in(args, kwargs)
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
        now, was = (value_text(each) for each in (after, before))
        raise HostValueChangedError.changed(
            what=what, batch=str(batch), path=path, now=now, before=was
        )


def objects_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, and what is in containers among them, that have fields; by path."""
    roots: dict[str, Any] = {}
    named = [(f"input {place}", each) for place, each in enumerate(args)]
    named += [(f"input {name!r}", each) for name, each in kwargs.items()]
    for top, tree in named:
        for path, leaf in compat.tree_paths(tree):
            if not isinstance(leaf, torch.Tensor) and not is_plain_value(leaf):
                roots[top + path] = leaf
    return roots


def value_text(value: Any) -> str:
    """A value as messages show it."""
    return "missing" if value is _MISSING else layout_text(value)


class Rebinding:
    """Finds what captured code rebinds. Fields that eager breaks rebind are no matter.

    That it replaces the memory of a tensor is found by ``SameStorages``. Within one bulk capture,
    what is reachable from ``runnable`` is read once, and compared after.

    Args:
        runnable: what is captured.
        args: of the call.
        kwargs: of the call.
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
        self._fields: list[Fields] = [memory[key], Fields(_all_in(args, kwargs))]
        self._change: Change | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are reachable."""
        return [tensor for fields in self._fields for tensor in fields.tensors]

    def end_segment(self) -> None:
        """Captured code has run: compare."""
        for fields in self._fields:
            if self._change is None and not fields.is_same():
                self._change = next(fields.changes(_repeats), None)

    def error(self, what: str) -> CaptureError | None:
        """What to raise if captured code has rebound a field."""
        if self._change is None:
            return None
        path, before, after, _ = self._change
        return CaptureError.rebinds(
            what=what, field=path, before=value_text(before), after=value_text(after)
        )

    def begin_segment(self) -> None:
        """Captured code will run: what eager breaks have changed is no matter."""
        for fields in self._fields:
            fields.follow()

    def put_back(self, tensors_alone: bool = False) -> None:
        """Make every field what it was before the segment; see :meth:`Fields.put_back`."""
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
                storages[start] = _copy(tensor.untyped_storage())
            layout = tensor.storage_offset(), tensor.size(), tensor.stride()
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.set_(storages[start], *layout)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole.clone().untyped_storage()


def _all_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments that can hold something, by the names that paths begin with."""
    named = [(f"input {place}", each) for place, each in enumerate(args)]
    named += [(f"input {name!r}", each) for name, each in kwargs.items()]
    return {name: each for name, each in named if type(each) not in _PLAIN}
