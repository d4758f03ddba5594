"""The Python source that FX keeps of each graph module. See ``cgcompile/compat/__init__.py``.

The Python that Dynamo puts around a graph. See ``cgcompile/compat/__init__.py``.

Tried on torch 2.11, 2.13 and 2.15.

Dynamo as a function: trace a call without running it. See ``cgcompile/compat/__init__.py``.

What is used of ``torch._dynamo.convert_frame`` is what torch's own ahead-of-time front ends use;
the names are the same in 2.11, 2.13 and 2.15.

What is set around a trace, and put back after it. See ``cgcompile/compat/__init__.py``.

Tried on torch 2.11, 2.13 and 2.15.
"""

import builtins
import dis
import importlib
import linecache
import os
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _loader

from cgcompile.torch_compat.dynamo import (
    known_size,
    size_conditions,
    source_name,
    squeeze_conditions,
)


@contextmanager
def new_sources() -> Iterator[set[str]]:
    """Collect the names of sources that FX generates meanwhile; complete at the end."""
    new: set[str] = set()
    before = set(_loader.eval_cache)
    yield new
    new |= set(_loader.eval_cache) - before


def drop_sources_with(owner: Any, names: Iterable[str]) -> None:
    """Drop sources when ``owner`` is freed. FX and ``linecache`` keep them for ever."""
    weakref.finalize(owner, _drop, tuple(names)).atexit = False


def _drop(names: tuple[str, ...]) -> None:
    for name in names:
        _loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)


_INSTALLED = re.compile(r"__builtins__$|__(compiled_fn|import|builtins_dict)_|___|\w*_\d+_c\d+$")
_OF_ONE_TRACE = re.compile(r"__\w+_\d+$|__compiled_fn_|\w*_\d+_c\d+$")

