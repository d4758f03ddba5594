"""The backend: what happens to one graph that Dynamo traced, on one page.

``torch.compile(model, backend="cgcompile")`` finds :data:`backend` through the entry point group
``torch_dynamo_backends``; ``torch.compile(model, backend=cgcompile.Backend(config))`` is the typed
door. Both are one thing: the named door keeps a :class:`Backend` for each set of settings, because
torch resolves a name to one object per process.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.boundaries import Boundaries, UnmetOps
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.context import current_forward_context
from cgcompile.errors import ConfigError, DispatchError
from cgcompile.graphs.capture import releasing, without_garbage_collection
from cgcompile.graphs.capture_all import BulkCapture, capture_all
from cgcompile.graphs.cuda import wait_for_inputs
from cgcompile.graphs.timeline import Timeline
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.passes import check_disabled
from cgcompile.pieces.cache import PieceCache, trace_code, trace_split
from cgcompile.pieces.compilers import compile_pieces, inductor_patches
from cgcompile.pieces.stitch import check_sizes, split_as_set
from cgcompile.reasons import Counters, Ledger, Reason, Why
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.settings import checked

log = logging.getLogger(__name__)


class _OfInstances:
    """A method that the class itself does not have.

    ``torch._dynamo.reset()`` calls ``reset`` of all that was ever passed as a backend, of the class
    ``Backend`` too after ``torch.compile(model, backend=cgcompile.Backend)``.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Callable[[], None]:
        if instance is None:
            raise AttributeError(f"{owner.__name__} is a class: make an instance of it")
        return partial(self._function, instance)


