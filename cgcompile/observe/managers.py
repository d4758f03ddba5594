"""The checks of a manager's graphs."""

import logging
from collections.abc import Callable
from typing import Any

from cgcompile.backend import handle_of
from cgcompile.config import CUDAGraphMode
from cgcompile.observe.comparing import Difference, Tolerance, named
from cgcompile.observe.locate import finding_of, made
from cgcompile.observe.restore import copies
from cgcompile.observe.traces import Parting, Watcher
from cgcompile.observe.verification import Check, Verification
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.steps import Batch

log = logging.getLogger(__name__)

CHECKS = ("exact eager against exact replay", "exact eager against padded replay")


def check_manager(
    manager: CudaGraphManager,
    batches: Any,
    sets: int,
    rtol: float | None = None,
    atol: float | None = None,
    refuse: bool = False,
) -> Verification:
    """Run batches plain and exact, and on the graph that the dispatcher chooses; compare.

    Args:
        manager: with captured graphs. With an agreement all ranks call this, with as many batches
            that go the same ways.
        batches: what to run, or a callable that makes a batch from its number.
        sets: how many such.
        rtol: relative tolerance; None: by dtype.
        atol: absolute tolerance.
        refuse: dispatch no FULL graph any more if one of them differs, on any rank.

    Raises:
        BaseException: what a step raised.
    """
    tolerance = Tolerance(False, rtol, atol)
    make: Callable[[int], Batch] | None = batches if callable(batches) else None
    given = list(batches) if make is None else [make(number) for number in range(sets)]
    compared: dict[str, list[Difference | None]] = {name: [] for name in CHECKS}
    missing = "" if given else "there are no batches"
    wrong: list[str] = []
    for number, batch in enumerate(given):
        chosen = manager.dispatched(batch)
        if chosen.mode is CUDAGraphMode.NONE:
            missing = missing or f"batch {number} has no graph: {chosen.why}"
            continue
        plain = copies(named(manager.run(batch, valid_modes=())))
        replayed = _replayed(manager, batch)
        if replayed is None:
            missing = missing or f"batch {number} has a graph and does not replay it"
            continue
        name = CHECKS[chosen.descriptor.num_tokens > batch.num_tokens]
        difference = tolerance.first("the result", plain, replayed)
        if difference is not None:
            difference = _located(manager, batch, number, difference, tolerance)
            if chosen.mode is CUDAGraphMode.FULL:
                wrong.append(f"FULL, {chosen.descriptor}: {difference.detail}")
        compared[name].append(difference)
    if refuse:
        _refuse_full(manager, wrong)
    checks = [
        Check(name, len(all_), len(all_), str(tolerance), tuple(f for f in all_ if f is not None))
        for name, all_ in compared.items()
        if all_
    ]
    if missing:
        checks.append(Check("batches without a replay", 0, 0, "-", (), missing))
    subject = f"{type(manager.model).__name__} in a manager"
    return Verification(subject, tuple(checks))


def _replayed(manager: CudaGraphManager, batch: Batch) -> dict[str, Any] | None:
    """Return the result of a replay, or None; a lazy manager replays from the third step on."""
    for _ in range(3):
        before = manager.counters.replays
        result = manager.run(batch)
        if manager.counters.replays > before:
            return copies(named(result))
    return None


def _located(
    manager: CudaGraphManager,
    batch: Batch,
    number: int,
    difference: Difference,
    tolerance: Tolerance,
) -> Difference:
    """Return the difference with piece and op; with other ranks, without a further step."""
    parting = None if manager.agreement is not None else _parting(manager, batch, tolerance)
    if parting is not None:
        return finding_of(parting, number)
    return made("replay", number, difference, batch.num_tokens, _place(manager, batch))


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


def _place(manager: CudaGraphManager, batch: Batch) -> Difference:
    chosen = manager.dispatched(batch)
    what = f"{chosen.mode.name} graph for {chosen.descriptor}, {batch.num_tokens} rows are real"
    if chosen.descriptor.num_tokens > batch.num_tokens and chosen.mode is CUDAGraphMode.PIECEWISE:
        return Difference(
            detail=f"{what}; each piece does what it does eager: padding reaches real rows"
        )
    return Difference(
        detail=f"{what}; an op inside has frozen a number, or padding reaches real rows"
    )


def _parting(manager: CudaGraphManager, batch: Batch, tolerance: Tolerance) -> Parting | None:
    """Where the pieces of a compiled model part from their plain forms on the padded batch."""
    watcher = Watcher(tolerance)
    handle = handle_of(manager.model)
    graphs = () if handle is None else handle.graphs
    try:
        for number, graph in enumerate(graphs):
            graph.observe(watcher.of(number))
        manager.run(batch)
    finally:
        for graph in graphs:
            graph.observe(None)
    return watcher.partings[0] if watcher.partings else None
