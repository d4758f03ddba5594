"""Whether graphs give what the eager model gives: :func:`verify`.

Each check runs the same inputs in two ways and compares what comes out and what is written. Where
they differ, the step is run once more, piece by piece, in all ways: see ``traces.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import CGCompileError
from cgcompile.forward_context import BatchDescriptor, callers_context, set_forward_context
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.observe.comparing import Difference, Tolerance
from cgcompile.observe.inputs import Call, InputSets, padded, require_comparison, rows_of
from cgcompile.observe.locate import finding_of, made
from cgcompile.observe.managers import check_manager
from cgcompile.observe.padding import padding_place
from cgcompile.observe.restore import put_back
from cgcompile.observe.subject import Subject, tolerance_of
from cgcompile.observe.traces import Watcher
from cgcompile.observe.verification import Check, Verification
from cgcompile.observe.wrappers import wrapper_place
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.settings import checked_but, require, sizes_given

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
    which is put back after each run. What ops write elsewhere, such as a global or a cache that the
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
        return check_manager(model, inputs, sets, rtol, atol, refuse)
    subject = Subject(model, config)
    try:
        sets_ = InputSets(inputs, seed)
        tolerance = tolerance_of(subject, sets_.first, rtol, atol)
        looser = Tolerance(False, rtol, atol)  # another size, another kernel
        with put_back(sets_.tensors):
            checks = [_replays(subject, sets_, sets, tolerance)]
        for size in sizes:
            with put_back(sets_.tensors):
                checks.append(_padded(subject, sets_, sets, size, tails, looser, seed))
        if breakable:
            with put_back(sets_.tensors):
                checks.append(_breakable(subject, sets_, sets, tolerance))
        return Verification(subject.name, tuple(checks))
    finally:
        subject.release()


# ---------------------------------------------------------------- eager against replay


def _replays(subject: Subject, inputs: InputSets, sets: int, tolerance: Tolerance) -> Check:
    def compare(number: int) -> Outcome:
        call = inputs.fill(number)
        missing = subject.until_replayed(call) if number == 0 else ""
        if missing:
            return Outcome(0, missing)
        expected = subject.outcome(subject.original, call)
        before = subject.counters.replays
        found = subject.outcome(subject.call, call)
        replays = subject.counters.replays - before
        if not replays:  # of another layout than the first set
            missing = subject.until_replayed(call)
            found = subject.outcome(subject.call, call)
            replays = int(not missing)
        difference = _of_real_rows(tolerance, expected, found)
        if difference is None or not replays:
            return _equal(subject, call, replays, missing, expected, found)
        finding = _located(subject, call, number, difference, tolerance)
        return Outcome(replays, missing, finding)

    return _check("eager against replay", sets, tolerance, compare)


class Outcome(NamedTuple):
    """Of one set of inputs: replays, why there are fewer, the difference, what is not compared."""

    replays: int
    missing: str = ""
    finding: Difference | None = None
    uncompared: tuple[str, ...] = ()


def _equal(
    subject: Subject,
    call: Call,
    replays: int,
    missing: str,
    plain: dict[str, Any],
    found: dict[str, Any],
) -> Outcome:
    """Of two runs that do not differ."""
    uncompared, blind = subject.uncompared(call, plain, found)
    return Outcome(replays, missing or blind, None, uncompared)


def _check(name: str, sets: int, tolerance: Tolerance, compare: Callable[[int], Outcome]) -> Check:
    replays, compared, missing = 0, 0, ""
    uncompared: dict[str, None] = {}
    findings: list[Difference] = []
    for number in range(sets):
        more, why, finding, unsaid = compare(number)
        replays += more
        compared += bool(more)
        missing = missing or why
        uncompared |= dict.fromkeys(unsaid)
        findings += [] if finding is None else [finding]
        if why and not replays:
            break  # the others would not replay either
    text, found = str(tolerance), tuple(findings)
    return Check(name, compared, replays, text, found, missing, tuple(uncompared))


def _located(
    subject: Subject, call: Call, number: int, difference: Difference, tolerance: Tolerance
) -> Difference:
    """Where the graphs of a call part from its plain pieces, if they do."""
    if subject.wrapper is not None:
        place = wrapper_place(subject.wrapper, call, tolerance, subject.kept)
        return made("replay", number, difference, real_rows(), place)
    watcher = Watcher(tolerance)
    with subject.observed(watcher.of):
        subject.outcome(subject.call, call)
    for parting in watcher.partings:
        return finding_of(parting, number)
    detail = "the uncompiled pieces give it as well: a pass or the trace; cgcompile.bisect tells"
    return made("tracing", number, difference, real_rows(), Difference(detail=detail))


def _of_real_rows(
    tolerance: Tolerance, expected: dict[str, Any], found: dict[str, Any]
) -> Difference | None:
    """Return the first difference, with its padding rows; None if only padding rows differ."""
    context, real = callers_context(), real_rows()
    batch = None if context is None else context.batch_descriptor
    if real is not None and batch is not None:
        cut = [
            {n: _first_rows(v, batch.num_tokens, real) for n, v in values.items()}
            for values in (expected, found)
        ]
        if tolerance.first("the result", *cut) is None:
            return None
    return tolerance.first("the result", expected, found)


def _first_rows(value: Any, size: int, real: int) -> Any:
    is_batch = isinstance(value, torch.Tensor) and value.dim() and len(value) == size
    return value[:real] if is_batch else value


def real_rows() -> int | None:
    """How many rows the forward context says are real; None if it does not."""
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
        found = subject.outcome(subject.call, larger)
        replays = subject.counters.replays - before
        pairs = [(n, value) for n, value in expected.items() if n in found]
        cut = {n: real_part(found[n], value, size) for n, value in pairs}
        difference = tolerance.first("the result", expected, cut)
        if difference is None:
            return _equal(subject, call, replays, "", expected, cut)
        missing = subject.until_replayed(call)
        place = (
            padding_place(subject, call, larger, real, tolerance) if not missing else Difference()
        )
        detail = place.detail or "a replay of the exact size could not be had"
        place = replace(place, detail=f"real rows depend on padding, {detail}")
        return Outcome(replays, "", made("padding", number, difference, real, place))

    return _check(name, sets, tolerance, compare)


def real_part(found: Any, exact: Any, size: int) -> Any:
    """The rows of a padded value that an exact one has, in any dimension; else as it is."""
    both = isinstance(found, torch.Tensor) and isinstance(exact, torch.Tensor)
    if not both or exact.dim() != found.dim():
        return found
    for dim, (more, fewer) in enumerate(zip(found.shape, exact.shape, strict=True)):
        if fewer < more == size:
            found = found.narrow(dim, 0, fewer)
    return found


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
        found = subject.outcome(subject.call, call)
        before = wrapper.counters.replays
        try:
            with _in_piecewise(call):
                for _ in range(2 if number == 0 else 1):
                    other = subject.outcome(wrapper, call)
        except CGCompileError as error:
            return Outcome(0, str(error).splitlines()[0])
        replays = wrapper.counters.replays - before
        why = "" if replays else f"breakable: {wrapper.counters}"
        difference = tolerance.first("the result", found, other)
        if difference is None or not replays:
            return _equal(subject, call, replays, why, found, other)
        with _in_piecewise(call):
            place = wrapper_place(wrapper, call, tolerance, subject.kept)
        return Outcome(replays, why, made("breakable", number, difference, real_rows(), place))

    try:
        return _check(name, sets, tolerance, compare)
    finally:
        wrapper.clear_all_graphs()


@contextmanager
def _in_piecewise(call: Call) -> Iterator[None]:
    """The caller's forward context, or a new one, in mode PIECEWISE."""
    context = callers_context()
    given: dict[str, Any] = {}
    batch = BatchDescriptor(max(rows_of(call), 1))
    if context is not None:
        names = ("attn_metadata", "num_tokens", "num_unpadded_tokens", "num_tokens_across_dp")
        given = {n: getattr(context, n) for n in (*names, "slot_mapping", "inputs_ready")}
        given |= context.additional
        batch = context.batch_descriptor or batch
    with set_forward_context(
        **given, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, batch_descriptor=batch
    ):
        yield
