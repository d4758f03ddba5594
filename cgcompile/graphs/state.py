"""The Python state that captured code read of a model: found at the capture, compared at a replay.

A replay runs no Python, so a number, a hook or a tensor that the model reads is that of the
capture. :func:`read_state` finds what the code of a step may load by name: attributes,
items, closures and globals, from the runnable on. :class:`StateContract` compares it: hundreds of
dicts at once, in C, by whether they were written. What the step itself changes while it is captured
is bookkeeping, and is not compared; neither are items that are added to a dict.

:class:`RanCode` notes which code runs while a step is captured; what that code loads by name may
have been read, of whatever object. Code of torch, of Python's own libraries and of cgcompile is not
looked into, and neither is an eager break, which reads what it needs at each replay. A name that
code computes is not seen.
"""

import enum
import logging
import operator
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dis import get_instructions
from functools import cached_property, lru_cache, partial
from threading import get_ident
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, cast

import torch

from cgcompile.errors import with_article
from cgcompile.graphs.arena import address
from cgcompile.graphs.contract import (
    PLAIN_TENSORS,
    Change,
    Contract,
    Placed,
    Reads,
    inner_tensors,
    is_plain_value,
    layout_of,
    layout_text,
    same_value,
)
from cgcompile.graphs.fields import names_of_modules
from cgcompile.graphs.guards import Weights
from cgcompile.graphs.reads import (
    ATTRIBUTES,
    CLOSURE,
    CONTAINERS,
    ITEMS,
    SLOTS,
    TABLES,
    Form,
    Members,
    array_bytes,
    behind,
    class_attributes,
    is_closed_object,
    names_loaded,
    parts,
    plainly,
    values_in,
)
from cgcompile.torch_compat import raw_memory, torch_ops

log = logging.getLogger(__name__)


# ---------------------------------------------------------------- code that ran in a capture


_monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12

# Python's own libraries, torch, and what torch is built on.
_CLOSED = sys.stdlib_module_names | {"torch", "functorch", "triton", "numpy", "cgcompile", "jinja2"}
_CLOSED |= {"sympy", "mpmath", "networkx", "typing_extensions", "fsspec", "filelock", "setuptools"}


_METHODS_OF_ALL = {"items", "values", "keys", "copy"}
_FUNCTIONS_OF_ALL = {"list", "tuple", "dict", "sorted", "sum", "enumerate", "zip"}
_OPS_OF_ALL = {"GET_ITER", "DICT_MERGE", "DICT_UPDATE", "LIST_EXTEND", "SET_UPDATE"}
_NO_OPS = {"CACHE", "PRECALL", "PUSH_NULL"}


@lru_cache(maxsize=8192)
def names_read_whole(code: CodeType) -> frozenset[str]:
    """Return the names of dicts that code iterates or unpacks, as ``**kwargs`` does."""
    # A cache measures itself, and looks for its oldest item, so that it stays small.
    names: set[str] = set()
    loads: list[str] = []  # names of the instructions before, up to one that loads nothing
    for instruction in get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in _NO_OPS:
            continue
        is_call = kind.startswith("CALL") and not _FUNCTIONS_OF_ALL.isdisjoint(loads)
        if loads and (is_call or kind in _OPS_OF_ALL or value in _METHODS_OF_ALL):
            names.add(loads[-1])
        new = value if isinstance(value, tuple) else (value,)
        loads = [*loads, *map(str, new)] if kind.startswith("LOAD_") else []
    return frozenset(names)


def is_closed(module_name: str) -> bool:
    """Return whether code of a module is not followed; layers of torch are."""
    if module_name.startswith("torch.nn.modules."):
        return module_name == "torch.nn.modules.module"
    # The constructor of a named tuple has a namespace of this name.
    return module_name.partition(".")[0] in _CLOSED or module_name.startswith("namedtuple_")


@lru_cache(maxsize=256)
def names_of_layer(kind: Any) -> frozenset[str]:
    """Return the names that the code of the layers of torch which a class is loads of itself."""
    names = {"forward"}
    for base in kind.__mro__:
        if not base.__module__.startswith("torch.") or is_closed(base.__module__):
            continue
        todo = ["forward"]
        for method in todo:  # grows meanwhile
            function = getattr(base, method, None)
            if isinstance(function, FunctionType) and not runs_closed(function):
                new = names_loaded(function.__code__)[0] - names
                names |= new
                todo += new
    return frozenset(names)


def runs_closed(function: FunctionType) -> bool:
    """Return whether the code of a function is not looked into, whatever it wraps."""
    return is_closed(str(function.__globals__.get("__name__") or ""))


class RanCode:
    """Context manager: notes the code that runs in this thread; not in imports or eager breaks."""

    # Python 3.12 and later report the first call of each code object. Older versions call a trace
    # function once a Python call, and run slower meanwhile; that of a debugger goes on.
    # What the first capture of a process imports is no code of the model: it does not run again.

    def __init__(self, is_recording: Callable[[], bool] = lambda: True) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}  # with their globals
        self._is_recording = is_recording
        self._containers: dict[str, tuple[Any, list[int]]] = {}  # of globals, before the code ran

    @property
    def written(self) -> list[str]:
        """The globals whose items the code has changed."""
        rows = self._containers.items()
        return [name for name, (value, before) in rows if _identities(value) != before]

    def __enter__(self) -> "RanCode":
        self._caller = id(sys._getframe(1))  # which runs until the end
        self._thread, self._tool = get_ident(), _free_tool()
        if self._tool is not None:
            events = _monitoring.events.PY_START
            _monitoring.use_tool_id(self._tool, "cgcompile")
            _monitoring.register_callback(self._tool, events, self._note_start)
            _monitoring.set_events(self._tool, events)
            _monitoring.restart_events()
        else:
            self._before: Any = sys.gettrace()
            sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        if self._tool is not None:
            _monitoring.set_events(self._tool, 0)
            _monitoring.register_callback(self._tool, _monitoring.events.PY_START, None)
            _monitoring.free_tool_id(self._tool)
        elif sys.gettrace() == self._trace:  # else the code has begun to debug
            sys.settrace(self._before)

    @staticmethod
    def pause() -> "RanCode | None":
        """Remove the trace function of this thread if it only notes; return what notes again."""
        trace = sys.gettrace()
        if getattr(trace, "__func__", None) is not RanCode._trace:
            return None
        ran: RanCode = cast(Any, trace).__self__
        if ran._before is not None:
            return None
        sys.settrace(None)
        return ran

    def resume(self) -> None:
        """Set the trace function that :meth:`pause` removed."""
        sys.settrace(self._trace)

    def _note_start(self, code: CodeType, offset: int) -> Any:
        if get_ident() != self._thread:
            return None
        self._note(sys._getframe(1))
        return _monitoring.DISABLE if code in self.codes else None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._note(frame)
        return None if self._before is None else self._before(frame, event, argument)

    def _note(self, frame: FrameType) -> None:
        code, scope = frame.f_code, frame.f_globals
        if code not in self.codes and self._is_recording() and not self._is_importing(frame):
            self.codes[code] = scope
            if not is_closed(str(scope.get("__name__") or "")):
                for name in names_loaded(code)[1] & scope.keys():
                    if isinstance(scope[name], (dict, list)):
                        self._containers.setdefault(name, (scope[name], _identities(scope[name])))

    def _is_importing(self, frame: FrameType | None) -> bool:
        while frame is not None and id(frame) != self._caller:
            if frame.f_globals.get("__name__") == "importlib._bootstrap":
                return True
            frame = frame.f_back
        return False


