"""Which graph serves a batch: numbers in; runtime mode, padded descriptor and a reason out.

Plain Python: no torch, no device, no graph. The tables are built once, so that a step costs a few
look-ups and never searches; which graph serves a size is recomputed when a graph is captured or
refused. ``plan.py`` lists the graphs.

The rule a caller keeps: ``uniform_decode`` is stated, never guessed. Prefills of equal length have
the same numbers and run other kernels; :func:`is_uniform_decode` tells them apart.
"""

import itertools
import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple, final

from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import BatchError, ConfigError
from cgcompile.modes import AttentionCGSupport, CUDAGraphMode
from cgcompile.reasons import Fallback, Reason
from cgcompile.serving.plan import (
    FULL,
    NONE,
    PIECEWISE,
    Axis,
    LoraCases,
    Planned,
    Shapes,
    Variant,
    capture_order,
    checked_ladders,
    decode_ladder,
    in_variant,
    resolve_mode,
    shapes_of,
    variant_in_pieces,
    variants_of,
    whole_numbers,
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
    takes_earlier,
)

log = logging.getLogger(__name__)

_MODE_NONE = Fallback(Reason.MODE_NONE, "the mode of the dispatcher is NONE")
_EMPTY = Fallback(Reason.EMPTY_BATCH, "the batch has no tokens")
_NO_FULL = Fallback(Reason.MODE_EXCLUDED, "the caller excludes FULL for this batch")
_NO_PIECEWISE = Fallback(Reason.MODE_EXCLUDED, "the caller excludes PIECEWISE for this batch")


