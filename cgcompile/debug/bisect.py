"""Find which part of a step makes its result wrong: :func:`bisect`.

The step runs in several ways: eager, with uncompiled pieces, with compiled pieces that are not
captured, and replayed. Between the last right way and the first wrong one, delta debugging finds
the pieces; the op is the one that makes the first value that differs. Where uncompiled pieces are
wrong too, the model is compiled without each pass in turn.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import fx

from cgcompile.backend import Backend
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.debug.compare import (
    Call,
    Difference,
    InputSets,
    Tolerance,
    require_comparison,
    require_prepare,
)
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
    run_step,
)
from cgcompile.debug.output import Result
from cgcompile.debug.subject import Subject, comparing
from cgcompile.debug.verify import find_break, real_rows
from cgcompile.errors import CGCompileError, DispatchError
from cgcompile.passes import OPTIONAL
from cgcompile.passes.nodes import COMPUTING
from cgcompile.progress import progress
from cgcompile.settings import checked_but

T_ = TypeVar("T_")
Item = tuple[int, int]
"""(number of the compiled graph, index of the piece); -1 is all of a FULL graph."""


@dataclass(frozen=True, repr=False)
class Bisection(Result):
    """The result of :func:`cgcompile.debug.bisect`; ``print`` it.

    Attributes:
        subject: the name of the model.
        stage: since when the result is wrong: ``tracing``, ``pass``, ``compilation``, ``replay``
            or ``padding``; empty if it is right.
        pieces: the smallest set of pieces that are wrong together: one in the usual case, two where
            one overwrites a result of the other; empty before there are pieces.
        culprit: the name of the pass, where it is one.
        finding: the first value that differs, with op and line; None if no value does.
        steps: what was tried, in order, with its outcome.
        replays: how many replays took part.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     found = cgcompile.debug.bisect(model, torch.randn(4, 8))
        >>> found.stage  # empty: no result is wrong
        ''
    """

    computed: ClassVar[tuple[str, ...]] = ("ok",)

    subject: str
    stage: str = ""
    pieces: tuple[str, ...] = ()
    culprit: str = ""
    finding: Difference | None = None
    steps: tuple[str, ...] = ()
    replays: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and something was replayed."""
        return not self.stage and bool(self.replays)

    def __str__(self) -> str:
        rows = [
            f"{self.subject}: " + (f"wrong by {self.stage}" if self.stage else "nothing differs")
        ]
        rows += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        if self.pieces:
            rows.append(f"pieces {', '.join(self.pieces)}")
        return "\n".join(rows + ([] if self.finding is None else [str(self.finding)]))


@checked_but("config", "sets", "prepare")
def bisect(
    model: Any,
    *args: Any,
    config: CompilationConfig | Backend | Mapping[str, Any] | None = None,
    prepare: Callable[[], Any] | None = None,
    sets: int = 3,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Bisection:
    """Find the piece, and the op, that make the result of a model wrong.

    State is restored after each run, as by :func:`cgcompile.verify`. Synchronises. Runs the step
    some dozens of times.

    Args:
        model: as of ``verify``, without managers.
        *args: of one call; the first set of inputs that is wrong is examined.
        config: with which a plain model is compiled; as of ``verify``.
        prepare: makes the inputs of a call, in place of ``args``; as of ``verify``.
        sets: how many sets of inputs are tried.
        rtol: relative tolerance; as of ``verify``.
        atol: absolute tolerance.
        seed: of the random numbers.
        **kwargs: of the call.

    Raises:
        DispatchError: nothing was replayed.
        ConfigError: settings for a model that has its own, something that is no model, or ``sets``
            below 1.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.
        BaseException: what the model raised.

    Example:
        >>> model = cgcompile.compile(nn.Linear(8, 8))
        >>> with torch.inference_mode():
        ...     found = cgcompile.debug.bisect(model, torch.randn(4, 8))
        >>> found.ok
        True
    """
    require_comparison("bisect", sets, rtol, atol, seed)
    require_prepare("bisect", prepare, args, kwargs)
    inputs = InputSets((args, kwargs), prepare, seed)
    with comparing(model, config, "bisect", inputs) as subject:
        tolerance = subject.tolerance(inputs.first, rtol, atol)
        with closing(progress(itertools.count(1), "bisect", "run")) as runs:
            return _Search(subject, inputs, tolerance, runs).run(sets)


class _Search:
    """One bisection."""

    def __init__(
        self, subject: Subject, inputs: InputSets, tolerance: Tolerance, runs: Iterator[int]
    ) -> None:
        self.steps: list[str] = []
        self._runs = runs
        self._subject = subject
        self._inputs = inputs
        self._tolerance = tolerance
        self._number = 0  # of the set of inputs
        self._call: Call = inputs.first
        self._expected: dict[str, Any] = {}
        self._padding = WithoutPadding(subject, self._call, tolerance)
        self._captured: list[Item] = []
        self._compiled: list[Item] = []

    def run(self, sets: int) -> Bisection:
        subject = self._subject
        missing = subject.until_replayed(self._inputs.first)
        if missing:
            raise DispatchError.nothing_verified(function="bisect", why=missing)
        before = subject.counters.replays
        difference = self._first_wrong(sets)
        if difference is None:
            result = Bisection(subject.name)
        elif subject.wrapper is not None:
            origin = find_break(subject.wrapper, self._call, self._tolerance, subject.kept)
            pieces = [origin.piece] if origin.piece else []
            result = self._result("replay", pieces, self._located("replay", difference, origin))
        else:
            result = self._stages(difference)
        replays = subject.counters.replays - before
        return replace(result, steps=tuple(self.steps), replays=replays)

    def _result(self, stage: str, pieces: Sequence[str], finding: Difference) -> Bisection:
        return Bisection(self._subject.name, stage, tuple(pieces), finding=finding)

    def _located(self, stage: str, difference: Difference, origin: Difference) -> Difference:
        return located(stage, difference, real_rows(), origin, self._number)

    def _first_wrong(self, sets: int) -> Difference | None:
        """Go to the first set of inputs whose replay is wrong."""
        for number in range(sets):
            self._number, self._call = number, self._inputs.fill(number)
            self._padding = WithoutPadding(self._subject, self._call, self._tolerance)
            self._expected = self._subject.outcome(self._subject.original, self._call)
            actual = self._subject.outcome(self._subject.call, self._call)
            difference = self._judge(f"inputs {number}, all replayed", actual)
            if difference is not None:
                return difference
            names, _ = self._subject.uncompared(self._call, self._expected, actual)
            if names:
                self.steps.append(f"not compared: {', '.join(names)}")
        return None

    def _judge(self, what: str, actual: dict[str, Any]) -> Difference | None:
        """Compare an outcome with that of the eager model, and note the step."""
        pair = self._padding.pair(self._expected, actual)
        difference = self._tolerance.first("the result", *pair)
        next(self._runs)
        self.steps.append(f"{what}: {'right' if difference is None else 'wrong'}")
        return difference

    # -------------------------------------------------------------- the stages

    def _stages(self, difference: Difference) -> Bisection:
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
        finding = replace(seen[0], inputs=self._number) if seen else None
        if finding is None or (stage == "compilation" and finding.piece == WHOLE):
            finding = self._located(stage, difference, Difference(piece=", ".join(names)))
        in_pieces = self._in_pieces() if items[0][1] < 0 else None
        return in_pieces or self._result(stage, names, finding)

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

    def _in_pieces(self) -> Bisection | None:
        """Bisect the model captured anew in pieces, as a FULL graph has none."""
        other = self._subject.recompiled(cudagraph_mode=CUDAGraphMode.PIECEWISE)
        with closing(other):
            missing = other.until_replayed(self._inputs.first)
            self.steps.append(f"captured anew, in pieces: {missing or 'replays'}")
            search = _Search(other, self._inputs, self._tolerance, self._runs)
            result = None if missing else search.run(self._number + 1)
            self.steps += search.steps
        return result if result is not None and result.stage else None

    # -------------------------------------------------------------- before there are pieces

    def _before_pieces(self, difference: Difference) -> Bisection:
        """Blame padding rows, a pass, or the trace."""
        if real_rows() is not None and self._padding.pieces_equal(self._expected):
            self.steps.append("all pieces uncompiled, padding rows not zeroed: right")
            detail = "real rows depend on padding rows, which replays zero behind eager pieces"
            finding = self._located("padding", difference, Difference(detail=detail))
            return self._result("padding", (), finding)
        config = self._subject.config
        own = [str(step.name) for step in (*config.graph_passes, *config.piece_passes)]
        detail = "the traced graph computes something else than the model does"
        if self._right_with({}, "compiled anew"):
            detail = "traced anew it is right: what the trace holds has changed since"
        elif config.mode is CompilationMode.PIECEWISE:
            for name in dict.fromkeys([*own, *OPTIONAL]):
                settings = {"disabled_passes": (*config.disabled_passes, name)}
                if name in config.disabled_passes:
                    continue
                if self._right_with(settings, f"without pass {name}"):
                    owner = "yours" if name in own else "cgcompile"
                    detail = f"a pass of {owner}, {name}, changes it"
                    origin = replace(self._changed_by_pass(settings), detail=detail)
                    finding = self._located("pass", difference, origin)
                    pieces = [origin.piece] if origin.piece else []
                    return replace(self._result("pass", pieces, finding), culprit=name)
        finding = self._located("tracing", difference, Difference(detail=detail))
        return self._result("tracing", (), finding)

    def _right_with(self, settings: dict[str, Any], what: str) -> bool:
        """Return whether the model, compiled anew with other settings, gives what eager gives."""
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
