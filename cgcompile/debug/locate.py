"""Find where a wrong step goes wrong: piece, op and line.

:func:`run_step` runs a recorded step with some pieces replayed, others compiled or uncompiled.
:class:`Watcher` compares the three modes piece by piece, and :class:`Nodes` runs a piece node by
node. The rule: a run leaves what one execution of the step leaves.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from cgcompile.boundaries import target_name
from cgcompile.config import CUDAGraphMode
from cgcompile.context import callers_context
from cgcompile.debug.compare import Call, Difference, Tolerance, copied
from cgcompile.debug.restore import copies, restored_after
from cgcompile.debug.subject import Subject
from cgcompile.graphs.arena import address, comparable, rows_apart
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.passes.nodes import is_allocation, is_container_item, is_view, user_line, written
from cgcompile.passes.split import Piece, SplitGraph, returned_names
from cgcompile.pieces.compilers import Runnable
from cgcompile.runtime.compiled_graph import ReplayOverride
from cgcompile.runtime.program import Program, mutated_inputs
from cgcompile.runtime.recording import Recording
from cgcompile.torch_compat import torch_ops

After = Callable[[Piece, Mapping[str, Any]], None]
"""Called with a piece and what it left, not copied: its outputs and the inputs that it writes."""


class PieceMode(enum.Enum):
    """How a piece runs."""

    UNCOMPILED = "uncompiled"  # its FX graph, op by op
    COMPILED = "compiled"  # what the compiler made of it
    REPLAYED = "replayed"  # from its CUDA graph


STAGES = {PieceMode.COMPILED: "compilation", PieceMode.REPLAYED: "replay"}
WHOLE = "the whole step"


# ---------------------------------------------------------------- running a step


def run_step(
    program: Program,
    recording: Recording,
    inputs: Sequence[Any],
    real: int | None,
    modes: Mapping[int, PieceMode],
    after: After | None = None,
    runnables: Mapping[int, Runnable] | None = None,
) -> Any:
    """Run a recorded step once, each captured piece in its mode, by index.

    ``runnables`` replace pieces that are not replayed. A FULL graph has no pieces: it is replayed
    if any piece is to be, and ``after`` is not called.
    """
    run = _MixedRun(program, recording, inputs, modes, after, runnables or {})
    if PieceMode.REPLAYED not in modes.values():
        return run.without_replays(real)
    if recording.batch.mode is CUDAGraphMode.FULL:
        return recording.replay(inputs, real)
    return recording.replay(inputs, real, run.segment)


@dataclass(eq=False)
class _MixedRun:
    """One run of a step.

    Note [Memory of mixed runs]. The outputs of a piece that is not replayed have memory of their
    own. They are copied to where graphs read them only while one does: longer, they would spoil
    what a replayed piece left there, and replays would spoil them.
    """

    program: Program
    recording: Recording
    inputs: Sequence[Any]
    modes: Mapping[int, PieceMode]
    after: After | None
    runnables: Mapping[int, Runnable]
    # (what graphs read, the output of the piece) by name
    own: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def without_replays(self, real: int | None, noise: bool = False) -> Any:
        """Run all pieces plain, with the padding rows zeroed that a replay zeroes, or random."""
        zeroed = self._zeroed() if real is not None else {}

        def plain(piece: Piece) -> Runnable:
            def run(*arguments: Any) -> Sequence[Any]:
                output = self._call(piece, arguments)
                names = (*piece.inputs, *piece.outputs)
                values = dict(zip(names, (*arguments, *output), strict=True))
                for name in zeroed.get(piece.index, ()):
                    values[name][real:].zero_()
                if noise:
                    self._disturb(dict(zip(piece.outputs, output, strict=True)), real)
                self._report(piece, values.__getitem__)
                return output

            return run

        step = self.program.step.bind([plain(piece) for piece in self.program.split.pieces])
        return self.recording.in_context(step)(*self.inputs)

    def _disturb(self, results: Mapping[str, Any], real: int | None) -> None:
        """Fill the padding rows of what a piece made with random numbers; not memory of inputs."""
        known = {address(tensor) for tensor in torch_ops.tree_tensors(list(self.inputs))}
        rows = self.recording.batch.descriptor.num_tokens
        with_rows = self.program.rows.of_batch(rows, self.inputs) or frozenset()
        for name in with_rows.intersection(results):
            tensor = results[name]
            if tensor.is_floating_point() and address(tensor) not in known and rows_apart(tensor):
                tail = tensor[real:]
                for dim in [dim for dim, stride in enumerate(tail.stride()) if not stride]:
                    tail = tail.narrow(dim, 0, 1)
                tail.copy_(torch.randn(tail.shape, device=tail.device))

    def _zeroed(self) -> dict[int, list[str]]:
        """Return the values whose padding rows a replay zeroes, by the piece before that."""
        pairs = zip(self.program.split.pieces, self.recording.sequence.segments, strict=False)
        sources = self.recording.sources.items()
        tails = {p.index: s.tails for p, s in pairs if isinstance(s, EagerSegment)}
        return {
            index: [name for name, source in sources if any(source is tail for tail in of_piece)]
            for index, of_piece in tails.items()
        }

    def _call(self, piece: Piece, inputs: Sequence[Any]) -> list[Any]:
        run = self.runnables.get(piece.index, self.program.runnables[piece.index])
        uncompiled = self.modes.get(piece.index) is PieceMode.UNCOMPILED and piece.compiled
        if uncompiled and piece.index not in self.runnables:
            run = piece.module.forward
        return list(run(*inputs))

    def _report(self, piece: Piece, value_of: Callable[[str], Any]) -> None:
        if self.after is not None:
            names = (*piece.outputs, *mutated_inputs(piece))
            self.after(piece, {name: value_of(name) for name in names})

    def segment(self, index: int, step: Callable[[], Any]) -> None:
        """Run a segment of the recording, or the piece that it stands for."""
        pieces = self.program.split.pieces
        if index >= len(pieces):  # sizes that are returned
            step()
            return
        piece = pieces[index]
        overwritten = self._copy_in(piece.inputs)
        if piece.capture and self.modes.get(piece.index) is not PieceMode.REPLAYED:
            self.recording.sequence.fill(index)  # a later segment may read the same copy
            self._run_instead(piece)
        else:
            step()
        if self.own:
            self._refresh([self._value(name) for name in mutated_inputs(piece)])
        for target, before in reversed(overwritten):
            target.copy_(before)
        self._report(
            piece, lambda name: self.own[name][1] if name in self.own else self._value(name)
        )
        if index == len(pieces) - 1:
            self._copy_in(returned_names(self.program.split))

    def _value(self, name: str) -> Any:
        return self.recording.value(name, self.inputs)

    def _run_instead(self, piece: Piece) -> None:
        output = self._call(piece, [self._value(name) for name in piece.inputs])
        for name, value in zip(piece.outputs, output, strict=True):
            target = self._value(name)
            if not isinstance(value, torch.Tensor) or not isinstance(target, torch.Tensor):
                continue
            if address(target) != address(value):
                self.own[name] = (target, value.detach())

    def _copy_in(self, names: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy values to where graphs read them; return these tensors, and what they held."""
        overwritten = []
        for target, value in [self.own[name] for name in names if name in self.own]:
            overwritten.append((target, target.clone()))
            target.copy_(value)
        return overwritten

    def _refresh(self, tensors: Sequence[Any]) -> None:
        """Copy the values in memory that was written."""
        memory = {address(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
        for name, (target, _) in list(self.own.items()):
            if address(target) in memory:
                self.own[name] = (target, target.clone())


# ---------------------------------------------------------------- padding


class WithoutPadding:
    """Compare a call of a padded batch by what does not depend on its padding rows.

    Note [Memory of padding rows]. Replays zero padding rows behind eager pieces and eager runs do
    not, so that what these rows write, such as the scratch slot of a cache, differs. Three runs of
    the uncompiled pieces, with padding rows as they are, zeroed, and random, show which memory
    depends on them. It is ignored only if the first run equals eager: then the pieces are right,
    and a fault of a pass, a compiler or a replay does not widen what is ignored. Random numbers go
    into rows of the batch alone: elsewhere they would reach real rows, and hide their faults. Of a
    wrapper, which has no pieces, memory of as many rows as the batch is compared by its real rows.
    """

    def __init__(self, subject: Subject, call: Call, tolerance: Tolerance) -> None:
        context = callers_context()
        batch = None if context is None else context.batch_descriptor
        self._real = None if context is None else context.num_unpadded_tokens
        self._rows = 0 if batch is None else batch.num_tokens
        self._subject, self._call, self._tolerance = subject, call, tolerance
        self._in_pieces = subject.handle is not None
        self._masks: dict[str, torch.Tensor] = {}  # of memory: what depends on padding
        self._is_masked = False

    def pair(
        self, expected: dict[str, Any], actual: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two outcomes; without padding, if they differ only there."""
        if self._real is None or not self._rows:
            return expected, actual
        both = expected, actual
        if self._in_pieces and self._differ(*both) and self._differ(*map(self._cut, both)):
            both = self._masked(expected, expected), self._masked(actual, expected)
        cut = self._cut(both[0]), self._cut(both[1])
        return both if self._differ(*cut) else cut

    @property
    def ignored(self) -> tuple[str, ...]:
        """Which memory was not compared, as text."""
        counts = [(name, int(mask.sum()), mask.numel()) for name, mask in self._masks.items()]
        return tuple(f"{n} of {all_} numbers of {name} (padding)" for name, n, all_ in counts if n)

    def pieces_equal(self, expected: dict[str, Any]) -> bool:
        """Return whether the uncompiled pieces equal eager, with padding rows as they are."""
        return not self._differ(expected, self._uncompiled(None))

    def _differ(self, expected: dict[str, Any], actual: dict[str, Any]) -> bool:
        return self._tolerance.first("the result", expected, actual) is not None

    def _cut(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values, results of the rows of the batch cut to the real ones."""
        memory = self._subject.memory(self._call) if self._in_pieces else {}

        def cut(value: Any) -> Any:
            of_batch = isinstance(value, torch.Tensor) and value.dim() and len(value) == self._rows
            return value[: self._real] if of_batch else value

        return {name: value if name in memory else cut(value) for name, value in values.items()}

    def _masked(self, values: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
        """Return the values, memory with zeros where it depends on padding."""
        if not self._is_masked:
            self._masks, self._is_masked = self._dependent(eager), True
        masks = self._masks
        return {n: _zeroed_where(v, masks[n]) if n in masks else v for n, v in values.items()}

    def _dependent(self, eager: dict[str, Any]) -> dict[str, torch.Tensor]:
        plain = self._uncompiled(None)
        if self._differ(eager, plain):
            return {}
        others = self._uncompiled(self._real), self._uncompiled(self._real, noise=True)
        masks: dict[str, torch.Tensor] = {}
        for name in self._subject.memory(self._call):
            value, one, other = (comparable(run[name]) for run in (plain, *others))
            equal = torch.isclose(value, one, 0, 0, equal_nan=True)
            masks[name] = ~(equal & torch.isclose(value, other, 0, 0, equal_nan=True))
        return masks

    def _uncompiled(self, real: int | None, noise: bool = False) -> dict[str, Any]:
        """Return the outcome of the uncompiled pieces; ``real`` rows stay as they are."""

        def run(_: int, program: Program, recording: Recording, inputs: Any, __: Any) -> Any:
            pieces = range(len(program.split.pieces))
            modes = dict.fromkeys(pieces, PieceMode.UNCOMPILED)
            mixed = _MixedRun(program, recording, inputs, modes, None, {})
            return mixed.without_replays(self._real if noise else real, noise)

        with self._subject.observed(lambda number: partial(run, number)):
            return self._subject.outcome(self._subject.call, self._call)


def _zeroed_where(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if comparable(value) is value:
        return value.masked_fill(mask, 0)
    return value.view(torch.uint8).masked_fill(mask, 0).view(value.dtype)  # floats of eight bits


# ---------------------------------------------------------------- pieces of a step


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """One call of a recorded step."""

    graph: int
    program: Program
    recording: Recording
    inputs: Sequence[Any]
    real: int | None

    @property
    def split(self) -> SplitGraph:
        """The split graph."""
        return self.program.split

    def run(self, mode: PieceMode, **options: Any) -> Any:
        """Run all pieces in one mode; see :func:`run_step`."""
        modes = dict.fromkeys(range(len(self.split.pieces)), mode)
        return run_step(self.program, self.recording, self.inputs, self.real, modes, **options)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore what the step writes inside, and run it without gradients."""
        tensors = [self.inputs[position] for position in self.program.mutated_positions]
        with torch.no_grad(), restored_after(tensors):
            yield


class Values:
    """Copies of the values after each piece: those it left, and earlier ones still needed."""

    def __init__(self, split: SplitGraph) -> None:
        self.after: dict[int, dict[str, Any]] = {}  # by index; the result behind the last one
        self._current: dict[str, Any] = {}
        self._last_use = {name: piece.index for piece in split.pieces for name in piece.inputs}
        self._last_use |= dict.fromkeys(returned_names(split), len(split.pieces))

    def note(self, piece: Piece, left: Mapping[str, Any]) -> None:
        """Copy what a piece left; see :data:`After`."""
        empty = set(piece.outputs) - set(filled_outputs(piece))
        older = {n: v for n, v in self._current.items() if self._last_use.get(n, -1) > piece.index}
        self._current = {n: v for n, v in left.items() if n not in empty}
        self._current |= {n: v for n, v in older.items() if n not in left}
        values = {n: v for n, v in self._current.items() if v is not None}
        self.after[piece.index] = copies(values)


class Watcher:
    """Run each observed step in all modes, the last one as the replay, and compare them."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.differences: list[tuple[int, Difference]] = []  # (number of the graph, the first one)
        self.seen: list[ObservedStep] = []  # the steps that ran
        self._tolerance = tolerance

    def of(self, number: int) -> ReplayOverride:
        """Return the observer of a compiled graph."""

        def watch(program: Program, recording: Recording, inputs: Any, real: int | None) -> Any:
            return self._watch(ObservedStep(number, program, recording, inputs, real))

        return watch

    def _watch(self, step: ObservedStep) -> Any:
        self.seen.append(step)
        before: dict[int, dict[str, Any]] = {}
        for mode in PieceMode:
            values = Values(step.split)
            with nullcontext() if mode is PieceMode.REPLAYED else step.restored():
                result = step.run(mode, after=values.note)
                values.after[len(step.split.pieces)] = copied(result)
            difference = self._first(step, mode, before, values.after) if before else None
            if difference is not None:
                self.differences.append((step.graph, difference))
                break
            before = values.after
        return result if mode is PieceMode.REPLAYED else step.run(PieceMode.REPLAYED)

    def _first(
        self,
        step: ObservedStep,
        mode: PieceMode,
        before: Mapping[int, Mapping[str, Any]],
        after: Mapping[int, Mapping[str, Any]],
    ) -> Difference | None:
        """Return where a mode differs from the one before, with the op that makes the value."""
        pieces = step.split.pieces
        for index, values in after.items():
            whole = index == len(pieces)
            previous = before[index].items()
            expected = {name: value for name, value in previous if whole or name in values}
            name = "the result" if whole else pieces[index].name
            difference = self._tolerance.first(name, expected, values)
            if difference is not None:
                origin = Difference(piece=WHOLE)
                origin = origin if whole else _origin(pieces[index], difference.value)
                return located(STAGES[mode], difference, step.real, origin)
        return None


# ---------------------------------------------------------------- nodes of a piece


class Nodes(fx.Interpreter):
    """Run an uncompiled piece and copy what each node leaves."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.module)
        self._piece = piece.module
        self.made: dict[fx.Node, dict[str, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        """Run a node, and copy what it leaves."""
        value = super().run_node(node)
        if node.op not in ("placeholder", "output") and not is_allocation(node):
            left = dict(torch_ops.tree_paths(value))
            for number, target in enumerate(written(self._piece, node)):
                paths = torch_ops.tree_paths(self.env[target])
                left |= {f"written {number}{path}": leaf for path, leaf in paths}
            self.made[node] = copies(left)
        return value


Seen = list[tuple[ObservedStep, dict[int, Nodes]]]
"""Steps, and what each node of their uncompiled pieces makes, by the index of the piece."""


def nodes_seen(subject: Subject, call: Call) -> Seen:
    """Run a call, and then each of its steps uncompiled, node by node."""
    watcher = Watcher(Tolerance())
    with subject.observed(watcher.of):
        subject.outcome(subject.call, call)
    seen = []
    with restored_after(subject.kept), torch.no_grad():
        for step in watcher.seen:
            nodes = {piece.index: Nodes(piece) for piece in step.split.pieces}
            with step.restored():
                runnables = {index: interpreter.run for index, interpreter in nodes.items()}
                step.run(PieceMode.UNCOMPILED, runnables=runnables)
            seen.append((step, nodes))
    return seen


def first_node(
    one: Seen, other: Seen, differs: Callable[[Nodes, Nodes], fx.Node | None]
) -> tuple[Piece, fx.Node] | None:
    """Return the first node, of either run, that ``differs`` returns for two runs of a piece."""
    for (step, nodes), (_, others) in zip(one, other, strict=False):
        for piece in step.split.pieces:
            node = (
                differs(nodes[piece.index], others[piece.index]) if piece.index in others else None
            )
            if node is not None:
                return piece, node
    return None


def filled_outputs(piece: Piece) -> list[str]:
    """Return the outputs that hold values; the others are memory that a later piece writes."""
    (results,) = piece.module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    pairs = zip(piece.outputs, results, strict=True)
    return [name for name, node in pairs if not (isinstance(node, fx.Node) and is_allocation(node))]


# ---------------------------------------------------------------- places


def place_of(piece: Piece, node: fx.Node | None, detail: str = "") -> Difference:
    """Return a difference that has only the piece, op and line of a node."""
    line = user_line(node) if node is not None and _has_own_lines(piece) else None
    if line is None and piece.lines:
        line = piece.lines[0]
        detail = _joined(detail, "the piece begins at that line")
    op = "" if node is None else target_name(node.target).replace("_VariableFunctionsClass.", "")
    return Difference(piece=piece.name, op=op, line=": ".join(line or ()), detail=detail)


def _has_own_lines(piece: Piece) -> bool:
    """Return whether the nodes have lines of this piece: equal pieces share those of the first."""
    lines = [user_line(node) for node in piece.module.graph.nodes]
    return not piece.lines or piece.lines[0] in lines


def _joined(*texts: str) -> str:
    return "; ".join(filter(None, texts))


def _origin(piece: Piece, name: str) -> Difference:
    """Return the op of a piece that makes a value; or that the piece overwrites it."""
    if name in piece.outputs or name in mutated_inputs(piece):
        return place_of(piece, _producer(piece, name), "this op makes the value")
    origin = place_of(piece, None)
    return replace(origin, detail=_joined("it was right before, and is overwritten", origin.detail))


def _producer(piece: Piece, name: str) -> fx.Node | None:
    """Return the node of a piece that makes, or last writes, a value or what it is a view of."""
    graph = piece.module.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    node: Any = None
    if name in piece.outputs:
        results: Any = graph.output_node().args[0]
        node = results[piece.outputs.index(name)]
    for writer in graph.nodes:
        if any(names.get(target) == name for target in written(piece.module, writer)):
            node = writer
    while isinstance(node, fx.Node) and (is_container_item(node) or is_view(piece.module, node)):
        node = node.all_input_nodes[0]
    return node if isinstance(node, fx.Node) and node.op != "placeholder" else None


def located(
    stage: str, difference: Difference, real: int | None, origin: Difference, number: int = 0
) -> Difference:
    """Return a difference with its stage, place and padding rows: those behind ``real`` ones."""
    return replace(
        difference,
        stage=stage,
        inputs=number,
        piece=origin.piece,
        op=origin.op,
        line=origin.line,
        padding_rows=tuple(row for row in difference.rows if real is not None and row >= real),
        detail=_joined(difference.detail, origin.detail),
        pieces=(origin.piece,) if origin.piece else (),
    )


def real_rows() -> int | None:
    """Return how many rows are real by the forward context; None if that is unknown."""
    context = callers_context()
    return None if context is None else context.num_unpadded_tokens


def padding_place(
    subject: Subject, exact: Call, larger: Call, real: int, tolerance: Tolerance
) -> Difference:
    """Return the first op whose real rows differ between an exact step and a padded one."""

    def differs(small: Nodes, large: Nodes) -> fx.Node | None:
        padded = {node.name: leaves for node, leaves in large.made.items()}
        for node, leaves in small.made.items():
            others = padded.get(node.name, {})
            cut = {path: real_part(others.get(path), leaf, real) for path, leaf in leaves.items()}
            exact_rows = {
                path: leaf for path, leaf in leaves.items() if _same_shape(leaf, cut[path])
            }
            if tolerance.first(node.name, exact_rows, cut) is not None:
                return node
        return None

    runs = [nodes_seen(subject, call) for call in (exact, larger)]
    if not all(runs):
        return Difference(detail="and no step of it was seen")
    first = first_node(runs[0], runs[1], differs)
    if first is None:
        return Difference(detail="and no op of the uncompiled pieces does so")
    return place_of(*first, "first in this op")


def real_part(padded: Any, exact: Any, real: int) -> Any:
    """Return the ``real`` rows of a padded value, in the dimensions where an exact one has them."""
    both = isinstance(padded, torch.Tensor) and isinstance(exact, torch.Tensor)
    if not both or padded.dim() != exact.dim():
        return padded
    for dim, (more, fewer) in enumerate(zip(padded.shape, exact.shape, strict=True)):
        if more > fewer == real:
            padded = padded.narrow(dim, 0, real)
    return padded


def _same_shape(one: Any, other: Any) -> bool:
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape
