"""What a capture read from Python: the one walker of objects.

A graph repeats what Python read while it was captured, so guards, snapshots and tools look at the
same objects in the same way: attributes, ``__slots__``, closures and containers are opened here.
Objects of torch and of Python's own libraries are closed.
"""

import dataclasses
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dis import Instruction, get_instructions
from functools import lru_cache, partial
from itertools import chain
from keyword import iskeyword
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from cgcompile.errors import missing_attribute
from cgcompile.graphs.contract import Contract, Kind, Read, Reads, is_plain_value
from cgcompile.torch_compat import raw_memory

log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "logging", "threading", "re", "weakref", "_thread", "functools")

# -------------------------------------------------------------- attributes and items of objects


def slots_of(kind: type) -> tuple[MemberDescriptorType, ...]:
    """Return the slots of a class; of one name there may be several, each with its own value."""
    return tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, MemberDescriptorType)
    )


class Slots:
    """The attributes of an object that are in no ``__dict__``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.members = slots_of(type(owner))

    def read(self) -> dict[MemberDescriptorType, Any]:
        values = {}
        for member in self.members:
            with suppress(AttributeError):  # the slot is empty
                values[member] = member.__get__(self._owner)
        return values

    def restore(self, before: dict[MemberDescriptorType, Any]) -> None:
        for member in self.read().keys() - before.keys():
            member.__delete__(self._owner)
        for member, value in before.items():
            member.__set__(self._owner, value)  # that of a frozen object too


class Cells:
    """The bound variables that a function has from around it."""

    def __init__(self, function: Any) -> None:
        self._cells = cells_of(function)

    def read(self) -> dict[str, Any]:
        return {name: cell.cell_contents for name, cell in self._cells.items()}

    def restore(self, before: dict[str, Any]) -> None:
        for name, value in before.items():
            self._cells[name].cell_contents = value


def is_librarys(value: Any) -> bool:
    """Return whether an object is a part of torch or of Python, which is not opened."""
    if isinstance(value, torch.nn.Module):
        return False
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def cells_of(function: Any) -> dict[str, CellType]:
    """Return the bound cells of the variables that a function has from around it."""
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
    """Return the builtin type of a container, whose methods no subclass changes."""
    kinds = (OrderedDict, dict, list, deque, set, frozenset, tuple)  # the first has its own order
    return next(kind for kind in kinds if isinstance(container, kind))


def restore(holder: Any, before: Any) -> None:
    """Restore the contents of a container, a cell or a set of attributes, if they differ."""
    if isinstance(holder, (Slots, Cells)):
        holder.restore(before)
    elif isinstance(holder, CellType):
        holder.cell_contents = before
    elif isinstance(holder, dict):
        kind = plainly(holder)
        if _differ(chain(*kind.items(holder)), chain(*before.items())):
            kind.clear(holder)
            for key, value in before.items():
                kind.__setitem__(holder, key, value)
    elif isinstance(holder, (list, deque, set)):
        kind = plainly(holder)
        if _differ(kind.__iter__(holder), before):
            kind.clear(holder)
            put: Any = kind.update if kind is set else kind.extend
            put(holder, before)


def _differ(now: Iterable[Any], before: Iterable[Any]) -> bool:
    one, other = tuple(now), tuple(before)
    return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))


# -------------------------------------------------------------- modules of a runnable

_HOLD_NOTHING = frozenset((str, bytes, int, float, bool, type(None), type, torch.Tensor))


def modules_of(model: Any) -> list[torch.nn.Module]:
    """Return the model, if it is a module; else the modules that it or its attributes hold."""
    # Of globals those alone that a function names: an engine has the weights of all models.
    if isinstance(model, torch.nn.Module):
        return [model]
    modules: dict[int, torch.nn.Module] = {}  # a tower may be its own forward
    seen = {id(model)}
    todo = deque(_held(model) or _attributes(model))
    while todo:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules[id(value)] = value
        else:  # a tokenizer among them has words by the hundred thousand
            todo += [item for item in _held(value) if type(item) not in _HOLD_NOTHING]
    return list(modules.values())


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, MethodType):
        owner = value.__self__
        attributes = () if isinstance(owner, torch.nn.Module) else _attributes(owner)
        return (owner, value.__func__, *attributes)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*Cells(value).read().values(), *defaults, *_named_globals(value))
    return _attributes(value) if callable(value) else ()


def _named_globals(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that the code names: modules, containers, functions of the same file."""
    scope = function.__globals__
    if scope.get("__name__", "").partition(".")[0] in _LIBRARIES:
        return
    codes = [function.__code__]
    for code in codes:  # grows meanwhile, by inner functions
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        for name in code.co_names:  # of attributes too, which alone are no reason
            value = scope.get(name)
            own = isinstance(value, FunctionType) and value.__globals__ is scope
            holds = own or isinstance(value, (torch.nn.Module, Mapping, list, tuple))
            if holds and any(_loads(instruction, name) for instruction in get_instructions(code)):
                yield value


