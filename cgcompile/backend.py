"""The torch backend: how one graph that Dynamo traced is compiled, on one page.

Pass a :class:`Backend` object for typed settings, ``torch.compile(model,
backend=cgcompile.Backend(config))``, or the name ``"cgcompile"``, which the entry point group
``torch_dynamo_backends`` resolves to :data:`backend`: one :class:`Backend` for each distinct set of
settings. Both compile a graph by :meth:`Backend.compile_graph`: adapt, split, compile the pieces,
build the :class:`~cgcompile.runtime.compiled_graph.CompiledGraph`, adapt its calls. What was
compiled is registered in :class:`~cgcompile.registry.Registry`, which ``Backend`` extends.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx

from cgcompile.adapters.adapter import AdaptedGraph, Adapter, innermost
from cgcompile.adapters.numbers import adapt_numbers
from cgcompile.boundaries import Boundaries, UnmetOps
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.counts import count
from cgcompile.errors import ConfigError, TraceError
from cgcompile.graphs.capture import without_garbage_collection
from cgcompile.kernels import load_triton
from cgcompile.passes.nodes import has_subclasses
from cgcompile.passes.pipeline import check_disabled
from cgcompile.passes.split import split_data
from cgcompile.pieces.cache import PieceCache
from cgcompile.pieces.compilers import compile_pieces, inductor_patches
from cgcompile.pieces.stitch import check_sizes, split_by_config
from cgcompile.reasons import Reason
from cgcompile.registry import Registry
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.torch_compat import dynamo, inductor, presence, torch_settings

log = logging.getLogger(__name__)


class Backend(Registry):
    """A backend with fixed settings, and the user's handle over what it compiled.

    ``torch.compile(model, backend=cgcompile.Backend(config))``.

    Args:
        config: the settings; environment and defaults if left out.
        **settings: single settings; they beat ``config``.

    Attributes:
        config: the settings.
        untraced: the live wrappers of untraced models.

    Raises:
        ConfigError: unknown, malformed or impossible settings.

    Example:
        >>> backend = cgcompile.Backend(num_warmups=1)
        >>> model = torch.compile(nn.Linear(8, 8), backend=backend)
        >>> with torch.inference_mode():
        ...     for _ in range(3):  # warm up, capture, replay
        ...         y = model(torch.randn(4, 8))
        >>> backend.counters.captures, backend.counters.replays
        (1, 1)
    """

    def __init__(
        self, config: CompilationConfig | None = None, *traced: Any, **settings: Any
    ) -> None:
        if traced or isinstance(config, fx.GraphModule):  # torch.compile(backend=Backend)
            raise ConfigError.backend_class()
        super().__init__(CompilationConfig.resolve(config, arguments=settings))
        check_disabled(
            self.config.disabled_passes, (*self.config.graph_passes, *self.config.piece_passes)
        )
        presence.warn_of_untested_torch()
        if self.config.splitting == "fx":  # with "breakable" nothing is traced
            dynamo.watch_dynamo()
        self.__name__ = "cgcompile"  # torch shows it where the backend raises
        self._shape_envs: weakref.WeakSet[Any] = weakref.WeakSet()  # one per trace of Dynamo
        self.pieces = PieceCache(self.config)
        if self.config.kernels:
            load_triton()
        self._floats: dict[Any, float] = {}  # floats seen, see :func:`dynamo.varied_floats`
        self._unmet: UnmetOps | None = None
        self._differences: dict[int, list[str]] = {}  # Dynamo frame -> why not to pad

    def __reduce__(self) -> Any:
        return type(self), (self.config,)  # a copy has compiled nothing yet

    def __repr__(self) -> str:
        mode, counts = self.config.cudagraph_mode, self.counters
        compiled = f"{count(len(self.graphs), 'compiled graph')}, "
        compiled += count(len(self.untraced), "wrapper")
        calls = f"{count(counts.calls, 'call')}, {count(counts.replays, 'replay')}"
        skipped = counts.degraded[Reason.NOT_COMPILED]
        skips = f", Dynamo compiled nothing of {count(skipped, 'function')}" if skipped else ""
        return f"<Backend {mode.name if mode else ''}: {compiled}, {calls}{skips}>"

    def anticipate(self, model: Any) -> None:
        """Start the processes that compile kernels for a GPU model or method; do not wait."""
        config, owner = self.config, getattr(model, "__self__", model)
        used = config.mode is not CompilationMode.PIECEWISE or config.first_compiler == "inductor"
        if not used or not isinstance(owner, torch.nn.Module):
            return
        if any(tensor.is_cuda for tensor in (*owner.parameters(), *owner.buffers())):
            try:
                inductor.start_compile_workers()
            except (OSError, RuntimeError) as error:  # Inductor starts them, and raises, later
                log.info("no compile workers yet: %s", error)

    def reset(self: "Backend | None" = None) -> None:
        """Forget what was compiled; ``torch._dynamo.reset()`` calls it."""
        if self is None:  # on the class, after ``torch.compile(model, backend=cgcompile.Backend)``
            return
        self._drop()
        self._floats.clear()
        self._differences.clear()
        for shape_env in tuple(self._shape_envs):
            dynamo.drop_fakes(shape_env)
        self._shape_envs.clear()
        dynamo.drop_trace_caches()

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """Compile one pre-grad graph of Dynamo; ``torch.compile`` calls this.

        Args:
            gm: the graph.
            example_inputs: what it was traced with.
            mode: must be left out, like ``options``: the settings are fixed.

        Raises:
            ConfigError: ``mode`` or ``options`` of ``torch.compile``; or a mode that traces in
                another way.
        """
        if mode is not None or not (options is None or options == {}):
            raise ConfigError.settings_are_fixed()
        if self.config.mode is CompilationMode.DYNAMO_TRACE_ONCE:
            raise ConfigError.trace_once_needs_guards_dropped()
        if self.config.splitting == "breakable":
            raise ConfigError.breakable_needs_no_trace()
        dynamo.watch_dynamo()
        ahead = dynamo.traced_ahead()
        output = None if ahead is None else ahead.output
        try:
            dynamo.guard_repeated_regions(gm, output)
        except dynamo.CannotRepeat as error:
            raise TraceError.region(problem=str(error)) from error
        dynamo.guard_signs_of_zeros(output)
        shape_env = dynamo.current_shape_env()
        if shape_env is not None:
            self._shape_envs.add(shape_env)
        if ahead is not None:
            from cgcompile.saved import SavedGraph

            return SavedGraph.compile(self, gm, example_inputs, ahead)
        with without_garbage_collection():
            result = self.compile_graph(gm, example_inputs)
        graph = innermost(result)
        if graph is not None:
            graph.graph_break = dynamo.graph_break(gm)
            frame = torch_settings.current_frame()
            if frame is not None:
                graph.differences = self._differences.setdefault(frame, graph.differences)
        if torch_settings.has_traced_function_modes():
            return torch_settings.without_function_modes_in(result)
        return result

    def compile_graph(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, frozen: int = 0
    ) -> Callable[..., Any]:
        """Compile one pre-grad graph of Dynamo in the mode of the settings.

        1. Adapt it: inputs that no graph holds become tensors.
        2. Split it at the boundaries, and check the sizes of the settings.
        3. Compile the pieces, and check the sizes again.
        4. Build the compiled graph, and register it.
        5. Return it behind its adapters.

        Args:
            gm: the graph.
            example_inputs: what it was traced with.
            frozen: how many of the last inputs keep their identity and address in all calls, so
                that no guard checks them.
        """
        config, pieces = self.config, CompilationMode.PIECEWISE
        if config.cudagraph_mode is CUDAGraphMode.NONE and config.mode is not pieces:
            if config.mode is CompilationMode.NONE:
                return dynamo.with_checkpoints(gm).forward
            return inductor.compile_whole(gm, example_inputs, inductor_patches(config))
        # 1. Adapt: the graph takes tensors in place of subclasses, and of numbers that vary.
        if self._unmet is None and config.splitting_ops:
            self._unmet = UnmetOps(Boundaries(config.splitting_ops, builtin=False))
        if self._unmet is not None:
            self._unmet.discard_met(gm)
        adapters: list[Adapter] = []
        if has_subclasses(gm):  # adapters that few graphs need are imported for those
            from cgcompile.adapters.subclasses import adapt_subclasses

            gm, adapters = adapt_subclasses(gm)
        floats = dynamo.varied_floats(gm, self._floats)
        gm, computing = adapt_numbers(gm, floats, folds=config.mode is pieces)
        adapters += computing
        if adapters or config.pad_lengths is not None:
            frozen = 0  # the caller of the adapters passes all inputs at each call
        with dynamo.new_sources() as sources:
            # 2. Split at the boundaries. In other modes than PIECEWISE the graph is one piece, for
            # FULL graphs where its ops allow them.
            split, boundaries = split_by_config(gm, config)
            log.info("split graph:\n%s", split)
            torch_settings.trace_artifact("cgcompile_split", split.text)
            torch_settings.trace_artifact("cgcompile_split_data", lambda: split_data(split))
            check_sizes(split, config)
            # 3. Compile the pieces.
            if config.mode is not pieces:
                compiler = "eager" if config.mode is CompilationMode.NONE else "inductor"
                config = replace(config, mode=pieces, compiler=compiler)
            with dynamo.floats_settled(floats):
                runnables, compilation = compile_pieces(split, config, self.pieces)
            check_sizes(split, config)  # a compiler may add guards
            # 4. Build the compiled graph, and register it.
            graph = CompiledGraph(split, runnables, boundaries, config, compilation, frozen=frozen)
        dynamo.drop_sources_with(graph, sources)
        torch_settings.trace_artifact("cgcompile_code", lambda: graph.source)
        torch_settings.trace_artifact(
            "cgcompile_compilation", lambda: f"{graph.compilation}\n\n{graph.artifacts}\n"
        )
        if self._unmet is not None:
            for piece in split.pieces:  # passes may have put the op in
                self._unmet.discard_met(piece.module)
            graph.before_capture = self._unmet.warn_once
        self._register(graph)
        # 5. Put the adapters around it.
        if config.pad_lengths is not None:
            from cgcompile.adapters.padding import adapt_lengths

            adapters += adapt_lengths(graph, config.pad_lengths)
        return AdaptedGraph(graph, adapters, self.run_plain) if adapters else graph


class NamedBackend:
    """The named entry point ``"cgcompile"``: one :class:`Backend` for each set of settings."""

    def __init__(self) -> None:
        self.__name__ = "cgcompile"
        self._handles: list[Backend] = []

    def handle(self, mode: str | None, options: Mapping[str, Any] | None) -> Backend:
        """Return the backend of ``torch.compile(mode=mode, options=options)``."""
        config = CompilationConfig.resolve(options=options, torch_mode=mode)
        if mode is not None and config.first_compiler == "inductor":
            tuned = {**inductor.inductor_mode_options(mode), **dict(config.inductor_options)}
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
        """Forward to the :class:`Backend` with the settings of this ``torch.compile`` call."""
        self.handle(mode, options).recompile_limit_reached(detail)

    def nothing_compiled(
        self, detail: str, mode: str | None, options: Mapping[str, Any] | None
    ) -> None:
        """Forward to the :class:`Backend` with the settings of this ``torch.compile`` call."""
        self.handle(mode, options).nothing_compiled(detail)


@cache
def _named_backend() -> NamedBackend:
    return NamedBackend()


def __getattr__(name: str) -> Any:
    """Return ``backend``, when ``torch.compile(backend="cgcompile")`` looks it up."""
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    dynamo.watch_dynamo()  # Dynamo calls no backend for a function of which it compiles nothing
    return _named_backend()


def handle_of(model: Any) -> Backend | None:
    """Return the ``Backend`` of a model compiled by cgcompile, else None."""
    own = getattr(model, "backend", None)
    if isinstance(own, Backend):
        return own
    try:
        return runtime(model)
    except ConfigError:
        return None


def runtime(compiled: Any) -> Backend:
    """Return the handle of a module that ``torch.compile`` returned, for either entry point.

    With ``backend="cgcompile"`` all modules of equal settings share one handle, so right after a
    module's first call its graphs are the last ones.

    Raises:
        ConfigError: no module, or not compiled with this backend. Of a function keep the object of
            ``backend=cgcompile.Backend(...)``; ``cgcompile.compile`` gives ``model.backend``.

    Example:
        >>> model = torch.compile(nn.Linear(8, 8), backend="cgcompile")
        >>> with torch.inference_mode():
        ...     y = model(torch.randn(4, 8))
        >>> handle = cgcompile.runtime(model)
        >>> len(handle.graphs[-1].split.pieces)
        1
    """
    torch_backend, mode, options = dynamo.backend_of(compiled)
    if isinstance(torch_backend, Backend):
        return torch_backend
    if isinstance(torch_backend, NamedBackend):
        return torch_backend.handle(mode, options)
    known = isinstance(getattr(compiled, "backend", None), Backend)
    raise ConfigError.not_compiled_here(found=type(compiled).__name__, has_handle=known)