def _free_tool() -> int | None:
    """Return an identity of a tool that Python can report to; None if there is none."""
    if _monitoring is None:
        return None
    return next((at for at in (3, 4) if _monitoring.get_tool(at) is None), None)  # of no purpose


def _identities(value: Any) -> list[int]:
    kind = plainly(value)  # methods of a subclass may run code of the user
    return [*map(id, kind.values(value) if issubclass(kind, dict) else kind.__iter__(value))]


class LoadedNames:
    """The names that some code loads, and the globals among them."""

    def __init__(self, codes: Mapping[CodeType, dict[str, Any]]) -> None:
        self.codes = codes
        self.names: set[str] = set()
        self.whole: set[str] = set()  # of dicts that are iterated or unpacked
        self.globals: list[tuple[dict[str, Any], str]] = []  # but for those that the code writes
        self.stored: list[tuple[dict[str, Any], str]] = []  # these
        for code, scope in codes.items():
            module_name = str(scope.get("__name__") or "")
            if code.co_name == "<module>":
                continue  # an import
            if is_closed(module_name) or module_name.startswith("torch."):
                continue  # a layer reads its own attributes: see :func:`names_of_layer`
            names, global_names = names_loaded(code)
            self.names |= names
            self.whole |= names_read_whole(code)
            self.globals += [(scope, name) for name in global_names if name in scope]
            self.stored += [(scope, name) for name in globals_stored(code)]
        stored = {(id(scope), name) for scope, name in self.stored}
        self.globals = [row for row in self.globals if (id(row[0]), row[1]) not in stored]


def _module_of(value: Any) -> ModuleType | None:
    """Return the module whose globals a dict holds, as ``G`` of Dynamo's guards does."""
    name = value.get("__name__") if type(value) is dict else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module if getattr(module, "__dict__", None) is value else None


def globals_stored(code: CodeType) -> list[str]:
    """Return the names of globals that code writes itself: bookkeeping."""
    rows = get_instructions(code)
    return [str(row.argval) for row in rows if row.opname == "STORE_GLOBAL"]


# ---------------------------------------------------------------- where state is held

_LONG = 10_000  # items of one container: a vocabulary, which holds no state
_FEW = 8  # items of a list that are compared one by one
_MAX_VALUES = 100_000  # a model of thousands of modules has fewer
_ALL_HOOKS = "hooks of all modules"
_HOOKS_OF = "number of hooks of "
_MISSING = object()
# The tables of a module, and the containers that read all of it.
_CONTAINERS_OF: dict[Form, tuple[type, ...]] = {
    TABLES["_modules"]: (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict),
    TABLES["_parameters"]: (torch.nn.ParameterList, torch.nn.ParameterDict),
    TABLES["_buffers"]: (),
}
_WORD = re.compile(r"\w+")
_STARTS = rf"(?:len\(|{_HOOKS_OF}|an item of )*"  # what comes before the path of an object
_MOST_COMPARED = 20_000  # values; a step would take milliseconds
_SETTLED = 64  # replays, after which objects that were replaced are compared as others are


