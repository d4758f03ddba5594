"""Capture and replay of callables; knows nothing of FX graphs.

Exported here are the values of a capture. The wrappers are in ``cgcompile`` itself.
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile.graphs.capture_all import BulkCapture
    from cgcompile.graphs.sequence import GraphSequence
    from cgcompile.graphs.steps import allow_capture
    from cgcompile.graphs.wrapper import CUDAGraphEntry

__all__ = [
    "BulkCapture",
    "CUDAGraphEntry",
    "GraphSequence",
    "allow_capture",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "graphs.capture_all": "BulkCapture",
            "graphs.steps": "allow_capture",
            "graphs.sequence": "GraphSequence",
            "graphs.wrapper": "CUDAGraphEntry",
        },
        moved={"graphs.sequence": "EagerSegment GraphSegment"},
    )
