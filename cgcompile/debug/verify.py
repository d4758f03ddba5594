"""Compare graphs with the eager model: :func:`verify`.

Each check runs the same inputs in two ways and compares the results and the memory that they write.
Where they differ, the step runs once more piece by piece to find the op (``locate.py``), or many
times to find the smallest set of pieces or the pass (``search.py``); of a wrapper, which has no
pieces, the arguments of the eager breaks are compared.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from cgcompile.backend import Backend, handle_of
from cgcompile.boundaries import SplittingOp, target_name
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import callers_context, in_full_mode
from cgcompile.counts import text_table
from cgcompile.debug.compare import (
    Call,
    Difference,
    InputSets,
    Tolerance,
    copied,
    named_values,
    padded,
    require_comparison,
    require_prepare,
    rows_of,
)
from cgcompile.debug.locate import (
    WHOLE,
    Watcher,
    WithoutPadding,
    located,
    padding_place,
    real_part,
    real_rows,
)
from cgcompile.debug.pages import Page
from cgcompile.debug.restore import State, copies, restored_after
from cgcompile.debug.search import Search
from cgcompile.debug.subject import Subject, comparing, observed, original_of
from cgcompile.encoder.manager import EncoderCudaGraphManager
from cgcompile.encoder.patches import PatchEncoder
from cgcompile.encoder.statistics import on_path
from cgcompile.errors import CGCompileError, DispatchError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.breaks import Breaker, BreakMode
from cgcompile.graphs.capture import capture_lock
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgcompile.loops import Loop
from cgcompile.progress import progress
from cgcompile.reasons import Reason
from cgcompile.serving.batch import Batch
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.settings import checked_but, require, sizes_given
from cgcompile.torch_compat import torch_ops

TAILS = ("random", "nan")


@dataclass(frozen=True)
class Check:
    """One comparison, on several sets of inputs.

    Attributes:
        name: what was compared with what.
        compared: on how many sets of inputs.
        replays: how many replays took part.
        tolerance: how close numbers have to be, in words.
        findings: what differs, at most one for each set.
        missing: why fewer replays took part than were asked for, or why nothing was compared; empty
            if nothing is missing.
        uncompared: what was not compared: results that are objects without fields and without an
            ``==`` of their own, such as functions; and memory that padding rows reach.
        notes: what has no graph and needs none: items of an encoder above its budgets, or cheaper
            without one. They are compared, and no failure where others were replayed. And how much
            of a compiled model kernels of cgcompile compute, which differ from eager by rounding.
        steps: with ``bisect=True``, what was run, in order, with its outcome.

    Example:
        >>> found = cgcompile.verify(nn.Linear(8, 8), torch.randn(4, 8), sets=2)
        >>> [check.compared for check in found.checks][:1]
        [2]
    """

    name: str
    compared: int
    replays: int
    tolerance: str
    findings: tuple[Difference, ...] = ()
    missing: str = ""
    uncompared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether calls were replayed, all but those in ``notes``, and all results are equal."""
        return bool(self.replays) and not self.missing and not self.findings


