"""Which names the code of a step loads: attributes, globals, constants that may be keys.

A replay must find the Python state that captured code read. :class:`RanCode` notes which code runs
while a step is captured; what that code loads by name may have been read, of whatever object. Code
of torch, of Python's own libraries and of cgcompile is not looked into, and neither is an eager
break, which reads what it needs at each replay. A name that code computes is not seen.
"""

import sys
from collections.abc import Callable, Mapping
from dis import get_instructions
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

# Python's own libraries, torch, and what torch is built on.
_CLOSED = sys.stdlib_module_names | {"torch", "functorch", "triton", "numpy", "cgcompile", "jinja2"}
_CLOSED |= {"sympy", "mpmath", "networkx", "typing_extensions", "fsspec", "filelock", "setuptools"}


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


_METHODS_OF_ALL = {"items", "values", "keys", "copy"}
_FUNCTIONS_OF_ALL = {"len", "list", "tuple", "dict", "sorted", "sum", "iter", "enumerate", "zip"}
_OPS_OF_ALL = {"GET_ITER", "DICT_MERGE", "DICT_UPDATE", "LIST_EXTEND", "SET_UPDATE"}
_NO_OPS = {"CACHE", "PRECALL", "PUSH_NULL"}


@lru_cache(maxsize=8192)
def names_read_whole(code: CodeType) -> frozenset[str]:
    """Return the names of dicts that code iterates, measures or unpacks, as ``**kwargs`` does."""
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
    return is_closed(function.__globals__.get("__name__") or "")


class RanCode:
    """Context manager: notes the code that runs in this thread; not in imports or eager breaks."""

    # By a trace function, which is called once a Python call; that of a debugger goes on. What the
    # first capture of a process imports is no code of the model: it does not run again.

    def __init__(self, is_recording: Callable[[], bool] = lambda: True) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}  # with their globals
        self._is_recording = is_recording
        self._containers: dict[str, tuple[Any, list[int]]] = {}  # of globals, before the code ran

    @property
    def written(self) -> list[str]:
        """The globals whose items the code has changed."""
        rows = self._containers.items()
        return [name for name, (value, before) in rows if _contents(value) != before]

    def __enter__(self) -> "RanCode":
        self._caller = id(sys._getframe(1))  # which runs until the end
        self._before: Any = sys.gettrace()
        sys.settrace(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if sys.gettrace() == self._note:  # else the code has begun to debug
            sys.settrace(self._before)

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, scope = frame.f_code, frame.f_globals
        if code not in self.codes and self._is_recording() and not self._is_importing(frame):
            self.codes[code] = scope
            if not is_closed(scope.get("__name__") or ""):
                for name in names_loaded(code)[1] & scope.keys():
                    if isinstance(scope[name], (dict, list)):
                        self._containers.setdefault(name, (scope[name], _contents(scope[name])))
        return None if self._before is None else self._before(frame, event, argument)

    def _is_importing(self, frame: FrameType | None) -> bool:
        while frame is not None and id(frame) != self._caller:
            if frame.f_globals.get("__name__") == "importlib._bootstrap":
                return True
            frame = frame.f_back
        return False


def _contents(value: Any) -> list[int]:
    return [*map(id, value.values() if isinstance(value, dict) else value)]


class LoadedNames:
    """The names that some code loads, and the globals among them."""

    def __init__(self, codes: Mapping[CodeType, dict[str, Any]]) -> None:
        self.codes = codes
        self.names: set[str] = set()
        self.whole: set[str] = set()  # of dicts that are iterated or unpacked
        self.globals: list[tuple[dict[str, Any], str]] = []
        stored: set[tuple[int, str]] = set()
        for code, scope in codes.items():
            module_name = scope.get("__name__") or ""
            if code.co_name == "<module>":
                continue  # an import
            if is_closed(module_name) or module_name.startswith("torch."):
                continue  # a layer reads its own attributes: see :func:`names_of_layer`
            names, global_names = names_loaded(code)
            self.names |= names
            self.whole |= names_read_whole(code)
            self.globals += [(scope, name) for name in global_names if name in scope]
            stored.update((id(scope), name) for name in globals_stored(code))
        self.globals = [row for row in self.globals if (id(row[0]), row[1]) not in stored]


def globals_stored(code: CodeType) -> list[str]:
    """Return the names of globals that code writes itself: bookkeeping."""
    rows = get_instructions(code)
    return [str(row.argval) for row in rows if row.opname == "STORE_GLOBAL"]
