"""Which part of a step makes its result wrong: :func:`bisect`.

The step runs in several ways: as the eager model, with uncompiled pieces, with compiled pieces that
are not captured, and replayed. Between the last right way and the first wrong one, delta debugging
finds the pieces; the op is the one that makes the first value that differs. Where uncompiled pieces
are wrong too, the model is compiled without each pass in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import fx

from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode
from cgcompile.debug.compare import (
    Call,
    Difference,
    InputSets,
    Tolerance,
    require_comparison,
)
from cgcompile.debug.locate import (
    WHOLE,
    Nodes,
    PieceMode,
    Watcher,
    first_node,
    located,
    nodes_seen,
    place_of,
    run_step,
)
from cgcompile.debug.output import Result
from cgcompile.debug.restore import restored_after
from cgcompile.debug.subject import Subject, tolerance_of
from cgcompile.debug.verify import real_rows, wrapper_place
from cgcompile.errors import CGCompileError, DispatchError
from cgcompile.passes import OPTIONAL
from cgcompile.passes.nodes import COMPUTING
from cgcompile.runtime.compiled_graph import Observer
from cgcompile.settings import checked_but

T_ = TypeVar("T_")
Item = tuple[int, int]
"""(number of the compiled graph, index of the piece); -1 is all of a FULL graph."""


@dataclass(frozen=True)
class Bisection(Result):
    """What :func:`cgcompile.debug.bisect` found; ``print`` it.

    Attributes:
        subject: what was looked at.
        stage: since when the result is wrong: ``tracing``, ``pass``, ``compilation`` or ``replay``;
            empty if it is right.
        pieces: which pieces are wrong together, of which none can be left out: one in the usual
            case, two where one spoils what the other made; empty before there are pieces.
        culprit: the name of the pass, where it is one.
        finding: the first thing that differs, with op and line; None if nothing does.
        steps: what was tried, in order, with its outcome.
        replays: how many replays took part.
    """

    computed: ClassVar[tuple[str, ...]] = ("ok",)

    subject: str
    stage: str
    pieces: tuple[str, ...]
    culprit: str
    finding: Difference | None
    steps: tuple[str, ...]
    replays: int

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


@checked_but("sets", "padded_sizes")
def bisect(
    model: Any,
    inputs: Any,
    *,
    config: CompilationConfig | None = None,
    sets: int = 3,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> Bisection:
    """Find the piece, and the op, that make the result of a model wrong.

    State is restored after each run, as by :func:`cgcompile.verify`. Synchronises. Runs the step
    some dozens of times.

    Args:
        model: as of ``verify``, without managers.
        inputs: likewise; the first set that is wrong is looked at.
        config: with which a plain model is compiled.
        sets: how many sets of inputs are tried.
        rtol: relative tolerance; as of ``verify``.
        atol: absolute tolerance.
        seed: of the random numbers.

    Raises:
        DispatchError: nothing was replayed.
        ConfigError: settings for a model that has its own, something that is no model, or ``sets``
            below 1.
        BaseException: what the model raised.
    """
    require_comparison("bisect", sets, rtol, atol, seed)
    subject = Subject(model, config, "bisect")
    try:
        arguments = InputSets(inputs, seed)
        with restored_after(arguments.tensors):
            return _Search(
                subject, arguments, tolerance_of(subject, arguments.first, rtol, atol)
            ).run(sets)
    finally:
        subject.release()


class _Search:
    """One bisection."""

    def __init__(self, subject: Subject, inputs: InputSets, tolerance: Tolerance) -> None:
        self._subject = subject
        self._inputs = inputs
        self._tolerance = tolerance
        self.steps: list[str] = []
        self._number = 0
        self._call: Call = inputs.first
        self._expected: dict[str, Any] = {}
        self._captured: list[Item] = []
        self._compiled: list[Item] = []

    def run(self, sets: int) -> Bisection:
        subject = self._subject
        missing = subject.until_replayed(self._inputs.first)
        if missing:
            raise DispatchError.nothing_verified(why=missing)
        before = subject.counters.replays
        difference = self._first_wrong(sets)
        if difference is None:
            result = self._result("", None)
        elif subject.wrapper is not None:
            place = wrapper_place(subject.wrapper, self._call, self._tolerance, subject.kept)
            finding = self._located("replay", difference, place)
            result = self._result("replay", finding, (place.piece,) if place.piece else ())
        else:
            result = self._stages(difference)
        replays = subject.counters.replays - before
        return replace(result, replays=replays)

    def _result(
        self, stage: str, finding: Difference | None, pieces: Sequence[str] = (), culprit: str = ""
    ) -> Bisection:
        steps = tuple(self.steps)
        return Bisection(self._subject.name, stage, tuple(pieces), culprit, finding, steps, 0)

    def _first_wrong(self, sets: int) -> Difference | None:
        """Go to the first set of inputs whose replay is wrong."""
        for number in range(sets):
            self._number, self._call = number, self._inputs.fill(number)
            self._expected = self._subject.outcome(self._subject.original, self._call)
            actual = self._subject.outcome(self._subject.call, self._call)
            difference = self._tolerance.first("the result", self._expected, actual)
            self.steps.append(
                f"inputs {number}, all replayed: {'wrong' if difference else 'right'}"
            )
            if difference is not None:
                return difference
            unsaid, _ = self._subject.uncompared(self._call, self._expected, actual)
            if unsaid:
                self.steps.append(f"not compared: {', '.join(unsaid)}")
        return None

    # -------------------------------------------------------------- the stages

    def _stages(self, difference: Difference) -> Bisection:
        self._list_pieces()
        if self._wrong({}, "all pieces uncompiled"):
            return self._before_pieces(difference)
        compiled = dict.fromkeys(self._compiled, PieceMode.COMPILED)
        if self._wrong(compiled, "all pieces compiled, not captured"):
            result = minimal(
                self._compiled, lambda some: self._wrong_with(PieceMode.COMPILED, some)
            )
            return self._compilation(result, difference)
        result = minimal(self._captured, lambda some: self._wrong_with(PieceMode.REPLAYED, some))
        return self._replay(result, difference)

    def _wrong_with(self, way: PieceMode, some: Sequence[Item]) -> bool:
        names = ", ".join(map(self._name, some))
        others = self._compiled if way is PieceMode.REPLAYED else ()
        ways = {**dict.fromkeys(others, PieceMode.COMPILED), **dict.fromkeys(some, way)}
        return self._wrong(ways, f"{way.value}: {names}")

    def _name(self, item: Item) -> str:
        graphs = {number for number, _ in self._captured + self._compiled}
        piece = WHOLE if item[1] < 0 else f"piece_{item[1]}"
        return piece if len(graphs) < 2 else f"graph {item[0]} {piece}"

    def _wrong(self, ways: dict[Item, PieceMode], what: str) -> bool:
        """Return whether the step is wrong with pieces run in these ways, others uncompiled."""

        def of(number: int) -> Observer:
            def run(program: Any, recording: Any, inputs: Any, real: int | None) -> Any:
                whole = ways.get((number, -1))
                chosen = {
                    piece.index: whole or ways.get((number, piece.index), PieceMode.UNCOMPILED)
                    for piece in program.split.pieces
                }
                return run_step(program, recording, inputs, real, chosen)

            return run

        with self._subject.observed(of):
            actual = self._subject.outcome(self._subject.call, self._call)
        wrong = self._tolerance.first("the result", self._expected, actual) is not None
        self.steps.append(f"{what}: {'wrong' if wrong else 'right'}")
        return wrong

    def _list_pieces(self) -> None:
        """List the pieces of all steps that the call replays."""

        def of(number: int) -> Observer:
            def run(program: Any, recording: Any, inputs: Any, real: int | None) -> Any:
                pieces = program.split.pieces
                full = recording.batch.mode is CUDAGraphMode.FULL
                captured = [] if full else [p.index for p in pieces if p.capture]
                self._captured += [(number, index) for index in ([-1] if full else captured)]
                self._compiled += [(number, p.index) for p in pieces if p.compiled]
                return recording.replay(inputs, real)

            return run

        with self._subject.observed(of):
            self._subject.outcome(self._subject.call, self._call)

    # -------------------------------------------------------------- what they end in

    def _before_pieces(self, difference: Difference) -> Bisection:
        """Blame a pass, or the trace, as no piece is to blame."""
        if self._right_with({}, "compiled anew"):
            detail = "traced anew it is right: what the trace holds has changed since"
        else:
            config = self._subject.config
            for name in self._removable():
                settings = {"disabled_passes": (*config.disabled_passes, name)}
                if self._right_with(settings, f"without pass {name}"):
                    return self._pass(name, settings, difference)
            detail = "the traced graph computes something else than the model does"
        finding = self._located("tracing", difference, Difference(detail=detail))
        return self._result("tracing", finding)

    def _removable(self) -> list[str]:
        """Return the names of the passes that the model can be compiled without."""
        config = self._subject.config
        if config.mode is not CompilationMode.PIECEWISE or self._subject.wrapper is not None:
            return []
        names = dict.fromkeys([*_own_passes(config), *OPTIONAL])
        return [name for name in names if name not in config.disabled_passes]

    def _right_with(self, settings: dict[str, Any], what: str) -> bool:
        """Return whether the model, compiled anew with other settings, gives what eager gives."""
        try:
            other = self._subject.again(**settings)
        except CGCompileError as error:
            self.steps.append(f"{what}: {str(error).splitlines()[0]}")
            return False
        try:
            outcome = other.outcome(other.call, self._call)
        finally:
            other.release()
        right = self._tolerance.first("the result", self._expected, outcome) is None
        self.steps.append(f"{what}: {'right' if right else 'wrong'}")
        return right

    def _pass(self, name: str, settings: dict[str, Any], difference: Difference) -> Bisection:
        """Blame a pass: the first op that has another value without it."""
        place, good = Difference(), self._subject.again(**settings)
        try:
            if not good.until_replayed(self._call):
                runs = [nodes_seen(subject, self._call) for subject in (self._subject, good)]
                first = first_node(runs[0], runs[1], self._changed_node)
                place = place if first is None else place_of(*first)
        finally:
            good.release()
        own = name in _own_passes(self._subject.config)
        what = "a pass of yours" if own else "a pass of cgcompile"
        place = replace(place, detail=f"{what}, {name}, changes it")
        finding = self._located("pass", difference, place)
        return self._result("pass", finding, (place.piece,) if place.piece else (), name)

    def _changed_node(self, bad: Nodes, right: Nodes) -> fx.Node | None:
        """Return the first node that has another value with the pass, or the new one it reads."""
        known = {node.name: leaves for node, leaves in right.made.items()}
        for node, leaves in bad.made.items():
            if node.name not in known:
                continue
            if self._tolerance.first(node.name, known[node.name], leaves) is None:
                continue
            new = [n for n in node.all_input_nodes if n.op in COMPUTING and n.name not in known]
            return new[0] if new else node
        new = [node for node in bad.made if node.name not in known]
        return new[-1] if new else None

    def _compilation(self, items: list[Item], difference: Difference) -> Bisection:
        names = [self._name(item) for item in items]
        finding = self._watched(items, "compilation")
        if finding is None or finding.piece == WHOLE:
            place = Difference(piece=", ".join(names))
            finding = self._located("compilation", difference, place)
        return self._result("compilation", finding, names)

    def _replay(self, items: list[Item], difference: Difference) -> Bisection:
        names = [self._name(item) for item in items]
        finding = self._watched(items, "replay")
        if finding is None:
            finding = self._located("replay", difference, Difference(piece=", ".join(names)))
        if items[0][1] < 0:
            if finding.piece == WHOLE:
                return self._in_pieces() or self._result("replay", finding, names)
            names = [finding.piece]
        return self._result("replay", finding, names)

    def _in_pieces(self) -> Bisection | None:
        """The same where the model is captured in pieces, now; a FULL graph has none to tell of."""
        other = self._subject.again(cudagraph_mode=CUDAGraphMode.PIECEWISE)
        try:
            missing = other.until_replayed(self._inputs.first)
            self.steps.append(f"captured anew, in pieces: {missing or 'replays'}")
            search = _Search(other, self._inputs, self._tolerance)
            result = None if missing else search.run(self._number + 1)
            self.steps += search.steps
            if result is None or not result.stage:
                return None
            return replace(result, subject=self._subject.name, steps=tuple(self.steps))
        finally:
            other.release()

    def _located(self, stage: str, difference: Difference, place: Difference) -> Difference:
        return located(stage, difference, real_rows(), place, self._number)

    def _watched(self, items: list[Item], stage: str) -> Difference | None:
        """Return where one of the graphs of these pieces differs from its plain form."""
        watcher = Watcher(self._tolerance)
        with self._subject.observed(watcher.of):
            self._subject.outcome(self._subject.call, self._call)
        graphs = {number for number, _ in items}
        for number, difference in watcher.differences:
            if number in graphs and difference.stage == stage:
                return replace(difference, inputs=self._number)
        return None


def _own_passes(config: CompilationConfig) -> list[str]:
    """Return the names of the passes that the user added."""
    return [str(step.name) for step in (*config.graph_passes, *config.piece_passes)]


def minimal(items: Sequence[T_], fails: Callable[[Sequence[T_]], bool]) -> list[T_]:
    """Return some of the items that fail together and of which none can be left out."""
    result, parts = list(items), 2
    while len(result) > 1:
        size = -(-len(result) // parts)
        chunks = [result[at : at + size] for at in range(0, len(result), size)]
        smaller = next((chunk for chunk in chunks if fails(chunk)), None)
        if smaller is not None:
            result, parts = smaller, 2
            continue
        rests = [[each for each in result if each not in chunk] for chunk in chunks]
        rest = next((rest for rest in rests if len(chunks) > 2 and fails(rest)), None)
        if rest is not None:
            result, parts = rest, max(parts - 1, 2)
            continue
        if len(chunks) == len(result):
            break
        parts = min(2 * parts, len(result))
    return result