@dataclass(frozen=True, repr=False)
class Verification(Page):
    """The result of :func:`cgcompile.verify`; ``print`` it.

    Attributes:
        subject: the name of the model.
        checks: each comparison.

    Example:
        >>> found = cgcompile.verify(nn.Linear(8, 8), torch.randn(4, 8))
        >>> found.ok, found.checks[0].findings
        (True, ())

        Under a forward context the inputs vary and the metadata does not. An op that has baked in
        its metadata differs only in a context with other metadata, so verify in several:

        >>> x, batch = torch.randn(4, 8), cgcompile.BatchDescriptor(4)
        >>> model = cgcompile.compile(nn.Linear(8, 8), dynamic_dims={"input": 0})
        >>> for metadata in ([4], [1, 3]):
        ...     with cgcompile.set_forward_context(
        ...         metadata, cudagraph_runtime_mode="FULL", batch_descriptor=batch
        ...     ):
        ...         print(cgcompile.verify(model, x).ok)
        True
        True
    """

    template: ClassVar[str] = "verification"
    computed: ClassVar[tuple[str, ...]] = ("ok",)

    subject: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether each check replayed a step and found no difference."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All that differs, in the order of the checks."""
        return tuple(result for check in self.checks for result in check.findings)

    @property
    def replays(self) -> int:
        """How many replays took part."""
        return sum(check.replays for check in self.checks)

    def __str__(self) -> str:
        cells = [("check", "inputs", "replays", "tolerance", "result")]
        for check in self.checks:
            counts = str(check.compared), str(check.replays)
            cells.append((check.name, *counts, check.tolerance, _result(check)))
        rows = [f"{self.subject}: {'ok' if self.ok else 'not ok'}", *text_table(cells)]
        uncompared = dict.fromkeys(name for check in self.checks for name in check.uncompared)
        if uncompared:
            rows.append(f"not compared: {', '.join(uncompared)}")
        rows += [f"note: {note}" for check in self.checks for note in check.notes]
        for check in self.checks:
            rows += [f"  {number}. {step}" for number, step in enumerate(check.steps, 1)]
        return "\n".join([*rows, *map(str, self.differences)])


def _result(check: Check) -> str:
    if check.findings:
        return f"{len(check.findings)} differ"
    if not check.replays:
        return f"nothing was replayed: {check.missing}"
    return check.missing or "equal"


