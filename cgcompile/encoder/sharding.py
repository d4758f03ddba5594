"""Share the items of a call out among ranks that all have the whole encoder: :class:`Sharder`.

Every rank gets the same call and computes the same shares, so nothing is exchanged before the
results: each rank encodes its items, all agree whether that succeeded, and one gather per tensor
distributes the results. The rule: all ranks of the group make the same calls, in the same order.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from cgcompile.encoder.errors import EncoderShardError
from cgcompile.settings import checked, require_whole
from cgcompile.torch_compat import torch_ops

MOST_RANKS = 2**16


@checked
def shares_by_load(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the items of each rank: the largest first, each to the rank with the least load.

    Deterministic; the largest load is at most 4/3 of the best possible one.

    Args:
        sizes: load of each item.
        ranks: their number, at most 2**16.

    Returns:
        For each rank its items, ascending; maybe none.

    Example:
        >>> cgcompile.encoder.shares_by_load([10, 4, 5], ranks=2)
        [[0], [1, 2]]
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
    """Shares items out and gathers results over ``torch.distributed``.

    One for each manager: it keeps the structure of results. If the share of one rank raises, the
    other ranks raise as well, and the next call is not affected. That takes one small collective of
    hosts per call, which does not wait for the device.

    Override :meth:`assign` for another way to share out, or all methods for another way to
    communicate.

    Args:
        group: ranks; its backend must take tensors of the encoder's device. Left out: the default
            group. Unless it takes CPU tensors as well, a group of ``gloo`` is made beside it; then
            making a sharder is collective.

    Attributes:
        rank: of this process.
        size: number of ranks.

    Example:
        >>> from torch import distributed
        >>> store = distributed.HashStore()
        >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> sharder = cgcompile.encoder.Sharder()
        >>> sharder.rank, sharder.size
        (0, 1)
        >>> distributed.destroy_process_group()
    """

    @checked
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise EncoderShardError.no_process_group(where="Sharder", name="sharder")
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._like: Any = None  # a result without rows, on the device, once known
        self._hosts: Any = group
        if "cpu:" not in dist.get_backend_config(group):
            self._hosts = dist.new_group(
                dist.get_process_group_ranks(group or dist.group.WORLD),
                backend="gloo",
                use_local_synchronization=True,  # other ranks do not take part
            )

    def assign(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return the items of each rank, alike on all ranks; every item once.

        Args:
            sizes: input rows of each item.
        """
        return shares_by_load(sizes, self.size)

    def check(self, own: Sequence[Any]) -> None:
        """Check the results of this rank's items before they are sent.

        Raises:
            EncoderShardError: their structure differs from each other's, or from earlier ones'.
        """
        known = [] if self._like is None else [self._like]
        structures = [_structure(result) for result in (*own, *known)]
        if any(structure != structures[0] for structure in structures):
            raise EncoderShardError.structure(rank=self.rank)

    def agree(self, failed: BaseException | None) -> None:
        """Exchange whether the share of each rank succeeded. Collective, on the hosts.

        Args:
            failed: the exception of this rank's share.

        Raises:
            EncoderShardError: this rank's share succeeded, another's did not.
        """
        count = torch.tensor([failed is not None], dtype=torch.int32)
        dist.all_reduce(count, group=self._hosts)
        if not count.item():
            return
        texts = self._exchanged(None if failed is None else f"{type(failed).__name__}: {failed}")
        if failed is None:
            shares = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
            raise EncoderShardError.failed(rank=self.rank, shares="\n  ".join(shares))

    def _exchanged(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective, on the hosts."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def gather(
        self,
        own: Sequence[Any],
        shares: Sequence[Sequence[int]],
        like: Any,
        rows: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the results of all items, on all ranks, in the order of the items. Collective.

        The very first call exchanges the structure of a result, because a rank without items has
        none.

        Args:
            own: results of this rank's items, tensors or nests of them, [rows, ...], which passed
                :meth:`check`.
            shares: the items of each rank.
            like: a result without rows, on the right device.
            rows: of each item, on each of its tensors; None: a collective of hosts exchanges them.

        Returns:
            Views of memory that belongs to the caller.

        Raises:
            EncoderShardError: in the first call, on all ranks: ranks have results of different
                structures.
        """
        if self._like is None:
            self._like = self._agreed_structure(own, like)
        columns = list(map(torch_ops.tree_leaves, own))
        templates = torch_ops.tree_leaves(self._like)
        if rows is None:
            ranks = self._exchanged([list(map(len, leaves)) for leaves in columns])
            counts = [
                [[item[k] for item in items] for items in ranks] for k in range(len(templates))
            ]
        else:
            counts = [[[rows[item] for item in items] for items in shares]] * len(templates)
        parts: list[list[Any]] = [[] for _ in range(sum(map(len, shares)))]
        for number, template in enumerate(templates):
            tensors = self._gathered(
                [leaves[number] for leaves in columns], template, counts[number]
            )
            for items, pieces in zip(shares, tensors, strict=True):
                for item, piece in zip(items, pieces, strict=True):
                    parts[item].append(piece)
        spec = torch_ops.tree_spec(self._like)
        return [torch_ops.tree_unflatten(leaves, spec) for leaves in parts]

    def _agreed_structure(self, own: Sequence[Any], like: Any) -> Any:
        """Return a result without rows, from the first rank that has a result."""
        bare = torch_ops.tree_map(lambda leaf: leaf[:0].cpu(), own[0]) if own else None
        results = self._exchanged(bare)
        first = next(result for result in results if result is not None)
        for rank, result in enumerate(results):
            if result is not None and _structure(result) != _structure(first):
                raise EncoderShardError.structure(rank=rank)
        device = torch_ops.tree_leaves(like)[0].device
        return torch_ops.tree_map(lambda leaf: leaf.to(device), first)

    def _gathered(
        self, own: Sequence[torch.Tensor], like: torch.Tensor, counts: Sequence[Sequence[int]]
    ) -> list[Sequence[torch.Tensor]]:
        """Gather one tensor of all ranks, each padded to the largest share; return its parts."""
        padded = like.new_zeros((max(map(sum, counts)), *like.shape[1:]))
        if own:
            padded[: sum(counts[self.rank])] = torch.cat([leaf.to(like.dtype) for leaf in own])
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        if padded.numel():
            dist.all_gather(gathered, padded, group=self._group)
        return [
            torch.split(tensor[: sum(rows)], list(rows))
            for tensor, rows in zip(gathered, counts, strict=True)
        ]


def _structure(result: Any) -> tuple[Any, ...]:
    """Return how a result is nested, and the sizes of a row of each of its tensors."""
    leaves = torch_ops.tree_leaves(result)
    return (torch_ops.tree_spec(result), *[leaf.shape[1:] for leaf in leaves])
