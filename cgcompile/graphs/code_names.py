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
from threading import get_ident
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

_monitoring: Any = getattr(sys, "monitoring", None)  # since Python 3.12

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
    return is_closed(function.__globals__.get("__name__") or "")


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
        return [name for name, (value, before) in rows if _contents(value) != before]

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
            if not is_closed(scope.get("__name__") or ""):
                for name in names_loaded(code)[1] & scope.keys():
                    if isinstance(scope[name], (dict, list)):
                        self._containers.setdefault(name, (scope[name], _contents(scope[name])))

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
