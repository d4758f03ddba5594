"""cgcompile: ``torch.compile(model, backend="cgcompile")`` for inference.

Split a model at its attention ops, compile the pieces, capture them as CUDA graphs and replay them.
More is in ``cgcompile.serving`` (engines), ``cgcompile.encoder`` (vision encoders),
``cgcompile.debug`` (what was split, captured and replayed, and why not), ``cgcompile.passes`` (own
passes) and ``cgcompile.graphs`` (the values of a capture).
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile import debug as debug
    from cgcompile.backend import Backend, runtime
    from cgcompile.boundaries import AttentionCGSupport, SplittingOp
    from cgcompile.compile import compile, load
    from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
    from cgcompile.context import (
        BatchDescriptor,
        ForwardContext,
        get_forward_context,
        is_forward_context_available,
        set_forward_context,
    )
    from cgcompile.debug.coverage import coverage
    from cgcompile.debug.explain import explain
    from cgcompile.debug.verify import verify
    from cgcompile.encoder import EncoderCudaGraphManager
    from cgcompile.errors import CGCompileError
    from cgcompile.graphs.breakable import (
        BreakableCUDAGraphCapture,
        BreakableCUDAGraphWrapper,
        eager_break_during_capture,
    )
    from cgcompile.graphs.capture_all import capture_all
    from cgcompile.graphs.pool import GraphPool
    from cgcompile.graphs.steps import eager_region
    from cgcompile.graphs.weights import update_weights
    from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
    from cgcompile.loops import loop
    from cgcompile.reasons import Reason
    from cgcompile.serving import CudaGraphManager
    from cgcompile.tracing.dynamic_dims import DynamicDim
    from cgcompile.version import __version__

__all__ = [
    "AttentionCGSupport",
    "Backend",
    "BatchDescriptor",
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "CGCompileError",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CompilationConfig",
    "CompilationMode",
    "CudaGraphManager",
    "DynamicDim",
    "EncoderCudaGraphManager",
    "ForwardContext",
    "GraphPool",
    "Reason",
    "SplittingOp",
    "__version__",
    "capture_all",
    "compile",
    "coverage",
    "eager_break_during_capture",
    "eager_region",
    "explain",
    "get_forward_context",
    "is_forward_context_available",
    "load",
    "loop",
    "runtime",
    "set_forward_context",
    "update_weights",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "backend": "Backend runtime",
            "boundaries": "AttentionCGSupport SplittingOp",
            "compile": "compile load",
            "config": "CompilationConfig CompilationMode CUDAGraphMode",
            "context": (
                "BatchDescriptor ForwardContext get_forward_context is_forward_context_available "
                "set_forward_context"
            ),
            "debug.coverage": "coverage",
            "debug.explain": "explain",
            "debug.verify": "verify",
            "encoder.manager": "EncoderCudaGraphManager",
            "errors": "CGCompileError",
            "graphs.breakable": (
                "BreakableCUDAGraphCapture BreakableCUDAGraphWrapper eager_break_during_capture"
            ),
            "graphs.capture_all": "capture_all",
            "graphs.steps": "eager_region",
            "graphs.pool": "GraphPool",
            "graphs.weights": "update_weights",
            "graphs.wrapper": "CUDAGraphOptions CUDAGraphWrapper",
            "loops": "loop",
            "reasons": "Reason",
            "serving.manager": "CudaGraphManager",
            "tracing.dynamic_dims": "DynamicDim",
            "version": "__version__",
        },
    )
