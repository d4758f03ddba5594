"""FX graph in, split graph out; independent of capture, compilation and serving.

Read ``pipeline``, then its steps in order: ``normalize``, ``eliminate``, ``assign``,
``split``.
"""

from cgcompile.passes.base import FunctionPass, GraphPass, PassManager, PassRecord
from cgcompile.passes.eliminate import EliminateClones, EliminateNoOps
from cgcompile.passes.pipeline import OPTIONAL, PIPELINE, check_disabled, split_graph
from cgcompile.passes.split import Piece, SplitGraph, Value

__all__ = [
    "OPTIONAL",
    "PIPELINE",
    "EliminateClones",
    "EliminateNoOps",
    "FunctionPass",
    "GraphPass",
    "PassManager",
    "PassRecord",
    "Piece",
    "SplitGraph",
    "Value",
    "check_disabled",
    "split_graph",
]
