"""The traces of one function: :class:`Traces` finds the trace that serves a call, or traces it.

:class:`Variant` is one trace, compiled. A trace is made once for each kind of call. Tracing runs
nothing, so that the first call may have any size. The rule: a variant runs only after its ``fits``
and its guards hold for the call.
"""

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.errors import RecompileError, TraceError
from cgcompile.graphs.capture import capture_postponed, without_garbage_collection
from cgcompile.locks import new_lock
from cgcompile.reasons import VARYING, Fallback, varying_number
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.runtime.fast_path import ANOTHER, Turn
from cgcompile.runtime.inputs import Frozen
from cgcompile.tracing.argument_guards import (
    fits_function,
    is_number,
    tensors_elsewhere,
    tensors_in,
    with_numbers,
)
from cgcompile.tracing.dynamic_dims import (
    DynamicDims,
    TensorDim,
    argument_paths,
    check_dims,
    free_sizes,
    parameter_kinds,
    with_two_rows,
)
from cgcompile.tracing.fast_path import CallFastPath

log = logging.getLogger(__name__)

SHAPES = ("backed", "backed_size_oblivious", "unbacked")
GUARDS = ("keep", "shape", "none")


@dataclass(frozen=True)
class Rules:
    """How calls are traced, and what is checked at each call."""

    guards: str = "keep"  # which of Dynamo's guards are kept
    check_guards: bool = False  # check dropped guards as well, and raise where one fails
    shapes: str = "backed_size_oblivious"  # what a trace may assume of a dynamic size


@dataclass(frozen=True)
class Start:
    """The seconds that one trace took: in Dynamo, and in splitting and compiling its graph."""

    tracing: float
    compiling: float

    def __str__(self) -> str:
        return f"traced in {self.tracing:.2f} s, compiled in {self.compiling:.2f} s"


class Variant:
    """One trace, compiled."""

    def __init__(
        self,
        trace: compat.Trace,
        compiled: Callable[..., Any] | None,
        fits: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        rules: Rules,
        start: Start,
        bound: bool,
    ) -> None:
        self.compiled = compiled  # None if the call computes nothing with tensors
        self.fits = fits  # compares the arguments of a call, and autocast
        self.frozen = trace.frozen  # tensors that are bound, not looked up
        self.start = start
        self.proven = False  # whether a call has ended: only then is known what it replaces
        self.trusted = False  # whether it is proven, and nothing but ``fits`` is checked
        self.repeated = False  # whether it has served another call than the traced one
        self.number = 0  # among all traces of the function
        self.numbers: tuple[Any, ...] = ()  # the numbers among the arguments that were traced
        self.guards = self.dropped = None
        if rules.guards != "none" or not bound:
            self.guards = trace.guards(sizes_only=rules.guards != "keep")
        if rules.check_guards and rules.guards != "keep":
            self.dropped = trace.guards(sizes_only=False)
        run: Callable[..., Any] | None = compiled
        if compiled is not None and trace.frozen:
            tensors = tuple(each.tensor for each in trace.frozen)
            # Views of the same memory: after ``weight.data = ...`` they are stale, but never of
            # another type or freed. Gradients need the parameters themselves.
            held = tuple(_held(tensor) for tensor in tensors)
            if isinstance(compiled, CompiledGraph):
                compiled.freeze(tensors, held)
                run = compiled.__call__  # a method costs less to call than an object
            else:
                run = _completed(compiled, tensors, held)
        self.run = trace.python.function(trace.original, run)
        self.fast_path: CallFastPath | None = None
        self.is_free = self.guards is None and self.dropped is None
        if isinstance(compiled, CompiledGraph) and self.is_free and trace.python.is_plain:
            around = partial(trace.python.function, trace.original)  # the trace itself must go
            self.fast_path = CallFastPath(compiled, fits.text, around)  # type: ignore[attr-defined]
        self._references: Sequence[weakref.ref[Any]] = getattr(fits, "references", ())

    @property
    def is_alive(self) -> bool:
        """Whether all objects that ``fits`` and guards compare by identity are still alive."""
        if self.guards is not None and not self.guards.is_alive:
            return False
        return all(reference() is not None for reference in self._references)

    def moved(self, names: Mapping[str, Any], globals_: Mapping[str, Any]) -> str | None:
        """Return the path of the first frozen tensor that was replaced; None if none was."""
        for frozen in self.frozen:
            try:
                tensor = eval(frozen.where, {"L": names, "G": globals_})
            except (AttributeError, LookupError, TypeError):
                tensor = None
            if tensor is not frozen.tensor:
                return frozen.where
        return None