def _loads(instruction: Instruction, name: str) -> bool:
    return instruction.opname == "LOAD_GLOBAL" and instruction.argval == name


def _attributes(value: Any) -> Iterable[Any]:
    if isinstance(value, type):
        return ()
    return (*getattr(value, "__dict__", {}).values(), *Slots(value).read().values())


# -------------------------------------------------------------- the forward context

_DEPTH = 9  # objects in objects
_MOST = 100_000  # lines of generated text, and rows
_FIELDS = ("attn_metadata", "slot_mapping", "additional")
CONTAINERS = (tuple, list, dict, set, frozenset, deque)
NO_KEY: Any = object()
# Weights are compared elsewhere.
_OPAQUE = (type, torch.nn.Module, ModuleType)
_MAX_BYTES = 1 << 20  # of an array of the host; larger ones are compared by identity


def metadata_of(context: Any) -> list[Any]:
    """Return what ops may read of a forward context."""
    return [getattr(context, name) for name in _FIELDS]


def read_context(context: Any, tensor_type: str, loads: Callable[[str], bool]) -> Contract:
    """Return the contract ``holds(context)`` of a forward context.

    Args:
        context: of the capture.
        tensor_type: the device type of graphs, whose tensors are compared.
        loads: whether captured code loads an attribute or key, so that a number there is compared.
    """
    reader = Reader(tensor_type, loads)
    for name, value in zip(_FIELDS, metadata_of(context), strict=True):
        at = f"context.{name}"
        reader.visit(value, name, at, at, _DEPTH, loads(name))
    if reader.unreached:
        log.info("metadata: %d objects are too deep to be compared", reader.unreached)
    return Contract("context", reader.reads, "metadata")


