"""The traces of one function: :class:`Traces` finds the one that serves a call, or makes it.

A trace is made once for each kind of call. Nothing is run while it is made, so that the first call
may be of any size.
"""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import fx

from cgcompile import compat
from cgcompile.errors import RecompileError, TraceError
from cgcompile.graphs.capture import capture_postponed, without_garbage_collection
from cgcompile.locks import new_lock
from cgcompile.piecewise.again import ANOTHER, Turn
from cgcompile.reasons import VARYING, Why, varying_number
from cgcompile.tracing.arguments import (
    fits_function,
    is_number,
    tensors_elsewhere,
    tensors_in,
    with_numbers,
)
from cgcompile.tracing.dims import (
    DynamicDims,
    Found,
    argument_paths,
    check_dims,
    free_sizes,
    parameter_kinds,
    with_two_rows,
)
from cgcompile.tracing.saved import CannotSave, KeptTraces, SavedTrace, facts_of_call, saved
from cgcompile.tracing.variant import Rules, Start, Variant

log = logging.getLogger(__name__)

_RESTARTS = 4  # of one trace, as a compiler asks for them

# Runs a call without a trace: (name, why, what to call) -> its result.
RunPlain = Callable[[str, Why, Callable[[], Any]], Any]

# Compiles a graph: (graph, its example inputs, how many of the last are frozen) -> callable.
Compile = Callable[[fx.GraphModule, list[Any], int], Callable[..., Any]]

# The smallest size that stays dynamic; see Note [Sizes of a symbol].
_LEAST = {"backed": 2, "backed_size_oblivious": 1, "unbacked": 0}

_REMEMBERED = 256  # calls with numbers of their own that are not traced
_MANY = 256  # traces of one function: more than a class has layers, so worth a warning


