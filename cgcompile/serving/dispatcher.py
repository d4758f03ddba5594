"""Which graph serves a batch: numbers in; runtime mode, padded descriptor and a reason out.

Plain Python: no torch, no device, no graph. Every answer stands in tables built once, so that a
step costs a few look-ups. Without this file each engine writes the choice anew, and pays for its
gaps: batches that no graph serves although one was captured, or that are padded and then run plain.

The rule a caller keeps: ``uniform_decode`` is said, never guessed. Prefills of equal length look
the same in numbers and run other kernels; ``is_uniform_decode`` in ``batches.py`` can tell. Read
on in ``planning.py`` (which graphs there are) and ``variants.py`` (LoRA and further axes).
"""

import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import BatchError
from cgcompile.modes import AttentionCGSupport, CUDAGraphMode
from cgcompile.reasons import Reason, Why
from cgcompile.serving.batches import (
    PLAIN_COUNTS,
    PLAIN_FLAGS,
    allowed_modes,
    check_empty,
    check_numbers,
    uniform_numbers,
)
from cgcompile.serving.planning import (
    NONE,
    PIECEWISE,
    Ladders,
    Resolution,
    resolve_mode,
    shapes_of,
)
from cgcompile.serving.sizes import mode_named
from cgcompile.serving.tables import Dispatched, Slot, Tables, build_tables
from cgcompile.serving.variants import Axis, LoraCases, PiecesOnly, Variant, Variants
from cgcompile.settings import checked_but, require_items, require_kind

log = logging.getLogger(__name__)

_MODE_NONE = Why(Reason.MODE_NONE, "the mode of the dispatcher is NONE")
_EMPTY = Why(Reason.EMPTY_BATCH, "the batch has no tokens")
_NO_FULL = Why(Reason.MODE_EXCLUDED, "the caller excludes FULL for this batch")
_NO_PIECEWISE = Why(Reason.MODE_EXCLUDED, "the caller excludes PIECEWISE for this batch")