class TensorRead(NamedTuple):
    """A tensor that a step may read."""

    placed: Placed
    start: int | None  # of its memory; None: it has none of its own
    reference: weakref.ref[torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorRead":
        if _is_dense(tensor):
            return cls(Placed.of(tensor), address(tensor), weakref.ref(tensor))
        kind, inner = type(tensor), inner_tensors(tensor)
        parts = tuple([Placed.of(part) for part in inner if _is_dense(part)])
        at = parts[0].address if len(parts) == len(inner) > 0 else id(tensor)
        shape = layout_of(tensor)[0]
        return cls(Placed(at, (shape, kind, parts, False, False)), None, weakref.ref(tensor))


class Place(NamedTuple):
    """Where a value is held that a step may read."""

    path: str  # for messages, such as ``self.layers.0.scale``
    holder: Any  # a dict, a class, a cell or the owner of a slot
    key: Any  # in a dict; the name of an attribute of a class; a slot; a descriptor of a cell
    value: Any  # of a tensor a TensorRead
    is_opened: bool  # whether what the value holds is read from here

    def now(self) -> Any:
        """Return what is held there now."""
        holder, key = self.holder, self.key
        try:
            if isinstance(holder, CellType):
                return holder.cell_contents
            if isinstance(key, MemberDescriptorType):
                return key.__get__(holder)
            if isinstance(holder, type):
                return operator.attrgetter(key)(holder)
        except (AttributeError, ValueError):
            return _MISSING
        return dict.get(holder, key, _MISSING)

    def is_same(self) -> bool:
        """Return whether the same object is held there, or an equal plain value."""
        now, before = self.now(), self.value
        before = before.reference() if isinstance(before, TensorRead) else before
        return now is before or (is_plain_value(before) and same_value(now, before))


class Owner(NamedTuple):
    """An object with attributes, the dict that holds them, and its class."""

    path: str
    value: Any
    attributes: dict[str, Any]
    kind: type

    def is_same(self) -> bool:
        return type(self.value) is self.kind and self.value.__dict__ is self.attributes

    def change(self) -> Change | None:
        """Return whether it has another class, or a module other tables of weights and modules."""
        value, kind, before = self.value, type(self.value), self.attributes
        if kind is not self.kind:
            return Change(f"{self.path}.__class__", self.kind.__qualname__, kind.__qualname__)
        tables = TABLES if isinstance(value, torch.nn.Module) else ()
        if any(value.__dict__.get(name) is not before.get(name) for name in tables):
            return Change(f"{self.path}.__dict__", "a dict", "another dict")
        return None


class State:
    """The state that a step may read, as it is now."""

    def __init__(self) -> None:
        # Rows of lists begin with a path.
        self.places: list[Place] = []
        self.sequences: list[tuple[str, Any, tuple[Any, ...]]] = []  # lists with their items
        self.others: list[tuple[str, Any, Any]] = []  # arrays and sets, with their contents
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.objects: list[tuple[str, Any, frozenset[str]]] = []  # dicts and classes, their names
        self.owners: list[Owner] = []
        self.cached: list[tuple[str, FunctionType]] = []  # behind ``lru_cache``: they ran before
        # By path.
        self.names: dict[str, set[str]] = {}  # of attributes, by path of the object
        self.attributes: dict[str, tuple[str, str]] = {}  # path of the object and name
        self.dicts: dict[str, str] = {}  # paths of dicts by those of their items
        self.shared: dict[str, str] = {}  # the first path of what is held at a second one
        self.weights: dict[str, tuple[dict[str, Any], str]] = {}  # of modules: table and name
        self.values: dict[str, Any] = {}  # of a list its length, too
        # By identity: the first path, and the object, which is kept so that the identity is its.
        self.seen: dict[int, tuple[str, Any]] = {}
        self.kinds: dict[int, tuple[str, Any]] = {}  # classes that were opened
        self.complete = True

    def cut(self, paths: Collection[str]) -> tuple["State", "State"]:
        """Return what is outside of some paths, and what is at or below them."""
        states, is_inside = (State(), State()), _within(paths)
        for name, rows in vars(self).items():
            pair = [getattr(state, name) for state in states]
            if isinstance(rows, list):
                for row in rows:
                    pair[is_inside(row[0])].append(row)
            elif isinstance(rows, dict):
                for key, value in rows.items():
                    pair[is_inside(key if isinstance(key, str) else value[0])][key] = value
        return states

    def joined(self, other: "State") -> "State":
        """Return the rows of both."""
        state = State()
        state.complete = self.complete and other.complete
        for name, rows in vars(state).items():
            if isinstance(rows, list):
                rows += getattr(self, name) + getattr(other, name)
            elif isinstance(rows, dict):
                rows.update(getattr(self, name) | getattr(other, name))
        return state

    def take(self) -> None:
        """Take the values of what was found."""
        values = self.values
        values |= {row.path: row.value for row in self.places}
        for path, _, items in self.sequences:
            values[f"len({path})"] = len(items)
            values.update((f"{path}[{index}]", item) for index, item in enumerate(items))
        for path, value, contents in self.others:
            values[path] = repr([*contents]) if isinstance(value, dict) else contents
        for path, module in self.modules:
            values[path] = module
            values[f"{path}.forward"] = module.__dict__.get("forward", _MISSING)
            values[_hooks_of(path)] = _number_of_hooks(module)
        for path, (table, name) in self.weights.items():
            values[path] = _read_weight(table, name)
        values[_ALL_HOOKS] = torch_ops.has_global_hooks()


class _Reader:
    """Walks from a runnable to all that code may load; without ``loaded`` to all that it holds."""

    def __init__(self, loaded: LoadedNames | None, around: State | None = None) -> None:
        self.state = State()
        self._around = around or State()  # what was read before, which is not opened again
        self._loaded = loaded
        self._skipped = names_of_modules() - {"training"}

    def read(self, root: Any, path: str) -> State:
        self._visit(root, path)
        for scope, name in () if self._loaded is None else self._loaded.globals:
            value = scope[name]
            if isinstance(value, ModuleType):
                self._visit(value, f"global {name}")
            else:
                self._held(f"global {name}", scope, name, value)
        if self._loaded is not None:
            self._functions(torch.nn.functional, "torch.nn.functional")
        self.state.take()
        return self.state

    def read_places(self, places: Iterable[Place]) -> State:
        """Read what is at some places now, and below them."""
        for row in places:
            self._held(row.path, row.holder, row.key, row.now())
        self.state.take()
        return self.state

    def _is_loaded(self, name: str, kind: Any = None) -> bool:
        """Return whether code names an attribute; that of ``UserDict``, which is closed, does."""
        is_read = self._loaded is None or name in self._loaded.names
        return is_read or (kind is not None and kind.__module__ == "collections")

    def _has_run(self, function: FunctionType) -> bool:
        return self._loaded is None or function.__code__ in self._loaded.codes

    def _place(self, path: str, holder: Any, key: Any, value: Any, is_opened: bool = False) -> None:
        if isinstance(value, torch.Tensor):
            value = TensorRead.of(value)
        self.state.places.append(Place(path, holder, key, value, is_opened))

    def _held(self, path: str, holder: Any, key: Any, value: Any) -> None:
        """Note a value where it is held, and open it."""
        self._place(path, holder, key, value, is_opened=True)
        self._visit(value, path)

    def _functions(self, module: ModuleType, path: str) -> None:
        """Note functions of torch that code loads, which a program may replace."""
        for name, value in list(vars(module).items()):
            if callable(value) and self._is_loaded(name):
                self._place(f"{path}.{name}", vars(module), name, value)

    def _visit(self, value: Any, path: str) -> None:
        if is_plain_value(value):
            return
        if isinstance(value, torch.Tensor):
            if vars(value):
                self._attributes(vars(value), path, type(value))
            return
        if isinstance(value, MethodType):
            self._visit(value.__func__, path)
        value = behind(value)
        value = _module_of(value) or value
        if not self.state.complete:
            return
        seen = self.state.seen
        first = seen.get(id(value)) or self._around.seen.get(id(value))
        if first is not None:
            self.state.shared[path] = first[0]
            return
        seen[id(value)] = path, value
        if len(seen) > _MAX_VALUES:
            self.state.complete = False
        else:
            self._open(value, path)

    def _open(self, value: Any, path: str) -> None:
        if is_closed_object(value):
            if isinstance(value, type):
                self._methods(value)
            elif not isinstance(value, ModuleType):
                self._wrapped(value, path)
            elif not is_closed(value.__name__):
                self._attributes(value.__dict__, path, ModuleType)
            return
        if isinstance(value, FunctionType):
            if not self._has_run(value):
                if value.__dict__:
                    self._attributes(value.__dict__, path, FunctionType)
                return
        elif not isinstance(value, (torch.nn.Module, *CONTAINERS)):
            data = array_bytes(value)
            if data is not None:
                self.state.others.append((path, value, data))
            if data is not None or isinstance(value, enum.Enum):
                return
        for form, target in parts(value):
            self._part(form, target, value, path)
        self._methods(type(value))

    def _part(self, form: Form, target: Any, value: Any, path: str) -> None:
        """Note and open what a part of an object holds; of attributes those that code loads."""
        if form is ITEMS:
            if isinstance(target, CONTAINERS):
                self._container(target, path)
        elif form is ATTRIBUTES:
            self.state.owners.append(Owner(path, value, target, type(value)))
            if isinstance(value, torch.nn.Module):
                self._module(value, path)
            else:
                self._attributes(target, path, type(value))
        elif form is SLOTS or form is CLOSURE:
            self._members(form, target, value, path)
        else:  # weights and modules of a module: a weight may have attributes
            if form in _CONTAINERS_OF:
                self._entries(value, form, target, path)
            for key, item in values_in(target):
                self._visit(item, path + form.step(key))

    def _members(self, form: Form, target: Members, value: Any, path: str) -> None:
        """Note and open slots that code loads, and the variables of a function."""
        hides = form is CLOSURE and runs_closed(value)  # a decorator of torch: not read by name
        for key, item in target.items():
            member, owner = target.places[key]
            if hides:
                self._visit(item, path)
            elif form is CLOSURE or self._is_loaded(member.__name__):
                self._held(path + form.step(key), owner, member, item)

    def _wrapped(self, value: Any, path: str) -> None:
        """Open what a closed callable wraps, such as that of ``functools.lru_cache``."""
        wrapped = getattr(value, "__wrapped__", None) if callable(value) else None
        if isinstance(wrapped, FunctionType):
            self.state.cached.append((path, wrapped))
            self._visit(wrapped, path)

    def _module(self, module: torch.nn.Module, path: str) -> None:
        """Note and open hooks and attributes of a module, and its method of a class of torch."""
        self.state.modules.append((path, module))
        for hooks in torch_ops.hooks_of(module):
            for key, hook in hooks.items():
                self._held(f"{path} hook {key}", hooks, key, hook)
        kind = cast(Any, type(module))
        self._attributes(module.__dict__, path, kind, self._skipped)
        forward = kind.forward  # generated code of torch.fx is in a class of torch
        if isinstance(forward, FunctionType) and is_closed(kind.__module__):
            self._method(kind, "forward", forward)

    def _entries(self, module: torch.nn.Module, form: Form, table: Any, path: str) -> None:
        """Note weights of a module, and which children and weights are added later."""
        is_container = isinstance(module, _CONTAINERS_OF[form])
        owner = f"{path}{form.reach}"  # an attribute hides what is in a table under its name
        self.state.objects.append((path, table, frozenset(table)))
        self.state.names[owner] = set(table)
        for name in table if is_container else filter(self._is_loaded, table):
            self.state.attributes[f"{path}.{name}"] = owner, name
        for name, value in table.items():
            if value is None or isinstance(value, torch.Tensor):  # None: as a bias that is left out
                self.state.weights[f"{path}.{name}"] = table, name

    def _attributes(
        self, attributes: dict[str, Any], path: str, kind: Any, skipped: Collection[str] = ()
    ) -> None:
        self.state.objects.append((path, attributes, frozenset(attributes)))
        self.state.names.setdefault(path, set()).update(attributes)
        of_layer = names_of_layer(kind) if skipped else ()
        for name, value in list(attributes.items()):
            if name in skipped:
                continue
            if skipped and isinstance(value, torch.Tensor):  # weights are compared elsewhere
                self.state.values[f"{path}.{name}"] = TensorRead.of(value)
                self._visit(value, f"{path}.{name}")  # which may have attributes
                if name in of_layer or self._is_loaded(name, kind):
                    self.state.attributes[f"{path}.{name}"] = path, name
            elif name in of_layer or self._is_loaded(name, kind):
                self._attribute(path, attributes, name, kind)

    def _attribute(self, path: str, attributes: dict[str, Any], name: str, kind: Any) -> None:
        if not isinstance(getattr(kind, name, None), cached_property):  # which adds it when read
            self.state.attributes[f"{path}.{name}"] = path, name
        self._held(f"{path}.{name}", attributes, name, attributes[name])

    def _methods(self, kind: Any) -> None:
        """Note attributes of a class and methods that have run; open what decorators hold."""
        if id(kind) in self.state.kinds or id(kind) in self._around.kinds:
            return
        self.state.kinds[id(kind)] = kind.__qualname__, kind
        if is_closed(kind.__module__):
            return
        self._methods(type(kind))  # attributes of a metaclass are those of the class
        named, path = _attributes_of_class(kind), kind.__qualname__
        self.state.objects.append((path, kind, frozenset(named)))
        self.state.names.setdefault(path, set()).update(named)
        of_layer = names_of_layer(kind) if issubclass(kind, torch.nn.Module) else ()
        for name in named:
            if not name.startswith("__") and (name in of_layer or self._is_loaded(name)):
                self.state.attributes[f"{path}.{name}"] = path, name
        for name, value in named.items():
            self._method(kind, name, value)
        for name, value in named.items():
            path = f"{kind.__qualname__}.{name}"
            if name.startswith("__") or not self._is_loaded(name):
                continue
            if not hasattr(type(value), "__get__"):
                self._held(path, kind, name, value)
            elif not is_closed(type(value).__module__):
                self._visit(value, path)  # what a descriptor holds

    def _method(self, kind: Any, name: str, value: Any) -> None:
        is_method = isinstance(value, (classmethod, staticmethod))
        function = value.fget if isinstance(value, property) else value
        function = value.__func__ if is_method else function
        if isinstance(function, FunctionType) and self._has_run(function):
            for form, target in parts(function):
                self._part(form, target, function, f"{kind.__qualname__}.{name}")
            key = f"{name}.__func__" if isinstance(value, classmethod) else name
            held = value if isinstance(value, property) else function
            self._place(f"{kind.__qualname__}.{name}", kind, key, held)

    def _container(self, value: Any, path: str) -> None:
        if len(value) >= _LONG:
            return
        kind = plainly(value)
        if issubclass(kind, dict):
            self._keys(value, path)
            for key, item in list(kind.items(value)):
                self.state.dicts[f"{path}[{key!r}]"] = path
                self._held(f"{path}[{key!r}]", value, key, item)
        elif kind in (set, frozenset):
            if kind is set:
                self.state.others.append((path, value, frozenset(value)))
            for item in kind.__iter__(value):
                self._visit(item, f"an item of {path}")
        else:
            items = tuple(kind.__iter__(value))
            tensors = [isinstance(item, torch.Tensor) for item in items]
            pairs = zip(items, tensors, strict=True)
            read = tuple([TensorRead.of(item) if tensor else item for item, tensor in pairs])
            self.state.sequences.append((path, value, read))
            for index, item in enumerate(items):
                self._visit(item, f"{path}[{index}]")

    def _keys(self, value: dict[Any, Any], path: str) -> None:
        """Note which items are added later: those that code names, all if it reads the whole."""
        keys = tuple(plainly(value).keys(value))
        if all(isinstance(key, str) for key in keys):
            self.state.objects.append((path, value, frozenset(keys)))
            self.state.names.setdefault(path, set()).update(keys)
            for key in filter(self._is_loaded, keys):
                self.state.attributes[f"{path}[{key!r}]"] = path, key
        name = (_WORD.findall(path) or [""])[-1]
        is_read = self._loaded is not None and name in self._loaded.whole
        if is_read and all(is_plain_value(key) for key in keys):
            self.state.others.append((f"{path}.keys()", value, keys))


def _attributes_of_class(kind: type) -> dict[str, Any]:
    """Return the attributes of a class and its bases, by name; not of closed ones."""
    return class_attributes([base for base in kind.__mro__ if not is_closed(base.__module__)])


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and raw_memory.is_plain_tensor(value)
        and not value.is_nested
    )