class Backend:
    """A backend with fixed settings, and the user's handle over what it compiled.

    ``torch.compile(model, backend=cgcompile.Backend(config))``.

    Args:
        config: the settings; environment and defaults if left out.
        **settings: single settings; they beat ``config``.

    Attributes:
        wrappers: those that were adopted and still live.

    Raises:
        ConfigError: unknown, malformed or impossible settings.
    """

    def __init__(
        self, config: CompilationConfig | None = None, *traced: Any, **settings: Any
    ) -> None:
        if traced or isinstance(config, fx.GraphModule):  # torch.compile(backend=Backend)
            raise ConfigError.backend_class()
        self.config = CompilationConfig.resolve(config, arguments=settings)
        theirs = (*self.config.graph_passes, *self.config.piece_passes)
        check_disabled(self.config.disabled_passes, theirs)
        self.__name__ = "cgcompile"  # torch shows it where the backend raises
        self._graphs: list[weakref.ref[CompiledGraph]] = []
        self._shape_envs: weakref.WeakSet[Any] = weakref.WeakSet()  # of Dynamo's traces
        self._capture_closed, self._compiled = False, 0  # how often torch.compile called
        self._forget: weakref.WeakSet[Any] = weakref.WeakSet()  # traces of compile()
        self._pieces = PieceCache(self.config)
        self._unmet: UnmetOps | None = None
        self._ledger = _ledger()  # of calls that reach no graph
        self.wrappers: weakref.WeakSet[CUDAGraphWrapper] = weakref.WeakSet()

    def remember(self, traces: Any) -> None:
        """Let :meth:`invalidate` clear the traces of a compiled model as well."""
        self._forget.add(traces)

    def adopt(self, wrapper: CUDAGraphWrapper) -> None:
        """Count, capture and release with this handle what a wrapper captures as well.

        That of a model of :func:`cgcompile.compile` that is not traced. Held weakly.
        """
        wrapper.closed = self._capture_closed
        self.wrappers.add(wrapper)

    def anticipate(self, model: Any) -> None:
        """Start what compiling a model will need and what takes a while; waits for nothing.

        Processes that compile kernels for a GPU, so that they are there when the model has been
        traced. Inductor starts them in any case, where it loads compiled kernels from disk as well.

        Args:
            model: what will be traced: a module, or a method of one.
        """
        config, owner = self.config, getattr(model, "__self__", model)
        if config.mode is CompilationMode.PIECEWISE and config.compiler != "inductor":
            return
        own = isinstance(owner, torch.nn.Module) and (*owner.parameters(), *owner.buffers())
        if any(each.is_cuda for each in own or ()):
            try:
                compat.start_compile_workers()
            except (OSError, RuntimeError) as error:  # no process, no thread: told again later
                log.info("no compile workers yet: %s", error)

    @property
    def num_compilations(self) -> int:
        """How many graphs were compiled so far; those that are gone count as well."""
        return self._compiled

    @property
    def graphs(self) -> tuple[CompiledGraph, ...]:
        """The compiled graphs that still live, in the order they were made.

        Dynamo owns them: ``torch._dynamo.reset()`` frees them, and so does the death of the code.
        """
        found = (reference() for reference in self._graphs)
        return tuple(graph for graph in found if graph is not None)

    @property
    def counters(self) -> Counters:
        """What all calls of these graphs did, of wrappers, and without either, in one sum."""
        found = [each.counters for each in self.graphs]
        return sum(found + [each.counters for each in self.wrappers], self._ledger.counters)

    @checked
    def capture(
        self,
        step: Callable[[Any], Any],
        batches: Iterable[Any],
        *,
        size: Callable[[Any], int] | None = None,
    ) -> BulkCapture:
        """Warm and capture all batches of a model, the largest first.

        Args:
            step: ``step(batch)`` prepares inputs afresh and calls the compiled model once, in a
                forward context or without one. It is called for each batch at least twice.
            batches: numbers of tokens, batch descriptors, or whatever ``step`` takes.
            size: what is larger; left out: the number itself, or its ``num_tokens``.

        Returns:
            Which batches have graphs now, and why the others have none.

        Raises:
            DispatchError: with ``strict``, a batch has no graph.
            BaseException: what ``step`` raised.
        """
        return capture_all(
            step,
            batches,
            self,
            size=size,
            settled=lambda: self.num_compilations,
            warmups=self.config.num_warmups,
            strict=self.config.strict,
        )

    @checked
    def invalidate(self, reason: str) -> None:
        """Drop all graphs because something that they hold is not so any more.

        Steps warm up and capture again, unless capture is closed.

        Args:
            reason: what has changed; for the log.
        """
        for graph in self.graphs:
            graph.invalidate(reason)
        for wrapper in tuple(self.wrappers):
            wrapper.clear_graphs()
        for forget in tuple(self._forget):
            forget.clear()

    def close_capture(self) -> None:
        """Capture nothing any more, in any thread, what is compiled later included.

        What has no graph runs plain, counted; with ``strict`` it raises.
        """
        self._capture_closed = True
        for graph in self.graphs:
            graph.close_capture()
        for wrapper in tuple(self.wrappers):
            wrapper.closed = True

    def release(self) -> None:
        """Free all CUDA graphs and their memory; capture is open again.

        Results that a replay returned under a forward context lie in that memory: drop them first.
        Graphs of models that are gone are freed as well, or by the next capture. Waits for captures
        of other threads to end.

        Raises:
            CaptureError: called inside of a step or of a capture.
        """
        self._capture_closed = False
        for graph in self.graphs:
            graph.release()
        for wrapper in tuple(self.wrappers):
            wrapper.clear_all_graphs()
            wrapper.closed = False
        with releasing():  # graphs of models that are gone as well
            pass

    @_OfInstances
    def reset(self) -> None:
        """Forget what was compiled; ``torch._dynamo.reset()`` calls it."""
        self._graphs.clear()
        self._ledger = _ledger()
        for shape_env in tuple(self._shape_envs):
            compat.drop_fakes(shape_env)
        self._shape_envs.clear()
        compat.drop_trace_caches()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """Compile one graph that Dynamo traced; ``torch.compile`` calls this.

        Args:
            gm: Dynamo's pre-grad graph.
            example_inputs: what it was traced with.
            mode: must be left out: the settings are fixed.
            options: must be left out: the settings are fixed.
        """
        if mode is not None or options:
            raise ConfigError.settings_are_fixed()
        if self.config.mode is CompilationMode.DYNAMO_TRACE_ONCE:
            raise ConfigError.trace_once_needs_guards_dropped()
        if self.config.splitting == "breakable":
            raise ConfigError.breakable_needs_no_trace()
        compat.watch_recompile_limit()
        shape_env = compat.current_shape_env()
        if shape_env is not None:
            self._shape_envs.add(shape_env)
        with without_garbage_collection():
            return self.compile_graph(gm, example_inputs)

    def recompile_limit_reached(
        self, detail: str, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Count that Dynamo compiles a function no more; it calls this before the call runs eager.

        Raises:
            DispatchError: ``strict``.
        """
        if self.config.strict:
            raise DispatchError.strict(
                what="the model", reason=Reason.RECOMPILE_LIMIT.value, detail=detail
            )
        log.warning("%s. Let what varies be a tensor, or raise the limit", detail)
        self._ledger.degraded(Why(Reason.RECOMPILE_LIMIT, detail))

    def run_plain(self, name: str, why: Why, function: Callable[[], Any]) -> Any:
        """Run a call that no graph of this handle serves, and count it.

        Raises:
            DispatchError: ``strict``.
            BaseException: what the function raised.
        """
        context = current_forward_context()
        if context is not None and context.inputs_ready is not None:
            wait_for_inputs(context.inputs_ready, None)
        try:
            if self.config.strict:
                raise DispatchError.strict(what=name, reason=why.reason.value, detail=why.detail)
            result = function()
        except BaseException:
            self._ledger.failed()
            raise
        self._ledger.plain(why)
        return result

    def compile_graph(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, frozen: int = 0
    ) -> Callable[..., Any]:
        """Compile one traced graph in the mode of the settings; :meth:`__call__` without doors.

        Args:
            gm: a pre-grad graph of Dynamo.
            example_inputs: what it was traced with.
            frozen: how many of the last inputs are the same objects, at the same addresses, in all
                calls; nobody needs to look.
        """
        config = self.config
        if config.cudagraph_mode is CUDAGraphMode.NONE:
            if config.mode is CompilationMode.NONE:
                return gm.forward
            if config.mode is not CompilationMode.PIECEWISE:
                return compat.compile_whole(gm, example_inputs, inductor_patches(config))
        self._compiled += 1
        unmet = self._look_for_declared(gm)
        make = _compile_piecewise if config.mode is CompilationMode.PIECEWISE else _compile_unsplit
        with compat.new_sources() as sources:
            graph = make(gm, config, self._pieces, frozen)
        compat.drop_sources_with(graph, sources)
        trace_code(graph.source, graph.artifacts, graph.compilation)
        if unmet is not None:
            for piece in graph.split.pieces:  # passes may have put the op in
                unmet.look(piece.module)
            graph.before_capture = unmet.tell
        if self._capture_closed:
            graph.close_capture()
        self._graphs = [each for each in self._graphs if each() is not None]
        self._graphs.append(weakref.ref(graph))
        return graph

    def _look_for_declared(self, gm: fx.GraphModule) -> UnmetOps | None:
        """Note which declared splitting ops a graph has; None if none was declared."""
        if self._unmet is None and self.config.splitting_ops:
            self._unmet = UnmetOps(Boundaries(self.config.splitting_ops, builtin=False))
        if self._unmet is not None:
            self._unmet.look(gm)
        return self._unmet


def _ledger() -> Ledger:
    timeline = Timeline()
    return Ledger(timeline.plain, timeline.refused)


def _compile_unsplit(
    gm: fx.GraphModule, config: CompilationConfig, cache: PieceCache, frozen: int
) -> CompiledGraph:
    """Compile a whole graph for FULL graphs, if the boundaries that it holds allow them."""
    split, nothing = split_as_set(gm, config)
    trace_split(split)
    compiled = config.mode is not CompilationMode.NONE
    whole = replace(
        config, mode=CompilationMode.PIECEWISE, compiler="inductor" if compiled else "eager"
    )
    runnables, compilation = compile_pieces(split, whole, cache)
    return CompiledGraph(split, runnables, nothing, whole, compilation, frozen=frozen)


def _compile_piecewise(
    gm: fx.GraphModule, config: CompilationConfig, cache: PieceCache, frozen: int
) -> CompiledGraph:
    """Split, check, compile, stitch."""
    compat.make_floats_constant(gm)
    split, boundaries = split_as_set(gm, config)
    log.info("split graph:\n%s", split)
    trace_split(split)
    check_sizes(split, config)
    runnables, compilation = compile_pieces(split, config, cache)
    check_sizes(split, config)  # a compiler may add guards of its own
    return CompiledGraph(split, runnables, boundaries, config, compilation, frozen=frozen)


class NamedBackend:
    """What the name ``"cgcompile"`` stands for: one :class:`Backend` for each set of settings."""

    def __init__(self) -> None:
        self.__name__ = "cgcompile"
        self._handles: list[Backend] = []

    def handle(self, mode: str | None, options: Mapping[str, Any] | None) -> Backend:
        """The backend that serves ``torch.compile(mode=mode, options=options)``."""
        config = CompilationConfig.resolve(options=options, torch_mode=mode)
        if mode is not None and config.compiler == "inductor":
            tuned = {**compat.inductor_mode_options(mode), **dict(config.inductor_options)}
            config = CompilationConfig.resolve(config, options={"inductor_options": tuned})
        for handle in self._handles:  # compared, not hashed: settings may hold lists
            if handle.config == config:
                return handle
        self._handles.append(Backend(config))
        return self._handles[-1]

    def reset(self) -> None:
        """Forget everything; ``torch._dynamo.reset()`` calls it."""
        self._handles.clear()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """Compile one graph, with the settings of this ``torch.compile`` call."""
        return self.handle(mode, options)(gm, example_inputs)

    def recompile_limit_reached(
        self, detail: str, mode: str | None, options: Mapping[str, Any] | None
    ) -> None:
        """As of the :class:`Backend` that has the settings of this ``torch.compile`` call."""
        self.handle(mode, options).recompile_limit_reached(detail)


backend = NamedBackend()


def handle_of(model: Any) -> Backend | None:
    """The handle of a model that was compiled here, through whatever door; None of any other."""
    own = getattr(model, "backend", None)
    if isinstance(own, Backend):
        return own
    try:
        return runtime(model)
    except ConfigError:
        return None


def runtime(compiled: Any) -> Backend:
    """The handle of a module that ``torch.compile`` returned, for either door.

    With ``backend="cgcompile"`` all modules of equal settings share one handle, so right after a
    module's first call its graphs are the last ones. Models of one ``Backend`` each stay apart.

    Raises:
        ConfigError: no module, or not compiled with this backend. Of a function keep the object of
            ``backend=cgcompile.Backend(...)``; ``cgcompile.compile`` gives ``model.backend``.
    """
    found, mode, options = compat.backend_of(compiled)
    if isinstance(found, Backend):
        return found
    if isinstance(found, NamedBackend):
        return found.handle(mode, options)
    known = isinstance(getattr(compiled, "backend", None), Backend)
    raise ConfigError.not_compiled_here(found=type(compiled).__name__, knows_handle=known)
