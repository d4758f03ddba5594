"""``aot_compile`` of torch: what was traced, graphs as bytes, and functions that are loaded.

Note [Graphs as bytes]
torch's ``GraphPickler`` writes graphs with fake tensors and their ``ShapeEnv``. It fails on the
fake mode that bases of views refer to, which the loader replaces anyway, and on tensors inside of
``vmap``, whose values are left out. It loses attributes of nodes: Dynamo's paths of inputs, and the
marks of those that are static, are written beside a graph.
"""

import ast
import dataclasses
import enum
import hashlib
import importlib
import inspect
import io
import marshal
import pickle
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from cgcompile.torch_compat import dynamo, expressions

# ---------------------------------------------------------------- source


def sources(trace: dynamo.Traced) -> dict[str, str]:
    """Return the digests of each function that a trace read, by "module:name".

    They are those of its text, of its code, and of its file. Functions of torch and of the standard
    library are left out: their versions are compared.
    """
    digests, files = {}, dict[str, _File | None]()
    for code in _own_code(trace):
        module = inspect.getmodule(code)
        if module is None:
            continue
        if module.__name__ not in files:
            files[module.__name__] = _File.of(module.__name__)
        file = files[module.__name__]
        if file is not None:
            own = _hash(_code_text(code))
            # What runs is compared, too: the file may have changed after its import.
            whole = file.digest if own in file.codes else "-"
            digests[f"{module.__name__}:{_name(code)}"] = f"{file.text(_name(code))} {own} {whole}"
    return digests


def sources_now(before: Mapping[str, str]) -> dict[str, str]:
    """Return the present digests of functions, as :func:`sources` has returned them."""
    now, files = {}, dict[str, _File | None]()
    for where, digests in before.items():
        module, _, name = where.partition(":")
        _, own, whole = digests.split()
        if module not in files:
            files[module] = _File.of(module)
        file = files[module]
        if file is None:
            now[where] = "missing"
        elif file.digest == whole:
            now[where] = digests
        else:
            now[where] = f"{file.text(name)} {own if own in file.codes else 'other'} {whole}"
    return now


class _File:
    """The source of a module."""

    def __init__(self, source: str) -> None:
        self._source, self.digest = source, _hash(source)

    @classmethod
    def of(cls, module: str) -> "_File | None":
        """Return the source of a module, which is imported; None without one."""
        source = _source(module)
        return None if source is None else cls(source)

    @cached_property
    def codes(self) -> set[str]:
        """The digests of the code of all functions."""
        return {_hash(text) for text in _code_texts(self._source)}

    def text(self, name: str) -> str:
        """Return the digest of the text of the outermost functions of a name, or of the file."""
        text = self._texts.get(name.split(".<locals>")[0])
        return self.digest if text is None else _hash(text)

    @cached_property
    def _texts(self) -> dict[str, str]:
        lines, texts = self._source.splitlines(), dict[str, str]()
        waiting: list[tuple[str, ast.AST]] = [("", ast.parse(self._source))]
        while waiting:
            prefix, node = waiting.pop()
            for child in reversed([*ast.iter_child_nodes(node)]):
                path = prefix + getattr(child, "name", "")
                if isinstance(child, ast.ClassDef):
                    waiting.append((f"{path}.", child))
                elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    first = min(at.lineno for at in (child, *child.decorator_list))
                    text = "\n".join(lines[first - 1 : child.end_lineno])
                    texts[path] = "\n".join(filter(None, [texts.get(path), text]))
                elif isinstance(child, ast.stmt):
                    waiting.append((prefix, child))
        return texts


def live_code(trace: dynamo.Traced) -> dict[str, str]:
    """Return the digests of methods, by "module:class.method", that no source shows.

    Such methods are generated, as those of a dataclass, or functions that a program has put into a
    class or a module from elsewhere; then also which modules that the trace names have one.

    Raises:
        ValueError: a function without source is no method of a class in a module.
    """
    codes = [*_own_code(trace)]
    model = trace.output.local_scope.get("self")
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    kinds = {type(module) for module in modules if not _has_version(type(module).__module__)}
    names = {"forward", *(name for code in codes for name in code.co_names)}
    methods = {
        f"{kind.__module__}:{kind.__qualname__}.{name}"
        for kind in kinds
        for name in names
        if any(not _has_version(f.__module__) for f in _functions_in(getattr(kind, name, None)))
    }
    for code in codes:
        module = inspect.getmodule(code)
        if module is not None and _source(module.__name__) is not None:
            methods.add(f"{module.__name__}:{_name(code)}")
        else:
            method = _method_of(code)
            if method is None:
                raise ValueError(f"{_name(code)} ({code.co_filename}) has no source file.")
            methods.add(method)
    return {method: digest for method in sorted(methods) if (digest := live_digest(method))}