class CudagraphDispatcher:
    """Chooses the graph of each step.

    FULL first if a graph serves the batch, then PIECEWISE, else NONE with the unpadded number of
    tokens. Of the graphs of a mode it is the smallest ready one that serves: where a size was not
    captured or is refused, a larger one does. A graph for uniform decode
    serves uniform decode of its own query length alone; a graph with a bound serves batches that
    say a ``max_query_len`` within it.

    After construction only :meth:`captured`, :meth:`refused`, :meth:`forget` and ``only_captured``
    change it; each is safe beside ``dispatch`` in other threads, which then sees the graph as it
    was before or after.

    Args:
        mode: the mode that is wanted, or its name; it is resolved down to what attention allows.
        sizes: capture sizes in tokens, of PIECEWISE graphs and of FULL graphs for any batch; those
            of uniform decode follow from them unless they are given.
        max_num_reqs: the most requests in a batch.
        max_num_tokens: the most tokens in a padded batch; left out, the largest size of all.
        query_lens: tokens per request of uniform decode (1 + k with k draft tokens); left out, the
            keys of ``decode_sizes``, or 1.
        decode_num_reqs: numbers of requests from which the sizes of uniform decode are made, per
            query length; left out, those that fit into each of ``sizes``. The most that fits is
            always added. ``capture_sizes(max_num_reqs)`` gives fewer graphs for long queries.
        decode_sizes: in place of these two: per query length, sizes in tokens, multiples of it.
        varlen_decode_sizes: per bound, sizes in tokens of FULL graphs for batches whose longest
            query is within the bound.
        lora: the numbers of active LoRA adapters that have graphs.
        axes: further axes of the key; a batch gives their values as ``extra``, in this order.
        support: how far the least capable attention of the model goes into a FULL graph.
        support_why: which attention that is, for messages.
        piecewise: the model can run in pieces: it is compiled piecewise, or breakable.
        only_captured: dispatch only what :meth:`captured` has named; for after a bulk capture. If
            False, a planned graph is dispatched, so that the step captures it. May be changed.

    Attributes:
        mode: the mode after resolution.
        asked: the mode that was wanted.
        degraded: what was lost on the way, as :class:`~cgcompile.reasons.Why`; empty if nothing.
        limits: ``max_num_reqs`` and ``max_num_tokens``.
        query_lens: the lengths of uniform decode that have graphs, or would have if attention let
            them.
        axes: the axes, in the order of ``extra``.

    Raises:
        ConfigError: no graph is possible in ``mode``, or a number is out of range.
    """

    @checked_but("sizes", "decode_sizes", "varlen_decode_sizes", "axes")
    def __init__(
        self,
        mode: CUDAGraphMode | str,
        sizes: Iterable[int],
        *,
        max_num_reqs: int,
        max_num_tokens: int | None = None,
        query_lens: Sequence[int] | None = None,
        decode_num_reqs: Iterable[int] | None = None,
        decode_sizes: Mapping[int, Iterable[int]] | None = None,
        varlen_decode_sizes: Mapping[int, Iterable[int]] | None = None,
        lora: LoraCases | None = None,
        axes: Iterable[Axis] = (),
        support: AttentionCGSupport = AttentionCGSupport.NEVER,
        support_why: str = "",
        piecewise: bool = True,
        only_captured: bool = False,
    ) -> None:
        where = "CudagraphDispatcher"
        mode = mode_named(mode, where)
        axes = (axes,) if isinstance(axes, Axis) else axes
        require_items("axes", where, axes)
        for name, flag in (("piecewise", piecewise), ("only_captured", only_captured)):
            require_kind(name, where, flag, bool)
        ladders = Ladders.of(
            sizes,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            query_lens=query_lens,
            decode_num_reqs=decode_num_reqs,
            decode_sizes=decode_sizes,
            varlen_decode_sizes=varlen_decode_sizes,
        )
        found = resolve_mode(
            mode,
            support,
            query_lens=ladders.decode,
            bounded=bool(ladders.varlen),
            piecewise=piecewise,
            support_why=support_why,
        )
        for why in found.whys:
            log.warning("CUDA graph mode %s becomes %s: %s", mode.name, found.mode.name, why)
        self.asked = mode
        self.mode = found.mode
        self.degraded = found.whys
        self.limits = ladders.limits
        self._resolution = found
        self.query_lens = tuple(ladders.decode)
        self._max_num_reqs = max_num_reqs
        too_many = f"more than max_num_reqs = {max_num_reqs} requests"
        self._too_many_reqs = Why(Reason.OVERSIZE, too_many)
        self._mixed_why = self._why_mixed(found)
        self._variants = Variants(LoraCases() if lora is None else lora, axes)
        self.axes = self._variants.axes
        variants = {each: self._variants.in_pieces(each) for each in self._variants.all()}
        self._tables, self._slots = build_tables(shapes_of(found, ladders), variants)
        one = self._tables[next(iter(variants))]  # all variants have the same lengths
        up_to = [f"up to {max(one.bounded)}"] if one.bounded else []
        self._lengths = ", ".join([*map(str, one.decode), *up_to])
        # The variant of most batches. Axes always have to be looked at.
        plain = None if self.axes else self._variants.serving(False, 0, ())
        self._plain = self._tables[plain] if isinstance(plain, Variant) else None
        self.only_captured = only_captured

    @staticmethod
    def _why_mixed(found: Resolution) -> Why | None:
        """Why a batch that is no uniform decode has a lesser mode; None if it has what it may."""
        if found.mode is NONE:
            return _MODE_NONE
        if found.mixed_why is not None or found.mode is not CUDAGraphMode.FULL_DECODE_ONLY:
            return found.mixed_why
        return Why(Reason.MIXED_BATCH, f"mode {found.mode.name} has graphs for decode alone")

    @property
    def only_captured(self) -> bool:
        """Whether only captured graphs are dispatched. May be set."""
        return self._only_captured

    @only_captured.setter
    def only_captured(self, value: bool) -> None:
        self._only_captured = value
        for slot in self._slots.values():
            slot.settle(value)

    def plan(self) -> tuple[tuple[CUDAGraphMode, BatchDescriptor], ...]:
        """What to capture, in this order: PIECEWISE, then FULL, each largest first.

        PIECEWISE comes first because its intermediate results are the larger ones: FULL graphs then
        fit into memory that the pool has. Empty in mode NONE.
        """
        return tuple(self._slots)

    @checked_but("descriptor")
    def captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Note that a planned graph exists.

        Raises:
            BatchError: it is not planned.
        """
        slot = self._planned(mode, descriptor)
        slot.captured, slot.refused = True, ""
        slot.settle(self._only_captured)

    @checked_but("descriptor")
    def refused(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, why: str) -> None:
        """Note that a planned graph cannot be captured: it is not dispatched, captured or not.

        Args:
            mode: FULL or PIECEWISE.
            descriptor: the key, from :meth:`plan`.
            why: what the device or the model said; it becomes the detail of the reason.

        Raises:
            BatchError: it is not planned.
        """
        slot = self._planned(mode, descriptor)
        slot.captured, slot.refused = False, why or "refused"
        slot.settle(self._only_captured)

    def forget(self) -> None:
        """Note that no graph exists any more, and that none is refused: after a release."""
        for slot in self._slots.values():
            slot.captured, slot.refused = False, ""
            slot.settle(self._only_captured)

    def is_captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """Whether :meth:`captured` has named a graph; False for one that is not planned."""
        if type(mode) is not CUDAGraphMode or type(descriptor) is not BatchDescriptor:
            require_kind("mode", "is_captured", mode, CUDAGraphMode)
            require_kind("descriptor", "is_captured", descriptor, BatchDescriptor)
        slot = self._slots.get((mode, descriptor))
        return slot is not None and slot.captured

    def planned_size(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> int | None:
        """The size to which a batch will be padded, captured or not; None if no graph is planned.

        A graph that is ready, or that may still be captured, counts; a refused one does not. The
        arguments are those of :meth:`dispatch`.

        Raises:
            BatchError: the numbers contradict each other.
        """
        check_numbers(num_tokens, None, None, num_active_loras, uniform_decode, has_lora, extra)
        if num_tokens <= 0:
            check_empty(num_tokens, None)
            return None
        variant = self._variants.serving(has_lora, num_active_loras, extra)
        if isinstance(variant, Why):
            return None
        whole = isinstance(variant, Variant)
        tables = self._tables[variant if isinstance(variant, Variant) else variant.variant]
        full = self._find_full(tables, num_tokens, None, None, uniform_decode) if whole else None
        pieces = tables.piecewise.find(num_tokens) if tables.piecewise is not None else None
        slots = [slot for slot in (full, pieces) if slot is not None and not slot.refused]
        slots.sort(key=lambda slot: not slot.ready)  # stable: FULL first
        return slots[0].num_tokens if slots else None

    def _planned(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Slot:
        known = isinstance(descriptor, BatchDescriptor)
        slot = self._slots.get((mode, descriptor)) if known else None
        if slot is None:
            raise BatchError.not_planned(
                mode=getattr(mode, "name", str(mode)), descriptor=str(descriptor)
            )
        return slot

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
    ) -> Dispatched:
        """The graph of one step. All numbers are those of the batch itself, before padding.

        Args:
            num_tokens: rows of the batch.
            num_reqs: its requests; None if unknown, and then taken to be within ``max_num_reqs``.
            max_query_len: its longest query; None if unknown, and then no graph with a bound
                serves it. Leave it out where a batch holds prefills that need kernels of their own.
            uniform_decode: each request decodes, and all have the same number of tokens.
            has_lora: LoRA adapters are active.
            num_active_loras: how many; 0 with ``has_lora``: not counted.
            extra: the value of each axis, in the order of ``axes``.
            valid_modes: modes this step may run in; None for all. NONE need not be named: a step
                can always run without a graph, so that an empty collection means NONE.
            invalid_modes: modes that it may not run in. Neither collection is changed.

        Returns:
            Mode, padded descriptor and, where the mode is less than was asked for, the reason.

        Raises:
            BatchError: the numbers contradict each other, or a mode is no runtime mode.
        """
        counts = type(num_tokens), type(num_reqs), type(max_query_len), type(num_active_loras)
        flags = type(uniform_decode), type(has_lora)
        if counts not in PLAIN_COUNTS or flags != PLAIN_FLAGS or type(extra) is not tuple:
            values = num_tokens, num_reqs, max_query_len, num_active_loras
            check_numbers(*values, uniform_decode, has_lora, extra)
        if num_tokens <= 0 or (num_reqs is not None and num_reqs <= 0):
            check_empty(num_tokens, num_reqs)
            return _plain(num_tokens, _EMPTY)
        full = piecewise = True
        if valid_modes is not None or invalid_modes is not None:
            full, piecewise = allowed_modes(valid_modes, invalid_modes)
        tables = self._plain
        if tables is None or has_lora or num_active_loras or extra:
            variant = self._variants.serving(has_lora, num_active_loras, extra)
            if not isinstance(variant, Variant):
                return self._without_full(variant, num_tokens, piecewise)
            tables = self._tables[variant]
        slot = self._find_full(tables, num_tokens, num_reqs, max_query_len, uniform_decode)
        why: Why | None
        if slot is not None:
            if full and slot.ready:
                return slot.result
            why = slot.why_not() if full else _NO_FULL
        else:
            why = self._why_not_full(tables, num_tokens, num_reqs, max_query_len, uniform_decode)
        row = tables.piecewise
        if row is not None:
            slot = row.find(num_tokens)
            if slot is None:
                why = row.oversize
            elif not piecewise:
                why = _NO_PIECEWISE
            elif not slot.ready:
                why = slot.why_not()
            else:
                result = slot.result
                return result if why is None else Dispatched(PIECEWISE, result.descriptor, why)
        assert why is not None  # where there are no PIECEWISE graphs, FULL ones were asked for
        return _plain(num_tokens, why)

    def _without_full(
        self, found: PiecesOnly | Why, num_tokens: int, piecewise: bool
    ) -> Dispatched:
        """The answer where no FULL graph has the adapters and axes of a batch."""
        if self.mode is NONE:
            return _plain(num_tokens, _MODE_NONE)
        if isinstance(found, Why):
            return _plain(num_tokens, found)
        row = self._tables[found.variant].piecewise
        slot = row.find(num_tokens) if row is not None and piecewise else None
        if slot is None or not slot.ready:
            return _plain(num_tokens, found.why)
        return Dispatched(PIECEWISE, slot.result.descriptor, found.why)

    def _find_full(
        self,
        tables: Tables,
        num_tokens: int,
        num_reqs: int | None,
        max_query_len: int | None,
        uniform_decode: bool,
    ) -> Slot | None:
        """The smallest ready FULL graph that serves the batch, else any; uniform ones first."""
        found = None
        if uniform_decode and (tables.decode or tables.bounded):
            max_query_len, reqs = uniform_numbers(
                num_tokens, num_reqs, max_query_len, self.query_lens
            )
            row = tables.decode.get(max_query_len)
            found = row.find(reqs) if row is not None else None
        if tables.mixed is None and (max_query_len is None or not tables.bounded):
            return found
        # A graph of n tokens has min(n, max_num_reqs) requests, of which each batch needs enough.
        rows = num_tokens
        if num_reqs is not None:
            if num_reqs > self._max_num_reqs:
                return found
            rows = max(num_tokens, num_reqs)
        if tables.mixed is not None:
            return tables.mixed.find(rows)
        row = tables.bounded.get(max_query_len or 0)
        other = row.find(rows) if row is not None else None
        if other is None or found is None:
            return found or other
        if found.ready is not other.ready:
            return found if found.ready else other
        return found if found.num_tokens <= other.num_tokens else other

    def _why_not_full(
        self,
        tables: Tables,
        num_tokens: int,
        num_reqs: int | None,
        max_query_len: int | None,
        uniform_decode: bool,
    ) -> Why | None:
        """Why no FULL graph serves the batch; None if none was asked for."""
        decode_why = self._resolution.decode_why
        if tables.mixed is not None:
            few = num_reqs is None or num_reqs <= self._max_num_reqs
            return tables.mixed.oversize if few else self._too_many_reqs
        if not uniform_decode:
            return self._mixed_why
        if not (tables.decode or tables.bounded):
            return decode_why if self.mode is not NONE else _MODE_NONE
        query_len, _ = uniform_numbers(num_tokens, num_reqs, max_query_len, self.query_lens)
        row = tables.decode.get(query_len)
        if row is None and query_len in self.query_lens:
            return decode_why  # attention refused this length
        row = row or tables.bounded.get(query_len)
        if row is not None:
            return row.oversize
        detail = f"decode of {query_len} tokens a request; graphs: {self._lengths}"
        return Why(Reason.QUERY_LENGTH, detail)


def _plain(num_tokens: int, why: Why) -> Dispatched:
    # index(): a scheduler may count in NumPy, and a descriptor wants whole numbers.
    return Dispatched(NONE, BatchDescriptor(operator.index(num_tokens)), why)
