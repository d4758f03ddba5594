"""``cgcompile.compile(model)``: all compilation modes behind one call, traced once.

With ``torch.compile(model, backend="cgcompile")`` Dynamo determines when to trace and what to
check at each call. Here a trace runs nothing, so that the first call may have any size, dynamic
dimensions are marked, and a user chooses what is checked at each call.
"""

import functools
import os
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.compiler import is_dynamo_compiling

from cgcompile.backend import Backend
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.errors import ConfigError, SavedModelError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.reads import Transparent
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import write_trusted
from cgcompile.runtime.fast_path import NOT_SERVED
from cgcompile.settings import checked, checked_but
from cgcompile.tracing.trace_cache import GUARDS, SHAPES, CompiledTrace, Rules, Traces


@checked_but("dynamic_dims")
def compile(
    model: Any = None,
    config: CompilationConfig | Backend | None = None,
    *,
    dynamic_dims: Mapping[str, Any] | None = None,
    guards: str | None = None,
    check_guards: bool = False,
    dynamic_shapes: str = "backed_size_oblivious",
    trace_layers_once: bool | None = None,
    **settings: Any,
) -> Any:
    """Compile a module, a bound method or a function; also as a decorator.

    A call that no trace serves is traced: Dynamo makes one graph of it without running it. The mode
    of the settings determines how the graph is compiled: PIECEWISE splits it, STOCK_TORCH_COMPILE
    and DYNAMO_TRACE_ONCE compile it whole, NONE traces nothing.

    Args:
        model: what to compile; left out: returns a decorator.
        config: the settings; environment and defaults if left out. Or a :class:`cgcompile.Backend`:
            models or layers with one handle, whose equal pieces are compiled once.
        dynamic_dims: the dimensions that vary, by parameter: ``{"x": 0}``, ``{"x": (0, 1)}``, or
            ``{"x": {0: "tokens"}, "y": {0: "tokens"}}``; dimensions of one name have one size. Of a
            tuple, list or dict, those of each tensor in it. Other sizes are constants of a trace.
            ``Annotated[Tensor, cgcompile.DynamicDim(0)]`` on the parameter does the same.
        guards: what is checked at each call. ``"keep"`` (the default, but for DYNAMO_TRACE_ONCE):
            all that Dynamo assumed. ``"shape"``: the arguments (number, types, dtypes, devices,
            fixed sizes, which sizes are equal, layouts, values that are no tensors; objects must be
            the same), settings of torch such as autocast, and what it assumed of sizes. ``"none"``:
            the arguments and these settings alone. Tensors of modules are bound, not looked up:
            changes in place are seen, replaced ones need ``backend.release()`` or
            :meth:`CompiledModel.invalidate`; attributes of the model stay as they were when traced.
        check_guards: for debugging: check dropped guards as well, and raise where one fails.
        dynamic_shapes: what a trace may assume of a dynamic size. ``"backed"``: at least 2, as in
            ``torch.compile``; 0 and 1 are traces of their own. ``"backed_size_oblivious"``: at
            least 1, and not 1 where your code compares with 1 or squeezes the dimension.
            ``"unbacked"``: nothing, but that it is not 1 where your code squeezes the dimension;
            code that branches on a size does not trace.
        trace_layers_once: deprecated, has no effect.
        **settings: single settings; they beat ``config``.

    Returns:
        A :class:`CompiledModel`.

    Raises:
        ConfigError: unknown or impossible settings, or something that cannot be compiled.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8), dynamic_dims={"input": 0}, guards="none")
        >>> [model(torch.randn(rows, 8)).shape[0] for rows in (4, 6)], len(model.traces)
        ([4, 6], 1)
    """
    if model is None:
        settings |= {"dynamic_dims": dynamic_dims, "guards": guards, "check_guards": check_guards}
        settings |= {"dynamic_shapes": dynamic_shapes, "trace_layers_once": trace_layers_once}
        return functools.partial(compile, config=config, **settings)
    check_compilable(model, "compile")
    _warn_of_removed(trace_layers_once)
    backend = _backend(config, settings)
    rules = _rules(backend.config, guards, check_guards, dynamic_shapes)
    return CompiledModel(model, backend, dynamic_dims, rules)


def _warn_of_removed(trace_layers_once: bool | None) -> None:
    if trace_layers_once is not None:
        warnings.warn(
            "trace_layers_once has no effect and will be removed: leave it out. To trace repeated "
            "layers once, mark their forward with torch.compiler.nested_compile_region",
            FutureWarning,
            stacklevel=4,
        )