class Dispatched(NamedTuple):
    """What a step runs as.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        descriptor: the key of the graph, padded; for NONE ``BatchDescriptor(num_tokens)``,
            unpadded.
        why: why the step has a lesser mode than the requested one; None if it has that one.

    Example:
        >>> dispatcher = cgcompile.serving.CudagraphDispatcher("PIECEWISE", [4, 8], max_num_reqs=8)
        >>> dispatcher.dispatch(30, num_reqs=1).why.reason.value
        'oversize'
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    why: Fallback | None = None


# ---------------------------------------------------------------- tables


@final
class PlannedGraph:
    """One planned graph: its dispatch result, and whether it was captured or refused."""

    __slots__ = ("captured", "num_tokens", "ready", "refused", "result", "tables")

    def __init__(self, result: Dispatched) -> None:
        self.result = result
        self.num_tokens = result.descriptor.num_tokens
        self.ready = True  # may be dispatched; the only field that dispatch() reads
        self.captured = False
        self.refused = ""
        self.tables: list[SizeTable] = []  # tables that contain the graph

    def settle(self, only_captured: bool) -> None:
        """Recompute whether the graph is ready, and which graphs its tables serve."""
        ready = self.captured or not (only_captured or self.refused)
        if ready is not self.ready:
            self.ready = ready
            for table in self.tables:
                table.settle()

    def why_not(self) -> Fallback:
        """Return why the graph is not dispatched, if it is not ready."""
        mode, descriptor, _ = self.result
        detail = f"was refused: {self.refused}" if self.refused else "is planned and not captured"
        return Fallback(Reason.NOT_CAPTURED, f"{mode.name} {descriptor} {detail}")


class SizeTable:
    """The graphs of one ladder of sizes and one variant."""

    __slots__ = ("_graphs", "_serving", "_steps", "oversize")

    def __init__(self, graphs: list[PlannedGraph], sizes: list[int], what: str) -> None:
        # for every number up to the largest size, the index of the first size not below it
        self._steps = [bisect_left(sizes, number) for number in range(sizes[-1] + 1)]
        self._graphs = self._serving = graphs
        detail = f"more than {sizes[-1]} {what}: no graph is as large"
        self.oversize = Fallback(Reason.OVERSIZE, detail)
        for graph in graphs:
            graph.tables.append(self)

    def find(self, number: int) -> PlannedGraph | None:
        """Return the smallest ready graph for ``number`` rows, else the smallest; or None."""
        return self._serving[self._steps[number]] if number < len(self._steps) else None

    def settle(self) -> None:
        """Find for each size the first ready graph upward; look-ups see the old list or the new."""
        serving = list(self._graphs)
        above: PlannedGraph | None = None
        for index in reversed(range(len(serving))):
            if serving[index].ready:
                above = serving[index]
            elif above is not None:
                serving[index] = above
        self._serving = serving


class Tables(NamedTuple):
    """The graphs of one variant, by kind of batch."""

    piecewise: SizeTable | None  # sizes in tokens; None without PIECEWISE graphs
    mixed: SizeTable | None  # FULL graphs for any batch, by tokens; None without
    decode: dict[int, SizeTable]  # FULL graphs for uniform decode: per query length, by requests
    # FULL graphs for other decode: per longest query of the batch, by tokens
    bounded: dict[int, SizeTable]


def build_tables(
    shapes: Shapes, variants: Mapping[Variant, Variant]
) -> tuple[dict[Variant, Tables], dict[Planned, PlannedGraph]]:
    """Build the tables of each variant, and a record of every graph, in the order of capture."""
    graphs = {
        planned: PlannedGraph(Dispatched(*planned)) for planned in capture_order(shapes, variants)
    }

    def table(
        mode: CUDAGraphMode, variant: Variant, group: Sequence[BatchDescriptor], what: str
    ) -> SizeTable | None:
        if not group:
            return None
        sizes = [shape.num_reqs or 0 if shape.uniform else shape.num_tokens for shape in group]
        return SizeTable([graphs[mode, in_variant(shape, variant)] for shape in group], sizes, what)

    def tables_by_length(
        variant: Variant, groups: dict[int, list[BatchDescriptor]], what: str
    ) -> Any:
        return {key: table(FULL, variant, groups[key], what.format(key)) for key in groups}

    pieces = {
        variant: table(PIECEWISE, variant, shapes.piecewise, "tokens")
        for variant in dict.fromkeys(variants.values())
    }
    tables = {variant: Tables(pieces[variant], None, {}, {}) for variant in pieces}
    for variant, in_pieces in variants.items():
        tables[variant] = Tables(
            pieces[in_pieces],
            table(FULL, variant, shapes.mixed, "tokens"),
            tables_by_length(variant, shapes.decode, "requests of length {}"),
            tables_by_length(variant, shapes.bounded, "tokens in such short queries"),
        )
    return tables, graphs


# ---------------------------------------------------------------- the numbers of a batch


def is_uniform_decode(query_lens: Collection[int], is_prefilling: Collection[bool]) -> bool:
    """Return whether a batch is uniform decode in the sense of ``dispatch``.

    Args:
        query_lens: tokens of each request in this step.
        is_prefilling: of each request, whether it still processes its prompt. The last chunk of a
            prompt counts as well, though as short as a decode step: it runs other kernels.

    Returns:
        True if there is a request, no request is in prefill, and all have the same number of
        tokens.

    Raises:
        BatchError: the two have different lengths.

    Example:
        >>> cgcompile.serving.is_uniform_decode([1, 1, 1], [False, False, False])
        True
    """
    for name, items in (("query_lens", query_lens), ("is_prefilling", is_prefilling)):
        # a tensor of one number has no length
        sized = isinstance(items, Sized) and getattr(items, "ndim", 1) > 0
        require(sized, name, "is_uniform_decode", items, "a collection")
    if len(query_lens) != len(is_prefilling):
        raise BatchError.lengths_differ(lengths=len(query_lens), flags=len(is_prefilling))
    try:
        return len(set(query_lens)) == 1 and not any(is_prefilling)
    except (RuntimeError, TypeError):
        values = {"query_lens": query_lens, "is_prefilling": is_prefilling}
        hints = {"query_lens": Collection[int], "is_prefilling": Collection[bool]}
        require_arguments("is_uniform_decode", values, hints)
        raise


# Types of (num_tokens, num_reqs, max_query_len, num_active_loras), and of two flags, whose values
# dispatch() need not check at each step.
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
    """Raise unless the numbers of a batch have the right types; NumPy integers are accepted."""
    counts = (
        ("num_tokens", num_tokens, False),
        ("num_active_loras", num_active_loras, False),
        ("num_reqs", num_reqs, True),
        ("max_query_len", max_query_len, True),
    )
    for name, value, optional in counts:
        if not is_whole(value) and not (optional and value is None):
            expected = "a whole number" + (" or None" if optional else "")
            raise BatchError.bad_value(where="dispatch", name=name, value=value, expected=expected)
    for name, value in (("uniform_decode", uniform_decode), ("has_lora", has_lora)):
        if not is_flag(value):
            raise BatchError.bad_value(where="dispatch", name=name, value=value, expected="bool")
    if not isinstance(extra, tuple):
        expected = "a tuple: one hashable value per axis"
        raise BatchError.bad_value(where="dispatch", name="extra", value=extra, expected=expected)


def check_empty(num_tokens: int, num_reqs: int | None) -> None:
    """Raise if a number is negative, or a batch has tokens and no requests."""
    if num_tokens < 0:
        raise BatchError.bad_value(
            where="dispatch", name="num_tokens", value=num_tokens, expected="at least 0"
        )
    if num_reqs is not None and (num_reqs < 0 or (num_tokens and not num_reqs)):
        expected = "at least 1 for a batch with tokens, and never less than 0"
        raise BatchError.bad_value(
            where="dispatch", name="num_reqs", value=num_reqs, expected=expected
        )


def uniform_numbers(
    num_tokens: int, num_reqs: int | None, max_query_len: int | None, known: Sequence[int]
) -> tuple[int, int]:
    """Return query length and requests of a uniform batch; a single ``known`` length is implied."""
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
                raise BatchError.bad_value(
                    where="dispatch", name=name, value=mode, expected=expected
                )
    return full, piecewise


# ---------------------------------------------------------------- the dispatcher


def _find_piecewise(
    table: SizeTable, num_tokens: int, allowed: bool, why: Fallback | None, listed: bool
) -> Dispatched:
    """Return the PIECEWISE graph of a batch, or none; ``why`` it has no FULL graph."""
    graph = table.find(num_tokens)
    if allowed and graph is not None and graph.ready:
        return graph.result if why is None else Dispatched(PIECEWISE, graph.result.descriptor, why)
    if listed:
        lesser = graph.why_not() if graph is not None and allowed else _NO_PIECEWISE
        why = table.oversize if graph is None else lesser
    assert why is not None  # an unlisted variant is a reason
    return _plain(num_tokens, why)


def _divided(axes: Iterable[Axis | LoraCases]) -> tuple[LoraCases, tuple[Axis, ...]]:
    """Divide axes into the LoRA cases, of which there is at most one, and the others."""
    where = "CudagraphDispatcher"
    axes = (axes,) if isinstance(axes, (Axis, LoraCases)) else axes
    require_items("axes", where, axes)
    listed = tuple(axes)
    cases = [axis for axis in listed if isinstance(axis, LoraCases)]
    others = tuple(axis for axis in listed if not isinstance(axis, LoraCases))
    require_items("axes", where, others, Axis)
    require(len(cases) <= 1, "axes", where, listed, "at most one LoraCases")
    return cases[0] if cases else LoraCases(), others


def _move_decode_sizes(arguments: dict[str, Any], sizes: Any) -> None:
    if sizes is None:
        return
    require_kind("decode_sizes", "CudagraphDispatcher", sizes, Mapping)
    lengths = arguments.get("query_lens")
    if lengths is not None and {*lengths} != {*sizes}:
        raise ConfigError.impossible(
            what="decode_sizes together with other query_lens",
            because="both set the sizes of uniform decode",
            instead="Give query_lens={length: sizes} alone.",
        )
    arguments["query_lens"] = sizes


def _move_decode_num_reqs(arguments: dict[str, Any], counts: Any) -> None:
    """Make the sizes of each query length: these requests, and the most that fits."""
    if counts is None:
        return
    counts, lengths = whole_numbers("decode_num_reqs", counts), arguments.get("query_lens")
    if isinstance(lengths, Mapping):
        raise ConfigError.impossible(
            what="decode_num_reqs together with decode_sizes",
            because="both set the sizes of uniform decode",
            instead="Give query_lens={length: sizes} alone.",
        )
    lengths = whole_numbers("query_lens", (1,) if lengths is None else lengths)
    (reqs,) = whole_numbers("max_num_reqs", (arguments["max_num_reqs"],))
    arguments["sizes"] = sizes = whole_numbers("sizes", arguments["sizes"])
    tokens = arguments.get("max_num_tokens")
    if tokens is None:
        varlen = (arguments.get("varlen_decode_sizes") or {}).values()
        largest = [length * min(counts[-1], reqs) for length in lengths if counts]
        tokens = max([*sizes, *largest, *itertools.chain(*varlen)], default=1)
    most = {length: min(reqs, tokens // length) for length in lengths}
    if all(most.values()):  # else the constructor refuses the length
        lengths = {length: decode_ladder(length, most[length], counts) for length in lengths}
    arguments["query_lens"] = lengths


def _move_lora(arguments: dict[str, Any], lora: LoraCases | None) -> None:
    require_kind("lora", "CudagraphDispatcher", lora, LoraCases, maybe=True)
    axes = arguments.get("axes", ())
    axes = (axes,) if isinstance(axes, Axis) else axes
    require_items("axes", "CudagraphDispatcher", axes)
    arguments["axes"] = axes if lora is None else (*axes, lora)


def _finish_only_captured(
    _: dict[str, Any], only_captured: bool
) -> Callable[["CudagraphDispatcher"], None]:
    return lambda dispatcher: setattr(dispatcher, "only_captured", only_captured)


class CudagraphDispatcher:
    """Choose the graph of each step, from the numbers of its batch.

    :meth:`dispatch` returns the first of these that exists:

    1. FULL, with the smallest ready graph that serves the batch. A graph for uniform decode serves
       only uniform decode of its query length; a graph with a bound serves batches whose
       ``max_query_len`` is given and within the bound.
    2. PIECEWISE, with the smallest ready graph of at least this many tokens.
    3. NONE, with the unpadded number of tokens, and the reason.

    A graph is ready once it is planned, or captured if ``only_captured``, and was not refused. The
    next larger graph takes the place of one that is not.

    After construction only :meth:`captured`, :meth:`refused`, :meth:`forget` and ``only_captured``
    change it; each is safe beside ``dispatch`` in other threads, which then sees the graph as it
    was before or after.

    Args:
        mode: the wanted mode, or its name; it is resolved down to what attention allows.
        sizes: capture sizes in tokens, of PIECEWISE graphs and of FULL graphs for any batch; those
            of uniform decode follow from them unless they are given.
        max_num_reqs: the most requests in a batch.
        max_num_tokens: the most tokens in a padded batch; left out, the largest size of all.
        query_lens: tokens per request of uniform decode (1 + k with k draft tokens); left out, 1.
            Sizes are as many requests as fit into each of ``sizes``, and the most that fits. A
            mapping has the sizes of each length: multiples of it in tokens, such as those that
            :func:`decode_sizes` returns, which need fewer graphs for long queries.
        varlen_decode_sizes: per bound, sizes in tokens of FULL graphs for batches whose longest
            query is within the bound.
        axes: further axes of the key: a :class:`LoraCases`, with the numbers of active LoRA
            adapters that have graphs, and each :class:`Axis`; a batch gives the values of these as
            ``extra``, in this order.
        support: how far the least capable attention of the model goes into a FULL graph.
        piecewise: the model can run in pieces: it is compiled piecewise, or breakable.

    Attributes:
        mode: the mode after resolution.
        asked: the wanted mode.
        degraded: the reasons of a lesser mode, as ``Fallback``; empty if it is the wanted one.
        limits: has ``max_num_reqs`` and ``max_num_tokens``.
        query_lens: the lengths of uniform decode that have graphs, or would have if attention
            allowed them.
        axes: each :class:`Axis`, in the order of ``extra``.
        only_captured: dispatch only what :meth:`captured` has named; for after a bulk capture.
            False until it is set: a planned graph is dispatched, so that the step captures it.

    Raises:
        ConfigError: no graph is possible in ``mode``, or a number is out of range.

    Example:
        >>> dispatcher = cgcompile.serving.CudagraphDispatcher("PIECEWISE", [4, 8], max_num_reqs=8)
        >>> dispatched = dispatcher.dispatch(3, num_reqs=2)
        >>> dispatched.mode.name, dispatched.descriptor.num_tokens
        ('PIECEWISE', 4)
    """

    @takes_earlier(
        decode_sizes=("give them as query_lens", None, _move_decode_sizes),
        decode_num_reqs=("use query_lens={length: decode_sizes(...)}", None, _move_decode_num_reqs),
        lora=("give the LoraCases among axes", None, _move_lora),
        only_captured=("set that attribute afterwards", False, _finish_only_captured),
        support_why=("leave it out: messages name the support", "", lambda arguments, why: None),
    )
    @checked_but("sizes", "query_lens", "varlen_decode_sizes", "axes")
    def __init__(
        self,
        mode: CUDAGraphMode | str,
        sizes: Iterable[int],
        *,
        max_num_reqs: int,
        max_num_tokens: int | None = None,
        query_lens: Iterable[int] | Mapping[int, Iterable[int]] | None = None,
        varlen_decode_sizes: Mapping[int, Iterable[int]] | None = None,
        axes: Iterable[Axis | LoraCases] = (),
        support: AttentionCGSupport = AttentionCGSupport.NEVER,
        piecewise: bool = True,
    ) -> None:
        where = "CudagraphDispatcher"
        self.asked = mode_named(mode, where)
        self._lora, self.axes = _divided(axes)
        require_kind("piecewise", where, piecewise, bool)
        ladders = checked_ladders(
            sizes,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            query_lens=(1,) if query_lens is None else query_lens,
            varlen_decode_sizes=varlen_decode_sizes,
        )
        self.limits, self.query_lens = ladders, tuple(ladders.decode)
        resolution = resolve_mode(
            self.asked,
            support,
            query_lens=self.query_lens,
            bounded=bool(ladders.varlen),
            piecewise=piecewise,
        )
        self.mode, self.degraded = resolution.mode, resolution.whys
        change = "" if self.mode is self.asked else f" becomes {self.mode.name}"
        for why in self.degraded:
            log.warning("CUDA graph mode %s%s: %s", self.asked.name, change, why)
        variants = variants_of(self._lora, self.axes)
        self._tables, self._graphs = build_tables(shapes_of(resolution, ladders), variants)
        self._max_num_reqs = max_num_reqs
        # Of batches without LoRA; axes have to be resolved for each batch.
        self._plain = None if self.axes else self._serving(False, 0, ())[0]
        self._set_reasons(resolution.mixed_why, resolution.decode_why)
        self.only_captured = False

    def summary(self) -> str:
        """Return the mode, and how many of the planned graphs exist."""
        captured = sum(graph.captured for graph in self._graphs.values())
        return f"{self.mode.name}, {captured} of {len(self._graphs)} planned graphs captured"

    def __repr__(self) -> str:
        return f"<CudagraphDispatcher: {self.summary()}>"

    def _set_reasons(self, mixed_why: Fallback | None, decode_why: Fallback | None) -> None:
        """Prepare the reasons of lesser modes, so that a step does not build them."""
        if self.mode is NONE:
            mixed_why = decode_why = _MODE_NONE
        elif mixed_why is None and self.mode is CUDAGraphMode.FULL_DECODE_ONLY:
            detail = f"mode {self.mode.name} has graphs for decode alone"
            mixed_why = Fallback(Reason.MIXED_BATCH, detail)
        self._mixed_why, self._decode_why = mixed_why, decode_why
        detail = f"more than max_num_reqs = {self._max_num_reqs} requests"
        self._too_many = Fallback(Reason.OVERSIZE, detail)
        tables = next(reversed(self._tables.values()))
        up_to = [f"up to {max(tables.bounded)}"] if tables.bounded else []
        self._lengths = ", ".join([*map(str, tables.decode), *up_to])

    @property
    def only_captured(self) -> bool:
        """Whether only captured graphs are dispatched. May be set."""
        return self._only_captured

    @only_captured.setter
    def only_captured(self, value: bool) -> None:
        require_kind("only_captured", "CudagraphDispatcher", value, bool)
        self._only_captured = value
        for graph in self._graphs.values():
            graph.settle(value)

    def plan(self) -> tuple[Planned, ...]:
        """Return what to capture, in order: PIECEWISE, then FULL, each largest first.

        PIECEWISE comes first because its intermediate results are larger: where both share a pool,
        FULL graphs then fit into its memory. Empty in mode NONE.
        """
        return tuple(self._graphs)

    @checked_but("descriptor")
    def captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Note that a planned graph exists.

        Raises:
            BatchError: it is not planned.
        """
        self._note(self._planned(mode, descriptor), captured=True)

    @checked_but("descriptor")
    def refused(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, why: str) -> None:
        """Note that a planned graph cannot be captured: it is not dispatched, captured or not.

        Args:
            mode: FULL or PIECEWISE.
            descriptor: the key, from :meth:`plan`.
            why: the cause; it becomes the detail of the reason.

        Raises:
            BatchError: it is not planned.
        """
        self._note(self._planned(mode, descriptor), refused=why or "refused")

    def forget(self) -> None:
        """Note that no graph exists any more, and that none is refused: after a release."""
        for graph in self._graphs.values():
            self._note(graph)

    def _note(self, graph: PlannedGraph, captured: bool = False, refused: str = "") -> None:
        graph.captured, graph.refused = captured, refused
        graph.settle(self._only_captured)

    def is_captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """Return whether :meth:`captured` has named a graph; False if it is not planned."""
        if type(mode) is not CUDAGraphMode or type(descriptor) is not BatchDescriptor:
            require_kind("mode", "is_captured", mode, CUDAGraphMode)
            require_kind("descriptor", "is_captured", descriptor, BatchDescriptor)
        graph = self._graphs.get((mode, descriptor))
        return graph is not None and graph.captured

    def is_ready(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """Return whether a planned graph is dispatched: captured, or captured by its first step."""
        graph = self._graphs.get((mode, descriptor))
        return graph is not None and graph.ready

    def _planned(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> PlannedGraph:
        known = isinstance(descriptor, BatchDescriptor)
        graph = self._graphs.get((mode, descriptor)) if known else None
        if graph is None:
            raise BatchError.not_planned(
                mode=getattr(mode, "name", str(mode)), descriptor=str(descriptor)
            )
        return graph

    def planned_size(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> int | None:
        """Return the size to which a batch will be padded; None if no graph is planned for it.

        A graph that is ready, or that may still be captured, counts; a refused one does not. The
        arguments are those of :meth:`dispatch`.

        Raises:
            BatchError: the numbers contradict each other.
        """
        check_numbers(num_tokens, None, None, num_active_loras, uniform_decode, has_lora, extra)
        if num_tokens <= 0:
            check_empty(num_tokens, None)
            return None
        tables, unlisted = self._serving(has_lora, num_active_loras, extra)
        if tables is None:
            return None
        candidates: list[Any] = []
        if unlisted is None:
            candidates.append(self._find_full(tables, num_tokens, None, None, uniform_decode))
        if tables.piecewise is not None:
            candidates.append(tables.piecewise.find(num_tokens))
        graphs = [
            graph for graph in candidates if isinstance(graph, PlannedGraph) and not graph.refused
        ]
        graphs.sort(key=lambda graph: not graph.ready)  # stable: FULL first
        return graphs[0].num_tokens if graphs else None

    def _serving(
        self, has_lora: bool, active: int, extra: tuple[Any, ...]
    ) -> tuple[Tables | None, Fallback | None]:
        """Return the tables that serve a batch, and why it has no FULL graph, or no graph."""
        loras = self._lora.count_for(has_lora, active)
        if loras is None:
            limit = max(self._lora.counts, default=0)
            detail = f"{active or 'some'} active LoRA adapters; graphs have at most {limit}"
            return None, Fallback(Reason.UNLISTED_VARIANT, detail)
        if type(extra) is not tuple or len(extra) != len(self.axes):
            raise self._bad_axes(extra)
        values, fallback = [], None
        for axis, value in zip(self.axes, extra, strict=True):
            try:
                values.append(axis.value_for(value))
            except LookupError:
                listed = ", ".join(map(repr, axis.values))
                detail = f"axis {axis.name!r} is {value!r}; graphs have {listed}"
                fallback = Fallback(Reason.UNLISTED_VARIANT, detail)
                if not axis.full_only:
                    return None, fallback
                values.append(None)
            except TypeError:
                raise self._bad_axes(extra) from None
        variant: Variant = loras, tuple(values)
        if fallback is not None:
            variant = variant_in_pieces(variant, self.axes)
        return self._tables[variant], fallback

    def _bad_axes(self, extra: object) -> BatchError:
        return BatchError.axes(extra=extra, names=[axis.name for axis in self.axes])

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
        """Choose the graph of one step. All numbers are those of the unpadded batch.

        Args:
            num_tokens: rows of the batch.
            num_reqs: its requests; None if unknown, and then taken to be within ``max_num_reqs``.
            max_query_len: its longest query; None if unknown, and then no graph with a bound
                serves it. Leave it out where a batch has prefills that need other kernels.
            uniform_decode: each request decodes, and all have the same number of tokens.
            has_lora: LoRA adapters are active.
            num_active_loras: how many; 0 with ``has_lora``: not counted.
            extra: the value of each axis, in the order of ``axes``.
            valid_modes: modes this step may run in; None for all. NONE is always allowed.
            invalid_modes: modes that it may not run in. Neither collection is changed.

        Returns:
            Mode, padded descriptor and, where the mode is less than the requested one, the reason.

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
        tables, unlisted = self._plain, None
        if tables is None or has_lora or num_active_loras or extra:
            tables, unlisted = self._serving(has_lora, num_active_loras, extra)
        if unlisted is not None or tables is None:
            why = _MODE_NONE if self.mode is NONE else unlisted
        else:
            graph = self._find_full(tables, num_tokens, num_reqs, max_query_len, uniform_decode)
            if type(graph) is PlannedGraph:  # a call less than isinstance()
                if full and graph.ready:
                    return graph.result
                why = graph.why_not() if full else _NO_FULL
            else:
                why = graph
        table = None if tables is None else tables.piecewise
        if table is None:
            assert why is not None  # a FULL graph was requested, as there are no PIECEWISE ones
            return _plain(num_tokens, why)
        return _find_piecewise(table, num_tokens, piecewise, why, unlisted is None)

    def _find_full(
        self,
        tables: Tables,
        num_tokens: int,
        num_reqs: int | None,
        max_query_len: int | None,
        uniform_decode: bool,
    ) -> PlannedGraph | Fallback | None:
        """Return the smallest ready FULL graph that serves a batch, else any; or why none does."""
        # Of one size a graph for uniform decode comes first. None: no FULL graph was requested.
        # A graph of n tokens has min(n, max_num_reqs) requests, of which each batch needs enough.
        few = num_reqs is None or num_reqs <= self._max_num_reqs
        rows = num_tokens if num_reqs is None or num_reqs < num_tokens else num_reqs
        if tables.mixed is not None:
            return (tables.mixed.find(rows) or tables.mixed.oversize) if few else self._too_many
        if not uniform_decode:
            bounded = tables.bounded.get(max_query_len or 0) if few and tables.bounded else None
            return (None if bounded is None else bounded.find(rows)) or self._mixed_why
        if not (tables.decode or tables.bounded):
            return self._decode_why
        length, reqs = uniform_numbers(num_tokens, num_reqs, max_query_len, self.query_lens)
        table = tables.decode.get(length)
        bounded = tables.bounded.get(length) if tables.bounded else None
        exact = None if table is None else table.find(reqs)
        other = None if bounded is None or not few else bounded.find(rows)
        if exact is not None and other is not None:
            if exact.ready is not other.ready:
                return exact if exact.ready else other
            return exact if exact.num_tokens <= other.num_tokens else other
        if exact is not None or other is not None:
            return exact or other
        if table is None and length in self.query_lens:
            return self._decode_why  # attention does not support this length
        table = table or bounded
        if table is not None:
            return table.oversize
        detail = f"decode of {length} tokens a request; graphs: {self._lengths}"
        return Fallback(Reason.QUERY_LENGTH, detail)


def _plain(num_tokens: int, why: Fallback) -> Dispatched:
    # index(): a scheduler may count in NumPy, and a descriptor needs an int
    return Dispatched(NONE, BatchDescriptor(operator.index(num_tokens)), why)
