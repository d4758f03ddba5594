"""cgcompile: ``torch.compile(model, backend="cgcompile")`` for inference.

Split a model at its attention ops, compile the pieces, capture them as CUDA graphs and replay them.
Read the code in the order of a call: ``config``, ``backend``, ``passes``, ``piecewise``, ``entry``,
``graphs``; ``boundaries`` and ``forward_context`` are what a model author touches.
"""

from cgcompile.backend import Backend, runtime
from cgcompile.boundaries import AttentionCGSupport, Boundaries, SplittingOp
from cgcompile.compile import CompiledModel, compile
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)
from cgcompile.debug import (
    Bisection,
    Check,
    Coverage,
    Explanation,
    Overview,
    Verification,
    bisect,
    coverage,
    explain,
    report,
    verify,
)
from cgcompile.debug.compare import Difference
from cgcompile.debug.doctor import Diagnosis, doctor
from cgcompile.debug.findings import Finding
from cgcompile.debug.profile import Profile, profile, timeline
from cgcompile.encoder import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)
from cgcompile.errors import CGCompileError
from cgcompile.graphs.breakable import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    eager_break_during_capture,
)
from cgcompile.graphs.capture import allow_capture, eager_region
from cgcompile.graphs.capture_all import BulkCapture, capture_all
from cgcompile.graphs.outputs import update_weights
from cgcompile.graphs.pinned_buffers import HostStaging
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.profiling import tracing_ranges
from cgcompile.graphs.sequence import EagerSegment, GraphSegment, GraphSequence
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.reasons import Counters, Reason
from cgcompile.serving import CudagraphDispatcher, CudaGraphManager, get_cudagraph_sizes
from cgcompile.tracing.dynamic_dims import DynamicDim
from cgcompile.version import __version__

__all__ = [
    "AttentionCGSupport",
    "Backend",
    "BatchDescriptor",
    "Bisection",
    "Boundaries",
    "BreakableCUDAGraphCapture",
    "BreakableCUDAGraphWrapper",
    "BulkCapture",
    "CGCompileError",
    "CUDAGraphEntry",
    "CUDAGraphMode",
    "CUDAGraphOptions",
    "CUDAGraphWrapper",
    "CaptureRecord",
    "Check",
    "CompilationConfig",
    "CompilationMode",
    "CompiledModel",
    "Counters",
    "Coverage",
    "CudaGraphManager",
    "CudagraphDispatcher",
    "Diagnosis",
    "Difference",
    "DynamicDim",
    "EagerSegment",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphManager",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "Explanation",
    "Finding",
    "ForwardContext",
    "GraphPool",
    "GraphSegment",
    "GraphSequence",
    "HostStaging",
    "Overview",
    "Profile",
    "Reason",
    "SplittingOp",
    "SupportsEncoderCudaGraph",
    "Verification",
    "__version__",
    "allow_capture",
    "bisect",
    "capture_all",
    "compile",
    "coverage",
    "doctor",
    "eager_break_during_capture",
    "eager_region",
    "explain",
    "get_cudagraph_sizes",
    "get_forward_context",
    "is_forward_context_available",
    "override_forward_context",
    "profile",
    "report",
    "runtime",
    "set_forward_context",
    "timeline",
    "tracing_ranges",
    "update_weights",
    "verify",
]