class Traces:
    """All traces of one function.

    Args:
        called: module, bound method or function.
        compile_graph: compiles a traced graph.
        dims: which dimensions vary, by the name of the parameter.
        rules: how calls are told apart.
        kept: where traces without guards are kept; None: nowhere.
        run_plain: counts and runs a call that is not traced; None: all are.

    Attributes:
        made: the traces, the one used last first.
        turn: knows the shortest ways of calls of that one.
        is_closed: whether nothing is traced any more.
    """

    def __init__(
        self,
        called: Any,
        compile_graph: Compile,
        dims: Mapping[str, Any] | None,
        rules: Rules,
        kept: KeptTraces | None = None,
        run_plain: RunPlain | None = None,
    ) -> None:
        self._called = called
        self._hooks = compat.hooks_of(called)
        self._look()
        spoken = compat.spoken_function(called)
        self._spoken = inspect.signature(spoken)  # behind decorators and hooks
        self._dims = DynamicDims(dims, self._spoken, spoken)
        self._compile = compile_graph
        self._run_plain = run_plain
        self._refused: dict[str, int] = {}  # calls without a trace, by their numbers
        self._rules = rules
        self._kept = kept
        self._count = 0  # of traces since the last invalidation
        self._lock = new_lock()
        self.is_closed = False
        self._unfrozen = False  # whether the model replaces tensors of its own

    @property
    def name(self) -> str:
        return self._function.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trace that serves this call; trace it if there is none."""
        # Counting is slower than seeing that there are none.
        if any(self._hooks) if not self._hooked else sum(map(len, self._hooks)) != self._hooked:
            self._look()
        if self.turn.shorts:
            way = self.turn.other()
            result = ANOTHER if way is None else way(args, kwargs)
            if result is not ANOTHER:
                return result
        given, turn = args, self.turn
        if self._bound is not None:
            args = (self._bound, *args)
        made = self.made
        if made and made[0].trusted and made[0].fits(args, kwargs):
            variant: Variant | None = made[0]
        else:
            variant = self._found(args, kwargs)
            if self.turn is not turn:  # traces take turns, and this one may know a way
                way = self.turn.other() or self.turn.short
                result = ANOTHER if way is None else way(given, kwargs)
                if result is not ANOTHER:
                    return result
        if variant is not None and variant.proven:
            variant.repeated = True  # short ways begin after such a call
            result = variant.run(*args, **kwargs)
            if variant.shortcut is not None and variant.shortcut.turn.again is not None:
                variant.shortcut.learn(args, kwargs, self._bound, self._hooks)
            return result
        with self._lock:
            variant = self._found(args, kwargs)
            why = self._why_varying(args, kwargs) if variant is None else None
            if why is None or self._run_plain is None:
                return self._first(variant or self._traced(args, kwargs), args, kwargs)
        return self._run_plain(self.name, why, lambda: self._called(*given, **kwargs))

    def _look(self) -> None:
        """What is to be traced: with hooks, what runs them as well."""
        self._hooked = sum(map(len, self._hooks))
        self._function, self._bound = compat.traced_function(self._called)
        self._signature = inspect.signature(self._function, follow_wrapped=False)
        self._set_made(())

    def _set_made(self, made: tuple[Variant, ...]) -> None:
        """These traces are there, the first to be tried first."""
        shortcut = made[0].shortcut if made else None
        self.made = made
        self.turn = Turn() if shortcut is None else shortcut.turn

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
        """The trace that serves a call."""
        for variant in self.made:
            if variant.fits(args, kwargs) and (
                variant.is_free or self._holds(variant, args, kwargs)
            ):
                if variant is not self.made[0]:
                    self._use_first(variant)
                return variant
        return None

    def _first(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call of a trace that ends well."""
        names = self._names(args, kwargs)
        result = variant.run(*args, **kwargs)
        variant.proven, variant.trusted = True, variant.is_free
        if variant.frozen and variant.moved(names, self._function.__globals__):
            # The result is right: nothing had moved before. Later calls are traced again.
            log.info("%s replaces tensors of its own; they are looked up from now on", self.name)
            self._unfrozen = True
            self._set_made(tuple(each for each in self.made if not each.frozen))
        elif variant.keep is not None:
            variant.keep()
            variant.keep = None
        return result

    def _holds(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        names = self._names(args, kwargs)
        if variant.guards is not None and not variant.guards.hold(names):
            return False
        if variant.dropped is not None:
            moved = variant.moved(names, self._function.__globals__)
            if moved is not None:
                raise RecompileError.dropped_guard(self.name, f"{moved} is another tensor now")
            if not variant.dropped.hold(names):
                failed = variant.dropped.first_that_fails(names)
                raise RecompileError.dropped_guard(self.name, failed)
        return True

    def _use_first(self, variant: Variant) -> None:
        with self._lock:
            others = tuple(each for each in self.made if each is not variant)
            if len(others) < len(self.made):  # else it was dropped in the meantime
                self._set_made((variant, *others))

    def _names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The locals of a call, as Dynamo's guards and sources speak of them."""
        found = self._signature.bind(*args, **kwargs)
        found.apply_defaults()
        names = found.arguments
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
            raise RecompileError.closed(self.name, self._why_none_serves(args, kwargs))
        self._signature.bind(*args, **kwargs)  # a call that Python refuses, refused by Python
        least = _LEAST[self._rules.shapes]  # smaller sizes are constants of a trace of their own
        dims = self._dims.found(self._named(args, kwargs))
        dims = [each for each in dims if each.size >= least]
        small = [each for each in dims if each.size < 2]
        if not small:
            return self._made(args, kwargs, dims)
        if self._rules.shapes == "unbacked":
            variant = self._made(args, kwargs, dims)
            if self._serves(variant, args, kwargs):
                return variant
            return self._made(args, kwargs, [each for each in dims if each not in small])
        # torch would take a size of 1 for a constant.
        larger = with_two_rows(args, kwargs, dims)
        if not any(self._serves(each, *larger[:2]) for each in self.made):
            try:
                variant = self._attempt(*larger)
            except compat.CannotTrace as error:  # other arguments may speak of the size as well
                log.info("%s: traced with the sizes that it has: %s", self.name, error)
            else:
                if self._serves(variant, args, kwargs):
                    return variant
        return self._made(args, kwargs, [each for each in dims if each not in small])

    def _why_varying(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Why | None:
        """Return why a call is not traced: a number among its arguments differs at each call.

        Of the traces that would serve the call but for its numbers, ``VARYING`` have served one
        call each. A number that comes as often without a trace gets one, in place of the oldest.
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
        """Count a call with these numbers; whether they stay without a trace."""
        key = repr(numbers)  # tells 1 from 1.0, and nan is itself
        count = self._refused.pop(key, 0) + 1
        if count > VARYING:
            self._set_made(tuple(each for each in self.made if each is not oldest))
            return False
        self._refused[key] = count  # the last one
        if len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return True

    def _serves(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not variant.fits(args, kwargs):
            return False
        return variant.guards is None or variant.guards.hold(self._names(args, kwargs))

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[Found]) -> Variant:
        """Trace a call and compile what comes of it."""
        try:
            return self._attempt(args, kwargs, dims)
        except compat.CannotTrace as error:
            if error.model_raises:  # in Python, and would not be seen here with its own type
                self._function(*args, **kwargs)  # raises what the model raises
            raise TraceError.refused(self.name, str(error)) from error

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[Found]) -> Variant:
        with self._tracing(dims):
            variant = self._read(args, kwargs, dims)
            for _ in range(_RESTARTS):
                if variant is None:  # a compiler may want another trace; Dynamo remembers how
                    with suppress(*compat.restarts()):
                        variant = self._new(args, kwargs, dims)
            variant = variant or self._new(args, kwargs, dims)
        log.info("%s: %s", self.name, variant.start)
        variant.numbers = tuple(number for _, number in self._numbers(args, kwargs))
        self._add(variant)
        return variant

    @contextmanager
    def _tracing(self, dims: list[Found]) -> Iterator[None]:
        """What is around a trace: these dimensions vary, and the rules say what may be assumed."""
        unbacked = self._rules.shapes == "unbacked"
        marks = [(each.tensor, each.dim, each.name) for each in dims]
        oblivious = self._rules.shapes == "backed_size_oblivious"
        with (
            without_garbage_collection(),  # 0.4 to 0.9 s of a trace of 3.6 s
            compat.size_oblivious(oblivious),
            compat.marked(marks, unbacked),
            compat.trace_caches_dropped(),
        ):
            yield

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

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[Found]
    ) -> Variant | None:
        """The trace that another process has left for such a call; None if there is none."""
        if self._keeps is None:
            return None
        start = time.perf_counter()
        facts = facts_of_call(self._function, args, kwargs, dims, self._rules.shapes)
        trace = self._keeps.find(facts, self._function, self._names(args, kwargs), dims)
        if trace is None:
            return None
        try:
            variant = self._variant(trace, args, kwargs, dims, start)
        except Exception as error:  # what is wrong with the model, a new trace will tell
            log.warning("%s: the trace on disk cannot be used: %s", self.name, error)
            return None
        return variant if variant.fits(args, kwargs) else None

    def _new(self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[Found]) -> Variant:
        start, why = time.perf_counter(), ""
        with closing(self._trace(args, kwargs)) as trace:
            check_dims(self.name, dims, trace.sizes)
            keep, keeps = None, self._keeps
            if keeps is not None:
                facts = facts_of_call(self._function, args, kwargs, dims, self._rules.shapes)
                try:
                    data = saved(trace, self._names(args, kwargs), dims)
                    keep = lambda: keeps.keep(facts, data)  # noqa: E731
                except CannotSave as error:
                    why = str(error)
            variant = self._variant(trace, args, kwargs, dims, start, why)
            variant.keep = keep
            return variant

    @property
    def _freezes(self) -> bool:
        """Whether tensors of the model are bound, not looked up."""
        return self._rules.guards == "none" and not self._unfrozen

    @property
    def _keeps(self) -> KeptTraces | None:
        """Where such traces are kept: those that depend on nothing at later calls."""
        return self._kept if self._freezes and not self._rules.check_guards else None

    def _variant(
        self,
        trace: compat.Trace | SavedTrace,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[Found],
        start: float,
        why: str = "",
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
        took = Start(*seconds, from_disk=isinstance(trace, SavedTrace), why=why)
        return Variant(trace, compiled, fits, self._rules, took, self._freezes)

    def _fits(
        self,
        trace: compat.Trace | SavedTrace,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[Found],
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
        """Whether another call is like this one."""
        shapes = free_sizes(dims) | trace.sizes
        paths = argument_paths(self._signature, args, kwargs)
        named = {paths[position]: value for position, value in enumerate(args)}
        named |= {paths[name]: value for name, value in kwargs.items()}
        places = tensors_in(named)
        pinned = {
            one
            for pair in trace.aliases
            for one, other in (pair, pair[::-1])
            if one in places and other not in places
        }
        others = {id(each) for each in trace.global_tensors}
        others |= {id(places[place]) for place in pinned}
        pinned |= {place for place, leaf in places.items() if id(leaf) in others}
        collected = [name for name in kwargs if name not in self._signature.parameters]
        scope = {"L": self._names(args, kwargs), "G": self._function.__globals__}
        elsewhere = tensors_elsewhere(trace.sizes, places, scope)
        conditions = trace.size_conditions()
        return fits_function(
            args, kwargs, paths, shapes, conditions, trace.strides, pinned, collected, elsewhere
        )

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> compat.Trace:
        called = self._function if self._bound is not None else self._called
        trace = compat.trace_call(called, args, kwargs, freeze=self._freezes)
        if trace.written_globals:
            raise TraceError.writes_globals(self.name, ", ".join(trace.written_globals))
        return trace

    def _numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """(name, number) of the numbers among arguments, in the order of :func:`with_numbers`."""
        return [
            (f"{name}{path}", leaf)
            for name, _, value in self._named(args, kwargs)
            for path, leaf in compat.tree_paths(value)
            if is_number(leaf)
        ]

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, Any]]:
        """(name of the parameter, where Dynamo finds it, value) of each argument."""
        paths = argument_paths(self._signature, args, kwargs)
        positional, rest, anything = parameter_kinds(self._spoken)
        found = [
            (positional[place] if place < len(positional) else rest, paths[place], value)
            for place, value in enumerate(args)
        ]
        for name, value in kwargs.items():
            own = name in self._spoken.parameters or self._dims.knows(name)
            found.append((name if own else anything, paths[name], value))
        return found

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
