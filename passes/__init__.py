"""FX graph in, split graph out; independent of capture, compilation and serving.

Read ``pipeline``, then its steps in order: ``normalize``, ``assign``, ``split``.
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily
from cgcompile.passes.base import FunctionPass, GraphPass, PassManager, PassRecord
from cgcompile.passes.normalize import EliminateClones, EliminateNoOps
from cgcompile.passes.pipeline import OPTIONAL, PIPELINE, split_graph

__all__ = [
    "OPTIONAL",
    "PIPELINE",
    "EliminateClones",
    "EliminateNoOps",
    "FunctionPass",
    "GraphPass",
    "PassManager",
    "PassRecord",
    "split_graph",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {},
        moved={"passes.pipeline": "check_disabled", "passes.split": "Piece SplitGraph Value"},
    )
