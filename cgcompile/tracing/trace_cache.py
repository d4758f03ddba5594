"""The traces of one function: :class:`Traces` finds the trace that serves a call, or traces it.

A trace is made once for each kind of call. Tracing runs nothing, so that the first call may have
any size. The rule: a trace runs only after its ``fits`` and its guards hold for the call.
"""

import inspect
import logging
import re
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from cgcompile.adapters.adapter import PlainRunner, innermost
from cgcompile.errors import AddressChangedError, RecompileError, SavedModelError, TraceError
from cgcompile.graphs.capture import capture_postponed, without_garbage_collection
from cgcompile.graphs.contract import same_memory
from cgcompile.locks import new_lock
from cgcompile.passes.nodes import changes_layout
from cgcompile.reasons import VARYING, RunPlain, refuse_varying
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.runtime.fast_path import NOT_SERVED, FastPaths
from cgcompile.runtime.inputs import BoundTensors
from cgcompile.torch_compat import dynamo, torch_ops, torch_settings
from cgcompile.tracing.argument_guards import Fits, Shapes, is_number, tensors_in, with_numbers
from cgcompile.tracing.dynamic_dims import (
    DynamicDims,
    TensorDim,
    argument_paths,
    check_dims,
    free_sizes,
    parameter_kinds,
    with_two_rows,
)

if TYPE_CHECKING:
    from cgcompile.torch_compat import aot

log = logging.getLogger(__name__)

SHAPES = ("backed", "backed_size_oblivious", "unbacked")
GUARDS = ("keep", "shape", "none")

_RESTARTS = 4  # most restarts of one trace, which a compiler requests
_MOST_REFUSED = 256  # calls with varying numbers that are counted
_MANY = 256  # traces of one function: more than a class has layers, so there is a warning

# The smallest size that stays dynamic; see Note [Sizes of a symbol].
_LEAST = {"backed": 2, "backed_size_oblivious": 1, "unbacked": 0}

# A guard on a number that is no argument, such as ``L['self'].calls == 3``: (path, number).
_NUMBER_GUARD = re.compile(r"([LG]\[\S+) == (-?[\d.]+(?:e[+-]?\d+)?)(?:\s|$)")

# Compiles a graph: (graph, its example inputs, how many trailing inputs are frozen) -> callable.
Compile = Callable[[fx.GraphModule, list[Any], int], Callable[..., Any]]


@dataclass(frozen=True)
class Rules:
    """How calls are traced, and what is checked at each call."""

    guards: str = "keep"  # Dynamo's guards that are kept
    check_guards: bool = False  # check dropped guards as well, and raise where one fails
    shapes: str = "backed_size_oblivious"  # assumptions on dynamic sizes


