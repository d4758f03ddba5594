"""The same choice on every rank: :class:`Agreement`.

Ranks that share collectives must run the same graph, or all none: one that replays while another
runs eager waits for ever. So each step ranks tell each other what they have and would take, and
all dispatch again with what they have in common: the most tokens, the least mode, one query length
or none. The rule: every rank calls :meth:`Agreement.dispatch` at each step, with work or without.
"""

import hashlib
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import AgreementError
from cgcompile.modes import CUDAGraphMode
from cgcompile.serving.dispatcher import CudagraphDispatcher
from cgcompile.serving.tables import Dispatched

_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class Agreed(NamedTuple):
    """What all ranks run.

    Attributes:
        dispatched: mode, descriptor and reason. In mode NONE the descriptor is of this rank's own
            tokens; else it is equal on all ranks.
        num_tokens_across_dp: int32 [R] on the CPU: the tokens that each of R ranks runs, padded.
        has_work: whether any rank has tokens; if not, there is nothing to run.
    """

    dispatched: Dispatched
    num_tokens_across_dp: torch.Tensor
    has_work: bool


class _Said(NamedTuple):
    """What one rank tells the others: whole numbers."""

    num_tokens: int
    num_reqs: int
    mode: int
    query_len: int  # of uniform decode, else 0


class Agreement:
    """Dispatches for all ranks of a group alike: one small collective per step.

    Args:
        dispatcher: equal on all ranks; that is checked here, once.
        group: ranks that agree; its backend must take CPU tensors (gloo). Left out: the default
            group.
        check: for debugging: compare what ranks are about to run, at the price of a second
            collective. Its timeout is that of the group.

    Raises:
        AgreementError: the dispatchers differ; names the ranks that do.
    """

    def __init__(
        self,
        dispatcher: CudagraphDispatcher,
        group: dist.ProcessGroup | None = None,
        *,
        check: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._group = group
        self._check = check
        self._size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._compare_tables()

    def _compare_tables(self) -> None:
        text = repr(self._plan())
        digest = hashlib.sha256(text.encode()).digest()[:8]
        found = [row[0] for row in self._gather([int.from_bytes(digest, "big", signed=True)])]
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise AgreementError.tables(others)

    def _plan(self) -> list[tuple[str, BatchDescriptor]]:
        return [(mode.name, descriptor) for mode, descriptor in self._dispatcher.plan()]

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        max_query_len: int | None = None,
        uniform_decode: bool = False,
        *,
        valid_modes: Collection[CUDAGraphMode] | None = None,
        **more: Any,
    ) -> Agreed:
        """The graph of this step, for all ranks. Collective: every rank calls it.

        Args:
            num_tokens: of this rank's batch; 0 without work.
            num_reqs: its requests.
            max_query_len: its longest query.
            uniform_decode: it is uniform decode.
            valid_modes: what this rank's step may run in; ranks get what all may.
            **more: further arguments of the dispatcher, equal on all ranks.

        Raises:
            AgreementError: ``check``, and a rank is about to run another graph than the first.
            BatchError: numbers that contradict each other.
        """
        reqs = num_tokens if num_reqs is None else num_reqs
        own = self._dispatcher.dispatch(
            num_tokens, num_reqs, max_query_len, uniform_decode, valid_modes=valid_modes, **more
        )
        query_len = num_tokens // reqs if uniform_decode and reqs else 0
        said = _Said(num_tokens, reqs, _MODES.index(own.mode), query_len)
        rows = [_Said(*row) for row in self._gather(list(said))]
        working = [row for row in rows if row.num_tokens]
        mode = _MODES[min((row.mode for row in working), default=0)]
        agreed = own
        if mode is not CUDAGraphMode.NONE:
            agreed = self._again(working, mode, more)
        if CUDAGraphMode.NONE in (mode, agreed.mode):  # each rank its own tokens, unpadded
            plain = self._dispatcher.dispatch(num_tokens, num_reqs, valid_modes=(), **more)
            agreed = own if own.mode is CUDAGraphMode.NONE else plain  # that knows the reason
        padded = agreed.descriptor.num_tokens
        graph = agreed.mode is not CUDAGraphMode.NONE
        across = [padded if graph else row.num_tokens for row in rows]
        if self._check:
            self._compare(agreed)
        return Agreed(agreed, torch.tensor(across, dtype=torch.int32), bool(working))

    def _again(self, working: list[_Said], mode: CUDAGraphMode, more: dict[str, Any]) -> Dispatched:
        """Dispatch a batch that is as large as the largest, and uniform only if all are."""
        lengths = {row.query_len for row in working}
        query_len = lengths.pop() if len(lengths) == 1 else 0
        tokens = max(row.num_tokens for row in working)
        reqs = max(row.num_reqs for row in working)
        allowed = _MODES[: _MODES.index(mode) + 1]
        if query_len:
            return self._dispatcher.dispatch(
                tokens, tokens // query_len, query_len, True, valid_modes=allowed, **more
            )
        return self._dispatcher.dispatch(tokens, min(reqs, tokens), valid_modes=allowed, **more)

    def _compare(self, agreed: Dispatched) -> None:
        mode = _MODES.index(agreed.mode)
        numbers = [
            mode,
            agreed.descriptor.num_tokens if mode else 0,
            int(agreed.descriptor.uniform),
        ]
        rows = self._gather(numbers)
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise AgreementError.differs(others[0], _text(rows[others[0]]), _text(rows[0]))

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(found, own, group=self._group)
        return [each.tolist() for each in found]


def _text(row: list[int]) -> str:
    mode, tokens, uniform = row
    return f"{_MODES[mode].name}, {tokens} tokens{', uniform' if uniform else ''}"
