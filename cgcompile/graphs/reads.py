"""What objects hold (:func:`parts`), and what a capture read of metadata and arguments.

A graph repeats what Python read while it was captured, so guards, snapshots and tools look at the
same objects in the same way. :func:`parts` describes once what an object holds and how that is
named, read and restored: items, attributes, ``__slots__``, closures, defaults, tables of modules.
Visitors decide which objects they open: :class:`Reader`, ``Fields``, ``read_state``,
:func:`modules_of` and the comparison of results. A new kind of holder is a branch of :func:`parts`.
"""

import dataclasses
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from functools import lru_cache, partial
from itertools import chain, count
from keyword import iskeyword
from operator import length_hint
from random import Random
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from cgcompile.errors import missing_attribute
from cgcompile.graphs.contract import Contract, Kind, Read, Reads, is_plain_value
from cgcompile.torch_compat import raw_memory

log = logging.getLogger(__name__)

# -------------------------------------------------------------- what an object holds

CONTAINERS = (tuple, list, dict, set, frozenset, deque)
_BUILTIN = (OrderedDict, dict, list, tuple, deque, set, frozenset)  # the first has its own order
_BARE = (*CONTAINERS, FunctionType, MethodType, partial)  # exact types: few have attributes
_OPEN = (torch.nn.Module, *_BARE)
_CODE = (type, ModuleType, BuiltinFunctionType)
_HAVE_ITEMS = (*CONTAINERS, Mapping)
_CELL: Any = CellType.cell_contents
_LIBRARIES = ("torch", "logging", "threading", "re", "weakref", "_thread", "functools", "cgcompile")


class Members:
    """The values of slots or of a closure, which are in no container."""

    def __init__(self, places: Mapping[Any, tuple[Any, Any]]) -> None:
        self.places = places  # by key: the descriptor that reads a value, and of which object

    def items(self) -> Iterator[tuple[Any, Any]]:
        for key, (member, owner) in self.places.items():
            with suppress(AttributeError, ValueError):  # the slot or the cell is empty
                yield key, member.__get__(owner)

    def clear(self) -> None:
        for key, _ in self.items():
            self.places[key][0].__delete__(self.places[key][1])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.places[key][0].__set__(self.places[key][1], value)  # of a frozen object too


class Form(NamedTuple):
    """A way in which objects hold values: how each is named, and read, by its key."""

    path: str
    reach: str = ""  # the expression of the target, behind that of the object

    def step(self, key: Any) -> str:
        """Return the path of a value, behind that of the object."""
        return self.path.format(key.__name__ if self is SLOTS else key)

    def access(self, target: Any, key: Any, bound: Callable[[str, Any], str]) -> str:
        """Return the expression of a value behind that of the object."""
        if self is ITEMS and not isinstance(target, (list, tuple, deque)):
            # A look-up must add no item.
            return ("[{}]" if type(target) is dict else ".get({})").format(bound("key", key))
        if self is CLOSURE:
            return f".__closure__[{[*target.places].index(key)}].cell_contents"
        if self.path == ".{}":
            step = self.step(key)
            if step[1:].isidentifier() and not iskeyword(step[1:]):
                return step
        return f"{self.reach}[{key!r}]"


ITEMS = Form("[{!r}]")
ATTRIBUTES = Form(".{}", ".__dict__")
TABLES = {name: Form(".{}", f".{name}") for name in ("_parameters", "_buffers", "_modules")}
FIELDS = Form(".{}")  # what a method or a ``partial`` is made of
SLOTS = Form(".{}")
CLOSURE = Form(" closure {}", ".__closure__")
DEFAULTS = Form(" default {}", ".__defaults__")
KEYWORD_DEFAULTS = Form(" default {!r}", ".__kwdefaults__")


def parts(value: Any) -> Iterator[tuple[Form, Any]]:
    """Yield the ways in which an object holds values, each with its target; the only description.

    A target is a container, a ``__dict__`` or :class:`Members`. A visitor decides which objects it
    opens, and what it does with a value.
    """
    kind = type(value)
    if isinstance(value, torch.nn.Module):
        for table, form in TABLES.items():  # first: paths go through them, not through methods
            yield form, value.__dict__.get(table, {})
    elif isinstance(value, CONTAINERS):
        yield ITEMS, value
    elif kind is FunctionType:
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        yield CLOSURE, Members({n: (_CELL, cell) for n, cell in zip(names, cells, strict=True)})
        yield DEFAULTS, value.__defaults__ or ()
        yield KEYWORD_DEFAULTS, value.__kwdefaults__ or {}
    elif kind is MethodType or isinstance(value, partial):
        names = ("__self__", "__func__") if kind is MethodType else ("func", "args", "keywords")
        yield FIELDS, {name: getattr(value, name) for name in names}
    elif hasattr(kind, "keys") and isinstance(value, Mapping):
        yield ITEMS, value
    if kind in _BARE and not (kind is FunctionType and value.__dict__):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield ATTRIBUTES, attributes
    slots = slots_of(kind) if hasattr(kind, "__slots__") else ()
    if slots:
        yield SLOTS, Members({slot: (slot, value) for slot in slots})