def _completed(
    compiled: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    held: tuple[torch.Tensor, ...],
) -> Callable[..., Any]:
    """Return the compiled graph as a function of the inputs that are not frozen."""
    frozen = Frozen(len(tensors))
    frozen.bind(tensors, held)
    return lambda *inputs: frozen.put_back(compiled(*inputs, *frozen.now))


def _held(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor


_RESTARTS = 4  # of one trace, where a compiler requests them

# Runs a call without a trace: (name, fallback, function) -> its result.
RunPlain = Callable[[str, Fallback, Callable[[], Any]], Any]

# Compiles a graph: (graph, its example inputs, how many trailing inputs are frozen) -> callable.
Compile = Callable[[fx.GraphModule, list[Any], int], Callable[..., Any]]

# The smallest size that stays dynamic; see Note [Sizes of a symbol].
_LEAST = {"backed": 2, "backed_size_oblivious": 1, "unbacked": 0}

_REMEMBERED = 256  # calls with varying numbers that are not traced
_MANY = 256  # traces of one function: more than a class has layers, so there is a warning


class Traces:
    """All traces of one function; ``made`` has the most recently used one first.

    ``turn`` holds the fast paths of that one. With ``is_closed`` a call is never traced again.
    """

    def __init__(
        self,
        called: Any,
        compile_graph: Compile,
        dims: Mapping[str, Any] | None,
        rules: Rules,
        run_plain: RunPlain | None = None,
    ) -> None:
        self._called = called
        self._hooks = compat.hooks_of(called)
        self._resolve_function()
        spoken = compat.spoken_function(called)
        self._spoken = inspect.signature(spoken)  # behind decorators and hooks
        self._dims = DynamicDims(dims, self._spoken, spoken)
        self._compile = compile_graph
        self._run_plain = run_plain
        self._refused: dict[str, int] = {}  # counts of calls without a trace, by their numbers
        self._rules = rules
        self._count = 0  # of traces since the last invalidation
        self._lock = new_lock()
        self.is_closed = False
        self._unfrozen = False  # whether the model replaces tensors of its own

    @property
    def name(self) -> str:
        return self._function.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trace that serves this call; trace it if there is none."""
        # Counting hooks is slower than checking that there are none.
        if any(self._hooks) if not self._hooked else sum(map(len, self._hooks)) != self._hooked:
            self._resolve_function()
        if self.turn.shorts:
            fast_path = self.turn.other()
            result = ANOTHER if fast_path is None else fast_path(args, kwargs)
            if result is not ANOTHER:
                return result
        call_args, turn = args, self.turn
        if self._bound is not None:
            args = (self._bound, *args)
        made = self.made
        if made and made[0].trusted and made[0].fits(args, kwargs):
            variant: Variant | None = made[0]
        else:
            variant = self._find(args, kwargs)
            if self.turn is not turn:  # another trace than for the last call, with its fast paths
                fast_path = self.turn.other() or self.turn.short
                result = ANOTHER if fast_path is None else fast_path(call_args, kwargs)
                if result is not ANOTHER:
                    return result
        if variant is not None and variant.proven:
            variant.repeated = True  # fast paths begin after such a call
            result = variant.run(*args, **kwargs)
            if variant.fast_path is not None and variant.fast_path.turn.again is not None:
                variant.fast_path.learn(args, kwargs, self._bound, self._hooks)
            return result
        with self._lock:
            variant = self._find(args, kwargs)
            fallback = self._varying(args, kwargs) if variant is None else None
            if fallback is None or self._run_plain is None:
                return self._first(variant or self._traced(args, kwargs), args, kwargs)
        return self._run_plain(self.name, fallback, lambda: self._called(*call_args, **kwargs))

    def _resolve_function(self) -> None:
        """Set the function to trace: with hooks, the one that runs them."""
        self._hooked = sum(map(len, self._hooks))
        self._function, self._bound = compat.traced_function(self._called)
        self._signature = inspect.signature(self._function, follow_wrapped=False)
        self._set_made(())

    def _set_made(self, made: tuple[Variant, ...]) -> None:
        """Set the traces, the first to be tried first, and the fast paths of that one."""
        fast_path = made[0].fast_path if made else None
        self.made = made
        self.turn = Turn() if fast_path is None else fast_path.turn

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
        """Return the trace that serves a call, and try it first from now on; None if none does."""
        for variant in self.made:
            if variant.fits(args, kwargs) and (
                variant.is_free or self._holds(variant, args, kwargs)
            ):
                if variant is not self.made[0]:
                    self._use_first(variant)
                return variant
        return None

    def _first(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a trace whose calls have not ended yet; if this one does, later calls trust it."""
        names = self._names(args, kwargs)
        result = variant.run(*args, **kwargs)
        variant.proven, variant.trusted = True, variant.is_free
        if variant.frozen and variant.moved(names, self._function.__globals__):
            # The result is right: nothing was replaced before. Later calls are traced again.
            log.info("%s replaces tensors of its own; they are looked up from now on", self.name)
            self._unfrozen = True
            self._set_made(tuple(each for each in self.made if not each.frozen))
        return result

    def _holds(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        names = self._names(args, kwargs)
        if variant.guards is not None and not variant.guards.hold(names):
            return False
        if variant.dropped is not None:
            moved = variant.moved(names, self._function.__globals__)
            failed = None if moved is None else f"{moved} is another tensor now"
            if failed is None and not variant.dropped.hold(names):
                failed = variant.dropped.first_that_fails(names)
            if failed is not None:
                raise RecompileError.dropped_guard(name=self.name, guard=failed)
        return True

    def _use_first(self, variant: Variant) -> None:
        with self._lock:
            others = tuple(each for each in self.made if each is not variant)
            if len(others) < len(self.made):  # else it was dropped in the meantime
                self._set_made((variant, *others))

    def _names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the locals of a call, by the names that Dynamo's guards and sources use."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        names = bound.arguments
        cells = self._function.__closure__ or ()
        for name, cell in zip(self._function.__code__.co_freevars, cells, strict=True):
            names[name] = cell.cell_contents
        return names

    def clear(self) -> None:
        """Forget all traces."""
        with self._lock:
            self._set_made(())
            self._refused.clear()
            self._count, self._unfrozen = 0, False
            compat.drop_trace_caches()

    # -------------------------------------------------------------- a new trace

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        if self.is_closed:
            raise RecompileError.closed(name=self.name, why=self._why_none_serves(args, kwargs))
        self._signature.bind(*args, **kwargs)  # a call that Python refuses, refused by Python
        least = _LEAST[self._rules.shapes]  # smaller sizes are constants of a trace of their own
        dims = self._dims.of_call(self._named(args, kwargs))
        dims = [each for each in dims if each.size >= least]
        small = [each for each in dims if each.size < 2]
        if not small:
            return self._made(args, kwargs, dims)
        if self._rules.shapes == "unbacked":
            variant = self._made(args, kwargs, dims)
            if self._serves(variant, args, kwargs):
                return variant
            return self._made(args, kwargs, [each for each in dims if each not in small])
        # torch would treat a size of 1 as a constant.
        larger = with_two_rows(args, kwargs, dims)
        if not any(self._serves(each, *larger[:2]) for each in self.made):
            try:
                variant = self._attempt(*larger)
            except compat.CannotTrace as error:  # other arguments may depend on the size as well
                log.info("%s: traced with the sizes that it has: %s", self.name, error)
            else:
                if self._serves(variant, args, kwargs):
                    return variant
        return self._made(args, kwargs, [each for each in dims if each not in small])

    def _varying(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fallback | None:
        """Return the fallback of a call that differs from all traces in a number alone.

        That is, ``VARYING`` such traces have served one call only. A number that recurs that often
        without a trace is traced, and replaces the oldest trace.
        """
        if self.is_closed or len(self.made) < VARYING or capture_postponed():
            return None
        self._signature.bind(*args, **kwargs)  # a call that Python refuses, refused by Python
        numbers = self._numbers(args, kwargs)
        key = tuple(number for _, number in numbers)
        once = [
            variant
            for variant in self.made
            if not variant.repeated
            and len(variant.numbers) == len(key) > 0
            and self._serves(variant, *with_numbers(args, kwargs, variant.numbers))
        ]
        if len(once) < VARYING:
            return None
        once.sort(key=lambda variant: variant.number)
        if not self._is_rare(key, once[0]):
            return None
        columns = zip(*(variant.numbers for variant in once), strict=True)
        varied = [(name, column) for (name, _), column in zip(numbers, columns, strict=True)]
        name, values = max(varied, key=lambda each: len(set(map(repr, each[1]))))
        return varying_number(name, values, "a trace")

    def _is_rare(self, numbers: tuple[Any, ...], oldest: Variant) -> bool:
        """Count a call with these numbers; return whether they stay without a trace."""
        key = repr(numbers)  # tells 1 from 1.0, and nan is itself
        count = self._refused.pop(key, 0) + 1
        if count > VARYING:
            self._set_made(tuple(each for each in self.made if each is not oldest))
            return False
        self._refused[key] = count  # at the end: the oldest one is dropped
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return True

    def _serves(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not variant.fits(args, kwargs):
            return False
        return variant.guards is None or variant.guards.hold(self._names(args, kwargs))

    def _made(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]
    ) -> Variant:
        """Trace a call and compile its graph."""
        try:
            return self._attempt(args, kwargs, dims)
        except compat.CannotTrace as error:
            if error.model_raises:  # in Python, and would not be seen here with its own type
                self._function(*args, **kwargs)  # raises what the model raises
            raise TraceError.refused(name=self.name, why=str(error)) from error

    def _attempt(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]
    ) -> Variant:
        with self._tracing(dims):
            for _ in range(_RESTARTS):
                # A compiler may request another trace; Dynamo remembers with which changes.
                with suppress(*compat.restarts()):
                    variant = self._new(args, kwargs, dims)
                    break
            else:
                variant = self._new(args, kwargs, dims)
        log.info("%s: %s", self.name, variant.start)
        variant.numbers = tuple(number for _, number in self._numbers(args, kwargs))
        self._add(variant)
        return variant

    @contextmanager
    def _tracing(self, dims: list[TensorDim]) -> Iterator[None]:
        """Set what a trace may assume: these dimensions vary, the rest is in the rules."""
        unbacked = self._rules.shapes == "unbacked"
        marks = [(each.tensor, each.dim, each.name) for each in dims]
        oblivious = self._rules.shapes == "backed_size_oblivious"
        with (
            without_garbage_collection(),  # 0.4 to 0.9 s of a trace of 3.6 s
            compat.size_oblivious(oblivious),
            compat.marked(marks, unbacked),
        ):
            try:
                yield
            finally:
                compat.drop_trace_caches()

    def _add(self, variant: Variant) -> None:
        self._set_made((variant, *(each for each in self.made if each.is_alive)))
        self._count += 1
        variant.number = self._count
        if self._count == _MANY:
            log.warning(
                "%s has been traced %d times, and each was compiled. An object as an argument must "
                "be the same object at each call; after freeze() such a call is an error",
                self.name,
                _MANY,
            )

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim]) -> Variant:
        start = time.perf_counter()
        with closing(self._trace(args, kwargs)) as trace:
            check_dims(self.name, dims, trace.sizes)
            return self._variant(trace, args, kwargs, dims, start)

    @property
    def _freezes(self) -> bool:
        """Whether tensors of the model are bound, not looked up at each call."""
        return self._rules.guards == "none" and not self._unfrozen

    def _variant(
        self,
        trace: compat.Trace,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[TensorDim],
        start: float,
    ) -> Variant:
        """Compile the graph of a trace."""
        traced = time.perf_counter()
        compiled = None
        if trace.graph is not None:
            with trace.compiling():
                compiled = self._compile(trace.graph, trace.inputs, len(trace.frozen))
        check_dims(self.name, dims, trace.sizes)  # a compiler may fix a size as well
        fits = self._fits(trace, args, kwargs, dims)
        seconds = traced - start, time.perf_counter() - traced
        return Variant(trace, compiled, fits, self._rules, Start(*seconds), self._freezes)

    def _fits(
        self,
        trace: compat.Trace,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[TensorDim],
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
        """Return the function that compares another call with this one."""
        shapes = free_sizes(dims) | trace.sizes
        paths = argument_paths(self._signature, args, kwargs)
        named = {paths[position]: value for position, value in enumerate(args)}
        named |= {paths[name]: value for name, value in kwargs.items()}
        tensors = tensors_in(named)
        pinned = {
            one
            for pair in trace.aliases
            for one, other in (pair, pair[::-1])
            if one in tensors and other not in tensors
        }
        others = {id(tensor) for tensor in trace.global_tensors}
        others |= {id(tensors[path]) for path in pinned}
        pinned |= {path for path, tensor in tensors.items() if id(tensor) in others}
        collected = [name for name in kwargs if name not in self._signature.parameters]
        scope = {"L": self._names(args, kwargs), "G": self._function.__globals__}
        elsewhere = tensors_elsewhere(trace.sizes, tensors, scope)
        conditions = trace.size_conditions()
        return fits_function(
            args, kwargs, paths, shapes, conditions, trace.strides, pinned, collected, elsewhere
        )

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> compat.Trace:
        called = self._function if self._bound is not None else self._called
        trace = compat.trace_call(called, args, kwargs, freeze=self._freezes)
        if trace.written_globals:
            raise TraceError.writes_globals(name=self.name, names=", ".join(trace.written_globals))
        return trace

    def _numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return (name, number) of the numbers, in the order of :func:`with_numbers`."""
        return [
            (f"{name}{path}", leaf)
            for name, _, value in self._named(args, kwargs)
            for path, leaf in compat.tree_paths(value)
            if is_number(leaf)
        ]

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, Any]]:
        """Return (name of the parameter, Dynamo's path of it, value) of each argument."""
        paths = argument_paths(self._signature, args, kwargs)
        positional, rest, anything = parameter_kinds(self._spoken)
        named = [
            (positional[index] if index < len(positional) else rest, paths[index], value)
            for index, value in enumerate(args)
        ]
        for name, value in kwargs.items():
            own = name in self._spoken.parameters or name in self._dims.by_name
            named.append((name if own else anything, paths[name], value))
        return named

    def _why_none_serves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        names = self._names(args, kwargs)
        for variant in self.made:
            if variant.fits(args, kwargs) and variant.guards is not None:
                return variant.guards.first_that_fails(names)
        shown = [f"{name}: {_described(value)}" for name, value in names.items() if name != "self"]
        return "no trace is for arguments like " + ", ".join(shown)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