def read_state(runnable: Any, loaded: LoadedNames | None) -> State:
    """Return the state that code may read of a runnable; without ``loaded`` all that it holds."""
    is_function = isinstance(runnable, FunctionType)
    return _Reader(loaded).read(runnable, runnable.__name__ if is_function else "self")


# -------------------------------------------------------------- the comparison


class ModelState:
    """The state of one runnable, of which each capture takes a contract."""

    def __init__(self, runnable: Any) -> None:
        self._runnable = runnable
        self._codes: dict[CodeType, dict[str, Any]] = {}  # that ran in captures, with globals
        self._loaded: LoadedNames | None = None  # by them; None before the first capture
        self._before: State | None = None  # the capture that runs
        self._last: StateContract | None = None  # compares what was read last, with all tensors
        self._shared: weakref.ref[StateContract] | None = None  # to the capture before
        self._bookkeeping: set[str] = set()  # paths of what captured steps change themselves
        self.changes: list[Change] = []  # these changes, of the last capture
        self.learned = False  # whether that capture ran code that was not known before it
        # Whether a step that ran new code is captured again, which compares what the step changes.
        self.captures_again = False
        self._stored: list[tuple[dict[str, Any], str, Any]] = []  # globals before a capture
        self.epoch = 0  # rises when a dict is written
        self._dicts: dict[int, Any] = {}  # by identity, those whose versions are compared
        self._written: dict[int, Any] = {}  # others, whose values are compared
        self._owners: dict[int, dict[int, Any]] = {}  # objects with these dicts, by identities
        self._held = weakref.WeakKeyDictionary[StateContract, Collection[int]]()  # their identities
        self._versions = raw_memory.DictVersions(())
        self.unwritten = self._versions.hold  # whether no dict was written since

    def read(self) -> State:
        """Return the present state."""
        return read_state(self._runnable, self._loaded)

    def read_places(self, places: Iterable[Place], around: State) -> State:
        """Return the present state at some places and below, but for what is ``around``."""
        return _Reader(self._loaded, around).read_places(places)

    def forget(self) -> None:
        """Compare with no earlier capture, but for which code ran in it."""
        self._last = None
        self._bookkeeping.clear()

    def begin(self) -> None:
        """Read the state before a capture."""
        if self._last is not None and self._last.holds():
            self._before = self._last.state
        else:
            self._before = self.read()
        stored = () if self._loaded is None else self._loaded.stored
        self._stored = [(scope, name, scope.get(name, _MISSING)) for scope, name in stored]

    @property
    def loaded_globals(self) -> dict[str, Any]:
        """The globals that captured code loads, by path."""
        rows = () if self._loaded is None else self._loaded.globals
        return {f"global {name}": scope[name] for scope, name in rows if name in scope}

    def contract(
        self, ran: RanCode, touched: Collection[int], remedy: str, weights: Callable[[], Weights]
    ) -> "StateContract | None":
        """Return the contract of a capture that has ended, which touched memory at ``touched``.

        Captures of the same state share one, whose ``weights`` are read once.
        """
        assert self._before is not None
        known = len(self._codes)
        self._codes.update(ran.codes)
        grew = self.learned = len(self._codes) > known
        self.changes = [
            _change(f"global {name}", before, scope.get(name, _MISSING))
            for scope, name, before in self._stored
            if not _alike(before, scope.get(name, _MISSING))
        ]
        if grew:
            self._loaded = LoadedNames(self._codes)
            self._add_cached()
        if grew or self._last is None or not self._last.holds():
            now = self.read()
            written = [f"global {name}" for name in ran.written]
            self._bookkeeping.update(f"len({now.shared.get(path, path)})" for path in written)
            both = self._before.values.keys() & now.values.keys()
            differences = () if grew and self.captures_again else _differences(self._before, now)
            differing = [row for row in differences if row[0] in both or row[1] is _MISSING]
            self.changes += [_change(*row) for row in differing]
            changed = [path for path, _, _ in differing]
            self._bookkeeping.update(changed)  # of a dict, such as a counter of calls, all items
            dicts = {now.dicts[path] for path in changed if path in now.dicts}
            self._bookkeeping.update(f"len({path})" for path in dicts)
            self._last = StateContract(weakref.proxy(self), now)  # a cycle would keep the model
        self._before = None
        last = self._last.state
        if len(last.values) - len(last.weights) > _MOST_COMPARED:
            log.warning(
                "a model has too much state to compare: checks='-state' has no effect on it"
            )
            return None
        shared = None if self._shared is None or grew else self._shared()
        if shared is None or not shared.is_of(last, touched, remedy):
            shared = StateContract(self, last, touched, remedy, weights())
            self._shared = weakref.ref(shared)
        return shared

    def _add_cached(self) -> None:
        """Count functions behind ``lru_cache`` among the code that ran: it may be the cache."""
        while True:
            cached = [f for _, f in self.read().cached if f.__code__ not in self._codes]
            cached = [function for function in cached if not runs_closed(function)]
            if not cached:
                return
            self._codes.update((function.__code__, function.__globals__) for function in cached)
            self._loaded = LoadedNames(self._codes)

    def is_bookkeeping(self, path: str) -> bool:
        """Return whether captured steps change what is at a path, or the list there or around."""
        if not self._bookkeeping:
            return False
        lists = [known[4:-1] for known in self._bookkeeping if known.startswith("len(")]
        inside = (f"{name}{access}" for name in lists for access in "[.")
        items = (f"{name}[" for name in self._bookkeeping)  # of a tuple that steps make anew
        path = path[4:-1] if path.startswith("len(") and path not in self._bookkeeping else path
        is_changed = path in self._bookkeeping or path in lists
        return is_changed or path.startswith((*inside, *items))

    def watch(
        self, contract: "StateContract", holders: Collection[Any], owners: Collection[Owner]
    ) -> set[int]:
        """Let writes to dicts and classes raise :attr:`epoch`; return the ids of other holders.

        So does another dict of an owner.
        """
        epoch, count = self.update(), self._count()
        others, tables = set(), dict[int, Any]()
        for holder in holders:
            dicts = [holder] if type(holder) is dict else raw_memory.dicts_of_class(holder)
            tables.update((id(table), table) for table in dicts)
            if dicts and self._written.keys().isdisjoint(map(id, dicts)):
                self._dicts.update((id(table), table) for table in dicts)
            else:
                others.add(id(holder))
        for row in owners:
            if id(row.attributes) in self._dicts and row.is_same():
                self._owners.setdefault(id(row.attributes), {})[id(row.value)] = row.value
            else:
                others.add(id(row.attributes))
        before, self._held[contract] = self._held.get(contract, ()), tables.keys()
        has_grown, has_lost = self._count() > count, not tables.keys() >= set(before)
        has_dropped = (has_grown or has_lost) and self._release()
        if has_grown or has_dropped:
            self._renew()
        return others if self.epoch == epoch else self.watch(contract, holders, owners)

    def _count(self) -> int:
        return len(self._dicts) + sum(map(len, self._owners.values()))

    def _release(self) -> bool:
        """Drop the dicts of objects that no contract compares any more; return whether any was."""
        held = set[int]().union(*self._held.values())
        dropped = (self._dicts.keys() | self._written.keys()) - held
        for at in dropped:
            for rows in (self._dicts, self._written, self._owners):
                rows.pop(at, None)
        return bool(dropped)

    def update(self) -> int:
        """Raise :attr:`epoch` if a dict was written, which is watched no more; return it."""
        if not self.unwritten():
            self._note_written(self._versions.changed())
            self._renew()
        return self.epoch

    def _note_written(self, dicts: Iterable[Any]) -> None:
        self.epoch += 1
        for holder in dicts:
            self._written[id(holder)] = self._dicts.pop(id(holder))
            self._owners.pop(id(holder), None)

    def _renew(self) -> None:
        before = self._versions
        self._versions = raw_memory.DictVersions(
            tuple(self._dicts.values()), {at: [*rows.values()] for at, rows in self._owners.items()}
        )
        self.unwritten = self._versions.hold
        written = [holder for holder in before.changed() if id(holder) in self._dicts]
        if written:  # by another thread, before there were the new versions
            self._note_written(written)
            self._renew()