class CompiledTrace:
    """One compiled trace; ``compiled`` is None for a call without ops on tensors."""

    def __init__(
        self,
        trace: "dynamo.Trace | aot.SavedTrace",
        compiled: Callable[..., Any] | None,
        fits: Fits,
        rules: Rules,
        start: str,
        freezes: bool,
        changes_layouts: bool,
    ) -> None:
        self.compiled = compiled
        self.graph = innermost(compiled)
        self.fits = fits.function  # compares the arguments of a call, and autocast
        self.frozen = trace.frozen  # (path, tensor) of the bound weights
        self.held = _held(tensor for _, tensor in trace.frozen)  # views that it computes with
        self._places: dict[str, CodeType] = {}  # by path; to compile one takes 20 us
        self.start = start  # text: how long Dynamo took, and splitting and compiling the graph
        self.proven = False  # whether a call has ended, so that its replacements are known
        self.trusted = False  # whether it is proven and only ``fits`` is checked
        self.repeated = False  # whether it has served a call after the traced one
        self.number = 0  # among all traces of the function
        self.numbers: tuple[Any, ...] = ()  # the numbers among the arguments that were traced
        self._varies = fits.varies
        self._references = fits.references
        self._checks = fits.checks  # keeps the weak references to tensors that ``fits`` compares
        self.guards = self.dropped = None
        if rules.guards != "none" or not freezes:
            self.guards = trace.guards(sizes_only=rules.guards != "keep")
        if rules.check_guards and rules.guards != "keep":
            self.dropped = trace.guards(sizes_only=False)
        self.is_free = self.guards is None and self.dropped is None
        run: Callable[..., Any] | None = compiled
        if compiled is not None and trace.frozen:
            tensors = tuple(tensor for _, tensor in trace.frozen)
            # An op that replaces the memory of a view of a weight would not reach the weight.
            run = _frozen(compiled, tensors, tensors if changes_layouts else self.held)
        if run is not None and trace.function_modes:
            run = torch_settings.without_function_modes_in(run)
        python = partial(trace.python.function, trace.original)  # the trace itself must go
        self.run = python(run)
        self.fast_paths: FastPaths | None = None
        self.add_fast_path: Callable[..., None]  # only with fast paths
        plain = self.is_free and trace.python.is_plain and not fits.varies
        plain = plain and not trace.function_modes
        if isinstance(compiled, CompiledGraph) and plain:
            self.fast_paths = compiled.fast_paths
            self.add_fast_path = partial(compiled.fast_paths.add, fits.checks, python)

    def __repr__(self) -> str:
        return f"<CompiledTrace {self.number}: {self.start}>"

    @property
    def is_alive(self) -> bool:
        """Whether all objects that ``fits`` and guards compare by identity are still alive."""
        if self.guards is not None and not self.guards.is_alive:
            return False
        return all(reference() is not None for reference in self._references)

    @property
    def served_few(self) -> bool:
        """Whether it has served one call, or a few if numbers are among its inputs."""
        if not self.repeated or not self._varies:
            return not self.repeated
        return self.graph is not None and self.graph.counters.calls <= VARYING

    def _place(self, path: str) -> CodeType:
        if path not in self._places:
            self._places[path] = compile(path, "<path of a weight>", "eval")
        return self._places[path]

    def replaced(self, scope: dict[str, Any], unknown: tuple[str, ...] = ()) -> str | None:
        """Return the path of the first frozen tensor that was replaced or moved, else None."""
        # It decides whether to trace again, or refuses a capture; no replay runs it.
        # ``unknown`` begins the paths that are not in the scope: such a tensor may only have moved.
        for (path, tensor), held in zip(self.frozen, self.held, strict=True):
            try:
                present = tensor if path.startswith(unknown) else eval(self._place(path), scope)
            except (AttributeError, LookupError, TypeError):
                present = None
            if present is not tensor or (held is not tensor and not same_memory(held, tensor)):
                return path
        return None


