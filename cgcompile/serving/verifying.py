"""Whether FULL graphs hold at other layouts than that of their capture: :func:`verify_full`.

An attention op may say that it goes into any FULL graph and still read a number on the host: the
longest sequence, a plan for so many blocks. The graph repeats that number for ever, and longer
sequences are cut without a word. Nothing but running both ways shows it.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.graphs.copies import comparable
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.serving.steps import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unequal:
    """A batch whose FULL graph gives something else than the plain step.

    Attributes:
        descriptor: of the graph.
        batch: which one of those that were given.
        row: the first row that differs.
        largest: the largest absolute difference.
    """

    descriptor: BatchDescriptor
    batch: int
    row: int
    largest: float

    def __str__(self) -> str:
        return (
            f"FULL, {self.descriptor}: batch {self.batch} differs from the plain step from row "
            f"{self.row} on, by at most {self.largest:.3g}; an op inside read a number on the host "
            "when it was captured"
        )


def verify_full(
    manager: CudaGraphManager, batches: Iterable[Batch], *, rtol: float = 0.0, atol: float = 0.0
) -> list[Unequal]:
    """Run batches plain and on their FULL graphs; refuse FULL graphs if any differs.

    What the model writes elsewhere, such as a cache, is written twice with equal values.
    Synchronises.

    Args:
        manager: with captured graphs. With an agreement all ranks call this, with as many batches
            that go the same ways.
        batches: layouts as different as serving may have them: longer and shorter sequences than
            at capture, other offsets, other numbers of requests.
        rtol: relative tolerance; 0 for bitwise.
        atol: absolute tolerance.

    Returns:
        What differs. If anything does, no FULL graph is dispatched any more: batches fall to
        PIECEWISE or run plain, with this reason.

    Raises:
        ManagerError: no batch took a FULL graph, or one that should replays none.
        BaseException: what a step raised.
    """
    found = []
    compared, why = 0, "there are no batches"
    for number, batch in enumerate(batches):
        chosen = manager.dispatched(batch)
        if chosen.mode is not CUDAGraphMode.FULL:
            why = f"batch {number}: {chosen.why}"
            continue
        plain = compat.tree_map(_copied, manager.run(batch, valid_modes=()))
        replayed = replayed_step(manager, batch, number)
        compared += 1
        sides = (map(comparable, compat.tree_leaves(each)) for each in (plain, replayed))
        for expected, got in zip(*sides, strict=True):
            if not torch.allclose(got, expected, rtol, atol, equal_nan=True):
                rows, largest = _differing(got, expected, rtol, atol)
                found.append(Unequal(chosen.descriptor, number, rows, largest))
                break
    if not compared:
        raise ManagerError.nothing_verified(why=why)
    said = str(found[0]) if found else "it differs on another rank"
    agreement = manager.agreement
    if agreement.largest(len(found)) if agreement is not None else found:
        log.warning("no FULL graphs any more: %s", said)
        for mode, descriptor in manager.dispatcher.plan():
            if mode is CUDAGraphMode.FULL:
                manager.dispatcher.refused(mode, descriptor, said)
    return found


def replayed_step(manager: CudaGraphManager, batch: Batch, number: int) -> Any:
    """What a replay gives; a manager that captures lazily comes to it with the third step.

    Args:
        manager: whose step it is.
        batch: what is run.
        number: of the batch, for the message.

    Raises:
        ManagerError: it replays nothing.
    """
    for _ in range(3):
        before = manager.counters.replays
        result = manager.run(batch)
        if manager.counters.replays > before:
            return result
    raise ManagerError.nothing_verified(why=f"batch {number} has a graph and does not replay it")


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _differing(
    found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float
) -> tuple[int, float]:
    close = torch.isclose(found, expected, rtol, atol, equal_nan=True)
    close = close.reshape(len(close), -1).all(1)
    difference = (found.to(torch.float64) - expected.to(torch.float64)).abs().nan_to_num(torch.inf)
    return int((~close).nonzero()[0]), float(difference.max())
