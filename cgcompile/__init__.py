"""cgcompile: ``torch.compile(model, backend="cgcompile")`` for inference.

Split a model at its attention ops, compile the pieces, capture them as CUDA graphs and replay them.
Read the code in the order of a call: ``config``, ``backend``, ``passes``, ``piecewise``, ``entry``,
``graphs``; ``boundaries`` and ``forward_context`` are what a model author touches.
"""

from cgcompile.backend import Backend, runtime
from cgcompile.boundaries import AttentionCGSupport, Boundaries, SplittingOp, eager_region
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.errors import CGCompileError
from cgcompile.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)
from cgcompile.graphs.capture import allow_capture
from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.reasons import Counters, Reason
from cgcompile.version import __version__

__all__ = [
    "AttentionCGSupport",
    "Backend",
    "BatchDescriptor",
    "Boundaries",
    "CGCompileError",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CompilationConfig",
    "CompilationMode",
    "Counters",
    "ForwardContext",
    "Reason",
    "SplittingOp",
    "__version__",
    "allow_capture",
    "eager_region",
    "get_forward_context",
    "is_forward_context_available",
    "override_forward_context",
    "runtime",
    "set_forward_context",
]
