"""``aot_compile`` of torch: what was traced, graphs as bytes, and functions that are loaded.

Note [Graphs as bytes]
torch's ``GraphPickler`` writes graphs with fake tensors and their ``ShapeEnv``. It fails on the
fake mode that bases of views refer to, which the loader replaces anyway, and on tensors inside of
``vmap``, whose values are left out. It loses attributes of nodes: Dynamo's paths of inputs, and the
marks of those that are static, are written beside a graph.
"""

import ast
import enum
import hashlib
import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import fx

from cgcompile.torch_compat import dynamo

# ---------------------------------------------------------------- source


def sources(trace: dynamo.Traced) -> dict[str, str]:
    """Return the digest of each function that a trace read, by "module:name".

    Functions of torch and of the standard library are left out: their versions are compared.
    """
    digests = {}
    for code in _own_code(trace):
        module = inspect.getmodule(code)
        source = None if module is None else _source(module.__name__)
        if module is not None and source is not None:
            name = _name(code)
            # What runs is compared, too: the file may have changed after its import.
            text = _hash(_function_text(source, name)), _hash(_code_text(code))
            digests[f"{module.__name__}:{name}"] = " ".join(text)
    return digests


def live_code(trace: dynamo.Traced) -> dict[str, str]:
    """Return the digests of methods, by "module:class.method", that no source shows.

    These are ``forward`` of the classes of all modules, which a program may have replaced, and
    generated methods, as those of a dataclass.

    Raises:
        ValueError: a function without source is no method of a class in a module.
    """
    model = trace.output.local_scope.get("self")
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    kinds = {f"{type(module).__module__}:{type(module).__qualname__}" for module in modules}
    methods = {f"{kind}.forward" for kind in kinds if not _has_version(kind.partition(":")[0])}
    for code in _own_code(trace):
        module = inspect.getmodule(code)
        if module is None or _source(module.__name__) is None:
            method = _method_of(code)
            if method is None:
                raise ValueError(f"{_name(code)} ({code.co_filename}) has no source file.")
            methods.add(method)
    return {method: digest for method in sorted(methods) if (digest := live_digest(method))}


def live_digest(path: str) -> str | None:
    """Return the digest of the method at "module:class.method"; None without it."""
    try:
        method = pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError):  # also a local class
        return None
    code, defaults = getattr(method, "__code__", None), getattr(method, "__defaults__", None)
    if code is None:
        return _value_text(method)
    return _hash(f"{_code_text(code)} {_value_text(defaults)}")


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
                method = vars(kind).get(code.co_name)
                if getattr(method, "__code__", None) is code:
                    return f"{kind.__module__}:{kind.__qualname__}.{code.co_name}"
    return None


def _name(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # 3.10 has no qualified name


def _has_version(module: str) -> bool:
    """Return whether a module is of torch or of the standard library."""
    package = module.partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


def sources_now(before: Mapping[str, str]) -> dict[str, str]:
    """Return the present digests of functions, as :func:`sources` has returned them."""
    now = {}
    modules = sorted({where.partition(":")[0] for where in before})
    for module, source in ((module, _source(module)) for module in modules):
        codes = set() if source is None else {_hash(text) for text in _code_texts(source)}
        for where, digest in before.items():
            of, _, name = where.partition(":")
            if of == module:
                text = "missing" if source is None else _hash(_function_text(source, name))
                code = digest.partition(" ")[2]
                now[where] = f"{text} {code if code in codes else 'other code'}"
    return now


def _source(module: str) -> str | None:
    """Return the source of a module, which is imported; None without one."""
    try:
        return inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError, TypeError):
        return None


def _function_text(source: str, name: str) -> str:
    """Return the text of the outermost functions of a name; of others the whole source."""
    lines, (outermost, *_) = source.splitlines(), name.split(".<locals>")
    texts = []
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            path = prefix + getattr(child, "name", "")
            if isinstance(child, ast.ClassDef):
                waiting.append((f"{path}.", child))
            elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                waiting.append((prefix, child))
            elif path == outermost:
                first = min(at.lineno for at in (child, *child.decorator_list))
                texts.append("\n".join(lines[first - 1 : child.end_lineno]))
    return "\n".join(sorted(texts)) or source


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


# ---------------------------------------------------------------- globals


def globals_read(trace: dynamo.Traced) -> dict[str, str]:
    """Return the text of each global that a trace read, by "module:expression"."""
    read: dict[str, str] = {}
    for guard in trace.output.guards:
        where = _global(str(guard.name), trace)
        text = None if where is None else global_text(where)
        if where is not None and text is not None:
            read[where] = text
    return read


def _global(name: str, trace: dynamo.Traced) -> str | None:
    """Return "module:expression" of the name of a guard; None for others, and for torch's."""
    if not name.startswith("G["):
        return None
    end = name.index("]")
    first, rest = ast.literal_eval(name[2:end]), name[end + 1 :]
    if first.startswith("__builtins_dict__"):
        return None
    module = trace.modules.get(first)
    if module is None:
        module, rest = str(trace.function.__globals__["__name__"]), f".{first}{rest}"
    return f"{module}:{rest.removeprefix('.')}" if rest else None


def global_text(where: str) -> str | None:
    """Return the text of the value at "module:expression"; None if there is none."""
    module, _, expression = where.partition(":")
    joint = "" if expression.startswith("[") else "."
    try:
        value = eval(f"m{joint}{expression}", {"m": importlib.import_module(module)})
    except Exception:  # properties and items of users
        return None
    return _value_text(value)


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_DEPTH = 8


def _value_text(value: Any, depth: int = 0) -> str:
    """Return the text of a value, which is equal in each process that has this value."""
    if isinstance(value, _PLAIN):
        return repr(value)
    kind = type(value).__qualname__
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, torch.Tensor):
        return f"{kind} {value.dtype} {[*value.shape]} on {value.device}"
    items = None
    if depth < _DEPTH and isinstance(value, Mapping):
        items = [f"{_value_text(k, _DEPTH)}: {_value_text(value[k], depth + 1)}" for k in value]
    elif depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset)):
        items = [_value_text(item, depth + 1) for item in value]
    if items is not None:
        return f"{kind}({', '.join(sorted(items) if isinstance(value, Set) else items)})"
    name = getattr(value, "__qualname__", None)
    return f"{kind} {getattr(value, '__module__', '')}.{name}" if name else f"an object {kind}"


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
    return sorted({str(guard.expr) for guard in guards})


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
