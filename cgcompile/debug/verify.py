"""Whether graphs give what the eager model gives: :func:`verify`.

Each check runs the same inputs in two ways and compares what comes out and what is written. Where
they differ, the step runs again piece by piece, in all ways, to find the op: see ``locate.py``; a
wrapper has no pieces, so its eager breaks are compared: :func:`wrapper_difference`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.backend import handle_of
from cgcompile.boundaries import SplittingOp, target_name
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import BatchDescriptor, callers_context, in_full_mode, set_forward_context
from cgcompile.debug.compare import (
    Call,
    Difference,
    InputSets,
    Tolerance,
    copied,
    named_values,
    padded,
    require_comparison,
    rows_of,
    uncompared,
    without_gradients,
)
from cgcompile.debug.locate import Watcher, located, padding_place, real_part
from cgcompile.debug.output import Page, table
from cgcompile.debug.restore import State, buffers_of, copies, restored_after
from cgcompile.debug.subject import Subject, observed, tolerance_of
from cgcompile.errors import CGCompileError, DispatchError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.breaks import Breaker, BreakMode
from cgcompile.graphs.capture import capture_lock
from cgcompile.graphs.sequence import EagerSegment
from cgcompile.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgcompile.serving.batch import Batch
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.settings import checked_but, require, sizes_given


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
        uncompared: what of the results was not compared: objects without fields and without an
            ``==`` of their own, such as functions.
    """

    name: str
    compared: int
    replays: int
    tolerance: str
    findings: tuple[Difference, ...] = ()
    missing: str = ""
    uncompared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was replayed, all of it, and nothing differs."""
        return bool(self.replays) and not self.missing and not self.findings


@dataclass(frozen=True)
class Verification(Page):
    """What :func:`cgcompile.verify` found; ``print`` it.

    Attributes:
        subject: what was looked at.
        checks: each comparison.
    """

    template: ClassVar[str] = "verification"
    computed: ClassVar[tuple[str, ...]] = ("ok",)

    subject: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether each check replayed something and found nothing."""
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
        rows = table(cells)
        verdict = "ok" if self.ok else "not ok"
        value = [str(each) for each in self.differences]
        unsaid = dict.fromkeys(name for check in self.checks for name in check.uncompared)
        rows += [f"not compared: {', '.join(unsaid)}"] if unsaid else []
        return "\n".join([f"{self.subject}: {verdict}", *rows, *value])


def _result(check: Check) -> str:
    if check.findings:
        return f"{len(check.findings)} differ"
    if not check.replays:
        return f"nothing was replayed: {check.missing}"
    return check.missing or "equal"


log = logging.getLogger(__name__)


def wrapper_place(
    wrapper: CUDAGraphWrapper, call: Call, tolerance: Tolerance, kept: Sequence[torch.Tensor]
) -> Difference:
    """Return the first eager break whose arguments differ, or the result; restores all tensors."""
    context = callers_context()
    descriptor = None if context is None else context.batch_descriptor
    mode = wrapper.runtime_mode if context is None else context.cudagraph_runtime_mode
    if descriptor is None or wrapper.entry_of(mode, descriptor) is None:
        return Difference(detail="no graph serves the step")
    try:
        with without_gradients(), restored_after([*compat.tree_tensors(call), *kept]):
            difference = _wrapper_difference(wrapper, *call, tolerance)
    except CGCompileError as error:
        return Difference(detail=str(error).splitlines()[0])
    if difference is None:
        return Difference()
    is_result = difference.piece == "the result"  # whose difference is known
    detail = "" if is_result else f"{difference.value}: {difference.detail}"
    return Difference(piece=difference.piece, detail=detail)


def wrapper_difference(
    wrapper: CUDAGraphWrapper,
    *args: Any,
    rtol: float = 0.0,
    atol: float = 0.0,
    **kwargs: Any,
) -> Difference | None:
    """Replay a step of a wrapper and run it plain, on the same inputs; compare every break.

    The arguments of each eager break are compared as it leaves them, tensors and plain values, and
    what comes out in the end. Of dataclasses and plain objects what is in them is compared; what
    has no fields and no ``==`` of its own is not, with a line in the log. What the plain step
    changes is restored before the replay: tensors among the arguments, and tensors, attributes and
    containers that the model leads to, weights included. What is written elsewhere, such as a
    global or a cache that the forward context leads to, is written twice. Of a model with compiled
    code all tensors are copied, as its writes are not seen; else those that are written, the
    arguments and the buffers. Synchronises.
    """
    return _wrapper_difference(wrapper, args, kwargs, Tolerance(False, rtol, atol))