class Reader:
    """Collects what a step may read of metadata: tensors, and what captured code loads."""

    _exact = False  # a capture may run without metadata

    def __init__(self, tensor_type: str, loads: Callable[[str], bool]) -> None:
        self._tensor_type, self._loads = tensor_type, loads
        self.reads = Reads()
        self.unreached = 0
        # By identity: path, expression and variable of an object in its first place, and the rows
        # of what is in it; None: nothing to compare in it.
        self._opened: dict[int, tuple[str, str, str, list[Read]] | None] = {}
        self._alive: list[Any] = []  # the same objects

    def visit(
        self, value: Any, path: str, expression: str, local: str, depth: int, loaded: bool = True
    ) -> None:
        """Add what can be read of a value; ``local`` is its expression in generated lines."""
        if not depth or max(len(self.reads.lines), len(self.reads.rows)) > _MOST:
            self.unreached += 1
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path, expression, local)
            attributes = {} if raw_memory.is_wrapper(value) else getattr(value, "__dict__", {})
            for name, item in attributes.items():
                if name.isidentifier() and not name.startswith("_"):  # others are those of torch
                    step, read = f".{name}", self._loads(name)
                    self.visit(item, path + step, expression + step, local + step, depth - 1, read)
        elif is_plain_value(value):
            if loaded and (value is not None or self._exact):
                self.reads.value(path, expression, value, local)
        else:
            self._object(value, path, expression, local, depth, loaded)

    def _object(
        self, value: Any, path: str, expression: str, local: str, depth: int, loaded: bool
    ) -> None:
        if not isinstance(value, _OPAQUE):
            self._open(value, path, expression, local, depth, loaded)

    def _tensor(self, tensor: torch.Tensor, path: str, expression: str, local: str) -> None:
        if tensor.device.type != self._tensor_type:
            return
        if raw_memory.is_plain_tensor(tensor):
            self.reads.tensor(path, expression, tensor, local)
        elif raw_memory.is_wrapper(tensor):
            with suppress(raw_memory.CannotUnwrap):
                self.reads.wrapper(path, expression, tensor, local)

    def _open(
        self, value: Any, path: str, expression: str, local: str, depth: int, loaded: bool
    ) -> None:
        if id(value) in self._opened and type(value) is not tuple:  # layers often share one object
            self._share(value, path, expression, local)
            return
        self._alive.append(value)
        reads, line, first = self.reads, len(self.reads.lines), len(self.reads.rows)
        variable = f"v{line}"
        self._opened[id(value)] = path, expression, variable, []  # they hold each other
        reads.lines.append(f"{variable} = {local}")
        last = self._begin(value, path, expression, variable, loaded)
        for step, access, key, item in _items(value):
            before, names = len(reads.lines), len(reads.names)
            read = self._is_loaded(step, key, loaded)
            text = access if key is NO_KEY else access.format(reads.bound("key", key))
            self.visit(item, path + step, expression + text, variable + text, depth - 1, read)
            if len(reads.lines) == before and len(reads.names) > names:
                reads.names.popitem()  # the key, which must not be kept alive
        kind: Any = type(value)  # mypy takes it for unhashable
        of_class = () if self._exact else _values_of_class(kind)
        own = getattr(value, "__dict__", ())
        for name in [name for name in of_class if name not in own and self._loads(name)]:
            step = f".{name}"
            self.visit(getattr(value, name), path + step, expression + step, variable + step, depth)
        if isinstance(value, (set, frozenset)):
            self._members(value, path, expression, variable, depth)
        reads.rows += last
        if len(reads.lines) == line + 1:  # nothing to compare in it
            reads.lines.pop()
            self._opened[id(value)] = None
            return
        if isinstance(value, FunctionType):
            reads.identity(path, f"{expression}.__code__", value.__code__, f"{variable}.__code__")
        self._opened[id(value)] = path, expression, variable, reads.rows[first:]

    def _share(self, value: Any, path: str, expression: str, local: str) -> None:
        """Compare an object in a second place: by identity; if it is another one, by its rows."""
        known = self._opened[id(value)]
        if known is None:
            return
        first, before, variable, rows = known
        self.reads.unless(f"{local} is not {variable}")
        if not rows:  # it is inside of itself
            same = f"{expression} is {before}"
            self.reads.rows.append(Read(f"{path} is {first}", same, Kind.VALUE, True))
        for row in rows:
            at, read = row.path.replace(first, path, 1), row.expression
            self.reads.rows.append(
                row._replace(path=at, expression=read.replace(before, expression, 1))
            )

    def _is_loaded(self, step: str, key: Any, loaded: bool) -> bool:
        """Return whether code may load an item of an object that it may load itself."""
        if key is not NO_KEY and not is_plain_value(key):
            return False  # it is not kept alive for a number
        name = step.removeprefix(".").removeprefix(" closure ") if key is NO_KEY else key
        is_name = isinstance(name, str) and name.isidentifier()
        return self._loads(name) if is_name else loaded

    def _begin(
        self, value: Any, path: str, expression: str, variable: str, loaded: bool
    ) -> list[Read]:
        """Compare what an object is; return rows to be added after those of what is in it."""
        data = array_bytes(value) if loaded else None
        if data is not None:
            contents = self.reads.bound("bytes", array_bytes)
            now = f"{contents}({variable})"
            self.reads.value(f"the bytes of {path}", f"{contents}({expression})", data, now)
        keys = value if isinstance(value, (dict, set, frozenset)) else ()
        if not loaded or not all(map(is_plain_value, keys)):
            return []  # a key is not kept alive
        if isinstance(value, (set, frozenset)):
            self.reads.members(path, expression, value, variable)
        elif isinstance(value, CONTAINERS):
            return self.reads.form(path, expression, value, variable)
        return []

    def _members(self, value: Any, path: str, expression: str, variable: str, depth: int) -> None:
        """Compare a set that holds tensors: the same ones, which did not move."""
        tensors = [item for item in value if isinstance(item, torch.Tensor)]
        opened = [item for item in value if not is_plain_value(item)] if self._exact else tensors
        if opened or self._exact:
            self.reads.members(path, expression, value, variable)
        for index, item in enumerate(opened):
            name = self.reads.bound("member", item)
            self.visit(item, f"item {index} of {path}", name, name, depth - 1)


