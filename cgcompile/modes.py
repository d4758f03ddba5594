"""The modes: what is compiled, which CUDA graphs serve a step, what attention supports in one."""

import enum
from collections.abc import Mapping
from typing import Any


class CompilationMode(enum.Enum):
    """How much of the model is compiled, and in how many parts.

    Example:
        >>> backend = cgcompile.Backend(mode=cgcompile.CompilationMode.STOCK_TORCH_COMPILE)
        >>> backend.config.cudagraph_mode.name
        'NONE'
    """

    NONE = 0
    """Compile nothing: the traced graph is returned as it is."""

    STOCK_TORCH_COMPILE = 1
    """Compile the whole graph with Inductor and keep Dynamo's guards."""

    DYNAMO_TRACE_ONCE = 2
    """Compile the whole graph, traced once; Dynamo's guards are dropped."""

    PIECEWISE = 3
    """Split the graph at its boundaries and compile each piece."""


class CUDAGraphMode(enum.Enum):
    """Which CUDA graphs serve a step.

    A pair means (uniform decode batches, all other batches). Only NONE, PIECEWISE and FULL are
    *runtime* modes, those in which one step can run.

    Example:
        >>> mode = cgcompile.CUDAGraphMode.FULL_AND_PIECEWISE
        >>> mode.decode_mode().name, mode.mixed_mode().name
        ('FULL', 'PIECEWISE')
    """

    NONE = 0
    """No CUDA graphs."""

    PIECEWISE = 1
    """One CUDA graph for each captured piece; ops at boundaries run eagerly between them."""

    FULL = 2
    """One CUDA graph for the whole step, its attention ops included."""

    FULL_DECODE_ONLY = (FULL, NONE)
    """FULL for uniform decode batches, no CUDA graphs for all others."""

    FULL_AND_PIECEWISE = (FULL, PIECEWISE)
    """FULL for uniform decode batches, PIECEWISE for all others."""

    __hash__ = object.__hash__  # Enum.__hash__ is Python code, slow in keys of steps

    def separate_routine(self) -> bool:
        """Return whether uniform decode batches have a mode of their own."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> "CUDAGraphMode":
        """Return the runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """Return the runtime mode of batches that are not uniform decode."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: "CUDAGraphMode") -> bool:
        """Return whether a step can run in the runtime mode ``mode``."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def has_full_cudagraphs(self) -> bool:
        """Return whether a step can run in mode FULL."""
        return self.has_mode(CUDAGraphMode.FULL)

    def has_piecewise_cudagraphs(self) -> bool:
        """Return whether a step can run in mode PIECEWISE."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def max_cudagraph_mode(self) -> "CUDAGraphMode":
        """Return the more demanding of the two runtime modes (NONE < PIECEWISE < FULL)."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: int(mode.value))

    def requires_piecewise_compilation(self) -> bool:
        """Return whether a step may run piece by piece, so that the graph must be split."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    @classmethod
    def valid_runtime_modes(cls) -> frozenset["CUDAGraphMode"]:
        """Return the modes in which one step can run."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})


class AttentionCGSupport(enum.IntEnum):
    """Which batches an attention op supports inside of a FULL graph. Undeclared is NEVER.

    Example:
        >>> support = cgcompile.AttentionCGSupport.UNIFORM_BATCH
        >>> cgcompile.SplittingOp("aten::mm", support=support).support is support
        True
    """

    NEVER = 0
    """No batch: the op must run outside of CUDA graphs."""

    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which each request has one token."""

    UNIFORM_BATCH = 2
    """Batches in which all requests have the same number of tokens."""

    ALWAYS = 3
    """All batches."""


# The settings for each torch.compile(mode=...). Inductor's own part of a mode is read from torch.
TORCH_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {},  # CUDA graphs are the default here
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {"cudagraph_mode": CUDAGraphMode.NONE},
}
