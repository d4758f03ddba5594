"""How much is compiled, which CUDA graphs serve a step, and how far attention may go into one."""

import enum
from collections.abc import Mapping
from typing import Any


class CompilationMode(enum.Enum):
    """How much of the model is compiled, and in how many parts."""

    NONE = 0  # never compile: the traced graph is returned as it is
    STOCK_TORCH_COMPILE = 1  # the whole graph by Inductor, Dynamo's guards kept
    DYNAMO_TRACE_ONCE = 2  # the whole graph, traced once, guards dropped
    PIECEWISE = 3  # split at the boundaries, compiled piece by piece


class CUDAGraphMode(enum.Enum):
    """Which CUDA graphs serve a step.

    A pair means (uniform decode batches, all other batches). Only NONE, PIECEWISE and FULL are
    *runtime* modes, those in which one step can run.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    def separate_routine(self) -> bool:
        """Whether uniform decode batches take another mode than the rest."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> "CUDAGraphMode":
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """The runtime mode of all other batches."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: "CUDAGraphMode") -> bool:
        """Whether a step can run in the runtime mode ``mode``."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def max_cudagraph_mode(self) -> "CUDAGraphMode":
        """The more demanding of the two runtime modes (NONE < PIECEWISE < FULL)."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: int(mode.value))

    def requires_piecewise_compilation(self) -> bool:
        """Whether a step may run piece by piece, so that the graph must be split."""
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    @classmethod
    def valid_runtime_modes(cls) -> frozenset["CUDAGraphMode"]:
        """The modes in which one step can run."""
        return frozenset({cls.NONE, cls.PIECEWISE, cls.FULL})


class AttentionCGSupport(enum.IntEnum):
    """How far an attention op can go into a FULL graph. More is better; undeclared is NEVER."""

    NEVER = 0  # must run outside of graphs
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # batches in which each request has one token
    UNIFORM_BATCH = 2  # batches in which all requests have the same number of tokens
    ALWAYS = 3  # any batch


# What torch.compile(mode=...) means here. Inductor's own part of a mode is looked up in torch.
TORCH_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {},  # CUDA graphs are the default here
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {"cudagraph_mode": CUDAGraphMode.NONE},
}
