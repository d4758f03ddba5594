"""What the recordings of one compiled graph share, worked out once: :class:`Program`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch

from cgcompile.boundaries import Boundaries
from cgcompile.config import CompilationConfig
from cgcompile.graphs.copies import moved
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.timeline import Timeline
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.calls import Call, call_of, said, written_inputs
from cgcompile.piecewise.compilers import Runnable
from cgcompile.piecewise.frozen import Frozen
from cgcompile.piecewise.stitch import Step
from cgcompile.piecewise.traced import TracedOutputs
from cgcompile.piecewise.uses import Uses


@dataclass(frozen=True, eq=False)
class Program:
    """What all recordings of one compiled graph share.

    Attributes:
        split: the split graph.
        step: its generated function, to be bound.
        runnables: the compiled form of each piece.
        boundaries: the registry that it was split by.
        pool: memory and capture stream.
        config: the settings.
        timeline: what was captured, and when.
        frozen: the last inputs, where they are the same objects in all calls.
    """

    split: SplitGraph
    step: Step
    runnables: Sequence[Runnable]
    boundaries: Boundaries
    pool: GraphPool
    config: CompilationConfig
    timeline: Timeline
    frozen: Frozen

    def is_frozen(self, position: int) -> bool:
        """Whether an input is the same object in all calls, which somebody else keeps."""
        return position >= len(self.split.inputs) - self.frozen.count

    @cached_property
    def calls(self) -> dict[int, Call]:
        """How the eager pieces are called at replay, by index."""
        return {
            piece.index: call_of(
                piece, self.runnables[piece.index], self.boundaries, self.split.device
            )
            for piece in self.split.pieces
            if not piece.capture
        }

    @cached_property
    def traced(self) -> TracedOutputs:
        """Compares the results of custom ops with what was traced."""
        return TracedOutputs(self.split)

    @cached_property
    def said(self) -> dict[int, str]:
        """What the eager pieces run, in a word or two, by index; that of sizes past the end."""
        numbers = [] if self.split.numbers is None else [self.split.numbers]
        return {each.index: said(each) for each in (*self.split.pieces, *numbers)}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Of the inputs, by name."""
        return {each.name: position for position, each in enumerate(self.split.inputs)}

    @cached_property
    def cpu_scalars(self) -> dict[int, tuple[int, ...]]:
        """Which inputs of each captured piece are copies of 0-dim CPU tensors, by index."""
        return cpu_scalars(self.split)

    @cached_property
    def written(self) -> dict[int, list[str]]:
        """The names of the inputs that eager pieces write, by index."""
        pieces = self.split.pieces
        return {each.index: written_inputs(each) for each in pieces if not each.capture}

    @cached_property
    def written_positions(self) -> tuple[int, ...]:
        """Of the inputs that some piece writes."""
        return tuple(p for p, each in enumerate(self.split.inputs) if each.written)

    @cached_property
    def uses(self) -> tuple[Uses, Uses]:
        """Who uses each value: with a context of the caller's, with one of our own."""
        return Uses(self.split, False), Uses(self.split, True)

    @cached_property
    def with_rows(self) -> frozenset[str]:
        """The values that eager pieces leave which have a row for each row of the batch."""
        rows = _rows(self.split, self.config.capture_dim)
        eager = [each for each in self.split.pieces if not each.capture]
        names = {n for each in eager for n in (*each.outputs, *self.written[each.index])}
        return frozenset(name for name in names if rows in self._first_dim(name))

    def _first_dim(self, name: str) -> list[sympy.Expr]:
        meta = self.split.values[name].meta
        sizes = meta.shape[:1] if isinstance(meta, torch.Tensor) else ()
        return [self.split.symbols.number(size) for size in sizes]


def _rows(split: SplitGraph, wanted: str | None) -> sympy.Expr | None:
    """The symbol of the rows of a batch, where it is plain which dimension that is."""
    dims = [name for name, dim in split.symbols.dims.items() if wanted in (None, dim)]
    if len(dims) != 1:
        return None
    found = [each.meta for each in split.inputs if each.name in dims]
    return split.symbols.number(found[0]) if found else None


def cpu_scalars(split: SplitGraph) -> dict[int, tuple[int, ...]]:
    """Which inputs of each captured piece are copies of 0-dim CPU tensors, by index."""
    return {
        piece.index: places
        for piece in split.pieces
        if piece.capture
        and (places := tuple(k for k, n in enumerate(piece.inputs) if n in split.cpu_scalars))
    }


def taking_cpu_scalars(split: SplitGraph, runnables: Sequence[Runnable]) -> list[Runnable]:
    """Return what runs each piece, with 0-dim CPU tensors copied to the device first."""
    made = list(runnables)
    for index, places in cpu_scalars(split).items():
        made[index] = _taking(runnables[index], places, split.device)
    return made


def _taking(run: Runnable, places: Sequence[int], device: torch.device) -> Runnable:
    def moving(*given: Any) -> Any:
        args = list(given)
        for place in places:
            args[place] = moved(args[place], device)
        return run(*args)

    return moving