def array_bytes(value: Any) -> bytes | None:
    """Return the contents of an array of the host, with its type and shape, else None."""
    if not isinstance(value, (bytearray, array)) and type(value).__module__ != "numpy":
        return None
    try:
        view = memoryview(value)
        small = view.nbytes <= _MAX_BYTES
        return f"{view.format} {view.shape} ".encode() + view.tobytes() if small else None
    except (TypeError, ValueError, NotImplementedError):
        return None


@lru_cache(maxsize=256)
def _values_of_class(kind: Any) -> tuple[str, ...]:
    """Return the plain values that a class has in place of its objects."""
    names = dict.fromkeys(name for base in kind.__mro__ for name in vars(base))
    values = [name for name in names if not name.startswith("__")]
    return tuple([name for name in values if is_plain_value(getattr(kind, name, None))])


def _items(value: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Return for each step into an object: path, expression, the key in it or NO_KEY, the item."""
    if isinstance(value, (tuple, list, deque)):
        yield from ((f"[{index}]", f"[{index}]", NO_KEY, item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        access = "[{}]" if type(value) is dict else ".get({})"  # which must not change it
        yield from ((f"[{key!r}]", access, key, item) for key, item in value.items())
    elif isinstance(value, FunctionType):
        for index, name in enumerate(value.__code__.co_freevars if value.__closure__ else ()):
            if name in cells_of(value):
                access = f".__closure__[{index}].cell_contents"
                yield f" closure {name}", access, NO_KEY, cells_of(value)[name].cell_contents
    elif isinstance(value, (MethodType, partial)):
        names = ("__self__",) if isinstance(value, MethodType) else ("func", "args", "keywords")
        yield from ((f".{name}", f".{name}", NO_KEY, getattr(value, name)) for name in names)
    if type(value) not in (*CONTAINERS, FunctionType, MethodType, partial):
        attributes = getattr(value, "__dict__", {})
        for name, item in attributes.items():
            plain = name.isidentifier() and not iskeyword(name)
            yield f".{name}", f".{name}" if plain else f".__dict__[{name!r}]", NO_KEY, item
        for name in declared(value):
            if name not in attributes and hasattr(value, name):
                yield f".{name}", f".{name}", NO_KEY, getattr(value, name)


def declared(value: Any) -> tuple[str, ...]:
    """Return attributes that may be in no ``__dict__``: slots, and fields with a default."""
    slots = [member.__name__ for member in slots_of(type(value))]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return tuple(dict.fromkeys([*(spec.name for spec in fields), *slots]))


# -------------------------------------------------------------- wrappers of objects


class Transparent:
    """Show the attributes of ``runnable``, as ``model.layers``, beside its own."""

    def __getattr__(self, name: str) -> Any:
        # Through __dict__, because a copy has no runnable at first. Special methods, such as those
        # for copies and pickles, are not those of the runnable.
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