# Instructions that change nothing but local variables and what has just been made, by name; those
# that name something; and what plain code names. Python 3.11 to 3.13.
_NAMED = frozenset(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"))
_STEPS = (
    "RESUME NOP PRECALL CALL PUSH_NULL COPY SWAP POP_TOP LOAD_CONST LOAD_FAST LOAD_FAST_CHECK "
    "LOAD_FAST_LOAD_FAST STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST DELETE_FAST "
    "BINARY_SUBSCR BUILD_LIST BUILD_TUPLE BUILD_MAP BUILD_CONST_KEY_MAP LIST_EXTEND LIST_APPEND "
    "IS_OP LIST_TO_TUPLE CALL_INTRINSIC_1 JUMP_FORWARD POP_JUMP_FORWARD_IF_FALSE TO_BOOL "
    "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE RETURN_VALUE RETURN_CONST"
)
_PLAIN_STEPS = _NAMED.union(_STEPS.split(" "))
_PLAIN_MODULES = ("torch._dynamo.utils", "torch.autograd.profiler")
_PLAIN_NAMES = frozenset(
    (
        "call_size",
        "call_stride",
        "_is_profiler_enabled",
        "record_pregraph_bytecode_enter",
        "record_pregraph_bytecode_exit",
    )
)


def is_of_one_trace(name: str) -> bool:
    """Whether Dynamo has made up the name of a global for one trace alone."""
    return bool(_OF_ONE_TRACE.match(name)) and not name.startswith("__import_")


class _Globals(dict[str, Any]):
    """The globals of a function as they are at each look, beside names of our own."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        super().__init__()
        self._live = live

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict__"):  # Dynamo's name for it
            return builtins.__dict__
        return self._live[name]


def _helpers(name: str) -> types.ModuleType:
    """What Dynamo's code calls of ``torch._dynamo.utils``, in a module of its own.

    There most of them turn Dynamo off around themselves, which costs more than all else in a call.
    The tensors are plain ones: a subclass has its own trace and no such helpers of its own.
    """
    found = types.ModuleType(name)  # no subclass: Python finds what is in a plain one at once
    own = {
        "call_size": torch.Tensor.size,
        "call_stride": torch.Tensor.stride,
        "call_storage_offset": torch.Tensor.storage_offset,
        # A range of the profiler around a few instructions is left out: ``bool`` takes what these
        # take, does nothing, and costs half of a function that does nothing.
        "record_pregraph_bytecode_enter": bool,
        "record_pregraph_bytecode_exit": bool,
        "__getattr__": lambda other: getattr(importlib.import_module(name), other),
    }
    vars(found).update(own)
    return found


def _module(name: str) -> types.ModuleType:
    return _helpers(name) if name == "torch._dynamo.utils" else importlib.import_module(name)


@dataclass(frozen=True)
class TracedPython:
    """What Dynamo made of the Python around a graph."""

    code: types.CodeType
    modules: Mapping[str, str]
    graph: str | None

    def function(
        self, original: types.FunctionType, compiled: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """The traced call as a function of the same signature, without any guard."""
        names = self.names(original)
        if self.graph is not None:
            names[self.graph] = compiled
        if _globals_read(self.code) <= names.keys():
            names = dict(names)  # nothing of the user's: Python remembers where it found a name
        closure = original.__closure__ if self.code.co_freevars else None
        made = types.FunctionType(
            self.code, names, original.__name__, original.__defaults__, closure
        )
        made.__kwdefaults__ = original.__kwdefaults__
        return made

    @property
    def is_plain(self) -> bool:
        """Whether it reads sizes of its arguments, calls the graph, and does nothing else.

        It changes nothing then, and takes nothing from anywhere but its arguments and the graph.
        """
        known = {name for name, module in self.modules.items() if module in _PLAIN_MODULES}
        for each in dis.get_instructions(self.code):
            name = each.argval if each.opname in _NAMED else None
            plain = name in known or name in _PLAIN_NAMES or name in (None, self.graph)
            if each.opname not in _PLAIN_STEPS or not plain:
                return False
        return self.graph is not None

    def names(self, original: types.FunctionType) -> dict[str, Any]:
        """The globals of the code, but for the graph: the user's as they are at each look."""
        found = _Globals(original.__globals__)
        found.update((n, v) for n, v in original.__globals__.items() if _INSTALLED.match(n))
        found.update((alias, _module(n)) for alias, n in self.modules.items())
        return found


def _globals_read(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    found = {each.argval for each in dis.get_instructions(code) if each.opname in loads}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _globals_read(constant)
    return found


def alike(
    tensors: Sequence[torch.Tensor], layouts: Sequence[tuple[list[int | None], list[int]]]
) -> Callable[..., bool]:
    """What tells whether other tensors are like these, in one call: 0.15 us for two of them.

    Yes means: equal in type, dtype, device, whether they require grad, rank, strides, and in sizes.
    No may also mean another dispatch key, as of a tensor that was made in inference mode.
    """
    sizes: list[Any] = [sizes for sizes, _ in layouts]
    strides: list[Any] = [strides for _, strides in layouts]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    )
    found: Callable[..., bool] = guards.check
    return found


@contextmanager
def compiling(fake_mode: Any, contexts: Any) -> Iterator[None]:
    """The context in which a backend compiles a graph whose values belong to ``fake_mode``."""
    from torch._guards import TracingContext, tracing

    context = TracingContext(fake_mode)
    context.tensor_to_context = contexts
    with measured(), tracing(context):
        yield


@contextmanager
def measured() -> Iterator[None]:
    """torch counts its own seconds, and insists on an outermost span."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    with get_metrics_context(), dynamo_timed("cgcompile"):
        yield


@contextmanager
def patched(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of torch and put them back.

    ``config.patch`` makes a context variable at each call, which the context of the thread keeps.
    """
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


class CannotTrace(Exception):
    """Dynamo cannot make one graph of a call; the text says why."""

    model_raises = False
    what = ""
    hints: tuple[str, ...] = ()
    line: tuple[str, str] | None = None


@dataclass(frozen=True)
class FrozenTensor:
    """A tensor that a trace found outside of the arguments."""

    input: int
    where: str
    tensor: torch.Tensor


class Trace:
    """One call of a function as a graph, with the Python around it."""

    def __init__(self, function: types.FunctionType, output: Any) -> None:
        self.original = function
        self._output = output
        found = output.backend_input
        self.graph: fx.GraphModule | None = None if found is None else found.graph_module
        self.inputs: list[Any] = [] if found is None else list(found.example_inputs)
        self.frozen: tuple[FrozenTensor, ...] = ()
        self._squeezes: list[tuple[str, tuple[str, ...]]] = []
        if self.graph is not None:
            self._squeezes = squeeze_conditions(self.graph.graph)
            self.frozen = _lift(self.graph, len(self.inputs))
            self.inputs += [each.tensor for each in self.frozen]

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What a backend expects around it: Dynamo's context of this trace."""
        found = self._output.backend_input
        assert found is not None
        with compiling(found.fake_mode, found.tensor_to_context):
            yield

    def close(self) -> None:
        """Let what the trace made be freed: nothing is read from it any more.

        Dynamo leaves the graph in the globals of the function. The fake tensors, their sizes and
        the ``ShapeEnv`` refer to each other through C++, where the garbage collector does not look.
        """
        if self._shape_env is not None:
            drop_fakes(self._shape_env)
        if self.python.graph is not None:
            drop_globals(self.original.__globals__, {self.python.graph})

    def function(self, compiled: Callable[..., Any] | None) -> Callable[..., Any]:
        """See :meth:`TracedPython.function`."""
        return self.python.function(self.original, compiled)

    @property
    def python(self) -> TracedPython:
        """The Python around the graph."""
        capture = self._output.graph_capture_output
        found = self._output.backend_input
        return TracedPython(
            capture.bytecode, dict(capture.import_sources), getattr(found, "backend_id", None)
        )

    @property
    def sizes(self) -> dict[str, tuple[int | str, ...]]:
        """The sizes of all tensors that were looked at, by path; those that vary as Python text."""
        return {path: tuple(map(known_size, fake.shape)) for path, fake in self._fakes()}

    @property
    def strides(self) -> dict[str, tuple[int | str, ...]]:
        """Likewise the strides of those that have some."""
        return {
            path: tuple(map(known_size, fake.stride()))
            for path, fake in self._fakes()
            if fake.layout is torch.strided
        }

    def _fakes(self) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self._shape_env.tracked_fakes or ():
            if isinstance(each.fake, torch.Tensor):
                yield _name(each.source), each.fake

    def size_conditions(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return what was assumed of sizes so far: (condition in Python, its symbols), for each."""
        sizes = {size for shape in self.sizes.values() for size in shape}
        return [*size_conditions(self._shape_env, sizes), *self._squeezes]

    @property
    def aliases(self) -> list[tuple[str, str]]:
        """(path, path) of tensors that are the same object, found in two ways."""
        found = []
        for guard in self._output.graph_capture_output.output_graph.guards:
            other = getattr(guard.create_fn, "keywords", {}).get("source_b")
            if other is not None:
                found.append((_name(guard), _name(other)))
        return found

    @property
    def global_tensors(self) -> list[torch.Tensor]:
        """The tensors that were found in globals."""
        found = []
        for guard in self._output.graph_capture_output.output_graph.guards:
            if _name(guard).startswith("G["):
                with suppress(AttributeError, LookupError, TypeError):
                    found.append(eval(_name(guard), {"G": self.original.__globals__}))
        return [each for each in found if isinstance(each, torch.Tensor)]

    @property
    def _shape_env(self) -> Any:
        return self._output.graph_capture_output.output_graph.shape_env

    @property
    def written_globals(self) -> tuple[str, ...]:
        """Global names that the call assigns to."""
        code = self._output.graph_capture_output.bytecode
        stores = ("STORE_GLOBAL", "DELETE_GLOBAL")
        found = {each.argval for each in dis.get_instructions(code) if each.opname in stores}
        return tuple(sorted(found))

    def guards(self, *, sizes_only: bool) -> "Guards":
        """What Dynamo assumed of the call."""
        from torch._dynamo import config

        chosen = _sizes_only if sizes_only else None
        hooks_too = patched(config, {"skip_nnmodule_hook_guards": False})
        with measured(), _as_cannot_trace(), hooks_too:
            graph = self._output.graph_capture_output.output_graph
            return Guards(_weak_guards()(self.original.__code__, graph, guard_filter_fn=chosen))


def current_shape_env() -> Any:
    """Return the ``ShapeEnv`` of the trace whose graph a backend compiles now, or None."""
    context = torch._guards.TracingContext.try_get()
    return getattr(getattr(context, "fake_mode", None), "shape_env", None)


def drop_fakes(shape_env: Any) -> None:
    """Let the fake tensors of a trace that has ended be freed; see :meth:`Trace.close`."""
    shape_env.tracked_fakes = None


def drop_size_caches() -> None:
    """Empty torch's caches of what it worked out of sizes, whose keys hold each ``ShapeEnv``.

    An entry is of use to the trace that made it alone.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for cached in vars(ShapeEnv).values():
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()


def _name(sourced: Any) -> str:
    """The path of a guard or a source: a method once, a property since 2.9."""
    return str(sourced.name() if callable(sourced.name) else sourced.name)


@cache
def _weak_guards() -> Any:
    """Return Dynamo's class of guards without its finalizers.

    A finalizer of each object that is compared by identity would keep the guards as long as that
    object, such as a class or a module-level function, lives.
    """
    from torch._dynamo.guards import CheckFunctionManager

    class WeakGuards(CheckFunctionManager):
        def id_ref(self, obj: object, obj_str: str) -> int:
            with suppress(TypeError):  # no weak reference to it is possible
                self._weakrefs.setdefault(id(obj), weakref.ref(obj))
                vars(self).setdefault("identities", {})[id(obj)] = self._weakrefs[id(obj)]
            return id(obj)

    return WeakGuards


class Guards:
    """What must hold of the locals of a call, so that a trace serves it."""

    def __init__(self, made: Any) -> None:
        self._made = made  # it keeps what the guards look at
        self.hold: Callable[[dict[str, Any]], bool] = made.guard_manager.check
        self.is_alive = True
        this = weakref.ref(self)

        def expire(_: Any) -> None:
            guards = this()
            if guards is not None:
                guards.hold, guards.is_alive = lambda names: False, False

        objects = [reference() for reference in vars(made).get("identities", {}).values()]
        self._identities = [weakref.ref(each, expire) for each in objects if each is not None]

    def first_that_fails(self, names: dict[str, Any]) -> str:
        """The first condition that does not hold, as Python, with the user's line."""
        if not self.is_alive:
            return "an object that was compared by identity was freed"
        found = self._made.guard_manager.check_verbose(names)
        parts = [str(part).strip() for part in found.verbose_code_parts]
        return " ".join(parts[0].split()) if parts else str(found)


def _sizes_only(entries: Any) -> list[bool]:
    return [
        entry.guard_type == "SHAPE_ENV"
        or (entry.guard_type == "TENSOR_MATCH" and _name(entry.orig_guard).startswith(_OUTSIDE))
        for entry in entries
    ]


_OUTSIDE = ("L['self'].", "G[")  # where tensors of modules and globals are found


def traced_function(called: Any) -> tuple[types.FunctionType, Any]:
    """(function, bound object or None) that Dynamo traces for a module, method or function."""
    from torch._dynamo.convert_frame import get_traced_fn

    return get_traced_fn(called)


def spoken_function(called: Any) -> Any:
    """The function whose parameters a caller knows: of a module with hooks its ``forward``."""
    if isinstance(called, torch.nn.Module):
        return traced_function(called.forward)[0]
    return traced_function(called)[0]


def hooks_of(called: Any) -> tuple[Any, ...]:
    """What holds the hooks of a module; it changes as they are added and removed."""
    if not isinstance(called, torch.nn.Module):
        return ()
    return (called._forward_pre_hooks, called._forward_hooks)


def trace_call(
    called: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    freeze: bool,
) -> Trace:
    """Trace a call; nothing is run."""
    from torch._dynamo import config, convert_frame
    from torch._dynamo.eval_frame import set_enable_dynamic

    patches = {
        "install_free_tensors": freeze,
        "capture_scalar_outputs": True,
        "capture_dynamic_output_shape_ops": True,
        "skip_nnmodule_hook_guards": False,
    }
    function = traced_function(called)[0]
    with ExitStack() as stack:
        stack.enter_context(convert_frame.compile_lock)
        stack.enter_context(_as_cannot_trace())
        stack.enter_context(patched(config, patches))
        stack.enter_context(measured())
        stack.enter_context(set_enable_dynamic(False))
        before = set(function.__globals__)
        with new_sources() as sources:
            output = convert_frame.fullgraph_capture(called, args, dict(kwargs))
            trace = Trace(function, output)
        new = {name for name in function.__globals__.keys() - before if is_of_one_trace(name)}
    code = trace.python.code
    drop_sources_with(code, sources)
    weakref.finalize(code, drop_globals, function.__globals__, new).atexit = False
    return trace


def drop_globals(names: dict[str, Any], dropped: Iterable[str]) -> None:
    """Remove globals that Dynamo has installed for one trace."""
    from torch._dynamo.utils import CleanupHook

    disown = getattr(CleanupHook, "disown", None)  # 2.15 keeps who has installed a name
    for name in dropped:
        names.pop(name, None)
        if disown is not None:
            disown(names, name)


@contextmanager
def _as_cannot_trace() -> Iterator[None]:
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import (
        ConstraintViolationError,
        GuardOnDataDependentSymNode,  # not wrapped where a fake of the op itself asks
    )

    try:
        yield
    except (
        TorchDynamoException,
        ConstraintViolationError,
        GuardOnDataDependentSymNode,
    ) as error:
        raise _in_short(error) from error


def _in_short(error: BaseException) -> CannotTrace:
    """The beginning of torch's explanation, and the user's line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    hints = [line for line in lines if line.startswith(("Explanation:", "Hint:"))][:2]
    frames = [line for line in lines if line.startswith('File "')]
    text = "\n  ".join([*lines[:1], *hints, *frames[-1:]]) or type(error).__name__
    found = CannotTrace(text)
    found.model_raises = str(error).lstrip().startswith("Observed exception")
    found.what, found.hints = text.splitlines()[0], tuple(hints)
    stack = [frame for frame in getattr(error, "real_stack", None) or () if frame.filename]
    if stack:
        last = stack[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"
        found.line = where, (last.line or "").strip()
    return found


def _lift(graph: fx.GraphModule, inputs: int) -> tuple[FrozenTensor, ...]:
    """Make placeholders of the tensors that Dynamo has put into a graph, behind all others.

    Pieces take weights as inputs, so that equal layers are equal pieces.
    """
    sources = getattr(graph, "_param_name_to_source", None) or {}
    last = graph.graph.find_nodes(op="placeholder")
    found: list[FrozenTensor] = []
    lifted: dict[str, fx.Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, str(node.target), None)
        if node.target not in sources or not isinstance(tensor, torch.Tensor):
            continue
        if node.target not in lifted:
            source = sources[node.target]
            where = last[-1] if last else graph.graph._root
            with graph.graph.inserting_after(where):
                made = graph.graph.placeholder(str(node.target))
            made.meta = dict(node.meta)
            made._dynamo_source = source
            last = [made]
            lifted[str(node.target)] = made
            found.append(FrozenTensor(inputs + len(found), source_name(made) or "", tensor))
        node.replace_all_uses_with(lifted[str(node.target)])
        graph.graph.erase_node(node)
    for name in lifted:
        delattr(graph, name)
    graph.recompile()
    return tuple(found)


def size_oblivious(on: bool) -> Any:
    """A context in which sizes 0 and 1 of dynamic dimensions are not told from others."""
    from torch.fx.experimental import _config

    return patched(_config, {"backed_size_oblivious": on})


_MARKS = ("_dynamo_", "_has_dynamo", "_specialize_on")


@contextmanager
def marked(dims: list[tuple[torch.Tensor, int, str | None]], unbacked: bool) -> Iterator[None]:
    """Mark dimensions of tensors as dynamic for a trace; the tensors are as before after it."""
    from torch._dynamo.decorators import mark_dynamic, mark_unbacked

    tensors = {id(tensor): tensor for tensor, _, _ in dims}
    before = {key: dict(tensor.__dict__) for key, tensor in tensors.items()}
    try:
        for tensor in tensors.values():
            for mark in [mark for mark in tensor.__dict__ if mark.startswith(_MARKS)]:
                del tensor.__dict__[mark]
        for tensor, dim, name in dims:
            if unbacked:
                mark_unbacked(tensor, dim, shape_id=name)
            else:
                mark_dynamic(tensor, dim)
        yield
    finally:
        for key, tensor in tensors.items():
            tensor.__dict__.clear()
            tensor.__dict__.update(before[key])


@contextmanager
def without_traces_left(called: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which calls are traced for a look: what Dynamo has changed is put back.

    Dynamo puts names into the globals of the function, marks tensors that it finds in modules, and
    counts what it does.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    names = traced_function(called)[0].__globals__
    with convert_frame.compile_lock:  # so that new names and counts are those of this thread
        before = set(names)
        marks = [(tensor, dict(tensor.__dict__)) for tensor in tensors]
        counted = {kind: dict(counts) for kind, counts in counters.items()}
        try:
            yield
        finally:
            for name in [name for name in names if name not in before]:
                if name.startswith("__"):
                    del names[name]
            for tensor, attributes in marks:
                if tensor.__dict__ != attributes:
                    tensor.__dict__.clear()
                    tensor.__dict__.update(attributes)
            for kind in [*counters]:
                counters[kind].clear()  # whoever holds it, holds this one
                counters[kind].update(counted.get(kind, {}))
                if kind not in counted:
                    del counters[kind]


def without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same sizes, strides, type and marks on a device, with no memory behind it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if device.type == "meta" else FakeTensorMode():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        ).requires_grad_(tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made