class StateContract:
    """What one captured step read of a model: values by identity, tensors by address; weights."""

    # It holds no tensors: the recording holds the memory that it touched. Dicts that are not
    # written are compared by their versions, all at once; their values where one was written.

    def __init__(
        self,
        model: ModelState,
        state: State,
        touched: Collection[int] | None = None,  # where memory begins; None: any
        remedy: str = "",  # what drops the graphs, in messages
        weights: Weights | None = None,
    ) -> None:
        self._model, self._remedy, self._weights = model, remedy, weights
        self._touched = None if touched is None else frozenset(touched)
        self._starts: frozenset[int] | None = None  # where tensors of the state begin
        self._take(state)

    @property
    def weights(self) -> Weights:
        """The weights that are compared."""
        assert self._weights is not None
        return self._weights

    def is_of(self, state: State, touched: Collection[int], remedy: str) -> bool:
        """Return whether this is the contract of a capture of a state, where tensors stayed."""
        if state is not self._state or remedy != self._remedy or self._touched is None:
            return False
        if self._starts is None:
            values = [value for value in state.values.values() if isinstance(value, TensorRead)]
            self._starts = frozenset([value.start for value in values if value.start is not None])
        is_same = self._starts.intersection(touched) == self._starts & self._touched
        return is_same and self._part is None and self._is_same()

    @property
    def state(self) -> State:
        """What is compared."""
        part = self._part
        return self._state if part is None else self._state.joined(part.state)

    def _take(self, state: State) -> None:
        """Compare with this state from now on."""
        self._state, self._rows = state, self._compared(state)
        self._part: _Part | None = None  # what was replaced by equal objects lately
        self._hooks = torch_ops.hooks_registered()
        self._write()

    def _compared(self, state: State) -> State:
        """Return the rows of a state that are compared."""
        rows = State()
        rows.places = [row for row in state.places if self._is_compared(row.path, row.value)]
        rows.sequences = [
            row
            for row in state.sequences
            if self._is_compared(f"len({row[0]})", None) and _may_change(*row[1:])
        ]
        rows.others = [row for row in state.others if self._is_compared(row[0], row[2])]
        rows.objects, rows.owners = state.objects, state.owners
        if self._weights is not None:
            # Of modules that the model does not hold as its own, or that replaced others.
            known = set(map(id, self._weights.tables))
            for path, (table, name) in state.weights.items():
                value = state.values[path]
                if id(table) not in known and self._is_compared(path, value, table):
                    rows.places.append(Place(path, table, name, value, is_opened=False))
        return rows

    def _write(self) -> None:
        """Write the comparison: of unwritten dicts all at once, of others each value."""
        model, reads, weights, rows = self._model, Reads(), self._weights, self._rows
        holders = [row.holder for row in rows.places] + [row[1] for row in rows.objects]
        if weights is not None:
            holders += [*weights.tables, *weights.owners]
        written = model.watch(self, holders, rows.owners)
        self._epoch, name = model.epoch, reads.bound("model", model)
        reads.unless(f"{name}.epoch != {self._epoch} or not {name}.unwritten()")
        if weights is not None:
            weights.compare(reads, written)
        self._compare_rows(reads, rows, written)
        reads.unless(f"hooks_registered() != {reads.bound('hooks', self._hooks)}")
        self._holds = self._others_hold = Contract("", reads, "state").holds
        if self._part is not None:
            reads.unless(f"not {reads.bound('part', self._part.hold)}()")
            self._holds = Contract("", reads, "state").holds

    def _compare_rows(self, reads: Reads, rows: State, written: Collection[int] | None) -> None:
        """Compare values one by one, in dicts those in ``written`` ones; None: all."""
        for row in rows.places:
            is_read = written is None or id(row.holder) in written
            if is_read or isinstance(row.value, TensorRead):
                self._compare(reads, self._expression(reads, row), row.value)
        for _, value, items in rows.sequences:
            self._compare_items(reads, value, items)
        for _, holder, names in rows.objects:
            if written is None or id(holder) in written:
                now = "names" if isinstance(holder, type) else "keys"
                now = f"{now}({reads.bound('object', holder)})"
                reads.unless(f"{now} != {reads.bound('names', names)}")
        for _, value, contents in rows.others:
            now = reads.bound("other", value)
            now = now if isinstance(value, set) else f"contents({now})"
            reads.unless(f"{now} != {reads.bound('before', contents)}")
        reads.layouts()
        for owner in rows.owners:
            if written is None or id(owner.attributes) in written:
                reads.unless(f"not {reads.bound('owner', owner)}.is_same()")
        reads.names |= _FUNCTIONS

    def _compare_items(self, reads: Reads, value: Any, items: tuple[Any, ...]) -> None:
        """Compare the length of a list, and its items."""
        name = reads.bound("list", value)
        reads.unless(f"len({name}) != {len(items)}")
        if len(items) > _FEW and not any(isinstance(item, TensorRead) for item in items):
            before = reads.bound("before", raw_memory.identities(items))
            reads.unless(f"identities((*{name},)) != {before}")
            return
        for index, item in enumerate(items):
            if self._is_touched(item):
                self._compare(reads, f"{name}[{index}]", item)

    def _expression(self, reads: Reads, row: Place) -> str:
        """Return the expression of a place."""
        holder = reads.bound("holder", row.holder)
        if isinstance(row.holder, CellType):
            return f"{holder}.cell_contents"
        if isinstance(row.key, MemberDescriptorType):
            return f"{reads.bound('slot', row.key.__get__)}({holder})"
        if isinstance(row.holder, type):
            return f"{holder}.{row.key}"
        key = reads.bound("key", row.key)
        # A look-up may add an item, such as that of a ``defaultdict``.
        return f"{holder}[{key}]" if type(row.holder) is dict else f"item({holder}, {key}, item)"

    def _compare(self, reads: Reads, expression: str, value: Any) -> None:
        """Compare a value by identity, or as a plain value; hold no tensor."""
        now, known = f"t{len(reads.lines)}", reads.bound("is", value)
        if isinstance(value, TensorRead):
            reads.names[known] = value.reference
            moved = f" or {now}.data_ptr() != {reads.bound('at', value.placed.address)}"
            differs = f"({now} := {expression}) is not {known}()"
            reads.unless(differs if value.start is None else differs + moved)
            tensor = value.reference()
            if value.start is not None and tensor is not None:
                reads.layout(now, tensor, value.placed.layout)
        elif is_plain_value(value):
            differs = f"({now} := {expression}) is not {known}"
            reads.unless(f"{differs} and not same_value({now}, {known})")
        else:
            reads.unless(f"{expression} is not {known}")

    def _is_compared(self, path: str, value: Any, table: Any = None) -> bool:
        """Return whether a value is compared; ``table`` holds it, if it is a weight."""
        weights = self._weights
        is_weight = table is not None and value is not _MISSING  # else an attribute hides it now
        if is_weight and weights is not None and not weights.leave(table):
            return False
        return self._is_touched(value) and not self._model.is_bookkeeping(path)

    def _is_touched(self, value: Any) -> bool:
        """Return whether captured ops have touched a tensor; True of other values."""
        start = value.start if isinstance(value, TensorRead) else None
        return start is None or self._touched is None or start in self._touched

    def _is_same(self) -> bool:
        """Return whether the same objects are held in the same places, or lately equal ones."""
        if self._holds():
            return True
        hooks = torch_ops.hooks_registered()
        if self._model.update() != self._epoch or hooks != self._hooks:
            if not self._has_same_hooks():
                return False
            self._write()
            if self._holds():
                return True
        if self._part is not None and self._part.is_settled():
            self._take(self.state)
        return self._holds() or self._follow()

    def _follow(self) -> bool:
        """Read what replaced objects hold; compare with them from now on if they are equal."""
        state, part = self._state, self._part
        if part is None or not self._others_hold():
            paths = self._replaced()
            if paths is None:
                return False
            state, before = state.cut(paths)
            if any(map(_within(paths), state.shared.values())):
                return False  # a second place needs what only the first one had read
            known = [] if part is None else [row.path for row in part.places]
            before = before if part is None else part.state.joined(before)
            paths = [*paths, *(path for path in known if not _within(paths)(path))]
            places = [row for row in before.places if row.is_opened and row.path in paths]
            if len(places) != len(paths):
                return False
        else:
            places, before = part.places, part.state
        now = self._model.read_places(places, state)
        if not now.complete or now.shared != before.shared:
            return False
        if not all(map(Owner.is_same, before.owners)):
            return False
        if any(
            self._is_compared(path, value, *before.weights.get(path, ())[:1])
            for path, value, _ in _differences(before, now)
        ):
            return False
        reads = Reads()
        self._compare_rows(reads, self._compared(now), None)
        holds = Contract("", reads, "state").holds
        if part is not None and state is self._state:
            part.follow(now, holds)
        else:
            self._state, self._rows = state, self._compared(state)
            self._part = _Part(places, now, holds)
            self._write()
        return self._holds()

    def _replaced(self) -> list[str] | None:
        """Return the places whose value is another object, or holds others; None: not of places."""
        rows = self._rows
        paths = {row.path for row in rows.places if not row.is_same()}
        paths |= {path for path, value, items in rows.sequences if not _same_items(value, items)}
        dicts = [row for row in rows.objects if isinstance(row[1], dict)]
        paths |= {path for path, holder, names in dicts if dict.keys(holder) != names}
        opened = {row.path for row in self._state.places if row.is_opened}
        places = {next(filter(opened.__contains__, _parents(path)), "") for path in paths}
        if not places or "" in places:
            return None
        return [path for path in places if not _within(places - {path})(path)]

    def _has_same_hooks(self) -> bool:
        """Return whether the hook that was registered is another object's."""
        state = self.state
        values = state.values
        for path, module in state.modules:
            if values[_hooks_of(path)] != _number_of_hooks(module):
                return False
        self._hooks = torch_ops.hooks_registered()
        return bool(values[_ALL_HOOKS] == torch_ops.has_global_hooks())

    def holds(self) -> bool:
        """Return whether the state is that of the capture."""
        return (self._is_same() and self._has_same_weights()) or self.first_change() is None

    def _has_same_weights(self) -> bool:
        """Return whether modules have the same weights; slow."""
        state = self.state
        rows = state.weights.items()
        return all([_is_weight(state.values[path], *row) for path, row in rows])

    def first_change(self) -> Change | None:
        """Return the first difference; without one, compare with the present objects from now."""
        state = self.state
        change = next(filter(None, map(Owner.change, state.owners)), None)
        if change is not None:
            return change
        now = self._model.read()
        for path, before, after in _differences(state, now):
            if self._is_compared(path, before, *state.weights.get(path, ())[:1]):
                return _change(path, before, after)
        if self._weights is not None:
            self._weights.move({id(row.attributes): row.value.__dict__ for row in state.owners})
        self._take(now)
        return None

    def check(self, what: str, batch: object) -> None:
        """Raise AddressChangedError or HostValueChangedError where the state differs."""
        if self._holds():
            return
        if self._weights is not None and not self._others_hold():
            self._check_weights(self._weights, what, batch)
        change = None if self._is_same() else self.first_change()
        if change is not None:
            raise change.error(what, batch, "state", self._remedy)

    def _check_weights(self, weights: Weights, what: str, batch: object) -> None:
        """Raise AddressChangedError or HostValueChangedError of a weight that differs."""
        reads = Reads()
        weights.compare(reads, set(map(id, (*weights.tables, *weights.owners))))
        if not Contract("", reads, "weight").holds():
            weights.contract(self._remedy, has_state=True).check(what, batch)