def _held(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views of the same memory, for a graph to compute with."""
    # After ``weight.data = ...`` they are stale, but never of another type or freed. Gradients need
    # the parameters themselves.
    with torch.no_grad():
        plain = (torch.Tensor, torch.nn.Parameter)
        return tuple([x.detach() if type(x) in plain else x for x in tensors])


def _frozen(
    compiled: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    held: tuple[torch.Tensor, ...],
) -> Callable[..., Any]:
    """Return a compiled graph as a function of the inputs that are not frozen."""
    if isinstance(compiled, CompiledGraph):
        compiled.freeze(tensors, held)
        return compiled.__call__  # a method costs less to call than an object
    frozen = BoundTensors(len(tensors))
    frozen.bind(tensors, held)
    return lambda *inputs: frozen.restore(compiled(*inputs, *frozen.for_plain_run))


class Traces:
    """All traces of one function; ``traces`` has the most recently used one first."""

    # ``fast_paths`` are those of that one. With ``is_closed`` a call is never traced again.

    def __init__(
        self,
        called: Any,
        compile_graph: Compile,
        dims: Mapping[str, Any] | None,
        rules: Rules,
        run_plain: PlainRunner = lambda name, why, function: function(),
    ) -> None:
        self._called = called
        self._hooks = torch_ops.hooks_of(called)
        self._module = called if isinstance(called, torch.nn.Module) else None
        self._dims_by_name = dims
        self._resolve_function()
        self._compile = compile_graph
        self._run_plain = run_plain
        self._refused: dict[str, int] = {}  # counts of calls without a trace, by their numbers
        self._varied: set[str] = set()  # the paths of numbers that had several values
        self._constant: set[str] = set()  # the paths of numbers that graphs cannot take as inputs
        self._differences: list[str] = []  # why calls are not padded, of all traces
        self._rules = rules
        self._count = 0  # traces since the last invalidation
        self._lock = new_lock()
        self._modules: dict[str, Any] = {}  # by the names that saved traces have for them
        self._saver: Any = None  # sees a trace before and after it is compiled
        self.is_closed = False
        self._unfrozen = False  # whether the model replaces its tensors

    @property
    def _arguments(self) -> list[str]:
        """The parameters that the caller fills, without a bound object."""
        return list(self._signature.parameters)[self._bound is not None :]

    @property
    def name(self) -> str:
        return self._function.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trace that serves this call; trace it if there is none."""
        module = self._module
        if module is not None:
            # Counting hooks is slower than checking that there are none.
            hooked = sum(map(len, self._hooks)) if self._hooked else any(self._hooks)
            if hooked != self._hooked or module.forward != self._forward:
                self._resolve_function()
        if self.fast_paths.calls:
            fast_path = self.fast_paths.find_requested()
            result = NOT_SERVED if fast_path is None else fast_path(args, kwargs)
            if result is not NOT_SERVED:
                return result
        call_args, fast_paths = args, self.fast_paths
        if self._bound is not None:
            args = (self._bound, *args)
        traces = self.traces
        if traces and traces[0].trusted and traces[0].fits(args, kwargs):
            trace: CompiledTrace | None = traces[0]
        else:
            trace = self._find(args, kwargs)
            if self.fast_paths is not fast_paths:  # another trace than for the last call
                fast_path = self.fast_paths.find_requested() or self.fast_paths.call
                result = NOT_SERVED if fast_path is None else fast_path(call_args, kwargs)
                if result is not NOT_SERVED:
                    return result
        if trace is not None and trace.proven:
            trace.repeated = True  # fast paths begin after the second call
            result = trace.run(*args, **kwargs)
            if trace.fast_paths is not None and trace.fast_paths.graph is not None:
                called = None if module is None else (module, self._forward)
                trace.add_fast_path(args, kwargs, self._bound, self._hooks, called)
            return result
        try:
            with self._lock:
                trace = self._bound_as_now(self._find(args, kwargs), args, kwargs)
                return self._first(trace or self._trace(args, kwargs), args, kwargs)
        except RunPlain as refusal:
            why = refusal.why
        return self._run_plain(self.name, why, lambda: self._called(*call_args, **kwargs))

    def _resolve_function(self) -> None:
        """Set the function to trace; for a module with hooks, the one that runs the hooks."""
        forward = None if self._module is None else self._module.forward
        if getattr(forward, "_traces", None) is self:  # the module now calls the compiled model
            self._forward = forward
            return
        users_function = dynamo.users_function(self._called)
        signature = inspect.signature(users_function)  # behind decorators and hooks
        function, bound = dynamo.traced_function(self._called)
        is_bound = bound is not None
        self._dims = DynamicDims(self._dims_by_name, signature, users_function, is_bound)
        self._users_signature, self._function, self._bound = signature, function, bound
        self._signature = inspect.signature(self._function, follow_wrapped=False)
        self._hooked, self._forward = sum(map(len, self._hooks)), forward
        self._set(())

    def _set(self, traces: tuple[CompiledTrace, ...]) -> None:
        """Set the traces, in the order in which calls try them, and the fast paths of the first."""
        self.traces = traces
        self.fast_paths = (traces[0].fast_paths if traces else None) or FastPaths()

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledTrace | None:
        """Return the trace that serves a call, or None; later calls try it first."""
        for trace in self.traces:
            if trace.fits(args, kwargs) and (trace.is_free or self._holds(trace, args, kwargs)):
                if trace is not self.traces[0]:
                    self._use_first(trace)
                return trace
        return None

    def _bound_as_now(
        self, trace: CompiledTrace | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CompiledTrace | None:
        """Return a trace, unless a tensor that it has bound was replaced: then drop it."""
        path = None
        if trace is not None and not trace.proven:
            path = trace.replaced(self._scope(args, kwargs))
        if path is None:
            return trace
        log.info("%s is traced again: %s was replaced", self.name, path)
        self._set(tuple(each for each in self.traces if each is not trace))
        return None

    def refuse_replaced(self, compiled: CompiledGraph) -> None:
        """Raise AddressChangedError if a tensor that the trace of a graph has bound was replaced.

        Inside of a capture, where the call cannot be traced again.
        """
        names = self._cells()
        if self._bound is not None:
            names[next(iter(self._signature.parameters))] = self._bound
        scope = {"L": names, "G": self._globals}
        arguments = tuple(f"L[{name!r}]" for name in self._arguments)
        for trace in self.traces:
            path = trace.replaced(scope, arguments) if trace.graph is compiled else None
            if path is not None:
                remedy = "backend.release(), and run the model before the capture"
                raise AddressChangedError.weight(
                    what=self.name, batch="traced", path=path, remedy=remedy
                )

    def _first(self, trace: CompiledTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a trace that has served no call yet; later calls trust it if this one ends."""
        scope = self._scope(args, kwargs)
        result = trace.run(*args, **kwargs)
        trace.proven, trace.trusted = True, trace.is_free
        if trace.frozen and trace.replaced(scope):
            # The result is right: nothing was replaced before. Later calls are traced again.
            log.info("%s replaces tensors of its own; they are looked up from now on", self.name)
            self._unfrozen = True
            self._set(tuple(each for each in self.traces if not each.frozen))
        return result

    def _holds(self, trace: CompiledTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        names = self._names(args, kwargs)
        if trace.guards is not None and not trace.guards.hold(names):
            return False
        if trace.dropped is not None:
            path = trace.replaced({"L": names, "G": self._globals})
            failed = None if path is None else f"{path} is another tensor now"
            if failed is None and not trace.dropped.hold(names):
                failed = trace.dropped.first_that_fails(names)
            if failed is not None:
                raise RecompileError.dropped_guard(name=self.name, guard=failed)
        return True

    def _use_first(self, trace: CompiledTrace) -> None:
        with self._lock:
            others = tuple(each for each in self.traces if each is not trace)
            if len(others) < len(self.traces):  # otherwise another thread has dropped it
                self._set((trace, *others))

    def _names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the locals of a call, by the names that Dynamo's guards and sources use."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments | self._cells()

    @property
    def _globals(self) -> Mapping[str, Any]:
        """The globals of the function, with the modules that saved traces know by other names."""
        names = self._function.__globals__
        return ChainMap(names, self._modules) if self._modules else names

    def _cells(self) -> dict[str, Any]:
        """Return the values of a closure, by name."""
        cells = self._function.__closure__ or ()
        pairs = zip(self._function.__code__.co_freevars, cells, strict=True)
        return {name: cell.cell_contents for name, cell in pairs}

    def _scope(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {"L": self._names(args, kwargs), "G": self._globals}

    def compare_bound(self) -> None:
        """Make the next call of each trace compare the tensors that it has bound."""
        with self._lock:
            for trace in self.traces:
                trace.proven = trace.trusted = False
                if trace.fast_paths is not None:
                    trace.fast_paths.drop()

    def drop(self) -> None:
        """Drop all traces."""
        with self._lock:
            self._set(())
            self._refused.clear()
            self._varied.clear()
            self._constant.clear()
            self._differences.clear()
            self._count, self._unfrozen = 0, False
            dynamo.drop_trace_caches()

    # -------------------------------------------------------------- numbers that vary

    def _note_varied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the numbers by which a call differs from a traced one, if only numbers differ."""
        numbers, names = self._numbers(args, kwargs), self._names(args, kwargs)
        for trace in self.traces:
            others = trace.numbers
            if trace.guards is not None and trace.guards.is_alive and trace.fits(args, kwargs):
                failed = _NUMBER_GUARD.match(trace.guards.first_that_fails(names))
                self._varied |= set() if failed is None else {failed[1]}
            alike = len(others) == len(numbers) > 0
            if alike and self._serves(trace, *with_numbers(args, kwargs, others)):
                self._varied |= {
                    path
                    for (_, path, number), before in zip(numbers, others, strict=True)
                    if type(number) is type(before) is not complex and repr(number) != repr(before)
                }

    def _check_varying(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RunPlain for a call that differs from all traces only in a number."""
        # That is, ``VARYING`` such traces have served one call only, or few. A number that recurs
        # that often without a trace is traced, and replaces the oldest trace.
        if len(self.traces) < VARYING or capture_postponed():
            return
        unused = [trace for trace in self.traces if trace.served_few]
        unused.sort(key=lambda trace: trace.number)
        numbers = self._numbers(args, kwargs)
        key = tuple(number for _, _, number in numbers)
        once = [
            trace
            for trace in unused
            if len(trace.numbers) == len(key) > 0
            and self._serves(trace, *with_numbers(args, kwargs, trace.numbers))
        ]
        if len(once) < VARYING:
            self._check_varying_attribute(unused, args, kwargs)
            return
        if not self._is_rare(key, once[0]):
            return
        columns = zip(*(trace.numbers for trace in once), strict=True)
        varied = [(name, column) for (name, _, _), column in zip(numbers, columns, strict=True)]
        name, values = max(varied, key=lambda each: len(set(map(repr, each[1]))))
        refuse_varying(name, values, "a trace")

    def _check_varying_attribute(
        self, unused: Sequence[CompiledTrace], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise RunPlain for a varying attribute, such as ``self.calls += 1`` in a model."""
        scope, traced = self._scope(args, kwargs), dict[str, list[tuple[CompiledTrace, str]]]()
        for trace in unused:
            if trace.guards is not None and trace.fits(args, kwargs):
                failed = _NUMBER_GUARD.match(trace.guards.first_that_fails(scope["L"]))
                if failed is not None:
                    traced.setdefault(failed[1], []).append((trace, failed[2]))
        for path, pairs in traced.items():
            if len(pairs) >= VARYING:
                number = eval(path, scope)
                if not is_number(number) or not self._is_rare((path, number), pairs[0][0]):
                    return
                name = path.removeprefix("L['self'].")
                refuse_varying(name, [value for _, value in pairs], "a trace")

    def _is_rare(self, numbers: tuple[Any, ...], oldest: CompiledTrace) -> bool:
        """Count a call with these numbers; return whether it is too rare for a trace."""
        key = repr(numbers)  # unlike ==, it distinguishes 1 from 1.0, and nan equals nan
        count = self._refused.pop(key, 0) + 1
        if count > VARYING:
            self._set(tuple(each for each in self.traces if each is not oldest))
            return False
        self._refused[key] = count  # moved to the end: the oldest is dropped first
        if len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        return True

    def _serves(self, trace: CompiledTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not trace.fits(args, kwargs):
            return False
        return trace.guards is None or trace.guards.hold(self._names(args, kwargs))

    def _numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, Any]]:
        """Return (name, Dynamo's path, number), in the order of :func:`with_numbers`."""
        return [
            (f"{name}{path}", f"{source}{path}", leaf)
            for name, source, value in self._named(args, kwargs)
            for path, leaf in torch_ops.tree_paths(value)
            if is_number(leaf)
        ]

    # -------------------------------------------------------------- a new trace

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledTrace:
        """Trace a call with its dynamic sizes, where torch would treat 0 and 1 as constants.

        Raises:
            RunPlain: it differs from earlier calls only in a number, which always differs.
        """
        if self.is_closed:
            raise RecompileError.closed(name=self.name, why=self._why_none_serves(args, kwargs))
        self._signature.bind(*args, **kwargs)  # a call that Python refuses, refused by Python
        self._check_varying(args, kwargs)
        self._note_varied(args, kwargs)
        least = _LEAST[self._rules.shapes]  # smaller sizes are constants of a trace of their own
        dims = self._dims.of_call(self._named(args, kwargs))
        dims = [dim for dim in dims if dim.size >= least]
        large = [dim for dim in dims if dim.size > 1]
        if len(large) == len(dims):
            return self._trace_with(args, kwargs, dims)
        if self._rules.shapes == "unbacked":
            trace = self._trace_with(args, kwargs, dims)
            if self._serves(trace, args, kwargs):
                return trace
            return self._trace_with(args, kwargs, large)
        larger = with_two_rows(args, kwargs, dims)
        if not any(self._serves(trace, *larger[:2]) for trace in self.traces):
            try:
                trace = self._attempt(*larger)
            except dynamo.CannotTrace as error:  # sizes of other arguments may be tied to this one
                log.info("%s: traced with the sizes that it has: %s", self.name, error)
            else:
                if self._serves(trace, args, kwargs):
                    return trace
        return self._trace_with(args, kwargs, large)

    def _trace_with(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]
    ) -> CompiledTrace:
        """Trace a call with these dynamic sizes; raise what the model raises in Python."""
        try:
            return self._attempt(args, kwargs, dims)
        except dynamo.CannotTrace as error:
            if self._varied and not error.model_raises:  # a number may have to be constant
                self._varied.clear()
                return self._trace_with(args, kwargs, dims)
            if error.model_raises:  # raised by the model's Python code; its type is lost here
                self._function(*args, **kwargs)  # raises the model's own error
            several = error.becomes_several
            raise TraceError.refused(name=self.name, why=str(error), several=several) from error

    def _attempt(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]
    ) -> CompiledTrace:
        with self.tracing(dims):
            for _ in range(_RESTARTS):
                # A compiler may request another trace; Dynamo keeps the changes for it.
                with suppress(*dynamo.restarts()):
                    trace = self._compiled_trace(args, kwargs, dims)
                    break
            else:
                trace = self._compiled_trace(args, kwargs, dims)
        self._add(trace, args, kwargs)
        return trace

    def _add(self, trace: CompiledTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add a new trace, as the first that calls try."""
        log.info("%s: %s", self.name, trace.start)
        trace.numbers = tuple(number for _, _, number in self._numbers(args, kwargs))
        self._set((trace, *(each for each in self.traces if each.is_alive)))
        if trace.graph is not None:
            trace.graph.differences = self._differences
            if trace.frozen:
                trace.graph.traces = weakref.ref(self)
        self._count += 1
        trace.number = self._count
        if self._count == _MANY:
            log.warning(
                "%s has been traced %d times, and each was compiled. An object as an argument must "
                "be the same object at each call; after freeze() such a call is an error",
                self.name,
                _MANY,
            )

    # -------------------------------------------------------------- saved traces

    def save(self, args: tuple[Any, ...], kwargs: dict[str, Any], saver: Any) -> None:
        """Trace a call for a saver; the trace is kept if no other serves the call."""
        if self._bound is not None:
            args = (self._bound, *args)
        with self._lock:
            before, self._saver = self.traces, saver
            try:
                trace = self._trace(args, kwargs)
            finally:
                self._saver = None
            again, keywords = saver.call()
            if not trace.fits((*args[: len(args) - len(again)], *again), keywords):
                because = "the trace serves only these very objects."
                raise SavedModelError.unsaved(what="the call", because=because)
            if self._unfrozen:
                because = "its tensors are looked up at each call, by guards."
                raise SavedModelError.unsaved(what="the trace", because=because)
            if any(self._serves(trace, args, kwargs) for trace in before):
                self._set(before)

    def load(
        self,
        saved: "aot.SavedTrace",
        call: tuple[tuple[Any, ...], dict[str, Any]],
        compile_saved: Callable[[], tuple[Callable[..., Any], bool]],
    ) -> None:
        """Add a trace that was saved, of a call like this one."""
        args, kwargs = call
        if self._bound is not None:
            args = (self._bound, *args)
        start = time.perf_counter()
        with self._lock, self.tracing([]):
            self._modules |= saved.imported()
            saved.bind(self._function, self._scope(args, kwargs))
            compiled, changes_layouts = compile_saved()
            fits = self._fits(saved, args, kwargs, saved.sizes)
            text = f"loaded in {time.perf_counter() - start:.2f} s"
            rest = (self._rules, text, True, changes_layouts)
            self._add(CompiledTrace(saved, compiled, fits, *rest), args, kwargs)

    def locals_of(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
        """Return the locals of a call of the model."""
        bound = () if self._bound is None else (self._bound,)
        return self._names((*bound, *call[0]), call[1])

    @contextmanager
    def tracing(self, dims: list[TensorDim]) -> Iterator[None]:
        """Set what a trace may assume: these dimensions vary, the rest is in the rules."""
        unbacked = self._rules.shapes == "unbacked"
        marks = [(dim.tensor, dim.dim, dim.name) for dim in dims]
        oblivious = self._rules.shapes == "backed_size_oblivious"
        with (
            without_garbage_collection(),  # 0.4 to 0.9 s of a trace of 3.6 s
            dynamo.size_oblivious(oblivious),
            dynamo.marked(marks, unbacked),
        ):
            try:
                yield
            finally:
                dynamo.drop_trace_caches()

    def _compiled_trace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]
    ) -> CompiledTrace:
        """Trace a call, compile its graph, and check both for sizes that were specialised."""
        freezes = self._rules.guards == "none" and not self._unfrozen
        called = self._function if self._bound is not None else self._called
        start = time.perf_counter()
        varying = self._varied - self._constant
        try:
            traced_call = dynamo.trace_call(called, args, kwargs, freeze=freezes, varying=varying)
        except dynamo.CannotBind as error:
            log.info("%s: tensors of the model are looked up at each call: %s", self.name, error)
            self._unfrozen = True
            return self._compiled_trace(args, kwargs, dims)
        except dynamo.CannotRepeat as error:
            raise TraceError.region(problem=str(error)) from error
        with closing(traced_call) as trace:
            if trace.written_globals:
                names = ", ".join(trace.written_globals)
                raise TraceError.writes_globals(name=self.name, names=names)
            check_dims(self.name, dims, trace.sizes)
            traced = time.perf_counter()
            compiled, changes_layouts = None, False
            if self._saver is not None:
                paths = argument_paths(self._signature, args, kwargs)
                own = [path for at, path in paths.items() if at != 0 or self._bound is None]
                self._saver.begin(trace, self._names(args, kwargs), own)
            if trace.graph is not None:
                changes_layouts = any(map(changes_layout, trace.graph.graph.nodes))
                try:
                    with trace.compiling():
                        compiled = self._compile(trace.graph, trace.inputs, len(trace.frozen))
                except dynamo.restarts():
                    # Not in torch's way: it loses the sign of zero, and fails for ``n += tensor``.
                    self._constant |= trace.constants_to_be
                    raise
            check_dims(self.name, dims, trace.sizes)  # a compiler may fix a size as well
            shapes = free_sizes(dims) | trace.sizes
            fits = self._fits(trace, args, kwargs, shapes)
            if self._saver is not None:
                self._saver.end(trace, compiled, shapes)
            compiling = time.perf_counter() - traced
            took = f"traced in {traced - start:.2f} s, compiled in {compiling:.2f} s"
            return CompiledTrace(trace, compiled, fits, self._rules, took, freezes, changes_layouts)

    def _fits(
        self,
        trace: "dynamo.Trace | aot.SavedTrace",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shapes: Shapes,
    ) -> Fits:
        """Return the guard that compares a later call with this one."""
        paths = argument_paths(self._signature, args, kwargs)
        named = {paths[position]: value for position, value in enumerate(args)}
        named |= {paths[name]: value for name, value in kwargs.items()}
        tensors = tensors_in(named)
        pinned = {  # tensors that the model also reads in another way
            one
            for pair in trace.aliases
            for one, other in (pair, pair[::-1])
            if one in tensors and other not in tensors
        }
        others = {id(tensor) for tensor in trace.global_tensors.values()}
        others |= {id(tensors[path]) for path in pinned}
        pinned |= {path for path, tensor in tensors.items() if id(tensor) in others}
        scope = self._scope(args, kwargs)
        elsewhere: dict[int, Any] = {}
        for path in trace.sizes:
            if not path.startswith(tuple(tensors)):  # not below a tensor argument
                with suppress(AttributeError, LookupError, NameError, TypeError):
                    value = eval(path, scope)
                    elsewhere[id(value)] = value
        return Fits(
            args,
            kwargs,
            paths,
            shapes=shapes,
            strides=trace.strides,
            offsets=trace.offsets,
            conditions=trace.size_conditions(),
            numbers=trace.numbers,
            pinned=pinned,
            collected=[name for name in kwargs if name not in self._signature.parameters],
            elsewhere=[x for x in elsewhere.values() if isinstance(x, torch.Tensor)],
            alone=self._rules.guards == "none" and not self._unfrozen,
            constants=trace.constants,
        )

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, Any]]:
        """Return (name of the parameter, Dynamo's path of it, value) of each argument."""
        paths = argument_paths(self._signature, args, kwargs)
        positional, rest, anything = parameter_kinds(self._users_signature)
        named = [
            (positional[index] if index < len(positional) else rest, paths[index], value)
            for index, value in enumerate(args)
        ]
        for name, value in kwargs.items():
            own = name in self._users_signature.parameters or name in self._dims.by_name
            named.append((name if own else anything, paths[name], value))
        return named

    def _why_none_serves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        names = self._names(args, kwargs)
        for trace in self.traces:
            if trace.fits(args, kwargs) and trace.guards is not None:
                return trace.guards.first_that_fails(names)
        texts = [f"{name}: {_described(value)}" for name, value in names.items() if name != "self"]
        return "no trace is for arguments like " + ", ".join(texts)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