def live_digest(path: str) -> str | None:
    """Return the digest of the functions at "module:class.method"; None without any."""
    try:
        method = pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError):  # also a local class
        return None
    texts = [*map(_function_text, _functions_in(method))]
    return _hash(" ".join(texts)) if texts else None


def _function_text(function: types.FunctionType) -> str:
    defaults = (function.__defaults__, function.__kwdefaults__)
    return f"{_code_text(function.__code__)} {_value_text(defaults)}"


def _functions_in(method: Any) -> Iterator[types.FunctionType]:
    """Yield a function, and those that it wraps."""
    waiting, seen = [method], set[int]()
    while waiting:
        function = waiting.pop()
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            yield function
            for cell in function.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    waiting.append(cell.cell_contents)
        elif isinstance(function, (types.MethodType, classmethod, staticmethod)):
            waiting.append(function.__func__)
        elif isinstance(function, property):
            waiting.append(function.fget)


def _own_code(trace: dynamo.Traced) -> Iterator[types.CodeType]:
    """Yield the code that was traced, without torch's and that of the standard library."""
    for code in trace.codes:
        module = inspect.getmodule(code)
        is_known = module is not None and _has_version(module.__name__)
        if not is_known and not code.co_filename.startswith("<frozen "):
            yield code


def _method_of(code: types.CodeType) -> str | None:
    """Return "module:class.method" of the class that has this code as a method."""
    for module in [*sys.modules.values()]:
        for kind in [*getattr(module, "__dict__", {}).values()]:
            if issubclass(type(kind), type):  # ``__class__`` may be a warning
                functions = _functions_in(vars(kind).get(code.co_name))
                if any(function.__code__ is code for function in functions):
                    return f"{kind.__module__}:{kind.__qualname__}.{code.co_name}"
    return None


def _name(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # 3.10 has no qualified name


def _has_version(module: str) -> bool:
    """Return whether a module is of torch or of the standard library."""
    package = module.partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


def _source(module: str) -> str | None:
    """Return the source of a module, which is imported; None without one."""
    try:
        return inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError, TypeError):
        return None


def _code_texts(source: str) -> Iterator[str]:
    """Yield the texts of all functions in a source."""
    waiting = [compile(source, "source", "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        yield _code_text(code)
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]


def _code_text(value: Any) -> str:
    """Return the text of a function without its position, equal in all processes of a Python."""
    if isinstance(value, types.CodeType):
        numbers = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount)
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        constants = [*map(_code_text, value.co_consts)]
        return repr((value.co_name, numbers, value.co_flags, value.co_code, names, constants))
    if isinstance(value, frozenset):  # its order depends on the process
        return repr(sorted(map(_code_text, value)))
    if isinstance(value, tuple):
        return repr([*map(_code_text, value)])
    return f"{type(value).__name__} {value!r}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------- values


# Guards of which the text of a value, without what a container holds, is enough.
_SHALLOW = (
    *("TYPE_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH"),
    *("MODULE_MATCH", "NN_MODULE", "ID_MATCH", "TENSOR_MATCH"),
)
_COMPARED = ("CONSTANT_MATCH", "EQUALS_MATCH")
# Expressions for the other guards, with the arguments of the guard.
_EXPRESSIONS = {
    "DICT_CONTAINS": "{path}.__contains__({key!r})",
    "DICT_NOT_CONTAINS": "{path}.__contains__({key!r})",
    "SET_CONTAINS": "{path}.__contains__({item!r})",
    "SET_NOT_CONTAINS": "{path}.__contains__({item!r})",
    "HASATTR": "hasattr({path}, {attr!r})",
    "NOT_PRESENT_IN_GENERIC_DICT": "vars({path}).__contains__({attr!r})",
    "SEQUENCE_LENGTH": "len({path})",
    "DICT_KEYS_MATCH": "list({path})",
    "EMPTY_NN_MODULE_HOOKS_DICT": "len({path})",
    "DUPLICATE_INPUT": "{path} is {source_b.name}",
}
_GLOBAL = re.compile(r"\bG\[('[^']*')\]")
# An attribute of a class, where Dynamo has found it; a class before may get one of this name.
_OF_CLASS = re.compile(
    r"dict\((type\((?:[^()]|\([^()]*\))*\))(?:\.__mro__\[\d+\])?\.__dict__\)\[('\w+')\]"
)
_NO_OBJECT = "missing"


