"""Which names the code of a step loads: attributes, globals, constants that may be keys.

A replay must find the Python state that captured code read. What code loads is found without
running it: :class:`ReachedCode` follows functions to what they name, and methods by their names.
So it finds too much rather than too little: a name that is loaded anywhere counts for all objects.
Not followed is code of torch, of Python's own libraries and of cgcompile; an eager break is code of
cgcompile, and reads what it needs at each replay.
"""

import sys
from collections.abc import Callable, Iterator
from dis import get_instructions
from functools import cached_property, lru_cache
from types import CodeType, FunctionType
from typing import Any

from cgcompile.graphs.reads import cells_of

_CLOSED = sys.stdlib_module_names | {"torch", "triton", "numpy", "cgcompile"}
_BY_NAME = frozenset(("getattr", "vars", "attrgetter", "__dict__", "__getattribute__"))
# Methods that make, copy or show an object.
_CREATION = frozenset(("__init__", "__new__", "__init_subclass__", "__post_init__", "__del__"))
_CREATION |= {"__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__"}
_CREATION |= {"__setstate__", "__deepcopy__", "__copy__"}


@lru_cache(maxsize=8192)
def names_loaded(code: CodeType) -> tuple[frozenset[str], frozenset[str], bool]:
    """Return the names that code loads, those of globals, and whether it may load any name."""
    names: set[str] = set()
    global_names: set[str] = set()
    constants: set[str] = set()
    any_name = False
    for instruction in get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind.startswith("LOAD_") and isinstance(value, str):
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                global_names.add(value)
            names.add(value)
        elif kind == "IMPORT_FROM":
            names.add(value)
        elif kind == "LOAD_CONST" and isinstance(value, CodeType):
            inner = names_loaded(value)
            names |= inner[0]
            global_names |= inner[1]
            any_name |= inner[2]
        elif isinstance(value, tuple):  # keys of a dict, and of keyword arguments
            constants.update(item for item in value if isinstance(item, str))
    constants.update(item for item in code.co_consts if isinstance(item, str))
    words = {item for item in constants if item.isidentifier()}
    any_name |= bool(names & _BY_NAME) and not words
    return frozenset(names | constants), frozenset(global_names), any_name


def is_closed(module_name: str) -> bool:
    """Return whether code of a module is not followed; layers of torch are."""
    if module_name.startswith("torch.nn.modules."):
        return module_name == "torch.nn.modules.module"
    return module_name.partition(".")[0] in _CLOSED


@lru_cache(maxsize=256)
def names_of_layer(kind: Any) -> frozenset[str]:
    """Return the names that the code of a layer of torch loads of itself."""
    names: set[str] = {"forward"}
    todo = ["forward"]
    for method in todo:  # grows meanwhile
        function = getattr(kind, method, None)
        if isinstance(function, FunctionType) and not runs_closed(function):
            new = names_loaded(function.__code__)[0] - names
            names |= new
            todo += new
    return frozenset(names)


def runs_closed(function: FunctionType) -> bool:
    """Return whether the code of a function is not followed, whatever it wraps."""
    return is_closed(function.__globals__.get("__name__") or "")


class ReachedCode:
    """The code that a step may run, and the names that it loads."""

    def __init__(self, on_global: Callable[[dict[str, Any], str], None]) -> None:
        self._on_global = on_global  # called for each global that is loaded
        self._names: set[str] = set()
        self._all = False  # a name may be computed
        self._codes: set[CodeType] = set()
        self._kinds: set[type] = set()
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._ready: list[Callable[[], None]] = []

    def when_loaded(self, name: str, action: Callable[[], None]) -> None:
        """Call ``action`` in :meth:`run`, once code that loads ``name`` is reached."""
        if self._all or name in self._names:
            self._ready.append(action)
        else:
            self._waiting.setdefault(name, []).append(action)

    def load(self, *names: str) -> None:
        """Note names as loaded."""
        for name in set(names) - self._names:
            self._names.add(name)
            self._ready += self._waiting.pop(name, ())

    def run(self) -> None:
        """Call what waits for names that are loaded, and what that adds."""
        while self._ready:
            self._ready.pop()()

    def is_loaded(self, name: str) -> bool:
        return self._all or name in self._names

    def function(self, function: FunctionType) -> None:
        """Follow a function."""
        self.code(function.__code__, function.__globals__)

    def code(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Follow code with these globals."""
        if code in self._codes:
            return
        self._codes.add(code)
        module_name = scope.get("__name__") or ""
        if is_closed(module_name):
            return
        names, global_names, any_name = names_loaded(code)
        if module_name.startswith("torch."):
            return  # a layer reads its own attributes: see :func:`names_of_layer`
        if any_name and not self._all:
            self._all = True
            self._ready += [action for waits in self._waiting.values() for action in waits]
            self._waiting.clear()
        self.load(*names)
        for name in global_names & scope.keys():
            self._on_global(scope, name)

    def methods(self, kind: type) -> Iterator[tuple[str, FunctionType]]:
        """Yield the functions of a class by name; none a second time."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        for base in kind.__mro__:
            for name, value in () if is_closed(base.__module__) else vars(base).items():
                yield from ((name, function) for function in functions_of(value))


def functions_of(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that an attribute of a class runs, through decorators."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    todo, seen = [value], set()
    for function in todo:  # grows meanwhile
        if id(function) in seen:
            continue
        seen.add(id(function))
        if isinstance(function, FunctionType):
            if function.__globals__.get("__name__", "").startswith("cgcompile."):
                continue  # such as an eager break
            yield function
            todo += [cell.cell_contents for cell in cells_of(function).values()]
        if callable(function) and not isinstance(function, type):
            todo.append(getattr(function, "__wrapped__", None))


def is_always_run(name: str) -> bool:
    """Return whether a method of this name may run without code that names it."""
    return name.startswith("__") and name.endswith("__") and name not in _CREATION
