"""Whole numbers between ranks, and a name for the rank that stays away: :class:`Exchange`.

Every exchange of a group has the same size and says what it is for, so that ranks that are out of
step read each other and can say so, where other collectives would hang or mix up their data. A rank
that waits for more than a second notes so in the store of the group; when the wait ends badly,
those without a note are the ones that never came. The rule: whoever exchanges does so on all ranks.
"""

import time
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from random import getrandbits
from typing import Any

import torch
import torch.distributed as dist

from cgcompile import compat
from cgcompile.errors import AgreementError
from cgcompile.settings import require_kind

WIDTH = 10  # numbers in a row, beside its kind
_SOON = timedelta(seconds=1)


class Kind(IntEnum):
    """What a rank exchanges numbers for."""

    TABLES = 0
    STEP = 1
    CHECK = 2
    ALONE = 3
    NUMBER = 4
    CAPTURED = 5
    GAVE_UP = 6


_DOES = {
    Kind.TABLES: "makes an Agreement",
    Kind.STEP: "asks for the graph of a step",
    Kind.CHECK: "is about to run what was agreed",
    Kind.ALONE: "is about to run a graph of its own choice",
    Kind.NUMBER: "warms up for a capture",
    Kind.CAPTURED: "has captured a set of graphs",
}


class Exchange:
    """Gathers rows of numbers from all ranks of a group. Not for several threads at a time.

    Args:
        group: its backend must take CPU tensors (gloo); None: the default group.

    Attributes:
        rank: this one, in the group.
        size: how many there are.

    Raises:
        AgreementError: the group takes no CPU tensors, or there is none.
        ConfigError: it is no group.
    """

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        require_kind("group", "Agreement", group, dist.ProcessGroup, maybe=True)
        if not dist.is_initialized():
            raise AgreementError.no_group()
        self._group = dist.group.WORLD if group is None else group
        if compat.process_group_backend(self._group, "cpu") is None:
            raise AgreementError.backend(found=dist.get_backend(self._group))
        self.size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)
        self._round = 0
        self._name = "cgcompile"

    def meet(self, *numbers: int) -> list[list[int]]:
        """The first exchange: as :meth:`gather`, with fewer than ``WIDTH`` numbers."""
        rows = self.gather(Kind.TABLES, getrandbits(62), *numbers)
        self._name = f"cgcompile.{rows[0][0]}"  # notes of other agreements of the group differ
        return [row[1:] for row in rows]

    def gather(self, kind: Kind, *numbers: int) -> list[list[int]]:
        """The numbers of all ranks, by rank; each [WIDTH] with zeros at the end. Collective.

        Waits for all ranks, as long as the timeout of the group at most.

        Args:
            kind: what they are for.
            *numbers: up to ``WIDTH``, each of 64 bits.

        Raises:
            AgreementError: a rank stays away, gave up, or exchanges for something else.
        """
        self._round += 1
        row = [int(kind), *numbers, *[0] * (WIDTH - len(numbers))]
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        found = torch.empty(self.size, len(row), dtype=torch.int64, device="cpu")
        try:
            work = dist.all_gather(list(found.unbind()), own, group=self._group, async_op=True)
            self._wait(work)
        except RuntimeError as error:
            does = _DOES.get(kind, "gives up")
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise AgreementError.missing(
                rank=self.rank, does=does, missing=self._missing(), said=said
            ) from error
        rows: list[list[int]] = found.tolist()
        self._same_kind([Kind(row[0]) for row in rows])
        return [row[1:] for row in rows]

    def _wait(self, work: Any) -> None:
        try:
            work.wait(_SOON)
        except RuntimeError:
            self._note()
            work.wait()  # raises again if it has failed for good

    def _same_kind(self, kinds: list[Kind]) -> None:
        if Kind.GAVE_UP in kinds:
            raise AgreementError.gave_up(rank=kinds.index(Kind.GAVE_UP))
        for rank, kind in enumerate(kinds):
            if kind is not kinds[0]:
                raise AgreementError.out_of_step(
                    rank=rank, found=_DOES[kind], first=_DOES[kinds[0]]
                )

    # -------------------------------------------------------------- who stays away

    def _key(self, rank: int) -> str:
        return f"{self._name}.{self._round}.{rank}"

    def _note(self) -> None:
        """Say in the store that this rank has come, for those that will look for the others."""
        store = compat.process_group_store(self._group)
        if store is not None:
            with suppress(RuntimeError):  # its server may be the rank that died
                store.set(self._key(self.rank), "here")

    def _missing(self) -> list[int]:
        """The ranks that have not come; empty if nobody can tell."""
        self._note()
        store = compat.process_group_store(self._group)
        until = time.monotonic() + 2 * _SOON.total_seconds()
        missing = list(range(self.size)) if store is not None else []
        with suppress(RuntimeError):
            while missing and time.monotonic() < until:  # others may be about to note it
                missing = [rank for rank in missing if not store.check([self._key(rank)])]
                time.sleep(0.05)
            return missing
        return []