def values_read(
    trace: dynamo.Traced,
    names: dict[str, Any] | None = None,
    but: Collection[str] = (),
) -> dict[str, str]:
    """Return the text of what a trace read, by Python expression; see :func:`value_at`.

    Args:
        trace: the trace.
        names: its locals ``L``; left out: only globals are read.
        but: the paths of arguments, which each call compares.

    Raises:
        ValueError: a value that is part of the trace cannot be read by an expression.
    """
    read = {path: value_at(path) for path in _environment(trace)}
    for guard in trace.output.guards:
        expression = _expression(guard, trace)
        is_local = "L[" in expression
        if (
            expression
            and not (is_local and names is None)
            and not any(p in expression for p in but)
        ):
            text = value_at(expression, names)
            if text != _NO_OBJECT:
                read[expression] = text
            elif guard.create_fn_name() in _COMPARED:
                raise ValueError(f"{expression} can be read by guards of torch alone.")
    return read


def _environment(trace: dynamo.Traced) -> Iterator[str]:
    """Yield expressions of the variables of the environment that code names: none has a guard."""
    for code in _own_code(trace):
        if {"environ", "getenv"}.intersection(code.co_names):
            names = [name for name in code.co_consts if isinstance(name, str)]
            yield from (f"M['os'].environ.get({name!r})" for name in names if name.isidentifier())


def values_of_self(trace: dynamo.Traced) -> dict[str, str]:
    """Return the text of what a trace read of the model, ``L['self']``, as :func:`values_read`."""
    names = {"self": trace.output.local_scope.get("self")}
    values = values_read(
        trace, names, [f"L[{n!r}]" for n in trace.output.local_scope if n != "self"]
    )
    return {path: text for path, text in values.items() if "L[" in path}


def _expression(guard: Any, trace: dynamo.Traced) -> str:
    """Return the expression whose text a guard fixes; "" for what is compared in another way."""
    path, kind = str(guard.name), guard.create_fn_name()
    if not path or "__builtins_dict__" in path:
        return ""
    arguments = getattr(guard.create_fn, "keywords", {})
    try:
        text = _EXPRESSIONS.get(kind, "{path}").format(path=path, **arguments)
    except (AttributeError, KeyError, IndexError):
        text = path

    names = trace.function.__globals__

    def in_module(match: re.Match[str]) -> str:
        name = ast.literal_eval(match[1])
        if name in trace.modules:
            return f"M[{trace.modules[name]!r}]"
        if dynamo.is_of_one_trace(name) and name in names:  # its name has an address
            with suppress(ValueError):
                module, _, rest = _path_of(names[name]).partition(":")
                return f"M[{module!r}].{rest}" if rest else f"M[{module!r}]"
        return f"vars(M[{names['__name__']!r}])[{name!r}]"

    text = _OF_CLASS.sub(r"_of_class(\1, \2)", _GLOBAL.sub(in_module, text))
    return f"_shallow({text})" if kind in _SHALLOW else text


class _Modules(dict[str, types.ModuleType]):
    def __missing__(self, name: str) -> types.ModuleType:
        return importlib.import_module(name)


def value_at(expression: str, names: dict[str, Any] | None = None) -> str:
    """Return the text of an expression of modules ``M``, by name, and of locals ``L``."""
    scope: dict[str, Any] = {"L": names or {}, "M": _Modules(), "_shallow": _Shallow}
    scope["_of_class"] = inspect.getattr_static
    try:
        value = eval(expression, scope)
    except Exception:  # properties and items of users; paths that guards alone can read
        return _NO_OBJECT
    if isinstance(value, _Shallow):
        return _value_text(value.value, deep=False)
    text = _value_text(value)
    return text if len(text) <= _LONGEST else f"{type(value).__qualname__} {_hash(text)}"


class _Shallow(NamedTuple):
    value: Any


def readable(expression: str) -> str:
    """Return an expression in the form that a user would write."""
    text = re.sub(r"_shallow\((.*)\)$", r"\1", expression)
    text = re.sub(r"_of_class\((.*?), '(\w+)'\)", r"\1.\2", text)
    text = re.sub(r"vars\(M\['([^']*)'\]\)\['([^']*)'\]", r"\1.\2", text)
    text = re.sub(r"\b[LM]\['([^']*)'\]", r"\1", text)
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DEPTH, _LONGEST = 8, 200


