"""The Python state that a call reaches, read cheaply: :class:`Fields`, and its two users.

A graph repeats what Python read at capture, and no replay rebinds anything. So the fields of
objects among the arguments are compared before each replay (:class:`FieldsGuard`), and what a step
rebinds while it is captured refuses the capture (:class:`Rebinding`).

Opened are modules, dicts, lists, tuples, sets, plain objects and dataclasses, their ``__slots__``
too, closures of functions and what a ``functools.partial`` holds. Closed are objects of torch and
of Python's own libraries, objects of C extensions, and those whose class says
``compares_fields = True`` (by itself, that is): they are compared by identity.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.errors import AddressChangedError, CaptureError, HostValueChangedError
from cgcompile.graphs.arena import address
from cgcompile.graphs.guards import is_plain_value, layout_text, same_layout, same_value
from cgcompile.graphs.state import Moved, Slots, cells_of, is_librarys, restore
from cgcompile.graphs.transparent import Transparent

_MOST = 100_000  # values; a model of thousands of modules has fewer
_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_DEEPEST = 16  # containers in containers, where two of them are compared
_BYTES = 1 << 20  # of an array of the host; larger ones are compared by identity
_TABLES = ("_parameters", "_buffers", "_modules")
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
    """

    path: str
    form: str
    target: Any
    skipped: frozenset[str] = frozenset()

    def name(self, key: Any) -> str:
        return self.path + self.form.format(getattr(key, "__name__", key))


