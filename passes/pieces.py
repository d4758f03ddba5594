"""The parts of a split graph: :class:`Piece`, :class:`Value`, and :class:`Ref` in its result."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from cgcompile.boundaries import AttentionCGSupport
from cgcompile.reasons import Why


@dataclass(frozen=True, eq=False)
class Value:
    """Something that the caller passes or that crosses between pieces.

    Attributes:
        name: a valid Python identifier, unique in the graph; the one in the generated code.
        meta: the fake tensor, symbolic number or constant that was traced.
        source: where the caller has it, such as ``model.layers.0.weight``; None for results.
        static: the caller promises a fixed address: a parameter, a buffer or a module attribute.
        written: some node writes the memory that it lies in, before or after, as far as the graph
            tells, or reads it beyond the value itself: a copy will not do. When in doubt, yes.
    """

    name: str
    meta: Any
    source: str | None = None
    static: bool = False
    written: bool = False


@dataclass(frozen=True, eq=False)
class Piece:
    """One part of a split graph: a function from its inputs to a tuple of outputs.

    Attributes:
        index: position in the order of execution.
        module: the FX module; the same object for pieces of equal structure.
        capture: whether CUDA graphs may hold it; otherwise it runs eager.
        why: why it runs eager, one entry per distinct reason; empty if it is captured.
        compiled: whether the compiler of pieces gets it.
        uncompiled: why a captured piece is not compiled, or None.
        inputs: names of the values that ``module`` takes, in order.
        outputs: names of the values that it returns, in order.
        num_ops: nodes that compute.
        lines: the user's source lines, as (where, code), of the boundary or of the first node.
        same_as: index of the first piece of equal structure; its own index if it is the first.
        support: how far it can go into a FULL graph; ALWAYS for a captured piece.
    """

    index: int
    module: fx.GraphModule
    capture: bool
    why: tuple[Why, ...]
    compiled: bool
    uncompiled: str | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_ops: int
    lines: tuple[tuple[str, str], ...]
    same_as: int
    support: AttentionCGSupport

    @property
    def name(self) -> str:
        return f"piece_{self.index}"

    @property
    def where(self) -> str:
        """The user's line, for messages."""
        return self.lines[0][0] if self.lines else "an unknown line"


@dataclass(frozen=True)
class Ref:
    """The place of a named value in ``SplitGraph.result``."""

    name: str
