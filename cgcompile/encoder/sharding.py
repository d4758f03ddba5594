"""Items of a call shared out among ranks that all have the whole encoder: :class:`Sharder`.

Every rank sees the same call and shares it out alike, so nothing is exchanged before the results:
each encodes its items, all tell each other whether that went well, and one gather per tensor gives
all results to all. The rule: all ranks of the group make the same calls, in the same order.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cgcompile import torch_compat as compat
from cgcompile.errors import EncoderShardError
from cgcompile.settings import checked, require_whole

MOST_RANKS = 2**16


@checked
def shares_by_load(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which rank takes which items: the largest first, each to the rank with the least load.

    Deterministic, and never above 4/3 of the best possible largest load.

    Args:
        sizes: load of each item.
        ranks: how many there are, at most 2**16.

    Returns:
        For each rank its items, ascending; maybe none.
    """
    require_whole("ranks", "shares_by_load", ranks, 1, MOST_RANKS)
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + sizes[item], rank))
    return [sorted(items) for items in shares]


class Sharder:
    """Shares out and gathers over ``torch.distributed``.

    One for each manager: it remembers what results look like. An exception of one rank in a call is
    told to the others, which raise as well, and the next call starts afresh on all. Telling takes
    one small collective of hosts per call, so that no device is waited for.

    Override :meth:`assign` for another way to share out, or all methods for another way to
    communicate.

    Args:
        group: ranks; its backend must take tensors of the encoder's device. Left out: the default
            group. Unless it takes CPU tensors as well, a group of ``gloo`` is made beside it: then
            making a sharder is collective.

    Attributes:
        rank: of this process.
        size: how many ranks there are.
    """

    @checked
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise EncoderShardError.no_group()
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._shape: Any = None  # a result without rows, once known
        self._hosts: Any = group
        if "cpu:" not in dist.get_backend_config(group):
            self._hosts = dist.new_group(
                dist.get_process_group_ranks(group or dist.group.WORLD),
                backend="gloo",
                use_local_synchronization=True,  # those who are not in it do not take part
            )

    def assign(self, sizes: Sequence[int]) -> list[list[int]]:
        """Which rank takes which items, alike on all ranks; every item once.

        Args:
            sizes: input rows of each item.
        """
        return shares_by_load(sizes, self.size)

    def check(self, own: Sequence[Any]) -> None:
        """Look at the results of this rank's items before they are sent.

        Raises:
            EncoderShardError: they have another structure than each other, or those before.
        """
        kinds = [_kind(each) for each in own]
        if self._shape is not None:
            kinds.append(_kind(self._shape))
        if any(each != kinds[0] for each in kinds):
            raise EncoderShardError.structure(rank=self.rank)

    def agree(self, failed: BaseException | None) -> None:
        """Tell the other ranks whether this one's share went well. Collective, on the hosts.

        Args:
            failed: what this rank's share raised.

        Raises:
            EncoderShardError: this rank's share went well, another's did not.
        """
        count = torch.tensor([failed is not None], dtype=torch.int32)
        dist.all_reduce(count, group=self._hosts)
        if not count.item():
            return
        said = None if failed is None else f"{type(failed).__name__}: {failed}"
        told: list[str | None] = [None] * self.size
        dist.all_gather_object(told, said, group=self._hosts)
        if failed is None:
            shares = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
            raise EncoderShardError.failed(rank=self.rank, shares="\n  ".join(shares))

    def gather(
        self,
        own: Sequence[Any],
        shares: Sequence[Sequence[int]],
        like: Any,
        rows: Sequence[int] | None = None,
    ) -> list[Any]:
        """The results of all items, on all ranks, in the order of the items. Collective.

        The very first call exchanges what a result looks like, as a rank without items has none to
        look at.

        Args:
            own: results of this rank's items, tensors or nests of them, [rows, ...], which
                :meth:`check` let pass.
            shares: the items of each rank.
            like: a result without rows, on the right device.
            rows: of each item, on each of its tensors; None: a small collective tells them, which
                synchronises.

        Returns:
            Views of memory that belongs to the caller.

        Raises:
            EncoderShardError: in the first call, on all ranks: one has results of another structure
                than another.
        """
        shape = self._agreed_shape(own, like)
        spec = compat.tree_spec(shape)
        columns = [compat.tree_leaves(each) for each in own]
        templates = compat.tree_leaves(shape)
        if rows is not None:
            counts = [list(rows)] * len(templates)
        else:
            counts = self._rows(columns, shares, len(templates))
        parts = [
            self._gathered([mine[number] for mine in columns], template, counts[number], shares)
            for number, template in enumerate(templates)
        ]
        items = sum(map(len, shares))
        return [
            compat.tree_unflatten([part[item] for part in parts], spec) for item in range(items)
        ]

    def _agreed_shape(self, own: Sequence[Any], like: Any) -> Any:
        """What a result looks like: told once by the first rank that has one."""
        if self._shape is None:
            bare = compat.tree_map(lambda leaf: leaf[:0].cpu(), own[0]) if own else None
            told: list[Any] = [None] * self.size
            dist.all_gather_object(told, bare, group=self._group)
            device = compat.tree_leaves(like)[0].device
            shape = next(each for each in told if each is not None)
            for rank, each in enumerate(told):
                if each is not None and _kind(each) != _kind(shape):
                    raise EncoderShardError.structure(rank=rank)
            self._shape = compat.tree_map(lambda leaf: leaf.to(device), shape)
        return self._shape

    def _rows(
        self, columns: Sequence[Sequence[torch.Tensor]], shares: Sequence[Sequence[int]], count: int
    ) -> list[list[int]]:
        """For each tensor the rows of each item, of which each rank knows its own."""
        items = sum(map(len, shares))
        device = compat.tree_leaves(self._shape)[0].device
        counts = torch.zeros(count, items, dtype=torch.int64)
        for item, mine in zip(shares[self.rank], columns, strict=True):
            counts[:, item] = torch.tensor([len(leaf) for leaf in mine])
        counts = counts.to(device)
        dist.all_reduce(counts, group=self._group)
        return [list(map(int, row)) for row in counts.tolist()]

    def _gathered(
        self,
        own: Sequence[torch.Tensor],
        like: torch.Tensor,
        rows: Sequence[int],
        shares: Sequence[Sequence[int]],
    ) -> dict[int, torch.Tensor]:
        """One tensor of all items, padded on the way to the rank that has most rows of it."""
        counts = [[rows[item] for item in items] for items in shares]
        most = max(sum(sizes) for sizes in counts)
        padded = like.new_zeros((most, *like.shape[1:]))
        if own:
            padded[: sum(counts[self.rank])] = torch.cat([leaf.to(like.dtype) for leaf in own])
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        if padded.numel():
            dist.all_gather(gathered, padded, group=self._group)
        parts: dict[int, torch.Tensor] = {}
        for items, sizes, whole in zip(shares, counts, gathered, strict=True):
            parts.update(zip(items, torch.split(whole[: sum(sizes)], sizes), strict=True))
        return parts


def _kind(result: Any) -> tuple[Any, ...]:
    """How a result is built, and the sizes of a row of each of its tensors."""
    leaves = compat.tree_leaves(result)
    return (compat.tree_spec(result), *[leaf.shape[1:] for leaf in leaves])