@checked_but("config", "sets", "padded_sizes", "prepare")
def verify(
    model: Any,
    *args: Any,
    config: CompilationConfig | Backend | Mapping[str, Any] | None = None,
    prepare: Callable[[], Any] | None = None,
    sets: int = 3,
    padded_sizes: Sequence[int] | str = (),
    tails: str = "random",
    bisect: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Verification:
    """Run a model eager and replayed on several sets of inputs, and compare.

    Compares results and the tensors that a call writes among its arguments and in the model, which
    are restored after each run; globals, and caches of the forward context, are not. No gradients.
    Captures what is missing, except of an encoder manager; counts in the same counters, not in
    statistics of serving. Synchronises. Checks metadata of one context: see :class:`Verification`.

    Args:
        model: a compiled model; a wrapper, in the forward context of the step; a loop, of which
            rounds are compared with plain steps from the same state and random numbers; a manager
            of either kind with its graphs; or a plain module or function, which is compiled.
        *args: of one call, as ``**kwargs``; other sets have other numbers. Of a manager: batches or
            calls of an encoder.
        config: of a plain model: the settings, a ``Backend``, or a mapping as for ``options``. CPU
            tensors are recorded unless ``capture_device`` is set.
        prepare: makes inputs, such as offsets, as of ``debug.doctor``; of a manager, a batch.
        sets: how many sets of inputs; of a manager, how many ``prepare`` makes.
        padded_sizes: sizes to pad the batch to, such as ``"8,16"``; not under a forward context.
        tails: what padding rows hold: ``"random"`` (integers in the real range) or ``"nan"``.
        bisect: of the first set that differs, find the smallest set of pieces that are wrong
            together, or the pass; runs the step some dozens of times. Not of a manager.
        rtol, atol: tolerances; left out: bitwise for uncompiled pieces on the CPU, else by dtype.
        seed: of the random numbers.

    Returns:
        What was compared and what differs; not ``ok`` where nothing was replayed.

    Raises:
        ConfigError: settings for a model that has its own, no model, or an impossible argument.
        ArgumentsError: the model does not take these arguments; a ``TypeError``.

    >>> cgcompile.verify(nn.Linear(8, 8), torch.randn(4, 8)).ok
    True
    """
    require(tails in TAILS, "tails", "verify", tails, "one of " + ", ".join(TAILS))
    managed = isinstance(model, (CudaGraphManager, EncoderCudaGraphManager))
    require_comparison("verify", sets, rtol, atol, seed)
    require_prepare("verify", prepare, args, kwargs)
    sizes = sizes_given("padded_sizes", "verify", padded_sizes)
    if managed:
        require(not bisect, "bisect", "verify", bisect, "False, for a manager")
        batches = args if prepare is None else [prepare() for _ in range(sets)]
        return _check_managed(model, batches, kwargs, Tolerance(False, rtol, atol))
    inputs = InputSets((args, kwargs), prepare, seed)
    with comparing(model, config, "verify", inputs) as subject:
        tolerance = subject.tolerance(inputs.first, rtol, atol)
        return _Checks(subject, inputs, sets, tolerance, bisect).run(sizes, tails, seed)


class _Run(NamedTuple):
    """One set of inputs, run in two ways; ``locate`` adds the origin of a difference."""

    expected: dict[str, Any] = {}  # noqa: RUF012
    actual: dict[str, Any] = {}  # noqa: RUF012
    replays: int = 0
    missing: str = ""
    locate: Callable[[Difference], Difference] = replace
    ignored: tuple[str, ...] = ()  # what depends on padding rows


@dataclass(frozen=True)
class _Checks:
    """The checks of one model."""

    subject: Subject
    inputs: InputSets
    sets: int
    tolerance: Tolerance
    bisects: bool
    steps: list[str] = field(default_factory=list)  # of the check that runs

    def run(self, sizes: Sequence[int], tails: str, seed: int) -> Verification:
        """Run all checks."""
        checks = [self._against_eager()]
        checks[0] = replace(checks[0], notes=tuple(self.subject.kernel_notes()))
        checks += [self._padded(size, tails, seed) for size in sizes]
        return Verification(self.subject.name, tuple(checks))

    def _against_eager(self) -> Check:
        return self._check("eager against replay", self.tolerance, self._replay)

    def _check(self, name: str, tolerance: Tolerance, run: Callable[[Call, int], _Run]) -> Check:
        """Compare each set of inputs; stop where the first one does not replay, or is bisected."""
        self.steps.clear()
        compared = replays = 0
        missing = ""
        findings: list[Difference] = []
        names: list[str] = []
        with restored_after(self.inputs.tensors):
            for number in progress(range(self.sets), f"verify: {name}", "set"):
                call = self.inputs.fill(number)
                outcome = run(call, number)
                difference = tolerance.first("the result", outcome.expected, outcome.actual)
                missing = missing or outcome.missing
                names += outcome.ignored
                if outcome.replays:
                    right = "right" if difference is None else "wrong"
                    self.steps.append(f"inputs {number}, all replayed: {right}")
                if difference is not None and outcome.replays:
                    findings.append(outcome.locate(difference))
                else:
                    texts, blind = self.subject.uncompared(call, outcome.expected, outcome.actual)
                    names += texts
                    missing = missing or blind
                    if texts:
                        self.steps.append(f"not compared: {', '.join(texts)}")
                replays += outcome.replays
                compared += bool(outcome.replays)
                if (missing and not replays) or (findings and self.bisects):
                    break  # without a replay, the others would not replay either
        return Check(
            name,
            compared,
            replays,
            str(tolerance),
            tuple(findings),
            missing,
            tuple(dict.fromkeys(names)),
            steps=tuple(self.steps) if self.bisects else (),
        )

    def _replayed(self, call: Call) -> tuple[dict[str, Any], int]:
        """Return what a call of the compiled model returns and writes, and how many replays."""
        before = self.subject.counters.replays
        outcome = self.subject.outcome(self.subject.call, call)
        return outcome, self.subject.counters.replays - before

    # -------------------------------------------------------------- eager against replay

    def _replay(self, call: Call, number: int) -> _Run:
        """Replay later sets at once: a replay that returns an earlier result is found by these."""
        subject = self.subject
        missing = subject.until_replayed(call) if number == 0 else ""
        if missing:
            return _Run(missing=missing)
        expected = subject.outcome(subject.original, call)
        actual, replays = self._replayed(call)
        if not replays:  # the layout is not that of the first set
            missing = subject.until_replayed(call)
            actual, replays = self._replayed(call)
        padding = WithoutPadding(subject, call, self.tolerance)
        search = Search(subject, call, expected, padding, self.tolerance)
        expected, actual = padding.pair(expected, actual)
        locate = partial(self._locate, call, number, search)
        return _Run(expected, actual, replays, missing, locate, padding.ignored)

    def _locate(
        self, call: Call, number: int, search: Search, difference: Difference
    ) -> Difference:
        """Return where the graphs of a call differ first from its plain pieces."""
        subject, tolerance = self.subject, self.tolerance
        if isinstance(subject.call, Loop):
            return located("replay", difference, real_rows(), Difference(piece=WHOLE), number)
        if subject.wrapper is not None:
            origin = find_break(subject.wrapper, call, tolerance, subject.kept)
            return located("replay", difference, real_rows(), origin, number)
        if self.bisects:
            result = search.run(difference)
            self.steps.extend(search.steps)
            is_full = bool(result.pieces) and result.pieces[0].endswith(WHOLE)
            return (self._in_pieces(number) if is_full else None) or replace(result, inputs=number)
        watcher = Watcher(tolerance)
        with subject.observed(watcher.of):
            subject.outcome(subject.call, call)
        if watcher.differences:
            return replace(watcher.differences[0][1], inputs=number)
        detail = "the uncompiled pieces differ as well: a pass or the trace; bisect=True tells them"
        return located("tracing", difference, real_rows(), Difference(detail=detail), number)

    def _in_pieces(self, number: int) -> Difference | None:
        """Bisect a new capture of the model in pieces, as a FULL graph has no pieces."""
        with closing(self.subject.recompiled(cudagraph_mode=CUDAGraphMode.PIECEWISE)) as other:
            check = _Checks(other, self.inputs, number + 1, self.tolerance, True)._against_eager()
        self.steps.append(f"captured anew, in pieces: {check.missing or 'replays'}")
        self.steps.extend(check.steps)
        return check.findings[0] if check.findings else None

    # -------------------------------------------------------------- padded against exact

    def _padded(self, size: int, tails: str, seed: int) -> Check:
        subject, real = self.subject, rows_of(self.inputs.first)
        name = f"padded to {size} against exact"
        looser = replace(self.tolerance, exact=False)  # another size, another kernel
        missing = "" if 0 < real < size else f"the batch has {real} rows, not fewer"
        if callers_context() is not None or subject.wrapper is not None:
            missing = "a forward context sets the padding: write the tails there, and verify that"
        if missing:
            return Check(name, 0, 0, str(looser), (), missing)

        def run(call: Call, number: int) -> _Run:
            generator = torch.Generator().manual_seed(seed + 1000 + number)
            larger = padded(call, size, tails, generator)
            missing = subject.until_replayed(larger)
            if missing:
                return _Run(missing=missing)
            expected = subject.outcome(subject.original, call)
            actual, replays = self._replayed(larger)
            pairs = [(n, value) for n, value in expected.items() if n in actual]
            cut = {n: real_part(actual[n], value, real) for n, value in pairs}

            def locate(difference: Difference) -> Difference:
                origin = Difference(detail="a replay of the exact size could not be had")
                if not subject.until_replayed(call):
                    origin = padding_place(subject, call, larger, real, looser)
                origin = replace(origin, detail=f"real rows depend on padding, {origin.detail}")
                return located("padding", difference, real, origin, number)

            return _Run(expected, cut, replays, "", locate)

        return self._check(name, looser, run)


# ---------------------------------------------------------------- the breaks of a wrapper


def find_break(
    wrapper: CUDAGraphWrapper, call: Call, tolerance: Tolerance, kept: Sequence[torch.Tensor]
) -> Difference:
    """Return the first eager break whose arguments differ, or the result; restores all tensors."""
    context = callers_context()
    descriptor = None if context is None else context.batch_descriptor
    mode = wrapper.runtime_mode if context is None else context.cudagraph_runtime_mode
    entry = None if descriptor is None else wrapper.entry_of(mode, descriptor)
    if entry is None:
        return Difference(detail="no graph serves the step")
    try:
        with torch.no_grad(), restored_after([*torch_ops.tree_tensors(call), *kept]):
            if entry.form is not None:
                entry.form.check_form(*call, wrapper.name, descriptor)
            entry.check(*call, wrapper.name)
            plain, result = _run_plain(wrapper, call, kept)
            replayed: list[dict[str, Any]] = []
            wrapper.replay_entry(entry, call, partial(_copy_break, entry, replayed))
            output = copied(entry.output)
        names = [name for name, _ in plain]
        segments = entry.sequence.segments
        recorded = [segment.name for segment in segments if isinstance(segment, EagerSegment)]
        if names != recorded:
            raise DispatchError.other_breaks(what=wrapper.name, now=names, before=recorded)
    except CGCompileError as error:
        return Difference(detail=str(error).splitlines()[0])
    for index, (name, inputs) in enumerate(plain):
        difference = tolerance.first(f"break {index} ({name})", inputs, replayed[index])
        if difference is not None:
            detail = f"{difference.value}: {difference.detail}"
            return Difference(piece=difference.piece, detail=detail)
    is_result = tolerance.first("the result", result, output) is not None
    return Difference(piece="the result" if is_result else "")


def _run_plain(
    wrapper: CUDAGraphWrapper, call: Call, kept: Sequence[torch.Tensor]
) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """Run a step plain; return the arguments of its breaks, and its result; restore the state."""
    model = wrapper.unwrap()
    state, breaks = State(model, call), _PlainBreaks(wrapper)
    unseen = state.tensors if torch_ops.holds_compiled_code(model) else kept
    with restored_after([*torch_ops.tree_tensors(call), *unseen], state=state):
        return breaks.arguments, copied(breaks.run(*call))


def _copy_break(
    entry: CUDAGraphEntry, copied_breaks: list[Any], index: int, step: Callable[[], Any]
) -> None:
    """Run a segment of a replay; of an eager break, copy its arguments as it leaves them."""
    step()
    segment = entry.sequence.segments[index]
    if isinstance(segment, EagerSegment):
        copied_breaks.append(copies(named_values((segment.args, dict(segment.kwargs)))))


class _PlainBreaks(Breaker):
    """Run a step plain and copy the arguments of its breaks."""

    def __init__(self, wrapper: CUDAGraphWrapper) -> None:
        self.name = wrapper.name
        self.arguments: list[tuple[str, dict[str, Any]]] = []
        self._wrapper = wrapper
        self._in_break = False

    @property
    def is_recording(self) -> bool:
        return not self._in_break

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        wrapper = self._wrapper
        if not isinstance(wrapper, BreakableCUDAGraphWrapper) or wrapper.pool is None:
            return wrapper.runnable(*args, **kwargs)
        below = wrapper.sees_composites
        composites = below or torch.is_inference_mode_enabled()
        mode = BreakMode(self, wrapper.boundaries, wrapper.pool.device.tensor_type, composites)
        with ExitStack() as stack:
            stack.enter_context(capture_lock(f"verify {self.name}", self))
            stack.enter_context(wrapper.pool.device.around())
            if below:
                stack.enter_context(torch_ops.below_autograd())
            self._mode = mode
            mode.switch_on()
            stack.callback(mode.switch_off)
            return wrapper.runnable(*args, **kwargs)

    def on_splitting_op(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if in_full_mode():
            return op(*args, **kwargs)
        return self.run_eager(target_name(op), op, args, kwargs)

    def run_eager(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function unobserved, and copy its arguments as it leaves them."""
        self._mode.switch_off()
        self._in_break = True
        try:
            output = function(*args, **(kwargs or {}))
            self.arguments.append((name, copies(named_values((args, dict(kwargs or {}))))))
            return output
        finally:
            self._in_break = False
            self._mode.switch_on()


# ---------------------------------------------------------------- managers


def _check_managed(
    manager: Any, batches: Sequence[Any], kwargs: Any, tolerance: Tolerance
) -> Verification:
    """Compare batches of a manager, or calls of an encoder manager."""
    require(not kwargs, "kwargs", "verify", kwargs, "no names: batches or calls, for a manager")
    with manager.uncounted():
        if isinstance(manager, CudaGraphManager):
            return _check_manager(manager, batches, tolerance)
        return _check_encoder(manager, batches, tolerance)


def _check_manager(
    manager: CudaGraphManager, batches: Sequence[Batch], tolerance: Tolerance
) -> Verification:
    """Compare eager exact batches with the graphs that the dispatcher chooses."""
    valid = all(isinstance(batch, Batch) for batch in batches)
    require(valid, "args", "verify", batches, "batches, for a manager")
    compared: dict[bool, list[Difference | None]] = {False: [], True: []}  # by: is it padded
    missing = "" if batches else "there are no batches"
    kept = _KeptState(manager)
    for number, batch in enumerate(progress(batches, "verify: batches", "batch")):
        chosen = manager.dispatched(batch)
        if chosen.mode is CUDAGraphMode.NONE:
            missing = missing or f"batch {number} has no graph: {chosen.why}"
            continue
        with kept.restored_and_noted():
            expected = copied(manager.run(batch, valid_modes=()))
        replayed = _replay_batch(manager, batch, kept)
        if replayed is None:
            missing = missing or f"batch {number} has a graph and does not replay it"
            continue
        difference = tolerance.first("the result", expected, replayed)
        if difference is not None:
            with kept.restored():
                difference = _locate_in(manager, batch, number, difference, tolerance)
        compared[chosen.descriptor.num_tokens > batch.num_tokens].append(difference)
    checks = [
        Check(
            f"exact eager against {'padded' if is_padded else 'exact'} replay",
            len(results),
            len(results),
            str(tolerance),
            tuple(result for result in results if result is not None),
        )
        for is_padded, results in compared.items()
        if results
    ]
    if missing:
        checks.append(Check("batches without a replay", 0, 0, "-", (), missing))
    return Verification(f"{type(manager.model).__name__} in a manager", tuple(checks))


# Reasons of items that are beyond the planned graphs, or cheaper without one: no failures.
_BEYOND = frozenset(
    {Reason.OVERSIZE, Reason.TOO_MANY_FRAMES, Reason.UNLISTED_VARIANT, Reason.CHEAPER_EAGER}
)


def _check_encoder(
    manager: EncoderCudaGraphManager, calls: Sequence[Any], tolerance: Tolerance
) -> Verification:
    """Compare single items that run eager with groups of them on graphs."""
    valid = all(isinstance(call, Mapping) for call in calls)
    require(valid, "args", "verify", calls, "calls of the encoder, each a dict")
    statistics, replays, compared = manager.statistics, 0, 0
    missing, notes = "" if calls else "there are no calls", list[str]()
    findings: list[Difference] = []
    for number, call in enumerate(progress(calls, "verify: calls", "call")):
        eager = copied(manager.execute(dict(call), eager=True))
        reasons, before = statistics.reasons(), statistics.replays
        replayed = copied(manager.execute(dict(call)))
        after = statistics.replays - before
        without = Counter(statistics.reasons()) - Counter(reasons)
        if without:
            whys = ", ".join(f"{items} {reason.value}" for reason, items in without.items())
            notes.append(f"call {number} has items without a graph: {whys}")
            if not without.keys() <= _BEYOND:
                missing = missing or notes.pop()
        elif not after:
            missing = missing or f"call {number} has no items with tokens"
        replays, compared = replays + after, compared + bool(after)
        difference = tolerance.first("the result", eager, replayed)
        if difference is not None:
            findings.append(_of_encoder(manager, dict(call), difference, bool(after), number))
    if not replays and notes:
        missing, notes = missing or notes[0], notes[1:]
    name = "eager items against replayed budgets"
    bounds = str(tolerance)
    check = Check(name, compared, replays, bounds, tuple(findings), missing, notes=tuple(notes))
    return Verification(repr(manager).strip("<>").partition(":")[0], (check,))


def _of_encoder(
    manager: EncoderCudaGraphManager,
    call: dict[str, Any],
    difference: Difference,
    replayed: bool,
    number: int,
) -> Difference:
    """Return the difference of an item with its replay, the items that shared it, and causes."""
    item = re.match(r"\[(\d+)\]", difference.value)
    ran = [run for run in manager.plan(call) if item and int(item[1]) in run.items]
    places, shared, padded = list[str](), False, False
    grids = list(manager.model.grids(call)) if isinstance(manager.model, PatchEncoder) else []
    for run in ran:
        if run.budget is not None:
            items = [f"{i} {grids[i]}" if grids else str(i) for i in sorted(run.items)]
            path = on_path(run.path)
            places.append(f"in a replay of budget {run.budget}{path}: items {', '.join(items)}")
            shared, padded = shared or len(run.items) > 1, padded or run.padding > 0
    causes = [
        "tables or offsets= that do not count the rows of earlier items" * shared,
        "a table whose padding must be tail='positions', such as a permutation" * padded,
        "another item or padding reaches this one" * (shared or padded),
        "another item reaches this one, or the forward keeps state" * (not replayed),
        "an op has baked in a number" * replayed,
        "a weight was replaced that is not in tower=" * replayed,
    ]
    text = f"possible causes: {', or '.join(filter(None, causes))}"
    origin = Difference(piece=WHOLE, detail="; ".join([*places, text]))
    return located("replay" if replayed else "grouping", difference, None, origin, number)


class _KeptState:
    """The state of model and epilogue, such as caches, which is restored after each step."""

    def __init__(self, manager: CudaGraphManager) -> None:
        self._original = original_of(manager.model)
        module = getattr(self._original, "__self__", self._original)
        buffers = module.buffers() if isinstance(module, torch.nn.Module) else ()
        self._tensors = {id(buffer): buffer for buffer in buffers}
        beside = () if manager.epilogue is None else (manager.epilogue, manager.inputs.buffers)
        self._state = State(self._original, (beside, {}))

    @contextmanager
    def restored_and_noted(self) -> Iterator[None]:
        """Restore after an eager step, and note what its ops have written."""
        with restored_after([*self._tensors.values()], state=self._state) as snapshot:
            yield
            written = self._state.written(snapshot).values()
            self._tensors |= {id(tensor): tensor for tensor in written}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore after a step of any kind."""
        with restored_after([*self._tensors.values()]):
            try:
                yield
            finally:
                self._state.restore()


def _replay_batch(
    manager: CudaGraphManager, batch: Batch, kept: _KeptState
) -> dict[str, Any] | None:
    """Return the result of a replay, or None; a lazy manager replays from the third step on."""
    for _ in range(3):
        before = manager.counters.replays
        with kept.restored():
            result = copied(manager.run(batch))
        if manager.counters.replays > before:
            return result
    return None


def _locate_in(
    manager: CudaGraphManager,
    batch: Batch,
    number: int,
    difference: Difference,
    tolerance: Tolerance,
) -> Difference:
    """Return the difference with piece and op; with other ranks, without a further step."""
    if manager.agreement is None:
        watcher = Watcher(tolerance)
        with observed(handle_of(manager.model), watcher.of):
            manager.run(batch)
        if watcher.differences:
            return replace(watcher.differences[0][1], inputs=number)
    chosen, real = manager.dispatched(batch), batch.num_tokens
    is_full = chosen.mode is CUDAGraphMode.FULL
    in_pieces = not is_full and manager.agreement is None and handle_of(manager.model) is not None
    what = f"{chosen.mode.name} graph for {chosen.descriptor}, {real} rows are real"
    causes, piece = list[str](), WHOLE if is_full else ""
    if in_pieces:
        what += "; each piece equals its eager form"
    else:
        ops = _ops_inside(manager) if is_full else ""
        causes.append(f"an op inside has baked in a number or a list of the host{ops}")
    if chosen.descriptor.num_tokens > real:
        causes.append("padding reaches real rows")
    causes.append("a weight was replaced" + (", with checks='-weights'" if is_full else ""))
    origin = Difference(piece=piece, detail=f"{what}; possible causes: {', or '.join(causes)}")
    return located("replay", difference, real, origin, number)


def _ops_inside(manager: CudaGraphManager) -> str:
    """Return the splitting ops that FULL graphs of a manager hold, with a line of each, as text."""
    handle = handle_of(manager.model)
    pieces = [piece for graph in (handle.graphs if handle else ()) for piece in graph.split.pieces]
    ops = {why.detail: piece.where for piece in reversed(pieces) for why in piece.why}
    listed = [f"{op} at {where}" for op, where in reversed(ops.items())]
    return f" ({', '.join(listed)})" if listed else ""