def _value_text(value: Any, depth: int = 0, deep: bool = True) -> str:
    """Return the text of a value, which is equal in each process that has this value."""
    if isinstance(value, _PLAIN):
        return repr(value)
    kind = type(value).__qualname__
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_contiguous()
        strides = f" with strides {[*value.stride()]}" if strided else ""
        return f"{kind} {value.dtype} {[*value.shape]}{strides} on {value.device}"
    items = None
    if deep and depth < _DEPTH and isinstance(value, Mapping):
        items = [f"{_value_text(k, _DEPTH)}: {_value_text(value[k], depth + 1)}" for k in value]
    elif deep and depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        items = [_value_text(item, depth + 1) for item in value]
    if items is not None:
        return f"{kind}({', '.join(sorted(items) if isinstance(value, Set) else items)})"
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if name:
        own = isinstance(value, types.FunctionType) and not _has_version(str(module))
        code = f" {_hash(_code_text(value.__code__))}" if own else ""
        return f"{kind} {module or ''}.{name}{code}"
    return f"an object {type(value).__module__}.{kind}"


def closure(function: types.FunctionType) -> dict[str, str]:
    """Return the text of each variable that a function reads from functions around it."""
    texts = {}
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        with suppress(ValueError):  # an empty cell
            texts[name] = _value_text(cell.cell_contents)
    return texts


# ---------------------------------------------------------------- graphs as bytes

_META = ("example_value", "stack_trace", "custom")  # what this package reads of nodes


@cache
def _pickler() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    class Pickler(GraphPickler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.options.ops_filter = None  # a loader finds all ops by name
            self.options.node_metadata_key_filter = _META.__contains__

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FakeTensorMode) or _is_of_a_transform(obj):
                return _nothing, ()
            return super().reducer_override(obj)

    return Pickler


def _nothing() -> None:
    return None


def _is_of_a_transform(value: Any) -> bool:
    """Return whether a value is a tensor inside of ``vmap`` or ``grad``, which has no bytes."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and torch._C._functorch.is_functorch_wrapped_tensor(value)


def graph_bytes(gm: fx.GraphModule) -> bytes:
    """Return a graph of Dynamo as bytes; raises what pickle raises."""
    copy = dynamo.copied(gm)
    copy.meta = {}
    inputs = [
        (dynamo.source_name(node), dynamo.is_static_input(node))
        for node in copy.graph.find_nodes(op="placeholder")
    ]
    data: bytes = _pickler().dumps((copy, inputs))
    return data


def graph_of(data: bytes) -> tuple[fx.GraphModule, Any]:
    """Return (graph, its fake mode) of the bytes of :func:`graph_bytes`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    loaded: Any = GraphPickler.loads(data, fake_mode)
    gm, inputs = loaded
    gm.recompile()
    for node, (name, is_static) in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if name is not None:
            dynamo.set_source_name(node, name)
        if is_static:
            dynamo.mark_static(node)
    return gm, fake_mode


@contextmanager
def compiling(fake_mode: Any) -> Iterator[None]:
    """Enter the context in which a backend compiles a graph that was loaded."""
    from torch._guards import TracingContext, tracing

    with dynamo.measured(), tracing(TracingContext(fake_mode)):
        yield


def size_guards(shape_env: Any) -> list[str]:
    """Return what a trace, or a compiler, has assumed of sizes."""
    guards = () if shape_env is None else shape_env.guards
    return sorted({str(expressions.inclusive(guard.expr)) for guard in guards})


# ---------------------------------------------------------------- traces


