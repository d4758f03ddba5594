"""What a user may point at: who captures there (:func:`recorders_of`), with what settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from cgcompile.backend import Backend, handle_of
from cgcompile.config import CompilationConfig
from cgcompile.errors import ConfigError
from cgcompile.graphs.breakable import BreakableCUDAGraphCapture
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Counters
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.serving import CudaGraphManager


def resolved(settings: Any, function: str) -> CompilationConfig:
    """The settings that a user gave: a config, a handle, or a mapping; None: the defaults."""
    if isinstance(settings, Mapping):
        return CompilationConfig.resolve(options=settings)
    result = settings.config if isinstance(settings, Backend) else settings
    if result is not None and not isinstance(result, CompilationConfig):
        expected = "a CompilationConfig, a Backend, or a mapping of settings"
        raise ConfigError.bad_value(name="config", where=function, value=result, expected=expected)
    return CompilationConfig.resolve(result)


def recorders_of(target: Any, function: str) -> list[CompiledGraph | CUDAGraphWrapper]:
    """Those who capture for a compiled model, a handle, a wrapper or a manager."""
    if isinstance(target, CompiledGraph | CUDAGraphWrapper):
        return [target]
    if isinstance(target, CudaGraphManager):
        compiled = [] if target.backend is None else recorders_of(target.backend, function)
        return [*target.wrappers, *compiled]
    handle = target if isinstance(target, Backend) else handle_of(target)
    if handle is not None:
        return [*handle.graphs, *handle.wrappers]
    wrapper = getattr(target, "wrapper", None)
    if isinstance(wrapper, CUDAGraphWrapper):
        return [wrapper]
    raise ConfigError.captures_nothing(function=function, found=type(target).__name__)


def counters_of(target: Any, function: str) -> Counters:
    """What the calls of what :func:`recorders_of` takes did."""
    if not isinstance(target, CompiledGraph | CUDAGraphWrapper | CudaGraphManager):
        handle = target if isinstance(target, Backend) else handle_of(target)
        if handle is not None:
            return handle.counters
    return sum([each.counters for each in recorders_of(target, function)], Counters())


def sequences_of(target: Any, function: str) -> Iterator[GraphSequence]:
    """What replays of a target run; of what :func:`recorders_of` takes, and of raw captures."""
    if isinstance(target, BreakableCUDAGraphCapture):
        target = target.sequence
    if target is None or isinstance(target, GraphSequence):
        yield from () if target is None else (target,)
        return
    for recorder in recorders_of(target, function):
        if isinstance(recorder, CompiledGraph):
            yield from (recording.sequence for recording in recorder.recordings)
        else:
            yield from (entry.sequence for entry in recorder.entries)
