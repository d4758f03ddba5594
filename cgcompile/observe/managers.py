"""The checks of a manager's graphs."""

from collections.abc import Callable
from typing import Any

from cgcompile.backend import handle_of
from cgcompile.config import CUDAGraphMode
from cgcompile.errors import ManagerError
from cgcompile.graphs.verify import copies
from cgcompile.observe.comparing import Tolerance, named
from cgcompile.observe.locate import Place, finding_of, made
from cgcompile.observe.traces import Parting, Watcher
from cgcompile.observe.verification import Check, Finding, Verification
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.steps import Batch
from cgcompile.serving.verifying import replayed_step

CHECKS = ("exact eager against exact replay", "exact eager against padded replay")


def check_manager(
    manager: CudaGraphManager,
    batches: Any,
    sets: int,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Run batches plain and exact, and on the graph that the dispatcher chooses; compare.

    Graphs stay dispatched whatever is found; :func:`~cgcompile.serving.verifying.verify_full`
    refuses those that are wrong.

    Args:
        manager: with captured graphs, on one rank.
        batches: what to run, or a callable that makes a batch from its number.
        sets: how many such.
        rtol: relative tolerance; None: by dtype.
        atol: absolute tolerance.

    Raises:
        BaseException: what a step raised.
    """
    tolerance = Tolerance(False, rtol, atol)
    make: Callable[[int], Batch] | None = batches if callable(batches) else None
    given = list(batches) if make is None else [make(number) for number in range(sets)]
    compared: dict[str, list[Finding | None]] = {name: [] for name in CHECKS}
    missing = "" if given else "there are no batches"
    for number, batch in enumerate(given):
        chosen = manager.dispatched(batch)
        if chosen.mode is CUDAGraphMode.NONE:
            missing = missing or f"batch {number} has no graph: {chosen.why}"
            continue
        name = CHECKS[chosen.descriptor.num_tokens > batch.num_tokens]
        try:
            compared[name].append(_compare(manager, batch, number, tolerance))
        except ManagerError as error:
            missing = missing or str(error).splitlines()[0]
    checks = [
        Check(name, len(all_), len(all_), str(tolerance), tuple(f for f in all_ if f is not None))
        for name, all_ in compared.items()
        if all_
    ]
    if missing:
        checks.append(Check("batches without a replay", 0, 0, "-", (), missing))
    subject = f"{type(manager.model).__name__} in a manager"
    return Verification(subject, tuple(checks))


def _compare(
    manager: CudaGraphManager, batch: Batch, number: int, tolerance: Tolerance
) -> Finding | None:
    plain = copies(named(manager.run(batch, valid_modes=())))
    found = copies(named(replayed_step(manager, batch, number)))
    difference = tolerance.first("the result", plain, found)
    if difference is None:
        return None
    parting = _parting(manager, batch, tolerance)
    if parting is not None:
        return finding_of(parting, number)
    return made("replay", number, difference, batch.num_tokens, _place(manager, batch))


def _place(manager: CudaGraphManager, batch: Batch) -> Place:
    chosen = manager.dispatched(batch)
    what = f"{chosen.mode.name} graph for {chosen.descriptor}, {batch.num_tokens} rows are real"
    if chosen.descriptor.num_tokens > batch.num_tokens and chosen.mode is CUDAGraphMode.PIECEWISE:
        return Place(
            detail=f"{what}; each piece does what it does eager: padding reaches real rows"
        )
    return Place(detail=f"{what}; an op inside has frozen a number, or padding reaches real rows")


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