@dataclasses.dataclass
class SavedTrace:
    """What a :class:`dynamo.Trace` has beside its graph, as data, for traces with bound weights."""

    code: bytes
    modules: Mapping[str, str]
    objects: Mapping[str, str]  # "module:name" of what Dynamo has made a global, by that
    graph: str | None
    frozen_paths: tuple[str, ...]
    sizes: Mapping[str, tuple[int | str, ...]]
    strides: Mapping[str, tuple[int | str, ...]]
    offsets: Mapping[str, str]
    numbers: Mapping[str, str]
    conditions: list[tuple[str, tuple[str, ...]]]
    aliases: list[tuple[str, str]]
    constants: list[str]
    global_paths: tuple[str, ...]
    function_modes: bool = False
    original: Any = None  # the function, in this process
    frozen: tuple[dynamo.FrozenTensor, ...] = ()
    global_tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, trace: dynamo.Trace, sizes: Mapping[str, tuple[int | str, ...]]) -> "SavedTrace":
        """Return the data of a trace; raise ValueError if a part of it has no lasting form."""
        python, names = trace.python, trace.original.__globals__
        return cls(
            marshal.dumps(python.code),
            dict(python.modules),
            {name: _path_of(names[name]) for name in sorted(python.installed())},
            python.graph,
            tuple(path for path, _ in trace.frozen),
            sizes,
            trace.strides,
            trace.offsets,
            trace.numbers,
            trace.size_conditions(),
            trace.aliases,
            trace.constants,
            tuple(trace.global_tensors),
        )

    def imported(self) -> dict[str, types.ModuleType]:
        """Return the modules, by the names that the trace has for them."""
        return {name: importlib.import_module(module) for name, module in self.modules.items()}

    def bind(self, function: Any, scope: dict[str, Any]) -> None:
        """Take the function, and the tensors at the paths, of this process."""
        self.original = function
        self.frozen = tuple((path, eval(path, dict(scope))) for path in self.frozen_paths)
        self.global_tensors = {path: eval(path, dict(scope)) for path in self.global_paths}

    @property
    def python(self) -> dynamo.TracedPython:
        """The Python around the graph."""
        objects = {name: pkgutil.resolve_name(path) for name, path in self.objects.items()}
        return dynamo.TracedPython(marshal.loads(self.code), self.modules, self.graph, objects)

    def size_conditions(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (condition in Python, its symbols) of what was assumed of sizes."""
        return self.conditions

    def guards(self, *, sizes_only: bool) -> Any:
        """Raise: guards of Dynamo are not saved."""
        raise NotImplementedError


def _path_of(value: Any) -> str:
    """Return "module:name" of a module, class or function; raise ValueError without one."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    with suppress(AttributeError, ImportError, ValueError):
        if pkgutil.resolve_name(path) is value:
            return path
    raise ValueError(f"it reads {_kind(value)}, which has no name in a module.")


# ---------------------------------------------------------------- calls


def call_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return the arguments of a call as bytes: of tensors, all but what is in them.

    Raises:
        ValueError: an argument that only the same object would equal.
    """
    stream = io.BytesIO()
    pickler = _CallPickler(stream)
    pickler.dump((args, dict(kwargs)))
    return stream.getvalue()


class _CallPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided
        own = [name for name in vars(obj) if not name.startswith(dynamo.MARKS)]
        if not plain or obj.is_conj() or obj.is_neg() or own:
            what = f"has attributes ({', '.join(own)})" if own else "is no plain tensor"
            raise ValueError(f"an argument, a {type(obj).__name__}, {what}.")
        for number, known in enumerate(self._tensors):
            if known is obj:
                return number
        self._tensors.append(obj)
        form = obj.dtype, obj.device, tuple(obj.shape), obj.stride(), obj.requires_grad
        return len(self._tensors) - 1, type(obj), form

    def reducer_override(self, obj: Any) -> Any:
        plain = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice)
        if isinstance(obj, (*plain, range, complex, type, types.BuiltinFunctionType)):
            return NotImplemented
        if isinstance(obj, tuple) and hasattr(obj, "_fields"):
            return NotImplemented
        raise ValueError(f"an argument is {_kind(obj)}, which only the same object equals.")


def _kind(value: Any) -> str:
    return f"an object of class {type(value).__name__}"


class _CallUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors: list[torch.Tensor] = []

    def persistent_load(self, key: Any) -> Any:
        if isinstance(key, int):
            return self._tensors[key]
        _, kind, (dtype, device, sizes, strides, requires_grad) = key
        tensor = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        if kind is torch.nn.Parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        self._tensors.append(tensor.requires_grad_(requires_grad))
        return self._tensors[-1]


def call_of(data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of the bytes of :func:`call_bytes`, with uninitialised tensors."""
    call: tuple[tuple[Any, ...], dict[str, Any]] = _CallUnpickler(data).load()
    return call


# ---------------------------------------------------------------- functions


def register(kind: type) -> None:
    """Declare a type of results of a backend that ``aot_compile`` can save."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    SerializableCallable.register(kind)


def load_function(data: bytes, names: dict[str, Any]) -> tuple[Callable[..., Any], Any]:
    """Return (function, compiled graph) of what ``save_compiled_function`` has written.

    ``names`` are the globals of the function that was traced.
    """
    from torch._dynamo.aot_compile import AOTCompiledFunction

    function = AOTCompiledFunction.deserialize(data, names)
    return function, function._artifacts.compiled_fn


def failed_guard(error: RuntimeError) -> str | None:
    """Return the guard that a call of a loaded function failed; None if it failed otherwise."""
    text = str(error)
    if not text.startswith("GuardManager check failed"):
        return None
    parts = re.search(r"verbose_code_parts=(\[.*\])", text)
    return text if parts is None else ", ".join(map(str.strip, ast.literal_eval(parts[1])))
