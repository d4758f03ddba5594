"""What a compilation leaves in torch's structured trace, where one is written.

``TORCH_TRACE=folder python serve.py``, then ``tlparse folder``: beside torch's own artifacts there
are ``cgcompile_split`` (as text and as data) and ``cgcompile_code``; and of run time, from
``graphs/timeline.py``, ``cgcompile_capture``, ``cgcompile_sequence`` and ``cgcompile_refusal``.
Without a trace nothing here is computed.
"""

from typing import Any

from cgcompile import compat
from cgcompile.passes.pieces import Piece
from cgcompile.passes.split import SplitGraph


def trace_split(split: SplitGraph) -> None:
    """Write down a split, before its pieces are compiled."""
    compat.trace_artifact("cgcompile_split", split.text)
    compat.trace_artifact("cgcompile_split_data", lambda: split_data(split))


def trace_code(source: str, artifacts: str, compilation: object) -> None:
    """Write down what was made of a split.

    Args:
        source: the generated Python that runs the pieces.
        artifacts: which artifacts of each piece serve which sizes.
        compilation: which pieces were compiled, loaded or shared.
    """
    compat.trace_artifact("cgcompile_code", lambda: source)
    compat.trace_artifact("cgcompile_compilation", lambda: f"{compilation}\n\n{artifacts}\n")


def split_data(split: SplitGraph) -> dict[str, Any]:
    """A split as plain data."""
    return {
        "device": str(split.device),
        "sizes": {name: str(dim) for name, dim in split.symbols.dims.items()},
        "crossing_bytes": split.symbols.pretty(split.crossing_bytes()),
        "graph_break": split.graph_break,
        "pieces": [_piece_data(piece) for piece in split.pieces],
    }


def _piece_data(piece: Piece) -> dict[str, Any]:
    return {
        "name": piece.name,
        "captured": piece.capture,
        "compiled": piece.compiled,
        "same_as": f"piece_{piece.same_as}",
        "support": piece.support.name,
        "num_ops": piece.num_ops,
        "why": [{"reason": why.reason.value, "detail": why.detail} for why in piece.why],
        "lines": [{"where": where, "code": code} for where, code in piece.lines],
        "inputs": list(piece.inputs),
        "outputs": list(piece.outputs),
    }