class _Part:
    """What is at some places and below, where equal objects replaced those of the capture.

    Its values are compared one by one, and it is read again where they differ, until no object was
    replaced for a while.
    """

    def __init__(self, places: list[Place], state: State, holds: Callable[[], bool]) -> None:
        self.places = places
        self.follow(state, holds)

    def follow(self, state: State, holds: Callable[[], bool]) -> None:
        """Compare with this state from now on."""
        self.state, self._holds, self._count = state, holds, 0

    def hold(self) -> bool:
        """Return whether the values are the same; False, too, once it is settled."""
        self._count += 1
        return not self.is_settled() and self._holds()

    def is_settled(self) -> bool:
        """Return whether no object was replaced for many replays."""
        return self._count > _SETTLED


def _is_weight(before: Any, table: dict[str, Any], name: str) -> bool:
    """Return whether a table holds a weight with the memory and layout of before."""
    now = table.get(name, _MISSING)
    if type(now) in PLAIN_TENSORS and type(before) is TensorRead and before.start is not None:
        return now.layout is torch.strided and not now.is_nested and before.placed == Placed.of(now)
    return _alike(before, _read_weight(table, name))


def _read_weight(table: dict[str, Any], name: str) -> Any:
    weight = table.get(name, _MISSING)
    return TensorRead.of(weight) if isinstance(weight, torch.Tensor) else weight


