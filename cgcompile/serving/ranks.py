"""The same choice on every rank: :class:`Agreement`, over exchanges of whole numbers.

Ranks that share collectives must run the same graph, or all must run without: a rank that replays
while another runs eager waits forever. So at each step ranks exchange what they have and would
take, and all dispatch again with what they have in common: the most tokens, the least mode, one
query length or no common one. The rule: every rank takes part in each step, with work or without;
:class:`~cgcompile.serving.manager.CudaGraphManager` does so with an :class:`Agreement`.

Every exchange of a group has the same size and carries its purpose, so that ranks that are out of
step detect it, where other collectives would hang or mix up their data. A rank that waits for more
than a second notes so in the store of the group; when the wait fails, the ranks without a note are
those that never came. If a collective of the model fails because a peer has ended, the error names
the missing ranks in the same way.
"""

import hashlib
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from enum import Enum
from random import getrandbits
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cgcompile.descriptor import BatchDescriptor
from cgcompile.modes import CUDAGraphMode
from cgcompile.reasons import Fallback, Reason
from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched, allowed_modes
from cgcompile.serving.errors import AgreementError
from cgcompile.serving.plan import FULL, NONE, PIECEWISE
from cgcompile.settings import require_kind
from cgcompile.torch_compat import torch_ops

# ---------------------------------------------------------------- the exchange

WIDTH = 10  # numbers in a row, beside its purpose
_SOON = timedelta(seconds=1)


class Purpose(Enum):
    """The purpose of an exchange between ranks, for errors."""

    TABLES = "makes an Agreement"
    STEP = "requests the graph of a step"
    CHECK = "is about to run what was agreed"
    ALONE = "is about to run a graph of its own choice"
    NUMBER = "warms up for a capture"
    CAPTURED = "has captured a set of graphs"
    GAVE_UP = "gives up"


_PURPOSES = tuple(Purpose)


# ---------------------------------------------------------------- the agreement

_MODES = (NONE, PIECEWISE, FULL)
_IDLE = Fallback(Reason.EMPTY_BATCH, "this rank has no tokens; another one has")
_OTHERS = Fallback(Reason.OTHER_RANK, "another rank can take no more than this")
_BITS = 60  # flags packed into one number
_NO_LORA = -1


class Agreed(NamedTuple):
    """What all ranks run.

    Attributes:
        dispatched: mode, descriptor and reason. In mode NONE the descriptor is of this rank's own
            tokens, and on a rank without work, where others have some, of the smallest planned
            size; else it is equal on all ranks.
        num_tokens_across_dp: int32 [R] on the CPU: the tokens that each of R ranks runs, padded.
        has_work: whether any rank has tokens; if not, there is nothing to run.
    """

    dispatched: Dispatched
    num_tokens_across_dp: torch.Tensor
    has_work: bool


class _RankBatch(NamedTuple):
    """The integers that one rank sends to the others."""

    num_tokens: int
    num_reqs: int
    mode: int
    query_len: int  # query length of uniform decode, else 0
    max_query_len: int  # 0 if unknown
    full: int  # whether the mode is allowed
    piecewise: int
    loras: int  # active adapters, 0: not counted
    variant: int  # the values of the axes, packed