def check_compilable(model: Any, function: str) -> None:
    """Raise ConfigError if ``model`` is not a module, a bound method or a function."""
    if not isinstance(model, (torch.nn.Module, types.FunctionType, types.MethodType)):
        text = f"the class {model.__name__}" if isinstance(model, type) else repr(model)
        raise ConfigError.not_compilable(found=text, function=function)


def _backend(config: CompilationConfig | Backend | None, settings: dict[str, Any]) -> Backend:
    if not isinstance(config, Backend):
        return Backend(config, **settings)
    if settings:
        raise ConfigError.settings_are_fixed()
    return config


def _rules(config: CompilationConfig, guards: str | None, check_guards: bool, shapes: str) -> Rules:
    once = config.mode is CompilationMode.DYNAMO_TRACE_ONCE
    chosen = guards or ("none" if once else "keep")
    for name, value, choices in (("guards", chosen, GUARDS), ("dynamic_shapes", shapes, SHAPES)):
        if value not in choices:
            raise ConfigError.bad_value(
                name=name, where="compile", value=value, expected="one of " + ", ".join(choices)
            )
    if once and chosen != "none":
        raise ConfigError.impossible(
            what=f"guards={chosen!r} with mode DYNAMO_TRACE_ONCE",
            because="it traces once and drops them",
            instead="Use mode STOCK_TORCH_COMPILE, or guards='none'.",
        )
    return Rules(chosen, check_guards, shapes)


class CompiledModel(Transparent):
    """A compiled model, which :func:`compile` returns: it is called like the model.

    1. A call for which the guards of a trace hold runs the compiled graph of that trace.
    2. Any other call is traced, and its graph compiled; after :meth:`freeze` it is an error.

    Attributes that it does not have are read from the model.

    To compile parts of a model, assign ``layer.forward = cgcompile.compile(layer.forward,
    backend)`` with one backend for all layers, or decorate the ``forward`` of their class: each
    instance gets a trace, equal pieces are compiled once.

    Args:
        runnable: the model.
        backend: compiles the graphs.
        dynamic_dims: see :func:`compile`.
        rules: how calls are traced, and what is checked at each call.

    Attributes:
        runnable: the original model.
        backend: the handle over what was compiled: counters, capture, verify, release.
    """

    def __init__(
        self,
        runnable: Any,
        backend: Backend,
        dynamic_dims: Mapping[str, Any] | None,
        rules: Rules,
    ) -> None:
        self.runnable = runnable
        self.backend = backend
        self._traces: Traces | None = None
        self._call = _untraced(runnable, backend.config)
        if self._call is None:
            plain = backend.run_plain
            self._traces = Traces(runnable, self._compile, dynamic_dims, rules, plain)
            self._call = self._traces.__call__  # calling a method is faster than an object
            backend.remember(self._traces)
            backend.anticipate(runnable)
        elif dynamic_dims or rules != Rules():
            raise ConfigError.impossible(
                what="dynamic_dims, guards, check_guards or dynamic_shapes without a trace",
                because="mode NONE and splitting='breakable' trace nothing",
                instead="Leave them out, or use mode PIECEWISE with splitting='fx'.",
            )
        self.trace_arguments = (dict(dynamic_dims or {}), rules)  # as passed to :func:`compile`
        if self.wrapper is not None:
            backend.adopt(self.wrapper)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            TraceError: the call does not become one graph.
            RecompileError: it would be traced again after :meth:`freeze`, or a guard that was
                dropped does not hold (``check_guards``).
            CGCompileError: what compiling or replaying raises.
            BaseException: what the model raises.
        """
        if is_dynamo_compiling():
            return self.runnable(*args, **kwargs)  # a part of another compiled model
        traces = self._traces
        if traces is not None:
            fast_path = traces.fast_paths.call
            if fast_path is not None:
                result = fast_path(args, kwargs)
                if result is not NOT_SERVED:
                    return result
        return self._call(*args, **kwargs)  # type: ignore[misc]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, also in another process, is compiled again.
        dims, rules = self.trace_arguments
        return {"runnable": self.runnable, "settings": (self.backend.config, dims, rules)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        config, dims, rules = state["settings"]
        CompiledModel.__init__(self, state["runnable"], Backend(config), dims, rules)

    def __repr__(self) -> str:
        return f"CompiledModel({self.runnable!r})"

    def unwrap(self) -> Any:
        """Return the original model."""
        return self.runnable

    @property
    def wrapper(self) -> CUDAGraphWrapper | None:
        """The wrapper that captures without a trace (mode NONE, or breakable); else None."""
        return self._call if isinstance(self._call, CUDAGraphWrapper) else None

    @property
    def traces(self) -> tuple[CompiledTrace, ...]:
        """The traces, the most recently used one first."""
        return () if self._traces is None else self._traces.traces

    def freeze(self) -> None:
        """Forbid traces: a call that no trace serves is an error from now on."""
        if self._traces is not None:
            self._traces.is_closed = True

    def save(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Trace a call of the model, compile it, and write both to a file for :func:`load`.

        Args:
            path: the file; its folder must be writable by its owner alone.
            *args, **kwargs: a call of the model. It is traced, also if a trace serves it.

        Raises:
            SavedModelError: a part of it cannot be saved; nothing was written.
            TraceError: the call does not become one graph.
        """
        from cgcompile.saved import TraceSaver

        if self._traces is None or self.trace_arguments[1] != Rules("none"):
            raise SavedModelError.unsaved(
                what="the model", because="it is not compiled with guards='none'."
            )
        saver = TraceSaver(self.backend, (args, kwargs))
        with self.backend.pieces.saving(saver.entries):
            self._traces.save(args, kwargs, saver)
        try:
            write_trusted(Path(path), saver.data(self.trace_arguments))
        except PermissionError as error:
            raise SavedModelError.untrusted(path=str(path), reason=str(error)) from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = getattr(error, "strerror", None) or str(error)
            raise SavedModelError.no_file(path=str(path), done="written", reason=reason) from None

    @checked
    def invalidate(self, reason: str) -> None:
        """Drop all traces and graphs: something that no guard checks has changed.

        Args:
            reason: what has changed; for the log.
        """
        self.backend.invalidate(reason)

    def _compile(self, graph: fx.GraphModule, inputs: list[Any], frozen: int) -> Callable[..., Any]:
        return self.backend.compile_graph(graph, inputs, frozen=frozen)


