"""Find which part of a step makes its result wrong: :class:`Search`, for ``verify(bisect=True)``.

The step runs in several ways: eager, with uncompiled pieces, with compiled pieces that are not
captured, and replayed. Between the last right way and the first wrong one, delta debugging finds
the pieces; the op is the one that makes the first value that differs. Where uncompiled pieces are
wrong too, the model is compiled without each pass in turn.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import fx

from cgcompile.config import CompilationMode, CUDAGraphMode
from cgcompile.debug.compare import Call, Difference, Tolerance
from cgcompile.debug.locate import (
    WHOLE,
    Nodes,
    PieceMode,
    Watcher,
    WithoutPadding,
    first_node,
    located,
    nodes_seen,
    place_of,
    real_rows,
    run_step,
)
from cgcompile.debug.subject import Subject
from cgcompile.errors import CGCompileError
from cgcompile.passes import OPTIONAL
from cgcompile.passes.nodes import COMPUTING
from cgcompile.progress import progress

T_ = TypeVar("T_")
Item = tuple[int, int]
"""(number of the compiled graph, index of the piece); -1 is all of a FULL graph."""


class Search:
    """The search of one call; ``steps`` are the runs, in order, with their outcomes."""

    def __init__(
        self,
        subject: Subject,
        call: Call,
        expected: dict[str, Any],
        padding: WithoutPadding,
        tolerance: Tolerance,
    ) -> None:
        self.steps: list[str] = []
        self._subject = subject
        self._call = call
        self._expected = expected
        self._padding = padding
        self._tolerance = tolerance
        self._runs: Iterator[int] = itertools.count(1)
        self._captured: list[Item] = []
        self._compiled: list[Item] = []

    def run(self, difference: Difference) -> Difference:
        """Return the difference of a replay with its stage, pieces, op and line."""
        with closing(progress(self._runs, "verify: bisect", "run")) as self._runs:
            return self._stages(difference)

    def _judge(self, what: str, actual: dict[str, Any]) -> Difference | None:
        """Compare an outcome with that of the eager model, and note the step."""
        pair = self._padding.pair(self._expected, actual)
        difference = self._tolerance.first("the result", *pair)
        next(self._runs)
        self.steps.append(f"{what}: {'right' if difference is None else 'wrong'}")
        return difference

    # -------------------------------------------------------------- the stages

    def _stages(self, difference: Difference) -> Difference:
        watcher = Watcher(self._tolerance)
        with self._subject.observed(watcher.of):
            self._subject.outcome(self._subject.call, self._call)
        for step in watcher.seen:
            full = step.recording.batch.mode is CUDAGraphMode.FULL
            pieces = step.split.pieces
            captured = [-1] if full else [piece.index for piece in pieces if piece.capture]
            self._captured += [(step.graph, index) for index in captured]
            self._compiled += [(step.graph, piece.index) for piece in pieces if piece.compiled]
        if self._wrong({}, "all pieces uncompiled"):
            return self._before_pieces(difference)
        compiled = dict.fromkeys(self._compiled, PieceMode.COMPILED)
        if self._wrong(compiled, "all pieces compiled, not captured"):
            stage, mode, items, others = "compilation", PieceMode.COMPILED, self._compiled, {}
        else:
            stage, mode, items, others = "replay", PieceMode.REPLAYED, self._captured, compiled

        def fails(some: Sequence[Item]) -> bool:
            what = f"{mode.value}: {', '.join(map(self._name, some))}"
            return self._wrong({**others, **dict.fromkeys(some, mode)}, what)

        items = minimal(items, fails)
        names = [self._name(item) for item in items]
        graphs = {graph for graph, _ in items}
        seen = [d for graph, d in watcher.differences if graph in graphs and d.stage == stage]
        result = seen[0] if seen else None
        if result is None or (stage == "compilation" and result.piece == WHOLE):
            result = _located(stage, difference, Difference(piece=", ".join(names)))
        return replace(result, pieces=tuple(names))

    def _name(self, item: Item) -> str:
        graphs = {number for number, _ in self._captured + self._compiled}
        piece = WHOLE if item[1] < 0 else f"piece_{item[1]}"
        return piece if len(graphs) < 2 else f"graph {item[0]} {piece}"

    def _wrong(self, modes: dict[Item, PieceMode], what: str) -> bool:
        """Return whether the step is wrong with pieces run in these modes, others uncompiled."""

        def run(number: int, program: Any, recording: Any, inputs: Any, real: int | None) -> Any:
            whole = modes.get((number, -1))
            chosen = {
                piece.index: whole or modes.get((number, piece.index), PieceMode.UNCOMPILED)
                for piece in program.split.pieces
            }
            return run_step(program, recording, inputs, real, chosen)

        with self._subject.observed(lambda number: partial(run, number)):
            actual = self._subject.outcome(self._subject.call, self._call)
        return self._judge(what, actual) is not None

    # -------------------------------------------------------------- before there are pieces

    def _before_pieces(self, difference: Difference) -> Difference:
        """Blame padding rows, a pass, or the trace."""
        if real_rows() is not None and self._padding.pieces_equal(self._expected):
            self.steps.append("all pieces uncompiled, padding rows not zeroed: right")
            detail = "real rows depend on padding rows, which replays zero behind eager pieces"
            return _located("padding", difference, Difference(detail=detail))
        config = self._subject.config
        own = [str(step.name) for step in (*config.graph_passes, *config.piece_passes)]
        detail = "the traced graph computes something else than the model does"
        if self._right_with({}, "compiled anew"):
            detail = "traced anew it is right: what the trace holds has changed since"
        elif config.mode is CompilationMode.PIECEWISE:
            for name in dict.fromkeys([*own, *OPTIONAL]):
                settings = {"passes": (*config.passes, f"-{name}")}
                if name in config.disabled_passes:
                    continue
                if self._right_with(settings, f"without pass {name}"):
                    owner = "yours" if name in own else "cgcompile"
                    detail = f"a pass of {owner}, {name}, changes it"
                    origin = replace(self._changed_by_pass(settings), detail=detail)
                    return replace(_located("pass", difference, origin), culprit=name)
        return _located("tracing", difference, Difference(detail=detail))

    def _right_with(self, settings: dict[str, Any], what: str) -> bool:
        """Return whether the model, compiled with other settings, returns the results of eager."""
        try:
            other = self._subject.recompiled(**settings)
        except CGCompileError as error:
            self.steps.append(f"{what}: {str(error).splitlines()[0]}")
            return False
        with closing(other):
            outcome = other.outcome(other.call, self._call)
        return self._judge(what, outcome) is None

    def _changed_by_pass(self, settings: dict[str, Any]) -> Difference:
        """Return the first op that has another value without a pass."""
        with closing(self._subject.recompiled(**settings)) as good:
            if good.until_replayed(self._call):
                return Difference()
            runs = [nodes_seen(subject, self._call) for subject in (self._subject, good)]
        first = first_node(runs[0], runs[1], self._changed_node)
        return Difference() if first is None else place_of(*first)

    def _changed_node(self, bad: Nodes, right: Nodes) -> fx.Node | None:
        """Return the first node that has another value with the pass, or the new one it reads."""
        expected = {node.name: leaves for node, leaves in right.made.items()}
        for node, leaves in bad.made.items():
            if node.name not in expected:
                continue
            if self._tolerance.first(node.name, expected[node.name], leaves) is None:
                continue
            new = [n for n in node.all_input_nodes if n.op in COMPUTING and n.name not in expected]
            return new[0] if new else node
        new = [node for node in bad.made if node.name not in expected]
        return new[-1] if new else None


def _located(stage: str, difference: Difference, origin: Difference) -> Difference:
    return located(stage, difference, real_rows(), origin)


def minimal(items: Sequence[T_], fails: Callable[[Sequence[T_]], bool]) -> list[T_]:
    """Return the smallest set of items that fails as a whole (delta debugging)."""
    result, parts = list(items), 2
    while len(result) > 1:
        size = -(-len(result) // parts)
        chunks = [result[start : start + size] for start in range(0, len(result), size)]
        rests = [[item for item in result if item not in chunk] for chunk in chunks]
        smaller = next((chunk for chunk in chunks if fails(chunk)), None)
        if smaller is not None:
            result, parts = smaller, 2
            continue
        rest = next((rest for rest in rests if len(chunks) > 2 and fails(rest)), None)
        if rest is not None:
            result, parts = rest, max(parts - 1, 2)
        elif len(chunks) == len(result):
            break
        else:
            parts = min(2 * parts, len(result))
    return result