def _wrapper_difference(
    wrapper: CUDAGraphWrapper, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: Tolerance
) -> Difference | None:
    entry = _entry(wrapper)
    entry.check(args, kwargs, wrapper.name)
    state = State.of(wrapper.unwrap(), (args, kwargs))
    opaque = compat.holds_compiled_code(wrapper.unwrap())
    unseen = state.tensors if opaque else buffers_of(wrapper.unwrap())
    breaks = [each for each in entry.sequence.segments if isinstance(each, EagerSegment)]
    with restored_after([*compat.tree_tensors((args, kwargs)), *unseen], state=state):
        watcher = _Watcher(wrapper)
        plain = copies(named_values(watcher.run(args, kwargs)))
    names = [name for name, _ in watcher.seen]
    replayed: list[dict[str, Any]] = []

    def observe(index: int, step: Callable[[], Any]) -> None:
        step()
        segment = entry.sequence.segments[index]
        if isinstance(segment, EagerSegment):
            replayed.append(copies(named_values((segment.args, dict(segment.kwargs)))))

    wrapper.replay_entry(entry, (args, kwargs), observe)
    if names != [each.name for each in breaks]:
        raise DispatchError.other_breaks(
            what=wrapper.name, now=names, before=[each.name for each in breaks]
        )
    for index, (name, inputs) in enumerate(watcher.seen):
        value = tolerance.first(f"break {index} ({name})", inputs, replayed[index])
        if value is not None:
            return value
    output = copies(named_values(entry.output))
    for name in uncompared(plain, output):
        log.warning("%s: %s of the result is not compared", wrapper.name, name)
    return tolerance.first("the result", plain, output)


def _entry(wrapper: CUDAGraphWrapper) -> CUDAGraphEntry:
    """Return what serves the step of the forward context."""
    context = callers_context()
    if context is None or context.batch_descriptor is None:
        raise DispatchError.nothing_verified(why="no forward context with a batch descriptor")
    mode, descriptor = context.cudagraph_runtime_mode, context.batch_descriptor
    result = wrapper.entry_of(mode, descriptor)
    if result is None:
        detail = f"{wrapper.name} has nothing for {mode.name}, {descriptor}"
        raise DispatchError.nothing_verified(why=detail)
    return result