def _untraced(model: Any, config: CompilationConfig) -> Callable[..., Any] | None:
    """Return what to call in a mode without traces; None in other modes."""
    assert config.cudagraph_mode is not None
    if config.splitting == "breakable":
        return BreakableCUDAGraphWrapper(model, config)
    if config.mode is not CompilationMode.NONE:
        return None
    full = config.cudagraph_mode.has_mode(CUDAGraphMode.FULL)
    # In mode FULL it has no breaks; it raises for splitting ops that must not be in a graph.
    return BreakableCUDAGraphWrapper(model, config, CUDAGraphMode.FULL) if full else model


@checked
def load(path: str | os.PathLike[str], model: Any) -> Any:
    """Load a model that :meth:`CompiledModel.save`, or ``aot_compile`` of torch, has saved.

    Loading runs code from the file, as any pickle does. The file and its folder must be owned by
    the current user or by root, and writable by their owner alone; this is checked before a byte is
    read.

    Args:
        path: the file.
        model: the module, bound method or function that was compiled. Its weights are used; they
            must have the names, shapes and dtypes of those at the time of saving.

    Returns:
        Of :meth:`CompiledModel.save` a :class:`CompiledModel`, which traces other calls unless it
        is frozen. Of ``aot_compile`` a :class:`cgcompile.saved.LoadedModel`, which raises for them.

    Raises:
        SavedModelError: the file cannot be read, is not trusted or damaged, or what the model
            depends on has changed: the source of a function that was traced, a global that it read,
            a version, the hardware, a weight.
        ConfigError: ``model`` is nothing that can be compiled.

    Example:
        >>> model = nn.Linear(8, 8)
        >>> compiled = cgcompile.compile(model, dynamic_dims={"input": 0}, guards="none")
        >>> compiled.save("linear.saved", torch.randn(4, 8))
        >>> cgcompile.load("linear.saved", model)(torch.randn(6, 8)).shape
        torch.Size([6, 8])
    """
    from cgcompile import saved

    check_compilable(model, "load")
    path = Path(path)
    data = saved.read(path)
    if not saved.is_trace(data):
        return saved.load_function(data, path, model)
    trace = saved.LoadedTrace(data, str(path))
    dims, rules = trace.arguments
    compiled = CompiledModel(model, trace.backend, dims, rules)
    trace.add_to(compiled._traces)
    return compiled