class _Cells:
    """The variables that a function has from around it."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self.cells = cells


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
    own = getattr(type(value), "compares_fields", False) is True
    if isinstance(value, torch.nn.Module):
        if not own:
            yield _Holder(path, ".{}", value.__dict__, base)
        for table in _TABLES:
            yield _Holder(path, ".{}", value.__dict__.get(table, {}))
        return
    if own:
        return
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
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, Transparent):
        yield _Holder(path, ".{}", attributes)
    slots = Slots(value)
    if slots.members:
        yield _Holder(path, ".{}", slots)


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
        restores: whether :meth:`put_back` will be called; costs 2 us a tensor.

    Attributes:
        complete: whether all fields were read; False where there are too many.
    """

    def __init__(
        self, roots: Mapping[str, Any], tensor_type: str = "cpu", restores: bool = False
    ) -> None:
        self._roots = dict(roots)
        self._tensor_type = tensor_type
        self._restores = restores
        self._base = _base_of_modules()
        self.read()

    def read(self) -> None:
        """Take the fields as they are now."""
        self.complete = True
        self._holders: list[tuple[_Holder, tuple[Any, ...], tuple[Any, ...], bytes]] = []
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
                self._holders.append((holder, keys, values, compat.identities(values)))
                skipped = holder.skipped
                todo += [
                    (holder.name(key), each)
                    for key, each in zip(keys, values, strict=True)
                    if type(each) not in _PLAIN and not (skipped and key in skipped)
                ]
            if len(todo) > _MOST:
                self.complete = False
                break
        self._keep(list(tensors.values()))

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
        self._moved: list[Moved] = []
        if self._restores:
            with compat.outside_inference_mode(), torch.no_grad():
                plain = filter(compat.is_plain_tensor, self._tensors)
                self._moved = [Moved.of(tensor) for tensor in plain]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with memory that were reachable."""
        return self._tensors

    def is_same(self) -> bool:
        """Whether every field holds the same object, and every tensor is where it was."""
        for holder, keys, _, known in self._holders:
            now, values = _contents(holder.target)
            if compat.identities(values) != known or now != keys:
                return False
        if not self._addresses.hold(self._tensors):
            return False
        return not self._arrays and not self._numbers

    def change(self, strict: bool) -> Change | None:
        """The first field that differs; None where fields were replaced by equal ones at most.

        Args:
            strict: closed objects must be the same ones.
        """
        return next(self._changes(strict), None)

    def _changes(self, strict: bool) -> Iterator[Change]:
        for holder, keys, values, _ in self._holders:
            now, new = _contents(holder.target)
            if now == keys and all(map(_is, values, new)):
                continue
            was, present = dict(zip(keys, values, strict=True)), dict(zip(now, new, strict=True))
            for key in [*was, *(key for key in present if key not in was)]:
                before, after = was.get(key, _MISSING), present.get(key, _MISSING)
                if not _alike(before, after, strict, self._base):
                    yield Change(holder.name(key), before, after)
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
        """Make every field, and the memory of every tensor object, what it was.

        Args:
            tensors_alone: only where a field holds another tensor.
        """
        for holder, keys, values, _ in self._holders:
            target = holder.target
            if tensors_alone and not _brings_tensors(values, _contents(target)[1]):
                continue
            if isinstance(target, _Cells):
                for cell, value in zip(target.cells.values(), values, strict=True):
                    cell.cell_contents = value
            elif isinstance(target, set):
                restore(target, list(values[0]) if target != values[0] else list(target))
            elif isinstance(target, (dict, Slots)):
                restore(target, dict(zip(keys, values, strict=True)))
            else:
                restore(target, list(values))
        for tensor in self._moved:
            tensor.put_back()


def _is(before: Any, after: Any) -> bool:
    return before is after


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
    if getattr(type(value), "compares_fields", False) is True:
        return False
    if value is None or is_plain_value(value) or isinstance(value, (torch.Tensor, *_CONTAINERS)):
        return True
    if isinstance(value, (*_CLOSED, FunctionType, MethodType, partial)):
        return False
    return not _is_closed(value) and (hasattr(value, "__dict__") or bool(Slots(value).members))


def _alike(
    before: Any, after: Any, strict: bool, base: frozenset[str], depth: int = _DEEPEST
) -> bool:
    """Whether a graph may take one value for the other."""
    if before is after:
        return True
    if not strict and any(each is not _MISSING and not _opens(each) for each in (before, after)):
        return True  # a stream or a lock that the first step makes
    if type(before) is not type(after) or not depth:
        return False
    if isinstance(before, torch.Tensor):
        same = _has_address(before) and _has_address(after)
        return same and same_layout(after, before) and after.data_ptr() == before.data_ptr()
    if is_plain_value(before):
        return same_value(after, before)
    if isinstance(before, frozenset):
        return bool(before == after)
    if isinstance(before, torch.nn.Module) or not _opens(before):
        return False
    pairs = zip(_holders(before, "", base), _holders(after, "", base), strict=True)
    contents = [(_contents(one.target), _contents(other.target)) for one, other in pairs]
    return bool(contents) and all(
        one[0] == other[0]
        and all(
            _alike(a, b, strict, base, depth - 1) for a, b in zip(one[1], other[1], strict=True)
        )
        for one, other in contents
    )


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
        change = fields.change(strict=True)
        if change is None:
            fields.read()  # equal values in new objects, which are compared from now on
            return
        path, before, after, moved = change
        if isinstance(before, torch.Tensor) and same_layout(after, before):
            before, after, moved = before.data_ptr(), after.data_ptr(), True
        if moved:
            raise AddressChangedError.moved_in_wrapper(what, str(batch), path, after, before)
        now, was = (value_text(each) for each in (after, before))
        raise HostValueChangedError.changed(what, str(batch), path, now, was)


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
    """Finds fields that captured code rebinds. Fields that eager breaks rebind are no matter.

    Args:
        runnable: what is captured.
        args: of the call.
        kwargs: of the call.
    """

    def __init__(self, runnable: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        unwrap = getattr(runnable, "unwrap", None)
        subject = _behind(unwrap() if callable(unwrap) else runnable)
        name = subject.__name__ if isinstance(subject, FunctionType) else "self"
        self._fields = Fields({name: subject, **_all_in(args, kwargs)}, restores=True)
        self._found: Change | None = None

    def end_segment(self) -> None:
        """Captured code has run: compare."""
        if self._found is None and not self._fields.is_same():
            self._found = self._fields.change(strict=False)

    def error(self, what: str) -> CaptureError | None:
        """What to raise if captured code has rebound a field."""
        if self._found is None:
            return None
        path, before, after, moved = self._found
        was, now = (f"at {each:#x}" if moved else value_text(each) for each in (before, after))
        return CaptureError.rebinds(what, path, was, now)

    def begin_segment(self) -> None:
        """Captured code will run: what eager breaks have changed is no matter."""
        if not self._fields.is_same():
            self._fields.read()

    def put_back(self, tensors_alone: bool = False) -> None:
        """Make every field what it was before the segment; see :meth:`Fields.put_back`."""
        self._fields.put_back(tensors_alone)

    def move_out(self, holds: Callable[[int], bool]) -> None:
        """Give the tensors that fields hold memory of their own, where a graph's is theirs.

        Args:
            holds: whether a storage that begins at an address is memory of graphs.
        """
        self._fields.read()
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in filter(compat.is_plain_tensor, self._fields.tensors):
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