class _Watcher(Breaker):
    """Runs a step plain and notes what its breaks are given."""

    def __init__(self, wrapper: CUDAGraphWrapper) -> None:
        self.name = wrapper.name
        self.seen: list[tuple[str, dict[str, Any]]] = []
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
                stack.enter_context(compat.below_autograd())
            self._mode = mode
            mode.switch_on()
            stack.callback(mode.switch_off)
            return wrapper.runnable(*args, **kwargs)

    def meet(
        self, entry: SplittingOp, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See :class:`~cgcompile.graphs.breaks.Breaker`."""
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
        """Call the function with all watching off, and note how it leaves its arguments."""
        self._mode.switch_off()
        self._in_break = True
        try:
            output = function(*args, **(kwargs or {}))
            self.seen.append((name, copies(named_values((args, dict(kwargs or {}))))))
            return output
        finally:
            self._in_break = False
            self._mode.switch_on()


CHECKS = ("exact eager against exact replay", "exact eager against padded replay")


def check_manager(
    manager: CudaGraphManager, batches: Any, sets: int, tolerance: Tolerance, refuse: bool
) -> Verification:
    """Run batches plain and exact, and on the graph that the dispatcher chooses; compare."""
    compared: dict[str, list[Difference | None]] = {name: [] for name in CHECKS}
    batches = [batches(number) for number in range(sets)] if callable(batches) else list(batches)
    missing = "" if batches else "there are no batches"
    wrong: list[str] = []
    for number, batch in enumerate(batches):
        chosen = manager.dispatched(batch)
        if chosen.mode is CUDAGraphMode.NONE:
            missing = missing or f"batch {number} has no graph: {chosen.why}"
            continue
        expected = copied(manager.run(batch, valid_modes=()))
        replayed = _replayed(manager, batch)
        if replayed is None:
            missing = missing or f"batch {number} has a graph and does not replay it"
            continue
        name = CHECKS[chosen.descriptor.num_tokens > batch.num_tokens]
        difference = tolerance.first("the result", expected, replayed)
        if difference is not None:
            difference = _located(manager, batch, number, difference, tolerance)
            if chosen.mode is CUDAGraphMode.FULL:
                wrong.append(f"FULL, {chosen.descriptor}: {difference.detail}")
        compared[name].append(difference)
    if refuse:
        _refuse_full(manager, wrong)
    checks = [
        Check(name, len(sets_), len(sets_), str(tolerance), tuple(d for d in sets_ if d))
        for name, sets_ in compared.items()
        if sets_
    ]
    if missing:
        checks.append(Check("batches without a replay", 0, 0, "-", (), missing))
    return Verification(f"{type(manager.model).__name__} in a manager", tuple(checks))


def _replayed(manager: CudaGraphManager, batch: Batch) -> dict[str, Any] | None:
    """Return the result of a replay, or None; a lazy manager replays from the third step on."""
    for _ in range(3):
        before = manager.counters.replays
        result = manager.run(batch)
        if manager.counters.replays > before:
            return copied(result)
    return None


def _located(
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
    cause = "an op inside has frozen a number, or padding reaches real rows"
    if chosen.descriptor.num_tokens > real and chosen.mode is CUDAGraphMode.PIECEWISE:
        cause = "each piece does what it does eager: padding reaches real rows"
    what = f"{chosen.mode.name} graph for {chosen.descriptor}, {real} rows are real"
    return located("replay", difference, real, Difference(detail=f"{what}; {cause}"), number)


def _refuse_full(manager: CudaGraphManager, wrong: list[str]) -> None:
    """Dispatch no FULL graph any more if one is wrong, on this rank or another."""
    agreement = manager.agreement
    if not (wrong if agreement is None else agreement.largest(len(wrong))):
        return
    detail = wrong[0] if wrong else "it differs on another rank"
    log.warning("no FULL graphs any more: %s", detail)
    for mode, descriptor in manager.dispatcher.plan():
        if mode is CUDAGraphMode.FULL:
            manager.dispatcher.refused(mode, descriptor, detail)


TAILS = ("random", "nan")


@checked_but("sets", "padded_sizes")
def verify(
    model: Any,
    inputs: Any,
    *,
    config: CompilationConfig | None = None,
    sets: int = 3,
    padded_sizes: Sequence[int] | str = (),
    tails: str = "random",
    breakable: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    refuse: bool = False,
) -> Verification:
    """Run a model eager and replayed on several sets of inputs, and compare.

    Results are compared, and what is written of arguments and of the tensors that the model holds,
    which is restored after each run. What ops write elsewhere, such as a global or a cache that the
    forward context leads to, is written each time, and attributes that are no tensors change as by
    any call. Runs without gradients. Warms up and captures what is not captured yet. Synchronises.

    Args:
        model: what ``torch.compile`` or ``cgcompile.compile`` returned for the backend; a
            ``CUDAGraphWrapper`` or ``BreakableCUDAGraphWrapper``, in the forward context of the
            step; a ``CudaGraphManager`` with its graphs; or a plain module or function, which is
            compiled for the time being.
        inputs: a tensor, a sequence of positional arguments or a mapping of keyword arguments,
            whose tensors are filled with other random numbers for each set after the first; or a
            callable that makes one of these from the number of the set. Of a manager: batches, or
            a callable that makes one.
        config: with which a plain model is compiled; left out: the defaults, on a CPU recorded.
        sets: how many sets of inputs, at least 1; of a manager with given batches, all of those.
        padded_sizes: sizes of the batch, its first dimension, to which inputs are padded, as
            numbers or as text ``"8,16"``: a replay of that size must give the real rows that eager
            gives for the exact size. Without a forward context alone.
        tails: what padded rows hold: ``"random"`` (integers in the real range) or ``"nan"``.
        breakable: compare the model with a breakable capture of the eager one as well.
        rtol: relative tolerance; 0 with ``atol`` 0 for bitwise. Left out: bitwise where graphs hold
            eager's kernels (host device, pieces that are not compiled), else by dtype.
        atol: absolute tolerance.
        seed: of the random numbers.
        refuse: of a manager: dispatch no FULL graph any more if one differs, on any rank.

    Returns:
        What was compared and what differs; not ``ok`` where nothing was replayed.

    Raises:
        ConfigError: settings for a model that has its own, no model, or an impossible argument.
        BaseException: what the model raised.
    """
    is_manager = isinstance(model, CudaGraphManager)
    require(tails in TAILS, "tails", "verify", tails, "one of " + ", ".join(TAILS))
    expected = "False: only a manager dispatches"
    require(is_manager or not refuse, "refuse", "verify", refuse, expected)
    require_comparison("verify", sets, rtol, atol, seed)
    sizes = sizes_given("padded_sizes", "verify", padded_sizes)
    if is_manager:
        return check_manager(model, inputs, sets, Tolerance(False, rtol, atol), refuse)
    subject = Subject(model, config)
    try:
        sets_ = InputSets(inputs, seed)
        tolerance = tolerance_of(subject, sets_.first, rtol, atol)
        looser = Tolerance(False, rtol, atol)  # another size, another kernel
        with restored_after(sets_.tensors):
            checks = [_replays(subject, sets_, sets, tolerance)]
        for size in sizes:
            with restored_after(sets_.tensors):
                checks.append(_padded(subject, sets_, sets, size, tails, looser, seed))
        if breakable:
            with restored_after(sets_.tensors):
                checks.append(_breakable(subject, sets_, sets, tolerance))
        return Verification(subject.name, tuple(checks))
    finally:
        subject.release()


# ---------------------------------------------------------------- eager against replay


class Outcome(NamedTuple):
    """Of one set of inputs: replays, why there are fewer, the difference, what is not compared."""

    replays: int
    missing: str = ""
    finding: Difference | None = None
    uncompared: tuple[str, ...] = ()


def _check(name: str, sets: int, tolerance: Tolerance, compare: Callable[[int], Outcome]) -> Check:
    """Compare each set of inputs; stop where the first one does not replay."""
    outcomes: list[Outcome] = []
    for number in range(sets):
        outcomes.append(compare(number))
        if outcomes[-1].missing and not any(outcome.replays for outcome in outcomes):
            break  # the others would not replay either
    return Check(
        name,
        compared=sum(bool(outcome.replays) for outcome in outcomes),
        replays=sum(outcome.replays for outcome in outcomes),
        tolerance=str(tolerance),
        findings=tuple(o.finding for o in outcomes if o.finding is not None),
        missing=next((outcome.missing for outcome in outcomes if outcome.missing), ""),
        uncompared=tuple(dict.fromkeys(name for o in outcomes for name in o.uncompared)),
    )


def _replays(subject: Subject, inputs: InputSets, sets: int, tolerance: Tolerance) -> Check:
    def compare(number: int) -> Outcome:
        call = inputs.fill(number)
        missing = subject.until_replayed(call) if number == 0 else ""
        if missing:
            return Outcome(0, missing)
        expected = subject.outcome(subject.original, call)
        before = subject.counters.replays
        actual = subject.outcome(subject.call, call)
        replays = subject.counters.replays - before
        if not replays:  # of another layout than the first set
            missing = subject.until_replayed(call)
            actual = subject.outcome(subject.call, call)
            replays = int(not missing)
        difference = _of_real_rows(tolerance, expected, actual)
        if difference is None or not replays:
            uncompared, blind = subject.uncompared(call, expected, actual)
            return Outcome(replays, missing or blind, None, uncompared)
        finding = _verify_located(subject, call, number, difference, tolerance)
        return Outcome(replays, missing, finding)

    return _check("eager against replay", sets, tolerance, compare)


def _verify_located(
    subject: Subject, call: Call, number: int, difference: Difference, tolerance: Tolerance
) -> Difference:
    """Return where the graphs of a call part from its plain pieces, if they do."""
    if subject.wrapper is not None:
        place = wrapper_place(subject.wrapper, call, tolerance, subject.kept)
        return located("replay", difference, real_rows(), place, number)
    watcher = Watcher(tolerance)
    with subject.observed(watcher.of):
        subject.outcome(subject.call, call)
    if watcher.differences:
        return replace(watcher.differences[0][1], inputs=number)
    detail = (
        "the uncompiled pieces give it as well: a pass or the trace; cgcompile.debug.bisect tells"
    )
    return located("tracing", difference, real_rows(), Difference(detail=detail), number)


def _of_real_rows(
    tolerance: Tolerance, expected: dict[str, Any], value: dict[str, Any]
) -> Difference | None:
    """Return the first difference, with its padding rows; None if only padding rows differ."""
    context, real = callers_context(), real_rows()
    batch = None if context is None else context.batch_descriptor
    if real is not None and batch is not None:
        cut = [
            {n: _first_rows(v, batch.num_tokens, real) for n, v in values.items()}
            for values in (expected, value)
        ]
        if tolerance.first("the result", *cut) is None:
            return None
    return tolerance.first("the result", expected, value)


def _first_rows(value: Any, size: int, real: int) -> Any:
    is_batch = isinstance(value, torch.Tensor) and value.dim() and len(value) == size
    return value[:real] if is_batch else value


def real_rows() -> int | None:
    """Return how many rows are real by the forward context; None if it does not tell."""
    context = callers_context()
    return None if context is None else context.num_unpadded_tokens


# ---------------------------------------------------------------- padded against exact


def _padded(
    subject: Subject,
    inputs: InputSets,
    sets: int,
    size: int,
    tails: str,
    tolerance: Tolerance,
    seed: int,
) -> Check:
    name = f"padded to {size} against exact"
    real = rows_of(inputs.first)
    if callers_context() is not None or subject.wrapper is not None:
        why = "a forward context says what is padded: write the tails there, and verify that step"
        return Check(name, 0, 0, str(tolerance), (), why)
    if not 0 < real < size:
        return Check(name, 0, 0, str(tolerance), (), f"the batch has {real} rows, not fewer")

    def compare(number: int) -> Outcome:
        call = inputs.fill(number)
        generator = torch.Generator().manual_seed(seed + 1000 + number)
        larger = padded(call, size, tails, generator)
        missing = subject.until_replayed(larger)
        if missing:
            return Outcome(0, missing)
        expected = subject.outcome(subject.original, call)
        before = subject.counters.replays
        actual = subject.outcome(subject.call, larger)
        replays = subject.counters.replays - before
        pairs = [(n, value) for n, value in expected.items() if n in actual]
        cut = {n: real_part(actual[n], value, real) for n, value in pairs}
        difference = tolerance.first("the result", expected, cut)
        if difference is None:
            uncompared, blind = subject.uncompared(call, expected, cut)
            return Outcome(replays, blind, None, uncompared)
        missing = subject.until_replayed(call)
        place = (
            padding_place(subject, call, larger, real, tolerance) if not missing else Difference()
        )
        detail = place.detail or "a replay of the exact size could not be had"
        place = replace(place, detail=f"real rows depend on padding, {detail}")
        return Outcome(replays, "", located("padding", difference, real, place, number))

    return _check(name, sets, tolerance, compare)


# ---------------------------------------------------------------- against breakable capture


def _breakable(subject: Subject, inputs: InputSets, sets: int, tolerance: Tolerance) -> Check:
    name = "replay against breakable"
    settings = {n: getattr(subject.config, n) for n in ("capture_device", "splitting_ops")}
    settings["builtin_splitting_ops"] = subject.config.builtin_splitting_ops
    wrapper = BreakableCUDAGraphWrapper(
        subject.original, CompilationConfig(**settings), CUDAGraphMode.PIECEWISE
    )

    def compare(number: int) -> Outcome:
        call = inputs.fill(number)
        missing = subject.until_replayed(call)
        if missing:
            return Outcome(0, missing)
        value = subject.outcome(subject.call, call)
        before = wrapper.counters.replays
        try:
            with _in_piecewise(call):
                for _ in range(2 if number == 0 else 1):
                    other = subject.outcome(wrapper, call)
        except CGCompileError as error:
            return Outcome(0, str(error).splitlines()[0])
        replays = wrapper.counters.replays - before
        why = "" if replays else f"breakable: {wrapper.counters}"
        difference = tolerance.first("the result", value, other)
        if difference is None or not replays:
            uncompared, blind = subject.uncompared(call, value, other)
            return Outcome(replays, why or blind, None, uncompared)
        with _in_piecewise(call):
            place = wrapper_place(wrapper, call, tolerance, subject.kept)
        return Outcome(replays, why, located("breakable", difference, real_rows(), place, number))

    try:
        return _check(name, sets, tolerance, compare)
    finally:
        wrapper.clear_all_graphs()


@contextmanager
def _in_piecewise(call: Call) -> Iterator[None]:
    """The caller's forward context, or a new one, in mode PIECEWISE."""
    context = callers_context()
    inputs: dict[str, Any] = {}
    batch = BatchDescriptor(max(rows_of(call), 1))
    if context is not None:
        names = ("attn_metadata", "num_tokens", "num_unpadded_tokens", "num_tokens_across_dp")
        inputs = {n: getattr(context, n) for n in (*names, "slot_mapping", "inputs_ready")}
        inputs |= context.additional
        batch = context.batch_descriptor or batch
    with set_forward_context(
        **inputs, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=batch
    ):
        yield