class Agreement:
    """Make all ranks of a group dispatch to one size and one mode, by one collective per step.

    Each step, the ranks

    1. exchange the numbers of their batches, in one gather of 80 bytes on the CPU;
    2. take the largest number of tokens and the least of the modes;
    3. dispatch again with these, and with the common query length if there is one.

    A rank that does not take part is an error with its number: at once if its process has died,
    else after the timeout of the group. The group cannot be used after that.

    Args:
        dispatcher: equal on all ranks; that is checked here, once.
        group: ranks that agree; its backend must take CPU tensors (gloo), so under NCCL it is a
            separate group: ``dist.new_group(backend="gloo", timeout=...)``. Left out: the default
            group.
        check: for debugging: compare what ranks are about to run, at the price of a second
            collective, so that a rank that differs is named instead of a hang.

    Attributes:
        dispatcher: as given.
        rank: this one, in the group.
        agreed: what the last :meth:`dispatch` returned; None before. An engine whose requests are
            done runs None until no rank ``has_work``.

    Raises:
        AgreementError: the dispatchers differ, with the ranks that do; a rank stays away; a group
            without CPU tensors, or none at all.
        ConfigError: ``dispatcher`` is no dispatcher, or ``group`` is no group of this rank.

    Example:
        >>> from torch import distributed
        >>> store = distributed.HashStore()
        >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> dispatcher = cgcompile.serving.CudagraphDispatcher("PIECEWISE", [4, 8], max_num_reqs=8)
        >>> agreement = cgcompile.serving.Agreement(dispatcher)
        >>> agreement.rank
        0
        >>> distributed.destroy_process_group()
    """

    def __init__(
        self,
        dispatcher: CudagraphDispatcher,
        group: "dist.ProcessGroup | None" = None,
        *,
        check: bool = False,
    ) -> None:
        require_kind("dispatcher", "Agreement", dispatcher, CudagraphDispatcher)
        self.dispatcher = dispatcher
        self._check = check
        self._nested = 0  # `together` inside of `together`
        require_kind("group", "Agreement", group, dist.ProcessGroup, maybe=True)
        if not dist.is_initialized():
            raise AgreementError.no_process_group(where="Agreement", name="agreement")
        self._group = dist.group.WORLD if group is None else group
        if torch_ops.process_group_backend(self._group, "cpu") is None:
            raise AgreementError.backend(found=dist.get_backend(self._group))
        self._size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)
        self._store = torch_ops.process_group_store(self._group)
        self.agreed: Agreed | None = None
        self._round = self._step = 0
        self._name = "cgcompile"
        plan = [(mode.name, descriptor) for mode, descriptor in dispatcher.plan()]
        self._smallest = min((descriptor.num_tokens for _, descriptor in plan), default=1)
        rows = self._gather(Purpose.TABLES, getrandbits(62), _digest(plan))
        self._name = f"cgcompile.{rows[0][0]}"  # unique among the agreements of a group
        _require_equal([row[1] for row in rows])

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        max_query_len: int | None = None,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
        valid_modes: Collection[CUDAGraphMode] | None = None,
        invalid_modes: Collection[CUDAGraphMode] | None = None,
    ) -> Agreed:
        """Choose the graph of this step for all ranks. Collective: every rank calls it.

        Arguments are those of :meth:`CudagraphDispatcher.dispatch`, of this rank's own batch, with
        ``num_tokens`` 0 where there is no work. A mode must be allowed by every rank. With LoRA on
        any rank all take its graphs, of the most adapters; an axis is padded up to the largest
        value, and where an exact one differs no rank takes a graph.

        Raises:
            AgreementError: a rank stays away, or, with ``check``, is about to run another graph
                than the first.
            BatchError: numbers that contradict each other; this rank has not taken part then.
        """
        modes = valid_modes, invalid_modes
        full, piecewise = allowed_modes(*modes)
        variant = has_lora, num_active_loras, extra
        own = self.dispatcher.dispatch(
            num_tokens, num_reqs, max_query_len, uniform_decode, *variant, *modes
        )
        most = self.dispatcher.limits.max_num_reqs
        batch = _RankBatch(
            num_tokens,
            min(num_tokens, most) if num_reqs is None else num_reqs,
            _MODES.index(own.mode),
            self._query_len(num_tokens, num_reqs, max_query_len) if uniform_decode else 0,
            max_query_len or 0,
            full,
            piecewise,
            num_active_loras if has_lora else _NO_LORA,
            self._packed(extra) if num_tokens else 0,
        )
        self._step += 1
        rows = [_RankBatch(*row[: len(batch)]) for row in self._gather(Purpose.STEP, *batch)]
        working = [row for row in rows if row.num_tokens]
        agreed, across = own, [0] * len(rows)
        if working:
            common = self._common(working, rows)
            agreed = self._for_this_rank(num_tokens, own, common)
            padded = common.descriptor.num_tokens if common.mode is not NONE else 0
            across = [padded or row.num_tokens or self._smallest for row in rows]
        if self._check:
            self._compare(Purpose.CHECK, agreed)
        num_tokens_across_dp = torch.tensor(across, dtype=torch.int32, device="cpu")
        self.agreed = Agreed(agreed, num_tokens_across_dp, bool(working))
        return self.agreed

    def _common(self, working: list[_RankBatch], rows: list[_RankBatch]) -> Dispatched:
        """Dispatch a batch that is as large as the largest, and uniform only if all are."""
        tokens = max(row.num_tokens for row in working)
        least = min(row.mode for row in working)
        variant = self._variant(working) if least else None
        if variant is None:
            return Dispatched(NONE, BatchDescriptor(tokens))
        modes = []
        if all(row.piecewise for row in rows):
            modes.append(PIECEWISE)
        if _MODES[least] is FULL and all(row.full for row in rows):
            modes.append(FULL)
        query_lens = {row.query_len for row in working}
        query_len = query_lens.pop() if len(query_lens) == 1 else 0
        # May be more than tokens: a request can have none, and padding must leave a row for it.
        reqs = max(row.num_reqs for row in working)
        lengths = [row.max_query_len for row in working]
        longest = max(lengths) if all(lengths) else None
        if query_len:
            reqs, longest = tokens // query_len, query_len
        return self.dispatcher.dispatch(
            tokens, reqs, longest, bool(query_len), *variant, valid_modes=modes
        )

    def _query_len(self, num_tokens: int, num_reqs: int | None, max_query_len: int | None) -> int:
        """Return the tokens of each request of a uniform batch, as in dispatch; 0: unknown."""
        if num_reqs is not None:
            return num_tokens // num_reqs if num_reqs else 0
        known = self.dispatcher.query_lens
        return max_query_len or (known[0] if len(known) == 1 else 0)

    def _for_this_rank(self, num_tokens: int, own: Dispatched, common: Dispatched) -> Dispatched:
        """Return the common choice with this rank's reason, and if plain with its own tokens."""
        if common.mode is not NONE:
            if own.mode is common.mode:
                return common
            return common._replace(why=_OTHERS if num_tokens else _IDLE)
        if not num_tokens:
            return Dispatched(NONE, BatchDescriptor(self._smallest), _IDLE)
        if own.mode is NONE:
            return own
        return Dispatched(NONE, BatchDescriptor(num_tokens), _OTHERS)

    def _packed(self, extra: tuple[Any, ...]) -> int:
        """Return the values of all axes packed into one number; arbitrary without graphs."""
        packed = 0
        for axis, value in zip(self.dispatcher.axes, extra, strict=True):
            listed = axis.listed()
            try:
                packed = packed * len(listed) + listed.index(axis.value_for(value))
            except LookupError:
                return 0
        return packed

    def _variant(self, working: list[_RankBatch]) -> tuple[bool, int, tuple[Any, ...]] | None:
        """Return (has_lora, num_active_loras, extra) that serves all ranks; None if none does."""
        variants, values = [row.variant for row in working], []
        for axis in reversed(self.dispatcher.axes):
            listed = axis.listed()
            indices = {variant % len(listed) for variant in variants}
            variants = [variant // len(listed) for variant in variants]
            if len(indices) > 1 and axis.rule == "exact":
                return None
            values.append(listed[max(indices)])
        loras = [row.loras for row in working]
        most = 0 if 0 in loras else max(0, *loras)
        return max(loras) > _NO_LORA, most, tuple(reversed(values))

    # -------------------------------------------------------------- the exchange

    def _gather(self, purpose: Purpose, *numbers: int) -> list[list[int]]:
        """Return the numbers of all ranks, [WIDTH] each, zeros at the end. Collective."""
        self._round += 1
        row = [_PURPOSES.index(purpose), *numbers, *[0] * (WIDTH - len(numbers))]
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        gathered = torch.empty(self._size, len(row), dtype=torch.int64, device="cpu")
        try:
            work = dist.all_gather(list(gathered.unbind()), own, group=self._group, async_op=True)
            try:
                work.wait(_SOON)
            except RuntimeError:
                self._note()
                work.wait()  # raises again if it has failed for good
        except RuntimeError as error:
            raise self._failed(purpose.value, error) from error
        rows: list[list[int]] = gathered.tolist()
        purposes = [_PURPOSES[row[0]] for row in rows]
        if Purpose.GAVE_UP in purposes:
            raise AgreementError.gave_up(rank=purposes.index(Purpose.GAVE_UP))
        for rank, other in enumerate(purposes):
            if other is not purposes[0]:
                raise AgreementError.out_of_step(
                    rank=rank, found=other.value, first=purposes[0].value
                )
        return [row[1:] for row in rows]

    def _failed(self, does: str, error: BaseException) -> AgreementError:
        """Return the error of a collective that failed, with the ranks that are missing."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        missing = self._missing()
        return AgreementError.missing(
            rank=self.rank, does=does, step=self._step, missing=missing, error=text
        )

    def _key(self, rank: int) -> str:
        return f"{self._name}.{self._round}.{rank}"

    def _note(self) -> None:
        """Note in the store that this rank has come."""
        if self._store is not None:
            with suppress(RuntimeError):  # its server may be the rank that died
                self._store.set(self._key(self.rank), "here")

    def _missing(self) -> list[int]:
        """Return the ranks that have not come; empty if that is unknown."""
        if self._store is None:
            return []
        self._note()
        until = time.monotonic() + 2 * _SOON.total_seconds()
        ranks, missing = list(range(self._size)), []
        with suppress(RuntimeError):  # the server may have ended: keep the ranks known so far
            while ranks and time.monotonic() < until:  # other ranks may be about to write
                missing = ranks = [n for n in ranks if not self._store.check([self._key(n)])]
                time.sleep(0.05)
        return missing

    # -------------------------------------------------------------- for the manager

    def check_alone(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """With ``check`` compare a graph that this rank has chosen itself. Collective.

        Raises:
            AgreementError: the others run another one, or dispatch a step.
        """
        if self._check:
            self._compare(Purpose.ALONE, Dispatched(mode, descriptor))

    def largest(self, number: int) -> int:
        """Return the largest of the numbers of all ranks. Collective."""
        return max(row[0] for row in self._gather(Purpose.NUMBER, number))

    def without(self, planned: Sequence[Any], done: Collection[Any]) -> dict[Any, int]:
        """Return the first rank without each planned graph that some rank lacks. Collective.

        Args:
            planned: what was to be captured: the same on all ranks.
            done: what this rank has captured, or chosen.

        Raises:
            AgreementError: other ranks had other plans; a rank stays away or gave up.
        """
        without: dict[Any, int] = {}
        at_once = (WIDTH - 1) * _BITS
        for start in range(0, len(planned), at_once):
            part = planned[start : start + at_once]
            flags = sum(1 << bit for bit, graph in enumerate(part) if graph in done)
            words = [flags >> shift & (1 << _BITS) - 1 for shift in range(0, at_once, _BITS)]
            rows = self._gather(Purpose.CAPTURED, _digest(list(part)), *words)
            _require_equal([row[0] for row in rows])
            for rank, row in enumerate(rows):
                for bit, graph in enumerate(part):
                    if not row[1 + bit // _BITS] >> bit % _BITS & 1:
                        without.setdefault(graph, rank)
        return without

    def check_lost(self, error: BaseException) -> None:
        """Raise AgreementError for the error of a collective of the model whose peer has ended."""
        if not isinstance(error, AgreementError) and torch_ops.is_lost_peer(error):
            self._note()
            self._round += 1  # where ranks that had no part in that collective wait
            raise self._failed("runs a collective of the model", error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Enclose what all ranks do at the same time: an exception here is raised on all ranks.

        The others raise AgreementError. May be nested: others are told at the end of the outermost.
        """
        self._nested += 1
        try:
            yield
        except BaseException as error:
            self.check_lost(error)
            # After an AgreementError the others raise as well, or cannot be reached.
            if self._nested == 1 and not isinstance(error, AgreementError):
                with suppress(AgreementError):
                    self._gather(Purpose.GAVE_UP)
            raise
        finally:
            self._nested -= 1

    def across(self, num_tokens: int) -> torch.Tensor:
        """Return ``num_tokens_across_dp`` for equal ranks: int32 [R], each ``num_tokens``."""
        return torch.full((self._size,), num_tokens, dtype=torch.int32, device="cpu")

    def _compare(self, purpose: Purpose, chosen: Dispatched) -> None:
        mode, descriptor = _MODES.index(chosen.mode), chosen.descriptor
        tokens = descriptor.num_tokens if mode else 0
        rows = self._gather(purpose, mode, tokens, descriptor.uniform)
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise AgreementError.differs(
                rank=others[0], found=_text(rows[others[0]]), first=_text(rows[0])
            )


def together(agreement: Agreement | None) -> AbstractContextManager[None]:
    """Return :meth:`Agreement.together`, or nothing without ranks."""
    return nullcontext() if agreement is None else agreement.together()


def _require_equal(digests: list[int]) -> None:
    """Raise unless all ranks sent the same digest of their tables."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise AgreementError.tables(ranks=others)


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big", signed=True)


def _text(row: list[int]) -> str:
    mode, tokens, uniform, *_ = row
    return f"{_MODES[mode].name}, {tokens} tokens{', uniform' if uniform else ''}"