def _hooks_of(path: str) -> str:
    return f"{_HOOKS_OF}{path}"


def _same_items(value: Any, items: tuple[Any, ...]) -> bool:
    before = [item.reference() if isinstance(item, TensorRead) else item for item in items]
    now = [*plainly(value).__iter__(value)]
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _may_change(value: Any, items: Collection[Any]) -> bool:
    """Return whether a sequence may be read as something else while it is the same object."""
    return not isinstance(value, tuple) or any(isinstance(item, TensorRead) for item in items)


def _number_of_hooks(module: torch.nn.Module) -> int:
    return sum(map(len, torch_ops.hooks_of(module)))


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(plainly(value).keys(value))
    return frozenset(value) if isinstance(value, set) else array_bytes(value)


def _names_of_class(kind: type) -> frozenset[str]:
    return frozenset(_attributes_of_class(kind))


# What the generated comparison calls.
_FUNCTIONS: dict[str, Any] = {
    "contents": _contents,
    "hooks_registered": torch_ops.hooks_registered,
    "identities": raw_memory.identities,
    "item": dict.get,
    "keys": dict.keys,
    "names": _names_of_class,
    "same_value": same_value,
}


def _differences(before: State, now: State) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, value now) of what differs; new items are none, new attributes are."""
    paths = before.shared.keys() | now.shared.keys()
    moved = {path: (before.shared.get(path, path), now.shared.get(path, path)) for path in paths}
    moved = {path: pair for path, pair in moved.items() if pair[0] != pair[1]}
    for path, (first, second) in moved.items():  # what two places share is noted at the first
        old, new = _below(before, first), _below(now, second)
        for rest, value in old.items():
            if not _alike(value, new.get(rest, _MISSING)):
                yield _named(path, rest), value, new.get(rest, _MISSING)
    # Those of the capture are compared as weights are; others were added later.
    read = {row.path for row in before.places} | before.attributes.keys()
    removed = [path for path, _ in before.modules if path not in now.values and path not in read]
    is_gone = _within([*moved, *removed])
    for path, value in before.values.items():
        after = now.values.get(path, _MISSING)
        if not _alike(value, after) and not (after is _MISSING and is_gone(path)):
            yield path, value, after
    for path, (owner, name) in now.attributes.items():
        if name not in before.names.get(owner, (name,)):
            yield path, _MISSING, now.values.get(path, torch.Tensor)


def _parts(path: str) -> tuple[str, str]:
    """Split what comes before the path of an object, as in ``len(self.items)``."""
    start = next((text for text in ("len(", _HOOKS_OF) if path.startswith(text)), "")
    return start, path.removeprefix(start)


def _below(state: State, first: str) -> dict[tuple[str, str], Any]:
    """Return the values at a path and below it, by what is before it and after it."""
    values = {}
    for path, value in state.values.items():
        start, inner = _parts(path)
        rest = inner.removeprefix(first)
        if len(rest) < len(inner) and rest[:1] in ("", ".", "[", " ", ")"):
            values[start, rest] = value
    return values


def _named(path: str, rest: tuple[str, str]) -> str:
    return f"{rest[0]}{path}{rest[1]}"


def _within(paths: Collection[str]) -> Callable[[str], bool]:
    """Return a function that returns whether a path is one of some paths, or below one."""
    choices = "|".join(map(re.escape, paths)) or "(?!)"
    match = re.compile(rf"{_STARTS}(?:{choices})(?:[.\[ )]|\Z)").match
    return lambda path: match(path) is not None


def _parents(path: str) -> Iterator[str]:
    """Yield a path and those above it, the longest first."""
    path = re.sub(f"^{_STARTS}", "", path)
    ends = [end.start() for end in re.finditer(r"[.\[ )]", path)]
    yield from (path[:end] for end in (len(path), *reversed(ends)))


def _change(path: str, before: Any, after: Any) -> Change:
    if isinstance(before, TensorRead):
        placed = after.placed if isinstance(after, TensorRead) else None
        if placed is None or placed.address != before.placed.address:
            address = None if placed is None else placed.address
            return Change(path, before.placed.address, address, moved=True)
    texts = _text(before), _text(after)
    if texts[0] == texts[1]:
        return Change(path, texts[0], f"another {type(after).__name__} object")
    return Change(path, *texts)


def _text(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, frozenset) and len(value) < _FEW:  # of a set
        return f"{{{', '.join(sorted(map(repr, value)))}}}" if value else "set()"
    if isinstance(value, TensorRead) and isinstance(value.placed.layout[1], type):
        kind, parts = value.placed.layout[1:3]  # a subclass and the tensors in it
        return f"{with_article(kind.__name__)} of {', '.join(map(layout_text, parts))}"
    return layout_text(value.placed if isinstance(value, TensorRead) else value)


def _alike(before: Any, after: Any) -> bool:
    """Return whether a step may read either value; what is in it is compared by its own path."""
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, TensorRead):
        return bool(before.placed == after.placed)
    if is_plain_value(before):
        return same_value(after, before)
    if isinstance(before, FunctionType):
        named = before.__kwdefaults__ or {}, after.__kwdefaults__ or {}
        return (
            before.__code__ is after.__code__
            and _alike_items(before.__defaults__, after.__defaults__)
            and named[0].keys() == named[1].keys()
            and all(_alike(value, named[1][name]) for name, value in named[0].items())
        )
    if isinstance(before, MethodType):
        return _alike(before.__func__, after.__func__)
    if isinstance(before, partial):
        return _alike(before.func, after.func)
    if isinstance(before, (bytes, frozenset)):
        return bool(before == after)
    if isinstance(before, (dict, list, tuple, deque, set, torch.nn.Module)):
        return True
    is_pythons = type(before).__module__.partition(".")[0] in sys.stdlib_module_names
    if is_pythons and not hasattr(before, "__dict__"):  # a range, a Decimal, a function of C
        return bool(before == after)
    return not (isinstance(before, (type, enum.Enum)) or is_closed_object(before))


def _alike_items(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return before is after
    return len(before) == len(after) and all(map(_alike, before, after))
