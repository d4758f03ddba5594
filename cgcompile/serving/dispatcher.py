"""Which graph serves a batch: numbers in; runtime mode, padded descriptor and a reason out.

Plain Python: no torch, no device, no graph. The tables are built once, so that a step costs a few
look-ups and never searches; which graph serves a size is worked out anew when a graph is captured
or refused. Which graphs there are is in ``plan.py``.

The rule a caller keeps: ``uniform_decode`` is stated, never guessed. Prefills of equal length have
the same numbers and run other kernels; :func:`is_uniform_decode` tells them apart.
"""

import logging
import operator
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import BatchError
from cgcompile.modes import AttentionCGSupport, CUDAGraphMode
from cgcompile.reasons import Fallback, Reason
from cgcompile.serving.plan import (
    FULL,
    NONE,
    PIECEWISE,
    Axis,
    Ladders,
    LoraCases,
    Planned,
    Resolution,
    Shapes,
    Variant,
    Variants,
    capture_order,
    resolve_mode,
    shapes_of,
)
from cgcompile.serving.sizes import mode_named
from cgcompile.settings import (
    checked_but,
    is_flag,
    is_whole,
    require,
    require_arguments,
    require_items,
    require_kind,
)


class Dispatched(NamedTuple):
    """What a step runs as.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        descriptor: the key of the graph, padded; for NONE ``BatchDescriptor(num_tokens)``,
            unpadded.
        why: why the step has a lesser mode than the one asked for; None if it has that one.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    why: Fallback | None = None


class Slot:
    """One planned graph: the answer that names it, and what is known of its capture."""

    __slots__ = ("captured", "num_tokens", "ready", "refused", "result", "rows")

    def __init__(self, result: Dispatched) -> None:
        self.result = result
        self.num_tokens = result.descriptor.num_tokens
        self.ready = True  # may be dispatched; the one field that dispatch() reads
        self.captured = False
        self.refused = ""
        self.rows: list[Row] = []  # that it is in

    def settle(self, only_captured: bool) -> None:
        """After a change: whether it may be dispatched, and what serves its sizes if not."""
        ready = self.captured or not (only_captured or self.refused)
        if ready is not self.ready:
            self.ready = ready
            for row in self.rows:
                row.settle()

    def why_not(self) -> Fallback:
        """Why it is not dispatched, if it is not ready."""
        mode, descriptor, _ = self.result
        what = f"{mode.name} {descriptor}"
        detail = f"was refused: {self.refused}" if self.refused else "is planned and not captured"
        return Fallback(Reason.NOT_CAPTURED, f"{what} {detail}")


class _Ladder(NamedTuple):
    """For every number from 0 to the largest size, the index of the first size not below it."""

    shapes: Sequence[BatchDescriptor]
    steps: list[int]
    oversize: Fallback  # made once, not at each step

    @classmethod
    def of(
        cls, shapes: Sequence[BatchDescriptor], what: str, *, by_requests: bool = False
    ) -> "_Ladder":
        """Build the ladder of ascending shapes, by tokens or by requests."""
        sizes = [(shape.num_reqs or 0) if by_requests else shape.num_tokens for shape in shapes]
        steps = [bisect_left(sizes, number) for number in range(sizes[-1] + 1)]
        detail = f"more than {sizes[-1]} {what}: no graph is as large"
        return cls(shapes, steps, Fallback(Reason.OVERSIZE, detail))


class Row:
    """The graphs of one ladder in one variant."""

    __slots__ = ("_serving", "_slots", "_steps", "oversize")

    def __init__(self, ladder: _Ladder, slots: list[Slot]) -> None:
        self._steps = ladder.steps
        self._slots = slots
        self._serving = slots
        self.oversize = ladder.oversize  # why it serves no larger batch
        for slot in slots:
            slot.rows.append(self)

    def find(self, number: int) -> Slot | None:
        """Return the smallest ready graph for ``number`` rows; if no graph is ready, the smallest.

        None above the largest size.
        """
        return self._serving[self._steps[number]] if number < len(self._steps) else None

    def settle(self) -> None:
        """For each size find the first ready graph upward; look-ups see the old list or the new."""
        serving = list(self._slots)
        above: Slot | None = None
        for index in reversed(range(len(serving))):
            if serving[index].ready:
                above = serving[index]
            elif above is not None:
                serving[index] = above
        self._serving = serving


class Tables(NamedTuple):
    """The graphs of one variant, by kind of batch."""

    piecewise: Row | None  # by tokens; None without PIECEWISE graphs
    mixed: Row | None  # FULL graphs for any batch, by tokens; None without
    decode: dict[int, Row]  # FULL graphs for uniform decode: per query length, by requests
    # FULL graphs for other decode: per longest query of the batch, by tokens
    bounded: dict[int, Row]


Slots = dict[Planned, Slot]


def build_tables(
    shapes: Shapes, variants: Mapping[Variant, Variant]
) -> tuple[dict[Variant, Tables], Slots]:
    """Build the tables of each variant, and a slot for every graph, in the order of capture.

    ``variants`` maps each variant to the variant of its PIECEWISE graphs. The latter has a table
    too, without FULL graphs unless it is a key itself.
    """
    slots = {planned: Slot(Dispatched(*planned)) for planned in capture_order(shapes, variants)}
    piecewise = _Ladder.of(shapes.piecewise, "tokens") if shapes.piecewise else None
    mixed = _Ladder.of(shapes.mixed, "tokens") if shapes.mixed else None
    short = "tokens in such short queries"
    bounded = {longest: _Ladder.of(group, short) for longest, group in shapes.bounded.items()}
    decode = {
        query_len: _Ladder.of(group, f"requests of length {query_len}", by_requests=True)
        for query_len, group in shapes.decode.items()
    }

    def row(mode: CUDAGraphMode, variant: Variant, ladder: _Ladder) -> Row:
        return Row(ladder, [slots[mode, variant.of(shape)] for shape in ladder.shapes])

    pieces = {
        variant: row(PIECEWISE, variant, piecewise) if piecewise else None
        for variant in dict.fromkeys(variants.values())
    }
    tables = {variant: Tables(of_pieces, None, {}, {}) for variant, of_pieces in pieces.items()}
    for variant, in_pieces in variants.items():
        tables[variant] = Tables(
            pieces[in_pieces],
            row(FULL, variant, mixed) if mixed else None,
            {query_len: row(FULL, variant, ladder) for query_len, ladder in decode.items()},
            {longest: row(FULL, variant, ladder) for longest, ladder in bounded.items()},
        )
    return tables, slots


def _is_sized(items: Any) -> bool:
    """Whether something has a length; a tensor of one number has none."""
    return isinstance(items, Sized) and getattr(items, "ndim", 1) > 0


def is_uniform_decode(query_lens: Collection[int], is_prefilling: Collection[bool]) -> bool:
    """Whether a batch is uniform decode, as ``dispatch`` understands it.

    Args:
        query_lens: tokens of each request in this step.
        is_prefilling: of each request, whether it still works on its prompt. The last chunk of a
            prompt counts as well, though as short as a decode step: its kernels are others.

    Returns:
        True if there is a request, none is in prefill, and all have the same number of tokens.

    Raises:
        BatchError: the two speak of different numbers of requests.
    """
    for name, items in (("query_lens", query_lens), ("is_prefilling", is_prefilling)):
        require(_is_sized(items), name, "is_uniform_decode", items, "a collection")
    if len(query_lens) != len(is_prefilling):
        raise BatchError.lengths_differ(lengths=len(query_lens), flags=len(is_prefilling))
    try:
        return len(set(query_lens)) == 1 and not any(is_prefilling)
    except (RuntimeError, TypeError):
        values = {"query_lens": query_lens, "is_prefilling": is_prefilling}
        hints = {"query_lens": Collection[int], "is_prefilling": Collection[bool]}
        require_arguments("is_uniform_decode", values, hints)
        raise


# Types of (num_tokens, num_reqs, max_query_len, num_active_loras), and of two flags, that need no
# look at the values: one is asked for at each step.
PLAIN_COUNTS = {
    (int, reqs, query_len, int) for reqs in (int, type(None)) for query_len in (int, type(None))
}
PLAIN_FLAGS = (bool, bool)


def check_numbers(
    num_tokens: Any,
    num_reqs: Any,
    max_query_len: Any,
    num_active_loras: Any = 0,
    uniform_decode: Any = False,
    has_lora: Any = False,
    extra: Any = (),
) -> None:
    """Raise unless what describes a batch is of the right kind; integers of NumPy are."""
    for name, value in (("num_tokens", num_tokens), ("num_active_loras", num_active_loras)):
        if not is_whole(value):
            raise BatchError.field(name=name, value=value, expected="a whole number")
    for name, value in (("num_reqs", num_reqs), ("max_query_len", max_query_len)):
        if value is not None and not is_whole(value):
            raise BatchError.field(name=name, value=value, expected="a whole number or None")
    for name, value in (("uniform_decode", uniform_decode), ("has_lora", has_lora)):
        if not is_flag(value):
            raise BatchError.field(name=name, value=value, expected="bool")
    if not isinstance(extra, tuple):
        raise BatchError.field(
            name="extra", value=extra, expected="a tuple: one hashable value per axis"
        )


def check_empty(num_tokens: int, num_reqs: int | None) -> None:
    """Raise unless a batch for which one of the two is not positive is an empty one."""
    if num_tokens < 0:
        raise BatchError.field(name="num_tokens", value=num_tokens, expected="at least 0")
    if num_reqs is not None and (num_reqs < 0 or (num_tokens and not num_reqs)):
        expected = "at least 1 for a batch with tokens, and never less than 0"
        raise BatchError.field(name="num_reqs", value=num_reqs, expected=expected)


def uniform_numbers(
    num_tokens: int, num_reqs: int | None, max_query_len: int | None, known: Sequence[int]
) -> tuple[int, int]:
    """Query length and requests of a uniform batch; ``known`` lengths help if there is but one."""
    if num_reqs is not None:
        query_len = num_tokens // num_reqs
    elif max_query_len is not None:
        query_len = max_query_len
    elif len(known) == 1:
        query_len = known[0]
    else:
        raise BatchError.which_query_len(num_tokens=num_tokens, known=known)
    reqs = num_tokens // query_len if query_len > 0 else 0
    wrong = max_query_len is not None and max_query_len != query_len
    if wrong or reqs * query_len != num_tokens or (num_reqs is not None and reqs != num_reqs):
        raise BatchError.not_uniform(
            num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=max_query_len
        )
    return query_len, reqs


def allowed_modes(
    valid: Collection[CUDAGraphMode] | None, invalid: Collection[CUDAGraphMode] | None
) -> tuple[bool, bool]:
    """Return whether FULL and whether PIECEWISE is allowed. By identity: enums hash slowly."""
    full = piecewise = valid is None
    for name, modes, allowed in (("valid_modes", valid, True), ("invalid_modes", invalid, False)):
        if modes is None:
            continue
        if type(modes) not in (tuple, set, frozenset, list):
            require_items(name, "dispatch", modes)
        for mode in modes:
            if mode is FULL:
                full = allowed
            elif mode is PIECEWISE:
                piecewise = allowed
            elif mode is not NONE:
                expected = "runtime modes: NONE, PIECEWISE, FULL"
                raise BatchError.field(name=name, value=mode, expected=expected)
    return full, piecewise


log = logging.getLogger(__name__)

_MODE_NONE = Fallback(Reason.MODE_NONE, "the mode of the dispatcher is NONE")
_EMPTY = Fallback(Reason.EMPTY_BATCH, "the batch has no tokens")
_NO_FULL = Fallback(Reason.MODE_EXCLUDED, "the caller excludes FULL for this batch")
_NO_PIECEWISE = Fallback(Reason.MODE_EXCLUDED, "the caller excludes PIECEWISE for this batch")


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
        degraded: what was lost on the way, as ``Fallback``; empty if nothing.
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
        resolution = resolve_mode(
            mode,
            support,
            query_lens=ladders.decode,
            bounded=bool(ladders.varlen),
            piecewise=piecewise,
            support_why=support_why,
        )
        for why in resolution.whys:
            log.warning("CUDA graph mode %s becomes %s: %s", mode.name, resolution.mode.name, why)
        self.asked = mode
        self.mode = resolution.mode
        self.degraded = resolution.whys
        self.limits = ladders.limits
        self._resolution = resolution
        self.query_lens = tuple(ladders.decode)
        self._max_num_reqs = max_num_reqs
        too_many = f"more than max_num_reqs = {max_num_reqs} requests"
        self._too_many_reqs = Fallback(Reason.OVERSIZE, too_many)
        self._mixed_why = self._why_mixed(resolution)
        self._variants = Variants(LoraCases() if lora is None else lora, axes)
        self.axes = self._variants.axes
        variants = {key: self._variants.in_pieces(key) for key in self._variants.all()}
        self._tables, self._slots = build_tables(shapes_of(resolution, ladders), variants)
        first = self._tables[next(iter(variants))]  # all variants have the same lengths
        up_to = [f"up to {max(first.bounded)}"] if first.bounded else []
        self._lengths = ", ".join([*map(str, first.decode), *up_to])
        # Of batches without LoRA; axes have to be resolved for each batch.
        plain = None if self.axes else self._variants.serving(False, 0, ())[0]
        self._plain = None if plain is None else self._tables[plain]
        self.only_captured = only_captured

    @staticmethod
    def _why_mixed(resolution: Resolution) -> Fallback | None:
        """Return why a batch other than uniform decode has a lesser mode; None if it has not."""
        mode, why = resolution.mode, resolution.mixed_why
        if mode is NONE:
            return _MODE_NONE
        if why is not None or mode is not CUDAGraphMode.FULL_DECODE_ONLY:
            return why
        return Fallback(Reason.MIXED_BATCH, f"mode {mode.name} has graphs for decode alone")

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
        variant, unlisted = self._variants.serving(has_lora, num_active_loras, extra)
        if variant is None:
            return None
        tables, full = self._tables[variant], None
        if unlisted is None:
            full = self._find_full(tables, num_tokens, None, None, uniform_decode)
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
            variant, unlisted = self._variants.serving(has_lora, num_active_loras, extra)
            if variant is None or unlisted is not None:
                return self._without_full(variant, unlisted, num_tokens, piecewise)
            tables = self._tables[variant]
        slot = self._find_full(tables, num_tokens, num_reqs, max_query_len, uniform_decode)
        why: Fallback | None
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
        self, variant: Variant | None, why: Fallback | None, num_tokens: int, piecewise: bool
    ) -> Dispatched:
        """Dispatch a batch whose adapters and axes no FULL graph has."""
        assert why is not None
        if self.mode is NONE:
            return _plain(num_tokens, _MODE_NONE)
        row = self._tables[variant].piecewise if variant is not None and piecewise else None
        slot = row.find(num_tokens) if row is not None else None
        if slot is None or not slot.ready:
            return _plain(num_tokens, why)
        return Dispatched(PIECEWISE, slot.result.descriptor, why)

    def _find_full(
        self,
        tables: Tables,
        num_tokens: int,
        num_reqs: int | None,
        max_query_len: int | None,
        uniform_decode: bool,
    ) -> Slot | None:
        """The smallest ready FULL graph that serves the batch, else any; uniform ones first."""
        exact = None
        if uniform_decode and (tables.decode or tables.bounded):
            max_query_len, reqs = uniform_numbers(
                num_tokens, num_reqs, max_query_len, self.query_lens
            )
            row = tables.decode.get(max_query_len)
            exact = row.find(reqs) if row is not None else None
        if tables.mixed is None and (max_query_len is None or not tables.bounded):
            return exact
        # A graph of n tokens has min(n, max_num_reqs) requests, of which each batch needs enough.
        rows = num_tokens
        if num_reqs is not None:
            if num_reqs > self._max_num_reqs:
                return exact
            rows = max(num_tokens, num_reqs)
        if tables.mixed is not None:
            return tables.mixed.find(rows)
        row = tables.bounded.get(max_query_len or 0)
        other = row.find(rows) if row is not None else None
        if other is None or exact is None:
            return exact or other
        if exact.ready is not other.ready:
            return exact if exact.ready else other
        return exact if exact.num_tokens <= other.num_tokens else other

    def _why_not_full(
        self,
        tables: Tables,
        num_tokens: int,
        num_reqs: int | None,
        max_query_len: int | None,
        uniform_decode: bool,
    ) -> Fallback | None:
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
        return Fallback(Reason.QUERY_LENGTH, detail)


def _plain(num_tokens: int, why: Fallback) -> Dispatched:
    # index(): a scheduler may count in NumPy, and a descriptor wants whole numbers.
    return Dispatched(NONE, BatchDescriptor(operator.index(num_tokens)), why)
