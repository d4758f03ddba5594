"""Dynamo as a function: trace a call without running it, see :func:`trace_call`.

It uses the parts of ``torch._dynamo.convert_frame`` that torch's ahead-of-time front ends use. A
:class:`Trace` has the graph, the Python around it (:class:`TracedPython`) and its :class:`Guards`.
The rule: what a trace sets or leaves in torch, in functions and in tensors is restored after it.
"""

import builtins
import dis
import importlib
import inspect
import linecache
import os
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _loader

from cgcompile.torch_compat.dynamo import (
    guard_signs_of_zeros,
    is_constant,
    known_size,
    must_be_constant,
    number_text,
    size_conditions,
    squeeze_conditions,
)
from cgcompile.torch_compat.repeated_regions import guard_repeated_regions
from cgcompile.torch_compat.torch_settings import (
    function_mode_stack,
    traced_function_modes,
    without_function_modes,
)


@contextmanager
def new_sources() -> Iterator[set[str]]:
    """Collect the names of sources that FX generates within it; complete at the end."""
    new: set[str] = set()
    before = set(_loader.eval_cache)
    yield new
    new |= set(_loader.eval_cache) - before


def drop_sources_with(owner: Any, names: Iterable[str]) -> None:
    """Drop sources when ``owner`` is freed: FX and ``linecache`` never do."""
    weakref.finalize(owner, _drop, tuple(names)).atexit = False


def _drop(names: tuple[str, ...]) -> None:
    for name in names:
        _loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)


_INSTALLED = re.compile(r"__builtins__$|__(compiled_fn|import|builtins_dict)_|___|\w*_\d+_c\d+$")
_OF_ONE_TRACE = re.compile(r"__\w+_\d+$|__compiled_fn_|\w*_\d+_c\d+$")

# Instructions that change only local variables and new objects; those with a name; and the names
# that plain code reads. Python 3.11 to 3.13.
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
_PLAIN_NAMES = frozenset(("call_size", "call_stride", "_is_profiler_enabled"))
_PLAIN_NAMES |= {"record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit"}


def is_of_one_trace(name: str) -> bool:
    """Return whether Dynamo generated the name of a global for one trace."""
    return bool(_OF_ONE_TRACE.match(name)) and not name.startswith("__import_")


class _Globals(dict[str, Any]):
    """The live globals of a function, and names of our own before them."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        super().__init__()
        self._live = live

    def __missing__(self, name: str) -> Any:
        if name.startswith("__builtins_dict__"):  # Dynamo's name for it
            return builtins.__dict__
        return self._live[name]


def _helpers(name: str) -> types.ModuleType:
    """Return a module with cheap versions of ``torch._dynamo.utils`` that Dynamo's code calls."""
    # torch's versions disable Dynamo around themselves, which costs more than the rest of a call.
    # Ours suffice for plain tensors; a subclass has a trace of its own.
    module = types.ModuleType(name)  # not a subclass: attributes of a plain module are faster
    own = {
        "call_size": torch.Tensor.size,
        "call_stride": torch.Tensor.stride,
        "call_storage_offset": torch.Tensor.storage_offset,
        # No profiler range around a few instructions: ``bool`` accepts the same arguments, has no
        # effect, and costs half of an empty function.
        "record_pregraph_bytecode_enter": bool,
        "record_pregraph_bytecode_exit": bool,
        "__getattr__": lambda other: getattr(importlib.import_module(name), other),
    }
    vars(module).update(own)
    return module


def _module(name: str) -> types.ModuleType:
    return _helpers(name) if name == "torch._dynamo.utils" else importlib.import_module(name)


