"""What stands between a scheduler and the graphs: sizes, dispatch, buffers, the manager.

Reaches capture through ``cgcompile.graphs`` alone, so that all of it works on a model that was
never compiled. Sizes, dispatcher and statistics are plain Python: they need no torch.
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile.graphs.pinned_buffers import HostStaging
    from cgcompile.ladders import FittedSizes, fit_sizes, round_sizes
    from cgcompile.serving.batch import Batch, GraphHooks, Metadata
    from cgcompile.serving.buffers import InputBuffer, StaticInputs
    from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched, is_uniform_decode
    from cgcompile.serving.manager import CudaGraphManager
    from cgcompile.serving.plan import Axis, LoraCases
    from cgcompile.serving.ranks import Agreement
    from cgcompile.serving.sizes import capture_sizes, decode_sizes, get_cudagraph_sizes
    from cgcompile.serving.statistics import DispatchStatistics

__all__ = [
    "Agreement",
    "Axis",
    "Batch",
    "CudaGraphManager",
    "CudagraphDispatcher",
    "DispatchStatistics",
    "Dispatched",
    "FittedSizes",
    "GraphHooks",
    "HostStaging",
    "InputBuffer",
    "LoraCases",
    "Metadata",
    "StaticInputs",
    "capture_sizes",
    "decode_sizes",
    "fit_sizes",
    "get_cudagraph_sizes",
    "is_uniform_decode",
    "round_sizes",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "graphs.pinned_buffers": "HostStaging",
            "ladders": "FittedSizes fit_sizes round_sizes",
            "serving.batch": "Batch GraphHooks Metadata",
            "serving.buffers": "InputBuffer StaticInputs",
            "serving.dispatcher": "CudagraphDispatcher Dispatched is_uniform_decode",
            "serving.manager": "CudaGraphManager",
            "serving.plan": "Axis LoraCases",
            "serving.ranks": "Agreement",
            "serving.sizes": "capture_sizes decode_sizes get_cudagraph_sizes",
            "serving.statistics": "DispatchStatistics",
        },
        moved={
            "graphs.pool": "GraphMemory",
            "ladders": "checked_sizes padding_share",
            "serving.memory_plan": "MemoryPlan",
        },
    )
