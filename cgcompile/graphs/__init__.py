"""Capture and replay of callables; knows nothing of FX graphs.

Exported here are the values of a capture. The wrappers are in ``cgcompile`` itself.
"""

from cgcompile.graphs.capture_all import BulkCapture
from cgcompile.graphs.eligibility import allow_capture
from cgcompile.graphs.sequence import EagerSegment, GraphSegment, GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphEntry

__all__ = [
    "BulkCapture",
    "CUDAGraphEntry",
    "EagerSegment",
    "GraphSegment",
    "GraphSequence",
    "allow_capture",
]