@dataclass(frozen=True)
class TracedPython:
    """The Python that Dynamo generated around a graph."""

    code: types.CodeType  # takes the arguments of the function, and calls the graph
    modules: Mapping[str, str]  # names of modules, by the globals that refer to them
    graph: str | None  # the global name of the graph; None without a graph

    def function(
        self, original: types.FunctionType, compiled: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """Return the traced call as a function of the same signature, without guards."""
        # ``compiled`` takes the inputs of the graph that are not frozen.
        # Those of the user stay live.
        names: dict[str, Any] = _Globals(original.__globals__)
        names.update((n, v) for n, v in original.__globals__.items() if _INSTALLED.match(n))
        names.update((alias, _module(n)) for alias, n in self.modules.items())
        if self.graph is not None:
            names[self.graph] = compiled
        if _globals_read(self.code) <= names.keys():
            names = dict(names)  # no globals of the user: Python caches lookups in a plain dict
        closure = original.__closure__ if self.code.co_freevars else None
        function = types.FunctionType(
            self.code, names, original.__name__, original.__defaults__, closure
        )
        function.__kwdefaults__ = original.__kwdefaults__
        return function

    @property
    def is_plain(self) -> bool:
        """Whether it only reads its arguments, their sizes and the graph, and has no effects."""
        known = {name for name, module in self.modules.items() if module in _PLAIN_MODULES}
        for step in dis.get_instructions(self.code):
            name = step.argval if step.opname in _NAMED else None
            plain = name in known or name in _PLAIN_NAMES or name in (None, self.graph)
            if step.opname not in _PLAIN_STEPS or not plain:
                return False
        return self.graph is not None


def _globals_read(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {step.argval for step in dis.get_instructions(code) if step.opname in loads}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_read(constant)
    return names


@contextmanager
def measured() -> Iterator[None]:
    """Open the outermost span of torch's timings, which torch requires."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    with get_metrics_context(), dynamo_timed("cgcompile"):
        yield


@contextmanager
def patched(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of torch and restore them; ``config.patch`` leaks context variables."""
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


class CannotTrace(Exception):
    """Dynamo cannot make one graph of a call; the text is the reason."""

    model_raises = False  # whether the reason is that the Python code of the model raises
    becomes_several = True  # whether torch.compile makes several graphs of the call
    what = ""  # reason in one line
    hints: tuple[str, ...] = ()  # torch's hints, a line each
    line: tuple[str, str] | None = None  # user's line: ("model.py:41 in forward", "y = ...")


class CannotBind(Exception):
    """torch cannot bind the tensors that a trace reads; the text is the reason."""


# A tensor that is no argument, with its path, a Python expression over ``L`` (locals) and ``G``.
FrozenTensor = tuple[str, torch.Tensor]


class Trace:
    """One call of a function as a pre-grad graph, or None without tensor ops, and its Python."""

    # ``inputs`` are what the graph was traced with, the ``frozen`` tensors last.

    def __init__(self, function: types.FunctionType, output: Any) -> None:
        self.original = function  # a bound object is its first argument
        self._output = output  # Dynamo's OutputGraph
        # Whether the graph has the effects of torch function modes.
        self.function_modes = bool(self._graph_output.torch_function_mode_stack)
        traced = output.backend_input
        self.graph: fx.GraphModule | None = None if traced is None else traced.graph_module
        self.inputs: list[Any] = [] if traced is None else list(traced.example_inputs)
        self.frozen: tuple[FrozenTensor, ...] = ()
        self._squeezes: list[tuple[str, tuple[str, ...]]] = []
        if self.graph is not None:
            guard_repeated_regions(self.graph, self._graph_output)
            self._squeezes = squeeze_conditions(self.graph.graph)
            self.frozen = _lift(self.graph)
            self.inputs += [tensor for _, tensor in self.frozen]

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enter Dynamo's context of this trace, in which a backend compiles the graph."""
        from torch._guards import TracingContext, tracing

        traced = self._output.backend_input
        context = TracingContext(traced.fake_mode)
        context.tensor_to_context = traced.tensor_to_context
        with measured(), tracing(context), without_function_modes():
            yield

    def close(self) -> None:
        """Let the objects of the trace be freed; it must not be read later."""
        # Dynamo leaves the graph in the globals of the function. The fake tensors, their sizes and
        # the ``ShapeEnv`` form a cycle through C++, which the garbage collector does not follow.
        if self._shape_env is not None:
            drop_fakes(self._shape_env)
        if self.python.graph is not None:
            drop_globals(self.original.__globals__, {self.python.graph})

    @property
    def python(self) -> TracedPython:
        """The Python around the graph."""
        capture, traced = self._output.graph_capture_output, self._output.backend_input
        graph = getattr(traced, "backend_id", None)
        return TracedPython(capture.bytecode, dict(capture.import_sources), graph)

    @property
    def sizes(self) -> dict[str, tuple[int | str, ...]]:
        """The sizes of all tensors that the trace read, by path; dynamic ones as Python text."""
        return {path: tuple(map(known_size, fake.shape)) for path, fake in self._fakes()}

    @property
    def strides(self) -> dict[str, tuple[int | str, ...]]:
        """Return the strides of all tensors that the trace read and that have strides, by path."""
        return {
            path: tuple(map(known_size, fake.stride()))
            for path, fake in self._fakes()
            if fake.layout is torch.strided
        }

    @property
    def offsets(self) -> dict[str, str]:
        """The offsets into memory that are dynamic, by path."""
        offsets = {
            path: known_size(fake.storage_offset())
            for path, fake in self._fakes()
            if fake.layout is torch.strided
        }
        return {path: offset for path, offset in offsets.items() if isinstance(offset, str)}

    def _fakes(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tracked in self._shape_env.tracked_fakes or ():
            if isinstance(tracked.fake, torch.Tensor):
                yield str(tracked.source.name), tracked.fake

    @property
    def numbers(self) -> dict[str, str]:
        """The numbers of the call that are inputs of the trace, by path, as Python text."""
        numbers = self._symbolic_numbers()
        return {path: number_text(n) for path, n in numbers if n.node.expr.free_symbols}

    @property
    def constants_to_be(self) -> set[str]:
        """Numbers to specialise in the next attempt."""
        return {path for path, number in self._symbolic_numbers() if must_be_constant(number)}

    def _symbolic_numbers(self) -> Iterator[tuple[str, torch.SymInt | torch.SymFloat]]:
        for tracked in self._shape_env.tracked_fakes or ():
            number, source = tracked.fake, tracked.source
            if isinstance(number, torch.Tensor):
                number, source = getattr(number, "item_memo", None), getattr(source, "base", None)
            if isinstance(number, (torch.SymInt, torch.SymFloat)) and source is not None:
                yield str(source.name), number

    def size_conditions(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (condition in Python, its symbols) of what was assumed of sizes so far."""
        sizes = {size for shape in self.sizes.values() for size in shape}
        numbers = set(self.numbers.values())
        return [*size_conditions(self._shape_env, sizes, numbers), *self._squeezes]

    @property
    def aliases(self) -> list[tuple[str, str]]:
        """(path, path) of each tensor that the trace read by two paths."""
        pairs = []
        for guard in self._graph_output.guards:
            other = getattr(guard.create_fn, "keywords", {}).get("source_b")
            if other is not None:
                pairs.append((str(guard.name), str(other.name)))
        return pairs

    @property
    def constants(self) -> list[str]:
        """The paths of the values that are part of the trace."""
        guards = self._graph_output.guards
        return [str(guard.name) for guard in guards if is_constant(guard)]

    @property
    def global_tensors(self) -> list[torch.Tensor]:
        """The tensors that the trace read from globals."""
        values = []
        scope = {"G": self.original.__globals__, "torch": torch}
        for guard in self._graph_output.guards:
            if str(guard.name).startswith("G["):
                with suppress(AttributeError, LookupError, NameError, TypeError):
                    values.append(eval(str(guard.name), dict(scope)))
        return [value for value in values if isinstance(value, torch.Tensor)]

    @property
    def _graph_output(self) -> Any:
        return self._output.graph_capture_output.output_graph

    @property
    def _shape_env(self) -> Any:
        return self._graph_output.shape_env

    @property
    def written_globals(self) -> tuple[str, ...]:
        """The global names that the call assigns to."""
        steps = dis.get_instructions(self._output.graph_capture_output.bytecode)
        stores = ("STORE_GLOBAL", "DELETE_GLOBAL")
        return tuple(sorted({step.argval for step in steps if step.opname in stores}))

    def guards(self, *, sizes_only: bool) -> "Guards":
        """Return Dynamo's guards; ``sizes_only``: only guards on sizes and on captured tensors."""
        from torch._dynamo import config

        guard_signs_of_zeros(self._graph_output)
        chosen = _sizes_only if sizes_only else None
        hooks_too = patched(config, {"skip_nnmodule_hook_guards": False})
        with measured(), _as_cannot_trace(), hooks_too:
            code = self.original.__code__
            return Guards(_weak_guards()(code, self._graph_output, guard_filter_fn=chosen))


def current_shape_env() -> Any:
    """Return the ``ShapeEnv`` of the trace whose graph a backend compiles now, or None."""
    context = torch._guards.TracingContext.try_get()
    return getattr(getattr(context, "fake_mode", None), "shape_env", None)


def drop_fakes(shape_env: Any) -> None:
    """Let the fake tensors of an ended trace be freed, see :meth:`Trace.close`."""
    shape_env.tracked_fakes = None


def drop_trace_caches() -> None:
    """Empty caches whose keys hold what a trace has used, such as each ``ShapeEnv``."""
    # Those of ``ShapeEnv`` are of use to the trace that made their entries alone. Dynamo reads
    # attributes with ``inspect.getattr_static``, which keeps classes in Python 3.12.0 to 3.12.3.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    classes = getattr(inspect, "_shadowed_dict_from_mro_tuple", None)
    for cached in (*vars(ShapeEnv).values(), classes):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()


@cache
def _weak_guards() -> Any:
    """Return Dynamo's class of guards without its finalizers, and without a second tree."""
    # A finalizer of each object that is compared by identity would keep the guards as long as that
    # object, such as a class or a module-level function, lives. The second tree has the guards that
    # differ between the entries of Dynamo's own cache; torch 2.11 never frees it.
    from torch._dynamo.guards import CheckFunctionManager, GuardManagerWrapper

    class OneTree(GuardManagerWrapper):
        def prepare_diff_guard_manager(self) -> None:
            pass

    class WeakGuards(CheckFunctionManager):
        def build_guards(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            builder, guard_manager = super().build_guards(*args, **kwargs)
            tree = OneTree.__new__(OneTree)
            vars(tree).update(vars(guard_manager))
            builder.guard_manager = tree
            return builder, tree

        def id_ref(self, obj: object, obj_str: str) -> int:
            with suppress(TypeError):  # objects without weak references
                vars(self).setdefault("identities", {}).setdefault(id(obj), weakref.ref(obj))
            return id(obj)

        def lookup_weakrefs(self, obj: object) -> Any:
            return vars(self).get("identities", {}).get(id(obj))

    return WeakGuards


class Guards:
    """The guards on the locals of a call; never true after an object they compare is freed."""

    def __init__(self, checks: Any) -> None:
        self._checks = checks  # keeps the objects that the guards read
        self.hold: Callable[[dict[str, Any]], bool] = checks.guard_manager.check
        self.is_alive = True  # whether all objects that are compared by identity are
        this = weakref.ref(self)

        def expire(_: Any) -> None:
            guards = this()
            if guards is not None:
                guards.hold, guards.is_alive = lambda names: False, False

        objects = [reference() for reference in vars(checks).get("identities", {}).values()]
        self._identities = [weakref.ref(obj, expire) for obj in objects if obj is not None]

    def first_that_fails(self, names: dict[str, Any]) -> str:
        """Return the first guard that does not hold, as Python, with the user's line."""
        if not self.is_alive:
            return "an object that was compared by identity was freed"
        result = self._checks.guard_manager.check_verbose(names)
        parts = [str(part).strip() for part in result.verbose_code_parts]
        return " ".join(parts[0].split()) if parts else str(result)


def _sizes_only(entries: Any) -> list[bool]:
    return [
        entry.guard_type == "SHAPE_ENV"
        or (entry.guard_type == "TENSOR_MATCH" and str(entry.orig_guard.name).startswith(_OUTSIDE))
        for entry in entries
    ]


_OUTSIDE = ("L['self'].", "G[")  # begins the paths of tensors of modules and globals


def traced_function(called: Any) -> tuple[types.FunctionType, Any]:
    """Return (function, bound object or None) that Dynamo traces for a callable."""
    from torch._dynamo.convert_frame import get_traced_fn

    forward = getattr(called, "forward", None) if isinstance(called, torch.nn.Module) else called
    is_function = isinstance(forward, (types.FunctionType, types.MethodType))
    return get_traced_fn(called if is_function else called.__call__)


def users_function(called: Any) -> Any:
    """Return the function with the user's parameters: of a module with hooks its ``forward``."""
    forward = called.forward if isinstance(called, torch.nn.Module) else called
    is_method = isinstance(forward, types.MethodType)  # it may also be a functools.partial
    return traced_function(forward)[0] if is_method else forward


def trace_call(
    called: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    freeze: bool,
    varying: Collection[str] = (),
) -> Trace:
    """Trace a call without running it; raises CannotTrace if it does not become one graph."""
    # The numbers at the paths ``varying`` become inputs. ``freeze``: bind the current tensors of
    # modules, globals and closures, instead of looking them up at each call; raises CannotBind
    # where torch does not.
    from torch._dynamo import config, convert_frame

    patches = {
        "automatic_dynamic_shapes": bool(varying),
        "assume_static_by_default": True,
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
        stack.enter_context(_varying(varying))
        stack.enter_context(measured())
        before = set(function.__globals__)
        with new_sources() as sources:
            try:
                output = _captured(called, args, kwargs)
                trace = Trace(function, output)
            except BaseException as error:
                drop_globals(function.__globals__, _installed_since(before, function))
                if isinstance(error, AssertionError) and "Freevar has no source" in str(error):
                    raise CannotBind(str(error)) from error  # read in a region of the user
                raise
        new = _installed_since(before, function)
    code = trace.python.code
    drop_sources_with(code, sources)
    weakref.finalize(code, drop_globals, function.__globals__, new).atexit = False
    return trace


def _captured(called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what Dynamo makes of a call; torch function modes are traced."""
    from torch._dynamo import convert_frame

    modes = function_mode_stack()
    if modes:
        with traced_function_modes(modes):
            output = convert_frame.fullgraph_capture(called, args, dict(kwargs))
        if list(output.graph_capture_output.output_graph.torch_function_mode_stack) == modes:
            return output  # otherwise Dynamo traces them by itself, as 2.11 does
    return convert_frame.fullgraph_capture(called, args, dict(kwargs))


@contextmanager
def _varying(paths: Collection[str]) -> Iterator[None]:
    """Let a trace find that the numbers at these paths have varied, and nothing else."""
    # In place of what Dynamo has seen of other calls, which is put back.
    from torch._dynamo.pgo import get_code_state

    seen = get_code_state()
    before, factory = dict(seen), seen.default_factory

    def varied() -> Any:
        state: Any = factory()  # type: ignore[misc]
        for path in paths:
            entry = state.automatic_dynamic[path]
            for number in range(3):  # different values
                entry |= type(entry).make_scalar(number)
        return state

    seen.clear()
    seen.default_factory = varied if paths else factory
    try:
        yield
    finally:
        seen.clear()
        seen.update(before)
        seen.default_factory = factory


def _installed_since(before: set[str], function: types.FunctionType) -> set[str]:
    return {name for name in function.__globals__.keys() - before if is_of_one_trace(name)}


def drop_globals(names: dict[str, Any], dropped: Iterable[str]) -> None:
    """Remove globals that Dynamo installed for one trace."""
    from torch._dynamo.utils import CleanupHook

    disown = getattr(CleanupHook, "disown", None)  # 2.15 records who installed a name
    for name in dropped:
        names.pop(name, None)
        if disown is not None:
            disown(names, name)


@contextmanager
def _as_cannot_trace() -> Iterator[None]:
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import (
        ConstraintViolationError,
        GuardOnDataDependentSymNode,  # raised unwrapped by the fake of an op
    )

    try:
        yield
    except (TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode) as error:
        raise _in_short(error) from error
    except NotImplementedError as error:  # torch.fx takes no such value as the argument of an op
        if not str(error).startswith("argument of type"):
            raise
        raise _in_short(error) from error


def _in_short(error: BaseException) -> CannotTrace:
    """Return the beginning of torch's explanation, and the user's line."""
    explanation = getattr(error, "explanation", "")  # set by :func:`raised_while_tracing`
    lines = [line.strip() for line in (explanation or str(error)).splitlines() if line.strip()]
    stack = [frame for frame in getattr(error, "real_stack", None) or () if frame.filename]
    hints = [line for line in lines if line.startswith(("Explanation:", "Hint:"))][:2]
    if explanation:
        hints, frames = lines[1:], [f'File "{at.filename}", line {at.lineno}' for at in stack]
    else:
        frames = [line for line in lines if line.startswith('File "')]
    text = "\n  ".join([*lines[:1], *hints, *frames[-1:]]) or type(error).__name__
    short = CannotTrace(text)
    short.model_raises = str(error).lstrip().startswith("Observed exception")
    short.becomes_several = not explanation
    short.what, short.hints = text.splitlines()[0], tuple(hints)
    if stack:
        last = stack[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"
        short.line = where, (last.line or "").strip()
    return short


def _lift(graph: fx.GraphModule) -> tuple[FrozenTensor, ...]:
    """Replace the tensors that Dynamo put into a graph by placeholders, after all others."""
    # Pieces take weights as inputs, so that equal layers are equal pieces.
    sources = getattr(graph, "_param_name_to_source", None) or {}
    last = graph.graph.find_nodes(op="placeholder")
    frozen: list[FrozenTensor] = []
    lifted: dict[str, fx.Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, str(node.target), None)
        if node.target not in sources or not isinstance(tensor, torch.Tensor):
            continue
        if node.target not in lifted:
            source = sources[node.target]
            where = last[-1].next if last else next(iter(graph.graph.nodes))
            with graph.graph.inserting_before(where):
                placeholder = graph.graph.placeholder(str(node.target))
            placeholder.meta = dict(node.meta)
            placeholder._dynamo_source = source
            last = [placeholder]
            lifted[str(node.target)] = placeholder
            frozen.append((str(source.name), tensor))
        node.replace_all_uses_with(lifted[str(node.target)])
        graph.graph.erase_node(node)
    for name in lifted:
        delattr(graph, name)
    graph.recompile()
    return tuple(frozen)


def size_oblivious(on: bool) -> Any:
    """Return a context in which a trace treats sizes 0 and 1 of dynamic dimensions like others."""
    from torch.fx.experimental import _config

    return patched(_config, {"backed_size_oblivious": on})


@contextmanager
def _attributes_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the attributes of tensors, among them Dynamo's marks."""
    before = {id(tensor): (tensor, dict(tensor.__dict__)) for tensor in tensors}
    try:
        yield
    finally:
        for tensor, attributes in before.values():
            if tensor.__dict__ != attributes:
                tensor.__dict__.clear()
                tensor.__dict__.update(attributes)


_MARKS = ("_dynamo_", "_has_dynamo", "_specialize_on")


@contextmanager
def marked(dims: list[tuple[torch.Tensor, int, str | None]], unbacked: bool) -> Iterator[None]:
    """Mark (tensor, dimension, name) as dynamic for a trace, and remove the marks after it."""
    # ``unbacked``: the trace may assume nothing of the sizes; equal names are equal sizes.
    from torch._dynamo import mark_dynamic
    from torch._dynamo.decorators import mark_unbacked

    tensors = [tensor for tensor, _, _ in dims]
    with _attributes_kept(tensors):
        for tensor in tensors:
            for mark in [mark for mark in tensor.__dict__ if mark.startswith(_MARKS)]:
                del tensor.__dict__[mark]
        for tensor, dim, name in dims:
            if unbacked:
                mark_unbacked(tensor, dim, shape_id=name)
            else:
                mark_dynamic(tensor, dim)
        yield


@contextmanager
def without_traces_left(called: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore what traces change: globals of the function, marks of tensors, Dynamo's counters."""
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters

    names = traced_function(called)[0].__globals__
    # Under the lock new names and counts are those of this thread.
    with convert_frame.compile_lock, _attributes_kept(tensors):
        before = set(names)
        counted = {kind: dict(counts) for kind, counts in counters.items()}
        try:
            yield
        finally:
            for name in [name for name in names if name not in before]:
                if name.startswith("__"):
                    del names[name]
            for kind in [*counters]:
                counters[kind].clear()  # in place: other modules hold references
                counters[kind].update(counted.get(kind, {}))
                if kind not in counted:
                    del counters[kind]


def without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same sizes, strides, dtype and marks on a device, without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if device.type == "meta" else FakeTensorMode():
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        ).requires_grad_(tensor.requires_grad)
    fake.__dict__.update(tensor.__dict__)
    return fake
