"""Which graphs there are: the mode that attention allows, times sizes, LoRA cases and axes.

Plain Python, and pure: numbers in, descriptors out. A *variant* is one combination of LoRA cases
and axes; a *shape* is a descriptor without its variant. Every shape is captured once per variant.
The rules are those of an attention backend that declares how far it goes into a FULL graph
(``AttentionCGSupport``), and of kernels that are planned for an exact number of requests: a FULL
graph of n tokens has min(n, max_num_reqs) requests, a uniform one n / q.
"""

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from cgcompile.descriptor import BatchDescriptor, allows_full
from cgcompile.errors import BatchError, ConfigError
from cgcompile.modes import AttentionCGSupport, CUDAGraphMode
from cgcompile.reasons import Fallback, Reason
from cgcompile.settings import (
    LARGEST_TABLE,
    checked,
    is_flag,
    is_whole,
    require,
    require_items,
    require_kind,
)

_WHERE = "CudagraphDispatcher"


@dataclass(frozen=True)
class LoraCases:
    """For which numbers of active LoRA adapters there are graphs. As it is: for none at all.

    Attributes:
        counts: numbers of active adapters that have graphs; a batch takes the next one that is not
            smaller. A batch that does not count its adapters (0 with ``has_lora``) takes the
            largest.
        without: batches without LoRA have graphs of their own. If not, they take the graphs of the
            smallest count, whose kernels must then cope with no adapter at all.

    Raises:
        ConfigError: a count below 1; or no count, and no graphs without LoRA either.
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

    @classmethod
    @checked
    def specialised(cls, max_loras: int) -> "LoraCases":
        """Graphs without LoRA, and for 1, 2, 4, ... up to ``max_loras``, and one more.

        The one more is for kernels that count the tokens without an adapter as a further one.
        """
        most = _max_loras(max_loras)
        powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
        return cls((*powers, most, most + 1))

    @classmethod
    @checked
    def shared(cls, max_loras: int, *, without: bool = False) -> "LoraCases":
        """One set of graphs for any number of adapters, and for none unless ``without``."""
        return cls((_max_loras(max_loras) + 1,), without)

    def listed(self) -> tuple[int, ...]:
        """The numbers to capture, 0 for "without LoRA"."""
        return (0, *self.counts) if self.without else self.counts

    def count_for(self, has_lora: bool, active: int) -> int | None:
        """The captured number that serves a batch, 0 for "without LoRA"; None if none does.

        Raises:
            BatchError: active adapters without LoRA, or fewer than 0.
        """
        if not is_flag(has_lora):
            raise BatchError.field(name="has_lora", value=has_lora, expected="bool")
        if not is_whole(active):
            raise BatchError.field(name="num_active_loras", value=active, expected="a whole number")
        if active < 0 or (active and not has_lora):
            raise BatchError.field(
                name="num_active_loras",
                value=active,
                expected="at least 0, and 0 where has_lora is False",
            )
        if not has_lora and self.without:
            return 0
        if has_lora and not active:
            return self.counts[-1] if self.counts else None
        index = bisect_left(self.counts, active)
        return self.counts[index] if index < len(self.counts) else None


def _max_loras(value: int) -> int:
    require(is_whole(value, 1), "max_loras", "LoraCases", value, "a whole number from 1")
    return int(value)


def whole_numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Return ``values`` sorted, without duplicates; raise unless all are whole numbers from 1."""
    require_items(name, _WHERE, values)
    listed = tuple(values)
    valid = all(is_whole(value, 1, LARGEST_TABLE) for value in listed)
    require(valid, name, _WHERE, listed, "whole numbers from 1 to 2**20")
    return tuple(sorted({int(value) for value in listed}))