def values_in(target: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys of a target with their values, as a program reads them."""
    return target.items() if isinstance(target, (dict, Members, Mapping)) else enumerate(target)


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass, whose fields are opened."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def field_names(record: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass, in order."""
    return tuple(field.name for field in dataclasses.fields(record))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, of a dataclass its fields."""
    if is_record(value):
        return {name: getattr(value, name) for name in field_names(value) if hasattr(value, name)}
    held = [(form, target) for form, target in parts(value) if form in (SLOTS, ATTRIBUTES)]
    return {form.step(key)[1:]: item for form, target in held for key, item in values_in(target)}


def class_attributes(bases: Sequence[type]) -> dict[str, Any]:
    """Return what the bases of a class hold, by name; the first one hides the others."""
    return {name: value for base in reversed(bases) for name, value in vars(base).items()}


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """Return the slots of a class; of one name there may be several, each with its own value."""
    tables = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    members = chain.from_iterable(table.values() for table in tables)
    return [member for member in members if isinstance(member, MemberDescriptorType)]


def is_closed_object(value: Any) -> bool:
    """Return whether an object is a class, or a part of torch, of Python or of cgcompile."""
    in_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    return isinstance(value, _CODE) or (in_library and not isinstance(value, _OPEN))


def behind(value: Any) -> Any:
    """Return what is read in place of a value: the owner of a method, what a wrapper wraps."""
    while isinstance(value, (MethodType, Transparent)):
        value = value.__self__ if isinstance(value, MethodType) else value.unwrap()
    return value


def plainly(container: Any) -> Any:
    """Return the builtin type of a container, whose methods no subclass changes."""
    kind = type(container)
    return kind if kind in _BUILTIN else next(k for k in _BUILTIN if isinstance(container, k))


def contents(target: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the keys and the values of a target, by no code of a user."""
    target = dict(target.items()) if isinstance(target, Members) else target
    kind = plainly(target)
    if issubclass(kind, dict):
        return tuple(kind.keys(target)), tuple(kind.values(target))
    values = tuple(kind.__iter__(target))
    return (
        (("items",), (frozenset(values),)) if kind is set else (tuple(range(len(values))), values)
    )


def restore(target: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Restore what :func:`contents` returned."""
    kind: Any = Members if isinstance(target, Members) else plainly(target)
    if kind in (tuple, frozenset):
        return
    kind.clear(target)
    if kind in (list, deque, set):
        (kind.update if kind is set else kind.extend)(target, values[0] if kind is set else values)
    else:
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(target, key, value)


@lru_cache(maxsize=8192)
def names_loaded(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code loads, with constants that may be keys; those of globals."""
    names: set[str] = set()
    global_names: set[str] = set()
    for instruction in get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind.startswith("LOAD_") and isinstance(value, str):
            names.add(value)
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                global_names.add(value)
        elif kind == "IMPORT_FROM":
            names.add(value)
        elif isinstance(value, tuple):  # keys of a dict, and of keyword arguments
            names.update(item for item in value if isinstance(item, str))
    names.update(item for item in code.co_consts if isinstance(item, str))
    dotted = [item.split(".") for item in names if "." in item]  # as attrgetter takes it
    names.update(part for parts in dotted for part in parts if part.isidentifier())
    return frozenset(names), frozenset(global_names)


# -------------------------------------------------------------- modules of a runnable

_HOLD_NOTHING = frozenset((str, bytes, int, float, bool, type(None), type, torch.Tensor))


def modules_of(model: Any, inner: bool = False) -> list[torch.nn.Module]:
    """Return the model, if it is a module; else the modules that it or its attributes hold.

    With ``inner`` those inside of the modules as well.
    """
    # Of globals those alone that a function names: an engine has the weights of all models.
    modules: dict[int, torch.nn.Module] = {}  # a tower may be its own forward
    seen: set[int] = set()
    todo = deque([model])
    while todo:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules[id(value)] = value
            todo += value._modules.values() if inner else ()
        elif value is model or callable(value) or isinstance(value, _HAVE_ITEMS):
            owner = value.__self__ if isinstance(value, MethodType) else None
            held = chain(parts(value), () if isinstance(owner, torch.nn.Module) else parts(owner))
            rows = chain.from_iterable(values_in(target) for _, target in held)
            # A tokenizer among them has words by the hundred thousand.
            todo += [item for _, item in rows if type(item) not in _HOLD_NOTHING]
            todo += _named_globals(value) if isinstance(value, FunctionType) else ()
    return list(modules.values())


def _named_globals(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that the code names: modules, containers, functions of the same file."""
    scope = function.__globals__
    if scope.get("__name__", "").partition(".")[0] in _LIBRARIES:
        return
    codes = [function.__code__]
    for code in codes:  # grows meanwhile, by inner functions
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        # Names of attributes, which are there too, are no reason.
        for name in filter(names_loaded(code)[1].__contains__, code.co_names):
            value = scope.get(name)
            own = isinstance(value, FunctionType) and value.__globals__ is scope
            if own or isinstance(value, (torch.nn.Module, Mapping, list, tuple)):
                yield value


# -------------------------------------------------------------- the forward context

_DEPTH = 9  # objects in objects
_MOST = 100_000  # lines of generated text, and rows
_FIELDS = ("attn_metadata", "slot_mapping", "additional")
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

    _exact = False  # None is not compared: a capture may run without metadata

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
            for form, target in () if raw_memory.is_wrapper(value) else parts(value):
                for name, item in values_in(target):
                    if name.isidentifier() and not name.startswith("_"):  # others are torch's
                        at, read = form.step(name), self._loads(name)
                        self.visit(item, path + at, expression + at, local + at, depth - 1, read)
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
        own: set[str] = set()  # attributes that hide those of a class
        for form, target in parts(value):
            if isinstance(target, (set, frozenset)):
                self._members(value, path, expression, variable, depth)
                continue
            is_own = form is ATTRIBUTES or form is SLOTS
            for key, item in values_in(target):
                step = form.step(key)
                if is_own and step in own:
                    continue  # a slot of a base class, hidden by another one
                if is_own:
                    own.add(step)
                before, names = len(reads.lines), len(reads.names)
                text = form.access(target, key, reads.bound)
                read = self._is_loaded(step[1:] if is_own else key, loaded)
                self.visit(item, path + step, expression + text, variable + text, depth - 1, read)
                if len(reads.lines) == before and len(reads.names) > names:
                    reads.names.popitem()  # the key, which must not be kept alive
        for step, name in [(f".{name}", name) for name in self._of_class(value)]:
            if step not in own and hasattr(value, name):
                item, read = getattr(value, name), self._loads(name)
                self.visit(item, path + step, expression + step, variable + step, depth, read)
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

    def _is_loaded(self, key: Any, loaded: bool) -> bool:
        """Return whether code may load an item of an object that it may load itself."""
        if not is_plain_value(key):
            return False  # it is not kept alive for a number
        is_name = isinstance(key, str) and key.isidentifier()
        return self._loads(key) if is_name else loaded

    def _of_class(self, value: Any) -> Iterator[str]:
        """Yield the attributes that a class may have in place of its object."""
        yield from field_names(value) if is_record(value) else ()
        kind: Any = type(value)  # mypy takes it for unhashable
        yield from () if self._exact else filter(self._loads, _values_of_class(kind))

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
    """Return the contents of an array of the host, with its type and shape, else None.

    Of an iterator of Python it is the position.
    """
    if isinstance(value, MethodWrapperType):  # ``numbers.__next__``
        value = value.__self__
    if isinstance(value, Iterator):
        return _position(value)
    if isinstance(value, Random):
        return repr(value.getstate()).encode()
    if not isinstance(value, (bytearray, array)) and type(value).__module__ != "numpy":
        return None
    try:
        view = memoryview(value)
        small = view.nbytes <= _MAX_BYTES
        return f"{view.format} {view.shape} ".encode() + view.tobytes() if small else None
    except (TypeError, ValueError, NotImplementedError):
        return None


def _position(value: Iterator[Any]) -> bytes | None:
    """Return where an iterator of Python stands; None for one that an object of a user is."""
    if type(value) is count:
        return repr(value).encode()
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        held = {} if frame is None else frame.f_locals
        names = {name: item for name, item in held.items() if is_plain_value(item)}
        return f"{frame and frame.f_lasti} {names}".encode()
    if type(value).__module__ != "builtins":
        return None
    if hasattr(value, "__length_hint__"):
        return str(length_hint(value)).encode()
    try:
        state = value.__reduce__()  # of ``enumerate``, ``zip`` and ``map``
    except TypeError:
        return None
    inner = [_position(x) if isinstance(x, Iterator) else x for x in state[1]]
    return repr([x for x in inner if is_plain_value(x)]).encode()


@lru_cache(maxsize=256)
def _values_of_class(kind: Any) -> tuple[str, ...]:
    """Return the plain values that a class has in place of its objects."""
    values = [name for name in class_attributes(kind.__mro__) if not name.startswith("__")]
    return tuple([name for name in values if is_plain_value(getattr(kind, name, None))])


def declared(value: Any) -> tuple[str, ...]:
    """Return attributes that may be in no ``__dict__``: slots, and fields with a default."""
    slots = [member.__name__ for member in slots_of(type(value))]
    return tuple(dict.fromkeys([*(field_names(value) if is_record(value) else ()), *slots]))


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
