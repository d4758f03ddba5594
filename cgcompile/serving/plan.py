"""Which graphs there are: the mode that attention allows, times sizes, LoRA cases and axes.

Plain Python without side effects: numbers in, descriptors out. A *variant* is one combination of a
LoRA case and values of the axes; a *shape* is a descriptor without its variant. Every shape is
captured once per variant. A FULL graph of n tokens has min(n, max_num_reqs) requests, a uniform one
n / q, because kernels are planned for an exact number of requests.
"""

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cgcompile.descriptor import BatchDescriptor, allows_full
from cgcompile.errors import BatchError, ConfigError
from cgcompile.modes import AttentionCGSupport, CUDAGraphMode
from cgcompile.reasons import Fallback, Reason
from cgcompile.settings import (
    LARGEST_TABLE,
    is_flag,
    is_whole,
    require,
    require_items,
    require_kind,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL

Planned = tuple[CUDAGraphMode, BatchDescriptor]
Variant = tuple[int, tuple[Any, ...]]  # active adapters, 0 for "without LoRA"; a value per axis

_WHERE = "CudagraphDispatcher"


# ---------------------------------------------------------------- LoRA cases and axes


@dataclass(frozen=True)
class LoraCases:
    """The numbers of active LoRA adapters that have graphs; by default there are none.

    Attributes:
        counts: numbers of active adapters that have graphs; a batch takes the next one that is not
            smaller. A batch that does not count its adapters (0 with ``has_lora``) takes the
            largest.
        without: batches without LoRA have separate graphs. If not, they take the graphs of the
            smallest count, whose kernels must then support no adapter at all.

    Raises:
        ConfigError: a count below 1; or no count, and no graphs without LoRA either.

    Example:
        >>> dispatcher = cgcompile.serving.CudagraphDispatcher(
        ...     "PIECEWISE", [8], max_num_reqs=8, axes=[cgcompile.serving.LoraCases((1, 4))]
        ... )
        >>> batch = dispatcher.dispatch(8, num_reqs=4, has_lora=True, num_active_loras=3)
        >>> batch.descriptor.num_active_loras
        4
    """

    counts: tuple[int, ...] = ()
    without: bool = True

    def __post_init__(self) -> None:
        counts = whole_numbers("lora.counts", self.counts)
        require_kind("lora.without", "LoraCases", self.without, bool)
        object.__setattr__(self, "counts", counts)
        if not counts and not self.without:
            raise ConfigError.impossible(
                what="LoraCases without counts and without=False",
                because="it leaves no batch that has a graph",
                instead="List counts, or take LoraCases().",
            )

    def listed(self) -> tuple[int, ...]:
        """Return the numbers to capture, 0 for "without LoRA"."""
        return (0, *self.counts) if self.without else self.counts

    def count_for(self, has_lora: bool, active: int) -> int | None:
        """Return the captured number that serves a batch, 0 for "without LoRA"; or None.

        Raises:
            BatchError: active adapters without LoRA, or fewer than 0.
        """
        if not is_flag(has_lora):
            raise BatchError.bad_value(
                where="dispatch", name="has_lora", value=has_lora, expected="bool"
            )
        if not is_whole(active):
            raise BatchError.bad_value(
                where="dispatch", name="num_active_loras", value=active, expected="a whole number"
            )
        if active < 0 or (active and not has_lora):
            expected = "at least 0, and 0 where has_lora is False"
            raise BatchError.bad_value(
                where="dispatch", name="num_active_loras", value=active, expected=expected
            )
        if not has_lora and self.without:
            return 0
        if has_lora and not active:
            return self.counts[-1] if self.counts else None
        index = bisect_left(self.counts, active)
        return self.counts[index] if index < len(self.counts) else None


@dataclass(frozen=True)
class Axis:
    """A further axis of the graphs' key: one value of ``extra``, at the index of this axis.

    Attributes:
        name: what messages call it.
        values: what graphs are captured for; hashable. For ``"pad_up"`` they have an order.
        rule: ``"exact"``: a batch takes graphs of its own value alone. ``"pad_up"``: of the next
            listed value that is not smaller (a bound: the graph supports less). ``"ignored"``: of
            any; the descriptor has None at this index, and ``values`` stays empty.
        full_only: the axis concerns what is outside of pieces, such as a kernel of attention:
            PIECEWISE graphs serve every value, listed or not, and have None at this index.

    Raises:
        ConfigError: values that do not match the rule.

    Example:
        >>> axis = cgcompile.serving.Axis("max_seqlen", (1024, 4096), "pad_up")
        >>> dispatcher = cgcompile.serving.CudagraphDispatcher(
        ...     "PIECEWISE", [8], max_num_reqs=8, axes=(axis,)
        ... )
        >>> dispatcher.dispatch(5, num_reqs=1, extra=(2000,)).descriptor.extra
        (4096,)
    """

    name: str
    values: Sequence[Any] = ()
    rule: Literal["exact", "pad_up", "ignored"] = "exact"
    full_only: bool = False
    _known: dict[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where = f"Axis {self.name!r}"
        require_kind("name", where, self.name, str)
        require_kind("full_only", where, self.full_only, bool)
        rules = ("exact", "pad_up", "ignored")
        require(self.rule in rules, "rule", where, self.rule, "'exact', 'pad_up' or 'ignored'")
        require_items("values", where, self.values)
        values = tuple(self.values)
        expected = "none for 'ignored', else at least one"
        require(bool(values) is not (self.rule == "ignored"), "values", where, values, expected)
        try:
            known = {value: value for value in values}
            ordered = sorted(known) if self.rule == "pad_up" else list(known)
        except TypeError:
            expected = "hashable values, which have an order if padded up"
            raise ConfigError.bad_value(
                name="values", where=where, value=values, expected=expected
            ) from None
        object.__setattr__(self, "values", tuple(ordered))
        object.__setattr__(self, "_known", known)

    def listed(self) -> tuple[Any, ...]:
        """Return the values to capture."""
        return (None,) if self.rule == "ignored" else tuple(self.values)

    def value_for(self, value: Any) -> Any:
        """Return the captured value that serves ``value``.

        Raises:
            LookupError: no captured value does.
            TypeError: ``value`` has no hash or no order.
        """
        if self.rule == "ignored":
            return None
        if self.rule == "exact":
            return self._known[value]
        return self.values[bisect_left(self.values, value)]


def variants_of(lora: LoraCases, axes: Sequence[Axis]) -> dict[Variant, Variant]:
    """Map each variant to that of its PIECEWISE graphs, the most demanding variant first."""
    extras = list(itertools.product(*(reversed(axis.listed()) for axis in axes)))
    every = [(count, extra) for count in reversed(lora.listed()) for extra in extras]
    return {variant: variant_in_pieces(variant, axes) for variant in every}


def variant_in_pieces(variant: Variant, axes: Sequence[Axis]) -> Variant:
    """Return the variant of the PIECEWISE graphs beside a FULL graph of this variant."""
    loras, extra = variant
    pairs = zip(axes, extra, strict=True)
    return loras, tuple(None if axis.full_only else value for axis, value in pairs)


def in_variant(shape: BatchDescriptor, variant: Variant) -> BatchDescriptor:
    """Return the descriptor of a shape in a variant."""
    loras, extra = variant
    return shape._replace(has_lora=loras > 0, num_active_loras=loras, extra=extra)


# ---------------------------------------------------------------- the mode that is possible


class Resolution(NamedTuple):
    """The mode that attention and the model allow."""

    mode: CUDAGraphMode  # the mode that is possible
    query_lens: tuple[int, ...]  # lengths of uniform decode that may have FULL graphs
    bounded: bool  # decode of several lengths, up to a bound, may have FULL graphs
    # why batches other than uniform decode have a lesser mode than the wanted one, or None
    mixed_why: Fallback | None = None
    decode_why: Fallback | None = None  # why (some) decode batches have, or None

    @property
    def whys(self) -> tuple[Fallback, ...]:
        """Return the reasons for which the mode is less than the wanted one."""
        return tuple(why for why in (self.mixed_why, self.decode_why) if why is not None)


def resolve_mode(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    *,
    query_lens: Collection[int] = (1,),
    bounded: bool = False,
    piecewise: bool = True,
    support_why: str = "",
) -> Resolution:
    """Return the mode that is possible, at most ``mode``; raise ConfigError if no graph is."""
    # FULL graphs for any batch need support ALWAYS; each length of decode is judged on its own.
    if mode is NONE:
        return Resolution(NONE, (), False)
    wanted, mixed_why, decode_why = mode, None, None
    always = support is AttentionCGSupport.ALWAYS
    about = f"attention support is {support.name}" + (f" ({support_why})" if support_why else "")
    without_pieces = "the model is neither compiled piecewise nor breakable"
    if mode is FULL and not always:
        mixed_why = Fallback(Reason.ATTENTION_SUPPORT, f"{about}; FULL for any batch needs ALWAYS")
        mode = CUDAGraphMode.FULL_AND_PIECEWISE
    elif mode is CUDAGraphMode.FULL_AND_PIECEWISE and not piecewise:
        mixed_why = Fallback(Reason.NOT_PIECEWISE, without_pieces)
    if mode is CUDAGraphMode.FULL_AND_PIECEWISE and not piecewise:
        mode = CUDAGraphMode.FULL_DECODE_ONLY
    lengths = tuple(q for q in query_lens if allows_full(support, uniform_shape(q, 1)))
    if mode.separate_routine():
        expected = f"at least one length of decode for mode {wanted.name}"
        require(bool(query_lens) or bounded, "query_lens", _WHERE, (), expected)
        refused = [f"{q} tokens a request" for q in query_lens if q not in lengths]
        refused += ["mixed lengths"] if bounded and not always else []
        if refused:
            detail = f"{about}; no FULL graph for decode of {', '.join(refused)}"
            decode_why = Fallback(Reason.ATTENTION_SUPPORT, detail)
        if not lengths and not (bounded and always):
            mode = PIECEWISE
    if mode is PIECEWISE and not piecewise:
        raise ConfigError.impossible(
            what=f"mode {wanted.name}",
            because=(f"{about}, and " if wanted is not PIECEWISE else "") + without_pieces,
            instead="Take mode NONE, compile the model in mode PIECEWISE, or declare what its "
            "attention supports.",
        )
    if not mode.separate_routine():
        return Resolution(mode, (), False, mixed_why, decode_why)
    return Resolution(mode, lengths, bounded and always, mixed_why, decode_why)


# ---------------------------------------------------------------- sizes


class Ladders(NamedTuple):
    """The limits of a batch, and the capture sizes of each kind; in tokens, ascending."""

    max_num_reqs: int
    max_num_tokens: int
    sizes: tuple[int, ...]  # sizes of PIECEWISE graphs, and of FULL graphs for any batch
    decode: dict[int, tuple[int, ...]]  # query length -> sizes of uniform decode
    varlen: dict[int, tuple[int, ...]]  # largest query length -> sizes of mixed decode


def whole_numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return ``values`` sorted, without duplicates; raise unless all are whole numbers from 1."""
    require_items(name, _WHERE, values)
    listed = tuple(values)
    valid = all(is_whole(value, 1, LARGEST_TABLE) for value in listed)
    require(valid, name, _WHERE, listed, "whole numbers from 1 to 2**20")
    return tuple(sorted({int(value) for value in listed}))


def checked_ladders(
    sizes: Iterable[int],
    *,
    max_num_reqs: int,
    max_num_tokens: int | None,
    query_lens: Iterable[int] | Mapping[int, Iterable[int]],
    varlen_decode_sizes: Mapping[int, Iterable[int]] | None,
) -> Ladders:
    """Build the ladders from the arguments of the dispatcher, documented there."""
    sizes = whole_numbers("sizes", sizes)
    whole_numbers("max_num_reqs", (max_num_reqs,))
    varlen = _ladders_by_length("varlen_decode_sizes", varlen_decode_sizes)
    whole_numbers("varlen_decode_sizes", varlen)
    decode = _ladders_by_length("query_lens", query_lens) if isinstance(query_lens, Mapping) else {}
    lengths = whole_numbers("query_lens", query_lens)
    if max_num_tokens is None:
        every = itertools.chain(sizes, *decode.values(), *varlen.values())
        max_num_tokens = max(every, default=1)
    whole_numbers("max_num_tokens", (max_num_tokens,))
    if not isinstance(query_lens, Mapping):
        most = {q: min(max_num_reqs, max_num_tokens // q) for q in lengths}
        expected = f"at most max_num_tokens = {max_num_tokens}"
        for q in lengths:
            require(most[q] > 0, "query_lens", _WHERE, q, expected)
        decode = {q: decode_ladder(q, most[q], [size // q for size in sizes]) for q in lengths}
    decode = {q: decode[q] for q in lengths}  # ascending
    _require_within("sizes", sizes, max_num_tokens)
    for kind, ladders in (("query_lens", decode), ("varlen_decode_sizes", varlen)):
        exact = kind == "query_lens"
        for length, ladder in ladders.items():
            name = f"{kind}[{length}]"
            _require_within(name, ladder, max_num_tokens)
            require(bool(ladder), name, _WHERE, ladder, "at least one size")
            limit = length * max_num_reqs
            expected = f"at most {length} x max_num_reqs = {limit}"
            expected = f"multiples of {length}, {expected}" if exact else expected
            for size in ladder:
                fits = size <= limit and not (exact and size % length)
                require(fits, name, _WHERE, size, expected)
    return Ladders(max_num_reqs, max_num_tokens, sizes, decode, varlen)


def _ladders_by_length(
    name: str, ladders: Mapping[int, Iterable[int]] | None
) -> dict[int, tuple[int, ...]]:
    require_kind(name, _WHERE, ladders, Mapping, maybe=True)
    return {length: whole_numbers(name, sizes) for length, sizes in (ladders or {}).items()}


def _require_within(name: str, sizes: tuple[int, ...], max_num_tokens: int) -> None:
    expected = f"at most max_num_tokens = {max_num_tokens}"
    for size in sizes[-1:]:
        require(size <= max_num_tokens, name, _WHERE, size, expected)


def decode_ladder(query_len: int, most: int, counts: Iterable[int]) -> tuple[int, ...]:
    """Return sizes of uniform decode: request counts x query length, and the most that fits."""
    usable = {count for count in counts if 0 < count < most}
    return tuple(count * query_len for count in sorted({*usable, most}))


# ---------------------------------------------------------------- shapes, in the order of capture


class Shapes(NamedTuple):
    """The shapes to capture, by kind of batch; each list ascends."""

    piecewise: list[BatchDescriptor]  # PIECEWISE graphs; only num_tokens is set
    mixed: list[BatchDescriptor]  # FULL graphs for any batch
    decode: dict[int, list[BatchDescriptor]]  # query length -> FULL graphs of uniform decode
    # of FULL graphs for other decode, per longest query of the batch
    bounded: dict[int, list[BatchDescriptor]]


def uniform_shape(query_len: int, num_reqs: int) -> BatchDescriptor:
    """Return the shape of a decode batch in which each request has ``query_len`` tokens."""
    return BatchDescriptor(query_len * num_reqs, num_reqs, True)


def shapes_of(resolution: Resolution, ladders: Ladders) -> Shapes:
    """Return the shapes that a resolved mode captures."""
    other, most = resolution.mode.mixed_mode(), ladders.max_num_reqs
    expected = f"at least one size for mode {resolution.mode.name}"
    require(other is NONE or bool(ladders.sizes), "sizes", _WHERE, (), expected)
    mixed = [BatchDescriptor(size, min(size, most)) for size in ladders.sizes]
    return Shapes(
        [BatchDescriptor(size) for size in ladders.sizes] if other is PIECEWISE else [],
        mixed if other is FULL else [],
        {
            q: [uniform_shape(q, size // q) for size in ladders.decode[q]]
            for q in resolution.query_lens
        },
        _bounded_shapes(ladders.varlen, most) if resolution.bounded else {},
    )


def _bounded_shapes(
    ladders: Mapping[int, Iterable[int]], max_num_reqs: int
) -> dict[int, list[BatchDescriptor]]:
    """Return per longest query all shapes that serve it, by size and then by bound."""
    # No query is longer than its batch: 2 tokens in queries of at most 4 are queries of at most 2.
    pairs = sorted({(n, min(bound, n)) for bound, sizes in ladders.items() for n in sizes})
    return {
        longest: [
            BatchDescriptor(size, min(size, max_num_reqs), max_query_len=bound)
            for size, bound in pairs
            if bound >= longest
        ]
        for longest in range(1, max(bound for _, bound in pairs) + 1)
    }


def capture_order(shapes: Shapes, variants: Mapping[Variant, Variant]) -> list[Planned]:
    """List all graphs in capture order: PIECEWISE, then FULL; large sizes first."""
    full = [*shapes.mixed, *itertools.chain(*shapes.decode.values())]
    full += dict.fromkeys(itertools.chain(*shapes.bounded.values()))
    in_pieces = list(dict.fromkeys(variants.values()))
    planned: list[Planned] = []
    for mode, group, of_mode in ((PIECEWISE, shapes.piecewise, in_pieces), (FULL, full, variants)):
        for shape in sorted(group, key=_demand, reverse=True):
            planned += [(mode, in_variant(shape, variant)) for variant in of_mode]
    return planned


def _demand(shape: BatchDescriptor) -> tuple[int, int, int]:
    return shape.num_tokens, shape.num_reqs or 0, shape.max_query_len or 0


def sets_of(plan: Iterable[Planned]) -> Iterator[tuple[str, CUDAGraphMode, list[BatchDescriptor]]]:
    """Yield (title, mode, descriptors) of graphs that are captured together, in order."""
    for (mode, kind), group in itertools.groupby(plan, _set_of):
        title = f"Capturing CUDA graphs ({kind}, {mode.name})"
        yield title, mode, [descriptor for _, descriptor in group]


def _set_of(planned: Planned) -> tuple[CUDAGraphMode, str]:
    mode, descriptor = planned
    return mode, "decode" if mode is FULL and is_decode(descriptor) else "mixed"


def largest(plan: Iterable[Planned], mode: CUDAGraphMode) -> tuple[int, int]:
    """Return (tokens, requests) of the largest graph of a mode; zeros if there is none."""
    shapes = [descriptor for planned, descriptor in plan if planned is mode]
    tokens = max((shape.num_tokens for shape in shapes), default=0)
    return tokens, max((shape.num_reqs or 1 for shape in shapes), default=0)


def kind_of(descriptor: BatchDescriptor) -> Any:
    """Return a key that is equal for graphs that differ only in size."""
    lengths = (descriptor.num_reqs is None, descriptor.query_len, descriptor.max_query_len)
    return (*lengths, descriptor.has_lora, descriptor.num_active_loras, descriptor.extra)


def is_decode(descriptor: BatchDescriptor) -> bool:
    """Return whether a graph serves only decode batches."""
    return descriptor.uniform or descriptor.max_query_len is not None
