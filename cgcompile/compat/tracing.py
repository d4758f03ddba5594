"""Dynamo as a function: trace a call without running it. See ``cgcompile/compat/__init__.py``.

What is used of ``torch._dynamo.convert_frame`` is what torch's own ahead-of-time front ends use;
the names are the same in 2.11, 2.13 and 2.15.
"""

import dis
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from cgcompile.compat.dynamo import known_size, size_conditions, source_name, squeeze_conditions
from cgcompile.compat.sources import drop_sources_with, new_sources
from cgcompile.compat.traced import (
    TracedPython,
    compiling,
    is_of_one_trace,
    measured,
    patched,
)


class CannotTrace(Exception):
    """Dynamo cannot make one graph of a call; the text says why.

    Attributes:
        model_raises: whether the reason is that the Python code of the model raises.
        what: the reason in one line.
        hints: what torch says to it, a line each.
        line: the user's line, as ("model.py:41 in forward", "y = ..."); None if torch has none.
    """

    model_raises = False
    what = ""
    hints: tuple[str, ...] = ()
    line: tuple[str, str] | None = None


@dataclass(frozen=True)
class FrozenTensor:
    """A tensor that a trace found outside of the arguments.

    Attributes:
        input: which input of the graph it has become.
        where: the Python expression over ``L`` (locals) and ``G`` (globals) that finds it.
        tensor: the tensor.
    """

    input: int
    where: str
    tensor: torch.Tensor


class Trace:
    """One call of a function as a graph, with the Python around it.

    Args:
        function: the function that was traced; a bound object is its first argument.
        output: what Dynamo returned.

    Attributes:
        graph: the pre-grad graph; None if the call computes nothing with tensors.
        inputs: what the graph was traced with: numbers and tensors, frozen ones last.
        original: the function.
        frozen: the tensors that were not taken from the call, in the order of ``inputs``.
    """

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
    def sources(self) -> tuple[str, ...]:
        """Python expressions over ``L`` and ``G`` of all that the trace depends on, sorted."""
        guards = self._output.graph_capture_output.output_graph.guards
        return tuple(sorted({_name(guard) for guard in guards} - {""}))

    @property
    def compared(self) -> frozenset[str]:
        """Those of :attr:`sources` whose value or identity was compared, not the type alone."""
        guards = self._output.graph_capture_output.output_graph.guards
        kinds = ("EQUALS_MATCH", "CONSTANT_MATCH", "ID_MATCH")
        return frozenset(_name(each) for each in guards if each.create_fn_name() in kinds)

    @property
    def code(self) -> tuple[types.CodeType, ...]:
        """The code of all functions that were traced through."""
        return (self.original.__code__, *self._output.graph_capture_output.traced_code)

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
        """What Dynamo assumed of the call.

        Args:
            sizes_only: leave out all but what is assumed of sizes, and of tensors that are looked
                up outside of the arguments.

        Raises:
            CannotTrace: a dynamic dimension was fixed.
        """
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


def drop_trace_caches() -> None:
    """Empty caches whose keys hold what a trace has used, such as each ``ShapeEnv``.

    Those of ``ShapeEnv`` are of use to the trace that made their entries alone. Dynamo reads
    attributes with ``inspect.getattr_static``, which keeps classes in Python 3.12.0 to 3.12.3.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    classes = getattr(inspect, "_shadowed_dict_from_mro_tuple", None)
    for cached in (*vars(ShapeEnv).values(), classes):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()


@contextmanager
def trace_caches_dropped() -> Iterator[None]:
    """Call :func:`drop_trace_caches` at the end."""
    try:
        yield
    finally:
        drop_trace_caches()


def _name(sourced: Any) -> str:
    """The path of a guard or a source: a method once, a property since 2.9."""
    return str(sourced.name() if callable(sourced.name) else sourced.name)


@cache
def _weak_guards() -> Any:
    """Return Dynamo's class of guards without its finalizers, and without a second tree.

    A finalizer of each object that is compared by identity would keep the guards as long as that
    object, such as a class or a module-level function, lives. The second tree has the guards that
    differ between the entries of Dynamo's own cache; torch 2.11 never frees it.
    """
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
            with suppress(TypeError):  # no weak reference to it is possible
                self._weakrefs.setdefault(id(obj), weakref.ref(obj))
                vars(self).setdefault("identities", {})[id(obj)] = self._weakrefs[id(obj)]
            return id(obj)

    return WeakGuards


class Guards:
    """What must hold of the locals of a call, so that a trace serves it.

    Attributes:
        hold: whether they hold; never again after an object that is compared by identity was freed.
        is_alive: whether none of those objects was freed.
    """

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


def is_constant_result(function: Any) -> bool:
    """Whether Dynamo calls a function while it traces, and takes what it gives for a constant."""
    marks = function.__dict__ if isinstance(function, types.FunctionType) else {}
    return bool(marks.get("_dynamo_marked_constant", False))


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
    """Trace a call; nothing is run.

    Args:
        called: module, bound method or function.
        args: of the call.
        kwargs: of the call.
        freeze: take tensors of modules, globals and closures as they are now, instead of looking
            them up at each call.

    Raises:
        CannotTrace: the call does not become one graph.
    """
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