@dataclass(frozen=True)
class Axis:
    """A further axis of the graphs' key: one value of ``extra``, at the place of this axis.

    Attributes:
        name: what messages call it.
        values: what graphs are captured for; hashable. For ``"pad_up"`` they have an order.
        rule: ``"exact"``: a batch takes graphs of its own value alone. ``"pad_up"``: of the next
            listed value that is not smaller (a bound: the graph copes with less). ``"ignored"``: of
            any; the descriptor holds None at this place, and ``values`` stays empty.
        full_only: it speaks of what is outside of pieces, such as a kernel of attention: PIECEWISE
            graphs serve every value, listed or not, and hold None at this place.

    Raises:
        ConfigError: values that do not go with the rule.
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
        object.__setattr__(self, "values", tuple(self.values))
        expected = "none for 'ignored', else at least one"
        listed = bool(self.values) is not (self.rule == "ignored")
        require(listed, "values", where, self.values, expected)
        try:
            known = {value: value for value in self.values}
            ordered = sorted(known) if self.rule == "pad_up" else list(known)
        except TypeError:
            expected = "hashable values, which have an order if padded up"
            raise ConfigError.bad_value(
                name="values", where=where, value=self.values, expected=expected
            ) from None
        object.__setattr__(self, "values", tuple(ordered))
        object.__setattr__(self, "_known", known)

    def listed(self) -> tuple[Any, ...]:
        """The values to capture."""
        return (None,) if self.rule == "ignored" else tuple(self.values)

    def value_for(self, value: Any) -> Any:
        """The captured value that serves ``value``.

        Raises:
            LookupError: none does; a value without hash or order serves nothing either.
        """
        if self.rule == "ignored":
            return None
        if self.rule == "exact":
            return self._known[value]
        return self.values[bisect_left(self.values, value)]


class Variant(NamedTuple):
    """One combination: a number of adapters (0 for "without LoRA") and a value per axis."""

    loras: int
    extra: tuple[Any, ...]

    def of(self, shape: BatchDescriptor) -> BatchDescriptor:
        """The descriptor of a shape in this variant."""
        return shape._replace(
            has_lora=self.loras > 0, num_active_loras=self.loras, extra=self.extra
        )


class Variants:
    """All combinations of LoRA cases and axes, and which one serves a batch."""

    def __init__(self, lora: LoraCases, axes: Iterable[Axis]) -> None:
        self._lora = lora
        self.axes = tuple(axes)
        require_items("axes", "CudagraphDispatcher", self.axes, Axis)

    def all(self) -> tuple[Variant, ...]:
        """Every combination, the most demanding first."""
        values = (reversed(axis.listed()) for axis in self.axes)
        extras = list(itertools.product(*values))
        return tuple(Variant(n, extra) for n in reversed(self._lora.listed()) for extra in extras)

    def in_pieces(self, variant: Variant) -> Variant:
        """The combination that PIECEWISE graphs of another one have."""
        pairs = zip(self.axes, variant.extra, strict=True)
        return variant._replace(extra=tuple(None if a.full_only else v for a, v in pairs))

    def serving(
        self, has_lora: bool, active: int, extra: tuple[Any, ...]
    ) -> tuple[Variant | None, Fallback | None]:
        """Return the variant that serves a batch, and why it has no FULL graph, or no graph.

        A reason beside a variant: PIECEWISE graphs alone serve the batch.
        """
        loras = self._lora.count_for(has_lora, active)
        if loras is None:
            limit = max(self._lora.counts, default=0)
            detail = f"{active or 'some'} active LoRA adapters; graphs have at most {limit}"
            return None, Fallback(Reason.UNLISTED_VARIANT, detail)
        if type(extra) is not tuple or len(extra) != len(self.axes):
            raise BatchError.axes(extra=extra, names=[axis.name for axis in self.axes])
        values, why = [], None
        for axis, value in zip(self.axes, extra, strict=True):
            try:
                values.append(axis.value_for(value))
            except LookupError:
                graphs = ", ".join(map(repr, axis.values))
                detail = f"axis {axis.name!r} is {value!r}; graphs have {graphs}"
                why = Fallback(Reason.UNLISTED_VARIANT, detail)
                if not axis.full_only:
                    return None, why
                values.append(None)
            except TypeError:
                raise BatchError.axes(
                    extra=extra, names=[axis.name for axis in self.axes]
                ) from None
        variant = Variant(loras, tuple(values))
        return (variant, None) if why is None else (self.in_pieces(variant), why)


_WHOLE = "neither compiled piecewise nor breakable"
_ALWAYS = AttentionCGSupport.ALWAYS

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL
DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


class Resolution(NamedTuple):
    """The mode that attention and the model allow."""

    mode: CUDAGraphMode  # what is possible
    query_lens: tuple[int, ...]  # lengths of uniform decode that may take FULL graphs
    bounded: bool  # graphs for decode of several lengths, up to a bound, may be FULL
    # why batches other than uniform decode have a lesser mode than asked for, or None
    mixed_why: Fallback | None = None
    decode_why: Fallback | None = None  # why (some) decode batches have, or None

    @property
    def whys(self) -> tuple[Fallback, ...]:
        """The reasons of all lesser modes; empty if the mode is the wanted one."""
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
    """The mode that is possible, at most ``mode``, and what was lost on the way.

    FULL graphs for any batch need ALWAYS; else FULL becomes FULL_AND_PIECEWISE, or FULL_DECODE_ONLY
    where ``piecewise`` is False. FULL graphs for uniform decode need UNIFORM_SINGLE_TOKEN_DECODE
    for one token a request, UNIFORM_BATCH for more, and ALWAYS if lengths differ up to a bound;
    each length is judged on its own. If no decode graph remains, the mode is PIECEWISE.

    Args:
        mode: what is asked for.
        support: the least that any attention of the model declares.
        query_lens: lengths of uniform decode, tokens per request.
        bounded: decode of several lengths is wanted too.
        piecewise: the model can run in pieces: it is compiled piecewise, or breakable.
        support_why: which attention it is that declares ``support``, for messages.

    Raises:
        ConfigError: graphs are asked for and none is possible.
    """
    if mode is NONE:
        return Resolution(NONE, (), False)
    wanted, mixed_why, decode_why = mode, None, None
    about = f"attention support is {support.name}" + (f" ({support_why})" if support_why else "")
    if mode is FULL and support is not _ALWAYS:
        mixed_why = Fallback(Reason.ATTENTION_SUPPORT, f"{about}; FULL for any batch needs ALWAYS")
        mode = BOTH if piecewise else DECODE_ONLY
    elif mode is BOTH and not piecewise:
        mixed_why = Fallback(
            Reason.NOT_PIECEWISE, "the model is neither compiled piecewise nor breakable"
        )
        mode = DECODE_ONLY
    lengths = tuple(q for q in query_lens if allows_full(support, uniform_shape(q, 1)))
    if mode.separate_routine():
        expected = f"at least one length of decode for mode {wanted.name}"
        require(bool(query_lens) or bounded, "query_lens", _WHERE, (), expected)
        refused = [f"{q} tokens a request" for q in query_lens if q not in lengths]
        refused += ["mixed lengths"] if bounded and support is not _ALWAYS else []
        if refused:
            detail = f"{about}; no FULL graph for decode of {', '.join(refused)}"
            decode_why = Fallback(Reason.ATTENTION_SUPPORT, detail)
        if not lengths and not (bounded and support is _ALWAYS):
            mode = PIECEWISE
    if mode is PIECEWISE and not piecewise:
        because = f"{about}, and " if wanted is not PIECEWISE else ""
        raise ConfigError.impossible(
            what=f"mode {wanted.name}",
            because=f"{because}the model is {_WHOLE}",
            instead="Take mode NONE, compile the model in mode PIECEWISE, or declare what its "
            "attention supports.",
        )
    separate = mode.separate_routine()
    return Resolution(
        mode, lengths if separate else (), separate and bounded and support is _ALWAYS,
        mixed_why, decode_why,
    )  # fmt: skip


def uniform_shape(query_len: int, num_reqs: int) -> BatchDescriptor:
    """The shape of a decode batch in which each request has ``query_len`` tokens."""
    return BatchDescriptor(query_len * num_reqs, num_reqs, True)


class Limits(NamedTuple):
    """The largest batch: what the static buffers hold."""

    max_num_reqs: int
    max_num_tokens: int

    def sizes(self, name: str, values: Iterable[int]) -> tuple[int, ...]:
        """Return sizes sorted, without duplicates; raise if one is invalid or above the limit."""
        sizes = whole_numbers(name, values)
        expected = f"at most max_num_tokens = {self.max_num_tokens}"
        for size in sizes[-1:]:
            require(size <= self.max_num_tokens, name, _WHERE, size, expected)
        return sizes

    def sizes_of_requests(
        self, name: str, values: Iterable[int], per_request: int, *, exact: bool
    ) -> tuple[int, ...]:
        """Return sizes of batches whose requests have (at most) ``per_request`` tokens each."""
        sizes = self.sizes(name, values)
        require(bool(sizes), name, _WHERE, sizes, "at least one size")
        limit = per_request * self.max_num_reqs
        kind = f"multiples of {per_request}, " if exact else ""
        expected = f"{kind}at most {per_request} x max_num_reqs = {limit}"
        for size in sizes:
            fits = size <= limit and not (exact and size % per_request)
            require(fits, name, _WHERE, size, expected)
        return sizes


class Ladders(NamedTuple):
    """The capture sizes of all kinds of batch, checked; in tokens, ascending."""

    sizes: tuple[int, ...]  # of PIECEWISE graphs, and of FULL graphs for any batch
    decode: Mapping[int, tuple[int, ...]]  # of uniform decode, per query length
    varlen: Mapping[int, tuple[int, ...]]  # of decode of several lengths, per bound
    limits: Limits  # the largest batch

    @classmethod
    def of(
        cls,
        sizes: Iterable[int],
        *,
        max_num_reqs: int,
        max_num_tokens: int | None = None,
        query_lens: Iterable[int] | None = None,
        decode_num_reqs: Iterable[int] | None = None,
        decode_sizes: Mapping[int, Iterable[int]] | None = None,
        varlen_decode_sizes: Mapping[int, Iterable[int]] | None = None,
    ) -> "Ladders":
        """Build the ladders from the arguments of the dispatcher, documented there."""
        for name, rows in (("decode", decode_sizes), ("varlen_decode", varlen_decode_sizes)):
            require_kind(f"{name}_sizes", _WHERE, rows, Mapping, maybe=True)
        if decode_num_reqs is not None:
            require_items("decode_num_reqs", _WHERE, decode_num_reqs)
        sizes = whole_numbers("sizes", sizes)
        whole_numbers("max_num_reqs", (max_num_reqs,))
        decode = {q: whole_numbers("decode_sizes", n) for q, n in (decode_sizes or {}).items()}
        varlen = {
            bound: whole_numbers("varlen_decode_sizes", values)
            for bound, values in (varlen_decode_sizes or {}).items()
        }
        whole_numbers("varlen_decode_sizes", varlen)
        default = (1,) if decode_sizes is None else decode
        lengths = whole_numbers("query_lens", default if query_lens is None else query_lens)
        counts = None if decode_num_reqs is None else tuple(decode_num_reqs)
        if decode_sizes is not None and (counts is not None or lengths != tuple(sorted(decode))):
            raise ConfigError.impossible(
                what="decode_sizes beside decode_num_reqs or other query_lens",
                because="both say which sizes uniform decode has",
                instead="Give decode_sizes alone, or the other two.",
            )
        if max_num_tokens is None:
            most = [q * min(max(counts), max_num_reqs) for q in lengths] if counts else []
            every = itertools.chain(sizes, most, *decode.values(), *varlen.values())
            max_num_tokens = max(every, default=1)
        whole_numbers("max_num_tokens", (max_num_tokens,))
        limits = Limits(max_num_reqs, max_num_tokens)
        if decode_sizes is None:
            if counts is not None:
                counts = whole_numbers("decode_num_reqs", counts)
            decode = {q: _decode_ladder(q, counts, sizes, limits) for q in lengths}
        return cls(
            limits.sizes("sizes", sizes),
            {
                q: limits.sizes_of_requests(f"decode_sizes[{q}]", decode[q], q, exact=True)
                for q in lengths
            },
            {
                bound: limits.sizes_of_requests(
                    f"varlen_decode_sizes[{bound}]", values, bound, exact=False
                )
                for bound, values in varlen.items()
            },
            limits,
        )


def _decode_ladder(
    query_len: int, counts: Iterable[int] | None, sizes: Iterable[int], limits: Limits
) -> tuple[int, ...]:
    """Token counts of uniform decode: request counts x query length, and the most that fits.

    Without counts, each of ``sizes`` gives the requests that fit into it, so that no batch is
    padded to more than the next of ``sizes``.
    """
    most = min(limits.max_num_reqs, limits.max_num_tokens // query_len)
    expected = f"at most max_num_tokens = {limits.max_num_tokens}"
    require(most > 0, "query_lens", _WHERE, query_len, expected)
    wanted = (size // query_len for size in sizes) if counts is None else counts
    usable = {count for count in wanted if 0 < count < most}
    return tuple(count * query_len for count in sorted({*usable, most}))


class Shapes(NamedTuple):
    """The shapes to capture, by kind of batch; each list ascends."""

    piecewise: list[BatchDescriptor]  # of PIECEWISE graphs: tokens alone
    mixed: list[BatchDescriptor]  # of FULL graphs for any batch
    decode: dict[int, list[BatchDescriptor]]  # of FULL graphs for uniform decode, per query length
    # of FULL graphs for other decode, per longest query of the batch
    bounded: dict[int, list[BatchDescriptor]]


def shapes_of(resolution: Resolution, ladders: Ladders) -> Shapes:
    """The shapes that a resolved mode captures."""
    shapes = Shapes([], [], {}, {})
    other = resolution.mode.mixed_mode()
    expected = f"at least one size for mode {resolution.mode.name}"
    require(other is NONE or bool(ladders.sizes), "sizes", _WHERE, (), expected)
    most = ladders.limits.max_num_reqs
    if other is PIECEWISE:
        shapes.piecewise.extend(BatchDescriptor(size) for size in ladders.sizes)
    if other is FULL:
        shapes.mixed.extend(BatchDescriptor(size, min(size, most)) for size in ladders.sizes)
    for q in resolution.query_lens:
        shapes.decode[q] = [uniform_shape(q, size // q) for size in ladders.decode[q]]
    if resolution.bounded:
        shapes.bounded.update(_bounded_shapes(ladders.varlen, most))
    return shapes


def _bounded_shapes(
    ladders: Mapping[int, Iterable[int]], max_num_reqs: int
) -> dict[int, list[BatchDescriptor]]:
    """Per longest query all shapes that serve it, by size, of one size the nearest bound first.

    No query is longer than its batch: a graph of 2 tokens for queries of at most 4 is one for
    queries of at most 2.
    """
    pairs = {(n, min(bound, n)) for bound, sizes in ladders.items() for n in sizes}
    table = {}
    for longest in range(1, max(bound for _, bound in pairs) + 1):
        table[longest] = [
            BatchDescriptor(size, min(size, max_num_reqs), max_query_len=bound)
            for size, bound in sorted(pairs)
            if bound >= longest
        ]
    return table


Planned = tuple[CUDAGraphMode, BatchDescriptor]


def capture_order(shapes: Shapes, variants: Mapping[Variant, Variant]) -> list[Planned]:
    """List all graphs: PIECEWISE, then FULL, the largest first, of one size the most demanding.

    ``variants`` maps each variant to the variant of its PIECEWISE graphs.
    """
    full = [*shapes.mixed, *itertools.chain(*shapes.decode.values())]
    full += dict.fromkeys(itertools.chain(*shapes.bounded.values()))
    in_pieces = list(dict.fromkeys(variants.values()))
    planned: list[Planned] = []
    for mode, group, of_mode in ((PIECEWISE, shapes.piecewise, in_pieces), (FULL, full, variants)):
        for shape in sorted(group, key=_demand, reverse=True):
            planned += [(mode, variant.of(shape)) for variant in of_mode]
    return planned


def _demand(shape: BatchDescriptor) -> tuple[int, int, int]:
    return shape.num_tokens, shape.num_reqs or 0, shape.max_query_len or 0


def sets_of(plan: Iterable[Planned]) -> Iterator[tuple[str, CUDAGraphMode, list[BatchDescriptor]]]:
    """(title, mode, descriptors) of what is captured together, in the order of the plan."""
    for (mode, kind), group in groupby(plan, _kind):
        title = f"Capturing CUDA graphs ({kind}, {mode.name})"
        yield title, mode, [descriptor for _, descriptor in group]


def largest(plan: Iterable[Planned], mode: CUDAGraphMode) -> tuple[int, int]:
    """(tokens, requests) of the largest graph of a mode; zeros if there is none."""
    shapes = [descriptor for planned, descriptor in plan if planned is mode]
    tokens = max((shape.num_tokens for shape in shapes), default=0)
    return tokens, max((shape.num_reqs or 1 for shape in shapes), default=0)


def _kind(planned: Planned) -> tuple[CUDAGraphMode, str]:
    mode, descriptor = planned
    return mode, "decode" if mode is FULL and is_decode(descriptor) else "mixed"


def kind_of(descriptor: BatchDescriptor) -> Any:
    """Return what graphs that differ in nothing but size have in common."""
    lengths = (descriptor.num_reqs is None, descriptor.query_len, descriptor.max_query_len)
    return (*lengths, descriptor.has_lora, descriptor.num_active_loras, descriptor.extra)


def is_decode(descriptor: BatchDescriptor) -> bool:
    """Return whether a graph serves decode alone."""
    return descriptor.uniform or descriptor.max_query_len is not None
