"""What a user may point at, and who captures there: :func:`recorders_of`."""

from collections.abc import Iterator
from typing import Any

from cgcompile.backend import Backend, handle_of
from cgcompile.entry import CompiledGraph
from cgcompile.errors import ConfigError
from cgcompile.graphs.breakable import BreakableCUDAGraphCapture
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.serving import CudaGraphManager


def recorders_of(target: Any) -> list[CompiledGraph | CUDAGraphWrapper]:
    """Those who capture for a compiled model, a handle, a wrapper or a manager.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(target, CompiledGraph | CUDAGraphWrapper):
        return [target]
    if isinstance(target, CudaGraphManager):
        compiled = [] if target.backend is None else recorders_of(target.backend)
        return [*target.wrappers, *compiled]
    handle = target if isinstance(target, Backend) else handle_of(target)
    if handle is not None:
        return [*handle.graphs, *handle.wrappers]
    wrapper = getattr(target, "wrapper", None)
    if isinstance(wrapper, CUDAGraphWrapper):
        return [wrapper]
    raise ConfigError.not_compiled_here(type(target).__name__)


def sequences_of(target: Any) -> Iterator[GraphSequence]:
    """What replays of a target run; of what :func:`recorders_of` takes, and of raw captures.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(target, BreakableCUDAGraphCapture):
        target = target.sequence
    if target is None or isinstance(target, GraphSequence):
        yield from () if target is None else (target,)
        return
    for each in recorders_of(target):
        if isinstance(each, CompiledGraph):
            yield from (recording.sequence for recording in each.recordings)
        else:
            yield from (entry.sequence for entry in each.entries)
